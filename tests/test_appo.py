"""Asynchronous PPO: PPO without lag, V-trace's advantages with it, what it normalises by. The actors: test_impala."""

import copy
import functools
import importlib
import itertools

import numpy as np
import pytest
import torch

import environments
import test_impala
from agents import assert_each_row_once_an_epoch, flat
from conftest import read_run
from pools import Counting
from test_impala import CPU, oracle

SCRIPTS = {"appo_ray": "APPOAgent", "appo_ray_torchcompile": "CompiledAPPOAgent"}
KINDS = {"Discrete": 3, "Continuous": (3,)}

each_script = pytest.mark.parametrize("script", SCRIPTS)
RAY = [*test_impala.SCRIPTS, *SCRIPTS]
each_ray_script = pytest.mark.parametrize("script", RAY)
each_kind = pytest.mark.parametrize("kind", KINDS)


class Played:
    """An agent of `script`, and a prepared batch of what an actor with its weights did in the scripted environments."""

    def __init__(self, script, kind, prepare=True, device="cpu", **changed):
        self.module = importlib.import_module(script)
        defaults = {"cuda": False, "num_envs": 2, "fragment_length": 24, "batch_fragments": 2, "num_minibatches": 1}
        self.args = self.module.Args(**defaults | {"env_id": f"Counter{kind}-v0"} | changed)
        torch.manual_seed(3)
        self.agent = getattr(self.module, SCRIPTS[script])(self.args, (3,), KINDS[kind], torch.device(device))
        network = self.agent.module.module if "compile" in script else self.agent.network
        self.network = network
        if kind == "Continuous":
            environments_of, act, core = self.module.BoundedEnvironments, self.module.act_continuous, network[1]
        else:
            environments_of, act, core = self.module.GymEnvironments, self.module.act_discrete, network
        with torch.no_grad():  # a policy that has a preference
            for parameter in core.actor.parameters():
                parameter.mul_(5 if kind == "Continuous" else 30)
            if "compile" in script:
                self.agent.network.copy_(flat(self.agent.module.module))
        build = functools.partial(self.module.make_actor_critic, (3,), KINDS[kind])
        environments.Counter.forget()
        self.actor = self.module.Actor(self.args, environments_of, build, act)
        self.actor.start(0, 0, 0)
        if prepare:
            self.collect(0)

    def collect(self, version):
        self.fill(version)
        self.prepare()

    def fill(self, version):
        self.fragments = []
        for i in range(self.args.batch_fragments):
            weights = [weight.detach().cpu().numpy().copy() for weight in self.agent.weights()]
            self.fragments.append(self.actor.sample(weights, version))
            self.agent.fill(i, self.fragments[-1])
        self.agent.scale_rewards()
        self.agent.batch.upload()

    @torch.no_grad()
    def prepare(self):
        self.agent.prepare()

    def update(self, times=1):
        count = self.args.num_envs * self.args.batch_fragments * self.args.fragment_length
        for _ in range(times):
            self.agent.update(torch.arange(count))

    def vector(self):
        return torch.cat([weight.detach().flatten().cpu() for weight in self.agent.weights()])


# ---- The update ----
@each_kind
@each_script
def test_a_learning_rate_of_0_leaves_the_ratio_at_1(script, kind):
    """The stored log-probability is the recomputed one, which is also that of the policy that did not move."""
    played = Played(script, kind, learning_rate=1e-30, ent_coef=0.0)
    batch, rows = played.agent.batch.tensors, played.agent.rows
    valid = batch["valid"] > 0
    assert 0 < valid.float().mean() < 1 and batch["log_prob"][valid].std() > 0.05
    torch.testing.assert_close(rows["log_prob"].view_as(valid)[valid], batch["log_prob"][valid], rtol=1e-5, atol=1e-5)
    played.update(3)
    limit = 0 if script == "appo_ray" else 1e-6
    assert abs(played.agent.losses["approx_kl"].item()) <= limit and played.agent.losses["clip_fraction"] == 0


