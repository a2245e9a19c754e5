"""benchmarks/eager_tips.py: pairs that do the same, turns, verdicts and the table."""

import functools
import json
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "benchmarks"))

import acting  # noqa: E402
import compile_inference  # noqa: E402
import eager_tips  # noqa: E402
import speed  # noqa: E402
import tables  # noqa: E402

ON_CUDA = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"))
PROBE = {"torch": "2.13.0", "threads": 2, "gpu": None}


@pytest.fixture
def keep_threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def made_up_runs(tip: str, ratios: list[float]) -> list[dict]:
    return [
        {"tip": tip, "repeat": n, "status": "finished", "slow": ratio * 1e-5, "fast": 1e-5, "ratio": ratio}
        for n, ratio in enumerate(ratios, 1)
    ]


RUNS = [
    {"tip": "pinned", "repeat": 1, "status": "n/a", "reason": "needs CUDA"},
    *made_up_runs("control", [0.8, 0.9, 1.02, 1.1, 1.2]),
    *made_up_runs("item", [2.0, 2.5, 3.0, 1.5, 4.0]),
    *made_up_runs("eval", [1.2, 1.1, 1.3, 0.9, 1.4]),
    *made_up_runs("inplace", [0.5, 0.6, 0.7, 0.75, 0.79]),
    *made_up_runs("attribute", [1.2, 1.3, 1.4, 1.5, 1.6]),
    *made_up_runs("threads", [0.8, 0.7, 0.6, 0.5, 0.4]),
]


# ---- The snippets ----
@pytest.mark.parametrize(
    ("name", "device"),
    [
        pytest.param(name, device, marks=ON_CUDA if device == "cuda" else ())
        for name, tip in eager_tips.TIPS.items()
        for device in ("cpu", "cuda")
        if (tip.needs, device) != ("CUDA", "cpu")
    ],
)
def test_both_of_a_pair_do_the_same(name, device, monkeypatch, keep_threads):
    tip = eager_tips.TIPS[name]
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    left = []
    for text in (tip.slow, tip.fast):
        snippet = eager_tips.Snippet(tip, text, device)
        assert snippet.seconds(calls=2) > 0
        left.append(snippet.function.gi_frame.f_locals[tip.same])
        assert text.count("# timed\n") == 1
    assert left[0].shape == left[1].shape and left[0].numel() > 1 and left[0].ne(0).any()
    assert torch.allclose(*left, atol=1e-6 if device == "cpu" else 2e-3)  # CUDA's convolutions are in TF32
    assert (tip.slow == tip.fast) is (name == "control")


@pytest.mark.parametrize("name", [pytest.param(name, marks=ON_CUDA) for name in ("pinned_buffer", "control")])
def test_a_measurement_on_cuda(name, tmp_path):
    cell = {"tip": name, "device": "cuda", "seconds": 0.01, "repeat": 1}
    outcome = compile_inference.run_cell(eager_tips.measure, cell, tmp_path / "cache", 120.0)
    assert outcome["status"] == "finished" and outcome["ratio"] > 0, outcome


def test_the_broken_graph_is_broken_in_three(monkeypatch):
    """A break inside a loop would leave the whole function uncompiled."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    tip, graphs = eager_tips.TIPS["fullgraph"], []
    for text in (tip.slow, tip.fast):
        before = acting.compilations()["graphs"]
        eager_tips.Snippet(tip, text, "cpu").seconds(calls=1)
        graphs.append(acting.compilations()["graphs"] - before)
    assert graphs == [3, 1]


def test_show_prints_every_pair(capsys):
    eager_tips.main(eager_tips.Args(show=True))
    shown = capsys.readouterr().out
    for tip in eager_tips.TIPS.values():
        for text in (tip.title, tip.setup, tip.slow, tip.fast):
            assert text in shown


def test_snippets_take_turns_in_blocks(monkeypatch):
    """What is above the line is done once; calls of the quicker one fill a block, and both get as many."""
    calls = []
    monkeypatch.setitem(sys.modules, "notes", type(sys)("notes"))
    sys.modules["notes"].calls = calls
    clock = [0.0]
    monkeypatch.setattr(eager_tips.time, "perf_counter", lambda: clock[0])
    sys.modules["notes"].clock = clock
    text = "calls.append('{0} begins')\n# timed\ncalls.append('{0}')\nclock[0] += {1}\n"
    tip = eager_tips.Tip("", setup="from notes import calls, clock\n", slow=text.format("s", 0.0153),
                         fast=text.format("f", 0.0051), same="")  # fmt: skip
    monkeypatch.setitem(eager_tips.TIPS, "x", tip)
    outcome = eager_tips.measure({"tip": "x", "device": "cpu", "seconds": 0.3, "repeat": 2})
    assert calls[:2] == ["s begins", "f begins"] and "".join(calls[2:5]) == "sfs"
    assert outcome["calls"] == 4  # 4 × 5.1 ms are a block of at least 20 ms
    assert (outcome["slow"], outcome["fast"]) == pytest.approx((0.0153, 0.0051))
    assert outcome["ratio"] == pytest.approx(3) and outcome["blocks"] == 8  # of 82 ms a turn, in 0.6 s
    assert "".join(calls).endswith(2 * "ssssffffffffssss"), "neither always follows the other"
    calls.clear()
    eager_tips.measure({"tip": "x", "device": "cpu", "seconds": 0.3, "repeat": 3})
    assert calls[:2] == ["f begins", "s begins"] and "".join(calls).endswith(2 * "ffffssssssssffff")


def test_names_are_local_variables():
    """As in the scripts' functions; those of a module cost more to look up."""
    tip = eager_tips.TIPS["attribute"]
    for text, names in ((tip.slow, {"args", "rewards"}), (tip.fast, {"gamma", "gae_lambda", "rewards"})):
        code = eager_tips.Snippet(tip, text, "cpu").function.gi_code
        assert names <= {*code.co_varnames} and not {*code.co_cellvars}


