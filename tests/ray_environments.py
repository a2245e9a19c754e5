"""Environments that go wrong in an actor's process and not in the learner's: `ray_environments:Dying-v0`.

Each gives every process 300 steps to take before it does what its name says. The learner's process is the one whose
number is in LEANRL_TEST_LEARNER.
"""

import os
import signal
import time

import gymnasium as gym
import numpy as np

STEPS = 300  # of a process, before it goes wrong


class Faulty(gym.Env):
    """Episodes of ten steps with a reward of 1; `fault` is what happens after a process's 300th step."""

    steps = 0

    def __init__(self, fault=None):
        self.observation_space, self.action_space = gym.spaces.Box(-1, 1, (3,)), gym.spaces.Discrete(2)
        self.fault = fault
        if fault == "start" and os.environ["LEANRL_TEST_LEARNER"] != str(os.getpid()):
            raise RuntimeError("the emulator\nis not there")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.np_random.uniform(-1, 1, 3).astype(np.float32), {}

    def step(self, action):
        self.t += 1
        Faulty.steps += 1
        reward = 1.0
        if Faulty.steps > STEPS:
            if self.fault == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.fault == "hang":
                time.sleep(3600)
            if self.fault == "raise":
                raise RuntimeError("the emulator broke down")
            if self.fault == "nan":
                reward = float("nan")
        return self.np_random.uniform(-1, 1, 3).astype(np.float32), reward, self.t == 10, False, {}


for name, fault in (
    ("Sound", None),
    ("Dying", "die"),
    ("Hanging", "hang"),
    ("Raising", "raise"),
    ("NaN", "nan"),
    ("Unstartable", "start"),
):
    gym.register(f"{name}-v0", Faulty, kwargs={"fault": fault})
