"""What drives S2V: a sound, a picture of who speaks, drawn poses, and the frames that were made before."""

from __future__ import annotations

from typing import Any

import torch
from comfy_api.latest import io
from torch import Tensor

from wan_core.config import OptionError
from wan_core.models.audio.wav2vec2 import SAMPLE_RATE
from wan_core.models.vae.config import VAE_21
from wan_core.models.wan.families.clips import Clip
from wan_core.models.wan.families.s2v import LEAST_SIDE, LONGER, MOTION_PIXELS, S2V
from wan_core.models.wan.families.s2v.inputs import VIDEO_RATE, comfy_extras, features_until, frames_of, motion_frames

from . import host
from .schema import output, schema
from .video_inputs import VideoInputs, check_room, conditioned_outputs, fields_of, size_inputs, text_and_vae

MAX_FRAMES = 401


def outputs() -> list[Any]:
    return [
        *conditioned_outputs(),
        output(io.Latent, "lead", "For LatentConcat (dim t), before the sampler's latents: they are decoded together."),
        output(io.Int, "trim_image", "Frames of `lead` after decoding: where ImageFromBatch begins."),
        output(
            io.Int,
            "new_frames",
            "Frames of this clip, or as many as are left of the sound: the length for ImageFromBatch.",
        ),
        output(io.Audio, "audio_out", "The sound up to the end of this clip, for Create Video. None without `audio`."),
    ]


class WanCoreSoundToVideo(io.ComfyNode):
    """Inputs of one clip of Wan2.2-S2V-14B."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "WanCoreSoundToVideo",
            "WanCore Sound to Video",
            aliases="wan s2v, sound to video, speech to video, audio, lip sync, talking",
            shows_text=True,
            description="What drives Wan2.2-S2V-14B: a picture of somebody who speaks or sings. One node for each clip "
            "of a long video. Made as the reference implementation makes it.",
            inputs=[
                *text_and_vae(),
                *size_inputs(
                    height=448,
                    frames=77,
                    least=(64, 5),
                    most=MAX_FRAMES,
                    tip="Of the first clip, a multiple of 4 plus 1; later clips have 3 more. The model was trained on "
                    "77, and makes 16 per second.",
                ),
                io.AudioEncoderOutput.Input(
                    "audio_encoder_output",
                    tooltip="The whole sound by AudioEncoderEncode (wav2vec2_large_english_fp16).",
                ),
                io.Image.Input("reference_image", tooltip="Who speaks. It fills the size; what sticks out is cut off."),
                io.Image.Input(
                    "pose_video",
                    optional=True,
                    tooltip="Drawn poses (skeletons) of the whole video, at 16 frames per second. After its end there "
                    "are none.",
                ),
                io.Image.Input(
                    "previous_frames",
                    optional=True,
                    tooltip="All frames that were made so far, where a long video goes on.",
                ),
                io.Audio.Input("audio", optional=True, tooltip="The sound itself, to be cut where this clip ends."),
            ],
            outputs=outputs(),
        )

    @classmethod
    def validate_inputs(cls, width: int | None = None, height: int | None = None, frames: int | None = None) -> bool:
        if width is not None and height is not None:
            check_least(width, height)
        return check_room(S2V, VAE_21, (width, height, frames), before_run=True)

    @classmethod
    def execute(
        cls,
        audio_encoder_output: dict[str, Any],
        reference_image: Tensor,
        pose_video: Tensor | None = None,
        previous_frames: Tensor | None = None,
        audio: dict[str, Any] | None = None,
        **shared: Any,
    ) -> io.NodeOutput:
        video = VideoInputs(**shared)
        check_least(*video.size)
        given = fields_of({"pose_video": pose_video, "carried": previous_frames})
        check_room(S2V, VAE_21, (*video.size, video.frames), given=given)
        clip, states = clip_of(video.frames, previous_frames), states_of(audio_encoder_output)
        frames_left = sound_frames(audio_encoder_output, states) - clip.first
        if frames_left < 1:
            raise OptionError(
                f"the sound ends after {frames_left + clip.first} frames, and {clip.first} were made already: leave "
                "this clip out"
            )
        pictures = {"reference": reference_image, "pose_video": pose_video}
        if previous_frames is not None:
            pictures["carried"] = motion_frames(previous_frames[..., :3])
        extras, lead = conditioned(video, clip, pictures, states)
        silent = {**extras, "audio_embed": torch.zeros_like(extras["audio_embed"])}
        new = min(frames_left, clip.frames)
        trimmed = MOTION_PIXELS if clip.number else 1 + LONGER
        before = {"samples": host.to_intermediate(lead)}
        return video.outputs(extras, silent, video.latent(), before, trimmed, new, cut(audio, clip.first + new))


def check_least(width: int, height: int) -> None:
    """Raises OptionError."""
    if min(width, height) < LEAST_SIDE:
        raise OptionError(f"{width}x{height} given; S2V needs {LEAST_SIDE} pixels and more in each direction")


def clip_of(frames: int, previous: Tensor | None) -> Clip:
    """The clip after the frames that were made: its own frames, in the whole video."""
    return Clip(0, 0, frames, 0) if previous is None else Clip(1, len(previous), frames + LONGER, 0)


def states_of(encoded: dict[str, Any]) -> Tensor:
    """The hidden states of the first sound in AUDIO_ENCODER_OUTPUT, [W, n, C]. Raises OptionError."""
    layers = encoded.get("encoded_audio_all_layers")
    if not layers:
        raise OptionError("audio_encoder_output has no layers: encode the sound with AudioEncoderEncode")
    return torch.stack([layer[0] for layer in layers]).float()


def sound_frames(encoded: dict[str, Any], states: Tensor) -> int:
    """Frames of a video that has all of the sound."""
    samples = encoded.get("audio_samples")
    return frames_of(states.shape[1]) if samples is None else -(-int(samples) * VIDEO_RATE // SAMPLE_RATE)


def conditioned(
    video: VideoInputs, clip: Clip, pictures: dict[str, Tensor | None], states: Tensor
) -> tuple[dict[str, Any], Tensor]:
    """The keys of CONDITIONING that a clip gives, and the latents before it."""
    driving = S2V.clips.driving(clip)
    own = {"reference": Clip(0, 0, 1, 0), "carried": Clip(0, 0, MOTION_PIXELS, 0)}
    media = {
        field: S2V.images_of(images, video.size, own.get(field, driving))
        for field, images in pictures.items()
        if images is not None
    }
    media["audio"] = features_until(states, driving)[..., driving.first :]
    return comfy_extras(video.encode, media, clip, VAE_21)


def cut(audio: dict[str, Any] | None, frames: int) -> dict[str, Any] | None:
    """ComfyUI's AUDIO up to the end of so many frames."""
    if audio is None:
        return None
    samples = -(-int(audio["sample_rate"]) * frames // VIDEO_RATE)
    return {**audio, "waveform": audio["waveform"][..., :samples]}
