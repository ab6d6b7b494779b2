"""The head is the layer whose output is the network's output, however the network is written."""

import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from molaplace.errors import HeadError
from molaplace.likelihoods import BERNOULLI, CATEGORICAL, GAUSSIAN
from molaplace.network import capture, evaluating, find_head, find_heads, head_by_name
from tests.witness import unchanged

X = torch.randn(12, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
FAR = 3 * torch.randn(9, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def make_body():
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh())


class Wrap(nn.Module):
    """A body, a head, and a forward function of both."""

    def __init__(self, forward, body, head, **modules):
        super().__init__()
        self.body = body
        self.head = head
        for name, module in modules.items():
            self.add_module(name, module)
        self._forward = forward

    def forward(self, *args, **kwargs):
        return self._forward(self, *args, **kwargs)


def wrapped(forward, **modules):
    return lambda body, head: Wrap(forward, body, head, **{name: make() for name, make in modules.items()})


# --- networks that have a head: each computes head(body(x)) and nothing else ---------------------------------------------


def nested(body, head):
    inner = nn.ModuleDict({"stages": nn.ModuleList([body]), "top": nn.Sequential(nn.Sequential(head))})
    return Wrap(lambda self, x: self.inner["top"](self.inner["stages"][0](x)), None, None, inner=inner)


def run_then_discarded(self, x):
    features = self.body(x)
    logits = self.head(features)
    self.auxiliary(features)
    return logits


def with_active_hooks(body, head):
    network = nn.Sequential(body, head)
    head.register_forward_pre_hook(lambda _, args: (args[0] * 1.0,))
    head.register_forward_hook(lambda _, args, out: out.clone())
    network.register_forward_hook(lambda _, args, out: {"logits": out})
    return network


def compiled(body, head):
    torch.compiler.reset()
    network = torch.compile(nn.Sequential(body, head), backend="eager")
    network(X)
    return network


GOOD = {
    "plain": lambda body, head: nn.Sequential(body, head),
    "nested": nested,
    "second head runs last": wrapped(run_then_discarded, auxiliary=lambda: nn.Linear(4, 3)),
    "called by keyword": wrapped(lambda self, x: self.head(input=self.body(x))),
    "Dropout after": lambda body, head: nn.Sequential(body, head, nn.Dropout(0.5)).train(),
    "logits in an object": wrapped(lambda self, x: SimpleNamespace(logits=self.head(self.body(x)), hidden_states=(x,))),
    "user hooks": with_active_hooks,
    "DataParallel on the CPU": lambda body, head: nn.DataParallel(nn.Sequential(body, head)),
    "scripted body": lambda body, head: nn.Sequential(torch.jit.trace(body, X), head),
    "torch.compile": compiled,
    "gradients on": wrapped(torch.enable_grad()(lambda self, x: self.head(self.body(x)))),
}


HEADS = {
    "Linear": lambda: nn.Linear(4, 3),
    "no bias": lambda: nn.Linear(4, 3, bias=False),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(4, 3)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(4, 3)),
}
CASES = [(network, "Linear") for network in GOOD] + [("plain", head) for head in list(HEADS)[1:]]


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_the_head_is_found_and_captured_in_every_pass(case):
    body = make_body()
    layer = HEADS[case[1]]()
    network = GOOD[case[0]](body, layer).double()
    with unchanged(network), evaluating(network):
        head = find_head(network, X)
        assert head.module is layer
        assert (head.outputs, head.inputs, head.width, head.axis) == (3, 4, 4 + head.has_bias, -1)
        assert find_head(network, X, head.name) == head == head_by_name(network, head.name)
        with torch.no_grad():
            expected = body(FAR)
            captured = capture([network], [head], FAR, CATEGORICAL)
        assert torch.equal(captured.features[0], expected)
        assert not captured.features[0].requires_grad
        assert not captured.outputs[0].requires_grad
        (rows,) = captured.chunks()
        (phi,) = rows.phi
        (outputs,) = rows.outputs
        torch.testing.assert_close(outputs, phi @ head.weights().T, rtol=1e-12, atol=1e-12)
        assert phi.shape == (9, head.width)


def test_a_layer_used_on_the_way_and_as_the_head_is_read_at_its_last_use():
    shared = nn.Linear(5, 5)
    network = nn.Sequential(shared, nn.Tanh(), shared)
    captured = capture([network], [find_head(network, X)], X, CATEGORICAL)
    torch.testing.assert_close(captured.features[0], torch.tanh(shared(X)).detach(), rtol=0, atol=0)


# --- networks that have none --------------------------------------------------------------------------------------------


class CosineLinear(nn.Linear):
    def forward(self, x):
        return functional.linear(functional.normalize(x), functional.normalize(self.weight), self.bias)


def scaled_by_a_hook(body, head):
    head.register_forward_hook(lambda _, args, out: 2 * out)
    return nn.Sequential(body, head)


def two_heads(body, head):
    joined = wrapped(
        lambda s, x: torch.cat([s.head(s.body(x)), s.auxiliary(s.body(x))], 1), auxiliary=lambda: nn.Linear(4, 3)
    )
    return joined(body, head)


