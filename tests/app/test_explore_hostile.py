"""A hostile client against the explorer's server: every address that gradio answers at, every event that the page has."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from http.client import HTTPConnection
from pathlib import Path

import pytest

if importlib.util.find_spec("gradio") is None:  # not loaded here: it takes seconds, and only the server needs it
    pytest.skip("gradio is not installed: pip install 'mola-torch[explore]'", allow_module_level=True)

from mola.app.explore import server as serving
from mola.app.explore.server import ASKED, MOST_PARTS, Guarded, why_refused

ROOT = Path(__file__).resolve().parents[2]

QUICKLY = 20
"""Seconds, on a busy machine."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Where gradio would copy files to; it must stay empty."""
    return tmp_path_factory.mktemp("cache")


def copied(cache):
    return [path for path in cache.rglob("*") if not path.is_dir()]


SERVER = """
import json
import torch
torch.set_num_threads(1)
from mola.app.explore.opinions import Explorer
from mola.app.explore.page import mount
from mola.app.explore.server import listen, make_app, serve
from tests.app.test_explore import make_subject

explorer, found = Explorer(make_subject((1, 8, 8))), []

def walk(routes):
    for route in routes:
        found.extend([method, route.path] for method in getattr(route, "methods", None) or () if hasattr(route, "path"))
        inner = [getattr(route, name, None) for name in ("original_router", "app")]
        walk(next((one.routes for one in inner if hasattr(one, "routes")), []))

walk(mount(explorer).routes)
listening = listen("127.0.0.1", 0)
told = json.dumps({"port": listening.getsockname()[1], "routes": found})
serve(make_app(explorer), listening, lambda: print(told, flush=True))
"""


