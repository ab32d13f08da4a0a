"""S2V clip by clip: the official loop, lengths, restarts, and what is refused."""

from __future__ import annotations

import shutil
import wave
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from hypothesis import given as over
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file, save_file

from tests import s2v_loop as loop
from tests.animate_references import draw_weights
from tests.encoder_files import write_speech, write_vae
from tests.pipeline.test_clips import Stopped, stop_after
from wan_core.checkpoint.load import load_speech
from wan_core.cli import main
from wan_core.config import LoadOptions, OptionError, Request
from wan_core.execution.memory.planning import plan_memory
from wan_core.execution.report import GIB, Report
from wan_core.media.sound import read_sound
from wan_core.media.video import read_video
from wan_core.models.audio.wav2vec2 import XLSR_LARGE, SpeechEncoder
from wan_core.models.wan.families import FAMILIES, s2v
from wan_core.models.wan.families.clips import check_clips, cut_clips, whole_latents
from wan_core.models.wan.families.media import pixels_to_video
from wan_core.models.wan.families.s2v.inputs import comfy_extras, motion_frames
from wan_core.pipeline import clips as clips_module
from wan_core.pipeline import hearing, sources
from wan_core.pipeline.card_choice import task_memory
from wan_core.pipeline.encode import clip_media, condition, encode_text, load_media
from wan_core.pipeline.memory_planning import beside_plan
from wan_core.pipeline.pipeline import Pipeline
from wan_core.pipeline.run import Watch
from wan_core.pipeline.sources import TINY, find_models
from wan_core.sampling.conditioning import Conditioning
from wan_core.sampling.plan import make_plan

# One that hears so few states, of a small encoder.
SMALL = replace(loop.CONFIG, audio_layers=3, audio_dim=128)
FRAMES = loop.CLIP - 3  # of the first clip


def write_wav(path: Path, seconds: float, rate: int = 16000) -> Path:
    samples = np.random.default_rng(0).integers(-9000, 9000, int(seconds * rate), dtype=np.int16)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.tobytes())
    return path


def write_lossless(path: Path, frames: np.ndarray, fps: int) -> Path:
    with av.open(str(path), "w") as container:
        stream = container.add_stream("png", rate=fps)
        stream.height, stream.width, stream.pix_fmt = *frames.shape[1:3], "rgb24"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode(None))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    for name, config in {"large": loop.CONFIG, "small": SMALL}.items():
        save_file(draw_weights(config), folder / f"{name}.safetensors", {"num_heads": "2"})
    write_speech(folder / "wav2vec2.safetensors")
    write_vae(folder / "vae.safetensors")
    write_wav(folder / "speech.wav", loop.FRAMES / 16)
    Image.fromarray(loop.drawn_pictures(1, loop.SEED)[0]).save(folder / "reference.png")
    write_lossless(folder / "pose.avi", loop.drawn_pictures(loop.POSES, loop.SEED + 2), 16)
    return folder


def loaded(folder: Path, size: str = "small") -> Pipeline:
    parts = {"text_encoder": str(TINY / "text_encoder.safetensors")}
    parts["vae"] = str((TINY if size == "large" else folder) / "vae.safetensors")  # the official loop's is the embedded
    encoder = str(folder / "wav2vec2.safetensors")
    return Pipeline.load(
        LoadOptions(high=str(folder / f"{size}.safetensors"), audio_encoder=encoder, device="cpu", **parts)
    )


def request(folder: Path, **changed: object) -> Request:
    fields = {"prompt": "a red circle", "steps": loop.STEPS, "seed": loop.SEED, "clip_frames": FRAMES}
    fields |= {"width": loop.SIDE, "height": loop.SIDE, "shift": loop.SHIFT, "guidance_high": loop.GUIDANCE}
    fields |= {"reference": str(folder / "reference.png"), "audio": str(folder / "speech.wav")}
    return Request(**{**fields, **changed})


@pytest.fixture(scope="module")
def two_clips(folder: Path) -> np.ndarray:
    """Frames of a video of 20."""
    return loaded(folder).generate(request(folder, frames=20, steps=1)).frames


