"""Bad input ends with exit status 2 and one clear line on stderr: no traceback, no run folder."""

import contextlib
import dataclasses
import importlib
import importlib.machinery
import importlib.util
import itertools
import os
import pty
import resource
import socket
import subprocess
import sys
import sysconfig
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import gymnasium as gym
import pytest
import torch
import tyro

import environments
from pools import Counting

CONTINUOUS = ["sac_continuous_action", "td3_continuous_action", "ppo_continuous_action"]
CONTINUOUS += [f"{script}_torchcompile" for script in CONTINUOUS]
DISCRETE = ["dqn", "dqn_torchcompile", "ppo", "ppo_torchcompile"]
SCRIPTS = CONTINUOUS + DISCRETE  # on Gymnasium's environments, with the spaces that they name
MEMORY = ["dqn_memory", "dqn_memory_torchcompile", "ppo_memory", "ppo_memory_torchcompile"]
RAY = ["appo_ray", "appo_ray_torchcompile", "impala_ray", "impala_ray_torchcompile"]
ALL = [*SCRIPTS, *MEMORY, *RAY, "ppo_atari_envpool", "ppo_atari_envpool_torchcompile"]
ON_POLICY = [script for script in ALL if script.startswith("ppo")]

COUNT = ("must lie in [1, 2**31)", [0, -1, 2**31, 10**25])
NATURAL = ("must lie in [0, 2**31)", [-1, 2**31, 10**25])
POSITIVE = ("must lie in (0, 1e30]", [0, -0.1, "nan", "inf", "1e31"])  # float32 has room for a tenth of Adam's, too
NOT_NEGATIVE = ("must lie in [0, 3.4e38]", [-0.1, "nan", "inf", "1e39"])
SHARE = ("[0, 1]", [-0.01, 1.01, "nan", "inf"])
NUMBERS = {  # of each flag: what is allowed, and values that are not
    "total-timesteps": ("[1, 2**31)", [0, -1, 2**31]),
    "num-envs": COUNT,
    "buffer-size": COUNT,
    "batch-size": COUNT,
    "policy-frequency": COUNT,
    "target-network-frequency": COUNT,
    "train-frequency": COUNT,
    "num-steps": COUNT,
    "num-minibatches": COUNT,
    "update-epochs": COUNT,
    "hidden-size": COUNT,
    "slice-length": COUNT,
    "fragment-length": COUNT,
    "batch-fragments": COUNT,
    "actor-timeout": COUNT,
    "max-lag": COUNT,
    "num-actors": ("[0, 10000]", [-1, 10_001, 10**9]),
    "forced-lag": NATURAL,
    "burn-in": NATURAL,
    "learning-starts": NATURAL,
    "measure-burnin": NATURAL,
    "save-every": NATURAL,
    "seed": ("[0, 2**32)", [-1, 2**32]),
    "learning-rate": POSITIVE,
    "policy-lr": POSITIVE,
    "q-lr": POSITIVE,
    "clip-coef": POSITIVE,
    "max-grad-norm": POSITIVE,
    "value-scale": POSITIVE,
    "target-kl": POSITIVE,
    "ent-coef": NOT_NEGATIVE,
    "vf-coef": NOT_NEGATIVE,
    "rho-clip": NOT_NEGATIVE,
    "c-clip": NOT_NEGATIVE,
    "alpha": NOT_NEGATIVE,
    "policy-noise": NOT_NEGATIVE,
    "noise-clip": NOT_NEGATIVE,
    "exploration-noise": NOT_NEGATIVE,
    "gamma": SHARE,
    "gae-lambda": SHARE,
    "trace-lambda": SHARE,
    "tau": SHARE,
    "start-e": SHARE,
    "end-e": SHARE,
    "exploration-fraction": SHARE,
}


def taken_by(script):
    """The id of an environment that the script can take."""
    return "Pong-v5" if "atari" in script else f"Counter{environments.kind_of(script)}-v0"


def flags_of(script):
    fields = dataclasses.fields(importlib.import_module(script).Args)
    kinds = {field.name.replace("_", "-"): field.type for field in fields}
    for flag, kind in kinds.items():  # without its range, if it has one, and without the None of an optional one
        kind = next((part for part in get_args(kind) if hasattr(part, "__metadata__")), kind)
        kinds[flag] = getattr(kind, "__origin__", kind)
    return kinds


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """refused(script, flag, …): runs it in this process, and returns its stderr once all that is common has held."""
    monkeypatch.chdir(tmp_path)

    def refused(script, *argv):
        module = importlib.import_module(script)
        monkeypatch.setattr(sys, "argv", [f"{script}.py", *map(str, argv)])
        before = sorted(tmp_path.rglob("*"))
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            module.main(tyro.cli(module.Args, default=module.stored_args()))
        out, err = capsys.readouterr()
        assert caught.value.code == 2
        assert "Traceback" not in err and (out == "" or out.startswith(("replay buffer: ", "rollout: ")))
        assert len(err.splitlines()) == 1 and err.endswith("\n"), err
        assert sorted(tmp_path.rglob("*")) == before, "a run folder is left"
        return err

    return refused


