"""The memory tasks of benchmarks/: what they show, ask and pay; the card games also beside the package `popgym`."""

import functools
import importlib
import itertools
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode

sys.path.append(str(Path(__file__).parent.parent))

from benchmarks import cards, tmaze

# Cards of an episode, answers to choose from, answers that are paid
GAMES = {
    "RepeatFirstEasy": (52, 4, 51),
    "RepeatFirstMedium": (416, 4, 415),
    "RepeatFirstHard": (832, 4, 831),
    "RepeatPreviousEasy": (52, 4, 48),
    "RepeatPrevious10": (52, 4, 42),
    "RepeatPreviousMedium": (104, 4, 72),
    "RepeatPreviousHard": (156, 4, 92),
    "CountRecallEasy": (52, 27, 51),
    "CountRecallMedium": (104, 27, 103),
    "CountRecallHard": (208, 17, 207),
}
TASKS = [*(f"cards:{name}-v0" for name in GAMES), "tmaze:TMaze-v0", "tmaze:TMaze30-v0"]

each_game = pytest.mark.parametrize("name", GAMES)
each_task = pytest.mark.parametrize("task", TASKS)


def make_vec(task, num_envs, **options):
    return gym.make_vec(f"benchmarks.{task}", num_envs=num_envs, **options)


def actions_for(envs, steps, seed=0):
    """Random actions, [steps, N]."""
    return np.random.default_rng(seed).integers(envs.single_action_space.n, size=(steps, envs.num_envs))


def play(envs, actions, seed=None):
    """What a reset and the actions return: arrays of [steps + 1, N, ...], the first rewards and ends being zeros."""
    observation, _ = envs.reset(seed=seed)
    nothing = np.zeros(envs.num_envs)
    rows = [(observation, nothing, nothing, nothing), *(envs.step(action)[:4] for action in actions)]
    return [np.stack(column) for column in zip(*rows)]


def play_until_over(envs, seed=None):
    """The rewards of action 0 in a new episode, [steps, N]."""
    envs.reset(seed=seed)
    rewards, is_over = [], False
    while not is_over:
        _, reward, terminated, _, _ = envs.step(np.zeros(envs.num_envs, int))
        rewards.append(reward)
        is_over = terminated.all()
    return np.stack(rewards)


# ---- All tasks ----
@each_task
def test_single_form_passes_gymnasiums_checks(task):
    check_env(gym.make(f"benchmarks.{task}").unwrapped, skip_render_check=True)


@each_task
def test_vector_form_stays_in_its_spaces_and_resets_at_the_next_step(task):
    envs = make_vec(task, 3)
    assert envs.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
    assert type(envs).__name__.startswith("Vector") and envs.num_envs == 3
    observation, _ = envs.reset(seed=1)
    assert observation in envs.observation_space
    ended, was_over = 0, np.zeros(3, bool)
    for action in actions_for(envs, 1700):
        observation, reward, terminated, truncated, info = envs.step(action)
        assert observation in envs.observation_space and action in envs.action_space and info == {}
        assert (reward.dtype, terminated.dtype, truncated.dtype) == (np.float64, bool, bool)
        assert reward.shape == terminated.shape == truncated.shape == (3,)
        assert not truncated.any() and not (reward[was_over].any() or terminated[was_over].any())
        was_over = terminated
        ended += terminated.sum()
    assert ended >= 6


@each_task
def test_seed_decides_all_episodes(task):
    actions = actions_for(make_vec(task, 4), 900)
    first, again, other = (play(make_vec(task, 4), actions, seed) for seed in (5, 5, 6))
    for array, same in zip(first, again):
        np.testing.assert_array_equal(array, same)
    assert not np.array_equal(first[1], other[1])
    envs = make_vec(task, 4)
    play(envs, actions[:7], seed=3)
    np.testing.assert_array_equal(play(envs, actions, seed=5)[0], first[0])  # a reset amid an episode, too


@each_task
def test_environments_and_episodes_differ(task):
    """What can be told apart by the rewards of one and the same action."""
    envs = make_vec(task, 40)
    steps = len(play_until_over(envs, seed=2))
    rewards = np.stack([play_until_over(envs) for _ in range(6)])
    assert rewards.shape == (6, steps, 40)
    assert len(np.unique(rewards[0], axis=1).T) > 1
    assert len(np.unique(rewards, axis=0)) > 1


@each_task
def test_what_is_given_out_may_be_overwritten(task):
    actions = actions_for(make_vec(task, 2), 900)
    envs, untouched = make_vec(task, 2), make_vec(task, 2)
    pair = envs.reset(seed=0)[:1], untouched.reset(seed=0)[:1]
    for action in actions:
        for mine, other in zip(*pair):
            np.testing.assert_array_equal(mine, other)
            mine[:] = 1
        pair = envs.step(action)[:4], untouched.step(action)[:4]


