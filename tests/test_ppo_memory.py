"""PPO with a memory: its environments, rollouts, advantages, loss and updates in both versions, and what it learns."""

import copy
import functools
import importlib
import itertools
import json
import shutil
import sys
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
import tyro
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch.func import grad_and_value

import dqn_memory
import ppo_memory
import ppo_memory_torchcompile
import probes  # noqa: F401 - registers them
from agents import (
    CPU,
    as_on_a_gpu,
    assert_each_row_once_an_epoch,
    assert_orthogonal,
    assert_same,
    compile_as_main_does,
    flat,
    flattened,
    norm_of_first_gradient,
)
from environments import Counter, ending_of, in_range, length_of, observation_of, reward_of
from ppo_memory import CELLS, Environments, NoCodeError, encoder
from test_checkpoints import assert_equal, resume, untimed

CLASSES = {"ppo_memory": "MemoryPPOAgent", "ppo_memory_torchcompile": "CompiledMemoryPPOAgent"}
SIZES = {"num_envs": 4, "num_steps": 8, "num_minibatches": 2, "update_epochs": 3}
KINDS = ("Discrete", "Continuous")

each_script = pytest.mark.parametrize("script", CLASSES)
each_cell = pytest.mark.parametrize("cell", CELLS)
each_kind = pytest.mark.parametrize("kind", KINDS)


# ---- Environments ----
def environments_of(env_id, num_envs=3, **arguments):
    return Environments(ppo_memory.Args(env_id=env_id, num_envs=num_envs, **arguments))


def random_action(envs, generator):
    """For one step, some of it out of bounds; as a rollout holds it, [N] or [N, A]."""
    if envs.is_discrete:
        return generator.integers(envs.action_dim, size=len(envs.inputs)).astype(np.float32)
    return generator.normal(scale=3, size=(len(envs.inputs), envs.action_dim)).astype(np.float32)


@each_kind
def test_every_row_is_what_happened(kind):
    """Episodes of unequal length: for each environment, row by row, by the script that it follows."""
    Counter.forget()
    envs, generator = environments_of(f"Counter{kind}-v0"), np.random.default_rng(0)
    envs.begin(0)
    keys = [env.key for env in Counter.made]
    episode, t, over, previous = [0] * 3, [0] * 3, [False] * 3, np.zeros((3, 3))
    assert len(set(keys)) == 3
    ends = set()
    for _ in range(70):
        first = np.array([t[i] == 0 and not over[i] for i in range(3)])
        observed = [observation_of(keys[i], episode[i], t[i]) for i in range(3)]
        np.testing.assert_array_equal(envs.inputs, np.concatenate([observed, previous, first[:, None]], 1))
        assert envs.inputs.dtype == np.float32 and np.array_equal(envs.is_first, first)
        action = random_action(envs, generator)
        previous = np.eye(3)[action.astype(int)] if kind == "Discrete" else action.clip(-1, 1)
        step = envs.step(action)
        assert step.keys() == {"reward", "terminated", "truncated", "valid"}
        for i in range(3):
            row = [step[name][i] for name in ("reward", "terminated", "truncated", "valid")]
            if over[i]:  # a step that only resets
                assert row == [0, False, False, False]
                episode[i], t[i], over[i], previous[i] = episode[i] + 1, 0, False, 0
                continue
            taken = action[i] if kind == "Discrete" else in_range(action[i])
            expected = reward_of(keys[i], episode[i], t[i], taken)
            t[i] += 1
            over[i] = t[i] == length_of(keys[i], episode[i])
            ending = ending_of(keys[i], episode[i]) if over[i] else ""
            ends.add((length_of(keys[i], episode[i]), ending) if over[i] else None)
            expected = [expected, ending in ("terminated", "both"), ending in ("truncated", "both"), True]
            assert row == [pytest.approx(expected[0]), *expected[1:]]
    assert len(ends) > 10


class Echo(gym.Env):
    """Shows the last action; actions begin with 5."""

    observation_space, action_space = gym.spaces.Discrete(3, start=5), gym.spaces.Discrete(3, start=5)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return 7, {}

    def step(self, action):
        assert self.action_space.contains(action), action
        return int(action), 0.0, False, False, {}


class Samples(gym.Env):
    """Shows whatever there is in a space, and writes it down; episodes of 3 steps."""

    action_space = gym.spaces.Discrete(2)

    def __init__(self, space):
        self.observation_space, self.seen = space, []

    def show(self):
        self.seen.append(self.observation_space.sample())
        return self.seen[-1]

    def reset(self, *, seed=None, options=None):
        self.observation_space.seed(seed)
        self.t = 0
        return self.show(), {}

    def step(self, action):
        self.t += 1
        return self.show(), 0.0, self.t == 3, False, {}


BOX, BITS = gym.spaces.Box(-2, 2, (2, 3)), gym.spaces.MultiBinary([2, 2])
SHIFTED, GRID = gym.spaces.Discrete(4, start=-2), gym.spaces.MultiDiscrete([[2, 3], [4, 1]])
STARTED = gym.spaces.MultiDiscrete([2, 3], start=[5, -1])
SEEN = {
    "vector": gym.spaces.Box(-1, 1, (4,), np.float64),
    "scalar": gym.spaces.Box(-1, 1, ()),
    "matrix": BOX,
    "bytes": gym.spaces.Box(0, 255, (2, 2), np.uint8),
    "few bytes": gym.spaces.Box(0, 3, (2, 2), np.uint8),
    "no bytes": gym.spaces.Box(0, 0, (2, 2), np.uint8),
    "bits": BITS,
    "discrete": gym.spaces.Discrete(5),
    "discrete with a start": SHIFTED,
    "several": gym.spaces.MultiDiscrete([2, 3]),
    "several with a start": STARTED,
    "grid": GRID,
    "dict": gym.spaces.Dict({"b": SHIFTED, "a": BOX}),
    "tuple": gym.spaces.Tuple((STARTED, BITS)),
    "nested": gym.spaces.Dict({"a": gym.spaces.Tuple((SHIFTED, gym.spaces.Dict({"c": GRID, "b": BOX}))), "d": BITS}),
}
UNSEEN = {
    "text": gym.spaces.Text(5),
    "sequence": gym.spaces.Sequence(gym.spaces.Discrete(2)),
    "graph": gym.spaces.Graph(BOX, None),
    "nested text": gym.spaces.Dict({"a": SHIFTED, "b": gym.spaces.Tuple((BOX, gym.spaces.Text(5)))}),
    "huge": gym.spaces.Discrete(2**62),
    "huge grid": gym.spaces.MultiDiscrete([2**62, 2**62]),
}
for name, space in (SEEN | UNSEEN).items():
    gym.register(f"Shows-{name.replace(' ', '-')}-v0", functools.partial(Samples, space), disable_env_checker=True)
gym.register("Echo-v0", Echo)
gym.register("Wanting-v0", lambda what_it_wants: Echo())


def same_step(num_envs):
    make = functools.partial(gym.make, "CartPole-v1")
    return SyncVectorEnv([make] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)


gym.register("SameStep-v0", vector_entry_point=same_step)


HIGHEST = {"bytes": np.float32(255), "few bytes": np.float32(3)}


@pytest.mark.parametrize("name", SEEN)
def test_observations_are_encoded_as_gymnasium_flattens_them(name):
    """Through a vector environment, too: what each of its environments has shown, in turn; but bytes go up to 1."""
    envs = environments_of(f"Shows-{name.replace(' ', '-')}-v0", seed=3)
    envs.begin(0)
    for _ in range(9):
        shown = [gym.spaces.flatten(SEEN[name], env.unwrapped.seen[-1]) for env in envs.envs.envs]
        encoded = envs.inputs[:, :-3]  # then two actions, and whether an episode begins
        np.testing.assert_array_equal(encoded, np.stack(shown).astype(np.float32) / HIGHEST.get(name, 1))
        assert encoded.dtype == np.float32
        envs.step(np.zeros(3, np.float32))
    assert len(np.unique(encoded)) > (name != "no bytes")


