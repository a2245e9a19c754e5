"""Measures what a parallel scan over time gains over loops, native layers, padding and JAX: TorchRL's issue 2325.

    python benchmarks/scan.py                         64 to 65,536 steps; some 55 minutes on 2 cores
    python benchmarks/scan.py --quick                 two lengths, in about 2 minutes
    python benchmarks/scan.py --models recurrence lru --lengths 4096
    python benchmarks/scan.py --forms eager           the scan in each of its forms, or --forms compiled
    python benchmarks/scan.py --claims                what is to stand beside figures that others have published
    python benchmarks/scan.py --result RESULT.json --plot scan.png   draws what was measured before

The bare recurrence h[t] = a[t] · h[t-1] + b[t] and whole cells, projections included, as leanrl/ppo_memory.py has them;
forward with the gradients of everything (inputs, states, parameters), over the lengths T at a fixed batch B and at a
fixed B · T; and at every second length and the fixed B forward alone. Episodes begin at random in 1, 0 and 10 % of the
steps.

A size of a model is measured in a fresh process, on a CPU forked from this one, which has imported torch and done
nothing with it. Its compilers have been started, and find in their caches no more than what Inductor builds once a
machine. There all arms take turns, every second turn in reverse order, and each figure is the
median of at least 3 calls, before which what the arm yields was compared with a loop in float64; of calls that take
more than a second there is only this one. An arm whose call takes longer than --limit-seconds is n/a; so is what needs
CUDA or JAX.

eager loop                   a loop over time of the cell's `step`: for GRU and LSTM of nn.GRUCell and nn.LSTMCell
eager loop, recurrence only  the same of a linear cell, with its projections of all steps taken at once
compiled loop                the eager loop, compiled, 64 steps of the recurrence or 16 of a cell, unrolled, at a time
captured ...                 the eager loop, or the compiled scan, in a CUDA graph
native                       nn.GRU and nn.LSTM, which know no resets
native, padded               the same, on episodes split at resets and padded to the longest
native between resets        PyTorch's own loops, as leanrl/ppo_memory.py runs them where they are faster
compiled operator            what leanrl/ppo_memory_torchcompile.py does: the loop as an operator, which forwards is
                             PyTorch's own for an LSTM on a CPU where resets are few
scan, compiled scan          what the scripts do with linear recurrences
scan, FORM                   with --forms: the same as a loop, in chunks of 4, 8, 16 or 32 rows, by doubling
JAX scan                     jax.lax.associative_scan, jitted with its derivative

JAX is optional (requirements/requirements-jax.txt). Torch has --threads; on Linux the process may use as many cores, by
which JAX, too, chooses its number. Peak memory is what a call adds to the process (to CUDA's allocations, on a GPU);
JAX's is by its compiler: temporary memory and outputs. The result is a JSON file, written anew after each process.
"""

import itertools
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from compile_inference import compile_first, run_cell, until_stopped
from speed import (
    PROBE,
    ask,
    check_output,
    check_plot,
    check_seconds,
    command_line,
    fail,
    new_result,
    print_table,
    read_result,
    result_path,
    save,
    scrub,
    show,
    terminate_like_interrupt,
)

