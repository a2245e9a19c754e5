"""Makes pictures and a page of the results of compare.py.

    python benchmarks/report.py results.json                          runs/report/: PNG files and report.html
    python benchmarks/report.py cpu.json gpu.json --output pictures   a section for each file

report.html needs no other file. A picture is NAME_KIND.png, NAME that of its result file:

- fps: steps/s of each variant, the median over the seeds;
- return_steps, return_time: return against environment steps, and against the run's own seconds (with its warm-up, not
  with Python's imports), the interquartile mean over the seeds; a run that has ended counts with its last return;
- cpu, memory, gpu, gpu_memory: what the processes used over time, a line for each run;
- num_envs: steps/s against the number of environments, where there are several.

Whiskers and bands are 95 % percentile bootstrap intervals over the seeds; of fewer than five they are the range, and of
fewer than four the interquartile mean is the mean. One seed has no interval. What took more than 1.5 times as long as
is usual, as a run that found the compiler's caches empty, is cut off, and how long it took is written below. Needs
matplotlib.
"""

import base64
import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

import compare
from intervals import bootstrap_interval, interquartile_mean
from speed import command_line, fail, finished, show
from tables import COLOURS, machine

try:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator
except ImportError:
    fail("matplotlib is missing: pip install -r requirements/requirements-bench.txt -c requirements/constraints.txt")

COLOUR = dict(zip(compare.VARIANTS, COLOURS))
WIDTH = 5.6  # inches of a picture, one panel wide: its 12 points are legible on a phone
GRID = 200  # points of an averaged curve
LINE = {"eager": 2.6}  # points; the others are thinner and drawn over it, so that all can be seen
HEAD = """<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Comparison</title><style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
img { display: block; max-width: 100%; margin: 1.5rem 0 } div { overflow-x: auto } table { border-collapse: collapse }
th, td { padding: .2rem .6rem; border-bottom: 1px solid #ccc; text-align: right; white-space: nowrap }
th:nth-child(-n+3), td:nth-child(-n+3) { text-align: left } code { overflow-wrap: anywhere } pre { overflow-x: auto }
</style>"""


@dataclass
class Args:
    results: tyro.conf.Positional[tuple[Path, ...]]
    """result files of compare.py"""
    output: Path = Path("runs/report")
    """folder for report.html and the pictures; is made if need be"""


# ---- Averages over the seeds ----
def points_of(run: dict, axis: str) -> tuple[np.ndarray, np.ndarray]:
    """A run's returns [P] against "global_step" or "wall_time" [P], from its first finished episode on."""
    curve = run["curve"]
    points = [(x, y) for x, y in zip(curve[axis], curve["episode_return"]) if y is not None]
    return tuple(np.array(points, float).reshape(-1, 2).T)


def mean_curve(runs: Sequence[dict], axis: str) -> tuple[np.ndarray, np.ndarray, np.ndarray | None] | None:
    """Grid [G], interquartile mean over the runs [G] and its 95 % interval [2, G] (None for one run).

    The grid spans all runs with a finished episode; before its first and after its end a run counts with its first and
    last return, as the agent that it then has. None if there is no more than a point.
    """
    curves = [points for points in (points_of(run, axis) for run in runs) if len(points[0])]
    ends = [end for x, _ in curves for end in (x[0], x[-1])]
    if len(set(ends)) < 2:
        return None
    grid = np.linspace(min(ends), max(ends), GRID)
    values = np.array([np.interp(grid, x, y) for x, y in curves])
    band = bootstrap_interval(values, interquartile_mean, 2_000) if len(values) > 1 else None
    return grid, interquartile_mean(values), band


# ---- Pictures ----
def tasks_of(result: dict) -> dict[tuple, dict[str, list[dict]]]:
    """The finished runs by (script, env_id, num_envs), and therein by variant."""
    tasks = {}
    for key, runs in compare.groups_of(finished(result["runs"])).items():
        tasks.setdefault(key[:3], {})[key[3]] = runs
    return tasks


