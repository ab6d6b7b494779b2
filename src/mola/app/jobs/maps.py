"""`mola predict` for outputs at many positions: maps as arrays or as pictures, and a row of averages for each input.

Arrays (`.npz`) hold everything, for inputs of one size. A folder holds pictures of each input, of any size: the labels as PNG with a
palette, whose values are the classes, and confidence and entropy in 16 bits. Tables (`.csv`, `.jsonl`) hold the averages alone.
No process holds more than a batch, and what is wanted appears when it is complete.
"""

from __future__ import annotations

import base64
import csv
import json
import math
import re
import shutil
import tempfile
import time
import uuid
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from mola.app.jobs.folder import PosteriorFolder, alarm
from mola.app.jobs.job import Progress
from mola.app.jobs.numbers import PROBABILITY
from mola.app.jobs.pictures import require_pillow
from mola.app.jobs.predict import FORMATS, discard, in_order, open_writer, predicted
from mola.app.jobs.rows import Account, Rows
from mola.app.jobs.sets import in_turns
from mola.distributed import Team
from mola.errors import DataError, OptionError
from mola.likelihoods import Gaussian
from mola.prediction import RegressionPrediction
from mola.saving.files import partial_file

OF_EACH = ("confidence", "entropy", "epistemic", "aleatoric", "ood_score", "distance")
"""Maps of classes, beside the label: entropy and its two parts in nats."""

DEEP = 2**16 - 1
"""Largest value of a picture with 16 bits."""

PALETTE = 256
"""Most classes of a picture with 8 bits."""

TABLE, KEY = "predictions.csv", "maps.json"
"""What lies beside the pictures: averages of each input, and what values mean."""


@dataclass(frozen=True)
class MapsResult:
    """What `mola predict` did, where outputs are at many positions.

    Attributes:
        output: the file or folder that was written.
        count: inputs that were predicted.
        positions: of all of them.
        account: inputs that were not.
        means: by name, the mean over positions of what was said.
        threshold: outlier score above which positions are called outlying; None without validation data.
        outlying: share of the positions that are; None without a threshold.
        seconds: that predicting and writing took.
    """

    output: Path
    count: int
    positions: int
    account: Account
    means: dict[str, float]
    threshold: float | None
    outlying: float | None
    seconds: float

    def plain(self) -> dict[str, Any]:
        """As plain values."""
        own = {name: getattr(self, name) for name in ("count", "positions", "threshold", "outlying", "seconds")}
        return {"output": str(self.output), **own, **self.means, **self.account.plain()}


def maps_of(said: Any, *, probabilities: bool = False) -> dict[str, NDArray[Any]]:
    """The maps of a batch, by name.

    Args:
        said: a prediction at many positions.
        probabilities: whether to add those of all classes.

    Returns:
        Labels as whole numbers of 16 bits, all else in single precision: (n, H, W) or (n, T); what each output has by itself, and
        probabilities, in the layout of the logits.
    """
    if isinstance(said, RegressionPrediction):
        lower, upper = said.interval(PROBABILITY)
        found = {"mean": said.mean, "std": said.std, "lower": lower, "upper": upper, "epistemic": said.epistemic}
        found |= {"aleatoric": said.aleatoric, "ood_score": said.ood_score}
        found |= {} if said.distance is None else {"distance": said.distance}
        return {name: _array(one) for name, one in found.items()}
    values = {name: getattr(said, name) for name in OF_EACH}
    maps = {"label": said.label.cpu().numpy().astype(np.int16)}
    maps |= {name: _array(one) for name, one in values.items() if one is not None}
    return maps | ({"probabilities": _array(said.probs)} if probabilities else {})


def _array(values: Tensor) -> NDArray[np.float32]:
    return np.ascontiguousarray(values.detach().cpu().float().numpy())


