"""Networks and batches in, features, logits and labels out: once, in order, and with nothing left behind."""

import gc
import random
import weakref

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import mola
from mola import DataError, HeadError
from mola.laplace import as_structure
from mola.network import Features, Head, Lifted, RowBuffer, batch_count, capture, find_heads, peek, stream, undisturbed
from mola.tuning.candidates import read_held_out
from tests.witness import unchanged

X = torch.randn(20, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.arange(20) % 3
SIZES = [6, 1, 8, 5]
LOADER = list(zip(X.split(SIZES), Y.split(SIZES), strict=True))


def make_network(width=4, seed=0):
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Linear(5, width), nn.BatchNorm1d(width), nn.Dropout(), nn.ReLU(), nn.Linear(width, 3))
    network[-1].weight.data *= 5  # as sure of itself as a trained one
    return network


@pytest.fixture
def networks():
    return [make_network(4, 0), make_network(7, 1).eval(), make_network(2, 2)]


def read(networks, loader, **options):
    with undisturbed(*networks):
        first, batches = peek(loader, "the training loader")
        heads = find_heads(networks, [None] * len(networks), first[0] if isinstance(first, (tuple, list)) else first)
        yield from stream(networks, heads, batches, where="training loader", progress=False, **options)


# --- what comes out -----------------------------------------------------------------------------------------------------


def test_every_network_sees_every_batch_in_order(networks):
    with unchanged(*networks):
        got = list(read(networks, LOADER))
    assert [len(labels) for _, labels in got] == SIZES
    assert torch.equal(torch.cat([labels for _, labels in got]), Y)
    for index, network in enumerate(networks):
        network.eval()
        with torch.no_grad():
            torch.testing.assert_close(torch.cat([seen[index].features for seen, _ in got]), network[:-1](X))
            torch.testing.assert_close(torch.cat([seen[index].logits for seen, _ in got]), network(X))


@pytest.mark.parametrize("rows", [2, 7, 12, 1000])
def test_gathered_batches_are_the_same_data_in_the_same_order(rows, networks):
    plain = list(read(networks, LOADER))
    kept = [  # copied at once: the next batches take their place
        ([Features(*(part.clone() for part in one)) for one in seen], labels, [isinstance(one, Lifted) for one in seen])
        for seen, labels in read(networks, LOADER, rows=rows)
    ]
    sizes = [len(labels) for _, labels, _ in kept]
    assert len(sizes) < len(SIZES) or rows == 2
    assert all(size <= rows or size in SIZES for size in sizes)
    assert torch.equal(torch.cat([labels for _, labels, _ in kept]), Y)
    for index, network in enumerate(networks):
        width = network[-1].in_features
        for seen, _, lifted in kept:
            assert seen[index].features.shape[1] == width + lifted[index]
            assert not lifted[index] or bool((seen[index].features[:, width] == 1).all())
        for name, end in (("features", width), ("logits", None)):
            first = torch.cat([getattr(seen[index], name) for seen, _ in plain])
            second = torch.cat([getattr(seen[index], name)[:, :end] for seen, _, _ in kept])
            assert torch.equal(first, second)


def test_rows_go_to_the_device_before_they_go_to_float64(networks, monkeypatch):
    """A device without float64 cannot convert while it copies to another, and may say nothing."""
    plain = torch.Tensor.copy_

    def careful(self, other, *rest):
        assert self.device == other.device or self.dtype == other.dtype
        return plain(self, other, *rest)

    monkeypatch.setattr(torch.Tensor, "copy_", careful)
    list(read(networks, LOADER, rows=100))
    buffer, head = RowBuffer(Head("", nn.Linear(4, 3)), 10), torch.randn(5, 4)
    assert buffer.put(Features(head, torch.randn(5, 3))).features.shape == (5, 5)


def test_networks_that_give_different_numbers_of_rows_are_refused(networks):
    class Half(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, inputs):
            return self.inner(inputs[::2])

    with pytest.raises(DataError, match=r"batch 0 of the training loader: the networks gave \[8, 4\] rows"):
        mola.fit([networks[0], Half(networks[1])], [X[:8], X[8:16]])