@pytest.mark.parametrize("name", UNSEEN)
def test_what_has_no_code_is_an_error(name):
    words = "of at most 1,048,576 values" if name.startswith("huge") else "numbers"
    with pytest.raises(NoCodeError, match=f"observations must be {words}, not"):
        encoder(UNSEEN[name])


def test_the_largest_discrete_observation():
    assert encoder(gym.spaces.Discrete(2**20))(np.array([3])).shape == (1, 2**20)
    with pytest.raises(NoCodeError):
        encoder(gym.spaces.Discrete(2**20 + 1))


@pytest.mark.parametrize(
    "space, observation",
    [
        (gym.spaces.Discrete(4), [0, -1]),
        (gym.spaces.Discrete(4, start=2), [6, 2]),
        (gym.spaces.MultiDiscrete([3, 4]), [[2, 3], [3, 0]]),
        (gym.spaces.Tuple([gym.spaces.Discrete(2), gym.spaces.Discrete(2)]), ([0, 2], [1, 1])),
    ],
)
def test_what_is_outside_its_space_has_no_code(space, observation):
    """Rather than that of another, or of another part."""
    with pytest.raises(NoCodeError, match="an observation is outside its space"):
        encoder(space)(observation)


def test_what_is_hidden_is_not_erased_in_the_environments_own_array():
    envs, observation = environments_of("CartPole-v1", hide_velocities=True), np.ones((3, 4), np.float32)
    envs.begin(0)
    envs.see(observation)
    assert observation.all() and envs.inputs[:, :4].tolist() == [[1, 0, 1, 0]] * 3


def test_actions_are_of_their_spaces_own_type(monkeypatch):
    taken = []

    def step(self, action):
        taken.append(action)
        return self.observation_space.sample(), 0.0, False, False, {}

    monkeypatch.setattr(Echo, "step", step)
    monkeypatch.setattr(Echo, "action_space", gym.spaces.Discrete(3, dtype=np.uint8), raising=False)
    envs = environments_of("Echo-v0")
    envs.begin(0)
    envs.step(np.array([0, 2, 1], np.float32))
    assert taken == [0, 2, 1] and all(Echo.action_space.contains(action) for action in taken)


def test_an_error_of_the_environment_is_not_one_of_its_space(monkeypatch):
    def reset(self, **_):
        raise TypeError("of its own")

    monkeypatch.setattr(Echo, "reset", reset)
    with pytest.raises(TypeError, match="of its own"):
        environments_of("Echo-v0")


def test_actions_that_begin_elsewhere_than_at_0():
    envs = environments_of("Echo-v0")
    envs.begin(0)
    for action in ([0, 1, 2], [2, 2, 0]):
        envs.step(np.array(action, np.float32))
        one_hot = np.eye(3)[action]
        np.testing.assert_array_equal(envs.inputs, np.concatenate([one_hot, one_hot, np.zeros((3, 1))], 1))


@pytest.mark.parametrize("env_id", ["MiniGrid-MemoryS7-v0", "MiniGrid-DoorKey-5x5-v0"])
def test_minigrid(monkeypatch, env_id):
    """One-hot codes are the image and direction that EnvPool gave, rows those of a pool with the same seeds."""
    pytest.importorskip("envpool")
    raw, pools, see, make = [], [], Environments.see, ppo_memory.make_vector
    monkeypatch.setattr(Environments, "see", lambda envs, shown: raw.append(copy.deepcopy(shown)) or see(envs, shown))
    monkeypatch.setattr(ppo_memory, "make_vector", lambda args, seeds: pools.append(seeds) or make(args, seeds))
    envs, generator = environments_of(env_id, num_envs=2), np.random.default_rng(0)
    envs.begin(0)
    assert envs.action_dim == 7 and envs.inputs.shape == (2, 49 * 21 + 4 + 7 + 1)
    twin = make(envs.args, pools[-1])
    expected, _ = twin.reset()
    over, ended = np.zeros(2, bool), 0
    for _ in range(260):
        for name in ("image", "direction"):
            np.testing.assert_array_equal(raw[-1][name], expected[name])
        cells = envs.inputs[:, : 49 * 21].reshape(2, 49, 21)
        parts = np.split(cells, [11, 17], 2)
        assert all((part.sum(2) == 1).all() for part in parts) and set(np.unique(cells)) == {0, 1}
        image = np.stack([part.argmax(2) for part in parts], 2).reshape(2, 7, 7, 3)
        np.testing.assert_array_equal(image, expected["image"])
        np.testing.assert_array_equal(envs.inputs[:, 49 * 21 :][:, :4], np.eye(4)[expected["direction"]])
        action = random_action(envs, generator)
        step = envs.step(action)
        expected, *theirs, _ = twin.step(action.astype(np.int32))
        for name, values in zip(("reward", "terminated", "truncated"), theirs, strict=True):
            np.testing.assert_array_equal(step[name], values)
        assert np.array_equal(step["valid"], ~over) and np.array_equal(envs.is_first, over)
        over = theirs[1] | theirs[2]
        ended += over.sum()
    assert ended >= 2


@pytest.mark.parametrize("reward, terminated", [(0.1, True), (0.0, False)])
def test_a_goal_in_minigrid_s_last_step_is_an_end(monkeypatch, reward, terminated):
    """EnvPool tells only of the time limit then."""
    pytest.importorskip("envpool")
    envs = environments_of("MiniGrid-MemoryS7-v0", num_envs=1)
    shown, *_ = envs.envs.step(np.zeros(1, np.int32))
    last = shown, np.array([reward], np.float32), np.array([False]), np.array([True]), {}
    monkeypatch.setattr(envs, "envs", SimpleNamespace(step=lambda action: last))
    step = envs.step(np.zeros(1, np.float32))
    assert step["terminated"] == [terminated] and step["truncated"] == [True]


HIDDEN = {  # the columns of velocities, as the environments' documentation has them
    "CartPole-v1": [1, 3],
    "Pendulum-v1": [2],
    "Acrobot-v1": [4, 5],
    "MountainCar-v0": [1],
    "MountainCarContinuous-v0": [1],
    "HalfCheetah-v4": [*range(8, 17)],
}


@pytest.mark.parametrize("env_id", HIDDEN)
def test_only_velocities_are_hidden(env_id):
    if env_id.startswith("HalfCheetah"):
        pytest.importorskip("mujoco")
    rows = []
    for hide in (False, True):
        envs, generator = environments_of(env_id, seed=4, hide_velocities=hide), np.random.default_rng(0)
        envs.begin(0)
        rows.append([envs.inputs])
        for _ in range(30):
            envs.step(random_action(envs, generator))
            rows[-1].append(envs.inputs)
    shown, masked = np.array(rows)
    velocities = np.isin(np.arange(shown.shape[-1]), HIDDEN[env_id])
    np.testing.assert_array_equal(masked[..., ~velocities], shown[..., ~velocities])
    assert not masked[..., velocities].any() and (np.abs(shown[..., velocities]).max((0, 1)) > 0).all()


def test_no_two_runs_or_environments_share_a_seed():
    """Nor do a run and its continuation, at any step, while the same run has the same."""

    def seeds(seed, step):
        Counter.forget()
        environments_of("CounterDiscrete-v0", num_envs=4, seed=seed).begin(step)
        return [env.seed for env in Counter.made]

    found = [seeds(seed, step) for seed in (0, 1, 2, 3) for step in (0, 1, 110)]
    assert len({seed for row in found for seed in row}) == 4 * 3 * 4
    assert seeds(1, 110) == found[5]


