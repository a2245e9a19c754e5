"""SAC: its log-probability, its losses and updates, eager and compiled, and what it learns on probes."""

import copy
import functools
import importlib
import operator
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import agents
import sac_continuous_action as eager_script
import sac_continuous_action_torchcompile
from probes import assert_learned, train

NETWORKS = {"actor": "actor", "critics": "critics", "target_critics": "target_critics"}
SCRIPTS = [
    ("sac_continuous_action", "SACAgent"),
    ("sac_continuous_action_torchcompile", "CompiledSACAgent"),
]


def pair(**arguments):
    return agents.pair("sac_continuous_action", "SACAgent", "CompiledSACAgent", NETWORKS, **arguments)


@pytest.mark.parametrize("script", ["sac_continuous_action_torchcompile", "td3_continuous_action_torchcompile"])
def test_critics_with_buffers_are_refused(launch, monkeypatch, script):
    module = importlib.import_module(script)

    class QNetwork(module.QNetwork):
        def __init__(self, *sizes):
            super().__init__(*sizes)
            self.register_buffer("scale", torch.rand(()))

    monkeypatch.setattr(module, "QNetwork", QNetwork)
    with pytest.raises(ValueError, match="critics with buffers"):
        launch(script, "--total-timesteps", 300, "--learning-starts", 200)


@pytest.mark.parametrize("script", ["sac_continuous_action", "td3_continuous_action"])
@pytest.mark.parametrize("version", ["", "_torchcompile"])
def test_a_critic_has_two_hidden_layers_of_relu(script, version):
    critic, relu = importlib.import_module(script + version).QNetwork(4, 3), torch.nn.ReLU()
    observation, action = torch.randn(50, 4), torch.randn(50, 3)
    plain = torch.nn.Sequential(critic.fc1, relu, critic.fc2, relu, critic.fc3)
    expected = plain(torch.cat([observation, action], 1)).squeeze(1)
    torch.testing.assert_close(critic(observation, action), expected)


def test_log_prob_matches_a_numerical_jacobian():
    torch.manual_seed(0)
    mean, log_std, noise = torch.randn(3, 50, 3, dtype=torch.float64)
    scale, bias = (
        torch.tensor([0.5, 1.0, 7.0], dtype=torch.float64),
        torch.tensor([0.0, -1.0, 3.0], dtype=torch.float64),
    )
    log_std = log_std * 0.3 - 1

    def action_of(noise):
        return eager_script.squashed_gaussian(mean, log_std, noise, scale, bias)[0]

    h = 1e-6
    jacobian = (action_of(noise + h) - action_of(noise - h)) / (2 * h)  # diagonal: each action has its own noise
    normal = torch.distributions.Normal(0.0, 1.0).log_prob(noise)
    expected = (normal - jacobian.log()).sum(-1)
    _, log_prob = eager_script.squashed_gaussian(mean, log_std, noise, scale, bias)
    near_a_bound = (action_of(noise) - bias).abs() / scale > 0.999  # there the 1e-6 under the logarithm shows
    assert torch.allclose(log_prob[~near_a_bound.any(-1)], expected[~near_a_bound.any(-1)], atol=2e-3)
    assert (~near_a_bound.any(-1)).sum() > 40


def test_actions_fill_asymmetric_bounds_and_no_more():
    observation = np.random.default_rng(0).normal(size=(4000, 4)).astype(np.float32) * 5
    for agent, single in zip(pair(num_envs=4000)[:2], pair()):
        with torch.no_grad():
            action, rows = agent.act(observation), np.concatenate([single.act(observation[:1]) for _ in range(500)])
        for chosen in (action, rows):
            assert (chosen >= [-1, 0, -3]).all() and (chosen <= [2, 0.5, -1]).all()
        assert (np.ptp(action, axis=0) > 0.8 * np.array([3, 0.5, 2])).all()
        assert len(np.unique(rows[:, 0])) > 490, "fresh noise at each call"


def test_actions_keep_to_bounds_that_float32_cannot_hold():
    agents.assert_actions_keep_to_bounds(pair)


