"""Run by ComfyUI's Python: objects of other types on the sockets of all nodes. `native_checks` runs its checks."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import types
from typing import Any

WRONG = ("abc", 3, 0.5, {}, [], {"a": 1}, object())


class World:
    def __init__(self, pack: types.ModuleType) -> None:
        self.nodes = pack.NODES  # type: ignore[attr-defined]
        self.schema = importlib.import_module("pack.nodes.schema")


def sockets(it: World) -> list[tuple[Any, Any]]:
    widgets = tuple(it.schema.KINDS)
    return [(node, one) for node in it.nodes for one in node.define_schema().inputs if not isinstance(one, widgets)]


def refused(call: Any, **values: Any) -> str:
    """What a call refuses; empty where it does not."""
    from wan_core.config import OptionError

    try:
        made = call(**values)
        if inspect.iscoroutine(made):
            asyncio.run(made)
    except OptionError as fault:
        return str(fault)
    except TypeError as fault:  # of a call without the other inputs
        return "" if "required" in str(fault) else repr(fault)
    return ""


def check_constants(it: World) -> None:
    """No constant is an object: all are refused by the socket's name before a prompt runs; links, and what is not
    there, are not."""
    assert len(sockets(it)) > 50
    for node, one in sockets(it):
        assert one.id in inspect.getfullargspec(node.validate_inputs).args
        for wrong in WRONG[:-1]:
            assert f"{one.id} takes " in refused(node.validate_inputs, **{one.id: wrong}), (node, one.id, wrong)
        assert not refused(node.validate_inputs, **{one.id: None}) and not refused(node.validate_inputs)


def check_links(it: World) -> None:
    """What comes through a link of any type is compared when the node runs."""
    import torch

    from wan_core.config import SkipOptions
    from wan_core.execution.report import Report

    right = {
        "WANCORE_SKIPPING": SkipOptions(),
        "WANCORE_REPORT": Report(torch.device("cpu")),
        "LATENT": {"samples": torch.zeros(1)},
        "CONDITIONING": [[torch.zeros(1), {}]],
        "AUDIO": types.MappingProxyType({"waveform": torch.zeros(1), "sample_rate": 1}),  # VideoHelperSuite's is lazy
        "AUDIO_ENCODER_OUTPUT": {},
        "IMAGE": torch.zeros(1, 2, 2, 3),
        "MASK": torch.zeros(2, 2),
        "SIGMAS": torch.zeros(2),
    }
    partial: dict[str, list[Any]] = {
        "IMAGE": [torch.zeros(1, 0, 2, 3), torch.zeros(2, 2, 3)],
        "MASK": [torch.zeros(0, 2, 2), torch.zeros(2, 0)],
        "SIGMAS": [torch.zeros(2, 2)],
        "LATENT": [{}, {"samples": None}, {"samples": torch.zeros(0, 16, 1, 2, 2)}],
        "AUDIO": [{}, {"waveform": None, "sample_rate": 1}, {"waveform": torch.zeros(1, 2, 9), "sample_rate": "x"},
                  {"waveform": torch.zeros(0, 2, 9), "sample_rate": 1}],
        "CONDITIONING": [[3], [[torch.zeros(1)]], [[torch.zeros(1), None]], [[None, {}]]],
    }  # fmt: skip
    for node, one in sockets(it):
        for wrong in WRONG:
            said = refused(node.execute, **{one.id: wrong})
            fits = isinstance(right.get(one.io_type), type(wrong)) and one.io_type not in ("LATENT", "AUDIO")
            assert fits or f"{one.id} takes " in said, (node, one.id, wrong, said)
        for wrong in partial.get(one.io_type, []):
            assert f"{one.id} takes " in refused(node.execute, **{one.id: wrong}), (node, one.id, wrong)
        if one.io_type == "IMAGE":  # none before the first clip
            said = refused(node.execute, **{one.id: torch.zeros(0, 2, 2, 3)})
            assert (f"{one.id} takes " in said) is (one.id != "previous_frames"), (node, one.id, said)
        nothing = refused(node.execute, **{one.id: None})
        assert one.optional or (f"{one.id} takes " in nothing and "nothing was given" in nothing), (node, one.id)
        if one.io_type in right:
            said = refused(node.execute, **{one.id: right[one.io_type]})
            assert f"{one.id} takes " not in said, (node, one.id, said)
