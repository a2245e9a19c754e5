"""The replay ring of the compiled scripts and the eager buffer, checked against a plain list of transitions."""

from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch

from dqn import ReplayBuffer
from dqn_torchcompile import ReplayRing

CPU = torch.device("cpu")


def fake_env(limit, discrete=False, dtype=np.float64, observation_dim=3):
    actions = gym.spaces.Discrete(5) if discrete else gym.spaces.Box(-1, 1, (2,))
    observations = gym.spaces.Box(0, 255, (observation_dim,), dtype)
    return SimpleNamespace(
        observation_space=observations, action_space=actions, spec=SimpleNamespace(max_episode_steps=limit)
    )


class Stream:
    """Scripted environments: episodes of unequal lengths that end by termination, truncation or both."""

    def __init__(self, num_envs, lengths, discrete=False):
        self.num_envs, self.lengths, self.discrete = num_envs, lengths, discrete
        self.episode, self.t, self.clock = [0] * num_envs, [0] * num_envs, 0

    def observation(self, i):
        return np.array([i, self.episode[i], self.t[i]], dtype=np.float32)

    def step(self, i):
        """(observation, action, reward, terminated, truncated, next observation), and the newest observation."""
        before = self.observation(i)
        self.clock += 1
        action = np.int64(self.clock % 5) if self.discrete else np.array([self.clock, -self.clock], np.float32)
        length, kind = self.lengths[(self.episode[i] + i) % len(self.lengths)]
        self.t[i] += 1
        after, ended = self.observation(i), self.t[i] == length
        if ended:
            self.episode[i], self.t[i] = self.episode[i] + 1, 0
        terminated, truncated = ended and "terminated" in kind, ended and "truncated" in kind
        return (before, action, float(self.clock), terminated, truncated, after), self.observation(i)


MIXED = [(3, "terminated"), (5, "truncated"), (1, "truncated"), (4, "terminated and truncated"), (2, "terminated")]


def assert_holds(ring, happened, first):
    """Every transition from number `first` on is in the ring as it happened."""
    numbers = torch.arange(first, len(happened))
    batch = ring.gather(numbers)
    for row, number in enumerate(numbers.tolist()):
        before, action, reward, terminated, _, after = happened[number]
        assert batch["observation"][row].tolist() == before.tolist()
        assert batch["action"][row].tolist() == action.tolist()
        assert batch["reward"][row].item() == reward
        assert batch["terminated"][row].item() == float(terminated)
        if not terminated:  # nothing is bootstrapped from a terminated episode
            assert batch["next_observation"][row].tolist() == after.tolist()


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("discrete", [False, True])
@pytest.mark.parametrize("limit", [None, 5])
def test_ring_holds_every_transition_that_happened_through_wraps_and_resets(num_envs, discrete, limit):
    lengths = MIXED if limit is None else [(3, "terminated"), (5, "truncated"), (5, "terminated and truncated")]
    stream, ring = Stream(num_envs, lengths, discrete), None
    ring = ReplayRing(20, fake_env(limit, discrete), num_envs, num_envs, CPU)
    ring.start(np.stack([stream.observation(i) for i in range(num_envs)]))
    happened = []
    for _ in range(60):
        for i in range(num_envs):
            transition, newest = stream.step(i)
            happened.append(transition)
            _, action, reward, terminated, truncated, after = transition
            ring.add(i, newest, action, reward, terminated, after if truncated and not terminated else None)
        ring.upload()
        ring.write()
        assert ring.written.item() == len(happened)
        numbers = ring.draw((4000,), ahead=0)
        first = max(len(happened) - 20, 0)
        assert set(numbers.tolist()) == set(range(first, len(happened))), "none is missing, none is sampled too long"
        assert_holds(ring, happened, first)