def test_vector_environments_of_one_seed_differ_by_run():
    def cues(seed, step):
        envs = environments_of("benchmarks.tmaze:TMaze-v0", num_envs=64, seed=seed)
        envs.begin(step)
        return envs.inputs[:, :4].tobytes()

    assert len({cues(seed, step) for seed in (1, 2) for step in (0, 64)}) == 4
    assert cues(1, 64) == cues(1, 64)


class Telling(Counter):
    """Its infos are of another length after each step, and of another kind in each environment."""

    def step(self, action):
        *outcome, _ = super().step(action)
        return *outcome, {"legal": np.zeros(self.steps), "who": "odd" if self.key % 2 else self.key}


gym.register("Telling-v0", Telling, kwargs={"discrete": True})


@pytest.mark.parametrize("module", [ppo_memory, dqn_memory])
def test_infos_are_not_looked_at(module):
    envs = module.Environments(module.Args(env_id="Telling-v0", num_envs=3))
    assert isinstance(envs.envs, SyncVectorEnv)
    for _ in range(30):
        assert envs.step(np.zeros(3))["valid"].shape == (3,)


# ---- What is refused ----
@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """refused(script, flag, …): its one line on stderr; it has ended with status 2 and left no folder."""
    monkeypatch.chdir(tmp_path)

    def refused(script, *argv):
        module = importlib.import_module(script)
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            module.main(tyro.cli(module.Args, args=["--no-cuda", *map(str, argv)]))
        out, err = capsys.readouterr()
        assert caught.value.code == 2 and out == "" and err.count("\n") == 1 and err.startswith("error: --")
        assert list(tmp_path.iterdir()) == []
        return err

    return refused


REFUSED = {  # environments, and what is said of them
    "CartPole-v7": "no such environment; nearest names: CartPole-v1",
    "benchmarks.tmaze:TMaze17-v0": "nearest names:",
    "benchmarks.cards:RepeatFirstEasiest-v0": "no such environment; nearest names: RepeatFirstEasy-v0",
    "no_such_module:Maze-v0": "no such environment; nearest names:",
    "Wanting-v0": "it can't be made (",
    "environments:Unlicensed-v0": "it can't be made (no licence)",
    "MultiDiscreteActionDiscrete-v0": "its actions must be Discrete or a one-dimensional float Box",
    "MultiBinaryActionDiscrete-v0": "its actions must be Discrete or a one-dimensional float Box",
    "EmptyActionContinuous-v0": "its actions must be Discrete or a one-dimensional float Box",
    "MatrixActionContinuous-v0": "its actions must be Discrete or a one-dimensional float Box",
    "SameStep-v0": "its vector environment must reset in the step after an episode's end",
    "Shows-text-v0": "observations must be numbers, not Text",
    "Shows-sequence-v0": "observations must be numbers, not Sequence",
    "Shows-graph-v0": "observations must be numbers, not Graph",
    "Shows-nested-text-v0": "observations must be numbers, not Text",
    "Shows-huge-v0": "discrete observations must be of at most 1,048,576 values, not Discrete",
    "Shows-huge-grid-v0": "discrete observations must be of at most 1,048,576 values, not MultiDiscrete",
}


@each_script
@pytest.mark.parametrize("env_id", REFUSED)
def test_environments_that_it_cannot_take(refused, script, env_id):
    err = refused(script, "--env-id", env_id)
    assert err.startswith(f"error: --env-id {env_id}: ") and REFUSED[env_id] in err


@each_script
def test_minigrid_that_it_cannot_take(refused, script):
    pytest.importorskip("envpool")
    err = refused(script, "--env-id", "MiniGrid-MemoryS8-v0")
    assert "no such environment; nearest names: " in err and "MiniGrid-MemoryS7-v0" in err
    for env_id in ("MiniGrid-Fetch-5x5-N2-v0", "MiniGrid-GoToDoor-5x5-v0", "MiniGrid-PutNear-6x6-N2-v0"):
        assert "its goal is told in words" in refused(script, "--env-id", env_id)


@each_script
def test_packages_that_are_missing(refused, monkeypatch, script):
    for package, env_id in (("envpool", "MiniGrid-MemoryS7-v0"), ("popgym", "popgym-RepeatFirstEasy-v0")):
        monkeypatch.setitem(sys.modules, package, None)
        assert package in refused(script, "--env-id", env_id).partition(": ")[2].partition(": ")[2]


@each_script
def test_velocities_of_other_environments_cannot_be_hidden(refused, script):
    for env_id in ("Hopper-v4", "benchmarks.tmaze:TMaze-v0", "MiniGrid-MemoryS7-v0"):
        err = refused(script, "--env-id", env_id, "--hide-velocities")
        assert err.startswith("error: --hide-velocities True: --env-id must be of CartPole, ") and env_id in err


@each_script
def test_minibatches_that_do_not_divide_the_environments(refused, script):
    err = refused(script, "--num-envs", 6, "--num-minibatches", 4)
    assert err == "error: --num-minibatches 4: must divide --num-envs 6\n"


def test_networks_begin_orthogonal():
    assert_orthogonal(ppo_memory.RecurrentActorCritic(5, 3, True, torch.nn.Identity(), 64))


# ---- Rollouts ----
def make_agent(script, envs, device=CPU, **arguments):
    """An agent for the environments, whose networks are far enough from the start for actions to differ."""
    module = importlib.import_module(script)
    torch.manual_seed(0)
    is_compiled = script.endswith("_torchcompile")
    with torch.set_grad_enabled(not is_compiled):
        agent = getattr(module, CLASSES[script])(module.Args(**SIZES | arguments), envs, device)
    with torch.no_grad():
        for parameter in [agent.network] if is_compiled else agent.network.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return agent


def play(agent, envs):
    """Fills a rollout, as `main` does."""
    for t in range(agent.args.num_steps):
        with torch.no_grad():
            step = envs.step(agent.act(t, envs))
        for name, values in step.items():
            agent.rollout.arrays[name][t] = values


def prepare(agent, envs, step=None):
    agent.rollout.upload()
    with torch.no_grad():
        agent.look_ahead(envs)
    (step or agent.prepare)()


def hand_over(eager, compiled):
    """Gives the compiled agent the weights, the rollout, the states and the scale of returns of the eager one.

    Both optimisers begin anew.
    """
    compiled.network.copy_(flat(eager.network))
    compiled.return_moments.copy_(eager.return_moments)
    for name, array in compiled.rollout.arrays.items():
        array[:] = eager.rollout.arrays[name]
    for name in ("log_prob", "value"):
        compiled.batch[name].copy_(eager.batch[name])
    compiled.state.copy_(eager.state)
    compiled.first_state.copy_(eager.first_state)
    eager.optimizer.state.clear()
    new = ppo_memory_torchcompile.Adam(compiled.network, eager.args.learning_rate, compiled.optimizer.eps)
    compiled.optimizer.load_state_dict(new.state_dict())


def resets(rollout):
    """Where episodes begin, which the last input says; a view, [T, N]."""
    return rollout["input"][..., -1]


MOMENTS = torch.tensor([0.7, 1.5**2])  # of returns of 0.7 ± 1.5


def pair(cell="lru", kind="Discrete", **arguments):
    """An eager and a compiled agent with equal networks and rollouts, which the eager one has made, and environments.

    It is the second rollout: most environments are amid an episode when it begins, and all begin new ones in it.
    """
    envs = environments_of(f"Counter{kind}-v0", arguments.get("num_envs", SIZES["num_envs"]))
    envs.begin(0)
    eager, compiled = (make_agent(script, envs, cell=cell, **arguments) for script in CLASSES)
    for _ in range(2):
        play(eager, envs)
    eager.return_moments.copy_(MOMENTS)
    hand_over(eager, compiled)
    assert resets(eager.rollout.arrays).any() and 0 < eager.rollout.arrays["valid"].mean() < 1
    return eager, compiled, envs