def test_three_clips_equal_the_official_loop(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same states of the speech encoder and the same rows of text."""
    expected = load_file(loop.KEPT)
    rows = [text[None] for text in loop.drawn_texts()]
    monkeypatch.setattr(hearing, "encoded", lambda *_: loop.drawn_states())
    monkeypatch.setattr(sources, "recognise_speech", lambda *_: sources.random_part(XLSR_LARGE, 0))
    pipe = loaded(folder, "large")
    monkeypatch.setattr(clips_module, "encode_text", lambda run: Conditioning(cond=rows[0], uncond=rows[1]))
    video_run = pipe.generate(request(folder, pose_video=str(folder / "pose.avi")))
    assert len(pipe.prepare(request(folder)).job.clips) == loop.CLIPS and len(video_run.frames) == loop.FRAMES
    normalised = pipe.models.vae().normalise(video_run.latents)
    latents = torch.cat(list(expected["latents pose"]), 1)[None]
    assert float((normalised - latents).norm() / latents.norm()) < 1e-3
    video = torch.from_numpy(video_run.frames).permute(3, 0, 1, 2) / 127.5 - 1
    assert float((loop.spots(video) - expected["frames pose"]).abs().max()) < 0.01


@pytest.mark.parametrize("number", [0, 1])
@torch.no_grad()
def test_the_conditioning_of_nodes_is_the_pipelines(folder: Path, number: int) -> None:
    """ComfyUI's keys, made of the media of a clip, and read again."""
    pipe = loaded(folder)
    run = pipe.prepare(request(folder, frames=20, pose_video=str(folder / "pose.avi")))
    clip, media = run.job.clips[number], load_media(run)
    before = torch.rand(7, loop.SIDE, loop.SIDE, 3)
    pixels = pixels_to_video(motion_frames(before)) if number else None
    media_of_clip = clip_media(run, clip, media, pixels)
    expected = condition(run, clip, media_of_clip, encode_text(run))
    vae = pipe.models.vae()
    extras, lead = comfy_extras(vae.encode, media_of_clip, clip, vae.config)
    latent = {"samples": torch.zeros(run.job.clip_shape(clip))}
    read = FAMILIES["s2v"].read_conditioning(run.job.task, vae.config, extras, latent)
    assert read["inputs"].keys() == expected.inputs.keys() >= {"audio", "reference", "pose"}
    for name, value in expected.inputs.items():
        torch.testing.assert_close(read["inputs"][name], value)
    torch.testing.assert_close(lead, media_of_clip["lead"])
    assert (pixels is None) == ("motion" not in expected.inputs) and not expected.uncond_inputs["audio"].any()
    without = {name: one for name, one in media_of_clip.items() if name != "pose_video"}
    extras, _ = comfy_extras(vae.encode, without, clip, vae.config)
    nothing = FAMILIES["s2v"].read_conditioning(run.job.task, vae.config, extras, latent)["inputs"]["pose"]
    assert nothing.shape == expected.inputs["pose"].shape and nothing.abs().max() < 1e-5


# ------------------------------------------------------------------------------------------------------------- lengths


@over(frames=st.integers(1, 1000), clip=st.integers(1, 30).map(lambda n: 4 * n + 1))
def test_clips_cover_every_frame_once_and_hear_it(frames: int, clip: int) -> None:
    rules = s2v.S2V.clips
    if clip >= 5:
        check_clips(rules, clip, 0, "s2v-14B")
    clips = cut_clips(rules, frames, clip, 0)
    assert [n for one in clips for n in range(one.first, one.end)] == list(range(clips[-1].end))
    assert clips[-1].first < frames <= clips[-1].end
    first = clip if frames > clip else whole_latents(frames)
    assert [one.frames for one in clips] == [first, *[clip + 3] * (len(clips) - 1)]
    heard = [rules.driving(one) for one in clips]
    assert [(one.first, one.frames) for one in heard] == [
        (n * (clip + 3), one.frames + 3 * (not n)) for n, one in enumerate(clips)
    ]


@over(samples=st.integers(1600, 400_000), rate=st.sampled_from([8000, 16000, 44100, 48000]))
def test_a_video_is_as_long_as_its_sound(samples: int, rate: int) -> None:
    fields = {"reference": "r", "audio": "a"}
    with pytest.MonkeyPatch.context() as patch:
        from wan_core.media import sound

        patch.setattr(sound, "read_sound", lambda path: sound.Sound(np.zeros((1, samples), np.float32), rate))
        if samples / rate < s2v.LEAST_SECONDS:
            with pytest.raises(OptionError, match="seconds of sound"):
                s2v.S2V.whole_length(Request(prompt="", **fields), s2v.S2V.tasks[0])
            return
        fps, frames = s2v.S2V.whole_length(Request(prompt="", **fields), s2v.S2V.tasks[0])
    assert fps == 16 and 0 <= frames / fps - samples / rate < 1 / fps


def test_the_file_has_the_sound_and_its_length(folder: Path, tmp_path: Path) -> None:
    out, speech = tmp_path / "video.mp4", write_wav(tmp_path / "speech.wav", 20 / 16)
    parts = [f"--text-encoder={TINY / 'text_encoder.safetensors'}", f"--vae={folder / 'vae.safetensors'}"]
    arguments = ["generate", f"--high={folder / 'small.safetensors'}", *parts, "--prompt=a red circle", "--steps=1"]
    arguments += [f"--audio-encoder={folder / 'wav2vec2.safetensors'}", f"--audio={speech}"]
    arguments += [f"--reference={folder / 'reference.png'}", "--size=64x64", "--guidance=1", f"--clip-frames={FRAMES}"]
    assert main([*arguments, f"--out={out}", "--device=cpu"]) == 0
    assert len(read_video(out)) == 20
    sound = read_sound(out)
    assert abs(sound.seconds - 20 / 16) <= 1 / 16
    spoken = read_sound(speech).samples[0]
    both = min(len(spoken), sound.samples.shape[1])
    assert np.corrcoef(spoken[:both], sound.samples[0, :both])[0, 1] > 0.9  # it begins where the video begins


def test_every_part_of_the_sound_counts_where_it_is_heard(folder: Path, two_clips: np.ndarray) -> None:
    """Another sound after the first clip changes the second, and not the first."""
    pipe, asked, heard = loaded(folder), request(folder, frames=20, steps=1), hearing.encoded

    def changed(*arguments: object) -> torch.Tensor:
        states = heard(*arguments)
        states[:, int(1.1 * 50) :] += 1
        return states

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hearing, "encoded", changed)
        second = pipe.generate(asked).frames
    assert np.array_equal(two_clips[:13], second[:13]) and not np.array_equal(two_clips[13:], second[13:])


