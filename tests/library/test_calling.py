"""Any network and any batch, images of different sizes, and a checksum of the weights."""

import random
import sys
import time
import types
from collections import UserDict, namedtuple
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import molaplace as mola
from molaplace.errors import DataError, OptionError
from molaplace.network import (
    LogitsOf,
    Resized,
    as_batch,
    call,
    state_checksums,
)
from tests.closeness import assert_close

X = torch.randn(6, 5, generator=torch.Generator().manual_seed(1)).double()
Y = torch.tensor([0, 1, 2, 0, 1, 2])
ONES = torch.ones(6)
Pair = namedtuple("Pair", "image label")
Images = namedtuple("Images", "left right")


# --- eval mode ----------------------------------------------------------------------------------------------------------


def test_networks_without_values_are_refused_before_the_first_pass():
    lazy = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 3))
    with pytest.raises(DataError, match=r"lazy parameters.*'0.weight'.*Run it on one batch"):
        mola.ensemble(lazy)
    meta = nn.Sequential(nn.Linear(5, 3, device="meta"))
    with pytest.raises(DataError, match=r"meta device.*'0.weight'.*to_empty"):
        mola.fit(meta, [(X, Y)])


def dropping(seed):
    torch.manual_seed(seed)
    network = nn.Sequential(
        nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Sequential(nn.Dropout(0.9), nn.Linear(8, 3))
    )
    network[1].train(seed != 0)  # frozen in the first network
    return network.double()


def training_flags(network):
    return [module.training for module in network.modules()]


@pytest.mark.parametrize("compiled", [False, True])
def test_threads_predict_as_one_does_and_leave_the_networks_as_they_were(compiled):
    """Without dropout and by the stored statistics, also beside calls that fail inside a network, and with networks in two posteriors."""
    networks = [dropping(0), dropping(1)]
    networks[1][3] = networks[0][3]  # part of both
    flags = [training_flags(network) for network in networks]
    checksums = state_checksums(networks)  # of the statistics too
    passed = [torch.compile(networks[0], backend="eager"), networks[1]] if compiled else networks
    posterior = mola.fit(passed, [(X, Y)])
    predictors = [posterior, mola.fit(passed[1], [(X, Y)], link="mc"), mola.ensemble(passed)]
    alone = [predictor(X) for predictor in predictors]
    expected = posterior.predict(X)
    prediction = posterior.predict(X)
    assert [training_flags(network) for network in networks] == flags

    def predict(seed):
        if seed % 5 == 0:
            with pytest.raises(DataError):
                posterior.predict(torch.full_like(X, torch.nan))
        if seed % 7 == 0:
            with pytest.raises(DataError, match="failed on inputs"):
                posterior(X[:, :3])
        time.sleep(random.Random(seed).random() / 1000)
        is_same = torch.equal(prediction.mutual_information, expected.mutual_information)  # computed when it is read
        return is_same and torch.equal(predictors[seed % 3](X), alone[seed % 3])

    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(predict, range(300)))
    finally:
        sys.setswitchinterval(switch)
    assert [training_flags(network) for network in networks] == flags
    assert state_checksums(networks) == checksums


def test_the_part_before_the_last_layer_may_be_compiled():
    """A whole network runs without compilation."""
    networks = [dropping(0), dropping(1)]
    expected = mola.fit(networks, [(X, Y)])(X)
    calls = []

    def backend(graph, _):
        def run(*arguments):
            calls.append(len(arguments))
            return graph(*arguments)

        return run

    whole = [torch.compile(network, backend=backend) for network in networks]
    assert torch.equal(mola.fit(whole, [(X, Y)])(X), expected)
    assert not calls
    parts = [nn.Sequential(torch.compile(network[:-1], backend=backend), network[-1]) for network in networks]
    posterior = mola.fit(parts, [(X, Y)])
    before = len(calls)
    assert_close(posterior(X), expected)
    assert len(calls) == before + 2


# --- batches and loaders ------------------------------------------------------------------------------------------------

