"""Compares scripts and their variants: speed, what it costs in time, memory and cores, and what they learn meanwhile.

    python benchmarks/compare.py --quick                            two scripts, eager and compiled, in under 5 minutes
    python benchmarks/compare.py --scripts sac --num-envs 1 4 16    speed against the number of environments
    python benchmarks/compare.py --scripts ppo dqn --env-ids CartPole-v1 Acrobot-v1 --total-timesteps 500000
                                                                    learning: whole runs on two tasks
    python benchmarks/compare.py --output my.json                   goes on with my.json if it is there already
    python benchmarks/compare.py --against my.json                  measures the same again; what became slower?

An arm is a script with a variant, an environment, a number of environments and a seed; each is a fresh process. The
arms take turns: first all with the first seed, the variants side by side, then all with the second. `eager` is X.py;
`none` (without flags), `compile`, `cudagraphs` and `compile+cudagraphs` are X_torchcompile.py; `jax` is X_jax.py, where
there is one. All variants of a script do the same number of steps, on-policy at least four rollouts, and have the
defaults of X.py for what is not given. A compiled arm may find the compiler's caches empty in the first turn, and has a
longer warm-up then.

Once a second the process and all its children are sampled: the cores that they keep busy (CPU % / 100) and their
resident memory (shared pages count in each process), on CUDA also how much of the time the GPU was busy and its memory
in use (whoever uses it). The area under such a curve is what a run costs as a whole, its start and warm-up included:
core·s, GB·s, GPU·s. Each sample stands for the time since the one before it.

Figures are medians over the seeds with 95 % percentile bootstrap intervals (of fewer than five runs: with their range),
ratios are taken within a turn. The result, a JSON file, is written anew after each run. The same command with the same
--output goes on with what is missing in it, failed runs included, if scripts, packages and machine are still the same;
benchmarks/report.py makes pictures and a page of it.

--against measures the arms of a file again, on the same machine, with its settings; only more seeds may be asked for.
An arm is slower by more than the noise if an exact one-sided rank-sum test says so at 5 % after Holm's correction for
the number of arms; then the exit status is 1. So an unchanged code is called slower anywhere in at most one comparison
in 20. The more arms, the more runs that takes: 3 a side for one arm, 5 for 12 arms, 6 for 46. With fewer, the verdict
is "too few runs to tell". Noise is what differs between the runs of a file: if every arm is slower by the same factor,
so is the machine. Nothing else should run meanwhile. Needs requirements/requirements-bench.txt.
"""

import contextlib
import hashlib
import itertools
import json
import math
import os
import shlex
import signal
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

import speed
from intervals import bootstrap_interval, holm, rank_sum_p
from learning import read_columns, thin
from speed import FLAGS, WORKLOADS, command_line, fail, finished, median, now, show

try:
    import psutil
except ImportError:  # its results can be read without
    psutil = None

Variant = Literal[speed.Variant, "jax"]
VARIANTS = ["eager", *FLAGS, "jax"]
QUICK = {"dqn": 20_000, "ppo_continuous_action": 8_192}  # scripts, and their environment steps with learning
QUICK_SECONDS = 285.0
QUICK_NOTE = """This is a quick comparison: two scripts on their default tasks, whose runs last a few seconds each. It
tells how much faster the compiled versions of these two step once warm. It does not tell how other scripts fare, nor
how well anything learns; its areas are mostly start and warm-up."""
MEDIANS_NOTE = """× eager is the median of the ratios taken turn by turn; core·s, GB·s and GPU·s are areas under a
second's samples of a whole run, its start and warm-up included."""
OWN_FLAGS = (  # what --flags can't change
    *("env-id", "num-envs", "seed", "total-timesteps", "learning-starts"),
    *("compile", "cudagraphs", "cuda", "output-dir"),
)
ALPHA = 0.05  # the chance of a false alarm in all of --against
POINTS = 200  # of a curve in the result
USES = {  # what is sampled: its name, the unit of its samples, and that of the area under them
    "cpu": ("CPU", "cores in use", "core·s"),
    "memory": ("memory", "GB", "GB·s"),
    "gpu": ("GPU", "share of the time", "GPU·s"),
    "gpu_memory": ("GPU memory", "GB", "GB·s"),
}


