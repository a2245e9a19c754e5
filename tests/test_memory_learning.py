"""benchmarks/memory_learning.py: its plan, its short results, their table and picture."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "benchmarks"))

import learning  # noqa: E402
import memory_learning  # noqa: E402
import ppo_memory  # noqa: E402
import tables  # noqa: E402
from memory_learning import CELLS, SEEDS, TASKS  # noqa: E402


def a_result(task: str, cell: str, seed: int, reached: float) -> dict:
    arguments = {"env_id": TASKS[task].env_id, "cell": cell, "seed": seed}
    arguments["hide_velocities"] = "--hide-velocities" in TASKS[task].flags
    if TASKS[task].script == memory_learning.PPO:
        arguments["ent_coef"] = 0.03 if "--ent-coef 0.03" in TASKS[task].flags else 0.01
    (job,) = learning.jobs_of(memory_learning.plan(memory_learning.Args((task,), (cell,), (seed,))))
    arguments["total_timesteps"] = TASKS[task].steps
    # But for --env-id, --total-timesteps and --seed, which `jobs_of` adds
    changed = learning.changed_from_defaults(TASKS[task].script, learning.arguments_of(job["flags"][:-6]))
    versions = {"torch": "2.13.0", "python": "3.11.7"}
    about = {"device_name": "A Processor", "threads": 1, "versions": versions}
    about |= {"variant": "compile", "changed": changed, "arguments": arguments}
    return {"script": TASKS[task].script, "return_last_100": reached} | about


@pytest.fixture
def results(tmp_path):
    """Two seeds of two memories on three tasks."""
    folder = tmp_path / "benchmarks" / "results" / "memory"
    folder.mkdir(parents=True)
    for task in ("T-maze 10", "T-maze 100", "RepeatPrevious"):
        for cell, seed in (("none", 1), ("none", 2), ("lru", 1), ("lru", 2)):
            result = a_result(task, cell, seed, 0.5 + 0.1 * seed if cell == "none" else 1.0)
            (folder / f"{task}{cell}{seed}.json").write_text(json.dumps(result))
    return folder.parent


def test_the_plan_has_every_run_once(capsys):
    memory_learning.main(memory_learning.Args(cell=("lru",), dry_run=True, results=Path("nowhere")))
    lines = capsys.readouterr().out.splitlines()
    assert len(set(lines[1:])) == len(lines[1:]) == len(SEEDS) * len(TASKS)
    assert tuple(ppo_memory.CELLS) == CELLS and all(set(task.cells) <= set(CELLS) for task in TASKS.values())
    commands = [line.split() for line in lines[1:]]
    rollouts = [int(command[command.index("--num-steps") + 1]) for command in commands if "TMaze1000-v0" in command[-5]]
    assert rollouts and min(rollouts) > 1001, "a rollout holds what has to be remembered"


@pytest.mark.parametrize(
    "plot, message",
    [
        ("/no/such/folder/x.png", "/no/such/folder/x.png: must be a file in a folder that can be written to"),
        (".", ".: must be a file in a folder that can be written to"),
        ("memory.txt", "memory.txt: must be a PNG file"),
    ],
)
def test_a_picture_that_cannot_be_written(results, capsys, plot, message):
    with pytest.raises(SystemExit) as end:
        memory_learning.main(memory_learning.Args(plot=Path(plot), results=results / "memory"))
    assert end.value.code == 2 and capsys.readouterr().err == f"error: --plot {message}\n"


def test_one_task_and_cell(capsys):
    memory_learning.main(
        memory_learning.Args(task=("T-maze 30",), cell=("gru",), dry_run=True, results=Path("nowhere"))
    )
    lines = capsys.readouterr().out.splitlines()[1:]
    assert len(lines) == len(SEEDS) and all("--cell gru" in line and "TMaze30-v0" in line for line in lines)
    memory_learning.main(memory_learning.Args(seeds=(2,), dry_run=True, results=Path("nowhere")))
    assert all(line.endswith("--seed 2") for line in capsys.readouterr().out.splitlines()[1:])


@pytest.mark.parametrize(("flag", "value"), [("task", "T-maze 7"), ("cell", "elman")])
def test_unknown_names(capsys, flag, value):
    with pytest.raises(SystemExit) as error:
        memory_learning.main(memory_learning.Args(**{flag: (value,)}))
    (line,) = capsys.readouterr().err.splitlines()
    assert error.value.code == 2 and f"--{flag} {value}" in line


@pytest.mark.parametrize("seeds", [(), (-1,), (1, 2**32)])
def test_seeds_that_no_run_can_have(capsys, seeds):
    with pytest.raises(SystemExit) as error:
        memory_learning.main(memory_learning.Args(seeds=seeds, dry_run=True))
    out, err = capsys.readouterr()
    assert error.value.code == 2 and out == "" and err.startswith("error: --seeds ") and err.count("\n") == 1


def test_means_over_episodes():
    episodes = {
        "global_step": [*range(10, 110, 10)],
        "return": [*map(float, range(10))],
        "terminated": 5 * [True, False],
    }
    means = learning.averaged(episodes, 5)
    assert means == {"global_step": [20, 40, 60, 80, 100], "return": [0.5, 2.5, 4.5, 6.5, 8.5], "terminated": 5 * [0.5]}
    assert learning.averaged(episodes, 3)["global_step"] == [30, 70, 100]
    assert learning.averaged(episodes, 50)["return"] == episodes["return"], "no more points than episodes"


def test_the_table(results):
    table = tables.memory_table(results)
    assert "| T-maze 10 | 100,000 | 0.5 | 1 | 0.65 ± 0.07 | 1.00 ± 0.00 |" in table
    assert "`none` | `lru` |" in table and "CartPole" not in table
    assert "From the 12 files" in table and "2 seeds" in table and "A Processor" in table
    assert tables.memory_table(results.parent) == "No results yet: `python benchmarks/memory_learning.py` makes them."


def test_tasks_of_one_environment_stay_apart(tmp_path):
    reached = {"CartPole without velocities": 400.0, "MiniGrid-MemoryS7": 0.5, "MiniGrid-MemoryS7, more entropy": 0.9}
    for number, (task, value) in enumerate(reached.items()):
        (tmp_path / f"{number}.json").write_text(json.dumps(a_result(task, "lru", 1, value)))
    assert memory_learning.returns(tmp_path) == {(task, "lru"): [value] for task, value in reached.items()}


@pytest.mark.parametrize(
    "part, change", [("arguments", {"total_timesteps": 1000}), ("changed", {"learning_rate": 1.0})]
)
def test_a_run_of_another_kind_does_not_count_as_a_seed(results, capsys, part, change):
    result = a_result("T-maze 10", "lru", 9, 0.0)
    (results / "memory" / "other.json").write_text(json.dumps(result | {part: result[part] | change}))
    with pytest.raises(SystemExit) as error:
        tables.memory_table(results)
    assert error.value.code == 2
    assert "other.json is of a run that is not in the plan" in capsys.readouterr().err


def test_the_picture(results, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    memory_learning.main(memory_learning.Args(plot=tmp_path / "memory.png", results=results / "memory"))
    assert (tmp_path / "memory.png").stat().st_size > 20_000
    with pytest.raises(SystemExit):
        memory_learning.main(memory_learning.Args(plot=tmp_path / "memory.png", results=tmp_path))
