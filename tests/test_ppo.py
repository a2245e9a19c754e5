"""PPO: its advantages, its loss and updates, eager and compiled, its normalisation, and what it learns on probes."""

import copy
import importlib
import itertools

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.wrappers.utils import RunningMeanStd

import environments
import probes
from agents import (
    CPU,
    as_on_a_gpu,
    assert_each_row_once_an_epoch,
    assert_orthogonal,
    assert_same,
    compile_as_main_does,
    flat,
)
from ppo_continuous_action import RunningMoments
from ppo_torchcompile import FlatModule, discounted_sums

CLASSES = {
    "ppo": "PPOAgent",
    "ppo_torchcompile": "CompiledPPOAgent",
    "ppo_continuous_action": "ContinuousPPOAgent",
    "ppo_continuous_action_torchcompile": "CompiledContinuousPPOAgent",
}
each_algorithm = pytest.mark.parametrize("algorithm", ["ppo", "ppo_continuous_action"])
each_script = pytest.mark.parametrize("script", CLASSES)


def make_agent(script, **arguments):
    """An agent for an environment whose actions, if they are continuous, have unlike bounds."""
    module, is_eager = importlib.import_module(script), not script.endswith("_torchcompile")
    env = gym.make("ToyContinuous-v0" if "continuous" in script else "ToyDiscrete-v0", disable_env_checker=True)
    sizes = {"num_envs": 3, "num_steps": 16, "num_minibatches": 3, "update_epochs": 4}
    torch.manual_seed(0)
    with torch.set_grad_enabled(is_eager):
        return getattr(module, CLASSES[script])(module.Args(**sizes | arguments), env, CPU)


def pair(algorithm, **arguments):
    """An eager and a compiled agent with equal networks and the same random rollout, in which the eager one has acted.

    The environment has actions of unlike bounds.
    """
    eager, compiled = (make_agent(script, **arguments) for script in (algorithm, f"{algorithm}_torchcompile"))
    args = eager.args
    with torch.no_grad():
        for parameter in eager.network.parameters():  # far enough from the start for actions to differ in probability
            parameter.add_(0.3 * torch.randn_like(parameter))
    compiled.network.copy_(flat(eager.network))
    generator = np.random.default_rng(1)
    for t in range(args.num_steps):
        observation = generator.normal(size=(args.num_envs, 4)).astype(np.float32)
        eager.act(t, observation)
        values = {"action": eager.rollout.arrays["action"][t].copy(), "observation": observation}
        values |= {"next_observation": generator.normal(size=(args.num_envs, 4))}
        values |= {"reward": generator.normal(size=args.num_envs)}
        values |= {name: generator.random(args.num_envs) < 0.2 for name in ("terminated", "truncated")}
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


@pytest.mark.parametrize("script", ["ppo", "ppo_continuous_action"])  # whose networks are those of the other scripts
def test_networks_begin_orthogonal(script):
    module = importlib.import_module(script)
    assert_orthogonal(getattr(module, "CategoricalActorCritic" if script == "ppo" else "GaussianActorCritic")(5, 3))


# ---- Advantages ----
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


@each_algorithm
def test_advantages_of_every_pattern_of_ends(algorithm):
    patterns = list(itertools.product(range(4), repeat=6))  # of six steps; bit 0 terminates, bit 1 truncates
    eager, compiled = pair(algorithm, num_steps=6, num_envs=len(patterns), num_minibatches=1)
    ends = np.array(patterns).T
    for agent in (eager, compiled):
        agent.rollout.arrays["terminated"][:], agent.rollout.arrays["truncated"][:] = ends & 1, ends >> 1
    prepare(eager, compiled)
    rollout = eager.rollout.tensors
    with torch.no_grad():
        *_, next_value = eager.network(rollout["next_observation"])
        *_, value = eager.network(rollout["observation"])
    columns = [rollout["reward"], value, next_value, rollout["terminated"], rollout["truncated"]]
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


