"""Trains agents with every memory on tasks that need one, and keeps a short result of each run.

    python benchmarks/memory_learning.py --jobs 2                        all of it: some hours on 2 cores
    python benchmarks/memory_learning.py --task "T-maze 100" --cell lru  one task, one memory
    python benchmarks/memory_learning.py --plot memory.png               draws the results (needs matplotlib)

A run with a result is skipped. Results are benchmarks/results/memory/ENV__SCRIPT__VARIANT__STEPS…__seedSEED.json, as
learning.py makes them, with 100 means over episodes in place of the episodes.
"""

import itertools
import json
import signal
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from learning import RunArgs, check_planned, run_all, runs_of
from speed import RESULTS, check_plot, command_line, fail, terminate_like_interrupt

MEMORY = RESULTS / "memory"
PPO, DQN = "ppo_memory_torchcompile", "dqn_memory_torchcompile"
CELLS = ("none", "stack", "gru", "lstm", "mingru", "lru", "s5", "ffm")
FEW = ("none", "stack", "gru", "mingru", "lru", "ffm")
GRID = (*FEW, "s5")
MORE_ENTROPY = "--ent-coef 0.03"
LENGTHS = (10, 30, 100, 300, 1000)
SEEDS = (1, 2, 3)


@dataclass
class Task:
    env_id: str
    steps: int
    """environment steps of a run"""
    flags: str
    """what differs from the script's defaults: rollouts are as long as what has to be remembered"""
    best: float
    """return of an agent that remembers everything"""
    chance: float | None
    """return of one that remembers nothing, where it is known"""
    cells: Sequence[str] = CELLS
    script: str = PPO


MAZE = "benchmarks.tmaze:TMaze"
TASKS = {
    "T-maze 10": Task(f"{MAZE}10-v0", 100_000, "", 1, 0.5),
    "T-maze 30": Task(f"{MAZE}30-v0", 200_000, "", 1, 0.5),
    "T-maze 100": Task(f"{MAZE}100-v0", 500_000, "--num-steps 256 --num-minibatches 8", 1, 0.5),
    "T-maze 300": Task(f"{MAZE}300-v0", 1_000_000, "--num-steps 512 --num-minibatches 16", 1, 0.5),
    "T-maze 1000": Task(f"{MAZE}1000-v0", 2_000_000, "--num-steps 2048 --num-minibatches 16", 1, 0.5),
    "RepeatFirst": Task("benchmarks.cards:RepeatFirstEasy-v0", 600_000, "", 1, -0.5),
    "RepeatPrevious": Task("benchmarks.cards:RepeatPreviousEasy-v0", 1_000_000, "", 1, -0.5, FEW),
    "CartPole without velocities": Task("CartPole-v1", 500_000, "--hide-velocities", 500, None, FEW),
    "MiniGrid-MemoryS7": Task("MiniGrid-MemoryS7-v0", 2_000_000, "", 0.98, 0.5, GRID),
    # Agents that soon guess never see that looking back pays; with more entropy they go on trying
    "MiniGrid-MemoryS7, more entropy": Task("MiniGrid-MemoryS7-v0", 2_000_000, MORE_ENTROPY, 0.98, 0.5, GRID),
    "T-maze 30, DQN": Task(f"{MAZE}30-v0", 200_000, "", 1, 0.5, FEW, DQN),
}


@dataclass
class Args:
    task: tuple[str, ...] = tuple(TASKS)
    """tasks to train on"""
    cell: tuple[str, ...] = CELLS
    """memories to train"""
    seeds: tuple[int, ...] = SEEDS
    """seeds of a task and a memory"""
    jobs: int = 1
    """processes at a time; each has one thread if there are several"""
    output_dir: Path = Path("runs")
    """folder for the run folders and the logs"""
    results: Path = MEMORY
    """folder of the results"""
    dry_run: bool = False
    """only say what would run"""
    plot: Path | None = None
    """PNG file in which to draw the results, instead of training"""


def plan(args: Args) -> list[dict]:
    """The runs, as learning.py takes them: a seed of everything, then the next."""
    entries = []
    for seed, name, cell in itertools.product(args.seeds, args.task, args.cell):
        task = TASKS[name]
        if cell in task.cells:
            entry = {"script": task.script, "env_id": task.env_id, "steps": task.steps, "seeds": [seed]}
            entries.append(entry | {"flags": f"--compile --no-cuda --cell {cell} {task.flags}"})
    return entries


