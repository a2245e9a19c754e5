"""dqn_memory: the slices that are replayed, their loss, the update from them, eager and compiled, what is learned."""

import copy
import importlib
import io
import itertools
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch

import agents
import environments
from dqn_memory import CELLS

sys.path.append(str(Path(__file__).parent.parent))

import benchmarks.tmaze  # noqa: F401 - registers the mazes

CPU = torch.device("cpu")
SCRIPTS = {"dqn_memory": "MemoryDQNAgent", "dqn_memory_torchcompile": "CompiledMemoryDQNAgent"}
OUTCOME = ("reward", "terminated", "valid")
SMALL = {"env_id": "CounterDiscrete-v0", "num_envs": 3, "cuda": False, "cell": "gru", "hidden_size": 8}
SMALL |= {"buffer_size": 62, "slice_length": 5, "batch_size": 5 * 400}  # lanes of 20 rows; draws that miss none of them

each_script = pytest.mark.parametrize("script", SCRIPTS)
starts = pytest.mark.parametrize("start_state", ["stored", "zero"])
each_cell = pytest.mark.parametrize("cell", CELLS)


class Played:
    """An agent of a script in its environments, and `rows`, what has happened to it; no gradients."""

    def __init__(self, script, **arguments):
        self.module = importlib.import_module(script)
        self.args = self.module.Args(**SMALL | arguments)
        torch.manual_seed(0)
        self.envs = self.module.Environments(self.args)
        with torch.no_grad():
            self.agent = getattr(self.module, SCRIPTS[script])(self.args, self.envs, CPU)
        self.rows = []

    @torch.no_grad()
    def play(self, steps, epsilon=0.5):
        for _ in range(steps):
            row = {"input": self.envs.inputs, "state": self.agent.state.numpy().copy()}
            row["action"] = self.agent.act(self.envs, epsilon).copy()
            step = self.envs.step(row["action"])
            self.agent.observe(step)
            self.rows.append(row | {name: step[name].copy() for name in OUTCOME})

    def firsts(self):
        """Where slices can begin: none reaches into rows that are overwritten, nor past the newest."""
        newest = len(self.rows) - 1
        return range(max(0, newest + 1 - self.agent.buffer.rows), newest - self.args.slice_length + 1)

    def every_slice(self):
        first, env = zip(*itertools.product(self.firsts(), range(self.args.num_envs)))
        return first, env, self.agent.buffer.gather(torch.tensor(first), torch.tensor(env))


# ---- Replay ----
@each_script
@starts
def test_slices_are_consecutive_rows_that_happened(script, start_state):
    """In lanes that wrap, over episodes that end in every way; none is missing, none reaches past the newest row."""
    played, length = Played(script, start_state=start_state), 5
    assert played.agent.buffer.rows == 20
    played.play(4)
    for _ in range(30):
        played.play(2)
        first, env, batch = played.every_slice()
        assert set(batch) - {"state"} == {"input", "action", *OUTCOME}
        assert ("state" in batch) is (start_state == "stored")
        for b, (n, i) in enumerate(zip(first, env)):
            rows = played.rows[n : n + length + 1]
            for name in ("input", "action", *OUTCOME):
                count = length + (name not in OUTCOME)  # of the row that follows nothing more is needed
                expected = torch.tensor(np.stack([row[name][i] for row in rows[:count]])).float()
                assert torch.equal(batch[name][:count, b], expected)
            if start_state == "stored":
                assert torch.equal(batch["state"][b], torch.tensor(rows[0]["state"][i]))
        with torch.no_grad():
            drawn = set(zip(*(each.tolist() for each in played.agent.buffer.draw())))
        assert drawn == set(zip(first, env))
    assert len(played.rows) > 3 * played.agent.buffer.rows


def resets(batch):
    """Where episodes begin, which the last input says; [T, B]."""
    return batch["input"][..., -1]


