"""POPGym's card games RepeatFirst, RepeatPrevious and CountRecall, many tables at a time (Morad et al. 2023).

    python leanrl/ppo_memory.py --env-id benchmarks.cards:RepeatPreviousEasy-v0 --cell lru

The tasks of https://arxiv.org/abs/2303.01859 as the package `popgym` 1.0.7 has them (decks, rewards, lengths, spaces),
but without a step of Python for each table.

A card is dealt at each step until the decks are empty, and the agent answers a question: a right answer pays 1/n and a
wrong one -1/n, where n answers are paid in an episode. The best return is 1; guessing one of m answers gets 2/m - 1.

    game            what is asked                               decks     steps          answers
    RepeatFirst     suit of the first card of the episode       1, 8, 16  51, 415, 831   4
    RepeatPrevious  suit of the card of k - 1 steps before;     1, 2, 3   51, 103, 155   4
                    k = 4, 32, 64; unpaid until there is one
    CountRecall     how many cards of a colour, suit or rank    1, 2, 4   51, 103, 207   27, 27, 17
                    (shown with the card) have been dealt

Ids are the game's name with Easy-v0, Medium-v0 and Hard-v0, in the table from left to right. RepeatPrevious10-v0, which
the package has not, is the easy one with k = 10.

An agent that has its previous answer among its inputs could do RepeatFirst without another memory: by repeating itself.
"""

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Discrete, MultiDiscrete
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

COLOURS, SUITS, RANKS = 2, 4, 13
DECK = SUITS * RANKS
NOT_ASKED = -1


def kind(cards: np.ndarray, kinds: int) -> np.ndarray:
    """The colour, suit or rank of cards by their numbers, in which ranks are sorted; any shape."""
    return cards // SUITS % RANKS if kinds == RANKS else cards % kinds


class VectorCards(gym.vector.VectorEnv):
    """Tables side by side. All episodes are of one length, so that one `turn` counts for all.

    A game has its two `single_…_space`s and `play`, which shuffles and returns an episode's observations,
    [cards, N, ...], and the right answers or NOT_ASKED, [cards, N].
    """

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012, as gym.vector.VectorEnv has it

    def __init__(self, num_envs: int, decks: int):
        self.num_envs, self.cards = num_envs, DECK * decks
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def shuffle(self) -> np.ndarray:
        """The numbers of the cards in the order in which they will be dealt, [cards, N]."""
        return self.np_random.permuted(np.tile(np.arange(self.cards)[:, None], self.num_envs), axis=0)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observations, self.answers = self.play()
        # The last card comes with the end of the episode, so that nothing is asked of it
        self.reward = 1 / np.count_nonzero(self.answers[:-1, 0] != NOT_ASKED)
        self.turn = 0
        return self.observations[0], {}

    def step(self, actions):
        reward, terminated, truncated = np.zeros(self.num_envs), *np.zeros((2, self.num_envs), bool)
        if self.turn == self.cards - 1:
            observation, _ = self.reset()
            return observation, reward, terminated, truncated, {}
        answer = self.answers[self.turn]
        if answer[0] != NOT_ASKED:
            reward = np.where(actions == answer, self.reward, -self.reward)
        self.turn += 1
        if self.turn == self.cards - 1:
            terminated = ~terminated
        return self.observations[self.turn], reward, terminated, truncated, {}


class VectorRepeatFirst(VectorCards):
    single_observation_space = single_action_space = Discrete(SUITS)

    def __init__(self, num_envs: int = 1, decks: int = 1):
        super().__init__(num_envs, decks)

    def play(self):
        suits = kind(self.shuffle(), SUITS)
        return suits, np.tile(suits[0], (self.cards, 1))


class VectorRepeatPrevious(VectorCards):
    single_observation_space = single_action_space = Discrete(SUITS)

    def __init__(self, num_envs: int = 1, decks: int = 1, k: int = 4):
        if not 1 <= k < DECK * decks:
            raise ValueError(f"k must be at least 1 and below the {DECK * decks} cards, not {k}")
        super().__init__(num_envs, decks)
        self.k = k

    def play(self):
        suits = kind(self.shuffle(), SUITS)
        return suits, np.concatenate([np.full_like(suits[: self.k - 1], NOT_ASKED), suits[: self.cards - self.k + 1]])


class VectorCountRecall(VectorCards):
    """Observations are the kinds of the card dealt and of the card asked for, [N, 2]."""

    def __init__(self, num_envs: int = 1, decks: int = 1, kinds: int = COLOURS):
        if kinds not in (COLOURS, SUITS, RANKS):
            raise ValueError(f"kinds must be {COLOURS} (colours), {SUITS} (suits) or {RANKS} (ranks), not {kinds}")
        self.kinds = kinds
        self.single_observation_space = MultiDiscrete([kinds, kinds])
        self.single_action_space = Discrete(DECK * decks // kinds + 1)
        super().__init__(num_envs, decks)

    def play(self):
        dealt, asked = kind(self.shuffle(), self.kinds), kind(self.shuffle(), self.kinds)
        counts = np.cumsum(dealt[..., None] == np.arange(self.kinds), axis=0)  # [cards, N, kinds]
        return np.stack([dealt, asked], -1), np.take_along_axis(counts, asked[..., None], -1)[..., 0]


class Cards(gym.Env):
    """The only table of `game`."""

    game: type[VectorCards]

    def __init__(self, **options):
        self.tables = self.game(1, **options)
        self.observation_space = self.tables.single_observation_space
        self.action_space = self.tables.single_action_space

    def scalar_or_vector(self, observations):
        return int(observations[0]) if isinstance(self.observation_space, Discrete) else observations[0]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        observations, info = self.tables.reset(seed=seed)
        return self.scalar_or_vector(observations), info

    def step(self, action):
        observations, reward, terminated, truncated, info = self.tables.step(np.array([action]))
        return self.scalar_or_vector(observations), float(reward[0]), bool(terminated[0]), bool(truncated[0]), info


class RepeatFirst(Cards):
    game = VectorRepeatFirst


class RepeatPrevious(Cards):
    game = VectorRepeatPrevious


class CountRecall(Cards):
    game = VectorCountRecall


for name, options in {
    "RepeatFirstEasy": {"decks": 1},
    "RepeatFirstMedium": {"decks": 8},
    "RepeatFirstHard": {"decks": 16},
    "RepeatPreviousEasy": {"decks": 1, "k": 4},
    "RepeatPrevious10": {"decks": 1, "k": 10},
    "RepeatPreviousMedium": {"decks": 2, "k": 32},
    "RepeatPreviousHard": {"decks": 3, "k": 64},
    "CountRecallEasy": {"decks": 1, "kinds": COLOURS},
    "CountRecallMedium": {"decks": 2, "kinds": SUITS},
    "CountRecallHard": {"decks": 4, "kinds": RANKS},
}.items():
    game = next(game for game in (RepeatFirst, RepeatPrevious, CountRecall) if name.startswith(game.__name__))
    entry_points = (f"{__name__}:{game.__name__}", f"{__name__}:{game.game.__name__}")
    gym.register(f"{name}-v0", entry_points[0], vector_entry_point=entry_points[1], kwargs=options)