@each_script
@each_kind
@each_cell
def test_a_rollout_evaluated_is_what_acting_saw(script, kind, cell):
    """Log-probabilities and values, from the state that acting had when it began; three rollouts, resets in all."""
    envs, seen = environments_of(f"Counter{kind}-v0", 4), []
    envs.begin(0)
    agent = make_agent(script, envs, cell=cell)
    ask = agent.policy_and_value

    def noting(network, x, state):
        answer = ask(network, x, state)
        if x.ndim == 2:
            seen.append((x.clone(), state.clone(), answer[0].clone(), answer[2].clone()))
        return answer

    agent.policy_and_value = noting
    for rollout in range(3):
        seen.clear()
        play(agent, envs)
        x, state, policy, value = (torch.stack(column) for column in zip(*seen, strict=True))
        assert torch.equal(agent.first_state, state[0])
        assert cell == "none" or rollout == 0 or agent.first_state.any(), "it has been carried over"
        prepare(agent, envs)
        batch = agent.batch
        assert 0 < resets(batch).mean() < 1 and torch.equal(batch["input"], x)
        log_std = None if kind == "Discrete" else torch.zeros(3) + torch.as_tensor(log_std_of(agent))
        log_prob, _ = ppo_memory.log_prob_and_entropy(policy, log_std, batch["action"])
        with torch.no_grad():
            again, _, values = agent.evaluate(agent.network, batch | {"state": agent.first_state})
        for ours in (again, batch["log_prob"]):
            torch.testing.assert_close(ours, log_prob, rtol=1e-4, atol=2e-5)
        for ours in (values, batch["value"]):
            torch.testing.assert_close(ours, value, rtol=1e-4, atol=2e-5)
        assert log_prob.std() > 1e-2 and value.std() > 1e-2


@each_script
@each_cell
def test_looking_ahead_leaves_the_memory_as_it_was(script, cell):
    """It enters the value of what the environments show, from the state after the rollout, and no more."""
    envs = environments_of("CounterDiscrete-v0", 4)
    envs.begin(0)
    agent = make_agent(script, envs, cell=cell)
    play(agent, envs)
    state, rows = agent.state.clone(), {name: agent.batch[name].clone() for name in ("log_prob", "value")}
    with torch.no_grad():
        agent.look_ahead(envs)
        _, _, value, after = agent.policy_and_value(agent.network, torch.as_tensor(envs.inputs), state)
    assert torch.equal(agent.state, state) and (cell == "none" or not torch.equal(after, state))
    torch.testing.assert_close(agent.acted["value"][-1], value, rtol=1e-5, atol=1e-6)
    assert all(torch.equal(agent.batch[name], before) for name, before in rows.items())


def log_std_of(agent):
    if hasattr(agent, "module"):
        names = [name for name, _ in agent.module.module.named_parameters()]
        return agent.module.split(agent.network)[names.index("log_std")]
    return agent.network.log_std.detach()


@each_kind
def test_an_episode_has_nothing_of_the_one_before(kind):
    """At its first step another state makes no difference, at others it does."""
    eager, compiled, envs = pair(kind=kind, num_steps=16)
    prepare(eager, envs)
    first = resets(eager.batch).argmax(0)
    others = []
    for agent in (eager, compiled):
        prepare(agent, envs)
        batch = agent.batch | {"state": agent.first_state + 1}
        with torch.no_grad():
            log_prob, _, value = agent.evaluate(agent.network, batch)
        for i in range(4):
            assert torch.allclose(value[first[i] :, i], agent.batch["value"][first[i] :, i], atol=1e-5)
            assert torch.allclose(log_prob[first[i] :, i], agent.batch["log_prob"][first[i] :, i], atol=1e-5)
            others += (value - agent.batch["value"]).abs()[: first[i], i].tolist()
    assert len(others) > 4 and min(others) > 1e-4


# ---- Advantages ----
def patterns(steps):
    """All rows that can follow each other in an environment: of (reset, terminated, truncated, valid), one a step."""

    def follow(is_over, is_first, left):
        if left == 0:
            return [()]
        if is_over:
            return [((is_first, 0, 0, 0), *rest) for rest in follow(False, 1, left - 1)]
        ends = itertools.product((0, 1), repeat=2)
        return [((is_first, *end, 1), *rest) for end in ends for rest in follow(any(end), 0, left - 1)]

    begins = [(False, 0), (False, 1), (True, 0)]  # amid an episode, with its first step, after an end
    return np.array([rows for begin in begins for rows in follow(*begin, steps)], np.float32).transpose(1, 0, 2)


def scripted_pair(**arguments):
    """An eager and a compiled agent whose rollout of 6 steps holds all patterns of ends, one in each environment."""
    rows, generator = patterns(6), np.random.default_rng(0)
    count = rows.shape[1]
    envs = SimpleNamespace(
        inputs=generator.normal(size=(count, 7)).astype(np.float32),
        action_space=gym.spaces.Discrete(3),
        action_dim=3,
        is_discrete=True,
    )
    envs.inputs[:, -1] = rows[-1, :, 3] == 0  # the last step has only reset
    sizes = {"num_envs": count, "num_steps": 6, "num_minibatches": 1} | arguments
    eager, compiled = (make_agent(script, envs, **sizes) for script in CLASSES)
    arrays, size = eager.rollout.arrays, (6, count)
    arrays["input"][:] = generator.normal(size=(*size, 7))
    resets(arrays)[:], *ends = rows.transpose(2, 0, 1)
    for name, column in zip(("terminated", "truncated", "valid"), ends, strict=True):
        arrays[name][:] = column
    arrays["action"][:] = generator.integers(3, size=size)
    arrays["reward"][:] = generator.normal(size=size)
    eager.first_state = torch.as_tensor(generator.normal(size=eager.first_state.shape), dtype=torch.float32)
    tensors = eager.rollout.tensors
    with torch.no_grad():  # what acting would have stored
        stored = eager.evaluate(eager.network, tensors | {"state": eager.first_state})
        eager.batch["log_prob"].copy_(stored[0])
        eager.batch["value"].copy_(stored[2])
        *_, eager.state = eager.network(tensors["input"], eager.first_state)
        longer = torch.cat([tensors["input"], torch.as_tensor(envs.inputs)[None]])
        *_, values, _ = eager.network(longer, eager.first_state)
    eager.return_moments.copy_(MOMENTS)
    hand_over(eager, compiled)
    return eager, compiled, envs, values


def brute_force_advantages(rewards, values, terminated, truncated, gamma, lam):
    """Sums of discounted TD errors up to the episode's end, each term by its definition; [T], but values [T + 1]."""
    advantages = []
    for start in range(len(rewards)):
        total = 0.0
        for t in range(start, len(rewards)):
            target = rewards[t] if terminated[t] else rewards[t] + gamma * values[t + 1]
            total += (gamma * lam) ** (t - start) * (target - values[t])
            if terminated[t] or truncated[t]:
                break
        advantages.append(total)
    return advantages


