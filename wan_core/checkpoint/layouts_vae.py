"""What a VAE file calls its tensors, and which VAE its shapes describe. Strings and numbers only, no torch.

Our parameter names are the official ones (`Wan2.1_VAE.pth`, `Wan2.2_VAE.pth`); Diffusers' `AutoencoderKLWan` has its
own, translated by the table below.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping

from wan_core.models.vae.config import WAN21_MEAN, WAN21_STD, WAN22_MEAN, WAN22_STD, TinyVAEConfig, VAEConfig

_INDEX = r"(0|[1-9]\d{0,3})"
_LAYER = r"(norm1|conv1|norm2|conv2|conv_shortcut)\.(gamma|weight|bias)"
_RESAMPLE = r"(resample\.1|time_conv)\.(weight|bias)"

# Layers of a residual block, Diffusers -> official.
_BLOCK = {
    "norm1": "residual.0",
    "conv1": "residual.2",
    "norm2": "residual.3",
    "conv2": "residual.6",
    "conv_shortcut": "shortcut",
}

# Diffusers' pattern -> official name. In the template, {0}, {1}, ... are the groups; a layer of a residual block has
# gone through `_BLOCK`. The named fields are computed positions, see `_translate`.
_COMMON = {
    r"quant_conv\.(weight|bias)": "conv1.{0}",
    r"post_quant_conv\.(weight|bias)": "conv2.{0}",
    r"(encoder|decoder)\.conv_in\.(weight|bias)": "{0}.conv1.{1}",
    r"(encoder|decoder)\.norm_out\.gamma": "{0}.head.0.gamma",
    r"(encoder|decoder)\.conv_out\.(weight|bias)": "{0}.head.2.{1}",
    rf"(encoder|decoder)\.mid_block\.resnets\.0\.{_LAYER}": "{0}.middle.0.{1}.{2}",
    rf"(encoder|decoder)\.mid_block\.resnets\.1\.{_LAYER}": "{0}.middle.2.{1}.{2}",
    r"(encoder|decoder)\.mid_block\.attentions\.0\.(norm\.gamma|(?:to_qkv|proj)\.(?:weight|bias))": "{0}.middle.1.{1}",
}
_PLAIN = {  # 2.1: one flat list of blocks and resamplers
    rf"encoder\.down_blocks\.{_INDEX}\.{_LAYER}": "encoder.downsamples.{0}.{1}.{2}",
    rf"encoder\.down_blocks\.{_INDEX}\.{_RESAMPLE}": "encoder.downsamples.{0}.{1}.{2}",
    rf"decoder\.up_blocks\.{_INDEX}\.resnets\.{_INDEX}\.{_LAYER}": "decoder.upsamples.{flat_block}.{2}.{3}",
    rf"decoder\.up_blocks\.{_INDEX}\.upsamplers\.0\.{_RESAMPLE}": "decoder.upsamples.{flat_resample}.{1}.{2}",
}
_RESIDUAL = {  # 2.2: a list of stages
    rf"encoder\.down_blocks\.{_INDEX}\.resnets\.{_INDEX}\.{_LAYER}": "encoder.downsamples.{0}.downsamples.{1}.{2}.{3}",
    rf"encoder\.down_blocks\.{_INDEX}\.downsampler\.{_RESAMPLE}": "encoder.downsamples.{0}.downsamples.{down}.{1}.{2}",
    rf"decoder\.up_blocks\.{_INDEX}\.resnets\.{_INDEX}\.{_LAYER}": "decoder.upsamples.{0}.upsamples.{1}.{2}.{3}",
    rf"decoder\.up_blocks\.{_INDEX}\.upsampler\.{_RESAMPLE}": "decoder.upsamples.{0}.upsamples.{up}.{1}.{2}",
}


def diffusers_vae_names(names: Collection[str]) -> dict[str, str] | None:
    """Name in the file -> official name, one to one, of a Diffusers `AutoencoderKLWan`, 2.1 or 2.2; None if any name
    does not belong to that layout."""
    if "quant_conv.weight" not in names or "encoder.conv_in.weight" not in names:
        return None
    resnets = (re.fullmatch(r"decoder\.up_blocks\.0\.resnets\.(\d{1,4})\.conv1\.weight", name) for name in names)
    decoder_blocks = len({match[1] for match in resnets if match})
    residual = "encoder.down_blocks.0.resnets.0.conv1.weight" in names
    rules = [(re.compile(p), t) for p, t in {**_COMMON, **(_RESIDUAL if residual else _PLAIN)}.items()]
    translated = {name: _translate(name, rules, decoder_blocks) for name in names}
    official = {name: new for name, new in translated.items() if new is not None}
    if len(official) != len(translated) or len(set(official.values())) != len(official):
        return None
    return official


_TINY = re.compile(
    rf"(?:encoder|decoder)\.{_INDEX}\.(?:weight|bias|conv\.weight|conv\.{_INDEX}\.(?:weight|bias))", re.ASCII
)


def tiny_vae_names(names: Collection[str]) -> dict[str, str] | None:
    """The names of a tiny autoencoder (`wan_core.models.vae.tiny`) for themselves; None if it is none."""
    if "decoder.22.bias" not in names or not all(map(_TINY.fullmatch, names)):
        return None
    return {name: name for name in names}


def _translate(name: str, rules: list[tuple[re.Pattern[str], str]], decoder_blocks: int) -> str | None:
    for pattern, template in rules:
        match = pattern.fullmatch(name)
        if match is None:
            continue
        groups = [_BLOCK.get(group, group) for group in match.groups()]
        # A stage of the flat 2.1 decoder is its blocks, then its resampler.
        stage = int(groups[0]) * (decoder_blocks + 1) if groups[0].isdigit() else 0
        block = int(groups[1]) if len(groups) > 1 and groups[1].isdigit() else decoder_blocks
        return template.format(
            *groups,
            flat_block=stage + block,
            flat_resample=stage + decoder_blocks,
            down=decoder_blocks - 1,
            up=decoder_blocks,
        )
    return None


# ------------------------------------------------------------------------------------------------------- configuration

_MAX_CHANNELS = 16384  # sanity limits: no real file comes near, and nothing is built from numbers beyond them
_MAX_STAGES = 8
_MAX_BLOCKS = 16
_MAX_JSON = 100_000


def vae_config(shapes: Mapping[str, tuple[int, ...]], metadata: Mapping[str, str]) -> VAEConfig:
    """The architecture that a VAE file describes. shapes: official tensor name -> shape. metadata: `latents_mean` and
    `latents_std`, JSON lists of one number per latent channel, are used if present, else the constants of Wan 2.1 (16
    channels) or 2.2 (48). Raises ValueError for shapes that are not those of a Wan VAE, with the tensor that shows it.
    """
    if "decoder.22.bias" in shapes:
        return tiny_vae_config(shapes, metadata)
    z_dim = _channels(shapes, "conv2.weight", 0, ndim=5)
    residual = any(name.startswith("encoder.downsamples.0.downsamples.") for name in shapes)
    encoder_dim = _channels(shapes, "encoder.conv1.weight", 0, ndim=5)
    stages = _stages(shapes, residual)
    dim_mult = tuple(_ratio(dim, encoder_dim, f"encoder stage {i}") for i, (dim, _, _) in enumerate(stages))
    mean, std = _statistics(metadata, z_dim)
    return VAEConfig(
        z_dim=z_dim,
        encoder_dim=encoder_dim,
        decoder_dim=_ratio(_channels(shapes, "decoder.head.0.gamma", 0, ndim=4), dim_mult[0], "decoder.head.0.gamma"),
        dim_mult=dim_mult,
        num_res_blocks=stages[0][1],
        temporal_downsample=tuple(temporal for _, _, temporal in stages[:-1]),
        patch=_patch(_channels(shapes, "encoder.conv1.weight", 1, ndim=5)),
        residual=residual,
        latents_mean=mean,
        latents_std=std,
    )


def tiny_vae_config(shapes: Mapping[str, tuple[int, ...]], metadata: Mapping[str, str]) -> VAEConfig:
    """The architecture of a tiny autoencoder. Files for the transformer's latents and for un-normalised ones have the
    same tensors: the name of the file (`metadata["file"]`) tells lightx2v's, which are for the latter."""
    file = metadata.get("file", "").lower()
    if "taehv" in file:
        raise ValueError(f"{file} is a tiny autoencoder of HunyuanVideo by its name; Wan's are taew2_1 and taew2_2")
    z_dim = _channels(shapes, "decoder.1.weight", 1, ndim=4)
    mean, std = _statistics(metadata, z_dim)
    return TinyVAEConfig(
        z_dim=z_dim,
        encoder_dim=_channels(shapes, "encoder.0.weight", 0, ndim=4),
        decoder_dim=_channels(shapes, "decoder.14.weight", 0, ndim=4),
        widths=tuple(_channels(shapes, f"decoder.{place}.weight", 0, ndim=4) for place in (1, 8, 14, 20)),
        patch=_patch(_channels(shapes, "encoder.0.weight", 1, ndim=4)),
        of_model="lighttae" not in file,
        latents_mean=mean,
        latents_std=std,
    )


