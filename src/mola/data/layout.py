"""Where the files of a data set lie in a data directory, and how they are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mola.data.files import Original, checksum, find
from mola.data.folder import image_files
from mola.data.images import Images

__all__ = ["Archive", "Dataset", "FolderLayout", "Layout"]


@dataclass(frozen=True)
class Layout:
    """One form in which a split may lie on disk.

    Attributes:
        folders: where it may lie, under the data directory; "" is the directory itself.
        files: all that it needs, each as it is or compressed by gzip.
        read: from their paths, in this order, to images.
        ambiguous: whether other sets have files of the same names. The directory itself then counts only if it is named like
            one of the folders, or its files have the right checksums.
    """

    folders: tuple[str, ...]
    files: tuple[str, ...]
    read: Callable[[Sequence[Path]], Images]
    ambiguous: bool = False

    def find(self, directory: Path, originals: Sequence[Original]) -> list[Path | None]:
        """A path for each file, or None for those that are not there. All lie in the same folder."""
        best: list[Path | None] = [None] * len(self.files)
        for folder in self.folders:
            place = directory / folder
            found = [find([place], name) for name in self.files]
            if self.ambiguous and place == directory and not self._named(directory):
                sums = {md5 for original in originals for md5 in (original.md5, original.content_md5)}
                found = [path if path and checksum(path) in sums else None for path in found]
            if sum(path is not None for path in found) > sum(path is not None for path in best):
                best = found
            if None not in best:
                break
        return best

    def _named(self, directory: Path) -> bool:
        """Whether the given directory is itself the set's folder, as in `--data MNIST/raw`."""
        names = {folder.lower() for folder in self.folders if folder}
        parts = directory.resolve().parts
        return any("/".join(parts[-count:]).lower() in names for count in (1, 2))


@dataclass(frozen=True)
class FolderLayout:
    """A split that lies on disk as a folder of image files.

    Attributes:
        folders: where it may lie, under the data directory.
        read: from the folder, alone in a sequence, to images.
        files: what to expect in it, for messages.
    """

    folders: tuple[str, ...]
    read: Callable[[Sequence[Path]], Images]
    files: tuple[str, ...]

    def find(self, directory: Path, originals: Sequence[Original]) -> list[Path | None]:
        """The first of the folders that holds images; nothing is known of the originals' checksums."""
        places = (directory / folder for folder in self.folders)
        return [next((place for place in places if place.is_dir() and image_files(place)), None)]


@dataclass(frozen=True)
class Archive:
    """A published archive that holds a split's files.

    Attributes:
        original: the archive.
        members: the names inside it and the names, under the data directory, that they are unpacked to.
    """

    original: Original
    members: Mapping[str, str]


@dataclass(frozen=True)
class Dataset:
    """What is known of a data set.

    Attributes:
        name: what it is called here.
        title: what its authors call it.
        classes: how many.
        shape: channels, height and width.
        counts: for each split, how many images were published; a user may have a part of them.
        layouts: for each split, the forms in which it may lie on disk; the first is the one to recommend.
        originals: for each split, the files to download into the first layout's first folder; also all known checksums.
        archives: for each split, the archive to download instead.
        hint: where to get it, for sets that cannot be downloaded by a program, or anything else worth knowing.
    """

    name: str
    title: str
    classes: int
    shape: tuple[int, int, int]
    counts: Mapping[str, int]
    layouts: Mapping[str, tuple[Layout | FolderLayout, ...]]
    originals: Mapping[str, tuple[Original, ...]]
    archives: Mapping[str, Archive]
    hint: str = ""

    @property
    def splits(self) -> tuple[str, ...]:
        """Those that exist."""
        return tuple(self.layouts)

    def find(self, split: str, directory: Path) -> tuple[Layout | FolderLayout, list[Path]] | None:
        """The first layout whose files are all there, and their paths."""
        for layout in self.layouts[split]:
            paths = layout.find(directory, self.originals.get(split, ()))
            found = [path for path in paths if path is not None]
            if len(found) == len(paths):
                return layout, found
        return None

    def wanted(self, split: str, directory: Path) -> str:
        """What to put where."""
        first = self.layouts[split][0]
        lines = [f"  {directory / first.folders[0] / name}" for name in first.files]
        sources: list[Original] = [self.archives[split].original] if split in self.archives else []
        sources += [original for original in self.originals.get(split, ()) if original.urls]
        for original in sources:
            lines.append(f"  from {original.urls[0]} (md5 {original.md5})")
        if self.hint:
            lines.append(f"  {self.hint}")
        return "\n".join(lines)
