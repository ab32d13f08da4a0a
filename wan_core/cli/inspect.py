"""Describe a model or LoRA file from its header, without loading it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from wan_core.checkpoint import detect, find_parts, open_checkpoint
from wan_core.checkpoint.detect import KINDS, expected_shapes
from wan_core.checkpoint.lora.names import OTHER_EXPERT, is_lora, told_experts
from wan_core.checkpoint.lora.read import read_lora
from wan_core.checkpoint.opened import Checkpoint
from wan_core.config import LoadOptions, OptionError, UserError
from wan_core.config.file_names import file_says
from wan_core.config.model_files import TEXT_ENCODERS, TRANSFORMERS, models_root
from wan_core.config.printing import command
from wan_core.models.text.umt5 import TextConfig
from wan_core.models.vae.config import VAEConfig
from wan_core.models.wan.config import I2V_A14B, T2V_1_3B, T2V_A14B, TI2V_5B, DiTConfig
from wan_core.models.wan.families import choose_task
from wan_core.models.wan.families.task import Clues
from wan_core.pipeline.loras import expert_file
from wan_core.pipeline.model_folders import files, models_in
from wan_core.pipeline.sources import TINY, find_models

# Models whose LoRAs are recognised by shape, in the order they are tried
FAMILIES: dict[str, Any] = {
    "Wan 2.2 A14B (or another Wan of 14B)": T2V_A14B,
    "Wan 2.2 I2V-A14B": I2V_A14B,
    "Wan 2.2 TI2V-5B": TI2V_5B,
    "Wan 2.1 T2V-1.3B": T2V_1_3B,
}
_LAYER = re.compile(r"blocks[._](\d+)[._]")


def inspect(path: Path) -> dict[str, Any]:
    """A description of `path` in plain values: kind, family, layout, precision, expert, ..., and a list of "problems".
    For a release or a models folder {"folder", "gib", "parts", "models", "problems"}: a description of each part, and
    the tasks that can be run with them. Reads only headers.

    A part that cannot be used is a problem only in a release, because a models folder holds files of other models too.
    """
    if not path.is_dir():
        return inspect_file(path)
    root = models_root(path)
    if root is not None:
        folders = (*TRANSFORMERS, *TEXT_ENCODERS, "vae", "clip_vision", "audio_encoders", "loras")
        models = _with_parts(path, {str(file.relative_to(root)): file for file in files(root, folders)})
        return models | {"models": [model.words(root) for model in models_in(root)[0]], "problems": []}
    parts = find_parts(path)
    if len(parts) < 2:
        return inspect_file(path)
    release = _with_parts(path, parts)
    problems = [f"{name}: {problem}" for name, part in release["parts"].items() for problem in part["problems"]]
    models = []
    try:
        models = [find_models(LoadOptions(model=str(path))).task.name]
    except UserError as fault:
        if str(fault) not in " ".join(problems):
            options = "--" in str(fault)  # it advises those of the command that takes the folder
            problems.append(f"{command('generate', '--model', str(path))}: {fault}" if options else str(fault))
    return release | {"models": models, "problems": problems}


def _with_parts(folder: Path, parts: Mapping[str, Path]) -> dict[str, Any]:
    described = {name: inspect_file(path) for name, path in parts.items() if name != "tokenizer"}
    total = round(sum(part.get("gib", 0) for part in described.values()), 3)
    return {"folder": str(folder), "gib": total, "parts": described}


def inspect_file(path: Path) -> dict[str, Any]:
    """The description of a file, or of a folder that holds one part."""
    file: dict[str, Any] = {"file": str(path), "problems": []}
    try:
        checkpoint = open_checkpoint(path)
        gib = round(sum(info.nbytes for info in checkpoint.tensors.values()) / 1024**3, 3)
        file |= {"tensors": len(checkpoint.tensors), "gib": gib, "precision": precisions(checkpoint)}
        if is_lora(checkpoint.tensors):
            file |= _lora(checkpoint)
        else:
            file |= _model(checkpoint, path)
        file |= _from_metadata_and_name(checkpoint.metadata, path, file)
    except UserError as fault:
        file["problems"].append(str(fault))
    return file


def precisions(checkpoint: Checkpoint) -> dict[str, float]:
    """Dtype or packed format -> its share of the bytes, largest first."""
    total: Counter[str] = Counter()
    for info in checkpoint.tensors.values():
        total[info.packing or str(info.dtype).removeprefix("torch.")] += info.nbytes
    whole = sum(total.values()) or 1
    return {kind: round(count / whole, 4) for kind, count in total.most_common()}


def _model(checkpoint: Checkpoint, path: Path) -> dict[str, Any]:
    model = detect(checkpoint)
    config = model.config
    about: dict[str, Any] = {"kind": KINDS[model.kind], "layout": model.layout}
    about["parameters"] = sum(prod(checkpoint.tensors[name].shape) for name in model.names.values())
    if scaled := sum(info.packing == "fp8" for info in checkpoint.tensors.values()):
        about["scaled"] = f"{scaled} FP8 matrices with scales" + ", for products in 16 bits" * checkpoint.wide
    if isinstance(config, DiTConfig):
        if path.parent.resolve() == TINY.resolve():
            about["family"] = "the embedded model"
        else:
            about |= _task_words(config, Clues(path, checkpoint.metadata))
        sizes = ("num_layers", "dim", "ffn_dim", "num_heads", "in_channels")
        about["shape"] = {name: getattr(config, name) for name in sizes}
    elif isinstance(config, TextConfig):
        about["family"] = "UMT5"
        about["shape"] = {name: getattr(config, name) for name in ("num_layers", "dim", "vocab_size")}
    elif isinstance(config, VAEConfig):
        about["family"] = "Wan 2.2 VAE" if config.patch == 2 else "Wan 2.1 VAE"
        about["shape"] = {"latent_channels": config.z_dim, "stride": config.spatial_stride}
    else:
        about["shape"] = {"num_layers": config.num_layers, "dim": config.dim}
    return about


def _task_words(config: Any, clues: Any) -> dict[str, Any]:
    """`family`: Wan 2.2 t2v-A14B, and what decided it where tensors do not. `distilled`: of tasks that are."""
    try:
        task, why = choose_task(config, clues)
    except OptionError:
        return {"family": f"a Wan transformer of {config.in_channels} input channels, of no known task"}
    steps = {"distilled": f"for {task.steps} steps"} if task.distilled else {}
    return {"family": f"{task.release} {task.name}" + (f" ({why})" if why else ""), **steps}


def _lora(checkpoint: Checkpoint) -> dict[str, Any]:
    """A LoRA's description. Its model is about by trying the shapes of each known family."""
    named_experts = told_experts(checkpoint.tensors)
    experts = named_experts if len(named_experts) > 1 else (None,)
    faults = []
    families = FAMILIES | {"the embedded model": detect(TINY / "t2v_high.safetensors").config}
    for family, config in families.items():
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


