"""Which network is this: checksums of its numbers as stored, and as they read in coarser precisions.

A network that was fitted in float32 is still the same network after `.half()`, and that is all that is tolerated: numbers
are compared byte by byte, in the coarser of the two precisions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mola.errors import StorageError
from mola.network.calling import check_values, device_of, undisturbed, visited
from mola.numerics import exact
from mola.schema import check

KINDS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
HALF = (torch.float16, torch.bfloat16)
NAMES = {str(kind).removeprefix("torch."): kind for kind in KINDS}
NETWORK = {"numbers": int}
"""Schema of what tells one trained network from another; `same_signature` checks the rest, which older files lack."""
OLD = {"numbers": int, "sum": float, "magnitude": float, "half": bool}


def fingerprint(weights: Tensor) -> dict[str, str]:
    """Checksums of a layer's weights as they read in each floating-point type."""
    return {name: hashlib.sha256(_bytes(weights.to(kind))).hexdigest() for name, kind in NAMES.items()}


def _bytes(tensor: Tensor) -> Any:
    return tensor.reshape(-1).contiguous().view(torch.uint8).numpy()


def signature(network: nn.Module) -> dict[str, Any]:
    """What tells one trained network from another: checksums of each of its floating-point parameters and buffers."""
    tensors = list(_numbers_of(network).values())
    return {"numbers": sum(tensor.numel() for tensor in tensors), "tensors": [_record(tensor) for tensor in tensors]}


def _numbers_of(network: nn.Module) -> dict[str, Tensor]:
    # What a network computes with: parameters and buffers by name, without counters and other whole numbers.
    check_values(network, device_of(network))
    named = chain(network.named_parameters(), network.named_buffers())
    return {name: tensor for name, tensor in named if tensor.is_floating_point() or tensor.is_complex()}


def _record(tensor: Tensor, likely: str = "") -> str:
    # Its type, then its checksum in this and every type that is not finer, with `=` where nothing is rounded. If
    # `likely` is the tensor's own record, no other type is looked at.
    here, stored = _dense(tensor.detach()).cpu(), str(tensor.dtype).removeprefix("torch.")
    words = [stored, f"{stored}:{_checksum(here)}="]
    if likely.split(" ")[:2] == words:
        return likely
    for name, kind in NAMES.items():
        if name != stored and stored in NAMES and (kind in HALF or tensor.dtype == torch.float64):
            rounded = here.to(kind)
            same = torch.equal(rounded.to(here.dtype), here)
            words.append(f"{name}:{_checksum(rounded)}{'=' if same else ''}")
    return " ".join(words)


def _dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


def _checksum(tensor: Tensor) -> str:
    # Eight bytes are enough against chance, which is all that they guard against. The shape tells rows from columns.
    digest = hashlib.blake2b(str(tuple(tensor.shape)).encode(), digest_size=8)
    digest.update(_bytes(tensor))
    return digest.hexdigest()


class _Known(NamedTuple):
    stored: str
    sums: dict[str, str]
    """By type."""
    exact: set[str]
    """Types in which nothing is rounded."""

    @staticmethod
    def of(record: str) -> _Known:
        stored, *words = record.split(" ")
        pairs = [word.rstrip("=").partition(":") for word in words]
        return _Known(
            stored,
            {name: value for name, _, value in pairs},
            {name for word, (name, _, _) in zip(words, pairs, strict=True) if word.endswith("=")},
        )


def _same_tensor(found: str, saved: str, *, there_and_back: bool = False) -> bool:
    # `there_and_back`: whether it may have been rounded to half precision and lifted again.
    if found == saved:
        return True
    now, then = _Known.of(found), _Known.of(saved)
    # Rounded to the type it has now, or lifted from the type it had.
    kinds = {now.stored} if now.stored in then.sums else {then.stored}
    if there_and_back:
        kinds |= NAMES.keys()
    return any(kind in now.exact and now.sums[kind] == then.sums.get(kind) for kind in kinds)


def same_signature(found: dict[str, Any], saved: dict[str, Any]) -> bool:
    """Whether two signatures are of the same network, in the same precision or another.

    Args:
        found: of the network that is there.
        saved: of the one that is expected.

    Returns:
        Whether they are; not if an older version of this library recorded one of them, in another form.
    """
    for one in (found, saved):
        check(one, NETWORK | ({"tensors": [str]} if "tensors" in one else {}), "network")
    mine, other = found.get("tensors", []), saved.get("tensors")
    return other is not None and len(mine) == len(other) and all(map(_same_tensor, mine, other))


