"""Other implementations of the same transformer on the very same parameters: what ours is measured against.

Each is set up as its own project recommends it for speed. Parameters are shared, not copied, but for the few that a
peer keeps in float32 when it loads a checkpoint itself.

| peer | what it is |
|---|---|
| diffusers | `WanTransformer3DModel` with cuDNN attention |
| comfyui | `comfy.ldm.wan.model.WanModel`, with comfy-kitchen's kernels where that is installed |
| diffusers-compiled, comfyui-compiled | the same with every block compiled, anew for each size: static shapes |
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wan_core.models.wan.families.plain import diffusers_names
from wan_core.models.wan.model import WanModel
from wan_core.ops.library import load_torchs_cudnn

COMFYUI_PATH = "COMFYUI_PATH"  # where a checkout of ComfyUI is, if it is not importable by itself
Run = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(latents [1, C, T, Y, X], timestep [1], text rows [1, S, text_dim]) -> velocity."""


@dataclass(frozen=True)
class Peer:
    """`why_not` returns None where it can be measured, else what to do. `build` shares `model`'s parameters."""

    name: str
    why_not: Callable[[], str | None]
    build: Callable[[WanModel], nn.Module]
    call: Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]
    version: Callable[[], str]
    compile: Callable[[nn.Module], None] | None = None  # in place

    def ready(self, model: WanModel) -> tuple[nn.Module, Run]:
        """The peer on `model`'s parameters, compiled if it is a compiled one, and how to run it."""
        built = self.build(model).requires_grad_(False).eval()
        if self.compile is not None:
            torch._dynamo.reset()  # a new size gets shapes of its own, as in a process that makes one size only
            self.compile(built)
        config = model.config

        def run(x: Tensor, timestep: Tensor, context: Tensor) -> Tensor:
            padded = F.pad(context, (0, 0, 0, config.text_len - context.shape[1]))
            return self.call(built, x.to(padded.dtype), timestep, padded)

        return built, run


# ------------------------------------------------------------------------------------------------------------ diffusers


def _diffusers_why_not() -> str | None:
    if importlib.util.find_spec("diffusers") is None:
        return "diffusers is not installed: pip install diffusers"
    load_torchs_cudnn()  # it imports Transformer Engine where that is installed
    try:
        importlib.import_module("diffusers.models.transformers.transformer_wan")
    except (ImportError, OSError, RuntimeError, AttributeError) as fault:
        return f"diffusers cannot be imported ({fault}): pip install --upgrade diffusers"
    return None


def _diffusers(model: WanModel) -> nn.Module:
    from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed, WanTransformer3DModel

    config = model.config
    with torch.device("meta"):
        peer = WanTransformer3DModel(
            patch_size=config.patch_size,
            num_attention_heads=config.num_heads,
            attention_head_dim=config.head_dim,
            in_channels=config.in_channels,
            out_channels=config.out_channels,
            text_dim=config.text_dim,
            freq_dim=config.freq_dim,
            ffn_dim=config.ffn_dim,
            num_layers=config.num_layers,
            eps=config.eps,
        )
    names = diffusers_names(peer.state_dict().keys())
    assert names is not None
    ours = model.state_dict()
    peer.load_state_dict({theirs: ours[name] for theirs, name in names.items()}, assign=True)
    weight = model.patch_embedding.weight
    peer.rope = WanRotaryPosEmbed(config.head_dim, config.patch_size, 1024).to(weight.device)
    kept = set(cast("list[str]", peer._keep_in_fp32_modules))
    for name, parameter in peer.named_parameters():
        if kept.intersection(name.split(".")):  # what from_pretrained keeps in float32 whatever dtype is asked for
            parameter.data = parameter.data.float()
    if weight.is_cuda and weight.dtype != torch.float32:
        peer.set_attention_backend("_native_cudnn")
    return peer


def _call_diffusers(peer: nn.Module, x: Tensor, timestep: Tensor, context: Tensor) -> Tensor:
    return peer(x, timestep, context, return_dict=False)[0]


def _diffusers_version() -> str:
    return importlib.import_module("diffusers").__version__


def _compile_diffusers(peer: nn.Module) -> None:
    cast(Any, peer).compile_repeated_blocks(fullgraph=True)


# -------------------------------------------------------------------------------------------------------------- ComfyUI


def _comfyui_why_not() -> str | None:
    path = os.environ.get(COMFYUI_PATH)
    if path is not None and path not in sys.path:
        sys.path.append(path)
    if importlib.util.find_spec("comfy") is None:
        return f"ComfyUI was not found: set {COMFYUI_PATH} to a checkout"
    try:
        _comfy("comfy.ldm.wan.model")
    except (ImportError, OSError, RuntimeError, AttributeError) as fault:
        return f"ComfyUI cannot be imported ({fault}): install its requirements.txt, or measure with its own Python"
    return None


def _comfy(name: str) -> ModuleType:
    """A module of ComfyUI. By name, not as an import: the engine does without it, and so do its tools."""
    options = importlib.import_module("comfy.cli_args").args
    if not torch.cuda.is_available():
        options.cpu = True  # as `main.py --cpu`: read when comfy.model_management is imported first
    return importlib.import_module(name)


SAME = ("patch_size", "text_len", "dim", "ffn_dim", "freq_dim", "text_dim", "num_heads", "num_layers", "eps")
SIZES = {**{name: name for name in SAME}, "in_dim": "in_channels", "out_dim": "out_channels"}  # theirs -> ours


def _comfyui(model: WanModel) -> nn.Module:
    config, ours = model.config, model.state_dict()
    wan, operations = _comfy("comfy.ldm.wan.model"), _comfy("comfy.ops").disable_weight_init
    dtype = model.patch_embedding.weight.dtype
    sizes = {theirs: getattr(config, own) for theirs, own in SIZES.items()}
    peer = wan.WanModel(model_type="t2v", device=torch.device("meta"), dtype=dtype, operations=operations, **sizes)
    ours |= {name: ours[name].float() for name in ("patch_embedding.weight", "patch_embedding.bias")}
    peer.load_state_dict(ours, assign=True)
    return peer


def _call_comfyui(peer: nn.Module, x: Tensor, timestep: Tensor, context: Tensor) -> Tensor:
    return peer(x, timestep, context, transformer_options={})


def _comfyui_version() -> str:
    try:
        return importlib.import_module("comfyui_version").__version__
    except ImportError:
        return "unknown"


def _compile_blocks(peer: nn.Module) -> None:
    for block in cast("nn.ModuleList", peer.blocks):
        block.compile()


DIFFUSERS = Peer("diffusers", _diffusers_why_not, _diffusers, _call_diffusers, _diffusers_version)
COMFYUI = Peer("comfyui", _comfyui_why_not, _comfyui, _call_comfyui, _comfyui_version)
PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        DIFFUSERS,
        replace(DIFFUSERS, name="diffusers-compiled", compile=_compile_diffusers),
        COMFYUI,
        replace(COMFYUI, name="comfyui-compiled", compile=_compile_blocks),
    )
}


def peer_versions(names: set[str]) -> dict[str, str]:
    """The versions of the peers among `names`, for a result's envelope."""
    used = [PEERS[name] for name in sorted(names & PEERS.keys())]
    return {peer.name.removesuffix("-compiled"): peer.version() for peer in used if peer.why_not() is None}
