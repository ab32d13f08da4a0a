"""The files that the cases name: miniatures of every family, LoRAs, pictures, videos, sound, and damaged files.

All of it is drawn from seeds. `shapes.json` says which tensors a miniature has: `a.[2].b` stands for a.0.b and a.1.b,
`like` names the family whose tensors it shares, and an empty shape leaves one of them out.
"""

from __future__ import annotations

import json
import re
import shutil
import wave
from pathlib import Path
from typing import Any

import numpy as np
import torch

State = dict[str, torch.Tensor]
SHAPES: dict[str, dict[str, str]] = json.loads(Path(__file__).with_name("shapes.json").read_text())
# The text encoder is the embedded one, whose rows have 64 numbers; ComfyUI's own loader needs to be told.
NOTES = {"num_heads": "2", "config": json.dumps({"transformer": {"text_dim": 64}})}
ANIMATE_2 = NOTES | {"config": json.dumps({"transformer": {"model_type": "animate2", "text_dim": 64}})}
# file -> shapes; the seed of the weights is the name
MODELS = {
    **{f"{family}_{expert}_noise": family for family in ("t2v", "i2v", "vace", "fun", "camera")
       for expert in ("high", "low")},
    **{name: name for name in ("ti2v", "animate", "animate2", "fun21", "s2v", "vace", "vision", "speech", "vae22")},
    "wan2.1_t2v": "t2v", "wan2.1_i2v_480p": "i2v21", "animate2_distilled": "animate2",
}  # fmt: skip


def make_files(product: Path, folder: Path) -> None:
    """Write every file to `folder`. product: the checkout, whose embedded model is copied in other forms."""
    tiny = next((product / "wan_core").rglob("t2v_high.safetensors")).parent
    release = folder / "release"
    release.mkdir()
    names = {"t2v_high": "high_noise_model", "t2v_low": "low_noise_model", "vae": "vae", "text_encoder": "text_encoder"}
    for ours, theirs in names.items():
        shutil.copyfile(tiny / f"{ours}.safetensors", release / f"{theirs}.safetensors")
    for lora in tiny.rglob("*4step*.safetensors"):
        shutil.copyfile(lora, folder / lora.name)
    make_media(folder)
    for name, shapes in MODELS.items():
        notes = ANIMATE_2 if shapes == "animate2" else {} if shapes in ("vision", "speech", "vae22") else NOTES
        write_safetensors(folder / f"{name}.safetensors", draw(shapes, name), notes)
    write_safetensors(
        folder / "vae21.safetensors", read_safetensors(release / "vae.safetensors")[0]
    )  # without metadata
    state, notes = read_safetensors(release / "high_noise_model.safetensors")
    rng = np.random.default_rng(0)
    make_forms(folder, state, notes)
    make_packed(folder, rng)
    make_loras(folder, state, rng)
    make_damaged(folder, state, notes)


def shapes_of(name: str) -> dict[str, tuple[int, ...]]:
    """By the name of each tensor."""
    rows = dict(SHAPES[name])
    rows = {**SHAPES.get(rows.pop("like", ""), {}), **rows}
    found = {}
    for row, text in rows.items():
        count = re.search(r"\[(\d+)\]", row)
        for number in range(int(count[1]) if count else 1):
            if text:
                place = row if count is None else row.replace(count[0], str(number))
                found[place] = tuple(int(size) for size in text.split("x"))
    return found


def draw(shapes: str, seed: str) -> State:
    """Random weights in bfloat16, as large as a layer's inputs suggest; norms are near 1."""
    rng, state = np.random.default_rng(sum(seed.encode())), {}
    for name, shape in sorted(shapes_of(shapes).items()):
        norm = "gamma" in name or name.endswith(("weight_g", "motion_direction")) or re.search("norm.*weight$", name)
        size = 0.1 if len(shape) == 1 or "modulation" in name else float(np.prod(shape[1:])) ** -0.5
        values = rng.standard_normal(shape, np.float32) * np.float32(size) + np.float32(bool(norm))
        state[name] = torch.from_numpy(values).bfloat16()
    return state


def read_safetensors(path: Path) -> tuple[State, dict[str, str]]:
    """(tensors, metadata)"""
    from safetensors import safe_open

    with safe_open(path, "pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in sorted(opened.keys())}
        return tensors, dict(sorted((opened.metadata() or {}).items()))


def write_safetensors(path: Path, state: State, notes: dict[str, str] | None = None) -> None:
    """Written here because the library's order of metadata differs from run to run."""
    kinds = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3",
             torch.int64: "I64", torch.uint8: "U8"}  # fmt: skip
    header: dict[str, Any] = {"__metadata__": notes} if notes else {}
    parts, begin = [], 0
    for name, value in sorted(state.items(), key=lambda item: -item[1].element_size()):  # large numbers first: aligned
        parts.append(value.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        offsets = [begin, begin + len(parts[-1])]
        header[name] = {"dtype": kinds[value.dtype], "shape": list(value.shape), "data_offsets": offsets}
        begin = offsets[1]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(parts))


