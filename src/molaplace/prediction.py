"""Predictions and their uncertainty, for each input or for each position of dense outputs.

Costly fields are computed when they are read for the first time. The values do not depend on the order in which fields are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar, Self, TypeAlias

import numpy as np
import torch
from torch import Tensor

from molaplace.distributed import Team
from molaplace.errors import DataError, OptionError, importing
from molaplace.likelihoods import (
    CATEGORICAL,
    GAUSSIAN,
    ClassificationLikelihood,
    ClassificationPredictive,
    Likelihood,
    RegressionLikelihood,
    RegressionPredictive,
)
from molaplace.likelihoods.base import mixed
from molaplace.numerics import as_tensor, to_float64
from molaplace.options import check_share, counted

Field: TypeAlias = "Tensor | None"
"""A field of a prediction, or None if it is unavailable."""

Pending: TypeAlias = "Mapping[tuple[str, ...], Callable[[], Mapping[str, Tensor]]]"
"""Functions that compute costly fields of a prediction when one of them is read, keyed by the names of these fields."""


class _Fields:
    names: ClassVar[tuple[str, ...]]
    """Names of the fields; the first is always available. Inputs are the first axis of every field."""
    axis: int
    """Axis of the classes or outputs: the last axis, or axis 1 in the layout (n, C, H, W)."""
    derived: ClassVar[tuple[str, ...]]
    """Names of the quantities that are computed from the fields."""
    likelihood: Any
    ood_score_name: str
    """Name of the outlier score."""
    fingerprint: str | None
    """Digest of the predictor and its settings, or None if unknown."""
    _fields: dict[str, Tensor]
    _pending: Pending
    """Functions that compute the fields that are not in `_fields`."""

    def __init__(self, fields: Mapping[str, Field], pending: Pending | None = None, **shared: Any) -> None:
        known = {name: value for name, value in fields.items() if name in self.names and value is not None}
        vars(self).update(shared, _fields=known, _pending=dict(pending or {}))

    def _read(self, name: str) -> Any:
        for names in self._pending:
            if name in names:
                self._compute(names)
                break
        return self._fields.get(name)

    def _compute(self, names: tuple[str, ...]) -> None:
        # inference_mode(False) also turns gradients on, and tracing would record this change. It is therefore used only if
        # inference mode is on.
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext(), torch.no_grad():
            computed = self._pending[names]()
        self._fields = self._fields | dict(computed)
        self._pending = {others: function for others, function in self._pending.items() if others != names}

    def computed(self) -> Self:
        """Compute every field now and return the prediction."""
        for names in tuple(self._pending):
            self._compute(names)
        return self

    def _shared(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_fields", "_pending")}

    @classmethod
    def _combined(cls, parts: Sequence[Self], combine: Callable[[list[Tensor]], Tensor]) -> Self:
        # Return a prediction whose fields are `combine(values of all parts)`, computed when the parts' fields are.
        def combined(names: Iterable[str]) -> dict[str, Tensor]:
            values = {name: [part._read(name) for part in parts] for name in names}
            return {name: combine(column) for name, column in values.items() if column[0] is not None}

        groups = {names for part in parts for names in part._pending}
        lazy = {name for names in groups for name in names}
        prediction = cls(combined(name for name in parts[0]._fields if name not in lazy), **parts[0]._shared())
        prediction._pending = {names: partial(combined, names) for names in sorted(groups)}
        return prediction

    def with_invalid(self, invalid: Tensor) -> Self:
        """Return the prediction for n inputs, given which (n,) are invalid: their fields are NaN, the others are those here."""
        valid = (~invalid).nonzero().flatten()

        def insert(parts: list[Tensor]) -> Tensor:
            [values] = parts
            marked = torch.full((len(invalid), *values.shape[1:]), torch.nan, dtype=values.dtype, device=values.device)
            return marked.index_copy(0, valid, values)

        return self if len(valid) == len(invalid) else self._combined([self], insert)

    @property
    def invalid(self) -> Tensor:
        """Mask (n,) of the inputs that `predict(..., invalid="mark")` marked as NaN or infinite."""
        return self._read(self.names[0]).flatten(1).isnan().any(1)

    def cpu(self) -> Self:
        """Return the same prediction in main memory."""
        return self._combined([self], lambda values: values[0].cpu())

    def __getstate__(self) -> dict[str, Any]:
        self.computed()  # functions cannot be pickled
        return dict(vars(self))

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    @classmethod
    def concatenate(cls, parts: Sequence[Self]) -> Self:
        """Join the predictions for several batches."""
        if len(parts) == 1:
            return parts[0]
        shapes = {tuple(part._read(cls.names[0]).shape[1:]) for part in parts}
        if len(shapes) > 1:
            raise DataError(
                f"the outputs of the batches have different shapes, {sorted(shapes)}, and cannot be joined. Predict "
                "batch by batch with predict_batches."
            )
        return cls._combined(parts, torch.cat)

    @classmethod
    def gather(cls, parts: Sequence[Self], team: Team) -> Self:
        """Join the predictions of all processes, sorted by rank, and return the result on every rank."""
        prediction = cls.concatenate(parts).computed() if parts else None
        # A rank without data learns from the other ranks which fields there are.
        description = None
        if prediction is not None:
            description = (list(prediction._fields), prediction._shared())
        descriptions = [value for value in team.collect(description) if value is not None]
        if not descriptions:
            raise DataError("the prediction loader is empty on every rank. Pass at least one batch.")
        names, shared = descriptions[0]
        fields = {name: team.gather(None if prediction is None else prediction._read(name)) for name in names}
        return cls(fields, **shared)

    def __len__(self) -> int:
        return len(self._read(self.names[0]))

    def __getitem__(self, index: int | slice | Sequence[int] | Tensor) -> Self:
        if isinstance(index, int):
            if not -len(self) <= index < len(self):
                raise IndexError(f"index {index} is out of range for {len(self)} inputs.")
            index = slice(index % len(self), index % len(self) + 1)
        indices = torch.arange(len(self), device="cpu")[index]
        return self._combined([self], lambda values: values[0].index_select(0, indices.to(values[0].device)))

    def __iter__(self) -> Iterator[Self]:
        return (self[index] for index in range(len(self)))

    def numpy(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return all fields as NumPy arrays, keyed by name."""
        values = {name: getattr(self, name) for name in (*self.names, *self.derived)}
        return {name: value.cpu().numpy() for name, value in values.items() if value is not None}

    @property
    def ood_score(self) -> Tensor:
        """Outlier score (n,), higher for more outlying inputs, and infinite for invalid inputs. `ood_score_name` is its name."""
        score = self._read("ood_score")
        return torch.where(score.isnan(), torch.inf, score)

    @property
    def distance(self) -> Tensor | None:
        """Distance (n,) of the features from the training data, relative to its median on the validation data.

        With several networks, this is the weighted geometric mean of their distances. Before tuning, it is relative to the root mean
        square distance of the training data. The value is None if the posterior provides no distances.
        """
        return self._read("distance")

    def _frame(self, *names: str) -> Any:
        with importing("to_frame", "pandas", "cli"):
            import pandas
        table: dict[str, Any] = {}
        for name in names:
            values = getattr(self, name)
            if values is None:
                continue
            if values.dim() > 2 or (values.dim() == 2 and self.axis == 1):
                raise OptionError(
                    "to_frame needs one row per input, but a dense prediction has many positions per input. Use numpy()."
                )
            if values.dim() == 1:
                table[name] = values.cpu().numpy()
            elif values.shape[1] == 1 and name != "probs":
                table[name] = values[:, 0].cpu().numpy()
            else:
                prefix = "prob" if name == "probs" else name
                table |= {f"{prefix}_{column}": values[:, column].cpu().numpy() for column in range(values.shape[1])}
        return pandas.DataFrame(table)


