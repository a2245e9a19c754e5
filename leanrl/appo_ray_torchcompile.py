# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "gymnasium[mujoco]>=1.4,<1.5", "numpy>=1.26", "tqdm>=4.66", "tyro>=1.0",
#   "envpool>=1.2.5,<1.3", "ray>=2.54,<3",
#   "tensordict>=0.15,<0.16",
# ]
# ///
"""Asynchronous PPO: actors that do not wait, one learner, PPO's epochs (https://arxiv.org/abs/1707.06347) on V-trace.

Actors play with weights that may be some versions old, and send fragments of what they did. V-trace (Espeholt et al.
2018) corrects their advantages for what the learner's policy would have done; PPO's ratios then count from that
policy, not from the actors' older ones (Hilton et al. 2022, https://arxiv.org/abs/2110.00641). Without lag it is PPO.
`appo_ray.py` is the eager reference, to be read first; `appo_ray_torchcompile.py` is the same at full speed.

    python leanrl/appo_ray.py --env-id CartPole-v1 --seed 1 --num-actors 2
    python leanrl/appo_ray_torchcompile.py --env-id CartPole-v1 --seed 1 --num-actors 2 --compile --cudagraphs
    python leanrl/appo_ray_torchcompile.py --env-id HalfCheetah-v4 --num-actors 2 --num-envs 1 --compile \
        --fragment-length 128 --batch-fragments 16 --update-epochs 10 --num-minibatches 32 --learning-rate 3e-4 \
        --ent-coef 0

PPO's published returns (CleanRL): CartPole-v1 490 ± 6, HalfCheetah-v4 (1M steps) 1,443 ± 46. Ours are in the README.
Without --num-actors the one actor is in this process, without Ray. Atari's games are EnvPool's: --env-id Breakout-v5.
To copy the algorithm alone, put the short `Run` of the README in the place of the part "Checks and recording".
"""

import collections
import contextlib
import difflib
import fcntl
import functools
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
import secrets
import shutil
import signal
import socket
import sys
import sysconfig
import tempfile
import time
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, NoReturn, get_args
from unittest import mock

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
from tensordict.nn import CudaGraphModule
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

# Types of arguments, with the ranges that `check_args` tells of and enforces
Seed = Annotated[int, ("must lie in [0, 2**32)", 0, 2**32 - 1)]
Count = Annotated[int, ("must lie in [1, 2**31)", 1, 2**31 - 1)]
Natural = Annotated[int, ("must lie in [0, 2**31)", 0, 2**31 - 1)]
Actors = Annotated[int, ("must lie in [0, 10000]", 0, 10_000)]
Positive = Annotated[float, ("must lie in (0, 1e30]", sys.float_info.min, 1e30)]
NonNegative = Annotated[float, ("must lie in [0, 3.4e38]", 0, 3.4e38)]
Fraction = Annotated[float, ("must lie in [0, 1]", 0, 1)]


@dataclass
class Args:
    seed: Seed = 1
    """seed of every random number: environments, networks, exploration, replay"""
    env_id: str = "CartPole-v1"
    """id of the environment: Gymnasium's, module:Id; EnvPool's Atari (ppo_atari_envpool, Ray), MiniGrid (memory)"""
    total_timesteps: Count = 500_000
    """length of the run, in environment steps summed over all environments"""
    num_envs: Count = 8
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
    measure_burnin: Natural = 5000
    """environment steps after the first update before fps is measured"""
    save_every: Natural = 0
    """environment steps between two checkpoints; 0: one at the end, also after Ctrl-C, SIGTERM, SIGHUP or a failure"""
    resume: str | None = None
    """folder of the run to go on with, under its own arguments; environments begin new episodes, PPO a new rollout"""

    num_actors: Actors = 0
    """actors that Ray starts, each a process with --num-envs environments; 0: one, in this process, without Ray"""
    ray_address: str | None = None
    """address of the Ray cluster to join; Ray starts on this machine alone if not given"""
    actor_timeout: Count = 60
    """seconds of silence after which an actor counts as hung; a minute more ends the run, in a new cluster ten"""
    forced_lag: Natural = 0
    """versions by which the actors' weights are kept behind the newest, to study lag"""
    max_lag: Count = 1_000
    """versions beyond --forced-lag by which a fragment may be old; one that is older counts as lost"""
    fragment_length: Count = 64
    """steps of each environment in a fragment, which is what an actor makes in a call"""
    batch_fragments: Count = 1
    """fragments in a batch; none is in two of them"""
    gamma: Fraction = 0.99
    """discount factor, per step"""
    learning_rate: Positive = 1e-3
    """learning rate of Adam"""
    anneal_lr: bool = True
    """let the learning rate fall linearly to 0 over the run"""
    vtrace: bool = True
    """correct for the lag by V-trace; else learn as if the learner's own policy had acted"""
    rho_clip: NonNegative = 1.0
    """ρ̄: V-trace truncates the ratio of the learner's to the actor's probability of a step's action at it"""
    c_clip: NonNegative = 1.0
    """c̄: the same for the ratios in the trace, by which later errors reach back (at most ρ̄ in the paper)"""
    trace_lambda: Fraction = 0.95
    """λ, by which the trace decays further: c = λ min(c̄, ratio) (remark 2 of the paper)"""
    num_minibatches: Count = 4
    """minibatches into which an epoch divides a rollout"""
    update_epochs: Count = 4
    """epochs over each rollout"""
    norm_adv: bool = True
    """normalise the advantages of each minibatch"""
    clip_coef: Positive = 0.2
    """ε: the ratio of new to old probability is clipped to [1 - ε, 1 + ε]"""
    clip_vloss: bool = True
    """clip the change of the value to ±clip_coef, too"""
    ent_coef: NonNegative = 0.01
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


def is_atari(env_id: str) -> bool:
    """Whether it is one of EnvPool's Atari games; Gymnasium's names go first, as EnvPool takes long to import."""
    if ":" in env_id or env_id in gym.registry or importlib.util.find_spec("envpool") is None:
        return False
    import envpool

    return envpool.registration.registry.specs.get(env_id, (None,))[0] == "envpool.atari"


class GymEnvironments:
    """Gymnasium's environments side by side. A step after an episode's end only resets: it is not valid.

    `frames`, [1, N, ...], are the newest observations.
    """

    def __init__(self, args: Args, seed: int, step: int):
        self.envs = make_environments(args)
        self.action_dtype = self.envs[0].action_space.dtype
        self.observation = np.stack(first_observations(self.envs, seed, step), dtype=np.float32)
        self.frames, self.valid = self.observation[None], np.ones(args.num_envs, bool)

    def close(self) -> None:
        for env in self.envs:
            env.close()

    def step(self, action: np.ndarray) -> dict[str, np.ndarray]:
        """Takes a step; [N, ...] -> rewards and ends, and those of the episodes that are written down; [N] each."""
        action = action.astype(self.action_dtype, copy=False)
        reward, ends = np.zeros(len(action)), np.zeros((2, len(action)), bool)
        for i, env in enumerate(self.envs):
            if self.valid[i]:
                self.observation[i], reward[i], ends[0, i], ends[1, i], _ = env.step(action[i])
            else:
                self.observation[i], _ = env.reset()
        step = {"reward": reward, "terminated": ends[0], "truncated": ends[1], "valid": self.valid}
        self.valid = ~ends.any(0)
        return step | {"score": reward, "over": ends[0]}


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


