"""The driven model: a drawn shape in a picture moves as another shape in a video. A miniature of Wan-Animate-2, one
transformer for all steps, and of the CLIP encoder through which it sees pictures.

The video that it makes has the look of the picture (colour, shape, background) and the places and the size of the
driving shape, frame by frame.

Shapes: B batch, z latent channels, F/H/W video frames, rows, columns, T/Y/X latent frames, rows, columns.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tools.tiny.clips import TRAINED, Drawing, Ring, encode, outline_rows
from tools.tiny.experts import (
    TEXT_DIM,
    TRAINED_SHIFT,
    Context,
    Training,
    build_expert,
    draw_sigmas,
    fill_rings,
    finished_text,
    outline_weights,
    run_training,
)
from tools.tiny.files import part_path, report_sizes, round_to_fp16, write_part
from tools.tiny.loop import Losses
from tools.tiny.words import DROPPED_ROWS, TEXT_LEN
from wan_core.checkpoint import load_vae
from wan_core.checkpoint.encoders import huggingface_names, load_vision
from wan_core.checkpoint.save import write_safetensors
from wan_core.models.vae.vae import VideoVAE
from wan_core.models.vision.clip import VisionConfig, VisionEncoder, prepared
from wan_core.models.wan.families.animate2 import Animate2Config
from wan_core.models.wan.families.animate2.attention import DeviceLayers, Driven, DrivenAttention
from wan_core.models.wan.families.animate2.model import DRIVING_TIMESTEP, Animate2Model, Driving, Recorded
from wan_core.models.wan.families.wan.model import ImageWanModel
from wan_core.models.wan.rope import rope_table
from wan_core.models.wan.runners import SINGLE_FORWARD, BlockInputs
from wan_core.ops.attention.sdpa import SDPA
from wan_core.ops.kernels import fused
from wan_lab.driving import Trio, draw_trios

VISION = VisionConfig(dim=80, ffn_dim=160, num_layers=1, patch=4)  # looks at 64x64 pixels
DRIVEN = Animate2Config(
    in_channels=36,
    out_channels=16,
    dim=128,
    ffn_dim=384,
    num_heads=2,
    num_layers=6,
    text_dim=TEXT_DIM,
    text_len=TEXT_LEN,
    image_dim=VISION.dim,
)
CURVED_SHARE = 0.5  # of driving videos; the others move as the captions say
SPOKEN_SHARE = 0.3  # of prompts that say what will be seen, where the motion has a word; the others say nothing
CARRIED_SHARE = 0.2  # of clips whose first frame is known, as those of a long video are
DRAWING_SHARE = 0.25  # of the time: where a shape may be is learned from many clips
SHIFT = TRAINED_SHIFT["low"]


# ---------------------------------------------------------------------------------------------------------------- data


class DrivenRing(Ring):
    """{"latent": [B, z, 1 + T, Y, X], of the reference and of the made video, "outline" of these, "image": [B, 4 + z,
    1 + T, Y, X], "pose": [B, z, T, Y, X], "reference", "driver": float16, pictures as CLIP gets them, "scene": [B],
    "curved": [B]}."""

    def __init__(self, drawing: Drawing, vae: VideoVAE, capacity: int) -> None:
        super().__init__(capacity)
        self.drawing, self.vae = drawing, vae

    @torch.no_grad()
    def grow(self, count: int) -> None:
        drawing = self.drawing
        generator, table = drawing.generator, drawing.table
        scene = torch.randint(len(table), (count,), generator=generator, device=generator.device)
        sides = {"frames": drawing.size.frames, "height": drawing.size.height, "width": drawing.size.width}
        trio = draw_trios(table[scene], generator=generator, curved_share=CURVED_SHARE, **sides)
        trio = replace(trio, driving=as_stored(trio.driving, generator))
        # As many in every chunk: each number of clips that are encoded together has to be tuned for.
        carried = torch.randperm(count, device=scene.device) < round(CARRIED_SHARE * count)
        self.add(
            **latent_rows(self.vae, trio, carried),
            reference=clip_pixels(trio.reference),
            driver=clip_pixels(trio.driving[:, :, 0]),
            scene=scene,
            curved=trio.is_curved,
        )


def clip_pixels(picture: Tensor) -> Tensor:
    """Pictures [B, 3, H, W] in -1..1, read from files, as the first layer of CLIP gets them."""
    return prepared(((picture + 1) * 127.5).round() / 127.5 - 1, VISION.size).half()


def as_stored(video: Tensor, generator: torch.Generator) -> Tensor:
    """[B, 3, F, H, W] as files of videos have it: colours at half the resolution, some noise; more or less of it."""
    amount = torch.rand(len(video), 1, 1, 1, 1, generator=generator, device=video.device)
    grey = video.mean(1, keepdim=True)
    coarse = F.avg_pool3d(video - grey, (1, 2, 2)).repeat_interleave(2, 3).repeat_interleave(2, 4)
    noise = torch.randn(video.shape, generator=generator, device=video.device)
    return (torch.lerp(video, grey + coarse, amount) + 0.04 * amount * noise).clamp(-1, 1)


def latent_rows(vae: VideoVAE, trio: Trio, carried: Tensor) -> dict[str, Tensor]:
    """`latent`, `outline`, `image` and `pose` of `DrivenRing`: for a batch what `clip_inputs` of the family is for a
    clip, whose first frame is known where `carried` [B] is True."""
    known = torch.zeros_like(trio.made[: 1 + int(carried.sum())])  # the first stays grey
    known[1:, :, 0] = trio.made[carried, :, 0]
    reference, encoded = encode(vae, trio.reference[:, :, None]), encode(vae, known)
    rest = encoded[:1].repeat(len(carried), 1, 1, 1, 1)
    rest[carried] = encoded[1:]
    image = torch.cat([reference, rest], 2)
    mask = torch.zeros_like(image[:, :4])
    mask[:, :, 0] = 1  # the reference
    mask[:, :, 1] = carried[:, None, None, None].to(mask)  # all four channels of the first frame, which is alone
    return {
        "latent": torch.cat([reference, encode(vae, trio.made)], 2),
        "outline": torch.cat([outline_rows(trio.reference[:, :, None]), outline_rows(trio.made)], 2),
        "image": torch.cat([mask, image], 1),
        "pose": encode(vae, trio.driving),
    }


# --------------------------------------------------------------------------------------------------------------- model


class TrainedAttention(DrivenAttention):
    """The attention of Animate-2 as one softmax with a mask: it has gradients, which the one that merges in place has
    not."""

    def driven(self, q: Tensor, k: Tensor, v: Tensor, own: Driven) -> Tensor:
        assert own.keys is not None and own.values is not None
        length, driving = q.shape[1], own.keys.shape[1]
        frame = torch.arange(length, device=q.device) // own.frame
        of = torch.arange(driving, device=q.device) // own.frame + 1  # frame 0 is the reference, which nothing drives
        mask = torch.cat([torch.ones_like(frame[:, None] == frame), frame[:, None] == of], 1)
        keys, values = torch.cat([k, own.keys.to(k)], 1), torch.cat([v, own.values.to(v)], 1)
        heads = (x.transpose(1, 2) for x in (q, keys, values))
        return F.scaled_dot_product_attention(*heads, attn_mask=mask).transpose(1, 2)


@cache
def driving_rope(grid: tuple[int, int, int], axes: tuple[int, int, int], device: torch.device) -> Tensor:
    """The table that `Animate2Model.drive` makes, kept for graphs."""
    return rope_table(grid, axes, device, start=(1, 0, grid[2]))


def driven_velocity(
    model: Animate2Model, x: Tensor, timestep: Tensor, text: Tensor, seen: Tensor, pose: Tensor, seen_pose: Tensor
) -> Tensor:
    """What `model` predicts, with gradients also through the pass over the driving video. x [B, 36, 1 + T, Y, X], text
    rows, CLIP features of the reference, pose [B, z, T, Y, X], CLIP features of its first frame."""
    with fused.use("torch"):
        pose = torch.cat([pose, torch.ones_like(pose[:, :4]), pose], 1)
        grid = model.token_grid(pose)
        _, modulation = model.embed_time(torch.full((len(pose),), DRIVING_TIMESTEP, device=pose.device))
        rope = driving_rope(grid, model.config.rope_axes, pose.device)
        recorded = Recorded()
        prompt = ImageWanModel.prepare_text(model, text, seen_pose)._replace(own=recorded)
        tokens = model.embed_patches(pose, grid)
        model.runners(BlockInputs(tokens, modulation, rope, prompt, SINGLE_FORWARD, grid), model.run_blocks)
        layers = DeviceLayers([recorded.layers[layer] for layer in range(len(model.blocks))])
        driving = Driving(layers, grid, videos=len(x))
        return model(x, timestep, ImageWanModel.prepare_text(model, text, seen)._replace(own=driving))


def driven_losses(model: Animate2Model, vision: VisionEncoder, ring: Ring, context: Context, batch: int) -> Losses:
    """Draws a batch of trios. Mean squared error of the velocity."""

    def losses() -> dict[str, Tensor]:
        rows = ring.sample(batch)
        latents = rows["latent"]
        sigma = draw_sigmas(batch, 0.0, 1.0, SHIFT, latents.device)
        noise = torch.randn_like(latents)
        x = torch.cat([torch.lerp(latents, noise, sigma.view(-1, 1, 1, 1, 1)), rows["image"]], 1)
        seen, seen_pose = (vision.features(rows[name]) for name in ("reference", "driver"))
        text = context(prompt_rows(rows["scene"], rows["curved"]))
        found = driven_velocity(model, x, 1000 * sigma, text, seen, rows["pose"], seen_pose)
        error = found - (noise - latents)
        return {"driven": (outline_weights(rows["outline"], sigma) * error.square()).mean()}

    return losses


def prompt_rows(scene: Tensor, curved: Tensor) -> Tensor:
    """Rows of `token_table` for scenes [B] of TRAINED: some captions, mostly nothing."""
    silent = 2 * len(TRAINED) + torch.randint_like(scene, DROPPED_ROWS)
    spoken = (torch.rand_like(scene, dtype=torch.float32) < SPOKEN_SHARE) & ~curved
    return torch.where(spoken, scene, silent)


# ------------------------------------------------------------------------------------------------------------ training


def train_driven(run: Training) -> None:
    """The transformer and its CLIP encoder -> driven and clip_vision."""
    context = finished_text(run)
    vae = load_vae(part_path(run.init, "vae"), device=run.device, dtype=torch.float32)
    model = build_expert(DRIVEN, run, "driven")
    assert isinstance(model, Animate2Model)
    for block in model.blocks:
        block.self_attn.attend = TrainedAttention(SDPA)
    vision = new_vision(run).to(run.device)
    rings = fill_rings(run, lambda drawing, capacity: DrivenRing(drawing, vae, capacity))
    losses = {
        size: driven_losses(model, vision, ring, context, size.share_of(run.batch))
        for size, (ring, _, _) in rings.items()
    }
    run_training(run, {"driven": model, "clip_vision": vision}, losses, rings, share=DRAWING_SHARE)
    for module in (model, vision):
        round_to_fp16(module)
    write_part(model, run.out, "driven")
    write_vision(vision, run.out)
    report_sizes(run.out)


@torch.no_grad()
def new_vision(run: Training) -> VisionEncoder:
    """An encoder with the weights of an earlier run, or new ones."""
    vision = VisionEncoder(VISION)
    path = part_path(run.init, "clip_vision")
    if path.is_file():
        vision.load_state_dict(load_vision(path, dtype=torch.float32).state_dict())
        return vision
    nn.init.normal_(vision.cls, std=0.02)
    nn.init.normal_(vision.positions, std=0.02)
    return vision


def write_vision(vision: VisionEncoder, folder: Path) -> None:
    """Save as fp16 in Hugging Face's layout, with the first tensor of a layer that does not run, as its files have."""
    layers, state = vision.config.num_layers, vision.state_dict()
    tensors = {theirs: state[ours].half().contiguous() for ours, theirs in huggingface_names(layers).items()}
    tensors[f"vision_model.encoder.layers.{layers}.layer_norm1.weight"] = torch.ones(VISION.dim).half()
    write_safetensors(
        {name: t.cpu() for name, t in tensors.items()}, part_path(folder, "clip_vision"), {"format": "pt"}
    )
