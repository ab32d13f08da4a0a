"""What travels between nodes. Models and reports have sockets of their own; text encoders and VAEs travel on ComfyUI's
CLIP and VAE sockets, with the methods that its own nodes call, so that either side can be replaced.

Legend: B batch, C latent channels, T/Y/X latent frames, rows, columns, F/H/W video frames, height, width.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from types import MappingProxyType
from typing import Any, cast

import torch
import torch.nn.functional as F
from comfy_api.latest import io
from torch import Tensor, nn

from wan_core.config import OptionError, SkipOptions
from wan_core.execution.memory.planning import TEXT, Beside, Sizes, plan_memory, vae_bytes
from wan_core.execution.memory.residency import KEPT_FREE
from wan_core.execution.memory.streaming import stage_bytes
from wan_core.execution.report import Report
from wan_core.models.text.tokenizer import TokenCount
from wan_core.models.text.umt5 import PromptCache, TextEncoder
from wan_core.models.vae.config import VAEConfig
from wan_core.models.vae.tiling import TileSpec
from wan_core.models.vae.vae import VideoVAE
from wan_core.models.vision.clip import VisionEncoder
from wan_core.models.wan.config import DiTConfig
from wan_core.models.wan.families import TASKS
from wan_core.models.wan.families.media import pixels_to_video, video_to_pixels
from wan_core.models.wan.families.plain import number
from wan_core.models.wan.families.wan.inputs import NO_KEYFRAMES, known_frames
from wan_core.pipeline.decode import Made, Pieces, collect_images, decode_to, images_shape
from wan_core.pipeline.encode import encode_images, encode_video
from wan_core.pipeline.memory_planning import check_pictures, host_room, plan_host

from . import host
from .memory import ModelSocket
from .missing import ComfyObject, Tokens
from .schema import socket_type

MODEL = socket_type("WANCORE_MODEL", ModelSocket)
EITHER_MODEL = io.Custom("WANCORE_MODEL,MODEL")  # or ComfyUI's ModelPatcher
REPORT = socket_type("WANCORE_REPORT", Report)
SKIPPING = socket_type("WANCORE_SKIPPING", SkipOptions)
CONDITIONING = list[list[Any]]  # [[rows [1, L, 4096], {...}]]
DEFAULT_NEGATIVES = {task.negative_prompt for task in TASKS.values()} - {""}


class TextSocket(ComfyObject):
    """A UMT5 encoder on a CLIP socket; encoded prompts are kept with it."""

    described = "WanCore's text encoder", "ComfyUI's CLIPLoader (type wan)"
    cond_stage_model = nn.Module()  # to LoRA loaders: no weights that a LoRA changes

    def __init__(self, patcher: host.Held) -> None:
        self.patcher = patcher  # under the name that `memory.ModelSocket.patcher` explains
        self.cache = PromptCache()

    def read(self, prompts: Sequence[str]) -> tuple[Sequence[Tensor], Sequence[TokenCount]]:
        """Rows [L, dim] of each prompt, zeros at the end or none, and its tokens. Blocks of the encoder stream if it
        does not fit on the device as a whole."""
        patcher, part = self.patcher, self.patcher.part
        sizes = Sizes(units=(0,), experts=1, text_encoder=part.bytes, text_stage=stage_bytes(part.units, 0), vae=0)
        if plan_memory(sizes, Beside(text=TEXT, denoise=0, decode=0), host.room(), "swap").streams_text:
            if not patcher.in_host_memory:
                host.release_pinned(int(part.bytes / (1 - KEPT_FREE)))
                patcher.wait(part, plan_host({"text_encoder": part}, host_room()).waits("text_encoder"))
            patcher.stream(0)
        return cast(TextEncoder, patcher.use(TEXT)).read(prompts)

    def encode_prompts(self, prompts: Sequence[str], names: Sequence[str] = ()) -> list[CONDITIONING]:
        """Each prompt as CONDITIONING, its rows with zeros behind them as in training: models of ComfyUI attend to all
        rows, and add none. names: what notes call each. `wancore_seconds` in it is what encoding took, 0 if it was
        known, `wancore_notes` is what the user should know of how the prompt was read, and `wancore_prompt` is the
        prompt."""
        begun: list[float] = []

        def read(prompts: Sequence[str]) -> tuple[Sequence[Tensor], Sequence[TokenCount]]:
            begun.append(time.perf_counter())
            return self.read(prompts)

        length = min(DiTConfig.text_len, int(number(self.patcher.part.part.metadata, "max_length", DiTConfig.text_len)))
        rows = [F.pad(row, (0, 0, 0, max(0, length - row.shape[1]))) for row in self.cache.encode(prompts, read)]
        seconds = time.perf_counter() - begun[0] if begun else 0.0
        host.log.info("WanCore encoded the text in %.2f s" if begun else "WanCore knew the text (%.0f s)", seconds)
        conditionings: list[CONDITIONING] = []
        for prompt, name, row in zip(prompts, names or ["prompt"] * len(prompts), rows, strict=True):
            # a long default is meant for other encoders, and nobody wrote it
            notes = self.cache.notes(prompt, name) if prompt not in DEFAULT_NEGATIVES else []
            for note in notes:
                host.log.warning("WanCore: %s", note)
            extras = {"wancore_seconds": seconds, "wancore_notes": notes, "wancore_prompt": prompt}
            conditionings.append([[row, {"pooled_output": None, **extras}]])
        return conditionings

    # What nodes of others call.

    def clone(self, **_: Any) -> TextSocket:
        return copy.copy(self)

    def add_patches(self, patches: Mapping[Any, Any], *_: Any, **__: Any) -> list[str]:
        """Which of the patches it takes: none. A LoRA loader hands in those of the MODEL too. Raises OptionError for
        patches of a text encoder."""
        names = [name if isinstance(name, str) else name[0] for name in patches]
        if not all(name.startswith("diffusion_model.") for name in names):
            raise OptionError(
                "this node changes the weights of a text encoder, and WanCore's stay as they are: leave the node out, "
                f"or use {self.described[1]}"
            )
        return []

    def tokenize(self, text: str, return_word_ids: bool = False, **more: Any) -> Tokens:
        """Raises OptionError for pictures and whatever else a node adds to a text for the encoder of another model."""
        if added := [name for name, value in more.items() if value is not None and value != []]:
            raise OptionError(
                f"this node encodes {', '.join(added)} with the text, and the text encoder is UMT5, that of Wan, which "
                "takes a text alone: use CLIP Text Encode or WanCore Text Encode"
            )
        return Tokens(text)

    def encode_from_tokens_scheduled(
        self, tokens: Tokens, unprojected: bool = False, add_dict: Mapping[str, Any] = MappingProxyType({}), **_: Any
    ) -> CONDITIONING:
        [[rows, extras]] = self.encode_prompts([text_of(tokens)])[0]
        return [[rows, {**extras, **add_dict}]]

    def encode_from_tokens(self, tokens: Tokens, return_pooled: bool | str = False, return_dict: bool = False) -> Any:
        """The rows [1, L, dim], with the pooled output that UMT5 does not have, or both in a dictionary."""
        [[rows, extras]] = self.encode_prompts([text_of(tokens)])[0]
        if return_dict:
            return {"cond": rows, **extras}
        return (rows, None) if return_pooled else rows

    def encode(self, text: str) -> Tensor:
        return self.encode_from_tokens(self.tokenize(text))


def text_of(tokens: Any) -> str:
    """The text of what `TextSocket.tokenize` made. Raises OptionError for tokens of another encoder."""
    if not isinstance(tokens, Tokens):
        raise OptionError("these tokens are not of WanCore's text encoder: this node encodes for another model")
    return tokens.text


@dataclass(frozen=True)
class VisionOutput(ComfyObject):
    """What ComfyUI's CLIPVisionEncode returns, as far as Wan models read it: features [B, N, C]."""

    described = "what WanCore's CLIP vision encoder saw", "ComfyUI's CLIP Vision Loader"
    penultimate_hidden_states: Tensor