@dataclass
class Args:
    scripts: tuple[str, ...] = ()
    """scripts to compare: names in leanrl/ without `_torchcompile` and `.py`, or their beginnings; by default all"""
    variants: tuple[Variant, ...] = ()
    """variants to compare; by default all that there are and that the device can run"""
    env_ids: tuple[str, ...] = ()
    """environments; each script's own default if not given"""
    num_envs: tuple[int, ...] = ()
    """numbers of environments stepped side by side; each script's own default if not given"""
    seeds: tuple[int, ...] = ()
    """seeds, one a turn; by default 1 to 5, with --quick 1 to 3"""
    total_timesteps: int | None = None
    """environment steps of each run, to see what is learned in them; by default chosen by script, to measure speed"""
    flags: str = ""
    """more flags for the scripts, as one string: --flags="--batch-size 128" """
    quick: bool = False
    """a small comparison, which chooses scripts, variants and lengths by itself and takes less than 5 minutes"""
    cuda: bool = True
    """measure on CUDA where there is a device, else on the CPU"""
    timeout: float = 3600.0
    """seconds after which a run is stopped and counts as failed"""
    output: Path | None = None
    """result file; if there is one it is gone on with; by default a new runs/bench/compare_DEVICE_DATE.json"""
    against: Path | None = None
    """earlier result, whose arms are measured again to see which became slower; with it only --output and --seeds"""


class Arm(NamedTuple):
    script: str
    env_id: str
    num_envs: int
    variant: str
    seed: int

    def __str__(self) -> str:
        return f"{self.script} {self.variant}, {self.env_id} × {self.num_envs}, seed {self.seed}"


def arm_of(run: dict) -> Arm:
    return Arm(*(run[key] for key in Arm._fields))


# ---- Sampling ----
def area(seconds: Sequence[float], values: Sequence[float], end: float) -> float:
    """Area under samples that each stand for the time since the one before, the last also for that until `end`."""
    if not seconds:
        return 0.0
    return float(np.dot(np.diff(seconds, prepend=0.0), values) + (end - seconds[-1]) * values[-1])


def open_gpu() -> object | None:
    """What NVML calls the GPU that a script takes; None without a GPU, its driver or nvidia-ml-py."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0] or "0"
    try:
        import pynvml

        pynvml.nvmlInit()
        by = pynvml.nvmlDeviceGetHandleByIndex if first.isdigit() else pynvml.nvmlDeviceGetHandleByUUID
        return by(int(first) if first.isdigit() else first)
    except ImportError:
        return None
    except pynvml.NVMLError:
        return None


def gpu_use(gpu: object) -> dict[str, float]:
    """What NVML can tell of a GPU: a part of one (MIG) has no utilisation."""
    import pynvml

    use = {}
    with contextlib.suppress(pynvml.NVMLError):
        use["gpu"] = pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100
    with contextlib.suppress(pynvml.NVMLError):
        use["gpu_memory"] = pynvml.nvmlDeviceGetMemoryInfo(gpu).used / 1e9
    return use


class Sampler:
    """Samples what a process and all its descendants use, and the GPU if there is one, while a context is entered."""

    def __init__(self, gpu: object | None, interval: float = 1.0):
        self.gpu, self.interval, self.samples, self.end = gpu, interval, [], 0.0

    @contextlib.contextmanager
    def during(self, pid: int) -> Iterator[None]:
        self.started, is_over = time.perf_counter(), threading.Event()
        thread = threading.Thread(target=self.sample, args=(pid, is_over), daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()
            self.end = time.perf_counter() - self.started

    def sample(self, pid: int, is_over: threading.Event) -> None:
        seconds_before, cpu_before = 0.0, 0.0
        with contextlib.suppress(psutil.Error):  # it has ended
            root = psutil.Process(pid)
            while not is_over.wait(self.interval):
                seconds, cpu, memory = time.perf_counter() - self.started, 0.0, 0
                try:
                    for process in (root, *root.children(recursive=True)):
                        with process.oneshot():
                            # User's and system's time, its own and that of the children which it has waited for
                            cpu += sum(process.cpu_times()[:4])
                            memory += process.memory_info().rss
                except psutil.NoSuchProcess:  # it ended after its parent was read: its time would be in neither
                    continue
                if not memory:  # nobody has waited for it yet
                    return
                # A child that nobody waited for takes its time with it
                use = {"cpu": max(cpu - cpu_before, 0) / (seconds - seconds_before), "memory": memory / 1e9}
                self.samples.append({"seconds": seconds} | use | (gpu_use(self.gpu) if self.gpu else {}))
                seconds_before, cpu_before = seconds, cpu

    def record(self) -> dict:
        """The curves, at `POINTS` points at most, and the areas under all of their points."""
        names = list(self.samples[0]) if self.samples else []
        columns = {name: [round(sample.get(name, 0.0), 4) for sample in self.samples] for name in names}
        areas = {name: round(area(columns["seconds"], columns[name], self.end), 3) for name in names[1:]}
        return {"use": thin(columns, POINTS), "areas": areas}


# ---- One run ----
def curve_of(folder: Path) -> dict:
    """What a run folder's metrics.jsonl tells of returns, at `POINTS` points at most."""
    metrics, names = read_columns(folder / "metrics.jsonl"), ("global_step", "wall_time", "episode_return")
    return {"curve": thin({name: metrics.get(name, []) for name in names}, POINTS)}


