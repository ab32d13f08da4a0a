"""The LoRA node in a running ComfyUI: chains, strengths that load nothing again, refusals; presets for few steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.comfyui import ComfyUI, Graph, Refused
from tests.nodes.comfy_files import LOOK, facts_of, looked_at
from tools.embedded_graphs import LINEARS, SMALL, loaders, node, sampler, write_lora
from wan_core.checkpoint.save import write_safetensors

pytestmark = pytest.mark.comfy


PACKS = {"look": LOOK}


@pytest.fixture(scope="module")
def files(base: Path) -> None:
    folder = base / "models" / "loras"
    write_lora(folder / "style.safetensors", seed=1)
    write_lora(folder / "other_4steps.safetensors", seed=2)
    write_safetensors({"x.weight": torch.zeros(2)}, folder / "no_lora.safetensors", {})


def lora(model: str = "model", **inputs: Any) -> dict[str, Any]:
    numbers = {"high": "style.safetensors", "strength_high": 1.0, "low": "the file above", "strength_low": 1.0}
    return node("WanCoreLoRA", model=[model, 0], **{**numbers, **inputs})


def graph(*chain: dict[str, Any], **sampling: Any) -> Graph:
    """A run of two steps with these LoRA nodes one behind the other."""
    numbers = {"steps": 2, "guidance_high": 1.0, "guidance_low": 1.0, "preset": "none", **sampling}
    names = ["model", *(f"lora{n}" for n in range(len(chain)))]
    for before, one in zip(names, chain, strict=False):
        one["inputs"]["model"] = [before, 0]
    nodes = {**loaders(), **dict(zip(names[1:], chain, strict=True))}
    nodes["size"] = node("WanCoreEmptyLatent", **SMALL, latent_type="Wan 2.1 VAE (A14B, tiny)")
    nodes["sampler"] = sampler(**numbers)
    nodes["sampler"]["inputs"]["model"] = [names[-1], 0]
    return looked_at(nodes, names[-1])


def test_another_strength_and_no_lora_load_nothing_again(comfy: ComfyUI) -> None:
    plain = facts_of(comfy.run(graph()))
    run = comfy.run(graph(lora()))
    full = facts_of(run)
    assert (
        "LoRA of rank 4" in run.outputs["lora0"]["text"][0]
        and "high: LoRA loras/style" in run.outputs["lora0"]["text"][0]
    )
    half = facts_of(comfy.run(graph(lora(strength_high=0.5, strength_low=0.5))))
    none = facts_of(comfy.run(graph(lora(strength_high=0.0, strength_low=0.0))))
    assert plain["modules"] == full["modules"] == half["modules"] == none["modules"]
    assert full["merged"] == [len(LINEARS), len(LINEARS)] and plain["merged"] == none["merged"] == [0, 0]
    assert full["attached"] == [0, 0]
    assert len({full["sum"], half["sum"], plain["sum"]}) == 3
    assert none["sum"] == plain["sum"]
    again = facts_of(comfy.run(graph(seed=5)))
    assert again["merged"] == [0, 0]


def test_a_loader_that_attaches(comfy: ComfyUI) -> None:
    attaching = graph(lora())
    merged = facts_of(comfy.run(attaching))
    attaching["model"]["inputs"]["lora_mode"] = "attach"
    run = comfy.run(attaching)
    attached = facts_of(run)
    assert "attached: asked for" in run.outputs["lora0"]["text"][0]
    assert attached["attached"] == [len(LINEARS), len(LINEARS)] and attached["merged"] == [0, 0]
    assert attached["sum"] == pytest.approx(merged["sum"], rel=1e-3)


def test_nodes_are_chained_and_experts_are_told_apart(comfy: ComfyUI) -> None:
    both = facts_of(
        comfy.run(graph(lora(), lora(high="other_4steps.safetensors", strength_high=0.5, strength_low=0.5)))
    )
    first = facts_of(comfy.run(graph(lora())))
    high = facts_of(comfy.run(graph(lora(low="none"))))
    assert len({both["sum"], first["sum"], high["sum"]}) == 3
    assert both["merged"] == [len(LINEARS), len(LINEARS)] and high["merged"] == [len(LINEARS), 0]


def test_a_distilled_lora_brings_its_settings(comfy: ComfyUI) -> None:
    distilled = graph(
        lora(high="other_4steps.safetensors"), steps=0, guidance_high=0.0, guidance_low=0.0, preset="auto"
    )
    distilled["plan"] = node("WanCorePlanPreview", model=["lora0", 0])
    distilled["table"] = node("PreviewAny", source=["plan", 1])
    run = comfy.run(distilled)
    assert run.ok, run.status
    table = run.outputs["table"]["text"][0]
    assert "4 steps, euler, shift 5" in table and "4 forwards" in table and "preset 4-step" in table
    assert "4 steps, euler" in run.outputs["sampler"]["text"][0]


def test_what_is_no_lora_is_refused_by_name(comfy: ComfyUI) -> None:
    for changed, message in (
        ({"high": "no_lora.safetensors"}, "not a LoRA"),
        ({"low": "no_lora.safetensors"}, "not a LoRA"),
        ({"high": "absent.safetensors"}, "is not a model in"),
    ):
        with pytest.raises(Refused, match=message) as refused:
            comfy.run(graph(lora(**changed)))
        assert set(refused.value.errors) == {"lora0"} and len(refused.value.errors["lora0"]["errors"]) == 1


def test_a_file_that_changes_is_checked_again(comfy: ComfyUI, base: Path) -> None:
    """What was found out about files is kept as long as they are what they were."""
    path, kinds = base / "models" / "loras" / "changing.safetensors", []
    for number in range(4):
        if number % 2:
            write_safetensors({"x.weight": torch.zeros(2)}, path, {})
        else:
            write_lora(path, seed=number)
        try:
            kinds.append("made" if comfy.run(graph(lora(high=path.name), seed=number)).ok else "failed")
        except Refused as refused:
            kinds.append(str(refused).partition(": its tensors")[0][-10:])
    assert kinds == ["made", "not a LoRA"] * 2
