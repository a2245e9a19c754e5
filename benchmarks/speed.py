"""Measures environment steps per second of the scripts' variants, and how long their warm-up takes.

    python benchmarks/speed.py                                  every script, every variant that the machine can run
    python benchmarks/speed.py --scripts sac --variants eager compile --repeats 3
    python benchmarks/speed.py --warmup                         warm-up with cold and with warm compile caches

Each measurement is a fresh process of a script. The arms (script × variant) take turns, so that a machine that slows
down slows them all; the ratio to eager is taken within each turn, and its median is reported. `eager` is X.py, the
other variants are X_torchcompile.py: `none` without flags, `compile`, `cudagraphs` and `compile+cudagraphs` with them.

On a CPU, SAC and TD3 are also compared with what the arithmetic allows: just before each of their runs, a short process
measures the machine's float32 matrix rate (256×256×256, on as many threads, by torch.mm and by oneDNN, the faster one
counts). Their share of the arithmetic limit is fps × (floating-point operations a step) / rate.

The result is a JSON file, written anew after each run, so that a benchmark that is stopped keeps what it has measured.
Nothing else should run on the machine meanwhile; its load before each run is recorded.
"""

import ast
import contextlib
import ctypes
import datetime
import importlib.metadata
import importlib.util
import io
import json
import math
import os
import platform
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Literal, NoReturn

import tyro

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "leanrl"
RESULTS = ROOT / "benchmarks" / "results"  # what the README's tables are made of: only an explicit --output goes there
BENCH = Path("runs/bench")

Variant = Literal["eager", "none", "compile", "cudagraphs", "compile+cudagraphs"]
FLAGS = {
    "none": [],
    "compile": ["--compile"],
    "cudagraphs": ["--cudagraphs"],
    "compile+cudagraphs": ["--compile", "--cudagraphs"],
}
PACKAGES = ("tensordict", "gymnasium", "envpool", "mujoco", "numpy", "jax")  # whose versions a result has
PRCTL = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
RESULT_KEYS = ("kind", "command", "started", "ended", "device", "hardware", "versions", "settings", "runs")


@dataclass(frozen=True)
class Workload:
    """How long a script runs to be measured, and what its arithmetic is."""

    learning_starts: int | None
    """environment steps before the first update; None for an on-policy script"""
    cpu: int
    """environment steps with learning, on a CPU"""
    cuda: int
    """the same on CUDA, for the variants without captured graphs"""
    captured: int
    """the same on CUDA, for the variants with them"""
    flop_per_step: float | None = None
    """floating-point operations an environment step costs at the default settings; None: not compared with the limit"""

    def steps(self, variant: str, device: str) -> int:
        return self.cpu if device == "cpu" else self.captured if "cudagraphs" in variant else self.cuda


WORKLOADS = {
    "sac_continuous_action": Workload(1_000, cpu=1_000, cuda=1_500, captured=20_000, flop_per_step=0.617e9),
    "td3_continuous_action": Workload(1_000, cpu=2_000, cuda=3_000, captured=40_000, flop_per_step=0.41e9),
    "dqn": Workload(1_000, cpu=100_000, cuda=40_000, captured=150_000),
    "ppo": Workload(None, cpu=60_000, cuda=40_000, captured=150_000),
    "ppo_continuous_action": Workload(None, cpu=20_480, cuda=20_480, captured=61_440),
    "ppo_atari_envpool": Workload(None, cpu=8_192, cuda=40_960, captured=81_920),
    "ppo_memory": Workload(None, cpu=61_440, cuda=40_960, captured=163_840),
    "dqn_memory": Workload(5_000, cpu=40_000, cuda=40_000, captured=150_000),
    "impala_ray": Workload(None, cpu=100_000, cuda=60_000, captured=150_000),
    "appo_ray": Workload(None, cpu=60_000, cuda=60_000, captured=150_000),
}

