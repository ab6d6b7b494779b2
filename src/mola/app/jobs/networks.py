"""Networks as a user names them, with their weights; nothing is downloaded.

| name | network |
|---|---|
| `lenet`, `resnet-20`, ... | one of `mola.lab.models`, with weights from files |
| `package.module:function` | the network that the function returns, also compiled, with weights from files or its own |
| `timm:NAME` | an architecture of timm, with weights from files |
| a folder with `config.json` | a Hugging Face classifier, with the weights in the folder |
| `model.pt2` | a program saved by `torch.export.save`; needs `trust` |

One name with K files of weights makes K networks, and so do K names. Only `.pt2` files, which PyTorch unpickles, and the user's
own functions can run code.

An exported program is a graph of operations without layers. If its output is one linear operation on stored weights, the graph
is cut in front of it and the weights become an `nn.Linear` again, which can be fitted.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mola.app.jobs.preparation import Hints
from mola.errors import HeadError, MolaError, OptionError, StorageError, importing
from mola.lab.imported import import_builder, is_path
from mola.lab.models import MODELS, build_network
from mola.lab.networks import TIMM, timm_builder
from mola.options import counted, did_you_mean
from mola.saving.schema import parse
from mola.saving.weights import load_weights, read_state

ENDINGS = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
"""Endings of weights files in a folder."""

EXPORTED = ".pt2"

CONFIG, PROCESSOR, WEIGHTS, INDEX = (
    "config.json",
    "preprocessor_config.json",
    "model.safetensors",
    "model.safetensors.index.json",
)
CROP_PCT = 0.875
"""Share of the shorter side that timm keeps by default."""

KINDS = {
    "ForImageClassification": "AutoModelForImageClassification",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
}
"""End of an architecture's name, and the class that loads it."""


@dataclass(frozen=True)
class Built:
    """Networks, ready to be fitted."""

    networks: list[nn.Module]
    files: list[Path]
    """Source of the weights."""
    hints: Hints
    """Inputs and classes by the networks' own configuration."""


def weight_files(names: Sequence[str]) -> list[Path]:
    """Return the files that were named, those of a folder in the order of their names."""
    found: list[Path] = []
    for name in names:
        path = Path(name).expanduser()
        if path.is_dir():
            inside = sorted(file for file in path.iterdir() if file.suffix in ENDINGS and file.is_file())
            if not inside:
                raise OptionError(
                    f"the folder {path} holds no weights: expected files that end in {', '.join(ENDINGS)}."
                )
            found += inside
        elif path.is_file():
            found.append(path)
        else:
            raise OptionError(
                f"the weights {path} do not exist: expected a file (safetensors, or made by torch.save), or a folder of them."
            )
    return found


