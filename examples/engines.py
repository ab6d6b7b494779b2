"""Apply a posterior to partitioned data with Ray Data, Spark and Dask, and compare the results with those of a plain call.

    python examples/engines.py [--engine dask] [--engine ray] [--engine spark]

Trains three small networks on handwritten digits and exports their posterior to an ONNX file. `BatchPredictor` maps a batch of
rows to columns of predictions. It stores only the file's path, and each worker reads the file once. Without `--engine`, uses
every installed engine. Needs `pip install 'molaplace[cli,export]' pandas` and at least one of `dask[dataframe]`, `ray[data]`
and `pyspark` (which needs Java). Takes about ten seconds, plus ten seconds to start each engine.
"""

import argparse
import importlib.util
import os
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import molaplace as mola

PACKAGES = {"dask": "dask", "ray": "ray", "spark": "pyspark"}
COLUMNS = [f"pixel_{index}" for index in range(64)]


def train(seed: int, images, labels) -> nn.Module:
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimiser = torch.optim.AdamW(network.parameters(), lr=1e-2)
    for _ in range(100):
        optimiser.zero_grad()
        nn.functional.cross_entropy(network(images), labels).backward()
        optimiser.step()
    return network.eval()


def with_dask(predictor, frame):
    import dask.dataframe

    partitions = dask.dataframe.from_pandas(frame, npartitions=4)
    return partitions.map_partitions(predictor, meta=predictor(frame.head(0))).compute()


def with_ray(predictor, frame):
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    ray.data.DataContext.get_current().enable_progress_bars = False
    try:
        rows = ray.data.from_pandas(frame).repartition(4)
        return rows.map_batches(predictor, batch_format="pandas", batch_size=100).to_pandas()
    finally:
        ray.shutdown()


def with_spark(predictor, frame):
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable  # so that workers use the same packages
    spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", False).getOrCreate()
    try:
        rows = spark.createDataFrame(frame).repartition(4)
        return rows.mapInPandas(
            lambda frames: map(predictor, frames), schema=predictor.spark_schema({"id": "long"})
        ).toPandas()
    finally:
        spark.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", action="append", choices=PACKAGES, help="engine to run; may be repeated")
    parser.add_argument("--output", type=Path, default=Path("example-results"), help="folder for the ONNX file")
    options = parser.parse_args()

    pixels, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels)
    train_set, val_set = (TensorDataset(images[part], labels[part]) for part in (slice(0, 1000), slice(1000, 1300)))
    networks = [train(seed, *train_set.tensors) for seed in range(3)]
    posterior = mola.fit(networks, *(DataLoader(some, batch_size=100) for some in (train_set, val_set)), progress=False)

    options.output.mkdir(parents=True, exist_ok=True)
    file = (options.output / "digits.onnx").resolve()  # absolute, so that all workers find the file
    mola.export.onnx(posterior, file, images[:2], classes=[str(digit) for digit in range(10)])
    predictor = mola.export.BatchPredictor(file, inputs=COLUMNS, keep=["id"])

    new = images[1300:]
    frame = pd.DataFrame(new.numpy(), columns=COLUMNS).assign(id=np.arange(len(new)))
    plain = predictor(frame)  # the same call without an engine
    torchs = posterior.predict(new)
    gap = np.abs(plain["confidence"] - torchs.confidence.double().numpy()).max()
    print(f"{len(plain)} rows; columns {', '.join(plain.columns)}")
    print(f"pandas: the confidence differs from that of posterior.predict by at most {gap:.1e}")

    chosen = options.engine or [name for name, package in PACKAGES.items() if importlib.util.find_spec(package)]
    for name in chosen:
        start = time.perf_counter()
        predictions = globals()[f"with_{name}"](predictor, frame).sort_values("id", ignore_index=True)
        numbers = plain.select_dtypes("number").columns
        gap = np.abs(predictions[numbers].to_numpy(float) - plain[numbers].to_numpy(float)).max()
        same = bool((predictions["class"].to_numpy(str) == plain["class"].to_numpy(str)).all())
        print(
            f"{name}: {len(predictions)} rows, {time.perf_counter() - start:.0f} s; largest difference {gap:.1e}, same classes: {same}"
        )
    for name in PACKAGES.keys() - set(chosen):
        print(f"{name}: not selected, or not installed")


if __name__ == "__main__":
    main()
