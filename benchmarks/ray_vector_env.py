"""A Gymnasium vector environment in Ray actors that take K steps a call, as Tianshou's issue 1172 asks.

    with running_ray(cpus=4):  # or ray.init(address=...)
        envs = RayVectorEnv([partial(gym.make, "CartPole-v1")] * 64, num_actors=4)
        observations, infos = envs.reset(seed=1)
        rollout = envs.rollout(policy, steps=100)              # one call of each actor, 100 steps of all 64
        for rollout in envs.rollouts(policy, 100, count=50):   # the same 50 times, two calls of each actor in flight
            ...

A call costs the driver some hundred microseconds, whatever it carries. With one step a call that is the ceiling
(the issue's 96 cores reach 4 % of their steps at 0.001 s a step), so each actor holds a vector environment and takes
many steps a call, with actions that are given or that a policy function selects in the actor.

`reset`, `step` and `close` are those of gymnasium.vector.SyncVectorEnv, seeds and infos included: N environments in A
actors give the same observations, rewards and ends as in one process. They reset in the step after an episode's end, as
is Gymnasium's default. benchmarks/ray_scaling.py measures what it costs. It needs Ray
(requirements/requirements-ray.txt), which is imported only where it is used.
"""

import contextlib
import ctypes
import logging
import operator
import os
import secrets
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, pairwise
from pathlib import Path
from unittest import mock

import gymnasium as gym
import numpy as np
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError, ResetNeeded
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

Policy = Callable[[np.ndarray, np.random.Generator], np.ndarray]
"""observations [M, …] and the actor's own generator → actions [M, …]"""

ARRAY_SPACES = (Box, Discrete, MultiDiscrete, MultiBinary)  # whose batches are one array
START_PATIENCE = 10.0  # seconds after which more actors than Ray has cores for can't be expected to start
OBJECT_STORE = 256 * 2**20  # bytes of shared memory that Ray may use; Ray's own default is 30 % of the machine's


# ---- Ray on this machine ----
@cache
def settings() -> dict[str, str]:
    """What Ray has to find in the environment: the same whenever this process starts one, as it keeps what it has read.

    Whoever can reach Ray's ports can run code, so a secret that only this process and its children know is asked for;
    Ray itself would write one into the home folder.
    """
    found = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
    # Of a hundred processes that start on two cores the last takes longer than Ray's minute
    found["RAY_worker_register_timeout_seconds"] = "600"
    # Ray lets its workers wait for whatever else runs here (15), also where they are what the machine is for
    found["RAY_worker_niceness"] = "0"
    if "ray" not in sys.modules:  # which reads this when it is imported
        found["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # as there, Ray has the address 127.0.0.1
        # What it says on stdout of actors that have died, which whoever waits for them is told, and that they are many
        found["RAY_DEDUP_LOGS_SKIP_REGEX"] = "A worker died|PYTHON worker processes"
    # Nor of calls that have failed, and that nobody waits for any more
    found["RAY_IGNORE_UNHANDLED_ERRORS"] = "1"
    return found


@contextlib.contextmanager
def environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Sets variables of this process's environment; then they, and those that Ray has set, are what they were."""
    old = os.environ.copy()
    os.environ.update(changes)
    try:
        yield
    finally:
        for name in {*changes, *(name for name in {*os.environ, *old} if name.startswith("RAY_"))}:
            os.environ.pop(name, None)
            os.environ.update({name: old[name]} if name in old else {})
        reread_environment()


def reread_environment() -> None:
    """Has Ray, if it is imported, find in the environment anew whether and which secret is asked for."""
    if "ray" in sys.modules:
        with contextlib.suppress(ImportError, AttributeError):  # these are Ray's own, and may go
            from ray._raylet import AuthenticationTokenLoader, Config

            Config.initialize("")
            AuthenticationTokenLoader.instance().reset_cache()


def kill_processes(variable: str, timeout: float = 10.0) -> None:
    """On Linux, kills Ray's processes that were started with NAME=VALUE in their environment, until there are none.

    Those that Ray was starting when it was ended don't notice that it has. What an environment has started is left
    alone, as it may be shared with others.
    """
    import ray

    own = ("raylet", "gcs_server", "ray::", str(Path(ray.__file__).parent) + os.sep)
    found, end = [None], time.monotonic() + timeout
    while found and time.monotonic() < end:
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if variable.encode() in path.read_bytes().split(b"\0"):
                    command = path.with_name("cmdline").read_bytes()
                    if any(part.encode() in command for part in own):
                        found.append(int(path.parent.name))
                        os.kill(found[-1], signal.SIGKILL)
        time.sleep(0.01 * bool(found))


@contextlib.contextmanager
def held_signals() -> Iterator[None]:
    """Ctrl-C and SIGTERM take effect only at its end; Ray's own handlers, which may wait for long, are not installed.

    A ray.init that is interrupted would leave processes behind.
    """
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    held = []
    for number, handler in handlers.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, lambda number, _: held.append(number))
    try:
        with mock.patch.object(signal, "signal"):
            yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for number in held:
        signal.raise_signal(number)


