"""Any network, any batch, and no trace: what a visitor may not change, whatever the network does in its forward pass."""

import types
from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

from mola import DataError, HeadError
from mola.network import as_batch, call, to_device, undisturbed
from tests.witness import describe, unchanged

X = torch.randn(6, 5, generator=torch.Generator().manual_seed(1)).double()
Y = torch.tensor([0, 1, 2, 0, 1, 2])
Pair = namedtuple("Pair", "image label")
Images = namedtuple("Images", "left right")


def body():
    return nn.Sequential(nn.Linear(5, 4), nn.ReLU())


# --- networks that change themselves while they run -------------------------------------------------------------------


class Restless(nn.Module):
    """A classifier that does something to itself in each pass, in eval mode too."""

    def __init__(self):
        super().__init__()
        self.body, self.head = body(), nn.Linear(4, 3)
        self.register_buffer("state", torch.zeros(3))
        self.register_buffer("nothing", None)

    def forward(self, x):
        self.disturb(x)
        return self.head(self.body(x))

    def disturb(self, x):
        raise NotImplementedError


def restless(disturb):
    network = Restless()
    network.disturb = types.MethodType(disturb, network)
    return network


def in_place(self, x):
    self.state.add_(1)


def past_autograd(self, x):
    self.state.data.mul_(0.9).add_(1)  # no version counter sees it, as in exponential moving averages of codebooks


def reassigned(self, x):
    self.state = self.state + 1


def replaced_by_nothing(self, x):
    self.state = None


def deleted(self, x):
    if "state" in self._buffers:
        del self.state


def filled_in(self, x):
    self.nothing = x.sum()


def registered(self, x):
    self.register_buffer("late", torch.ones(2), persistent=False)


def resized(self, x):
    self.state = torch.zeros(len(x))


def counted(self, x):
    self.passes = getattr(self, "passes", 0) + 1


def drawn(self, x):
    torch.rand(7)


def seeded(self, x):
    torch.manual_seed(123)


def switched_to_train(self, x):
    self.body.train()


DISTURBANCES = [
    in_place,
    past_autograd,
    reassigned,
    replaced_by_nothing,
    deleted,
    filled_in,
    registered,
    resized,
    counted,
    drawn,
    seeded,
    switched_to_train,
]


def plain():
    return nn.Sequential(body(), nn.Linear(4, 3))


def with_norm_and_dropout():
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.ReLU(), nn.Linear(4, 3))


def with_mixed_modes():
    network = with_norm_and_dropout().train()
    network[1].eval()
    network[4].eval()
    return network


def with_frozen_parameters():
    network = plain()
    network[0].requires_grad_(False)
    network[1].bias.requires_grad_(False)
    return network


def with_gradients():
    network = plain()
    network(X).sum().backward()
    return network


def with_shared_buffer():
    network = with_norm_and_dropout()
    network[0].register_buffer("shared", network[1].running_mean)
    return network


def with_expanded_buffer():
    """Many elements in one place of memory: it can be read, and not be written."""
    network = plain()
    network.register_buffer("ones", torch.ones(1).expand(4))
    network.register_buffer("positions", torch.arange(4).expand(3, -1))
    return network


NETWORKS = [plain, with_norm_and_dropout, with_mixed_modes, with_frozen_parameters, with_gradients, with_shared_buffer]
NETWORKS += [with_expanded_buffer]
NETWORKS += [lambda disturb=disturb: restless(disturb) for disturb in DISTURBANCES]
NAMES = [getattr(make, "__name__", "") for make in NETWORKS[:7]] + [disturb.__name__ for disturb in DISTURBANCES]
every_network = pytest.mark.parametrize("make", NETWORKS, ids=NAMES)


@every_network
@pytest.mark.parametrize("training", [True, False])
def test_a_visit_leaves_no_trace(make, training):
    torch.manual_seed(0)
    network = make().double()
    if make is not with_mixed_modes:
        network.train(training)
    with unchanged(network), undisturbed(network):
        call(network, X)
        call(network, X)


@every_network
@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt, GeneratorExit])
def test_a_visit_that_fails_leaves_no_trace(make, kind):
    network = make().double().train()

    def visit():
        with undisturbed(network):
            call(network, X)
            raise kind("struck")

    with unchanged(network), pytest.raises(kind, match="struck"):
        visit()


