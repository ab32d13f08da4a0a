"""Control videos, masks, pictures and cameras on the command line: what they are to the transformers, and whole runs of
tiny models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

from tests.animate_references import draw_weights
from tests.control_references import SMALL
from tests.encoder_files import write_vision
from wan_core.cli import main
from wan_core.config import ControlOptions, LoadOptions, OptionError, Request
from wan_core.media.mp4 import write_mp4
from wan_core.media.video import read_metadata, read_video
from wan_core.models.vae.config import VAE_21
from wan_core.models.wan.families.clips import Clip
from wan_core.models.wan.families.fun import FunCameraConfig, FunControlConfig
from wan_core.models.wan.families.vace import VaceConfig
from wan_core.models.wan.families.vace.inputs import control_of_media
from wan_core.pipeline.encode import first_frames
from wan_core.pipeline.pipeline import Pipeline
from wan_core.pipeline.sources import TINY

SHAPE: dict[str, Any] = {**SMALL, "dim": 64, "text_dim": 64}
CONFIGS = {
    "vace": VaceConfig(**SHAPE, in_channels=16, vace_every=2),
    "fun-control": FunControlConfig(**SHAPE, in_channels=52),
    "fun-control-21": FunControlConfig(**SHAPE, in_channels=48, image_dim=1280),
    "camera": FunCameraConfig(**SHAPE, in_channels=36),
}
WIDTH, HEIGHT = 48, 32


def drawn(frames: int, seed: int, height: int = HEIGHT, width: int = WIDTH) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (frames, height, width, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("control")
    for name, config in CONFIGS.items():
        for expert, seed in (("", 0), ("-low", 7)):
            save_file(draw_weights(config, seed), folder / f"{name}{expert}.safetensors", {"num_heads": "2"})
    write_vision(folder / "clip_vision_h.safetensors")
    Image.fromarray(drawn(1, 0, 40, 30)[0]).save(folder / "picture.png")
    mask = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
    mask[:, WIDTH // 2 :] = 255
    Image.fromarray(mask).save(folder / "mask.png")
    write_mp4(folder / "video.mp4", drawn(14, 1), fps=16)
    return folder


def options(folder: Path, name: str) -> list[str]:
    parts = [f"--{part.replace('_', '-')}={TINY / f'{part}.safetensors'}" for part in ("text_encoder", "vae")]
    vision = [f"--clip-vision={folder / 'clip_vision_h.safetensors'}"] if name.endswith("21") else []
    low = [] if name in ("vace", "fun-control-21") else [f"--low={folder / f'{name}-low.safetensors'}"]
    return [f"--high={folder / f'{name}.safetensors'}", *low, "--device=cpu", *parts, *vision]


def run(folder: Path, name: str, out: Path, *arguments: str) -> int:
    shared = ["--prompt=a red circle", "--steps=2", "--seed=3", f"--out={out}"]
    return main(["generate", *options(folder, name), *shared, *(one.replace("@", f"{folder}/") for one in arguments)])


SIZE = f"--size={WIDTH}x{HEIGHT}"
RUNS = {
    "text alone": ("vace", [SIZE, "--frames=5"], 5),
    "followed": ("vace", [SIZE, "--control-video=@video.mp4", "--control-strength=0.7"], 13),
    "inpainted": ("vace", [SIZE, "--control-video=@video.mp4", "--mask=@mask.png", "--reference=@picture.png"], 13),
    "outpainted": ("vace", [SIZE, "--control-video=@video.mp4", "--outpaint=8/0/8/16", "--frames=5"], 5),
    "first and last": ("vace", [SIZE, "--image=@picture.png", "--last-image=@picture.png", "--frames=5"], 5),
    "in clips": ("vace", [SIZE, "--control-video=@video.mp4", "--clip-frames=9", "--reference=@picture.png"], 14),
    "control": ("fun-control", [SIZE, "--control-video=@video.mp4", "--reference=@picture.png"], 13),
    "control 2.1": ("fun-control-21", [SIZE, "--control-video=@video.mp4", "--image=@picture.png", "--frames=5"], 5),
    "control in clips": ("fun-control", [SIZE, "--control-video=@video.mp4", "--clip-frames=9"], 14),
    "camera": ("camera", [SIZE, "--camera=zoom-in+pan-left:0.5", "--image=@picture.png", "--frames=5"], 5),
    "camera in clips": ("camera", [SIZE, "--camera=roll-left", "--clip-frames=5", "--frames=9"], 9),
}


@pytest.mark.parametrize("name", RUNS)
def test_the_command_line_makes_a_video(folder: Path, tmp_path: Path, name: str) -> None:
    model, arguments, frames = RUNS[name]
    assert run(folder, model, tmp_path / "x.mp4", *arguments) == 0
    assert read_video(tmp_path / "x.mp4").shape == (frames, HEIGHT, WIDTH, 3)
    if name == "followed":
        assert "0.7" in read_metadata(tmp_path / "x.mp4")["control"]


# ------------------------------------------------------------------------------------------------ what becomes of them


def loaded(folder: Path, name: str) -> Pipeline:
    parts = {part: str(TINY / f"{part}.safetensors") for part in ("text_encoder", "vae")}
    parts |= {"clip_vision": str(folder / "clip_vision_h.safetensors")} if name.endswith("21") else {}
    low = None if name in ("vace", "fun-control-21") else str(folder / f"{name}-low.safetensors")
    return Pipeline.load(LoadOptions(high=str(folder / f"{name}.safetensors"), low=low, device="cpu", **parts))


def request(folder: Path, **fields: Any) -> Request:
    files = {field: str(folder / value) for field, value in fields.items() if isinstance(value, str) and "." in value}
    shared = {"prompt": "a red circle", "steps": 2, "width": WIDTH, "height": HEIGHT, "frames": 5}
    return Request(**{**shared, **fields, **files})


def encoded(pipe: Pipeline, video: Tensor) -> Tensor:
    return pipe.models.vae().normalise(pipe.models.vae().encode(video))


def in_pixels(frames: np.ndarray) -> Tensor:
    return torch.from_numpy(frames).float().permute(3, 0, 1, 2)[None] / 127.5 - 1


@torch.no_grad()
def test_vace_is_given_what_stays_what_changes_and_where(folder: Path) -> None:
    pipe = loaded(folder, "vace")
    asked = request(folder, control_video="video.mp4", mask="mask.png", reference="picture.png", image="picture.png")
    run_prepared = pipe.prepare(asked)
    # The reference is a frame of the latents.
    assert run_prepared.job.plan.latent_shape == (1, 16, 3, 4, 6) and run_prepared.job.plan.tokens == 3 * 2 * 3
    control = pipe.encode(run_prepared).inputs["control"]
    assert control.shape == (1, 96, 3, 4, 6)
    video = in_pixels(read_video(folder / "video.mp4")[:5])
    first = first_frames(run_prepared)["image"]
    changes = torch.zeros(5, HEIGHT, WIDTH)
    changes[1:, :, WIDTH // 2 :] = 1  # the first frame is known
    video[:, :, :1] = first
    assert torch.allclose(control[:, :16, 1:], encoded(pipe, video * (1 - changes)), atol=1e-5)
    assert torch.allclose(control[:, 16:32, 1:], encoded(pipe, video * changes), atol=1e-5)
    assert control[:, 16:32, 0].abs().max() < 1e-5 and not control[:, 32:, 0].any()
    half = control[:, 32:, 1:]  # a latent frame has the mask of one video frame, in the middle of its part
    assert (half[..., 3:] == 1).all() and not half[..., :3].any()


def test_the_channels_of_a_mask_are_the_pixels_of_a_latent() -> None:
    mask = torch.rand(1, 1, 5, 16, 24).round().expand(1, 3, -1, -1, -1) * 2 - 1
    channels = control_of_media(lambda x: torch.zeros(1, 16, 2, 2, 3), {"mask": mask}, Clip(0, 0, 5, 0), VAE_21)[1]
    for y in range(16):
        for x in range(24):
            for latent, frame in ((0, 1), (1, 3)):  # the frame in the middle of each half
                assert channels[0, 8 * (y % 8) + x % 8, latent, y // 8, x // 8] == mask[0, 0, frame, y, x].clamp(min=0)


@torch.no_grad()
def test_outpainting_pads_the_video_and_keeps_what_it_shows(folder: Path) -> None:
    pipe = loaded(folder, "vace")
    asked = request(folder, control_video="video.mp4", outpaint=(48, 0, 48, 0), width=144)
    control = pipe.encode(pipe.prepare(asked)).inputs["control"]
    mask = control[0, 32:, :, :, :]
    assert not mask[:, :, :, 6:12].any() and (mask[:, :, :, :6] == 1).all() and (mask[:, :, :, 12:] == 1).all()
    size = pipe.prepare(Request(prompt="", control_video=asked.control_video, outpaint=asked.outpaint)).job
    assert abs(size.width / size.height - 144 / 32) < 0.2 and size.frames == 13


@torch.no_grad()
def test_outpainting_pads_a_mask_of_another_size_as_the_video(folder: Path) -> None:
    with Image.open(folder / "mask.png") as mask:
        mask.resize((3 * WIDTH, 3 * HEIGHT), Image.Resampling.NEAREST).save(folder / "large.png")
    pipe, masks = loaded(folder, "vace"), []
    for name in ("mask.png", "large.png"):
        asked = request(folder, control_video="video.mp4", mask=name, outpaint=(48, 0, 48, 0), width=144)
        masks.append(pipe.encode(pipe.prepare(asked)).inputs["control"][0, 32:])
    assert not masks[0][..., 6:9].any() and masks[0].mean() == (18 - 3) / 18
    assert torch.equal(*masks)


@torch.no_grad()
@pytest.mark.parametrize("count", [1, 2, 5, 9])
def test_several_last_frames_of_vace_end_with_the_last(count: int) -> None:
    last, seen = torch.rand(1, 3, count, 32, 48), []

    def encode(video: Tensor) -> Tensor:
        seen.append(video)
        return torch.zeros(1, 16, 3, 4, 6)

    media = {"mask": torch.ones(1, 3, 9, 32, 48), "last_image": last}
    mask = control_of_media(encode, media, Clip(0, 0, 9, 0), VAE_21)[1]
    assert torch.equal(seen[0][:, :, -count:], last) and not seen[0][:, :, :-count].any() and not seen[1].any()
    assert mask[:, :, 2].any() == (count == 1) and mask[:, :, 0].any() == (count < 9)  # of frames 7 and 1


@torch.no_grad()
def test_the_next_clip_of_vace_keeps_the_frames_before_it(folder: Path) -> None:
    pipe = loaded(folder, "vace")
    run_prepared = pipe.prepare(request(folder, control_video="video.mp4", frames=13, clip_frames=9, overlap=5))
    assert [(clip.first, clip.frames, clip.carried) for clip in run_prepared.job.clips] == [(0, 9, 0), (4, 9, 5)]
    media = {"control_video": torch.rand(1, 3, 9, 32, 48), "mask": torch.ones(1, 3, 9, 32, 48)}
    seen: list[Tensor] = []

    def encode(video: Tensor) -> Tensor:
        seen.append(video)
        return torch.zeros(1, 16, 3, 4, 6)

    media["carried"] = torch.rand(1, 3, 5, 32, 48)
    mask = control_of_media(encode, media, run_prepared.job.clips[1], VAE_21)[1]
    assert torch.equal(seen[0][:, :, :5], media["carried"]) and not seen[0][:, :, 5:].any()
    assert torch.equal(seen[1][:, :, 5:], media["control_video"][:, :, 5:])
    assert not mask[:, :, :2].any() and (mask[:, :, 2] == 1).all()


@torch.no_grad()
@pytest.mark.parametrize("name", ["fun-control", "fun-control-21", "camera"])
def test_fun_is_given_its_control_and_what_is_known(folder: Path, name: str) -> None:
    pipe = loaded(folder, name)
    camera = name == "camera"
    asked = request(folder, **{"camera": "zoom-in"} if camera else {"control_video": "video.mp4"}, image="picture.png")
    run_prepared = pipe.prepare(asked)
    conditioning, first = pipe.encode(run_prepared), first_frames(pipe.prepare(asked))["image"]
    assert conditioning.concat is not None
    if name == "fun-control-21":
        assert conditioning.concat.shape == (1, 32, 2, 4, 6) and conditioning.image_features is not None
        assert conditioning.image_features.abs().max() > 0
        without = pipe.encode(pipe.prepare(request(folder, control_video="video.mp4")))
        assert without.image_features is not None and not without.image_features.any()
        assert not without.concat[:, 16:].any()
    else:
        known_mask = conditioning.concat[:, 0 if camera else 16 :][:, :4]
        assert (known_mask[:, :, 0] == 1).all() and not known_mask[:, :, 1].any()
    padded = torch.cat([first, torch.zeros(1, 3, 4, HEIGHT, WIDTH)], 2)
    start = conditioning.concat[:, -16:]
    assert torch.allclose(start if camera else start[:, :, :1], encoded(pipe, padded if camera else first), atol=1e-5)
    if camera:
        assert conditioning.inputs["camera"].shape == (1, 24, 2, HEIGHT, WIDTH)
    else:
        control = in_pixels(read_video(folder / "video.mp4")[:5])
        assert torch.allclose(conditioning.concat[:, :16], encoded(pipe, control), atol=1e-5)
    referred = None if camera else pipe.prepare(request(folder, control_video="video.mp4", reference="picture.png"))
    reference_counts = None if referred is None else (referred.job.plan.tokens, referred.job.plan.latent_shape[2])
    assert reference_counts in (None, (3 * 2 * 3, 2))  # beside the latents


REFUSED = {
    "--mask=@mask.png": "give --control-video as well",
    "--outpaint=8/8/8/8": "give --control-video as well",
    "--control-video=@video.mp4 --frames=17": "has 14 frames, and 17 are asked for",
    "--control-video=@picture.png": "cannot read",
    "--control-video=@nothing.mp4": "nothing.mp4 does not exist",
    "--pose-video=@video.mp4": "does not take --pose-video",
    "--camera=zoom-in": "does not take --camera",
    "--denoise=0.5": "takes no --denoise",
    "--control-video=@video.mp4 --outpaint=8/0/0/0 --image=@picture.png": "not as large as the padded video",
    "--control-strength=1/0.9/0.91": "none of the 2 steps",
    "--steps=10 --control-strength=1/0/0.5 --taylorseer=2/0.2": "leave out step caching",
}


@pytest.mark.parametrize("arguments", REFUSED)
def test_what_does_not_fit_is_refused_before_work(folder: Path, tmp_path: Path, capsys, arguments: str) -> None:
    assert run(folder, "vace", tmp_path / "x.mp4", SIZE, *arguments.split()) == 2
    assert REFUSED[arguments] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        ("fun-control", "", "give --control-video"),
        ("fun-control", "--control-video=@video.mp4 --control-strength=0.5", "takes no strength of a control"),
        ("fun-control", "--control-video=@video.mp4 --last-image=@picture.png", "takes no --last-image"),
        ("camera", "", "give --camera"),
        ("camera", "--camera=zoom", "Motions: static, pan-left"),
        ("camera", "--camera=zoom-in:11", "speeds of 0 to 10"),
    ],
)
def test_other_families_refuse_what_they_do_not_take(folder, tmp_path, capsys, model, arguments, message) -> None:
    assert run(folder, model, tmp_path / "x.mp4", SIZE, *arguments.split()) == 2
    assert message in capsys.readouterr().err


@torch.no_grad()
def test_the_strength_of_a_part_of_the_run_counts_in_that_part_alone(folder: Path) -> None:
    """All of it, none of it, and the first steps of it: no two are equal, and strength 1 for all changes nothing."""
    pipe = loaded(folder, "vace")

    def latents_with(**control: float) -> Tensor:
        options = ControlOptions(**control) if control else None
        asked = request(folder, control_video="video.mp4", control=options)
        return pipe.generate(asked).latents

    whole, part, nothing = latents_with(), latents_with(end=0.5), latents_with(scale=0.0)
    assert torch.equal(whole, latents_with(scale=1.0))
    assert not torch.equal(part, whole) and not torch.equal(part, nothing) and not torch.equal(whole, nothing)
    video = request(folder, control_video="video.mp4", control=ControlOptions(end=0.5))
    assert [step.control for step in pipe.prepare(video).job.plan.steps] == [(1.0,), (0.0,)]
    with pytest.raises(OptionError, match="the end comes later"):
        ControlOptions(start=0.7, end=0.2)
