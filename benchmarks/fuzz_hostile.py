"""Hostile calls: each must be refused by a `MolaError`. Used by `fuzz.py`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fuzz_scenes import Scene
from torch import nn

import mola

Attack = Callable[[Scene, mola.MoLA], Any]

NOT_POSITIVE: tuple[Any, ...] = (
    0,
    -1.0,
    float("nan"),
    float("inf"),
    1e-40,
    1e40,
    "one",
    None,
    True,
    [],
    {},
    1j,
    np.array([]),
    np.array("x"),
    object(),
    b"1",
    torch.tensor(float("nan")),
    10**400,
    [[1.0]],
    [None],
    ["1", "x"],
    torch.ones(2, 2),
    (float("nan"),) * 2,
    list(range(1000)),
)
NOT_WEIGHTS: tuple[Any, ...] = (
    "uniformly",
    None,
    [],
    [0.5],
    [2.0, -1.0],
    [float("nan")] * 2,
    np.full(3, 0.2),
    {"a": 1},
    7,
    0.5,
    object(),
    ["a", "b"],
    [1e308] * 2,
    torch.full((2, 2), 0.25),
    [1.0] + [0.0] * 999,
    1j,
    [None, None],
    (0.5, "0.5"),
    set(),
)
NOT_NAMES: tuple[Any, ...] = (
    None,
    3,
    "",
    "krn",
    b"kron",
    [],
    ["kron"],
    ("probit",),
    {},
    True,
    1.5,
    nn.Linear,
    object(),
    np.array("kron"),
)
NOT_LOADERS: tuple[Any, ...] = (
    None,
    3,
    1.5,
    "data.npz",
    b"",
    True,
    [],
    (),
    {},
    object(),
    [None],
    [3],
    ["x"],
    [[]],
    [()],
    [{}],
    [{"labels": [1]}],
    iter([]),
    [(1, 2, 3)],
    np.zeros(3),
    [np.zeros((2, 3))],
    torch.zeros(2, 3),
    [object()],
    [("x", "y")],
    [[None, None]],
    [{"input": None}],
)
NOT_MODELS: tuple[Any, ...] = (
    None,
    3,
    "net.pt",
    [],
    (),
    {},
    [None],
    ["a"],
    nn.Linear,
    object(),
    [nn.Linear],
    torch.zeros(3),
    b"",
    True,
)
NOT_RULES: tuple[Any, ...] = ("tresh", 3, "", object(), mola.ConfidenceThreshold, [], b"nll", ["nll"], True, 1.5)
HUGE = 10**30
NOT_COUNTS: tuple[Any, ...] = (
    0,
    -1,
    "3",
    None,
    1.5,
    float("nan"),
    [],
    True,
    HUGE,
    b"1",
    torch.ones(2),
    np.array([1, 2]),
)
NOT_FOLDERS: tuple[Any, ...] = (None, 3, "\0", b"\xff", [], 1.5, object())


def odd_inputs(scene: Scene) -> list[Any]:
    x, width = scene.test, scene.test.shape[1]
    return [
        torch.full_like(x, float("nan")),
        torch.full_like(x, float("inf")),
        torch.zeros(2, width + 1, dtype=x.dtype),
        torch.zeros((), dtype=x.dtype),
        x.to(torch.complex64),
        x.long(),
        x.bool(),
        torch.zeros(2, 0, dtype=x.dtype),
        torch.zeros(2, 3, 4, width, dtype=x.dtype),
        None,
        3,
        "x",
        object(),
        b"",
        True,
        1.5,
        {"output": x},
        {"input": None},
        {},
        (x, x, x),
        (),
        [],
    ]


def odd_labels(scene: Scene) -> list[Any]:
    y, classes = scene.labels, scene.classes
    return [
        y + classes,
        y - classes,
        y.double(),
        y.bool(),
        y[:, None],
        y[:0],
        torch.cat([y, y]),
        "labels",
        object(),
        y.to(torch.complex64),
        [None] * len(y),
        ["a"] * len(y),
        torch.eye(classes)[y],
        torch.full_like(y, 2**62),
        np.full(len(y), 0.5),
        {"y": y},
        torch.full((len(y),), float("nan")),
        torch.tensor(0),
    ]


def odd_batches(scene: Scene) -> list[Any]:
    x, y = scene.inputs, scene.labels
    nan = x.clone()
    nan[-1, -1] = float("nan")
    wide = torch.cat([x, x], dim=1)
    return [
        [(x, y), (x[:0], y[:0])],
        [(x, y), x],
        [x, (x, y)],
        [(nan, y)],
        [(x, y), (nan, y)],
        [(wide, y)],
        [(x, y), (wide, y)],
        [(x.numpy() if x.dtype != torch.bfloat16 else None, y)],
        [(x.flatten(), y)],
        [((x, x), y)],
        [(x, y, y)],
        [{"x": x, "labels": y}],
        fails(x, y),
    ]


def fails(x: Any, y: Any) -> Iterator[Any]:
    """Data that a loader itself refuses: its own error is the answer."""
    yield x, y
    message = "a loader that refuses"
    raise mola.DataError(message)


class Squared(nn.Module):
    """A network whose output is not its last linear layer's."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.network(input).square() + 1


