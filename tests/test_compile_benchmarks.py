"""benchmarks/compile_inference.py and compile_exploration.py: turns, statistics, n/a cells, tables and pictures."""

import json
import multiprocessing
import os
import signal
import subprocess
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

BORN_IN = os.getpid()  # a forked process has it of its parent
PROBE = {"torch": "2.13.0", "threads": 1, "gpu": None}
REGISTERED = ("inductor", "cudagraphs", "aot_eager")
MODES = ("default", "reduce-overhead", "max-autotune")
CELL = {"backend": "eager", "mode": "default", "device": "cpu", "threads": 1, "repeat": 1}
CELL |= {"num_iters": 5, "burn_in": 1, "seconds": 60.0}


def needs_cuda(test):
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")(test))


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
        agent = kind(acting.atari.Args(num_envs=3, num_steps=2), 6, 3, torch.device("cpu"))
        actions = [agent.act(t, slice(0, 3), observation).copy() for t in (0, 1)]
        rows.append([actions, *(agent.batch[name] for name in ("action", "log_prob", "value"))])
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
    def broken(x):
        y = x + 1
        torch._dynamo.graph_break()
        return y * 2

    for _ in range(20):  # 80 compilations, more than torch keeps unless told
        torch.compiler.reset()
        function = torch.compile(broken, backend="eager")
        for dtype in (torch.float32, torch.float64):
            function(torch.ones(2, dtype=dtype))
    torch.compiler.reset()
    function = torch.compile(broken, backend="eager")
    before = acting.compilations()
    for dtype in (torch.float32, torch.float32, torch.float64):
        function(torch.ones(2, dtype=dtype))
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
    assert acting.take_turns(seconds_of, arms, most=3, limit=99, least=1) == {"eager": [1, 4, 5], "compiled": [2, 3, 6]}
    assert "".join(seen) == "ecceec", "neither always follows the other"
    counts = [
        len(acting.take_turns(seconds_of, arms, 9, limit, least)["compiled"]) for limit, least in ((3, 1), (1, 5))
    ]
    assert counts == [4, 5]  # the turn in which the limit comes is the last; at least 5 are made
    assert acting.take_turns(seconds_of, arms, most=0, limit=9, least=1)["eager"] == []


@pytest.mark.parametrize("repeat", [1, 2])
def test_every_second_process_begins_with_the_other_arm(repeat, monkeypatch):
    arms_of = []
    take_turns = acting.take_turns

    def note(seconds_of, arms, *limits, **more):
        arms_of.append(list(arms))
        return take_turns(seconds_of, arms, *limits, **more)

    monkeypatch.setattr(acting, "take_turns", note)
    monkeypatch.setattr(acting.atari, "make_pool", pools.Counting)
    monkeypatch.setattr(
        acting, "compiled", lambda *_: lambda network, observation: acting.explore(network, observation)
    )
    cell = CELL | {"repeat": repeat, "batch_size": 1, "num_envs": 1, "num_steps": 40, "env_id": "any", "num_iters": 1}
    for benchmark in (compile_inference, compile_exploration):
        benchmark.measure(cell)
    assert arms_of == 4 * [["eager", "compiled"][:: -1 if repeat == 1 else 1]]


@pytest.mark.parametrize(("device", "calls"), [("cpu", 1), ("cuda", 2)])
def test_compile_time_includes_the_capture_of_a_graph(device, calls, monkeypatch):
    """On CUDA the second call captures it."""
    clock, made = [0.0], []

    def now(device):
        clock[0] += 1.0
        return clock[0]

    monkeypatch.setattr(acting, "now", now)
    monkeypatch.setattr(torch.nn.Module, "to", lambda self, *_, **__: self)
    randint = torch.randint
    monkeypatch.setattr(torch, "randint", lambda *sizes, device, **more: randint(*sizes, **more))

    def compiled(network, observation):
        made.append(1)
        clock[0] += {1: 100.0, 2: 10.0}.get(len(made), 0.0)
        return acting.explore(network, observation)

    monkeypatch.setattr(acting, "compiled", lambda *_: compiled)
    outcome = compile_inference.measure(CELL | {"batch_size": 1, "device": device})
    assert outcome["compile_seconds"] == {1: 101, 2: 112}[calls]


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
        if "signal" in cell:
            os.kill(os.getppid(), cell["signal"])
    time.sleep(60)


def where_the_caches_are(cell):
    places = {key: os.environ[key] for key in ("TORCHINDUCTOR_CACHE_DIR", "TMPDIR")}
    return places | {"is_new": os.getpid() == BORN_IN}


def wait_for_the_end_of(pids):
    for pid in pids.read_text().split():
        state = Path("/proc", pid, "stat")
        for _ in range(100):  # a killed orphan is there until init takes it
            if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
                break
            time.sleep(0.05)
        else:
            pytest.fail("a process lives on")


