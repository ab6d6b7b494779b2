"""A mixture of predictors: anything that maps inputs to probabilities, averaged with weights.

The weights pi are uniform, chosen by evidence or by stacking, or given by the user; the functions that choose them come first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from mola.distributed import Team
from mola.errors import DataError, OptionError
from mola.likelihood import CATEGORICAL, Gaussian, Likelihood, as_likelihood
from mola.network import Inputs, as_batch, batch_count, batches_of, one_batch, peek, undisturbed
from mola.numerics import seed_from
from mola.options import counted, one_of
from mola.prediction import Prediction
from mola.regression_prediction import RegressionPrediction
from mola.uncertainty import max_probability_score, mutual_information

STACKING_GAP = 1e-10
"""Nats of log-likelihood that stacking leaves to be gained, at most."""


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
    """
    try:
        values = torch.as_tensor(weights, dtype=torch.float64, device="cpu").detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise OptionError(f"weights: expected {counted(count, 'number')} with the sum 1, got {weights!r}.") from error
    if values.dim() > 1:
        raise OptionError(
            f"weights: expected {count} numbers, one for each component, got a table of shape {tuple(values.shape)}."
        )
    values = values.flatten()
    if len(values) != count:
        raise OptionError(f"weights: expected {counted(count, 'number')}, one for each component, got {len(values)}.")
    if not bool(torch.isfinite(values).all()) or bool((values < 0).any()):
        raise OptionError(f"weights must be finite and not negative, got {values.tolist()}.")
    if abs(float(values.sum()) - 1) > 1e-6:
        raise OptionError(
            f"weights must sum to 1, got {values.tolist()} with sum {float(values.sum()):.6g}. Divide them by their sum."
        )
    return values / values.sum()


def check_weighting(weights: str | Sequence[float] | Tensor, count: int) -> str | Tensor:
    """A way to choose the weights, or the weights themselves.

    Args:
        weights: "uniform", "evidence", or K numbers.
        count: K.

    Returns:
        The name, or the numbers as `check_weights` gives them.
    """
    if not isinstance(weights, str):
        return check_weights(weights, count)
    if weights == "stacking":
        raise OptionError("weights 'stacking' need validation data: fit first, then posterior.reweight(val_loader).")
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
    while barrier * count > STACKING_GAP:
        barrier *= 0.2
        for _ in range(50):
            step, decrement = _newton_step(ratios, weights, barrier)
            moved = _line_search(ratios, weights, step, barrier)
            if decrement < 1e-9 * barrier or torch.equal(moved, weights):
                break
            weights = moved
    return weights / weights.sum()


def stacked_in_turn(judged: Callable[[Tensor], tuple[Tensor, float]], starts: Sequence[Tensor]) -> Tensor:
    """Stacking where what components say depends on the weights: in turn what they say at the weights, and weights for what they say.

    A turn does not follow the slope of the log-likelihood, and may lower it: from each start turns are taken while they raise it. So
    the result is at least as good as every start, and as a start it stays where it is.

    Args:
        judged: from weights (K,) to the probability (n, K) that each component then gives to each label, and the log-likelihood of
            the mixture.
        starts: weights to start from; of equal results, that of the first start is taken.

    Returns:
        (K,)
    """
    found = []
    for start in starts:
        weights, (likelihoods, score) = start, judged(start)
        while True:
            moved = stacking_weights(likelihoods)
            likelihoods, raised = judged(moved)
            if raised <= score + STACKING_GAP:
                break
            weights, score = moved, raised
        found.append((weights, score))
    return max(found, key=lambda pair: pair[1])[0]


def _objective(ratios: Tensor, weights: Tensor, barrier: float) -> float:
    return float((ratios @ weights).log().mean() + barrier * weights.log().sum())


def _newton_step(ratios: Tensor, weights: Tensor, barrier: float) -> tuple[Tensor, float]:
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


KEPT = 2**28
"""Bytes of features and moments that a prediction keeps at most, for fields that are computed when they are first read."""


class Predictor(Protocol):
    """Anything that maps a batch of inputs to probabilities (n, C)."""

    def __call__(self, inputs: Any, /) -> Any:
        """Probabilities (n, C)."""


