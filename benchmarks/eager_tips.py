"""Measures advice for fast eager code instead of believing it: each tip as two snippets that do the same.

    python benchmarks/eager_tips.py                       every tip; some 3 minutes on a CPU
    python benchmarks/eager_tips.py --show                prints the pairs of snippets
    python benchmarks/eager_tips.py --tips item pinned    some of them

The first six tips are LeanRL's, the others this project's. A tip is measured `--repeats` times, each time in a fresh
process, in which the two snippets take turns, the first of them by turns, too; what stands above the line `# timed` is
done once and not timed, and the names of both parts are local variables, as in the scripts. The ratio is the median
over the processes, its interval the 95 % percentile bootstrap interval of that median; of fewer than 5 there is none.

The control, which is always measured, is a pair of the same snippets, whose ratio would be 1 if nothing else counted.
The end of its interval that is farther from 1 (as a factor) is what this benchmark can't tell from 1: a tip holds on
this device if its whole interval is above that, and the opposite holds if it is below the inverse.

The result is a JSON file, written anew after each process.
"""

import itertools
import signal
import statistics
import sys
import tempfile
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from compile_inference import LEAST_RUNS, in_turn, median_interval, run_cell, until_stopped
from speed import (
    PROBE,
    ask,
    check_output,
    check_seconds,
    command_line,
    fail,
    finished,
    median,
    new_result,
    print_table,
    result_path,
    save,
    terminate_like_interrupt,
)

MLP = "nn.Sequential(nn.Linear(17, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 6)).to(device)"
CALL = "# timed\nlogits = network(observation)\n"
BLOCK = 0.02  # seconds that a block of calls takes at least, so that the clock's own time does not count


@dataclass(frozen=True)
class Tip:
    title: str
    """the advice"""
    slow: str
    """what it advises against; above a line `# timed` what is done once, below it what is timed"""
    fast: str
    """what it advises"""
    same: str
    """name of the tensor in which both leave the same"""
    setup: str = ""
    """what both begin with"""
    needs: str | None = None
    """what the device must have: CUDA or threads"""


def snippet(text: str) -> str:
    return textwrap.dedent(text).strip() + "\n"


