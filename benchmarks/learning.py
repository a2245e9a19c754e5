"""Trains the scripts to see what they learn, and keeps each finished run as one compact JSON file.

    python benchmarks/learning.py run --jobs 2                 the built-in plan, two processes at a time
    python benchmarks/learning.py run --plan my_plan.json      another plan: a list like `PLAN` in learning.py
    python benchmarks/learning.py collect runs/HalfCheetah-v4__*   run folders made in any other way

`run` skips what has a result already and collects each run as it finishes. A result is
benchmarks/results/learning/ENV__SCRIPT__VARIANT__STEPS__seedSEED.json (with __ARGUMENT-VALUE before the seed for each
hyperparameter that is not the script's default, and __resumed-TIMES if the run was stopped and resumed): the run's
arguments, versions and summary, every episode (as columns), the losses at 200 points at most, and the mean returns of
the last 20 and 100 episodes.
"""

import ast
import itertools
import json
import math
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from speed import FLAGS, RESULTS, SCRIPTS, command_line, defaults_of, fail, split_flags, stop, terminate_like_interrupt

LEARNING = RESULTS / "learning"
SAC, TD3, PPO = "sac_continuous_action_torchcompile", "td3_continuous_action_torchcompile", "ppo_torchcompile"
CONTINUOUS_PPO, ATARI_PPO = "ppo_continuous_action_torchcompile", "ppo_atari_envpool_torchcompile"
PLAN = [
    {
        "script": "dqn_torchcompile",
        "flags": "--compile",
        "env_id": "CartPole-v1",
        "steps": 500_000,
        "seeds": [1, 2, 3, 4],
    },
    {"script": "dqn_torchcompile", "flags": "--compile", "env_id": "Acrobot-v1", "steps": 500_000, "seeds": [1, 2, 3]},
    {"script": PPO, "flags": "--compile", "env_id": "CartPole-v1", "steps": 500_000, "seeds": [1, 2, 3]},
    {"script": PPO, "flags": "--compile", "env_id": "Acrobot-v1", "steps": 500_000, "seeds": [1, 2, 3]},
    *(
        {"script": CONTINUOUS_PPO, "flags": "--compile", "env_id": f"{task}-v4", "steps": 1_000_000, "seeds": [1, 2, 3]}
        for task in ("HalfCheetah", "Hopper", "Walker2d", "InvertedPendulum")
    ),
    {"script": ATARI_PPO, "flags": "--compile", "env_id": "Breakout-v5", "steps": 1_500_000, "seeds": [1]},
    {"script": ATARI_PPO, "flags": "--compile", "env_id": "Pong-v5", "steps": 1_000_000, "seeds": [1]},
    {"script": ATARI_PPO, "flags": "--compile", "env_id": "Pong-v5", "steps": 3_000_000, "seeds": [1]},
    {"script": SAC, "flags": "--compile", "env_id": "InvertedPendulum-v4", "steps": 60_000, "seeds": [1, 2, 3, 4]},
    {"script": TD3, "flags": "--compile", "env_id": "InvertedPendulum-v4", "steps": 60_000, "seeds": [*range(1, 11)]},
    {"script": TD3, "flags": "--compile", "env_id": "InvertedPendulum-v4", "steps": 200_000, "seeds": [1, 2, 3]},
    {
        "script": TD3,
        "flags": "--compile --learning-starts 5000",  # SAC's: its own 25,000 leave less than 60 % of this run to learn
        "env_id": "InvertedPendulum-v4",
        "steps": 60_000,
        "seeds": [1, 2, 3],
    },
    {
        "script": TD3,
        "flags": "--compile --learning-starts 1000",  # the TD3 paper's for this task (section 6.1)
        "env_id": "InvertedPendulum-v4",
        "steps": 60_000,
        "seeds": [1, 2, 3],
    },
    # Stopped half-way and resumed, to compare with those that were not
    {
        "script": PPO,
        "flags": "--compile",
        "env_id": "CartPole-v1",
        "steps": 500_000,
        "seeds": [1, 2, 3],
        "stop_at": 250_000,
    },
    {
        "script": SAC,
        "flags": "--compile --save-replay",
        "env_id": "InvertedPendulum-v4",
        "steps": 60_000,
        "seeds": [1, 2, 3],
        "stop_at": 30_000,
    },
    {"script": SAC, "flags": "--compile", "env_id": "HalfCheetah-v4", "steps": 100_000, "seeds": [2, 3, 4]},
    {"script": TD3, "flags": "--compile", "env_id": "HalfCheetah-v4", "steps": 100_000, "seeds": [2, 3, 4]},
    {"script": SAC, "flags": "--compile", "env_id": "HalfCheetah-v4", "steps": 250_000, "seeds": [1]},
    {"script": SAC, "flags": "--compile", "env_id": "HalfCheetah-v4", "steps": 1_000_000, "seeds": [1]},
    {"script": TD3, "flags": "--compile", "env_id": "HalfCheetah-v4", "steps": 250_000, "seeds": [1]},
    {"script": TD3, "flags": "--compile", "env_id": "HalfCheetah-v4", "steps": 1_000_000, "seeds": [1, 2]},
    {"script": SAC, "flags": "--compile", "env_id": "Hopper-v4", "steps": 250_000, "seeds": [1]},
    {"script": TD3, "flags": "--compile", "env_id": "Hopper-v4", "steps": 250_000, "seeds": [1, 2]},
    {"script": TD3, "flags": "--compile", "env_id": "Hopper-v4", "steps": 1_000_000, "seeds": [1, 2]},
    *(  # what other memories learn, and elsewhere, is the plan of memory_learning.py
        {
            "script": script,
            "flags": "--compile",
            "env_id": "benchmarks.tmaze:TMaze-v0",
            "steps": 100_000,
            "seeds": [1, 2, 3],
        }
        for script in ("ppo_memory_torchcompile", "dqn_memory_torchcompile")
    ),
    *(  # what lag costs is the plan of lag_learning.py
        {
            "script": script,
            "flags": "--compile --num-actors 2",
            "env_id": "CartPole-v1",
            "steps": 500_000,
            "seeds": [*range(1, 9)],
        }
        for script in ("impala_ray_torchcompile", "appo_ray_torchcompile")
    ),
    {
        "script": "impala_ray_torchcompile",
        "flags": "--compile --learning-rate 6e-4 --ent-coef 0.01 --value-scale 1",  # of its docstring
        "env_id": "Breakout-v5",
        "steps": 250_000,
        "seeds": [1],
    },
    {
        "script": "appo_ray_torchcompile",
        "flags": "--compile --num-actors 2 --num-envs 1 --fragment-length 512 --batch-fragments 4 --update-epochs 10"
        " --num-minibatches 32 --learning-rate 3e-4 --ent-coef 0",
        "env_id": "HalfCheetah-v4",
        "steps": 1_000_000,
        "seeds": [1, 2, 3],
    },
]
# What a line of metrics.jsonl holds besides the losses, and what config.json holds besides the arguments
NO_LOSS = ("global_step", "wall_time", "fps", "episode_return", "episode_length", "learning_rate")
NO_ARGUMENT = ("device", "device_name", "threads", "versions")
PRIVATE = ("output_dir", "wandb_project", "wandb_entity")
# Arguments that a result's name has anyway, or that leave what is learned alone
NO_HYPERPARAMETER = ("seed", "env_id", "total_timesteps", "compile", "cudagraphs", "cuda", "torch_deterministic")
NO_HYPERPARAMETER += ("track", "measure_burnin", "save_every", "resume", "save_replay", *PRIVATE)
LOSS_POINTS = 200


