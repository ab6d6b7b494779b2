"""Laws of predicting: what a batch is, what is computed when, and that nobody else notices a prediction being made."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import pickle
import random
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import mola
from mola.export import Exported
from mola.export.graph import Signature
from mola.links import LINKS
from mola.tuning.candidates import read_held_out
from mola.uncertainty import SPREAD_DRAWS, entropy_of_all, epistemic_share, spread_draws
from tests.closeness import assert_close
from tests.conftest import STRUCTURES

pytestmark = pytest.mark.filterwarnings("ignore::mola.errors.MolaWarning")

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(24, 5, generator=GENERATOR, dtype=torch.float64)
Y = torch.arange(24) % 3
LOADER = [(X[:10], Y[:10]), (X[10:], Y[10:])]
FIELDS = ("probs", "mutual_information", "ood_score", "logit_mean", "logit_variance")


def network(seed=0, width=6, classes=3):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, width), nn.ReLU(), nn.Linear(width, classes))


def pair():
    return [network(0), network(1)]


class WithIds(nn.Module):
    """Two inputs: a vector, and a whole number for each."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(3, 5), nn.Linear(5, 3)

    def forward(self, x, ids):
        return self.head(x + self.table(ids))


PREDICTORS = {
    "kron": lambda nets, loader: mola.fit(nets, loader, progress=False),
    "ensemble": lambda nets, loader: mola.ensemble(nets),
    "temperature": lambda nets, loader: mola.TemperatureScaled(nets, 1.5),
    "mixture": lambda nets, loader: mola.Mixture([mola.ensemble(net) for net in nets]),
    "whole": lambda nets, loader: mola.fit_whole(nets, loader, progress=False),
}


@pytest.fixture(params=PREDICTORS)
def make(request):
    return PREDICTORS[request.param]


# --- what a batch is ----------------------------------------------------------------------------------------------------


class TestOneBatch:
    def test_a_call_and_a_prediction_take_the_same(self, make):
        plain = make(pair(), LOADER)
        two = make([WithIds()], [((X, Y), Y)])
        kinds = [(plain, X), (plain, (X,)), (plain, X[:0]), (plain, X[:1]), (two, (X, Y)), (two, {"x": X, "ids": Y})]
        for posterior, batch in [*kinds, (two, {"x": X, "ids": Y, "labels": Y})]:
            called = posterior(batch)
            assert torch.equal(posterior.predict(batch).probs, called)
            assert np.array_equal(posterior.predict_proba(batch), called.numpy())
            assert torch.equal(next(iter(posterior.predict_batches(batch))).probs, called)

    def test_whole_numbers_in_a_tuple_are_an_argument_and_no_labels(self):
        posterior = mola.fit(WithIds(), [((X, Y), Y)], progress=False)
        assert not torch.equal(posterior.predict((X, Y)).probs, posterior.predict((X, Y.roll(1))).probs)
        assert posterior.confidence_bound((X, Y)).shape == (24,)

    def test_in_a_loader_a_pair_is_inputs_and_labels(self):
        posterior = mola.fit(pair(), LOADER, progress=False)
        for loader in (LOADER, [[X, Y]], [(X, Y)], iter(LOADER)):
            torch.testing.assert_close(posterior.predict(loader).probs, posterior(X))

    def test_an_empty_batch_gives_an_empty_prediction(self, make):
        prediction = make(pair(), LOADER).predict(X[:0])
        assert len(prediction) == 0
        assert prediction.probs.shape == (0, 3)
        for field in ("label", "confidence", "entropy", "mutual_information", "ood_score", "aleatoric"):
            assert getattr(prediction, field).shape == (0,)

    @pytest.mark.parametrize("link", LINKS)
    @pytest.mark.parametrize("structure", STRUCTURES)
    def test_no_link_minds_an_empty_batch(self, structure, link):
        posterior = mola.fit(pair(), LOADER, structure=structure, link=link, progress=False)
        assert posterior(X[:0]).shape == posterior.predict(X[:0]).computed().probs.shape == (0, 3)

    @pytest.mark.parametrize("link", LINKS)
    @pytest.mark.parametrize("structure", STRUCTURES)
    def test_what_was_read_gives_what_is_predicted(self, structure, link):
        posterior = mola.fit(
            [one.float() for one in pair()], [(X.float(), Y)], structure=structure, link=link, progress=False
        )
        read = read_held_out(
            posterior.networks,
            [one.head for one in posterior.components],
            [(X.float(), Y)],
            where="validation loader",
            labelled=True,
            progress=False,
        )
        prediction = posterior.predict(X.float())
        for found, expected in zip(
            posterior.of_held_out(read, slice(None)),
            (prediction.logit_mean, prediction.probs, prediction.ood_score),
            strict=True,
        ):
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
        for use in (lambda data: posterior.tune(data, "nll", progress=False), posterior.reweight):
            with pytest.raises(mola.DataError, match="has no labels"):
                use(replace(read, labels=None))

    def test_a_list_could_be_either_and_is_refused(self, make):
        posterior = make(pair(), LOADER)
        with pytest.raises(mola.DataError, match=r"\[x, y\] may be one batch with labels, or two batches"):
            posterior.predict([X, Y])
        for batch in ([X, Y], [X]):
            with pytest.raises(mola.DataError, match="expected one batch, got a list"):
                posterior(batch)
        torch.testing.assert_close(posterior.predict([X[:10], X[10:]]).probs, posterior(X))

    def test_labels_beside_the_only_argument_are_refused_by_the_network(self):
        with pytest.raises(mola.DataError, match="positional argument"):
            mola.fit(pair(), LOADER, progress=False).predict((X, Y))


