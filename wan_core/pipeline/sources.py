"""What a user's `LoadOptions` name: the parts of a model, where each comes from and what it is, before it is loaded.

Sources: the embedded model ("tiny"), random weights at full size ("random:TASK", or "random:TASK:LAYERS" with fewer
blocks, for measuring), the folder of a release, or single files. Every file is recognised by its contents before any
weights are read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import cast

import torch
from torch import nn

from wan_core.checkpoint import Checkpoint, detect, load_dit, load_text_encoder, load_vae, open_checkpoint
from wan_core.checkpoint.detect import Config, Detected, Kind, parameter_count
from wan_core.checkpoint.load import load_speech, load_vision
from wan_core.checkpoint.lora.merge import Merge
from wan_core.checkpoint.random import random_module
from wan_core.checkpoint.staged import USUAL, Reading
from wan_core.config import LoadOptions, LoraOptions, OptionError, Request
from wan_core.config.model_files import task_hint
from wan_core.models.audio.wav2vec2 import SpeechConfig
from wan_core.models.text.tokenizer import Tokenizer
from wan_core.models.text.umt5 import UMT5_XXL, TextConfig, TextEncoder, UMT5Encoder
from wan_core.models.vae.config import VAEConfig
from wan_core.models.vision.clip import VIT_H, VisionConfig
from wan_core.models.wan.config import DiTConfig
from wan_core.models.wan.families import TASKS, Task, choose_task, family_of, find_task
from wan_core.models.wan.families.task import Clues
from wan_core.ops.quant.int8 import row_format
from wan_core.ops.quant.packed import holds_tables
from wan_core.ops.quant.swap import Quantization
from wan_core.pipeline.model_folders import parts_in
from wan_core.pipeline.model_parts import PackedSize, Part, Parts

TINY = Path(__file__).parents[1] / "assets" / "tiny"
TINY_LORAS = {expert: TINY / "lora" / f"t2v_4step_lora_{expert}_noise.safetensors" for expert in ("high", "low")}
TINY_DRIVEN = "animate2-tiny"
TINY_FILES = {  # task -> files of its parts beside text encoder and VAE
    "t2v-tiny": {"high": "t2v_high", "low": "t2v_low"},
    "i2v-tiny": {"high": "i2v_high", "low": "i2v_low"},
    TINY_DRIVEN: {"high": "driven", "clip_vision": "clip_vision"},
}
PARTS = ("high", "low", "text_encoder", "vae", "clip_vision")
HEARS = "audio_encoder"
CALLED = {"high": "transformer", "text_encoder": "text encoder", "vae": "VAE"}  # in messages
RANDOM = {task.name: (task.full_size, task.vae) for task in TASKS.values() if task.full_size is not None}


def find_models(options: LoadOptions, *, image: bool = False, transformers_only: bool = False) -> Parts:
    """Find the parts and recognise them by their headers. `image`: a first frame is given, which picks the embedded
    model's image variant. transformers_only: other parts are left out, and may be missing. Raises CheckpointError or
    OptionError."""
    random = options.model is not None and options.model.startswith("random:")
    parts = random_parts(options) if random else file_parts(options, image, transformers_only)
    if not transformers_only:
        check_fit(parts)
    return parts


def own_loras(options: LoadOptions, preset: str, *, image: bool = False) -> LoadOptions:
    """`options` with the LoRAs that come with the embedded model, where a preset for few steps is asked for by name,
    and no others are. image: a first frame is given."""
    if options.model != "tiny" or options.loras or image or preset in ("auto", "none"):
        return options
    if options.task not in (None, "t2v-tiny") or options.high or options.low:
        return options
    loras = (LoraOptions(path=str(path), expert=expert) for expert, path in TINY_LORAS.items())
    return replace(options, loras=tuple(loras))


def for_request(options: LoadOptions, request: Request) -> LoadOptions:
    """`options` with what a request asks of the embedded model: its driven variant, or its LoRAs."""
    if options.model == "tiny" and options.task is None and request.pose_video is not None:
        return replace(options, task=TINY_DRIVEN)
    return own_loras(options, request.preset, image=bool(request.pictures))


def file_parts(options: LoadOptions, image: bool, transformers_only: bool) -> Parts:
    """Recognise the files of `options`. Raises CheckpointError or OptionError."""
    paths = resolve_paths(options, image, transformers_only)
    tokenizer, clip_vision, audio_encoder = (paths.pop(name, None) for name in ("tokenizer", "clip_vision", HEARS))
    loaders = {"high": load_dit, "low": load_dit, "vae": load_vae}
    loaders["text_encoder"] = partial(load_text_encoder, tokenizer=tokenizer)
    kinds: dict[str, Kind] = {"high": "dit", "low": "dit", "text_encoder": "text_encoder", "vae": "vae"}
    family = None if options.task is None else find_task(options.task).family
    wanted = ("high", "low") if transformers_only else tuple(paths)
    parts = {name: recognise(paths[name], kinds[name], loaders[name], family) for name in wanted if name in paths}
    task, why = task_of(options, parts, image)
    if transformers_only:
        return Parts(task, parts, task.vae, why)
    if task.image_dim is not None:
        if clip_vision is None:
            raise OptionError(
                f"{task.name} needs a CLIP vision encoder for the image: add --clip-vision FILE, "
                "clip_vision_h.safetensors or models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth"
            )
        parts["clip_vision"] = recognise(clip_vision, "clip_vision", load_vision)
    elif options.clip_vision is not None:
        raise OptionError(f"{task.name} takes no CLIP features of an image: leave --clip-vision out")
    dit = cast(DiTConfig, parts["high"].config)
    if options.audio_encoder is None and family_of(dit).speech_states(dit) is None:
        audio_encoder = None  # of another model in the same folder
    speech = recognise_speech(audio_encoder, task, dit)
    return Parts(task, parts, cast(VAEConfig, parts["vae"].config), why, speech)


def recognise_speech(path: Path | None, task: Task, dit: DiTConfig) -> Part | None:
    """The encoder of sound in `path`, by its header; None for a task without sound. Raises OptionError where one is
    missing, not needed or of another size, CheckpointError for a file of another kind."""
    states = family_of(task).speech_states(dit)
    if states is None:
        if path is not None:
            raise OptionError(f"{task.name} takes no sound: remove --audio-encoder")
        return None
    if path is None:
        raise OptionError(
            f"{task.name} needs an encoder of its sound: add --audio-encoder FILE, "
            "wav2vec2_large_english_fp16.safetensors or the folder wav2vec2-large-xlsr-53-english"
        )
    part = recognise(path, "audio_encoder", load_speech)
    config = cast(SpeechConfig, part.config)
    if config.states != states:
        raise OptionError(
            f"the encoder of sound has {config.num_layers} layers, {config.dim} wide; the transformer needs "
            f"{states[0] - 1} layers, {states[1]} wide: not of one model"
        )
    return part


def task_of(options: LoadOptions, parts: Mapping[str, Part], image: bool) -> tuple[Task, str]:
    """The task of the transformers in `parts`, and what decided it where their tensors do not. Raises OptionError."""
    dit, why = cast(DiTConfig, parts["high"].config), ""
    if options.task is not None:
        task = find_task(options.task)
    elif options.model == "tiny":
        task = find_task(embedded_variant(None, image))
    else:
        high = parts["high"]
        task, why = choose_task(dit, Clues(high.path, high.metadata, alone="low" not in parts))
    if task.in_channels != dit.in_channels:
        raise OptionError(
            f"task {task.name} needs {task.in_channels} input channels; {parts['high'].source} has {dit.in_channels}: "
            "give files of that task, or leave the task out"
        )
    if task.image_dim != dit.image_dim:
        needs, has = ("no" if dim is None else f"{dim} wide" for dim in (task.image_dim, dit.image_dim))
        raise OptionError(
            f"task {task.name} needs {needs} CLIP features of an image; {parts['high'].source} takes {has}"
        )
    if task.two_experts and "low" not in parts:
        raise OptionError(f"{task.name} has two experts: give both --high and --low" + (f" ({why})" if why else ""))
    return task, why


def find_experts(high: str | Path | Checkpoint, low: str | Path | Checkpoint | None = None) -> Parts:
    """Recognise one or two transformers by the headers of their files, or by their names and shapes where the weights
    are in memory. Raises CheckpointError or OptionError."""
    first = recognise(high, "dit", load_dit)
    second = None if low is None else recognise(low, "dit", load_dit)
    dit = cast(DiTConfig, first.config)
    if second is not None and second.config != dit:
        raise different_experts(first, second)
    if first.path is not None and first.path.parent == TINY:
        same, why = (dit.family, dit.in_channels), ""
        embedded = (task for task in TASKS.values() if task.release == "embedded")
        task = next(task for task in embedded if (task.family, task.in_channels) == same)
        vae = cast(VAEConfig, recognise(TINY / "vae.safetensors", "vae", load_vae).config)
    else:
        task, why = choose_task(dit, Clues(first.path, first.metadata, alone=second is None))
        vae = task.vae
    task = task if second is not None else replace(task, two_experts=False, boundary=0.0)
    return Parts(task, {"high": first} if second is None else {"high": first, "low": second}, vae, why)


def resolve_paths(options: LoadOptions, image: bool, transformers_only: bool) -> dict[str, Path]:
    """Where each part is. transformers_only: the others may be missing. Raises OptionError naming what is missing,
    CheckpointError for a folder that is none."""
    if options.model == "tiny":
        task = embedded_variant(options.task, image)
        names = {**TINY_FILES[task], "text_encoder": "text_encoder", "vae": "vae"}
        paths = {part: TINY / f"{name}.safetensors" for part, name in names.items()}
    else:
        paths = parts_in(options, transformers_only=transformers_only) if options.model is not None else {}
    named = {part: getattr(options, part) for part in (*PARTS, HEARS, "tokenizer")}
    paths |= {part: Path(path) for part, path in named.items() if path is not None}
    if "high" not in paths and "low" in paths:
        paths["high"] = paths.pop("low")  # one file alone, whichever option named it
    needed = ("high",) if transformers_only else ("high", "text_encoder", "vae")
    missing = [part for part in needed if part not in paths]
    if missing:
        flags = ", ".join("--" + part.replace("_", "-") for part in missing)
        where = "given" if options.model is None else f"given or found in {options.model}"
        names = " and no ".join(CALLED.get(part, part) for part in missing)
        raise OptionError(f"no {names} {where}: add {flags}{task_hint(options.task)}")
    return paths


def embedded_variant(task: str | None, image: bool) -> str:
    """The embedded model's task that is meant by a name, or by whether an image is given. Raises OptionError."""
    if task is None:
        return "i2v-tiny" if image else "t2v-tiny"
    variants = [name for name in TINY_FILES if name[:3] == task.lower()[:3]]
    if not variants:
        raise OptionError(f"task {task} is not one of the embedded model's: {', '.join(TINY_FILES)}")
    if variants[0] == TINY_DRIVEN and not (TINY / "driven.safetensors").is_file():
        raise OptionError(f"{TINY_DRIVEN} is in WanCore's repository, not in the registry's archive: clone it")
    return variants[0]


