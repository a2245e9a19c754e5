"""Writes the tables of README.md and benchmarks/README.md from the result files: no published figure is typed by hand.

    python benchmarks/tables.py                    renews the tables
    python benchmarks/tables.py --check            exit status 1 if one is not what the result files say
    python benchmarks/tables.py --plot curves.png  draws the learning curves as well (needs matplotlib)

A table stands between `<!-- table:NAME -->` and `<!-- /table:NAME -->`; NAME is one of `TABLES` in tables.py.
Learning comes from all files in benchmarks/results/learning/, and memory/ beside it, the table of scripts from the
former and the speed, what a message costs from all files of a machine, and all others from the newest file in
benchmarks/results/ of each machine. Comparisons are of three kinds: of every script (compare), quick ones
(compare_quick), and those with several --num-envs (compare_num_envs). The figures of others are in reference_*.json.
"""

import json
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import compare
import compile_inference
import eager_tips
import lag_learning
import memory_learning
import ray_faults
import ray_learner
import ray_scaling
import scan
from speed import (
    RESULTS,
    ROOT,
    SCRIPTS,
    check_plot,
    command_line,
    fail,
    finished,
    median,
    show,
    summarise,
    summarise_warmup,
)

PAGES = (ROOT / "README.md", ROOT / "benchmarks" / "README.md")
MARKERS = re.compile(r"<!-- (/?)table:(\S+) -->")
ALGORITHMS = {  # what leanrl/ holds, in the order of the table of scripts
    "sac_continuous_action": "SAC",
    "td3_continuous_action": "TD3",
    "dqn": "DQN",
    "ppo": "PPO",
    "ppo_continuous_action": "PPO, continuous",
    "ppo_atari_envpool": "PPO, Atari",
    "ppo_memory": "PPO, memory",
    "dqn_memory": "DQN, memory",
    "impala_ray": "IMPALA, Ray actors",
    "appo_ray": "Asynchronous PPO, Ray actors",
}
COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#000000", "#7b3294", "#a6611a"]
COLUMNS = 3  # of panels
KEYS = ("kind", "command", "started", "device", "hardware", "versions", "runs")
LEARNING_KEYS = (
    "script",
    "variant",
    "arguments",
    "changed",
    "summary",
    "return_last_20",
    "return_last_100",
    "versions",
)
SMOOTHING = 20  # episodes in a point of a learning curve


@dataclass
class Args:
    check: bool = False
    """change nothing; exit status 1 if the tables are not what the result files say"""
    plot: Path | None = None
    """PNG file for the learning curves; needs matplotlib"""
    readme: Path | None = None
    """file that holds the tables; README.md and benchmarks/README.md if not given"""
    results: Path = RESULTS
    """folder of the result files"""


# ---- Reading results ----
def load(path: Path, *keys: str) -> dict:
    """The result in a file; ends the program if it is none with these keys."""
    try:
        result = json.loads(path.read_text())
    except ValueError as error:
        fail(f"{path}: not a JSON file ({error})")
    if not isinstance(result, dict) or not {*keys} <= {*result}:
        fail(f"{path}: not a result, which has {', '.join(keys)}")
    return result


def machine(result: dict) -> str:
    """The hardware of a result, in words."""
    about = result["hardware"]
    host = f"{about['cpu']}, {about['cores']} cores"
    return f"{about['gpu']} ({host})" if result["device"] == "cuda" else f"{host}, {threads(about['torch_threads'])}"


def newest(results: Path, kind: str, is_meant: Callable[[dict], bool] = bool) -> list[tuple[Path, dict]]:
    """The newest result of a kind, of those that are meant, for each machine, CPUs first.

    Of speed and warm-up it is the newest for each script there: an older one keeps the runs that no newer one has.
    """
    found, covered = [], set()
    loaded = [(path, load(path, *KEYS)) for path in sorted(results.glob(f"{kind}_*.json"))]
    for path, result in sorted(loaded, key=lambda pair: pair[1]["started"], reverse=True):
        if is_meant(result):
            keys = [(machine(result), kind in ("speed", "warmup") and run["script"]) for run in result["runs"]]
            runs = [run for run, key in zip(result["runs"], keys, strict=True) if key not in covered]
            covered.update(keys)
            found += [(path, result | {"runs": runs})] if runs else []
    return sorted(found, key=lambda pair: (pair[1]["device"] != "cpu", machine(pair[1]), pair[1]["started"]))


def is_of_defaults(result: dict) -> bool:
    """Whether a result of speed is of each script's usual task, number of environments and flags."""
    settings = result.get("settings", {})
    return not any(settings.get(name) for name in ("env_id", "num_envs", "flags"))


def learning_results(results: Path) -> dict[tuple, list[dict]]:
    """The learning results by environment, script, variant with changed arguments, and steps; in each one a seed."""
    groups = {}
    for path in sorted((results / "learning").glob("*.json")):
        result = load(path, *LEARNING_KEYS)
        arguments = result["arguments"]
        changed = dict(result["changed"])
        times = changed.pop("resumed", 0)
        flags = "".join(f", --{name.replace('_', '-')} {value}" for name, value in changed.items())
        flags += f", stopped and resumed{f' {times} times' * (times > 1)}" * (times > 0)
        key = (arguments["env_id"], result["script"], result["variant"] + flags, arguments["total_timesteps"])
        groups.setdefault(key, []).append(result)
    return {key: sorted(groups[key], key=lambda r: r["arguments"]["seed"]) for key in sorted(groups)}


