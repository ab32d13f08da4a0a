"""The command inspect: describe a model or LoRA file from its header, without loading it."""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from wan_core.config import OptionError, UserError
from wan_core.config.checks import near_file

_LAYER = re.compile(r"blocks[._](\d+)[._]")


def add_inspect_options(parser: argparse.ArgumentParser) -> None:
    kinds = "safetensors, gguf, pth, a shard index, a LoRA; a folder of one part, of a release, or ComfyUI's models"
    parser.add_argument("file", type=Path, help=kinds)
    parser.add_argument("--json", action="store_true")


def run_inspect(options: argparse.Namespace) -> int:
    """Print the description of the file. Returns 1 if it has problems, else 0."""
    if not options.file.exists():
        if str(options.file) == "tiny":
            from wan_core.pipeline.sources import TINY

            example = TINY / "t2v_high.safetensors"
            raise OptionError(f"tiny is the embedded model: give one of its files, for example {example}")
        raise OptionError(f"{options.file} does not exist{near_file(options.file)}")
    description = inspect(options.file)
    print(json.dumps(description, indent=1) if options.json else "\n".join(text_lines(description)))
    return int(bool(description["problems"]))


def inspect(path: Path) -> dict[str, Any]:
    """A description of `path` in plain values: kind, family, layout, precision, expert, ..., and a list of "problems".
    Of a release or a models folder, its parts, each with its description.

    Reads only headers.
    """
    if path.is_dir() and (parts := parts_of(path)) is not None:
        return inspect_parts(path, parts)
    return inspect_file(path)


def parts_of(folder: Path) -> dict[str, Path] | None:
    """Name -> file or folder: the parts of a release, or the files of a models folder; None for a folder that holds one
    part."""
    from wan_core.checkpoint import find_parts
    from wan_core.pipeline.model_folders import TEXT_ENCODERS, TRANSFORMERS, files, models_root

    root = models_root(folder)
    if root is not None:
        found = files(root, (*TRANSFORMERS, *TEXT_ENCODERS, "vae", "clip_vision", "audio_encoders", "loras"))
        return {str(path.relative_to(root)): path for path in found}
    parts = find_parts(folder)
    return parts if len(parts) > 1 else None


def inspect_parts(folder: Path, parts: Mapping[str, Path]) -> dict[str, Any]:
    """{"folder", "gib", "parts", "models", "problems"}. models: the tasks that can be run with what is there; a part
    that cannot be used is a problem only in a release, because a models folder holds files of other models too."""
    from wan_core.config import LoadOptions
    from wan_core.pipeline.model_folders import models_in, models_root
    from wan_core.pipeline.sources import find_models

    found = {name: inspect_file(path) for name, path in parts.items() if name != "tokenizer"}
    total = round(sum(one.get("gib", 0) for one in found.values()), 3)
    described: dict[str, Any] = {"folder": str(folder), "gib": total, "parts": found, "models": [], "problems": []}
    root = models_root(folder)
    if root is not None:
        described["models"] = [model.words(root) for model in models_in(root)[0]]
        return described
    described["problems"] = [f"{name}: {problem}" for name, one in found.items() for problem in one["problems"]]
    try:
        described["models"] = [find_models(LoadOptions(model=str(folder))).task.name]
    except UserError as fault:
        if str(fault) not in " ".join(described["problems"]):
            described["problems"].append(str(fault))
    return described


def inspect_file(path: Path) -> dict[str, Any]:
    """What `inspect` says of one file, or of a folder that holds one part of a model."""
    from wan_core.checkpoint import open_checkpoint
    from wan_core.checkpoint.comfyui_tensors import summary
    from wan_core.checkpoint.lora.names import is_lora

    found: dict[str, Any] = {"file": str(path), "problems": []}
    try:
        with open_checkpoint(path) as checkpoint:
            found |= {"tensors": len(checkpoint.tensors), "gib": gib(checkpoint), "precision": precisions(checkpoint)}
            found |= (
                _lora(checkpoint) if is_lora(checkpoint.tensors) else _encoder(checkpoint) or _model(checkpoint, path)
            )
            found |= {"attention": summary(checkpoint.attention)[:8]} if checkpoint.attention else {}
            found |= _from_metadata_and_name(checkpoint.metadata, path, found)
    except UserError as fault:
        found["problems"].append(str(fault))
    return found