# Run in processes of their own, so that this one has neither torch's threads nor a CUDA context.
PROBE = """
import json, torch
cuda = torch.cuda.is_available()
print(json.dumps({"torch": torch.__version__, "threads": torch.get_num_threads(),
                  "gpu": torch.cuda.get_device_name(0) if cuda else None}))
"""
MATRIX_RATE = """
import json, statistics, time, torch
a, b, out = (torch.randn(256, 256) for _ in range(3))
products = {"torch.mm": lambda: torch.mm(a, b, out=out)}
if torch.backends.mkldnn.is_available():
    products["oneDNN"] = lambda: torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], "")
rates = {}
for name, product in products.items():
    seconds, end = [], time.perf_counter() + 1
    while time.perf_counter() < end or len(seconds) < 100:
        started = time.perf_counter()
        product()
        seconds.append(time.perf_counter() - started)
    rest = seconds[len(seconds) // 5:]  # the first fifth wakes the machine up
    rates[name] = round(2 * 256**3 / statistics.median(rest))
print(json.dumps({"flop_per_second": max(rates.values()), "by": rates, "threads": torch.get_num_threads()}))
"""


@dataclass
class Args:
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
    """scripts to measure: names in leanrl/ without `_torchcompile` and `.py`, or the beginnings of such names"""
    variants: tuple[Variant, ...] = ()
    """variants to measure; by default all that the device can run"""
    repeats: int = 5
    """runs of each arm"""
    env_id: str | None = None
    """id of the environment; each script's own default if not given"""
    num_envs: int | None = None
    """number of environments stepped side by side; each script's own default if not given"""
    steps: int | None = None
    """environment steps with learning in each run; by default chosen by script, so that a run takes 10 to 20 s"""
    learning_starts: int | None = None
    """environment steps before learning starts in each run; by default chosen by script"""
    flags: str = ""
    """more flags for the scripts, as one string: --flags="--batch-size 128" """
    cuda: bool = True
    """measure on CUDA where there is a device, else on the CPU"""
    warmup: bool = False
    """measure the warm-up instead: each variant once with an empty compile cache, then twice with the cache it made"""
    timeout: float = 900.0
    """seconds after which a run is stopped and counts as failed"""
    output: Path | None = None
    """result file; by default runs/bench/speed_DEVICE_DATE.json, or warmup_… with --warmup"""


def fail(message: str) -> NoReturn:
    """Ends the program with one line on stderr and exit status 2."""
    sys.exit(print(f"error: {message}", file=sys.stderr) or 2)


def command_line(kind, description: str):
    """`tyro.cli`, but what it can't parse ends the program with one line on stderr, not a box, and exit status 2."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(kind, description=description)
    except SystemExit:
        if said.getvalue():
            _, *parts = re.split("[─-]{4,}", re.sub("\x1b.*?m|[╭╮╰╯│]", "", said.getvalue()))
            fail("; ".join(" ".join(part.split()) for part in parts if part.strip()))
        raise


def check_plot(path: Path | None) -> None:
    """Ends the program with exit status 2 if a picture is asked for that is no PNG file or can't be written."""
    if path is not None and (path.is_dir() or not os.access(path.resolve().parent, os.W_OK)):
        fail(f"--plot {path}: must be a file in a folder that can be written to")
    if path is not None and path.suffix != ".png":
        fail(f"--plot {path}: must be a PNG file")


def check_seconds(args: object, *names: str) -> None:
    """Ends the program with exit status 2 unless these arguments are times that can be waited for."""
    for name in names:
        if not 0 < getattr(args, name) <= 1e6:
            fail(f"--{name.replace('_', '-')} {getattr(args, name):g}: must be above 0 and at most 1e6 s")


def split_flags(flags: str) -> list[str]:
    """The words of --flags; ends the program with exit status 2 if a quotation is open."""
    try:
        return shlex.split(flags)
    except ValueError as error:
        fail(f"--flags {flags}: {error}")


# ---- Processes ----
def stop(process: subprocess.Popen) -> None:
    """Ends a process that has a group of its own, and all that it started."""
    for number, patience in ((signal.SIGTERM, 10), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)


