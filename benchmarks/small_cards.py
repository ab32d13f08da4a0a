"""Suite `small-cards`: four steps of image-to-video with a LoRA for both experts, from files as people have them, on
smaller cards and with little host memory; and what the LoRA costs.

The files are those of the suite `everyday`, 40 GB in --scratch (/dev/shm keeps them in memory; files that are there are
used again). A smaller card is a limit on what the process may allocate, as `--memory-limit` sets it. On a CPU, the
embedded model stands for all of it, and streaming for a card. `--setting int8` takes experts in INT8 (rotated rows, as
in ComfyUI's files of 2026), which are multiplied as stored.

LoRA on, other strength, off   both experts, read again and encoded, beside `load`; `same_bytes`: off, every byte of the
                               weights is that of before
denoise, no LoRA               four steps; the LoRA merged and attached, with `ratio` to it
full card, 24 GiB ...          a video, text and image encoded and decoded: the phases' sum after one of two steps.
                               `peak_gib` is the most on the device in any phase, `text_gib` while the prompt was
                               encoded, `host_gib` pinned. `identical`: the latents are bit for bit those of the full
                               card, as they must be on a GPU unless an expert stays in its file and has its LoRA
                               attached; `error`: how far they are from them. Cards have 27 GiB of host memory, what
                               32 GB leave, unless it says "ample"
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import parse_size
from benchmarks.comfy_files import (
    EXPERTS,
    IMAGE,
    TEXT,
    VAE,
    expert_file,
    lora_file,
    write_experts,
    write_image,
    write_lora,
    write_loras,
    write_text_encoder,
    write_vae,
)
from benchmarks.comfy_files import INT8 as INT8_FILES
from benchmarks.measure import make_room, settle
from benchmarks.options import INT8, SMALL_CARD_PARTS
from benchmarks.rows import Row, guarded
from wan_core.checkpoint import load_dit
from wan_core.checkpoint.save import save
from wan_core.config import LoadOptions, LoraOptions, OptionError, Request
from wan_core.execution.report import GIB
from wan_core.pipeline.builder import apply_loras
from wan_core.pipeline.loras import AppliedLoras, Wanted, read_loras
from wan_core.pipeline.pipeline import Pipeline
from wan_core.pipeline.settings import find_quantization
from wan_core.pipeline.sources import TINY, find_experts

PROMPT = "a red circle moving right on a blue background"
CARDS = (24.0, 16.0, 12.0)  # GiB
FP8 = "fp8"
HOST = 27.0  # GiB of weights in a host of 32 GB


@dataclass(frozen=True)
class Files:
    """What a run loads: `options` for it, and LoRAs for both experts."""

    options: LoadOptions
    loras: tuple[LoraOptions, ...]
    image: Path


def small_card_rows(
    name: str, sizes: list[str], device: torch.device, options: argparse.Namespace, details: dict[str, Any]
) -> Iterator[Row]:
    """Raises OptionError for a --scratch that is no folder, and for another model."""
    if options.scratch is not None and not options.scratch.is_dir():
        raise OptionError(f"--scratch {options.scratch} is no folder: make it, or leave it out")
    if name not in ("tiny", "random:i2v-A14B", "random:t2v-A14B"):  # the last is what it is unless said
        raise OptionError(f"model {name!r} given; the suite small-cards has random:i2v-A14B and tiny")
    details["model"] = name = "random:i2v-A14B" if device.type == "cuda" else "tiny"
    settings = options.setting or ()
    wanted = [part for part in SMALL_CARD_PARTS if part in settings] or SMALL_CARD_PARTS
    details["experts"] = precision = INT8 if INT8 in settings else FP8
    with tempfile.TemporaryDirectory(prefix="wancore-cards-") as folder:
        files = write_files(
            device, precision, options.layers, (options.scratch or Path(folder)) / "models", Path(folder)
        )
        make_room(device)
        for size in sizes:
            if "loras" in wanted:
                yield from lora_rows(files, size, device)
            make_room(device)
            if "cards" in wanted:
                yield from card_rows(files, size, device)


def request_of(files: Files, size: str, steps: int | None = None) -> Request:
    width, height, frames = parse_size(size)
    given = {"width": width, "height": height, "frames": frames, "preset": "4-step", "steps": steps}
    return Request(prompt=PROMPT, image=str(files.image), seed=1, **given)


# --------------------------------------------------------------------------------------------------------------- files


def write_files(device: torch.device, precision: str, layers: int | None, models: Path, folder: Path) -> Files:
    """The files of the suite `everyday` in `models`; on a CPU the embedded model in `folder`. precision: of experts."""
    write_image(folder)
    if device.type != "cuda":
        return embedded_files(device, precision, folder)
    stored = INT8_FILES if precision == INT8 else "fp8_scaled"
    write_experts(models, "i2v", device, layers, (stored,))
    write_loras(models, "i2v", device)
    write_text_encoder(models, device)
    write_vae(models, device)
    experts = {n: str(models / "diffusion_models" / expert_file("i2v", n, stored, layers)) for n in EXPERTS}
    text, vae = str(models / "text_encoders" / TEXT), str(models / "vae" / VAE)
    held = INT8 if precision == INT8 else "checkpoint"
    options = LoadOptions(**experts, text_encoder=text, vae=vae, precision=held, device=str(device))  # type: ignore[arg-type]
    loras = tuple(LoraOptions(path=str(models / "loras" / lora_file("i2v", n)), expert=n) for n in EXPERTS)
    return Files(options, loras, folder / "input" / IMAGE)


def embedded_files(device: torch.device, precision: str, folder: Path) -> Files:
    experts = {}
    for name in EXPERTS:
        experts[name] = str(folder / f"{name}.safetensors")
        held = find_quantization(INT8 if precision == INT8 else "fp8-tensor", device)
        save(load_dit(TINY / f"i2v_{name}.safetensors", dtype=torch.float32, quantization=held), experts[name])
    lora = folder / "lora.safetensors"
    write_lora(lora, find_experts(experts["high"]).dit, device)
    options = LoadOptions(
        task="i2v-tiny",
        high=experts["high"],
        low=experts["low"],
        text_encoder=str(TINY / "text_encoder.safetensors"),
        vae=str(TINY / "vae.safetensors"),
        precision=precision,
        device=str(device),
    )
    return Files(options, (LoraOptions(path=str(lora)),), folder / "input" / IMAGE)


# --------------------------------------------------------------------------------------------------------------- LoRAs


def lora_rows(files: Files, size: str, device: torch.device) -> Iterator[Row]:
    """One pipeline, everything on the device."""
    residency = "resident" if device.type == "cuda" else "auto"
    pipe = Pipeline.load(replace(files.options, residency=residency))
    yield {"name": "load", "size": size, "seconds": pipe.loaded.as_dict()["phases"]["load"]["seconds"]}
    loras = Loras(pipe, read_loras(files.loras, pipe.models.dit_config, two_experts=True), device)
    before, base = digest(pipe), denoising(pipe, files, size)
    yield {"name": "denoise, no LoRA", "size": size, "seconds": base}
    ratio = {"size": size, "ratio_to": "denoise, no LoRA"}
    for label, strength in (("LoRA on", 1.0), ("other strength", 0.5)):
        yield {"name": label, "size": size, "seconds": loras.merge(strength)}
    seconds = denoising(pipe, files, size)
    yield {"name": "denoise, LoRA merged", "seconds": seconds, "ratio": round(base / seconds, 4), **ratio}
    yield {"name": "LoRA off", "size": size, "seconds": loras.merge(None), "same_bytes": digest(pipe) == before}
    loras.attach()
    seconds = denoising(pipe, files, size)
    yield {"name": "denoise, LoRA attached", "seconds": seconds, "ratio": round(base / seconds, 4), **ratio}


class Loras:
    """A LoRA on both experts of a pipeline, merged or attached whatever its options say."""

    def __init__(self, pipe: Pipeline, wanted: dict[str, list[Wanted]], device: torch.device) -> None:
        self.pipe, self.wanted, self.device = pipe, wanted, device

    def merge(self, strength: float | None) -> float:
        """Seconds for both experts; None takes it off."""
        settle(self.device)
        begin = time.perf_counter()
        for name, several in self.wanted.items():
            ones = [] if strength is None else [replace(one, strength=strength) for one in several]
            apply_loras(self.pipe.models.expert(name), ones, self.pipe.models.settings.parts[name], self.device)
        settle(self.device)
        return round(time.perf_counter() - begin, 4)

    def attach(self) -> None:
        for name, several in self.wanted.items():
            AppliedLoras.of(self.pipe.models.expert(name), self.device).apply(several)


def digest(pipe: Pipeline) -> list[str]:
    """Of every byte of both experts' parameters: weighted sums where they are, because hashing 28 GB takes long."""
    found = []
    for name in ("high", "low"):
        total = hashlib.sha256()
        for parameter in pipe.models.expert(name).parameters():
            raw = parameter.detach().flatten().view(torch.uint8)
            weights = (torch.arange(len(raw), device=raw.device) % 251 + 1).to(torch.int32)
            total.update(str(int((raw.to(torch.int32) * weights).sum(dtype=torch.int64))).encode())
        found.append(total.hexdigest())
    return found