def checksum(path: Path) -> str:
    """Return the SHA-256 sum of a file."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def build_networks(
    names: Sequence[str], weights: Sequence[str] = (), *, classes: int | None = None, trust: bool = False
) -> Built:
    """Build the networks and load their weights."""
    if not names:
        raise OptionError(
            "no network given: name one with --network, such as lenet, package.module:function or a Hugging Face folder."
        )
    files = weight_files(weights)
    takers = [name for name in names if not is_whole(name)]
    if len(takers) == 1 and len(files) > 1:
        names = [other for name in names for other in ([name] * len(files) if name == takers[0] else [name])]
        takers = takers * len(files)
    if files and len(files) != len(takers):
        raise OptionError(
            f"{counted(len(files), 'file')} of weights for {counted(len(takers), 'network')} to take them "
            f"({', '.join(takers) or 'none'}): expected one network for all files, or one for each. Folders and {EXPORTED} files "
            f"bring their own weights."
        )
    rest = iter(files)
    networks, sources = [], []
    for name in names:
        if is_whole(name):
            network, source = _whole(name, trust)
            sources += source
        else:
            path = next(rest, None)
            network = _with_weights(name, path, classes)
            sources += [] if path is None else [path]
        networks.append(network.eval())
    return Built(networks, sources, _hints(names[0], networks[0]))


def is_imported(name: str) -> bool:
    """True for `package.module:function`."""
    return ":" in name and not name.startswith(TIMM) and not is_path(name) and not is_whole(name)


def is_whole(name: str) -> bool:
    """True for a network with its own weights: a Hugging Face folder or an exported program."""
    if name in MODELS or name.startswith(TIMM):
        return False
    return Path(name).expanduser().is_dir() or name.endswith(EXPORTED)


def _whole(name: str, trust: bool) -> tuple[nn.Module, list[Path]]:
    path = Path(name).expanduser()
    if name.endswith(EXPORTED):
        return load_exported(path, trust=trust), [path]
    return load_transformers(path)


def _with_weights(name: str, path: Path | None, classes: int | None) -> nn.Module:
    if name in MODELS or name.startswith(TIMM):
        if path is None:
            raise OptionError(f"{name} comes without trained weights: name their files with --weights.")
        build: Callable[[int], nn.Module] = (
            timm_builder(name.removeprefix(TIMM)) if name.startswith(TIMM) else lambda count: build_network(name, count)
        )
        found = _classes_in(path, build(10))
        if classes is not None and found is not None and classes != found:
            raise OptionError(
                f"{path} holds weights for {found} classes, not for {classes}. With `mola fit`, leave --classes out, or name "
                f"all {found} classes."
            )
        network = build(classes or found or 10)
    elif is_imported(name):
        network = _imported(name)
    else:
        near = (
            " There is no such file or folder." if "/" in name or name.startswith(".") else did_you_mean(name, MODELS)
        )
        raise OptionError(
            f"unknown network {name!r}.{near} Expected one of {', '.join(MODELS)}; package.module:function; timm:NAME; a folder "
            f"with config.json and model.safetensors; or a {EXPORTED} file."
        )
    if path is not None:
        load_weights(network, path)
    return network


def _imported(name: str) -> nn.Module:
    try:
        network = import_builder(name)()
    except MolaError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise OptionError(
            f"{name} failed ({type(error).__name__}: {error}): expected a function without arguments that makes the network."
        ) from error
    return getattr(network, "_orig_mod", network)  # of torch.compile, which hides the layers


def _classes_in(path: Path, like: nn.Module) -> int | None:
    # The number of outputs by a weights file: rows of the network's last tensor.
    state: Any = read_state(path)
    last = list(like.state_dict())[-1]
    while isinstance(state, dict):
        for name, value in state.items():
            if (name == last or str(name).endswith(f".{last}")) and getattr(value, "ndim", 0) > 0:
                if value.numel() * value.element_size() > value.untyped_storage().nbytes():
                    raise StorageError(
                        f"{path} holds fewer numbers than the {value.shape[0]:,} rows that {name} claims: it is damaged."
                    )
                return int(value.shape[0])
        state = next((value for value in state.values() if isinstance(value, dict)), None)
    return None


def _hints(name: str, network: nn.Module) -> Hints:
    if name in MODELS:
        return Hints(shape=MODELS[name].input_shape)
    if name.startswith(TIMM):
        return timm_hints(network)
    path = Path(name).expanduser()
    return folder_hints(path) if path.is_dir() else Hints()


def check_unchanged(files: Sequence[Path], sums: Sequence[str]) -> None:
    """Refuse weights files that have changed since the posterior was fitted."""
    for path, expected in zip(files, sums, strict=False):
        if checksum(path) != expected:
            raise StorageError(
                f"{path} has changed since the posterior was fitted: put the old file back, or fit again with `mola fit`."
            )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = parse(path.read_bytes(), path)
    except StorageError as error:
        raise StorageError(f"{path} is not JSON: {error.__cause__}.") from error
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}.") from error
    if not isinstance(content, dict):
        raise StorageError(f"{path} holds a {type(content).__name__}; expected an object.")
    return content


def load_transformers(folder: Path) -> tuple[nn.Module, list[Path]]:
    """Return a classifier from a Hugging Face folder, and the files of its weights."""
    if not (folder / CONFIG).is_file():
        raise OptionError(
            f"{folder} holds no {CONFIG}: expected a folder in the form of Hugging Face, with {CONFIG} and {WEIGHTS}."
        )
    files = _hugging_face_files(folder)
    for path in files:
        if not path.is_file():
            raise StorageError(
                f"{path} does not exist: weights are read from safetensors alone. Save the model again with save_pretrained."
            )
    architectures = _read_json(folder / CONFIG).get("architectures") or ["none"]
    kind = next((KINDS[end] for end in KINDS if str(architectures[0]).endswith(end)), None)
    if kind is None:
        raise OptionError(
            f"{folder} holds a {architectures[0]}: expected a classifier, of a kind that ends in {' or '.join(KINDS)}."
        )
    with importing("a Hugging Face folder", "transformers", "hub"):
        transformers: Any = importlib.import_module("transformers")
    try:
        network, info = getattr(transformers, kind).from_pretrained(
            folder, local_files_only=True, use_safetensors=True, trust_remote_code=False, output_loading_info=True
        )
    except Exception as error:  # damaged weights and configurations make it raise a dozen kinds
        reason = (str(error) or repr(error)).splitlines()[0]
        raise StorageError(f"{folder} cannot be loaded by transformers: {reason}") from error
    absent = sorted(info.get("missing_keys", [])) + [str(one) for one in info.get("mismatched_keys", [])]
    if absent:
        raise StorageError(
            f"{folder} lacks weights of the network ({absent[0]} and {len(absent) - 1} more): it would be partly random."
        )
    loaded: nn.Module = network
    return loaded, files


def _hugging_face_files(folder: Path) -> list[Path]:
    # One file of weights, or the parts that an index lists.
    if not (folder / INDEX).is_file():
        return [folder / WEIGHTS]
    parts = _read_json(folder / INDEX).get("weight_map")
    if not isinstance(parts, dict) or not parts or not all(isinstance(name, str) for name in parts.values()):
        raise StorageError(f"{folder / INDEX} lists no weights: expected the file of each under 'weight_map'.")
    return [folder / name for name in sorted(set(parts.values()))]


def folder_hints(folder: Path) -> Hints:
    """Return class names and the preparation of images, as far as a Hugging Face folder has them."""
    names = _read_json(folder / CONFIG).get("id2label") or {}
    classes = tuple(str(names[key]) for key in sorted(names, key=int)) if names else None
    if classes is not None and all(name == f"LABEL_{index}" for index, name in enumerate(classes)):
        classes = None  # transformers' placeholders
    if not (folder / PROCESSOR).is_file():
        return Hints(classes=classes)
    found = _read_json(folder / PROCESSOR)
    resize, crop = _side(found.get("size")) if found.get("do_resize", True) else None, None
    if found.get("do_center_crop", False):
        square = _side(found.get("crop_size"))
        crop = square[0] if isinstance(square, tuple) else square
    mean, std = _statistics(found)
    return Hints(classes=classes, resize=resize, crop=crop, mean=mean, std=std)


def _statistics(found: dict[str, Any]) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None]:
    # For pixels from 0 to 1, whatever range the processor scales bytes to before it normalises.
    mean, std = (tuple(float(one) for one in found.get(name) or ()) or None for name in ("image_mean", "image_std"))
    if not found.get("do_normalize", True):
        mean = std = None
    factor = float(found.get("rescale_factor", 1 / 255)) if found.get("do_rescale", True) else 1.0
    whole = 255 * factor
    offset = 1.0 if found.get("rescale_offset", False) else 0.0
    if abs(whole - 1) < 1e-6 and not offset:
        return mean, std
    return tuple((one + offset) / whole for one in mean or (0.0,)), tuple(one / whole for one in std or (1.0,))


def _side(size: Any) -> int | tuple[int, int] | None:
    # The shorter side, or height and width, in the several ways of Hugging Face.
    if isinstance(size, dict):
        if "shortest_edge" in size:
            return int(size["shortest_edge"])
        return (int(size["height"]), int(size["width"])) if {"height", "width"} <= size.keys() else None
    return (int(size), int(size)) if isinstance(size, int) else None


def timm_hints(network: nn.Module) -> Hints:
    """Return the inputs described by timm's configuration of a network."""
    found = getattr(network, "pretrained_cfg", None) or {}
    mean, std = (tuple(float(one) for one in found.get(name) or ()) or None for name in ("mean", "std"))
    shape = found.get("input_size")
    if not shape:
        return Hints(mean=mean, std=std)
    side = int(shape[-1])
    if found.get("crop_mode") == "squash":
        return Hints(resize=(side, side), mean=mean, std=std)
    # Like timm's own evaluation: the shorter side to a little more, then the middle.
    return Hints(resize=int(side / float(found.get("crop_pct") or CROP_PCT)), crop=side, mean=mean, std=std)


