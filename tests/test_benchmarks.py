"""The programs in benchmarks/: medians, tables and collected results, from made-up runs; nothing here trains."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "benchmarks"))

import gpu_visit  # noqa: E402
import learning  # noqa: E402
import saving  # noqa: E402
import speed  # noqa: E402
import tables  # noqa: E402

VERSIONS = {"python": "3.12.1", "torch": "2.13.0"}
PROBE = {"torch": "2.13.0", "threads": 2, "gpu": None}

# Stands in for dqn.py and dqn_torchcompile.py: writes a summary at once. The compiled one fails with --num-envs 3,
# waits with --num-envs 4, and knows by its cache folder whether it was run before.
SCRIPT = """
import json, os, pathlib, sys, time
flags = dict(zip(sys.argv[1:], sys.argv[2:]))
compiled = "torchcompile" in sys.argv[0]
if compiled and flags.get("--num-envs") == "3":
    print("note", file=sys.stderr)
    sys.exit(print("error: --num-envs 3: no", file=sys.stderr) or 2)
folder = pathlib.Path(flags["--output-dir"], "run")
if flags.get("--num-envs") == "4":
    pathlib.Path(os.environ["PID_FILE"]).write_text(str(os.getpid()))
    time.sleep(60)
folder.mkdir()
cache = pathlib.Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR", flags["--output-dir"]), "graph")
warmup = 1.0 if cache.exists() else 9.0
cache.write_text("")
print("replay buffer: 1.5 MB of host memory")
summary = {"status": "finished", "fps": (40.0 if compiled else 10.0) * int(flags["--seed"]) if "--seed" in flags else 1,
           "warmup_seconds": warmup, "wall_seconds": 2.0, "peak_memory_bytes": 1000, "threads": 1,
           "env_id": "CartPole-v1", "versions": {"mujoco": None}}
(folder / "summary.json").write_text(json.dumps(summary))
"""


def made_up_run(script: str, variant: str, repeat: int, fps: float | None, **more) -> dict:
    run = {"script": script, "variant": variant, "repeat": repeat, "process_seconds": 10.0}
    if fps is None:
        return run | {"status": "failed", "reason": "exit status 2: error: no", "summary": None}
    summary = {"fps": fps, "warmup_seconds": 4.0, "wall_seconds": 9.0, "peak_memory_bytes": 5 * 10**8, "threads": 2}
    summary |= {"env_id": "HalfCheetah-v4", "versions": VERSIONS}
    return run | {"status": "finished", "summary": summary} | more


def made_up_result(kind: str, runs: list[dict], started: str = "2026-01-02T03:04:05+00:00", **hardware) -> dict:
    about = {"cpu": "A Processor", "cores": 2, "torch_threads": 2, "gpu": None} | hardware
    result = {"kind": kind, "command": f"python benchmarks/speed.py # {kind}", "started": started, "ended": started}
    device = "cuda" if about["gpu"] else "cpu"
    return result | {"device": device, "hardware": about, "versions": VERSIONS, "runs": runs}


RUNS = [
    # Two compiled runs fell together with slow eager ones, so that the two kinds of ratio differ
    *(made_up_run("sac_continuous_action", "eager", i, fps) for i, fps in enumerate((50, 100, 80), 1)),
    *(
        made_up_run("sac_continuous_action", "compile", i, fps, share_of_arithmetic_limit=share)
        for i, fps, share in ((1, 150, 0.5), (2, 160, 0.6), (3, 240, 0.9))
    ),
    made_up_run("dqn", "eager", 1, None),
]


@pytest.fixture
def results(tmp_path):
    folder = tmp_path / "benchmarks" / "results"
    (folder / "learning").mkdir(parents=True)
    (folder / "speed_cpu_2026-01-02.json").write_text(json.dumps(made_up_result("speed", RUNS)))
    return folder


@pytest.fixture
def readme(tmp_path):
    path = tmp_path / "README.md"
    path.write_text("# Title\n\n<!-- table:speed -->\nold\n<!-- /table:speed -->\n\nText that stays.\n")
    return path


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Puts the stand-in script in the place of leanrl/dqn*.py."""
    folder = tmp_path / "scripts"
    folder.mkdir()
    for name in ("dqn", "dqn_torchcompile"):
        (folder / f"{name}.py").write_text(SCRIPT)
    monkeypatch.setattr(speed, "SCRIPTS", folder)
    monkeypatch.setenv("PID_FILE", str(tmp_path / "pid"))
    return folder


# ---- speed.py ----
def test_medians_and_ratios():
    lines = {(line["script"], line["variant"]): line for line in speed.summarise(RUNS)}
    eager, compiled = (lines["sac_continuous_action", variant] for variant in ("eager", "compile"))
    assert (eager["fps"], eager["fps_min"], eager["fps_max"], eager["times_eager"]) == (80, 50, 100, 1)
    assert compiled["fps"] == 160
    assert compiled["times_eager"] == 3.0  # the median of 3, 1.6 and 3
    assert compiled["times_eager_of_medians"] == 2.0
    assert compiled["share_of_arithmetic_limit"] == 0.6 and eager["share_of_arithmetic_limit"] is None
    failed = lines["dqn", "eager"]
    assert (failed["runs"], failed["failed"], failed["fps"]) == (0, 1, None)
    assert failed["reason"] == "exit status 2: error: no"


def test_ratio_leaves_out_repeats_without_a_partner():
    runs = [
        made_up_run("dqn", "eager", 1, 10),
        made_up_run("dqn", "compile", 1, 40),
        made_up_run("dqn", "compile", 2, 9),
    ]
    assert speed.summarise(runs)[1]["times_eager"] == 4.0
    assert speed.summarise(runs[1:])[0]["times_eager"] is None


