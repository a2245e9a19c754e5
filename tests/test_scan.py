"""benchmarks/scan.py: every arm yields what a loop does, figures and reasons, tables, the picture, bad input."""

import importlib.util
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "benchmarks"))

import scan  # noqa: E402
import scan_arms  # noqa: E402
import speed  # noqa: E402
import tables  # noqa: E402
from ppo_memory import CELLS, linear_recurrence  # noqa: E402

PROBE = {"torch": "2.13.0", "threads": 1, "gpu": None}
HAS_JAX = importlib.util.find_spec("jax") is not None
LENGTH, BATCH, SIZE = 3, 2, 3


@pytest.mark.parametrize("first, second", [(0.0, float("nan")), (float("nan"), 0.0)])
def test_an_output_that_is_not_a_number_is_an_error(first, second):
    reference = [torch.ones(2), torch.ones(2)]
    assert not scan_arms.error_of([torch.ones(2) + first, torch.ones(2) + second], reference) < scan_arms.TOLERANCE


@pytest.fixture
def traced(monkeypatch):
    """torch.compile traces and checks as ever, but leaves the graph to eager."""
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, options=None, **more: compile(f, backend="eager", **more))


def measured(model, shares=(0.3,), passes=scan.PASSES, arms=scan.ARMS, limit=60.0):
    lines = scan_arms.measure(model, shares, passes, arms, limit, 1e-6)
    return {(line["arm"], line["pass"], line["resets"]): line for line in lines}


# ---- What is measured ----
@pytest.mark.parametrize("name", [*scan.LINEAR, *scan.GATED])
def test_every_arm_yields_what_the_loop_does(name, traced):
    passes = scan.PASSES if name in ("recurrence", "gru") else scan.PASSES[1:]
    lines = measured(scan_arms.Model(name, LENGTH, BATCH, SIZE, "cpu"), (0.3, 0.0), passes)
    arms = dict.fromkeys(arm for arm, *_ in lines)
    own = {"recurrence": ("scan", "compiled scan", "captured scan", "JAX scan")}
    own |= dict.fromkeys(scan.GATED, ("native", "native, padded", "native between resets", "compiled operator"))
    own |= dict.fromkeys(("lru", "mingru", "s5", "ffm"), ("eager loop, recurrence only", *own["recurrence"]))
    assert {*arms} == {"eager loop", "compiled loop", "captured loop", *own[name]}
    assert {(name, share) for _, name, share in lines} == {(each, share) for each in passes for share in (0.3, 0)}
    for (arm, _, share), line in lines.items():
        reason = None
        if arm.startswith("captured"):
            reason = "needs CUDA"
        elif arm == "JAX scan" and name in ("s5", "ffm"):
            reason = "is written for the recurrence, LRU and minGRU alone"
        elif arm == "JAX scan" and not HAS_JAX:
            reason = "needs JAX (requirements/requirements-jax.txt)"
        elif arm == ("native" if share else "native, padded"):
            reason = "knows no resets" if share else "the same as native: nothing to pad"
        assert line.get("reason") == reason, line
        assert line["status"] == ("n/a" if reason else "finished")
        if reason is None:
            # S5's gradients of decay and frequency are what little is left of large ones here, in the loop, too
            assert line["error"] < (5e-4 if name == "s5" else 1e-5) and line["seconds"] > 0 and line["calls"] >= 1
            assert ("compile_seconds" in line) == arm.startswith(("compiled", "JAX"))


@pytest.mark.parametrize("name", ["recurrence", "lru"])
def test_every_form_yields_what_the_loop_does(monkeypatch, name):
    """And is the form that is named, in what is compiled, too (of one model: each takes long to compile)."""
    assert (*scan_arms.FORMS,) == scan.FORMS
    model, used = scan_arms.Model(name, LENGTH, BATCH, SIZE, "cpu"), set()
    for function in ("scan", "double"):
        module = scan_arms.memory if function == "scan" else scan_arms
        usual = getattr(module, function)
        monkeypatch.setattr(module, function, lambda *args, usual=usual: used.add(args[3]) or usual(*args))
    compiled = ("compiled scan, doubling", "compiled scan, chunks of 8") if name == "recurrence" else ()
    for arm in (*scan.FORM_ARMS["eager"], *compiled):
        before = scan_arms.memory.chunk_length, scan_arms.memory.scan
        ((_, line),) = measured(model, passes=scan.PASSES[1:], arms=[arm]).items()
        assert line["status"] == "finished" and line["error"] < 1e-5, line
        form = arm.partition(", ")[2]
        assert scan_arms.FORMS.get(form, 8) in used and (form in ("", "doubling") or None not in used)
        assert before == (scan_arms.memory.chunk_length, scan_arms.memory.scan)
        used.clear()
    (line,) = measured(model, passes=["forward"], arms=["compiled scan, chunks of 32"]).values()
    assert line["reason"] == "takes minutes to compile, unless it is the loop"


