# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "gymnasium[mujoco]>=1.4,<1.5", "numpy>=1.26", "tqdm>=4.66", "tyro>=1.0",
#   "tensordict>=0.15,<0.16"]
# ///
"""Soft actor-critic for continuous actions (Haarnoja et al. 2018, https://arxiv.org/abs/1812.05905).

An off-policy method: a tanh-squashed Gaussian policy maximises reward plus entropy, two critics learn its soft
value from replayed transitions (the smaller estimate counts), and the temperature α is tuned towards a target entropy.
This is `sac_continuous_action.py` at full speed: one graph an update, the parameters of a network one flat vector.

    python leanrl/sac_continuous_action_torchcompile.py --env-id HalfCheetah-v4 --seed 1 --compile --cudagraphs

Published return at 1M steps (CleanRL): HalfCheetah-v4 9,635 ± 1,424. Our own returns and fps are in the README.
To copy the algorithm alone, delete the part "Checks and recording" and what calls it; `main` must then count itself.
"""

import contextlib
import difflib
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import re
import resource
import signal
import sys
import time
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
from tensordict import TensorDict
from tensordict.nn import CudaGraphModule
from torch.func import functional_call, grad_and_value, vmap
from tqdm import tqdm

LOG_STD_MIN, LOG_STD_MAX = -5.0, 2.0


@dataclass
class Args:
    seed: int = 1
    """seed of every random number: environments, networks, exploration, replay"""
    env_id: str = "HalfCheetah-v4"
    """Gymnasium id of the environment"""
    total_timesteps: int = 1_000_000
    """length of the run, in environment steps summed over all environments"""
    num_envs: int = 1
    """number of environments stepped side by side; the ratio of updates to environment steps does not depend on it"""
    cuda: bool = True
    """train on CUDA where there is a device, else on the CPU"""
    torch_deterministic: bool = True
    """have cuDNN and cuBLAS use repeatable kernels"""
    track: bool = False
    """send the metrics to Weights & Biases as well (needs the wandb package)"""
    wandb_project: str = "leanrl"
    """Weights & Biases project"""
    wandb_entity: str | None = None
    """Weights & Biases team or user; your default one if not given"""
    output_dir: str = "runs"
    """folder in which the run's own folder is made"""
    measure_burnin: int = 100
    """environment steps after learning has started before fps is measured"""

    buffer_size: int = 1_000_000
    """capacity of the replay buffer, in transitions"""
    gamma: float = 0.99
    """discount factor, per step"""
    tau: float = 0.005
    """share of the new parameters in each update of the target networks"""
    batch_size: int = 256
    """transitions per update"""
    learning_starts: int = 5_000
    """environment steps before the first update; SAC and TD3 act at random until then"""
    policy_lr: float = 3e-4
    """Adam's learning rate for the policy"""
    q_lr: float = 1e-3
    """Adam's learning rate for the critics and for α"""
    policy_frequency: int = 2
    """updates between policy updates; SAC then makes as many of those, and TD3 moves its targets"""
    target_network_frequency: int = 1
    """environment steps between updates of the target networks"""
    alpha: float = 0.2
    """entropy temperature α when it is not tuned"""
    autotune: bool = True
    """tune α towards an entropy of minus the number of action dimensions"""

    compile: bool = False
    """compile the steps with torch.compile"""
    cudagraphs: bool = False
    """capture the steps in CUDA graphs"""


# ---- Checks and recording: not the algorithm. A copied script may lose this part, down to the next such line ----
LOG_EVERY = 100  # environment steps between two lines of metrics.jsonl


def fail(flag: str, value: object, allowed: str) -> NoReturn:
    """Ends the program with one line on stderr and exit status 2."""
    print(*f"error: --{flag.replace('_', '-')} {value}: {allowed}".split(), file=sys.stderr)
    sys.exit(2)