def flags_of(args: Args, device: str, arm: Arm) -> list[str]:
    """The flags of a run: as many steps for every variant, so that their areas are those of the same work."""
    workload = WORKLOADS[arm.script]
    steps = QUICK[arm.script] if args.quick else workload.steps("cudagraphs", device)
    flags = [*FLAGS.get(arm.variant, []), "--env-id", arm.env_id, "--num-envs", str(arm.num_envs)]
    flags += ["--seed", str(arm.seed), *(["--no-cuda"] if device == "cpu" else [])]
    if args.total_timesteps is None:
        lengths = speed.whole_lengths(arm.script, steps, arm.num_envs, args.flags)
        return [*flags, *speed.lengths(arm.script, *lengths), *shlex.split(args.flags)]
    return [*flags, "--total-timesteps", str(args.total_timesteps), *shlex.split(args.flags)]


def measure(args: Args, device: str, arm: Arm, timeout: float, gpu: object | None) -> dict:
    sampler, name = Sampler(gpu), speed.script_of(arm.script, arm.variant)
    flags = flags_of(args, device, arm)
    record = speed.run_script(name, flags, timeout, watch=sampler.during, collect=curve_of)
    return arm._asdict() | record | (sampler.record() if record["status"] == "finished" else {})


# ---- All runs ----
def plan_of(args: Args, device: str) -> list[Arm]:
    """The arms in the order in which they run; ends the program if a variant that was asked for is none of a script."""
    scripts = speed.find_scripts(args.scripts or list(WORKLOADS))
    variants = list(dict.fromkeys(args.variants)) or [*speed.possible_variants(device), "jax"]

    def exists(script: str, variant: str) -> bool:
        return (speed.SCRIPTS / f"{speed.script_of(script, variant)}.py").is_file()

    for variant in args.variants:
        if not any(exists(script, variant) for script in scripts):
            fail(f"--variants {variant}: there is no leanrl/{speed.script_of(scripts[0], variant)}.py")
    defaults = {script: speed.defaults_of(script) for script in scripts}
    return [
        Arm(script, env_id, num_envs, variant, seed)
        for seed in dict.fromkeys(args.seeds)
        for script in scripts
        for env_id in dict.fromkeys(args.env_ids or (defaults[script]["env_id"],))
        for num_envs in dict.fromkeys(args.num_envs or (defaults[script]["num_envs"],))
        for variant in variants
        if exists(script, variant)
    ]


def code_of(plan: Sequence[Arm]) -> dict[str, str]:
    """What tells the versions of the scripts apart: the beginnings of their hashes."""
    names = [f"{speed.script_of(arm.script, arm.variant)}.py" for arm in plan]
    return {name: hashlib.sha256((speed.SCRIPTS / name).read_bytes()).hexdigest()[:12] for name in dict.fromkeys(names)}