# --- fields that are computed when they are first read --------------------------------------------------------------------


@pytest.fixture
def counted(monkeypatch):
    """How often the costly fields are computed."""
    calls = []

    def counting(*arguments):
        calls.append(len(arguments[0][0].mean))
        return epistemic_share(*arguments)

    monkeypatch.setattr("mola.posterior.epistemic_share", counting)
    return calls


COSTLY = ("mutual_information", "ood_score", "logit_variance", "distance", "far_field")


class TestCostlyFields:
    def test_nothing_is_kept_twice_beyond_the_limit(self, monkeypatch):
        monkeypatch.setattr("mola.mixture.KEPT", 20_000)
        posterior = mola.fit(pair(), LOADER, progress=False)
        posterior(X)

        def alive():
            gc.collect()
            tensors = [one for one in gc.get_objects() if type(one) is torch.Tensor]
            return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}.values())

        before = alive()
        prediction = posterior.predict([X] * 200)
        lazy = alive() - before
        assert prediction.held <= 20_000
        least = prediction.probs.nbytes + prediction.logit_mean.nbytes
        prediction.computed()
        assert alive() - before <= lazy + 20_000
        # Fields that some batches have are kept for the whole, and the fields that all have are kept once.
        costly = sum(getattr(prediction, name).nbytes for name in COSTLY)
        assert lazy <= least + costly + 2 * 20_000

    def test_nobody_pays_for_what_is_not_read(self, counted, tmp_path):
        posterior = mola.fit(pair(), LOADER, LOADER, progress=False).tune(LOADER, progress=False).reweight(LOADER)
        prediction = posterior.predict(LOADER)
        posterior.predict_proba(LOADER)
        posterior.save(tmp_path / "saved")
        assert prediction.label.shape == prediction.confidence.shape == prediction.entropy.shape == (24,)
        assert counted == []
        assert prediction.epistemic.shape == prediction.aleatoric.shape == (24,)
        repr(prediction)
        assert counted == [10, 14]  # once for each batch

    @pytest.mark.parametrize("structure", STRUCTURES)
    def test_the_order_of_reading_does_not_matter(self, structure):
        posterior = mola.fit(pair(), LOADER, structure=structure, progress=False)
        expected = posterior.predict(X).computed()
        for order in itertools.permutations(("mutual_information", "ood_score", "logit_variance")):
            prediction = posterior.predict(X)
            for field in order:
                assert torch.equal(getattr(prediction, field), getattr(expected, field))

    @pytest.mark.parametrize("how", ["pickle", "deepcopy", "cpu", "torch"])
    def test_copies_hold_the_same_numbers(self, how):
        prediction = mola.fit(pair(), LOADER, progress=False).predict(LOADER)
        if how == "torch":
            buffer = io.BytesIO()
            torch.save(prediction, buffer)
            buffer.seek(0)
            twin = torch.load(buffer, weights_only=False)
        else:
            ways = {"pickle": lambda p: pickle.loads(pickle.dumps(p)), "deepcopy": copy.deepcopy}
            twin = ways.get(how, lambda p: p.cpu())(prediction)
        for field in FIELDS:
            assert torch.equal(getattr(twin, field), getattr(prediction, field))
        assert twin.ood_score_name == prediction.ood_score_name

    @pytest.mark.parametrize("structure", [*STRUCTURES, None])
    def test_what_happens_afterwards_does_not_matter(self, structure):
        """Inputs overwritten, networks trained on or moved, and other modes of torch: the fields are those of the prediction."""
        torch.manual_seed(0)
        nets = [nn.Linear(5, 3, bias=False), network(1)]  # the first sees the inputs themselves as features
        make = PREDICTORS["ensemble"] if structure is None else None
        posterior = make(nets, LOADER) if make else mola.fit(nets, LOADER, structure=structure, progress=False)
        inputs = X.clone()
        expected, prediction = posterior.predict(inputs).computed(), posterior.predict(inputs)
        inputs.zero_()
        for net in nets:
            for parameter in net.parameters():
                parameter.data.add_(1)
        posterior.float()
        with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
            for field in FIELDS:
                assert torch.equal(getattr(prediction, field), getattr(expected, field)), field

    def test_features_are_kept_up_to_a_limit_and_dropped_once_read(self, counted, monkeypatch):
        posterior = mola.fit(pair(), LOADER, progress=False)
        held = posterior.predict(LOADER[0][0]).held
        # Of 10 inputs, in float64: 3 probabilities; of each network 6 features and the constant 1, 3 logits, their variances, a scale.
        assert held == 10 * (3 + 2 * (7 + 3 + 3 + 1)) * 8
        monkeypatch.setattr("mola.mixture.KEPT", held)
        prediction = posterior.predict(LOADER)
        assert counted == [14]  # what did not fit was computed at once
        assert prediction.held == held
        assert prediction.computed().held == 0
        assert torch.equal(prediction.mutual_information, posterior.predict(LOADER).mutual_information)

    def test_threads_may_read_at_once(self):
        prediction = mola.fit(pair(), LOADER, progress=False).predict(LOADER)
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda _: prediction.mutual_information, range(32)))
        assert all(torch.equal(answer, answers[0]) for answer in answers)


