"""A mixture of last-layer Laplace approximations by the formulas of the paper: numpy, float64, dense, one candidate at a time.

It knows nothing of the library: it is given features (n, P) with the constant 1 where there is a bias, and logits, as the
networks make them. The class-common direction, in which the softmax has no curvature, is kept apart from the contrasts:
the prior alone says what its variance is, which may be larger by twenty orders of magnitude.

`shaken` gives the same mixture with every number moved by some roundings: how far a result then moves is what rounding explains.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

import numpy as np

Array = np.ndarray
TINY = np.finfo(np.float64).tiny
EPS = np.finfo(np.float64).eps
RIDGE = 1e-10
"""Of the outlier score, in largest eigenvalues of the features' second moment."""


def softmax(logits: Array) -> Array:
    raised = np.exp(logits - logits.max(-1, keepdims=True))
    return raised / raised.sum(-1, keepdims=True)


def log_sum_exp(values: Array, axis: int) -> Array:
    top = values.max(axis, keepdims=True)
    return np.squeeze(top, axis) + np.log(np.exp(values - top).sum(axis))


@cache
def contrasts(classes: int) -> Array:
    """Any orthonormal basis (C, C-1) of the vectors that sum to 0."""
    centring = np.eye(classes) - 1 / classes
    return np.linalg.svd(centring)[0][:, : classes - 1]