@each_kind
@each_script
def test_without_lag_it_is_ppo(script, kind):
    """Three updates: those of ppo.py, or ppo_continuous_action.py, on the same steps, from the same parameters.

    There an episode's next begins without a step, so the rows that only reset are left out.
    """
    played = Played(script, kind, num_envs=1, batch_fragments=1, fragment_length=60, ent_coef=0.01, learning_rate=1e-3)
    fragment, valid = played.fragments[0], played.fragments[0]["valid"][:, 0]
    ppo = importlib.import_module("ppo" if kind == "Discrete" else "ppo_continuous_action")
    shared = ("learning_rate", "ent_coef", "vf_coef", "clip_coef", "clip_vloss", "max_grad_norm", "norm_adv", "gamma")
    args = ppo.Args(
        **{name: getattr(played.args, name) for name in shared},
        **{"num_envs": 1, "num_steps": int(valid.sum()), "num_minibatches": 1, "gae_lambda": played.args.trace_lambda},
    )
    env = ppo.make_environments(ppo.Args(num_envs=1, env_id=f"Counter{kind}-v0"))[0]
    agent = (ppo.PPOAgent if kind == "Discrete" else ppo.ContinuousPPOAgent)(args, env, CPU)
    network = played.network if kind == "Discrete" else played.network[1]
    agent.network.load_state_dict(network.state_dict())
    arrays = agent.rollout.arrays
    for name in ("action", "terminated", "truncated"):
        arrays[name][:, 0] = fragment[name][valid, 0]
    arrays["reward"][:, 0] = played.agent.batch.arrays["reward"][valid, 0]  # scaled
    arrays["observation"][:, 0] = fragment["observation"][:-1][valid, 0]
    arrays["next_observation"][:, 0] = fragment["observation"][1:][valid, 0]
    agent.rollout.upload()
    agent.prepare()
    ours = played.agent.rows["advantage"][torch.from_numpy(valid)]
    assert len(ours) < 60
    torch.testing.assert_close(ours, agent.batch["advantage"], rtol=1e-4, atol=1e-4)
    before = played.vector()
    for _ in range(3):
        agent.minibatch.copy_(torch.arange(args.num_steps))
        agent.learn()
    played.update(3)
    weights = played.agent.weights()[: len(list(agent.network.parameters()))]
    for ours, theirs in zip(weights, agent.network.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)
    assert (played.vector() - before).abs().max() > 2e-3
    for name, loss in agent.losses.items():
        torch.testing.assert_close(played.agent.losses[name], loss, rtol=1e-3, atol=1e-5)


@each_kind
@each_script
@pytest.mark.parametrize("vtrace", [True, False])
def test_with_lag_the_advantages_are_v_traces(script, kind, vtrace):
    """After a change of the policy: targets by the oracle's sum, their change as advantages, ratios from now on."""
    played = Played(script, kind, vtrace=vtrace)
    generator = torch.Generator().manual_seed(0)
    parameters = [played.agent.network] if "compile" in script else list(played.agent.network.parameters())
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    played.prepare()
    batch, rows = played.agent.batch.tensors, played.agent.rows
    valid = batch["valid"] > 0
    ratio = (rows["log_prob"].view_as(valid) - batch["log_prob"]).exp()
    assert (ratio[valid] - 1).abs().mean() > 0.02
    _, _, last_value = played.agent.policy_and_value(played.agent.network, batch["observation"][-1])
    value = torch.cat([rows["value"].view_as(valid), last_value[None]])
    fragment = {"value": value, "ratio": ratio if vtrace else torch.ones_like(ratio), "reward": batch["reward"]}
    fragment |= {name: batch[name] for name in ("terminated", "truncated", "valid")}
    fragment = {name: tensor.detach().double().numpy() for name, tensor in fragment.items()}
    target, _ = oracle(fragment, trace_lambda=0.95)
    for name, expected in (("return", target), ("advantage", target - fragment["value"][:-1])):
        ours = rows[name].view_as(valid)[valid].numpy()
        np.testing.assert_allclose(ours, expected[valid.numpy()], rtol=1e-4, atol=1e-4)
    played.agent.losses["approx_kl"].fill_(1)
    before = played.vector()
    if "compile" in script:
        played.agent.optimizer.lr.fill_(0)
    else:
        played.agent.optimizer.param_groups[0]["lr"] = 0.0
    played.update()
    assert abs(played.agent.losses["approx_kl"].item()) < 1e-6 and torch.equal(before, played.vector())


