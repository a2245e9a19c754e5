"""Trains IMPALA and asynchronous PPO with weights kept some versions old, with and without V-trace.

    python benchmarks/lag_learning.py --jobs 2            all of it: about ten minutes on 2 cores
    python benchmarks/lag_learning.py --plot lag.png      draws the results (needs matplotlib)

Without Ray, in one process, so that every fragment is exactly --forced-lag versions old. A run with a result is
skipped. Results are benchmarks/results/lag/ENV__SCRIPT__VARIANT__STEPS…__seedSEED.json, as learning.py makes them, with
100 means over episodes in place of the episodes.
"""

import itertools
import json
import signal
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

from learning import RunArgs, check_planned, run_all, runs_of
from speed import RESULTS, command_line, fail, terminate_like_interrupt

LAG = RESULTS / "lag"
SCRIPTS = {"impala_ray_torchcompile": "IMPALA", "appo_ray_torchcompile": "asynchronous PPO"}
ENV_ID, STEPS, LAGS, SEEDS = "CartPole-v1", 500_000, (0, 1, 4, 16), (1, 2, 3)


@dataclass
class Args:
    jobs: int = 1
    """processes at a time; each has one thread if there are several"""
    output_dir: Path = Path("runs")
    """folder for the run folders and the logs"""
    results: Path = LAG
    """folder of the results"""
    dry_run: bool = False
    """only say what would run"""
    plot: Path | None = None
    """PNG file in which to draw the results, instead of training"""


def plan() -> list[dict]:
    """The runs, as learning.py takes them: a seed of everything, then the next."""
    return [
        {
            "script": script,
            "env_id": ENV_ID,
            "steps": STEPS,
            "seeds": [seed],
            "flags": f"--compile --no-cuda --forced-lag {lag} --{'' if vtrace else 'no-'}vtrace",
        }
        for seed, script, vtrace, lag in itertools.product(SEEDS, SCRIPTS, (True, False), LAGS)
    ]


def returns(results: Path) -> dict[tuple[str, bool, int], list[float]]:
    """The mean returns of the last 100 episodes by script, whether with V-trace, and lag; one a seed."""
    found, runs = {}, runs_of(plan())
    for path in sorted(results.glob("*.json")):
        try:
            result = json.loads(path.read_text())
            check_planned(result, path, runs)
            key = (result["script"], result["arguments"]["vtrace"], result["arguments"]["forced_lag"])
            found.setdefault(key, []).append(result["return_last_100"])
        except (ValueError, LookupError, TypeError):
            fail(f"--results {results}: {path.name} is no result of this program")
    return found


def draw(args: Args) -> None:
    """The return by lag: means, and from the worst to the best seed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        fail("--plot: needs matplotlib: pip install matplotlib")
    found = returns(args.results)
    if not found:
        fail(f"--plot: there are no results in {args.results}")
    figure = Figure(figsize=(9, 4), layout="constrained")
    for axes, (script, name) in zip(figure.subplots(1, 2, sharey=True), SCRIPTS.items(), strict=True):
        for vtrace, label, colour in ((True, "with V-trace", "#0072b2"), (False, "without", "#d55e00")):
            points = [(x, found[script, vtrace, lag]) for x, lag in enumerate(LAGS) if (script, vtrace, lag) in found]
            if points:
                x = [place for place, _ in points]
                axes.plot(x, [statistics.fmean(y) for _, y in points], "o-", color=colour, label=label)
                axes.fill_between(x, *zip(*((min(y), max(y)) for _, y in points)), color=colour, alpha=0.15)
        axes.set(xlabel="lag (versions of the weights)", title=f"{name}, {ENV_ID}", ylim=(0, 510))
        axes.set_xticks(range(len(LAGS)), [str(lag) for lag in LAGS])
        axes.axhline(475, color="#bbbbbb", linestyle=":")
        if axes.lines[1:]:
            axes.legend()
    figure.axes[0].set_ylabel("return, last 100 episodes")
    try:
        figure.savefig(args.plot, format="png", dpi=150, metadata={"Software": None})
    except OSError as error:
        fail(f"--plot {args.plot}: must be a file in a folder that can be written to ({error.strerror})")
    print(f"return by lag: {args.plot}")


def main(args: Args) -> None:
    if args.plot:
        draw(args)
        return
    terminate_like_interrupt()
    common = {name: getattr(args, name) for name in ("jobs", "output_dir", "results", "dry_run")}
    run_all(RunArgs(**common, points=100), plan())


if __name__ == "__main__":
    try:
        main(command_line(Args, __doc__))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
