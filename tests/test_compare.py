"""compare.py and report.py: plans, resumption, failures, sampling, statistics with known answers, tables and pictures.

A stand-in for the scripts, which writes its files at once, and made-up results: nothing here trains.
"""

import base64
import contextlib
import itertools
import json
import os
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import tyro

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "benchmarks"))

import compare  # noqa: E402
import intervals  # noqa: E402
import report  # noqa: E402
import speed  # noqa: E402
import tables  # noqa: E402

PROBE = {"torch": "2.13.0", "threads": 2, "gpu": None}

# Stands in for dqn.py (100 steps/s and its seed), dqn_torchcompile.py (400, and times $FACTOR) and dqn_jax.py. The
# compiled one fails with 3 environments, unless $HEALED is set. Its returns are its seed times its step.
SCRIPT = """
import json, os, pathlib, sys
class Args:
    env_id: str = "CartPole-v1"
    num_envs: int = 2
flags = dict(zip(sys.argv[1:], sys.argv[2:]))
compiled, seed = "torchcompile" in sys.argv[0], int(flags["--seed"])
if compiled and flags["--num-envs"] == "3" and "HEALED" not in os.environ:
    print("a note", file=sys.stderr)
    sys.exit(print("error: --num-envs 3: no", file=sys.stderr) or 2)
folder = pathlib.Path(flags["--output-dir"], "run")
folder.mkdir()
lines = [{"global_step": i, "wall_time": i / 8, "fps": 8.0, "episode_return": seed * i or None} for i in range(500)]
(folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\\n" for line in lines))
summary = {"status": "finished", "fps": (400.0 if compiled else 100.0) * float(os.environ.get("FACTOR", 1)) + seed,
           "warmup_seconds": 1.5, "peak_memory_bytes": 1000, "versions": {"gymnasium": "1.4.0"}}
(folder / "summary.json").write_text(json.dumps(summary))
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Puts the stand-in in the place of leanrl/dqn*.py, and a made-up machine in that of this one."""
    folder = tmp_path / "scripts"
    folder.mkdir()
    for name in ("dqn", "dqn_torchcompile", "dqn_jax"):
        (folder / f"{name}.py").write_text(SCRIPT)
    monkeypatch.setattr(speed, "SCRIPTS", folder)
    monkeypatch.setattr(speed, "ask", lambda program: PROBE)
    return folder


def bench(output: Path, *flags: str, status: int | None = None) -> dict:
    """Runs compare.py with a result file; what that holds then. `status`: the exit status to expect, None if none."""
    args = tyro.cli(compare.Args, args=["--output", str(output), *flags])
    if status is None:
        compare.main(args)
    else:
        with pytest.raises(SystemExit) as error:
            compare.main(args)
        assert error.value.code == status
    return json.loads(output.read_text()) if output.exists() else {}


def refusal(capsys) -> str:
    """What a refusal says, which is one line on stderr."""
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    return error


def made_up_run(variant: str, seed: int, fps: float | None, script: str = "dqn", num_envs: int = 1, **more) -> dict:
    arm = {"script": script, "env_id": "CartPole-v1", "num_envs": num_envs, "variant": variant, "seed": seed}
    run = arm | {"command": f"python leanrl/{script}.py --seed {seed}", "process_seconds": 10.0}
    if fps is None:
        return run | {"status": "failed", "reason": "exit status 1: error: <none>", "summary": None}
    summary = {"fps": fps, "warmup_seconds": 4.0, "peak_memory_bytes": 5 * 10**8, "versions": {"torch": "2.13.0"}}
    curve = {"global_step": [0, 10, 20], "wall_time": [0.0, 1.0, 2.0], "episode_return": [None, 1.0 * seed, 3.0 * seed]}
    use = {"seconds": [1.0, 2.0], "cpu": [1.0, 2.0], "memory": [0.25, 0.5]}
    run |= {"status": "finished", "summary": summary, "curve": curve, "use": use}
    return run | {"areas": {"cpu": 3.0, "memory": 0.75}} | more


SETTINGS = json.dumps({key: value for key, value in vars(compare.Args()).items() if key not in ("output", "against")})


def made_up_result(runs: list[dict], **hardware) -> dict:
    about = {"cpu": "A Processor", "cores": 2, "torch_threads": 2, "gpu": None} | hardware
    result = {"kind": "compare", "command": "python benchmarks/compare.py --scripts dqn", "device": "cpu"}
    result |= {"started": "2026-01-02T03:04:05+00:00", "ended": "2026-01-02T03:14:05+00:00", "hardware": about}
    result |= {"versions": {"python": "3.12.1", "torch": "2.13.0"}, "settings": json.loads(SETTINGS)}
    return result | {"medians": compare.summarise(runs), "runs": runs}


RUNS = [
    # The slow eager run fell together with a slow compiled one, so that the two kinds of ratio differ
    *(made_up_run("compile", seed, fps) for seed, fps in ((1, 150), (2, 160), (3, 240), (4, None))),
    *(made_up_run("eager", seed, fps) for seed, fps in ((1, 50), (2, 100), (3, 80))),
]


# ---- Statistics ----
def test_interquartile_mean():
    assert intervals.interquartile_mean([100, 1, 2, 3, 4, 5, 6, -100]) == 3.5
    assert intervals.interquartile_mean([1, 5, 9]) == 5  # a quarter of three is none
    assert intervals.interquartile_mean([[0, 1], [2, 3], [4, 8], [100, -100]]).tolist() == [3, 2]
    assert intervals.interquartile_mean([[0, 2, 4, 100]], axis=1).tolist() == [3]


