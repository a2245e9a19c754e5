"""A run that is stopped goes on: what checkpoint.pt holds, what --resume makes of it, and what it refuses."""

import contextlib
import dataclasses
import errno
import fcntl
import importlib
import io
import json
import math
import os
import random
import resource
import shutil
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch

import environments
from test_run_files import ON_POLICY, SCRIPTS, algorithm_of, small

CPU = torch.device("cpu")
LINE = ("global_step", "wall_time", "fps", "episode_return", "episode_length", "learning_rate")
NO_REPLAY = [script for script in SCRIPTS if algorithm_of(script) not in ON_POLICY]


def lines_of(folder, name):
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def untimed(folder):
    """Everything in the files of metrics and episodes but what a clock gave."""
    metrics = [
        {key: line[key] for key in line if key not in ("wall_time", "fps")} for line in lines_of(folder, "metrics")
    ]
    return metrics, lines_of(folder, "episodes")


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def resume(script, folder, **changes):
    """Runs `main` in this process as `--resume folder` would; its Run, its output, and its environments."""
    module = importlib.import_module(script)
    environments.Counter.forget()
    config = json.loads((folder / "config.json").read_text())
    known = {field.name: config[field.name] for field in dataclasses.fields(module.Args)}
    runs, out, err = [], io.StringIO(), io.StringIO()
    enter = module.Run.__enter__

    def noting(run):
        runs.append(run)
        parts = {name: part.state_dict() for name, part in run.parts.items() if name != "buffer"}
        run.loaded = torch.load(copy_of(parts), weights_only=True)
        return enter(run)

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(module.Run, "__enter__", noting)
        module.main(module.Args(**known | {"resume": str(folder)} | changes))
    return SimpleNamespace(run=runs[0], out=out.getvalue(), err=err.getvalue(), made=list(environments.Counter.made))


