"""Images as data: folders with a subfolder of images for each class, decoded batch by batch, and the preparation of pixels.

    folder = mola.images.open_folder("images/train", mola.images.Preparation(resize=256, crop=224))
    train_loader = folder.batches(64, mola.images.normalisation("imagenet"))
    posterior = mola.fit(networks, train_loader, val_loader)

Classes are numbered in alphabetical order of their subfolders. A class consists of all image files in its subfolder, at any depth,
sorted by path; links are followed. Pillow decodes the images, which are turned as their EXIF orientation says. A normalisation computes
(x / 255 - mean) / std for each channel. Out-of-distribution inputs are normalised like the network's training data, because a deployed
network cannot know where an input comes from.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from molaplace.errors import DataError, OptionError, importing
from molaplace.numerics import as_tensor
from molaplace.options import one_of

if TYPE_CHECKING:
    from PIL import Image

__all__ = [
    "NORMALISATIONS",
    "ImageFolder",
    "Images",
    "Normalisation",
    "Preparation",
    "even_indices",
    "image_files",
    "normalisation",
    "open_folder",
]

ENDINGS = frozenset({".jpg", ".jpeg", ".png", ".ppm", ".pgm", ".bmp", ".tif", ".tiff", ".webp"})
"""File extensions of images, in lower case; comparisons ignore case, because ImageNet's file names end in .JPEG."""

UNREAD = frozenset({".avif", ".gif", ".heic", ".heif", ".ico", ".jfif", ".jp2", ".jxl", ".svg"})
"""File extensions of images in other formats, which may be animated or need further packages. They are listed, but not decoded."""

ORIENTATION = 0x0112
"""EXIF tag of the orientation."""


@dataclass(frozen=True)
class Preparation:
    """A function that turns an image upright, and resizes and crops it to the size of a network's inputs.

    Images are turned as their EXIF orientation says, as transformers' pipelines do.

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

        image = in_bytes(upright(image)).convert(self.mode)
        width, height = image.size
        if isinstance(self.resize, tuple):
            height, width = self.resize
        elif self.resize is not None:
            # Round the longer side down, as torchvision does.
            shorter = min(width, height)
            width = self.resize * width // shorter
            height = self.resize * height // shorter
        if (width, height) != image.size:
            image = image.resize((width, height), Image.Resampling.BILINEAR)
        if self.crop is not None:
            left = _margin(image.width - self.crop)
            top = _margin(image.height - self.crop)
            # If the image is smaller than the crop, Pillow fills the rest with 0.
            image = image.crop((left, top, left + self.crop, top + self.crop))
        pixels = torch.from_numpy(np.array(image))
        return pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1)


def upright(image: Image.Image) -> Image.Image:
    """Return the image turned as its EXIF orientation says."""
    if image.getexif().get(ORIENTATION, 1) == 1:
        return image
    from PIL import ImageOps

    turned = ImageOps.exif_transpose(image)
    turned.format = image.format  # determines the range of the pixels
    return turned


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
        rows = as_tensor(indices).long()
        return replace(self, paths=tuple(self.paths[index] for index in rows.tolist()), labels=self.labels[rows])

    def evenly(self, count: int | None) -> ImageFolder:
        """Return at most `count` evenly spaced images (images are sorted by class), or all images if `count` is None."""
        return self if count is None or len(self) <= count else self.part(even_indices(len(self), count))

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
        read = partial(decode, prepare=self.folder.prepare)
        with ThreadPoolExecutor(self.workers) as pool:
            for rows in (slice(start, start + self.size) for start in range(0, len(self.folder), self.size)):
                images = list(pool.map(read, self.folder.paths[rows]))
                shapes = {tuple(image.shape) for image in images}
                if len(shapes) > 1:
                    raise DataError(
                        f"the images in the batch that starts with {self.folder.paths[rows][0]} have different shapes: "
                        f"{sorted(shapes)}. Resize and crop them with a Preparation."
                    )
                pixels = torch.stack(images)
                yield (pixels if self.normalise is None else self.normalise(pixels)), self.folder.labels[rows]


def image_files(folder: Path) -> list[Path]:
    """List all image files in a folder and its subfolders, sorted by path; hidden files and folders are excluded.

    Links are followed. The list contains images that cannot be decoded, such as broken links and those in the formats `UNREAD`.
    """
    return sorted(_image_files(folder, frozenset()))


def _image_files(folder: Path, above: frozenset[Path]) -> Iterator[Path]:
    real = folder.resolve()
    if real in above:  # a link to a folder that contains it
        return
    for entry in os.scandir(folder):
        path = folder / entry.name
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            yield from _image_files(path, above | {real})
        # A broken link without an extension may have been a folder.
        elif path.suffix.lower() in ENDINGS | UNREAD or (not path.suffix and entry.is_symlink() and not path.exists()):
            yield path


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
        DataError: the folder does not exist, contains no images, or has a broken link or a subfolder whose name is not in `classes`.
    """
    with importing("reading image files", "pillow", "cli"):
        import PIL.Image  # noqa: F401 - fail before a long computation reaches the first image
    root = Path(root)
    if not root.is_dir():
        raise DataError(f"{root} is not a folder. Expected a folder with a subfolder of images for each class.")
    subfolders = _subfolders(root)
    names = tuple(classes) if classes is not None else tuple(map(_class_name, subfolders)) or (root.name,)
    unknown = [name for name in map(_class_name, subfolders) if name not in names]
    if unknown:
        raise DataError(
            f"{root} contains the subfolder {unknown[0]!r}, which is not one of the {len(names)} classes ({names[0]}, ...)."
        )
    if classes is not None and not subfolders:
        raise DataError(
            f"{root} has no subfolders, so its images have no labels. Put the images of each class in a separate subfolder."
        )
    number = {name: index for index, name in enumerate(names)}
    above = frozenset({root.resolve()})
    listed = [
        (path, number[_class_name(folder)]) for folder in subfolders for path in sorted(_image_files(folder, above))
    ]
    if not subfolders:
        listed = [(path, 0) for path in image_files(root)]
    if not listed:
        raise DataError(f"{root} contains no images. Expected files whose names end in {', '.join(sorted(ENDINGS))}.")
    labels = torch.tensor([label for _, label in listed], device="cpu")
    return ImageFolder(tuple(path for path, _ in listed), labels, names, prepare or Preparation())


