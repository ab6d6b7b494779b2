"""Save posteriors with their networks and a model card, and exchange them with the Hugging Face hub.

`save` writes a bundle (`molaplace.saving.bundle`) with a card, which `mola.load` and the commands open, too. No code from the hub is run.
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

from torch import Tensor, nn

from molaplace.errors import OptionError, StorageError, importing
from molaplace.evaluation import Evaluation
from molaplace.loading import load as open_folder
from molaplace.network import TokenChoice
from molaplace.posterior import MoLA
from molaplace.saving.bundle import CARD, FILE, NETWORKS, WITH_NETWORKS, save_bundle, with_contents
from molaplace.saving.files import LOCK, MARKER, Marker

HELPERS = ("tokenizer", "processor")
TEMPLATE = Path(__file__).with_name("model_card.md.jinja")
TASKS = {"ForImageClassification": "image-classification", "ForSequenceClassification": "text-classification"}
"""The hub's task names, keyed by the suffix of a transformers network's class name."""

TAGS = ("molaplace", "uncertainty", "calibration", "laplace-approximation", "out-of-distribution-detection", "pytorch")


def save(
    posterior: MoLA,
    folder: str | Path,
    *,
    build: str | Sequence[str] | None = None,
    classes: Sequence[str] | None = None,
    example: Any = None,
    preparation: Mapping[str, Any] | None = None,
    validation: tuple[Any, Tensor] | None = None,
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
        build: function that builds a network, as in `MoLA.save`.
        classes: names of the outputs; by default, those in the transformers configuration, or numbers if there are none.
        example: a batch of inputs, as in `MoLA.save`.
        preparation: how images are prepared, as in `MoLA.save`.
        validation: a prediction for validation data, and their labels, as in `MoLA.save`.
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
    contents, columns = with_contents(posterior, classes, example, preparation, validation)
    target = Path(folder).resolve()
    kind = type(posterior.networks[0]).__name__
    task = card.get("pipeline_tag", next((task for suffix, task in TASKS.items() if kind.endswith(suffix)), None))
    data = {**card, "pipeline_tag": task, "tags": list(dict.fromkeys([*TAGS, *card.get("tags", ())]))}
    needs_build = not all(hasattr(network, "save_pretrained") for network in map(_bare, posterior.networks))
    width = posterior.likelihood.num_uncertain(posterior.components[0].head.outputs)  # type: ignore[union-attr]
    names = contents.classes[:width] or tuple(map(str, range(width)))
    text = _card_text(posterior, name or target.name, data, names, helpers, evaluation, needs_build=needs_build)

    def write(new: Path) -> None:
        for role, helper in helpers.items():
            helper.save_pretrained(new / role)
        (new / CARD).write_text(text, encoding="utf-8")

    return save_bundle(
        posterior, target, contents, columns, networks=True, build=build, write=write, overwrite=overwrite
    )


def _bare(network: nn.Module) -> nn.Module:
    return network.model if isinstance(network, TokenChoice) else network


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
    return before.replaceable(repository, WITH_NETWORKS, present, new, visible=visible, overwrite=overwrite)


def load(
    folder: str | Path,
    build: Callable[[], nn.Module] | type | Sequence[nn.Module] | None = None,
    *,
    revision: str | None = None,
    trust: bool = False,
) -> MoLA:
    """Load a posterior from a folder written by `save` or from a repository on the Hugging Face hub, and check that it is complete.

    Args:
        folder: a local folder, or the name of a repository, such as "user/name", which is downloaded if it is not yet in the cache.
        build: a function that builds a network of the right architecture, into which the weights are loaded; a class with a
            `from_pretrained` method, such as `AutoModelForImageClassification` from transformers; or a list of networks that already
            have their weights. Not needed for transformers networks.
        revision: branch, tag or commit of the repository.
        trust: whether to import and run a function that only the folder names.

    Returns:
        The posterior. `StorageError` is raised if a file is missing or damaged, is newer than this library, or belongs to a different
        network. `OptionError` is raised if `build` is required but not given.
    """
    directory = Path(folder)
    if not directory.exists() and re.fullmatch(r"[\w.-]+/[\w.-]+", str(folder)):
        directory = _download(str(folder), revision)
    posterior = open_folder(directory, build, trust=trust)
    assert isinstance(posterior, MoLA)
    return posterior


def _download(repository: str, revision: str | None) -> Path:
    with importing("downloading from the hub", "huggingface_hub", "hub"):
        import huggingface_hub
    patterns = [FILE, CARD, *(f"{entry}/*" for entry in (NETWORKS, *HELPERS))]
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
