"""Run by ComfyUI's Python: a clip of a tiny model of VACE or Fun, made by ComfyUI's own nodes and sampling.

    python tests/comfy_control_clip.py FOLDER_OF_COMFYUI OUT.pt

By the name of each case: what its nodes give (CONDITIONING, LATENT) and the latents that its sampling makes of it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

sys.path[:0] = [str(Path(__file__).parents[1])]
# ruff: noqa: E402
from tests.animate_references import draw_weights
from tests.comfy_animate_clip import EmbeddedVAE, drawn, plain
from wan_core.models.wan.config import DiTConfig
from wan_core.models.wan.families.fun import FunCameraConfig, FunControlConfig
from wan_core.models.wan.families.vace import VaceConfig
from wan_core.sampling.plan import Plan, make_plan

WIDTH, HEIGHT, LENGTH, SEED = 48, 32, 9, 5
SHAPE: dict[str, Any] = {"out_channels": 16, "dim": 256, "ffn_dim": 96, "num_heads": 2, "num_layers": 2}
VACE = VaceConfig(**{**SHAPE, "num_layers": 4}, in_channels=16, vace_every=2)


class Case(NamedTuple):
    """task: whose plan runs it. config: of its tiny model, or of both experts."""

    task: str
    config: DiTConfig


CASES = {
    "vace": Case("vace-14B", VACE),
    "vace chained": Case("vace-A14B", VACE),
    "vace without": Case("vace-14B", VACE),
    "vace positive": Case("vace-14B", VACE),
    "vace ranges": Case("vace-14B", VACE),
    "control": Case("fun-control-A14B", FunControlConfig(**SHAPE, in_channels=52)),
    "control without": Case("fun-control-A14B", FunControlConfig(**SHAPE, in_channels=52)),
    "control 2.1": Case("fun-control-14B", FunControlConfig(**SHAPE, in_channels=48, image_dim=1280)),
    "camera": Case("camera-A14B", FunCameraConfig(**SHAPE, in_channels=36)),
    "camera without": Case("camera-A14B", FunCameraConfig(**SHAPE, in_channels=36)),
    "camera 2.1": Case("camera-14B", FunCameraConfig(**SHAPE, in_channels=32, image_dim=1280)),
    "inpaint": Case("i2v-A14B", DiTConfig(**SHAPE, in_channels=36)),
}


MOTIONS = {  # of WanCameraEmbedding -> ours
    "Static": "static", "Pan Up": "pan-up", "Pan Down": "pan-down", "Pan Left": "pan-left", "Pan Right": "pan-right",
    "Zoom In": "zoom-in", "Zoom Out": "zoom-out", "Anti Clockwise (ACW)": "roll-left", "ClockWise (CW)": "roll-right",
}  # fmt: skip


class VAE(EmbeddedVAE):
    latent_channels = 16

    def spacial_compression_encode(self) -> int:
        return 8


def plan_of(case: Case) -> Plan:
    return make_plan(task=case.task, steps=3, shift=3.0, solver="euler", guidance_high=2.0, guidance_low=2.0)


def weights_of(case: Case) -> dict[str, dict[str, torch.Tensor]]:
    """By expert."""
    return {expert: draw_weights(case.config, 7 * n) for n, expert in enumerate(plan_of(case).experts)}


def joined(first: Any, second: Any) -> Any:
    """One conditioning for each half of the run, by ConditioningSetTimestepRange and ConditioningCombine."""
    halves = (first, 0.0, 0.5), (second, 0.5, 1.0)
    return [[r, {**e, "start_percent": a, "end_percent": b}] for one, a, b in halves for r, e in one]


def conditioned(name: str, nodes: Any, embedding: Any, vae: Any) -> tuple[Any, ...]:
    """positive, negative and latent of ComfyUI's nodes for a case."""
    rows = [[[torch.randn(1, 512, 4096, generator=torch.Generator().manual_seed(n)), {}]] for n in (1, 2)]
    size = {"width": WIDTH, "height": HEIGHT, "length": LENGTH}
    shared = {"positive": rows[0], "negative": rows[1], "vae": vae, **size, "batch_size": 1}
    seen = SimpleNamespace(penultimate_hidden_states=drawn(1, 257, 1280, seed=4) - 0.5)
    picture, video = drawn(1, HEIGHT, WIDTH, 3, seed=6), drawn(LENGTH, HEIGHT, WIDTH, 3, seed=7)
    kind, _, how = name.partition(" ")
    if how == "without":
        node_of_kind = {"vace": nodes.WanVaceToVideo, "control": nodes.Wan22FunControlToVideo}
        more = {"vace": {"strength": 1.0}, "control": {}, "camera": {}}[kind]
        return node_of_kind.get(kind, nodes.WanCameraImageToVideo).execute(**shared, **more).result[:3]
    if kind == "vace":
        masks = drawn(LENGTH, HEIGHT, WIDTH, seed=8).round()
        own = {"strength": 0.7, "control_video": video, "control_masks": masks, "reference_image": picture}
        outputs = nodes.WanVaceToVideo.execute(**shared, **own).result
        if how == "chained":
            again = {**shared, "positive": outputs[0], "negative": outputs[1], "strength": 1.4}
            outputs = nodes.WanVaceToVideo.execute(**again, control_video=video[:5], reference_image=video[:1]).result
        if how == "ranges":  # half of the run with it, half without
            other = nodes.WanVaceToVideo.execute(**shared, **{**own, "strength": 0.0}).result
            outputs = (*(joined(*pair) for pair in zip(outputs[:2], other[:2], strict=True)), *outputs[2:])
        assert outputs[3] == 1  # frames to trim
        return outputs[0], rows[1] if how == "positive" else outputs[1], outputs[2]
    if kind == "inpaint":
        return nodes.WanFunInpaintToVideo.execute(**shared, start_image=picture, end_image=video[-1:]).result
    if kind == "camera":
        rays = embedding.execute("Pan Left", **size).result[0]
        own = {"start_image": picture, "camera_conditions": rays}
        return nodes.WanCameraImageToVideo.execute(**shared, **own, clip_vision_output=seen if how else None).result
    if how:
        own = {"start_image": picture, "control_video": video[:5], "clip_vision_output": seen}
        return nodes.WanFunControlToVideo.execute(**shared, **own).result
    return nodes.Wan22FunControlToVideo.execute(**shared, ref_image=picture, control_video=video).result


