"""Stand-ins for EnvPool's Atari emulators: `reset`, `send` and `recv`, with autoreset in the step after an end."""

import os
import signal
from collections import deque

import gymnasium as gym
import numpy as np

import environments
import probes  # noqa: F401 - registers them


class Pool:
    """Steps environments one after another; what each one does is up to `begin` and `advance`."""

    def __init__(self, seeds, actions):
        assert all(-(2**31) <= seed < 2**31 for seed in seeds), "EnvPool's seeds are of 32 bits, with a sign"
        self.seeds, self.action_space = seeds, gym.spaces.Discrete(actions)
        self.over, self.sent = [True] * len(seeds), deque()

    def reset(self):
        self.send(np.zeros(len(self.seeds), np.int64))
        observation, *_, info = self.recv()
        return observation, info

    def send(self, action):
        assert action.shape == (len(self.seeds),) and not self.sent
        assert (action == action.astype(int)).all() and (action >= 0).all() and (action < self.action_space.n).all()
        self.sent.append(action.astype(int).tolist())

    def recv(self):
        rows = []
        for i, action in enumerate(self.sent.popleft()):
            if self.over[i]:
                self.over[i] = False
                rows.append((self.begin(i), 0.0, False, False, False))
            else:
                rows.append(self.advance(i, action))
                self.over[i] = rows[-1][2] or rows[-1][3]
        observation, reward, terminated, truncated, game_over = (np.array(column) for column in zip(*rows, strict=True))
        info = {"reward": reward.astype(np.float32), "terminated": game_over.astype(np.int32)}
        return observation, np.sign(reward).astype(np.float32), terminated, truncated, info


class Counting(Pool):
    """Lives whose length and end are a known function of (key, life); all that happens is written down.

    Each step's row is (pool, index, observed code, action, raw reward, terminated, truncated, valid); `games` are those
    finished, as the script has to log them.
    """

    made: list["Counting"] = []  # noqa: RUF012 - shared on purpose
    rows: list[tuple] = []  # noqa: RUF012
    games: list[dict] = []  # noqa: RUF012
    steps = 0

    @classmethod
    def forget(cls):
        cls.steps = 0
        for notes in (cls.made, cls.rows, cls.games):
            notes.clear()

    def __init__(self, env_id, seeds):
        super().__init__(seeds, 3)
        self.life, self.t, self.total, self.length = ([-1] * len(seeds), *([0] * len(seeds) for _ in range(3)))
        self.observed = [None] * len(seeds)

    def reset(self):
        Counting.made.append(self)
        return super().reset()

    def image(self, i):
        """Unlike for any two (key, life, step)."""
        key, image = environments.key_of(self.seeds[i]), np.zeros((4, 84, 84), np.uint8)
        self.observed[i] = (key, self.life[i] % 256, self.t[i])
        for channel in range(4):
            image[channel] = np.arange(84) + 3 * self.t[i] + 7 * self.life[i] + channel
            image[channel, 0, :3] = self.observed[i]
        return image

    def begin(self, i):
        self.life[i], self.t[i] = self.life[i] + 1, 0
        return self.image(i)

    def advance(self, i, action):
        key, life = environments.key_of(self.seeds[i]), self.life[i]
        self.t[i] += 1
        reward = (-1) ** self.t[i] * (2.0 + self.t[i] + action)
        ended = self.t[i] == environments.length_of(key, life)
        end = ("life lost", "game over", "time limit")[(key + life) % 3] if ended else ""
        self.total[i], self.length[i] = self.total[i] + reward, self.length[i] + 1
        return self.image(i), reward, end in ("life lost", "game over"), end == "time limit", end == "game over"

    def recv(self):
        before, was_over, action = list(self.observed), list(self.over), self.sent[0]
        results = super().recv()
        _, _, terminated, truncated, info = results
        if before[0] is None:  # the first reset
            return results
        Counting.steps += was_over.count(False)
        if environments.Counter.stop_after is not None and Counting.steps >= environments.Counter.stop_after:
            environments.Counter.stop_after = None
            os.kill(os.getpid(), signal.SIGINT)
        for i in range(len(self.seeds)):
            row = (self, i, before[i], action[i], float(info["reward"][i]), terminated[i], truncated[i])
            Counting.rows.append((*row, not was_over[i]))
            if info["terminated"][i] or truncated[i]:
                game = {"global_step": Counting.steps, "return": self.total[i], "length": self.length[i]}
                Counting.games.append(game | {"terminated": bool(info["terminated"][i])})
                self.total[i] = self.length[i] = 0
        return results


class Probing(Pool):
    """A probe environment's, whose observations fill the image: -1 is black, 1 white."""

    def __init__(self, env_id, seeds):
        super().__init__(seeds, 2)
        self.envs = [gym.make(f"{env_id}Discrete-v0", disable_env_checker=True) for _ in seeds]
        for env, seed in zip(self.envs, seeds, strict=True):
            env.reset(seed=seed)

    def image(self, observation):
        return np.full((4, 84, 84), round((float(observation[0]) + 1) * 127.5), np.uint8)

    def begin(self, i):
        return self.image(self.envs[i].reset()[0])

    def advance(self, i, action):
        observation, reward, terminated, truncated, _ = self.envs[i].step(action)
        return self.image(observation), reward, terminated, truncated, terminated
