"""What besides noise goes into the transformer: text rows, the known image's channels, or known first latent frames.

Legend: B batch, C latent channels, T/Y/X latent frames, rows, columns, F/H/W video frames, height, width.

Conditioning is prepared as data, so that one loop denoises every task. Source: Wan2.2/wan/image2video.py,
textimage2video.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from wan_core.config import check_size
from wan_core.models.vae.config import VAEConfig
from wan_core.sampling.texts import TimedText


@dataclass(frozen=True, kw_only=True)
class Conditioning:
    """Everything the denoising loop needs besides the plan, the experts and the noise. Latents here are normalised."""

    cond: Tensor  # text rows of the prompt, [1 or B, S, text_dim]
    uncond: Tensor | None = None  # of the negative prompt; None where the plan never guides
    concat: Tensor | None = None  # [1 or B, 4 + C, T, Y, X]: mask and image latents after the noise channels (I2V)
    known: Tensor | None = None  # [1 or B, C, K, Y, X]: the first latent frames, held fixed at timestep 0 (TI2V)
    image_features: Tensor | None = None  # [1 or B, N, image_dim]: of CLIP, for transformers that attend to them
    inputs: Mapping[str, Any] = field(default_factory=dict)  # of the model's family: tensors [1 or B, ...] and numbers
    uncond_inputs: Mapping[str, Any] = field(default_factory=dict)  # what the negative prompt's branch has instead
    later_cond: tuple[Tensor, ...] = ()  # each [1, S, text_dim]: more texts of the prompt, see `Step.texts`
    later_uncond: tuple[Tensor, ...] = ()  # of the negative prompt
    separate: bool = False  # texts of the branches have different numbers of rows, and cannot be one batch
    # float32 [N, T, S]: of every text of the prompt, what is taken off the scores of each of its rows in each latent
    # frame (`wan_core.sampling.texts`).
    penalty: Tensor | None = None

    @property
    def text_rows(self) -> int:
        texts = (self.cond, *self.later_cond, *self.later_uncond, *([] if self.uncond is None else [self.uncond]))
        return max(one.shape[1] for one in texts)

    def text(self, branch: str, number: int) -> Tensor:
        """Text rows [1 or B, S, text_dim] of a branch, "cond" or "uncond"; several only where a text changes."""
        first, later = (self.cond, self.later_cond) if branch == "cond" else (self.uncond, self.later_uncond)
        if first is None:
            raise ValueError("the plan guides with a negative prompt, but none was encoded")
        if number == 0:
            return first
        return later[number - 1]

    def flat(self) -> dict[str, Tensor]:
        """What it holds by name, numbers as tensors without axes: to move it or send it."""
        values: dict[str, Any] = {}
        for one in fields(self):
            value = getattr(self, one.name)
            group = dict(enumerate(value)) if isinstance(value, tuple) else value
            inner = {f"{one.name}.{name}": v for name, v in group.items()} if isinstance(group, Mapping) else None
            values |= {one.name: value} if inner is None else inner
        wide = {name: torch.tensor(v, dtype=torch.float64) if isinstance(v, float) else v for name, v in values.items()}
        return {name: torch.as_tensor(v) for name, v in wide.items() if v is not None}

    @classmethod
    def of(cls, flat: Mapping[str, Tensor]) -> Conditioning:
        values: dict[str, Any] = {"inputs": {}, "uncond_inputs": {}, "later_cond": {}, "later_uncond": {}}
        for name, value in flat.items():
            group, _, inner = name.partition(".")
            plain = value if value.ndim else value.item()
            values.update({group: {**values[group], inner: plain}} if inner else {group: plain})
        later = {name: tuple(values[name].values()) for name in ("later_cond", "later_uncond")}
        return cls(**{**values, **later})

    def family_inputs(self, branches: Sequence[str], batch: int) -> dict[str, Any]:
        """What the model's family takes beside text, for a batch of videos of these branches. What all branches share
        is given once; of the rest, there is a row for each video of each branch, the first branch's first."""
        inputs: dict[str, Any] = {}
        for name, value in self.inputs.items():
            each = [self.uncond_inputs.get(name, value) if branch == "uncond" else value for branch in branches]
            if all(one is value for one in each):
                inputs[name] = value
            elif isinstance(value, Tensor):
                inputs[name] = torch.cat([one.expand(batch, *one.shape[1:]) for one in as_wide(each)])
            else:
                inputs[name] = [one for one in each for _ in range(batch)]
        return inputs


