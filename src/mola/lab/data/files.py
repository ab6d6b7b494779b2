"""Files of published data sets: find them on disk, read them, and compare them with the published checksums."""

from __future__ import annotations

import gzip
import hashlib
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mola.errors import DataError

FETCH_AGAIN = "Delete it and download it again."


@dataclass(frozen=True)
class Original:
    """A published file.

    Attributes:
        name: file name.
        md5: MD5 checksum in hexadecimal digits.
        urls: download addresses, tried in this order.
        content_md5: MD5 checksum of the unpacked content, for a compressed file that users may unpack or pack again.
    """

    name: str
    md5: str
    urls: tuple[str, ...] = ()
    content_md5: str | None = None


def find(folder: Path, name: str) -> Path | None:
    """Return the file of this name in a folder, plain or compressed by gzip, or None."""
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def read_bytes(path: Path) -> bytes:
    """Read a file, unpacked if its name ends in .gz."""
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if path.suffix == ".gz" else content
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{path} ({path.stat().st_size:,} bytes) is truncated or not a gzip file: {error}. {FETCH_AGAIN}"
        ) from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}.") from error


def verify(path: Path, originals: Iterable[Original]) -> None:
    """Check that a file is the published file, plain or unpacked; a file without a known checksum passes.

    Raises:
        DataError: the checksums differ.
    """
    plain = path.name.removesuffix(".gz")
    same_name = [original for original in originals if original.name.removesuffix(".gz") == plain]
    expected = {original.md5 for original in same_name if original.name == path.name}
    expected |= {original.content_md5 for original in same_name if original.content_md5}
    if not expected:
        return
    found = {_md5(path.read_bytes()), _md5(read_bytes(path))}
    if not found & expected:
        raise DataError(
            f"{path} ({path.stat().st_size:,} bytes) is not the published file: expected md5 {' or '.join(sorted(expected))}, got "
            f"{' and '.join(sorted(found))}. {FETCH_AGAIN}"
        )


def _md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()
