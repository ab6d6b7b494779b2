"""Laws on random problems: hypothesis draws sizes, data and options, and shrinks what breaks a law."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import molaplace as mola
from molaplace.likelihoods import CATEGORICAL
from molaplace.structures import STRUCTURES as KNOWN
from molaplace.sums import Sums
from tests.conftest import CLOSED_FORM_LINKS, STRUCTURES, make_problem
from tests.library.problems import close, relative

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*have no training data"),
    pytest.mark.filterwarnings("ignore:the same network"),
]

precisions = st.floats(-4, 4).map(lambda power: 10.0**power)
structures = st.sampled_from(STRUCTURES)
links = st.sampled_from(CLOSED_FORM_LINKS)
poolings = st.sampled_from([1.0, 0.7, 0.0])


@st.composite
def problems(draw, most=12):
    """A network and data of any small size, one datum included."""
    return make_problem(
        seed=draw(st.integers(0, 10_000)),
        classes=draw(st.integers(2, 6)),
        width=draw(st.integers(1, 6)),
        count=draw(st.integers(1, most)),
        bias=draw(st.booleans()),
    )


@st.composite
def portions(draw, count):
    """An order of so many rows, and sizes that add up to it; a last portion of one row is drawn often."""
    order = draw(st.permutations(range(count)))
    sizes = []
    left = count
    if count > 1 and draw(st.booleans()):
        sizes = [1]
        left = count - 1
    while left:
        sizes.append(draw(st.integers(1, left)))
        left -= sizes[-1]
    return torch.tensor(order), sizes[::-1]


def relatively_close(first, second, tolerance=1e-10):
    return relative(first, second) <= tolerance


def with_head(problem, weight, bias):
    """The problem's network with another last layer."""
    head = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    with torch.no_grad():
        head.weight.copy_(weight)
        if bias is not None:
            head.bias.copy_(bias)
    return nn.Sequential(*problem.network[:-1], head)


class TestSums:
    @given(data=st.data(), problem=problems(), name=structures)
    def test_do_not_depend_on_portions_order_or_grouping(self, data, problem, name):
        features = problem.features()
        structure = KNOWN[name]()
        logits = features @ problem.weights.T
        order, sizes = data.draw(portions(len(features)))

        def sums(rows):
            curvature = CATEGORICAL.curvature(logits[rows])
            scored = float(CATEGORICAL.log_likelihood(logits[rows], problem.labels[rows]).sum())
            return Sums(structure.sums(features[rows], curvature), len(features[rows]), scored)

        whole = sums(slice(None))
        parts = [sums(rows) for rows in order.split(sizes)]
        left = Sums({})
        right = Sums({})
        for part in parts:
            left = left + part
        for part in reversed(parts):
            right = part + right
        for merged in (left, right):
            assert merged.count == whole.count
            assert abs(merged.log_likelihood - whole.log_likelihood) <= 1e-10 * (1 + abs(whole.log_likelihood))
            for key, tensor in whole.tensors.items():
                assert relatively_close(merged.tensors[key], tensor, 1e-12), key

    @given(data=st.data(), problem=problems(), name=structures, precision=precisions)
    def test_batches_do_not_matter_to_a_fit(self, data, problem, name, precision):
        order, sizes = data.draw(portions(len(problem.inputs)))
        batches = list(zip(problem.inputs[order].split(sizes), problem.labels[order].split(sizes), strict=True))
        whole, parts = (
            mola.fit(problem.network, loader, structure=name, prior_precision=precision, progress=False)
            for loader in ([(problem.inputs, problem.labels)], batches)
        )
        assert close(whole(problem.inputs), parts(problem.inputs), 1e-9)
        assert relatively_close(whole.log_evidence(), parts.log_evidence(), 1e-9)

    @given(problem=problems(), name=structures, copies=st.integers(2, 5), precision=precisions)
    def test_copies_of_the_data_and_of_the_prior_divide_the_variance(self, problem, name, copies, precision):
        once = mola.fit(problem.network, problem.loader, structure=name, prior_precision=precision, progress=False)
        often = mola.fit(
            problem.network, problem.loader * copies, structure=name, prior_precision=copies * precision, progress=False
        )
        first = once.predict(problem.inputs)
        second = often.predict(problem.inputs)
        assert relatively_close(second.logit_variance * copies, first.logit_variance, 1e-9)
        assert close(first.ood_score, second.ood_score, 1e-8 * (1 + float(first.ood_score.abs().max())))

    @given(
        problem=problems(),
        name=st.sampled_from(["kron-exact", "diag", "full"]),
        power=st.integers(-20, 20),
        precision=precisions,
    )
    def test_the_unit_of_the_features_does_not_matter(self, problem, name, power, precision):
        """Features in another unit, weights in its inverse, the prior on the weights accordingly: the same logits and variances."""
        scale = 2.0**power
        body = problem.network[:-1]
        head = problem.network[-1]
        if head.bias is not None:
            head = nn.Linear(head.in_features, head.out_features, bias=False)
        same = nn.Sequential(*body, head)

        class Scaled(nn.Module):
            def forward(self, values):
                return values * scale

        other = nn.Sequential(*body, Scaled(), nn.Linear(head.in_features, head.out_features, bias=False))
        with torch.no_grad():
            other[-1].weight.copy_(head.weight / scale)
        first, second = (
            mola.fit(network, problem.loader, structure=name, prior_precision=prior, progress=False).predict(
                problem.inputs
            )
            for network, prior in ((same, precision), (other, precision * scale**2))
        )
        assert relatively_close(second.logit_variance, first.logit_variance, 1e-8)
        assert close(first.probs, second.probs, 1e-9)


