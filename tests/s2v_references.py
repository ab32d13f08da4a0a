"""What other programs compute with tiny S2V models, kept in `tests/models/data` and compared with ours.

    python -m tests.s2v_references official FOLDER COMMIT    # of github.com/Wan-Video/Wan2.2; needs einops
    python -m tests.s2v_references comfyui FOLDER VERSION    # of ComfyUI, in its own environment

Weights and inputs are drawn from seeds, so only outputs are kept, with the version of the program that made them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from tests.animate_references import DATA, Grid, draw_weights, packages, sdpa
from wan_core.models.wan.families.s2v import INJECT_AFTER, S2VConfig

S2V = S2VConfig(
    in_channels=16, out_channels=16, dim=48, ffn_dim=64, num_heads=2, num_layers=5, text_dim=24, freq_dim=32,
    audio_layers=25, audio_dim=1024, injectors=2,
)  # fmt: skip
GRIDS: tuple[Grid, ...] = ((1, 2, 4, 4), (1, 3, 5, 7), (1, 1, 9, 4), (1, 4, 4, 6))
MOTION = {(1, 2, 4, 4): 19, (1, 3, 5, 7): 23, (1, 1, 9, 4): 4, (1, 4, 4, 6): None}  # latent frames of motion


SOUNDS = ((2, 80), (77, 80), (249, 80), (250, 80), (251, 80), (1031, 80), (313, 52))  # encoder frames, of a clip


def draw_inputs(config: S2VConfig, grid: Grid, seed: int = 0, motion: int | None = 19) -> dict[str, Tensor]:
    """x, timestep, context and the inputs of the family by name. context has all of its 512 rows."""
    batch, T, Y, X = grid
    generator = torch.Generator().manual_seed(seed + 1000 * T + 100 * Y + X)

    def draw(*shape: int) -> Tensor:
        return torch.randn(batch, *shape, generator=generator)

    inputs = {
        "x": draw(16, T, 2 * Y, 2 * X),
        "timestep": torch.rand(batch, generator=generator) * 1000,
        "context": draw(512, config.text_dim),
        "audio": draw(config.audio_layers, config.audio_dim, 4 * T),
        "reference": draw(16, 1, 2 * Y, 2 * X),
        "pose": draw(16, T, 2 * Y, 2 * X),
    }
    return inputs if motion is None else inputs | {"motion": draw(16, motion, 2 * Y, 2 * X)}


def steady(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same with one sound in all frames: ComfyUI has no copies of the first frame in front."""
    return inputs | {"audio": inputs["audio"][..., :1].expand_as(inputs["audio"])}


def official_outputs(folder: Path) -> dict[str, Tensor]:
    """The outputs of the official `WanModel_S2V`, with torch's attention in the place of FlashAttention's."""
    with packages(folder, "wan", "wan.modules", "wan.modules.s2v", "wan.distributed"):
        missing = ModuleType("wan.distributed.sequence_parallel")  # of several GPUs
        names = ("distributed_attention", "gather_forward", "get_rank", "get_world_size")
        missing.__dict__.update(dict.fromkeys(names))
        sys.modules[missing.__name__] = missing
        from wan.modules import model as base
        from wan.modules.s2v import model_s2v

        base.flash_attention = model_s2v.flash_attention = lambda q, k, v, **_: sdpa(q, k, v)
        config = S2V
        model = model_s2v.WanModel_S2V(
            cond_dim=16, audio_dim=config.audio_dim, enable_adain=True, adain_mode="attn_norm", zero_timestep=True,
            audio_inject_layers=list(INJECT_AFTER[: config.injectors]), enable_motioner=False, enable_framepack=True,
            framepack_drop_mode="padd", dim=config.dim, ffn_dim=config.ffn_dim, freq_dim=config.freq_dim,
            text_dim=config.text_dim, num_heads=config.num_heads, num_layers=config.num_layers,
        )  # fmt: skip
        model.eval().load_state_dict(draw_weights(config), strict=True)
        outputs = {}
        for grid in GRIDS:
            inputs = draw_inputs(config, grid, motion=MOTION[grid])
            motion = inputs.get("motion", torch.zeros(1, 16, 19, *inputs["x"].shape[3:]))
            for name, pose in {"": inputs["pose"], " no pose": torch.zeros_like(inputs["pose"])}.items():
                out = model(
                    list(inputs["x"]), inputs["timestep"], list(inputs["context"]), 0, list(inputs["reference"]),
                    list(motion), list(pose), inputs["audio"], motion_frames=[73, 19],
                    drop_motion_frames="motion" not in inputs,
                )  # fmt: skip
                outputs[f"{grid}{name}"] = torch.stack(out)
        return outputs


def official_features(folder: Path) -> dict[str, Tensor]:
    """What the official code makes of the states of a speech encoder."""
    sys.modules["librosa"] = ModuleType("librosa")  # reads sound files
    with packages(folder, "wan", "wan.modules", "wan.modules.s2v"):
        from wan.modules.s2v.audio_encoder import AudioEncoder, linear_interpolation

        encoder = object.__new__(AudioEncoder)
        encoder.video_rate, features = 30, {}
        for length, clip in SOUNDS:
            states = linear_interpolation(draw_states(length), input_fps=50, output_fps=30)
            bucket, clips = encoder.get_audio_embed_bucket_fps(states, fps=16, batch_frames=clip, m=0)
            assert len(bucket) == clips * clip
            features[f"features {length} {clip}"] = bucket[None].permute(0, 2, 3, 1)
        return features


def draw_states(length: int) -> Tensor:
    """States of a speech encoder of one layer, two channels wide."""
    return torch.randn(2, length, 2, generator=torch.Generator().manual_seed(length))


def comfyui_outputs(folder: Path) -> dict[str, Tensor]:
    """The outputs of ComfyUI's `WanModel_S2V`."""
    sys.path.insert(0, str(folder))
    from comfy.cli_args import args

    args.cpu = True
    import comfy.ops
    from comfy.ldm.wan.model import WanModel_S2V

    config = S2V
    model = WanModel_S2V(
        dim=config.dim, ffn_dim=config.ffn_dim, freq_dim=config.freq_dim, text_dim=config.text_dim,
        num_heads=config.num_heads, num_layers=config.num_layers, dtype=torch.float32, device="cpu",
        audio_inject_layers=list(INJECT_AFTER[: config.injectors]), operations=comfy.ops.disable_weight_init,
    )  # fmt: skip
    model.eval().load_state_dict(draw_weights(config), strict=True)
    outputs = {}
    for grid in GRIDS:
        inputs = steady(draw_inputs(config, grid, motion=MOTION[grid]))
        own = {"reference_latent": inputs["reference"], "reference_motion": inputs.get("motion")}
        for name, extra in {
            "": {**own, "audio_embed": inputs["audio"], "control_video": inputs["pose"]},
            " no reference": {"audio_embed": inputs["audio"], "control_video": inputs["pose"]},
            " silent": {**own, "control_video": inputs["pose"]},
        }.items():
            outputs[f"{grid}{name}"] = model(
                inputs["x"], inputs["timestep"], inputs["context"], transformer_options={}, **extra
            )
    return outputs


@torch.no_grad()
def main(program: str, folder: str, version: str) -> None:
    from safetensors.torch import save_file

    path = Path(folder)
    outputs = official_outputs(path) | official_features(path) if program == "official" else comfyui_outputs(path)
    tensors = {key: value.float().contiguous() for key, value in outputs.items()}
    save_file(tensors, DATA / f"s2v_{program}.safetensors", {"program": program, "version": version})


if __name__ == "__main__":
    main(*sys.argv[1:])
