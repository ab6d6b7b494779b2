"""The explorer's page: a single gradio HTML component whose script calls `Explorer.look` whenever the user changes something.

Plain requests are used instead of gradio's events, because gradio's queue loses a response if a request arrives while the server
is closing the response stream.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

import torch
from jinja2 import Environment, FileSystemLoader
from PIL import Image
from torch import Tensor

from molaplace.cli.explorer.pictures import MAX_SIDE, SLIDERS, change, read_changes, to_url
from molaplace.cli.explorer.subject import Subject
from molaplace.errors import MolaError, importing
from molaplace.likelihoods.base import mixed

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # gradio reads this variable on import
with importing("the explorer", "gradio", "explore"):
    import gradio as gr
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.responses import PlainTextResponse
    from starlette.types import ASGIApp, Receive, Scope, Send

HOST = "127.0.0.1"
INTERFACE = ("/gradio_api/startup-events", "/gradio_api/component_server")
"""Routes of gradio's interface that the page needs: the first is called by `launch`, the second by `server.look` in `page.js`."""

EXPLORED_METHODS = ("MAP", "DE", "MoLA")
ANGLES = range(-180, 181, 15)
SLOW = 0.15
"""Time limit per picture, in seconds. If the networks take longer, the plot of confidence against angle is left out."""

MAX_CLASSES = 12
PAD = 280
PEN = 1.15
"""Side length of the drawing pad in page pixels, and stroke width in pixels of the network input."""


def percent(share: float) -> str:
    """Return a probability as a percentage; only values of exactly 0 and 1 are shown as 0 % and 100 %."""
    if 0.9995 <= share < 1:
        return "> 99.9\N{NO-BREAK SPACE}%"
    return "< 0.1\N{NO-BREAK SPACE}%" if 0 < share < 0.0005 else f"{100 * share:.1f}\N{NO-BREAK SPACE}%"


ASSETS = Path(__file__).with_name("assets")
TEMPLATES = Environment(loader=FileSystemLoader(ASSETS), autoescape=True, trim_blocks=True)
TEMPLATES.filters["percent"] = percent


class PageRoutes:
    """ASGI middleware that refuses requests which the page does not make: gradio's other routes accept files or write to the disk."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on or answer it with status 404."""
        if scope["type"] == "http":
            is_interface = scope["path"].startswith("/gradio_api")
            allowed = scope["path"].rstrip("/") in INTERFACE if is_interface else scope["method"] in ("GET", "HEAD")
            if not allowed:
                await PlainTextResponse("Not Found", status_code=404)(scope, receive, send)
                return
        await self.app(scope, receive, send)


