"""benchmarks/profile_run.py: a run's lines by the time that they take."""

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from conftest import LEANRL

PROGRAM = LEANRL.parent / "benchmarks/profile_run.py"
sys.path.append(str(PROGRAM.parent))

import profile_run  # noqa: E402


def profile(*flags, status=0):
    done = subprocess.run([sys.executable, str(PROGRAM), *map(str, flags)], capture_output=True, text=True, timeout=300)
    assert done.returncode == status, done.stderr
    return done


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    """A result and what was printed, of PPO that acts on the host."""
    output = tmp_path_factory.mktemp("profile") / "ppo.json"
    flags = ["--script", "ppo", "--variant", "none", "--steps", 20_000, "--seconds", 2, "--rows", 6]
    done = profile(*flags, "--flags=--no-cuda --num-envs 2", "--output", output)
    return json.loads(output.read_text()), done.stdout


def test_shares_of_lines(profiled):
    result, _ = profiled
    code = (LEANRL / "ppo_torchcompile.py").read_text().splitlines()
    assert 200 < result["samples"] <= 2000
    for name in ("main", "inner"):
        lines = result[name]
        assert sum(line["share"] for line in lines) == pytest.approx(1, abs=1e-3 + 1e-4 * len(lines))
        assert [line["share"] for line in lines] == sorted((line["share"] for line in lines), reverse=True)
        assert all(line["code"] == code[line["line"] - 1].strip() for line in lines)
    assert {line["function"] for line in result["main"]} == {"main"}
    assert {line["function"] for line in result["inner"]} >= {"main", "act", "learn"}


def test_samples_are_of_the_window_of_fps(profiled):
    """An update of the eager-like variant takes most of the time, and nothing before the loop is among the lines."""
    result, _ = profiled
    code = (LEANRL / "ppo_torchcompile.py").read_text().splitlines()
    loop = next(n for n, line in enumerate(code, 1) if "while run.global_step < args.total_timesteps" in line)
    first = result["main"][0]
    assert first["code"] == "agent.learn()" and first["share"] > 0.3
    assert sum(line["share"] for line in result["main"] if line["line"] >= loop) > 0.95


def test_what_is_written_and_printed(profiled):
    result, printed = profiled
    assert result["kind"] == "profile" and result["graphs"] == {} and result["summary"]["status"] == "finished"
    assert result["flags"][-2:] == ["--num-envs", "2"] and result["command"].startswith("python benchmarks/profile_run")
    assert f"{result['summary']['fps']} steps/s" in printed
    for name in ("main", "inner"):
        assert all(line["code"][:90] in printed for line in result[name][:6])
    assert str(LEANRL) not in json.dumps(result)


def test_a_long_call_of_c_code_counts_as_long_as_it_lasts(monkeypatch):
    """A signal that comes meanwhile waits for its end, and those that come after it are lost."""
    clock = SimpleNamespace(perf_counter=lambda: clock.now, now=0.0)
    monkeypatch.setattr(profile_run, "time", clock)
    code = "def main(sample):\n    sample(0.012)\n    sample(0.001)\n    sample(0.003)\n    sample(0.001)\n"
    module = ModuleType("script")
    module.Run, module.__file__ = SimpleNamespace, "script.py"
    exec(code, vars(module))
    monkeypatch.setattr(Path, "read_text", lambda _: code)
    sampler = profile_run.Sampler(module, 0.0165)

    def sample(passed):
        clock.now += passed
        sampler.sample(0, sys._getframe(1))

    sample(5.0)  # before the run has learned: not counted
    sampler.run = SimpleNamespace(window=(100, 1.0))
    module.main(sample)  # the last comes when the seconds are over
    assert sampler.samples == 3
    assert [(line["line"], line["share"]) for line in sampler.lines(sampler.main)] == [
        (2, 0.75),
        (4, 0.1875),
        (3, 0.0625),
    ]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--script", "nothing"], "--script nothing: must be one of"),
        (["--script", "dqn", "--seconds", "0"], "--seconds 0.0: must be above 0"),
        (["--script", "dqn", "--steps", "-1"], "--steps -1: must be above 0"),
        (["--script", "dqn", "--variant", "cudagraphs", "--flags=--no-cuda"], "needs a CUDA device"),
        (["--script", "dqn", "--output", str(LEANRL)], "must be a file that can be written"),
        (
            ["--script", "ppo", "--variant", "none", "--seconds", "1e-9", "--flags=--no-cuda"],
            "before a sample was taken",
        ),
        (["--script", "dqn", "--flags=--gamma 2"], "--gamma 2.0: must lie in [0, 1]"),
    ],
)
def test_bad_input(flags, message):
    error = profile(*flags, status=2).stderr.strip().splitlines()[-1]
    assert error.startswith("error: ") and message in error


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_captured_graphs(tmp_path):
    output = tmp_path / "td3.json"
    profile("--script", "td3", "--variant", "cudagraphs", "--steps", 4000, "--seconds", 1, "--output", output)
    graphs = json.loads(output.read_text())["graphs"]
    both = {"exchange(True,)", "exchange(False,)"}
    assert graphs.keys() == {"write", "exchange", "learn(True,)", "learn(False,)", *both}
    for name, graph in graphs.items():
        assert 0 < graph["us"] < graph["us_waiting_for_each"] and graph["nodes"] > (3 if name == "write" else 10)
        assert graph["longest"] == sorted(graph["longest"], key=lambda node: -node["us"])
    assert graphs["learn(True,)"]["nodes"] > graphs["learn(False,)"]["nodes"]
    assert graphs["exchange(True,)"]["nodes"] > max(graphs[name]["nodes"] for name in ("exchange", "learn(True,)"))