class Mixture(nn.Module):
    """A weighted average of predictors: deep ensembles, MultiSWAG, or any mix, objects of other libraries included.

    Args:
        predictors: callables from inputs to probabilities (n, C); modules among them are registered.
        weights: "uniform", or K non-negative numbers that sum to 1.
        likelihood: what the probabilities are of, by name or as an object; None asks the members, and is "categorical" where none
            of them knows.
    """

    def __init__(
        self,
        predictors: Sequence[Predictor],
        weights: str | Sequence[float] | Tensor = "uniform",
        *,
        likelihood: str | Likelihood | None = None,
    ) -> None:
        super().__init__()
        members = tuple(predictors) if isinstance(predictors, Iterable) else ()
        if not members or not all(callable(member) for member in members):
            raise OptionError("predictors: expected a list of at least one callable from inputs to probabilities.")
        if isinstance(weights, str):
            one_of(weights, ("uniform",), "weights", "numbers that sum to 1, one for each member")
        self.predictors = members
        for index, member in enumerate(members):
            if isinstance(member, nn.Module):
                self.add_module(f"predictor_{index}", member)
        count = len(members)
        self.weights = uniform_weights(count) if isinstance(weights, str) else check_weights(weights, count)
        self._likelihood = _common_likelihood(members) if likelihood is None else as_likelihood(likelihood)

    @property
    def likelihood(self) -> Likelihood:
        """What the probabilities are of."""
        return self._likelihood

    def forward(self, inputs: Inputs, generator: torch.Generator | None = None) -> Tensor:
        """Probabilities (n, C); the generator is for members that draw."""
        return self._mix(self._member_probs(one_batch(inputs), seed_from(generator)))

    def _mix(self, member_probs: Sequence[Tensor]) -> Tensor:
        if len(member_probs) == 1:  # with the weight 1: the same numbers, without three operations
            return member_probs[0]
        total = torch.zeros_like(member_probs[0])
        for weight, probs in zip(self.weights.tolist(), member_probs, strict=True):
            total = total + weight * probs
        return total

    def _member_probs(self, inputs: Inputs, seed: int | None) -> list[Tensor]:
        def ask(member: Predictor) -> Any:
            if seed is None or not isinstance(member, Mixture):
                return member(inputs)
            return member(inputs, generator=torch.Generator("cpu").manual_seed(seed))

        modules = [predictor for predictor in self.predictors if isinstance(predictor, nn.Module)]
        with undisturbed(*modules, passes_only=True), torch.no_grad():
            members = [
                _as_probabilities(index, ask(member), self.likelihood) for index, member in enumerate(self.predictors)
            ]
        shapes = [tuple(probs.shape) for probs in members]
        if len({classes for _, classes in shapes}) > 1:
            raise DataError(
                f"expected predictors with the same number of classes, got {[classes for _, classes in shapes]}."
            )
        if any(rows != shapes[0][0] for rows, _ in shapes):
            raise DataError(
                f"expected a row for each input from every predictor, got {[rows for rows, _ in shapes]} rows."
            )
        return members

    def _predict_batch(self, inputs: Inputs, seed: int | None, place: str) -> Any:
        if isinstance(self.likelihood, Gaussian):
            return self._predict_numbers(self.likelihood, inputs, seed, place)
        members = torch.stack(self._member_probs(inputs, seed))
        probs = self._mix(list(members))
        likelihood = self.likelihood
        spread = mutual_information(members, self.weights.to(members), likelihood)
        score = max_probability_score(probs, likelihood)
        return Prediction(probs, spread, score, "max-probability", likelihood=likelihood)

    def _predict_numbers(
        self, likelihood: Gaussian, inputs: Inputs, seed: int | None, place: str
    ) -> RegressionPrediction:
        # What members say of numbers: distributions, of those that are mixtures themselves, or means.
        known = [isinstance(member, Mixture) for member in self.predictors]
        if any(known) and not all(known):
            raise OptionError(
                f"predictors[{known.index(False)}] gives means alone and predictors[{known.index(True)}] distributions, whose spread "
                f"a mixture of means would drop: give the former as mola.ensemble(network, likelihood=mola.Gaussian(noise=...))."
            )
        if all(known):
            parts = [member._predict_batch(inputs, seed, place) for member in self.predictors]  # type: ignore[attr-defined]
            return RegressionPrediction.mixed(parts, self.weights)
        return RegressionPrediction.of_means(torch.stack(self._member_probs(inputs, seed)), self.weights, likelihood)

    def predict_batches(
        self, inputs: Any, *, generator: torch.Generator | None = None, progress: bool = False
    ) -> Iterator[Prediction]:
        """Predict batch by batch, in bounded memory.

        Until its costly fields are read, a prediction keeps the features of its inputs in memory: drop it, or read them.

        Args:
            inputs: one batch (a tensor, a tuple of positional or a mapping of keyword arguments of the networks), or an
                iterable of batches, whose labels are ignored.
            generator: source of randomness for links that draw; None uses the link's own seed.
            progress: whether to show a progress bar on stderr, if that is a terminal.

        Yields:
            One prediction for each batch, in main memory.
        """
        seed = seed_from(generator)
        for place, batch in _batches(inputs, progress=progress):
            yield self._predict_batch(batch, seed, place).cpu()

    def predict(
        self,
        inputs: Any,
        *,
        generator: torch.Generator | None = None,
        progress: bool = False,
        team: Team | None = None,
    ) -> Prediction:
        """Probabilities and uncertainty of one batch or of all batches of a loader.

        Costly fields are computed when they are first read. Until then the features and logits of the inputs are kept for them, up to
        `KEPT` bytes; of a loader that makes more, the fields of the other batches are computed at once.

        Args:
            inputs: one batch (a tensor, a tuple of positional or a mapping of keyword arguments of the networks), or an
                iterable of batches, whose labels are ignored.
            generator: source of randomness for links that draw; None uses the link's own seed.
            progress: whether to show a progress bar on stderr, if that is a terminal.
            team: the processes that predict together, each with its own shard, which may be empty; every one gets the predictions of
                all, in the order of the ranks. None predicts alone.

        Returns:
            The prediction, in main memory.
        """
        if team is None or team.size == 1:
            parts = []
            held = 0
            for part in self.predict_batches(inputs, generator=generator, progress=progress):
                held += part.held
                parts.append(part if held <= KEPT else part.computed())
            return type(parts[0]).concatenate(parts)
        with team.work("predict"):
            seed, parts = seed_from(generator), []
            for place, batch in _batches(inputs, progress=progress, some=False):
                parts.append(self._predict_batch(batch, seed, place).cpu().computed())
                team.check()
            kind: Any = Prediction if self.likelihood.discrete else RegressionPrediction
            return kind.gather(parts, team, self.likelihood)

    def predict_proba(self, inputs: Any) -> np.ndarray[Any, Any]:
        """Probabilities (n, C) as a NumPy array.

        Args:
            inputs: a NumPy array, or anything that `predict` takes.

        Returns:
            (n, C)
        """
        if isinstance(inputs, np.ndarray):
            parameter = next(self.parameters(), None)
            # A copy in native byte order: arrays may be read-only or foreign, which torch does not take.
            native = np.array(inputs, dtype=inputs.dtype.newbyteorder("="), order="C")
            if native.dtype.kind not in "biufc":
                raise DataError(
                    f"expected an array of numbers, got one of {native.dtype}. Convert it first, as with array.astype(float)."
                )
            given = torch.from_numpy(native)
            inputs = given.to(parameter.dtype) if parameter is not None and given.is_floating_point() else given
        return torch.cat([self(batch).cpu() for _, batch in _batches(inputs, progress=False)]).numpy()


