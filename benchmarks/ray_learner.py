"""Measures the learners of the scripts with actors: seconds that one takes for a batch, eager and compiled.

    python benchmarks/ray_learner.py                        every task; some 10 minutes on a CPU
    python benchmarks/ray_learner.py --tasks "IMPALA, Breakout-v5" --repeats 3

Each measurement is a fresh process in which the script runs as it is, with its one actor in the same process and
without Ray. What counts is the time from the moment that the batch's last fragment is there to the moment that the new
weights are out, in the median over the batches after the first fifth of them. The arms take turns; the ratio to eager
is taken within each turn, and its median is reported. The result is a JSON file, written anew after each process.
"""

import json
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from speed import (
    FLAGS,
    PROBE,
    SCRIPTS,
    Variant,
    ask,
    check_output,
    check_seconds,
    command_line,
    fail,
    failures_of,
    finished,
    median,
    new_result,
    possible_variants,
    print_table,
    result_path,
    run_process,
    save,
    script_of,
    scrub,
    show,
    terminate_like_interrupt,
    until_stopped,
    warn_if_busy,
)

TASKS = {  # name: script, and its flags but for the variant's
    "IMPALA, CartPole-v1": ("impala_ray", "--total-timesteps 100000"),
    "IMPALA, Breakout-v5": ("impala_ray", "--env-id Breakout-v5 --num-envs 4 --total-timesteps 2560"),
    "APPO, CartPole-v1": ("appo_ray", "--total-timesteps 40960"),
    "APPO, HalfCheetah-v4": (
        "appo_ray",
        "--env-id HalfCheetah-v4 --num-envs 1 --fragment-length 512 --batch-fragments 4 --update-epochs 10"
        " --num-minibatches 32 --learning-rate 3e-4 --ent-coef 0 --total-timesteps 20480",
    ),
}
PROGRAM = """
import importlib, json, statistics, sys, tempfile, time
sys.path.insert(0, {folder!r})
module = importlib.import_module({name!r})
seconds, taken = [], []
take, publish = module.Fleet.take, module.Fleet.publish

def timed_take(fleet):
    fragment = take(fleet)
    taken.append(time.perf_counter())
    return fragment

def timed_publish(fleet, weights):
    publish(fleet, weights)
    if taken:
        seconds.append(time.perf_counter() - taken[-1])

module.Fleet.take, module.Fleet.publish = timed_take, timed_publish
with tempfile.TemporaryDirectory() as folder:
    module.main(module.tyro.cli(module.Args, args=[*{flags!r}, "--output-dir", folder]))
rest = seconds[len(seconds) // 5 :]
print(json.dumps({{"batches": len(rest), "seconds": statistics.median(rest)}}))
"""


@dataclass
class Args:
    tasks: tuple[str, ...] = tuple(TASKS)
    """what to measure"""
    variants: tuple[Variant, ...] = ()
    """variants to measure; by default eager and those that compile, as far as the device can run them"""
    repeats: int = 5
    """processes of each arm"""
    cuda: bool = True
    """measure on CUDA where there is a device, else on the CPU"""
    timeout: float = 600.0
    """seconds after which a process is stopped and counts as failed"""
    output: Path | None = None
    """result file; by default runs/bench/ray_learner_DEVICE_DATE.json"""


def measure(args: Args, device: str, task: str, variant: str, repeat: int) -> dict:
    """One process of an arm."""
    script, flags = TASKS[task]
    flags = [*shlex.split(flags), *FLAGS.get(variant, []), "--seed", str(repeat)]
    flags += ["--no-cuda"] if device == "cpu" else []
    name = script_of(script, variant)
    program = PROGRAM.format(folder=str(SCRIPTS), name=name, flags=flags)
    record = {"script": task, "variant": variant, "repeat": repeat, "command": shlex.join([f"{name}.py", *flags])}
    code, out, err = run_process([sys.executable, "-c", program], args.timeout)
    if code == 0:
        return record | {"status": "finished", **json.loads(out.splitlines()[-1])}
    reason = f"stopped after {args.timeout:.0f} s" if code is None else f"exit status {code}"
    return record | {"status": "failed", "reason": f"{reason}: {scrub((err.strip().splitlines() or [''])[-1])}"}


def summarise(runs: Sequence[dict]) -> list[dict]:
    """One line an arm: the median seconds a batch, and how many times as fast as eager it is."""
    lines = []
    for task, variant in dict.fromkeys((run["script"], run["variant"]) for run in runs):
        own = finished(runs, script=task, variant=variant)
        eager = {run["repeat"]: run["seconds"] for run in finished(runs, script=task, variant="eager")}
        ratios = [eager[run["repeat"]] / run["seconds"] for run in own if run["repeat"] in eager]
        failures = failures_of(runs, task, variant)
        line = {"task": task, "variant": variant, "runs": len(own), "seconds": median([r["seconds"] for r in own], 6)}
        line |= {"times_eager": median(ratios), "reason": failures[-1]["reason"] if failures else None}
        lines.append(line)
    return sorted(lines, key=lambda line: list(TASKS).index(line["task"]))


HEADER = ["task", "variant", "a batch, ms", "× eager"]


def rows_of(lines: Sequence[dict]) -> list[list[str]]:
    return [
        [line["task"], line["variant"], show(line["seconds"] and line["seconds"] * 1e3, 2), show(line["times_eager"])]
        for line in lines
    ]


def print_result(result: dict) -> None:
    print_table([HEADER, *rows_of(result["medians"])])
    for line in result["medians"]:
        if line["reason"]:
            print(f"{line['task']} {line['variant']} failed: {line['reason']}")


def write(result: dict, path: Path) -> None:
    save(result, path, summarise(result["runs"]))


def main(args: Args) -> None:
    terminate_like_interrupt()
    check_seconds(args, "timeout")
    if not args.tasks:
        fail("--tasks: must be followed by at least one value")
    for task in args.tasks:
        if task not in TASKS:
            fail(f"--tasks {task}: must be one of {', '.join(map(repr, TASKS))}")
    if args.repeats < 1:
        fail(f"--repeats {args.repeats}: must be at least 1")
    probe = ask(PROBE)
    device = "cuda" if args.cuda and probe["gpu"] else "cpu"
    possible = possible_variants(device)
    for variant in args.variants:
        if variant not in possible:
            fail(f"--variants {variant}: needs a CUDA device and --cuda")
    variants = list(dict.fromkeys(args.variants)) or [v for v in possible if v == "eager" or "compile" in v]
    output = args.output or result_path("ray_learner", device, probe)
    check_output(output, "ray_learner")
    result = new_result("ray_learner", args, probe, device)
    warn_if_busy()
    with until_stopped(result, output, write, print_result):
        for repeat in range(1, args.repeats + 1):
            for task, variant in [(task, variant) for task in args.tasks for variant in variants]:
                if failures_of(result["runs"], task, variant):
                    continue
                print(f"{task}, {variant}, {repeat}: ", end="", flush=True)
                record = measure(args, device, task, variant, repeat)
                result["runs"].append(record)
                write(result, output)
                print(f"{record['seconds'] * 1e3:.2f} ms" if "seconds" in record else record["reason"], flush=True)
    if any(run["status"] == "failed" for run in result["runs"]):
        sys.exit(1)


if __name__ == "__main__":
    try:
        main(command_line(Args, __doc__))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