@pytest.mark.parametrize("script", [*SCRIPTS, *MEMORY, *RAY])
def test_a_module_in_the_current_folder_is_found(monkeypatch, tmp_path, script):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    register = "import gymnasium\ngymnasium.register('Here-v0', 'gymnasium.envs.classic_control:PendulumEnv')\n"
    Path("in_this_folder.py").write_text(register)
    module = importlib.import_module(script)
    args = module.Args(env_id="in_this_folder:Here-v0", num_envs=2)
    make = module.Environments if script in MEMORY else module.make_environments
    monkeypatch.delitem(sys.modules, "in_this_folder", raising=False)
    monkeypatch.delitem(gym.registry, "Here-v0", raising=False)
    assert make(args)


def test_every_number_is_in_the_table():
    numbers = {flag for script in ALL for flag, kind in flags_of(script).items() if kind in (int, float)}
    assert numbers == set(NUMBERS)


@pytest.mark.parametrize("script", ALL)
def test_numbers_out_of_range(refused, script):
    for flag in NUMBERS.keys() & flags_of(script).keys():
        allowed, values = NUMBERS[flag]
        for value in values:
            err = refused(script, f"--{flag}", value)
            shown = flags_of(script)[flag](value)  # 0 is 0.0 where any real number is allowed
            assert err.startswith(f"error: --{flag} {shown}: ") and allowed in err


@pytest.mark.parametrize("script", ON_POLICY)
def test_rollouts_that_do_not_divide(refused, script):
    whole = "memory" in script  # whose minibatches are of whole environments
    err = refused(script, "--num-envs", 3, "--num-steps", 5, "--num-minibatches", 4)
    assert "--num-minibatches 4: must divide " + ("--num-envs 3" if whole else "a rollout of 15") in err
    num_envs, num_steps = (4, 1) if whole else (2, 2)
    err = refused(script, "--num-envs", num_envs, "--num-steps", num_steps, "--num-minibatches", 4)
    assert "--num-minibatches 4: must divide a rollout of 4 into minibatches of at least 2" in err
    err = refused(script, "--num-envs", 4, "--num-steps", 128, "--total-timesteps", 511)
    assert "--total-timesteps 511: must be at least a rollout of 512" in err


@pytest.mark.parametrize("script", ["appo_ray", "appo_ray_torchcompile"])
def test_fragments_that_do_not_divide(refused, script):
    sizes = ["--num-envs", 3, "--fragment-length", 5, "--batch-fragments", 2]
    err = refused(script, *sizes, "--num-minibatches", 4)
    assert "--num-minibatches 4: must divide a rollout of 30 into minibatches of at least 2" in err
    err = refused(script, *sizes, "--num-minibatches", 5, "--total-timesteps", 29)
    assert "--total-timesteps 29: must be at least a rollout of 30" in err


@pytest.mark.parametrize("script", [script for script in [*SCRIPTS, *MEMORY] if script not in ON_POLICY])
def test_numbers_that_do_not_fit_each_other(refused, script):
    for starts in (100, 101):
        err = refused(script, "--total-timesteps", 100, "--learning-starts", starts)
        assert f"--learning-starts {starts}" in err and "below --total-timesteps 100" in err
    err = refused(script, "--buffer-size", 3, "--num-envs", 4)
    assert "--buffer-size 3" in err and "at least --num-envs 4" in err


@pytest.mark.parametrize("script", [script for script in MEMORY if script.startswith("dqn")])
@pytest.mark.parametrize(
    "flags, message",
    [
        ("--slice-length 10 --batch-size 32", "--batch-size 32: must be a multiple of --slice-length 10"),
        ("--slice-length 10 --batch-size 5", "--batch-size 5: must be a multiple of --slice-length 10"),
        ("--slice-length 16 --burn-in 16", "--burn-in 16: must be below --slice-length 16"),
        ("--slice-length 16 --buffer-size 67", "--buffer-size 67: must be at least 68, --slice-length + 1 an "),
        ("--learning-starts 255", "--learning-starts 255: must be at least 256, --slice-length an environment"),
        ("--cell rnn", "--cell"),
        ("--start-state random", "--start-state"),
    ],
)
def test_slices_that_do_not_fit(refused, script, flags, message):
    assert message in refused(script, "--num-envs", 4, *flags.split())