class ExportedNetwork(nn.Module):
    """A program whose last operation is a layer again."""

    def __init__(self, body: nn.Module, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.body = body
        classes, features = weight.shape
        self.head = nn.Linear(features, classes, bias=bias is not None, dtype=weight.dtype)
        self.head.weight = nn.Parameter(weight.detach().clone())
        if bias is not None:
            self.head.bias = nn.Parameter(bias.detach().clone())

    def forward(self, *inputs: Any, **named: Any) -> Tensor:
        """Return logits."""
        logits: Tensor = self.head(self.body(*inputs, **named))
        return logits

    def train(self, mode: bool = True) -> ExportedNetwork:
        """Set the mode of this module and its head: a program has the mode that it was exported in."""
        self.training = mode
        self.head.train(mode)
        return self


def load_exported(path: Path, *, trust: bool) -> nn.Module:
    """Return a network from a file of `torch.export.save`, which only a trusted file may run."""
    if not path.is_file():
        raise OptionError(f"{path} does not exist: expected a file made by torch.export.save.")
    if not trust:
        raise OptionError(
            f"{path} is an exported program, and PyTorch unpickles these: a file from a stranger could run code. "
            f"If you trust it, add --trust."
        )
    try:
        program = torch.export.load(path)
    except Exception as error:  # the reader raises a dozen kinds on damaged files
        raise StorageError(
            f"{path} cannot be read by this PyTorch as an exported program ({type(error).__name__}: {str(error)[:200]})."
        ) from error
    return cut_before_last_linear(program.module(check_guards=False), str(path))


def cut_before_last_linear(module: torch.fx.GraphModule, name: str) -> ExportedNetwork:
    """Split a graph whose output is a linear operation into a body and a layer."""
    output = next(node for node in module.graph.nodes if node.op == "output")
    returned = output.args[0]
    if isinstance(returned, dict) and "logits" in returned:
        returned = returned["logits"]
    last = returned[0] if isinstance(returned, (tuple, list)) and len(returned) == 1 else returned
    found = _linear(module, last)
    if found is None:
        what = getattr(last, "target", last)
        raise HeadError(
            f"the program {name} ends in {what}: expected a linear layer of stored weights that gives the logits."
        )
    features, weight, bias = found
    output.args = (features,)
    module.graph.eliminate_dead_code()
    # Inputs and outputs were packed as trees; the features are one tensor.
    codegen = torch.fx.graph.CodeGen()
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    module.graph.set_codegen(codegen)
    module.recompile()
    return ExportedNetwork(_Called(module, [str(node.target) for node in inputs]), weight, bias)


class _Called(nn.Module):
    """A graph called by position or by name, as its network was."""

    def __init__(self, graph: torch.fx.GraphModule, names: list[str]) -> None:
        super().__init__()
        self.graph, self.names = graph, names

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Call the graph."""
        values = dict(zip(self.names, inputs, strict=False)) | named
        return self.graph(*[values[name] for name in self.names])


def _linear(module: torch.fx.GraphModule, node: Any) -> tuple[Any, Tensor, Tensor | None] | None:
    if getattr(node, "op", None) != "call_function":
        return None
    aten = torch.ops.aten
    if node.target == aten.linear.default:
        features, weight, *rest = node.args
        bias = rest[0] if rest else None
    elif node.target == aten.addmm.default and getattr(node.args[2], "target", None) in (
        aten.t.default,
        aten.permute.default,
    ):
        bias, features, transposed = node.args
        weight = transposed.args[0]
    else:
        return None
    values = [None if one is None else _stored(module, one) for one in (weight, bias)]
    if values[0] is None or (bias is not None and values[1] is None):
        return None
    return features, values[0], values[1]


def _stored(module: torch.fx.GraphModule, node: Any) -> Tensor | None:
    if getattr(node, "op", None) != "get_attr":
        return None
    value: Any = module
    for part in str(node.target).split("."):
        value = getattr(value, part)
    return value if isinstance(value, Tensor) else None