def as_wide(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Pad tensors [B, control videos, ...] with zeros, so that all have as many control videos as the largest."""
    widest = max(one.shape[1] for one in tensors)

    def widened(one: Tensor) -> Tensor:
        missing = one.shape[0], widest - one.shape[1], *one.shape[2:]
        return torch.cat([one, one.new_zeros(missing)], 1) if missing[1] else one

    return [widened(one) for one in tensors]


def penalty_rows(text: TimedText, tokens: Sequence[int], frames: int, rows: int) -> Tensor:
    """float32 [T, S]: what is taken off the scores of so many text rows in so many latent frames. tokens: how many
    `text` has before each of its prompts, and in all; what follows, the end token and padding, has no penalty."""
    found, each = torch.zeros(frames, rows), torch.tensor(text.penalties(frames))  # [T, prompts]
    for prompt, (one, following) in enumerate(pairwise(tokens)):
        found[:, one:following] = each[:, prompt, None]
    return found


def latent_shape(config: VAEConfig, width: int, height: int, frames: int) -> tuple[int, int, int, int, int]:
    """[1, C, T, Y, X] of a video of this size. Raises OptionError for a size that the model cannot make."""
    stride = config.spatial_stride
    check_size(width, height, frames, multiple=2 * stride, temporal=config.temporal_stride)  # patches of 2 x 2 latents
    return 1, config.z_dim, config.latent_frames(frames), height // stride, width // stride


def empty_latents(config: VAEConfig, width: int, height: int, frames: int) -> Tensor:
    return torch.zeros(latent_shape(config, width, height, frames))


def size_for_image(width: int, height: int, area: int, multiple: int) -> tuple[int, int]:
    """(width, height) with at most `area` pixels and the aspect of a width x height image, in multiples of `multiple`.

    Source: image2video.py of Wan2.2.
    """
    rows, columns = sqrt(area * height / width) // multiple, sqrt(area * width / height) // multiple
    return int(max(1, columns)) * multiple, int(max(1, rows)) * multiple


def best_size_for_image(width: int, height: int, area: int, multiple: int) -> tuple[int, int]:
    """The size of `size_for_image`, except that one side is rounded first and the other is fitted to it. Of the two
    orders, the one with the nearer aspect. Source: best_output_size in utils.py of Wan2.2, used by textimage2video.py.
    """
    aspect = width / height

    def cells(length: float) -> int:
        return max(1, int(length // multiple)) * multiple

    width_first, height_first = cells(sqrt(area * aspect)), cells(sqrt(area / aspect))
    by_width = width_first, cells(area / width_first)
    by_height = cells(area / height_first), height_first

    def off(size: tuple[int, int]) -> float:
        return max(aspect / (size[0] / size[1]), size[0] / size[1] / aspect)

    return by_width if off(by_width) < off(by_height) else by_height


def draw_noise(
    seed: int,
    shape: tuple[int, ...],
    batch_index: Sequence[int] | None = None,
    drawn: Sequence[tuple[int, ...]] = (),
) -> Tensor:
    """Standard normal float32 noise on the CPU, as ComfyUI draws it, so that a seed means the same on every device.

    batch_index: as ComfyUI's LATENT carries it; video n of the batch gets the noise that was drawn batch_index[n]-th.
    drawn: shapes that the seed gave before.
    """
    generator = torch.Generator().manual_seed(seed)
    for earlier in drawn:
        torch.randn(earlier, generator=generator)
    if batch_index is None:
        return torch.randn(shape, generator=generator, dtype=torch.float32)
    each = [torch.randn((1, *shape[1:]), generator=generator) for _ in range(max(batch_index) + 1)]
    return torch.cat([each[index] for index in batch_index])
