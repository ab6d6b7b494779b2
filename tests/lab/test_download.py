"""Downloads from a server on this machine: complete, wrong, truncated, missing; nothing half-written is left."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
import threading
import zipfile
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import numpy as np
import pytest

from molaplace.errors import DataError
from molaplace_lab.data import catalogue
from molaplace_lab.data.catalogue import DATASETS, load_images
from molaplace_lab.data.download import Download, fetch
from tests.lab.test_datasets import colour, grey, holds, idx, records

pytest.importorskip("pooch")


@pytest.fixture
def server(monkeypatch):
    """Answers with `files`; the content of `truncated` ends in the middle."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    files = {}
    truncated = set()
    requests = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            name = self.path.lstrip("/")
            requests.append(name)
            if name not in files:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(files[name])))
            self.end_headers()
            self.wfile.write(files[name][: len(files[name]) // 2] if name in truncated else files[name])

        def log_message(self, *_):
            pass

    def offer(name, content, members, mirrors=("",)):
        files[name] = content
        urls = tuple(f"http://127.0.0.1:{http.server_address[1]}/{mirror}{name}" for mirror in mirrors)
        return Download(urls, hashlib.md5(content).hexdigest(), members)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=partial(http.serve_forever, poll_interval=0.01))
        thread.start()
        yield SimpleNamespace(files=files, truncated=truncated, requests=requests, offer=offer)
        http.shutdown()
        thread.join()


def files_in(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def publish(monkeypatch, name, *downloads):
    """The test split of a set with other addresses."""
    dataset = DATASETS[name]
    split = replace(dataset.splits["test"], downloads=downloads)
    monkeypatch.setattr(catalogue, "DATASETS", {name: replace(dataset, splits={"test": split})})


@pytest.fixture
def mnist(server, monkeypatch):
    """MNIST's test set with four digits, from a mirror that has none of them and one that has."""
    pixels = grey(4)
    labels = np.arange(4, dtype=np.uint8)
    downloads = [
        server.offer(name, gzip.compress(idx(array)), {"": f"MNIST/raw/{name}"}, mirrors=("down/", ""))
        for name, array in (("t10k-images-idx3-ubyte.gz", pixels), ("t10k-labels-idx1-ubyte.gz", labels))
    ]
    publish(monkeypatch, "mnist", *downloads)
    return pixels, labels


def test_missing_files_are_fetched_into_torchvisions_folder_and_only_once(tmp_path, server, mnist, capsys):
    pixels, labels = mnist
    with pytest.raises(DataError, match=r"download=True"):
        load_images("mnist", "test", tmp_path)
    assert server.requests == []
    holds(load_images("mnist", "test", tmp_path, download=True), pixels[:, None], labels)
    names = ["t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"]
    assert files_in(tmp_path) == [f"MNIST/raw/{name}" for name in names]
    assert server.requests == [f"{mirror}{name}" for name in names for mirror in ("down/", "")]
    assert "100%" in capsys.readouterr().err  # a progress bar, on stderr
    load_images("mnist", "test", tmp_path, download=True)
    assert len(server.requests) == 4


def test_an_existing_file_is_never_replaced(tmp_path, server, mnist):
    pixels, labels = mnist
    mine = tmp_path / "MNIST" / "raw" / "t10k-images-idx3-ubyte"
    mine.parent.mkdir(parents=True)
    mine.write_bytes(idx(pixels[::-1].copy()))
    holds(load_images("mnist", "test", tmp_path, download=True), pixels[::-1, None], labels)
    assert not any("images" in name for name in server.requests)


@pytest.mark.parametrize("fault", ["wrong", "truncated", "missing"])
def test_a_damaged_download_is_not_kept(tmp_path, server, mnist, fault):
    name = "t10k-labels-idx1-ubyte.gz"
    intact = server.files[name]
    if fault == "wrong":
        server.files[name] += b"more"
    elif fault == "truncated":
        server.truncated.add(name)
    else:
        del server.files[name]
    with pytest.raises(DataError, match=rf"could not be downloaded: {name} \(md5 ") as caught:
        load_images("mnist", "test", tmp_path, download=True)
    assert str(tmp_path / "MNIST" / "raw" / name.removesuffix(".gz")) in str(caught.value)
    assert files_in(tmp_path) == ["MNIST/raw/t10k-images-idx3-ubyte.gz"]  # the intact file is kept
    server.truncated.clear()
    server.files[name] = intact
    assert len(load_images("mnist", "test", tmp_path, download=True)) == 4


INSIDE = "cifar-10-batches-bin/test_batch.bin"


def packed(form, members):
    content = io.BytesIO()
    if form == "zip":
        with zipfile.ZipFile(content, "w") as archive:
            for name, value in members.items():
                archive.writestr(name, value)
        return content.getvalue()
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        for name, value in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(value)
            archive.addfile(entry, io.BytesIO(value))
    return content.getvalue()


@pytest.mark.parametrize("form", ["tar.gz", "zip"])
def test_only_the_wanted_members_of_an_archive_are_unpacked(tmp_path, server, monkeypatch, form):
    pixels = colour(2)
    content = packed(form, {INSIDE: records([[3], [4]], pixels), "../escaped.txt": b"x", "folder/readme.html": b"x"})
    publish(monkeypatch, "cifar10", server.offer(f"set.{form}", content, {INSIDE: INSIDE}))
    (tmp_path / "data").mkdir()
    holds(load_images("cifar10", "test", tmp_path / "data", download=True, progress=False), pixels, [3, 4])
    assert files_in(tmp_path) == [f"data/{INSIDE}"]


@pytest.mark.parametrize("fault", ["wrong", "truncated", "without", "broken"])
def test_nothing_is_left_of_an_archive_that_fails(tmp_path, server, fault):
    content = packed("tar.gz", {"other" if fault == "without" else INSIDE: bytes(100_000)})
    content = content[: len(content) // 2] if fault == "broken" else content
    download = server.offer("set.tar.gz", content, {INSIDE: INSIDE})
    if fault == "wrong":
        download = replace(download, md5="0" * 32)
    elif fault == "truncated":
        server.truncated.add("set.tar.gz")
    with pytest.raises(DataError, match=r"set\.tar\.gz"):
        fetch(download, tmp_path, progress=False)
    assert files_in(tmp_path) == []
    assert not list(tmp_path.glob(".download*"))
