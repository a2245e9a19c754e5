"""Runs with --compile: nothing is compiled in the fps window, and it is the run that the script makes without it."""

import copy
import importlib
import os
import platform
import subprocess
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import environments

SCRIPTS = ["sac_continuous_action_torchcompile", "td3_continuous_action_torchcompile", "dqn_torchcompile"]
SCRIPTS += [
    "ppo_torchcompile",
    "ppo_continuous_action_torchcompile",
    "dqn_memory_torchcompile",
    "ppo_memory_torchcompile",
]
FLAGS = ["--total-timesteps", 160, "--num-envs", 2, "--seed", 5]
OFF_POLICY = ["--learning-starts", 80, "--buffer-size", 100, "--batch-size", 16, "--measure-burnin", 20]
ON_POLICY = ["--num-steps", 10, "--num-minibatches", 2, "--measure-burnin", 80, "--target-kl", 0.02]


def compilations():
    """A copy of everything that torch counts when it compiles or recompiles."""
    return copy.deepcopy({name: dict(counts) for name, counts in torch._dynamo.utils.counters.items() if counts})


@pytest.fixture(scope="module", params=SCRIPTS)
def both(request, launch):
    """(script, the run without --compile, the run with it, compilations at its window's opening and at its end)."""
    script, seen = request.param, []
    flags = FLAGS + (ON_POLICY if script.startswith("ppo") else OFF_POLICY)
    flags += ["--train-frequency", 2, "--start-e", 0.3, "--num-envs", 4] if script.startswith("dqn") else []
    flags += ["--target-network-frequency", 3, "--tau", 0.3] if script.startswith("sac") else []
    if "memory" in script:  # of one environment, so that a step of all counts as one or, where it resets, as none
        flags += ["--num-envs", 1, "--cell", "mingru", "--hidden-size", 16]
        flags += ["--slice-length", 8] if script.startswith("dqn") else ["--num-steps", 20, "--num-minibatches", 1]
    module = importlib.import_module(script)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "LOG_EVERY", 2)  # a line for each step of the environments
        eager = launch(script, *flags)
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        now, leave = module.Run.now, module.Run.__exit__

        def noting_now(run):
            if run.global_step:  # in the loop the clock is read only to open the window, and where it may end
                seen.append((run.global_step, compilations()))
            return now(run)

        def noting_exit(run, *error):
            seen.append((run.global_step, compilations()))
            agent = run.parts["agent"]
            held = [*agent.parameters(), *agent.buffers(), *agent.losses.values()]
            assert held and not any(tensor.requires_grad for tensor in held)
            leave(run, *error)

        compiled = launch(script, *flags, "--compile")
        # Once more with the guards that the script leaves out: one that failed would show as a recompilation
        original = torch.compile
        guards_kept = lambda step, options, **more: original(  # noqa: E731
            step, options={**options, "guard_filter_fn": lambda guards: [True] * len(guards)}, **more
        )
        patch.setattr(torch, "compile", guards_kept)
        torch._dynamo.utils.counters.clear()
        patch.setattr(module.Run, "now", noting_now)
        patch.setattr(module.Run, "__exit__", noting_exit)
        guarded = launch(script, *flags, "--compile")
    assert guarded.episodes == compiled.episodes
    opened = next(entry for entry in seen if entry[0] == guarded.summary["fps_window"][0])
    return script, eager, compiled, (opened, seen[-1])


def test_nothing_is_compiled_in_the_window(both):
    script, _, run, ((opened, before), (ended, after)) = both
    # 20 steps after the first update, in whole steps of all environments
    opens = {"dqn_torchcompile": 104, "ppo_memory_torchcompile": 89}.get(
        script, 90 if script.startswith("ppo") else 102
    )
    assert [opened, ended] == [opens, 160] and run.summary["fps_window"][0] == opens
    steps = {"sac_continuous_action": 4, "td3_continuous_action": 3, "dqn": 1, "ppo": 2, "ppo_continuous_action": 2}
    steps |= {"dqn_memory": 2, "ppo_memory": 2}
    assert before["stats"]["unique_graphs"] == steps[script.removesuffix("_torchcompile")]  # more if one was recompiled
    assert after == before and "graph_break" not in after


def test_no_line_of_metrics_counts_the_warm_up(both):
    _, _, run, _ = both
    first = run.metrics[0]
    assert first["fps"] * run.summary["warmup_seconds"] > first["global_step"]  # in that time many more are made


def test_what_is_compiled_is_kept_for_later_runs(both):
    """All of it, so that a second run starts warm; torch's counter of what it would not keep."""
    counters = both[3][0][1]["aot_autograd"]
    assert "autograd_cache_bypass" not in counters and sum(counters.values()) > 0