def test_arms_take_turns_and_every_run_is_kept(stand_in, tmp_path):
    output = tmp_path / "speed.json"
    result = speed.new_result("speed", speed.Args(), PROBE, "cpu")
    plan = [("dqn", variant, repeat) for repeat in (1, 2) for variant in ("eager", "compile")]
    seen = []
    after_each = lambda: seen.append(len(json.loads(output.read_text())["runs"]))  # noqa: E731
    speed.measure_all(speed.Args(steps=5), plan, result, output, after_each=after_each)
    assert seen == [1, 2, 3, 4]
    written = json.loads(output.read_text())
    assert [(run["variant"], run["repeat"]) for run in written["runs"]] == [arm[1:] for arm in plan]
    assert written["runs"][0]["replay_buffer"] == "1.5 MB of host memory"
    assert written["runs"][1]["command"].startswith(
        "python leanrl/dqn_torchcompile.py --compile --seed 1 --learning-starts 1000 --total-timesteps 1005 "
    )
    assert [line["fps"] for line in written["medians"]] == [15, 60]
    assert "mujoco" in written["versions"]
    assert str(ROOT) not in output.read_text() and str(tmp_path) not in output.read_text()


def test_a_failed_arm_is_reported_and_the_others_go_on(stand_in, tmp_path, capsys):
    output = tmp_path / "speed.json"
    result = speed.new_result("speed", speed.Args(), PROBE, "cpu")
    plan = [("dqn", variant, repeat) for repeat in (1, 2) for variant in ("compile", "eager")]
    speed.measure_all(speed.Args(steps=5, num_envs=3), plan, result, output)
    assert [(run["variant"], run["status"]) for run in result["runs"]] == [
        ("compile", "failed"),
        ("eager", "finished"),
        ("eager", "finished"),
    ]
    assert result["runs"][0]["reason"] == "exit status 2: error: --num-envs 3: no"
    speed.print_result(result)
    assert "dqn compile failed: exit status 2: error: --num-envs 3: no" in capsys.readouterr().out


def test_no_run_begins_that_would_outlast_the_deadline(stand_in, tmp_path):
    result = speed.new_result("speed", speed.Args(), PROBE, "cpu")
    speed.measure_all(speed.Args(), [("dqn", "eager", 1)], result, tmp_path / "x.json", time.perf_counter() + 10)
    assert result["runs"] == []


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_an_environment_of_the_current_folder_can_be_measured(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "at_hand.py").write_text(
        "import gymnasium\n"
        "gymnasium.register('Here-v0', 'gymnasium.envs.classic_control:CartPoleEnv', max_episode_steps=9)\n"
    )
    flags = ["--env-id", "at_hand:Here-v0", "--total-timesteps", "512"]
    assert speed.run_script("ppo", flags, timeout=60)["status"] == "finished"
    assert speed.scrub(f"no {tmp_path}/at_hand.py") == "no HERE/at_hand.py"


def test_interrupt_and_timeout_end_the_child(stand_in, tmp_path):
    flags = ["--num-envs", "4"]
    assert speed.run_script("dqn", flags, timeout=1.0)["reason"] == "stopped after 1 s"

    def interrupt_once_it_runs(*_):
        if (tmp_path / "pid").exists() and (tmp_path / "pid").read_text():
            raise KeyboardInterrupt

    (tmp_path / "pid").unlink(missing_ok=True)
    handler = signal.signal(signal.SIGALRM, interrupt_once_it_runs)
    signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
    try:
        with pytest.raises(KeyboardInterrupt):
            speed.run_script("dqn", flags, timeout=30)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
    assert not is_alive(int((tmp_path / "pid").read_text()))


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends a child with its parent on Linux only")
def test_a_child_ends_with_a_parent_that_is_killed(tmp_path):
    child = f"import os, pathlib, time; pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()))"
    program = f"import sys, speed; speed.run_process([sys.executable, '-c', {child + '; time.sleep(60)'!r}], 60)"
    parent = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT / "benchmarks")
    stat, deadline = None, time.monotonic() + 30
    while stat is None or (
        stat.exists() and stat.read_text().split()[2] != "Z"
    ):  # in a container nobody may wait for it
        assert time.monotonic() < deadline
        if stat is None and (tmp_path / "pid").exists() and (pid := (tmp_path / "pid").read_text()):
            stat = Path("/proc", pid, "stat")
            assert stat.exists()
            parent.kill()
            parent.wait()
        time.sleep(0.05)


def test_warmup_runs_once_cold_and_twice_warm(stand_in, tmp_path):
    result = speed.new_result("warmup", speed.Args(), PROBE, "cpu")
    speed.warm_up_all([("dqn", "compile")], ["--num-envs", "1"], result, tmp_path / "warmup.json")
    assert [run["cache"] for run in result["runs"]] == ["cold", "warm", "warm"]
    (line,) = result["medians"]
    assert (line["cold"], line["warm"]) == (9.0, 1.0)


