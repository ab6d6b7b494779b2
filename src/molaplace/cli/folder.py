"""Check, read and open a posterior's folder.

The posterior's document also contains the job: its options and, under `result`, the results of the fit, such as the classes, the
shape of the inputs and the alarm threshold. The posterior and its job are replaced together, so that a posterior is never used
with inputs prepared for another posterior. The `job.toml` file next to the document is for human readers and for `molaplace fit --config`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from molaplace.cli.consent import require_trust
from molaplace.cli.job import NAME, Job, job_of
from molaplace.cli.networks import build_networks
from molaplace.data.dataset import Dataset
from molaplace.data.opening import open_dataset
from molaplace.data.preprocessing import Preprocessing
from molaplace.errors import OptionError, StorageError
from molaplace.likelihoods import Gaussian
from molaplace.options import counted
from molaplace.posterior import MoLA
from molaplace.saving import files
from molaplace.saving.posterior import KIND, SavedPosterior, load_posterior
from molaplace.saving.schema import Optional, check, from_json
from molaplace.structures.distance import COUNTS

Module = TypeVar("Module", bound=nn.Module)

RESULT = {
    "classes": [str],
    "outputs": int,
    "form": str,
    "inputs": [{"name": str, "shape": [int], "dtype": str}],
    "preprocessing": {"batch_size": int, "dtype": str, "workers": int, "mean": [float], "std": [float]},
    "images": str,
    "left_out": int,
    "versions": {str: str},
    "validation": Optional(
        {"count": int, "outlier_threshold": float, "false_alarm_rate": float, "metrics": {str: float}}
    ),
}

MAX_INPUT = 2**28
"""Largest number of values in one input."""

MAX_OUTPUTS = 2**20
"""Largest number of outputs of a network."""

FITTED = "posterior of `molaplace fit`"
"""Kind of the folder. Only another fit replaces it, because it may hold the only copy of the weights."""

BUNDLED = "weights"
"""Subfolder of a posterior's folder that contains copies of the weights."""


@dataclass(frozen=True)
class PosteriorFolder:
    """A posterior with its networks and the preparation of its inputs."""

    posterior: MoLA
    classes: tuple[str, ...] | None
    """Names of the classes, labels or targets, if they have names."""
    example: Any
    """A batch of 2 all-zero inputs for tracing: a tensor, or a mapping or tuple of tensors."""
    preprocessing: Preprocessing
    document: dict[str, Any]
    """The job in the posterior's document: the options of the fit and, under `result`, its results."""
    job: Job
    """Options of the fit, with paths relative to the current folder."""
    folder: Path
    trust: bool = False

    @property
    def outputs(self) -> int:
        """Number of network outputs."""
        return int(self.document["result"]["outputs"])

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
        return open_dataset(
            name,
            self.preprocessing,
            labelled=labelled,
            classes=self.classes,
            outputs=self.outputs,
            likelihood=self.job.make_likelihood(),
            seed=self.job.seed,
        )


def _check_present(path: Path) -> None:
    if not (path / files.file_name(KIND)).is_file():
        raise StorageError(f"{path} contains no posterior. Pass a folder written by `molaplace fit --output`.")


def read_folder(path: Path) -> tuple[Job, dict[str, Any]]:
    """Check and return the job and the document in a posterior's folder, without building networks."""
    _check_present(path)
    document = files.read_folder(path, KIND)[0].get("job")
    if document is None:
        raise StorageError(
            f"{path} was saved from Python, not by `molaplace fit`, so the preparation of its inputs is unknown. Use mola.load(...) in "
            f"Python, or fit a new posterior with `molaplace fit`."
        )
    check(document, {"result": RESULT}, "job")
    return job_of(document, path / NAME), document


