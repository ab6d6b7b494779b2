"""A bundle: the folder of a posterior, which may also contain its networks and whatever else is needed to use it.

posterior.safetensors     the posterior, where its networks come from, how inputs are prepared, and scores of validation data
networks/0/               a network: model.safetensors or, for transformers, the files of `save_pretrained`
tokenizer/, processor/    the objects that prepare texts and images, if given
README.md                 a card, if given
job.toml                  the options of `molaplace fit`, if it wrote the folder
.molaplace.json           names and checksums of these files; no other file of the folder is ever replaced

`posterior.save`, `mola.hub` and the commands write this form, and `mola.load`, `mola.hub` and the commands read it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from molaplace.data.digits import digits_network
from molaplace.data.preprocessing import Preprocessing
from molaplace.decisions.calibration import Calibration
from molaplace.errors import OptionError, StorageError, importing
from molaplace.images import even_indices
from molaplace.imported import import_builder, not_trusted
from molaplace.network import TokenChoice
from molaplace.posterior import MoLA
from molaplace.prediction import RegressionPrediction
from molaplace.saving.files import encode, file_name, read_folder, replacing
from molaplace.saving.posterior import KIND
from molaplace.saving.posterior import pack as pack_last_layers
from molaplace.saving.pretrained import ADAPTER, load_pretrained
from molaplace.saving.schema import from_json
from molaplace.saving.weights import load_weights, save_weights

FILE = file_name(KIND)
DIGITS = "mlp"
"""Name of the network for scikit-learn's digits, on the command line and in files."""

NETWORKS = "networks"
WITH_NETWORKS = "posterior with networks"
"""Kind of a bundle that contains networks, perhaps the only copy of their weights. A posterior without networks does not replace it."""

WEIGHTS = "model.safetensors"
CARD = "README.md"

MAX_INPUT = 2**28
"""Largest number of values in one input."""

MAX_OUTPUTS = 2**20
"""Largest number of outputs of a network."""

SCORE = "ood_score"
MEANS = "component_mean"
VARIANCES = "component_variance"
TARGETS = "target"

VALIDATION = "validation."
"""Prefix for the names of the tensors with scores of validation data."""

MOST_DATA = 100_000
"""Maximum number of validation data whose scores are saved. For larger sets, an evenly spaced subset is saved."""


@dataclass(frozen=True)
class Source:
    """Where a network comes from."""

    type: str
    """Qualified name of its class."""
    dtype: str | None = None
    """Precision of its parameters, if they have the same."""
    tokens: tuple[int, ...] | None = None
    """Ids of the tokens that are the classes of a language model."""
    build: str | None = None
    """Function that builds the network, such as "package.module:function"; None if transformers builds it, or if it is unknown."""
    weights: str | None = None
    """File of the weights, or folder written by `save_pretrained`, relative to the bundle; None if the function returns its weights."""
    pretrained: bool = False
    """Whether `weights` is a folder written by `save_pretrained`."""

    @classmethod
    def of(cls, network: nn.Module, build: str | None = None, weights: str | None = None) -> Source:
        """Describe a network that is built by a function, with weights from a file or a folder of transformers."""
        if isinstance(network, TokenChoice):
            return replace(cls.of(network.model, build, weights), tokens=tuple(network.tokens.tolist()))
        dtypes = {parameter.dtype for parameter in network.parameters() if parameter.is_floating_point()}
        return cls(
            type=f"{type(network).__module__}.{type(network).__qualname__}",
            dtype=str(dtypes.pop()).removeprefix("torch.") if len(dtypes) == 1 else None,
            build=build,
            weights=weights,
            pretrained=build is None and hasattr(network, "save_pretrained"),
        )

    def load(self, folder: Path, build: Any, outputs: int, *, trust: bool) -> nn.Module:
        """Build the network and load its weights.

        Args:
            folder: the bundle.
            build: function or class that builds the network, or None to use the one that the bundle names.
            outputs: number of outputs.
            trust: whether to import a function that only the bundle names.
        """
        network = self._load(folder, build, outputs, trust=trust).eval()
        return network if self.tokens is None else TokenChoice(network, list(self.tokens))

    def _load(self, folder: Path, build: Any, outputs: int, *, trust: bool) -> nn.Module:
        path = Path(os.path.normpath(folder.resolve() / (self.weights or "")))
        adapter = next(path.glob(f"**/{ADAPTER}"), None) if self.pretrained else None
        if adapter is not None and not hasattr(build, "from_pretrained"):
            raise OptionError(
                f"{adapter.parent} holds an adapter without its backbone. Load all adapters on one backbone, with "
                f"PeftModel.from_pretrained(backbone, folder, adapter_name=...) and model.load_adapter(folder, adapter_name=...), and "
                f"call mola.load(folder, mola.adapters(model))."
            )
        dtype = getattr(torch, self.dtype, None) if self.dtype else None
        if self.dtype and not isinstance(dtype, torch.dtype):
            raise StorageError(
                f"the precision {self.dtype!r} is unknown; expected the name of a torch dtype. Save the posterior again.",
                place=str(path),
            )
        if hasattr(build, "from_pretrained") or (build is None and self.build is None):
            return self._from_pretrained(path, build, dtype)
        if build is None:
            assert self.build is not None
            if self.build != DIGITS and not trust:
                raise not_trusted(self.build, folder, "--network")
            build = partial(digits_network, outputs) if self.build == DIGITS else import_builder(self.build)
        network: nn.Module = build()
        if self.weights is None:
            return network
        if dtype is not None and any(
            value.dtype != dtype for value in network.parameters() if value.is_floating_point()
        ):
            network = network.to(dtype)
        load_weights(network, path / WEIGHTS if self.pretrained else path)
        return network

    def _from_pretrained(self, path: Path, network_class: Any, dtype: torch.dtype | None) -> nn.Module:
        if network_class is None:
            network_class = self._transformers_class(path)
        try:
            network: nn.Module = load_pretrained(network_class, path, dtype=dtype)
        except StorageError:
            raise
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise StorageError(f"{path} is damaged or incomplete: {error} Copy the folder again.") from error
        return network

    def _transformers_class(self, path: Path) -> Any:
        # Only transformers classes are looked up by name: importing anything else could run arbitrary code.
        kind = self.type.split(".")
        if not self.pretrained or kind[0] != "transformers":
            raise OptionError(
                f"{path} holds a {self.type}. Pass a function that builds this network: mola.load(folder, build), or --network "
                f"package.module:function."
            )
        with importing(f"loading a {kind[-1]}", "transformers", "transformers"):
            import transformers
        network_class = getattr(transformers, kind[-1], None)
        if not (isinstance(network_class, type) and issubclass(network_class, transformers.PreTrainedModel)):
            raise StorageError(
                f"{path} contains a {kind[-1]}, which this version of transformers does not provide. Pass a function that "
                f"builds this network: mola.load(folder, build)."
            )
        return network_class


