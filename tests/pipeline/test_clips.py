"""Long videos in clips: the loop against references written out here, restarts, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

from tests.animate_references import SMALL, draw_weights
from tests.denoised import denoise
from tests.encoder_files import write_vision
from wan_core.cli import main
from wan_core.config import LoadOptions, OptionError, Request
from wan_core.media.mp4 import write_mp4
from wan_core.media.video import read_video, video_facts
from wan_core.models.wan.families import FAMILIES
from wan_core.models.wan.families.animate import AnimateConfig
from wan_core.models.wan.families.animate.inputs import comfy_extras
from wan_core.models.wan.families.animate2 import Animate2Config, padded_frames
from wan_core.models.wan.families.clips import cut_clips
from wan_core.models.wan.families.wan import SVI_CLIPS
from wan_core.pipeline.clips import ClipRun, remove_kept, run_key
from wan_core.pipeline.encode import clip_media, condition, encode_text, load_media
from wan_core.pipeline.pipeline import Pipeline, Result
from wan_core.pipeline.run import Watch
from wan_core.pipeline.sources import TINY
from wan_core.sampling.conditioning import Conditioning

TEXT = {"text_dim": 64, "num_heads": 2, "num_layers": 2}
CONFIGS = {
    "animate": AnimateConfig(
        **{**SMALL, **TEXT, "dim": 64}, motion_channels=(4, 6, 8), motion_features=12, motion_directions=5,
        face_hidden=16,
    ),
    "animate2": Animate2Config(**{**SMALL, **TEXT, "dim": 64}),
}  # fmt: skip
WIDTH, HEIGHT = 48, 32


def drawn(frames: int, height: int, width: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (frames, height, width, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("driven")
    for family, config in CONFIGS.items():
        metadata = {"num_heads": "2", **FAMILIES[family].metadata}
        save_file(draw_weights(config), folder / f"{family}.safetensors", metadata)
    write_vision(folder / "clip_vision_h.safetensors")
    Image.fromarray(drawn(1, 40, 30, 0)[0]).save(folder / "reference.png")
    for name, seed, fps in (("pose", 1, 24), ("background", 2, 24), ("mask", 3, 24)):
        write_mp4(folder / f"{name}.mp4", drawn(21, HEIGHT, WIDTH, seed), fps=fps)
    write_mp4(folder / "face.mp4", drawn(19, 16, 16, 4), fps=24)
    return folder


def loaded(folder: Path, family: str) -> Pipeline:
    parts = {name: str(TINY / f"{name}.safetensors") for name in ("text_encoder", "vae")}
    clip = str(folder / "clip_vision_h.safetensors")
    high = str(folder / f"{family}.safetensors")
    return Pipeline.load(LoadOptions(high=high, clip_vision=clip, device="cpu", **parts))


def request(folder: Path, family: str, *, replaced: bool = False, **changed: object) -> Request:
    media = {"reference": folder / "reference.png", "pose_video": folder / "pose.mp4"}
    if family == "animate":
        media["face_video"] = folder / "face.mp4"
    if replaced:
        media |= {"background": folder / "background.mp4", "mask": folder / "mask.mp4"}
    fields = {"prompt": "a red circle", "steps": 2, "seed": 3, "clip_frames": 9, "width": WIDTH, "height": HEIGHT}
    fields |= {"guidance_high": 1.5, "guidance_low": 1.5, "frames": 20}
    return Request(**{**fields, **{name: str(path) for name, path in media.items()}, **changed})


# ------------------------------------------------------------------------------------------------- the reference loop


def in_pixels(frames: np.ndarray) -> Tensor:
    return torch.from_numpy(frames.astype(np.float64) / 127.5 - 1).float().permute(3, 0, 1, 2)[None]


def to_and_fro(frames: np.ndarray, length: int) -> np.ndarray:
    """The count of `inputs_padding` in Wan2.2/wan/animate.py."""
    repeated, index, step = [], 0, 1
    while len(repeated) < length:
        repeated.append(frames[index])
        if not 0 <= index + step < len(frames):
            step = -step
        index += step
    return np.stack(repeated)


def mask_of(known_pixels: Tensor) -> Tensor:
    """[F, Y, X] -> [1, 4, T, Y, X], frame by frame."""
    T = (len(known_pixels) - 1) // 4 + 1
    mask = torch.zeros(1, 4, T, *known_pixels.shape[1:])
    for latent in range(T):
        for channel in range(4):
            mask[0, channel, latent] = known_pixels[0 if latent == 0 else 4 * latent - 3 + channel]
    return mask


def reference_loop(pipe: Pipeline, asked: Request, reference: np.ndarray, videos: dict[str, np.ndarray]) -> np.ndarray:
    """The official loops, written out: Animate with refert_num, Animate-2 with one frame of overlap. videos are as long
    as all clips together. Returns frames [F, H, W, 3] in 0..255, not rounded."""
    two, overlap, F = pipe.models.task.family == "animate2", asked.overlap or 1, asked.clip_frames
    assert F is not None
    vae, vision, run = pipe.models.vae(), pipe.models.clip_vision(), pipe.prepare(asked)
    model = pipe.models.expert("high")
    text = encode_text(run)
    generator = torch.Generator().manual_seed(asked.seed)
    picture, clips, start, last = in_pixels(reference), [], 0, None
    Y, X = HEIGHT // 8, WIDTH // 8
    total = len(videos["pose"])
    while start + overlap < total:
        stop = min(start + F, total)
        clip = {name: in_pixels(video[start:stop]) for name, video in videos.items()}
        length, T = stop - start, (stop - start - 1) // 4 + 1
        noise = torch.randn(1, 16, T + 1, Y, X, generator=generator)
        seen, known_pixels = torch.zeros(1, 3, length, HEIGHT, WIDTH), torch.zeros(length, Y, X)
        if "mask" in clip:
            seen = clip["background"].clone()
            person = (clip["mask"][0, :1] + 1) / 2
            known_pixels = (
                1 - torch.nn.functional.interpolate(person.transpose(0, 1), size=(Y, X), mode="nearest")[:, 0]
            )
        if last is not None:
            seen[:, :, :overlap], known_pixels[:overlap] = last, 1
        first = torch.cat([torch.ones(1, 4, 1, Y, X), vae.normalise(vae.encode(picture))], 1)
        channels = torch.cat([mask_of(known_pixels), vae.normalise(vae.encode(seen))], 1)
        pose = vae.normalise(vae.encode(clip["pose"]))
        if two:
            inputs = {"pose": torch.cat([pose, torch.ones_like(pose[:, :4]), pose], 1), "unconditional": False}
            inputs |= {"pose_image": vision(clip["pose"][:, :, 0]), "log_scale": 0.0, "pose_context": text.cond}
            without = {"unconditional": True}
        else:
            inputs = {"pose": pose, "face": clip["face"]}
            without = {"face": torch.full_like(clip["face"], -1)}
        conditioning = Conditioning(
            cond=text.cond, uncond=text.uncond, concat=torch.cat([first, channels], 2),
            image_features=vision(picture[:, :, 0]), inputs=inputs, uncond_inputs=without,
        )  # fmt: skip
        latents = denoise(run.job.plan, lambda _: model, conditioning, noise)
        frames = vae.decode(vae.denormalise(latents)[:, :, 1:]).float()
        last = frames[:, :, -overlap:]
        clips.append(frames if start == 0 else frames[:, :, overlap:])
        start += length - overlap
    whole = torch.cat(clips, 2)[0, :, : asked.frames].permute(1, 2, 3, 0)
    return ((whole + 1) * 127.5).numpy()


@pytest.mark.parametrize(
    ("family", "overlap", "replaced"),
    [("animate", 1, False), ("animate", 5, True), ("animate2", 1, False)],
)
@torch.no_grad()
def test_clips_equal_the_reference_loop(folder: Path, family: str, overlap: int, replaced: bool) -> None:
    """Media that need no fitting: everything has the size of the video."""
    pipe, picture = loaded(folder, family), drawn(1, HEIGHT, WIDTH, 9)
    Image.fromarray(picture[0]).save(folder / "same.png")
    asked = request(folder, family, replaced=replaced, overlap=overlap, reference=str(folder / "same.png"))
    if family == "animate2":  # 20 frames are padded to 29; a clip of nothing but padding is not made
        padded = 29
    else:
        padded = overlap + -(-(20 - overlap) // (9 - overlap)) * (9 - overlap)
    names = ["pose", *["face"] * (family == "animate"), *["background", "mask"] * replaced]
    videos = {name: to_and_fro(read_video(folder / f"{name}.mp4"), padded) for name in names}
    result = pipe.generate(asked)
    expected = reference_loop(pipe, asked, picture, videos)
    assert len(pipe.prepare(asked).job.clips) == (4 if overlap == 5 else 3)
    assert result.frames.shape == (20, HEIGHT, WIDTH, 3)
    assert np.abs(result.frames - expected).max() <= 0.5 + 0.05  # rounded to whole numbers


# ------------------------------------------------------------------------------------------------------ image to video


@torch.no_grad()
@pytest.mark.parametrize("overlap", [1, 5])
def test_image_to_video_goes_on_from_its_last_frames(folder: Path, overlap: int) -> None:
    """Clip 2 of the embedded model equals its own image-to-video from the last frames of clip 1."""
    pipe = Pipeline.load(LoadOptions(model="tiny", task="i2v-tiny", device="cpu"))
    asked = Request(
        prompt="a red circle", image=str(folder / "reference.png"), steps=2, width=WIDTH, height=HEIGHT, seed=1
    )
    long = replace(asked, frames=13, clip_frames=9, overlap=overlap)
    long_video = pipe.generate(long)
    first = pipe.generate(replace(asked, frames=9))
    assert np.array_equal(long_video.frames[:9], first.frames)
    vae, run = pipe.models.vae(), pipe.prepare(long)
    tail = vae.decode(first.latents).float()[:, :, -overlap:]
    video, known_pixels = torch.zeros(1, 3, 9, HEIGHT, WIDTH), torch.zeros(9, HEIGHT // 8, WIDTH // 8)
    video[:, :, :overlap], known_pixels[:overlap] = tail, 1
    concat = torch.cat([mask_of(known_pixels), vae.normalise(vae.encode(video))], 1)
    latents = pipe.sample(run, replace(encode_text(run), concat=concat), clip=1)
    second = (vae.decode(latents)[0, :, overlap : overlap + 4].permute(1, 2, 3, 0).float() + 1) * 127.5
    assert np.abs(long_video.frames[9:] - second.numpy()).max() <= 0.55


def test_what_cannot_be_cut_is_refused(folder: Path) -> None:
    pipe = Pipeline.load(LoadOptions(model="tiny", task="t2v-tiny", device="cpu"))
    asked = Request(prompt="a red circle", steps=2, width=WIDTH, height=HEIGHT, frames=13)
    for changed, message in (
        ({"clip_frames": 9}, "needs an image-to-video model"),
        ({"overlap": 1}, "give --clip-frames as well"),
        ({"pose_video": "x.mp4"}, "does not take --pose-video"),
    ):
        with pytest.raises(OptionError, match=message):
            pipe.prepare(replace(asked, **changed))
    pipe = loaded(folder, "animate")
    asked = request(folder, "animate")
    for changed, message in (
        ({"clip_frames": 10}, "4n \\+ 1 frames"),
        ({"overlap": 3}, "begin with 1 or 5 frames"),
        ({"overlap": 5, "clip_frames": 5}, "more than the overlap"),
        ({"reference": None}, "give --reference"),
        ({"mask": "x.mp4"}, "only one of --background and --mask"),
        ({"image": "x.png"}, "takes no --image"),
        ({"frames": 22}, "has 21 frames"),
        ({"pose_video": str(folder / "reference.png")}, "cannot read"),
        ({"face_video": str(folder / "none.mp4")}, "none.mp4"),
    ):
        with pytest.raises(OptionError, match=message):
            pipe.prepare(replace(asked, **changed))
    with pytest.raises(OptionError, match="does not take --face-video"):
        loaded(folder, "animate2").prepare(asked)


@pytest.mark.parametrize("overlap", [1, 5])
def test_clips_cover_every_frame_once(overlap: int) -> None:
    for rules in (*(FAMILIES[family].clips for family in ("animate", "animate2", "wan", "vace")), SVI_CLIPS):
        for frames in range(1, 200):
            clips = cut_clips(rules, frames, 33, overlap)
            new = [n for clip in clips for n in range(clip.first + clip.carried, clip.end)]
            assert new == list(range(len(new))) and len(new) >= frames
            assert clips[-1].first + clips[-1].carried < frames  # none is all padding
            assert all(clip.frames % 4 == 1 and clip.frames <= 33 for clip in clips)
            if frames <= 33 and rules.padded is not padded_frames:  # LightX2V's Animate-2 has none of under 29
                assert [clip.frames for clip in clips] == [frames + -(frames - 1) % 4]


@pytest.mark.parametrize("family", CONFIGS)
@torch.no_grad()
def test_the_conditioning_of_nodes_is_the_pipelines(folder: Path, family: str) -> None:
    """ComfyUI's keys, made of the media of the second clip, and read again."""
    pipe, asked = loaded(folder, family), request(folder, family, replaced=family == "animate")
    run = pipe.prepare(asked)
    clip, media = run.job.clips[1], load_media(run)
    assert media is not None
    pixels = clip_media(run, clip, media, torch.rand(1, 3, 1, HEIGHT, WIDTH) * 2 - 1)
    expected = condition(run, clip, pixels, encode_text(run))
    vae = pipe.models.vae()
    extras = comfy_extras(vae.encode, pixels, clip, vae.config)
    seen = SimpleNamespace(penultimate_hidden_states=expected.image_features)
    latent = {"samples": torch.zeros(run.job.clip_shape(clip))}
    read = FAMILIES[family].read_conditioning(run.job.task, vae.config, {**extras, "clip_vision_output": seen}, latent)
    torch.testing.assert_close(read["concat"], expected.concat)
    for name in {"pose", "face"} & set(expected.inputs):
        torch.testing.assert_close(read["inputs"][name], expected.inputs[name])


