"""The declared suites from the command line to records, on small data in the standard layouts."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from typer.testing import CliRunner

from molaplace.images import even_indices
from molaplace_lab.__main__ import main
from molaplace_lab.commands import app
from molaplace_lab.corruptions.catalogue import PAPER_CORRUPTIONS, corrupt
from molaplace_lab.records import Store
from molaplace_lab.suite import DataOptions
from molaplace_lab.suites.cifar10 import CIFAR10
from tests.lab.test_datasets import colour, records, write_idx

NETWORK = """
import torch
from torch import nn

def thousand():
    return nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, 24), nn.ReLU(), nn.Linear(24, 1000))
"""


@pytest.fixture(autouse=True)
def _single_precision():
    torch.set_default_dtype(torch.float32)


def write_images(folder, count, seed):
    folder.mkdir(parents=True)
    generator = np.random.default_rng(seed)
    for index in range(count):
        pixels = generator.integers(0, 256, (40 + index, 50, 3), dtype=np.uint8)
        # Files of the same size and name in every class: neither may stand for their content.
        Image.fromarray(pixels).save(folder / f"picture_{index}.bmp")


@pytest.fixture(scope="module")
def imagenet(tmp_path_factory):
    """Three of a thousand synsets, as ImageNet and ImageNet-C lie on disk, and two networks."""
    root = tmp_path_factory.mktemp("imagenet")
    names = [f"n{index:08d}" for index in range(1000)]
    present = [names[3], names[500], names[999]]
    for seed, name in enumerate(present):
        write_images(root / "data" / "imagenet" / "train" / name, 8, seed)
        write_images(root / "data" / "imagenet" / "val" / name, 6, 10 + seed)
        for corruption in ("fog", "snow"):
            for severity in range(1, 6):
                folder = root / "data" / "imagenet-c" / corruption / str(severity) / name
                write_images(folder, 6, 100 * severity + 10 + seed)  # the names of the validation images
    (root / "data" / "imagenet" / "synsets.txt").write_text("\n".join(names))
    (root / "thousand_for_test.py").write_text(NETWORK)
    (root / "networks").mkdir()
    sys.path.insert(0, str(root))
    import thousand_for_test

    for seed in range(2):
        torch.manual_seed(seed)
        network = thousand_for_test.thousand().float()
        save_file(network.state_dict(), root / "networks" / f"{seed:02d}.safetensors")
    yield root
    sys.path.remove(str(root))


@pytest.mark.filterwarnings("ignore:.*is left out of the comparison:molaplace.errors.MolaWarning")
@pytest.mark.filterwarnings("ignore:ImageNet-C lacks:molaplace.errors.MolaWarning")
def test_imagenet_runs_from_folders_to_records_with_a_thousand_classes(imagenet, tmp_path):
    arguments = ["bench", "imagenet", "--network", "thousand_for_test:thousand", "--components", "2", "--quiet"]
    folders = {"--networks": imagenet / "networks", "--data": imagenet / "data", "--results": tmp_path / "results"}
    for option, folder in {**folders, "--cache": tmp_path / "cache"}.items():
        arguments += [option, str(folder)]
    outcome = CliRunner().invoke(app, arguments)
    assert outcome.exit_code == 0, outcome.output
    store = Store(tmp_path / "results")
    records = {record.method: record for record in store.records("imagenet")}
    assert {"MAP", "MAP-T", "DE", "DE-T", "LLLA", "MoLA"} < set(records)
    mola_record = records["MoLA"]
    assert list(mola_record.labelled) == ["test", *(f"severity {severity}" for severity in range(1, 6))]
    # 18 held-out images: 4 to tune on, 14 to test on, each under one of two corruptions.
    assert mola_record.labelled["test"].count == 14
    assert mola_record.labelled["severity 3"].count == 14
    assert len(mola_record.networks) == 2
    document = store.read_document("imagenet", "suite.json")
    # Small examples: a page shows them, and git may hold them.
    assert document["examples"]["test"]["shape"] == [8, 3, 64, 64]


# --- CIFAR-10 and MNIST in their standard layouts


def write_cifar(root):
    """The binary version, 10 images a training file and 2100 test images."""
    folder = root / "cifar-10-batches-bin"
    folder.mkdir()
    for name, count in ({f"data_batch_{index}": 10 for index in range(1, 6)} | {"test_batch": 2100}).items():
        pixels = colour(count)
        labels = np.arange(count) * 7 % 10
        (folder / f"{name}.bin").write_bytes(records([[label] for label in labels], pixels))
    return torch.from_numpy(pixels), torch.from_numpy(labels)


@pytest.mark.filterwarnings("ignore::molaplace.errors.MolaWarning")
def test_published_corruptions_are_taken_where_they_are_there(tmp_path, monkeypatch):
    types = PAPER_CORRUPTIONS[:3]
    monkeypatch.setattr("molaplace_lab.suites.cifar10.PAPER_CORRUPTIONS", types)
    pixels, labels = write_cifar(tmp_path)
    generated = CIFAR10.make_sources(DataOptions(directory=tmp_path, test=40))
    folder = tmp_path / "CIFAR-10-C"
    folder.mkdir()
    np.save(folder / "labels.npy", labels.repeat(5).numpy().astype(np.uint8))
    for index, corruption in enumerate(types):
        # Not what we would generate, so that the two can be told apart.
        stack = torch.cat([pixels // (index + 2) + severity for severity in range(1, 6)])
        np.save(folder / f"{corruption}.npy", stack.permute(0, 2, 3, 1).numpy())
    taken = CIFAR10.make_sources(DataOptions(directory=tmp_path, test=40))
    assert "generated" in generated["severity 2"].title
    assert "generated" not in taken["severity 2"].title
    assert taken["severity 2"].checksum != generated["severity 2"].checksum
    assert taken["test"].checksum == generated["test"].checksum
    plain = taken["test"].show(range(40)).pixels
    shifted = taken["severity 2"].show(range(40)).pixels
    for index in range(40):
        assert torch.equal(shifted[index], plain[index] // (index % 3 + 2) + 2), index
    few = CIFAR10.make_sources(DataOptions(directory=tmp_path, test=40, shifted=5))["severity 2"]
    for index, image in enumerate(even_indices(40, 5)):
        assert torch.equal(few.show(range(5)).pixels[index], plain[image] // (index % 3 + 2) + 2), index
    first, second = (generated[name].show(range(4)).pixels for name in ("test", "severity 2"))
    assert torch.equal(second[2], corrupt(first[2:3], types[2], 2)[0])


@pytest.fixture(scope="module")
def mnist(tmp_path_factory):
    root = tmp_path_factory.mktemp("mnist")
    generator = np.random.default_rng(0)
    for folder, kind, count in (("MNIST", "train", 64), ("MNIST", "t10k", 2040), ("FashionMNIST", "t10k", 2040)):
        labels = generator.integers(0, 10, count, dtype=np.uint8)
        images = generator.integers(0, 60, (count, 28, 28), dtype=np.uint8)
        images[np.arange(count), labels * 2] += 190
        write_idx(root / folder / "raw", kind, images, labels)
    return root


@pytest.mark.slow
@pytest.mark.usefixtures("_blank_figures")
@pytest.mark.filterwarnings("always::molaplace.errors.MolaWarning")
def test_mnist_from_files_to_a_report(mnist, tmp_path, monkeypatch, capsys):
    """Train, run, report: three commands, and the record of each method."""
    monkeypatch.chdir(tmp_path)
    data = ["--data", str(mnist)]

    def mola_command(*arguments):
        monkeypatch.setattr("sys.argv", ["molaplace_lab", *arguments])
        with pytest.raises(SystemExit) as stop:
            main()
        return stop.value.code, capsys.readouterr()

    code, _ = mola_command("train", "mnist", *data, "--networks", "2", "--epochs", "2", "--quiet")
    assert code == 0
    bench = ["bench", "mnist", *data, "--components", "2", "--test-images", "30", "--outliers", "30"]
    code, printed = mola_command(*bench)
    assert code == 0, printed.err
    assert "molaplace_lab: note: EMNIST" in printed.err
    assert "Traceback" not in printed.err
    assert "report mnist" in printed.out.replace("\n", " ")
    records = {record.method: record for record in Store("results").records("mnist")}
    assert set(records["MoLA"].outliers) == {"fashion-mnist"}
    assert len(records["MoLA"].labelled) == 13
    assert set(records["MAP"].outliers["fashion-mnist"].scores) >= {"energy", "Mahalanobis", "nearest neighbours"}
    assert "ood score" in records["MoLA"].outliers["fashion-mnist"].scores
    code, _ = mola_command("report", "mnist", "--output", "page", "--quiet")
    assert code == 0
    assert (tmp_path / "page" / "index.html").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "ucy"], "suite must be one of digits, mnist"),
        (["train", "digit"], "suite must be one of digits, mnist, cifar10, clinc"),
        (["bench", "mnist", "--groups", "mian"], "Did you mean 'main'?"),
        (["bench", "mnist", "--networks", "nowhere"], "contains no trained networks"),
        (["train", "imagenet", "--networks", "1"], "does not train networks"),
        (["bench", "cifar10", "--network", "nope:build"], "cannot import"),
        (["bench", "mnist", "--cross-fit"], "cross_fit is not used by the mnist suite"),
        (["bench", "clinc", "--normalisation", "cifar10"], "normalisation is not used by the clinc suite"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_mistakes_are_one_clear_line(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["molaplace_lab", *arguments, "--quiet"])
    monkeypatch.delenv("MOLAPLACE_DATA", raising=False)
    with pytest.raises(SystemExit) as stop:
        main()
    error = capsys.readouterr().err
    assert stop.value.code == 1
    assert message in error
    assert "Traceback" not in error
