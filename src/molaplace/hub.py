"""Save posteriors with their networks and a model card, and exchange them with the Hugging Face hub.

No code from a folder or from the hub is ever run. A folder contains:

config.json                     class names, and the type and precision of each network; written last
.molaplace.json                 names and checksums of these files; no other file of the folder or repository is ever replaced
networks/0/model.safetensors    weights of each network; for transformers, also the network's own config.json
posterior/                      as written by `posterior.save`, with a checksum of each network's weights
tokenizer/, processor/          the objects that prepare texts and images, if given
README.md                       the model card, written by `huggingface_hub`
"""

from __future__ import annotations

import glob
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from molaplace.errors import OptionError, StorageError, importing
from molaplace.evaluation import Evaluation
from molaplace.network import TokenChoice
from molaplace.posterior import MoLA
from molaplace.saving import posterior as saved_posterior
from molaplace.saving.files import LOCK, MARKER, Marker, encode, file_name, replacing
from molaplace.saving.posterior import load_posterior, pack
from molaplace.saving.pretrained import load_pretrained, read_config
from molaplace.saving.schema import Optional, check
from molaplace.saving.weights import load_weights, save_weights

FORMAT = "molaplace-hub-folder"
VERSION = 1
CONFIG = "config.json"
CARD = "README.md"
WEIGHTS = "model.safetensors"
FOLDERS = ("networks", "posterior", "tokenizer", "processor")
KIND = "model for the hub"
TEMPLATE = Path(__file__).with_name("model_card.md.jinja")
TASKS = {"ForImageClassification": "image-classification", "ForSequenceClassification": "text-classification"}
"""The hub's task names, keyed by the suffix of a transformers network's class name."""

TAGS = ("molaplace", "uncertainty", "calibration", "laplace-approximation", "out-of-distribution-detection", "pytorch")
SCHEMA: dict[str, Any] = {
    "classes": [str],
    "networks": [{"type": str, "from_pretrained": bool, "dtype": Optional(str), "tokens": Optional([int])}],
}


def save(
    posterior: MoLA,
    folder: str | Path,
    *,
    classes: Sequence[str] | None = None,
    evaluation: Evaluation | None = None,
    tokenizer: Any = None,
    processor: Any = None,
    name: str | None = None,
    overwrite: bool = False,
    **card: Any,
) -> Path:
    """Write a posterior, its networks and a model card to a folder. An older model in the folder is replaced when all is written.

    Files that molaplace did not write, or that were changed since, are never replaced or removed.

    Args:
        posterior: the posterior from `mola.fit`.
        folder: the folder to write to; it is created if it does not exist.
        classes: names of the outputs; by default, those in the transformers configuration, or numbers if there are none.
        evaluation: results for this posterior alone, from `mola.evaluate(posterior, ...)`; the card lists the data sets and metrics.
        tokenizer: any object that prepares texts and has a `save_pretrained` method; it is saved in the folder.
        processor: any object that prepares images and has a `save_pretrained` method; it is saved in the folder.
        name: name of the model on the card, such as "user/name"; by default, the name of the folder.
        overwrite: whether to write even if the folder contains other files but no model; see `MoLA.save`.
        card: fields of `huggingface_hub.ModelCardData`, such as license="mit", tags=["insects"] and pipeline_tag="tabular-classification".

    Returns:
        The path of the folder. `StorageError` is raised if the folder contains other files.
    """
    if type(posterior) is not MoLA or posterior.structure is None:
        raise OptionError(
            f"must be a posterior over last layers from mola.fit, got "
            f"{'a plain ensemble' if type(posterior) is MoLA else type(posterior).__name__}. Posteriors over whole networks can be "
            f"saved without their networks: posterior.save(folder).",
            argument="posterior",
        )
    helpers = {"tokenizer": tokenizer, "processor": processor}
    helpers = {role: helper for role, helper in helpers.items() if helper is not None}
    if evaluation is not None and len({predictor for predictor, _ in evaluation.entries}) > 1:
        raise OptionError(
            "must be results for this posterior alone, from mola.evaluate(posterior, test_loader).",
            argument="evaluation",
        )
    outputs = _class_names(posterior, classes)
    target = Path(folder).resolve()
    with replacing(target, KIND, (CONFIG,), overwrite=overwrite) as new:
        networks = [
            _save_network(network, new / "networks" / str(index)) for index, network in enumerate(posterior.networks)
        ]
        for role, helper in helpers.items():
            helper.save_pretrained(new / role)
        path = new / "posterior" / file_name(saved_posterior.KIND)
        path.parent.mkdir()
        path.write_bytes(encode(*pack(posterior)))
        needs_build = not all(network["from_pretrained"] for network in networks)
        kind = type(posterior.networks[0]).__name__
        task = card.get("pipeline_tag", next((task for suffix, task in TASKS.items() if kind.endswith(suffix)), None))
        data = {**card, "pipeline_tag": task, "tags": list(dict.fromkeys([*TAGS, *card.get("tags", ())]))}
        text = _card_text(posterior, name or target.name, data, outputs, helpers, evaluation, needs_build=needs_build)
        (new / CARD).write_text(text, encoding="utf-8")
        config = {"format": FORMAT, "version": VERSION, "library_name": "molaplace", "classes": outputs}
        (new / CONFIG).write_text(json.dumps({**config, "networks": networks}, indent=2), encoding="utf-8")
    return target