def test_several_networks_are_visited_together_and_may_share_parts():
    shared = body()
    first, second = nn.Sequential(shared, nn.BatchNorm1d(4)).double(), nn.Sequential(shared, nn.Linear(4, 3)).double()
    second.train(False)
    shared.train(True)
    with unchanged(first, second), undisturbed(first, second, first):
        assert not any(module.training for network in (first, second) for module in network.modules())
        call(first, X)


def test_inside_a_visit_networks_evaluate_and_build_no_graph():
    torch.manual_seed(0)
    network = with_norm_and_dropout().double()
    network(X)  # moves the running statistics off their start
    expected = network.eval()(X).detach()
    network.train()
    with undisturbed(network):
        logits = call(network, X)
    assert torch.equal(logits, expected)
    assert not logits.requires_grad
    assert not logits.is_inference()


def test_a_graph_that_the_user_still_holds_can_be_run_backwards_after_a_visit():
    network = with_norm_and_dropout().double().eval()  # in eval mode the graph holds the running statistics
    loss = network(X).sum()
    with undisturbed(network):
        call(network, X)
    loss.backward()
    assert all(parameter.grad is not None for parameter in network.parameters())


def test_a_graph_through_a_buffer_with_nan_can_be_run_backwards_after_a_visit():
    """NaN is not equal to itself, and is no change for that."""
    network = plain().double()
    network.register_buffer("missing", torch.tensor([float("nan"), 1.0]))
    scale = torch.ones(2, requires_grad=True)
    loss = (scale * network.missing).sum()
    with unchanged(network), undisturbed(network):
        call(network, X)
    loss.backward()
    assert scale.grad[1] == 1


def test_a_network_that_keeps_a_cache_beside_a_flag_still_works_after_a_visit():
    """Buffers must not go back in time without the plain attributes that speak about them, and the reverse."""

    def rotate(self, x):
        if len(x) > getattr(self, "cached_rows", 0):
            self.cached_rows = len(x)
            self.register_buffer("cache", torch.ones(len(x)), persistent=False)
        assert len(self.cache) >= len(x)

    network = restless(rotate).double()
    with undisturbed(network):
        call(network, X)
    call(network, X[:2])
    call(network, X)


def test_a_visit_inside_inference_mode_leaves_no_trace():
    network = with_norm_and_dropout().double().train()
    with unchanged(network), torch.inference_mode(), undisturbed(network):
        call(network, X)


def test_buffers_made_in_inference_mode_are_no_obstacle():
    with torch.inference_mode():
        network = with_norm_and_dropout().double()
    with unchanged(network), undisturbed(network):
        call(network, X)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_scripted_network_is_left_as_it_was():
    network = torch.jit.trace(with_norm_and_dropout().double().eval(), X)
    network.train()
    next(network.children()).eval()
    modes = [module.training for module in network.modules()]
    state = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    with undisturbed(network):
        call(network, X)
    assert [module.training for module in network.modules()] == modes
    assert all(torch.equal(tensor, state[name]) for name, tensor in network.state_dict().items())


def test_user_hooks_run_in_a_visit_and_stay():
    network = plain().double()
    ran = []
    network.register_forward_hook(lambda *_: ran.append("forward"))
    network[0].register_forward_pre_hook(lambda *_: ran.append("before body"))
    network[1].register_forward_hook(lambda *_, **__: ran.append("head"), with_kwargs=True, always_call=True)
    with unchanged(network), undisturbed(network):
        call(network, X)
    assert ran == ["before body", "head", "forward"]
    network(X)
    assert ran == ["before body", "head", "forward"] * 2


# --- the witness itself -----------------------------------------------------------------------------------------------