Name = Literal["recurrence", "lru", "mingru", "s5", "ffm", "gru", "lstm", "vmap"]
LINEAR, GATED = ("recurrence", "lru", "mingru", "s5", "ffm"), ("gru", "lstm")
SNIPPET = ("vmap, shared", "vmap, stacked")
TITLES = {"recurrence": "recurrence", "lru": "LRU", "mingru": "minGRU", "s5": "S5", "ffm": "FFM"}
TITLES |= {"gru": "GRU", "lstm": "LSTM", "vmap, shared": "one GRU", "vmap, stacked": "three GRUs"}
PASSES = ("forward", "forward+backward")
ARMS = (
    *("eager loop", "eager loop, recurrence only", "compiled loop", "captured loop"),
    *("native", "native, padded", "native between resets", "compiled operator"),
    *("scan", "compiled scan", "captured scan", "JAX scan"),
)
FORMS = ("loop", "chunks of 4", "chunks of 8", "chunks of 16", "chunks of 32", "doubling")
FORM_ARMS = {
    kind: tuple(f"{arm}{form}" for form in ("", *(f", {form}" for form in FORMS)))
    for kind, arm in (("eager", "scan"), ("compiled", "compiled scan"))
}
PUBLISHED = {"eager loop": 5.48e-3, "compiled loop": 0.86e-3}  # seconds in TorchRL's issue 2325, on an H100
CLAIMS = (  # A as B: a title; how many times as long B's authors have A take; T; and of ours, which model as which
    ("an RNN as S5, in RL (Lu et al. 2023): GRU's loop as S5's scan", "over 5", 512, "gru", "s5"),
    ("an RNN as FFM, in training (Morad et al. 2023): GRU's loop as FFM's scan", "some 100", 512, "gru", "ffm"),
    ("GRU as minGRU, T = 512 (Feng et al. 2024): GRU's loop as minGRU's scan", "175", 512, "gru", "mingru"),
    (
        "GAE by a loop as by a scan (Morad et al. 2024): the eager loop as the scan",
        "some 1,000",
        512,
        *["recurrence"] * 2,
    ),
    (
        "GRU with resets, 11.2 and compiled 2.96 ms, as native with padding, 2.66 ms; T = 64, B = 128 (TorchRL)",
        *("4.21; 1.11", 64, "gru", "padded"),
    ),
)
PARTS = {  # tables, by the names that they have in the README
    "scan": "forward and backward",
    "scan_forward": "forward",
    "scan_ratios": "how many times faster the LRU's scan is, forward and backward",
    "scan_resets": "forward and backward, by resets",
    "scan_costs": "compilation and peak memory, forward and backward",
    "scan_claims": "what is published, and ours",
    "scan_forms": "forms of the scan, forward and backward",
    "scan_snippet": "TorchRL's issue 2325: V = 3, B = 4, 32 → 200, T = 10",
}
COLOURS = {
    "eager loop": "#d55e00",
    "eager loop, recurrence only": "#e69f00",
    "compiled loop": "#7f7f7f",
    "captured loop": "#000000",
    "native": "#b5a642",
    "native, padded": "#8c564b",
    "native between resets": "#8c564b",
    "compiled operator": "#56b4e9",
    "scan": "#009e73",
    "compiled scan": "#0072b2",
    "captured scan": "#000000",
    "JAX scan": "#cc79a7",
}


@dataclass
class Args:
    models: tuple[Name, ...] = ("recurrence", "lru", "mingru", "gru", "lstm", "vmap")
    """what to measure, S5 and FFM only if named; vmap is the snippet of the issue, which has its own size"""
    lengths: tuple[int, ...] = (64, 256, 1024, 4096, 16384, 65536)
    """steps T"""
    batch_size: int = 4
    """sequences B side by side"""
    steps: int = 65536
    """B · T of the second series; 0: no second series"""
    size: int = 64
    """width of inputs, states and outputs"""
    resets: tuple[float, ...] = (0.01, 0.0, 0.1)
    """shares of the steps at which an episode begins"""
    passes: tuple[Literal["forward", "forward+backward"], ...] = PASSES
    """what to time"""
    arms: tuple[str, ...] = ARMS
    """what to compare, of those above"""
    seconds: float = 0.15
    """seconds of calls that an arm has at each share of resets"""
    limit_seconds: float = 5.0
    """seconds that a call of an arm may take"""
    threads: int | None = None
    """threads of torch on the CPU; as many as torch chooses if not given"""
    cpu: tyro.conf.FlagCreatePairsOff[bool] = False
    """measure on the CPU also where there is a CUDA device"""
    quick: tyro.conf.FlagCreatePairsOff[bool] = False
    """a short version: two lengths, three models, 1 % of resets, forward with backward only, no compiled loop"""
    forms: Literal["eager", "compiled"] | None = None
    """the scan in each of its forms on a CPU, with 1 % of resets, forward with backward only"""
    claims: tyro.conf.FlagCreatePairsOff[bool] = False
    """what is to stand beside published figures: T of 64 and 512, B = 128 and B · T = 2,048, 1 % of resets"""
    timeout: float = 1200.0
    """seconds after which a process is stopped and counts as failed"""
    output: Path | None = None
    """result file; by default runs/bench/scan_DEVICE_DATE.json"""
    result: Path | None = None
    """a result file that is there already: nothing is measured, its tables are printed, and drawn with --plot"""
    plot: Path | None = None
    """PNG file for time against length, both logarithmic; needs matplotlib"""


