"""Scripted environments: `--env-id environments:CounterContinuous-v0`, with this folder in PYTHONPATH.

All of them count. Which episode is how long, how it ends, what it observes and what it pays is a known function of
(the environment's key, episode, step), so that what a script writes down can be compared with what happened. They are
strict: a reset without its seed (or with a second one), a step after an episode's end, a malformed action all raise.
"""

import os
import random
import signal

import gymnasium as gym
import numpy as np

LENGTHS = (3, 7, 1, 12, 5, 2, 9)
ENDINGS = ("terminated", "truncated", "both")
LOW, HIGH = np.array([-1, 0, -3], np.float32), np.array([2, 0.5, -1], np.float32)  # no two dimensions alike


def kind_of(script):
    """The kind of these environments that a script can take."""
    is_discrete = script.startswith(("dqn", "impala")) or script.removesuffix("_torchcompile") == "ppo"
    return "Discrete" if is_discrete else "Continuous"


def key_of(seed):
    """A small number that stands for an environment in its observations and decides its script."""
    return seed % 97


def length_of(key, episode):
    return LENGTHS[(key + episode) % len(LENGTHS)]


def ending_of(key, episode):
    """Of seven lengths and three endings every pair occurs."""
    return ENDINGS[(key + episode) % len(ENDINGS)]


def in_range(action):
    """The action of PPO's policy, in units of half the range around its middle, as the environment's own."""
    return np.clip((LOW + HIGH) / 2 + (HIGH - LOW) / 2 * action, LOW, HIGH)


def observation_of(key, episode, step):
    """Unlike for any two (key, episode, step); float64, as MuJoCo's are, and exact in float32."""
    return np.array([key, episode, step], np.float64) / 16


def reward_of(key, episode, step, action):
    """The reward for an action on observation (key, episode, step): another action, another reward."""
    return step + 1 + episode / 4 + key / 8 + float(np.sum(action))


def scripted_steps(seeds, total_steps, resets_take_a_step=False):
    """Each step of all environments until there are `total_steps`, as (steps so far, of each environment, ended ones).

    `seeds` are the resets'; where `resets_take_a_step`, an environment's step after an episode's end counts as none.
    """
    keys, lanes = [key_of(seed) for seed in seeds], []
    for key in keys:  # of each environment's steps: whether it counts, and the episode that it ends, if it does
        lane = []
        for episode in range(total_steps):
            length = length_of(key, episode)
            lane += [(1, None)] * (length - 1) + [(1, (length, ending_of(key, episode)))]
            lane += [(0, None)] if resets_take_a_step else []
        lanes.append(lane)
    so_far, steps = [], [0] * len(keys)
    for row in zip(*lanes):
        if sum(steps) >= total_steps:
            break
        steps = [count + counts for count, (counts, _) in zip(steps, row)]
        so_far.append((sum(steps), steps, [(index, *ended) for index, (_, ended) in enumerate(row) if ended]))
    return so_far


def scripted_episodes(seeds, total_steps, resets_take_a_step=False):
    """The episodes that end within `total_steps`, as (global_step, index, length, ending)."""
    so_far = scripted_steps(seeds, total_steps, resets_take_a_step)
    return [(step, *episode) for step, _, ended in so_far for episode in ended]


class Counter(gym.Env):
    """Counts; `made` and `finished` are what all of its kind have seen since `forget()`.

    From its n-th step on `nan_from=n` pays NaN; at that step `fail_at=n` raises, and `signal_at=n, number=s` has the
    operating system send this process s. With `chancy` each reward has two random numbers more, as environments draw
    them that do not know of their `np_random`.
    """

    made: list["Counter"] = []  # noqa: RUF012 - shared on purpose
    finished: list[dict] = []  # noqa: RUF012
    stop_after = None  # the step in which each sends this process SIGINT

    def __init__(self, discrete=False, nan_from=None, fail_at=None, signal_at=None, number=None, **more):
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float64)
        self.action_space = gym.spaces.Discrete(3) if discrete else gym.spaces.Box(LOW, HIGH)
        self.discrete, self.nan_from, self.fail_at = discrete, nan_from, fail_at
        self.signal_at, self.number = signal_at, number
        self.error, self.scale = more.get("error", RuntimeError), more.get("scale", 1)
        self.is_chancy = more.get("chancy", False)
        self.seed, self.episode, self.t, self.steps, self.actions = None, -1, None, 0, []
        self.has_begun = self.is_closed = False
        Counter.made.append(self)

    @staticmethod
    def forget():
        Counter.made.clear()
        Counter.finished.clear()
        Counter.stop_after = None

    def close(self):
        self.is_closed = True

    def reset(self, *, seed=None, options=None):
        assert (seed is None) == self.has_begun, "each environment is seeded before its first step, and then no more"
        super().reset(seed=seed)
        if seed is not None:
            self.seed, self.key, self.episode = seed, key_of(seed), -1
        self.episode, self.t, self.total = self.episode + 1, 0, 0.0
        return self.scale * observation_of(self.key, self.episode, 0), {}

    def step(self, action):
        assert self.t is not None, "a step outside an episode"
        if self.discrete:
            assert self.action_space.contains(action), action
        else:
            assert action.shape == (3,) and action.dtype == np.float32, action
            inside = (action >= LOW - 1e-6).all() and (action <= HIGH + 1e-6).all()
            assert inside or (self.nan_from is not None and np.isnan(action).any()), action
        self.steps, self.has_begun = self.steps + 1, True
        self.actions.append(np.array(action))
        if self.steps == Counter.stop_after:
            os.kill(os.getpid(), signal.SIGINT)
        if self.steps == self.signal_at:
            os.kill(os.getpid(), self.number)
        if self.steps == self.fail_at:
            raise self.error("the environment broke down")
        reward = reward_of(self.key, self.episode, self.t, action)
        if not self.discrete:
            action.fill(np.nan)  # what it is given is its own
        if self.nan_from is not None and self.steps >= self.nan_from:
            reward = float("nan")
        if self.is_chancy:
            reward += random.random() + np.random.random()
        self.t, self.total = self.t + 1, self.total + reward
        observation = self.scale * observation_of(self.key, self.episode, self.t)
        terminated = truncated = False
        if self.t == length_of(self.key, self.episode):
            ending = ending_of(self.key, self.episode)
            terminated, truncated = ending != "truncated", ending != "terminated"
            Counter.finished.append({"return": self.total, "length": self.t, "terminated": terminated})
            self.t = None
        return observation, reward, terminated, truncated, {}


