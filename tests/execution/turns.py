"""Two pipelines, text to video and image to video, that make videos of two sizes in turn: what memory they keep."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import torch
from PIL import Image

from benchmarks.measure import compile_counts
from tools.processes import resident
from wan_core.config import LoadOptions, Request
from wan_core.pipeline.pipeline import Pipeline

TASKS, SIZES = ("t2v", "i2v"), ((64, 32, 9), (32, 64, 13))
ONCE = len(TASKS) * len(SIZES)  # videos until each pipeline has made each size


def growth(device: torch.device, residency: str, videos: int, folder: Path) -> tuple[int, int, int]:
    """Bytes that the device and the process hold more than when each pipeline had made each size, and graphs that were
    compiled since. On a CPU the device's bytes are those of all live tensors."""
    cuda = device.type == "cuda"
    image = folder / "first.png"
    Image.new("RGB", (96, 96), (20, 40, 200)).save(image)
    options = {"device": str(device), "residency": residency if cuda else "auto"}
    options |= {"precision": "fp8", "compile": "blocks"} if cuda else {}
    pipes = {task: Pipeline.load(LoadOptions(model="tiny", task=f"{task}-tiny", **options)) for task in TASKS}
    on_device, on_host, graphs = [], [], []
    for number in range(videos):
        task, (width, height, frames) = TASKS[number % 2], SIZES[number // 2 % 2]
        size = {"width": width, "height": height, "frames": frames, "steps": 2, "boundary": 0.9, "shift": 1.0}
        picture = {"image": str(image)} if task == "i2v" else {}
        pipes[task].generate(Request(prompt=f"a red circle, number {number}", seed=number, **size, **picture))
        on_device.append(torch.cuda.memory_allocated(device) if cuda else live_bytes())
        on_host.append(resident(os.getpid()))
        graphs.append(compile_counts()[0])
    more_host = max(on_host[ONCE:]) - on_host[ONCE - 1]
    return max(on_device[ONCE:]) - max(on_device[:ONCE]), more_host, graphs[-1] - graphs[ONCE - 1]


def live_bytes() -> int:
    """Bytes of all tensors on the CPU that Python refers to, each memory once."""
    gc.collect()
    storages: dict[int, int] = {}
    for one in gc.get_objects():
        if issubclass(type(one), torch.Tensor) and one.device.type == "cpu" and one.layout == torch.strided:
            storage = one.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
