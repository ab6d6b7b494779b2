"""OOD detection: an alarm for outliers with a chosen false-alarm rate.

    python examples/ood_alarm.py

`prediction.ood_score` is higher for outliers. `mola.alarm_threshold` turns this score into an alarm whose false-alarm
rate is, on average, at most 5 % (or 1 %). No outliers are needed to set the threshold. This example checks the false-alarm rate
on new digits and counts the outliers that raise the alarm. Takes about ten seconds. Needs `pip install 'molaplace[lab]'`.
"""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from scipy.stats import betabinom
from sklearn.datasets import load_digits
from torch import nn

import molaplace as mola
from molaplace.demo import natural_patches, rotate, uniform_noise

NETWORKS = 5
RATES = (0.01, 0.05, 0.10)


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


def share_above(scores, threshold: float) -> float:
    return float((scores > threshold).double().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("example-results"), help="folder for the figure")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)  # small networks run faster on one thread

    pixels, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
    images = pixels.float().reshape(-1, 1, 8, 8) / 16
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(options.seed))
    train_set, val_set, test_set = ((images[rows], labels[rows]) for rows in order.split([997, 400, 400]))
    networks = [train(NETWORKS * options.seed + member, *train_set) for member in range(NETWORKS)]
    posterior = mola.fit(networks, [train_set], [val_set])

    # The score does not depend on the prior precision, so the same validation data can be used for tuning and for setting the
    # threshold.
    usual, unseen = (posterior.predict(some[0]).ood_score for some in (val_set, test_set))
    thresholds = {rate: mola.alarm_threshold(usual, rate) for rate in RATES}

    # The guarantee holds on average over validation sets.
    # The table shows a range that contains the rate on 400 test digits 95 % of the time.
    print("False alarms among 400 test digits, with thresholds from 400 validation digits:\n")
    print(f"{'requested':>12}{'threshold':>12}{'realised':>12}   95 % of the time")
    for rate, threshold in thresholds.items():
        alarms = int((len(usual) + 1) * rate)
        low, high = betabinom(len(unseen), alarms, len(usual) + 1 - alarms).interval(0.95)
        realised = share_above(unseen, threshold)
        print(
            f"{100 * rate:10.0f} %{threshold:12.3f}{100 * realised:10.1f} %   "
            f"{100 * low / len(unseen):.1f} % to {100 * high / len(unseen):.1f} %"
        )
    print(f"\nMean over 1000 random splits of the same 800 digits: {', '.join(over_splits(usual, unseen))}.")

    # Count the outliers that raise the alarm. No outliers were used for fitting or tuning.
    test = test_set[0]
    grain = torch.randn(test.shape, generator=torch.Generator().manual_seed(options.seed))
    groups = {
        "test digits": test,
        "photographs": natural_patches(400, 8, seed=options.seed),
        "noise": uniform_noise(400, 8, seed=options.seed),
        "inverted digits": 1 - test,
        "digits rotated by 90°": rotate(test, 90),
        "two digits at once": (test + test.roll(1, 0)).clamp(max=1),
        "digits with a little noise": (test + 0.2 * grain).clamp(0, 1),
    }
    predictions = {name: posterior.predict(some) for name, some in groups.items()}
    print(f"\n{'alarms, at a rate of':28}" + "".join(f"{rate:8.0%}" for rate in RATES) + f"{'confidence':>14}")
    for name, prediction in predictions.items():
        alarms = "".join(f"{share_above(prediction.ood_score, at):8.1%}" for at in thresholds.values())
        print(f"{name:28}{alarms}{prediction.confidence.mean():14.1%}")

    options.output.mkdir(parents=True, exist_ok=True)
    draw(predictions, thresholds[0.05], options.output / "ood_alarm.png")


def over_splits(usual, unseen):
    """Yield, for each requested rate, the false-alarm rate averaged over random splits into validation and test digits."""
    pool, generator = torch.cat([usual, unseen]), torch.Generator().manual_seed(0)
    splits = [pool[torch.randperm(len(pool), generator=generator)].split([400, 400]) for _ in range(1000)]
    for rate in RATES:
        rates = [(new > mola.alarm_threshold(old, rate)).double().mean() for old, new in splits]
        yield f"{float(torch.stack(rates).mean()):.2%} for {rate:.0%}"


def draw(predictions, threshold: float, path: Path) -> None:
    scores = {name: prediction.ood_score for name, prediction in predictions.items()}
    figure, panel = plt.subplots(figsize=(8, 4), layout="constrained")
    panel.boxplot(
        [some.numpy() for some in scores.values()], orientation="horizontal", whis=(5, 95), sym="", widths=0.6
    )
    panel.axvline(threshold, color="tab:red", label="alarm threshold that 5 % of real digits exceed")
    panel.set(yticks=range(1, len(scores) + 1), yticklabels=scores, xlabel="ood_score (whiskers: 5 % and 95 %)")
    panel.invert_yaxis()
    panel.legend(frameon=False, loc="upper left", bbox_to_anchor=(0, 1.12))
    figure.savefig(path, dpi=120)
    print(f"\nWrote {path}")


if __name__ == "__main__":
    main()
