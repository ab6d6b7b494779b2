"""Watch a deployed model while fog comes up: an alarm that may be read after every batch, and accuracy without labels.

    python examples/watch.py

Digits arrive in batches of 40. Half of the batches are like the validation data; then fog comes up and grows denser. The table shows, for
each batch, the evidence of a change, the expected accuracy of the recent digits, and their true accuracy, which the watch does not know.
Takes about ten seconds. Needs `pip install 'molaplace[lab]'`.
"""

import argparse
import math
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

import molaplace as mola

NETWORKS = 5
BATCH = 40
RECENT = 80


def train(seed: int, images, labels) -> nn.Module:
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimiser = torch.optim.AdamW(network.parameters(), lr=1e-2)
    for _ in range(60):
        for rows in torch.randperm(len(images)).split(100):
            optimiser.zero_grad()
            nn.functional.cross_entropy(network(images[rows]), labels[rows]).backward()
            optimiser.step()
    return network.eval()


def fog(images, density: float, generator):
    """Hide the images behind a bright, uneven veil."""
    veil = 0.6 + 0.4 * torch.rand(len(images), 1, 3, 3, generator=generator)
    veil = nn.functional.interpolate(veil, size=images.shape[2:], mode="bicubic", align_corners=True)
    return (1 - density) * images + density * veil


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--output", type=Path, default=Path("example-results"), help="folder for the figure and the watch"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)  # small networks run faster on one thread

    pixels, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
    images = pixels.float().reshape(-1, 1, 8, 8) / 16
    generator = torch.Generator().manual_seed(options.seed)
    order = torch.randperm(len(images), generator=generator)
    train_set, val_set, stream = ((images[rows], labels[rows]) for rows in order.split([597, 400, 800]))
    networks = [train(NETWORKS * options.seed + member, *train_set) for member in range(NETWORKS)]
    posterior = mola.fit(networks, [train_set], [val_set])

    watch = mola.watch(posterior, [val_set], alpha=0.01, recent=RECENT)
    batches = list(zip(stream[0].split(BATCH), stream[1].split(BATCH), strict=True))
    clear = len(batches) // 2
    correct = torch.zeros(0)
    course = []
    alarm_at = None
    print("batch  fog   evidence  expected accuracy  true accuracy")
    for index, (inputs, truth) in enumerate(batches):
        density = max(0, index - clear + 1) / clear * 0.8
        prediction = posterior.predict(fog(inputs, density, generator))
        watch.update(prediction)
        correct = torch.cat([correct, (prediction.label == truth).float()])[-RECENT:]
        expected = watch.accuracy
        known = expected.reason if expected.value is None else f"{expected.value:.1%}"
        evidence = watch.alarm.now / math.log(10)
        course.append((watch.count, evidence, expected.value, float(correct.mean())))
        print(f"{index + 1:5d} {density:4.0%} {f'1e{evidence:+.1f}':>10s} {known:>18s} {float(correct.mean()):14.1%}")
        if watch.alarm and alarm_at is None:
            alarm_at = watch.count
    began = BATCH * clear
    print(
        f"fog came up after {began} digits; the alarm was raised after {alarm_at}; estimated beginning: {watch.alarm.began}"
    )

    # The labels of the last 200 digits arrive.
    positions = torch.arange(watch.count - 200, watch.count)
    watch.update(labels=stream[1][positions], positions=positions)
    labelled = watch.labelled
    print(
        f"accuracy from {labelled.count} labels: {labelled.value:.1%} ({labelled.low:.1%} to {labelled.high:.1%}); "
        f"{'fallen' if labelled.raised else 'not fallen'} below {labelled.least:.1%}"
    )
    watch.save(options.output / "watch")

    counts, evidences, expected_values, true_values = zip(*course, strict=True)
    figure, panels = plt.subplots(2, 1, figsize=(7, 5), sharex=True, layout="constrained")
    panels[0].plot(counts, evidences)
    panels[0].axhline(2, color="grey", linestyle="--")
    panels[0].set(ylabel="evidence, power of ten", ylim=(-1, 12))
    panels[1].plot(counts, [math.nan if value is None else 100 * value for value in expected_values], label="expected")
    panels[1].plot(counts, [100 * value for value in true_values], label="true", linestyle=":")
    panels[1].set(ylabel="accuracy, %", xlabel="digits")
    panels[1].legend()
    for panel in panels:
        panel.axvline(began, color="grey", linewidth=0.8)
    options.output.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.output / "watch.png", dpi=150)
    print(f"wrote {options.output / 'watch.png'}")


if __name__ == "__main__":
    main()
