"""Clips of SVI 2.0 Pro: their conditioning by KJNodes' formula, the loop written out, restarts, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

from tests.denoised import denoise
from wan_core.cli import main
from wan_core.config import (
    LoadOptions,
    LoraOptions,
    OptionError,
    Request,
    SkipOptions,
    SparseOptions,
    TaylorSeerOptions,
)
from wan_core.config.file_names import file_says
from wan_core.models.vae.config import VAE_21, VAEConfig
from wan_core.models.wan.families import TASKS, family_of
from wan_core.models.wan.families.wan.inputs import handed_of, join_image, svi_clip
from wan_core.pipeline.clips import run_key
from wan_core.pipeline.encode import encode_text
from wan_core.pipeline.pipeline import Pipeline
from wan_core.pipeline.run import Watch
from wan_core.sampling.build import ModelFacts, PlanRequest, build_plan
from wan_core.sampling.conditioning import Conditioning

WIDTH, HEIGHT = 48, 32
KJ = "SVI_v2_PRO_Wan2.2-I2V-A14B_{}_lora_rank_128_fp16.safetensors"
OFFICIAL = "SVI_Wan2.2-I2V-A14B_{}_noise_lora_v2.0_pro.safetensors"


# ------------------------------------------------------------------------------------------------------- conditioning


def of_kjnodes(anchor: Tensor, previous: Tensor | None, count: int, length: int, vae: VAEConfig = VAE_21) -> Tensor:
    """What a transformer is given beside noise by the node WanImageToVideoSVIPro and ComfyUI's `process_in`, written
    out place by place: [1, 20, T, Y, X]. Compared with that node itself, whose difference from ours was 0.0."""
    frames = (length - 1) // 4 + 1
    concat = torch.zeros(1, 20, frames, *anchor.shape[3:])
    known_latents = (
        [anchor[:, :, 0]] if previous is None or not count else [anchor[:, :, 0], *previous.unbind(2)[-count:]]
    )
    for place in range(frames):
        for channel in range(16):
            mean, deviation = vae.latents_mean[channel], vae.latents_std[channel]
            latent = (
                known_latents[place][:, channel] if place < len(known_latents) else torch.full(anchor.shape[3:], mean)
            )
            concat[:, 4 + channel, place] = (latent - mean) / deviation
    concat[:, :4, 0] = 1
    return concat


@pytest.mark.parametrize(("length", "previous_length", "count"), [(17, None, 1), (17, 5, 1), (33, 7, 2), (81, 21, 1)])
def test_conditioning_is_that_of_kjnodes(length: int, previous_length: int | None, count: int) -> None:
    anchor = torch.randn(1, 16, 1, 4, 6)
    previous = None if previous_length is None else torch.randn(1, 16, previous_length, 4, 6)
    latents, unknown = svi_clip(anchor, None, None if previous is None else previous[:, :, -count:], length, VAE_21)
    ours = join_image(latents, unknown, VAE_21)
    torch.testing.assert_close(ours, of_kjnodes(anchor, previous, count, length), rtol=0, atol=1e-5)
    handed = () if previous is None else tuple(range(1, 4 * count + 1))
    assert handed_of(latents, unknown, VAE_21) == handed


def test_a_last_frame_is_the_last_latent_and_mask_of_one_frame() -> None:
    """The rule is Wan2GP's: the last of the four channels of the last latent frame."""
    anchor, last, previous = torch.randn(1, 16, 1, 2, 2), torch.randn(1, 16, 1, 2, 2), torch.randn(1, 16, 1, 2, 2)
    latents, unknown = svi_clip(anchor, last, previous, 17, VAE_21)
    assert torch.equal(latents[:, :, -1:], last) and torch.equal(latents[:, :, :1], anchor)
    assert unknown[0, :, :, 0, 0].tolist() == [[0, 1, 1, 1, 1]] * 3 + [[0, 1, 1, 1, 0]]


def test_a_clip_needs_latents_of_its_own() -> None:
    one = torch.zeros(1, 16, 1, 2, 2)
    with pytest.raises(OptionError, match="make it longer"):
        svi_clip(one, None, one, 5, VAE_21)


# --------------------------------------------------------------------------------------------------------------- clips