def end_with_parent(parent: int) -> None:
    """In a process that was just forked: has the kernel kill it once the thread that forked it ends, killed or not."""
    PRCTL(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def run_process(
    command: Sequence[str],
    timeout: float,
    environment: dict[str, str] | None = None,
    watch: Callable[[int], contextlib.AbstractContextManager] = contextlib.nullcontext,
    folder: Path = ROOT,
):
    """Runs a command in `folder` to its end; returns (exit status, None after `timeout` seconds), stdout and stderr.

    Whatever interrupts this call, Ctrl-C included, ends the command and its children; on Linux the command also ends if
    this program is killed. The context `watch(pid)` is that in which it runs.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=environment,
        start_new_session=True,
        preexec_fn=partial(end_with_parent, os.getpid()) if PRCTL else None,
    )
    try:
        with watch(process.pid):
            out, err = process.communicate(timeout=max(timeout, 0))
        return process.returncode, out, err
    except subprocess.TimeoutExpired:
        stop(process)
        out, err = process.communicate()
        return None, out, err
    finally:
        stop(process)


def terminate_like_interrupt() -> None:
    """Makes SIGTERM end this program in the orderly way that ends its children."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def scrub(text: str) -> str:
    """`text` without the folders of this machine."""
    folders = [(ROOT, "."), (Path.cwd(), "HERE"), (tempfile.gettempdir(), "TMP"), (sys.prefix, "PYTHON")]
    for path, name in [*folders, (Path.home(), "~")]:
        if len(str(path)) > 1:
            text = re.sub(rf"{re.escape(str(path))}(?![\w-])", name, text)
    return text


def ask(program: str, environment: dict[str, str] | None = None) -> dict:
    """What a short Python program prints as JSON."""
    code, out, err = run_process([sys.executable, "-c", program], 120, environment)
    if code != 0:
        raise RuntimeError(scrub((err.strip().splitlines() or ["no output"])[-1]))
    return json.loads(out)


# ---- One run ----
def run_script(
    name: str,
    flags: Sequence[str],
    timeout: float,
    environment: dict[str, str] | None = None,
    watch: Callable[[int], contextlib.AbstractContextManager] = contextlib.nullcontext,
    collect: Callable[[Path], dict] = lambda folder: {},
) -> dict:
    """Runs leanrl/`name`.py once; what came of it, with `status` finished or failed and the script's summary.

    It runs where this program does, for a `module:Id` of an environment may be there.

    `watch` is `run_process`'s; what `collect` makes of the folder of a finished run becomes a part of the record.
    """
    record = {
        "command": shlex.join(["python", f"leanrl/{name}.py", *flags]),
        "load_before": round(os.getloadavg()[0], 2),
    }
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        command = [sys.executable, str(SCRIPTS / f"{name}.py"), *flags, "--output-dir", folder]
        code, out, err = run_process(command, timeout, environment, watch, Path.cwd())
        record["process_seconds"] = round(time.perf_counter() - started, 2)
        summaries = list(Path(folder).glob("*/summary.json"))
        summary = json.loads(summaries[0].read_text()) if len(summaries) == 1 else None
        record["ended"] = round(summaries[0].stat().st_mtime, 2) if summary else round(time.time(), 2)
        is_finished = code == 0 and summary and summary["status"] == "finished"
        record |= collect(summaries[0].parent) if is_finished else {}
    if buffer := re.search("^replay buffer: (.+)$", out, re.MULTILINE):
        record["replay_buffer"] = buffer[1]
    if is_finished:
        return record | {"status": "finished", "summary": summary}
    lines = err.strip().splitlines() or ["no message"]
    reason = f"stopped after {timeout:.0f} s" if code is None else f"exit status {code}: {scrub(lines[-1])}"
    return record | {"status": "failed", "reason": reason, "summary": summary}


def script_of(script: str, variant: str) -> str:
    return {"eager": script, "jax": f"{script}_jax"}.get(variant, f"{script}_torchcompile")


def defaults_of(script: str) -> dict[str, object]:
    """The defaults in the `Args` of leanrl/`script`.py, without running it."""
    return defaults_in(SCRIPTS / f"{script}.py")


@lru_cache  # a plan of learning.py's asks for the same script's with each run
def defaults_in(path: Path) -> dict[str, object]:
    nodes = ast.parse(path.read_text()).body
    fields = [f for node in nodes if isinstance(node, ast.ClassDef) and node.name == "Args" for f in node.body]
    return {field.target.id: ast.literal_eval(field.value) for field in fields if isinstance(field, ast.AnnAssign)}


def is_comparable(args: Args, script: str) -> bool:
    """Whether a step costs what `WORKLOADS` says: the script's default environment and settings."""
    return bool(WORKLOADS[script].flop_per_step) and args.env_id in (None, "HalfCheetah-v4") and not args.flags


def lengths(script: str, learning_starts: int, steps: int) -> list[str]:
    """The flags of a run with this many steps of learning."""
    if WORKLOADS[script].learning_starts is None:
        return ["--total-timesteps", str(steps)]
    return ["--learning-starts", str(learning_starts), "--total-timesteps", str(learning_starts + steps)]


def whole_lengths(script: str, steps: int, num_envs: int | None, flags: str) -> tuple[int, int]:
    """The workload's environment steps before learning, and `steps` with it, in whole steps of all environments.

    On-policy scripts learn once a rollout: theirs are whole rollouts, at least 4, so that 3 lie in the window of fps.
    """
    defaults, given = defaults_of(script), re.search(r"--num[-_]steps[ =]+(\d+)", flags)
    unit = (num_envs or defaults.get("num_envs", 1)) * int(given[1] if given else defaults.get("num_steps", 1))
    learning_starts, steps = (-(-count // unit) * unit for count in (WORKLOADS[script].learning_starts or 0, steps))
    return learning_starts, max(steps, 4 * unit)


def measure(args: Args, device: str, script: str, variant: str, repeat: int, timeout: float) -> dict:
    """One run of an arm, on a CPU with the matrix rate just before it."""
    workload = WORKLOADS[script]
    learning_starts, steps = whole_lengths(script, workload.steps(variant, device), args.num_envs, args.flags)
    learning_starts = learning_starts if args.learning_starts is None else args.learning_starts
    flags = [*FLAGS.get(variant, []), "--seed", str(repeat)]
    flags += lengths(script, learning_starts, args.steps or steps)
    flags += ["--num-envs", str(args.num_envs)] if args.num_envs else []
    flags += ["--env-id", args.env_id] if args.env_id else []
    flags += ["--no-cuda"] if device == "cpu" else []
    flags += shlex.split(args.flags)
    record = {"script": script, "variant": variant, "repeat": repeat}
    if device == "cpu" and is_comparable(args, script):
        record["matrix_rate"] = ask(MATRIX_RATE)
    record |= run_script(script_of(script, variant), flags, timeout)
    if "matrix_rate" in record and record["status"] == "finished":
        share = record["summary"]["fps"] * workload.flop_per_step / record["matrix_rate"]["flop_per_second"]
        record["share_of_arithmetic_limit"] = round(share, 4)
    return record


# ---- Medians ----
def finished(runs: Sequence[dict], **what) -> list[dict]:
    return [run for run in runs if run["status"] == "finished" and all(run[key] == what[key] for key in what)]


def median(values: Sequence[float | None], digits: int | None = 4) -> float | None:
    values = [value for value in values if value is not None]
    return round(statistics.median(values), digits) if values else None


def arms_of(runs: Sequence[dict]) -> list[tuple[str, str]]:
    """The (script, variant) that were run, each script's variants together and in the usual order."""
    scripts, variants = list(dict.fromkeys(run["script"] for run in runs)), ["eager", *FLAGS]
    arms = {(run["script"], run["variant"]) for run in runs}
    return sorted(arms, key=lambda arm: (scripts.index(arm[0]), variants.index(arm[1])))


def failures_of(runs: Sequence[dict], script: str, variant: str) -> list[dict]:
    return [run for run in runs if (run["script"], run["variant"], run["status"]) == (script, variant, "failed")]


def summarise(runs: Sequence[dict]) -> list[dict]:
    """One line an arm: the medians over its finished runs, and its speed-up over eager.

    `times_eager` is the median of the ratios taken repeat by repeat, `times_eager_of_medians` the ratio of medians.
    """
    lines = []
    for script, variant in arms_of(runs):
        own = finished(runs, script=script, variant=variant)
        eager = {run["repeat"]: run["summary"]["fps"] for run in finished(runs, script=script, variant="eager")}
        eager_fps = [value for value in eager.values() if value]
        fps = [run["summary"]["fps"] for run in own if run["summary"]["fps"]]
        pairs = [(run["summary"]["fps"], eager.get(run["repeat"])) for run in own]
        ratios = [mine / other for mine, other in pairs if mine and other]
        failures = failures_of(runs, script, variant)
        line = {"script": script, "variant": variant, "runs": len(own), "failed": len(failures)}
        line["reason"] = failures[-1]["reason"] if failures else None
        line["env_id"] = own[0]["summary"]["env_id"] if own else None
        line |= {"fps": median(fps, 2), "fps_min": min(fps, default=None), "fps_max": max(fps, default=None)}
        line["times_eager"] = median(ratios)
        both = [statistics.median(fps), statistics.median(eager_fps)] if fps and eager_fps else None
        line["times_eager_of_medians"] = round(both[0] / both[1], 4) if both else None
        line["share_of_arithmetic_limit"] = median([run.get("share_of_arithmetic_limit") for run in own])
        for key, digits in (("warmup_seconds", 3), ("wall_seconds", 3), ("peak_memory_bytes", None), ("threads", None)):
            line[key] = median([run["summary"][key] for run in own], digits)
        line["gpu_percent"] = median([(run.get("gpu_use") or {}).get("utilisation_percent") for run in own], 1)
        line["replay_buffer"] = own[0].get("replay_buffer") if own else None
        lines.append(line)
    return lines


def summarise_warmup(runs: Sequence[dict]) -> list[dict]:
    """One line an arm: seconds of warm-up, and of the whole short process, with a cold and with a warm cache."""
    lines = []
    for script, variant in arms_of(runs):
        line = {"script": script, "variant": variant}
        for cache in ("cold", "warm"):
            own = finished(runs, script=script, variant=variant, cache=cache)
            line[cache] = median([run["summary"]["warmup_seconds"] for run in own], 3)
            line[f"{cache}_process"] = median([run["process_seconds"] for run in own], 3)
        failures = failures_of(runs, script, variant)
        lines.append(line | {"reason": failures[-1]["reason"] if failures else None})
    return lines


def show(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def print_table(rows: Sequence[Sequence[str]], left: int = 2) -> None:
    """Prints rows of cells in columns, the first `left` of them to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        print("  ".join(cells).rstrip())


def print_result(result: dict) -> None:
    if result["kind"] == "warmup":
        rows = [["script", "variant", "cold s", "warm s", "whole process cold s", "warm s"]]
        rows += [
            [line["script"], line["variant"]]
            + [show(line[key], 1) for key in ("cold", "warm", "cold_process", "warm_process")]
            for line in result["medians"]
        ]
    else:
        rows = [["script", "variant", "runs", "steps/s", "least", "most", "× eager", "of limit", "warm-up s", "MB"]]
        for line in result["medians"]:
            share, memory = line["share_of_arithmetic_limit"], line["peak_memory_bytes"]
            rows.append([line["script"], line["variant"], str(line["runs"])])
            rows[-1] += [show(line[key], 1) for key in ("fps", "fps_min", "fps_max")] + [show(line["times_eager"])]
            rows[-1] += ["-" if share is None else f"{share:.0%}", show(line["warmup_seconds"], 1)]
            rows[-1] += [show(memory and memory / 1e6, 0)]
    print_table(rows)
    for line in result["medians"]:
        if line["reason"]:
            print(f"{line['script']} {line['variant']} failed: {line['reason']}")


# ---- The result file ----
def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def hardware(probe: dict) -> dict:
    """What the machine is, with no name that identifies it."""
    text = Path("/proc/cpuinfo").read_text() if sys.platform == "linux" else ""
    names, families = re.findall("model name\t: (.+)", text), re.findall(r"cpu family\t: (\d+)", text)
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    about = {"cpu": (*names, platform.machine())[0], "cores": usable, "torch_threads": probe["threads"]}
    about["cpu_family"] = int(families[0]) if families else None  # AMD EPYC is of family 25 (Zen 3, 4) or 26 (Zen 5)
    return about | {"gpu": probe["gpu"], "system": f"{platform.system()} {platform.machine()}"}


def new_result(kind: str, args: object, probe: dict, device: str) -> dict:
    """A result with nothing measured yet."""
    command = ["python", f"benchmarks/{Path(sys.argv[0]).name}"]
    command += [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
    settings = {key: value for key, value in vars(args).items() if key not in ("output", "against")}
    result = {"kind": kind, "command": shlex.join(command), "started": now(), "ended": None, "device": device}
    versions = {"python": platform.python_version(), "torch": probe["torch"]}
    for name in PACKAGES:
        versions[name] = importlib.metadata.version(name) if importlib.util.find_spec(name) else None
    result |= {"hardware": hardware(probe), "versions": versions}
    return result | {"settings": settings, "medians": [], "runs": []}


def read_result(flag: str, path: Path, kind: str) -> dict:
    """The result in a file; ends the program if that holds no result of this kind, or a part of one."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        result = json.loads(path.read_text())
        if result["kind"] == kind and {*RESULT_KEYS} <= {*result}:
            return result
    fail(f"{flag} {path}: must be a result file of the kind {kind}")


def check_output(path: Path, kind: str, goes_on: bool = False) -> None:
    """Ends the program if no result can be written to `path`, or if one is there, unless it `goes_on` with its kind."""
    found = next(place for place in (path.absolute(), *path.absolute().parents) if os.path.exists(place))
    is_there = found == path.absolute()
    places = {found, found.parent} if is_there else {found}  # the file is replaced as a whole
    if is_there == found.is_dir() or not all(os.access(place, os.W_OK) for place in places):
        fail(f"--output {path}: must be a file that can be written")
    if is_there and not goes_on:
        fail(f"--output {path}: is there already")
    if is_there:
        read_result("--output", path, kind)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"--output {path}: must be a file that can be written ({error.strerror})")


def write(result: dict, path: Path) -> None:
    save(result, path, (summarise_warmup if result["kind"] == "warmup" else summarise)(result["runs"]))


def save(result: dict, path: Path, medians: list[dict], indent: int | None = 1) -> None:
    """Writes the result with its medians; the file is at every moment a whole one."""
    result["medians"] = medians
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(result, indent=indent, default=str) + "\n")
    part.replace(path)


def result_path(kind: str, device: str, probe: dict, folder: Path = BENCH) -> Path:
    """A name in `folder`, which is made if need be, that is not in use yet: KIND_DEVICE_DATE.json."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"{folder}: must be a folder that can be written to ({error.strerror})")
    name = "cpu" if device == "cpu" else re.sub(r"[^a-z0-9]+", "-", probe["gpu"].lower()).strip("-")
    stem = f"{kind}_{name}_{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"
    path, count = folder / f"{stem}.json", 1
    while path.exists():
        count += 1
        path = folder / f"{stem}-{count}.json"
    return path


# ---- Benchmarks ----
def measure_all(
    args: Args,
    plan: Sequence[tuple[str, str, int]],
    result: dict,
    output: Path,
    deadline: float = math.inf,
    after_each: Callable[[], None] = lambda: None,
    cold: float = 60.0,
) -> None:
    """Measures each (script, variant, repeat) of `plan` in turn into `result["runs"]`.

    An arm that has failed is not run again. A run is not begun unless it can be expected to end before `deadline`, on
    the clock of `time.perf_counter`, and is stopped when that comes; `cold` is how many seconds are expected of the
    first run of a compiled arm.
    """
    for script, variant, repeat in plan:
        left = deadline - time.perf_counter()
        before = [run["process_seconds"] for run in finished(result["runs"], script=script, variant=variant)]
        expected = max(before, default=cold if "compile" in variant else 20)
        if failures_of(result["runs"], script, variant) or left < expected + 5:
            continue
        print(f"{script} {variant}, run {repeat}: ", end="", flush=True)
        try:
            record = measure(args, result["device"], script, variant, repeat, min(args.timeout, left))
        except RuntimeError as error:  # the matrix rate could not be measured
            record = {"script": script, "variant": variant, "repeat": repeat, "status": "failed", "reason": str(error)}
        result["runs"].append(record)
        write(result, output)
        if record["status"] == "finished":
            share = record.get("share_of_arithmetic_limit")
            limit = "" if share is None else f", {share:.0%} of the arithmetic limit"
            print(f"{show(record['summary']['fps'], 1)} steps/s{limit} ({record['process_seconds']:.0f} s)", flush=True)
        else:
            print(f"failed: {record['reason']}", flush=True)
        after_each()


def warm_up_all(
    arms: Sequence[tuple[str, str]],
    flags: Sequence[str],
    result: dict,
    output: Path,
    timeout: float = 900.0,
    deadline: float = math.inf,
) -> None:
    """Runs each (script, variant) of `arms` once with an empty compile cache and twice with that cache."""
    for script, variant in arms:
        with tempfile.TemporaryDirectory() as folder:
            # Triton keeps its cache inside Inductor's, unless it is told otherwise
            environment = {key: value for key, value in os.environ.items() if key != "TRITON_CACHE_DIR"}
            # Inductor's compiled headers go to the folder for temporary files
            environment["TORCHINDUCTOR_CACHE_DIR"] = environment["TMPDIR"] = folder
            for repeat, cache in enumerate(("cold", "warm", "warm"), 1):
                left = deadline - time.perf_counter()
                if left < 30:
                    return
                print(f"{script} {variant}, {cache}: ", end="", flush=True)
                record = {"script": script, "variant": variant, "repeat": repeat, "cache": cache}
                steps = 200 if WORKLOADS[script].learning_starts is not None else 4_096
                all_flags = [*FLAGS[variant], *lengths(script, 1_024, steps), *flags]
                record |= run_script(script_of(script, variant), all_flags, min(timeout, left), environment)
                result["runs"].append(record)
                write(result, output)
                if record["status"] == "failed":
                    print(f"failed: {record['reason']}", flush=True)
                    break
                warmup, whole = record["summary"]["warmup_seconds"], record["process_seconds"]
                print(f"{warmup:.1f} s of warm-up, {whole:.1f} s in all", flush=True)


def find_scripts(names: Sequence[str], flag: str = "--scripts") -> list[str]:
    """Full names of the scripts that `names`, which `flag` has given, begin."""
    found = []
    for name in names:
        short = name.removesuffix(".py").removesuffix("_torchcompile")
        matches = [short] if short in WORKLOADS else [known for known in WORKLOADS if known.startswith(short)]
        if len(matches) != 1:
            fail(f"{flag} {name}: must be one of {', '.join(WORKLOADS)}, or the beginning of just one")
        found += matches
    return list(dict.fromkeys(found))


def check_args(args: Args, device: str) -> None:
    check_seconds(args, "timeout")
    for name in ("repeats", "num_envs", "steps"):
        if getattr(args, name) is not None and getattr(args, name) <= 0:
            fail(f"--{name.replace('_', '-')} {getattr(args, name)}: must be above 0")
    split_flags(args.flags)  # before anything has been measured
    if args.learning_starts is not None and args.learning_starts < 0:
        fail(f"--learning-starts {args.learning_starts}: must be at least 0")
    if device == "cpu" and any("cudagraphs" in variant for variant in args.variants):
        fail("--variants: cudagraphs needs a CUDA device and --cuda")


def possible_variants(device: str) -> list[str]:
    return [variant for variant in ("eager", *FLAGS) if device == "cuda" or "cudagraphs" not in variant]


def warn_if_busy() -> None:
    if (load := os.getloadavg()[0]) > 0.5:
        print(f"note: the machine is not quiet (load {load:.1f}), which falsifies every figure", file=sys.stderr)


@contextlib.contextmanager
def until_stopped(
    result: dict, output: Path, write: Callable = write, print_result: Callable = print_result
) -> Iterator[None]:
    """Prints the table at the end, also of a benchmark that is stopped."""
    try:
        yield
        result["ended"] = result["ended"] or now()
    finally:
        if result["runs"]:
            write(result, output)
            print()
            print_result(result)
            print(f"{'all' if result['ended'] else 'stopped; the runs so far'}: {scrub(str(output))}", flush=True)


def main(args: Args) -> None:
    terminate_like_interrupt()
    scripts, probe = find_scripts(args.scripts), ask(PROBE)
    device = "cuda" if args.cuda and probe["gpu"] else "cpu"
    check_args(args, device)
    kind = "warmup" if args.warmup else "speed"
    output = args.output or result_path(kind, device, probe)
    check_output(output, kind)
    result = new_result(kind, args, probe, device)
    warn_if_busy()
    variants = list(dict.fromkeys(args.variants)) or possible_variants(device)
    with until_stopped(result, output):
        if args.warmup:
            arms = [(script, variant) for script in scripts for variant in variants if variant not in ("eager", "none")]
            flags = ["--env-id", args.env_id] if args.env_id else []
            flags += ["--num-envs", str(args.num_envs)] if args.num_envs else []
            flags += ["--no-cuda"] if device == "cpu" else []
            warm_up_all(arms, [*flags, *shlex.split(args.flags)], result, output, args.timeout)
        else:
            plan = [(s, v, r) for r in range(1, args.repeats + 1) for s in scripts for v in variants]
            measure_all(args, plan, result, output)
    if any(run["status"] == "failed" for run in result["runs"]):
        sys.exit(1)


if __name__ == "__main__":
    try:
        main(command_line(Args, __doc__))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
