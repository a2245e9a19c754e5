"""Measures how Ray scales over cores, nodes and steps a call: the table of Tianshou's issue 1172, redone.

    python benchmarks/ray_scaling.py                        16 actors, and 2 simulated nodes of 48; some 10 minutes
    python benchmarks/ray_scaling.py --quick                16 actors and few cells, in less than 2 minutes
    python benchmarks/ray_scaling.py --nodes --durations 0.001 --steps 1 10 100 1000
    python benchmarks/ray_scaling.py --result RESULT.json --plot ray.png     draws what was measured before

As in the issue, a step of an environment sleeps for a given duration and nothing learns, and each core has one
environment: here an actor of benchmarks/ray_vector_env.py. Efficiency is SPS (steps/s of all actors) × duration /
actors. A sleep ends late by some 30 to 50 µs, whatever Ray does: what it is late by is taken off the next one, up to
100 µs, and the rest, the wait for a core, counts against the efficiency; how long steps lasted and how late sleeps
ended is recorded. Asleep, an actor needs no core, so that one machine can hold the actors of many cores; what it can't
do is wake them all at once. A cell during which the cores were more than 90 % busy is marked as saturated. Every
figure says how it came about:

    measured    actors on this machine, in one Ray node
    simulated   the same on several Ray nodes, all on this machine (ray.cluster_utils.Cluster), whose few cores do the
                work of all the nodes, without a network
    modelled    computed from the model below, for nodes that were not there

An actor takes K steps a call. In `lockstep` the driver waits for a call of every actor before it makes the next ones;
`double-buffered`, each actor has two calls in flight. With A actors and steps of d seconds, a round of A calls takes

    lockstep          K · (d + s) + A · c
    double-buffered   max(K · (d + s), A · c)

where c, the cost of a call, is the driver's, and s is what a step takes beyond its duration (the wait for a core, the
vector environment, the policy). Both are fitted to the cells of each kind of cluster, those of each mode and
those of both, by least squares of the relative error; the RMS of that is given, and the largest. On one machine the
actors' share of a call takes the driver's cores, so that c is too large for a cluster rather than too small. Saturated
cells are left out of the fit.

With --compiled-graphs actors of one node also take calls by a compiled graph of Ray's, in lockstep: channels in shared
memory in the place of tasks, in other actors than those of the other modes. It is an interface for developers, and may
go (where Ray has none, the result says so); if it is interrupted, it says much. The model has no part in it, nor have
the scripts of leanrl/.

A cell is at least 3 rounds and --seconds of them, after one that is not counted; the cells take turns, --repeats times,
and the modes change places with each turn.
A cell with calls of more than --limit-seconds is left to the model. Memory is what an actor's process has: resident,
and with pages that several processes share divided among them. The result is a JSON file, written anew after each cell.
"""

import contextlib
import gc
import importlib.metadata
import importlib.util
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

import gymnasium as gym
import numpy as np

from ray_vector_env import RayVectorEnv, describe, held_signals, running_ray
from speed import (
    RESULTS,
    check_output,
    check_plot,
    check_seconds,
    command_line,
    fail,
    median,
    new_result,
    print_table,
    read_result,
    result_path,
    save,
    scrub,
    show,
    until_stopped,
    warn_if_busy,
)

MODES = {"lockstep": 1, "double-buffered": 2}  # calls of each actor in flight
GRAPH = "compiled graph"  # a third mode, where it can be measured
PUBLISHED = RESULTS / "reference_tianshou_1172.json"
TIMER_ERROR = 1e-4  # seconds by which a sleep may be too long without the actor having waited for a core
ACTOR_BYTES = 120e6  # resident, to refuse what can't fit
SATURATED = 0.9  # of the machine's cores: what a busier cell measures is the machine
COLOURS = ("#0072b2", "#009e73", "#e69f00", "#d55e00", "#cc79a7", "#56b4e9", "#7f7f7f", "#000000")