CRIMES = {
    "mode": lambda network: network[2].train(),
    "parameter": lambda network: network[0].weight.data.add_(1e-7),
    "parameter exchanged": lambda network: setattr(network[0], "weight", nn.Parameter(network[0].weight.data.clone())),
    "requires_grad": lambda network: network[0].bias.requires_grad_(False),
    "buffer": lambda network: network[1].running_var.add_(1e-12),
    "buffer exchanged": lambda network: setattr(network[1], "running_var", network[1].running_var.clone()),
    "buffer count": lambda network: network[1].num_batches_tracked.add_(1),
    "hook": lambda network: network[3].register_forward_hook(print),
    "attribute": lambda network: setattr(network[3], "seen", 1),
    "gradient": lambda network: setattr(network[0].bias, "grad", torch.zeros_like(network[0].bias)),
    "random state": lambda network: torch.rand(1),
    "type": lambda network: network.float(),
}


@pytest.mark.parametrize("crime", CRIMES)
def test_the_witness_sees(crime):
    network = with_norm_and_dropout().double().eval()
    with pytest.raises(AssertionError, match="changed"), unchanged(network):
        CRIMES[crime](network)


def test_the_witness_sees_nothing_where_nothing_happened():
    network = with_norm_and_dropout().double()
    assert describe(network) == describe(network)
    with unchanged(network):
        pass


# --- batches ----------------------------------------------------------------------------------------------------------

ONES = torch.ones(6)
FORMS = {
    "tensor": (X, X, None),
    "(x, y)": ((X, Y), X, Y),
    "[x, y]": ([X, Y], X, Y),
    "(x,)": ((X,), X, None),
    "(x, None)": ((X, None), X, None),
    "namedtuple": (Pair(X, Y), X, Y),
    "((a, b), y)": (((X, ONES), Y), (X, ONES), Y),
    "[[a, b], y]": ([[X, ONES], Y], [X, ONES], Y),
    "mapping": ({"x": X, "labels": Y}, {"x": X}, Y),
    "mapping without labels": ({"x": X, "mask": ONES}, {"x": X, "mask": ONES}, None),
    "mapping with no labels": ({"x": X, "labels": None}, {"x": X}, None),
    "UserDict": (UserDict(x=X, labels=Y), {"x": X}, Y),
    "OrderedDict": (OrderedDict(labels=Y, x=X), {"x": X}, Y),
    "(mapping, y)": (({"x": X}, Y), {"x": X}, Y),
    "numpy labels": ((X, Y.numpy()), X, Y),
    "list of labels": ((X, Y.tolist()), X, Y),
}


def same(first, second):
    if isinstance(first, torch.Tensor):
        return first is second
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    return type(first) is type(second) and all(map(same, first, second))


@pytest.mark.parametrize("form", FORMS)
def test_a_batch_is_read_as_inputs_and_labels(form):
    raw, inputs, labels = FORMS[form]
    batch = as_batch(raw, "batch 0")
    assert same(batch.inputs, inputs)
    if labels is None:
        assert batch.labels is None
    else:
        assert batch.labels.dtype == torch.int64
        assert torch.equal(batch.labels, labels)


NOT_BATCHES = {
    "three parts": ((X, X, Y), r"got tuple of length 3.*\(\(first, second\), labels\)"),
    "nothing inside": ([], r"got list of length 0"),
    "a number": (3, r"expected \(inputs, labels\).*got int"),
    "None": (None, r"expected \(inputs, labels\).*got NoneType"),
    "a string": ("ab", r"expected \(inputs, labels\).*got str"),
    "an array": (np.zeros((6, 5)), r"expected \(inputs, labels\).*got ndarray"),
    "labels alone": ({"labels": Y}, r"no network inputs beside 'labels'"),
    "an empty mapping": ({}, r"no network inputs"),
    "names as labels": ((X, ["cat"] * 6), r"labels must be .* class indices, got list"),
    "ragged labels": ((X, [[0], [1, 2]]), r"labels must be .* class indices, got list"),
    "size 0": ((X[:0], Y[:0]), r"is empty: its inputs have size 0.*Remove empty batches"),
    "size 0 alone": (X[:0], r"is empty"),
    "size 0 in a tuple": (((X[:0], ONES[:0]), Y[:0]), r"is empty"),
    "size 0 in a mapping": ({"x": X[:0], "labels": Y[:0]}, r"is empty"),
}


@pytest.mark.parametrize("form", NOT_BATCHES)
def test_what_is_not_a_batch_is_refused_with_its_place(form):
    raw, words = NOT_BATCHES[form]
    with pytest.raises(DataError, match=f"(?s)batch 4 of the training loader.*{words}"):
        as_batch(raw, "batch 4 of the training loader")


