"""The replay ring, checked against a plain list of transitions."""

import importlib
import io
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch

import agents
import dqn_torchcompile
import environments
from dqn_torchcompile import ReplayRing

CPU = torch.device("cpu")


def args_of(capacity, num_envs=1, batch_size=1, train_frequency=1):
    """What a buffer looks at; a block of transitions is as long as `train_frequency`, or a step of all environments."""
    return SimpleNamespace(
        buffer_size=capacity, total_timesteps=10**9, num_envs=num_envs, batch_size=batch_size,
        train_frequency=train_frequency, seed=0,
    )  # fmt: skip


def fake_env(discrete=False, dtype=np.float64, observation_dim=3, limit=None, reset_dtype=None):
    actions = gym.spaces.Discrete(5) if discrete else gym.spaces.Box(-1, 1, (2,))
    observations = gym.spaces.Box(0, 255, (observation_dim,), dtype)
    reset = lambda seed: (np.zeros(observation_dim, reset_dtype or dtype), {})  # noqa: E731
    return SimpleNamespace(
        observation_space=observations, action_space=actions, spec=SimpleNamespace(max_episode_steps=limit), reset=reset
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


def assert_holds(ring, happened, numbers):
    """The transitions of these numbers are in the ring as they happened."""
    batch = {
        name: value.tolist() for name, value in ring.gather(torch.tensor(sorted(numbers), dtype=torch.long)).items()
    }
    for row, number in enumerate(sorted(numbers)):
        before, action, reward, terminated, _, after = happened[number]
        assert batch["observation"][row] == before.tolist()
        assert batch["action"][row] == action.tolist()
        assert batch["reward"][row] == reward
        assert batch["terminated"][row] == float(terminated)
        if not terminated:  # nothing is bootstrapped from a terminated episode
            assert batch["next_observation"][row] == after.tolist()


def step_all(ring, stream, happened):
    """One step of every environment, staged."""
    for i in range(stream.num_envs):
        transition, _ = stream.step(i)
        happened.append(transition)
        before, action, reward, terminated, truncated, after = transition
        ring.add(before, after, action, reward, terminated, truncated)


def sent(ring):
    """How many transitions the device knows of."""
    return ring.incoming.view(torch.int32)[-1, -1].item()


def draw(ring, newest):
    """Numbers drawn for the time when `newest` transitions are written."""
    coming = newest - sent(ring)
    ages = ring.draw(coming)
    ring.pick(ages, coming)
    assert torch.equal(ring.drawn, newest - 1 - ages) and ages.min() >= 0
    return ring.drawn.flatten().clone()


def oldest_held(ring, happened):
    """The number of the oldest transition that may be drawn, when all that were staged are sent."""
    return max(len(happened) - ring.capacity, ring.oldest)


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("discrete", [False, True])
@pytest.mark.parametrize(
    "lengths, limit, capacity",
    [
        ([(3, "terminated"), (7, "terminated and truncated")], None, 20),
        ([(100, "truncated")], 1000, 200),
        ([(10, "truncated")], None, 200),
        ([(5, "truncated")], 5, 20),
        (MIXED, 100, 20),
    ],
)
def test_ring_holds_every_transition_that_happened_through_wraps_and_resets(
    num_envs, discrete, lengths, limit, capacity
):
    stream, happened = Stream(num_envs, lengths, discrete), []
    ring = ReplayRing(args_of(capacity, num_envs, 200 * capacity), fake_env(discrete, limit=limit), CPU)
    for _ in range(3 * capacity):
        step_all(ring, stream, happened)
        ring.upload()
        ring.write()
        assert sent(ring) == len(happened)
        first = oldest_held(ring, happened)
        # Of the mixed episodes two in five are truncated, and take 17 slots for 15 transitions
        assert first <= max(len(happened) - (capacity if lengths != MIXED else 15), 0), "none is missing"
        assert set(draw(ring, len(happened)).tolist()) == set(range(first, len(happened))), "nor sampled too long"
        assert_holds(ring, happened, range(first, len(happened)))


@pytest.mark.parametrize("separate", [False, True], ids=["one memory", "host and device"])
@pytest.mark.parametrize("lengths", [[(1, "truncated")], MIXED])
@pytest.mark.parametrize("num_envs, rows, capacity", [(1, 7, 20), (1, 12, 20), (3, 9, 20), (1, 12, 5), (3, 9, 4)])
def test_ring_written_in_blocks_that_are_sometimes_half_filled(
    monkeypatch, num_envs, rows, capacity, lengths, separate
):
    """Transitions are drawn a block before they are gathered, some of them before they have happened."""
    if separate:
        monkeypatch.setattr(dqn_torchcompile, "mirrored", agents.as_on_a_gpu)
    stream, happened = Stream(num_envs, lengths), []
    ring = ReplayRing(args_of(capacity, num_envs, 500, train_frequency=rows), fake_env(), CPU)
    assert len(ring.staged) == rows
    sizes = [num_envs * (1 + block * 5 % (rows // num_envs)) for block in range(41)]
    for size in sizes:
        drawn, written = set(draw(ring, len(happened) + size).tolist()), len(happened)
        assert max(drawn) >= written, "some are still to come"
        for _ in range(size // num_envs):
            step_all(ring, stream, happened)
        assert_holds(ring, happened, {number for number in drawn if number < written})  # while the block is staged
        ring.upload()
        for _ in range(2):  # the second time nothing is new
            ring.write()
        assert sent(ring) == len(happened)
        assert_holds(ring, happened, range(oldest_held(ring, happened), len(happened)))
        assert_holds(ring, happened, drawn)


@pytest.mark.parametrize("separate", [False, True], ids=["one memory", "host and device"])
@pytest.mark.parametrize("lengths", [[(1, "truncated")], MIXED, [(2, "truncated"), (1, "terminated")]])
@pytest.mark.parametrize("num_envs, capacity", [(1, 1), (1, 5), (1, 20), (2, 3), (2, 20), (3, 4), (3, 15), (3, 150)])
def test_what_was_drawn_a_step_ahead_is_there_before_and_after_the_step(
    monkeypatch, num_envs, capacity, lengths, separate
):
    """As SAC and TD3 draw: for the step after the next, when two more steps of transitions will be there."""
    if separate:
        monkeypatch.setattr(dqn_torchcompile, "mirrored", agents.as_on_a_gpu)
    stream, happened = Stream(num_envs, lengths), []
    ring = ReplayRing(args_of(capacity, num_envs, 500), fake_env(), CPU)
    coming = ring.draw(coming=num_envs)
    for _ in range(120):
        ring.pick(coming, coming=num_envs)
        coming = ring.draw(coming=2 * num_envs)
        drawn = set(ring.drawn.flatten().tolist())
        assert_holds(ring, happened, {number for number in drawn if number < len(happened)})
        step_all(ring, stream, happened)
        ring.upload()
        ring.write()
        assert_holds(ring, happened, drawn)


def as_saved(ring):
    """What is loaded from a checkpoint of this ring."""
    file = io.BytesIO()
    torch.save(ring.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("grows", [False, True], ids=["same capacity", "more room"])
@pytest.mark.parametrize("num_envs, steps, capacity", [(1, 13, 20), (3, 4, 20), (1, 50, 20), (3, 17, 20), (3, 12, 40)])
def test_ring_goes_on_from_a_checkpoint_with_every_transition_as_it_happened(num_envs, steps, capacity, grows):
    """All environments begin new episodes there; no transition may lead from the old one into the new one."""
    arguments = args_of(10**6 if grows else capacity, num_envs, 2000, train_frequency=4 * num_envs)
    arguments.total_timesteps = steps * num_envs if grows else 10**9
    stream, happened, ring = Stream(num_envs, MIXED), [], ReplayRing(arguments, fake_env(), CPU)
    for _ in range(steps):
        step_all(ring, stream, happened)
        if ring.filled == len(ring.staged):  # the last block is staged in part
            ring.upload()
            ring.write()
    first, state = oldest_held(ring, happened), as_saved(ring)
    assert sum(rows.nbytes for rows in state.values() if isinstance(rows, torch.Tensor)) <= ring.saved_nbytes
    arguments.total_timesteps += 1000
    ring = ReplayRing(arguments, fake_env(), CPU)
    ring.load_state_dict(state)
    stream.episode, stream.t = [episode + 1 for episode in stream.episode], [0] * num_envs
    for _ in range(30):
        assert sent(ring) == ring.added == len(happened)
        first = max(first, len(happened) - ring.capacity)
        assert ring.oldest <= first or (not grows and ring.oldest < len(happened) - 10)
        first = oldest_held(ring, happened)
        assert_holds(ring, happened, range(first, len(happened)))
        assert set(draw(ring, len(happened)).tolist()) == set(range(first, len(happened)))
        step_all(ring, stream, happened)
        ring.upload()
        ring.write()


@pytest.mark.parametrize("separate", [False, True], ids=["one memory", "host and device"])
@pytest.mark.parametrize("grows", [False, True], ids=["same capacity", "more room"])
@pytest.mark.parametrize("length", [2, 50])
@pytest.mark.parametrize("num_envs, capacity", [(1, 300), (4, 1000), (4, 30)])
def test_ring_that_is_resumed_again_and_again(monkeypatch, num_envs, capacity, length, grows, separate):
    """Each resume ends the episodes as if by truncation, and what was drawn before a step is gathered after it."""
    if separate:
        monkeypatch.setattr(dqn_torchcompile, "mirrored", agents.as_on_a_gpu)
    arguments, stream, happened = args_of(capacity, num_envs, 2000), Stream(num_envs, [(length, "truncated")]), []
    if grows:
        arguments.buffer_size, arguments.total_timesteps = 10**5, 203 * num_envs
    ring = ReplayRing(arguments, fake_env(), CPU, batches=num_envs)
    for cycle in range(16):
        for _ in range(203 if cycle == 0 else 3):
            drawn = set(draw(ring, len(happened) + num_envs).tolist())
            step_all(ring, stream, happened)
            ring.upload()
            ring.write()
            assert_holds(ring, happened, drawn)
        state = as_saved(ring)
        arguments.total_timesteps += 3 * num_envs * grows
        ring = ReplayRing(arguments, fake_env(), CPU, batches=num_envs)
        ring.load_state_dict(state)
        assert ring.added == len(happened) and ring.oldest <= len(happened) - min(capacity, 400) // 3
        stream.episode, stream.t = [episode + 1 for episode in stream.episode], [0] * num_envs
        assert_holds(ring, happened, range(oldest_held(ring, happened), len(happened)))


def test_a_row_is_not_touched_before_it_was_sent(monkeypatch):
    """A save in the middle of a run comes when the device may still have to fetch the last rows."""

    class Event:
        def record(self):
            self.is_reached = False

        def synchronize(self):
            self.is_reached = True

    ring = ReplayRing(args_of(20), fake_env(), CPU)
    ring.sent = Event()
    ring.sent.synchronize()
    ring.add(np.ones(3), np.ones(3), np.ones(2), 1.0, False, False)
    ring.upload()
    before = ring.staged.clone().view(torch.int32)
    ring.state_dict()
    assert ring.sent.is_reached or torch.equal(ring.staged.view(torch.int32), before)
    ring.add(np.ones(3), np.ones(3), np.ones(2), 2.0, False, False)
    assert ring.sent.is_reached


def test_ring_copies_what_it_is_given():
    """Environments may hand out the same array at each step."""
    ring, observation, action = ReplayRing(args_of(20), fake_env(), CPU), np.ones(3), np.ones(2)
    for n in range(3):
        observation[:], action[:] = n, n
        ring.add(observation, observation, action, n, False, False)
        observation[:], action[:] = -1, -1
        ring.upload()
        ring.write()
    batch = ring.gather(torch.arange(3))
    assert batch["observation"][:, 0].tolist() == batch["action"][:, 0].tolist() == [0, 1, 2]


def test_ring_of_observations_without_a_number():
    ring = ReplayRing(args_of(20), fake_env(observation_dim=0), CPU)
    for n in range(3):
        ring.add(np.ones(0), np.ones(0), np.ones(2), n, False, False)
        ring.upload()
        ring.write()
    batch = ring.gather(torch.arange(3))
    assert batch["observation"].shape == (3, 0) and batch["reward"].tolist() == [0, 1, 2]


def test_draws_are_uniform_and_reach_the_transitions_that_are_still_to_come():
    stream, ring = Stream(2, [(5, "terminated")]), ReplayRing(args_of(10, 2, 50_000), fake_env(), CPU, batches=2)
    assert ring.drawn.shape == (2, 50_000)
    for _ in range(18):
        step_all(ring, stream, [])
        ring.upload()
    torch.manual_seed(0)
    counts = torch.bincount(draw(ring, 38) - 28, minlength=10)
    assert len(counts) == 10
    assert (counts - 10_000).abs().max() < 500  # five standard deviations


def test_batches_drawn_at_once_are_sampled_in_turn():
    stream, ring, happened = Stream(3, MIXED), ReplayRing(args_of(20, 3, 8), fake_env(), CPU, batches=3), []
    for _ in range(7):
        step_all(ring, stream, happened)
        ring.upload()
        ring.write()
    for turns in (2, 3):
        draw(ring, 21)
        for turn in range(turns):
            rewards = [happened[number][2] for number in ring.drawn[turn].tolist()]
            batch = ring.sample()
            assert batch["reward"].tolist() == rewards
            assert {value.dtype for value in batch.values()} == {torch.float32}
    assert len(set(map(tuple, ring.drawn.tolist()))) == 3


def test_ring_memory_is_one_observation_a_transition():
    env = gym.make("CartPole-v1")
    ring = ReplayRing(args_of(10_000, batch_size=128, train_frequency=10), env, CPU)
    assert ring.nbytes < 10_000 * (4 * 4 + 4 + 4 + 8) * 1.015
    images = fake_env(discrete=True, dtype=np.uint8, observation_dim=128, limit=1000)
    ring = ReplayRing(args_of(10_000, batch_size=128), images, CPU)
    assert ring.storage["observation"].dtype == torch.uint8
    assert ring.nbytes < 10_000 * (128 + 4 + 4 + 8) * 1.015


@pytest.mark.parametrize("reset_dtype, dtype", [(np.uint8, torch.uint8), (np.float64, torch.float32)])
def test_bytes_are_kept_as_bytes_if_the_environment_really_returns_them(reset_dtype, dtype):
    ring = ReplayRing(args_of(20), fake_env(dtype=np.uint8, reset_dtype=reset_dtype), CPU)
    assert ring.storage["observation"].dtype == dtype


@pytest.mark.parametrize("algorithm", ["sac_continuous_action", "td3_continuous_action", "dqn"])
@pytest.mark.parametrize("version", ["", "_torchcompile"])
def test_the_script_stores_every_transition_as_it_happened(launch, monkeypatch, algorithm, version):
    script, stored = algorithm + version, []
    ring_class = importlib.import_module(script).ReplayRing
    add = ring_class.add

    def noting(ring, *transition):
        stored.append([np.array(value) for value in transition])
        add(ring, *transition)

    monkeypatch.setattr(ring_class, "add", noting)
    flags = [
        "--total-timesteps",
        120,
        "--learning-starts",
        100,
        "--buffer-size",
        60,
        "--batch-size",
        8,
        "--num-envs",
        2,
    ]
    run = launch(script, *flags)
    for number, env in enumerate(run.made):
        episode = t = 0
        for (before, after, action, reward, *ends), taken in zip(stored[number::2], env.actions, strict=True):
            assert np.array_equal(before, environments.observation_of(env.key, episode, t))
            assert np.array_equal(after, environments.observation_of(env.key, episode, t + 1))
            assert np.array_equal(action, taken) and reward == environments.reward_of(env.key, episode, t, taken)
            t += 1
            ending = environments.ending_of(env.key, episode) if t == environments.length_of(env.key, episode) else None
            assert ends == [ending in ("terminated", "both"), ending in ("truncated", "both")]
            episode, t = (episode + 1, 0) if ending else (episode, t)
        assert episode > 5