@contextlib.contextmanager
def running_ray(cpus: int, nodes: int = 1, folder: str | None = None) -> Iterator[None]:
    """Ray on this machine alone while the context lasts; then nothing of it is left, in os.environ neither.

    cpus: cores that a node claims to have; nodes: more than one are simulated machines, each with a scheduler and a
    shared memory of its own (ray.cluster_utils.Cluster), beside one without cores that has the driver; folder: where
    Ray keeps sockets and logs, in a folder that is removed at the end; the one for temporary files if not given.
    Raises RuntimeError if this process has a Ray already. RAY_AUTH_MODE and the like count if they are set.
    """
    if "ray" in sys.modules and sys.modules["ray"].is_initialized():
        raise RuntimeError("Ray is running already: call ray.shutdown() first, or do without running_ray()")
    changes = {name: value for name, value in settings().items() if name not in os.environ}
    if os.environ.get("RAY_AUTH_MODE", "token") != "token" or "RAY_AUTH_TOKEN_PATH" in os.environ:
        changes.pop("RAY_AUTH_TOKEN", None)
    # So that actors find what is beside this file, wherever the program was started
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    with (
        tempfile.TemporaryDirectory(prefix="ray", dir=folder, ignore_cleanup_errors=True) as own,
        # RAY_TMPDIR is also for Ray's note of what runs here, which another Ray may have in /tmp
        environment(changes | {"RAY_TMPDIR": own, "PYTHONPATH": path}),
    ):
        import ray
        import ray.cluster_utils

        reread_environment()
        Path(own, "ray").mkdir()  # Cluster expects it
        common = {"include_dashboard": False, "object_store_memory": OBJECT_STORE}
        quiet, cluster = {"log_to_driver": False, "logging_level": logging.ERROR}, None
        try:
            with held_signals():
                if nodes == 1:
                    ray.init("local", num_cpus=cpus, num_gpus=0, **common, **quiet)
                else:
                    logging.getLogger("ray").setLevel(logging.ERROR)
                    cluster = ray.cluster_utils.Cluster()
                    for own_cpus in (0, *[cpus] * nodes):
                        cluster.add_node(num_cpus=own_cpus, **common)
                    ray.init(cluster.address, **quiet)
            yield
        finally:
            try:
                ray.shutdown()
                if cluster is not None:
                    cluster.shutdown()
            finally:
                kill_processes(f"RAY_TMPDIR={own}")


def failure(calls: Sequence, error: Exception) -> tuple[int, Exception, Exception]:
    """Of calls for which Ray has raised `error`: the number of the first that has failed, what was raised there, and
    Ray's error about that, which has the actor's traceback."""
    import ray

    for number, call in enumerate(calls):
        try:
            ray.get(call, timeout=0)
        except ray.exceptions.GetTimeoutError:
            continue
        except ray.exceptions.RayError as found:
            return number, getattr(found, "cause", None) or found, found
    return 0, error, error


