"""The server of the page: serves this machine until it is stopped, fetches nothing from another host and writes nothing to disk.

Requests are checked before gradio sees them. Gradio takes any object with a path in a request for a file to be copied to a
cache. The page sends pictures as text and everything else as plain numbers, so a request with such an object is not the page's.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from mola.app.explore.opinions import Explorer
from mola.app.explore.pictures import LARGEST_FILE
from mola.errors import OptionError

LARGEST_REQUEST = LARGEST_FILE * 4 // 3 + 2**20
"""Bytes: a picture as text, and what comes along with it."""

POLICY = (
    "default-src 'self'; img-src 'self' data: blob:; style-src 'self' 'unsafe-inline'; font-src 'self' data:; "
    "script-src 'self' 'unsafe-inline' 'unsafe-eval'; connect-src 'self'; worker-src 'self' blob:; frame-ancestors 'self'; "
    "form-action 'self'; base-uri 'self'"
)
"""What a browser may load: from here alone. Gradio's own page needs inline and evaluated scripts."""

SLOWEST = 60
"""Seconds that a question may take to arrive."""

PARTING = 1
"""Seconds that open pages are given when the server is stopped."""

ASKED = "/gradio_api/queue/join"
"""Where questions go."""

READ = (
    "/",
    "/config",
    "/favicon.ico",
    "/gradio_api/queue/data",
    "/gradio_api/startup-events",
    "/manifest.json",
    "/robots.txt",
    "/theme.css",
)
"""Addresses that the page reads."""

READ_BELOW = ("/assets/", "/static/", "/gradio_api/heartbeat/")
"""Folders of them: scripts, styles and fonts of gradio's own; and a sign of life."""

KEYS = {"data", "event_data", "fn_index", "trigger_id", "session_hash"}
"""Of a question."""

EVENT_KEYS = {"data", "index", "name", "size"}
"""Of what comes with an event."""

MOST_PARTS = 1000
"""Signs that begin or part values: the page sends a dozen, and a file's name may hold some."""


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens, so that a port that is taken is told before any work.

    Args:
        host: such as 127.0.0.1.
        port: 0 takes a free one.

    Returns:
        The socket.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        opened = socket.socket(found[0], socket.SOCK_STREAM)
    except OSError as error:
        raise OptionError(f"--host {host} is no address of this machine: {error.strerror or error}.") from error
    try:
        if os.name == "posix":  # elsewhere it would let two servers share a port
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind(found[4])
        opened.listen(128)
    except (OSError, OverflowError) as error:
        opened.close()
        taken = getattr(error, "errno", None) == errno.EADDRINUSE
        raise OptionError(
            f"port {port} of {host} is taken, perhaps by another explorer: choose another with --port."
            if taken
            else f"cannot listen on port {port} of {host}: {getattr(error, 'strerror', None) or error}."
        ) from error
    return opened


def make_app(explorer: Explorer, *, everyone: bool = False) -> Any:
    """The page as a web application.

    Args:
        explorer: answers.
        everyone: whether other machines may ask; otherwise only pages of this machine's own address are served, so that a foreign
            page cannot pass itself off as one.

    Returns:
        An ASGI application.
    """
    from mola.app.explore.page import mount

    app = mount(explorer)
    if not everyone:
        from starlette.middleware.trustedhost import TrustedHostMiddleware

        app.add_middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost", "[::1]"])
    return Guarded(app)