def test_interval_of_a_mean_is_that_of_the_normal_distribution():
    assert intervals.bootstrap_interval([7.0, 7.0]).tolist() == [7, 7]
    values = np.random.default_rng(3).normal(10, 2, 400)
    half = 1.96 * values.std() / 20
    expected = (values.mean() - half, values.mean() + half)
    assert intervals.bootstrap_interval(values) == pytest.approx(expected, abs=0.02)
    columns = intervals.bootstrap_interval(np.stack([values, 2 * values], axis=1))
    assert columns[:, 1] == pytest.approx(2 * columns[:, 0])


def test_interval_of_a_median_is_that_of_order_statistics():
    """The median of N draws is at most the k-th value if more than N / 2 draws are, which is binomially distributed.

    P(median ≤ lowest) is 0.26 for N = 3 and 0.058 for N = 5, above 0.025: the interval is the range. For N = 7 it is
    0.010, and 0.11 for the second lowest.
    """
    for count, expected in ((3, (1, 3)), (5, (1, 5)), (7, (2, 6))):
        assert tuple(intervals.bootstrap_interval(np.arange(1, count + 1), np.median)) == expected


def divisions(count: int) -> list[tuple[list[int], list[int]]]:
    """All ways to divide the numbers below 2 `count` into two halves, the lowest first half first."""
    halves = sorted(itertools.combinations(range(2 * count), count), key=sum)
    return [(list(half), [i for i in range(2 * count) if i not in half]) for half in halves]


def test_rank_sum_test_is_exact():
    """If nothing differs, all divisions are as likely: a p-value of at most p comes with the chance of p."""
    assert intervals.rank_sum_p([1, 2, 3], [4, 5, 6]) == 1 / 20 and intervals.rank_sum_p([4, 5, 6], [1, 2, 3]) == 1
    assert intervals.rank_sum_p([1, 3], [2, 9, 9]) == 2 / 10  # also 1 and 2, with the lowest sum
    assert intervals.rank_sum_p([5, 5], [5, 5]) == 1 and intervals.rank_sum_p([1, 2], [2, 3]) == 2 / 6
    for count in (1, 2, 3, 5):
        p_values = [intervals.rank_sum_p(*division) for division in divisions(count)]
        for p in p_values:
            assert sum(other <= p for other in p_values) / len(p_values) == p


def test_correction_for_several_p_values():
    assert intervals.holm([0.01, 0.04, 0.03]).tolist() == [0.03, 0.06, 0.06]
    assert intervals.holm([1 / 60, 0.5, 0.9]).tolist() == [0.05, 1, 1] and intervals.holm([]).tolist() == []


def verdicts_of(halves: list[tuple[list[int], list[int]]]) -> list[str]:
    """What is said of arms whose runs now and before are these halves, an arm for each."""
    old, new = [], []
    for number, (now, before) in enumerate(halves, 1):
        for runs, values in ((old, before), (new, now)):
            runs += [made_up_run("eager", seed, 100.0 + fps, num_envs=number) for seed, fps in enumerate(values)]
    return [line["verdict"] for line in compare.compare_with({"runs": old}, {"runs": new})]


def test_false_alarms_are_as_rare_as_is_said():
    """Any of 18 arms with 6 runs a side, if nothing changed: 3.8 %. With fewer runs none can be told to be slower."""
    slowest_of = {count: divisions(count)[0] for count in (2, 3, 5)}
    for count in (2, 3, 5):
        assert verdicts_of([slowest_of[count]] * 18) == ["too few runs to tell"] * 18
    assert verdicts_of([slowest_of[2]]) == ["too few runs to tell"] and verdicts_of([slowest_of[3]]) == ["slower"]
    assert verdicts_of([slowest_of[3]] * 2) == ["too few runs to tell"] * 2
    assert verdicts_of([slowest_of[5]] * 12) == ["slower"] * 12
    every = divisions(6)
    others = [every[len(every) // 2]] * 17
    alarms = [verdicts_of([half, *others]) for half in every[:4]]
    assert alarms == [["slower"] + ["within the noise"] * 17] * 2 + [["within the noise"] * 18] * 2
    assert 0.03 < 1 - (1 - 2 / len(every)) ** 18 < compare.ALPHA


def test_how_many_seeds_it_takes():
    assert [compare.seeds_needed(runs, arms) for runs, arms in ((3, 1), (5, 12), (5, 13), (6, 46), (1, 1))] == [
        3, 5, 6, 6, 19
    ]  # fmt: skip


def test_area_under_samples():
    assert compare.area([1, 2, 4], [10, 20, 30], 5) == 10 + 20 + 60 + 30
    assert compare.area([], [], 5) == 0


def test_medians_and_ratios():
    eager, compiled = compare.summarise(RUNS)
    assert (eager["variant"], eager["fps"], eager["fps_interval"], eager["times_eager"]) == ("eager", 80, [50, 100], 1)
    assert (compiled["fps"], compiled["fps_interval"]) == (160, [150, 240])
    assert (compiled["times_eager"], compiled["times_eager_interval"]) == (3, [1.6, 3])  # of 3, 1.6 and 3
    assert (compiled["runs"], compiled["failed"], compiled["reason"]) == (3, 1, "exit status 1: error: <none>")
    assert compiled["areas"] == {"cpu": 3.0, "memory": 0.75, "gpu": None, "gpu_memory": None}
    (alone,) = compare.summarise([made_up_run("compile", 1, 5.0)])
    assert (alone["fps"], alone["fps_interval"], alone["times_eager"]) == (5, None, None)


# ---- Sampling ----
CHILD = """
import time
held = b"x" * 200_000_000
while time.process_time() < 0.6: pass
"""


def test_sampler_counts_descendants():
    sampler = compare.Sampler(None, interval=0.02)
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD!r}])"
    code, _, err = speed.run_process([sys.executable, "-c", parent], 30, watch=sampler.during)
    assert code == 0, err
    record = sampler.record()
    assert max(record["use"]["memory"]) > 0.15  # GB, which the parent alone does not have
    assert 0.4 < record["areas"]["cpu"] < 1.2  # core·s: what the child was told to take, and what they took to begin
    assert record["use"].keys() == {"seconds", "cpu", "memory"}


