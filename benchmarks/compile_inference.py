"""Measures what torch.compile gains when the policy acts: backend × mode × batch size, after RLlib's benchmark.

    python benchmarks/compile_inference.py                  batch sizes 1 to 1,024; some 15 minutes on a CPU
    python benchmarks/compile_inference.py --quick          three batch sizes, in less than 3 minutes
    python benchmarks/compile_inference.py --backend inductor --mode default max-autotune -bs 1 8 -n 600 --cpu
    python benchmarks/compile_inference.py --result RESULT.json --plot heat_map.png   draws what was measured before

What is measured is the exploration forward of PPO's Atari policy: from a batch of observations to logits, sampled
actions, their log-probabilities and the values. The metric is RLlib's, 1/t of a call (its median), and the speed-up
compiled / eager - 1. Each cell (backend, mode, batch size) is measured `--repeats` times, each time in a fresh process,
in which eager and compiled calls take turns, the first of them by turns, too; so do the cells. The speed-up is the
median of those of the processes, its interval the 95 % percentile bootstrap interval of that median; of fewer than 5
there is none.

A cell's first process finds an empty compiler cache, the others what it left there; the first call in each is the
compile time, on CUDA the first two, as the second captures the graph. What Inductor builds once a machine (on a CPU,
compiled headers and tests of the vector instructions) is built before. A process is forked from this program, which has
imported torch and done nothing with it, or begun anew for CUDA, which can't be forked. Cells that can't run are n/a,
with the reason. The result is a JSON file, written anew after each process.
"""

import contextlib
import math
import multiprocessing
import os
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

from intervals import bootstrap_interval
from speed import (
    PROBE,
    ask,
    check_output,
    check_plot,
    check_seconds,
    command_line,
    fail,
    finished,
    median,
    new_result,
    now,
    print_table,
    read_result,
    result_path,
    save,
    scrub,
    show,
    terminate_like_interrupt,
)

SIZES = {"compile_inference": "batch_size", "compile_exploration": "num_envs"}  # what a cell is the size of, by kind
FIGURES = {"compile_inference": "calls/s", "compile_exploration": "steps/s"}
BACKENDS = ("inductor", "cudagraphs", "aot_eager", "onnxrt", "ipex", "openvino")
LEAST_RUNS = 5  # processes that an interval needs
ABSENT = {  # what RLlib's table has besides what torch still has
    "onnxrt": "torch has taken this backend out",
    "ipex": "Intel has discontinued its extension of PyTorch",
    "openvino": "the plug-in is not installed (pip install openvino)",
}
# In a process of its own, as PROBE is
CHOICES = """
import json, torch
backends = torch._dynamo.list_backends(exclude_tags=())
print(json.dumps({"backends": backends, "modes": list(torch._inductor.list_mode_options())}))
"""


@dataclass
class CompileArgs:
    backend: tuple[str, ...] = BACKENDS
    """backends of torch.compile"""
    mode: tuple[str, ...] = ()
    """modes of torch.compile; by default default, reduce-overhead and max-autotune"""
    cpu: tyro.conf.FlagCreatePairsOff[bool] = False
    """measure on the CPU also where there is a CUDA device"""
    repeats: int = 5
    """fresh processes of each cell, at least 5"""
    threads: int | None = None
    """threads of torch on the CPU; as many as torch chooses if not given"""
    quick: tyro.conf.FlagCreatePairsOff[bool] = False
    """a short version: few sizes, inductor's default mode and what can't run"""
    timeout: float = 600.0
    """seconds after which a process is stopped and counts as failed"""
    output: Path | None = None
    """result file; by default runs/bench/KIND_DEVICE_DATE.json"""
    result: Path | None = None
    """a result file that is there already: nothing is measured, its table is printed, and drawn with --plot"""
    plot: Path | None = None
    """PNG file for a heat map of the speed-ups; needs matplotlib"""