TIPS = {
    "device": Tip(
        "create tensors on the device, not with `.to(device)`",
        needs="CUDA",
        slow="# timed\nmask = torch.ones(256, 17).to(device)\n",
        fast="# timed\nmask = torch.ones(256, 17, device=device)\n",
        same="mask",
    ),
    "pinned": Tip(
        "no `.pin_memory()` before a transfer",
        needs="CUDA",
        setup="batch = torch.ones(256, 4, 84, 84, dtype=torch.uint8)\n",
        slow="# timed\nobservation = batch.pin_memory().to(device, non_blocking=True)\n",
        fast="# timed\nobservation = batch.to(device)\n",
        same="observation",
    ),
    "item": Tip(
        "no `.item()` between operations",
        setup=f"network = {MLP}.requires_grad_(False)\nobservation = torch.ones(256, 17, device=device)\n",
        slow=snippet("""
            # timed
            losses = []
            for _ in range(8):
                losses.append(network(observation).square().mean().item())
            logged = torch.tensor(losses)
        """),
        fast=snippet("""
            # timed
            losses = []
            for _ in range(8):
                losses.append(network(observation).square().mean())
            logged = torch.stack(losses).cpu()
        """),
        same="logged",
    ),
    "eval": Tip(
        "no `eval()` and `train()` around each call",
        setup=f"network = {MLP}.requires_grad_(False)\nobservation = torch.ones(8, 17, device=device)\n",
        slow="# timed\nnetwork.eval()\nlogits = network(observation)\nnetwork.train()\n",
        fast=CALL,
        same="logits",
    ),
    "attribute": Tip(
        "settings in variables, not `args.name` in the loop",
        setup=snippet("""
            from types import SimpleNamespace
            args = SimpleNamespace(gamma=0.99, gae_lambda=0.95)
            rewards = torch.ones(128, 8, device=device)
        """),
        slow=snippet("""
            # timed
            advantage = rewards[0]
            for reward in rewards:
                advantage = reward + args.gamma * args.gae_lambda * advantage
        """),
        fast=snippet("""
            gamma, gae_lambda = args.gamma, args.gae_lambda
            # timed
            advantage = rewards[0]
            for reward in rewards:
                advantage = reward + gamma * gae_lambda * advantage
        """),
        same="advantage",
    ),
    "inplace": Tip(
        "plain operations, not in-place ones",
        setup="values = torch.ones(256, 256, device=device)\n",
        slow="# timed\nvalues.mul_(0.5).add_(1.0)\n",
        fast="# timed\nvalues = values * 0.5 + 1.0\n",
        same="values",
    ),
    "pinned_buffer": Tip(
        "transfer from a pinned buffer that is made once",
        needs="CUDA",
        setup="batch = torch.ones(256, 4, 84, 84, dtype=torch.uint8)\n",
        slow="# timed\nobservation = batch.to(device)\n",
        fast=snippet("""
            buffer, is_read = torch.empty_like(batch, pin_memory=True), torch.cuda.Event()
            # timed
            is_read.synchronize()  # the transfer before must be over
            buffer.copy_(batch)
            observation = buffer.to(device, non_blocking=True)
            is_read.record()
        """),
        same="observation",
    ),
    "fullgraph": Tip(
        "one full graph, not a broken one",
        setup=snippet(f"""
            network = {MLP}.requires_grad_(False)
            first, second, third = network[:2], network[2:4], network[4:]
            observation = torch.ones(8, 17, device=device)
        """),
        slow=snippet("""
            @torch.compile
            def act(observation):
                hidden = first(observation)
                torch._dynamo.graph_break()  # as by a print or a library that can't be traced
                hidden = second(hidden)
                torch._dynamo.graph_break()
                return third(hidden)
            act(observation)
            # timed
            logits = act(observation)
        """),
        fast=snippet("""
            @torch.compile(fullgraph=True)
            def act(observation):
                return third(second(first(observation)))
            act(observation)
            # timed
            logits = act(observation)
        """),
        same="logits",
    ),
    "cpp_wrapper": Tip(
        "`cpp_wrapper`: compiled code that is called from C++",
        setup=f"network = {MLP}.requires_grad_(False)\nobservation = torch.ones(8, 17, device=device)\n",
        slow="act = torch.compile(network)\nact(observation)\n# timed\nlogits = act(observation)\n",
        fast=snippet("""
            act = torch.compile(network, options={"cpp_wrapper": True})
            act(observation)
            # timed
            logits = act(observation)
        """),
        same="logits",
    ),
    "threads": Tip(
        "one thread for a small network on the CPU",
        needs="threads",
        setup=snippet(f"""
            threads = torch.get_num_threads()
            network = {MLP}.cpu().requires_grad_(False)
            observation = torch.ones(8, 17)
        """),
        slow=snippet("""
            # timed
            torch.set_num_threads(threads)
            for _ in range(100):
                logits = network(observation)
        """),
        fast=snippet("""
            # timed
            torch.set_num_threads(1)
            for _ in range(100):
                logits = network(observation)
        """),
        same="logits",
    ),
    "channels_last": Tip(
        "images with the channels last for convolutions",
        setup=snippet("""
            network = nn.Sequential(
                nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Conv2d(64, 64, 3)
            ).to(device).requires_grad_(False)
            images = torch.ones(32, 4, 84, 84, device=device)
        """),
        slow="# timed\nfeatures = network(images)\n",
        fast=snippet("""
            network.to(memory_format=torch.channels_last)
            images = images.contiguous(memory_format=torch.channels_last)
            # timed
            features = network(images)
        """),
        same="features",
    ),
    "fused_adam": Tip(
        "`Adam(fused=True)`",
        setup=snippet(f"""
            network = {MLP}
            network(torch.ones(8, 17, device=device)).sum().backward()
        """),
        slow=snippet("""
            optimizer = torch.optim.Adam(network.parameters())
            # timed
            optimizer.step()
            weight = network[0].weight
        """),
        fast=snippet("""
            optimizer = torch.optim.Adam(network.parameters(), fused=True)
            # timed
            optimizer.step()
            weight = network[0].weight
        """),
        same="weight",
    ),
    "control": Tip(
        "control: the same snippet twice",
        setup=f"network = {MLP}.requires_grad_(False)\nobservation = torch.ones(8, 17, device=device)\n",
        slow=CALL,
        fast=CALL,
        same="logits",
    ),
}
# A snippet's names are local variables of a function, which is sent numbers of calls and yields their seconds
FUNCTION = """
import torch
from torch import nn

def snippet(device, synchronize, perf_counter, seconds=None):
    torch.manual_seed(0)
{before}
    while True:
        number_of_calls = yield seconds
        synchronize()
        started = perf_counter()
        for _ in range(number_of_calls):
{timed}
        synchronize()
        seconds = perf_counter() - started
"""


