"""benchmarks/evaluate.py: what it plays, that it acts as the agent does, what it writes and refuses."""

import contextlib
import errno
import functools
import importlib
import io
import itertools
import json
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
import tyro

import environments
from pools import Counting
from test_atari import CoarseActorCritic

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "benchmarks"))

import evaluate  # noqa: E402

AGENTS = {
    "sac_continuous_action": "SACAgent",
    "td3_continuous_action": "TD3Agent",
    "dqn": "DQNAgent",
    "ppo": "PPOAgent",
    "ppo_continuous_action": "ContinuousPPOAgent",
    "ppo_atari_envpool": "AtariPPOAgent",
    "ppo_memory": "MemoryPPOAgent",
    "dqn_memory": "MemoryDQNAgent",
    "impala_ray": "IMPALAAgent",
    "appo_ray": "APPOAgent",
}
SCRIPTS = [algorithm + version for algorithm in AGENTS for version in ("", "_torchcompile")]
each_script = pytest.mark.parametrize("script", SCRIPTS)
SAC, CONTINUOUS_PPO = "sac_continuous_action_torchcompile", "ppo_continuous_action"


class Seeded(environments.Counter):
    """Begins anew at each reset with a seed; pays `worth` times as much."""

    def __init__(self, discrete=False, worth=1.0, chancy=False):
        super().__init__(discrete, chancy=chancy)
        self.worth = worth

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.has_begun = False
        return super().reset(seed=seed, options=options)

    def step(self, action):
        observation, reward, *rest = super().step(action)
        return observation, reward * self.worth, *rest


class Blind(Seeded):
    """Sees nothing from its first step on."""

    def step(self, action):
        observation, *rest = super().step(action)
        return observation * np.nan, *rest


class Drawn(Seeded):
    """Black pictures of an odd size; the one before step `breaks_at` of all can't be drawn."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012
    breaks_at = None

    def __init__(self, render_mode=None):
        super().__init__()
        self.render_mode = render_mode

    def render(self):
        if self.steps == Drawn.breaks_at:
            raise OSError("the screen broke")
        return np.zeros((401, 641, 3), np.uint8)


class DrawnInADict(gym.ObservationWrapper):
    def __init__(self, render_mode=None):
        super().__init__(Drawn(render_mode))
        self.observation_space = gym.spaces.Dict({"seen": self.env.observation_space})

    def observation(self, observation):
        return {"seen": observation}


class Sees(gym.Env):
    """Shows elements of a space; episodes of 3 steps, or of more."""

    action_space = gym.spaces.Discrete(2)

    def __init__(self, space, length=3):
        self.observation_space, self.length = space, length

    def reset(self, *, seed=None, options=None):
        self.observation_space.seed(seed)
        self.t = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        self.t += 1
        return self.observation_space.sample(), float(action), self.t == self.length, False, {}


class DeclaresIntegers(Seeded):
    """Says that it shows integers, and shows float64."""

    def __init__(self, discrete=False):
        super().__init__(discrete)
        self.observation_space = gym.spaces.Box(-9, 9, (3,), np.int64)


def nested(high, size=2):
    return gym.spaces.Dict({"a": gym.spaces.Tuple((gym.spaces.Box(-1, high, (size,)), gym.spaces.Discrete(5 - size)))})


for name, space in (
    ("Nested", nested(1)),
    ("NestedWider", nested(2)),
    ("NestedOther", nested(1, size=1)),
    ("Many", gym.spaces.MultiDiscrete([2, 3])),
    ("Others", gym.spaces.MultiDiscrete([3, 2])),
    ("Numbers", gym.spaces.Box(-1, 1, (5,))),
):
    gym.register(f"Sees{name}-v0", Sees, kwargs={"space": space})
gym.register("SeesManyLonger-v0", Sees, kwargs={"space": gym.spaces.MultiDiscrete([2, 3]), "length": 5})
gym.register("DeclaresIntegers-v0", DeclaresIntegers)
for kind, is_discrete in (("Continuous", False), ("Discrete", True)):
    gym.register(f"Lucky{kind}-v0", Seeded, kwargs={"discrete": is_discrete, "chancy": True})
    for name, worth in (("Seeded", 1.0), ("Generous", 2.0), ("Hopeless", float("nan"))):
        gym.register(f"{name}{kind}-v0", Seeded, kwargs={"discrete": is_discrete, "worth": worth})
gym.register("DrawnContinuous-v0", Drawn)
gym.register("DrawnInADict-v0", DrawnInADict)
gym.register("BlindContinuous-v0", Blind)


@pytest.fixture(scope="session")
def trained(launch):
    """trained(script): the files of a short run, and the agent as it was at its end; each script runs once."""

    @functools.cache
    def trained(script):
        algorithm, agents = script.removesuffix("_torchcompile"), []
        module = importlib.import_module(script)
        flags = {"learning-starts": 100, "buffer-size": 200, "batch-size": 8}
        if algorithm == "dqn_memory":
            flags |= {"slice-length": 4, "num-envs": 2}
        if algorithm.startswith("ppo"):
            flags = {"num-steps": 20, "num-minibatches": 2, "update-epochs": 2, "num-envs": 2}
        if algorithm.endswith("_ray"):
            flags = {"fragment-length": 20, "num-envs": 2}
            flags |= {"num-minibatches": 2} if algorithm == "appo_ray" else {}
        with pytest.MonkeyPatch.context() as patch:
            name = "Compiled" * (algorithm != script) + AGENTS[algorithm]
            make = getattr(module, name)
            patch.setattr(module, name, lambda *a: agents.append(make(*a)) or agents[0])
            stand_in(script, patch)
            env_id = "Scripted-v5" if "atari" in script else "Seeded"
            flags = [text for flag, value in flags.items() for text in (f"--{flag}", value)]
            run = launch(script, "--total-timesteps", 240, "--measure-burnin", 20, *flags, env_id=env_id)
        return SimpleNamespace(run=run, agent=agents[0], folder=run.folder)

    return trained


def stand_in(script, patch):
    """Scripted games, and a network that is quick at them, in the place of Atari's."""
    if "atari" in script:
        patch.setattr(importlib.import_module(script), "make_pool", Counting)
        patch.setattr(importlib.import_module(script), "AtariActorCritic", CoarseActorCritic)