def returns(results: Path) -> dict[tuple[str, str], list[float]]:
    """The mean returns of the last 100 episodes by task and cell, one a seed."""
    marks = ("--hide-velocities", MORE_ENTROPY)  # flags in which tasks of one environment differ
    names = {(task.script, task.env_id, *(mark in task.flags for mark in marks)): name for name, task in TASKS.items()}
    found, more, runs = {}, float(MORE_ENTROPY.split()[1]), runs_of(plan(Args()))
    for path in sorted(results.glob("*.json")):
        result = json.loads(path.read_text())
        check_planned(result, path, runs)
        arguments = result["arguments"]
        flags = arguments["hide_velocities"], arguments.get("ent_coef") == more
        task = names[result["script"], arguments["env_id"], *flags]
        found.setdefault((task, arguments["cell"]), []).append(result["return_last_100"])
    return found


def draw(args: Args) -> None:
    """Success by the length of the corridor, and the returns on the other tasks: each seed, and means."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        fail("--plot: needs matplotlib: pip install matplotlib")
    found = returns(args.results)
    if not found:
        fail(f"--plot: there are no results in {args.results}")
    others = [name for name in TASKS if name not in [f"T-maze {length}" for length in LENGTHS]]
    others = [name for name in others if any(name == task for task, _ in found)]
    figure = Figure(figsize=(max(7, 3 * len(others)), 8.5 if others else 4.5), layout="constrained")
    grid = figure.add_gridspec(2 if others else 1, max(1, len(others)))
    axes = figure.add_subplot(grid[0, :])
    colours = dict(zip(CELLS, ["#7f7f7f", "#000000", "#e69f00", "#d55e00", "#56b4e9", "#0072b2", "#009e73", "#cc79a7"]))
    for number, cell in enumerate(CELLS):
        reached = {length: found[task] for length in LENGTHS if (task := (f"T-maze {length}", cell)) in found}
        if reached:
            x = [length * 1.03 ** (number - (len(CELLS) - 1) / 2) for length in reached]  # side by side
            means = [statistics.fmean(y) for y in reached.values()]
            axes.plot(x, means, "_-", color=colours[cell], label=cell, markersize=12, linewidth=1)
            for place, y in zip(x, reached.values()):
                axes.plot([place] * len(y), y, "o", color=colours[cell], alpha=0.6, markersize=5)
    axes.set(xscale="log", xlabel="corridor (steps)", ylabel="success", title="T-maze", ylim=(0.35, 1.03))
    axes.set_xticks(LENGTHS, [f"{length:,}" for length in LENGTHS])
    axes.axhline(0.5, color="#bbbbbb", linestyle=":")
    axes.legend(fontsize=8)
    for column, name in enumerate(others):
        task, axes = TASKS[name], figure.add_subplot(grid[1, column])
        for row, cell in enumerate(task.cells):
            y = found.get((name, cell), [])
            axes.plot([row] * len(y), y, "o", color=colours[cell], alpha=0.6)
            axes.plot([row - 0.3, row + 0.3] if y else [], 2 * [statistics.fmean(y)] if y else [], color=colours[cell])
        for value in (task.best, task.chance):
            if value is not None:
                axes.axhline(value, color="#bbbbbb", linestyle=":")
        axes.set_xticks(range(len(task.cells)), task.cells, rotation=60)
        axes.set(title=name.replace(", ", ",\n"), ylabel="return")
    figure.savefig(args.plot, dpi=150, metadata={"Software": None})
    print(f"success and returns: {args.plot}")


def main(args: Args) -> None:
    for flag, names, known in (("task", args.task, TASKS), ("cell", args.cell, CELLS)):
        for name in names:
            if name not in known:
                fail(f"--{flag} {name}: must be one of {', '.join(map(repr, known))}")
    if not args.seeds or any(not 0 <= seed < 2**32 for seed in args.seeds):
        fail(f"--seeds {' '.join(map(str, args.seeds))}: must be one or more, each in [0, 2**32)")
    check_plot(args.plot)
    if args.plot:
        draw(args)
        return
    terminate_like_interrupt()
    common = {name: getattr(args, name) for name in ("jobs", "output_dir", "results", "dry_run")}
    run_all(RunArgs(**common, points=100), plan(args))


if __name__ == "__main__":
    try:
        main(command_line(Args, __doc__))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