# ---- In a process of its own ----
def measure(cell: Mapping[str, object]) -> dict:
    """The lines of a size of a model, and the threads of torch."""
    device, name, threads = cell["device"], cell["model"], cell["threads"]
    if device == "cpu" and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    import torch

    import scan_arms

    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)  # as in the scripts
    torch.backends.cudnn.allow_tf32 = False
    if name in SNIPPET:
        model, shares = scan_arms.Ensemble(device, is_stacked=name == "vmap, stacked"), (0.0,)
    else:
        model, shares = scan_arms.Model(name, cell["length"], cell["batch"], cell["size"], device), cell["resets"]
    limits = (cell["limit_seconds"], cell["seconds"])
    return {"lines": scan_arms.measure(model, shares, cell["passes"], cell["arms"], *limits)}


# ---- Lines ----
def summarise(runs: Sequence[Mapping]) -> list[dict]:
    """One line for each size of a model, pass, share of resets and arm; of a failed process one with its reason."""
    lines = []
    for run in runs:
        about = {key: run[key] for key in ("model", "length", "batch")}
        if run["status"] == "finished":
            lines += [about | line for line in run["lines"]]
        else:
            lines.append(about | {"arm": None, "status": run["status"], "reason": run["reason"]})
    return lines


def has_failed(result: Mapping) -> bool:
    return any(line["status"] == "failed" for line in result["medians"])


def digits(value: float) -> str:
    """With three digits, of which at most three after the point."""
    return show(value, next((count for count, least in enumerate((100, 10, 1)) if value >= least), 3))


def milliseconds(seconds: float) -> str:
    return digits(seconds * 1e3)


def megabytes(count: int | None) -> str:
    return "-" if count is None else show(count / 1e6, 0 if count >= 1e7 else 1)


def find(lines: Sequence[Mapping], **what) -> list[Mapping]:
    return [line for line in lines if all(line.get(key) == value for key, value in what.items())]


def sizes_of(lines: Sequence[Mapping], models: Sequence[str]) -> list[tuple[str, int, int]]:
    """The (model, length, batch) measured, model by model, those of the batch that most lengths have first."""
    found = dict.fromkeys((line["model"], line["length"], line["batch"]) for line in lines if line["model"] in models)
    counts = {batch: len({length for _, length, other in found if other == batch}) for _, _, batch in found}
    usual = max(counts, key=counts.get, default=0)
    return sorted(found, key=lambda key: (models.index(key[0]), key[2] != usual, key[1]))


def is_shown(line: Mapping, share: float) -> bool:
    """Whether a line stands in the tables of this share of resets; native, which knows none, stands in all."""
    return line.get("resets") == (0 if line["arm"] == "native" else share)


def cell_of(line: Mapping | None) -> str:
    if line is None:
        return ""
    return milliseconds(line["seconds"]) if line["status"] == "finished" else line["status"]


# ---- Tables: each a header and rows, or None if the result has nothing for it ----
Table = tuple[list[str], list[list[str]]]


def text_columns(header: Sequence[str]) -> int:
    """How many columns of a table are words, which stand left."""
    return 2 if header[1] in ("arm", "pass") else 0 if header[0] == "T" else 1