FORMS = {
    "tensor": (X, X, None),
    "(x, y)": ((X, Y), X, Y),
    "(x,)": ((X,), X, None),
    "namedtuple": (Pair(X, Y), X, Y),
    "((a, b), y)": (((X, ONES), Y), (X, ONES), Y),
    "mapping": ({"x": X, "labels": Y}, {"x": X}, Y),
    "mapping without labels": ({"x": X, "mask": ONES}, {"x": X, "mask": ONES}, None),
    "UserDict": (UserDict(x=X, labels=Y), {"x": X}, Y),
    "(mapping, y)": (({"x": X}, Y), {"x": X}, Y),
    "numpy labels": ((X, Y.numpy()), X, Y),
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
    assert batch.labels is None if labels is None else torch.equal(batch.labels, labels)


# --- calls --------------------------------------------------------------------------------------------------------------


class Returning(nn.Module):
    """Runs a forward function given to it."""

    def __init__(self, forward):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        self.forward = types.MethodType(forward, self)


def two(self, left, right=None):
    return self.scale * left - (0 if right is None else right)


def any_keywords(self, **inputs):
    return self.scale * inputs["left"] - inputs["right"]


def whole_mapping(self, batch):
    return self.scale * batch["left"] - batch["right"]


R = X.flip(0)
CALLS = {
    "tensor": (two, X, 2 * X),
    "tuple": (two, (X, R), 2 * X - R),
    "namedtuple": (two, Images(X, R), 2 * X - R),
    "keywords": (two, {"right": R, "left": X}, 2 * X - R),
    "labels beside": (two, {"left": X, "labels": Y}, 2 * X),
    "any keywords": (any_keywords, {"right": R, "left": X}, 2 * X - R),
    "the mapping itself": (whole_mapping, {"right": R, "left": X}, 2 * X - R),
    "keys that are no names": (lambda self, batch: self.scale * batch[0], {0: X}, 2 * X),
}


@pytest.mark.parametrize("case", CALLS)
def test_inputs_reach_the_network_in_their_form(case):
    forward, inputs, expected = CALLS[case]
    assert torch.equal(call(Returning(forward), inputs), expected)


def test_a_pass_that_fails_names_the_inputs():
    with pytest.raises(DataError, match=r"Linear failed on inputs of shape \(6, 5\) and type float64.*was trained"):
        call(nn.Linear(4, 3).double(), X)
    with pytest.raises(DataError, match="If the last element holds the labels"):
        call(nn.Linear(5, 3).double(), (X, Y))
    with pytest.raises(DataError, match=r"forward, which accepts \['input'\] but not \['ids'\]"):
        call(nn.Linear(5, 3).double(), {"input": X, "ids": Y})
    with pytest.raises(DataError, match=r"not \['y'\]\. Pass labels under 'labels'"):
        call(nn.Linear(5, 3).double(), {"input": X, "y": Y})
    with pytest.raises(DataError, match="no data"):
        call(nn.Linear(5, 3).double(), X.to("meta"))


def own_check(self, x):
    if x.shape[1] == 5:
        raise RuntimeError("the cache is empty")
    return self.scale * x


def missing_attribute(self, x):
    return self.scal * x


def wrong_unpacking(self, x):
    _, _, height, _ = x.shape
    return self.scale * x.mean(height)


OWN_ERRORS = {
    "raised": (own_check, RuntimeError, "the cache is empty"),
    "a missing attribute": (missing_attribute, AttributeError, "has no attribute 'scal'"),
    "python's": (wrong_unpacking, ValueError, "not enough values"),
}


@pytest.mark.parametrize("case", OWN_ERRORS)
def test_errors_of_a_networks_own_code_come_through_with_their_place(case):
    forward, kind, words = OWN_ERRORS[case]
    network = nn.Sequential(nn.Sequential(nn.Identity(), Returning(forward)), nn.Linear(5, 3))
    with pytest.raises(kind, match=words) as raised:
        mola.ensemble(network).predict([(X, Y)])
    assert type(raised.value) is kind
    notes = " ".join(raised.value.__notes__)
    assert "Sequential failed on inputs of shape (6, 5) and type float64, in its layer '0.1'" in notes
    assert "batch 0 of the" in notes


@pytest.mark.parametrize(
    "forward",
    [lambda self, x: x.view(-1, 7), lambda self, x: self.scale * x @ X, lambda self, x: nn.functional.conv2d(x, X)],
)
def test_errors_of_torch_name_the_inputs_and_the_layer(forward):
    network = nn.Sequential(Returning(forward))
    with pytest.raises(DataError, match=r"on inputs of shape \(6, 5\).*in its layer '0'.*was trained") as raised:
        call(network, X)
    assert type(raised.value.__cause__) is RuntimeError


def test_logits_are_picked_from_any_output():
    def pick(output):
        return output["scores"][0]

    class Scores(nn.Linear):
        def forward(self, input):
            return {"scores": (super().forward(input), input)}

    network = Scores(5, 3).double()
    assert call(LogitsOf(network, pick), {"input": X}).shape == (6, 3)
    assert state_checksums([LogitsOf(network, pick)]) == state_checksums([network])
    with pytest.raises(DataError, match="Scores failed on inputs"):
        call(LogitsOf(network, pick), {"input": X[:, :3]})
    body = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 3))
    posterior = mola.fit(body, [(X, Y)], logits=lambda output: output, head="1")
    assert posterior.components[0].head.name == "1"
    for logits in ("scores", [pick, pick]):
        with pytest.raises(OptionError, match="logits"):
            mola.ensemble(network, logits=logits)


