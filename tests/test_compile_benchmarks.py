"""benchmarks/compile_inference.py and compile_exploration.py: turns, statistics, n/a cells, tables and pictures."""

import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import tyro
from torch._dynamo.utils import clear_compilation_metrics, counters

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "benchmarks"))

import acting  # noqa: E402
import compile_exploration  # noqa: E402
import compile_inference  # noqa: E402
import pools  # noqa: E402
import speed  # noqa: E402
import tables  # noqa: E402

PROBE = {"torch": "2.13.0", "threads": 1, "gpu": None}
REGISTERED = ("inductor", "cudagraphs", "aot_eager")
CELL = {"backend": "eager", "mode": "default", "device": "cpu", "threads": 1, "repeat": 1}
CELL |= {"num_iters": 5, "burn_in": 1, "seconds": 60.0}


def made_up_run(backend: str, batch_size: int, speedup: float | None, repeat: int = 1, **more) -> dict:
    run = {"backend": backend, "mode": "default", "batch_size": batch_size, "repeat": repeat}
    if speedup is None:
        return run | {"status": "n/a", "reason": "needs CUDA"} | more
    run |= {"status": "finished", "eager": 100.0, "compiled": 100 * (1 + speedup), "speedup": speedup, "threads": 1}
    run |= {"cache": "cold" if repeat == 1 else "warm", "compile_seconds": 9.0 / repeat, "max_logit_difference": 1e-7}
    return run | {"recompiles": 0, "graph_breaks": 0} | more


SPEEDUPS = (0.5, 0.2, 0.4, 0.3, -0.1)
RUNS = [
    *(made_up_run("inductor", 1, speedup, repeat) for repeat, speedup in enumerate(SPEEDUPS, 1)),
    made_up_run("inductor", 1024, -0.05, max_logit_difference=2e-6, recompiles=2),
    *(made_up_run("cudagraphs", batch_size, None) for batch_size in (1, 1024)),
]


@pytest.fixture
def result():
    result = speed.new_result("compile_inference", compile_inference.Args(), PROBE, "cpu")
    return result | {"ended": speed.now(), "runs": list(RUNS)}


# ---- What is measured ----
def test_the_policy_acts_as_the_scripts_agent():
    observation = np.random.default_rng(0).integers(256, size=(3, *acting.atari.FRAMES), dtype=np.uint8)
    rows = []
    for kind in (acting.atari.AtariPPOAgent, acting.Explorer):
        torch.manual_seed(5)
        agent = kind(acting.atari.Args(num_envs=3, num_steps=2), 6, torch.device("cpu"))
        actions = [agent.act(t, observation).copy() for t in (0, 1)]
        rows.append([actions, *(agent.rollout.arrays[name] for name in ("action", "log_prob", "value"))])
    for ours, theirs in zip(*rows):
        assert np.array_equal(ours, theirs)
    assert not np.array_equal(*rows[0][0]) or np.unique(rows[0][0]).size > 1  # it samples


def in_a_process(measure, cell, folder):
    """Which has compiled nothing yet, unlike this one."""

    def anew(cell):
        torch.compiler.reset()
        counters.clear()
        clear_compilation_metrics()
        return measure(cell)

    return compile_inference.run_cell(anew, CELL | cell, folder / "cache", 60.0)


def test_a_cell_is_compared_with_eager(tmp_path):
    """Also with a backend whose logits are wrong by 1."""

    def shifted(graph, inputs):
        return lambda *arguments: [output + (i == 0) for i, output in enumerate(graph(*arguments))]

    right, wrong = (
        in_a_process(compile_inference.measure, {"batch_size": 2, "backend": backend}, tmp_path)
        for backend in ("eager", shifted)
    )
    assert right["max_logit_difference"] == 0 and wrong["max_logit_difference"] == pytest.approx(1, abs=1e-6)
    assert right["speedup"] == pytest.approx(right["compiled"] / right["eager"] - 1) and right["iterations"] == 5
    assert (right["graphs"], right["graph_breaks"], right["recompiles"]) == (1, 0, 0)


def test_graph_breaks_and_recompiles_are_counted():
    torch.compiler.reset()

    @torch.compile(backend="eager")
    def broken(x):
        y = x + 1
        torch._dynamo.graph_break()
        return y * 2

    before = acting.compilations()
    for dtype in (torch.float32, torch.float32, torch.float64):
        broken(torch.ones(2, dtype=dtype))
    counts = {key: value - before[key] for key, value in acting.compilations().items()}
    assert counts["recompiles"] == 2, "both halves, for the other type"
    assert counts["graphs"] == 4 and counts["graph_breaks"] >= 1


