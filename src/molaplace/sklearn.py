"""A scikit-learn classifier and regressor for tabular data: small, tuned ensembles with Laplace approximations.

`mola.MolaClassifier` and `mola.MolaRegressor` are imported from this module on first use, because scikit-learn is an optional
dependency.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from numbers import Integral
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from molaplace.errors import DataError, MolaWarning, OptionError, importing
from molaplace.fitting import fit
from molaplace.likelihoods import BERNOULLI, CATEGORICAL, Gaussian, Likelihood
from molaplace.options import check_share, whole_number
from molaplace.perceptrons import Loss, train_mlps
from molaplace.posterior import MoLA
from molaplace.rules import Tuning, as_rule
from molaplace.settings import FeatureScale

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
"""Largest default batch size."""

ROWS = 4096
"""Number of rows per batch for fitting and prediction."""


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
    validation_fraction: float
    random_state: Any
    mean_: Array
    scale_: Array
    posterior_: MoLA
    tuning_: Tuning | None

    def _store(self, parameters: dict[str, Any]) -> None:
        # scikit-learn requires each parameter of __init__ to be stored unchanged as an attribute.
        for name in parameters.keys() - {"self"}:
            setattr(self, name, parameters[name])

    def _fit(
        self, table: Array, labels: Array, outputs: int, likelihood: Likelihood, rule: Any, loss: Loss | None = None
    ) -> Self:
        needs_data = rule not in (None, "evidence") and getattr(rule, "needs_data", True)
        if rule is not None:
            rule = as_rule(rule, likelihood, [] if needs_data else None)
        if needs_data:
            remedy = 'To avoid setting data aside, use rule="evidence" or rule=None.'
            check_share(self.validation_fraction, "validation_fraction", remedy)
        random = check_random_state(self.random_state)
        seed = int(random.randint(2**31 - 1))
        scaler = StandardScaler().fit(table)
        self.mean_ = scaler.mean_
        self.scale_ = scaler.scale_
        inputs = self._standardised(table)
        targets = torch.from_numpy(labels)
        fit_to = partial(
            self._fit_posterior,
            outputs=outputs,
            likelihood=likelihood,
            loss=loss or (lambda logits, labels: -likelihood.log_likelihood(logits, labels)),
            batch_size=min(max(len(table) // STEPS, MIN_BATCH), MAX_BATCH),
            seed=seed,
        )
        if not needs_data:
            posterior = fit_to(inputs, targets)
            self.posterior_ = posterior if rule is None else posterior.tune(rule=rule, progress=False)
            self.tuning_ = self.posterior_.tuning
            return self
        aside = torch.from_numpy(self._set_aside(labels, random))
        with warnings.catch_warnings():
            # The warnings are kept in tuning_.notes. On small tables, the search often ends at a limit of its range, and
            # cross-validation would repeat the warning for every fold.
            warnings.simplefilter("ignore", MolaWarning)
            start = fit_to(inputs[~aside], targets[~aside])
            tuned = start.tune(_batches(inputs[aside], targets[aside]), rule=rule, progress=False)
        self.posterior_ = _with_tuning_of(start, tuned, fit_to(inputs, targets))
        self.tuning_ = tuned.tuning
        return self

    def _fit_posterior(
        self,
        inputs: Tensor,
        targets: Tensor,
        *,
        outputs: int,
        likelihood: Likelihood,
        loss: Loss,
        batch_size: int,
        seed: int,
    ) -> MoLA:
        # Train the networks on standardised rows and fit their posterior; `batch_size` is the default of the parameter.
        hidden: list[Any] = [self.hidden] if isinstance(self.hidden, Integral) else list(self.hidden)
        if not hidden or not all(isinstance(width, Integral) and int(width) > 0 for width in hidden):
            raise OptionError(
                f"must be a non-empty sequence of positive integers, such as (64,); got {self.hidden!r}.",
                argument="hidden",
            )
        with torch.device("cpu"):  # layers and optimisers are made on torch's default device
            networks = train_mlps(
                inputs,
                targets,
                outputs,
                loss,
                hidden=[int(width) for width in hidden],
                members=whole_number(self.members, "members"),
                seed=seed,
                epochs=whole_number(self.epochs, "epochs"),
                batch_size=batch_size if self.batch_size is None else whole_number(self.batch_size, "batch_size"),
                learning_rate=self.learning_rate,
                weight_decay=self.weight_decay,
            )
        return fit(
            networks,
            _batches(inputs, targets),
            structure=self.structure,
            link=self.link,
            prior_precision=self.prior_precision,
            likelihood=likelihood,
            progress=False,
        )

    def _set_aside(self, labels: Array, random: np.random.RandomState) -> Array:
        aside = np.zeros(len(labels), dtype=bool)
        share = min(max(1, round(self.validation_fraction * len(labels))), len(labels) - 1)
        aside[random.permutation(len(labels))[:share]] = True
        return aside

    def _standardised(self, rows: Array) -> Tensor:
        return torch.from_numpy((rows - self.mean_) / self.scale_)

    def _inputs(self, X: Any) -> list[Tensor]:  # noqa: N803
        # Return the standardised rows in batches, after checking that the estimator is fitted.
        check_is_fitted(self)
        return list(torch.split(self._standardised(validate_data(self, X, dtype=np.float64, reset=False)), ROWS))

    def prediction(self, X: Any) -> Any:  # noqa: N803
        """Return the full predictions for all rows, as a `mola.Prediction` or a `mola.RegressionPrediction`."""
        inputs = self._inputs(X)  # before reading `posterior_`, which exists only after `fit`
        return self.posterior_.predict(inputs)

    def ood_score(self, X: Any) -> Array:  # noqa: N803
        """Return an OOD score for each row (n,), higher for outliers. The scores do not depend on the prior precision."""
        return self.prediction(X).ood_score.numpy()


class MolaClassifier(ClassifierMixin, _Perceptrons):  # type: ignore[misc]
    """A mixture of Laplace approximations of multilayer perceptrons, for classifying tabular data.

    `fit` standardises the features, trains `members` networks (AdamW, with a learning rate that falls to 0 along a half cosine) and
    fits their posterior. By default, it chooses the prior precision by maximising the evidence, which needs no held-out rows and trains
    the networks once. Other rules, such as "calibrated", the default of `mola.fit` with validation data, train them twice: `fit` sets
    aside a stratified share of the rows, trains networks on the rest and tunes their posterior on the held-out rows. Finally, it
    retrains the networks on all rows and applies the tuned prior precision and logit scaling. Everything is computed in float64, and
    the same `random_state` gives identical results. Sample weights are not supported, because the curvature cannot represent them.

    The labels y have shape (n,), with one class per row, or (n, L) for multi-label data, with values 0 and 1. For multi-label data,
    the likelihood is Bernoulli, probabilities and predictions have shape (n, L), and `classes_` holds the column indices.

    Args:
        hidden: widths of the hidden layers.
        members: number of networks; a single network gives an ordinary last-layer Laplace approximation.
        epochs: number of passes over the data for each network.
        batch_size: number of rows per training step; by default, a sixteenth of the rows, but at least 32 and at most 1024.
        learning_rate: initial learning rate.
        weight_decay: decoupled weight decay, as in AdamW.
        structure: structure of the curvature: "kron", "kron-exact", "kron-diag", "diag" or "full", or an object from
            `mola.structures`.
        link: link function: "probit", "probit-centred", "mean-field", "bridge" or "mc", or an object from `mola.links`.
        rule: rule that chooses the prior precision: "evidence"; "calibrated", "nll", "brier", "ece", "threshold" or "distance" on
            held-out data; an object from `mola.rules`; or None to keep `prior_precision`.
        prior_precision: prior precision lambda, used if `rule` is None.
        validation_fraction: fraction of each class's rows to set aside for the rule; at least one row is set aside from each class
            that has two or more. If `rule` is "evidence" or None, no rows are set aside.
        random_state: seed for the split and the networks, as usual in scikit-learn.

    Attributes:
        classes_: the sorted class labels.
        posterior_: the fitted `mola.MoLA`, whose inputs are standardised features.
        tuning_: record of how the prior precision was chosen, with notes; None if nothing was tuned.
        mean_: mean of each feature.
        scale_: standard deviation of each feature; 1 for a constant feature.
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
        learning_rate: float = 3e-3,
        weight_decay: float = 1e-2,
        structure: Any = "kron",
        link: Any = "probit",
        rule: Any = "evidence",
        prior_precision: float = 1.0,
        validation_fraction: float = 0.2,
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

    def _set_aside(self, labels: Array, random: np.random.RandomState) -> Array:
        if labels.ndim > 1:  # not stratified, since most combinations of labels may occur only once
            return super()._set_aside(labels, random)
        # Set aside the same share of every class, but at least one row and never all rows.
        aside = np.zeros(len(labels), dtype=bool)
        for label in np.unique(labels):
            rows = random.permutation(np.flatnonzero(labels == label))
            share = max(1, round(self.validation_fraction * len(rows)))
            aside[rows[: min(share, len(rows) - 1)]] = True
        if not aside.any():
            raise DataError(
                f"expected a class with at least 2 rows, so that rows can be set aside for rule={self.rule!r}; got {len(labels)} "
                f"rows, each "
                f'of a different class. Pass more data, or use rule="evidence".'
            )
        return aside

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

    `fit` standardises the features and targets, sets aside a share of the rows, and trains `members` networks on the rest to minimise
    the squared error (AdamW, with a learning rate that falls to 0 along a half cosine). It then fits their posterior and uses the
    held-out rows to choose the prior precision and the noise. Finally, it retrains the networks on all rows and applies the chosen
    prior precision and noise. With `rule="evidence"`, no rows are set aside, and the noise is estimated from the training data. This
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
        validation_fraction: float = 0.2,
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
        scaler = StandardScaler().fit(targets)
        location = scaler.mean_
        scale = scaler.scale_
        noise = self.noise
        rule = self.rule
        if (targets == targets[0]).all():
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


def _batches(inputs: Tensor, targets: Tensor) -> list[tuple[Tensor, Tensor]]:
    return list(zip(torch.split(inputs, ROWS), torch.split(targets, ROWS), strict=True))


def _with_tuning_of(start: MoLA, tuned: MoLA, final: MoLA) -> MoLA:
    # Apply the settings tuned on held-out data to the networks trained on all data. No data remain for measuring these networks'
    # reference distances, so their training distances are multiplied by the tuned networks' ratio of held-out to training distances.
    before = start.reference
    reference = tuned.reference
    if reference is not None and before is not None and final.reference is not None:
        scales = zip(reference.scales, before.scales, final.reference.scales, strict=True)
        reference = replace(reference, scales=tuple(FeatureScale(*map(_by_ratio, *triple)) for triple in scales))
    if start.likelihood.estimated:
        final = final.with_noise(tuned.noise.square().mean(0).sqrt())
    return final.with_parts(settings=tuned.settings, reference=reference)


def _by_ratio(held_out: float, before: float, now: float) -> float:
    return held_out * now / before if before > 0 and now > 0 else held_out
