"""Fingerprints: short digests that tell predictors apart, so that a threshold is used only with the predictor it was calibrated for.

A fingerprint covers the networks of an ensemble, or the last layers of a posterior and their sums over the training data, and all
settings. It survives `save` and `load`, also in another process. It does not notice weights that change after the posterior was made,
and a new fit has a new fingerprint.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from molaplace.errors import OptionError

SAMPLES = 64
"""Number of values of each tensor that are read, or up to twice as many. Training changes nearly all values, so a few of each tensor
tell networks apart."""


def digest(*parts: object) -> str:
    """Return 16 hexadecimal digits that depend on the parts' `repr`."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


def sampled(tensors: Iterable[Tensor]) -> list[Any]:
    """Return the shape and some values of each dense tensor; tensors in other formats, such as quantised ones, are skipped."""
    samples: list[Any] = []
    for tensor in tensors:
        if type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout == torch.strided:
            values = tensor.detach().flatten()
            samples.append((tuple(tensor.shape), values[:: max(1, len(values) // SAMPLES)].tolist()))
    return samples


def check_fingerprint(prediction: Any, expected: str | None, subject: str) -> None:
    """Raise `OptionError` if the prediction is known to come from another predictor than `subject`, such as "these sets", is for."""
    actual = getattr(prediction, "fingerprint", None)
    if expected is not None and actual is not None and actual != expected:
        raise OptionError(
            f"comes from another predictor, or from the same predictor with other settings, than {subject} (fingerprint {actual}, "
            f"expected {expected}). Predict with the predictor of the calibration data, or calibrate again with this one.",
            argument="prediction",
        )
