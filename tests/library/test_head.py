"""The head is the layer whose output is the network's output, however the network is written."""

import copy
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations

import mola
from mola import HeadError
from mola.laplace import as_structure
from mola.likelihood import CATEGORICAL
from mola.network import as_batch, capture, find_head, undisturbed
from tests.witness import unchanged

X = torch.randn(12, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.arange(12) % 3
LOADER = [(X[:7], Y[:7]), (X[7:], Y[7:])]
FAR = 3 * torch.randn(9, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def make_body():
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh())


class Wrap(nn.Module):
    """A body, a head, and a forward function of both."""

    def __init__(self, forward, body, head, **modules):
        super().__init__()
        self.body, self.head = body, head
        for name, module in modules.items():
            self.add_module(name, module)
        self._forward = forward

    def forward(self, *args, **kwargs):
        return self._forward(self, *args, **kwargs)


def wrapped(forward, **modules):
    return lambda body, head: Wrap(forward, body, head, **{name: make() for name, make in modules.items()})


# --- networks that have a head: each computes head(body(x)) and nothing else ---------------------------------------------


def out_of_order(body, head):
    network = nn.Module()
    network.classifier = head
    network.unused = nn.Linear(4, 3)
    network.body = body
    network.last_defined = nn.Linear(5, 3)
    network.forward = lambda x: network.classifier(network.body(x))
    return network


def nested(body, head):
    inner = nn.ModuleDict({"stages": nn.ModuleList([body]), "top": nn.Sequential(nn.Sequential(head))})
    return Wrap(lambda self, x: self.inner["top"](self.inner["stages"][0](x)), None, None, inner=inner)


def run_then_discarded(self, x):
    features = self.body(x)
    logits = self.head(features)
    self.auxiliary(features)
    return logits


def auxiliary_in_mapping(self, x):
    features = self.body(x)
    return {"logits": self.head(features), "auxiliary": self.auxiliary(features)}


def called_before(self, x):
    self.head(self.body(x + 1))
    return self.head(self.body(x))


def called_after(self, x):
    logits = self.head(self.body(x))
    self.head(self.body(x + 1))
    return logits


def called_twice_with_the_same(self, x):
    features = self.body(x)
    self.head(features)
    return self.head(features)


def hidden_layer_is_the_head(body, head):
    """A layer that is reused: on the way, and as the head."""
    shared = nn.Linear(5, 5)
    return nn.Sequential(shared, nn.Tanh(), shared), shared


def registered_twice(body, head):
    network = Wrap(lambda self, x: self.alias(self.body(x)), body, head)
    network.alias = head
    return network


def tied(body, head):
    network = Wrap(lambda self, x: (self.twin(self.body(x)), self.head(self.body(x)))[1], body, head)
    network.twin = nn.Linear(4, 3)
    network.twin.weight, network.twin.bias = head.weight, head.bias
    return network


def with_active_hooks(body, head):
    network = nn.Sequential(body, head)
    head.register_forward_pre_hook(lambda _, args: (args[0] * 1.0,))
    head.register_forward_hook(lambda _, args, out: out.clone())
    network.register_forward_hook(lambda _, args, out: {"logits": out})
    return network


def named_tensor_of_object(self, x):
    return SimpleNamespace(logits=self.head(self.body(x)), hidden_states=(x,))


def compiled(body, head):
    torch.compiler.reset()
    return torch.compile(nn.Sequential(body, head), backend="eager")


def compiled_and_used(body, head):
    network = compiled(body, head)
    network(X)
    network.eval()(X)
    return network


def compiled_in_place(body, head):
    torch.compiler.reset()
    network = nn.Sequential(body, head)
    network.compile(backend="eager")
    network(X)
    return network


def compiled_body(body, head):
    torch.compiler.reset()
    return nn.Sequential(torch.compile(body, backend="eager"), head)


GOOD = {
    "plain": lambda body, head: nn.Sequential(body, head),
    "nested": nested,
    "out of order": out_of_order,
    "second head runs last": wrapped(run_then_discarded, auxiliary=lambda: nn.Linear(4, 3)),
    "auxiliary logits beside": wrapped(auxiliary_in_mapping, auxiliary=lambda: nn.Linear(4, 3)),
    "called before": wrapped(called_before),
    "called after": wrapped(called_after),
    "called twice": wrapped(called_twice_with_the_same),
    "called by keyword": wrapped(lambda self, x: self.head(input=self.body(x))),
    "registered twice": registered_twice,
    "tied weights": tied,
    "Identity after": lambda body, head: nn.Sequential(body, head, nn.Identity()),
    "Dropout after": lambda body, head: nn.Sequential(body, head, nn.Dropout(0.5)).train(),
    "inactive dropout by function": wrapped(lambda self, x: functional.dropout(self.head(self.body(x)), 0.5, False)),
    "view of the same shape": wrapped(lambda self, x: self.head(self.body(x)).view(-1, 3)),
    "reshape of the same shape": wrapped(lambda self, x: self.head(self.body(x)).reshape(len(x), 3)),
    "flatten of the same shape": wrapped(lambda self, x: self.head(self.body(x)).flatten(1)),
    "detach": wrapped(lambda self, x: self.head(self.body(x)).detach()),
    "contiguous": wrapped(lambda self, x: self.head(self.body(x)).contiguous()),
    "logits in an object": wrapped(named_tensor_of_object),
    "logits in a mapping": wrapped(lambda self, x: {"logits": self.head(self.body(x))}),
    "user hooks": with_active_hooks,
    "fx": lambda body, head: torch.fx.symbolic_trace(nn.Sequential(body, head)),
    "DataParallel on the CPU": lambda body, head: nn.DataParallel(nn.Sequential(body, head)),
}
COMPILED = {
    "torch.compile": compiled,
    "torch.compile, used": compiled_and_used,
    "module.compile": compiled_in_place,
    "compiled body": compiled_body,
}


class OwnLinear(nn.Linear):
    """A subclass with a method more."""

    def describe(self):
        return "mine"


def frozen(head):
    return head.requires_grad_(False)


HEADS = {
    "Linear": lambda: nn.Linear(4, 3),
    "no bias": lambda: nn.Linear(4, 3, bias=False),
    "subclass": lambda: OwnLinear(4, 3),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(4, 3)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(4, 3)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(4, 3)),
    "frozen": lambda: frozen(nn.Linear(4, 3)),
}
CASES = [(network, "Linear") for network in GOOD] + [("plain", head) for head in list(HEADS)[1:]]