class Masked(nn.Module):
    """Gives a row for each input that is not masked: whose first number is not above 100."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(5, 4).double(), nn.Linear(4, 3).double()

    def forward(self, inputs):
        return self.head(torch.relu(self.body(inputs))[inputs[:, 0] < 100])


@pytest.mark.parametrize("structure", ["kron", "diag", "full"])
def test_a_batch_of_which_nothing_is_left_adds_nothing(structure):
    torch.manual_seed(0)
    network, nothing = Masked(), X[:3] + 1000
    plain, masked = [X[:8], X[8:]], [nothing, X[:8], nothing, X[8:], nothing]
    one, two = (
        mola.fit(network, some, structure=structure).components[0].curvature.factors for some in (plain, masked)
    )
    for name, tensor in one.tensors().items():
        torch.testing.assert_close(tensor, two.tensors()[name], rtol=1e-12, atol=1e-15)
    assert one.count == two.count
    with pytest.raises(DataError, match="no row for any batch"):
        mola.fit(network, [X[:8], nothing][1:] * 2, structure=structure)


def test_a_structure_of_ones_own_may_write_into_what_it_is_given():
    class Careless(type(as_structure("diag"))):
        def sums(self, features, curvature, log_likelihood):
            found = super().sums(features, curvature, log_likelihood)
            features.mul_(0.5)
            return found

        def absorb(self, total, features, curvature, log_likelihood):
            return self.merge(total, self.sums(features, curvature, log_likelihood))

        def rows(self, features, outputs):
            return 10

    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)).double()
    batches = list(zip(X.split(4), Y.split(4), strict=True))
    found = mola.fit(network, batches, structure=Careless()).components[0].curvature.factors
    expected = mola.fit(network, batches, structure="diag").components[0].curvature.factors
    torch.testing.assert_close(found.diagonal, expected.diagonal, rtol=1e-12, atol=0)
    assert float(found.squares[-1]) == pytest.approx(len(X))


def test_a_layer_that_was_cut_by_hand_is_as_wide_as_what_it_sees():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)).double()
    expected = mola.fit(network, LOADER).components[0].curvature.factors.gram
    network[2].in_features = 9
    torch.testing.assert_close(mola.fit(network, LOADER).components[0].curvature.factors.gram, expected)


@pytest.mark.parametrize("structure", ["kron", "diag", "full"])
def test_a_network_that_turns_gradients_on_is_fitted_all_the_same(structure):
    class Proud(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(5, 4).double(), nn.Linear(4, 3, bias=False).double()

        @torch.enable_grad()
        def forward(self, inputs):
            return self.head(torch.relu(self.body(inputs)))

    factors = mola.fit(Proud(), [(X, Y)], structure=structure).components[0].curvature.factors
    assert not any(tensor.requires_grad for tensor in factors.tensors().values())


class Recycles(nn.Module):
    """Writes its features and its logits into the same memory in every pass."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(5, 4).double(), nn.Linear(4, 3).double()
        self.memory = torch.empty(1000, 4)

    def forward(self, inputs):
        features = torch.relu(self.body(inputs))
        kept = self.memory[: len(inputs)]
        kept.copy_(features)
        return self.head(kept)


def test_memory_that_is_used_again_for_the_next_batch_is_no_matter():
    def recycled():
        inputs, labels = torch.empty(8, 5), torch.empty(8, dtype=torch.int64)
        for x, y in LOADER:
            yield inputs[: len(x)].copy_(x), labels[: len(y)].copy_(y)

    torch.manual_seed(0)
    network = Recycles()
    together = mola.fit(network, [(X, Y)]).components[0].curvature.factors
    factors = mola.fit(network, recycled()).components[0].curvature.factors
    torch.testing.assert_close(factors.gram, together.gram, rtol=1e-12, atol=0)
    torch.testing.assert_close(factors.output, together.output, rtol=1e-12, atol=1e-15)
    assert factors.log_likelihood == pytest.approx(together.log_likelihood, rel=1e-12)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (lambda x, y: (x * torch.inf, y), r"batch 2 of the training loader, models\[0\]: features are NaN or infinite"),
        (lambda x, y: (x, y + 2), r"batch 2 of the training loader: labels must lie in"),
        (lambda x, y: (x, y == 0), r"batch 2 of the training loader: expected class indices of an integer type"),
        (lambda x, y: (x, y[:-1]), r"batch 2 of the training loader: expected 8 class indices"),
    ],
)
def test_the_batch_that_is_to_blame_is_named_among_those_gathered(bad, says, networks):
    loader = [bad(x, y) if index == 2 else (x, y) for index, (x, y) in enumerate(LOADER)]
    with unchanged(*networks), pytest.raises(DataError, match=says):
        mola.fit(networks, loader)


