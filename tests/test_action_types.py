"""Actions reach an environment in the type of its space and within its bounds; those of PPO's policy fill its range.

Observations that are a Dict of Boxes, as dm_control's are, reach the agent as one vector.
"""

import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch

import environments
import ppo_memory
import test_run_files
from ppo_continuous_action import ActionRange

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))
import evaluate

SIZES = ["--total-timesteps", 320, "--num-envs", 2, "--fragment-length", 8, "--batch-fragments", 2]
DISCRETE = ["dqn", "dqn_memory", "ppo", "ppo_memory", "impala_ray", "appo_ray"]
SCRIPTS = ["sac_continuous_action", "td3_continuous_action", "ppo_continuous_action", "ppo_memory", "appo_ray"]
VECTORS = [*SCRIPTS[:3], "appo_ray", "appo_ray Discrete", "dqn", "ppo", "impala_ray"]


class Typed(gym.Env):
    """Episodes of seven steps, each of which asserts that its action is of the space and of its type."""

    def __init__(self, dtype, low=(-2, 0.25), high=(0.5, 1)):
        self.observation_space = gym.spaces.Box(-1, 1, (3,))
        if dtype.kind == "i":
            self.action_space = gym.spaces.Discrete(3, dtype=dtype)
            return
        self.action_space = gym.spaces.Box(np.array(low, dtype), np.array(high, dtype), dtype=dtype)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.np_random.uniform(-1, 1, 3).astype(np.float32), {}

    def step(self, action):
        assert self.action_space.contains(action) and action.dtype == self.action_space.dtype, repr(action)
        assert (abs(action) < 10).all(), "the policy's actions are of this size"
        self.t += 1
        return self.np_random.uniform(-1, 1, 3).astype(np.float32), float(action.sum()), False, self.t == 7, {}


for name in ("float16", "float32", "float64", "int32", "int64"):
    gym.register(f"Typed{name}-v0", Typed, kwargs={"dtype": np.dtype(name)})
NARROW = {"low": (-2, 0, 4), "high": (2, 0, 4)}
for name in ("float16", "float32", "float64"):
    gym.register(f"Typednarrow{name}-v0", Typed, kwargs={"dtype": np.dtype(name), **NARROW})
ENDLESS = {"low": (-np.inf, -1e10, 0, -np.inf), "high": (np.inf, 1e10, np.inf, 1)}
gym.register("Typedendless-v0", Typed, kwargs={"dtype": np.dtype("float32"), **ENDLESS})


@pytest.mark.parametrize("name", ["float16", "float32", "float64"])
@pytest.mark.parametrize("script", [script + end for script in SCRIPTS for end in ("", "_torchcompile")])
def test_actions_have_the_type_of_their_space(launch, script, name):
    check(launch, script, name)


@pytest.mark.parametrize("script", [script + end for script in SCRIPTS[2:] for end in ("", "_torchcompile")])
def test_ranges_without_an_end(launch, script):
    """PPO's policy fills none of them."""
    check(launch, script, "endless")


def test_a_memory_sees_what_was_taken_of_ranges_without_an_end():
    envs = ppo_memory.Environments(ppo_memory.Args(env_id="Typedendless-v0", num_envs=2))
    envs.begin(0)
    envs.step(np.float32([[2.5, -3, -0.8, 4], [0.5, 7, 1.5, -2]]))
    previous = envs.inputs[:, 3:7]  # after the observation
    np.testing.assert_array_equal(previous, np.float32([[2.5, -3, 0, 1], [0.5, 7, 1.5, -2]]))


@pytest.mark.parametrize("name", ["float16", "float32", "float64"])
def test_a_memory_sees_zero_of_ranges_without_a_width(name):
    args = ppo_memory.Args(env_id=f"Typednarrow{name}-v0", num_envs=2)
    envs = ppo_memory.Environments(args)
    envs.begin(0)
    envs.step(np.float32([[0.5, 3, -2], [-7, 0, 0.25]]))
    np.testing.assert_array_equal(envs.inputs[:, 3:6], np.float32([[0.5, 0, 0], [-1, 0, 0]]))


@pytest.mark.parametrize("name", ["int32", "int64"])
@pytest.mark.parametrize("script", [script + end for script in DISCRETE for end in ("", "_torchcompile")])
def test_discrete_actions_have_the_type_of_their_space(launch, script, name):
    check(launch, script, name)


def check(launch, script, name):
    sizes = SIZES if script.startswith(("appo", "impala")) else test_run_files.small(script)
    run = launch(script, *sizes, env_id=f"Typed{name}-v0")
    assert run.summary["status"] == "finished" and len(run.episodes) > 20 and run.summary["updates"] > 0
    evaluate.main(evaluate.Args((run.folder,), episodes=1))
    assert (run.folder / "eval.jsonl").read_text().count("\n") == 1


@pytest.mark.parametrize("end", ["", "_torchcompile"])
@pytest.mark.parametrize("script", VECTORS)
def test_a_dict_of_boxes_is_one_vector(launch, tmp_path, script, end):
    """The run is the one with these vectors, loss by loss; its agent can be scored and exported."""
    name, _, kind = script.partition(" ")
    kind, sizes = kind or environments.kind_of(name), SIZES if "ray" in name else test_run_files.small(name)
    runs = [launch(name + end, *sizes, env_id=f"{env_id}{kind}-v0") for env_id in ("InParts", "Counter")]
    for run in runs:
        for line in run.metrics:
            del line["wall_time"], line["fps"]
    assert runs[0].summary["updates"] > 0 and runs[0].episodes == runs[1].episodes
    assert runs[0].metrics == runs[1].metrics
    evaluate.main(evaluate.Args((runs[0].folder,), episodes=1, export=tmp_path / "policy.pt2"))
    assert (tmp_path / "policy.pt2").exists()


@pytest.mark.parametrize("name", ["float32", "float64"])
def test_range_of_a_policy_in_units_of_half_the_space_s(name):
    low = np.array([-1, 10, -0.01, 4, *ENDLESS["low"]], name)
    high = np.array([1, 20, 0.01, 4, *ENDLESS["high"]], name)
    space = gym.spaces.Box(low, high, dtype=name)
    rows = np.float32([[0] * 8, [1] * 8, [-1] * 8, [0.5] * 8, [7] * 8, [-7] * 8, [0.3] * 8])
    taken = ActionRange(space)(rows)
    middle = np.array([0, 15, 0, 4], name)
    expected = np.stack([middle, high[:4], low[:4], (middle + high[:4]) / 2, high[:4], low[:4], middle])
    expected[-1] += np.float32(0.3) * (high[:4] - middle)
    expected = np.concatenate([expected, rows[:, 4:].clip(low[4:], high[4:])], 1)
    np.testing.assert_allclose(taken, expected, rtol=1e-6)
    assert taken.dtype == name and all(space.contains(row) for row in taken)
    np.testing.assert_array_equal(taken[:, 0], rows[:, 0].clip(-1, 1), "where the range is [-1, 1], only clipped")
    np.testing.assert_array_equal(taken, evaluate.Range(space)(torch.as_tensor(rows)).numpy())