def recognise(
    source: str | Path | Checkpoint, kind: Kind, load: Callable[..., nn.Module], family: str | None = None
) -> Part:
    """Read a file's header and check that it is a whole model of `kind`. family: of a transformer with a named task."""
    detected = detect(source, kind, family)
    checkpoint = detected.checkpoint
    infos = [detected.info(name) for name in detected.names]
    stored = max(infos, key=lambda info: info.nbytes).dtype
    parameters = sum(prod(info.shape) for info in infos)
    matrices = block_matrices(detected)
    quantized = [detected.info(name) for name in matrices if detected.info(name).packing]
    return Part(
        f"{checkpoint.where} ({detected.layout})",
        detected.config,
        stored,
        parameters,
        lambda device, dtype, quantization, loras=None, how=USUAL: load(
            # Opened again: on a CPU, weights are views of the mapping, and LoRAs that are summed in change its pages.
            open_checkpoint(source) if how.share is None else how.share(checkpoint),
            device=device,
            dtype=dtype,
            how=how,
            **({"quantization": quantization} if kind in ("dit", "text_encoder") else {}),
            **({"loras": loras, "family": family} if kind == "dit" else {}),
        ),
        path=source.path if isinstance(source, Checkpoint) else Path(source),
        memory=source if isinstance(source, Checkpoint) and source.path is None else None,
        metadata=checkpoint.metadata,
        stored_bytes=sum(info.nbytes for info in infos),
        scaled=any(info.packing == "fp8" for info in infos),
        wide=checkpoint.wide,
        packed=packed_size(detected, matrices),
        quantized_parameters=sum(prod(info.shape) for info in quantized),
        int8_parameters=sum(prod(info.shape) for info in quantized if info.packing == row_format(info.shape[-1])),
    )


