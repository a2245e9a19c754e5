"""The benchmarks of the scripts with actors: what killed actors cost, the learners' time, and what lag does."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "benchmarks"))

import lag_learning  # noqa: E402
import learning  # noqa: E402
import ray_faults  # noqa: E402
import ray_learner  # noqa: E402
import tables  # noqa: E402


# ---- ray_faults.py ----
def stamps_of(*rows):
    return [ray_faults.Stamp(at, number, incarnation, 0, 0, 100) for at, number, incarnation in rows]


def test_an_actor_is_back_when_its_new_life_delivers():
    """Two kills; what the first lives deliver meanwhile, and second fragments, do not count."""
    stamps = stamps_of((1, 0, 0), (2, 1, 0), (11, 1, 0), (12.5, 0, 7), (13, 0, 7), (17, 1, 0), (21, 1, 9))
    assert ray_faults.seconds_back(stamps, [10.0, 20.0]) == [2.5, 1.0]
    assert ray_faults.seconds_back(stamps, [10.0, 30.0]) == [2.5, None]
    assert ray_faults.throughput(stamps, 10, 20) == 40


def test_what_kills_cost_is_the_median_of_pairs():
    runs = [
        {
            "repeat": n,
            "steps_per_second": 1000 * n,
            "with_kills": share * 1000 * n,
            "share": share,
            "seconds_back": back,
            "rss": 3e8,
            "pss": n * 1e8,
        }
        for n, share, back in ((1, 0.5, [1, 2]), (2, 0.9, [3, 4]), (3, 0.8, [9, 1]))
    ]
    (line,) = ray_faults.summarise(runs)
    assert line["share"] == 0.8 and line["steps_per_second"] == 2000 and line["runs"] == 3
    assert line["back_median"] == 2.5 and line["back_most"] == 9
    assert ray_faults.rows_of({"medians": [line]}) == [["2,000", "1,800", "80%", "2.5", "9.0", "300", "200"]]


@pytest.mark.parametrize(
    "args, words",
    [
        ({"script": "ppo"}, "--script ppo: must be a script with actors"),
        ({"kills": 0}, "--kills 0: must be above 0"),
        ({"interval": float("nan")}, "--interval nan: must be above 0 and at most 1e6 s"),
        ({"interval": float("inf")}, "--interval inf: must be above 0 and at most 1e6 s"),
        ({"flags": "'"}, "--flags ': No closing quotation"),
    ],
)
def test_faults_that_cannot_be_measured(capsys, args, words):
    with pytest.raises(SystemExit) as error:
        ray_faults.main(ray_faults.Args(**args))
    assert error.value.code == 2 and words in capsys.readouterr().err


def test_a_killed_actor_comes_back(tmp_path, capsys, monkeypatch):
    """A short measurement as it is, with a kill, which leaves no actor of its own behind."""
    measure, sessions = ray_faults.measure, []

    def noted_measure(args, process, *rest):
        sessions.append(process.pid)
        record = measure(args, process, *rest)
        assert ray_faults.actors_of(process.pid)
        return record

    monkeypatch.setattr(ray_faults, "measure", noted_measure)
    args = {"script": "impala_ray", "num_actors": 2, "interval": 2.0, "kills": 1, "repeats": 1, "flags": "--no-cuda"}
    ray_faults.main(ray_faults.Args(**args, output=tmp_path / "faults.json"))
    result = json.loads((tmp_path / "faults.json").read_text())
    (run,) = result["runs"]
    assert run["steps_per_second"] > 0 and run["with_kills"] > 0 and len(run["seconds_back"]) == 1
    assert 10e6 < run["pss"] <= run["rss"] < 2e9
    assert result["ledger"]["actor_restarts"] >= 1 and result["ledger"]["fragments_lost"] >= 1
    assert sessions and not any(map(ray_faults.actors_of, sessions)) and "pair 1: " in capsys.readouterr().out


def test_kills_come_first_in_every_second_pair(monkeypatch):
    """On a clock that sleeping alone moves, with an actor that is back at once."""
    now, killed, actor = [100.0], [], {"rss": 3e8, "pss": 2e8}
    monkeypatch.setattr(ray_faults.time, "time", lambda: now[0])
    monkeypatch.setattr(ray_faults.time, "sleep", lambda seconds: now.append(now.pop() + seconds))
    monkeypatch.setattr(ray_faults.os, "kill", lambda *_: killed.append(now[0]))
    for name, value in (("actors_of", [1]), ("memory_of", actor), ("read_stamps", []), ("seconds_back", [1.0])):
        monkeypatch.setattr(ray_faults, name, lambda *_, value=value: value)
    monkeypatch.setattr(ray_faults, "throughput", lambda stamps, start, end: start + 1000 * (end - start))
    args, process = ray_faults.Args(interval=5.0, kills=2), SimpleNamespace(pid=1)
    for repeat, (without, with_kills) in ((1, (100, 110)), (2, (140, 125)), (3, (150, 160))):
        record = ray_faults.measure(args, process, None, repeat)
        assert (record["steps_per_second"], record["with_kills"]) == (10_000 + without, 10_000 + with_kills)
        assert killed[-2:] == [with_kills, with_kills + 5]


# ---- ray_learner.py ----
def test_learners_are_timed(tmp_path, monkeypatch, capsys):
    """Real processes of a small task, and one that fails; a ratio is taken within its turn."""
    small = "--total-timesteps 600 --num-envs 2 --fragment-length 10"
    monkeypatch.setattr(ray_learner, "TASKS", {"small": ("impala_ray", small), "bad": ("appo_ray", "--gamma 2")})
    args = ray_learner.Args(tasks=("small", "bad"), variants=("eager", "none"), repeats=1, cuda=False)
    args.output = tmp_path / "learner.json"
    with pytest.raises(SystemExit) as error:
        ray_learner.main(args)
    assert error.value.code == 1
    result = json.loads(args.output.read_text())
    by_arm = {(run["script"], run["variant"]): run for run in result["runs"]}
    # 30 fragments and some more, as first rows of episodes are no steps; the first fifth doesn't count
    assert 0 < by_arm["small", "eager"]["seconds"] < 1 and 24 <= by_arm["small", "eager"]["batches"] <= 30
    assert "--gamma 2.0: must lie in [0, 1]" in by_arm["bad", "eager"]["reason"]
    line = next(line for line in result["medians"] if (line["task"], line["variant"]) == ("small", "none"))
    ratio = by_arm["small", "eager"]["seconds"] / by_arm["small", "none"]["seconds"]
    assert line["times_eager"] == pytest.approx(ratio, rel=1e-3)
    assert "bad eager failed: exit status 2" in capsys.readouterr().out
    assert ray_learner.rows_of(result["medians"])[0][:2] == ["small", "eager"]


@pytest.mark.parametrize(
    "args, words",
    [
        ({"tasks": ("Pong",)}, "--tasks Pong: must be one of 'IMPALA, CartPole-v1'"),
        ({"tasks": ()}, "--tasks: must be followed by at least one value"),
        ({"timeout": float("nan")}, "--timeout nan: must be above 0 and at most 1e6 s"),
        ({"timeout": -1.0}, "--timeout -1: must be above 0 and at most 1e6 s"),
        ({"repeats": 0}, "--repeats 0: must be at least 1"),
        ({"variants": ("cudagraphs",), "cuda": False}, "--variants cudagraphs: needs a CUDA device"),
    ],
)
def test_learners_that_cannot_be_timed(capsys, args, words):
    with pytest.raises(SystemExit) as error:
        ray_learner.main(ray_learner.Args(**args))
    assert error.value.code == 2 and words in capsys.readouterr().err


def test_the_tasks_are_runs_of_the_scripts():
    for script, flags in ray_learner.TASKS.values():
        names = learning.arguments_of(flags.split())
        assert names.keys() <= learning.defaults_of(script).keys()


# ---- lag_learning.py ----
def test_the_plan_has_each_lag_with_and_without_v_trace():
    jobs = learning.jobs_of(lag_learning.plan())
    assert len({job["name"] for job in jobs}) == len(jobs) == 2 * 2 * 4 * 3
    names = [job["name"] for job in jobs]
    assert "CartPole-v1__impala_ray_torchcompile__compile__500000__seed1.json" in names
    assert "CartPole-v1__appo_ray_torchcompile__compile__500000__forced-lag-16__vtrace-False__seed3.json" in names


def write_result(folder, lag, vtrace, seed, value):
    arguments = {"forced_lag": lag, "vtrace": vtrace, "env_id": "CartPole-v1", "total_timesteps": 500_000, "seed": seed}
    changed = {"forced_lag": lag} if lag else {}
    changed |= {} if vtrace else {"vtrace": False}
    about = {
        "variant": "compile",
        "changed": changed,
        "script": "impala_ray_torchcompile",
        "device_name": "CPU",
        "threads": 1,
        "return_last_100": value,
    }
    about |= {"arguments": arguments, "versions": {"torch": "2.13.0", "python": "3.11"}}
    (folder / f"{lag}_{vtrace}_{seed}.json").write_text(json.dumps(about))


def test_table_and_plot_of_lags(tmp_path, capsys):
    folder = tmp_path / "benchmarks" / "results" / "lag"
    folder.mkdir(parents=True)
    assert tables.lag_table(folder.parent) == "No results yet: `python benchmarks/lag_learning.py` makes them."
    for seed, value in ((1, 500.0), (2, 480.0)):
        write_result(folder, 0, True, seed, value)
        write_result(folder, 16, False, seed, value / 10)
    table = tables.lag_table(folder.parent)
    assert (
        "| IMPALA | with | 490.0 ± 14.1 |  |  |  |" in table and "| IMPALA | without |  |  |  | 49.0 ± 1.4 |" in table
    )
    assert "over 2 seeds" in table and "asynchronous PPO" not in table
    pytest.importorskip("matplotlib")
    lag_learning.main(lag_learning.Args(results=folder, plot=tmp_path / "lag.png"))
    assert (tmp_path / "lag.png").stat().st_size > 10_000 and "lag.png" in capsys.readouterr().out
    (tmp_path / "none").mkdir()
    with pytest.raises(SystemExit):
        lag_learning.main(lag_learning.Args(results=tmp_path / "none", plot=tmp_path / "lag.png"))
    assert "--plot: there are no results in" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        lag_learning.main(lag_learning.Args(results=folder, plot=tmp_path / "nowhere" / "lag.png"))
    assert "lag.png: must be a file in a folder that can be written to (No such file" in capsys.readouterr().err
    write_result(folder, 3, True, 1, 0.0)
    with pytest.raises(SystemExit):
        tables.lag_table(folder.parent)
    assert "3_True_1.json is of a run that is not in the plan" in capsys.readouterr().err
    (folder / "3_True_1.json").unlink()
    (folder / "other.json").write_text('{"script": "ppo", "arguments": {}}')
    with pytest.raises(SystemExit):
        lag_learning.main(lag_learning.Args(results=folder, plot=tmp_path / "lag.png"))
    assert "other.json is no result of this program" in capsys.readouterr().err