@dataclass
class RunArgs:
    """Runs learning jobs, and collects each as it finishes."""

    plan: Path | None = None
    """JSON file, a list of {"script", "flags", "env_id", "steps", "seeds"}; the built-in plan if not given"""
    jobs: int = 1
    """processes at a time; each has one thread if there are several"""
    output_dir: Path = Path("runs")
    """folder for the run folders and the logs"""
    results: Path = LEARNING
    """folder of the results"""
    points: int = 0
    """keep no more than this many means of episodes in a result, instead of every episode; 0: every episode"""
    dry_run: bool = False
    """only say what would run"""


@dataclass
class CollectArgs:
    """Turns folders of finished runs into results."""

    folders: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FOLDERS")]
    """run folders, of finished runs"""
    results: Path = LEARNING
    """folder of the results"""
    force: bool = False
    """replace a result that was made by another run"""


def make_folder(flag: str, folder: Path) -> None:
    """Makes the folder if need be; ends the program with exit status 2 if it can't be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"{flag} {folder}: must be a folder that can be written to ({error.strerror})")
    if not os.access(folder, os.W_OK):
        fail(f"{flag} {folder}: must be a folder that can be written to")


# ---- Collecting ----
def read_columns(path: Path) -> dict[str, list]:
    """The lines of a JSON-lines file as columns; None where a line lacks a key."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    keys = list(dict.fromkeys(key for line in lines for key in line))
    return {key: [line.get(key) for line in lines] for key in keys}


