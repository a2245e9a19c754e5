"""DQN: its schedule, its loss and update, eager and compiled, and what it learns on probes."""

import importlib
import json

import gymnasium as gym
import numpy as np
import pytest
import torch

import agents
import dqn_torchcompile
import environments
from dqn import linear_schedule, times_due
from probes import GAMMA, train

NETWORKS = {"q_network": "q_network", "target_network": "target_network"}
SCRIPTS = [("dqn", "DQNAgent"), ("dqn_torchcompile", "CompiledDQNAgent")]


def pair(**arguments):
    eager, compiled, batch = agents.pair("dqn", "DQNAgent", "CompiledDQNAgent", NETWORKS, **arguments)
    with torch.no_grad():  # a target that is not the network itself
        compiled.target_network.mul_(1.5)
        for parameter in eager.target_network.parameters():
            parameter.mul_(1.5)
    return eager, compiled, batch


def test_epsilon_at_its_start_middle_and_end():
    for step, epsilon in ((0, 1.0), (125_000, 0.525), (249_999, 0.05), (250_000, 0.05), (500_000, 0.05)):
        assert linear_schedule(1.0, 0.05, 250_000, step) == pytest.approx(epsilon, abs=1e-5)
    assert linear_schedule(1.0, 0.05, 0, 0) == 0.05


@pytest.mark.parametrize("script, agent_class", SCRIPTS)
def test_epsilon_falls_in_a_run_and_decides_how_often_actions_are_random(monkeypatch, tmp_path, script, agent_class):
    monkeypatch.setattr(importlib.import_module(script), "LOG_EVERY", 1)
    train(monkeypatch, tmp_path, script, agent_class, env_id="CartPole-v1", total_timesteps=2000, learning_starts=1900)
    (metrics,) = tmp_path.glob("*/metrics.jsonl")
    epsilons = {line["global_step"]: line["epsilon"] for line in map(json.loads, metrics.read_text().splitlines())}
    assert epsilons[1] == pytest.approx(1.0)
    assert epsilons[500] == pytest.approx(0.525, abs=0.002)
    assert epsilons[1000] == pytest.approx(0.05, abs=0.002) and epsilons[2000] == pytest.approx(0.05)


@pytest.mark.parametrize("script, agent_class", SCRIPTS)
@pytest.mark.parametrize("epsilon, low, high", [(0.0, 0, 0), (0.5, 400, 600), (1.0, 1000, 1000)])
def test_share_of_random_actions(monkeypatch, tmp_path, script, agent_class, epsilon, low, high):
    """The greedy action is asked for whenever an action is not random."""
    module, asked = __import__(script), []
    act = getattr(module, agent_class).act
    monkeypatch.setattr(getattr(module, agent_class), "act", lambda *a: asked.append(1) or act(*a))
    train(
        monkeypatch, tmp_path, script, agent_class, env_id="CartPole-v1", total_timesteps=1000, learning_starts=999,
        start_e=epsilon, end_e=epsilon,
    )  # fmt: skip
    assert low <= 1000 - len(asked) <= high


def test_times_due_counts_every_multiple_once():
    for num_envs in (1, 3, 4, 10, 64):
        for frequency in (1, 7, 10):
            steps = range(num_envs, 64 * 30 + 1, num_envs)
            assert sum(times_due(step, num_envs, frequency) for step in steps) == steps[-1] // frequency


def test_acting_on_the_host_is_the_network():
    _, compiled, _ = pair()  # it has been given other parameters, as a resumed one is, and not acted yet
    observation = np.random.default_rng(1).normal(size=(200, 4)).astype(np.float32)
    for has_learned in (False, True):
        with torch.no_grad():
            if has_learned:
                compiled.learn()
                compiled.is_stale = True
            q = compiled.q_values(compiled.q_network, torch.as_tensor(observation))
        assert compiled.act(observation).tolist() == q.argmax(1).tolist()
    assert len(set(compiled.act(observation))) > 1


def test_acting_on_the_host_refuses_another_network(monkeypatch):
    monkeypatch.setattr(dqn_torchcompile.F, "relu", torch.tanh)
    with pytest.raises(ValueError, match="`act` computes another network"):
        pair()


def test_one_update_is_the_same_in_both_versions():
    eager, compiled, batch = pair()
    eager.update(batch)
    with torch.no_grad():
        compiled.update(batch)
    for ours, theirs in NETWORKS.items():
        agents.assert_same(getattr(compiled, ours), agents.flat(getattr(eager, theirs)))
    assert compiled.losses["td_loss"].item() == pytest.approx(eager.losses["td_loss"].item(), rel=1e-4)
    assert compiled.losses["q_value"].item() == pytest.approx(eager.losses["q_value"].item(), rel=1e-3)