def push(
    posterior: MoLA, repository: str, *, private: bool | None = None, overwrite: bool = False, **options: Any
) -> str:
    """Upload a posterior, its networks and a model card to the Hugging Face hub, as the user who is logged in.

    An older model in the repository is replaced. Files that molaplace did not write, or that were changed since, such as a card that was
    edited on the hub, are never replaced or removed.

    Args:
        posterior: the posterior from `mola.fit`.
        repository: name of the repository, such as "user/name"; it is created if it does not exist.
        private: whether a new repository is private; by default, the setting of the account.
        overwrite: whether to upload even if the repository contains other files but no model from molaplace.
        options: arguments of `save`, such as `classes`, `evaluation` and `license`.

    Returns:
        The address of the repository. `StorageError` is raised if the repository contains other files.
    """
    with importing("uploading to the hub", "huggingface_hub", "hub"):
        import huggingface_hub
    with TemporaryDirectory() as temporary:
        folder = save(posterior, Path(temporary) / "model", name=repository, **options)
        address = huggingface_hub.create_repo(repository, private=private, exist_ok=True)
        revision = huggingface_hub.repo_info(repository).sha
        new = {name: checksum for name, (checksum,) in Marker.read(folder / MARKER).files.items()}
        ours = _replaceable(repository, revision, new, overwrite=overwrite)
        huggingface_hub.upload_folder(
            repo_id=repository,
            folder_path=folder,
            commit_message="Upload a posterior with molaplace",
            parent_commit=revision,  # fails if the repository has changed since it was checked
            ignore_patterns=[f"{MARKER}{LOCK}"],
            delete_patterns=[glob.escape(name) for name in sorted(ours - new.keys())],
        )
    return str(address)


def _replaceable(repository: str, revision: str | None, new: Mapping[str, str], *, overwrite: bool) -> set[str]:
    # Return the files in a repository that may be replaced or deleted; raise StorageError if the new files would replace others.
    import huggingface_hub

    def content(name: str) -> bytes:
        return Path(huggingface_hub.hf_hub_download(repository, name, revision=revision)).read_bytes()

    tree = huggingface_hub.list_repo_tree(repository, recursive=True, revision=revision)
    entries = {entry.path: entry for entry in tree}

    def checksum(name: str) -> str | None:
        entry = entries.get(name)
        if isinstance(entry, huggingface_hub.RepoFile):
            return entry.lfs.sha256 if entry.lfs else hashlib.sha256(content(name)).hexdigest()
        above = [entries.get(str(parent)) for parent in PurePosixPath(name).parents]
        blocked = entry is not None or any(isinstance(parent, huggingface_hub.RepoFile) for parent in above)
        return "" if blocked else None

    before = Marker.parse(content(MARKER), f"{repository}/{MARKER}") if MARKER in entries else Marker()
    present = {name: checksum(name) for name in (*before.files, *new)}
    visible = sorted(path for path in entries if not path.startswith("."))
    return before.replaceable(repository, KIND, present, new, visible=visible, overwrite=overwrite)