def thin(columns: dict[str, list], points: int) -> dict[str, list]:
    """At most `points` rows, evenly spaced, the first and the last among them."""
    rows = len(next(iter(columns.values()), []))
    if rows <= points:
        return columns
    kept = [round(i * (rows - 1) / (points - 1)) for i in range(points)]
    return {key: [column[row] for row in kept] for key, column in columns.items()}


def averaged(episodes: dict[str, list], points: int) -> dict[str, list]:
    """At most `points` means over as many episodes each, with the step at which the last of them ended."""
    rows = len(next(iter(episodes.values()), []))
    cuts = [round(i * rows / points) for i in range(points + 1)] if rows > points else [*range(rows + 1)]
    parts = [slice(start, end) for start, end in itertools.pairwise(cuts)]
    means = {
        name: [round(statistics.fmean(map(float, column[part])), 4) for part in parts]
        for name, column in episodes.items()
        if name != "global_step"
    }
    return {"global_step": [episodes["global_step"][part][-1] for part in parts], **means}


def losses_of(metrics: dict[str, list]) -> dict[str, list]:
    """The columns of losses, and their steps, from the first line that has them on."""
    names = [name for name in metrics if name not in NO_LOSS]
    rows = [
        row for row in range(len(metrics.get("global_step", []))) if any(metrics[n][row] is not None for n in names)
    ]
    return thin({name: [metrics[name][row] for row in rows] for name in ("global_step", *names)}, LOSS_POINTS)


def changed_from_defaults(script: str, arguments: Mapping[str, object]) -> dict[str, object]:
    """The hyperparameters among `arguments` that differ from the defaults in the script's `Args`."""
    defaults = defaults_of(script)
    names = [name for name in defaults if name in arguments and name not in NO_HYPERPARAMETER]
    values = {name: arguments[name] for name in names if arguments[name] != defaults[name]}
    # A flag's 0 is config.json's 0.0
    return {n: float(v) if isinstance(defaults[n], float) and type(v) is int else v for n, v in values.items()}


def mean_of_last(returns: Sequence[float | None], count: int) -> float | None:
    last = [value for value in returns if value is not None][-count:]
    return round(math.fsum(last) / len(last), 4) if last else None


def collect(folder: Path, points: int = 0) -> dict:
    """The result of a finished run, its episodes or `points` means of them; raises ValueError for other folders."""
    missing = [
        f for f in ("config.json", "summary.json", "episodes.jsonl", "metrics.jsonl") if not (folder / f).is_file()
    ]
    if missing:
        raise ValueError(f"{folder}: not the folder of a finished run, it lacks {', '.join(missing)}")
    config, summary = (json.loads((folder / name).read_text()) for name in ("config.json", "summary.json"))
    if summary["status"] != "finished" or summary["global_step"] < config["total_timesteps"]:
        steps = f"at step {summary['global_step']} of {config['total_timesteps']}"
        raise ValueError(f"{folder}: the run is not finished, but {summary['status']} {steps}")
    episodes = read_columns(folder / "episodes.jsonl")
    returns = episodes.get("return", [])
    if len(returns) != summary["episodes"]:
        raise ValueError(f"{folder}: has {len(returns)} episodes, where its summary counts {summary['episodes']}")
    arguments = {key: value for key, value in config.items() if key not in (*NO_ARGUMENT, *PRIVATE)}
    result = {"kind": "learning", "script": summary["script"], "variant": summary["variant"]}
    changed = changed_from_defaults(summary["script"], arguments)
    if summary.get("resumed_at"):
        changed["resumed"] = len(summary["resumed_at"])
    result |= {"changed": changed, "arguments": arguments}
    result |= {**{key: config[key] for key in NO_ARGUMENT}, "summary": summary}
    result |= {"return_last_20": mean_of_last(returns, 20), "return_last_100": mean_of_last(returns, 100)}
    if points:
        return result | {"means": averaged(episodes, points)}
    return result | {"episodes": episodes, "losses": losses_of(read_columns(folder / "metrics.jsonl"))}


def result_name(env_id: str, script: str, variant: str, steps: int, changed: Mapping[str, object], seed: int) -> str:
    changes = "".join(f"__{name.replace('_', '-')}-{value}" for name, value in sorted(changed.items()))
    return f"{re.sub(r'[^A-Za-z0-9_.-]', '-', env_id)}__{script}__{variant}__{steps}{changes}__seed{seed}.json"