@dataclass
class Args(CompileArgs):
    batch_size: Annotated[tuple[int, ...], tyro.conf.arg(aliases=["-bs"])] = tuple(2**n for n in range(11))
    """observations in a call"""
    num_iters: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 600
    """timed calls of each arm in a process"""
    burn_in: int = 100
    """calls of each arm before those"""
    seconds: float = 0.25
    """seconds of calls of each arm after which its burn-in ends early, and its timed calls once there are 5"""


# ---- In a process of its own ----
def in_turn(arms: Mapping[str, object], turn: int) -> dict[str, object]:
    """The arms, in reverse order in every second turn, so that none of them always follows the other."""
    return dict(list(arms.items())[:: -1 if turn % 2 else 1])


def measure(cell: Mapping[str, object]) -> dict:
    """Calls of the policy, eager and compiled in turns: calls/s, what compiling cost, and how far the logits differ."""
    import torch

    from acting import ACTIONS, FIRST_CALLS, atari, compilations, compiled, explore, now, take_turns

    torch.set_num_threads(cell["threads"])
    torch.manual_seed(cell["repeat"])
    device = cell["device"]
    network = atari.AtariActorCritic(ACTIONS).to(device)
    observation = torch.randint(256, (cell["batch_size"], *atari.FRAMES), dtype=torch.uint8, device=device)
    arms = in_turn({"eager": explore, "compiled": compiled(cell["backend"], cell["mode"])}, cell["repeat"])

    def seconds_of(act: Callable) -> float:
        started = now(device)
        act(network, observation)
        return now(device) - started

    with torch.no_grad():
        logits = arms["eager"](network, observation)[0]
        compile_seconds = sum(seconds_of(arms["compiled"]) for _ in range(FIRST_CALLS[device]))
        take_turns(seconds_of, arms, cell["burn_in"], cell["seconds"], least=1)
        difference = (arms["compiled"](network, observation)[0] - logits).abs().max().item()
        seconds = take_turns(seconds_of, arms, cell["num_iters"], cell["seconds"], least=5)
    rates = {name: statistics.median(1 / each for each in seconds[name]) for name in arms}
    return rates | {
        "speedup": rates["compiled"] / rates["eager"] - 1,
        "compile_seconds": compile_seconds,
        **compilations(),
        "max_logit_difference": difference,
        "iterations": len(seconds["eager"]),
    }


def compile_first(cell: Mapping[str, object]) -> dict:
    """Compiles a function of one line, and with it what Inductor builds once a machine."""
    import torch

    torch.compile(lambda x: x + 1)(torch.ones(8, device=cell["device"]))
    return {}


def end_with_parent() -> None:
    """Ends this process and what it has started once the one that started it is gone, however that came."""
    wait([multiprocessing.parent_process().sentinel])
    os.killpg(0, signal.SIGKILL)


def child(measure: Callable[[Mapping], dict], cell: Mapping[str, object], cache: Path, sender: Connection) -> None:
    """Sends what `measure` makes of the cell, with `cache` for the compiler's files; what it prints goes nowhere."""
    os.setsid()  # so that it can be ended together with the compilers that it starts
    threading.Thread(target=end_with_parent, daemon=True).start()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    # Inductor's compiled headers go to the folder for temporary files, which all cells share
    os.environ["TMPDIR"] = tempfile.tempdir = str(cache.parent)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    os.environ.pop("TRITON_CACHE_DIR", None)  # it is inside Inductor's then
    try:
        outcome = {"status": "finished", **measure(cell)}
    except Exception as error:  # a backend's may be of any kind
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        outcome = {"status": "failed", "reason": scrub(f"{type(error).__name__}: {lines[0] if lines else ''}")}
    sender.send(outcome)


