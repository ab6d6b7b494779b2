"""Pictures: decoded from whatever a user drops, and brought to the size and colours that the networks see.

Files come from anywhere: nothing is decoded before its size is known, and only by the decoders named here, since some others of
Pillow's start programs.
"""

from __future__ import annotations

import base64
import binascii
import io
import threading
import warnings
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mola.app.jobs.preparation import Intake
from mola.errors import DataError, MissingExtraError, OptionError
from mola.lab.data.folder import Preparation, in_bytes

try:
    from PIL import Image, ImageOps, UnidentifiedImageError
except ImportError as error:
    raise MissingExtraError(feature="the explorer", package="pillow", extra="explore") from error

LARGEST_FILE = 10 * 2**20
"""Bytes."""

LARGEST_PIXELS = 40_000_000
"""A large photograph; a small file can claim to hold a thousand times more."""

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")

NAME_SHOWN = 60
"""Letters of a file's name that a message repeats."""

_opening = threading.Lock()
"""Filters of warnings are shared by all threads."""


@dataclass(frozen=True)
class Picture:
    """A decoded image of 8 bits a channel, without transparency, and what was done to it on the way."""

    image: Image.Image
    notes: tuple[str, ...] = ()


def from_data_url(text: str, name: str = "the picture") -> bytes:
    """The bytes in a `data:` address, as browsers make them.

    Args:
        text: `data:image/png;base64,...`.
        name: of the file, for messages.

    Returns:
        The bytes.
    """
    shown = _shown(name)
    if len(text) > LARGEST_FILE * 4 // 3 + 200:
        raise DataError(too_large(name))
    heading, comma, body = text.partition(",")
    if not comma or not heading.startswith("data:") or not heading.endswith(";base64"):
        raise DataError(f"{shown} did not arrive whole: drop it once more.")
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise DataError(f"{shown} did not arrive whole: drop it once more.") from error


def decode(data: bytes, name: str = "the picture") -> Picture:
    """Decode a file's bytes.

    Args:
        data: the whole file.
        name: of the file, for messages.

    Returns:
        The picture: the first frame, upright, transparent parts filled with white, 8 bits a channel.
    """
    shown = _shown(name)
    if not data:
        raise DataError(f"{shown} is empty: expected an image ({_formats()}).")
    if len(data) > LARGEST_FILE:
        raise DataError(too_large(name))
    try:
        with _opening, warnings.catch_warnings():
            # Pillow warns of sizes that are refused below, and of odd metadata.
            warnings.simplefilter("ignore")
            opened = Image.open(io.BytesIO(data), formats=FORMATS)
        width, height = opened.size
        if width * height > LARGEST_PIXELS:
            raise DataError(_too_many(shown, f"{width:,} x {height:,} pixels"))
        return _settled(opened)
    except DataError:
        raise
    except UnidentifiedImageError as error:
        raise DataError(f"{shown} is no image that can be read here: expected {_formats()}.") from error
    except Image.DecompressionBombError as error:
        raise DataError(_too_many(shown, "far more pixels than a photograph")) from error
    # Pillow's decoders raise whatever a damaged file leads to: struct.error, IndexError, SyntaxError, MemoryError, ...
    except Exception as error:
        reason = str(error) or type(error).__name__
        raise DataError(f"{shown} cannot be decoded: {reason}. Is the file whole?") from error


def _settled(opened: Image.Image) -> Picture:
    notes = []
    # Not how many: counting a TIFF's takes time with their square, and a small file can hold a million.
    if getattr(opened, "is_animated", False):
        opened.seek(0)
        notes.append("the first of its frames")
    if "16" in opened.mode or opened.mode == "I":
        notes.append("16 bits a pixel brought to 8")
    image = in_bytes(opened)
    if image is opened:
        image.load()
        image = ImageOps.exif_transpose(image)
    if image.has_transparency_data:
        clear = image.convert("RGBA")
        if clear.getchannel("A").getextrema()[0] != 255:
            notes.append("transparent parts filled with white")
        ground = Image.new("RGBA", clear.size, "white")
        image = Image.alpha_composite(ground, clear).convert("RGB")
    if image.mode not in ("L", "RGB"):
        image = image.convert("L" if image.mode in ("1", "LA") else "RGB")
    return Picture(image, tuple(notes))


def _shown(name: str) -> str:
    short = name if len(name) <= NAME_SHOWN else f"{name[: NAME_SHOWN - 10]}...{name[-7:]}"
    return "".join(letter if letter.isprintable() else "?" for letter in short) or "the picture"


def _formats() -> str:
    return f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]}"