def copy_of(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return buffer


def as_if(folder, **changes):
    """Makes of a run's folder that of a run with other arguments."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    checkpoint = torch.load(folder / "checkpoint.pt", weights_only=True)
    checkpoint["args"] |= changes
    torch.save(checkpoint, folder / "checkpoint.pt")


def assert_equal(ours, theirs):
    """Nested dicts of tensors and numbers."""
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys()
        for name in ours:
            assert_equal(ours[name], theirs[name])
    elif isinstance(ours, torch.Tensor):
        assert torch.equal(ours, theirs) and ours.dtype == theirs.dtype
    elif isinstance(ours, list):
        for our, their in zip(ours, theirs, strict=True):
            assert_equal(our, their)
    else:
        assert ours == theirs


@pytest.fixture(scope="module", params=SCRIPTS)
def stopped(request, launch):
    """A script, and a run of it that was ended by a signal in its 110th step."""
    script = request.param
    replay = ["--save-replay"] if script in NO_REPLAY else []
    run = launch(script, *small(script, 40), *replay, env_id="Counter", raises=SystemExit, stop_after=110)
    assert run.error.code == 130 and run.summary["global_step"] == 110
    return script, run


# Of each kind one, where what is tested is in the helpers that all scripts share
FEW = ["dqn", "dqn_torchcompile", "sac_continuous_action_torchcompile", "ppo_continuous_action_torchcompile"]
few_scripts = pytest.mark.parametrize("stopped", FEW, indirect=True, scope="module")


@pytest.fixture
def copied(stopped, tmp_path):
    """The same, in a folder that may be changed."""
    script, run = stopped
    return script, Path(shutil.copytree(run.folder, tmp_path / run.folder.name))


def test_a_stopped_run_goes_on(copied):
    script, folder = copied
    before, checkpoint = untimed(folder), torch.load(folder / "checkpoint.pt", weights_only=True)
    first_summary = json.loads((folder / "summary.json").read_text())
    resumed = resume(script, folder)
    assert resumed.run.loaded.keys() == checkpoint["parts"].keys() - {"buffer"}
    assert_equal(resumed.run.loaded, {name: checkpoint["parts"][name] for name in resumed.run.loaded})

    # No step is missing or there twice, and nothing that was written before has changed
    metrics, episodes = untimed(folder)
    assert [line["global_step"] for line in metrics] == [100, 200, 300]
    assert metrics[: len(before[0])] == before[0] and episodes[: len(before[1])] == before[1]
    (env,) = resumed.made
    scripted = environments.scripted_episodes([env.seed], 190)  # it begins a new episode at step 110
    ends = [(line["global_step"], line["length"]) for line in episodes[len(before[1]) :]]
    assert ends == [(step + 110, length) for step, _, length, _ in scripted]

    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "finished" and summary["global_step"] == 300 and summary["episodes"] == len(episodes)
    assert summary["updates"] > first_summary["updates"] > 0
    assert summary["wall_seconds"] > first_summary["wall_seconds"]
    assert summary["fps_window"][0] > 110 and summary["resumed_at"] == [110] and first_summary["resumed_at"] == []
    times = [line["wall_time"] for line in lines_of(folder, "metrics")]
    assert times == sorted(times)
    last = episodes[-100:]
    assert summary["episode_return"] == pytest.approx(sum(line["return"] for line in last) / len(last), abs=1e-4)
    assert not list(folder.glob("*.new"))


def test_updates_are_as_many_as_without_the_stop(copied, launch):
    """With its replay, an off-policy run makes up for nothing; a rollout that was under way is lost."""
    script, folder = copied
    before = json.loads((folder / "summary.json").read_text())["updates"]
    resumed = resume(script, folder)
    updates = json.loads((folder / "summary.json").read_text())["updates"]
    if script.startswith("ppo_memory"):  # whose rollouts hold as many steps as are not resets
        steps = environments.scripted_steps([resumed.made[0].seed], 190, resets_take_a_step=True)
        assert before > 0 and updates - before == len(steps) // 10 * resumed.run.args.update_epochs
        return
    uncut = launch(script, *small(script, 40))
    assert updates == uncut.summary["updates"]  # on policy: steps 110 and 300 end rollouts of 10


def test_two_resumes_from_one_checkpoint_give_the_same_files(copied, tmp_path):
    script, folder = copied
    other = shutil.copytree(folder, tmp_path / "other")
    resume(script, folder)
    resume(script, other)
    assert untimed(folder) == untimed(other)


@few_scripts
def test_other_seeds_than_before(copied, stopped):
    script, folder = copied
    (env,) = resume(script, folder).made
    assert env.seed not in [made.seed for made in stopped[1].made]


@few_scripts
def test_lines_past_the_checkpoint_are_cut(copied, tmp_path):
    """Such as a killed run leaves: some whole, the last one not; more than the resumed run writes in their place."""
    script, folder = copied
    longer = Path(shutil.copytree(folder, tmp_path / "longer"))
    for name in ("metrics", "episodes"):
        with open(longer / f"{name}.jsonl", "a") as file:
            file.write(
                '{"global_step": 111, "return": 1.0}\n' + 10_000 * '{"global_step": 120}\n' + '{"global_step": 1'
            )
    resume(script, folder)
    resume(script, longer)
    assert untimed(folder) == untimed(longer)


@few_scripts
def test_random_numbers_go_on_where_they_were(copied, monkeypatch):
    script, folder = copied
    module, seen = importlib.import_module(script), []

    def noting(*arguments, begin=module.first_observations):
        seen.extend([random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()])
        return begin(*arguments)

    monkeypatch.setattr(module, "first_observations", noting)
    python, (_, keys, *_), of_torch = torch.load(folder / "checkpoint.pt", weights_only=True)["random"]
    resume(script, folder)
    assert_equal(seen, [python, keys, of_torch])


@pytest.mark.parametrize(
    "script", [script for script in SCRIPTS if algorithm_of(script) in ("ppo", "ppo_continuous_action")]
)
def test_a_rollout_that_was_cut_begins_anew(launch, monkeypatch, script):
    run, steps = launch(script, *small(script), env_id="Counter", raises=SystemExit, stop_after=114), []
    classes = vars(importlib.import_module(script)).values()
    (agent_class,) = [kind for kind in classes if isinstance(kind, type) and kind.__name__.endswith("Agent")]

    def noting(agent, t, observation, act=agent_class.act):
        steps.append(t)
        return act(agent, t, observation)

    monkeypatch.setattr(agent_class, "act", noting)
    resume(script, run.folder)
    assert steps[:12] == [*range(10), 0, 1]
    assert json.loads((run.folder / "config.json").read_text())["resume"] is None


@pytest.mark.parametrize("name", ["metrics", "episodes"])
def test_files_that_were_changed_are_refused(small_run, tmp_path, name):
    """They are cut where they ended at the checkpoint, which must be the end of a line."""
    folder = Path(shutil.copytree(small_run, tmp_path / "run"))
    path = folder / f"{name}.jsonl"
    for content in (path.read_bytes()[:-30], path.read_bytes().replace(b"\n", b"\r\n")):
        path.write_bytes(content)
        status, err = load(folder)
        assert status == 2 and err.count("\n") == 1 and f"{name}.jsonl is not what it was" in err


@few_scripts
def test_it_may_grow(copied):
    script, folder = copied
    resume(script, folder, total_timesteps=400)
    assert [line["global_step"] for line in lines_of(folder, "metrics")] == [100, 200, 300, 400]
    assert json.loads((folder / "config.json").read_text())["total_timesteps"] == 400
    resume(script, folder, total_timesteps=450)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["global_step"] == 450 and summary["resumed_at"] == [110, 400]


def test_a_run_that_has_finished_is_not_resumed(small_run, tmp_path):
    folder = Path(shutil.copytree(small_run, tmp_path / "run"))
    resume("dqn", folder)
    status, err = load(folder)
    assert status == 2 and err == "error: --total-timesteps 300: must be above the 300 made before\n"
    assert load(folder, total_timesteps=301) == (0, "")


@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize("part", ["agent", "optimizer", "observation_moments", "return_variance"])
def test_a_checkpoint_is_kept_if_a_number_of_the_next_is_not_finite(launch, monkeypatch, part, number):
    module, saves = importlib.import_module("ppo_continuous_action"), []

    def save(run):
        state, broken = run.parts[part].state_dict(), not saves
        values = {"agent": "network.log_std", "optimizer": "exp_avg"}.get(part, "squares")
        if part == "optimizer":
            state = next(iter(state["state"].values()))
        if broken:
            saves.append(run.global_step)
            original(run)
            before = contents(run.folder)["checkpoint.pt"]
            state = dict(state) | {values: torch.as_tensor(state[values]) * number}
            fake = SimpleNamespace(state_dict=lambda: {"state": state})
            run.parts[part], kept = fake, run.parts[part]
            original(run)
            run.parts[part] = kept
            assert contents(run.folder)["checkpoint.pt"] == before

    original = module.Run.save
    monkeypatch.setattr(module.Run, "save", save)
    run = launch("ppo_continuous_action", *small("ppo_continuous_action"))
    assert saves == [300] and run.err.count("not finite") == 1


@pytest.mark.parametrize("script", NO_REPLAY)
def test_without_replay_it_is_collected_anew_before_learning_goes_on(launch, monkeypatch, script):
    """By the policy: actions at random are for the beginning of the whole run."""
    run, sampled = launch(script, *small(script, 40), raises=SystemExit, stop_after=110), []
    before, sample = run.summary["updates"], gym.spaces.Box.sample
    monkeypatch.setattr(gym.spaces.Box, "sample", lambda space: sampled.append(space) or sample(space))
    resumed = resume(script, run.folder)
    frequency = 10 if script.startswith("dqn") else 1
    assert resumed.run.updates - before == (300 - 110 - 40) // frequency and "no update" not in resumed.err
    before, *_, after = [set(line) - set(LINE) for line in lines_of(run.folder, "metrics")]
    assert before == after and any("loss" in name for name in before)
    assert sampled == [] and len(resumed.made[0].actions) == 190
    launch(script, *small(script, 40))
    assert len(sampled) == (0 if script.startswith("dqn") else 40), "else this test sees nothing"


@pytest.mark.parametrize("version", ["", "_torchcompile"])
@pytest.mark.parametrize("algorithm", ["sac_continuous_action", "td3_continuous_action"])
def test_losses_that_are_not_computed_anew_are_those_of_before(launch, algorithm, version):
    flags = ["--save-replay", "--policy-frequency", 300]  # of the actor there is the first update alone
    run = launch(algorithm + version, *small(algorithm, 40), *flags, raises=SystemExit, stop_after=110)
    resume(algorithm + version, run.folder)
    lines = lines_of(run.folder, "metrics")
    assert [line["global_step"] for line in lines] == [100, 200, 300]
    assert len({line["qf_loss"] for line in lines}) == 3 and lines[0]["actor_loss"] != 0
    for name in {"actor_loss", "alpha", "alpha_loss"} & set(lines[0]):
        assert len({line[name] for line in lines}) == 1


@pytest.mark.parametrize("script", NO_REPLAY)
def test_it_is_said_if_what_is_left_was_too_short_for_an_update(launch, script):
    run = launch(script, *small(script, 190), raises=SystemExit, stop_after=110)
    resumed = resume(script, run.folder)
    assert "no update" not in run.err and resumed.run.updates == 0 and resumed.run.global_step == 300
    assert "no update in these 190 steps" in resumed.err


@pytest.mark.parametrize("script", [script for script in NO_REPLAY if script.startswith(("sac", "td3"))])
def test_without_replay_actions_are_at_random_as_long_as_nothing_was_learned(launch, monkeypatch, script):
    run, sampled = launch(script, *small(script, 40), raises=SystemExit, stop_after=30), []
    sample = gym.spaces.Box.sample
    monkeypatch.setattr(gym.spaces.Box, "sample", lambda space: sampled.append(space) or sample(space))
    resumed = resume(script, run.folder)
    assert len(sampled) == 40 and resumed.run.updates == 300 - 30 - 40


def test_save_every(launch, monkeypatch):
    module, steps = importlib.import_module("dqn"), []
    save = module.Run.save
    monkeypatch.setattr(module.Run, "save", lambda run: steps.append(run.global_step) or save(run))
    run = launch("dqn", *small("dqn"), "--save-every", 70, "--num-envs", 4)
    assert steps == [72, 140, 212, 280, 300] and (run.folder / "checkpoint.pt").exists()


@pytest.mark.parametrize("name, status", [("Failing", "failed"), ("NaNReward", "failed")])
def test_after_a_failure(launch, name, status):
    """A run that failed can go on, but a checkpoint never holds what is not finite."""
    run = launch("sac_continuous_action", *small("sac", 30), env_id=name, raises=(RuntimeError, SystemExit))
    assert run.summary["status"] == status
    if name == "NaNReward":
        assert not (run.folder / "checkpoint.pt").exists() and "not finite" in run.err
    else:
        assert torch.load(run.folder / "checkpoint.pt", weights_only=True)["run"]["global_step"] == 89


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("script, agent", [("sac", "SACAgent"), ("td3", "TD3Agent")])
def test_a_failure_in_a_step_counts_the_updates_that_were_made(launch, monkeypatch, script, agent, waits):
    """Beside the environments' steps, one of which fails, or after these."""
    module, made = importlib.import_module(f"{script}_continuous_action"), []

    class Noting(getattr(module, agent)):
        must_wait = property(lambda self: waits, lambda self, value: None)

        def update_critics(self, *due):
            made.append(due)
            super().update_critics(*due)

    monkeypatch.setattr(module, agent, Noting)
    run = launch(module.__name__, *small(script, 30), env_id="Failing", raises=RuntimeError)
    assert run.summary["status"] == "failed" and run.summary["updates"] == len(made) == 60 - waits


def test_a_compiled_run_goes_on_with_what_was_loaded(launch, monkeypatch):
    """The warm-up puts back what it changed, and nothing is compiled for other tensors than those that were loaded."""
    run = launch("dqn_torchcompile", *small("dqn", 40), "--compile", raises=SystemExit, stop_after=110)
    checkpoint = torch.load(run.folder / "checkpoint.pt", weights_only=True)["parts"]["agent"]
    module, seen = importlib.import_module("dqn_torchcompile"), []
    warm_up = module.warm_up

    def noting(steps, agent, run):
        warm_up(steps, agent, run)
        seen.append(torch.load(copy_of(agent.state_dict()), weights_only=True))

    monkeypatch.setattr(module, "warm_up", noting)
    resumed = resume("dqn_torchcompile", run.folder)
    assert_equal(seen[0], checkpoint)
    assert resumed.run.updates == (300 - 110 - 40) // 10 + run.summary["updates"]
    now = resumed.run.parts["agent"].state_dict()
    assert not torch.equal(now["q_network"], checkpoint["q_network"])
    summary = json.loads((run.folder / "summary.json").read_text())
    assert summary["warmup_seconds"] > run.summary["warmup_seconds"] > 0


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_second_interrupt_while_saving_is_not_lost(launch, monkeypatch, error):
    """torch.save turns one that comes while it writes into a RuntimeError of its own."""

    def save(checkpoint, file):
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1.2)
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt as interrupt:
            raise (RuntimeError("unexpected pos 64 vs 0") if error is RuntimeError else interrupt) from None

    monkeypatch.setattr(torch, "save", save)
    run = launch("dqn", *small("dqn"), "--save-every", 70, raises=SystemExit)
    assert run.error.code == 130 and run.summary["status"] == "interrupted" and run.summary["global_step"] == 70
    assert run.err == ""
    assert not (run.folder / "checkpoint.pt").exists()