@pytest.mark.parametrize("is_stacked", [False, True])
def test_the_snippet_of_the_issue(is_stacked, traced):
    model = scan_arms.Ensemble("cpu", is_stacked)
    assert model.x.shape == (3, 4, 10, 32) and model.given["weight_hh"].shape[-2:] == (600, 200)
    lines = measured(model, (0.0,), scan.PASSES[is_stacked:][:1]).values()
    finished = {line["arm"] for line in lines if line["status"] == "finished" and line["error"] < 1e-5}
    assert finished == {"eager loop", "compiled loop"}


@pytest.mark.parametrize("share", [0.0, 0.2, 1.0])
def test_padding(share):
    """Also of an episode a step, and of none that begins at the first."""
    torch.manual_seed(0)
    cell, x = CELLS["gru"](SIZE), torch.randn(9, BATCH, SIZE)
    reset = (torch.rand(9, BATCH) < share).float()
    before = reset.clone()
    expected = scan_arms.loop_steps(cell, x, cell.initial_state(BATCH), reset)[0]
    torch.testing.assert_close(scan_arms.run_padded(scan_arms.native_layer(cell), x, reset), expected)
    assert torch.equal(reset, before)


@pytest.mark.parametrize("parts", [1, 2])
def test_the_loop_is_the_recurrence(parts):
    a, b, h = torch.rand(4), torch.randn(6, BATCH, 4), torch.randn(BATCH, 4)
    expected = linear_recurrence(a, b, h, parts)
    torch.testing.assert_close(scan_arms.loop_recurrence(a, b, h, parts), expected)


def test_the_looped_recurrence_is_put_back():
    before = scan_arms.memory.linear_recurrence
    with pytest.raises(KeyError), scan_arms.looped_recurrence():
        assert scan_arms.memory.linear_recurrence is scan_arms.loop_recurrence
        raise KeyError
    assert scan_arms.memory.linear_recurrence is before


def test_resets_are_drawn_in_place_and_the_same_each_time():
    model = scan_arms.Model("recurrence", 1000, BATCH, SIZE, "cpu")
    address = model.reset.data_ptr()
    model.set_resets(0.1)
    first = model.reset.clone()
    model.set_resets(0.0)
    assert not model.reset.any()
    model.set_resets(0.1)
    assert torch.equal(model.reset, first) and model.reset.data_ptr() == address
    assert 0.07 < first.mean() < 0.13 and {*first.unique().tolist()} == {0, 1}


def test_an_arm_that_is_wrong_or_fails_is_not_timed(monkeypatch):
    model = scan_arms.Model("recurrence", LENGTH, BATCH, SIZE, "cpu")
    arms = scan_arms.arms_of(model, 60.0)

    def wrong(trains):
        return lambda: [x * 1.01 for x in arms["scan"](trains)()]

    def broken(trains):
        raise ValueError(f"\n{ROOT}/x\nhint")

    every = {"eager loop": arms["eager loop"], "scan": wrong, "compiled scan": broken}
    monkeypatch.setattr(scan_arms, "arms_of", lambda model, limit: every)
    loop, scanned, compiled = measured(model, passes=scan.PASSES[1:]).values()
    assert loop["status"] == "finished" and loop["error"] < 1e-5
    assert scanned["status"] == compiled["status"] == "failed" and "seconds" not in scanned
    assert "differs from the reference by 1" in scanned["reason"] and compiled["reason"] == "ValueError: ./x"


