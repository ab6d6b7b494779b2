"""Read an exported file back, and run it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from mola.errors import DataError, ExportError, OptionError, StorageError
from mola.export import onnx_file, torch_file
from mola.export.document import from_properties
from mola.export.graph import Signature
from mola.export.writing import Run, reason
from mola.network import Inputs

DECISIONS = (
    ("outlying", "ood_threshold", "ood_score"),
    ("answer", "answer_threshold", "confidence"),
    ("set", "set_threshold", "probs"),
)
"""Each decision with its threshold and the output that is compared with it."""


class LoadedExport:
    """An exported file, ready to run: call it with a batch, as the posterior. Made by `mola.export.load`.

    Args:
        run: from tensors to outputs by name.
        document: what the file records about itself.
        metadata: the user's own.
    """

    def __init__(self, run: Run, document: dict[str, Any], metadata: dict[str, str]) -> None:
        self._run = run
        self.document: dict[str, Any] = document
        self.metadata: dict[str, str] = metadata
        self.signature: Signature = Signature.from_json(document["signature"])

    @property
    def classes(self) -> list[str]:
        """Names of the classes."""
        return self.document["classes"]

    @property
    def outputs(self) -> list[str]:
        """Names of the outputs."""
        return self.document["outputs"]

    def __call__(self, inputs: Inputs) -> dict[str, Tensor]:
        """Return the outputs of a batch by name, in main memory, in the shapes of the fields of a prediction.

        Args:
            inputs: a tensor, tuple or mapping like the example of the export, also of NumPy arrays.
        """
        tensors = self.signature.tensors(inputs)
        try:
            return dict(self._run(tensors))
        except Exception as error:
            shapes = {name: tuple(one.shape) for name, one in zip(self.signature.names, tensors, strict=True)}
            kinds = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]
            raise DataError(
                f"the exported file does not accept inputs of shapes {shapes} and types {kinds}: {reason(error)}"
            ) from error

    def decide(self, outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Decide by the thresholds of the file; change `document` to use others.

        Args:
            outputs: outputs of a call: "ood_score", "confidence" and "probs", as far as thresholds exist for them.

        Returns:
            Booleans by name, for each threshold that the file has: "outlying" (n,), "answer" (n,), which is false for outliers, and
            "set" (n, C).
        """
        found: dict[str, Tensor] = {}
        for name, threshold, output in DECISIONS:
            limit = self.document[threshold]
            if limit is None:
                continue
            if output not in outputs:
                raise DataError(
                    f"the file has {threshold}, which needs the output {output!r}: export the file with it."
                )
            values = outputs[output].double()
            found[name] = values >= limit if name == "set" else values > limit
        if "answer" in found and "outlying" in found:
            found["answer"] &= ~found["outlying"]
        return found

    def __repr__(self) -> str:
        networks, structure = len(self.document["networks"]), self.document["structure"]
        return f"LoadedExport({networks} networks, structure={structure}, {len(self.classes)} classes, outputs={self.outputs})"


def load(path: str | Path, *, trust: bool = False) -> LoadedExport:
    """Read a file of `mola.export.onnx` (with onnxruntime) or `mola.export.torch_export`, recognised by its content.

    Args:
        path: file to read.
        trust: whether you trust the author of the file. Only a `.pt2` file needs it: PyTorch's reader can run code from it.
    """
    path = Path(path)
    if not path.is_file():
        raise StorageError(
            f"{path}: there is no such file. Pass a file of mola.export.onnx or mola.export.torch_export."
        )
    content = path.read_bytes()
    if content[:2] == b"PK":  # a zip archive, as torch writes them
        if not trust:
            raise OptionError(
                f"{path} is a program of torch.export, and PyTorch's reader can run code from such a file. If you trust its author, "
                f"read it with mola.export.load(path, trust=True). An ONNX file needs no trust."
            )
        run, properties = torch_file.read(content, path)
    else:
        try:
            run, properties = onnx_file.read(content)
        except ExportError as error:
            raise StorageError(
                f"{path} is neither an ONNX file nor a program of torch.export: {reason(error)}"
            ) from error
    return LoadedExport(run, *from_properties(properties, path))
