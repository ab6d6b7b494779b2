"""Code that a file names: `package.module:function` in a posterior's `job.toml`, or in a run's file; both may come from a stranger.

To import a module runs it, and many an installed one does something when imported or called: `pytest:main` would run the tests
that a stranger put into the folder. What the user's own command names is the user's word, and is not checked here. A file may name
networks of torchvision, and what lies in the user's current folder, but for all that came along with the file: seen from the
current folder, `downloads.evil` is a module of whatever was downloaded. For everything else, the user has to say that the file is
trusted.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from collections.abc import Iterable, Mapping
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from mola.app.jobs.networks import is_imported
from mola.app.jobs.sets import is_own_function
from mola.errors import OptionError
from mola.hub import is_hub_folder
from mola.lab.imported import split_name
from mola.saving.files import DOCUMENT

HARMLESS = ("torchvision.models",)
"""Packages whose functions make networks and nothing else."""


def check_values(values: Mapping[str, Any], source: Path, *, trust: bool) -> None:
    """Refuse code that a file should not name, among the values of options that it gives."""
    for option, value in values.items():
        is_code = is_imported if option == "--network" else is_own_function
        for name in [value] if isinstance(value, str) else value if isinstance(value, (list, tuple)) else ():
            if isinstance(name, str) and is_code(name):
                check_code(name, source, trust=trust, option=option)


def check_code(name: str, source: Path, *, trust: bool, option: str | None = "--network") -> None:
    """Refuse code that a file should not name."""
    module, _ = split_name(name)
    found = _found(module)
    places = [place for spec in found for place in _places(spec)]
    own_word = "" if option is None else f"If the code is yours, name it on your command: {option} {name}. "
    if _any_within(places, [source]):
        raise OptionError(
            f"{name} lies in {source}, and code is not imported from a posterior's folder: it may be a stranger's. "
            f"{own_word}Otherwise copy the module to where you trust it, and run this from there."
        )
    if len(found) <= module.count("."):
        raise OptionError(
            f"cannot import {module!r}, which {source} names: there is no such module here. Run this where the module can be "
            f"imported from, as when the posterior was fitted."
        )
    if trust:
        return
    if _is_own(found):
        if not _any_within(places, _came_along(source)) and not any(map(_in_a_posterior, places)):
            return
        raise OptionError(
            f"{source} names {name}, whose module {places[-1]} came along with it or with another posterior: it may be a stranger's, "
            f"and importing it would run it. {own_word}If you trust the folder, add --trust."
        )
    if any(f"{module}.".startswith(f"{known}.") for known in HARMLESS):
        return
    raise OptionError(
        f"{source} names {name}, which is installed and not of the current folder: importing and calling it could do anything. "
        f"{own_word}If you trust the folder, add --trust."
    )


def _found(module: str) -> list[ModuleSpec]:
    # Where a module and the packages around it would be imported from, found without running any of them.
    importlib.invalidate_caches()
    here = str(Path.cwd())
    # As `mola.lab.imported` looks for it.
    search = sys.path if here in sys.path else [here, *sys.path]
    found: list[ModuleSpec] = []
    name = ""
    for part in module.split("."):
        name = f"{name}.{part}" if name else part
        loaded = getattr(sys.modules.get(name), "__spec__", None)
        spec = loaded or (_by_finders(name, search) if "." not in name else _on_path(name, search))
        if spec is None:
            break
        found.append(spec)
        search = list(spec.submodule_search_locations or ())
    return found


def _by_finders(name: str, search: Iterable[str]) -> ModuleSpec | None:
    # A module that lies in no package, asked of all that Python asks: packages installed for editing have finders of
    # their own.
    for finder in sys.meta_path:
        if finder is PathFinder:
            spec = _on_path(name, search)
        else:
            find = getattr(finder, "find_spec", None)
            spec = None if find is None else find(name, None)
        if spec is not None:
            return spec
    return None


def _on_path(name: str, search: Iterable[str]) -> ModuleSpec | None:
    # `PathFinder` does the same, but cannot look into folders without `__init__.py` before it has imported what is
    # around them.
    portions: list[str] = []
    for entry in search:
        finder = pkgutil.get_importer(entry or str(Path.cwd()))
        spec = None if finder is None else finder.find_spec(name)
        if spec is not None and spec.loader is not None:
            return spec
        portions += [] if spec is None else spec.submodule_search_locations or []
    if not portions:
        return None
    spec = ModuleSpec(name, None, is_package=True)
    spec.submodule_search_locations = portions
    return spec


def _places(spec: ModuleSpec) -> list[Path]:
    listed = [*(spec.submodule_search_locations or ()), *([spec.origin] if spec.has_location and spec.origin else [])]
    return [Path(place).resolve() for place in listed]


def _is_own(found: list[ModuleSpec]) -> bool:
    # Whether all code lies in the current folder, or one below it, as in `src`; packages in an environment there lie
    # deeper.
    here = Path.cwd().resolve()
    first = found[0]
    roots = [Path(one).resolve() for one in first.submodule_search_locations or [first.origin or ""]]
    near = [root for root in roots if here in (root.parent, root.parent.parent)]
    # Folders of one name without `__init__.py` may lie in several places; what counts is where the code is found.
    code = [Path(spec.origin).resolve() for spec in found if spec.has_location and spec.origin]
    return bool(code) and all(any(place.is_relative_to(root) for root in near) for place in code)


def _came_along(source: Path) -> list[Path]:
    # What was probably downloaded with a file: all that lies in the outermost folder around it, as seen from here.
    here = Path.cwd().resolve()
    trees = []
    for path in (Path(os.path.normpath(source.absolute())), source.resolve()):
        shared = next((one for one in (here, *here.parents) if path.is_relative_to(one)), None)
        parts = () if shared is None else path.relative_to(shared).parts
        trees.append(shared / parts[0] if shared is not None and parts else path)
    return trees


def _any_within(places: Iterable[Path], trees: Iterable[Path]) -> bool:
    # Whether a place lies in one of the trees, by the files themselves: a disk may not tell capitals from small
    # letters.
    known = [tree for tree in trees if tree.exists()]
    return any(one.samefile(tree) for place in places for one in _upwards(place) for tree in known)


def _in_a_posterior(place: Path) -> bool:
    return any((one / DOCUMENT).is_file() or is_hub_folder(one) for one in _upwards(place))


def _upwards(place: Path) -> list[Path]:
    return [one for one in (place, *place.parents) if one.exists()]
