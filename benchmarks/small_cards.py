"""Suite `small-cards`: four steps of image-to-video with a LoRA for both experts, from files as people have them, on
smaller cards and with little host memory; and what the LoRA costs.

The files have random weights: one expert in FP8 with a scale for each tensor, which serves as both, UMT5 in FP8 as
ComfyUI's, the VAE, and a LoRA of rank 64. They need 23 GB in --scratch (/dev/shm makes reading them as fast as a warm
page cache). A smaller card is a limit on what the process may allocate, as `--memory-limit` sets it. On a CPU, the
embedded model stands for all of it, and streaming for a card.

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
from benchmarks.four_step import config_of, write_lora
from benchmarks.generation import PROMPT
from benchmarks.measure import make_room, settle
from benchmarks.options import SMALL_CARD_PARTS
from benchmarks.rows import Row, guarded
from benchmarks.turns import draw
from wan_core.checkpoint import load_text_encoder
from wan_core.checkpoint.random import random_module
from wan_core.checkpoint.save import save, write_safetensors
from wan_core.config import LoadOptions, LoraOptions, OptionError, Request
from wan_core.execution.report import GIB
from wan_core.models.text.config import UMT5_XXL
from wan_core.models.text.umt5 import UMT5Encoder
from wan_core.models.vae.vae import VideoVAE
from wan_core.models.wan.model import WanModel
from wan_core.ops.kernels.formats import quantize_reference
from wan_core.pipeline.builder import apply_loras
from wan_core.pipeline.loras import AppliedLoras, Wanted, read_loras
from wan_core.pipeline.pipeline import Pipeline
from wan_core.pipeline.settings import find_quantization
from wan_core.pipeline.sources import RANDOM, TINY

CARDS = (24.0, 16.0, 12.0)  # GiB
HOST = 27.0  # GiB of weights in a host of 32 GB


@dataclass(frozen=True)
class Files:
    """What a run loads: `options` for it, and a LoRA for both experts."""

    options: LoadOptions
    lora: Path
    image: Path

    @property
    def loras(self) -> tuple[LoraOptions, ...]:
        return (LoraOptions(path=str(self.lora)),)


def small_card_rows(
    name: str, sizes: list[str], device: torch.device, options: argparse.Namespace, details: dict[str, Any]
) -> Iterator[Row]:
    """Raises OptionError for a --scratch that is no folder, and for another model."""
    if options.scratch is not None and not options.scratch.is_dir():
        raise OptionError(f"--scratch {options.scratch} is no folder: make it, or leave it out")
    if name not in ("tiny", "random:i2v-A14B", "random:t2v-A14B"):  # the last is what it is unless said
        raise OptionError(f"model {name!r} given; the suite small-cards has random:i2v-A14B and tiny")
    details["model"] = name = "random:i2v-A14B" if device.type == "cuda" else "tiny"
    wanted = [part for part in SMALL_CARD_PARTS if part in (options.setting or ())] or SMALL_CARD_PARTS
    with tempfile.TemporaryDirectory(prefix="wancore-cards-", dir=options.scratch) as folder:
        files = write_files(name, device, options.layers, Path(folder))
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


@torch.no_grad()
def write_files(name: str, device: torch.device, layers: int | None, folder: Path) -> Files:
    cuda = device.type == "cuda"
    config = config_of(name) if cuda else replace(config_of(name), in_channels=36)
    config = replace(config, num_layers=min(layers or config.num_layers, config.num_layers))
    dtype, held = torch.bfloat16 if cuda else torch.float32, find_quantization("fp8-tensor", device)
    expert = random_module(config, device=device, dtype=dtype, quantization=held)
    assert isinstance(expert, WanModel)
    save(expert, folder / "expert.safetensors")
    del expert
    vae = random_module(RANDOM["i2v-A14B"][1], device=device, dtype=dtype) if cuda else None
    if vae is not None:
        assert isinstance(vae, VideoVAE)
        save(vae, folder / "vae.safetensors")
        write_text(folder / "umt5.safetensors", device)
    write_lora(folder / "lora.safetensors", config, device)
    draw(folder / "first.png")
    options = LoadOptions(
        task="i2v-A14B" if cuda else "i2v-tiny",
        high=str(folder / "expert.safetensors"),
        low=str(folder / "expert.safetensors"),
        text_encoder=str(folder / "umt5.safetensors" if cuda else TINY / "text_encoder.safetensors"),
        vae=str(folder / "vae.safetensors" if cuda else TINY / "vae.safetensors"),
        precision="checkpoint" if cuda else "fp8",
        device=str(device),
    )
    return Files(options, folder / "lora.safetensors", folder / "first.png")


def write_text(path: Path, device: torch.device) -> None:
    """UMT5 as `umt5_xxl_fp8_e4m3fn_scaled` has it: matrices in FP8, one scale for each, the table in bf16; with the
    embedded model's tokenizer."""
    encoder = random_module(UMT5_XXL, device=device, dtype=torch.bfloat16)
    assert isinstance(encoder, UMT5Encoder)
    tokenizer = load_text_encoder(TINY / "text_encoder.safetensors").tokenizer
    state: dict[str, Tensor] = {"spiece_model": torch.frombuffer(bytearray(tokenizer.proto), dtype=torch.uint8)}
    for name, value in encoder.state_dict().items():
        state[name] = value
        if name.startswith("blocks.") and value.ndim == 2 and "embedding" not in name:
            state[name], state[name.replace(".weight", ".scale_weight")] = quantize_reference(value, "tensor")
    write_safetensors(state, path, {})


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
