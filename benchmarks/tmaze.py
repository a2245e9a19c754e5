"""T-maze: remember a cue to the end of a corridor (after Bakker 2001, "Reinforcement learning with LSTM", section 4).

    python leanrl/ppo_memory.py --env-id benchmarks.tmaze:TMaze100-v0 --num-steps 256 --num-minibatches 8

The first observation says whether the goal is up or down. The agent is moved along a corridor where all looks alike and
nothing it does matters, and sees the junction as many steps after the cue as the corridor is long; what it does there
ends the episode. The return is 1 at the goal and 0 elsewhere: 0.5 on average without a memory of that length. An agent
that has its previous action among its inputs could also hold the cue by acting it all the way.

Only memory is measured. Bakker's agent walks by itself, and is paid for the choice but also charged for standing still;
so does that of the passive T-maze (Ni et al. 2023, https://arxiv.org/abs/2307.03864), charged for falling behind.

TMaze-v0 has a corridor of 10 steps, TMazeL-v0 one of L: 10, 20, 30, 50, 100, 200, 300, 500 or 1000.
"""

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

LENGTHS = (10, 20, 30, 50, 100, 200, 300, 500, 1000)
CORRIDOR, JUNCTION, UP, DOWN = np.eye(4, dtype=np.float32)


def check_length(length: int) -> None:
    if length < 1:
        raise ValueError(f"a corridor must be at least 1 step long, not {length}")


class TMaze(gym.Env):
    """Observations are one-hot codes of corridor, junction, goal up, goal down, [4]; actions 0 (up) and 1 (down)."""

    observation_space = gym.spaces.Box(0, 1, (4,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, length: int = 10):
        check_length(length)
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
    """Mazes side by side. All episodes are of one length, so that all agents are at the same `place`."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012, as gym.vector.VectorEnv has it
    single_observation_space, single_action_space = TMaze.observation_space, TMaze.action_space

    def __init__(self, num_envs: int = 1, length: int = 10):
        check_length(length)
        self.num_envs, self.length = num_envs, length
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.goal, self.place = self.np_random.integers(2, size=self.num_envs), 0
        return np.stack([UP, DOWN])[self.goal], {}

    def step(self, actions):
        reward, terminated, truncated = np.zeros(self.num_envs), *np.zeros((2, self.num_envs), bool)
        if self.place > self.length:
            observation, _ = self.reset()
            return observation, reward, terminated, truncated, {}
        if self.place == self.length:
            reward, terminated = (actions == self.goal).astype(np.float64), ~terminated
        self.place += 1
        here = JUNCTION if self.place >= self.length else CORRIDOR
        return here[None].repeat(self.num_envs, 0), reward, terminated, truncated, {}


for name, length in {"TMaze-v0": 10, **{f"TMaze{length}-v0": length for length in LENGTHS}}.items():
    gym.register(name, f"{__name__}:TMaze", vector_entry_point=f"{__name__}:VectorTMaze", kwargs={"length": length})