# ------------------------------------------------------------------------------------------------------------- restart


class Stopped(Exception):
    pass


def stop_after(pipe: Pipeline, asked: Request, clips: int, clips_folder: Path) -> None:
    """Run until the first step of the clip after so many."""

    def on_step(progress, seconds):
        if progress.clip[0] > clips:
            raise Stopped

    with pytest.raises(Stopped):
        pipe.generate(asked, Watch(step=on_step, keep_clips=clips_folder))


@pytest.fixture(scope="module")
def uninterrupted(folder: Path) -> Callable[[str], Result]:
    """The whole video of a family's request."""
    return cache(lambda family: loaded(folder, family).generate(request(folder, family)))


@pytest.mark.parametrize("family", CONFIGS)
def test_an_interrupted_run_goes_on_after_its_last_clip(
    folder: Path, tmp_path: Path, uninterrupted: Callable[[str], Result], family: str
) -> None:
    asked, clips_folder = request(folder, family), tmp_path / "x.clips"
    whole = uninterrupted(family)
    stop_after(loaded(folder, family), asked, 2, clips_folder)
    assert len(list(clips_folder.iterdir())) == 2
    ran = []
    pipe = loaded(folder, family)
    again = pipe.generate(asked, Watch(step=lambda progress, _: ran.append(progress.clip), keep_clips=clips_folder))
    assert set(ran) == {(3, 3)}
    assert np.array_equal(again.frames, whole.frames) and torch.equal(again.latents, whole.latents)
    assert sum("was finished by an earlier run" in note for note in again.report.notes) == 2
    remove_kept(again.kept_clips)
    assert not clips_folder.exists()