def _stages(shapes: Mapping[str, tuple[int, ...]], residual: bool) -> list[tuple[int, int, bool]]:
    """(channels, residual blocks, temporal downsampling) of each encoder stage; the last stage does not downsample."""
    stages: list[tuple[int, int, bool]] = []
    position = 0  # in the flat list of 2.1
    while len(stages) < _MAX_STAGES:
        prefix = f"encoder.downsamples.{len(stages)}.downsamples." if residual else "encoder.downsamples."
        position = 0 if residual else position
        start = position
        while f"{prefix}{position}.residual.6.weight" in shapes and position - start < _MAX_BLOCKS:
            position += 1
        if position == start:
            raise ValueError(f"not a Wan VAE: no residual block where {prefix}{position}.residual.6.weight should be")
        channels = _channels(shapes, f"{prefix}{position - 1}.residual.6.weight", 0, ndim=5)
        stages.append((channels, position - start, f"{prefix}{position}.time_conv.weight" in shapes))
        if f"{prefix}{position}.resample.1.weight" not in shapes:
            return stages
        position += 1
    raise ValueError(f"not a Wan VAE: more than {_MAX_STAGES} encoder stages")


def _channels(shapes: Mapping[str, tuple[int, ...]], name: str, axis: int, *, ndim: int) -> int:
    shape = shapes.get(name)
    if shape is None:
        raise ValueError(f"not a Wan VAE: it has no tensor {name}")
    if len(shape) != ndim or not 1 <= shape[axis] <= _MAX_CHANNELS:
        raise ValueError(
            f"not a Wan VAE: {name} has the shape {shape}; expected {ndim} axes and at most {_MAX_CHANNELS} channels"
        )
    return shape[axis]