def describe(error: Exception) -> str:
    """An error in a line."""
    import ray

    if isinstance(error, ray.exceptions.RayActorError):
        return "its process has ended"
    return f"{type(error).__name__}: {error}".splitlines()[0]


# ---- In the actors ----
def spaces_of(env: gym.Env) -> tuple[gym.Space, gym.Space]:
    return env.observation_space, env.action_space


def check_same(spaces: Sequence[tuple[gym.Space, gym.Space]]) -> None:
    for each in spaces:
        if each != spaces[0]:
            raise RuntimeError(f"the environments differ: {spaces[0]} and {each}")


def check_actions(selected: np.ndarray, own: np.ndarray) -> np.ndarray:
    """A policy's actions as those that the environments take; raises ValueError or TypeError if they are others."""
    if selected.shape != own.shape:
        raise ValueError(f"the policy's actions have shape {selected.shape}: must have {own.shape}")
    return selected.astype(own.dtype, casting="same_kind")


def check_observation(observation: object, row: np.ndarray) -> None:
    """Raises ValueError or TypeError if an observation is not of its space's shape, or its numbers of another kind."""
    observation = np.asarray(observation)
    if observation.shape != row.shape:
        raise ValueError(f"an observation has shape {observation.shape}: must have {row.shape}")
    if not np.can_cast(observation.dtype, row.dtype, "same_kind"):
        raise TypeError(f"an observation is of {observation.dtype}: must be of {row.dtype}, or what can be cast to it")