@torch.no_grad()
def denoising(pipe: Pipeline, files: Files, size: str) -> float:
    """Seconds of the four steps, after two, which load kernels."""
    seconds = 0.0
    for steps in (2, None):
        job = pipe.prepare(request_of(files, size, steps))
        conditioning = pipe.encode(job)
        settle(pipe.models.device)
        begin = time.perf_counter()
        pipe.sample(job, conditioning)
        settle(pipe.models.device)
        seconds = time.perf_counter() - begin
    return round(seconds, 4)


# --------------------------------------------------------------------------------------------------------------- cards


def card_rows(files: Files, size: str, device: torch.device) -> Iterator[Row]:
    cards: Sequence[tuple[str, dict[str, Any]]] = [("full card", {})]
    if device.type == "cuda":
        cards = [*cards, *((f"{gib:g} GiB", {"memory_limit": gib, "host_memory_limit": HOST}) for gib in CARDS)]
        cards = [*cards, (f"{CARDS[-1]:g} GiB, ample host memory", {"memory_limit": CARDS[-1]})]
    else:
        cards = [*cards, ("streamed", {"residency": "stream"})]
    exact: list[tuple[Tensor, float]] = []
    for label, limits in cards:
        yield guarded(label, size, None, lambda given=limits: card_row(files, size, device, given, exact))
        make_room(device)
        if device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0, device)


