"""Read pictures from the explorer's page, resize them for the networks, and apply the changes set by the sliders."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageFilter, ImageOps
from torch import Tensor

from molaplace.data.preprocessing import Preprocessing
from molaplace.errors import DataError, OptionError
from molaplace.images import Preparation

MAX_SIDE = 1024
"""Maximum side length of a picture, in pixels. Larger pictures are shrunk. Networks with larger inputs are refused, because they would
respond too slowly to the sliders."""

PREFIX = "data:image/png;base64,"


class Slider(NamedTuple):
    """A slider on the page, with its range, its neutral value and its step."""

    label: str
    low: float
    neutral: float
    high: float
    step: float


SLIDERS = {
    "rotation": Slider("Rotation (degrees)", -180, 0, 180, 1),
    "scale": Slider("Size (times)", 0.25, 1, 3, 0.05),
    "blur": Slider("Blur (% of the side)", 0, 0, 15, 0.25),
    "noise": Slider("Noise (white is 1)", 0, 0, 1, 0.01),
    "brightness": Slider("Brightness", -0.5, 0, 0.5, 0.01),
    "contrast": Slider("Contrast (times)", 0, 1, 3, 0.05),
}
"""Sliders keyed by name, in their order on the page."""


def read_changes(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments for `change` from a page's request, with each value clipped to its slider's range."""
    values = {
        name: max(slider.low, min(slider.high, float(request.get(name, slider.neutral))))
        for name, slider in SLIDERS.items()
    }
    return {**values, "invert": bool(request.get("invert"))}


def change(
    image: Image.Image,
    *,
    rotation: float = 0.0,
    scale: float = 1.0,
    blur: float = 0.0,
    noise: float = 0.0,
    brightness: float = 0.0,
    contrast: float = 1.0,
    invert: bool = False,
) -> Image.Image:
    """Change a grey or RGB picture according to the values of the sliders. Neutral values leave the picture unchanged."""
    if invert:
        image = ImageOps.invert(image)
    if (contrast, brightness) != (1, 0):
        table = [round((level - 127.5) * contrast + 127.5 + 255 * brightness) for level in range(256)]
        image = image.point([min(255, max(0, level)) for level in table] * len(image.getbands()))
    if scale < 1:  # blur first: bilinear sampling reads only 2 x 2 pixels and would skip the others
        image = image.filter(ImageFilter.GaussianBlur(0.4 * (1 / scale - 1)))
    if (rotation, scale) != (0, 1):
        cos = math.cos(math.radians(rotation)) / scale
        sin = math.sin(math.radians(rotation)) / scale
        x = image.width / 2
        y = image.height / 2
        matrix = (cos, -sin, x - cos * x + sin * y, sin, cos, y - sin * x - cos * y)
        image = image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR)
    if blur:
        image = image.filter(ImageFilter.GaussianBlur(blur / 100 * max(image.size)))
    if noise:
        pixels = np.asarray(image, dtype=np.float64)
        pixels = pixels + 255 * noise * np.random.default_rng(0).standard_normal(pixels.shape)
        image = Image.fromarray(pixels.round().clip(0, 255).astype(np.uint8))
    return image


@dataclass(frozen=True)
class Sight:
    """Preparation of pictures for networks with inputs of shape (channels, height, width)."""

    shape: tuple[int, ...]
    preprocessing: Preprocessing

    def __post_init__(self) -> None:
        shape = self.shape
        if len(shape) != 3 or shape[0] not in (1, 3) or not all(2 <= side <= MAX_SIDE for side in shape[1:]):
            raise OptionError(
                f"the explorer needs networks whose inputs are images (channels, height, width) with 1 or 3 channels and 2 "
                f"to {MAX_SIDE} pixels per side; the inputs of these networks have shape {tuple(shape)}. Use `molaplace "
                f"predict` instead."
            )

    def read(self, text: str) -> Image.Image:
        """Decode a picture from the page (`data:image/png;base64,...`), and convert it to the size and mode of the network inputs."""
        if not text.startswith(PREFIX):
            raise DataError(f"expected an image encoded as {PREFIX}...")
        try:
            image = Image.open(io.BytesIO(base64.b64decode(text.removeprefix(PREFIX), validate=True)), formats=["PNG"])
            image.load()
        except Exception as error:  # Pillow may raise almost any exception for a damaged file
            raise DataError(f"the picture cannot be decoded: {error}.") from error
        return self.fit(image)

    def fit(self, image: Image.Image) -> Image.Image:
        """Resize and crop a picture in the same way as the training data; if its size is still wrong, scale and centre-crop it."""
        channels, height, width = self.shape
        mode = "L" if channels == 1 else "RGB"
        prepared = to_image(Preparation(self.preprocessing.resize, self.preprocessing.crop, mode)(image.convert("RGB")))
        if prepared.size == (width, height):
            return prepared
        return ImageOps.fit(image.convert(mode), (width, height), Image.Resampling.BILINEAR)

    def inputs(self, images: Sequence[Image.Image]) -> Tensor:
        """Convert pictures to network inputs of shape (n, channels, height, width)."""
        pixels = torch.stack([torch.from_numpy(np.array(image)) for image in images])
        pixels = pixels[:, None] if pixels.ndim == 3 else pixels.permute(0, 3, 1, 2)
        return self.preprocessing.normalise(pixels).to(self.preprocessing.torch_dtype)

    def images(self, inputs: Tensor) -> list[Image.Image]:
        """Convert network inputs to pictures; raise `DataError` unless the inputs are normalised pixels."""
        mean, std = (
            torch.tensor(values, dtype=torch.float64, device="cpu").view(-1, 1, 1)
            for values in (self.preprocessing.mean, self.preprocessing.std)
        )
        values = inputs.double().cpu() * std + mean
        low = float(values.min())
        high = float(values.max())
        if low < -0.01 or high > 1.01:
            raise DataError(
                f"expected pixel values from 0 to 1, but the inputs range from {low:.3g} to {high:.3g}, so a picture cannot "
                f"be converted to an input. Fit on images or bytes, with --normalise or --mean and --std."
            )
        return [to_image(image) for image in (values.clamp(0, 1) * 255).round().to(torch.uint8)]


def to_image(pixels: Tensor) -> Image.Image:
    """Convert bytes of shape (channels, height, width) to a picture."""
    array = pixels.cpu().numpy()
    return Image.fromarray(array[0] if len(array) == 1 else np.ascontiguousarray(array.transpose(1, 2, 0)))


def to_url(image: Image.Image) -> str:
    """Return a picture as `data:image/png;base64,...`."""
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return PREFIX + base64.b64encode(buffer.getvalue()).decode()