def request(pictures: list[str], **changed: object) -> Request:
    size = {"width": WIDTH, "height": HEIGHT, "frames": 33, "clip_frames": 17, "steps": 2, "seed": 3}
    fields = {"prompt": "a red circle", "image": pictures[0], "svi": True, **size}
    return Request(**{**fields, **changed})  # type: ignore[arg-type]


def reference_loop(image_pipe: Pipeline, asked: Request, last: str | None = None) -> tuple[Tensor, np.ndarray]:
    """KJNodes' workflow, written out: samplers one after the other, each with a seed of its own; all latents but those
    that were given are one video. Returns latents and frames 0..255, not rounded."""
    vae, run, count = image_pipe.models.vae(), image_pipe.prepare(asked), ((asked.overlap or 5) - 1) // 4
    text, T = encode_text(run), ((asked.clip_frames or 17) - 1) // 4 + 1

    def picture(path: str) -> Tensor:
        pixels = torch.from_numpy(np.array(Image.open(path)).astype(np.float32) / 255)
        return vae.encode((pixels * 2 - 1).permute(2, 0, 1)[None, :, None]).float()

    latents: Tensor | None = None
    for number in range(len(run.job.clips)):
        concat = of_kjnodes(picture(asked.image or ""), latents, count, 4 * T - 3, vae.config)
        if last is not None and number + 1 == len(run.job.clips):
            concat[:, 4:, -1:], concat[:, 3, -1] = vae.normalise(picture(last)), 1
        noise = torch.randn(1, 16, T, HEIGHT // 8, WIDTH // 8, generator=torch.Generator().manual_seed(3 + number))
        conditioning = Conditioning(cond=text.cond, uncond=text.uncond, concat=concat)
        new = vae.denormalise(denoise(run.job.plan, image_pipe.models.expert, conditioning, noise))
        latents = new if latents is None else torch.cat([latents, new[:, :, 1 + count :]], 2)
    assert latents is not None
    frames = vae.decode(latents).float()[0].permute(1, 2, 3, 0)
    return latents, ((frames + 1) * 127.5).numpy()


@torch.no_grad()
@pytest.mark.parametrize(("frames", "overlap", "ends"), [(33, 5, False), (25, 9, False), (29, 5, True)])
def test_clips_equal_the_reference_loop(
    image_pipe: Pipeline, pictures: list[str], frames: int, overlap: int, ends: bool
) -> None:
    last = pictures[1] if ends else None
    asked = request(pictures, last_image=last, frames=frames, overlap=overlap)
    video = image_pipe.generate(asked)
    latents, decoded = reference_loop(image_pipe, asked, last)
    assert (video.latents - latents).abs().max() < 1e-4
    assert video.frames.shape == (frames, HEIGHT, WIDTH, 3)
    # Frames of later clips are decoded after the last latents before them, and not after all.
    assert np.abs(video.frames - decoded[:frames]).max() <= 2.5
    assert video.report.settings["svi"] and "carried over" in video.report.settings["clips"]


def test_finished_clips_are_not_made_again(image_pipe: Pipeline, pictures: list[str], tmp_path: Path) -> None:
    asked = request(pictures, frames=29)
    first = image_pipe.generate(asked, Watch(keep_clips=tmp_path))
    assert len(first.kept_clips) == 2
    first.kept_clips[1].unlink()
    again = image_pipe.generate(asked, Watch(keep_clips=tmp_path))
    assert np.array_equal(again.frames, first.frames) and torch.equal(again.latents, first.latents)
    assert "clip 1 was finished by an earlier run" in again.report.notes
    keys = {run_key(image_pipe.prepare(one)) for one in (asked, replace(asked, svi=None, overlap=5), asked)}
    assert len(keys) == 2


@pytest.mark.parametrize(
    ("steps", "skip"),
    [
        (4, SkipOptions(sparse=SparseOptions(sparsity=0.5, ramp=0))),
        (10, SkipOptions(taylorseer=TaylorSeerOptions(interval=2, retention=0))),
    ],
    ids=["sparse", "cached"],
)
def test_clips_with_policies(image_pipe: Pipeline, pictures: list[str], steps: int, skip: SkipOptions) -> None:
    plain, skipped = (image_pipe.generate(request(pictures, frames=29, steps=steps, skip=one)) for one in (None, skip))
    assert skipped.frames.shape == plain.frames.shape and not np.array_equal(skipped.frames, plain.frames)
    assert skipped.plan.forwards < plain.plan.forwards or skipped.plan.sparse is not None


# --------------------------------------------------------------------------------------------------- plans and refusals


@pytest.mark.parametrize("task", [name for name in TASKS if name not in ("i2v-A14B", "i2v-tiny")])
def test_a_task_that_cannot_says_so(task: str) -> None:
    with pytest.raises(OptionError, match=f"--svi given for {task}: SVI 2.0 Pro is for image-to-video of Wan 2.2 A14B"):
        family_of(TASKS[task]).cut_video(TASKS[task], 161, svi=True)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--keyframe", "40"], "--svi and keyframes given"),
        (["--clip-frames", "/1"], "begin with 5 or 9 or 13 frames"),
        (["--clip-frames", "80"], "a clip has 4n"),
    ],
)
def test_what_its_clips_cannot_have_is_refused(
    more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--task", "i2v-A14B", "--svi", "--frames", "161", *more]) == 2
    assert message in capsys.readouterr().err


def test_a_last_image_ends_the_last_clip(image_pipe: Pipeline, pictures: list[str]) -> None:
    with pytest.raises(OptionError, match="the video has 29 or 41 frames"):
        image_pipe.prepare(request(pictures, last_image=pictures[1], frames=33))
    with pytest.raises(OptionError, match="give --image"):
        image_pipe.prepare(request(pictures, image=None, last_image=pictures[1]))


# --------------------------------------------------------------------------------------------------------------- LoRAs


@pytest.mark.parametrize("form", [KJ, OFFICIAL])
def test_loras_are_known_by_name(form: str) -> None:
    assert all(file_says(Path(form.format(part))).svi == "2.0 Pro" for part in ("high", "low", "HIGH", "LOW"))


def notes(*loras: str, **asked: object) -> str:
    task = TASKS["i2v-A14B"]
    files = {"high": Path("high.safetensors"), "loras": tuple(map(Path, loras))}
    facts = ModelFacts(task=task, dit=task.full_size, vae=task.vae, **files)  # type: ignore[arg-type]
    request = PlanRequest(steps=4, frames=161, **asked)  # type: ignore[arg-type]
    return " ".join(build_plan(request, facts).notes)


def test_a_run_says_which_loras_it_lacks() -> None:
    pair = KJ.format("HIGH"), KJ.format("LOW")
    assert "no LoRA is SVI 2.0 Pro's" in notes(svi=True) and "SVI" not in notes(*pair, svi=True)
    assert "is of another SVI than 2.0 Pro" in notes("svi-film.safetensors", svi=True)
    assert "whose clips --svi makes" in notes(*pair, clip_frames=81) and "SVI" not in notes(clip_frames=81)


# --------------------------------------------------------------------------------------------------------------- doors


def test_clips_of_quantised_weights_with_the_makers_lora(pictures: list[str], tmp_path: Path) -> None:
    """FP8 weights, and a LoRA for each expert in the layout and with the names of the makers' files."""
    loras = list[LoraOptions]()
    for seed, expert in enumerate(("high", "low")):
        path, draw = tmp_path / OFFICIAL.format(expert), torch.Generator().manual_seed(seed)
        names = [f"blocks.{block}.{name}" for block in range(4) for name in ("self_attn.q", "cross_attn.o")]
        tensors = {f"{name}.lora_A.default.weight": torch.randn(4, 96, generator=draw) * 0.1 for name in names}
        tensors |= {f"{name}.lora_B.default.weight": torch.randn(96, 4, generator=draw) * 0.1 for name in names}
        save_file(tensors, path)
        loras.append(LoraOptions(path=str(path)))
    by_setup = {}
    for precision, lora_files in (("fp32", ()), ("fp32", loras), ("fp8-weights", loras)):
        options = LoadOptions(model="tiny", task="i2v-tiny", device="cpu", precision=precision, loras=tuple(lora_files))
        result = Pipeline.load(options).generate(request(pictures, frames=29))
        by_setup[precision, bool(lora_files)] = result.latents
        assert ("no LoRA is SVI 2.0 Pro's" in " ".join(result.report.notes)) is not bool(lora_files)
    exact, spread = by_setup["fp32", True], by_setup["fp32", True].std()
    assert (by_setup["fp32", False] - exact).abs().mean() > 0.05 * spread  # the LoRA counts
    assert 0 < (by_setup["fp8-weights", True] - exact).abs().mean() < 0.5 * spread
