"""Inputs that are larger than any of their kind are refused before they are parsed: what was given, and the limit."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tools.hostile import checkpoints, gguf, lora, media, texts
from tools.hostile.readers import READERS
from wan_core.cli import main
from wan_core.config import UserError
from wan_core.config.limits import (
    MAX_DESCRIPTION,
    MAX_DIRECTORY,
    MAX_HEADER,
    MAX_JSON,
    MAX_LATENTS,
    MAX_NAME,
    MAX_NAMES,
    MAX_PICKLE,
    MAX_PICTURE,
    MAX_SIDE,
    MAX_TENSORS,
)
from wan_core.media.opening import container_format
from wan_core.media.video import read_video

CASES: dict[str, tuple[str, Callable[[], bytes], str]] = {
    "header": ("safetensors", lambda: checkpoints.many_tensors(400_000), f"at most {MAX_HEADER} are read"),
    "tensors": ("safetensors", lambda: checkpoints.many_tensors(20_001), f"20001 tensors, and at most {MAX_TENSORS}"),
    "name": (
        "safetensors",
        lambda: checkpoints.with_header(
            b'{"' + b"x" * 5000 + b'":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
        ),
        f"5000 characters .* at most {MAX_NAME}",
    ),
    "names": (
        "safetensors",
        lambda: checkpoints.empty_tensors(checkpoints.grown_names("blocks.0.", ".weight", size=256)),
        f"20000 tensors have 51.0000 characters, and at most {MAX_NAMES} are read",
    ),
    "words of a name": (
        "GGUF",
        gguf.GGUF_BOMBS[-3],
        "not a Wan 2.2 model",
    ),
    "prefixes of a name": ("LoRA", lora.LORA_BOMBS[-5], "20000 are of modules that this model does not have"),
    "description": (
        "safetensors",
        lambda: checkpoints.stored({"a.comfy_quant": torch.zeros(5000, dtype=torch.uint8)}, {}),
        f"at most {MAX_DESCRIPTION} bytes",
    ),
    "pickle": (
        "pickle",
        lambda: checkpoints.repacked(lambda _: b"\x80\x02" + b"]" * MAX_PICKLE + b"."),
        f"at most {MAX_PICKLE} are read",
    ),
    "instructions": (
        "pickle",
        lambda: checkpoints.repacked(lambda _: b"\x80\x02" + b"]" * 600_000 + b"."),
        "more than 500000 instructions",
    ),
    "members": ("pickle", lambda: checkpoints._many_members(100_000), f"at most {MAX_DIRECTORY} are read"),
    "gguf": (
        "GGUF",
        lambda: b"GGUF" + struct.pack("<IQQ", 3, 10**6, 0) + bytes(100),
        f"claims 1000000 tensors and 0 metadata entries, and at most {MAX_TENSORS}",
    ),
    "gguf texts": ("GGUF", gguf.GGUF_BOMBS[4], "at most 524288 are read"),
    "index": ("JSON", lambda: b'{"a":' + b" " * MAX_JSON + b"1}", f"at most {MAX_JSON} are read"),
    "tokenizer": ("tokenizer", lambda: bytes(2**24 + 1), "at most 16777216 are read"),
    "picture": ("image", lambda: media.png(13_000, 13_000, rows=1), f"at most {MAX_PICTURE // 10**6} million"),
    "narrow picture": ("image", lambda: media.png(2, 26_000_000, rows=9), f"2x26000000 .* at most {MAX_SIDE} in each"),
    "wide picture": ("image", lambda: media.png(60_000, 1), f"60000x1 pixels; .* at most {MAX_SIDE} in each direction"),
    "narrow video": ("video", lambda: media.video("gif", 16, 20_000, 1), f"16x20000 .* at most {MAX_SIDE} in each"),
    "chunks": ("image", lambda: media.png(8, 8, more=media._chunk(b"tEXt", b"") * 100_001), "100000 PNG chunks"),
    "scans": ("image", lambda: media._scans(40), "scans of 6000x6000"),
    "eps": ("image", lambda: media._EPS, "none of PNG, JPEG"),
    "frame": ("video", lambda: media.video("avi", 4160, 2304, 1, "png"), "4160x2304|as a video"),
    "frames": ("video", lambda: media.video("avi", 512, 512, 17, "mpeg4"), "more than 16 frames of 512x512"),
    "latents": (
        "latents",
        lambda: texts.claimed(torch.zeros(1, 16, 1, 3000, 3000, dtype=torch.float8_e4m3fn)),
        f"144000000 numbers: 1 to {MAX_LATENTS}",
    ),
    "settings": ("latents", lambda: texts.claimed(torch.zeros(1, 16, 1, 4, 4), "[]"), "settings of list"),
    "infinite": ("latents", lambda: texts.claimed(torch.full((1, 16, 1, 4, 4), float("inf"))), "not finite"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_limits_are_stated(name: str, tmp_path: Path) -> None:
    kind, make, message = CASES[name]
    reader = READERS[kind]
    for other, content in reader.beside().items():
        (tmp_path / other).write_bytes(content)
    (tmp_path / reader.name).write_bytes(make())
    begin = time.process_time()
    with pytest.raises(UserError, match=message) as refused:
        reader.read(tmp_path / reader.name)
    assert str(refused.value).isprintable() and time.process_time() - begin < 10


@pytest.mark.parametrize("playlist", media.PLAYLISTS)
@pytest.mark.parametrize("name", ["a.mp4", "a.m3u8", "a.gif"])
def test_no_file_leads_to_another(playlist: bytes, name: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "a.ts").write_bytes(media.video("mp4"))
    (tmp_path / name).write_bytes(playlist.replace(b"file:///etc/passwd", str(tmp_path / "a.ts").encode()))
    assert main(["check", str(tmp_path / name), "--prompt", "a red circle moving right on a blue background"]) == 2
    assert "none of MP4, MOV, MKV, WebM, AVI and GIF" in capsys.readouterr().err


@pytest.mark.parametrize("kind", media.CODECS)
def test_containers_are_read_by_what_they_are(kind: str, tmp_path: Path) -> None:
    (tmp_path / "video.bin").write_bytes(media.video(kind, 64, 48, 4))
    assert container_format(media.video(kind)[:12]) is not None
    assert read_video(tmp_path / "video.bin").shape[1:] == (48, 64, 3)