LAYER = r"'(head|1)'"
BAD = {
    "softmax": (lambda b, h: nn.Sequential(b, h, nn.Softmax(1)), rf"{LAYER}.*applies a softmax.*returns the output of"),
    "temperature": (wrapped(lambda s, x: s.head(s.body(x)) / 2.5), r"'head'.*temperature.*returns the output of"),
    "scaled in place": (wrapped(lambda s, x: s.head(s.body(x)).mul_(2)), r"'head'.*in place.*unmodified output of 'head'"),
    "scaled by a hook": (scaled_by_a_hook, rf"{LAYER}.*weight times its input.*unmodified output of {LAYER}"),
    "two of three classes": (wrapped(lambda s, x: s.head(s.body(x))[:, :2]), r"'head'.*\(12, 3\).*\(12, 2\).*returns the output of"),
    "two heads": (two_heads, r"'auxiliary'.*\(12, 6\), perhaps .*several heads.*such as 'auxiliary', unchanged"),
    "one logit": (wrapped(lambda s, x: s.logit(s.body(x)), logit=lambda: nn.Linear(4, 1)), r"at least 2 classes.*bernoulli"),
    "no linear layer": (lambda b, h: nn.Sequential(nn.Tanh()), r"no nn.Linear.*Sequential.*End the network with an nn.Linear"),
    "cosine head": (lambda b, h: nn.Sequential(b, CosineLinear(4, 3)), r"'1'.*weight times its input plus its bias"),
    "tuple": (wrapped(lambda s, x: (s.head(s.body(x)), x)), r"got tuple.*logits=lambda"),
    "features returned": (wrapped(lambda s, x: (s.head(s.body(x)), s.body(x))[1]), r"'body\.0'.*returns the output of .*'body\.0'"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_network_without_a_head_is_refused_with_advice_that_works(name):
    make, words = BAD[name]
    network = make(make_body(), nn.Linear(4, 3)).train()
    good = nn.Linear(5, 3)
    message = rf"(?s)networks\[1\] \({type(network).__name__}\): .*{words}"
    with unchanged(network, good), evaluating(network), pytest.raises(HeadError, match=message) as caught:
        find_heads([good, network], [None, None], X, CATEGORICAL)
    advice = re.search(r"returns the output of .*, such as '([^']+)'", str(caught.value))
    if advice is not None:
        outputs = []
        network.get_submodule(advice.group(1)).register_forward_hook(lambda _, args, output: outputs.append(output))
        advised = Wrap(lambda self, x: (self.network(x), outputs[-1])[1], None, None, network=network)
        assert find_head(advised, X).name == f"network.{advice.group(1)}"


class Distilled(nn.Module):
    """Like a distilled vision transformer: two heads on two tokens, averaged in evaluation mode."""

    def __init__(self):
        super().__init__()
        self.bodies = nn.ModuleList([make_body(), make_body()])
        self.heads = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)])

    def forward(self, x):
        outputs = [head(body(x)) for head, body in zip(self.heads, self.bodies, strict=True)]
        return tuple(outputs) if self.training else (outputs[0] + outputs[1]) / 2


class Joined(nn.Module):
    """The same outputs from one head, as the message advises."""

    def __init__(self, network):
        super().__init__()
        self.bodies = network.bodies
        first, second = network.heads
        self.head = nn.Linear(8, 3)
        self.head.weight.data = torch.cat([first.weight, second.weight], 1) / 2
        self.head.bias.data = (first.bias + second.bias) / 2

    def forward(self, x):
        return self.head(torch.cat([body(x) for body in self.bodies], 1))


def test_the_mean_of_two_heads_is_refused_with_advice_that_works():
    network = Distilled().train()
    words = r"mean of the outputs of layers 'heads.0' and 'heads.1'.*nn\.Linear\(8, 3\).* / 2"
    with evaluating(network), pytest.raises(HeadError, match=words):
        find_head(network, X)
    joined = Joined(network)
    torch.testing.assert_close(joined(X), network.eval()(X))
    assert find_head(joined, X).name == "head"


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:torch.quantize:UserWarning")
def test_scripted_and_quantised_networks_are_refused_with_the_reason():
    network = nn.Sequential(make_body(), nn.Linear(4, 3)).float().eval()
    with pytest.raises(HeadError, match=r"TorchScript module.*Pass the original Python module"):
        find_head(torch.jit.trace(network, X.float()), X.float())
    quantised = torch.ao.quantization.quantize_dynamic(network, {nn.Linear})
    with pytest.raises(HeadError, match=r"layers are quantised.*Keep the last layer in floating point"):
        find_head(quantised, X.float())
    body = torch.ao.quantization.quantize_dynamic(network[0], {nn.Linear})
    assert find_head(nn.Sequential(body, network[1]), X.float()).name == "1"


WRONG_NAMES = {
    "classifier": r"'classifier'.*is not a module.*'head', 'auxiliary'",
    "body.1": r"'body\.1' is a Tanh, not an nn\.Linear.*'head', 'auxiliary'",
    "auxiliary": r"head 'auxiliary' was passed.*output of layer 'head'.*head='head'.*None",
}


