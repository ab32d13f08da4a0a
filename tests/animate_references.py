"""What other programs compute with tiny Animate models, kept in `tests/models/data` and compared with ours.

    python -m tests.animate_references official FOLDER COMMIT    # of github.com/Wan-Video/Wan2.2; needs einops
    python -m tests.animate_references comfyui FOLDER VERSION    # of ComfyUI, in its own environment

Weights and inputs are drawn from seeds, so only outputs are kept, with the version of the program that made them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wan_core.checkpoint.detect import expected_shapes
from wan_core.models.wan.config import DiTConfig
from wan_core.models.wan.families.animate import AnimateConfig
from wan_core.models.wan.families.animate2 import Animate2Config

DATA = Path(__file__).parent / "models" / "data"
Grid = tuple[int, int, int, int]  # batch, latent frames, rows and columns of tokens
SMALL: dict[str, Any] = {
    "in_channels": 36, "out_channels": 16, "dim": 48, "ffn_dim": 64, "num_heads": 2, "text_dim": 24, "freq_dim": 32,
    "image_dim": 1280,
}  # fmt: skip
# The official module has its widths of the face branch built in; its motion encoder is one for pictures of 16 pixels.
ANIMATE = AnimateConfig(**SMALL, num_layers=10, motion_channels=(512, 512, 512))
ANIMATE2 = Animate2Config(**SMALL, num_layers=3)
TINY_ANIMATE = AnimateConfig(
    **SMALL, num_layers=5, motion_channels=(4, 6, 8), motion_features=12, motion_directions=5, face_hidden=16
)
OFFICIAL_GRIDS: tuple[Grid, ...] = ((1, 2, 2, 2), (1, 4, 1, 3), (1, 3, 3, 2))
COMFYUI_GRIDS: tuple[Grid, ...] = ((1, 2, 2, 2), (2, 4, 1, 3), (1, 3, 3, 2))


def draw_weights(config: DiTConfig, seed: int = 0) -> dict[str, Tensor]:
    """Random weights by official name, the same wherever they are drawn."""
    weights = {}
    for name, shape in sorted(expected_shapes(config).items()):
        generator = torch.Generator().manual_seed(seed + sum(name.encode()))
        whole = name.startswith("motion_encoder.") and name.endswith("weight")  # stored so large
        scale = 1.0 if whole else 0.2 if len(shape) == 1 else torch.Size(shape[1:]).numel() ** -0.5
        weights[name] = torch.randn(shape, generator=generator) * scale + ("norm" in name and name.endswith("weight"))
    return weights


def draw_inputs(config: DiTConfig, grid: Grid, seed: int = 0) -> dict[str, Tensor]:
    """x, timestep, context and the inputs of the family by name. context has all of its 512 rows."""
    batch, T, Y, X = grid
    generator = torch.Generator().manual_seed(seed + 1000 * T + 100 * Y + X)

    def draw(*shape: int) -> Tensor:
        return torch.randn(batch, *shape, generator=generator)

    inputs = {
        "x": draw(36, T, 2 * Y, 2 * X),
        "timestep": torch.rand(batch, generator=generator) * 1000,
        "context": draw(512, config.text_dim),
        "image": draw(257, 1280),
    }
    if isinstance(config, AnimateConfig):
        size = config.face_size
        inputs |= {"pose": draw(16, T - 1, 2 * Y, 2 * X), "face": draw(3, 4 * (T - 1) - 3, size, size).clamp(-1, 1)}
    else:
        latents = draw(16, T - 1, 2 * Y, 2 * X)
        inputs["pose"] = torch.cat([latents, torch.ones_like(latents[:, :4]), latents], 1)
        inputs |= {"pose_image": draw(257, 1280), "pose_context": draw(512, config.text_dim)}
    return inputs


# ------------------------------------------------------------------------------------------------------- the references


def official_outputs(folder: Path) -> dict[str, Tensor]:
    """The outputs of the official `WanAnimateModel`, with torch's attention in the place of FlashAttention's."""
    with packages(folder, "wan", "wan.modules", "wan.modules.animate", "wan.distributed"):
        from wan.modules.animate import face_blocks, model_animate, motion_encoder

        model_animate.flash_attention = lambda q, k, v, **_: sdpa(q, k, v)
        face_blocks.flash_attn_func = sdpa
        config = ANIMATE
        model = model_animate.WanAnimateModel(
            dim=config.dim, ffn_dim=config.ffn_dim, freq_dim=config.freq_dim, text_dim=config.text_dim,
            num_heads=config.num_heads, num_layers=config.num_layers,
        )  # fmt: skip
        model.motion_encoder = motion_encoder.Generator(size=config.face_size, style_dim=512, motion_dim=20)
        missing, unexpected = model.eval().load_state_dict(draw_weights(config), strict=False)
        assert not unexpected and all(name.endswith(".kernel") for name in missing), (missing, unexpected)
        outputs = {}
        for grid in OFFICIAL_GRIDS:
            inputs = draw_inputs(config, grid)
            out = model(
                list(inputs["x"]), inputs["timestep"], inputs["image"], list(inputs["context"]),
                grid[1] * grid[2] * grid[3], pose_latents=inputs["pose"], face_pixel_values=inputs["face"],
            )  # fmt: skip
            outputs[str(grid)] = torch.stack(out)
        return outputs


def comfyui_outputs(folder: Path) -> dict[str, Tensor]:
    """The outputs of ComfyUI's `WanAnimate2Model`."""
    sys.path.insert(0, str(folder))
    from comfy.cli_args import args

    args.cpu = True
    import comfy.ops
    from comfy.ldm.wan.model_animate2 import WanAnimate2Model

    config = ANIMATE2
    model = WanAnimate2Model(
        dim=config.dim, ffn_dim=config.ffn_dim, freq_dim=config.freq_dim, text_dim=config.text_dim,
        num_heads=config.num_heads, num_layers=config.num_layers, dtype=torch.float32, device="cpu",
        operations=comfy.ops.disable_weight_init,
    )  # fmt: skip
    model.eval().load_state_dict(draw_weights(config), strict=True)
    outputs = {}
    for grid in COMFYUI_GRIDS:
        inputs = draw_inputs(config, grid)
        pose = {"pose_latents": inputs["pose"][:, :16]}
        own = {"clip_fea_pose": inputs["pose_image"], "context_pose": inputs["pose_context"]}
        for name, extra in {
            "": {**pose, **own},
            " defaults": pose,
            " no pose": {},
            " strengths": {**pose, **own, "pose_strength": 0.6, "reference_strength": 1.7},
        }.items():
            outputs[f"{grid}{name}"] = model(
                inputs["x"], inputs["timestep"], inputs["context"], inputs["image"], transformer_options={}, **extra
            )
    return outputs


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    heads = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2)


@contextmanager
def packages(folder: Path, *names: str) -> Iterator[None]:
    """`names` as packages of `folder` whose own `__init__` is not run: it imports what only the command line needs."""
    from types import ModuleType

    for name in names:
        module = ModuleType(name)
        module.__path__ = [str(folder / name.replace(".", "/"))]
        sys.modules[name] = module
    yield


@torch.no_grad()
def main(program: str, folder: str, version: str) -> None:
    from safetensors.torch import save_file

    outputs = official_outputs(Path(folder)) if program == "official" else comfyui_outputs(Path(folder))
    DATA.mkdir(exist_ok=True)
    name = "animate_official" if program == "official" else "animate2_comfyui"
    tensors = {key: value.float().contiguous() for key, value in outputs.items()}
    save_file(tensors, DATA / f"{name}.safetensors", {"program": program, "version": version})


if __name__ == "__main__":
    main(*sys.argv[1:])
