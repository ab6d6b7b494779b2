"""Sums and scores do not depend on how rows are portioned: 13 rows in one go, and in portions of which the last has one row."""

import itertools

import pytest
import torch

import mola
from mola.lab.detectors import Mahalanobis, NearestNeighbours
from tests.conftest import STRUCTURES, make_problem

COUNT, CLASSES, WIDTH = 13, 5, 6
FEATURES = WIDTH + 1

SIZES = (1, 4, 12)
"""13 is one more than a multiple of each: 13 portions of one row, some whole ones and one row, one whole one and one row."""

GRID = (0.01, 0.5, 20.0)


class Curve:
    """A rule that keeps the scores of a few candidates."""

    def choose(self, problem, val_loader):
        curve = problem.curve(problem.read(val_loader, "validation loader", True), GRID)
        return mola.Tuning(
            "curve", (1.0,) * len(problem.spectra), {key: tuple(found.tolist()) for key, found in curve.items()}
        )


def fitted(structure="kron", size=COUNT, **options):
    problems = [make_problem(seed=seed, count=COUNT, classes=CLASSES, width=WIDTH) for seed in (0, 1)]
    loader = problems[0].batches(size)
    return mola.fit(
        [one.network for one in problems], loader, structure=structure, progress=False, **options
    ), problems[0]


def sums(posterior):
    found = []
    for component in posterior.components:
        factors = component.curvature.factors
        found += [torch.tensor([float(factors.count), factors.log_likelihood]), *factors.tensors().values()]
    return found


