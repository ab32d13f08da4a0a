"""What other programs compute with tiny models of VACE and Fun, kept in `tests/models/data` and compared with ours.

    python -m tests.control_references videox-fun FOLDER COMMIT    # of github.com/aigc-apps/VideoX-Fun
    python -m tests.control_references comfyui FOLDER VERSION      # of ComfyUI, in its own environment

Weights and inputs are drawn from seeds, so only outputs are kept, with the version of the program that made them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.animate_references import DATA, Grid, draw_weights, packages, sdpa
from wan_core.models.wan.config import DiTConfig
from wan_core.models.wan.families.fun import FunCameraConfig, FunControlConfig
from wan_core.models.wan.families.vace import VaceConfig

GRIDS: tuple[Grid, ...] = ((1, 2, 2, 2), (2, 4, 1, 3), (1, 3, 3, 2))
SMALL: dict[str, Any] = {
    "out_channels": 16, "dim": 48, "ffn_dim": 64, "num_heads": 2, "num_layers": 2, "text_dim": 24, "freq_dim": 32,
}  # fmt: skip
CONFIGS: dict[str, DiTConfig] = {
    "vace": VaceConfig(**{**SMALL, "num_layers": 4}, in_channels=16, vace_every=2),
    "fun-control": FunControlConfig(**SMALL, in_channels=52),
    "fun-control 2.1": FunControlConfig(**SMALL, in_channels=48, image_dim=1280),
    "camera": FunCameraConfig(**SMALL, in_channels=36),
    "camera 2.1": FunCameraConfig(**SMALL, in_channels=32, image_dim=1280),
}
OWN = {"vace": "control", "fun-control": "reference", "camera": "camera"}  # the input that each family adds


def draw_inputs(config: DiTConfig, grid: Grid, seed: int = 0) -> dict[str, Tensor]:
    """x, timestep, context and the inputs of the family by name. context has all of its 512 rows."""
    batch, T, Y, X = grid
    generator = torch.Generator().manual_seed(seed + 1000 * T + 100 * Y + X)

    def draw(*shape: int) -> Tensor:
        return torch.randn(batch, *shape, generator=generator)

    inputs = {
        "x": draw(config.in_channels, T, 2 * Y, 2 * X),
        "timestep": torch.rand(batch, generator=generator) * 1000,
        "context": draw(512, config.text_dim),
    }
    if config.image_dim is not None:
        inputs["image"] = draw(257, config.image_dim)
    if isinstance(config, VaceConfig):
        inputs["control"] = draw(config.vace_channels, T, 2 * Y, 2 * X)
    elif isinstance(config, FunControlConfig):
        inputs["reference"] = draw(config.reference_channels, 2 * Y, 2 * X)
    elif isinstance(config, FunCameraConfig):
        inputs["camera"] = draw(config.camera_channels, T, 16 * Y, 16 * X)
    return inputs


def contexts(control: Tensor) -> Tensor:
    """Two control videos of each video: the given one, and the same turned over."""
    return torch.stack([control, control.flip(2)], 1)


# ------------------------------------------------------------------------------------------------------- the references


def videox_outputs(folder: Path) -> dict[str, Tensor]:
    """The outputs of VideoX-Fun's `WanTransformer3DModel`, with torch's attention in the place of its own."""
    attention = "videox_fun.models.attention_utils"
    with packages(folder, "videox_fun", "videox_fun.models", "videox_fun.utils", "videox_fun.dist", attention):
        several, utils = sys.modules["videox_fun.dist"], sys.modules["videox_fun.utils"]
        for name in ("get_sp_group", "usp_attn_forward", "xFuserLongContextAttention"):  # of several GPUs
            setattr(several, name, None)
        for name in ("get_sequence_parallel_rank", "get_sequence_parallel_world_size"):
            setattr(several, name, lambda: 1)
        utils.cfg_skip = lambda: lambda forward: forward  # type: ignore[attr-defined]
        sys.modules[attention].attention = lambda q, k, v, *_, **__: sdpa(q, k, v)  # type: ignore[attr-defined]
        from videox_fun.models import wan_transformer3d as theirs

        outputs = {}
        for name, config in CONFIGS.items():
            if isinstance(config, VaceConfig):
                continue
            model = theirs.WanTransformer3DModel(
                model_type="t2v" if config.image_dim is None else "i2v", in_dim=config.in_channels, dim=config.dim,
                ffn_dim=config.ffn_dim, freq_dim=config.freq_dim, text_dim=config.text_dim, out_dim=16,
                num_heads=config.num_heads, num_layers=config.num_layers, in_channels=config.in_channels,
                cross_attn_type=None, add_control_adapter=isinstance(config, FunCameraConfig),
                add_ref_conv=isinstance(config, FunControlConfig),
            )  # fmt: skip
            model.eval().load_state_dict(draw_weights(config), strict=True)
            for grid in GRIDS:
                inputs = draw_inputs(config, grid)
                outputs[f"{name} {grid}"] = model(
                    inputs["x"], inputs["timestep"], list(inputs["context"]), grid[1] * grid[2] * grid[3],
                    clip_fea=inputs.get("image"), y_camera=inputs.get("camera"), full_ref=inputs.get("reference"),
                )  # fmt: skip
        return outputs


def comfyui_outputs(folder: Path) -> dict[str, Tensor]:
    """The outputs of ComfyUI's `VaceWanModel`, `CameraWanModel` and `WanModel`."""
    sys.path.insert(0, str(folder))
    from comfy.cli_args import args

    args.cpu = True
    import comfy.ops
    from comfy.ldm.wan import model as theirs

    outputs = {}
    for name, config in CONFIGS.items():
        own: dict[str, Any] = {"model_type": "t2v" if config.image_dim is None else "i2v"}
        kind = theirs.WanModel
        if isinstance(config, VaceConfig):
            kind, own = theirs.VaceWanModel, {"vace_layers": config.vace_blocks, "vace_in_dim": config.vace_channels}
        elif isinstance(config, FunControlConfig):
            own["in_dim_ref_conv"] = config.reference_channels
        else:
            kind, own["model_type"] = theirs.CameraWanModel, "t2v" if config.image_dim is None else "camera"
        model = kind(
            in_dim=config.in_channels, out_dim=16, dim=config.dim, ffn_dim=config.ffn_dim, freq_dim=config.freq_dim,
            text_dim=config.text_dim, num_heads=config.num_heads, num_layers=config.num_layers, dtype=torch.float32,
            device="cpu", operations=comfy.ops.disable_weight_init, **own,
        )  # fmt: skip
        model.eval().load_state_dict(draw_weights(config), strict=True)
        for grid in GRIDS:
            inputs = draw_inputs(config, grid)
            x, time, context, image = (inputs.get(key) for key in ("x", "timestep", "context", "image"))
            for case, extra in comfyui_inputs(config, inputs).items():
                outputs[f"{name} {grid}{case}"] = model(x, time, context, image, transformer_options={}, **extra)
    return outputs


def comfyui_inputs(config: DiTConfig, inputs: dict[str, Tensor]) -> dict[str, dict[str, Any]]:
    """By a word for the case."""
    if isinstance(config, VaceConfig):
        control = inputs["control"]
        both = {"vace_context": contexts(control), "vace_strength": [0.7, 1.6]}
        return {"": {"vace_context": control[:, None], "vace_strength": [1.0]}, " two": both}
    if isinstance(config, FunControlConfig):
        return {"": {"reference_latent": inputs["reference"]}, " none": {}}
    return {"": {"camera_conditions": inputs["camera"]}, " none": {}}


@torch.no_grad()
def main(program: str, folder: str, version: str) -> None:
    from safetensors.torch import save_file

    outputs = comfyui_outputs(Path(folder)) if program == "comfyui" else videox_outputs(Path(folder))
    tensors = {key: value.float().contiguous() for key, value in outputs.items()}
    save_file(tensors, DATA / f"control_{program}.safetensors", {"program": program, "version": version})


if __name__ == "__main__":
    main(*sys.argv[1:])