def main_share(lines: Sequence[Mapping]) -> float | None:
    """The share of resets that most tables are of: the first that was measured."""
    return next((line["resets"] for line in lines if line["arm"] and line["model"] not in SNIPPET), None)


def time_table(lines: Sequence[Mapping], models: Sequence[str], name: str) -> Table | None:
    """Milliseconds of each arm that has any, by model and size, at the main share of resets."""
    share = main_share(lines)
    own = [line for line in lines if line["model"] in models and line.get("pass") == name and is_shown(line, share)]
    arms = [arm for arm in ARMS if find(own, arm=arm, status="finished")]
    rows = []
    for model, length, batch in sizes_of(own, models):
        by_arm = {line["arm"]: line for line in find(own, model=model, length=length, batch=batch)}
        rows.append([TITLES[model], f"{length:,}", f"{batch:,}", *(cell_of(by_arm.get(arm)) for arm in arms)])
    return (["model", "T", "B", *(f"{arm}, ms" for arm in arms)], rows) if arms else None


def reset_table(lines: Sequence[Mapping]) -> Table | None:
    """Forward and backward at each share of resets, at the usual batch and the length that is nearest to 4,096."""
    shares = sorted({line["resets"] for line in lines if line["arm"] and line["model"] not in SNIPPET})
    sizes = sizes_of(lines, LINEAR + GATED)
    if len(shares) < 2 or not sizes:
        return None
    length = min((length for _, length, _ in sizes), key=lambda length: abs(length - 4096))
    batch = next(batch for _, steps, batch in sizes if steps == length)
    own = find(lines, length=length, batch=batch, **{"pass": PASSES[1]})
    rows = []
    for model in dict.fromkeys(model for model, *_ in sizes):
        for arm in ARMS:
            by_share = {line["resets"]: line for line in find(own, model=model, arm=arm)}
            if any(line["status"] == "finished" for line in by_share.values()):
                rows.append([TITLES[model], arm, *(cell_of(by_share.get(share)) for share in shares)])
    header = [f"T = {length:,}, B = {batch}", "arm", *(f"{share:.0%} resets, ms" for share in shares)]
    return (header, rows) if rows else None


def cost_table(lines: Sequence[Mapping], models: Sequence[str]) -> Table | None:
    """Seconds to compile, and peak memory, of forward and backward."""
    share = main_share(lines)
    own = [line for line in lines if line["model"] in models and line.get("pass") == PASSES[1]]
    own = [line for line in own if is_shown(line, share) and line["status"] == "finished"]
    arms = [arm for arm in ARMS if find(own, arm=arm)]
    compiled = [arm for arm in arms if "compile_seconds" in find(own, arm=arm)[0]]
    rows = []
    for model, length, batch in sizes_of(own, models):
        by_arm = {line["arm"]: line for line in find(own, model=model, length=length, batch=batch)}
        rows.append([TITLES[model], f"{length:,}", f"{batch:,}"])
        rows[-1] += [show(by_arm[arm]["compile_seconds"], 1) if arm in by_arm else "" for arm in compiled]
        rows[-1] += [megabytes(by_arm[arm]["peak_bytes"]) if arm in by_arm else "" for arm in arms]
    header = ["model", "T", "B", *(f"{arm}: compile, s" for arm in compiled), *(f"{arm}, MB" for arm in arms)]
    return (header, rows) if rows else None


