"""Environments that go wrong in an actor's process and not in the learner's: `ray_environments:Dying-v0`.

Each gives every process 256 steps to take before it does what its name says, in the middle of an episode. The
learner's process is the one whose number is in LEANRL_TEST_LEARNER. Each holds a file in the folder LEANRL_TEST_HELD,
if there is one, until it is closed.
"""

import os
import signal
import sys
import time
import uuid
from pathlib import Path

import gymnasium as gym
import numpy as np

STEPS = 256  # of a process, before it goes wrong: in a fragment that does not begin with an episode


class Faulty(gym.Env):
    """Episodes of ten steps with a reward of 1; `fault` is what happens once a process has taken its steps."""

    steps = 0

    def __init__(self, fault=None, is_continuous=False):
        self.observation_space, self.action_space = gym.spaces.Box(-1, 1, (3,)), gym.spaces.Discrete(2)
        if is_continuous:
            self.action_space = gym.spaces.Box(np.float32([-1, 0]), np.float32([0, 2]))
        self.fault, self.held = fault, None
        if "LEANRL_TEST_HELD" in os.environ:
            self.held = Path(os.environ["LEANRL_TEST_HELD"], uuid.uuid4().hex)
            self.held.touch()
        if fault in ("start", "exit", "crash") and os.environ["LEANRL_TEST_LEARNER"] != str(os.getpid()):
            if fault == "exit":
                print("error: --env-id: the emulator is not there", file=sys.stderr)
                sys.exit(2)
            if fault == "crash":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("the emulator\nis not there")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        if self.fault == "reset":
            raise RuntimeError("the emulator does not reset")
        return self.np_random.uniform(-1, 1, 3).astype(np.float32), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.t += 1
        Faulty.steps += 1
        reward = 1.0
        if self.fault == "slow":  # from the start
            time.sleep(0.1)
        if Faulty.steps > STEPS:
            if self.fault == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.fault == "hang":
                time.sleep(3600)
            if self.fault == "stop":  # unlike the above, all threads of the process
                os.kill(os.getpid(), signal.SIGSTOP)
            if self.fault == "raise":
                raise RuntimeError("the emulator broke down")
            if self.fault == "nan":
                reward = float("nan")
        return self.np_random.uniform(-1, 1, 3).astype(np.float32), reward, self.t == 10, False, {}

    def close(self):
        if self.held is not None:
            self.held.unlink()  # of one that is closed twice there is none


for name, fault in (
    ("Sound", None),
    ("Dying", "die"),
    ("Hanging", "hang"),
    ("Stopped", "stop"),
    ("Raising", "raise"),
    ("NaN", "nan"),
    ("Unstartable", "start"),
    ("Exiting", "exit"),
    ("Crashing", "crash"),
    ("Unresettable", "reset"),
    ("Slow", "slow"),
):
    gym.register(f"{name}-v0", Faulty, kwargs={"fault": fault})
gym.register("SoundContinuous-v0", Faulty, kwargs={"is_continuous": True})
