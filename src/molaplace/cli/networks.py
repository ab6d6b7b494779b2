"""Build networks by name and load their weights. Nothing is downloaded.

| name | network |
|---|---|
| `mlp` | the perceptron for digits that `molaplace demo` trains, with weights from files |
| `package.module:function` | the network that the function returns, with its own weights or weights from files |
| `timm:NAME` | a timm architecture, with weights from files |
| a folder with `config.json` | a Hugging Face classifier, with the weights in the folder |

One name with K weight files gives K networks, and so do K names. Only the user's own functions can run arbitrary code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from molaplace.cli.consent import is_function_name
from molaplace.cli.data.preprocessing import Preprocessing
from molaplace.demo.data import digits_network
from molaplace.errors import MolaError, OptionError, StorageError, importing
from molaplace.imported import import_builder
from molaplace.options import counted, did_you_mean
from molaplace.saving.schema import parse
from molaplace.saving.weights import load_weights, read_state

MLP = "mlp"
TIMM = "timm:"

ENDINGS = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
"""File extensions that identify weights in a folder."""

CONFIG = "config.json"
PROCESSOR = "preprocessor_config.json"
WEIGHTS = "model.safetensors"
CROP_PCT = 0.875
"""Fraction of the shorter side that timm keeps by default when it crops."""

KINDS = {
    "ForImageClassification": "AutoModelForImageClassification",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
}
"""Transformers classes that load networks, keyed by the suffix of the architecture's name."""


@dataclass(frozen=True)
class BuiltNetworks:
    """Networks with loaded weights, ready for fitting."""

    networks: list[nn.Module]
    files: list[Path]
    """Files that contain the weights."""
    hints: Preprocessing
    """Input preparation specified by the networks' configuration."""
    classes: tuple[str, ...] | None = None
    """Class names specified by the networks' configuration."""


def weight_files(names: Sequence[str]) -> list[Path]:
    """Return the named files. Files in a folder are sorted by name."""
    files: list[Path] = []
    for name in names:
        path = Path(name).expanduser()
        if path.is_dir():
            inside = sorted(file for file in path.iterdir() if file.suffix in ENDINGS and file.is_file())
            if not inside:
                raise OptionError(
                    f"the folder {path} contains no weights: expected files that end in {', '.join(ENDINGS)}."
                )
            files += inside
        elif path.is_file():
            files.append(path)
        else:
            raise OptionError(
                f"the weights {path} do not exist. Pass a file (safetensors or torch.save) or a folder of such files."
            )
    return files


def build_networks(names: Sequence[str], weights: Sequence[str] = (), *, classes: int | None = None) -> BuiltNetworks:
    """Build the networks and load their weights."""
    if not names:
        raise OptionError(
            "there is no network. Use --network to specify one, such as package.module:function or a Hugging Face folder."
        )
    files = weight_files(weights)
    takers = [name for name in names if not is_folder(name)]
    if len(takers) == 1 and len(files) > 1:
        names = [other for name in names for other in ([name] * len(files) if name == takers[0] else [name])]
        takers = takers * len(files)
    if files and len(files) != len(takers):
        raise OptionError(
            f"got {counted(len(files), 'weight file')} for {counted(len(takers), 'network')} without weights "
            f"({', '.join(takers) or 'none'}). Pass one network for all files, or one network for each file. Hugging "
            f"Face folders contain their own weights."
        )
    rest = iter(files)
    networks = [
        (
            load_transformers(Path(name).expanduser())
            if is_folder(name)
            else _with_weights(name, next(rest, None), classes)
        ).eval()
        for name in names
    ]
    name = names[0]
    if name == MLP:
        return BuiltNetworks(networks, files, Preprocessing(mode="L"))
    if name.startswith(TIMM):
        return BuiltNetworks(networks, files, timm_hints(networks[0]))
    if is_folder(name):
        return BuiltNetworks(networks, files, *folder_hints(Path(name).expanduser()))
    return BuiltNetworks(networks, files, Preprocessing())


