r"""The weak prior on the temperature and the pooling coefficient, which decides where few validation data do not.

Logits that are always right would be sharpened without limit, and a handful of errors may favour pooling by chance. Both numbers
therefore have a half-normal prior that is highest at the plain ensemble,

.. math:: -\log p(T, c) = \frac12 \Big(\frac{\min(0, \log T)}{0.5}\Big)^2 + \frac12 \Big(\frac{1 - c}{0.5}\Big)^2 .

A choice on n independent validation data minimises the mean log loss minus :math:`\log p / n`. The prior has no effect at
:math:`T \ge 1` and c = 1, and hardly any with thousands of data.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

SCALE = 0.5
"""Standard deviation of `log T` below T = 1, and of c below 1."""


def negative_log_prior(log_temperature: ArrayLike, pooling: ArrayLike = 1.0) -> np.ndarray:
    """Return `-log p(T, c)` up to a constant, of the broadcast shape of both arguments."""
    sharpening = np.minimum(log_temperature, 0) / SCALE
    departure = (1 - np.asarray(pooling)) / SCALE
    return np.asarray((sharpening**2 + departure**2) / 2)
