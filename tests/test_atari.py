"""PPO for Atari: what its rollouts hold, its losses and updates, eager and compiled, its files, what it learns."""

import functools
import importlib
import itertools
import json
import math
import signal
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import tyro

import probes
from agents import (
    CPU,
    as_on_a_gpu,
    assert_each_row_once_an_epoch,
    assert_orthogonal,
    assert_same,
    compile_as_main_does,
    flat,
    flattened,
)
from conftest import read_run
from pools import Counting, Probing
from ppo_atari_envpool import group_size
from test_checkpoints import assert_equal, lines_of, resume

EAGER, COMPILED = "ppo_atari_envpool", "ppo_atari_envpool_torchcompile"
SCRIPTS = [EAGER, COMPILED]
CLASSES = {EAGER: "AtariPPOAgent", COMPILED: "CompiledAtariPPOAgent"}
each_script = pytest.mark.parametrize("script", SCRIPTS)
SMALL = ["--total-timesteps", 260, "--num-steps", 10, "--num-minibatches", 2, "--update-epochs", 2]
SMALL += ["--measure-burnin", 20]


class CoarseActorCritic(torch.nn.Module):
    """Instead of the scripts' own network, where only the bookkeeping is looked at: sees nine patches an image."""

    def __init__(self, actions):
        super().__init__()
        self.patches = torch.nn.Sequential(torch.nn.AvgPool2d(28), torch.nn.Flatten())
        self.actor, self.critic = torch.nn.Linear(36, actions), torch.nn.Linear(36, 1)

    def forward(self, observation):
        hidden = self.patches(observation / 255.0)
        return self.actor(hidden), self.critic(hidden).squeeze(-1)


