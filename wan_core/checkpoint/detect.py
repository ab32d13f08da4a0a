"""Say what a checkpoint is from its names and shapes, and check that it is whole, before anything is allocated.

`detect` finds the layout, reads the architecture from the shapes, and compares every shape with those of the module
that the architecture describes (built on the meta device, where tensors have no values). What passes can be loaded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from wan_core.checkpoint import unsupported as foreign
from wan_core.checkpoint.layouts import LAYOUTS, Kind, Layout, text_config, unwrapped
from wan_core.checkpoint.layouts_encoders import speech_config, vision_config
from wan_core.checkpoint.layouts_vae import vae_config
from wan_core.checkpoint.opened import Checkpoint, CheckpointError, TensorInfo, counted, listing, naming
from wan_core.checkpoint.reader import Source, open_checkpoint
from wan_core.config.file_names import read_name
from wan_core.models.audio.wav2vec2 import SpeechConfig, SpeechEncoder
from wan_core.models.text.umt5 import TextConfig, UMT5Encoder
from wan_core.models.vae.config import TinyVAEConfig, VAEConfig
from wan_core.models.vae.tiny import TinyVAE
from wan_core.models.vae.vae import VideoVAE
from wan_core.models.vision.clip import VisionConfig, VisionEncoder
from wan_core.models.wan.config import DiTConfig
from wan_core.models.wan.families import FAMILIES, family_of, find_family
from wan_core.models.wan.families.family import Family, Shapes
from wan_core.models.wan.families.plain import MAX_SIZE, block_count

Config: TypeAlias = DiTConfig | TextConfig | VAEConfig | VisionConfig | SpeechConfig

KINDS: dict[str, str] = {
    "dit": "a Wan transformer",
    "text_encoder": "a UMT5 text encoder",
    "vae": "a Wan VAE",
    "clip_vision": "a CLIP vision encoder",
    "audio_encoder": "a wav2vec 2.0 speech encoder",
}
EXAMPLES = {  # of kinds that are named after no model of Wan
    "clip_vision": "clip_vision_h.safetensors, image_encoder of a Diffusers release, or "
    "models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth",
    "audio_encoder": "wav2vec2-large-xlsr-53-english, or ComfyUI's wav2vec2_large_english_fp16.safetensors",
}
TOKENIZER = "spiece_model"  # a tokenizer embedded as bytes, as in ComfyUI's text encoder files

# No real model comes near these. They bound what a damaged file can make us build: modules without values.
MAX_LAYERS = 200
MAX_PREFIX = 4  # words in front of all names; files have two


@dataclass(frozen=True)
class Detected:
    """A checkpoint that is whole. `names` maps every official parameter name to its name in the file; `extras` maps
    what else the file holds for us (`spiece_model`) to its name there."""

    checkpoint: Checkpoint
    kind: Kind
    layout: str
    config: Config
    names: Mapping[str, str]
    extras: Mapping[str, str]

    def info(self, name: str) -> TensorInfo:
        """What is stored of the parameter of an official name."""
        return self.checkpoint.tensors[self.names[name]]


def detect(source: Source, expected: Kind | None = None, family: str | None = None) -> Detected:
    """What `source` holds. With `expected`, anything but that kind is an error that names both. family: that of a
    transformer, where its tensors and metadata leave it open.

    Raises `CheckpointError`: not a Wan model (and what it seems to be), or missing, unexpected or wrong-shaped tensors.
    """
    checkpoint = open_checkpoint(source)
    with naming(checkpoint.where):
        return _detect(checkpoint, expected, None if family is None or expected != "dit" else find_family(family))


def _detect(checkpoint: Checkpoint, expected: Kind | None, family: Family | None) -> Detected:
    embedded = next((name for name in checkpoint.tensors if name.rpartition(".")[2] == TOKENIZER), None)
    names = [name for name in checkpoint.tensors if name != embedded]
    _refuse_extended(names, expected)
    layout, official = _find_layout(names, expected, family or _claimed(checkpoint.metadata))
    if family is None and layout.kind == "dit":
        _refuse_ambiguous(official.values(), layout.family, checkpoint)
    kind = KINDS[layout.kind] + (
        f" of the family {layout.family}" if layout.family not in ("", DiTConfig.family) else ""
    )
    label = f"this is {kind} ({layout.name} layout)"
    if expected is not None and layout.kind != expected:
        raise CheckpointError(f"{label}, and {KINDS[expected]} is expected here.")
    reached = {ours: theirs for theirs, ours in reversed(official.items())}
    shapes = {ours: checkpoint.tensors[theirs].shape for ours, theirs in reached.items()}
    unexpected = [n for n in names if n not in official and not (layout.unread and layout.unread.fullmatch(n))]
    twins = [theirs for theirs, ours in official.items() if checkpoint.tensors[theirs].shape != shapes[ours]]
    if twins:  # a tensor stored twice, as Hugging Face's files may have the embedding
        raise CheckpointError(f"{label}, but {counted(twins, 'stored twice with different shapes')}.")
    file = {} if checkpoint.path is None else {"file": checkpoint.path.name}
    config = _config(layout, shapes, unexpected, {**checkpoint.metadata, **file}, label)
    _compare(shapes, expected_shapes(config), reached, unexpected, label)
    odd = [theirs for theirs in reached.values() if not checkpoint.tensors[theirs].dtype.is_floating_point]
    if odd:
        dtype = str(checkpoint.tensors[odd[0]].dtype).removeprefix("torch.")
        raise CheckpointError(
            f"{label}, but {len(odd)} weights are {dtype} ({listing(odd)}), which is not supported yet."
        )
    extras = {TOKENIZER: embedded} if embedded else {}
    return Detected(checkpoint, layout.kind, layout.name, config, reached, extras)


# --------------------------------------------------------------------------------------------------------- which layout


def _refuse_extended(names: Collection[str], expected: Kind | None) -> None:
    wanted = f" Expected is {KINDS[expected]}." if expected else ""
    if parts := foreign.all_in_one(names):
        raise CheckpointError(
            f"several parts in one file ({parts}); only files of one part each are supported.{wanted}"
        )
    if extension := foreign.recognise(names, foreign.EXTENDED):
        raise CheckpointError(f"{extension}.{wanted}")


def _claimed(metadata: Mapping[str, str]) -> Family | None:
    """The family that the metadata of a file names, where tensors may be another's."""
    return next((family for family in FAMILIES.values() if family.claims(metadata)), None)


