"""Scores trained agents, films them, and exports their policies, from the folders of their runs.

    python benchmarks/evaluate.py runs/Hopper-v4__*                        10 episodes of each agent, and a table
    python benchmarks/evaluate.py RUN --env-id Hopper-v5                   the same agent on another variant of its task
    python benchmarks/evaluate.py RUN --episodes 1 --video                 RUN/video.mp4
    python benchmarks/evaluate.py RUN --episodes 0 --export policy.pt2     a program that needs nothing but torch

An agent acts as its checkpoint.pt has it, without exploration and with frozen normalisation, on the CPU. Episodes begin
with seeds of their own, the same for every run (for an agent with a memory they are derived from these); a return is
the environment's own. An Atari game is played whole, with its own score; each life begins as in training, for an agent
has not learned to press FIRE there. An agent with a memory keeps it for an episode; it is neither filmed, nor exported,
nor compiled. An episode that has not ended after a million steps is an error. Each becomes a line of RUN/eval.jsonl:
`env_id`, `trained_on`, `global_step` of the checkpoint, `seed`, `return`, `length`, `terminated`. --video needs
requirements/requirements-video.txt.
"""

import contextlib
import copy
import importlib
import importlib.util
import io
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import tyro
from tqdm import tqdm

from intervals import bootstrap_interval, interquartile_mean
from speed import SCRIPTS, command_line, fail, print_table, show

sys.path.insert(0, str(SCRIPTS))  # the networks are those of the scripts


@dataclass
class Args:
    folders: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN [RUN ...]")]
    """folders of runs, with a checkpoint.pt"""
    episodes: int = 10
    """episodes of each run; 0 only exports"""
    seed: int = 1
    """seed of the episodes"""
    env_id: str | None = None
    """another variant of the task, with the same spaces; if not given, what the run was trained on"""
    video: bool = False
    """film the episodes: video.mp4 in the run folder"""
    export: Path | None = None
    """file NAME.pt2 for the policy of the one run: a torch.export program, observations [B, ...] -> actions [B, ...]"""
    compile: bool = False
    """act with the compiled policy, and say how much faster that is"""


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


# ---- Policies: raw observations [B, ...] -> actions [B, ...] ----
class GreedyPolicy(nn.Module):
    """DQN's action of the highest value, PPO's most probable one; int64 [B]."""

    def __init__(self, network: nn.Module, space: gym.spaces.Discrete, parts: Mapping):
        super().__init__()
        self.network = network

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        output = self.network(observation.float())
        return (output[0] if isinstance(output, tuple) else output).argmax(1)  # an actor-critic has a value as well


class ScaledPolicy(nn.Module):
    """The actor's action in (-1, 1), TD3's as it is and SAC's as tanh of the mean, in the space's bounds; [B, A]."""

    def __init__(self, network: nn.Module, space: gym.spaces.Box, parts: Mapping):
        super().__init__()
        low, high = torch.as_tensor(space.low, dtype=torch.float32), torch.as_tensor(space.high, dtype=torch.float32)
        self.network = network
        self.register_buffer("scale", (high - low) / 2)
        self.register_buffer("bias", (high + low) / 2)
        self.register_buffer("low", torch.as_tensor(space.low))
        self.register_buffer("high", torch.as_tensor(space.high))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        output = self.network(observation.float())
        action = torch.tanh(output[0]) if isinstance(output, tuple) else output  # SAC's has a deviation as well
        action = (action * self.scale + self.bias).clamp(self.low, self.high)  # which it may pass by a rounding
        return action.to(self.low.dtype)