def odd_networks(scene: Scene) -> list[Any]:
    dtype, width = scene.dtype, scene.test.shape[1]

    def head(classes: int) -> nn.Linear:
        return nn.Linear(width, classes, dtype=dtype)

    broken = head(3)
    with torch.no_grad():
        broken.weight.fill_(float("nan"))
    return [
        nn.ReLU(),
        nn.Sequential(head(3), nn.Softmax(1)),
        nn.Sequential(head(3), nn.Sigmoid()),
        Squared(scene.networks[0]),
        nn.Linear(width + 1, 3, dtype=dtype),
        head(1),
        broken,
        [head(3), head(4)],
        nn.Flatten(0),
        [scene.networks[0], None],
        nn.ModuleList(),
    ]


def fit_with(scene: Scene, **changes: Any) -> Any:
    given: dict[str, Any] = {
        "models": scene.networks,
        "train_loader": [(scene.inputs, scene.labels)],
        "structure": scene.structure,
        "progress": False,
    }
    return mola.fit(**(given | changes))


def val(scene: Scene) -> list[Any]:
    return [(scene.inputs, scene.labels)]


def not_many(choices: tuple[Any, ...], count: int, scene: Scene) -> Any:
    """One of them that is not, by accident, `count` good numbers."""
    chosen = scene.pick(choices)
    if isinstance(chosen, list) and len(chosen) == count and chosen in ([1.0], [[1.0]]):
        return "none"
    return chosen


def saved_elsewhere(scene: Scene, posterior: mola.MoLA) -> Any:
    """A posterior loaded onto networks that are not its own."""
    with tempfile.TemporaryDirectory() as folder:
        posterior.save(folder)
        other = [
            nn.Sequential(
                *network[:-1], nn.Linear(network[-1].in_features, network[-1].out_features, dtype=scene.dtype)
            )
            for network in scene.networks
        ]
        return mola.load(folder, scene.pick([other, scene.networks * 2, other[:0], None, "net"]))


def cut_file(scene: Scene, posterior: mola.MoLA) -> Any:
    """A saved posterior of which a file is cut short, empty, or gone."""
    with tempfile.TemporaryDirectory() as folder:
        posterior.save(folder)
        victim = scene.pick(sorted(Path(folder).iterdir()))
        content = victim.read_bytes()
        how = int(scene.rng.integers(3))
        if how == 2:
            victim.unlink()
        else:
            victim.write_bytes(content[: int(scene.rng.integers(len(content)))] if how else b"")
        return mola.load(folder, scene.networks)


