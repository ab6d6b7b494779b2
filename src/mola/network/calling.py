"""Call any network on any batch, and leave no trace: modes, buffers and random state are restored, whatever happens.

A network is an `nn.Module` whose output is a tensor of logits, or an object or mapping with `logits`. A batch is what a
loader yields: `(inputs, labels)`, inputs alone, or a mapping with the labels under "labels". Inputs are a tensor, a
tuple of positional arguments, or a mapping of keyword arguments. What is passed directly, and not by a loader, is inputs: a
tuple then always holds positional arguments, never labels.

`Differentiable` and `WithTensors` are views of a network that are called in the same way, with gradients or with other weights.
`undisturbed` and `visited` put everything back at the end.
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from mola.errors import DataError, HeadError, MolaError


class Differentiable(nn.Module):
    """A network whose logits carry gradients, although `mola.network.call` asks for none.

    Args:
        network: any network that `call` takes.
    """

    def __init__(self, network: nn.Module) -> None:
        # Borrow the signature of the network's own `forward`: `call` reads it to pass mappings the right way.
        super().__init__()
        self.network = network

        @functools.wraps(network.forward)
        def forward(*arguments: Any, **keywords: Any) -> Any:
            with torch.enable_grad():
                return network(*arguments, **keywords)

        self.forward = forward


_door = threading.RLock()
"""A functional call puts tensors into the module for its duration: one thread at a time."""


class WithTensors(nn.Module):
    """A network with other parameters and buffers for the duration of each call.

    Args:
        network: whose own tensors are untouched before and after.
        tensors: by dotted name.
    """

    def __init__(self, network: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.network = network

        @functools.wraps(network.forward)
        def forward(*arguments: Any, **keywords: Any) -> Any:
            with _door:
                return functional_call(network, dict(tensors), arguments, keywords)

        self.forward = forward


@dataclass(frozen=True)
class Habits:
    """What a pass showed that left the random state alone."""

    writes: bool
    """Into its own inputs, as `x -= mean` does."""


_known: dict[int, tuple[weakref.ref[nn.Module], Habits]] = {}
"""By identity: modules may compare and hash as they please."""


def habits_of(network: nn.Module) -> Habits | None:
    """What is known of a network; None before its first pass, and as long as random numbers are drawn in its passes."""
    found = _known.get(id(network))
    return None if found is None or found[0]() is not network else found[1]


def remember(network: nn.Module, habits: Habits) -> None:
    """Keep what was seen for as long as the network lives."""
    key = id(network)
    _known[key] = (weakref.ref(network, lambda gone: _forget(key, gone)), habits)


def _forget(key: int, gone: weakref.ref[nn.Module]) -> None:
    # Another network may have the place in memory, and in this dictionary, by now.
    if key in _known and _known[key][0] is gone:
        del _known[key]


def random_states(device: torch.device | None) -> list[Tensor]:
    """The state of torch's own generators: that of the CPU, and that of a network's card."""
    card = [torch.cuda.get_rng_state(device)] if device is not None and device.type == "cuda" else []
    return [torch.get_rng_state(), *card]


def tensors_of(inputs: Any) -> Iterator[Tensor]:
    """Every tensor among the inputs of a network.

    Yields:
        One after the other.
    """
    if isinstance(inputs, Tensor):
        yield inputs
    elif isinstance(inputs, (Mapping, tuple, list)):
        for value in inputs.values() if isinstance(inputs, Mapping) else inputs:
            yield from tensors_of(value)


def copied(inputs: Any) -> Any:
    """The inputs of a network with a copy of every tensor."""
    if isinstance(inputs, Tensor):
        return inputs.detach().clone()
    if isinstance(inputs, Mapping):
        return {key: copied(value) for key, value in inputs.items()}
    if isinstance(inputs, (tuple, list)):
        parts = [copied(value) for value in inputs]
        return type(inputs)(*parts) if hasattr(inputs, "_fields") else type(inputs)(parts)
    return inputs


def versions_of(inputs: Any) -> list[int]:
    """How often each tensor was written in place; those of inference mode do not count."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors_of(inputs)]


