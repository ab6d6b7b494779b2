"""Text with Hugging Face transformers: three small BERTs, one posterior, and an alarm for topics outside the training data.

    python examples/hugging_face_text.py

Generates short messages about weather, cooking and football, trains a tokenizer and three two-layer BERTs on them (no
download), and fits a posterior, passing the tokenizer's dictionaries as inputs. Then counts the alarms raised by messages
about music and gardens. Takes about twenty seconds. Needs `pip install 'molaplace[transformers]'`.

To use your own networks, replace everything above `mola.fit` with

    tokenizer = AutoTokenizer.from_pretrained("your-folder")
    networks = [AutoModelForSequenceClassification.from_pretrained(folder) for folder in ("seed-0", "seed-1", "seed-2")]
"""

import argparse
import os
import random

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

import molaplace as mola

PATTERNS = [
    "{name} says there is {much} {thing} for the {place} {time}",
    "{time} {much} {thing} from the {place} says {name}",
    "the {place} and the {thing} are {much} {time}",
    "{name} did you see the {thing} at the {place} {time}",
]
TIMES = ["today", "tomorrow", "tonight", "again", "at noon", "since monday"]
KNOWN = {
    "weather": {
        "thing": ["rain", "snow", "fog", "wind", "sunshine", "hail", "thunder"],
        "place": ["coast", "mountains", "valley", "north", "islands", "river"],
        "much": ["heavy", "light", "grey", "strong", "cold"],
    },
    "cooking": {
        "thing": ["garlic", "butter", "pepper", "soup", "dough", "onions", "rice"],
        "place": ["oven", "pan", "pot", "bowl", "kitchen", "fridge"],
        "much": ["fresh", "salty", "sweet", "boiling", "cold"],
    },
    "football": {
        "thing": ["goals", "points", "passes", "corners", "penalties", "tackles"],
        "place": ["team", "keeper", "captain", "league", "referee", "defence"],
        "much": ["late", "strong", "fast", "unfair", "early"],
    },
}
UNKNOWN = {
    "music": {
        "thing": ["sonatas", "songs", "chords", "waltzes", "duets"],
        "place": ["orchestra", "choir", "pianist", "audience", "band"],
        "much": ["slow", "soft", "loud", "sweet", "early"],
    },
    "gardens": {
        "thing": ["roses", "tulips", "herbs", "apples", "ferns"],
        "place": ["fence", "greenhouse", "hedge", "shed", "lawn"],
        "much": ["fresh", "green", "wild", "early", "cold"],
    },
}


def sentence(topic: str, draw: random.Random) -> str:
    """Fill in a pattern. Most names occur only once, and some messages about a known topic contain a word from another topic."""
    chosen = {slot: draw.choice(words) for slot, words in (KNOWN | UNKNOWN)[topic].items()}
    if topic in KNOWN and draw.random() < 0.3:
        slot = draw.choice(list(chosen))
        chosen[slot] = draw.choice(KNOWN[draw.choice(list(KNOWN))][slot])
    name = "".join(draw.choice(["ka", "lo", "mi", "ne", "ru", "sa", "to", "vi"]) for _ in range(3))
    return draw.choice(PATTERNS).format(name=name, time=draw.choice(TIMES), **chosen)


def messages(topics, count: int, seed: int):
    """Return `count` messages about each topic, and their labels."""
    draw = random.Random(seed)
    texts = [sentence(topic, draw) for topic in topics for _ in range(count)]
    return texts, torch.arange(len(topics)).repeat_interleave(count)


def make_tokenizer(texts) -> PreTrainedTokenizerFast:
    """Train a tokenizer for whole words that occur at least three times; all other words become [UNK]."""
    special = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(special_tokens=list(special.values()), min_frequency=3, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    ends = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def batches(tokenizer, texts, labels=None, size: int = 60, shuffle: bool = False):
    """Yield dictionaries with the keys input_ids, attention_mask and labels, as a collator would."""
    order = torch.randperm(len(texts)) if shuffle else torch.arange(len(texts))
    for rows in order.split(size):
        batch = dict(tokenizer([texts[row] for row in rows], padding=True, return_tensors="pt"))
        yield batch if labels is None else {**batch, "labels": labels[rows]}


def train(seed: int, tokenizer, texts, labels) -> BertForSequenceClassification:
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
        initializer_range=0.1,  # with BERT's default value, 0.02, narrow layers learn slowly at first
        num_labels=len(KNOWN),
        id2label=dict(enumerate(KNOWN)),
    )
    network = BertForSequenceClassification(config)
    optimiser = torch.optim.AdamW(network.parameters(), lr=3e-3)
    for _ in range(12):
        for batch in batches(tokenizer, texts, labels, shuffle=True):
            optimiser.zero_grad()
            network(**batch).loss.backward()
            optimiser.step()
    return network.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)  # small networks run faster on one thread

    (train_texts, train_labels), (val_texts, val_labels), (test_texts, test_labels) = (
        messages(KNOWN, count, seed=3 * options.seed + part) for part, count in enumerate((200, 100, 100))
    )
    tokenizer = make_tokenizer(train_texts)
    networks = [train(3 * options.seed + member, tokenizer, train_texts, train_labels) for member in range(3)]

    # molaplace passes each batch to the networks unchanged and uses the .logits of their outputs.
    train_batches = list(batches(tokenizer, train_texts, train_labels))
    val_batches = list(batches(tokenizer, val_texts, val_labels))
    posterior = mola.fit(networks, train_batches, val_batches)
    prediction = posterior.predict(list(batches(tokenizer, test_texts)))
    accuracy = (prediction.label == test_labels).float().mean()
    print(
        f"{len(test_texts)} test messages: accuracy {accuracy:.1%}, mean confidence {prediction.confidence.mean():.1%}"
    )

    # Allow one false alarm in twenty; see examples/ood_alarm.py.
    threshold = mola.alarm_threshold(posterior.predict(val_batches).ood_score, 0.05)
    single = mola.ensemble(networks[0])
    print(f"\n{'':32}{'alarm':>8}{'MoLA: confidence':>20}{'one BERT: confidence':>24}")
    draw = random.Random(options.seed)
    groups = {
        "test messages": test_texts,
        **{f"about {topic}": messages([topic], 100, seed=7)[0] for topic in UNKNOWN},
        "words of all topics, shuffled": [" ".join(draw.sample(" ".join(test_texts).split(), 9)) for _ in range(100)],
    }
    for name, texts in groups.items():
        prediction = posterior.predict(list(batches(tokenizer, texts)))
        plain = single.predict(list(batches(tokenizer, texts)))
        alarm = float((prediction.ood_score > threshold).float().mean())
        print(f"{name:32}{alarm:8.0%}{prediction.confidence.mean():20.1%}{plain.confidence.mean():24.1%}")

    print("\nSingle messages:")
    some = [test_texts[0], test_texts[100], test_texts[200], groups["about music"][0], groups["about gardens"][0]]
    prediction = posterior.predict(list(batches(tokenizer, some)))
    for text, label, confidence, score in zip(
        some, prediction.label, prediction.confidence, prediction.ood_score, strict=True
    ):
        verdict = "ALARM" if score > threshold else ""
        print(f"  {networks[0].config.id2label[int(label)]:10}{confidence:7.1%}  {verdict:6} {text}")


if __name__ == "__main__":
    main()
