"""Fetching published data sets, with checksums and a progress bar; what arrives broken is not kept."""

from __future__ import annotations

import shutil
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import IO

from mola.data.files import Original, find
from mola.data.layout import Archive, Dataset
from mola.errors import DataError, MissingExtraError

__all__ = ["fetch", "fetch_archive"]


def fetch(dataset: Dataset, split: str, directory: Path, *, progress: bool = True) -> None:
    """Download what a split needs into the folder where torchvision would have put it.

    Files are written under other names first and renamed when they are whole and right.

    Args:
        dataset: which.
        split: of it.
        directory: the data directory.
        progress: whether to show a bar on stderr.

    Raises:
        DataError: if it cannot be had, with what to put where instead.
    """
    archive = dataset.archives.get(split)
    originals = [original for original in dataset.originals.get(split, ()) if original.urls]
    if archive is None and not originals:
        message = f"{dataset.title} ({split}) cannot be downloaded by a program. Put there yourself:\n"
        raise DataError(message + dataset.wanted(split, directory))
    try:
        if archive is not None:
            fetch_archive(archive, directory, progress=progress)
        else:
            folder = directory / dataset.layouts[split][0].folders[0]
            for original in originals:
                # What is there is the user's, and never replaced.
                if find([folder], original.name.removesuffix(".gz")) is None:
                    _fetch_file(original, folder, progress)
    except DataError as error:
        message = f"{dataset.title} ({split}) could not be downloaded: {error} Put there yourself:\n"
        raise DataError(message + dataset.wanted(split, directory)) from error


def _fetch_file(original: Original, folder: Path, progress: bool) -> Path:
    """The file, from the first address that gives the right one; it may be there already.

    Raises:
        MissingExtraError: if pooch is not installed.
        DataError: if no address does.
    """
    try:
        import pooch  # type: ignore[import-untyped]
    except ImportError as error:
        raise MissingExtraError(feature="downloading data sets", package="pooch", extra="bench") from error
    failures = []
    log = pooch.get_logger()
    level = log.level
    log.setLevel("WARNING")  # the bar says enough
    try:
        for url in original.urls:
            try:
                return Path(
                    pooch.retrieve(
                        url,
                        known_hash=f"md5:{original.md5}",
                        fname=original.name,
                        path=folder,
                        downloader=pooch.HTTPDownloader(progressbar=progress, timeout=30),
                    )
                )
            # requests' errors are OSErrors; a wrong checksum is a ValueError of pooch's.
            except (OSError, ValueError) as error:
                failures.append(f"{url}: {' '.join(str(error).split())}")
    finally:
        log.setLevel(level)
    message = f"{original.name} (md5 {original.md5}) was not to be had. {'; '.join(failures)}."
    raise DataError(message)


def fetch_archive(archive: Archive, directory: Path, *, progress: bool = True) -> None:
    """Fetch an archive, take the files out that are wanted and not there yet, and forget it.

    Raises:
        DataError: if it cannot be had, or the directory cannot be written to.
    """
    try:
        with tempfile.TemporaryDirectory(prefix=".download-", dir=directory) as folder:
            path = _fetch_file(archive.original, Path(folder), progress)
            for member, target in archive.members.items():
                destination = directory / target
                if destination.exists():
                    continue
                destination.parent.mkdir(parents=True, exist_ok=True)
                whole = Path(folder) / "member"
                _take_out(path, member, whole)
                whole.replace(destination)
    except OSError as error:
        message = f"{archive.original.name} cannot be unpacked in {directory}: {error}."
        raise DataError(message) from error


def _take_out(archive: Path, member: str, target: Path) -> None:
    """Write one file of an archive to `target`, whatever its name inside.

    Raises:
        DataError: if it is not in it, or the archive is broken.
    """
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as packed, packed.open(member) as source:
                _copy(source, target)
        else:
            with tarfile.open(archive) as tarball:
                inside = tarball.extractfile(member)
                if inside is None:
                    message = f"{archive.name} has a folder in the place of {member}."
                    raise DataError(message)
                _copy(inside, target)
    except (KeyError, EOFError, OSError, tarfile.TarError, zipfile.BadZipFile) as error:
        message = f"{archive.name} does not give {member}: {error}."
        raise DataError(message) from error


def _copy(source: IO[bytes], target: Path) -> None:
    with open(target, "wb") as stream:
        shutil.copyfileobj(source, stream)
