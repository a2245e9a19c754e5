"""Probe environments (after rejax): tiny tasks whose values and best actions are known, and a way to train on them."""

import importlib

import gymnasium as gym
import numpy as np
import pytest
import torch

GAMMA = 0.9


class Probe(gym.Env):
    """Observations of one number, actions of one number in [-1, 3] or of {0, 1}; episodes of `length` steps."""

    length = 1

    def __init__(self, discrete=False):
        self.observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)
        box = gym.spaces.Box(np.float32(-1), np.float32(3), (1,))  # asymmetric: its middle is 1
        self.action_space = gym.spaces.Discrete(2) if discrete else box

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.observation = 0, self.first()
        return np.array([self.observation], np.float32), {}

    def step(self, action):
        reward = self.reward(float(np.asarray(action).reshape(-1)[0]))
        self.t += 1
        self.observation = self.later()
        return np.array([self.observation], np.float32), reward, self.t == self.length, False, {}

    def first(self):
        return 0.0

    def later(self):
        return 0.0


class ConstantReward(Probe):
    def reward(self, action):
        return 1.0


class DelayedReward(Probe):
    """Observation 0, then 1; the reward comes with the second step."""

    length = 2

    def later(self):
        return 1.0

    def reward(self, action):
        return float(self.t == 1)


class ObservationReward(Probe):
    def first(self):
        return float(self.np_random.choice([-1, 1]))

    def reward(self, action):
        return self.observation


class ActionReward(Probe):
    """Best at 0.5, or for discrete actions at 1."""

    def reward(self, action):
        return 2 * action - 1 if isinstance(self.action_space, gym.spaces.Discrete) else -((action - 0.5) ** 2)


class BothReward(ObservationReward):
    """Best at 1 + the observation, or for discrete actions at 1 if the observation is 1, else at 0."""

    def reward(self, action):
        if isinstance(self.action_space, gym.spaces.Discrete):
            return 1.0 if (action == 1) == (self.observation == 1) else -1.0
        return -((action - 1 - self.observation) ** 2)


for probe in (ConstantReward, DelayedReward, ObservationReward, ActionReward, BothReward):
    for kind, is_discrete in (("Continuous", False), ("Discrete", True)):
        gym.register(f"{probe.__name__}{kind}-v0", probe, kwargs={"discrete": is_discrete})


def train(monkeypatch, tmp_path, script, agent_class, **arguments):
    """Runs a script's main on CPU, with small sizes, and returns the agent it has trained."""
    module, agents = importlib.import_module(script), []
    make = getattr(module, agent_class)
    monkeypatch.setattr(module, agent_class, lambda *a: agents.append(make(*a)) or agents[0])
    common = {"cuda": False, "gamma": GAMMA, "output_dir": str(tmp_path), "buffer_size": 500, "batch_size": 64}
    module.main(module.Args(**(common | arguments)))
    return agents[0]


def assert_learned(agent, probe, mean_action):
    """What SAC and TD3 must know of a probe: values by the critics, actions by `mean_action(observation)`."""

    def q(observation, action):
        tensors = torch.tensor([[float(observation)]]), torch.tensor([[float(action)]])
        return agent.q_values(agent.critics, *tensors).mean().item()

    if probe == "ConstantReward":
        assert q(0, 0.5) == pytest.approx(1, abs=0.1)
    if probe == "DelayedReward":
        assert q(1, 0.5) == pytest.approx(1, abs=0.1)
        assert q(0, 0.5) == pytest.approx(GAMMA, abs=0.1)
    if probe == "ObservationReward":
        assert q(1, 0.5) == pytest.approx(1, abs=0.15)
        assert q(-1, 0.5) == pytest.approx(-1, abs=0.15)
    if probe == "ActionReward":
        assert mean_action(0) == pytest.approx(0.5, abs=0.25)
    if probe == "BothReward":
        assert mean_action(-1) == pytest.approx(0, abs=0.35)
        assert mean_action(1) == pytest.approx(2, abs=0.35)