class Prediction(_Fields):
    """For n inputs, the probabilities of C classes (or of "yes" for C labels) and a decomposition of the uncertainty.

    For dense outputs, probabilities have the same layout as the logits, (n, C, H, W) or (n, T, C). Fields of shape (n,) then have
    shape (n, H, W) or (n, T). `prediction[i]`, `prediction[a:b]`, `len`, iteration, `numpy()` and `to_frame()` are supported.
    """

    names = (
        "probs",
        "mutual_information",
        "aleatoric",
        "ood_score",
        "logit_mean",
        "logit_variance",
        "distance",
        "far_field",
    )
    derived = ("label", "confidence", "entropy", "epistemic")
    likelihood: ClassificationLikelihood

    def __init__(
        self,
        fields: Mapping[str, Field],
        *,
        pending: Pending | None = None,
        ood_score_name: str = "max-probability",
        likelihood: Likelihood = CATEGORICAL,
        axis: int = -1,
        fingerprint: str | None = None,
    ) -> None:
        shared = {"ood_score_name": ood_score_name, "likelihood": likelihood, "axis": axis, "fingerprint": fingerprint}
        super().__init__(fields, pending, **shared)

    @property
    def probs(self) -> Tensor:
        """Probabilities (n, C)."""
        return self._read("probs")

    @property
    def mutual_information(self) -> Tensor:
        """Mutual information (n,) between the label and the weights, in nats."""
        return self._read("mutual_information")

    @property
    def epistemic(self) -> Tensor:
        """Uncertainty (n,) in nats that more data would remove: the entropy that distance adds, plus the mutual information without it."""
        # Clamped to [0, entropy], because the fields may differ by a rounding error from the entropy of rounded probabilities.
        total = self.entropy
        aleatoric = self._read("aleatoric")
        return torch.minimum(self.mutual_information, total) if aleatoric is None else (total - aleatoric).clamp_min(0)

    @property
    def aleatoric(self) -> Tensor:
        """Part of `entropy`, of the same shape, that is due to overlapping classes and that more data would not remove."""
        return self.entropy - self.epistemic

    @property
    def far_field(self) -> Tensor | None:
        """Far-field score (n,), or None if there are no features."""
        return self._read("far_field")

    @property
    def logit_mean(self) -> Tensor | None:
        """Unscaled logits (n, K, C) of each network."""
        return self._read("logit_mean")

    @property
    def logit_variance(self) -> Tensor | None:
        """Variances (n, K, C) of the unscaled logits."""
        return self._read("logit_variance")

    @property
    def distribution(self) -> ClassificationPredictive:
        """Predictive distribution, with the classes or labels along the last axis."""
        return self.likelihood.distribution(self.probs.movedim(self.axis, -1))

    def in_layout(self, values: Tensor) -> Tensor:
        """Return values (..., n) or, for multi-label data, (..., n, C) of `distribution` in the layout of the prediction."""
        return values.movedim(-1, self.axis) if values.dim() == self.probs.dim() else values

    @property
    def label(self) -> Tensor:
        """Most probable class (n,) or, for multi-label data, the most probable value (n, C) of each label: 1 for yes, 0 for no.

        Invalid inputs have the label -1.
        """
        distribution = self.distribution
        unknown = distribution.probs.isnan()
        if self.likelihood.mutually_exclusive:
            unknown = unknown.any(-1)
        return self.in_layout(torch.where(unknown, -1, distribution.predicted()))

    @property
    def confidence(self) -> Tensor:
        """Probability of `label`, of shape (n,), or (n, C) for multi-label data."""
        return self.in_layout(self.distribution.confidence())

    @property
    def entropy(self) -> Tensor:
        """Total uncertainty in nats (aleatoric plus epistemic), of shape (n,), or (n, C) for multi-label data."""
        return self.in_layout(self.distribution.entropy())

    def to_frame(self) -> Any:
        """Return a pandas data frame with one row per input."""
        return self._frame("label", "confidence", "entropy", "epistemic", "aleatoric", "ood_score", "distance", "probs")

    def __repr__(self) -> str:
        _, *sizes, outputs = self.probs.movedim(self.axis, -1).shape
        size = f"{counted(len(self), 'input')}{_positions(sizes)}, {counted(outputs, *self.likelihood.output_noun)}"
        if not self.probs.numel():
            return f"Prediction({size})"
        return (
            f"Prediction({size}, mean confidence {float(self.confidence.mean()):.3f}, mean "
            f"entropy {float(self.entropy.mean()):.3f}, mean epistemic uncertainty {float(self.epistemic.mean()):.3f})"
        )


