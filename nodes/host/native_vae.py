"""ComfyUI's own VAE of Wan 2.1 and 2.2 with WanCore's layers around the weights ComfyUI holds: its decoder
streams, its encoder computes frames that stand still once.

Weights come from `comfy.ops.cast_bias_weight`, as for ComfyUI's own layers: those on the device are used where they
are, those that its memory manager has elsewhere come for as long as the work lasts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from functools import cache
from typing import Any, cast

import torch
from comfy import model_management
from torch import Tensor, nn

from wan_core.checkpoint.layouts_vae import vae_config
from wan_core.execution.memory.planning import vae_bytes
from wan_core.execution.report import Report
from wan_core.models.vae.config import VAEConfig
from wan_core.models.vae.layers import CausalConv3d, RMSNorm
from wan_core.models.vae.vae import VideoVAE, still_since
from wan_core.pipeline.decode import Made, Pieces, decode_to

from .progress import check_interruption

DEVICES = ("cuda", "cpu")  # types of device from which the decoder brings frames to the host
PIXELS = 16  # of so many one is compared first, in either direction: all are, where these are equal


def native_vae_config(vae: Any, method: str = "decode") -> VAEConfig | None:
    """The architecture of ComfyUI's VAE object; None: it is not Wan's, a node changed its `method`, or it is on a
    device that is neither a CUDA one nor the CPU."""
    from comfy import ops, sd
    from comfy.ldm.wan import vae as wan21
    from comfy.ldm.wan import vae2_2 as wan22

    model = getattr(vae, "first_stage_model", None)
    own = type(vae) in (sd.VAE, still_vae()) and type(model) in (wan21.WanVAE, wan22.WanVAE)
    if not own or method in vars(vae) or method in vars(model) or not hasattr(ops, "uncast_bias_weight"):
        return None
    if vae.device.type not in DEVICES:
        return None
    shapes = {name: tensor.shape for name, tensor in model.named_parameters()}
    try:
        config = vae_config(shapes, {})
    except ValueError:  # other layers, or more channels than colours
        return None
    # layers of the same names that compute something else, or a decoder with more channels than colours
    return config if shapes == shapes_of(config) else None


@cache
def shapes_of(config: VAEConfig) -> dict[str, torch.Size]:
    with torch.device("meta"):
        return {name: tensor.shape for name, tensor in VideoVAE(config).named_parameters()}


def decode_native_to(
    vae: Any, config: VAEConfig, samples: Tensor, report: Report, consume: Callable[[Pieces], Made], **how: Any
) -> Made:
    """Decode with the weights of ComfyUI's VAE. samples, consume, how: as of `wan_core.pipeline.decode.decode_to`."""
    with _around(vae, config, "decoder", *samples.shape[-2:]) as ours:
        return decode_to(ours, samples, report, consume, **how)


def with_still_frames(vae: Any) -> Any:
    """A copy of ComfyUI's VAE object, around the same model, that encodes equal frames once. `vae` itself where it is
    not Wan's, or ComfyUI is older than 0.33."""
    newer = hasattr(vae, "vae_output_dtype") and hasattr(model_management, "raise_non_oom")
    if not newer or native_vae_config(vae, "encode") is None:
        return vae
    faster = copy(vae)
    faster.__class__ = still_vae()
    return faster


@cache
def still_vae() -> type[Any]:
    """The class of such a copy. Nodes copy it again, and change on which device and in which dtype it computes."""
    from comfy import sd

    class StillVAE(sd.VAE):
        def encode(self, pixel_samples: Tensor, *more: Any, **named: Any) -> Tensor:
            as_video = not more and not named and not self.not_video and self.format_encoded is None
            latents = _encode(self, pixel_samples) if as_video else None
            return super().encode(pixel_samples, *more, **named) if latents is None else latents

    return StillVAE


