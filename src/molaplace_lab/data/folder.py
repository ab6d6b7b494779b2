"""Folders of image files, decoded batch by batch: ImageNet, ImageNet-C and the user's folders.

Each subfolder is a class; classes are numbered in alphabetical order. A class consists of all image files in its subfolder, at any
depth, sorted by path. Pillow decodes the images.

ImageNet is expected in `imagenet/train` and `imagenet/val`, with a subfolder for each of the 1000 synsets. ImageNet-C is expected in
`imagenet-c/<corruption>/<severity>/<synset>`; the folders of its archives (blur, noise, ...) may precede `<corruption>`. Class numbers
follow the alphabetical order of the synsets, as in all published networks. If some of the 1000 synsets are missing, a file
`synsets.txt` next to `val` must list all names, one per line, in the order of their class numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from molaplace.errors import DataError, importing
from molaplace_lab.data.images import Images, Normalisation, even_places

if TYPE_CHECKING:
    from PIL import Image

ENDINGS = frozenset({".jpg", ".jpeg", ".png", ".ppm", ".pgm", ".bmp", ".tif", ".tiff", ".webp"})
"""File extensions of images, in lower case; comparisons ignore case, because ImageNet's file names end in .JPEG."""


@dataclass(frozen=True)
class Preparation:
    """A function that resizes and crops an image to the size of a network's inputs.

    Attributes:
        resize: new length of the shorter side (preserving the aspect ratio) or new (height, width); if None, the image is not
            resized. Resizing is bilinear with antialiasing, as in Pillow and torchvision.
        crop: side of the central square to which the resized image is cropped; if None, the image is not cropped.
        mode: Pillow's colour mode: "RGB" for colour or "L" for grey.
    """

    resize: int | tuple[int, int] | None = None
    crop: int | None = None
    mode: str = "RGB"

    def __call__(self, image: Image.Image) -> Tensor:
        """Return the resized and cropped pixels as uint8 of shape (channels, height, width)."""
        from PIL import Image

        image = in_bytes(image).convert(self.mode)
        width, height = image.size
        if isinstance(self.resize, tuple):
            height, width = self.resize
        elif self.resize is not None:
            # Round the longer side down, as torchvision does.
            shorter = min(width, height)
            width, height = self.resize * width // shorter, self.resize * height // shorter
        if (width, height) != image.size:
            image = image.resize((width, height), Image.Resampling.BILINEAR)
        if self.crop is not None:
            left, top = (_margin(side - self.crop) for side in image.size)
            # If the image is smaller than the crop, Pillow fills the rest with 0.
            image = image.crop((left, top, left + self.crop, top + self.crop))
        pixels = torch.from_numpy(np.array(image))
        return pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1)