def test_a_sound_that_the_device_has_no_memory_for_is_encoded_on_the_cpu(folder: Path) -> None:
    def load(device: torch.device, *_: object) -> SpeechEncoder:
        if device.type != "cpu":
            raise torch.OutOfMemoryError
        return load_speech(folder / "wav2vec2.safetensors")

    report, samples = Report(torch.device("cpu")), torch.randn(1, 8000)
    states = hearing.encoded(
        replace(sources.random_part(XLSR_LARGE, 0), load=load), samples, torch.device("cuda"), report
    )
    assert torch.equal(states, load(torch.device("cpu"))(samples)[0])
    assert any("encoded on the CPU" in note for note in report.notes)


def test_models_make_room_for_the_encoder_of_sound(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the second video, where models of the first are on the device: what streams there leaves it."""
    parts = {"text_encoder": str(TINY / "text_encoder.safetensors"), "vae": str(folder / "vae.safetensors")}
    parts |= {"high": str(folder / "small.safetensors"), "audio_encoder": str(folder / "wav2vec2.safetensors")}
    pipe = Pipeline.load(LoadOptions(device="cpu", residency="stream", **parts))
    held_bytes: list[list[int]] = []
    make_room, encoded = pipe.models.residency.make_room, hearing.encoded
    stages = pipe.models.residency.stages

    def note(step):
        def run(*arguments):
            held_bytes.append([stage.held for stage in stages.values()])
            return step(*arguments)

        return run

    monkeypatch.setattr(pipe.models.residency, "make_room", note(make_room))
    monkeypatch.setattr(hearing, "encoded", note(encoded))
    videos = [pipe.generate(request(folder, frames=5, steps=1)).frames for _ in range(2)]
    assert any(held_bytes[2]) and not any(held_bytes[3]) and np.array_equal(*videos)


def test_the_memory_plan_counts_the_sound() -> None:
    """A long sound takes more than anything else; its encoder counts for a short one, too."""
    options = LoadOptions(model="random:s2v-14B", precision="bf16")
    models = find_models(options)
    assert models.speech is not None
    plan = make_plan(task="s2v-14B", steps=4)
    plans = [replace(plan, latent_shape=(1, 16, 20, 60, 104), image=True, seconds=n) for n in (0, 5, 600)]
    silent, short, long = (beside_plan(models, one, 5.05, 2) for one in plans)
    with torch.device("meta"):
        on_meta = SpeechEncoder(XLSR_LARGE)
    weights = 4 * sum(p.numel() for p in on_meta.parameters())
    assert silent.sound == 0 and weights < short.sound < 1.5 * weights
    assert silent.most == short.most < long.most == long.sound
    sizes, task = task_memory(options, Request(prompt=""))
    assert weights < task.sound < 1.5 * weights
    assert "encode audio" in plan_memory(sizes, task, 80 * GIB).table()
    room = int((sizes.all + silent.most) * 1.05 + GIB)
    assert [plan_memory(sizes, activations, room).policy for activations in (short, long)] == ["resident", "swap"]


# ------------------------------------------------------------------------------------------------- restarts and faults


def test_an_interrupted_run_goes_on_after_its_last_clip(folder: Path, tmp_path: Path, two_clips: np.ndarray) -> None:
    asked, clips_folder = request(folder, frames=20, steps=1), tmp_path / "x.clips"
    stop_after(loaded(folder), asked, 1, clips_folder)
    assert len(list(clips_folder.iterdir())) == 1
    ran = []
    again = loaded(folder).generate(
        asked, Watch(step=lambda progress, _: ran.append(progress.clip), keep_clips=clips_folder)
    )
    assert set(ran) == {(2, 2)} and np.array_equal(again.frames, two_clips)
    write_wav(folder / "other.wav", loop.FRAMES / 16, rate=8000)
    other, pipe = request(folder, audio=str(folder / "other.wav"), frames=20, steps=1), loaded(folder)
    with pytest.raises(Stopped):  # the sound is another: nothing of it is kept
        pipe.generate(other, Watch(step=lambda progress, _: stop(progress), keep_clips=clips_folder))


def stop(progress: object) -> None:
    assert progress.clip == (1, 2)  # type: ignore[attr-defined]
    raise Stopped


def test_what_does_not_belong_together_is_refused(folder: Path) -> None:
    pipe = loaded(folder)
    write_wav(folder / "short.wav", 0.05)
    for changed, message in (
        ({"audio": None}, "makes a video of a reference and audio: give --audio"),
        ({"reference": None}, "give --reference"),
        ({"face_video": "x.mp4"}, "does not take --face-video"),
        ({"image": "x.png"}, "takes no --image"),
        ({"fps": 24}, "makes 16: leave --fps out"),
        ({"frames": 46}, "has 45 frames"),
        ({"audio": str(folder / "reference.png")}, "it is none of WAV"),
        ({"audio": str(folder / "short.wav")}, "0.050 seconds of sound"),
        ({"width": 48}, "needs 64 pixels"),
        ({"overlap": 1}, "begin with 0 frames"),
        ({"clip_frames": 16}, "4n \\+ 1 frames"),
    ):
        with pytest.raises(OptionError, match=message):
            pipe.prepare(request(folder, **changed))
    assert pipe.prepare(request(folder, frames=3)).job.frames == 3
    resolved = pipe.prepare(request(folder, width=None, height=None)).job
    assert resolved.width % 64 == resolved.height % 64 == 0


def test_the_encoder_of_sound_is_checked_before_anything_is_read(folder: Path, tmp_path: Path) -> None:
    def find(**changed: object) -> Callable[[], object]:
        parts = {name: str(TINY / f"{name}.safetensors") for name in ("text_encoder", "vae")}
        paths = {"high": str(folder / "small.safetensors"), **parts, **changed}
        return lambda: find_models(LoadOptions(**paths))

    for changed, message in (
        ({}, "add --audio-encoder FILE"),
        (
            {"audio_encoder": str(folder / "wav2vec2.safetensors"), "high": str(folder / "large.safetensors")},
            "2 layers, 128 wide; the transformer needs 24 layers, 1024 wide",
        ),
        ({"audio_encoder": str(folder / "small.safetensors")}, "a wav2vec 2.0 speech encoder is expected here"),
    ):
        with pytest.raises((OptionError, ValueError), match=message):
            find(**changed)()
    with pytest.raises(OptionError, match="takes no sound: remove --audio-encoder"):
        find_models(LoadOptions(model="tiny", audio_encoder=str(folder / "wav2vec2.safetensors")))
    for embedded_name, name in (
        ("t2v_high", "high_noise_model"),
        ("t2v_low", "low_noise_model"),
        ("text_encoder", "text_encoder"),
        ("vae", "vae"),
    ):
        shutil.copy(TINY / f"{embedded_name}.safetensors", tmp_path / f"{name}.safetensors")
    shutil.copy(folder / "wav2vec2.safetensors", tmp_path / "wav2vec2_large.safetensors")  # beside other models
    assert find_models(LoadOptions(model=str(tmp_path))).speech is None
    tiny = Pipeline.load(LoadOptions(model="tiny", device="cpu"))
    with pytest.raises(OptionError, match="t2v-tiny does not take --audio"):
        tiny.prepare(Request(prompt="a", audio=str(folder / "speech.wav")))