class InParts(gym.ObservationWrapper):
    """A `Counter` whose observations are Dicts, in parts of several shapes, that make the same vectors if flattened."""

    def __init__(self, **kwargs):
        super().__init__(Counter(**kwargs))
        parts = {"b": ((1, 1), np.float64), "a": ((2,), np.int64)}  # which Gymnasium sorts by their names
        self.observation_space = gym.spaces.Dict(
            {name: gym.spaces.Box(-100, 100, *part) for name, part in parts.items()}  # some give floats for integers
        )

    def observation(self, observation):
        return {"b": observation[None, 2:], "a": observation[:2]}


class Unmakeable(gym.Env):
    def __init__(self, error=PermissionError, words=("no licence",)):
        raise error(*words)


class Spaces(gym.Env):
    """Spaces alone: it can't be stepped."""

    def __init__(self, observation_space, action_space):
        self.observation_space, self.action_space = observation_space, action_space


VECTOR, BOX, DISCRETE = gym.spaces.Box(-1, 1, (4,)), gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(2)
SPACES = {  # name: observation space, action space
    "DictObservation": (gym.spaces.Dict({"a": VECTOR, "b": gym.spaces.Text(9)}), None),
    "TupleObservation": (gym.spaces.Tuple((VECTOR, VECTOR)), None),
    "DiscreteObservation": (gym.spaces.Discrete(9), None),
    "PixelObservation": (gym.spaces.Box(0, 255, (8, 8, 3), np.uint8), None),
    "ScalarObservation": (gym.spaces.Box(-1, 1, ()), None),
    "EmptyObservation": (gym.spaces.Box(-1, 1, (0,)), None),
    "EmptyAction": (VECTOR, gym.spaces.Box(-1, 1, (0,))),
    "MultiDiscreteAction": (VECTOR, gym.spaces.MultiDiscrete([2, 3])),
    "MultiBinaryAction": (VECTOR, gym.spaces.MultiBinary(3)),
    "UnboundedAction": (VECTOR, gym.spaces.Box(-np.inf, np.inf, (2,))),
    "HalfBoundedAction": (VECTOR, gym.spaces.Box(np.array([-1, -np.inf], np.float32), np.ones(2, np.float32))),
    "FarAction": (VECTOR, gym.spaces.Box(-3e38, 3e38, (2,))),
    "UnlimitedAction": (VECTOR, gym.spaces.Box(-1e10, 1e10, (2,), np.float64)),
    "MatrixAction": (VECTOR, gym.spaces.Box(-1, 1, (2, 2))),
    "WideAction": (VECTOR, gym.spaces.Box(-np.arange(1, 41, dtype=np.float32), np.float32(np.inf), (40,))),
    "ShiftedAction": (VECTOR, gym.spaces.Discrete(3, start=1)),
}

for kind, is_discrete, space in (("Continuous", False, BOX), ("Discrete", True, DISCRETE)):
    for name, kwargs in (
        ("Counter", {}),
        ("NaNReward", {"nan_from": 90}),
        ("Failing", {"fail_at": 90}),
        ("Underflowing", {"fail_at": 90, "error": FloatingPointError}),
        ("Exiting", {"fail_at": 90, "error": lambda _: SystemExit(0)}),
        ("Exiting3", {"fail_at": 90, "error": lambda _: SystemExit(3)}),
        ("Far", {"scale": 1e25}),
        ("Chancy", {"chancy": True}),
        ("Interrupting", {"signal_at": 90, "number": signal.SIGINT}),
        ("Terminating", {"signal_at": 90, "number": signal.SIGTERM}),
        ("HangingUp", {"signal_at": 90, "number": signal.SIGHUP}),
    ):
        gym.register(f"{name}{kind}-v0", Counter, kwargs={"discrete": is_discrete, **kwargs})
    gym.register(f"InParts{kind}-v0", InParts, kwargs={"discrete": is_discrete})
    for name, (observations, actions) in SPACES.items():
        gym.register(
            f"{name}{kind}-v0", Spaces, kwargs={"observation_space": observations, "action_space": actions or space}
        )
gym.register("Unimportable-v0", "no_such_module:Environment")
gym.register("Unmakeable-v0", Unmakeable)
gym.register("Unlicensed-v0", Unmakeable, kwargs={"error": gym.error.Error})
gym.register("Leaving-v0", Unmakeable, kwargs={"error": SystemExit})
gym.register("Wordless-v0", Unmakeable, kwargs={"error": AssertionError, "words": ()})