@dataclass(frozen=True)
class InputTensor:
    """Name, shape (without the batch dimension) and type of one of the tensors of an input."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        if math.prod(self.shape) > MAX_INPUT or not isinstance(getattr(torch, self.dtype, None), torch.dtype):
            raise OptionError(
                f"expected inputs of at most {MAX_INPUT:,} values with a torch dtype, got shape {self.shape} and type {self.dtype}."
            )


@dataclass(frozen=True)
class InputForm:
    """The form of the networks' inputs."""

    form: str
    """"tensor", "mapping" or "tuple"."""
    tensors: tuple[InputTensor, ...]

    @classmethod
    def of(cls, inputs: Any) -> InputForm:
        """Describe the inputs of a batch."""
        if isinstance(inputs, Tensor):
            form = "tensor"
            tensors = {"": inputs}
        elif isinstance(inputs, Mapping):
            form = "mapping"
            tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
        else:
            form = "tuple"
            tensors = {str(index): value for index, value in enumerate(inputs)}
        return cls(
            form,
            tuple(
                InputTensor(name, tuple(value.shape[1:]), str(value.dtype).removeprefix("torch."))
                for name, value in tensors.items()
            ),
        )

    def example(self) -> Any:
        """Return a batch of 2 all-zero inputs. Masks are filled with ones, because a fully masked input gives NaN."""
        tensors = {}
        for tensor in self.tensors:
            fill = torch.ones if "mask" in tensor.name else torch.zeros
            tensors[tensor.name] = fill(2, *tensor.shape, dtype=getattr(torch, tensor.dtype), device="cpu")
        if self.form == "mapping":
            return tensors
        return next(iter(tensors.values())) if self.form == "tensor" else tuple(tensors.values())


@dataclass(frozen=True)
class Contents:
    """What a bundle contains besides the posterior: the entry "bundle" of its document."""

    networks: tuple[Source, ...] = ()
    """Where the networks come from; empty if it is unknown."""
    classes: tuple[str, ...] = ()
    """Names of the classes, labels or targets; empty if they have no names."""
    inputs: InputForm | None = None
    preparation: Preprocessing | None = None
    """How inputs from files are prepared; None if it is unknown."""
    made: dict[str, Any] = field(default_factory=dict)
    """How the bundle was made by a command: its options and its results."""


def with_contents(
    posterior: MoLA,
    classes: Sequence[str] | None = None,
    example: Any = None,
    preparation: Mapping[str, Any] | None = None,
    validation: tuple[Any, Tensor] | None = None,
) -> tuple[Contents, dict[str, Tensor]]:
    """Return what goes with a posterior, and the scores of its validation data; the arguments are those of `MoLA.save`."""
    head = posterior.components[0].head
    outputs = 0 if head is None else head.outputs
    names = tuple(map(str, _class_names(posterior.networks[0]) if classes is None else classes))
    uncertain = posterior.likelihood.num_uncertain(outputs)
    if names and (len(set(names)) != len(names) or len(names) not in (outputs, uncertain)):
        raise OptionError(
            f"must be {uncertain} different names, one for each output; got {list(names)}.", argument="classes"
        )
    columns = {} if validation is None else thinned(validation_columns(posterior, *validation))
    inputs = None if example is None else InputForm.of(example)
    prepared = None if preparation is None else Preprocessing.from_plain(dict(preparation))
    return Contents(classes=names, inputs=inputs, preparation=prepared), columns


