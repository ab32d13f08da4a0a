"""Open a checkpoint, whatever it is stored as: a safetensors, torch or GGUF file, shards, a folder, a state dict.

The format is decided by the first bytes, never by the name. Nothing is read but headers: `Checkpoint.read` maps
values in when they are asked for. Every fault is a `CheckpointError` that names the file.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from wan_core.checkpoint.gguf_file import MAGIC, open_gguf
from wan_core.checkpoint.layouts_encoders import assembled
from wan_core.checkpoint.opened import (
    Checkpoint,
    CheckpointError,
    TensorInfo,
    counted,
    from_state_dict,
    listing,
    merge,
    naming,
    short_path,
)
from wan_core.checkpoint.packed_matrices import with_packed
from wan_core.checkpoint.pickle_file import open_pickle
from wan_core.checkpoint.safetensors_file import open_safetensors
from wan_core.config.checks import near_file
from wan_core.config.limits import MAX_JSON
from wan_core.models.wan.families import FAMILIES
from wan_core.models.wan.families.family import Assembled

# Which file or folder is which part of a model: in the official release, in Diffusers', and as `save` packs it.
_PATTERNS: dict[str, tuple[str, ...]] = {
    "high": (
        "high_noise_model",
        "transformer",
        "high_noise_model.safetensors",
        "diffusion_pytorch_model.safetensors.index.json",
        "diffusion_pytorch_model.safetensors",
    ),
    "low": ("low_noise_model", "transformer_2", "low_noise_model.safetensors"),
    "text_encoder": ("models_t5_*.pth", "text_encoder", "text_encoder.safetensors"),
    "vae": ("Wan2.[0-9]_VAE.pth", "vae", "vae.safetensors"),
    "clip_vision": ("models_clip_*.pth", "image_encoder", "clip_vision_h.safetensors"),
    "audio_encoder": ("wav2vec2-large-xlsr-53-english", "wav2vec2_*.safetensors"),
    "tokenizer": ("google/umt5-xxl/spiece.model", "tokenizer/spiece.model", "spiece.model"),
}


def find_parts(folder: str | os.PathLike[str]) -> dict[str, Path]:
    """The parts of the release in `folder`: some of the keys high, low, text_encoder, vae, clip_vision,
    audio_encoder, tokenizer, in that order.

    A model with one transformer has it under `high`. Parts that are absent have no key. Only names are looked at,
    nothing is opened. A repository in Hugging Face's cache is its snapshot. Raises `CheckpointError` if `folder` is not
    a folder.
    """
    root = Path(folder)
    if not root.is_dir():
        raise CheckpointError(f"not a folder ({root})", where=short_path(root))
    root = snapshot_of(root)
    parts: dict[str, Path] = {}
    for part, patterns in _PATTERNS.items():
        file = next((path for pattern in patterns for path in sorted(root.glob(pattern))), None)
        if file is not None:
            parts[part] = file
    return parts


def snapshot_of(folder: Path) -> Path:
    """The files of a repository in Hugging Face's cache (`models--OWNER--NAME`): the snapshot that `refs/main` names,
    or the only one. Any other folder is returned as it is. Raises CheckpointError where there is none, or several."""
    if not (folder / "snapshots").is_dir():
        return folder
    snapshots = {child.name: child for child in sorted((folder / "snapshots").iterdir()) if child.is_dir()}
    with suppress(OSError, UnicodeDecodeError):
        with (folder / "refs" / "main").open() as file:
            main = snapshots.get(file.read(256).strip())
        if main is not None:
            return main
    if len(snapshots) == 1:
        return next(iter(snapshots.values()))
    fault = f"{len(snapshots)} snapshots, and no refs/main that names one ({listing(list(snapshots))}). Name one"
    raise CheckpointError(
        f"a repository of Hugging Face's cache with {fault if snapshots else 'no snapshot: download it again'}.",
        where=short_path(folder),
    )


def with_assembled(checkpoint: Checkpoint) -> Checkpoint:
    """`checkpoint` with what a family's layout stores in parts under one name, and without the parts. Parts that are
    packed, scaled or of different dtypes stay as they are, and `detect` says that they are unexpected."""
    tensors = checkpoint.tensors
    shapes = {name: info.shape for name, info in tensors.items()}
    tables = (assembled, *(family.assembled for family in FAMILIES.values()))
    every = [item for table in tables for item in table(shapes).items()]
    wanted = {name: one for name, one in every if _plain(checkpoint, one)}
    if not wanted:
        return checkpoint
    gone = {part for one in wanted.values() for part in one.parts}
    infos = {name: info for name, info in tensors.items() if name not in gone}
    for name, one in wanted.items():
        parts = [tensors[part] for part in one.parts]
        infos[name] = TensorInfo(one.shape, parts[0].dtype, sum(part.nbytes for part in parts))
    places = {name: at for name, at in checkpoint.places.items() if name in infos and name not in wanted}
    return replace(checkpoint, tensors=infos, reader=_reader(checkpoint.read, wanted), places=places)


def _plain(checkpoint: Checkpoint, one: Assembled) -> bool:
    parts = [checkpoint.tensors[part] for part in one.parts]
    joined = one.make is not None or len({part.dtype for part in parts}) == 1
    return joined and all(part.packing is None for part in parts)


def _reader(read: Callable[[str], Tensor], wanted: dict[str, Assembled]) -> Callable[[str], Tensor]:
    def assemble(name: str) -> Tensor:
        if name not in wanted:
            return read(name)
        parts, one = [read(part) for part in wanted[name].parts], wanted[name]
        return (torch.cat(parts) if one.make is None else one.make(parts)).reshape(one.shape)

    return assemble


Source: TypeAlias = str | os.PathLike[str] | Mapping[str, Tensor] | Checkpoint

_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.(safetensors|bin|pth|pt)")
_WEIGHTS = (".safetensors", ".pth", ".pt", ".bin", ".gguf", ".ckpt")


def open_checkpoint(source: Source) -> Checkpoint:
    """Open a file, a shard index, a folder that holds one part of a model, or a state dict already in memory.

    Raises `CheckpointError` when it cannot be used: what was found, and what to do.
    """
    if isinstance(source, Checkpoint):
        return source
    with naming("the given state dict" if isinstance(source, Mapping) else short_path(Path(source))):
        in_memory = isinstance(source, Mapping)
        opened = from_state_dict(source, "the given state dict") if in_memory else _open_path(Path(source))
        return with_assembled(with_packed(opened))


def _open_path(path: Path) -> Checkpoint:
    try:
        if path.is_dir():
            return _open_folder(path)
        if not path.is_file():
            raise CheckpointError(f"no such file or folder ({path}){near_file(path)}")
        if path.name.endswith(".index.json"):
            return _open_index(path)
        opened = _open_file(path)
    except OSError as fault:  # permissions, a vanished disk: the system's own words
        raise CheckpointError(f"cannot be read ({fault.strerror or fault})") from fault
    return _with_config(opened, path.parent)


def _open_file(path: Path) -> Checkpoint:
    with path.open("rb") as file:
        head = file.read(512)
    with naming(short_path(path)):
        if head[8:9] == b"{" and not head.startswith(MAGIC):
            return open_safetensors(path)
        if head.startswith(b"PK\x03\x04"):
            return open_pickle(path)
        if head.startswith(MAGIC):
            return open_gguf(path)
        for recognise, fault in _UNSUPPORTED:
            if recognise(head):
                raise CheckpointError(fault)
        raise CheckpointError(
            f"neither a safetensors, a torch nor a GGUF file: it begins with {head[:8].hex(' ')}. Download or convert "
            "it again."
        )


def _is_text(head: bytes) -> bool:
    """Whether the first bytes of a file are printed characters; the last one may be cut."""
    text = head.decode("utf-8", errors="ignore")
    return len(text.encode()) > len(head) - 4 and all(c.isprintable() or c in "\t\r\n" for c in text)


PICTURES = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"RIFF", b"BM")
_UNSUPPORTED = (
    (lambda head: not head, "the file is empty. Download it again."),
    (
        lambda head: not head.strip(b"\0"),
        "damaged: it begins with zeros only, as an unfinished download does. Download it again.",
    ),
    (
        lambda head: head.startswith(b"version https://git-lfs"),
        "a git-lfs pointer, not the file itself. Run `git lfs pull` in that repository, or download the file.",
    ),
    (
        lambda head: head.lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml")),
        "a web page, not a model: the download gave an error or log-in page. Download the file itself.",
    ),
    (
        lambda head: (head[:1] == b"\x80" and head[1:2] in b"\x02\x03\x04\x05") or b"ustar" in head,
        "a torch file of before version 1.6, or a plain pickle, which can run code when opened. Load it in a place you "
        "trust and save it with torch.save of a recent version, or use a safetensors file.",
    ),
    (lambda head: head.startswith(b"PK"), "an empty or split zip archive. Download it again."),
    (
        lambda head: head.lstrip()[:1] in b"{[" and head.isascii(),
        "a text file (JSON), not a model. Name the file with the weights, or a shard index that ends in .index.json.",
    ),
    (
        lambda head: head.startswith(PICTURES) or head[4:8] == b"ftyp" or head.startswith(b"\x1aE\xdf\xa3"),
        "a picture, a sound or a video, not a model. Name the file with the weights.",
    ),
    (_is_text, "a text, not a model. Name the file with the weights."),
)


def _open_folder(folder: Path) -> Checkpoint:
    where, folder = short_path(folder), snapshot_of(folder)
    files = sorted(child for child in folder.iterdir() if child.is_file())
    parts = find_parts(folder)
    chosen = _weights_in(files) if not _is_release(folder, parts) else None
    if chosen is None:
        if parts:
            listed = ", ".join(f"{key}: {path.relative_to(folder)}" for key, path in parts.items())
            raise CheckpointError(f"a whole release ({listed}), where one part is expected. Name one of these.")
        raise CheckpointError("no model in this folder (no safetensors, pth, pt, bin or gguf file)")
    if isinstance(chosen, Path):
        return _open_index(chosen) if chosen.name.endswith(".index.json") else _with_config(_open_file(chosen), folder)
    return merge((_open_file(shard) for shard in chosen), where, folder, _config_metadata(folder))


def _is_release(folder: Path, parts: Mapping[str, Path]) -> bool:
    models = [path for key, path in parts.items() if key != "tokenizer"]
    return len(models) > 1 or any(path.is_dir() and path != folder for path in models)


def _weights_in(files: list[Path]) -> Path | list[Path] | None:
    """The index, the one file or the complete shards among `files`."""
    indices = [f for f in files if f.name.endswith(".index.json")]
    weights = [f for f in files if f.suffix.lower() in _WEIGHTS]
    # A folder may hold the same weights twice; torch's own format is the older copy.
    weights = [f for f in weights if f.suffix.lower() == ".safetensors"] or weights
    if len(indices) == 1:
        return indices[0]
    if not indices and len(weights) == 1 and not _SHARD.fullmatch(weights[0].name):
        return weights[0]
    if not indices and weights:
        shards = _complete_shards(weights)
        if shards:
            return shards
    if indices or weights:
        names = [f.name for f in indices or weights]
        raise CheckpointError(f"several models in this folder ({listing(names)}). Name one of these.")
    return None


def _complete_shards(weights: list[Path]) -> list[Path] | None:
    """`weights` if they are the shards of one model; None if they are none. Raises an error if some are missing."""
    matches = [_SHARD.fullmatch(f.name) for f in weights]
    series = {(m[1], m[3], m[4]) for m in matches if m}
    if not all(matches) or len(series) != 1:
        return None
    (stem, total, suffix), present = series.pop(), {f.name for f in weights}
    # The total is a claim of a file name: count only as far as needed to name a few of the missing.
    wanted = (f"{stem}-{n:05d}-of-{total}.{suffix}" for n in range(1, int(total) + 1))
    missing = [name for name in wanted if name not in present]
    if missing:
        raise CheckpointError(f"{len(missing)} of {int(total)} shards are missing: {listing(missing)}")
    return weights


def _open_index(index: Path) -> Checkpoint:
    content = _json(index)
    table = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(table, dict) or not table or not all(isinstance(name, str) for name in table.values()):
        raise CheckpointError("damaged index: it has no weight_map from tensor names to file names")
    names = sorted(set(table.values()))
    outside = [name for name in names if Path(name).name != name or name in ("", ".", "..") or "\\" in name]
    if outside:
        raise CheckpointError(f"damaged index: {listing(outside)} is not a file beside it")
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{len(missing)} of {len(names)} shards are missing: {listing(missing)}. Download them to the same folder."
        )
    shards = {name: _open_file(index.parent / name) for name in names}
    absent = [tensor for tensor, name in table.items() if tensor not in shards[name].tensors]
    if absent:
        raise CheckpointError(
            f"{counted(absent, 'not in the shards that the index names')}. Shards of different releases may have been "
            "mixed: download them again."
        )
    return merge(shards.values(), short_path(index), index, _config_metadata(index.parent))


# ---------------------------------------------------------------------------------------------------------- config.json

_CONFIGS = (
    "WanTransformer3DModel",
    "WanAnimateTransformer3DModel",
    "WanAnimate2Transformer3DModel",
    "WanModel",
    "WanAnimateModel",
    "AutoencoderKLWan",
    "UMT5EncoderModel",
)
_CONFIG_KEYS = {
    "num_heads": "num_heads",
    "num_attention_heads": "num_heads",
    "latents_mean": "latents_mean",
    "latents_std": "latents_std",
    "relative_attention_max_distance": "relative_attention_max_distance",
}


def _with_config(opened: Checkpoint, folder: Path) -> Checkpoint:
    """`opened` with what a `config.json` beside it adds; the file's own metadata wins."""
    return replace(opened, metadata={**_config_metadata(folder), **opened.metadata})


def _config_metadata(folder: Path) -> dict[str, str]:
    """What shapes cannot say, from the `config.json` of a Diffusers or official folder; empty for any other."""
    path = folder / "config.json"
    if not path.is_file():
        return {}
    with naming(short_path(path)):
        config = _json(path)
    if not isinstance(config, dict):
        return {}
    architectures = config.get("architectures")
    classes = [config.get("_class_name"), *(architectures if isinstance(architectures, list) else [])]
    if not any(name in _CONFIGS for name in classes):
        return {}
    values = {ours: config[theirs] for theirs, ours in _CONFIG_KEYS.items() if theirs in config}
    return {key: json.dumps(value) for key, value in values.items() if value is not None}


def _json(path: Path) -> Any:
    if path.stat().st_size > MAX_JSON:
        raise CheckpointError(
            f"too large for this kind of JSON file: {path.stat().st_size} bytes, and at most {MAX_JSON} are read."
            " Download it again."
        )
    try:
        return json.loads(path.read_bytes().decode("utf-8"))
    except (ValueError, RecursionError) as fault:
        raise CheckpointError(f"not valid JSON ({fault}). Download it again.") from None