def test_the_checksum_depends_on_buffers_too():
    network = nn.BatchNorm1d(3)
    before = state_checksums([network])
    network.running_var.add_(1e-9)
    assert state_checksums([network]) != before


def test_the_same_network_twice_is_warned_of():
    network = nn.Linear(5, 3).double()
    for copy, options in ((network, {}), (network, {"logits": lambda output: output}), (deepcopy(network), {})):
        with pytest.warns(mola.errors.MolaWarning, match="more than once"):
            mola.fit([network, copy], [X], **options)
        with pytest.warns(mola.errors.MolaWarning, match="more than once"):
            mola.ensemble([network, copy], **options)


# --- images of different sizes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "interpolation"), [(12, "bilinear"), (16, "bilinear"), (31, "bilinear"), (12, "bicubic"), (16, "bicubic")]
)
def test_images_are_resized_as_by_pillow(size, interpolation):
    # Grey enough that no overshoot is clipped.
    pixels = np.random.default_rng(0).integers(90, 160, (20, 20, 3), dtype=np.uint8)
    filters = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
    expected = np.asarray(Image.fromarray(pixels[2:18, 2:18]).resize((size, size), filters[interpolation]))
    network = Resized(nn.Identity(), size, crop=0.8, mean=0.25, std=0.5, interpolation=interpolation)
    resized = network(torch.from_numpy(pixels).permute(2, 0, 1)[None].double() / 255)
    # Pillow rounds to bytes after rows and after columns.
    np.testing.assert_allclose((resized[0].permute(1, 2, 0) * 0.5 + 0.25) * 255, expected, atol=1.5)


def test_a_resized_network_has_the_state_of_its_network():
    inner = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16, 3))
    network = Resized(inner, 4, mean=[0.1, 0.2, 0.3], std=2.0)
    assert {name.removeprefix("network.") for name in network.state_dict()} == set(inner.state_dict())
    images = torch.rand(2, 3, 9, 9)
    assert torch.equal(network(images), inner(network.inputs(images)))


def test_wrong_options_and_images_are_refused():
    for options, words in (
        ({"size": 0}, "size must be a whole number"),
        ({"size": 4, "crop": 1.5}, "crop must be above 0"),
        ({"size": 4, "std": 0.0}, "std must be above 0"),
        ({"size": 4, "interpolation": "nearest"}, "interpolation must be one of bilinear, bicubic"),
    ):
        with pytest.raises(OptionError, match=words):
            Resized(nn.Identity(), **options)
    with pytest.raises(DataError, match="expected square images"):
        Resized(nn.Identity(), 4)(torch.rand(2, 3, 5, 6))
