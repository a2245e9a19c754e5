# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "gymnasium[mujoco]>=1.4,<1.5", "numpy>=1.26", "tqdm>=4.66", "tyro>=1.0",
#   "tensordict>=0.15,<0.16"]
# ///
"""Deep Q-learning, DQN, for vector observations (Mnih et al. 2015, https://www.nature.com/articles/nature14236).

An off-policy method for discrete actions: a network learns every action's value from replayed transitions, towards
targets from a copy of itself that is renewed now and then. It acts greedily, but at random with a falling chance ε.
This is `dqn.py` at full speed: one graph an update, the parameters one flat vector, acting in NumPy on the host.

    python leanrl/dqn_torchcompile.py --env-id CartPole-v1 --seed 1 --compile --cudagraphs

Published return at 500k steps (CleanRL): CartPole-v1 489 ± 16. Our own returns and fps are in the README.
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
import random
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
from torch.func import functional_call, grad_and_value
from tqdm import tqdm


@dataclass
class Args:
    seed: int = 1
    """seed of every random number: environments, networks, exploration, replay"""
    env_id: str = "CartPole-v1"
    """Gymnasium id of the environment"""
    total_timesteps: int = 500_000
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

    buffer_size: int = 10_000
    """capacity of the replay buffer, in transitions"""
    gamma: float = 0.99
    """discount factor, per step"""
    tau: float = 1.0
    """share of the new parameters in each update of the target networks"""
    batch_size: int = 128
    """transitions per update"""
    learning_starts: int = 10_000
    """environment steps before the first update; SAC and TD3 act at random until then"""
    learning_rate: float = 2.5e-4
    """learning rate of Adam"""
    train_frequency: int = 10
    """environment steps between updates"""
    target_network_frequency: int = 500
    """environment steps between updates of the target networks"""
    start_e: float = 1.0
    """share of random actions ε at the start"""
    end_e: float = 0.05
    """share of random actions ε once it has fallen"""
    exploration_fraction: float = 0.5
    """share of the run over which ε falls linearly"""

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


def check_discrete_spaces(env: gym.Env) -> None:
    """Ends the program with exit status 2 unless observations are vectors and actions are 0, 1, …, n - 1."""
    observations, actions = env.observation_space, env.action_space
    if not isinstance(observations, gym.spaces.Box) or len(observations.shape) != 1:
        fail("env_id", env.spec.id, f"its observations must be a one-dimensional Box, not {observations}")
    if not isinstance(actions, gym.spaces.Discrete) or actions.start != 0:
        fail("env_id", env.spec.id, f"its actions must be Discrete and start at 0, not {actions}")


def make_environments(args: Args) -> tuple[list[gym.Env], list[int]]:
    """The environments, and the seeds of their first resets: no other seed or environment shares them."""
    envs = [make_environment(args.env_id) for _ in range(args.num_envs)]
    seeds = np.random.SeedSequence(args.seed).generate_state(2 * args.num_envs).tolist()
    for env, seed in zip(envs, seeds[args.num_envs :], strict=True):
        env.action_space.seed(seed)
    return envs, seeds[: args.num_envs]


# ---- Networks ----
class DiscreteQNetwork(nn.Module):
    """The value of every action; [B, observation_dim] -> [B, actions]."""

    def __init__(self, observation_dim: int, actions: int):
        super().__init__()
        self.fc1 = nn.Linear(observation_dim, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, actions)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(observation)))))


def linear_schedule(start: float, end: float, duration: float, step: int) -> float:
    """Falls (or rises) linearly from `start` at step 0 to `end` at step `duration`, and stays there."""
    return end if step >= duration else start + (end - start) * step / duration


def times_due(step: int, num_envs: int, frequency: int) -> int:
    """How many multiples of `frequency` the last `num_envs` steps have reached, up to and with `step`."""
    return step // frequency - (step - num_envs) // frequency


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
class CompiledDQNAgent:
    """The network, its target, its optimiser, the replay ring, and the update on them.

    The steps that `main` compiles and captures take no tensor and return none: they work on tensors of fixed address,
    so that a captured graph is replayed without copies. A network this small acts on the host, in NumPy, several
    times faster than a compiled call would: one row takes less time than the call.
    """

    @torch.no_grad()
    def __init__(self, args: Args, env: gym.Env, device: torch.device):
        self.args, self.device = args, device
        observation_dim, actions = env.observation_space.shape[0], int(env.action_space.n)
        self.q_net = FlatModule(DiscreteQNetwork(observation_dim, actions))
        self.parameters = self.q_net.flatten().to(device)
        self.target_parameters = self.parameters.clone()
        self.adam = Adam(self.parameters, args.learning_rate)
        self.losses = torch.zeros(2, device=device)
        self.overlaps = device.type == "cuda"  # updates run beside the environments

        # Between two updates the transitions are staged on the host: as many as fit before the next update
        rows = -(-min(args.train_frequency, args.target_network_frequency) // args.num_envs) * args.num_envs
        self.ring = ReplayRing(args.buffer_size, env, args.num_envs, rows, device)
        # How many are staged before the next updates, and which of the batches drawn for these is the next
        self.ahead, self.turn = (torch.zeros(1, dtype=torch.long, device=device) for _ in range(2))
        updates = -(-args.num_envs // args.train_frequency)
        self.drawn = torch.zeros(updates, args.batch_size, dtype=torch.long, device=device)

        # What the host has to know, and its copies: the parameters it acts with, the losses, whether to wait
        self.must_wait = torch.zeros(1, dtype=torch.bool, device=device)
        self.outbox = [self.parameters, self.losses, self.must_wait]
        self.inbox = self.outbox
        if self.overlaps or device.type == "cuda":
            self.inbox = [tensor.cpu().clone() for tensor in self.outbox]
        if device.type == "cuda":
            self.inbox = [tensor.pin_memory() for tensor in self.inbox]
        layers = [layer.numpy() for layer in self.q_net.split(self.inbox[0]).values()]
        self.host_layers = list(zip(layers[::2], layers[1::2], strict=True))

    def state(self) -> list[torch.Tensor]:
        """The tensors that the steps change, but for the ring's contents, which count only as far as `written` says."""
        adam = [self.adam.first_moment, self.adam.second_moment, self.adam.powers]
        return [self.parameters, self.target_parameters, self.losses, self.ring.written, *adam]

    def act(self, observation: np.ndarray) -> list[int]:
        """Greedy actions, on the host; [num_envs, observation_dim] -> [num_envs]."""
        *hidden, (weight, bias) = self.host_layers
        for hidden_weight, hidden_bias in hidden:
            observation = np.maximum(observation @ hidden_weight.T + hidden_bias, 0)
        return (observation @ weight.T + bias).argmax(1).tolist()

    def receive(self) -> tuple[dict[str, torch.Tensor], bool]:
        """Brings the newest parameters to `act`; the losses, and whether a transition just drawn is still to come.

        On a CPU nothing has to be brought: the parameters and the losses are those that the updates change.
        """
        for host, device in zip(self.inbox, self.outbox, strict=True):
            if host is not device:
                host.copy_(device, non_blocking=True)
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        return dict(zip(("td_loss", "q_value"), self.inbox[1], strict=True)), bool(self.inbox[2])

    def store(self) -> None:
        self.ring.write()

    def draw(self) -> None:
        """Draws the transitions for the updates after the next `ahead` transitions."""
        self.drawn.copy_(self.ring.draw(self.drawn.shape, self.ahead))
        self.must_wait.copy_((self.drawn >= self.ring.written).any())
        self.turn.zero_()

    def update(self) -> None:
        """An update on the next of the batches drawn."""
        self.update_on(self.drawn.index_select(0, self.turn).squeeze(0))
        self.turn.add_(1)

    def store_and_update(self) -> None:
        """Stores, then an update on a batch of its own: where there is nothing to run it beside."""
        self.store()
        self.update_on(self.ring.draw((self.args.batch_size,), ahead=0))

    def update_on(self, numbers: torch.Tensor) -> None:
        """One step on the squared temporal-difference error (algorithm 1) of these transitions, [B]."""
        batch = self.ring.gather(numbers)
        next_value = self.q_net(self.target_parameters, batch["next_observation"]).max(1).values
        target = batch["reward"] + self.args.gamma * (1 - batch["terminated"]) * next_value

        def loss(parameters):
            q = self.q_net(parameters, batch["observation"])
            q = q.gather(1, batch["action"][:, None].long()).squeeze(1)
            return (q - target).square().mean(), q.mean()

        gradient, (value, q_value) = grad_and_value(loss, has_aux=True)(self.parameters)
        self.losses[0], self.losses[1] = value, q_value
        self.adam.update(gradient)

    def update_target(self) -> None:
        self.target_parameters.lerp_(self.parameters, self.args.tau)