def expected_seconds(arm: Arm, runs: Sequence[dict]) -> float | None:
    """How long the finished runs took that differ in the seed only, else how long all took; None before the first."""
    runs = finished(runs)
    same = [run for run in runs if arm_of(run)[:4] == arm[:4]] or runs
    return statistics.fmean(run["process_seconds"] for run in same) if same else None


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def measure_all(args: Args, plan: Sequence[Arm], result: dict, output: Path, gpu: object | None) -> None:
    """Measures the arms that the result lacks; with --quick, those that can be expected to end in time."""
    deadline = time.perf_counter() + (QUICK_SECONDS if args.quick else math.inf)
    runs, resumed = result["runs"], [now()] if result["runs"] else []
    runs[:] = finished(runs)  # what has failed is tried again
    measured = set(map(arm_of, runs))
    waiting = [arm for arm in plan if arm not in measured]
    if runs:
        print(f"going on: {len(runs)} of {len(plan)} runs are there already", flush=True)
    while waiting:
        arm, expected = waiting[0], [expected_seconds(arm, runs) for arm in waiting]
        left = deadline - time.perf_counter()
        if left < (expected[0] or 0) + 20:  # a compiler's cache that is empty may add as much
            print(f"out of time: {len(waiting)} of {len(plan)} runs are left out", flush=True)
            break
        rest = f" (about {duration(sum(expected))} left)" if None not in expected else ""
        print(f"[{len(plan) - len(waiting) + 1}/{len(plan)}] {arm}{rest}: ", end="", flush=True)
        result["ended"] = None
        runs.append(measure(args, result["device"], arm, min(args.timeout, left), gpu))
        waiting.pop(0)
        if resumed:
            result["resumed"] = [*result.get("resumed", []), resumed.pop()]
        write(result, output)
        outcome = f"failed: {runs[-1].get('reason')}"
        if runs[-1]["status"] == "finished":
            outcome = f"{show(runs[-1]['summary']['fps'], 1)} steps/s"
        print(f"{outcome} ({runs[-1]['process_seconds']:.0f} s)", flush=True)
    result["left_out"] = len(waiting)


# ---- Medians ----
def groups_of(runs: Sequence[dict]) -> dict[tuple, list[dict]]:
    """The runs that differ in the seed only, by (script, env_id, num_envs, variant), the variants in their order."""
    groups = {}
    for run in runs:
        groups.setdefault(arm_of(run)[:4], []).append(run)
    tasks = list(dict.fromkeys(key[:3] for key in groups))
    return {key: groups[key] for key in sorted(groups, key=lambda k: (tasks.index(k[:3]), VARIANTS.index(k[3])))}


def speeds(runs: Sequence[dict]) -> dict[int, float]:
    """fps of the finished runs by seed."""
    return {run["seed"]: run["summary"]["fps"] for run in finished(runs) if run["summary"]["fps"]}


def with_interval(name: str, values: Sequence[float], digits: int) -> dict:
    """The median, and its interval if there are several values."""
    interval = [round(float(end), digits) for end in bootstrap_interval(values, np.median)] if len(values) > 1 else None
    return {name: median(values, digits), f"{name}_interval": interval}


def summarise(runs: Sequence[dict]) -> list[dict]:
    """One line for all seeds of an arm: medians over its finished runs, with 95 % intervals of fps and of the ratio.

    `times_eager` is the median of the ratios taken turn by turn (seed by seed); the areas are those under the samples.
    """
    lines, groups = [], groups_of(runs)
    for key, group in groups.items():
        fps, own = speeds(group), finished(group)
        eager = speeds(groups.get((*key[:3], "eager"), []))
        failures = [run["reason"] for run in group if run["status"] == "failed"]
        line = dict(zip(Arm._fields, key)) | {"runs": len(own), "failed": len(failures)}
        line["reason"] = failures[-1] if failures else None
        line |= with_interval("fps", list(fps.values()), 2)
        line |= with_interval("times_eager", [fps[seed] / eager[seed] for seed in fps if seed in eager], 4)
        for name, digits in (("warmup_seconds", 3), ("peak_memory_bytes", None)):
            line[name] = median([run["summary"][name] for run in own], digits)
        line["process_seconds"] = median([run["process_seconds"] for run in own], 2)
        lines.append(line | {"areas": {use: median([run["areas"].get(use) for run in own], 3) for use in USES}})
    return lines


