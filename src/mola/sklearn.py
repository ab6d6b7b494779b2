"""A scikit-learn classifier and a regressor for tables: a small ensemble with Laplace approximations, standardised and tuned inside.

`mola.MolaClassifier` and `mola.MolaRegressor` are imported from here on first use: scikit-learn is an extra.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from mola.errors import DataError, MissingExtraError, MolaWarning, OptionError
from mola.fitting import fit
from mola.laplace import Scale
from mola.likelihood import BERNOULLI, CATEGORICAL, Gaussian, Likelihood
from mola.options import one_of, whole_number
from mola.posterior import MoLA
from mola.prediction import Prediction
from mola.regression import RegressionMoLA
from mola.regression_prediction import RegressionPrediction
from mola.training import Recipe, train_mlps
from mola.training.labelled import Labelled
from mola.tuning.choosing import RULES
from mola.tuning.rules import Evidence, Rule

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets, type_of_target
    from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data
except ImportError as error:
    raise MissingExtraError(feature="MolaClassifier", package="scikit-learn 1.6 or later", extra="sklearn") from error

Array = np.ndarray[Any, Any]

STEPS, SMALLEST, LARGEST = 16, 32, 1024
"""A batch size that is not given makes about so many steps of an epoch, between these sizes."""

ROUNDING = 1e-13
"""A column whose standard deviation is at most this share of its mean is constant: float64 makes so much of nothing."""

ROWS = 4096
"""Predictions are made for so many rows at a time."""


YES = 0.5
"""Probability above which a label is yes."""


class _Networks:
    # What both estimators share: checked settings, standardised rows, and how networks are trained.

    hidden: Any
    members: int
    epochs: int
    batch_size: int | None
    learning_rate: float
    weight_decay: float
    rule: Any
    mean_: Array
    scale_: Array

    def _chosen_rule(self) -> Rule | None:
        if self.rule is None or hasattr(self.rule, "choose"):
            return self.rule
        return RULES[one_of(self.rule, RULES, "rule")]

    def _checked_hidden(self) -> list[int]:
        widths: list[Any] = [self.hidden] if isinstance(self.hidden, Integral) else list(self.hidden)
        if not widths or not all(isinstance(width, Integral) and int(width) > 0 for width in widths):
            raise OptionError(f"hidden must be one or more widths above 0, such as (64,), got {self.hidden!r}.")
        whole_number(self.members, "members")
        return [int(width) for width in widths]

    def _recipe(self, count: int) -> Recipe:
        size = min(max(count // STEPS, SMALLEST), LARGEST) if self.batch_size is None else self.batch_size
        return Recipe(self.epochs, size, self.learning_rate, self.weight_decay)

    def _standardised(self, rows: Array) -> Tensor:
        return torch.from_numpy((rows - self.mean_) / self.scale_)


class MolaClassifier(_Networks, ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A mixture of Laplace approximations on multilayer perceptrons, for rows of numbers.

    `fit` standardises the features, trains `members` networks (AdamW with a learning rate that falls to 0 along a half
    cosine), fits their posterior, and chooses its prior precision by the evidence: no data are lost to validation. Other
    rules need data that the networks have not seen: a stratified share is set aside, networks trained on the rest choose the
    prior precision on it, and with it a temperature and how logits are cooled by distance, if the rule does; networks trained on
    all data take these over. Everything is computed in float64; the same
    `random_state` gives the same bits. Sample weights are not accepted: the curvature has no place for them.

    Labels y may be (n,), one of several classes for each row, or (n, L) of 0 and 1, yes or no for each of L labels: then the
    likelihood is Bernoulli's, probabilities and predictions are (n, L), and `classes_` are the columns.

    Args:
        hidden: widths of the hidden layers.
        members: number of networks; 1 gives a last-layer Laplace approximation.
        epochs: passes over the data for each network.
        batch_size: rows of a training step; None takes about a sixteenth of the data, between 32 and 1024.
        learning_rate: at the start.
        weight_decay: decoupled, as in AdamW.
        structure: of the curvature: "kron", "kron-exact", "kron-diag", "diag" or "full", or a `mola.Structure`.
        link: from logits to probabilities: "probit", "probit-centered", "mean-field", "bridge" or "mc", or a `mola.Link`.
        rule: how the prior precision is chosen: "evidence"; "nll", "brier", "ece", "threshold" (the paper's) or "distance" (its
            caution spent far from the training data) on data set aside; a rule object such as `mola.ConfidenceThreshold(0.9)` or
            `mola.Distance(price=0.02)`; or None to keep `prior_precision`. What it found is
            in `tuning_`, its remarks in `tuning_.notes`.
        prior_precision: lambda, where `rule` is None.
        validation_fraction: share of each class set aside for the rule, at least one row of each class that has two. With
            "evidence" or None nothing is set aside.
        random_state: seed of the split and the networks, as everywhere in scikit-learn.

    Attributes:
        classes_: the labels, sorted.
        posterior_: the `mola.MoLA` over standardised features, for everything that this class does not show.
        tuning_: how the prior precision was chosen (`mola.Tuning`), if it was.
        mean_: of each feature.
        scale_: standard deviation of each feature; 1 for a constant one.
        n_features_in_: number of features.
        feature_names_in_: their names, where X had them.
    """

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
        # Keep the settings; `fit` checks them.
        self.hidden = hidden
        self.members = members
        self.epochs = epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.structure = structure
        self.link = link
        self.rule = rule
        self.prior_precision = prior_precision
        self.validation_fraction = validation_fraction
        self.random_state = random_state

    def __sklearn_tags__(self) -> Any:
        # What the estimator takes, for scikit-learn: several labels, too.
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_label = True
        return tags

    def fit(self, X: Any, y: Any) -> Self:  # noqa: N803  (scikit-learn's name)
        """Train the networks and fit the posterior.

        Args:
            X: (n, features), numbers without gaps.
            y: (n,) labels of any kind, of at least two classes; or (n, L), 0 or 1 for each of L labels.

        Returns:
            The fitted estimator.
        """
        X, y = validate_data(self, X, y, dtype=np.float64, multi_output=True)  # noqa: N806
        check_classification_targets(y)
        several = type_of_target(y) == "multilabel-indicator"
        if several:
            labels: Array = np.asarray(y, dtype=np.float64)
            self.classes_ = np.arange(labels.shape[1])
        else:
            y = column_or_1d(y, warn=True)
            self.classes_, labels = np.unique(y, return_inverse=True)
        self._likelihood: Likelihood = BERNOULLI if several else CATEGORICAL
        if len(self.classes_) < 2 and not several:
            raise DataError(
                f"expected labels of at least 2 classes, got {len(self.classes_)} class: {self.classes_.tolist()}."
            )
        rule, hidden = self._chosen_rule(), self._checked_hidden()
        random = check_random_state(self.random_state)
        seed = int(random.randint(2**31 - 1))
        self.mean_, self.scale_ = _moments(X)
        kind = np.float64 if several else np.int64
        every = Labelled(self._standardised(X), torch.from_numpy(np.ascontiguousarray(labels, dtype=kind)))
        if rule is None or isinstance(rule, Evidence):
            posterior = self._posterior(every, hidden, seed)
            self.posterior_ = (posterior if rule is None else posterior.tune(rule=rule, progress=False)).eval()
            self.tuning_ = self.posterior_.tuning
            return self
        aside = torch.from_numpy(self._set_aside(labels, random))
        train, held_out = _rows(every, ~aside), _rows(every, aside)
        with warnings.catch_warnings():
            # Kept in tuning.notes. On small tables the search often ends at a limit, and in a cross-validation the same
            # words would come for every fold.
            warnings.simplefilter("ignore", MolaWarning)
            tuned = self._posterior(train, hidden, seed).tune(held_out.batches(ROWS), rule=rule, progress=False)
        final = _taken_over(tuned, self._posterior(every, hidden, seed))
        self.posterior_, self.tuning_ = final.eval(), tuned.tuning
        return self

    def _posterior(self, data: Labelled, hidden: Sequence[int], seed: int) -> MoLA:
        sizes = data.inputs.shape[1], hidden, len(self.classes_)
        loss = "cross-entropy" if self._likelihood.competing else "binary-cross-entropy"
        networks = train_mlps(*sizes, data, self._recipe(len(data)), members=self.members, seed=seed, loss=loss)
        return fit(
            networks,
            data.batches(ROWS),
            structure=self.structure,
            link=self.link,
            prior_precision=self.prior_precision,
            likelihood=self._likelihood,
            progress=False,
        )

    def _set_aside(self, labels: Array, random: np.random.RandomState) -> Array:
        # Which rows are for the rule: the same share of every class, at least one, never all of it.
        if not 0 < self.validation_fraction < 1:
            raise OptionError(
                f"validation_fraction must lie between 0 and 1, got {self.validation_fraction!r}. To set nothing aside, "
                f'choose rule="evidence" or rule=None.'
            )
        aside = np.zeros(len(labels), dtype=bool)
        if labels.ndim > 1:  # nearly every combination of labels may be there once
            aside[random.permutation(len(labels))[: round(self.validation_fraction * len(labels))]] = True
        for label in np.unique(labels) if labels.ndim == 1 else ():
            rows = random.permutation(np.flatnonzero(labels == label))
            share = max(1, round(self.validation_fraction * len(rows)))
            aside[rows[: min(share, len(rows) - 1)]] = True
        if not aside.any():
            raise DataError(
                f"expected a class with at least 2 rows, to set some aside for rule={self.rule!r}; got {len(labels)} rows of "
                f'as many classes. Give more data, or choose rule="evidence".'
            )
        return aside

    def _predictions(self, X: Any) -> Iterator[Prediction]:  # noqa: N803
        check_is_fitted(self)
        rows = validate_data(self, X, dtype=np.float64, reset=False)
        yield from self.posterior_.predict_batches(list(torch.split(self._standardised(rows), ROWS)))

    def prediction(self, X: Any) -> Prediction:  # noqa: N803
        """Everything the posterior says of each row: probabilities, entropy and its epistemic part, outlier score."""
        return Prediction.concatenate(list(self._predictions(X)))

    def predict_proba(self, X: Any) -> Array:  # noqa: N803
        """Probabilities (n, C), in the order of `classes_`; of several labels, those of yes (n, L)."""
        check_is_fitted(self)
        rows = self._standardised(validate_data(self, X, dtype=np.float64, reset=False))
        return torch.cat([self.posterior_(part) for part in torch.split(rows, ROWS)]).numpy()

    def predict(self, X: Any) -> Array:  # noqa: N803
        """The most probable label of each row; of several labels, (n, L) of 0 and 1."""
        probs = self.predict_proba(X)
        if not self._likelihood.competing:
            return (probs > YES).astype(np.int64)
        return self.classes_[probs.argmax(1)]

    def ood_score(self, X: Any) -> Array:  # noqa: N803
        """How outlying each row is (n,): higher = more outlying. It does not depend on the prior precision."""
        return self.prediction(X).ood_score.numpy()