def test_another_models_clips_are_not_used(folder: Path, tmp_path: Path) -> None:
    """Files of the same name and size, changed since: the weights, or a driving video."""
    asked, pipe = request(folder, "animate"), loaded(folder, "animate")
    run = pipe.prepare(asked)
    key = run_key(run)
    assert run_key(pipe.prepare(asked)) == key
    other = tmp_path / "pose.mp4"
    write_mp4(other, drawn(21, HEIGHT, WIDTH, 11), fps=24)
    assert run_key(pipe.prepare(replace(asked, pose_video=str(other)))) != key
    path = folder / "animate.safetensors"
    path.touch()
    assert run_key(pipe.prepare(asked)) != key


# -------------------------------------------------------------------------------------------------------- command line


def arguments(folder: Path, family: str, out: Path, *more: str) -> list[str]:
    parts = {name: str(TINY / f"{name}.safetensors") for name in ("text_encoder", "vae")}
    options = {"--high": folder / f"{family}.safetensors", "--text-encoder": parts["text_encoder"]}
    options |= {"--vae": parts["vae"], "--clip-vision": folder / "clip_vision_h.safetensors", "--out": out}
    options |= {
        "--reference": folder / "reference.png",
        "--pose-video": folder / "pose.mp4",
        "--prompt": "a red circle",
    }
    flags = [str(word) for pair in options.items() for word in pair]
    return ["generate", *flags, "--steps", "1", "--guidance", "1", "--clip-frames", "9", "--size", "48x32", *more]


def test_the_command_line_goes_on_from_kept_clips(folder: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(ClipRun, "note_kept", interrupted)
    out, more = tmp_path / "x.mp4", ("--face-video", str(folder / "face.mp4"), "--device", "cpu")
    assert main(arguments(folder, "animate", out, *more)) == 130
    out.unlink(missing_ok=True)
    assert "what was finished is in" in (told := capsys.readouterr().err) and "clip 2/3  step   1/1" in told
    monkeypatch.undo()
    assert main(arguments(folder, "animate", out, *more)) == 0
    assert "clip 3 was finished by an earlier run" in capsys.readouterr().out
    assert read_video(out).shape == (21, 32, 48, 3) and video_facts(out).fps == 24
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.mp4"]


def interrupted(_: object) -> None:
    raise KeyboardInterrupt
