"""Detectors against loops and scikit-learn; scores of logits against their definitions."""

import math

import numpy as np
import pytest
import torch
from sklearn.covariance import EmpiricalCovariance
from sklearn.neighbors import NearestNeighbors

from mola.compare.answers import gen_score
from mola.errors import DataError, OptionError
from mola.lab.detectors import DetectorEnsemble, Mahalanobis, NearestNeighbours, VirtualLogit
from mola.outliers import energy_score, max_logit_score


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
    features, labels, queries = features.numpy(), labels.numpy(), queries.numpy()
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


@pytest.mark.parametrize("relative", [False, True])
def test_mahalanobis_against_a_loop(relative):
    features, labels, queries = make_features()
    labels = 3 * labels  # class numbers need not be consecutive
    parts = list(features.split(70))
    detector = Mahalanobis.fit(lambda: parts, labels, relative=relative)
    expected = loop_mahalanobis(features, labels, queries, relative)
    np.testing.assert_allclose(detector(queries).numpy(), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("relative", [False, True])
def test_mahalanobis_is_invariant_to_linear_maps(relative):
    """Distances have the units of the data: any invertible affine map of the features changes nothing."""
    features, labels, queries = make_features(1)
    generator = torch.Generator().manual_seed(5)
    mixing, shift = torch.randn(6, 6, generator=generator), 100 * torch.randn(6, generator=generator)
    ours = Mahalanobis.fit(features, labels, relative=relative)(queries)
    mapped = Mahalanobis.fit(features @ mixing + shift, labels, relative=relative)(queries @ mixing + shift)
    torch.testing.assert_close(mapped, ours, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("relative", [False, True])
def test_dead_features_change_nothing(relative):
    features, labels, queries = make_features(2)
    ours = Mahalanobis.fit(features, labels, relative=relative)(queries)

    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(6, 5, generator=generator)

    def padded(values, off):
        """Two constant columns and five that follow from the others, left by `off` as training data never leave them."""
        never = torch.cat([-off @ mixing.T, off], 1)  # orthogonal to every (value, value @ mixing)
        constant = 0.1 + off[:, :2]
        return torch.cat([torch.cat([values, values @ mixing], 1) + never, constant], 1)

    detector = Mahalanobis.fit(padded(features, torch.zeros(300, 5)), labels, relative=relative)
    for off in (torch.zeros(70, 5), torch.randn(70, 5, generator=generator)):
        torch.testing.assert_close(detector(padded(queries, off)), ours, rtol=1e-8, atol=1e-8)


def test_mahalanobis_plus_plus_is_that_of_directions():
    """Mueller and Hein (2025): features of length 1, then the distance to the nearest class mean."""
    features, labels, queries = make_features(6)
    unit, far = (values / values.norm(dim=1, keepdim=True) for values in (features, queries))
    detector = Mahalanobis.fit(features, labels, normalised=True)
    np.testing.assert_allclose(
        detector(queries).numpy(), loop_mahalanobis(unit, labels, far, relative=False), rtol=1e-9, atol=1e-9
    )
    # Lengths do not matter, those of the training data included.
    lengths = torch.rand(300, 1, generator=torch.Generator().manual_seed(1)) + 0.1
    torch.testing.assert_close(
        Mahalanobis.fit(lengths * features, labels, normalised=True)(7 * queries), detector(queries)
    )


def make_head(seed=0, width=6, classes=4):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(classes, width, generator=generator), torch.randn(classes, generator=generator)


def loop_vim(features, weight, bias, queries, dimension):
    """As the authors' script: NumPy and scikit-learn, all data at once."""
    features, weight, bias, queries = (one.numpy() for one in (features, weight, bias, queries))
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
    detector = VirtualLogit.fit(features, weight, bias, dimension=dimension)
    expected = loop_vim(features, weight, bias, queries, 3 if dimension is None else dimension)
    np.testing.assert_allclose(detector(queries).numpy(), expected, rtol=1e-9, atol=1e-9)
    # A function of the features as the head sees them: turning both changes nothing.
    turn = torch.linalg.qr(torch.randn(6, 6, generator=torch.Generator().manual_seed(2)))[0]
    turned = VirtualLogit.fit(features @ turn, weight @ turn, bias, dimension=dimension)
    torch.testing.assert_close(turned(queries @ turn), detector(queries), rtol=1e-8, atol=1e-8)


def test_sums_are_exact_for_float32_features_far_from_zero():
    features, labels, queries = make_features(3)
    shifted, far = (features + 1e4).float(), (queries + 1e4).float()
    expected = loop_mahalanobis(shifted.double(), labels, far.double(), relative=False)
    scores = Mahalanobis.fit(shifted, labels)(far)
    np.testing.assert_allclose(scores.numpy(), expected, rtol=1e-6)
    assert Mahalanobis.fit(features.half(), labels)(1000 * queries.half()).isfinite().all()


@pytest.mark.parametrize("k", [1, 7, 50, 300])
def test_nearest_neighbours_against_sklearn(k):
    features, labels, queries = make_features()
    unit = features / features.norm(dim=1, keepdim=True)
    theirs = NearestNeighbors(n_neighbors=k, algorithm="brute").fit(unit.numpy())
    expected = theirs.kneighbors((queries / queries.norm(dim=1, keepdim=True)).numpy())[0][:, -1]
    detector = NearestNeighbours.fit(features, labels, k=k)
    np.testing.assert_allclose(detector(queries).numpy(), expected, atol=1e-9)
    # Lengths do not matter.
    np.testing.assert_allclose(detector(7 * queries).numpy(), expected, atol=1e-9)


def test_what_cannot_be_fitted_is_refused():
    features, _, _ = make_features()
    with pytest.raises(DataError, match="do not vary within the classes"):
        Mahalanobis.fit(features[:3], torch.arange(3))
    with pytest.raises(OptionError, match="k must be between 1 and the 40 training points, got 50"):
        NearestNeighbours.fit(features[:40])
    with pytest.raises(OptionError, match="got 0"):
        NearestNeighbours.fit(features, k=0)


def test_an_ensemble_is_indifferent_to_the_units_of_its_members():
    features, labels, queries = make_features()
    first, second = Mahalanobis.fit(features, labels), NearestNeighbours.fit(features[:, :4])
    held = make_features(9)[0]
    plain = DetectorEnsemble.fit([first, second], [[held, held[:, :4]]])
    scaled = DetectorEnsemble.fit([lambda x: 1000 * first(x) - 5, second], [[held, held[:, :4]]])
    scores = plain([queries, queries[:, :4]])
    torch.testing.assert_close(scaled([queries, queries[:, :4]]), scores)
    # On the reference data every member has mean 0 and spread 1.
    reference = torch.stack([first(held), second(held[:, :4])])
    by_hand = ((reference - reference.mean(1, keepdim=True)) / reference.std(1, correction=0, keepdim=True)).mean(0)
    torch.testing.assert_close(plain([held, held[:, :4]]), by_hand)
    with pytest.raises(DataError, match="member 1 gives all 300 reference data the same score"):
        DetectorEnsemble.fit([first, lambda x: torch.zeros(len(x))], [[features, features]])


def test_generalised_entropy_by_its_definition():
    generator = torch.Generator().manual_seed(0)
    probs = torch.softmax(3 * torch.randn(40, 7, generator=generator), 1)
    for exponent, largest in ((0.1, 100), (0.1, 3), (0.5, 7), (1.0, 1)):
        expected = [
            sum((p * (1 - p)) ** exponent for p in sorted(row, reverse=True)[:largest]) for row in probs.tolist()
        ]
        torch.testing.assert_close(gen_score(probs, exponent, largest), torch.tensor(expected, dtype=torch.float64))
    # With exponent 1 over all classes it is 1 - sum p^2.
    torch.testing.assert_close(gen_score(probs, 1.0), 1 - probs.square().sum(1))
    # Single-precision probabilities that round to 1 are still ordered by what the other classes have.
    sure = torch.softmax(torch.tensor([[22.0, 0.0, 0.0], [19.0, 0.0, 0.0]]), 1).float()
    assert (sure[:, 0] == 1).all()
    assert gen_score(sure)[0] < gen_score(sure)[1]


def test_energy_and_largest_logit_by_their_definitions():
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(2, 20, 5, generator=generator)
    for temperature in (0.5, 1.0, 4.0):
        expected = [
            [-temperature * math.log(sum(math.exp(value / temperature) for value in row)) for row in member]
            for member in logits.tolist()
        ]
        torch.testing.assert_close(energy_score(logits, temperature), torch.tensor(expected))
    torch.testing.assert_close(max_logit_score(logits), -logits.amax(-1))
    torch.testing.assert_close(energy_score(logits, 1e-3), max_logit_score(logits), atol=1e-2, rtol=0)
    # The energy is what the probabilities do not see: log p_c = f_c + energy.
    torch.testing.assert_close(torch.log_softmax(logits, -1), logits + energy_score(logits)[..., None])
    assert energy_score(torch.tensor([[1e4, 0.0]])) == -1e4
    with pytest.raises(OptionError, match="temperature must be positive"):
        energy_score(logits, 0.0)