def test_a_process_that_ends_between_two_readings_is_counted_once(monkeypatch):
    """A child with 5 s ends after its parent was read, which has not waited for it then: the sample is not taken."""

    class Gone(Exception):
        pass

    class Process:
        def __init__(self, readings):
            self.readings = iter(readings)  # own time and that of children that it has waited for

        def children(self, recursive):
            return [child] if len(samples.samples) < 2 else []

        def oneshot(self):
            return contextlib.nullcontext()

        def cpu_times(self):
            if (reading := next(self.readings)) is None:
                raise Gone
            return reading[0], 0.0, reading[1], 0.0

        def memory_info(self):
            return SimpleNamespace(rss=1)

    root, child = Process([(1.0, 0.0), (2.0, 0.0), (3.0, 6.0), (4.0, 6.0)]), Process([(5.0, 0.0), None, (0.1, 0.0)])
    monkeypatch.setattr(compare, "psutil", SimpleNamespace(Process=lambda pid: root, Error=Gone, NoSuchProcess=Gone))
    monkeypatch.setattr(compare, "time", SimpleNamespace(perf_counter=itertools.count(1).__next__))
    waits = iter([False, False, False, False, True])
    samples = compare.Sampler(None)
    samples.started = 0
    samples.sample(1, SimpleNamespace(wait=lambda interval: next(waits)))
    assert [(sample["seconds"], sample["cpu"]) for sample in samples.samples] == [
        (1, 6),
        (3, pytest.approx(1.55)),
        (4, pytest.approx(0.9)),
    ]


def test_long_curves_are_thinned_and_their_areas_are_not():
    sampler = compare.Sampler(None)
    sampler.samples = [{"seconds": i + 1.0, "cpu": 5.0 if i == 1 else 0.0, "memory": 0.5} for i in range(1000)]
    sampler.end = 1000.0
    record = sampler.record()
    assert len(record["use"]["cpu"]) == 200 and record["areas"] == {"cpu": 5.0, "memory": 500.0}


