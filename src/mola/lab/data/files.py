"""Files of published data sets: where they may lie, and whether they are the originals."""

from __future__ import annotations

import gzip
import hashlib
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mola.errors import DataError

FETCH_AGAIN = "Delete it and fetch it again."


@dataclass(frozen=True)
class Original:
    """A file as its authors publish it.

    Attributes:
        name: of the file.
        md5: its checksum in hexadecimal digits.
        urls: where it is to be had, tried in this order.
        content_md5: of the file inside, where the original is compressed: people unpack, and pack again.
    """

    name: str
    md5: str
    urls: tuple[str, ...] = ()
    content_md5: str | None = None


def find(folders: Iterable[Path], name: str) -> Path | None:
    """The first file of this name, as it is or compressed by gzip, in the first of these folders that has it."""
    for folder in folders:
        for path in (folder / name, folder / f"{name}.gz"):
            if path.is_file():
                return path
    return None


def read_bytes(path: Path) -> bytes:
    """The file's content, unpacked where its name ends in .gz."""
    try:
        if path.suffix == ".gz":
            with gzip.open(path) as stream:
                return stream.read()
        return path.read_bytes()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{path} ({path.stat().st_size:,} bytes) is not a whole gzip file: {error}. It was cut off or changed on its "
            f"way. {FETCH_AGAIN}"
        ) from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}.") from error


def checksum(path: Path) -> str:
    """The MD5 sum of a file, which is what most data sets are published with."""
    try:
        with open(path, "rb") as stream:
            return hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}.") from error


def verify(path: Path, originals: Iterable[Original]) -> None:
    """Check that a file is the original, or what the original unpacks to.

    Args:
        path: the file.
        originals: with their checksums; those of another name are passed over.
    """
    known: dict[str, str] = {}
    for original in originals:
        if path.name == original.name:
            known["md5"] = original.md5
        if original.content_md5 and path.name.removesuffix(".gz") == original.name.removesuffix(".gz"):
            known["md5 of the content"] = original.content_md5
    if not known:
        raise DataError(
            f"{path} cannot be verified: no checksum of a file of this name is known. Read it without verify."
        )
    found = {"md5": checksum(path)}
    if "md5 of the content" in known:
        content = hashlib.md5(read_bytes(path), usedforsecurity=False).hexdigest()
        found["md5 of the content"] = content
    if not any(found[kind] == expected for kind, expected in known.items()):
        raise DataError(
            f"{path} ({path.stat().st_size:,} bytes) is not the original: expected "
            f"{' or '.join(f'{kind} {value}' for kind, value in known.items())}, "
            f"got {' and '.join(f'{kind} {found[kind]}' for kind in known)}. {FETCH_AGAIN}"
        )