def name_of(result: dict) -> str:
    arguments = result["arguments"]
    script = (result["script"], result["variant"])
    steps, seed = arguments["total_timesteps"], arguments["seed"]
    return result_name(arguments["env_id"], *script, steps, result["changed"], seed)


def write(result: dict, folder: Path, force: bool = False) -> Path:
    """Writes a result; raises ValueError if one of the same name is there of another run."""
    path = folder / name_of(result)
    old = json.loads(path.read_text()) if path.exists() and not force else result
    if any(old.get(name) != result.get(name) for name in ("arguments", "episodes", "means")):
        raise ValueError(f"{path} is there already, from another run (--force replaces it)")
    folder.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(result, separators=(",", ":")) + "\n")
    part.replace(path)
    return path


def collect_all(args: CollectArgs) -> None:
    """Collects all the folders, or none if one is not that of a finished run."""
    if not args.folders:
        fail("FOLDERS: must be one run folder or more")
    try:
        results = [collect(folder) for folder in args.folders]
        make_folder("--results", args.results)
        for result in results:
            path = write(result, args.results, args.force)
            print(f"{path.name}: {result['return_last_100']} (mean of the last 100 episodes)")
    except ValueError as error:
        fail(str(error))


# ---- Running ----
def runs_of(plan: Sequence[dict]) -> set[str]:
    """The names of a plan's results, without their seeds."""
    return {job["name"].rpartition("__seed")[0] for job in jobs_of(plan)}


def check_planned(result: dict, path: Path, runs: set[str]) -> None:
    """Ends the program if a result, read from `path`, is not of these runs."""
    if name_of(result).rpartition("__seed")[0] not in runs:
        fail(f"{path.parent}: {path.name} is of a run that is not in the plan of this folder's results")


def arguments_of(flags: Sequence[str]) -> dict[str, object]:
    """The arguments that flags like `--learning-starts 5000 --no-autotune` set."""
    arguments, flags = {}, [word for flag in flags for word in (flag.split("=", 1) if flag[:2] == "--" else [flag])]
    for flag, value in zip(flags, [*flags, "--"][1:], strict=True):
        if not flag.startswith("--"):
            continue
        name = flag[2:].replace("-", "_")
        if not value.startswith("--"):
            try:
                arguments[name] = ast.literal_eval(value)
            except (SyntaxError, ValueError):
                arguments[name] = value
        else:
            arguments[name.removeprefix("no_")] = not name.startswith("no_")
    return arguments


def jobs_of(plan: Sequence[dict]) -> list[dict]:
    """One job a seed, with the name of its result; ends the program if the plan is not one."""
    jobs = []
    for entry in plan:
        keys = {"script": str, "flags": str, "env_id": str, "steps": int, "seeds": list}
        if not isinstance(entry, dict) or any(not isinstance(entry.get(key), kind) for key, kind in keys.items()):
            fail(f"--plan: {entry!r} must have " + ", ".join(f"{key} ({kind.__name__})" for key, kind in keys.items()))
        if not (SCRIPTS / f"{entry['script']}.py").is_file():
            fail(f"--plan: there is no script leanrl/{entry['script']}.py")
        is_whole = [type(n) is int for n in (entry["steps"], entry.get("stop_at", 1), *entry["seeds"])]
        if not all(is_whole) or entry["steps"] < 1 or entry.get("stop_at", 1) < 1:
            fail(f"--plan: {entry!r} must have whole numbers, and steps and stop_at above 0")
        flags = split_flags(entry["flags"])
        if taken := {"--seed", "--env-id", "--total-timesteps"} & {flag.partition("=")[0] for flag in flags}:
            fail(f"--plan: {entry!r} must have {min(taken)} in a field of its own")
        switches = [flag for flag in ("--compile", "--cudagraphs") if flag in flags]
        variant = next((name for name, needed in FLAGS.items() if needed and needed == switches), "eager")
        changed = changed_from_defaults(entry["script"], arguments_of(flags))
        if "stop_at" in entry:
            changed["resumed"] = 1
        for seed in entry["seeds"]:
            name = result_name(entry["env_id"], entry["script"], variant, entry["steps"], changed, seed)
            command = [*flags, "--env-id", entry["env_id"], "--total-timesteps", str(entry["steps"])]
            command += ["--seed", str(seed)]
            stop_at = {"stop_at": entry["stop_at"]} if "stop_at" in entry else {}
            jobs.append({"name": name, "script": entry["script"], "flags": command, **stop_at})
    return jobs


