"""run.sh, with a stand-in for Python: what it says, what it refuses, and how it takes up an install that broke off."""

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Stands in for Python, outside and inside .venv, so that a test needs no network: `-m venv` makes a folder with this
# file in it, `-m pip install` writes a line into the log (and fails when asked to, or waits for tenths of a second),
# `-c` is real Python, which believes it is this file and of version 3.$MINOR, and so is `-`. Anything else prints the
# arguments.
FAKE_PYTHON = """\
#!/usr/bin/env bash
trap 'exit 130' INT  # bash alone may take a Ctrl-C for its child's affair and go on; pip does not
case "$1 ${2:-}" in
    "-c "*) exec "$REAL_PYTHON" -c "
import sys
sys._base_executable, sys.version_info = '$0', (3, ${MINOR:-11}, 1)
$2" ;;
    "-m venv") mkdir -p "${*: -1}/bin" && cp "$0" "${*: -1}/bin/python"; echo made >>"$LOG" ;;
    "-m pip")
        [[ $3 == install ]] || exit 0
        echo "pip $*" >>"$LOG"
        [[ -z ${PIP_TARGET:-} && ${PIP_USER:-0} == 0 ]] || echo "elsewhere" >>"$LOG"
        half="$(dirname -- "$0")/../half"
        [[ ! -e $half ]] || { echo "pip in a half-made .venv" >>"$LOG"; exit 1; }
        touch "$half"
        for ((i = 0; i < ${PIP_WAITS:-0}; i++)); do sleep 0.1; done  # bash puts a trap off until a command has ended
        if [[ -n ${PIP_FAILS:-} ]]; then exit 1; fi
        rm "$half" ;;
    "- ") exec "$REAL_PYTHON" - ;;
    *) echo "ran: $*" ;;
esac
"""


class Copy:
    """A copy of run.sh and the requirement files in a folder of its own, with one script and the stand-in."""

    def __init__(self, folder: Path):
        self.root = folder / "a checkout"
        self.venv = self.root / ".venv"
        self.log_file = folder / "log"
        shutil.copytree(ROOT / "requirements", self.root / "requirements")
        shutil.copy(ROOT / "run.sh", self.root)
        (self.root / "leanrl").mkdir()
        (self.root / "leanrl" / "dqn.py").write_text("")
        (self.root / "leanrl" / "atari.py").write_text("import envpool\n")
        (self.root / "leanrl" / "fleet.py").write_text("    import envpool\n    import ray\n")
        self.python = folder / "bin" / "python3"
        self.python.parent.mkdir()
        self.python.write_text(FAKE_PYTHON)
        self.python.chmod(0o755)
        self.elsewhere = folder / "elsewhere"
        self.elsewhere.mkdir()
        self.environment = {
            "PATH": f"{self.python.parent}:/usr/bin:/bin",
            "REAL_PYTHON": sys.executable,
            "LOG": str(self.log_file),
        }

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen:
        return subprocess.Popen(
            ["bash", self.root / "run.sh", *arguments],
            cwd=self.elsewhere,
            env=self.environment | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            # Where the tests run in the background, they are started with Ctrl-C ignored, and so would run.sh be.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def run(self, *arguments: str, status: int = 0, **environment: str) -> tuple[str, str]:
        """stdout and stderr of a run.sh that has to end with `status`."""
        process = self.start(*arguments, **environment)
        out, error = process.communicate(timeout=60)
        assert process.returncode == status, out + error
        return out, error

    def log(self) -> list[str]:
        """What the stand-in was asked to make and install since the last call."""
        lines = self.log_file.read_text().splitlines() if self.log_file.exists() else []
        self.log_file.unlink(missing_ok=True)
        return [line.split()[0] for line in lines]

    def wait_for_pip(self):
        deadline = time.monotonic() + 30
        while not (self.venv / "half").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.fixture
def copy(tmp_path):
    return Copy(tmp_path)


def refusal(result: tuple[str, str]) -> str:
    out, error = result
    assert out == "" and error.count("\n") == 1, "a refusal is one line on stderr"
    return error


@pytest.mark.skipif(not Path(sysconfig.get_path("include"), "Python.h").exists(), reason="needs Python's headers")
@pytest.mark.parametrize("has_cuda", [False, True])
@pytest.mark.parametrize(
    "folder, compiler, missing",
    [
        ("packages", "sh", None),
        ("packages", "sh -O2", None),
        ("packages", "no-such-compiler", "no-such-compiler"),
        ("all packages", "sh", "a path without spaces"),
    ],
)
def test_the_main_job_has_the_flags_that_can_be(copy, folder, compiler, missing, has_cuda):
    script = copy.root / "leanrl" / "sac_continuous_action_torchcompile.py"
    script.write_text("")
    packages = copy.elsewhere / folder
    packages.mkdir()
    (packages / "torch.py").write_text(f"class cuda:\n    is_available = staticmethod(lambda: {has_cuda})\n")
    out, error = copy.run(PYTHONPATH=str(packages), CXX=compiler)
    flags = ["--compile"] * (missing is None) + ["--cudagraphs"] * has_cuda
    assert out == " ".join(["ran:", str(script), *flags, "--total-timesteps 12000\n"])
    assert ("without --compile" in error) == (missing is not None)
    assert missing is None or f"needs {missing}\n" in error


def test_pip_installs_into_venv_alone(copy):
    copy.run("setup", PIP_TARGET="/elsewhere", PIP_USER="1")
    assert "pip" in (log := copy.log()) and "elsewhere" not in log


def test_a_link_to_it(copy):
    link = copy.elsewhere / "run"
    link.symlink_to(copy.root / "run.sh")
    out = subprocess.run([link, "help"], env=copy.environment, capture_output=True, text=True, check=True).stdout
    assert "Scripts: atari dqn fleet" in out


@pytest.mark.parametrize("word", ["help", "-h", "--help"])
def test_help(copy, word):
    out, error = copy.run(word)
    assert "./run.sh test" in out and "dqn" in out and error == ""
    assert copy.log() == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trian"], ["'trian'", "bench, setup, test, train, help"]),
        (["--compile"], ["'--compile'", "train"]),
        (["train"], ["SCRIPT", "dqn"]),
        (["train", "dqm"], ["'dqm'", "dqn"]),
        (["train", "../run.sh"], ["'../run.sh'", "dqn"]),
        (["train", ""], ["''", "dqn"]),
        (["setup", "now"], ["now"]),
    ],
)
def test_what_does_not_exist_is_refused_before_any_setup(copy, arguments, words):
    error = refusal(copy.run(*arguments, status=2))
    assert all(word in error for word in words)
    assert copy.log() == []
    assert not copy.venv.exists()


