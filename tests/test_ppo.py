"""PPO: its advantages, its loss and updates, eager and compiled, and what it learns on probes."""

import importlib
import itertools

import numpy as np
import pytest
import torch

import probes
from agents import CPU, assert_same, compile_as_main_does, flat
from ppo_torchcompile import discounted_sums

SCRIPTS = [("ppo", "PPOAgent"), ("ppo_torchcompile", "CompiledPPOAgent")]


def pair(**arguments):
    """An eager and a compiled agent with equal networks and the same random rollout, which the policy has acted in."""
    made = []
    for script, agent_class in SCRIPTS:
        module = importlib.import_module(script)
        env = module.make_environment("ToyDiscrete-v0")
        args = module.Args(**{"num_envs": 3, "num_steps": 16, "num_minibatches": 3} | arguments)
        torch.manual_seed(0)
        with torch.set_grad_enabled(script == "ppo"):
            made.append(getattr(module, agent_class)(args, env, CPU))
    eager, compiled = made
    with torch.no_grad():
        for parameter in eager.network.parameters():  # far enough from the start for actions to differ in probability
            parameter.add_(0.3 * torch.randn_like(parameter))
    compiled.network.copy_(flat(eager.network))
    steps, envs = args.num_steps, args.num_envs
    generator = np.random.default_rng(1)
    for t in range(steps):
        observation = generator.normal(size=(envs, 4)).astype(np.float32)
        values = eager.act(observation) | {"observation": observation}
        values |= {"next_observation": generator.normal(size=(envs, 4)), "reward": generator.normal(size=envs)}
        values |= {name: generator.random(envs) < 0.2 for name in ("terminated", "truncated")}
        for agent in (eager, compiled):
            for name in agent.rollout.arrays:
                agent.rollout.arrays[name][t] = values[name]
    return eager, compiled


def prepare(eager, compiled):
    eager.rollout.upload()
    eager.prepare()
    compiled.rollout.upload()
    with torch.no_grad():
        compiled.prepare()


def brute_force_advantages(rewards, values, next_values, terminated, truncated, gamma, lam):
    """Sums of discounted TD errors up to the episode's end, each term by its definition; all [T]."""
    advantages = []
    for start in range(len(rewards)):
        total = 0.0
        for t in range(start, len(rewards)):
            target = rewards[t] if terminated[t] else rewards[t] + gamma * next_values[t]
            total += (gamma * lam) ** (t - start) * (target - values[t])
            if terminated[t] or truncated[t]:
                break
        advantages.append(total)
    return advantages


def test_advantages_of_every_pattern_of_ends():
    patterns = list(itertools.product(range(4), repeat=6))  # of six steps; bit 0 terminates, bit 1 truncates
    eager, compiled = pair(num_steps=6, num_envs=len(patterns), num_minibatches=1)
    ends = np.array(patterns).T
    for agent in (eager, compiled):
        agent.rollout.arrays["terminated"][:], agent.rollout.arrays["truncated"][:] = ends & 1, ends >> 1
    prepare(eager, compiled)
    rollout = eager.rollout.tensors
    with torch.no_grad():
        _, next_value = eager.network(rollout["next_observation"])
    columns = [rollout["reward"], rollout["value"], next_value, rollout["terminated"], rollout["truncated"]]
    columns = [column.T.tolist() for column in columns]
    expected = [brute_force_advantages(*row, 0.99, 0.95) for row in zip(*columns, strict=True)]
    for agent in (eager, compiled):
        ours = agent.batch["advantage"].view(6, -1)
        torch.testing.assert_close(ours, torch.tensor(expected).T, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(agent.batch["return"], agent.batch["advantage"] + agent.batch["value"])


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 8, 33, 128])
def test_discounted_sums(steps):
    generator = np.random.default_rng(0)
    values, discounts = generator.normal(size=(steps, 2)), generator.random((steps, 2))
    expected, following = np.zeros((steps, 2)), 0.0
    for t in reversed(range(steps)):
        expected[t] = following = values[t] + discounts[t] * following
    ours = discounted_sums(torch.tensor(values), torch.tensor(discounts))
    np.testing.assert_allclose(ours.numpy(), expected, rtol=1e-12)


def test_old_probabilities_and_values_are_those_of_acting():
    eager, compiled = pair()
    prepare(eager, compiled)
    for name in ("log_prob", "value", "advantage", "return", "observation", "action"):
        torch.testing.assert_close(compiled.batch[name], eager.batch[name], rtol=1e-4, atol=1e-5)
    rows = torch.arange(20)
    batch = {name: tensor[rows] for name, tensor in eager.batch.items()}
    _, logged = eager.ppo_loss(eager.network, batch)  # before an update the policy is the old one
    assert logged["approx_kl"].abs() < 1e-6 and logged["clip_fraction"] == 0