def is_folder(name: str) -> bool:
    """Return True for a Hugging Face folder, which contains its own weights."""
    return name != MLP and not name.startswith(TIMM) and Path(name).expanduser().is_dir()


def _with_weights(name: str, path: Path | None, classes: int | None) -> nn.Module:
    if name == MLP or name.startswith(TIMM):
        if path is None:
            raise OptionError(f"{name} has no trained weights. Pass its weight files as arguments.")
        build: Callable[[int], nn.Module] = digits_network if name == MLP else _timm_builder(name.removeprefix(TIMM))
        outputs = _classes_in(path, build(10))
        if classes is not None and outputs is not None and classes != outputs:
            raise OptionError(
                f"expected weights for {classes} classes, but {path} contains weights for {outputs} classes. In `molaplace "
                f"fit`, omit --classes or list all {outputs} classes."
            )
        network = build(classes or outputs or 10)
    elif is_function_name(name):
        network = _imported(name)
    else:
        hint = (
            " The file or folder does not exist." if "/" in name or name.startswith(".") else did_you_mean(name, [MLP])
        )
        raise OptionError(
            f"unknown network {name!r}.{hint} Expected package.module:function, timm:NAME, {MLP}, or a folder "
            f"with config.json and model.safetensors."
        )
    if path is not None:
        load_weights(network, path)
    return network


def _timm_builder(name: str) -> Callable[[int], nn.Module]:
    if ":" in name:
        raise OptionError(
            f"timm:{name} would be downloaded. Expected the plain name of an architecture, such as resnet18."
        )
    with importing(f"the network {TIMM}{name}", "timm", "hub"):
        import timm

    def build(classes: int) -> nn.Module:
        try:
            network: nn.Module = timm.create_model(name, pretrained=False, num_classes=classes)
        except (RuntimeError, ValueError) as error:
            raise OptionError(
                f"timm cannot build {name!r}: {error}. timm.list_models() returns the available names."
            ) from error
        return network

    return build


def _imported(name: str) -> nn.Module:
    try:
        network = import_builder(name)()
    except MolaError:
        raise
    except Exception as error:  # the user's code may raise any exception
        raise OptionError(
            f"{name} failed ({type(error).__name__}: {error}): expected a function without arguments that returns the network."
        ) from error
    return getattr(network, "_orig_mod", network)  # unwrap the module, because torch.compile hides its layers


def _classes_in(path: Path, like: nn.Module) -> int | None:
    # Return the number of outputs according to a weights file: the number of rows in the network's last tensor.
    state: Any = read_state(path)
    last = list(like.state_dict())[-1]
    while isinstance(state, dict):
        for name, value in state.items():
            if (name == last or str(name).endswith(f".{last}")) and getattr(value, "ndim", 0) > 0:
                if value.numel() * value.element_size() > value.untyped_storage().nbytes():
                    raise StorageError(
                        f"{path} is damaged: it contains fewer values than the {value.shape[0]:,} rows of {name} require."
                    )
                return int(value.shape[0])
        state = next((value for value in state.values() if isinstance(value, dict)), None)
    return None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = parse(path.read_bytes(), path)
    except StorageError as error:
        raise StorageError(f"{path} is not a valid JSON file: {error.__cause__}.") from error
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}.") from error
    if not isinstance(content, dict):
        raise StorageError(f"expected a JSON object in {path}, got a value of type {type(content).__name__}.")
    return content