@dataclass
class Args:
    tips: tuple[str, ...] = tuple(TIPS)
    """tips to measure, besides the control"""
    show: tyro.conf.FlagCreatePairsOff[bool] = False
    """print the pairs of snippets instead"""
    cpu: tyro.conf.FlagCreatePairsOff[bool] = False
    """measure on the CPU also where there is a CUDA device"""
    repeats: int = 5
    """fresh processes of each tip, at least 5"""
    seconds: float = 0.5
    """seconds of each snippet in a process"""
    timeout: float = 300.0
    """seconds after which a process is stopped and counts as failed"""
    output: Path | None = None
    """result file; by default runs/bench/eager_tips_DEVICE_DATE.json"""


# ---- In a process of its own ----
class Snippet:
    """A snippet in a function of its own, with what is not timed done."""

    def __init__(self, tip: Tip, text: str, device: str):
        before, timed = text.split("# timed\n")
        namespace = {}
        parts = {"before": textwrap.indent(tip.setup + before, 4 * " "), "timed": textwrap.indent(timed, 12 * " ")}
        exec(FUNCTION.format(**parts), namespace)
        synchronize = namespace["torch"].cuda.synchronize if device == "cuda" else lambda: None
        self.function = namespace["snippet"](device, synchronize, time.perf_counter)
        next(self.function)

    def seconds(self, calls: int) -> float:
        """Seconds that so many calls take, until the device has done their work."""
        return self.function.send(calls)


def measure(cell: Mapping[str, object]) -> dict:
    """Seconds of a call of each snippet, which take turns in blocks; medians of the blocks."""
    tip = TIPS[cell["tip"]]
    texts = in_turn({"slow": tip.slow, "fast": tip.fast}, cell["repeat"])
    pair = {name: Snippet(tip, text, cell["device"]) for name, text in texts.items()}
    calls = 1
    while min(each.seconds(calls) for each in pair.values()) < BLOCK:
        calls *= 2
    blocks, end = {name: [] for name in pair}, time.perf_counter() + 2 * cell["seconds"]
    for turn in itertools.count():
        if turn >= 5 and time.perf_counter() >= end:
            break
        for name, each in in_turn(pair, turn).items():
            blocks[name].append(each.seconds(calls) / calls)
    medians = {name: statistics.median(blocks[name]) for name in blocks}
    return medians | {"ratio": medians["slow"] / medians["fast"], "calls": calls, "blocks": len(blocks["fast"])}


# ---- Medians ----
def resolution(runs: Sequence[Mapping]) -> float | None:
    """The least ratio that can be told from 1, as the control says; None without one."""
    interval = median_interval([run["ratio"] for run in finished(runs, tip="control")])
    return interval and max(interval[1], round(1 / interval[0], 4))


def summarise(runs: Sequence[Mapping]) -> list[dict]:
    """One line a tip: medians of seconds and ratio over its processes, and whether it holds on this device.

    Which is None for the control, which comes last, and where either of them has no interval.
    """
    lines, least = [], resolution(runs)
    for name in sorted(dict.fromkeys(run["tip"] for run in runs), key="control".__eq__):
        every = [run for run in runs if run["tip"] == name]
        own = finished(every)
        reasons = [run["reason"] for run in every if run["status"] != "finished"]
        line = {"tip": name, "title": TIPS[name].title, "runs": len(own), "reason": reasons[-1] if reasons else None}
        line |= {key: median([run[key] for run in own], 9) for key in ("slow", "fast")}
        ratios = [run["ratio"] for run in own]
        line |= {"ratio": median(ratios), "interval": median_interval(ratios), "holds": None, "opposite_holds": None}
        if line["interval"] and least and name != "control":
            low, high = line["interval"]
            line |= {"holds": low > least, "opposite_holds": high < 1 / least}
        lines.append(line)
    return lines