def check_args(args: Args) -> None:
    """Ends the program with exit status 2 if a number is out of its range or a flag can't be honoured."""
    counts = "total_timesteps num_envs buffer_size batch_size policy_frequency target_network_frequency train_frequency"
    for names, allowed, low, high in (
        (counts, "must be at least 1", 1, math.inf),
        ("learning_starts measure_burnin", "must be at least 0", 0, math.inf),
        ("seed", "must lie in [0, 2**32)", 0, 2**32 - 1),
        ("learning_rate policy_lr q_lr", "must be finite and above 0", sys.float_info.min, sys.float_info.max),
        ("alpha policy_noise exploration_noise noise_clip", "must be finite, at least 0", 0, sys.float_info.max),
        ("gamma tau start_e end_e exploration_fraction", "must lie in [0, 1]", 0, 1),
    ):
        for name in names.split():
            if not low <= getattr(args, name, low) <= high:
                fail(name, getattr(args, name), allowed)
    if args.learning_starts >= args.total_timesteps:
        fail("learning_starts", args.learning_starts, f"must be below --total-timesteps {args.total_timesteps}")
    if args.buffer_size < args.num_envs:
        fail("buffer_size", args.buffer_size, f"must be at least --num-envs {args.num_envs}")
    if getattr(args, "cudagraphs", False) and not (args.cuda and torch.cuda.is_available()):
        fail("cudagraphs", True, "needs a CUDA device and --cuda")
    if args.track and importlib.util.find_spec("wandb") is None:
        fail("track", True, "needs the wandb package: pip install wandb")