def same_network(network: nn.Module, saved: dict[str, Any]) -> bool:
    """Whether a network is the one of a saved signature, in the same precision or another.

    Args:
        network: that is there.
        saved: signature of the one that is expected, also as older versions of this library recorded it.

    Returns:
        Whether it is.
    """
    return same_signature(signature(network), saved) if "tensors" in saved else _same_sums(network, saved)


def signature_of(network: nn.Module) -> dict[str, Any]:
    """The signature of a network, read without disturbing it."""
    with undisturbed(network):
        return signature(network)


def require_network(network: nn.Module, saved: dict[str, Any], name: str) -> None:
    """Refuse a network that is not the one that was saved.

    Args:
        network: as the user passed it.
        saved: signature of the one that was saved.
        name: of the argument, for the message.
    """
    with undisturbed(network):
        same = same_network(network, saved)
    if not same:
        raise StorageError(
            f"{name}: this is not the network that was saved: its parameters differ. Pass the network this was made from."
        )


SAMPLED = 8
"""Numbers of each tensor that every prediction looks at."""


class _Memory:
    def __init__(self, network: nn.Module, tensors: Sequence[Tensor], records: Sequence[str]) -> None:
        # A scripted module keeps its parts elsewhere, and cannot gain or lose any.
        modules = [module for module in network.modules() if not isinstance(module, torch.jit.ScriptModule)]
        self.places = [
            (table, list(table), list(table.values()))
            for module in modules
            for table in (module._modules, module._parameters, module._buffers)
            if table
        ]
        self.tensors, self.records = list(tensors), list(records)
        self.marks = [_mark(tensor) for tensor in tensors]
        # Apart, for speed: tensors of inference mode are not counted, and sparse ones lie in no one place.
        self.counted = [tensor for tensor in tensors if not tensor.is_inference()]
        self.placed = [tensor for tensor in tensors if tensor.layout == torch.strided]
        self.versions, self.addresses = self._versions(), self._addresses()
        self.views = [_sample(tensor.detach()) for tensor in tensors]
        groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for view in self.views:
            groups.setdefault((view.dtype, view.device), []).append(view)
        self.samples = [(group, torch.cat(group)) for group in groups.values()]
        self.numbers: dict[int, Tensor] = {}
        for group, numbers in self.samples:
            self.numbers.update(zip(map(id, group), torch.split(numbers, list(map(len, group))), strict=True))

    def in_place(self) -> bool:
        """Whether everything hangs where it did."""
        return all(all(map(is_, map(table.get, names), values)) for table, names, values in self.places)

    def _versions(self) -> list[int]:
        return [tensor._version for tensor in self.counted]

    def _addresses(self) -> list[int]:
        return [tensor.data_ptr() for tensor in self.placed]

    def unwritten(self) -> bool:
        """Whether every tensor lies where it did, and PyTorch has counted no change of it."""
        return self._versions() == self.versions and self._addresses() == self.addresses

    def sampled(self) -> bool:
        """Whether a few numbers of every tensor are the same."""
        return all(torch.equal(torch.cat(views), numbers) for views, numbers in self.samples)

    def holds(self) -> bool:
        """Whether nothing looks different."""
        # In this order: the views are of memory that may be gone where a tensor lies elsewhere now.
        return self.in_place() and self.unwritten() and self.sampled()

    def still_known(self) -> dict[tuple[int, int, int], str]:
        """Records of the tensors that do not look different, by object and mark."""
        known = zip(self.tensors, self.marks, self.records, self.views, strict=True)
        return {
            (id(tensor), *mark): record
            for tensor, mark, record, view in known
            if _mark(tensor) == mark and torch.equal(view, self.numbers[id(view)])
        }


def _mark(tensor: Tensor) -> tuple[int, int]:
    # Where a tensor lies and how often it was written to; tensors of inference mode do not count.
    if tensor.layout != torch.strided:
        return 0, 0
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version