class BoundedEnvironments(GymEnvironments):
    """Gymnasium's environments with continuous actions."""

    def __init__(self, args: Args, seed: int, step: int):
        super().__init__(args, seed, step)
        self.to_range = ActionRange(self.envs[0].action_space)

    def step(self, action: np.ndarray) -> dict[str, np.ndarray]:
        """Takes a step; [N, A] -> rewards and ends, and those of the episodes that are written down; [N] each."""
        return super().step(self.to_range(action))


class AtariEnvironments:
    """EnvPool's emulators of an Atari game. A step after an episode's end only resets: it is not valid.

    To the agent each life is an episode, and rewards are cut to their sign; "score" and "over" are the game's own.
    `frames`, [4, N, 84, 84], are the newest images, the last one last.
    """

    def __init__(self, args: Args, seed: int, step: int):
        import envpool

        seeds = (np.random.SeedSequence([seed, step]).generate_state(args.num_envs) // 2).tolist()  # below 2**31
        options = {"env_seed": seeds, "episodic_life": True, "reward_clip": True}
        options |= {"num_threads": 1} if args.num_actors else {}  # the CPU that Ray gives an actor
        self.envs = envpool.make(args.env_id, env_type="gymnasium", num_envs=args.num_envs, **options)
        self.observation, _ = self.envs.reset()
        self.frames, self.valid = self.observation.swapaxes(0, 1), np.ones(args.num_envs, bool)
        self.is_over = ~self.valid

    def close(self) -> None:
        self.envs.close()

    def step(self, action: np.ndarray) -> dict[str, np.ndarray]:
        """Takes a step; [N] -> rewards and ends, and those of the episodes that are written down; [N] each."""
        self.observation, reward, terminated, truncated, info = self.envs.step(action)
        self.frames = self.observation.swapaxes(0, 1)
        step = {"reward": reward, "terminated": terminated, "truncated": truncated, "valid": self.valid}
        over = info["terminated"].astype(bool)
        # With a new game the emulator fills its stack with the first image; with a new life it does not
        step |= {"score": info["reward"], "over": over, "is_new": self.is_over}
        self.valid, self.is_over = ~(terminated | truncated), over | truncated
        return step


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


class CategoricalActorCritic(nn.Module):
    """Logits of the actions and the value of the state; [..., observation_dim] -> [..., actions], [...]."""

    def __init__(self, observation_dim: int, actions: int):
        super().__init__()
        self.actor = mlp(observation_dim, actions, 0.01)
        self.critic = mlp(observation_dim, 1, 1.0)

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.actor(observation), self.critic(observation).squeeze(-1)


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


class AtariActorCritic(nn.Module):
    """Logits of the actions and the value of the state (network of Mnih et al. 2015); [B, 4, 84, 84] -> [B, A], [B]."""

    def __init__(self, actions: int):
        super().__init__()
        gain = math.sqrt(2)
        self.trunk = nn.Sequential(
            orthogonal(nn.Conv2d(4, 32, 8, stride=4), gain),
            nn.ReLU(),
            orthogonal(nn.Conv2d(32, 64, 4, stride=2), gain),
            nn.ReLU(),
            orthogonal(nn.Conv2d(64, 64, 3), gain),
            nn.ReLU(),
            nn.Flatten(),
            orthogonal(nn.Linear(64 * 7 * 7, 512), gain),
            nn.ReLU(),
        )
        self.actor, self.critic = orthogonal(nn.Linear(512, actions), 0.01), orthogonal(nn.Linear(512, 1), 1.0)

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.trunk(observation / 255.0)
        return self.actor(hidden), self.critic(hidden).squeeze(-1)


class Normalizer(nn.Module):
    """Observations' distance from the mean in standard deviations, clipped to ±10; [..., D] -> [..., D].

    It moves with the versions of the weights only, so that actor and learner see the same at the same version.
    """

    def __init__(self, size: int):
        super().__init__()
        self.mean, self.deviation = nn.Buffer(torch.zeros(size)), nn.Buffer(torch.ones(size))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return ((observation - self.mean) / self.deviation).clamp(-10, 10)

    def follow(self, moments: "RunningMoments") -> None:
        """Takes over the mean and the deviation of all observations so far."""
        for buffer, values in ((self.mean, moments.mean), (self.deviation, moments.deviation())):
            buffer.copy_(torch.from_numpy(values).squeeze(0))


def make_actor_critic(shape: tuple[int, ...], actions: int | tuple[int]) -> nn.Module:
    """The network for observations and actions of these shapes: the policy's outputs and the value."""
    if isinstance(actions, tuple):
        return nn.Sequential(Normalizer(*shape), GaussianActorCritic(*shape, *actions))
    return AtariActorCritic(actions) if len(shape) == 3 else CategoricalActorCritic(*shape, actions)


def gaussian_log_prob(mean: torch.Tensor, log_std: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
    """Log-probability of actions with independent dimensions; [..., A], [A], [..., A] -> [...]."""
    return (-0.5 * ((action - mean) / log_std.exp()).square() - log_std - 0.5 * math.log(2 * math.pi)).sum(-1)


def log_prob_and_entropy(
    policy: torch.Tensor, log_std: torch.Tensor | None, action: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of actions, and the policy's entropy; [..., outputs], -, [...] or [..., A] -> two of [...]."""
    if log_std is not None:
        log_prob = gaussian_log_prob(policy, log_std, action)
        return log_prob, (log_std + 0.5 * math.log(2 * math.pi * math.e)).sum().expand_as(log_prob)
    log_probs = F.log_softmax(policy, -1)
    log_prob = log_probs.gather(-1, action[..., None].long()).squeeze(-1)
    return log_prob, -(log_probs.exp() * log_probs).sum(-1)


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


# ---- Host and device ----
def mirrored(*shape: int, device: torch.device, dtype=torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Zeros in the host's memory, pinned for CUDA, and on `device`; for a CPU they are the same tensor."""
    host = torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")
    return host, host.to(device)


# ---- Advantages ----
def discounted_sums(values: torch.Tensor, discounts: torch.Tensor) -> torch.Tensor:
    """x[t] = values[t] + discounts[t] · x[t + 1], backwards, in log2(T) steps (Hillis and Steele 1986); all [T, N]."""
    reach = 1
    while reach < len(values):
        values = torch.cat([values[:-reach] + discounts[:-reach] * values[reach:], values[-reach:]])
        discounts = torch.cat([discounts[:-reach] * discounts[reach:], discounts[-reach:]])
        reach *= 2
    return values


def vtrace(
    value: torch.Tensor,
    ratio: torch.Tensor,
    reward: torch.Tensor,
    terminated: torch.Tensor,
    truncated: torch.Tensor,
    valid: torch.Tensor,
    args: Args,
) -> tuple[torch.Tensor, torch.Tensor]:
    """V-trace's targets v, and the policy gradient's advantages ρ(r + γv' - V) (Espeholt et al. 2018, section 4).

    By remark 1 v = V + δ + γc(v' - V'), δ = ρ(r + γV' - V); V' and v' are the next step's. `ratio` is the learner's
    probability of the action over the actor's. value [T + 1, B], the rest [T, B] -> [T, B], [T, B]. V' is 0 where an
    episode terminates; where one is truncated, and at the fragment's end, v' = V', the value of the next row's
    observation, be that row valid or not. Rows that are not valid affect no other; their target is V, advantage 0.
    """
    done = (terminated + truncated) > 0
    next_value = torch.where(terminated > 0, 0, value[1:])
    rho, c = ratio.clamp(max=args.rho_clip), args.trace_lambda * ratio.clamp(max=args.c_clip)
    valid = valid > 0
    delta = torch.where(valid, rho * (reward + args.gamma * next_value - value[:-1]), 0)
    vs_minus_v = discounted_sums(delta, torch.where(done | ~valid, 0, args.gamma * c))
    # Of the step after, where the episode goes on: the row after its end is another episode's
    next_vs_minus_v = torch.where(done, 0, torch.cat([vs_minus_v[1:], torch.zeros_like(vs_minus_v[:1])]))
    advantage = torch.where(valid, delta + rho * args.gamma * next_vs_minus_v, 0)
    return value[:-1] + vs_minus_v, advantage


# ---- Batch ----
class Batch:
    """`batch_fragments` fragments side by side, [T, N, ...]: NumPy arrays to fill, and tensors on `device`."""

    def __init__(self, args: Args, shape: tuple[int, ...], action_shape: tuple[int, ...], device: torch.device):
        self.num_envs, count, steps = args.num_envs, args.num_envs * args.batch_fragments, args.fragment_length
        self.stack = shape[0] if len(shape) == 3 else 1
        names = ("log_prob", "reward", "terminated", "truncated", "valid")
        self.pairs = {name: mirrored(steps, count, device=device) for name in names}
        self.pairs["action"] = mirrored(steps, count, *action_shape, device=device)
        if self.stack > 1:
            sizes = (steps + self.stack, count, *shape[1:])
            self.pairs["observation"] = mirrored(*sizes, device=device, dtype=torch.uint8)
            self.pairs["frame"] = mirrored(steps + 1, count, self.stack, device=device, dtype=torch.long)
        else:
            self.pairs["observation"] = mirrored(steps + 1, count, *shape, device=device)
        self.arrays = {name: host.numpy() for name, (host, _) in self.pairs.items()}
        self.tensors = {name: tensor for name, (_, tensor) in self.pairs.items()}

    def fill(self, i: int, fragment: Mapping[str, np.ndarray]) -> None:
        """Copies a fragment, [T, N, ...], to the i-th of the places; frames and observations have further rows."""
        columns = slice(i * self.num_envs, (i + 1) * self.num_envs)
        if self.stack > 1:
            fragment = {**fragment, "frame": stacked_frames(fragment["is_new"], self.stack)}
        for name, array in self.arrays.items():
            array[:, columns] = fragment[name]

    def upload(self) -> None:
        """Sends the arrays to the device."""
        for host, tensor in self.pairs.values():
            tensor.copy_(host, non_blocking=True)


def stacked_frames(is_new: np.ndarray, stack: int) -> np.ndarray:
    """The rows of a fragment's frames that its stacked observations consist of; [T, N] -> [T + 1, N, stack].

    A stack is filled with the frame that a step returns which begins a new game.
    """
    steps, count = is_new.shape
    at = np.arange(1, steps + 1)[:, None]
    first = np.concatenate([np.full((1, count), -stack), np.where(is_new, at, -stack)])
    first = np.maximum.accumulate(first)  # frame of the game, as far as the fragment reaches back
    rows = np.arange(steps + 1)[:, None, None] + np.arange(1 - stack, 1)
    return np.maximum(rows, first[:, :, None]) + stack - 1


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
class CompiledAPPOAgent(nn.Module):
    """The network, its optimiser, and the update on it; with continuous actions also statistics to normalise by."""

    def __init__(self, args: Args, shape: tuple[int, ...], actions: int | tuple[int], device: torch.device):
        super().__init__()
        self.args, self.device, self.ledger = args, device, Ledger()
        self.is_continuous = isinstance(actions, tuple)
        self.batch = Batch(args, shape, actions if self.is_continuous else (), device)
        self.module = FlatModule(make_actor_critic(shape, actions).to(device))
        self.network = nn.Buffer(self.module.initial)
        self.optimizer = Adam(self.network, args.learning_rate, eps=1e-5)
        if self.is_continuous:
            self.normalizer = self.module.module[0]  # registers it, for `state_dict`
            self.observation_moments, self.return_moments = RunningMoments(*shape), RunningMoments(1)
            self.returns = np.zeros((max(args.num_actors, 1), args.num_envs))
            self.expected = {}  # of each actor the next fragment: incarnation and sequence number
        names = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction")
        self.losses = {name: torch.zeros((), device=device) for name in names}
        size = args.num_envs * args.batch_fragments * args.fragment_length
        shapes = {name: () for name in ("log_prob", "value", "advantage", "return", "valid")}
        shapes["action"] = actions if self.is_continuous else ()
        self.rows = {name: torch.zeros(size, *rest, device=device) for name, rest in shapes.items()}
        self.rows["observation"] = self.batch.tensors["observation"].new_zeros(size, *shape)
        self.minibatch = torch.zeros(size // args.num_minibatches, dtype=torch.long, device=device)
        self.clip_coef = torch.tensor(args.clip_coef, device=device)

    def weights(self) -> list[torch.Tensor]:
        """The network's parameters and statistics, as actors take them."""
        return [*self.module.split(self.network.cpu()), *self.module.module.buffers()]

    def follow_observations(self) -> None:
        """Has the next version of the weights normalise by what has been seen up to now."""
        for module in self.modules():
            if isinstance(module, Normalizer):
                module.follow(self.observation_moments)

    def fill(self, i: int, fragment: Mapping[str, np.ndarray]) -> None:
        """Makes a fragment the i-th of the batch; with continuous actions it goes into the statistics, too."""
        self.batch.fill(i, fragment)
        if self.is_continuous:
            observation = fragment["observation"][1:]  # the first is the last of the fragment before
            self.observation_moments.update(observation.reshape(-1, observation.shape[-1]))
            number, incarnation, sequence, _ = fragment["stamp"].tolist()
            returns, seen = self.returns[number], []
            if self.expected.get(number) != (incarnation, sequence):  # the actor was replaced, or a fragment was lost
                returns[:] = 0.0
            self.expected[number] = incarnation, sequence + 1
            names = ("reward", "valid", "terminated", "truncated")
            for reward, valid, terminated, truncated in zip(*(fragment[name] for name in names)):
                returns[:] = returns * self.args.gamma + reward
                seen.append(returns[valid])
                returns[terminated | truncated] = 0.0
            self.return_moments.update(np.concatenate(seen)[:, None])

    def scale_rewards(self) -> None:
        """Makes the batch's rewards standard deviations of the discounted return, clipped to ±10."""
        if self.is_continuous:
            reward = self.batch.arrays["reward"]
            reward[:] = (reward / self.return_moments.deviation()).clip(-10, 10)

    def policy_and_value(
        self, network, observation: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Logits or means of the actions, a Gaussian's log deviation, and the value; [B, ...] -> [B, A], [A], [B]."""
        if observation.ndim == 4:
            observation = observation.contiguous(memory_format=torch.channels_last)  # fastest for convolutions
        policy, *log_std, value = self.module(network, observation)
        return policy, log_std[0] if log_std else None, value

    def observations(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """What the network sees, stacked where it is frames; [T + 1, B, ...]."""
        if "frame" not in batch:
            return batch["observation"]
        return batch["observation"][batch["frame"], torch.arange(batch["frame"].shape[1], device=self.device)[:, None]]

    def evaluate(self, network, observation: torch.Tensor, action: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Log-probabilities of actions, the policy's entropy, and the value; [B, ...], [B, ...] -> three of [B]."""
        policy, log_std, value = self.policy_and_value(network, observation)
        return *log_prob_and_entropy(policy, log_std, action), value

    def prepare(self) -> None:
        """Estimates the advantages of the policy as it is before the update, and makes it all a batch of [T * N].

        They are V-trace's targets less the values: without lag, the generalised advantage estimates of that λ.
        """
        args, batch = self.args, self.batch.tensors
        valid = batch["valid"] > 0
        action = torch.where(valid.view(*valid.shape, *[1] * (batch["action"].ndim - 2)), batch["action"], 0)
        old_log_prob, reward = (torch.where(valid, batch[name], 0) for name in ("log_prob", "reward"))
        observation = self.observations(batch)
        rows = {"observation": observation[:-1].flatten(0, 1), "action": action.flatten(0, 1)}
        log_prob, _, value = self.evaluate(self.network, *rows.values())
        *_, last_value = self.policy_and_value(self.network, observation[-1])
        value = torch.cat([value, last_value]).view(-1, len(last_value))
        ratio = (log_prob.view_as(old_log_prob) - old_log_prob).exp()
        weight = ratio if args.vtrace else torch.ones_like(ratio)
        ends = (batch["terminated"], batch["truncated"], batch["valid"])
        target, _ = vtrace(value, weight, reward, *ends, args)
        estimates = {"value": value[:-1], "advantage": target - value[:-1], "return": target, "valid": batch["valid"]}
        rows |= {"log_prob": log_prob} | {name: tensor.flatten() for name, tensor in estimates.items()}
        for name, tensor in rows.items():
            self.rows[name].copy_(tensor)

    def ppo_loss(self, network, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss of a minibatch, minus the objective of eq. 9, and what is logged of it; means over valid rows."""
        args, valid = self.args, batch["valid"] > 0
        names = ("advantage", "return", "value")
        advantage, returns, old_value = (torch.where(valid, batch[name], 0) for name in names)
        count = valid.sum().clamp(min=1)

        def mean(values: torch.Tensor) -> torch.Tensor:
            return torch.where(valid, values, 0).sum() / count

        log_prob, entropy, value = self.evaluate(network, batch["observation"], batch["action"])
        log_ratio = torch.where(valid, log_prob - batch["log_prob"], 0)  # before exp, as its gradient may overflow
        ratio = log_ratio.exp()
        if args.norm_adv:
            advantage = advantage - mean(advantage)
            variance = mean(advantage.square()) * count / (count - 1).clamp(min=1)
            advantage = advantage / (variance.sqrt() + 1e-8)
        clipped_ratio = ratio.clamp(1 - self.clip_coef, 1 + self.clip_coef)
        policy_loss = -mean(torch.minimum(ratio * advantage, clipped_ratio * advantage))
        squared_error = (value - returns).square()
        if args.clip_vloss:
            clipped_value = old_value + (value - old_value).clamp(-self.clip_coef, self.clip_coef)
            squared_error = torch.maximum(squared_error, (clipped_value - returns).square())
        value_loss, entropy = 0.5 * mean(squared_error), mean(entropy)
        approx_kl = mean(ratio - 1 - log_ratio)  # Schulman's estimator, http://joschu.net/blog/kl-approx.html
        clip_fraction = mean(((ratio - 1).abs() > self.clip_coef).float())
        logged = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
        logged |= {"approx_kl": approx_kl, "clip_fraction": clip_fraction}
        return policy_loss - args.ent_coef * entropy + args.vf_coef * value_loss, logged

    def update(self, chosen: torch.Tensor) -> None:
        """One step of the optimiser on these rows of the batch."""
        self.minibatch.copy_(chosen)
        self.learn()

    def learn(self) -> None:
        """What is compiled and captured of `update`: on the rows that `minibatch` names."""
        batch = {name: tensor[self.minibatch] for name, tensor in self.rows.items()}
        gradient, (_, logged) = torch.func.grad_and_value(self.ppo_loss, has_aux=True)(self.network, batch)
        self.optimizer.step(self.network, gradient * (self.args.max_grad_norm / (gradient.norm() + 1e-6)).clamp(max=1))
        for name, tensor in logged.items():
            self.losses[name].copy_(tensor.detach())


# ---- Actors ----
def act_discrete(network: nn.Module, observation: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Sampled actions and their log-probabilities; [N, ...] -> [N], [N]."""
    x = torch.from_numpy(observation)
    logits = network.actor(x) if x.ndim == 2 else network(x)[0]  # for vectors the critic is a network of its own
    log_probs = F.log_softmax(logits, -1).numpy()
    action = (log_probs + rng.gumbel(size=log_probs.shape)).argmax(1)  # Gumbel-max
    return action, np.take_along_axis(log_probs, action[:, None], 1).squeeze(1)


def act_continuous(network: nn.Module, observation: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Sampled actions and their log-probabilities; [N, ...] -> [N, A], [N]."""
    normalizer, policy = network
    mean, log_std = policy.actor(normalizer(torch.from_numpy(observation))), policy.log_std
    action = mean + log_std.exp() * torch.from_numpy(rng.standard_normal(mean.shape, dtype=np.float32))
    return action.numpy(), gaussian_log_prob(mean, log_std, action).numpy()


class RunError(Exception):
    """Ends a run with its message in place of a traceback."""


class Actor:
    """Environments and a policy of their own, which make a fragment a call; with Ray in a process of their own.

    `start` raises RuntimeError if the environments can't be made.

    A fragment is T consecutive steps of N environments, [T, N, ...] by name. Its "observation" has the frames before
    each step and after the last: a stacked one is sent once. "stamp" says who made it, from which weights.
    """

    def __init__(self, args: Args, make_envs: Callable, build: Callable, act: Callable):
        self.args, self.make_envs, self.build, self.act = args, make_envs, build, act
        self.number = self.envs = None

    def start(self, number: int, incarnation: int, step: int) -> None:
        """Makes environments and policy: in a call, as Ray tells nothing of an actor that dies while it is made."""
        args, self.network = self.args, self.build()
        sequence = np.random.SeedSequence([args.seed, number, incarnation, step])
        seed, self.rng = int(sequence.generate_state(1)[0]), np.random.default_rng(sequence.spawn(1)[0])
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said) if args.num_actors else contextlib.nullcontext():
                self.envs = self.make_envs(args, seed, step)
        except SystemExit:  # which would end the process without a word of why
            if not args.num_actors:
                raise
            said = " ".join(said.getvalue().split()).removeprefix("error: ")
            raise RuntimeError(said or "the environments end the process") from None
        self.returns, self.lengths = np.zeros(args.num_envs), np.zeros(args.num_envs, np.int64)
        self.is_cancelled, self.has_ended = (lambda: False), False
        if args.num_actors:
            import ray

            self.is_cancelled = ray.get_runtime_context().is_canceled  # of the call that is being carried out
        with torch.no_grad():  # torch's first call takes long: here it makes no fragment old
            self.act(self.network, self.envs.observation, np.random.default_rng())
        self.number, self.incarnation, self.sequence, self.version = number, incarnation, 0, None

    def ready(self, number: int, incarnation: int, step: int) -> int:
        """Which of the lives of the actor of this number it is; answered when it has started."""
        if self.number != number or self.has_ended:
            is_idle = self.envs is None
            self.close()  # it may have been out of reach, and have become the spare one
            self.start(number, incarnation, step)
            os.nice(4 * is_idle)  # one that starts goes before those at work: a lost one is back soon
        return self.incarnation

    def stand_by(self) -> None:
        """Answered when this process has imported torch, which takes longest of a start."""

    def close(self) -> None:
        """Closes the environments: what they hold may outlive their process."""
        if self.envs is not None:
            self.envs.close()
        self.envs = None

    @torch.no_grad()
    def sample(self, weights: Sequence[np.ndarray], version: int) -> dict[str, np.ndarray]:
        """A fragment made with these weights; {} if this call is cancelled, or one before was, or has raised: such an
        actor makes no more. Raises RunError if a number in the fragment is not finite."""
        if self.has_ended:
            return {}
        self.has_ended = True  # until all has gone well
        if version != self.version:
            own = (*self.network.parameters(), *self.network.buffers())
            for tensor, value in zip(own, weights, strict=True):
                tensor.copy_(torch.tensor(value))
            self.version = version
        # Totals of the episodes so far, with which the learner's go on even after a fragment that was lost
        fragment = {"stamp": np.array([self.number, self.incarnation, self.sequence, version])}
        fragment |= {"return_before": self.returns.copy(), "length_before": self.lengths.copy()}
        frames, steps = list(self.envs.frames.copy()), []
        for _ in range(self.args.fragment_length):
            if self.is_cancelled():
                return {}
            action, log_prob = self.act(self.network, self.envs.observation, self.rng)
            step = self.envs.step(action)
            frames.append(self.envs.frames[-1].copy())
            steps.append({"action": action, "log_prob": log_prob, **step})
            goes_on = ~(step["over"] | step["truncated"])
            self.returns = (self.returns + step["score"] * step["valid"]) * goes_on
            self.lengths = (self.lengths + step["valid"]) * goes_on
        fragment |= {name: np.stack([step[name] for step in steps]) for name in steps[0]}
        fragment["observation"] = np.stack(frames)
        for whose, name in (("environment", "observation"), ("environment", "reward"), ("policy", "log_prob")):
            if not np.abs(fragment[name]).max() <= np.finfo(np.float32).max:
                raise RunError(f"the {whose}'s {name} is not finite, or float32 can't hold it")
        self.sequence, self.has_ended = self.sequence + 1, False
        return fragment


# ---- Fleet: what keeps actors at work, whatever happens to them ----
PATIENCE = 60  # seconds beyond --actor-timeout for which an actor that starts is waited for, and then for any at all
NODE_PATIENCE = 600  # the same for one that has never started in a cluster, whose nodes may have to start first


@contextlib.contextmanager
def handling(handler: Callable) -> Iterable[None]:
    """Has SIGINT, SIGTERM and SIGHUP handled by `handler`."""
    ignores_hangup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN  # started by nohup
    numbers = (signal.SIGINT, signal.SIGTERM, *[signal.SIGHUP] * (not ignores_hangup))
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def end_ray_processes(folder: str) -> None:
    """On Linux, kills Ray's processes that write to this session's folder: Ray's agents live for long without its head.

    What an environment has started under a name of its own is left alone. Waits for 5 s at most, until all have ended.
    """
    import ray

    package, folder, end = os.path.dirname(ray.__file__), os.path.realpath(folder), time.monotonic() + 5
    are_left = True
    while are_left and time.monotonic() < end:
        are_left = False
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                name, *arguments = path.joinpath("cmdline").read_text(errors="replace").split("\0")
                is_ray = name.startswith("ray::") or os.path.basename(name) in ("raylet", "gcs_server")
                if int(path.name) == os.getpid() or not (is_ray or any(x.startswith(package) for x in arguments[:3])):
                    continue
                if any(os.path.realpath(file).startswith(folder + os.sep) for file in path.glob("fd/*")):
                    os.kill(int(path.name), signal.SIGKILL)
                    are_left = True
        time.sleep(0.1 * are_left)


def prepare_ray(args: Args) -> None:
    """Sets Ray's defaults, which it reads when it is imported, as the module of an environment may do."""
    if not args.num_actors or "ray" in sys.modules:
        return
    # Of actors that die, and of calls that nobody waits for any more, `Fleet` tells, in a line
    defaults = {"RAY_DEDUP_LOGS_SKIP_REGEX": "A worker died", "RAY_IGNORE_UNHANDLED_ERRORS": "1"}
    # Else Ray ends a process whose parent is number 1 as soon as the raylet has died: `Fleet` does so, with a line
    defaults |= {"RAY_RAYLET_PID": str(os.getpid())}
    if not args.ray_address:  # its ports ask for a secret; else that would be left in ~/.ray
        defaults |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex()}
        defaults |= {"RAY_USAGE_STATS_ENABLED": "0"}
    os.environ.update(defaults | os.environ)


@contextlib.contextmanager
def ray_session(args: Args) -> Iterable[None]:
    """Starts Ray on this machine, or joins the cluster of --ray-address; leaves no process, memory or file behind."""
    if not args.num_actors:
        yield
        return
    import ray

    host, _, port = (args.ray_address or "").rpartition(":")
    if args.ray_address not in (None, "auto"):
        if not (host and port.isdecimal()) or "://" in host:
            fail("ray_address", args.ray_address, "must be HOST:PORT of a cluster's head, or auto")
        try:  # where nobody answers as Ray does, by HTTP/2, it would try for minutes
            with socket.create_connection((host.strip("[]"), int(port)), timeout=10) as connection:
                connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0")  # a client's first words
                if connection.recv(4)[3:] != b"\4" and "RAY_USE_TLS" not in os.environ:  # nor the settings of a server
                    raise OSError("what listens there is not Ray")
        except (OSError, OverflowError, UnicodeError) as error:
            fail("ray_address", args.ray_address, f"must be the address of a Ray cluster ({error})")
    is_own = not ray.is_initialized()  # else it is the caller's, in a notebook for one
    folder = None  # where the processes that are started here write
    held = []  # signals: a ray.init or ray.shutdown that is interrupted would leave processes behind
    options = {"address": args.ray_address or "local"}
    options |= {"log_to_driver": False, "logging_level": "error", "configure_logging": False}
    with handling(lambda number, _: held.append(number)):
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # a cluster's nodes do not have this file
        try:
            try:
                if is_own and not args.ray_address:
                    parent = os.environ.get("RAY_TMPDIR", "/tmp")  # short, as the names of sockets in it have a limit
                    os.makedirs(parent, exist_ok=True)
                    folder = options["_temp_dir"] = tempfile.mkdtemp(prefix="ray", dir=parent)
                    # A CPU for each actor and for a spare one, that all may start however few there are
                    options |= {"include_dashboard": False, "num_cpus": args.num_actors + 1}
                # Ray sets handlers of its own, and some of its versions tell of later ones
                with mock.patch.object(signal, "signal"), warnings.catch_warnings(action="ignore"):
                    if is_own:
                        ray.init(**options)
            except Exception as error:  # on a machine that is too busy Ray raises just that
                if not held:
                    flag = "ray_address" if args.ray_address else "num_actors"
                    reason = (str(error).strip() or repr(error)).partition("\n")[0]
                    fail(flag, getattr(args, flag), f"Ray can't start there ({reason})")
            if held:
                sys.exit(128 + held[0])
            with handling(lambda number, _: sys.exit(128 + number)):  # until `Run` has its own
                yield
        finally:
            ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
            if is_own:
                ray.shutdown()
            if folder is not None:
                end_ray_processes(folder)
                shutil.rmtree(folder, ignore_errors=True)


@dataclass
class Seat:
    """The place of one actor: the process that holds it, and what is known of that."""

    number: int | None  # None: the spare one's
    actor: object = None  # Ray's handle; None while nobody holds the seat
    # Calls in flight, in their order: the reference, whether it is of a fragment, and the weights' reference
    calls: list = field(default_factory=list)
    lives: int = 0  # times that it has been asked to start
    incarnation: int | None = None  # the life that answered last; None if none has since the seat was given up
    is_ready: bool = False  # whether it has answered since it was started, or since it was unavailable
    failures: int = 0  # times that it has failed since it last delivered
    heard_at: float = 0.0  # when it last answered, or was started
    retry_at: float = 0.0  # when to go on with it


@dataclass
class Ledger:
    """What has become of the fragments in all of a run, stretches before --resume included: checkpoints keep it."""

    delivered: int = 0
    lost: int = 0
    consumed: int = 0
    restarts: int = 0
    lag_min: int | None = None
    lag_max: int | None = None
    lag_sum: float = 0
    bytes: int = 0
    seconds: float = 0.0

    def state_dict(self) -> dict[str, float | None]:
        return vars(self).copy()

    def load_state_dict(self, state: Mapping[str, float | None]) -> None:
        """Goes on from there; fragments that waited for a batch to be full are lost, and the mean lag is kept."""
        vars(self).update(state)
        self.lag_sum *= self.consumed / max(self.delivered, 1)
        self.delivered, self.lost = self.consumed, self.lost + self.delivered - self.consumed

    def deliver(self, lag: int, size: int) -> None:
        """Enters a fragment of `size` bytes."""
        self.delivered, self.lag_sum, self.bytes = self.delivered + 1, self.lag_sum + lag, self.bytes + size
        self.lag_min = lag if self.lag_min is None else min(lag, self.lag_min)
        self.lag_max = lag if self.lag_max is None else max(lag, self.lag_max)

    def summary(self) -> dict[str, float | None]:
        """For summary.json; bytes are of fragments."""
        lag_mean = round(self.lag_sum / self.delivered, 4) if self.delivered else None
        lags = {"lag_min": self.lag_min, "lag_mean": lag_mean, "lag_max": self.lag_max}
        counts = {f"fragments_{name}": getattr(self, name) for name in ("delivered", "lost", "consumed")}
        rate = round(self.bytes / self.seconds) if self.seconds else 0
        return lags | counts | {"actor_restarts": self.restarts, "bytes_per_second": rate}


class Fleet:
    """The actors and the ledger of their fragments: none delivered is learned from twice, each lost is counted.

    An actor has two calls in flight: it makes the second fragment while the learner takes the first. It gets no third
    call until then, so these calls are the queue, which is bounded, blocks, and drops nothing. An actor that dies,
    hangs or raises is replaced, which costs the fragments of its calls in flight, no more: by the spare actor if that
    stands by, with torch imported. A cluster of --ray-address has none, as its CPUs may be meant for others. If no
    actor can go on, or Ray can't, or the weights are not finite, `take` and `publish` raise RunError. Without Ray the
    one actor is called here; its errors are the run's.

    A fragment's lag is the number of versions published from the call for it until it is taken: with A equal actors
    about (2 A - 1) / --batch-fragments. One of more than --max-lag beyond --forced-lag counts as lost.
    """

    def __init__(self, args: Args, run: "Run", ledger: Ledger, make_envs: Callable, build: Callable, act: Callable):
        self.args, self.run, self.ledger, self.recipe = args, run, ledger, (args, make_envs, build, act)
        self.version, self.published = -1, collections.deque(maxlen=args.forced_lag + 1)
        self.lags = collections.deque(maxlen=args.batch_fragments)  # of the newest fragments
        self.taken = 0  # fragments since the last version of the weights, which the next is learned from
        self.seats, self.cause = [Seat(number) for number in range(args.num_actors)], "none has started yet"
        self.spare = Seat(None)
        self.clock = self.heard_at = self.head_asked_at = 0.0  # seconds, as `wait` counts them
        self.head_failures = 0  # in a row
        run.about |= ledger.summary()  # the summary has it, too, if there is no first fragment

    def __enter__(self):
        self.looked_at = self.published_at = time.monotonic()
        if self.args.num_actors:
            import ray

            self.ray, here = ray, ray.get_runtime_context()
            host, port = here.gcs_address.rsplit(":", 1)
            self.head = (host.strip("[]"), port)
            socket_name = next(node["RayletSocketName"] for node in ray.nodes() if node["NodeID"] == here.get_node_id())
            self.raylet = socket.socket(socket.AF_UNIX)
            try:
                self.raylet.connect(socket_name)
            except OSError as error:
                self.raylet.close()
                sys.exit(f"error: Ray's own process on this machine, the raylet, can't be reached ({error})")
            self.raylet.setblocking(False)
            # Ray restarts a process that has died but repeats no call (max_task_retries=0): steps can't be taken back
            self.remote = ray.remote(num_cpus=1, max_restarts=-1)(Actor)
        else:
            self.actor = Actor(*self.recipe)
            self.actor.start(number=0, incarnation=0, step=self.run.global_step)
        return self

    def __exit__(self, kind, error, traceback) -> None:
        self.ledger.seconds += time.monotonic() - self.published_at if self.version >= 0 else 0
        self.run.about |= self.ledger.summary()
        are_waited_for = kind is None  # those that are only starting
        self.close([seat for seat in self.seats if seat.is_ready or (seat.actor is not None and are_waited_for)], 5)
        (self.raylet if self.seats else self.actor).close()
        self.published.clear()
        for seat in (*self.seats, self.spare):
            seat.calls.clear()
            if seat.actor is not None:
                with contextlib.suppress(self.ray.exceptions.RayError):
                    self.ray.kill(seat.actor)
        if kind is RunError:
            sys.exit(f"error: {error}")

    def close(self, seats: Sequence[Seat], timeout: float) -> None:
        """Has actors end their work, for good, and close their environments, if they do so within `timeout` seconds."""
        with contextlib.suppress(RunError, KeyboardInterrupt):
            if seats:
                self.check_raylet()
                time.sleep(0.1)  # else Ray may drop a call that it has yet to send: the actor would wait 30 s for it
                for seat in seats:
                    for reference, is_fragment, _ in seat.calls:
                        if is_fragment:
                            self.ray.cancel(reference)
                self.ray.wait([seat.actor.close.remote() for seat in seats], num_returns=len(seats), timeout=timeout)

    def publish(self, weights: Sequence[torch.Tensor]) -> None:
        """Makes a new version of the weights, after an update with all that was taken; it goes out once."""
        now = time.monotonic()
        self.ledger.seconds += now - self.published_at if self.version >= 0 else 0  # what is compiled has been compiled
        self.ledger.consumed += self.taken
        self.published_at, self.version, self.taken = now, self.version + 1, 0
        arrays = [weight.detach().cpu().numpy().copy() for weight in weights]
        self.is_sound = all(np.isfinite(array.sum(dtype=np.float64)) for array in arrays)
        self.published.append((arrays, self.put(arrays), self.version))

    def put(self, arrays: list[np.ndarray]):
        """What actors are given to fetch the arrays by; raises RunError if there is no room for them."""
        if not self.seats:
            return arrays
        self.check_raylet()
        try:
            return self.ray.put(arrays)
        except self.ray.exceptions.RayError as error:
            raise RunError(f"the weights can't be sent: {reason_of(error)}") from None

    def take(self) -> dict[str, np.ndarray]:
        """The next fragment, [T, N, ...], entered in the ledger and in the run's files; waits for it."""
        if not self.is_sound:
            raise RunError(f"a weight or a statistic of the policy is not finite at step {self.run.global_step}")
        fragment = self.wait() if self.seats else self.actor.sample(*self.published[0][1:])
        number, _, _, version = fragment["stamp"].tolist()
        self.ledger.deliver(self.version - version, sum(array.nbytes for array in fragment.values()))
        self.lags.append(self.version - version)
        self.taken += 1
        run, env_ids = self.run, np.arange(self.args.num_envs) + number * self.args.num_envs
        run.returns.update(zip(env_ids, fragment["return_before"].tolist()))
        run.lengths.update(zip(env_ids, fragment["length_before"].tolist()))
        for t, valid in enumerate(fragment["valid"]):
            step = [fragment[name][t][valid].tolist() for name in ("score", "over", "truncated")]
            run.step(*step, env_ids[valid].tolist())
        return fragment

    def wait(self) -> dict[str, np.ndarray]:
        """The next fragment, of the actor that has had its turn longest ago; meanwhile, looks after the actors."""
        while True:
            now = time.monotonic()
            # This process may have been busy or stopped for long, in which no actor was asked for anything
            self.clock, self.looked_at = self.clock + min(now - self.looked_at, self.args.actor_timeout / 4), now
            self.ask_head()
            for seat in self.seats:
                self.tend(seat)
            self.tend_spare()
            # Of each actor only the oldest call, as Ray may show a later one as done before it
            waiting, done = {seat.calls[0][0]: seat for seat in (self.spare, *self.seats) if seat.calls}, []
            if waiting:
                done, _ = self.ray.wait([*waiting], num_returns=len(waiting), timeout=0)  # all that are, in order
                done = done or self.ray.wait([*waiting], num_returns=1, timeout=0.1)[0]
            else:
                time.sleep(0.05)
            if self.run.stop is not None:
                raise KeyboardInterrupt
            self.check_raylet()
            if done and (fragment := self.receive(waiting[done[0]])) is not None:
                return fragment
            if self.clock - self.heard_at > self.args.actor_timeout + self.patience(is_first=not self.heard_at):
                raise RunError(f"no actor answers any more; the last cause: {self.cause}")

    def receive(self, seat: Seat) -> dict[str, np.ndarray] | None:
        """The answer to a seat's oldest call; None if that failed, was of no fragment, or its weights are too old."""
        reference, is_fragment, weights = seat.calls.pop(0)
        try:
            answer = self.ray.get(reference)
        except self.ray.exceptions.RayError as error:
            self.ledger.lost += is_fragment
            if seat is self.spare:
                is_out = isinstance(error, self.ray.exceptions.ActorUnavailableError)  # Ray restarts it
                seat.actor, seat.is_ready = seat.actor if is_out else None, False
                seat.retry_at = self.clock + (0.1 if is_out else 30)
            else:
                self.mend(seat, error, weights)
            return None
        if seat is self.spare:
            seat.is_ready, seat.retry_at = True, self.clock + 5  # when it is asked again
            return None
        self.hear(seat, answer["stamp"][1].item() if is_fragment else answer)
        if is_fragment and (lag := self.version - answer["stamp"][3].item()) > self.args.forced_lag + self.args.max_lag:
            self.ledger.lost += 1
            self.note(seat, f"delivers a fragment {lag} versions old, which is lost (--max-lag)")
            return None
        return answer if is_fragment else None

    def patience(self, is_first: bool) -> int:
        """Seconds beyond --actor-timeout for which an actor is waited for that starts, for the first time or not."""
        return NODE_PATIENCE if is_first and self.args.ray_address else PATIENCE

    def ask_head(self, pause: float = 4) -> None:
        """Every `pause` seconds, raises RunError if the cluster's head has been lost; a minute later Ray would end this
        process."""
        if self.clock - self.head_asked_at < pause:
            return
        self.head_asked_at = self.clock
        try:
            socket.create_connection(self.head, timeout=1).close()
            self.head_failures = 0
        except OSError as error:
            self.head_failures += 1
            if self.head_failures == 5:
                raise RunError(f"the head of the Ray cluster is lost ({error})") from None

    def check_raylet(self) -> None:
        """Raises RunError if Ray's process on this machine has died: the next use of its memory would end this one."""
        try:
            self.raylet.recv(1)  # nothing is ever sent
        except BlockingIOError:
            return
        except OSError:
            pass
        if self.run.stop is not None:  # a signal that has gone to Ray's processes, too
            raise KeyboardInterrupt
        raise RunError("Ray's own process on this machine, the raylet, has died")

    def hear(self, seat: Seat, incarnation: int) -> None:
        """Notes that an actor has answered, in which of its lives."""
        if seat.incarnation != incarnation:
            self.ledger.restarts += seat.incarnation is not None
            self.spare.retry_at = self.clock + 1
        seat.incarnation, seat.heard_at, self.heard_at = incarnation, self.clock, self.clock
        seat.failures = 0 if seat.is_ready else seat.failures  # if it was, this is a fragment
        seat.is_ready = True
        self.seats.remove(seat)
        self.seats.append(seat)

    def tend(self, seat: Seat) -> None:
        """Sees to it that an actor holds the seat, that it is at work, and that it does not hang."""
        limit, silence = self.args.actor_timeout, self.clock - seat.heard_at
        patience = self.patience(is_first=seat.incarnation is None and not seat.failures)
        if self.clock < seat.retry_at:
            return
        if seat.actor is None:
            seat.actor, seat.is_ready, seat.heard_at = self.remote.remote(*self.recipe), False, self.clock
        elif not seat.is_ready and silence > limit + patience:
            free, all_cpus = (get().get("CPU", 0) for get in (self.ray.available_resources, self.ray.cluster_resources))
            silent = f"no answer for {limit + patience} s (--actor-timeout and {patience} more)"
            self.replace(seat, f"does not start: {silent}; {free:g} of {all_cpus:g} CPUs are free")
            return
        # A call that has long been finished may wait for a slow learner
        elif seat.is_ready and seat.calls and silence > limit and not self.is_done(seat.calls[0][0]):
            remedy = "if its environments are only slow, raise that or lower --fragment-length"
            self.replace(seat, f"hangs: no answer for {limit} s (--actor-timeout); {remedy}")
            return
        weights, version = self.published[0][1:]
        while len(seat.calls) < (2 if seat.is_ready else 1):
            if seat.is_ready:
                call = seat.actor.sample.remote(weights, version)
            else:
                call = seat.actor.ready.remote(seat.number, seat.lives, self.run.global_step)
                seat.lives += 1
            seat.calls.append((call, seat.is_ready, weights))

    def tend_spare(self) -> None:
        """Sees to it that one more actor stands by once all are at work, if there is a CPU for it."""
        spare = self.spare
        silence = self.clock - spare.heard_at
        if spare.calls and silence > self.args.actor_timeout + PATIENCE and not self.is_done(spare.calls[0][0]):
            self.ray.kill(spare.actor)
            self.abandon_calls(spare)
            spare.actor, spare.is_ready = None, False
        if self.args.ray_address or spare.calls or self.clock < spare.retry_at:
            return
        if spare.actor is None:
            if self.head_failures or not all(seat.is_ready for seat in self.seats):
                return
            self.ask_head(pause=0)
            if self.head_failures:  # without a head, what follows would wait for one
                return
            if self.ray.available_resources().get("CPU", 0) < 1:
                spare.retry_at = self.clock + 30
                return
            spare.actor = self.remote.remote(*self.recipe)
        spare.calls.append((spare.actor.stand_by.remote(), False, None))
        spare.heard_at = self.clock

    def swap(self, seat: Seat) -> None:
        """Gives the seat to the spare actor if that stands by; the seat's own, or none, is then the spare one."""
        if self.spare.is_ready and not self.spare.calls:
            seat.actor, self.spare.actor = self.spare.actor, seat.actor
            self.spare.is_ready, self.spare.retry_at, seat.heard_at = False, self.clock + 0.1, self.clock

    def is_done(self, reference) -> bool:
        return bool(self.ray.wait([reference], timeout=0, fetch_local=False)[0])

    def mend(self, seat: Seat, error: Exception, weights) -> None:
        """Does what the error of a call that was made with these weights asks for."""
        exceptions = self.ray.exceptions
        is_out = isinstance(error, exceptions.ActorUnavailableError)
        if is_out and seat.incarnation is None:
            self.replace(seat, f"dies while it starts, or is out of reach: {reason_of(error)}")
        elif is_out:  # Ray restarts it, or the network is down: the spare one goes on, or this one is asked again
            if seat.is_ready:
                self.note(seat, f"is dead or out of reach, and is asked again or replaced: {reason_of(error)}")
                seat.heard_at = self.clock
            self.abandon_calls(seat)
            self.swap(seat)
            self.count_failure(seat, seat.is_ready, delay=0.1)
            seat.is_ready = False
        elif isinstance(error, exceptions.ObjectLostError):  # the fragment, or the weights: these go out anew, once
            self.note(seat, f"lost a fragment: {reason_of(error)}")
            anew = [(arrays, self.put(arrays) if put is weights else put, v) for arrays, put, v in self.published]
            self.published = collections.deque(anew, self.published.maxlen)
            self.count_failure(seat, True, delay=0.1)
        else:
            self.close([seat], 1)
            self.replace(seat, f"failed: {reason_of(error)}")

    def replace(self, seat: Seat, cause: str) -> None:
        """Gives the seat to a new process."""
        self.note(seat, cause)
        self.ray.kill(seat.actor)
        self.abandon_calls(seat)
        self.ledger.restarts += 1
        seat.actor = seat.incarnation = None
        seat.is_ready = False
        self.swap(seat)
        self.count_failure(seat, True, delay=0.2 * 2 ** min(seat.failures, 5))

    def abandon_calls(self, seat: Seat) -> None:
        """Counts the fragments of the calls in flight as lost."""
        self.ledger.lost += sum(is_fragment for _, is_fragment, _ in seat.calls)
        seat.calls = []

    def count_failure(self, seat: Seat, counts: bool, delay: float) -> None:
        """Leaves an actor alone for some seconds; raises RunError if none has delivered for three failures."""
        seat.failures, seat.retry_at = seat.failures + counts, self.clock + delay
        if all(other.failures >= 3 for other in self.seats):
            raise RunError(f"every actor fails time and again; the last cause: {self.cause}")

    def note(self, seat: Seat, what: str) -> None:
        self.cause = f"actor {seat.number} {what}"
        self.run.bar.write(f"step {self.run.global_step}: {self.cause}", file=sys.stderr)


def reason_of(error: Exception) -> str:
    """An error of Ray's in one line; of what the environments raised in an actor, with the place in their code."""
    lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    places = re.findall(r'File "(.+)", line (\d+)', str(error))[-1:]
    place = [f" ({file}:{number})" for file, number in places if file != __file__]
    if (cause := getattr(error, "cause", None)) is not None:  # what the actor raised
        return "".join([f"{type(cause).__name__}: {' '.join(str(cause).split())}", *place])
    if getattr(error, "actor_init_failed", False):  # a traceback, and below it what was raised
        raised = [i for i, line in enumerate(lines) if re.match(r"[A-Za-z_][\w.]*: ", line)]
        return "".join([" ".join(" ".join(lines[raised[-1] if raised else -1 :]).split()), *place])
    return next((line for line in lines if "because" in line), lines[0]).strip()


# ---- Main ----
def shapes(args: Args) -> tuple[tuple[int, ...], int | tuple[int]]:
    """The shape of an observation, and the number of actions or, of continuous ones, the shape.

    Ends the program with exit status 2 if they don't suit.
    """
    if is_atari(args.env_id):
        with contextlib.closing(AtariEnvironments(replace(args, num_envs=1), 0, 0)) as games:
            return (4, 84, 84), int(games.envs.action_space.n)
    with make_environments(replace(args, num_envs=1))[0] as env:
        if isinstance(env.action_space, gym.spaces.Box):
            check_continuous_spaces(args, env)
            return env.observation_space.shape, env.action_space.shape
        if not isinstance(env.action_space, gym.spaces.Discrete):
            fail("env_id", args.env_id, f"its actions must be Discrete or a float Box, not {env.action_space}")
        check_discrete_spaces(args, env)
        return env.observation_space.shape, int(env.action_space.n)


def main(args: Args) -> None:
    check_args(args)
    check_ray(args)
    prepare_ray(args)
    check_rollout(args, args.num_envs * args.fragment_length * args.batch_fragments)
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    if args.torch_deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    shape, actions = shapes(args)
    if len(shape) == 1:
        torch.set_num_threads(1)  # a network this small is slower on several
    torch.set_flush_denormal(True)  # moments of Adam that die away would become the CPU's slowest numbers
    with room_for(args):
        agent = CompiledAPPOAgent(args, shape, actions, device)

    build = functools.partial(make_actor_critic, shape, actions)
    if agent.is_continuous:
        recipe = (BoundedEnvironments, build, act_continuous)
    else:
        recipe = (AtariEnvironments if len(shape) == 3 else GymEnvironments, build, act_discrete)
    with ray_session(args), Run(args, device, agent) as run, Fleet(args, run, agent.ledger, *recipe) as fleet:
        # Compilation and capture: full graphs to prepare a batch and to update
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

        fleet.publish(agent.weights())
        learning_rate = args.learning_rate
        while run.global_step < args.total_timesteps:
            # Collect
            if args.anneal_lr:
                learning_rate = linear_schedule(args.learning_rate, 0.0, args.total_timesteps, run.global_step)
                agent.optimizer.lr.fill_(learning_rate)
            for i in range(args.batch_fragments):
                agent.fill(i, fleet.take())
            lags = {"lag_min": min(fleet.lags), "lag_mean": float(np.mean(fleet.lags)), "lag_max": max(fleet.lags)}

            # Learn
            agent.scale_rewards()
            agent.batch.upload()
            agent.prepare()
            for _ in range(args.update_epochs):
                order = torch.randperm(len(agent.rows["valid"]), device=device)
                for chosen in order.chunk(args.num_minibatches):
                    agent.update(chosen)
                    run.updates += 1
                if args.target_kl is not None and agent.losses["approx_kl"] > args.target_kl:
                    break

            # Send the new weights out
            agent.follow_observations()
            fleet.publish(agent.weights())
            run.end_step(agent.losses, learning_rate=learning_rate, **lags)


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


def check_ray(args: Args) -> None:
    """Ends the program with exit status 2 if it can't have the actors that are asked for."""
    if args.num_actors and importlib.util.find_spec("ray") is None:
        fail("num_actors", args.num_actors, "needs the ray package: pip install ray")
    if args.ray_address is not None and not args.num_actors:
        fail("ray_address", args.ray_address, "needs --num-actors of at least 1")
    if args.max_lag < (least := 4 * args.num_actors // args.batch_fragments):  # twice what is usual
        fail("max_lag", args.max_lag, f"must be at least {least} with so many actors")
    # With torch a process has 150 MB of its own, or more
    most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 150_000_000
    if not args.ray_address and args.num_actors > most:
        fail("num_actors", args.num_actors, f"must be at most {most} in the memory of this machine")


def check_discrete_spaces(args: Args, env: gym.Env) -> None:
    """Ends the program with exit status 2 unless observations are vectors and actions are 0, 1, …, n - 1."""
    observations, actions = env.observation_space, env.action_space
    if not isinstance(observations, gym.spaces.Box) or len(observations.shape) != 1 or not observations.shape[0]:
        fail("env_id", args.env_id, f"its observations must be a 1-D Box or a Dict of Boxes, not {observations}")
    if not isinstance(actions, gym.spaces.Discrete) or actions.start != 0:
        fail("env_id", args.env_id, f"its actions must be Discrete and start at 0, not {actions}")


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
