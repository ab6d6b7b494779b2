"""What the page may ask the server, checked before gradio sees it.

Gradio takes an object with a path, wherever it stands in a question, for a file to be copied to a cache. The page sends pictures as
text and everything else as plain numbers, so that no question needs such an object: whoever sends one is not the page.
"""

from __future__ import annotations

import json
from typing import Any

__all__ = ["ASKED", "READ", "READ_BELOW", "why_refused"]

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
    """NaN and the like, which are no JSON.

    Raises:
        ValueError: always.
    """
    message = f"{word} is no number"
    raise ValueError(message)
