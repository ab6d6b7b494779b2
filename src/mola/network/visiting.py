"""Visit networks and leave no trace: modes, buffers and random state are put back, whatever happens."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import is_

import torch
from torch import Tensor, nn

from mola.network.calling import habits_of, without_autocast

__all__ = ["undisturbed", "visited"]


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
    """Whether a network was seen to draw no random numbers."""
    if habits_of(network) is not None:
        return True
    inner = getattr(network, "networks", ())  # a mixture runs none but its own
    return bool(inner) and isinstance(inner, tuple) and all(map(_is_quiet, inner))


def _put_back(states: Sequence[tuple[int | None, Tensor]]) -> None:
    """Restore the random state of the CPU (None) and of cards."""
    for card, state in states:
        if card is None:
            torch.set_rng_state(state)
        else:
            torch.cuda.set_rng_state(state, card)


def _accelerators(networks: Sequence[nn.Module]) -> list[int]:
    return sorted({p.device.index or 0 for n in networks for p in n.parameters() if p.device.type == "cuda"})


@dataclass
class _Visit:
    """What is put back when the last visitor leaves a module; visitors may come from several threads."""

    attributes: _Attributes
    values: _BufferValues
    visitors: int = 0


_visits: dict[int, _Visit] = {}
"""Modules that are being visited, by identity."""
_door = threading.Lock()


def visited(network: nn.Module) -> bool:
    """Whether somebody is inside `undisturbed` with this network: its buffers may be other ones for the time being."""
    return id(network) in _visits


def _enter(modules: Sequence[nn.Module], *, copy_values: bool) -> None:
    """Note the state of modules that nobody visits yet, and evaluate all."""
    with _door:
        fresh = [module for module in modules if id(module) not in _visits]
        values = _BufferValues(fresh if copy_values else [], sharers=len(fresh))
        for module in fresh:
            _visits[id(module)] = _Visit(_Attributes(module), values)
        for module in modules:  # after all states are noted: a compiled module sets the flag of the one inside too
            _visits[id(module)].visitors += 1
            if module.training:  # setting an attribute of a module costs more than reading one
                module.training = False


def _leave(modules: Sequence[nn.Module]) -> None:
    """Restore the modules whose last visitor goes."""
    with _door:
        for module in modules:
            visit = _visits[id(module)]
            visit.visitors -= 1
            if visit.visitors == 0:
                del _visits[id(module)]
                visit.attributes.restore()
                visit.values.release()


class _Attributes:
    """A module's attributes, its mode among them, and which buffers it has."""

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
    """The values of all buffers, in one tensor for each type and device: a hundred small copies would cost more than the pass."""

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