def ratio_table(lines: Sequence[Mapping]) -> Table | None:
    """How many times faster the LRU's scan is, forward and backward, than what it is to be compared with."""
    share = main_share(lines)
    own = [line for line in lines if line.get("pass") == PASSES[1] and is_shown(line, share)]
    seconds = {
        (line["model"], line["length"], line["batch"], line["arm"]): line["seconds"]
        for line in find(own, status="finished")
    }
    slower = {"its loop": ("lru", "eager loop"), "its loop, recurrence only": ("lru", "eager loop, recurrence only")}
    slower |= {"its loop, compiled": ("lru", "compiled loop")}
    slower |= {"a GRUCell loop": ("gru", "eager loop"), "native GRU, padded": ("gru", "native, padded")}
    slower |= {"JAX": ("lru", "JAX scan")}
    rows = []
    for model, length, batch in sizes_of(lines, LINEAR):
        for arm in ("scan", "compiled scan", "captured scan"):
            if model == "lru" and (ours := seconds.get((model, length, batch, arm))):
                others = [seconds.get((other, length, batch, theirs)) for other, theirs in slower.values()]
                ratios = ["n/a" if other is None else digits(other / ours) for other in others]
                rows.append([f"{length:,}", f"{batch:,}", arm, *ratios])
    return (["T", "B", "LRU", *(f"× {title}" for title in slower)], rows) if rows else None


def form_table(lines: Sequence[Mapping]) -> Table | None:
    """Milliseconds of the scan in each form, forward and backward, beside that of what the scripts choose."""
    own = [line for line in lines if line.get("pass") == PASSES[1] and line["resets"] == main_share(lines)]
    arms = [arm for arm in ("scan", "compiled scan") if any((line["arm"] or "").startswith(f"{arm}, ") for line in own)]
    if not arms:
        return None
    forms, rows = [form for form in FORMS if find(own, arm=f"{arms[0]}, {form}", status="finished")], []
    for model, length, batch in sizes_of(own, LINEAR):
        by_arm = {line["arm"]: line for line in find(own, model=model, length=length, batch=batch)}
        names = [arms[0], *(f"{arms[0]}, {form}" for form in forms)]
        rows.append([TITLES[model], f"{length:,}", f"{batch:,}", *(cell_of(by_arm.get(name)) for name in names)])
    return ["model", "T", "B", f"{arms[0]}, as chosen, ms", *(f"{form}, ms" for form in forms)], rows


def claim_table(lines: Sequence[Mapping]) -> Table | None:
    """What others have published, each on hardware and at sizes of its own, beside ratios of ours, if all are there."""
    own = find(lines, status="finished", resets=main_share(lines), **{"pass": PASSES[1]})
    seconds = {(line["model"], line["length"], line["batch"], line["arm"]): line["seconds"] for line in own}
    if not {"gru", "s5", "ffm"} <= {model for model, *_ in seconds}:
        return None
    rows = []
    for claim, published, length, slower, faster in CLAIMS:
        for batch in sorted({key[2] for key in seconds if key[1] == length}, reverse=True):
            ratios = []
            loops = ("eager loop", "compiled operator" if slower == "gru" else "eager loop")
            for loop, scan in zip(loops, ("scan", "compiled scan"), strict=True):
                other = ("gru", "native, padded") if faster == "padded" else (faster, scan)
                pair = [seconds.get((model, length, batch, arm)) for model, arm in ((slower, loop), other)]
                ratios.append("n/a" if None in pair else digits(pair[0] / pair[1]))
            rows.append([claim, published, f"{length:,}", f"{batch:,}", *ratios])
    return (["takes … times as long", "published", "T", "B", "ours, eager", "ours, compiled"], rows)


def snippet_table(lines: Sequence[Mapping]) -> Table | None:
    """The snippet of the issue, with what was published of it."""
    own = [line for line in lines if line["model"] in SNIPPET and line["arm"]]
    arms = [arm for arm in ARMS if find(own, arm=arm, status="finished")]
    rows = []
    for model, *_ in sizes_of(own, SNIPPET):
        for name in PASSES:
            by_arm = {line["arm"]: line for line in find(own, model=model, **{"pass": name})}
            if by_arm:
                rows.append([TITLES[model], name, *(cell_of(by_arm.get(arm)) for arm in arms)])
    published = [milliseconds(PUBLISHED[arm]) if arm in PUBLISHED else "" for arm in arms]
    rows.append([f"{TITLES[SNIPPET[0]]}, published, on an H100", PASSES[1], *published])
    return (["GRU cells under vmap", "pass", *(f"{arm}, ms" for arm in arms)], rows) if arms else None


