"""Posteriors as files that run without this library: ONNX and torch.export.

A graph holds the K networks and, as constants, all that the closed-form Bayesian head needs at one prior precision.
"""

from mola.export.graph import NUMBERS as NUMBERS
from mola.export.graph import OUTPUTS as OUTPUTS
from mola.export.graph import Exported as Exported
from mola.export.graph import Pixels as Pixels
from mola.export.onnx_file import export_onnx as export_onnx
from mola.export.reading import LoadedExport as LoadedExport
from mola.export.reading import load_exported as load_exported
from mola.export.torch_file import export_torch as export_torch
from mola.export.tracing import Written as Written