def test_summary_and_folder(both):
    script, eager, run, _ = both
    updates = {"dqn_torchcompile": 80 // 2, "dqn_memory_torchcompile": 80 // 2, "ppo_torchcompile": 160 // 20 * 4 * 2}
    updates = (updates | {"ppo_continuous_action_torchcompile": 160 // 20 * 10 * 2}).get(script, 80)
    if script.startswith("ppo_memory"):  # whose rollouts hold as many steps as are not resets
        updates = len(environments.scripted_steps([run.made[0].seed], 160, resets_take_a_step=True)) // 20 * 4
    assert run.summary["updates"] == eager.summary["updates"] == updates
    assert run.summary["warmup_seconds"] > 0 == eager.summary["warmup_seconds"]
    assert run.summary["variant"] == "compile" and eager.summary["variant"] == "eager"
    assert run.folder.name.startswith(f"{run.config['env_id']}__{script}__compile__5__")
    assert run.config["compile"] and not run.config["cudagraphs"] and run.summary["status"] == "finished"
    assert f"warm-up {run.summary['warmup_seconds']} s" in run.out


def test_episodes_before_learning_are_the_same(both):
    script, eager, run, _ = both
    starts = 20 if script.startswith("ppo") else 80
    early = [[line for line in each.episodes if line["global_step"] <= starts] for each in (eager, run)]
    assert early[0] == early[1] and len(early[0]) > starts // 20
    assert [line["length"] for line in run.episodes] == [line["length"] for line in eager.episodes]


def test_same_random_numbers_same_losses(both):
    """To 0.5 % (and 1e-3) over 80 updates, in which rounding feeds back through the actions."""
    _, eager, run, _ = both
    names = {name for name in run.metrics[-1] if "loss" in name or name in ("alpha", "q_value", "epsilon")}
    assert names == {name for name in eager.metrics[-1] if name in names} and len(names) > 1
    learned = 0
    for ours, theirs in zip(run.metrics, eager.metrics, strict=True):
        assert names & ours.keys() == names & theirs.keys()
        for name in names & ours.keys():
            assert ours[name] == pytest.approx(theirs[name], rel=5e-3, abs=1e-3), (name, ours["global_step"])
            learned += "loss" in name
    assert learned >= 20  # one a line at least, from the first update on
    last = (run.episodes[-1]["return"], eager.episodes[-1]["return"])
    assert last[0] == pytest.approx(last[1], abs=1e-2)


@pytest.mark.parametrize("script", SCRIPTS)
def test_all_of_the_warm_up_counts(script, launch, monkeypatch):
    """Every step's, each of which is warmed up once."""
    module, slept, warmed_up = importlib.import_module(script), [], []
    warm_up = module.warm_up

    def sleep():
        time.sleep(0.02)
        slept.append(0.02)

    def noting(steps, agent, run):
        warmed_up.extend(steps)
        warm_up([sleep] * len(steps), agent, run)

    monkeypatch.setattr(torch, "compile", lambda step, **_: step)
    monkeypatch.setattr(module, "warm_up", noting)
    flags = list(ON_POLICY if script.startswith("ppo") else OFF_POLICY)
    if "memory" in script:
        flags += ["--num-envs", 1]
        flags += (
            ["--num-minibatches", 1] if script.startswith("ppo") else ["--slice-length", 8, "--train-frequency", 10]
        )
    run = launch(script, "--total-timesteps", 100, *flags, "--compile")
    assert 0 < round(sum(slept), 3) <= run.summary["warmup_seconds"] < run.summary["wall_seconds"]
    steps = {"sac_continuous_action": 6, "td3_continuous_action": 6, "dqn": 1, "ppo_memory": 3}
    assert len(warmed_up) == steps.get(script.removesuffix("_torchcompile"), 2)
    assert len({id(step) for step in warmed_up}) == len(warmed_up), "each once"


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_warm_up_is_quiet_and_changes_nothing(script, recwarn):
    """What Inductor has to say of its own choices on a GPU does not reach the terminal."""
    agent, numbers = torch.nn.BatchNorm1d(3), []

    def step():
        warnings.warn("TensorFloat32 tensor cores available but not enabled", stacklevel=1)
        agent.running_mean.add_(torch.rand(3))
        numbers.append(torch.rand(()).item())

    state = torch.get_rng_state()
    module = importlib.import_module(script)
    run = SimpleNamespace(device=torch.device("cpu"), global_step=0, warmup_seconds=9.0, now=time.perf_counter)
    module.warm_up([step], agent, run)
    assert len(set(numbers)) == 5 and torch.equal(torch.get_rng_state(), state)
    assert agent.running_mean.eq(0).all() and run.warmup_seconds > 9 and not recwarn
    warnings.warn("of the run itself", stacklevel=1)
    assert len(recwarn) == 1, "only the warm-up is quiet"


# ---- Memory ----
WHERE_TENSORS_LIE = """
import importlib, sys
import torch, tyro

script = importlib.import_module(sys.argv.pop(1))
script.main(tyro.cli(script.Args))
tensor = torch.empty(20 * 2**20, dtype=torch.uint8)
heap = next(line.split()[0] for line in open("/proc/self/maps") if "[heap]" in line)
low, high = (int(address, 16) for address in heap.split("-"))
print("in the heap" if low <= tensor.data_ptr() < high else "in pages of its own")
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of other C libraries nothing is known")
@pytest.mark.parametrize("script", ["dqn_memory", "ppo_memory", "impala_ray"])
def test_large_tensors_lie_in_the_heap(tmp_path, script):
    """There glibc keeps what they free. Else they are made of new pages each time, which takes longer than to fill."""
    flags = ["--total-timesteps", "2048", "--no-cuda", "--output-dir", str(tmp_path)]
    flags += ["--learning-starts", "1100", "--buffer-size", "2000"] if script == "dqn_memory" else []
    flags += ["--env-id", "CartPole-v1"] if "memory" in script else []
    command = [sys.executable, "-c", WHERE_TENSORS_LIE, f"{script}_torchcompile", *flags]
    folder = Path(importlib.import_module(script).__file__).parent
    settings = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")  # of the allocator: a user's own win
    environment = {name: value for name, value in os.environ.items() if not name.startswith(settings)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.endswith("in the heap\n"), done.stdout + done.stderr