def test_no_arm_is_its_own_reference(monkeypatch):
    """The fastest of all is right at the first share of resets, by which it is trusted, and wrong at the second."""
    model, fast, slow = scan_arms.Model("recurrence", LENGTH, BATCH, SIZE, "cpu"), *scan_arms.TRUSTED[:2]
    right = scan_arms.arms_of(model, 60.0)["scan"]

    def wrong(trains):
        call = right(trains)
        return lambda: [x * 1.01 for x in call()] if model.reset.mean() > 0.4 else call()

    def delayed(trains):
        call = right(trains)
        return lambda: time.sleep(0.05) or call()

    monkeypatch.setattr(scan_arms, "arms_of", lambda model, limit: {fast: wrong, slow: delayed})
    lines = scan_arms.measure(model, (0.1, 0.5), scan.PASSES[:1], (fast, slow), 60.0, 1e-6)
    by_arm = {(line["arm"], line["resets"]): line for line in lines}
    assert by_arm[fast, 0.1]["status"] == by_arm[slow, 0.1]["status"] == "finished"
    assert "differs from the reference by 1" in by_arm[fast, 0.5]["reason"]


def test_calls_that_take_too_long(monkeypatch):
    """A long loop is not called at all: its first steps tell."""
    arms = ["eager loop", "scan"]
    lines = measured(scan_arms.Model("recurrence", 4, 1, 1, "cpu"), arms=arms, limit=1e-9).values()
    assert all(line["status"] == "n/a" and line["reason"].startswith("a call takes ") for line in lines)
    monkeypatch.setattr(scan_arms.Model, "loop", lambda self, *_: (self.length == 64 or pytest.fail()) and self.weights)
    model = scan_arms.Model("recurrence", 80, 1, 1, "cpu")
    line = measured(model, arms=arms[:1], passes=["forward"], limit=1e-9)["eager loop", "forward", 0.3]
    assert line["reason"].startswith("a call would take about ")


@pytest.mark.parametrize("name", ["recurrence", "lru", "lstm"])
def test_long_loops_are_compiled_in_blocks(monkeypatch, traced, name):
    """Each a call of what is compiled once, but for steps left over; a state goes from one to the next."""
    monkeypatch.setattr(scan_arms, "UNROLLED", {"recurrence": 5, "cell": 5})
    compiled, calls = scan_arms.compiled, []

    def noted(function, device):
        block = compiled(function, device)
        return lambda *args: calls.append(len(args[-1])) or block(*args)

    monkeypatch.setattr(scan_arms, "compiled", noted)
    lines = measured(scan_arms.Model(name, 17, BATCH, SIZE, "cpu"), arms=["compiled loop"])
    assert len(lines) == 2 and calls and {*calls} == {5} and len(calls) % 3 == 0
    assert all(line["status"] == "finished" and line["error"] < 1e-5 for line in lines.values())
    assert all("compile_seconds" in line for line in lines.values())