# ---------------------------------------------------------------------------------------------------------------- media


def picture(width: int, height: int, left: float) -> np.ndarray:
    """A red disc on blue."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[..., 2] = 200
    pixels[..., 1] = np.linspace(0, 60, width, dtype=np.uint8)
    y, x = np.mgrid[:height, :width]
    pixels[(y - height / 2) ** 2 + (x - left) ** 2 < (height / 4) ** 2] = (220, 20, 30)
    return pixels


def make_media(folder: Path) -> None:
    from PIL import Image

    sizes = {"start": (64, 48, 20), "end": (64, 48, 44), "wide": (160, 80, 60), "face": (64, 64, 30)}
    for name, size in sizes.items():
        Image.fromarray(picture(*size)).save(folder / f"{name}.png")
    mask = np.zeros((48, 64, 3), np.uint8)
    mask[12:36, 16:48] = 255
    Image.fromarray(mask).save(folder / "mask.png")
    (folder / "broken.png").write_bytes((folder / "start.png").read_bytes()[:90])
    moving = [picture(64, 48, 10 + n % 50) for n in range(72)]
    write_video(folder / "video.avi", moving)
    write_video(folder / "mask.avi", [mask] * 72)
    write_video(folder / "broken_off.avi", moving[:9])
    (folder / "broken_off.avi").write_bytes((folder / "broken_off.avi").read_bytes()[:900])
    with wave.open(str(folder / "sound.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16000)
        file.writeframes(np.random.default_rng(0).integers(-9000, 9000, 16000, dtype=np.int16).tobytes())


def write_video(path: Path, frames: list[np.ndarray]) -> None:
    """Without loss, 16 frames a second."""
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream("png", rate=16)
        stream.height, stream.width, stream.pix_fmt = *frames[0].shape[:2], "rgb24"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode(None))


# ---------------------------------------------------------------------------------------------- checkpoints, and LoRAs


def is_matrix(name: str, value: torch.Tensor) -> bool:
    """Whether it is a matrix of a block, which other formats quantise."""
    return name.startswith("blocks.") and name.endswith(".weight") and value.ndim == 2


def make_forms(folder: Path, state: State, notes: dict[str, str]) -> None:
    """The embedded high-noise expert as other programs store it."""
    prefixed = {f"model.diffusion_model.{name}": value for name, value in state.items()}
    write_safetensors(folder / "prefixed.safetensors", prefixed, notes)
    write_safetensors(folder / "bf16.safetensors", {name: value.bfloat16() for name, value in state.items()}, notes)
    for expert in ("high", "low"):  # without metadata both have one head
        torch.save(read_safetensors(folder / f"release/{expert}_noise_model.safetensors")[0], folder / f"{expert}.pth")
    write_safetensors(folder / "diffusers.safetensors", {diffusers_name(k): v for k, v in state.items()}, notes)
    where = {name: f"model-{1 + (n % 3 == 0):05}-of-00002.safetensors" for n, name in enumerate(state)}
    (folder / "sharded").mkdir()
    for shard in sorted(set(where.values())):
        part = {name: value for name, value in state.items() if where[name] == shard}
        write_safetensors(folder / "sharded" / shard, part, notes)
    index = {"metadata": {}, "weight_map": where}
    (folder / "sharded/model.safetensors.index.json").write_text(json.dumps(index))
    scaled: State = {"scaled_fp8": torch.empty(0, dtype=torch.float8_e4m3fn)}
    for name, value in state.items():
        scaled[name] = value
        if is_matrix(name, value):
            scale = value.float().abs().max() / 448
            scaled[name] = (value.float() / scale).to(torch.float8_e4m3fn)
            scaled[name.replace(".weight", ".scale_weight")] = scale.reshape(())
    write_safetensors(folder / "scaled.safetensors", scaled, notes)


def diffusers_name(name: str) -> str:
    """The name of a transformer's tensor in Diffusers' layout."""
    pairs = {
        "text_embedding.0": "condition_embedder.text_embedder.linear_1",
        "text_embedding.2": "condition_embedder.text_embedder.linear_2",
        "time_embedding.0": "condition_embedder.time_embedder.linear_1",
        "time_embedding.2": "condition_embedder.time_embedder.linear_2",
        "time_projection.1": "condition_embedder.time_proj", "head.head": "proj_out", "norm3": "norm2",
        "self_attn": "attn1", "cross_attn": "attn2", "ffn.0": "ffn.net.0.proj", "ffn.2": "ffn.net.2",
    }  # fmt: skip
    for ours, theirs in pairs.items():
        name = name.replace(ours, theirs)
    name = re.sub(r"(attn\d)\.([qkv])\.", r"\1.to_\2.", name)
    name = re.sub(r"(attn\d)\.o\.", r"\1.to_out.0.", name)
    return name.replace("head.modulation", "scale_shift_table").replace("modulation", "scale_shift_table")


def make_packed(folder: Path, rng: np.random.Generator) -> None:
    """The miniature t2v in GGUF, and in NVFP4 and MXFP8 with random numbers: only the bits matter."""
    import gguf

    state = draw("t2v", "t2v")
    kinds = gguf.GGMLQuantizationType
    for kind in (kinds.Q8_0, kinds.Q5_1, kinds.Q4_K):
        writer = gguf.GGUFWriter(folder / f"{kind.name.lower()}.gguf", "wan")
        writer.add_string("num_heads", "2")
        for name, value in state.items():
            chosen = kind if is_matrix(name, value) else kinds.F32
            if chosen == kinds.Q4_K:  # two scales in float16, then 140 bytes of codes, for 256 numbers
                blocks = rng.integers(0, 256, (value.shape[0], value.shape[1] // 256, 144), dtype=np.uint8)
                blocks[..., :4] = np.array([0.0004, 0.003], np.float16).view(np.uint8)
                data = blocks.reshape(value.shape[0], -1)
            else:
                data = gguf.quants.quantize(value.float().numpy(), chosen)
            writer.add_tensor(name, data, raw_dtype=chosen)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    for fmt, group in (("nvfp4", 16), ("mxfp8", 32)):
        packed: State = {}
        for name, value in state.items():
            if not is_matrix(name, value):
                packed[name] = value
                continue
            (rows, columns), module = value.shape, name.removesuffix(".weight")
            stored = (-(-rows // 128) * 128, -(-columns // group // 4) * 4)
            if fmt == "nvfp4":
                packed[name] = torch.from_numpy(rng.integers(0, 256, (rows, columns // 2), dtype=np.uint8))
                scales = torch.from_numpy(rng.integers(40, 56, stored, dtype=np.uint8))
                packed[f"{module}.weight_scale"] = scales.view(torch.float8_e4m3fn)
                packed[f"{module}.weight_scale_2"] = torch.tensor(0.02)
            else:
                packed[name] = value.to(torch.float8_e4m3fn)
                packed[f"{module}.weight_scale"] = torch.from_numpy(rng.integers(121, 124, stored, dtype=np.uint8))
            packed[f"{module}.comfy_quant"] = torch.tensor(list(b'{"format": "%b"}' % fmt.encode()), dtype=torch.uint8)
        write_safetensors(folder / f"{fmt}.safetensors", packed, NOTES)


def make_loras(folder: Path, state: State, rng: np.random.Generator) -> None:
    """LoRAs of every kind, for the first two blocks of an embedded expert."""

    def drawn(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.standard_normal(shape, np.float32) * np.float32(0.15))

    matrices = {name: value.shape for name, value in state.items() if is_matrix(name, value)}
    modules = [(n.removesuffix(".weight"), *shape) for n, shape in matrices.items() if re.match(r"blocks\.[01]\.", n)]
    kinds: dict[str, State] = {name: {} for name in ("lora", "kohya", "loha", "lokr", "diff", "dora", "tucker")}
    for module, rows, columns in modules:
        comfy, kohya = f"diffusion_model.{module}", "lora_unet_" + module.replace(".", "_")
        pair = {f"{comfy}.lora_A.weight": drawn(4, columns), f"{comfy}.lora_B.weight": drawn(rows, 4)}
        kinds["lora"] |= pair
        if ".self_attn." in module:
            kinds["dora"] |= {**pair, f"{comfy}.dora_scale": drawn(rows, 1).abs() + 1}
            kinds["tucker"] |= {**pair, f"{comfy}.lora_mid.weight": drawn(4, 4, 1, 1)}
        kinds["kohya"] |= {f"{kohya}.lora_down.weight": drawn(8, columns), f"{kohya}.lora_up.weight": drawn(rows, 8)}
        kinds["kohya"][f"{kohya}.alpha"] = torch.tensor(4.0)
        for n in (1, 2):
            kinds["loha"] |= {f"{kohya}.hada_w{n}_a": drawn(rows, 2), f"{kohya}.hada_w{n}_b": drawn(2, columns)}
        kinds["lokr"] |= {f"{kohya}.lokr_w1": drawn(4, 4), f"{kohya}.lokr_w2": drawn(rows // 4, columns // 4) * 0.1}
        kinds["diff"] |= {f"{comfy}.diff": drawn(rows, columns) * 0.1, f"{comfy}.diff_b": drawn(rows) * 0.1}
    kinds["half"] = {name: value for name, value in kinds["lora"].items() if "lora_A" in name}
    module = "diffusion_model.blocks.0.self_attn.q"
    kinds["lora_other"] = {f"{module}.lora_A.weight": drawn(4, 5120), f"{module}.lora_B.weight": drawn(5120, 4)}
    kinds["lora_256"] = {f"{module}.lora_A.weight": drawn(4, 256), f"{module}.lora_B.weight": drawn(256, 4)}
    for name, tensors in kinds.items():
        write_safetensors(folder / f"{name}.safetensors", tensors)


# -------------------------------------------------------------------------------------------------------- damaged files


def make_damaged(folder: Path, state: State, notes: dict[str, str]) -> None:
    query = "blocks.0.self_attn.q.weight"
    fp8 = torch.zeros(128, 128, dtype=torch.float8_e4m3fn)
    changed: dict[str, State] = {
        "shape": {query: torch.zeros(64, 128)},
        "integers": {query: torch.zeros(128, 128, dtype=torch.int64)},
        "extra": {"blocks.0.surprise.weight": torch.zeros(4)},
        "nan": {query: torch.full((128, 128), float("nan"))},
        "bad_scale": {query: fp8, "blocks.0.self_attn.q.scale_weight": torch.ones(7)},
    }
    for name, tensors in changed.items():
        write_safetensors(folder / f"{name}.safetensors", {**state, **tensors}, notes)
    rest = {name: value for name, value in state.items() if not name.startswith("blocks.1.ffn")}
    write_safetensors(folder / "missing.safetensors", rest, notes)
    one = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
    overlap = json.dumps({"a": one, "b": {**one, "data_offsets": [8, 24]}}).encode()
    for name, data in {
        "truncated.safetensors": (folder / "prefixed.safetensors").read_bytes()[:90_000],
        "truncated.gguf": (folder / "q8_0.gguf").read_bytes()[:90_000],
        "noise.safetensors": bytes(range(256)) * 8,
        "noise.gguf": b"GGUF" + bytes(range(256)),
        "noise.pth": bytes(range(256)),
        "code.pth": b"cos\nsystem\n(S'true'\ntR.",  # a pickle that would run a program
        "empty.safetensors": b"",
        "no_header.safetensors": (12).to_bytes(8, "little") + b"not a header",
        "huge_header.safetensors": (1 << 60).to_bytes(8, "little") + b"{}",
        "overlap.safetensors": len(overlap).to_bytes(8, "little") + overlap + bytes(24),
        "text.txt": b"This is no model.\n",
        "list.json": b"[1, 2, 3]",
        "prompts.jsonl": b'{"prompt": "a red circle"}\n{"prompt": "a blue square", "seed": 3, "steps": 2}\n',
        "bad.jsonl": b'{"prompt": "a red circle"}\n{"promt": "a blue square"}\n',
        "mine.preset.json": b'{"format": "wancore-preset/1", "name": "mine", "setting": "pattern:100/100/0", '
        b'"source": "a test"}',
        "bad.preset.json": b'{"format": "another"}',
        "poses.txt": b"not a camera\n",
    }.items():
        (folder / name).write_bytes(data)
    (folder / "empty").mkdir()
    for name, text in (("broken_index", "{"), ("lost_shard", '{"weight_map": {"patch_embedding.weight": "gone"}}')):
        (folder / name).mkdir()
        (folder / name / "model.safetensors.index.json").write_text(text)
    latents = torch.linspace(-1, 1, 16 * 3 * 6 * 8).reshape(1, 16, 3, 6, 8)
    saved = {"fps": "8", "settings": json.dumps({"prompt": "a red circle", "seed": 0})}
    write_safetensors(folder / "saved.safetensors", {"latents": latents}, saved)
    write_safetensors(folder / "flat.safetensors", {"latents": latents.flatten()}, saved)
    write_safetensors(folder / "no_rate.safetensors", {"latents": latents})
