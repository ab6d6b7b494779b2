"""Stored activations: files written in pieces are whole files, and slices are all of the data."""

import pytest
import torch
from safetensors.torch import load_file

from molaplace.errors import DataError, StorageError
from molaplace_lab.activations_file import StoredActivations, TensorFile, write_rows


def tensors(count=2500, width=3, classes=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "features": torch.randn(count, width, generator=generator, dtype=torch.float32),
        "logits": torch.randn(count, classes, generator=generator, dtype=torch.float32),
        "labels": torch.randint(classes, (count,), generator=generator),
        "weight": torch.randn(classes, width, generator=generator, dtype=torch.float32),
    }


def write(path, stored, sizes):
    rows = {name: tensor for name, tensor in stored.items() if name != "weight"}
    parts = zip(*(torch.split(tensor, sizes) for tensor in rows.values()), strict=True)
    batches = [dict(zip(rows, part, strict=True)) for part in parts]
    write_rows(path, batches, len(stored["labels"]), {"weight": stored["weight"]}, {"set": "test"})


def test_a_file_in_pieces_is_the_file_at_once(tmp_path):
    stored = tensors()
    write(tmp_path / "pieces", stored, [1000, 1, 1499])
    read = load_file(tmp_path / "pieces")
    file = TensorFile(tmp_path / "pieces")
    assert read.keys() == stored.keys()
    for name, tensor in stored.items():
        assert torch.equal(read[name], tensor)
        assert torch.equal(file.read(name), tensor)
        if name != "weight":
            assert torch.equal(file.read(name, 2, 1200), tensor[2:1200])


@pytest.mark.parametrize("size", [4, 12])
def test_too_few_and_too_many_rows_leave_no_file(tmp_path, size):
    with pytest.raises(DataError, match=f"expected 9 data in test, got {size}"):
        write_rows(tmp_path / "file", [{"labels": torch.zeros(size)}], 9, {}, {"set": "test"})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("change", ["cut", "header", "length"])
def test_damaged_files_are_named(tmp_path, change):
    path = tmp_path / "file"
    write(path, tensors(), 500)
    TensorFile(path)
    content = bytearray(path.read_bytes())
    content[{"length": 0, "header": 9, "cut": 0}[change]] ^= change != "cut"
    path.write_bytes(content[:-5] if change == "cut" else content)
    with pytest.raises(StorageError, match=r"activations file.*Delete it"):
        TensorFile(path)


def test_a_set_in_several_files_is_the_set_in_one(tmp_path):
    stored = tensors(count=250)
    write(tmp_path / "one", stored, 100)
    for index, (start, stop) in enumerate([(0, 100), (100, 200), (200, 250)]):
        rows = {name: tensor if name == "weight" else tensor[start:stop] for name, tensor in stored.items()}
        write(tmp_path / f"part {index}", rows, 30)
    single = StoredActivations.open([tmp_path / "one"])
    several = StoredActivations.open([[tmp_path / f"part {index}" for index in range(3)]])
    assert several.count == single.count == 250
    indices = torch.randperm(250, generator=torch.Generator().manual_seed(1))[:77].tolist()
    for whole, parts in ((single, several), (single.at(indices), several.at(indices))):
        for (features, labels), (same, also) in zip(whole, parts, strict=True):
            assert torch.equal(features, same)
            assert torch.equal(labels, also)
        assert torch.equal(whole.logits(), parts.logits())
        assert torch.equal(whole.heads[0].head.weight, parts.heads[0].head.weight)
    assert torch.equal(several.at(indices).labels, stored["labels"][indices])
    assert torch.equal(several.files[0].read("features", 90, 210), stored["features"][90:210])
    assert several.at([]).count == 0