class RegressionPrediction(_Fields):
    """A mixture of K distributions for each of n inputs and D outputs, in the targets' units.

    With a Gaussian likelihood, the distributions are normal.
    """

    names = ("component_mean", "component_variance", "component_noise", "ood_score", "distance")
    derived = ("mean", "std", "variance", "aleatoric", "epistemic", "within", "between")
    likelihood: RegressionLikelihood
    weights: Tensor

    def __init__(
        self,
        fields: Mapping[str, Field],
        *,
        weights: Tensor,
        ood_score_name: str = "variance",
        likelihood: Likelihood = GAUSSIAN,
        axis: int = -1,
        fingerprint: str | None = None,
    ) -> None:
        shared = {"ood_score_name": ood_score_name, "likelihood": likelihood, "axis": axis, "fingerprint": fingerprint}
        super().__init__(fields, None, weights=weights, **shared)

    @classmethod
    def of_means(cls, means: Tensor, weights: Tensor, likelihood: RegressionLikelihood) -> RegressionPrediction:
        """Build a prediction from the means (n, K, D) of members that return only means."""
        distribution = likelihood.of_means(weights, means)
        fields = {
            "component_mean": means,
            "component_variance": distribution.variances,
            "component_noise": distribution.noises,
            "ood_score": distribution.disagreement().to(means),
        }
        return cls(fields, weights=weights, likelihood=likelihood)

    @classmethod
    def mixed(
        cls, parts: Sequence[RegressionPrediction], weights: Tensor, fingerprint: str | None = None
    ) -> RegressionPrediction:
        """Mix several predictions for the same inputs. Outlier scores and distances are averaged."""

        def averaged(name: str) -> Tensor:
            return mixed(weights, [part._read(name) for part in parts])

        names = ["component_mean", "component_variance", "component_noise"]
        fields = {name: torch.cat([part._read(name) for part in parts], 1) for name in names}
        fields["ood_score"] = averaged("ood_score")
        if all(part.distance is not None for part in parts):
            fields["distance"] = averaged("distance")
        return cls(
            fields,
            weights=torch.cat([weight * part.weights for weight, part in zip(weights, parts, strict=True)]),
            ood_score_name=" + ".join(dict.fromkeys(part.ood_score_name for part in parts)),
            likelihood=parts[0].likelihood,
            axis=parts[0].axis,
            fingerprint=fingerprint,
        )

    @property
    def component_mean(self) -> Tensor:
        """Mean (n, K, D) of each component."""
        return self._read("component_mean")

    @property
    def component_variance(self) -> Tensor:
        """Variance (n, K, D) of each component in float64, including the noise."""
        return self._read("component_variance")

    @property
    def component_noise(self) -> Tensor:
        """Variance (n, K, D) of each component's noise, in float64."""
        return self._read("component_noise")

    @property
    def distribution(self) -> RegressionPredictive:
        """Predictive distribution in float64, with the outputs along the last axis."""
        # Use float64, because squares may overflow in float32 even if the values themselves do not.
        axis = self.axis if self.axis == -1 else self.axis + 1  # after the axis of the components
        parts = (self.component_mean, self.component_variance, self.component_noise)
        return self.likelihood.mixture_type(self.weights, *(to_float64(part).movedim(axis, -1) for part in parts))

    def in_layout(self, values: Tensor) -> Tensor:
        """Return values (..., D) of `distribution` in the layout and data type of the prediction."""
        return values.movedim(-1, self.axis).to(self.component_mean)

    @property
    def mean(self) -> Tensor:
        """Mean (n, D) of the prediction."""
        return self.in_layout(self.distribution.point())

    @property
    def between(self) -> Tensor:
        """Variance (n, D) of the networks' means, which measures their disagreement."""
        return self.in_layout(self.distribution.between())

    @property
    def within(self) -> Tensor:
        """Variance (n, D) due to uncertain weights and distance from the training data, averaged over the networks, without noise."""
        return self.in_layout(self.distribution.within())

    @property
    def epistemic(self) -> Tensor:
        """Variance (n, D) that more data would remove: the sum of `within` and `between`."""
        return self.in_layout(self.distribution.epistemic())

    @property
    def aleatoric(self) -> Tensor:
        """Variance (n, D) of the noise, which more data would not remove."""
        return self.in_layout(self.distribution.aleatoric())

    @property
    def variance(self) -> Tensor:
        """Variance (n, D) of the prediction: the sum of `aleatoric` and `epistemic`."""
        return self.in_layout(self.distribution.variance())

    @property
    def std(self) -> Tensor:
        """Standard deviation (n, D) of the prediction."""
        return self.in_layout(self.distribution.variance().sqrt())

    # The predictive distribution.

    def _targets(self, targets: Any, *, broadcast: bool = False) -> Tensor:
        # Return the targets in float64 with the outputs along the last axis.
        try:
            tensor = as_tensor(targets)
        except (TypeError, ValueError, RuntimeError) as error:
            raise DataError(f"expected targets as a tensor or array, got {type(targets).__name__}.") from error
        if tensor.is_complex():
            raise DataError(f"expected real targets, got {tensor.dtype}.")
        values = to_float64(tensor.to(self.component_mean.device))
        shape = self.component_mean[:, 0].shape
        if values.dim() == len(shape) - 1 and shape[self.axis] == 1:
            values = values.unsqueeze(self.axis)
        if broadcast and values.dim() == 0:
            values = values.expand(shape)
        if values.shape != shape:
            raise DataError(
                f"expected targets of shape {tuple(shape)}, one for each input and output; got shape {tuple(tensor.shape)}."
            )
        return values.movedim(self.axis, -1)

    def log_prob(self, targets: Any) -> Tensor:
        """Return the joint log density (n,) of each input's targets (n, D), in nats."""
        return self.distribution.log_density(self._targets(targets)).to(self.component_mean)

    def cdf(self, values: Any) -> Tensor:
        """Return the probability (n, D) that a target is less than or equal to `values`, a number or a tensor (n, D)."""
        return self.in_layout(self.distribution.cdf(self._targets(values, broadcast=True)))

    def crps(self, targets: Any) -> Tensor:
        """Return the continuous ranked probability score (n, D) of the targets, in the targets' units. Lower is better."""
        return self.in_layout(self.distribution.crps(self._targets(targets)))

    def quantile(self, level: float) -> Tensor:
        """Return the values (n, D) below which the targets fall with probability `level`."""
        level = check_share(level, "level", "For the median, pass 0.5.")
        return self.in_layout(self.distribution.quantile(level))

    def interval(self, probability: float = 0.9) -> tuple[Tensor, Tensor]:
        """Return the lower and upper ends (n, D) of the central interval that contains a target with the given probability."""
        probability = check_share(probability, "probability", "For 90 %, pass 0.9.")
        return self.quantile((1 - probability) / 2), self.quantile((1 + probability) / 2)

    def to_frame(self) -> Any:
        """Return a pandas data frame with one row per input."""
        return self._frame("mean", "std", "aleatoric", "epistemic", "ood_score", "distance")

    def __repr__(self) -> str:
        count, *sizes, outputs = self.component_mean[:, 0].movedim(self.axis, -1).shape
        size = f"{counted(count, 'input')}{_positions(sizes)}, {counted(outputs, 'output')}"
        if not count:
            return f"RegressionPrediction({size})"
        share = float((self.epistemic / self.variance).mean())
        return (
            f"RegressionPrediction({size}, mean standard deviation {float(self.std.mean()):.4g}, epistemic share of the variance "
            f"{share:.0%})"
        )


def _positions(sizes: Sequence[int]) -> str:
    return f" at {' x '.join(map(str, sizes))} positions" if sizes else ""