def _refuse_ambiguous(names: Collection[str], family_name: str, checkpoint: Checkpoint) -> None:
    """Raise CheckpointError where official `names` fit the family `family_name`, and the name of the file says another
    that they fit too: metadata that would tell is missing."""
    file = "" if checkpoint.path is None else checkpoint.path.name
    for family in FAMILIES.values():
        if family.name == family_name or read_name(file).family != family.name or family.claims(checkpoint.metadata):
            continue
        fits = any(len(table(list(names)) or ()) == len(names) for _, table in family.layouts)
        if fits:
            raise CheckpointError(
                f"its tensors fit the families {family_name} and {family.name}, its name says {family.name}, and its "
                f"metadata does not say which: name the family, load_dit(..., family={family.name!r}), or a task of "
                f"it, --task {family.tasks[0].name}; in ComfyUI, use a file that has its metadata"
            )


def _find_layout(names: Collection[str], expected: Kind | None, family: Family | None) -> tuple[Layout, dict[str, str]]:
    """The layout of `names`, and file name -> official name, with a common prefix and the names of wrappers taken off.
    family: of a transformer, None where the names decide."""
    stored = {unwrapped(name): name for name in names}
    if len(stored) != len(names):
        stored = {name: name for name in names}
    for prefix in _prefixes(stored):
        for layout in LAYOUTS:
            if family is not None and layout.kind == "dit" and layout.family != family.name:
                continue
            translated = layout.names([name[len(prefix) :] for name in stored])
            if translated:
                return layout, {stored[prefix + theirs]: ours for theirs, ours in translated.items()}
    if family is not None:
        raise CheckpointError(f"its tensors are not those of a transformer of the family {family.name}.")
    seems = foreign.recognise(names, foreign.OTHERS) or f"unknown; its tensors are {listing(sorted(names), 3)}"
    wanted = KINDS[expected] if expected else "a Wan transformer, a UMT5 text encoder or a Wan VAE"
    wanted += f" ({EXAMPLES[expected]})" if expected in EXAMPLES else ""
    raise CheckpointError(f"not a Wan 2.2 model: it seems to be {seems}. Expected is {wanted}.")


def _prefixes(names: Collection[str]) -> Iterator[str]:
    """Nothing, then `model.`, `model.diffusion_model.`, ...: what all names begin with, dot by dot."""
    first, last = min(names, default=""), max(names, default="")
    common = first[: next((n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))]
    name_parts = common.split(".")
    for count in range(min(len(name_parts), MAX_PREFIX + 1)):
        yield "".join(f"{word}." for word in name_parts[:count])


# --------------------------------------------------------------------------------------------------- which architecture