# ---- Processes ----
def run_cell(measure: Callable[[Mapping], dict], cell: Mapping[str, object], cache: Path, timeout: float) -> dict:
    """What `measure` makes of the cell in a fresh process, with `status` finished or failed and the `reason`."""
    context = multiprocessing.get_context("spawn" if cell.get("device") == "cuda" else "fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=child, args=(measure, cell, cache, sender))
    load, started = os.getloadavg()[0], time.perf_counter()
    try:
        process.start()
        sender.close()
        if receiver.poll(timeout):
            outcome = receiver.recv()
        else:
            outcome = {"status": "failed", "reason": f"stopped after {timeout:.0f} s"}
    except EOFError:
        process.join()
        outcome = {"status": "failed", "reason": f"its process ended with exit status {process.exitcode}"}
    finally:
        if process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()  # should it not have a group yet
            process.join()
    seconds = round(time.perf_counter() - started, 2)
    return {"load_before": round(load, 2), "process_seconds": seconds, **outcome}


def why_not(backend: str, mode: str, device: str, registered: Sequence[str]) -> str | None:
    """Why torch.compile can't run with this backend and mode here; None if it can."""
    if backend not in registered:
        return ABSENT[backend]
    if mode != "default" and backend != "inductor":
        return "only inductor has modes"
    if backend == "cudagraphs" and device == "cpu":
        return "needs CUDA"
    if mode == "reduce-overhead" and device == "cpu":
        return "all that it adds to default is CUDA graphs"
    return None


def plan(args: CompileArgs, registered: Sequence[str], modes: Sequence[str]) -> list[tuple[str, str]]:
    """The (backend, mode) to measure; ends the program if one of their names is unknown."""
    chosen = args.mode or (("default",) if args.quick else ("default", "reduce-overhead", "max-autotune"))
    for flag, names, known in (("backend", args.backend, [*registered, *ABSENT]), ("mode", chosen, modes)):
        for name in names:
            if name not in known:
                fail(f"--{flag} {name}: must be one of {', '.join(dict.fromkeys(known))}")
    return [(backend, mode) for backend in dict.fromkeys(args.backend) for mode in dict.fromkeys(chosen)]


# ---- Medians ----
def median_interval(values: Sequence[float]) -> list[float] | None:
    """95 % percentile interval of the median; of 5 values that is from the least to the greatest, of fewer None."""
    if len(values) < LEAST_RUNS:
        return None
    return [round(float(end), 4) for end in bootstrap_interval(values, np.median)]


def summarise(runs: Sequence[Mapping], size: str) -> list[dict]:
    """One line a cell: medians over its processes, the largest of what should be 0, and why it has none."""
    lines = []
    for cell in dict.fromkeys((run["backend"], run["mode"], run[size]) for run in runs):
        names = dict(zip(("backend", "mode", size), cell))
        every = [run for run in runs if all(run[key] == names[key] for key in names)]
        own = finished(every)
        reasons = [run["reason"] for run in every if run["status"] != "finished"]
        failed = sum(run["status"] == "failed" for run in every)
        line = names | {"runs": len(own), "failed": failed, "reason": reasons[-1] if reasons else None}
        for key in ("eager", "compiled", "speedup"):
            line[key] = median([run[key] for run in own])
        line["interval"] = median_interval([run["speedup"] for run in own])
        for cache in ("cold", "warm"):
            seconds = [run["compile_seconds"] for run in own if run["cache"] == cache]
            line[f"compile_seconds_{cache}"] = median(seconds, 2)
        for key in ("recompiles", "graph_breaks", "max_logit_difference"):
            values = [run[key] for run in own if key in run]
            line[key] = np.max(values).item() if values else None  # Python's max would pass over a NaN
        lines.append(line)
    return lines


# ---- Table and picture ----
def percent(share: float | None) -> str:
    if share is None:
        return "n/a"
    points = round(100 * share)
    return f"{points:+d} %".replace("-", "−") if points else "0 %"


def spread(line: Mapping) -> str:
    """The interval of a cell's speed-up; of too few processes their number."""
    if line["interval"] is None:
        return f"{line['runs']} of {LEAST_RUNS} runs" if line["runs"] else ""
    return "{} to {}".format(*map(percent, line["interval"])).replace(" %", "", 1)


def by_backend_and_mode(lines: Sequence[Mapping]) -> dict[tuple[str, str], list[Mapping]]:
    """The lines of each (backend, mode), those that could run first; modes that can't for the same reason are one."""
    groups, merged = {}, {}
    for line in sorted(lines, key=lambda line: line["runs"] == 0):
        groups.setdefault((line["backend"], line["mode"]), []).append(line)
    for (backend, mode), group in groups.items():
        reasons = mode if any(line["runs"] for line in group) else frozenset(line["reason"] for line in group)
        merged.setdefault((backend, reasons), {})[mode] = group
    return {(backend, ", ".join(modes)): [*chain(*modes.values())] for (backend, _), modes in merged.items()}


def print_cells(result: Mapping) -> None:
    kind = result["kind"]
    size, unit = SIZES[kind], FIGURES[kind]
    rows = [
        ["backend", "mode", size.replace("_", " "), f"eager {unit}", f"compiled {unit}", "speed-up", "95 % interval"]
    ]
    rows[0] += ["compile s", "warm s", "recompiles", "breaks", "logits differ"]
    reasons = []
    for (backend, mode), lines in by_backend_and_mode(summarise(result["runs"], size)).items():
        if not any(line["runs"] for line in lines) and len({line["reason"] for line in lines}) == 1:
            sizes = f"{lines[0][size]:,}" + (f" to {lines[-1][size]:,}" if len(lines) > 1 else "")
            rows.append([backend, mode, sizes, "", "", "n/a", *[""] * 6])
            reasons.append(f"{backend} {mode} {sizes}: {lines[0]['reason']}")
            continue
        for line in lines:
            difference = line["max_logit_difference"]
            rows.append([backend, mode, f"{line[size]:,}", show(line["eager"], 1), show(line["compiled"], 1)])
            rows[-1] += [percent(line["speedup"]), spread(line)]
            rows[-1] += [show(line[f"compile_seconds_{cache}"], 1) for cache in ("cold", "warm")]
            rows[-1] += [show(line[key], 0) for key in ("recompiles", "graph_breaks")]
            rows[-1] += ["-" if difference is None else f"{difference:.1e}"]
            reasons += [f"{backend} {mode} {line[size]:,}: {line['reason']}"] * bool(line["reason"])
    print_table(rows)
    for reason in reasons:
        print(reason)


def heat_map(result: Mapping, output: Path) -> None:
    """Draws the speed-ups: a row a size, a column a backend with its mode; what could not run at all stands below."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        fail("--plot: needs matplotlib (pip install matplotlib)")
    size = SIZES[result["kind"]]
    groups = by_backend_and_mode(summarise(result["runs"], size))
    columns = {
        key: {line[size]: line for line in lines} for key, lines in groups.items() if any(x["runs"] for x in lines)
    }
    if not columns:
        fail("--plot: the result has no cell that could run")
    sizes = sorted({each for lines in columns.values() for each in lines})
    speedups = [[lines.get(each, {}).get("speedup") for lines in columns.values()] for each in sizes]
    ratios = [[math.nan if value is None else math.log2(1 + value) for value in row] for row in speedups]
    most = max(1.0, np.nanmax(np.abs(ratios)))  # symmetric, as twice as fast is as far from 1 as half as fast
    figure = Figure(figsize=(2.2 + 1.7 * max(2, len(columns)), 2.2 + 0.62 * len(sizes)), layout="constrained")
    axes = figure.subplots()
    axes.set_facecolor("#dddddd")
    image = axes.imshow(np.ma.masked_invalid(ratios), cmap="RdBu", vmin=-most, vmax=most, aspect="auto")
    for row, each in enumerate(sizes):
        for column, lines in enumerate(columns.values()):
            line = lines.get(each, {"speedup": None, "interval": None, "runs": 0})
            colour = "white" if abs(ratios[row][column]) > 0.6 * most else "black"
            axes.text(column, row - 0.12, percent(line["speedup"]), ha="center", va="center", color=colour, fontsize=14)
            text = spread(line)
            axes.text(column, row + 0.28, text, ha="center", va="center", color=colour, fontsize=9.5)
    axes.set_xticks(range(len(columns)), [f"{backend}\n{mode}" for backend, mode in columns], fontsize=12)
    axes.set_yticks(range(len(sizes)), [f"{each:,}" for each in sizes], fontsize=12)
    axes.set_ylabel({"batch_size": "batch size", "num_envs": "environments"}[size], fontsize=12)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    what = {"batch_size": "acting", "num_envs": "a rollout"}[size]
    axes.set_title(f"Speed-up of {what} by torch.compile\nover eager, and 95 % interval", fontsize=13, loc="left")
    bar = figure.colorbar(image, ax=axes, fraction=0.05, pad=0.03)
    ticks = [ratio for ratio in (0.25, 0.5, 0.75, 1, 1.5, 2, 4, 8) if abs(math.log2(ratio)) <= most]
    bar.set_ticks([math.log2(ratio) for ratio in ticks], labels=[percent(ratio - 1) for ratio in ticks], fontsize=10)
    missing = {}
    for backend, mode in groups:
        if (backend, mode) not in columns:
            missing.setdefault((backend, groups[backend, mode][0]["reason"]), []).append(mode)
    about = result["hardware"]
    every = Counter(backend for backend, _ in groups)
    notes = [
        f"n/a: {backend}{'' if len(modes) == every[backend] else ' ' + ', '.join(modes)}: {reason}"
        for (backend, reason), modes in missing.items()
    ]
    host = about["gpu"] if result["device"] == "cuda" else f"{about['cpu']}, {about['torch_threads']} threads"
    notes.append(f"{host}; torch {result['versions']['torch']}")
    figure.supxlabel("\n".join(notes), fontsize=8.5, x=0.02, ha="left")
    figure.savefig(output, dpi=150, metadata={"Software": None})
    print(f"heat map: {scrub(str(output))}")


# ---- The benchmark ----
def check_args(args: CompileArgs) -> None:
    for name, least in (("repeats", LEAST_RUNS), ("threads", 1), ("burn_in", 0), ("num_iters", 1)):
        value = getattr(args, name)
        if value is not None and value < least:
            fail(f"--{name.replace('_', '-')} {value}: must be at least {least}")
    check_seconds(args, "timeout", "seconds")
    for name in ("backend", *SIZES.values()):
        if getattr(args, name, None) == ():
            fail(f"--{name.replace('_', '-')}: must be followed by at least one value")
    for name in SIZES.values():
        for value in getattr(args, name, ()):
            if value < 1:
                fail(f"--{name.replace('_', '-')} {value}: must be at least 1")
    check_plot(args.plot)


@contextlib.contextmanager
def until_stopped(result: dict, output: Path, finish: Callable[[], None]) -> Iterator[None]:
    """Calls `finish`, which writes and prints the result, at the end, also of a benchmark that is stopped."""
    try:
        yield
        result["ended"] = now()
    finally:
        if result["runs"]:
            finish()
            print(f"{'all' if result['ended'] else 'stopped; what there is so far'}: {scrub(str(output))}", flush=True)


def measure_cells(
    pairs: Sequence[tuple[str, str]],
    sizes: Sequence[int],
    settings: Mapping[str, object],
    result: dict,
    output: Path,
    measure: Callable[[Mapping], dict],
    registered: Sequence[str],
    repeats: int,
    timeout: float,
) -> None:
    """Measures every (backend, mode) at every size, turn by turn, into `result["runs"]`.

    A cell that has failed is not measured again.
    """
    size, unit = SIZES[result["kind"]], FIGURES[result["kind"]]
    cells = [{"backend": backend, "mode": mode, size: each} for each in sizes for backend, mode in pairs]
    for cell in cells:
        if reason := why_not(cell["backend"], cell["mode"], result["device"], registered):
            result["runs"].append(cell | {"repeat": 1, "status": "n/a", "reason": reason})
    over = [{key: run[key] for key in cells[0]} for run in result["runs"]]
    with tempfile.TemporaryDirectory() as folder:
        first = Path(folder, "first")
        first.mkdir()
        if any(cell["backend"] == "inductor" and cell not in over for cell in cells):
            outcome = run_cell(compile_first, {"device": result["device"]}, first, timeout)
            result["first_compilation"] = outcome
            print(f"what Inductor builds once a machine: {outcome['process_seconds']:.0f} s", flush=True)
        for repeat in range(1, repeats + 1):
            for number, cell in enumerate(cells):
                if cell in over:
                    continue
                cache = Path(folder, str(number))
                if repeat == 1:
                    shutil.copytree(first, cache)
                print(f"{repeat} of {repeats}: {cell['backend']} {cell['mode']} {cell[size]:,}: ", end="", flush=True)
                own = {"repeat": repeat, "device": result["device"], **settings}
                outcome = run_cell(measure, cell | own, cache, timeout)
                outcome = {"cache": "cold" if repeat == 1 else "warm", "threads": settings["threads"], **outcome}
                result["runs"].append(cell | {"repeat": repeat} | outcome)
                save(result, output, summarise(result["runs"], size))
                if outcome["status"] == "failed":
                    over.append(cell)
                    print(f"failed: {outcome['reason']}", flush=True)
                    continue
                rates = f"{show(outcome['eager'], 1)} eager, {show(outcome['compiled'], 1)} compiled {unit}"
                print(f"{rates}, {percent(outcome['speedup'])} ({outcome['process_seconds']:.0f} s)", flush=True)


def import_acting():
    """The module, imported only before it is needed, and before processes are forked, so that they have it."""
    try:
        import acting
    except ImportError as error:
        fail(f"{error}: needs requirements/requirements-envpool.txt")
    return acting


def run(args: CompileArgs, kind: str, sizes: Sequence[int], measure: Callable[[Mapping], dict], **settings) -> None:
    """The whole program, which is the same for acting alone and for rollouts."""
    terminate_like_interrupt()
    check_args(args)
    if args.result:
        result, failed = read_result("--result", args.result, kind), False
        print_cells(result)
    else:
        probe, choices = ask(PROBE), ask(CHOICES)
        device = "cuda" if probe["gpu"] and not args.cpu else "cpu"
        probe["threads"] = args.threads or probe["threads"]
        pairs = plan(args, choices["backends"], choices["modes"])
        output, result = args.output or result_path(kind, device, probe), new_result(kind, args, probe, device)
        check_output(output, kind)
        import_acting()
        sizes = list(dict.fromkeys(sizes))
        result["settings"] = {k: v for k, v in result["settings"].items() if k not in ("plot", "result")} | settings
        result["settings"] |= {SIZES[kind]: sizes, "mode": list(dict.fromkeys(mode for _, mode in pairs))}
        settings["threads"] = probe["threads"]

        def finish() -> None:
            save(result, output, summarise(result["runs"], SIZES[kind]))
            print()
            print_cells(result)

        with until_stopped(result, output, finish):
            common = (measure, choices["backends"], args.repeats, args.timeout)
            measure_cells(pairs, sizes, settings, result, output, *common)
        failed = any(run["status"] == "failed" for run in result["runs"])
    if args.plot:
        heat_map(result, args.plot)
    if failed:
        sys.exit(1)


def main(args: Args) -> None:
    sizes = (1, 16, 256) if args.quick and args.batch_size == Args.batch_size else args.batch_size
    common = {"num_iters": args.num_iters, "burn_in": args.burn_in, "seconds": args.seconds}
    run(args, "compile_inference", sizes, measure, **common)


if __name__ == "__main__":
    try:
        main(command_line(Args, __doc__))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