@torch.no_grad()
def main(args: Args) -> None:
    check_args(args)
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    if args.torch_deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)  # a network this small is slower on several
    envs, seeds = make_environments(args)
    check_discrete_spaces(envs[0])
    torch.set_flush_denormal(True)  # moments of Adam that die away would become the CPU's slowest numbers
    agent = CompiledDQNAgent(args, envs[0], device)
    buffer = agent.ring
    actions = range(int(envs[0].action_space.n))

    print(f"replay buffer: {buffer.nbytes / 1e6:.1f} MB on {device}", flush=True)

    with Run(args, device) as run:
        # Compilation and capture: a full graph for storing, for drawing, and for updating; or for all at once
        steps = {"store": agent.store, "draw": agent.draw, "update": agent.update}
        if not agent.overlaps:
            steps = {"store": agent.store, "update": agent.store_and_update}
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

        losses = {}
        first = [env.reset(seed=seed)[0] for env, seed in zip(envs, seeds, strict=True)]
        observation = np.stack(first, dtype=np.float32)
        buffer.start(observation)
        rewards, terminated, truncated = ([0] * args.num_envs for _ in range(3))
        while run.global_step < args.total_timesteps:
            # The next block of steps ends with an update, of the network or its target, or with a line of metrics
            frequencies = (args.train_frequency, args.target_network_frequency)
            ends = [(run.global_step // every + 1) * every for every in frequencies]
            ends += [step for step in (max(run.next_log, 1), run.window_opens) if step > run.global_step]
            due = min(args.total_timesteps, *ends)
            rows = -(-(due - run.global_step) // args.num_envs) * args.num_envs
            end = run.global_step + rows
            is_learning = end > args.learning_starts
            updates = times_due(end, args.num_envs, args.train_frequency) if is_learning else 0

            # Learn while the environments step, unless a batch has a transition that is still to come
            must_wait = True
            if agent.overlaps and is_learning:
                if updates:
                    agent.ahead.fill_(rows)
                    steps["draw"]()
                received, must_wait = agent.receive()
                losses = received if run.updates else {}
            for _ in range(0 if must_wait else updates):
                steps["update"]()

            for row in range(0, rows, args.num_envs):
                # Act: at random with probability ε, else greedily
                duration = args.exploration_fraction * args.total_timesteps
                epsilon = linear_schedule(args.start_e, args.end_e, duration, run.global_step)
                action = [random.choice(actions) if random.random() < epsilon else None for _ in envs]
                if None in action:
                    greedy = agent.act(observation)
                    action = [best if chosen is None else chosen for best, chosen in zip(greedy, action, strict=True)]

                # Step and stage; where an episode has ended, the next one begins
                for i, env in enumerate(envs):
                    next_observation, rewards[i], terminated[i], truncated[i], _ = env.step(action[i])
                    last_observation = np.array(next_observation) if truncated[i] and not terminated[i] else None
                    observation[i] = env.reset()[0] if terminated[i] or truncated[i] else next_observation
                    buffer.add(row + i, observation[i], action[i], rewards[i], terminated[i], last_observation)
                run.step(rewards, terminated, truncated)

            # Store, and learn what had to wait
            buffer.upload()
            if agent.overlaps or not updates:
                steps["store"]()
            for _ in range(updates if must_wait else 0):
                steps["update"]()
            run.updates += updates
            for _ in range(times_due(end, args.num_envs, args.target_network_frequency) if is_learning else 0):
                agent.update_target()
            if run.updates and (not losses or run.global_step >= args.total_timesteps):
                losses, _ = agent.receive()
            run.log(losses | {"epsilon": epsilon}, args.learning_rate)


if __name__ == "__main__":
    main(tyro.cli(Args))
