"""CLINC150 (Larson et al., 2019): requests to an assistant with 150 intents, and requests that fit none of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mola.errors import DataError, StorageError
from mola.lab.data.catalogue import data_directory
from mola.saving.schema import check, parse

FILE = "data_full.json"
FOLDERS = ("clinc150", "oos-eval/data", "")
PAGE = "https://github.com/clinc/oos-eval (data/data_full.json, CC BY 3.0)"

PARTS = ("train", "val", "test", "oos_train", "oos_val", "oos_test")
"""In scope to train, validate and test on; the same out of scope."""


@dataclass(frozen=True)
class Requests:
    """Sentences, with the places of their intents among all of them; -1 is out of scope."""

    sentences: tuple[str, ...]
    labels: tuple[int, ...]


def load_clinc150(directory: Path | str | None = None) -> tuple[tuple[str, ...], dict[str, Requests]]:
    """Read the published file.

    Args:
        directory: the data directory; otherwise `MOLA_DATA` names it.

    Returns:
        The intents in alphabetical order, and the requests by part, as in `PARTS`.
    """
    root = data_directory(directory)
    path = next((place for folder in FOLDERS if (place := root / folder / FILE).is_file()), None)
    if path is None:
        raise DataError(f"CLINC150 is not in {root}. Put there:\n  {root / FOLDERS[0] / FILE}\n  from {PAGE}")
    try:
        document = parse(path.read_bytes(), path)
        check(document, {part: [[str]] for part in PARTS}, "")
        pairs = {part: [(sentence, intent) for sentence, intent in document[part]] for part in PARTS}
    except (OSError, ValueError, StorageError) as error:
        raise DataError(f"{path} is not CLINC150's file ({error}): fetch it again from {PAGE}.") from error
    intents = tuple(sorted({intent for _, intent in pairs["train"]}))
    places = {intent: place for place, intent in enumerate(intents)}
    found = {}
    for part, given in pairs.items():
        outside = part.startswith("oos")
        unknown = sorted({intent for _, intent in given if intent not in places})
        if unknown and not outside:
            raise DataError(f"{path}: {part} has intents that train does not have: {', '.join(unknown[:3])}.")
        labels = tuple(-1 if outside else places[intent] for _, intent in given)
        found[part] = Requests(tuple(sentence for sentence, _ in given), labels)
    return intents, found