@pytest.fixture(params=CASES, ids=lambda case: "-".join(case))
def case(request):
    """A body and a head, and the same two in one of many networks."""
    make_network, make_head = GOOD[request.param[0]], HEADS[request.param[1]]
    body, head = make_body(), make_head()
    return SimpleNamespace(body=body, head=head, network=make_network(body, head))


def test_the_head_is_found_and_nothing_changes(case):
    with unchanged(case.network):
        with undisturbed(case.network):
            found = find_head(case.network, X)
        assert found.layer is case.head
        assert dict(case.network.named_modules(remove_duplicate=False))[found.name] is case.head
        assert (found.classes, found.width, found.has_bias) == (3, 4 + found.has_bias, case.head.bias is not None)


def test_what_the_head_saw_is_what_the_body_gave(case):
    case.body.eval()
    with unchanged(case.network), undisturbed(case.network):
        head = find_head(case.network, X)
        seen = capture(case.network, head, FAR)
        assert torch.equal(seen.features, case.body(FAR))
        torch.testing.assert_close(seen.logits, head.lift(seen.features) @ head.weights().T, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", COMPILED)
def test_a_compiled_network_has_the_same_posterior_and_keeps_no_hook(name):
    body, head = make_body(), nn.Linear(4, 3)
    network = COMPILED[name](body, head)
    expected = mola.fit(nn.Sequential(body, head), LOADER).predict(FAR).probs
    with unchanged(network):
        posterior = mola.fit(network, LOADER)
        for _ in range(2):
            torch.testing.assert_close(posterior.predict(FAR).probs, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(network(X), head(body(X)))


def test_every_way_to_write_a_network_has_the_same_posterior(case):
    reference = mola.fit(nn.Sequential(case.body, case.head).eval(), LOADER, prior_precision=0.3)
    expected = reference.predict(FAR)
    with unchanged(case.network):
        posterior = mola.fit(case.network, LOADER, prior_precision=0.3)
        got = posterior.predict(FAR)
    torch.testing.assert_close(got.probs, expected.probs, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got.logit_variance, expected.logit_variance, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(posterior.log_evidence(), reference.log_evidence(), rtol=1e-12, atol=1e-12)


def test_the_head_may_be_named(case):
    with undisturbed(case.network):
        name = find_head(case.network, X).name
        assert find_head(case.network, X, name).layer is case.head


def test_the_network_still_trains_afterwards(case):
    mola.fit(case.network, LOADER).predict(FAR)
    output = case.network(X)
    logits = output["logits"] if isinstance(output, dict) else getattr(output, "logits", output)
    if not logits.requires_grad:
        return  # the one that detaches its logits never trained
    logits.square().sum().backward()
    for parameter in (*case.body.parameters(), *case.head.parameters()):
        assert (parameter.grad is not None) == parameter.requires_grad


def test_a_bare_linear_layer_is_its_own_head():
    network = nn.Linear(5, 3)
    with undisturbed(network):
        head = find_head(network, X)
    assert head.name == ""
    assert head.layer is network
    first, second = (mola.fit(network, LOADER, head=name).components[0].curvature for name in (None, ""))
    assert torch.equal(first.factors.gram, second.factors.gram)
    torch.testing.assert_close(first.factors.gram[:5, :5], X.T @ X, rtol=1e-13, atol=1e-13)


def test_a_layer_used_on_the_way_and_as_the_head_is_read_at_its_last_use():
    shared = nn.Linear(5, 5)
    network = nn.Sequential(shared, nn.Tanh(), shared)
    with undisturbed(network):
        head = find_head(network, X)
        seen = capture(network, head, X)
    assert head.layer is shared
    assert torch.equal(seen.features, torch.tanh(shared(X)))


def test_either_name_of_a_layer_registered_twice_is_accepted():
    network = registered_twice(make_body(), nn.Linear(4, 3))
    with undisturbed(network):
        for name in ("head", "alias"):
            assert find_head(network, X, name).layer is network.head


def test_batches_of_every_form_give_the_same_posterior():
    """Tensors, tuples and mappings; keywords of forward and the mapping itself."""
    body, head = make_body(), nn.Linear(4, 3)
    left, right = X[:, :2], X[:, 2:]
    join = lambda self, left, right: self.head(self.body(torch.cat([left, right], 1)))  # noqa: E731
    forms = {
        "tensor": (nn.Sequential(body, head), lambda s: (X[s], Y[s])),
        "tuple": (Wrap(join, body, head), lambda s: ((left[s], right[s]), Y[s])),
        "list": (Wrap(join, body, head), lambda s: [[left[s], right[s]], Y[s]]),
        "keywords": (Wrap(join, body, head), lambda s: {"right": right[s], "left": left[s], "labels": Y[s]}),
        "keywords beside labels": (Wrap(join, body, head), lambda s: ({"right": right[s], "left": left[s]}, Y[s])),
        "whole mapping": (MappingNetwork(body, head), lambda s: {"left": left[s], "right": right[s], "labels": Y[s]}),
    }
    expected = mola.fit(nn.Sequential(body, head), LOADER).predict(X)
    for form, (network, batch) in forms.items():
        loader = [batch(slice(0, 7)), batch(slice(7, 12))]
        with unchanged(network):
            posterior = mola.fit(network, loader)
            got = posterior.predict(loader)
        assert torch.allclose(got.probs, expected.probs, rtol=1e-12), form
        inputs = as_batch(batch(slice(0, 12)), form).inputs
        inputs = tuple(inputs) if isinstance(inputs, list) else inputs  # by itself, a list is a loader
        assert torch.allclose(posterior(inputs), expected.probs, rtol=1e-12), form
        assert torch.allclose(posterior.predict(inputs).probs, expected.probs, rtol=1e-12), form


class MappingNetwork(nn.Module):
    def __init__(self, body, head):
        super().__init__()
        self.body, self.head = body, head

    def forward(self, batch):
        return self.head(self.body(torch.cat([batch["left"], batch["right"]], 1)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_networks_in_lower_precision_have_heads_too(dtype):
    network = nn.Sequential(make_body(), nn.Linear(4, 3)).to(dtype)
    with unchanged(network):
        probs = mola.fit(network, [(X.to(dtype), Y)]).predict(X.to(dtype)).probs
    reference = mola.fit(copy.deepcopy(network).double(), [(X.to(dtype).double(), Y)]).predict(X.to(dtype).double())
    assert probs.dtype == torch.float32
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(probs.double(), reference.probs, rtol=tolerance, atol=tolerance)


def test_a_network_that_runs_in_mixed_precision_has_a_head():
    network = Wrap(lambda self, x: self.run(x), make_body().float(), nn.Linear(4, 3).float())
    network.run = torch.autocast("cpu", dtype=torch.bfloat16)(lambda x: network.head(network.body(x)))
    plain = nn.Sequential(network.body, network.head)
    with unchanged(network):
        got = mola.fit(network, [(X.float(), Y)]).predict(X.float()).probs
    torch.testing.assert_close(got, mola.fit(plain, [(X.float(), Y)]).predict(X.float()).probs, rtol=3e-2, atol=3e-2)


def test_mixed_precision_around_everything_changes_little():
    network = nn.Sequential(make_body(), nn.Linear(4, 3)).float()
    expected = mola.fit(network, [(X.float(), Y)]).predict(FAR.float()).probs
    with unchanged(network), torch.autocast("cpu", dtype=torch.bfloat16):
        got = mola.fit(network, [(X.float(), Y)]).predict(FAR.float()).probs
    torch.testing.assert_close(got.float(), expected, rtol=5e-2, atol=5e-2)
    torch.testing.assert_close(got.float().sum(1), torch.ones(9, dtype=torch.float32), rtol=0, atol=1e-5)


@pytest.mark.parametrize("structure", ["kron", "kron-diag", "diag", "full"])
def test_under_autocast_nothing_but_the_networks_own_rounding_shows(structure):
    """The factors are those of the activations as the network rounded them, summed in float64."""
    network = nn.Sequential(make_body(), nn.Linear(4, 3)).float()
    seen = []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        handle = network[1].register_forward_hook(lambda _, given, output: seen.append((given[0], output)))
        with torch.no_grad():
            network(X.float())
        handle.remove()
        posterior = mola.fit(network, [(X.float(), Y)], structure=structure)
        probs = posterior(X.float())
    ((features, logits),) = seen
    assert logits.dtype == torch.bfloat16
    lifted = torch.cat([features.double(), torch.ones(len(features), 1)], dim=1)
    kind = as_structure(structure)
    expected = kind.merge(None, kind.sums(lifted, CATEGORICAL.curvature(logits.double()), None)).tensors()
    for name, tensor in posterior.components[0].curvature.factors.tensors().items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-12, atol=1e-14)
    assert probs.dtype == torch.float32


def test_eval_results_are_used_whatever_the_mode():
    body = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.ReLU())
    network = nn.Sequential(body, nn.Linear(4, 3))
    network(X)  # moves the running statistics off their start
    network.eval()
    expected = mola.fit(network, LOADER).predict(FAR).probs
    for train in (lambda: network.train(), lambda: body[2].eval(), lambda: body[1].eval().requires_grad_(False)):
        train()
        with unchanged(network):
            assert torch.equal(mola.fit(network, LOADER).predict(FAR).probs, expected)


def test_no_copy_of_the_network_is_made(monkeypatch):
    class Precious(nn.Sequential):
        def __deepcopy__(self, memo):
            raise AssertionError("copied")

        def __reduce_ex__(self, protocol):
            raise AssertionError("pickled")

    network = Precious(make_body(), nn.Linear(4, 3))
    allocated = []
    clone = torch.Tensor.clone
    monkeypatch.setattr(torch.Tensor, "clone", lambda self, **how: allocated.append(self) or clone(self, **how))
    monkeypatch.setattr(copy, "deepcopy", lambda *_: pytest.fail("copied"))
    posterior = mola.fit([network, network], LOADER)
    posterior.predict(FAR)
    assert all(one is network for one in posterior.networks)
    assert all(component.head.layer is network[1] for component in posterior.components)
    parameters = {parameter.data_ptr() for parameter in network.parameters()}
    assert not parameters & {tensor.data_ptr() for tensor in allocated}


# --- networks that have none --------------------------------------------------------------------------------------------


class CosineLinear(nn.Linear):
    def forward(self, x):
        return functional.linear(functional.normalize(x), functional.normalize(self.weight), self.bias)


class LowRankLinear(nn.Linear):
    """As adapters do it: more than weight times input."""

    def forward(self, x):
        return super().forward(x) + x.sum(1, keepdim=True)


def mean_of_two_calls(self, x):
    return (self.head(self.body(x)) + self.head(self.body(-x))) / 2


def temperature(body, head):
    network = Wrap(lambda self, x: self.head(self.body(x)) / self.temperature, body, head)
    network.register_buffer("temperature", torch.tensor(2.5))
    return network


def half_head(body, head):
    return Wrap(lambda self, x: self.head(self.body(x).float()).double(), body, head.float())


def scaled_by_a_hook(body, head):
    head.register_forward_hook(lambda _, args, out: 2 * out)
    return nn.Sequential(body, head)


def convolutional(body, head):
    return nn.Sequential(body, nn.Unflatten(1, (4, 1, 1)), nn.Conv2d(4, 3, 1), nn.Flatten())


def functional_head(self, x):
    return functional.linear(self.body[1](x[:, :4]), self.head.weight, self.head.bias)


LAYER = r"'(head|1)'"
BAD = {
    "softmax": (lambda b, h: nn.Sequential(b, h, nn.Softmax(1)), rf"{LAYER}.*applies a softmax.*returns the output of"),
    "log-softmax": (lambda b, h: nn.Sequential(b, h, nn.LogSoftmax(1)), rf"{LAYER}.*log-softmax.*returns the output"),
    "scaled": (wrapped(lambda s, x: 3 * s.head(s.body(x))), r"'head'.*scales it by 3 .*returns the output of 'head'"),
    "temperature": (temperature, r"'head'.*scales it by 0\.4 .*temperature.*returns the output of 'head'"),
    "scaled in place": (wrapped(lambda s, x: s.head(s.body(x)).mul_(2)), r"'head'.*in place.*plain output of 'head'"),
    "shifted in place": (wrapped(lambda s, x: s.head(s.body(x)).add_(1)), r"'head'.*in place.*plain output of 'head'"),
    "one class masked in place": (
        wrapped(lambda s, x: s.head(s.body(x)).index_fill_(1, torch.tensor([2]), -1e9)),
        r"'head'.*in place.*plain output of 'head'",
    ),
    "scaled by a hook": (scaled_by_a_hook, rf"{LAYER}.*weight times its input.*plain output of {LAYER}"),
    "activation": (lambda b, h: nn.Sequential(b, h, nn.ReLU()), rf"{LAYER}.*returns the output of {LAYER}"),
    "normalised": (lambda b, h: nn.Sequential(b, h, nn.LayerNorm(3)), rf"{LAYER}.*returns the output of {LAYER}"),
    "mean of two calls": (wrapped(mean_of_two_calls), r"'head'.*returns the output of 'head'"),
    "copied": (wrapped(lambda s, x: s.head(s.body(x)).clone()), r"'head'.*cop(y|ies).*returns the output of 'head'"),
    "converted": (half_head, r"'head'.*float32.*float64.*returns the output of 'head'"),
    "two classes of three": (
        wrapped(lambda s, x: s.head(s.body(x))[:, :2]),
        r"'head' gives shape \(12, 3\).*\(12, 2\).*returns the output of 'head'",
    ),
    "reshaped": (
        wrapped(lambda s, x: s.head(s.body(x)).view(-1, 6)),
        r"'head' gives shape \(12, 3\).*reshapes it to \(6, 6\).*returns the output of 'head'",
    ),
    "transposed": (wrapped(lambda s, x: s.head(s.body(x)).T), r"'head' gives shape \(12, 3\).*\(3, 12\).*output of 'head'"),
    "made 3-d": (
        wrapped(lambda s, x: s.head(s.body(x)).view(4, 3, 3)),
        r"\(batch, classes\).*\(4, 3, 3\).*'head'.*\(12, 3\).*without reshaping",
    ),
    "squeezed to 1-d": (
        wrapped(lambda s, x: s.one(s.body(x)).squeeze(1), one=lambda: nn.Linear(4, 1)),
        r"\(batch, classes\).*\(12,\).*'one'.*\(12, 1\)",
    ),
    "one logit": (
        wrapped(lambda s, x: s.one(s.body(x)), one=lambda: nn.Linear(4, 1)),
        r"at least 2 classes.*1 output.*bernoulli",
    ),
    "no linear head": (convolutional, r"(no nn.Linear|last linear layer).*nn.Linear|'0\.0'.*returns the output"),
    "no linear layer at all": (lambda b, h: nn.Sequential(nn.Tanh()), r"no nn.Linear.*Sequential.*End the network in an nn.Linear"),
    "head by function": (wrapped(functional_head), r"no nn.Linear.*End the network in an nn.Linear"),
    "cosine head": (lambda b, h: nn.Sequential(b, CosineLinear(4, 3)), r"'1'.*weight times its input plus bias"),
    "adapter in the head": (lambda b, h: nn.Sequential(b, LowRankLinear(4, 3)), r"'1'.*weight times its input plus bias"),
    "tuple": (wrapped(lambda s, x: (s.head(s.body(x)), x)), r"got tuple.*returns the logits"),
    "features returned": (wrapped(lambda s, x: (s.head(s.body(x)), s.body(x))[1]), r"'body\.0'.*returns the output of 'body\.0'"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_network_without_a_head_is_refused_and_left_alone(name):
    make, words = BAD[name]
    network, good = make(make_body(), nn.Linear(4, 3)).train(), nn.Linear(5, 3)
    message = rf"(?s)models\[1\] \({type(network).__name__}\): .*{words}"
    with unchanged(network, good), pytest.raises(HeadError, match=message):
        mola.fit([good, network], [(X, Y)])


def test_a_square_of_logits_that_is_transposed_is_not_the_heads_output():
    """Same memory, same shape: only the strides tell."""
    network = wrapped(lambda s, x: s.head(s.body(x)).T)(make_body(), nn.Linear(4, 3))
    with pytest.raises(HeadError, match=r"'head' gives shape \(3, 3\).*returns the output of 'head'"):
        mola.fit(network, [(X[:3], Y[:3])])


def test_a_scale_of_one_is_not_called_a_temperature():
    network = wrapped(lambda s, x: s.head(s.body(x)) * 1.0)(make_body(), nn.Linear(4, 3))
    with pytest.raises(HeadError) as caught:
        mola.fit(network, LOADER)
    assert "temperature" not in str(caught.value)


class Advised(nn.Module):
    """Runs a network, and returns what one of its layers gave."""

    def __init__(self, network, layer):
        super().__init__()
        self.network = network
        layer.register_forward_hook(lambda _, args, output: setattr(self, "output", output))

    def forward(self, x):
        self.network(x)
        return self.output


@pytest.mark.parametrize("name", [name for name, (_, words) in BAD.items() if "returns the output of" in words])
def test_the_advice_of_the_error_works(name):
    network = BAD[name][0](make_body(), nn.Linear(4, 3))
    with pytest.raises(HeadError) as caught:
        mola.fit(network, [(X, Y)])
    layer = re.search(r"returns the output of '([^']+)'", str(caught.value)).group(1)
    advised = Advised(network, network.get_submodule(layer))
    assert mola.fit(advised, [(X, Y)]).components[0].head.name == f"network.{layer}"


# --- a head by name -----------------------------------------------------------------------------------------------------


def two_heads():
    return Wrap(run_then_discarded, make_body(), nn.Linear(4, 3), auxiliary=nn.Linear(4, 3))


NAMED = {
    "no such module": ("classifier", r"'classifier'.*no module of that name.*'head', 'auxiliary'"),
    "not a Linear": ("body.1", r"'body\.1' is a Tanh, not an nn\.Linear.*'head', 'auxiliary'"),
    "the network itself": ("", r"'' is a Wrap, not an nn\.Linear.*'head'"),
    "not the one returned": ("auxiliary", r"'auxiliary' was given.*output of layer 'head'.*head='head'.*None"),
    "a hidden layer": ("body.0", r"'body\.0' was given.*output of layer 'head'.*head='head'"),
}


@pytest.mark.parametrize("name", NAMED)
def test_a_wrong_name_is_refused(name):
    given, words = NAMED[name]
    network = two_heads()
    with unchanged(network), pytest.raises(HeadError, match=f"(?s){words}"):
        mola.fit(network, LOADER, head=given)


def test_one_name_for_all_or_one_for_each():
    first, second = two_heads(), nn.Sequential(make_body(), nn.Linear(4, 3))
    posterior = mola.fit([first, second], LOADER, head=["head", "1"])
    assert [component.head.name for component in posterior.components] == ["head", "1"]
    assert mola.fit([first, first], LOADER, head="head").components[1].head.name == "head"
    with pytest.raises(HeadError, match=r"models\[1\].*'head'.*no module of that name"):
        mola.fit([first, second], LOADER, head="head")
    with pytest.raises(mola.OptionError, match=r"head: expected one name, or 2 .*got 3"):
        mola.fit([first, second], LOADER, head=["head", "1", "1"])


@dataclass
class Fails:
    """Raises in the pass number `at`, counted from 1, or never."""

    at: int
    kind: type[BaseException] = RuntimeError
    passes: int = 0

    def __call__(self, *_):
        self.passes += 1
        if self.passes == self.at:
            raise self.kind("struck")


@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("kind", [RuntimeError, KeyError, KeyboardInterrupt])
@pytest.mark.parametrize("place", ["body", "head", "after"])
def test_an_exception_in_any_pass_leaves_no_hook(at, kind, place):
    strikes = Fails(at, kind)
    network = two_heads().train()
    module = {"body": network.body, "head": network.head, "after": network.auxiliary}[place]
    module.register_forward_hook(strikes)
    with unchanged(network), pytest.raises((kind, mola.DataError), match="struck"):
        mola.fit(network, [*LOADER, *LOADER])
    assert strikes.passes == at
    mola.fit(network, LOADER)


def test_a_user_hook_sees_each_pass_once():
    network = two_heads()
    strikes = Fails(at=-1)
    network.head.register_forward_hook(strikes)
    mola.fit(network, LOADER)
    assert strikes.passes == 2  # one for each batch: the first finds the head, too


# --- heads that run at every position -------------------------------------------------------------------------------------


class AlongASequence(nn.Module):
    """Scores at all positions (n, T, C), of which `take` makes logits (n, C)."""

    def __init__(self, take):
        super().__init__()
        self.body, self.head, self.take = nn.Sequential(nn.Linear(5, 4), nn.Tanh()), nn.Linear(4, 3), take

    def forward(self, x):
        return self.take(self.head(self.body(x)))


SEQUENCES = torch.randn(12, 6, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
LAST = torch.randint(6, (12,), generator=torch.Generator().manual_seed(4))
TAKEN = {
    "the last position": (lambda scores: scores[:, -1], lambda features: features[:, -1]),
    "one for each input": (
        lambda scores: scores[torch.arange(len(scores)), LAST[: len(scores)]],
        lambda features: features[torch.arange(len(features)), LAST[: len(features)]],
    ),
    "the average": (lambda scores: scores.mean(1), lambda features: features.mean(1)),
}


@pytest.mark.export
@pytest.mark.parametrize("name", TAKEN)
def test_a_head_at_every_position_is_that_of_the_features_at_the_positions_taken(name, tmp_path):
    take, same = TAKEN[name]
    network = AlongASequence(take)
    with unchanged(network):
        posterior = mola.fit(network, [(SEQUENCES, Y)])
        got = posterior.predict(SEQUENCES)
    with torch.no_grad():
        features = same(network.body(SEQUENCES))
    expected = mola.fit(network.head, [(features, Y)])
    torch.testing.assert_close(got.probs, expected(features), rtol=1e-10, atol=0)
    torch.testing.assert_close(got.ood_score, expected.predict(features).ood_score, rtol=1e-10, atol=0)
    posterior.save(tmp_path)
    assert torch.equal(mola.load(tmp_path, models=network)(SEQUENCES), got.probs)
    exported = torch.export.export(posterior.eval(), (SEQUENCES,)).module()
    torch.testing.assert_close(exported(SEQUENCES), got.probs, rtol=1e-10, atol=0)


def test_a_head_at_every_position_runs_in_many_threads_at_once():
    network = AlongASequence(lambda scores: scores[:, -1])
    posterior = mola.fit(network, [(SEQUENCES, Y)])
    expected = posterior(SEQUENCES)
    with ThreadPoolExecutor(4) as threads:
        for got in threads.map(lambda _: posterior(SEQUENCES), range(40)):
            assert torch.equal(got, expected)
    assert network(SEQUENCES).shape == (12, 3)


@pytest.mark.parametrize(
    "take",
    [lambda scores: scores.amax(1), lambda scores: scores[:, -1].softmax(-1), lambda scores: scores[:, -1, :3] * 2],
    ids=["maximum", "softmax", "scaled"],
)
def test_a_network_that_does_more_than_to_pick_positions_is_refused(take):
    network = AlongASequence(take)
    with unchanged(network), pytest.raises(HeadError, match=r"'head'.*\(12, 6, 3\)"):
        mola.fit(network, [(SEQUENCES, Y)])