# --- held-out data, whose small batches are gathered ------------------------------------------------------------------


class Mixed(nn.Module):
    """In float32, and in another precision for batches of some sizes."""

    def __init__(self, precisions):
        super().__init__()
        self.precisions = precisions
        self.body, self.head = nn.Linear(5, 4).float(), nn.Linear(4, 3).float()

    def forward(self, inputs):
        kind = self.precisions.get(len(inputs), torch.float32)
        with torch.autocast("cpu", dtype=kind, enabled=kind != torch.float32):
            return self.head(torch.relu(self.body(inputs)))


def held_out(networks, loader, **options):
    with undisturbed(*networks):
        heads = find_heads(networks, [None] * len(networks), X[:6].to(next(networks[0].parameters()).dtype))
        options = {"where": "validation loader", "labelled": True, "progress": False} | options
        return read_held_out(networks, heads, loader, **options), heads


@pytest.mark.parametrize("gathered", [1, 30, 60, 2**20])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_held_out_data_are_the_same_however_they_are_gathered(dtype, gathered, networks, monkeypatch):
    """Bit for bit and in the networks' own precision, from a loader that uses its memory again."""
    monkeypatch.setattr("mola.tuning.candidates.GATHERED", gathered)
    members = [network.to(dtype).eval() for network in networks]

    def recycled():
        inputs, labels = torch.empty(8, 5, dtype=dtype), torch.empty(8, dtype=torch.int64)
        for x, y in LOADER:
            yield inputs[: len(x)].copy_(x), labels[: len(y)].copy_(y)

    found, heads = held_out(members, recycled())
    assert torch.equal(found.labels, Y)
    for index, (member, head) in enumerate(zip(members, heads, strict=True)):
        with torch.no_grad():
            parts = [member[:-1](x) for x, _ in recycled()]
            logits = torch.cat([member[-1](part) for part in parts])
        expected = head.lift(torch.cat(parts))
        assert (found.features[index].dtype, found.logits[index].dtype) == (dtype, dtype)
        assert torch.equal(found.features[index], expected)
        assert torch.equal(found.logits[index], logits)


@pytest.mark.parametrize("sizes", [[6, 1, 8, 5], [1, 6, 8, 5], [8, 5, 6, 1], [5, 5, 5, 5]])
def test_batches_of_different_precisions_are_kept_in_one_that_holds_both(sizes, monkeypatch):
    torch.manual_seed(0)
    network = Mixed({1: torch.bfloat16, 8: torch.float16}).eval()
    loader = list(zip(X.float().split(sizes), Y.split(sizes), strict=True))
    plain = [torch.cat(parts) for parts in zip(*[capture_rows(network, x) for x, _ in loader], strict=True)]
    for gathered in (1, 40, 2**20):
        monkeypatch.setattr("mola.tuning.candidates.GATHERED", gathered)
        found, _ = held_out([network], loader)
        for kept, expected in zip((found.features[0], found.logits[0]), plain, strict=True):
            assert kept.dtype == expected.dtype
            assert torch.equal(kept, expected)
        assert bool((found.features[0][:, -1] == 1).all())


def capture_rows(network, inputs):
    """Features with the constant 1, and logits, of one batch."""
    with undisturbed(network), torch.no_grad():
        head = find_heads([network], [None], inputs)[0]
        seen = capture(network, head, inputs)
    return head.lift(seen.features), seen.logits


