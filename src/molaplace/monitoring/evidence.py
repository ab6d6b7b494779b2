r"""Evidence against a null hypothesis, which may be read after every input: capital that grows only if the hypothesis is false.

Let :math:`f_b(x_t)` be the factors by which bets b = 1 ... B multiply their stakes, non-negative and with a mean of at most 1 given the
past if the hypothesis is true. A stake that enters bet b at time s is worth :math:`\prod_{i=s}^t f_b(x_i)` at time t. With weights
:math:`w_s` that sum to at most 1, the capital

.. math:: M_t = \Big(1 - \sum_{s \le t} w_s\Big) + \frac1B \sum_b \sum_{s \le t} w_s \prod_{i=s}^t f_b(x_i)

starts at 1 and is a non-negative supermartingale: every stake is one, and what has not entered yet is kept. So, by Ville's inequality,

.. math:: P\Big(\sup_t M_t \ge 1 / \alpha\Big) \le \alpha,

over the whole life of the stream. After a change at time s, the capital is at least :math:`w_s / B` times that of the best bet from s
on.

*When bets begin.* A stake that begins with the stream has lost almost everything when a change comes after a long calm, and no bound
that holds for all time can begin anew for free: the weights are the price. A stake may begin at every multiple of 1, 8, 64, 512 and
4,096 inputs; the k-th start of each grid has the weight :math:`\frac15 (1 / \log_2 (k + 1) - 1 / \log_2 (k + 2))`, which telescopes to
a sum of 1/5 and decays almost as slowly as possible. Large changes are seen by stakes that begin at once, and small changes, whose
evidence takes thousands of inputs anyway, by the cheaper stakes of a coarse grid.

All sums over s obey :math:`S_t = (S_{t-1} + w_t) f(x_t)`, so the memory is B numbers. For each bet, the time of change is estimated by
maximum likelihood: the start s that maximises :math:`\prod_{i=s}^t f_b(x_i)` (Page, 1954).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from molaplace.monitoring.ranks import Array

GRIDS = np.array([1, 8, 64, 512, 4096])
"""Distances between the starts of stakes."""


def start_weights(first: int, count: int) -> Array:
    """Return the weights (count,) of the stakes that begin at positions `first`, `first + 1`, ..., counted from 0."""
    positions = np.arange(first, first + count)[:, None]
    number = positions // GRIDS + 1.0
    # 1 / log2(k + 1) - 1 / log2(k + 2) without cancellation
    shares = np.log1p(1 / (number + 1)) / np.log(2) / (np.log2(number + 1) * np.log2(number + 2))
    return np.where(positions % GRIDS == 0, shares, 0).mean(1)


def unspent(positions: Array) -> Array:
    """Return the share of the capital that has not begun to bet, after the starts at positions 0 ... t have been made."""
    return (1 / np.log2(positions[:, None] // GRIDS + 3.0)).mean(1)


@dataclass(frozen=True)
class Evidence:
    """The capital of B bets, and when the change that it indicates began."""

    log_stakes: Array
    """Logarithm (B,) of each bet's stakes, relative to 1/B of the capital."""
    log_gains: Array
    """Logarithm (B,) of each bet's largest gain since any start."""
    starts: Array
    """Position (B,) at which each of these gains began."""
    count: int = 0
    """Number of observations."""
    log_value: float = 0.0
    """Logarithm of the capital."""
    log_peak: float = 0.0
    """Logarithm of the largest capital so far."""
    began: int = 0
    """Position at which the change began, as estimated when the capital was largest."""
    leader: int = 0
    """Index of the bet that owned most of the capital then."""

    @classmethod
    def none(cls, bets: int) -> Evidence:
        """Return the evidence before any observation."""
        return cls(np.full(bets, -np.inf), np.full(bets, -np.inf), np.zeros(bets, dtype=np.int64))

    def add(self, log_factors: Array) -> Evidence:
        """Return the evidence after further observations, given the logarithms (B, n) of the bets' factors, in order."""
        bets, count = log_factors.shape
        if count == 0:
            return self
        after = np.cumsum(log_factors, axis=1)
        before = np.concatenate([np.zeros((bets, 1)), after[:, :-1]], axis=1)
        with np.errstate(divide="ignore"):
            entered = np.log(start_weights(self.count, count)) - before
        stakes = np.logaddexp.accumulate(np.concatenate([self.log_stakes[:, None], entered], axis=1), axis=1)[:, 1:]
        stakes += after
        largest = np.maximum(stakes.max(0), 0)
        mixed = np.exp(stakes - largest).mean(0) + unspent(self.count + np.arange(count)) * np.exp(-largest)
        log_values = largest + np.log(mixed)
        gains, starts = self._gains(before, after, count - 1)
        peak = int(log_values.argmax())
        log_peak, began, leader = self.log_peak, self.began, self.leader
        if log_values[peak] > log_peak:
            log_peak = float(log_values[peak])
            leader = int(stakes[:, peak].argmax())
            began = int(self._gains(before, after, peak)[1][leader])
        value = float(log_values[-1])
        return Evidence(stakes[:, -1], gains, starts, self.count + count, value, log_peak, began, leader)

    def _gains(self, before: Array, after: Array, last: int) -> tuple[Array, Array]:
        # Return the largest log gain (B,) up to the observation `last` of this batch, and its start: either a start in this batch,
        # with the smallest sum before it, or the earlier start whose gain was carried over.
        indices = before[:, : last + 1].argmin(1)
        smallest = np.take_along_axis(before, indices[:, None], axis=1)[:, 0]
        carried = -self.log_gains <= smallest
        gains = after[:, last] - np.where(carried, -self.log_gains, smallest)
        return gains, np.where(carried, self.starts, self.count + indices)
