"""The settings that a forward is measured in, each a factory: case -> a callable that runs it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.cases import Case
from benchmarks.options import SETTINGS
from benchmarks.peers import PEERS
from wan_core.config import OptionError
from wan_core.execution.optimize import optimize
from wan_core.ops.attention.registry import resolve_attention
from wan_core.sampling.denoise import stack_text

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


def _peer(name: str) -> Callable[[Case, str], Forward]:
    """The peer called `name` on the very same parameters. Raises OptionError where it is not installed."""

    def factory(case: Case, _: str) -> Forward:
        reason = PEERS[name].why_not()
        if reason is not None:
            raise OptionError(f"setting {name!r}: {reason}")
        run = PEERS[name].ready(case.model)[1]
        return lambda: run(case.x, case.timestep, case.contexts[0])

    return factory


FACTORIES: dict[str, Callable[[Case, str], Forward]] = {
    "forward": _forward,
    "sequential": _sequential,
    "batched": _batched,
    "attention": _attention,
    **{name: _peer(name) for name in PEERS},
}
