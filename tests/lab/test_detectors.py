"""Detectors against loops and scikit-learn; scores of logits against their definitions."""

import math

import numpy as np
import pytest
import torch
from sklearn.covariance import EmpiricalCovariance
from sklearn.neighbors import NearestNeighbors

from molaplace.errors import DataError
from molaplace.likelihoods import CATEGORICAL
from molaplace.outliers import max_logit_score
from molaplace_lab.detectors import gen_score, mahalanobis, nearest_neighbours, standardised, virtual_logit


def make_features(seed=0, count=300, width=6, classes=4):
    """Correlated clusters, and queries around and far from them."""
    generator = torch.Generator().manual_seed(seed)
    means = 3 * torch.randn(classes, width, generator=generator)
    mixing = torch.randn(width, width, generator=generator)
    labels = torch.randint(classes, (count,), generator=generator)
    features = means[labels] + torch.randn(count, width, generator=generator) @ mixing
    queries = 4 * torch.randn(70, width, generator=generator)
    return features, labels, queries


def loop_mahalanobis(features, labels, queries, relative):
    features = features.numpy()
    labels = labels.numpy()
    queries = queries.numpy()
    means = {c: features[labels == c].mean(0) for c in set(labels.tolist())}
    residuals = np.stack([row - means[c] for row, c in zip(features, labels.tolist(), strict=True)])
    inverse = np.linalg.pinv(sum(np.outer(row, row) for row in residuals) / len(residuals), hermitian=True)
    everything = np.linalg.pinv(np.cov(features.T, bias=True), hermitian=True)
    scores = []
    for query in queries:
        score = min((query - mean) @ inverse @ (query - mean) for mean in means.values())
        if relative:
            score -= (query - features.mean(0)) @ everything @ (query - features.mean(0))
        scores.append(score)
    return np.array(scores)


def fitted(features, labels, **options):
    """Both forms, from features in parts."""
    return dict(zip((False, True), mahalanobis(lambda: features.split(70), labels, **options), strict=True))