@each_task
def test_single_form_agrees_with_a_vector_of_one(task):
    single, vector = gym.make(f"benchmarks.{task}"), make_vec(task, 1)
    actions = actions_for(vector, 500)
    observations, rewards, terminated, _ = play(vector, actions, seed=9)
    row, (observation, _) = 0, single.reset(seed=9)
    while row < 500:
        np.testing.assert_array_equal(observations[row, 0], observation)
        observation, reward, is_over, is_cut, _ = single.step(int(actions[row, 0]))
        row += 1
        assert (reward, is_over, is_cut) == (rewards[row, 0], terminated[row, 0], False)
        if is_over:
            np.testing.assert_array_equal(observations[row, 0], observation)
            row, (observation, _) = row + 1, single.reset()


@pytest.mark.parametrize(
    "task, nearest",
    [("tmaze:TMaze17-v0", "TMaze"), ("cards:RepeatFirst-v0", "RepeatFirst"), ("cards:CountRecall10-v0", "CountRecall")],
)
def test_unknown_id_is_gymnasiums_error(task, nearest):
    with pytest.raises(gym.error.UnregisteredEnv, match=nearest):
        make_vec(task, 2)


@pytest.mark.parametrize(
    "task, options",
    [
        ("tmaze:TMaze-v0", {"length": 0}),
        ("cards:RepeatPreviousEasy-v0", {"k": 0}),
        ("cards:RepeatPreviousEasy-v0", {"k": 52}),
        ("cards:CountRecallEasy-v0", {"kinds": 3}),
    ],
)
def test_options_out_of_range_are_refused(task, options):
    (value,) = options.values()
    for make in (functools.partial(make_vec, task, 2), functools.partial(gym.make, f"benchmarks.{task}")):
        with pytest.raises(ValueError, match=rf"must be .*not {value}"):
            make(**options)


# ---- T-maze ----
def by_hand(goals, length, actions):
    """Observations, rewards and ends of a maze whose episodes have these goals, row by row."""
    corridor, junction, *cues = np.eye(4)
    goals, rows, actions = iter(goals), [], iter(actions)
    while True:
        goal = next(goals)
        rows.append((cues[goal], 0, False))
        for here in [corridor] * (length - 1) + [junction]:
            if next(actions, None) is None:
                return rows
            rows.append((here, 0, False))
        choice = next(actions, None)
        if choice is None:
            return rows
        rows.append((junction, int(choice == goal), True))
        if next(actions, None) is None:  # the step that only resets
            return rows


@pytest.mark.parametrize("length", [1, 2, 10, 37])
def test_mazes_agree_with_one_drawn_by_hand(length, monkeypatch):
    envs = make_vec("tmaze:TMaze-v0", 5, length=length)
    reset, goals = tmaze.VectorTMaze.reset, []

    def noting(self, **options):
        result = reset(self, **options)
        goals.append(self.goal.copy())
        return result

    monkeypatch.setattr(tmaze.VectorTMaze, "reset", noting)
    actions = actions_for(envs, 200)
    observations, rewards, terminated, _ = play(envs, actions, seed=4)
    for i in range(5):
        expected = by_hand([goal[i] for goal in goals], length, actions[:, i])
        for array, column in zip((observations, rewards, terminated), zip(*expected), strict=True):
            np.testing.assert_array_equal(array[:, i], np.stack(column))


@pytest.mark.parametrize("length", tmaze.LENGTHS)
def test_length_of_a_maze_is_in_its_id(length):
    envs = make_vec(f"tmaze:TMaze{length}-v0", 200)
    cue, _ = envs.reset(seed=0)
    assert 60 < cue[:, 3].sum() < 140
    for _ in range(length):
        observation, reward, terminated, _, _ = envs.step(np.zeros(200, int))
        assert not reward.any() and not terminated.any()
    assert (observation == tmaze.JUNCTION).all()
    _, reward, terminated, _, _ = envs.step(cue.argmax(1) - 2)
    assert terminated.all() and (reward == 1).all()


def test_maze_pays_nothing_for_the_wrong_side():
    envs = make_vec("tmaze:TMaze-v0", 50)
    cue, _ = envs.reset(seed=0)
    rewards = [envs.step(3 - cue.argmax(1))[1] for _ in range(11)]
    assert not np.any(rewards)


# ---- Card games ----
def answer_by_hand(name, shown):
    """The right answer when these observations have been made, or None if none is asked for."""
    if name.startswith("RepeatFirst"):
        return shown[0]
    if name.startswith("RepeatPrevious"):
        k = {"Easy": 4, "10": 10, "Medium": 32, "Hard": 64}[name.removeprefix("RepeatPrevious")]
        return shown[-k] if len(shown) >= k else None
    asked = shown[-1][1]
    return sum(dealt == asked for dealt, _ in shown)


