"""A scikit-learn classifier and regressor for tabular data: small, tuned ensembles with Laplace approximations.

`mola.MolaClassifier` and `mola.MolaRegressor` are imported from this module on first use, because scikit-learn is an optional
dependency.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from molaplace.errors import DataError, MolaWarning, OptionError, importing, located
from molaplace.fitting import fit
from molaplace.likelihoods import BERNOULLI, CATEGORICAL, Gaussian, Likelihood
from molaplace.numerics import one_thread
from molaplace.options import check_number, counted, whole_number
from molaplace.perceptrons import Loss, train_mlps
from molaplace.posterior import MoLA
from molaplace.rules import Rule, Tuning, as_rule
from molaplace.rules.held_out import HeldOut
from molaplace.rules.objective import Objective
from molaplace.rules.rule import check_tuning, rule_of
from molaplace.settings import FeatureScale, Reference

with importing("MolaClassifier", "scikit-learn 1.6 or later", "sklearn"):
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.preprocessing import StandardScaler
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets, type_of_target
    from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data

Array = np.ndarray[Any, Any]

STEPS = 16
"""Target number of steps per epoch for the default batch size."""
MIN_BATCH = 32
MAX_BATCH = 1024
"""Bounds of the default batch size."""

FusedAdamW = partial(torch.optim.AdamW, fused=True)
"""AdamW that updates all weights in one call, which takes a third of the time of a training step off small networks."""

ROWS = 4096
"""Number of rows per batch for fitting and prediction."""

SMALL = 1_000_000
"""Number of values up to which a table is fitted with one thread. With several threads, the small matrix products of a training step
take less time than the synchronisation, by orders of magnitude if the processors are busy."""


FARTHEST = 1e100
"""Largest standardised value. Values beyond it, such as 1e308 for a missing value, would overflow when features are squared."""


class _Standardisation(nn.Module):
    """First layer of each network, so that posteriors take rows in the units of the table."""

    mean: Tensor
    scale: Tensor

    def __init__(self, mean: Array, scale: Array) -> None:
        super().__init__()
        self.register_buffer("mean", torch.from_numpy(mean))
        self.register_buffer("scale", torch.from_numpy(scale))

    def forward(self, rows: Tensor) -> Tensor:
        return ((rows.to(self.mean.dtype) - self.mean) / self.scale).clamp(-FARTHEST, FARTHEST)


def batch_size_for(rows: int) -> int:
    """Return the default batch size, with which the last batch of an epoch is about as large as the others.

    A last batch of a few rows would be a step of full size in a random direction.
    """
    steps = max(min(math.ceil(rows / MIN_BATCH), STEPS), math.ceil(rows / MAX_BATCH))
    return math.ceil(rows / steps)


class _Perceptrons(BaseEstimator):  # type: ignore[misc]
    hidden: Any
    members: int
    epochs: int
    batch_size: int | None
    learning_rate: float
    weight_decay: float
    structure: Any
    link: Any = "probit"
    rule: Any
    prior_precision: float
    folds: int
    random_state: Any
    posterior_: MoLA
    tuning_: Tuning | None

    def _store(self, parameters: dict[str, Any]) -> None:
        # scikit-learn requires each parameter of __init__ to be stored unchanged as an attribute.
        for name in parameters.keys() - {"self"}:
            setattr(self, name, parameters[name])

    def _fit(
        self, table: Array, labels: Array, outputs: int, likelihood: Likelihood, rule: Any, loss: Loss | None = None
    ) -> Self:
        chosen_rule = None if rule is None else rule_of(rule)
        if chosen_rule is not None:
            as_rule(chosen_rule, likelihood, [] if chosen_rule.needs_data else None)
        random = check_random_state(self.random_state)
        seed = int(random.randint(2**31 - 1))
        inputs = _as_inputs(table)
        targets = torch.from_numpy(labels)
        fit_to = partial(
            self._fit_posterior,
            outputs=outputs,
            likelihood=likelihood,
            loss=loss or (lambda logits, labels: -likelihood.log_likelihood(logits, labels)),
            standardisation=_Standardisation(*_moments(table, "X")),
            seed=seed,
        )
        # The warnings are kept in tuning_.notes. On small tables, a search often ends at a limit of its range, and cross-validation
        # would repeat the warning for every split.
        with one_thread() if inputs.numel() <= SMALL else nullcontext(), warnings.catch_warnings():
            warnings.simplefilter("ignore", MolaWarning)
            if chosen_rule is not None and chosen_rule.needs_data:
                folds = torch.from_numpy(self._folds(labels, random))
                posteriors = []
                held_out = []
                for fold in range(int(folds.max()) + 1):
                    aside = folds == fold
                    with located(f"cross-fitting with {counted(int((~aside).sum()), 'row')} of {len(folds):,}"):
                        posteriors.append(fit_to(inputs[~aside], targets[~aside]))
                    rows = _batches(inputs[aside], targets[aside])
                    held_out.append(posteriors[-1].read(rows, "held-out rows", labelled=True, progress=False))
                self.posterior_ = _tuned(fit_to(inputs, targets), posteriors, held_out, chosen_rule)
            else:
                posterior = fit_to(inputs, targets)
                self.posterior_ = posterior if rule is None else posterior.tune(rule=chosen_rule, progress=False)
        self.tuning_ = self.posterior_.tuning
        return self

    def _fit_posterior(
        self,
        inputs: Tensor,
        targets: Tensor,
        *,
        outputs: int,
        likelihood: Likelihood,
        loss: Loss,
        standardisation: _Standardisation,
        seed: int,
    ) -> MoLA:
        # Train the networks on standardised rows and fit their posterior.
        hidden = list(self.hidden) if isinstance(self.hidden, Iterable) else [self.hidden]
        if not hidden:
            raise OptionError("must contain at least one width, such as (64,); got none.", argument="hidden")
        networks = train_mlps(
            standardisation(inputs),
            targets,
            outputs,
            loss,
            hidden=[whole_number(width, "hidden") for width in hidden],
            members=whole_number(self.members, "members"),
            seed=seed,
            epochs=whole_number(self.epochs, "epochs"),
            batch_size=(
                batch_size_for(len(inputs)) if self.batch_size is None else whole_number(self.batch_size, "batch_size")
            ),
            learning_rate=check_number(self.learning_rate, "learning_rate", 1e-12, 1e3, "AdamW begins with it."),
            weight_decay=check_number(
                self.weight_decay,
                "weight_decay",
                0,
                1e3,
                "Each step of AdamW shrinks the weights by its learning rate times this.",
            ),
            optimiser=FusedAdamW,
        )
        return fit(
            [nn.Sequential(standardisation, *network) for network in networks],
            _batches(inputs, targets),
            structure=self.structure,
            link=self.link,
            prior_precision=self.prior_precision,
            likelihood=likelihood,
            progress=False,
        )

    def _folds(self, labels: Array, random: np.random.RandomState) -> Array:
        # Return the fold in which each row is held out.
        folds = np.empty(len(labels), dtype=np.int64)
        folds[random.permutation(len(labels))] = np.arange(len(labels)) % self._num_folds(len(labels))
        return folds

    def _num_folds(self, rows: int) -> int:
        number = whole_number(self.folds, "folds")
        if min(number, rows) < 2:
            raise OptionError(
                f"must be at least 2, with at least 2 rows; got folds={number} for {counted(rows, 'row')}. To tune without held-out "
                'rows, use rule="evidence" or rule=None.',
                argument="folds",
            )
        return min(number, rows)

    def _inputs(self, X: Any) -> list[Tensor]:  # noqa: N803
        # Return the rows in batches, after checking that the estimator is fitted.
        check_is_fitted(self)
        return list(torch.split(_as_inputs(validate_data(self, X, dtype=np.float64, reset=False)), ROWS))

    def prediction(self, X: Any) -> Any:  # noqa: N803
        """Return the full predictions for all rows, as a `mola.Prediction` or a `mola.RegressionPrediction`."""
        inputs = self._inputs(X)  # before reading `posterior_`, which exists only after `fit`
        return self.posterior_.predict(inputs)

    def ood_score(self, X: Any) -> Array:  # noqa: N803
        """Return an OOD score for each row (n,), higher for outliers. The scores do not depend on the prior precision."""
        return self.prediction(X).ood_score.numpy()


class MolaClassifier(ClassifierMixin, _Perceptrons):  # type: ignore[misc]
    """A mixture of Laplace approximations of multilayer perceptrons, for classifying tabular data.

    `fit` standardises the features, trains `members` networks on all rows (AdamW, with a learning rate that falls to 0 along a half
    cosine) and fits their posterior. It tunes the posterior by cross-fitting: it also trains the networks on all rows but one of
    `folds` stratified parts, for each part, and chooses the settings that suit the predictions for the rows that were left out. Every
    row is thus used both for training and for tuning. `rule="evidence"` and `rule=None` hold out no rows and train the networks once.
    Everything is computed in float64, and the same `random_state` gives identical results. Sample weights are not supported, because
    the curvature cannot represent them.

    The labels y have shape (n,), with one class per row, or (n, L) for multi-label data, with values 0 and 1. For multi-label data,
    the likelihood is Bernoulli, probabilities and predictions have shape (n, L), and `classes_` holds the column indices.

    Args:
        hidden: widths of the hidden layers.
        members: number of networks; a single network gives an ordinary last-layer Laplace approximation.
        epochs: number of passes over the data for each network.
        batch_size: number of rows per training step; by default, about a sixteenth of the rows, but about 32 at least and 1024 at most.
        learning_rate: initial learning rate.
        weight_decay: decoupled weight decay, as in AdamW.
        structure: structure of the curvature: "kron", "kron-exact", "kron-diag", "diag" or "full", or an object from
            `mola.structures`.
        link: link function: "probit", "probit-centred", "mean-field", "bridge" or "mc", or an object from `mola.links`.
        rule: rule that chooses the settings: "calibrated", "nll", "brier", "ece", "threshold" or "distance" on held-out rows;
            "evidence"; an object from `mola.rules`; or None to keep `prior_precision`.
        prior_precision: prior precision lambda, used if `rule` is None.
        folds: number of parts for cross-fitting. The only row of a class is never held out.
        random_state: seed for the folds and the networks, as usual in scikit-learn.

    Attributes:
        classes_: the sorted class labels.
        posterior_: the fitted `mola.MoLA`. Its inputs are tensors of rows in the units of X: its networks standardise them.
        tuning_: record of how the settings were chosen, with notes; None if nothing was tuned.
        n_features_in_: number of features.
        feature_names_in_: names of the features, if X has column names.
    """

    classes_: Array

    def __init__(
        self,
        hidden: Sequence[int] = (64,),
        members: int = 5,
        *,
        epochs: int = 50,
        batch_size: int | None = None,
        learning_rate: float = 5e-3,
        weight_decay: float = 0.3,
        structure: Any = "kron",
        link: Any = "probit",
        rule: Any = "calibrated",
        prior_precision: float = 1.0,
        folds: int = 5,
        random_state: Any = None,
    ) -> None:
        self._store(locals())

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_label = True
        return tags

    def fit(self, X: Any, y: Any) -> Self:  # noqa: N803  (scikit-learn's name)
        """Train the networks and fit the posterior.

        Args:
            X: feature values (n, features), without missing values.
            y: class labels (n,) of any type, with at least two classes; or labels (n, L), each 0 or 1.
        """
        X, y = validate_data(self, X, y, dtype=np.float64, multi_output=True)  # noqa: N806
        check_classification_targets(y)
        if type_of_target(y) == "multilabel-indicator":
            labels: Array = np.array(y, dtype=np.float64)
            self.classes_ = np.arange(labels.shape[1])
            return self._fit(X, labels, labels.shape[1], BERNOULLI, self.rule)
        self.classes_, labels = np.unique(column_or_1d(y, warn=True), return_inverse=True)
        if len(self.classes_) < 2:
            raise DataError(f"expected labels from at least 2 classes, got 1 class: {self.classes_.tolist()}.")
        return self._fit(X, labels.astype(np.int64), len(self.classes_), CATEGORICAL, self.rule)

    def _folds(self, labels: Array, random: np.random.RandomState) -> Array:
        if labels.ndim > 1:  # not stratified, since most combinations of labels may occur only once
            return super()._folds(labels, random)
        # Deal out the rows class by class. The only row of a class is never held out: without it, its class is unknown.
        rows = random.permutation(len(labels))
        rows = rows[np.argsort(labels[rows], kind="stable")]
        rows = rows[np.bincount(labels)[labels[rows]] > 1]
        if not len(rows):
            raise DataError(
                f"expected a class with at least 2 rows, so that rows can be held out for rule={self.rule!r}; got {len(labels)} "
                f'rows, each of a different class. Pass more data, or use rule="evidence".'
            )
        folds = np.full(len(labels), -1)
        folds[rows] = np.arange(len(rows)) % self._num_folds(len(rows))
        return folds

    def predict_proba(self, X: Any) -> Array:  # noqa: N803
        """Return class probabilities (n, C) in the order of `classes_` or, for multi-label data, label probabilities (n, L)."""
        inputs = self._inputs(X)
        return self.posterior_.predict_proba(inputs)

    def predict(self, X: Any) -> Array:  # noqa: N803
        """Return the most probable class of each row or, for multi-label data, 0 or 1 for each label (n, L)."""
        probs = self.predict_proba(X)
        if self.posterior_.likelihood == BERNOULLI:
            return (probs > 0.5).astype(np.int64)
        return self.classes_[probs.argmax(1)]


class MolaRegressor(RegressorMixin, _Perceptrons):  # type: ignore[misc]
    """A mixture of Laplace approximations of multilayer perceptrons, for regression on tabular data.

    `fit` standardises the features and targets, trains `members` networks to minimise the squared error (AdamW, with a learning rate
    that falls to 0 along a half cosine) and fits their posterior. It chooses the prior precision and the noise by cross-fitting, as
    `MolaClassifier` does. With `rule="evidence"`, no rows are held out, and the noise is estimated from the training data. This
    estimate is too small if the networks overfit. Everything is computed in float64, and the same `random_state` gives identical
    results.

    The other arguments and the attributes have the same meaning as for `MolaClassifier`.

    Args:
        structure: structure of the curvature; the default, "kron-exact", is exact for constant noise.
        rule: rule that chooses the prior precision and the noise: "nll" or "crps" on held-out rows; "distance", which also makes the
            standard deviation grow with the distance from the training data; "evidence"; an object from `mola.rules`; or None to
            keep `prior_precision`.
        noise: standard deviation of the targets around the mean; estimated if None.
    """

    def __init__(
        self,
        hidden: Sequence[int] = (64,),
        members: int = 5,
        *,
        epochs: int = 50,
        batch_size: int | None = None,
        learning_rate: float = 1e-2,
        weight_decay: float = 1e-2,
        structure: Any = "kron-exact",
        rule: Any = "nll",
        prior_precision: float = 1.0,
        noise: Any = None,
        folds: int = 5,
        random_state: Any = None,
    ) -> None:
        self._store(locals())

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def fit(self, X: Any, y: Any) -> Self:  # noqa: N803  (scikit-learn's name)
        """Train the networks and fit the posterior.

        Args:
            X: feature values (n, features), without missing values.
            y: targets (n,) or (n, outputs), without missing values.
        """
        X, y = validate_data(self, X, y, dtype=np.float64, multi_output=True, y_numeric=True)  # noqa: N806
        self._single = y.ndim == 1
        # A copy, since torch rejects read-only memory.
        targets: Array = np.array(y, dtype=np.float64).reshape(len(X), -1)
        location, scale = _moments(targets, "y")
        noise = self.noise
        rule = self.rule
        constant = (targets == targets[0]).all(0)
        if constant.any() and not constant.all():
            raise DataError(
                f"must vary in every column, but column {int(np.argmax(constant))} is constant. Remove it.",
                argument="y",
            )
        if constant.all():
            # Predict the constant, with noise as small as its rounding error.
            noise = noise or tuple((1e-6 * np.maximum(1.0, np.abs(location))).tolist())
            rule = None
        likelihood = Gaussian(noise, location=location.tolist(), scale=scale.tolist())

        def squared_error(outputs: Tensor, labels: Tensor) -> Tensor:
            standardised = (labels - torch.from_numpy(location)) / torch.from_numpy(scale)
            return 0.5 * (outputs - standardised).square().sum(1)

        return self._fit(X, targets, targets.shape[1], likelihood, rule, squared_error)

    def predict(self, X: Any, return_std: bool = False) -> Any:  # noqa: N803
        """Predict the mean for each row and, with `return_std`, the standard deviation, as scikit-learn's Gaussian processes do.

        Args:
            X: feature values (n, features).
            return_std: return (mean, standard deviation) instead of the mean alone.

        Returns:
            Values of shape (n,), or (n, outputs) if y had several columns.
        """
        if not return_std:
            with torch.no_grad():
                return self._shaped(torch.cat([self.posterior_(batch) for batch in self._inputs(X)]))
        prediction = self.prediction(X)
        return self._shaped(prediction.mean), self._shaped(prediction.std)

    def predict_interval(self, X: Any, probability: float = 0.9) -> tuple[Array, Array]:  # noqa: N803
        """Return the lower and upper endpoints of intervals that contain the targets with the given probability."""
        lower, upper = self.prediction(X).interval(probability)
        return self._shaped(lower), self._shaped(upper)

    def _shaped(self, values: Tensor) -> Array:
        return (values[:, 0] if self._single else values).numpy()


def _moments(table: Array, argument: str) -> tuple[Array, Array]:
    # Return the mean and the standard deviation of each column; 1 for a constant column.
    with np.errstate(over="ignore", invalid="ignore"):
        scaler = StandardScaler().fit(table)
    finite = np.isfinite(scaler.var_)
    if not finite.all():
        column = int(np.argmin(finite))
        raise DataError(
            f"must have columns whose variance is a float64; column {column} has values of up to {np.abs(table[:, column]).max():.3g}. "
            f"If such values mark missing ones, impute them; otherwise, use larger units.",
            argument=argument,
        )
    return scaler.mean_, scaler.scale_


def _as_inputs(table: Array) -> Tensor:
    # A copy, since torch rejects read-only memory and negative strides.
    return torch.from_numpy(np.array(table, order="C"))


def _batches(inputs: Tensor, targets: Tensor) -> list[tuple[Tensor, Tensor]]:
    return list(zip(torch.split(inputs, ROWS), torch.split(targets, ROWS), strict=True))


def _tuned(final: MoLA, folds: Sequence[MoLA], held_out: Sequence[HeldOut], rule: Rule) -> MoLA:
    # Choose settings for the posteriors of all folds together, each on the rows that it has not seen, and apply them to the posterior
    # of the networks that were trained on all rows.
    pairs = list(zip(folds, held_out, strict=True))
    with torch.no_grad():
        measured = [posterior.with_parts(reference=posterior.reference_on(data)) for posterior, data in pairs]
        tuning = check_tuning(rule(Objective(list(zip(measured, held_out, strict=True)))), len(final.components))
    settings = tuning.settings
    if final.likelihood.estimated:
        # The noise is the root mean square of the folds' noises; one factor for each network serves all outputs.
        noise = torch.cat([posterior.with_settings(noise_factor=settings.noise_factors).noise for posterior in folds])
        ratio = noise.square().mean(0) / final.noise.square()
        settings = replace(settings, noise_factor=tuple(ratio.mean(1).sqrt().tolist()))
    return final.with_parts(settings=settings, reference=_mean_reference(final, measured), tuning=tuning)


def _mean_reference(final: MoLA, folds: Sequence[MoLA]) -> Reference:
    # Return the mean of the references measured on the held-out rows of all folds. Distances and norms depend on the networks. Those of
    # the final networks are unknown on held-out rows, so their training distances are multiplied by the folds' ratios of held-out to
    # training distances.
    references = [posterior.reference for posterior in folds]
    scales = []
    for posterior, reference in zip(folds, references, strict=True):
        assert reference is not None  # `fit` computes distances
        with np.errstate(divide="ignore", invalid="ignore"):  # distances are 0 if all columns are constant
            factors = _training_scales(final) / _training_scales(posterior)
        scales.append(np.array(reference.scales) * np.where(np.isfinite(factors) & (factors > 0), factors, 1.0))
    scores = [reference.score for reference in references if reference and reference.score]
    energies = [reference.energies for reference in references if reference and reference.energies]
    return Reference(
        tuple(FeatureScale(*row) for row in np.mean(scales, axis=0).tolist()),
        tuple((mean, deviation) for mean, deviation in np.mean(scores, axis=0).tolist()) if scores else None,
        tuple(np.mean(energies, axis=0).tolist()) if energies else None,
    )


def _training_scales(posterior: MoLA) -> Array:
    return np.array([[distance.training_distance, distance.training_norm] for distance in posterior.distances])
