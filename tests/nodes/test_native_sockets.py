"""WanCore's text encoder and VAE on the CLIP and VAE sockets of ComfyUI's own nodes, all of them: a node works, with
ComfyUI's own results, or says in a sentence what to use. `native_sockets.py` runs in ComfyUI's Python."""

from __future__ import annotations

import pytest

from tests.comfyui import find_newer_comfyui, printed_by

pytestmark = pytest.mark.comfy
SENTENCE = "wan_core OptionError: ", "wan_core MissingPart: "
# Nodes that look into ComfyUI's own VAE, and say what to use.
INSTEAD = {"CheckpointSave", "ImageOnlyCheckpointSave", "SelectVAEDevice", "VAESave"}
WITH_CLIP = {"CLIPTextEncode", "CLIPTextEncodeControlnet", "CLIPTextEncodeLumina2", "CLIPTextEncodePixArtAlpha",
             "CLIPTextEncodeSDXLRefiner", "LoraLoader", "LoraLoaderBypass", "SelectCLIPDevice"}  # fmt: skip


def test_every_node_works_with_wancore_on_its_sockets_or_says_what_to_use() -> None:
    nodes = printed_by("native_sockets.py", find_newer_comfyui())
    faults = []
    for name, came in nodes.items():
        sentence, node = came["ours"].startswith(SENTENCE), name.partition(",")[0]
        if came.get("theirs") == "" and node not in INSTEAD:
            right = came["ours"] == "" and came["difference"] <= 1e-4
        else:
            right = came["ours"] == "" or sentence or came["ours"] == came.get("theirs")
        if not right or (node in WITH_CLIP and came["ours"]) or (node in INSTEAD and not sentence):
            faults.append(f"{name}: {came}")
    assert not faults, "\n".join(faults)
    works = {name.partition(",")[0] for name, came in nodes.items() if came["ours"] == ""}
    others = {"Wan22ImageToVideoLatent", "WanDancerVideo"}  # a VAE of 48 channels; a mask for each frame
    wan = {name.partition(",")[0] for name in nodes if name.startswith("Wan")} - others
    assert len(wan) >= 16 and wan <= works, wan - works
    assert len(nodes) >= 100