# ---- Updates ----
@each_algorithm
def test_old_probabilities_and_values_are_those_of_acting(algorithm):
    eager, compiled = pair(algorithm)
    prepare(eager, compiled)
    with torch.no_grad():
        *policy, value = eager.network(eager.batch["observation"])
    action = eager.batch["action"]
    categorical, normal = torch.distributions.Categorical, torch.distributions.Normal
    if algorithm == "ppo":
        log_prob = categorical(logits=policy[0]).log_prob(action)
    else:
        log_prob = normal(policy[0], policy[1].exp()).log_prob(action).sum(1)
    torch.testing.assert_close(eager.batch["log_prob"], log_prob, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(eager.batch["value"], value, rtol=1e-4, atol=1e-5)
    for name in ("log_prob", "value", "advantage", "return", "observation", "action"):
        torch.testing.assert_close(compiled.batch[name], eager.batch[name], rtol=1e-4, atol=1e-5)
    rows = torch.arange(20)
    batch = {name: tensor[rows] for name, tensor in eager.batch.items()}
    _, logged = eager.ppo_loss(eager.network, batch)  # before an update the policy is the old one
    assert logged["approx_kl"].abs() < 1e-6 and logged["clip_fraction"] == 0


def test_log_probability_and_entropy_of_the_gaussian():
    eager, _ = pair("ppo_continuous_action")
    observation, action = torch.randn(5, 4), torch.randn(5, 3)
    with torch.no_grad():
        mean, log_std, value = eager.network(observation)
        normal = torch.distributions.Normal(mean, log_std.exp())
        log_prob, entropy, same_value = eager.evaluate(eager.network, observation, action)
    torch.testing.assert_close(log_prob, normal.log_prob(action).sum(1))
    torch.testing.assert_close(entropy, normal.entropy().sum(1)[0])
    assert torch.equal(value, same_value)


@pytest.mark.parametrize(
    "is_compiled, arguments",
    [
        (False, {}),
        (False, {"norm_adv": False, "clip_vloss": False, "max_grad_norm": 1e6}),
        (False, {"clip_coef": 1e-3, "max_grad_norm": 0.01}),
        (True, {}),
    ],
)
@each_algorithm
def test_an_update_phase_is_the_same_in_both_versions(algorithm, is_compiled, arguments):
    """Epoch for epoch, approximate KL included: so `target_kl` ends it after the same one."""
    eager, compiled = pair(algorithm, learning_rate=1e-3, ent_coef=0.01, **arguments)
    prepare(eager, compiled)
    assert eager.optimizer.defaults["eps"] == compiled.optimizer.eps == 1e-5
    options = {"cpp.use_decompose_tanh": True}
    compiled.learn = compile_as_main_does(compiled.learn, **options) if is_compiled else compiled.learn
    kl = []
    for _ in range(4):
        for rows in torch.randperm(48).chunk(3):
            eager.minibatch.copy_(rows)
            eager.learn()
            compiled.minibatch.copy_(rows)
            compiled.learn()
        for name, loss in eager.losses.items():
            assert compiled.losses[name].item() == pytest.approx(loss.item(), rel=1e-3, abs=1e-5), name
        kl.append(eager.losses["approx_kl"].item())
        assert_same(compiled.network, flat(eager.network))
    assert len(set(kl)) == 4


@each_script
def test_minibatches_have_each_row_once_an_epoch(launch, monkeypatch, script):
    flags = ["--num-steps", 12, "--num-envs", 2, "--total-timesteps", 50]
    assert_each_row_once_an_epoch(launch, monkeypatch, script, CLASSES[script], 24, *flags)


@each_script
def test_actions_are_sampled_from_the_policy(script):
    algorithm = script.removesuffix("_torchcompile")
    eager, compiled = pair(algorithm, num_envs=20_000, num_steps=1, num_minibatches=1)
    observation = np.array([[0.1, -0.05, 0.03, 0.2]], np.float32)
    with torch.no_grad():
        policy = eager.network(torch.tensor(observation))
    observation = np.repeat(observation, 20_000, 0)
    if script == algorithm:
        chosen = eager.act(0, observation)
    else:
        chosen = compiled.act(0, observation)
    if algorithm == "ppo":
        chances = policy[0].softmax(1)[0].numpy()
        assert np.bincount(chosen, minlength=3) / 20_000 == pytest.approx(chances, abs=0.015)
        assert chances.min() > 0.02 and chances.max() - chances.min() > 0.1
    else:
        assert chosen.dtype == np.float32
        assert chosen.mean(0) == pytest.approx(policy[0][0].numpy(), abs=0.05)
        assert chosen.std(0) == pytest.approx(policy[1].detach().exp().numpy(), rel=0.03)
        assert np.corrcoef(chosen.T) == pytest.approx(np.eye(3), abs=0.03)


def train(monkeypatch, tmp_path, script, **arguments):
    module, agents = importlib.import_module(script), []
    make = getattr(module, CLASSES[script])
    monkeypatch.setattr(module, CLASSES[script], lambda *a: agents.append(make(*a)) or agents[0])
    arguments["env_id"] += "Continuous-v0" if "continuous" in script else "Discrete-v0"
    module.main(module.Args(cuda=False, gamma=probes.GAMMA, output_dir=str(tmp_path), **arguments))
    return agents[0]


@pytest.mark.parametrize("script", [script for script in CLASSES if script.endswith("_torchcompile")])
def test_each_rollout_has_noise_of_its_own(script):
    _, agent = pair(script.removesuffix("_torchcompile"))
    observation = np.zeros((agent.args.num_envs, 4), np.float32)
    agent.act(0, observation)
    first = agent.noise
    agent.act(0, observation)
    assert first.shape[0] == agent.args.num_steps and (first != agent.noise).all()


@each_script
def test_the_learning_rate_falls_to_nearly_nothing(monkeypatch, tmp_path, script):
    """Of 5 rollouts: what the optimiser used, at the start, in the middle and at the end."""
    agent_class, used = getattr(importlib.import_module(script), CLASSES[script]), []
    learn = agent_class.learn

    def noting_learn(agent):
        optimizer = agent.optimizer
        used.append(optimizer.lr.item() if script.endswith("compile") else optimizer.param_groups[0]["lr"])
        learn(agent)

    monkeypatch.setattr(agent_class, "learn", noting_learn)
    sizes = {"num_steps": 4, "num_envs": 2, "total_timesteps": 45, "num_minibatches": 2, "update_epochs": 1}
    train(monkeypatch, tmp_path, script, env_id="ConstantReward", learning_rate=0.01, **sizes)
    assert used == pytest.approx([rate for n in range(5) for rate in [0.01 * (1 - n / 5)] * 2])


@each_script
def test_target_kl_ends_an_update_phase_after_its_epoch(launch, script):
    flags = ["--num-steps", 10, "--num-envs", 2, "--total-timesteps", 100, "--num-minibatches", 5]
    for target_kl, epochs in ((1e-9, 1), (1e9, 4)):
        run = launch(script, *flags, "--update-epochs", 4, "--learning-rate", 0.01, "--target-kl", target_kl)
        assert run.summary["updates"] == 5 * 5 * epochs  # rollouts, minibatches, epochs


@each_script
def test_target_kl_is_compared_after_each_epoch_with_its_last_minibatch(launch, monkeypatch, script):
    """The last minibatch of epoch n is made to report n / 100, those before it far more."""
    agent_class, made = getattr(importlib.import_module(script), CLASSES[script]), []
    prepare = agent_class.prepare

    def forgetting_prepare(agent):
        made.clear()
        prepare(agent)

    def learn(agent):
        made.append(None)
        epoch, minibatch = divmod(len(made) - 1, 5)
        agent.losses["approx_kl"] = torch.tensor((epoch + 1) / 100 if minibatch == 4 else 1.0)

    monkeypatch.setattr(agent_class, "prepare", forgetting_prepare)
    monkeypatch.setattr(agent_class, "learn", learn)
    flags = ["--num-steps", 10, "--num-envs", 2, "--total-timesteps", 60, "--num-minibatches", 5, "--update-epochs", 4]
    assert launch(script, *flags, "--target-kl", 0.015).summary["updates"] == 3 * 5 * 2  # rollouts, minibatches, epochs


@pytest.mark.parametrize("bias", [True, False])
def test_flat_module_is_the_module(bias):
    module = torch.nn.Sequential(torch.nn.Linear(3, 4, bias=bias), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    flat_module, own = FlatModule(module), list(module.parameters())
    inputs = torch.randn(5, 3)
    parameters = flat_module.initial
    assert not parameters.requires_grad
    with torch.no_grad():
        torch.testing.assert_close(flat_module(parameters, inputs), module(inputs))
        assert not torch.allclose(flat_module(parameters + 1, inputs), module(inputs))
    assert all(ours is theirs for ours, theirs in zip(own, module.parameters(), strict=True))
    matrices = [part for part in flat_module.split(parameters) if part.ndim == 2]
    assert [part.shape for part in matrices] == [(4, 3), (2, 4)]
    assert [part.stride() for part in matrices] == [(1, 4), (4, 1)], "rows in memory are not a matrix's longer side"


class Doubling(torch.nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.fixture(scope="module")
def changed_module():
    """A module with a frozen layer, and one of a class of one's own; and its gradient and values compiled."""
    module = torch.nn.Sequential(torch.nn.Linear(3, 4).requires_grad_(False), torch.nn.Tanh(), Doubling(4, 2))
    inputs = torch.randn(5, 3)
    expected, flat_module = module(inputs), FlatModule(module)

    def loss(parameters):
        values = flat_module(parameters, inputs)
        return values.square().sum(), values

    gradient, (_, values) = torch.compile(torch.func.grad_and_value(loss, has_aux=True))(flat_module.initial)
    return module, flat_module, inputs, gradient, values, expected


def test_flat_module_leaves_frozen_parameters_alone(changed_module):
    module, flat_module, inputs, gradient, *_ = changed_module
    module(inputs).square().sum().backward()
    weight, bias, *trained = flat_module.split(gradient)
    assert not weight.any() and not bias.any()
    for part, parameter in zip(trained, list(module.parameters())[2:], strict=True):
        torch.testing.assert_close(part, parameter.grad)


def test_flat_module_leaves_other_layers_as_they_are(changed_module):
    *_, values, expected = changed_module
    torch.testing.assert_close(values, expected)


def test_a_copy_of_the_module_has_parameters_of_its_own(changed_module):
    module, _, inputs, *_ = changed_module
    copied = copy.deepcopy(module)
    for parameter in copied.parameters():
        parameter.data.zero_()
    assert module(inputs).all() and not copied(inputs).any()


@pytest.fixture
def agent_with(monkeypatch):
    """agent_with(script, change): an agent whose network is what `change` makes of the script's own."""

    def agent_with(script, change):
        module = importlib.import_module(script)
        name = "GaussianActorCritic" if "continuous" in script else "CategoricalActorCritic"
        network = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *sizes: change(network(*sizes)))
        return make_agent(script)

    return agent_with


@pytest.mark.parametrize("script", [script for script in CLASSES if script.endswith("_torchcompile")])
@pytest.mark.parametrize("layer, other", [(1, torch.nn.ReLU()), (3, torch.nn.SiLU()), (3, torch.nn.Dropout(0.1))])
def test_acting_in_numpy_refuses_another_network(agent_with, script, layer, other):
    """Else who has changed the module would train one policy and act with another."""

    def change(network):
        network.actor[layer] = other
        return network

    with pytest.raises(ValueError, match="`act` computes another network"):
        agent_with(script, change)


def deeper(network):
    hidden = torch.nn.Linear(64, 64), torch.nn.Tanh()
    network.actor = torch.nn.Sequential(*network.actor[:4], *hidden, network.actor[4])
    return network


def wider_and_after_the_critic(network):
    outputs = network.actor[4].out_features
    del network.actor
    network.actor = torch.nn.Sequential(torch.nn.Linear(4, 80), torch.nn.Tanh(), torch.nn.Linear(80, outputs))
    assert list(network._modules) == ["critic", "actor"]
    return network


@pytest.mark.parametrize("script", [script for script in CLASSES if script.endswith("_torchcompile")])
@pytest.mark.parametrize("change", [deeper, wider_and_after_the_critic])
def test_acting_in_numpy_takes_any_number_of_layers_wherever_they_stand(agent_with, script, change):
    agent = agent_with(script, change)
    observation = torch.randn(agent.args.num_envs, 4)
    own = agent.policy_and_value(agent.network, observation)[0]
    torch.testing.assert_close(torch.from_numpy(agent.host_policy(observation.numpy(), agent.network)), own)


@pytest.mark.parametrize("script", [script for script in CLASSES if script.endswith("_torchcompile")])
def test_separate_memory_of_host_and_device_makes_the_same_run(launch, monkeypatch, script):
    flags = ["--num-steps", 10, "--num-envs", 2, "--total-timesteps", 200, "--num-minibatches", 2]
    flags += ["--learning-rate", 0.01]
    first = launch(script, *flags)
    monkeypatch.setattr(importlib.import_module(script), "mirrored", as_on_a_gpu)
    second = launch(script, *flags)
    assert first.episodes == second.episodes and len(first.episodes) > 10
    last = [[line[name] for name in line if "loss" in name] for line in (first.metrics[-1], second.metrics[-1])]
    assert last[0] == last[1] and len(last[0]) == 2
    frozen = launch(script, *flags, "--learning-rate", 1e-30)
    assert frozen.episodes != first.episodes, "what is learned makes no difference to what is done"


# ---- Normalisation ----
def test_running_moments_are_those_of_all_rows():
    generator = np.random.default_rng(0)
    batches = [generator.normal(3, 5, size=(n, 4)) for n in (1, 1, 7, 1, 30, 2)]
    moments = RunningMoments(4)
    for n, batch in enumerate(batches, 1):
        moments.update(batch)
        seen = np.concatenate(batches[:n])
        np.testing.assert_allclose(moments.mean[0], seen.mean(0), rtol=1e-3)
        variance = moments.squares[0] / moments.count
        np.testing.assert_allclose(variance, seen.var(0), rtol=1e-2, atol=1e-2)  # it begins as if it had seen
    np.testing.assert_allclose(moments.deviation()[0], seen.std(0), rtol=1e-3)  # 1e-4 of a row


@pytest.mark.parametrize("script", [script for script in CLASSES if "continuous" in script])
def test_what_a_rollout_holds_is_normalised(monkeypatch, script, launch):
    """Observations and rewards of a scripted environment, against Gymnasium's running statistics."""
    agent_class = getattr(importlib.import_module(script), CLASSES[script])
    normalize, scale_rewards, prepare = agent_class.normalize, agent_class.scale_rewards, agent_class.prepare
    observations, rewards, rollouts = [], [], []
    note = lambda notes, value: notes.append(np.array(value))  # noqa: E731
    monkeypatch.setattr(agent_class, "normalize", lambda agent, x: note(observations, x) or normalize(agent, x))
    monkeypatch.setattr(
        agent_class, "scale_rewards", lambda agent, r, e: note(rewards, r) or scale_rewards(agent, r, e)
    )
    monkeypatch.setattr(
        agent_class, "prepare", lambda agent: rollouts.append(dict(agent.rollout.arrays)) or prepare(agent)
    )
    run = launch(script, "--num-steps", 40, "--num-minibatches", 2, "--total-timesteps", 40, "--gamma", 0.9)
    (rollout,) = rollouts
    ends = (rollout["terminated"] + rollout["truncated"])[:, 0] > 0
    assert ends.sum() == len(run.episodes) > 5

    key, episode, step, seen = run.made[0].key, 0, 0, [environments.observation_of(run.made[0].key, 0, 0)]
    for is_end in ends:
        step += 1
        seen.append(environments.observation_of(key, episode, step))
        if is_end:
            episode, step = episode + 1, 0
            seen.append(environments.observation_of(key, episode, 0))
    np.testing.assert_array_equal(np.concatenate(observations), seen)

    moments, normalised = RunningMeanStd(shape=(3,)), []
    for row in observations:  # the first reset, then each step's, and after an end the next reset's
        moments.update(row)
        normalised.append(np.clip((row[0] - moments.mean) / np.sqrt(moments.var + 1e-8), -10, 10))
    after_each_step = np.arange(40) + np.cumsum(ends) - ends + 1
    np.testing.assert_allclose(
        rollout["next_observation"][:, 0], np.stack(normalised)[after_each_step], rtol=1e-4, atol=1e-5
    )
    before_each_step = np.append(0, (after_each_step + ends)[:-1])
    np.testing.assert_allclose(
        rollout["observation"][:, 0], np.stack(normalised)[before_each_step], rtol=1e-4, atol=1e-5
    )

    moments, discounted = RunningMeanStd(shape=()), 0.0
    for t in range(40):
        discounted = 0.9 * discounted + rewards[t]
        moments.update(discounted)
        scaled = np.clip(rewards[t] / np.sqrt(moments.var + 1e-8), -10, 10)
        assert rollout["reward"][t] == pytest.approx(scaled, rel=1e-4)
        discounted = discounted * (not ends[t])


def test_observations_far_away_are_clipped():
    for agent in pair("ppo_continuous_action", num_envs=1):
        for row in np.random.default_rng(0).normal(size=(1000, 1, 4)):
            agent.normalize(row)
        assert (agent.normalize(np.full((1, 4), 1e6)) == 10).all()
        assert (agent.normalize(np.full((1, 4), -1e9)) == -10).all()


def test_only_an_environment_whose_episode_ends_forgets_its_return():
    for agent in pair("ppo_continuous_action", gamma=0.5):
        agent.scale_rewards([1.0, 2.0, 3.0], [])
        agent.scale_rewards([1.0, 2.0, 3.0], [1])
        assert agent.returns == [1.5, 0.0, 4.5]


# ---- Probes ----
@each_script
@pytest.mark.parametrize(
    "probe", ["ConstantReward", "DelayedReward", "ObservationReward", "ActionReward", "BothReward"]
)
def test_probe(monkeypatch, tmp_path, script, probe):
    """Values are in deviations of the return where rewards are scaled."""
    sizes = {"num_envs": 4, "num_steps": 16, "num_minibatches": 4, "update_epochs": 4, "learning_rate": 5e-3}
    agent = train(monkeypatch, tmp_path, script, env_id=probe, total_timesteps=4000, ent_coef=0.01, **sizes)
    is_continuous = "continuous" in script

    def known(observation):
        """The chance of action 1, or the mean action, and the value in units of the reward."""
        observation, scale = np.array([[float(observation)]]), 1.0
        if is_continuous:
            moments = agent.observation_moments
            observation = ((observation - moments.mean) / moments.deviation()).clip(-10, 10)
            scale = np.sqrt(agent.return_variance.squares / agent.return_variance.count + 1e-8)
        *policy, value = agent.policy_and_value(agent.network, torch.tensor(observation, dtype=torch.float32))
        mean = policy[0].detach()
        action = agent.to_range(mean.numpy()).item() if is_continuous else mean.softmax(1)[0, 1].item()
        return action, value.item() * scale

    if probe == "ConstantReward" and is_continuous:  # a constant return has no deviation: rewards are clipped to 10
        assert (agent.rollout.arrays["reward"] == 10).all()
    elif probe == "ConstantReward":
        assert known(0)[1] == pytest.approx(1, abs=0.1)
    if probe == "DelayedReward":
        assert known(1)[1] == pytest.approx(1, abs=0.1)
        assert known(0)[1] == pytest.approx(probes.GAMMA, abs=0.1)
    if probe == "ObservationReward":
        assert known(1)[1] == pytest.approx(1, abs=0.15)
        assert known(-1)[1] == pytest.approx(-1, abs=0.15)
    if probe == "ActionReward":
        assert known(0)[0] == pytest.approx(0.5, abs=0.25) if is_continuous else known(0)[0] > 0.9
    if probe == "BothReward" and is_continuous:
        assert known(-1)[0] == pytest.approx(0, abs=0.35)
        assert known(1)[0] == pytest.approx(2, abs=0.35)
    elif probe == "BothReward":
        assert known(1)[0] > 0.9 and known(-1)[0] < 0.1


@pytest.mark.parametrize("script", ["ppo_torchcompile", "ppo_continuous_action_torchcompile"])
def test_a_rollout_is_acted_with_one_policy(script):
    """Whatever is learned in the middle of it, on a CPU as on a GPU."""
    module, kind = importlib.import_module(script), "CartPole-v1" if script.startswith("ppo_torch") else "Pendulum-v1"
    env, actions = gym.make(kind), []
    for learns in (False, True):
        torch.manual_seed(0)
        np.random.seed(0)
        agent = getattr(module, CLASSES[script])(module.Args(num_envs=2), env, CPU)
        observation = np.full((2, env.observation_space.shape[0]), 0.1, np.float32)
        agent.act(0, observation)
        if learns:
            agent.network.add_(torch.randn_like(agent.network))
        actions.append([np.copy(agent.act(t, observation)) for t in range(1, 20)])
    assert np.array_equal(*actions)
