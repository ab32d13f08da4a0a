"""The settings that a forward is measured in, each a factory: case -> a callable that runs it."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from wan_core.attention.registry import resolve_attention
from wan_core.bench.cases import Case
from wan_core.bench.options import SETTINGS
from wan_core.checkpoint.layouts import diffusers_dit_names
from wan_core.config import OptionError
from wan_core.denoise import stack_text
from wan_core.optimize import optimize

Forward = Callable[[], torch.Tensor]


def make_forward(setting: str, case: Case) -> Forward:
    """What runs `setting` ("diffusers", "attention:cudnn", ...) on `case`. Raises OptionError for an unknown one."""
    kind, argument = check_setting(setting)
    return FACTORIES[kind](case, argument)


def check_setting(setting: str) -> tuple[str, str]:
    """(kind, argument) of a setting. Raises OptionError for an unknown one."""
    kind, _, argument = setting.partition(":")
    if kind not in FACTORIES or bool(argument) != (kind == "attention"):
        raise OptionError(f"setting {setting!r} is not known; use one of: {', '.join(SETTINGS)}")
    return kind, argument


def _forward(case: Case, _: str) -> Forward:
    text = case.model.prepare_text(case.contexts[0])
    return lambda: case.model(case.x, case.timestep, text)


def _sequential(case: Case, _: str) -> Forward:
    texts = [case.model.prepare_text(c) for c in case.contexts]
    return lambda: torch.cat([case.model(case.x, case.timestep, text) for text in texts])


def _batched(case: Case, _: str) -> Forward:
    text = case.model.prepare_text(stack_text(list(case.contexts), 1))
    x, timestep = torch.cat([case.x, case.x]), torch.cat([case.timestep, case.timestep])
    return lambda: case.model(x, timestep, text)


def _attention(case: Case, backend: str) -> Forward:
    attend = resolve_attention(backend, case.x.device, case.model.patch_embedding.weight.dtype)[1]
    text = case.model.prepare_text(case.contexts[0])

    def forward() -> torch.Tensor:
        before = case.model.blocks[0].self_attn.attend
        optimize(case.model, attend=attend)
        try:
            return case.model(case.x, case.timestep, text)
        finally:
            optimize(case.model, attend=before)

    return forward


def _diffusers(case: Case, _: str) -> Forward:
    """The peer on the very same parameters, no copy, but for what diffusers keeps in float32 when it loads."""
    from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed, WanTransformer3DModel

    config = case.model.config
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
    names = diffusers_dit_names(peer.state_dict().keys())
    assert names is not None
    ours = case.model.state_dict()
    peer.load_state_dict({theirs: ours[name] for theirs, name in names.items()}, assign=True)
    peer.rope = WanRotaryPosEmbed(config.head_dim, config.patch_size, 1024).to(case.x.device)
    for name, module in peer.named_modules():
        if any(name.split(".")[-1] == kept for kept in peer._keep_in_fp32_modules):
            module.float()
    for name, parameter in peer.named_parameters():
        if "scale_shift_table" in name:
            parameter.data = parameter.data.float()
    context = F.pad(case.contexts[0], (0, 0, 0, config.text_len - case.contexts[0].shape[1]))
    x = case.x.to(context.dtype)
    return lambda: peer.eval()(x, case.timestep, context, return_dict=False)[0]


FACTORIES: dict[str, Callable[[Case, str], Forward]] = {
    "forward": _forward,
    "sequential": _sequential,
    "batched": _batched,
    "attention": _attention,
    "diffusers": _diffusers,
}