# ---- Verdicts ----
def test_verdicts():
    lines = {line["tip"]: line for line in eager_tips.summarise(RUNS)}
    assert (lines["item"]["ratio"], lines["item"]["interval"], lines["item"]["holds"]) == (2.5, [1.5, 4.0], True)
    assert list(lines)[-1] == "control" and (lines["control"]["interval"], lines["control"]["holds"]) == (
        [0.8, 1.2],
        None,
    )
    cells = {name: eager_tips.cells_of(line) for name, line in lines.items()}
    assert cells["item"][1:] == ["25.0", "10.0", "2.50", "1.50 to 4.00", "holds"]
    assert cells["eval"][-1] == "does not hold here", "its interval includes 1"
    assert cells["attribute"][-1] == "does not hold here", "its interval is above 1, but begins within the control's"
    assert cells["inplace"][-1] == "does not hold here, the opposite does"
    assert cells["threads"][-1] == "does not hold here", "as 0.8 is 1 / 1.25"
    assert cells["control"][3:] == ["1.02", "0.80 to 1.20", "control"]
    assert cells["pinned"][-1] == "n/a: needs CUDA" and cells["pinned"][1:5] == [""] * 4


def test_too_few_runs_say_nothing():
    """Neither of their tip nor, where they are the control's, of any."""
    for tip in ("item", "control"):
        runs = [run for run in RUNS if run["tip"] != tip or run["repeat"] <= 3]
        lines = {line["tip"]: line for line in eager_tips.summarise(runs)}
        assert lines[tip]["interval"] is lines["item"]["holds"] is None
        assert eager_tips.cells_of(lines[tip])[4] == "3 of 5 runs"
        assert eager_tips.cells_of(lines["item"])[-1] == "undecided"
        assert lines["eval"]["holds"] is (None if tip == "control" else False)
    assert "no tip is said to hold" in eager_tips.note_of(runs) and "× 1.25" in eager_tips.note_of(RUNS)


def test_what_a_cpu_cannot_measure():
    needs = {name for name in eager_tips.TIPS if eager_tips.why_not(eager_tips.TIPS[name], "cpu", 2)}
    assert needs == {"device", "pinned", "pinned_buffer"}
    assert eager_tips.why_not(eager_tips.TIPS["pinned"], "cuda", 2) is None
    assert eager_tips.why_not(eager_tips.TIPS["threads"], "cpu", 1) == "needs more than 1 thread"


# ---- The program ----
def test_a_measurement_from_end_to_end(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(eager_tips, "ask", lambda program: PROBE)
    broken = eager_tips.Tip("breaks", slow="# timed\n1 / 0\n", fast="# timed\npass\n", same="")
    monkeypatch.setitem(eager_tips.TIPS, "broken", broken)
    output = tmp_path / "tips.json"
    with pytest.raises(SystemExit) as error:
        eager_tips.main(eager_tips.Args(tips=("broken", "device", "attribute"), seconds=0.01, output=output))
    assert error.value.code == 1, "one failed"
    result = json.loads(output.read_text())
    assert [(run["tip"], run["repeat"], run["status"]) for run in result["runs"]] == [
        ("device", 1, "n/a"),
        ("broken", 1, "failed"),
        *((tip, repeat, "finished") for repeat in range(1, 6) for tip in ("attribute", "control")),
    ]
    assert result["ended"] and {line["tip"]: line["runs"] for line in result["medians"]}["attribute"] == 5
    text = capsys.readouterr().out
    assert "n/a: needs CUDA" in text and "n/a: ZeroDivisionError: division by zero" in text
    assert str(tmp_path) not in output.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tips": ("item", "itm")}, "--tips itm: must be one of device, pinned, item"),
        ({"repeats": 4}, "--repeats 4: must be at least 5"),
        ({"seconds": 0.0}, "--seconds 0: must be above 0"),
        ({"tips": ()}, "--tips: must be followed by at least one tip"),
        ({"output": ROOT}, f"--output {ROOT}: must be a file that can be written"),
        ({"output": Path(__file__)}, "is there already"),
    ],
)
def test_bad_input(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(eager_tips, "ask", lambda program: PROBE)
    with pytest.raises(SystemExit) as error:
        eager_tips.main(eager_tips.Args(**arguments))
    lines = capsys.readouterr().err
    assert error.value.code == 2 and message in lines and lines.count("\n") == 1


def test_the_table_and_its_staleness(tmp_path):
    results, readme = tmp_path / "benchmarks" / "results", tmp_path / "README.md"
    results.mkdir(parents=True)
    readme.write_text("<!-- table:eager_tips -->\n<!-- /table:eager_tips -->\n")
    result = speed.new_result("eager_tips", eager_tips.Args(), PROBE, "cpu") | {"runs": RUNS}
    (results / "eager_tips_cpu.json").write_text(json.dumps(result, default=str))
    tables.main(tables.Args(readme=readme, results=results))
    text = readme.read_text()
    assert "| no `.item()` between operations | 25.0 | 10.0 | 2.50 | 1.50 to 4.00 | holds |" in text
    assert "|  |  |  |  | n/a: needs CUDA |" in text and "Medians of 5 processes. The same snippet twice" in text
    tables.main(tables.Args(check=True, readme=readme, results=results))
    result["runs"] = RUNS[:-1]
    (results / "eager_tips_cpu.json").write_text(json.dumps(result, default=str))
    with pytest.raises(SystemExit) as error:
        tables.main(tables.Args(check=True, readme=readme, results=results))
    assert error.value.code not in (0, None, 2)