class MolaRegressor(_Networks, RegressorMixin, BaseEstimator):  # type: ignore[misc]
    """A mixture of Laplace approximations on multilayer perceptrons that predict numbers, for rows of numbers.

    `fit` standardises features and targets, sets a share of the rows aside, trains `members` networks on the rest by the squared
    error (AdamW with a learning rate that falls to 0 along a half cosine), fits their posterior, and chooses its prior precision and
    noise on the rows set aside; networks trained on all rows take these over. With `rule="evidence"` nothing is set aside; the noise
    is then that of the training data, and too small where networks fit them too well. Everything is computed in float64; the same
    `random_state` gives the same bits.

    Args:
        hidden: widths of the hidden layers.
        members: number of networks; 1 gives a last-layer Laplace approximation.
        epochs: passes over the data for each network.
        batch_size: rows of a training step; None takes about a sixteenth of the data, between 32 and 1024.
        learning_rate: at the start.
        weight_decay: decoupled, as in AdamW.
        structure: of the curvature: "kron-exact" (for constant noise, the exact posterior), "kron", "kron-diag", "diag" or "full",
            or a `mola.Structure`.
        rule: how prior precision and noise are chosen: "nll" or "crps" on rows set aside, "distance" (the standard deviation grows
            with the distance from the training data, too), "evidence", a rule object, or None to keep `prior_precision` and `noise`.
        prior_precision: lambda, where `rule` is None.
        noise: standard deviation of the targets around the mean; None chooses it.
        validation_fraction: share of the rows set aside for the rule. With "evidence" or None nothing is set aside.
        random_state: seed of the split and the networks, as everywhere in scikit-learn.

    Attributes:
        posterior_: the `mola.RegressionMoLA` over standardised features, in the targets' units.
        tuning_: how prior precision and noise were chosen (`mola.Tuning`), if they were.
        mean_: of each feature.
        scale_: standard deviation of each feature; 1 for a constant one.
        n_features_in_: number of features.
        feature_names_in_: their names, where X had them.
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
        # Keep the settings; `fit` checks them.
        self.hidden = hidden
        self.members = members
        self.epochs = epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.structure = structure
        self.rule = rule
        self.prior_precision = prior_precision
        self.noise = noise
        self.validation_fraction = validation_fraction
        self.random_state = random_state

    def fit(self, X: Any, y: Any) -> Self:  # noqa: N803  (scikit-learn's name)
        """Train the networks and fit the posterior.

        Args:
            X: (n, features), numbers without gaps.
            y: (n,) or (n, outputs), numbers without gaps.

        Returns:
            The fitted estimator.
        """
        X, y = validate_data(self, X, y, dtype=np.float64, multi_output=True, y_numeric=True)  # noqa: N806
        self._single = y.ndim == 1
        targets = np.array(y, dtype=np.float64).reshape(
            len(X), -1
        )  # a copy: torch does not take memory that is read-only
        rule, hidden = self._chosen_rule(), self._checked_hidden()
        random = check_random_state(self.random_state)
        seed = int(random.randint(2**31 - 1))
        self.mean_, self.scale_ = _moments(X)
        location, scale = _moments(targets)
        meaning = Gaussian(self.noise, location=location.tolist(), scale=scale.tolist())
        if len(X) < 2 or (targets == targets[0]).all():  # nothing to learn: the constant, with noise of its rounding
            meaning = replace(meaning, noise=self.noise or tuple((1e-6 * np.maximum(1.0, np.abs(location))).tolist()))
            rule = None
        every = Labelled(self._standardised(X), torch.from_numpy(targets))
        if rule is None or isinstance(rule, Evidence):
            posterior = self._posterior(every, hidden, seed, meaning)
            self.posterior_ = (posterior if rule is None else posterior.tune(rule=rule, progress=False)).eval()
            self.tuning_ = self.posterior_.tuning
            return self
        if not 0 < self.validation_fraction < 1:
            raise OptionError(
                f"validation_fraction must lie between 0 and 1, got {self.validation_fraction!r}. To set nothing aside, choose "
                f'rule="evidence" or rule=None.'
            )
        aside = torch.zeros(len(X), dtype=torch.bool)
        share = min(max(1, round(self.validation_fraction * len(X))), len(X) - 1)
        aside[torch.from_numpy(random.permutation(len(X))[:share].copy())] = True
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", MolaWarning)  # kept in tuning.notes
            before = self._posterior(_rows(every, ~aside), hidden, seed, meaning)
            tuned = before.tune(_rows(every, aside).batches(ROWS), rule=rule, progress=False)
        noise = tuned.noise.square().mean(0).sqrt() if self.noise is None else None
        final = _taken_over(tuned, self._posterior(every, hidden, seed, meaning))
        assert isinstance(final, RegressionMoLA)
        self.posterior_ = (final if noise is None else final.with_noise(noise.tolist())).eval()
        self.tuning_ = tuned.tuning
        return self

    def _posterior(self, data: Labelled, hidden: Sequence[int], seed: int, meaning: Gaussian) -> RegressionMoLA:
        width = data.labels.shape[1]
        location, scale = meaning.widths(width)
        standard = Labelled(data.inputs, (data.labels - location) / scale)
        networks = train_mlps(
            data.inputs.shape[1],
            hidden,
            width,
            standard,
            self._recipe(len(data)),
            members=self.members,
            seed=seed,
            loss="squared-error",
        )
        made = fit(
            networks,
            data.batches(ROWS),
            structure=self.structure,
            prior_precision=self.prior_precision,
            likelihood=meaning,
            progress=False,
        )
        assert isinstance(made, RegressionMoLA)
        return made

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def _rows_of(self, X: Any) -> Tensor:  # noqa: N803
        check_is_fitted(self)
        return self._standardised(validate_data(self, X, dtype=np.float64, reset=False))

    def prediction(self, X: Any) -> RegressionPrediction:  # noqa: N803
        """Everything the posterior says of each row: mean, variance and its parts, intervals, outlier score."""
        parts = self.posterior_.predict_batches(list(torch.split(self._rows_of(X), ROWS)))
        return RegressionPrediction.concatenate(list(parts))  # type: ignore[arg-type]

    def predict(self, X: Any, return_std: bool = False) -> Any:  # noqa: N803
        """The mean of each row's prediction, and with `return_std` its standard deviation, as scikit-learn's Gaussian processes do.

        Args:
            X: (n, features).
            return_std: whether to give (mean, standard deviation).

        Returns:
            (n,), or (n, outputs) where y had several.
        """
        rows = self._rows_of(X)
        if not return_std:
            return self._shaped(torch.cat([self.posterior_(part) for part in torch.split(rows, ROWS)]))
        said = self.prediction(X)
        return self._shaped(said.mean), self._shaped(said.std)

    def predict_interval(self, X: Any, probability: float = 0.9) -> tuple[Array, Array]:  # noqa: N803
        """Lower and upper ends between which targets lie with that probability."""
        lower, upper = self.prediction(X).interval(probability)
        return self._shaped(lower), self._shaped(upper)

    def ood_score(self, X: Any) -> Array:  # noqa: N803
        """How outlying each row is (n,): higher = more outlying."""
        return self.prediction(X).ood_score.numpy()

    def _shaped(self, values: Tensor) -> Array:
        return (values[:, 0] if self._single else values).numpy()


def _taken_over(tuned: MoLA, final: MoLA) -> MoLA:
    # The posterior of other networks with what was chosen for these: prior precision, temperature, cooling by distance.
    # What is usual was measured on data that no network for all data has left unseen. So it is taken over as a ratio to
    # the training data: held-out data are that much farther than those, and the networks for all data have training
    # data of their own.
    final = final.with_prior_precision(tuned.prior_precision)
    cooling = tuned.cooling
    if cooling.usual is None or not final.has_distances:
        return final.with_temperature(cooling.temperature)
    triples = zip(cooling.usual.scales, _training_scales(tuned), _training_scales(final), strict=True)
    scales = tuple(Scale(*map(_by_ratio, *triple)) for triple in triples)
    return final._with(cooling=replace(cooling, usual=replace(cooling.usual, scales=scales)))


def _training_scales(posterior: MoLA) -> list[Scale]:
    geometries = [one.curvature.geometry for one in posterior.components if one.curvature is not None]
    return [one.training_scale for one in geometries if one is not None]


def _by_ratio(held_out: float, before: float, now: float) -> float:
    # Held-out data relative to training data, for other training data; as it was where features are all alike in
    # training.
    return held_out * now / before if before > 0 and now > 0 else held_out


def _rows(data: Labelled, chosen: Tensor) -> Labelled:
    return Labelled(data.inputs[chosen], data.labels[chosen])


def _moments(rows: Array) -> tuple[Array, Array]:
    # Mean and standard deviation of each column; 1 for one that is constant up to rounding.
    mean, scale = rows.mean(0), rows.std(0)
    return mean, np.where(scale <= ROUNDING * np.abs(mean), 1.0, scale)