def load_transformers(folder: Path) -> nn.Module:
    """Return a classifier from a Hugging Face folder."""
    if not (folder / CONFIG).is_file():
        raise OptionError(f"{folder} contains no {CONFIG}. Pass a Hugging Face folder with {CONFIG} and {WEIGHTS}.")
    if not any(folder.glob("*.safetensors")):
        raise StorageError(
            f"{folder / WEIGHTS} does not exist. Weights are read only from safetensors files. Save the model again "
            f"with save_pretrained."
        )
    architectures = _read_json(folder / CONFIG).get("architectures") or ["none"]
    kind = next((KINDS[end] for end in KINDS if str(architectures[0]).endswith(end)), None)
    if kind is None:
        raise OptionError(
            f"{folder} contains a {architectures[0]}: expected a classifier whose class name ends in {' or '.join(KINDS)}."
        )
    with importing("a Hugging Face folder", "transformers", "hub"):
        import transformers
    try:
        network, info = getattr(transformers, kind).from_pretrained(
            folder, local_files_only=True, use_safetensors=True, trust_remote_code=False, output_loading_info=True
        )
    except Exception as error:  # damaged files can raise many kinds of error
        reason = (str(error) or repr(error)).splitlines()[0]
        raise StorageError(f"{folder} cannot be loaded by transformers: {reason}") from error
    absent = sorted(info.get("missing_keys", [])) + [str(key) for key in info.get("mismatched_keys", [])]
    if absent:
        raise StorageError(
            f"{folder} lacks some of the network's weights ({absent[0]} and {len(absent) - 1} more), which would be initialised "
            f"at random. Save the model again."
        )
    loaded: nn.Module = network
    return loaded


def folder_hints(folder: Path) -> tuple[Preprocessing, tuple[str, ...] | None]:
    """Return the image preparation and the class names that a Hugging Face folder specifies, if any."""
    names = _read_json(folder / CONFIG).get("id2label") or {}
    classes = tuple(str(names[key]) for key in sorted(names, key=int)) if names else None
    if classes is not None and all(name == f"LABEL_{index}" for index, name in enumerate(classes)):
        classes = None  # placeholders that transformers inserts
    if not (folder / PROCESSOR).is_file():
        return Preprocessing(), classes
    processor = _read_json(folder / PROCESSOR)
    resize = _side(processor.get("size")) if processor.get("do_resize", True) else None
    crop = None
    if processor.get("do_center_crop", False):
        square = _side(processor.get("crop_size"))
        crop = square[0] if isinstance(square, tuple) else square
    mean, std = (
        _statistics(processor, "image_mean", "image_std") if processor.get("do_normalize", True) else ((0.0,), (1.0,))
    )
    # Rescale the statistics for pixel values in [0, 1]. The processor may scale bytes to another range before it normalises them.
    largest = 255 * (float(processor.get("rescale_factor", 1 / 255)) if processor.get("do_rescale", True) else 1.0)
    offset = 1.0 if processor.get("rescale_offset", False) else 0.0
    mean = tuple((value + offset) / largest for value in mean)
    std = tuple(value / largest for value in std)
    return Preprocessing(resize=resize, crop=crop, mean=mean, std=std), classes


def _statistics(config: dict[str, Any], *names: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    mean, std = (tuple(float(value) for value in config.get(name) or ()) for name in names)
    return mean or (0.0,), std or (1.0,)


def _side(size: Any) -> int | tuple[int, int] | None:
    # Return the shorter side, or the height and width, from any of the Hugging Face formats.
    if isinstance(size, dict):
        if "shortest_edge" in size:
            return int(size["shortest_edge"])
        return (int(size["height"]), int(size["width"])) if {"height", "width"} <= size.keys() else None
    return (int(size), int(size)) if isinstance(size, int) else None


def timm_hints(network: nn.Module) -> Preprocessing:
    """Return the image preparation specified by timm's configuration of a network."""
    config: dict[str, Any] = getattr(network, "pretrained_cfg", None) or {}
    mean, std = _statistics(config, "mean", "std")
    if not config.get("input_size"):
        return Preprocessing(mean=mean, std=std)
    side = int(config["input_size"][-1])
    if config.get("crop_mode") == "squash":
        return Preprocessing(resize=(side, side), mean=mean, std=std)
    # As in timm's evaluation, resize the shorter side to slightly more than the crop, then crop the centre.
    return Preprocessing(resize=int(side / float(config.get("crop_pct") or CROP_PCT)), crop=side, mean=mean, std=std)
