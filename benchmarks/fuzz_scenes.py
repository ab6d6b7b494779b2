"""Networks, data and options at random, all of one scene from one seed. Used by `fuzz.py`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import mola

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.reference import closed_form as dense

STRUCTURES = ("kron", "kron-exact", "kron-diag", "diag", "full")
LINKS = ("probit", "probit-centered", "mean-field", "bridge", "mc")
DRAWS = 2000
"""Of the Monte Carlo link."""


@dataclass
class Scene:
    """Networks, data and options, all drawn from one seed."""

    rng: np.random.Generator
    networks: list[nn.Module]
    dtype: torch.dtype
    inputs: Tensor
    labels: Tensor
    test: Tensor
    test_labels: Tensor
    structure: str
    link: str
    precision: list[float]
    weights: Any
    extreme: bool
    """Whether numbers are so large or so small that a refusal is an answer."""
    wild: bool
    """Whether numbers differ so much in size that float64 itself may be at its end."""
    exact_features: bool
    labelled: bool = True
    told: list[str] = field(default_factory=list)

    @property
    def classes(self) -> int:
        return self.networks[0][-1].out_features

    @property
    def rounding(self) -> dense.Rounding:
        own = torch.finfo(self.dtype).eps
        arithmetic = max(torch.finfo(torch.promote_types(self.dtype, torch.float32)).eps, dense.EPS)
        return dense.Rounding(0.0 if self.exact_features else own, own, arithmetic)

    def chance(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    def pick(self, choices: Sequence[Any]) -> Any:
        return choices[int(self.rng.integers(len(choices)))]

    def seen(self, network: nn.Module, inputs: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Features with the constant 1, and logits, as the network makes them."""
        with torch.no_grad():
            features, logits = network[:-1](inputs).double().numpy(), network(inputs).double().numpy()
        if network[-1].bias is not None:
            features = np.concatenate([features, np.ones((len(features), 1))], axis=1)
        return features, logits

    def reference(self, **changes: Any) -> dense.Mixture:
        """The closed form of the posterior."""
        components = []
        for network, precision in zip(self.networks, changes.get("precision", self.precision), strict=True):
            head = network[-1]
            weights = head.weight.detach().double().numpy()
            if head.bias is not None:
                weights = np.concatenate([weights, head.bias.detach().double().numpy()[:, None]], axis=1)
            labels = self.labels.numpy() if self.labelled else None
            features, logits = self.seen(network, self.inputs)
            components.append(dense.Component(self.structure, weights, features, logits, labels, precision))
        return dense.Mixture(components, changes.get("weights", self.weights), changes.get("link", self.link))

    def test_seen(self) -> tuple[list[np.ndarray], list[np.ndarray]]:
        pairs = [self.seen(network, self.test) for network in self.networks]
        return [features for features, _ in pairs], [logits for _, logits in pairs]

    def loader(self, inputs: Tensor, labels: Tensor | None) -> Any:
        """The data in one of the forms that a loader may have."""
        size = int(self.pick([1, 2, 3, 7, len(inputs), max(1, len(inputs) - 1)]))
        xs = inputs.split(size)
        if labels is None:
            form = self.pick(["x", "(x,)", "dict", "generator"])
            made: list[Any] = {
                "x": list(xs),
                "(x,)": [(x,) for x in xs],
                "dict": [{"input": x} for x in xs],
                "generator": list(xs),
            }[form]
        else:
            ys = labels.split(size)
            form = self.pick(["(x, y)", "[x, y]", "dict", "numpy labels", "int32", "generator", "DataLoader"])
            if form == "DataLoader":
                return DataLoader(TensorDataset(inputs, labels), batch_size=size, generator=torch.Generator())
            made = {
                "(x, y)": list(zip(xs, ys, strict=True)),
                "[x, y]": [[x, y] for x, y in zip(xs, ys, strict=True)],
                "dict": [{"input": x, "labels": y} for x, y in zip(xs, ys, strict=True)],
                "numpy labels": [(x, y.numpy()) for x, y in zip(xs, ys, strict=True)],
                "int32": [(x, y.int()) for x, y in zip(xs, ys, strict=True)],
                "generator": list(zip(xs, ys, strict=True)),
            }[form]
        self.told.append(f"loader {form} of {size}")
        return (batch for batch in made) if form == "generator" else made

    def fit(self, **changes: Any) -> mola.MoLA:
        link = changes.pop("link", self.link)
        options: dict[str, Any] = {
            "structure": self.structure,
            "prior_precision": as_given(self, self.precision),
            "weights": self.weights,
            "link": mola.MonteCarlo(samples=DRAWS) if link == "mc" else link,
            "progress": False,
        } | changes
        loader = self.loader(self.inputs, self.labels if self.labelled else None)
        models = self.networks if len(self.networks) > 1 or self.chance(0.5) else self.networks[0]
        return mola.fit(models, loader, **options)