def test_arms_take_turns(monkeypatch):
    clock, seen = [0.0], []
    monkeypatch.setattr(acting.time, "perf_counter", lambda: clock[0])

    def seconds_of(arm):
        clock[0] += 1.0
        seen.append(arm)
        return float(len(seen))

    arms = {"eager": "e", "compiled": "c"}
    assert acting.take_turns(seconds_of, arms, most=3, limit=99, least=1) == {"eager": [1, 3, 5], "compiled": [2, 4, 6]}
    assert "".join(seen) == "ececec"
    counts = [
        len(acting.take_turns(seconds_of, arms, 9, limit, least)["compiled"]) for limit, least in ((3, 1), (1, 5))
    ]
    assert counts == [4, 5]  # the turn in which the limit comes is the last; at least 5 are made
    assert acting.take_turns(seconds_of, arms, most=0, limit=9, least=1)["eager"] == []


def test_exploration(monkeypatch, tmp_path):
    monkeypatch.setattr(acting.atari, "make_pool", pools.Counting)
    cell = {"num_envs": 2, "num_steps": 40, "env_id": "any"}
    outcome = in_a_process(compile_exploration.measure, cell, tmp_path)
    assert outcome["speedup"] == pytest.approx(outcome["compiled"] / outcome["eager"] - 1)
    assert (outcome["iterations"], outcome["graphs"], outcome["graph_breaks"], outcome["recompiles"]) == (5, 1, 0, 0)