def test_how_a_process_ends(tmp_path):

    def run(measure, timeout=60.0, **cell):
        return compile_inference.run_cell(measure, cell, tmp_path / "cell", timeout)

    assert run(end_at_once)["reason"] == "its process ended with exit status 3"
    failed = run(fail_with_two_lines)
    assert failed["status"] == "failed" and str(ROOT) not in failed["reason"] and "KeyError" in failed["reason"]
    places = run(where_the_caches_are)
    assert (places["status"], places["TMPDIR"], places["is_new"]) == ("finished", str(tmp_path), False)
    assert places["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "cell")
    assert run(start_a_child_and_wait, 1.0, pids=str(tmp_path / "pids"))["reason"] == "stopped after 1 s"
    wait_for_the_end_of(tmp_path / "pids")


def test_a_process_is_begun_anew_for_cuda(tmp_path):
    places = compile_inference.run_cell(where_the_caches_are, {"device": "cuda"}, tmp_path / "cell", 60.0)
    assert (places["status"], places["is_new"]) == ("finished", True)
    assert (places["TORCHINDUCTOR_CACHE_DIR"], places["TMPDIR"]) == (str(tmp_path / "cell"), str(tmp_path))


def test_an_interrupt_ends_the_process(tmp_path):
    old = signal.signal(signal.SIGINT, signal.default_int_handler)  # a program in the background ignores it
    cell = {"pids": str(tmp_path / "pids"), "signal": signal.SIGINT}
    try:
        with pytest.raises(KeyboardInterrupt):
            compile_inference.run_cell(start_a_child_and_wait, cell, tmp_path / "cell", 60.0)
    finally:
        signal.signal(signal.SIGINT, old)
    wait_for_the_end_of(tmp_path / "pids")


def test_an_interrupt_just_after_the_start_ends_the_process(tmp_path, monkeypatch):
    begin, pids = multiprocessing.context.ForkProcess.start, tmp_path / "pids"

    def start(process):
        begin(process)
        while not pids.exists() or not pids.read_text():
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(multiprocessing.context.ForkProcess, "start", start)
    with pytest.raises(KeyboardInterrupt):
        compile_inference.run_cell(start_a_child_and_wait, {"pids": str(pids)}, tmp_path / "cell", 60.0)
    wait_for_the_end_of(pids)


def test_nothing_outlives_a_killed_benchmark(tmp_path):
    """Not even the process of a cell, which is in a session of its own."""
    pids = tmp_path / "pids"
    arguments = (start_a_child_and_wait, {"pids": str(pids), "signal": signal.SIGKILL}, tmp_path / "cell", 60.0)
    process = multiprocessing.get_context("fork").Process(target=compile_inference.run_cell, args=arguments)
    process.start()
    while process.exitcode is None:  # to join it would be to wait for what it has started, too
        time.sleep(0.05)
    assert process.exitcode == -signal.SIGKILL
    wait_for_the_end_of(pids)


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
    monkeypatch.setattr(
        compile_inference, "save", lambda *all: speed.save(*all) or written.append(json.loads(output.read_text()))
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


def test_a_measurement_from_end_to_end(tmp_path):
    """As a user starts it; with a size given twice, and a mode that eager has not."""
    output = tmp_path / "new" / "result.json"
    command = [sys.executable, ROOT / "benchmarks" / "compile_inference.py", "--cpu", "--output", output]
    command += ["--backend", "eager", "--mode", "default", "max-autotune", "-bs", "1", "1"]
    command += ["-n", "1", "--burn-in", "0", "--seconds", "0.01"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    result = json.loads(output.read_text())
    assert [(run["mode"], run["status"], run["repeat"]) for run in result["runs"]] == [
        ("max-autotune", "n/a", 1),
        *(("default", "finished", repeat) for repeat in range(1, 6)),
    ]
    assert result["settings"]["batch_size"] == [1] and result["settings"]["mode"] == ["default", "max-autotune"]
    could, could_not = sorted(result["medians"], key=lambda line: -line["runs"])
    assert (could["runs"], could["failed"], could["max_logit_difference"], could["graph_breaks"]) == (5, 0, 0, 0)
    assert could["interval"][0] <= could["speedup"] <= could["interval"][1]
    assert (could_not["runs"], could_not["failed"], could_not["reason"]) == (0, 0, "only inductor has modes")
    assert ended.stdout.splitlines()[-1].startswith("all: ") and "5 of 5: eager default 1: " in ended.stdout


def test_a_stopped_benchmark_keeps_and_prints_what_it_has(result, tmp_path, capsys):
    result["ended"] = None
    with (
        pytest.raises(KeyboardInterrupt),
        compile_inference.until_stopped(result, tmp_path / "x", lambda: print("end")),
    ):
        raise KeyboardInterrupt
    assert result["ended"] is None and "end\nstopped; what there is so far: " in capsys.readouterr().out


# ---- Statistics ----
def test_interval_of_a_median():
    assert compile_inference.median_interval([3.0, 9.0, 1.0, 4.0, 5.0]) == [1, 9]
    assert compile_inference.median_interval([2.0] * 5) == [2, 2]
    assert compile_inference.median_interval([3.0, 9.0, 1.0, 4.0]) is compile_inference.median_interval([]) is None
    values = np.random.default_rng(3).normal(10, 2, 2001)
    half = 1.96 * 1.2533 * 2 / 2001**0.5  # a normal median's standard error is sqrt(pi / 2) times the mean's
    low, high = compile_inference.median_interval(values)
    assert (high - low) / 2 == pytest.approx(half, rel=0.25) and low < 10 < high


def test_medians_of_a_cell():
    small, large, *others = compile_inference.summarise(RUNS, "batch_size")
    assert (small["runs"], small["speedup"], small["interval"], small["compiled"]) == (5, 0.3, [-0.1, 0.5], 130)
    assert (small["compile_seconds_cold"], small["compile_seconds_warm"]) == (9, 2.62)  # 9/2, 9/3, 9/4, 9/5
    assert (large["max_logit_difference"], large["recompiles"], large["compile_seconds_warm"]) == (2e-6, 2, None)
    assert (large["speedup"], large["interval"]) == (-0.05, None), "one process has no interval"
    assert [line["failed"] for line in (small, large, *others)] == [0] * 4, "what can't run has not failed"
    failed = {"status": "failed", "reason": "no"}
    line = compile_inference.summarise([*RUNS[:2], made_up_run("inductor", 1, None, 3, **failed)], "batch_size")[0]
    assert (line["runs"], line["failed"], line["reason"]) == (2, 1, "no")
    assert [(line["runs"], line["reason"], line["speedup"], line["interval"]) for line in others] == 2 * [
        (0, "needs CUDA", None, None)
    ]


# ---- What can't run ----
def test_why_a_cell_cannot_run():
    why_not = compile_inference.why_not
    assert why_not("inductor", "max-autotune", "cpu", REGISTERED) is None
    assert "CUDA graphs" in why_not("inductor", "reduce-overhead", "cpu", REGISTERED)
    assert why_not("inductor", "reduce-overhead", "cuda", REGISTERED) is None
    assert why_not("cudagraphs", "default", "cpu", REGISTERED) == "needs CUDA"
    assert why_not("cudagraphs", "default", "cuda", REGISTERED) is None
    assert why_not("aot_eager", "max-autotune", "cuda", REGISTERED) == "only inductor has modes"
    assert "taken" in why_not("onnxrt", "default", "cpu", REGISTERED)
    assert "discontinued" in why_not("ipex", "default", "cpu", REGISTERED)
    assert why_not("openvino", "default", "cpu", (*REGISTERED, "openvino")) is None


def test_modes_by_default():
    for quick, expected in ((False, MODES), (True, MODES[:1])):
        args = compile_inference.Args(backend=("inductor",), quick=quick)
        pairs = compile_inference.plan(args, REGISTERED, MODES)
        assert pairs == [("inductor", mode) for mode in expected]


@pytest.mark.parametrize(("flag", "names"), [("backend", ("inductr",)), ("mode", ("default", "fastest"))])
def test_unknown_names_are_bad_input(flag, names, capsys):
    with pytest.raises(SystemExit) as error:
        compile_inference.plan(compile_inference.Args(**{flag: names}), REGISTERED, ("default",))
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
        ({"batch_size": ()}, "--batch-size: must be followed by at least one value"),
        ({"backend": ()}, "--backend: must be followed by at least one value"),
        ({"num_iters": 0}, "--num-iters 0: must be at least 1"),
        ({"burn_in": -1}, "--burn-in -1: must be at least 0"),
        ({"threads": 0}, "--threads 0: must be at least 1"),
        ({"seconds": 0.0}, "--seconds 0: must be above 0"),
        ({"output": ROOT}, f"--output {ROOT}: must be a file that can be written"),
        ({"output": Path(__file__)}, "is there already"),
        ({"plot": Path("no", "folder.png")}, "--plot no/folder.png: must be a file in a folder that can be written to"),
        ({"result": Path("no.json")}, "--result no.json: must be a result file"),
        ({"result": Path(__file__)}, "must be a result file of the kind compile_inference"),
    ],
)
def test_bad_input(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(compile_inference, "ask", lambda program: PROBE | {"backends": REGISTERED, "modes": MODES})
    with pytest.raises(SystemExit) as error:
        compile_inference.main(compile_inference.Args(**arguments))
    lines = capsys.readouterr().err
    assert error.value.code == 2 and message in lines and lines.count("\n") == 1


def test_bad_input_of_exploration(capfd):
    """An unknown game is refused in the script's own words, by a process that has EnvPool's threads to itself."""
    for arguments, message in (
        ({"num_steps": 0}, "--num-steps 0: "),
        ({"env_id": "Ponk-v5"}, "--env-id Ponk-v5: "),
        ({"num_envs": ()}, "--num-envs: must be followed by at least one value"),
    ):
        with pytest.raises(SystemExit) as error:
            compile_exploration.main(compile_exploration.Args(**arguments))
        lines = capfd.readouterr().err
        assert error.value.code == 2 and message in lines and lines.count("\n") == 1


# ---- Output ----
def test_a_result_is_printed_and_drawn(result, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "result.json"
    speed.save(result, path, compile_inference.summarise(result["runs"], "batch_size"))
    compile_inference.main(compile_inference.Args(result=path, plot=tmp_path / "map.png"))
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines]
    assert rows[1][:11] == ["inductor", "default", "1", "100.0", "130.0", "+30", "%", "−10", "to", "+50", "%"]
    assert ["cudagraphs", "default", "1", "to", "1,024", "n/a"] in rows
    assert "cudagraphs default 1 to 1,024: needs CUDA" in lines
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
        assert "| inductor | default | +30 % (−10 to +50 %) | −5 % (1 of 5 runs) | 9.0 | 2.6 | 0 | 2 |" in text
        assert "| cudagraphs | default | n/a: needs CUDA | n/a |" in text, "the reason is said once"
        assert "medians of 1 to 5 processes" in text and f"({results.name}/{kind}_cpu.json)" not in text
        assert f"(benchmarks/results/{kind}_cpu.json)" in text


def test_modes_that_cannot_run_for_the_same_reason_are_one_row():
    runs = [made_up_run("onnxrt", 1, None) | {"mode": mode} for mode in MODES]
    runs += [made_up_run("aot_eager", 1, 0.1), made_up_run("aot_eager", 1, None) | {"mode": "max-autotune"}]
    groups = compile_inference.by_backend_and_mode(compile_inference.summarise(runs, "batch_size"))
    assert list(groups) == [("aot_eager", "default"), ("onnxrt", ", ".join(MODES)), ("aot_eager", "max-autotune")]


# ---- On CUDA ----
@needs_cuda
@pytest.mark.parametrize(("backend", "mode"), [("cudagraphs", "default"), ("inductor", "reduce-overhead")])
def test_cells_on_cuda(backend, mode, tmp_path):
    cell = CELL | {"backend": backend, "mode": mode, "batch_size": 4, "device": "cuda"}
    outcome = compile_inference.run_cell(compile_inference.measure, cell, tmp_path / "cache", 300.0)
    assert (outcome["status"], outcome["graph_breaks"], outcome["iterations"]) == ("finished", 0, 5), outcome
    assert outcome["max_logit_difference"] < 1e-4


@needs_cuda
def test_a_captured_policy_acts_as_the_eager_one():
    """Its outputs are in memory that the next call writes to, so `act` must have read them by then."""
    torch.manual_seed(5)
    agent = acting.Explorer(acting.atari.Args(num_envs=64, num_steps=4), 6, 64, torch.device("cuda"))
    observations = np.random.default_rng(0).integers(256, size=(4, 64, *acting.atari.FRAMES), dtype=np.uint8)
    values = []
    for policy in (acting.explore, acting.compiled("inductor", "reduce-overhead")):
        agent.policy = policy
        for _ in range(2):  # in the second the graph is replayed
            actions = [agent.act(t, slice(0, 64), observation).copy() for t, observation in enumerate(observations)]
        values.append(agent.batch["value"].cpu().numpy())
        assert np.array_equal(agent.batch["action"].view(4, 64).cpu(), actions)
        assert not np.array_equal(actions[0], actions[1]) and {*np.unique(actions)} == {*range(6)}
    assert np.allclose(*values, atol=1e-2) and np.unique(values[1]).size > 100


@needs_cuda
def test_exploration_on_cuda(monkeypatch):
    monkeypatch.setattr(acting.atari, "make_pool", pools.Counting)
    torch.compiler.reset()
    cell = {"backend": "cudagraphs", "num_envs": 2, "num_steps": 40, "env_id": "any", "device": "cuda"}
    outcome = compile_exploration.measure(CELL | cell)
    assert outcome["iterations"] == 5 and outcome["compile_seconds"] > 0