def gib(checkpoint: Any) -> float:
    return round(sum(info.nbytes for info in checkpoint.tensors.values()) / 1024**3, 3)


def precisions(checkpoint: Any) -> dict[str, float]:
    """Dtype or packed format -> its share of the bytes, largest first."""
    total: Counter[str] = Counter()
    for info in checkpoint.tensors.values():
        total[info.packing or str(info.dtype).removeprefix("torch.")] += info.nbytes
    whole = sum(total.values()) or 1
    return {kind: round(count / whole, 4) for kind, count in total.most_common()}


def _encoder(checkpoint: Any) -> dict[str, Any]:
    """The description of an encoder of pictures or of sound; empty for another file. Raises CheckpointError for one
    that is damaged, or not Wan's."""
    from wan_core.checkpoint.encoders import PREFIX, find_speech, find_vision

    names = [name.removeprefix(PREFIX) for name in checkpoint.tensors]
    if any(name.startswith(("vision_model.", "visual.")) for name in names):
        found = find_vision(checkpoint)
        config, kind, layout = found.config, "a CLIP vision encoder", found.layout
    elif any(name.startswith("feature_extractor.conv_layers.") for name in names):
        config, kind, layout = find_speech(checkpoint), "a wav2vec 2.0 speech encoder", "huggingface"
    else:
        return {}
    return {"kind": kind, "layout": layout, "shape": {"num_layers": config.num_layers, "dim": config.dim}}


def _model(checkpoint: Any, path: Path) -> dict[str, Any]:
    from wan_core.checkpoint import detect
    from wan_core.checkpoint.detect import KINDS
    from wan_core.models.text.umt5 import TextConfig
    from wan_core.models.vae.config import VAEConfig
    from wan_core.models.wan.config import DiTConfig
    from wan_core.models.wan.families.family import Clues
    from wan_core.pipeline.sources import TINY

    model = detect(checkpoint)
    config = model.config
    found: dict[str, Any] = {"kind": KINDS[model.kind], "layout": model.layout}
    found["parameters"] = sum(prod(checkpoint.tensors[name].shape) for name in model.names.values())
    if model.scales:
        found["scaled"] = f"{len(model.scales)} FP8 matrices with scales"
    if isinstance(config, DiTConfig):
        if path.parent.resolve() == TINY.resolve():
            found["family"] = "the embedded model"
        else:
            found |= _task_words(config, Clues(path, checkpoint.metadata))
        found["shape"] = {
            name: getattr(config, name) for name in ("num_layers", "dim", "ffn_dim", "num_heads", "in_channels")
        }
    elif isinstance(config, TextConfig):
        found["family"] = "UMT5"
        found["shape"] = {name: getattr(config, name) for name in ("num_layers", "dim", "vocab_size")}
    elif isinstance(config, VAEConfig):
        found["family"] = "Wan 2.2 VAE" if config.patch == 2 else "Wan 2.1 VAE"
        found["shape"] = {"latent_channels": config.z_dim, "stride": config.spatial_stride}
    return found


def _task_words(config: Any, clues: Any) -> dict[str, Any]:
    """`family`: Wan 2.2 t2v-A14B, and what decided it where tensors do not. `distilled`: of tasks that are."""
    from wan_core.models.wan.families import choose_task

    try:
        task, why = choose_task(config, clues)
    except OptionError:
        return {"family": f"a Wan transformer of {config.in_channels} input channels, of no known task"}
    steps = {"distilled": f"for {task.steps} steps"} if task.distilled else {}
    return {"family": f"{task.release} {task.name}" + (f" ({why})" if why else ""), **steps}


