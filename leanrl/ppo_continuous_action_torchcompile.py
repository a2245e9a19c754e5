# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "gymnasium[mujoco]>=1.4,<1.5", "numpy>=1.26", "tqdm>=4.66", "tyro>=1.0",
#   "tensordict>=0.15,<0.16",
# ]
# ///
"""Proximal policy optimisation, PPO, for continuous actions (Schulman et al. 2017, https://arxiv.org/abs/1707.06347).

An on-policy method: the policy collects a rollout, generalised advantages say which actions were better than the critic
had expected, and a few epochs of minibatches raise their probability, but no further than a clipped ratio allows.
`ppo_continuous_action.py` is the eager reference; `ppo_continuous_action_torchcompile.py` is the same at full speed.

    python leanrl/ppo_continuous_action.py --env-id HalfCheetah-v4 --seed 1
    python leanrl/ppo_continuous_action_torchcompile.py --env-id HalfCheetah-v4 --seed 1 --compile --cudagraphs

Published returns at 1M steps (CleanRL): HalfCheetah-v4 1,443 ± 46, Walker2d-v4 2,288 ± 572. Ours are in the README.
To copy the algorithm alone, put the short `Run` of the README in the place of the part "Checks and recording".
"""

import collections
import contextlib
import difflib
import fcntl
import importlib.metadata
import importlib.util
import io
import json
import logging
import math
import os
import platform
import random
import re
import resource
import shutil
import signal
import sys
import sysconfig
import time
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, NoReturn, get_args

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import tyro
from tensordict.nn import CudaGraphModule
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

# Types of arguments, with the ranges that `check_args` tells of and enforces
Seed = Annotated[int, ("must lie in [0, 2**32)", 0, 2**32 - 1)]
Count = Annotated[int, ("must lie in [1, 2**31)", 1, 2**31 - 1)]
Natural = Annotated[int, ("must lie in [0, 2**31)", 0, 2**31 - 1)]
Positive = Annotated[float, ("must lie in (0, 1e30]", sys.float_info.min, 1e30)]
NonNegative = Annotated[float, ("must lie in [0, 3.4e38]", 0, 3.4e38)]
Fraction = Annotated[float, ("must lie in [0, 1]", 0, 1)]


@dataclass
class Args:
    seed: Seed = 1
    """seed of every random number: environments, networks, exploration, replay"""
    env_id: str = "HalfCheetah-v4"
    """id of the environment: Gymnasium's, module:Id; EnvPool's Atari (ppo_atari_envpool, Ray), MiniGrid (memory)"""
    total_timesteps: Count = 1_000_000
    """length of the run, in environment steps summed over all environments"""
    num_envs: Count = 1
    """number of environments stepped side by side"""
    cuda: bool = True
    """train on CUDA where there is a device, else on the CPU"""
    torch_deterministic: bool = True
    """use repeatable kernels: cuDNN's, cuBLAS's, and those that Inductor compiles"""
    track: bool = False
    """send the metrics to Weights & Biases as well (needs the wandb package)"""
    wandb_project: str = "leanrl"
    """Weights & Biases project"""
    wandb_entity: str | None = None
    """Weights & Biases team or user; your default one if not given"""
    output_dir: str = "runs"
    """folder in which the run's own folder is made"""
    measure_burnin: Natural = 100
    """environment steps after the first update before fps is measured"""
    save_every: Natural = 0
    """environment steps between two checkpoints; 0: one at the end, also after Ctrl-C, SIGTERM, SIGHUP or a failure"""
    resume: str | None = None
    """folder of the run to go on with, under its own arguments; environments begin new episodes, PPO a new rollout"""

    num_steps: Count = 2048
    """steps of each environment in a rollout"""
    gamma: Fraction = 0.99
    """discount factor, per step"""
    gae_lambda: Fraction = 0.95
    """λ of the generalised advantage estimates"""
    learning_rate: Positive = 3e-4
    """learning rate of Adam"""
    anneal_lr: bool = True
    """let the learning rate fall linearly to 0 over the run"""
    num_minibatches: Count = 32
    """minibatches into which an epoch divides a rollout"""
    update_epochs: Count = 10
    """epochs over each rollout"""
    norm_adv: bool = True
    """normalise the advantages of each minibatch"""
    clip_coef: Positive = 0.2
    """ε: the ratio of new to old probability is clipped to [1 - ε, 1 + ε]"""
    clip_vloss: bool = True
    """clip the change of the value to ±clip_coef, too"""
    ent_coef: NonNegative = 0.0
    """weight of the entropy in the loss"""
    vf_coef: NonNegative = 0.5
    """weight of the value loss"""
    max_grad_norm: Positive = 0.5
    """norm at which the gradient is clipped"""
    target_kl: Positive | None = None
    """approximate KL divergence after which no further epoch of a rollout follows; none if not given"""

    compile: bool = False
    """compile the steps with torch.compile"""
    cudagraphs: bool = False
    """capture the steps in CUDA graphs"""


# ---- Environments ----
def with_vectors(env: gym.Env) -> gym.Env:
    """The environment; a Dict of Boxes, which dm_control's tasks and those with a goal show, becomes one vector."""
    space = env.observation_space
    if not isinstance(space, gym.spaces.Dict) or {type(part) for part in space.values()} != {gym.spaces.Box}:
        return env

    def flat(observation: Mapping[str, np.ndarray]) -> np.ndarray:
        return np.concatenate([np.ravel(observation[name]) for name in space])  # of whatever type they are in truth

    return gym.wrappers.TransformObservation(env, flat, gym.spaces.flatten_space(space))


def make_environments(args: Args) -> list[gym.Env]:
    """The environments; ends the program with exit status 2 if they can't be made."""
    # Keeps MuJoCo's notices about the -v4 models out of the terminal and of a MUJOCO_LOG.TXT in this folder
    if importlib.util.find_spec("mujoco") is not None:
        import mujoco

        mujoco.set_mju_user_warning(lambda message: None)
    sys.path.append(os.getcwd())  # for a `module:Id`
    try:
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            return [with_vectors(gym.make(args.env_id, disable_env_checker=True)) for _ in range(args.num_envs)]
    except (Exception, SystemExit) as error:  # a module that the environment comes from may raise anything
        nearest = ", ".join(difflib.get_close_matches(args.env_id, gym.registry, cutoff=0.4)) or "none"
        is_known = args.env_id.rpartition(":")[2] in gym.registry
        problem = "this environment can't be made" if is_known else f"no such environment; nearest names: {nearest}"
        fail("env_id", args.env_id, f"{problem} ({(str(error).strip() or repr(error)).partition(chr(10))[0]})")


