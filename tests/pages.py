"""A page of a report, read and checked."""

from __future__ import annotations

import re
from html.parser import HTMLParser

VOID = {"meta", "br", "link", "img", "hr", "input"}
LOADING = {"script", "link", "iframe", "object", "base"}


class Page(HTMLParser):
    """A page whose elements are closed in order, whose ids are unique and whose references are met, and that loads nothing."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.open = []
        self.ids = []
        self.tags = []
        self.references = []
        self.text = ""
        self.feed(content)
        self.close()
        assert self.open == []
        assert len(self.ids) == len(set(self.ids))
        assert LOADING.isdisjoint(self.tags)
        assert "://" not in content
        assert "@import" not in content
        for target in [*self.references, *re.findall(r"url\(([^)]*)\)", content)]:
            assert target.startswith("data:image/png;base64,") or target[1:] in self.ids, target

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.open += [] if tag in VOID else [tag]
        for name, value in attrs:
            assert not name.startswith("on"), name
            if name == "id":
                self.ids.append(value)
            elif name.split(":")[-1] in ("href", "src", "srcset", "action", "data"):
                self.references.append(value)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
