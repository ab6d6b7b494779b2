"""What the costly fields of a prediction cost, in plain calls, and how close the epistemic share comes with few draws.

Five networks, 1000 classes, 256 inputs. Costs are CPU times of one thread, the least of several interleaved turns. Errors are root
mean squares over inputs and seeds against many draws, beside those of 64 random draws with the entropy of their mean.

    python benchmarks/prediction_fields.py [--features 512] [--turns 9]
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn

import mola
from mola.uncertainty import epistemic_share, spread_draws

NETWORKS, CLASSES, INPUTS = 5, 1000, 256
FIELDS = ("probs", "mutual_information", "ood_score", "logit_mean", "logit_variance", "label", "confidence", "entropy")


def posterior_of(features: int, networks: int, sureness: float = 1.0) -> tuple[mola.MoLA, torch.Tensor]:
    """A posterior over untrained networks, whose logits are scaled, and inputs."""
    torch.manual_seed(0)
    inputs, labels = torch.randn(2000, 64), torch.randint(CLASSES, (2000,))
    nets = [
        nn.Sequential(nn.Linear(64, features), nn.ReLU(), nn.Linear(features, CLASSES, bias=False))
        for _ in range(networks)
    ]
    for net in nets:
        net[2].weight.data.mul_(sureness)
    return mola.fit(nets, [(inputs, labels)], progress=False), inputs[:INPUTS]


def costs(features: int, turns: int) -> None:
    """Print plain calls, and predictions with no costly field read and with all."""
    posterior, inputs = posterior_of(features, NETWORKS)
    work = {
        "plain": lambda: posterior(inputs),
        "none": lambda: posterior.predict(inputs).probs,
        "all": lambda: [getattr(prediction, field) for prediction in [posterior.predict(inputs)] for field in FIELDS],
    }
    least = dict.fromkeys(work, float("inf"))
    for _ in range(turns + 1):
        for name, run in work.items():
            began = time.thread_time()
            run()
            least[name] = min(least[name], time.thread_time() - began)
    print(
        f"{features:5} features: plain call {1e3 * least['plain']:.1f} ms; predict, no costly field read: "
        f"{least['none'] / least['plain']:.2f} calls; all read: {least['all'] / least['plain']:.2f} calls"
    )


@torch.no_grad()
def errors(features: int, sureness: float, precision: float, many: int = 4000) -> None:
    """Print errors of the share for one network."""
    posterior, inputs = posterior_of(features, 1, sureness)
    moments = posterior.with_prior_precision(precision)._moments(inputs[:16])
    one = moments[0]

    def by(count: int, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        mixed, within = torch.zeros_like(one.mean), torch.zeros(len(one.mean))
        for part in torch.randn(count, one.spread.noise_size, generator=generator).split(100):
            probs = torch.softmax(one.mean[:, None] + one.spread.perturb(part), -1)
            mixed += probs.sum(1) / count
            within += torch.special.entr(probs).sum((1, 2)) / count
        return 1 - within / torch.special.entr(mixed).sum(1)

    truth = by(many, 99)
    found = torch.stack([epistemic_share(moments, [1.0], seed) for seed in range(8)]) - truth
    random_ones = torch.stack([by(64, seed) for seed in range(8)]) - truth
    print(
        f"{features:5} features, logits x {sureness:g}, prior precision {precision:g}: share {float(truth.mean()):.3f}; error "
        f"{float(found.square().mean().sqrt()):.4f} with {spread_draws(CLASSES, features)} draws, "
        f"{float(random_ones.square().mean().sqrt()):.4f} with 64 random ones"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--features", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--turns", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for width in options.features:
        costs(width, options.turns)
        for sure in (1.0, 30.0):
            for precision in (100.0, 1.0, 0.01):
                errors(width, sure, precision)
