"""Measures what actors that are killed cost: throughput with and without kills, and seconds until an actor is back.

    python benchmarks/ray_faults.py                        four actors, one killed every 5 s; some 3 minutes

The script trains as it is, in a process of its own. Stretches without kills and with them take turns; throughput is
that of the environment steps delivered in one. An actor is back when the first fragment of its new life is delivered.
The share is the median of the ratios taken pair by pair. The result is a JSON file, written anew after each pair.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from speed import (
    PROBE,
    SCRIPTS,
    ask,
    check_output,
    check_seconds,
    command_line,
    fail,
    median,
    new_result,
    print_table,
    result_path,
    save,
    scrub,
    show,
    split_flags,
    stop,
    terminate_like_interrupt,
    until_stopped,
    warn_if_busy,
)

PROGRAM = """
import importlib, json, sys, time
sys.path.insert(0, {folder!r})
module = importlib.import_module({name!r})
take, stamps = module.Fleet.take, open({stamps!r}, "w", buffering=1)

def noted_take(fleet):
    fragment = take(fleet)
    print(json.dumps([time.time(), *fragment["stamp"].tolist(), int(fragment["valid"].sum())]), file=stamps)
    return fragment

module.Fleet.take = noted_take
module.main(module.tyro.cli(module.Args, args={flags!r}))
"""


@dataclass
class Args:
    script: str = "impala_ray_torchcompile"
    """script to train: one with actors"""
    num_actors: int = 4
    """actors"""
    interval: float = 5.0
    """seconds between two kills"""
    kills: int = 4
    """kills in a stretch, which lasts as long without them, too"""
    repeats: int = 3
    """pairs of stretches"""
    flags: str = "--no-cuda --compile"
    """more flags for the script, as one string"""
    output: Path | None = None
    """result file; by default runs/bench/ray_faults_cpu_DATE.json"""


@dataclass
class Stamp:
    """A fragment that the learner took: when (unix time), whose, and how many steps of it count."""

    at: float
    number: int
    incarnation: int
    sequence: int
    version: int
    steps: int


def read_stamps(path: Path) -> list[Stamp]:
    text = path.read_text() if path.exists() else ""
    return [Stamp(*json.loads(line)) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def actors_of(session: int) -> list[int]:
    """The processes of Ray's actors in a session, those of a run that started Ray by itself; the oldest first."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            stat = path.with_name("stat").read_text().rpartition(")")[2].split()
            if path.read_text().startswith("ray::Actor") and stat[3] == str(session) and stat[0] not in "ZX":
                found.append((int(stat[19]), int(path.parent.name)))
        except OSError:
            pass  # it has ended meanwhile
    return [number for _, number in sorted(found)]


def memory_of(number: int) -> dict[str, int]:
    """Bytes of a process: resident, and with shared pages divided."""
    lines = Path(f"/proc/{number}/smaps_rollup").read_text().splitlines()[1:]
    kilobytes = {key: int(value) for key, value, *_ in (line.replace(":", "").split() for line in lines)}
    return {"rss": kilobytes["Rss"] * 1024, "pss": kilobytes["Pss"] * 1024}


def throughput(stamps: Sequence[Stamp], start: float, end: float) -> float:
    return sum(stamp.steps for stamp in stamps if start <= stamp.at < end) / (end - start)


def seconds_back(stamps: Sequence[Stamp], kills: Sequence[float]) -> list[float | None]:
    """For each kill, the seconds until a life that nobody had heard of delivers; None if none does."""
    firsts = {}
    for stamp in stamps:
        firsts.setdefault((stamp.number, stamp.incarnation), stamp.at)
    times, backs = sorted(firsts.values()), []
    for kill in kills:
        later = [at for at in times if at > kill]
        backs.append(round(later[0] - kill, 2) if later else None)
        times = [at for at in times if at not in later[:1]]
    return backs


def wait_for(condition, process: subprocess.Popen, patience: float, what: str):
    end = time.time() + patience
    while not (value := condition()):
        if process.poll() is not None or time.time() > end:
            raise RuntimeError(f"{what} in {patience:.0f} s")
        time.sleep(0.1)
    return value