def _class_name(folder: Path) -> str:
    # A name that is not valid UTF-8 can be neither stored nor printed, so its bytes are escaped.
    return os.fsencode(folder.name).decode(errors="backslashreplace")


def _subfolders(folder: Path) -> list[Path]:
    broken = [path for path in folder.iterdir() if path.is_symlink() and not path.suffix and not path.exists()]
    if broken:
        raise DataError(
            f"{min(broken)} is a link to {min(broken).readlink()}, which does not exist. Remove or repair it."
        )
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def decode(path: Path, prepare: Preparation) -> Tensor:
    """Return the prepared pixels of an image file, or raise `DataError`."""
    from PIL import Image

    if not path.is_file():
        raise DataError("is not a file" if path.exists() else "does not exist", place=str(path))
    if path.suffix.lower() in UNREAD:
        raise DataError(f"has the format {path.suffix}, which is not read; convert it to .png", place=str(path))
    try:
        with Image.open(path) as image:
            return prepare(image)
    # Pillow's decoders raise many kinds of error on damaged files: struct.error, IndexError, MemoryError, ...
    except Exception as error:
        reason = str(error) or type(error).__name__
        raise DataError(f"cannot be decoded ({path.stat().st_size:,} bytes): {reason}", place=str(path)) from error


@dataclass(frozen=True)
class Images:
    """Labelled images: pixels (n, channels, height, width) as uint8 and class indices (n,) as int64."""

    pixels: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        fits = self.pixels.ndim == 4 and self.labels.ndim == 1 and len(self.pixels) == len(self.labels)
        if not fits or self.pixels.dtype != torch.uint8 or self.labels.dtype != torch.int64:
            raise DataError(
                "expected pixels of shape (n, channels, height, width) in uint8 and labels of shape (n,) in int64; got "
                f"{tuple(self.pixels.shape)} in {self.pixels.dtype} and {tuple(self.labels.shape)} in {self.labels.dtype}."
            )

    def __len__(self) -> int:
        return len(self.labels)

    def part(self, indices: Tensor | Sequence[int] | slice) -> Images:
        """Return the images with the given indices, in the given order."""
        if not isinstance(indices, slice | Tensor):
            indices = torch.tensor(indices, dtype=torch.int64, device="cpu")
        return Images(self.pixels[indices], self.labels[indices])

    def evenly(self, count: int | None) -> Images:
        """Return at most `count` evenly spaced images (files may be sorted by class), or all images if `count` is None."""
        return self if count is None or len(self) <= count else self.part(even_indices(len(self), count))


def even_indices(total: int, count: int) -> Tensor:
    """Return `count` of `total` indices, evenly spaced from the first to the last."""
    # Use integers, so that the choice does not depend on the default floating-point type.
    return torch.arange(count, device="cpu") * (total - 1) // max(count - 1, 1)


@dataclass(frozen=True)
class Normalisation:
    """Means and standard deviations of pixels scaled to [0, 1], given either for each channel or for all channels together."""

    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        if not self.mean or len(self.mean) != len(self.std):
            raise OptionError(
                f"expected as many means as standard deviations; got {len(self.mean)} and {len(self.std)}."
            )
        if not all(map(math.isfinite, self.mean)):
            raise OptionError(f"must be finite, got {', '.join(map(str, self.mean))}.", argument="mean")
        if not all(0 < value < math.inf for value in self.std):
            raise OptionError(f"must be finite and above 0, got {', '.join(map(str, self.std))}.", argument="std")

    def __call__(self, pixels: Tensor) -> Tensor:
        """Return (x / 255 - mean) / std as float32."""
        if len(self.mean) not in (1, pixels.shape[-3]):
            raise DataError(
                f"this normalisation is for {len(self.mean)} channels; got pixels of shape {tuple(pixels.shape)}."
            )
        mean, std = (
            torch.tensor(values, dtype=torch.float32, device=pixels.device).view(-1, 1, 1)
            for values in (self.mean, self.std)
        )
        # Divide by 255 first, as is usual, because a different order would change the last bits of a network's inputs.
        return pixels.to(torch.float32, copy=True).div_(255).sub_(mean).div_(std)


NORMALISATIONS: Mapping[str, Normalisation] = MappingProxyType(
    {
        # x / 255, as used in the paper for MNIST and its outliers
        "none": Normalisation(),
        # as in the paper
        "cifar10": Normalisation((125.3 / 255, 123 / 255, 113.9 / 255), (63 / 255, 62.1 / 255, 66.7 / 255)),
        "imagenet": Normalisation((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    }
)


def normalisation(name: str) -> Normalisation:
    """Return the normalisation with the given name; raise `OptionError` if the name is unknown."""
    return NORMALISATIONS[one_of(name, NORMALISATIONS, "normalise")]