def block_matrices(detected: Detected) -> frozenset[str]:
    """Parameters that are matrices of blocks, which a quantised model can hold as its file does."""
    if isinstance(detected.config, DiTConfig):
        linears = detected.config.quantized_names()
        return frozenset(name for name in detected.names if name.removesuffix(".weight") in linears)
    return frozenset(name for name in detected.names if name.startswith("blocks.") and "embedding" not in name)


def packed_size(detected: Detected, matrices: frozenset[str]) -> PackedSize | None:
    """The size of the matrices that can stay packed in memory: those of the blocks, and a text encoder's table. FP8
    with scales is one of the formats where others are, and in a text encoder, which has no use for FP8 products."""
    sizes: dict[str, int] = {}
    parameters = 0
    for name in detected.names:
        info = detected.info(name)
        table = name == "token_embedding.weight" and holds_tables(info.packing)
        if info.packing is not None and (table or name in matrices):
            sizes[info.packing] = sizes.get(info.packing, 0) + info.nbytes
            parameters += prod(info.shape)
    if not sizes or (detected.kind == "dit" and set(sizes) == {"fp8"}):
        return None
    return PackedSize(max(sizes, key=lambda fmt: sizes[fmt]), sum(sizes.values()), parameters)


def random_parts(options: LoadOptions) -> Parts:
    """Full-size models of a task with random weights, drawn on the device."""
    assert options.model is not None
    named = [part for part in (*PARTS, HEARS, "tokenizer") if getattr(options, part) is not None]
    if named:
        flags = ", ".join("--" + part.replace("_", "-") for part in named)
        raise OptionError(f"{options.model} makes every part itself: leave out {flags}")
    name, _, layers = options.model.removeprefix("random:").partition(":")
    task = find_task(name)
    if task.name not in RANDOM:
        raise OptionError(f"random weights are made for {', '.join(RANDOM)}; for {task.name} use --model tiny")
    dit, vae = RANDOM[task.name]
    if layers:
        if not layers.isdecimal() or not 0 < int(layers) <= dit.num_layers:
            raise OptionError(f"{options.model}: {layers!r} blocks given; 1 to {dit.num_layers} are possible")
        dit = replace(dit, num_layers=int(layers))
    experts: dict[str, Config] = {"high": dit, "low": dit} if task.two_experts else {"high": dit}
    vision: dict[str, Config] = {} if task.image_dim is None else {"clip_vision": VIT_H}
    configs = {**experts, "text_encoder": UMT5_XXL, "vae": vae, **vision}
    parts = {name: random_part(config, seed) for seed, (name, config) in enumerate(configs.items())}
    states = family_of(task).speech_states(dit)
    speech = None if states is None else random_part(SpeechConfig(dim=states[1], num_layers=states[0] - 1), len(parts))
    return Parts(task, parts, vae, speech=speech)