@dataclass(frozen=True)
class MapPortion:
    """What is known of a batch: names of all inputs, why some were left out, notes, and maps of the others."""

    names: list[str]
    errors: list[str | None]
    notes: tuple[tuple[str, str], ...]
    maps: dict[str, NDArray[Any]]
    axis: int = 1
    """Of the outputs, where each has its own map: 1, or the last."""

    def plain(self) -> dict[str, Any]:
        """As JSON, the numbers to the last bit."""
        maps = {
            name: [str(one.dtype), list(one.shape), base64.b64encode(one.tobytes()).decode("ascii")]
            for name, one in self.maps.items()
        }
        return {"names": self.names, "errors": self.errors, "notes": self.notes, "maps": maps, "axis": self.axis}

    @classmethod
    def of_plain(cls, document: dict[str, Any]) -> MapPortion:
        """From what `plain` gave."""
        maps = {
            name: np.frombuffer(base64.b64decode(content), np.dtype(kind)).reshape(shape)
            for name, (kind, shape, content) in document["maps"].items()
        }
        notes = tuple((name, words) for name, words in document["notes"])
        return cls(document["names"], document["errors"], notes, maps, document["axis"])


def run_maps(
    fitted: PosteriorFolder,
    data: str,
    output: Path,
    progress: Progress = lambda doing, done: None,
    *,
    probabilities: bool = False,
    strict: bool = False,
    directory: str | None = None,
    seed: int | None = None,
    false_alarm_rate: float | None = None,
    team: Team | None = None,
) -> MapsResult | None:
    """Predict every position of every input of a set, batch by batch.

    Args:
        fitted: an opened posterior whose networks have outputs at many positions.
        data: as the user names them.
        output: a file that ends in .npz, .csv or .jsonl; or a folder for pictures, a name without such an ending.
        progress: told what is being done, and which share of the work is done.
        probabilities: whether arrays hold those of all classes.
        strict: whether an input that cannot be used is an error.
        directory: that holds the built-in sets.
        seed: of links that draw; None uses the link's own.
        false_alarm_rate: how often positions like those of the validation data may be called outlying; None is 0.05.
        team: the processes that do it together, with rank 0 writing. None is this one alone.

    Returns:
        What was done, on rank 0, and None on the others.
    """
    began = time.perf_counter()
    together = Team.single() if team is None else team
    if output.exists() and Path(data).expanduser().exists() and output.samefile(Path(data).expanduser()):
        raise OptionError(
            f"{output} holds the data, and would be overwritten with predictions: choose another --output."
        )
    if probabilities:
        fitted.refuse_probabilities()
    if probabilities and output.suffix != ".npz":
        raise OptionError(f"--probabilities of all positions are written to .npz alone, got {output}.")
    source = fitted.open_set(data, labelled=False, directory=directory, said=True)
    threshold, account = alarm(fitted, false_alarm_rate), Account()
    names = _names(fitted)
    kinds: tuple[str, ...] = ("mean", "std", "epistemic", "aleatoric") if _is_numbers(fitted) else OF_EACH[:4]
    sums, outlying, count, positions = dict.fromkeys(kinds, 0.0), 0, 0, 0

    def make(rows: Rows, said: Any) -> MapPortion:
        maps = {} if said is None else maps_of(said, probabilities=probabilities)
        return MapPortion(rows.names, rows.errors, rows.notes, maps, 1 if said is None else said.axis)

    progress("predicting", 0.0)
    with ExitStack() as stack:
        own = predicted(
            fitted.posterior,
            in_turns(source, together),
            make,
            strict=strict,
            seed=seed,
            tell=lambda share: progress("predicting", share),
        )
        writer = stack.enter_context(_writer(fitted, output, names)) if together.first else None
        for portion in in_order(own, together, MapPortion):
            assert writer is not None  # only rank 0 is given any
            account.add(source.name, Rows(portion.names, portion.errors, None, None, portion.notes))
            good, writer.averages.axis = 0, portion.axis
            for name, error in zip(portion.names, portion.errors, strict=True):
                maps = None
                if error is None:
                    maps, good = {kind: one[good] for kind, one in portion.maps.items()}, good + 1
                    here = maps["ood_score"].size
                    positions, count = positions + here, count + 1
                    outlying += 0 if threshold is None else int((maps["ood_score"] > threshold).sum())
                    for kind in sums:
                        sums[kind] += float(maps[kind].mean(dtype=np.float64)) * here
                writer.add(name, error, maps, threshold)
        if together.first and count == 0:
            first = next(iter(account.left_out.get(source.name, {}).items()), None)
            why = "" if first is None else f" The first: {first[0]}: {first[1]}."
            raise DataError(f"{data} holds no input that can be used.{why}")
    progress("done", 1.0)
    if not together.first:
        return None
    return MapsResult(
        output=output,
        count=count,
        positions=positions,
        account=account,
        means={kind: total / positions for kind, total in sums.items()},
        threshold=threshold,
        outlying=None if threshold is None else outlying / positions,
        seconds=time.perf_counter() - began,
    )


