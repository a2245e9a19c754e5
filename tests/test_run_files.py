"""What a run leaves behind: its four files, its last lines, its exit status, however it ends."""

import ast
import importlib
import importlib.machinery
import json
import math
import os
import pty
import resource
import shutil
import signal
import sys
import termios
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import environments
from conftest import LEANRL, read_run

ON_POLICY = ("ppo", "ppo_continuous_action", "ppo_memory")
OFF_POLICY = ("sac_continuous_action", "td3_continuous_action", "dqn", "dqn_memory")
SCRIPTS = [algorithm + version for algorithm in OFF_POLICY + ON_POLICY for version in ("", "_torchcompile")]
LOSSES = {
    "sac_continuous_action": {"qf_loss", "actor_loss", "alpha_loss", "alpha"},
    "td3_continuous_action": {"qf_loss", "actor_loss"},
    "dqn": {"td_loss", "q_value", "epsilon"},
    "ppo": {"policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction"},
}
LOSSES |= {"ppo_continuous_action": LOSSES["ppo"], "dqn_memory": LOSSES["dqn"], "ppo_memory": LOSSES["ppo"]}
VERSIONS = {"python", "torch", "tensordict", "gymnasium", "envpool", "mujoco", "ray"}
SUMMARY = {
    "script", "variant", "env_id", "seed", "global_step", "updates", "fps", "fps_window", "warmup_seconds",
    "wall_seconds", "episodes", "episode_return", "resumed_at", "device", "device_name", "threads", "peak_memory_bytes",
    "versions", "status",
}  # fmt: skip


def algorithm_of(script):
    return script.removesuffix("_torchcompile")


def small(script, learning_starts=150):
    """Flags of a short run; on-policy scripts learn from their first rollout on."""
    if algorithm_of(script) in ON_POLICY:
        sizes = ["--num-envs", 1, "--num-steps", 10, "--num-minibatches", 1 if "memory" in script else 2]
    else:
        sizes = ["--learning-starts", learning_starts, "--buffer-size", 120, "--batch-size", 8]
    if script.startswith("dqn_memory"):
        sizes += ["--num-envs", 1, "--slice-length", 4, "--train-frequency", 10, "--target-network-frequency", 50]
    return ["--total-timesteps", 300, "--measure-burnin", 20, *sizes]


def steps_of(script, run):
    """What each of the steps did that all environments made; those of the memory scripts may only reset."""
    seeds = [env.seed for env in run.made]
    return environments.scripted_steps(seeds, run.config["total_timesteps"], "memory" in script)


def rollouts_of(script, run):
    """Full ones; a step is one of every environment."""
    return len(steps_of(script, run)) // run.config["num_steps"]


def expected_updates(script, run):
    """Counted step by step, as the design says it, from what config.json holds; and the step of the first of them."""
    config, first = run.config, None
    if algorithm_of(script) in ON_POLICY:
        first = steps_of(script, run)[config["num_steps"] - 1][0]
        return rollouts_of(script, run) * config["update_epochs"] * config["num_minibatches"], first
    starts, updates, step = config["learning_starts"], 0, 0  # steps taken before this one of every environment
    for after, *_ in steps_of(script, run):
        if script.startswith("dqn"):
            reached = [n for n in range(step + 1, after + 1) if n % config["train_frequency"] == 0]
            updates += len(reached) if after > starts else 0
        else:
            updates += config["num_envs"] if step >= starts else 0
        step, first = after, first or (updates and after)
    return updates, first


def expected_learning_rate(script, run, step):
    """On policy, of the rollout to which this step belongs."""
    config = run.config
    rate = config.get("learning_rate", config.get("policy_lr"))
    if not config.get("anneal_lr"):
        return rate
    so_far, *_ = zip(*steps_of(script, run))
    rollout = so_far.index(step) // config["num_steps"]
    if "memory" in script:  # whose rollouts are of unequal numbers of steps
        before = (0, *so_far)[rollout * config["num_steps"]]
        return pytest.approx(rate * (1 - before / config["total_timesteps"]))
    return pytest.approx(rate * (1 - rollout / rollouts_of(script, run)))