class Explorer:
    """Stateless handler for the page's requests about one subject."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self._lock = threading.Lock()  # several pages may be open at once
        self._predict([subject.examples[0][1]])  # a warm-up, because the first call is slow
        began = time.perf_counter()
        self._predict([subject.examples[0][1]])
        self.has_curve = time.perf_counter() - began < SLOW

    def _predict(self, images: list[Image.Image]) -> Any:
        posterior = self.subject.posterior
        device = next(posterior.networks[0].parameters()).device
        return posterior.predict(self.subject.sight.inputs(images).to(device)).cpu()

    def _methods(self, prediction: Any) -> dict[str, Tensor]:
        # Return the probabilities (n, C) given by the first network, by the mean of all networks, and by the mixture of Laplace
        # approximations.
        by_network = prediction.likelihood.probabilities(prediction.logit_mean)
        by_network = by_network.unbind(1)
        ensemble = mixed(self.subject.posterior.weights, by_network)
        return dict(zip(EXPLORED_METHODS, (by_network[0], ensemble, prediction.probs), strict=True))

    def look(self, request: Mapping[str, Any]) -> str:
        """Return the HTML for a request that contains `picture` as a `data:` URL, the values of the sliders, and `invert`."""
        try:
            if not request.get("picture"):
                return "<article>Draw something, drop a picture, or choose an example.</article>"
            image = self.subject.sight.read(str(request["picture"]))
            with self._lock:
                return TEMPLATES.get_template("answer.html").render(self.evaluate(image, read_changes(request)))
        except (MolaError, TypeError, ValueError, OverflowError, AttributeError) as error:
            return f'<article class="missing">{escape(str(error))}</article>'

    def evaluate(self, image: Image.Image, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Apply `change` to a picture of the right size, and return the values that the page shows for the result."""
        subject = self.subject
        changed = change(image, **changes)
        prediction = self._predict([changed])
        rows = {method: probs[0] for method, probs in self._methods(prediction).items()}
        best = torch.stack(list(rows.values())).amax(0).argsort(descending=True)[:MAX_CLASSES].tolist()
        indices = sorted(best) if len(subject.classes) <= MAX_CLASSES else best
        curves = {}
        if self.has_curve:
            turned = self._predict([change(image, **{**changes, "rotation": angle}) for angle in ANGLES])
            curves = {
                name: list(zip(ANGLES, probs.amax(-1).tolist(), strict=True))
                for name, probs in self._methods(turned).items()
            }
        alone = prediction.logit_mean[0].softmax(-1)
        return {
            "picture": to_url(changed),
            "methods": [(method, *self._chosen(row)) for method, row in rows.items()],
            "classes": [
                (subject.classes[index], {name: float(row[index]) for name, row in rows.items()}) for index in indices
            ],
            "count": len(subject.classes),
            "longest": max(map(len, subject.classes)),
            "networks": [self._chosen(row) for row in alone],
            "epistemic": float(prediction.epistemic[0]),
            "aleatoric": max(0.0, float(prediction.aleatoric[0])),
            "largest": math.log(len(subject.classes)),
            "score": float(prediction.ood_score[0]),
            "reference": subject.reference,
            "distance": None if prediction.distance is None else float(prediction.distance[0]),
            "rotation": changes.get("rotation", 0.0),
            "curves": curves,
        }

    def _chosen(self, row: Tensor) -> tuple[str, float]:
        return self.subject.classes[int(row.argmax())], float(row.max())


def controls(subject: Subject) -> str:
    """Return the HTML that the page shows before the first answer."""
    return TEMPLATES.get_template("page.html").render(
        title=subject.title,
        notes=subject.notes,
        sliders=SLIDERS,
        coloured=subject.sight.shape[0] == 3,
        examples=[(name, to_url(image)) for name, image in subject.examples],
    )


def launch(explorer: Explorer, port: int | None = None) -> tuple[gr.Blocks, str]:
    """Serve the page on this machine only, without blocking; return the page and its address. The caller must close the page.

    If no port is given, the first free port from 7860 upwards is used.
    """

    def look(request: Mapping[str, Any]) -> str:  # not a method, since gradio sets an attribute on the function
        return explorer.look(request)

    with gr.Blocks(title="molaplace explorer", analytics_enabled=False, fill_width=True) as page:
        gr.HTML(
            controls(explorer.subject),  # passed as `value`, because gradio would evaluate a template
            js_on_load=(ASSETS / "page.js").read_text(encoding="utf-8"),
            server_functions=[look],
            apply_default_css=False,
            elem_id="explorer",
            side=MAX_SIDE,
            pen=max(20, round(PAD / max(explorer.subject.sight.shape[1:]) * PEN)),
        )
    fonts = ["system-ui", "sans-serif"]  # use fonts installed on this machine, so that none are downloaded
    _, address, _ = page.launch(
        server_name=HOST,
        server_port=port,
        share=False,
        quiet=True,
        prevent_thread_lock=True,
        theme=gr.themes.Base(primary_hue="emerald", neutral_hue="slate", font=fonts, font_mono=["monospace"]),
        css_paths=ASSETS / "page.css",
        footer_links=[],
        run_history=False,
        ssr_mode=False,
        mcp_server=False,
        pwa=False,
        enable_monitoring=False,
        max_file_size=1,  # the page uploads nothing
        app_kwargs={
            "middleware": [
                # A website whose name is rebound to this machine's address sends its own name as the host.
                Middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"], www_redirect=False),
                Middleware(PageRoutes),
            ]
        },
    )
    return page, address
