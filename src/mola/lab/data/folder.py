"""Folders of image files, decoded batch by batch: ImageNet, ImageNet-C and a user's own.

The subfolders of a folder are its classes, numbered in the order of their names; the images of a class are all that lie in
its subfolder, at any depth, in the order of their paths. Pillow decodes them.

ImageNet lies in `imagenet/train` and `imagenet/val`, with a subfolder for each of the 1000 synsets; ImageNet-C in
`imagenet-c/<corruption>/<severity>/<synset>`, with or without the folders of its archives (blur, noise, ...) in between. The
number of a class is the place of its synset in alphabetical order, as for all published networks. Where not all 1000 are
there, a file `synsets.txt` beside `val`, one name on each line, says which number they have.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from mola.errors import DataError, MissingExtraError, OptionError
from mola.lab.data.images import Images, Normalisation, even_places

if TYPE_CHECKING:
    from PIL import Image

ENDINGS = frozenset({".jpg", ".jpeg", ".png", ".ppm", ".pgm", ".bmp", ".tif", ".tiff", ".webp"})
"""In any case: ImageNet's end in .JPEG."""


@dataclass(frozen=True)
class Preparation:
    """How an image is brought to the size that a network takes.

    Attributes:
        resize: the length of the shorter side, keeping proportions; or (height, width), distorting; None leaves it alone.
            Bilinear over all the pixels that shrink into one, as Pillow and torchvision do.
        crop: the side of the square cut out of the middle afterwards; None leaves it whole.
        mode: Pillow's name of the colours: "RGB" or "L" for grey.
    """

    resize: int | tuple[int, int] | None = None
    crop: int | None = None
    mode: str = "RGB"

    def __call__(self, image: Image.Image) -> Tensor:
        """Bytes (channels, height, width)."""
        image = in_bytes(image).convert(self.mode)
        if self.resize is not None:
            from PIL import Image

            image = image.resize(self._size(image.width, image.height), Image.Resampling.BILINEAR)
        if self.crop is not None:
            left, top = (_margin(side - self.crop) for side in image.size)
            # Beyond the border of a smaller image, Pillow fills with 0.
            image = image.crop((left, top, left + self.crop, top + self.crop))
        pixels = torch.from_numpy(np.array(image))
        return pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1)

    def _size(self, width: int, height: int) -> tuple[int, int]:
        if isinstance(self.resize, tuple):
            return self.resize[1], self.resize[0]
        shorter = self.resize or min(width, height)
        # The longer side is rounded down, as torchvision does.
        return (shorter, shorter * height // width) if width <= height else (shorter * width // height, shorter)


def in_bytes(image: Image.Image) -> Image.Image:
    """The same image with 8 bits a pixel: Pillow's own conversion would make white of whatever is above 255."""
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):  # 16 bits
        from PIL import Image

        return Image.fromarray((np.asarray(image).astype(np.uint32) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError(f"its pixels are of mode {image.mode}, whose range is unknown: save it with 8 or 16 bits")
    return image


def _margin(spare: int) -> int:
    # What is cut off in front, as torchvision rounds it; negative where something is added.
    return round(spare / 2) if spare >= 0 else -(-spare // 2)


@dataclass(frozen=True)
class ImageFolder:
    """Image files with their labels; nothing is decoded before it is asked for.

    Attributes:
        paths: of the files.
        labels: their classes, (n,) in int64.
        classes: the classes' names.
        prepare: from a decoded image to pixels.
    """

    paths: tuple[Path, ...]
    labels: Tensor
    classes: tuple[str, ...]
    prepare: Preparation = field(default_factory=Preparation)

    def __len__(self) -> int:
        return len(self.paths)

    def prepared(self, prepare: Preparation) -> ImageFolder:
        """The same files, to be brought to another size."""
        return replace(self, prepare=prepare)

    def part(self, indices: Tensor | Sequence[int]) -> ImageFolder:
        """The images at these places, in this order."""
        places = torch.as_tensor(indices).long()
        return replace(self, paths=tuple(self.paths[index] for index in places.tolist()), labels=self.labels[places])

    def evenly(self, count: int) -> ImageFolder:
        """At most `count` of them, evenly spaced from the first to the last: they are in order of classes."""
        return self if len(self) <= count else self.part(even_places(len(self), count))

    def batches(self, size: int = 64, normalise: Normalisation | None = None, workers: int = 0) -> FolderBatches:
        """The images in their order as a loader for `mola.fit`, `tune` and `predict`.

        Args:
            size: images in a batch; no more than two batches are in memory.
            normalise: makes network inputs from bytes; without it, batches are bytes.
            workers: threads that decode ahead of the reader; 0 decodes when a batch is asked for.

        Returns:
            An iterable of (pixels or inputs, labels) that can be read again and again.
        """
        if size < 1 or workers < 0:
            raise OptionError(f"size must be at least 1 and workers at least 0, got {size} and {workers}.")
        return FolderBatches(self, size, normalise, workers)

    def load(self, workers: int = 0) -> Images:
        """All of them in memory."""
        batches = list(self.batches(256, workers=workers))
        return Images(torch.cat([pixels for pixels, _ in batches]), self.labels)


@dataclass(frozen=True)
class FolderBatches:
    """An image folder's images, batch by batch; see `ImageFolder.batches`."""

    folder: ImageFolder
    size: int
    normalise: Normalisation | None
    workers: int

    def __len__(self) -> int:
        return -(-len(self.folder) // self.size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        starts = range(0, len(self.folder), self.size)
        if self.workers == 0:
            for start in starts:
                paths = self.folder.paths[start : start + self.size]
                yield self._batch(start, [_decode(path, self.folder.prepare) for path in paths])
            return
        with ThreadPoolExecutor(self.workers) as pool:

            def ask(start: int) -> list[Any]:
                paths = self.folder.paths[start : start + self.size]
                return [pool.submit(_decode, path, self.folder.prepare) for path in paths]

            ahead = ask(0)
            try:
                for start in starts:
                    current = ahead
                    ahead = ask(start + self.size)
                    yield self._batch(start, [future.result() for future in current])
            finally:
                for future in ahead:
                    future.cancel()

    def _batch(self, start: int, images: list[Tensor]) -> tuple[Tensor, Tensor]:
        shapes = {tuple(image.shape) for image in images}
        if len(shapes) > 1:
            raise DataError(
                f"images from {self.folder.paths[start]} on have the shapes {sorted(shapes)}: resize and crop them to one "
                "with a Preparation."
            )
        pixels = torch.stack(images)
        labels = self.folder.labels[start : start + self.size]
        return (pixels if self.normalise is None else self.normalise(pixels)), labels


def image_files(folder: Path) -> list[Path]:
    """The image files in a folder at any depth, in the order of their paths; hidden files are none."""
    found = (path for path in folder.rglob("*") if path.suffix.lower() in ENDINGS and not path.name.startswith("."))
    return sorted(path for path in found if path.is_file())


def open_folder(
    root: Path | str,
    prepare: Preparation | None = None,
    *,
    classes: Sequence[str] | None = None,
    without: frozenset[str] = frozenset(),
) -> ImageFolder:
    """List a folder of images; a folder without subfolders is one class.

    Args:
        root: the folder.
        prepare: how images are brought to one size.
        classes: the names of all classes in the order of their numbers, where not all of them have a subfolder here.
        without: names of files to pass over.

    Returns:
        The images, none of them decoded yet.
    """
    try:
        import PIL.Image  # noqa: F401 - here, before a long computation gets as far as the first image
    except ImportError as error:
        raise MissingExtraError(feature="reading image files", package="pillow", extra="bench") from error
    root = Path(root)
    if not root.is_dir():
        raise DataError(f"{root} is not a folder: expected one with a subfolder of images for each class.")
    subfolders = sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    names = tuple(classes) if classes is not None else tuple(path.name for path in subfolders) or (root.name,)
    unknown = [path.name for path in subfolders if path.name not in names]
    if unknown:
        raise DataError(
            f"{root} has the subfolder {unknown[0]}, which is none of the {len(names)} classes ({names[0]}, ...)."
        )
    number = {name: index for index, name in enumerate(names)}
    listed = [(path, number[folder.name]) for folder in subfolders for path in image_files(folder)]
    if not subfolders and classes is None:
        listed = [(path, 0) for path in image_files(root)]
    listed = [(path, label) for path, label in listed if path.name not in without]
    if not listed:
        raise DataError(f"{root} holds no images: expected files that end in {', '.join(sorted(ENDINGS))}.")
    labels = torch.tensor([label for _, label in listed])
    return ImageFolder(tuple(path for path, _ in listed), labels, names, prepare or Preparation())


def _decode(path: Path, prepare: Preparation) -> Tensor:
    from PIL import Image

    try:
        with Image.open(path) as image:
            return prepare(image)
    # Pillow's decoders raise any of these for files that are cut off or no images.
    except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError) as error:
        size = path.stat().st_size if path.exists() else 0
        raise DataError(
            f"{path} ({size:,} bytes) cannot be decoded: {error}. Fetch it again, or take it out of the folder."
        ) from error


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
    """
    if split not in ("train", "val", "test"):
        raise OptionError(f"ImageNet has the splits train and val, got {split!r}.")
    name = "train" if split == "train" else "val"
    for place in PLACES:
        folder = directory / place / name
        if folder.is_dir():
            return open_folder(folder, prepare, classes=synsets or _synsets(folder, (folder.parent, directory)))
    raise DataError(
        f"ImageNet ({name}) is not in {directory}. Put there:\n  {directory / PLACES[0] / name}/<synset>/*.JPEG\n"
        "  from https://image-net.org, which asks for registration; the validation images sorted into synset folders."
    )


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
    """
    if severity not in range(1, 6):
        raise OptionError(f"severity must be 1 to 5, got {severity}.")
    roots = [directory / place for place in PLACES_C if (directory / place).is_dir()]
    for root in roots:
        for folder in (root / corruption / str(severity), *sorted(root.glob(f"*/{corruption}/{severity}"))):
            if folder.is_dir():
                beside = (root, *(directory / place for place in PLACES))
                return open_folder(folder, prepare, classes=synsets or _synsets(folder, beside))
    raise DataError(
        f"ImageNet-C's {corruption} at severity {severity} is not in {directory}. Put there:\n"
        f"  {directory / PLACES_C[0] / corruption / str(severity)}/<synset>/*.JPEG\n"
        "  from https://zenodo.org/records/2235448"
    )


def _synsets(folder: Path, beside: Sequence[Path]) -> tuple[str, ...]:
    present = tuple(sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")))
    if len(present) == CLASSES:
        return present
    for place in beside:
        if (place / SYNSETS).is_file():
            names = tuple(line.split()[0] for line in (place / SYNSETS).read_text().splitlines() if line.strip())
            if len(set(names)) != len(names):
                raise DataError(f"{place / SYNSETS} names a synset twice among its {len(names)} lines.")
            return names
    if len(present) > CLASSES:
        raise DataError(
            f"{folder} has {len(present)} subfolders, where ImageNet has {CLASSES} synsets: take out what is not one of them."
        )
    raise DataError(
        f"{folder} has {len(present)} of {CLASSES} synset folders, so the classes' numbers are not known: complete it, or "
        f"put a file {SYNSETS} with the {CLASSES} names in the order of their numbers into {beside[0]}."
    )