def load(
    folder: str | Path,
    build: Callable[[], nn.Module] | type | Sequence[nn.Module] | None = None,
    *,
    revision: str | None = None,
) -> MoLA:
    """Load a posterior from a folder written by `save` or from a repository on the Hugging Face hub, and check that it is complete.

    Args:
        folder: a local folder, or the name of a repository, such as "user/name", which is downloaded if it is not yet in the cache.
        build: a function that builds a network of the right architecture, into which the weights are loaded; a class with a
            `from_pretrained` method, such as `AutoModelForImageClassification` from transformers; or a list of networks that already
            have their weights. Not needed for transformers networks.
        revision: branch, tag or commit of the repository.

    Returns:
        The posterior. `StorageError` is raised if a file is missing or damaged, is newer than this library, or belongs to a different
        network. `OptionError` is raised if `build` is required but not given.
    """
    directory = Path(folder)
    if not directory.exists() and re.fullmatch(r"[\w.-]+/[\w.-]+", str(folder)):
        directory = _download(str(folder), revision)
    config = _read_config(directory)
    if build is not None and not callable(build):
        networks = list(build)
    else:
        networks = [
            _load_network(directory / "networks" / str(index), entry, build)
            for index, entry in enumerate(config["networks"])
        ]
    return load_posterior(directory / "posterior", networks)


def is_hub_folder(folder: str | Path) -> bool:
    """Return whether the folder was written by `save`."""
    try:
        return bool(read_config(Path(folder) / CONFIG).get("format") == FORMAT)
    except StorageError:  # the folder of a posterior has no configuration, and that of another library may have any
        return False


def _download(repository: str, revision: str | None) -> Path:
    with importing("downloading from the hub", "huggingface_hub", "hub"):
        import huggingface_hub
    patterns = [CONFIG, *(f"{entry}/*" for entry in FOLDERS)]
    try:
        return Path(huggingface_hub.snapshot_download(repository, revision=revision, allow_patterns=patterns))
    except (OSError, ValueError) as error:
        raise StorageError(
            f"{repository!r} is not a folder, and it cannot be downloaded from the Hugging Face hub ({error}). Check the name, the "
            f"connection and, for a private repository, that you are logged in."
        ) from error


def _card_text(
    posterior: MoLA,
    name: str,
    data: dict[str, Any],
    classes: Sequence[str],
    helpers: dict[str, Any],
    evaluation: Evaluation | None,
    *,
    needs_build: bool,
) -> str:
    with importing("a model card", "huggingface_hub", "hub"):
        from huggingface_hub import EvalResult, ModelCard, ModelCardData
    task = data["pipeline_tag"]
    results = [
        EvalResult(
            task_type=task or "other",
            dataset_type=re.sub(r"[^a-z0-9]+", "-", dataset.lower()).strip("-") or "data",
            dataset_name=dataset,
            metric_type=metric,
            metric_value=round(estimate.value, 6),
        )
        for (_, dataset), metrics in (evaluation.entries if evaluation else {}).items()
        for metric, estimate in metrics.items()
    ]
    card = ModelCard.from_template(
        ModelCardData(library_name="molaplace", model_name=name, eval_results=results or None, **data),
        template_str=TEMPLATE.read_text(encoding="utf-8"),
        name=name,
        task=task,
        posterior=posterior,
        likelihood=posterior.likelihood,
        kinds=sorted({type(network).__name__ for network in posterior.networks}),
        classes=classes,
        needs_build=needs_build,
        helpers={
            role: (re.sub(r"^transformers\..*", "transformers", type(helper).__module__), type(helper).__name__)
            for role, helper in helpers.items()
        },
        evaluation=evaluation,
        plain=_plain,
        quoted=lambda text: json.dumps(text, ensure_ascii=False),
        listed=lambda values: ", ".join(f"{value:.4g}" for value in values),
    )
    return str(card)


def _plain(text: str) -> str:
    # Return the text on a single line, with special HTML and Markdown characters escaped.
    return re.sub(r"([\\`|*\[\]])", r"\\\1", escape(" ".join(text.split()), quote=False))


