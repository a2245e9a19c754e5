"""All that is wanted from a short visit to a CUDA machine: the GPU tests, then the speed of every variant.

    python benchmarks/gpu_visit.py --output results --budget 540

What matters most comes first: `pytest -m gpu`; the compiler's caches, filled by short runs of all scripts side by side;
the scan's benchmark; then of each script compile+cudagraphs, eager, cudagraphs and compile, and the same again; a few
scripts with other flags; and at last the warm-up with cold and warm caches, as far as the time lasts. Nothing is begun
that is not expected to end within the budget, and whatever runs at its end is stopped. Each file is renewed after each
run:

- gpu_visit.json: the tests' outcome, and what came of the rest; gpu_tests.txt: all that the tests say;
- speed_GPU_DATE.json, with the GPU's use while a run learned (with other flags, each has a file of its own),
  warmup_GPU_DATE.json and scan_GPU_DATE.json: for benchmarks/results/, as speed.py and scan.py write them.
"""

import dataclasses
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import speed
from speed import command_line

# Seconds after which one that hangs is stopped, lest it take what is left of the visit
CACHES_LIMIT, RUN_LIMIT = 180.0, 120.0
VARIANTS = ("compile+cudagraphs", "eager", "cudagraphs", "compile")
OTHERS = (  # a script, and what is other than usual
    ("ppo_atari_envpool", {"num_envs": 64}),
    ("ppo_atari_envpool", {"num_envs": 256}),
    ("sac_continuous_action", {"flags": "--tf32"}),
    ("td3_continuous_action", {"flags": "--tf32"}),
)
SCAN = ["--models", "recurrence", "lru", "gru", "vmap", "--steps", "0", "--resets", "0.01"]
SCAN += ["--passes", "forward+backward", "--limit-seconds", "10"]
SCAN += ["--arms", "eager loop", "eager loop, recurrence only", "native, padded", "compiled operator"]
SCAN += ["scan", "compiled scan", "captured scan"]


@dataclass
class Args:
    output: Path = Path(os.environ.get("OUT", "."))
    """folder for the result files; $OUT if that is set, else the current folder"""
    budget: float = 540.0
    """seconds after which the visit is over"""
    test_budget: float = 300.0
    """seconds of them that the tests may take"""
    test_workers: int = max(2, (os.cpu_count() or 2) - 2)
    """processes among which the tests are divided, if pytest-xdist is there"""
    scripts: tuple[str, ...] = (
        "sac",
        "td3",
        "dqn",
        "ppo",
        "ppo_continuous_action",
        "ppo_atari_envpool",
        "ppo_memory",
        "dqn_memory",
        "impala_ray",
        "appo_ray",
    )
    """scripts to measure, the most valuable first"""
    variants: tuple[speed.Variant, ...] = VARIANTS
    """variants to measure, the most valuable first"""
    repeats: int = 2
    """runs of each arm, if the time lasts"""
    steps: int | None = None
    """environment steps with learning in each run; by default as in benchmarks/speed.py"""
    tests: bool = True
    """run the tests marked gpu"""
    scan: bool = True
    """measure the scan"""
    scan_lengths: tuple[int, ...] = (1_024, 4_096, 16_384)
    """steps of the scan"""
    scan_budget: float = 200.0
    """seconds that it may take"""
    others: bool = True
    """measure Atari with 64 and 256 environments, SAC and TD3 in TF32, if these are among the scripts"""
    fill_caches: bool = True
    """compile all scripts side by side before they are measured one by one"""
    warmup: bool = True
    """measure the warm-up, too"""
    rehearse: bool = False
    """run without a GPU, where the captured variants fail, to see that the program works"""


