"""What an opened checkpoint is, whatever it was stored as: names, shapes and dtypes now, values when asked for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from wan_core.config import UserError
from wan_core.config.limits import MAX_NAME, MAX_NAMES, MAX_TENSORS
from wan_core.ops.quant.packed import Packed, stored_parts


class CheckpointError(UserError):
    """A model file is damaged, incomplete, of an unknown format, or not the part that was asked for.

    `fault` says what is wrong and what to do; `where` names the file. The message is `"{where}: {fault}"`. Code inside
    `naming` raises it without `where`.
    """

    def __init__(self, fault: str, *, where: str = "") -> None:
        super().__init__(f"{where}: {fault}" if where else fault)
        self.fault = fault
        self.where = where


@contextmanager
def naming(where: str) -> Iterator[None]:
    """A `CheckpointError` raised inside, which names no file yet, names `where`."""
    try:
        yield
    except CheckpointError as fault:
        raise fault if fault.where else CheckpointError(fault.fault, where=where) from None


def counted(names: Collection[str], what: str) -> str:
    """`"1 tensor is missing (a)"`, `"7 tensors are missing (a, b, c, d, e and 2 more)"` for what = "missing"."""
    return f"{len(names)} {'tensor is' if len(names) == 1 else 'tensors are'} {what} ({listing(list(names))})"


def listing(names: list[str] | tuple[str, ...], limit: int = 5) -> str:
    """The first few of a list of names and how many more there are, for a message: `"a, b, c and 37 more"`."""
    shown = ", ".join(name if len(name) <= 120 else name[:117] + "..." for name in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


@dataclass(frozen=True)
class TensorInfo:
    """A stored tensor without its values: `nbytes` is its size in the file.

    packing: the format of a matrix that is packed (`quant.packed.FORMATS`), None for plain numbers. `shape` is then
    that of the matrix, and `dtype` what `Checkpoint.read` gives.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    packing: str | None = None


Read = Callable[[str], Tensor]


def part_name(name: str, part: str) -> str:
    """What a part of the packed tensor `name` is called: that of `X.weight` would be called as the whole is."""
    return f"{name}:{part}"