def _class_names(network: nn.Module) -> Sequence[str]:
    # Return the names in the configuration of a transformers network, except the placeholders that transformers inserts.
    id2label = getattr(getattr(network, "config", None), "id2label", None)
    names = [id2label[index] for index in sorted(id2label)] if isinstance(id2label, dict) else []
    return [] if all(name == f"LABEL_{index}" for index, name in enumerate(names)) else names


def save_bundle(
    posterior: Any,
    directory: str | Path,
    contents: Contents | None = None,
    columns: Mapping[str, Tensor] | None = None,
    *,
    networks: bool = False,
    build: str | Sequence[str | None] | None = None,
    write: Callable[[Path], None] | None = None,
    last: Sequence[str] = (),
    pack: Callable[[Any], tuple[dict[str, Any], dict[str, Tensor]]] = pack_last_layers,
    overwrite: bool = False,
) -> Path:
    """Write a bundle and return its folder.

    Args:
        posterior: the posterior, over last layers or over whole networks.
        directory: folder to write to.
        contents: what goes with the posterior; if `networks` is True, its `networks` are replaced.
        columns: scores of validation data from `validation_columns`.
        networks: whether to write the networks.
        build: function that builds each network, such as "package.module:function", or one for all of them.
        write: function that writes further files into a new folder, such as a card.
        last: names of further files that are put in place after the posterior.
        pack: function that returns the document and the tensors of the posterior.
        overwrite: see `Marker.replaceable`.
    """
    folder = Path(directory)
    contents = contents or Contents()
    document, tensors = pack(posterior)
    with replacing(folder, WITH_NETWORKS if networks else KIND, (FILE, *last), overwrite=overwrite) as new:
        if networks:
            names = [build] * len(posterior.networks) if build is None or isinstance(build, str) else list(build)
            if len(names) != len(posterior.networks):
                raise OptionError(f"must be one name, or one for each network; got {build!r}.", argument="build")
            pairs = enumerate(zip(posterior.networks, names, strict=True))
            sources = tuple(_save_network(network, index, name, new) for index, (network, name) in pairs)
            contents = replace(contents, networks=sources)
        if write is not None:
            write(new)
        scores = {f"{VALIDATION}{name}": column for name, column in (columns or {}).items()}
        (new / FILE).write_bytes(encode({**document, "bundle": asdict(contents)}, tensors | scores))
    return folder


def _save_network(network: nn.Module, index: int, build: str | None, folder: Path) -> Source:
    model: Any = network.model if isinstance(network, TokenChoice) else network
    place = f"{NETWORKS}/{index}"
    if build is None and hasattr(model, "save_pretrained"):
        model.save_pretrained(folder / place)
        return Source.of(network, None, place)
    save_weights(model, folder / place / WEIGHTS)
    return Source.of(network, build, f"{place}/{WEIGHTS}")


def read_bundle(directory: str | Path) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor], Contents]:
    """Read the document, the tensors of the posterior, the scores of validation data, and what else a bundle contains."""
    document, tensors = read_folder(directory, KIND)
    columns = {
        name.removeprefix(VALIDATION): tensors.pop(name) for name in list(tensors) if name.startswith(VALIDATION)
    }
    return document, tensors, columns, from_json(Contents, document.get("bundle"), "bundle")


def validation_columns(posterior: Any, prediction: Any, labels: Tensor) -> dict[str, Tensor]:
    """Return the scores of labelled validation data, keyed by name, from which commands compute alarms, thresholds and sets.

    For classification, each value has shape (n,). For regression, the values are the components' means and variances (n, K, D) and the
    targets (n, D). For dense outputs and several labels, there are only the outlier scores.
    """
    columns = {SCORE: prediction.ood_score}
    likelihood = posterior.likelihood
    # The positions of an input are not independent, so no guarantee would hold.
    if not posterior.is_dense and isinstance(prediction, RegressionPrediction):
        columns |= {MEANS: prediction.component_mean, VARIANCES: prediction.component_variance, TARGETS: labels}
    elif not posterior.is_dense and likelihood.mutually_exclusive:
        columns |= Calibration.of(prediction.probs, labels).columns()
    columns = {name: values.detach().cpu() for name, values in columns.items()}
    return {name: values.double() if values.is_floating_point() else values for name, values in columns.items()}


def thinned(columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the columns of an evenly spaced subset of at most `MOST_DATA` data."""
    count = len(columns[SCORE])
    indices = even_indices(count, min(count, MOST_DATA))
    return {name: column[indices] for name, column in columns.items()}
