"""Mixtures of predictors: weighted averages of callables that map inputs to probabilities."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from molaplace.distributed import Team
from molaplace.errors import DataError, OptionError
from molaplace.likelihoods import CATEGORICAL, ClassificationLikelihood, Gaussian, Likelihood, as_likelihood
from molaplace.likelihoods.base import mixed
from molaplace.network import Inputs, as_batch, batch_count, evaluating, one_batch, peek
from molaplace.numerics import seed_from
from molaplace.options import one_of
from molaplace.prediction import Prediction, RegressionPrediction
from molaplace.uncertainty import mutual_information
from molaplace.weights import check_weights, uniform_weights

KEPT_BYTES = 2**28
"""Maximum number of bytes kept in memory to compute the unread fields of a prediction. Beyond this limit, fields are computed
immediately."""


class Predictor(Protocol):
    """A callable that maps a batch of inputs to probabilities (n, C)."""

    def __call__(self, inputs: Any, /) -> Any:
        """Return probabilities (n, C)."""


class Mixture(nn.Module):
    """A weighted average of predictors: a deep ensemble, MultiSWAG, or any other mixture. Predictors may come from other libraries.

    Args:
        predictors: callables that map inputs to probabilities (n, C). Modules among them are registered as submodules.
        weights: "uniform", or K non-negative numbers that sum to 1.
        likelihood: likelihood of the predictions, by name or as an object; by default, the members' likelihood, or "categorical" if
            they have none.
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
            raise OptionError(
                "must be a non-empty list of callables that map inputs to probabilities.", argument="predictors"
            )
        if isinstance(weights, str):
            one_of(weights, ("uniform",), "weights", "numbers that sum to 1, one for each member")
        self.predictors = members
        for index, member in enumerate(members):
            if isinstance(member, nn.Module):
                self.add_module(f"predictor_{index}", member)
        count = len(members)
        self.weights: Tensor = uniform_weights(count) if isinstance(weights, str) else check_weights(weights, count)
        self.likelihood: Likelihood = _common_likelihood(members) if likelihood is None else as_likelihood(likelihood)
        """Likelihood of the predictions."""

    def forward(self, inputs: Inputs, generator: torch.Generator | None = None) -> Tensor:
        """Return probabilities (n, C) or, for regression, means (n, D). Members that draw samples use the generator."""
        return mixed(self.weights, self._member_outputs(one_batch(inputs), seed_from(generator)))

    def _member_outputs(self, inputs: Inputs, seed: int | None) -> list[Tensor]:
        def run(member: Predictor) -> Any:
            if seed is None or not isinstance(member, Mixture):
                return member(inputs)
            return member(inputs, generator=torch.Generator("cpu").manual_seed(seed))

        modules = [predictor for predictor in self.predictors if isinstance(predictor, nn.Module)]
        with evaluating(*modules), torch.no_grad():
            members = [
                # A Mixture always returns valid probabilities. The outputs of other predictors must be checked.
                run(member) if isinstance(member, Mixture) else _checked(index, run(member), self.likelihood)
                for index, member in enumerate(self.predictors)
            ]
        shapes = [tuple(probs.shape) for probs in members]
        if any(shape != shapes[0] for shape in shapes):
            raise DataError(f"expected outputs of the same shape from every predictor, got {shapes}.")
        return members

    def predict_batch(self, inputs: Inputs, seed: int | None, place: str) -> Any:
        """Predict one batch. Error messages refer to the batch as `place`."""
        if not isinstance(self.likelihood, ClassificationLikelihood):
            return self._predict_regression(inputs, seed, place)
        members = torch.stack(self._member_outputs(inputs, seed))
        if members.dim() > 3:
            raise DataError(
                "a Mixture predicts one row per input. For dense outputs, fit all networks together with mola.fit."
            )
        distribution = self.likelihood.distribution(mixed(self.weights, list(members)))
        member_entropies = self.likelihood.distribution(members).entropy()
        return Prediction(
            {
                "probs": distribution.probs,
                "mutual_information": mutual_information(distribution.entropy(), member_entropies, self.weights),
                "ood_score": distribution.outlier_score(),
            },
            likelihood=self.likelihood,
        )

    def _predict_regression(self, inputs: Inputs, seed: int | None, place: str) -> RegressionPrediction:
        mixtures = [member for member in self.predictors if isinstance(member, Mixture)]
        if mixtures and len(mixtures) < len(self.predictors):
            raise OptionError(
                "some predictors return only means and others return distributions, whose spread would be lost in a mixture of means. "
                "Wrap each network that returns means: mola.ensemble(network, likelihood=mola.likelihoods.Gaussian(noise=...))."
            )
        if mixtures:
            parts = [member.predict_batch(inputs, seed, place) for member in mixtures]
            return RegressionPrediction.mixed(parts, self.weights)
        if not isinstance(self.likelihood, Gaussian):
            raise OptionError(
                f"likelihood {self.likelihood.name!r} needs more than the predictors' means. Wrap the networks in mola.ensemble."
            )
        means = torch.stack(self._member_outputs(inputs, seed))
        return RegressionPrediction.of_means(means, self.weights, self.likelihood)

    def predict_batches(
        self, inputs: Any, *, generator: torch.Generator | None = None, progress: bool = False
    ) -> Iterator[Any]:
        """Predict batch by batch, in bounded memory. The arguments have the same meaning as in `predict`."""
        seed = seed_from(generator)
        for place, batch in _batches(inputs, progress=progress):
            yield self.predict_batch(batch, seed, place).cpu()

    def predict(
        self,
        inputs: Any,
        *,
        generator: torch.Generator | None = None,
        progress: bool = False,
        team: Team | None = None,
    ) -> Any:
        """Predict probabilities and uncertainty for one batch, or for all batches of a loader.

        Args:
            inputs: one batch or an iterable of batches; any labels are ignored. A batch is a tensor, a tuple of the networks'
                positional arguments, or a mapping of their keyword arguments.
            generator: source of random numbers for links that draw samples; by default, the link's seed is used.
            progress: whether to show a progress bar if stderr is a terminal.
            team: processes that predict together. Each process reads its own shard and returns the predictions of all processes,
                ordered by rank.

        Returns:
            A `Prediction` or, for regression, a `RegressionPrediction`, in main memory. Costly fields are computed when they are first
            read, unless keeping the tensors they need until then would take too much memory.
        """
        seed, parts, held = seed_from(generator), [], 0
        kind: Any = Prediction if self.likelihood.classification else RegressionPrediction
        alone = team is None or team.size == 1
        for place, batch in _batches(inputs, progress=progress, required=alone):
            part = self.predict_batch(batch, seed, place)
            held += part.held_bytes
            parts.append(part.cpu() if held <= KEPT_BYTES else part.cpu().computed())
        return kind.concatenate(parts) if team is None or alone else kind.gather(parts, team)

    def predict_proba(self, inputs: Any) -> np.ndarray[Any, Any]:
        """Return probabilities (n, C) as a NumPy array. The inputs may be a NumPy array or anything that `predict` accepts."""
        if not self.likelihood.classification:
            raise OptionError(
                "a regression model has no class probabilities. Use predict(inputs), whose result has mean, interval(0.9) and "
                "log_prob."
            )
        if isinstance(inputs, np.ndarray):
            # Copy the array in native byte order, because torch accepts neither read-only arrays nor other byte orders.
            native = np.array(inputs, dtype=inputs.dtype.newbyteorder("="), order="C")
            if native.dtype.kind not in "biufc":
                raise DataError(
                    f"expected a numeric array, got {native.dtype}. Convert it, for example with array.astype(float)."
                )
            given, parameter = torch.from_numpy(native), next(self.parameters(), None)
            inputs = given.to(parameter.dtype) if parameter is not None and given.is_floating_point() else given
        return torch.cat([self(batch).cpu() for _, batch in _batches(inputs, progress=False)]).numpy()