class Run:
    """Keeps a run's files in a new folder of `args.output_dir`, its progress bar, and its last lines however it ends.

    metrics.jsonl has a line every `LOG_EVERY` steps (returns and lengths are means of the last 100 episodes) and
    episodes.jsonl one an episode; fps counts from `args.measure_burnin` steps after learning has started.
    """

    def __init__(self, args: Args, device: torch.device):
        self.args, self.device, self.start, self.warmup_seconds = args, device, time.perf_counter(), 0.0
        self.global_step = self.updates = self.episodes = self.next_log = 0
        self.last_log, self.window, self.recent = (0, self.start), None, deque(maxlen=100)
        self.returns, self.lengths = [0.0] * args.num_envs, [0] * args.num_envs
        steps_of_learning = args.total_timesteps - args.learning_starts
        self.window_opens = args.learning_starts + min(args.measure_burnin, steps_of_learning // 2)
        self.script, self.flags = Path(__file__).stem, [f for f in ("compile", "cudagraphs") if getattr(args, f, False)]
        stem = "__".join([re.sub(r"[^\w.-]+", "-", args.env_id), self.script, *self.flags, str(args.seed)])
        try:
            Path(args.output_dir).mkdir(parents=True, exist_ok=True)
            while True:
                self.folder = Path(args.output_dir, f"{stem}__{int(time.time())}")
                with contextlib.suppress(FileExistsError):  # another run began within this second
                    self.folder.mkdir()
                    break
                time.sleep(0.1)
        except OSError as error:
            fail("output_dir", args.output_dir, f"must be a folder that can be written to ({error.strerror})")
        names = re.findall("model name\t: (.+)", Path("/proc/cpuinfo").read_text()) if sys.platform == "linux" else []
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else (*names, platform.machine())[0]
        self.about = {"device": str(device), "device_name": name, "threads": torch.get_num_threads()}
        versions = {name: None for name in ("torch", "tensordict", "gymnasium", "envpool", "mujoco")}
        versions |= {name: importlib.metadata.version(name) for name in versions if importlib.util.find_spec(name)}
        self.about["versions"] = {"python": platform.python_version(), **versions}
        (self.folder / "config.json").write_text(json.dumps(vars(args) | self.about, indent=2) + "\n")
        self.files = {name: open(self.folder / f"{name}.jsonl", "w", buffering=1) for name in ("metrics", "episodes")}

    def __enter__(self):
        def interrupt(number, _frame):
            for signal_number in self.handlers:
                signal.signal(signal_number, signal.SIG_IGN)  # a second one must not cost the summary
            raise KeyboardInterrupt(number)  # SIGTERM ends a run as Ctrl-C does

        self.handlers = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
        self.bar = tqdm(total=self.args.total_timesteps, unit="step", disable=None, dynamic_ncols=True)
        return self

    def step(self, rewards: Sequence[float], terminated: Sequence[bool], truncated: Sequence[bool]) -> None:
        """Counts one step of every environment and writes down the episodes that it ends; each of length `num_envs`."""
        self.global_step += len(rewards)
        for i, reward in enumerate(rewards):
            self.returns[i] += float(reward)
            self.lengths[i] += 1
            if terminated[i] or truncated[i]:
                total, length, self.returns[i], self.lengths[i] = self.returns[i], self.lengths[i], 0.0, 0
                finite = math.isfinite(total)  # JSON has no other numbers
                line = {"global_step": self.global_step, "return": total if finite else None, "length": length}
                self.files["episodes"].write(json.dumps(line | {"terminated": bool(terminated[i])}) + "\n")
                self.recent.extend([(total, length)] if finite else [])
                self.episodes += 1

    def log(self, losses: Mapping[str, float | torch.Tensor], learning_rate: float) -> None:
        """Writes a line of metrics if one is due; called after each step. Raises FloatingPointError on a bad loss."""
        if self.window is None and self.global_step >= self.window_opens:
            self.window = (self.global_step, self.now())
        if self.global_step < min(self.next_log, self.args.total_timesteps):
            return
        self.next_log = (self.global_step // LOG_EVERY + 1) * LOG_EVERY
        losses = {name: float(loss) for name, loss in losses.items()}
        for name, loss in losses.items():
            if not math.isfinite(loss):
                raise FloatingPointError(f"{name} is {loss} at step {self.global_step}")
        (last_step, last_time), self.last_log = self.last_log, (self.global_step, time.perf_counter())
        fps = round((self.global_step - last_step) / (self.last_log[1] - last_time), 2)
        line = {"global_step": self.global_step, "wall_time": round(self.last_log[1] - self.start, 4), "fps": fps}
        line |= {**self.means(), **losses, "learning_rate": learning_rate}
        self.files["metrics"].write(json.dumps(line) + "\n")
        if self.args.track:
            import wandb

            if wandb.run is None:
                project = {"project": self.args.wandb_project, "entity": self.args.wandb_entity}
                wandb.init(**project, name=self.folder.name, config=vars(self.args), dir=str(self.folder))
            wandb.log(line, step=self.global_step)
        self.bar.set_postfix_str(f"fps {fps:.0f}, return {line['episode_return']}", refresh=False)
        self.bar.update(self.global_step - self.bar.n)

    def means(self) -> dict[str, float | None]:
        """Mean return and length of the last 100 episodes; None while there is none."""
        means = [round(math.fsum(column) / len(column), 4) for column in zip(*self.recent, strict=True)]
        return dict(zip(("episode_return", "episode_length"), means or (None, None), strict=True))

    def now(self) -> float:
        """Seconds on a clock that is read when the device has done its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def __exit__(self, kind, error, traceback) -> None:
        for number in self.handlers:
            signal.signal(number, signal.SIG_IGN)
        status = "finished" if kind is None else "interrupted" if kind is KeyboardInterrupt else "failed"
        end = time.perf_counter() if status == "failed" else self.now()
        first_step, opened = self.window or (self.global_step, end)
        fps = round((self.global_step - first_step) / (end - opened), 2) if end > opened else None
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        peak = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else peak
        summary = {"script": self.script, "variant": "+".join(self.flags) or "eager", "env_id": self.args.env_id}
        summary |= {"seed": self.args.seed, "global_step": self.global_step, "updates": self.updates, "fps": fps}
        summary |= {"fps_window": [first_step, self.global_step], "warmup_seconds": round(self.warmup_seconds, 3)}
        summary |= {"wall_seconds": round(end - self.start, 3), "episodes": self.episodes, **self.about}
        summary |= {"episode_return": self.means()["episode_return"], "peak_memory_bytes": peak, "status": status}
        (self.folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        for file in (*self.files.values(), self.bar):
            file.close()
        print(f"return {summary['episode_return']} (mean of the last {len(self.recent)} of {self.episodes} episodes)")
        print(f"{fps} steps/s on {self.about['device_name']}, warm-up {summary['warmup_seconds']} s")
        print(f"{status} at step {self.global_step}: {self.folder}", flush=True)
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        if status == "interrupted":
            sys.exit(128 + (error.args[0] if error.args else signal.SIGINT))
        if kind is FloatingPointError:
            sys.exit(f"error: {error}")


# ---- Environments ----
def make_environment(env_id: str) -> gym.Env:
    """One Gymnasium environment; ends the program with exit status 2 if it can't be made.

    Notices about the older -v4 models go neither to the terminal nor to a MUJOCO_LOG.TXT in the current folder.
    """
    if importlib.util.find_spec("mujoco") is not None:
        import mujoco

        mujoco.set_mju_user_warning(lambda message: None)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return gym.make(env_id, disable_env_checker=True)
    except (gym.error.Error, ImportError) as error:
        nearest = ", ".join(difflib.get_close_matches(env_id, gym.registry, cutoff=0.4)) or "none"
        fail("env_id", env_id, f"no such environment; nearest names: {nearest} ({str(error).partition(chr(10))[0]})")


def check_continuous_spaces(env: gym.Env) -> None:
    """Ends the program with exit status 2 unless observations are vectors and actions bounded vectors."""
    observations, actions = env.observation_space, env.action_space
    if not isinstance(observations, gym.spaces.Box) or len(observations.shape) != 1:
        fail("env_id", env.spec.id, f"its observations must be a one-dimensional Box, not {observations}")
    is_vector = isinstance(actions, gym.spaces.Box) and len(actions.shape) == 1
    if not is_vector or not actions.is_bounded() or not np.issubdtype(actions.dtype, np.floating):
        fail("env_id", env.spec.id, f"its actions must be a one-dimensional float Box with bounds, not {actions}")


def make_environments(args: Args) -> tuple[list[gym.Env], list[int]]:
    """The environments, and the seeds of their first resets: no other seed or environment shares them."""
    envs = [make_environment(args.env_id) for _ in range(args.num_envs)]
    seeds = np.random.SeedSequence(args.seed).generate_state(2 * args.num_envs).tolist()
    for env, seed in zip(envs, seeds[args.num_envs :], strict=True):
        env.action_space.seed(seed)
    return envs, seeds[: args.num_envs]


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


# ---- Replay ----
class ReplayRing:
    """The last `capacity` transitions of `num_envs` environments, on `device`, with each observation held once.

    Transition n, counted from 0, lies in slot n % slots. Its next observation is the observation of transition
    n + num_envs, the same environment's next. Only where an episode was truncated does `next_slot` point elsewhere: to
    a copy of its true last observation, behind the ring. (Nothing is bootstrapped from a terminated episode's.)

    The host fills up to `rows` transitions (`add`) and `upload` sends them in one copy; `write`, `draw` and `gather`
    work on tensors of fixed address and shape, so that they can be a part of a compiled and captured step.
    """

    def __init__(self, capacity: int, env: gym.Env, num_envs: int, rows: int, device: torch.device):
        self.capacity, self.num_envs, self.device, self.action_space = capacity, num_envs, device, env.action_space
        self.slots = capacity + num_envs + rows  # beyond the capacity: the newest observations, and rows half filled
        longest = env.spec.max_episode_steps or 1  # without a limit every step might be a truncation
        self.copies = min((capacity + num_envs) // longest + num_envs + rows + 1, 2**24)  # staged as a float32
        self.owners, self.added, self.truncations = [-1] * self.copies, 0, 0

        self.observation_dim, self.action_dim = env.observation_space.shape[0], math.prod(env.action_space.shape)
        dtype = torch.uint8 if env.observation_space.dtype == np.uint8 else torch.float32
        self.observations = torch.zeros(self.slots + self.copies, self.observation_dim, dtype=dtype, device=device)
        action_dtype = torch.float32 if env.action_space.shape else torch.int32
        self.transitions = TensorDict(
            action=torch.zeros(self.slots, *env.action_space.shape, dtype=action_dtype, device=device),
            reward=torch.zeros(self.slots, device=device),
            terminated=torch.zeros(self.slots, dtype=torch.bool, device=device),
            next_slot=torch.zeros(self.slots, dtype=torch.int32, device=device),
            batch_size=[self.slots],
        )
        self.nbytes = self.observations.nbytes + sum(field.nbytes for field in self.transitions.values())
        self.written, self.oldest = (torch.zeros((), dtype=torch.long, device=device) for _ in range(2))

        # A staged row: the newest observation, action, reward, terminated, copy of the last observation or -1, in use
        width = self.observation_dim + self.action_dim + 4
        self.staged = torch.zeros(rows, width, pin_memory=device.type == "cuda")
        self.incoming = self.staged.to(device)  # on the CPU the same memory
        columns = self.staged.split([self.observation_dim, self.action_dim, 4], 1)
        self.host_observation, self.host_action, self.host_rest = (column.numpy() for column in columns)
        self.rows, self.row = rows, torch.arange(rows, device=device)
        self.sent = torch.cuda.Event() if device.type == "cuda" else None

    def start(self, observations: np.ndarray) -> None:
        """Takes the first observations, [num_envs, observation_dim]."""
        first = torch.as_tensor(observations, dtype=torch.float32, device=self.device)
        self.observations[: self.num_envs] = first
        self.incoming[: self.num_envs, : self.observation_dim] = first

    def add(self, row: int, observation, action, reward, terminated, last_observation=None) -> None:
        """Stages a transition and the observation to act on next; `last_observation` if it was truncated by a limit."""
        index = -1
        if last_observation is not None:
            index = self.truncations % self.copies
            # The copies to be reused next belong to transitions that are sampled no more, nor any older one
            owner = self.owners[(self.truncations + self.rows) % self.copies]
            if owner >= self.added - self.capacity - self.num_envs:
                self.oldest.clamp_(min=owner + 1)
            self.observations[self.slots + index] = torch.as_tensor(last_observation, device=self.device)
            self.owners[index], self.truncations = self.added, self.truncations + 1
        self.added += 1
        if row == 0:
            if self.sent is not None:
                self.sent.synchronize()
            self.host_rest[:, -1] = 0
        self.host_observation[row], self.host_action[row] = observation, action
        self.host_rest[row] = reward, terminated, index, 1

    def upload(self) -> None:
        """Sends the staged rows to the device."""
        if self.sent is not None:
            self.incoming.copy_(self.staged, non_blocking=True)
            self.sent.record()

    def write(self) -> None:
        """Puts the rows in use into the ring; the others only touch slots that are not sampled."""
        observation, action, rest = self.incoming.split([self.observation_dim, self.action_dim, 4], 1)
        reward, terminated, index, in_use = rest.unbind(1)
        slot = (self.written + self.row) % self.slots
        next_slot = (slot + self.num_envs) % self.slots
        self.observations[next_slot] = observation.to(self.observations.dtype)
        transitions = {
            "action": action.view(-1, *self.action_space.shape),
            "reward": reward,
            "terminated": terminated,
            "next_slot": torch.where(index < 0, next_slot, self.slots + index.int()),
        }
        for name, value in transitions.items():
            self.transitions[name][slot] = value.to(self.transitions[name].dtype)
        self.written.add_(in_use.sum().long())
        self.incoming[:, -1] = 0  # a second call would change nothing

    def draw(self, shape: tuple[int, ...], ahead: int | torch.Tensor) -> torch.Tensor:
        """Numbers of transitions, uniform over the ring as it will be once `ahead` more are written; of `shape`."""
        newest = self.written + ahead
        oldest = torch.maximum(self.oldest, newest - self.capacity)
        return oldest + torch.randint(2**62, shape, device=self.device) % (newest - oldest)

    def gather(self, number: torch.Tensor) -> dict[str, torch.Tensor]:
        """The transitions of these numbers; [B] -> tensors of [B, ...], all but integer actions in float32."""
        slot = number % self.slots
        next_slot = self.transitions["next_slot"][slot].long()
        return {
            "observation": self.observations[slot].float(),
            "next_observation": self.observations[next_slot].float(),
            "action": self.transitions["action"][slot],
            "reward": self.transitions["reward"][slot],
            "terminated": self.transitions["terminated"][slot].float(),
        }


# ---- Flat parameters ----
class FlatModule:
    """A module as a function of its parameters, all in one vector of [P], which an optimiser updates as one tensor.

    Matrices lie transposed in it, as the backward pass yields their gradients.
    """

    def __init__(self, module: nn.Module):
        parameters = dict(module.named_parameters())
        self.module, self.matrices = module, {name for name, tensor in parameters.items() if tensor.ndim == 2}
        self.parts = {name: tensor.mT if name in self.matrices else tensor for name, tensor in parameters.items()}
        self.shapes = {name: part.shape for name, part in self.parts.items()}
        self.sizes = [part.numel() for part in self.parts.values()]

    def flatten(self) -> torch.Tensor:
        """The module's own parameters, joined; [P]."""
        return torch.cat([part.flatten() for part in self.parts.values()])

    def split(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Views of `flat`, [P], with the names and shapes of the module's parameters."""
        parts = zip(self.shapes.items(), flat.split(self.sizes), strict=True)
        views = {name: part.view(shape) for (name, shape), part in parts}
        return {name: view.mT if name in self.matrices else view for name, view in views.items()}

    def __call__(self, flat: torch.Tensor, *inputs: torch.Tensor):
        return functional_call(self.module, self.split(flat), inputs, tie_weights=False)


class Adam:
    """Adam (Kingma and Ba 2015, algorithm 1) on one tensor, in place, with all its state on the device."""

    def __init__(self, parameters: torch.Tensor, lr: float):
        self.parameters, self.lr = parameters, lr
        self.first_moment, self.second_moment = torch.zeros_like(parameters), torch.zeros_like(parameters)
        self.betas = torch.tensor([0.9, 0.999], device=parameters.device)
        self.powers = torch.ones(2, device=parameters.device)  # of the betas; a power of step would cost every element

    def update(self, gradient: torch.Tensor) -> None:
        self.powers.mul_(self.betas)
        first_correction, second_correction = (1 - self.powers).unbind()
        self.first_moment.lerp_(gradient, 1 - 0.9)
        self.second_moment.lerp_(gradient.square(), 1 - 0.999)
        deviation = (self.second_moment / second_correction).sqrt() + 1e-8
        self.parameters.sub_(self.lr * (self.first_moment / first_correction) / deviation)


# ---- Agent ----
class CompiledSACAgent:
    """Networks, their optimisers, the replay ring, and the updates on them.

    The steps that `main` compiles and captures take no tensor and return none: they work on tensors of fixed address,
    so that a captured graph is replayed without copies.
    """

    @torch.no_grad()
    def __init__(self, args: Args, env: gym.Env, device: torch.device):
        self.args, self.device = args, device
        observation_dim, self.action_dim = env.observation_space.shape[0], env.action_space.shape[0]
        bounds = (env.action_space.low, env.action_space.high)
        low, high = (torch.as_tensor(bound, dtype=torch.float32, device=device) for bound in bounds)
        self.scale, self.bias = (high - low) / 2, (high + low) / 2
        # The parameters of the twin critics are the rows of one matrix
        self.actor_net = FlatModule(GaussianActor(observation_dim, self.action_dim))
        self.q_net, twin = (FlatModule(QNetwork(observation_dim, self.action_dim)) for _ in range(2))
        self.actor = self.actor_net.flatten().to(device)
        self.critics = torch.stack([self.q_net.flatten(), twin.flatten()]).to(device)
        self.target_critics = self.critics.clone()
        self.log_alpha = torch.tensor(0.0 if args.autotune else math.log(max(args.alpha, 1e-30)), device=device)
        self.actor_adam, self.critic_adam = Adam(self.actor, args.policy_lr), Adam(self.critics, args.q_lr)
        self.alpha_adam = Adam(self.log_alpha, args.q_lr)
        self.losses = torch.zeros(3, device=device)
        self.updates = torch.zeros((), dtype=torch.long, device=device)
        self.overlaps = device.type == "cuda"  # updates run beside the environments

        self.ring = ReplayRing(args.buffer_size, env, args.num_envs, args.num_envs, device)
        self.drawn = torch.zeros(args.num_envs, args.batch_size, dtype=torch.long, device=device)
        self.turn = torch.zeros(1, dtype=torch.long, device=device)
        self.outbox = torch.zeros(args.num_envs * self.action_dim + 5, device=device)
        self.inbox = torch.zeros(len(self.outbox), pin_memory=device.type == "cuda")

    def state(self) -> list[torch.Tensor]:
        """The tensors that the steps change, but for the ring's contents, which count only as far as `written` says."""
        adams = (self.actor_adam, self.critic_adam, self.alpha_adam)
        moments = [tensor for adam in adams for tensor in (adam.first_moment, adam.second_moment, adam.powers)]
        networks = [self.actor, self.critics, self.target_critics, self.log_alpha]
        return [*networks, self.losses, self.updates, self.ring.written, *moments]

    def policy(self, parameters: torch.Tensor, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A sampled action and its log-probability; [B, observation_dim] -> [B, A], [B]."""
        mean, log_std = self.actor_net(parameters, observation)
        return squashed_gaussian(mean, log_std, torch.randn_like(mean), self.scale, self.bias)

    def q_values(self, parameters: torch.Tensor, observation: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        """Both critics' values; [2, P], [B, observation_dim], [B, A] -> [2, B]."""
        return vmap(lambda critic: self.q_net(critic, observation, action))(parameters)

    def store(self) -> None:
        self.ring.write()

    def act(self) -> None:
        """Acts on the newest observations; where updates overlap, stores and draws for the updates of this step.

        What the host has to know goes out in one vector: the actions, whether the updates must wait for a transition
        that is still to come, the losses of the updates before, α.
        """
        if self.overlaps:
            self.store()
        observation = self.ring.incoming[:, : self.ring.observation_dim]
        action, _ = self.policy(self.actor, observation)
        if self.overlaps:
            self.drawn.copy_(self.ring.draw(self.drawn.shape, ahead=self.args.num_envs))
            self.turn.zero_()
            must_wait = (self.drawn >= self.ring.written).any().float()
        else:
            must_wait = torch.ones((), device=self.device)  # the update stores, draws and acts by itself
        self.outbox.copy_(torch.cat([action.flatten(), must_wait[None], self.losses, self.log_alpha.exp()[None]]))

    def receive(self) -> tuple[np.ndarray, bool, dict[str, float]]:
        """Waits for `act`; the actions, [num_envs, A], whether the updates must wait for this step, and the losses."""
        self.inbox.copy_(self.outbox, non_blocking=True)
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        must_wait, *losses = self.inbox[-5:].tolist()
        action = self.inbox[:-5].view(self.args.num_envs, self.action_dim).numpy().copy()
        losses = dict(zip(("qf_loss", "actor_loss", "alpha_loss", "alpha"), losses, strict=True))
        if not self.args.autotune:
            del losses["alpha_loss"]
        return action, bool(must_wait), losses

    def update_critics(self, batch: dict[str, torch.Tensor]) -> None:
        """One step on the soft Bellman residual (eq. 5 and 6) of both critics."""
        next_action, next_log_prob = self.policy(self.actor, batch["next_observation"])
        next_q = self.q_values(self.target_critics, batch["next_observation"], next_action).min(0).values
        next_value = next_q - self.log_alpha.exp() * next_log_prob
        target = batch["reward"] + self.args.gamma * (1 - batch["terminated"]) * next_value

        def loss(critics):
            q = self.q_values(critics, batch["observation"], batch["action"])
            return (q - target).square().mean(1).sum()

        gradient, self.losses[0] = grad_and_value(loss)(self.critics)
        self.critic_adam.update(gradient)

    def update_actor(self, batch: dict[str, torch.Tensor]) -> None:
        """One step of the policy towards the softmax of the smaller soft value (eq. 7)."""

        def loss(actor):
            action, log_prob = self.policy(actor, batch["observation"])
            q = self.q_values(self.critics, batch["observation"], action).min(0).values
            return (self.log_alpha.exp() * log_prob - q).mean()

        gradient, self.losses[1] = grad_and_value(loss)(self.actor)
        self.actor_adam.update(gradient)

    def update_alpha(self, batch: dict[str, torch.Tensor]) -> None:
        """One step of the temperature towards an entropy of -action_dim (eq. 18)."""
        _, log_prob = self.policy(self.actor, batch["observation"])
        loss = (-self.log_alpha.exp() * (log_prob - self.action_dim)).mean()
        self.losses[2] = loss
        self.alpha_adam.update(loss)  # linear in exp(log α), the loss is its own derivative by log α

    def next_batch(self) -> dict[str, torch.Tensor]:
        """The transitions for the next update, which `act` has drawn or which are drawn now; [batch_size, ...]."""
        if self.overlaps:
            numbers = self.drawn.index_select(0, self.turn).squeeze(0)
            self.turn.add_(1)
        else:
            numbers = self.ring.draw((self.args.batch_size,), ahead=0)
        return self.ring.gather(numbers)

    def update(self, policy_is_due: bool) -> None:
        """One update of everything that is due; where updates don't overlap, stores first and acts afterwards."""
        if not self.overlaps:
            self.store()
        batch = self.next_batch()
        self.update_critics(batch)
        if policy_is_due:
            for _ in range(self.args.policy_frequency):
                self.update_actor(batch)
                if self.args.autotune:
                    self.update_alpha(batch)
        targets_are_due = self.updates % self.args.target_network_frequency == 0
        self.target_critics.lerp_(self.critics, self.args.tau * targets_are_due)
        self.updates.add_(1)
        if not self.overlaps:
            self.act()

    def update_with_policy(self) -> None:
        self.update(policy_is_due=True)

    def update_without_policy(self) -> None:
        self.update(policy_is_due=False)


@torch.no_grad()
def main(args: Args) -> None:
    check_args(args)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    if args.torch_deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    envs, seeds = make_environments(args)
    check_continuous_spaces(envs[0])
    torch.set_flush_denormal(True)  # moments of Adam that die away would become the CPU's slowest numbers
    agent = CompiledSACAgent(args, envs[0], device)
    buffer = agent.ring

    print(f"replay buffer: {buffer.nbytes / 1e6:.1f} MB on {device}", flush=True)

    with Run(args, device) as run:
        # Compilation and capture: a full graph for acting, for storing, and for each kind of update
        steps = {"store": agent.store, True: agent.update_with_policy}
        steps |= {False: agent.update_without_policy} if args.policy_frequency > 1 else {}
        steps |= {"act": agent.act} if agent.overlaps else {}  # else the updates act, but for the first time
        if args.compile:
            # Eager's random numbers, so that all variants draw the same; no trials and checks that only take time. What
            # guards look at can't change during a run; steps that an earlier run left in this process must go
            torch.compiler.reset()
            options = {"fallback_random": True, "cpp_wrapper": device.type == "cpu", "cpp.vec_isa_ok": True}
            options |= {"size_asserts": False, "guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
            for name, step in steps.items():
                steps[name] = torch.compile(step, fullgraph=True, options=options.copy())  # it pops the filter
        if args.cudagraphs:
            steps = {name: CudaGraphModule(step, warmup=3) for name, step in steps.items()}
        if args.compile or args.cudagraphs:
            started, saved = run.now(), [tensor.clone() for tensor in agent.state()]
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                for step in [step for step in steps.values() for _ in range(4)]:
                    buffer.written.fill_(1)
                    agent.turn.zero_()
                    step()
            for tensor, value in zip(agent.state(), saved, strict=True):  # warmed up on a state that is now put back
                tensor.copy_(value)
            run.warmup_seconds = run.now() - started

        def learn() -> None:
            for _ in range(args.num_envs):
                steps[run.updates % args.policy_frequency == 0]()
                run.updates += 1

        losses = {}
        first = [env.reset(seed=seed)[0] for env, seed in zip(envs, seeds, strict=True)]
        buffer.start(np.stack(first, dtype=np.float32))
        rewards, terminated, truncated = ([0] * args.num_envs for _ in range(3))
        while run.global_step < args.total_timesteps:
            # Act
            is_learning, must_wait = run.global_step >= args.learning_starts, False
            if is_learning:
                if agent.overlaps or not run.updates:
                    steps.get("act", agent.act)()
                action, must_wait, received = agent.receive()
                losses = received if run.updates else {}
            else:
                action = [env.action_space.sample() for env in envs]

            # Learn while the environments step, unless a batch has a transition that is still to come
            if is_learning and not must_wait:
                learn()

            # Step and store; where an episode has ended, the next one begins
            for i, env in enumerate(envs):
                observation, rewards[i], terminated[i], truncated[i], _ = env.step(action[i])
                last_observation = np.array(observation) if truncated[i] and not terminated[i] else None
                observation = env.reset()[0] if terminated[i] or truncated[i] else observation
                buffer.add(i, observation, action[i], rewards[i], terminated[i], last_observation)
            buffer.upload()
            run.step(rewards, terminated, truncated)
            if (must_wait and agent.overlaps) or not is_learning:  # else the next `act` or update stores
                steps["store"]()
            if must_wait:
                learn()
            if run.updates and run.global_step >= args.total_timesteps:
                if agent.overlaps:
                    steps["act"]()  # the last losses come with it
                losses = agent.receive()[2]
            run.log(losses, args.policy_lr)


if __name__ == "__main__":
    main(tyro.cli(Args))
