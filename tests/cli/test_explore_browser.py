"""The explorer's page in a real browser: a walk through what a user does by mouse, keyboard, finger and file.

Debian's chromium is driven without a window. The page must show what the same networks predict in this process.
"""

from __future__ import annotations

import base64
import importlib.util
import io
import json
import os
import shutil
import tempfile
from contextlib import contextmanager
from urllib.parse import urlsplit

import numpy as np
import pytest
from PIL import Image

from tests.cli.test_explore import PATIENCE, noise, saved, serving

pytestmark = [pytest.mark.browser, pytest.mark.usefixtures("_in_workspace")]


@pytest.fixture(scope="module", autouse=True)
def _needs_a_browser():
    missing = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    missing += [name for name in ("gradio", "selenium") if importlib.util.find_spec(name) is None]
    if missing:
        message = f"NOT INSTALLED: {', '.join(missing)}. The explorer's page was not tested."
        pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)


@contextmanager
def chromium():
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = shutil.which("chromium")
        quiet = ("no-first-run", "disable-background-networking", "disable-component-update", "disable-sync")
        for argument in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", *quiet):
            options.add_argument(f"--{argument}")
        options.add_argument(f"--user-data-dir={profile}")
        options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
        driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
        try:
            driver.set_page_load_timeout(PATIENCE)
            yield driver
        finally:
            driver.quit()


class Page:
    """What a user sees and does."""

    def __init__(self, driver, address, explorer):
        self.driver = driver
        self.address = address
        self.explorer = explorer

    def open(self, width, *, touch=False):
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": touch}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.driver.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": touch})
        self.driver.get(self.address)
        self.shows(0)

    def run(self, script, *arguments):
        return self.driver.execute_script(script, *arguments)

    def wait(self, holds, words):
        from selenium.webdriver.support.ui import WebDriverWait

        try:
            WebDriverWait(self.driver, PATIENCE, poll_frequency=0.1).until(lambda _: holds())
        except Exception:
            pytest.fail(f"expected {words}; the page shows {self.text('.answer')} {self.text('.note')}")

    def text(self, selector):
        return self.run("return document.querySelector(arguments[0])?.innerText ?? ''", selector)

    def find(self, selector, index=0):
        from selenium.webdriver.common.by import By

        return self.driver.find_elements(By.CSS_SELECTOR, selector)[index]

    def shows(self, picture, **changes):
        """Wait until the page shows what is predicted for a picture, or for the example of that number."""
        from molaplace.cli.explorer.page import percent

        image = self.explorer.subject.examples[picture][1] if isinstance(picture, int) else picture
        expected = [percent(share) for _, _, share in self.explorer.evaluate(image, changes)["methods"]]
        self.wait(lambda: self.confidences() == expected, expected)

    def confidences(self):
        return self.run("return [...document.querySelectorAll('[data-confidence]')].map(element => element.innerText)")

    def notes(self, words):
        self.wait(lambda: words in self.text(".note"), words)

    def drop(self, path):
        """Drop a file on the pad, as from a file manager."""
        box = self.run(
            "const b = document.querySelector('canvas').getBoundingClientRect(); return [b.x + 50, b.y + 50]"
        )
        data = {"items": [], "files": [str(path)], "dragOperationsMask": 1}
        for kind in ("dragEnter", "dragOver", "drop"):
            event = {"type": kind, "x": box[0], "y": box[1], "data": data}
            self.driver.execute_cdp_cmd("Input.dispatchDragEvent", event)

    def drawn(self):
        """What is on the pad, as the networks take it."""
        address = self.run("return document.querySelector('canvas').toDataURL('image/png')")
        return Image.open(io.BytesIO(base64.b64decode(address.partition(",")[2]))).convert("RGB")


@pytest.fixture(scope="module")
def page(fitted, workspace):
    from molaplace.cli.explorer.page import Explorer
    from molaplace.cli.explorer.subject import folder_subject

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(workspace.root)
        patch.syspath_prepend(str(workspace.root))
        explorer = Explorer(folder_subject(fitted))
    with serving(fitted.folder, workspace.root) as address, chromium() as driver:
        yield Page(driver, address, explorer)


