"""Change a handwritten digit on a local page, and watch the confidence of one network, the deep ensemble and MoLA.

    pip install 'molaplace[cli]' gradio
    python examples/explore.py

Trains five small networks on scikit-learn's digits and fits a posterior in a few seconds, then serves a page on 127.0.0.1, which only
this machine can reach. For your own networks, replace `digits` (a posterior, the OOD scores of its validation data, and pictures to
start from) and `prepare` (from pictures to inputs).
"""

import argparse
import os

import numpy as np
import pandas as pd
import torch
from PIL import Image, ImageEnhance, ImageFilter
from sklearn.datasets import load_sample_image

import molaplace as mola
from molaplace.demo import load_digits, train_digits

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # gradio reads it on import
import gradio as gr

ANGLES = range(-180, 181, 15)
SIDE = 256
"""Pixels per side of the pictures on the page."""


def digits():
    """Return a posterior, the OOD scores of its validation data, and pictures to start from."""
    data = load_digits()
    posterior = mola.fit(train_digits(data.train), data.train.batches(), data.val.batches(), progress=False)
    test = [data.test.inputs[data.test.labels == digit][0, 0].numpy() for digit in range(10)]
    noise = np.random.default_rng(0).random((8, 8))
    pictures = [Image.fromarray((255 * pixels).astype(np.uint8)) for pixels in (*test, noise)]
    pictures = [picture.resize((SIDE, SIDE), Image.Resampling.NEAREST) for picture in pictures]
    flower = Image.fromarray(load_sample_image("flower.jpg")).resize((SIDE, SIDE))
    return posterior, posterior.predict(data.val.inputs).ood_score, [*pictures, flower]


def change(picture, rotation=0, blur=0, contrast=1):
    """Return a grey picture after the changes of the sliders."""
    picture = ImageEnhance.Contrast(picture.convert("L").resize((SIDE, SIDE))).enhance(contrast)
    return picture.rotate(rotation, Image.Resampling.BILINEAR).filter(ImageFilter.GaussianBlur(blur / 100 * SIDE))


def prepare(pictures):
    """Return the networks' inputs (n, 1, 8, 8)."""
    pixels = [np.asarray(picture.resize((8, 8), Image.Resampling.BOX)) for picture in pictures]
    return torch.from_numpy(np.stack(pixels)).float()[:, None] / 255


def explorer(posterior, val_scores, pictures):
    """Return the page."""
    networks = list(posterior.networks)
    methods = {"MAP": mola.ensemble(networks[:1]), "DE": mola.ensemble(networks), "MoLA": posterior}

    def answer(picture, *changes):
        if picture is None:
            return [gr.skip() for _ in outputs]
        changed = change(picture, *changes)
        prediction = posterior.predict(prepare([changed]))
        share = (val_scores < prediction.ood_score).double().mean()
        text = f"""The OOD score is {float(prediction.ood_score):.2f}, above {float(share):.0%} of the validation scores.
            Epistemic uncertainty: {float(prediction.epistemic):.3f} nats; aleatoric: {float(prediction.aleatoric):.3f}."""
        rotated = prepare([changed, *(change(picture, angle, *changes[1:]) for angle in ANGLES)])
        probs = {name: method(rotated) for name, method in methods.items()}
        labels = [{str(digit): float(p) for digit, p in enumerate(rows[0])} for rows in probs.values()]
        curves = {name: rows[1:].amax(-1).numpy() for name, rows in probs.items()}
        frame = pd.DataFrame({"angle": ANGLES, **curves}).melt("angle", var_name="method", value_name="confidence")
        return changed, *labels, text, frame

    with gr.Blocks(title="molaplace explorer", analytics_enabled=False) as page, gr.Row():
        with gr.Column():
            picture = gr.Image(pictures[8], type="pil", sources=["upload", "clipboard"], format="png")
            gr.Examples([[example] for example in pictures], [picture], examples_per_page=len(pictures))
            sliders = [
                gr.Slider(-180, 180, 0, step=1, label="Rotation (degrees)"),
                gr.Slider(0, 15, 0, step=0.5, label="Blur (% of the side)"),
                gr.Slider(0, 3, 1, step=0.1, label="Contrast (times)"),
            ]
        with gr.Column():
            changed = gr.Image(label="Changed picture", interactive=False)
            labels = [gr.Label(label=name, num_top_classes=3, elem_id=name) for name in methods]
            numbers = gr.Markdown()
            curves = gr.LinePlot(x="angle", y="confidence", color="method", y_lim=[0, 1])
            outputs = [changed, *labels, numbers, curves]
        triggers = [page.load, picture.change, *(slider.change for slider in sliders)]
        gr.on(triggers, answer, [picture, *sliders], outputs, queue=False, trigger_mode="always_last")
    return page


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, help="default: the first free port from 7860 upwards")
    options = parser.parse_args()
    theme = gr.themes.Default(font="sans-serif", font_mono="monospace")  # gradio's own fonts come from another host
    explorer(*digits()).launch(server_name="127.0.0.1", server_port=options.port, theme=theme, run_history=False)
