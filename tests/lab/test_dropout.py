"""Monte Carlo dropout: against the sum over all masks, and without a trace on the network."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from molaplace.errors import OptionError
from molaplace_lab.dropout import mc_dropout
from tests.conftest import make_problem


def network(p=0.4, width=3):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Dropout(p), nn.Linear(width, 4))


def test_it_is_the_sum_over_all_masks():
    """Three hidden units have eight masks: the exact average, within standard errors of the draws."""
    inputs = make_problem().inputs
    model = network(0.4)
    p = 0.4
    samples = 800
    exact = torch.zeros(len(inputs), 4)
    squares = torch.zeros_like(exact)
    with torch.no_grad():
        hidden = model.eval()[:3](inputs)
        for mask in itertools.product((0.0, 1.0), repeat=3):
            chance = (1 - p) ** sum(mask) * p ** (3 - sum(mask))
            probs = model[4](hidden * torch.tensor(mask) / (1 - p)).softmax(-1)
            exact += chance * probs
            squares += chance * probs**2
    error = ((squares - exact**2) / samples).sqrt()
    probs = mc_dropout(model, samples)(inputs)
    assert float(((probs - exact) / error).abs().max()) < 5
    assert float(((probs - exact) / error).abs().mean()) > 0.1  # and the draws are draws


@pytest.mark.parametrize(
    "layer", [nn.Dropout(0.3), nn.Dropout2d(0.3), nn.AlphaDropout(0.3), nn.FeatureAlphaDropout(0.3)], ids=str
)
def test_each_kind_of_layer_drops_as_torchs_own(layer):
    """Mean and variance over draws of what comes out, against the layer itself in train mode."""
    model = nn.Sequential(nn.Unflatten(1, (3, 2, 1)), layer, nn.Flatten(), nn.Linear(6, 2, bias=False))
    batches = []
    model[3].register_forward_pre_hook(lambda _, arguments: batches.append(arguments[0]))
    inputs = torch.randn(1, 6)
    samples = 400
    mc_dropout(model, samples)(inputs)
    dropped = torch.cat(batches)
    reference = layer.train()(inputs.view(1, 3, 2, 1).expand(samples, -1, -1, -1)).flatten(1)
    for power in (1, 2):
        first = dropped**power
        second = reference**power
        error = ((first.var(0) + second.var(0)) / samples).sqrt()
        assert float(((first.mean(0) - second.mean(0)) / error).abs().max()) < 5
    pairs = torch.corrcoef(dropped[:, :2].T)[0, 1].abs()
    assert (float(pairs) > 0.99) == isinstance(layer, (nn.Dropout2d, nn.FeatureAlphaDropout))


def test_seeds_reproduce_and_batches_do_not_matter():
    inputs = make_problem().inputs
    model = network(width=20).eval()
    predictor = mc_dropout(model, 7, seed=3)
    expected = predictor(inputs)
    assert torch.equal(expected, mc_dropout(model, 7, seed=3)(inputs))
    assert not torch.equal(expected, mc_dropout(model, 7, seed=4)(inputs))
    torch.manual_seed(99)
    assert torch.equal(expected, predictor(inputs))
    torch.testing.assert_close(predictor.predict([(part,) for part in inputs.split(3)]).probs, expected)
    torch.testing.assert_close(predictor(inputs.flip(0)).flip(0), expected)
    members = torch.stack([member(inputs) for member in predictor.predictors])
    torch.testing.assert_close(members.mean(0), expected)
    prediction = predictor.predict(inputs)
    within = torch.special.entr(members).sum(-1).mean(0)
    torch.testing.assert_close(prediction.mutual_information, torch.special.entr(expected).sum(1) - within)


def test_the_network_is_untouched_and_batchnorm_stays_in_eval_mode():
    inputs = make_problem().inputs
    model = network()
    model[1].train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    predictor = mc_dropout(model, 5)
    predictor.predict(inputs)
    assert model.training
    assert model[3].training
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert not model[3]._forward_hooks
    with pytest.raises(RuntimeError, match="shapes"):
        predictor(inputs[:, :2])
    assert not model[3]._forward_hooks
    # Eval mode of BatchNorm: a row's prediction does not depend on the other rows.
    torch.testing.assert_close(predictor(inputs[:1]), predictor(inputs)[:1])


def test_transformers_with_padding_drop_too():
    """Their fast path packs padded sequences into another kind of tensor; it is as before afterwards."""

    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 16, 0.3, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2)
            self.head = nn.Linear(8, 3)

        def forward(self, words, padding):
            return self.head(self.encoder(words, src_key_padding_mask=padding)[:, 0])

    torch.manual_seed(0)
    model = Reader().eval()
    words = torch.randn(5, 7, 8)
    padding = torch.zeros(5, 7, dtype=torch.bool)
    padding[:, 5:] = True
    prediction = mc_dropout(model, 20).predict({"words": words, "padding": padding})
    assert float(prediction.mutual_information.min()) > 1e-3
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Linear(3, 4), "no dropout layer"),
        (network(p=0.0), "probability above 0"),
    ],
)
def test_a_network_without_dropout_is_refused(model, words):
    with pytest.raises(OptionError, match=words):
        mc_dropout(model)
