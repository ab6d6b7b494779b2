"""Reader for questions with four choices: OpenBookQA (Mihaylov et al., 2018) and ARC-Easy (Clark et al., 2018).

A file has one JSON object a line: the "question", its "choices", and the "answer" as an index of the choices.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from pathlib import Path

from molaplace.errors import DataError
from molaplace_lab.data.catalogue import data_directory

FOLDER = "questions"
PAGES = "https://allenai.org/data/open-book-qa and https://allenai.org/data/arc"

LETTERS = "ABCD"


@dataclass(frozen=True)
class Question:
    """A question, its choices, and the index of the correct choice."""

    text: str
    choices: tuple[str, ...]
    answer: int

    def prompt(self) -> str:
        """Return the prompt whose next token is the answer: a space and a letter."""
        listed = "".join(f"{letter}. {choice}\n" for letter, choice in zip(LETTERS, self.choices, strict=True))
        return f"Question: {self.text}\n{listed}Answer:"


def load_questions(name: str, directory: Path | str | None = None) -> tuple[Question, ...]:
    """Read the questions with four choices from a file, such as "openbookqa-train"; a few of ARC have three or five choices."""
    path = data_directory(directory) / FOLDER / f"{name}.jsonl.gz"
    if not path.is_file():
        raise DataError(f"expected questions in {path}; there is no such file. The questions come from {PAGES}.")
    questions = []
    try:
        for line in gzip.decompress(path.read_bytes()).splitlines():
            document = json.loads(line)
            questions.append(Question(document["question"], tuple(document["choices"]), document["answer"]))
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"line {len(questions) + 1} of {path} is not a question with choices and an answer ({error})."
        ) from error
    return tuple(question for question in questions if len(question.choices) == len(LETTERS))