def same_values(first: Any, second: Any) -> bool:
    """Whether two inputs hold the same numbers: a change through `.data` leaves the version alone."""
    pairs = zip(tensors_of(first), tensors_of(second), strict=True)
    return all(one.shape == other.shape and torch.equal(one, other) for one, other in pairs)


Inputs = Any
"""A tensor, a tuple of them (positional arguments), or a mapping of them (keyword arguments)."""

LABELS = "labels"


class Batch(NamedTuple):
    """Inputs of a network and, where the loader has them, labels."""

    inputs: Inputs
    labels: Tensor | None


def as_batch(raw: Any, where: str, *, empty: bool = False) -> Batch:
    """Read what a loader yielded.

    Args:
        raw: `(inputs, labels)`, `[inputs, labels]`, `(inputs,)`, a tensor, or a mapping.
        where: words for the error message.
        empty: whether inputs may have size 0.

    Returns:
        Inputs and labels apart.
    """
    batch = _split(raw, where)
    if not empty and _has_empty(batch.inputs):
        raise DataError(f"{where} is empty: its inputs have size 0. Remove empty batches from the loader.")
    return batch


def one_batch(inputs: Inputs) -> Inputs:
    """Inputs that were passed by themselves, as a call takes them.

    Args:
        inputs: a tensor, a tuple of positional arguments, or a mapping of keyword arguments; of any size, 0 included.

    Returns:
        The same.
    """
    if isinstance(inputs, list):
        raise DataError(
            "expected one batch, got a list, which is an iterable of batches: pass it to predict. One batch is a tensor, a "
            "tuple of positional arguments or a mapping of keyword arguments; of [x, y], pass x."
        )
    return inputs


def _split(raw: Any, where: str) -> Batch:
    if isinstance(raw, (tuple, list)) and len(raw) == 2:  # the commonest first: this is paid at every batch
        return Batch(raw[0], _as_labels(raw[1], where))
    if isinstance(raw, Tensor):
        return Batch(raw, None)
    if isinstance(raw, Mapping):
        inputs = {key: value for key, value in raw.items() if key != LABELS}
        if not inputs:
            raise DataError(f"{where}: the mapping holds no network inputs beside {LABELS!r}, only {sorted(raw)}.")
        return Batch(inputs, _as_labels(raw.get(LABELS), where))
    if isinstance(raw, Sequence) and not isinstance(raw, str) and len(raw) in (1, 2):
        return Batch(raw[0], _as_labels(raw[1], where) if len(raw) == 2 else None)
    size = f" of length {len(raw)}" if isinstance(raw, Sequence) else ""
    raise DataError(
        f"{where}: expected (inputs, labels), inputs alone, or a mapping with {LABELS!r}; got {type(raw).__name__}{size}. "
        "Several inputs go in a tuple: ((first, second), labels)."
    )


def _as_labels(labels: Any, where: str) -> Tensor | None:
    if labels is None or isinstance(labels, Tensor):
        return labels
    try:
        return torch.as_tensor(labels, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"{where}: labels must be a tensor or array of class indices, got {type(labels).__name__}."
        ) from error


def _has_empty(inputs: Inputs) -> bool:
    # Whether a tensor of size 0 is among the inputs.
    if isinstance(inputs, Tensor):
        return inputs.dim() > 0 and len(inputs) == 0
    if isinstance(inputs, (Mapping, tuple, list)):
        return any(_has_empty(value) for value in (inputs.values() if isinstance(inputs, Mapping) else inputs))
    return False


def to_device(inputs: Inputs, device: torch.device) -> Inputs:
    """Inputs with every tensor inside them on `device`."""
    if isinstance(inputs, Tensor):
        return inputs if inputs.device == device else inputs.to(device, non_blocking=True)
    if isinstance(inputs, Mapping):
        return {key: to_device(value, device) for key, value in inputs.items()}
    if isinstance(inputs, (tuple, list)):
        moved = [to_device(value, device) for value in inputs]
        return type(inputs)(*moved) if hasattr(inputs, "_fields") else type(inputs)(moved)
    return inputs