def _from_metadata_and_name(metadata: Mapping[str, str], path: Path, known: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata, and the expert and distilled steps that it or the name gives where they are not `known`."""
    about: dict[str, Any] = {}
    expert = expert_file(path, metadata).expert
    if expert is not None:
        about["expert"] = f"{expert} (from its {'metadata' if metadata.get('expert') == expert else 'name'})"
    steps = file_says(path, metadata).steps
    if steps is not None and "distilled" not in known:
        about["distilled"] = f"for {steps} steps"
    if metadata:
        about["metadata"] = {key: value[:200] for key, value in list(metadata.items())[:40]}
    return about


def part_line(name: str, part: Mapping[str, Any]) -> str:
    """`high: Wan 2.2 t2v-A14B, official layout, bfloat16, 26.62 GiB`."""
    if part["problems"]:
        return f"{name}: not usable: {part['problems'][0]}"
    facts = [part.get("family", part["kind"]), f"{part['layout']} layout", next(iter(part["precision"]), "")]
    facts += [part["expert"]] if "expert" in part else []
    return f"{name}: {', '.join(facts)}, {part['gib']:.2f} GiB"


def text_lines(description: Mapping[str, Any]) -> list[str]:
    """The description as lines `key: value`, problems last; of a folder, a line for each part."""
    problems = [f"problem: {problem}" for problem in description["problems"]]
    if "parts" in description:
        parts = [part_line(name, part) for name, part in description["parts"].items()]
        models = "; ".join(description["models"]) or "none is complete"
        total = f"total: {description['gib']:.2f} GiB"
        return [f"folder: {description['folder']}", *parts, total, f"models: {models}", *problems]
    lines = []
    for key, value in description.items():
        if key == "problems":
            continue
        if key == "precision":
            value = {kind: f"{100 * share:.4g} %" for kind, share in value.items()}
        if isinstance(value, Mapping):
            value = ", ".join(f"{name} {entry}" for name, entry in value.items())
        lines.append(f"{key}: {', '.join(map(str, value)) if isinstance(value, list) else value}")
    return [*lines, *problems]
