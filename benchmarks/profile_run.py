"""Says where a run's time goes: by line of the script, and on CUDA how long each captured graph takes, and why.

    python benchmarks/profile_run.py --script dqn --variant compile
    python benchmarks/profile_run.py --script sac --variant compile+cudagraphs --output sac.json

A thousand times a second the main thread is asked where it is, once the run has learned long enough for its fps to
count. A sample says which line of `main` is at work, and which of the script's lines below it, and stands for the time
since the one before, as C code is asked only at its end. C code that has begun in a line belongs to that line, and so
does a wait for the GPU. Sampling takes time, too: fps is measured by speed.py.

After the run each captured graph is replayed on its own: microseconds a replay when replays follow one another, and
when the host waits for each; the number of its nodes, and those that take longest.
"""

import collections
import importlib
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, ModuleType

import tyro

import speed
from speed import command_line

PERIOD = 1e-3  # seconds between two samples, if no C code lasts longer
REPLAYS = 200


@dataclass
class Args:
    script: str
    """script to profile: its name in leanrl/ without `_torchcompile` and `.py`, or the beginning of it"""
    variant: speed.Variant = "compile"
    """variant to profile"""
    seconds: float = 5.0
    """seconds during which samples are taken"""
    steps: int | None = None
    """environment steps with learning; by default as in benchmarks/speed.py"""
    flags: str = ""
    """more flags for the script, as one string: --flags="--num-envs 16" """
    rows: int = 15
    """lines and graph nodes to show"""
    output: Path | None = None
    """result file, JSON; none is written if not given"""


class Sampler:
    """Notes where the main thread is, in seconds by lines of one script."""

    def __init__(self, module: ModuleType, seconds: float):
        self.module, self.left, self.run, self.samples, self.last = module, seconds, None, 0, time.perf_counter()
        self.main, self.inner = collections.Counter(), collections.Counter()
        sampler, original = self, module.Run

        class NotedRun(original):
            def __init__(self, *arguments, **keywords):
                super().__init__(*arguments, **keywords)
                sampler.run = self

        module.Run = NotedRun

    def sample(self, _number: int, frame: FrameType | None) -> None:
        now = time.perf_counter()
        passed, self.last = now - self.last, now
        if self.run is None or self.run.window is None or self.left < PERIOD:
            return
        inner = top = None
        while frame is not None:
            if frame.f_globals.get("__name__") == self.module.__name__:
                # Between two lines a frame has no number
                place = (frame.f_code.co_name, frame.f_lineno or frame.f_code.co_firstlineno)
                inner, top = inner or place, place if place[0] == "main" else top
            frame = frame.f_back
        if top is not None:
            self.main[top] += passed
            self.inner[inner] += passed
            self.samples += 1
            self.left -= passed

    def lines(self, seconds: collections.Counter) -> list[dict]:
        """The lines by their share of the time."""
        code, total = Path(self.module.__file__).read_text().splitlines(), sum(seconds.values())
        return [
            {"share": round(spent / total, 4), "function": name, "line": number, "code": code[number - 1].strip()}
            for (name, number), spent in seconds.most_common()
        ]


def note_graphs(module: ModuleType) -> dict[str, Callable]:
    """What `module` captures from now on, by name."""
    graphs, original = {}, module.CudaGraphModule

    class NotedGraph(original):
        def __init__(self, function, *arguments, **keywords):
            super().__init__(function, *arguments, **keywords)
            inner = getattr(function, "func", function)  # of a partial
            graphs[f"{inner.__name__}{getattr(function, 'args', '') or ''}"] = self

    module.CudaGraphModule = NotedGraph
    return graphs


