"""TD3: its noise and bounds, its losses and updates, eager and compiled, and what it learns on probes."""

import copy
import functools
import operator
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import agents
import td3_continuous_action_torchcompile
from probes import assert_learned, train

NETWORKS = {name: name for name in ("actor", "critics", "target_actor", "target_critics")}
SCRIPTS = [
    ("td3_continuous_action", "TD3Agent"),
    ("td3_continuous_action_torchcompile", "CompiledTD3Agent"),
]


def pair(**arguments):
    return agents.pair("td3_continuous_action", "TD3Agent", "CompiledTD3Agent", NETWORKS, **arguments)


def test_exploration_noise_is_scaled_to_each_bound_and_no_two_rows_share_it():
    observation = np.zeros((4000, 4), np.float32)
    for agent, single in zip(pair(num_envs=4000)[:2], pair()):
        with torch.no_grad():
            action, drawn = agent.act(observation), np.concatenate([single.act(observation[:1]) for _ in range(1000)])
        assert (action >= [-1, 0, -3]).all() and (action <= [2, 0.5, -1]).all()
        assert action.std(0) == pytest.approx(0.1 * np.array([1.5, 0.25, 1.0]), rel=0.1)
        assert len(np.unique(action[:, 0])) > 3900
        assert drawn.std(0) == pytest.approx(0.1 * np.array([1.5, 0.25, 1.0]), rel=0.1)
        assert drawn.mean(0) == pytest.approx(action.mean(0), abs=0.02)


def test_exploration_stays_in_asymmetric_bounds():
    for agent in pair(exploration_noise=3.0, num_envs=1000)[:2]:
        with torch.no_grad():
            action = agent.act(np.zeros((1000, 4), np.float32))
        assert (action.min(0) == [-1, 0, -3]).all() and (action.max(0) == [2, 0.5, -1]).all()


def test_target_noise_is_clipped_then_scaled(monkeypatch):
    """With noise at its limit everywhere, the target is that of the policy's action plus the limit, in each version."""
    eager, compiled, batch = pair(policy_noise=1.0, noise_clip=0.125)
    monkeypatch.setattr(torch, "randn_like", lambda tensor: torch.full_like(tensor, 100.0))
    with torch.no_grad():
        action = eager.policy(eager.target_actor, batch["next_observation"])
        action = (action + 0.125 * torch.tensor([1.5, 0.25, 1.0])).clamp(eager.low, eager.high)
        value = eager.q_values(eager.target_critics, batch["next_observation"], action).min(0).values
        target = batch["reward"] + 0.99 * (1 - batch["terminated"]) * value
        q = eager.q_values(eager.critics, batch["observation"], batch["action"])
        expected = ((q - target) ** 2).mean(1).sum().item()
    for agent in (eager, compiled):
        assert agent.qf_loss(agent.critics, batch).item() == pytest.approx(expected, rel=1e-5)


def test_actions_keep_to_bounds_that_float32_cannot_hold():
    agents.assert_actions_keep_to_bounds(pair)


def test_twenty_updates_are_those_of_a_plain_version():
    """From the same weights, batch and random numbers: algorithm 1 with PyTorch's own optimisers and losses."""
    agent, _, batch = pair()
    names = ("actor", "critics", "target_actor", "target_critics")
    actor, critics, target_actor, targets = networks = [copy.deepcopy(getattr(agent, name)) for name in names]
    actor_optimizer, critic_optimizer = (torch.optim.Adam(each.parameters(), lr=3e-4) for each in (actor, critics))
    observation, next_observation = batch["observation"], batch["next_observation"]
    low, high = torch.tensor([-1, 0, -3.0]), torch.tensor([2, 0.5, -1.0])
    scale, middle = (high - low) / 2, (high + low) / 2
    for n in range(20):
        torch.manual_seed(n)
        agent.learn(n % 2 == 0)
        torch.manual_seed(n)
        with torch.no_grad():
            noise = (0.2 * torch.randn(32, 3)).clamp(-0.5, 0.5) * scale
            action = torch.clamp(target_actor(next_observation) * scale + middle + noise, low, high)
            value = torch.min(*(target(next_observation, action) for target in targets))
            expected = batch["reward"] + 0.99 * (1 - batch["terminated"]) * value
        loss = sum(F.mse_loss(critic(observation, batch["action"]), expected) for critic in critics)
        critic_optimizer.zero_grad()
        loss.backward()
        critic_optimizer.step()
        assert agent.losses["qf_loss"].item() == pytest.approx(loss.item(), rel=1e-4)
        if n % 2 == 0:
            loss = -critics[0](observation, actor(observation) * scale + middle).mean()
            actor_optimizer.zero_grad()
            loss.backward()
            actor_optimizer.step()
            for network, target in ((actor, target_actor), (critics, targets)):
                for source, copied in zip(network.parameters(), target.parameters(), strict=True):
                    copied.data = 0.005 * source.data + 0.995 * copied.data
    for name, network in zip(names, networks, strict=True):
        agents.assert_same(agents.flat(getattr(agent, name)), agents.flat(network))


