"""Read an exported file back, and run it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from mola.errors import DataError, OptionError, StorageError
from mola.export.graph import Signature
from mola.export.information import from_properties
from mola.export.onnx_file import onnx_session, run_session
from mola.export.torch_file import read_program, run_program
from mola.network import Inputs


class LoadedExport:
    """An exported file, ready to run: call it with a batch, as the posterior. Made by `mola.load_exported`.

    Args:
        run: from tensors to outputs by name.
        document: what the file says of itself.
        metadata: the user's own.
    """

    def __init__(
        self, run: Callable[[Sequence[Tensor]], dict[str, Tensor]], document: dict[str, Any], metadata: dict[str, str]
    ) -> None:
        self._run = run
        self.document, self.metadata = document, metadata
        self.signature = Signature.from_json(document["signature"])

    @property
    def classes(self) -> list[str]:
        """Names of the classes."""
        return self.document["classes"]

    @property
    def outputs(self) -> list[str]:
        """Names of the outputs."""
        return self.document["outputs"]

    def __call__(self, inputs: Inputs) -> dict[str, Tensor]:
        """Outputs of a batch by name, in main memory.

        Args:
            inputs: a tensor, tuple or mapping like the example of the export; NumPy arrays are taken too.

        Returns:
            "probabilities" (n, C), and (n,) of all others.
        """
        tensors = self.signature.tensors(inputs)
        try:
            return self._run(tensors)
        except Exception as error:
            shapes = {name: tuple(tensor.shape) for name, tensor in zip(self.signature.names, tensors, strict=True)}
            kinds = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]
            raise DataError(
                f"the exported file cannot take inputs of shapes {shapes} and types {kinds}: {_first_line(error)}"
            ) from error

    def decide(self, outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What to do with inputs, by the thresholds of the file; change `document` to decide by others.

        Args:
            outputs: what a call gave: "ood_score", "confidence" and "probabilities", as far as there are thresholds for them.

        Returns:
            Truth values by name, for each threshold that the file has: "outlying" (n,); "answer" (n,), of which nothing
            outlying is; "set" (n, C).
        """
        found: dict[str, Tensor] = {}
        for name, threshold, output in (
            ("outlying", "ood_threshold", "ood_score"),
            ("answer", "answer_threshold", "confidence"),
            ("set", "set_threshold", "probabilities"),
        ):
            limit = self.document.get(threshold)  # older files lack some
            if limit is None:
                continue
            if output not in outputs:
                raise DataError(
                    f"the file has {threshold}, which is for the output {output!r}: export the file with this output."
                )
            values = outputs[output].double()
            found[name] = values >= limit if name == "set" else values > limit
        if "answer" in found and "outlying" in found:
            found["answer"] &= ~found["outlying"]
        return found

    def __repr__(self) -> str:
        networks, structure = len(self.document["networks"]), self.document["structure"]
        return f"LoadedExport({networks} networks, structure={structure}, {len(self.classes)} classes, outputs={self.outputs})"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


def load_exported(path: str | Path, *, trust: bool = False) -> LoadedExport:
    """Read a file of `mola.export_onnx` (with onnxruntime) or `mola.export_torch`, told apart by their content.

    Args:
        path: of the file.
        trust: whether you trust whoever made the file. ONNX files need no trust; a `.pt2` file does, since PyTorch's reader
            can run code that it finds there.

    Returns:
        A callable from inputs to outputs by name, with `.classes`, `.outputs`, `.document` and `.metadata`.
    """
    path = Path(path)
    if not path.is_file():
        raise StorageError(f"{path}: there is no such file. Pass what mola.export_onnx or mola.export_torch wrote.")
    content = path.read_bytes()
    if content[:2] == b"PK":  # a zip archive, as torch writes them
        if not trust:
            raise OptionError(
                f"{path} is a program of torch.export, and PyTorch's reader can run code from such a file. If you trust whoever "
                f"made it, read it with mola.load_exported(path, trust=True). An ONNX file needs no trust."
            )
        program, properties = read_program(content, path)
        document, metadata = from_properties(properties, path)
        module = program.module()
        return LoadedExport(lambda tensors: run_program(module, tensors), document, metadata)
    try:
        session = onnx_session(content)
    except RuntimeError as error:
        raise StorageError(
            f"{path} is neither an ONNX file nor a program of torch.export: {_first_line(error)}"
        ) from error
    document, metadata = from_properties(session.get_modelmeta().custom_metadata_map, path)
    return LoadedExport(lambda tensors: run_session(session, tensors), document, metadata)