class Actor:
    """M environments in a process of its own, which reset in the step after an episode's end."""

    def start(self, env_fns: Sequence[Callable[[], gym.Env]]) -> tuple:
        """Makes the environments; their spaces and metadata. Not in `__init__`, whose errors Ray wraps twice."""
        if sys.platform == "linux":
            # An environment that waits is not to wait longer: Linux adds 50 µs, so as to wake several at once
            ctypes.CDLL(None).prctl(29, 1, 0, 0, 0)  # PR_SET_TIMERSLACK, ns
        self.envs = [env_fn() for env_fn in env_fns]
        check_same([spaces_of(env) for env in self.envs])
        space = self.envs[0].observation_space
        # Of each environment the last observation, and whether its next step is to reset it
        self.observations = np.empty((len(self.envs), *(space.shape or ())), space.dtype)
        self.over = [False] * len(self.envs)
        self.policy: Policy | None = None
        self.steps = 0
        self.generator = np.random.default_rng()
        return *spaces_of(self.envs[0]), self.envs[0].metadata

    def reset(
        self, seeds: Sequence[int | None], mask: np.ndarray, options: dict | None
    ) -> tuple[np.ndarray, list[dict]]:
        """Resets the environments in the mask; observations [M, …] and infos of all."""
        infos, chosen = [{} for _ in self.envs], np.flatnonzero(mask)
        if given := [seeds[i] for i in chosen if seeds[i] is not None]:
            self.generator = np.random.default_rng([given[0], 1])  # another stream than that of the environment
        for i in chosen:
            observation, infos[i] = self.envs[i].reset(seed=seeds[i], options=options)
            check_observation(observation, self.observations[i])  # else cast to fit, as those of steps are, for speed
            self.observations[i] = observation
            self.over[i] = False
        return self.observations, infos

    def advance(
        self,
        actions: Sequence[np.ndarray],
        observations: Sequence[np.ndarray],
        policy: Policy | None = None,
        infos: list | None = None,
    ) -> list[tuple]:
        """Steps of all environments, one with each of K actions [M, …], which a policy, if there is one, fills first.

        Each of K + 1 observations [M, …] but the first is filled by a step; infos are added to the list that is given.
        Returns the K × M rewards, each with both kinds of ends. What goes on between two steps is all in this function:
        an environment that sleeps or waits leaves caches full of something else, into which each would be loaded anew.
        """
        over, generator, log, kind = self.over, self.generator, [], None
        envs, shape = list(enumerate(self.envs)), (len(self.envs), *self.envs[0].action_space.shape)
        are_arrays = len(shape) > 1  # which an environment may write to; a number it can't, and copies of it cost much
        for own, observed, row in zip(actions, observations, observations[1:]):
            if policy is not None:
                selected = policy(observed.copy(), generator)  # which is free to write to it, as an environment is
                if type(selected) is not np.ndarray:
                    selected = np.asarray(selected)
                if selected.dtype is not kind or selected.shape != shape:
                    own[...] = check_actions(selected, own)
                    kind = selected.dtype
                else:
                    own[...] = selected
            for (i, env), action in zip(envs, own.copy() if are_arrays else own):
                if over[i]:
                    row[i], info = env.reset()
                    reward, terminated, truncated = 0.0, False, False
                else:
                    row[i], reward, terminated, truncated, info = env.step(action)
                over[i] = terminated or truncated
                log.append((reward, terminated, truncated))
                if infos is not None:
                    infos.append(info)
        return log

    def step(self, actions: np.ndarray) -> tuple:
        infos = []
        log = self.advance([np.array(actions)], [self.observations] * 2, infos=infos)
        rewards, terminations, truncations = np.array(log, np.float64).T
        return self.observations, rewards, terminations.astype(bool), truncations.astype(bool), infos

    def rollout(
        self, steps: int | None = None, actions: np.ndarray | None = None, policy: Policy | None = None
    ) -> tuple:
        """Takes steps with actions [K, M, …], or K steps with those of the policy: each that of the last call if None.

        Returns the K + 1 observations, the actions or None for those that were given, the rewards, and in one array
        [3, K, M] terminations, truncations and resets.
        """
        count, is_given, space = len(self.envs), actions is not None, self.envs[0].action_space
        if is_given:
            actions, steps = np.array(actions), len(actions)
        else:
            self.policy = policy = self.policy if policy is None else policy
            self.steps = steps = self.steps if steps is None else steps
            actions = np.empty((steps, count, *space.shape), space.dtype)
        observations = np.empty((steps + 1, *self.observations.shape), self.observations.dtype)
        flags = np.empty((3, steps, count), bool)
        observations[0], flags[2, 0] = self.observations, self.over
        # Lists: their rows are made here rather than between the steps
        log = self.advance(list(actions), list(observations), None if is_given else policy)
        rewards, flags[0], flags[1] = np.array(log, np.float64).reshape(steps, count, 3).transpose(2, 0, 1)
        np.logical_or(flags[0, :-1], flags[1, :-1], out=flags[2, 1:])
        self.observations[:] = observations[steps]
        return observations, None if is_given else actions, np.ascontiguousarray(rewards), flags

    def close(self) -> None:
        for env in self.envs:
            env.close()


# ---- In the driver ----
@dataclass
class Rollout:
    """K steps of N environments, in arrays that belong to the caller."""

    observations: np.ndarray
    """[K, N, …]: what each action was taken on"""
    actions: np.ndarray
    """[K, N, …]"""
    rewards: np.ndarray
    """[K, N], float64"""
    terminations: np.ndarray
    """[K, N], bool"""
    truncations: np.ndarray
    """[K, N], bool"""
    resets: np.ndarray
    """[K, N], bool: the step only reset the environment, whose episode had ended before it; it is no transition"""
    last_observations: np.ndarray
    """[N, …]: what the next action will be taken on"""