@pytest.mark.parametrize("script", ALL)
def test_not_a_number_and_not_a_flag(refused, script):
    for flag, value in (("--seed", "one"), ("--num-envs", "1.5"), ("--gamma", "high"), ("--cuda", "maybe")):
        err = refused(script, flag, value)
        assert err.startswith("error: ") and value in err and (flag in err or flag == "--cuda")
    err = refused(script, "--gama", "0.9")
    assert "--gama" in err and "Perhaps you meant: --gamma FLOAT discount factor" in err
    assert "--env-id" in refused(script, "--env-id")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems promise memory that they don't have")
@pytest.mark.parametrize("script", ALL)
def test_sizes_that_no_memory_holds(refused, monkeypatch, script):
    if "atari" in script:
        monkeypatch.setattr(importlib.import_module(script), "make_pool", Counting)
    sizes = {"ppo": ("num-steps", 2**28), "dqn_memory": ("buffer-size", 2**31 - 1)}
    sizes |= dict.fromkeys(("impala", "appo"), ("fragment-length", 2**27))
    flag, size = next((sizes[name] for name in sizes if script.startswith(name)), ("batch-size", 2**29))
    used = 4096 * int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, before[1]))
    num_envs = 4 if script in MEMORY else 1
    try:
        err = refused(script, f"--{flag}", size, "--num-envs", num_envs, "--total-timesteps", 2**31 - 1)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert err.startswith(f"error: --{flag} ") and "not enough memory" in err


@pytest.mark.skipif(sys.platform != "linux", reason="other systems promise memory that they don't have")
@pytest.mark.parametrize("script", [script for script in ALL if not script.startswith(("ppo", "appo", "impala"))])
def test_batches_that_no_update_can_hold(refused, script):
    """Which would be seen only after --learning-starts steps, as the batch itself is small."""
    used = 4096 * int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**33, before[1]))
    try:
        err = refused(script, "--batch-size", 2**22, "--total-timesteps", 2**31 - 1, "--buffer-size", 2**12)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert err.startswith(f"error: --batch-size {2**22}: ") and "not enough memory" in err


def test_an_error_that_has_nothing_to_do_with_memory_is_raised():
    module = importlib.import_module("dqn")
    with pytest.raises(RuntimeError, match="shapes"), module.room_for(module.Args()):
        raise RuntimeError("shapes cannot be multiplied")


@pytest.mark.parametrize("script", [*SCRIPTS, *MEMORY, *RAY])
@pytest.mark.parametrize(
    "env_id, nearest",
    [
        ("HalfCheeta-v4", "HalfCheetah-v4"),
        ("CartPole-v7", "CartPole-v1"),
        ("hopper-v4", "Hopper-v4"),
        ("Unimportable-v0", "can't be made (No module named 'no_such_module'"),
        ("no_such_module:Environment-v0", "no such environment; nearest names: "),
        ("HalfCheetah v4", "no such environment; nearest names: HalfCheetah-v4"),
        ("", "no such environment; nearest names: none"),
    ],
)
def test_unknown_environment(refused, script, env_id, nearest):
    err = refused(script, "--env-id", env_id)
    assert f"--env-id {env_id}: " in err and nearest in err


@pytest.mark.parametrize("script", [*SCRIPTS, *MEMORY, *RAY])
@pytest.mark.parametrize("content", ["raise KeyError('a setting')", "def ="], ids=["raises", "no Python"])
def test_a_module_that_is_broken(refused, tmp_path, monkeypatch, script, content):
    (tmp_path / "broken_module.py").write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert "--env-id broken_module:Environment-v0: " in refused(script, "--env-id", "broken_module:Environment-v0")


@pytest.mark.parametrize("script", [*SCRIPTS, *MEMORY, *RAY])
def test_an_environment_of_a_module_that_cannot_be_made(refused, script):
    reasons = {"Unmakeable-v0": "no licence", "Leaving-v0": "no licence", "Wordless-v0": "AssertionError()"}
    for name, reason in reasons.items():
        err = refused(script, "--env-id", f"environments:{name}")
        assert f"--env-id environments:{name}: " in err and f"can't be made ({reason})" in err


ENDLESS = ("FarAction", "UnlimitedAction", "UnboundedAction", "HalfBoundedAction", "WideAction")