def measure_graph(graph: Callable, rows: int) -> dict:
    """Microseconds of a captured graph, and the nodes that take longest."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(REPLAYS):
        graph()
    end.record()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(REPLAYS):
        graph()
        torch.cuda.synchronize()
    waiting = (time.perf_counter() - started) / REPLAYS
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        graph()
        torch.cuda.synchronize()
    nodes = [event for event in profiler.events() if event.device_type.name == "CUDA"]
    count, total = collections.Counter(node.name for node in nodes), collections.Counter()
    for node in nodes:
        total[node.name] += node.time_range.elapsed_us()
    longest = [{"name": name, "count": count[name], "us": round(spent, 2)} for name, spent in total.most_common(rows)]
    times = {"us": begin.elapsed_time(end) * 1e3 / REPLAYS, "us_waiting_for_each": waiting * 1e6}
    times["us_in_nodes"] = sum(total.values())
    return {name: round(value, 1) for name, value in times.items()} | {"nodes": len(nodes), "longest": longest}


def print_profile(result: dict, rows: int) -> None:
    summary = result["summary"]
    print(f"\n{summary['script']} {summary['variant']}: {summary['fps']} steps/s on {summary['device_name']}")
    for name, title in (("main", "lines of main"), ("inner", "innermost lines of the script")):
        print(f"\n{result['samples']} samples, by {title}")
        for line in result[name][:rows]:
            print(f"{line['share']:6.1%}  {line['function']}:{line['line']}  {line['code'][:90]}")
    for name, graph in result["graphs"].items():
        print(
            f"\n{name}: {graph['us']} us a replay, {graph['us_waiting_for_each']} us with a wait after each;", end=" "
        )
        print(f"{graph['nodes']} nodes, {graph['us_in_nodes']} us in them")
        for node in graph["longest"]:
            print(f"{node['us']:8.1f} us  {node['count']:3} × {node['name'][:90]}")


def main(args: Args) -> None:
    speed.terminate_like_interrupt()
    (script,), probe = speed.find_scripts([args.script], "--script"), speed.ask(speed.PROBE)
    for name in ("seconds", "steps", "rows"):
        if getattr(args, name) is not None and getattr(args, name) <= 0:
            speed.fail(f"--{name} {getattr(args, name)}: must be above 0")
    device = "cuda" if probe["gpu"] and "--no-cuda" not in args.flags else "cpu"
    if "cudagraphs" in args.variant and device == "cpu":
        speed.fail(f"--variant {args.variant}: needs a CUDA device")
    if args.output:
        speed.check_output(args.output, "profile")
    name, steps = (
        speed.script_of(script, args.variant),
        args.steps or speed.WORKLOADS[script].steps(args.variant, device),
    )
    flags = [*speed.FLAGS.get(args.variant, []), *speed.lengths(script, *speed.whole_lengths(script, steps, None, ""))]
    flags += speed.split_flags(args.flags)
    result = speed.new_result("profile", args, probe, device)
    result |= {"flags": flags, "runs": []}  # a profile is one run, and has no median

    sys.path.insert(0, str(speed.SCRIPTS))
    module = importlib.import_module(name)
    sampler, graphs = Sampler(module, args.seconds), {}
    if "cudagraphs" in args.variant:
        graphs = note_graphs(module)
    signal.signal(signal.SIGALRM, sampler.sample)
    signal.setitimer(signal.ITIMER_REAL, PERIOD, PERIOD)
    with tempfile.TemporaryDirectory() as folder:
        try:
            module.main(tyro.cli(module.Args, args=[*flags, "--output-dir", folder], prog=f"{name}.py"))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        (path,) = Path(folder).glob("*/summary.json")
        result["summary"] = json.loads(path.read_text())
    result["samples"] = sampler.samples
    if not result["samples"]:
        speed.fail(f"--steps {steps}: the run was over before a sample was taken")
    result |= {"main": sampler.lines(sampler.main), "inner": sampler.lines(sampler.inner)}
    import torch

    with torch.no_grad():
        result["graphs"] = {name: measure_graph(graph, args.rows) for name, graph in graphs.items()}
    result["ended"] = speed.now()
    print_profile(result, args.rows)
    if args.output:
        speed.save(result, args.output, [])


if __name__ == "__main__":
    try:
        main(command_line(Args, __doc__))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