class Noise:
    """Standard normals, or the same with the other sign: what only one sign shows, one of the two shows."""

    def __init__(self, seed: int, sign: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.sign = sign

    def standard_normal(self, shape: tuple[int, ...]) -> Array:
        return self.sign * self.rng.standard_normal(shape)


def noises(rng: np.random.Generator, pairs: int) -> list[Noise]:
    """So many pairs of noise, each with both signs."""
    seeds = rng.integers(2**31, size=pairs).tolist()
    return [Noise(seed, sign) for seed in seeds for sign in (1, -1)]


def symmetric_noise(rng: Noise, size: int) -> Array:
    noise = rng.standard_normal((size, size))
    return (noise + noise.T) / 2


def moved(rng: Noise | None, matrix: Array, by: float = 4 * EPS) -> Array:
    """A positive semi-definite matrix as another order of summation would have it."""
    if rng is None:
        return matrix
    return matrix + by * np.abs(matrix).max() * symmetric_noise(rng, len(matrix))


def spectrum(matrix: Array) -> tuple[Array, Array]:
    scale = np.abs(matrix).max()
    if scale == 0:
        return np.zeros(len(matrix)), np.eye(len(matrix))
    values, vectors = np.linalg.eigh(matrix / scale)
    return np.maximum(values, 0) * scale, vectors


class NoAnswerError(Exception):
    """The reference itself does not converge here."""


def same_diagonal(diagonal: Array) -> Array:
    """The softmax's curvature `diag(w) - w w' / sum(w)` with this diagonal, by repetition until w does not change.

    Raises:
        NoAnswerError: near a star, where the repetition is slow.
    """
    if diagonal.max() <= 0:
        return np.zeros((len(diagonal), len(diagonal)))
    scale = diagonal.max()
    diagonal = diagonal / scale
    w = diagonal.copy()
    for _ in range(4000):
        with np.errstate(divide="ignore", invalid="ignore"):
            before = w
            w = (w + diagonal / (1 - w / w.sum())) / 2
        if not np.isfinite(w).all():
            raise NoAnswerError
        if np.abs(before - w).max() <= 4 * EPS * w.max():
            coupled = np.outer(w, w) / w.sum() * scale
            np.fill_diagonal(coupled, 0)
            return np.diag(coupled.sum(1)) - coupled
    raise NoAnswerError


@dataclass
class Moments:
    """Gaussian over the logits of n data: mean (n, C), covariance of the contrasts (n, C, C), and the whole variance (n, C)."""

    mean: Array
    contrast: Array
    variance: Array

    def shaken(self, rng: Noise, eps: float) -> Moments:
        n, classes = self.mean.shape
        deviation = np.sqrt(np.maximum(np.einsum("ncc->nc", self.contrast), 0))
        noise = rng.standard_normal((n, classes, classes))
        noise = (noise + noise.transpose(0, 2, 1)) / 2
        return Moments(
            self.mean * (1 + eps * rng.standard_normal(self.mean.shape)),
            self.contrast + eps * noise * deviation[:, :, None] * deviation[:, None, :],
            self.variance * (1 + eps * rng.standard_normal(self.variance.shape)),
        )


@dataclass(frozen=True)
class Rounding:
    """Relative sizes: of a network's features and of its logits, and of the arithmetic on them."""

    features: float
    logits: float
    arithmetic: float


@dataclass
class Component:
    """One network's last layer under one structure."""

    structure: str
    weights: Array
    """(C, P)"""
    features: Array
    """(N, P), of the training data."""
    logits: Array
    """(N, C)"""
    labels: Array | None
    precision: float
    rng: Noise | None = field(default=None, repr=False)
    rounding: Rounding = Rounding(0.0, 0.0, 0.0)

    def __post_init__(self) -> None:
        self.count, self.classes, self.width = len(self.features), *self.weights.shape
        self.basis = contrasts(self.classes)

    def shaken(self, rng: Noise, rounding: Rounding) -> Component:
        """The same with every number moved by some roundings."""
        features = self._moved_features(self.features, rng, rounding.features)
        logits = self._moved_logits(self.features, self.logits, rng, rounding.logits)
        return replace(self, features=features, logits=logits, rng=rng, rounding=rounding)

    def _moved_features(self, features: Array, rng: Noise, eps: float) -> Array:
        return features + eps * np.linalg.norm(features, axis=1, keepdims=True) * rng.standard_normal(features.shape)

    def _moved_logits(self, features: Array, logits: Array, rng: Noise, eps: float) -> Array:
        """A product rounds by what it adds up, not by what is left of it."""
        return logits + eps * (np.abs(features) @ np.abs(self.weights).T) * rng.standard_normal(logits.shape)

    def at(self, precision: float) -> Component:
        other = replace(self, precision=precision)
        for name in ("probs", "output", "gram", "seen", "known", "decomposed", "diagonal"):
            if name in self.__dict__:
                other.__dict__[name] = self.__dict__[name]  # free of the prior
        return other

    @cached_property
    def probs(self) -> Array:
        return softmax(self.logits)

    @cached_property
    def output(self) -> Array:
        """A (C, C), the mean of `diag(p) - p p'`: a Laplacian, so that its diagonal is the sum of what is beside it."""
        coupled = self.probs.T @ self.probs / self.count
        np.fill_diagonal(coupled, 0)
        if self.rng is not None:
            coupled = coupled * (1 + 4 * EPS * symmetric_noise(self.rng, self.classes))
        return np.diag(coupled.sum(1)) - coupled

    @cached_property
    def gram(self) -> Array:
        """B (P, P)."""
        return moved(self.rng, self.features.T @ self.features / self.count)

    @cached_property
    def seen(self) -> tuple[Array, Array]:
        """Eigenvalues of A among the contrasts, and their directions (C, C-1)."""
        output = same_diagonal(np.diag(self.output).copy()) if self.structure == "kron-diag" else self.output
        values, vectors = spectrum(moved(self.rng, self.basis.T @ output @ self.basis))
        return values, self.basis @ vectors

    @cached_property
    def known(self) -> tuple[Array, Array]:
        """Eigenvalues and eigenvectors of B."""
        return spectrum(self.gram)

    @cached_property
    def decomposed(self) -> tuple[Array, Array]:
        """Eigenvalues (M,) and vectors (C, P, M) of the Hessian among the contrasts."""
        n = self.count
        classes = self.classes
        width = self.width
        coupled = self.probs[:, :, None] * self.probs[:, None, :] * (1 - np.eye(classes))
        curvature = np.einsum("nij->ni", coupled)[:, :, None] * np.eye(classes) - coupled
        products = self.features[:, :, None] * self.features[:, None, :]
        summed = curvature.reshape(n, -1).T @ products.reshape(n, -1)
        hessian = summed.reshape(classes, classes, width, width).transpose(0, 2, 1, 3)
        size = (self.classes - 1) * self.width
        reduced = np.einsum("ir,ipjq,js->rpsq", self.basis, hessian, self.basis, optimize=True).reshape(size, size)
        values, vectors = spectrum(moved(self.rng, reduced))
        return values, np.einsum("ir,rpm->ipm", self.basis, vectors.reshape(self.classes - 1, self.width, size))

    @cached_property
    def diagonal(self) -> Array:
        """Of the Hessian (C, P)."""
        others = self.probs @ (1 - np.eye(self.classes))  # 1 - p would lose what little is left
        if self.rng is not None:
            others = np.abs(
                others + 4 * EPS * self.rng.standard_normal(others.shape)
            )  # but who sums them all may lose it
        return (self.probs * others).T @ self.features**2

    def moments(self, features: Array, logits: Array) -> Moments:
        prior = self.precision
        n = len(features)
        if self.rng is not None:
            logits = self._moved_logits(features, logits, self.rng, self.rounding.logits)
            features = self._moved_features(features, self.rng, self.rounding.features + self.rounding.arithmetic)
        if self.structure == "diag":
            variance = features**2 @ (1 / (self.diagonal + prior)).T
            centring = np.eye(self.classes) - 1 / self.classes
            contrast = np.einsum("ij,nj,jk->nik", centring, variance, centring)
            actual = Moments(logits, contrast, variance)
        elif self.structure == "full":
            values, vectors = self.decomposed
            root = np.einsum("np,cpm->ncm", features, vectors) / np.sqrt(values + prior)
            contrast = root @ root.transpose(0, 2, 1)
            if (
                self.rng is not None
            ):  # who sums up the covariance of the weights first has entries of 1 / prior that cancel
                size = EPS * (features**2).sum(1) / (values.min() + prior)
                contrast = contrast + size[:, None, None] * symmetric_noise(self.rng, self.classes)
            actual = self._with_common(logits, contrast, (features**2).sum(1) / prior)
        elif self.structure == "kron-exact":
            a, left = self.seen
            b, right = self.known
            spread = (features @ right) ** 2 @ (1 / (self.count * a[:, None] * b + prior)).T
            contrast = np.einsum("ir,nr,jr->nij", left, spread, left)
            actual = self._with_common(logits, contrast, (features**2).sum(1) / prior)
        else:
            a, left = self.seen
            b, right = self.known
            length = (features @ right) ** 2 @ (1 / (math.sqrt(self.count) * b + math.sqrt(prior)))
            cls = (left / (math.sqrt(self.count) * a + math.sqrt(prior))) @ left.T
            actual = self._with_common(logits, length[:, None, None] * cls, length / math.sqrt(prior))
        assert actual.mean.shape == (n, self.classes)
        return actual if self.rng is None else actual.shaken(self.rng, self.rounding.arithmetic)

    def _with_common(self, logits: Array, contrast: Array, common: Array) -> Moments:
        return Moments(logits, contrast, np.einsum("ncc->nc", contrast) + common[:, None] / self.classes)

    def length(self, features: Array) -> Array:
        """Of feature vectors, relative to the training features: `sqrt(phi' B^-1 phi)`."""
        if self.rng is not None:
            features = self._moved_features(features, self.rng, self.rounding.features + self.rounding.arithmetic)
        if self.structure == "diag":
            b = (self.features**2).mean(0)
            squares = features**2
        else:
            b = self.known[0]
            squares = (features @ self.known[1]) ** 2
        return np.sqrt(squares @ (1 / (b + RIDGE * max(b.max(), TINY))))

    def log_determinant(self) -> float:
        prior = self.precision
        root = math.sqrt(self.precision)
        if self.structure == "diag":
            return float(np.log(self.diagonal + prior).sum())
        if self.structure == "full":
            return float(np.log(self.decomposed[0] + prior).sum() + self.width * math.log(prior))
        a, _ = self.seen
        b, _ = self.known
        if self.structure == "kron-exact":
            return float(np.log(self.count * a[:, None] * b + prior).sum() + self.width * math.log(prior))
        size = math.sqrt(self.count)
        left = np.log(size * a + root).sum() + math.log(root)
        return float(self.width * left + self.classes * np.log(size * b + root).sum())

    def log_evidence(self) -> float:
        assert self.labels is not None
        logits_of_labels = self.logits[np.arange(self.count), self.labels]
        fit = (logits_of_labels - log_sum_exp(self.logits, 1)).sum()
        prior = self.weights.size * math.log(self.precision) - self.precision * (self.weights**2).sum()
        return float(fit + (prior - self.log_determinant()) / 2)


# --- links --------------------------------------------------------------------------------------------------------------


def cool(mean: Array, variance: Array) -> Array:
    return mean / np.sqrt(1 + math.pi / 8 * variance)


def probit(moments: Moments) -> Array:
    return softmax(cool(moments.mean, moments.variance))


def probit_centred(moments: Moments) -> Array:
    centred = moments.mean - moments.mean.mean(1, keepdims=True)
    return softmax(cool(centred, np.maximum(np.einsum("ncc->nc", moments.contrast), 0)))


def mean_field(moments: Moments) -> Array:
    variances = np.einsum("ncc->nc", moments.contrast)
    of_difference = np.maximum(variances[:, :, None] + variances[:, None, :] - 2 * moments.contrast, 0)
    margins = cool(moments.mean[:, :, None] - moments.mean[:, None, :], of_difference)
    return softmax(-log_sum_exp(-margins, 2))


def bridge(moments: Moments) -> Array:
    classes = moments.mean.shape[1]
    mean = moments.mean - moments.mean.mean(1, keepdims=True)
    variances = np.maximum(np.einsum("ncc->nc", moments.contrast), 0)
    if (variances == 0).any():
        raise NoAnswerError  # 0 / 0
    logs = mean + log_sum_exp(-mean, 1)[:, None] - 2 * math.log(classes)
    if classes > 2:
        logs = np.logaddexp(math.log(1 - 2 / classes), logs)
    return softmax(logs - np.log(variances))


LINKS = {"probit": probit, "probit-centred": probit_centred, "mean-field": mean_field, "bridge": bridge}


# --- mixtures -----------------------------------------------------------------------------------------------------------


@dataclass
class Mixture:
    """K components and their weights."""

    components: Sequence[Component]
    weights: Array | str
    link: str

    @cached_property
    def mixing(self) -> Array:
        if isinstance(self.weights, str):
            if self.weights == "uniform":
                return np.full(len(self.components), 1 / len(self.components))
            return softmax(np.array([component.log_evidence() for component in self.components]))
        return np.asarray(self.weights, dtype=np.float64)

    def shaken(self, rng: Noise, rounding: Rounding) -> Mixture:
        return Mixture([component.shaken(rng, rounding) for component in self.components], self.weights, self.link)

    def at(self, precision: float) -> Mixture:
        return Mixture([component.at(precision) for component in self.components], self.weights, self.link)

    def members(self, features: Sequence[Array], logits: Sequence[Array]) -> Array:
        """Probabilities (K, n, C)."""
        moments = [component.moments(*pair) for component, *pair in zip(self.components, features, logits, strict=True)]
        return np.stack([LINKS[self.link](moment) for moment in moments])

    def probabilities(self, features: Sequence[Array], logits: Sequence[Array]) -> Array:
        return np.einsum("k,knc->nc", self.mixing, self.members(features, logits))

    def variance(self, features: Sequence[Array], logits: Sequence[Array]) -> Array:
        return np.stack([c.moments(*pair).variance for c, *pair in zip(self.components, features, logits, strict=True)])

    def outlier_score(self, features: Sequence[Array], logits: Sequence[Array]) -> Array:
        """Far-field limit as a score: minus the largest centred logit over the feature's length, mixed."""
        total = np.zeros_like(logits[0])
        for weight, component, phi, mean in zip(self.mixing, self.components, features, logits, strict=True):
            if component.rng is not None:
                eps = component.rounding.logits + component.rounding.arithmetic
                mean = component._moved_logits(phi, mean, component.rng, eps)
            length = component.length(phi)[:, None]
            centred = mean - mean.mean(1, keepdims=True)
            total += weight * np.divide(centred, length, out=np.zeros_like(centred), where=length > 0)
        return -total.max(1)

    def log_evidence(self) -> Array:
        return np.array([component.log_evidence() for component in self.components])

    def scores(self, features: Sequence[Array], logits: Sequence[Array], labels: Array) -> dict[str, float]:
        """What tuning reads off a candidate."""
        probs = self.probabilities(features, logits)
        confidence = probs.max(1)
        probs_of_labels = probs[np.arange(len(labels)), labels]
        hot = np.eye(probs.shape[1])[labels]
        return {
            "confidence": confidence.mean(),
            "nll": -np.log(np.maximum(probs_of_labels, TINY)).mean(),
            "brier": ((probs - hot) ** 2).sum(1).mean(),
            "ece": calibration_error(confidence, probs.argmax(1) == labels),
        }


def calibration_error(confidence: Array, right: Array, bins: int = 15) -> float:
    total = 0.0
    for low in range(bins):
        inside = (confidence > low / bins) & (confidence <= (low + 1) / bins)
        total += abs((confidence[inside] - right[inside]).sum())
    return total / len(confidence)