# --- the epistemic share --------------------------------------------------------------------------------------------------


def measured(structure, classes, scale, precision, count=4000):
    """Shares by the library and by many draws, and by as many random ones as the library takes at most."""
    torch.manual_seed(classes)
    inputs, labels = torch.randn(300, 12), torch.randint(classes, (300,))
    net = nn.Linear(12, classes)
    with torch.no_grad():
        net.weight.mul_(scale)
    posterior = mola.fit(net, [(inputs, labels)], structure=structure, prior_precision=precision, progress=False)
    few = inputs[:12]
    moments = posterior._moments(few)
    one = moments[0]

    def by(draws, seed):
        noise = torch.randn(draws, one.spread.noise_size, generator=torch.Generator().manual_seed(seed))
        mixed, within = torch.zeros(12, classes), torch.zeros(12)
        for part in noise.split(250):
            probs = torch.softmax(one.mean[:, None] + one.spread.perturb(part), -1)
            mixed += probs.sum(1) / draws
            within += torch.special.entr(probs).sum((1, 2)) / draws
        return 1 - within / torch.special.entr(mixed).sum(1)

    truth = by(count, 99)
    found = torch.stack([epistemic_share(moments, [1.0], seed) for seed in range(6)])
    random_ones = torch.stack([by(SPREAD_DRAWS, seed) for seed in range(6)])
    return [float((shares - truth).square().mean().sqrt()) for shares in (found, random_ones)], truth


