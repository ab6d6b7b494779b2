"""Data as a user names them.

| name | data |
|---|---|
| a folder | images; its subfolders are the classes |
| `file.png`, `file.jpg`, ... | one image, without a label |
| `file.npz`, `file.npy` | arrays: `x` and `y`, or inputs alone |
| `file.csv` | a column of paths of images and one of labels |
| `mnist:test`, `digits:train`, ... | a built-in set |
| `package.module:function` | what the function gives: an iterable of batches |
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

from mola.app.jobs.arrays import Arrays, open_arrays
from mola.app.jobs.built_in import BUILT_IN, InMemory, Own, open_built_in, open_own
from mola.app.jobs.pictures import Pictures, list_csv, list_file, list_folder
from mola.app.jobs.preparation import Intake
from mola.errors import DataError, OptionError
from mola.lab.data.folder import ENDINGS
from mola.lab.imported import is_path
from mola.options import did_you_mean

__all__ = ["UserSet", "is_own_function", "open_set"]

UserSet = Pictures | Arrays | InMemory | Own


def is_own_function(name: str) -> bool:
    """Whether a name stands for a function that gives batches."""
    if ":" not in name or is_path(name) or name.partition(":")[0] in BUILT_IN:
        return False
    return not Path(name).expanduser().exists()


def open_set(
    name: str,
    intake: Intake,
    *,
    labelled: bool,
    classes: Sequence[str] | None = None,
    outputs: int | None = None,
    directory: str | None = None,
    seed: int = 0,
    download: bool = False,
) -> UserSet:
    """Data by name, looked into but not read.

    Args:
        name: as in the table above.
        intake: from what is on disk to network inputs.
        labelled: whether labels are asked for.
        classes: the classes' names in the order of the networks' outputs, where they are known.
        outputs: how many classes there are, where that is known.
        directory: that holds the built-in sets.
        seed: of the split of the digits.
        download: whether built-in sets may be fetched.

    Returns:
        The set.

    Raises:
        DataError: if a file is of an unknown kind.
        OptionError: if the name is none of these.
    """
    path = Path(name).expanduser()
    if name.partition(":")[0] in BUILT_IN and not path.exists():
        return open_built_in(name, directory, outputs, intake, labelled=labelled, seed=seed, download=download)
    if path.is_dir():
        return list_folder(path, classes, intake, labelled=labelled)
    if path.is_file():
        if path.suffix in (".npz", ".npy"):
            return open_arrays(path, outputs, intake, labelled=labelled)
        if path.suffix == ".csv":
            return list_csv(path, classes, intake, labelled=labelled, outputs=outputs)
        if path.suffix.lower() in ENDINGS and not labelled:
            return list_file(path, intake)
        message = f"{path} is of an unknown kind: expected a folder of images, .npz, .npy or .csv."
        raise DataError(message)
    if is_own_function(name):
        return open_own(name, outputs, intake, labelled=labelled)
    near = _nearest(path)
    hint = did_you_mean(name.partition(":")[0], BUILT_IN) if near is None else f" Did you mean {near}?"
    message = (
        f"no data {name!r}: no such file or folder.{hint} It is none of the built-in sets ({', '.join(BUILT_IN)}); a function of your "
        f"own is named package.module:function."
    )
    raise OptionError(message)


def _nearest(path: Path) -> Path | None:
    """The existing path that is spelt most alike, part by part; None if a part is like nothing there."""
    found = Path(path.anchor)
    for part in path.parts[1 if path.anchor else 0 :]:
        if not (found / part).exists():
            try:
                there = sorted(one.name for one in found.iterdir())
            except OSError:
                return None
            near = difflib.get_close_matches(part, there, 1)
            if not near:
                return None
            part = near[0]
        found /= part
    return found
