"""What ranks do in tests of loading together, each reading its part by threads: see `parallel_ranks`."""

from __future__ import annotations

import io
import itertools
import math
import threading
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from parallel_checks import CPU, ranks_of
from torch import Tensor

from wan_core.checkpoint import CheckpointError, load_dit, open_checkpoint, staged
from wan_core.checkpoint.save import write_safetensors
from wan_core.ops.quant.packed import PackedLinear
from wan_core.ops.quant.swap import Quantization
from wan_core.parallel.weights import SMALL, shared_checkpoint
from wan_core.pipeline.reading import load_parts
from wan_core.pipeline.sources import TINY


def write_odd(path: Path, times: int = 1, copies: int = 1) -> dict[str, Tensor]:
    """A file of tensors whose sizes go into no number of parts, and around the size that is not cut; what it holds.
    times: makes the large ones so much larger. copies: of every tensor, with other values."""
    generator, values = torch.Generator().manual_seed(5), {}
    shapes = {
        "large": ((1237 * times, 331), torch.bfloat16),
        "small": ((7,), torch.float32),
        "uncut": ((SMALL,), torch.uint8),
        "cut": ((SMALL + 1,), torch.uint8),
        "empty": ((0, 3), torch.float32),
        "wide": ((3 * times, 65537), torch.float8_e4m3fn),
        "number": ((), torch.float32),
        "last": ((401 * times, 613), torch.float32),
    }
    for i, (name, (shape, dtype)) in itertools.product(range(copies), shapes.items()):
        count = math.prod(shape) * dtype.itemsize
        raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
        values[f"{i}.{name}"] = raw.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)
    write_safetensors(values, path, {})
    return values


def bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8).cpu()


def staged_weights(
    mesh: str, path: str, ahead: int = staged.AHEAD, piece: int = staged.PIECE, device: str = "cpu", taken: int = 99
) -> tuple[list[str], int, int]:
    """What `Feed` gives where ranks read together: names of `taken` tensors that are not the file's, bytes that this
    rank read, and threads that are left."""
    ranks, changed, read = ranks_of(mesh, device), [], []
    plain = open_checkpoint(path)
    names, inner = list(plain.tensors), staged._read_into

    def counted(file: io.FileIO, at: int, place: memoryview) -> None:
        read.append(len(place))
        inner(file, at, place)

    with (
        torch.inference_mode(),
        patch.multiple(staged, AHEAD=ahead, PIECE=piece, _read_into=counted),
        staged.Feed(shared_checkpoint(plain, ranks), names, ranks.device, staged.Reading(threads=3)) as feed,
    ):
        for name in names[:taken]:
            tensor, stored = feed.read(name), plain.read(name)
            same = tensor.dtype == stored.dtype and tensor.shape == stored.shape and tensor.device == ranks.device
            if not same or not torch.equal(bytes_of(tensor), bytes_of(stored)):
                changed.append(name)
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("read-")]
    return changed, sum(read), len(threads)


def staged_model(mesh: str, device: str = "cpu", packed: str | None = None) -> list[str]:
    """Names of parameters that are not those of a model that one rank loads. packed: a file, as it is stored."""
    ranks, path = ranks_of(mesh, device), packed or TINY / "t2v_high.safetensors"
    quantization = None if packed is None else Quantization(PackedLinear, ranks.device)
    shared, how = shared_checkpoint(open_checkpoint(path), ranks), staged.Reading(mapped=False)
    state = load_dit(shared, device=ranks.device, quantization=quantization, how=how).state_dict()
    alone = load_dit(path, quantization=quantization).state_dict()
    return [name for name, value in alone.items() if not torch.equal(bytes_of(value), bytes_of(state[name]))]


def staged_together(mesh: str) -> list[str]:
    """`staged_model` for both experts, which are read at once. Ranks come to the second one at different times."""
    ranks, changed = ranks_of(mesh), []
    paths = {name: TINY / f"t2v_{name}.safetensors" for name in ("high", "low")}

    def load(name: str, how: staged.Reading) -> torch.nn.Module:
        time.sleep(0.05 * ((name == "high") == (ranks.rank % 2 == 0)))
        shared = shared_checkpoint(open_checkpoint(paths[name]), ranks, turn=how.turn)
        return load_dit(shared, device=ranks.device, how=how)

    models = load_parts(list(paths), load, ranks.device, in_order=True, how=staged.Reading(mapped=False))
    for name, path in paths.items():
        read = models[name].state_dict()
        changed += [key for key, value in load_dit(path).state_dict().items() if not torch.equal(value, read[key])]
    return changed


def truncated(mesh: str, path: str, keep: int, timeout: float) -> str:
    """The kind of exception, and its words, of reading a file that ends after `keep` bytes of its only tensor, which
    it did not when it was opened. The group of those who read gives up after `timeout` seconds."""
    ranks = ranks_of(mesh)
    process = dist.new_group(list(ranks.host.ranks), timeout=timedelta(seconds=timeout), backend="gloo")
    plain = open_checkpoint(path)
    dist.barrier()
    with open(path, "r+b") as file:
        file.truncate(plain.places["values"][1] + keep)
    dist.barrier()
    checkpoint = shared_checkpoint(plain, replace(ranks, host=replace(ranks.host, process=process)))
    with staged.Feed(checkpoint, ["values"], CPU, staged.Reading()) as feed:
        try:
            feed.read("values")
        except (CheckpointError, RuntimeError) as fault:
            return f"{type(fault).__name__}: {fault}"
    return "nothing"
