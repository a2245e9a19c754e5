"""IMPALA: V-trace against an oracle, fragments that say what happened, and real Ray actors that go wrong."""

import contextlib
import copy
import functools
import importlib
import itertools
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import environments
from agents import flat, norm_of_first_gradient
from conftest import check_shared_memory, read_run, shared_memory

SCRIPTS = {"impala_ray": "IMPALAAgent", "impala_ray_torchcompile": "CompiledIMPALAAgent"}
CPU = torch.device("cpu")

APPO_SCRIPTS = {"appo_ray": "APPOAgent", "appo_ray_torchcompile": "CompiledAPPOAgent"}

each_script = pytest.mark.parametrize("script", SCRIPTS)


def arguments(script="impala_ray", **changed):
    return importlib.import_module(script).Args(**{"cuda": False, "num_envs": 2, "fragment_length": 6} | changed)


# ---- V-trace ----
def fragment_of(steps, ends, seed=0, spread=1.0):
    """Random rows in float64, [T, B]: `ends` says for each row 0, or "t", "b", "c" for terminated, both, truncated.

    The row after an end is not valid, as one that only resets.
    """
    rng = np.random.default_rng(seed)
    ends = np.array(ends).reshape(steps, -1)
    shape = ends.shape
    valid = np.ones(shape, bool)
    for t, b in itertools.product(range(1, steps), range(shape[1])):
        valid[t, b] = not (valid[t - 1, b] and ends[t - 1, b] in "tbc")
    terminated, truncated = np.isin(ends, ("t", "b")) & valid, np.isin(ends, ("c", "b")) & valid
    return {
        "value": rng.normal(size=(steps + 1, shape[1])),
        "ratio": np.exp(spread * rng.normal(size=shape)),
        "reward": rng.normal(size=shape),
        "terminated": terminated.astype(float),
        "truncated": truncated.astype(float),
        "valid": valid.astype(float),
    }


def vtrace(fragment, **changed):
    module = importlib.import_module("impala_ray")
    tensors = [torch.tensor(array) for array in fragment.values()]
    return [tensor.numpy() for tensor in module.vtrace(*tensors, arguments(**changed))]


def oracle(fragment, gamma=0.99, rho_clip=1.0, c_clip=1.0, trace_lambda=1.0):
    """V-trace's sum, term by term (Espeholt et al. 2018, eq. 1), for each valid row; zeros and values elsewhere."""
    value, ratio, reward, terminated, truncated, valid = fragment.values()
    steps, count = reward.shape
    target, advantage = value[:-1].copy(), np.zeros_like(reward)
    rho = np.minimum(ratio, rho_clip)
    for b, s in itertools.product(range(count), range(steps)):
        if not valid[s, b]:
            continue
        product = 1.0
        for t in range(s, steps):
            next_value = 0 if terminated[t, b] else value[t + 1, b]
            target[s, b] += product * rho[t, b] * (reward[t, b] + gamma * next_value - value[t, b])
            product *= gamma * trace_lambda * min(ratio[t, b], c_clip)
            if terminated[t, b] or truncated[t, b]:
                break
    for b, s in itertools.product(range(count), range(steps)):
        if valid[s, b]:
            last = s == steps - 1 or truncated[s, b]
            next_target = 0 if terminated[s, b] else value[s + 1, b] if last else target[s + 1, b]
            advantage[s, b] = rho[s, b] * (reward[s, b] + gamma * next_target - value[s, b])
    return target, advantage


def all_patterns(steps):
    return np.array(list(itertools.product("-tbc", repeat=steps))).T


@pytest.mark.parametrize(
    "clips",
    [
        {},
        {"rho_clip": 0.7, "c_clip": 1.3},
        {"rho_clip": 2.0, "c_clip": 0.5, "trace_lambda": 0.9},
        {"c_clip": 0.0},
        {"gamma": 1.0},
        {"gamma": 0.0},
    ],
)
def test_vtrace_is_the_oracles_sum(clips):
    """All patterns of terminations, truncations, and both at once, over 5 steps; and long fragments."""
    for fragment in (
        fragment_of(5, all_patterns(5)),
        fragment_of(64, np.random.default_rng(1).choice(list("-----tbc"), (64, 20)), seed=2),
        fragment_of(1, ["-", "t", "c"]),
    ):
        for ours, theirs in zip(vtrace(fragment, **clips), oracle(fragment, **clips), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-9)


def test_on_policy_vtrace_is_the_n_step_return():
    fragment = fragment_of(7, ["-"] * 7, spread=0)
    target, advantage = vtrace(fragment, gamma=0.9)
    value, reward = fragment["value"][:, 0], fragment["reward"][:, 0]
    for s in range(7):
        n_step = sum(0.9 ** (t - s) * reward[t] for t in range(s, 7)) + 0.9 ** (7 - s) * value[7]
        assert target[s, 0] == pytest.approx(n_step) and advantage[s, 0] == pytest.approx(n_step - value[s])


@pytest.mark.parametrize("trace_lambda", [1.0, 0.95])
def test_on_policy_the_values_change_is_gae(trace_lambda):
    """With λ = 1, the policy's advantage is, too."""
    fragment = fragment_of(6, all_patterns(6), spread=0)
    value, _, reward, terminated, truncated, valid = fragment.values()
    gae = np.zeros((7, reward.shape[1]))
    for t in reversed(range(6)):
        error = reward[t] + 0.99 * (1 - terminated[t]) * value[t + 1] - value[t]
        gae[t] = error + 0.99 * trace_lambda * (1 - np.maximum(terminated[t], truncated[t])) * gae[t + 1]
    target, advantage = vtrace(fragment, trace_lambda=trace_lambda)
    rows = valid > 0
    np.testing.assert_allclose((target - value[:-1])[rows], gae[:-1][rows], atol=1e-12)
    if trace_lambda == 1:
        np.testing.assert_allclose(advantage[rows], gae[:-1][rows], atol=1e-12)


def test_without_a_trace_it_is_one_step_td():
    fragment = fragment_of(6, all_patterns(4)[:1].repeat(6, 0))
    value, ratio, reward, terminated, _, valid = fragment.values()
    target, _ = vtrace(fragment, c_clip=0.0)
    td = value[:-1] + np.minimum(ratio, 1) * (reward + 0.99 * (1 - terminated) * value[1:] - value[:-1])
    np.testing.assert_allclose(target[valid > 0], td[valid > 0])


def test_episodes_in_a_row_equal_separate_ones():
    """Three steps that end, the row that resets, and two more."""
    for end in "tbc":
        whole = fragment_of(6, ["-", "-", end, "-", "-", "-"])
        first = {name: array[: 4 if name == "value" else 3] for name, array in whole.items()}
        second = {name: array[4:] for name, array in whole.items()}
        both = [np.concatenate(pair) for pair in zip(vtrace(first), vtrace(second))]
        for ours, theirs in zip(vtrace(whole), both, strict=True):
            np.testing.assert_allclose(ours[[0, 1, 2, 4, 5]], theirs, atol=1e-12)


def test_truncation_is_termination_with_the_last_value_paid_out():
    truncated, terminated = fragment_of(4, ["-", "-", "c", "-"]), fragment_of(4, ["-", "-", "t", "-"])
    terminated["reward"][2] += 0.99 * truncated["value"][3]
    for ours, theirs in zip(vtrace(truncated), vtrace(terminated), strict=True):
        np.testing.assert_allclose(ours[:3], theirs[:3])


def test_garbage_in_masked_rows_changes_nothing():
    fragment = fragment_of(6, all_patterns(6))
    clean = vtrace(fragment)
    masked, rows = fragment["valid"] == 0, fragment["valid"] > 0
    for name in ("ratio", "reward"):
        fragment[name][masked] = np.nan
    for ours, theirs in zip(vtrace(fragment), clean, strict=True):
        np.testing.assert_array_equal(ours[rows], theirs[rows])


# ---- The update ----
class Played:
    """An agent of `script`, an actor with its weights, and a batch of what that did in CartPole."""

    def __init__(self, script, **changed):
        self.module = importlib.import_module(script)
        self.args = arguments(script, **{"fragment_length": 40, "batch_fragments": 2} | changed)
        torch.manual_seed(3)
        self.agent = getattr(self.module, SCRIPTS[script])(self.args, (4,), 2, CPU)
        self.network = self.agent.module.module if "compile" in script else self.agent.network
        with torch.no_grad():  # a policy that has a preference
            for parameter in self.network.actor.parameters():
                parameter.mul_(30)
            if "compile" in script:
                self.agent.network.copy_(flat(self.agent.module.module))
        build = functools.partial(self.module.make_network, (4,), 2)
        self.actor = self.module.Actor(self.args, self.module.GymEnvironments, build, self.module.act_discrete)
        self.actor.start(0, 0, 0)
        weights = [weight.detach().numpy().copy() for weight in self.agent.weights()]
        for i in range(2):
            self.agent.batch.fill(i, self.actor.sample(weights, 0))
        self.agent.batch.upload()

    def loss(self, batch=None):
        return self.agent.impala_loss(self.agent.network, batch or self.agent.batch.tensors)

    def vector(self):
        return torch.cat([weight.detach().flatten() for weight in self.agent.weights()])