@dataclass(frozen=True)
class Readers:
    """Processes that read the same tensors in the same order, each a part of every large one.

    count, index: how many they are, and which one is this. device: where parts are gathered. small: tensors of at most
    so many bytes everyone reads whole. gather(whole, own): `whole` is uint8 [count * n] on the device, `own` the view
    of it [n] that this process has filled; work that is queued on the current stream afterwards finds all of it. read:
    a whole tensor on the device, of those that nobody reads ahead.
    """

    count: int
    index: int
    device: torch.device
    small: int
    gather: Callable[[Tensor, Tensor], None]
    read: Read

    def part(self, nbytes: int) -> int:
        """Bytes of each one's part of a tensor; that of the last ones may reach beyond its end. A multiple of 16, as
        copies and exchanges like their addresses."""
        return -(-nbytes // (self.count * 16)) * 16


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Named tensors that have been found but not read. Wrappers replace `reader` and the tables.

    `where` is a short path for messages, `tensors` says what is there, `metadata` holds the strings that came with it,
    `path` is the file or folder (None for a state dict). `parts`: packed tensor -> what it consists of, as plain
    tensors that `read` gives too, named by `part_name`. `tokenizer` makes the SentencePiece model from the metadata,
    where it has one (GGUF). `places`: file and offset of the tensors and parts whose bytes lie in a file as they are.
    `readers`: who reads these tensors together with this process. `wide`: it asks for products in 16 bits, though its
    matrices are in FP8.
    """

    where: str
    path: Path | None
    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]
    reader: Read
    tokenizer: Callable[[], bytes] | None = None
    places: Mapping[str, tuple[Path, int]] = field(default_factory=dict)
    readers: Readers | None = None
    parts: Mapping[str, Mapping[str, TensorInfo]] = field(default_factory=dict)
    wide: bool = False

    def read(self, name: str) -> Tensor:
        """The tensor `name` with the dtype and shape of the file; of a packed one, the dequantised numbers.

        A tensor on the CPU that shares memory with the mapped file: nothing is copied, pages come in when they are
        touched, and writing to the tensor changes memory but never the file. The file stays mapped until its last
        tensor is freed.
        """
        if self.info(name).packing is not None:
            return self.read_packed(name).dequantize()
        return self.reader(name)

    @property
    def whole(self) -> Read:
        """What gives a tensor that is not read ahead: `read`, or the readers."""
        return self.read if self.readers is None else self.readers.read

    def read_packed(self, name: str, read: Read | None = None) -> Packed:
        """The matrix `name`, whose `packing` is not None, as it is stored; its parts share memory with the file. read:
        gives the parts instead, in their order."""
        info = self.info(name)
        assert info.packing is not None
        stored = {part.rpartition(":")[2]: (read or self.reader)(part) for part in self.parts[name]}
        return Packed(info.packing, info.shape, stored_parts(info.packing, stored))

    def info(self, name: str) -> TensorInfo:
        """The shape, dtype and size of a tensor, or of one part of a packed tensor. Raises CheckpointError."""
        info = self.parts.get(name.rpartition(":")[0], {}).get(name) or self.tensors.get(name)
        if info is None:
            raise CheckpointError(f"it has no tensor named {name}", where=self.where)
        return info


def short_path(path: Path) -> str:
    """The last two components: enough to recognise `high_noise_model/model-00001-of-00002.safetensors`."""
    return "/".join(path.absolute().parts[-2:])


def check_names(names: Collection[str]) -> None:
    """Raise CheckpointError for more tensors, or longer names, than any model has."""
    if len(names) > MAX_TENSORS:
        raise CheckpointError(f"it holds {len(names)} tensors, and at most {MAX_TENSORS} are read")
    longest = max(names, key=len, default="")
    if len(longest) > MAX_NAME:
        raise CheckpointError(
            f"a tensor's name has {len(longest)} characters ({longest[:60]}...), and at most {MAX_NAME} are allowed"
        )
    total = sum(map(len, names))
    if total > MAX_NAMES:
        raise CheckpointError(
            f"the names of its {len(names)} tensors have {total} characters, and at most {MAX_NAMES} are read"
        )


def from_state_dict(state: Mapping[str, Tensor], where: str, path: Path | None = None) -> Checkpoint:
    """A checkpoint over tensors that are already in memory. Every entry must be a plain tensor that owns its values."""
    with naming(where):
        _check_state(state)
    tensors = {n: TensorInfo(tuple(t.shape), t.dtype, t.numel() * t.element_size()) for n, t in state.items()}
    return Checkpoint(where, path, tensors, {}, lambda name: state[name].detach())


def _check_state(state: Mapping[str, Tensor]) -> None:
    odd = [
        f"{str(name)[:80]!r}: {type(value).__name__}"
        for name, value in state.items()
        if not (isinstance(name, str) and isinstance(value, Tensor))
    ]
    if odd:
        raise CheckpointError(f"a state dict of named tensors was expected, but it holds {listing(odd)}")
    if not state:
        raise CheckpointError("it holds no tensors")
    check_names(state)
    for name, value in state.items():
        _check_plain(name, value)


def _check_plain(name: str, value: Tensor) -> None:
    if value.layout != torch.strided or value.is_quantized or value.is_meta:
        raise CheckpointError(f"{name} is a meta, sparse or quantised tensor, which cannot be used as a weight")
    # A view that repeats its few values (stride 0) would grow when it is moved, to whatever size the file claims.
    if value.numel() * value.element_size() > value.untyped_storage().nbytes():
        raise CheckpointError(f"{name} claims more values than are stored")


def merge(shards: Iterable[Checkpoint], where: str, path: Path, metadata: Mapping[str, str]) -> Checkpoint:
    """One checkpoint of several shards. A tensor may be in one shard only."""
    tensors: dict[str, TensorInfo] = {}
    owner: dict[str, Checkpoint] = {}
    places: dict[str, tuple[Path, int]] = {}
    parts: dict[str, Mapping[str, TensorInfo]] = {}
    merged = dict(metadata)
    for shard in shards:
        for name, info in shard.tensors.items():
            if name in owner:
                raise CheckpointError(f"the tensor {name} is in two shards, {owner[name].where} and {shard.where}")
            tensors[name], owner[name] = info, shard
        check_names(tensors)
        parts |= shard.parts
        owner |= dict.fromkeys((part for several in shard.parts.values() for part in several), shard)
        places |= shard.places
        for key, value in shard.metadata.items():
            merged.setdefault(key, value)
    return Checkpoint(
        where,
        path,
        tensors,
        merged,
        lambda name: owner[name].reader(name),
        places=places,
        parts=parts,
    )
