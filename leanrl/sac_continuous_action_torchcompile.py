# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "gymnasium[mujoco]>=1.4,<1.5", "numpy>=1.26", "tqdm>=4.66", "tyro>=1.0",
#   "tensordict>=0.15,<0.16",
# ]
# ///
"""Soft actor-critic for continuous actions (Haarnoja et al. 2018, https://arxiv.org/abs/1812.05905).

An off-policy method: a tanh-squashed Gaussian policy maximises reward plus entropy, two critics learn its soft
value from replayed transitions (the smaller estimate counts), and the temperature α is tuned towards a target entropy.
`sac_continuous_action.py` is the eager reference; `sac_continuous_action_torchcompile.py` is the same at full speed.

    python leanrl/sac_continuous_action.py --env-id HalfCheetah-v4 --seed 1
    python leanrl/sac_continuous_action_torchcompile.py --env-id HalfCheetah-v4 --seed 1 --compile --cudagraphs

Published return at 1M steps (CleanRL): HalfCheetah-v4 9,635 ± 1,424. Our own returns and fps are in the README.
To copy the algorithm alone, put the short `Run` of the README in the place of the part "Checks and recording".
"""

import array
import collections
import contextlib
import copy
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
import torch.nn.functional as F
import tyro
from tensordict import TensorDict
from tensordict.nn import CudaGraphModule
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

LOG_STD_MIN, LOG_STD_MAX = -5.0, 2.0

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
    tf32: bool = False
    """let a GPU multiply matrices in TF32: faster, with 10 bits of mantissa instead of 23"""
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

    buffer_size: Count = 1_000_000
    """capacity of the replay buffer, in transitions; a short run allocates no more than it can fill"""
    save_replay: bool = False
    """keep the replay buffer in the checkpoint; without it a resumed run first collects --learning-starts steps anew"""
    gamma: Fraction = 0.99
    """discount factor, per step"""
    tau: Fraction = 0.005
    """target smoothing coefficient τ: the weight of the new parameters; 1 copies them"""
    batch_size: Count = 256
    """transitions per update"""
    learning_starts: Natural = 5_000
    """environment steps before the first update; SAC and TD3 act at random until then"""
    policy_lr: Positive = 3e-4
    """Adam's learning rate for the policy"""
    q_lr: Positive = 1e-3
    """Adam's learning rate for the critics and for α"""
    policy_frequency: Count = 2
    """critic updates per policy update, due from the first on; SAC makes that many in a row, TD3 moves its targets"""
    target_network_frequency: Count = 1
    """environment steps between updates of the target networks"""
    alpha: NonNegative = 0.2
    """entropy temperature α when it is not tuned"""
    autotune: bool = True
    """tune α towards an entropy of minus the number of action dimensions, for actions in [-1, 1]"""

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