ATTACKS: dict[str, Attack] = {
    "prior_precision": lambda s, p: fit_with(s, prior_precision=not_many(NOT_POSITIVE, len(s.networks), s)),
    "with_prior_precision": lambda s, p: p.with_prior_precision(not_many(NOT_POSITIVE, len(s.networks), s)),
    "weights": lambda s, p: fit_with(s, weights=s.pick(NOT_WEIGHTS)),
    "with_weights": lambda s, p: p.with_weights(s.pick(NOT_WEIGHTS)),
    "structure": lambda s, p: fit_with(s, structure=s.pick(NOT_NAMES)),
    "link": lambda s, p: fit_with(s, link=s.pick(NOT_NAMES)),
    "with_link": lambda s, p: p.with_link(s.pick(NOT_NAMES)),
    "head": lambda s, p: fit_with(
        s, head=s.pick(["", "krn", 3, True, 1.5, ["0"] * 9, b"1", object(), nn.Linear, [3], [None, 3] * 5])
    ),
    "train_loader": lambda s, p: fit_with(s, train_loader=s.pick(NOT_LOADERS)),
    "val_loader": lambda s, p: fit_with(s, val_loader=s.pick([x for x in NOT_LOADERS if x is not None])),
    "models": lambda s, p: fit_with(s, models=s.pick(NOT_MODELS)),
    "ensemble": lambda s, p: mola.ensemble(s.pick(NOT_MODELS)),
    "networks": lambda s, p: fit_with(s, models=s.pick(odd_networks(s))),
    "labels": lambda s, p: fit_with(s, train_loader=[(s.inputs, s.pick(odd_labels(s)))]),
    "batches": lambda s, p: fit_with(s, train_loader=s.pick(odd_batches(s))),
    "checkpoint_every": lambda s, p: fit_with(
        s, checkpoint="unused", checkpoint_every=s.pick([one for one in NOT_COUNTS if one is not HUGE])
    ),
    "call": lambda s, p: p(s.pick(odd_inputs(s))),
    "predict": lambda s, p: p.predict(s.pick(odd_inputs(s))),
    "predict batches": lambda s, p: p.predict([s.test, s.pick([x for x in odd_inputs(s) if not isinstance(x, tuple)])]),
    "predict_proba": lambda s, p: p.predict_proba(
        s.pick(
            [
                np.zeros((2, s.test.shape[1] + 1)),
                np.full((2, s.test.shape[1]), np.nan),
                np.array("x"),
                np.array([["a"]]),
                np.array([None]),
                np.zeros(0, dtype=complex),
                None,
                3,
                np.array(1.0),
            ]
        )
    ),
    "bound": lambda s, p: p.with_link("probit").confidence_bound(s.pick(odd_inputs(s))),
    "bound of another link": lambda s, p: p.with_link("mean-field").confidence_bound(s.test),
    "limit": lambda s, p: p.with_link("probit").far_field_limit(s.pick(odd_inputs(s))),
    "generator": lambda s, p: p.with_link("mc")(s.test, generator=s.pick([3, "x", np.random.default_rng(0), object()])),
    "tune loader": lambda s, p: p.tune(s.pick(NOT_LOADERS), progress=False),
    "tune labels": lambda s, p: p.tune([(s.inputs, s.pick(odd_labels(s)))], progress=False),
    "tune rule": lambda s, p: p.tune(val(s), s.pick(NOT_RULES), progress=False),
    "tune unlabelled": lambda s, p: p.tune([s.inputs], s.pick(["threshold", "nll", "brier", "ece"]), progress=False),
    "evidence with data": lambda s, p: p.tune(val(s), mola.Evidence(), progress=False),
    "score": lambda s, p: mola.ValidationScore(s.pick(["acc", None, 3, "", [], b"nll"])),
    "confidence": lambda s, p: mola.ConfidenceThreshold(
        s.pick([0, -1, 95, "high", float("nan"), [], True, 1j, object()])
    ),
    "brier": lambda s, p: mola.ConfidenceThreshold(brier=s.pick([-1, 3, "low", float("nan"), [], 1j, object()])),
    "margin": lambda s, p: mola.ConfidenceThreshold(
        margin=s.pick(["a", float("nan"), [], None, 1j, float("inf"), 2.0])
    ),
    "grid": lambda s, p: p.tune(
        val(s),
        mola.ValidationScore(
            grid=s.pick(
                [
                    [],
                    [0.0],
                    [-1.0, 1.0],
                    [float("nan")],
                    "grid",
                    3,
                    [None],
                    [[1.0]],
                    ["a"],
                    [1e400],
                    object(),
                    [1j],
                    {},
                    [1e-200],
                ]
            )
        ),
        progress=False,
    ),
    "outliers": lambda s, p: p.tune(val(s), mola.OutlierExposure(s.pick(NOT_LOADERS)), progress=False),
    "outlier weight": lambda s, p: p.tune(
        val(s),
        mola.OutlierExposure([s.inputs], weight=s.pick(["a", float("nan"), None, -1.0, [], float("inf"), 1j])),
        progress=False,
    ),
    "reweight": lambda s, p: p.reweight(s.pick(NOT_LOADERS), progress=False),
    "reweight labels": lambda s, p: p.reweight([(s.inputs, s.pick(odd_labels(s)))], progress=False),
    "reweight unlabelled": lambda s, p: p.reweight([s.inputs], progress=False),
    "sample": lambda s, p: p.sample(s.pick(NOT_COUNTS)),
    "sample generator": lambda s, p: p.sample(3, generator=s.pick([3, "x", np.random.default_rng(0), object()])),
    "samples": lambda s, p: mola.MonteCarlo(samples=s.pick([one for one in NOT_COUNTS if one is not HUGE])),
    "over": lambda s, p: mola.MonteCarlo(over=s.pick(["logit", None, 3, [], b"logits"])),
    "running average": lambda s, p: mola.Kron(s.pick([0, 1, -0.5, "x", float("nan"), [], 1j, object()])),
    "load nothing": lambda s, p: mola.load(s.pick(["/nowhere/at/all", *NOT_FOLDERS]), s.networks),
    "load elsewhere": saved_elsewhere,
    "load cut": cut_file,
    "save nowhere": lambda s, p: p.save(s.pick(["/dev/null/here", *NOT_FOLDERS])),
    "save an ensemble": lambda s, p: mola.ensemble(s.networks).save("unused"),
    "evidence of an ensemble": lambda s, p: getattr(mola.ensemble(s.networks), s.pick(["log_evidence", "tune"]))(),
    "alarm rate": lambda s, p: mola.alarm_threshold(
        np.arange(100.0), s.pick([0, 1, "x", None, float("nan"), [], 1j, 1e-9])
    ),
    "alarm scores": lambda s, p: mola.alarm_threshold(
        s.pick(["x", None, [], [[1.0]], [float("nan")] * 50, object(), 3, [None]]), 0.05
    ),
    "mixture": lambda s, p: mola.Mixture(s.pick([[], None, [3], p, [p, "x"], object()]))(s.test),
    "mixture weights": lambda s, p: mola.Mixture([p, p], s.pick(NOT_WEIGHTS))(s.test),
}
