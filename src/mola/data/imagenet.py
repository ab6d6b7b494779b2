"""ImageNet and ImageNet-C as folders: too large for memory, read batch by batch.

ImageNet lies in `imagenet/train` and `imagenet/val`, with a subfolder for each of the 1000 synsets; ImageNet-C in
`imagenet-c/<corruption>/<severity>/<synset>`, with or without the folders of its archives (blur, noise, ...) in between. The
number of a class is the place of its synset in alphabetical order, as for all published networks. Where not all 1000 are
there, a file `synsets.txt` beside `val`, one name on each line, says which number they have.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mola.data.folder import ImageFolder, Preparation, open_folder
from mola.errors import DataError, OptionError

__all__ = ["CENTRE_224", "CLASSES", "SYNSETS", "open_imagenet", "open_imagenet_c"]

CLASSES = 1000
CENTRE_224 = Preparation(resize=256, crop=224)
"""As the paper: the shorter side to 256 pixels, then the middle 224 x 224."""
SYNSETS = "synsets.txt"
PLACES = ("imagenet", "ImageNet", "ILSVRC2012", "")
PLACES_C = ("imagenet-c", "ImageNet-C", "imagenet_c", "Imagenet-C", "")


def open_imagenet(
    directory: Path, split: str = "val", *, prepare: Preparation = CENTRE_224, synsets: Sequence[str] | None = None
) -> ImageFolder:
    """ImageNet's images of a split.

    Args:
        directory: the data directory.
        split: "val" or "train"; "test" means "val", since the real test set has no labels.
        prepare: how images are brought to one size.
        synsets: the names of all classes in the order of their numbers, instead of a file or all the folders.

    Returns:
        The images, decoded when they are asked for.

    Raises:
        OptionError: if the split is another.
        DataError: if they are not there, or the classes' numbers are unknown.
    """
    if split not in ("train", "val", "test"):
        message = f"ImageNet has the splits train and val, got {split!r}."
        raise OptionError(message)
    name = "train" if split == "train" else "val"
    for place in PLACES:
        folder = directory / place / name
        if folder.is_dir():
            return open_folder(folder, prepare, classes=synsets or _synsets(folder, (folder.parent, directory)))
    message = (
        f"ImageNet ({name}) is not in {directory}. Put there:\n  {directory / PLACES[0] / name}/<synset>/*.JPEG\n"
        "  from https://image-net.org, which asks for registration; the validation images sorted into synset folders."
    )
    raise DataError(message)


def open_imagenet_c(
    corruption: str,
    severity: int,
    directory: Path,
    *,
    prepare: Preparation = CENTRE_224,
    synsets: Sequence[str] | None = None,
) -> ImageFolder:
    """ImageNet-C's images of one corruption at one severity.

    Args:
        corruption: such as "gaussian_noise".
        severity: 1 to 5.
        directory: the data directory.
        prepare: how images are brought to one size.
        synsets: the names of all classes in the order of their numbers, instead of a file or all the folders.

    Returns:
        The images, decoded when they are asked for.

    Raises:
        OptionError: if the severity is another.
        DataError: if they are not there, or the classes' numbers are unknown.
    """
    if severity not in range(1, 6):
        message = f"severity must be 1 to 5, got {severity}."
        raise OptionError(message)
    roots = [directory / place for place in PLACES_C if (directory / place).is_dir()]
    for root in roots:
        for folder in (root / corruption / str(severity), *sorted(root.glob(f"*/{corruption}/{severity}"))):
            if folder.is_dir():
                beside = (root, *(directory / place for place in PLACES))
                return open_folder(folder, prepare, classes=synsets or _synsets(folder, beside))
    message = (
        f"ImageNet-C's {corruption} at severity {severity} is not in {directory}. Put there:\n"
        f"  {directory / PLACES_C[0] / corruption / str(severity)}/<synset>/*.JPEG\n"
        "  from https://zenodo.org/records/2235448"
    )
    raise DataError(message)


def _synsets(folder: Path, beside: Sequence[Path]) -> tuple[str, ...]:
    """The names of all classes in the order of their numbers.

    Raises:
        DataError: if some are missing and no file names them.
    """
    present = tuple(sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")))
    if len(present) == CLASSES:
        return present
    for place in beside:
        if (place / SYNSETS).is_file():
            names = tuple(line.split()[0] for line in (place / SYNSETS).read_text().splitlines() if line.strip())
            if len(set(names)) != len(names):
                message = f"{place / SYNSETS} names a synset twice among its {len(names)} lines."
                raise DataError(message)
            return names
    message = (
        f"{folder} has {len(present)} of {CLASSES} synset folders, so the classes' numbers are not known: complete it, or "
        f"put a file {SYNSETS} with the {CLASSES} names in the order of their numbers into {beside[0]}."
    )
    raise DataError(message)
