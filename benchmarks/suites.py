"""Read the features and logits that `python -m molaplace_lab bench` has cached for the networks and data sets of a suite."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from molaplace_lab.activations import ActivationCache, Network, open_networks
from molaplace_lab.activations_file import StoredActivations
from molaplace_lab.suite import DataOptions, Source
from molaplace_lab.suites.registry import SUITES

MNIST_NETWORKS = Path(__file__).resolve().parent.parent / "networks" / "mnist"


@dataclass(frozen=True)
class StoredSuite:
    """The networks of a suite, its data sets, and the networks' activations on these sets."""

    networks: list[Network]
    sources: dict[str, Source]
    activations: ActivationCache

    def read(self, networks: slice) -> dict[str, StoredActivations]:
        """Return the activations of the selected networks on every set."""
        return {name: self.activations.read(self.networks[networks], source) for name, source in self.sources.items()}

    def names(self, role: str) -> list[str]:
        """Return the names of the sets with the given role."""
        return [name for name, source in self.sources.items() if source.role == role]


def open_suite(
    name: str, networks: Path, options: DataOptions, cache: Path, count: int | None = None, sets: Collection[str] = ()
) -> StoredSuite:
    """Open the MNIST or CIFAR-10 suite, and compute any missing activations.

    Args:
        name: "mnist" or "cifar10".
        networks: folder that contains 00.safetensors, 01.safetensors, ...
        options: options for the data sets, such as their folder and normalisation.
        cache: folder for the activations.
        count: number of networks to use; None for all.
        sets: names of the data sets to use; if empty, all sets.
    """
    suite = SUITES[name]
    label, build = suite.builder("resnet-20" if name == "cifar10" else None)
    sources = {name: source for name, source in suite.make_sources(options).items() if not sets or name in sets}
    members = open_networks(sorted(networks.glob("*.safetensors"))[:count], build, label)
    activations = ActivationCache(cache)
    activations.compute(members, list(sources.values()), lambda doing, done: None)
    return StoredSuite(members, sources, activations)