def test_a_disk_without_locks(launch, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    run = launch("dqn", *small("dqn"), raises=SystemExit, stop_after=200)
    resume("dqn", run.folder)
    assert json.loads((run.folder / "summary.json").read_text())["global_step"] == 300


def test_the_last_lines_come_on_a_full_disk_too(launch, monkeypatch):
    module = importlib.import_module("dqn")
    replace_file = module.replace_file

    def full(path, content):
        if path.name != "config.json":
            raise OSError(errno.ENOSPC, "No space left on device")
        replace_file(path, content)

    monkeypatch.setattr(module, "replace_file", full)
    monkeypatch.setattr("conftest.read_run", lambda folder: SimpleNamespace())
    run = launch("dqn", *small("dqn"))
    assert run.out.splitlines()[-1].startswith("finished at step 300: ") and "no checkpoint at step 300" in run.err


def no_room(path, content):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("script", ["dqn", "ppo_torchcompile"])
def test_a_disk_that_is_full_from_the_beginning(monkeypatch, tmp_path, capsys, script):
    module = importlib.import_module(script)
    monkeypatch.setattr(module, "replace_file", no_room)
    with pytest.raises(SystemExit) as caught:
        module.main(module.Args(env_id="CounterDiscrete-v0", output_dir=str(tmp_path / "runs"), cuda=False))
    (line,) = capsys.readouterr().err.splitlines()
    assert caught.value.code == 2 and "--output-dir" in line and line.endswith("(No space left on device)")
    assert [*(tmp_path / "runs").iterdir()] == []


def test_a_resume_on_a_full_disk_changes_nothing(small_run, tmp_path, monkeypatch, capsys):
    folder = Path(shutil.copytree(small_run, tmp_path / "run"))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    (folder / "checkpoint.pt.new").write_bytes(b"what a kill has left")
    module, config = importlib.import_module("dqn"), json.loads((folder / "config.json").read_text())
    monkeypatch.setattr(module, "replace_file", no_room)
    with pytest.raises(SystemExit) as caught:
        known = {field.name: config[field.name] for field in dataclasses.fields(module.Args)}
        module.main(module.Args(**known | {"resume": str(folder)}))
    (line,) = capsys.readouterr().err.splitlines()
    assert caught.value.code == 2 and "--resume" in line and "No space left on device" in line
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_statistics_that_float32_cannot_hold_are_saved(launch):
    """Those of normalisation are float64's; the sums of squares of such observations pass 1e50."""
    run = launch("ppo_continuous_action", *small("ppo_continuous_action"), env_id="Far")
    checkpoint = torch.load(run.folder / "checkpoint.pt", weights_only=True)
    assert max(checkpoint["parts"]["observation_moments"]["squares"][0]) > 1e45 and "no checkpoint" not in run.err


# ---- What is refused ----
@pytest.fixture(scope="module")
def small_run(launch):
    return launch("dqn", *small("dqn"), raises=SystemExit, stop_after=200).folder


def load(folder, **changes):
    """The beginning of a resume of dqn.py, up to where it would change the folder; returns (exit status, stderr)."""
    module, err = importlib.import_module("dqn"), io.StringIO()
    config = json.loads((folder / "config.json").read_text())
    known = {field.name: config[field.name] for field in dataclasses.fields(module.Args)}
    args, before, runs = module.Args(**known | {"resume": str(folder)} | changes), contents(folder), []
    env = gym.make("environments:CounterDiscrete-v0", disable_env_checker=True)
    buffer = module.ReplayRing(args, env, CPU)
    agent = module.DQNAgent(args, env, CPU, buffer)

    class Done(Exception):
        pass

    def stop(*arguments, **more):
        raise Done

    reopen = module.Run.reopen_folder
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(err):
        patch.setattr(module.Run, "reopen_folder", lambda run: runs.append(run) or reopen(run))
        patch.setattr(module, "replace_file", stop)
        try:
            module.Run(args, CPU, agent, buffer)
        except Done:
            return 0, err.getvalue()
        except SystemExit as end:
            assert contents(folder) == before
            return end.code, err.getvalue()
        finally:
            for file in getattr(runs[0], "files", []):
                file.close()


def test_a_whole_checkpoint_is_taken(small_run):
    assert load(small_run) == (0, "")


def test_a_checkpoint_cut_anywhere_is_refused(small_run, tmp_path):
    folder = Path(shutil.copytree(small_run, tmp_path / "run"))
    whole = (folder / "checkpoint.pt").read_bytes()
    for percent in range(100):
        (folder / "checkpoint.pt").write_bytes(whole[: len(whole) * percent // 100])
        status, err = load(folder)
        assert status == 2 and err.count("\n") == 1 and "--resume" in err and "checkpoint.pt" in err


def test_a_checkpoint_with_a_wrong_byte_is_refused(small_run, tmp_path):
    folder = Path(shutil.copytree(small_run, tmp_path / "run"))
    whole = (folder / "checkpoint.pt").read_bytes()
    checkpoint = torch.load(folder / "checkpoint.pt", weights_only=True)
    weights = checkpoint["parts"]["agent"]["q_network.fc2.weight"].numpy().tobytes()
    place = whole.index(weights) + 1000
    (folder / "checkpoint.pt").write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    status, err = load(folder)
    assert status == 2 and err.count("\n") == 1 and "damaged" in err


@pytest.mark.parametrize(
    "change",
    [{"format": 0}, {"script": "td3_continuous_action"}, {"env_id": "CartPole-v1"}],
    ids=lambda c: next(iter(c)),
)
def test_a_foreign_checkpoint_is_refused(small_run, tmp_path, change):
    folder = Path(shutil.copytree(small_run, tmp_path / "run"))
    checkpoint = torch.load(folder / "checkpoint.pt", weights_only=True)
    target = checkpoint["args"] if "env_id" in change else checkpoint
    target |= change
    torch.save(checkpoint, folder / "checkpoint.pt")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"gamma": 0.5}))  # comes second, if it is another script's
    status, err = load(folder, gamma=0.99)
    assert status == 2 and err.count("\n") == 1 and str(next(iter(change.values()))) in err
    assert err.startswith("error: --env-id" if "env_id" in change else "error: --resume"), "there is no such flag"


