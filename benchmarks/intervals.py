"""Statistics of a few runs: the interquartile mean, the bootstrap's intervals, and an exact test of what differs."""

import math
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike


def interquartile_mean(values: ArrayLike, axis: int = 0) -> np.ndarray:
    """Mean of the middle half along an axis: without the lowest and the highest quarter, rounded down.

    Of fewer than four values that is their mean.
    """
    ordered = np.sort(np.asarray(values, float), axis)
    count = ordered.shape[axis]
    return ordered.take(range(count // 4, count - count // 4), axis).mean(axis)


def resampled(values: ArrayLike, statistic: Callable = np.mean, resamples: int = 10_000, seed: int = 0) -> np.ndarray:
    """`statistic(·, axis=1)` of values [N, ...] drawn N at a time with replacement: [resamples, ...]."""
    values = np.asarray(values, float)
    drawn = np.random.default_rng(seed).integers(len(values), size=(resamples, len(values)))
    return statistic(values[drawn], axis=1)


def bootstrap_interval(values: ArrayLike, statistic: Callable = np.mean, resamples: int = 10_000) -> np.ndarray:
    """95 % percentile interval [2, ...] of a statistic of values [N, ...], with a fixed seed.

    For the median of up to five values it is their range, which holds the true median with a chance of 94 % if there
    are five, but of 75 % if there are three: of fewer than five, call it the range.
    """
    return np.percentile(resampled(values, statistic, resamples), (2.5, 97.5), axis=0)


def rank_sum_p(values: Sequence[float], others: Sequence[float]) -> float:
    """Exact one-sided p-value of the rank-sum test that `values` are below `others`.

    It is the share, of all ways to divide the pooled values into two such parts, in which the ranks of the first part
    have a sum as low as they have. Equal values share their mean rank.
    """
    pooled = [*values, *others]
    ranks = [sum((x < y) * 2 + (x == y) for x in pooled) for y in pooled]  # twice the rank, and a constant
    ways = Counter({(0, 0): 1})  # to choose so many with that sum
    for rank in ranks:
        ways.update({(count + 1, total + rank): number for (count, total), number in ways.items()})
    chosen, limit = len(values), sum(ranks[: len(values)])
    as_low = sum(number for (count, total), number in ways.items() if count == chosen and total <= limit)
    return as_low / math.comb(len(pooled), chosen)


def holm(p_values: ArrayLike) -> np.ndarray:
    """Holm's correction of p-values [N]: taking those up to α for real is wrong anywhere with a chance of α at most."""
    p_values = np.asarray(p_values, float)
    order = np.argsort(p_values)
    corrected = np.empty_like(p_values)
    corrected[order] = np.maximum.accumulate(p_values[order] * np.arange(len(p_values), 0, -1))
    return np.minimum(corrected, 1).round(12)  # 3 × 1/60 is 0.05
