"""ComfyUI's own VAE of Wan 2.1 and 2.2, streamed: WanCore's decoder around the weights that ComfyUI holds.

Weights come from `comfy.ops.cast_bias_weight`, as for ComfyUI's own layers: those on the device are used where they
are, those that its memory manager has elsewhere come for as long as the decoding lasts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from comfy import model_management
from torch import Tensor, nn

from wan_core.checkpoint.layouts_vae import vae_config
from wan_core.execution.memory.planning import vae_bytes
from wan_core.execution.report import Report
from wan_core.models.vae.config import VAEConfig
from wan_core.models.vae.layers import CausalConv3d, RMSNorm
from wan_core.models.vae.vae import VideoVAE
from wan_core.pipeline.decode import Made, Pieces, decode_to

from .progress import check_interruption


def native_vae_config(vae: Any) -> VAEConfig | None:
    """The architecture of ComfyUI's VAE object; None: it is not Wan's, or a node changed how it decodes."""
    from comfy import ops, sd
    from comfy.ldm.wan import vae as wan21
    from comfy.ldm.wan import vae2_2 as wan22

    model = getattr(vae, "first_stage_model", None)
    own = type(vae) is sd.VAE and type(model) in (wan21.WanVAE, wan22.WanVAE)
    if not own or "decode" in vars(vae) or "decode" in vars(model) or not hasattr(ops, "uncast_bias_weight"):
        return None
    try:
        return vae_config({name: tuple(tensor.shape) for name, tensor in model.named_parameters()}, {})
    except ValueError:  # more channels than colours, as of VAEs that also make alpha or a larger picture
        return None


def decode_native_to(
    vae: Any, config: VAEConfig, samples: Tensor, report: Report, consume: Callable[[Pieces], Made], **how: Any
) -> Made:
    """Decode with the weights of ComfyUI's VAE. samples, consume, how: as of `wan_core.pipeline.decode.decode_to`."""
    with model_management.cuda_device_context(vae.device), _around(vae, config, *samples.shape[-2:]) as decoder:
        return decode_to(decoder, samples, report, consume, **how)


@contextmanager
def _around(vae: Any, config: VAEConfig, rows: int, columns: int) -> Iterator[VideoVAE]:
    """A VAE that decodes latents of `rows` x `columns`, whose weights are those of `vae`. It has no encoder."""
    memory = vae_bytes(config, rows, columns, vae.vae_dtype.itemsize)
    model_management.load_models_gpu([vae.patcher], memory_required=memory, force_full_load=vae.disable_offload)
    with torch.device("meta"):
        decoder = VideoVAE(config)
    natives = dict(vae.first_stage_model.named_modules())
    with ExitStack() as ends:
        for name, module in decoder.named_modules():
            if name == "conv2" or name.startswith("decoder."):
                _borrow(module, natives.get(name), vae.device, vae.vae_dtype, ends)
        if vae.device.type == "cpu":
            make_interruptible(decoder)
        else:  # the first convolutions alone: later ones follow the layout of what they are given
            for first in (decoder.conv2, cast(CausalConv3d, decoder.decoder.conv1)):
                first.weight.data = first.weight.data.contiguous(memory_format=torch.channels_last_3d)
        yield decoder


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