class Guarded:
    """An application that passes on what the page asks, and nothing else, and tells browsers to load nothing from elsewhere.

    Gradio answers at sixty addresses, some of which read, write or fetch files; the page needs a handful.

    Args:
        app: an ASGI application.
    """

    def __init__(self, app: Callable[..., Any]) -> None:
        self.app = app

    async def __call__(self, scope: dict[str, Any], receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
        """Answer a request."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        headers, method = dict(scope["headers"]), scope.get("method", "GET")
        if scope["path"] not in (*READ, ASKED) and not scope["path"].startswith(READ_BELOW):
            await refuse(send, 404, b"pictures come with the question, and nothing is kept")
            return
        if method not in ("GET", "HEAD") and (method, scope["path"]) != ("POST", ASKED):
            await refuse(send, 405, b"pages are read, and questions are posted")
            return
        length = headers.get(b"content-length", b"0")
        if (
            not length.isdigit()
            or int(length) > LARGEST_REQUEST
            or b"chunked" in headers.get(b"transfer-encoding", b"").lower()
        ):
            await refuse(send, 413, b"too large")
            return
        if method == "POST":
            if not _from_this_page(headers):
                await refuse(send, 403, b"questions come from this page alone")
                return
            try:
                body = await asyncio.wait_for(whole_body(receive), SLOWEST)
            except TimeoutError:
                await refuse(send, 408, b"too slow")
                return
            if body is None:
                return  # the asker has gone
            words = why_refused(body)
            if words is not None:
                await refuse(send, 400, words.encode())
                return
            receive = _once(body, receive)

        async def sent(message: Any) -> None:
            if message["type"] == "http.response.start":
                own = [(b"content-security-policy", POLICY.encode()), (b"x-content-type-options", b"nosniff")]
                message = {
                    **message,
                    "headers": [*message.get("headers", []), *own, (b"referrer-policy", b"no-referrer")],
                }
            await send(message)

        await self.app(scope, receive, sent)


def _from_this_page(headers: dict[bytes, bytes]) -> bool:
    # Other pages cannot send JSON unasked.
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    origin = headers.get(b"origin")
    if origin is not None and urlsplit(origin.decode("latin-1")).netloc.encode("latin-1") != headers.get(b"host"):
        return False
    return kind == b"application/json" and headers.get(b"sec-fetch-site", b"same-origin") in (b"same-origin", b"none")


async def whole_body(receive: Callable[[], Any]) -> bytes | None:
    """A request's body; None if the asker goes away meanwhile."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def _once(body: bytes, receive: Callable[[], Any]) -> Callable[[], Any]:
    given = False

    async def received() -> Any:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return received


async def refuse(send: Callable[[Any], Any], status: int, words: bytes) -> None:
    """Answer with a status and a few words."""
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"text/plain")]})
    await send({"type": "http.response.body", "body": words})


def serve(app: Any, listening: socket.socket, ready: Callable[[], None] = lambda: None) -> None:
    """Serve until the user stops it, which is no error.

    Args:
        app: an ASGI application.
        listening: where.
        ready: called when pages are served.
    """
    import uvicorn

    # Its complaints about pages that are still open when it is stopped are nobody's concern.
    settings = uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=PARTING, lifespan="on")
    server = uvicorn.Server(settings)
    start = server.startup

    async def startup(sockets: list[socket.socket] | None = None) -> None:
        await start(sockets)
        ready()

    server.startup = startup
    try:
        server.run(sockets=[listening])
    except KeyboardInterrupt:
        pass
    finally:
        listening.close()


def why_refused(body: bytes) -> str | None:
    """Why a question is not passed on; None if it is plain.

    Args:
        body: of the request.

    Returns:
        A few words.
    """
    # Before it is read: a long list of empty lists takes a hundred times the memory of its text.
    if sum(body.count(sign) for sign in (b"[", b"{", b",")) > MOST_PARTS:
        return "too many values"
    try:
        question = json.loads(body, parse_constant=_refuse)
    except (ValueError, RecursionError):  # text that is not UTF-8, and numbers of thousands of digits, are ValueErrors
        return "expected a question as JSON"
    if not isinstance(question, dict) or not question.keys() <= KEYS:
        return f"expected an object with {', '.join(sorted(KEYS))}"
    if not isinstance(question.get("fn_index"), int) or not isinstance(question.get("session_hash"), str):
        return "expected the number of an event and the name of a session"
    data, event = question.get("data"), question.get("event_data")
    if not isinstance(data, list) or not all(map(_is_plain, data)):
        return "expected data of texts and numbers alone"
    if isinstance(event, dict):
        if not event.keys() <= EVENT_KEYS or not all(map(_is_plain, event.values())):
            return f"expected event_data with {', '.join(sorted(EVENT_KEYS))}, of texts and numbers alone"
    elif not _is_plain(event):
        return "expected event_data of texts and numbers alone"
    return None if _is_plain(question.get("trigger_id")) else "expected the number of a trigger"


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (str, int, float))


def _refuse(word: str) -> Any:
    raise ValueError(f"{word} is no number")
