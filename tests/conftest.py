"""Every test: one thread, and `launch`, which runs a script in this process and reads its files."""

import contextlib
import importlib
import io
import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported; subprocesses inherit it

import pytest
import torch
import tyro

import environments

torch.set_num_threads(1)
logging.getLogger("torch.__trace").propagate = False  # thousands of empty lines in pytest's report of a failure

LEANRL = Path(__file__).parent.parent / "leanrl"


def read_run(output_dir):
    """The one run folder in `output_dir`: its path and what its files hold."""
    (folder,) = Path(output_dir).iterdir()

    def refuse(constant):
        raise ValueError(f"{constant} is no JSON")

    def lines(name):
        return [json.loads(line, parse_constant=refuse) for line in (folder / name).read_text().splitlines()]

    config, summary = (
        json.loads((folder / f"{name}.json").read_text(), parse_constant=refuse) for name in ("config", "summary")
    )
    return SimpleNamespace(
        folder=folder, config=config, summary=summary, metrics=lines("metrics.jsonl"), episodes=lines("episodes.jsonl")
    )


def shared_memory():
    """The names of what lies in shared memory."""
    return set(os.listdir("/dev/shm")) if os.path.exists("/dev/shm") else set()


def check_shared_memory(before, seconds=300):
    """Nothing has been left there since: what a test beside this one has there goes in time."""
    left, end = shared_memory() - before, time.monotonic() + seconds
    while left := left & shared_memory():
        assert time.monotonic() < end, left
        time.sleep(0.2)


@pytest.fixture(scope="session")
def launch(tmp_path_factory):
    """launch(script, "--flag", "value", …, env_id=…): the run's files, its output, and how it ended.

    An environment named without a kind gets the one that the script can take; `raises` is the exception to expect, and
    `stop_after` the step of each environment in which the run is sent SIGINT.
    """

    def launch(script, *flags, env_id="Counter", raises=None, stop_after=None):
        module, output_dir = importlib.import_module(script), tmp_path_factory.mktemp("runs")
        if "-v" not in env_id:
            env_id += f"{environments.kind_of(script)}-v0"
        cuda = [] if "--cuda" in flags else ["--no-cuda"]
        argv = ["--env-id", env_id, "--output-dir", str(output_dir), *cuda, *map(str, flags)]
        environments.Counter.forget()
        environments.Counter.stop_after = stop_after
        out, err = io.StringIO(), io.StringIO()
        expected = pytest.raises(raises) if raises else contextlib.nullcontext()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), expected as caught:
            module.main(tyro.cli(module.Args, args=argv))
        run = read_run(output_dir)
        run.out, run.err, run.error = out.getvalue(), err.getvalue(), caught.value if raises else None
        run.made, run.finished = list(environments.Counter.made), list(environments.Counter.finished)
        assert all(env.is_closed for env in run.made)
        return run

    return launch


@pytest.fixture
def start():
    """start("X.py" or a path, "--flag", …): a real process; those that are left over are killed. `before`: a command
    that starts it."""
    processes = []

    def start(script, *flags, before=(), **kwargs):
        path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1"}
        argv = [*before, sys.executable, str(LEANRL / script), *map(str, flags)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL, "text": True}
        processes.append(subprocess.Popen(argv, env=environment, **pipes | kwargs))
        return processes[-1]

    yield start
    for process in processes:
        if process.poll() is None:
            process.kill()
        with contextlib.suppress(ProcessLookupError, PermissionError):  # what it started, if it leads a group
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
