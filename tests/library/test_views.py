"""Views of one backbone: different modules that share parameters are different networks of a mixture."""

import copy
import warnings

import pytest
import torch
from torch import nn

import molaplace as mola
from molaplace.errors import MolaWarning

X = torch.randn(24, 5, generator=torch.Generator().manual_seed(0)).double()
Y = torch.arange(24) % 3
LOADER = [(X[:12], Y[:12]), (X[12:], Y[12:])]


class Branch(nn.Module):
    """One of several heads on a shared trunk."""

    def __init__(self, trunk, heads, index):
        super().__init__()
        self.trunk, self.heads, self.index = trunk, heads, index

    def forward(self, x):
        return self.heads[self.index](self.trunk(x))


def branches():
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Linear(5, 4), nn.Tanh())
    heads = nn.ModuleList(nn.Linear(4, 3) for _ in range(2))
    return [Branch(trunk, heads, index).double().eval() for index in range(2)]


def check_equal_to_copies(views, loader, inputs):
    """A mixture of views is the mixture of separate networks, which are copies of the backbone with one view each."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", MolaWarning)
        posterior = mola.fit(views, loader, progress=False)
    singles = [mola.fit(copy.deepcopy(view), loader, progress=False) for view in views]
    separate = torch.stack([single.predict(inputs).probs for single in singles])
    probs = posterior.predict(inputs).probs
    assert not torch.allclose(separate[0], separate[1], atol=1e-3)
    torch.testing.assert_close(probs, separate.mean(0), rtol=0, atol=1e-6)


def test_heads_on_a_shared_trunk_are_different_networks():
    check_equal_to_copies(branches(), LOADER, X)


def test_copies_are_still_reported():
    (view, _) = branches()
    twin = Branch(view.trunk, copy.deepcopy(view.heads), 0)
    for copies in ([view, view], [view, copy.deepcopy(view)], [view, twin]):
        with pytest.warns(MolaWarning, match="the same network was passed more than once"):
            mola.ensemble(copies)
