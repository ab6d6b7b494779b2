"""A picture as somebody drops it: decoded, or refused in words that say what to do.

Files come from anywhere, so that nothing is decoded before its size is known, and only by the decoders named here: others of
Pillow's start programs.
"""

from __future__ import annotations

import base64
import binascii
import io
import threading
import warnings
from dataclasses import dataclass

from mola.errors import DataError, MissingExtraError
from mola.lab.data.folder import in_bytes

try:
    from PIL import Image, ImageOps, UnidentifiedImageError
except ImportError as error:
    raise MissingExtraError(feature="the explorer", package="pillow", extra="explore") from error

__all__ = ["LARGEST_FILE", "LARGEST_PIXELS", "Picture", "decode", "from_data_url", "too_large"]

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

    Raises:
        DataError: if it is no such address, or too long.
    """
    shown = _shown(name)
    if len(text) > LARGEST_FILE * 4 // 3 + 200:
        raise DataError(too_large(name))
    heading, comma, body = text.partition(",")
    if not comma or not heading.startswith("data:") or not heading.endswith(";base64"):
        message = f"{shown} did not arrive whole: drop it once more."
        raise DataError(message)
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        message = f"{shown} did not arrive whole: drop it once more."
        raise DataError(message) from error


def decode(data: bytes, name: str = "the picture") -> Picture:
    """Decode a file's bytes.

    Args:
        data: the whole file.
        name: of the file, for messages.

    Returns:
        The picture: the first frame, upright, transparent parts filled with white, 8 bits a channel.

    Raises:
        DataError: if it is no image, is damaged, or is too large.
    """
    shown = _shown(name)
    if not data:
        message = f"{shown} is empty: expected an image ({_formats()})."
        raise DataError(message)
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
        message = f"{shown} is no image that can be read here: expected {_formats()}."
        raise DataError(message) from error
    except Image.DecompressionBombError as error:
        raise DataError(_too_many(shown, "far more pixels than a photograph")) from error
    # Pillow's decoders raise whatever a damaged file leads to: struct.error, IndexError, SyntaxError, MemoryError, ...
    except Exception as error:
        reason = str(error) or type(error).__name__
        message = f"{shown} cannot be decoded: {reason}. Is the file whole?"
        raise DataError(message) from error


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