def _encode(vae: Any, pixels: Tensor) -> Tensor | None:
    """What ComfyUI's `VAE.encode` returns for the frames [F, H, W, C] of a video, in 0..1, of which some are equal to
    the one before. None where ComfyUI computes it: other shapes, no such frame, or too little memory."""
    config = native_vae_config(vae, "encode")
    video = vae.vae_encode_crop_pixels(pixels).movedim(-1, 0)[None]
    if config is None or pixels.ndim != 4 or video.shape[1] != 3 or len(pixels) % config.temporal_stride != 1:
        return None
    if still_since(video[..., ::PIXELS, ::PIXELS]) == list(range(video.shape[2])):
        return None
    try:
        return _encode_around(vae, config, video)
    except RuntimeError as fault:
        model_management.raise_non_oom(fault)
    model_management.soft_empty_cache()
    return None


def _encode_around(vae: Any, config: VAEConfig, video: Tensor) -> Tensor:
    """The latents of video [1, 3, F, H, W]."""
    rows, columns = (side // config.spatial_stride for side in video.shape[-2:])
    both = 2 * video.numel() * vae.vae_dtype.itemsize  # the frames one by one, and together
    with _around(vae, config, "encoder", rows, columns, beside=both) as ours:
        frames = [vae.process_input(frame.to(vae.device)).to(vae.vae_dtype) for frame in video.unbind(2)]
        latents = ours.encode(torch.stack(frames, 2))
        return latents.to(vae.output_device, vae.vae_output_dtype(), copy=True).contiguous()


@contextmanager
def _around(vae: Any, config: VAEConfig, part: str, rows: int, columns: int, beside: int = 0) -> Iterator[VideoVAE]:
    """A VAE for latents of `rows` x `columns`, whose weights are those of `vae`. part: encoder or decoder, the one that
    it has. beside: bytes that the caller needs as well."""
    memory = vae_bytes(config, rows, columns, vae.vae_dtype.itemsize) + beside
    with torch.device("meta"):
        ours = VideoVAE(config)
    natives = dict(vae.first_stage_model.named_modules())
    with model_management.cuda_device_context(vae.device), ExitStack() as ends:
        model_management.load_models_gpu([vae.patcher], memory_required=memory, force_full_load=vae.disable_offload)
        for name, module in ours.named_modules():
            if name in ("conv1", "conv2") or name.startswith(f"{part}."):
                _borrow(module, natives.get(name), vae.device, vae.vae_dtype, ends)
        if vae.device.type == "cpu":
            make_interruptible(ours)
        else:  # the first convolutions alone: later ones follow the layout of what they are given
            for first in (ours.conv2, ours.get_submodule(f"{part}.conv1")):
                weight = cast(CausalConv3d, first).weight
                weight.data = weight.data.contiguous(memory_format=torch.channels_last_3d)
        yield ours


def _borrow(module: nn.Module, native: Any, device: torch.device, dtype: torch.dtype, ends: ExitStack) -> None:
    """Give a layer the weights of ComfyUI's; until `ends`."""
    from comfy import ops

    if isinstance(module, RMSNorm):
        module.gamma = _parameter(native.gamma.to(device, dtype))
    elif isinstance(module, (nn.Conv2d, nn.Conv3d)):
        place = {"dtype": dtype, "device": device, "bias_dtype": dtype}
        weight, bias, transfer = ops.cast_bias_weight(native, **place, offloadable=True)
        stream, pinned, *_ = transfer or (None, None)
        if stream is not None and (pinned is None or isinstance(pinned, Tensor)):
            # They lie in a buffer that the next layer's weights will have.
            weights = weight.clone(), bias.clone()
            ops.uncast_bias_weight(native, weight, bias, transfer)
        else:
            weights = weight, bias
            ends.callback(ops.uncast_bias_weight, native, weight, bias, transfer)
        module.weight, module.bias = map(_parameter, weights)


def _parameter(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.detach(), requires_grad=False)


def make_interruptible(vae: VideoVAE) -> None:
    """The user's interruption is seen before each layer: on a CPU one frame can take minutes."""
    for layer in vae.modules():
        layer.register_forward_pre_hook(lambda *_: check_interruption())