def test_without_jax(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax", None)
    line = measured(scan_arms.Model("recurrence", 4, 1, 1, "cpu"), arms=["JAX scan"])["JAX scan", "forward", 0.3]
    assert (line["status"], line["reason"]) == ("n/a", "needs JAX (requirements/requirements-jax.txt)")


def test_arms_take_turns(monkeypatch):
    """At least 3 calls; the fast ones as many as come into their seconds, or the most."""
    seen, costs = [], {"slow": 0.9, "fast": 0.25, "instant": 0.001}
    monkeypatch.setattr(scan_arms, "seconds_of", lambda call, device: call())
    calls = {arm: lambda arm=arm: seen.append(arm) or costs[arm] for arm in costs}
    taken = scan_arms.take_turns(calls, 1.0, "cpu")
    assert {arm: len(own) for arm, own in taken.items()} == {"slow": 3, "fast": 4, "instant": 50}
    assert seen[:7] == ["slow", "fast", "instant", "instant", "fast", "slow", "slow"]


def test_slow_calls_are_made_once(monkeypatch):
    model, seen = scan_arms.Model("recurrence", LENGTH, BATCH, SIZE, "cpu"), []
    run = model.scan
    monkeypatch.setattr(model, "scan", lambda *given: seen.append(1) or run(*given))
    monkeypatch.setattr(scan_arms, "ONCE", 0.0)
    (line,) = measured(model, passes=["forward"], arms=["scan"]).values()
    assert (line["status"], line["calls"], len(seen)) == ("finished", 1, 2)  # one is the reference's


PEAK_MEMORY = """
import torch, scan_arms

size = 4 * 10**7  # bytes of a tensor
outputs, seconds, peak = scan_arms.observe(lambda: [torch.ones(3, size // 4).sum(0).add_(1)], "cpu")
assert 3.9 * size < peak < 5 * size and seconds > 0 and outputs[0][0] == 4, peak
kept = torch.ones(size)
peak = scan_arms.observe(lambda: [kept.sum()], "cpu")[2]
assert peak < 0.5 * size, peak
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory():
    """In a process that has freed nothing which a tensor could take without growing it."""
    done = subprocess.run([sys.executable, "-c", PEAK_MEMORY], cwd=ROOT / "benchmarks", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ---- Plan and processes ----
def test_plan():
    args = scan.Args(models=("gru", "lru", "gru", "vmap"), lengths=(64, 16, 4, 100), batch_size=4, steps=256)
    plan = scan.plan(args)
    cells = [(cell["model"], cell["length"], cell["batch"]) for cell in plan]
    alone = {(cell["length"], cell["batch"]) for cell in plan if cell["passes"] == ["forward+backward"]}
    assert alone == {(16, 4), (100, 4), (4, 64), (16, 16)} and all(cell["passes"] for cell in plan)
    sizes = [
        (4, 4),
        (16, 4),
        (64, 4),
        (100, 4),
        (4, 64),
        (16, 16),
    ]  # 64 steps are in the first series
    assert cells == [*((name, *size) for size in sizes for name in ("gru", "lru")), *((x, 10, 4) for x in scan.SNIPPET)]
    assert len(scan.plan(scan.Args(steps=0))) == 6 * 5 + 2


def run(*arguments, cwd=None):
    command = [sys.executable, ROOT / "benchmarks" / "scan.py", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=cwd)


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """The result of a small benchmark, as a user starts it."""
    path = tmp_path_factory.mktemp("scan") / "new" / "result.json"
    ended = run(
        *("--models", "recurrence", "gru", "--lengths", 8, "--steps", 0, "--size", 3, "--resets", 0.2, 0.0, "--cpu"),
        *("--arms", "eager loop", "scan", "native", "captured scan", "--seconds", 0.001, "--output", path),
        cwd=path.parent.parent,
    )
    assert (ended.returncode, ended.stderr) == (0, ""), ended
    assert "2 of 2: GRU, T = 8, B = 4: " in ended.stdout and "captured scan: needs CUDA\n" in ended.stdout
    assert ended.stdout.splitlines()[-1].startswith("all: ")
    return path


def test_a_benchmark_from_end_to_end(output):
    result = json.loads(output.read_text())
    assert {*speed.RESULT_KEYS} < {*result} and result["ended"] and result["settings"]["lengths"] == [8]
    assert [(run["model"], run["length"], run["status"]) for run in result["runs"]] == [
        (model, 8, "finished") for model in ("recurrence", "gru")
    ]
    assert {run["threads"] for run in result["runs"]} == {result["hardware"]["torch_threads"]}
    keys = {"model", "length", "batch", "arm", "pass", "resets", "status", "error", "seconds", "calls", "peak_bytes"}
    finished = [line for line in result["medians"] if line["status"] == "finished"]
    assert all({*line} == keys for line in finished) and {line["pass"] for line in finished} == {*scan.PASSES}
    kinds = [("recurrence", "eager loop"), ("recurrence", "scan"), ("gru", "eager loop"), ("gru", "native")]
    assert {(line["model"], line["arm"]) for line in finished} == {*kinds}
    assert len(finished) == 2 * (2 * 3 + 1) and len(result["medians"]) == 2 * 2 * 5


def test_a_result_is_printed_and_drawn(output, tmp_path):
    pytest.importorskip("matplotlib")
    ended = run("--result", output, "--plot", tmp_path / "plot.png")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "GRU    8  4" in ended.stdout and "forward and backward, by resets:" in ended.stdout
    assert (tmp_path / "plot.png").read_bytes()[:4] == b"\x89PNG"


def test_the_forms_of_the_scan(tmp_path):
    size = ("--lengths", 8, "--steps", 0, "--size", 3, "--cpu")
    ended = run("--forms", "eager", "--claims", *size)
    assert ended.returncode == 2 and ended.stderr.endswith("--forms --claims: only one of them\n"), ended
    ended = run("--forms", "eager", *size, "--output", tmp_path / "forms.json")
    assert (ended.returncode, ended.stderr) == (0, ""), ended
    result = json.loads((tmp_path / "forms.json").read_text())
    ((header, rows),) = scan.tables_of(result, "scan_forms")
    assert header[3:5] == ["scan, as chosen, ms", "loop, ms"] and [row[:3] for row in rows] == [
        ["recurrence", "8", "4"],
        ["LRU", "8", "4"],
    ]
    assert all(float(cell) > 0 for row in rows for cell in row[3:]) and scan.tables_of(result, "scan_snippet") == []


def test_a_process_that_fails_is_recorded_and_the_rest_goes_on(tmp_path, monkeypatch, capsys):
    outcomes = iter([{"status": "failed", "reason": "killed"}, {"status": "finished", "lines": LINES[:1]}])
    monkeypatch.setattr(scan, "run_cell", lambda *_: {"process_seconds": 1.0, "load_before": 0.0} | next(outcomes))
    args = scan.Args(models=("gru",), lengths=(4, 8), steps=0, arms=("eager loop",), passes=("forward",))
    result = speed.new_result("scan", args, PROBE, "cpu")
    scan.measure_all(args, scan.plan(args), result, tmp_path / "x.json", 1)
    assert [run["status"] for run in result["runs"]] == ["failed", "finished"] and scan.has_failed(result)
    assert "GRU, T = 4, B = 4: failed: killed" in capsys.readouterr().out
    assert scan.notes_of(result) == ["GRU, T = 4, B = 4: killed"]


# ---- Tables and picture ----
def line(arm, seconds=None, share=0.01, name=scan.PASSES[1], reason=None, **more):
    about = {"arm": arm, "pass": name, "resets": share, "peak_bytes": 2 * 10**6, "error": 1e-7, "calls": 9}
    if seconds is None:
        return {"arm": arm, "pass": name, "resets": share, "status": "n/a", "reason": reason}
    return about | {"status": "finished", "seconds": seconds} | more


LINES = [
    line("eager loop", 0.5),
    line("eager loop", 0.4, share=0.0),
    line("compiled loop", reason="is unrolled"),
    line("native", reason="knows no resets"),
    line("native", 0.1234, share=0.0),
]


@pytest.fixture
def result():
    """At T = 4,096 a GRU, an LRU whose scan takes 20 ms, and the snippet; the LRU also at another batch."""
    lru = [line("scan", 0.02), line("eager loop", 0.2), line("compiled scan", 0.0099, compile_seconds=12.34)]
    lru += [line("JAX scan", 0.03, compile_seconds=4.0), line("scan", 0.0215, share=0.0)]
    slow = [line("eager loop", reason="a call would take about 7 s"), line("scan", 0.00012345)]
    snippet = [line("eager loop", 0.019, share=0.0), line("compiled loop", 0.014, share=0.0, compile_seconds=20.0)]
    runs = [("gru", 4096, 4, LINES), ("lru", 4096, 4, lru), ("lru", 64, 4, slow), ("lru", 4096, 16, lru[:1])]
    runs += [("vmap, shared", 10, 4, snippet)]
    result = speed.new_result("scan", scan.Args(), PROBE, "cpu") | {"ended": speed.now()}
    keys = ("model", "length", "batch", "lines")
    result["runs"] = [dict(zip(keys, run)) | {"status": "finished"} for run in runs]
    return result | {"medians": scan.summarise(result["runs"])}


def test_tables(result):
    (linear, gated), (ratios,) = scan.tables_of(result, "scan"), scan.tables_of(result, "scan_ratios")
    header = ["model", "T", "B", "eager loop, ms", "scan, ms", "compiled scan, ms", "JAX scan, ms"]
    rows = [["LRU", "64", "4", "n/a", "0.123", "", ""], ["LRU", "4,096", "4", "200", "20.0", "9.90", "30.0"]]
    assert linear == (header, [*rows, ["LRU", "4,096", "16", "", "20.0", "", ""]])
    assert gated == (["model", "T", "B", "eager loop, ms", "native, ms"], [["GRU", "4,096", "4", "500", "123"]])
    assert ratios[1][1] == ["4,096", "4", "scan", "10.0", "n/a", "n/a", "25.0", "n/a", "1.50"]
    (resets,), costs = scan.tables_of(result, "scan_resets"), scan.tables_of(result, "scan_costs")
    assert resets[0] == ["T = 4,096, B = 4", "arm", "0% resets, ms", "1% resets, ms"]
    assert ["LRU", "scan", "21.5", "20.0"] in resets[1] and ["GRU", "native", "123", "n/a"] in resets[1]
    assert costs[0][1][1] == ["LRU", "4,096", "4", "12.3", "4.0", *["2.0"] * 4]
    ((header, rows),) = scan.tables_of(result, "scan_snippet")
    assert rows == [
        ["one GRU", "forward+backward", "19.0", "14.0"],
        ["one GRU, published, on an H100", "forward+backward", "5.48", "0.860"],
    ]
    assert scan.tables_of(result, "scan_forward") == []
    notes = ["compiled loop: is unrolled", "native: knows no resets", "eager loop: a call takes longer than 5 s"]
    assert scan.notes_of(result) == notes and not scan.has_failed(result)
    result["versions"]["jax"] = "9.8.7"  # is named where it was measured, not where it only is installed
    assert "JAX 9.8.7" in scan.caption(result, "scan")
    others = [line for line in result["medians"] if line["arm"] != "JAX scan"]
    assert "JAX" not in scan.caption(result | {"medians": others}, "scan")


def test_published_claims_stand_beside_our_ratios(result):
    assert scan.tables_of(result, "scan_claims") == []  # which need S5 and FFM
    gru = [line("eager loop", 0.5), line("compiled operator", 0.2), line("native, padded", 0.1)]
    linear = [line("eager loop", 0.3), line("scan", 0.05), line("compiled scan", 0.02)]
    runs = [("gru", 64, 128, gru), *((name, 512, 128, linear) for name in ("s5", "ffm", "recurrence"))]
    runs += [("gru", 512, 128, gru[:2])]
    result["runs"] = [dict(zip(("model", "length", "batch", "lines"), run)) | {"status": "finished"} for run in runs]
    ((header, rows),) = scan.tables_of(result | {"medians": scan.summarise(result["runs"])}, "scan_claims")
    assert header[1:] == ["published", "T", "B", "ours, eager", "ours, compiled"]
    assert [row[1:] for row in rows] == [
        ["over 5", "512", "128", "10.0", "10.0"],
        ["some 100", "512", "128", "10.0", "10.0"],
        ["175", "512", "128", "n/a", "n/a"],
        ["some 1,000", "512", "128", "6.00", "15.0"],
        ["4.21; 1.11", "64", "128", "5.00", "2.00"],
    ]


def test_the_readmes_tables(result, tmp_path):
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    for part in (*scan.PARTS, "scan_gains"):
        assert tables.TABLES[part](results) == "No results yet: `python benchmarks/scan.py` makes them."
    (results / "scan_cpu.json").write_text(json.dumps(result, default=str))
    result["settings"]["quick"] = True
    (results / "scan_quick.json").write_text(json.dumps(result | {"started": "3000"}, default=str))
    text = tables.TABLES["scan"](results)
    assert "| LRU | 4,096 | 4 | 200 | 20.0 | 9.90 | 30.0 |" in text and "| GRU | 4,096 | 4 | 500 | 123 |" in text
    assert "episodes begin in 1% of the steps" in text and "Without figures: compiled loop: is unrolled; " in text
    assert "(benchmarks/results/scan_cpu.json)" in text
    assert "| one GRU | forward+backward | 19.0 | 14.0 |" in tables.TABLES["scan_snippet"](results)
    (row,) = re.findall(r"^\| \d+ CPU cores \|.*$", tables.TABLES["scan_gains"](results), re.M)
    assert row.endswith("| 4,096 | 4 | compiled scan | 20.2 | n/a | n/a | 50.5 | n/a | 3.03 |")
    # One of the snippet alone has nothing for the other tables
    alone = speed.new_result("scan", scan.Args(), PROBE, "cpu") | {"started": "2999", "ended": "2999"}
    alone["runs"] = [run for run in result["runs"] if run["model"] == "vmap, shared"]
    alone["medians"] = scan.summarise(alone["runs"])
    (results / "scan_alone.json").write_text(json.dumps(alone, default=str))
    assert "19.0" in tables.TABLES["scan_snippet"](results) and "No results" in tables.TABLES["scan"](results)


def test_what_a_picture_shows(result, tmp_path, monkeypatch):
    """Native layers, too; and a second row where there are two lengths of one B · T, each size in its own row."""
    figures = []
    module = pytest.importorskip("matplotlib.figure")
    monkeypatch.setattr(module.Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    scan.plot(result, tmp_path / "plot.png")
    other = {"model": "lru", "length": 64, "batch": 1024, "status": "finished", "lines": [line("scan", 0.5)]}
    result["medians"] = scan.summarise([*result["runs"], other])
    scan.plot(result, tmp_path / "plot.png")
    one, two = (figure.axes for figure in figures)
    cells = "Whole cells, projections included"
    assert [axes.get_title("left") for axes in one] == ["The recurrence alone, B = 4", f"{cells}, B = 4"]
    titles = ["The recurrence alone, B · T = 65,536", f"{cells}, B · T = 65,536"]
    assert [axes.get_title("left") for axes in two[2:]] == titles
    shown = {drawn.get_label(): drawn.get_xydata().round(3).tolist() for drawn in two[1].lines}
    assert shown["GRU: native, no resets"] == [[4096, 123.4]] and shown["LRU: scan"] == [[64, 0.123], [4096, 20]]
    (drawn,) = two[3].lines
    assert drawn.get_label() == "LRU: scan" and drawn.get_xydata().tolist() == [[64, 500], [4096, 20]]


def test_a_picture_of_nothing_is_refused(result, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    scan.plot(result, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000
    result["medians"] = scan.find(result["medians"], model="vmap, shared")
    with pytest.raises(SystemExit) as error:
        scan.plot(result, tmp_path / "other.png")
    assert error.value.code == 2 and "has no model with a length" in capsys.readouterr().err
    assert not (tmp_path / "other.png").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "--batch-size 0: must be at least 1"),
        ({"steps": -1}, "--steps -1: must be at least 0"),
        ({"threads": 0}, "--threads 0: must be at least 1"),
        ({"lengths": (64, 1)}, "--lengths 1: must be at least 2"),
        ({"lengths": ()}, "--lengths: must be followed by at least one value"),
        ({"resets": (1.5,)}, "--resets 1.5: must lie in [0, 1]"),
        ({"arms": ("scan", "loop")}, "--arms loop: must be one of 'eager loop', "),
        ({"limit_seconds": float("nan")}, "--limit-seconds nan: must be above 0"),
        ({"plot": Path("/no/such/folder/x.png")}, "--plot /no/such/folder/x.png: must be a file in a folder"),
        ({"output": ROOT}, f"--output {ROOT}: must be a file that can be written"),
        ({"result": ROOT / "README.md"}, f"--result {ROOT / 'README.md'}: must be a result file of the kind scan"),
    ],
)
def test_bad_input(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(scan, "ask", lambda program: dict(PROBE))
    with pytest.raises(SystemExit) as error:
        scan.main(scan.Args(**arguments))
    lines = capsys.readouterr().err
    assert error.value.code == 2 and message in lines and lines.count("\n") == 1


# ---- On CUDA ----
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["recurrence", "lru", "gru"])
def test_arms_on_cuda(name, traced, monkeypatch):
    """Captured graphs, too, which are replayed with other resets."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # as in main: cuDNN's may be what all are held to
    lines = measured(scan_arms.Model(name, LENGTH, BATCH, SIZE, "cuda"), (0.3, 0.0))
    for (arm, *_), line in lines.items():
        if arm.startswith("captured"):
            assert line["status"] == "finished" and line["error"] < 1e-5, line