@each_game
def test_cards_pay_as_counted_by_hand(name):
    """A perfect player gets 1, its opposite -1, and a random one what is expected."""
    count, answers, paid = GAMES[name]
    envs = make_vec(f"cards:{name}-v0", 60)
    rng, totals = np.random.default_rng(0), np.zeros(60)
    assert envs.single_action_space.n == answers
    shown = [envs.reset(seed=3)[0].tolist()]
    for step in range(count - 1):
        right = [answer_by_hand(name, [row[i] for row in shown]) for i in range(60)]
        action = np.array([rng.integers(answers) if answer is None else answer for answer in right])
        action[20:40] = (action[20:40] + 1) % answers
        action[40:] = rng.integers(answers, size=20)
        observation, reward, terminated, _, _ = envs.step(action)
        shown.append(observation.tolist())
        for i, answer in enumerate(right):
            assert reward[i] == (0 if answer is None else (1 if action[i] == answer else -1) / paid)
        assert (terminated == (step == count - 2)).all()
        totals += reward
    np.testing.assert_allclose(totals[:20], 1, rtol=1e-12)
    np.testing.assert_allclose(totals[20:40], -1, rtol=1e-12)
    chance = 1 / answers
    deviation = 2 * np.sqrt(chance * (1 - chance) / paid / 20)
    assert abs(totals[40:].mean() - (2 * chance - 1)) < 4 * deviation


@each_game
def test_each_episode_deals_the_whole_deck(name):
    envs, count = make_vec(f"cards:{name}-v0", 3), GAMES[name][0]
    observations, *_ = play(envs, np.zeros((count - 1, 3), int), seed=0)
    kinds = {"CountRecallMedium": 4, "CountRecallHard": 13}.get(name, 2 if "Count" in name else 4)
    columns = observations.reshape(count, -1)  # of CountRecall the cards dealt and the cards asked for
    for column in columns.T:
        assert np.bincount(column).tolist() == [count // kinds] * kinds


def test_kinds_are_those_of_decks_of_52():
    numbers = np.arange(104)
    for deck in (numbers[:52], numbers[52:]):
        pairs = {(int(suit), int(rank)) for suit, rank in zip(cards.kind(deck, 4), cards.kind(deck, 13))}
        assert pairs == set(itertools.product(range(4), range(13)))
        assert (cards.kind(deck, 2) == cards.kind(deck, 4) % 2).all()


@each_game
def test_shuffles_are_uniform(name):
    """The first card, and the last, is of each suit equally often."""
    envs = make_vec(f"cards:{name}-v0", 2000).unwrapped
    envs.reset(seed=0)
    order = envs.shuffle()
    assert (np.sort(order, axis=0) == np.arange(envs.cards)[:, None]).all()
    for row in (order[0], order[-1]):
        counts = np.bincount(row % 4, minlength=4)
        assert abs(counts - 500).max() < 5 * np.sqrt(2000 * 0.25 * 0.75)


# ---- Beside the package ----
@each_game
def test_cards_agree_with_popgym(name, monkeypatch):
    """From the same decks, dealt from their other end: the same observations, rewards and ends over three episodes."""
    pytest.importorskip("popgym")
    if name == "RepeatPrevious10":
        game = importlib.import_module("popgym.envs.repeat_previous").RepeatPrevious
        theirs = gym.vector.SyncVectorEnv([functools.partial(game, k=10)] * 3)
    else:
        theirs = gym.make_vec(f"popgym-{name}-v0", num_envs=3, disable_env_checker=True)
    ours = make_vec(f"cards:{name}-v0", 3)
    assert (ours.single_observation_space, ours.single_action_space) == (
        theirs.single_observation_space,
        theirs.single_action_space,
    )
    assert (ours.observation_space, ours.action_space) == (theirs.observation_space, theirs.action_space)

    decks = []
    monkeypatch.setattr(ours, "shuffle", lambda: decks.pop(0))

    def hand_over_decks():
        for deck in ("value_deck", "query_deck") if name.startswith("Count") else ("deck",):
            decks.append(np.stack([getattr(env.unwrapped, deck).idx[::-1] for env in theirs.envs], 1))

    expected, _ = theirs.reset(seed=[11, 12, 13])
    hand_over_decks()
    observation, _ = ours.reset(seed=0)
    episodes = 0
    for action in actions_for(ours, 3 * (GAMES[name][0] + 1)):
        np.testing.assert_array_equal(observation, expected)
        assert observation.dtype == expected.dtype
        if episodes % 2:  # so that right answers are seen, too
            answers = ours.answers[ours.turn]
            action = np.where(answers == cards.NOT_ASKED, action, answers)
        expected, *their_step, _ = theirs.step(action)
        if not decks and ours.turn == ours.cards - 1:
            hand_over_decks()
        observation, *our_step, _ = ours.step(action)
        for array, other in zip(our_step, their_step, strict=True):
            np.testing.assert_array_equal(array, other)
            assert array.dtype == other.dtype
        episodes += our_step[1][0]
    assert episodes == 3
