"""Code that a posterior's folder names: `package.module:function` in its `job.toml`, which may come from a stranger.

To import a module runs it, and many an installed one does something when imported or called: `pytest:main` would run the tests
that a stranger put into the folder. So a folder may name what lies in the user's current folder, and networks of torchvision; for
everything else that is installed, the user has to say that the folder is trusted.
"""

from __future__ import annotations

import sys
from importlib.machinery import BuiltinImporter, ModuleSpec, PathFinder
from pathlib import Path

from mola.errors import OptionError

__all__ = ["check_code"]

HARMLESS = ("torchvision.models",)
"""Packages whose functions make networks and nothing else."""


def check_code(name: str, folder: Path, *, trust: bool) -> None:
    """Refuse code that a folder should not name.

    Args:
        name: `package.module:function`.
        folder: that names it.
        trust: whether the user trusts the folder; even then, nothing in it is imported.

    Raises:
        OptionError: if the code lies in the folder, or is installed and not trusted.
    """
    module = name.partition(":")[0]
    found = _found(module)
    if any(place.is_relative_to(folder.resolve()) for spec in found for place in _places(spec)):
        message = (
            f"{name} lies in {folder}, and code is not imported from a posterior's folder: it may be a stranger's. "
            f"Copy the module to where you trust it, and run this from there."
        )
        raise OptionError(message)
    # What is not found is told by whoever imports it.
    if trust or not found or _is_own(found[0]) or any(f"{module}.".startswith(f"{known}.") for known in HARMLESS):
        return
    message = (
        f"{folder} names {name}, which is installed and not of the current folder: importing and calling it could do anything. "
        f"Where you trust the folder, add --trust."
    )
    raise OptionError(message)


def _found(module: str) -> list[ModuleSpec]:
    """Where a module and the packages around it would be imported from, found without running any of them."""
    found: list[ModuleSpec] = []
    search = [str(Path.cwd()), *sys.path]
    name = ""
    for part in module.split("."):
        name = f"{name}.{part}" if name else part
        loaded = getattr(sys.modules.get(name), "__spec__", None)
        spec = loaded or BuiltinImporter.find_spec(name) or PathFinder.find_spec(name, search)
        if spec is None:
            break
        found.append(spec)
        search = list(spec.submodule_search_locations or ())
    return found


def _places(spec: ModuleSpec) -> list[Path]:
    listed = [*([spec.origin] if spec.has_location and spec.origin else []), *(spec.submodule_search_locations or ())]
    return [Path(place).resolve() for place in listed]


def _is_own(spec: ModuleSpec) -> bool:
    """Whether the outermost module lies in the current folder itself; packages in an environment below it do not."""
    here, places = Path.cwd().resolve(), _places(spec)
    return bool(places) and all(place.parent == here or place.parent.parent == here for place in places)