def measure(args: Args, process: subprocess.Popen, stamps: Path, repeat: int) -> dict:
    """A stretch without kills and one with them, which comes first in every second pair."""
    length, starts, kills = args.interval * args.kills, {}, []
    memory = [memory_of(actor) for actor in actors_of(process.pid)]
    for has_kills in (False, True) if repeat % 2 else (True, False):
        starts[has_kills] = start = time.time()
        for k in range(args.kills if has_kills else 0):
            time.sleep(max(start + k * args.interval - time.time(), 0))
            actors = wait_for(lambda: actors_of(process.pid), process, 30, "no actor is there")
            os.kill(actors[0], signal.SIGKILL)  # each has its turn, once the one before it is back
            kills.append(time.time())
        time.sleep(max(start + length - time.time(), 0))
        known = time.time()
        wait_for(lambda: None not in seconds_back(read_stamps(stamps), kills), process, 60, "an actor is not back")
        if has_kills:
            waited = round(time.time() - known, 1)
            time.sleep(args.interval)  # until all are at work
    taken = read_stamps(stamps)
    rates = [throughput(taken, starts[has_kills], starts[has_kills] + length) for has_kills in (False, True)]
    record = {"repeat": repeat, "status": "finished", "seconds_more": waited}
    record |= {"steps_per_second": rates[0], "with_kills": rates[1], "share": round(rates[1] / rates[0], 4)}
    record |= {"seconds_back": seconds_back(taken, kills)}
    return record | {key: int(statistics.median(actor[key] for actor in memory)) for key in ("rss", "pss")}


def summarise(runs: Sequence[dict]) -> list[dict]:
    backs = [seconds for run in runs for seconds in run["seconds_back"]]
    names = ("steps_per_second", "with_kills", "share", "rss", "pss")
    line = {name: median([run[name] for run in runs]) for name in names} | {"runs": len(runs)}
    return [line | {"back_median": round(statistics.median(backs), 2), "back_most": max(backs)}] if runs else []


HEADER = ["steps/s undisturbed", "with kills", "share", "an actor is back after, s", "at most, s"]
HEADER += ["memory of an actor, MB", "shared pages divided, MB"]


def rows_of(result: dict) -> list[list[str]]:
    rows = []
    for line in result["medians"]:
        rows.append([show(line["steps_per_second"], 0), show(line["with_kills"], 0), f"{line['share']:.0%}"])
        rows[-1] += [show(line["back_median"], 1), show(line["back_most"], 1)]
        rows[-1] += [show(line[key] / 1e6, 0) for key in ("rss", "pss")]
    return rows


def print_result(result: dict) -> None:
    print_table([HEADER, *rows_of(result)], 0)


def write(result: dict, path: Path) -> None:
    save(result, path, summarise(result["runs"]))


def main(args: Args) -> None:
    terminate_like_interrupt()
    if not args.script.removesuffix("_torchcompile").endswith("_ray") or not (SCRIPTS / f"{args.script}.py").is_file():
        fail(f"--script {args.script}: must be a script with actors")
    check_seconds(args, "interval")
    own_flags = split_flags(args.flags)
    for name in ("num_actors", "kills", "repeats"):
        if getattr(args, name) <= 0:
            fail(f"--{name.replace('_', '-')} {getattr(args, name)}: must be above 0")
    probe = ask(PROBE)
    output = args.output or result_path("ray_faults", "cpu", probe)
    check_output(output, "ray_faults")
    result = new_result("ray_faults", args, probe, "cpu")
    warn_if_busy()
    with tempfile.TemporaryDirectory() as folder, until_stopped(result, output, write, print_result):
        stamps = Path(folder, "stamps.jsonl")
        flags = ["--num-actors", str(args.num_actors), "--total-timesteps", str(2**31 - 1), "--output-dir", folder]
        flags += own_flags
        program = PROGRAM.format(folder=str(SCRIPTS), name=args.script, stamps=str(stamps), flags=flags)
        said = Path(folder, "stderr")
        with said.open("w") as stderr:  # no pipe, which would be full one day
            how = {"stdout": subprocess.DEVNULL, "stderr": stderr, "start_new_session": True}
            process = subprocess.Popen([sys.executable, "-c", program], **how)
        try:
            everyone = set(range(args.num_actors))
            wait_for(lambda: {stamp.number for stamp in read_stamps(stamps)} == everyone, process, 120, "no fragments")
            time.sleep(args.interval)  # until all are at work
            for repeat in range(1, args.repeats + 1):
                record = measure(args, process, stamps, repeat)
                result["runs"].append(record)
                write(result, output)
                print(
                    f"pair {repeat}: {record['share']:.0%} of {show(record['steps_per_second'], 0)} steps/s", flush=True
                )
            process.send_signal(signal.SIGINT)
            process.wait(60)
            (summary,) = [json.loads(path.read_text()) for path in Path(folder).glob("*/summary.json")]
            names = (
                "fragments_delivered",
                "fragments_lost",
                "fragments_consumed",
                "actor_restarts",
                "lag_mean",
                "lag_max",
            )
            result["ledger"] = {name: summary[name] for name in names}
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            stop(process)
            lines = said.read_text().strip().splitlines() or ["no message"]
            fail(f"{scrub(str(error))}; the run's last line: {scrub(lines[-1])}")
        finally:
            stop(process)


if __name__ == "__main__":
    try:
        main(command_line(Args, __doc__))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