@pytest.mark.parametrize("limit", [None, 50])  # with the latter fewer copies than truncations
@pytest.mark.parametrize("rows", [7, 12])
def test_ring_written_in_blocks_that_are_sometimes_half_filled(rows, limit):
    stream, ring, happened = Stream(1, MIXED), ReplayRing(20, fake_env(limit), 1, rows, CPU), []
    ring.start(np.stack([stream.observation(0)]))
    for block in range(40):
        drawn_before = ring.draw((500,), ahead=1 + block * 5 % rows)
        for row in range(1 + block * 5 % rows):
            transition, newest = stream.step(0)
            happened.append(transition)
            _, action, reward, terminated, truncated, after = transition
            ring.add(row, newest, action, reward, terminated, after if truncated and not terminated else None)
        for number in set(drawn_before[drawn_before < ring.written].tolist()):  # gathered while the block is staged
            assert_holds(ring, happened[: number + 1], number)
        ring.upload()
        for _ in range(2):  # the second time nothing is new
            ring.write()
        assert ring.written.item() == len(happened)
        assert_holds(ring, happened, max(ring.oldest.item(), len(happened) - 20))
        for number in set(drawn_before.tolist()):  # gathered after it
            assert_holds(ring, happened[: number + 1], number)


def test_ring_drops_transitions_rather_than_bootstrap_from_a_wrong_observation():
    """An environment that truncates far earlier than its declared limit leaves fewer copies than truncations."""
    stream, ring, happened = (
        Stream(1, [(1, "truncated"), (2, "truncated")]),
        ReplayRing(20, fake_env(50), 1, 1, CPU),
        [],
    )
    ring.start(np.stack([stream.observation(0)]))
    for _ in range(100):
        transition, newest = stream.step(0)
        happened.append(transition)
        _, action, reward, terminated, truncated, after = transition
        drawn_before = ring.draw((500,), ahead=1)
        ring.add(0, newest, action, reward, terminated, after if truncated else None)
        ring.upload()
        ring.write()
        assert_holds(ring, happened, max(ring.oldest.item(), len(happened) - 20))
        assert ring.written.item() > ring.oldest.item()
        for number in set(drawn_before.tolist()):  # drawn before the step, gathered after it
            assert_holds(ring, happened[: number + 1], number)


def test_draws_are_uniform_and_reach_the_transitions_that_are_still_to_come():
    ring = ReplayRing(10, fake_env(None), 2, 2, CPU)
    ring.written.fill_(37)
    torch.manual_seed(0)
    counts = torch.bincount(ring.draw((100_000,), ahead=2) - 29, minlength=10)
    assert len(counts) == 10
    assert (counts - 10_000).abs().max() < 500  # five standard deviations


def test_ring_memory_is_one_observation_a_transition():
    env = gym.make("CartPole-v1")
    ring = ReplayRing(10_000, env, 1, 10, CPU)
    assert ring.nbytes < 10_000 * (4 * 4 + 4 + 4 + 1 + 4) * 1.01
    ring = ReplayRing(10_000, fake_env(1000, discrete=True, dtype=np.uint8, observation_dim=128), 1, 1, CPU)
    assert ring.observations.dtype == torch.uint8
    assert ring.nbytes < 10_000 * (128 + 4 + 4 + 1 + 4) * 1.01


def test_buffer_holds_the_last_transitions_and_samples_all_of_them():
    buffer, stream, happened = ReplayBuffer(20, fake_env(None), CPU), Stream(1, MIXED), []
    for _ in range(53):
        (before, action, reward, terminated, truncated, after), _ = stream.step(0)
        happened.append((before, action, reward, terminated, truncated, after))
        buffer.add(before, after, action, reward, terminated)
        batch = buffer.sample(400)
        assert {value.dtype for value in batch.values()} == {torch.float32}
        assert set(batch["reward"].tolist()) == {row[2] for row in happened[-20:]}
        for row in range(400):
            before, action, reward, terminated, _, after = happened[int(batch["reward"][row].item()) - 1]
            assert batch["observation"][row].tolist() == before.tolist()
            assert batch["next_observation"][row].tolist() == after.tolist()
            assert batch["action"][row].tolist() == action.tolist()
            assert batch["terminated"][row].item() == float(terminated)