class TestPredictions:
    @given(data=st.data(), problem=problems(), name=structures, link=links, precision=precisions)
    def test_another_order_of_the_classes_is_the_same_prediction(self, data, problem, name, link, precision):
        head = problem.network[-1]
        order = torch.tensor(data.draw(st.permutations(range(head.out_features))))
        bias = None if head.bias is None else head.bias.detach()[order]
        permuted = with_head(problem, head.weight.detach()[order], bias)
        index = order.argsort()
        options = {"structure": name, "link": link, "prior_precision": precision, "progress": False}
        straight = mola.fit(problem.network, problem.loader, **options)
        turned = mola.fit(permuted, [(x, index[y]) for x, y in problem.loader], **options)
        assert close(turned(problem.inputs), straight(problem.inputs)[:, order], 1e-8)
        assert relatively_close(turned.log_evidence(), straight.log_evidence(), 1e-9)

    @given(problem=problems(), name=structures, link=links, order=st.permutations(range(3)), precision=precisions)
    def test_the_order_of_the_components_does_not_matter(self, problem, name, link, order, precision):
        classes = problem.network[-1].out_features
        members = [make_problem(seed=seed, classes=classes, width=2 + seed).network for seed in range(3)]
        weights = [0.2, 0.3, 0.5]
        priors = [precision, 1.0, 2.0]
        options = {"structure": name, "link": link, "progress": False}
        straight = mola.fit(members, problem.loader, weights=weights, prior_precision=priors, **options)
        turned = mola.fit(
            [members[k] for k in order],
            problem.loader,
            weights=[weights[k] for k in order],
            prior_precision=[priors[k] for k in order],
            **options,
        )
        first = straight.predict(problem.inputs)
        second = turned.predict(problem.inputs)
        assert close(first.probs, second.probs)
        assert close(first.ood_score, second.ood_score, 1e-9 * (1 + float(first.ood_score.abs().max())))

    @given(
        problem=problems(),
        name=structures,
        link=st.sampled_from(["probit-centred", "mean-field", "bridge", "mc"]),
        shift=st.floats(-50, 50),
        precision=precisions,
    )
    def test_a_constant_on_all_logits_is_not_seen(self, problem, name, link, shift, precision):
        head = problem.network[-1]
        bias = torch.zeros(head.out_features) if head.bias is None else head.bias.detach()
        first, second = (
            mola.fit(
                with_head(problem, head.weight.detach(), bias + by),
                problem.loader,
                structure=name,
                link=link,
                prior_precision=precision,
                progress=False,
            )(problem.inputs)
            for by in (0.0, shift)
        )
        assert close(first, second, 1e-8)

    @given(
        problem=problems(),
        name=structures,
        precision=precisions,
        far=st.floats(-3, 12).map(lambda power: 10.0**power),
        temperature=st.floats(-1.5, 1.5).map(lambda power: 10.0**power),
        pooling=st.floats(0, 1),
        exponent=st.sampled_from([0.0, 0.5, 3.0]),
        share=st.floats(0, 1),
    )
    def test_confidence_stays_below_its_bound_with_any_scaling(
        self, problem, name, precision, far, temperature, pooling, exponent, share
    ):
        other = make_problem(seed=1, classes=problem.network[-1].out_features, width=5).network
        posterior = mola.fit(
            [problem.network, other],
            problem.loader,
            structure=name,
            prior_precision=precision,
            weights=[share, 1 - share],
            progress=False,
        )
        scaled = posterior.with_temperature(temperature).with_pooling(pooling).with_distance_exponent(exponent)
        inputs = far * problem.inputs
        for made in (posterior, posterior.with_pooling(pooling), scaled):
            assert bool((made(inputs).max(1).values <= made.confidence_bound(inputs) + 1e-12).all())
            lemma = made.confidence_bound(inputs, lemma=True)
            assert lemma.shape == (len(inputs), 2)
            assert bool((lemma >= 1 / problem.network[-1].out_features - 1e-12).all())

    @given(
        problem=problems(),
        name=structures,
        link=links,
        copies=st.integers(2, 4),
        precision=precisions,
        pooling=poolings,
    )
    def test_equal_components_are_one(self, problem, name, link, copies, precision, pooling):
        options = {"structure": name, "link": link, "prior_precision": precision, "progress": False}
        single = mola.fit(problem.network, problem.loader, **options).predict(problem.inputs)
        equal = mola.fit([problem.network] * copies, problem.loader, **options)
        many = equal.with_pooling(pooling).predict(problem.inputs)
        for field in ("probs", "mutual_information", "ood_score"):
            scale = 1 + float(getattr(single, field).abs().max())
            assert close(getattr(single, field), getattr(many, field), 1e-10 * scale), field

    @given(data=st.data(), problem=problems(), name=structures, link=st.sampled_from([*CLOSED_FORM_LINKS, "mc"]))
    def test_batches_do_not_matter_to_a_prediction(self, data, problem, name, link):
        posterior = mola.fit(problem.network, problem.loader, structure=name, link=link, progress=False)
        order, sizes = data.draw(portions(len(problem.inputs)))
        whole = posterior.predict(problem.inputs[order])
        parts = posterior.predict(list(problem.inputs[order].split(sizes)))
        for field in ("probs", "mutual_information", "ood_score"):
            scale = 1 + float(getattr(whole, field).abs().max())
            assert close(getattr(whole, field), getattr(parts, field), 1e-10 * scale), field
        for field in ("logit_mean", "logit_variance"):
            assert relatively_close(getattr(parts, field), getattr(whole, field)), field

    @given(problem=problems(), shares=st.lists(st.integers(1, 20), min_size=2, max_size=4))
    def test_without_spread_the_epistemic_part_is_that_of_the_weighted_members(self, problem, shares):
        classes = problem.network[-1].out_features
        members = [make_problem(seed=seed, classes=classes).network for seed in range(len(shares))]
        weights = torch.tensor(shares, dtype=torch.float64) / sum(shares)
        probs = torch.stack([torch.softmax(member(problem.inputs), 1) for member in members]).detach()
        within = torch.einsum("k,kn->n", weights, torch.special.entr(probs).sum(2))
        total = torch.special.entr(torch.einsum("k,knc->nc", weights, probs)).sum(1)
        plain = mola.ensemble(members).with_weights(weights).predict(problem.inputs)
        sure = mola.fit(members, problem.loader, weights=weights, prior_precision=1e30, progress=False).predict(
            problem.inputs
        )
        for prediction in (plain, sure):
            assert close(prediction.entropy, total, 1e-9)
            assert close(prediction.mutual_information, total - within, 1e-9)