def describe_networks(networks: Sequence[nn.Module]) -> str:
    """How many, of which kinds."""
    kinds = ", ".join(dict.fromkeys(type(network).__name__ for network in networks))
    return f"{counted(len(networks), 'network')} ({kinds})"


def describe_numbers(values: Iterable[float]) -> str:
    """A number, or several with commas; one that all share is given once."""
    return ", ".join(dict.fromkeys(f"{value:.4g}" for value in values))


def describe_weights(weights: Tensor, weighting: str) -> str:
    """How the members of a mixture are weighted."""
    if weighting == "uniform":
        return "uniform"
    return f"{', '.join(f'{weight:.4g}' for weight in weights.tolist())} ({weighting})"


def _batches(inputs: Any, *, progress: bool, some: bool = True) -> Iterator[tuple[str, Inputs]]:
    # What to predict, batch by batch, and where each comes from; with `some`, there must be something.
    if isinstance(inputs, np.ndarray):
        raise DataError(
            "the prediction loader: expected tensors, got an ndarray. Use predict_proba(array), or torch.from_numpy(array)."
        )
    if isinstance(inputs, (Tensor, Mapping, tuple)):
        if some or not _is_empty(inputs):
            yield "batch 0 of the prediction loader", _without_labels(inputs)
        return
    if isinstance(inputs, list) and _is_labelled(inputs):
        raise DataError(
            "the prediction loader: [x, y] may be one batch with labels, or two batches. Pass the inputs x alone, or a list of "
            "batches: [(x, y)]."
        )
    where = "the prediction loader"
    batches = peek(inputs, where)[1] if some else batches_of(inputs, where)
    bar = tqdm(batches, desc="predict", total=batch_count(inputs), disable=None if progress else True)
    for index, raw in enumerate(bar):
        place = f"batch {index} of the prediction loader"
        yield place, as_batch(raw, place).inputs


