"""The explorer without a browser: pictures and sliders, answers, folders, the command, and a hostile client of its server."""

from __future__ import annotations

import base64
import http.client
import io
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tomllib
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import molaplace as mola
from molaplace.cli.explorer.pictures import PREFIX, Sight, change, to_image, to_url
from molaplace.cli.explorer.subject import EXAMPLES, Reference, Subject, folder_subject, ood_examples
from molaplace.cli.folder import open_posterior
from molaplace.cli.options import to_toml
from molaplace.data.preprocessing import Preprocessing
from molaplace.errors import DataError, OptionError
from molaplace.images import NORMALISATIONS
from tests.closeness import assert_close
from tests.pages import Page
from tests.workspace import CLASSES, job_for, run_fit, with_job

pytest.importorskip("gradio", reason="NO GRADIO: pip install 'molaplace[explore]' to test the explorer.")
from molaplace.cli.explorer.page import EXPLORED_METHODS, Explorer, controls

PATIENCE = 120
"""Seconds that a server may take on a busy machine."""

pytestmark = pytest.mark.usefixtures("_in_workspace")


def noise(shape, seed=0):
    return to_image(torch.randint(256, shape, generator=torch.Generator().manual_seed(seed)).to(torch.uint8))


def make_subject(shape=(1, 8, 8), classes=("ape", "bee", "cow", "doe"), **changes):
    """Untrained networks, fitted to noise."""
    torch.manual_seed(1)
    networks = [
        nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 16), nn.ReLU(), nn.Linear(16, len(classes))).float()
        for _ in range(3)
    ]
    sight = Sight(shape, Preprocessing(mean=(0.3,) * shape[0], std=(0.6,) * shape[0]))
    inputs = sight.inputs([noise(shape, seed) for seed in range(40)])
    posterior = mola.fit(networks, [(inputs, torch.arange(40) % len(classes))], weights=[0.5, 0.3, 0.2])
    reference = Reference(posterior.predict(inputs).ood_score, 1.0, 40)
    subject = Subject("nets", posterior, tuple(classes), sight, tuple(ood_examples(sight)), reference)
    return replace(subject, **changes)


@pytest.fixture(params=[(1, 8, 8), (3, 12, 20)], ids=["digits", "wide"])
def shape(request):
    return request.param


# --- pictures -------------------------------------------------------------------------------------------------------------


def test_changes_are_what_they_are_called():
    image = noise((1, 16, 16))
    turned = np.asarray(change(image, rotation=90), dtype=int)
    assert np.abs(turned - np.rot90(np.asarray(image))).max() <= 1  # counter-clockwise, up to rounding
    grey = Image.new("L", (200, 200), 100)
    assert change(grey, blur=5).getextrema() == (100, 100)
    assert np.asarray(change(grey, noise=0.05), dtype=float).std() == pytest.approx(0.05 * 255, rel=0.02)
    disc = Image.fromarray(np.uint8(np.hypot(*np.indices((64, 64)) - 31.5) < 12) * 255)
    for scale in (0.25, 0.5, 0.9, 1.5, 2.5):
        assert np.asarray(change(disc, scale=scale)).sum() / np.asarray(disc).sum() == pytest.approx(scale**2, rel=0.03)
    assert change(grey, brightness=0.2).getextrema() == (151, 151)


def encoded(data):
    return PREFIX + base64.b64encode(data).decode()


def saved(image, form="PNG"):
    buffer = io.BytesIO()
    image.save(buffer, format=form)
    return buffer.getvalue()