@pytest.fixture
def folder_of(trained, tmp_path, monkeypatch):
    """folder_of(script): a copy of the run's folder, for one test alone."""

    def folder_of(script):
        stand_in(script, monkeypatch)
        folder = tmp_path / "runs" / script
        folder.mkdir(parents=True)
        for file in trained(script).folder.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        return folder

    return folder_of


def run(*flags):
    environments.Counter.forget()
    Counting.forget()
    evaluate.main(tyro.cli(evaluate.Args, args=[str(flag) for flag in flags]))


def lines_of(folder):
    return [json.loads(line) for line in (folder / "eval.jsonl").read_text().splitlines()]


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ---- What is played ----
@each_script
def test_returns_are_the_environments_own(script, folder_of):
    folder = folder_of(script)
    run(folder, "--episodes", 9)
    lines = lines_of(folder)
    played = Counting.games if "atari" in script else environments.Counter.finished
    keys = ("return", "length", "terminated")
    assert [[line[key] for key in keys] for line in lines] == [[game[key] for key in keys] for game in played]
    assert len(lines) == len({line["seed"] for line in lines}) == 9
    assert len({line["length"] for line in lines}) > 3 and {line["terminated"] for line in lines} == {True, False}
    if "atari" in script:
        assert sum(row[5] for row in Counting.rows) > sum(line["terminated"] for line in lines), "no game of many lives"
    else:
        seeds = [line["seed"] for line in lines]
        if "memory" in script:  # which has its own way to seed many
            seeds = [np.random.SeedSequence([seed, 0]).generate_state(1)[0] for seed in seeds]
        expected = [environments.length_of(environments.key_of(seed), 0) for seed in seeds]
        assert [line["length"] for line in lines] == expected
    env_id = json.loads((folder / "config.json").read_text())["env_id"]
    assert {(line["env_id"], line["trained_on"]) for line in lines} == {(env_id, env_id)}
    step = json.loads((folder / "summary.json").read_text())["global_step"]
    assert {line["global_step"] for line in lines} == {step}


