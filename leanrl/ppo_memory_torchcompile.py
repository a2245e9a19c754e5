# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "gymnasium[mujoco]>=1.4,<1.5", "numpy>=1.26", "tqdm>=4.66", "tyro>=1.0",
#   "tensordict>=0.15,<0.16",
# ]
# ///
"""PPO with a memory, for tasks whose observations do not tell all (Schulman et al. 2017, Lu et al. 2023).

A sequence model runs over the consecutive episodes of each environment, its state zero where one begins: no padding.
MinGRU, LRU, S5 and FFM, whose states are linear recurrences, take all steps of a rollout in parallel, GRU and LSTM one
by one. A minibatch is whole environments, from the states in which the rollout found them; the rest is PPO.
`ppo_memory.py` is the eager reference, to be read first; `ppo_memory_torchcompile.py` is the same at full speed.

    python leanrl/ppo_memory.py --env-id benchmarks.tmaze:TMaze-v0 --cell lru
    python leanrl/ppo_memory_torchcompile.py --env-id benchmarks.tmaze:TMaze-v0 --cell lru --compile

Its return in a T-maze of 10 steps is 1.00 ± 0.00 after 100,000 steps (at most 1; without a memory 0.5). What else it
learns, and how fast: README, "Agents with a memory". The default task is in this repository's folder benchmarks; a copy
of the script needs an --env-id of its own.
To copy the algorithm alone, put the short `Run` of the README in the place of the part "Checks and recording".
"""

import collections
import contextlib
import difflib
import fcntl
import importlib.metadata
import importlib.util
import io
import itertools
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Literal, NoReturn, get_args

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
from tensordict.nn import CudaGraphModule
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

try:
    import triton
    import triton.language as tl
except ImportError:  # PyTorch for CPUs or macOS: the text of a kernel still needs a name of `tl`
    triton, tl = None, SimpleNamespace(constexpr=None)


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
    env_id: str = "benchmarks.tmaze:TMaze-v0"
    """id of the environment: Gymnasium's, module:Id; EnvPool's Atari (ppo_atari_envpool, Ray), MiniGrid (memory)"""
    total_timesteps: Count = 1_000_000
    """length of the run, in environment steps summed over all environments"""
    num_envs: Count = 16
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

    cell: Literal["none", "stack", "gru", "lstm", "mingru", "lru", "s5", "ffm"] = "lru"
    """memory of the agent; none, and stack, which sees the last four steps, are controls"""
    hidden_size: Count = 64
    """width of the layers and of the memory; ffm remembers 256 numbers whatever it is"""
    hide_velocities: bool = False
    """hide the velocities that CartPole, Pendulum, Acrobot, MountainCar and HalfCheetah show"""
    num_steps: Count = 128
    """steps of each environment in a rollout"""
    gamma: Fraction = 0.99
    """discount factor, per step"""
    gae_lambda: Fraction = 0.95
    """λ of the generalised advantage estimates"""
    learning_rate: Positive = 1e-3
    """learning rate of Adam"""
    anneal_lr: bool = True
    """let the learning rate fall linearly to 0 over the run"""
    num_minibatches: Count = 4
    """minibatches into which an epoch divides a rollout"""
    update_epochs: Count = 4
    """epochs over each rollout"""
    norm_adv: bool = True
    """normalise the advantages of each minibatch"""
    norm_value: bool = True
    """normalise the critic's targets by a running mean and standard deviation of the returns"""
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
VELOCITIES = {"CartPole": (1, 3), "Pendulum": (2,), "Acrobot": (4, 5), "MountainCar": (1,), "HalfCheetah": range(8, 17)}
VELOCITIES["MountainCarContinuous"] = VELOCITIES["MountainCar"]
MINIGRID = gym.spaces.Tuple((gym.spaces.MultiDiscrete([11, 6, 4] * 49), gym.spaces.Discrete(4)))  # view and direction


def make_vector(args: Args, seeds: Sequence[int]):
    """Environments side by side, EnvPool's MiniGrid or Gymnasium's; ends the program with exit status 2 if it can't.

    Notices about the older -v4 models go neither to the terminal nor to a MUJOCO_LOG.TXT in the current folder.
    """
    if importlib.util.find_spec("mujoco") is not None:
        import mujoco

        mujoco.set_mju_user_warning(lambda message: None)
    known = gym.registry
    try:
        if args.env_id.startswith("MiniGrid-"):
            import envpool

            known = [name for name in envpool.list_all_envs() if name.startswith("MiniGrid-")]
            if args.env_id not in known:
                raise gym.error.NameNotFound("EnvPool does not have it")
            return envpool.make(args.env_id, env_type="gymnasium", num_envs=args.num_envs, env_seed=list(seeds))
        if args.env_id.startswith("popgym-"):
            importlib.import_module("popgym")
        gym.logger.min_level = gym.logger.ERROR  # older versions, odd spaces
        envs = gym.make_vec(args.env_id, num_envs=args.num_envs)
        envs._add_info = lambda infos, *_: infos  # nothing reads them, and it fails to join those of unequal shapes
        return envs
    except (Exception, SystemExit) as error:  # a module that the environment comes from may raise anything
        problem, is_missing = "it can't be made", bool(getattr(error, "name", None))  # a package that it needs
        is_known = args.env_id.rpartition(":")[2] in known
        if isinstance(error, gym.error.Error | ImportError) and not is_known and not is_missing:
            nearest = ", ".join(difflib.get_close_matches(args.env_id, known, cutoff=0.4)) or "none"
            problem = f"no such environment; nearest names: {nearest}"
        fail("env_id", args.env_id, f"{problem} ({(str(error).strip() or repr(error)).partition(chr(10))[0]})")


class NoCodeError(Exception):
    """An observation, or any observation of a space, can't be made numbers."""


def encoder(space: gym.Space) -> Callable:
    """What makes a space's elements numbers, discrete ones one-hot, bytes up to 1; a batch of N -> float32, [N, D].

    Raises NoCodeError for a space without such a code; the function, for an observation outside a discrete space.
    """
    if isinstance(space, gym.spaces.Dict | gym.spaces.Tuple):
        parts = space.spaces.items() if isinstance(space, gym.spaces.Dict) else enumerate(space.spaces)
        encoders = [(name, encoder(part)) for name, part in parts]
        return lambda batch: np.concatenate([encode(batch[name]) for name, encode in encoders], 1)
    if isinstance(space, gym.spaces.Box | gym.spaces.MultiBinary):
        scale = np.float32(max(space.high.max(), 1) if space.dtype == np.uint8 else 1)
        return lambda batch: np.asarray(batch, np.float32).reshape(len(batch), -1) / scale
    if not isinstance(space, gym.spaces.Discrete | gym.spaces.MultiDiscrete):
        raise NoCodeError(f"observations must be numbers, not {space}")
    sizes = np.atleast_1d(space.n if isinstance(space, gym.spaces.Discrete) else space.nvec).flatten()
    if sizes.sum(dtype=float) > 2**20:  # one-hot, each is an input of the network
        raise NoCodeError(f"discrete observations must be of at most {2**20:,} values, not {space}")
    start, total, offsets = np.ravel(space.start), sizes.sum(), np.cumsum([0, *sizes[:-1]])

    def encode(batch) -> np.ndarray:
        codes = np.asarray(batch).reshape(len(batch), -1) - start
        if (codes < 0).any() or (codes >= sizes).any():
            raise NoCodeError(f"an observation is outside its space, {space}")
        encoded = np.zeros((len(codes), total), np.float32)
        np.put_along_axis(encoded, codes + offsets, 1, 1)
        return encoded

    return encode


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