def device_of(network: nn.Module) -> torch.device | None:
    """Where a network's first parameter or buffer is; None if it has none."""
    return next((tensor.device for tensor in chain(network.parameters(), network.buffers())), None)


def check_values(network: nn.Module, device: torch.device | None) -> None:
    """Refuse a network whose weights have no values.

    Args:
        network: any module.
        device: where it is.
    """
    if device is not None and device.type == "meta":
        raise DataError(
            f"{type(network).__name__} is on the meta device: its weights have shapes and no values. Load them first, or "
            f"make them with network.to_empty(device='cpu') and network.load_state_dict(...)."
        )


def call(network: nn.Module, inputs: Inputs, device: torch.device | None = None) -> Tensor:
    """Logits (n, C) of one forward pass without gradients, on the network's own device.

    `no_grad` rather than `inference_mode`: a network that caches a tensor during the pass must still train afterwards.
    A network that writes into its inputs gets a copy: the next network, and the caller, see them as they were.

    Args:
        network: any module that returns logits, or an object or mapping with `logits`.
        inputs: a tensor, a tuple of positional arguments, or a mapping of keyword arguments.
        device: the network's, where it is known: many calls need not look for it.

    Returns:
        The very tensor of logits that the network returned.
    """
    device = device or device_of(network)
    check_values(network, device)
    try:
        if device is not None:
            inputs = to_device(inputs, device)
        with torch.no_grad():
            return _logits_of(_run(network, inputs) if torch.compiler.is_compiling() else _watched(network, inputs))
    except (MolaError, torch.OutOfMemoryError):
        raise
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError, NotImplementedError) as error:
        raise DataError(
            f"{type(network).__name__} failed on inputs of {_describe(inputs)}: {error}. "
            f"Pass inputs of the shape and type that the network was trained on.{_left_over(network, inputs)}"
        ) from error


def _watched(network: nn.Module, inputs: Inputs) -> Any:
    own = network
    while isinstance(own, (Differentiable, WithTensors)):
        own = own.network
    habits = habits_of(own)
    if habits is not None and not habits.writes:
        versions = versions_of(inputs)
        output = _run(network, inputs)
        if versions_of(inputs) != versions:
            remember(own, Habits(writes=True))
            raise DataError(
                f"{type(own).__name__} changed its inputs in place, which it had not done before. Pass the inputs again; or "
                f"let the network compute a new tensor: x = x - mean instead of x -= mean."
            )
        return output
    given, inputs = inputs, copied(inputs)
    # Inside vmap numbers cannot be looked at, and a compiled network would be compiled anew for being watched.
    if habits is not None or hasattr(own, "_orig_mod") or torch._C._functorch.peek_interpreter_stack() is not None:
        return _run(network, inputs)
    device = device_of(own)
    versions, states = versions_of(inputs), random_states(device)
    output = _run(network, inputs)
    writes = versions_of(inputs) != versions or not same_values(given, inputs)
    if all(map(torch.equal, random_states(device), states)):
        remember(own, Habits(writes))
    # Else the network draws or seeds, or another thread drew: nothing is known, and the next pass is watched again.
    return output


def _run(network: nn.Module, inputs: Inputs) -> Any:
    if isinstance(inputs, Tensor):
        return network(inputs)
    if isinstance(inputs, Mapping):
        inputs = {key: value for key, value in inputs.items() if key != LABELS}
        return network(**inputs) if _takes_keywords(network, inputs) else network(inputs)
    return network(*inputs) if isinstance(inputs, (tuple, list)) else network(inputs)