def too_large(name: str) -> str:
    """That a file is too large, and what to do."""
    return f"{_shown(name)} is larger than {LARGEST_FILE // 2**20} MB: save it smaller, the networks see only a few pixels of it."


def _too_many(shown: str, found: str) -> str:
    return f"{shown} has {found}, more than {LARGEST_PIXELS // 10**6} million: save it smaller, the networks see only a few of them."


LARGEST_SIDE = 1024
"""Pixels: networks that see more would wait for every move of a slider."""


@dataclass(frozen=True)
class Sight:
    """How networks see pictures.

    Attributes:
        shape: channels, height and width.
        intake: how the training data were prepared.
    """

    shape: tuple[int, int, int]
    intake: Intake

    @classmethod
    def of(cls, shape: tuple[int, ...], intake: Intake) -> Sight:
        """The sight of networks that take inputs of this shape.

        Args:
            shape: of one input.
            intake: how the training data were prepared.

        Returns:
            The sight.
        """
        if len(shape) != 3 or shape[0] not in (1, 3) or not all(2 <= side <= LARGEST_SIDE for side in shape[1:]):
            raise OptionError(
                f"the explorer is for networks that see pictures, of 1 or 3 channels and 2 to {LARGEST_SIDE} pixels a side: inputs "
                f"(channels, height, width). These take inputs of shape {tuple(shape)}; `mola predict` predicts for them."
            )
        return cls((shape[0], shape[1], shape[2]), intake)

    @property
    def mode(self) -> str:
        """Pillow's name of the colours."""
        return "L" if self.shape[0] == 1 else "RGB"

    def fit(self, image: Image.Image) -> tuple[Tensor, str]:
        """Bring a picture to the networks' size.

        The training data's own preparation comes first. What still has another size is cut to the networks' proportions about
        its middle, and resized.

        Args:
            image: decoded, without transparency.

        Returns:
            Bytes (channels, height, width), and a word on what was done.
        """
        height, width = self.shape[1:]
        given = f"{image.width} x {image.height} pixels"
        own = Preparation(self.intake.resize, self.intake.crop, self.mode)
        pixels = own(image)
        if tuple(pixels.shape) != self.shape:
            # The largest part of the middle that has the right proportions.
            across = min(image.width, max(1, round(image.height * width / height)))
            down = min(image.height, max(1, round(image.width * height / width)))
            left, top = (image.width - across) // 2, (image.height - down) // 2
            cut = image.crop((left, top, left + across, top + down))
            pixels = Preparation((height, width), None, self.mode)(cut)
        done = [] if (image.width, image.height) == (width, height) else [f"{given} brought to {width} x {height}"]
        if self.mode == "L" and image.mode != "L" and not _is_grey(image):
            done.append("colours turned to grey")
        return pixels, ", ".join(done)

    def inputs(self, values: Tensor) -> Tensor:
        """What the networks are given: values (n, channels, height, width) between 0 and 1, normalised."""
        mean, std = (torch.tensor(numbers, dtype=torch.float32).view(-1, 1, 1) for numbers in self._statistics)
        # In the order in which bytes are normalised, to the last bit.
        return values.to(torch.float32).sub(mean).div(std).to(self.intake.torch_dtype)

    def values(self, inputs: Tensor) -> Tensor:
        """Back from inputs to values between 0 and 1, unclipped."""
        mean, std = (torch.tensor(numbers, dtype=torch.float64).view(-1, 1, 1) for numbers in self._statistics)
        return inputs.double().cpu() * std + mean

    @property
    def _statistics(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        return self.intake.mean, self.intake.std

    def read(self, text: str) -> Tensor:
        """The bytes of a picture that this sight has made: `to_data_url`, as a page gives it back.

        Args:
            text: `data:image/png;base64,...`.

        Returns:
            Bytes (channels, height, width).
        """
        image = decode(from_data_url(text)).image
        if (image.height, image.width) != self.shape[1:]:
            raise DataError(
                f"expected a picture of {self.shape[2]} x {self.shape[1]} pixels, got {image.width} x {image.height}."
            )
        return Preparation(None, None, self.mode)(image)


def _is_grey(image: Image.Image) -> bool:
    if image.mode != "RGB":
        return True
    red, green, blue = (np.asarray(image.getchannel(name)) for name in "RGB")
    return bool((red == green).all() and (green == blue).all())


def to_data_url(pixels: Tensor) -> str:
    """Bytes (channels, height, width) as `data:image/png;base64,...`, without loss."""
    array = pixels.cpu().numpy()
    image = Image.fromarray(array[0] if len(array) == 1 else np.ascontiguousarray(array.transpose(1, 2, 0)))
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