def open_posterior(
    path: Path, device: str = "cpu", *, trust: bool = False, network: Sequence[str] = ()
) -> PosteriorFolder:
    """Open a posterior written by `molaplace fit`: build its networks, load their weights and load the posterior.

    Functions that only the folder names need the user's consent.
    """
    path = Path(path)
    job, document = read_folder(path)
    result = document["result"]
    try:
        preprocessing = Preprocessing.from_plain(result["preprocessing"])
        example = example_of(result)
    except (AttributeError, TypeError, ValueError) as error:
        raise StorageError(f"{path} is damaged: its inputs cannot be prepared ({error}).") from error
    if result["outputs"] > MAX_OUTPUTS:
        raise StorageError(f"{path} is damaged: expected at most {MAX_OUTPUTS:,} outputs, got {result['outputs']:,}.")
    if not network:
        require_trust(job.network, path, "--network", trust=trust)
    try:
        built = build_networks(network or job.network, job.weights, classes=result["outputs"])
        posterior = load_posterior(path, built.networks)
    except (OptionError, StorageError) as error:
        if isinstance(error, StorageError) and error.place is None:  # the files are damaged
            raise
        raise type(error)(
            f"{error} {path} was fitted on {', '.join((*job.network, *job.weights))}. Restore these files, or fit "
            f"again with copies of the weights inside the folder: molaplace fit --config {path / NAME} --bundle"
        ) from error
    outputs = {component.head.outputs for component in posterior.components if component.head is not None}
    if outputs != {result["outputs"]} or len(result["classes"]) not in (0, result["outputs"]):
        raise StorageError(
            f"{path} is damaged: expected {counted(outputs.pop(), 'output')}, got {result['outputs']:,} with "
            f"{counted(len(result['classes']), 'name')}."
        )
    return PosteriorFolder(
        posterior=move(posterior, device),
        classes=tuple(result["classes"]) or None,
        example=example,
        preprocessing=preprocessing,
        document=document,
        job=job,
        folder=path,
        trust=trust,
    )


def move(module: Module, device: str) -> Module:
    """Move a network, or a posterior with its networks, to a device, switch it to evaluation mode and return it."""
    try:
        target = torch.device(device)
        torch.zeros(1, device=target).cpu()  # fails for "meta", whose tensors have no values
        return module.to(target).eval()
    except (RuntimeError, AssertionError) as error:
        raise OptionError(f"device {device!r} cannot be used: {str(error).splitlines()[0]}") from error


def describe_inputs(inputs: Any) -> dict[str, Any]:
    """Return the form, shapes and types of the inputs in a batch, as plain values."""
    if isinstance(inputs, Tensor):
        form = "tensor"
        tensors = {"": inputs}
    elif isinstance(inputs, dict):
        form = "mapping"
        tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
    else:
        form = "tuple"
        tensors = {str(index): value for index, value in enumerate(inputs)}
    described = [
        {"name": name, "shape": list(value.shape[1:]), "dtype": str(value.dtype).removeprefix("torch.")}
        for name, value in tensors.items()
    ]
    return {"form": form, "inputs": described}


def example_of(result: dict[str, Any]) -> Any:
    """Return a batch of 2 all-zero inputs. Masks are filled with ones, because a fully masked input gives NaN."""
    if any(math.prod(tensor["shape"]) > MAX_INPUT for tensor in result["inputs"]):
        raise StorageError(f"expected inputs of at most {MAX_INPUT:,} values.")
    tensors = {
        tensor["name"]: (torch.ones if "mask" in tensor["name"] else torch.zeros)(
            2, *tensor["shape"], dtype=getattr(torch, tensor["dtype"])
        )
        for tensor in result["inputs"]
    }
    if result["form"] == "mapping":
        return tensors
    return tensors[""] if result["form"] == "tensor" else tuple(tensors.values())


def read_information(folder: Path) -> dict[str, Any]:
    """Return the document in a posterior's folder after checking all files, with their size and whether they contain distances."""
    _check_present(folder)
    document, tensors = files.read_folder(folder, KIND)
    from_json(SavedPosterior, document)  # checks the posterior
    if "job" in document:
        read_folder(folder)  # checks the job
    return {
        "folder": str(folder),
        "bytes": sum(path.stat().st_size for path in folder.iterdir() if path.is_file()),
        "has_distances": any(name.endswith(f".{COUNTS}") for name in tensors),
        **document,
    }