class TestEpistemicShare:
    @pytest.mark.parametrize("precision", [100.0, 1.0, 0.05], ids=["narrow", "usual", "wide"])
    @pytest.mark.parametrize("scale", [0.5, 8.0], ids=["unsure", "sure"])
    @pytest.mark.parametrize("classes", [2, 5, 100])
    def test_is_as_accurate_as_64_random_draws(self, classes, scale, precision):
        (error, of_random_ones), _ = measured("kron", classes, scale, precision)
        assert error < 1.15 * of_random_ones + 1e-3

    @pytest.mark.parametrize(
        "structure", [pytest.param(name, marks=pytest.mark.slow) if name == "full" else name for name in STRUCTURES]
    )
    def test_of_many_classes_is_close_with_few_draws(self, structure):
        classes = 150 if structure == "full" else 300  # time grows with the cube
        (error, _), truth = measured(structure, classes, 1.0, 1.0, count=2000)
        assert spread_draws(classes, 13) < SPREAD_DRAWS
        assert error < 0.05
        assert 0.05 < float(truth.mean()) < 0.95

    def test_takes_draws_as_they_are_affordable(self):
        assert spread_draws(10, 64) == spread_draws(1000, 4097) == SPREAD_DRAWS
        assert spread_draws(1000, 2049) == 32
        assert spread_draws(1000, 513) == spread_draws(10**6, 64) == 8
        for classes, features in itertools.product((2, 77, 1000, 50_000), (3, 500, 4096)):
            count = spread_draws(classes, features)
            assert 8 <= count <= SPREAD_DRAWS
            assert count & (count - 1) == 0

    def test_entropy_of_all_continues_the_series(self):
        """Draws that are each sure of another class: their mean has log S, and all of them log C."""
        sure = torch.eye(64, dtype=torch.float64)
        quarters = sure[:16].view(4, 4, 64).mean(1)[None]
        found = float(entropy_of_all(quarters))
        assert np.log(16) + 3 * np.log(2) > found > np.log(16) + np.log(2)
        same = torch.softmax(torch.randn(5, 1, 7, dtype=torch.float64), -1).expand(-1, 4, -1)
        torch.testing.assert_close(entropy_of_all(same), torch.special.entr(same[:, 0]).sum(-1), rtol=1e-12, atol=0)

    def test_a_graph_agrees_for_networks_of_any_width(self):
        inputs = X.float()
        for classes in (3, 600):
            nets = [network(0, 6, classes).float(), network(1, 1200, classes).float()]
            posterior = mola.fit(nets, [(inputs, Y)], progress=False)
            with torch.no_grad():
                found = Exported(posterior, Signature.of(inputs, nets[0]))(inputs)["mutual_information"]
            torch.testing.assert_close(found, posterior.predict(inputs).mutual_information, rtol=1e-4, atol=1e-5)
        assert spread_draws(600, 7) != spread_draws(600, 1201)  # so that the networks take different numbers


# --- inputs are nobody else's to change -----------------------------------------------------------------------------------


class InPlace(nn.Module):
    """Normalises its input in place, openly or behind the version counter."""

    def __init__(self, seed, hidden=False):
        super().__init__()
        self.inner, self.hidden = network(seed), hidden

    def forward(self, x):
        (x.data if self.hidden else x).sub_(0.5).mul_(2)
        return self.inner(x)


class Plain(InPlace):
    """The same, without writing."""

    def forward(self, x):
        return self.inner((x - 0.5) * 2)


