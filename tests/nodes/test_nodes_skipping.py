"""Leaving forwards out, in a running ComfyUI: settings into sampler and preview, curves, comparison."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.comfyui import ComfyUI, Graph
from tests.nodes.comfy_files import MAGCACHE
from tools.embedded_graphs import SMALL, TINY, loaders, node, sampler
from wan_core.pipeline.sources import TINY as FILES
from wan_core.sampling.cache.curves import find_curve, write_curve

pytestmark = pytest.mark.comfy


@pytest.fixture(scope="module")
def files(base: Path) -> None:
    """A copy of the embedded experts."""
    folder = base / "models" / "diffusion_models"
    for expert in ("high", "low"):
        shutil.copy(FILES / f"t2v_{expert}.safetensors", folder / f"mine_{expert}.safetensors")


def small(**sampling: Any) -> Graph:
    return {
        **loaders(),
        "size": node("WanCoreEmptyLatent", **SMALL, latent_type="Wan 2.1 VAE (A14B, tiny)"),
        "sampler": sampler(**{"steps": 12, **sampling}),
        "decode": node("WanCoreVAEDecode", vae=["vae", 0], latent=["sampler", 0], tiling="auto", report=["sampler", 1]),
    }


def test_settings_reach_sampler_preview_and_report(comfy: ComfyUI) -> None:
    graph = small(skipping=["skip", 0])
    graph["skip"] = node("WanCoreSkipping", **{**MAGCACHE, "sparsity": 0.5})
    graph["plan"] = node("WanCorePlanPreview", model=["model", 0], skipping=["skip", 0])
    graph["table"] = node("PreviewAny", source=["plan", 1])
    graph["report"] = node("WanCoreReport", report=["decode", 1])
    graph["words"] = node("PreviewAny", source=["report", 1])
    graph |= {"full": sampler(steps=12), "again": {**graph["decode"], "inputs": {**graph["decode"]["inputs"]}}}
    graph["again"]["inputs"] |= {"latent": ["full", 0], "report": ["full", 1]}
    graph["compare"] = node("WanCoreCompare", full=["again", 0], other=["decode", 0])
    graph["pair"] = node("PreviewImage", images=["compare", 0])
    run = comfy.run(graph)
    assert run.ok, run.status
    table, report = (run.outputs[key]["text"][0] for key in ("table", "words"))
    assert "reuse" in table and "% of keys" in table and "% saved" in table
    assert "of 24 (" in report and "magcache 10/2/0.2, sparse 0.5" in report
    assert "% saved" in run.outputs["sampler"]["text"][0] and "saved" not in run.outputs["full"]["text"][0]
    text = run.outputs["compare"]["text"][0]
    assert "PSNR" in text and "equal" not in text and "caption" not in text
    assert len(run.outputs["pair"]["images"]) == 5


@pytest.mark.parametrize(
    ("steps", "says"), [(4, "speed balanced: sparse 0.5"), (20, "speed balanced: taylorseer 2/0.7")]
)
def test_a_word_of_the_sampler_reaches_the_plan_and_the_report(comfy: ComfyUI, steps: int, says: str) -> None:
    graph = small(steps=steps, speed="balanced")
    graph["plan"] = node("WanCorePlanPreview", model=["model", 0], latent=["size", 0])
    graph["show"] = node("WanCoreReport", report=["decode", 1])
    graph |= {"words": node("PreviewAny", source=["show", 1]), "table": node("PreviewAny", source=["plan", 1])}
    run = comfy.run(graph)
    assert run.ok, run.status
    report, table = (run.outputs[key]["text"][0] for key in ("words", "table"))
    assert says in table and "speed: balanced" in report
    assert (f"forwards: {2 * steps} of {2 * steps}" in report) == (steps == 4)


def test_taylorseer_runs_and_a_word_beside_numbers_is_refused(comfy: ComfyUI) -> None:
    graph = small(skipping=["skip", 0]) | {"skip": node("WanCoreSkipping", **{**MAGCACHE, "cache": "taylorseer"})}
    graph["show"] = node("WanCoreReport", report=["decode", 1])
    graph["words"] = node("PreviewAny", source=["show", 1])
    run = comfy.run(graph)
    assert run.ok, run.status
    assert "forwards: 24 of 24" not in run.outputs["words"]["text"][0]
    graph["sampler"]["inputs"]["speed"] = "fast"
    run = comfy.run(graph)
    assert not run.ok and "speed fast and taylorseer given" in run.message("execution_error")["exception_message"]


def test_a_sparse_kernel_that_cannot_run_is_refused_before_any_step(comfy: ComfyUI) -> None:
    sparse = {**MAGCACHE, "cache": "none", "sparsity": 0.5, "kernel": "cudnn"}
    graph = small(skipping=["skip", 0]) | {"skip": node("WanCoreSkipping", **sparse)}
    graph["show"] = node("WanCoreReport", report=["decode", 1])
    run = comfy.run(graph)
    assert not run.ok and "sparse kernel 'cudnn' cannot run" in run.message("execution_error")["exception_message"]


def test_a_curve_beside_the_model_is_used_and_read_again_when_it_changes(comfy: ComfyUI) -> None:
    path = comfy.base / "models" / "diffusion_models" / "mine_high.magcache.json"
    curve = find_curve(None, "t2v-A14B")
    assert curve is not None
    write_curve(curve, path)
    graph = loaders("mine_high.safetensors", "mine_low.safetensors") | {"c": node("WanCoreSkipping", **MAGCACHE)}
    graph["plan"] = node("WanCorePlanPreview", model=["model", 0], skipping=["c", 0])
    try:
        run = comfy.run(graph)
        assert run.ok and "% saved" in run.outputs["plan"]["text"][0], run.status
        path.write_text(json.dumps({"format": "nonsense"}))
        run = comfy.run(graph)
        assert not run.ok and "calibrate it again" in run.message("execution_error")["exception_message"]
    finally:
        path.unlink()


def test_the_embedded_model_s_own_curve_is_found(comfy: ComfyUI) -> None:
    graph = {"model": loaders()["model"], "c": node("WanCoreSkipping", **MAGCACHE)}
    graph["plan"] = node("WanCorePlanPreview", model=["model", 0], skipping=["c", 0])
    run = comfy.run(graph)
    assert run.ok, run.status
    assert TINY in graph["model"]["inputs"].values() and "% saved" in run.outputs["plan"]["text"][0]