def in_bytes(image: Image.Image) -> Image.Image:
    """Return the image with 8 bits per channel; Pillow's own conversion of 16-bit images would clip values at 255."""
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):  # 16 bits
        from PIL import Image

        return Image.fromarray((np.asarray(image).astype(np.uint32) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError(
            f"its pixels have the mode {image.mode}, whose range is unknown; save the image with 8 or 16 bits per channel"
        )
    return image


def _margin(spare: int) -> int:
    # Return the number of pixels to remove at the start of an axis, rounded as in torchvision; negative if pixels are added.
    return round(spare / 2) if spare >= 0 else -(-spare // 2)


@dataclass(frozen=True)
class ImageFolder:
    """Image files and their labels; images are decoded when they are read."""

    paths: tuple[Path, ...]
    labels: Tensor
    """Class indices (n,) as int64."""
    classes: tuple[str, ...]
    """Names of the classes."""
    prepare: Preparation = field(default_factory=Preparation)
    """Function that turns a decoded image into pixels."""

    def __len__(self) -> int:
        return len(self.paths)

    def part(self, indices: Tensor | Sequence[int]) -> ImageFolder:
        """Return the images with the given indices, in the given order."""
        places = torch.as_tensor(indices).long()
        return replace(self, paths=tuple(self.paths[index] for index in places.tolist()), labels=self.labels[places])

    def evenly(self, count: int | None) -> ImageFolder:
        """Return at most `count` evenly spaced images (images are sorted by class), or all images if `count` is None."""
        return self if count is None or len(self) <= count else self.part(even_places(len(self), count))

    def batches(self, size: int = 64, normalise: Normalisation | None = None, workers: int = 1) -> FolderBatches:
        """Return a loader that yields the images in order, for use with `mola.fit`, `tune` and `predict`.

        Args:
            size: number of images in a batch; only one batch is in memory at a time.
            normalise: function that turns uint8 pixels into network inputs; by default, the loader yields the pixels themselves.
            workers: number of threads that decode the images of a batch.
        """
        return FolderBatches(self, size, normalise, workers)

    def load(self) -> Images:
        """Read all images into memory."""
        return Images(torch.cat([pixels for pixels, _ in self.batches(256)]), self.labels)


@dataclass(frozen=True)
class FolderBatches:
    """A loader that can iterate over an image folder repeatedly; see `ImageFolder.batches`."""

    folder: ImageFolder
    size: int
    normalise: Normalisation | None
    workers: int

    def __len__(self) -> int:
        return -(-len(self.folder) // self.size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        decode = partial(_decode, prepare=self.folder.prepare)
        with ThreadPoolExecutor(self.workers) as pool:
            for rows in (slice(start, start + self.size) for start in range(0, len(self.folder), self.size)):
                images = list(pool.map(decode, self.folder.paths[rows]))
                shapes = {tuple(image.shape) for image in images}
                if len(shapes) > 1:
                    raise DataError(
                        f"the images in the batch that starts with {self.folder.paths[rows][0]} have different shapes: "
                        f"{sorted(shapes)}. Resize and crop them with a Preparation."
                    )
                pixels = torch.stack(images)
                yield (pixels if self.normalise is None else self.normalise(pixels)), self.folder.labels[rows]


def image_files(folder: Path) -> list[Path]:
    """List all image files in a folder and its subfolders, sorted by path; hidden files are excluded."""
    found = (path for path in folder.rglob("*") if path.suffix.lower() in ENDINGS and not path.name.startswith("."))
    return sorted(path for path in found if path.is_file())


def open_folder(
    root: Path | str,
    prepare: Preparation | None = None,
    *,
    classes: Sequence[str] | None = None,
) -> ImageFolder:
    """Open a folder of images with one subfolder for each class; a folder without subfolders forms a single class.

    Args:
        root: the folder.
        prepare: function that resizes images to a common size.
        classes: names of all classes, in the order of the class numbers; required if some classes have no subfolder.

    Raises:
        DataError: the folder does not exist, contains no images, or has a subfolder whose name is not in `classes`.
    """
    with importing("reading image files", "pillow", "bench"):
        import PIL.Image  # noqa: F401 - fail before a long computation reaches the first image
    root = Path(root)
    if not root.is_dir():
        raise DataError(f"{root} is not a folder. Expected a folder with a subfolder of images for each class.")
    subfolders = _subfolders(root)
    names = tuple(classes) if classes is not None else tuple(path.name for path in subfolders) or (root.name,)
    unknown = [path.name for path in subfolders if path.name not in names]
    if unknown:
        raise DataError(
            f"{root} contains the subfolder {unknown[0]}, which is not one of the {len(names)} classes ({names[0]}, ...)."
        )
    number = {name: index for index, name in enumerate(names)}
    listed = [(path, number[folder.name]) for folder in subfolders for path in image_files(folder)]
    if not subfolders and classes is None:
        listed = [(path, 0) for path in image_files(root)]
    if not listed:
        raise DataError(f"{root} contains no images. Expected files whose names end in {', '.join(sorted(ENDINGS))}.")
    labels = torch.tensor([label for _, label in listed])
    return ImageFolder(tuple(path for path, _ in listed), labels, names, prepare or Preparation())


def _subfolders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _decode(path: Path, prepare: Preparation) -> Tensor:
    from PIL import Image

    try:
        with Image.open(path) as image:
            return prepare(image)
    # Pillow's decoders may raise any of these exceptions for truncated files and for files that are not images.
    except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError) as error:
        size = path.stat().st_size if path.exists() else 0
        raise DataError(
            f"{path} ({size:,} bytes) cannot be decoded: {error}. Replace it, or remove it from the folder."
        ) from error


CLASSES = 1000
CENTRE_224 = Preparation(resize=256, crop=224)
"""The paper's preprocessing: resize the shorter side to 256 pixels, and crop the central 224 x 224 pixels."""
SYNSETS = "synsets.txt"
PLACES = ("imagenet", "ImageNet", "ILSVRC2012", "")
PLACES_C = ("imagenet-c", "ImageNet-C", "imagenet_c", "Imagenet-C", "")


def open_imagenet(directory: Path, split: str = "val", *, prepare: Preparation = CENTRE_224) -> ImageFolder:
    """Open the images of an ImageNet split ("train" or "val"); raise `DataError` if they are not in the data directory."""
    for folder in (directory / place / split for place in PLACES):
        if folder.is_dir():
            return open_folder(folder, prepare, classes=_synsets(folder, (folder.parent, directory)))
    raise DataError(
        f"ImageNet ({split}) is not in {directory}. Provide:\n  {directory / PLACES[0] / split}/<synset>/*.JPEG\n"
        "  from https://image-net.org (registration required). Sort the validation images into synset folders."
    )


def imagenet_c_folder(corruption: str, severity: int, directory: Path) -> Path | None:
    """Return the folder of ImageNet-C images for a corruption and severity (1 to 5), or None if there is no such folder."""
    for root in (directory / place for place in PLACES_C):
        for folder in (root / corruption / str(severity), *sorted(root.glob(f"*/{corruption}/{severity}"))):
            if folder.is_dir():
                return folder
    return None


def _synsets(folder: Path, beside: Sequence[Path]) -> tuple[str, ...]:
    present = tuple(path.name for path in _subfolders(folder))
    if len(present) == CLASSES:
        return present
    for path in (place / SYNSETS for place in beside):
        if path.is_file():
            names = tuple(line.split()[0] for line in path.read_text().splitlines() if line.strip())
            if len(set(names)) != len(names):
                raise DataError(f"{path} lists a synset more than once in its {len(names)} lines.")
            return names
    raise DataError(
        f"{folder} has {len(present)} subfolders; expected one for each of ImageNet's {CLASSES} synsets, which determine the class "
        f"numbers. Add the missing subfolders, or create a file {SYNSETS} in {beside[0]} that lists all {CLASSES} names in "
        f"the order of the class numbers."
    )