@pytest.mark.parametrize("norm_value", [True, False])
@pytest.mark.parametrize("cell", ["lru", "lstm", "stack"])
def test_advantages_of_every_pattern_of_ends(cell, norm_value):
    """The critic's values are returns less a mean, over a deviation, which follow those of the rollout's returns."""
    eager, compiled, envs, values = scripted_pair(cell=cell, norm_value=norm_value)
    rollout = eager.rollout.tensors
    columns = [rollout["reward"], 0.7 + 1.5 * values, rollout["terminated"], rollout["truncated"]]
    columns = [column.T.tolist() for column in columns]
    expected = torch.tensor([brute_force_advantages(*row, 0.99, 0.95) for row in zip(*columns, strict=True)]).T
    valid = rollout["valid"] > 0
    assert len(patterns(6)[0]) == 2 * 217 + 97 and 0.6 < valid.float().mean() < 0.9
    for agent in (eager, compiled):
        prepare(agent, envs)
        torch.testing.assert_close(agent.batch["advantage"][valid], expected[valid], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(agent.batch["value"], values[:-1], rtol=1e-4, atol=1e-5)
        returns = (expected + 0.7 + 1.5 * values[:-1])[valid]
        powers = torch.tensor([0.7, 0.7**2 + 1.5**2])
        powers += norm_value * 0.1 * (torch.stack([returns.mean(), (returns**2).mean()]) - powers)
        mean, deviation = powers[0], (powers[1] - powers[0] ** 2).sqrt()
        torch.testing.assert_close(agent.return_moments, torch.stack([mean, deviation**2]), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(agent.batch["return"][valid], (returns - mean) / deviation, rtol=1e-4, atol=1e-4)


# ---- Loss ----
def loss_and_gradient(agent, batch):
    """The loss, all that is logged of it, and its gradient as one vector."""
    batch = batch | {"state": agent.first_state}
    if hasattr(agent, "module"):
        gradient, (loss, logged) = grad_and_value(agent.ppo_loss, has_aux=True)(agent.network, batch)
        return loss, logged, gradient
    loss, logged = agent.ppo_loss(agent.network, batch)
    parts = torch.autograd.grad(loss, [*agent.network.parameters()])
    return loss.detach(), logged, flattened(parts)


def moved(*agents):
    """The same agents after their networks have moved, as they do in an update phase."""
    generator = torch.Generator().manual_seed(5)
    eager, compiled = agents
    with torch.no_grad():
        for parameter in eager.network.parameters():
            parameter.add_(0.03 * torch.randn(parameter.shape, generator=generator))
        compiled.network.copy_(flat(eager.network))


@pytest.mark.parametrize("norm_adv", [True, False])
@pytest.mark.parametrize("clip_vloss", [True, False])
def test_loss_is_that_of_the_valid_rows(norm_adv, clip_vloss):
    """Computed from a list of them, by the formulas of the paper."""
    options = {"norm_adv": norm_adv, "clip_vloss": clip_vloss, "clip_coef": 0.1, "ent_coef": 0.02, "vf_coef": 0.7}
    eager, compiled, envs, _ = scripted_pair(cell="gru", **options)
    for agent in (eager, compiled):
        prepare(agent, envs)
    moved(eager, compiled)
    batch = {name: tensor.clone() for name, tensor in eager.batch.items()}
    rows = batch["valid"] > 0
    with torch.no_grad():
        policy, _, value, _ = eager.network(batch["input"], eager.first_state)
    policy = torch.distributions.Categorical(logits=policy[rows])
    ratio = (policy.log_prob(batch["action"][rows]) - batch["log_prob"][rows]).exp()
    advantage = batch["advantage"][rows]
    if norm_adv:
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.9, 1.1) * advantage).mean()
    value, old_value, returns = value[rows], batch["value"][rows], batch["return"][rows]
    error = (value - returns) ** 2
    if clip_vloss:
        error = torch.maximum(error, (old_value + (value - old_value).clamp(-0.1, 0.1) - returns) ** 2)
    entropy = policy.entropy().mean()
    expected = {"policy_loss": -surrogate, "value_loss": 0.5 * error.mean(), "entropy": entropy}
    expected |= {"approx_kl": (ratio - 1 - ratio.log()).mean()}
    expected |= {"clip_fraction": ((ratio - 1).abs() > 0.1).float().mean()}
    assert 0 < expected["clip_fraction"] < 1 and not torch.equal(value, old_value)
    for agent in (eager, compiled):
        loss, logged, _ = loss_and_gradient(agent, batch)
        assert logged.keys() == agent.losses.keys() == expected.keys()
        for name in expected:
            torch.testing.assert_close(logged[name], expected[name], rtol=1e-4, atol=1e-6)
        total = -surrogate - 0.02 * entropy + 0.7 * expected["value_loss"]
        torch.testing.assert_close(loss, total, rtol=1e-4, atol=1e-6)


@each_kind
@each_cell
def test_what_stands_in_masked_rows_makes_no_difference(cell, kind):
    """Neither to the loss, nor to its gradient, nor to the advantages of others: numbers of any size, bit for bit."""
    eager, compiled, envs = pair(cell, kind, num_steps=16)
    for agent in (eager, compiled):
        prepare(agent, envs)
    moved(eager, compiled)
    masked = eager.batch["valid"] == 0
    for agent in (eager, compiled):
        loss, logged, gradient = loss_and_gradient(agent, agent.batch)
        assert gradient.abs().max() > 1e-4
        for size in (1.0, 1e3, 1e18):
            batch = {name: tensor.clone() for name, tensor in agent.batch.items()}
            for name in batch.keys() - {"valid"}:
                garbage = size * torch.randn(batch[name][masked].shape)
                batch[name][masked] = garbage % 3 // 1 if name == "action" and kind == "Discrete" else garbage
            resets(batch)[masked] = 0  # in such a row no episode begins
            other_loss, other_logged, other_gradient = loss_and_gradient(agent, batch)
            assert torch.equal(other_loss, loss) and torch.equal(other_gradient, gradient), size
            assert all(torch.equal(other_logged[name], logged[name]) for name in logged)
        agent.return_moments.copy_(MOMENTS)
        prepare(agent, envs)
        before, moments = agent.batch["advantage"].clone(), agent.return_moments.clone()
        agent.rollout.arrays["reward"][masked.numpy()] = 1e6
        agent.return_moments.copy_(MOMENTS)
        prepare(agent, envs)
        assert torch.equal(agent.batch["advantage"][~masked], before[~masked])
        assert torch.equal(agent.return_moments, moments)


@each_script
def test_a_minibatch_without_a_valid_row_changes_nothing(script):
    eager, compiled, envs = pair()
    agent = eager if script == "ppo_memory" else compiled
    prepare(agent, envs)
    batch = agent.batch | {"valid": torch.zeros_like(agent.batch["valid"])}
    loss, logged, gradient = loss_and_gradient(agent, batch)
    assert loss == 0 and not gradient.any() and not any(logged.values())


@each_script
def test_a_masked_row_of_any_density_leaves_the_gradient_finite(script):
    """Where a narrow policy's action is near its mean, the density itself is no float32, and nor is its gradient."""
    eager, compiled, envs = pair(kind="Continuous")
    agent = eager if script == "ppo_memory" else compiled
    prepare(agent, envs)
    module = compiled.module
    views = dict(zip(module.shapes, module.split(compiled.network), strict=True)) if agent is compiled else {}
    batch = {name: tensor.clone() for name, tensor in agent.batch.items()} | {"state": agent.first_state}
    masked = batch["valid"] == 0
    with torch.no_grad():
        views.get("log_std", eager.network.log_std).fill_(-40)
        policy, *_ = agent.policy_and_value(agent.network, batch["input"], batch["state"])
    batch["action"][masked] = policy[masked]  # the mean: a density of about e^(40 · 3)
    assert masked.any() and (agent.evaluate(agent.network, batch)[0][masked] > 100).all()
    loss, _, gradient = loss_and_gradient(agent, batch)
    assert loss.isfinite() and gradient.isfinite().all()


@each_script
def test_the_scale_of_returns_is_right_where_they_are_large_and_alike(script):
    eager, compiled, _ = pair()
    agent, generator = eager if script == "ppo_memory" else compiled, torch.Generator().manual_seed(0)
    valid = torch.ones(32, 8)
    for _ in range(400):
        agent.update_return_scale(1e4 + torch.randn(32, 8, generator=generator), valid)
        mean, deviation = agent.return_scale()
    assert abs(mean - 1e4) < 0.1 and 0.9 < deviation < 1.1


@each_script
def test_a_rollout_of_resets_alone_leaves_the_scale_of_returns(script):
    eager, compiled, _ = pair()
    agent = eager if script == "ppo_memory" else compiled
    agent.update_return_scale(torch.full((4, 3), torch.nan), torch.zeros(4, 3))
    assert torch.equal(agent.return_moments, MOMENTS)