@each_script
def test_the_stored_log_probability_is_the_recomputed_one(script):
    """So at the same version the ratio is 1: also through updates with a learning rate of 0."""
    played = Played(script, learning_rate=1e-30)
    batch = played.agent.batch.tensors
    assert 0 < batch["valid"].mean() < 1
    for _ in range(3):
        observation = played.agent.observations(batch)
        log_prob, _, _ = played.agent.evaluate(played.agent.network, observation, batch["action"])
        rows = batch["valid"] > 0
        torch.testing.assert_close(log_prob[rows], batch["log_prob"][rows], atol=2e-6, rtol=0)
        assert log_prob[rows].exp().std() > 0.05
        with torch.no_grad() if "compile" in script else torch.enable_grad():
            played.agent.update()


@each_script
def test_at_lag_0_it_is_a2c(script):
    """Policy gradient with n-step advantages, squared error, entropy; by hand, from the batch's rows."""
    played = Played(script, value_scale=3.0)
    batch = {name: tensor.double() for name, tensor in played.agent.batch.tensors.items()}
    network = played.network.double()
    logits, value = network(batch["observation"])
    value = 3 * value
    log_probs = torch.log_softmax(logits[:-1], -1)
    rows = batch["valid"] > 0
    log_prob = log_probs.gather(-1, batch["action"][..., None].long()).squeeze(-1)
    returns, following = torch.zeros_like(value[:-1]), value[-1]
    for t in reversed(range(len(returns))):
        following = torch.where(batch["truncated"][t] > 0, value[t + 1], following)
        returns[t] = batch["reward"][t] + 0.99 * (1 - batch["terminated"][t]) * following
        following = returns[t]
    advantage = returns.detach() - value[:-1]
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    bonus = played.agent.args.ent_coef * entropy
    loss = (0.25 * advantage.square() - advantage.detach() * log_prob - bonus)[rows].mean()
    ours, _ = Played(script, value_scale=3.0).loss()
    assert ours.item() == pytest.approx(loss.item(), rel=1e-5)
    loss.backward()
    theirs = torch.cat([parameter.grad.flatten() for parameter in network.parameters()])
    other = Played(script, value_scale=3.0)
    if "compile" in script:
        gradient = torch.func.grad(lambda flat: other.agent.impala_loss(flat, other.agent.batch.tensors)[0])
        gradient = torch.cat([part.flatten() for part in other.agent.module.split(gradient(other.agent.network))])
    else:
        other.loss()[0].backward()
        gradient = torch.cat([parameter.grad.flatten() for parameter in other.network.parameters()])
    torch.testing.assert_close(gradient.double(), theirs, rtol=1e-4, atol=1e-6)