def title_of(script: str, env_id: str, num_envs: int | None = None) -> str:
    counted = "" if num_envs is None else f", {num_envs} environment{'' if num_envs == 1 else 's'}"
    return f"{script}, {env_id}{counted}"


def stack(panels: dict[str, Callable[[Axes], None]], xlabel: str, ylabel: str, heights: Sequence[float] = ()) -> Figure:
    """One panel below the other, each drawn by its function, with one legend for all labels."""
    heights = heights or [2.9] * len(panels)
    figure = Figure(figsize=(WIDTH, sum(heights) + 0.6), layout="constrained")
    all_axes = figure.subplots(len(panels), height_ratios=heights, squeeze=False).flatten()
    labels = {}
    for axes, (title, draw) in zip(all_axes, panels.items()):
        axes.set_title(title, loc="left", fontsize=12)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.tick_params(labelsize=11)
        axes.set_ylabel(ylabel, fontsize=12)
        draw(axes)
        axes.set_xlabel(xlabel + axes.get_xlabel(), fontsize=11)
        labels |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels())}
    if labels:
        columns = 3 if len(labels) < 4 else 2  # compile+cudagraphs is long
        figure.legend(labels.values(), labels, loc="outside upper left", ncols=columns, frameon=False, fontsize=12)
        figure.set_figheight(figure.get_figheight() + 0.3 * -(-len(labels) // columns))
    return figure


def fps_picture(result: dict) -> Figure | None:
    tasks = {}
    for line in result["medians"]:
        if line["fps"]:
            tasks.setdefault(tuple(line[key] for key in compare.Arm._fields[:3]), []).append(line)

    def bars(lines: Sequence[dict]) -> Callable[[Axes], None]:
        def draw(axes: Axes) -> None:
            axes.grid(visible=False)
            for line in lines:
                low, high = line["fps_interval"] or (line["fps"],) * 2
                whisker = [[line["fps"] - low], [high - line["fps"]]] if line["fps_interval"] else None
                colour = COLOUR[line["variant"]]
                axes.barh(line["variant"], line["fps"], 0.65, color=colour, alpha=0.75, xerr=whisker, capsize=4)
                ratio = f" ({show(line['times_eager'])}×)" if line["times_eager"] else ""
                text = f"  {show(line['fps'], 0)}{ratio}"
                axes.annotate(text, (high, line["variant"]), va="center", fontsize=11)
            axes.invert_yaxis()
            axes.xaxis.set_major_locator(MaxNLocator(4))
            axes.xaxis.set_major_formatter("{x:,.10g}")
            axes.set_xlim(0, 1.45 * max((line["fps_interval"] or [line["fps"]])[-1] for line in lines))

        return draw

    panels = {title_of(*task): bars(lines) for task, lines in tasks.items()}
    heights = [0.75 + 0.4 * len(lines) for lines in tasks.values()]
    spread = compare.spread(result["medians"])
    return stack(panels, f"steps/s (× eager), {spread}", "", heights) if panels else None


def cut_time(axes: Axes, ends: dict[str, list[float]]) -> None:
    """Ends the axis of seconds soon after the runs of each variant usually have ended, if one took half as long again.

    `ends`: when each run has ended, by variant.
    """
    usual, last = max(np.median(each) for each in ends.values()), max(max(each) for each in ends.values())
    axes.set_xlim(0, 1.1 * usual if last > 1.5 * usual else last)
    if last > 1.5 * usual:
        axes.set_xlabel(f" (the longest took {last:.0f}: cut off)")


def return_picture(result: dict, axis: str) -> Figure | None:
    def curves(variants: dict[str, list[dict]]) -> Callable[[Axes], None] | None:
        drawn = {variant: curve for variant, runs in variants.items() if (curve := mean_curve(runs, axis))}

        def draw(axes: Axes) -> None:
            for variant, (grid, mean, band) in drawn.items():
                axes.plot(grid, mean, color=COLOUR[variant], label=variant, linewidth=LINE.get(variant, 1.8))
                if band is not None:
                    axes.fill_between(grid, *band, color=COLOUR[variant], alpha=0.2, linewidth=0)
            axes.xaxis.set_major_locator(MaxNLocator(6))
            axes.xaxis.set_major_formatter("{x:,.10g}")
            axes.margins(x=0.01)
            if axis == "wall_time":
                ends = {name: [end for run in variants[name] for end in run["curve"][axis][-1:]] for name in drawn}
                cut_time(axes, ends)

        return draw if drawn else None

    panels = {title_of(*task): draw for task, variants in tasks_of(result).items() if (draw := curves(variants))}
    xlabel = {"global_step": "environment steps", "wall_time": "seconds, with warm-up"}[axis]
    return stack(panels, xlabel, "return (last 100 episodes)") if panels else None


def use_picture(result: dict, use: str) -> Figure | None:
    def lines(variants: dict[str, list[dict]]) -> Callable[[Axes], None]:
        def draw(axes: Axes) -> None:
            for variant, runs in variants.items():
                for i, run in enumerate(runs):
                    label = variant if i == 0 else None
                    seconds, values = run["use"]["seconds"], run["use"][use]
                    width = LINE.get(variant, 1.3)
                    axes.plot(seconds, values, color=COLOUR[variant], label=label, linewidth=width, alpha=0.8)
            cut_time(axes, {variant: [run["use"]["seconds"][-1] for run in runs] for variant, runs in variants.items()})
            axes.set_ylim(bottom=0)

        return draw

    has_samples = lambda runs: [run for run in runs if use in run["use"]]  # noqa: E731
    tasks = {
        task: {variant: sampled for variant, runs in variants.items() if (sampled := has_samples(runs))}
        for task, variants in tasks_of(result).items()
    }
    panels = {title_of(*task): lines(variants) for task, variants in tasks.items() if variants}
    name, unit, _ = compare.USES[use]
    return stack(panels, "seconds since the process began", f"{name}, {unit}", [2.3] * len(panels)) if panels else None


def num_envs_picture(result: dict) -> Figure | None:
    """Steps/s against the number of environments; None where no arm has several numbers of them."""
    tasks = {}
    for line in result["medians"]:
        if line["fps"]:
            tasks.setdefault((line["script"], line["env_id"]), {}).setdefault(line["variant"], []).append(line)

    def curves(variants: dict[str, list[dict]]) -> Callable[[Axes], None]:
        def draw(axes: Axes) -> None:
            for variant, lines in variants.items():
                x, y = [line["num_envs"] for line in lines], [line["fps"] for line in lines]
                ends = np.array([line["fps_interval"] or [line["fps"]] * 2 for line in lines]).T
                whiskers = np.abs(ends - y)
                axes.errorbar(x, y, whiskers, color=COLOUR[variant], label=variant, marker="o", capsize=4)
            counts = sorted({line["num_envs"] for lines in variants.values() for line in lines})
            axes.set_xscale("log", base=2)
            axes.set_xticks(counts, map(str, counts))
            axes.set_ylim(bottom=0)
            axes.yaxis.set_major_formatter("{x:,.10g}")

        return draw

    several = {task: variants for task, variants in tasks.items() if any(len(lines) > 1 for lines in variants.values())}
    panels = {title_of(*task): curves(variants) for task, variants in several.items()}
    return stack(panels, "environments side by side", "steps/s") if panels else None


PICTURES = {
    "fps": fps_picture,
    "return_steps": lambda result: return_picture(result, "global_step"),
    "return_time": lambda result: return_picture(result, "wall_time"),
    **{use: lambda result, use=use: use_picture(result, use) for use in compare.USES},
    "num_envs": num_envs_picture,
}
CAPTIONS = {
    "fps": "Steps/s of each variant: medians over the seeds, {spread} and the ratio to eager.",
    "return_steps": "Return against environment steps: {mean} over the seeds, and {spread}.",
    "return_time": "Return against the run's own seconds, warm-up included: {mean} over the seeds, and {spread}.",
    "cpu": "Cores in use by the process and its children, one line a run.",
    "memory": "Resident memory of the process and its children, one line a run.",
    "gpu": "Share of the time that the GPU was busy, one line a run.",
    "gpu_memory": "GPU memory in use, one line a run.",
    "num_envs": "Steps/s against the number of environments: medians and {spread}.",
}


def draw_all(result: dict, stem: str, folder: Path) -> dict[str, Path]:
    """Draws the pictures that the result has data for; their files by kind."""
    paths = {}
    for kind, draw in PICTURES.items():
        if figure := draw(result):
            paths[kind] = folder / f"{stem}_{kind}.png"
            figure.savefig(paths[kind], dpi=150, metadata={"Software": None})
    return paths


# ---- The page ----
def html_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["".join(f"<th>{html.escape(cell)}</th>" for cell in header)]
    lines += ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows]
    return "<div><table>\n" + "\n".join(f"<tr>{line}</tr>" for line in lines) + "\n</table></div>"


def section(path: Path, result: dict, pictures: dict[str, Path]) -> str:
    """The part of the page about one result file."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items() if version)
    about = [f"{machine(result)}; {versions}; {result['started'][:16].replace('T', ' ')} UTC"]
    about += ["stopped before its end"] * (not result["ended"])
    if times := len(result.get("resumed", [])):
        about.append(f"stopped and resumed {times} time{'' if times == 1 else 's'}")
    parts = [f"<h2>{html.escape(path.name)}</h2>", f"<p>{html.escape('; '.join(about))}</p>"]
    parts += [f"<p><code>{html.escape(result['command'])}</code></p>", html_table(*compare.table(result))]
    parts += [f"<p>{html.escape(note)}</p>" for note in compare.notes_of(result)]
    is_mean = max(line["runs"] for line in result["medians"]) < 4  # of three there is no quarter to leave out
    words = {"spread": compare.spread(result["medians"]), "mean": "mean" if is_mean else "interquartile mean"}
    for kind, picture in pictures.items():
        data = base64.b64encode(picture.read_bytes()).decode()
        caption = html.escape(CAPTIONS[kind].format(**words))
        parts.append(f'<img src="data:image/png;base64,{data}" alt="{caption}"><p>{caption}</p>')
    commands = "\n".join(html.escape(run["command"]) for run in result["runs"])
    parts.append(f"<details><summary>The {len(result['runs'])} runs</summary><pre>{commands}</pre></details>")
    return "\n".join(parts)


def main(args: Args) -> None:
    if not args.results:
        fail("results: name one result file of compare.py at least")
    results = {path: compare.load_comparison("results", path) for path in dict.fromkeys(args.results)}
    stems = [path.stem for path in results]
    if len(set(stems)) < len(stems):
        fail(f"results: the files need names that differ, got {', '.join(stems)}")
    for path, result in results.items():
        if not finished(result["runs"]):
            fail(f"results {path}: has no finished run")
    try:
        args.output.mkdir(parents=True, exist_ok=True)
        pictures = {path: draw_all(result, path.stem, args.output) for path, result in results.items()}
        sections = "\n".join(section(path, result, pictures[path]) for path, result in results.items())
        page = f"{HEAD}\n<h1>Comparison</h1>\n{sections}\n</html>\n"
        (args.output / "report.html").write_text(page)
    except OSError as error:
        fail(f"--output {args.output}: must be a folder that can be written to ({error.strerror})")
    for paths in pictures.values():
        print(*paths.values(), sep="\n")
    print(args.output / "report.html")


if __name__ == "__main__":
    main(command_line(Args, __doc__))