@each_kind
@each_script
def test_garbage_in_masked_rows_leaves_the_update_unchanged(script, kind):
    clean, dirty = Played(script, kind), Played(script, kind)
    masked = dirty.agent.batch.tensors["valid"] == 0
    for name in ("action", "log_prob", "reward"):
        tensor = dirty.agent.batch.tensors[name]
        tensor[masked] = torch.nan if name != "action" or kind == "Continuous" else 1e6
    for played in (clean, dirty):
        played.prepare()
        played.update(2)
    assert masked.any() and torch.equal(clean.vector(), dirty.vector())
    assert {name: loss.item() for name, loss in clean.agent.losses.items()} == {
        name: loss.item() for name, loss in dirty.agent.losses.items()
    }


@each_kind
@each_script
def test_a_masked_row_of_any_density_leaves_the_update_unchanged(script, kind):
    """Even if the policy has moved so far there that the ratio of densities is no float32, and nor is its gradient."""
    clean, dirty = Played(script, kind), Played(script, kind)
    masked = dirty.agent.rows["valid"] == 0
    dirty.agent.rows["log_prob"][masked] = -1000
    for played in (clean, dirty):
        played.update(2)
    assert masked.any() and clean.vector().isfinite().all() and torch.equal(clean.vector(), dirty.vector())


@each_kind
@pytest.mark.parametrize("changed", [{}, {"vtrace": False, "norm_adv": False, "clip_vloss": False}])
def test_eager_and_compiled_updates_agree(kind, changed):
    eager, compiled = (Played(script, kind, **changed) for script in SCRIPTS)
    for name, tensor in eager.agent.rows.items():
        torch.testing.assert_close(tensor, compiled.agent.rows[name].view_as(tensor), rtol=0, atol=1e-4)
    before = eager.vector()
    for played in (eager, compiled):
        played.update(5)
    assert (eager.vector() - before).abs().max() > 1e-3
    torch.testing.assert_close(eager.vector(), compiled.vector(), rtol=0, atol=2e-5)
    for name, loss in eager.agent.losses.items():
        torch.testing.assert_close(loss, compiled.agent.losses[name], rtol=1e-3, atol=1e-5)


@each_script
def test_minibatches_have_each_row_once_an_epoch(launch, monkeypatch, script):
    flags = ["--num-envs", 2, "--fragment-length", 24, "--batch-fragments", 2, "--total-timesteps", 96]
    agent_class = "CompiledAPPOAgent" if "compile" in script else "APPOAgent"
    assert_each_row_once_an_epoch(launch, monkeypatch, script, agent_class, 96, *flags)


# ---- Normalisation ----
@each_script
def test_actor_and_learner_normalise_alike(script):
    """By all observations up to the version before; the first version by none."""
    played, seen = Played(script, "Continuous", prepare=False), []
    for version in range(3):
        if seen:
            rows = np.concatenate(seen).reshape(-1, 3)
            np.testing.assert_allclose(played.network[0].mean.numpy(), rows.mean(0), rtol=1e-3, atol=1e-4)
            np.testing.assert_allclose(played.network[0].deviation.numpy(), rows.std(0), rtol=1e-3, atol=1e-4)
        else:
            assert played.network[0].mean.tolist() == [0, 0, 0] and played.network[0].deviation.tolist() == [1, 1, 1]
        played.collect(version)
        batch, valid = played.agent.batch.tensors, played.agent.batch.tensors["valid"] > 0
        log_prob = played.agent.rows["log_prob"].view_as(valid)
        torch.testing.assert_close(log_prob[valid], batch["log_prob"][valid], rtol=1e-4, atol=1e-4)
        seen += [fragment["observation"][1:] for fragment in played.fragments]
        played.update()
        played.agent.follow_observations()


@each_script
def test_rewards_are_in_deviations_of_the_return(script):
    """Of the discounted sums of each environment's episodes, over fragments and without the rows that only reset.

    An actor that has been replaced begins with episodes of its own; after a fragment that was lost none goes on.
    """
    played = Played(script, "Continuous", prepare=False, num_envs=3, fragment_length=10)
    returns, seen = np.zeros(3), []
    for version in range(6):
        if version == 2:
            assert (abs(returns) > 0.1).any()
            played.actor.sample([weight.detach().numpy().copy() for weight in played.agent.weights()], version)
            assert (played.actor.lengths > 0).any(), "their first step is not the first of an episode"
            returns[:] = 0
        if version == 4:
            assert (abs(returns) > 0.1).any() and (played.actor.lengths > 0).any(), "in the middle of episodes"
            played.actor.envs = None
            played.actor.start(0, 0, 0)
            returns[:] = 0
        played.collect(version)
        for fragment in played.fragments:
            for t, i in np.ndindex(10, 3):
                if fragment["valid"][t, i]:
                    returns[i] = returns[i] * 0.99 + fragment["reward"][t, i]
                    seen.append(returns[i])
                    returns[i] *= 1 - (fragment["terminated"][t, i] | fragment["truncated"][t, i])
        rewards = np.concatenate([fragment["reward"] for fragment in played.fragments], 1)
        expected = (rewards / np.std(seen)).clip(-10, 10)
        np.testing.assert_allclose(played.agent.batch.arrays["reward"], expected, rtol=1e-3, atol=1e-4)