@pytest.mark.parametrize("content", [{"weight": torch.ones(3)}, torch.ones(3), [1, 2]], ids=lambda c: type(c).__name__)
def test_a_file_that_is_no_checkpoint_is_refused(small_run, tmp_path, content):
    folder = Path(shutil.copytree(small_run, tmp_path / "run"))
    torch.save(content, folder / "checkpoint.pt")
    status, err = load(folder)
    assert status == 2 and err.count("\n") == 1 and "checkpoint.pt" in err


@pytest.mark.parametrize("name", ["checkpoint.pt", "config.json", "metrics.jsonl", "episodes.jsonl"])
def test_a_file_is_missing(small_run, tmp_path, name, start):
    folder = Path(shutil.copytree(small_run, tmp_path / "run"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"env_id": "environments:CounterDiscrete-v0"}))
    (folder / name).unlink()
    process = start("dqn.py", "--resume", folder)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 2 and err.count("\n") == 1 and "--resume" in err and name in err
    assert not (folder / name).exists()


def test_another_scripts_run_is_refused_as_such(small_run, monkeypatch, capsys):
    """Before its arguments are looked at, which may make no sense here."""
    monkeypatch.setattr(sys, "argv", ["ppo.py", "--resume", str(small_run)])
    with pytest.raises(SystemExit) as caught:
        importlib.import_module("ppo").stored_args()
    line = f"error: --resume {small_run}: must be the folder of a run (it is of the script dqn)\n"
    assert caught.value.code == 2 and capsys.readouterr().err == line


