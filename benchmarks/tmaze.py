"""T-maze (Bakker 2002; the passive one of Ni et al. 2023, section 5.1): remember a cue to the end of a corridor.

The first observation says whether the goal is up or down. The agent is moved along a corridor of `length` steps, where
nothing it does matters; at its end it has to choose. The return is 1 for the right choice and 0 for the other, so that
an agent without a memory longer than the corridor reaches 0.5.

    python leanrl/ppo_memory.py --env-id benchmarks.tmaze:TMaze100-v0 --cell lru

TMaze-v0 has a corridor of 10 steps, TMazeN-v0 one of N: 10, 30, 100, 300, 1000.
"""

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

LENGTHS = (10, 30, 100, 300, 1000)
CORRIDOR, JUNCTION, UP, DOWN = np.eye(4, dtype=np.float32)


class TMaze(gym.Env):
    """Observations: one-hot codes [4] of corridor, junction, goal up, goal down. Actions: 0 is up, 1 is down."""

    observation_space = gym.spaces.Box(0, 1, (4,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, length: int = 10):
        self.length = length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.goal, self.place = int(self.np_random.integers(2)), 0
        return (UP, DOWN)[self.goal].copy(), {}

    def step(self, action):
        if self.place == self.length:
            return JUNCTION.copy(), float(action == self.goal), True, False, {}
        self.place += 1
        return (JUNCTION if self.place == self.length else CORRIDOR).copy(), 0.0, False, False, {}


class VectorTMaze(gym.vector.VectorEnv):
    """The same for many mazes at a time."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
    single_observation_space, single_action_space = TMaze.observation_space, TMaze.action_space

    def __init__(self, num_envs: int = 1, length: int = 10, **_):
        self.num_envs, self.length = num_envs, length
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.goal = (np.zeros(self.num_envs, int) for _ in range(2))
        self.begin(np.ones(self.num_envs, bool))
        return self.observation(), {}

    def begin(self, which):
        self.place[which], self.goal[which] = 0, self.np_random.integers(2, size=which.sum())

    def observation(self):
        codes = np.where(self.place >= self.length, 1, np.where(self.place > 0, 0, 2 + self.goal))
        return np.eye(4, dtype=np.float32)[codes]

    def step(self, actions):
        is_over = self.place > self.length
        terminated = self.place == self.length
        reward = (terminated & (actions == self.goal)).astype(np.float64)
        self.place += 1
        self.begin(is_over)
        return self.observation(), reward, terminated, np.zeros(self.num_envs, bool), {}


for name, length in [("TMaze-v0", 10), *((f"TMaze{length}-v0", length) for length in LENGTHS)]:
    gym.register(name, f"{__name__}:TMaze", vector_entry_point=f"{__name__}:VectorTMaze", kwargs={"length": length})
