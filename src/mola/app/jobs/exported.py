"""Programs of `torch.export.save` as networks with a last linear layer.

An exported program is a graph of operations without layers. Where its output is one linear operation of stored weights, the
graph is cut in front of it and the weights become an `nn.Linear` again: the same numbers, and a layer that can be fitted.

PyTorch unpickles parts of these files, so reading one can run code: the user must say that it is trusted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mola.errors import HeadError, OptionError, StorageError

__all__ = ["ExportedNetwork", "load_exported"]


class ExportedNetwork(nn.Module):
    """A program whose last operation is a layer again.

    Args:
        body: everything before it.
        weight: of the last operation, (classes, features).
        bias: likewise, or None.
    """

    def __init__(self, body: nn.Module, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.body = body
        classes, features = weight.shape
        self.head = nn.Linear(features, classes, bias=bias is not None, dtype=weight.dtype)
        self.head.weight = nn.Parameter(weight.detach().clone())
        if bias is not None:
            self.head.bias = nn.Parameter(bias.detach().clone())

    def forward(self, *inputs: Any, **named: Any) -> Tensor:
        """Logits."""
        logits: Tensor = self.head(self.body(*inputs, **named))
        return logits

    def train(self, mode: bool = True) -> ExportedNetwork:
        """Set the mode of this module and its head: a program has the mode that it was exported in."""
        self.training = mode
        self.head.train(mode)
        return self


def load_exported(path: Path, *, trust: bool) -> nn.Module:
    """A network from a file of `torch.export.save`.

    Args:
        path: the file.
        trust: whether the user trusts it.

    Returns:
        The network.

    Raises:
        OptionError: if it is not trusted, or does not exist.
        StorageError: if it is damaged.
    """
    if not path.is_file():
        message = f"{path} does not exist: expected a file made by torch.export.save."
        raise OptionError(message)
    if not trust:
        message = (
            f"{path} is an exported program, and PyTorch unpickles these: a file from a stranger could run code. "
            f"Where you trust it, add --trust."
        )
        raise OptionError(message)
    try:
        program = torch.export.load(path)
    except Exception as error:  # the reader raises a dozen kinds on damaged files
        message = f"{path} is no program that this PyTorch reads ({type(error).__name__}: {str(error)[:200]})."
        raise StorageError(message) from error
    return cut_before_last_linear(program.module(check_guards=False), str(path))


def cut_before_last_linear(module: torch.fx.GraphModule, name: str) -> ExportedNetwork:
    """A graph whose output is a linear operation, as body and layer.

    Args:
        module: of an exported program.
        name: for messages.

    Returns:
        The network.

    Raises:
        HeadError: if the output is something else.
    """
    output = next(node for node in module.graph.nodes if node.op == "output")
    returned = output.args[0]
    if isinstance(returned, dict) and "logits" in returned:
        returned = returned["logits"]
    last = returned[0] if isinstance(returned, (tuple, list)) and len(returned) == 1 else returned
    found = _linear(module, last)
    if found is None:
        what = getattr(last, "target", last)
        message = f"the program {name} ends in {what}: expected a linear layer of stored weights that gives the logits."
        raise HeadError(message)
    features, weight, bias = found
    output.args = (features,)
    module.graph.eliminate_dead_code()
    # Inputs and outputs were packed as trees; the features are one tensor.
    codegen = torch.fx.graph.CodeGen()
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    module.graph.set_codegen(codegen)
    module.recompile()
    return ExportedNetwork(_Called(module, [str(node.target) for node in inputs]), weight, bias)


class _Called(nn.Module):
    """A graph called by position or by name, as its network was."""

    def __init__(self, graph: torch.fx.GraphModule, names: list[str]) -> None:
        super().__init__()
        self.graph, self.names = graph, names

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """What the graph gives."""
        values = dict(zip(self.names, inputs, strict=False)) | named
        return self.graph(*[values[name] for name in self.names])


def _linear(module: torch.fx.GraphModule, node: Any) -> tuple[Any, Tensor, Tensor | None] | None:
    """The input, weight and bias of a linear operation."""
    if getattr(node, "op", None) != "call_function":
        return None
    aten = torch.ops.aten
    if node.target == aten.linear.default:
        features, weight, *rest = node.args
        bias = rest[0] if rest else None
    elif node.target == aten.addmm.default and getattr(node.args[2], "target", None) in (
        aten.t.default,
        aten.permute.default,
    ):
        bias, features, transposed = node.args
        weight = transposed.args[0]
    else:
        return None
    values = [None if one is None else _stored(module, one) for one in (weight, bias)]
    if values[0] is None or (bias is not None and values[1] is None):
        return None
    return features, values[0], values[1]


def _stored(module: torch.fx.GraphModule, node: Any) -> Tensor | None:
    if getattr(node, "op", None) != "get_attr":
        return None
    value: Any = module
    for part in str(node.target).split("."):
        value = getattr(value, part)
    return value if isinstance(value, Tensor) else None