def interval(ends: Sequence[float] | None, digits: int) -> str:
    return "-" if ends is None else f"{show(ends[0], digits)}–{show(ends[1], digits)}"


def spread(lines: Sequence[dict]) -> str:
    """What the intervals of these medians are called."""
    return "95 % interval" if max((line["runs"] for line in lines), default=0) >= 5 else "range"


def table(result: dict) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the medians; the first three columns are words."""
    lines = result["medians"]
    uses = [use for use in USES if any(line["areas"][use] is not None for line in lines)]
    header = ["script", "variant", "environment", "envs", "runs", "steps/s", spread(lines), "× eager"]
    header += [spread(lines), "warm-up, s", *(f"{USES[use][0]}, {USES[use][2]}" for use in uses)]
    rows = []
    for line in lines:
        digits = 0 if (line["fps"] or 0) >= 100 else 1
        row = [line["script"], line["variant"], line["env_id"], str(line["num_envs"])]
        row += [f"{line['runs']}, {line['failed']} failed" if line["failed"] else str(line["runs"])]
        row += [show(line["fps"], digits), interval(line["fps_interval"], digits)]
        row += [show(line["times_eager"]), interval(line["times_eager_interval"], 2), show(line["warmup_seconds"], 1)]
        rows.append(row + [show(line["areas"][use], 1) for use in uses])
    return header, rows


def failures_of(result: dict) -> list[str]:
    """A sentence for each failed run."""
    return [f"{arm_of(run)} failed: {run['reason']}" for run in result["runs"] if run["status"] == "failed"]


def notes_of(result: dict) -> list[str]:
    """What has to be known to read the table: what its figures are, what failed, and what a quick comparison is not."""
    counts = sorted({line["runs"] for line in result["medians"] if line["runs"]}) or [0]
    each = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1])))) + f" run{'s' * (counts[-1] != 1)}"
    what = "95 % bootstrap intervals" + " (of fewer than five runs, their range)" * (counts[0] < 5)
    if counts[-1] < 5:
        what = "their range, as an interval of 95 % takes five" if counts[-1] > 1 else "no interval"
    notes = [f"Medians of {each}, one a seed, with {what}.", " ".join(MEDIANS_NOTE.split()), *failures_of(result)]
    if left_out := result.get("left_out", 0):
        notes.append(f"{left_out} runs are left out: they were not expected to end in time.")
    load, cores = max((run.get("load_before", 0) for run in result["runs"]), default=0), result["hardware"]["cores"]
    if load > cores:
        notes.append(f"The machine was not quiet: the load before a run was up to {load:.1f}, with {cores} cores.")
    return notes + ([" ".join(QUICK_NOTE.split())] if result["settings"].get("quick") else [])


def print_result(result: dict) -> None:
    header, rows = table(result)
    speed.print_table([header, *rows], left=3)
    print("\n".join(notes_of(result)))


def write(result: dict, path: Path) -> None:
    speed.save(result, path, summarise(result["runs"]), indent=None)


# ---- Earlier results ----
def load_comparison(flag: str, path: Path) -> dict:
    """The result in a file, with its medians made anew; ends the program if there is none."""
    result = speed.read_result(flag, path, "compare")
    try:
        return result | {"medians": summarise(result["runs"])}
    except (KeyError, TypeError, ValueError) as error:
        fail(f"{flag} {path}: is a damaged result file of compare.py ({type(error).__name__}: {error})")


def differences(old: dict, new: dict, *parts: str) -> list[str]:
    """What two results have different in their `parts`: settings, hardware, versions or code."""
    found = []
    for part in parts:
        before, after = old.get(part, {}), json.loads(json.dumps(new[part]))
        for key in after | before:
            was, now_is = (said(values[key]) if key in values else "not recorded" for values in (before, after))
            if was != now_is:
                name = f"--{key.replace('_', '-')}" if part == "settings" else key
                found.append(f"{name} {was}, now {now_is}")
    return found


def said(value: object) -> str:
    return " ".join(map(str, value)) or "not given" if isinstance(value, list) else str(value)


def go_on_with(new: dict, output: Path) -> dict:
    """The result in `output`; ends the program if it is not of the comparison that `new` begins."""
    old = load_comparison("--output", output)
    if found := differences(old, new, "settings", "hardware", "versions", "code"):
        fail(f"--output {output}: is there already, from another comparison: {'; '.join(found)}")
    return old


def to_go_on(args: Args, output: Path) -> str:
    """The command that goes on with a comparison that was stopped."""
    return shlex.join([sys.executable, *sys.argv, *([] if args.output else ["--output", str(output)])])


def repeat_args(args: Args, old: dict) -> Args:
    """The arguments that repeat the comparison `old`; ends the program if others were given."""
    for field in fields(Args):
        if field.name not in ("seeds", "output", "against") and getattr(args, field.name) != field.default:
            fail(f"--{field.name.replace('_', '-')}: --against takes all settings but --seeds from its file")
    settings = {key: tuple(value) if isinstance(value, list) else value for key, value in old["settings"].items()}
    if odd := settings.keys() ^ (vars(args).keys() - {"output", "against"}):
        fail(f"--against {args.against}: has not the settings of this version: {', '.join(sorted(odd))}")
    return replace(args, **settings | ({"seeds": args.seeds} if args.seeds else {}))


def compare_with(old: dict, new: dict) -> list[dict]:
    """For each arm of both results the ratio of median fps, now over before, and what it means.

    `p_slower` and `p_faster` are p-values of the rank-sum test, each corrected for the number of arms (Holm).
    """
    before, after, lines = groups_of(old["runs"]), groups_of(new["runs"]), []
    for key in before:
        fps = [list(speeds(groups.get(key, [])).values()) for groups in (before, after)]
        line = dict(zip(Arm._fields, key)) | {"runs": min(map(len, fps)), "counts": [*map(len, fps)]}
        line |= with_interval("before", fps[0], 2) | with_interval("now", fps[1], 2)
        line |= {"ratio": None, "p_slower": None, "p_faster": None, "verdict": "no runs to compare"}
        if all(fps):
            line |= {"ratio": line["now"] / line["before"], "verdict": "within the noise"}
            line |= {"p_slower": rank_sum_p(fps[1], fps[0]), "p_faster": rank_sum_p(fps[0], fps[1])}
        lines.append(line)
    both = [line for line in lines if line["ratio"]]
    for line in both:
        if seeds_needed(line["counts"][0], len(both)) > line["counts"][1]:
            line["verdict"] = "too few runs to tell"
    for verdict in ("slower", "faster"):
        for line, p in zip(both, holm([line[f"p_{verdict}"] for line in both])):
            line[f"p_{verdict}"] = float(p)
            line["verdict"] = verdict if p <= ALPHA else line["verdict"]
    return lines


def seeds_needed(runs: int, arms: int) -> int:
    """How many runs an arm needs now, against so many before, for its smallest p-value to tell among so many arms."""
    return next(count for count in itertools.count(1) if arms <= math.comb(runs + count, count) * ALPHA + 1e-9)


def print_regressions(old: dict, new: dict) -> bool:
    """Prints what became of each arm; whether one is slower by more than the noise."""
    lines = compare_with(old, new)
    rows = [["script", "variant", "environment", "envs", "steps/s before", spread(lines), "now", spread(lines)]]
    rows[0] += ["now/before", "p slower", "p faster", ""]
    for line in lines:
        rows.append([line["script"], line["variant"], line["env_id"], str(line["num_envs"])])
        for name in ("before", "now"):
            rows[-1] += [show(line[name], 0), interval(line[f"{name}_interval"], 0)]
        rows[-1] += [show(line["ratio"]), show(line["p_slower"], 3), show(line["p_faster"], 3), line["verdict"]]
    print()
    speed.print_table(rows, left=3)
    changed = differences(old, new, "versions", *(["code"] if "code" in old else []))
    print(
        f"scripts and packages: {'; '.join(changed) or 'the same'}{'' if 'code' in old else '; scripts not recorded'}"
    )
    slower = [f"{line['script']} {line['variant']}" for line in lines if line["verdict"] == "slower"]
    print(
        f"slower by more than the noise, {len(slower)} of {len(lines)} arms: {', '.join(slower) or 'none'}", flush=True
    )
    return bool(slower)


# ---- Main ----
def check_args(args: Args, device: str) -> None:
    """Ends the program with exit status 2 if an argument is out of its range or contradicts another."""
    for name, least in (("num_envs", 1), ("seeds", 0)):
        if any(value < least for value in getattr(args, name)):
            fail(f"--{name.replace('_', '-')} {said(list(getattr(args, name)))}: must be at least {least} each")
    if args.total_timesteps is not None and args.total_timesteps < 1:
        fail(f"--total-timesteps {args.total_timesteps}: must be above 0")
    speed.check_seconds(args, "timeout")
    if device == "cpu" and any("cudagraphs" in variant for variant in args.variants):
        fail("--variants: cudagraphs needs a CUDA device and --cuda")
    words = speed.split_flags(args.flags)
    for word in words:
        name = word.partition("=")[0].replace("_", "-").removeprefix("--").removeprefix("no-")
        if word.startswith("--") and name in OWN_FLAGS:
            fail(f"--flags {args.flags}: {word} is for compare.py itself to choose (see its --help)")


def quick_args(args: Args) -> Args:
    for name in ("scripts", "variants", "env_ids", "num_envs", "total_timesteps", "flags"):
        if getattr(args, name):
            fail(f"--{name.replace('_', '-')}: --quick chooses that by itself")
    return replace(args, scripts=tuple(QUICK), variants=("eager", "compile"), seeds=args.seeds or (1, 2, 3))


def main(args: Args) -> None:
    speed.terminate_like_interrupt()
    if psutil is None:
        fail("psutil is missing: pip install -r requirements/requirements-bench.txt -c requirements/constraints.txt")
    old = load_comparison("--against", args.against) if args.against else None
    args = repeat_args(args, old) if old else quick_args(args) if args.quick else args
    args = replace(args, seeds=args.seeds or (1, 2, 3, 4, 5))
    if old and args.output and args.output.resolve() == args.against.resolve():
        fail(f"--output {args.output}: is the file that --against compares with")
    probe = speed.ask(speed.PROBE)
    device = "cuda" if args.cuda and probe["gpu"] else "cpu"
    check_args(args, device)
    plan = plan_of(args, device)
    result = speed.new_result("compare", args, probe, device) | {"code": code_of(plan)}
    if old and (found := differences(old, result, "hardware")):
        fail(f"--against {args.against}: was measured on another machine: {'; '.join(found)}")
    if old and (groups := [fps for group in groups_of(old["runs"]).values() if (fps := speeds(group))]):
        needed = max(seeds_needed(len(fps), len(groups)) for fps in groups)
        if needed > len(set(args.seeds)):
            told = f"to tell what became slower, of {len(groups)} arms, takes {needed} --seeds"
            print(f"note: {told}, here are {len(set(args.seeds))}", file=sys.stderr)
    output = args.output or speed.result_path("compare", device, probe)
    speed.check_output(output, "compare", goes_on=True)
    if output.exists():
        result = go_on_with(result, output)
    gpu = open_gpu() if device == "cuda" else None
    if device == "cuda" and gpu is None:
        print("note: the GPU's use is not sampled: that needs nvidia-ml-py and NVIDIA's driver", file=sys.stderr)
    speed.warn_if_busy()
    try:
        with speed.until_stopped(result, output, write, print_result):
            measure_all(args, plan, result, output, gpu)
    finally:
        if output.exists() and (not result["ended"] or result.get("left_out")):
            print(f"to go on with it: {to_go_on(args, output)}", flush=True)
    is_slower = print_regressions(old, result) if old else False
    if is_slower or failures_of(result):
        sys.exit(1)


if __name__ == "__main__":
    try:
        main(command_line(Args, __doc__))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