def random_part(config: Config, seed: int) -> Part:
    def load(
        device: torch.device,
        dtype: torch.dtype,
        quantization: Quantization | None,
        loras: Merge | None = None,
        how: Reading = USUAL,
    ) -> nn.Module:
        fast = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else device
        options = {"seed": seed, "quantization": quantization, "loras": loras, "draw_on": fast, "how": how}
        module = random_module(config, device=device, dtype=dtype, **options)
        if not isinstance(module, UMT5Encoder):
            return module
        embedded = open_checkpoint(TINY / "text_encoder.safetensors").read("spiece_model")
        return TextEncoder(module, Tokenizer(embedded.numpy().tobytes()))

    return Part("random weights", config, torch.bfloat16, parameter_count(config), load)


def different_experts(high: Part, low: Part) -> OptionError:
    """The error for two transformers of different architectures, with the numbers in which these differ."""
    pairs = (
        (field.name, getattr(high.config, field.name), getattr(low.config, field.name)) for field in fields(DiTConfig)
    )
    numbers = ", ".join(f"{name} {one} and {two}" for name, one, two in pairs if one != two)
    return OptionError(
        f"use the two files of one model: {high.source} and {low.source} are of two. In numbers, the experts differ: "
        f"{numbers} (high is {high.source}, low is {low.source})"
    )


def check_fit(parts: Parts) -> None:
    """Raise OptionError unless the parts belong together: equal experts, text width, latent channels."""
    dit, text, vae = parts.dit, cast(TextConfig, parts.of["text_encoder"].config), parts.vae
    low = parts.of.get("low")
    if low is not None and low.config != dit:
        raise different_experts(parts.of["high"], low)
    if text.dim != dit.text_dim:
        raise OptionError(
            f"the text encoder gives rows of {text.dim}, the transformer takes {dit.text_dim}: not of one model"
        )
    vision = parts.of.get("clip_vision")
    if vision is not None and cast(VisionConfig, vision.config).dim != dit.image_dim:
        raise OptionError(
            f"the CLIP vision encoder is not {dit.image_dim} wide, as the transformer needs: not of one model"
        )
    if vae.z_dim != dit.out_channels:
        raise OptionError(
            f"the VAE has {vae.z_dim} latent channels, the transformer {dit.out_channels}: A14B needs the Wan 2.1 VAE, "
            "TI2V-5B the Wan 2.2 VAE"
        )