@pytest.mark.parametrize("name", WRONG_NAMES)
def test_a_wrong_name_is_refused(name):
    network = GOOD["second head runs last"](make_body(), nn.Linear(4, 3))
    with unchanged(network), pytest.raises(HeadError, match=f"(?s){WRONG_NAMES[name]}"):
        find_head(network, X, name)


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_an_exception_in_the_pass_leaves_no_hook(kind):
    network = nn.Sequential(make_body(), nn.Linear(4, 3), nn.Identity())
    head = find_head(network, X)

    def strike(*_):
        raise kind("struck")

    network[2].register_forward_hook(strike)
    for run in (lambda: find_head(network, X), lambda: capture([network], [head], X, CATEGORICAL)):
        with unchanged(network), pytest.raises((kind, ValueError), match="struck"):
            run()


def test_a_network_that_stops_returning_its_heads_output_is_noticed():
    network = nn.Sequential(make_body(), nn.Linear(4, 3))
    head = find_head(network, X)
    network.append(nn.Softmax(1))
    with pytest.raises(HeadError, match=r"in this pass, .* not the output of its head '1'"):
        capture([network], [head], X, CATEGORICAL)
    network[2] = nn.Unflatten(1, (3, 1))
    with pytest.raises(HeadError, match=r"\(batch, classes\).*\(12, 3, 1\)"):
        capture([network], [head], X, CATEGORICAL)


# --- a single output, heads at every position, threads, traces ------------------------------------------------------------


SQUEEZED = {"squeeze": lambda out: out.squeeze(1), "column": lambda out: out[:, 0]}


@pytest.mark.parametrize("likelihood", [BERNOULLI, GAUSSIAN], ids=lambda likelihood: likelihood.name)
@pytest.mark.parametrize("take", [*SQUEEZED.values(), lambda out: out], ids=[*SQUEEZED, "matrix"])
def test_one_output_may_be_squeezed(likelihood, take):
    network = wrapped(lambda s, x: take(s.head(s.body(x))))(make_body(), nn.Linear(4, 1)).eval()
    head = find_head(network, X, None, likelihood)
    captured = capture([network], [head], X, likelihood)
    assert captured.outputs[0].shape == (12, 1)
    assert torch.equal(captured.features[0], network.body(X).detach())


class Sequences(nn.Module):
    """Scores at all positions (n, T, C), from which `take` makes logits (n, C)."""

    def __init__(self, take):
        super().__init__()
        self.body = make_body()
        self.head = nn.Linear(4, 3)
        self.take = take

    def forward(self, x):
        return self.take(self.head(self.body(x)))


TEXTS = torch.randn(12, 6, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
LAST = torch.randint(6, (12,), generator=torch.Generator().manual_seed(4))
TAKEN = {
    "the last position": lambda values: values[:, -1],
    "one for each input": lambda values: values[torch.arange(len(LAST)), LAST],
    "the average": lambda values: values.mean(1),
}


@pytest.mark.parametrize("name", TAKEN)
def test_a_head_at_every_position_is_read_at_the_positions_taken(name):
    network = Sequences(TAKEN[name]).eval()
    with unchanged(network):
        head = find_head(network, TEXTS)
        captured = capture([network], [head], TEXTS, CATEGORICAL)
    assert head.every_position
    torch.testing.assert_close(captured.features[0], TAKEN[name](network.body(TEXTS)).detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(captured.outputs[0], network(TEXTS).detach(), rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    "take",
    [lambda scores: scores.amax(1), lambda scores: scores[:, -1].softmax(-1), lambda scores: scores[:, -1, :3] * 2],
    ids=["maximum", "softmax", "scaled"],
)
def test_a_network_that_does_more_than_pick_positions_is_refused(take):
    with pytest.raises(HeadError, match=r"'head'.*\(12, 6, 3\)"):
        find_head(Sequences(take), TEXTS)


class Exported(nn.Module):
    """Captures in its forward, as a posterior does."""

    def __init__(self, network, head, likelihood):
        super().__init__()
        self.network = network
        self.head = head
        self.likelihood = likelihood

    def forward(self, x):
        with evaluating(self.network):
            rows = capture([self.network], [self.head], x, self.likelihood).rows_at()
            return rows.phi[0], rows.outputs[0]


@pytest.mark.export
@pytest.mark.parametrize("name", TAKEN)
def test_a_head_at_every_position_traces(name):
    network = Sequences(TAKEN[name]).eval()
    module = Exported(network, find_head(network, TEXTS), CATEGORICAL).eval()
    dynamic = name != "one for each input"
    shapes = ({0: torch.export.Dim("n")},) if dynamic else None
    program = torch.export.export(module, (TEXTS,), dynamic_shapes=shapes, strict=False).module()
    inputs = torch.cat([TEXTS, TEXTS[:5]]) if dynamic else TEXTS
    for got, expected in zip(program(inputs), module(inputs), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)