def tables_of(result: Mapping, part: str) -> list[Table]:
    """The tables of one of PARTS, as far as the result has lines for them."""
    lines = result["medians"]
    if part in ("scan", "scan_forward"):
        name = PASSES[part == "scan"]
        tables = [time_table(lines, LINEAR, name), time_table(lines, GATED, name)]
    elif part == "scan_costs":
        tables = [cost_table(lines, LINEAR), cost_table(lines, GATED)]
    else:
        by_part = {"scan_ratios": ratio_table, "scan_resets": reset_table, "scan_snippet": snippet_table}
        tables = [(by_part | {"scan_forms": form_table, "scan_claims": claim_table})[part](lines)]
    return [table for table in tables if table]


def notes_of(result: Mapping) -> list[str]:
    """Why cells of the tables are empty or n/a: each reason once, with the arms that it is of."""
    reasons = {}
    for line in result["medians"]:
        if line["status"] != "finished":
            is_slow = line["status"] == "n/a" and line["reason"].startswith("a call")
            about = f"{TITLES[line['model']]}, T = {line['length']:,}, B = {line['batch']:,}"
            limit = f"a call takes longer than {result['settings']['limit_seconds']:g} s"
            reasons.setdefault(limit if is_slow else line["reason"], {})[line["arm"] or about] = None
    return [f"{', '.join(arms)}: {reason}" for reason, arms in reasons.items()]


def print_result(result: Mapping) -> None:
    for part, title in PARTS.items():
        for header, rows in tables_of(result, part):
            print(f"{title}:")
            print_table([header, *rows], left=text_columns(header))
            print()
    for note in notes_of(result):
        print(note)


def caption(result: Mapping, part: str) -> str:
    """What the figures of a part are, in a sentence."""
    share, text = main_share(result["medians"]), f"{PARTS[part][0].upper()}{PARTS[part][1:]}: medians"
    if part == "scan_costs":
        text = "Seconds to compile once the compiler runs, and what a call adds to the process at its peak (of JAX its"
        text += " compiler's figure: temporary memory and outputs)"
    if part != "scan_snippet":
        text += f", width {result['settings']['size']}"
        text += "" if part == "scan_resets" else f", episodes begin in {share:.0%} of the steps (of native in none)"
    has_jax = find(result["medians"], arm="JAX scan", status="finished")
    return text + (f", JAX {result['versions']['jax']}." if has_jax else ".")


# ---- Picture ----
CURVES = {  # of whole cells
    "lru": (
        *("eager loop", "eager loop, recurrence only", "compiled loop"),
        *("scan", "compiled scan", "captured scan", "JAX scan"),
    ),
    "mingru": ("compiled scan",),
    "gru": ("eager loop", "native", "native, padded", "compiled operator"),
    "lstm": ("eager loop", "native", "native, padded"),
}
STYLES = {"recurrence": "o-", "lru": "o-", "mingru": "v:", "gru": "s--", "lstm": "^-."}


