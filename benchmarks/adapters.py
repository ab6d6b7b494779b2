"""Measure the memory and the CPU time of K adapters on one backbone, beside K separate models and one.

    python benchmarks/adapters.py --data DATA [--networks FOLDER] [--inputs 512]

The networks are sentence encoders (MiniLM) with LoRA adapters, trained on CLINC150. Each case runs in a separate process: the memory
of the networks is that of their tensors, and the resident memory is the peak during a fit and a prediction, minus the memory before the
networks were loaded. All cases read the same requests.

The exit status is 1 if K adapters need more than 1.2 times the memory of one network, or if their probabilities differ from those of K
models by more than 1e-6. Writes benchmarks/results/adapters.json.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import record
import torch
from memory import peak_of, resident
from torch import nn

import molaplace as mola
from molaplace.saving.weights import load_weights, read_state
from molaplace_lab.adapters import ENCODER, adapted_encoder
from molaplace_lab.data.clinc150 import load_clinc150

CLASSES = 150
COUNT = 5
BATCH = 64
CASES = ("one model", "adapters", "models")
MEMORY_LIMIT = 1.2
DIFFERENCE_LIMIT = 1e-6


def networks_of(case: str, files: list[Path]) -> list[nn.Module]:
    """Return one model, views of one backbone, or as many models as files."""
    if case != "adapters":
        models = []
        for file in files if case == "models" else files[:1]:
            models.append(adapted_encoder(CLASSES))
            load_weights(models[-1], file)
        return [model.eval() for model in models]
    from peft import set_peft_model_state_dict

    model: Any = adapted_encoder(CLASSES).model
    load: Callable[..., Any] = set_peft_model_state_dict
    names = ["default", *(file.stem for file in files[1:])]
    for name, file in zip(names, files, strict=True):
        if name not in model.peft_config:
            model.add_adapter(name, model.peft_config["default"])
        load(model, read_state(file), adapter_name=name)
    return mola.adapters(model.eval(), names)


def bytes_of(networks: list[nn.Module]) -> int:
    """Return the number of bytes of the networks' tensors; tensors that networks share count once."""
    storages = {}
    for network in networks:
        for tensor in [*network.parameters(), *network.buffers()]:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


def measure(case: str, data: Path, folder: Path, inputs: int, output: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    parts = load_clinc150(data)
    batches = {}
    for part in ("train", "test"):
        step = len(parts[part].sentences) // inputs
        ids = ENCODER.token_ids(parts[part].sentences[::step][:inputs])
        labels = torch.tensor(parts[part].labels[::step][:inputs])
        batches[part] = list(zip(ids.split(BATCH), labels.split(BATCH), strict=True))
    tiny = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 3))
    mola.fit(tiny, [(torch.randn(9, 8), torch.arange(9) % 3)], progress=False)  # loads the code that a fit needs
    adapted_encoder(CLASSES)
    before = resident("VmRSS")
    files = sorted(folder.glob("*.safetensors"))[:COUNT]
    networks = networks_of(case, files)
    row: dict[str, Any] = {"case": case, "networks": len(networks), "bytes": bytes_of(networks)}

    def work() -> None:
        start = time.process_time()
        posterior = mola.fit(networks, batches["train"], progress=False)
        fitted = time.process_time()
        torch.save(posterior.predict(batches["test"]).probs, output)
        row.update(fit_cpu_seconds=fitted - start, predict_cpu_seconds=time.process_time() - fitted)

    row["peak"] = peak_of(work, above=before)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with CLINC150")
    parser.add_argument("--networks", type=Path, default=Path("networks/clinc-lora"), help="folder of adapters")
    parser.add_argument("--inputs", type=int, default=512, help="number of requests to fit and to predict")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # few requests leave classes without data
    if options.case is not None:
        print(json.dumps(measure(options.case, options.data, options.networks, options.inputs, options.output)))
        return 0
    environment = record.environment("molaplace", "transformers", "peft")
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        outputs = {case: Path(temporary) / f"{case}.pt" for case in CASES}
        for case, output in outputs.items():
            command = [sys.executable, __file__, *sys.argv[1:], "--case", case, "--output", str(output)]
            printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            rows.append(json.loads(printed.splitlines()[-1]))
            print(rows[-1], flush=True)
        adapters, models = (torch.load(outputs[case], weights_only=True) for case in ("adapters", "models"))
    one, views, _ = rows
    results = {
        "inputs": options.inputs,
        "memory_ratio": views["bytes"] / one["bytes"],
        "largest_difference": float((adapters - models).abs().max()),
    }
    print(results)
    record.write("adapters", {"environment": environment} | results | {"rows": rows})
    return int(results["memory_ratio"] > MEMORY_LIMIT or results["largest_difference"] > DIFFERENCE_LIMIT)


if __name__ == "__main__":
    sys.exit(main())
