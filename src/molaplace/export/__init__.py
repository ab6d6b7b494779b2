"""Export posteriors as ONNX or torch.export files that run without this library.

An exported file contains the networks and, as constants, everything that the Bayesian head needs. Its graph is a trace of
`posterior.predict`.
"""

from molaplace.export.batches import BatchPredictor
from molaplace.export.graph import OUTPUTS, REGRESSION_OUTPUTS, Pixels
from molaplace.export.reading import LoadedExport, load
from molaplace.export.writing import NamedTensor, Written, onnx, torch_export

__all__ = [
    "OUTPUTS",
    "REGRESSION_OUTPUTS",
    "BatchPredictor",
    "LoadedExport",
    "NamedTensor",
    "Pixels",
    "Written",
    "load",
    "onnx",
    "torch_export",
]