def _describe(inputs: Inputs) -> str:
    if isinstance(inputs, Tensor):
        return f"shape {tuple(inputs.shape)} and type {str(inputs.dtype).removeprefix('torch.')}"
    if isinstance(inputs, Mapping):
        return "{" + ", ".join(f"{key}: {_describe(value)}" for key, value in inputs.items()) + "}"
    if isinstance(inputs, (tuple, list)):
        return "(" + ", ".join(_describe(value) for value in inputs) + ")"
    return f"type {type(inputs).__name__}"


def _takes_keywords(network: nn.Module, inputs: Mapping[str, Any]) -> bool:
    # Whether the keys are arguments of `forward` (as in transformers), or the mapping itself is the input.
    try:
        inspect.signature(network.forward).bind(**inputs)
    except TypeError:
        return False
    return True


def _left_over(network: nn.Module, inputs: Inputs) -> str:
    # Words about arguments that `forward` does not take: members of a tuple, or entries of a mapping.
    if isinstance(inputs, tuple) and len(inputs) > 1:
        return " A tuple holds the network's arguments, as in network(x, ids): if the last one are labels, pass the inputs alone."
    if not isinstance(inputs, Mapping) or _takes_keywords(network, inputs):
        return ""
    known = inspect.signature(network.forward).parameters
    foreign = [key for key in inputs if key not in known and key != LABELS]
    if not foreign or len(foreign) == len(inputs):
        return ""
    return f" Its forward takes no argument {foreign}: leave that out of the batches."