def test_actions_keep_the_bounds_of_their_dimension():
    """A policy far outside: the environment gets each dimension's own bound, and the fragment what was drawn."""
    played = Played("appo_ray", "Continuous", prepare=False)
    with torch.no_grad():
        played.network[1].actor[-1].bias.copy_(torch.tensor([50.0, -50.0, 50.0]))
    played.collect(0)
    bound = np.array([environments.HIGH[0], environments.LOW[1], environments.HIGH[2]])
    for env in environments.Counter.made[:2]:
        assert (np.stack(env.actions) == bound).all()
    assert (np.abs(played.fragments[0]["action"]) > 40).all()


@each_script
def test_what_is_far_away_is_clipped(script):
    module = importlib.import_module(script)
    normalizer = module.Normalizer(2)
    assert normalizer(torch.tensor([[1e6, -1e6], [0.5, 9.5]])).tolist() == [[10, -10], [0.5, 9.5]]
    agent = Played(script, "Continuous").agent
    agent.batch.arrays["reward"][:] = 1e6
    agent.scale_rewards()
    assert (agent.batch.arrays["reward"] == 10).all()


# ---- Runs in one process ----
def small(*flags):
    sizes = ["--num-envs", 3, "--fragment-length", 8, "--batch-fragments", 2, "--num-minibatches", 2]
    return ["--total-timesteps", 300, "--measure-burnin", 20, "--update-epochs", 2, *sizes, *flags]