@pytest.mark.parametrize("resumes", [False, True])
def test_arguments_of_ones_own_are_stored(small_run, tmp_path, monkeypatch, resumes):
    dqn, folder = importlib.import_module("dqn"), Path(shutil.copytree(small_run, tmp_path / "run"))

    @dataclasses.dataclass
    class Args(dqn.Args):
        beta: float = 0
        sizes: tuple[int, ...] = (120, 84)
        shares: list[float] = dataclasses.field(default_factory=lambda: [0.5])

    monkeypatch.setattr(dqn, "Args", Args)
    monkeypatch.setattr(sys, "argv", ["dqn.py", "--resume", str(folder)] if resumes else ["dqn.py"])
    own = {"beta": 0.5, "sizes": (3, 4), "shares": [0.1, 0.9]}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | own))
    stored = vars(dqn.stored_args())
    assert {name: stored[name] for name in own} == (
        own if resumes else {"beta": 0, "sizes": (120, 84), "shares": [0.5]}
    )


@pytest.mark.parametrize("change", [{"gamma": "abc"}, {"seed": 1.5}, {"env_id": 5}, {"batch_size": None}], ids=str)
def test_a_config_with_another_kind_of_value_is_refused(small_run, tmp_path, monkeypatch, capsys, change):
    dqn, folder = importlib.import_module("dqn"), Path(shutil.copytree(small_run, tmp_path / "run"))
    config = json.loads((folder / "config.json").read_text())
    monkeypatch.setattr(sys, "argv", ["dqn.py", "--resume", str(folder)])
    assert dqn.stored_args().gamma == config["gamma"]
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(SystemExit) as caught:
        dqn.stored_args()
    ((name, value),) = change.items()
    line = f"error: --resume {folder}: must be the folder of a run (its config.json has {name} {value!r})\n"
    assert caught.value.code == 2 and capsys.readouterr().err == line