class Range(nn.Module):
    """A policy's actions as the space's own: in units of half its range, from its middle, clipped to its bounds.

    A range without an end, or nearly so, is taken as if it were [-1, 1], but for the clipping.
    """

    def __init__(self, space: gym.spaces.Box):
        super().__init__()
        low, high = torch.as_tensor(space.low), torch.as_tensor(space.high)
        is_endless = (high / 2 - low / 2).double() > 1e9  # dm_control writes ±1e10 for no limit
        start, end = low.masked_fill(is_endless, -1), high.masked_fill(is_endless, 1)
        bounds = {"low": low, "high": high, "middle": start / 2 + end / 2, "half_width": end / 2 - start / 2}
        for name, bound in bounds.items():
            self.register_buffer(name, bound)

    def forward(self, action: torch.Tensor) -> torch.Tensor:
        return (self.middle + self.half_width * action).clamp(self.low, self.high).to(self.low.dtype)


class NormalizedPolicy(nn.Module):
    """Continuous PPO's mean action in the space's range; observations are normalised as training left off; [B, A]."""

    def __init__(self, network: nn.Module, space: gym.spaces.Box, parts: Mapping):
        super().__init__()
        moments = parts["observation_moments"]
        mean, squares = (torch.tensor(moments[key], dtype=torch.float64) for key in ("mean", "squares"))
        self.network = network
        self.register_buffer("mean", mean)
        self.register_buffer("deviation", (squares / moments["count"] + 1e-8).sqrt())
        self.to_range = Range(space)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        normalized = ((observation.double() - self.mean) / self.deviation).clamp(-10, 10)
        mean, *_ = self.network(normalized.float())
        return self.to_range(mean)


class ActorPolicy(nn.Module):
    """Asynchronous PPO's most probable action, or its mean one in the space's range; [B] or [B, A].

    Its network has the normalisation in it.
    """

    def __init__(self, network: nn.Module, space: gym.Space, parts: Mapping):
        super().__init__()
        self.network, self.is_discrete = network, isinstance(space, gym.spaces.Discrete)
        self.to_range = None if self.is_discrete else Range(space)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        output, *_ = self.network(observation.float())
        return output.argmax(1) if self.is_discrete else self.to_range(output)


