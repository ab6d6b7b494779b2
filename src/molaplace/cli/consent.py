"""Require consent to run code named in a file, such as `package.module:function` in a posterior's document or a run file.

The file may come from a stranger. Importing a module runs it, and many installed functions can do harm: `pytest:main` would run
tests that a stranger put into the current folder. Code named on the user's command line is not checked here. A file may name
torchvision networks. It may also name modules in the current folder, but not modules that came with the file, such as
`downloads.evil` in a downloaded folder. All other code needs `--trust`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from molaplace.cli.data.opening import is_data_function
from molaplace.cli.networks import is_builder
from molaplace.errors import OptionError
from molaplace.hub import is_hub_folder
from molaplace.saving.files import DOCUMENT
from molaplace_lab.imported import split_name

HARMLESS = "torchvision.models"
"""Package whose functions a file may name, because they only build networks."""


def check_values(values: Mapping[str, Any], source: Path, *, trust: bool) -> None:
    """Raise `OptionError` if an option value from a file refers to code that the file is not allowed to name."""
    for option, value in values.items():
        is_code = is_builder if option == "--network" else is_data_function
        for name in [value] if isinstance(value, str) else value if isinstance(value, (list, tuple)) else ():
            if isinstance(name, str) and is_code(name):
                check_code(name, source, trust=trust, option=option)


def check_code(name: str, source: Path, *, trust: bool, option: str | None = "--network") -> None:
    """Raise `OptionError` for code that a file must not name. Nothing is imported here."""
    module, _ = split_name(name)
    if trust:
        return
    file = _file_here(module)
    if file is not None and not any(_contains(tree, file) for tree in _came_along(source)) and not _in_posterior(file):
        return
    if file is None:
        top = module.partition(".")[0]
        if _is_here(top) or (top not in sys.modules and find_spec(top) is None):
            raise OptionError(
                f"cannot import {module!r}, which is named in {source}: no such module exists here. Run the command in the "
                f"folder where the posterior was fitted."
            )
        if f"{module}.".startswith(f"{HARMLESS}."):
            return
    where = "is installed, but not in the current folder" if file is None else f"came with a posterior ({file})"
    own_word = "" if option is None else f"If this is your own code, name it on the command line: {option} {name}. "
    raise OptionError(
        f"{source} names {name}, which {where}. Importing it could run a stranger's code. {own_word}If you trust the folder, add "
        f"--trust."
    )


def _file_here(module: str) -> Path | None:
    # Find the file that contains a module, in the current folder or its src subfolder.
    for root in (Path.cwd(), Path.cwd() / "src"):
        place = root.joinpath(*module.split("."))
        for file in (place / "__init__.py", place.with_name(f"{place.name}.py")):
            if file.is_file():
                return file.resolve()
    return None


def _is_here(top: str) -> bool:
    return any(Path(root, name).exists() for root in (".", "src") for name in (top, f"{top}.py"))


def _came_along(source: Path) -> list[Path]:
    # Return the outermost folders that contain the file but not the current folder: one for the path as given, and one for the
    # path with links resolved. The contents of such a folder were probably downloaded together.
    here = Path.cwd().resolve()
    trees = []
    for path in (Path(os.path.normpath(source.absolute())), source.resolve()):
        shared = next((one for one in (here, *here.parents) if path.is_relative_to(one)), None)
        parts = () if shared is None else path.relative_to(shared).parts
        trees.append(shared / parts[0] if shared is not None and parts else path)
    return [tree for tree in trees if tree.exists()]


def _contains(tree: Path, file: Path) -> bool:
    # Compare files rather than names, because a file system may ignore case.
    return any(one.samefile(tree) for one in (file, *file.parents))


def _in_posterior(file: Path) -> bool:
    return any((one / DOCUMENT).is_file() or is_hub_folder(one) for one in file.parents)
