"""One comparison for all tests of numbers computed in two ways.

float32 sums depend on the order of their terms, which the processor, the number of threads and the batch size decide. Errors are
therefore proportional to the largest value of a quantity, and a small value next to a large one may have no correct digit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

TOLERANCES = {
    "float32": 1e-5,  # probabilities, logits, entropies, distances: two paths, batch sizes, processes, files or exports
    "difference": 1e-4,  # outlier scores and epistemic shares, which are differences of larger float32 values
    "float64": 1e-10,  # exact laws
    "search": 1e-6,  # results of an iterative search in float64, which ends where the objective is flat
    "draws": 0.3,  # means of a few random draws
}
"""Largest error of each kind, as a share of the largest expected magnitude."""


def assert_close(
    actual: Any, expected: Any, kind: str = "float32", *, scale: float | None = None, name: str = "value"
) -> None:
    """Compare numbers, tensors, arrays, nested lists or mappings of them, relative to the largest expected magnitude.

    `scale` replaces that magnitude, for a value that is a small part of a larger quantity. Shapes, keys, infinities and NaN must
    be equal.
    """
    if isinstance(expected, Mapping):
        assert actual.keys() == expected.keys(), (
            f"{name}: keys differ: {sorted(actual.keys() ^ expected.keys(), key=str)}"
        )
        for key in expected:
            assert_close(actual[key], expected[key], kind, scale=scale, name=f"{name}[{key!r}]")
        return
    values = _as_float64(actual)
    targets = _as_float64(expected)
    assert values.shape == targets.shape, f"{name}: expected shape {targets.shape}, got {values.shape}"
    finite = np.isfinite(targets)
    if scale is None:
        scale = float(np.abs(targets[finite]).max(initial=0.0))
    tolerance = TOLERANCES[kind] * scale
    with np.errstate(invalid="ignore"):
        errors = np.abs(values - targets)
    equal = (values == targets) | (np.isnan(values) & np.isnan(targets))
    wrong = ~equal & ~(finite & (errors <= tolerance))
    if wrong.any():
        errors = np.where(np.isfinite(errors), errors, np.inf)
        position = np.unravel_index(np.argmax(np.where(wrong, errors, -1.0)), wrong.shape)
        where = f"{name}[{', '.join(map(str, position))}]" if position else name
        message = (
            f"{where}: expected {targets[position]:.9g}, got {values[position]:.9g}: an error of {errors[position]:.2g}, more than "
            f"{tolerance:.2g} ({kind}: {TOLERANCES[kind]:g} of {scale:.3g}); {int(wrong.sum())} of {wrong.size} are wrong"
        )
        raise AssertionError(message)


def _as_float64(values: Any) -> np.ndarray:
    if isinstance(values, torch.Tensor):
        return values.detach().cpu().double().numpy()
    if isinstance(values, (list, tuple)):
        return np.array([_as_float64(value) for value in values], dtype=np.float64)
    return np.asarray(values, dtype=np.float64)
