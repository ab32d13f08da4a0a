"""The readers of this project, and the hostile files for each: `READERS`."""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

import torch

from tools.hostile import checkpoints, gguf, lora, media, texts
from wan_core.checkpoint import detect, load_dit, load_text_encoder, load_vae, open_checkpoint
from wan_core.checkpoint.detect import expected_shapes
from wan_core.checkpoint.lora.read import read_lora
from wan_core.checkpoint.save import load_latents
from wan_core.cli.inform import run_check
from wan_core.cli.inspect import inspect
from wan_core.config.file_names import safetensors_metadata
from wan_core.execution.report import Report
from wan_core.media.mp4 import write_mp4
from wan_core.media.sound import mono, read_sound
from wan_core.media.video import load_image, picture_size, read_metadata, read_video
from wan_core.models.audio.wav2vec2 import SAMPLE_RATE
from wan_core.models.vae.vae import VideoVAE
from wan_core.pipeline.decode import decode_latents
from wan_core.pipeline.pipeline import metadata
from wan_core.pipeline.sources import TINY
from wan_core.sampling.cache.curves import read_curve

CAPTION = "a red circle moving right on a blue background"
LORA_SHAPES = expected_shapes(lora.LORA_MODEL)
DECODED = 2048  # numbers of the largest latents that are decoded: decoding large ones is work, not reading


@dataclass(frozen=True)
class Reader:
    """make: a damaged file; bombs: those that are small and mean much; read: what the project does with the file.

    name: what the file is called. beside: sound files in the same folder.
    """

    name: str
    make: Callable[[Random], bytes]
    bombs: tuple[Callable[[], bytes], ...]
    read: Callable[[Path], object]
    warm: Callable[[], bytes]
    beside: Callable[[], dict[str, bytes]] = dict

    def case(self, number: int, seed: int) -> bytes:
        """The content of case `number`: the bombs first."""
        if number < len(self.bombs):
            return self.bombs[number]()
        return self.make(Random(f"{seed} {self.name} {number}"))


def read_model(path: Path) -> None:
    """Describe it, then read every tensor and load it as what it is."""
    safetensors_metadata(path)
    inspect(path)
    checkpoint = open_checkpoint(path)
    for name, info in checkpoint.tensors.items():
        value = checkpoint.read(name)
        assert (value.shape, value.dtype) == (info.shape, info.dtype), (name, info, value.shape, value.dtype)
    kind = detect(checkpoint).kind
    {"dit": load_dit, "text_encoder": load_text_encoder, "vae": load_vae}[kind](checkpoint)


def read_lora_file(path: Path) -> None:
    """Read it for a model, and apply every change in full."""
    inspect(path)
    lora = read_lora(path, LORA_SHAPES)
    assert lora.changes and len(lora.words()) < 5000
    for name, changes in lora.changes.items():
        for change in changes:
            assert change.apply(torch.ones(LORA_SHAPES[name]), 0.5).shape == LORA_SHAPES[name]
            change.low_rank(torch.device("cpu"))


def read_json(path: Path) -> None:
    """Read a file as each of the JSON files that lie beside a model."""
    content = path.read_bytes()
    faults = []
    for name in texts.JSON_NAMES:
        file = path.parent / name
        file.write_bytes(content)
        try:
            if name == "x.magcache.json":
                read_curve(file)
            else:
                load_dit(path.parent / ("a.safetensors" if name == "config.json" else name))
        except ValueError as fault:
            faults.append(fault)
        file.unlink()
    for fault in faults:  # any that is not an error for users first
        if type(fault).__module__.split(".")[0] != "wan_core":
            raise fault
    if len(faults) == len(texts.JSON_NAMES):
        raise faults[0]


def read_tokenizer(path: Path) -> None:
    encoder = load_text_encoder(TINY / "text_encoder.safetensors", tokenizer=path)
    for text in (CAPTION, "", "\u2581\0 été 日本 \U0001f600 &amp;" * 30):
        encoder.tokenizer.encode(text)


def read_picture(path: Path) -> None:
    picture_size(path)
    load_image(path, (64, 48))
    load_image(path)


def read_video_file(path: Path) -> None:
    """Reads what the command `check` reads, and all frames."""
    read_metadata(path)
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            run_check(argparse.Namespace(video=path, prompt=CAPTION))
        finally:
            read_video(path)


def read_sound_file(path: Path) -> None:
    mono(read_sound(path), SAMPLE_RATE)


@cache
def _vae() -> VideoVAE:
    return load_vae(TINY / "vae.safetensors", dtype=torch.float32)


def read_latents(path: Path) -> None:
    """Reads what the command `decode` reads, and decodes latents where they are few."""
    latents, fps, settings = load_latents(path)
    if latents.numel() <= DECODED:
        frames = decode_latents(_vae(), latents, Report(torch.device("cpu"), settings=settings))
        write_mp4(path.with_name("out.mp4"), frames, fps=fps, metadata=metadata(settings))


READERS = {
    "safetensors": Reader(
        "model.safetensors",
        checkpoints.safetensors,
        checkpoints.SAFETENSORS_BOMBS,
        read_model,
        lambda: checkpoints.base("dit"),
    ),
    "pickle": Reader(
        "model.pth",
        checkpoints.archive,
        checkpoints.PICKLE_BOMBS,
        read_model,
        lambda: checkpoints.base_pickle("vae 2.1"),
        lambda: {"config.json": b'{"_class_name": "WanModel", "num_heads": 2}'},
    ),
    "GGUF": Reader("model.gguf", gguf.gguf_file, gguf.GGUF_BOMBS, read_model, lambda: gguf.base_gguf("dit")),
    "LoRA": Reader("lora.safetensors", lora.lora, lora.LORA_BOMBS, read_lora_file, lora.base_lora),
    "JSON": Reader(
        "any.json",
        lambda random: texts.json_file(random, random.choice(texts.JSON_NAMES)),
        texts.JSON_BOMBS,
        read_json,
        lambda: b"{}",
        lambda: {"a.safetensors": checkpoints.base("dit")},
    ),
    "tokenizer": Reader("spiece.model", texts.tokenizer, texts.TOKENIZER_BOMBS, read_tokenizer, texts.base_tokenizer),
    "image": Reader("image.bin", media.image, media.IMAGE_BOMBS, read_picture, lambda: media.picture("PNG")),
    "video": Reader("video.bin", media.video_file, media.VIDEO_BOMBS, read_video_file, lambda: media.video("mp4")),
    "sound": Reader("sound.bin", media.sound_file, media.SOUND_BOMBS, read_sound_file, lambda: media.sound("wav")),
    "latents": Reader("a.latents.safetensors", texts.latents, texts.LATENTS_BOMBS, read_latents, texts.base_latents),
}