@torch.inference_mode()
def main(folder: str, out: str) -> None:
    sys.path[:0] = [folder]
    import comfy.options
    from comfy.cli_args import args

    args.cpu = True
    import comfy.sample
    import comfy.samplers
    import comfy.sd
    import comfy_extras.nodes_camera_trajectory as trajectory
    import comfy_extras.nodes_model_advanced as advanced
    import comfy_extras.nodes_wan as nodes

    results, vae = {}, VAE()
    for name, case in CASES.items():
        plan = plan_of(case)
        positive, negative, latent = conditioned(name, nodes, trajectory.WanCameraEmbedding, vae)
        samples = latent["samples"]
        noise = comfy.sample.prepare_noise(samples, SEED)
        for phase in plan.phases:
            model = comfy.sd.load_diffusion_model_state_dict(weights_of(case)[phase[0].expert])
            model = advanced.ModelSamplingSD3().patch(model, plan.shift)[0]
            sigmas = torch.tensor([*(step.sigma for step in phase), phase[-1].sigma_next])
            samples = comfy.sample.sample_custom(
                model, noise, phase[0].guidance, comfy.samplers.sampler_object("euler"), sigmas, positive, negative,
                samples, seed=SEED,
            )  # fmt: skip
            noise = torch.zeros_like(noise)
        results[name] = {"positive": plain(positive), "negative": plain(negative), "latent": latent, "made": samples}
    results["rays"] = {
        (theirs, size): trajectory.WanCameraEmbedding.execute(theirs, *size, LENGTH, 1.3).result[0]
        for theirs in MOTIONS
        for size in ((WIDTH, HEIGHT), (HEIGHT, WIDTH))
    }
    torch.save(results, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
