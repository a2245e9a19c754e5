"""Statistics of a few runs: the interquartile mean, and what the bootstrap says of a statistic's uncertainty."""

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike


def interquartile_mean(values: ArrayLike, axis: int = 0) -> np.ndarray:
    """Mean of the middle half along an axis: without the lowest and the highest quarter, rounded down."""
    ordered = np.sort(np.asarray(values, float), axis)
    count = ordered.shape[axis]
    return ordered.take(range(count // 4, count - count // 4), axis).mean(axis)


def resampled(values: ArrayLike, statistic: Callable = np.mean, resamples: int = 10_000, seed: int = 0) -> np.ndarray:
    """`statistic(·, axis=1)` of values [N, ...] drawn N at a time with replacement: [resamples, ...]."""
    values = np.asarray(values, float)
    drawn = np.random.default_rng(seed).integers(len(values), size=(resamples, len(values)))
    return statistic(values[drawn], axis=1)


def bootstrap_interval(values: ArrayLike, statistic: Callable = np.mean, resamples: int = 10_000) -> np.ndarray:
    """95 % percentile interval [2, ...] of a statistic of values [N, ...], with a fixed seed."""
    return np.percentile(resampled(values, statistic, resamples), (2.5, 97.5), axis=0)


def ratio_interval(values: ArrayLike, others: ArrayLike, statistic: Callable = np.median) -> np.ndarray:
    """95 % percentile interval [2] of the statistic of `values` over that of `others`, which are independent."""
    return np.percentile(resampled(values, statistic) / resampled(others, statistic, seed=1), (2.5, 97.5))