def _ratio(channels: int, unit: int, where: str) -> int:
    if channels % unit:
        raise ValueError(f"not a Wan VAE: {channels} channels at {where} are no multiple of {unit}")
    return channels // unit


def _patch(channels: int) -> int:
    patch = math.isqrt(channels // 3)
    if 3 * patch**2 != channels or patch not in (1, 2, 4):
        raise ValueError(f"not a Wan VAE: {channels} input channels are not 3 colours of 1x1, 2x2 or 4x4 patches")
    return patch


def _statistics(metadata: Mapping[str, str], z_dim: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    if "latents_mean" in metadata and "latents_std" in metadata:
        mean, std = (_numbers(metadata[key], key, z_dim) for key in ("latents_mean", "latents_std"))
        if min(std) <= 0:
            raise ValueError("the file's latents_std has an entry that is not positive")
        return mean, std
    statistics = {16: (WAN21_MEAN, WAN21_STD), 48: (WAN22_MEAN, WAN22_STD)}
    if z_dim not in statistics:
        raise ValueError(
            f"a VAE of {z_dim} latent channels must say their mean and deviation: "
            f"add latents_mean and latents_std (JSON lists) to the file's metadata"
        )
    return statistics[z_dim]


def _numbers(text: str, key: str, count: int) -> tuple[float, ...]:
    try:
        values = json.loads(text) if len(text) <= _MAX_JSON else None
    except (ValueError, RecursionError):
        values = None
    numbers = values if isinstance(values, list) else []
    if len(numbers) != count or not all(type(v) in (int, float) and math.isfinite(v) for v in numbers):
        raise ValueError(f"the file's {key} must be a JSON list of {count} finite numbers")
    return tuple(map(float, numbers))