def test_an_output_is_new_or_a_result_of_its_kind(tmp_path, capsys, monkeypatch):
    good, other = tmp_path / "good.json", tmp_path / "other.json"
    speed.save(speed.new_result("speed", speed.Args(), PROBE, "cpu"), good, [])
    for path in (tmp_path / "new.json", tmp_path / "no" / "folder" / "yet.json"):
        speed.check_output(path, "speed")
    speed.save(json.loads(good.read_text()), path, [])  # and the folder is made
    speed.check_output(path, "speed", goes_on=True)
    with pytest.raises(SystemExit):
        speed.check_output(path, "speed")
    assert capsys.readouterr().err == f"error: --output {path}: is there already\n"
    refused = {tmp_path: "that can be written", good / "below.json": "that can be written", other: "of the kind speed"}
    refused[tmp_path / ("x" * 300) / "new.json"] = "that can be written (File name too long)"
    for text in ("", "[]", "{}", '{"kind": "speed"}', good.read_text().replace('"speed"', '"warmup"', 1)):
        other.write_text(text)
        for path, words in refused.items():
            with pytest.raises(SystemExit) as error:
                speed.check_output(path, "speed", goes_on=True)
            message = capsys.readouterr().err
            assert error.value.code == 2 and f"--output {path}: must be a" in message and words in message
        assert other.read_text() == text
    monkeypatch.setattr(os, "access", lambda place, mode: place != tmp_path)  # root may write everywhere
    for path in (good, tmp_path / "new.json"):
        with pytest.raises(SystemExit) as error:
            speed.check_output(path, "speed")
        assert error.value.code == 2 and "that can be written" in capsys.readouterr().err


def test_paths_of_this_machine_are_cut_where_they_end(monkeypatch):
    monkeypatch.setattr(speed, "ROOT", Path("/home/me/leanrl"))
    text = "/home/me/leanrl/x.py, /home/me/leanrl-results/y.json, '/home/me/leanrl' and /home/me/leanrl."
    assert speed.scrub(text) == "./x.py, /home/me/leanrl-results/y.json, '.' and .."


@pytest.mark.parametrize("flag", ["results", "output_dir"])
def test_learning_refuses_folders_that_cannot_be(tmp_path, capsys, flag):
    (tmp_path / "file").touch()
    folders = {"results": tmp_path / "results", "output_dir": tmp_path / "runs"} | {flag: tmp_path / "file" / "x"}
    entry = {"script": "dqn", "flags": "", "env_id": "CartPole-v1", "steps": 300, "seeds": [1]}
    with pytest.raises(SystemExit) as error:
        learning.run_all(learning.RunArgs(**folders), [entry])
    out, err = capsys.readouterr()
    message = f"error: --{flag.replace('_', '-')} {tmp_path / 'file' / 'x'}: must be a folder that can be written to"
    assert error.value.code == 2 and "started" not in out and err.startswith(message) and err.count("\n") == 1


def test_names_of_scripts(capsys):
    assert speed.find_scripts(["td3", "sac_continuous_action_torchcompile.py", "dqn", "dqn"]) == [
        "td3_continuous_action",
        "sac_continuous_action",
        "dqn",
    ]
    with pytest.raises(SystemExit) as error:
        speed.find_scripts(["ppo_of_no_kind"])
    assert error.value.code == 2 and "--scripts ppo_of_no_kind" in capsys.readouterr().err


def test_every_workload_is_a_pair_of_scripts():
    for script in speed.WORKLOADS:
        assert (ROOT / "leanrl" / f"{script}.py").is_file()
        assert (ROOT / "leanrl" / f"{script}_torchcompile.py").is_file()


