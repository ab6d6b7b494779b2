"""Everything the demo leaves on disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from mola.compare.demo_result import DemoResult
from mola.compare.report.figures import FIGURES, draw, write_figure
from mola.compare.report.page import render_page
from mola.errors import OptionError

__all__ = ["prepare_folder", "write_demo"]


def prepare_folder(directory: Path) -> Path:
    """Make the folder, and the one for figures inside it.

    Args:
        directory: may exist already.

    Returns:
        The folder for figures.

    Raises:
        OptionError: if it cannot be made.
    """
    pictures = directory / "figures"
    try:
        pictures.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"cannot make the folder {pictures} ({error.strerror}): choose another output folder."
        raise OptionError(message) from error
    return pictures


def write_demo(
    result: DemoResult, directory: Path, progress: Callable[[str, float], None] = lambda doing, done: None
) -> Path:
    """Write `index.html`, `numbers.json`, and each figure as `figures/<name>.svg` and `.png`.

    Args:
        result: what the demo found.
        directory: where to; files of an earlier run are replaced.
        progress: told what is being drawn, and which share is done.

    Returns:
        The page.
    """
    pictures = prepare_folder(directory)
    drawn = []
    for index, name in enumerate(FIGURES):
        progress(f"drawing {name}", index / len(FIGURES))
        figure = draw(name, result)
        write_figure(figure, pictures)
        drawn.append(figure)
    numbers = json.dumps(result.numbers(), indent=2, ensure_ascii=False)
    (directory / "numbers.json").write_text(numbers + "\n", encoding="utf-8")
    page = directory / "index.html"
    page.write_text(render_page(result, drawn), encoding="utf-8")
    progress("done", 1.0)
    return page