@pytest.fixture(scope="module")
def told(cache):
    """Where the server listens, and the addresses that gradio answers at; in a process of its own, as users have it."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "GRADIO_TEMP_DIR": str(cache)}
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            [sys.executable, "-c", SERVER], stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        ) as server,
    ):
        try:
            line = server.stdout.readline()
            errors.seek(0)
            assert line, errors.read()
            yield json.loads(line)
        finally:
            server.terminate()


@pytest.fixture(scope="module")
def port(told):
    return told["port"]


def ask(port, method, path, body=None, **headers):
    """Status and answer."""
    connection = HTTPConnection("127.0.0.1", port, timeout=QUICKLY)
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    if body is not None:
        given.setdefault("Content-Type", "application/json")
    try:
        connection.request(method, path, body=body, headers=given)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def question(event, data, **more):
    return json.dumps({"data": data, "fn_index": event, "session_hash": "hostile", **more}).encode()


@pytest.fixture(scope="module")
def config(port):
    return json.loads(ask(port, "GET", "/config")[1])


FILES = {
    "a file": "/etc/hostname",
    "an endless file": "/dev/zero",
    "a relative path": "../../../../etc/hostname",
    "an address": "http://127.0.0.1:1/",
}


def disguises(path):
    """An object that gradio takes for a file, in the places where it may stand."""
    file = {"path": path, "url": None, "orig_name": "x.png", "meta": {"_type": "gradio.FileData"}}
    yield "as it is", file
    yield "with an address", {**file, "url": f"/gradio_api/file={path}"}
    yield "as a stream", {**file, "is_stream": True}
    yield "in a list", [file]
    yield "deep inside", {"a": [{"b": file}]}
    yield "as a property", {"value": file}
    yield "bare", {"path": path}


@pytest.mark.parametrize("path", FILES.values(), ids=FILES)
def test_no_event_takes_a_file_of_the_server(port, config, cache, path):
    """Also those that exist for JavaScript alone, which gradio does not check."""
    assert len(config["dependencies"]) > 5
    assert any(not one["backend_fn"] for one in config["dependencies"]), "none is for JavaScript alone"
    file = next(disguises(path))[1]
    for event in config["dependencies"]:
        questions = [
            ([file] * max(1, len(event["inputs"])), {}),
            ([], {"event_data": file}),
            ([], {"trigger_id": file}),
            ([], {"request": file}),
        ]
        if path == FILES["a file"]:
            questions += [([other], {}) for _, other in disguises(path)]
            questions += [([], {"event_data": other}) for _, other in disguises(path)]
        for data, more in questions:
            began = time.monotonic()
            status, words = ask(port, "POST", ASKED, question(event["id"], data, **more))
            assert (status, b"expected" in words) == (400, True), (event["id"], data, more)
            assert time.monotonic() - began < QUICKLY
    assert copied(cache) == []
    assert ask(port, "GET", "/")[0] == 200, "and the page is still there"


def test_a_pipe_does_not_hold_the_server_up(port, config, cache, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for event in config["dependencies"]:
        file = {"path": str(pipe), "meta": {"_type": "gradio.FileData"}}
        assert ask(port, "POST", ASKED, question(event["id"], [file]))[0] == 400
    assert copied(cache) == []


def test_plain_questions_to_every_event_copy_nothing(port, config, cache):
    """Texts that look like paths stay texts."""
    for event in config["dependencies"]:
        for text in ("/etc/hostname", "file:///etc/hostname", '{"path": "/etc/hostname"}'):
            asked = question(
                event["id"], [text] * len(event["inputs"]), event_data={"data": text, "name": text, "size": 1}
            )
            assert ask(port, "POST", ASKED, asked)[0] in (200, 400, 422, 500)
    time.sleep(1)
    assert copied(cache) == []
    assert ask(port, "GET", "/")[0] == 200


def test_addresses_that_the_page_does_not_need_are_not_answered(port, told, cache):
    routes = told["routes"]
    assert ["POST", "/gradio_api/upload"] in routes, "the list is not whole"
    posts = [
        *("/gradio_api/upload", "/gradio_api/run/predict", "/gradio_api/api/predict", "/gradio_api/call/predict"),
        *("/gradio_api/call/v2/predict", "/gradio_api/stream/x", "/gradio_api/reset", "/gradio_api/cancel"),
        *("/gradio_api/component_server", "/gradio_api/process_recording", "/gradio_api/vibe-edit", "/login"),
        *("/gradio_api/upload/", "//gradio_api/upload", "/gradio_api/queue/join/", "/gradio_api/run-history/connect"),
        *(path for method, path in routes if method == "POST" and "{" not in path and path != ASKED),
    ]
    for path in posts:
        body = question(0, [{"path": "/etc/hostname", "meta": {"_type": "gradio.FileData"}}])
        assert ask(port, "POST", path, body)[0] in (404, 405), path
    gets = [
        *(
            "/gradio_api/file=/etc/hostname",
            "/file=/etc/hostname",
            "/gradio_api/file/etc/hostname",
            "/file/etc/hostname",
        ),
        *("/gradio_api/proxy=http://127.0.0.1:1/x", "/gradio_api/proxy=file:///etc/hostname", "/gradio_api/deep_link"),
        *(
            "/gradio_api/upload_progress?upload_id=x",
            "/gradio_api/custom_component/x/y/z/w",
            "/monitoring",
            "/openapi.json",
        ),
        *("/gradio_api/runs", "/gradio_api/dev/reload", "/gradio_api/vibe-code", "/gradio_api/user", "/logout"),
        *("/pwa_icon", "/svelte/x", "/gradio_api/stream/x/0/0/playlist.m3u8"),
    ]
    for path in gets:
        assert ask(port, "GET", path)[0] == 404, path
    for method in ("PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"):
        assert ask(port, method, ASKED)[0] == 405
    assert copied(cache) == []


@pytest.mark.parametrize("folder", ["assets", "static"])
@pytest.mark.parametrize(
    "way",
    ["../" * 12, "%2e%2e/" * 12, "..%2f" * 12, "%252e%252e/" * 12, "..\\" * 12, "/", "%2f", "x/" + "../" * 13, "%00/"],
)
def test_no_path_leads_out_of_the_folders_that_are_served(port, folder, way):
    status, words = ask(port, "GET", f"/{folder}/{way}etc/hostname")
    assert status in (400, 403, 404, 422)
    assert Path("/etc/hostname").read_bytes().strip() not in words


def test_other_pages_cannot_ask(port):
    asked = question(6, [])
    here = f"127.0.0.1:{port}"
    assert ask(port, "POST", ASKED, asked, Origin=f"http://{here}")[0] == 200
    assert ask(port, "POST", ASKED, asked)[0] == 200, "no browser, but a program"
    for origin in (
        "http://evil.example",
        "null",
        "http://127.0.0.1:1",
        f"http://evil.example/{here}",
        f"http://{here}.evil.example",
    ):
        assert ask(port, "POST", ASKED, asked, Origin=origin)[0] == 403, origin
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
        assert ask(port, "POST", ASKED, asked, Content_Type=kind)[0] == 403, kind
    assert ask(port, "POST", ASKED, asked, Sec_Fetch_Site="cross-site")[0] == 403
    for host in ("evil.example", "evil.example:7860", "127.0.0.1.evil.example"):
        assert ask(port, "GET", "/", Host=host)[0] == 400
        assert ask(port, "POST", ASKED, asked, Host=host)[0] == 400


HOSTILE_JSON = {
    "deep": b"[" * 100_000,
    "deep objects": b'{"data":' * 300 + b"1" + b"}" * 300,
    "many values": b'{"data": [' + b"[]," * 400_000 + b"[]]}",
    "nan": question(8, [float("nan")]),
    "infinite": question(8, [float("inf")]),
    "digits": b'{"fn_index": 8, "session_hash": "x", "data": [' + b"9" * 5000 + b"]}",
    "not UTF-8": b'{"data": ["\xff"]}',
    "no object": b"[]",
    "no list": question(8, {"0": 1}),
    "nothing": b"",
    "no number": question("8", []),
    "no session": b'{"data": [], "fn_index": 8}',
    "a list as session": question(8, [], session_hash=["x"]),
    "unknown keys": question(8, [], simple_format=True),
}


@pytest.mark.parametrize("body", HOSTILE_JSON.values(), ids=HOSTILE_JSON)
def test_questions_that_the_page_would_not_ask_are_refused_at_once(port, body):
    began = time.monotonic()
    assert ask(port, "POST", ASKED, body)[0] == 400
    assert time.monotonic() - began < QUICKLY


def test_what_the_page_asks_is_plain():
    picture = "data:image/png;base64," + "A" * 1000
    assert why_refused(question(8, [picture, 0, 1.5, True, None], trigger_id=7, event_data=False)) is None
    assert why_refused(question(2, [], event_data={"name": "a [{,}] b.png", "size": 3, "data": picture})) is None
    assert why_refused(question(2, [], event_data={"name": "[" * MOST_PARTS, "size": 3})) == "too many values"


def test_a_question_that_does_not_arrive_is_given_up(monkeypatch):
    """A body that comes byte by byte, or not at all, holds nothing up but itself."""
    monkeypatch.setattr(serving, "SLOWEST", 0.2)
    statuses = []

    async def never():
        await asyncio.sleep(60)

    async def note(told):
        statuses.append(told.get("status"))

    async def inner(scope, receive, send):
        pytest.fail("passed on")

    headers = [(b"content-type", b"application/json"), (b"content-length", b"5")]
    scope = {"type": "http", "method": "POST", "path": ASKED, "headers": headers}
    asyncio.run(Guarded(inner)(scope, never, note))
    assert statuses[0] == 408

    async def gone():
        return {"type": "http.disconnect"}

    statuses.clear()
    asyncio.run(Guarded(inner)(scope, gone, note))
    assert statuses == []


def test_sockets_are_closed():
    told = []

    async def note(message):
        told.append(message["type"])

    asyncio.run(Guarded(None)({"type": "websocket", "path": "/gradio_api/queue/join", "headers": []}, None, note))
    assert told == ["websocket.close"]


def test_a_slow_client_does_not_hold_others_up(port):
    with socket.create_connection(("127.0.0.1", port)) as slow:
        slow.sendall(
            f"POST {ASKED} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{{".encode()
        )
        assert ask(port, "GET", "/")[0] == 200