def test_gpu_is_sampled_where_there_is_one(monkeypatch):
    class NVMLError(Exception):
        pass

    def utilisation(handle):
        if handle == "MIG-7":
            raise NVMLError("Not Supported")
        return SimpleNamespace(gpu=25)

    def init():
        if "BROKEN" in os.environ:
            raise NVMLError("Driver Not Loaded")

    memory = lambda handle: SimpleNamespace(used=3e9)  # noqa: E731
    nvml = SimpleNamespace(NVMLError=NVMLError, nvmlInit=init, nvmlDeviceGetHandleByIndex=int)
    nvml.nvmlDeviceGetHandleByUUID, nvml.nvmlDeviceGetUtilizationRates, nvml.nvmlDeviceGetMemoryInfo = (
        str, utilisation, memory
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    for visible, handle in (("", 0), ("2,0", 2), ("MIG-7", "MIG-7")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert compare.open_gpu() == handle
    assert compare.gpu_use(0) == {"gpu": 0.25, "gpu_memory": 3.0}
    assert compare.gpu_use("MIG-7") == {"gpu_memory": 3.0}
    monkeypatch.setenv("BROKEN", "yes")
    assert compare.open_gpu() is None
    monkeypatch.setitem(sys.modules, "pynvml", None)  # not installed
    assert compare.open_gpu() is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_real_gpu_is_sampled():
    held = torch.ones(10**9, dtype=torch.uint8, device="cuda")
    assert compare.gpu_use(compare.open_gpu())["gpu_memory"] > held.numel() / 1e9


# ---- Plans and runs ----
def test_arms_take_turns(stand_in):
    args = compare.Args(scripts=("dqn",), env_ids=("A-v0", "B-v0"), seeds=(1, 2))
    plan = compare.plan_of(args, "cpu")
    assert [arm[1:] for arm in plan] == [
        (env_id, 2, variant, seed)  # two environments are the script's default
        for seed in (1, 2)
        for env_id in ("A-v0", "B-v0")
        for variant in ("eager", "none", "compile", "jax")
    ]
    counts = compare.plan_of(compare.Args(scripts=("dqn",), num_envs=(1, 8), variants=("eager",), seeds=(1,)), "cpu")
    assert [(arm.env_id, arm.num_envs) for arm in counts] == [("CartPole-v1", 1), ("CartPole-v1", 8)]


def test_jax_is_compared_where_there_is_a_script(stand_in, capsys):
    (stand_in / "dqn_jax.py").unlink()
    assert {arm.variant for arm in compare.plan_of(compare.Args(scripts=("dqn",), seeds=(1,)), "cpu")} == {
        "eager",
        "none",
        "compile",
    }
    with pytest.raises(SystemExit):
        compare.plan_of(compare.Args(scripts=("dqn",), variants=("eager", "jax")), "cpu")
    assert "--variants jax: there is no leanrl/dqn_jax.py" in refusal(capsys)


def test_every_script_is_compared_by_default():
    plan = compare.plan_of(compare.Args(seeds=(1,)), "cuda")
    for arm in plan:
        assert (ROOT / "leanrl" / f"{speed.script_of(arm.script, arm.variant)}.py").is_file()
    assert {arm.variant for arm in plan} >= {"eager", "none", "compile", "cudagraphs", "compile+cudagraphs"}


def test_runs_are_long_enough_whatever_the_number_of_environments():
    """On-policy whole rollouts, of which at least three are in the window of fps; else whole steps of all of them."""
    for quick, flags, (script, workload) in itertools.product(
        (False, True), ("", "--num-steps 64"), speed.WORKLOADS.items()
    ):
        if (quick and script not in compare.QUICK) or (flags and workload.learning_starts is not None):
            continue
        args, defaults = compare.Args(quick=quick, flags=flags), speed.defaults_of(script)
        num_steps = 64 if flags else defaults.get("num_steps", 1)
        for num_envs in (1, 4, 7, 16):
            words = compare.flags_of(args, "cpu", compare.Arm(script, defaults["env_id"], num_envs, "eager", 1))
            given = dict(itertools.pairwise(words))
            before, steps = int(given.get("--learning-starts", 0)), int(given["--total-timesteps"])
            assert (
                before % num_envs == 0
                and steps % (num_envs * (num_steps if workload.learning_starts is None else 1)) == 0
            )
            assert steps - before >= (compare.QUICK[script] if quick else workload.cpu)
            if workload.learning_starts is None:
                assert steps >= 4 * num_envs * num_steps
            else:
                assert workload.learning_starts <= before < workload.learning_starts + num_envs


def test_a_comparison(stand_in, tmp_path, capsys):
    result = bench(tmp_path / "c.json", "--scripts", "dqn", "--variants", "eager", "compile", "--seeds", "1", "2")
    assert [(run["variant"], run["seed"]) for run in result["runs"]] == [
        ("eager", 1), ("compile", 1), ("eager", 2), ("compile", 2)
    ]  # fmt: skip
    command = "python leanrl/dqn_torchcompile.py --compile --env-id CartPole-v1 --num-envs 2 --seed 1 --no-cuda"
    assert result["runs"][1]["command"].startswith(f"{command} --learning-starts 1000 --total-timesteps ")
    curve = result["runs"][2]["curve"]
    assert curve.keys() == {"global_step", "wall_time", "episode_return"}
    assert len(curve["global_step"]) == 200 and (curve["global_step"][-1], curve["episode_return"][-1]) == (499, 998)
    assert [line["fps"] for line in result["medians"]] == [101.5, 401.5]
    assert result["versions"]["gymnasium"] == "1.4.0" and result["ended"] and result["left_out"] == 0
    out = capsys.readouterr().out
    assert "[1/4] dqn eager, CartPole-v1 × 2, seed 1: 101.0 steps/s" in out
    assert re.search(r"\[4/4\] dqn compile, CartPole-v1 × 2, seed 2 \(about 0 s left\): 402.0 steps/s", out)
    assert str(tmp_path) not in (tmp_path / "c.json").read_text()


def test_whole_runs_keep_the_scripts_own_start_of_learning(stand_in, tmp_path):
    flags = [
        "--scripts",
        "dqn",
        "--variants",
        "eager",
        "--seeds",
        "1",
        "--total-timesteps",
        "77",
        "--flags=--gamma 0.5",
    ]
    (run,) = bench(tmp_path / "c.json", *flags)["runs"]
    assert run["command"].endswith("--seed 1 --no-cuda --total-timesteps 77 --gamma 0.5")


def test_time_left_is_that_of_the_same_arm():
    runs = [made_up_run("eager", 1, 9.0, process_seconds=30.0), made_up_run("compile", 1, 9.0, process_seconds=10.0)]
    arm = compare.arm_of(runs[0])
    assert compare.expected_seconds(arm._replace(seed=2), runs) == 30
    assert compare.expected_seconds(arm._replace(variant="none"), runs) == 20
    assert compare.expected_seconds(arm, [made_up_run("eager", 1, None)]) is None


FLAGS = ("--scripts", "dqn", "--variants", "eager", "compile", "--seeds", "1", "2")


def test_a_stopped_comparison_goes_on_where_it_was(stand_in, tmp_path, monkeypatch, capsys):
    output, measure, calls = tmp_path / "c.json", compare.measure, []

    def interrupted(args, device, arm, *rest):
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(arm)
        return measure(args, device, arm, *rest)

    monkeypatch.setattr(compare, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bench(output, *FLAGS)
    stopped = json.loads(output.read_text())
    assert len(stopped["runs"]) == 2 and stopped["ended"] is None
    out = capsys.readouterr().out
    assert "stopped; the runs so far" in out and "to go on with it: " in out
    monkeypatch.setattr(compare, "measure", lambda *args: calls.append(args[2]) or measure(*args))
    result = bench(output, *FLAGS)
    assert list(map(compare.arm_of, result["runs"])) == calls  # each once, the first two not again
    assert len(calls) == 4 and result["ended"] and len(result["resumed"]) == 1
    assert (result["started"], result["runs"][:2]) == (stopped["started"], stopped["runs"])
    assert "going on: 2 of 4 runs" in capsys.readouterr().out
    before = json.loads(output.read_text())
    assert bench(output, *FLAGS) == before and len(calls) == 4  # nothing was missing, nothing was resumed


def test_how_to_go_on_is_told(stand_in, tmp_path, monkeypatch, capsys):
    """With the file that was chosen by default, and with nothing that was given already."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["benchmarks/compare.py", "--scripts", "dqn"])
    measure = compare.measure
    for name in ("", "mine.json"):
        calls = iter([measure])  # the second is one too many: stopped
        monkeypatch.setattr(compare, "measure", lambda *args, calls=calls: next(calls, stopped)(*args))
        output = Path(name) if name else None
        sys.argv += ["--output", name] if name else []
        with pytest.raises(KeyboardInterrupt):
            compare.main(compare.Args(scripts=("dqn",), output=output))
        path = output or next(Path("runs", "bench").glob("compare_cpu_*.json"))
        command = f"{sys.executable} benchmarks/compare.py --scripts dqn --output {path}"
        assert capsys.readouterr().out.splitlines()[-1] == f"to go on with it: {command}"
    assert len(json.loads(path.read_text())["runs"]) == 1


def stopped(*_):
    raise KeyboardInterrupt


def test_other_code_and_other_packages_are_named(stand_in, tmp_path, capsys):
    """Runs of two versions of a script are no result; one compares them with --against."""
    output = tmp_path / "c.json"
    old = bench(output, *FLAGS)
    assert old["code"].keys() == {"dqn.py", "dqn_torchcompile.py"}
    with (stand_in / "dqn_torchcompile.py").open("a") as file:
        file.write("# faster\n")
    output.write_text(json.dumps(old | {"versions": old["versions"] | {"numpy": "0.1"}}))
    capsys.readouterr()
    bench(output, *FLAGS, status=2)
    error, changed = refusal(capsys), f"dqn_torchcompile.py {old['code']['dqn_torchcompile.py']}, now "
    assert "numpy 0.1, now " in error and changed in error and "dqn.py" not in error
    bench(tmp_path / "new.json", "--against", str(output))
    out = capsys.readouterr().out
    assert "scripts and packages: numpy 0.1, now " in out and changed in out
    del old["code"]  # as of an earlier version: can be compared with, not gone on with
    output.write_text(json.dumps(old))
    bench(tmp_path / "newer.json", "--against", str(output))
    assert "scripts and packages: the same; scripts not recorded" in capsys.readouterr().out
    bench(output, *FLAGS, status=2)
    assert "dqn.py not recorded, now " in refusal(capsys)


def test_other_settings_are_named(stand_in, tmp_path, capsys, monkeypatch):
    output = tmp_path / "c.json"
    bench(output, *FLAGS)
    before = output.read_text()
    capsys.readouterr()
    bench(output, *FLAGS[:-1], "3", "--timeout", "9", status=2)
    error = refusal(capsys)
    assert "--seeds 1 2, now 1 3" in error and "--timeout 3600.0, now 9.0" in error and "--variants" not in error
    monkeypatch.setattr(speed, "ask", lambda program: PROBE | {"torch": "2.14.0", "threads": 1})
    bench(output, *FLAGS, status=2)
    error = refusal(capsys)
    assert "torch 2.13.0, now 2.14.0" in error and "torch_threads 2, now 1" in error
    assert output.read_text() == before


def test_what_is_no_comparison_is_not_written_over(stand_in, tmp_path, capsys):
    output = tmp_path / "c.json"
    for text in (
        "",
        "[]",
        "{}",
        '{"kind": "speed"}',
        '{"kind": "compare"}',
        json.dumps(made_up_result([]) | {"runs": [{}]}),
    ):
        output.write_text(text)
        with pytest.raises(SystemExit) as error:
            compare.main(compare.Args(scripts=("dqn",), output=output))
        assert error.value.code == 2 and "--output" in refusal(capsys) and output.read_text() == text


def test_a_failed_arm_is_reported_and_the_others_go_on(stand_in, tmp_path, capsys, monkeypatch):
    flags = (*FLAGS, "--num-envs", "3", "4")
    result = bench(tmp_path / "c.json", *flags, status=1)
    states = [(run["num_envs"], run["variant"], run["status"] == "failed") for run in result["runs"]]
    assert states[:4] == [(3, "eager", False), (3, "compile", True), (4, "eager", False), (4, "compile", False)]
    assert len(states) == 8 and sum(failed for *_, failed in states) == 2
    out = capsys.readouterr().out
    assert "dqn compile, CartPole-v1 × 3, seed 2 failed: exit status 2: error: --num-envs 3: no" in out
    assert re.search(r"dqn +compile +CartPole-v1 +3 +0, 2 failed +- ", out)
    monkeypatch.setenv("HEALED", "yes")
    healed = bench(tmp_path / "c.json", *flags)  # only what failed runs again
    assert len(healed["runs"]) == 8 and not compare.failures_of(healed)
    assert healed["runs"][:6] == [run for run in result["runs"] if run["status"] == "finished"]


def test_quick_leaves_out_what_would_not_end_in_time(stand_in, tmp_path, capsys, monkeypatch):
    for name in ("ppo_continuous_action", "ppo_continuous_action_torchcompile"):
        (stand_in / f"{name}.py").write_text(SCRIPT)
    result = bench(tmp_path / "all.json", "--quick")
    assert len(result["runs"]) == 12 and {run["variant"] for run in result["runs"]} == {"eager", "compile"}
    assert "It does not tell how other scripts fare" in capsys.readouterr().out
    clock = time.perf_counter
    calls = []
    monkeypatch.setattr(compare, "measure", lambda *args: calls.append(args) or made_up_run("eager", 1, 5.0))
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + 90 * len(calls))  # each run takes 90 s
    result = bench(tmp_path / "c.json", "--quick")
    assert len(calls) == 3 and result["left_out"] == 9
    assert "9 runs are left out" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--scripts", "no_script"], "--scripts no_script: must be one of"),
        (["--variants", "cudagraphs"], "--variants: cudagraphs needs a CUDA device"),
        (["--num-envs", "4", "0"], "--num-envs 4 0: must be at least 1"),
        (["--seeds", "1", "-1"], "--seeds 1 -1: must be at least 0"),
        (["--total-timesteps", "0"], "--total-timesteps 0: must be above 0"),
        (["--timeout", "nan"], "--timeout nan: must be above 0"),
        (["--flags", "'a"], "--flags 'a: No closing quotation"),
        (["--flags=--gamma 0.5 --num_envs=3"], "--flags --gamma 0.5 --num_envs=3: --num_envs=3 is for compare.py"),
        (["--flags=--no-cuda"], "--flags --no-cuda: --no-cuda is for compare.py itself to choose"),
        (["--output", "/dev/null/c.json"], "--output /dev/null/c.json: must be a file that can be written"),
        (["--against", "nowhere.json"], "--against nowhere.json: must be a result file of the kind compare"),
        (["--quick", "--scripts", "dqn"], "--scripts: --quick chooses that by itself"),
        (["--quick", "--total-timesteps", "9"], "--total-timesteps: --quick chooses that by itself"),
    ],
)
def test_bad_input_is_refused_in_one_line(flags, words, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(speed, "ask", lambda program: PROBE)
    monkeypatch.setattr(speed, "run_script", lambda *_: pytest.fail("something was run"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as error:
        compare.main(tyro.cli(compare.Args, args=flags))
    assert error.value.code == 2 and words in refusal(capsys)


def test_missing_psutil_is_told(monkeypatch, capsys):
    monkeypatch.setattr(compare, "psutil", None)
    with pytest.raises(SystemExit) as error:
        compare.main(compare.Args())
    assert error.value.code == 2 and "requirements-bench.txt" in refusal(capsys)


# ---- Regressions ----
def test_slower_is_what_the_noise_does_not_explain():
    variants, seeds = ("eager", "none", "compile", "jax"), range(1, 6)
    old = made_up_result([made_up_run(variant, seed, 100 + seed) for variant in variants for seed in seeds])
    new = made_up_result(
        [
            *(made_up_run("eager", seed, 90 + seed) for seed in seeds),  # all below
            *(made_up_run("none", seed, 60 + 10 * seed) for seed in seeds),  # one is not: 70, 80, 90, 100, 110
            *(made_up_run("compile", seed, 110 + seed) for seed in seeds),
            made_up_run("jax", 1, 9),
        ]
    )
    lines = {line["variant"]: line for line in compare.compare_with(old, new)}
    verdicts = {variant: line["verdict"] for variant, line in lines.items()}
    assert verdicts == {
        "eager": "slower", "none": "within the noise", "compile": "faster", "jax": "too few runs to tell"
    }  # fmt: skip
    assert lines["eager"]["ratio"] == 93 / 103
    assert lines["eager"]["p_slower"] == pytest.approx(4 / 252) and lines["eager"]["p_faster"] == 1


def test_against_measures_the_same_again(stand_in, tmp_path, capsys, monkeypatch):
    old = bench(tmp_path / "old.json", *FLAGS, "3", "4", "--flags=--gamma 0.5")
    new = bench(tmp_path / "new.json", "--against", str(tmp_path / "old.json"))
    assert [run["command"] for run in new["runs"]] == [run["command"] for run in old["runs"]]
    assert "slower by more than the noise, 0 of 2 arms: none" in capsys.readouterr().out
    monkeypatch.setenv("FACTOR", "0.9")
    slow = ["--against", str(tmp_path / "old.json")]
    bench(tmp_path / "slow.json", *slow, status=1)
    assert "slower by more than the noise, 2 of 2 arms: dqn eager, dqn compile" in capsys.readouterr().out
    monkeypatch.setattr(compare, "measure", lambda *_: pytest.fail("what is there is measured again"))
    bench(tmp_path / "slow.json", *slow, status=1)


def test_against_more_seeds(stand_in, tmp_path, capsys, monkeypatch):
    """Two runs before can't tell; with as many now as are asked for they can."""
    against = ["--against", str(tmp_path / "old.json")]
    bench(tmp_path / "old.json", *FLAGS)
    monkeypatch.setenv("FACTOR", "0.9")
    bench(tmp_path / "new.json", *against)
    told = capsys.readouterr()
    assert told.out.count("too few runs to tell") == 2
    assert "to tell what became slower, of 2 arms, takes 8 --seeds, here are 2" in told.err
    bench(tmp_path / "more.json", *against, "--seeds", *"12345678", status=1)
    told = capsys.readouterr()
    assert "takes 8" not in told.err and "2 of 2 arms" in told.out


def test_against_takes_no_other_settings_and_no_other_machine(stand_in, tmp_path, capsys):
    path = tmp_path / "old.json"
    bench(path, *FLAGS)
    capsys.readouterr()
    bench(tmp_path / "new.json", "--against", str(path), "--scripts", "dqn", status=2)
    assert "--scripts: --against takes all settings but --seeds from its file" in refusal(capsys)
    bench(path, "--against", str(tmp_path / "." / "old.json"), status=2)
    assert "old.json: is the file that --against compares with" in refusal(capsys)
    old = json.loads(path.read_text())
    for settings in ({"quick": False}, old["settings"] | {"turns": 3}):
        (tmp_path / "odd.json").write_text(json.dumps(old | {"settings": settings}))
        bench(tmp_path / "new.json", "--against", str(tmp_path / "odd.json"), status=2)
        assert "has not the settings of this version: " in refusal(capsys)
    old["hardware"]["cpu"] = "An Older Processor"
    path.write_text(json.dumps(old))
    bench(tmp_path / "new.json", "--against", str(path), status=2)
    assert "another machine: cpu An Older Processor, now" in refusal(capsys)


# ---- Tables ----
def test_table_of_a_comparison_goes_stale(tmp_path):
    folder, readme = tmp_path / "benchmarks" / "results", tmp_path / "README.md"
    folder.mkdir(parents=True)
    readme.write_text("<!-- table:compare -->\n<!-- /table:compare -->\n")
    renew, check = (tables.Args(check=check, readme=readme, results=folder) for check in (False, True))
    tables.main(renew)
    assert "No results yet" in readme.read_text()
    (folder / "compare_cpu_2026-01-02.json").write_text(json.dumps(made_up_result(RUNS)))
    with pytest.raises(SystemExit):
        tables.main(check)
    tables.main(renew)
    tables.main(check)
    text = readme.read_text()
    row = "| `dqn` | compile | CartPole-v1 | 1 | 3, 1 failed | 160 | 150–240 | 3.00 | 1.60–3.00 | 4.0 | 3.0 | 0.8 |"
    assert row in text and "CPU, core·s | memory, GB·s |" in text
    assert "seed 4 failed: exit status 1" in text and "(benchmarks/results/compare_cpu_2026-01-02.json)" in text


def test_comparisons_of_a_kind_are_a_table(tmp_path):
    """A quick one does not take the place of a whole one, nor one of chosen scripts; there is one by environments."""
    folder = tmp_path / "benchmarks" / "results"
    folder.mkdir(parents=True)
    for name, fps, settings in (
        ("all", 11, {}),
        ("quick", 22, {"quick": True, "scripts": ["dqn"]}),
        ("chosen", 33, {"scripts": ["dqn"], "total_timesteps": 9}),
        ("num_envs", 44, {"scripts": ["dqn"], "num_envs": [1, 4]}),
    ):
        result = made_up_result([made_up_run("eager", s, n * fps + s, num_envs=n) for s in (0, 1, 2) for n in (1, 4)])
        result["settings"] |= settings
        (folder / f"compare_{name}.json").write_text(json.dumps(result))
    for kind, name, row in (
        ("compare", "all", "| `dqn` | eager | CartPole-v1 | 1 | 3 | 12.0 | 11.0–13.0 | 1.00 |"),
        ("compare_quick", "quick", "| `dqn` | eager | CartPole-v1 | 4 | 3 | 89.0 | 88.0–90.0 | 1.00 |"),
        ("compare_num_envs", "num_envs", "| `dqn` | eager | CartPole-v1 | 45 (44–46) | 177 (176–178) |"),
    ):
        text = tables.TABLES[kind](folder)
        assert row in text and re.findall(r"\[`(.+?)`\]", text) == [f"compare_{name}.json"]
        assert "Medians of 3 runs, one a seed, with their range" in text and "95 % interval |" not in text


def test_notes_tell_what_the_figures_are():
    def first_note(*counts: int) -> str:
        runs = [
            made_up_run("eager", seed, 5.0, num_envs=n) for n, count in enumerate(counts, 1) for seed in range(count)
        ]
        return compare.notes_of(made_up_result(runs))[0]

    assert first_note(5, 6) == "Medians of 5 to 6 runs, one a seed, with 95 % bootstrap intervals."
    assert first_note(3, 5).endswith(
        "3 to 5 runs, one a seed, with 95 % bootstrap intervals (of fewer than five runs, their range)."
    )
    assert first_note(1) == "Medians of 1 run, one a seed, with no interval."
    assert first_note(3) == "Medians of 3 runs, one a seed, with their range, as an interval of 95 % takes five."
    quiet, busy = (made_up_result([made_up_run("eager", 1, 5.0, load_before=load)]) for load in (2.0, 6.37))
    assert not any("quiet" in note for note in compare.notes_of(quiet))
    assert "The machine was not quiet: the load before a run was up to 6.4, with 2 cores." in compare.notes_of(busy)


# ---- Report ----
def test_averaged_curve():
    runs = [
        {"curve": {"global_step": steps, "episode_return": returns}}
        for steps, returns in (([0, 10, 20], [None, 0, 10]), ([5, 25], [5, 25]), ([30], [7]), ([1], [None]))
    ]
    grid, mean, band = report.mean_curve(runs, "global_step")
    assert (grid[0], grid[-1]) == (5, 30)
    # Before its first episode a run counts with its first return, after its end with its last; one without has none
    assert (mean[0], mean[-1]) == pytest.approx(((0 + 5 + 7) / 3, (10 + 25 + 7) / 3))
    assert np.interp(15, grid, mean) == pytest.approx((5 + 15 + 7) / 3, abs=0.1)
    assert band[:, 0] == pytest.approx((0, 7))  # of three, the range: each extreme alone has a chance of 1 / 27
    *_, no_band = report.mean_curve(runs[:1], "global_step")
    assert no_band is None
    assert report.mean_curve(runs[3:], "global_step") is None


def pictures_of(runs: list[dict], folder: Path, name: str = "x.json") -> set[str]:
    path = folder / name
    path.write_text(json.dumps(made_up_result(runs)))
    report.main(report.Args(results=(path,), output=folder / "out"))
    return {picture.stem.removeprefix(f"{path.stem}_") for picture in (folder / "out").glob(f"{path.stem}_*.png")}


def test_page_needs_no_other_file(tmp_path):
    assert pictures_of(RUNS, tmp_path) == {"fps", "return_steps", "return_time", "cpu", "memory"}
    page = (tmp_path / "out" / "report.html").read_text()
    sources = re.findall(r'(?:src|href)="([^"]*)"', page)
    pictures = {base64.b64decode(source.removeprefix("data:image/png;base64,")) for source in sources}
    assert "mean over the seeds, and range." in page and "interquartile mean" not in page
    assert len(sources) == 5 and pictures == {path.read_bytes() for path in (tmp_path / "out").glob("*.png")}
    for words in ("A Processor", "torch 2.13.0", "python benchmarks/compare.py --scripts dqn", "1.60–3.00", "--seed 3"):
        assert words in page
    assert "error: &lt;none&gt;" in page and "<none>" not in page


def test_pictures_are_of_what_there_is(tmp_path):
    gpu = {"use": {"seconds": [1.0], "cpu": [1.0], "memory": [0.1], "gpu": [0.5], "gpu_memory": [2.0]}}
    counts = [made_up_run("eager", 1, 10.0 * n, num_envs=n, **gpu) for n in (1, 4)]
    assert pictures_of(counts, tmp_path) == {*report.PICTURES}
    short = [made_up_run("eager", 1, 10.0, use={}, areas={}) | {"curve": {key: [] for key in RUNS[0]["curve"]}}]
    assert pictures_of(short, tmp_path, "y.json") == {"fps"}


def heights(axes) -> dict[str, float]:
    return {label.get_text(): bar.get_width() for label, bar in zip(axes.get_yticklabels(), axes.patches)}


def test_what_the_pictures_show():
    result = made_up_result([*RUNS, *(made_up_run("eager", 1, 7.0, num_envs=n) for n in (2, 8))])
    figure = report.fps_picture(result)
    assert [axes.get_title("left") for axes in figure.axes] == [
        f"dqn, CartPole-v1, {count}" for count in ("1 environment", "2 environments", "8 environments")
    ]
    assert heights(figure.axes[0]) == {"eager": 80, "compile": 160}
    assert {text.get_text().strip() for text in figure.axes[0].texts} == {"80 (1.00×)", "160 (3.00×)"}
    (axes,) = report.num_envs_picture(result).axes
    line = axes.containers[0].lines[0]
    assert (line.get_xdata().tolist(), line.get_ydata().tolist()) == ([1, 2, 8], [80, 7, 7])
    curves = report.return_picture(result, "wall_time").axes[0]
    assert [line.get_label() for line in curves.lines] == ["eager", "compile"]
    assert curves.lines[0].get_ydata()[[0, -1]] == pytest.approx((2, 6))  # the seeds' returns are 1 to 3, then 3 to 9
    assert [len(axes.lines) for axes in report.use_picture(result, "cpu").axes] == [6, 1, 1]
    assert "range" in figure.axes[-1].get_xlabel() and "95 %" not in figure.axes[-1].get_xlabel()


def test_a_run_with_an_empty_cache_does_not_hide_the_others():
    long = {"use": {"seconds": [1.0, 90.0], "cpu": [1.0, 2.0], "memory": [0.25, 0.5]}}
    long |= {"curve": {"global_step": [0, 10, 20], "wall_time": [0.0, 70.0, 80.0], "episode_return": [1.0, 2.0, 3.0]}}
    result = made_up_result([*RUNS, made_up_run("compile", 5, 150.0, **long)])
    for figure, end, told in (
        (report.use_picture(result, "cpu"), 2.2, "90"), (report.return_picture(result, "wall_time"), 2.2, "80")
    ):  # fmt: skip
        (axes,) = figure.axes
        assert axes.get_xlim()[1] == pytest.approx(end) and f"(the longest took {told}: cut off)" in axes.get_xlabel()
        widths = {line.get_label(): line.get_linewidth() for line in axes.lines}
        assert widths["eager"] > widths["compile"]
    (axes,) = report.use_picture(made_up_result(RUNS), "cpu").axes
    assert axes.get_xlim() == (0, 2) and "cut" not in axes.get_xlabel()


def test_several_files_are_sections_of_one_page(tmp_path, capsys):
    for name, hardware in (("a.json", {}), ("b.json", {"cpu": "Another"})):
        (tmp_path / name).write_text(json.dumps(made_up_result(RUNS, **hardware)))
    report.main(report.Args(results=(tmp_path / "a.json", tmp_path / "b.json"), output=tmp_path))
    page = (tmp_path / "report.html").read_text()
    assert page.index("a.json") < page.index("A Processor") < page.index("b.json") < page.index("Another")
    assert len(capsys.readouterr().out.splitlines()) == 11


def test_report_refuses_what_it_can_not_draw(tmp_path, capsys):
    (tmp_path / "none.json").write_text(json.dumps(made_up_result([made_up_run("eager", 1, None)])))
    (tmp_path / "good.json").write_text(json.dumps(made_up_result(RUNS)))
    (tmp_path / "bare.json").write_text('{"kind": "compare"}')
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "good.json").write_text(json.dumps(made_up_result(RUNS)))
    for paths, output, words in (
        ([], "out", "results: name one result file"),
        (["missing.json"], "out", "missing.json: must be a result file of the kind compare"),
        (["bare.json"], "out", "bare.json: must be a result file of the kind compare"),
        (["none.json"], "out", "none.json: has no finished run"),
        (["good.json", "folder/good.json"], "out", "need names that differ"),
        (["good.json"], "good.json", "--output"),
    ):
        with pytest.raises(SystemExit) as error:
            report.main(report.Args(results=tuple(tmp_path / path for path in paths), output=tmp_path / output))
        assert error.value.code == 2 and words in refusal(capsys)
    assert not (tmp_path / "out").exists()
