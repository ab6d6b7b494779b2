"""Mixture weights: uniform, proportional to the evidence, from stacking on validation data, or given by the user."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from molaplace.errors import OptionError
from molaplace.options import counted, one_of

STACKING_GAP = 1e-10
"""Largest gap, in nats of mean log-likelihood, between the result of stacking and the optimum."""


def uniform_weights(count: int) -> Tensor:
    """Return K weights of `1 / K`, as in all of the paper's experiments."""
    return torch.full((count,), 1 / count, dtype=torch.float64, device="cpu")


def check_weights(weights: Sequence[float] | Tensor, count: int) -> Tensor:
    """Return the given weights (K,) in float64; raise `OptionError` unless they are K non-negative numbers that sum to 1."""
    try:
        values = torch.as_tensor(weights, dtype=torch.float64, device="cpu").detach().clone()
    except (TypeError, ValueError, RuntimeError) as error:
        raise OptionError(
            f"must be {counted(count, 'number')} with a sum of 1, got {weights!r}.", argument="weights"
        ) from error
    if values.dim() > 1 or values.numel() != count:
        got = f"shape {tuple(values.shape)}" if values.dim() > 1 else str(values.numel())
        raise OptionError(f"must be {counted(count, 'number')}, one for each component; got {got}.", argument="weights")
    values = values.flatten()
    if not bool(torch.isfinite(values).all()) or bool((values < 0).any()):
        raise OptionError(f"must be finite and not negative, got {values.tolist()}.", argument="weights")
    if abs(float(values.sum()) - 1) > 1e-6:
        raise OptionError(
            f"must sum to 1, got {values.tolist()}, whose sum is {float(values.sum()):.6g}. Divide them by their sum.",
            argument="weights",
        )
    # Do not renormalise weights that sum to 1 up to rounding; otherwise, they would change on every save and load.
    return values if abs(float(values.sum()) - 1) <= 1e-12 else values / values.sum()


def check_weighting(weights: str | Sequence[float] | Tensor, count: int) -> str | Tensor:
    """Return "uniform" or "evidence" unchanged, or check the given weights with `check_weights` and return them."""
    if not isinstance(weights, str):
        return check_weights(weights, count)
    if weights == "stacking":
        raise OptionError(
            "'stacking' needs validation data: fit first, then call posterior.reweight(val_loader).", argument="weights"
        )
    return one_of(weights, ("uniform", "evidence"), "weights", "numbers that sum to 1, one for each network")


def evidence_weights(log_evidence: Tensor) -> Tensor:
    """Return weights (K,) proportional to the components' evidence. A difference of a few nats makes the weights nearly one-hot."""
    return torch.softmax(log_evidence.double(), dim=0)


def stacking_weights(likelihoods: Tensor) -> Tensor:
    r"""Return the weights that maximise the mixture's log-likelihood on held-out data.

    .. math:: \max_\pi \tfrac1n \sum_n \log \sum_k \pi_k\, p_k(y_n) \quad \text{with } \pi \ge 0,\; 1^\top \pi = 1

    The objective is concave. Newton's method maximises it together with a log barrier whose weight mu shrinks. The duality gap, K mu,
    bounds the gain that is still possible.

    Args:
        likelihoods: probability or density (n, K) of each label under each component.

    Returns:
        Weights (K,) in float64, whose mean log-likelihood is within 1e-10 nats of the optimum.
    """
    count = likelihoods.shape[1]
    tiny = torch.finfo(torch.float64).tiny
    # Divide by the best component's likelihood to avoid underflow; this does not move the optimum.
    best = likelihoods.double().amax(1, keepdim=True).clamp_min(tiny)
    ratios = (likelihoods.double() / best).clamp_min(tiny)
    weights = uniform_weights(count)
    barrier = 1.0
    while barrier * count > STACKING_GAP:
        barrier *= 0.2
        for _ in range(50):
            step, decrement = _newton_step(ratios, weights, barrier)
            updated = _line_search(ratios, weights, step, barrier)
            if decrement < 1e-9 * barrier or torch.equal(updated, weights):
                break
            weights = updated
    return weights / weights.sum()


def stacking_in_turn(evaluate: Callable[[Tensor], tuple[Tensor, float]], starts: Sequence[Tensor]) -> Tensor:
    """Find stacking weights for components whose predictions depend on the weights, by updating predictions and weights in turn.

    An update does not follow the gradient of the log-likelihood and may lower it. Updates from each starting point therefore stop when
    the log-likelihood no longer rises. The result is at least as good as every starting point.

    Args:
        evaluate: function that maps weights (K,) to the likelihoods (n, K) of the components and the log-likelihood of the mixture.
        starts: weights to start from.
    """
    best = starts[0]
    best_score = -math.inf
    for start in starts:
        weights = start
        likelihoods, score = evaluate(start)
        while True:
            updated = stacking_weights(likelihoods)
            likelihoods, updated_score = evaluate(updated)
            if updated_score <= score + STACKING_GAP:
                break
            weights = updated
            score = updated_score
        if score > best_score:
            best = weights
            best_score = score
    return best


def _objective(ratios: Tensor, weights: Tensor, barrier: float) -> float:
    return float((ratios @ weights).log().mean() + barrier * weights.log().sum())


def _newton_step(ratios: Tensor, weights: Tensor, barrier: float) -> tuple[Tensor, float]:
    relative = ratios / (ratios @ weights)[:, None]
    gradient = relative.mean(0) + barrier / weights
    hessian = relative.T @ relative / len(relative) + torch.diag(barrier / weights.square())
    # Scale the system by the weights, because it is very ill-conditioned near a corner of the simplex.
    scaled_hessian = weights[:, None] * hessian * weights
    newton_direction = torch.linalg.solve(scaled_hessian, weights * gradient)
    constraint_direction = torch.linalg.solve(scaled_hessian, weights)
    direction = (
        newton_direction - (weights @ newton_direction) / (weights @ constraint_direction) * constraint_direction
    )
    return weights * direction, float(direction @ scaled_hessian @ direction)


def _line_search(ratios: Tensor, weights: Tensor, step: Tensor, barrier: float) -> Tensor:
    limit = float((-weights[step < 0] / step[step < 0]).min()) if bool((step < 0).any()) else float("inf")
    size = min(1.0, 0.99 * limit)
    start = _objective(ratios, weights, barrier)
    while size > 1e-12:
        updated = weights + size * step
        updated = updated / updated.sum()
        if _objective(ratios, updated, barrier) >= start:
            return updated
        size /= 2
    return weights