def test_no_labels_are_none_however_batches_are_gathered(networks):
    found, _ = held_out(networks, (x for x, _ in LOADER), labelled=False)
    assert found.labels is None
    assert len(found) == len(X)


def test_a_team_looks_for_failures_at_every_batch_of_held_out_data(networks):
    class Pair(mola.Team):
        """The first of two processes, whose other has no data."""

        size, rank, looks = 2, 0, 0

        def __init__(self):
            pass

        def check(self):
            self.looks += 1

        def collect(self, document):
            return [document, None]

        def share(self, document):
            return document

        def sum(self, tensors):
            return tensors

    pair = Pair()
    found, _ = held_out(networks, LOADER, team=pair)
    assert len(found) == len(X)
    assert pair.looks >= len(LOADER)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (lambda x, y: (x * torch.inf, y), r"batch 2 of the validation loader, models\[0\]: features are NaN"),
        (lambda x, y: (x, y + 2), r"batch 2 of the validation loader: labels must lie in"),
        (lambda x, y: (x, y == 0), r"batch 2 of the validation loader: expected class indices of an integer type"),
        (lambda x, y: (x, y[:-1]), r"batch 2 of the validation loader: expected 8 class indices"),
        (lambda x, _: x, r"batch 2 of the validation loader has no labels"),
    ],
)
def test_the_batch_of_the_held_out_data_that_is_to_blame_is_named(bad, says, networks):
    loader = [bad(x, y) if index == 2 else (x, y) for index, (x, y) in enumerate(LOADER)]
    posterior = mola.fit(networks, LOADER, progress=False)
    with unchanged(*networks), pytest.raises(DataError, match=says):
        posterior.tune(loader, "nll", progress=False)


class Once:
    """An iterable that may be read once, and counts what was taken."""

    def __init__(self, batches):
        self.batches, self.taken, self.opened = batches, 0, 0

    def __iter__(self):
        self.opened += 1
        assert self.opened == 1, "read twice"
        for batch in self.batches:
            self.taken += 1
            yield batch


class Endless(IterableDataset):
    def __iter__(self):
        return iter(zip(X, Y, strict=True))


LOADERS = {
    "list": lambda: LOADER,
    "tuple": lambda: tuple(LOADER),
    "generator": lambda: (batch for batch in LOADER),
    "read once": lambda: Once(LOADER),
    "DataLoader": lambda: DataLoader(TensorDataset(X, Y), batch_size=6),
    "shuffling DataLoader": lambda: DataLoader(TensorDataset(X, Y), batch_size=6, shuffle=True),
    "iterable dataset": lambda: DataLoader(Endless(), batch_size=6),
    "lists": lambda: [list(batch) for batch in LOADER],
    "mappings": lambda: [{"input": x, "labels": y} for x, y in LOADER],
}