def test_exploration_counts_steps_as_the_script_does():
    """Those in which EnvPool only resets are none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(acting.atari, "make_pool", pools.Counting)
        pools.Counting.forget()
        games, count = acting.atari.Emulators("any", [0, 1], first=0), compile_exploration.StepCount()
    names = ("reward", "terminated", "truncated", "valid")
    rollout = {name: np.zeros((40, 2), np.float32) for name in names}
    for t in range(40):
        games.pool.send(np.zeros(2))
        games.receive(rollout, t, count)
    assert count.global_step == pools.Counting.steps == rollout["valid"].sum() < 80


# ---- Processes ----
def end_at_once(cell):
    os._exit(3)


def fail_with_two_lines(cell):
    raise KeyError(f"\n{ROOT}/x\nhint")


def start_a_child_and_wait(cell):
    child = os.fork()
    if child:
        Path(cell["pids"]).write_text(f"{os.getpid()} {child}")
    time.sleep(60)


def where_the_caches_are(cell):
    return {key: os.environ[key] for key in ("TORCHINDUCTOR_CACHE_DIR", "TMPDIR")}


def test_how_a_process_ends(tmp_path):

    def run(measure, timeout=60.0, **cell):
        return compile_inference.run_cell(measure, cell, tmp_path / "cell", timeout)

    assert run(end_at_once)["reason"] == "its process ended with exit status 3"
    failed = run(fail_with_two_lines)
    assert failed["status"] == "failed" and str(ROOT) not in failed["reason"] and "KeyError" in failed["reason"]
    places = run(where_the_caches_are)
    assert (places["status"], places["TMPDIR"]) == ("finished", str(tmp_path))
    assert places["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "cell")
    assert run(start_a_child_and_wait, 1.0, pids=str(tmp_path / "pids"))["reason"] == "stopped after 1 s"
    for pid in (tmp_path / "pids").read_text().split():
        state = Path("/proc", pid, "stat")
        for _ in range(100):  # a killed orphan is there until init takes it
            if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
                break
            time.sleep(0.05)
        else:
            pytest.fail("a process lives on")


def stand_in(cell):
    """Twice as fast when compiled; inductor fails at size 2 in its second process."""
    if (cell["backend"], cell["batch_size"], cell["repeat"]) == ("inductor", 2, 2):
        raise RuntimeError("no")
    cache = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    seconds = 1.0 if (cache / "graph").exists() else 9.0
    (cache / "graph").touch()
    figures = {"eager": 10.0 * cell["repeat"], "compiled": 20.0 * cell["repeat"], "speedup": 1.0, "graph_breaks": 0}
    return figures | {"compile_seconds": seconds, "recompiles": 0, "max_logit_difference": 0.0}


def test_cells_take_turns_and_the_rest_goes_on(tmp_path, result, monkeypatch):
    monkeypatch.setattr(compile_inference, "compile_first", lambda cell: {})
    result["runs"], output, written = [], tmp_path / "result.json", []
    store = compile_inference.store
    monkeypatch.setattr(
        compile_inference, "store", lambda *all: store(*all) or written.append(json.loads(output.read_text()))
    )
    pairs = [("inductor", "default"), ("onnxrt", "default"), ("aot_eager", "default"), ("aot_eager", "max-autotune")]
    settings = {"threads": 1}
    compile_inference.measure_cells(pairs, [1, 2], settings, result, output, stand_in, REGISTERED, 5, 60.0)
    not_run = [run for run in result["runs"] if run["status"] == "n/a"]
    assert [(run["backend"], run["mode"], run["batch_size"]) for run in not_run] == [
        ("onnxrt", "default", 1),
        ("aot_eager", "max-autotune", 1),
        ("onnxrt", "default", 2),
        ("aot_eager", "max-autotune", 2),
    ]
    runs = [(run["repeat"], run["batch_size"], run["backend"]) for run in result["runs"][4:]]
    every = [(r, size, backend) for r in range(1, 6) for size in (1, 2) for backend in ("inductor", "aot_eager")]
    assert runs == [run for run in every if not (run[0] > 2 and run[1:] == (2, "inductor"))]
    assert [len(each["runs"]) for each in written] == list(range(5, 5 + len(runs)))
    lines = {(line["backend"], line["batch_size"]): line for line in written[-1]["medians"]}
    assert (lines["aot_eager", 2]["runs"], lines["aot_eager", 2]["eager"], lines["aot_eager", 2]["compiled"]) == (
        5,
        30,
        60,
    )
    assert lines["aot_eager", 2]["compile_seconds_cold"] == 9 and lines["aot_eager", 2]["compile_seconds_warm"] == 1
    assert lines["inductor", 2]["reason"] == "RuntimeError: no" and lines["inductor", 2]["runs"] == 1
    assert result["first_compilation"]["status"] == "finished"


def test_a_stopped_benchmark_keeps_and_prints_what_it_has(result, tmp_path, capsys):
    result["ended"] = None
    with (
        pytest.raises(KeyboardInterrupt),
        compile_inference.until_stopped(result, tmp_path / "x", lambda: print("end")),
    ):
        raise KeyboardInterrupt
    assert result["ended"] is None and "end\nstopped; what there is so far: " in capsys.readouterr().out


# ---- Statistics ----
def test_bootstrap_interval():
    assert compile_inference.bootstrap_interval([3.0, 9.0, 1.0, 4.0, 5.0]) == (1, 9)
    assert compile_inference.bootstrap_interval([2.0] * 5) == (2, 2)
    values = np.random.default_rng(3).normal(10, 2, 2001)
    half = 1.96 * 1.2533 * 2 / 2001**0.5  # a normal median's standard error is sqrt(pi / 2) times the mean's
    low, high = compile_inference.bootstrap_interval(values)
    assert (high - low) / 2 == pytest.approx(half, rel=0.25) and low < 10 < high


def test_medians_of_a_cell():
    small, large, *others = compile_inference.summarise(RUNS, "batch_size")
    assert (small["runs"], small["speedup"], small["interval"], small["compiled"]) == (5, 0.3, [-0.1, 0.5], 130)
    assert (small["compile_seconds_cold"], small["compile_seconds_warm"]) == (9, 2.62)  # 9/2, 9/3, 9/4, 9/5
    assert (large["max_logit_difference"], large["recompiles"], large["compile_seconds_warm"]) == (2e-6, 2, None)
    assert [(line["runs"], line["reason"], line["speedup"], line["interval"]) for line in others] == 2 * [
        (0, "needs CUDA", None, None)
    ]


# ---- What can't run ----
def test_why_a_cell_cannot_run():
    why_not = compile_inference.why_not
    assert why_not("inductor", "max-autotune", "cpu", REGISTERED) is None
    assert why_not("cudagraphs", "default", "cpu", REGISTERED) == "needs CUDA"
    assert why_not("cudagraphs", "default", "cuda", REGISTERED) is None
    assert why_not("aot_eager", "max-autotune", "cuda", REGISTERED) == "only inductor has modes"
    assert "taken" in why_not("onnxrt", "default", "cpu", REGISTERED)
    assert "discontinued" in why_not("ipex", "default", "cpu", REGISTERED)
    assert why_not("openvino", "default", "cpu", (*REGISTERED, "openvino")) is None


def test_modes_by_default():
    modes = ("default", "reduce-overhead", "max-autotune")
    for quick, device, expected in ((False, "cpu", modes[::2]), (False, "cuda", modes), (True, "cuda", modes[:1])):
        args = compile_inference.Args(backend=("inductor",), quick=quick)
        pairs = compile_inference.plan(args, device, REGISTERED, modes)
        assert pairs == [("inductor", mode) for mode in expected]


@pytest.mark.parametrize(("flag", "names"), [("backend", ("inductr",)), ("mode", ("default", "fastest"))])
def test_unknown_names_are_bad_input(flag, names, capsys):
    with pytest.raises(SystemExit) as error:
        compile_inference.plan(compile_inference.Args(**{flag: names}), "cpu", REGISTERED, ("default",))
    message = capsys.readouterr().err
    assert error.value.code == 2 and message.count("\n") == 1 and f"--{flag} {names[-1]}: must be one of" in message


# ---- Command line ----
def test_rllibs_options_work():
    line = "-bs 4 16 --backend cudagraphs inductor --mode max-autotune -n 7 --burn-in 3 --cpu"
    args = tyro.cli(compile_inference.Args, args=line.split())
    assert (args.batch_size, args.backend, args.mode) == ((4, 16), ("cudagraphs", "inductor"), ("max-autotune",))
    assert (args.num_iters, args.burn_in, args.cpu) == (7, 3, True)
    assert tyro.cli(compile_inference.Args, args=["--batch-size", "1", "--num-iters", "9"]).num_iters == 9
    assert tyro.cli(compile_exploration.Args, args=["-n", "2", "--num-envs", "1", "8"]).num_envs == (1, 8)
    defaults = compile_inference.Args()
    assert defaults.batch_size == (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
    assert (defaults.num_iters, defaults.burn_in, defaults.repeats) == (600, 100, 5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"repeats": 4}, "--repeats 4: must be at least 5"),
        ({"batch_size": (1, 0)}, "--batch-size 0: must be at least 1"),
        ({"num_iters": 0}, "--num-iters 0: must be at least 1"),
        ({"burn_in": -1}, "--burn-in -1: must be at least 0"),
        ({"threads": 0}, "--threads 0: must be at least 1"),
        ({"seconds": 0.0}, "--seconds 0.0: must be above 0"),
        ({"output": Path("no", "folder.json")}, "--output no/folder.json: must be a file in a folder that exists"),
        ({"plot": Path("no", "folder.png")}, "--plot no/folder.png: must be a file in a folder that exists"),
        ({"result": Path("no.json")}, "--result no.json: must be a result file"),
        ({"result": Path(__file__)}, "must be a result of compile_inference.py"),
    ],
)
def test_bad_input(arguments, message, capsys):
    with pytest.raises(SystemExit) as error:
        compile_inference.main(compile_inference.Args(**arguments))
    lines = capsys.readouterr().err
    assert error.value.code == 2 and message in lines and lines.count("\n") == 1


def test_bad_input_of_exploration(capfd):
    """An unknown game is refused in the script's own words, by a process that has EnvPool's threads to itself."""
    for arguments, message in (({"num_steps": 0}, "--num-steps 0: "), ({"env_id": "Ponk-v5"}, "--env-id Ponk-v5: ")):
        with pytest.raises(SystemExit) as error:
            compile_exploration.main(compile_exploration.Args(**arguments))
        lines = capfd.readouterr().err
        assert error.value.code == 2 and message in lines and lines.count("\n") == 1


# ---- Output ----
def test_a_result_is_printed_and_drawn(result, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "result.json"
    compile_inference.store(result, path, compile_inference.summarise(result["runs"], "batch_size"))
    compile_inference.main(compile_inference.Args(result=path, plot=tmp_path / "map.png"))
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[1][:11] == ["inductor", "default", "1", "100.0", "130.0", "+30", "%", "−10", "to", "+50", "%"]
    assert ["cudagraphs", "default", "1", "to", "1,024", "n/a", "needs", "CUDA"] in rows
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_of_nothing_is_refused(result, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    with pytest.raises(SystemExit) as error:
        compile_inference.heat_map(result | {"runs": RUNS[-2:]}, tmp_path / "map.png")
    assert error.value.code == 2 and "no cell that could run" in capsys.readouterr().err


def test_tables(result, tmp_path):
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    for kind, size in compile_inference.SIZES.items():
        assert f"No results yet: `python benchmarks/{kind}.py`" in tables.TABLES[kind](results)
        runs = [{size if key == "batch_size" else key: value for key, value in run.items()} for run in RUNS]
        (results / f"{kind}_cpu.json").write_text(json.dumps(result | {"kind": kind, "runs": runs}))
        text = tables.TABLES[kind](results)
        assert "| eager, " + compile_inference.FIGURES[kind] + " |  | 100.0 | 100.0 |" in text
        assert "| inductor | default | +30 % (−10 to +50 %) | −5 % (−5 to −5 %) | 9.0 | 2.6 | 0 | 2 |" in text
        assert "| cudagraphs | default | n/a: needs CUDA | n/a |" in text, "the reason is said once"
        assert "medians of 5 processes" in text and f"({results.name}/{kind}_cpu.json)" not in text
        assert f"(benchmarks/results/{kind}_cpu.json)" in text