def refuse_promises(fitted: PosteriorFolder, promises: Mapping[str, object]) -> None:
    """Refuse what can be promised of whole inputs alone.

    Args:
        fitted: an opened posterior whose networks have outputs at many positions.
        promises: what the user asked for, by option; None where nothing was.
    """
    asked = [option for option, value in promises.items() if value is not None]
    if asked:
        raise OptionError(
            f"{asked[0]} promises something of each input, and the networks of {fitted.folder} have outputs at many positions of "
            f"each, which are alike: no promise made by them would hold. Leave it out; the outlier alarm works position by position."
        )


def _is_numbers(fitted: PosteriorFolder) -> bool:
    return not fitted.posterior.likelihood.discrete


def _names(fitted: PosteriorFolder) -> tuple[str, ...]:
    count, likelihood = fitted.outputs, fitted.posterior.likelihood
    if isinstance(likelihood, Gaussian):
        count = likelihood.num_uncertain(count)
    return tuple((fitted.classes or tuple(map(str, range(count))))[:count])


# --- a row of averages --------------------------------------------------------------------------------------------------


class _Averages:
    # A row for each input: means over positions, shares of the classes, and the share of positions that are outlying.

    def __init__(self, fitted: PosteriorFolder, names: Sequence[str]) -> None:
        likelihood = fitted.posterior.likelihood
        self.names, self.numbers, self.mutually_exclusive = (
            list(names),
            _is_numbers(fitted),
            likelihood.mutually_exclusive,
        )
        self.axis = 1
        """Of the outputs in the maps of a batch, where each has its own; told with each portion."""
        if self.numbers:
            each = [
                f"{kind}_{name}" if len(names) > 1 else kind
                for name in names
                for kind in ("mean", "std", "epistemic", "aleatoric")
            ]
        else:
            each = [*OF_EACH[:4], *(f"share_{name}" for name in names)]
        self.fields = ("name", "positions", *each, "ood_score", "distance", "outlying", "error")

    def row(
        self, name: str, error: str | None, maps: Mapping[str, NDArray[Any]] | None, threshold: float | None
    ) -> dict[str, Any]:
        """The row of one input."""
        if maps is None:
            return {"name": name, "error": error}
        score = maps["ood_score"]
        row: dict[str, Any] = {"name": name, "positions": int(score.size)}
        if self.numbers:
            row |= self._of_numbers(maps)
        else:
            row |= {kind: _mean(maps[kind]) for kind in OF_EACH[:4]}
            row |= {f"share_{one}": share for one, share in zip(self.names, self._shares(maps), strict=True)}
        row["ood_score"] = _mean(score)
        row["distance"] = _mean(maps["distance"]) if "distance" in maps else None
        row["outlying"] = None if threshold is None else float((score > threshold).mean())
        return row

    def _shares(self, maps: Mapping[str, NDArray[Any]]) -> list[float]:
        labels, size = maps["label"], maps["ood_score"].size
        if self.mutually_exclusive:
            shares: list[float] = (np.bincount(labels.ravel(), minlength=len(self.names)) / size).tolist()
            return shares
        return [float(one.mean()) for one in self._by_output(labels)]

    def _by_output(self, values: NDArray[Any]) -> NDArray[Any]:
        return values if self.axis == 1 else np.moveaxis(values, -1, 0)

    def _of_numbers(self, maps: Mapping[str, NDArray[Any]]) -> dict[str, float]:
        parts = {kind: self._by_output(maps[kind]) for kind in ("mean", "std", "epistemic", "aleatoric")}
        return {
            f"{kind}_{name}" if len(self.names) > 1 else kind: _mean(part[place])
            for place, name in enumerate(self.names)
            for kind, part in parts.items()
        }


def _mean(values: NDArray[Any]) -> float:
    return float(values.mean(dtype=np.float64))


# --- writers ------------------------------------------------------------------------------------------------------------