def test_twenty_updates_are_those_of_a_plain_version():
    """From the same weights, batch and random numbers: with PyTorch's own distributions, optimisers and losses."""
    agent, _, batch = pair()
    names = ("actor", "critics", "target_critics")
    actor, critics, targets = networks = [copy.deepcopy(getattr(agent, name)) for name in names]
    log_alpha = torch.zeros((), requires_grad=True)
    parameters = ((actor.parameters(), 3e-4), (critics.parameters(), 1e-3), ([log_alpha], 1e-3))
    actor_optimizer, critic_optimizer, alpha_optimizer = (torch.optim.Adam(each, lr=lr) for each, lr in parameters)
    scale, middle = torch.tensor([1.5, 0.25, 1.0]), torch.tensor([0.5, 0.25, -2.0])

    def sampled(observation):
        mean, log_std = actor(observation)
        normal = torch.distributions.Normal(mean, log_std.exp())
        x = mean + torch.randn(32, 3) * log_std.exp()
        squashed = x.tanh()
        log_prob = normal.log_prob(x) - torch.log(scale * (1 - squashed**2) + 1e-6)
        return squashed * scale + middle, log_prob.sum(1)

    def minimize(loss, optimizer):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    observation, next_observation = batch["observation"], batch["next_observation"]
    for n in range(20):
        torch.manual_seed(n)
        agent.learn(n % 2 == 0, True)
        torch.manual_seed(n)
        with torch.no_grad():
            action, log_prob = sampled(next_observation)
            value = torch.min(*(target(next_observation, action) for target in targets)) - log_alpha.exp() * log_prob
            expected = batch["reward"] + 0.99 * (1 - batch["terminated"]) * value
        loss = sum(F.mse_loss(critic(observation, batch["action"]), expected) for critic in critics)
        minimize(loss, critic_optimizer)
        assert agent.losses["qf_loss"].item() == pytest.approx(loss.item(), rel=1e-4)
        for source, copied in zip(critics.parameters(), targets.parameters(), strict=True):
            copied.data = 0.005 * source.data + 0.995 * copied.data
        for _ in range(2 if n % 2 == 0 else 0):
            action, log_prob = sampled(observation)
            value = torch.min(*(critic(observation, action) for critic in critics))
            minimize((log_alpha.exp().detach() * log_prob - value).mean(), actor_optimizer)
            with torch.no_grad():
                _, log_prob = sampled(observation)
            minimize((-log_alpha.exp() * (log_prob + scale.log().sum() - 3)).mean(), alpha_optimizer)
    assert agent.log_alpha.item() == pytest.approx(log_alpha.item(), rel=1e-4)
    for name, network in zip(names, networks, strict=True):
        agents.assert_same(agents.flat(getattr(agent, name)), agents.flat(network))


@pytest.mark.parametrize("policy_is_due, targets_are_due", [(False, True), (True, True), (True, False)])
def test_one_update_is_the_same_in_both_versions(policy_is_due, targets_are_due):
    eager, compiled, _ = pair()
    torch.manual_seed(1)
    eager.learn(policy_is_due, targets_are_due)
    torch.manual_seed(1)
    with torch.no_grad():
        compiled.learn(policy_is_due, targets_are_due)
    for ours, theirs in NETWORKS.items():
        agents.assert_same(getattr(compiled, ours), agents.flat(getattr(eager, theirs)))
    assert torch.allclose(compiled.log_alpha, eager.log_alpha.detach(), atol=1e-6)
    assert compiled.losses["qf_loss"].item() == pytest.approx(eager.losses["qf_loss"].item(), rel=1e-4)


@pytest.mark.parametrize("is_zen_5", [False, True])
def test_three_compiled_updates_are_those_of_the_eager_version(is_zen_5):
    eager, compiled, _ = pair(policy_frequency=1)
    with agents.as_on(family=26 if is_zen_5 else 25):
        for name in ("update_critics", "update_actor"):
            setattr(compiled, name, torch.no_grad()(agents.compile_as_main_does(getattr(compiled, name))))
        for n in range(3):
            torch.manual_seed(n)
            eager.learn(True, True)
            torch.manual_seed(n)
            products = (agents.products_by_onednn if n == 2 else operator.call)(lambda: compiled.learn(True, True))
        assert (products > 0) is is_zen_5
    for adam in (compiled.critic_optimizer, compiled.actor_optimizer, compiled.alpha_optimizer):
        assert adam.powers.tolist() == pytest.approx([0.9**3, 0.999**3])
    for ours, theirs in NETWORKS.items():
        agents.assert_same(getattr(compiled, ours), agents.flat(getattr(eager, theirs)))
    assert torch.allclose(compiled.log_alpha, eager.log_alpha.detach(), atol=1e-6)
    assert compiled.losses["actor_loss"].item() == pytest.approx(eager.losses["actor_loss"].item(), rel=1e-4)
    assert compiled.losses["alpha_loss"].item() == pytest.approx(eager.losses["alpha_loss"].item(), rel=1e-4)
    agents.assert_rows_are_aligned(compiled)


def test_alpha_moves_only_when_tuned_and_enters_as_its_exponential():
    for autotune in (True, False):
        eager, compiled, _ = pair(autotune=autotune, alpha=0.3)
        start = eager.log_alpha.exp().item()
        assert start == pytest.approx(1.0 if autotune else 0.3)
        eager.learn(True, True)
        with torch.no_grad():
            compiled.learn(True, True)
        assert (eager.log_alpha.exp().item() != start) is autotune
        assert (compiled.log_alpha.exp().item() != start) is autotune
        for agent in (eager, compiled):
            assert agent.losses["alpha"].item() == pytest.approx(agent.log_alpha.exp().item())
            assert ("alpha_loss" in agent.losses) is autotune