@each_kind
@each_script
def test_files_say_what_the_environments_did(launch, script, kind):
    run = launch(script, *small(), env_id=f"Counter{kind}-v0")
    assert run.summary["status"] == "finished" and 300 <= run.summary["global_step"] <= 300 + 2 * 3 * 8
    assert run.summary["updates"] == 2 * run.summary["fragments_consumed"] > 10
    assert run.summary["fragments_consumed"] == run.summary["fragments_delivered"]
    assert [run.summary[name] for name in ("lag_min", "lag_mean", "lag_max", "fragments_lost")] == [0, 0, 0, 0]
    assert sum(env.steps for env in run.made) == run.summary["global_step"]
    assert len(run.episodes) == len(run.finished) > 10
    losses = {"policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "lag_min", "lag_mean", "lag_max"}
    assert all(losses <= set(line) for line in run.metrics)


@pytest.fixture
def ratio_errors(monkeypatch):
    """Of each update in a run: the largest difference of the learner's log-probabilities from its actor's."""
    errors = []
    for script, name in SCRIPTS.items():
        agent_class = getattr(importlib.import_module(script), name)

        def update(agent, chosen, update=agent_class.update):
            batch, valid = agent.batch.tensors, agent.batch.tensors["valid"] > 0
            log_prob = agent.rows["log_prob"].view_as(valid)  # of the policy before all updates on the batch
            errors.append((log_prob - batch["log_prob"])[valid].abs().max().item())
            update(agent, chosen)

        monkeypatch.setattr(agent_class, "update", update)
    return errors


@each_script
def test_without_lag_actor_and_learner_have_one_policy(launch, ratio_errors, script):
    """The statistics by which observations are normalised are part of it."""
    run = launch(script, *small())
    assert len(ratio_errors) == run.summary["updates"] and max(ratio_errors) < 1e-4


@each_kind
def test_same_seed_same_run(launch, kind):
    env_id = f"Counter{kind}-v0"
    runs = [launch("appo_ray", *small("--seed", seed), env_id=env_id) for seed in (7, 7, 8)]
    assert runs[0].episodes == runs[1].episodes != runs[2].episodes


def test_compiled_once_and_the_same_run(launch, monkeypatch, ratio_errors):
    """With --compile: two graphs, none in the window of fps, the losses of the run without it, the actor's policy."""
    module, script, seen = importlib.import_module("appo_ray_torchcompile"), "appo_ray_torchcompile", []
    monkeypatch.setattr(module, "LOG_EVERY", 20)
    plain = launch(script, *small())
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    publish = module.Fleet.publish

    def publish_and_count(fleet, weights):
        counters = torch._dynamo.utils.counters
        seen.append(copy.deepcopy({name: dict(counts) for name, counts in counters.items() if counts}))
        publish(fleet, weights)

    monkeypatch.setattr(module.Fleet, "publish", publish_and_count)
    compiled = launch(script, *small("--compile"))
    assert seen[0]["stats"]["unique_graphs"] == 2 and "graph_break" not in seen[0] and seen[0] == seen[-1]
    assert compiled.summary["variant"] == "compile" and compiled.summary["warmup_seconds"] > 0
    assert [line["length"] for line in compiled.episodes] == [line["length"] for line in plain.episodes]
    assert len(ratio_errors) >= plain.summary["updates"] + compiled.summary["updates"] and max(ratio_errors) < 1e-4
    for ours, theirs in zip(compiled.metrics, plain.metrics, strict=True):
        for name in ("policy_loss", "value_loss", "entropy"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-2, abs=2e-3)


@each_script
def test_target_kl_ends_the_epochs(launch, script):
    """After the first, which has two minibatches of the two fragments."""
    run = launch(script, *small("--target-kl", 1e-12, "--update-epochs", 5))
    assert run.summary["updates"] == run.summary["fragments_consumed"]


def images_fragment(seed):
    """Six steps of two games, one of which begins anew at the third."""
    rng, is_new = np.random.default_rng(seed), np.zeros((6, 2), bool)
    is_new[2, 0] = True
    images = rng.integers(0, 255, (10, 2, 84, 84), dtype=np.uint8)
    fragment = {"observation": images, "is_new": is_new, "action": rng.integers(0, 3, (6, 2))}
    fragment |= {"log_prob": np.full((6, 2), -np.log(3), np.float32), "reward": rng.normal(size=(6, 2))}
    return fragment | {"terminated": np.zeros((6, 2)), "truncated": np.zeros((6, 2)), "valid": np.ones((6, 2), bool)}


@each_script
def test_images_are_learned_from(script):
    """What the agent learns from are the stacks that its actor saw, and an update changes every layer."""
    module = importlib.import_module(script)
    sizes = {"num_envs": 2, "fragment_length": 6, "batch_fragments": 1, "num_minibatches": 1, "cuda": False}
    args = module.Args(env_id="Pong-v5", **sizes)
    agent = getattr(module, SCRIPTS[script])(args, (4, 84, 84), 3, CPU)
    fragment = images_fragment(0)
    images = fragment["observation"]
    agent.fill(0, fragment)
    agent.batch.upload()
    before = [weight.detach().clone() for weight in agent.weights()]
    with torch.no_grad():
        agent.prepare()
    stacks = agent.rows["observation"].view(6, 2, 4, 84, 84).numpy()
    np.testing.assert_array_equal(stacks[5, 1], images[5:9, 1])
    np.testing.assert_array_equal(stacks[3, 0], images[[6, 6, 6, 6], 0])  # what step 2 returned began a game
    agent.update(torch.arange(12))
    assert all((weight - old).abs().max() > 0 for weight, old in zip(agent.weights(), before, strict=True))


@each_script
def test_resume_goes_on(launch, script):
    """With the statistics of the checkpoint, too: in the network, and those that run on."""
    run = launch(script, *small())
    module = importlib.import_module(script)
    parts = torch.load(run.folder / "checkpoint.pt", weights_only=True)["parts"]
    assert parts["observation_moments"]["count"] > 300 and parts["return_moments"]["count"] > 250
    agents, make = [], getattr(module, SCRIPTS[script])
    config = run.config | {"resume": str(run.folder), "total_timesteps": 400}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, SCRIPTS[script], lambda *a: agents.append(make(*a)) or agents[0])
        module.main(module.Args(**{name: config[name] for name in module.Args.__dataclass_fields__}))
    again = read_run(run.folder.parent)
    assert again.summary["resumed_at"] == [run.summary["global_step"]] and again.summary["global_step"] >= 400
    assert agents[0].observation_moments.count == pytest.approx(parts["observation_moments"]["count"] + 144, abs=50)


