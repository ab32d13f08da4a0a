"""Run by ComfyUI's Python: two clips of a tiny S2V model, made by ComfyUI's own nodes and sampling.

    python tests/comfy_sound_clip.py FOLDER_OF_COMFYUI OUT.pt

It writes what WanSoundImageToVideo and WanSoundImageToVideoExtend give (CONDITIONING, LATENT) and the latents that its
sampler makes of each. The sound is the same all the time: ComfyUI has no copies of its first frame in front.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parents[1])]
# ruff: noqa: E402
from tests.animate_references import draw_weights
from tests.comfy_animate_clip import EmbeddedVAE, drawn
from wan_core.models.wan.families.s2v import S2VConfig
from wan_core.sampling.plan import Plan, make_plan

WIDTH, HEIGHT, LENGTH, SEED = 80, 64, 9, 5
CONFIG = S2VConfig(
    in_channels=16, out_channels=16, dim=256, ffn_dim=96, num_heads=2, num_layers=5, injectors=2,
)  # fmt: skip


def plan_of() -> Plan:
    return make_plan(task="s2v-14B", steps=2, solver="euler", guidance_high=2.0, guidance_low=2.0)


def conditioned(nodes: Any, vae: Any, before: Any) -> tuple[Any, ...]:
    """positive, negative and latent of the first clip, or of the one after the latents `before`."""
    positive, negative = ([[torch.randn(1, 512, 4096, generator=torch.Generator().manual_seed(n)), {}]] for n in (1, 2))
    states = [drawn(1, 1, 1024, seed=100 + n).expand(1, 200, 1024) - 0.5 for n in range(25)]
    shared = {
        "positive": positive, "negative": negative, "vae": vae, "length": LENGTH,
        "audio_encoder_output": {"encoded_audio_all_layers": states},
        "ref_image": drawn(1, HEIGHT, WIDTH, 3, seed=6), "control_video": drawn(LENGTH, HEIGHT, WIDTH, 3, seed=7),
    }  # fmt: skip
    if before is None:
        own = {"width": WIDTH, "height": HEIGHT, "batch_size": 1, "ref_motion": drawn(73, HEIGHT, WIDTH, 3, seed=8)}
        return nodes.WanSoundImageToVideo.execute(**shared, **own).result[:3]
    return nodes.WanSoundImageToVideoExtend.execute(**shared, video_latent={"samples": before}).result[:3]


@torch.inference_mode()
def main(folder: str, out: str) -> None:
    sys.path[:0] = [folder]
    import comfy.options
    from comfy.cli_args import args

    args.cpu = True
    import comfy.sample
    import comfy.samplers
    import comfy.sd
    import comfy_extras.nodes_model_advanced as advanced
    import comfy_extras.nodes_wan as nodes

    plan, before, clips = plan_of(), None, []
    model = comfy.sd.load_diffusion_model_state_dict(draw_weights(CONFIG))
    model = advanced.ModelSamplingSD3().patch(model, plan.shift)[0]
    for _ in range(2):
        positive, negative, latent = conditioned(nodes, EmbeddedVAE(), before)
        noise = comfy.sample.prepare_noise(latent["samples"], SEED)
        before = comfy.sample.sample_custom(
            model, noise, plan.steps[0].guidance, comfy.samplers.sampler_object("euler"), torch.tensor(plan.sigmas),
            positive, negative, latent["samples"], seed=SEED,
        )  # fmt: skip
        clips.append({"positive": positive, "negative": negative, "latent": latent, "made": before})
    torch.save(clips, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
