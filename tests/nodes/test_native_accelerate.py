"""WanCore Accelerate on every Wan model that ComfyUI has, tiny and random, through ComfyUI's own sampler on the CPU.

`native_accelerate.py` runs in ComfyUI's Python, once for all of these tests.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.comfyui import find_newer_comfyui, printed_by

pytestmark = pytest.mark.comfy
CHECKS = "variants,sparse,order,parts,faults,context,devices,refusals"
VARIANTS = ("t2v", "i2v", "i2v 2.2", "5B", "fun", "context", "odd", "vace", "camera", "animate", "animate2", "s2v",
            "humo", "scail", "wandancer")  # fmt: skip
CROSS = "cross-attention calls"
STEPS, LAYERS, SAME = 3, 3, 1e-5
# Calls of self-attention in a forward, where there is more than one in a block: VACE has two hints, Animate-2 a pose
# branch and a call for each of five frames.
CALLS = {"vace": 3 * LAYERS, "animate": 5, "animate2": 6 * LAYERS}
# Tokens before the video's, its grid, all tokens: a 5 x 8 x 12 latent has 5 x 4 x 6 tokens.
PLACES = {
    "fun": [[24, 5, 4, 6, 144]],
    "context": [[0, 5, 4, 6, 192]],
    "odd": [[0, 3, 4, 5, 60]],
    "animate2": [[0, 4, 4, 6, 96]],
    "s2v": [[0, 5, 4, 6, 178]],
    "humo": [[0, 5, 4, 6, 144]],
    "scail": [[48, 5, 4, 6, 288]],
}


@pytest.fixture(scope="module")
def checked() -> dict[str, Any]:
    return printed_by("native_accelerate.py", find_newer_comfyui(), CHECKS)


def said(taken: str, others: int) -> str:
    return f"WanCore Accelerate: self-attention calls: {taken}; left to ComfyUI: {others} {CROSS}"


@pytest.mark.parametrize("name", VARIANTS)
def test_a_model_gives_what_it_gives_without_the_node(checked: dict[str, Any], name: str) -> None:
    run = checked["variants"][name]
    assert run["finite"] and run["restored"] and run["error"] <= SAME
    [line] = run["words"]
    assert line.startswith(f"WanCore Accelerate: self-attention calls: {STEPS * CALLS.get(name, LAYERS)} by sdpa; ")
    assert line.endswith(CROSS)


@pytest.mark.parametrize("name", VARIANTS)
def test_sparse_attention_keeps_every_token_in_its_place(checked: dict[str, Any], name: str) -> None:
    run = checked["sparse"][name]
    nearly_all, quarter = run["errors"]
    assert nearly_all <= SAME < quarter < 0.1
    assert run["places"] == PLACES.get(name, [[0, 5, 4, 6, 120]])
    taken = f"{STEPS * CALLS.get(name, LAYERS)} by sparse attention (math)"
    assert all(f"self-attention calls: {taken}" in line for line in run["words"])


@pytest.mark.parametrize("name", ["lora", "shift", "compile"])
def test_the_order_of_nodes_does_not_matter(checked: dict[str, Any], name: str) -> None:
    run = checked["order"][name]
    assert run["before"] <= SAME and run["after"] <= SAME
    assert (run["changes"] > 1e-3) is (name != "compile")
    assert run["words"] == [said("9 by sdpa", 9)] * 2


def test_an_override_before_gets_what_is_left_and_one_after_is_reported(checked: dict[str, Any]) -> None:
    run = checked["order"]["backend"]
    assert run["before"] <= SAME and run["after"] <= SAME
    before, after = run["words"]
    assert before == said("9 by sdpa", 9)
    warning, counts = after.splitlines()
    assert warning.startswith("warning: an attention override (comfy.model_patcher")
    assert warning.endswith("was set later and computes attention: put WanCore Accelerate after that node")
    assert counts.startswith("WanCore Accelerate: self-attention calls: none")


def test_the_second_of_two_nodes_replaces_the_first(checked: dict[str, Any]) -> None:
    run = checked["order"]["twice"]
    assert run["error"] <= SAME and run["words"] == [said("9 by sdpa", 9)]


def test_steps_of_two_samplers_are_those_of_one_schedule(checked: dict[str, Any]) -> None:
    """The budgets of 10 steps of `balanced`: 0.625 in the first 30 %, then 0.8125."""
    first, second, image, heun, unipc = checked["parts"]["seen"]
    whole = [0.625] * 3 + [0.8125] * 7
    assert first + second == whole == unipc and image == [0.8125] * 10
    assert heun == [0.625] * 5 + [0.8125] * 14  # two forwards in a step but the last
    assert checked["parts"]["parts"] == [[0, 5, 10], [5, 5, 10], [10, 10, 20], [0, 10, 10], [0, 10, 10]]


@pytest.mark.parametrize("name", ["interruption", "memory"])
def test_a_run_that_ends_early_leaves_nothing(checked: dict[str, Any], name: str) -> None:
    run = checked["faults"][name]
    assert run["raised"] in ("InterruptProcessingException", "OutOfMemoryError")
    assert run["said"] == 0 and run["same"] and not run["left"]


def test_context_windows(checked: dict[str, Any]) -> None:
    run = checked["context"]
    assert run["changes"] > 1e-3 and run["dense"] <= SAME and run["sparse"] <= SAME
    dense, sparse = run["words"]
    assert dense == said("18 by sdpa", 18)
    assert sparse.startswith(said("18 by sparse attention (math)", 18)) and "sparse attention: " in sparse


def test_conditions_on_two_devices(checked: dict[str, Any]) -> None:
    for name, by in (("dense", "sdpa"), ("sparse", "sparse attention (math)")):
        run = checked["devices"][name]
        assert run["error"] <= SAME and len(run["words"]) == 2
        for line, calls in zip(run["words"], (9, 18), strict=True):
            assert line.startswith(said(f"{calls} by {by}", calls))


def test_refusals(checked: dict[str, Any]) -> None:
    messages = checked["refusals"]
    assert messages["other"] == "WanCore Accelerate takes Wan models, this is Linear: connect a Wan model"
    assert "'flash4' cannot run on cpu" in messages["backend"]
    assert "speed balanced and sparse given" in messages["twice"]