@each_script
def test_a_run_learns_from_what_is_normalised(launch, monkeypatch, script):
    """By all that it has seen: observations up to the version before, rewards up to this batch."""
    module, raw, checked = importlib.import_module(script), {"observation": [], "reward": []}, []
    agent_class = getattr(module, SCRIPTS[script])

    def noting_fill(agent, i, fragment, fill=agent_class.fill):
        raw["observation"].append(fragment["observation"][1:].reshape(-1, 3))
        raw["reward"].append(fragment["reward"])
        fill(agent, i, fragment)

    def checking_prepare(agent, prepare=agent_class.prepare):
        normalizer = (agent.module.module if "compile" in script else agent.network)[0]
        seen, deviation = np.concatenate(raw["observation"]), agent.return_moments.deviation().item()
        if len(before := seen[: len(seen) * len(checked) // (len(checked) + 1)]):
            np.testing.assert_allclose(normalizer.mean.numpy(), before.mean(0), rtol=1e-3, atol=1e-4)
        expected = (np.concatenate(raw["reward"][-2:], 1) / deviation).clip(-10, 10)
        np.testing.assert_allclose(agent.batch.arrays["reward"], expected, rtol=1e-4, atol=1e-6)
        checked.append(deviation)
        prepare(agent)

    monkeypatch.setattr(agent_class, "fill", noting_fill)
    monkeypatch.setattr(agent_class, "prepare", checking_prepare)
    launch(script, *small(), env_id="CounterContinuous-v0")
    assert len(checked) > 3 and abs(checked[-1] - 1) > 0.05


@each_ray_script
def test_the_learning_rate_falls_to_nearly_nothing(launch, monkeypatch, script):
    """What the optimiser used, of the step at which each batch began."""
    module, used = importlib.import_module(script), []
    agent_class = next(value for name, value in vars(module).items() if name.endswith("Agent"))

    def noting_update(agent, *rows, update=agent_class.update):
        optimizer = agent.optimizer
        used.append(optimizer.lr.item() if "compile" in script else optimizer.param_groups[0]["lr"])
        update(agent, *rows)

    monkeypatch.setattr(agent_class, "update", noting_update)
    monkeypatch.setattr(module, "LOG_EVERY", 1)  # a line for each batch
    flags = (small if script in SCRIPTS else test_impala.small)("--learning-rate", 0.01)
    run = launch(script, *flags)
    before = [0, *(line["global_step"] for line in run.metrics[:-1])]
    expected = [0.01 * (1 - step / 300) for step in before for _ in range(len(used) // len(before))]
    assert used == pytest.approx(expected) and used[-1] < 0.002


@each_ray_script
def test_scores_of_atari_are_the_games_own_and_rewards_their_signs(monkeypatch, script):
    envpool, module, seen = pytest.importorskip("envpool"), importlib.import_module(script), []

    class Stepped(Counting):
        def step(self, action):
            self.send(action)
            seen.append(self.recv())
            return seen[-1]

    def make(env_id, env_type, num_envs, env_seed, episodic_life, reward_clip, **_):
        assert episodic_life and reward_clip and len(env_seed) == num_envs
        return Stepped(env_id, env_seed)

    monkeypatch.setattr(envpool, "make", make)
    envs = module.AtariEnvironments(module.Args(num_envs=3), 0, 0)
    for _ in range(40):
        step = envs.step(np.ones(3))
        _, reward, *_, info = seen[-1]
        assert (step["reward"] == reward).all() and (step["score"] == info["reward"]).all()
        assert (step["over"] == info["terminated"]).all()
    assert max(abs(info["reward"])) > 1 >= max(abs(reward))


@each_ray_script
def test_no_two_lives_of_actors_share_a_seed(script):
    module, drawn = importlib.import_module(script), []
    args = module.Args(cuda=False, env_id="CounterDiscrete-v0", num_envs=1)
    name = "make_network" if "impala" in script else "make_actor_critic"
    build = lambda: getattr(module, name)((3,), 3)  # noqa: E731
    for who in itertools.product(range(2), repeat=3):  # number, incarnation, step
        environments.Counter.forget()
        actor = module.Actor(args, module.GymEnvironments, build, module.act_discrete)
        actor.start(*who)
        drawn.append((environments.Counter.made[0].seed, actor.rng.random()))
    assert all(len({*each}) == 8 for each in zip(*drawn))