class VisionSocket(ComfyObject):
    """A CLIP vision encoder on a CLIP_VISION socket. It sees pictures as the command line's does."""

    described = "WanCore's CLIP vision encoder", "ComfyUI's CLIP Vision Loader"

    def __init__(self, patcher: host.Held) -> None:
        self.patcher = patcher  # under the name that `memory.ModelSocket.patcher` explains

    # What ComfyUI's CLIPVisionEncode calls.

    def encode_image(self, image: Tensor, crop: bool = True) -> VisionOutput:
        """image [B, H, W, 3] in 0..1. Raises OptionError where a part of it is to be cut off."""
        if crop:
            raise OptionError("Wan models see the whole picture: choose crop 'none' in CLIPVisionEncode")
        encoder = cast(VisionEncoder, self.patcher.use(0))
        pictures = 2 * image[..., :3].movedim(-1, 1).to(host.device(), torch.float32) - 1
        with torch.no_grad():
            return VisionOutput(host.to_intermediate(encoder(pictures)))


class VAESocket(ComfyObject):
    """A video VAE on a VAE socket. Latents are un-normalised, pictures [F, H, W, 3] in 0..1."""

    described = "WanCore's VAE", "ComfyUI's Load VAE"
    latent_dim = 3
    output_channels = 3

    def __init__(self, patcher: host.Held) -> None:
        self.patcher = patcher  # under the name that `memory.ModelSocket.patcher` explains
        self.config = cast(VAEConfig, patcher.part.part.config)
        self.latent_channels = self.config.z_dim
        stride = self.config.spatial_stride
        self.downscale_index_formula = self.upscale_index_formula = self.config.temporal_stride, stride, stride

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self.patcher.load_device

    def decode_to(self, samples: Tensor, report: Report, consume: Callable[[Pieces], Made], **how: Any) -> Made:
        """Decode with this VAE and hand pictures to `consume`. how: as of `wan_core.pipeline.decode.decode_to`."""
        return decode_to(self._loaded(*samples.shape[-2:]), samples, report, consume, **how)

    def encode_pixels(self, pixels: Tensor) -> Tensor:
        """Pictures [F, H, W, 3] in 0..1 -> latents [1, C, T, Y, X]."""
        return encode_images(self._loaded(*self.latent_size(pixels)), pixels)

    def _loaded(self, rows: int, columns: int) -> VideoVAE:
        """On the device, with room for latents of `rows` x `columns`."""
        return cast(VideoVAE, self.patcher.use(self.working_bytes(rows, columns)))

    def decode_images(
        self, samples: Tensor, report: Report, tile: TileSpec | None, on_frames: Callable[[int, int], None]
    ) -> Tensor:
        """Latents [B, C, T, Y, X] -> pictures [B * F, H, W, 3]."""
        shape = images_shape(self.config, samples)
        check_pictures(shape, host.spare_bytes(4 * prod(shape)))
        images = torch.empty(shape)
        collect = partial(collect_images, images=images)
        return self.decode_to(samples, report, collect, dtype=images.dtype, tile=tile, on_frames=on_frames)

    # What ComfyUI's own nodes call.

    def decode(self, samples: Tensor, *_: Any, **__: Any) -> Tensor:
        """[B, C, T, Y, X] -> [B, F, H, W, 3]."""
        return self._decode(samples, None)

    def decode_tiled(self, samples: Tensor, tile_x: int = 32, tile_y: int = 32, overlap: int = 8, **_: Any) -> Tensor:
        """Decode like `decode`, in tiles of `tile_y` x `tile_x` latent cells; time is streamed, never tiled."""
        return self._decode(samples, TileSpec(height=tile_y, width=tile_x, overlap=overlap))

    def encode(self, pixels: Tensor) -> Tensor:
        """[F, H, W, 3], or [B, F, H, W, 3] -> [B, C, T, Y, X]. As by ComfyUI's VAE, frames at the end and edges that
        fill no latent are left out, and an alpha channel too. Raises OptionError for what holds no picture."""
        if pixels.ndim not in (4, 5) or pixels.shape[-1] < 3 or 0 in pixels.shape:
            raise OptionError(f"WanCore's VAE encodes pictures [frames, height, width, 3], not {list(pixels.shape)}")
        videos = pixels[..., :3] if pixels.ndim == 5 else pixels[None, ..., :3]
        latents = [self.encode_pixels(self.config.whole_latents(video)) for video in videos]
        return host.to_intermediate(torch.cat(latents))

    def encode_known(
        self, first: Tensor | None, last: Tensor | None, frames: int, keyframes: Mapping[int, Tensor] = NO_KEYFRAMES
    ) -> tuple[Tensor, Tensor]:
        """The result of `known_frames`, with latents in place of its clip, which exists only on the device."""
        place = {"device": self.device, "dtype": self.patcher.part.dtype}

        def there(pictures: Tensor) -> Tensor:
            return pixels_to_video(video_to_pixels(pictures)).to(**place)

        first, last = (None if end is None else there(end) for end in (first, last))
        clip, unknown = known_frames(first, last, frames, {number: there(one) for number, one in keyframes.items()})
        latents = encode_video(self._loaded(*self.latent_size(clip[0, 0])), clip)
        return host.to_intermediate(latents), unknown.float().cpu()

    def encode_tiled(self, pixels: Tensor, **_: Any) -> Tensor:
        return self.encode(pixels)

    def spacial_compression_decode(self) -> int:
        return self.config.spatial_stride

    def spacial_compression_encode(self) -> int:
        return self.config.spatial_stride

    def temporal_compression_decode(self) -> int:
        return self.config.temporal_stride

    def _decode(self, samples: Tensor, tile: TileSpec | None) -> Tensor:
        bar = host.Progress(1)
        images = self.decode_images(samples, Report(self.device), tile, lambda done, total: bar.update(done, total, ""))
        return host.to_intermediate(images.unflatten(0, (samples.shape[0], -1)))

    def working_bytes(self, rows: int, columns: int) -> int:
        """Bytes of activations for decoding or encoding latents of `rows` x `columns`."""
        return vae_bytes(self.config, rows, columns, self.patcher.part.dtype.itemsize)

    def latent_size(self, pictures: Tensor) -> tuple[int, int]:
        """Rows and columns of the latents of pictures [F, H, W, ...]."""
        stride = self.config.spatial_stride
        return pictures.shape[1] // stride, pictures.shape[2] // stride