def _class_names(posterior: MoLA, classes: Sequence[str] | None) -> list[str]:
    head = posterior.components[0].head
    width = posterior.likelihood.num_uncertain(head.outputs) if head else 0
    id2label = getattr(getattr(posterior.networks[0], "config", None), "id2label", None)
    if classes is None and isinstance(id2label, dict) and id2label:
        classes = [id2label[index] for index in sorted(id2label)]
    names = [str(name) for name in (range(width) if classes is None else classes)]
    if len(set(names)) != len(names) or len(names) != width:
        raise OptionError(f"must be {width} different names, one for each output; got {names}.", argument="classes")
    return names


def _save_network(network: nn.Module, directory: Path) -> dict[str, Any]:
    if isinstance(network, TokenChoice):
        return {**_save_network(network.model, directory), "tokens": network.tokens.tolist()}
    save_pretrained: Any = getattr(network, "save_pretrained", None)
    if save_pretrained is not None:
        save_pretrained(directory)
    else:
        save_weights(network, directory / WEIGHTS)
    dtypes = {parameter.dtype for parameter in network.parameters() if parameter.is_floating_point()}
    return {
        "type": f"{type(network).__module__}.{type(network).__qualname__}",
        "from_pretrained": save_pretrained is not None,
        "dtype": str(dtypes.pop()).removeprefix("torch.") if len(dtypes) == 1 else None,
        "tokens": None,
    }


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    config = read_config(path)
    if (config.get("format"), config.get("version")) != (FORMAT, VERSION):
        raise StorageError(
            f"{path} was not written by this version of molaplace: expected the format {FORMAT!r} with version {VERSION}. Update "
            f"molaplace, or use a separate folder."
        )
    check(config, SCHEMA, "")
    return config


def _load_network(directory: Path, entry: dict[str, Any], build: Any) -> nn.Module:
    if entry["tokens"] is not None:
        return TokenChoice(_load_network(directory, {**entry, "tokens": None}, build), entry["tokens"])
    # The checksums in the posterior reveal weights that are damaged or were initialised at random by transformers.
    dtype = getattr(torch, entry["dtype"], None) if entry["dtype"] else None
    if entry["dtype"] and not isinstance(dtype, torch.dtype):
        raise StorageError(
            f"the precision {entry['dtype']!r} in {CONFIG} is unknown; expected the name of a torch dtype. Download the "
            f"folder again.",
            place=str(directory),
        )
    adapter = next(directory.glob("**/adapter_config.json"), None)
    if adapter is not None and not hasattr(build, "from_pretrained"):
        raise OptionError(
            f"{adapter.parent} holds an adapter without its backbone. Load all adapters on one backbone, with "
            f"PeftModel.from_pretrained(backbone, folder, adapter_name=...) and model.load_adapter(folder, adapter_name=...), and "
            f"call mola.hub.load(folder, mola.adapters(model))."
        )
    if build is None:
        build = _transformers_class(entry, directory)
    network: nn.Module
    if not hasattr(build, "from_pretrained"):
        network = build()
        network = network if dtype is None else network.to(dtype)
        load_weights(network, directory / WEIGHTS)
        return network.eval()
    try:
        network = load_pretrained(build, directory, dtype=dtype)
    except StorageError:
        raise
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise StorageError(f"{directory} is damaged or incomplete: {error} Download the folder again.") from error
    return network.eval()


def _transformers_class(entry: dict[str, Any], directory: Path) -> Any:
    # Only transformers classes are looked up by name: importing anything else could run arbitrary code.
    kind = entry["type"].split(".")
    if not entry["from_pretrained"] or kind[0] != "transformers":
        raise OptionError(
            f"{directory} holds a {entry['type']}. Pass a function that builds this network: mola.hub.load(folder, build)."
        )
    with importing(f"loading a {kind[-1]}", "transformers", "transformers"):
        import transformers
    network_class = getattr(transformers, kind[-1], None)
    if not (isinstance(network_class, type) and issubclass(network_class, transformers.PreTrainedModel)):
        raise StorageError(
            f"{directory} contains a {kind[-1]}, which this version of transformers does not provide. Pass a function that "
            f"builds this network: mola.hub.load(folder, build)."
        )
    return network_class