def first_observations(envs: Sequence[gym.Env], seed: int, step: int) -> list[np.ndarray]:
    """First resets; each environment has a seed of its own, made of --seed and of the step resumed at (else 0)."""
    seeds = np.random.SeedSequence([seed, step]).generate_state(2 * len(envs)).tolist()
    for env, action_seed in zip(envs, seeds[len(envs) :], strict=True):
        env.action_space.seed(action_seed)
    return [env.reset(seed=reset_seed)[0] for env, reset_seed in zip(envs, seeds, strict=False)]


class ActionRange:
    """The policy's actions as the space's own: in units of half its range, from its middle, clipped to its bounds.

    A range without an end, or nearly so, is taken as if it were [-1, 1], but for the clipping.
    """

    def __init__(self, space: gym.spaces.Box):
        self.low, self.high = space.low[None], space.high[None]  # for [1, A] NumPy is faster than at broadcasting
        half_width = (self.high / 2 - self.low / 2).astype(np.float64)
        is_endless = half_width > 1e9  # dm_control writes ±1e10 for no limit
        low, high = np.where(is_endless, -1, self.low), np.where(is_endless, 1, self.high)
        self.middle, self.half_width = low / 2 + high / 2, high / 2 - low / 2

    def __call__(self, action: np.ndarray) -> np.ndarray:
        """[N, A] -> [N, A], of the space's type."""
        action = self.middle + self.half_width * action
        return np.minimum(np.maximum(action, self.low), self.high).astype(self.low.dtype, copy=False)


# ---- Networks ----
def orthogonal(layer: nn.Module, gain: float) -> nn.Module:
    """The layer with orthogonal weights, scaled by `gain`, and biases of zero."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def mlp(inputs: int, outputs: int, gain: float) -> nn.Sequential:
    """Two hidden layers of 64 tanh units; `gain` scales the last layer's weights."""
    hidden = [orthogonal(nn.Linear(size, 64), math.sqrt(2)) for size in (inputs, 64)]
    return nn.Sequential(hidden[0], nn.Tanh(), hidden[1], nn.Tanh(), orthogonal(nn.Linear(64, outputs), gain))


class GaussianActorCritic(nn.Module):
    """Mean and log standard deviation of the policy's Gaussian, and the value; [..., D] -> [..., A], [A], [...].

    The deviation does not depend on the observation.
    """

    def __init__(self, observation_dim: int, action_dim: int):
        super().__init__()
        self.actor = mlp(observation_dim, action_dim, 0.01)
        self.critic = mlp(observation_dim, 1, 1.0)
        self.log_std = nn.Parameter(torch.zeros(action_dim))

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.actor(observation), self.log_std, self.critic(observation).squeeze(-1)