def _logits_of(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping) and "logits" in output:
        output = output["logits"]
    elif hasattr(output, "logits"):
        output = output.logits
    if not isinstance(output, Tensor):
        raise HeadError(
            f"expected the network to return a tensor of logits, or an object or mapping with 'logits'; got "
            f"{type(output).__name__}. Wrap the network in a module whose forward returns the logits alone."
        )
    return output


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """A place where autocast, which is for the networks, does not round the posterior's own arithmetic."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


@contextmanager
def undisturbed(*networks: nn.Module, passes_only: bool = False) -> Iterator[None]:
    """Evaluate networks inside; afterwards they, and the random state, are exactly as they were.

    Inside, every module is in eval mode. Afterwards, also when an exception strikes, training flags, plain attributes,
    buffers (which ones, and their values) and the random state of the CPU and of the networks' devices are restored.
    Nothing but buffers is copied.

    The random state belongs to all threads: put back, it repeats what another thread has drawn meanwhile. So predictions leave
    it alone where every network was seen to draw nothing, as nearly all do when they are evaluated.

    Args:
        networks: the networks.
        passes_only: whether nothing but passes of the networks happens inside. A loader that is read there may draw, too.

    Yields:
        Nothing.
    """
    modules = list({id(module): module for network in networks for module in network.modules()}.values())
    tracing = torch.compiler.is_compiling()  # nothing runs then: no values or random numbers to protect
    accelerators = _accelerators(networks) if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    drawn: list[tuple[int | None, Tensor]] = []
    if not tracing and not (passes_only and all(map(_is_quiet, networks))):
        drawn.append((None, torch.get_rng_state()))
    drawn += [(index, torch.cuda.get_rng_state(index)) for index in accelerators if drawn]
    _enter(modules, copy_values=not tracing)
    try:
        yield
    finally:
        _leave(modules)
        if drawn and not (passes_only and all(map(_is_quiet, networks))):
            _put_back(drawn)


def _is_quiet(network: nn.Module) -> bool:
    if habits_of(network) is not None:
        return True
    inner = getattr(network, "networks", ())  # a mixture runs none but its own
    return bool(inner) and isinstance(inner, tuple) and all(map(_is_quiet, inner))


def _put_back(states: Sequence[tuple[int | None, Tensor]]) -> None:
    for card, state in states:
        if card is None:
            torch.set_rng_state(state)
        else:
            torch.cuda.set_rng_state(state, card)


def _accelerators(networks: Sequence[nn.Module]) -> list[int]:
    return sorted({p.device.index or 0 for n in networks for p in n.parameters() if p.device.type == "cuda"})


@dataclass
class _Visit:
    # What is put back when the last visitor leaves a module; visitors may come from several threads.

    attributes: _Attributes
    values: _BufferValues
    visitors: int = 0


_visits: dict[int, _Visit] = {}
"""Modules that are being visited, by identity."""
_visit_door = threading.Lock()


def visited(network: nn.Module) -> bool:
    """Whether somebody is inside `undisturbed` with this network: its buffers may be other ones for the time being."""
    return id(network) in _visits


def _enter(modules: Sequence[nn.Module], *, copy_values: bool) -> None:
    with _visit_door:
        fresh = [module for module in modules if id(module) not in _visits]
        values = _BufferValues(fresh if copy_values else [], sharers=len(fresh))
        for module in fresh:
            _visits[id(module)] = _Visit(_Attributes(module), values)
        for module in modules:  # after all states are noted: a compiled module sets the flag of the one inside too
            _visits[id(module)].visitors += 1
            if module.training:  # setting an attribute of a module costs more than reading one
                module.training = False


def _leave(modules: Sequence[nn.Module]) -> None:
    with _visit_door:
        for module in modules:
            visit = _visits[id(module)]
            visit.visitors -= 1
            if visit.visitors == 0:
                del _visits[id(module)]
                visit.attributes.restore()
                visit.values.release()


class _Attributes:
    def __init__(self, module: nn.Module) -> None:
        self.module, self.training = module, module.training
        # A scripted module keeps its attributes elsewhere, and cannot gain or lose any.
        self.scripted = isinstance(module, torch.jit.ScriptModule)
        self.attributes = {} if self.scripted else dict(vars(module))
        self.buffers = {} if self.scripted else dict(module._buffers)

    def restore(self) -> None:
        """Put back what changed, and only that: another thread may be reading."""
        if self.scripted:
            self.module.training = self.training
            return
        for now, before in ((vars(self.module), self.attributes), (self.module._buffers, self.buffers)):
            if len(now) == len(before) and all(map(is_, now, before)) and all(map(is_, now.values(), before.values())):
                continue  # as nearly always, and this is fast
            for name in now.keys() - before.keys():
                del now[name]
            for name, value in before.items():
                if name not in now or now[name] is not value:
                    now[name] = value


class _BufferValues:
    # The values of all buffers, in one tensor for each type and device: a hundred small copies would cost more than the
    # pass.

    def __init__(self, modules: Sequence[nn.Module], sharers: int) -> None:
        self.sharers = sharers
        self.groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for module in modules:
            for buffer in module._buffers.values():
                if buffer is not None and not buffer.is_inference():
                    self.groups.setdefault((buffer.dtype, buffer.device), []).append(buffer)
        self.shapes = {kind: [buffer.shape for buffer in group] for kind, group in self.groups.items()}
        self.versions = {kind: [buffer._version for buffer in group] for kind, group in self.groups.items()}
        self.values = {kind: _joined(group) for kind, group in self.groups.items()}

    def release(self) -> None:
        """Restore the values when the last of the modules that share them is left."""
        self.sharers -= 1
        if self.sharers == 0:
            self._restore()

    def _restore(self) -> None:
        for kind, group in self.groups.items():
            shapes, versions, values = self.shapes[kind], self.versions[kind], self.values[kind]
            # The values are compared too, as a change through `.data` leaves the version alone.
            if [buffer._version for buffer in group] == versions and torch.equal(_joined(group), values):
                continue
            saved = torch.split(values, [shape.numel() for shape in shapes])
            for buffer, shape, version, flat in zip(group, shapes, versions, saved, strict=True):
                value = flat.view(shape)
                if buffer._version != version or not torch.equal(buffer, value):
                    # Through `.data`: a plain copy would invalidate a graph that the user still holds.
                    buffer.data.resize_(shape).copy_(value)


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    # Without autocast, which refuses to join tensors of another half precision than its own.
    with torch.no_grad(), without_autocast(tensors[0].device):
        return torch.cat([tensor if tensor.dim() == 1 else tensor.reshape(-1) for tensor in tensors])