# ---- gpu_visit.py ----
@pytest.fixture
def fake_gpu(stand_in, tmp_path, monkeypatch):
    """A machine on which torch finds a GPU, nvidia-smi tells of its use, and the stand-in takes its time."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\nwhile :; do echo '50, 100.5'; echo '[N/A], [N/A]'; sleep 0.02; done\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(speed, "ask", lambda _: PROBE | {"gpu": "A GPU"})
    text = SCRIPT.replace("folder.mkdir()", "folder.mkdir()\ntime.sleep(0.3)")
    for path in stand_in.iterdir():
        path.write_text(text.replace('"wall_seconds"', '"fps_window": [0, 80], "wall_seconds"'))


def visit(tmp_path, **changed) -> dict:
    parts = dict.fromkeys(("tests", "scan", "others", "fill_caches", "warmup"), False)
    gpu_visit.main(gpu_visit.Args(**{"output": tmp_path / "out", "scripts": ("dqn",), **parts, **changed}))
    return json.loads((tmp_path / "out" / "gpu_visit.json").read_text())


def test_a_visit_measures_every_arm_and_the_use_of_the_gpu(fake_gpu, tmp_path, capsys):
    noted = visit(tmp_path, fill_caches=True, warmup=True)
    assert [(run["script"], run["status"]) for run in noted["filled"]] == [("dqn", "finished")]
    assert noted["tests"] is None and noted["hardware"]["gpu"] == "A GPU" and noted["seconds"] < 500
    results = {path.name.partition("_")[0]: json.loads(path.read_text()) for path in (tmp_path / "out").iterdir()}
    assert sorted(results) == ["gpu", "speed", "warmup"]
    runs = results["speed"]["runs"]
    arms = [(variant, repeat) for repeat in (1, 2) for variant in gpu_visit.VARIANTS]
    assert [(run["variant"], run["repeat"]) for run in runs] == arms
    assert all("--no-cuda" not in run["command"] for run in runs)
    for run in runs:
        use = run["gpu_use"]
        assert (use["utilisation_percent"], use["power_watts"]) == (50, 100.5) and use["samples"] > 1
    assert results["speed"]["ended"] and results["warmup"]["ended"]
    assert [run["cache"] for run in results["warmup"]["runs"]] == 2 * ["cold", "warm", "warm"]
    assert "dqn eager: GPU used 50 % of the time" in capsys.readouterr().out


def test_a_visit_begins_nothing_that_would_outlast_it(fake_gpu, tmp_path):
    noted = visit(tmp_path, fill_caches=True, warmup=True, scan=True, budget=20)
    assert noted["filled"] is None and noted["scan"] is None
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["gpu_visit.json"]


def test_the_use_of_the_gpu_is_that_of_the_window_in_which_fps_was_taken():
    sampler = object.__new__(gpu_visit.Sampler)
    sampler.samples = [(99.0, 0, 50), (100.5, 80, 300), (101.5, 60, 200), (102.5, 0, 50)]  # time, %, W
    run = {"summary": {"fps": 50.0, "fps_window": [100, 200]}, "ended": 102.0}  # two seconds
    assert sampler.during(run) == {"utilisation_percent": 70.0, "power_watts": 250.0, "samples": 2}
    assert sampler.during(run | {"ended": 90.0}) is None and sampler.during({"summary": None}) is None


def test_a_visit_needs_a_gpu_and_a_folder(stand_in, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    for gpu, changed, words in (
        (None, {}, "there is no CUDA device"),
        ("A GPU", {"variants": ()}, "--variants: must be followed by at least one value"),
        ("A GPU", {"output": tmp_path / "file" / "below"}, "must be a folder that can be written to"),
    ):
        monkeypatch.setattr(speed, "ask", lambda _, gpu=gpu: PROBE | {"gpu": gpu})
        with pytest.raises(SystemExit) as error:
            visit(tmp_path, **changed)
        assert error.value.code == 2 and words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# ---- tables.py ----
def test_speed_table(readme, results):
    tables.main(tables.Args(readme=readme, results=results))
    text = readme.read_text()
    assert text.startswith("# Title\n\n<!-- table:speed -->\n| script |")
    assert text.endswith("\n<!-- /table:speed -->\n\nText that stays.\n") and "old" not in text
    row = "| `sac_continuous_action` | compile | HalfCheetah-v4 | 160 | 150–240 | 3.00 | 4.0 | 500 | 60% |"
    assert row in text
    assert "| `dqn` | eager |  | failed |" in text
    assert "(benchmarks/results/speed_cpu_2026-01-02.json)" in text and "A Processor, 2 cores, 2 threads" in text


def test_check_catches_a_stale_table(readme, results):
    check, renew = (tables.Args(check=check, readme=readme, results=results) for check in (True, False))
    old = readme.read_text()
    with pytest.raises(SystemExit) as error:
        tables.main(check)
    assert error.value.code not in (0, None, 2) and readme.read_text() == old
    tables.main(renew)
    tables.main(check)
    path = results / "speed_cpu_2026-01-02.json"
    path.write_text(json.dumps(made_up_result("speed", RUNS[:3])))
    with pytest.raises(SystemExit):
        tables.main(check)


PROGRAMS = sorted(path for path in speed.ROOT.glob("benchmarks/*.py") if "__main__" in path.read_text())


@pytest.mark.parametrize("flags, words", [(["--bogus"], "--bogus"), (["--repeats", "many"], "--repeats INT")])
def test_a_command_line_that_cannot_be_parsed_makes_one_line(monkeypatch, capsys, flags, words):
    monkeypatch.setattr(sys, "argv", ["speed.py", *flags])
    with pytest.raises(SystemExit) as error:
        speed.command_line(speed.Args, speed.__doc__)
    (line,) = capsys.readouterr().err.splitlines()
    assert error.value.code == 2 and line.startswith("error: ") and words in line
    monkeypatch.setattr(sys, "argv", ["speed.py", "--help"])
    with pytest.raises(SystemExit) as error:
        speed.command_line(speed.Args, speed.__doc__)
    assert not error.value.code and "--repeats INT" in capsys.readouterr().out
    assert len(PROGRAMS) > 15 and all("main(command_line(" in path.read_text() for path in PROGRAMS)


def test_what_is_missing_or_out_of_range_is_refused(tmp_path, readme, capsys):
    text, no_place = readme.read_text(), tmp_path / "OTHER.md"
    no_place.write_text("# No table\n")
    for run, words in (
        (lambda: tables.main(tables.Args(readme=readme, results=tmp_path / "none")), "--results"),
        (lambda: tables.main(tables.Args(readme=no_place)), "OTHER.md: has no place for a table"),
        (lambda: learning.main(learning.CollectArgs(())), "FOLDERS"),
        (lambda: learning.main(learning.RunArgs(points=-1)), "--points -1"),
    ):
        with pytest.raises(SystemExit) as error:
            run()
        assert error.value.code == 2 and words in capsys.readouterr().err
    assert readme.read_text() == text, "the tables stand as they were"


def test_hardware_tells_processors_of_one_name_apart_by_their_family(monkeypatch):
    probe = {"threads": 2, "gpu": None}
    monkeypatch.setattr(speed.sys, "platform", "linux")
    for family in (25, 26):
        text = f"vendor_id\t: AuthenticAMD\ncpu family\t: {family}\nmodel name\t: AMD EPYC\n\n" * 2
        monkeypatch.setattr(speed.Path, "read_text", lambda self, text=text: text)
        about = speed.hardware(probe)
        assert (about["cpu"], about["cpu_family"], about["torch_threads"]) == ("AMD EPYC", family, 2)
    monkeypatch.setattr(speed.sys, "platform", "darwin")
    assert speed.hardware(probe)["cpu_family"] is None


def test_newest_file_of_each_machine_and_script(results):
    for name, date, fps, hardware in (("cpu_b", "2026-03-01", 7, {}), ("gpu", "2025-01-01", 9000, {"gpu": "A GPU"})):
        result = made_up_result("speed", [made_up_run("dqn", "eager", 1, fps)], f"{date}T00:00:00+00:00", **hardware)
        (results / f"speed_{name}.json").write_text(json.dumps(result))
    text = tables.speed_table(results)
    names = ("speed_cpu_2026-01-02.json", "speed_cpu_b.json", "speed_gpu.json")
    assert sorted(names, key=text.index) == list(names), "an older one keeps the script that the newer one lacks"
    old, new, gpu = (part.split("From [")[0] for part in text.split("| script |")[1:])
    assert "| `sac_continuous_action` | compile" in old and "`dqn`" not in old and "| `dqn` | eager |" in new
    assert "A GPU (A Processor, 2 cores)" in text and "| 9,000 |" in gpu
    (row,) = [line for line in tables.scripts_table(results).splitlines() if "leanrl/dqn.py" in line]
    assert row.endswith("|  |  |  | 7 |  | 9,000 |"), "no column of compiled scripts on a GPU, as there is no such run"
    result = made_up_result("speed", RUNS, "2026-04-01T00:00:00+00:00")
    (results / "speed_cpu_c.json").write_text(json.dumps(result))
    text = tables.speed_table(results)
    assert "GPU used" not in text
    assert "speed_cpu_c.json" in text and "speed_gpu.json" in text
    assert "speed_cpu_b.json" not in text and "speed_cpu_2026-01-02.json" not in text


def test_runs_with_other_flags_are_not_in_the_table(results):
    used = made_up_run("dqn", "cudagraphs", 1, 9000.0) | {"gpu_use": {"utilisation_percent": 17.4}}
    idle = made_up_run("dqn", "compile", 1, 8000.0) | {"gpu_use": {"utilisation_percent": 0.0}}
    unknown = made_up_run("dqn", "eager", 1, 6000.0) | {"gpu_use": None}
    usual = made_up_result("speed", [used, idle, unknown], gpu="A GPU") | {"settings": {"num_envs": None, "flags": ""}}
    (results / "speed_gpu.json").write_text(json.dumps(usual))
    for changed in ({"num_envs": 64}, {"flags": "--tf32"}, {"env_id": "Acrobot-v1"}):
        other = made_up_result("speed", [made_up_run("dqn", "cudagraphs", 1, 7777.0)], "2027-01-01", gpu="A GPU")
        (results / f"speed_{next(iter(changed))}.json").write_text(json.dumps(other | {"settings": changed}))
    text = tables.speed_table(results)
    table = tables.scripts_table(results)
    assert "7,777" not in text + table
    (row,) = [line for line in table.splitlines() if "leanrl/dqn.py" in line]
    assert row.endswith("| 6,000 | 8,000 |"), "what was captured alone is faster here, but not compiled"
    ends = {line.split(" | ")[3]: line.split(" | ")[-1] for line in text.splitlines() if line.startswith("| `dqn`")}
    assert ends["9,000"] == "17% |" and ends["8,000"] == "0% |" and ends["6,000"] == " |"
    assert text.count("GPU used, of the time") == 1


def test_warmup_table(results):
    runs = [
        made_up_run("dqn", "compile", i, 1, cache=cache, process_seconds=seconds)
        for i, cache, seconds in ((1, "cold", 30.0), (2, "warm", 8.0), (3, "warm", 9.0))
    ]
    (results / "warmup_cpu.json").write_text(json.dumps(made_up_result("warmup", runs)))
    assert "| `dqn` | compile | 4.0 | 4.0 | 30.0 | 8.5 |" in tables.warmup_table(results)


@pytest.mark.parametrize(
    "text",
    [
        "<!-- table:sped -->\n<!-- /table:sped -->",
        "<!-- table:speed -->",
        "<!-- /table:speed -->",
        "<!-- table:speed -->\n<!-- /table:warmup -->",
        "<!-- table:speed -->\n<!-- table:warmup -->\n<!-- /table:warmup -->\n<!-- /table:speed -->",
    ],
)
def test_wrong_markers_are_errors(text, readme, results, capsys):
    readme.write_text(text)
    with pytest.raises(SystemExit) as error:
        tables.main(tables.Args(readme=readme, results=results))
    assert error.value.code == 2 and "table:" in capsys.readouterr().err
    assert readme.read_text() == text


def test_the_pages_are_up_to_date_and_have_every_table_once(capsys):
    shown = [
        marker[2] for page in tables.PAGES for marker in tables.MARKERS.finditer(page.read_text()) if not marker[1]
    ]
    assert sorted(shown) == sorted(tables.TABLES)
    tables.main(tables.Args(check=True))


def test_links_of_the_pages_lead_somewhere():
    def anchors(page: Path) -> set[str]:  # as GitHub names them
        titles = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.S), re.M)
        return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}

    for page in tables.PAGES:
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", page.read_text()):
            place = (page.parent / target).resolve() if target else page
            assert place.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in anchors(place), f"{page.name}: {target}#{anchor}"


def test_links_of_a_page_beside_the_results(results, tmp_path):
    page = tmp_path / "benchmarks" / "README.md"
    page.write_text("<!-- table:speed -->\n<!-- /table:speed -->\n")
    tables.main(tables.Args(readme=page, results=results))
    assert "](results/speed_cpu_2026-01-02.json)" in page.read_text() and "](benchmarks" not in page.read_text()


def test_the_output_that_the_readme_shows_is_that_of_the_recorded_run():
    run = json.loads((ROOT / "benchmarks" / "results" / "first_run.json").read_text())
    readme = (ROOT / "README.md").read_text()
    assert f"return {run['episode_return']} (mean of the last {run['episodes']} of" in readme
    assert f"{run['fps']} steps/s on {run['device_name']}, warm-up {run['warmup_seconds']} s" in readme


@pytest.mark.parametrize("script", ["ppo_memory", "dqn_memory"])
def test_the_return_that_a_script_tells_is_that_of_the_readme(script):
    row = next(line for line in (ROOT / "README.md").read_text().splitlines() if f"| [`{script}.py`]" in line)
    expected = re.search(r"TMaze-v0 \| (\S+ ± \S+) \| 100,000 ", row)[1]
    for version in ("", "_torchcompile"):
        assert f"is {expected} after 100,000 steps" in (ROOT / "leanrl" / f"{script}{version}.py").read_text()


def test_no_result_names_a_folder_of_a_machine():
    for path in (ROOT / "benchmarks").rglob("*.json"):
        for folder in ('"/', "/home/", "/Users/", "/tmp/"):
            assert folder not in path.read_text(), f"{path.name} names a folder of the machine that made it"


# ---- learning.py ----
def made_up_run_folder(folder: Path, seed: int = 1, status: str = "finished", **arguments) -> Path:
    folder.mkdir()
    config = {"seed": seed, "env_id": "CartPole-v1", "total_timesteps": 3000, "output_dir": str(folder.parent)}
    config |= {"wandb_project": "p", "wandb_entity": None, "compile": True} | arguments
    about = {"device": "cpu", "device_name": "A Processor", "threads": 1, "versions": VERSIONS}
    (folder / "config.json").write_text(json.dumps(config | about))
    episodes = [
        {"global_step": 20 * (i + 1), "return": float(i + seed), "length": 20, "terminated": i % 2 == 0}
        for i in range(150)
    ]
    (folder / "episodes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in episodes))
    metrics = [{"global_step": 5 * i, "wall_time": 0.1, "fps": 9.0, "episode_return": None} for i in range(600)]
    metrics = [
        line | ({"td_loss": i / 10} if i >= 100 else {}) | {"learning_rate": 1e-3} for i, line in enumerate(metrics)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    summary = {
        "script": "dqn_torchcompile",
        "variant": "compile",
        "global_step": 3000,
        "episodes": 150,
        "status": status,
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def test_collect(tmp_path, results):
    folders = [made_up_run_folder(tmp_path / f"run{seed}", seed) for seed in (1, 3)]
    learning.main(learning.CollectArgs(folders=tuple(folders), results=results / "learning"))
    path = results / "learning" / "CartPole-v1__dqn_torchcompile__compile__3000__seed1.json"
    result = json.loads(path.read_text())
    assert result["return_last_20"] == 140.5 and result["return_last_100"] == 100.5
    assert {key: len(column) for key, column in result["episodes"].items()} == dict.fromkeys(
        ("global_step", "return", "length", "terminated"), 150
    )
    losses = result["losses"]
    assert set(losses) == {"global_step", "td_loss"} and len(losses["td_loss"]) == 200
    assert (losses["global_step"][0], losses["global_step"][-1]) == (500, 2995)
    assert all(loss == pytest.approx(step / 50) for step, loss in zip(losses["global_step"], losses["td_loss"]))
    assert result["summary"]["status"] == "finished" and result["versions"] == VERSIONS
    assert str(tmp_path) not in path.read_text()

    table = tables.learning_table(results)
    assert "| CartPole-v1 | `dqn_torchcompile` | compile | 3,000 | 1, 3 | 101.5 ± 1.4 | 141.5 ± 1.4 | 150 |" in table
    assert "From the 2 files" in table and "A Processor, 1 thread" in table


def test_scripts_table(tmp_path, results):
    for n, (steps, more) in enumerate([(2000, {}), (1000, {}), (3000, {"batch_size": 7}), (3000, {"env_id": "Other"})]):
        folder = made_up_run_folder(tmp_path / f"run{n}", total_timesteps=steps, **more)
        learning.write(learning.collect(folder), results / "learning")
    rows = {line.split(" | ")[0]: line for line in tables.scripts_table(results).splitlines()}
    assert "| CartPole-v1 | 100.5 | 2,000 | 1 |" in rows["| DQN"]  # the longest run with the defaults
    assert rows["| SAC"].endswith("| HalfCheetah-v4 |  |  |  | 80 | 160 |") and rows["| DQN"].endswith("|  |  |")
    newer = made_up_result(
        "speed", [made_up_run("sac_continuous_action", "eager", 1, 70.0)], "2026-01-03", cpu="Another"
    )
    (results / "speed_another.json").write_text(json.dumps(newer))
    rows = {line.split(" | ")[0]: line for line in tables.scripts_table(results).splitlines()}
    assert rows["| SAC"].endswith("| HalfCheetah-v4 |  |  |  | 70 |"), "of several machines of a kind the last"
    scripts = {path.stem.removesuffix("_torchcompile") for path in (ROOT / "leanrl").glob("*.py")}
    assert set(tables.ALGORITHMS) == scripts


def test_reference_table(results):
    assert tables.reference_table(results) == "No reference."
    reference = {
        "source": "https://there",
        "hardware": "a GPU",
        "columns": ["eager", "fast"],
        "fps": {"sac": [1, 1234]},
    }
    (results / "reference_leanrl.json").write_text(json.dumps(reference))
    table = tables.reference_table(results)
    assert "| `sac` | 1 | 1,234 |" in table and "a GPU, from [LeanRL's README](https://there)" in table
    published = json.loads((tables.RESULTS / "reference_leanrl.json").read_text())
    assert {len(line) for line in published["fps"].values()} == {len(published["columns"])}
    assert published["fps"].keys() < tables.ALGORITHMS.keys()


def test_published_table(tmp_path, results):
    assert tables.published_table(results) == "No reference."
    for n, (steps, seed) in enumerate([(2000, 1), (3000, 1), (3000, 2)]):
        folder = made_up_run_folder(tmp_path / f"run{n}", seed, total_timesteps=steps)
        learning.write(learning.collect(folder), results / "learning")
    lines = [["dqn", "CartPole-v1", 3000, 489, 16], ["dqn", "CartPole-v1", 9000, -91.5, 7.2], ["dqn", "Other", 1, 2, 3]]
    reference = {"sources": {"DQN": "https://there"}, "returns": lines, "note": "of a kind"}
    (results / "reference_cleanrl.json").write_text(json.dumps(reference))
    table = tables.published_table(results)
    assert "| DQN | CartPole-v1 | 3,000 | 2 | 101.0 ± 0.7 | 489 ± 16 |" in table  # the longest runs
    assert "| DQN | CartPole-v1 | 3,000 | 2 | 101.0 ± 0.7 | -91.5 ± 7.2 at 9,000 |" in table
    assert "Other" not in table and "([DQN](https://there); of a kind)" in table
    published = json.loads((tables.RESULTS / "reference_cleanrl.json").read_text())
    assert {len(line) for line in published["returns"]} == {len(published["columns"])}
    assert {script for script, *_ in published["returns"]} < tables.ALGORITHMS.keys()


def test_what_is_not_a_default_is_in_the_name_and_in_the_table(tmp_path, results):
    learning.main(
        learning.CollectArgs(
            folders=(
                made_up_run_folder(tmp_path / "run", batch_size=7, gamma=0.99),
                made_up_run_folder(tmp_path / "2"),
            ),
            results=results / "learning",
        )
    )
    start = "CartPole-v1__dqn_torchcompile__compile__3000__"
    assert {path.name for path in (results / "learning").iterdir()} == {
        f"{start}batch-size-7__seed1.json",
        f"{start}seed1.json",
    }
    table = tables.learning_table(results)
    assert "| `dqn_torchcompile` | compile, --batch-size 7 | 3,000 |" in table
    assert "| `dqn_torchcompile` | compile | 3,000 |" in table
    plan = [{"script": "dqn_torchcompile", "flags": "--compile --batch-size 7 --gamma 0.99", "env_id": "CartPole-v1",
             "steps": 3000, "seeds": [1]}]  # fmt: skip
    assert learning.jobs_of(plan)[0]["name"] == f"{start}batch-size-7__seed1.json"


def test_collect_refuses_what_is_not_finished(tmp_path, results, capsys):
    good = made_up_run_folder(tmp_path / "good")
    bad = made_up_run_folder(tmp_path / "bad", seed=2, status="interrupted")
    no_summary = made_up_run_folder(tmp_path / "no_summary", seed=3)
    (no_summary / "summary.json").unlink()
    cut = made_up_run_folder(tmp_path / "cut", seed=4)
    (cut / "episodes.jsonl").write_text('{"global_step": 20, "return": 1.0}\n')
    for folder, reason in ((bad, "interrupted"), (no_summary, "lacks summary.json"), (cut, "has 1 episodes")):
        with pytest.raises(SystemExit) as error:
            learning.main(learning.CollectArgs(folders=(good, folder), results=results / "learning"))
        assert error.value.code == 2 and reason in capsys.readouterr().err
    assert list((results / "learning").iterdir()) == []


@pytest.mark.parametrize("is_of_other_arguments", [True, False])
def test_collect_does_not_replace_another_run(tmp_path, results, capsys, is_of_other_arguments):
    first = made_up_run_folder(tmp_path / "first")
    other = made_up_run_folder(tmp_path / "other", **{"measure_burnin": 7} if is_of_other_arguments else {})
    if not is_of_other_arguments:
        text = (other / "episodes.jsonl").read_text()
        (other / "episodes.jsonl").write_text(text.replace('"return": 1', '"return": 2'))
    common = {"results": results / "learning"}
    for folders in ((first,), (first,)):
        learning.main(learning.CollectArgs(folders=folders, **common))
    (path,) = common["results"].iterdir()
    text = path.read_text()
    with pytest.raises(SystemExit) as error:
        learning.main(learning.CollectArgs(folders=(other,), **common))
    assert error.value.code == 2 and "--force" in capsys.readouterr().err and path.read_text() == text
    learning.main(learning.CollectArgs(folders=(other,), **common, force=True))
    assert path.read_text() != text


@pytest.mark.parametrize("name", ["speed_bad.json", "learning/bad.json"])
@pytest.mark.parametrize("text", ["{}", "[]", "3", "{"])
def test_tables_name_a_file_that_is_no_result(results, capsys, name, text):
    (results / name).write_text(text)
    with pytest.raises(SystemExit) as error:
        tables.scripts_table(results)
    assert error.value.code == 2 and f"{results / name}: not a " in capsys.readouterr().err


def test_run_skips_what_has_a_result(results, capsys):
    jobs = learning.jobs_of(learning.PLAN)
    assert len({job["name"] for job in jobs}) == len(jobs) == sum(len(entry["seeds"]) for entry in learning.PLAN)
    assert jobs[0]["name"] == "CartPole-v1__dqn_torchcompile__compile__500000__seed1.json"
    last = learning.PLAN[-1]
    for job in jobs[:-1]:
        (results / "learning" / job["name"]).write_text("{}")
    learning.main(learning.RunArgs(results=results / "learning", dry_run=True))
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        f"{len(jobs)} jobs, {len(jobs) - 1} of which have a result already",
        f"python leanrl/{last['script']}.py {last['flags']} --env-id {last['env_id']} "
        f"--total-timesteps {last['steps']} --seed {last['seeds'][-1]}",
    ]


def test_flags_may_have_their_values_behind_an_equals_sign():
    for flags in ("--learning-rate=0.1 --no-autotune --env-id=a=b", "--learning-rate 0.1 --no-autotune --env-id a=b"):
        expected = {"learning_rate": 0.1, "autotune": False, "env_id": "a=b"}
        assert learning.arguments_of(flags.split()) == expected


@pytest.mark.parametrize(
    "change, words",
    [
        ({"flags": '"'}, "No closing quotation"),
        ({"flags": "--seed 4"}, "must have --seed in a field of its own"),
        ({"flags": "--env-id=Acrobot-v1"}, "must have --env-id in a field of its own"),
        ({"steps": -5}, "steps and stop_at above 0"),
        ({"seeds": ["a"]}, "must have whole numbers"),
        ({"seeds": [True]}, "must have whole numbers"),
        ({"stop_at": "x"}, "must have whole numbers"),
        ({"stop_at": 0}, "steps and stop_at above 0"),
    ],
    ids=str,
)
def test_a_plan_that_is_none(capsys, change, words):
    entry = {"script": "dqn", "flags": "", "env_id": "CartPole-v1", "steps": 100, "seeds": [1], "stop_at": 50}
    assert len(learning.jobs_of([entry])) == 1
    with pytest.raises(SystemExit) as error:
        learning.jobs_of([entry | change])
    message = capsys.readouterr().err
    assert error.value.code == 2 and message.count("\n") == 1 and words in message


def test_a_planned_run_has_the_name_of_its_result():
    (job,) = learning.jobs_of(
        [{"script": "ppo", "flags": "--ent-coef 0 --num-envs 8", "env_id": "CartPole-v1", "steps": 1024, "seeds": [2]}]
    )
    assert job["name"] == "CartPole-v1__ppo__eager__1024__ent-coef-0.0__num-envs-8__seed2.json"


def test_plot(tmp_path, results):
    pytest.importorskip("matplotlib")
    learning.write(learning.collect(made_up_run_folder(tmp_path / "run")), results / "learning")
    tables.plot(results, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_each_script_has_a_colour_of_its_own():
    assert len(set(tables.COLOURS)) == len(tables.COLOURS) >= len([*speed.SCRIPTS.glob("*_torchcompile.py")])


def test_smoothing():
    assert tables.smooth([1, 3, 5, 7], 2) == [1, 2, 4, 6]


def test_a_job_that_is_stopped_and_resumed(results, tmp_path, monkeypatch):
    """Its result has all its steps, and says so."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    plan = {"script": "ppo", "flags": "", "env_id": "CartPole-v1", "steps": 20_000, "seeds": [3], "stop_at": 3000}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    args = learning.RunArgs(plan=tmp_path / "plan.json", output_dir=tmp_path / "runs", results=results / "learning")
    learning.main(args)
    (path,) = (results / "learning").iterdir()
    assert path.name == "CartPole-v1__ppo__eager__20000__resumed-1__seed3.json"
    result = json.loads(path.read_text())
    (step,) = result["summary"]["resumed_at"]
    assert 3000 <= step < 20_000 and result["summary"]["global_step"] == 20_000
    assert result["episodes"]["global_step"] == sorted(result["episodes"]["global_step"])
    assert "eager, stopped and resumed |" in tables.learning_table(results)


