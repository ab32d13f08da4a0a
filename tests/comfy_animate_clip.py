"""Run by ComfyUI's Python: a clip of a tiny Animate model, made by ComfyUI's own nodes and sampling.

    python tests/comfy_animate_clip.py FOLDER_OF_COMFYUI FAMILY OUT.pt [START END]

`clip` writes what its node gives (CONDITIONING, LATENT) and the latents that its sampling makes of it. START, END: the
part of the run that the driving video of Animate-2 is for.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parents[1])]
# ruff: noqa: E402
from tests.animate_references import draw_weights
from wan_core.checkpoint import load_vae
from wan_core.models.wan.families.animate import AnimateConfig
from wan_core.models.wan.families.animate2 import Animate2Config
from wan_core.pipeline.encode import encode_images
from wan_core.sampling.plan import Plan, make_plan

WIDTH, HEIGHT, LENGTH, SEED = 48, 32, 9, 5
WINDOWED = 6  # steps of a run that reads the driving video in a part of them
SHAPE: dict[str, Any] = {
    "in_channels": 36, "out_channels": 16, "dim": 256, "ffn_dim": 96, "num_heads": 2, "num_layers": 5,
    "image_dim": 1280,
}  # fmt: skip
CONFIGS = {"animate": AnimateConfig(**SHAPE), "animate2": Animate2Config(**SHAPE)}
TINY_VAE = Path(__file__).parents[1] / "wan_core" / "assets" / "tiny" / "vae.safetensors"
METADATA = {"config": '{"transformer": {"model_type": "animate2"}}'}


class EmbeddedVAE:
    """The embedded model's, which ComfyUI's class does not load: it has fewer layers."""

    def __init__(self) -> None:
        self.vae = load_vae(TINY_VAE, dtype=torch.float32)

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        return encode_images(self.vae, pixels)


def plan_of(steps: int = 2) -> Plan:
    return make_plan(task="animate-14B", steps=steps, solver="euler", guidance_high=2.0, guidance_low=2.0)


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def conditioned(nodes: Any, family: str, vae: Any, part: tuple[float, ...]) -> tuple[Any, ...]:
    """positive, negative and latent of ComfyUI's node for the family."""
    rows = [[[torch.randn(1, 512, 4096, generator=torch.Generator().manual_seed(n)), {}]] for n in (1, 2, 3)]
    seen = [SimpleNamespace(penultimate_hidden_states=drawn(1, 257, 1280, seed=n) - 0.5) for n in (4, 5)]
    shared = {
        "positive": rows[0], "negative": rows[1], "vae": vae, "width": WIDTH, "height": HEIGHT, "length": LENGTH,
        "batch_size": 1, "video_frame_offset": 0, "clip_vision_output": seen[0],
        "reference_image": drawn(1, HEIGHT, WIDTH, 3, seed=6), "pose_video": drawn(LENGTH, HEIGHT, WIDTH, 3, seed=7),
    }  # fmt: skip
    if family == "animate2":
        own = {"positive_pose": rows[2], "clip_vision_output_pose": seen[1], "pose_strength": 0.8}
        own |= dict(zip(("pose_start_percent", "pose_end_percent"), part, strict=False))
        own |= {"reference_image_strength": 0.7} if part else {}
        return nodes.WanAnimate2ToVideo.execute(**shared, **own).result[:3]
    own = {
        "continue_motion_max_frames": 5, "face_video": drawn(5, 64, 64, 3, seed=8),
        "continue_motion": drawn(5, HEIGHT, WIDTH, 3, seed=9),
        "character_mask": drawn(LENGTH, HEIGHT, WIDTH, seed=10).round(),
        "background_video": drawn(LENGTH, HEIGHT, WIDTH, 3, seed=11),
    }  # fmt: skip
    return nodes.WanAnimateToVideo.execute(**shared, **own).result[:3]


@torch.inference_mode()
def main(folder: str, family: str, out: str, *part: str) -> None:
    sys.path[:0] = [folder]
    import comfy.options
    from comfy.cli_args import args

    args.cpu = True
    import comfy.sample
    import comfy.samplers
    import comfy.sd
    import comfy_extras.nodes_model_advanced as advanced
    import comfy_extras.nodes_wan as nodes

    metadata = METADATA if family == "animate2" else None
    model = comfy.sd.load_diffusion_model_state_dict(draw_weights(CONFIGS[family]), metadata=metadata)
    plan = plan_of(WINDOWED if part else 2)
    model = advanced.ModelSamplingSD3().patch(model, plan.shift)[0]
    positive, negative, latent = conditioned(nodes, family, EmbeddedVAE(), tuple(map(float, part)))
    noise = comfy.sample.prepare_noise(latent["samples"], SEED)
    samples = comfy.sample.sample_custom(
        model, noise, plan.steps[0].guidance, comfy.samplers.sampler_object("euler"), torch.tensor(plan.sigmas),
        positive, negative, latent["samples"], seed=SEED,
    )  # fmt: skip
    torch.save({"positive": plain(positive), "negative": plain(negative), "latent": latent, "made": samples}, out)


def plain(conditioning: Any) -> Any:
    """With tensors in the place of ComfyUI's objects."""
    return [
        [rows, {key: getattr(value, "penultimate_hidden_states", value) for key, value in extras.items()}]
        for rows, extras in conditioning
    ]


if __name__ == "__main__":
    main(*sys.argv[1:])
