"""Downloading published data sets. MD5 checksums are verified, and incomplete or damaged files are deleted."""

from __future__ import annotations

import tarfile
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from molaplace.errors import DataError, importing

FETCH_AGAIN = "Delete it and download it again."


@dataclass(frozen=True)
class Download:
    """A published file or archive that can be downloaded."""

    urls: tuple[str, ...]
    """URLs, in the order in which they are tried."""
    md5: str
    files: Mapping[str, str]
    """Paths of the files relative to the data directory, keyed by their names in the archive; for a single file, the key is ""."""

    def __str__(self) -> str:
        return f"{self.urls[0]} (md5 {self.md5})"


def fetch(download: Download, directory: Path, *, progress: bool = True) -> None:
    """Download a file, or the members of an archive, from the first URL whose file has the right checksum.

    Existing files, plain or compressed, are not replaced.
    """
    with importing("downloading data sets", "pooch", "lab"):
        import pooch  # type: ignore[import-untyped]
    targets = {member: directory / path for member, path in download.files.items()}
    missing = {member: path for member, path in targets.items() if not (path.exists() or path.with_suffix("").exists())}
    if not missing:
        return
    pooch.get_logger().setLevel("WARNING")  # the progress bar makes pooch's messages unnecessary
    failures = []
    for url in download.urls:
        name = url.rpartition("/")[2]
        try:
            with tempfile.TemporaryDirectory(prefix=".download-", dir=directory) as folder:
                unpack = pooch.Unzip if name.endswith(".zip") else pooch.Untar
                pooch.retrieve(
                    url,
                    known_hash=f"md5:{download.md5}",
                    fname=name,
                    path=folder,
                    processor=None if "" in missing else unpack(members=list(missing), extract_dir="."),
                    downloader=pooch.HTTPDownloader(progressbar=progress, timeout=30),
                )
                for member, path in missing.items():
                    path.parent.mkdir(parents=True, exist_ok=True)
                    (Path(folder) / (member or name)).replace(path)
            return
        # Failed requests raise OSError, a wrong checksum makes pooch raise ValueError, and a missing member raises KeyError.
        except (OSError, ValueError, EOFError, KeyError, tarfile.TarError, zipfile.BadZipFile) as error:
            failures.append(f"{url}: {' '.join(str(error).split())}")
    raise DataError(f"{name} (md5 {download.md5}) is not available: {'; '.join(failures)}.")