@pytest.fixture
def play(launch, monkeypatch):
    """play(script, *flags): a run on scripted games, and what they have seen."""

    def play(script, *flags, **more):
        monkeypatch.setattr(importlib.import_module(script), "make_pool", Counting)
        monkeypatch.setattr(importlib.import_module(script), "AtariActorCritic", CoarseActorCritic)
        # As on a GPU
        monkeypatch.setattr(importlib.import_module(script), "group_size", lambda n, _: n if n % 2 else n // 2)
        Counting.forget()
        run = launch(script, *SMALL, *flags, env_id="Scripted-v5", **more)
        run.made, run.rows, run.games = list(Counting.made), list(Counting.rows), list(Counting.games)
        return run

    return play


# ---- What is recorded ----
@each_script
def test_a_stopped_run_goes_on(play, script):
    """With new games and new seeds; the rollout that was under way is lost, its steps count."""
    run = play(script, "--num-envs", 2, "--seed", 3, raises=SystemExit, stop_after=125)
    begun, seeds = run.summary["global_step"], [seed for pool in run.made for seed in pool.seeds]
    assert run.error.code == 130 and 125 <= begun < 130 and begun % 20 and run.summary["updates"] > 0
    checkpoint = torch.load(run.folder / "checkpoint.pt", weights_only=True)
    Counting.forget()
    resumed = resume(script, run.folder)
    assert_equal(resumed.run.loaded, {name: checkpoint["parts"][name] for name in resumed.run.loaded})
    assert not {seed for pool in Counting.made for seed in pool.seeds} & set(seeds)
    episodes, summary = lines_of(run.folder, "episodes"), json.loads((run.folder / "summary.json").read_text())
    assert episodes[: len(run.episodes)] == run.episodes
    games = [game | {"global_step": game["global_step"] + begun} for game in Counting.games]
    assert episodes[len(run.episodes) :] == games and len(games) > 3
    assert summary["global_step"] == len(Counting.rows) - sum(not row[-1] for row in Counting.rows) + begun >= 260
    assert summary["updates"] == run.summary["updates"] + len(Counting.rows) // 20 * 4
    steps = [line["global_step"] for line in lines_of(run.folder, "metrics")]
    assert steps == sorted(set(steps))


@each_script
@pytest.mark.parametrize("num_envs", [1, 3, 4])
def test_lives_time_limits_and_ends_of_games(play, script, num_envs):
    """Returns are the game's own, over all its lives; the steps that only reset count nowhere."""
    run = play(script, "--num-envs", num_envs, "--seed", 3)
    assert run.episodes == run.games and len(run.episodes) > 5
    assert {line["terminated"] for line in run.episodes} == {True, False}
    ends = [line["global_step"] for line in run.episodes]
    assert num_envs == 1 or len(set(ends)) < len(ends), "no two games ended at once"
    lost = sum(row[5] for row in run.rows) - sum(line["terminated"] for line in run.games)
    assert lost > 3 and sum(line["length"] for line in run.games) > sum(row[5] for row in run.rows)
    resets = sum(not row[-1] for row in run.rows)
    assert run.summary["global_step"] == len(run.rows) - resets >= 260 and resets > 20
    assert run.summary["episodes"] == len(run.games) and run.summary["status"] == "finished"
    returns = [line["return"] for line in run.games[-100:]]
    assert run.summary["episode_return"] == pytest.approx(np.mean(returns), abs=1e-3)
    halves = 2 if num_envs == 4 else 1
    assert [len(pool.seeds) for pool in run.made] == [num_envs // halves] * halves
    rollouts = len(run.rows) // num_envs // 10
    assert run.summary["updates"] == rollouts * 2 * 2 > 0
    losses = {"policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction"}
    assert losses < set(run.metrics[-1]) and all(math.isfinite(run.metrics[-1][name]) for name in losses)
    assert [line["global_step"] // 100 for line in run.metrics[:2]] == [1, 2]
    assert run.metrics[-1]["global_step"] == run.summary["global_step"]


@each_script
def test_the_rollout_holds_each_step_once_and_marks_resets(play, monkeypatch, script):
    agent_class, rollouts = getattr(importlib.import_module(script), CLASSES[script]), []
    prepare = agent_class.prepare

    def noting_prepare(agent):
        rows = {name: array.copy() for name, array in agent.rollout.arrays.items()}
        rows |= {name: agent.batch[name].view(10, 4).numpy().copy() for name in ("action", "log_prob", "value")}
        frames = agent.batch["observation"].unflatten(0, (10, 4)).numpy()
        rollouts.append(rows | {"code": frames[:, :, 0, 0, :3].copy()})
        prepare(agent)

    monkeypatch.setattr(agent_class, "prepare", noting_prepare)
    run = play(script, "--num-envs", 4, "--seed", 3)
    assert len(rollouts) >= 6
    whole = {name: np.concatenate([rollout[name] for rollout in rollouts]) for name in rollouts[0]}
    numbers = {}
    for pool in run.made:
        for i in range(len(pool.seeds)):
            numbers[pool, i] = len(numbers)
    seen = {n: 0 for n in numbers.values()}
    for pool, i, code, action, reward, terminated, truncated, valid in run.rows:
        n = numbers[pool, i]
        t, seen[n] = seen[n], seen[n] + 1
        if t >= len(whole["code"]):
            continue  # of a rollout that did not get full
        assert whole["code"][t, n].tolist() == list(code)
        assert whole["action"][t, n] == action and whole["valid"][t, n] == valid
        assert whole["reward"][t, n] == np.sign(reward)
        assert (whole["terminated"][t, n], whole["truncated"][t, n]) == (terminated, truncated)
    assert 0 < (whole["valid"] == 0).sum() < whole["valid"].size / 2
    assert len(np.unique(whole["log_prob"])) > 100 and len(np.unique(whole["value"])) > 100


@each_script
def test_one_half_emulates_while_the_policy_acts_for_the_other(play, monkeypatch, script):
    agent_class, in_flight = getattr(importlib.import_module(script), CLASSES[script]), []
    act = agent_class.act

    def noting_act(agent, *arguments):
        in_flight.append(sum(bool(pool.sent) for pool in Counting.made))
        return act(agent, *arguments)

    monkeypatch.setattr(agent_class, "act", noting_act)
    play(script, "--num-envs", 4, "--total-timesteps", 90)
    assert in_flight[:40] == [0, *[1] * 19] * 2  # of ten steps of two halves; a rollout begins when all have come


def test_halves_on_a_gpu_and_one_group_on_a_cpu():
    sizes = [[group_size(n, torch.device(kind)) for n in (1, 2, 5, 8, 1024)] for kind in ("cpu", "cuda")]
    assert sizes == [[1, 2, 5, 8, 1024], [1, 1, 5, 4, 512]]


@each_script
def test_same_seed_same_games(play, script):
    runs = [play(script, "--num-envs", 4, "--seed", seed) for seed in (3, 3, 4)]
    seeds = [[seed for pool in run.made for seed in pool.seeds] for run in runs]
    assert seeds[0] == seeds[1] and not set(seeds[0]) & set(seeds[2])
    assert runs[0].episodes == runs[1].episodes != runs[2].episodes
    names = ("policy_loss", "value_loss", "entropy")
    assert all(runs[0].metrics[-1][name] == runs[1].metrics[-1][name] for name in names)


def test_seeds_are_apart_and_those_of_the_other_version(play):
    seeds = {}
    for script, seed in itertools.product(SCRIPTS, (0, 1, 2, 2**32 - 1)):
        run = play(script, "--num-envs", 4, "--seed", seed, "--total-timesteps", 50)
        seeds[script, seed] = [seed for pool in run.made for seed in pool.seeds]
    ours, theirs = ([seeds[script, seed] for seed in (0, 1, 2, 2**32 - 1)] for script in SCRIPTS)
    assert ours == theirs and len(set(itertools.chain(*ours))) == 16
    assert all(0 <= seed < 2**31 for seed in itertools.chain(*ours))  # EnvPool takes no others


@each_script
@pytest.mark.parametrize(
    "flags",
    [
        ["--no-anneal-lr", "--no-norm-adv", "--no-clip-vloss", "--no-torch-deterministic", "--gamma", 0],
        ["--num-steps", 1, "--num-envs", 8, "--update-epochs", 1, "--num-minibatches", 1, "--gae-lambda", 0],
        ["--ent-coef", 0, "--vf-coef", 0, "--measure-burnin", 0, "--clip-coef", 0.2, "--max-grad-norm", 10],
        ["--learning-rate", 1e-3, "--target-kl", 1e-9, "--num-envs", 5, "--gae-lambda", 1],
    ],
    ids=lambda flags: " ".join(map(str, flags)),
)
def test_flags_in_their_other_position(play, script, flags):
    run = play(script, "--num-envs", 2, "--total-timesteps", 120, *flags)
    assert run.episodes == run.games and run.summary["updates"] > 0
    if "--target-kl" in flags:  # after the first epoch, with its last minibatch
        assert run.summary["updates"] == len(run.rows) // 5 // 10 * 2
    if "--no-anneal-lr" in flags:
        assert {line["learning_rate"] for line in run.metrics} == {2.5e-4}


@each_script
def test_the_learning_rate_falls_to_nearly_nothing(play, monkeypatch, script):
    """By the share of the steps that had been taken when a rollout began."""
    agent_class, used = getattr(importlib.import_module(script), CLASSES[script]), []
    learn, begun = agent_class.learn, [0]
    prepare = agent_class.prepare

    def noting_prepare(agent):
        begun.append(Counting.steps)
        prepare(agent)

    def noting_learn(agent):
        optimizer = agent.optimizer
        used.append(optimizer.lr.item() if script == COMPILED else optimizer.param_groups[0]["lr"])
        learn(agent)

    monkeypatch.setattr(agent_class, "prepare", noting_prepare)
    monkeypatch.setattr(agent_class, "learn", noting_learn)
    run = play(script, "--num-envs", 2, "--learning-rate", 0.01, "--total-timesteps", 200)
    assert used == pytest.approx([rate for step in begun[:-1] for rate in [0.01 * (1 - step / 200)] * 4])
    assert used[0] == pytest.approx(0.01) and used[-1] < 0.0015 and len(used) > 40
    assert run.metrics[-1]["learning_rate"] == pytest.approx(0.01 * (1 - begun[-1] / 200))  # of the rollout begun last


@each_script
def test_a_loss_that_is_not_finite_fails(play, monkeypatch, script):
    monkeypatch.setattr(Counting, "advance", lambda pool, i, action: (pool.image(i), float("nan"), False, False, False))
    run = play(script, raises=SystemExit)
    assert run.error.code.startswith("error: policy_loss is nan at step ") and run.summary["status"] == "failed"


def test_separate_memory_of_host_and_device_makes_the_same_run(play, monkeypatch):
    first = play(COMPILED, "--num-envs", 4)
    monkeypatch.setattr(importlib.import_module(COMPILED), "mirrored", as_on_a_gpu)
    second = play(COMPILED, "--num-envs", 4)
    assert first.episodes == second.episodes and len(first.episodes) > 5
    assert first.metrics[-1]["policy_loss"] == second.metrics[-1]["policy_loss"]


# ---- Advantages, losses, updates ----
def pair(**arguments):
    """An eager and a compiled agent with equal networks, and the same random rollout, in which the eager one acted."""
    made, sizes = [], {"num_envs": 3, "num_steps": 8, "num_minibatches": 3, "update_epochs": 2}
    for script in SCRIPTS:
        module = importlib.import_module(script)
        args = module.Args(**sizes | arguments)
        torch.manual_seed(0)
        with torch.set_grad_enabled(script == EAGER):
            made.append(getattr(module, CLASSES[script])(args, 4, args.num_envs, CPU))
    eager, compiled = made
    with torch.no_grad():
        for parameter in eager.network.parameters():  # far enough from the start for actions to differ in probability
            parameter.add_(0.02 * torch.randn_like(parameter))
    compiled.network.copy_(flat(eager.network))
    return eager, compiled


def fill(eager, compiled, generator):
    """A rollout of noise with ends and resets; both agents' own copies. Returns the last observation."""
    steps, num_envs = eager.args.num_steps, eager.args.num_envs
    valid = np.ones(num_envs)
    for t in range(steps):
        observation = generator.integers(0, 256, (num_envs, 4, 84, 84), np.uint8)
        eager.act(t, slice(0, num_envs), observation)
        terminated, truncated = (valid * (generator.random(num_envs) < 0.2) for _ in range(2))
        values = {"reward": generator.normal(size=num_envs), "terminated": terminated, "truncated": truncated}
        for name, value in (values | {"valid": valid}).items():
            eager.rollout.arrays[name][t] = compiled.rollout.arrays[name][t] = value
        valid = 1 - np.maximum(terminated, truncated)
    for name in ("observation", "action", "log_prob", "value"):
        compiled.batch[name].copy_(eager.batch[name])
    return generator.integers(0, 256, (num_envs, 4, 84, 84), np.uint8)


def prepare(eager, compiled, last):
    for agent in (eager, compiled):
        agent.rollout.upload()
        agent.observe(slice(0, agent.args.num_envs), last)
        with torch.no_grad():
            agent.prepare()


def patterns(steps):
    """All that rows can be: N(othing), T(erminated), C(ut short), B(oth); R(eset) after an end, or as the first."""
    rows = ["N", "T", "C", "B", "R"]
    for _ in range(steps - 1):
        rows = [row + letter for row in rows for letter in ("R" if row[-1] in "TCB" else "NTCB")]
    return rows


def test_advantages_of_every_pattern_of_ends_and_resets(monkeypatch):
    names, generator = patterns(6), np.random.default_rng(0)
    for script in SCRIPTS:  # images are not looked at here
        monkeypatch.setattr(importlib.import_module(script), "FRAMES", (1, 1, 1))
    eager, compiled = pair(num_steps=6, num_envs=len(names), num_minibatches=1)
    letters = np.array([list(name) for name in names]).T
    rows = {"terminated": np.isin(letters, ["T", "B"]), "truncated": np.isin(letters, ["C", "B"])}
    rows |= {"valid": letters != "R"}
    reward, value = (generator.normal(size=letters.shape).astype(np.float32) for _ in range(2))
    last_value = generator.normal(size=len(names)).astype(np.float32)
    for agent in (eager, compiled):
        for name, values in (rows | {"reward": reward}).items():
            agent.rollout.arrays[name][:] = values
        monkeypatch.setattr(agent, "policy_and_value", lambda *_: (None, torch.tensor(last_value)))
        agent.batch["value"].copy_(torch.tensor(value).flatten())
    eager.rollout.upload()
    eager.prepare()
    with torch.no_grad():
        compiled.prepare()
    following = np.concatenate([value[1:], last_value[None]])
    expected, compared = np.zeros(letters.shape), np.zeros(letters.shape, bool)
    for start, n in itertools.product(range(6), range(len(names))):
        for t in range(start, 6):  # sums of TD errors up to the episode's end, or the rollout's
            target = reward[t, n] + 0.99 * following[t, n] * (letters[t, n] not in "TB")
            expected[start, n] += (0.99 * 0.95) ** (t - start) * (target - value[t, n])
            if letters[t, n] in "TCB":
                break
        compared[start, n] = letters[start, n] != "R"
    assert len(names) == 314 and compared.mean() < 0.9
    for agent in (eager, compiled):
        advantage, returns = (agent.batch[name].view(letters.shape).numpy() for name in ("advantage", "return"))
        np.testing.assert_allclose(advantage[compared], expected[compared], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose((returns - value)[compared], expected[compared], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("garbage", [1e30, float("nan"), float("inf")])
@pytest.mark.parametrize("flags", [{}, {"norm_adv": False, "clip_vloss": False}])
def test_masked_rows_may_hold_anything(garbage, flags):
    """No loss, and no gradient, depends on the rows that only reset; it is the loss of the others alone."""
    eager, compiled = pair(**flags)
    last = fill(eager, compiled, np.random.default_rng(1))
    prepare(eager, compiled, last)
    batch = eager.batch
    masked = batch["valid"] == 0
    assert 2 < masked.sum() < 12
    polluted = {name: tensor.clone() for name, tensor in batch.items()}
    for name in ("log_prob", "value", "advantage", "return"):
        polluted[name][masked] = garbage
    polluted["observation"][masked] = 255
    polluted["action"][masked] = 0
    alone = {name: tensor[~masked] for name, tensor in batch.items()}
    results = []
    for each in (batch, polluted, alone):
        loss, logged = eager.ppo_loss(eager.network, each)
        parts = torch.autograd.grad(loss, list(eager.network.parameters()))
        results.append({"loss": loss, **logged, "gradient": torch.cat([part.flatten() for part in parts])})
        gradient, (loss, _) = torch.func.grad_and_value(compiled.ppo_loss, has_aux=True)(compiled.network, each)
        torch.testing.assert_close(loss, results[-1]["loss"].detach(), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(gradient, flattened(parts), rtol=1e-3, atol=1e-5)
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(results[2][name], value, rtol=1e-4, atol=1e-6)
    assert results[0]["gradient"].abs().max() > 1e-3


def test_a_minibatch_of_resets_alone_has_no_loss_and_no_gradient():
    eager, compiled = pair()
    prepare(eager, compiled, fill(eager, compiled, np.random.default_rng(1)))
    nothing = {name: tensor[:4] for name, tensor in eager.batch.items()} | {"valid": torch.zeros(4)}
    loss, logged = eager.ppo_loss(eager.network, nothing)
    assert loss.item() == 0 and all(value.item() == 0 for value in logged.values())
    assert all((part == 0).all() for part in torch.autograd.grad(loss, list(eager.network.parameters())))
    gradient, (loss, _) = torch.func.grad_and_value(compiled.ppo_loss, has_aux=True)(compiled.network, nothing)
    assert loss == 0 and (gradient == 0).all()


@pytest.mark.parametrize(
    "is_compiled, arguments",
    [(False, {}), (False, {"norm_adv": False, "clip_vloss": False, "max_grad_norm": 1e6}), (True, {})],
)
def test_an_update_phase_is_the_same_in_both_versions(is_compiled, arguments):
    """Epoch for epoch, approximate KL included: so `target_kl` ends it after the same one."""
    eager, compiled = pair(learning_rate=1e-3, **arguments)
    prepare(eager, compiled, fill(eager, compiled, np.random.default_rng(2)))
    for name in ("advantage", "return", "valid"):
        torch.testing.assert_close(compiled.batch[name], eager.batch[name], rtol=1e-4, atol=1e-5)
    assert eager.optimizer.defaults["eps"] == compiled.optimizer.eps == 1e-5
    compiled.learn, kl = compile_as_main_does(compiled.learn) if is_compiled else compiled.learn, []
    for _ in range(2):
        for rows in torch.randperm(24).chunk(3):
            eager.minibatch.copy_(rows)
            eager.learn()
            compiled.minibatch.copy_(rows)
            compiled.learn()
            assert_same(compiled.network, flat(eager.network))
            compiled.network.copy_(flat(eager.network))  # else a unit near 0 may once be on in one of them alone
        for name, loss in eager.losses.items():
            assert compiled.losses[name].item() == pytest.approx(loss.item(), rel=2e-3, abs=2e-5), name
        kl.append(eager.losses["approx_kl"].item())
    assert len(set(kl)) == 2


@each_script
def test_minibatches_have_each_row_once_an_epoch(launch, monkeypatch, script):
    flags = ["--num-steps", 12, "--num-envs", 2, "--total-timesteps", 50]
    monkeypatch.setattr(importlib.import_module(script), "make_pool", Counting)
    assert_each_row_once_an_epoch(launch, monkeypatch, script, CLASSES[script], 24, *flags, env_id="Scripted-v5")


@each_script
def test_actions_are_sampled_from_the_policy(script):
    eager, compiled = pair(num_envs=200, num_steps=4)
    observation = np.repeat(np.random.default_rng(0).integers(0, 256, (1, 4, 84, 84), np.uint8), 200, 0)
    with torch.no_grad():
        logits, value = eager.network(torch.tensor(observation[:1]))
        eager.network.actor.bias.add_(torch.tensor([1.0, 0, -1, 0]) - logits[0])
        compiled.network.copy_(flat(eager.network))
        logits, value = eager.network(torch.tensor(observation[:1]))
        chosen = []
        for t in range(4):
            chosen.append((eager if script == EAGER else compiled).act(t, slice(0, 200), observation).copy())
    chances = logits.softmax(1)[0].numpy()
    assert np.bincount(np.concatenate(chosen).astype(int), minlength=4) / 800 == pytest.approx(chances, abs=0.06)
    agent = eager if script == EAGER else compiled
    kept = {name: tensor.view(4, 200) for name, tensor in agent.batch.items() if tensor.ndim == 1}
    assert (kept["action"].numpy() == np.stack(chosen)).all()
    of_actions = logits.log_softmax(1)[0][kept["action"].long()]
    torch.testing.assert_close(kept["log_prob"], of_actions, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(kept["value"], value.expand(4, 200), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "script", [*SCRIPTS, *(name + end for name in ("impala_ray", "appo_ray") for end in ("", "_torchcompile"))]
)
def test_the_network_of_atari_is_that_of_mnih_et_al(script):
    network = importlib.import_module(script).AtariActorCritic(4)
    layers = [(type(layer).__name__, *getattr(layer, "weight", torch.zeros(0)).shape) for layer in network.trunk]
    relu = ("ReLU", 0)
    expected = [("Conv2d", 32, 4, 8, 8), relu, ("Conv2d", 64, 32, 4, 4), relu, ("Conv2d", 64, 64, 3, 3), relu]
    assert layers == [*expected, ("Flatten", 0), ("Linear", 512, 3136), relu]
    assert [layer.stride[0] for layer in network.trunk[:6:2]] == [4, 2, 1]
    assert_orthogonal(network)
    image = torch.randint(256, (2, 4, 84, 84), dtype=torch.uint8)
    torch.testing.assert_close(network(image)[1], network.critic(network.trunk(image / 255)).squeeze(1))


@each_script
def test_emulators_end_episodes_with_a_life_and_clip_rewards(monkeypatch, script):
    """Whatever the game: those that tests play pay 1 at most."""
    module, made = importlib.import_module(script), []
    monkeypatch.setattr(module.envpool, "make", lambda env_id, **options: made.append(options))
    module.make_pool("Pong-v5", [3, 9])
    options = {"env_type": "gymnasium", "num_envs": 2, "env_seed": [3, 9]}
    assert made == [options | {"episodic_life": True, "reward_clip": True}]


@pytest.mark.parametrize("options", [{}, {"norm_adv": False}, {"clip_vloss": False}])
@each_script
def test_the_loss_of_valid_rows_is_that_of_ppo(script, options):
    """Which is checked against APPO's; of a policy that has moved, with ratios and values on both sides of the clip."""
    names = ("log_prob", "value", "advantage", "return", "observation", "action")
    batch = {name: 0.3 * torch.randn(64) for name in names} | {"valid": torch.ones(64)}
    evaluated = (batch["log_prob"] + 0.3 * torch.randn(64), torch.rand(64), batch["value"] + 0.3 * torch.randn(64))
    module, ppo = importlib.import_module(script), importlib.import_module("ppo")
    shared = {"clip_coef": 0.2, "ent_coef": 0.02, "vf_coef": 0.7, "norm_adv": True, "clip_vloss": True} | options
    agent = SimpleNamespace(args=SimpleNamespace(**shared), clip_coef=torch.tensor(0.2), evaluate=lambda *_: evaluated)
    loss, logged = getattr(module, CLASSES[script]).ppo_loss(agent, None, batch)
    expected, theirs = ppo.PPOAgent.ppo_loss(agent, None, batch)
    assert 0 < logged["clip_fraction"] < 1
    torch.testing.assert_close(loss, expected)
    for name in theirs:
        torch.testing.assert_close(logged[name], theirs[name])


# ---- Compiled runs ----
def test_nothing_is_compiled_in_the_window_and_the_run_is_the_same(play, monkeypatch):
    module, seen = importlib.import_module(COMPILED), []
    flags = ["--num-envs", 4, "--seed", 5, "--target-kl", 0.02]
    plain = play(COMPILED, *flags)
    original, now, leave = torch.compile, module.Run.now, module.Run.__exit__
    guards_kept = lambda step, options, **more: original(  # noqa: E731
        step, options={**options, "guard_filter_fn": lambda guards: [True] * len(guards)}, **more
    )
    compilations = lambda: json.dumps(torch._dynamo.utils.counters)  # noqa: E731

    def noting_now(run):
        if run.global_step:
            seen.append(compilations())
        return now(run)

    def noting_exit(run, *error):
        seen.append(compilations())
        leave(run, *error)

    monkeypatch.setattr(torch, "compile", guards_kept)
    monkeypatch.setattr(module.Run, "now", noting_now)
    monkeypatch.setattr(module.Run, "__exit__", noting_exit)
    torch._dynamo.utils.counters.clear()
    run = play(COMPILED, *flags, "--compile")
    assert seen[0] == seen[1] and json.loads(seen[0])["stats"]["unique_graphs"] == 3
    assert run.episodes == plain.episodes and run.summary["updates"] == plain.summary["updates"] > 20
    assert run.summary["warmup_seconds"] > 0 and run.summary["variant"] == "compile"
    for name in ("policy_loss", "value_loss", "entropy"):
        assert run.metrics[-1][name] == pytest.approx(plain.metrics[-1][name], rel=1e-2, abs=1e-3)


# ---- EnvPool itself ----
@each_script
def test_the_emulator_keeps_the_rules_that_the_script_relies_on(script):
    """A life lost ends an episode but no game; the step after an end only resets; a time limit is no game over."""
    pool = importlib.import_module(script).make_pool("Breakout-v5", [11, 12])
    observation, _ = pool.reset()
    assert observation.shape == (2, 4, 84, 84) and observation.dtype == np.uint8 and pool.action_space.n == 4
    ends, was_over, steps = {"life": 0, "game": 0}, [False, False], [0, 0]
    generator = np.random.default_rng(0)
    for _ in range(900):
        pool.send(generator.integers(0, 4, 2).astype(np.float32))
        _, reward, terminated, truncated, info = pool.recv()
        for i in range(2):
            if was_over[i]:
                assert reward[i] == info["reward"][i] == 0 and not terminated[i] and not truncated[i]
            steps[i] += not was_over[i]
            assert reward[i] == np.sign(info["reward"][i])
            was_over[i] = bool(terminated[i] or truncated[i])
            if terminated[i]:
                ends["game" if info["terminated"][i] else "life"] += 1
                assert info["terminated"][i] == (info["lives"][i] == 0)
            assert info["elapsed_step"][i] == steps[i]
            if info["terminated"][i]:
                steps[i] = 0
    assert ends["game"] >= 4 and ends["life"] >= 4 * ends["game"]


@each_script
def test_a_time_limit_ends_a_game(monkeypatch, launch, script):
    module = importlib.import_module(script)
    limited = functools.partial(module.envpool.make, max_episode_steps=30)
    monkeypatch.setattr(module.envpool, "make", limited)
    run = launch(script, *SMALL, "--num-envs", 2, env_id="Pong-v5")
    assert len(run.episodes) == 8 and {line["length"] for line in run.episodes} == {30}
    assert not any(line["terminated"] for line in run.episodes)


@each_script
def test_the_command_line_of_leanrl(script):
    flags = ["--compile", "--cudagraphs"] if script == COMPILED else []
    args = tyro.cli(importlib.import_module(script).Args, args=["--seed", "1", "--total-timesteps", "50000", *flags])
    assert args.env_id == "Breakout-v5" and args.num_envs == 8 and args.total_timesteps == 50_000


@each_script
def test_a_process_of_its_own(start, tmp_path, script):
    process = start(f"{script}.py", "--env-id", "Pong-v5", *SMALL, "--num-envs", 2, cwd=tmp_path)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0 and err == "" and out.startswith("rollout: 0.6 MB on cpu\n")
    run = read_run(tmp_path / "runs")
    assert run.summary["status"] == "finished" and run.config["versions"]["envpool"]
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


@each_script
def test_ctrl_c(start, tmp_path, script):
    process = start(f"{script}.py", "--env-id", "Pong-v5", "--num-envs", 2, "--num-steps", 10, cwd=tmp_path)
    while not any("policy_loss" in path.read_text() for path in tmp_path.glob("runs/*/metrics.jsonl")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130 and err == "" and "interrupted at step" in out
    assert read_run(tmp_path / "runs").summary["status"] == "interrupted"


@each_script
@pytest.mark.parametrize(
    "env_id, nearest",
    [
        ("Breakot-v5", "Breakout-v5"),
        ("CartPole-v1", ""),
        ("HalfCheetah-v4", ""),
        ("", "none"),
        ("§", "none"),
    ],
)
def test_no_such_game(capsys, monkeypatch, tmp_path, script, env_id, nearest):
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(script)
    with pytest.raises(SystemExit) as caught:
        module.main(module.Args(env_id=env_id, cuda=False))
    out, err = capsys.readouterr()
    assert caught.value.code == 2 and out == "" and list(tmp_path.iterdir()) == []
    assert err.startswith(f"error: --env-id {env_id}: ") and "must be an Atari game" in err
    assert nearest in err.partition("nearest names: ")[2] and len(err.splitlines()) == 1
    assert "CartPole" not in err.partition("nearest names: ")[2]


# ---- Probes ----
@pytest.mark.parametrize(
    "script, probe",
    [
        *((COMPILED, f"{kind}Reward") for kind in ("Constant", "Delayed", "Observation", "Action", "Both")),
        *((EAGER, f"{kind}Reward") for kind in ("Delayed", "Both")),
    ],
)
def test_probe(monkeypatch, tmp_path, script, probe):
    module, agents = importlib.import_module(script), []
    make = getattr(module, CLASSES[script])
    monkeypatch.setattr(module, CLASSES[script], lambda *a: agents.append(make(*a)) or agents[0])
    monkeypatch.setattr(module, "make_pool", Probing)
    sizes = {"num_envs": 4, "num_steps": 8, "num_minibatches": 2, "update_epochs": 4, "learning_rate": 1e-3}
    args = module.Args(
        env_id=probe, total_timesteps=640, cuda=False, gamma=probes.GAMMA, output_dir=str(tmp_path), **sizes
    )
    module.main(args)
    (agent,) = agents

    def known(observation):
        image = torch.full((1, 4, 84, 84), round((observation + 1) * 127.5), dtype=torch.uint8)
        with torch.no_grad():
            logits, value = agent.policy_and_value(agent.network, image)
        return logits.softmax(1)[0, 1].item(), value.item()

    if probe == "ConstantReward":
        assert known(0)[1] == pytest.approx(1, abs=0.1)
    if probe == "DelayedReward":
        assert known(1)[1] == pytest.approx(1, abs=0.15)
        assert known(0)[1] == pytest.approx(probes.GAMMA, abs=0.15)
    if probe == "ObservationReward":
        assert known(1)[1] == pytest.approx(1, abs=0.2)
        assert known(-1)[1] == pytest.approx(-1, abs=0.2)
    if probe == "ActionReward":
        assert known(0)[0] > 0.9
    if probe == "BothReward":
        assert known(1)[0] > 0.9 and known(-1)[0] < 0.1