# --- calls ------------------------------------------------------------------------------------------------------------


class Returning(nn.Module):
    """Runs a forward function given to it."""

    def __init__(self, forward):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        self.forward = types.MethodType(forward, self)


def two(self, left, right=None):
    return self.scale * left - (0 if right is None else right)


def keywords(self, *, left, right):
    return self.scale * left - right


def any_keywords(self, **inputs):
    return self.scale * inputs["left"] - inputs["right"]


def whole_mapping(self, batch):
    return self.scale * batch["left"] - batch["right"]


R = X.flip(0)
CALLS = {
    "tensor": (two, X, 2 * X),
    "tuple": (two, (X, R), 2 * X - R),
    "list": (two, [X, R], 2 * X - R),
    "namedtuple": (two, Images(X, R), 2 * X - R),
    "tuple of one": (two, (X,), 2 * X),
    "keywords": (two, {"right": R, "left": X}, 2 * X - R),
    "optional keyword left out": (two, {"left": X}, 2 * X),
    "keyword only": (keywords, {"right": R, "left": X}, 2 * X - R),
    "any keywords": (any_keywords, {"right": R, "left": X}, 2 * X - R),
    "the mapping itself": (whole_mapping, {"right": R, "left": X}, 2 * X - R),
    "keys that are no names": (lambda self, batch: self.scale * batch[0], {0: X}, 2 * X),
}


@pytest.mark.parametrize("case", CALLS)
def test_inputs_reach_the_network_in_their_form(case):
    forward, inputs, expected = CALLS[case]
    assert torch.equal(call(Returning(forward), inputs), expected)


def test_what_is_not_a_tensor_reaches_the_network_untouched():
    network = Returning(lambda self, x, names, pair: x if names == ["a", "b"] and pair == (1, None) else None)
    assert call(network, {"x": X, "names": ["a", "b"], "pair": (1, None)}).equal(X)


def test_moving_keeps_the_form_of_nested_inputs():
    nested = {"images": Images(X, [R, 3]), "name": "a"}
    moved = to_device(nested, torch.device("cpu"))
    assert isinstance(moved["images"], Images)
    assert moved["images"].left is X
    assert moved["images"].right[0] is R
    assert moved["images"].right[1] == 3
    assert moved["name"] == "a"


@dataclass
class Output:
    logits: object
    loss: object = None


class ModelOutput(OrderedDict):
    """As in transformers: a mapping whose keys are attributes too."""

    def __getattr__(self, name):
        return self[name]


Named = namedtuple("Named", "loss logits")
OUTPUTS = {
    "tensor": lambda z: z,
    "object": Output,
    "mapping": lambda z: {"loss": z.sum(), "logits": z, "aux": z + 1},
    "transformers' output": lambda z: ModelOutput(loss=z.sum(), logits=z),
    "namedtuple with logits": lambda z: Named(z.sum(), z),
    "namespace": lambda z: types.SimpleNamespace(logits=z),
}


@pytest.mark.parametrize("form", OUTPUTS)
def test_the_very_tensor_of_logits_comes_out(form):
    logits = X + 1
    network = Returning(lambda self, z: OUTPUTS[form](logits))
    assert call(network, X) is logits


NO_LOGITS = {
    "tuple": (lambda z: (z, z), "got tuple"),
    "list": (lambda z: [z], "got list"),
    "nothing": (lambda z: None, "got NoneType"),
    "mapping without logits": (lambda z: {"out": z}, "got dict"),
    "object without logits": (lambda z: types.SimpleNamespace(out=z), "got SimpleNamespace"),
    "object with empty logits": (lambda z: Output(None), "got NoneType"),
    "array": (lambda z: z.numpy(), "got ndarray"),
}


@pytest.mark.parametrize("form", NO_LOGITS)
def test_an_output_without_logits_is_refused_with_a_remedy(form):
    output, words = NO_LOGITS[form]
    network = Returning(lambda self, z: output(z))
    with pytest.raises(HeadError, match=f"(?s)'logits'.*{words}.*forward returns the logits"):
        call(network, X)