def outcomes(nets, loader):
    """Numbers from every way to use networks."""
    yield mola.ensemble(nets).predict(loader()).probs
    yield mola.ensemble(nets).reweight(loader(), progress=False).weights
    posterior = mola.fit(nets, loader(), progress=False)
    yield posterior(X.clone())
    prediction = posterior.predict(loader())
    yield from (prediction.mutual_information, prediction.ood_score, prediction.logit_mean)
    yield torch.tensor(
        posterior.tune(loader(), mola.ConfidenceThreshold(confidence=0.4), progress=False).prior_precision
    )
    yield posterior.reweight(loader(), progress=False).weights
    yield torch.tensor(mola.temperature_scaled(nets, loader(), progress=False).temperatures)
    whole = mola.fit_whole(nets, loader(), structure="diag", progress=False)
    yield whole(X.clone())
    yield torch.tensor(whole.tune(loader(), mola.ConfidenceThreshold(confidence=0.4), progress=False).prior_precision)


@pytest.mark.parametrize("hidden", [False, True], ids=["openly", "hidden"])
def test_networks_that_write_into_their_inputs_do_no_harm(hidden):
    inputs = X.clone()

    def loader():
        return [(inputs[:10], Y[:10]), (inputs[10:], Y[10:])]

    found = list(outcomes([InPlace(0, hidden), InPlace(1, hidden)], loader))
    assert torch.equal(inputs, X)
    for one, other in zip(found, outcomes([Plain(0), Plain(1)], loader), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_a_network_that_begins_to_write_is_named():
    class Later(InPlace):
        writes = False

        def forward(self, x):
            return super().forward(x) if self.writes else self.inner(x)

    net = Later(0)
    posterior = mola.ensemble(net)
    posterior(X)
    Later.writes = True
    with pytest.raises(mola.DataError, match="Later changed its inputs in place"):
        posterior(X.clone())
    inputs = X.clone()
    posterior(inputs)
    assert torch.equal(inputs, X)


def test_a_loader_may_use_its_memory_again():
    """Bias-free heads on raw inputs: the features are the loader's own memory."""

    def fresh():
        return [(x.clone(), y.clone()) for x, y in ((X[:12], Y[:12]), (X[12:], Y[12:]))]

    def again():
        buffer, labels = torch.empty(12, 5, dtype=torch.float64), torch.empty(12, dtype=torch.long)
        for x, y in fresh():
            yield buffer.copy_(x), labels.copy_(y)

    torch.manual_seed(0)
    nets = [nn.Linear(5, 3, bias=False), nn.Linear(5, 3, bias=False)]
    for one, other in zip(outcomes(nets, again), outcomes(nets, fresh), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


# --- threads --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def eager_threads():
    """Threads take turns as often as they can."""
    patience = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(patience)


@pytest.mark.usefixtures("eager_threads")
@pytest.mark.parametrize("structure", STRUCTURES)
def test_first_predictions_from_many_threads(structure):
    nets = [net.float() for net in pair()]
    fitted = mola.fit(nets, [(X.float(), Y)], structure=structure, progress=False)
    batches = [torch.randn(3 + index % 4, 5, generator=GENERATOR).float() for index in range(25)]
    expected = [fitted(batch) for batch in batches]
    start = threading.Barrier(8)
    fresh = fitted.with_prior_precision(1.0)  # nothing is prepared yet

    def work(thread):
        start.wait()
        order = random.Random(thread).sample(range(25), 25)
        return [(index, fresh(batches[index])) for index in order]

    with ThreadPoolExecutor(8) as pool:
        answers = list(itertools.chain.from_iterable(pool.map(work, range(8))))
    assert len(answers) == 200
    for index, probs in answers:
        assert probs.dtype == torch.float32
        assert_close(probs, expected[index])


@pytest.mark.usefixtures("eager_threads")
def test_draws_of_other_threads_are_not_repeated():
    posterior = mola.fit(pair(), LOADER, progress=False)
    posterior(X)
    done = threading.Event()

    def predict():
        while not done.is_set():
            posterior.predict(X)

    with ThreadPoolExecutor(2) as pool:
        work = [pool.submit(predict) for _ in range(2)]
        try:
            drawn = [float(torch.rand((), dtype=torch.float64)) for _ in range(3000)]
        finally:
            done.set()
        for one in work:
            one.result()
    assert len(set(drawn)) == len(drawn)


class Drawing(nn.Module):
    """Draws although it is evaluated."""

    def __init__(self):
        super().__init__()
        self.inner = network(0)

    def forward(self, x):
        return self.inner(nn.functional.dropout(x, 0.5, training=True))


def test_a_network_that_draws_leaves_the_random_state_as_it_was():
    for net in (Drawing(), network(0)):
        posterior = mola.ensemble(net)
        for _ in range(2):  # what is unknown of the network, and what is known
            before = torch.get_rng_state()
            posterior.predict(X)
            assert torch.equal(torch.get_rng_state(), before)


class Branching(nn.Module):
    """Chooses between two ways with an operator that torch's dispatch modes refuse."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(torch.cond(x.sum() > 1e9, torch.sin, torch.relu, (self.body(x),)))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_a_network_that_branches_is_taken_as_it_is():
    net = Branching()
    posterior = mola.fit(net, list(zip(X.split(7), Y.split(7), strict=True)), progress=False)
    same = mola.ensemble(nn.Sequential(net.body, nn.ReLU(), net.head))
    torch.testing.assert_close(posterior.with_prior_precision(1e30)(X), same(X))


def test_posteriors_can_be_copied_and_saved_after_use():
    posterior = mola.fit(pair(), LOADER, progress=False)
    expected = posterior(X)
    assert torch.equal(copy.deepcopy(posterior)(X), expected)
    assert torch.equal(pickle.loads(pickle.dumps(posterior))(X), expected)


# --- heads, devices and precisions ----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("normalise", [nn.utils.weight_norm, nn.utils.parametrizations.weight_norm])
def test_a_weight_normalised_head_is_known_again(normalise):
    net = network(0).float()
    net[2] = normalise(net[2])
    inputs = X.float()
    optimizer = torch.optim.SGD(net.parameters(), 0.5)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(inputs), Y).backward()
        optimizer.step()
    posterior = mola.fit(net, [(inputs, Y)], progress=False)
    expected = posterior(inputs)
    trained = torch.cat([net(torch.zeros(1, 5, dtype=torch.float32)), net(inputs)])  # reads the weight of today
    assert trained.isfinite().all()
    assert_close(posterior(inputs), expected)
    net.half()
    torch.testing.assert_close(posterior(inputs.half()), expected, rtol=2e-2, atol=2e-2)
    nn.functional.cross_entropy(net.float()(inputs), Y).backward()
    optimizer.step()
    with pytest.raises(mola.HeadError, match="changed since"):
        posterior(inputs)


def test_networks_and_inputs_without_values_are_named(make):
    posterior = make(pair(), LOADER)
    for net in posterior.networks if hasattr(posterior, "networks") else []:
        net.to("meta")
    if hasattr(posterior, "networks"):
        for use in (posterior, posterior.predict):
            with pytest.raises(mola.MolaError, match=r"meta device|changed"):
                use(X)
    with pytest.raises(mola.MolaError, match="meta"):
        mola.ensemble(network(0))(X.to("meta"))
    with pytest.raises(mola.MolaError, match="meta device"):
        mola.fit(network(0).to("meta"), LOADER, progress=False)


@pytest.mark.parametrize("bias", [True, False])
def test_a_half_precision_network_under_the_other_autocast(bias):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3, bias=bias)).half()
    net.register_buffer("kept", torch.ones(3, dtype=torch.float16))
    inputs = X.half()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        posterior = mola.fit(net, [(inputs, Y)], progress=False)
        tuned = posterior.tune([(inputs, Y)], "nll", progress=False)
        prediction = posterior.predict(inputs)
        assert prediction.mutual_information.dtype == torch.float32
        assert_close(posterior(inputs), prediction.probs)
        assert tuned(inputs).isfinite().all()
    torch.testing.assert_close(
        mola.fit(net, [(inputs, Y)], progress=False)(inputs), prediction.probs, rtol=0.1, atol=0.02
    )