@each_script
@pytest.mark.parametrize("vtrace", [True, False])
def test_with_lag_the_loss_is_v_traces(script, vtrace):
    """After a change of the policy: targets and advantages by the oracle's sums, ratios of the new to the actor's."""
    played = Played(script, vtrace=vtrace, value_scale=3.0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in played.network.parameters():
            parameter.add_(0.03 * torch.randn(parameter.shape, generator=generator))
        if "compile" in script:
            played.agent.network.copy_(flat(played.agent.module.module))
    network = played.module.make_network((4,), 2).double()
    network.load_state_dict(played.network.state_dict())
    if "compile" in script:
        gradient = torch.func.grad(lambda flat: played.agent.impala_loss(flat, played.agent.batch.tensors)[0])(
            played.agent.network
        )
        gradient = torch.cat([part.flatten() for part in played.agent.module.split(gradient)])
    else:
        played.loss()[0].backward()
        gradient = torch.cat([parameter.grad.flatten() for parameter in played.network.parameters()])
    ours, logged = played.loss()

    args, batch = played.agent.args, {name: tensor.double() for name, tensor in played.agent.batch.tensors.items()}
    logits, value = network(batch["observation"])
    value = 3 * value
    log_probs, rows = torch.log_softmax(logits[:-1], -1), batch["valid"] > 0
    log_prob = log_probs.gather(-1, batch["action"][..., None].long()).squeeze(-1)
    ratio = (log_prob - batch["log_prob"]).exp().detach()
    assert ratio[rows].min() < 0.98 and ratio[rows].max() > 1.02
    fragment = {"value": value.detach(), "ratio": ratio if vtrace else torch.ones_like(ratio)}
    fragment |= {name: batch[name] for name in ("reward", "terminated", "truncated", "valid")}
    sums = oracle({name: tensor.numpy() for name, tensor in fragment.items()}, trace_lambda=args.trace_lambda)
    target, advantage = (torch.from_numpy(array) for array in sums)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    error = 0.5 * args.vf_coef * (value[:-1] - target).square()
    loss = (error - advantage * log_prob - args.ent_coef * entropy)[rows].mean()
    loss.backward()
    theirs = torch.cat([parameter.grad.flatten() for parameter in network.parameters()])
    assert ours.item() == pytest.approx(loss.item(), rel=1e-4)
    kl = (ratio - 1 - ratio.log())[rows].mean().item()
    assert logged["approx_kl"].item() == pytest.approx(kl, rel=1e-2)
    torch.testing.assert_close(gradient.double(), theirs, rtol=1e-3, atol=1e-5)


@each_script
def test_garbage_in_masked_rows_leaves_the_loss_unchanged(script):
    played = Played(script)
    before, _ = played.loss()
    batch = {name: tensor.clone() for name, tensor in played.agent.batch.tensors.items()}
    for name in ("action", "log_prob", "reward"):
        batch[name][batch["valid"] == 0] = torch.nan
    assert played.loss(batch)[0].item() == before.item()


@pytest.mark.parametrize("vtrace", [True, False])
def test_eager_and_compiled_updates_agree(vtrace):
    eager, compiled = (Played(script, vtrace=vtrace) for script in SCRIPTS)
    for name, tensor in eager.agent.batch.tensors.items():
        torch.testing.assert_close(tensor, compiled.agent.batch.tensors[name], rtol=0, atol=1e-6)
    before = eager.vector()
    for _ in range(5):
        eager.agent.update()
        with torch.no_grad():
            compiled.agent.update()
    assert (eager.vector() - before).abs().max() > 1e-3
    torch.testing.assert_close(eager.vector(), compiled.vector(), rtol=0, atol=1e-5)
    for name, loss in eager.agent.losses.items():
        torch.testing.assert_close(loss, compiled.agent.losses[name], rtol=1e-3, atol=1e-5)


def test_frames_are_stacked_as_the_emulator_does():
    """Frame by frame: a stack that the first frame of an episode fills, then moves on."""
    module = importlib.import_module("impala_ray")
    rng = np.random.default_rng(0)
    is_new = rng.random((30, 50)) < 0.2
    stack = [[-3, -2, -1, 0] for _ in range(50)]
    expected = [[list(frames) for frames in stack]]
    for t in range(30):
        for n in range(50):
            stack[n] = [t + 1] * 4 if is_new[t, n] else [*stack[n][1:], t + 1]
        expected.append([list(frames) for frames in stack])
    np.testing.assert_array_equal(module.stacked_frames(is_new, 4), np.array(expected) + 3)


@pytest.mark.parametrize("script", ["impala_ray", "impala_ray_torchcompile", "appo_ray", "appo_ray_torchcompile"])
def test_a_learner_sees_the_frames_stacked(script):
    module = importlib.import_module(script)
    agent = next(value for name, value in vars(module).items() if name.endswith("Agent") and value.__module__ == script)
    rng = np.random.default_rng(0)
    frames = torch.tensor(rng.integers(256, size=(9, 3, 84, 84)), dtype=torch.uint8)
    rows = torch.tensor(rng.integers(9, size=(6, 3, 4)))
    seen = agent.observations(SimpleNamespace(device=CPU), {"observation": frames, "frame": rows})
    expected = torch.stack([torch.stack([frames[rows[:, n, k], n] for k in range(4)], 1) for n in range(3)], 1)
    assert torch.equal(seen.to(torch.uint8), expected)
    if script == "impala_ray_torchcompile":
        assert seen.flatten(0, 1).is_contiguous(memory_format=torch.channels_last)


def test_frames_make_the_stacks_that_envpool_shows():
    """Through lives lost and games over; three games of Breakout, whose lives random play soon loses."""
    pytest.importorskip("envpool")
    module = importlib.import_module("impala_ray")
    args = arguments(env_id="Breakout-v5", num_envs=3, fragment_length=250)
    actor = module.Actor(
        args,
        module.AtariEnvironments,
        functools.partial(module.make_network, (4, 84, 84), 4),
        module.act_discrete,
    )
    actor.start(0, 0, 0)
    seen = []

    def act(network, observation, rng):
        seen.append(observation.copy())
        return rng.integers(4, size=3), np.zeros(3)

    actor.act = act
    weights = [parameter.detach().numpy().copy() for parameter in actor.network.parameters()]
    batch = module.Batch(args, (4, 84, 84), (), CPU)
    for version in range(2):
        fragment = actor.sample(weights, version)
        batch.fill(0, fragment)
        rows = batch.arrays["frame"]
        stacks = batch.arrays["observation"][rows, np.arange(3)[:, None]]
        np.testing.assert_array_equal(stacks, [*seen[250 * version :], actor.envs.observation])
    assert fragment["is_new"].sum() >= 1 and (~fragment["valid"]).sum() > fragment["is_new"].sum()


@each_script
@pytest.mark.parametrize("limit", [1e-3, 1e6])
def test_the_gradient_is_clipped(script, limit):
    agent = Played(script, max_grad_norm=limit).agent
    with torch.set_grad_enabled("compile" not in script):
        agent.update()
    norm = norm_of_first_gradient(agent.optimizer)
    assert norm == pytest.approx(limit, rel=1e-2) if limit < 1 else 2e-3 < norm < limit


# ---- Runs in one process ----
def small(*flags):
    return ["--total-timesteps", 300, "--num-envs", 3, "--fragment-length", 7, "--measure-burnin", 20, *flags]


@pytest.mark.parametrize("kind", ["Discrete", "Continuous"])
def test_a_fragment_is_what_happened(kind):
    """Each transition of the scripted environments is in a valid row, once, with the observation before and after."""
    module, args = importlib.import_module("appo_ray"), arguments("appo_ray", env_id=f"Counter{kind}-v0", num_envs=3)
    environments.Counter.forget()
    if kind == "Discrete":
        recipe = (module.GymEnvironments, lambda: module.make_actor_critic((3,), 3), module.act_discrete)
    else:
        recipe = (module.BoundedEnvironments, lambda: module.make_actor_critic((3,), (3,)), module.act_continuous)
    actor = module.Actor(args, *recipe)
    actor.start(0, 0, 0)
    network = actor.network
    weights = [tensor.detach().numpy().copy() for tensor in (*network.parameters(), *network.buffers())]
    fragments = [actor.sample(weights, version) for version in range(20)]
    assert [fragment["stamp"].tolist() for fragment in fragments] == [[0, 0, n, n] for n in range(20)]
    for i, env in enumerate(environments.Counter.made):
        episode, step, taken, total, has_ended = 0, 0, 0, 0.0, False
        for fragment in fragments:
            so_far = (0.0, 0) if has_ended else (total, step)
            assert (fragment["return_before"][i], fragment["length_before"][i]) == pytest.approx(so_far)
            for t in range(args.fragment_length):
                row = {name: fragment[name][t, i] for name in ("action", "reward", "terminated", "truncated", "valid")}
                assert row["valid"] == (not has_ended)
                if has_ended:  # this row only resets
                    assert not row["terminated"] and not row["truncated"]
                    episode, step, total, has_ended = episode + 1, 0, 0.0, False
                    continue
                before, after = fragment["observation"][t : t + 2, i]
                np.testing.assert_array_equal(before, environments.observation_of(env.key, episode, step))
                np.testing.assert_array_equal(after, environments.observation_of(env.key, episode, step + 1))
                action = row["action"] if kind == "Discrete" else environments.in_range(row["action"])
                np.testing.assert_array_equal(action, env.actions[taken])
                reward = environments.reward_of(env.key, episode, step, action)
                assert row["reward"] == reward
                step, taken, total = step + 1, taken + 1, total + reward
                has_ended = step == environments.length_of(env.key, episode)
                ending = environments.ending_of(env.key, episode) if has_ended else None
                assert row["terminated"] == (ending in ("terminated", "both"))
                assert row["truncated"] == (ending in ("truncated", "both"))
        assert taken == env.steps


@each_script
def test_files_say_what_the_environments_did(launch, script):
    run = launch(script, *small("--batch-fragments", 2))
    assert run.summary["status"] == "finished" and 300 <= run.summary["global_step"] <= 300 + 2 * 3 * 7
    assert run.summary["updates"] * 2 == run.summary["fragments_consumed"] == run.summary["fragments_delivered"]
    names = ("lag_min", "lag_mean", "lag_max", "fragments_lost", "actor_restarts")
    assert [run.summary[name] for name in names] == [0, 0, 0, 0, 0] and run.summary["bytes_per_second"] > 0
    assert sum(env.steps for env in run.made) == run.summary["global_step"]
    assert len(run.episodes) == len(run.finished) > 10
    by_length = lambda line: (line["length"], line["return"])  # noqa: E731
    seen = [{name: line[name] for name in ("return", "length", "terminated")} for line in run.episodes]
    assert sorted(seen, key=by_length) == sorted(run.finished, key=by_length)
    losses = {"policy_loss", "value_loss", "entropy", "approx_kl", "lag_min", "lag_mean", "lag_max"}
    assert all(losses <= set(line) for line in run.metrics) and run.metrics[-1]["approx_kl"] < 1e-5


@pytest.mark.parametrize("script", ["impala_ray", "impala_ray_torchcompile"])
def test_actors_take_a_networks_buffers(launch, monkeypatch, script):
    module, scales = importlib.import_module(script), []

    class ActorCritic(module.CategoricalActorCritic):
        def __init__(self, *sizes):
            super().__init__(*sizes)
            self.register_buffer("scale", torch.tensor(float(len(scales) + 1)))
            scales.append(self.scale)

        def forward(self, observation):
            return super().forward(self.scale * observation)

    monkeypatch.setattr(module, "CategoricalActorCritic", ActorCritic)
    assert launch(script, *small()).summary["updates"] > 0
    assert len(scales) == 2 and scales[1] == scales[0] == 1


def test_same_seed_same_run_and_both_versions_agree(launch):
    runs = [launch(script, *small("--seed", 7)) for script in ("impala_ray", "impala_ray", "impala_ray_torchcompile")]
    assert runs[0].episodes == runs[1].episodes == runs[2].episodes
    assert launch("impala_ray", *small("--seed", 8)).episodes != runs[0].episodes


def test_compiled_once_and_the_same_run(launch, monkeypatch):
    """With --compile: one graph, none in the window of fps, and the losses of the run without it."""
    module, script, seen = importlib.import_module("impala_ray_torchcompile"), "impala_ray_torchcompile", []
    monkeypatch.setattr(module, "LOG_EVERY", 20)
    eager = launch(script, *small())
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    publish = module.Fleet.publish

    def publish_and_count(fleet, weights):
        seen.append(
            copy.deepcopy({name: dict(counts) for name, counts in torch._dynamo.utils.counters.items() if counts})
        )
        publish(fleet, weights)

    monkeypatch.setattr(module.Fleet, "publish", publish_and_count)
    compiled = launch(script, *small("--compile"))
    assert seen[0]["stats"]["unique_graphs"] == 1 and "graph_break" not in seen[0] and seen[0] == seen[-1]
    assert compiled.summary["variant"] == "compile" and compiled.summary["warmup_seconds"] > 0
    assert len(seen) == 1 + compiled.summary["updates"] and compiled.summary["updates"] > 10
    assert [line["length"] for line in compiled.episodes] == [line["length"] for line in eager.episodes]
    assert all(line["approx_kl"] < 1e-5 for line in compiled.metrics)  # the actor's log-probabilities are the learner's
    for ours, theirs in zip(compiled.metrics, eager.metrics, strict=True):
        for name in ("policy_loss", "value_loss", "entropy"):
            assert ours[name] == pytest.approx(theirs[name], rel=5e-3, abs=1e-3)


def test_a_forced_lag_is_kept(launch):
    """Weights are that many versions old once there are as many."""
    run = launch("impala_ray", *small("--forced-lag", 4))
    assert (run.summary["lag_min"], run.summary["lag_max"]) == (0, 4)
    assert [run.metrics[-1][name] for name in ("lag_min", "lag_mean", "lag_max")] == [4, 4, 4]
    updates = run.summary["updates"]
    assert run.summary["lag_mean"] == pytest.approx((0 + 1 + 2 + 3 + 4 * (updates - 4)) / updates, abs=1e-3)


@pytest.mark.parametrize("script", [*SCRIPTS, "appo_ray", "appo_ray_torchcompile"])
def test_a_line_of_metrics_has_the_lags_of_its_batch(launch, monkeypatch, script):
    module, lags = importlib.import_module(script), itertools.cycle([5, 2, 2])

    def take(fleet, take=module.Fleet.take):
        fragment = take(fleet)
        fleet.lags[-1] = next(lags)
        return fragment

    monkeypatch.setattr(module.Fleet, "take", take)
    sizes = ["--num-envs", 4, "--fragment-length", 8, "--batch-fragments", 3]
    run = launch(script, "--total-timesteps", 400, *sizes)
    found = [[line[name] for name in ("lag_min", "lag_mean", "lag_max")] for line in run.metrics]
    assert found == [[2, 3, 5]] * len(found) and found


@each_script
def test_what_is_no_number_ends_a_run_in_one_process(launch, script):
    run = launch(script, *small(), env_id="NaNReward", raises=SystemExit)
    assert run.summary["status"] == "failed" and "reward is not finite" in run.error.code


def test_a_reward_that_float32_cannot_hold_is_none():
    module, args = importlib.import_module("impala_ray"), arguments(env_id="CounterDiscrete-v0")
    actor = module.Actor(
        args, module.GymEnvironments, functools.partial(module.make_network, (3,), 3), module.act_discrete
    )
    for life, reward in enumerate((3e38, -3e38, 1e39, -1e39, math.nan)):
        actor.start(0, life, 0)
        weights, step = [parameter.detach().numpy().copy() for parameter in actor.network.parameters()], actor.envs.step
        rewards = {"reward": np.full(args.num_envs, reward)}
        actor.envs.step = lambda action, step=step, rewards=rewards: step(action) | rewards
        if abs(reward) < 3.4e38:
            actor.sample(weights, 0)
        else:
            with pytest.raises(module.RunError, match="the environment's reward is not finite"):
                actor.sample(weights, 0)


@pytest.mark.parametrize("script", [*SCRIPTS, "appo_ray", "appo_ray_torchcompile"])
def test_weights_that_are_no_numbers_end_a_run(launch, monkeypatch, script):
    """Though the loss was one, and no actor is to blame; between two lines of metrics, too."""
    module, agent_class = importlib.import_module(script), {**SCRIPTS, **APPO_SCRIPTS}[script]
    agent_class = getattr(module, agent_class)
    weights = agent_class.weights

    def weights_and_nan(agent):
        found = [weight.detach().clone() for weight in weights(agent)]
        found[-1].view(-1)[0] *= torch.nan if agent.losses["entropy"] else 1  # after the first update
        return found

    monkeypatch.setattr(agent_class, "weights", weights_and_nan)
    flags = ["--num-envs", 2, *(["--num-minibatches", 2] if "appo" in script else [])]
    run = launch(script, *small(*flags), raises=SystemExit)
    assert run.summary["status"] == "failed" and run.summary["updates"] > 0 and run.summary["global_step"] < 100
    assert f"policy is not finite at step {run.summary['global_step']}" in run.error.code


@each_script
def test_resume_goes_on(launch, monkeypatch, script):
    """With the weights and the optimiser of the checkpoint, in new episodes, with other random numbers; on another
    cluster, too. The summary counts what was before, too."""
    run = launch(script, *small())
    module, numbers = importlib.import_module(script), []
    begin = module.Actor.start

    def begin_and_draw(actor, **who):
        begin(actor, **who)
        numbers.append(copy.deepcopy(actor.rng).random())

    monkeypatch.setattr(module.Actor, "start", begin_and_draw)
    launch(script, *small())
    config = run.config | {"resume": str(run.folder), "total_timesteps": 400, "actor_timeout": 30}
    module.main(module.Args(**{name: config[name] for name in module.Args.__dataclass_fields__}))
    again = read_run(run.folder.parent)
    assert again.summary["resumed_at"] == [run.summary["global_step"]] and again.summary["global_step"] >= 400
    assert len(numbers) == len({*numbers}) == 2 and again.config["actor_timeout"] == 30
    for summary in (run.summary, again.summary):
        fragments = summary["updates"] * config["batch_fragments"]
        assert summary["fragments_delivered"] == summary["fragments_consumed"] == fragments
        assert summary["lag_min"] == summary["lag_mean"] == summary["lag_max"] == 0 < summary["bytes_per_second"]
    assert again.summary["updates"] > run.summary["updates"]


@each_script
def test_a_batch_that_is_cut_is_never_counted_as_learned_from(launch, monkeypatch, script):
    """Neither when the run is stopped in it nor after --resume, which begins another and counts it as lost."""
    module, takes = importlib.import_module(script), []

    def take(fleet, take=module.Fleet.take):
        takes.append(None)
        if len(takes) == 6:
            raise KeyboardInterrupt
        return take(fleet)

    monkeypatch.setattr(module.Fleet, "take", take)
    run = launch(script, *small(), "--batch-fragments", 2, raises=SystemExit)
    assert run.summary["status"] == "interrupted"
    assert (run.summary["fragments_delivered"], run.summary["fragments_consumed"]) == (5, 4)
    config = run.config | {"resume": str(run.folder)}
    module.main(module.Args(**{name: config[name] for name in module.Args.__dataclass_fields__}))
    summary = read_run(run.folder.parent).summary
    assert summary["status"] == "finished"
    assert summary["fragments_consumed"] == 2 * summary["updates"] == summary["fragments_delivered"]
    assert summary["fragments_lost"] == 1


def test_a_ledger_that_goes_on_keeps_its_mean_lag():
    ledger, again = (importlib.import_module("impala_ray").Ledger() for _ in range(2))
    for lag in (0, 1, 2, 5, 7):
        ledger.deliver(lag, 100)
    ledger.consumed, ledger.lost = 3, 4
    again.load_state_dict(ledger.state_dict())
    expected = ledger.summary() | {"fragments_delivered": 3, "fragments_lost": 6}
    assert again.summary() == expected and expected["lag_mean"] == 3


def test_only_ray_s_processes_of_a_session_are_ended(tmp_path):
    """Not what shows its logs, nor what an environment has started, which writes there, too; nor another session's."""
    module, processes = importlib.import_module("impala_ray"), {}
    for name, folder in (("raylet", "s"), ("ray::Agent", "s"), ("raylet", "s2"), ("sh", "s"), ("/x/ray/sim", "s")):
        (tmp_path / folder).mkdir(exist_ok=True)
        with open(tmp_path / folder / "raylet.out", "a") as log:
            command = [name, "-c", "sleep 60 & wait", "/ray/raylet"]
            process = subprocess.Popen(command, executable="/bin/sh", stdout=log, start_new_session=True)
        processes[name, folder] = process
    try:
        module.end_ray_processes(str(tmp_path / "s"))
        ended = {key for key, process in processes.items() if key[0].startswith("ray") and key[1] == "s"}
        for key in ended:
            assert processes[key].wait(10) == -signal.SIGKILL
        assert all(process.poll() is None for key, process in processes.items() if key not in ended)
    finally:
        for process in processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


# ---- Runs with Ray ----
@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Ray on this machine: the learner's node, which has no place for actors, and one with two places."""
    held = tmp_path_factory.mktemp("held")
    settings = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "LEANRL_TEST_LEARNER": str(os.getpid())}
    settings |= {"LEANRL_TEST_HELD": str(held)}
    settings["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        import ray
        from ray.cluster_utils import Cluster

        patch.syspath_prepend(Path(__file__).parent.parent / "benchmarks")
        from ray_vector_env import reread_environment

        reread_environment()  # a test before may have had Ray with other settings in this process
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": 10**8})
        cluster.held = held  # where environments have their files until they are closed
        cluster.actors_node = cluster.add_node(num_cpus=2, object_store_memory=10**8)
        ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
        yield cluster
        ray.shutdown()
        cluster.shutdown()


class Taken(list):
    """Stamps of fragments; `steps` is how many steps of environments are in them, `calls` the most an actor had, `down`
    how many actors had failed and were not back when the last was taken."""

    steps = calls = down = 0


@pytest.fixture
def taken(monkeypatch):
    """The stamps of all fragments that a run's learner takes, in their order."""
    stamps = Taken()
    for name in ("impala_ray", "impala_ray_torchcompile", "appo_ray", "appo_ray_torchcompile"):
        module = importlib.import_module(name)

        def take(fleet, take=module.Fleet.take):
            fragment = take(fleet)
            stamps.append(tuple(fragment["stamp"].tolist()))
            stamps.steps += int(fragment["valid"].sum())
            stamps.down = sum(seat.failures > 0 and not seat.is_ready for seat in fleet.seats)
            return fragment

        def receive(fleet, seat, receive=module.Fleet.receive):
            stamps.calls = max(stamps.calls, len(seat.calls))
            return receive(fleet, seat)

        monkeypatch.setattr(module.Fleet, "take", take)
        monkeypatch.setattr(module.Fleet, "receive", receive)
    return stamps


def fleet_flags(*flags):
    """Two actors, whose fragments of 30 steps are small."""
    return ["--num-actors", 2, "--num-envs", 3, "--fragment-length", 10, "--measure-burnin", 0, *flags]


def check_ledger(run, taken, lost_versions=0, down=0):
    """What holds in each run with actors, whatever went wrong; `down` more failed and were not back at its end.

    A failure, and weights that are lost, cost the calls in flight.
    """
    summary, last = run.summary, {}
    for number, incarnation, sequence, _ in taken:
        last[number, incarnation] = max(sequence, last.get((number, incarnation), -1))
    assert len({stamp[:3] for stamp in taken}) == len(taken) == summary["fragments_delivered"]
    assert taken.calls <= 2
    gaps = sum(sequence + 1 for sequence in last.values()) - len(taken)
    assert 0 <= gaps <= summary["fragments_lost"]
    assert 0 <= summary["fragments_delivered"] - summary["fragments_consumed"] <= 1
    failures = summary["actor_restarts"] + max(down, taken.down) + run.config["num_actors"] * lost_versions
    assert summary["fragments_lost"] <= 2 * failures
    assert summary["global_step"] == taken.steps, "steps of no other fragments count"
    # On average a call waits for no more versions than there are calls in flight
    assert 0 <= summary["lag_min"] <= summary["lag_mean"] <= run.config["forced_lag"] + 2 * run.config["num_actors"]
    assert summary["lag_max"] <= run.config["forced_lag"] + run.config["max_lag"]
    assert sum(line["length"] for line in run.episodes) <= summary["global_step"]
    return summary


@pytest.mark.parametrize(
    "script, name",
    [
        ("impala_ray", "Sound"),
        ("impala_ray_torchcompile", "Sound"),
        ("appo_ray", "SoundContinuous"),
        ("appo_ray_torchcompile", "SoundContinuous"),
    ],
)
def test_actors_of_rays_play(launch, cluster, taken, script, name):
    for left in cluster.held.iterdir():
        left.unlink()
    flags = fleet_flags("--total-timesteps", 3000, *(["--num-minibatches", 3] if "appo" in script else []))
    run = launch(script, *flags, env_id=f"ray_environments:{name}-v0")
    assert not any(cluster.held.iterdir()), "all environments have been closed"
    summary = check_ledger(run, taken)
    assert summary["updates"] == summary["fragments_consumed"] * (12 if "appo" in script else 1)
    assert summary["status"] == "finished" and summary["fragments_lost"] == summary["actor_restarts"] == 0
    assert taken.calls == 2, "while one fragment is learned from the next is made"
    assert {line["return"] for line in run.episodes} == {10.0} and {line["length"] for line in run.episodes} == {10}
    assert summary["lag_mean"] > 0 and summary["bytes_per_second"] > 0


@pytest.mark.parametrize("script", ["impala_ray", "appo_ray"])
def test_actors_of_rays_play_atari(launch, cluster, taken, script):
    flags = ["--num-actors", 2, "--num-envs", 2, "--fragment-length", 8, "--total-timesteps", 200]
    run = launch(script, *flags, "--batch-fragments", 2, env_id="Breakout-v5")
    summary = check_ledger(run, taken)
    assert summary["status"] == "finished" and summary["updates"] > 0  # by one actor, should the other start late
    assert summary["bytes_per_second"] > 0 and summary["global_step"] >= 200


@pytest.mark.parametrize(
    "name, cause",
    [
        ("Dying", "is dead or out of reach, and is asked again or replaced: "),
        ("Raising", "RuntimeError: the emulator broke down (/"),  # and where
        ("NaN", "RunError: the environment's reward is not finite"),
        ("Hanging", "hangs: no answer for 2 s (--actor-timeout); if"),
        ("Stopped", "hangs: no answer for 2 s"),
    ],
)
def test_training_goes_on_when_actors_fail(launch, cluster, taken, name, cause):
    """Each process takes 256 steps before it fails: more than two of them are needed."""
    flags = fleet_flags("--total-timesteps", 900, "--actor-timeout", 2 if "hangs" in cause else 60)
    run = launch("impala_ray", *flags, env_id=f"ray_environments:{name}-v0")
    summary = check_ledger(run, taken)
    assert summary["status"] == "finished" and summary["actor_restarts"] >= 1 and summary["fragments_lost"] >= 1
    assert {line["return"] for line in run.episodes} == {10.0}
    lines = [line for line in run.err.splitlines() if "actor" in line]
    assert lines and all(cause in line for line in lines) and len(lines) <= 2 * summary["fragments_lost"]


@pytest.mark.parametrize(
    "name, cause",
    [
        ("Unstartable", "failed: RuntimeError: --env-id ray_environments:Unstartable-v0: "),
        ("Exiting", "failed: RuntimeError: --env-id: the emulator is not there"),
        ("Crashing", "dies while it starts, or is out of reach: "),
    ],
)
def test_an_environment_that_never_starts_ends_the_run(launch, cluster, name, cause):
    flags = fleet_flags("--total-timesteps", 900, "--num-actors", 1)
    run = launch("impala_ray", *flags, env_id=f"ray_environments:{name}-v0", raises=SystemExit)
    assert run.summary["status"] == "failed" and run.summary["global_step"] == 0
    assert run.error.code.startswith("error: every actor fails time and again; the last cause: actor 0 ")
    assert cause in run.error.code and run.err.count(f"step 0: actor 0 {cause}") == 3, run.err


@pytest.mark.parametrize("how", ["killed", "broken"])
def test_the_spare_actor_takes_the_seat_of_a_lost_one(launch, cluster, taken, monkeypatch, how):
    """At once, as it stands by; a killed one that Ray has restarted, or else a new one, is then the spare one."""
    import ray

    module, deadline = importlib.import_module("impala_ray"), time.monotonic() + 300
    lost, seats, spares = [], [], []  # the number of the lost one's seat; who holds it, and who stands by, in turn

    def take(fleet, take=module.Fleet.take):
        fragment = take(fleet)
        assert time.monotonic() < deadline, (lost, seats, spares)
        seat = next(seat for seat in fleet.seats if seat.number in lost or not lost)
        if seat.is_ready and fleet.spare.is_ready and fleet.spare.actor._actor_id not in spares:
            seats.append(seat.actor._actor_id)
            spares.append(fleet.spare.actor._actor_id)
            if lost:
                fleet.args.total_timesteps = fleet.run.global_step  # seen
            else:
                lost.append(seat.number)
                call = seat.actor.__ray_call__
                if how == "killed":
                    os.kill(ray.get(call.remote(lambda actor: os.getpid())), signal.SIGKILL)
                else:
                    ray.get(call.remote(lambda actor: vars(actor).update(envs=None)))
        return fragment

    monkeypatch.setattr(module.Fleet, "take", take)
    node = cluster.add_node(num_cpus=1, object_store_memory=10**8)
    try:
        run = launch("impala_ray", *fleet_flags("--total-timesteps", 10**9), env_id="ray_environments:Sound-v0")
        while ray.available_resources().get("CPU", 0) < 3:  # the spare one has to end, too
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        cluster.remove_node(node)
    summary = check_ledger(run, taken)
    assert summary["status"] == "finished" and summary["actor_restarts"] == 1 <= summary["fragments_lost"]
    assert seats[1] == spares[0] != spares[1] and (spares[1] == seats[0]) == (how == "killed")
    cause = "is dead or out of reach, and is asked again or replaced: " if how == "killed" else "failed: AttributeError"
    assert f": actor {lost[0]} {cause}" in run.err and len(run.err.splitlines()) == 1


@pytest.mark.parametrize("script", ["impala_ray", "appo_ray"])
def test_fragments_under_way_are_left_so_that_slow_environments_are_closed(launch, cluster, taken, script):
    """A fragment takes 6.6 s. The run ends with the second, when its actor has just begun another."""
    for left in cluster.held.iterdir():
        left.unlink()
    flags = fleet_flags("--fragment-length", 24, "--total-timesteps", 72)
    flags += ["--num-minibatches", 3] if script == "appo_ray" else []
    run = launch(script, *flags, env_id="ray_environments:Slow-v0")
    assert run.summary["status"] == "finished" and len(taken) == 2 and run.err == ""
    assert not any(cluster.held.iterdir()), "all environments have been closed"


@pytest.mark.parametrize("how", ["cancelled", "raised"])
def test_an_actor_whose_call_is_cancelled_or_raises_carries_out_no_other(how):
    """It would keep `close` waiting."""
    module, args = importlib.import_module("impala_ray"), arguments(env_id="CounterDiscrete-v0")
    actor = module.Actor(args, module.GymEnvironments, lambda: module.make_network((3,), 3), module.act_discrete)
    actor.start(0, 0, 0)
    weights = [parameter.detach().numpy().copy() for parameter in actor.network.parameters()]
    steps, step = [], actor.envs.step

    def third_fails(action):
        steps.append(action)
        if how == "raised" and len(steps) == 3:
            raise OSError("the emulator broke down")
        return step(action)

    actor.envs.step = third_fails
    if how == "cancelled":
        asked = iter([False, False, False, True])
        actor.is_cancelled = lambda: next(asked, False)
        assert actor.sample(weights, 0) == {}
    else:
        with pytest.raises(OSError, match="broke down"):
            actor.sample(weights, 0)
    assert actor.sample(weights, 0) == {} and len(steps) == 3
    assert actor.ready(0, 1, 0) == 1, "should it be asked to go on nevertheless"
    assert [actor.sample(weights, 0)["stamp"].tolist() for _ in range(2)] == [[0, 1, 0, 0], [0, 1, 1, 0]]
    actor.close()


def test_an_actor_that_was_only_out_of_reach_may_get_another_seat():
    """In its own it goes on as it was; in another it begins anew."""
    module, args = importlib.import_module("impala_ray"), arguments(env_id="CounterDiscrete-v0")
    build = functools.partial(module.make_network, (3,), 3)
    actor = module.Actor(args, module.GymEnvironments, build, module.act_discrete)
    before = os.nice(0)
    try:
        assert actor.stand_by() is None and actor.envs is None
        assert actor.ready(0, 5, 0) == 5
        envs, weights = actor.envs, [parameter.detach().numpy().copy() for parameter in actor.network.parameters()]
        assert actor.sample(weights, 7)["stamp"].tolist() == [0, 5, 0, 7]
        assert actor.ready(0, 6, 0) == 5 and actor.envs is envs
        assert actor.sample(weights, 8)["stamp"].tolist() == [0, 5, 1, 8]
        actor.returns[:], actor.lengths[:] = 9, 9  # its episodes are under way
        assert actor.ready(1, 3, 0) == 3 and actor.envs is not envs and not (actor.returns.any() or actor.lengths.any())
        assert all(env.unwrapped.is_closed for env in envs.envs)
        assert actor.sample(weights, 8)["stamp"].tolist() == [1, 3, 0, 8]
    finally:
        assert os.nice(0) == before + 4, "once"
        os.setpriority(os.PRIO_PROCESS, 0, before)


def test_a_start_that_failed_is_made_again():
    module, args, attempts = importlib.import_module("impala_ray"), arguments(env_id="CounterDiscrete-v0"), []

    def make_envs(*args):
        attempts.append(args)
        if len(attempts) == 1:
            raise OSError("the emulator is busy")
        return module.GymEnvironments(*args)

    build, before = functools.partial(module.make_network, (3,), 3), os.nice(0)
    actor = module.Actor(args, make_envs, build, module.act_discrete)
    try:
        with pytest.raises(OSError, match="busy"):
            actor.ready(0, 0, 0)
        assert actor.ready(0, 1, 0) == 1 and len(attempts) == 2
    finally:
        os.setpriority(os.PRIO_PROCESS, 0, before)


@pytest.fixture
def fleet():
    """A fleet of two that are at work, on a Ray that only notes what it is asked for: `made`, `killed`, `cpus`."""

    class Remote:
        def __init__(self, *recipe):
            self.stand_by = SimpleNamespace(remote=object)

    module = importlib.import_module("impala_ray")
    recipe = (module.GymEnvironments, functools.partial(module.make_network, (3,), 3), module.act_discrete)
    fleet = module.Fleet(arguments(num_actors=2), SimpleNamespace(about={}), module.Ledger(), *recipe)
    fleet.made, fleet.killed, fleet.cpus = [], [], 1

    def make(*recipe):
        fleet.made.append(Remote(*recipe))
        return fleet.made[-1]

    fleet.remote = SimpleNamespace(remote=make)
    fleet.done, fleet.answers, fleet.ask_head = [], {}, lambda **_: None

    def wait(references, num_returns=1, timeout=None, fetch_local=True):
        """As Ray's: which of several that are done it takes is its own affair, the order is that of the references."""
        done = [reference for reference in references if reference in fleet.done]
        done = done[-num_returns:]
        return done, [reference for reference in references if reference not in done]

    fleet.ray = SimpleNamespace(available_resources=lambda: {"CPU": fleet.cpus}, kill=fleet.killed.append, wait=wait)
    fleet.ray.exceptions, fleet.ray.get = importlib.import_module("ray").exceptions, fleet.answers.get
    for seat in fleet.seats:
        seat.is_ready, seat.actor = True, make()
    fleet.made.clear()
    return fleet


def test_when_a_spare_actor_is_made(fleet):
    """Once all are at work and a processor is free, and only on a Ray of its own."""
    fleet.seats[1].is_ready = False
    fleet.tend_spare()
    fleet.seats[1].is_ready, fleet.args.ray_address = True, "127.0.0.1:6379"
    fleet.tend_spare()
    fleet.args.ray_address, fleet.cpus = None, 0.5
    fleet.tend_spare()
    fleet.cpus = 1
    fleet.tend_spare()
    assert fleet.made == [] and fleet.spare.retry_at == 30
    fleet.clock = 30.0
    fleet.tend_spare()
    fleet.tend_spare()
    assert fleet.made == [fleet.spare.actor] and len(fleet.spare.calls) == 1


def test_no_spare_actor_is_asked_for_without_a_head(fleet):
    """Ray would wait for one, and in the end take this process with it."""
    with contextlib.closing(socket.socket()) as unused:
        unused.bind(("127.0.0.1", 0))
        fleet.head = unused.getsockname()
    del fleet.ask_head
    fleet.ray.available_resources = pytest.fail
    for _ in range(3):
        fleet.tend_spare()
    assert fleet.made == [] and fleet.head_failures == 1


def test_a_spare_actor_that_hangs_is_replaced(fleet):
    fleet.tend_spare()
    (hung,) = fleet.made
    fleet.clock += fleet.args.actor_timeout + 60
    fleet.tend_spare()
    assert fleet.killed == [] and fleet.spare.actor is hung
    fleet.clock, fleet.done = fleet.clock + 1, [fleet.spare.calls[0][0]]  # its answer only waits for the learner
    fleet.tend_spare()
    assert fleet.killed == [] and fleet.spare.actor is hung
    fleet.done = []
    fleet.tend_spare()
    assert fleet.killed == [hung] and fleet.made == [hung, fleet.spare.actor]
    assert len(fleet.spare.calls) == 1 and fleet.ledger.lost == 0, "its call was of no fragment"


def test_actors_have_their_turns_in_order(fleet, monkeypatch):
    """Where all have delivered before the learner asks, none waits while another has two turns; nor does the spare."""
    module, sequences = importlib.import_module("impala_ray"), [0, 0]
    monkeypatch.setattr(module.Fleet, "check_raylet", lambda fleet: None)
    fleet.run.stop = None
    fleet.looked_at, fleet.published = time.monotonic(), [([], None, 0)]

    def sample(number, weights, version):
        reference = object()
        fleet.done.append(reference)
        fleet.answers[reference] = {"stamp": np.array([number, 0, sequences[number], version])}
        sequences[number] += 1
        return reference

    for seat in fleet.seats:
        seat.actor.sample = SimpleNamespace(remote=functools.partial(sample, seat.number))
        seat.heard_at = fleet.clock
    fleet.tend_spare()
    fleet.done.append(fleet.spare.calls[0][0])
    numbers = [fleet.wait()["stamp"][0].item() for _ in range(20)]
    assert numbers == [0, 1] * 10 and fleet.spare.is_ready


@pytest.mark.parametrize(("lag", "is_lost"), [(7, False), (8, True)])
def test_a_fragment_that_is_too_old_counts_as_lost(fleet, lag, is_lost):
    """As of an actor that was out of reach for long, while others made versions."""
    seat, reference, said = fleet.seats[0], object(), []
    fleet.args.forced_lag, fleet.args.max_lag, fleet.version = 2, 5, 20
    fleet.run = SimpleNamespace(global_step=99, bar=SimpleNamespace(write=lambda line, file: said.append(line)))
    seat.calls, seat.incarnation = [(reference, True, None), (object(), True, None)], 0
    fleet.answers[reference] = {"stamp": np.array([0, 0, 3, 20 - lag])}
    assert (fleet.receive(seat) is None) == is_lost == bool(fleet.ledger.lost)
    assert len(seat.calls) == 1 and seat.failures == 0, "it goes on"
    assert said == ["step 99: actor 0 delivers a fragment 8 versions old, which is lost (--max-lag)"] * is_lost


def test_what_a_replaced_actor_had_in_flight_is_lost(fleet):
    seat, said = fleet.seats[0], []
    fleet.run = SimpleNamespace(global_step=99, bar=SimpleNamespace(write=lambda line, file: said.append(line)))
    seat.calls = [(object(), True, None), (object(), True, None)]
    fleet.replace(seat, "hangs")
    assert fleet.ledger.lost == 2 and fleet.ledger.restarts == 1 and seat.calls == [] and len(said) == 1


def test_an_actor_that_has_raised_closes_its_environments_before_it_is_ended(fleet, monkeypatch):
    """What they hold, such as shared memory, would outlive their process."""
    did, seat, call = [], fleet.seats[0], object()
    seat.calls = [(call, True, None), (object(), False, None)]  # after the one that raised
    monkeypatch.setattr(importlib.import_module("impala_ray").Fleet, "check_raylet", lambda fleet: None)
    monkeypatch.setattr(time, "sleep", lambda seconds: did.append("waited"))  # until Ray has sent that call
    fleet.ray.cancel = lambda reference: did.append(reference)
    fleet.run = SimpleNamespace(global_step=99, bar=SimpleNamespace(write=lambda line, file: None))
    seat.actor.close = SimpleNamespace(remote=lambda: did.append("closed"))
    fleet.ray.kill = lambda actor: did.append("killed")
    fleet.mend(seat, RuntimeError("the emulator broke down"), None)
    assert did == ["waited", call, "closed", "killed"] and seat.actor is None


@pytest.mark.parametrize("script", ["impala_ray", "appo_ray"])
def test_a_run_that_never_got_a_fragment_has_its_ledger_in_the_summary(launch, script):
    run = launch(script, "--total-timesteps", 900, env_id="ray_environments:Unresettable-v0", raises=RuntimeError)
    assert run.summary["status"] == "failed" and run.summary["fragments_delivered"] == 0
    assert run.summary["actor_restarts"] == run.summary["bytes_per_second"] == 0 and run.summary["lag_max"] is None


def test_a_cluster_may_start_its_nodes_first(fleet, monkeypatch):
    """With --ray-address an actor has ten minutes more for its first start; for no later one, nor on this machine."""
    module = importlib.import_module("impala_ray")
    fleet.ray.available_resources = fleet.ray.cluster_resources = dict
    fleet.published = [([], None, 0)]
    fleet.run = SimpleNamespace(global_step=0, bar=SimpleNamespace(write=lambda line, file: None))
    seat = fleet.seats[0]
    cases = (("h:1", None, 0, 600), ("h:1", 0, 0, 60), ("h:1", None, 1, 60), (None, None, 0, 60), (None, 0, 0, 60))
    for address, incarnation, failures, patience in cases:
        fleet.args.ray_address, fleet.ledger = address, module.Ledger()
        for silence, replaced in ((60 + patience, 0), (61 + patience, 1)):
            seat.actor, seat.is_ready, seat.calls, seat.retry_at = object(), False, [(1, False, 0)], 0
            seat.incarnation, seat.failures = incarnation, failures
            fleet.clock, seat.heard_at = 1000.0, 1000.0 - silence
            fleet.tend(seat)
            assert fleet.ledger.restarts == replaced
    monkeypatch.setattr(module.Fleet, "check_raylet", lambda fleet: None)
    monkeypatch.setattr(module.Fleet, "tend", lambda fleet, seat: None)
    fleet.run.stop, fleet.seats = None, fleet.seats[:1]
    for address, heard_at, patience in (("h:1", 0.0, 600), ("h:1", 100.0, 60), (None, 0.0, 60)):
        fleet.args.ray_address, fleet.heard_at, fleet.cause = address, heard_at, "none"
        seat.calls, fleet.clock, fleet.looked_at = [], heard_at + 60 + patience + 0.001, time.monotonic()
        fleet.spare.retry_at = math.inf
        with pytest.raises(module.RunError, match="no actor answers any more"):
            fleet.wait()
        stops = iter((None, 1))  # it looks once more after the first wait
        monkeypatch.setattr(module.time, "sleep", lambda seconds, stops=stops: setattr(fleet.run, "stop", next(stops)))
        fleet.clock, fleet.looked_at = heard_at + 59 + patience, time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            fleet.wait()
        fleet.run.stop = None
        monkeypatch.setattr(module.time, "sleep", lambda seconds: None)


def test_a_spare_actor_takes_a_seat_only_while_it_stands_by(fleet):
    seat, fleet.clock = fleet.seats[0], 7.0
    own = seat.actor
    fleet.tend_spare()
    fleet.swap(seat)  # it has not answered yet
    assert seat.actor is own
    fleet.spare.is_ready = True  # as it was, but it is being asked again
    fleet.swap(seat)
    assert seat.actor is own
    spare = fleet.spare.actor
    fleet.spare.calls.clear()
    fleet.swap(seat)
    assert (seat.actor, fleet.spare.actor, fleet.spare.is_ready, seat.heard_at) == (spare, own, False, 7.0)


def test_a_seat_that_waits_for_a_restart_gets_the_spare_actor_too(fleet):
    import ray

    seat = fleet.seats[0]
    fleet.tend_spare()
    fleet.spare.calls.clear()
    fleet.spare.is_ready = True
    (spare,), seat.incarnation, seat.is_ready = fleet.made, 0, False
    fleet.mend(seat, ray.exceptions.ActorUnavailableError("it restarts", None), None)
    assert seat.actor is spare and fleet.spare.actor is not spare


def test_an_actor_for_which_there_is_no_processor(launch, cluster, taken, monkeypatch):
    """The two that have one go on; why the third does not start is said."""
    module, ages = importlib.import_module("impala_ray"), []

    def take(fleet, take=module.Fleet.take):
        fragment = take(fleet)
        if "does not start" in fleet.cause:
            fleet.args.total_timesteps = fleet.run.global_step  # seen
        elif not ages and len({stamp[0] for stamp in taken}) == 2:  # two are at work: the third has waited for long
            (seat,) = (seat for seat in fleet.seats if not seat.is_ready)
            seat.heard_at -= 121
            ages.append(seat.number)
        return fragment

    monkeypatch.setattr(module.Fleet, "take", take)
    flags = fleet_flags("--num-actors", 3, "--total-timesteps", 2 * 10**6, "--actor-timeout", 60)
    run = launch("impala_ray", *flags, env_id="ray_environments:Sound-v0")
    summary = check_ledger(run, taken)
    assert summary["status"] == "finished" and summary["fragments_lost"] == 0 and len({s[0] for s in taken}) == 2
    cause = r"actor (\d) does not start: no answer for 120 s \(--actor-timeout and 60 more\); 0 of 2 CPUs are free"
    assert re.findall(cause, run.err) == [str(number) for number in ages], run.err


@pytest.mark.parametrize(
    ("lag", "flags"), [(0, []), (2, []), (0, ["--num-actors", 1, "--batch-fragments", 4])], ids=["0", "2", "needed"]
)
def test_lost_weights_go_out_anew(launch, cluster, taken, monkeypatch, lag, flags):
    """Those of two versions are of a process that is gone, on another node than the actors are.

    A single actor has to make four fragments before there is another version.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)

    @ray.remote(num_cpus=0, scheduling_strategy=here)
    class Owner:
        def put(self, arrays):
            return [ray.put(arrays)]

    module, versions = importlib.import_module("impala_ray"), []
    put = module.Fleet.put

    def put_and_lose(self, arrays):
        versions.append(self.version)
        if len(versions) not in (5, 20):
            return put(self, arrays)
        owner = Owner.remote()
        (reference,) = ray.get(owner.put.remote(arrays))
        ray.kill(owner)
        with pytest.raises(ray.exceptions.RayActorError):  # it may take a moment to die
            for _ in range(100):
                ray.get(owner.put.remote([]))
                time.sleep(0.1)
        time.sleep(0.2)
        return reference

    monkeypatch.setattr(module.Fleet, "put", put_and_lose)
    flags = fleet_flags("--total-timesteps", 1500 if not flags else 4000, "--forced-lag", lag, *flags)
    run = launch("impala_ray", *flags, env_id="ray_environments:Sound-v0")
    summary = check_ledger(run, taken, lost_versions=2)
    assert summary["status"] == "finished" and summary["fragments_lost"] >= 1
    if run.config["batch_fragments"] == 4:
        assert {versions[4], versions[19]} <= {version for *_, version in taken}
    for actor in range(run.config["num_actors"]):
        used = [version for number, _, _, version in taken if number == actor]
        assert used == sorted(used), "no older weights are used again"
    assert 0 < len(run.err.splitlines()) <= summary["fragments_lost"], run.err
    assert {line["return"] for line in run.episodes} == {10.0}


@pytest.mark.parametrize("script", ["impala_ray.py", "appo_ray_torchcompile.py"])
def test_a_run_joins_a_cluster_and_leaves_it_running(start, cluster, tmp_path, script):
    import ray

    names, deadline = ("CPU", "object_store_memory"), time.monotonic() + 300

    def wait_until_free(least):  # Ray's own count of these comes late
        while any((left := ray.available_resources()).get(name, 0) < value for name, value in least.items()):
            assert time.monotonic() < deadline, (left, least)
            time.sleep(0.2)
        return left

    before = wait_until_free({"CPU": 2})  # what earlier tests had
    flags = ["--ray-address", cluster.address, "--num-actors", 2, "--total-timesteps", 3000, "--no-cuda"]
    process = start(script, *flags, "--output-dir", tmp_path)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0 and err == "", out + err
    (summary,) = (json.loads(path.read_text()) for path in tmp_path.glob("*/summary.json"))
    assert summary["status"] == "finished" and summary["updates"] > 0 and summary["actor_restarts"] == 0
    assert [node["Alive"] for node in ray.nodes()].count(True) == 2
    wait_until_free({name: before[name] for name in names})  # nothing of the run holds any


def test_a_removed_node_costs_its_fragments_and_no_nodes_the_run(launch, cluster, taken, monkeypatch):
    """First a node with one of three actors goes, which the other two survive; then theirs, too."""
    module, removed, taken_then = importlib.import_module("impala_ray"), [], []
    nodes = [cluster.add_node(num_cpus=1, object_store_memory=10**8), cluster.actors_node]
    end_step, deadline = module.Run.end_step, time.monotonic() + 600

    def end_step_and_remove(run, losses, **values):
        assert time.monotonic() < deadline, (removed, [seat.incarnation for seat in run.fleet_seats])
        # At first all three must deliver; later there is room for two
        is_placed = removed or all(seat.incarnation is not None for seat in run.fleet_seats)
        if is_placed and nodes and run.global_step > 3000 + (removed[0] if removed else 0):
            removed.append(run.global_step)
            taken_then.append(len(taken))
            if len(removed) == 2:
                monkeypatch.setattr(module, "PATIENCE", -57)  # so that all are given up after 3 s
            cluster.remove_node(nodes.pop(0), allow_graceful=False)
        end_step(run, losses, **values)

    enter = module.Fleet.__enter__
    monkeypatch.setattr(
        module.Fleet, "__enter__", lambda fleet: (setattr(fleet.run, "fleet_seats", fleet.seats), enter(fleet))[1]
    )
    monkeypatch.setattr(module.Run, "end_step", end_step_and_remove)
    flags = fleet_flags("--num-actors", 3, "--total-timesteps", 10**9, "--actor-timeout", 60)
    run = launch("impala_ray", *flags, env_id="ray_environments:Sound-v0", raises=SystemExit)
    summary = check_ledger(run, taken, down=3)
    assert len(removed) == 2 and summary["status"] == "failed"
    first, second = taken_then
    late = [stamp[0] for stamp in taken[first:second]][10:]  # without what was in flight at the first removal
    assert len(late) > 10 and len(set(late)) == 2, "the two that have survived, and they alone"
    assert run.error.code.startswith("error: no actor answers any more; the last cause: actor")
    assert summary["global_step"] == run.metrics[-1]["global_step"] // 100 * 100 + summary["global_step"] % 100
    assert summary["fragments_lost"] <= 2 * 3


def processes_of(session):
    """The processes of a session, by number, without those that have ended and wait for init to notice."""
    stats = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            stats.append(path.read_text())
    states = {int(stat.split()[0]): stat.rpartition(")")[2].split() for stat in stats}
    return [pid for pid, state in states.items() if state[3] == str(session) and state[:2] != ["Z", "1"]]


def actors_of(session):
    """Those of its processes that are actors."""
    return [pid for pid, name in names_of(processes_of(session)).items() if name.startswith("ray::Actor")]


@pytest.mark.parametrize("script", ["impala_ray", "appo_ray"])
def test_a_ray_that_does_not_start_is_told_in_a_line(monkeypatch, capsys, tmp_path, script):
    import ray

    def init(**_):
        assert len(list(tmp_path.glob("new/ray*"))) == 1
        raise Exception("The current node timed out during startup.\nMore of that.")

    shut = []
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "new"))
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: shut.append(None))
    module = importlib.import_module(script)
    with pytest.raises(SystemExit) as error, module.ray_session(module.Args(num_actors=1)):
        pass
    assert shut and script not in ray.cloudpickle.list_registry_pickle_by_value()  # nothing of it stays
    line = "error: --num-actors 1: Ray can't start there (The current node timed out during startup.)\n"
    assert error.value.code == 2 and capsys.readouterr().err == line
    assert list(tmp_path.iterdir()) == [tmp_path / "new"] and not any((tmp_path / "new").iterdir())
    tmp_path.joinpath("file").touch()
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "file"))
    with pytest.raises(SystemExit), module.ray_session(module.Args(num_actors=1)):
        pass
    assert "error: --num-actors 1: Ray can't start there ([Errno" in capsys.readouterr().err
    assert script not in ray.cloudpickle.list_registry_pickle_by_value()


def names_of(processes):
    """Their command lines by number, but of those that have just ended."""
    names = {}
    for number in processes:
        with contextlib.suppress(OSError):
            names[number] = Path(f"/proc/{number}/cmdline").read_text()
    return names


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_behind_by_a_run_that_is_interrupted_while_ray_starts(start, tmp_path, number):
    process = start("impala_ray.py", "--num-actors", 1, "--no-cuda", "--output-dir", tmp_path, start_new_session=True)
    deadline = time.monotonic() + 60
    while not any("gcs_server" in name for name in names_of(processes_of(process.pid)).values()):
        assert time.monotonic() < deadline and process.poll() is None, process.communicate()
        time.sleep(0.05)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does
    else:
        process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number and out + err == "", out + err
    deadline = time.monotonic() + 60
    while processes_of(process.pid):
        assert time.monotonic() < deadline, "processes are left"
        time.sleep(0.1)
    assert list(tmp_path.iterdir()) == []


BETWEEN = """
import os, signal, sys, {module} as module
args = module.Args(num_actors=1)
module.check_ray(args)
module.prepare_ray(args)
assert "ray" not in sys.modules, "an environment may import it before the run does"
secret = os.environ["RAY_AUTH_TOKEN"]
assert "RAY_IGNORE_UNHANDLED_ERRORS" in os.environ, "Ray prints tracebacks of calls that nobody waits for any more"
print(os.environ["RAY_AUTH_MODE"], len(secret), os.environ["RAY_USAGE_STATS_ENABLED"], flush=True)
with module.ray_session(args):
    print(*os.listdir(os.environ["RAY_TMPDIR"]), flush=True)
    os.kill(os.getpid(), signal.{name})
    signal.pause()
"""


@pytest.mark.parametrize(("module", "name", "code"), [("impala_ray", "SIGINT", 130), ("appo_ray", "SIGTERM", 143)])
def test_ray_asks_for_a_secret_and_a_signal_before_the_run_leaves_nothing(module, name, code):
    for _ in range(3):
        with tempfile.TemporaryDirectory() as folder:  # of a short name, as sockets lie in it
            environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
            environment |= {"RAY_TMPDIR": folder, "PYTHONPATH": str(Path(__file__).parent.parent / "leanrl")}
            command = [sys.executable, "-c", BETWEEN.format(module=module, name=name)]
            process = subprocess.Popen(
                command,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
            try:
                out, _ = process.communicate(timeout=120)
                if "timed out during startup" in out:  # Ray itself waits for no more than 30 s, on a busy machine, too
                    continue
                assert process.returncode == code and re.fullmatch(r"token 64 0\nray\w+\n", out), out
                assert os.listdir(folder) == []
                deadline = time.monotonic() + 60
                while processes_of(process.pid):
                    assert time.monotonic() < deadline, names_of(processes_of(process.pid))
                    time.sleep(0.1)
                return
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
    pytest.fail("Ray did not start")


def test_without_actors_ray_is_not_imported(tmp_path):
    flags = ["--output-dir", tmp_path, "--total-timesteps", 400, "--no-cuda"]
    code = "import sys, runpy; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
    command = [
        sys.executable,
        "-c",
        code + "; assert 'ray' not in sys.modules",
        "leanrl/impala_ray.py",
        *map(str, flags),
    ]
    ended = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0 and "finished at step" in ended.stdout, ended.stderr


def start_endless(start, folder, *more, is_orphan=False):
    """A run of millions of steps with an actor, in a session of its own; an orphan is a child of process 1."""
    flags = ["--num-actors", 1, "--no-cuda", "--output-dir", folder, "--total-timesteps", 10**7, *more]
    shell = ["sh", "-c", '"$@" &', "sh"] if is_orphan else []
    return start("impala_ray.py", *flags, before=shell, start_new_session=True)


def count_lines(folder):
    """Lines of metrics, of the run in this folder."""
    return sum(len(path.read_text().splitlines()) for path in folder.glob("*/metrics.jsonl"))


def wait_for_lines(process, folder, count):
    deadline = time.monotonic() + 60
    while count_lines(folder) < count:
        assert time.monotonic() < deadline and not process.poll(), process.communicate()
        time.sleep(0.2)


def test_nothing_is_left_behind_by_a_run_that_is_interrupted_time_and_again(start, tmp_path):
    process = start_endless(start, tmp_path)
    wait_for_lines(process, tmp_path, 1)
    for _ in range(4):
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in err, out + err
    deadline = time.monotonic() + 60
    while processes_of(process.pid):
        assert time.monotonic() < deadline, "processes are left"
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("process_name", "line", "is_orphan"),
    [
        ("gcs_server", r"error: the head of the Ray cluster is lost \(.+\)", False),
        ("raylet/raylet", "error: Ray's own process on this machine, the raylet, has died", False),
        ("raylet/raylet", "error: Ray's own process on this machine, the raylet, has died", True),
    ],
    ids=["head", "raylet", "raylet of an orphan"],
)
def test_a_process_of_ray_s_that_dies_ends_the_run_with_a_checkpoint(start, tmp_path, process_name, line, is_orphan):
    """Ray would end the learner from within: a minute after the server of the cluster's head was gone, or at the next
    use of the raylet's memory; a learner whose parent is process 1 as in a container, at once. It does so if the raylet
    dies during such a use: so the learner stands still here until that is gone. If the head dies while the learner asks
    it for a spare actor, there is no answer: so here that is there. Its actors, which would live on, are ended, too."""
    process = start_endless(start, tmp_path, "--fragment-length", 8192, is_orphan=is_orphan)
    wait_for_lines(process, tmp_path, 1)
    deadline = time.monotonic() + 60
    while len(actors_of(process.pid)) < 2:
        assert time.monotonic() < deadline, names_of(processes_of(process.pid))
        time.sleep(0.1)
    names = names_of(processes_of(process.pid)).items()
    (learner,) = [pid for pid, name in names if "impala_ray.py" in name]
    (server,) = [pid for pid, name in names if process_name in name.partition("\0")[0]]
    os.kill(learner, signal.SIGSTOP)
    os.kill(server, signal.SIGKILL)
    while any(names_of([server]).values()):  # else it is only to be waited for
        assert time.monotonic() < deadline, "the process lives on"
        time.sleep(0.01)
    os.kill(learner, signal.SIGCONT)
    _, err = process.communicate(timeout=60)
    code = 0 if is_orphan else 1  # of the shell, which is gone
    assert process.returncode == code and "Traceback" not in err, err
    assert re.fullmatch(line, err.splitlines()[-1]), err
    deadline = time.monotonic() + 60
    while any(name.strip("\0") for name in names_of(processes_of(process.pid)).values()):  # else only to be waited for
        assert time.monotonic() < deadline, names_of(processes_of(process.pid))
        time.sleep(0.1)
    run = read_run(tmp_path)
    assert run.summary["status"] == "failed" and run.summary["global_step"] > 0
    checkpoint = torch.load(run.folder / "checkpoint.pt", weights_only=True)
    assert checkpoint["run"]["global_step"] == run.summary["global_step"]


def test_nothing_is_left_behind(start, tmp_path, monkeypatch):
    """A run that starts Ray by itself, of which an actor is killed, and Ctrl-C in its terminal: no process of its own
    lives on, no shared memory, no file, and nothing was printed but what the script has to say."""
    folder = tempfile.TemporaryDirectory()  # of a short name, as sockets lie in it
    monkeypatch.setenv("RAY_TMPDIR", folder.name)
    before = shared_memory()
    process = start_endless(start, tmp_path)
    wait_for_lines(process, tmp_path, 1)
    actor = min(actors_of(process.pid))
    os.kill(actor, signal.SIGKILL)
    wait_for_lines(process, tmp_path, 50 + count_lines(tmp_path))
    deadline = time.monotonic() + 120
    while len(actors_of(process.pid)) < 2:  # the spare one, too
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.2)
    assert len(processes_of(process.pid)) > 3
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and read_run(tmp_path).summary["status"] == "interrupted", out + err
    assert "actor 0 is dead or out of reach, and is asked again" in err and "raylet" not in out + err, out + err
    time.sleep(1)
    assert processes_of(process.pid) == []
    check_shared_memory(before)
    assert os.listdir(folder.name) == []
    folder.cleanup()