def same(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.as_tensor(one), torch.as_tensor(other), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("structure", STRUCTURES)
class TestTrainingSums:
    def test_batches_divided(self, structure, size, monkeypatch):
        """A batch that is larger than what is summed at once."""
        expected = sums(fitted(structure)[0])
        kind = type(mola.laplace.as_structure(structure))
        monkeypatch.setattr(kind, "rows", lambda self, features, outputs: size)
        same(sums(fitted(structure)[0]), expected)

    def test_batches_gathered(self, structure, size, monkeypatch):
        """Batches whose last has one row, gathered and as they come."""
        expected = sums(fitted(structure)[0])
        for rows in (5, size, 2 * size):
            kind = type(mola.laplace.as_structure(structure))
            monkeypatch.setattr(kind, "rows", lambda self, features, outputs, rows=rows: rows)
            same(sums(fitted(structure, size)[0]), expected)

    def test_inside_a_structure(self, structure, size, monkeypatch):
        expected = sums(fitted(structure)[0])
        monkeypatch.setattr("mola.laplace.diag.SQUARED", size)
        monkeypatch.setattr("mola.laplace.full.ROW_BYTES", 8 * CLASSES * FEATURES * size)
        same(sums(fitted(structure)[0]), expected)


@pytest.mark.parametrize("block", [1, 3, 6])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_blocks_of_features_of_which_the_last_has_one(structure, block, monkeypatch):
    """7 features are one more than a multiple of each."""
    posterior, problem = fitted(structure)
    expected = posterior.predict(problem.inputs).computed()
    monkeypatch.setattr("mola.laplace.symmetric.BLOCK", block)
    mola.laplace.symmetric._size_of.cache_clear()
    try:
        found = fitted(structure)[0].predict(problem.inputs)
        same([found.probs, found.ood_score], [expected.probs, expected.ood_score])
    finally:
        mola.laplace.symmetric._size_of.cache_clear()


@pytest.mark.parametrize("link", ["probit", "probit-centered", "mean-field", "bridge", "mc"])
def test_tuning(structure, link, monkeypatch):
    posterior, problem = fitted(structure, link=link)
    expected = posterior.tune(problem.batches(5), Curve(), progress=False).tuning.curve
    projected = sum(component.curvature.spectrum.projection_size for component in posterior.components)
    widths = sum(component.curvature.spectrum.features for component in posterior.components)
    by_candidate = posterior.link.needs_covariance
    for size, candidates in itertools.product(SIZES, (1, 2)):  # the last of three by itself, too
        monkeypatch.setattr("mola.tuning.candidates.PROJECTED_AT_ONCE", size * (widths if by_candidate else projected))
        monkeypatch.setattr("mola.tuning.candidates.LOGITS_AT_ONCE", max(size, candidates) * size * CLASSES)
        monkeypatch.setattr("mola.tuning.candidates.WEIGHTS_AT_ONCE", candidates * CLASSES * FEATURES)
        found = posterior.tune(problem.batches(5), Curve(), progress=False).tuning.curve
        assert found.keys() == expected.keys()
        same([found[key] for key in found], [expected[key] for key in found])


@pytest.mark.parametrize("size", SIZES)
def test_pairs_of_classes(structure, size, monkeypatch):
    posterior, problem = fitted(structure, link="mean-field")
    expected = [posterior(problem.inputs), posterior(1e4 * problem.inputs)]
    monkeypatch.setattr("mola.links.PAIRS_AT_ONCE", size * CLASSES**2)
    same([posterior(problem.inputs), posterior(1e4 * problem.inputs)], expected)
    for classes in (5, 2, 1):  # groups of classes: one, and of 2, 2 and 1
        monkeypatch.setattr("mola.links.CLASSES_AT_ONCE", classes)
        for at_once in (2**23, size * CLASSES**2):
            monkeypatch.setattr("mola.links.PAIRS_AT_ONCE", at_once)
            for rows in (1, size):
                monkeypatch.setattr("mola.links.PAIRS_IN_CACHE", rows * min(classes, CLASSES) ** 2)
                same([posterior(problem.inputs)], expected[:1])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("over", ["logits", "weights"])
def test_draws(structure, over, size, monkeypatch):
    posterior, problem = fitted(structure, link=mola.MonteCarlo(COUNT, over))
    expected = posterior(problem.inputs)
    monkeypatch.setattr("mola.laplace.moments.DRAWS_AT_ONCE", size * COUNT * CLASSES)
    # Weights that are drawn at once are one draw of torch's, whose numbers depend on how many there are: all, with size 12.
    if over == "logits" or size == 12:
        same([posterior(problem.inputs)], [expected])
    for at_once in (size * COUNT * CLASSES, size * FEATURES * CLASSES):
        monkeypatch.setattr("mola.laplace.moments.DRAWS_AT_ONCE", at_once)
        for one in posterior._moments(problem.inputs):
            drawn = list(one.draws(COUNT, torch.Generator().manual_seed(0), over))
            assert sum(part.shape[1] for part in drawn) == COUNT


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "options", [{"structure": "kron"}, {"structure": "diag"}, {"structure": "full"}, {"subnetwork": 9}], ids=str
)
def test_whole_networks(options, size, monkeypatch):
    problem = make_problem(count=COUNT, classes=CLASSES, width=WIDTH)

    def said():
        posterior = mola.fit_whole(
            problem.network, problem.batches(COUNT), link="mean-field", progress=False, **options
        )
        curve = posterior.tune(problem.batches(COUNT), Curve(), progress=False).tuning.curve
        return [posterior(problem.inputs), posterior.log_evidence(), *(curve[key] for key in sorted(curve))]

    expected = said()
    monkeypatch.setattr("mola.whole.jacobians.numbers", lambda *_: 1)
    monkeypatch.setattr("mola.whole.jacobians.NUMBERS_AT_ONCE", size)
    same(said(), expected)


@pytest.mark.parametrize("size", SIZES)
def test_detectors(size, monkeypatch):
    problem = make_problem(count=COUNT)
    features, others = problem.inputs, torch.randn(COUNT, 3)
    fit = [
        lambda: Mahalanobis.fit(features, problem.labels)(others),
        lambda: Mahalanobis.fit(features, problem.labels, relative=True)(others),
        lambda: NearestNeighbours.fit(features, k=3)(others),
    ]
    expected = [one() for one in fit]
    monkeypatch.setattr("mola.lab.detectors._rows", lambda values, _: torch.split(values, size))
    monkeypatch.setattr("mola.lab.detectors.BANK_AT_ONCE", size)
    same([one() for one in fit], expected)


@pytest.mark.parametrize("size", SIZES)
def test_temperature(size, monkeypatch):
    labels = torch.arange(COUNT) % CLASSES
    members = torch.randn(2, COUNT, CLASSES) + torch.nn.functional.one_hot(labels, CLASSES)
    expected = mola.fit_temperature(members, labels)
    monkeypatch.setattr("mola.baselines.temperature.AT_ONCE", size * 2 * CLASSES)
    same([mola.fit_temperature(members, labels)], [expected])