def as_given(scene: Scene, numbers: Sequence[float]) -> Any:
    """K numbers in one of the forms in which they may be given."""
    if len(set(numbers)) == 1 and scene.chance(0.5):
        return scene.pick([float, np.float64, lambda one: torch.tensor(one, dtype=torch.float64)])(numbers[0])
    return scene.pick([list, tuple, np.array, lambda some: torch.tensor(some, dtype=torch.float64)])(numbers)


SCALES = {
    "plain": 10,
    "zero rows": 2,
    "all zero": 1,
    "tiny": 2,
    "large": 2,
    "huge": 2,
    "constant": 1,
    "duplicated": 1,
    "mixed": 1,
}


def draw(seed: int, *, small: bool = False) -> Scene:
    """A scene; with `small`, without extremes."""
    rng = np.random.default_rng(seed)
    names = list(SCALES)
    kind = "plain" if small else str(rng.choice(names, p=np.array(list(SCALES.values())) / sum(SCALES.values())))
    count, classes = int(rng.integers(1, 5)), int(rng.integers(2, 13))
    width, size, fresh = int(rng.integers(1, 21)), int(rng.choice([1, 2, 5, 17, 40])), int(rng.choice([1, 2, 9]))
    dtype = rng.choice(4, p=[0.45, 0.45, 0.05, 0.05])
    dtype = (torch.float32, torch.float64, torch.float16, torch.bfloat16)[dtype]
    half = dtype in (torch.float16, torch.bfloat16)
    if half and kind in ("tiny", "large", "huge", "mixed"):
        kind = "plain"
    scale = {
        "tiny": 1e-30,
        "large": 10.0 ** rng.integers(3, 9),
        "huge": 10.0 ** rng.integers(18, 26),
    }.get(kind, 1.0)
    body = "identity" if kind != "plain" or half else str(rng.choice(["identity", "tanh", "relu"]))
    x = rng.standard_normal((size + fresh, width)) * scale
    if kind == "zero rows":
        x[rng.random(len(x)) < 0.4] = 0
    elif kind == "all zero":
        x[: size if rng.random() < 0.5 else None] = 0
    elif kind == "constant":
        x[:, 0] = 3.0
    elif kind == "duplicated":
        x[:, width // 2 :] = x[:, : width - width // 2]
    elif kind == "mixed":
        x *= 10.0 ** rng.integers(-6, 7, size=width)
    made = torch.from_numpy(x).to(dtype)
    networks: list[nn.Module] = []
    bias = bool(rng.random() < 0.7)
    for _ in range(count):
        inner = width if body == "identity" else int(rng.integers(1, 21))
        head = nn.Linear(inner, classes, bias=bias, dtype=dtype)
        layers = {
            "identity": [nn.Identity()],
            "tanh": [nn.Linear(width, inner, dtype=dtype), nn.Tanh()],
            "relu": [nn.Linear(width, inner, bias=False, dtype=dtype), nn.ReLU()],
        }[body]
        network = nn.Sequential(*layers, head)
        strength = 10.0 ** rng.uniform(-1, 1)
        with torch.no_grad():
            for parameter in network.parameters():
                drawn = torch.from_numpy(rng.standard_normal(tuple(parameter.shape)) * strength / inner**0.5)
                parameter.copy_(drawn)
            if scale != 1.0 and rng.random() < 0.7:  # logits of the usual size
                head.weight.div_(scale)
        networks.append(network.train(bool(rng.random() < 0.5)))
    precision = 10.0 ** rng.uniform(-8, 8, size=count)
    if rng.random() < 0.6:
        precision[:] = precision[0]
    weighting: Any = "uniform"
    if rng.random() < 0.4:
        drawn = rng.dirichlet(np.ones(count))
        weighting = drawn / drawn.sum()
    labelled = bool(rng.random() < 0.85)
    if labelled and rng.random() < 0.1:
        weighting = "evidence"
    labels = torch.from_numpy(rng.integers(0, classes, size=size + fresh))
    link = str(rng.choice(LINKS, p=[0.35, 0.2, 0.2, 0.15, 0.1]))
    scene = Scene(
        rng=rng,
        networks=networks,
        dtype=dtype,
        inputs=made[:size],
        labels=labels[:size],
        test=made[size:],
        test_labels=labels[size:],
        structure=str(rng.choice(STRUCTURES)),
        link=link,
        precision=[float(one) for one in precision],
        weights=weighting,
        extreme=kind in ("huge", "tiny", "all zero", "zero rows"),
        wild=kind in ("huge", "mixed"),
        exact_features=body == "identity",
        labelled=labelled,
    )
    scene.told.append(
        f"{kind} features {body}, K={count} C={classes} P={width} N={size} n={fresh} {str(dtype).removeprefix('torch.')} "
        f"{scene.structure} {link} {'bias' if bias else 'no bias'} lambda={precision[0]:.2g}"
    )
    return scene