def plot(result: Mapping, output: Path) -> None:
    """Draws time against length, forward with backward: the recurrence and cells at one B, and cells at one B · T."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        fail("--plot: needs matplotlib (pip install matplotlib)")
    lines = [line for line in result["medians"] if line.get("pass") == PASSES[1] and line["status"] == "finished"]
    share, sizes = main_share(lines), sizes_of(lines, LINEAR + GATED)
    if not sizes:
        fail("--plot: the result has no model with a length, forward and backward")
    batch, steps = sizes[0][2], result["settings"]["steps"]
    lines = [line for line in lines if is_shown(line, share) and line["model"] not in SNIPPET]
    second = [line for line in lines if line["length"] * line["batch"] == steps]
    rows = [(f"B = {batch}", find(lines, batch=batch)), (f"B · T = {steps:,}", second)]
    rows = rows[: 2 if len({line["length"] for line in second}) > 1 else 1]
    columns = [("The recurrence alone", {"recurrence": ARMS}), ("Whole cells, projections included", CURVES)]
    figure = Figure(figsize=(12, 2 + 5 * len(rows)), layout="constrained")
    panels = figure.subplots(len(rows), len(columns), squeeze=False)
    for axes, ((size, own), (name, curves)) in zip(panels.flat, itertools.product(rows, columns), strict=True):
        for model, arms in curves.items():
            for arm in arms:
                points = sorted((line["length"], line["seconds"] * 1e3) for line in find(own, model=model, arm=arm))
                if points:
                    label = f"{arm}, no resets" if arm == "native" else arm
                    label = label if model == "recurrence" else f"{TITLES[model]}: {label}"
                    look = {"color": COLOURS[arm], "linewidth": 1.8, "markersize": 5}
                    axes.plot(*zip(*points), STYLES[model], label=label, **look)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        lengths = sorted({line["length"] for line in own})
        axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
        axes.set_title(f"{name}, {size}", loc="left")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        axes.set_xlabel("steps T")
        axes.set_ylabel("forward and backward, ms")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, linewidth=0.6)
        if axes.lines and own is rows[-1][1]:
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2, frameon=False, fontsize=9)
    about = result["hardware"]
    threads = f"{about['torch_threads']} thread{'s' * (about['torch_threads'] > 1)}"
    host = about["gpu"] if result["device"] == "cuda" else f"{about['cpu']}, {threads}"
    note = f"Width {result['settings']['size']}, episodes begin in {share:.0%} of the steps; {host}; "
    figure.suptitle(f"{note}torch {result['versions']['torch']}", fontsize=10, x=0.01, ha="left")
    figure.savefig(output, dpi=150, metadata={"Software": None})
    print(f"time against length: {scrub(str(output))}")


# ---- The benchmark ----
def check_args(args: Args) -> None:
    for name, least in (("batch_size", 1), ("steps", 0), ("size", 1), ("threads", 1)):
        value = getattr(args, name)
        if value is not None and value < least:
            fail(f"--{name.replace('_', '-')} {value}: must be at least {least}")
    check_seconds(args, "seconds", "limit_seconds", "timeout")
    for name in args.arms:
        if name not in ARMS:
            fail(f"--arms {name}: must be one of {', '.join(map(repr, ARMS))}")
    if len(short := [f"--{name}" for name in ("forms", "claims", "quick") if getattr(args, name)]) > 1:
        fail(f"{' '.join(short)}: only one of them")
    for name in ("models", "lengths", "resets", "passes", "arms"):
        if not getattr(args, name):
            fail(f"--{name}: must be followed by at least one value")
    for length in args.lengths:
        if length < 2:
            fail(f"--lengths {length}: must be at least 2")
    for share in args.resets:
        if not 0 <= share <= 1:
            fail(f"--resets {share}: must lie in [0, 1]")
    check_plot(args.plot)


def plan(args: Args) -> list[dict]:
    """Models and their sizes, length by length, so that the models of a length are measured within a short time."""
    lengths, passes = sorted(set(args.lengths)), [name for name in PASSES if name in args.passes]
    sizes = {(length, args.batch_size): passes if i % 2 == 0 else passes[-1:] for i, length in enumerate(lengths)}
    for length in lengths:
        if args.steps and args.steps % length == 0:
            sizes.setdefault((length, args.steps // length), passes[-1:])
    names = [name for name in dict.fromkeys(args.models) if name != "vmap"]
    cells = [
        {"model": name, "length": length, "batch": batch, "passes": own}
        for (length, batch), own in sizes.items()
        for name in names
    ]
    snippets = SNIPPET if "vmap" in args.models else ()
    return cells + [{"model": name, "length": 10, "batch": 4, "passes": passes} for name in snippets]


def measure_all(args: Args, cells: Sequence[Mapping], result: dict, output: Path, threads: int) -> None:
    """Measures each cell in a process of its own, into `result["runs"]`."""
    settings = {name: getattr(args, name) for name in ("size", "arms", "seconds", "limit_seconds")}
    settings |= {"device": result["device"], "threads": threads, "resets": list(dict.fromkeys(args.resets))}
    with tempfile.TemporaryDirectory() as folder:
        first = Path(folder, "first")
        first.mkdir()
        if any(arm.startswith("compiled") for arm in args.arms):
            result["first_compilation"] = run_cell(compile_first, settings, first, args.timeout)
        for number, cell in enumerate(cells, 1):
            cache = Path(folder, str(number))
            shutil.copytree(first, cache)
            size = f"{TITLES[cell['model']]}, T = {cell['length']:,}, B = {cell['batch']:,}"
            print(f"{number} of {len(cells)}: {size}: ", end="", flush=True)
            outcome = run_cell(measure, settings | cell, cache, args.timeout)
            shutil.rmtree(cache)
            result["runs"].append(dict(cell) | {"threads": threads} | outcome)
            save(result, output, summarise(result["runs"]))
            lines = outcome.get("lines", [])
            if failed := [line for line in lines if line["status"] == "failed"]:
                print(f"{failed[0]['arm']} failed: {failed[0]['reason']}; ", end="")
            if outcome["status"] == "failed":
                print(f"failed: {outcome['reason']}", flush=True)
                continue
            last = [x for x in lines if (x["pass"], x["resets"]) == (cell["passes"][-1], lines[0]["resets"])]
            figures = [f"{x['arm']} {milliseconds(x['seconds'])}" for x in last if x["status"] == "finished"]
            print(f"{', '.join(figures)} ms ({outcome['process_seconds']:.0f} s)", flush=True)


def main(args: Args) -> None:
    terminate_like_interrupt()
    check_args(args)
    if args.result:
        result = read_result("--result", args.result, "scan")
        print_result(result)
    else:
        short = {}
        if args.forms:
            short = {"models": ("recurrence", "lru"), "lengths": (64, 256, 1024, 4096, 16384)}
            if args.forms == "compiled":  # each takes 10 to 30 s to compile
                short = {"models": ("recurrence",), "lengths": (64, 1024)}
            short |= {"resets": (0.01,), "arms": FORM_ARMS[args.forms]}
        elif args.claims:
            short = {"models": ("recurrence", "gru", "mingru", "s5", "ffm"), "lengths": (64, 512), "batch_size": 128}
            short |= {"steps": 2048, "resets": (0.01,)}
            short |= {"arms": ("eager loop", "native, padded", "compiled operator", "scan", "compiled scan")}
        elif args.quick:
            short = {"models": ("recurrence", "lru", "gru"), "lengths": (64, 1024), "steps": 0, "resets": (0.01,)}
            short |= {"arms": tuple(arm for arm in ARMS if arm != "compiled loop")}
        for name, value in (short | {"passes": PASSES[1:]} if short else {}).items():
            if getattr(args, name) == getattr(Args, name):
                setattr(args, name, value)
        probe = ask(PROBE)
        device = "cuda" if probe["gpu"] and not args.cpu else "cpu"
        probe["threads"] = args.threads or probe["threads"]
        output, result = args.output or result_path("scan", device, probe), new_result("scan", args, probe, device)
        check_output(output, "scan")
        result["settings"] = {key: value for key, value in result["settings"].items() if key not in ("plot", "result")}
        import scan_arms  # noqa: F401  before processes are forked, so that they have it

        def finish() -> None:
            save(result, output, summarise(result["runs"]))
            print()
            print_result(result)

        with until_stopped(result, output, finish):
            measure_all(args, plan(args), result, output, probe["threads"])
    if args.plot:
        plot(result, args.plot)
    if not args.result and has_failed(result):
        sys.exit(1)


if __name__ == "__main__":
    try:
        main(command_line(Args, __doc__))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