def test_what_saving_costs(stand_in, tmp_path, monkeypatch, capsys):
    """The stand-in is as fast in both kinds of runs; here one is made half as fast."""
    run_script = saving.run_script

    def slower(name, flags, timeout):
        record = run_script(name, flags, timeout)
        record["summary"]["fps"] *= 0.5 if "--save-every" in flags else 1
        return record

    monkeypatch.setattr(saving, "run_script", slower)
    saving.main(saving.Args(script="dqn", save_every=70, repeats=2, output=tmp_path / "saving_cpu.json"))
    result = json.loads((tmp_path / "saving_cpu.json").read_text())
    assert result["losses"] == [0.5, 0.5] and result["median_loss"] == 0.5 and result["ended"]
    assert [("--save-every 70" in run["command"], run["repeat"]) for run in result["runs"]] == [
        (False, 1), (True, 1), (True, 2), (False, 2)
    ]  # fmt: skip
    assert all("--compile" in run["command"] for run in result["runs"])
    assert "loss: 50.00% (median of 2)" in capsys.readouterr().out
    (row,) = [line for line in tables.saving_table(tmp_path).splitlines() if "`dqn_" in line]
    assert row.startswith("| `dqn_torchcompile --compile` | 70 | ")
    assert row.endswith(" | 50.0% | 50.0% | 50.0% |")
    (tmp_path / "notes.json").write_text("mine")
    with pytest.raises(SystemExit):
        saving.main(saving.Args(output=tmp_path / "notes.json"))
    assert "notes.json: is there already" in capsys.readouterr().err
    for save_every, allowed in ((0, "must be above 0"), (500, "must be below --steps 500")):
        with pytest.raises(SystemExit):
            saving.main(saving.Args(save_every=save_every, steps=500))
        assert f"--save-every {save_every}: {allowed}" in capsys.readouterr().err