def _lora(checkpoint: Any) -> dict[str, Any]:
    """A LoRA's description. Its model is found by trying the shapes of each known family."""
    from wan_core.checkpoint.detect import expected_shapes
    from wan_core.checkpoint.lora.names import OTHER_EXPERT, told_experts
    from wan_core.checkpoint.lora.read import read_lora

    named_experts = told_experts(checkpoint.tensors)
    experts = named_experts if len(named_experts) > 1 else (None,)
    faults = []
    for family, config in _families().items():
        try:
            parts = [read_lora(checkpoint, expected_shapes(config), expert) for expert in experts]
        except UserError as fault:
            faults.append(str(fault))
            continue
        names = [name for lora in parts for name in lora.changes]
        targets = Counter(re.sub(r"blocks\.\d+\.", "", name.removesuffix(".weight")) for name in names)
        layers = {int(match[1]) for name in names if (match := _LAYER.match(name))}
        ranks = sorted({rank for lora in parts for rank in lora.ranks})
        ignored = {(why, n) for lora in parts for why, n in lora.ignored.items() if why != OTHER_EXPERT}
        return {
            "kind": "a LoRA" if ranks else "a set of differences",
            "family": f"for {family}",
            **({"experts": list(named_experts)} if named_experts else {}),
            "layout": " and ".join(dict.fromkeys(lora.spelling for lora in parts)),
            "changes": dict(sum((Counter(lora.kinds) for lora in parts), Counter[str]())),
            "rank": ranks,
            "blocks": len(layers),
            "targets": dict(targets.most_common()),
            "problems": [f"{len(names)} tensors {why}: {', '.join(names[:3])}" for why, names in sorted(ignored)],
        }
    return {"kind": "a LoRA", "problems": [f"it fits no known model: {faults[0]}"]}


def _families() -> Mapping[str, Any]:
    """Name -> configuration of the models whose LoRAs are recognised by shape, in the order they are tried."""
    from wan_core.checkpoint import detect
    from wan_core.models.wan.config import I2V_A14B, T2V_1_3B, T2V_A14B, TI2V_5B
    from wan_core.pipeline.sources import TINY

    tiny = detect(TINY / "t2v_high.safetensors").config
    return {
        "Wan 2.2 A14B (or another Wan of 14B)": T2V_A14B,
        "Wan 2.2 I2V-A14B": I2V_A14B,
        "Wan 2.2 TI2V-5B": TI2V_5B,
        "Wan 2.1 T2V-1.3B": T2V_1_3B,
        "the embedded model": tiny,
    }


def _from_metadata_and_name(metadata: Mapping[str, str], path: Path, known: Mapping[str, Any]) -> dict[str, Any]:
    """Expert and number of distilled steps, as the file's metadata or name gives them where they are not `known`, and
    the metadata itself."""
    from wan_core.config import LoraOptions
    from wan_core.pipeline.loras import expert_of
    from wan_core.sampling.presets import distilled_steps

    found: dict[str, Any] = {}
    expert = expert_of(LoraOptions(path=str(path)), metadata)
    if expert is not None:
        found["expert"] = f"{expert} (from its {'metadata' if metadata.get('expert') == expert else 'name'})"
    steps = distilled_steps(path) if path.is_file() else None
    if steps is not None and "distilled" not in known:
        found["distilled"] = f"for {steps} steps"
    if metadata:
        found["metadata"] = {key: value[:200] for key, value in list(metadata.items())[:40]}
    return found


def part_line(name: str, found: Mapping[str, Any]) -> str:
    """`high: Wan 2.2 t2v-A14B, official layout, bfloat16, 26.62 GiB`."""
    if found["problems"]:
        return f"{name}: not usable: {found['problems'][0]}"
    words = [found.get("family", found["kind"]), f"{found['layout']} layout", next(iter(found["precision"]), "")]
    words += [found["expert"]] if "expert" in found else []
    return f"{name}: {', '.join(words)}, {found['gib']:.2f} GiB"


def text_lines(found: Mapping[str, Any]) -> list[str]:
    """The description as lines `key: value`, problems last; of a folder, a line for each part."""
    lines = []
    if "parts" in found:
        lines = [f"folder: {found['folder']}", *(part_line(name, one) for name, one in found["parts"].items())]
        lines += [f"total: {found['gib']:.2f} GiB", f"models: {'; '.join(found['models']) or 'none is complete'}"]
        return [*lines, *(f"problem: {problem}" for problem in found["problems"])]
    for key, value in found.items():
        if key == "problems":
            continue
        if key == "precision":
            value = {kind: f"{100 * share:.4g} %" for kind, share in value.items()}
        if isinstance(value, Mapping):
            value = ", ".join(f"{name} {entry}" for name, entry in value.items())
        lines.append(f"{key}: {', '.join(map(str, value)) if isinstance(value, list) else value}")
    return [*lines, *(f"problem: {problem}" for problem in found["problems"])]
