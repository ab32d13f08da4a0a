"""LoRAs of files and the patches that ComfyUI makes of them change a model equally."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from wan_core.checkpoint.detect import expected_shapes
from wan_core.checkpoint.lora.read import read_lora
from wan_core.config import OptionError
from wan_core.models.wan.config import DiTConfig
from wan_core.pipeline.native_patches import ADAPTERS, loras_of_patches

CONFIG = DiTConfig(
    in_channels=16, out_channels=16, dim=64, ffn_dim=96, num_heads=2, num_layers=2, text_dim=64, text_len=32
)
MODULES = ("blocks.0.self_attn.q", "blocks.0.ffn.0", "blocks.1.self_attn.q", "blocks.1.ffn.0")


class Adapter:
    """ComfyUI's adapter: those of one file share `loaded_keys`."""

    def __init__(self, name: str, weights: tuple[Any, ...], loaded_keys: set[str]) -> None:
        self.name, self.weights, self.loaded_keys = name, weights, loaded_keys


def factors(kind: str, module: str, seed: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    n, k = expected_shapes(CONFIG)[f"{module}.weight"]

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=draw)

    if kind == "lora":
        return {"lora_up.weight": matrix(n, 2), "lora_down.weight": matrix(2, k), "alpha": torch.tensor(3.0)}
    if kind == "dora":
        return {**factors("lora", module, seed), "dora_scale": matrix(n, 1).abs() + 0.5}
    if kind == "loha":
        return {f"hada_w{i}_{s}": matrix(n, 2) if s == "a" else matrix(2, k) for i in (1, 2) for s in "ab"}
    if kind == "lokr":
        return {"lokr_w1": matrix(4, 4), "lokr_w2": matrix(n // 4, k // 4)}
    assert kind == "diff"
    return {"diff": matrix(n, k)}


def file_and_patches(
    kinds: list[str | None], strength: float, seed: int
) -> tuple[dict[str, Tensor], dict[str, tuple[Any, ...]]]:
    """A LoRA file, a kind (or nothing) for each module, and what ComfyUI makes of it."""
    file: dict[str, Tensor] = {}
    patches: dict[str, tuple[Any, ...]] = {}
    keys: set[str] = set()
    for number, (kind, module) in enumerate(zip(kinds, MODULES, strict=True)):
        if kind is None:
            continue
        tensors = factors(kind, module, seed + number)
        file |= {f"diffusion_model.{module}.{role}": tensor for role, tensor in tensors.items()}
        if kind == "diff":
            value: Any = ("diff", (tensors["diff"],))
        else:
            name = "lora" if kind == "dora" else kind
            weights = (tensors.get(role) if role else None for role in ADAPTERS[name])
            value = Adapter(name, tuple(w.item() if w is not None and not w.ndim else w for w in weights), keys)
        patches[f"diffusion_model.{module}.weight"] = (strength, value, 1.0, None, None)
    return file, patches


KINDS = st.lists(st.sampled_from([None, "lora", "dora", "loha", "lokr", "diff"]), min_size=4, max_size=4)


@settings(max_examples=20)
@given(st.lists(st.tuples(KINDS.filter(any), st.sampled_from([1.0, 0.5])), min_size=1, max_size=3))
def test_patches_change_what_their_files_change(loras: list[tuple[list[str | None], float]]) -> None:
    """In the same order for each parameter, to the same bits."""
    shapes, expected, by_module = expected_shapes(CONFIG), {}, {}
    patches: dict[str, list[tuple[Any, ...]]] = {}
    for seed, (kinds, strength) in enumerate(loras):
        file, patches_of_file = file_and_patches(kinds, strength, 100 * seed)
        for name, changes in read_lora(file, shapes).changes.items():
            expected.setdefault(name, []).extend((change, strength) for change in changes)
        for key, patch in patches_of_file.items():
            patches.setdefault(key, []).append(patch)
    loras_read = loras_of_patches(patches, CONFIG, "the MODEL")
    for one in loras_read:
        for name, changes in one.lora.changes.items():
            by_module.setdefault(name, []).extend((change, one.strength) for change in changes)
    assert by_module.keys() == expected.keys()
    for name, changes in expected.items():
        values = [torch.ones(shapes[name]), torch.ones(shapes[name])]
        for at, several in enumerate((changes, by_module[name])):
            for change, strength in several:
                values[at] = change.apply(values[at], strength)
        assert torch.equal(*values), name


def test_a_file_is_one_lora_and_is_known_again() -> None:
    _, patches = file_and_patches(["lora", "diff", "loha", None], 0.5, 1)
    (one,) = loras_of_patches({key: [patch] for key, patch in patches.items()}, CONFIG, "the MODEL")
    assert one.strength == 0.5 and one.lora.kinds == {"LoRA": 1, "difference": 1, "LoHa": 1}
    other = {key: [(0.9, *patch[1:])] for key, patch in patches.items()}
    (again,) = loras_of_patches(other, CONFIG, "the MODEL")
    assert again.key == one.key and again.strength == 0.9
    _, new = file_and_patches(["lora", "diff", "loha", None], 0.5, 1)
    assert loras_of_patches({key: [patch] for key, patch in new.items()}, CONFIG, "the MODEL")[0].key != one.key


TENSOR = torch.zeros(64, 64)


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        ((1.0, ("set", (TENSOR,)), 1.0, None, None), "kind 'set'"),
        ((1.0, Adapter("oft", (TENSOR, None, 1.0, None), set()), 1.0, None, None), "kind 'oft'"),
        ((1.0, [(TENSOR, None)], 1.0, None, None), "merge of two models"),
        ((1.0, Adapter("lora", (TENSOR, TENSOR, 1.0, TENSOR, None, None), set()), 1.0, None, None), "Tucker"),
        ((1.0, ("diff", (TENSOR,)), 0.5, None, None), "scales"),
        ((1.0, ("diff", (TENSOR,)), 1.0, (0, 0, 4), None), "scales"),
        ((1.0, ("diff", (TENSOR, {"pad_weight": True})), 1.0, None, None), "kind 'diff'"),
    ],
)
def test_patches_of_other_kinds_are_refused_by_name(patch: tuple[Any, ...], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        loras_of_patches({"diffusion_model.blocks.0.self_attn.q.weight": [patch]}, CONFIG, "the MODEL")


def test_patches_beside_the_transformer_are_refused() -> None:
    patch = (1.0, ("diff", (TENSOR,)), 1.0, None, None)
    with pytest.raises(OptionError, match="model_sampling"):
        loras_of_patches({"model_sampling.x": [patch]}, CONFIG, "the MODEL")
