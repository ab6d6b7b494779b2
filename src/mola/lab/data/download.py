"""Downloads of published data sets: checked against their MD5 checksums; an incomplete or damaged file is not kept."""

from __future__ import annotations

import shutil
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from mola.errors import DataError, MissingExtraError
from mola.lab.data.files import Original


@dataclass(frozen=True)
class Archive:
    """A published archive.

    Attributes:
        original: the archive file.
        members: names inside the archive, and the paths under the data directory that they are unpacked to.
    """

    original: Original
    members: Mapping[str, str]


def fetch_file(original: Original, folder: Path, *, progress: bool = True) -> Path:
    """Download a file from the first address that delivers it with the right checksum.

    Args:
        original: the file.
        folder: where to put it.
        progress: show a progress bar on stderr.

    Raises:
        DataError: no address delivers the file.
    """
    try:
        import pooch  # type: ignore[import-untyped]
    except ImportError as error:
        raise MissingExtraError(feature="downloading data sets", package="pooch", extra="bench") from error
    pooch.get_logger().setLevel("WARNING")  # the progress bar is enough
    failures = []
    for url in original.urls:
        downloader = pooch.HTTPDownloader(progressbar=progress, timeout=30)
        options = {"fname": original.name, "path": folder, "downloader": downloader}
        try:
            return Path(pooch.retrieve(url, known_hash=f"md5:{original.md5}", **options))
        # Errors of requests are OSErrors; a wrong checksum is a ValueError of pooch.
        except (OSError, ValueError) as error:
            failures.append(f"{url}: {' '.join(str(error).split())}")
    raise DataError(
        f"{original.name} (md5 {original.md5}) is not available: {'; '.join(failures) or 'no address is known'}."
    )


def fetch_archive(archive: Archive, directory: Path, *, progress: bool = True) -> None:
    """Download an archive, unpack the listed members that are missing, and delete the archive.

    Raises:
        DataError: the archive is not available, or lacks a member.
    """
    try:
        with tempfile.TemporaryDirectory(prefix=".download-", dir=directory) as folder:
            path = fetch_file(archive.original, Path(folder), progress=progress)
            for member, target in archive.members.items():
                destination = directory / target
                if destination.exists():
                    continue
                destination.parent.mkdir(parents=True, exist_ok=True)
                complete = Path(folder) / "member"
                _extract(path, member, complete)
                complete.replace(destination)
    except OSError as error:
        raise DataError(f"{archive.original.name} cannot be unpacked in {directory}: {error}.") from error


def _extract(archive: Path, member: str, target: Path) -> None:
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as packed, packed.open(member) as source:
                _copy(source, target)
        else:
            with tarfile.open(archive) as tarball:
                inside = tarball.extractfile(member)
                if inside is None:
                    raise KeyError(f"{member} is a folder")
                _copy(inside, target)
    except (KeyError, EOFError, OSError, tarfile.TarError, zipfile.BadZipFile) as error:
        raise DataError(f"{archive.name} does not hold {member}: {error}.") from error


def _copy(source: IO[bytes], target: Path) -> None:
    with open(target, "wb") as stream:
        shutil.copyfileobj(source, stream)