@dataclass
class Args:
    actors: int = 16
    """actors of the measured cells, in one node; 0: none of these"""
    nodes: tuple[int, ...] = (2,)
    """numbers of simulated nodes, each number a cluster of its own; none if followed by nothing"""
    cores_per_node: int = 48
    """cores, and so actors, of a simulated or modelled node; 48 as in the issue"""
    durations: tuple[float, ...] = (1.0, 0.1, 0.01, 0.001)
    """seconds d that a step takes"""
    steps: tuple[int, ...] = (1, 10, 100, 1000)
    """steps K of a call"""
    observation_size: int = 4
    """float32 numbers in an observation"""
    seconds: float = 2.0
    """seconds of calls that a cell takes at least"""
    limit_seconds: float = 2.0
    """seconds that a call's steps may take; a cell of longer ones is modelled only"""
    repeats: int = 3
    """turns of all cells of a cluster"""
    compiled_graphs: bool = False
    """measure the actors of one node with calls by compiled graphs of Ray's, too"""
    quick: bool = False
    """a short version: no simulated nodes, two durations, one turn"""
    output: Path | None = None
    """result file; by default runs/bench/ray_scaling_cpu_DATE.json"""
    result: Path | None = None
    """a result file that is there already: nothing is measured, its tables are printed, and drawn with --plot"""
    plot: Path | None = None
    """PNG file for efficiency against step duration; needs matplotlib"""


# ---- In the actors ----
class Sleeping(gym.Env):
    """Steps last reset's options["duration"] seconds, asleep; its episodes never end.

    What a sleep lasts too long is taken off the next one, up to TIMER_ERROR: that much the clock's interrupt and waking
    up need. Later than that, the actor had no core.
    """

    action_space = gym.spaces.Discrete(2)

    def __init__(self, observation_size: int):
        self.observation_space = gym.spaces.Box(-1, 1, (observation_size,), np.float32)
        self.observation, self.duration = np.zeros(observation_size, np.float32), 0.0
        self.begin()

    def begin(self) -> None:
        self.seconds, self.count = 0.0, 0  # of all steps since the last reset
        self.owed, self.late = 0.0, 0.0  # seconds: to take off the next sleep, and by which all sleeps were too long

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        super().reset(seed=seed)
        self.duration = (options or {}).get("duration", self.duration)
        self.begin()
        return self.observation, {}

    def step(self, action: int):
        asked, started = max(0.0, self.duration - self.owed), time.perf_counter()
        time.sleep(asked)
        lasted = time.perf_counter() - started
        self.seconds, self.count, self.late = self.seconds + lasted, self.count + 1, self.late + lasted - asked
        self.owed = min(TIMER_ERROR, self.owed + lasted - self.duration)
        return self.observation, 0.0, False, False, {}


FIRST_ACTION = np.zeros(1, np.int64)


