"""Words that people type into the search of ComfyUI's page, and the node of this pack that they meet first there. The
page looks into a node's id, its display name and its aliases (fuse.js), and sorts by the names alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.browser import find_browser, front_end, page_of
from tests.comfyui import find_comfyui, make_base, serving

FIRST_OF_ALL = {  # also before ComfyUI's own nodes
    "speed": "Accelerate",
    "faster": "Accelerate",
    "speed up wan": "Accelerate",
    "sage attention": "Accelerate",
    "flash attention": "Accelerate",
    "teacache": "Skipping",
    "sparse attention": "Skipping",
    "fp8": "ModelLoader",
    "block swap": "ModelLoader",
    "low vram": "ModelLoader",
    "out of memory": "ModelLoader",
    "lightx2v": "LoRA",
    "svi": "ImageToVideo",
    "long video": "ImageToVideo",
    "prompt travel": "PromptsOverTime",
    "lip sync": "SoundToVideo",
    "umt5": "TextEncoderLoader",
    "wan sampler": "Sampler",
    "benchmark": "ReportCard",
    "how long": "PlanPreview",
}
FIRST_OF_OURS = {
    "multi gpu": "Launcher",
    "gguf": "ModelLoader",
    "quantize": "ModelLoader",
    "slow motion": "Sampler",
    "first last frame": "ImageToVideo",
    "keyframes": "ImageToVideo",
    "negative prompt": "TextEncode",
    "nag": "NAG",
    "animate": "Animate",
    "inpainting": "VACE",
    "camera": "Camera",
    "clip vision": "VisionLoader",
    "save video": "DecodeToVideo",
}
SEARCH = """const app = document.querySelector("#vue-app").__vue_app__;
const nodes = app.config.globalProperties.$pinia._s.get("nodeDef");
return arguments[0].map((word) =>
  nodes.nodeSearchService.searchNode(word, [], { limit: 64 }, { matchWildcards: false })
    .map((one) => one.name).filter((name) => !name.startsWith("SubgraphBlueprint")))"""


@pytest.mark.comfy
@pytest.mark.slow
def test_the_page_finds_the_node_first(tmp_path: Path) -> None:
    find_comfyui(), find_browser()
    words = {**FIRST_OF_ALL, **FIRST_OF_OURS}
    for comfy in serving(make_base(tmp_path), arguments=front_end()):
        with page_of(comfy) as page:
            hits = dict(zip(words, page.script(SEARCH, list(words)), strict=True))
    ours = {word: next((one for one in names if one.startswith("WanCore")), "") for word, names in hits.items()}
    assert ours == {word: f"WanCore{name}" for word, name in words.items()}
    assert {word: hits[word][0] for word in FIRST_OF_ALL} == {word: ours[word] for word in FIRST_OF_ALL}