def card_row(
    files: Files, size: str, device: torch.device, limits: dict[str, Any], exact: list[tuple[Tensor, float]]
) -> Row:
    """exact: latents and seconds of the full card, put there by its row."""
    options = replace(files.options, loras=files.loras, **limits)
    pipe = Pipeline.load(options, request=request_of(files, size))
    phases, latents = video(pipe, files, size)
    seconds = sum(numbers["seconds"] for name, numbers in phases.items() if name != "load")
    residency = pipe.models.residency
    pinned = {id(unit): unit for held in residency.host_weights.values() for unit in held.units if unit.memory}
    row: Row = {
        "seconds": round(seconds, 4),
        "load_seconds": phases["load"]["seconds"],
        "peak_gib": max(numbers.get("peak_gib", 0.0) for name, numbers in phases.items() if name != "load"),
        "text_gib": max(numbers.get("peak_gib", 0.0) for name, numbers in phases.items() if "text" in name),
        "host_gib": round(sum(unit.layout.nbytes for unit in pinned.values()) / GIB, 3),
        "streams_text": residency.streams_text,
        "loras": {name: part.lora_mode for name, part in pipe.models.settings.parts.items() if name in ("high", "low")},
        "phases": {name: numbers["seconds"] for name, numbers in phases.items()},
    }
    if residency.policy == "stream":
        row["resident_blocks"] = residency.resident_blocks
    if not exact:
        exact.append((latents, seconds))
        return row
    error = float((latents - exact[0][0]).norm() / exact[0][0].norm())
    row |= {
        "identical": bool(torch.equal(latents, exact[0][0])),
        "error": error,
        "slowdown": round(seconds / exact[0][1], 4),
    }
    return row | {"ratio": round(exact[0][1] / seconds, 4), "ratio_to": "full card"}


def video(pipe: Pipeline, files: Files, size: str) -> tuple[dict[str, Any], Tensor]:
    """Phases and latents of a video of four steps, after one of two, which loads kernels."""
    pipe.generate(request_of(files, size, steps=2))
    result = pipe.generate(request_of(files, size))
    return result.report.as_dict()["phases"], result.latents