def assert_recorded(script, run):
    """The episodes, metrics, and summary of a finished run say what the environments have done."""
    config, summary = run.config, run.summary
    so_far, of_each, ended = zip(*steps_of(script, run))
    steps = so_far[-1]
    assert [env.steps for env in run.made] == of_each[-1]

    # episodes.jsonl: ends and lengths as scripted, returns as paid out
    scripted = [(step, *episode) for step, episodes in zip(so_far, ended) for episode in episodes]
    assert len(run.episodes) == len(scripted) == len(run.finished) > 10
    for line, (global_step, _, length, ending), paid in zip(run.episodes, scripted, run.finished, strict=True):
        assert set(line) == {"global_step", "return", "length", "terminated"}
        assert line == {"global_step": global_step, **paid}
        assert line["length"] == length and line["terminated"] is (ending != "truncated")

    # metrics.jsonl: a line for each hundred steps that has been reached, means over the last 100 episodes
    due = sorted({after for before, after in zip((0, *so_far), so_far) if after // 100 > before // 100} | {steps})
    assert [line["global_step"] for line in run.metrics] == due
    for line in run.metrics:
        recent = [row for row in run.episodes if row["global_step"] <= line["global_step"]][-100:]
        for key, column in (("episode_return", "return"), ("episode_length", "length")):
            mean = sum(row[column] for row in recent) / len(recent) if recent else None
            assert line[key] == (mean if mean is None else pytest.approx(mean, abs=1e-4))
        assert line["fps"] > 0 and line["learning_rate"] == expected_learning_rate(script, run, line["global_step"])
    times = [line["wall_time"] for line in run.metrics]
    assert times == sorted(times) and times[0] > 0
    always = {"global_step", "wall_time", "fps", "episode_return", "episode_length", "learning_rate"}
    none = set() if config.get("autotune", True) else {"alpha_loss"}
    assert set(run.metrics[-1]) - always == LOSSES[algorithm_of(script)] - none and always <= set(run.metrics[-1])

    # summary.json
    assert set(summary) == SUMMARY
    assert summary["status"] == "finished" and summary["variant"] == "eager" and summary["script"] == script
    assert summary["env_id"] == config["env_id"] and summary["seed"] == config["seed"]
    assert summary["global_step"] == steps and summary["episodes"] == len(run.episodes)
    updates, opens = expected_updates(script, run)
    assert summary["updates"] == updates > 0
    opens += min(config["measure_burnin"], (config["total_timesteps"] - opens) // 2)
    opened = next(step for step in so_far if step >= opens)
    closed = so_far[rollouts_of(script, run) * config["num_steps"] - 1] if "num_steps" in config else steps
    assert summary["fps_window"] == [opened, max(opened, closed)]  # a rollout's rest is only acted
    assert summary["fps"] > 0 if closed > opened else summary["fps"] is None
    assert summary["wall_seconds"] > 0 and summary["warmup_seconds"] == 0
    returns = [row["return"] for row in run.episodes[-100:]]
    assert summary["episode_return"] == pytest.approx(sum(returns) / len(returns), abs=1e-4)
    assert summary["peak_memory_bytes"] > 2**20


@pytest.fixture(scope="module", params=SCRIPTS)
def three(request, launch):
    """One run of each script, with three environments: (script, run)."""
    return request.param, launch(request.param, *small(request.param), "--num-envs", 3, "--seed", 7)


def test_episodes_metrics_and_summary(three):
    script, run = three
    assert_recorded(script, run)
    ends = [line["global_step"] for line in run.episodes]
    assert len(set(ends)) < len(ends), "no two environments finished at once"
    scripted = [episode for *_, ended in steps_of(script, run) for episode in ended]
    assert {ending for *_, ending in scripted} == set(environments.ENDINGS)
    assert len({length for _, length, _ in scripted}) == len(environments.LENGTHS)


def test_config(three):
    script, run = three
    module = importlib.import_module(script)
    flags = [*small(script), "--num-envs", 3, "--seed", 7]
    given = {flag[2:].replace("-", "_"): value for flag, value in zip(flags[::2], flags[1::2], strict=True)}
    args = vars(module.Args()) | given | {"env_id": run.config["env_id"], "cuda": False}
    args["output_dir"] = str(run.folder.parent)
    assert {name: run.config[name] for name in args} == args
    about = {"script", "device", "device_name", "threads", "versions"}
    assert set(run.config) - set(args) == about
    assert {name: run.config[name] for name in about} == {name: run.summary[name] for name in about}
    assert run.config["device"] == "cpu" and run.config["device_name"] and run.config["threads"] == 1
    assert set(run.config["versions"]) == VERSIONS
    assert run.config["versions"]["torch"] == importlib.metadata.version("torch")
    assert run.config["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))


def test_folder_and_last_lines(three):
    script, run = three
    env_id = f"Counter{environments.kind_of(script)}-v0"
    stem, _, started = run.folder.name.rpartition("__")
    assert stem == f"{env_id}__{script}__7" and abs(int(started) - time.time()) < 86_400
    files = ["checkpoint.pt", "config.json", "episodes.jsonl", "metrics.jsonl", "summary.json"]
    assert sorted(path.name for path in run.folder.iterdir()) == files
    *_, reward, fps, where = run.out.splitlines()
    assert f"return {run.summary['episode_return']} " in reward
    assert f"{run.summary['fps']} steps/s" in fps
    assert where == f"finished at step {run.summary['global_step']}: {run.folder}"
    assert run.err == ""  # no bar where there is no terminal


def test_random_actions_are_each_environments_own(three):
    actions = [str([action.tolist() for action in env.actions[:50]]) for env in three[1].made]
    assert len(set(actions)) == 3


def test_one_environment(launch, three):
    script = three[0]
    run = launch(script, *small(script), "--seed", 3)
    assert run.config["num_envs"] == 1
    assert_recorded(script, run)


def test_same_seed_same_episodes(launch, three):
    script, run = three
    again = launch(script, *small(script), "--num-envs", 3, "--seed", 7)
    other = launch(script, *small(script), "--num-envs", 3, "--seed", 8)
    assert again.episodes == run.episodes
    last, same = run.metrics[-1], again.metrics[-1]
    assert all(last[name] == same[name] for name in LOSSES[algorithm_of(script)])
    assert other.episodes != run.episodes
    assert not {env.seed for env in run.made} & {env.seed for env in other.made}


@pytest.mark.parametrize(
    "script", [*SCRIPTS, "impala_ray", "appo_ray", "impala_ray_torchcompile", "appo_ray_torchcompile"]
)
def test_random_numbers_of_python_and_numpy_are_seeded_too(launch, script):
    """For environments that draw from these, not from their own; Ray's scripts without actors."""
    sizes = ["--total-timesteps", 300, "--fragment-length", 8] if "ray" in script else small(script)
    runs = [launch(script, *sizes, "--seed", 3, env_id="Chancy") for _ in range(2)]
    assert runs[0].episodes == runs[1].episodes and any(line["return"] % 0.125 for line in runs[0].episodes)


FLAGS = {  # every flag that the runs above leave where it is, in another position
    "sac_continuous_action": [
        ["--no-autotune", "--alpha", 0.5, "--tau", 1, "--buffer-size", 3],
        ["--policy-frequency", 3, "--target-network-frequency", 2, "--no-torch-deterministic", "--gamma", 0],
        ["--learning-starts", 0, "--measure-burnin", 0, "--policy-lr", 1e-4, "--q-lr", 1e-4],
    ],
    "td3_continuous_action": [
        ["--policy-frequency", 3, "--exploration-noise", 0, "--policy-noise", 0, "--no-torch-deterministic"],
        ["--learning-starts", 0, "--measure-burnin", 0, "--noise-clip", 0, "--gamma", 1, "--policy-frequency", 1],
        ["--tau", 1, "--buffer-size", 3, "--learning-rate", 1e-4],
    ],
    "dqn": [
        ["--train-frequency", 3, "--num-envs", 4, "--target-network-frequency", 7, "--no-torch-deterministic"],
        ["--learning-starts", 0, "--measure-burnin", 0, "--exploration-fraction", 0, "--train-frequency", 1],
        ["--target-network-frequency", 2, "--tau", 0.5, "--start-e", 0, "--end-e", 0, "--gamma", 0],
        ["--train-frequency", 2, "--buffer-size", 3, "--learning-rate", 1e-3, "--num-envs", 3],
    ],
    "ppo": [
        ["--no-anneal-lr", "--no-norm-adv", "--no-clip-vloss", "--no-torch-deterministic", "--gamma", 0],
        ["--num-steps", 1, "--num-envs", 8, "--update-epochs", 1, "--num-minibatches", 1, "--gae-lambda", 0],
        [
            "--num-steps",
            5,
            "--num-minibatches",
            5,
            "--num-envs",
            8,
            "--total-timesteps",
            199,
        ],  # its last step overshoots
        ["--num-steps", 7, "--num-minibatches", 7, "--ent-coef", 0, "--vf-coef", 0, "--measure-burnin", 0],
        ["--clip-coef", 0.1, "--max-grad-norm", 10, "--learning-rate", 1e-3, "--target-kl", 1000, "--gae-lambda", 1],
    ],
}
FLAGS["ppo_continuous_action"] = FLAGS["ppo"]
CELLS = ("none", "stack", "gru", "lstm", "mingru", "lru", "s5", "ffm")
FLAGS["ppo_memory"] = [["--cell", cell, "--num-envs", 2, "--num-minibatches", 2] for cell in CELLS] + [
    ["--no-anneal-lr", "--no-norm-adv", "--no-clip-vloss", "--no-torch-deterministic", "--gamma", 0],
    ["--num-steps", 1, "--num-envs", 8, "--update-epochs", 1, "--num-minibatches", 4, "--gae-lambda", 0],
    ["--num-steps", 7, "--ent-coef", 0, "--vf-coef", 0, "--measure-burnin", 0, "--hidden-size", 5],
    ["--clip-coef", 0.1, "--max-grad-norm", 10, "--learning-rate", 1e-3, "--target-kl", 1000, "--gae-lambda", 1],
]
FLAGS["dqn_memory"] = [
    ["--cell", cell, "--start-state", start, "--burn-in", burn_in, "--num-envs", 3]
    for cell, start, burn_in in zip(CELLS, 4 * ("stored", "zero"), (0, 3, 1, 2, 0, 1, 2, 0), strict=True)
] + [
    ["--slice-length", 1, "--buffer-size", 4, "--learning-starts", 2, "--measure-burnin", 0, "--train-frequency", 1],
    ["--tau", 0.5, "--target-network-frequency", 3, "--gamma", 0, "--start-e", 0, "--end-e", 0, "--hidden-size", 5],
    ["--learning-rate", 1e-4, "--max-grad-norm", 0.1, "--exploration-fraction", 0, "--no-torch-deterministic"],
]


@pytest.mark.parametrize(
    "script, flags",
    [(script, flags) for script in SCRIPTS for flags in FLAGS[algorithm_of(script)]],
    ids=lambda value: value if isinstance(value, str) else " ".join(map(str, value)),
)
def test_flags_in_their_other_position(launch, script, flags):
    if "--num-envs" not in flags:
        flags = [*flags, "--num-envs", 2]
    run = launch(script, *small(script, 130), "--total-timesteps", 200, *flags)
    assert_recorded(script, run)
    if "--no-autotune" in flags:
        assert all(line["alpha"] == pytest.approx(0.5) for line in run.metrics if "alpha" in line)
    assert torch.backends.cudnn.deterministic is ("--no-torch-deterministic" not in flags)


@pytest.mark.parametrize("script", SCRIPTS)
def test_wandb_gets_every_line(launch, monkeypatch, script):
    calls = SimpleNamespace(init=[], log=[])
    tracked = SimpleNamespace(log=lambda line, step: calls.log.append((step, line)))
    init = lambda **kwargs: calls.init.append(kwargs) or tracked  # noqa: E731
    spec = importlib.machinery.ModuleSpec("wandb", None)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(__spec__=spec, init=init))
    run = launch(script, *small(script), "--track", "--wandb-project", "p", "--wandb-entity", "e")
    (init,) = calls.init
    assert init["project"] == "p" and init["entity"] == "e" and init["config"]["total_timesteps"] == 300
    assert calls.log == [(line["global_step"], line) for line in run.metrics]


@pytest.mark.parametrize("script", SCRIPTS)
def test_environments_never_share_a_seed(script):
    module = importlib.import_module(script)
    env_id = f"Counter{environments.kind_of(script)}-v0"
    seeds, samples = [], []
    for seed in (0, 1, 2, 3, 2**32 - 1):
        for step in (0, 1, 100):
            if "memory" in script:
                vector = module.Environments(module.Args(env_id=env_id, num_envs=5, seed=seed))
                vector.begin(step)
                envs = vector.envs.envs
            else:
                envs = module.make_environments(module.Args(env_id=env_id, num_envs=5))
                assert len(module.first_observations(envs, seed, step)) == len(envs) == 5
                samples += [str([env.action_space.sample() for _ in range(50)]) for env in envs]
            seeds += [env.unwrapped.seed for env in envs]
    assert len(set(seeds)) == 75 and len(set(samples)) == (0 if "memory" in script else 75)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_loss_that_is_not_finite_fails(launch, script):
    """From the 90th step on the reward is NaN: found once it is learned from, with a replay at the next log point.

    The environment sees no action of a policy that has become NaN, but with a replay.
    """
    run = launch(script, *small(script, 110), env_id="NaNReward", raises=SystemExit)
    assert isinstance(run.error.code, str)  # written to stderr, with exit status 1
    is_on_policy = algorithm_of(script) in ON_POLICY
    name = "td_loss" if script.startswith("dqn") else "policy_loss" if is_on_policy else "qf_loss"
    step = 200 if not is_on_policy else 94 if "memory" in script else 90
    assert run.error.code == f"error: {name} is nan at step {step}"
    assert run.summary["status"] == "failed" and run.summary["global_step"] == step and run.summary["updates"] > 0
    assert [line["global_step"] for line in run.metrics] == ([100] if step > 100 else [])
    assert not is_on_policy or all(np.isfinite(action).all() for env in run.made for action in env.actions)
    scripted = environments.scripted_episodes([env.seed for env in run.made], step)
    assert [line["length"] for line in run.episodes] == [length for _, _, length, _ in scripted]
    for line, paid in zip(run.episodes, run.finished, strict=True):
        assert line["return"] == (None if math.isnan(paid["return"]) else paid["return"])
    assert math.isfinite(run.summary["episode_return"])
    assert run.out.splitlines()[-1] == f"failed at step {step}: {run.folder}"


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_loss_that_is_not_finite_at_the_very_end_fails(launch, script):
    """No log point comes after the updates that see NaN."""
    flags = ["--total-timesteps", 90 if algorithm_of(script) in ON_POLICY else 195]
    if script.startswith("ppo_memory"):  # whose rollouts may end at any step
        flags = ["--total-timesteps", 179, "--num-envs", 2, "--num-steps", 1]
    run = launch(script, *small(script, 110), *flags, env_id="NaNReward", raises=SystemExit)
    assert run.summary["status"] == "failed" and flags[1] <= run.summary["global_step"] <= flags[1] + 1
    assert f"is nan at step {run.summary['global_step']}" in run.error.code


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_error_in_the_environment_fails(launch, script):
    run = launch(script, *small(script, 30), env_id="Failing", raises=RuntimeError)
    assert str(run.error) == "the environment broke down"
    assert run.summary["status"] == "failed" and run.summary["global_step"] == 89 and run.summary["updates"] > 0
    assert run.summary["episodes"] == len(run.episodes) == len(run.finished) > 10
    assert run.out.splitlines()[-1] == f"failed at step 89: {run.folder}"


def test_an_error_after_a_signal_is_a_failure_all_the_same(launch):
    """Both in one step, which the signal lets come to its end."""
    run = launch("dqn", *small("dqn", 30), env_id="Failing", raises=RuntimeError, stop_after=90)
    assert run.summary["status"] == "failed" and run.summary["global_step"] == 89
    assert (run.folder / "checkpoint.pt").exists()


def test_a_disk_that_is_full_for_an_episode(launch, monkeypatch):
    """Its line can't be written, nor flushed later: the run fails, and says so in its last lines and its summary."""
    module = importlib.import_module("dqn")
    open_files = module.Run.open_files

    def open_full(run, folder, mode):
        open_files(run, folder, mode)
        run.files[1] = open("/dev/full", "w", buffering=1)  # noqa: SIM115

    monkeypatch.setattr(module.Run, "open_files", open_full)
    run = launch("dqn", *small("dqn", 30), raises=OSError)
    assert run.summary["status"] == "failed" and run.out.splitlines()[-1].startswith("failed at step ")
    assert "no checkpoint at step" in run.err


@pytest.mark.parametrize("script", ["dqn", "sac_continuous_action", "ppo"])
def test_without_a_step_after_the_first_update_there_is_no_fps(launch, script):
    flags = ["--total-timesteps", 10] if script == "ppo" else ["--learning-starts", 299]
    run = launch(script, *small(script), *flags)
    assert run.summary["updates"] > 0 and run.summary["fps"] is None


def test_acting_alone_has_no_fps(launch):
    """After the last update a run of PPO only acts, which is much faster; the window is closed before that."""
    run = launch("ppo", *small("ppo"), "--total-timesteps", 19, "--measure-burnin", 1)
    assert run.summary["updates"] > 0 and run.summary["fps"] is None and run.summary["fps_window"] == [11, 11]
    run = launch("ppo", *small("ppo"), "--total-timesteps", 29, "--measure-burnin", 1)
    assert run.summary["fps"] > 0 and run.summary["fps_window"] == [11, 20]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_of_which_compiled_code_made_an_error(launch, monkeypatch, number):
    """As PyTorch's C++ does of an exception in the middle of one of its calls."""

    def interrupted(*_):
        try:
            signal.raise_signal(number)
        except KeyboardInterrupt:
            raise RuntimeError("API call failed") from None

    monkeypatch.setattr(importlib.import_module("dqn"), "first_observations", interrupted)
    run = launch("dqn", *small("dqn"), raises=SystemExit)
    assert run.error.code == 128 + number and run.summary["status"] == "interrupted"


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("name, number", [("Interrupting", signal.SIGINT), ("Terminating", signal.SIGTERM)])
def test_a_signal_interrupts(launch, script, name, number):
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    run = launch(script, *small(script, 30), env_id=name, raises=SystemExit)
    assert run.error.code == 128 + number
    assert run.summary["status"] == "interrupted" and run.summary["global_step"] == 90 and run.summary["updates"] > 0
    assert run.summary["episodes"] == len(run.episodes) == len(run.finished) > 10
    assert run.out.splitlines()[-1] == f"interrupted at step 90: {run.folder}" and run.err == ""
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


@pytest.mark.parametrize("ignored", [False, True])
def test_a_closed_terminal_interrupts_but_under_nohup(launch, ignored):
    wanted = signal.SIG_IGN if ignored else signal.default_int_handler  # its own would end the tests
    before = signal.signal(signal.SIGHUP, wanted)
    try:
        run = launch("dqn", *small("dqn", 30), env_id="HangingUp", raises=None if ignored else SystemExit)
        assert signal.getsignal(signal.SIGHUP) == wanted
    finally:
        signal.signal(signal.SIGHUP, before)
    assert run.summary["status"] == ("finished" if ignored else "interrupted")
    assert (run.summary["global_step"] > 90) == ignored and (run.folder / "checkpoint.pt").exists()
    assert ignored or run.error.code == 128 + signal.SIGHUP


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_while_the_summary_is_made(launch, monkeypatch, second):
    getrusage = resource.getrusage
    monkeypatch.setattr(resource, "getrusage", lambda who: signal.raise_signal(second) or getrusage(who))
    run = launch("dqn", *small("dqn"), env_id="Interrupting", raises=SystemExit)
    assert run.summary["status"] == "interrupted" and run.error.code == 130


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_before_the_summary_is_begun(launch, second):
    """Sent as the loop is left, in the first instant of `Run.__exit__`."""
    sent, handlers = [], {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def profile(frame, event, _argument):
        if event == "call" and frame.f_code.co_qualname == "Run.__exit__" and not sent:
            sent.append(second)
            signal.raise_signal(second)

    sys.setprofile(profile)
    try:
        run = launch("dqn", *small("dqn"), env_id="Interrupting", raises=(SystemExit, KeyboardInterrupt))
    finally:
        sys.setprofile(None)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert sent and isinstance(run.error, SystemExit)
    assert run.summary["status"] == "interrupted" and run.error.code == 130


def test_the_mean_is_of_a_hundred_episodes_and_no_more():
    module = importlib.import_module("dqn")
    run = SimpleNamespace(global_step=0, recent=[], episodes=0, files=[None, SimpleNamespace(write=len)])
    run.returns, run.lengths = {0: 0.0}, {0: 0}
    for n in range(150):
        module.Run.step(run, [n], [True], [False])
    assert [total for total, _ in run.recent] == list(range(50, 150))


# ---- In processes of their own ----
def wait_for_learning(process, folder):
    """Returns once the run has written a line of metrics with a loss."""
    while process.poll() is None:
        for path in folder.glob("runs/*/metrics.jsonl"):
            if "loss" in path.read_text():
                return
        time.sleep(0.05)
    raise AssertionError(process.communicate())


def test_a_terminal_that_is_closed(start, tmp_path):
    """The bar, which it had shown, and the last lines can't be written any more; the files can."""
    terminal, own = pty.openpty()
    termios.tcsetwinsize(own, (24, 200))
    flags = ["--env-id", "CartPole-v1", "--learning-starts", 100, "--batch-size", 8]
    options = {"cwd": tmp_path, "stdin": own, "stdout": own, "stderr": own}
    options["preexec_fn"] = lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    process = start("dqn.py", *flags, before=["setsid", "--ctty"], **options)
    os.close(own)
    bar = b""
    while b"return" not in bar:
        bar += os.read(terminal, 10_000)
    os.close(terminal)
    assert process.wait(timeout=60) == 128 + signal.SIGHUP
    run = read_run(tmp_path / "runs")
    assert run.summary["status"] == "interrupted" and run.summary["global_step"] > 0
    assert (run.folder / "checkpoint.pt").exists()


def test_nobody_reads_the_last_lines(start, tmp_path):
    """As where the same Ctrl-C has ended the `tee` behind a run."""
    read, write = os.pipe()
    process = start("ppo.py", "--total-timesteps", 600, "--output-dir", tmp_path, stdout=write)
    os.close(read)
    os.close(write)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0 and err == ""
    assert read_run(tmp_path).summary["status"] == "finished"


@pytest.mark.parametrize(
    "script, env_id, signals, status",
    [
        ("dqn.py", "CartPole-v1", [signal.SIGTERM], 143),
        ("sac_continuous_action.py", "Pendulum-v1", [signal.SIGINT, signal.SIGINT], 130),
    ],
)
def test_signals_from_outside(start, tmp_path, script, env_id, signals, status):
    process = start(script, "--env-id", env_id, "--learning-starts", 100, "--batch-size", 8, cwd=tmp_path)
    wait_for_learning(process, tmp_path)
    for number in signals:
        process.send_signal(number)
    out, err = process.communicate(timeout=300)
    assert process.returncode == status and err == ""
    run = read_run(tmp_path / "runs")
    assert run.summary["status"] == "interrupted" and run.summary["updates"] > 0
    assert run.summary["episodes"] == len(run.episodes) and run.summary["global_step"] >= 200
    assert out.splitlines()[-1].startswith(f"interrupted at step {run.summary['global_step']}: runs/{env_id}__")


@pytest.mark.parametrize(
    "name, shown",
    [
        ("Failing", "RuntimeError: the environment broke down"),
        ("Underflowing", "FloatingPointError: the environment broke down"),
        ("Exiting", "error: SystemExit(0)"),
        ("Exiting3", "error: SystemExit(3)"),
        ("NaNReward", None),
    ],
)
def test_exit_status_of_failed_runs(start, tmp_path, name, shown):
    process = start("dqn.py", *small("dqn"), "--env-id", f"environments:{name}Discrete-v0", cwd=tmp_path)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 1, err
    assert shown in err if shown else err.endswith("\nerror: td_loss is nan at step 200\n")
    assert ("Traceback" in err) is (name in ("Failing", "Underflowing"))
    assert "failed at step" in out
    assert read_run(tmp_path / "runs").summary["status"] == "failed"


@pytest.mark.parametrize("script", ["td3_continuous_action.py", "sac_continuous_action_torchcompile.py"])
def test_copied_alone_it_leaves_terminal_and_folder_clean(start, tmp_path, script):
    mine = shutil.copy(LEANRL / script, tmp_path / "mine.py")
    flags = ["--env-id", "HalfCheetah-v4", "--total-timesteps", 120, "--learning-starts", 80, "--batch-size", 8]
    process = start(mine, *flags, "--buffer-size", 100, cwd=tmp_path)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0 and err == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.py", "runs"]
    run = read_run(tmp_path / "runs")
    assert run.summary["script"] == "mine" and run.summary["status"] == "finished" and run.summary["updates"] == 40
    assert run.folder.name.startswith("HalfCheetah-v4__mine__1__")
    size, *last = out.splitlines()
    assert size.startswith("replay buffer: ") and len(last) == 3


@pytest.mark.parametrize("script", SCRIPTS)
def test_no_script_imports_its_neighbours(script):
    neighbours = {path.stem for path in LEANRL.glob("*.py")} | {"leanrl"}
    for node in ast.walk(ast.parse((LEANRL / f"{script}.py").read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert not {name.partition(".")[0] for name in names} & neighbours
        assert not (isinstance(node, ast.ImportFrom) and node.level)


def test_module_prefix_in_an_environments_name(launch):
    run = launch("dqn", *small("dqn"), env_id="environments:CounterDiscrete-v0")
    assert run.config["env_id"] == "environments:CounterDiscrete-v0"
    assert run.folder.name.startswith("environments-CounterDiscrete-v0__dqn__1__")
    assert json.loads((run.folder / "summary.json").read_text())["status"] == "finished"


@pytest.mark.parametrize("script", [script for script in SCRIPTS if algorithm_of(script) not in ON_POLICY])
def test_a_run_allocates_no_more_than_it_can_fill(launch, script):
    run = launch(script, *small(script), "--buffer-size", 2**31 - 1)
    assert run.summary["updates"] > 0 and run.out.startswith("replay buffer: 0.")


@pytest.mark.parametrize("script", SCRIPTS)
def test_mean_returns_have_seven_digits_however_small(script):
    run = SimpleNamespace(recent=[(1.25e-6, 2), (1.35e-6, 3), (1.5e-6, 4)])
    means = importlib.import_module(script).Run.means(run)
    assert means == {"episode_return": 1.366667e-6, "episode_length": 3}