class Sampler:
    """Reads the GPU's use from nvidia-smi every half second, in the background; without nvidia-smi there is none."""

    def __init__(self):
        self.samples: list[tuple[float, float, float]] = []  # unix time, % of time a kernel ran, watts
        query = ["--query-gpu=utilization.gpu,power.draw", "--format=csv,noheader,nounits", "--id=0", "--loop-ms=500"]
        try:
            self.process = subprocess.Popen(
                ["nvidia-smi", *query],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                start_new_session=True,
            )
        except OSError:
            self.process = None
            return
        threading.Thread(target=self.read, daemon=True).start()

    def read(self) -> None:
        for line in self.process.stdout:
            try:
                use, power = map(float, line.split(","))
            except ValueError:  # "[N/A]"
                continue
            self.samples.append((time.time(), use, power))

    def during(self, run: dict) -> dict | None:
        """The GPU's use within the window in which the run's fps was taken."""
        summary = run.get("summary")
        if not summary or not summary["fps"]:
            return None
        first, last = summary["fps_window"]
        begin = run["ended"] - (last - first) / summary["fps"]
        rows = [sample for sample in list(self.samples) if begin <= sample[0] <= run["ended"]]
        if not rows:
            return None
        use, power = (round(statistics.fmean(column), 1) for column in list(zip(*rows, strict=True))[1:])
        return {"utilisation_percent": use, "power_watts": power, "samples": len(rows)}

    def close(self) -> None:
        if self.process:
            speed.stop(self.process)


# So that tests that are stopped still report what failed before
PYTEST = (
    "import signal, sys, pytest; signal.signal(signal.SIGTERM, signal.default_int_handler); sys.exit(pytest.main())"
)


def run_tests(timeout: float, workers: int, report: Path) -> dict:
    """Runs the tests marked gpu; their exit status (None if they were stopped), and what pytest says at its end."""
    started = time.perf_counter()
    command = [sys.executable, "-c", PYTEST, "-m", "gpu", "-v", "--tb=short", "--maxfail=60", "--durations=10"]
    if importlib.util.find_spec("xdist"):
        command += ["-n", str(workers), "--dist=loadgroup"]
    # Each compiles by itself: so many of them need no pools of compiling processes
    code, out, err = speed.run_process(command, timeout, os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "1"})
    report.write_text(speed.scrub(out + err))
    last = (speed.scrub(out.strip() or err.strip()).splitlines() or ["no output"])[-1].strip("= ")
    return {"exit_status": code, "seconds": round(time.perf_counter() - started, 1), "outcome": last}


def run_scan(lengths: Sequence[int], timeout: float, output: Path) -> dict:
    """Runs benchmarks/scan.py; its exit status (None if it was stopped) and what it printed, the tables apart."""
    started = time.perf_counter()
    command = [sys.executable, str(Path(__file__).with_name("scan.py")), *SCAN, "--output", str(output)]
    command += ["--lengths", *map(str, lengths)]
    code, out, err = speed.run_process(command, timeout)
    lines = [line for line in speed.scrub(out).splitlines() if " of " in line and " ms " in line]
    seconds = round(time.perf_counter() - started, 1)
    return {"exit_status": code, "seconds": seconds, "lines": lines, "errors": speed.scrub(err)[-2_000:]}


def fill_caches(scripts: Sequence[str], cuda: bool, timeout: float) -> list[dict]:
    """Short runs of all compiled scripts at the same time; what came of each. Their figures say nothing."""

    def run(script: str) -> dict:
        steps = 200 if speed.WORKLOADS[script].learning_starts is not None else 4_096
        flags = [*speed.FLAGS["compile+cudagraphs" if cuda else "compile"], *speed.lengths(script, 1_024, steps)]
        return {"script": script} | speed.run_script(f"{script}_torchcompile", flags, timeout)

    with ThreadPoolExecutor(len(scripts)) as pool:
        return list(pool.map(run, scripts))