# ---- Updates ----
@each_script
@pytest.mark.parametrize("limit", [1e-3, 1e6])
def test_the_gradient_is_clipped(script, limit):
    eager, compiled, envs = pair(max_grad_norm=limit)
    agent = eager if script == "ppo_memory" else compiled
    prepare(agent, envs)
    agent.minibatch.copy_(torch.arange(len(agent.minibatch)))
    with torch.set_grad_enabled(agent is eager):
        agent.learn()
    norm = norm_of_first_gradient(agent.optimizer)
    assert norm == pytest.approx(limit, rel=1e-2) if limit < 1 else 2e-3 < norm < limit


def assert_same_phase(eager, compiled, envs):
    """All epochs and minibatches of an update phase leave the same parameters and report the same of every epoch."""
    args = eager.args
    prepare(eager, envs)
    prepare(compiled, envs)
    for name in ("log_prob", "value", "advantage", "return", "input", "action", "valid"):
        torch.testing.assert_close(compiled.batch[name], eager.batch[name], rtol=1e-4, atol=1e-5)
    assert eager.optimizer.param_groups[0]["eps"] == compiled.optimizer.eps
    epochs, kl = [torch.randperm(args.num_envs) for _ in range(args.update_epochs)], []
    for n, chosen in enumerate(torch.cat(epochs).view(-1, len(compiled.minibatch)), 1):
        eager.minibatch.copy_(chosen)
        eager.learn()
        compiled.minibatch.copy_(chosen)
        compiled.learn()
        for agent in (eager, compiled) if n == 1 else ():  # this one has seen the policy that acted
            assert agent.losses["approx_kl"].abs() < 1e-6 and agent.losses["clip_fraction"] == 0
        if n % args.num_minibatches == 0:
            for name, loss in eager.losses.items():
                assert compiled.losses[name].item() == pytest.approx(loss.item(), rel=1e-3, abs=1e-5), name
            kl.append(eager.losses["approx_kl"].item())
            assert_same(compiled.network, flat(eager.network))
    assert len(set(kl)) == args.update_epochs


def assert_same_phases(eager, compiled, envs):
    """The same, and again on the rollout after it, in which episodes begin elsewhere."""
    before = resets(eager.rollout.arrays).copy()
    assert_same_phase(eager, compiled, envs)
    play(eager, envs)
    hand_over(eager, compiled)
    assert not np.array_equal(resets(eager.rollout.arrays), before)
    assert_same_phase(eager, compiled, envs)


OPTIONS = (
    {"norm_adv": False, "norm_value": False, "clip_vloss": False, "max_grad_norm": 1e6},
    {"clip_coef": 1e-3, "max_grad_norm": 0.01},
    {"num_envs": 1, "num_minibatches": 1, "num_steps": 24},
)
PHASES = [(cell, kind, {}) for cell in CELLS for kind in KINDS]
PHASES += [(cell, kind, options) for cell, kind in (("lru", "Continuous"), ("gru", "Discrete")) for options in OPTIONS]


@pytest.mark.parametrize(
    "cell, kind, options", PHASES, ids=lambda part: part if isinstance(part, str) else ",".join(part) or "default"
)
def test_an_update_phase_is_the_same_in_both_versions(cell, kind, options):
    """Epoch for epoch, approximate KL included: so `target_kl` ends it after the same one."""
    assert_same_phase(*pair(cell, kind, learning_rate=1e-3, **options))


@pytest.fixture(scope="module")
def compiled_run(launch):
    """A run of `--cell lru --compile`, its agent and compiled steps, and compilations when the window opened and now.

    Its steps keep the guards that the script leaves out: one that failed would show as a recompilation.
    """
    module, made, steps, seen = ppo_memory_torchcompile, [], {}, []
    flags = ["--cell", "lru", "--total-timesteps", 160, "--measure-burnin", 40, "--learning-rate", 1e-3]
    flags += [word for name, size in SIZES.items() for word in (f"--{name.replace('_', '-')}", size)]
    with pytest.MonkeyPatch.context() as patch:
        make, original = module.CompiledMemoryPPOAgent, torch.compile
        patch.setattr(module, "CompiledMemoryPPOAgent", lambda *a: made.append(make(*a)) or made[0])
        patch.setattr(module.Adam.__init__, "__defaults__", (1e-5,))  # by the script's, rounding would be magnified

        def guards_kept(step, options, **more):
            options = {**options, "guard_filter_fn": lambda guards: [True] * len(guards)}
            steps[step.__name__] = original(step, options=options, **more)
            return steps[step.__name__]

        now, leave = module.Run.now, module.Run.__exit__
        patch.setattr(torch, "compile", guards_kept)
        patch.setattr(module.Run, "now", lambda run: (run.global_step and seen.append(compilations())) or now(run))
        patch.setattr(module.Run, "__exit__", lambda run, *error: seen.append(compilations()) or leave(run, *error))
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        run = launch("ppo_memory_torchcompile", *flags, "--compile", env_id="CounterDiscrete-v0")
    return SimpleNamespace(run=run, agent=made[0], steps=steps, opened=seen[0], ended=seen[1])


def compilations():
    """A copy of everything that torch counts when it compiles or recompiles."""
    return copy.deepcopy({name: dict(counts) for name, counts in torch._dynamo.utils.counters.items() if counts})


def test_nothing_is_compiled_in_the_window(compiled_run):
    assert compiled_run.opened == compiled_run.ended and "graph_break" not in compiled_run.ended
    assert compiled_run.opened["stats"]["unique_graphs"] == len(compiled_run.steps) == 2
    summary = compiled_run.run.summary
    assert summary["updates"] > 4 * 6 and summary["variant"] == "compile" and summary["status"] == "finished"


def test_a_compiled_update_phase_is_that_of_the_eager_version(compiled_run):
    """With the steps of a run that has ended, on rollouts that it has not seen."""
    eager, _, envs = pair(learning_rate=1e-3)
    compiled, steps = compiled_run.agent, compiled_run.steps
    eager.optimizer.param_groups[0]["eps"] = compiled.optimizer.eps
    hand_over(eager, compiled)
    assert compiled.learn is steps["learn"]
    assert_same_phases(eager, compiled, envs)


