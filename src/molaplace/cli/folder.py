"""Open a posterior's folder for a command: its networks on a device, and the preparation of its inputs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from molaplace.cli.job import NAME, Job, job_of
from molaplace.cli.networks import build_networks, is_folder
from molaplace.cli.terminal import limit_threads
from molaplace.data.dataset import Dataset
from molaplace.data.opening import open_dataset
from molaplace.data.preprocessing import Preprocessing
from molaplace.errors import OptionError, StorageError
from molaplace.imported import require_trust
from molaplace.likelihoods import Gaussian
from molaplace.loading import Bundle, load_bundle
from molaplace.posterior import MoLA
from molaplace.saving.bundle import DIGITS, Contents, read_bundle

Module = TypeVar("Module", bound=nn.Module)


@dataclass(frozen=True)
class PosteriorFolder:
    """A bundle with its networks on a device, and the preparation of its inputs."""

    bundle: Bundle
    posterior: MoLA
    preprocessing: Preprocessing
    job: Job
    """Options of the fit; the defaults if the folder was not written by `molaplace fit`."""
    trust: bool = False

    @property
    def folder(self) -> Path:
        """The folder."""
        return self.bundle.folder

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Names of the classes, labels or targets, if they have names."""
        return self.bundle.classes

    @property
    def columns(self) -> dict[str, Tensor]:
        """Scores of the validation data, keyed by name; empty if there were none."""
        return self.bundle.columns

    @property
    def outputs(self) -> int:
        """Number of network outputs."""
        return self.bundle.outputs

    @property
    def example(self) -> Any:
        """A batch of 2 all-zero inputs for tracing: a tensor, or a mapping or tuple of tensors."""
        if self.bundle.example is None:
            raise OptionError(
                f"{self.folder} does not contain the shape of the inputs. Save it with posterior.save(folder, networks=True, "
                f"example=inputs)."
            )
        return self.bundle.example

    @property
    def output_names(self) -> tuple[str, ...]:
        """Names of the classes, labels or targets, or their indices if they have no names."""
        count = self.outputs
        likelihood = self.posterior.likelihood
        if isinstance(likelihood, Gaussian):
            count = likelihood.num_uncertain(count)  # variances are not targets
        return tuple((self.classes or tuple(map(str, range(count))))[:count])

    def open_dataset(self, name: str, *, labelled: bool, by_user: bool = False) -> Dataset:
        """Open data by name and prepare them in the same way as the training data.

        Unless `by_user` is true, the name comes from the folder, and a function needs the user's consent.
        """
        if not by_user:
            path = Path(name)
            if os.sep in name and not path.exists() and ":" not in path.name:
                raise OptionError(
                    f"{self.folder} refers to the data {name}, which do not exist. Evaluate with --val DATA to name them again."
                )
            require_trust([name], self.folder, "--val", trust=self.trust)
        source = open_dataset(
            name,
            self.preprocessing,
            labelled=labelled,
            classes=self.classes,
            outputs=self.outputs,
            likelihood=self.posterior.likelihood,
            seed=self.job.seed,
        )
        if source.has_pixels and self.bundle.contents.preparation is None:
            raise OptionError(
                f"{self.folder} does not contain how images are prepared, so {name} cannot be read. Save it with posterior.save(folder, "
                f"preparation={{...}}), or pass prepared inputs as .npz."
            )
        return source


def open_posterior(
    path: Path, device: str = "cpu", *, trust: bool = False, network: Sequence[str] = ()
) -> PosteriorFolder:
    """Open a bundle: build its networks, load their weights and load the posterior.

    Functions that only the folder names need the user's consent. `network` contains the names of other networks.
    """
    path = Path(path)
    try:
        bundle = load_bundle(path, _named_networks(path, network) if network else None, trust=trust)
    except (OptionError, StorageError) as error:
        if isinstance(error, StorageError) and error.place is None:  # the files are damaged
            raise
        if isinstance(error, OptionError) and error.argument == "networks":
            raise StorageError(
                f"{path} contains a posterior without its networks. Name the networks with --network, or save it with "
                f"posterior.save(folder, networks=True)."
            ) from error
        if isinstance(error, StorageError):
            error.message += _remedy(path, read_bundle(path)[-1])
        raise
    if {source.build for source in bundle.contents.networks} == {DIGITS}:
        limit_threads(1)  # so small networks lose more time to synchronisation than they gain from parallelism
    if not isinstance(bundle.posterior, MoLA):
        raise OptionError(
            f"{path} contains a posterior over whole networks. Commands need one over last layers; use Python."
        )
    return PosteriorFolder(bundle, move(bundle.posterior, device), _preprocessing(bundle), _job(bundle), trust)


def _named_networks(path: Path, names: Sequence[str]) -> list[nn.Module]:
    sources = read_bundle(path)[-1].networks
    weights = [str(path / source.weights) for source in sources if source.weights is not None]
    return build_networks(names, [] if any(map(is_folder, names)) else weights).networks


def _job(bundle: Bundle) -> Job:
    made = bundle.contents.made
    if not made:
        likelihood: Any = bundle.posterior.likelihood.name
        return Job(likelihood=likelihood)
    try:
        return job_of(made, bundle.folder / NAME)
    except OptionError as error:
        raise StorageError(f"{bundle.folder} is damaged: its options cannot be read ({error})") from error


def _remedy(path: Path, contents: Contents) -> str:
    names = ", ".join(
        dict.fromkeys(name for source in contents.networks for name in (source.build, source.weights) if name)
    )
    fit = f", or fit again with copies of the weights inside the folder: molaplace fit --config {path / NAME} --bundle"
    return f" {path} was fitted on {names}. Restore these files{fit if contents.made else ''}"


def _preprocessing(bundle: Bundle) -> Preprocessing:
    preparation = bundle.contents.preparation
    inputs = bundle.contents.inputs
    floats = [value.dtype for value in bundle.posterior.networks[0].parameters() if value.is_floating_point()]
    shape = inputs.tensors[0].shape if inputs is not None and inputs.form == "tensor" else None
    dtype = str(floats[0] if floats else torch.float32).removeprefix("torch.")
    return replace(preparation or Preprocessing(), dtype=dtype, shape=shape)


def move(module: Module, device: str) -> Module:
    """Move a network, or a posterior with its networks, to a device, switch it to evaluation mode and return it."""
    try:
        target = torch.device(device)
        torch.zeros(1, device=target).cpu()  # fails for "meta", whose tensors have no values
        return module.to(target).eval()
    except (RuntimeError, AssertionError) as error:
        raise OptionError(f"device {device!r} cannot be used: {str(error).splitlines()[0]}") from error