class _Writer(ABC):
    # Writes beside what is wanted, which it becomes when all went well.

    averages: _Averages

    @abstractmethod
    def add(
        self, name: str, error: str | None, maps: Mapping[str, NDArray[Any]] | None, threshold: float | None
    ) -> None:
        """One input: its maps, or why there are none."""

    @abstractmethod
    def end(self, *, whole: bool) -> None:
        """Put it in place, or remove what was written."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end(whole=kind is None)


def _writer(fitted: PosteriorFolder, output: Path, names: Sequence[str]) -> _Writer:
    averages = _Averages(fitted, names)
    if output.suffix == ".npz":
        return _Arrays(output, names, averages)
    if output.suffix in FORMATS:
        return _Table(output, averages)
    if output.suffix:
        raise OptionError(
            f"{output} has the ending {output.suffix!r}: expected {', '.join(FORMATS)}, or none, for a folder of pictures."
        )
    head, likelihood = fitted.posterior.components[0].head, fitted.posterior.likelihood
    if head is None or head.dense_axes != 2 or not likelihood.mutually_exclusive:
        raise OptionError(
            f"{output}: a folder is for pictures, of networks that name one class for each pixel. Others are written to .npz, which "
            f"holds all maps as arrays."
        )
    return _Folder(output, names, averages)


class _Table(_Writer):
    def __init__(self, output: Path, averages: _Averages) -> None:
        self.averages, self.held = averages, ExitStack()
        self.writer = self.held.enter_context(open_writer(output, (), 0, averages.fields))

    def add(
        self, name: str, error: str | None, maps: Mapping[str, NDArray[Any]] | None, threshold: float | None
    ) -> None:
        """Write a row."""
        self.writer.add(self.averages.row(name, error, maps, threshold))

    def end(self, *, whole: bool) -> None:
        """Put the table in place."""
        if whole:
            self.held.close()
        else:
            discard(self.held)


class _Arrays(_Writer):
    # An archive of arrays, all inputs of one size: nan, and labels of -1, for those that were left out.

    def __init__(self, output: Path, names: Sequence[str], averages: _Averages) -> None:
        self.output, self.classes, self.averages = output, list(names), averages
        self.names: list[str] = []
        self.errors: list[str] = []
        self.columns: dict[str, IO[bytes]] = {}
        self.kinds: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {}
        self.held = ExitStack()
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            self.partial = self.held.enter_context(partial_file(output))
        except OSError as error:
            discard(self.held)
            raise OptionError(f"cannot write {output} ({error.strerror}): choose another --output.") from error
        self.folder = Path(self.held.enter_context(tempfile.TemporaryDirectory(prefix="mola-")))

    def add(
        self, name: str, error: str | None, maps: Mapping[str, NDArray[Any]] | None, threshold: float | None
    ) -> None:
        """Append to each column."""
        self.names.append(name)
        self.errors.append(error or "")
        for kind, values in (maps or {}).items():
            known = self.kinds.setdefault(kind, (values.dtype, values.shape))
            if values.shape != known[1]:
                raise DataError(
                    f"{name} has a map of size {values.shape}, and those before have {known[1]}: one array holds maps of one size. "
                    f"Write pictures to a folder (--output maps), or resize the inputs."
                )
            if kind not in self.columns:
                self.columns[kind] = self.held.enter_context((self.folder / kind).open("w+b"))
            self.columns[kind].write(values.tobytes())

    def end(self, *, whole: bool) -> None:
        """Pack the columns into one archive."""
        if not whole:
            discard(self.held)
            return
        with self.held, zipfile.ZipFile(self.partial, "w", zipfile.ZIP_DEFLATED) as archive:
            for kind, column in self.columns.items():
                self._pack(archive, kind, column)
            for kind, texts in (("name", self.names), ("error", self.errors), ("classes", self.classes)):
                with archive.open(f"{kind}.npy", "w") as target:
                    np.lib.format.write_array(target, np.array(texts, dtype=np.str_), allow_pickle=False)

    def _pack(self, archive: zipfile.ZipFile, kind: str, column: IO[bytes]) -> None:
        dtype, shape = self.kinds[kind]
        size = math.prod(shape) * dtype.itemsize
        blank = np.full(shape, -1 if dtype.kind == "i" else np.nan, dtype).tobytes()
        column.seek(0)
        header = {
            "descr": np.lib.format.dtype_to_descr(dtype),
            "fortran_order": False,
            "shape": (len(self.names), *shape),
        }
        with archive.open(f"{kind}.npy", "w", force_zip64=True) as target:
            np.lib.format.write_array_header_1_0(target, header)
            for error in self.errors:
                target.write(blank if error else column.read(size))


class _Folder(_Writer):
    def __init__(self, output: Path, names: Sequence[str], averages: _Averages) -> None:
        require_pillow()
        self.output, self.classes, self.averages = output, list(names), averages
        self.taken: set[str] = set()
        others = output.is_dir() and any(output.iterdir()) and not (output / KEY).is_file()
        if others or (output.exists() and not output.is_dir()):
            raise OptionError(f"{output} exists, and does not hold maps of an earlier run: choose another --output.")
        self.partial = output.with_name(f".{output.name}.{uuid.uuid4().hex}.partial")
        try:
            for part in ("label", "confidence", "entropy"):
                (self.partial / part).mkdir(parents=True)
            self.stream = (self.partial / TABLE).open("w", newline="", encoding="utf-8")
        except OSError as error:
            raise OptionError(f"cannot write {output} ({error.strerror}): choose another --output.") from error
        self.rows = csv.writer(self.stream, lineterminator="\n")
        self.rows.writerow([*averages.fields, "picture"])

    def add(
        self, name: str, error: str | None, maps: Mapping[str, NDArray[Any]] | None, threshold: float | None
    ) -> None:
        """Write the pictures and a row."""
        picture = ""
        if maps is not None:
            picture = self._free(name)
            most = math.log(len(self.classes))
            self._write("label", picture, maps["label"], None)
            self._write("confidence", picture, maps["confidence"], 1.0)
            self._write("entropy", picture, maps["entropy"], most)
        row = self.averages.row(name, error, maps, threshold)
        cells = [row.get(field) for field in self.averages.fields]
        self.rows.writerow(
            ["" if one is None else f"{one:.9g}" if isinstance(one, float) else one for one in cells] + [picture]
        )

    def _free(self, name: str) -> str:
        # A name for files that no other input has: that of the input, without what may not stand in one.
        stem = re.sub(r"[^\w.\-]+", "_", re.sub(r"\.[A-Za-z]+$", "", name)).strip("._") or "input"
        number, found = 1, stem[:150]
        while found.lower() in self.taken:
            number += 1
            found = f"{stem[:150]}-{number}"
        self.taken.add(found.lower())
        return f"{found}.png"

    def _write(self, part: str, picture: str, values: NDArray[Any], most: float | None) -> None:
        from PIL import Image

        if most is not None:
            shown = Image.fromarray(np.round(np.clip(values / most, 0, 1) * DEEP).astype(np.uint16))
        elif len(self.classes) > PALETTE:
            shown = Image.fromarray(values.astype(np.uint16))
        else:
            shown = Image.fromarray(values.astype(np.uint8))
            shown.putpalette(_palette())
        shown.save(self.partial / part / picture)

    def end(self, *, whole: bool) -> None:
        """Put the folder in place of an earlier one."""
        self.stream.close()
        if not whole:
            shutil.rmtree(self.partial, ignore_errors=True)
            return
        bits = 8 if len(self.classes) <= PALETTE else 16
        key = {
            "classes": self.classes,
            "label": f"index of the class, {bits} bits" + (", with a palette" if bits == 8 else ""),
            "confidence": f"value / {DEEP}",
            "entropy": f"value / {DEEP} * {math.log(len(self.classes)):.9g} nats, which is that of a guess",
        }
        (self.partial / KEY).write_text(json.dumps(key, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        old = self.output.with_name(f".{self.output.name}.{uuid.uuid4().hex}.old")
        replaced = self.output.exists()
        if replaced:
            self.output.rename(old)
        self.partial.rename(self.output)
        if replaced:
            shutil.rmtree(old, ignore_errors=True)


def _palette() -> list[int]:
    # Colours of 256 classes that can be told apart, as those of PASCAL VOC: the bits of a class, dealt to red, green
    # and blue.
    colours = []
    for index in range(PALETTE):
        rest, colour = index, [0, 0, 0]
        for bit in range(7, -1, -1):
            for channel in range(3):
                colour[channel] |= ((rest >> channel) & 1) << bit
            rest >>= 3
        colours += colour
    return colours
