"""Measure the adapters of the suite of questions, one by one, beside the language model without an adapter.

    python benchmarks/questions.py --data FOLDER

Reads the adapters in networks/questions-lora and the held-out questions of OpenBookQA. Replaces the rows of
benchmarks/results/questions.json; its losses during training are those of the run that made the adapters, and stay.
"""

import argparse
import math
from pathlib import Path
from typing import Any

import record
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from molaplace.saving.weights import load_weights
from molaplace_lab.suite import DataOptions, Source
from molaplace_lab.suites.questions import QUESTIONS_LORA

NAME = "questions"
ADAPTERS = Path(__file__).resolve().parent.parent / "networks" / "questions-lora"


def measured(name: str, network: nn.Module, questions: Source) -> dict[str, Any]:
    """Return the accuracy with its standard error, the log loss, and how often each letter is the answer."""
    with torch.inference_mode():
        batches = [(network(ids), labels) for ids, labels in questions.open()]
    logits, labels = (torch.cat(tensors) for tensors in zip(*batches, strict=True))
    accuracy = float((logits.argmax(1) == labels).double().mean())
    return {
        "network": name,
        "accuracy": round(accuracy, 4),
        "accuracy_error": round(math.sqrt(accuracy * (1 - accuracy) / (len(labels) - 1)), 4),
        "nll": round(float(cross_entropy(logits, labels)), 4),
        "answers": torch.bincount(logits.argmax(1), minlength=logits.shape[1]).tolist(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    options = parser.parse_args()
    questions = QUESTIONS_LORA.make_sources(DataOptions(directory=options.data))["validation"]
    network = QUESTIONS_LORA.builder(None)[1]().eval()
    rows = [measured("before training", network, questions)]  # an adapter that was not trained changes nothing
    for number, path in enumerate(sorted(ADAPTERS.iterdir()), 1):
        load_weights(network, path)
        rows.append(measured(f"adapter {number}", network, questions))
    record.write(NAME, {**record.read(NAME), "rows": rows})


if __name__ == "__main__":
    main()