@pytest.mark.parametrize("kind", LOADERS)
def test_any_iterable_is_a_loader_and_is_read_once_for_all_networks(kind, networks):
    expected = mola.fit(networks, [(X, Y)])
    with unchanged(*networks):
        posterior = mola.fit(networks, LOADERS[kind]())
    for got, want in zip(posterior.components, expected.components, strict=True):
        assert got.curvature.factors.count == 20
        torch.testing.assert_close(got.curvature.factors.gram, want.curvature.factors.gram, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(got.curvature.factors.output, want.curvature.factors.output, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", [kind for kind in LOADERS if kind != "tuple"])  # to predict, a tuple is one batch
def test_any_iterable_serves_to_tune_reweight_and_predict(kind, networks):
    posterior, rule = mola.fit(networks, LOADER), mola.ConfidenceThreshold(confidence=0.42)
    expected, stacked = posterior.tune(LOADER, rule), posterior.reweight(LOADER)
    with unchanged(*networks):
        tuned = posterior.tune(LOADERS[kind](), rule)
        reweighted = posterior.reweight(LOADERS[kind]())
        with torch.random.fork_rng():  # what the loader draws while a prediction is read is its owner's business
            probs = posterior.predict(LOADERS[kind]()).probs
    assert tuned.prior_precision == pytest.approx(expected.prior_precision, rel=1e-9)
    torch.testing.assert_close(reweighted.weights, stacked.weights, rtol=0, atol=1e-6)
    order = [posterior.predict(X).probs, probs]
    if kind == "shuffling DataLoader":
        order = [values[values[:, 0].argsort()] for values in order]
    torch.testing.assert_close(*order, rtol=1e-12, atol=1e-12)


def test_batches_are_taken_one_by_one(networks):
    """No batch is read ahead, and none is kept: a loader of any length fits in memory."""
    loader = Once(LOADER)
    for count, _ in enumerate(read(networks, loader), start=1):
        assert loader.taken == count


def test_no_batch_outlives_its_turn():
    network = make_network()
    alive = weakref.WeakSet()

    class Numbers:
        """Something a batch refers to, to see when it goes."""

    def batches():
        for x, y in LOADER:
            batch = x.clone()
            batch.mark = Numbers()
            alive.add(batch.mark)
            yield batch, y
            del batch
            gc.collect()
            assert len(alive) <= 2, "batches pile up"  # this one, and the one that the caller is about to let go

    mola.fit(network, batches())


def test_the_factors_do_not_grow_with_the_data():
    network = make_network()
    small, large = (
        mola.fit(network, [(X, Y)] * times, structure="full").components[0].curvature.factors for times in (1, 7)
    )
    assert large.count == 7 * small.count
    assert {name: tensor.shape for name, tensor in small.tensors().items()} == {
        name: tensor.shape for name, tensor in large.tensors().items()
    }
    torch.testing.assert_close(large.hessian, 7 * small.hessian, rtol=1e-12, atol=1e-12)


def test_unlabelled_batches_give_the_same_curvature_and_no_evidence(networks):
    labelled = mola.fit(networks, LOADER)
    for loader in ([x for x, _ in LOADER], [(x,) for x, _ in LOADER], [(x, None) for x, _ in LOADER]):
        posterior = mola.fit(networks, loader)
        assert torch.equal(posterior.predict(X).probs, labelled.predict(X).probs)
        with pytest.raises(mola.OptionError, match=r"needs training labels: fit with batches of \(inputs, labels\)"):
            posterior.log_evidence()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_labels_of_any_integer_type_are_the_same_labels(dtype):
    network = make_network()
    expected = mola.fit(network, LOADER).log_evidence()
    assert torch.equal(mola.fit(network, [(x, y.to(dtype)) for x, y in LOADER]).log_evidence(), expected)


def test_a_loader_without_a_length_has_no_count():
    assert batch_count(LOADER) == 4
    assert batch_count(DataLoader(TensorDataset(X, Y), batch_size=6)) == 4
    assert batch_count(batch for batch in LOADER) is None
    assert batch_count(DataLoader(Endless(), batch_size=6)) is None


def test_peeking_takes_one_batch_and_loses_none():
    loader = Once(LOADER)
    first, batches = peek(loader, "the loader")
    assert first is LOADER[0]
    assert loader.taken == 1
    assert list(batches) == LOADER


# --- what goes wrong ----------------------------------------------------------------------------------------------------


def loader_that_fails(at, error):
    for index, batch in enumerate(LOADER):
        if index == at:
            raise error
        yield batch


@pytest.mark.parametrize("at", [0, 1, 3])
@pytest.mark.parametrize("error", [OSError("disk"), KeyboardInterrupt("disk"), RuntimeError("disk")], ids=repr)
def test_an_exception_of_the_loader_comes_through_and_all_is_restored(at, error, networks):
    with unchanged(*networks), pytest.raises(type(error), match="disk") as caught:
        mola.fit(networks, loader_that_fails(at, error))
    assert caught.value is error
    posterior = mola.fit(networks, LOADER)
    for read_loader in (posterior.tune, posterior.reweight, posterior.predict):
        with unchanged(*networks), pytest.raises(type(error), match="disk"):
            read_loader(loader_that_fails(at, error))


@pytest.mark.parametrize("at", range(1, 13))
def test_an_exception_of_the_n_th_pass_leaves_every_network_as_it_was(at, networks):
    passes = 0

    def strike(*_):
        nonlocal passes
        passes += 1
        if passes == at:
            raise RuntimeError("struck")

    for network in networks:
        network[0].register_forward_hook(strike)
    with unchanged(*networks), pytest.raises((RuntimeError, DataError), match="struck"):
        mola.fit(networks, LOADER)
    assert passes == at


def test_an_abandoned_prediction_leaves_the_networks_alone_at_once(networks):
    posterior = mola.fit(networks, LOADER)
    with unchanged(*networks):
        predictions = posterior.predict_batches(LOADER)
        next(predictions)
    with unchanged(*networks):  # not only when the iterator is closed
        next(predictions)


def test_a_network_that_stops_returning_its_head_is_noticed():
    """Found on the first batch, then changed: capture must not take the old head's word for it."""
    network = make_network()
    with undisturbed(network):
        (head,) = find_heads([network], [None], X)
        network.append(nn.Softmax(1)).eval()
        with pytest.raises(HeadError, match=r"not the output of its head '4' in this pass"):
            capture(network, head, X)
    assert not network[4]._forward_hooks


def test_a_network_that_returns_another_head_for_some_batches_is_noticed():
    class Fickle(nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.other = nn.Linear(5, 3), nn.Linear(5, 3)

        def forward(self, x):
            head, other = self.head(x), self.other(x)
            return other if len(x) == 8 else head

    network = Fickle()
    with unchanged(network), pytest.raises(HeadError, match="not the output of its head 'head' in this pass"):
        mola.fit(network, LOADER)


@pytest.mark.parametrize("change", ["logits", "features"])
def test_an_overwriting_in_place_that_shows_in_later_batches_only_is_noticed(change):
    """A clamp that leaves the first batch as it is passes every comparison of numbers made there."""

    class Clamping(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(5, 4), nn.Linear(4, 3)

        def forward(self, x):
            features = self.body(x)
            logits = self.head(features)
            (logits if change == "logits" else features).clamp_(-3, 3)
            return logits

    network = Clamping()
    loader = [(0.01 * X, Y), (100 * X, Y)]
    with unchanged(network), pytest.raises(HeadError, match=r"(?s)'head'.*in place"):
        mola.fit(network, loader)


def test_differing_numbers_of_classes_are_refused():
    networks = [make_network(), nn.Linear(5, 4), nn.Linear(5, 3)]
    with unchanged(*networks), pytest.raises(HeadError, match=r"same number of classes, got \[3, 4, 3\]"):
        mola.fit(networks, LOADER)


def test_the_random_state_of_numpy_and_python_is_not_needed(networks):
    random.seed(3)
    first = mola.fit(networks, LOADER, link="mc").predict(X).probs
    random.seed(4)
    torch.manual_seed(99)
    assert torch.equal(mola.fit(networks, LOADER, link="mc").predict(X).probs, first)


@pytest.mark.parametrize("structure", ["kron", "kron-exact", "kron-diag", "diag", "full"])
def test_what_was_fitted_in_inference_mode_is_of_use_outside(structure):
    network = make_network()
    with unchanged(network), torch.inference_mode():
        posterior = mola.fit(network, LOADER, structure=structure)
        inside = posterior.predict(X).probs
    assert torch.equal(posterior.predict(X).probs, inside)
    expected = mola.fit(network, LOADER, structure=structure).tune(rule=mola.Evidence()).prior_precision
    assert posterior.tune(rule=mola.Evidence()).prior_precision == pytest.approx(expected)


def test_a_loader_may_need_gradients_of_its_own():
    """Adversarial batches are made with gradients while they are read."""
    network = make_network().eval()

    def attacked():
        for x, y in LOADER:
            x = x.clone().requires_grad_()
            loss = nn.functional.cross_entropy(network(x), y)
            (gradient,) = torch.autograd.grad(loss, x)
            yield x.detach() + 0.1 * gradient.sign(), y

    assert mola.fit(network, attacked()).components[0].curvature.factors.count == 20


def test_progress_is_silent_where_nobody_watches(networks, capsys):
    mola.fit(networks, LOADER, progress=True).predict(LOADER, progress=True)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == ""