def test_three_compiled_updates_are_those_of_the_eager_version():
    eager, compiled, _ = pair()
    learn = torch.no_grad()(agents.compile_as_main_does(compiled.learn))
    for _ in range(3):
        learn()
        eager.update(compiled.buffer.gather(compiled.buffer.drawn[0]))
    assert compiled.optimizer.powers.tolist() == pytest.approx([0.9**3, 0.999**3])
    for ours, theirs in NETWORKS.items():
        agents.assert_same(getattr(compiled, ours), agents.flat(getattr(eager, theirs)))


@pytest.mark.parametrize("script, agent_class", SCRIPTS)
def test_target_network_is_renewed_when_due(launch, monkeypatch, script, agent_class):
    agent_class, seen = getattr(importlib.import_module(script), agent_class), []
    renew = agent_class.update_target

    def noting(agent):
        seen.append(sum(env.steps for env in environments.Counter.made))
        renew(agent)

    monkeypatch.setattr(agent_class, "update_target", noting)
    flags = ["--total-timesteps", 300, "--learning-starts", 100, "--num-envs", 3, "--target-network-frequency", 7]
    launch(script, *flags, "--train-frequency", 10, "--buffer-size", 100, "--batch-size", 8)
    assert seen == [n for n in range(3, 301, 3) if n > 100 for _ in range(n // 7 - (n - 3) // 7)] and len(seen) > 25


@pytest.mark.parametrize(
    "num_envs, train_frequency, target_frequency", [(1, 10, 25), (1, 7, 30), (3, 10, 7), (4, 2, 6), (3, 2, 500)]
)
def test_host_and_device_with_memories_of_their_own_make_the_same_run(
    launch, monkeypatch, num_envs, train_frequency, target_frequency
):
    """What a GPU does, here on the CPU: nothing may be read before it was sent, nor overwritten before it was read."""
    flags = ["--total-timesteps", 600, "--learning-starts", 100, "--buffer-size", 120, "--batch-size", 8, "--num-envs"]
    flags += [num_envs, "--train-frequency", train_frequency, "--target-network-frequency", target_frequency]
    ended, agent_class = [], dqn_torchcompile.CompiledDQNAgent
    monkeypatch.setattr(dqn_torchcompile, "CompiledDQNAgent", lambda *a: ended.append(agent_class(*a)) or ended[-1])
    for _ in range(2):
        ended.append(launch("dqn_torchcompile", *flags, env_id="CartPole-v1"))
        monkeypatch.setattr(dqn_torchcompile, "mirrored", agents.as_on_a_gpu)
    one, first, other, second = ended
    assert first.summary["updates"] == second.summary["updates"] > 45
    assert first.episodes == second.episodes and len(first.episodes) > 5
    for name in ("q_network", "target_network"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    losses = [[(line.get("td_loss"), line.get("q_value")) for line in run.metrics] for run in (first, second)]
    assert losses[0] == losses[1] and len(set(losses[0])) > 4


@pytest.mark.parametrize("num_envs, train_frequency", [(1, 10), (3, 4)])
def test_without_flags_the_compiled_script_makes_the_eager_run(launch, num_envs, train_frequency):
    """The same random numbers in the same order, for networks, environments and batches."""
    flags = [
        "--total-timesteps",
        1500,
        "--learning-starts",
        100,
        "--buffer-size",
        120,
        "--batch-size",
        32,
        "--num-envs",
    ]
    flags += [num_envs, "--train-frequency", train_frequency]
    one, other = (launch(script, *flags, env_id="CartPole-v1") for script in ("dqn", "dqn_torchcompile"))
    assert one.episodes == other.episodes and one.summary["updates"] == other.summary["updates"] >= 70
    losses = [[line["td_loss"] for line in run.metrics if "td_loss" in line] for run in (one, other)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2) and len(losses[0]) > 5


@pytest.mark.parametrize("num_envs, train_frequency", [(1, 10), (3, 10), (4, 2)])
def test_each_update_draws_from_all_transitions_so_far_and_acting_uses_it_at_once(
    launch, monkeypatch, num_envs, train_frequency
):
    seen, agent_class = [], dqn_torchcompile.CompiledDQNAgent

    class Noting(agent_class):
        def update(self, batch):
            number, buffer = self.buffer.drawn.max().item(), self.buffer
            seen.append(buffer.added - 1 - number)
            super().update(batch)

        def act(self, observation):
            action = super().act(observation)
            with torch.no_grad():
                q = self.q_values(self.q_network, torch.as_tensor(observation))
            assert action.tolist() == q.argmax(1).tolist()
            return action

    monkeypatch.setattr(dqn_torchcompile, "CompiledDQNAgent", Noting)
    flags = ["--total-timesteps", 600, "--learning-starts", 100, "--buffer-size", 120, "--batch-size", 64, "--num-envs"]
    run = launch("dqn_torchcompile", *flags, num_envs, "--train-frequency", train_frequency, env_id="CartPole-v1")
    assert len(seen) == run.summary["updates"] >= 49 and min(seen) == 0 and max(seen) < 20


class TruncatesItself(gym.Env):
    """Observes (episode, step of it); truncates every second step, though it declares a limit far above."""

    observation_space, action_space = gym.spaces.Box(0, np.inf, (2,)), gym.spaces.Discrete(2)
    episode = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.t = self.episode + 1, 0
        return np.array([self.episode, 0], np.float32), {}

    def step(self, action):
        self.t += 1
        return np.array([self.episode, self.t], np.float32), 0.0, False, self.t == 2, {}


gym.register("TruncatesItself-v0", TruncatesItself, max_episode_steps=1000)


@pytest.mark.parametrize("script, agent_class", SCRIPTS)
@pytest.mark.parametrize("target_frequency", [1, 10, 25])
def test_next_observation_is_of_the_same_episode(launch, monkeypatch, script, agent_class, target_frequency):
    """Of which none is terminated, though many are truncated."""
    agent_class, seen = getattr(importlib.import_module(script), agent_class), []
    update = agent_class.update

    def checking(agent, batch):
        (episode, t), (next_episode, next_t) = batch["observation"].mT, batch["next_observation"].mT
        assert torch.equal(episode, next_episode) and torch.equal(next_t, t + 1) and not batch["terminated"].any()
        seen.append(len(episode.unique()))
        update(agent, batch)

    monkeypatch.setattr(agent_class, "update", checking)
    flags = ["--total-timesteps", 400, "--learning-starts", 50, "--buffer-size", 120, "--batch-size", 64]
    flags += ["--target-network-frequency", target_frequency]
    launch(script, *flags, env_id="TruncatesItself-v0")
    assert len(seen) == 35 and max(seen) > 2


def test_without_a_learning_rate_nothing_moves_and_the_target_follows_tau():
    eager, compiled, _ = pair(learning_rate=0.0, tau=0.25)
    parameters, target = compiled.q_network.clone(), compiled.target_network.clone()
    with torch.no_grad():
        compiled.learn()
    compiled.update_target()
    eager.update_target()
    assert torch.equal(compiled.q_network, parameters)
    assert torch.allclose(compiled.target_network, 0.75 * target + 0.25 * parameters, atol=1e-6)
    agents.assert_same(compiled.target_network, agents.flat(eager.target_network))


@pytest.mark.parametrize("end, matters", [(1.0, False), (0.0, True)])
def test_only_what_is_not_terminated_is_bootstrapped(end, matters):
    losses = {"eager": [], "compiled": []}
    for factor in (1.0, 3.0):
        eager, compiled, batch = pair()
        batch["terminated"] = torch.full_like(batch["terminated"], end)
        with torch.no_grad():
            compiled.target_network.mul_(factor)
            for parameter in eager.target_network.parameters():
                parameter.mul_(factor)
        for name, agent in (("eager", eager), ("compiled", compiled)):
            losses[name].append(agent.td_loss(agent.q_network, batch)[0].item())
    for without, changed in losses.values():
        assert (abs(without - changed) > 0.01) is matters


@pytest.mark.parametrize("script, agent_class", SCRIPTS)
@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize(
    "probe", ["ConstantReward", "DelayedReward", "ObservationReward", "ActionReward", "BothReward"]
)
def test_probe(monkeypatch, tmp_path, script, agent_class, num_envs, probe):
    agent = train(
        monkeypatch, tmp_path, script, agent_class, env_id=f"{probe}Discrete-v0", total_timesteps=2400,
        num_envs=num_envs, learning_starts=300, learning_rate=2e-3, train_frequency=5, target_network_frequency=50,
    )  # fmt: skip

    @torch.no_grad()
    def q(observation):
        observations = torch.tensor([[float(observation)]])
        return agent.q_values(agent.q_network, observations)[0].numpy()

    expected = {
        "ConstantReward": {0: [1, 1]},
        "DelayedReward": {0: [GAMMA, GAMMA], 1: [1, 1]},
        "ObservationReward": {-1: [-1, -1], 1: [1, 1]},
        "ActionReward": {0: [-1, 1]},
        "BothReward": {-1: [1, -1], 1: [-1, 1]},
    }[probe]
    for observation, values in expected.items():
        assert q(observation) == pytest.approx(np.array(values), abs=0.1)


def test_a_warm_up_has_something_to_draw_from():
    """Even if there is nothing yet, or nothing that came back with a resume can be drawn any more."""
    args = dqn_torchcompile.Args(buffer_size=64, batch_size=8, cuda=False)
    ring = dqn_torchcompile.ReplayRing(args, gym.make("CartPole-v1"), torch.device("cpu"))
    for oldest in (0, 64):
        ring.incoming.view(torch.int32)[-1, -2:] = oldest
        ring.pick(ring.draw())
        observation = ring.sample()["observation"]
        assert observation.shape == (8, 4) and not observation.any()