def test_no_reset_is_frozen_into_compiled_steps(compiled_run):
    """Replayed with resets that they have never seen: nowhere, everywhere, and at random."""
    agent, steps, before = compiled_run.agent, compiled_run.steps, compilations()
    generator, values = np.random.default_rng(0), []
    envs = SimpleNamespace(inputs=generator.normal(size=(4, 7)).astype(np.float32))
    agent.rollout.arrays["input"][:] = generator.normal(size=(8, 4, 7))
    agent.first_state.normal_()
    for share in (0, 1, 0.5, 0.2):
        resets(agent.rollout.arrays)[:] = generator.random((8, 4)) < share
        envs.inputs[:, -1] = generator.random(4) < share
        prepare(agent, envs)
        batch = {name: tensor[:, agent.minibatch] for name, tensor in agent.batch.items()}
        _, logged = agent.ppo_loss(agent.network, batch | {"state": agent.first_state[agent.minibatch]})
        steps["learn"]()
        torch.testing.assert_close(agent.losses, logged, rtol=1e-4, atol=1e-5)
        state = agent.state.clone()
        _, _, value, after = agent.policy_and_value(agent.network, agent.input, state)
        agent.row.fill_(5)
        steps["choose"]()
        torch.testing.assert_close(agent.batch["value"][5], value, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(agent.state, after, rtol=1e-4, atol=1e-5)
        values.append(value)
    assert all((one - other).abs().max() > 1e-3 for one, other in itertools.pairwise(values))
    assert compilations() == before


def test_a_compiled_update_phase_of_a_loop_is_that_of_the_eager_version(monkeypatch):
    """Of the GRU, whose loop is one operator to the compiler, against PyTorch's own, and of continuous actions."""
    monkeypatch.setattr(ppo_memory, "MIN_MEAN_LENGTH", 0)
    monkeypatch.setattr(ppo_memory, "MIN_BATCH", 0)
    eager, compiled, envs = pair("gru", "Continuous", learning_rate=1e-3)
    compiled.learn = compile_as_main_does(compiled.learn, **{"cpp.use_decompose_tanh": True})
    assert_same_phases(eager, compiled, envs)


@pytest.mark.parametrize("min_mean_length", [0, 5])
@torch.no_grad()
def test_a_compiled_lstm_replayed_with_other_resets(monkeypatch, min_mean_length):
    """Its outputs, last state and gradients, compiled once with no reset to be seen, against PyTorch's own loops.

    Forwards its operator looks where episodes begin, and takes PyTorch's loop or the one here.
    """
    torch.manual_seed(0)
    monkeypatch.setattr(ppo_memory, "MIN_MEAN_LENGTH", 0)
    original = CELLS["lstm"](8)
    module = ppo_memory_torchcompile.FlatModule(ppo_memory_torchcompile.LSTM(8))
    module.module.is_looped = True
    monkeypatch.setattr(ppo_memory_torchcompile, "MIN_MEAN_LENGTH", min_mean_length)
    parameters, x, called = flat(original), torch.randn(6, 3, 8), []
    state = torch.randn_like(original.initial_state(3))
    own = ppo_memory_torchcompile.LSTM.between_resets
    noted = staticmethod(lambda *inputs: called.append(len(inputs[3])) or own(*inputs))
    monkeypatch.setattr(ppo_memory_torchcompile.LSTM, "between_resets", noted)

    def loss(parameters, x, state, reset):
        outputs, last = module(parameters, x, state, reset)
        return outputs.square().mean() + last.sin().mean(), (outputs, last)

    step = compile_as_main_does(lambda *inputs: grad_and_value(loss, (0, 1, 2), has_aux=True)(*inputs))
    torch.compiler.allow_in_graph(ppo_memory_torchcompile.linear_recurrence)
    torch._dynamo.utils.counters.clear()
    results = []
    for share in (0, 0.5, 1, 0.2):
        reset = (torch.rand(6, 3) < share).float()
        gradients, (_, ours) = step(parameters, x, state, reset)
        with torch.enable_grad():
            inputs = [x.clone().requires_grad_(), state.clone().requires_grad_()]
            outputs = original(*inputs, reset)
            value = outputs[0].square().mean() + outputs[1].sin().mean()
            parts = torch.autograd.grad(value, [*original.parameters(), *inputs])
        theirs = [flattened(parts[:-2]), *parts[-2:]]
        for our, their in zip([*ours, *gradients], [*outputs, *theirs], strict=True):
            torch.testing.assert_close(our, their, rtol=1e-4, atol=1e-5)
        results.append(ours[0].clone())
    assert all((one - other).abs().max() > 1e-3 for one, other in itertools.pairwise(results))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    called = [count for count in called if count]
    assert len(called) == (4 if min_mean_length == 0 else 1) and called[0] == 1, "at the first share no episode begins"


# ---- Runs ----
def flags_of(**sizes):
    return [word for name, size in (SIZES | sizes).items() for word in (f"--{name.replace('_', '-')}", size)]


@each_script
@each_cell
def test_every_cell_runs(launch, script, cell):
    kind = KINDS[[*CELLS].index(cell) % 2]
    run = launch(script, *flags_of(total_timesteps=200, cell=cell), env_id=f"Counter{kind}-v0")
    assert run.summary["status"] == "finished" and run.summary["updates"] >= 200 // 32 * 6
    assert len(run.episodes) == len(run.finished) > 10
    for line, paid in zip(run.episodes, run.finished, strict=True):
        assert {name: line[name] for name in paid} == {**paid, "return": pytest.approx(paid["return"], rel=1e-5)}
    assert run.config["cell"] == cell and {"policy_loss", "value_loss", "entropy"} <= run.metrics[-1].keys()


@each_script
@pytest.mark.parametrize(
    "flags",
    [
        ["--no-norm-adv", "--no-clip-vloss", "--no-anneal-lr"],
        ["--num-envs", 1, "--num-minibatches", 1],
        ["--num-envs", 1, "--num-minibatches", 1, "--num-steps", 2, "--cell", "gru"],
        ["--num-steps", 1, "--num-minibatches", 1, "--cell", "stack"],
        ["--num-minibatches", 4, "--hidden-size", 5, "--cell", "s5"],
    ],
    ids=lambda flags: " ".join(map(str, flags)),
)
def test_flags(launch, script, flags):
    run = launch(script, *flags_of(total_timesteps=200), *flags, env_id="CounterContinuous-v0")
    sizes = run.config["num_minibatches"] * run.config["update_epochs"]
    rollout = run.config["num_envs"] * run.config["num_steps"]
    assert run.summary["status"] == "finished" and run.summary["updates"] >= 200 // rollout * sizes


@each_kind
@each_script
def test_same_seed_same_episodes(launch, script, kind):
    flags, env_id = flags_of(total_timesteps=160, learning_rate=0.01), f"Counter{kind}-v0"
    runs = [launch(script, *flags, "--seed", seed, env_id=env_id) for seed in (3, 3, 4)]
    assert runs[0].episodes == runs[1].episodes != runs[2].episodes
    frozen = launch(script, *flags, "--seed", 3, "--learning-rate", 1e-30, env_id=env_id)
    assert frozen.episodes != runs[0].episodes, "what is learned makes no difference to what is done"


@each_kind
def test_both_versions_make_the_same_run_up_to_their_first_update_phase(launch, monkeypatch, kind):
    """Its losses included; then they part by rounding errors."""
    flags, runs = flags_of(total_timesteps=60, num_minibatches=2, learning_rate=0.01), []
    for script in CLASSES:
        monkeypatch.setattr(importlib.import_module(script), "LOG_EVERY", 1)
        runs.append(launch(script, *flags, env_id=f"Counter{kind}-v0"))
    eager, compiled = (next(line for line in run.metrics if "value_loss" in line) for run in runs)
    assert eager["global_step"] == compiled["global_step"] < 32
    early = [[line for line in run.episodes if line["global_step"] <= eager["global_step"]] for run in runs]
    assert early[0] == early[1] and len(early[0]) > 3
    for name in ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction"):
        assert compiled[name] == pytest.approx(eager[name], rel=1e-3, abs=1e-5), name


@pytest.mark.parametrize("cell", ["lru", "gru"])
def test_separate_memory_of_host_and_device_makes_the_same_run(launch, monkeypatch, cell):
    flags = flags_of(total_timesteps=300, learning_rate=0.01, cell=cell)
    for script in CLASSES:
        first = launch(script, *flags, env_id="CounterDiscrete-v0")
        with monkeypatch.context() as patch:
            patch.setattr(importlib.import_module(script), "mirrored", as_on_a_gpu)
            second = launch(script, *flags, env_id="CounterDiscrete-v0")
        assert first.episodes == second.episodes and len(first.episodes) > 10
        for name in ("policy_loss", "value_loss"):
            assert first.metrics[-1][name] == second.metrics[-1][name]


@each_script
def test_minibatches_have_each_environment_once_an_epoch(launch, monkeypatch, script):
    flags = ["--num-steps", 5, "--num-envs", 8, "--total-timesteps", 60]
    assert_each_row_once_an_epoch(launch, monkeypatch, script, CLASSES[script], 8, *flags, env_id="CounterDiscrete-v0")


@each_script
def test_gradients_of_what_was_seen_long_ago_move_the_weights(script):
    """Small as they are: Adam's ε is smaller."""
    agent, size = make_agent(script, environments_of("CounterDiscrete-v0")), 1e-7
    networks = [agent.network] if script.endswith("_torchcompile") else list(agent.network.parameters())
    before = [parameters.detach().clone() for parameters in networks]
    if script.endswith("_torchcompile"):
        agent.optimizer.step(agent.network, torch.full_like(agent.network, size))
    else:
        for parameters in networks:
            parameters.grad = torch.full_like(parameters, size)
        agent.optimizer.step()
    moves = torch.cat([(old - new).flatten() for old, new in zip(before, networks, strict=True)])
    assert (moves > 0.8 * agent.args.learning_rate).all()


@each_script
def test_the_learning_rate_falls_to_nearly_nothing(launch, monkeypatch, script):
    """By the steps that were taken before a rollout, those that only reset not among them."""
    agent_class, used = getattr(importlib.import_module(script), CLASSES[script]), []
    learn = agent_class.learn

    def noting_learn(agent):
        optimizer = agent.optimizer
        rate = optimizer.lr.item() if script.endswith("compile") else optimizer.param_groups[0]["lr"]
        used.append((rate, agent.rollout.arrays["valid"].sum()))
        learn(agent)

    monkeypatch.setattr(agent_class, "learn", noting_learn)
    flags = flags_of(total_timesteps=200, learning_rate=0.01)
    run = launch(script, *flags, env_id="CounterDiscrete-v0")
    rollouts = used[::6]
    before = np.cumsum([0, *(steps for _, steps in rollouts)])
    assert 32 * len(rollouts) > before[-1] and 168 < before[-1] <= run.summary["global_step"]
    expected = [0.01 * (1 - steps / 200) for steps in before[:-1]]
    assert [rate for rate, _ in used] == pytest.approx(np.repeat(expected, 6), rel=1e-5)
    last = before[before < run.summary["global_step"]][-1]  # where the rollout began that is logged last
    assert run.metrics[-1]["learning_rate"] == pytest.approx(0.01 * (1 - last / 200))
    used.clear()
    launch(script, *flags, "--no-anneal-lr", env_id="CounterDiscrete-v0")
    assert [rate for rate, _ in used] == pytest.approx([0.01] * len(used)) and len(used) > 30


@each_script
def test_target_kl_ends_an_update_phase_after_its_epoch(launch, script):
    flags = flags_of(total_timesteps=100, learning_rate=0.01)
    counts = [launch(script, *flags, "--target-kl", kl, env_id="CounterDiscrete-v0") for kl in (1e-9, 1e9)]
    few, many = (run.summary["updates"] for run in counts)
    assert many == 3 * few > 0


@each_script
def test_target_kl_is_compared_after_each_epoch_with_its_last_minibatch(launch, monkeypatch, script):
    """The last minibatch of epoch n is made to report n / 100, the one before it far more."""
    agent_class, made, rollouts = getattr(importlib.import_module(script), CLASSES[script]), [], []
    prepare = agent_class.prepare

    def noting_prepare(agent, *envs):
        made.clear()
        rollouts.append(None)
        prepare(agent, *envs)

    def learn(agent):
        made.append(None)
        epoch, minibatch = divmod(len(made) - 1, 2)
        agent.losses["approx_kl"] = torch.tensor((epoch + 1) / 100 if minibatch == 1 else 1.0)

    monkeypatch.setattr(agent_class, "prepare", noting_prepare)
    monkeypatch.setattr(agent_class, "learn", learn)
    flags = flags_of(total_timesteps=100, target_kl=0.015)
    updates = launch(script, *flags, env_id="CounterDiscrete-v0").summary["updates"]
    assert updates == len(rollouts) * 2 * 2 > 0  # minibatches, epochs


@each_script
@pytest.mark.parametrize("env_id", ["popgym-RepeatFirstEasy-v0", "popgym-NoisyPositionOnlyCartPoleEasy-v0"])
def test_a_run_on_popgym(launch, script, env_id):
    """By its ids alone, through Gymnasium's vector interface: one of observations that are numbers, one of vectors."""
    pytest.importorskip("popgym")
    run = launch(script, *flags_of(total_timesteps=640), env_id=env_id)
    assert run.summary["status"] == "finished" and run.summary["updates"] > 0 and run.summary["global_step"] >= 640
    assert run.episodes and all(-1 <= episode["return"] <= 1 for episode in run.episodes)


@each_kind
@each_script
def test_a_run_that_is_stopped_goes_on(launch, tmp_path, script, kind):
    """With the parameters and the optimiser that it had, new episodes from other seeds, and a new rollout."""
    flags = flags_of(total_timesteps=300, measure_burnin=20, learning_rate=0.01)
    env_id = f"Counter{kind}-v0"
    run = launch(script, *flags, env_id=env_id, raises=SystemExit, stop_after=30)
    stopped_at = run.summary["global_step"]
    assert run.error.code == 130 and run.summary["status"] == "interrupted" and run.summary["updates"] > 0
    before = untimed(run.folder)
    checkpoint = torch.load(run.folder / "checkpoint.pt", weights_only=True)["parts"]
    folders = [shutil.copytree(run.folder, tmp_path / name) for name in ("one", "other")]
    resumed = [resume(script, folder) for folder in folders]
    assert_equal(resumed[0].run.loaded, {name: checkpoint[name] for name in resumed[0].run.loaded})
    assert untimed(folders[0]) == untimed(folders[1])
    metrics, episodes = untimed(folders[0])
    assert metrics[: len(before[0])] == before[0] and episodes[: len(before[1])] == before[1]
    assert {env.seed for env in resumed[0].made}.isdisjoint(env.seed for env in run.made)
    summary = json.loads((folders[0] / "summary.json").read_text())
    assert summary["status"] == "finished" and summary["resumed_at"] == [stopped_at] and summary["global_step"] >= 300
    assert summary["updates"] > run.summary["updates"] and summary["episodes"] == len(episodes) > len(before[1])


# ---- Probes ----
class Cue(gym.Env):
    """Two steps: first only action 0 goes on, then the right one is what the first observation alone has told.

    So the first action, which the agent sees later on, can't be used to note the cue.
    """

    observation_space, action_space = gym.spaces.Box(-1, 1, (2,), np.float32), gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.cue, self.t = int(self.np_random.integers(2)), 0
        return np.array([2 * self.cue - 1, 0], np.float32), {}

    def step(self, action):
        self.t += 1
        is_over = self.t == 2 or action == 1
        reward = float(self.t == 2 and action == self.cue)
        return np.array([0, 1], np.float32), reward, is_over, False, {}


gym.register("Cue-v0", Cue)


@pytest.mark.parametrize("cell, script", [*zip(CELLS, itertools.cycle(CLASSES)), ("none", "ppo_memory_torchcompile")])
def test_a_cue_is_remembered_by_all_cells_but_none(launch, script, cell):
    sizes = {"num_envs": 8, "num_steps": 32, "num_minibatches": 2, "update_epochs": 4, "hidden_size": 32}
    flags = flags_of(**sizes, total_timesteps=3500, learning_rate=5e-3, cell=cell)
    run = launch(script, *flags, env_id="Cue-v0")
    if cell == "none":
        assert 0.3 < run.summary["episode_return"] < 0.7
    else:
        assert run.summary["episode_return"] > 0.9


@each_script
def test_continuous_actions_are_learned(launch, script):
    """Best is 1 + what is observed; at the start the return is below -1."""
    sizes = {"num_envs": 8, "num_steps": 32, "num_minibatches": 2, "update_epochs": 4, "hidden_size": 32}
    flags = flags_of(**sizes, total_timesteps=5000, learning_rate=1e-2)
    run = launch(script, *flags, env_id="BothRewardContinuous-v0")
    first = [line["return"] for line in run.episodes[:100]]
    assert sum(first) / 100 < -1 and run.summary["episode_return"] > -0.3