class MemoryPolicy(nn.Module):
    """The action of the highest value, the most probable one, or the policy's mean; [B] or [B, A].

    A mean is in units of half the space's range, which `Remembered` takes. Takes consecutive inputs of an agent with a
    memory, [B, inputs], the last of which says whether an episode begins.
    """

    def __init__(self, network: nn.Module, space: gym.Space, parts: Mapping):
        super().__init__()
        self.network, self.space, self.state = network, space, network.cell.initial_state(1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output, *_, self.state = self.network(inputs, self.state)
        return output.argmax(1) if isinstance(self.space, gym.spaces.Discrete) else output


POLICIES = {  # algorithm: what makes its network, the agent's name for that, and the policy that it makes
    "sac_continuous_action": ("GaussianActor", "actor", ScaledPolicy),
    "td3_continuous_action": ("DeterministicActor", "actor", ScaledPolicy),
    "dqn": ("DiscreteQNetwork", "q_network", GreedyPolicy),
    "ppo": ("CategoricalActorCritic", "network", GreedyPolicy),
    "ppo_continuous_action": ("GaussianActorCritic", "network", NormalizedPolicy),
    "ppo_atari_envpool": ("AtariActorCritic", "network", GreedyPolicy),
    "ppo_memory": ("RecurrentActorCritic", "network", MemoryPolicy),
    "dqn_memory": ("RecurrentQNetwork", "q_network", MemoryPolicy),
    "impala_ray": ("make_network", "network", GreedyPolicy),
    "appo_ray": ("make_actor_critic", "network", ActorPolicy),
}


def make_policy(module: ModuleType, env: gym.Env, parts: Mapping) -> nn.Module:
    """The policy of a checkpoint's parts, with the network of the script's `module`; raises what wrong ones lead to."""
    class_name, name, policy = POLICIES[module.__name__.removesuffix("_torchcompile")]
    space, agent = env.action_space, parts["agent"]
    outputs = int(space.n) if isinstance(space, gym.spaces.Discrete) else space.shape[0]
    inputs = env.observation_space.shape if len(env.observation_space.shape) == 1 else ()  # of images there is one kind
    sizes = [*inputs, outputs]
    if isinstance(env, Remembered):
        sizes += [env.envs.is_discrete] if class_name == "RecurrentActorCritic" else []
        sizes += [module.CELLS[env.args.cell](env.args.hidden_size), env.args.hidden_size]
    if class_name.startswith("make"):  # functions of the spaces' shapes
        sizes = [env.observation_space.shape, outputs if isinstance(space, gym.spaces.Discrete) else space.shape]
    network = getattr(module, class_name)(*sizes)
    if name in agent:  # the compiled scripts keep a network as one vector
        own = module.FlatModule(copy.deepcopy(network)).split(agent[name])  # of a copy, whose layers it changes
        state = dict(zip(dict(network.named_parameters()), own, strict=True))
        state |= {key: agent[f"normalizer.{key.rpartition('.')[2]}"] for key, _ in network.named_buffers()}
    else:
        state = {key.removeprefix(f"{name}."): value for key, value in agent.items() if key.startswith(f"{name}.")}
    network.load_state_dict(state)
    return policy(network, space, parts).requires_grad_(False)


# ---- Environments ----
class Game(gym.Env):
    """A game of EnvPool's under the script's own settings, but whole and with its own score."""

    def __init__(self, module: ModuleType, env_id: str):
        self.make_pool = lambda seed: module.make_pool(env_id, [seed])
        self.action_space = self.make_pool(0).action_space
        self.observation_space = gym.spaces.Box(0, 255, module.FRAMES, np.uint8)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        self.pool = self.make_pool(seed)
        return self.pool.reset()[0][0], {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.pool.send(np.array([action]))
        observation, _, life_is_over, truncated, info = self.pool.recv()
        reward, terminated, truncated = float(info["reward"][0]), bool(info["terminated"][0]), bool(truncated[0])
        if life_is_over[0] and not (terminated or truncated):
            self.pool.send(np.array([0]))  # whatever the action, this only begins the next life
            observation = self.pool.recv()[0]
        return observation[0], reward, terminated, truncated, {}


class Remembered(gym.Env):
    """One environment as an agent with a memory sees it: its observations are the agent's inputs, [inputs]."""

    def __init__(self, module: ModuleType, args):
        self.args, self.envs = args, module.Environments(args)
        self.action_space = self.envs.action_space
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, self.envs.inputs.shape[1:])

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        self.args.seed = seed
        self.envs.begin(0)
        return self.envs.inputs[0], {}

    def step(self, action: int | np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        """A continuous action is in units of half the space's range, from its middle; it is clipped to the bounds."""
        step = self.envs.step(np.asarray([action]))
        return self.envs.inputs[0], *(step[name][0] for name in ("reward", "terminated", "truncated")), {}


class FireFirst(gym.Wrapper):
    """Begins each life with FIRE, where a game has it, as EnvPool does."""

    def reset(self, **options) -> tuple[np.ndarray, dict]:
        observation, info = self.env.reset(**options)
        self.lives, self.has_fire = info["lives"], "FIRE" in self.unwrapped.get_action_meanings()[1]
        return (self.env.step(1)[0] if self.has_fire else observation), info

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        if self.has_fire and info["lives"] < self.lives and not (terminated or truncated):
            observation, _, terminated, truncated, info = self.env.step(1)
        self.lives = info["lives"]
        return observation, reward, terminated, truncated, info


def make_twin(env_id: str) -> gym.Env:
    """The Gymnasium environment of an Atari game, which has pictures, with EnvPool's preprocessing."""
    try:
        import ale_py

        gym.register_envs(ale_py)
        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
        options = {"render_mode": "rgb_array", "frameskip": 1, "repeat_action_probability": 0.0}
        env = gym.wrappers.AtariPreprocessing(gym.make(env_id, **options), noop_max=30, frame_skip=4)
    except (ImportError, gym.error.Error) as error:
        needs = "needs its Gymnasium twin: pip install -r requirements/requirements-video.txt"
        fail(f"--video: EnvPool has no pictures; {env_id} {needs} ({first_line(error)})")
    env = FireFirst(gym.wrappers.FrameStackObservation(env, 4))
    env.metadata = env.metadata | {"render_fps": 15}
    return env


def draw_without_display() -> None:
    """Chooses what Gymnasium draws with: for MuJoCo EGL, else OSMesa; where neither works, other tasks still can."""
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    if sys.platform != "linux":
        return
    for name in [os.environ["MUJOCO_GL"]] if "MUJOCO_GL" in os.environ else ["egl", "osmesa"]:
        program = "import mujoco; mujoco.Renderer(mujoco.MjModel.from_xml_string('<mujoco/>'), 8, 8)"
        command = [sys.executable, "-c", program]
        if subprocess.run(command, env=os.environ | {"MUJOCO_GL": name}, capture_output=True).returncode == 0:
            os.environ["MUJOCO_GL"] = name
            return
    os.environ["MUJOCO_GL"] = "disabled"  # else a process without it could not even import mujoco


def picture(env: gym.Env):
    """What the environment shows, as a PIL.Image in colours."""
    from PIL import Image

    return Image.fromarray(np.asarray(env.render(), np.uint8)).convert("RGB")


def make_env(
    module: ModuleType, env_id: str, with_pictures: bool, config: Mapping | None = None
) -> tuple[str, gym.Env]:
    """The environment and its name, which for an Atari game with pictures is that of its twin.

    `config` is what the run says of its memory, if it has one.
    """
    if config:
        return env_id, Remembered(module, module.Args(**config, env_id=env_id, num_envs=1))
    if hasattr(module, "is_atari") and module.is_atari(env_id):  # its games are those of PPO's script
        module = importlib.import_module("ppo_atari_envpool")
    if hasattr(module, "make_pool"):
        return (f"ALE/{env_id}", make_twin(f"ALE/{env_id}")) if with_pictures else (env_id, Game(module, env_id))
    (env,) = module.make_environments(module.Args(env_id=env_id, num_envs=1))
    if with_pictures:
        try:
            if os.environ.get("MUJOCO_GL") == "disabled" and "mujoco" in str(env.spec.entry_point):
                raise OSError("no renderer works")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                env = module.with_vectors(gym.make(env_id, render_mode="rgb_array", disable_env_checker=True))
            if hasattr(env.unwrapped, "mujoco_renderer"):  # Gymnasium 1.4's default camera stays where it is
                import mujoco

                camera = mujoco.mj_name2id(env.unwrapped.model, mujoco.mjtObj.mjOBJ_CAMERA, "track")
                env.unwrapped.mujoco_renderer.camera_id = camera  # -1, the default one, if there is none that follows
            env.reset(seed=0)
            picture(env)
        except Exception as error:  # what a missing display raises is each renderer's own
            hint = "MuJoCo needs the library libegl1 or libosmesa6, the classic tasks need pygame-ce"
            fail(f"--video: {env_id} can't be drawn here; {hint} ({first_line(error)})")
    return env_id, env


# ---- Run folders ----
@dataclass
class Agent:
    """A trained agent, and what it acts in."""

    folder: Path
    trained_on: str
    env_id: str
    global_step: int
    training_return: float | None
    """mean of the last 100 training episodes up to the checkpoint"""
    env: gym.Env
    policy: nn.Module


def read_checkpoint(folder: Path) -> dict:
    """What checkpoint.pt holds; ends the program with exit status 2 if it can't be read or is none of the scripts'."""
    path = folder / "checkpoint.pt"
    if not path.is_file():
        fail(f"{folder}: " + ("has no checkpoint.pt" if folder.is_dir() else "there is no such folder"))
    try:
        with open(path, "rb") as file:
            damaged = zipfile.ZipFile(file).testzip()
            file.seek(0)
            checkpoint = torch.load(file, map_location="cpu", weights_only=True)
        script = checkpoint["script"]
        missing = {"format"} - set(checkpoint)
    except Exception as error:  # for a damaged checkpoint torch.load raises errors of any kind
        fail(f"{folder}: its checkpoint.pt is damaged, or not that of a run ({first_line(error)})")
    if damaged or missing or script not in [path.stem for path in SCRIPTS.glob("*.py")]:
        problem = f"part {damaged}" if damaged else f"of the script {script}" + f", without {missing}" * bool(missing)
        fail(f"{folder}: its checkpoint.pt is damaged, or not that of a run ({problem})")
    return checkpoint


def memory_of(folder: Path, checkpoint: dict, args: Args) -> dict:
    """The arguments that an agent's memory has; none if it has no memory.

    Ends the program with exit status 2 if `args` ask for what is not done with a memory.
    """
    if not checkpoint["script"].removesuffix("_torchcompile").endswith("_memory"):
        return {}
    for flag in ("video", "export", "compile"):
        if getattr(args, flag):
            fail(f"--{flag}: not of {folder}, whose agent has a memory")
    return {name: checkpoint["args"][name] for name in ("cell", "hidden_size", "hide_velocities")}


def kind_of(env: gym.Env) -> tuple:
    """What an agent's environments have in common: what it sees, of a Box shape and type alone, and its actions."""

    def without_bounds(space: gym.Space) -> object:
        if isinstance(space, gym.spaces.Dict):
            return {name: without_bounds(part) for name, part in space.items()}
        if isinstance(space, gym.spaces.Tuple):
            return [without_bounds(part) for part in space]
        return f"{space.shape} {space.dtype}" if isinstance(space, gym.spaces.Box) else space

    return without_bounds((env.envs if isinstance(env, Remembered) else env).observation_space), env.action_space


def load_agent(folder: Path, args: Args) -> Agent:
    """The agent of a run folder; ends the program with exit status 2 if it can't act in what `args` ask for."""
    checkpoint = read_checkpoint(folder)
    try:
        module = importlib.import_module(checkpoint["script"])
    except ImportError as error:
        fail(f"{folder}: its script {checkpoint['script']}.py needs a package that is not installed ({error})")
    if checkpoint["format"] != module.CHECKPOINT_FORMAT:
        fail(f"{folder}: its checkpoint.pt has format {checkpoint['format']}, not {module.CHECKPOINT_FORMAT}")
    if missing := {"args", "run", "parts"} - set(checkpoint) or {"agent"} - set(checkpoint["parts"]):
        fail(f"{folder}: its checkpoint.pt is damaged, or not that of a run (without {missing})")
    trained_on = checkpoint["args"]["env_id"]
    config = memory_of(folder, checkpoint, args)
    env_id, env = make_env(module, trained_on, args.video and args.env_id is None, config)
    try:
        policy = make_policy(module, env, checkpoint["parts"])
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        fail(f"{folder}: its checkpoint.pt does not fit {checkpoint['script']}.py on {trained_on} ({error!r:.100})")
    if args.env_id is not None:
        old, (env_id, env) = env, make_env(module, args.env_id, args.video, config)
        kinds = kind_of(old), kind_of(env)
        if kinds[0] != kinds[1]:
            spaces = [f"{observations} observations and {actions}" for observations, actions in kinds]
            fail(f"--env-id {args.env_id}: has {spaces[1]}, where {folder} was trained on {spaces[0]}")
    space, seen = env.observation_space, np.asarray(env.reset(seed=0)[0]).dtype
    if not np.can_cast(seen, space.dtype, "same_kind"):  # some return floats where their space says integers
        env.observation_space = gym.spaces.Box(-np.inf, np.inf, space.shape, seen)
    returns = [episode_return for episode_return, _ in checkpoint["run"]["recent"]]
    training_return = statistics.fmean(returns) if returns else None
    return Agent(folder, trained_on, env_id, checkpoint["run"]["global_step"], training_return, env, policy)


# ---- Episodes ----
class EpisodeError(Exception):
    """An episode can't be scored."""


LONGEST_EPISODE = 1_000_000  # steps; a policy may run in circles where there is no time limit


@contextlib.contextmanager
def film(path: Path, env: gym.Env) -> Iterator[Callable[[str], None]]:
    """Gives a function that adds the environment's picture, with a text on it, to an MP4, at the end `path`."""
    import imageio_ffmpeg
    from PIL import Image, ImageDraw, ImageFont

    beside, writer, size = path.with_stem(f"{path.stem}.new"), None, None
    font = ImageFont.load_default(size=18)

    def add(text: str) -> None:
        nonlocal writer, size
        image = picture(env)
        if writer is None:  # its size is the film's
            scale = -(-400 // image.height)  # Atari's are small
            size = image.width * scale // 2 * 2, image.height * scale // 2 * 2
            fps = env.metadata.get("render_fps") or 30
            writer = imageio_ffmpeg.write_frames(beside, size, fps=fps, macro_block_size=2)
            writer.send(None)
        image = image.resize(size, Image.Resampling.NEAREST)
        ImageDraw.Draw(image).text((8, 6), text, fill="white", font=font, stroke_width=2, stroke_fill="black")
        writer.send(image.tobytes())

    try:
        yield add
        writer.close()
        beside.replace(path)
    finally:
        if writer is not None:
            writer.close()
        beside.unlink(missing_ok=True)


def play(env: gym.Env, policy: Callable, seed: int, watch: Callable[[int, float], None]) -> dict:
    """One episode: its seed, return, length and end. `watch` gets the length and the return so far, from 0 on."""
    random.seed(seed)  # for environments that draw from these, not from their own
    np.random.seed(seed)
    (observation, _), dtype = env.reset(seed=seed), env.observation_space.dtype
    total, length, terminated, truncated = 0.0, 0, False, False
    watch(length, total)
    while not (terminated or truncated):
        if length == LONGEST_EPISODE:
            needed = "register a variant with max_episode_steps for --env-id"
            raise EpisodeError(f"an episode has not ended in {length:,} steps: {needed}")
        observation = np.asarray(observation)
        if np.can_cast(observation.dtype, dtype, "same_kind"):  # some return floats where their space says integers
            observation = observation.astype(dtype)
        if not np.isfinite(observation).all():
            raise EpisodeError("an observation of the environment is not finite")
        with torch.no_grad():
            action = policy(torch.from_numpy(observation[None]))[0].numpy()
        action = action.astype(env.action_space.dtype, copy=False)[()]  # a discrete one as a number
        observation, reward, terminated, truncated, _ = env.step(action)
        total, length = total + float(reward), length + 1
        watch(length, total)
    return {"seed": seed, "return": total, "length": length, "terminated": bool(terminated)}


def evaluate(agent: Agent, policy: Callable, args: Args) -> list[dict]:
    """Plays the episodes, films them if that is asked for, and adds them to eval.jsonl when all are over."""
    seeds = (
        np.random.SeedSequence(args.seed, spawn_key=(1,)).generate_state(args.episodes) // 2
    )  # not those of training
    about = {"env_id": agent.env_id, "trained_on": agent.trained_on, "global_step": agent.global_step}
    episodes = []
    with film(agent.folder / "video.mp4", agent.env) if args.video else contextlib.nullcontext() as add:

        def watch(length: int, total: float) -> None:
            if args.video:
                add(f"{agent.env_id}, episode {len(episodes) + 1}\nstep {length}, return {total:,.1f}")

        for seed in tqdm(seeds.tolist(), desc=agent.folder.name, unit="episode", disable=None, leave=False):
            episodes.append(about | play(agent.env, policy, seed, watch))
            if not math.isfinite(episodes[-1]["return"]):
                raise EpisodeError(f"the return of an episode of {agent.env_id} is {episodes[-1]['return']}")
    path = agent.folder / "eval.jsonl"
    size = path.stat().st_size if path.exists() else 0
    try:
        with open(path, "a") as file:
            file.write("".join(json.dumps(episode) + "\n" for episode in episodes))
    except OSError:
        if path.exists():
            os.truncate(path, size)  # a line of which a full disk took a part would spoil the next one
        raise
    return episodes


# ---- Results ----
HEADER = ["run", "environment", "step", "episodes"]
HEADER += ["mean", "interquartile mean", "95 % interval of the mean", "in training"]


def figure(value: float | None) -> str:
    """A return with one decimal from 100 to 10 million, else with four significant digits; "-" if there is none."""
    return show(value, 1) if value is None or 100 <= abs(value) < 1e7 else f"{value:.4g}"


def table_row(agent: Agent, episodes: Sequence[dict]) -> list[str]:
    returns = [episode["return"] for episode in episodes]
    task = agent.env_id + f" (trained on {agent.trained_on})" * (agent.env_id != agent.trained_on)
    interval = "{} to {}".format(*map(figure, bootstrap_interval(returns))) if len(returns) >= 5 else "-"
    row = [agent.folder.resolve().name, task, f"{agent.global_step:,}", str(len(returns))]
    mean, middle = figure(statistics.fmean(returns)), figure(interquartile_mean(returns))
    return [*row, mean, middle, interval, figure(agent.training_return)]


def times_as_fast(policy: Callable, compiled: Callable, observation: torch.Tensor) -> tuple[float, float, float]:
    """Seconds that an action takes each of them, and their ratio; medians of 30 turns."""

    def seconds(act: Callable) -> float:
        started = time.perf_counter()
        for _ in range(20):
            act(observation)
        return (time.perf_counter() - started) / 20

    with torch.no_grad():
        turns = [(seconds(policy), seconds(compiled)) for _ in range(30)]
    slow, fast = (statistics.median(column) for column in zip(*turns))
    return slow, fast, statistics.median(slow / fast for slow, fast in turns)


# ---- Export and compilation ----
def random_observations(space: gym.spaces.Box, count: int, seed: int = 0) -> torch.Tensor:
    """Bytes, or numbers around 0 of many sizes; [count, ...], of the space's type."""
    generator, shape = np.random.default_rng(seed), (count, *space.shape)
    if np.issubdtype(space.dtype, np.integer):
        return torch.from_numpy(generator.integers(0, 256, shape).astype(space.dtype))
    numbers = generator.normal(size=shape) * 10 ** generator.uniform(-2, 1, shape)
    return torch.from_numpy(numbers.astype(space.dtype))


def export(policy: nn.Module, space: gym.spaces.Box, path: Path) -> None:
    """Writes the policy as a program for any batch, once that does as the policy does on random observations."""
    batch = {0: torch.export.Dim("batch", min=1)}
    program = torch.export.export(policy, (random_observations(space, 8),), dynamic_shapes=(batch,))
    beside = path.with_stem(f"{path.stem}.new")
    try:
        file = io.BytesIO()  # a full disk would abort the program that saves to it
        torch.export.save(program, file)
        beside.write_bytes(file.getvalue())
        loaded = torch.export.load(beside).module()
        for count in (1, 2, 100):
            observation = random_observations(space, count, seed=count)
            actual, expected, rounding = loaded(observation), policy(observation), {}
            if expected.is_floating_point():  # networks are float32, and each action has a size of its own
                scale = expected.abs().amax(0).clamp(min=1)
                actual, expected, rounding = actual / scale, expected / scale, {"rtol": 1e-4, "atol": 1e-5}
            torch.testing.assert_close(actual, expected, **rounding)
        beside.replace(path)
    except (AssertionError, OSError, RuntimeError) as error:
        fail(f"--export {path}: {first_line(error)}")
    finally:
        beside.unlink(missing_ok=True)


def compiled(policy: nn.Module, space: gym.spaces.Box) -> Callable:
    """The policy for one observation, compiled ahead of time: what torch.compile checks at each call takes longer."""
    program = torch.export.export(policy, (random_observations(space, 1),))
    with tempfile.TemporaryDirectory() as folder:
        try:
            path = torch._inductor.aoti_compile_and_package(program, package_path=f"{folder}/policy.pt2")
        except RuntimeError as error:
            fail(f"--compile: is there a C++ compiler? ({first_line(error)})")
        return torch._inductor.aoti_load_package(path)


def check_args(args: Args) -> None:
    if not args.folders:
        fail("RUN: must be one folder or more")
    if args.episodes < 1 and (args.episodes < 0 or args.export is None or args.video or args.compile):
        fail(f"--episodes {args.episodes}: must be at least 1, or 0 with --export alone")
    if not 0 <= args.seed < 2**32:
        fail(f"--seed {args.seed}: must lie in [0, 2**32)")
    if args.export is not None and len(args.folders) > 1:
        fail(f"--export {args.export}: takes one run folder, not {len(args.folders)}")
    if args.export is not None and (args.export.suffix != ".pt2" or not args.export.parent.is_dir()):
        fail(f"--export {args.export}: must be a file NAME.pt2 in a folder that exists")
    if args.video:
        for package in ("imageio_ffmpeg", "PIL"):
            if importlib.util.find_spec(package) is None:
                fail(f"--video: needs the package {package}: pip install -r requirements/requirements-video.txt")
        draw_without_display()


def main(args: Args) -> None:
    check_args(args)
    warnings.filterwarnings("ignore", category=FutureWarning, module="copyreg")  # torch.export about torch itself
    agents = [load_agent(folder, args) for folder in args.folders]  # all, before the first episode
    for path in [agent.folder / "eval.jsonl" for agent in agents if args.episodes]:
        is_new = not path.exists()
        try:
            open(path, "a").close()  # else it would fail after hours of episodes
            if is_new and not path.stat().st_size:  # another program may have written to it by now
                path.unlink()
        except OSError as error:
            fail(f"{path.parent}: {error}")
    if args.export is not None:
        export(agents[0].policy, agents[0].env.observation_space, args.export)
        print(f"policy of {agents[0].folder} at step {agents[0].global_step:,}: {args.export}", flush=True)
    rows, notes = [], []
    try:
        for agent in agents if args.episodes else []:
            policy, space = agent.policy, agent.env.observation_space
            if args.compile:
                policy = compiled(policy, space)
                slow, fast, ratio = times_as_fast(agent.policy, policy, random_observations(space, 1))
                times = f"{1e6 * fast:.0f} µs an action, {1e6 * slow:.0f} without"
                notes.append(f"{agent.folder}: acts {ratio:.1f} times as fast compiled ({times})")
            try:
                rows.append(table_row(agent, evaluate(agent, policy, args)))
            except (OSError, EpisodeError) as error:
                fail(f"{agent.folder}: {error}")
            except Exception as error:  # the environment's own, whose traceback says more than a line
                error.add_note(f"In an episode of {agent.env_id}, played by {agent.folder}")
                raise
            if args.video:
                notes.append(f"video: {agent.folder / 'video.mp4'}")
    finally:  # also what came before an error
        if rows:
            print_table([HEADER, *rows])
        for note in notes:
            print(note)


if __name__ == "__main__":
    with contextlib.suppress(ValueError):
        sys.path.remove(str(Path(__file__).resolve().parent))  # a module:Id may have the name of one here
    try:
        main(command_line(Args, __doc__))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