def act(observations: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    return FIRST_ACTION  # an actor has one environment


def steps_of(actor: object) -> tuple[float, float, int]:
    """Since an actor's last reset: seconds that its steps lasted, seconds that its sleeps were too long, and steps."""
    return tuple(sum(getattr(env, name) for env in actor.envs) for name in ("seconds", "late", "count"))


def memory_of(actor: object, modules: Sequence[str] = ()) -> dict[str, int]:
    """Bytes of an actor's process once it has imported the modules: resident, and with shared pages divided."""
    for name in modules:
        importlib.import_module(name)
    gc.collect()
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    kilobytes = {key: int(value) for key, value, *_ in (line.replace(":", "").split() for line in lines)}
    return {"rss": kilobytes["Rss"] * 1024, "pss": kilobytes["Pss"] * 1024}


# ---- Measuring ----
def busy_seconds() -> float:
    """On Linux, seconds that this machine's cores have worked since it was started, for whomever; else none."""
    if sys.platform != "linux":
        return 0.0
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def sending(envs: RayVectorEnv, steps: int, mode: str) -> Iterator[Callable[[], None]]:
    """What starts a rollout of so many steps, for `envs.receive`."""
    if mode != GRAPH:
        yield partial(envs.send, act, steps)
        return
    from ray.dag import DAGContext, InputNode, MultiOutputNode

    envs.rollout(act, 1)  # the actors go on with this policy
    DAGContext.get_current().get_timeout = 600  # seconds
    with held_signals(), InputNode() as given:
        graph = MultiOutputNode([actor.rollout.bind(given) for actor in envs.actors]).experimental_compile()
    try:
        yield lambda: envs._pending.append((graph.execute(steps), steps, None))
    finally:
        envs._steps = steps  # of the actors' last call
        with held_signals():
            graph.teardown()


def measure(envs: RayVectorEnv, duration: float, steps: int, mode: str, seconds: float) -> dict:
    """At least 3 rounds, and `seconds` of them, after one that is not counted.

    Rounds that are under way at the end are not counted either, so that the driver has as many calls to make as to
    receive in those that are.
    """
    envs.reset(options={"duration": duration})
    in_flight = MODES.get(mode, 1)
    with sending(envs, steps, mode) as send:
        for _ in range(in_flight):
            send()
        envs.receive()
        started, cpu, busy, rounds = time.perf_counter(), time.process_time(), busy_seconds(), 0
        while rounds < 3 or time.perf_counter() - started < seconds:
            send()
            envs.receive()
            rounds += 1
        elapsed, cpu, busy = time.perf_counter() - started, time.process_time() - cpu, busy_seconds() - busy
        for _ in range(in_flight - 1):
            envs.receive()
    sps = rounds * steps * envs.num_envs / elapsed
    figures = {"rounds": rounds, "seconds": round(elapsed, 4), "round_seconds": elapsed / rounds, "sps": round(sps, 3)}
    figures["cores_busy"] = round(min(1.0, busy / elapsed / os.cpu_count()), 3)  # the clock of /proc/stat is coarse
    return figures | {"driver_cpu_per_call": cpu / rounds / len(envs.actors)}


def mean_step(envs: RayVectorEnv) -> dict[str, float]:
    """Mean seconds that a step has lasted since the last reset, and by which its sleep was too long."""
    import ray

    seconds, late, counts = zip(*ray.get([actor.__ray_call__.remote(steps_of) for actor in envs.actors]))
    return {"step_seconds": sum(seconds) / sum(counts), "late_seconds": sum(late) / sum(counts)}


def memory(envs: RayVectorEnv) -> dict:
    """Median bytes of the actors' processes, and those of one that has imported torch as well."""
    import ray

    every = ray.get([actor.__ray_call__.remote(memory_of) for actor in envs.actors])
    figures = {key: int(statistics.median(each[key] for each in every)) for key in ("rss", "pss")}
    if importlib.util.find_spec("torch"):
        with_torch = ray.get(envs.actors[0].__ray_call__.remote(memory_of, ("torch",)))
        figures |= {f"{key}_with_torch": value for key, value in with_torch.items()}
    return figures


@dataclass(frozen=True)
class Cluster:
    """What Ray is made to have."""

    kind: str
    """measured or simulated"""
    nodes: int
    actors: int

    def about(self) -> dict:
        return vars(self).copy()


def plan(args: Args) -> list[Cluster]:
    clusters = [Cluster("measured", 1, args.actors)] if args.actors else []
    return clusters + [Cluster("simulated", n, n * args.cores_per_node) for n in dict.fromkeys(args.nodes)]


def cells_of(args: Args, repeat: int = 1, modes: Sequence[str] = tuple(MODES)) -> list[tuple[float, int, str]]:
    """The (duration, steps, mode) that are short enough; each time the other mode comes first."""
    durations, steps = sorted(set(args.durations), reverse=True), sorted(set(args.steps))
    pairs = [(d, k) for d in durations for k in steps if k * d <= args.limit_seconds * (1 + 1e-9)]
    return [(d, k, mode) for d, k in pairs for mode in modes[:: 1 if repeat % 2 else -1]]


def passes_of(args: Args) -> list[tuple[Cluster, Sequence[str]]]:
    """Each cluster with the modes that are measured in it; compiled graphs have actors of their own, as they weigh down
    what has them (each imports torch)."""
    passes = [(cluster, tuple(MODES)) for cluster in plan(args)]
    graphs = [(cluster, (GRAPH,)) for cluster in plan(args) if args.compiled_graphs and cluster.kind == "measured"]
    return passes + graphs


def measure_all(args: Args, result: dict, output: Path) -> None:
    """Measures each cell of each cluster, turn by turn, into `result["runs"]`."""
    for cluster, modes in passes_of(args):
        started = time.perf_counter()
        nodes = f"{cluster.nodes} node{'s' * (cluster.nodes > 1)}"
        print(f"{cluster.kind}: {cluster.actors} actors, {nodes}: ", end="", flush=True)
        with running_ray(cluster.actors // cluster.nodes, cluster.nodes):
            envs = RayVectorEnv([partial(Sleeping, args.observation_size)] * cluster.actors)
            print(f"started in {time.perf_counter() - started:.0f} s", flush=True)
            try:
                for repeat in range(1, args.repeats + 1):
                    for duration, steps, mode in cells_of(args, repeat, modes):
                        load = round(os.getloadavg()[0], 2)
                        run = cluster.about() | {"duration": duration, "steps": steps, "mode": mode, "repeat": repeat}
                        run |= {"load_before": load} | measure(envs, duration, steps, mode, args.seconds)
                        run |= mean_step(envs) | {"status": "finished"}
                        result["runs"].append(run)
                        write(result, output)
                        share = run["sps"] * duration / cluster.actors
                        about = f"{repeat} of {args.repeats}: {duration:g} s, K = {steps:,}, {mode}"
                        saturated = ", saturated" if run["cores_busy"] > SATURATED else ""
                        print(f"{about}: {show(run['sps'], 0)} steps/s, {share:.1%}{saturated}", flush=True)
                if sys.platform == "linux" and GRAPH not in modes:
                    result["memory"].append(cluster.about() | memory(envs))
                    write(result, output)
            except (ImportError, AttributeError) as error:
                if GRAPH not in modes:
                    raise
                result["no_graph"] = describe(error)
                print(f"compiled graphs: n/a, {result['no_graph']}", flush=True)
                write(result, output)
            finally:
                envs.close()


# ---- Model ----
def round_seconds(mode: str, actors: int, duration: float, steps: int, cost: float, overhead: float) -> float:
    """What the model says that a round of a call of each actor takes."""
    work, calls = steps * (duration + overhead), actors * cost
    return work + calls if mode == "lockstep" else max(work, calls)


def efficiency(mode: str, actors: int, duration: float, steps: int, cost: float, overhead: float) -> float:
    return steps * duration / round_seconds(mode, actors, duration, steps, cost, overhead)


def least_squares(columns: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Factors of the two columns, none negative, whose sum comes nearest to the target."""
    found = [np.zeros(2)]
    for keep in ([0, 1], [0], [1]):
        factors = np.zeros(2)
        factors[keep] = np.linalg.lstsq(columns[:, keep], target, rcond=None)[0]
        found += [factors] if (factors >= 0).all() else []
    return min(found, key=lambda factors: np.square(columns @ factors - target).sum())


def fit(lines: Sequence[Mapping]) -> dict | None:
    """Cost of a call and overhead of a step, in seconds, of cells of one mode or both, and the model's relative errors:
    their RMS, that of the cells below 95 % efficiency (None without any), and the largest. None of few cells.

    The squares of (model - measured) / measured are the least. Double-buffered a round takes as long as either its
    calls or its steps, so that each cell tells of one of the two: the cells with the most calls for their sleep of the
    calls, and how many those are, the least squares say as well.
    """
    if len(lines) < 3:
        return None
    seconds = np.array([line["round_seconds"] for line in lines])
    calls, steps = (np.array([line[key] for line in lines]) / seconds for key in ("actors", "steps"))
    asleep = steps * [line["duration"] for line in lines]  # the efficiency
    is_lockstep = np.array([line["mode"] == "lockstep" for line in lines])
    order, found = np.argsort(np.where(is_lockstep, -1.0, calls / asleep)), []
    for count in range(np.count_nonzero(~is_lockstep) + 1):
        has_calls, has_steps = is_lockstep.copy(), np.ones_like(is_lockstep)
        has_calls[order[len(lines) - count :]], has_steps[order[len(lines) - count :]] = True, False
        columns = np.stack([has_calls * calls, has_steps * steps], 1)
        found.append(least_squares(columns, 1 - has_steps * asleep))

    def errors(cost: float, overhead: float) -> np.ndarray:
        work = asleep + steps * overhead
        return np.where(is_lockstep, work + calls * cost, np.maximum(work, calls * cost)) - 1

    cost, overhead = min(found, key=lambda factors: np.square(errors(*factors)).sum())
    squares = np.square(errors(cost, overhead))
    modes = {line["mode"] for line in lines}
    about = {key: lines[0][key] for key in ("kind", "nodes", "actors")}
    about |= {"mode": "both" if len(modes) > 1 else modes.pop(), "cells": len(lines)}
    about |= {"cost_per_call": float(cost), "overhead_per_step": float(overhead), "rms": float(squares.mean() ** 0.5)}
    below = squares[asleep < 0.95]
    return about | {
        "rms_below_95": float(below.mean() ** 0.5) if len(below) else None,
        "largest_error": float(squares.max() ** 0.5),
    }


# ---- Lines ----
KEYS = ("kind", "nodes", "actors", "duration", "steps", "mode")


def summarise(runs: Sequence[Mapping]) -> list[dict]:
    """One line a cell: medians over its turns."""
    lines = []
    for cell in dict.fromkeys(tuple(run[key] for key in KEYS) for run in runs):
        own = [run for run in runs if tuple(run[key] for key in KEYS) == cell]
        line = dict(zip(KEYS, cell)) | {"runs": len(own), "sps": median([run["sps"] for run in own], 3)}
        line["round_seconds"] = line["actors"] * line["steps"] / line["sps"]
        line["sps_per_core"] = line["sps"] / line["actors"]
        line["efficiency"] = line["sps_per_core"] * line["duration"]
        shares = [run["sps"] * line["duration"] / line["actors"] for run in own]
        line |= {"efficiency_min": min(shares), "efficiency_max": max(shares)}
        for key in ("driver_cpu_per_call", "step_seconds", "late_seconds", "cores_busy"):
            line[key] = statistics.median(run[key] for run in own)
        lines.append(line)
    return lines


def fits_of(lines: Sequence[Mapping]) -> list[dict]:
    """The model's parameters for each cluster and mode with enough cells that are not saturated, and for both modes."""
    fits = []
    for cluster in dict.fromkeys((line["kind"], line["nodes"], line["actors"]) for line in lines):
        own = [line for line in lines if (line["kind"], line["nodes"], line["actors"]) == cluster]
        # The busier ones show what the machine can't do, and a compiled graph has no tasks
        own = [line for line in own if line["cores_busy"] <= SATURATED and line["mode"] in MODES]
        groups = [[line for line in own if line["mode"] == mode] for mode in MODES]
        for group in [*groups, own] if all(groups) else groups:
            if found := fit(group):
                cpu = statistics.median(line["driver_cpu_per_call"] for line in group)
                fits.append(found | {"driver_cpu_per_call": cpu})
    return fits


def write(result: dict, path: Path) -> None:
    lines = summarise(result["runs"])
    result["fits"] = fits_of(lines)
    save(result, path, lines)


# ---- Tables: each a header and rows ----
Table = tuple[list[str], list[list[str]]]


def percent(share: float | None) -> str:
    """With a digit after the point near the ends, where it tells something."""
    return "" if share is None else f"{share:.1%}" if share < 0.1 or share >= 0.985 else f"{share:.0%}"


def microseconds(seconds: float) -> str:
    return show(seconds * 1e6, 0 if seconds >= 1e-5 else 1)


def scaling_table(result: Mapping) -> Table:
    """Each cell that was measured: how long steps lasted, by how much sleeps were too long, and what came of it."""
    by_cell = {}
    for line in result["medians"]:
        by_cell.setdefault(tuple(line[key] for key in KEYS[:-1]), {})[line["mode"]] = line
    header = ["", "nodes", "actors", "step, s", "K", "steps last, ms", "sleeps late by, µs"]
    every = [*MODES, GRAPH] if any(GRAPH in modes for modes in by_cell.values()) else [*MODES]
    for mode in every:
        header += [f"{mode}: SPS", "SPS per core", "efficiency"]
    rows = []
    for (kind, nodes, actors, duration, steps), modes in by_cell.items():
        own = [modes[mode] for mode in MODES if mode in modes] or [*modes.values()]  # a graph's cells are apart
        lasted, late = (statistics.fmean(line[key] for line in own) for key in ("step_seconds", "late_seconds"))
        rows.append([kind, str(nodes), str(actors), f"{duration:g}", f"{steps:,}", show(lasted * 1e3)])
        rows[-1].append(microseconds(late))
        for mode in every:
            if line := modes.get(mode):
                share = percent(line["efficiency"]) + "†" * (line["cores_busy"] > SATURATED)
                rows[-1] += [show(line["sps"], 0), show(line["sps_per_core"], 1), share]
            else:
                rows[-1] += [""] * 3
    return [*header, "double-buffered / lockstep"], [
        [*row, show(modes["double-buffered"]["sps"] / modes["lockstep"]["sps"]) if modes.keys() >= {*MODES} else ""]
        for row, modes in zip(rows, by_cell.values())
    ]


def tells_of_calls(found: Mapping, lines: Sequence[Mapping]) -> bool:
    """Whether the cost of a call was seen: in lockstep it always is, double-buffered where calls take longest, which
    one cell alone can't show."""
    own = [line for line in lines if all(line[key] == found[key] for key in ("kind", "nodes", "actors", "mode"))]
    cost, overhead = found["cost_per_call"], found["overhead_per_step"]
    bound = [line["actors"] * cost >= 0.999 * line["steps"] * (line["duration"] + overhead) for line in own
             if line["cores_busy"] <= SATURATED]  # fmt: skip
    return found["mode"] != "double-buffered" or sum(bound) > 1


def fit_table(result: Mapping) -> Table:
    """The cost of a call, the overhead of a step, how well they fit; and an actor's memory."""
    memory = {(each["kind"], each["nodes"], each["actors"]): each for each in result["memory"]}
    header = ["", "nodes", "actors", "mode", "cost c of a call, µs", "the driver's CPU, µs", "overhead s of a step, µs"]
    header += ["RMS error", "below 95 %", "largest", "cells", "memory of an actor, MB", "shared pages divided, MB"]
    header += ["with torch, MB", "shared pages divided, MB"]
    rows = []
    for found in result["fits"]:
        rows.append([found["kind"], str(found["nodes"]), str(found["actors"]), found["mode"]])
        rows[-1] += [microseconds(found[key]) for key in ("cost_per_call", "driver_cpu_per_call", "overhead_per_step")]
        if not tells_of_calls(found, result["medians"]):
            rows[-1][4] = "not seen"
        errors = [found[key] for key in ("rms", "rms_below_95", "largest_error")]
        rows[-1] += ["" if error is None else f"{error:.1%}" for error in errors] + [str(found["cells"])]
        own = memory.get((found["kind"], found["nodes"], found["actors"]), {})
        for key in ("rss", "pss", "rss_with_torch", "pss_with_torch"):
            rows[-1].append(show(own[key] / 1e6, 0) if key in own else "")
    return header, rows


def model_fit(result: Mapping) -> Mapping | None:
    """The parameters that nodes are modelled with, of both modes at once: measured ones, else of the fewest nodes.

    Double-buffered, few cells tell what a call costs, and each of them takes longer than its calls alone.
    """
    found = [fit for fit in result["fits"] if fit["mode"] == "both"]
    return min(found, key=lambda fit: (fit["kind"] != "measured", fit["nodes"]), default=None)


def published_rows() -> list[dict]:
    """The 20 rows of the issue: cores, step duration in seconds, efficiency."""
    return json.loads(PUBLISHED.read_text())["rows"]


def nodes_table(result: Mapping) -> Table | None:
    """The rows of the issue beside what the model, and where there is one the simulation, says of the same cluster."""
    found, rows = model_fit(result), []
    if found is None:
        return None
    columns = [(mode, steps) for mode in MODES for steps in result["settings"]["steps"]]
    simulated = {
        tuple(line[key] for key in ("actors", "duration", "mode", "steps")): line["efficiency"]
        for line in result["medians"]
        if line["kind"] == "simulated"
    }
    for row in published_rows():
        cores, duration = row["cores"], row["duration"]
        rows.append([str(cores // 48), f"{cores:,}", f"{duration:g}", f"{cores / duration:,.0f}"])
        rows[-1].append(f"{row['efficiency']:.0%}")
        for mode, steps in columns:
            share = efficiency(mode, cores, duration, steps, found["cost_per_call"], found["overhead_per_step"])
            own = simulated.get((cores, duration, mode, steps))
            rows[-1].append(percent(share) + (f" ({percent(own)})" if own is not None else ""))
    header = ["nodes", "cores", "step, s", "SPS at 100%", "the issue's, measured"]
    return [*header, *(f"{mode}, K = {steps:,}" for mode, steps in columns)], rows


def tables_of(result: Mapping) -> dict[str, Table]:
    tables = {"ray_scaling": scaling_table(result), "ray_fit": fit_table(result), "ray_nodes": nodes_table(result)}
    return {name: table for name, table in tables.items() if table and table[1]}


TEXT_COLUMNS = {"ray_scaling": 1, "ray_fit": 1, "ray_nodes": 0}  # columns of words, which stand left
TITLES = {
    "ray_scaling": "measured, and simulated on this machine",
    "ray_fit": "the model's parameters, and memory",
    "ray_nodes": "the issue's clusters: as published, and modelled (in brackets simulated) here",
}
CAPTIONS = {
    "ray_scaling": "Medians of {turns}. SPS: steps/s of all actors; efficiency: SPS × step / actors, with the step that"
    " was asked for, not the one that it lasted; core: one sleeping actor. Steps sleep, on Linux without the 50 µs of"
    " timer slack (PR_SET_TIMERSLACK); what a sleep is late by, up to 100 µs, is taken off the next. Measured: one Ray"
    " node; simulated: several nodes, all of them on one machine, without a network. †: the machine's own cores were"
    " more than 90 % busy.",
    "ray_fit": "Fitted to the cells of the table above without †. A round of a call of each of A actors takes"
    " K · (d + s) + A · c in lockstep, and max(K · (d + s), A · c) double-buffered. Errors of the model, relative to"
    " what was measured: RMS over all cells, over those below 95 % efficiency, and the largest. Not seen: double-"
    "buffered, fewer than two cells took as long as their calls. The driver's CPU: median of what a call took of it."
    " Memory: medians of the actors' processes.",
    "ray_nodes": "Of the issue as published; all others are modelled with the parameters of both modes above, those in"
    " brackets simulated on one machine: without a network. A cell's SPS is its share of those at 100%, SPS per core"
    " of 1 / step. Core: one sleeping actor.",
}


def print_result(result: Mapping) -> None:
    for name, (header, rows) in tables_of(result).items():
        print(f"{TITLES[name]}:")
        print_table([header, *rows], left=TEXT_COLUMNS[name])
        print()


# ---- Picture ----
def plot(result: Mapping, output: Path) -> None:
    """Draws efficiency against step duration: the issue's 20 rows, and beside them those of each cluster here."""
    from matplotlib.figure import Figure

    lines = result["medians"]
    clusters = list(dict.fromkeys((line["kind"], line["nodes"], line["actors"]) for line in lines))
    if not lines:
        fail("--plot: the result has no cell")
    figure = Figure(figsize=(4.4 * (1 + len(clusters)), 5.4), layout="constrained")
    panels = figure.subplots(1, 1 + len(clusters), sharex=True, sharey=True)
    cores = list(dict.fromkeys(row["cores"] for row in published_rows()))
    for number, count in enumerate(cores):
        points = [(row["duration"], 100 * row["efficiency"]) for row in published_rows() if row["cores"] == count]
        shade = str(0.15 + 0.65 * number / max(1, len(cores) - 1))
        panels[0].plot(*zip(*points), color=shade, marker="s", markersize=5, label=f"{count:,} cores")
    panels[0].set_title("Tianshou's issue 1172:\none step a call, published", loc="left", fontsize=12)
    steps = sorted({line["steps"] for line in lines})
    for axes, (kind, nodes, actors) in zip(panels[1:], clusters):
        for count, colour in zip(steps, COLOURS * len(steps)):
            for mode, style in zip(MODES, ("-", "--")):
                points = sorted(
                    (line["duration"], 100 * line["efficiency"])
                    for line in lines
                    if (line["kind"], line["nodes"], line["actors"]) == (kind, nodes, actors)
                    and (line["steps"], line["mode"]) == (count, mode)
                )
                if points:
                    label = f"K = {count:,}" + ("" if mode == "lockstep" else f", {mode}")
                    look = {"color": colour, "linestyle": style, "marker": "o" if mode == "lockstep" else "^"}
                    axes.plot(*zip(*points), label=label, linewidth=1.8, markersize=5, **look)
        where = f"{nodes} nodes on one machine" if nodes > 1 else "one node"
        axes.set_title(f"{kind[0].upper()}{kind[1:]}:\n{actors} actors, {where}", loc="left", fontsize=12)
    for axes in panels:
        axes.set_xscale("log")
        axes.set_ylim(0, 104)
        axes.set_xlabel("step duration, s")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, frameon=False, fontsize=9)
    panels[0].set_ylabel("efficiency, %")
    host = f"{result['hardware']['cpu']}, {result['hardware']['cores']} cores"
    note = f"sleeping environments, one to an actor; {host}; Ray {result['versions']['ray']}"
    figure.suptitle(note, fontsize=10, x=0.01, ha="left")
    figure.savefig(output, dpi=150, metadata={"Software": None})
    print(f"efficiency against step duration: {scrub(str(output))}")


# ---- The benchmark ----
def check_args(args: Args) -> None:
    for name, least in (("actors", 0), ("cores_per_node", 1), ("observation_size", 1), ("repeats", 1)):
        if getattr(args, name) < least:
            fail(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least {least}")
    check_seconds(args, "seconds", "limit_seconds")
    for name, least in (("nodes", 2), ("steps", 1)):
        for value in getattr(args, name):
            if value < least:
                fail(f"--{name} {value}: must be at least {least}")
    for value in args.durations:
        if not 0 < value <= 1e6:
            fail(f"--durations {value:g}: must be above 0 and at most 1e6 s")
    for name in ("durations", "steps"):
        if not getattr(args, name):
            fail(f"--{name}: must be followed by at least one value")
    if not plan(args):
        fail(f"--actors {args.actors}: must be at least 1 where --nodes has no value")
    if not cells_of(args):
        fail(f"--limit-seconds {args.limit_seconds:g}: every call of --durations and --steps takes longer")
    check_plot(args.plot)
    if args.plot is not None and not importlib.util.find_spec("matplotlib"):
        fail("--plot: needs matplotlib (pip install matplotlib)")


def check_machine(args: Args) -> None:
    """Ends the program if Ray is not there, or if so many actors can't be in memory."""
    if not importlib.util.find_spec("ray"):
        fail("needs Ray (requirements/requirements-ray.txt)")
    if sys.platform == "linux":
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        most = max(plan(args), key=lambda cluster: cluster.actors)
        needed, free = most.actors * ACTOR_BYTES, int(lines["MemAvailable"].split()[0]) * 1024
        if needed > free:
            flag = f"--actors {most.actors}" if most.kind == "measured" else f"--nodes {most.nodes}"
            gigabytes = f"{needed / 1e9:.0f} GB of memory, of which {free / 1e9:.0f} are free"
            fail(f"{flag}: {most.actors} actors need some {gigabytes}")


ENDED_BY = [signal.SIGINT]  # the newest of the signals that have ended this program


def terminate(number: int, _frame) -> NoReturn:
    """What SIGTERM does: SystemExit would become one of status 1 in Ray, whatever its own."""
    ENDED_BY.append(number)
    raise KeyboardInterrupt


def main(args: Args) -> None:
    signal.signal(signal.SIGTERM, terminate)
    if args.quick:
        for name, value in {"nodes": (), "durations": (0.01, 0.001), "repeats": 1, "seconds": 1.0}.items():
            if getattr(args, name) == getattr(Args, name):
                setattr(args, name, value)
    check_args(args)
    if args.result:
        result = read_result("--result", args.result, "ray_scaling")
        if any("late_seconds" not in run for run in result["runs"]):
            fail(f"--result {args.result}: was made by an earlier version, whose sleeps were other ones")
        print_result(result)
    else:
        check_machine(args)
        probe = {"torch": importlib.metadata.version("torch"), "threads": 1, "gpu": None}
        output = args.output or result_path("ray_scaling", "cpu", probe)
        check_output(output, "ray_scaling")
        result = new_result("ray_scaling", args, probe, "cpu") | {"fits": [], "memory": []}
        result["versions"]["ray"] = importlib.metadata.version("ray")
        result["settings"] = {key: value for key, value in result["settings"].items() if key not in ("plot", "result")}
        result["settings"]["steps"] = sorted(set(args.steps))
        warn_if_busy()
        try:
            with until_stopped(result, output, write, print_result):
                measure_all(args, result, output)
        except (RuntimeError, TimeoutError) as error:
            sys.exit(f"error: {scrub(str(error)).partition(chr(10))[0]}")
    if args.plot:
        plot(result, args.plot)


if __name__ == "__main__":
    try:
        main(command_line(Args, __doc__))
    except KeyboardInterrupt:
        sys.exit(128 + ENDED_BY[-1])