def _config(layout: Layout, shapes: Shapes, unexpected: list[str], metadata: Mapping[str, str], label: str) -> Config:
    """The architecture, with every number in a range that can be built."""
    if layout.kind == "dit":
        family = FAMILIES[layout.family]
        wanted = family.parameter_names(shapes, _layers(block_count(shapes)))
        _compare_names(shapes, wanted, unexpected, label)
        read = family.read_config
    else:
        read = _READERS[layout.kind]
    if layout.kind == "text_encoder":
        wanted = expected_shapes(TextConfig(num_layers=_layers(block_count(shapes))))
        # A file that lacks these is a T5 that is not UMT5, and `text_config` says so.
        tables = [name for name in wanted if "pos_embedding" in name]
        _compare_names([*shapes, *tables], wanted, unexpected, label)
    try:
        config = read(shapes, metadata)
    except (ValueError, OverflowError) as fault:
        # A tensor that the tables do not know may well be the one that is missed.
        note = f"; {counted(unexpected, 'unexpected')}" if unexpected else ""
        raise CheckpointError(f"{fault}{note}") from fault
    for field, value in dataclasses.asdict(config).items():
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, int) and not isinstance(number, bool) and not 0 < number <= MAX_SIZE:
                raise CheckpointError(f"{label}, but its shapes ask for {field} = {value}, which no model has.")
    if not isinstance(config, VAEConfig):
        _layers(config.num_layers)
    return config


def _layers(count: int) -> int:
    if count > MAX_LAYERS:
        raise CheckpointError(f"it claims {count} blocks, and at most {MAX_LAYERS} are possible. Download it again.")
    return count


_READERS: dict[str, Callable[[Shapes, Mapping[str, str]], Config]] = {
    "text_encoder": text_config,
    "vae": vae_config,
    "clip_vision": vision_config,
    "audio_encoder": speech_config,
}


# ---------------------------------------------------------------------------------------------------------- is it whole


class _Unfilled(TorchFunctionMode):
    """Parameters are made without drawing values. On the meta device torch draws them in Python, and the first such
    call imports its whole compiler, for seconds."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__module__", None) == nn.init.__name__:
            return args[0] if args else (kwargs or {})["tensor"]
        return (torch.empty if func is torch.randn else func)(*args, **(kwargs or {}))


def empty_module(config: Config) -> nn.Module:
    """The module that `config` describes, on the meta device: shapes and names without values."""
    build = _module_class(config)  # before: what it imports must not be made on the meta device
    with torch.device("meta"), _Unfilled():
        return build(config)


def _module_class(config: Config) -> Callable[[Any], nn.Module]:
    if isinstance(config, DiTConfig):
        return family_of(config).model_class(config)
    classes = {
        TextConfig: UMT5Encoder,
        VAEConfig: VideoVAE,
        TinyVAEConfig: TinyVAE,
        VisionConfig: VisionEncoder,
        SpeechConfig: SpeechEncoder,
    }
    return classes[type(config)]


@lru_cache(maxsize=16)
def parameter_count(config: Config) -> int:
    return sum(parameter.numel() for parameter in empty_module(config).parameters())


@lru_cache(maxsize=8)
def expected_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Official name -> shape of every parameter. Raises `CheckpointError` if the numbers do not make a module."""
    try:
        return {name: tuple(value.shape) for name, value in empty_module(config).state_dict().items()}
    except (ValueError, RuntimeError, ZeroDivisionError) as fault:
        raise CheckpointError(f"its shapes do not make a model ({str(fault).splitlines()[0]}).") from fault


def _compare_names(stored: Collection[str], wanted: Collection[str], unexpected: list[str], label: str) -> None:
    wanted, stored = dict.fromkeys(wanted), dict.fromkeys(stored)
    missing = [name for name in wanted if name not in stored]
    surplus = [*unexpected, *(name for name in stored if name not in wanted)]
    cases = (("missing", missing), ("unexpected", surplus))
    faults = [counted(names, how) for how, names in cases if names]
    if faults:
        raise CheckpointError(f"{label}, but {' and '.join(faults)}. The file is incomplete or of another model.")


def _compare(stored: Shapes, wanted: Shapes, reached: Mapping[str, str], unexpected: list[str], label: str) -> None:
    _compare_names(stored, wanted, unexpected, label)
    wrong = [
        f"{reached[name]} is {list(stored[name])}, {list(shape)} expected"
        for name, shape in wanted.items()
        if stored[name] != shape
    ]
    if wrong:
        raise CheckpointError(f"{label}, but {counted(wrong, 'of a wrong shape')}.")