def cells_of(line: Mapping) -> list[str]:
    """A line in words: title, µs of both snippets, ratio, interval, and what is to be said of it."""
    if line["ratio"] is None:
        return [line["title"], "", "", "", "", f"n/a: {line['reason']}"]
    verdict = "holds" if line["holds"] else "does not hold here"
    if line["opposite_holds"]:
        verdict += ", the opposite does"
    elif line["holds"] is None:
        verdict = "control" if line["tip"] == "control" else "undecided"
    times = [f"{1e6 * line[key]:,.1f}" for key in ("slow", "fast")]
    interval = f"{line['runs']} of {LEAST_RUNS} runs"
    if line["interval"]:
        interval = "{:.2f} to {:.2f}".format(*line["interval"])
    return [line["title"], *times, f"{line['ratio']:.2f}", interval, verdict]


def note_of(runs: Sequence[Mapping]) -> str:
    """What the control says, and when a tip holds."""
    if (least := resolution(runs)) is None:
        return "Without an interval of the control no tip is said to hold."
    rule = f"a tip holds if its whole interval is above that, its opposite if it is below {1 / least:.2f}."
    return f"The same snippet twice, the control, differs by up to × {least:.2f}: {rule}"


HEADER = ["tip", "without, µs", "with, µs", "× as fast", "95 % interval", "here"]


# ---- The benchmark ----
def why_not(tip: Tip, device: str, threads: int) -> str | None:
    """Why the tip can't be measured here; None if it can."""
    if tip.needs == "CUDA" and device != "cuda":
        return "needs CUDA"
    if tip.needs == "threads" and threads == 1:
        return "needs more than 1 thread"
    return None


def show_pairs(names: Sequence[str]) -> None:
    for name in names:
        tip = TIPS[name]
        print(f"#### {name}: {tip.title}\n{tip.setup}\n# -- without\n{tip.slow}\n# -- with\n{tip.fast}")


def main(args: Args) -> None:
    terminate_like_interrupt()
    for name in args.tips:
        if name not in TIPS:
            fail(f"--tips {name}: must be one of {', '.join(TIPS)}")
    if not args.tips:
        fail("--tips: must be followed by at least one tip")
    if args.show:
        return show_pairs(args.tips)
    if args.repeats < LEAST_RUNS:
        fail(f"--repeats {args.repeats}: must be at least {LEAST_RUNS}")
    check_seconds(args, "seconds", "timeout")
    probe = ask(PROBE)
    device = "cuda" if probe["gpu"] and not args.cpu else "cpu"
    output = args.output or result_path("eager_tips", device, probe)
    check_output(output, "eager_tips")
    result = new_result("eager_tips", args, probe, device)
    import torch  # noqa: F401 - so that the forked processes have it

    names = list(dict.fromkeys([*args.tips, "control"]))
    reasons = {name: why_not(TIPS[name], device, probe["threads"]) for name in names}
    for name in names:
        if reasons[name]:
            result["runs"].append({"tip": name, "repeat": 1, "status": "n/a", "reason": reasons[name]})

    def finish() -> None:
        save(result, output, summarise(result["runs"]))
        print()
        print_table([HEADER, *map(cells_of, summarise(result["runs"]))], left=1)
        print(note_of(result["runs"]))

    over = {name for name in names if reasons[name]}
    with until_stopped(result, output, finish), tempfile.TemporaryDirectory() as folder:
        for repeat in range(1, args.repeats + 1):
            for name in names:
                if name in over:
                    continue
                print(f"{repeat} of {args.repeats}: {name}: ", end="", flush=True)
                cell = {"tip": name, "repeat": repeat, "device": device}
                outcome = run_cell(measure, cell | {"seconds": args.seconds}, Path(folder, "cache"), args.timeout)
                result["runs"].append(cell | outcome)
                save(result, output, summarise(result["runs"]))
                if outcome["status"] == "failed":
                    over.add(name)
                print(f"{outcome['ratio']:.2f}" if "ratio" in outcome else f"failed: {outcome['reason']}", flush=True)
    if any(run["status"] == "failed" for run in result["runs"]):
        sys.exit(1)


if __name__ == "__main__":
    try:
        main(command_line(Args, __doc__))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