def test_alpha_loss_has_the_gradient_of_the_eager_one():
    eager, compiled, batch = pair()
    eager.log_alpha.data.fill_(-1.3)
    compiled.log_alpha.fill_(-1.3)
    torch.manual_seed(5)
    eager.minimize("alpha_loss", eager.log_alpha, eager.alpha_optimizer, batch)
    torch.manual_seed(5)
    with torch.no_grad():
        compiled.minimize("alpha_loss", compiled.log_alpha, compiled.alpha_optimizer, batch)
    gradient = compiled.alpha_optimizer.first_moment / (1 - 0.9)
    assert gradient.item() == pytest.approx(eager.log_alpha.grad.item(), rel=1e-4)


def test_target_entropy_is_that_of_actions_between_minus_one_and_one():
    """Else no policy reached it where a range is below 1 / e: α would grow without end, and the policy stay random."""
    agents.gym.register("ToyUnit-v0", agents.Toy, kwargs={"low": (-1,) * 3, "high": (1,) * 3}, max_episode_steps=50)
    ranges = {"low": (-0.01, 3, -500), "high": (0.01, 3.1, 500)}
    agents.gym.register("ToyRanges-v0", agents.Toy, kwargs=ranges, max_episode_steps=50)
    losses = []
    for env_id in ("ToyUnit-v0", "ToyRanges-v0"):
        for agent in pair(env_id=env_id)[:2]:
            torch.manual_seed(5)
            losses.append(agent.alpha_loss(agent.log_alpha, agent.buffer.sample()).item())
    assert losses[1:] == pytest.approx(losses[:1] * 3, abs=1e-3)


def test_without_a_learning_rate_nothing_moves_and_targets_follow_tau():
    _, compiled, _ = pair(policy_lr=0.0, q_lr=0.0, tau=0.25)
    agents.assert_targets_follow(compiled, (True, True))


@pytest.mark.parametrize("num_envs", [1, 3])
def test_without_flags_the_compiled_script_makes_the_eager_run(launch, num_envs):
    agents.assert_eager_and_compiled_make_the_same_run(launch, "sac_continuous_action", num_envs)


@pytest.mark.parametrize("script, agent_class", SCRIPTS)
def test_policy_is_updated_when_due(launch, monkeypatch, script, agent_class):
    agents.assert_policy_is_updated_when_due(launch, monkeypatch, script, agent_class, times=3)


@pytest.mark.parametrize(
    "flags", [("--num-envs", 2), ("--policy-frequency", 3, "--no-autotune", "--target-network-frequency", 2)]
)
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


@pytest.mark.parametrize("policy, target, kinds", [(2, 4, 3), (4, 2, 3), (3, 11, 4), (1, 3, 2), (2, 2, 2), (1, 1, 1)])
def test_kinds_of_updates_are_those_that_occur(launch, monkeypatch, policy, target, kinds):
    """Each frequency's kinds are made before the run, and no others; --num-envs 4 makes the last step overshoot."""
    made, partial = [], functools.partial
    counting = lambda *a: made.append(a[1:]) or partial(*a)  # noqa: E731
    monkeypatch.setattr(sac_continuous_action_torchcompile, "functools", SimpleNamespace(partial=counting))
    flags = ["--total-timesteps", 30, "--num-envs", 4, "--learning-starts", 0, "--batch-size", 4, "--buffer-size", 50]
    flags += ["--policy-frequency", policy, "--target-network-frequency", target]
    run = launch("sac_continuous_action_torchcompile", *flags)
    assert run.summary["updates"] == 32
    made = [kind for kind in made if len(kind) == 2 and all(isinstance(due, bool) for due in kind)]
    assert {*made} == {(n % policy == 0, n % target == 0) for n in range(32)} and len({*made}) == kinds
    assert len(made) == 2 * kinds  # alone, and behind the acting


@pytest.mark.parametrize("end, matters", [(1.0, False), (0.0, True)])
def test_only_what_is_not_terminated_is_bootstrapped(end, matters):
    agents.assert_bootstrap(pair, end, matters)


@pytest.mark.parametrize("script, agent_class", SCRIPTS)
@pytest.mark.parametrize(
    "probe", ["ConstantReward", "DelayedReward", "ObservationReward", "ActionReward", "BothReward"]
)
def test_probe(monkeypatch, tmp_path, script, agent_class, probe):
    agent = train(
        monkeypatch, tmp_path, script, agent_class, env_id=f"{probe}Continuous-v0", total_timesteps=650, num_envs=2,
        learning_starts=150, alpha=1e-3, autotune=False, policy_lr=2e-3, q_lr=2e-3, tau=0.05,
    )  # fmt: skip

    def mean_action(observation):
        observations = torch.full((256, 1), float(observation))
        return agent.policy(agent.actor, observations)[0].mean().item()

    assert_learned(agent, probe, mean_action)
