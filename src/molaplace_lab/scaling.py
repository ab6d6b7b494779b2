r"""Rivals that calibrate the logits of an ensemble with more parameters than a temperature, all chosen by the validation log loss.

JUCAL (Heiss et al., 2026, arXiv 2602.20153) has two: a temperature :math:`c_1` and a factor :math:`c_2 \ge 0` for the disagreement of the
networks. With the logits :math:`z_k` and their mean :math:`\bar z`,

.. math:: p = \frac1K \sum_k \operatorname{softmax}\bigl((\bar z + c_2 (z_k - \bar z)) / c_1\bigr).

Structured vector and matrix scaling (SVS and SMS; Berta, Holzmüller, Jordan and Bach, 2025, arXiv 2511.03685) change the logits :math:`u`
of the temperature-scaled mean, mixed with a share :math:`1 / (n + 1)` of the uniform distribution, to :math:`(I + \operatorname{diag}(v) +
M) u + b`, where :math:`M` has no diagonal and is 0 for SVS. With :math:`n` validation data and :math:`C` classes, they minimise

.. math:: \text{log loss} + \frac Cn \bigl(\|b\|^2 + \|v\|^2\bigr) + \frac{C (C - 1)}n \|M\|^2.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from scipy.optimize import minimize_scalar
from torch import Tensor
from torch.nn.functional import nll_loss

from molaplace.calibration import fit_temperature
from molaplace.evaluation import outlier_scores
from molaplace.options import one_of
from molaplace_lab.activations_file import ActivationSlice
from molaplace_lab.context import Context
from molaplace_lab.detectors import gen_score
from molaplace_lab.measures import BatchPrediction
from molaplace_lab.methods import FittedMethod

Calibration = Callable[[Tensor], Tensor]
"""Function that maps logits (n, K, C) of K networks to log probabilities (n, C)."""

LARGEST_SPREAD = 3.0
SPREADS = 31  # number of grid points, because the loss may have more than one minimum
TEMPERATURES = (-5.0, 5.0)  # range of the search, as logarithms


def jucal(logits: Tensor, labels: Tensor) -> tuple[Calibration, dict[str, Any]]:
    """Fit JUCAL to logits (n, K, C) and labels (n,); return it and its two parameters."""

    def calibration(temperature: float, spread: float) -> Calibration:
        def log_probabilities(logits: Tensor) -> Tensor:
            mean = logits.mean(1, keepdim=True)
            members = ((mean + spread * (logits - mean)) / temperature).log_softmax(2)
            return members.logsumexp(1) - math.log(members.shape[1])

        return log_probabilities

    def best_temperature(spread: float) -> tuple[float, float]:
        def loss(log_temperature: float) -> float:
            return float(nll_loss(calibration(math.exp(log_temperature), spread)(logits), labels))

        search = minimize_scalar(loss, bounds=TEMPERATURES, method="bounded")
        return float(search.fun), math.exp(search.x)

    step = LARGEST_SPREAD / (SPREADS - 1)
    nearest = min((step * index for index in range(SPREADS)), key=best_temperature)
    bounds = (max(0.0, nearest - step), nearest + step)
    search = minimize_scalar(lambda spread: best_temperature(spread)[0], bounds=bounds, method="bounded")
    spread = min(nearest, float(search.x), key=best_temperature)
    temperature = best_temperature(spread)[1]
    return calibration(temperature, spread), {"temperature": temperature, "spread": spread}


def structured(logits: Tensor, labels: Tensor, *, full: bool) -> tuple[Calibration, dict[str, Any]]:
    """Fit SMS (if `full`) or SVS to the mean of logits (n, K, C) and labels (n,); return it and its temperature."""
    count, _, classes = logits.shape
    temperature = fit_temperature(logits.mean(1), labels)
    uniform = 1 / (count + 1)
    identity = torch.eye(classes, dtype=logits.dtype)
    scales = logits.new_zeros(classes, classes if full else 1, requires_grad=True)
    intercept = logits.new_zeros(classes, requires_grad=True)
    strength = classes / count * (identity + (classes - 1) * (1 - identity))

    def scaled(logits: Tensor) -> Tensor:
        probs = (1 - uniform) * (logits.mean(1) / temperature).softmax(1) + uniform / classes
        inputs = probs.log()
        change = inputs @ scales.T if full else inputs * scales.T
        return (inputs + change + intercept).log_softmax(1)

    def closure() -> float:
        optimiser.zero_grad()
        penalty = (strength if full else classes / count) * scales.square()
        loss = nll_loss(scaled(logits), labels) + penalty.sum() + classes / count * intercept.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    optimiser = torch.optim.LBFGS(
        [scales, intercept], max_iter=500, tolerance_grad=1e-9, tolerance_change=0, line_search_fn="strong_wolfe"
    )
    optimiser.step(closure)  # type: ignore[no-untyped-call]
    scales.requires_grad_(False)
    intercept.requires_grad_(False)
    return scaled, {"temperature": temperature}


SCALINGS: dict[str, Callable[[Tensor, Tensor], tuple[Calibration, dict[str, Any]]]] = {
    "jucal": jucal,
    "svs": partial(structured, full=False),
    "sms": partial(structured, full=True),
}
"""Functions that fit a calibration to validation logits and labels, keyed by name."""


@dataclass(frozen=True)
class ScaledEnsemble:
    """An ensemble whose logits are calibrated by one of the `SCALINGS`."""

    name: str
    scaling: str
    group: str = "main"
    components: int | None = None

    def __post_init__(self) -> None:
        one_of(self.scaling, tuple(SCALINGS), "scaling")

    def settings(self) -> dict[str, Any]:
        """Return the settings as plain JSON values."""
        return {"scaling": self.scaling}

    def fit(self, context: Context) -> FittedMethod:
        """Fit the calibration to stored validation logits."""
        validation = context.read("validation").only(slice(self.components))
        start = time.perf_counter()
        logits = torch.cat([part.logits for part in validation.slices()]).double()
        calibration, chosen = SCALINGS[self.scaling](logits, validation.labels)
        seconds = time.perf_counter() - start

        def predict(activations: ActivationSlice, all_scores: bool) -> BatchPrediction:
            probs = calibration(activations.logits.double()).exp()
            scores = outlier_scores(probs)
            if not all_scores:
                return BatchPrediction(probs, {"max probability": scores["max probability"]})
            return BatchPrediction(probs, scores | {"GEN": gen_score(probs)})

        def batches(name: str) -> Iterator[tuple[ActivationSlice, Tensor]]:
            stored = context.read(name).only(slice(self.components))
            return ((activations, activations.labels) for activations in stored.slices())

        return FittedMethod(batches, predict, chosen, seconds)