def _sample(tensor: Tensor) -> Tensor:
    # A view of a few numbers, spread over the tensor, as the whole numbers that have the same bits; none of a sparse
    # one.
    if tensor.layout != torch.strided or tensor.numel() == 0:
        return torch.zeros(0, dtype=torch.int32, device="cpu")
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    bits = tensor.view(whole)
    bits = bits.permute(sorted(range(bits.dim()), key=bits.stride, reverse=True))  # as it lies in memory
    flat = bits.view(-1) if bits.is_contiguous() else bits[(0,) * (bits.dim() - 1)]
    return flat[:: max(1, len(flat) // SAMPLED)]


class Watch:
    """Notices that a network is not the one that was fitted any more.

    A look at every prediction is cheap: where each tensor lies, how often PyTorch has counted a change of it, and a few of its
    numbers, since changes through `.data` are not counted. What looks different is compared in full. A thorough look compares
    every number.

    Args:
        network: as it was fitted.
        saved: its signature, if it is known; it may have been in another precision then.
    """

    def __init__(self, network: nn.Module, saved: dict[str, Any] | None = None) -> None:
        self.network = network
        # A file of an older version has sums alone: from here on, the network is known by its numbers.
        self.signature = saved if saved is not None and "tensors" in saved else signature(network)
        self._memory: _Memory | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Without the memory: a copy is of another network, which lies elsewhere.
        return vars(self) | {"_memory": None}

    def changed(self, *, thorough: bool = False) -> list[str]:
        """Look at the network.

        Args:
            thorough: compare every number.

        Returns:
            Names of the tensors that are not those that were fitted, in whatever precision.
        """
        memory = self._memory
        if torch.compiler.is_compiling() or (not thorough and memory is not None and memory.holds()):
            return []
        named = _numbers_of(self.network)
        tensors = list(named.values())
        known = {} if memory is None or thorough else memory.still_known()
        saved = self.signature["tensors"]
        if len(tensors) != len(saved):
            return [f"{len(tensors)} tensors instead of {len(saved)}"]
        pairs = zip(tensors, saved, strict=True)
        records = [known.get((id(one), *_mark(one))) or _record(one, then) for one, then in pairs]
        differing = [
            name
            for name, now, then in zip(named, records, saved, strict=True)
            if not _same_tensor(now, then, there_and_back=True)
        ]
        if differing and visited(self.network):  # by another thread, in whose pass buffers may be written to
            return [name for name in differing if isinstance(named[name], nn.Parameter)]
        self._memory = None if differing else _Memory(self.network, tensors, records)
        return differing


# --- files of older versions: sums over all numbers -------------------------------------------------------------------

GOLDEN = (5**0.5 - 1) / 2
PLACES = 65537
"""How many places have a weight of their own: a prime, so that no layer's rows are that far apart."""


def _same_sums(network: nn.Module, saved: dict[str, Any]) -> bool:
    check(saved, OLD | ({"order": float} if "order" in saved else {}), "network")
    tensors = [tensor.detach() for tensor in _numbers_of(network).values() if tensor.is_floating_point()]
    numbers = [exact(tensor) for tensor in tensors]
    found = {
        "sum": sum(tensor.sum().item() for tensor in numbers),
        "magnitude": sum(tensor.abs().sum().item() for tensor in numbers),
        "order": sum(_weighed(tensor.flatten()) for tensor in numbers),
    }
    # Rounding to half precision moves each number by up to 0.4 %, and their sum by far less.
    half = saved["half"] or any(tensor.dtype in HALF for tensor in tensors)
    scale = (1e-3 if half else 1e-9) * max(found["magnitude"], saved["magnitude"])
    return saved["numbers"] == sum(tensor.numel() for tensor in numbers) and all(
        abs(value - saved[name]) <= scale for name, value in found.items() if name in saved
    )


def _weighed(numbers: Tensor) -> float:
    # The sum of numbers, each times the weight of its place: weights between 0 and 1 that look random.
    weights = (GOLDEN * torch.arange(1, PLACES + 1, dtype=torch.float64, device=numbers.device)) % 1
    rounds, rest = divmod(len(numbers), PLACES)
    total = numbers[: rounds * PLACES].view(rounds, PLACES).sum(0) @ weights
    return float(total + numbers[rounds * PLACES :] @ weights[:rest])
