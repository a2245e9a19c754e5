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
import eager_tips  # noqa: E402
import speed  # noqa: E402
import tables  # noqa: E402

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
    *made_up_runs("item", [2.0, 2.5, 3.0, 1.5, 4.0]),
    *made_up_runs("eval", [1.2, 1.1, 1.3, 0.9, 1.4]),
    *made_up_runs("inplace", [0.5, 0.6, 0.7, 0.8, 0.9]),
    *made_up_runs("attribute", [1.0, 1.1, 1.2, 1.3, 1.4]),
]


# ---- The snippets ----
@pytest.mark.parametrize("name", eager_tips.TIPS)
def test_both_of_a_pair_do_the_same(name, monkeypatch, keep_threads):
    tip = eager_tips.TIPS[name]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "pinned" and device == "cpu":
        pytest.skip("pinning needs CUDA")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    left = []
    for text in (tip.slow, tip.fast):
        snippet = eager_tips.Snippet(tip, text, device)
        snippet.seconds(calls=2)
        left.append(snippet.namespace[tip.same])
    assert left[0].shape == left[1].shape and left[0].numel() > 1 and left[0].ne(0).any()
    assert torch.allclose(*left, atol=1e-6)
    assert tip.slow != tip.fast and all(text.count("# timed\n") == 1 for text in (tip.slow, tip.fast))


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
    outcome = eager_tips.measure({"tip": "x", "device": "cpu", "seconds": 0.3})
    assert calls[:2] == ["s begins", "f begins"] and "".join(calls[2:5]) == "sfs"
    assert outcome["calls"] == 4  # 4 × 5.1 ms are a block of at least 20 ms
    assert (outcome["slow"], outcome["fast"]) == pytest.approx((0.0153, 0.0051))
    assert outcome["ratio"] == pytest.approx(3) and outcome["blocks"] == 8  # of 82 ms a turn, in 0.6 s
    assert "".join(calls).endswith(2 * "ssssffff")


# ---- Verdicts ----
def test_verdicts():
    lines = {line["tip"]: line for line in eager_tips.summarise(RUNS)}
    assert (lines["item"]["ratio"], lines["item"]["interval"], lines["item"]["holds"]) == (2.5, [1.5, 4.0], True)
    cells = {name: eager_tips.cells_of(line) for name, line in lines.items()}
    assert cells["item"][1:] == ["25.0", "10.0", "2.50", "1.50 to 4.00", "holds"]
    assert cells["eval"][-1] == "does not hold here", "its interval includes 1"
    assert cells["attribute"][-1] == "does not hold here", "its interval begins at 1"
    assert cells["inplace"][-1] == "does not hold here, the opposite does"
    assert cells["pinned"][-1] == "n/a: needs CUDA" and cells["pinned"][1:5] == [""] * 4


def test_what_a_cpu_cannot_measure():
    needs = {name for name in eager_tips.TIPS if eager_tips.why_not(eager_tips.TIPS[name], "cpu", 2)}
    assert needs == {"device", "pinned"}
    assert eager_tips.why_not(eager_tips.TIPS["pinned"], "cuda", 2) is None
    assert eager_tips.why_not(eager_tips.TIPS["threads"], "cpu", 1) == "needs more than 1 thread"


# ---- The program ----
def test_a_measurement_from_end_to_end(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(eager_tips, "ask", lambda program: PROBE)
    broken = eager_tips.Tip("breaks", slow="# timed\n1 / 0\n", fast="# timed\n", same="")
    monkeypatch.setitem(eager_tips.TIPS, "broken", broken)
    output = tmp_path / "tips.json"
    with pytest.raises(SystemExit) as error:
        eager_tips.main(eager_tips.Args(tips=("broken", "device", "attribute"), seconds=0.01, output=output))
    assert error.value.code == 1, "one failed"
    result = json.loads(output.read_text())
    assert [(run["tip"], run["repeat"], run["status"]) for run in result["runs"]] == [
        ("device", 1, "n/a"),
        ("broken", 1, "failed"),
        *(("attribute", repeat, "finished") for repeat in range(1, 6)),
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
        ({"seconds": 0.0}, "--seconds 0.0: must be above 0"),
        ({"output": Path("no", "folder.json")}, "--output no/folder.json: must be a file in a folder that exists"),
    ],
)
def test_bad_input(arguments, message, capsys):
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
    assert "|  |  |  |  | n/a: needs CUDA |" in text and "Medians of 5 processes" in text
    tables.main(tables.Args(check=True, readme=readme, results=results))
    result["runs"] = RUNS[:-1]
    (results / "eager_tips_cpu.json").write_text(json.dumps(result, default=str))
    with pytest.raises(SystemExit) as error:
        tables.main(tables.Args(check=True, readme=readme, results=results))
    assert error.value.code not in (0, None, 2)