def action_bounds(args: Args, env: gym.Env, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The lowest and the highest actions, [A]; ends the program with exit status 2 if a range has no end, or hardly."""
    low, high = (torch.as_tensor(bound).float() for bound in (env.action_space.low, env.action_space.high))
    if not (high / 2 - low / 2 <= 1e9).all():  # dm_control writes ±1e10 for no limit
        fail("env_id", args.env_id, f"its actions must be in bounds at most 2e9 apart, not {env.action_space}")
    return low.to(device), high.to(device)


# ---- Networks ----
class QNetwork(nn.Module):
    """Action value; [B, observation_dim], [B, action_dim] -> [B]."""

    def __init__(self, observation_dim: int, action_dim: int):
        super().__init__()
        self.fc1 = nn.Linear(observation_dim + action_dim, 256)
        self.fc2 = nn.Linear(256, 256)
        self.fc3 = nn.Linear(256, 1)

    def forward(self, observation: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.fc1(torch.cat([observation, action], -1)))
        return self.fc3(F.relu(self.fc2(x))).squeeze(-1)


class GaussianActor(nn.Module):
    """Mean and log standard deviation of the policy's Gaussian; [B, observation_dim] -> two of [B, action_dim]."""

    def __init__(self, observation_dim: int, action_dim: int):
        super().__init__()
        self.fc1 = nn.Linear(observation_dim, 256)
        self.fc2 = nn.Linear(256, 256)
        self.fc_mean_and_log_std = nn.Linear(256, 2 * action_dim)

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = F.relu(self.fc2(F.relu(self.fc1(observation))))
        mean, log_std = self.fc_mean_and_log_std(x).chunk(2, -1)
        return mean, LOG_STD_MIN + (LOG_STD_MAX - LOG_STD_MIN) * (torch.tanh(log_std) + 1) / 2


def squashed_gaussian(
    mean: torch.Tensor, log_std: torch.Tensor, noise: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Action tanh(mean + std · noise) · scale + bias and its log-probability (appendix C); [B, A] -> [B, A], [B]."""
    squashed = torch.tanh(mean + noise * log_std.exp())
    log_prob = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
    log_prob = log_prob - torch.log(scale * (1 - squashed.square()) + 1e-6)
    return squashed * scale + bias, log_prob.sum(-1)


# ---- Host and device ----
def mirrored(*shape: int, device: torch.device, dtype=torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Zeros in the host's memory, pinned for CUDA, and on `device`; for a CPU they are the same tensor."""
    host = torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")
    return host, host.to(device)


# ---- Replay ----
class ReplayRing:
    """The last transitions, on `device`, sampled uniformly with replacement; each observation is held once.

    Transition n is row n % rows: its action, its reward, and two slots, of its observation and of the next one, which
    is the following transition's observation unless an episode ends. Slots are taken in turn. A terminated transition
    names its own slot twice, as nothing is bootstrapped from where it leads.

    The host stages transitions, `send` sends them in one copy, and `write` puts them in place. What `send`, `write`,
    `draw`, `pick` and `sample` work on are tensors of fixed address and shape: they can be a part of a captured step.
    """

    def __init__(self, args: Args, env: gym.Env, device: torch.device, batches: int = 1):
        self.capacity = min(args.buffer_size, args.total_timesteps + args.num_envs)
        self.device, self.added, self.oldest, self.filled = device, 0, 0, 0
        frequency = getattr(args, "train_frequency", 1)
        most_staged = -(-frequency // args.num_envs) * args.num_envs  # between two uploads
        self.rows, self.ahead = max(self.capacity, most_staged), 4 * most_staged  # slots of two uploads
        # A truncation takes one more slot, for its last observation; if they are more frequent, fewer transitions fit
        truncations = self.rows // min(env.spec.max_episode_steps or 10, 100)
        self.slots, self.taken = self.rows + truncations + 2 * self.ahead, 0
        self.owners = array.array("i", [-1]) * self.slots  # the newest transition of each slot
        self.arrived = [None] * args.num_envs  # the slots of what each environment has arrived at; None: begins anew

        space, action_shape = env.observation_space, env.action_space.shape
        observation_dim = space.shape[0]
        # Some environments declare bytes and give other numbers
        is_uint8 = space.dtype == np.uint8 and np.asarray(env.reset(seed=args.seed)[0]).dtype == np.uint8
        dtype = torch.uint8 if is_uint8 else torch.float32
        self.storage = TensorDict(
            observation=torch.zeros(self.slots, observation_dim, dtype=dtype, device=device),
            slots=torch.zeros(self.rows, 2, dtype=torch.int32, device=device),
            action=torch.zeros(self.rows, *action_shape, device=device),
            reward=torch.zeros(self.rows, device=device),
        )
        self.drawn = torch.zeros(batches, args.batch_size, dtype=torch.long, device=device)
        self.turn = torch.zeros(1, dtype=torch.long, device=device)

        # What is sent of a transition: both observations, action, reward, and the bits of five integers, its row and
        # slots, the oldest that may be drawn, and how many there are
        self.widths = [2 * observation_dim, math.prod(action_shape), 1, 5]
        self.staged, self.incoming = mirrored(most_staged, sum(self.widths), device=device)
        self.host_rows = self.staged.numpy()
        observations, *columns, integers = [column.numpy() for column in self.staged.split(self.widths, 1)]
        self.columns = [*np.split(observations, 2, 1), *columns, integers.view(np.int32)[:, :3]]
        self.bounds = integers.view(np.int32)[:, 3:]
        self.sent = torch.get_device_module(device).Event()
        self.nbytes = sum(field.nbytes for field in self.storage.values())
        self.saved_nbytes = self.nbytes + self.incoming.nbytes + 4 * self.slots

    def add(self, observation, next_observation, action, reward, terminated, truncated) -> None:
        """Stages a transition; the environments take turns."""
        if self.filled == 0:
            self.sent.synchronize()  # only then may what was sent be overwritten
        i = self.added % len(self.arrived)
        slot = self.take_slot() if self.arrived[i] is None else self.arrived[i]
        next_slot = slot if terminated else self.take_slot()
        self.arrived[i] = None if terminated or truncated else next_slot
        self.owners[slot] = self.added
        places = (self.added % self.rows, slot, next_slot)
        transition = (observation, observation if terminated else next_observation, action, reward, places)
        for column, value in zip(self.columns, transition, strict=True):
            column[self.filled] = value
        self.filled, self.added = self.filled + 1, self.added + 1

    def take_slot(self) -> int:
        """The next slot. Transitions whose slots are taken again within `ahead` more are drawn no longer."""
        self.oldest = max(self.oldest, self.owners[(self.taken + self.ahead) % self.slots] + 1)
        self.taken += 1
        return (self.taken - 1) % self.slots

    def complete(self) -> None:
        """Fills the free staged rows with copies of the last one, so that all can be sent."""
        self.host_rows[self.filled :] = self.host_rows[self.filled - 1]
        self.bounds[:] = self.oldest, self.added
        self.filled = 0

    def send(self) -> None:
        """Sends the staged rows to the device."""
        self.incoming.copy_(self.staged, non_blocking=True)

    def upload(self) -> None:
        """Completes the staged rows, sends them, and lets `add` wait until they have left."""
        self.complete()
        self.send()
        self.sent.record()

    def write(self) -> None:
        """Puts the rows that were sent into the ring; a second call changes nothing."""
        observations, action, reward, integers = self.incoming.split(self.widths, 1)
        row, slots = integers.view(torch.int32)[:, 0].long(), integers.view(torch.int32)[:, 1:3]
        seen, actions = self.storage["observation"], self.storage["action"]
        seen[slots.flatten().long()] = observations.reshape(slots.numel(), -1).to(seen.dtype)
        actions[row] = action.view(-1, *actions.shape[1:])
        self.storage["reward"][row] = reward.squeeze(1)
        self.storage["slots"][row] = slots

    def draw(self, coming: int = 0) -> torch.Tensor:
        """Random ages, 0 for the newest once `coming` more are in the ring, uniform; [batches, batch_size]."""
        oldest, newest = self.incoming[-1:, -2:].view(torch.int32).long().unbind(1)
        count = (newest + coming - oldest).clamp(1, self.capacity)
        return torch.randint(2**62, self.drawn.shape, device=self.device) % count

    def pick(self, ages: torch.Tensor, coming: int = 0) -> None:
        """Chooses the batches for `sample` by age, as the ages will be once `coming` more transitions are added."""
        self.drawn.copy_(self.incoming[-1:, -1].view(torch.int32).long() + coming - 1 - ages)
        self.turn.zero_()

    def sample(self) -> dict[str, torch.Tensor]:
        """The next of the batches drawn: float32 tensors of [batch_size, ...] by their names."""
        number = self.drawn.index_select(0, self.turn).squeeze(0)
        self.turn.add_(1).remainder_(len(self.drawn))
        return self.gather(number)

    def gather(self, number: torch.Tensor) -> dict[str, torch.Tensor]:
        """The transitions of these numbers; [B] -> tensors of [B, ...]."""
        row = number % self.rows
        slots = self.storage["slots"][row].long()
        observation, next_observation = self.storage["observation"][slots].float().unbind(1)
        batch = {"observation": observation, "next_observation": next_observation}
        batch |= {name: self.storage[name][row] for name in ("action", "reward")}
        return batch | {"terminated": (slots[:, 0] == slots[:, 1]).float()}

    def state_dict(self) -> dict:
        """What is in it, for a checkpoint."""
        if self.filled:
            self.complete()
        self.send()
        self.write()
        state = {name: getattr(self, name) for name in ("added", "oldest", "taken")}
        state |= {"owners": torch.tensor(self.owners, dtype=torch.int32), "incoming": self.incoming.cpu()}
        ends = dict.fromkeys(self.storage.keys(), self.added) | {"observation": self.taken}
        return state | {name: self.storage[name][:end].to("cpu", copy=True) for name, end in ends.items()}

    def load_state_dict(self, state: Mapping) -> None:
        """Fills a new ring, of the same capacity or, if it was not full, a larger one; all episodes begin anew."""
        for name, field in self.storage.items():
            field[: len(state[name])] = state[name]
        for rows in (self.staged, self.incoming):
            rows.copy_(state["incoming"])
        self.owners[: len(state["owners"])] = array.array("i", state["owners"].tolist())
        self.added, self.oldest, self.taken = (state[name] for name in ("added", "oldest", "taken"))
        if len(state["owners"]) < min(self.taken, self.slots):  # it has grown, and had taken all of its slots
            self.taken = self.slots + self.taken % len(state["owners"])


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


def use_onednn() -> None:
    """Has oneDNN make the large products of what is compiled on AMD's Zen 5, where MKL leaves AVX-512 unused."""
    cpu = Path("/proc/cpuinfo").read_text() if sys.platform == "linux" and torch.backends.mkldnn.is_available() else ""
    if not re.search(r"AuthenticAMD\ncpu family\s*: (2[6-9]|[3-9]\d)\n", cpu):  # its family, 26, or a later one
        return
    from torch._inductor import decomposition, lowering  # which take long to import

    aten, gemm = torch.ops.aten, torch.ops.mkldnn._linear_pointwise.default
    lowering.make_fallback(gemm, lowering.constrain_to_fx_strides)  # Inductor's own rule is for constant weights

    def decompose(a, b):
        is_large = math.prod(a.shape[-2:]) * b.shape[-1] >= 2**21  # fewer are no faster on one or two cores
        if not is_large or (a.dtype, a.device.type) != (torch.float32, "cpu") or math.prod(a.shape[:-2]) > 8:
            return (decomposition.mm if a.ndim == 2 else decomposition.bmm)(a, b)
        if a.ndim == 3:
            return torch.stack([*map(torch.mm, a, b)])
        # [None][0] keeps Inductor from fusing what follows into it, which needs weights that are constant
        return gemm(a.contiguous(), b.mT, None, "none", [], "")[None][0]

    decomposition.decompositions |= {aten.mm.default: decompose, aten.bmm.default: decompose}
    # Else torch would find what it compiled before. Count up with each change of this function
    torch.compiler.config.cache_key_tag = os.environ.get("TORCH_COMPILE_CACHE_KEY_TAG", "") + "oneDNN 1"


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
class CompiledSACAgent(nn.Module):
    """Networks, their optimisers, and the updates on them; a loss is a function of what it is differentiated by."""

    def __init__(self, args: Args, env: gym.Env, device: torch.device, buffer: ReplayRing):
        super().__init__()
        self.args, self.buffer, self.write = args, buffer, buffer.write
        observation_dim, self.action_dim = env.observation_space.shape[0], env.action_space.shape[0]
        self.action_space, (low, high) = env.action_space, action_bounds(args, env, device)
        self.scale, self.bias = (high - low) / 2, (high + low) / 2
        # -action_dim for actions in [-1, 1] (appendix D); scaling an action by s adds log s to its entropy
        self.target_entropy = self.scale.clamp(min=1e-6).log().sum() - self.action_dim  # a range may be 0
        self.actor_module = FlatModule(GaussianActor(observation_dim, self.action_dim))
        self.q_module, twin = (FlatModule(QNetwork(observation_dim, self.action_dim)) for _ in range(2))
        if [*twin.module.buffers()]:
            raise ValueError("critics with buffers, of which only the first's would be used")
        self.actor = nn.Buffer(self.actor_module.initial.to(device))
        critics = torch.stack([self.q_module.initial, twin.initial])
        # Rows of one matrix, filled with zeros, so that all begin at multiples of 64 bytes: cuBLAS is slower elsewhere
        self.critics = nn.Buffer(F.pad(critics, (0, -critics.shape[1] % 16)).to(device))
        self.target_critics = copy.deepcopy(self.critics).requires_grad_(False)
        log_alpha = 0.0 if args.autotune else math.log(max(args.alpha, 1e-30))  # 0 has no logarithm
        self.log_alpha = nn.Buffer(torch.tensor(log_alpha, device=device))
        self.actor_optimizer = Adam(self.actor, lr=args.policy_lr)
        self.critic_optimizer = Adam(self.critics, lr=args.q_lr)
        self.alpha_optimizer = Adam(self.log_alpha, lr=args.q_lr)
        names = ("qf_loss", "actor_loss", "alpha", *["alpha_loss"] * args.autotune)
        self.losses = {name: torch.zeros((), device=device) for name in names}
        self.losses["alpha"].copy_(self.log_alpha.detach().exp())
        for name, loss in self.losses.items():  # a resumed run logs them until they are computed anew
            self.register_buffer(f"last_{name}", loss)
        self.batch = {"observation": torch.zeros(args.batch_size, observation_dim, device=device)}
        self.host_observation, self.observation = mirrored(args.num_envs, observation_dim, device=device)
        self.host_outbox, self.outbox = mirrored(args.num_envs * self.action_dim + 1, device=device)
        self.host_arrays = self.host_observation.numpy(), self.host_outbox.numpy()
        self.acted = torch.cuda.Event(external=True) if args.cudagraphs else torch.get_device_module(device).Event()
        self.next_ages, self.has_drawn, self.must_wait = torch.zeros_like(buffer.drawn), False, True

    def policy(self, actor, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A sampled action and its log-probability; [B, observation_dim] -> [B, A], [B]."""
        mean, log_std = self.actor_module(actor, observation)
        return squashed_gaussian(mean, log_std, torch.randn_like(mean), self.scale, self.bias)

    def q_values(self, critics, observation: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        """Both critics' values; [B, observation_dim], [B, A] -> [2, B]."""
        return torch.vmap(lambda critic: self.q_module(critic, observation, action))(critics)

    def act(self, observation: np.ndarray, updates: Sequence[tuple[bool, ...]] = ()) -> np.ndarray:
        """Sampled actions; [num_envs, observation_dim] -> [num_envs, A].

        `updates`, each the arguments of `learn`, follow the acting: a GPU is still at them when this returns.
        `must_wait` then tells whether the updates that follow the next actions must wait for the environments.
        """
        if not self.has_drawn:
            self.next_ages.copy_(self.buffer.draw(coming=self.args.num_envs))
            self.has_drawn = True
        inbox, outbox = self.host_arrays
        inbox[:] = observation
        first, *others = updates or [()]
        self.exchange(*first)
        for update in others:
            self.learn(*update)
        self.acted.synchronize()
        self.must_wait, action, space = bool(outbox[-1]), outbox[:-1].reshape(-1, self.action_dim), self.action_space
        # A rounding may have passed the bounds
        return np.minimum(np.maximum(action, space.low), space.high).astype(space.dtype, copy=False)

    def exchange(self, *update: bool) -> None:
        """Sends the observations and what is staged, acts, and fetches the actions; then comes an update, if given."""
        self.buffer.send()
        self.observation.copy_(self.host_observation, non_blocking=True)
        self.choose()
        self.host_outbox.copy_(self.outbox, non_blocking=True)
        self.acted.record()
        if update:
            self.learn(*update)

    def choose(self) -> None:
        """Stores what was sent, acts, and draws the transitions of the updates that follow the next actions.

        The updates must wait if a transition of the same step is among them; else they run beside the environments.
        """
        self.buffer.write()
        action, _ = self.policy(self.actor, self.observation)
        # Ages, not numbers: Inductor would overwrite these with the next draw before the copy (PyTorch's issue 198131)
        self.buffer.pick(self.next_ages, coming=self.args.num_envs)
        self.next_ages.copy_(self.buffer.draw(coming=2 * self.args.num_envs))
        must_wait = self.next_ages.min() < self.args.num_envs
        self.outbox.copy_(torch.cat([action.flatten(), must_wait.float().view(1)]))

    def qf_loss(self, critics, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Soft Bellman residual (eq. 5 and 6), summed over both critics."""
        with torch.no_grad():
            next_action, next_log_prob = self.policy(self.actor, batch["next_observation"])
            next_q = self.q_values(self.target_critics, batch["next_observation"], next_action).min(0).values
            next_value = next_q - self.log_alpha.exp() * next_log_prob
            target = batch["reward"] + self.args.gamma * (1 - batch["terminated"]) * next_value
        q = self.q_values(critics, batch["observation"], batch["action"])
        return (q - target).square().mean(1).sum()

    def actor_loss(self, actor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """E[α log π - min Q]: the divergence from exp(min Q / α), but for a factor and a constant (eq. 7)."""
        action, log_prob = self.policy(actor, batch["observation"])
        q = self.q_values(self.critics, batch["observation"], action).min(0).values
        return (self.log_alpha.detach().exp() * log_prob - q).mean()

    def alpha_loss(self, log_alpha: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """E[-α (log π + target entropy)], α's dual loss: α grows while the entropy is below its target (eq. 18)."""
        with torch.no_grad():
            _, log_prob = self.policy(self.actor, batch["observation"])
        return (-log_alpha.exp() * (log_prob + self.target_entropy)).mean()

    def minimize(self, name: str, parameters, optimizer, batch: dict[str, torch.Tensor]) -> None:
        """One step of the optimiser on the loss that the method `name` gives, which is logged under it."""
        gradient, loss = torch.func.grad_and_value(getattr(self, name))(parameters, batch)  # by name for torch 2.11
        optimizer.step(parameters, gradient)
        self.losses[name].copy_(loss.detach())

    def update_critics(self, targets_are_due: bool) -> None:
        """One update on the next batch, whose observations are kept for the actor's updates."""
        batch = self.buffer.sample()
        self.minimize("qf_loss", self.critics, self.critic_optimizer, batch)
        self.batch["observation"].copy_(batch["observation"])
        if targets_are_due:
            self.target_critics.lerp_(self.critics, self.args.tau)

    def update_actor(self) -> None:
        """One update of the actor, and of α."""
        self.minimize("actor_loss", self.actor, self.actor_optimizer, self.batch)
        if self.args.autotune:
            self.minimize("alpha_loss", self.log_alpha, self.alpha_optimizer, self.batch)
            self.losses["alpha"].copy_(self.log_alpha.detach().exp())

    def learn(self, policy_is_due: bool, targets_are_due: bool) -> None:
        """One update of everything that is due."""
        self.update_critics(targets_are_due)
        if policy_is_due:
            for _ in range(self.args.policy_frequency):  # makes up for the steps in which it was not due
                self.update_actor()


def main(args: Args) -> None:
    check_args(args)
    check_replay(args)
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    if args.torch_deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    torch.backends.cuda.matmul.allow_tf32 = args.tf32
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    envs = make_environments(args)
    check_continuous_spaces(args, envs[0])
    torch.set_flush_denormal(True)  # moments of Adam that die away would become the CPU's slowest numbers
    with room_for(args):
        buffer = ReplayRing(args, envs[0], device, batches=args.num_envs)
        agent = CompiledSACAgent(args, envs[0], device, buffer)
        torch.empty(8, args.batch_size, 256, device=device)  # an update must fit too
    announce_replay(args, buffer, device)

    with contextlib.ExitStack() as stack, Run(args, device, agent, buffer) as run:
        for env in envs:
            stack.enter_context(env)  # which closes it in the end
        policy_frequency, target_frequency = args.policy_frequency, args.target_network_frequency
        # Compilation: full graphs to act and to update. Capture: one to act, with its transfers, one for each kind of
        # update, one to act and make it, and one to store what an update must wait for
        if args.compile:
            torch.compiler.reset()  # forgets what earlier runs in this process have compiled
            options = {"fallback_random": True, "deterministic": args.torch_deterministic}  # eager's draws
            options |= {"cpp_wrapper": device.type == "cpu", "cpp.vec_isa_ok": True, "size_asserts": False}  # no checks
            options |= {"guard_filter_fn": lambda guards: ["_due" in g.name for g in guards]}  # others are constant
            use_onednn()
            for name in ("choose", "update_critics", "update_actor"):  # with a copy, as it pops the filter
                setattr(agent, name, torch.compile(getattr(agent, name), fullgraph=True, options=dict(options)))
        numbers = range(min(policy_frequency * target_frequency, args.total_timesteps + args.num_envs))
        kinds = dict.fromkeys((n % policy_frequency == 0, n % target_frequency == 0) for n in numbers)
        logging.getLogger("tensordict").setLevel("WARNING")  # it would tell of each capture
        capture = functools.partial(CudaGraphModule, warmup=3) if args.cudagraphs else lambda step: step
        learn = {kind: capture(functools.partial(agent.learn, *kind)) for kind in kinds}
        exchange = {kind: capture(functools.partial(agent.exchange, *kind)) for kind in [(), *kinds]}
        agent.write = capture(buffer.write)
        if args.compile or args.cudagraphs:
            warm_up([agent.write, *learn.values(), *exchange.values()], agent, run)
        agent.learn, agent.exchange = lambda *kind: learn[kind](), lambda *kind: exchange[kind]()

        observation = np.stack(first_observations(envs, args.seed, run.global_step), dtype=np.float32)
        rewards, terminated, truncated = ([0] * args.num_envs for _ in range(3))
        learning_starts = args.learning_starts + (0 if args.save_replay else run.first_step)  # without a replay: anew
        while run.global_step < args.total_timesteps:
            # Act; learn while the environments step, unless a batch has a transition that is still to come
            is_learning, must_wait = run.global_step >= learning_starts, agent.must_wait
            numbers = range(run.updates, run.updates + args.num_envs) if is_learning else ()
            updates = [(n % policy_frequency == 0, n % target_frequency == 0) for n in numbers]
            at_once, afterwards = ([], updates) if must_wait else (updates, [])
            if not is_learning and run.updates == 0:  # a policy that has learned collects a lost replay anew
                action = [env.action_space.sample() for env in envs]
            else:
                action = agent.act(observation, at_once)
                run.updates += len(at_once)

            # Step and store; where an episode has ended, the next one begins. An environment may write to its action
            for i, env in enumerate(envs):
                next_observation, rewards[i], terminated[i], truncated[i], _ = env.step(action[i].copy())
                buffer.add(observation[i], next_observation, action[i], rewards[i], terminated[i], truncated[i])
                observation[i] = env.reset()[0] if terminated[i] or truncated[i] else next_observation
            run.step(rewards, terminated, truncated)

            # Learn what had to wait: one update for each step of each environment
            if must_wait:
                buffer.upload()
                agent.write()
                for update in afterwards:
                    agent.learn(*update)
                    run.updates += 1
            else:
                buffer.complete()  # and the next `act` sends and writes it
            run.end_step(agent.losses, learning_rate=args.policy_lr)


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


def check_replay(args: Args) -> None:
    """Ends the program with exit status 2 if learning would never begin, or a step does not fit into the replay."""
    if args.learning_starts >= args.total_timesteps:
        fail("learning_starts", args.learning_starts, f"must be below --total-timesteps {args.total_timesteps}")
    if args.buffer_size < args.num_envs:
        fail("buffer_size", args.buffer_size, f"must be at least --num-envs {args.num_envs}")


def announce_replay(args: Args, buffer, device: torch.device) -> None:
    """Prints the buffer's size; ends the program with exit status 2 if it is to be saved where there is no room."""
    print(f"replay buffer: {buffer.nbytes / 1e6:.1f} MB on {device}", flush=True)
    if args.save_replay:
        place, size = Path(args.resume or args.output_dir, "checkpoint.pt").absolute(), 2 * buffer.saved_nbytes
        free = shutil.disk_usage(next(folder for folder in place.parents if folder.exists())).free
        old = (place, place.with_name("checkpoint.pt.new"))  # which the next one replaces
        free += sum(path.stat().st_size for path in old if path.exists())
        print(f"replay buffer in the checkpoint: up to {size / 1e6:.1f} MB", flush=True)
        if size > free:
            fail("save_replay", True, f"needs {size / 1e6:.1f} MB on the disk, where {free / 1e6:.1f} MB are free")


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