def test_a_walk_through_the_page(page, tmp_path):
    from selenium.webdriver import ActionChains, Keys

    page.open(1280)
    page.find(".examples button", 3).click()
    page.shows(3)

    # Sliders, by keyboard: each key press is a change of its own, and the last must be shown.
    rotation = page.find("[name=rotation]")
    strength = page.find("[name=noise]")
    rotation.send_keys(*[Keys.ARROW_RIGHT] * 30)
    page.shows(3, rotation=30.0)
    strength.send_keys(Keys.END)
    page.shows(3, rotation=30.0, noise=1.0)
    page.find(".invert").click()
    page.shows(3, rotation=30.0, noise=1.0, invert=True)
    page.find(".reset").click()
    page.shows(3)
    assert rotation.get_property("value") == "0"

    # A drawing.
    canvas = page.find("canvas")
    side = canvas.size["width"]
    stroke = ActionChains(page.driver, duration=30).move_to_element_with_offset(canvas, 0, round(-side * 0.4))
    stroke.click_and_hold().move_by_offset(0, round(side * 0.4)).move_by_offset(
        0, round(side * 0.4)
    ).release().perform()
    ink = np.asarray(page.drawn().convert("L")) > 128
    assert 0.05 < ink.mean() < 0.4  # a stroke, and not the example that was there before
    page.shows(page.explorer.subject.sight.fit(page.drawn()))
    page.find(".clear").click()
    page.wait(lambda: "Draw something" in page.text(".answer"), "an empty pad")

    # Files: dropped, chosen, too large for the page, and no images.
    image = noise((3, 6, 6), 7)
    (tmp_path / "own.png").write_bytes(saved(image))
    page.drop(tmp_path / "own.png")
    page.notes("own.png, 6 x 6")
    page.shows(image)
    (tmp_path / "photograph.bmp").write_bytes(saved(noise((3, 90, 120)), "BMP"))
    page.run("document.querySelector('.file').hidden = false")
    page.find(".file").send_keys(str(tmp_path / "photograph.bmp"))
    page.notes("photograph.bmp, 120 x 90")
    page.shows(page.explorer.subject.sight.fit(noise((3, 90, 120))))
    (tmp_path / "large.png").write_bytes(saved(Image.new("RGB", (3000, 3000), (200, 90, 80))))
    page.drop(tmp_path / "large.png")
    page.notes("large.png, 3000 x 3000")
    page.shows(Image.new("RGB", (6, 6), (200, 90, 80)))
    for name, data in (("broken.png", saved(image)[:40]), ("<b>bold.txt", b"once upon a time"), ("empty.png", b"")):
        (tmp_path / name).write_bytes(data)
        page.drop(tmp_path / name)
        page.notes(f"{name} is not an image")
        assert page.run("return document.querySelectorAll('.note b').length") == 0
    page.shows(Image.new("RGB", (6, 6), (200, 90, 80)))

    # Nothing went to another host, and nothing failed in the browser.
    requests = [json.loads(entry["message"])["message"] for entry in page.driver.get_log("performance")]
    addresses = {
        urlsplit(request["params"]["request"]["url"])
        for request in requests
        if request["method"] == "Network.requestWillBeSent"
    }
    assert {address.netloc for address in addresses if address.scheme.startswith("http")} == {
        urlsplit(page.address).netloc
    }
    assert [entry["message"] for entry in page.driver.get_log("browser") if entry["level"] == "SEVERE"] == []


def test_a_phone_shows_all_of_it(page):
    page.open(390, touch=True)
    page.find(".examples button", 10).click()
    page.shows(10)
    assert page.run("return document.documentElement.scrollWidth") <= 390
    outside = page.run(
        "return [...document.querySelectorAll('#explorer *')].filter(element => { const b = element.getBoundingClientRect();"
        " return b.width > 0 && (b.left < -1 || b.right > 391) }).map(element => element.outerHTML.slice(0, 80))"
    )
    assert outside == []
    bottom = "return [document.querySelector('.confidence').getBoundingClientRect().bottom, innerHeight]"
    assert abs(np.subtract(*page.run(bottom))) <= 1  # in sight while a slider is moved