def test_a_full_disk_leaves_whole_lines(folder_of, monkeypatch, capsys):
    folder = folder_of(SAC)
    run(folder, "--episodes", 2)
    before = lines_of(folder)

    class Full(io.StringIO):
        def __init__(self, path, mode):
            super().__init__()
            self.path = path

        def write(self, text):
            with open(self.path, "a") as file:
                file.write(text[: len(text) // 3])
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as caught:
        patch.setattr(
            evaluate, "open", lambda path, mode="r": (Full if mode == "a" else open)(path, mode), raising=False
        )
        run(folder, "--episodes", 3)
    assert caught.value.code == 2 and "No space left on device" in capsys.readouterr().err
    assert lines_of(folder) == before
    run(folder, "--episodes", 2)
    assert lines_of(folder) == 2 * before


def test_a_folder_that_can_not_be_written_to_says_so(folder_of, monkeypatch, capsys):
    folder = folder_of(SAC)

    def refuse(path, mode="r"):
        if mode == "a":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return open(path, mode)

    monkeypatch.setattr(evaluate, "open", refuse, raising=False)
    with pytest.raises(SystemExit) as caught:
        run(folder, "--episodes", 1)
    assert caught.value.code == 2 and "Permission denied" in capsys.readouterr().err


def test_what_was_played_before_an_error_is_told(folder_of, monkeypatch, capsys):
    """A folder that can't be written to is seen before the first episode; what comes in mid-run costs no table."""
    good, bad = folder_of(CONTINUOUS_PPO), folder_of(SAC)
    (bad / "eval.jsonl").mkdir()
    assert_refused(good.parent, capsys, [good, bad], "Is a directory")
    (bad / "eval.jsonl").rmdir()
    played = evaluate.play

    def play(env, policy, *rest):
        if isinstance(policy, evaluate.ScaledPolicy):
            raise RuntimeError("the simulator is gone")
        return played(env, policy, *rest)

    monkeypatch.setattr(evaluate, "play", play)
    with pytest.raises(RuntimeError) as caught:
        run(good, bad, "--episodes", 3)
    assert str(bad) in caught.value.__notes__[0]
    _, row = capsys.readouterr().out.splitlines()
    assert row.startswith(good.name) and len(lines_of(good)) == 3 and not (bad / "eval.jsonl").exists()


def test_an_episode_without_an_end(folder_of, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(evaluate, "LONGEST_EPISODE", 6)
    flags = [folder_of(SAC), "--episodes", 9]
    assert_refused(tmp_path, capsys, flags, "an episode has not ended in 6 steps: register a variant with")


@pytest.mark.parametrize(
    "value, text",
    [(None, "-"), (0.9712, "0.9712"), (1, "1"), (-21, "-21"), (1234.56, "1,234.6"), (-1e30, "-1e+30"), (1e-9, "1e-09")],
)
def test_figures_of_any_size(value, text):
    assert evaluate.figure(value) == text


@pytest.mark.parametrize("episodes, interval", [(1, "-"), (4, "-"), (5, "7 to 7")])
def test_an_interval_takes_five_episodes(tmp_path, episodes, interval):
    agent = SimpleNamespace(folder=tmp_path, env_id="A", trained_on="A", global_step=9, training_return=8.0)
    row = evaluate.table_row(agent, [{"return": 7.0}] * episodes)
    assert row == [tmp_path.name, "A", "9", str(episodes), "7", "7", interval, "8"]


def test_seeds_decide_and_lines_are_added(folder_of, capsys):
    """The same seed, the same episodes for every run; the table has a line a run, and what training ended with."""
    folders = [folder_of(SAC), folder_of(CONTINUOUS_PPO)]
    run(*folders, "--episodes", 3)
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 3
    for row, folder in zip(table[1:], folders):
        trained_return = json.loads((folder / "summary.json").read_text())["episode_return"]
        mean = np.mean([line["return"] for line in lines_of(folder)])
        assert row.startswith(f"{folder.name} ") and row.endswith(f" {evaluate.figure(trained_return)}")
        assert f" {evaluate.figure(mean)} " in row
    run(folders[0], "--episodes", 3)
    run(folders[0], "--episodes", 3, "--seed", 2)
    lines = lines_of(folders[0])
    assert lines[:3] == lines[3:6] and len(lines) == 9
    assert [line["seed"] for line in lines[:3]] == [line["seed"] for line in lines_of(folders[1])]
    assert not {line["seed"] for line in lines[:3]} & {line["seed"] for line in lines[6:]}


def test_the_largest_seed_of_a_game(folder_of):
    run(folder := folder_of("ppo_atari_envpool"), "--episodes", 1, "--seed", 2**32 - 1)
    assert len(lines_of(folder)) == 1


def test_random_numbers_of_python_and_numpy_are_seeded_too(folder_of):
    folder = folder_of(SAC)
    for env_id in ("Seeded", "Lucky", "Lucky"):
        run(folder, "--episodes", 3, "--env-id", f"{env_id}Continuous-v0")
    plain, one, other = ([line["return"] for line in lines_of(folder)[i : i + 3]] for i in (0, 3, 6))
    assert one == other and plain != one


@pytest.mark.parametrize(
    ("space", "returned", "seen"),
    [
        ("uint8", "float32", "float32"),
        ("int64", "float64", "float64"),
        ("uint8", "uint8", "uint8"),
        ("float32", "float64", "float32"),
        ("float32", "int64", "float32"),
    ],
)
def test_policy_sees_what_the_environment_returns(space, returned, seen):
    """Floats where the space says integers stay what they are, as in training."""
    first, last = (np.array(values).astype(returned) for values in ([0.25, 200], [0.75, 3]))
    env = SimpleNamespace(
        observation_space=gym.spaces.Box(0, 255, (2,), space),
        action_space=gym.spaces.Discrete(2),
        reset=lambda seed: (first, {}),
        step=lambda action: (last, 1.0, action == 1, False, {}),
    )
    observations, actions = [], iter([0, 1])

    def policy(observation):
        observations.append(observation[0].numpy())
        return torch.tensor([next(actions)])

    assert evaluate.play(env, policy, 0, lambda *_: None)["return"] == 2
    for observation, expected in zip(observations, (first, last), strict=True):
        assert observation.dtype == seen and np.array_equal(observation, expected)


def test_another_variant_is_labelled(folder_of, capsys):
    folder = folder_of(SAC)
    run(folder, "--episodes", 3)
    run(folder, "--episodes", 3, "--env-id", "GenerousContinuous-v0")
    own, other = lines_of(folder)[:3], lines_of(folder)[3:]
    assert [line["return"] for line in other] == pytest.approx([2 * line["return"] for line in own])
    assert {line["env_id"] for line in other} == {"GenerousContinuous-v0"}
    assert {line["trained_on"] for line in own + other} == {"SeededContinuous-v0"}
    before, after = capsys.readouterr().out.split("\nrun ")
    assert "(trained on" not in before and "GenerousContinuous-v0 (trained on SeededContinuous-v0)" in after


# ---- How it acts ----
def own_outputs(script, agent, observation, monkeypatch):
    """What the agent itself does on raw observations when it does not explore; the logits of discrete actions."""
    if script.startswith("ppo_continuous"):
        moments = agent.observation_moments
        observation = ((observation.numpy() - moments.mean) / moments.deviation()).clip(-10, 10).astype(np.float32)
        mean, *_ = agent.policy_and_value(agent.network, torch.as_tensor(observation))
        return torch.as_tensor(agent.to_range(mean.numpy()))
    if script.startswith("appo"):
        mean, *_ = agent.policy_and_value(agent.network, observation.float())
        return torch.as_tensor(environments.in_range(mean.numpy()))
    if script.startswith(("ppo", "impala")):
        return agent.policy_and_value(agent.network, observation.float())[0]
    if script.startswith("dqn"):
        return agent.q_values(agent.q_network, observation.float())
    if script.startswith("td3"):
        return agent.policy(agent.actor, observation.float())
    monkeypatch.setattr(torch, "randn_like", torch.zeros_like)
    return agent.policy(agent.actor, observation.float())[0]


@pytest.mark.parametrize("script", [script for script in SCRIPTS if "memory" not in script])
def test_policy_is_the_agents_own(script, trained, folder_of, monkeypatch):
    agent = evaluate.load_agent(folder_of(script), evaluate.Args(folders=()))
    observation = evaluate.random_observations(agent.env.observation_space, 300)
    with torch.no_grad():
        expected = own_outputs(script, trained(script).agent, observation, monkeypatch)
        outputs = actions = agent.policy(observation)
        if isinstance(agent.env.action_space, gym.spaces.Discrete):
            outputs = agent.policy.network(observation.float())
            outputs = outputs if script.startswith("dqn") else outputs[0]
            assert torch.equal(actions, expected.argmax(1))
    assert expected.std(0).max() > 1e-3, "it acts alike on all observations"
    torch.testing.assert_close(outputs, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("script", [script for script in SCRIPTS if "memory" in script])
def test_policy_remembers_as_the_agent_does(script, trained, folder_of):
    """Step by step what the agent's sequence model does at a time; nothing is left where an episode begins."""
    loaded, agent = evaluate.load_agent(folder_of(script), evaluate.Args(folders=())), trained(script).agent
    policy, space = loaded.policy, loaded.env.action_space
    ask, network = (agent.policy_and_value, agent.network) if "ppo" in script else (agent.q_values, agent.q_network)
    inputs, seen = torch.randn(60, 1, *loaded.env.observation_space.shape), []
    inputs[..., -1] = torch.rand(60, 1) < 0.2
    policy.network.register_forward_hook(lambda network, given, outputs: seen.append(outputs[0]))
    with torch.no_grad():
        outputs = ask(network, inputs, torch.zeros_like(agent.state[:1]))[0]
        actions = torch.stack([policy(row) for row in inputs])
    expected = outputs.argmax(-1) if isinstance(space, gym.spaces.Discrete) else outputs
    assert outputs.std(0).max() > 1e-3
    torch.testing.assert_close(torch.stack(seen), outputs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(actions, expected, rtol=1e-4, atol=1e-5)


def test_a_memorys_mean_action_is_in_units_of_half_the_range(monkeypatch):
    """As training has it: the bounds of the second and third dimension have no room for [-1, 1]."""
    module, means, taken = importlib.import_module("ppo_memory"), np.float32([[0.5, -0.4, 3]]), []
    env = evaluate.Remembered(module, module.Args(env_id="SeededContinuous-v0", num_envs=1))
    step = Seeded.step
    monkeypatch.setattr(Seeded, "step", lambda env, action: taken.append(action.copy()) or step(env, action))
    network = torch.nn.Identity()
    network.cell = SimpleNamespace(initial_state=lambda batch: torch.zeros(batch, 1))
    network.forward = lambda x, state: (torch.from_numpy(means), None, None, state)
    length = evaluate.play(env, evaluate.MemoryPolicy(network, env.action_space, {}), 3, lambda *_: None)["length"]
    np.testing.assert_allclose(taken, [environments.in_range(means[0])] * length, rtol=1e-6)


@pytest.mark.parametrize("flag", [("--video",), ("--export", "policy.pt2"), ("--compile",)])
def test_what_is_not_done_with_a_memory(folder_of, monkeypatch, capsys, flag):
    monkeypatch.setattr(evaluate, "check_args", lambda args: None)
    before = contents(folder := folder_of("ppo_memory"))
    with pytest.raises(SystemExit) as caught:
        run(folder, *flag)
    (line,) = capsys.readouterr().err.splitlines()
    assert caught.value.code == 2 and line.startswith(f"error: {flag[0]}: not of ") and contents(folder) == before


def test_a_memory_that_learned_a_short_maze_is_scored_in_a_longer_one(launch, tmp_path, capsys):
    flags = ("--total-timesteps", 256, "--cell", "gru", "--hidden-size", 8, "--num-steps", 4)
    folder = launch("ppo_memory", *flags, env_id="benchmarks.tmaze:TMaze10-v0").folder
    (folder / "config.json").unlink()  # what the memory is, the checkpoint knows
    run(folder, "--episodes", 2, "--env-id", "benchmarks.tmaze:TMaze30-v0")
    lines = lines_of(folder)
    assert [line["length"] for line in lines] == [31, 31] and {line["return"] for line in lines} <= {0.0, 1.0}
    assert "TMaze30-v0 (trained on benchmarks.tmaze:TMaze10-v0)" in capsys.readouterr().out


def test_a_memory_acts_only_where_it_sees_the_same(launch, tmp_path, capsys):
    """Also where as many inputs come out of another space."""
    flags = ("--total-timesteps", 64, "--hidden-size", 8, "--num-steps", 4)
    folder = launch("ppo_memory", *flags, env_id="SeesMany-v0").folder
    run(folder, "--episodes", 1, "--env-id", "SeesManyLonger-v0")
    for env_id, words in (("SeesOthers-v0", "MultiDiscrete([3 2])"), ("SeesNumbers-v0", "(5,) float32")):
        assert_refused(tmp_path, capsys, [folder, "--env-id", env_id], f"--env-id {env_id}: has {words} observations")
    folder = launch("ppo_memory", *flags, env_id="SeesNested-v0").folder
    run(folder, "--episodes", 1, "--env-id", "SeesNestedWider-v0")
    assert_refused(
        tmp_path, capsys, [folder, "--env-id", "SeesNestedOther-v0"], "--env-id SeesNestedOther-v0: has {'a'"
    )


def test_normalisation_is_frozen(folder_of):
    folder = folder_of(CONTINUOUS_PPO)
    before = contents(folder)
    agent = evaluate.load_agent(folder, evaluate.Args(folders=()))
    statistics = {name: tensor.clone() for name, tensor in agent.policy.named_buffers()}
    for _ in range(2):
        evaluate.evaluate(agent, agent.policy, evaluate.Args(folders=(), episodes=5))
    assert lines_of(folder)[:5] == lines_of(folder)[5:]
    assert statistics["mean"].abs().max() > 0.1, "it was never learned"
    for name, tensor in agent.policy.named_buffers():
        assert torch.equal(tensor, statistics[name])
    after = contents(folder)
    after.pop(folder / "eval.jsonl")
    assert after == before


def test_compiled_policy_does_the_same(folder_of, monkeypatch, capsys):
    folder, acted = folder_of(CONTINUOUS_PPO), []
    run(folder, "--episodes", 4)
    original = evaluate.compiled

    def noting(policy, space):
        compiled = original(policy, space)
        assert compiled is not policy
        return lambda observation: acted.append(1) or compiled(observation)

    monkeypatch.setattr(evaluate, "compiled", noting)
    monkeypatch.setattr(evaluate, "times_as_fast", lambda policy, compiled, observation: (5e-6, 2e-6, 2.5))
    run(folder, "--episodes", 4, "--compile")
    lines = lines_of(folder)
    assert len(acted) == sum(line["length"] for line in lines[4:])
    assert [line["return"] for line in lines[4:]] == pytest.approx([line["return"] for line in lines[:4]], rel=1e-5)
    assert "acts 2.5 times as fast compiled (2 µs an action, 5 without)" in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["--compile", "--export"])
def test_programs_take_what_the_environment_shows(launch, tmp_path, monkeypatch, flag):
    """Not what its space says; compiled code would take the bits of a float64 for those of an int64."""
    flags = ("--total-timesteps", 64, "--num-steps", 32, "--num-envs", 2)
    folder = launch(CONTINUOUS_PPO, *flags, env_id="DeclaresIntegers-v0").folder
    run(folder, "--episodes", 3)
    if flag == "--compile":
        monkeypatch.setattr(evaluate, "times_as_fast", lambda policy, compiled, observation: (5e-6, 2e-6, 2.5))
        run(folder, "--episodes", 3, "--compile")
    else:
        run(folder, "--episodes", 0, "--export", tmp_path / "policy.pt2")
        policy = torch.export.load(tmp_path / "policy.pt2").module()
        agent = evaluate.load_agent(folder, evaluate.Args(folders=()))
        with open(folder / "eval.jsonl", "a") as file:
            for line in lines_of(folder):
                file.write(json.dumps(evaluate.play(agent.env, policy, line["seed"], lambda *_: None)) + "\n")
    returns = [line["return"] for line in lines_of(folder)]
    assert len(returns) == 6 and returns[3:] == pytest.approx(returns[:3], rel=1e-5)


def test_how_much_faster():
    slow, fast = (lambda _, seconds=seconds: time.sleep(seconds) for seconds in (2e-3, 5e-4))
    seconds, fewer, ratio = evaluate.times_as_fast(slow, fast, torch.zeros(1))
    assert 2e-3 < seconds < 4e-3 and 5e-4 < fewer < 2e-3 and 2 < ratio < 4


# ---- Export ----
LOADS = """
import sys, torch
for path in sys.argv[1:]:
    policy = torch.export.load(path).module()
    observations = torch.load(path + ".in")
    torch.save([policy(observation) for observation in observations], path + ".out")
assert not {"tyro", "gymnasium", "evaluate"} & set(sys.modules)
"""


def test_exported_policy_runs_without_this_repository(folder_of, tmp_path):
    """In a process of its own, on batches of any size, of the environment's type."""
    expected = {}
    for script in (SAC, CONTINUOUS_PPO, "dqn_torchcompile", "ppo_atari_envpool"):
        path = tmp_path / f"{script}.pt2"
        folder = folder_of(script)
        run(folder, "--episodes", 0, "--export", path)
        assert not (folder / "eval.jsonl").exists()
        agent = evaluate.load_agent(folder, evaluate.Args(folders=()))
        space = agent.env.observation_space
        observations = [evaluate.random_observations(space, count, seed=5) for count in (1, 7, 300)]
        torch.save(observations, f"{path}.in")
        expected[path] = [agent.policy(observation) for observation in observations]
    (tmp_path / "load.py").write_text(LOADS)
    subprocess.run([sys.executable, "-I", "load.py", *map(str, expected)], cwd=tmp_path, check=True, timeout=120)
    for path, actions in expected.items():
        for one, other in zip(torch.load(f"{path}.out"), actions, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("script", [SAC, "td3_continuous_action_torchcompile"])
@pytest.mark.parametrize("bound, dtype", [(1, np.float64), (1000, np.float32)])
def test_rounding_does_not_keep_a_policy_from_being_exported(script, bound, dtype, tmp_path):
    """The network is of float32, whatever the actions' type and range."""
    space, module = gym.spaces.Box(-bound, bound, (6,), dtype), importlib.import_module(script)
    env = SimpleNamespace(observation_space=gym.spaces.Box(-np.inf, np.inf, (24,)), action_space=space)
    actor = module.GaussianActor if script == SAC else module.DeterministicActor
    parts = {"agent": {"actor": 1.5 * module.FlatModule(actor(24, 6)).initial}}
    path = tmp_path / "policy.pt2"
    evaluate.export(evaluate.make_policy(module, env, parts), env.observation_space, path)
    action = torch.export.load(path).module()(evaluate.random_observations(env.observation_space, 3))
    assert action.dtype == torch.from_numpy(space.low).dtype and (action.abs() <= bound).all()


def test_a_narrow_action_is_compared_by_its_own_size(tmp_path, monkeypatch):
    """Beside one of a million, where a difference of 0.01 is rounding."""
    policy, load = torch.nn.Linear(4, 2), torch.export.load
    with torch.no_grad():
        policy.weight[0] *= 1e6
    space, path = gym.spaces.Box(-np.inf, np.inf, (4,)), tmp_path / "policy.pt2"
    for difference, is_written in (torch.tensor([0.01, 0]), True), (torch.tensor([0, 0.01]), False):
        path.unlink(missing_ok=True)

        def other(file, difference=difference):
            program = load(file).module()
            return SimpleNamespace(module=lambda: lambda observation: program(observation) + difference)

        monkeypatch.setattr(torch.export, "load", other)
        with contextlib.nullcontext() if is_written else pytest.raises(SystemExit):
            evaluate.export(policy, space, path)
        assert path.exists() == is_written


def test_a_program_that_acts_otherwise_is_not_written(folder_of, tmp_path, monkeypatch, capsys):
    folder, path = folder_of(CONTINUOUS_PPO), tmp_path / "policy.pt2"
    path.write_text("an older one")
    load = torch.export.load

    def wrong(file):
        program = load(file).module()
        return SimpleNamespace(module=lambda: lambda observation: program(observation) + 1e-3)

    monkeypatch.setattr(torch.export, "load", wrong)
    before = contents(tmp_path)
    with pytest.raises(SystemExit) as caught:
        run(folder, "--export", path)
    assert caught.value.code == 2 and "--export" in capsys.readouterr().err
    assert contents(tmp_path) == before


# ---- Video ----
@pytest.fixture
def undisplayed(monkeypatch):
    """Leaves out the search for a renderer, which scripted environments don't need."""
    monkeypatch.setattr(evaluate, "draw_without_display", lambda: None)


def frames_of(path):
    import imageio_ffmpeg

    reader = imageio_ffmpeg.read_frames(path)
    width, height = next(reader)["size"]
    return [np.frombuffer(frame, np.uint8).reshape(height, width, 3) for frame in reader]


@pytest.mark.parametrize("env_id", ["DrawnContinuous-v0", "DrawnInADict-v0"])
def test_video_has_every_step_with_the_return(folder_of, undisplayed, env_id):
    pytest.importorskip("imageio_ffmpeg")
    folder = folder_of(SAC)
    run(folder, "--video", "--episodes", 3, "--env-id", env_id)
    frames = frames_of(folder / "video.mp4")
    assert len(frames) == sum(line["length"] + 1 for line in lines_of(folder))
    assert frames[0].shape == (400, 640, 3)
    texts = [frame[:60].astype(int) for frame in frames]
    assert all(text.max() > 200 for text in texts)
    assert all(abs(one - other).max() > 100 for one, other in itertools.pairwise(texts)), "the text does not change"
    assert frames[0][100:].max() < 30
    assert not list(folder.glob("*.new*"))


@pytest.mark.parametrize("shape", [(37, 51, 4), (36, 51)])
def test_pictures_of_other_colours_and_of_changing_size(folder_of, undisplayed, monkeypatch, shape):
    pytest.importorskip("imageio_ffmpeg")
    height, width, *channels = shape
    shown = lambda env: np.full((height, width + env.steps, *channels), 255.0, np.float32)  # noqa: E731
    monkeypatch.setattr(Drawn, "render", shown)
    monkeypatch.setattr(Drawn, "metadata", {"render_modes": ["rgb_array"], "render_fps": None})
    run(folder := folder_of(SAC), "--video", "--episodes", 2, "--env-id", "DrawnContinuous-v0")
    frames = frames_of(folder / "video.mp4")
    assert len(frames) == sum(line["length"] + 1 for line in lines_of(folder))
    assert all(frame.mean() > 200 for frame in frames)


def test_the_camera_follows_where_a_model_has_one_that_does(undisplayed, monkeypatch):
    from gymnasium.envs.mujoco.mujoco_rendering import MujocoRenderer

    module = importlib.import_module("sac_continuous_action")
    monkeypatch.setattr(MujocoRenderer, "render", lambda renderer, mode: np.zeros((4, 4, 3), np.uint8))
    cameras = {}
    for env_id in ("HalfCheetah-v4", "InvertedPendulum-v4"):
        _, env = evaluate.make_env(module, env_id, True)
        camera = env.unwrapped.mujoco_renderer.camera_id
        cameras[env_id] = env.unwrapped.model.camera(camera).name if camera != -1 else None
    assert cameras == {"HalfCheetah-v4": "track", "InvertedPendulum-v4": None}


def test_a_video_that_breaks_off_leaves_the_one_before(folder_of, undisplayed, monkeypatch, capsys):
    pytest.importorskip("imageio_ffmpeg")
    folder = folder_of(SAC)
    (folder / "video.mp4").write_text("an older one")
    before = contents(folder)
    monkeypatch.setattr(Drawn, "breaks_at", 5)
    with pytest.raises(SystemExit) as caught:
        run(folder, "--video", "--episodes", 5, "--env-id", "DrawnContinuous-v0")
    assert caught.value.code == 2 and "the screen broke" in capsys.readouterr().err
    assert contents(folder) == before


@pytest.mark.parametrize(("works", "chosen"), [({"egl", "osmesa"}, "egl"), ({"osmesa"}, "osmesa"), ((), "disabled")])
def test_a_renderer_that_works_is_chosen(works, chosen, monkeypatch, capsys):
    tried = lambda command, env, **_: SimpleNamespace(returncode=int(env["MUJOCO_GL"] not in works))  # noqa: E731
    monkeypatch.setattr(evaluate.subprocess, "run", tried)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    monkeypatch.setenv("MUJOCO_GL", "")
    monkeypatch.delenv("MUJOCO_GL")
    evaluate.draw_without_display()
    assert evaluate.os.environ["MUJOCO_GL"] == chosen
    if chosen == "disabled":
        with pytest.raises(SystemExit) as caught:
            evaluate.make_env(importlib.import_module(CONTINUOUS_PPO), "InvertedPendulum-v4", True)
        assert caught.value.code == 2 and "InvertedPendulum-v4 can't be drawn here" in capsys.readouterr().err


class Lives(gym.Env):
    """A game whose ball lies still until FIRE (1) is pressed; a life ends with each third action after that."""

    observation_space, action_space = gym.spaces.Box(0, 9, ()), gym.spaces.Discrete(3)

    def get_action_meanings(self):
        return ["NOOP", "FIRE", "UP"]

    def reset(self, *, seed=None, options=None):
        self.actions, self.lives = [], 2
        return 0, {"lives": self.lives}

    def step(self, action):
        self.actions.append(action)
        self.lives -= len(self.actions) % 4 == 0
        return len(self.actions), 1.0, self.lives == 0, False, {"lives": self.lives}


def test_twin_begins_each_life_with_fire():
    env = evaluate.FireFirst(Lives())
    assert env.reset()[0] == 1
    steps = [env.step(2)[:3] for _ in range(6)]
    assert env.unwrapped.actions == [1, 2, 2, 2, 1, 2, 2, 2]
    assert [step[2] for step in steps] == [False] * 5 + [True]


def test_twin_sees_what_the_agent_was_trained_on(folder_of):
    pytest.importorskip("ale_py")
    pytest.importorskip("cv2")
    env = evaluate.make_twin("ALE/Breakout-v5")
    observation, _ = env.reset(seed=1)
    assert observation.shape == (4, 84, 84) and observation.dtype == np.uint8 and observation.max() > 100
    assert env.action_space.n == 4 and env.render().shape == (210, 160, 3)


# ---- Bad input ----
def store(folder, **changes):
    checkpoint = torch.load(folder / "checkpoint.pt", weights_only=True)
    checkpoint["args"] |= {name: changes.pop(name) for name in ("env_id",) if name in changes}
    torch.save(checkpoint | changes, folder / "checkpoint.pt")


def cut(folder):
    whole = (folder / "checkpoint.pt").read_bytes()
    (folder / "checkpoint.pt").write_bytes(whole[: len(whole) // 2])


def flip(folder):
    """One bit of the network."""
    content = bytearray((folder / "checkpoint.pt").read_bytes())
    with zipfile.ZipFile(folder / "checkpoint.pt") as archive:
        largest = max(archive.infolist(), key=lambda part: part.file_size)
    content[largest.header_offset + largest.file_size // 2] ^= 1
    (folder / "checkpoint.pt").write_bytes(content)


def older(folder):
    """As checkpoints were before they held the arguments."""
    checkpoint = torch.load(folder / "checkpoint.pt", weights_only=True)
    checkpoint["parts"]["run"] = checkpoint.pop("run")
    checkpoint["env_id"] = checkpoint.pop("args")["env_id"]
    torch.save(checkpoint | {"format": 5}, folder / "checkpoint.pt")


BAD_FOLDERS = {
    "no_folder": (lambda f: [path.unlink() for path in f.iterdir()] and f.rmdir(), "there is no such folder"),
    "no_checkpoint": (lambda f: (f / "checkpoint.pt").unlink(), "has no checkpoint.pt"),
    "empty": (lambda f: (f / "checkpoint.pt").write_bytes(b""), "damaged"),
    "cut": (cut, "damaged"),
    "flipped": (flip, "damaged"),
    "foreign": (lambda f: torch.save({"weights": torch.ones(3)}, f / "checkpoint.pt"), "not that of a run"),
    "no_mapping": (lambda f: torch.save([1, 2], f / "checkpoint.pt"), "not that of a run"),
    "other_script": (lambda f: store(f, script="../tests/conftest"), "not that of a run"),
    "older_format": (older, "format 5"),
    "other_format": (lambda f: store(f, format=0), "format 0"),
    "no_network": (lambda f: store(f, parts={"agent": {}}), "does not fit"),
    "other_spaces": (lambda f: store(f, env_id="ToyContinuous-v0"), "does not fit"),
    "other_algorithm": (lambda f: store(f, script="td3_continuous_action"), "does not fit"),
    "unknown_environment": (lambda f: store(f, env_id="Nowhere-v0"), "no such environment"),
}
BAD_FLAGS = {
    "episodes": (["--episodes", 0], "--episodes 0"),
    "fewer_episodes": (["--episodes", -1, "--export", "policy.pt2"], "--episodes -1"),
    "seed": (["--seed", -1], "--seed -1"),
    "unknown_environment": (["--env-id", "SeededContinuos-v0"], "SeededContinuous-v0"),
    "other_spaces": (["--env-id", "ToyContinuous-v0"], "(4,) float64"),
    "other_actions": (["--env-id", "SeededDiscrete-v0"], "Discrete(3)"),
    "nan": (["--env-id", "HopelessContinuous-v0"], "is nan"),
    "nan seen": (["--env-id", "BlindContinuous-v0"], "an observation of the environment is not finite"),
    "export_name": (["--export", "policy.pt"], "NAME.pt2"),
    "export_folder": (["--export", "nowhere/policy.pt2"], "NAME.pt2"),
}


def assert_refused(tmp_path, capsys, flags, expected):
    before = contents(tmp_path)
    with pytest.raises(SystemExit) as caught:
        run(*flags)
    err = capsys.readouterr().err
    assert caught.value.code == 2 and expected in err and err.startswith("error: ") and err.count("\n") == 1, err
    assert contents(tmp_path) == before


@pytest.mark.parametrize("case", BAD_FOLDERS)
def test_bad_folders_are_refused(case, folder_of, tmp_path, capsys):
    """Before anything is played, also if another one is in order."""
    import agents  # noqa: F401 - registers ToyContinuous-v0

    good, folder = folder_of(CONTINUOUS_PPO), folder_of(SAC)
    change, expected = BAD_FOLDERS[case]
    change(folder)
    assert_refused(tmp_path, capsys, [good, folder], expected)


@pytest.mark.parametrize("case", BAD_FLAGS)
def test_bad_flags_are_refused(case, folder_of, tmp_path, capsys, monkeypatch):
    import agents  # noqa: F401 - registers ToyContinuous-v0

    monkeypatch.chdir(tmp_path)
    flags, expected = BAD_FLAGS[case]
    assert_refused(tmp_path, capsys, [folder_of(SAC), *flags], expected)


def test_export_takes_one_run(folder_of, tmp_path, capsys):
    flags = [folder_of(SAC), folder_of(CONTINUOUS_PPO), "--export", tmp_path / "policy.pt2"]
    assert_refused(tmp_path, capsys, flags, "takes one run folder, not 2")


def test_video_without_what_it_needs(folder_of, undisplayed, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ale_py", None)
    installed = importlib.util.find_spec
    found = {"imageio_ffmpeg": True, "PIL": True}
    monkeypatch.setattr(evaluate.importlib.util, "find_spec", lambda name: found.get(name) or installed(name))
    assert_refused(tmp_path, capsys, [folder_of(SAC), "--video"], "SeededContinuous-v0 can't be drawn here")
    flags = [folder_of("ppo_atari_envpool"), "--video"]
    assert_refused(tmp_path, capsys, flags, "ALE/Scripted-v5 needs its Gymnasium twin")
    monkeypatch.setattr(evaluate.importlib.util, "find_spec", lambda name: None)
    assert_refused(tmp_path, capsys, flags, "needs the package imageio_ffmpeg")


def test_as_a_program(launch, start):
    """A real task, from any directory, in a process of its own."""
    sizes = ["--total-timesteps", 300, "--learning-starts", 200, "--buffer-size", 300, "--batch-size", 8]
    folder = launch("dqn", *sizes, env_id="CartPole-v1").folder
    process = start(ROOT / "benchmarks" / "evaluate.py", folder.name, "--episodes", 2, cwd=folder.parent)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and not err, err
    assert folder.name in out and "CartPole-v1" in out and len(lines_of(folder)) == 2
    process = start(ROOT / "benchmarks" / "evaluate.py", "nowhere", cwd=folder.parent)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (2, "", "error: nowhere: there is no such folder\n")
    # A module of the user's may have the name of one beside evaluate.py
    (folder.parent / "cards.py").write_text("import gymnasium as gym\ngym.register('Mine-v0', 'cartpole_twin:make')\n")
    (folder.parent / "cartpole_twin.py").write_text("import gymnasium as gym\nmake = lambda: gym.make('CartPole-v1')\n")
    process = start(ROOT / "benchmarks" / "evaluate.py", folder.name, "--env-id", "cards:Mine-v0", cwd=folder.parent)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and "cards:Mine-v0 (trained on CartPole-v1)" in out, err