HOSTILE = {
    "no address": "/etc/hostname",
    "no base64": PREFIX + "@@@",
    "empty": PREFIX,
    "another format": encoded(saved(Image.new("L", (8, 8)), "TIFF")),
    "cut off": encoded(saved(noise((1, 60, 60)))[:-900]),
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_what_is_no_picture_is_refused(text):
    with pytest.raises(DataError):
        make_subject().sight.read(text)


def test_pictures_reach_the_networks_as_the_training_data_did(shape):
    sight = make_subject(shape).sight
    image = noise(shape)
    assert sight.read(to_url(image)).tobytes() == image.tobytes()
    normalisation = NORMALISATIONS["cifar10"]
    photograph = noise((3, 40, 60))
    preprocessing = Preprocessing(resize=16, crop=12, mode="RGB", mean=normalisation.mean, std=normalisation.std)
    sight = Sight((3, 12, 12), preprocessing)
    assert torch.equal(sight.inputs([sight.fit(photograph)])[0], normalisation(preprocessing.prepare(photograph)))
    assert sight.images(sight.inputs([sight.fit(photograph)]))[0].tobytes() == sight.fit(photograph).tobytes()
    assert Sight((1, 10, 20), Preprocessing()).fit(photograph).size == (20, 10)


@pytest.mark.parametrize("wrong", [(8,), (2, 8, 8), (1, 8, 2000)])
def test_inputs_that_are_no_pictures_are_refused(wrong):
    with pytest.raises(OptionError, match="molaplace predict"):
        Sight(wrong, Preprocessing())


# --- answers --------------------------------------------------------------------------------------------------------------


def test_the_answer_is_what_the_public_predictors_return(shape):
    subject = make_subject(shape)
    networks = list(subject.posterior.networks)
    posterior = subject.posterior.with_distance_exponent(2.0)
    explorer = Explorer(replace(subject, posterior=posterior))
    image = noise(shape, 5)
    changes = {"rotation": 30.0, "noise": 0.1}
    values = explorer.evaluate(image, changes)
    inputs = subject.sight.inputs([change(image, **changes)])
    predictors = (mola.ensemble(networks[:1]), mola.ensemble(networks, posterior.weights), posterior)
    for index, (method, predictor) in enumerate(zip(EXPLORED_METHODS, predictors, strict=True)):
        probs = predictor(inputs)[0]
        assert_close([shares[method] for _, shares in values["classes"]], probs)
        assert values["methods"][index][:2] == (method, subject.classes[int(probs.argmax())])
        if explorer.has_curve:
            assert_close(dict(values["curves"][method])[30], probs.max())
    prediction = posterior.predict(inputs)
    assert_close(values["epistemic"], prediction.epistemic[0], "difference", scale=1.0)
    assert_close(values["score"], prediction.ood_score[0], "difference", scale=1.0)
    assert_close(values["distance"], prediction.distance[0])
    for (_, share), network in zip(values["networks"], networks, strict=True):
        assert_close(share, mola.ensemble([network])(inputs).max())


def test_names_of_strangers_stay_text():
    evil = '<script>alert(1)</script>"><img src=x onerror=alert(2)>'
    subject = make_subject(classes=(evil, "b'\"&<", "c", "d"), title=evil, notes=(evil,))
    explorer = Explorer(subject)
    pages = [controls(replace(subject, examples=((evil, noise((1, 8, 8))),)))]
    pages += [explorer.look({"picture": to_url(noise((1, 8, 8), seed))}) for seed in range(4)]
    for html in (
        *pages,
        explorer.look({"picture": evil}),
        explorer.look({"picture": to_url(noise((1, 8, 8))), "noise": evil}),
    ):
        Page(html)


# --- folders --------------------------------------------------------------------------------------------------------------


def changed(folder, to, **changes):
    """A copy of a posterior's folder with another job."""
    shutil.copytree(folder, to)
    document = tomllib.loads((to / "job.toml").read_text())
    for path, value in changes.items():
        section, name = path.split("__")
        document[section][name] = value
    return open_posterior(with_job(to, to_toml(document)), trust=True)


def test_a_folder_is_opened_with_all_that_the_page_needs(fitted, workspace):
    subject = folder_subject(fitted)
    assert (subject.classes, subject.sight.shape, subject.reference.count) == (CLASSES, (3, 6, 6), 18)
    pixels, _ = workspace.pixels("val")
    inputs, _ = workspace.inputs("val")
    images = [image for name, image in subject.examples if name == "from val"]
    assert len(images) == EXAMPLES
    assert {image.tobytes() for image in images} <= {to_image(image).tobytes() for image in pixels}
    values = Explorer(subject).evaluate(to_image(pixels[3]), {})
    assert_close(values["methods"][2][2], mola.load(fitted.folder, workspace.networks())(inputs[3:4]).max())


def test_what_is_missing_is_noted(fitted, workspace, tmp_path):
    subject = folder_subject(changed(fitted.folder, tmp_path / "moved", options__val="gone/away"))
    assert subject.reference.count == 18
    assert "gone/away" in subject.notes[0]
    assert [name for name, _ in subject.examples] == ["noise", "checks", "a flower"]
    (tmp_path / "gone.csv").write_text("path,label\ngone.png,cat\n")
    subject = folder_subject(changed(fitted.folder, tmp_path / "unusable", options__val=str(tmp_path / "gone.csv")))
    assert "no input is usable" in subject.notes[0]
    run_fit(job_for(workspace, val=None, rule="evidence"), tmp_path / "plain")
    plain = folder_subject(open_posterior(tmp_path / "plain", trust=True))
    assert plain.reference is None
    assert "without validation data" in plain.notes[0]


# --- the command and its server -------------------------------------------------------------------------------------------


@contextmanager
def serving(folder, root):
    """`molaplace explore` in a process of its own: its address; at the end, Ctrl-C must stop it quietly."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *sys.path]), "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-u",
        "-m",
        "molaplace",
        "explore",
        str(folder),
        "--trust",
        "--no-browser",
    ]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=root,
        env=environment,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored where tests run in the background
    ) as server:
        try:
            lines = iter(server.stdout.readline, "")
            yield next(match[0] for line in lines if (match := re.search(r"http://[\d.:]+/", line)))
            server.send_signal(signal.SIGINT)
            _, errors = server.communicate(timeout=PATIENCE)
            assert server.returncode == 0, errors
            assert "KeyboardInterrupt" not in errors
        finally:
            server.kill()


@pytest.fixture(scope="module")
def address(fitted, workspace):
    with serving(fitted.folder, workspace.root) as server_address:
        yield server_address


def test_only_this_machine_reaches_the_server(address):
    assert address.startswith("http://127.0.0.1:")
    port = int(address.rpartition(":")[2].strip("/"))
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    listening = [line[1] for line in lines if line[3] == "0A" and line[1].endswith(f":{port:04X}")]
    assert listening == [f"0100007F:{port:04X}"]


def status(address, path="/", method="GET", host=None, body=None):
    headers = {"Host": host or urlsplit(address).netloc, "Content-Type": "application/json"}
    with closing(http.client.HTTPConnection(urlsplit(address).netloc, timeout=PATIENCE)) as connection:
        connection.request(method, path, body, headers)
        with connection.getresponse() as response:
            return response.status


LOOK = "/gradio_api/component_server/"


def test_other_hosts_are_refused(address):
    """A website may resolve its own name to this machine (DNS rebinding); the browser then sends that name."""
    for path in ("/", "/config", "/theme.css", LOOK):
        for host in ("evil.example", "evil.example:7860", "127.0.0.1.evil.example", "[::1]"):
            assert status(address, path, host=host) == 400
    assert status(address) == status(address, host="localhost") == status(address, "/config") == 200


def test_routes_that_the_page_does_not_need_are_refused(address):
    request = {"data": {}, "component_id": 1, "fn_name": "look", "session_hash": "a"}
    assert status(address, LOOK, "POST", body=json.dumps(request)) == 200
    refused = [
        ("GET", "/gradio_api/deep_link?session_hash=a"),
        ("GET", "/gradio_api/file=/etc/hostname"),
        ("POST", "/login"),
    ]
    refused += [
        ("POST", f"/gradio_api/{name}")
        for name in ("upload", "queue/join", "run/look", "process_recording", "vibe-edit")
    ]
    assert {status(address, path, method, body="{}") for method, path in refused} == {404}


def test_mistakes_are_one_line(mola_command, tmp_path, fitted):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for arguments, words in (
            ([tmp_path, "--no-browser"], "contains no posterior"),
            ([fitted.folder, "--port", port, "--no-browser", "--quiet"], f"port {port}"),
        ):
            code, _, err = mola_command("explore", *arguments)
            error = err.splitlines()[-1]
            assert code == 1
            assert error.startswith("molaplace: ")
            assert words in error