def test_an_old_python_is_refused(copy):
    assert "3.11" in refusal(copy.run("setup", status=2, MINOR="10", PYTHON=str(copy.python)))
    # All of those that run.sh would try by itself are old.
    for name in ("python3.11", "python3.12", "python3.13"):
        shutil.copy(copy.python, copy.python.with_name(name))
    assert "no Python 3.11 or newer" in refusal(copy.run("setup", status=2, MINOR="10"))
    assert "nowhere" in refusal(copy.run("setup", status=2, PYTHON="/nowhere/python"))
    assert not copy.venv.exists()


@pytest.mark.parametrize("name", ["dqn", "dqn.py", "leanrl/dqn.py", "./leanrl/dqn.py"])
def test_train_sets_up_and_passes_the_flags_on(copy, name):
    out, _ = copy.run("train", name, "--seed", "3", "--env-id", "a b")
    assert out == f"ran: {copy.root}/leanrl/dqn.py --seed 3 --env-id a b\n"
    assert copy.log() == ["made", "pip"]


def test_setup_once_is_enough(copy):
    assert "setting up" in copy.run("setup")[1]
    assert copy.log() == ["made", "pip"]
    assert "setting up" not in copy.run("setup")[1]
    assert copy.run("train", "dqn")[1] == ""
    assert copy.log() == []
    # The dev requirements come on top, into the same .venv.
    assert copy.run("test", "-k", "x")[0] == "ran: -m pytest -k x\n"
    assert copy.log() == ["pip"]
    assert copy.run("test")[0] == "ran: -m pytest --numprocesses=logical --maxprocesses=4 --dist=loadfile\n"
    copy.run("setup")
    assert copy.log() == []


def test_an_atari_script_gets_envpool(copy):
    copy.run("setup")
    copy.log()
    assert "envpool requirements" in copy.run("train", "atari")[1]
    assert copy.log() == ["pip"]
    for command in (["train", "atari"], ["train", "dqn"], ["setup"]):
        copy.run(*command)
    assert copy.log() == []
    with (copy.root / "requirements" / "requirements-envpool.txt").open("a") as file:
        file.write("more\n")
    copy.run("train", "dqn")
    assert copy.log() == []
    copy.run("test")  # needs it, too
    copy.run("train", "atari")
    assert copy.log() == ["pip"]