@pytest.mark.parametrize("script", [*SCRIPTS, *RAY])
def test_spaces_that_the_algorithm_cannot_take(refused, script):
    kinds = ["Discrete", "Continuous"] if script.startswith("appo") else [environments.kind_of(script)]
    for kind, (name, (observation_space, action_space)) in itertools.product(kinds, environments.SPACES.items()):
        if name == "ShiftedAction" and kind != "Discrete":
            continue  # refused as every discrete action is
        if name in ENDLESS and script.startswith(("ppo_continuous", "appo")):
            continue  # which take ranges without an end as they are
        err = refused(script, "--env-id", f"environments:{name}{kind}-v0")
        assert f"--env-id environments:{name}{kind}-v0: " in err and "must be" in err
        assert ("observations" if action_space is None else "actions") in err
        assert type(action_space or observation_space).__name__ in err
    if len(kinds) == 1:
        other = "Pendulum-v1" if kind == "Discrete" else "CartPole-v1"
        assert f"--env-id {other}: its actions must be" in refused(script, "--env-id", other)


@pytest.mark.parametrize("script", [script for script in MEMORY if script.startswith("dqn")])
@pytest.mark.parametrize("env_id, space", [("Pendulum-v1", "Box"), ("MultiDiscreteActionDiscrete-v0", "MultiDiscrete")])
def test_actions_that_have_no_values_of_their_own(refused, script, env_id, space):
    err = refused(script, "--env-id", env_id)
    assert f"--env-id {env_id}: its actions must be Discrete" in err and f"not {space}(" in err


@pytest.mark.parametrize("script", RAY)
def test_actors_that_cannot_be(refused, monkeypatch, script):
    err = refused(script, "--ray-address", "127.0.0.1:1")
    assert err == "error: --ray-address 127.0.0.1:1: needs --num-actors of at least 1\n"
    err = refused(script, "--num-actors", 300, "--batch-fragments", 1)
    assert err == "error: --max-lag 1000: must be at least 1200 with so many actors\n"
    with monkeypatch.context() as patch:
        patch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 10**6, "SC_PAGE_SIZE": 4096}.__getitem__)
        err = refused(script, "--num-actors", 28)
    assert err == "error: --num-actors 28: must be at most 27 in the memory of this machine\n"
    err = refused(script, "--ray-address", "127.0.0.1:1", "--num-actors", 1)
    assert err.startswith("error: --ray-address 127.0.0.1:1: must be the address of a Ray cluster (")
    err = refused(script, "--ray-address", f"{'x' * 70}:6379", "--num-actors", 1)  # no name of a host is that long
    assert err.startswith(f"error: --ray-address {'x' * 70}:6379: must be the address of a Ray cluster (")
    for address in ("ray://head", "ray://head:6379", "local", ":6379", "head:port"):
        err = refused(script, "--ray-address", address, "--num-actors", 1)
        assert err == f"error: --ray-address {address}: must be HOST:PORT of a cluster's head, or auto\n"
    err = refused(script, "--ray-address=", "--num-actors", 1)
    assert err == "error: --ray-address : must be HOST:PORT of a cluster's head, or auto\n"
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "ray" else find_spec(name, *a))
    assert "--num-actors 2: needs the ray package: pip install ray" in refused(script, "--num-actors", 2)


@pytest.mark.parametrize("script", RAY)
@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", None])
def test_what_listens_may_not_be_ray(monkeypatch, refused, script, answer):
    """Ray would wait for its own answer for minutes, and hear no signal."""
    create_connection = socket.create_connection
    patient = importlib.import_module(script).socket
    monkeypatch.setattr(patient, "create_connection", lambda address, timeout: create_connection(address, 0.5))

    def serve():
        connection, _ = server.accept()
        with connection, contextlib.suppress(ConnectionResetError):
            if answer is not None:
                connection.sendall(answer)
            while connection.recv(100):  # until the other side closes it
                pass

    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        threading.Thread(target=serve, daemon=True).start()
        err = refused(script, "--ray-address", address, "--num-actors", 1)
    reason = "timed out" if answer is None else "what listens there is not Ray"
    assert err == f"error: --ray-address {address}: must be the address of a Ray cluster ({reason})\n"


@pytest.mark.parametrize("script", RAY)
def test_an_ipv6_address_is_asked_without_its_brackets(monkeypatch, refused, script):
    asked = []

    def create_connection(address, timeout):
        asked.append(address)
        raise OSError("nobody is there")

    monkeypatch.setattr(importlib.import_module(script).socket, "create_connection", create_connection)
    assert "(nobody is there)" in refused(script, "--ray-address", "[::1]:6379", "--num-actors", 1)
    assert asked == [("::1", 6379)]


