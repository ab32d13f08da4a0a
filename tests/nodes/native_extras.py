"""Run by ComfyUI's Python: what other nodes put on a MODEL or into its conditions, with WanCore Accelerate on tiny Wan
models of ComfyUI's own classes. `native_checks` runs its checks.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import native_models as world
from native_cache_runs import EULER, SIZE, World, policies, sample
from native_resolutions import HALF, staged


@contextmanager
def counted(model: Any) -> Iterator[list[int]]:
    """How many rows each forward has whose blocks run."""
    ran: list[int] = []
    handle = model.model.diffusion_model.blocks[0].register_forward_pre_hook(lambda _, args: ran.append(len(args[0])))
    try:
        yield ran
    finally:
        handle.remove()


def refused(run: Callable[[], Any]) -> str:
    from wan_core.config import OptionError

    try:
        run()
    except OptionError as fault:
        return str(fault)
    return ""


# --------------------------------------------------------------------------------------------- rotary positions


def check_positions(it: World) -> None:
    """With ScaleROPE before the node: a token of a smaller step is in the middle of those it stands for; and with
    positions of its own, where it is in a video of that size."""
    from comfy_extras.nodes_rope import ScaleROPE

    def positions(model: Any, sigmas: list[float], size: tuple[int, ...] = SIZE) -> list[Any]:
        """[T, Y, X, 3] of each forward."""
        seen: list[Any] = []
        grids: list[Any] = []
        dit = model.model.diffusion_model
        handles = [
            dit.rope_embedder.register_forward_pre_hook(lambda _, args: seen.append(args[0].clone())),
            dit.patch_embedding.register_forward_hook(lambda _, args, out: grids.append(out.shape[2:])),
        ]
        sample(model, sigmas, size=size)
        for handle in handles:
            handle.remove()
        return [ids.reshape(*grid, 3) for ids, grid in zip(seen, grids, strict=True)]

    def middle(ids: Any) -> Any:
        return ids.unflatten(2, (-1, 2)).unflatten(1, (-1, 2)).mean((2, 4))

    size, small = (1, 16, 3, 8, 12), (1, 16, 3, 4, 6)
    for numbers in ((0.9, 3.0, 1.25, -2.0, 1.5, 7.0), (1.0, 0.0, 1.0, 0.0, 1.0, 7.0), (1.0, 0.0, 1.0, 0.0, 1.0, 0.0)):
        names = ("scale_x", "shift_x", "scale_y", "shift_y", "scale_t", "shift_t")
        model = ScaleROPE.execute(world.tiny("WAN21_T2V"), **dict(zip(names, numbers, strict=True))).result[0]
        first, *later = positions(staged(it, model), EULER, size)
        halves = [ids for ids in later if ids.shape != first.shape]
        assert len(halves) == 4 and all(world.error(ids, middle(first)) < 1e-6 for ids in halves), numbers
        own = [ids for ids in positions(staged(it, model, f"{HALF}:own"), EULER, size) if ids.shape != first.shape]
        assert len(own) == 4 and all((ids == positions(model, EULER[:2], small)[0]).all() for ids in own), numbers
    plain = sample(staged(it, world.tiny("WAN21_T2V")), EULER)
    assert (sample(staged(it, model), EULER) == plain).all(), "a scale of 1 and no shift change nothing"
    assert world.error(first, positions(model, EULER[:2], size)[0]) == 0, "the options of the model stay as they are"


# ------------------------------------------------------------------------------- what has a size of its own


def infinite_talk(model: Any, masks: bool = False) -> Any:
    """What WanInfiniteTalkToVideo puts on a model."""
    import comfy.model_patcher
    import torch
    from comfy.ldm.wan import model_multitalk as talk
    from comfy.patcher_extension import WrappersMP

    patched, cpu = model.clone(), torch.device("cpu")
    patch = comfy.model_patcher.ModelPatcher(torch.nn.Linear(1, 1), cpu, cpu)
    patched.model_options["transformer_options"]["audio_embeds"] = world.rows(1, 3, 4, 8)
    frames = talk.InfiniteTalkOuterSampleWrapper(world.rows(1, 16, 1, *SIZE[3:]), patch)
    patched.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, "infinite_talk_outer_sample", frames)
    patched.set_model_patch(talk.MultiTalkCrossAttnPatch(patch), "attn2_patch")
    if masks:
        patched.set_model_patch(talk.MultiTalkGetAttnMapPatch(torch.ones(2, 6) > 0), "attn1_patch")
    return patched


def unknown(model: Any) -> Any:
    patched = model.clone()
    patched.set_model_patch(lambda args: args, "double_block")
    return patched


def easy_cache(model: Any) -> Any:
    from comfy_extras.nodes_easycache import EasyCacheNode

    return EasyCacheNode.execute(model, 0.2, 0.15, 0.95, False).result[0]


def check_inputs(it: World) -> None:
    """What keeps its size is refused by name before any forward, also where only a later prompt has it; and what others
    put on the model, before the node and after it."""
    from comfy.controlnet import ControlBase

    latent = world.rows(*SIZE, seed=7)
    extras = {
        "time_dim_concat": {"time_dim_concat": latent[:, :, :1]},  # Phantom
        "reference_latent": {"reference_latents": [latent[:, :, :1]]},
        "context_latents": {"context_latents": [latent]},  # Bernini
        "control": {"control": ControlBase()},
    }
    model = world.tiny("WAN21_T2V")
    fast = staged(it, model)
    usual = world.conditions
    with counted(model) as ran:
        for name, extra in extras.items():
            for late in (False, True):
                begins = {"start_percent": 0.9, "end_percent": 1.0} if late else {}

                def prompts(_: Any, extra: Any = {**extra, **begins}, late: bool = late) -> Any:  # noqa: B006
                    positive, negative = usual({})
                    return [*positive[: late or 0], *usual(extra)[0]], negative

                world.conditions = prompts
                said = refused(lambda: sample(fast, EULER))
                assert f"size of {name}" in said and "Resolution Schedule" in said and not ran, (name, late, said, ran)
        world.conditions = usual
        for masks in (False, True):
            for first in (lambda: staged(it, infinite_talk(model, masks)), lambda: infinite_talk(fast, masks)):  # noqa: B023
                said = refused(lambda: sample(first(), EULER))  # noqa: B023
                assert "InfiniteTalk" in said and "Resolution Schedule" in said and not ran, (masks, said)
        for name, add in {"unknown.<locals>.<lambda> of native_extras": unknown, "EasyCache": easy_cache}.items():
            for patched in (staged(it, add(model)), add(fast)):
                said = refused(lambda: sample(patched, EULER))  # noqa: B023
                assert name in said and "Resolution Schedule" in said and not ran, said
    assert sample(fast, EULER).isfinite().all(), "nothing of it stays"


def check_sampling(it: World) -> None:
    """Another sampling than flow is refused, and another noise scale; ModelSamplingSD3 is not."""
    import comfy.model_sampling
    from comfy_extras import nodes_model_advanced as nodes

    model = world.tiny("WAN21_T2V")
    shifted = nodes.ModelSamplingSD3().patch(model, 3.0)[0]
    assert sample(staged(it, shifted), EULER).isfinite().all()

    def with_sampling(*kinds: type) -> Any:
        patched = model.clone()
        patched.add_object_patch("model_sampling", type("Other", kinds, {})(model.model.model_config))
        return patched

    flow = comfy.model_sampling.ModelSamplingDiscreteFlow
    video_to_video = world.tiny("WAN21_FlowRVS")
    read = importlib.import_module("pack.nodes.native_model").read_native
    assert "FlowRVS" in refused(lambda: read(video_to_video, "the MODEL")), "nor does WanCore from MODEL take it"
    others = {"IMG_TO_IMG_FLOW": video_to_video, "EPS": with_sampling(flow, comfy.model_sampling.EPS)}
    others["noise scale 7.5"] = nodes.ModelNoiseScale().patch(model, 7.5)[0]
    with counted(model) as ran:
        for name, other in others.items():
            said = refused(lambda: sample(staged(it, other), EULER))  # noqa: B023
            assert name in said and "flow sampling" in said and not ran, (name, said)


def check_uni3c(it: World) -> None:
    """It follows: its video is encoded at the size of each step, and it changes the smaller steps too."""
    import comfy.model_patcher
    import comfy.ops
    import torch
    from comfy.ldm.wan.uni3c import WanUni3CControlnet
    from comfy_extras.nodes_model_patch import WanUni3CControlnetApply

    class Vae:
        def temporal_compression_decode(self) -> int:
            return 4

        def spacial_compression_encode(self) -> int:
            return 8

        def encode(self, frames: Any) -> Any:
            sizes.append(tuple(frames.shape[1:3]))
            return frames.mean().expand(1, 16, (len(frames) + 3) // 4, frames.shape[1] // 8, frames.shape[2] // 8)

    small = {"conv_out_dim": 24, "dim": 24, "ffn_dim": 32, "num_heads": 2, "num_layers": 2, "time_embed_dim": 48}
    draw = torch.Generator().manual_seed(0)
    with torch.inference_mode(False), torch.no_grad():
        net = WanUni3CControlnet(**small, out_proj_dim=48, mid_channels=16, operations=comfy.ops.manual_cast)
        for tensor in net.parameters():
            torch.nn.init.normal_(tensor, std=0.2, generator=draw)
    cpu = torch.device("cpu")
    patch = comfy.model_patcher.ModelPatcher(net, cpu, cpu)
    video = world.rows(9, SIZE[3] * 8, SIZE[4] * 8, 3)
    model, sizes = world.tiny("WAN21_T2V"), []
    controlled = WanUni3CControlnetApply().apply_patch(model, patch, Vae(), video, 1.0, 0.0, 1.0)[0]
    plain = sample(controlled, EULER)
    assert sizes == [(32, 48)] and world.error(plain, sample(model, EULER)) > 1e-2
    sizes.clear()
    latents = sample(staged(it, controlled), EULER)
    assert sizes == [(16, 32), (32, 48)], sizes
    assert latents.isfinite().all() and world.error(latents, sample(staged(it, model), EULER)) > 1e-2
    assert world.error(latents, plain) > 1e-3, "stages must show"


def check_control_lora(it: World) -> None:
    """A LoRA that widens the patch embedding for a control video: its channels follow."""
    import torch

    model = world.tiny("WAN21_T2V")
    wide = torch.zeros(48, 32, 1, 2, 2)
    wide[:, 16:] = world.rows(48, 16, 1, 2, 2) * 0.1
    patched = model.clone()
    patched.add_patches({"diffusion_model.patch_embedding.weight": ("diff", (wide, {"pad_weight": True}))})
    extra = {"concat_latent_image": world.rows(*SIZE, seed=7)}
    controlled = sample(patched, EULER, extra)
    assert world.error(controlled, sample(model, EULER)) > 1e-2
    latents = sample(staged(it, patched), EULER, extra)
    assert latents.isfinite().all() and 1e-3 < world.error(latents, controlled) < 1


# --------------------------------------------------------------------------------------------------- dtype


def check_dtype(it: World) -> None:
    """ModelComputeDtype before the node: its dtype is that of the blocks, of kernels and of what is kept."""
    import torch
    from comfy_extras.nodes_model_advanced import ModelComputeDtype

    host = importlib.import_module("pack.nodes.host")
    accelerate = importlib.import_module("pack.nodes.accelerate")
    real, asked = accelerate.resolve_attention, []
    accelerate.resolve_attention = lambda name, *place: asked.append(place[1]) or real(name, *place)
    try:
        for name, dtype in {"bf16": torch.bfloat16, "fp32": torch.float32, "default": torch.float32}.items():
            model = ModelComputeDtype().patch(world.tiny("WAN21_T2V"), name)[0]
            seen: set[Any] = set()
            block = model.model.diffusion_model.blocks[1]
            handle = block.register_forward_pre_hook(lambda _, args, seen=seen: seen.add(args[0].dtype))
            accelerate.WanCoreAccelerate.execute(model, "auto", "off")
            with it.runs() as runs:
                sample(it.cached(model, **policies()["taylorseer"]), EULER)
            handle.remove()
            assert seen == {dtype} == {host.compute_dtype(model)} == {asked.pop()}, (name, seen)
            assert runs[0].most == 3 * 2 * 18 * 48 * dtype.itemsize, (name, runs[0].most)
    finally:
        accelerate.resolve_attention = real
