"""How sure LeNets are of outliers after a short and after a long training, from the same seed.

    mola train mnist --data DIR --networks 1 --epochs 20 --threads 1 --output SHORT
    mola train mnist --data DIR --networks 1 --epochs 100 --threads 1 --output LONG
    python benchmarks/mnist_training_length.py --data DIR --networks SHORT LONG

Mean confidence of MAP and LLLA (prior precision by validation confidence 0.98, as in the `mnist` suite) for each folder's first
network. A minute, once the networks are there.
"""

import argparse
import json
import warnings
from pathlib import Path

import record
import torch
from safetensors import safe_open

import mola
from mola import metrics
from mola.lab.models import lenet
from mola.lab.suite import DataOptions
from mola.lab.suites.mnist import MNIST
from mola.saving.weights_files import load_weights

SETS = ("test", "fashion-mnist", "kmnist")


def measure(path, sources):
    with safe_open(path, framework="pt") as file:
        identity = json.loads(file.metadata()["identity"])
    network = lenet()
    load_weights(network, path)
    network.eval()
    posterior = mola.fit(network, sources["train"].open(), progress=False)
    posterior = posterior.tune(sources["validation"].open(), mola.ConfidenceThreshold(MNIST.threshold), progress=False)
    row = {"seed": identity["seed"], "epochs": identity["recipe"]["epochs"]}
    row["llla_prior_precision"] = posterior.prior_precision[0]
    for method, predictor in (("map", mola.ensemble(network)), ("llla", posterior)):
        probs = {name: torch.cat([predictor(inputs) for inputs, _ in sources[name].open()]) for name in SETS}
        labels = torch.cat([labels for _, labels in sources["test"].open()])
        row[method] = {"accuracy": metrics.accuracy(probs["test"], labels)}
        row[method] |= {f"confidence, {name}": metrics.mean_confidence(one) for name, one in probs.items()}
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--networks", type=Path, nargs="+", required=True, help="folders that mola train wrote")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mola.MolaWarning)  # that sets are parts of the published ones, that a grid grew
        sources = MNIST.make_sources(DataOptions(directory=options.data))
        rows = [measure(folder / "00.safetensors", sources) for folder in options.networks]
    for row in rows:
        print(json.dumps(row))
    record.write("mnist_training_length", {"environment": record.environment("mola-torch"), "rows": rows})


if __name__ == "__main__":
    main()
