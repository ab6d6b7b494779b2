"""Adapters on one sentence encoder: training, files and the suite, on a tiny encoder and made-up sentences."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from molaplace.demo import LabelledData
from molaplace.saving.weights import load_weights, read_metadata, read_state
from molaplace_lab import adapters
from molaplace_lab.adapters import Pretrained, ShuffledByLength, adapted_encoder
from molaplace_lab.commands import app
from molaplace_lab.dropout import mc_dropout
from molaplace_lab.networks import Training, find_networks, train_networks
from molaplace_lab.records import Store
from molaplace_lab.suite import DataOptions
from molaplace_lab.suites import clinc
from molaplace_lab.suites.clinc import CLINC_LORA
from tests.closeness import assert_close
from tests.lab.test_clinc import WORDS, write_requests

IDS = torch.tensor([[2, 7, 8, 3, 0, 0], [2, 9, 3, 0, 0, 0]])


@pytest.fixture(autouse=True)
def _single_precision():
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def _encoder(tmp_path, monkeypatch):
    """A tiny encoder with a tokenizer for WORDS, in place of the installed one."""
    from transformers import BertConfig, BertModel, BertTokenizerFast

    folder = tmp_path / "encoder"
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    BertModel(BertConfig(vocab_size=len(vocabulary), initializer_range=0.5, **sizes)).save_pretrained(folder)
    # Any installed package, since only its version is read.
    monkeypatch.setattr(adapters, "ENCODER", Pretrained("torch", str(folder)))
    monkeypatch.setattr(clinc, "ENCODER", adapters.ENCODER)


@pytest.fixture
def data(tmp_path):
    return write_requests(tmp_path / "data")


def test_batches_hold_every_row_once_and_little_padding():
    torch.manual_seed(0)
    lengths = torch.randint(1, 30, (1000,))
    ids = (torch.arange(30) < lengths.unsqueeze(1)).long()
    loader = ShuffledByLength(LabelledData(ids, torch.arange(1000)), 32)
    batches = list(loader)
    assert len(batches) == len(loader)
    assert torch.cat([labels for _, labels in batches]).sort().values.equal(torch.arange(1000))
    padded = sum(len(rows) * int(rows.sum(1).max()) for rows, _ in batches)
    assert padded < 1.2 * int(lengths.sum())
    assert not torch.equal(next(iter(loader))[1], next(iter(loader))[1])
    part = replace(loader, images=100)
    assert sum(len(labels) for _, labels in part) == 100


@pytest.mark.usefixtures("_encoder")
def test_logits_do_not_depend_on_padding():
    network = adapted_encoder(5).eval()
    rows = [row[row != 0].unsqueeze(0) for row in IDS]
    assert_close(network(IDS), torch.cat([network(row) for row in rows]))
    assert adapters.ENCODER.token_ids([WORDS[0], " ".join(WORDS[:2])]).tolist() == [[2, 5, 3, 0], [2, 5, 6, 3]]


@pytest.mark.usefixtures("_encoder")
def test_files_hold_what_was_trained_and_nothing_else(tmp_path, data):
    recipe = replace(CLINC_LORA.recipe, epochs=10, learning_rate=2e-2)
    training = Training(CLINC_LORA, 2, recipe, options=DataOptions(directory=data))
    paths = train_networks(training, tmp_path / "networks", lambda doing, done: None)
    states = [read_state(path) for path in paths]
    frozen = adapted_encoder(150).model.get_base_model().encoder.embeddings.word_embeddings.weight
    for path, state in zip(paths, states, strict=True):
        network = adapted_encoder(150)
        load_weights(network, path)
        assert all(torch.equal(tensor, state[name]) for name, tensor in network.state_dict().items())
        assert sum(tensor.numel() for tensor in state.values()) == sum(
            parameter.numel() for parameter in network.parameters() if parameter.requires_grad
        )
        assert torch.equal(network.model.get_base_model().encoder.embeddings.word_embeddings.weight, frozen)
        assert {tensor.dtype for tensor in state.values()} == {torch.float16}
        assert float(read_metadata(path)["validation accuracy"]) > 3 / 150
    assert not any(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())


@pytest.mark.usefixtures("_encoder")
def test_interrupted_training_goes_on_to_the_same_bits(tmp_path, data):
    def stop(doing, done):
        if doing.startswith("network 1 of 1, epoch 2"):
            raise KeyboardInterrupt

    training = Training(CLINC_LORA, 1, CLINC_LORA.recipe, options=DataOptions(directory=data))
    whole = tmp_path / "whole"
    parts = tmp_path / "parts"
    train_networks(training, whole, lambda doing, done: None)
    with pytest.raises(KeyboardInterrupt):
        train_networks(training, parts, stop)
    (checkpoint,) = parts.iterdir()
    assert not any("word_embeddings" in name for name in read_state(checkpoint))
    train_networks(training, parts, lambda doing, done: None)
    (resumed,) = find_networks(parts)
    (uninterrupted,) = find_networks(whole)
    assert all(torch.equal(tensor, read_state(resumed)[name]) for name, tensor in read_state(uninterrupted).items())


@pytest.mark.usefixtures("_encoder")
@pytest.mark.filterwarnings("ignore::molaplace.errors.MolaWarning")
def test_the_suite_compares_mixtures_of_adapters(tmp_path, data, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bench = ["bench", "clinc-lora", "--components", "2", "--groups", "main,dropout"]
    for command in (["train", "clinc-lora", "--networks", "2"], bench):
        done = CliRunner().invoke(app, [*command, "--data", str(data), "--quiet"])
        assert done.exit_code == 0, done.output
    records = {record.method: record for record in Store("results").records("clinc-lora")}
    assert {"MAP", "DE", "DE-T", "LLLA", "MoLA"} <= set(records)
    network = adapted_encoder(150)
    load_weights(network, tmp_path / "networks" / "clinc-lora" / "00.safetensors")
    test = CLINC_LORA.make_sources(DataOptions(directory=data))["test"]
    ids, labels = (torch.cat(parts) for parts in zip(*test.open(), strict=True))
    probs = mc_dropout(network.eval(), 10)(ids)
    for method, temperature in (("MC dropout", 1.0), ("MC dropout-T", records["MC dropout-T"].chosen["temperature"])):
        nll = torch.nn.functional.cross_entropy(probs.log() / temperature, labels)
        assert records[method].labelled["test"].metrics["nll"] == pytest.approx(float(nll.detach()), rel=1e-4)
        for outliers in records[method].outliers.values():  # the draws have no temperature
            assert ("mutual information" in outliers.scores) == (temperature == 1)
    assert records["MC dropout"].labelled["test"].metrics["nll"] != records["MAP"].labelled["test"].metrics["nll"]
