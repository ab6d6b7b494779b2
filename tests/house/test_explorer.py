"""The example of a page to explore a posterior, started as users start it and clicked in Debian's chromium."""

import importlib.util
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch

import molaplace as mola

pytestmark = pytest.mark.browser

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "explore.py"
PATIENCE = 60
"""Seconds that the page may take on a busy machine."""


@pytest.fixture(scope="module", autouse=True)
def _needs_a_browser():
    missing = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    missing += [name for name in ("gradio", "selenium") if importlib.util.find_spec(name) is None]
    if missing:
        message = f"NOT INSTALLED: {', '.join(missing)}. examples/explore.py was not tested."
        pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)


@contextmanager
def serving(folder):
    """`python examples/explore.py` in a process of its own: its address."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "GRADIO_TEMP_DIR": str(folder)}
    command = [sys.executable, "-u", str(EXAMPLE)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=folder, env=environment) as server:
        try:
            yield next(match[0] for line in server.stdout if (match := re.search(r"http://127\.0\.0\.1:\d+", line)))
        finally:
            server.terminate()


@contextmanager
def chromium(profile):
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

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
        driver.set_window_size(1200, 1500)
        yield driver
    finally:
        driver.quit()


def test_the_page_shows_what_the_predictors_return(tmp_path):
    from selenium.webdriver import Keys
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    torch.set_default_dtype(torch.float32)
    example = runpy.run_path(str(EXAMPLE))
    posterior, _, pictures = example["digits"]()
    networks = list(posterior.networks)
    methods = {"MAP": mola.ensemble(networks[:1]), "DE": mola.ensemble(networks), "MoLA": posterior}

    def expect(picture, **changes):
        """Wait until the page shows the probabilities of a picture."""
        inputs = example["prepare"]([example["change"](picture, **changes)])
        expected = {name: float(method(inputs).max()) for name, method in methods.items()}
        script = "return [...arguments].map(name => document.querySelector(`#${name} meter`)?.value ?? -1)"

        def holds(_):
            return driver.execute_script(script, *methods) == pytest.approx(list(expected.values()), abs=1e-4)

        WebDriverWait(driver, PATIENCE, 0.2).until(holds, f"expected {expected} for {changes}")

    with serving(tmp_path) as address, chromium(tmp_path / "profile") as driver:
        driver.get(address)
        expect(pictures[8])
        rotation, blur, _ = driver.find_elements(By.CSS_SELECTOR, "input[type=range]")
        rotation.send_keys(*[Keys.ARROW_RIGHT] * 30)
        expect(pictures[8], rotation=30)
        blur.send_keys(Keys.END)
        expect(pictures[8], rotation=30, blur=15)
        driver.find_elements(By.CSS_SELECTOR, ".gallery-item")[-1].click()
        expect(pictures[-1], rotation=30, blur=15)
        assert "validation scores" in driver.find_element(By.TAG_NAME, "body").text
        messages = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
        sent = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
        assert {urlsplit(url).netloc for url in sent if url.startswith("http")} == {urlsplit(address).netloc}
        assert [entry["message"] for entry in driver.get_log("browser") if entry["level"] == "SEVERE"] == []