def _without_labels(inputs: Any) -> Inputs:
    # One batch as the networks take it; a mapping may hold labels.
    return as_batch(inputs, "the batch", empty=True).inputs if isinstance(inputs, Mapping) else inputs


def _is_empty(inputs: Any) -> bool:
    return isinstance(inputs, Tensor) and len(inputs) == 0


def _is_labelled(inputs: list[Any]) -> bool:
    # Whether this looks like one batch of a loader, `[x, y]`: a whole number for each input.
    if not (len(inputs) == 2 and all(isinstance(part, Tensor) for part in inputs)):
        return False
    first, second = inputs
    whole = not (second.is_floating_point() or second.is_complex() or second.dtype == torch.bool)
    return bool(whole and second.dim() == 1 and first.dim() > 1 and len(first) == len(second))


def _common_likelihood(members: Sequence[Any]) -> Likelihood:
    known = [found for one in members if isinstance(found := getattr(one, "likelihood", None), Likelihood)]
    other = next((one for one in known if one.name != known[0].name), None)
    if other is not None:
        raise OptionError(
            f"predictors: expected probabilities of the same kind, got {known[0].name!r} and {other.name!r}."
        )
    return known[0] if known else CATEGORICAL


def _as_probabilities(index: int, output: Any, likelihood: Likelihood = CATEGORICAL) -> Tensor:
    # What a predictor gave, as a tensor of probabilities (n, C).
    try:
        # NumPy's arrays may be read-only or run backwards, which torch does not take: copied, they are neither.
        probs = output.detach() if isinstance(output, Tensor) else torch.tensor(np.array(output), device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"predictors[{index}]: expected probabilities (n, C), got {type(output).__name__}.") from error
    if probs.dim() != 2 or not probs.is_floating_point():
        raise DataError(
            f"predictors[{index}]: expected probabilities (n, C), got {probs.dtype} of shape {tuple(probs.shape)}."
        )
    if torch.compiler.is_compiling() or not likelihood.discrete:
        return probs  # a trace has no numbers to look at
    off = float((probs.sum(1) - 1).abs().max()) if len(probs) else 0.0
    if not likelihood.competing:
        if bool(((probs < 0) | (probs > 1)).any()):
            raise DataError(
                f"predictors[{index}]: probabilities of yes must lie between 0 and 1, got values from {float(probs.min()):.3g} to "
                f"{float(probs.max()):.3g}. A network that returns logits goes through mola.ensemble or mola.fit."
            )
        return probs
    if not off < 1e-2:
        raise DataError(
            f"predictors[{index}]: rows must be probabilities that sum to 1, got rows off by {off:.3g}. "
            f"A network that returns logits goes through mola.ensemble or mola.fit."
        )
    if bool((probs < 0).any()):
        raise DataError(f"predictors[{index}]: probabilities must not be negative, got {float(probs.min()):.3g}.")
    return probs
