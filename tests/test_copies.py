"""A script without its part "Checks and recording": what README puts in its place makes the same run."""

import importlib
import importlib.util
import re
import sys

import pytest

import environments
import test_atari
from conftest import LEANRL
from pools import Counting
from test_run_files import SCRIPTS, small

README = (LEANRL.parent / "README.md").read_text()
RAY = ["impala_ray", "impala_ray_torchcompile", "appo_ray", "appo_ray_torchcompile"]


def flags_of(script):
    if script in RAY:
        return ["--total-timesteps", 320, "--num-envs", 2, "--fragment-length", 8, "--batch-fragments", 2]
    return test_atari.SMALL if script in test_atari.SCRIPTS else small(script, learning_starts=120)


@pytest.fixture
def copy_of(tmp_path, monkeypatch):
    """copy_of(script): its module, from a file that has README's lines in the place of that part."""

    def copy_of(script):
        source = (LEANRL / f"{script}.py").read_text()
        source, cuts = re.subn(r"^    track: .*?^    resume: .*?\n.*?\n", "", source, flags=re.M | re.S)
        assert cuts == 1  # fields that README says can go, too
        before, after = re.split(r"^# ---- Checks and recording.*?(?=^if __name__)", source, flags=re.M | re.S)
        (stand_in,) = re.findall(r"^## Copy the algorithm alone.*?^```python\n(.*?)^```", README, flags=re.M | re.S)
        path = tmp_path / f"{script}_copy.py"
        path.write_text(f"{before}{stand_in}\n\n{after}")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, path.stem, module)
        spec.loader.exec_module(module)
        return module

    return copy_of


@pytest.mark.parametrize("script", SCRIPTS + test_atari.SCRIPTS + RAY)
def test_a_copy_without_checks_and_recording_makes_the_same_run(script, launch, copy_of, monkeypatch, capsys):
    whole, copy = importlib.import_module(script), copy_of(script)
    env_id = "Counter"
    if script in test_atari.SCRIPTS:
        env_id = "Scripted-v5"
        for module in (whole, copy):
            monkeypatch.setattr(module, "make_pool", Counting)
            monkeypatch.setattr(module, "AtariActorCritic", test_atari.CoarseActorCritic)
    run = launch(script, *flags_of(script), "--seed", 3, env_id=env_id)
    assert len(run.episodes) > 5 and run.summary["updates"] > 0

    environments.Counter.forget()
    capsys.readouterr()
    copy.main(copy.Args(**{name: run.config[name] for name in copy.Args.__dataclass_fields__}))
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if not line.startswith("rollout:")]
    episodes = [(episode["global_step"], episode["return"]) for episode in run.episodes]
    assert [(int(step), float(total)) for step, total in lines] == episodes