class Environments:
    """Environments side by side. A step after an episode's end only resets: it is not valid.

    `inputs` are what the agent sees, [N, D]: the observation, its previous action, and whether an episode begins.
    Ends the program with exit status 2 if the agent can't see or do what they ask for.
    """

    def __init__(self, args: Args):
        self.args, name = args, args.env_id.partition("-")[0]
        self.is_minigrid = name == "MiniGrid"
        if args.hide_velocities and name not in VELOCITIES:
            fail("hide_velocities", True, f"--env-id must be of {', '.join(VELOCITIES)}, not {args.env_id}")
        self.hidden = list(VELOCITIES[name]) if args.hide_velocities else []
        sys.path += [os.getcwd(), str(Path(__file__).parent.parent)]  # for a `module:Id`
        self.envs = make_vector(args, range(args.num_envs))
        if self.is_minigrid:
            self.observation_space, space = MINIGRID, self.envs.action_space  # of one environment, as EnvPool has it
        else:
            self.observation_space, space = self.envs.single_observation_space, self.envs.single_action_space
        self.action_space = space
        self.is_discrete = isinstance(space, gym.spaces.Discrete)
        is_vector = isinstance(space, gym.spaces.Box) and len(space.shape) == 1
        if not self.is_discrete and not (is_vector and space.shape[0] and np.issubdtype(space.dtype, np.floating)):
            actions = "its actions must be Discrete or a one-dimensional float Box"
            fail("env_id", args.env_id, f"{actions}, not {space}")
        if not self.is_minigrid and self.envs.metadata.get("autoreset_mode") != gym.vector.AutoresetMode.NEXT_STEP:
            fail("env_id", args.env_id, "its vector environment must reset in the step after an episode's end")
        if any(goal in args.env_id for goal in ("Fetch", "GoTo", "PutNear", "LockedRoom")) and self.is_minigrid:
            fail("env_id", args.env_id, "its goal is told in words, which the agent can't read")
        self.action_dim = int(space.n) if self.is_discrete else space.shape[0]
        self.codes = np.eye(self.action_dim, dtype=np.float32)  # of discrete actions, one-hot
        self.first_action = space.dtype.type(getattr(space, "start", 0))
        if not self.is_discrete:
            self.to_range = ActionRange(space)
            # The policy's own actions are seen within these, as 0 where a range has no width; 1e-30 is 0 in float16
            half_width = np.maximum(self.to_range.half_width, 1e-30, dtype=np.float64)
            self.limits = [(end - self.to_range.middle) / half_width for end in (space.low, space.high)]
        try:
            self.encode = encoder(self.observation_space)
            self.begin(0)
        except NoCodeError as error:
            fail("env_id", args.env_id, str(error))

    def begin(self, step: int) -> None:
        """First resets; each environment has a seed of its own, made of --seed and of the step resumed at (else 0)."""
        count = self.args.num_envs
        seeds = np.random.SeedSequence([self.args.seed, step]).generate_state(count).tolist()
        if self.is_minigrid:
            self.envs = make_vector(self.args, [seed // 2 for seed in seeds])  # EnvPool's are of 31 bits
            observation, _ = self.envs.reset()
        else:
            takes_seeds = isinstance(self.envs, gym.vector.SyncVectorEnv)
            observation, _ = self.envs.reset(seed=seeds if takes_seeds else seeds[0])
        self.valid, self.is_first = np.ones(count, bool), np.ones(count, bool)
        self.previous = np.zeros((count, self.action_dim), np.float32)
        self.see(observation)

    def close(self) -> None:
        self.envs.close()

    def see(self, observation) -> None:
        """Makes the inputs of a batch of observations."""
        if self.is_minigrid:
            observation = (observation["image"], observation["direction"])
        encoded = self.encode(observation)
        if self.hidden:
            encoded[:, self.hidden] = 0
        self.inputs = np.concatenate([encoded, self.previous, self.is_first[:, None]], 1, dtype=np.float32)

    def step(self, action: np.ndarray) -> dict[str, np.ndarray]:
        """Takes a step; [N, ...] -> reward, terminated, truncated, and whether they are valid; [N] each."""
        if self.is_discrete:
            action = action.astype(self.action_space.dtype)
            self.previous = self.codes[action]
            taken = action + self.first_action
        else:
            taken = self.to_range(action)
            self.previous = action.clip(*self.limits)
        observation, reward, terminated, truncated, _ = self.envs.step(taken)
        if self.is_minigrid:
            terminated = terminated | (truncated & (reward != 0))  # EnvPool tells nothing of a goal in the last step
        step = {"reward": reward, "terminated": terminated, "truncated": truncated, "valid": self.valid}
        self.is_first, self.valid = ~self.valid, ~(terminated | truncated)
        self.previous = self.previous * ~self.is_first[:, None]
        self.see(observation)
        return step


# ---- Linear recurrence ----
# Numbers are lists of their parts, [itself] or [real, imaginary], as Inductor knows no complex ones.
def times(x: Sequence[torch.Tensor], y: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """x · y."""
    if len(x) == 1:
        return [x[0] * y[0]]
    return [x[0] * y[0] - x[1] * y[1], x[0] * y[1] + x[1] * y[0]]


def advance(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor], h: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """a · h + b."""
    if len(a) == 1:
        return [torch.addcmul(b[0], a[0], h[0])]
    return [product + part for product, part in zip(times(a, h), b, strict=True)]


def unbind(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor], dim: int, reverse: bool) -> list[tuple]:
    """The pairs of a[t] and b[t] along a dimension, from last to first if `reverse`."""
    numbers = [list(zip(*(part.unbind(dim) for part in parts), strict=True)) for parts in (a, b)]
    return list(zip(*numbers, strict=True))[:: -1 if reverse else 1]


def loop(rows: list[tuple], h: Sequence[torch.Tensor], dim: int, reverse: bool) -> list[torch.Tensor]:
    """All h[t] = a[t] · h[t - 1] + b[t], one by one, of the pairs that `unbind` yields; along the same dimension."""
    states = []
    for a, b in rows:
        h = advance(a, b, h)
        states.append(h)
    return [torch.stack(part[:: -1 if reverse else 1], dim) for part in zip(*states, strict=True)]


def scan(a: list, b: list, h: list, length: int, reverse: bool) -> list[torch.Tensor]:
    """All h[t] = a[t] · h[t - 1] + b[t], from last to first if `reverse`; numbers of [T, ...], and h of [...].

    Chunks of `length` rows run side by side, one row of each at a time: first to see what each makes of a state, which
    is a recurrence over chunks, then from the state before each (Blelloch 1990, section 1.2).
    """
    size = len(b[0])
    rest = size % length if size > 2 * length else size  # rows that are left over run one by one
    if rest == size:
        return loop(unbind(a, b, 0, reverse), h, 0, reverse)
    whole, left = (slice(rest, None), slice(rest)) if reverse else (slice(size - rest), slice(size - rest, None))
    chunks = [[part[whole].unflatten(0, (-1, length)) for part in number] for number in (a, b)]
    rows = unbind(*chunks, 1, reverse)
    factor, end = rows[0]
    for x, y in rows[1:]:
        factor, end = times(x, factor), advance(x, y, end)
    ends = scan(factor, end, h, length, reverse)
    before = [[first[None], part[1:] if reverse else part[:-1]] for first, part in zip(h, ends, strict=True)]
    before = [torch.cat(pair[::-1] if reverse else pair) for pair in before]
    states = [part.flatten(0, 1) for part in loop(rows, before, 1, reverse)]
    if rest:
        last = [part[0 if reverse else -1] for part in ends]
        tail = scan([x[left] for x in a], [y[left] for y in b], last, length, reverse)
        states = [torch.cat(pair[::-1] if reverse else pair) for pair in zip(states, tail, strict=True)]
    return states


# ---- Linear recurrence on CUDA ----
def jit(function):
    """A Triton kernel, one for all T; nothing that can be called where there is no Triton."""
    return triton.jit(do_not_specialize=["T"])(function) if triton else None


@jit
def combine(a, b, c, d):
    """The steps h -> a · h + b and then h -> c · h + d, as one."""
    return c * a, c * b + d


@jit
def complex_combine(a, ai, b, bi, c, ci, d, di):
    return c * a - ci * ai, c * ai + ci * a, c * b - ci * bi + d, c * bi + ci * b + di


@jit
def scan_tiles(a, ai, b, bi, h0, h0i, h, hi, T, N, REVERSE: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr):
    """`kernel_scan` of LANES of N lanes, ROWS of T rows at a time; ai, bi, ... are imaginary parts, None if real."""
    tile, lane = tl.arange(0, ROWS)[:, None], tl.program_id(0) * LANES + tl.arange(0, LANES)[None, :]
    state = tl.load(h0 + lane, lane < N, other=0)
    if ai is not None:
        state_i = tl.load(h0i + lane, lane < N, other=0)
    for first in range(0, T, ROWS):
        row = first + tile
        inside = (row < T) & (lane < N)
        # 64 bits, as T · N may pass 2^31. Backwards by address: the scan itself always runs forwards.
        at = (T - 1 - row if REVERSE else row).to(tl.int64) * N + lane
        x, y = tl.load(a + at, inside, other=0), tl.load(b + at, inside, other=0)
        if ai is not None:
            xi, yi = tl.load(ai + at, inside, other=0), tl.load(bi + at, inside, other=0)
            x, xi, y, yi = tl.associative_scan((x, xi, y, yi), 0, complex_combine)
            y, yi = x * state - xi * state_i + y, x * state_i + xi * state + yi
            tl.store(hi + at, yi, inside)
            state_i = tl.sum(tl.where(tile == ROWS - 1, yi, 0), 0, keep_dims=True)
        else:
            x, y = tl.associative_scan((x, y), 0, combine)
            y = x * state + y
        tl.store(h + at, y, inside)
        state = tl.sum(tl.where(tile == ROWS - 1, y, 0), 0, keep_dims=True)


# An operator, which torch.compile takes as it is; it has the module's name, as each module registers its own.
@torch.library.custom_op(f"leanrl::kernel_scan_{__name__.replace('.', '_')}", mutates_args=())
def kernel_scan(
    a: list[torch.Tensor], b: list[torch.Tensor], h0: list[torch.Tensor], reverse: bool
) -> list[torch.Tensor]:
    """All h[t] = a[t] · h[t - 1] + b[t], from last to first if `reverse`, without derivatives.

    Each is a list of its parts, one if real and two if complex: [T, ...], [T, ...] and [...] -> [T, ...].
    """
    a, b, h0 = ([x.contiguous() for x in parts] for parts in (a, b, h0))
    h, steps, size = [torch.empty_like(x) for x in b], len(b[0]), h0[0].numel()
    # Few lanes are spread over about as many programs as a GPU has multiprocessors, each with long tiles of time; many
    # lanes share cache lines. A tile is 16 numbers a thread, which its registers can hold.
    lanes = min(triton.next_power_of_2(max(size // 128, 1)), 32)
    rows = min(max(triton.next_power_of_2(steps), 16), 2048 // lanes)
    parts = [x for parts in (a, b, h0, h) for x in (*parts, None)[:2]]
    if steps * size:
        with torch.cuda.device_of(b[0]):
            scan_tiles[(triton.cdiv(size, lanes),)](*parts, steps, size, reverse, rows, lanes)
    return h


@kernel_scan.register_fake
def _(a, b, h0, reverse):
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in b]


@kernel_scan.register_vmap
def _(info, dims, a, b, h0, reverse):
    def with_lanes(parts, dims, at):
        """The parts with the mapped dimension, one more of the lanes', at `at`."""
        parts = [x.unsqueeze(at) if dim is None else x.movedim(dim, at) for x, dim in zip(parts, dims, strict=True)]
        return [x.expand(*x.shape[:at], info.batch_size, *x.shape[at + 1 :]) for x in parts]

    arguments = with_lanes(a, dims[0], 1), with_lanes(b, dims[1], 1), with_lanes(h0, dims[2], 0)
    return kernel_scan(*arguments, reverse), [1] * len(b)


def chunk_length(steps: int, size: int, is_compiled: bool) -> int:
    """Of how many rows `scan` does best to make its chunks on a CPU, by measurement; of `steps`: it is a loop.

    `size` is how many numbers a row has, complex ones counted twice.
    """
    if is_compiled:
        return 4  # as each row of a chunk is code to compile
    if size >= 16384:
        return steps  # to go through the rows twice, as a chunk does, takes longer than the calls of a loop
    return 8 if steps <= 128 else 16


def run_scan(a: torch.Tensor, b: torch.Tensor, h0: torch.Tensor, parts: int, reverse: bool) -> torch.Tensor:
    """The recurrence without derivatives; numbers of two parts have them side by side in the last dimension."""
    numbers = [list(x.chunk(parts, -1)) for x in (a, b, h0)]
    if triton is not None and b.is_cuda:
        return torch.cat(kernel_scan(*numbers, reverse), -1)
    # The first knows of the compiler's later stages since PyTorch 2.13 only
    is_compiled = torch.compiler.is_compiling() or torch._guards.TracingContext.try_get() is not None
    length = chunk_length(len(b), h0.numel(), is_compiled)
    if parts == 2 and not is_compiled:  # complex numbers are fewer calls, but Inductor does not know them
        (states,) = scan(*([torch.complex(*number)] for number in numbers), length, reverse)
        return torch.cat([states.real, states.imag], -1)
    states = scan(*numbers, length, reverse)
    return states[0] if parts == 1 else torch.cat(states, -1)


def conjugate(x: torch.Tensor, parts: int) -> torch.Tensor:
    """The conjugates of numbers with their parts side by side."""
    return x if parts == 1 else torch.cat([x.chunk(2, -1)[0], -x.chunk(2, -1)[1]], -1)


class LinearRecurrence(torch.autograd.Function):
    """`linear_recurrence`; its backward is the same scan the other way, so that memory grows as T, no faster.

    With ā the conjugate of a: g_b[t] = g_h[t] + ā[t + 1] g_b[t + 1], g_a[t] = g_b[t] h̄[t - 1], g_h0 = ā[0] g_b[0].
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(a, b, h0, parts, reverse):
        return run_scan(a, b, h0, parts, reverse)

    @staticmethod
    def setup_context(ctx, inputs, output):
        a, _, h0, ctx.parts, ctx.reverse = inputs
        ctx.save_for_backward(a, h0, output)

    @staticmethod
    def backward(ctx, gradient):
        a, h0, h = ctx.saved_tensors
        a, zero, first = conjugate(a, ctx.parts), torch.zeros_like(h0), -1 if ctx.reverse else 0
        following = torch.cat([zero[None], a[:-1]] if ctx.reverse else [a[1:], zero[None]])
        before = conjugate(torch.cat([h[1:], h0[None]] if ctx.reverse else [h0[None], h[:-1]]), ctx.parts)
        b_gradient = LinearRecurrence.apply(following, gradient, zero, ctx.parts, not ctx.reverse)
        pairs = [(b_gradient, before), (b_gradient[first], a[first])]
        products = [torch.cat(times(*(x.chunk(ctx.parts, -1) for x in pair)), -1) for pair in pairs]
        return products[0], b_gradient, products[1], None, None


def linear_recurrence(
    a: torch.Tensor, b: torch.Tensor, h0: torch.Tensor, parts: int = 1, reverse: bool = False
) -> torch.Tensor:
    """All states h[t] = a[t] · h[t - 1] + b[t], with h[-1] = h0, or from the last to the first if `reverse`.

    Real or complex, of one type or several; or, if `parts` is 2, complex as real numbers, the real parts in the first
    half of the last dimension, which all have in full, the imaginary ones in the second. Shapes: [T, B, ...] or what
    broadcasts to it, [T, B, ...], [B, ...] or what broadcasts to it -> [T, B, ...]. A compiled function that takes
    gradients of it by torch.func needs torch.compiler.allow_in_graph(linear_recurrence) before.
    """
    dtype = torch.promote_types(torch.promote_types(a.dtype, b.dtype), h0.dtype)
    a, b, h0 = a.to(dtype), b.to(dtype), h0.to(dtype).expand(b.shape[1:])
    if len(b) == 0:
        return a * h0 + b
    if dtype.is_complex:
        a, b, h0 = (torch.cat([x.real, x.imag], -1) for x in (a.expand_as(b), b, h0))
        return torch.complex(*linear_recurrence(a, b, h0, 2, reverse).chunk(2, -1))
    return LinearRecurrence.apply(a.expand_as(b), b, h0, parts, reverse)


# ---- Loops over time ----
# GRU and LSTM are no linear recurrences. To the compiler a loop is one operator forwards and one backwards, as a loop
# unrolled takes minutes to compile. Forwards PyTorch's cells make the steps, or for an LSTM on a CPU its loops whole
# stretches; backwards a loop does only what has to be done in turn.
Tensor = torch.Tensor


def operator(function: Callable) -> Callable:
    """The function as an operator of PyTorch; of [T, ...] and [B, *S], its first arguments, it makes [T, B, *S]."""
    name = f"leanrl::{function.__name__}_{__name__.replace('.', '_')}"
    made = torch.library.custom_op(name, function, mutates_args=())
    made.register_fake(lambda rows, state, *_: state.new_empty(len(rows), *state.shape))

    def run(*inputs: Tensor | list[Tensor]) -> Tensor:
        with torch.no_grad():
            return made(*inputs)

    return run


@operator
def gru_states(x: Tensor, state: Tensor, keep: Tensor, weights: list[Tensor]) -> Tensor:
    """The states; `keep` is 0 where an episode begins, [T, B, 1]."""
    states = []
    for row, kept in zip(x.unbind(0), keep.unbind(0), strict=True):
        state = torch.gru_cell(row, state * kept, *weights)
        states.append(state)
    return torch.stack(states)


@operator
def gru_gradients(outer: Tensor, last: Tensor, direct: Tensor, factors: Tensor, weight: Tensor) -> Tensor:
    """The gradients of the states, once: `outer`, [T, B, S], reaches each from without; of it `last` is the last row.

    The derivatives of a state by the one before it are `direct`, [T, B, S], and, through the gates, the products of
    `factors`, [T, B, 3, S], and `weight`.
    """
    gradients = [last]
    for row, passed, factor in zip(*(x.unbind(0)[::-1] for x in (outer[:-1], direct[1:], factors[1:])), strict=True):
        gradient = gradients[-1]
        through_gates = (gradient[:, None] * factor).flatten(1)
        gradients.append(torch.addmm(torch.addcmul(row, gradient, passed), through_gates, weight))
    return torch.stack(gradients[::-1])


class GRULoop(torch.autograd.Function):
    """The states of a GRU, [T, B, S], of x, [T, B, S], the first state, [B, S], `keep`, and the weights."""

    @staticmethod
    def forward(x, state, keep, weight_ih, weight_hh, bias_ih, bias_hh):
        return gru_states(x, state, keep, [weight_ih, weight_hh, bias_ih, bias_hh])

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def backward(ctx, outer):
        x, state, keep, weight_ih, weight_hh, bias_ih, bias_hh, states = ctx.saved_tensors
        before = keep * torch.cat([state[None], states[:-1]])
        hidden = (before @ weight_hh.mT + bias_hh).chunk(3, -1)
        r, z, n = (x @ weight_ih.mT + bias_ih).chunk(3, -1)
        r, z = torch.sigmoid(r + hidden[0]), torch.sigmoid(z + hidden[1])
        n = torch.tanh(n + r * hidden[2])
        to_n = (1 - z) * (1 - n.square())  # all these are derivatives of the state by what enters a gate
        factors = torch.stack([to_n * hidden[2] * r * (1 - r), (before - n) * z * (1 - z), to_n * r], 2)
        gradient = gru_gradients(outer, outer[-1], keep * z, keep[..., None] * factors, weight_hh)
        each = gradient[:, :, None] * factors
        to_hidden, to_input = each.flatten(2), torch.cat([each[:, :, :2].flatten(2), gradient * to_n], -1)
        to_state = keep[0] * (gradient[0] * z[0] + to_hidden[0] @ weight_hh)
        to_weights = to_input.flatten(0, 1).mT @ x.flatten(0, 1), to_hidden.flatten(0, 1).mT @ before.flatten(0, 1)
        return to_input @ weight_ih, to_state, None, *to_weights, to_input.sum((0, 1)), to_hidden.sum((0, 1))


@operator
def lstm_states(x: Tensor, state: Tensor, reset: Tensor, weights: list[Tensor]) -> Tensor:
    """Outputs and cells; of the cells all but the last, which nothing needs, are zeros. On a CPU, where resets
    are few, PyTorch's own loops make them, which are faster."""
    if not x.is_cuda and (parts := stretches(reset)) is not None:
        outputs, last = LSTM.between_resets(x, state, reset, parts, weights)
        cell = last[:, 1]
    else:
        outputs, (output, cell) = [], state.unbind(1)
        for row, kept in zip(x.unbind(0), (1 - reset)[..., None].unbind(0), strict=True):
            output, cell = torch.lstm_cell(row, (output * kept, cell * kept), *weights)
            outputs.append(output)
        outputs = torch.stack(outputs)
    return torch.stack([outputs, F.pad(cell[None], (0, 0, 0, 0, len(x) - 1, 0))], 2)


@operator
def lstm_gradients(
    outer: Tensor, carry: Tensor, to_cell: Tensor, passed: Tensor, factors: Tensor, weight: Tensor
) -> Tensor:
    """As `gru_gradients`, of outputs and cells, [T, B, 2, S].

    `outer`, [T, B, S], reaches the outputs alone, and the second half of `carry`, [B, 2, S], the last cell.
    A derivative is `to_cell` if it is an output's by its own cell, and `passed` if it is a cell's by the one before.
    """
    each, cell, gradients = torch.zeros_like(factors[0]).flatten(1), carry[:, 1], []
    rows = zip(*(x.unbind(0)[::-1] for x in (outer, to_cell, passed, factors)), strict=True)
    for row, derivative, kept, factor in rows:
        output = torch.addmm(row, each, weight)
        cell = torch.addcmul(cell, output, derivative)
        gradients.append(torch.stack([output, cell], 1))
        each = (torch.stack([cell, cell, cell, output], 1) * factor).flatten(1)
        cell = cell * kept
    return torch.stack(gradients[::-1])


class LSTMLoop(torch.autograd.Function):
    """Outputs and cells of an LSTM, [T, B, 2, S], of x, [T, B, S], the first state, [B, 2, S], resets, and the weights.

    Of the cells only the last is there, and only its gradient counts.
    """

    @staticmethod
    def forward(x, state, reset, weight_ih, weight_hh, bias_ih, bias_hh):
        return lstm_states(x, state, reset, [weight_ih, weight_hh, bias_ih, bias_hh])

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def backward(ctx, outer):
        x, state, reset, weight_ih, weight_hh, bias_ih, bias_hh, states = ctx.saved_tensors
        keep = 1 - reset[..., None]
        before = keep * torch.cat([state[None, :, 0], states[:-1, :, 0]])
        i, f, g, o = (x @ weight_ih.mT + before @ weight_hh.mT + (bias_ih + bias_hh)).chunk(4, -1)
        i, f, g, o = torch.sigmoid(i), torch.sigmoid(f), torch.tanh(g), torch.sigmoid(o)
        passed = keep * f
        cells = linear_recurrence(passed, i * g, state[:, 1])  # as the gates are known now
        last, tanh = keep * torch.cat([state[None, :, 1], cells[:-1]]), torch.tanh(cells)
        factors = [g * i * (1 - i), last * f * (1 - f), i * (1 - g.square()), tanh * o * (1 - o)]
        factors, to_cell = torch.stack(factors, 2), o * (1 - tanh.square())
        gradient = lstm_gradients(outer[:, :, 0], outer[-1], to_cell, passed, keep[..., None] * factors, weight_hh)
        output, cell = gradient.unbind(2)
        each = (torch.stack([cell, cell, cell, output], 2) * factors).flatten(2)
        to_state = torch.stack([keep[0] * (each[0] @ weight_hh), passed[0] * cell[0]], 1)
        flat, bias = each.flatten(0, 1), each.sum((0, 1))
        to_weights = flat.mT @ x.flatten(0, 1), flat.mT @ before.flatten(0, 1)
        return each @ weight_ih, to_state, None, *to_weights, bias, bias.clone()  # two that may become .grad


MIN_BATCH = 32  # on a CPU, for PyTorch's loop of a GRU to be faster than the one here
MIN_MEAN_LENGTH = 5  # of a stretch, in steps; of shorter ones the calls of PyTorch's own loops, one each, cost too much


def stretches(reset: torch.Tensor) -> list[tuple[int, int]] | None:
    """(start, end) of stretches of steps in which episodes begin at the first step only, so that PyTorch's own loops
    can run them; from resets, [T, B]. None if they are short on average."""
    begins = (reset[1:].any(1).nonzero().flatten() + 1).tolist()
    are_short = begins and MIN_MEAN_LENGTH * (len(begins) + 1) > len(reset)
    return None if are_short else list(itertools.pairwise([0, *begins, len(reset)]))


# ---- Cells ----
class Cell(nn.Module):
    """A sequence model of `size` numbers a step; where `reset` is 1, an episode begins: the state before it is zero.

    Each has its own `step`, to act: [B, size], [B, *state_shape], [B] -> [B, size], [B, *state_shape]; and `forward`,
    over consecutive steps, to learn: [T, B, size], [B, *state_shape], [T, B] -> [T, B, size], [B, *state_shape].
    """

    state_shape: tuple[int, ...]

    def initial_state(self, batch: int) -> torch.Tensor:
        """[batch, *state_shape]."""
        return next(self.parameters()).new_zeros(batch, *self.state_shape)


def after_reset(state: torch.Tensor, reset: torch.Tensor) -> torch.Tensor:
    """A state, or factors of one, zeroed where an episode begins; [..., *S], [...] -> [..., *S]."""
    return state * (1 - reset).view(*reset.shape, *[1] * (state.ndim - reset.ndim))


class NoMemory(Cell):
    """A control: a layer without a state."""

    def __init__(self, size: int):
        super().__init__()
        self.state_shape = (0,)
        self.layer = nn.Linear(size, size)

    def step(self, x, state, reset):
        return torch.tanh(self.layer(x)), state

    forward = step


class FrameStack(Cell):
    """A control: a layer over the last four steps of an episode."""

    frames = 4

    def __init__(self, size: int):
        super().__init__()
        self.state_shape = (self.frames - 1, size)
        self.layer = nn.Linear(self.frames * size, size)

    def step(self, x, state, reset):
        frames = torch.cat([after_reset(state, reset), x[:, None]], 1)
        return torch.tanh(self.layer(frames.flatten(1))), frames[:, 1:]

    def forward(self, x, state, reset):
        history, frames, alive = torch.cat([state.transpose(0, 1), x]), [x], torch.ones_like(reset)
        for lag in range(1, self.frames):  # a frame is there if no episode began since
            alive = alive * (1 - F.pad(reset, (0, 0, lag - 1, 0))[: len(x)])
            frames.insert(0, history[self.frames - 1 - lag :][: len(x)] * alive[..., None])
        frames = torch.stack(frames, 2)
        return torch.tanh(self.layer(frames.flatten(2))), frames[-1][:, 1:]


class GRU(Cell):
    """Gated recurrent unit (Cho et al. 2014), as cuDNN has it: the reset gate multiplies U h + b, not h."""

    is_looped = False  # if True, always the operator: a compiler or a capture can't look where episodes begin

    def __init__(self, size: int):
        super().__init__()
        self.state_shape = (size,)
        self.cell = nn.GRUCell(size, size)

    def step(self, x, state, reset):
        state = self.cell(x, after_reset(state, reset))
        return state, state

    def forward(self, x, state, reset):
        must_loop = self.is_looped or (not x.is_cuda and x.shape[1] < MIN_BATCH)
        if must_loop or (parts := stretches(reset)) is None:
            # Views, as Dynamo drops the backward of a Function whose inputs are what torch.func differentiates by
            # (issue 193279 of PyTorch)
            weights = [weight.view_as(weight) for weight in self.parameters()]
            states = GRULoop.apply(x, state, 1 - reset[..., None], *weights)
            return states, states[-1]
        outputs = []
        for start, end in parts:
            first = after_reset(state, reset[start])[None]
            output, (state,) = torch.gru(x[start:end], first, [*self.parameters()], True, 1, 0.0, True, False, False)
            outputs.append(output)
        return torch.cat(outputs), state


class LSTM(Cell):
    """Long short-term memory (Hochreiter and Schmidhuber 1997, Gers et al. 2000); state: h and c, [B, 2, size]."""

    is_looped = False  # as GRU's; on a CPU the operator itself can look

    def __init__(self, size: int):
        super().__init__()
        self.state_shape = (2, size)
        self.cell = nn.LSTMCell(size, size)

    def step(self, x, state, reset):
        output, memory = self.cell(x, after_reset(state, reset).unbind(1))
        return output, torch.stack([output, memory], 1)

    def forward(self, x, state, reset):
        weights = [*self.parameters()]
        if self.is_looped or (parts := stretches(reset)) is None:
            states = LSTMLoop.apply(x, state, reset, *(weight.view_as(weight) for weight in weights))  # views, as GRU's
            return states[:, :, 0], states[-1]
        return self.between_resets(x, state, reset, parts, weights)

    @staticmethod
    def between_resets(x, state, reset, parts, weights):
        """As `forward`, by PyTorch's own loop over each stretch of steps."""
        outputs = []
        for start, end in parts:
            first = [part[None].contiguous() for part in after_reset(state, reset[start]).unbind(1)]
            output, *last = torch.lstm(x[start:end], first, weights, True, 1, 0.0, True, False, False)
            outputs.append(output)
            state = torch.cat(last).transpose(0, 1)
        return torch.cat(outputs), state


class LinearCell(Cell):
    """A cell of linear recurrences: coefficients(x) are a and b of h[t] = a[t] h[t - 1] + b[t], readout(h, x) is y."""

    parts = 2  # of its numbers: complex ones have their real and imaginary parts side by side

    def step(self, x, state, reset):
        a, b = self.coefficients(x)
        state = torch.cat(advance(*(number.chunk(self.parts, -1) for number in (a, b, after_reset(state, reset)))), -1)
        return self.readout(state, x), state

    def forward(self, x, state, reset):
        a, b = self.coefficients(x)
        states = linear_recurrence(after_reset(a.expand_as(b), reset), b, state, self.parts)
        return self.readout(states, x), states[-1]


class MinGRU(LinearCell):
    """Minimal gated recurrent unit, whose gates see only the input (Feng et al. 2024, section 3.1).

    It begins with memories of 2 to 1,000 steps (after Tallec and Ollivier 2018, section 2), else it forgets too soon.
    """

    parts = 1

    def __init__(self, size: int):
        super().__init__()
        self.state_shape = (size,)
        self.gate, self.candidate = nn.Linear(size, size), nn.Linear(size, size)
        nn.init.uniform_(self.gate.bias, -math.log(1000), 0)

    def coefficients(self, x):
        gate = torch.sigmoid(self.gate(x))
        return 1 - gate, gate * self.candidate(x)

    def readout(self, state, x):
        return state


class LRU(LinearCell):
    """Linear recurrent unit (Orvieto et al. 2023, section 3): h[t] = λ h[t - 1] + γ B x[t], read out by a GLU.

    |λ| = 0.999 exp(-exp(log_decay)); γ = (1 - |λ|²)^½, which is a parameter there. Periods begin log-uniform, 2 to 200
    steps, as the paper's are mostly too short for what is read at any later step; so does what a decay has above its
    bound: time constants of 1 to 900 steps.
    """

    def __init__(self, size: int):
        super().__init__()
        self.state_shape = (2 * size,)
        self.log_decay = nn.Parameter(torch.empty(size).uniform_(math.log(0.0001), 0))
        self.phase = nn.Parameter(math.pi * torch.empty(size).uniform_(math.log(0.01), 0).exp())
        self.input, self.output = nn.Linear(size, 2 * size, bias=False), nn.Linear(2 * size, size)
        self.skip, self.glu = nn.Parameter(torch.ones(size)), nn.Linear(size, 2 * size)

    def coefficients(self, x):
        modulus = (math.log(0.999) - self.log_decay.exp()).exp()
        factor = torch.cat([modulus * self.phase.cos(), modulus * self.phase.sin()])
        return factor, (1 - modulus.square()).sqrt().repeat(2) * self.input(x)

    def readout(self, state, x):
        y = self.output(state) + self.skip * x
        return x + F.glu(self.glu(F.gelu(y)), -1)


class S5(LinearCell):
    """Simplified state space layer (Smith et al. 2023): h[t] = exp(ΛΔ) h[t - 1] + Λ⁻¹ (exp(ΛΔ) - 1) B x[t].

    Λ begins as the eigenvalues of HiPPO-N; each has a step size Δ of its own.
    """

    def __init__(self, size: int):
        super().__init__()
        self.state_shape = (2 * size,)
        n = np.sqrt(1 + 2 * np.arange(2 * size))
        skew = -0.5 * np.tril(np.outer(n, n), -1) + 0.5 * np.triu(np.outer(n, n), 1)  # the normal part of HiPPO-LegS
        frequency = np.linalg.eigvalsh(-1j * skew)[size:]  # of each conjugate pair, one
        self.log_decay = nn.Parameter(torch.full((size,), math.log(0.5)))
        self.frequency = nn.Parameter(torch.as_tensor(frequency, dtype=torch.float32))
        self.log_step = nn.Parameter(torch.rand(size) * math.log(0.1 / 0.001) + math.log(0.001))
        self.input, self.output = nn.Linear(size, 2 * size, bias=False), nn.Linear(2 * size, size)
        self.skip, self.glu = nn.Parameter(torch.ones(size)), nn.Linear(size, 2 * size)

    def coefficients(self, x):
        step, decay = self.log_step.exp(), self.log_decay.exp()
        modulus, angle = (-decay * step).exp(), self.frequency * step
        real, imaginary = modulus * angle.cos(), modulus * angle.sin()
        inverse = [part / (decay.square() + self.frequency.square()) for part in (-decay, -self.frequency)]
        gain = times([real - 1, imaginary], inverse)  # over the eigenvalue
        return torch.cat([real, imaginary]), torch.cat(times(gain, self.input(x).chunk(2, -1)), -1)

    readout = LRU.readout


class FFM(LinearCell):
    """Fast and forgetful memory (Morad et al. 2023): S[t] = exp(-α + iω) S[t - 1] + x[t], gated before and after.

    α and ω are learned, as there, but by their logarithms, evenly spaced at first: of the smallest α itself one step of
    Adam would leave nothing, or make twice as much.
    """

    traces, contexts, horizon = 32, 4, 1024

    def __init__(self, size: int):
        super().__init__()
        self.state_shape = (2 * self.traces * self.contexts,)
        self.log_decay = nn.Parameter(torch.linspace(-math.log(self.horizon), math.log(0.5), self.traces))
        periods = torch.linspace(math.log(10) / 2, math.log(self.horizon), self.contexts)
        self.log_frequency = nn.Parameter(math.log(2 * math.pi) - periods)
        self.input, self.input_gate = nn.Linear(size, self.traces), nn.Linear(size, self.traces)
        self.mix = nn.Linear(2 * self.traces * self.contexts, size)
        self.output_gate, self.skip = nn.Linear(size, size), nn.Linear(size, size)
        self.norm = nn.LayerNorm(size, elementwise_affine=False)

    def coefficients(self, x):
        modulus = (-self.log_decay.exp()).exp().repeat_interleave(self.contexts)
        phase = self.log_frequency.exp().repeat(self.traces)
        b = (self.input(x) * torch.sigmoid(self.input_gate(x))).repeat_interleave(self.contexts, -1)
        return torch.cat([modulus * phase.cos(), modulus * phase.sin()]), torch.cat([b, torch.zeros_like(b)], -1)

    def readout(self, state, x):
        gate = torch.sigmoid(self.output_gate(x))
        return self.norm(self.mix(state) * gate) + self.skip(x) * (1 - gate)


CELLS = {"none": NoMemory, "stack": FrameStack, "gru": GRU, "lstm": LSTM}
CELLS |= {"mingru": MinGRU, "lru": LRU, "s5": S5, "ffm": FFM}


# ---- Networks ----
def orthogonal(layer: nn.Module, gain: float) -> nn.Module:
    """The layer with orthogonal weights, scaled by `gain`, and biases of zero."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class RecurrentActorCritic(nn.Module):
    """Logits of discrete actions, or mean and log standard deviation of others, the value, and the state afterwards.

    [T, B, inputs], [B, ...] -> [T, B, outputs], [outputs] or None, [T, B], [B, ...]; or one step, without T. The last
    input says whether an episode begins.
    """

    def __init__(self, inputs: int, outputs: int, is_discrete: bool, cell: Cell, size: int):
        super().__init__()
        gain = math.sqrt(2)
        layers = [orthogonal(nn.Linear(width, size), gain) for width in (inputs, size)]  # two: linear states can't gate
        self.encoder = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU())
        self.cell = cell
        hidden = [nn.Sequential(orthogonal(nn.Linear(size, size), gain), nn.Tanh()) for _ in range(2)]
        self.actor = nn.Sequential(hidden[0], orthogonal(nn.Linear(size, outputs), 0.01))
        self.critic = nn.Sequential(hidden[1], orthogonal(nn.Linear(size, 1), 1.0))
        self.log_std = None if is_discrete else nn.Parameter(torch.zeros(outputs))

    def forward(self, x: torch.Tensor, state: torch.Tensor):
        run = self.cell.step if x.ndim == 2 else self.cell
        memory, state = run(self.encoder(x), state, x[..., -1])
        return self.actor(memory), self.log_std, self.critic(memory).squeeze(-1), state


def gaussian_log_prob(mean: torch.Tensor, log_std: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
    """Log-probability of actions with independent dimensions; [..., A], [A], [..., A] -> [...]."""
    return (-0.5 * ((action - mean) / log_std.exp()).square() - log_std - 0.5 * math.log(2 * math.pi)).sum(-1)


def sample(policy: torch.Tensor, log_std: torch.Tensor | None) -> torch.Tensor:
    """Samples actions: Gumbel-max of logits, or a Gaussian; [N, outputs], [outputs] or None -> [N] or [N, A]."""
    if log_std is None:
        return (policy - torch.empty_like(policy).exponential_().log()).argmax(-1)
    return policy + log_std.exp() * torch.randn_like(policy)


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
class CompiledMemoryPPOAgent(nn.Module):
    """The network, the recurrent state of every environment, the optimiser, and the update."""

    def __init__(self, args: Args, envs: Environments, device: torch.device):
        super().__init__()
        self.args = args
        shapes = {"input": envs.inputs.shape[1:], "action": envs.action_space.shape}
        names = ("reward", "terminated", "truncated", "valid")
        self.rollout = Rollout(args.num_steps, args.num_envs, shapes | {name: () for name in names}, device)
        cell = CELLS[args.cell](args.hidden_size)
        cell.is_looped = True
        sizes = (envs.inputs.shape[1], envs.action_dim, envs.is_discrete, cell, args.hidden_size)
        self.module = FlatModule(RecurrentActorCritic(*sizes))
        self.network = nn.Buffer(self.module.initial.to(device))
        self.state, self.first_state = (cell.initial_state(args.num_envs).to(device) for _ in range(2))
        # With PPO's usual ε of 1e-5 the gradients of what was seen long ago, which are smaller, would move nothing
        self.optimizer = Adam(self.network, args.learning_rate)
        self.host_input, self.input = mirrored(args.num_envs, *shapes["input"], device=device)
        self.host_action, self.action = mirrored(args.num_envs, *shapes["action"], device=device)
        self.row = torch.zeros(1, dtype=torch.long, device=device)
        steps, count = args.num_steps, args.num_envs  # the last row of `acted` is of what follows the rollout
        self.acted = {name: torch.zeros(steps + 1, count, device=device) for name in ("log_prob", "value")}
        self.batch = {name: self.rollout.tensors[name] for name in ("input", "action", "valid")}
        self.batch |= {name: rows[:-1] for name, rows in self.acted.items()}
        self.batch |= {name: torch.zeros(steps, count, device=device) for name in ("advantage", "return")}
        # Of a fixed address, where the captured update of the compiled script reads its rows
        self.minibatch = torch.zeros(args.num_envs // args.num_minibatches, dtype=torch.long, device=device)
        names = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction")
        self.losses = {name: torch.zeros((), device=device) for name in names}
        self.return_moments = nn.Buffer(torch.tensor([0.0, 1.0], device=device))  # mean and variance
        self.clip_coef = torch.tensor(args.clip_coef, device=device)

    def return_scale(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and standard deviation of returns, [] each; the critic's output v stands for mean + deviation · v."""
        mean, variance = self.return_moments.unbind()
        return mean, variance.clamp(min=1e-4).sqrt()

    def update_return_scale(self, returns: torch.Tensor, valid: torch.Tensor) -> None:
        """Follows the moments of the returns of rollouts (as Yu et al. 2022, section 5.1); [T, N], [T, N]."""
        if self.args.norm_value:
            mean, count = self.return_moments[0], valid.sum()
            weight, count = 0.1 * (count > 0), count.clamp(min=1)
            error = torch.where(valid > 0, returns - mean, 0)
            shift = error.sum() / count
            # By the mean square and its difference from the mean's square, large returns would lose all their digits
            spread = torch.where(valid > 0, error - shift, 0).square().sum() / count
            moments = torch.stack([mean + shift, spread + (1 - weight) * shift.square()])
            self.return_moments.lerp_(moments, weight)

    def policy_and_value(self, network, x: torch.Tensor, state: torch.Tensor):
        """The network's outputs for consecutive steps, or for one; shapes as there."""
        return self.module(network, x, state)

    def upload_inputs(self, envs: Environments) -> None:
        """Sends the environments' inputs to the device."""
        self.host_input.numpy()[:] = envs.inputs
        self.input.copy_(self.host_input, non_blocking=True)

    def act(self, t: int, envs: Environments) -> np.ndarray:
        """Sampled actions, which go into row `t` of the rollout, too; [num_envs, ...]."""
        if t == 0:
            self.first_state.copy_(self.state)
        self.row.fill_(t)
        self.upload_inputs(envs)
        self.choose()
        self.host_action.copy_(self.action)
        self.rollout.arrays["action"][t] = self.host_action.numpy()
        self.rollout.arrays["input"][t] = envs.inputs
        return self.rollout.arrays["action"][t]

    def look_ahead(self, envs: Environments) -> None:
        """Enters the value of what follows a rollout, by acting once more without a step of the environments."""
        state = self.state.clone()
        self.row.fill_(self.args.num_steps)
        self.upload_inputs(envs)
        self.choose()
        self.state.copy_(state)

    @torch.no_grad()
    def choose(self) -> None:
        """Samples actions, writes what goes with them into `acted`, and brings the state to after this step."""
        policy, log_std, value, state = self.policy_and_value(self.network, self.input, self.state)
        action = sample(policy, log_std)
        log_prob, _ = log_prob_and_entropy(policy, log_std, action)
        self.action.copy_(action)
        self.acted["log_prob"][self.row], self.acted["value"][self.row] = log_prob[None], value[None]
        self.state.copy_(state)

    @torch.no_grad()
    def prepare(self) -> None:
        """Advantages by GAE (Schulman et al. 2016, eq. 16): A[t] = δ[t] + γλ (1 - done[t]) A[t + 1], backwards in t.

        δ[t] = r[t] + γ (1 - terminated[t]) V[t + 1] - V[t], at a truncation, too: the row after an episode's end holds
        its last observation, and is not valid.
        """
        args, rollout = self.args, self.rollout.tensors
        mean, deviation = self.return_scale()
        values = mean + deviation * self.acted["value"]
        value, next_value = values[:-1], values[1:]
        error = rollout["reward"] + args.gamma * (1 - rollout["terminated"]) * next_value - value
        decay = args.gamma * args.gae_lambda * (1 - torch.maximum(rollout["terminated"], rollout["truncated"]))
        advantage = linear_recurrence(decay, error, torch.zeros_like(value[0]), reverse=True)
        self.update_return_scale(advantage + value, rollout["valid"])
        mean, deviation = self.return_scale()
        self.batch["advantage"].copy_(advantage)
        self.batch["return"].copy_((advantage + value - mean) / deviation)

    def evaluate(self, network, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Log-probabilities of a batch's actions, the policy's entropy, and the value; [T, B] each."""
        policy, log_std, value, _ = self.policy_and_value(network, batch["input"], batch["state"])
        return *log_prob_and_entropy(policy, log_std, batch["action"]), value

    def ppo_loss(self, network, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss of a minibatch, minus the objective of eq. 9, and what is logged of it; means over valid rows."""
        args, valid = self.args, batch["valid"] > 0
        names = ("advantage", "return", "value")
        advantage, returns, old_value = (torch.where(valid, batch[name], 0) for name in names)
        count = valid.sum().clamp(min=1)

        def mean(values: torch.Tensor) -> torch.Tensor:
            return torch.where(valid, values, 0).sum() / count

        log_prob, entropy, value = self.evaluate(network, batch)
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

    def learn(self) -> None:
        """One step of the optimiser on the environments that `minibatch` names."""
        batch = {name: tensor[:, self.minibatch] for name, tensor in self.batch.items()}
        batch["state"] = self.first_state[self.minibatch]
        gradient, (_, logged) = torch.func.grad_and_value(self.ppo_loss, has_aux=True)(self.network, batch)
        self.optimizer.step(self.network, gradient * (self.args.max_grad_norm / (gradient.norm() + 1e-6)).clamp(max=1))
        for name, tensor in logged.items():
            self.losses[name].copy_(tensor.detach())


def main(args: Args) -> None:
    check_args(args)
    if args.num_envs % args.num_minibatches:
        fail("num_minibatches", args.num_minibatches, f"must divide --num-envs {args.num_envs}")
    check_rollout(args, args.num_envs * args.num_steps)
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    torch.backends.cudnn.allow_tf32 = False  # else cuDNN's GRU and LSTM would learn with less precision than they act
    warnings.filterwarnings("ignore", "RNN module weights")  # cuDNN copies them into one block
    if args.torch_deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)  # a network this small is slower on several
    envs = Environments(args)
    torch.set_flush_denormal(True)  # moments of Adam that die away would become the CPU's slowest numbers
    # Freeing a block of almost 32 MiB, the most that counts, has glibc keep what is freed from then on (man mallopt)
    torch.empty(31 * 2**20, dtype=torch.uint8)
    with room_for(args):
        agent = CompiledMemoryPPOAgent(args, envs, device)

    with contextlib.closing(envs), Run(args, device, agent) as run:
        # Compilation and capture: full graphs to act and to update; a rollout is prepared too seldom to be compiled
        steps = [agent.learn, agent.choose]  # in place: a captured step would copy arguments and results
        if args.compile:
            torch.compiler.reset()  # forgets what earlier runs in this process have compiled
            # Else Dynamo drops a Function's own backward inside grad_and_value (issue 193279 of PyTorch)
            torch.compiler.allow_in_graph(linear_recurrence)
            options = {"fallback_random": True, "deterministic": args.torch_deterministic}  # eager's draws
            options |= {"cpp_wrapper": device.type == "cpu", "cpp.vec_isa_ok": True, "size_asserts": False}  # no checks
            options |= {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}  # any number is a constant
            options |= {"cpp.use_decompose_tanh": True}  # written with exp, which vectorises: off by about 1e-7
            options |= {"realize_reads_threshold": 2}  # else what a scan reads is computed anew, in code that grows
            options |= {"cpp_wrapper_build_separate": True, "cpp_cache_precompile_headers": False}  # compiles sooner
            # Else torch keeps no graph with it for the next run, which it may, until this file changes
            keys = {f"{__name__}.linear_recurrence": Path(__file__).read_text()}
            options |= {"unsafe_marked_cacheable_functions": keys}
            steps = [torch.compile(step, fullgraph=True, options=dict(options)) for step in steps]  # it pops the filter
        steps.append(agent.prepare)
        if args.cudagraphs:
            logging.getLogger("tensordict").setLevel("WARNING")  # it would tell of each capture
            steps = [CudaGraphModule(step, warmup=3) for step in steps]
        if args.compile or args.cudagraphs:
            warm_up(steps, agent, run)
        agent.learn, agent.choose, agent.prepare = steps

        if run.global_step:
            envs.begin(run.global_step)
        t, learning_rate = 0, args.learning_rate
        while run.global_step < args.total_timesteps:
            # Act
            if t == 0 and args.anneal_lr:
                learning_rate = linear_schedule(args.learning_rate, 0.0, args.total_timesteps, run.global_step)
                agent.optimizer.lr.fill_(learning_rate)
            action = agent.act(t, envs)

            # Step and store
            step = envs.step(action)
            for name, values in step.items():
                agent.rollout.arrays[name][t] = values
            valid = np.flatnonzero(step["valid"])
            ends = (step[name][valid].tolist() for name in ("reward", "terminated", "truncated"))
            run.step(*ends, valid.tolist())
            t += 1

            # Learn from a full rollout (the last one may not get full)
            if t == args.num_steps:
                agent.rollout.upload()
                agent.look_ahead(envs)
                agent.prepare()
                for _ in range(args.update_epochs):
                    order = torch.randperm(args.num_envs, device=device)
                    for chosen in order.chunk(args.num_minibatches):
                        agent.minibatch.copy_(chosen)
                        agent.learn()
                        run.updates += 1
                    if args.target_kl is not None and agent.losses["approx_kl"] > args.target_kl:
                        break
                t = 0
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


if __name__ == "__main__":
    main(tyro.cli(Args, default=stored_args()))
