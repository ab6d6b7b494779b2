"""Choosing the mixture weights pi: uniform, by evidence, by stacking, or given."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mola.errors import OptionError
from mola.options import counted, one_of

__all__ = ["check_weighting", "check_weights", "evidence_weights", "stacking_weights", "uniform_weights"]


def uniform_weights(count: int) -> Tensor:
    """`1 / K` each, as in all the paper's experiments."""
    return torch.full((count,), 1 / count, dtype=torch.float64, device="cpu")


def check_weights(weights: Sequence[float] | Tensor, count: int) -> Tensor:
    """Given weights as a tensor.

    Args:
        weights: K numbers.
        count: K.

    Returns:
        (K,) in float64, summing to 1 to rounding.

    Raises:
        OptionError: unless they are K non-negative numbers that sum to 1.
    """
    try:
        values = torch.as_tensor(weights, dtype=torch.float64, device="cpu").detach()
    except (TypeError, ValueError, RuntimeError) as error:
        message = f"weights: expected {counted(count, 'number')} with the sum 1, got {weights!r}."
        raise OptionError(message) from error
    if values.dim() > 1:
        message = (
            f"weights: expected {count} numbers, one for each component, got a table of shape {tuple(values.shape)}."
        )
        raise OptionError(message)
    values = values.flatten()
    if len(values) != count:
        message = f"weights: expected {counted(count, 'number')}, one for each component, got {len(values)}."
        raise OptionError(message)
    if not bool(torch.isfinite(values).all()) or bool((values < 0).any()):
        message = f"weights must be finite and not negative, got {values.tolist()}."
        raise OptionError(message)
    if abs(float(values.sum()) - 1) > 1e-6:
        message = f"weights must sum to 1, got {values.tolist()} with sum {float(values.sum()):.6g}. Divide them by their sum."
        raise OptionError(message)
    return values / values.sum()


def check_weighting(weights: str | Sequence[float] | Tensor, count: int) -> str | Tensor:
    """A way to choose the weights, or the weights themselves.

    Args:
        weights: "uniform", "evidence", or K numbers.
        count: K.

    Returns:
        The name, or the numbers as `check_weights` gives them.

    Raises:
        OptionError: if the name is unknown or the numbers do not fit.
    """
    if not isinstance(weights, str):
        return check_weights(weights, count)
    if weights == "stacking":
        message = "weights 'stacking' need validation data: fit first, then posterior.reweight(val_loader)."
        raise OptionError(message)
    return one_of(weights, ("uniform", "evidence"), "weights", "numbers that sum to 1, one for each network")


def evidence_weights(log_evidence: Tensor) -> Tensor:
    """Weights (K,) in proportion to the components' evidences. A few nats apart already make them one-hot."""
    return torch.softmax(log_evidence.double(), dim=0)


def stacking_weights(likelihoods: Tensor) -> Tensor:
    r"""Weights that maximise the mixture's log-likelihood on held-out data: a concave problem on the simplex.

    .. math:: \max_\pi \tfrac1n \sum_n \log \sum_k \pi_k\, p_k(y_n) \quad \text{with } \pi \ge 0,\; 1^\top \pi = 1

    Newton's method on a log barrier that shrinks; the duality gap K mu bounds what is left to gain.

    Args:
        likelihoods: (n, K), the probability each component gives to each label.

    Returns:
        (K,) in float64, within 1e-10 nats of the optimum.
    """
    count = likelihoods.shape[1]
    # Ratios to the best component: nothing underflows, and the optimum is the same.
    best = likelihoods.double().max(1, keepdim=True).values.clamp_min(torch.finfo(torch.float64).tiny)
    ratios = (likelihoods.double() / best).clamp_min(torch.finfo(torch.float64).tiny)
    weights = uniform_weights(count)
    barrier = 1.0
    while barrier * count > 1e-10:
        barrier *= 0.2
        for _ in range(50):
            step, decrement = _newton_step(ratios, weights, barrier)
            moved = _line_search(ratios, weights, step, barrier)
            if decrement < 1e-9 * barrier or torch.equal(moved, weights):
                break
            weights = moved
    return weights / weights.sum()


def _objective(ratios: Tensor, weights: Tensor, barrier: float) -> float:
    return float((ratios @ weights).log().mean() + barrier * weights.log().sum())


def _newton_step(ratios: Tensor, weights: Tensor, barrier: float) -> tuple[Tensor, float]:
    """Newton's direction along the simplex, and its decrement."""
    relative = ratios / (ratios @ weights)[:, None]
    gradient = relative.mean(0) + barrier / weights
    hessian = relative.T @ relative / len(relative) + torch.diag(barrier / weights.square())
    # Scaled by the weights: near a corner of the simplex the bare system is hopelessly conditioned.
    scaled = weights[:, None] * hessian * weights
    toward = torch.linalg.solve(scaled, weights * gradient)
    along = torch.linalg.solve(scaled, weights)
    direction = toward - (weights @ toward) / (weights @ along) * along
    return weights * direction, float(direction @ scaled @ direction)


def _line_search(ratios: Tensor, weights: Tensor, step: Tensor, barrier: float) -> Tensor:
    limit = float((-weights[step < 0] / step[step < 0]).min()) if bool((step < 0).any()) else float("inf")
    size = min(1.0, 0.99 * limit)
    start = _objective(ratios, weights, barrier)
    while size > 1e-12:
        moved = weights + size * step
        moved = moved / moved.sum()
        if _objective(ratios, moved, barrier) >= start:
            return moved
        size /= 2
    return weights
