"""Measures what checkpoints cost: environment steps per second without `--save-every` and with it.

    python benchmarks/saving.py                       SAC with --compile, a checkpoint every 10,000 steps
    python benchmarks/saving.py --save-every 100      a hundred times as many

The two kinds of runs take turns, in every second turn in reverse order; the loss is the median of those within the
turns. Nothing else should run meanwhile.
"""

import signal
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

from speed import (
    PROBE,
    ask,
    check_output,
    check_seconds,
    command_line,
    fail,
    find_scripts,
    finished,
    lengths,
    new_result,
    now,
    result_path,
    run_script,
    save,
    split_flags,
)


@dataclass
class Args:
    script: str = "sac_continuous_action"
    """script to measure, with --compile"""
    save_every: int = 10_000
    """environment steps between two checkpoints"""
    steps: int = 10_500
    """environment steps of learning in each run"""
    repeats: int = 3
    """turns"""
    flags: str = ""
    """more flags for both kinds of runs, as one string: --flags="--save-replay" """
    timeout: float = 900.0
    """seconds after which a run is stopped and counts as failed"""
    output: Path | None = None
    """result file; by default runs/bench/saving_DEVICE_DATE.json"""


def main(args: Args) -> None:
    check_seconds(args, "timeout")
    for name in ("save_every", "steps", "repeats"):
        if getattr(args, name) <= 0:
            fail(f"--{name.replace('_', '-')} {getattr(args, name)}: must be above 0")
    if args.save_every >= args.steps:
        fail(f"--save-every {args.save_every}: must be below --steps {args.steps}, or none is saved but the last")
    (script,), probe = find_scripts([args.script], "--script"), ask(PROBE)
    device = "cuda" if probe["gpu"] else "cpu"
    output, result = args.output or result_path("saving", device, probe), new_result("saving", args, probe, device)
    check_output(output, "saving")
    common = ["--compile", *lengths(script, 1_000, args.steps), *split_flags(args.flags)]
    losses = []
    for repeat in range(1, args.repeats + 1):
        for saves in (False, True) if repeat % 2 else (True, False):
            flags = [*common, "--seed", str(repeat), *(["--save-every", str(args.save_every)] if saves else [])]
            run = {"repeat": repeat, "saves": saves} | run_script(f"{script}_torchcompile", flags, args.timeout)
            result["runs"].append(run)
            print(f"{run['command']}: {run['summary']['fps'] if run['status'] == 'finished' else run['reason']}")
        fps = {run["saves"]: run["summary"]["fps"] for run in finished(result["runs"], repeat=repeat)}
        losses += [1 - fps[True] / fps[False]] if len(fps) == 2 else []
        result |= {"ended": now(), "losses": losses, "median_loss": statistics.median(losses) if losses else None}
        for each in finished(result["runs"]):
            result["versions"] |= each["summary"]["versions"]
        save(result, output, [])
    if not losses:
        sys.exit(1)
    print(f"loss: {result['median_loss']:.2%} (median of {len(losses)}); {output}")


if __name__ == "__main__":
    try:
        main(command_line(Args, __doc__))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
