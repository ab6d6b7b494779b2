"""From a decoded picture to what the networks see of it: their size, their colours, their normalisation."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from mola.app.explore.pictures import decode, from_data_url
from mola.app.jobs.preparation import Intake
from mola.errors import DataError, OptionError
from mola.lab.data.folder import Preparation

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["Sight", "as_png"]

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

        Raises:
            OptionError: if such inputs are no pictures.
        """
        if len(shape) != 3 or shape[0] not in (1, 3) or not all(2 <= side <= LARGEST_SIDE for side in shape[1:]):
            message = (
                f"the explorer is for networks that see pictures, of 1 or 3 channels and 2 to {LARGEST_SIDE} pixels a side: inputs "
                f"(channels, height, width). These take inputs of shape {tuple(shape)}; `mola predict` predicts for them."
            )
            raise OptionError(message)
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
        """The bytes of a picture that this sight has made: `as_png`, as a page gives it back.

        Args:
            text: `data:image/png;base64,...`.

        Returns:
            Bytes (channels, height, width).

        Raises:
            DataError: if it is something else, since a page can send anything.
        """
        image = decode(from_data_url(text)).image
        if (image.height, image.width) != self.shape[1:]:
            message = (
                f"expected a picture of {self.shape[2]} x {self.shape[1]} pixels, got {image.width} x {image.height}."
            )
            raise DataError(message)
        return Preparation(None, None, self.mode)(image)


def _is_grey(image: Image.Image) -> bool:
    if image.mode != "RGB":
        return True
    red, green, blue = (np.asarray(image.getchannel(name)) for name in "RGB")
    return bool((red == green).all() and (green == blue).all())


def as_png(pixels: Tensor) -> str:
    """Bytes (channels, height, width) as `data:image/png;base64,...`, without loss."""
    from PIL import Image

    array = pixels.cpu().numpy()
    image = Image.fromarray(array[0] if len(array) == 1 else np.ascontiguousarray(array.transpose(1, 2, 0)))
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