@pytest.mark.parametrize("relative", [False, True])
def test_mahalanobis_against_a_loop(relative):
    features, labels, queries = make_features()
    labels = 3 * labels  # class numbers need not be consecutive
    expected = loop_mahalanobis(features, labels, queries, relative)
    np.testing.assert_allclose(fitted(features, labels)[relative](queries).numpy(), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("relative", [False, True])
def test_mahalanobis_is_invariant_to_linear_maps_and_dead_features(relative):
    """Distances have the units of the data; directions that training data never take count for nothing."""
    features, labels, queries = make_features(1)
    generator = torch.Generator().manual_seed(5)
    mixing = torch.randn(6, 9, generator=generator)
    shift = 100 * torch.randn(9, generator=generator)
    off = torch.randn(70, 9, generator=generator) @ (torch.eye(9) - torch.linalg.pinv(mixing) @ mixing)
    scores = fitted(features, labels)[relative](queries)
    mapped = fitted(features @ mixing + shift, labels)[relative](queries @ mixing + shift + off)
    torch.testing.assert_close(mapped, scores, rtol=1e-7, atol=1e-7)


def test_mahalanobis_plus_plus_is_that_of_directions():
    """Mueller and Hein (2025): features of length 1, then the distance to the nearest class mean."""
    features, labels, queries = make_features(6)
    unit, far = (values / values.norm(dim=1, keepdim=True) for values in (features, queries))
    lengths = torch.rand(300, 1, generator=torch.Generator().manual_seed(1)) + 0.1
    scores = fitted(lengths * features, labels, normalised=True)[False](7 * queries)
    expected = loop_mahalanobis(unit, labels, far, relative=False)
    np.testing.assert_allclose(scores.numpy(), expected, rtol=1e-9, atol=1e-9)


def make_head(seed=0, width=6, classes=4):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(classes, width, generator=generator), torch.randn(classes, generator=generator)


def loop_vim(features, weight, bias, queries, dimension):
    """As the authors' script: NumPy and scikit-learn, all data at once."""
    features, weight, bias, queries = (tensor.numpy() for tensor in (features, weight, bias, queries))
    origin = -np.linalg.pinv(weight) @ bias
    covariance = EmpiricalCovariance(assume_centered=True).fit(features - origin).covariance_
    values, vectors = np.linalg.eig(covariance)
    residual = vectors.real.T[np.argsort(-values.real)[dimension:]].T
    virtual = np.linalg.norm((features - origin) @ residual, axis=1)
    alpha = (features @ weight.T + bias).max(axis=1).mean() / virtual.mean()
    logits = queries @ weight.T + bias
    energy = np.array([math.log(sum(math.exp(value) for value in row)) for row in logits])
    return np.linalg.norm((queries - origin) @ residual, axis=1) * alpha - energy


@pytest.mark.parametrize("dimension", [None, 1, 5])
def test_virtual_logits_against_the_authors_script(dimension):
    features, _, queries = make_features(7)
    weight, bias = make_head()
    detector = virtual_logit(lambda: features.split(70), weight, bias, dimension)
    expected = loop_vim(features, weight, bias, queries, 3 if dimension is None else dimension)
    np.testing.assert_allclose(detector(queries).numpy(), expected, rtol=1e-9, atol=1e-9)


def test_sums_are_exact_for_float32_features_far_from_zero():
    features, labels, queries = make_features(3)
    shifted = (features + 1e4).float()
    far = (queries + 1e4).float()
    expected = loop_mahalanobis(shifted.double(), labels, far.double(), relative=False)
    np.testing.assert_allclose(fitted(shifted, labels)[False](far).numpy(), expected, rtol=1e-6)
    assert fitted(features.half(), labels)[False](1000 * queries.half()).isfinite().all()


@pytest.mark.parametrize("k", [1, 7, 50, 300])
def test_nearest_neighbours_against_sklearn(k):
    features, _, queries = make_features()
    unit = features / features.norm(dim=1, keepdim=True)
    reference = NearestNeighbors(n_neighbors=k, algorithm="brute").fit(unit.numpy())
    expected = reference.kneighbors((queries / queries.norm(dim=1, keepdim=True)).numpy())[0][:, -1]
    np.testing.assert_allclose(nearest_neighbours(features, k)(7 * queries).numpy(), expected, atol=1e-9)


def test_an_ensemble_is_indifferent_to_the_units_of_its_members():
    features, labels, queries = make_features()
    first = fitted(features, labels)[False]
    second = nearest_neighbours(features[:, :4])
    held = make_features(9)[0]
    plain = standardised([first, second], [[held, held[:, :4]]])
    scaled = standardised([lambda x: 1000 * first(x) - 5, second], [[held, held[:, :4]]])
    torch.testing.assert_close(scaled([queries, queries[:, :4]]), plain([queries, queries[:, :4]]))
    # On the reference data every member has mean 0 and spread 1.
    reference = torch.stack([first(held), second(held[:, :4])])
    by_hand = ((reference - reference.mean(1, keepdim=True)) / reference.std(1, correction=0, keepdim=True)).mean(0)
    torch.testing.assert_close(plain([held, held[:, :4]]), by_hand)


def test_features_that_cannot_be_compared_are_refused():
    features, _, _ = make_features()
    weight, bias = make_head()
    with pytest.raises(DataError, match="do not vary within the classes"):
        fitted(features[:3], torch.arange(3))
    with pytest.raises(DataError, match="at most 3 of their 6 dimensions"):
        virtual_logit(lambda: [features[:, :3] @ torch.randn(3, 6)], weight, torch.zeros_like(bias))
    with pytest.raises(DataError, match="same score"):
        standardised([lambda x: torch.zeros(len(x))], [[features]])


def test_generalised_entropy_by_its_definition():
    generator = torch.Generator().manual_seed(0)
    probs = torch.softmax(3 * torch.randn(40, 7, generator=generator), 1)
    for exponent, largest in ((0.1, 100), (0.1, 3), (0.5, 7), (1.0, 1)):
        expected = [
            sum((p * (1 - p)) ** exponent for p in sorted(row, reverse=True)[:largest]) for row in probs.tolist()
        ]
        torch.testing.assert_close(gen_score(probs, exponent, largest), torch.tensor(expected, dtype=torch.float64))
    # Single-precision probabilities that round to 1 are still ordered by what the other classes have.
    sure = torch.softmax(torch.tensor([[22.0, 0.0, 0.0], [19.0, 0.0, 0.0]]), 1).float()
    assert (sure[:, 0] == 1).all()
    assert gen_score(sure)[0] < gen_score(sure)[1]


def test_energy_and_largest_logit_by_their_definitions():
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(2, 20, 5, generator=generator)
    expected = [[-math.log(sum(math.exp(value) for value in row)) for row in member] for member in logits.tolist()]
    torch.testing.assert_close(CATEGORICAL.energy(logits), torch.tensor(expected))
    torch.testing.assert_close(max_logit_score(logits), -logits.amax(-1))
    assert CATEGORICAL.energy(torch.tensor([[1e4, 0.0]])) == -1e4