def gaussian_log_prob(mean: torch.Tensor, log_std: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
    """Log-probability of actions with independent dimensions; [..., A], [A], [..., A] -> [...]."""
    return (-0.5 * ((action - mean) / log_std.exp()).square() - log_std - 0.5 * math.log(2 * math.pi)).sum(-1)


def linear_schedule(start: float, end: float, duration: float, step: int) -> float:
    """Falls (or rises) linearly from `start` at step 0 to `end` at step `duration`, and stays there."""
    return end if step >= duration else start + (end - start) * step / duration


# ---- Normalisation ----
def sum_of_rows(rows: np.ndarray) -> np.ndarray:
    """[N, size] -> [1, size]; of a single row, as one environment gives, without NumPy, which takes longer."""
    return rows if len(rows) == 1 else rows.sum(0, keepdims=True)


class RunningMoments:
    """Mean and variance of all rows seen, each of `size` (Welford 1962, for several rows at a time)."""

    def __init__(self, size: int):
        self.count, self.mean, self.squares = 1e-4, np.zeros((1, size)), np.full((1, size), 1e-4)

    def state_dict(self) -> dict:
        return {"count": self.count, "mean": self.mean.tolist(), "squares": self.squares.tolist()}

    def load_state_dict(self, state: Mapping) -> None:
        self.count, self.mean[:], self.squares[:] = state["count"], state["mean"], state["squares"]

    def update(self, rows: np.ndarray) -> np.ndarray:
        """Takes rows in and returns their distance from the new mean; [N, size] -> [N, size]."""
        self.count += len(rows)
        distance = rows - self.mean
        self.mean += sum_of_rows(distance) / self.count
        new_distance = rows - self.mean
        self.squares += sum_of_rows(distance * new_distance)
        return new_distance

    def deviation(self) -> np.ndarray:
        """The rows' standard deviation; [1, size]."""
        return np.sqrt(self.squares / self.count + 1e-8)


class RunningVariance:
    """Variance of all numbers seen (Welford 1962), one at a time and without arrays, which take longer."""

    def __init__(self):
        self.count, self.mean, self.squares = 1e-4, 0.0, 1e-4

    def state_dict(self) -> dict:
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    def load_state_dict(self, state: Mapping) -> None:
        self.count, self.mean, self.squares = state["count"], state["mean"], state["squares"]

    def update(self, number: float) -> None:
        self.count += 1
        deviation = number - self.mean
        self.mean += deviation / self.count
        self.squares += deviation * (number - self.mean)


# ---- Host and device ----
def mirrored(*shape: int, device: torch.device, dtype=torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Zeros in the host's memory, pinned for CUDA, and on `device`; for a CPU they are the same tensor."""
    host = torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")
    return host, host.to(device)


# ---- Rollout ----
class Rollout:
    """`num_steps` steps of `num_envs` environments: NumPy arrays to fill, [T, N, ...], and tensors on `device`."""

    def __init__(self, num_steps: int, num_envs: int, shapes: Mapping[str, tuple[int, ...]], device: torch.device):
        self.pairs = {name: mirrored(num_steps, num_envs, *shape, device=device) for name, shape in shapes.items()}
        self.arrays = {name: host.numpy() for name, (host, _) in self.pairs.items()}
        self.tensors = {name: tensor for name, (_, tensor) in self.pairs.items()}

    def upload(self) -> None:
        """Sends the arrays to the device."""
        for host, tensor in self.pairs.values():
            tensor.copy_(host, non_blocking=True)


# ---- Advantages ----
def discounted_sums(values: torch.Tensor, discounts: torch.Tensor) -> torch.Tensor:
    """x[t] = values[t] + discounts[t] · x[t + 1], backwards, in log2(T) steps (Hillis and Steele 1986); all [T, N]."""
    reach = 1
    while reach < len(values):
        values = torch.cat([values[:-reach] + discounts[:-reach] * values[reach:], values[-reach:]])
        discounts = torch.cat([discounts[:-reach] * discounts[reach:], discounts[-reach:]])
        reach *= 2
    return values


# ---- For compilation and capture ----
class FusedLinear(nn.Linear):
    """When compiled, keeps the bias out of addmm, which copies it, by [None]: Inductor fuses it with what follows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((x @ self.weight.mT)[None] + self.bias)[0] if torch.compiler.is_compiling() else super().forward(x)


class FlatModule:
    """A module as a function of its parameters in one vector, [P], one tensor to an optimiser. It holds no buffers."""

    def __init__(self, module: nn.Module):
        self.module, self.shapes = module, {name: p.shape for name, p in module.named_parameters()}
        # A matrix's rows in memory are its longer side: BLAS is slow at short ones, of few inputs or few outputs
        self.transposed = [p.ndim == 2 and p.shape[0] >= p.shape[1] for p in module.parameters()]
        parts = [p.mT if transposed else p for p, transposed in zip(module.parameters(), self.transposed, strict=True)]
        self.initial = torch.cat([part.flatten() for part in parts]).detach()  # the module's own parameters; [P]
        self.trained = [p.requires_grad for p in module.parameters()]
        for layer in (m for m in module.modules() if type(m) is nn.Linear and m.bias is not None):
            layer.__class__ = FusedLinear

    def split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The module's parameters, in their order, as views of `flat`, [P] or longer."""
        sizes = [shape.numel() for shape in self.shapes.values()]
        parts = zip(flat.split([*sizes, len(flat) - sum(sizes)]), self.shapes.values(), self.transposed, strict=False)
        return [part.view(shape[::-1]).mT if transposed else part.view(shape) for part, shape, transposed in parts]

    def __call__(self, flat: torch.Tensor, *inputs: torch.Tensor):
        parts = zip(self.shapes, self.split(flat), self.trained, strict=True)
        own = {name: part if is_trained else part.detach() for name, part, is_trained in parts}
        return torch.func.functional_call(self.module, own, inputs)


class Adam(nn.Module):
    """Adam (Kingma and Ba 2015, algorithm 1) on one tensor, in place, with all its state on the device."""

    def __init__(self, like: torch.Tensor, lr: float, eps: float = 1e-8):
        super().__init__()
        self.first_moment, self.second_moment = (nn.Buffer(torch.zeros_like(like)) for _ in range(2))
        self.powers = nn.Buffer(like.new_ones(2))  # β1^t, β2^t: computed from t they would cost every element
        self.lr, self.betas, self.eps = nn.Buffer(like.new_tensor(lr)), like.new_tensor([0.9, 0.999]), eps

    def step(self, parameters: torch.Tensor, gradient: torch.Tensor) -> None:
        self.powers.mul_(self.betas)
        first_correction, second_correction = (1 - self.powers).unbind()
        self.first_moment.lerp_(gradient, 1 - 0.9)  # the betas above, as numbers
        self.second_moment.lerp_(gradient.square(), 1 - 0.999)
        deviation = (self.second_moment / second_correction).sqrt() + self.eps
        parameters.sub_(self.lr * (self.first_moment / first_correction) / deviation)


def warm_up(steps: list, agent: nn.Module, run: "Run") -> None:
    """Compiles and captures the steps by running them, then puts back random numbers and what is in `state_dict`."""
    started, before = run.now(), {name: value.clone() for name, value in agent.state_dict().items()}
    devices = [run.device] if run.device.type == "cuda" else []
    # Inductor warns that TF32 is off, and of a softmax that it could have made faster
    with torch.random.fork_rng(devices), warnings.catch_warnings(action="ignore", category=UserWarning):
        for step in 5 * steps:  # `CudaGraphModule` runs it twice, captures it, and replays it
            step()
    agent.load_state_dict(before)
    run.warmup_seconds += run.now() - started
    run.last_log = (run.global_step, time.perf_counter())  # no line of metrics counts this time


# ---- Agent ----
class CompiledContinuousPPOAgent(nn.Module):
    """The networks, their optimiser, and the update on them; a loss is a function of what it is differentiated by."""

    def __init__(self, args: Args, env: gym.Env, device: torch.device):
        super().__init__()
        self.args, self.device = args, device
        observation_dim, action_dim = env.observation_space.shape[0], env.action_space.shape[0]
        self.to_range = ActionRange(env.action_space)
        self.observation_moments, self.return_variance = RunningMoments(observation_dim), RunningVariance()
        self.returns = [0.0] * args.num_envs
        shapes = {"observation": (observation_dim,), "next_observation": (observation_dim,), "action": (action_dim,)}
        shapes |= {name: () for name in ("reward", "terminated", "truncated")}
        self.rollout = Rollout(args.num_steps, args.num_envs, shapes, device)
        self.module = FlatModule(GaussianActorCritic(observation_dim, action_dim))
        self.network = nn.Buffer(self.module.initial.to(device))
        self.optimizer = Adam(self.network, args.learning_rate, eps=1e-5)
        size = args.num_steps * args.num_envs
        estimates = {name: torch.zeros(size, device=device) for name in ("log_prob", "value", "advantage", "return")}
        self.batch = {name: self.rollout.tensors[name].flatten(0, 1) for name in ("observation", "action")} | estimates
        # Of a fixed address, where the captured update of the compiled script reads its rows
        self.minibatch = torch.zeros(size // args.num_minibatches, dtype=torch.long, device=device)
        names = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction")
        self.losses = {name: torch.zeros((), device=device) for name in names}
        self.clip_coef = torch.tensor(args.clip_coef, device=device)
        probe = torch.linspace(-1, 1, args.num_envs * observation_dim).view(args.num_envs, -1)
        initial = self.module.initial
        computed, own = self.host_policy(probe.numpy(), initial), self.policy_and_value(initial, probe)[0]
        if computed.shape != own.shape or not np.allclose(computed, own.numpy(force=True), rtol=1e-3, atol=1e-5):
            raise ValueError("`act` computes another network, in NumPy, than the module: change it, too")

    def normalize(self, observation: np.ndarray) -> np.ndarray:
        """Takes raw observations into the statistics; their distance from the mean in deviations, clipped to ±10."""
        moments = self.observation_moments
        distance = moments.update(observation)
        return (distance / moments.deviation()).clip(-10, 10).astype(np.float32)

    def scale_rewards(self, rewards: Sequence[float], ended: Sequence[int]) -> list[float]:
        """Rewards in standard deviations of the discounted return, clipped to ±10; [num_envs]."""
        rewards = [float(reward) for reward in rewards]
        for i, reward in enumerate(rewards):
            self.returns[i] = self.returns[i] * self.args.gamma + reward
            self.return_variance.update(self.returns[i])
        for i in ended:
            self.returns[i] = 0.0
        deviation = math.sqrt(self.return_variance.squares / self.return_variance.count + 1e-8)
        return [min(max(reward / deviation, -10.0), 10.0) for reward in rewards]

    def policy_and_value(self, network, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Mean and log standard deviation of the actions, and the value; [..., D] -> [..., A], [A], [...]."""
        return self.module(network, observation)

    def host_policy(self, observation: np.ndarray, network: torch.Tensor | None = None) -> np.ndarray:
        """Means; [num_envs, observation_dim] -> [num_envs, A]. In NumPy: no transfer and no compiled call."""
        if network is not None:  # its policy is the one from now on
            parts = self.module.split(network)
            parts = {name: part.numpy().T for name, part in zip(self.module.shapes, parts, strict=True)}
            self.log_std, layers = parts["log_std"], [p for name, p in parts.items() if name.startswith("actor.")]
            # Biases with a row for each environment: NumPy is faster at adding equal shapes than at broadcasting
            layers[1::2] = [np.tile(bias, (self.args.num_envs, 1)) for bias in layers[1::2]]
            self.host_layers = [*zip(layers[::2], layers[1::2], strict=True)]
        *hidden, (weight, bias) = self.host_layers
        for hidden_weight, hidden_bias in hidden:
            observation = np.tanh(observation.dot(hidden_weight) + hidden_bias)
        return observation.dot(weight) + bias

    def act(self, t: int, observation: np.ndarray) -> np.ndarray:
        """Sampled actions, which go into row `t` of the rollout, too; [num_envs, observation_dim] -> [num_envs, A]."""
        mean = self.host_policy(observation, self.network.to("cpu", copy=True) if t == 0 else None)
        if t == 0:  # draw noise for all steps
            self.noise = np.random.normal(scale=np.exp(self.log_std), size=self.rollout.arrays["action"].shape)
        action = mean + self.noise[t]
        self.rollout.arrays["action"][t] = action
        return self.rollout.arrays["action"][t]

    @torch.no_grad()
    def prepare(self) -> None:
        """Makes the rollout a batch of [T * N], with advantages by GAE (Schulman et al. 2016, eq. 16).

        A[t] = δ[t] + γλ (1 - done[t]) A[t + 1], with the TD error δ. A truncated episode's last value is that of its
        true last observation; a terminated one's is 0.
        """
        args, rollout = self.args, self.rollout.tensors
        log_prob, _, value = self.evaluate(self.network, rollout["observation"], rollout["action"])
        *_, next_value = self.policy_and_value(self.network, rollout["next_observation"])
        td_error = rollout["reward"] + args.gamma * (1 - rollout["terminated"]) * next_value - value
        not_done = 1 - torch.maximum(rollout["terminated"], rollout["truncated"])
        advantage = discounted_sums(td_error, args.gamma * args.gae_lambda * not_done)
        estimates = {"log_prob": log_prob, "value": value, "advantage": advantage, "return": advantage + value}
        for name, estimate in estimates.items():
            self.batch[name].copy_(estimate.flatten())

    def evaluate(self, network, observation: torch.Tensor, action: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Log-probabilities of actions, the policy's entropy, and the value; [..., D], [..., A] -> [...], [], [...]."""
        mean, log_std, value = self.policy_and_value(network, observation)
        return gaussian_log_prob(mean, log_std, action), (log_std + 0.5 * math.log(2 * math.pi * math.e)).sum(), value

    def ppo_loss(self, network, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss of a minibatch, minus the objective of eq. 9, and what is logged of it."""
        args, advantage = self.args, batch["advantage"]
        log_prob, entropy, value = self.evaluate(network, batch["observation"], batch["action"])
        log_ratio = log_prob - batch["log_prob"]
        ratio = log_ratio.exp()
        if args.norm_adv:
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        clipped_ratio = ratio.clamp(1 - self.clip_coef, 1 + self.clip_coef)
        policy_loss = -torch.minimum(ratio * advantage, clipped_ratio * advantage).mean()
        squared_error = (value - batch["return"]).square()
        if args.clip_vloss:
            clipped_value = batch["value"] + (value - batch["value"]).clamp(-self.clip_coef, self.clip_coef)
            squared_error = torch.maximum(squared_error, (clipped_value - batch["return"]).square())
        value_loss, entropy = 0.5 * squared_error.mean(), entropy.mean()
        approx_kl = (ratio - 1 - log_ratio).mean()  # Schulman's estimator, http://joschu.net/blog/kl-approx.html
        clip_fraction = ((ratio - 1).abs() > self.clip_coef).float().mean()
        logged = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
        logged |= {"approx_kl": approx_kl, "clip_fraction": clip_fraction}
        return policy_loss - args.ent_coef * entropy + args.vf_coef * value_loss, logged

    def learn(self) -> None:
        """One step of the optimiser on the rows that `minibatch` names."""
        batch = {name: tensor[self.minibatch] for name, tensor in self.batch.items()}
        gradient, (_, logged) = torch.func.grad_and_value(self.ppo_loss, has_aux=True)(self.network, batch)
        self.optimizer.step(self.network, gradient * (self.args.max_grad_norm / (gradient.norm() + 1e-6)).clamp(max=1))
        for name, tensor in logged.items():
            self.losses[name].copy_(tensor.detach())


def main(args: Args) -> None:
    check_args(args)
    check_rollout(args, args.num_envs * args.num_steps)
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    if args.torch_deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)  # a network this small is slower on several
    envs = make_environments(args)
    check_continuous_spaces(args, envs[0])
    torch.set_flush_denormal(True)  # moments of Adam that die away would become the CPU's slowest numbers
    with room_for(args):
        agent = CompiledContinuousPPOAgent(args, envs[0], device)
    rollout = agent.rollout.arrays

    with contextlib.ExitStack() as stack, Run(args, device, agent) as run:
        for env in envs:
            stack.enter_context(env)  # which closes it in the end
        # Compilation and capture: full graphs to prepare a rollout and to update
        steps = [agent.learn, agent.prepare]  # in place: a captured step would copy arguments and results
        if args.compile:
            torch.compiler.reset()  # forgets what earlier runs in this process have compiled
            options = {"fallback_random": True, "deterministic": args.torch_deterministic}  # eager's draws
            options |= {"cpp_wrapper": device.type == "cpu", "cpp.vec_isa_ok": True, "size_asserts": False}  # no checks
            options |= {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}  # any number is a constant
            options |= {"cpp.use_decompose_tanh": True}  # written with exp, which vectorises: off by about 1e-7
            steps = [torch.compile(step, fullgraph=True, options=dict(options)) for step in steps]  # it pops the filter
        if args.cudagraphs:
            logging.getLogger("tensordict").setLevel("WARNING")  # it would tell of each capture
            steps = [CudaGraphModule(step, warmup=3) for step in steps]
        if args.compile or args.cudagraphs:
            warm_up(steps, agent, run)
        agent.learn, agent.prepare = steps

        raw = np.stack(first_observations(envs, args.seed, run.global_step), dtype=np.float64)
        observation = agent.normalize(raw)
        rewards, terminated, truncated = ([0] * args.num_envs for _ in range(3))
        iterations = -(-args.total_timesteps // args.num_envs) // args.num_steps
        learning_rate, last_step = args.learning_rate, iterations * args.num_steps * args.num_envs
        while run.global_step < args.total_timesteps:
            # Act
            t = (run.global_step - run.first_step) // args.num_envs % args.num_steps
            if t == 0 and args.anneal_lr:
                learning_rate = linear_schedule(args.learning_rate, 0.0, last_step, run.global_step)
                agent.optimizer.lr.fill_(learning_rate)
            action = agent.act(t, observation)
            rollout["observation"][t] = observation

            # Step and store; where an episode has ended, the next one begins
            taken = agent.to_range(action)
            for i, env in enumerate(envs):
                raw[i], rewards[i], terminated[i], truncated[i], _ = env.step(taken[i])
            ended = [i for i in range(args.num_envs) if terminated[i] or truncated[i]]
            rollout["next_observation"][t] = observation = agent.normalize(raw)
            rollout["reward"][t] = agent.scale_rewards(rewards, ended)
            rollout["terminated"][t], rollout["truncated"][t] = terminated, truncated
            if ended:
                observation[ended] = agent.normalize(np.stack([envs[i].reset()[0] for i in ended]))
            run.step(rewards, terminated, truncated)

            # Learn from a full rollout (the last one may not get full)
            if t == args.num_steps - 1:
                agent.rollout.upload()
                agent.prepare()
                for _ in range(args.update_epochs):
                    order = torch.randperm(args.num_envs * args.num_steps, device=device)
                    for rows in order.chunk(args.num_minibatches):
                        agent.minibatch.copy_(rows)
                        agent.learn()
                        run.updates += 1
                    if args.target_kl is not None and agent.losses["approx_kl"] > args.target_kl:
                        break
            run.end_step(agent.losses, learning_rate=learning_rate)


# ---- Checks and recording: not the algorithm. README has a stand-in for what comes before the last two lines ----
LOG_EVERY = 100  # environment steps between two lines of metrics.jsonl
CHECKPOINT_FORMAT = 14


def fail(flag: str, value: object, allowed: str) -> NoReturn:
    """Ends the program with one line on stderr and exit status 2."""
    print(*f"error: --{flag.replace('_', '-')} {value}: {allowed}".split(), file=sys.stderr)
    sys.exit(2)


def check_args(args: Args) -> None:
    """Ends the program with exit status 2 if a number is out of its range or a flag can't be honoured."""
    for argument in fields(args):
        value = getattr(args, argument.name)
        ranges = [getattr(kind, "__metadata__", ()) for kind in (argument.type, *get_args(argument.type))]
        for allowed, low, high in sum(ranges, ()):
            if value is not None and not (isinstance(value, int | float) and low <= value <= high):
                fail(argument.name, value, allowed)
    has_cuda, compiler = args.cuda and torch.cuda.is_available(), os.environ.get("CXX", "g++").partition(" ")[0]
    for name in ("cudagraphs", "tf32"):
        if getattr(args, name, False) and not has_cuda:
            fail(name, True, "needs a CUDA device and --cuda")
    if getattr(args, "compile", False) and not has_cuda:
        header = os.path.join(sysconfig.get_path("include"), "Python.h")
        if shutil.which(compiler) is None or not os.path.exists(header):
            missing = header if shutil.which(compiler) else f"the C++ compiler {compiler}"
            fail("compile", True, f"needs {missing}, which is not there")
    if args.track and importlib.util.find_spec("wandb") is None:
        fail("track", True, "needs the wandb package: pip install wandb")


def stored_args() -> Args:
    """The command line's defaults: with --resume the arguments of that run, else those of `Args`."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            folder = tyro.cli(Args).resume
    except SystemExit:  # after --help, or an error, whose box on stderr becomes one line, without its title
        if said.getvalue():
            _, *parts = re.split("[─-]{4,}", re.sub("\x1b.*?m|[╭╮╰╯│]", "", said.getvalue()))
            print("error:", "; ".join(" ".join(part.split()) for part in parts if part.strip()), file=sys.stderr)
        raise
    if folder is None:
        return Args()
    try:
        config = json.loads(Path(folder, "config.json").read_text())
        if config.get("script", Path(__file__).stem) != Path(__file__).stem:
            raise ValueError(f"it is of the script {config['script']}")
        args = Args(**{field.name: config[field.name] for field in fields(Args) if field.name in config})
        for field in fields(Args):
            value, kind = getattr(args, field.name), getattr(field.type, "__origin__", field.type)
            if kind is tuple and isinstance(value, list):  # JSON has no other
                setattr(args, field.name, value := tuple(value))
            kind = kind if isinstance(kind, type) else type(field.default)
            if not isinstance(value, {float: (float, int), type(None): object}.get(kind, kind)):
                raise ValueError(f"its config.json has {field.name} {value!r}")
        return args
    except (OSError, ValueError, AttributeError) as error:
        fail("resume", folder, f"must be the folder of a run ({error})")


@contextlib.contextmanager
def room_for(args: Args) -> Iterator[None]:
    """Ends the program with exit status 2, naming the size in `args` to lower, if memory runs out inside."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not re.search("allocate|overflow|out of memory", str(error)):
            raise
        sizes = [argument for argument in fields(args) if argument.type == Count and argument.name != "total_timesteps"]
        name = max(sizes, key=lambda size: getattr(args, size.name) / size.default).name
        fail(name, getattr(args, name), "must be smaller, as there is not enough memory")


def replace_file(path: Path, content: Mapping) -> None:
    """Writes JSON or a checkpoint as NAME.new, then renames it: the file is the old one or the new one, never half."""
    beside = path.with_name(f"{path.name}.new")
    try:
        with open(beside, "wb") as file:
            if path.suffix == ".pt":
                torch.save(content, file)
            else:
                file.write(f"{json.dumps(content, indent=2)}\n".encode())
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


class Run(contextlib.AbstractContextManager):
    """A run's folder with its files, its progress bar, and its last lines, however it ends.

    metrics.jsonl has a line every `LOG_EVERY` steps (returns and lengths are means of the last 100 episodes) and
    episodes.jsonl one an episode; fps counts from `args.measure_burnin` steps after the first update.
    """

    saved = ("global_step", "updates", "episodes", "recent", "warmup_seconds", "wall_seconds", "resumed_at", "ends")

    def __init__(self, args: Args, device: torch.device, agent: nn.Module, buffer: object = None):
        self.args, self.device, self.is_cut = args, device, False
        self.learned_at = self.window = self.closed = self.stop = None
        self.global_step, self.updates, self.episodes, self.recent, self.resumed_at, self.ends = 0, 0, 0, [], [], []
        self.warmup_seconds, self.wall_seconds = 0.0, 0.0
        self.returns, self.lengths = collections.defaultdict(float), collections.defaultdict(int)  # by environment
        names = re.findall("model name\t: (.+)", Path("/proc/cpuinfo").read_text()) if sys.platform == "linux" else []
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else (*names, platform.machine())[0]
        self.about = {"script": Path(__file__).stem, "device": str(device), "device_name": name}
        self.about["threads"] = torch.get_num_threads()
        self.about["versions"] = versions = {"python": platform.python_version()}
        for package in ("torch", "tensordict", "gymnasium", "envpool", "mujoco", "ray"):
            versions[package] = importlib.metadata.version(package) if importlib.util.find_spec(package) else None
        # All that has a state: the agent, what of it is no module, and the replay if it is kept
        parts = {**vars(agent), "agent": agent, "buffer": getattr(args, "save_replay", False) and buffer}
        self.parts = {name: part for name, part in parts.items() if hasattr(part, "state_dict")}
        self.flags = [flag for flag in ("compile", "cudagraphs") if getattr(args, flag, False)]
        self.folder = self.make_folder() if args.resume is None else self.reopen_folder()
        self.first_step, self.last_step, self.updates_seen = self.global_step, self.global_step, self.updates
        self.last_log = (self.global_step, time.perf_counter())
        self.start = self.last_log[1] - self.wall_seconds
        if args.track:
            import wandb

            about = {"project": args.wandb_project, "entity": args.wandb_entity, "config": vars(args)}
            name = self.folder.resolve().name
            try:
                self.tracked = wandb.init(**about, id=name, name=name, dir=str(self.folder), resume="allow")
            except wandb.errors.Error as error:
                if args.resume is None:
                    shutil.rmtree(self.folder)
                fail("track", True, f"wandb can't start ({error})")
        about = {"total": args.total_timesteps, "initial": self.global_step, "unit": "step"}
        self.bar = tqdm(**about, disable=None, dynamic_ncols=True)
        ignores_hangup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN  # started by nohup
        numbers = (signal.SIGINT, signal.SIGTERM, *[signal.SIGHUP] * (not ignores_hangup))
        self.handlers = {number: signal.signal(number, self.interrupt) for number in numbers}

    def make_folder(self) -> Path:
        """A new folder, with config.json and empty files of metrics and episodes."""
        stem = [re.sub(r"[^\w.-]+", "-", self.args.env_id), Path(__file__).stem, *self.flags, str(self.args.seed)]
        folder = Path(self.args.output_dir, f"{'__'.join(stem)}__{int(time.time())}")
        try:
            folder.mkdir(parents=True)
            replace_file(folder / "config.json", vars(self.args) | self.about)
            self.open_files(folder, "w")
        except OSError as error:
            if isinstance(error, FileExistsError) and folder.is_dir():  # another run began within this second
                time.sleep(1)
                return self.make_folder()
            shutil.rmtree(folder, ignore_errors=True)
            fail("output_dir", self.args.output_dir, f"must be a folder that can be written to ({error.strerror})")
        return folder

    def open_files(self, folder: Path, mode: str) -> None:
        """Opens the files of metrics and episodes; raises BlockingIOError if another run has them open."""
        self.files = [open(folder / f"{name}.jsonl", mode, buffering=1) for name in ("metrics", "episodes")]
        try:
            fcntl.flock(self.files[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:  # some network disks know no locks
            if isinstance(error, BlockingIOError):
                raise BlockingIOError("in use by another run") from None

    def reopen_folder(self) -> Path:
        """The folder `args.resume`, all as at its checkpoint; if that can't be, exit status 2 with nothing changed."""
        args, folder = vars(self.args), Path(self.args.resume)
        setters = (random.setstate, np.random.set_state, torch.set_rng_state, torch.cuda.set_rng_state)
        try:
            self.open_files(folder, "r+")
            checkpoint = torch.load(folder / "checkpoint.pt", map_location="cpu", weights_only=True)
            if damaged := zipfile.ZipFile(folder / "checkpoint.pt").testzip():
                raise ValueError(f"{damaged} in its checkpoint.pt is damaged")
            if (found := (checkpoint["format"], checkpoint["script"])) != (CHECKPOINT_FORMAT, Path(__file__).stem):
                raise ValueError(f"it is of format {found[0]} and of the script {found[1]}")
            for name, before in checkpoint["args"].items():
                may_grow = name == "total_timesteps" and args[name] >= before
                if args[name] != before and not may_grow and name not in ("resume", "ray_address", "actor_timeout"):
                    least = "at least " if name == "total_timesteps" else ""
                    fail(name, args[name], f"must be {least}{before}, as in {folder}")
            vars(self).update({name: checkpoint["run"][name] for name in self.saved})
            for name, part in self.parts.items():
                part.load_state_dict(checkpoint["parts"][name])
            for set_state, state in zip(setters, checkpoint["random"]):
                set_state(state)
            for file, end in zip(self.files, self.ends, strict=True):
                if end and os.pread(file.fileno(), 1, end - 1) != b"\n":
                    raise ValueError(f"{Path(file.name).name} is not what it was at the checkpoint")
        except Exception as error:  # for a damaged checkpoint torch.load raises errors of any kind
            reason = (str(error).strip() or repr(error)).partition("\n")[0]
            fail("resume", folder, f"must be the folder of a run with a whole checkpoint.pt ({reason})")
        if self.global_step >= self.args.total_timesteps:
            fail("total_timesteps", self.args.total_timesteps, f"must be above the {self.global_step} made before")
        try:
            (folder / "checkpoint.pt.new").unlink(missing_ok=True)  # of a run that was killed
            replace_file(folder / "config.json", args | self.about | {"resume": None})
        except OSError as error:
            fail("resume", folder, f"must be a folder that can be written to ({error.strerror})")
        for file, end in zip(self.files, self.ends, strict=True):
            file.seek(end)
            file.truncate()
        self.resumed_at.append(self.global_step)
        (folder / "summary.json").unlink(missing_ok=True)  # it speaks of a run that had ended
        return folder

    def interrupt(self, number: int, _frame) -> None:
        """Ends the run after this step; at once if there is none yet, or if asked again more than a second later."""
        self.stop = self.stop or (number, time.perf_counter())
        if self.global_step == self.first_step or time.perf_counter() - self.stop[1] > 1:
            self.is_cut = True  # compiled code and torch.save make errors of their own of a KeyboardInterrupt
            raise KeyboardInterrupt

    def step(self, rewards: Sequence, terminated: Sequence, truncated: Sequence, env_ids: Sequence | None = None):
        """Counts one step of every environment, or of each of `env_ids`, and writes down the episodes that it ends."""
        self.global_step += len(rewards)
        returns, lengths = self.returns, self.lengths
        env_ids = range(len(rewards)) if env_ids is None else env_ids
        for i, reward, is_terminated, is_truncated in zip(env_ids, rewards, terminated, truncated, strict=True):
            returns[i] += float(reward)
            lengths[i] += 1
            if is_terminated or is_truncated:
                total = returns[i] if math.isfinite(returns[i]) else None  # JSON has no other numbers
                line = {"global_step": self.global_step, "return": total, "length": lengths[i]}
                self.files[1].write(json.dumps(line | {"terminated": bool(is_terminated)}) + "\n")
                self.recent = [*self.recent[-99:], (total, lengths[i])] if total is not None else self.recent
                returns[i], lengths[i], self.episodes = 0.0, 0, self.episodes + 1

    def end_step(self, losses: Mapping[str, torch.Tensor], **values: float) -> None:
        """Writes the line of metrics and the checkpoint that are due, and ends the run if a signal asked for that."""
        step, total, save_every = self.global_step, self.args.total_timesteps, self.args.save_every
        has_learned, self.updates_seen = self.updates > self.updates_seen, self.updates
        self.learned_at = self.learned_at or (step if has_learned else None)
        if self.learned_at and self.window is None:
            burnin = min(self.args.measure_burnin, (total - self.learned_at) // 2)
            self.window = (step, self.now()) if step >= self.learned_at + burnin else None
        if has_learned and hasattr(self.args, "num_steps"):
            self.finite(losses)  # before the policy acts again; with a replay it would wait for the GPU too often
            self.closed = (step, self.now())  # after its last update a run only acts
        if step // LOG_EVERY > self.last_step // LOG_EVERY or step >= total:
            self.log(losses, values)
        if save_every and step // save_every > self.last_step // save_every:
            self.save()
        self.last_step = step
        if self.stop is not None:
            raise KeyboardInterrupt

    def finite(self, losses: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """The losses as numbers; ends the program if one is not finite."""
        losses = dict(zip(losses, torch.stack([*losses.values()]).tolist(), strict=True))  # one wait for a GPU
        for name, loss in losses.items():
            if not math.isfinite(loss):
                sys.exit(f"error: {name} is {loss} at step {self.global_step}")
        return losses

    def log(self, losses: Mapping[str, torch.Tensor], values: Mapping[str, float]) -> None:
        """Writes a line of metrics, with losses once there are any; ends the program if one is not finite."""
        losses = self.finite(losses) if self.learned_at else {}
        (last_step, last_time), self.last_log = self.last_log, (self.global_step, time.perf_counter())
        fps = round((self.global_step - last_step) / (self.last_log[1] - last_time), 2)
        line = {"global_step": self.global_step, "wall_time": round(self.last_log[1] - self.start, 4), "fps": fps}
        line |= {**self.means(), **losses, **values}
        self.files[0].write(json.dumps(line) + "\n")
        if self.args.track:
            self.tracked.log(line, step=self.global_step)
        if self.stop is None:  # else its terminal may be closed
            self.bar.set_postfix_str(f"fps {fps:.0f}, return {line['episode_return']}", refresh=False)
            self.bar.update(self.global_step - self.bar.n)

    def save(self) -> None:
        """Writes checkpoint.pt, or says why it can't; the one before is then still there."""
        self.wall_seconds = time.perf_counter() - self.start
        kind, keys, *rest = np.random.get_state()
        checkpoint = {"format": CHECKPOINT_FORMAT, "script": Path(__file__).stem, "args": vars(self.args)}
        checkpoint["random"] = [random.getstate(), (kind, keys.tolist(), *rest), torch.get_rng_state()]
        checkpoint["random"] += [torch.cuda.get_rng_state()] if self.device.type == "cuda" else []
        try:
            self.ends = [file.tell() for file in self.files]
            for file in self.files:
                os.fsync(file.fileno())
            checkpoint["run"] = {name: getattr(self, name) for name in self.saved}
            checkpoint["parts"] = {name: part.state_dict() for name, part in self.parts.items()}
            numbers = [leaf for leaf in tree_leaves(checkpoint["parts"]) if isinstance(leaf, float | torch.Tensor)]
            if not all(math.isfinite(n) if isinstance(n, float) else n.isfinite().all() for n in numbers):
                raise ArithmeticError("a parameter, or what else it would hold, is not finite")
            replace_file(self.folder / "checkpoint.pt", checkpoint)
        except (OSError, RuntimeError, ArithmeticError) as error:
            if not self.is_cut:
                self.bar.write(f"no checkpoint at step {self.global_step}: {error}", file=sys.stderr)

    def means(self) -> dict[str, float | None]:
        """Mean return and length of the last 100 episodes; None while there is none."""
        means = [float(f"{sum(column) / len(column):.7g}") for column in zip(*self.recent)] or (None, None)
        return {"episode_return": means[0], "episode_length": means[1]}

    def now(self) -> float:
        """Seconds on a clock that is read when the device has done its work."""
        torch.get_device_module(self.device).synchronize()
        return time.perf_counter()

    def __exit__(self, kind, error, traceback) -> None:
        for number in self.handlers:
            signal.signal(number, signal.SIG_IGN)  # nothing may cost the summary
        status = "finished" if kind is None else "interrupted" if kind is KeyboardInterrupt or self.is_cut else "failed"
        end = time.perf_counter() if status == "failed" else self.now()
        first_step, opened = self.window or (self.global_step, end)
        last_step, closed = max(self.closed or (self.global_step, end), (first_step, opened))
        fps = round((last_step - first_step) / (closed - opened), 2) if last_step > first_step else None
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        peak = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else peak
        summary = {**self.about, "variant": "+".join(self.flags) or "eager"}
        summary |= {"env_id": self.args.env_id, "seed": self.args.seed, "fps": fps, "peak_memory_bytes": peak}
        summary |= {name: getattr(self, name) for name in ("global_step", "updates", "episodes", "resumed_at")}
        summary |= {"fps_window": [first_step, last_step], "warmup_seconds": round(self.warmup_seconds, 3)}
        summary |= {"wall_seconds": round(end - self.start, 3), "episode_return": self.means()["episode_return"]}
        if self.global_step > self.first_step and not self.is_cut:
            self.save()
        with contextlib.suppress(OSError):  # a full disk
            replace_file(self.folder / "summary.json", summary | {"status": status})
            for file in self.files:
                file.close()
        episodes = f"mean of the last {len(self.recent)} of {self.episodes} episodes"
        ending = f"{status} at step {self.global_step}: {self.folder}"
        speed = f"{fps or 'unmeasured'} steps/s on {summary['device_name']}, warm-up {summary['warmup_seconds']} s"
        try:
            self.bar.close()
            if status == "finished" and not self.learned_at:
                steps = self.global_step - self.first_step
                print(f"no update in these {steps} steps: a replay or a rollout has to be full first", file=sys.stderr)
            print(f"return {summary['episode_return']} ({episodes})", speed, ending, sep="\n", flush=True)
        except OSError:  # nobody reads it: a closed terminal, or a `tee` that the same Ctrl-C has ended
            sys.stdout = None  # or Python would try again as it exits
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        if status == "interrupted":
            sys.exit(128 + (self.stop[0] if self.stop else signal.SIGINT))
        if kind is SystemExit and error.code != 2 and not isinstance(error.code, str):  # the environment called exit
            sys.exit(f"error: {error!r}")


def check_rollout(args: Args, steps: int) -> None:
    """Ends the program with exit status 2 unless the run is at least a rollout long, which minibatches divide."""
    if args.total_timesteps < steps:
        fail("total_timesteps", args.total_timesteps, f"must be at least a rollout of {steps}")
    if steps % args.num_minibatches or steps < 2 * args.num_minibatches:
        allowed = f"must divide a rollout of {steps} into minibatches of at least 2"
        fail("num_minibatches", args.num_minibatches, allowed)


def check_continuous_spaces(args: Args, env: gym.Env) -> None:
    """Ends the program with exit status 2 unless observations and actions are vectors."""
    observations, actions = env.observation_space, env.action_space
    if not isinstance(observations, gym.spaces.Box) or len(observations.shape) != 1 or not observations.shape[0]:
        fail("env_id", args.env_id, f"its observations must be a 1-D Box or a Dict of Boxes, not {observations}")
    is_vector = isinstance(actions, gym.spaces.Box) and len(actions.shape) == 1 and actions.shape[0]
    if not is_vector or not np.issubdtype(actions.dtype, np.floating):
        fail("env_id", args.env_id, f"its actions must be a one-dimensional float Box, not {actions}")


if __name__ == "__main__":
    main(tyro.cli(Args, default=stored_args()))