@pytest.mark.parametrize(
    "is_compiled, arguments",
    [
        (False, {}),
        (False, {"norm_adv": False, "clip_vloss": False, "max_grad_norm": 1e6}),
        (False, {"clip_coef": 1e-3, "max_grad_norm": 0.01}),
        (True, {}),
    ],
)
def test_an_update_phase_is_the_same_in_both_versions(is_compiled, arguments):
    """Epoch for epoch, approximate KL included: so `target_kl` ends it after the same one."""
    eager, compiled = pair(learning_rate=1e-3, **arguments)
    prepare(eager, compiled)
    update = compile_as_main_does(compiled.update) if is_compiled else compiled.update
    kl = []
    for epoch in compiled.order.clone().view(4, 3, -1):
        assert sorted(epoch.flatten().tolist()) == list(range(48))  # each transition once
        for rows in epoch:
            eager.update(rows)
            with torch.no_grad():
                update()
        for name, loss in eager.losses.items():
            assert compiled.losses[name].item() == pytest.approx(loss.item(), rel=1e-3, abs=1e-5), name
        kl.append(eager.losses["approx_kl"].item())
        assert_same(compiled.network, flat(eager.network))
    assert len(set(kl)) == 4


@pytest.mark.parametrize("script, agent_class", SCRIPTS)
def test_actions_are_sampled_from_the_policy(script, agent_class):
    eager, compiled = pair()
    agent = eager if script == "ppo" else compiled
    observation = np.array([[0.1, -0.05, 0.03, 0.2]], np.float32)
    with torch.no_grad():
        chances = eager.network(torch.tensor(observation))[0].softmax(1)[0].numpy()
    chosen = agent.act(np.repeat(observation, 20_000, 0))
    chosen = chosen["action"] if script == "ppo" else chosen
    assert np.bincount(chosen, minlength=3) / 20_000 == pytest.approx(chances, abs=0.015)
    assert chances.min() > 0.02 and chances.max() - chances.min() > 0.1


@pytest.mark.parametrize("script, agent_class", SCRIPTS)
def test_the_learning_rate_falls_to_nearly_nothing(monkeypatch, tmp_path, script, agent_class):
    """Of 5 rollouts: what the optimiser used, at the start, in the middle and at the end."""
    module, used = importlib.import_module(script), []
    update = getattr(module, agent_class).update

    def noting_update(agent, *rows):
        optimizer = agent.optimizer
        used.append(optimizer.lr.item() if script.endswith("compile") else optimizer.param_groups[0]["lr"])
        update(agent, *rows)

    monkeypatch.setattr(getattr(module, agent_class), "update", noting_update)
    args = {"num_steps": 4, "num_envs": 2, "total_timesteps": 45, "num_minibatches": 2, "update_epochs": 1}
    train(monkeypatch, tmp_path, script, agent_class, env_id="ConstantRewardDiscrete-v0", learning_rate=0.01, **args)
    assert used == pytest.approx([rate for n in range(5) for rate in [0.01 * (1 - n / 5)] * 2])


@pytest.mark.parametrize("script, agent_class", SCRIPTS)
def test_target_kl_ends_an_update_phase_after_its_epoch(launch, script, agent_class):
    flags = ["--num-steps", 10, "--num-envs", 2, "--total-timesteps", 100, "--num-minibatches", 5]
    for target_kl, epochs in ((1e-9, 1), (1e9, 4)):
        run = launch(script, *flags, "--target-kl", target_kl)
        assert run.summary["updates"] == 5 * 5 * epochs  # rollouts, minibatches, epochs


def train(monkeypatch, tmp_path, script, agent_class, **arguments):
    module, agents = importlib.import_module(script), []
    make = getattr(module, agent_class)
    monkeypatch.setattr(module, agent_class, lambda *a: agents.append(make(*a)) or agents[0])
    module.main(module.Args(cuda=False, gamma=probes.GAMMA, output_dir=str(tmp_path), **arguments))
    return agents[0]


@pytest.mark.parametrize("script, agent_class", SCRIPTS)
@pytest.mark.parametrize(
    "probe", ["ConstantReward", "DelayedReward", "ObservationReward", "ActionReward", "BothReward"]
)
def test_probe(monkeypatch, tmp_path, script, agent_class, probe):
    sizes = {"num_envs": 4, "num_steps": 16, "total_timesteps": 4000, "learning_rate": 5e-3}
    agent = train(monkeypatch, tmp_path, script, agent_class, env_id=f"{probe}Discrete-v0", **sizes)

    def known(observation):
        """The chance of action 1, and the value."""
        logits, value = agent.policy_and_value(agent.network, torch.tensor([[float(observation)]]))
        return logits.softmax(1)[0, 1].item(), value.item()

    if probe == "ConstantReward":
        assert known(0)[1] == pytest.approx(1, abs=0.1)
    if probe == "DelayedReward":
        assert known(1)[1] == pytest.approx(1, abs=0.1)
        assert known(0)[1] == pytest.approx(probes.GAMMA, abs=0.1)
    if probe == "ObservationReward":
        assert known(1)[1] == pytest.approx(1, abs=0.15)
        assert known(-1)[1] == pytest.approx(-1, abs=0.15)
    if probe == "ActionReward":
        assert known(0)[0] > 0.9
    if probe == "BothReward":
        assert known(1)[0] > 0.9 and known(-1)[0] < 0.1