def test_an_optional_number_that_is_none_is_refused(capsys):
    ppo = importlib.import_module("ppo")
    ppo.check_args(ppo.Args(target_kl=None))
    with pytest.raises(SystemExit) as caught:
        ppo.check_args(ppo.Args(target_kl="abc"))  # as a changed config.json would have it
    assert caught.value.code == 2 and capsys.readouterr().err == "error: --target-kl abc: must lie in (0, 1e30]\n"


def test_a_checkpoint_that_does_not_fit_is_refused(small_run, tmp_path):
    folder = Path(shutil.copytree(small_run, tmp_path / "run"))
    checkpoint = torch.load(folder / "checkpoint.pt", weights_only=True)
    checkpoint["parts"]["agent"]["q_network.fc1.weight"] = torch.zeros(7, 7)
    torch.save(checkpoint, folder / "checkpoint.pt")
    before = contents(folder)
    with pytest.raises(SystemExit) as caught:
        resume("dqn", folder)
    assert caught.value.code == 2 and contents(folder) == before


@pytest.mark.parametrize(
    "change",
    [
        {"gamma": 0.9}, {"seed": 5}, {"env_id": "CartPole-v1"}, {"num_envs": 2}, {"total_timesteps": 299},
        {"save_replay": True},
    ],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_a_changed_argument_is_named(small_run, change):
    (name, value) = next(iter(change.items()))
    flag = f"--{name.replace('_', '-')}"
    status, err = load(small_run, **change)
    assert status == 2 and err.count("\n") == 1
    assert f"{flag} {value}" in err


def test_a_folder_in_use_is_refused(small_run):
    with open(small_run / "metrics.jsonl") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        status, err = load(small_run)
    assert status == 2 and err.count("\n") == 1 and "in use" in err
    assert load(small_run) == (0, "")


def test_from_the_shell(small_run, tmp_path, start):
    """Two processes resume one folder, with the run's arguments as their defaults; a changed one is refused."""
    folder = Path(shutil.copytree(small_run, tmp_path / "run"))
    as_if(folder, env_id="environments:CounterDiscrete-v0", gamma=0.9)
    process = start("dqn.py", "--resume", folder, "--gamma", 0.99)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 2 and err == f"error: --gamma 0.99: must be 0.9, as in {folder}\n"
    pair = [start("dqn.py", "--resume", folder, "--total-timesteps", 30_000, cwd=tmp_path) for _ in range(2)]
    ends = [(*process.communicate(timeout=300), process.returncode) for process in pair]
    assert sorted(status for *_, status in ends) == [0, 2], ends
    (refused,) = [err for _, err, status in ends if status == 2]
    assert refused.count("\n") == 1 and "in use" in refused
    assert json.loads((folder / "summary.json").read_text())["global_step"] == 30_000
    steps = [line["global_step"] for line in lines_of(folder, "metrics")]
    assert steps == sorted(set(steps)) and steps[-1] == 30_000


# ---- Killed, and out of disk ----
def in_a_child(work):
    """Forks; the child does `work` and is gone. Returns its number."""
    child = os.fork()
    if child == 0:
        try:
            with open(os.devnull, "w") as null, contextlib.redirect_stdout(null), contextlib.redirect_stderr(null):
                work()
        finally:
            os._exit(0)
    return child


def test_killed_at_any_moment_it_can_be_resumed(small_run, tmp_path):
    """50 times, each time going on from what the kill before it left; it saves after every step."""
    folder, steps = Path(shutil.copytree(small_run, tmp_path / "run")), []
    as_if(folder, save_every=1, total_timesteps=10**6)
    pauses = torch.rand(50, generator=torch.Generator().manual_seed(1)).mul(0.25).tolist()
    for pause in pauses:
        written = os.stat(folder / "checkpoint.pt").st_mtime_ns
        child = in_a_child(lambda: resume("dqn", folder))
        deadline = time.monotonic() + 60
        while os.stat(folder / "checkpoint.pt").st_mtime_ns == written and time.monotonic() < deadline:
            time.sleep(0.001)  # until it has begun to save
        time.sleep(pause)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert load(folder) == (0, "")
        steps.append(torch.load(folder / "checkpoint.pt", weights_only=True)["run"]["global_step"])
    assert steps == sorted(set(steps)), "each went further than the one before"
    as_if(folder, save_every=0, total_timesteps=steps[-1] + 300)
    resume("dqn", folder)
    logged = [line["global_step"] for line in lines_of(folder, "metrics")]
    assert logged == [*range(100, steps[-1] + 300, 100), *[steps[-1] + 300] * ((steps[-1] + 300) % 100 > 0)]


@pytest.mark.parametrize("limit", [1000, 30_000])
def test_a_full_disk_leaves_the_checkpoint_before(small_run, tmp_path, limit):
    """Files may grow to `limit` bytes, less than a checkpoint."""
    folder = Path(shutil.copytree(small_run, tmp_path / "run"))
    whole = (folder / "checkpoint.pt").read_bytes()
    assert len(whole) > 30_000
    status = tmp_path / "status"

    def work():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        resumed = resume("dqn", folder)
        os.write(os.open(status, os.O_CREAT | os.O_WRONLY), resumed.err.encode()[:500])

    os.waitpid(in_a_child(work), 0)
    assert (folder / "checkpoint.pt").read_bytes() == whole and not list(folder.glob("*.new"))
    assert load(folder) == (0, "")
    if limit > 1000:  # there is room for everything else: the run goes on to its end, and says what it could not do
        assert "no checkpoint at step 300" in status.read_text()
        assert json.loads((folder / "summary.json").read_text())["global_step"] == 300


def test_replay_needs_free_disk(monkeypatch, tmp_path, capsys):
    usage = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(path)._replace(free=1000))
    module = importlib.import_module("dqn")
    args = module.Args(env_id="CounterDiscrete-v0", save_replay=True, output_dir=str(tmp_path / "runs"), cuda=False)
    with pytest.raises(SystemExit) as caught:
        module.main(args)
    assert caught.value.code == 2 and "--save-replay" in capsys.readouterr().err and not (tmp_path / "runs").exists()


@pytest.mark.parametrize("left", [0.0, 0.5])
def test_the_replay_that_a_resume_replaces_counts_as_room(launch, monkeypatch, left):
    """There is room for one more checkpoint beside the one that is there, as there was when that one was written.

    So does a part of one that a kill has left.
    """
    run = launch("dqn", *small("dqn"), "--save-replay", raises=SystemExit, stop_after=200)
    buffer = torch.load(run.folder / "checkpoint.pt", weights_only=True)["parts"]["buffer"]
    usage, size = shutil.disk_usage, sum(rows.nbytes for rows in buffer.values() if isinstance(rows, torch.Tensor))
    (run.folder / "checkpoint.pt.new").write_bytes(bytes(int(left * size)))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(path)._replace(free=(1.2 - left) * size))
    resume("dqn", run.folder)
    assert json.loads((run.folder / "summary.json").read_text())["global_step"] == 300