@pytest.mark.parametrize("script", [script for script in ALL if script.endswith("_torchcompile")])
def test_cudagraphs_without_cuda(refused, monkeypatch, script):
    assert "--cudagraphs True: needs a CUDA device" in refused(script, "--cudagraphs", "--no-cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "--cudagraphs True: needs a CUDA device" in refused(script, "--cudagraphs")


@pytest.mark.parametrize("script", [script for script in ALL if script.startswith(("sac", "td3"))])
def test_tf32_without_cuda(refused, monkeypatch, script):
    assert "--tf32 True: needs a CUDA device" in refused(script, "--tf32", "--no-cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "--tf32 True: needs a CUDA device" in refused(script, "--tf32")


@pytest.mark.parametrize("script", ALL)
def test_a_resume_of_no_folder(refused, script):
    """As of a variable of the shell that is empty: it would begin a new run."""
    for folder in ("", "nowhere"):
        err = refused(script, "--resume", folder, "--total-timesteps", 1)  # too few for anything else
        assert err.startswith(f"error: --resume {folder}".rstrip()) and "must be the folder of a run" in err


@pytest.mark.parametrize("script", [script for script in ALL if script.endswith("_torchcompile")])
def test_compile_without_what_it_needs(refused, monkeypatch, script):
    monkeypatch.setenv("CXX", "/no/such/c++ -O2")
    expected = "error: --compile True: needs the C++ compiler /no/such/c++, which is not there\n"
    assert refused(script, "--compile") == expected
    monkeypatch.setenv("CXX", "sh")
    get_path = sysconfig.get_path
    monkeypatch.setattr(sysconfig, "get_path", lambda name: "/no/such" if name == "include" else get_path(name))
    assert refused(script, "--compile") == "error: --compile True: needs /no/such/Python.h, which is not there\n"


@pytest.mark.parametrize("script", ALL)
def test_track_without_wandb(refused, monkeypatch, script):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "wandb" else find_spec(name, *a))
    err = refused(script, "--track")
    assert "--track True: needs the wandb package" in err and "pip install wandb" in err


@pytest.mark.parametrize("script", ALL)
def test_track_without_an_account(refused, monkeypatch, script):
    class Error(Exception):
        pass

    def init(**kwargs):
        raise Error("No API key\nconfigured")

    spec, errors = importlib.machinery.ModuleSpec("wandb", None), SimpleNamespace(Error=Error)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(__spec__=spec, init=init, errors=errors))
    err = refused(script, "--env-id", taken_by(script), "--track", "--output-dir", ".")
    assert err == "error: --track True: wandb can't start (No API key configured)\n"


@pytest.mark.parametrize("script", ALL)
def test_output_dir_that_cannot_be_written_to(refused, tmp_path, script):
    (tmp_path / "file").write_text("in the way")
    small = ["--env-id", taken_by(script)]
    small += [] if script in ON_POLICY or script in RAY else ["--buffer-size", "2000"]
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for folder in ("file", "file/runs", "dangling", "x" * 300):
        err = refused(script, *small, "--no-cuda", "--output-dir", folder)
        assert f"--output-dir {folder}: " in err and "can be written to" in err
    assert (tmp_path / "file").read_text() == "in the way"


@pytest.mark.parametrize(
    "argv, message",
    [
        (["sac_continuous_action.py", "--gamma", "1.5"], "error: --gamma 1.5: must lie in [0, 1]\n"),
        (["dqn_torchcompile.py", "--cudagraphs"], "error: --cudagraphs True: needs a CUDA device and --cuda\n"),
        (["td3_continuous_action.py", "--env-id", "HalfCheeta-v4"], "HalfCheetah-v4"),
    ],
)
def test_in_a_process_of_its_own(start, tmp_path, argv, message):
    process = start(*argv, cwd=tmp_path)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 2 and out == ""
    assert message in err and len(err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["terminal", "pipe"])
def test_a_box_that_is_drawn_or_coloured_makes_one_line(start, tmp_path, kind):
    """In a process of its own, as nothing is drawn or coloured where pytest captures the output."""
    ours, theirs = pty.openpty()
    stdout = theirs if kind == "terminal" else subprocess.PIPE
    process = start("dqn.py", "--gama", "0.9", cwd=tmp_path, stdout=stdout)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 2
    assert err.startswith(
        "error: Unrecognized options: --gama, 0.9; Perhaps you meant: --gamma FLOAT discount factor, per step"
    )
    assert err.endswith("/dqn.py --help\n") and len(err.splitlines()) == 1
    os.close(ours)
    os.close(theirs)
