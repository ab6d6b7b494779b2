r"""Ranks of scores among all scores so far, as independent uniform numbers, in bounded memory.

Let :math:`b_1, b_2, \dots` be the bins of the scores: the scores of the validation data first, then those of the stream. The smoothed
conformal p-value of score i is

.. math:: p_i = \frac{\#\{j < i : b_j > b_i\} + U_i\, \#\{j \le i : b_j = b_i\}}{i}, \qquad U_i \sim \mathrm{Uniform}(0, 1).

*If the scores are exchangeable, these p-values are independent and uniform* (Vovk et al., 2005, theorem 8.1). Given the multiset of the
first i bins, the last of them is equally likely to be any element, so :math:`p_i` is uniform; and since this holds for every order of
the first i - 1 scores, which determines all earlier p-values, :math:`p_i` is independent of them. The bins do not depend on any data,
so the bins of exchangeable scores are exchangeable: binning costs resolution, but no validity. The validation data enter only as a
multiset, so they need no order.

*Ranks in a fixed validation set would not do.* Their p-values are exchangeable, but not independent: given the n validation scores,
they are independent draws from a distribution whose probabilities of the n + 1 gaps between these scores are not 1/(n + 1) but follow a
Dirichlet distribution, so it is not uniform (almost surely). A bet g with mean 1 under the uniform distribution has, given the
validation data, a mean :math:`1 + \delta` with :math:`\delta` of order :math:`1 / \sqrt n`. If :math:`\delta > 0`, the bets :math:`1 +
a (g - 1)` with a small a > 0 have the mean log growth :math:`a \delta + O(a^2) > 0` for each input, and their capital grows
exponentially, without any change in the data. A long enough stream therefore raises an alarm in the end. Here the ranks use all earlier
scores, and the stream itself corrects the errors of the validation set.

A bin is the upper bits of a 32-bit float, whose order as an integer is that of the floats: two scores share a bin only if they differ
by less than 1 part in :math:`2^9`. There are at most :math:`2^{18}` bins, of which a stream occupies a few thousand.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from molaplace.errors import DataError

Array = np.ndarray[Any, Any]

BITS = 18
"""Number of bits of a bin: the sign, the exponent and 9 bits of the fraction."""

BLOCK = 256
"""Number of scores that are compared with each other directly."""


def bins_of(scores: Array) -> Array:
    """Return the bins (n,) of scores (n,), as integers in the order of the scores."""
    with np.errstate(over="ignore"):
        floats = np.asarray(scores, dtype=np.float32)
    integers = floats.view(np.int32)
    # Among negative floats, the integers of larger magnitudes are larger; flipping all bits but the sign reverses their order.
    ordered = np.where(integers < 0, integers ^ np.int32(0x7FFFFFFF), integers)
    return np.right_shift(np.where(floats == 0, np.int32(0), ordered), 32 - BITS)


def uniform_draws(seed: int, first: int, count: int) -> Array:
    """Return the draws (count,) for the inputs at positions `first`, `first + 1`, ...; each depends only on its position."""
    return np.random.Generator(np.random.PCG64(seed).advance(first)).random(count)


@dataclass(frozen=True)
class ScoreCounts:
    """The number of scores in each occupied bin."""

    bins: Array = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    """Occupied bins in increasing order."""
    counts: Array = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Number of scores in each of them."""

    def __len__(self) -> int:
        return int(self.counts.sum())

    def add(self, scores: Array, draws: Array) -> tuple[ScoreCounts, Array]:
        """Return the counts with further scores (n,), and their p-values (n,), given uniform draws (n,) for the ties.

        A small p-value means that few earlier scores are as high.
        """
        if np.isnan(scores).any():
            raise DataError(f"expected outlier scores that are numbers; {int(np.isnan(scores).sum())} of them are NaN.")
        bins = bins_of(scores)
        first, last = (np.searchsorted(self.bins, bins, side) for side in ("left", "right"))
        fresh = np.unique(bins[first == last])
        places = np.searchsorted(self.bins, fresh)
        occupied = np.insert(self.bins, places, fresh)
        counts = np.insert(self.counts, places, 0)
        columns = np.searchsorted(occupied, bins)
        p_values = np.empty(len(bins))
        for start in range(0, len(bins), BLOCK):
            block = columns[start : start + BLOCK]
            earlier = np.tri(len(block), k=-1, dtype=bool)
            from_here = counts[::-1].cumsum()[::-1]
            above = from_here[block] - counts[block] + ((block > block[:, None]) & earlier).sum(1)
            equal = counts[block] + ((block == block[:, None]) & earlier).sum(1) + 1
            number = from_here[0] + 1 + np.arange(len(block))
            part = slice(start, start + len(block))
            p_values[part] = (above + draws[part] * equal) / number
            counts += np.bincount(block, minlength=len(counts))
        return ScoreCounts(occupied, counts), p_values