def test_a_script_with_actors_gets_ray(copy):
    assert "ray requirements" in copy.run("train", "fleet")[1]
    copy.log()
    for command in (["train", "fleet"], ["train", "atari"]):  # it holds what that needs
        copy.run(*command)
    assert copy.log() == []


def test_bench_sets_up_and_passes_the_flags_on(copy):
    out, error = copy.run("bench", "--quick", "--output", "a b.json")
    assert (
        out == f"ran: {copy.root}/benchmarks/compare.py --quick --output a b.json\n" and "bench requirements" in error
    )
    assert copy.log() == ["made", "pip"]
    for command in (["bench"], ["train", "atari"], ["train", "dqn"]):  # it holds what these need
        copy.run(*command)
    assert copy.log() == []
    with (copy.root / "requirements" / "requirements-bench.txt").open("a") as file:
        file.write("more\n")
    copy.run("train", "atari")
    assert copy.log() == []
    copy.run("bench")
    assert copy.log() == ["pip"]


def test_changed_requirements_are_installed(copy):
    copy.run("test")
    copy.log()
    with (copy.root / "requirements" / "requirements-dev.txt").open("a") as file:
        file.write("more\n")
    copy.run("setup")
    assert copy.log() == []
    copy.run("test")
    assert copy.log() == ["pip"]
    with (copy.root / "requirements" / "constraints.txt").open("a") as file:
        file.write("more==1\n")
    copy.run("setup")
    assert copy.log() == ["pip"]


def test_another_python_makes_another_venv(copy):
    copy.run("setup")
    copy.log()
    copy.run("setup", MINOR="12")
    assert copy.log() == ["made", "pip"]


def test_a_failed_install_is_taken_up_again(copy):
    _, error = copy.run("train", "dqn", status=1, PIP_FAILS="yes")
    assert "broke off" in error
    copy.run("train", "dqn", status=1, PIP_FAILS="yes")
    copy.log()
    copy.run("train", "dqn")
    assert copy.log() == ["made", "pip"]
    copy.run("setup")
    assert copy.log() == []


def test_failing_dev_requirements_leave_the_scripts_usable(copy):
    copy.run("setup")
    copy.run("test", status=1, PIP_FAILS="yes")
    copy.log()
    copy.run("train", "dqn")
    assert copy.log() == []
    copy.run("test")
    assert copy.log() == ["made", "pip"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_install_is_taken_up_again(copy, number):
    process = copy.start("setup", PIP_WAITS="600")
    copy.wait_for_pip()
    os.killpg(process.pid, number)
    process.communicate(timeout=30)
    assert process.returncode != 0
    copy.log()
    copy.run("setup")
    assert copy.log() == ["made", "pip"]


def test_a_venv_without_anything_in_it_is_made_anew(copy):
    copy.venv.mkdir()
    (copy.venv / ".installing").touch()
    copy.run("setup")
    assert copy.log() == ["made", "pip"]


def test_a_venv_of_the_users_own_is_kept(copy):
    copy.venv.mkdir()
    (copy.venv / "mine").touch()
    _, error = copy.run("setup")
    assert "kept as" in error
    assert [path.name for path in copy.root.glob(".venv.old-*/*")] == ["mine"]
    assert copy.log() == ["made", "pip"]


@pytest.mark.skipif(shutil.which("flock") is None, reason="without flock(1) nothing keeps two run.sh apart")
def test_two_at_once_install_once(copy):
    processes = [copy.start("setup", PIP_WAITS="3") for _ in range(3)]
    for process in processes:
        out, error = process.communicate(timeout=60)
        assert process.returncode == 0, out + error
    assert copy.log() == ["made", "pip"]


@pytest.mark.skipif(shutil.which("flock") is None, reason="without flock(1) nothing keeps two run.sh apart")
def test_an_install_that_outlives_its_run_sh_is_waited_for(copy):
    process = copy.start("setup", PIP_WAITS="10")
    copy.wait_for_pip()
    process.kill()
    _, error = copy.run("setup")
    assert "waiting" in error
    assert copy.log() == ["made", "pip"]
    process.communicate(timeout=30)


def test_signals_reach_the_script(copy):
    copy.run("setup")
    with (copy.venv / "bin" / "python").open("w") as file:
        file.write(FAKE_PYTHON.replace('echo "ran: $*"', "echo $$; exec sleep 60"))
    process = copy.start("train", "dqn")
    assert int(process.stdout.readline()) == process.pid
    process.terminate()
    process.communicate(timeout=30)
    assert process.returncode == -signal.SIGTERM