def assert_followed(batch):
    """Each valid step that is not terminated is followed by what it led to, each reset by a first row."""
    key, episode, step = (16 * batch["input"][..., :3]).long().unbind(-1)
    valid = batch["valid"][:-1] > 0
    assert torch.equal(key[1:], key[:-1])
    assert torch.equal(episode[1:], episode[:-1] + ~valid)
    assert torch.equal(step[1:], torch.where(valid, step[:-1] + 1, 0))
    assert torch.equal(resets(batch)[1:] > 0, ~valid)


@each_script
def test_next_observation_is_in_the_row_that_follows(script):
    """Also where an episode was truncated."""
    played = Played(script, env_id="CounterDiscrete-v0")
    played.play(75)
    *_, batch = played.every_slice()
    assert_followed(batch)
    for flags in (resets(batch), batch["terminated"], batch["valid"]):
        assert 0 < flags.mean() < 1


@each_script
@each_cell
def test_stored_state_is_that_of_the_episode_so_far(script, cell):
    """While the parameters have not changed."""
    played = Played(script, cell=cell)
    played.play(50)
    network = played.agent.q_network if script == "dqn_memory" else played.agent.q_module.module
    first, env, batch = played.every_slice()
    with torch.no_grad():
        for b, (n, i) in enumerate(zip(first, env)):
            begins = max(m for m in range(n + 1) if played.rows[m]["input"][i, -1])
            if begins == n:
                continue
            x = torch.tensor(np.stack([row["input"][i] for row in played.rows[begins:n]]))[:, None]
            assert x[0, 0, -1] == 1 and not x[1:, 0, -1].any()
            _, state = network(x, network.cell.initial_state(1))
            torch.testing.assert_close(batch["state"][b], state[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("steps", [13, 50], ids=["part", "wrapped"])
@each_script
def test_replay_goes_on_from_a_checkpoint(script, steps):
    """New episodes begin there: nothing is learned from the newest rows, whose next observation was never seen."""
    before, after = Played(script), Played(script)
    before.play(steps)
    file = io.BytesIO()
    torch.save(before.agent.buffer.state_dict(), file)
    assert len(file.getvalue()) < before.agent.buffer.saved_nbytes * min(steps, 20) / 20 + 10_000
    file.seek(0)
    after.agent.buffer.load_state_dict(torch.load(file, weights_only=True))
    after.rows = copy.deepcopy(before.rows)
    after.rows[-1]["valid"][:] = False
    after.envs.begin(steps)
    for _ in range(30):
        after.play(1)
        first, env, batch = after.every_slice()
        for b, (n, i) in enumerate(zip(first, env)):
            expected = np.stack([row["valid"][i] for row in after.rows[n : n + 5]])
            assert batch["valid"][:5, b].tolist() == expected.tolist()
            assert batch["input"][0, b].tolist() == after.rows[n]["input"][i].tolist()
            joint = steps - 1 - n
            if 0 <= joint < 5:
                assert resets(batch)[joint + 1, b] == 1


@pytest.mark.parametrize("steps", [13, 50], ids=["part", "wrapped"])
def test_a_warm_up_leaves_a_restored_replay_alone(steps):
    """But for the place of the next row, and what came of the newest, which is not learned from."""
    before, after = Played("dqn_memory_torchcompile"), Played("dqn_memory_torchcompile")
    before.play(steps)
    replay = after.agent.buffer
    replay.load_state_dict(before.agent.buffer.state_dict())
    rows = {name: field.clone() for name, field in replay.storage.items()}
    for _ in range(3):
        after.agent.learn()
        after.agent.choose()
    newest, free = (steps - 1) % replay.rows, steps % replay.rows
    assert not replay.storage["valid"][newest].any()
    for name, field in replay.storage.items():
        kept = [n for n in range(replay.rows) if n != free and not (n == newest and name in OUTCOME)]
        assert torch.equal(field[kept], rows[name][kept]), name


def test_a_replay_that_was_not_full_may_grow():
    before, after = (Played("dqn_memory", total_timesteps=total, buffer_size=10**9) for total in (50, 90))
    assert after.agent.buffer.rows > before.agent.buffer.rows
    before.play(before.agent.buffer.rows)
    after.agent.buffer.load_state_dict(before.agent.buffer.state_dict())
    after.rows = before.rows
    after.envs.begin(1)
    after.play(9)
    assert len(after.firsts()) == before.agent.buffer.rows + 9 - 5
    first, env, batch = after.every_slice()
    expected = np.stack([after.rows[n]["input"][i] for n, i in zip(first, env)])
    assert batch["input"][0].tolist() == expected.tolist()


def test_eager_and_compiled_replays_hold_the_same():
    eager, compiled = (Played(script) for script in SCRIPTS)
    eager.agent.q_network.load_state_dict(as_eager(compiled))
    for played in (eager, compiled):
        torch.manual_seed(1)
        played.play(50)
    batches = [played.every_slice()[-1] for played in (eager, compiled)]
    for name, values in batches[0].items():
        rows = slice(None, -1 if name in OUTCOME else None)
        torch.testing.assert_close(batches[1][name][rows], values[rows], rtol=0, atol=1e-6)


# ---- Loss ----
def as_eager(compiled, name="q_network"):
    """The parameters of a compiled agent's network as the eager one's state."""
    agent = compiled.agent
    names = [name for name, _ in agent.q_module.module.named_parameters()]
    return dict(zip(names, agent.q_module.split(getattr(agent, name)), strict=True))


def pair(**arguments):
    """An eager and a compiled agent with equal networks, and equal targets that are other networks."""
    eager, compiled = (Played(script, **arguments) for script in SCRIPTS)
    with torch.no_grad():
        compiled.agent.target_network.mul_(1.5)
    eager.agent.q_network.load_state_dict(as_eager(compiled))
    eager.agent.target_network.load_state_dict(as_eager(compiled, "target_network"))
    return eager, compiled


def patterns(steps):
    """Every course of so many rows: steps within an episode, ones that terminate or truncate it, and resets."""
    for kinds in itertools.product(("within", "terminated", "truncated", "reset"), repeat=steps):
        after_end = [None, *(kind in ("terminated", "truncated") for kind in kinds)]
        if all(is_after in (None, kind == "reset") for is_after, kind in zip(after_end, kinds)):
            yield kinds


def made_up_batch(courses, actions, state, inputs):
    """Slices of these courses, [T] each, with the row that follows them."""
    generator = torch.Generator().manual_seed(1)
    steps, count = len(courses[0]) + 1, len(courses)
    kinds = np.array([[*course, "within"] for course in courses]).T
    batch = {
        "input": torch.randn(steps, count, inputs, generator=generator),
        "action": torch.randint(actions, (steps, count), generator=generator).float(),
        "reward": torch.randn(steps, count, generator=generator),
        "terminated": torch.tensor(kinds == "terminated").float(),
        "valid": torch.tensor(kinds != "reset").float(),
    }  # fmt: skip
    resets(batch)[0], resets(batch)[1:] = 0, torch.tensor(kinds[:-1] == "reset")
    return batch | {"state": torch.randn(count, *state.shape[1:], generator=generator)}


def loss_by_hand(agent, batch, gamma, burn_in):
    """Row by row: (sum of squared errors, sum of values, how many), for each slice."""

    def values(network, b):
        state, rows = batch["state"][b : b + 1], []
        for x in batch["input"][:, b : b + 1]:
            q, state = network(x, state)
            rows.append(q[0])
        return rows

    results = []
    for b in range(batch["input"].shape[1]):
        q, target_q = values(agent.q_network, b), values(agent.target_network, b)
        errors, taken = [], []
        for t in range(burn_in, len(q) - 1):
            if batch["valid"][t, b]:
                target = batch["reward"][t, b]
                if not batch["terminated"][t, b]:
                    target = target + gamma * target_q[t + 1][q[t + 1].argmax()]
                taken.append(q[t][int(batch["action"][t, b])].item())
                errors.append(taken[-1] - target.item())
        results.append((sum(error**2 for error in errors), sum(taken), len(errors)))
    return results


@pytest.mark.parametrize("cell", ["gru", "lru", "stack"])
@pytest.mark.parametrize("burn_in", [0, 2])
@torch.no_grad()
def test_targets_over_every_course_of_six_rows(cell, burn_in):
    """Each slice alone, and all of them together."""
    eager, compiled = pair(cell=cell, slice_length=6, batch_size=6, burn_in=burn_in)
    courses = list(patterns(6))
    assert len(courses) > 100 and {kind for course in courses for kind in course[burn_in:]} > {"reset", "truncated"}
    envs = eager.envs
    batch = made_up_batch(courses, envs.action_dim, eager.agent.state, envs.inputs.shape[1])
    expected = loss_by_hand(eager.agent, batch, eager.args.gamma, burn_in)
    errors, values, counts = (sum(column) for column in zip(*expected))
    for agent in (eager.agent, compiled.agent):
        loss, q_value = agent.td_loss(agent.q_network, batch)
        assert loss.item() == pytest.approx(errors / counts, rel=1e-4)
        assert q_value.item() == pytest.approx(values / counts, rel=1e-4, abs=1e-5)
    for b, (error, value, count) in enumerate(expected):
        alone = {name: each[b : b + 1] if name == "state" else each[:, b : b + 1] for name, each in batch.items()}
        loss, q_value = eager.agent.td_loss(eager.agent.q_network, alone)
        assert loss.item() == pytest.approx(error / max(count, 1), rel=1e-4, abs=1e-6)
        assert q_value.item() == pytest.approx(value / max(count, 1), rel=1e-4, abs=1e-5)


def gradient_of(agent, batch):
    """The loss, and its gradient for the network and for the inputs."""
    if isinstance(agent.q_network, torch.nn.Module):
        parameters = [*agent.q_network.parameters()]
        network = agent.q_network
    else:
        network = agent.q_network.detach().clone().requires_grad_()
        parameters = [network]
    batch = batch | {"input": batch["input"].clone().requires_grad_()}
    loss, _ = agent.td_loss(network, batch)
    return [loss, *torch.autograd.grad(loss, [batch["input"], *parameters], allow_unused=True)]


@each_script
def test_what_a_reset_row_says_does_not_matter(script):
    played = Played(script, cell="lru", slice_length=6, batch_size=6)
    inputs = played.envs.inputs.shape[1]
    batch = made_up_batch(list(patterns(6)), played.envs.action_dim, played.agent.state, inputs)
    other, rows = {name: tensor.clone() for name, tensor in batch.items()}, batch["valid"] == 0
    other["reward"][rows], other["terminated"][rows] = torch.nan, torch.inf
    other["action"][rows] = (other["action"][rows] + 1) % played.envs.action_dim
    other["reward"][-1] = torch.nan  # nor what came of the row that follows the slice
    for ours, theirs in zip(gradient_of(played.agent, batch), gradient_of(played.agent, other), strict=True):
        assert torch.equal(ours, theirs) and ours.isfinite().all()


@each_script
@each_cell
def test_burn_in_carries_the_state_and_no_loss(script, cell):
    """The loss after it is that of the shorter slices from the state that it leaves."""
    whole, rest = (Played(script, cell=cell, slice_length=length, burn_in=b) for length, b in ((8, 3), (5, 0)))
    inputs = whole.envs.inputs.shape[1]
    batch = made_up_batch([("within",) * 8] * 4, whole.envs.action_dim, whole.agent.state, inputs)
    resets(batch)[1, 0] = resets(batch)[6, 1] = 1
    shorter = {name: each[3:] for name, each in batch.items() if name != "state"}
    with torch.no_grad():
        agent = whole.agent
        _, shorter["state"] = agent.q_values(agent.q_network, batch["input"][:3], batch["state"])
    ours, theirs = gradient_of(whole.agent, batch), gradient_of(rest.agent, shorter)
    ours[1], before = ours[1][3:], ours[1][:3]
    assert not before.any()
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, rtol=1e-4, atol=1e-6)
    for name, change in (("reward", 0), ("input", 1)):
        other = batch | {name: batch[name].clone()}
        other[name][:3] += 1
        moved = abs(gradient_of(whole.agent, other)[0] - ours[0]).item()
        assert (moved > 1e-5) is bool(change and cell != "none")


@each_script
def test_without_a_stored_state_slices_begin_at_zero(script):
    played = Played(script, start_state="zero", batch_size=20)
    assert "state" not in played.agent.buffer.storage and not played.agent.zero_state.any()
    played.play(40)
    with torch.no_grad():
        batch = played.agent.buffer.sample()
        agent = played.agent
        loss, _ = agent.td_loss(agent.q_network, batch)
        zero, _ = agent.td_loss(agent.q_network, batch | {"state": torch.zeros(4, 8)})
        other, _ = agent.td_loss(agent.q_network, batch | {"state": torch.ones(4, 8)})
    assert loss == zero != other


# ---- Update ----
@each_script
@pytest.mark.parametrize("limit", [1e-3, 1e6])
def test_the_gradient_is_clipped(script, limit):
    played = Played(script, batch_size=20, max_grad_norm=limit)
    played.play(45)
    with torch.set_grad_enabled("compile" not in script):
        played.agent.learn()
    norm = agents.norm_of_first_gradient(played.agent.optimizer)
    assert norm == pytest.approx(limit, rel=1e-2) if limit < 1 else 2e-3 < norm < limit


@pytest.mark.parametrize("cell, backend", [*((cell, "aot_eager") for cell in CELLS), ("mingru", "inductor")])
def test_compiled_updates_are_those_of_the_eager_version(cell, backend):
    """From the same replay and the same random numbers; one full graph."""
    eager, compiled = pair(cell=cell, batch_size=20, burn_in=1, max_grad_norm=0.1)
    for played in (eager, compiled):
        torch.manual_seed(2)
        played.play(45)
    learn = compiled.agent.learn
    if backend == "inductor":
        learn = agents.compile_as_main_does(learn, **{"cpp.use_decompose_tanh": True, "realize_reads_threshold": 2})
    else:
        learn = torch.compile(learn, fullgraph=True, backend=backend)
    for seed in range(3):
        torch.manual_seed(seed)
        with torch.no_grad():
            learn()
        torch.manual_seed(seed)
        eager.agent.learn()
    for name in ("td_loss", "q_value"):
        expected = eager.agent.losses[name].item()
        assert compiled.agent.losses[name].item() == pytest.approx(expected, rel=1e-3, abs=1e-5)
    agents.assert_same(compiled.agent.q_network, agents.flat(eager.agent.q_network))
    assert torch.equal(compiled.agent.target_network, agents.flat(eager.agent.target_network)), "a target moved"
    with torch.no_grad():
        compiled.agent.update_target()
    assert torch.equal(compiled.agent.target_network, compiled.agent.q_network)


@pytest.mark.parametrize("cell", CELLS)
@torch.no_grad()
def test_compiled_choices_are_those_of_the_eager_step(cell):
    """One full graph; from the same state and random numbers the same actions, state and rows of the replay."""
    played, outcomes = Played("dqn_memory_torchcompile", cell=cell), []
    played.play(7)
    agent = played.agent
    state, rows = agent.state.clone(), {name: field.clone() for name, field in agent.buffer.storage.items()}
    for choose in (agent.choose, torch.compile(agent.choose, fullgraph=True, backend="aot_eager")):
        agent.state.copy_(state)
        for name, field in agent.buffer.storage.items():
            field.copy_(rows[name])
        agent.buffer.newest.fill_(7)
        torch.manual_seed(3)
        choose()
        outcomes.append([agent.action.clone(), agent.state.clone(), *map(torch.clone, agent.buffer.storage.values())])
    for ours, theirs in zip(*outcomes, strict=True):
        torch.testing.assert_close(theirs, ours)
    assert cell == "none" or not torch.equal(agent.state, state)


@each_script
@torch.no_grad()
def test_share_of_random_actions(script):
    module = importlib.import_module(script)
    q = torch.tensor([0.0, 3.0, 1.0]).repeat(30_000, 1)
    for epsilon in (0.0, 0.3, 1.0):
        torch.manual_seed(0)
        counts = module.epsilon_greedy(q, torch.tensor(epsilon)).bincount(minlength=3) / len(q)
        torch.manual_seed(0)
        assert torch.equal(counts, module.epsilon_greedy(q, epsilon).bincount(minlength=3) / len(q))
        assert counts.tolist() == pytest.approx([epsilon / 3, 1 - 2 * epsilon / 3, epsilon / 3], abs=0.01)


@each_script
def test_target_network_is_renewed_when_due(launch, monkeypatch, script):
    agent_class, seen = getattr(importlib.import_module(script), SCRIPTS[script]), []
    renew = agent_class.update_target

    def noting(agent):
        seen.append(sum(env.steps for env in environments.Counter.made))
        renew(agent)

    monkeypatch.setattr(agent_class, "update_target", noting)
    flags = ["--total-timesteps", 300, "--learning-starts", 100, "--num-envs", 3, "--target-network-frequency", 7]
    launch(script, *flags, "--train-frequency", 10, "--slice-length", 4, "--batch-size", 8)
    reached = [step - step % 7 for step in seen]
    assert reached == list(range(105, reached[-1] + 1, 7)) and reached[-1] >= 294


def test_host_and_device_with_memories_of_their_own_make_the_same_run(launch, monkeypatch):
    """What a GPU does, here on the CPU: nothing may be read before it was sent, nor overwritten before it was read."""
    module, ended = importlib.import_module("dqn_memory_torchcompile"), []
    agent_class = module.CompiledMemoryDQNAgent
    monkeypatch.setattr(module, "CompiledMemoryDQNAgent", lambda *a: ended.append(agent_class(*a)) or ended[-1])
    flags = ["--total-timesteps", 600, "--learning-starts", 100, "--num-envs", 3, "--buffer-size", 120]
    flags += ["--slice-length", 6, "--batch-size", 24, "--train-frequency", 5, "--target-network-frequency", 20]
    for _ in range(2):
        ended.append(launch("dqn_memory_torchcompile", *flags, env_id="CartPole-v1"))
        monkeypatch.setattr(module, "mirrored", agents.as_on_a_gpu)
    one, first, other, second = ended
    assert first.summary["updates"] == second.summary["updates"] > 90
    assert first.episodes == second.episodes and len(first.episodes) > 5
    for name in ("q_network", "target_network"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name


@each_script
def test_a_warm_up_has_something_to_draw_from(script):
    """Even if there is nothing yet."""
    played = Played(script)
    with torch.no_grad():
        first, env = played.agent.buffer.draw()
    assert first.unique().tolist() == [0] and env.unique().tolist() == [0, 1, 2]


# ---- Learning ----
gym.register(
    "ShortMaze-v0", vector_entry_point="benchmarks.tmaze:VectorTMaze", entry_point="benchmarks.tmaze:TMaze",
    kwargs={"length": 3},
)  # fmt: skip


@pytest.mark.parametrize("script, cell", [("dqn_memory", "lru"), ("dqn_memory_torchcompile", "gru")])
def test_a_short_maze_is_learned(launch, script, cell):
    flags = ["--total-timesteps", 8000, "--learning-starts", 1000, "--cell", cell, "--hidden-size", 32]
    flags += ["--slice-length", 16, "--batch-size", 256, "--train-frequency", 16, "--target-network-frequency", 400]
    run = launch(script, *flags, "--start-e", 0.5, "--end-e", 0, env_id="ShortMaze-v0")
    assert run.summary["episode_return"] > 0.9


def test_without_a_memory_it_is_not(launch):
    flags = ["--total-timesteps", 5000, "--learning-starts", 1000, "--cell", "none", "--hidden-size", 32]
    flags += ["--slice-length", 16, "--batch-size", 256, "--train-frequency", 32, "--target-network-frequency", 400]
    run = launch("dqn_memory", *flags, "--start-e", 0.5, "--end-e", 0, env_id="ShortMaze-v0")
    assert 0.3 < run.summary["episode_return"] < 0.7
