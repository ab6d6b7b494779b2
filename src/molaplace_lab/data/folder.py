"""ImageNet and ImageNet-C as folders of image files, decoded batch by batch.

ImageNet is expected in `imagenet/train` and `imagenet/val`, with a subfolder for each of the 1000 synsets. ImageNet-C is expected in
`imagenet-c/<corruption>/<severity>/<synset>`; the folders of its archives (blur, noise, ...) may precede `<corruption>`. Class numbers
follow the alphabetical order of the synsets, as in all published networks. If some of the 1000 synsets are missing, a file
`synsets.txt` next to `val` must list all names, one per line, in the order of their class numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from molaplace.errors import DataError
from molaplace.images import ImageFolder, Preparation, open_folder

CLASSES = 1000
CENTRE_224 = Preparation(resize=256, crop=224)
"""The paper's preprocessing: resize the shorter side to 256 pixels, and crop the central 224 x 224 pixels."""
SYNSETS = "synsets.txt"
FOLDERS = ("imagenet", "ImageNet", "ILSVRC2012", "")
FOLDERS_C = ("imagenet-c", "ImageNet-C", "imagenet_c", "Imagenet-C", "")


def open_imagenet(directory: Path, split: str = "val", *, prepare: Preparation = CENTRE_224) -> ImageFolder:
    """Open the images of an ImageNet split ("train" or "val"); raise `DataError` if they are not in the data directory."""
    for folder in (directory / name / split for name in FOLDERS):
        if folder.is_dir():
            return open_folder(folder, prepare, classes=_synsets(folder, (folder.parent, directory)))
    raise DataError(
        f"ImageNet ({split}) is not in {directory}. Provide:\n  {directory / FOLDERS[0] / split}/<synset>/*.JPEG\n"
        "  from https://image-net.org (registration required). Sort the validation images into synset folders."
    )


def imagenet_c_folder(corruption: str, severity: int, directory: Path) -> Path | None:
    """Return the folder of ImageNet-C images for a corruption and severity (1 to 5), or None if there is no such folder."""
    for root in (directory / name for name in FOLDERS_C):
        for folder in (root / corruption / str(severity), *sorted(root.glob(f"*/{corruption}/{severity}"))):
            if folder.is_dir():
                return folder
    return None


def _synsets(split: Path, parents: Sequence[Path]) -> tuple[str, ...]:
    present = tuple(sorted(path.name for path in split.iterdir() if path.is_dir() and not path.name.startswith(".")))
    if len(present) == CLASSES:
        return present
    for path in (folder / SYNSETS for folder in parents):
        if path.is_file():
            names = tuple(line.split()[0] for line in path.read_text().splitlines() if line.strip())
            if len(set(names)) != len(names):
                raise DataError(f"{path} lists a synset more than once in its {len(names)} lines.")
            return names
    raise DataError(
        f"{split} has {len(present)} subfolders; expected one for each of ImageNet's {CLASSES} synsets, which determine the class "
        f"numbers. Add the missing subfolders, or create a file {SYNSETS} in {parents[0]} that lists all {CLASSES} names in "
        f"the order of the class numbers."
    )
