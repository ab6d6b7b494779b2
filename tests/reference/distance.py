"""Distances and cooling by their formulas: numpy, one datum and one class at a time.

It knows nothing of the library: it is given features without the constant 1, and labels.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Array = np.ndarray
RIDGE = 1e-4
"""Of the covariance within classes, in its Frobenius norms."""


def direction(features: Array) -> Array:
    length = np.sqrt(sum(float(value) ** 2 for value in features))
    return features / length if length > 0 else np.zeros_like(features)


def class_means(features: Array, labels: Array) -> dict[int, Array]:
    """Mean direction of each class that has data."""
    return {
        int(label): np.mean([direction(row) for row in features[labels == label]], axis=0)
        for label in np.unique(labels)
    }


def covariance(features: Array, labels: Array) -> Array:
    """Of directions within classes, with its ridge."""
    means = class_means(features, labels)
    total = np.zeros((features.shape[1],) * 2)
    for row, label in zip(features, labels, strict=True):
        away = direction(row) - means[int(label)]
        total += np.outer(away, away)
    total /= len(features)
    return total + RIDGE * np.sqrt((total**2).sum()) * np.eye(len(total))


def distances(features: Array, labels: Array, queries: Array) -> Array:
    """Distance of each row asked for to the nearest class of the training features."""
    means = class_means(features, labels)
    inverse = np.linalg.inv(covariance(features, labels))
    actual = []
    for row in queries:
        away = [direction(row) - mean for mean in means.values()]
        actual.append(min(np.sqrt(offset @ inverse @ offset) for offset in away))
    return np.array(actual)


def divisors(
    distance: Sequence[Array],
    length: Sequence[Array],
    usual: Sequence[tuple[float, float]],
    weights: Sequence[float],
    temperature: float,
    exponent: float,
    onset: float = 1.0,
) -> list[Array]:
    """What the logits of each network are divided by, datum by datum."""
    networks = range(len(distance))
    actual = [np.zeros(len(distance[0])) for _ in networks]
    for n in range(len(distance[0])):
        rho = max(1.0, np.prod([(distance[k][n] / usual[k][0]) ** weights[k] for k in networks]) / onset)
        for k in networks:
            nu = max(1.0, length[k][n] / usual[k][1])
            actual[k][n] = temperature * (rho**exponent * nu**2 if exponent > 0 else 1.0)
    return actual