def start(job: dict, args: RunArgs) -> subprocess.Popen:
    """Starts a job in its own process group; it writes to a log beside its run folder."""
    environment = os.environ | ({"OMP_NUM_THREADS": "1"} if args.jobs > 1 else {})
    folder = args.output_dir / job["name"].removesuffix(".json")
    folder.mkdir(parents=True, exist_ok=True)
    job["folder"] = folder
    job.setdefault("started", time.time())
    job.setdefault("known", {path.parent for path in folder.glob("*/summary.json")})
    command = [sys.executable, str(SCRIPTS / f"{job['script']}.py"), *job["flags"]]
    command += [] if "--resume" in command else ["--output-dir", str(folder)]
    with open(folder / "log", "a") as log:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
        )


def stop_and_resume(job: dict, process: subprocess.Popen, args: RunArgs) -> subprocess.Popen:
    """Sends a job SIGINT once it has passed its step `stop_at`, if it has one, and goes on with it in a new process."""
    if "stop_at" not in job:
        return process
    folders = {path.parent for path in job["folder"].glob("*/metrics.jsonl")} - job["known"]
    lines = [line for folder in folders for line in (folder / "metrics.jsonl").read_text().splitlines(keepends=True)]
    if not any(line.endswith("\n") and json.loads(line)["global_step"] >= job["stop_at"] for line in lines[-1:]):
        return process
    process.send_signal(signal.SIGINT)
    process.wait()
    del job["stop_at"]
    return start(job | {"flags": ["--resume", str(*folders)]}, args)


def finish(job: dict, code: int, args: RunArgs) -> str | None:
    """Collects a job that has ended; why not, if that fails."""
    log = (job["folder"] / "log").read_text().strip().splitlines() or ["no output"]
    folders = {path.parent for path in job["folder"].glob("*/summary.json")} - job["known"]
    if code != 0 or len(folders) != 1:
        return f"exit status {code}: {log[-1]}"
    try:
        result = collect(folders.pop(), args.points)
        write(result, args.results)
    except ValueError as error:
        return str(error)
    minutes = (time.time() - job["started"]) / 60
    print(f"{job['name']}: {result['return_last_100']} (mean of the last 100 episodes), {minutes:.0f} min", flush=True)
    return None


def run_all(args: RunArgs, plan: list[dict] = PLAN) -> None:
    """Runs the jobs that have no result yet, `args.jobs` at a time; exit status 1 if one fails."""
    if args.jobs < 1:
        fail(f"--jobs {args.jobs}: must be at least 1")
    if args.points < 0:
        fail(f"--points {args.points}: must be at least 0")
    try:
        plan = json.loads(args.plan.read_text()) if args.plan else plan
    except (OSError, ValueError) as error:
        fail(f"--plan {args.plan}: must be a JSON file ({error})")
    args.output_dir = args.output_dir.resolve()
    jobs = jobs_of(plan if isinstance(plan, list) else [plan])
    waiting = [job for job in jobs if not (args.results / job["name"]).exists()]
    print(f"{len(jobs)} jobs, {len(jobs) - len(waiting)} of which have a result already", flush=True)
    if args.dry_run:
        for job in waiting:
            print(shlex.join(["python", f"leanrl/{job['script']}.py", *job["flags"]]))
        return
    make_folder("--results", args.results)
    make_folder("--output-dir", args.output_dir)
    running, failures = [], 0
    try:
        while waiting or running:
            while waiting and len(running) < args.jobs:
                job = waiting.pop(0)
                print(f"{job['name']}: started", flush=True)
                running.append((job, start(job, args)))
            time.sleep(0.2)
            running = [(job, stop_and_resume(job, process, args)) for job, process in running]
            for job, process in [pair for pair in running if pair[1].poll() is not None]:
                running.remove((job, process))
                if reason := finish(job, process.returncode, args):
                    failures += 1
                    print(f"{job['name']}: failed, {reason}", file=sys.stderr, flush=True)
    finally:
        for _, process in running:
            stop(process)
    if failures:
        sys.exit(1)


def main(args: RunArgs | CollectArgs) -> None:
    terminate_like_interrupt()
    (run_all if isinstance(args, RunArgs) else collect_all)(args)


if __name__ == "__main__":
    run_command = Annotated[RunArgs, tyro.conf.subcommand("run")]
    collect_command = Annotated[CollectArgs, tyro.conf.subcommand("collect")]
    try:
        main(command_line(run_command | collect_command, __doc__))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