@pytest.mark.parametrize("policy_is_due", [False, True])
def test_one_update_is_the_same_in_both_versions_and_targets_wait_for_the_policy(policy_is_due):
    eager, compiled, _ = pair(tau=0.25)
    before = {name: getattr(compiled, name).clone() for name in NETWORKS}
    torch.manual_seed(1)
    eager.learn(policy_is_due)
    torch.manual_seed(1)
    with torch.no_grad():
        compiled.learn(policy_is_due)
    for ours, theirs in NETWORKS.items():
        agents.assert_same(getattr(compiled, ours), agents.flat(getattr(eager, theirs)))
        for after in (getattr(compiled, ours), agents.flat(getattr(eager, theirs))):
            assert torch.equal(after, before[ours]) is not (policy_is_due or ours == "critics")
    if policy_is_due:  # after both updates
        for ours, theirs in (("actor", "target_actor"), ("critics", "target_critics")):
            agents.assert_same(getattr(compiled, theirs), before[theirs].lerp(getattr(compiled, ours), 0.25))
    assert compiled.losses["qf_loss"].item() == pytest.approx(eager.losses["qf_loss"].item(), rel=1e-4)


@pytest.mark.parametrize("is_zen_5", [False, True])
def test_three_compiled_updates_are_those_of_the_eager_version(is_zen_5):
    eager, compiled, _ = pair()
    with agents.as_on(family=26 if is_zen_5 else 25):
        for name in ("update_critics", "update_actor"):
            setattr(compiled, name, torch.no_grad()(agents.compile_as_main_does(getattr(compiled, name))))
        for n in range(3):
            torch.manual_seed(n)
            eager.learn(True)
            torch.manual_seed(n)
            products = (agents.products_by_onednn if n == 2 else operator.call)(lambda: compiled.learn(True))
        assert (products > 0) is is_zen_5
    for adam in (compiled.critic_optimizer, compiled.actor_optimizer):
        assert adam.powers.tolist() == pytest.approx([0.9**3, 0.999**3])
    for ours, theirs in NETWORKS.items():
        agents.assert_same(getattr(compiled, ours), agents.flat(getattr(eager, theirs)))
    assert compiled.losses["actor_loss"].item() == pytest.approx(eager.losses["actor_loss"].item(), rel=1e-4)
    agents.assert_rows_are_aligned(compiled)


def test_without_a_learning_rate_nothing_moves_and_targets_follow_tau():
    _, compiled, _ = pair(learning_rate=0.0, tau=0.25)
    agents.assert_targets_follow(compiled, (True,))


@pytest.mark.parametrize("policy, kinds", [(1, {(True,)}), (2, {(True,), (False,)})])
def test_kinds_of_updates_are_those_that_occur(launch, monkeypatch, policy, kinds):
    made, partial = [], functools.partial
    counting = lambda *a: made.append(a[1:]) or partial(*a)  # noqa: E731
    monkeypatch.setattr(td3_continuous_action_torchcompile, "functools", SimpleNamespace(partial=counting))
    flags = ["--total-timesteps", 30, "--learning-starts", 0, "--batch-size", 4, "--policy-frequency", policy]
    assert launch("td3_continuous_action_torchcompile", *flags).summary["updates"] == 30
    made = [kind for kind in made if len(kind) == 1 and isinstance(kind[0], bool)]
    assert set(made) == kinds and len(made) == 2 * len(kinds)  # alone, and behind the acting


@pytest.mark.parametrize("num_envs", [1, 3])
def test_without_flags_the_compiled_script_makes_the_eager_run(launch, num_envs):
    agents.assert_eager_and_compiled_make_the_same_run(launch, "td3_continuous_action", num_envs)


@pytest.mark.parametrize("script, agent_class", SCRIPTS)
def test_policy_is_updated_when_due(launch, monkeypatch, script, agent_class):
    agents.assert_policy_is_updated_when_due(launch, monkeypatch, script, agent_class, times=1)


@pytest.mark.parametrize("flags", [("--num-envs", 2), ("--policy-frequency", 1, "--learning-starts", 0)])
@pytest.mark.parametrize("script, agent_class", SCRIPTS)
def test_updates_beside_the_environments_make_the_same_run(launch, monkeypatch, script, agent_class, flags):
    agents.assert_same_beside_the_environments(launch, monkeypatch, script, agent_class, *flags)


@pytest.mark.parametrize("script, agent_class", SCRIPTS)
def test_all_that_happened_is_drawn_alike(launch, monkeypatch, script, agent_class):
    agents.assert_all_that_happened_is_drawn_alike(launch, monkeypatch, script, agent_class)


@pytest.mark.parametrize("script, agent_class", SCRIPTS)
def test_the_host_waits_for_transfers(launch, monkeypatch, script, agent_class):
    agents.assert_the_host_waits_for_transfers(launch, monkeypatch, script, agent_class)


@pytest.mark.parametrize("script, agent_class", SCRIPTS)
def test_tf32_is_an_option(launch, monkeypatch, script, agent_class):
    agents.assert_tf32_is_an_option(launch, monkeypatch, script)


@pytest.mark.parametrize("end, matters", [(1.0, False), (0.0, True)])
def test_only_what_is_not_terminated_is_bootstrapped(end, matters):
    agents.assert_bootstrap(pair, end, matters)


@pytest.mark.parametrize("script, agent_class", SCRIPTS)
@pytest.mark.parametrize(
    "probe", ["ConstantReward", "DelayedReward", "ObservationReward", "ActionReward", "BothReward"]
)
def test_probe(monkeypatch, tmp_path, script, agent_class, probe):
    agent = train(
        monkeypatch, tmp_path, script, agent_class, env_id=f"{probe}Continuous-v0", total_timesteps=750, num_envs=2,
        learning_starts=150, learning_rate=2e-3, tau=0.05, exploration_noise=0.3,
    )  # fmt: skip

    def mean_action(observation):
        observations = torch.full((1, 1), float(observation))
        return agent.policy(agent.actor, observations).mean().item()

    assert_learned(agent, probe, mean_action)