def _batches(inputs: Any, *, progress: bool, required: bool = True) -> Iterator[tuple[str, Inputs]]:
    # A tensor, tuple or mapping is one batch; anything else is an iterable of batches.
    if isinstance(inputs, (Tensor, tuple, Mapping)) or hasattr(inputs, "keys"):
        yield "the inputs", one_batch(inputs)
        return
    if isinstance(inputs, np.ndarray):
        raise DataError(
            "expected a tensor, got a NumPy array. Use predict_proba(array), or predict(torch.from_numpy(array))."
        )
    # With several processes, the shard of this process may be empty.
    again = peek(inputs, "prediction loader")[1] if required else iter(inputs)
    bar = tqdm(again, desc="predict", total=batch_count(inputs), disable=None if progress else True, leave=False)
    for index, raw in enumerate(bar):
        place = f"batch {index} of the prediction loader"
        yield place, as_batch(raw, place).inputs


def _common_likelihood(members: Sequence[Any]) -> Likelihood:
    known = [found for one in members if isinstance(found := getattr(one, "likelihood", None), Likelihood)]
    if any(one.name != known[0].name for one in known):
        names = ", ".join(dict.fromkeys(repr(one.name) for one in known))
        raise OptionError(f"must be members with the same likelihood, got {names}.", argument="predictors")
    return known[0] if known else CATEGORICAL


def _checked(index: int, output: Any, likelihood: Likelihood) -> Tensor:
    place, remedy = f"predictors[{index}]", "If the network returns logits, pass it to mola.ensemble or mola.fit."
    try:
        # Copy the array, because torch accepts neither read-only arrays nor negative strides.
        probs = output.detach() if isinstance(output, Tensor) else torch.tensor(np.array(output))
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"expected probabilities (n, C), got {type(output).__name__}.", place=place) from error
    if probs.dim() != 2 or not probs.is_floating_point():
        raise DataError(f"expected probabilities (n, C), got {probs.dtype} of shape {tuple(probs.shape)}.", place=place)
    if not likelihood.classification or not len(probs):
        return probs
    if bool(((probs < 0) | (probs > 1 + 1e-2)).any()):
        raise DataError(
            f"probabilities must lie between 0 and 1, got values from {float(probs.min()):.3g} to "
            f"{float(probs.max()):.3g}. {remedy}",
            place=place,
        )
    gap = float((probs.sum(1) - 1).abs().max())
    if isinstance(likelihood, ClassificationLikelihood) and likelihood.mutually_exclusive and not gap < 1e-2:
        raise DataError(f"rows must sum to 1, got sums that differ from 1 by up to {gap:.3g}. {remedy}", place=place)
    return probs