class RayVectorEnv(VectorEnv):
    """N environments in A Ray actors, in order: the first N / A of them (rounded) in the first actor, and so on.

    Like AsyncVectorEnv it has an order of calls: while rollouts are under way (`send`), only `receive` and `close` may
    be called. If an environment or an actor fails, all actors are ended, and a RuntimeError says which; its cause is
    Ray's error, with the actor's traceback. Of Gymnasium's interface `render`, `call`, `get_attr`, `set_attr` and
    `np_random` are missing: the environments are not here.

    The actors report no task events, which would cost both sides of each call: Ray's dashboard and timeline don't show
    the calls. What an actor returns comes in Ray's reply if it is small (100 kB, Ray's max_direct_call_object_size),
    else it lies in shared memory until it is copied.
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], gym.Env]],
        num_actors: int | None = None,
        num_cpus: float = 1,
        start_timeout: float | None = None,
    ):
        """Starts the actors in the Ray that is running.

        num_actors: one for each environment if not given; num_cpus: cores that each actor claims, so that Ray spreads
        them and a cluster that grows by itself grows (0 only where all share a machine on purpose); start_timeout:
        seconds after which a TimeoutError says how many have not started; if not given 600, but 10 for more actors than
        Ray has cores for: where a cluster is to grow, give the time that this takes. Raises TypeError for spaces whose
        batches are not one array, RuntimeError if Ray is not running, and ValueError.
        """
        super().__init__()
        import ray

        env_fns = list(env_fns)
        count = len(env_fns) if num_actors is None else num_actors
        if not 1 <= count <= len(env_fns):
            raise ValueError(f"num_actors={count}: must be from 1 to the number of environments, {len(env_fns)}")
        if not ray.is_initialized():
            raise RuntimeError("Ray is not running: call ray.init() first, or use running_ray()")
        self.num_envs = len(env_fns)
        ends = [self.num_envs * number // count for number in range(count + 1)]
        self.rows = [slice(*pair) for pair in pairwise(ends)]
        self._pending: deque[tuple[list, int, np.ndarray | None]] = deque()  # calls, steps, actions that were given
        self._policy: Policy | None = None
        self._steps = 0
        self._is_reset = False
        # The machines of a cluster need not have this file
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        remote = ray.remote(num_cpus=num_cpus, enable_task_events=False)(Actor)  # one class for all, sent once
        self.actors = [remote.remote() for _ in self.rows]
        self._rollouts = [actor.rollout for actor in self.actors]
        try:
            calls = [a.start.remote(env_fns[own]) for a, own in zip(self.actors, self.rows)]
            self._wait_for_start(calls, num_cpus, start_timeout)
            spaces = self._get(calls)
            check_same([each[:2] for each in spaces])
            for space in spaces[0][:2]:
                if not isinstance(space, ARRAY_SPACES):
                    raise TypeError(f"{space}: must be of {', '.join(kind.__name__ for kind in ARRAY_SPACES)}")
            self.single_observation_space, self.single_action_space, metadata = spaces[0]
            self.metadata = metadata | {"autoreset_mode": AutoresetMode.NEXT_STEP}
        except BaseException:
            self.close(timeout=0)
            raise
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)

    # -- Gymnasium's interface --
    def reset(self, *, seed: int | Sequence[int | None] | None = None, options: dict | None = None):
        """Resets all environments, or those of options["reset_mask"]: observations [N, …] and infos.

        seed: of the first environment, those of the others follow; or a list of them. The generator that an
        actor's policy is called with follows the first of its seeds, if it has one. Raises ValueError.
        """
        self._check("reset")
        if seed is None or isinstance(seed, int | np.integer):
            seed = [None if seed is None else int(seed) + i for i in range(self.num_envs)]
        if len(seed) != self.num_envs:
            raise ValueError(f"seed: {len(seed)} values for {self.num_envs} environments")
        options = None if options is None else dict(options)
        mask = np.asarray((options or {}).pop("reset_mask", np.ones(self.num_envs, bool)), bool)
        if mask.shape != (self.num_envs,) or not mask.any():
            raise ValueError(f"options['reset_mask']: must have shape ({self.num_envs},) and a True")
        if not mask.all():
            self._check_reset()
        calls = [actor.reset.remote(seed[own], mask[own], options) for actor, own in zip(self.actors, self.rows)]
        observations, infos = zip(*self._get(calls))
        self._is_reset = True
        return np.concatenate(observations), self._merge(infos)

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict]:
        """One step with actions [N, …]: observations [N, …], rewards, terminations, truncations [N] and infos.

        A call of each actor for a single step is what does not scale: see `rollout`. Raises TypeError or ValueError for
        actions that the space can't hold.
        """
        self._check("step")
        self._check_reset()
        actions = self._cast(actions)
        if actions.shape != self.action_space.shape:
            raise ValueError(f"actions of shape {actions.shape}: must have {self.action_space.shape}")
        calls = [actor.step.remote(actions[own]) for actor, own in zip(self.actors, self.rows)]
        *arrays, infos = zip(*self._get(calls))
        return *map(np.concatenate, arrays), self._merge(infos)

    def close_extras(self, timeout: float = 5.0) -> None:
        """Closes the environments of the actors that answer within `timeout` seconds, and ends all actors.

        They answer once they have made the rollouts that are under way, which are lost.
        """
        import ray

        self._pending.clear()
        if ray.is_initialized():
            with contextlib.suppress(ray.exceptions.RayError):
                calls = [actor.close.remote() for actor in self.actors]
                ray.wait(calls, num_returns=len(calls), timeout=timeout)
            for actor in self.actors:
                ray.kill(actor)

    # -- Many steps a call --
    def rollout(self, policy: Policy | np.ndarray, steps: int | None = None) -> Rollout:
        """K steps of all environments in one call of each actor (lockstep); arguments as for `send`."""
        self._check("rollout")
        self.send(policy, steps)
        return self.receive()

    def rollouts(
        self, policy: Policy | np.ndarray, steps: int | None = None, count: int = 1, in_flight: int = 2
    ) -> Iterator[Rollout]:
        """`count` rollouts with up to `in_flight` calls of each actor under way: no actor waits for the driver.

        At most `in_flight` rollouts are begun before the first is yielded: what the driver learns from one is in the
        actions of the one after the next at the earliest. Each rollout is of all actors, so that with two calls in
        flight a fast actor is at most one round ahead of the slowest, and then waits for it. An iterator that is left
        early waits for the rollouts under way, whose steps are lost; one that an error or Ctrl-C ends does not, and
        `receive` or `close` is left to the caller.
        """
        self._check("rollouts")
        if in_flight < 1:
            raise ValueError(f"in_flight={in_flight}: must be at least 1")
        sent = 0
        try:
            for _ in range(count):
                while sent < count and len(self._pending) < in_flight:
                    self.send(policy, steps)
                    sent += 1
                yield self.receive()
        except GeneratorExit:
            while self._pending and not self.closed:
                self.receive()
            raise

    def send(self, policy: Policy | np.ndarray, steps: int | None = None) -> None:
        """Starts a rollout and returns; `receive` returns it. Rollouts that are under way follow one another.

        policy: a function, of which each actor gets a copy when it is another than the last one. One that is changed in
        place is not sent again: new weights make a new function, functools.partial(act, weights). Or actions
        [K, N, …], which are copied. steps: K, for a policy. Raises TypeError or ValueError for actions that the space
        can't hold; `receive` does for those of the policy.
        """
        self._check_open("send")
        self._check_reset()
        actions = None
        if not callable(policy):
            actions = np.array(self._cast(policy))
            if not len(actions) or actions.shape[1:] != self.action_space.shape or steps not in (None, len(actions)):
                expected = f"[{'steps' if steps is None else steps}, {', '.join(map(str, self.action_space.shape))}]"
                raise ValueError(f"actions of shape {list(actions.shape)}: must have {expected}")
            steps = len(actions)
            calls = [
                rollout.remote(None, np.ascontiguousarray(actions[:, own]))
                for rollout, own in zip(self._rollouts, self.rows)
            ]
        else:
            if steps is None or operator.index(steps) < 1:
                raise ValueError(f"steps={steps}: must be at least 1")
            # An actor's calls run in order, so one that has the policy and the steps need not get them again, which
            # would be a part of what a call costs
            if policy is not self._policy:
                import ray

                changed = (steps, None, ray.put(policy))
            else:
                changed = () if steps == self._steps else (steps,)
            calls = [rollout.remote(*changed) for rollout in self._rollouts]
            self._policy, self._steps = policy, steps
        self._pending.append((calls, steps, actions))

    def receive(self) -> Rollout:
        """The rollout that was sent first; waits for it. Raises NoAsyncCallError if none is under way.

        When it is interrupted, the rollout is still under way.
        """
        self._check_open("receive")
        if not self._pending:
            raise NoAsyncCallError("receive() comes after send()", "receive")
        calls, steps, given = self._pending[0]
        # What Ray returns is read-only, and may lie in its shared memory until nobody refers to it
        space, action_space = self.single_observation_space, self.single_action_space
        observations = np.empty((steps, self.num_envs, *space.shape), space.dtype)
        last = np.empty(observations.shape[1:], space.dtype)
        actions = given
        if given is None:
            actions = np.empty((steps, self.num_envs, *action_space.shape), action_space.dtype)
        rewards, flags = np.empty((steps, self.num_envs)), np.empty((3, steps, self.num_envs), bool)
        for own, part in zip(self.rows, self._get(calls)):  # at once: a ray.wait costs more than it gains
            observations[:, own], last[own] = part[0][:-1], part[0][-1]
            if given is None:
                actions[:, own] = part[1]
            rewards[:, own], flags[:, :, own] = part[2:]
        self._pending.popleft()
        return Rollout(observations, actions, rewards, *flags, last)

    # -- Actors --
    def _merge(self, parts: Sequence[Sequence[dict]]) -> dict:
        """The infos of all environments, as Gymnasium's vector environments have them."""
        merged = {}
        for index, info in enumerate(chain(*parts)):
            merged = self._add_info(merged, info, index)
        return merged

    def _cast(self, actions: np.ndarray) -> np.ndarray:
        """In the space's dtype; raises TypeError rather than cut fractions off."""
        return np.asarray(actions).astype(self.action_space.dtype, casting="same_kind", copy=False)

    def _wait_for_start(self, calls: list, num_cpus: float, start_timeout: float | None) -> None:
        import ray

        limit = 600.0 if start_timeout is None else start_timeout
        waited = min(START_PATIENCE, limit)
        late = ray.wait(calls, num_returns=len(calls), timeout=waited)[1]
        cores = ray.cluster_resources().get("CPU", 0)
        if late and waited < limit and (start_timeout or num_cpus * len(calls) <= cores + 1e-9):
            late, waited = ray.wait(calls, num_returns=len(calls), timeout=limit - waited)[1], limit
        if not late:
            return
        reason = f"each asks for {num_cpus:g} of the {cores:g} cores that Ray has"
        raise TimeoutError(f"{len(late)} of {len(calls)} actors have not started in {waited:g} s; {reason}")

    def _get(self, calls: list) -> list:
        """What the actors return. If one fails, all are ended."""
        import ray

        try:
            return ray.get(calls)
        except ray.exceptions.RayError as error:
            number, cause, found = failure(calls, error)
        self.close(timeout=1)
        own = self.rows[number]
        one = own.stop == own.start + 1
        which = f"environment {own.start}" if one else f"environments {own.start} to {own.stop - 1}"
        raise RuntimeError(f"actor {number} ({which}): {describe(cause)}") from found

    def _check_open(self, name: str) -> None:
        if self.closed:
            raise ClosedEnvironmentError(f"{name}() after close()")

    def _check_reset(self) -> None:
        if not self._is_reset:
            raise ResetNeeded("reset() comes before the first step")

    def _check(self, name: str) -> None:
        self._check_open(name)
        if self._pending:
            raise AlreadyPendingCallError(f"{name}() while rollouts are under way: receive() them first", name)
