"""Options that several commands share, and what they all say at the end."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape

from mola.app.jobs.rows import Account
from mola.errors import OptionError

LEFT_OUT = 3
"""Exit code of a command that did its work but left inputs out."""

RUN = "Run"

Json = Annotated[
    bool, typer.Option("--json", help="Print a summary as JSON, and nothing else, to stdout.", rich_help_panel=RUN)
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Write the files but show nothing.", rich_help_panel=RUN)]
Strict = Annotated[
    bool, typer.Option("--strict", help="Stop at the first input that cannot be used.", rich_help_panel=RUN)
]
Device = Annotated[str, typer.Option(help="Where to run the networks, such as cuda.", rich_help_panel=RUN)]
Threads = Annotated[
    int | None, typer.Option(min=1, help="Threads to compute with.  [default: torch's]", rich_help_panel=RUN)
]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust",
        help="Trust the folder: read its .pt2 files and call the functions that it names, which can run code.",
        rich_help_panel=RUN,
    ),
]
Network = Annotated[
    list[str] | None,
    typer.Option(
        "--network",
        help="The networks, named as for `mola fit`.  [default: those that the folder names]",
        rich_help_panel=RUN,
    ),
]
FalseAlarmRate = Annotated[
    float | None,
    typer.Option(
        help="Share of inputs like the validation data that may be called outlying.  [default: 0.05]",
    ),
]
ErrorRate = Annotated[
    float | None,
    typer.Option(
        help="Say which inputs to answer, so that at most this share of the answers is wrong, with --certainty, on inputs like the "
        "validation data.",
    ),
]
Certainty = Annotated[float | None, typer.Option(help="Of the error rate.  [default: 0.95]")]
Coverage = Annotated[
    float | None,
    typer.Option(
        help="Add a set of classes, so that this share of the sets holds the true one, on inputs like the validation data; where "
        "outputs are numbers, intervals that hold this share of the targets."
    ),
]
Data = Annotated[
    Path | None,
    typer.Option("--data", envvar="MOLA_DATA", help="Folder that holds the built-in data sets.", rich_help_panel=RUN),
]


def set_threads(threads: int | None) -> None:
    """Compute with so many threads; None leaves it to torch."""
    import torch

    if threads is not None:
        torch.set_num_threads(threads)


def finish(account: Account, summary: dict[str, Any], *, as_json: bool, quiet: bool) -> None:
    """Say what was left out, or print the summary as JSON; the exit code tells whether something was left out.

    Args:
        account: what was left out.
        summary: plain values.
        as_json: whether the summary is wanted.
        quiet: whether nothing is to be said.
    """
    if as_json:
        typer.echo(json.dumps(summary, indent=2, ensure_ascii=False))
    elif not quiet:
        console = Console(stderr=True, highlight=False)
        for line in account.lines():
            console.print(escape(line), style="yellow" if not line.startswith(" ") else "dim", soft_wrap=True)
    if len(account):
        raise typer.Exit(LEFT_OUT)


def scaling_words(found: Mapping[str, Any]) -> list[str]:
    """How logits are scaled, in words; empty if they stay as they are."""
    neutral = {"temperature": 1.0, "pooling": 1.0, "distance_exponent": 0.0}
    return [f"{name.replace('_', ' ')} {found[name]:.4g}" for name, value in neutral.items() if found[name] != value]


def numbers(text: str | None, option: str) -> tuple[float, ...] | None:
    """Numbers with commas between them.

    Args:
        text: what the user wrote.
        option: what the option is called, for the message.

    Returns:
        The numbers, or None where nothing was written.
    """
    try:
        return None if text is None else tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise OptionError(
            f"{option} must be numbers with commas between them, such as 0.5,0.5,0.5; got {text!r}."
        ) from error


def a_price(text: str | None) -> float | Literal["loss"] | None:
    """What caution may cost: a number, or the word loss.

    Args:
        text: what the user wrote.

    Returns:
        The price, or None where nothing was written.
    """
    if text is None or text == "loss":
        return text  # type: ignore[return-value]
    try:
        return float(text)
    except ValueError as error:
        raise OptionError(
            f"--price must be a number between 0 and 1, such as 0.02 for at most 2 % more log loss, or loss; got {text!r}."
        ) from error


def sides(text: str | None) -> int | tuple[int, int] | None:
    """A length, or height and width with an x between them.

    Args:
        text: what the user wrote.

    Returns:
        The lengths, or None where nothing was written.
    """
    if text is None:
        return None
    parts = text.lower().split("x")
    if len(parts) > 2 or not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise OptionError(f"--resize must be a length in pixels, or height and width such as 224x160; got {text!r}.")
    return int(parts[0]) if len(parts) == 1 else (int(parts[0]), int(parts[1]))


def texts(text: str | None) -> int | tuple[str, ...] | None:
    """A number of classes, or their names: with commas between them, or a line each in a file.

    Args:
        text: what the user wrote.

    Returns:
        The number or the names, or None where nothing was written.
    """
    if text is None:
        return None
    if text.isascii() and text.isdigit():
        return int(text)
    try:
        listed = Path(text).read_text(encoding="utf-8").splitlines()
    except OSError:  # no such file; or too long for a file's name, as a thousand classes are
        listed = text.split(",")
    except UnicodeDecodeError as error:
        raise OptionError(f"{text} is not text in UTF-8: expected the name of a class on each line.") from error
    names = tuple(name.strip() for name in listed if name.strip())
    if len(set(names)) != len(names) or len(names) < 2:
        raise OptionError(
            f"--classes must be a number, two or more different names with commas between them, or a FILE with a name on each line; "
            f"got {text!r}."
        )
    return names