def longest(learned: dict[tuple, list[dict]], env_id: str, script: str) -> tuple[int, list[dict]]:
    """Steps and results of the longest runs of a script's defaults (of the most seeds), with however many actors."""
    groups = [(*key[2:], group) for key, group in learned.items() if key[:2] == (env_id, script)]
    plain = re.compile(r"[^,]*(, --num-actors \d+)?")
    groups = [(steps, group) for variant, steps, group in groups if plain.fullmatch(variant)]
    return max(groups, key=lambda each: (each[0], len(each[1])), default=(0, []))


# ---- Tables ----
def threads(count: int) -> str:
    return f"{count} thread{'' if count == 1 else 's'}"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> str:
    """A table whose first `left` columns are aligned to the left."""
    lines = [header, ["---" if i < left else "--:" for i in range(len(header))], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def footer(path: Path, results: Path, result: dict) -> str:
    date = result["started"][:10]
    stopped = "" if result["ended"] else " It was stopped before its end."
    versions = f"torch {result['versions']['torch']}, Python {result['versions']['python']}"
    name = path.relative_to(results.parent.parent).as_posix()
    return f"From [`{path.name}`]({name}): {machine(result)}; {versions}; {date}; `{result['command']}`.{stopped}"


def source(path: Path, results: Path, result: dict) -> str:
    """The file of a result, for a table that another one shows in full."""
    name = path.relative_to(results.parent.parent).as_posix()
    return f"[`{path.name}`]({name}) ({machine(result)}, {result['started'][:10]})"


def scripts_table(results: Path) -> str:
    """What each script reached on its own task in its longest runs, and how fast, eager and compiled."""
    header = ["algorithm", "eager: read this first", "compiled: run this", "task", "return", "at steps", "seeds"]
    latest = {}  # of several machines of a kind
    for _, result in sorted(newest(results, "speed", is_of_defaults), key=lambda pair: pair[1]["started"]):
        own = {}
        for line in summarise(result["runs"]):
            if line["runs"]:
                own.setdefault((result["device"], line["script"]), {})[line["variant"]] = line
        latest |= own
    learned, devices = learning_results(results), sorted({device for device, _ in latest})
    rows = []
    for script, title in ALGORITHMS.items():
        task = re.search(r'env_id: str = "(.+)"', (SCRIPTS / f"{script}.py").read_text())[1]
        compiled = f"{script}_torchcompile"
        rows.append(
            [title, f"[`{script}.py`](leanrl/{script}.py)", f"[`…_torchcompile.py`](leanrl/{compiled}.py)", task]
        )
        steps, group = longest(learned, task, compiled)
        reached = mean_and_deviation([result["return_last_100"] for result in group]) if group else ""
        rows[-1] += [reached, f"{steps:,}" if group else "", str(len(group)) if group else ""]
        for device in devices:
            own = latest.get((device, script), {})
            compiled_lines = [line for variant, line in own.items() if "compile" in variant]
            fastest = max(compiled_lines, key=lambda line: line["fps"], default=None)
            rows[-1] += [show(line["fps"], 0) if line else "" for line in (own.get("eager"), fastest)]
    names = {"cpu": "CPU", "cuda": "GPU"}
    header += [f"steps/s, {names[device]}, {version}" for device in devices for version in ("eager", "compiled")]
    # The table is wide: a speed that no script has takes no column
    kept = [any(cells) or not title.startswith("steps/s") for title, *cells in zip(header, *rows, strict=True)]
    header, *rows = ([cell for cell, is_kept in zip(row, kept, strict=True) if is_kept] for row in (header, *rows))
    note = (
        "Return: mean of the last 100 training episodes ± standard deviation over the seeds, of the longest runs there"
    )
    return (
        f"{markdown(header, rows, 4)}\n\n{note} are on the default task. "
        "IMPALA and asynchronous PPO have learned with two Ray actors, but their steps/s are of a run without Ray, "
        "with one actor in the learner's process. Compiled: the faster of the variants with --compile; empty: not "
        "measured. How return and speed were measured is below."
    )


def speed_table(results: Path) -> str:
    parts = []
    for path, result in newest(results, "speed", is_of_defaults):
        lines = summarise(result["runs"])
        has_share = any(line["share_of_arithmetic_limit"] for line in lines)
        has_use = any(line["gpu_percent"] is not None for line in lines)
        header = ["script", "variant", "environment", "steps/s", "range", "× eager", "warm-up, s", "memory, MB"]
        rows = []
        for line in lines:
            row = [f"`{line['script']}`", line["variant"]]
            if not line["runs"]:
                row += ["", "failed", *[""] * 4]
            else:
                low, high = (show(line[key], 0) for key in ("fps_min", "fps_max"))
                row += [line["env_id"], show(line["fps"], 0), f"{low}–{high}", show(line["times_eager"])]
                row += [show(line["warmup_seconds"], 1), show(line["peak_memory_bytes"] / 1e6, 0)]
            share = line["share_of_arithmetic_limit"]
            row += [f"{share:.0%}" if share else ""] if has_share else []
            use = "" if line["gpu_percent"] is None else f"{line['gpu_percent']:.0f}%"
            rows.append(row + ([use] if has_use else []))
        header += ["of the arithmetic limit"] * has_share + ["GPU used, of the time"] * has_use
        table = markdown(header, rows, 3)
        counts = sorted({line["runs"] for line in lines if line["runs"]}) or [0]
        runs = "1 run" if counts == [1] else f"{' to '.join(map(str, dict.fromkeys((counts[0], counts[-1]))))} runs"
        note = f"Medians of {runs}; × eager is the median of the ratios taken turn by turn."
        note += f" {result['note']}" if "note" in result else ""
        where = "peak GPU memory" if result["device"] == "cuda" else "peak memory of the process"
        parts.append(f"{table}\n\n{note} Memory is the {where}. {footer(path, results, result)}")
    return "\n\n".join(parts) or "No results yet: `python benchmarks/speed.py` makes them."


def warmup_table(results: Path) -> str:
    parts = []
    for path, result in newest(results, "warmup"):
        header = ["script", "variant", "cold, s", "warm, s", "whole short run cold, s", "warm, s"]
        keys = ("cold", "warm", "cold_process", "warm_process")
        lines = summarise_warmup(result["runs"])
        rows = [[f"`{line['script']}`", line["variant"], *(show(line[key], 1) for key in keys)] for line in lines]
        parts.append(f"{markdown(header, rows, 2)}\n\n{footer(path, results, result)}")
    return "\n\n".join(parts) or "No results yet: `python benchmarks/speed.py --warmup` makes them."


def saving_table(results: Path) -> str:
    """What checkpoints cost, by how often they are written."""
    every = sorted({load(path)["settings"]["save_every"] for path in results.glob("saving_*.json")})
    rows, sources = [], []
    for steps in every:
        is_meant = partial(lambda steps, result: result["settings"]["save_every"] == steps, steps)
        for path, result in newest(results, "saving", is_meant):
            turns = range(1, result["settings"]["repeats"] + 1)
            found = [{run["saves"]: run["summary"]["fps"] for run in finished(result["runs"], repeat=n)} for n in turns]
            pairs = [(fps[False], fps[True]) for fps in found if len(fps) == 2]
            if not pairs:
                continue
            without, saving = (statistics.median(fps) for fps in zip(*pairs))
            losses = sorted(result["losses"])
            cells = [f"{100 * loss:.1f}%" for loss in (result["median_loss"], losses[0], losses[-1])]
            script = f"`{result['settings']['script']}_torchcompile --compile`"
            rows.append([script, f"{steps:,}", show(without, 0), show(saving, 0), *cells])
            sources.append(f"Turns: {len(pairs)}; loss: of the two runs of a turn. {footer(path, results, result)}")
    header = ["script", "steps between two", "steps/s without", "with", "loss, median", "least", "most"]
    table = markdown(header, rows, 1)
    return f"{table}\n\n{' '.join(sources)}" if rows else "No results yet: `python benchmarks/saving.py` makes them."


def gpu_table(results: Path) -> str:
    """Profiled runs on a GPU: their speed, and how long their captured graphs take."""
    parts = []
    for path, result in newest(results, "gpu_profile"):
        rows = []
        for run in sorted(result["runs"], key=lambda run: (list(ALGORITHMS).index(run["script"]), run["visit"])):
            graphs = [f"{name} {graph['us']:.0f} ({graph['nodes']})" for name, graph in run["graphs"].items()]
            row = [f"`{run['script']}`", run["variant"], ", ".join(graphs), str(run["visit"]), show(run["fps"], 0)]
            rows.append([*row, show(run["warmup_seconds"], 1)])
        header = ["script", "variant", "its graphs: µs a replay (nodes)", "visit", "steps/s", "warm-up, s"]
        parts.append(f"{markdown(header, rows, 3)}\n\n{result['note']} {footer(path, results, result)}")
    return "\n\n".join(parts) or "No results yet: `python benchmarks/profile_run.py` makes them on a GPU."


def reference_table(results: Path) -> str:
    """What LeanRL has published of the same algorithms."""
    path = results / "reference_leanrl.json"
    if not path.exists():
        return "No reference."
    reference = load(path)
    rows = [[f"`{script}`", *(show(fps, 0) for fps in line)] for script, line in reference["fps"].items()]
    note = f"Steps/s on {reference['hardware']}, from [LeanRL's README]({reference['source']}). On other hardware than"
    return f"{markdown(['script', *reference['columns']], rows, 1)}\n\n{note} ours: no ratio to our figures means much."


def kind_of_comparison(result: dict) -> str:
    """The table that a result of compare.py belongs to; "" for one of a few scripts or of chosen lengths."""
    settings = result["settings"]
    if settings.get("quick"):
        return "compare_quick"
    if len(settings.get("num_envs", [])) > 1:
        return "compare_num_envs"
    return "" if settings.get("scripts") or settings.get("total_timesteps") else "compare"


def compare_table(results: Path, kind: str) -> str:
    """Every figure of each arm, or, of several numbers of environments, steps/s against these."""
    parts = []
    for path, result in newest(results, "compare", lambda result: kind_of_comparison(result) == kind):
        result["medians"] = lines = compare.summarise(result["runs"])
        (header, rows), notes = compare.table(result), compare.notes_of(result)
        if kind == "compare_num_envs":
            del notes[1]  # on what is not in this table
            counts, cells = sorted({line["num_envs"] for line in lines}), {}
            header = [*header[:3], *(f"{n} env{'s' * (n > 1)}, steps/s" for n in counts)]
            for line in lines:
                fps = f"{show(line['fps'], 0)} ({compare.interval(line['fps_interval'], 0)})"
                cells.setdefault((line["script"], line["variant"], line["env_id"]), {})[line["num_envs"]] = fps
            rows = [[*key, *(by_count.get(n, "") for n in counts)] for key, by_count in cells.items()]
        table = markdown(header, [[f"`{script}`", *cells] for script, *cells in rows], 3)
        parts.append(f"{table}\n\n{' '.join(notes)} {footer(path, results, result)}")
    flags = {"compare": "", "compare_quick": " --quick", "compare_num_envs": " --num-envs 1 4 16"}[kind]
    return "\n\n".join(parts) or f"No results yet: `python benchmarks/compare.py{flags}` makes them."


def mean_and_deviation(values: Sequence[float | None]) -> str:
    """Mean ± sample standard deviation."""
    values = [value for value in values if value is not None]
    if not values:
        return "-"
    digits = 0 if max(map(abs, values)) >= 1000 else 2 if max(map(abs, values)) <= 1 else 1
    deviation = f" ± {show(statistics.stdev(values), digits)}" if len(values) > 1 else ""
    return show(statistics.fmean(values), digits) + deviation


def learning_table(results: Path) -> str:
    groups = learning_results(results)
    if not groups:
        return "No results yet: `python benchmarks/learning.py run` makes them."
    header = ["environment", "script", "variant", "steps", "seeds", "return, last 100 episodes", "last 20", "episodes"]
    rows, machines, versions = [], set(), set()
    for (env_id, script, variant, steps), group in groups.items():
        counts = sorted(len(result["episodes"].get("return", [])) for result in group)
        row = [env_id, f"`{script}`", variant, f"{steps:,}", ", ".join(str(r["arguments"]["seed"]) for r in group)]
        row += [mean_and_deviation([r[key] for r in group]) for key in ("return_last_100", "return_last_20")]
        rows.append([*row, f"{counts[0]:,}" if counts[0] == counts[-1] else f"{counts[0]:,} to {counts[-1]:,}"])
        machines |= {f"{r['device_name']}, {threads(r['threads'])}" for r in group}
        versions |= {f"torch {r['versions']['torch']}, Python {r['versions']['python']}" for r in group}
    table = markdown(header, rows, 3)
    count = sum(map(len, groups.values()))
    folder = f"{results.relative_to(results.parent.parent).as_posix()}/learning"
    note = "Mean ± standard deviation over the seeds of the mean return of the last training episodes of a run."
    source = f"From the {count} files in [`{folder}/`]({folder}), named ENVIRONMENT\\_\\_SCRIPT\\_\\_VARIANT\\_\\_STEPS"
    return (
        f"{table}\n\n{note} {source}\\_\\_seedSEED.json: {'; '.join(sorted(machines))}; {'; '.join(sorted(versions))}."
    )


def published_table(results: Path) -> str:
    """What the scripts reached beside what CleanRL has published, as far as the runs are long."""
    path = results / "reference_cleanrl.json"
    if not path.exists():
        return "No reference."
    reference, learned, rows = load(path), learning_results(results), []
    for script, env_id, steps, mean, deviation in reference["returns"]:
        own_steps, group = longest(learned, env_id, f"{script}_torchcompile")
        if group:
            reached = mean_and_deviation([result["return_last_100"] for result in group])
            digits = 0 if abs(mean) >= 200 else 1
            published = f"{show(mean, digits)} ± {show(deviation, digits)}"
            published += "" if own_steps == steps else f" at {steps:,}"
            rows.append([ALGORITHMS[script], env_id, f"{own_steps:,}", str(len(group)), reached, published])
    sources = ", ".join(f"[{name}]({source})" for name, source in reference["sources"].items())
    note = "Mean return of the last 100 training episodes ± standard deviation over the seeds, and CleanRL's published"
    note += f" return (3 seeds, by its benchmark scripts), at as many steps unless others are given ({sources};"
    note += f" {reference['note']})."
    header = ["algorithm", "task", "steps", "seeds", "return", "CleanRL"]
    return f"{markdown(header, rows, 2)}\n\n{note}"


def memory_table(results: Path) -> str:
    """What an agent with each memory reached on each task."""
    found = memory_learning.returns(results / "memory")
    if not found:
        return "No results yet: `python benchmarks/memory_learning.py` makes them."
    cells = [cell for cell in memory_learning.CELLS if any(known == cell for _, known in found)]
    rows, flags, counts = [], [], {len(values) for values in found.values()}
    for name, task in memory_learning.TASKS.items():
        shown = [mean_and_deviation(found[name, cell]) if (name, cell) in found else "" for cell in cells]
        if any(shown):
            known = ("" if value is None else f"{value:g}" for value in (task.chance, task.best))
            rows.append([name, f"{task.steps:,}", *known, *shown])
            flags += [f"{name} `{task.flags}`"] if task.flags else []
    table = markdown(["task", "steps", "forgetting", "remembering", *(f"`{cell}`" for cell in cells)], rows, 1)
    note = f"{mean_over(counts)}; the returns of agents that forget everything and that remember everything beside it."
    note += f" Settings other than the defaults: {', '.join(flags)}." if flags else ""
    return f"{table}\n\n{note} {folder_source(results / 'memory')}"


def mean_over(counts: set[int]) -> str:
    """What a result's figure is, if there are as many seeds as `counts` says."""
    least, most = min(counts), max(counts)
    seeds = f"{least} to {most} seeds" if least < most else f"{least} seed{'s' * (least > 1)}"
    return f"Mean ± standard deviation over {seeds} of the mean return of the last 100 training episodes of a run"


def folder_source(folder: Path) -> str:
    """Where the learning results of a folder are, and what made them."""
    paths = sorted(folder.glob("*.json"))
    made = [load(path) for path in paths]
    machines = sorted({f"{r['device_name']}, {threads(r['threads'])}" for r in made})
    versions = sorted({f"torch {r['versions']['torch']}, Python {r['versions']['python']}" for r in made})
    place = folder.relative_to(folder.parent.parent.parent).as_posix()
    return f"From the {len(paths)} files in [`{place}/`]({place}): {'; '.join(machines)}; {'; '.join(versions)}."


def lag_table(results: Path) -> str:
    """What IMPALA and asynchronous PPO reach with weights that are some versions old."""
    found = lag_learning.returns(results / "lag")
    if not found:
        return "No results yet: `python benchmarks/lag_learning.py` makes them."
    rows = []
    for script, vtrace in [(script, vtrace) for script in lag_learning.SCRIPTS for vtrace in (True, False)]:
        values = [found.get((script, vtrace, lag)) for lag in lag_learning.LAGS]
        shown = [mean_and_deviation(value) if value else "" for value in values]
        rows += [[lag_learning.SCRIPTS[script], "with" if vtrace else "without", *shown]] if any(shown) else []
    header = ["algorithm", "V-trace", *(f"lag {lag}" for lag in lag_learning.LAGS)]
    note = f"{lag_learning.ENV_ID}, {lag_learning.STEPS:,} steps, in one process."
    note += f" {mean_over({*map(len, found.values())})}."
    return f"{markdown(header, rows, 2)}\n\n{note} {folder_source(results / 'lag')}"


def processes(lines: Sequence[dict]) -> str:
    """How many processes the medians of these lines are of: their range."""
    counts = sorted({line["runs"] for line in lines if line["runs"]}) or [0]
    span = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
    return f"{span} process{'' if counts == [1] else 'es'}"


def compile_table(results: Path, kind: str) -> str:
    """Speed-up of the policy by torch.compile: a row a backend with its mode, a column a size."""
    size, unit = compile_inference.SIZES[kind], compile_inference.FIGURES[kind]
    percent, parts = compile_inference.percent, []
    for path, result in newest(results, kind):
        lines = compile_inference.summarise(result["runs"], size)
        sizes = sorted({line[size] for line in lines})
        header = ["backend", "mode", *(f"{each:,}" for each in sizes), "compile, s", "warm, s", "graph breaks"]
        header += ["recompiles", *(["logits differ by"] if size == "batch_size" else [])]
        eager = [[run["eager"] for run in result["runs"] if run[size] == each and "eager" in run] for each in sizes]
        rows = [[f"eager, {unit}", "", *(show(statistics.median(rates), 1) if rates else "" for rates in eager)]]
        for (backend, mode), group in compile_inference.by_backend_and_mode(lines).items():
            by_size = {line[size]: line for line in group}
            own = [line for line in group if line["runs"]]
            rows.append([backend, mode])
            reasons = set()
            for each in sizes:
                line = by_size.get(each, {"speedup": None, "reason": None})
                interval = f" ({compile_inference.spread(line)})" if line["speedup"] is not None else ""
                reason = f": {line['reason']}" if line["reason"] and line["reason"] not in reasons else ""  # said once
                reasons.add(line["reason"])
                rows[-1].append(percent(line["speedup"]) + interval + reason)
            if own:
                for cache in ("cold", "warm"):
                    rows[-1].append(show(median([line[f"compile_seconds_{cache}"] for line in own]), 1))
                rows[-1] += [str(max(line[key] for line in own)) for key in ("graph_breaks", "recompiles")]
                differences = [line["max_logit_difference"] for line in own if line["max_logit_difference"] is not None]
                rows[-1] += [f"{max(differences):.0e}" if max(differences) else "0"] if differences else []
        rows = [row + [""] * (len(header) - len(row)) for row in rows]
        by = {"batch_size": "batch size", "num_envs": "number of environments"}[size]
        note = f"Speed-up over eager by {by}: medians of {processes(lines)}, with 95 % intervals."
        parts.append(f"{markdown(header, rows, 2)}\n\n{note} {footer(path, results, result)}")
    return "\n\n".join(parts) or f"No results yet: `python benchmarks/{kind}.py` makes them."


def eager_tips_table(results: Path) -> str:
    """What each tip for eager code gains, and whether it holds."""
    parts = []
    for path, result in newest(results, "eager_tips"):
        lines = eager_tips.summarise(result["runs"])
        rows = [eager_tips.cells_of(line) for line in lines]
        note = f"Medians of {processes(lines)}. {eager_tips.note_of(result['runs'])}"
        parts.append(f"{markdown(eager_tips.HEADER, rows, 1)}\n\n{note} {footer(path, results, result)}")
    return "\n\n".join(parts) or "No results yet: `python benchmarks/eager_tips.py` makes them."


def ray_learner_table(results: Path) -> str:
    """How long the learners of the scripts with actors take for a batch."""
    parts = []
    for path, result in newest(results, "ray_learner"):
        lines = ray_learner.summarise(result["runs"])
        rows = ray_learner.rows_of(lines)
        note = f"Medians of {processes(lines)}; × eager is the median of the ratios taken turn by turn."
        parts.append(f"{markdown(ray_learner.HEADER, rows, 2)}\n\n{note} {footer(path, results, result)}")
    return "\n\n".join(parts) or "No results yet: `python benchmarks/ray_learner.py` makes them."


def ray_faults_table(results: Path) -> str:
    """What actors that are killed cost."""
    parts = []
    for path, result in newest(results, "ray_faults"):
        settings, ledger = result["settings"], result.get("ledger", {})
        note = f"One of {settings['num_actors']} actors of `{settings['script']}` on CartPole-v1 is killed every"
        note += f" {settings['interval']:g} s; medians of {len(result['runs'])} pairs of stretches of"
        shares = [run["share"] for run in result["runs"]]
        note += f" {settings['interval'] * settings['kills']:g} s, whose shares are {min(shares):.0%} to"
        note += f" {max(shares):.0%}. In the whole run {ledger.get('actor_restarts', 0)}"
        note += f" restarts and {ledger.get('fragments_lost', 0):,} of"
        note += f" {ledger.get('fragments_lost', 0) + ledger.get('fragments_delivered', 0):,} fragments lost."
        table = markdown(ray_faults.HEADER, ray_faults.rows_of(result), 0)
        parts.append(f"{table}\n\n{note} {footer(path, results, result)}")
    return "\n\n".join(parts) or "No results yet: `python benchmarks/ray_faults.py` makes them."


def scans(results: Path, kind: str | None) -> list[tuple[Path, dict]]:
    """The newest full results of scan.py: of its forms, "eager" or "compiled", of "claims", or of all else."""

    def is_meant(result: dict) -> bool:
        settings = result["settings"]
        own = settings.get("forms") or ("claims" if settings.get("claims") else None)
        return own == kind and not settings["quick"]

    return newest(results, "scan", is_meant)


def scan_table(results: Path, part: str) -> str:
    """What a scan over time gains: one of the parts of scan.py's tables."""
    parts, kinds = [], {"scan_forms": ("eager", "compiled"), "scan_claims": ("claims",)}.get(part, (None,))
    for path, result in [each for kind in kinds for each in scans(results, kind)]:
        tables = [markdown(header, rows, scan.text_columns(header)) for header, rows in scan.tables_of(result, part)]
        notes = "; ".join(scan.notes_of(result)) if part == "scan" else ""
        if tables:
            note = scan.caption(result, part) + (f" Without figures: {notes}." if notes else "")
            parts.append("\n\n".join([*tables, f"{note} {footer(path, results, result)}"]))
    return "\n\n".join(parts) or "No results yet: `python benchmarks/scan.py` makes them."


def scan_gains_table(results: Path) -> str:
    """How many times faster the fastest scan of each machine is: all of them in one table."""
    header, table, captions, sources = [], [], [], []
    for path, result in scans(results, None):
        fastest = "captured scan" if result["device"] == "cuda" else "compiled scan"
        place = result["hardware"]["gpu"] or f"{result['hardware']['cores']} CPU cores"
        for (length, batch, arm, *titles), rows in scan.tables_of(result, "scan_ratios"):
            header = ["on", length, batch, arm, *titles]
            table += [[place, *row] for row in rows if row[2] == fastest]
            captions.append(scan.caption(result, "scan_ratios"))
            sources.append(source(path, results, result))
    if not table:
        return "No results yet: `python benchmarks/scan.py` makes them."
    return f"{markdown(header, table, 1)}\n\n{captions[0]} From {', '.join(sources)}."


def ray_table(results: Path, part: str) -> str:
    """How Ray scales: one of the tables of ray_scaling.py."""
    parts = []
    for path, result in newest(results, "ray_scaling", lambda result: not result["settings"]["quick"]):
        if found := ray_scaling.tables_of(result).get(part):
            header, rows = found
            turns = sorted({line["runs"] for line in result["medians"]})
            counts = " to ".join(map(str, dict.fromkeys((turns[0], turns[-1]))))
            note = ray_scaling.CAPTIONS[part].format(turns=f"{counts} turn{'' if turns[-1] == 1 else 's'}")
            ray = f"Ray {result['versions']['ray']}"
            table = markdown(header, rows, ray_scaling.TEXT_COLUMNS[part])
            parts.append(f"{table}\n\n{note} {ray}. {footer(path, results, result)}")
    return "\n\n".join(parts) or "No results yet: `python benchmarks/ray_scaling.py` makes them."


def ray_pays_table(results: Path) -> str:
    """The share of their time that Ray's actors step, in lockstep and double-buffered, by step duration and K."""
    parts = []
    for path, result in newest(results, "ray_scaling", lambda result: not result["settings"]["quick"]):
        found, columns = {}, sorted({line["steps"] for line in result["medians"]})
        for line in result["medians"]:
            cell = found.setdefault((line["kind"], line["actors"], line["duration"]), {}).setdefault(line["steps"], {})
            is_busy = line["cores_busy"] > ray_scaling.SATURATED
            cell[line["mode"]] = ray_scaling.percent(line["efficiency"]) + "†" * is_busy
        rows = []
        for (kind, actors, duration), by_steps in found.items():
            rows.append([f"{actors} {kind}", f"{duration:g} s"])
            for modes in (by_steps.get(steps, {}) for steps in columns):
                rows[-1].append(" → ".join(modes[mode] for mode in ray_scaling.MODES if mode in modes))
        table = markdown(["actors", "a step", *(f"K = {steps:,}" for steps in columns)], rows, 1)
        note = "Lockstep → double-buffered: the share of the actors' time that is spent in steps. Measured: on one Ray"
        note += (
            " node; simulated: several nodes on one machine, without a network. †: the machine's own cores were more"
        )
        note += f" than 90 % busy. From {source(path, results, result)}."
        parts.append(f"{table}\n\n{note}")
    return "\n\n".join(parts) or "No results yet: `python benchmarks/ray_scaling.py` makes them."


def agent_observer_table(results: Path) -> str:
    """Each transport at each point, and its observer's median latency beside that of torch RPC.

    The points of a machine come from all of its files; a point that several have measured, from the newest of them.
    Files with the original's rounding (`--compat`) lack half of the columns and are left out.
    """
    names, latency = ("world_size", "batch", "state_size", "nlayers", "out_features"), "observer latency (seconds)"
    machines, parts = {}, []
    loaded = [(path, load(path)) for path in sorted(results.glob("agent_observer_*.json"))]
    for path, report in sorted(loaded, key=lambda pair: pair[1]["started"]):
        if report["compat"]:
            continue
        x_axis, timeout, points = report.get("x_axis_name"), report["batch_timeout"], {}
        p50 = {
            (run["repeat"], run.get(x_axis), run["transport"]): run["metrics"][latency]["p50"] for run in report["runs"]
        }
        for line in report["benchmark_results"]:
            at, transport = line.get(x_axis), line["transport"]
            point = {name: line.get(name, report.get(name)) for name in names}
            point["batch"] = str(point["batch"]) + ("" if timeout is None else f", {timeout:g} µs")
            row = [f"`{transport}`"]
            row += [show(line["agent latency (seconds)"]["p50"] * 1e6, 0), show(line["agent throughput"]["p50"], 0)]
            row += [show(line[latency][key] * 1e6, 0) for key in ("p50", "p99")]
            row += [show(line["observer throughput"]["p50"], 0), show(line["requests per batch"], 1)]
            row += [show(sum(line["cpu seconds per request"].values()) * 1e6, 0)]
            turns = [repeat for repeat, *key in p50 if key == [at, transport] and (repeat, at, "torch_rpc") in p50]
            ratios = [p50[repeat, at, transport] / p50[repeat, at, "torch_rpc"] for repeat in turns]
            row += [show(statistics.median(ratios)) if ratios else ""]
            points.setdefault(tuple(point.values()), []).append(row)
        found = machines.setdefault(machine(report), {})
        found |= {point: (rows, path, report) for point, rows in points.items()}
    for _, points in sorted(machines.items()):
        points = dict(sorted(points.items(), key=lambda item: item[0][0]))  # by world size
        shown = [i for i, name in enumerate(names) if i < 2 or len({point[i] for point in points}) > 1]
        header = [*(names[i].replace("_", " ") for i in shown), "transport", "agent latency p50, µs"]
        header += ["agent requests/s", "observer latency p50, µs", "p99, µs", "observer requests/s"]
        header += ["requests a batch", "CPU a request, µs", "× torch_rpc"]
        rows = [[*(str(point[i]) for i in shown), *row] for point, (rows, *_) in points.items() for row in rows]
        note = "The transports took turns. × torch_rpc: the observer's median latency as a multiple of torch RPC's,"
        parts += [markdown(header, rows, len(shown) + 1), f"{note} median of the ratios taken turn by turn."]
        for path, report in {path: report for _, path, report in points.values()}.items():
            runs = "One run" if report["repeats"] == 1 else f"Medians of {report['repeats']} runs"
            steps = f"{report['episodes']} episodes of {report['episode_steps']} steps each"
            parts.append(f"{runs} of {steps}. {footer(path, results, report)}")
    return "\n\n".join(parts) or "No results yet: `python benchmarks/agent_observer.py` makes them."


def agent_observer_reference_table(results: Path) -> str:
    """What PyTorch has published of the original benchmark."""
    path = results / "reference_pytorch_rpc.json"
    if not path.exists():
        return "No reference."
    reference = load(path)
    header = ["world size", "agent latency p50, ms", "agent requests/s", "observer latency p50, ms"]
    rows = []
    for line in reference["benchmark_results"]:
        rows.append([str(line["world_size"])])
        for who in ("agent", "observer"):
            rows[-1] += [show(line[f"{who} latency (seconds)"]["p50"] * 1e3, 0)]
            rows[-1] += [show(line[f"{who} throughput"]["p50"], 0)]
    note = f"Torch RPC on {reference['hardware']}, batch {reference['batch']}, latencies in whole ms, from"
    note += f" [PyTorch's README]({reference['source']}). On other hardware than ours: no ratio to our figures"
    return f"{markdown([*header, 'observer requests/s'], rows, 1)}\n\n{note} means much."


TABLES = {
    "scripts": scripts_table,
    "speed": speed_table,
    "warmup": warmup_table,
    "saving": saving_table,
    "gpu": gpu_table,
    "reference": reference_table,
    **{kind: partial(compare_table, kind=kind) for kind in ("compare", "compare_quick", "compare_num_envs")},
    "learning": learning_table,
    "published": published_table,
    "memory": memory_table,
    "lag": lag_table,
    "ray_learner": ray_learner_table,
    "ray_faults": ray_faults_table,
    "compile_inference": partial(compile_table, kind="compile_inference"),
    "compile_exploration": partial(compile_table, kind="compile_exploration"),
    "eager_tips": eager_tips_table,
    **{part: partial(scan_table, part=part) for part in scan.PARTS},
    **{part: partial(ray_table, part=part) for part in ray_scaling.CAPTIONS},
    "scan_gains": scan_gains_table,
    "ray_pays": ray_pays_table,
    "agent_observer": agent_observer_table,
    "agent_observer_reference": agent_observer_reference_table,
}


def fill(text: str, results: Path, folder: Path) -> str:
    """`text`, a page of `folder`, with each table renewed, and links that lead from there to the files.

    Raises ValueError for an unknown name or a marker without its partner.
    """
    place = results.relative_to(results.parent.parent).as_posix()
    link = f"]({results.relative_to(folder).as_posix()}" if results.is_relative_to(folder) else f"]({place}"
    parts, end, opened = [], 0, None
    for marker in MARKERS.finditer(text):
        closes, name = marker[1] == "/", marker[2]
        if name not in TABLES:
            raise ValueError(f"{marker[0]}: there is no such table; the tables are {', '.join(TABLES)}")
        if closes != (opened is not None) or (closes and opened != name):
            raise ValueError(f"{marker[0]}: stands without its partner")
        parts += (
            [f"\n{TABLES[name](results)}\n".replace(f"]({place}", link)] if closes else [text[end : marker.start()]]
        )
        parts.append(marker[0])
        opened, end = (None if closes else name), marker.end()
    if opened:
        raise ValueError(f"<!-- table:{opened} -->: is not closed")
    return "".join([*parts, text[end:]])


# ---- Learning curves ----
def smooth(values: Sequence[float], width: int) -> list[float]:
    """The mean of each value and the up to `width - 1` values before it."""
    return [statistics.fmean(values[max(0, i - width + 1) : i + 1]) for i in range(len(values))]


def plot(results: Path, output: Path) -> None:
    """Draws return against steps: a panel an environment, a colour a script, a line a seed.

    Dashed lines are runs with hyperparameters that are not the defaults, and those that were stopped and resumed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        fail("--plot: needs matplotlib (pip install matplotlib)")
    groups = learning_results(results)
    if not groups:
        fail(f"--plot: there are no results in {results / 'learning'}")
    environments = sorted({key[0] for key in groups})
    scripts = sorted({key[1] for key in groups})
    colours = dict(zip(scripts, COLOURS * len(scripts)))
    columns, rows = min(COLUMNS, len(environments)), -(-len(environments) // COLUMNS)
    figure, labelled = Figure(figsize=(4.6 * columns, 3.4 * rows + 0.8), layout="constrained"), set()
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes in panels[len(environments) :]:
        axes.remove()
    for axes, environment in zip(panels, environments):
        for (env_id, script, variant, _), group in groups.items():
            if env_id != environment:
                continue
            for result in group:
                episodes = result["episodes"]
                points = zip(episodes.get("global_step", []), episodes.get("return", []))
                points = [(step / 1000, value) for step, value in points if value is not None]
                label = script if script not in labelled else None  # each script once
                labelled.add(script)
                smoothed = smooth([value for _, value in points], SMOOTHING)
                style = {"color": colours[script], "linestyle": "--" if "," in variant else "-"}
                axes.plot([step for step, _ in points], smoothed, **style, linewidth=1.2, alpha=0.85, label=label)
        axes.set_title(environment, loc="left")
        axes.set_xlabel("environment steps (thousands)")
        axes.set_ylabel(f"return (mean of {SMOOTHING} training episodes)")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.margins(x=0.01)
    legend = figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=10)
    for line in legend.get_lines():
        line.set_linestyle("-")
    figure.savefig(output, dpi=150, metadata={"Software": None})
    print(f"learning curves, one line a seed: {output}")


def main(args: Args) -> None:
    check_plot(args.plot)
    if not args.results.is_dir():
        fail(f"--results {args.results}: must be a folder of results")
    for readme in [args.readme] if args.readme else PAGES:
        name = readme.relative_to(ROOT) if readme.is_relative_to(ROOT) else readme.name
        try:
            old = readme.read_text()
            if not MARKERS.search(old):
                raise ValueError("has no place for a table")
            new = fill(old, args.results.resolve(), readme.resolve().parent)
        except (OSError, ValueError) as error:
            fail(f"{name}: {error}")
        if args.check and new != old:
            sys.exit(f"{name}: its tables are not what the result files say; run python benchmarks/tables.py")
        if not args.check and new != old:
            readme.write_text(new)
        print(f"{name}: {'the tables are up to date' if new == old else 'the tables are renewed'}")
    if args.plot:
        plot(args.results, args.plot)


if __name__ == "__main__":
    main(command_line(Args, __doc__))