def main(args: Args) -> None:
    deadline = time.perf_counter() + args.budget
    speed.terminate_like_interrupt()
    scripts, probe = speed.find_scripts(args.scripts), speed.ask(speed.PROBE)
    if not args.variants:
        speed.fail("--variants: must be followed by at least one value")
    if probe["gpu"] is None and not args.rehearse:
        speed.fail("there is no CUDA device (--rehearse goes through the visit without one)")
    device = "cuda" if probe["gpu"] else "cpu"
    args.output = args.output.resolve()  # what is started runs elsewhere
    try:
        args.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        speed.fail(f"--output {args.output}: must be a folder that can be written to ({error.strerror})")

    options = speed.Args(repeats=args.repeats, steps=args.steps, timeout=RUN_LIMIT)
    visit = {
        "kind": "gpu_visit",
        "started": speed.now(),
        "hardware": speed.hardware(probe),
        "tests": None,
        "filled": None,
        "scan": None,
    }
    measured = []  # results of speed

    def time_left() -> float:
        return deadline - time.perf_counter()

    def result_path(kind: str) -> Path:
        return speed.result_path(kind, device, probe, args.output)

    def note() -> None:
        for run in (run for result in measured for run in result["runs"]):
            run.setdefault("gpu_use", sampler.during(run))
        visit["seconds"] = round(args.budget - time_left(), 1)
        (args.output / "gpu_visit.json").write_text(json.dumps(visit, indent=1) + "\n")

    sampler = Sampler()
    try:
        if args.tests:
            print("pytest -m gpu: ", end="", flush=True)
            visit["tests"] = run_tests(
                min(args.test_budget, time_left()), args.test_workers, args.output / "gpu_tests.txt"
            )
            print(f"exit status {visit['tests']['exit_status']}, {visit['tests']['outcome']}", flush=True)
            note()
        if args.fill_caches and time_left() > 60:
            visit["filled"] = fill_caches(scripts, probe["gpu"] is not None, min(CACHES_LIMIT, time_left()))
            for run in visit["filled"]:
                print(f"{run['script']}: {run.get('reason', 'compiled')} ({run['process_seconds']:.0f} s)", flush=True)
            note()
        if args.scan and time_left() > 60:
            print("the scan: ", end="", flush=True)
            limit = min(args.scan_budget, time_left())
            visit["scan"] = run_scan(args.scan_lengths, limit, result_path("scan"))
            print(f"exit status {visit['scan']['exit_status']}", *visit["scan"]["lines"], sep="\n", flush=True)
            note()
        plan = [(s, v, r) for r in range(1, args.repeats + 1) for v in args.variants for s in scripts]
        plans = [(options, plan, 20 if args.fill_caches else 60)] if plan else []
        for script, changed in OTHERS if args.others else ():
            arms = [(script, args.variants[0], 1)] if script in scripts else []
            plans.append((dataclasses.replace(options, repeats=1, **changed), arms, 60))
        for own, plan, cold in plans:
            result, path = speed.new_result("speed", own, probe, device), result_path("speed")
            measured.append(result)

            def note_run(result: dict = result, path: Path = path) -> None:
                note()
                speed.write(result, path)

            with speed.until_stopped(result, path):
                speed.measure_all(own, plan, result, path, deadline, after_each=note_run, cold=cold)
        if args.warmup:
            result, path = speed.new_result("warmup", options, probe, device), result_path("warmup")
            with speed.until_stopped(result, path):
                arms = [(s, v) for v in ("cudagraphs", "compile+cudagraphs") for s in scripts]
                speed.warm_up_all(arms, [], result, path, deadline=deadline)
    finally:
        sampler.close()
        note()
        for run in (run for result in measured for run in result["runs"]):
            if use := run["gpu_use"]:
                print(f"{run['script']} {run['variant']}: GPU used {use['utilisation_percent']:.0f} % of the time")
        print(f"the visit took {visit['seconds']:.0f} s of {args.budget:.0f}", flush=True)


if __name__ == "__main__":
    try:
        main(command_line(Args, __doc__))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
