"""What drives Animate and Animate-2: pictures of the reference, the motion, the face and the background."""

from __future__ import annotations

from typing import Any

import torch
from comfy_api.latest import io
from torch import Tensor

from wan_core.config import OptionError
from wan_core.models.vae.config import VAE_21
from wan_core.models.wan.families.animate import ANIMATE, ANIMATE_14B
from wan_core.models.wan.families.animate.inputs import comfy_extras
from wan_core.models.wan.families.animate2 import ANIMATE2
from wan_core.models.wan.families.clips import Clip, check_clips
from wan_core.models.wan.families.driven import DrivenFamily

from .schema import ADVANCED, output, schema
from .sockets import CONDITIONING
from .video_inputs import VideoInputs, check_room, conditioned_outputs, fields_of, size_inputs, text_and_vae

MAX_FRAMES = 401
FACE = (ANIMATE_14B.face_size, ANIMATE_14B.face_size)
PREVIOUS = (
    "All frames that were made so far, where a long video goes on: the clip begins with the last of them, and the "
    "driving pictures are read from there."
)


def shared_inputs(frames: int, motion: str) -> list[Any]:
    """The required inputs. frames: of a clip, as the model was trained. motion: what the driving pictures are."""
    return [
        *text_and_vae(),
        *size_inputs(
            frames=frames,
            least=(16, 5),
            most=MAX_FRAMES,
            tip=f"Of this clip, a multiple of 4 plus 1. The model was trained on {frames}.",
        ),
        io.Image.Input("reference_image", tooltip="Who moves. Fitted into the size, with black bars."),
        io.Image.Input(
            "pose_video",
            tooltip=f"{motion} Fitted into the size; a video that is too short is played to and fro.",
        ),
    ]


def outputs() -> list[Any]:
    return [
        *conditioned_outputs("For the sampler. The reference is its first frame."),
        output(
            io.Int,
            "trim_latent",
            "Latent frames of the reference before the video: for TrimVideoLatent, before decoding.",
        ),
        output(
            io.Int,
            "trim_image",
            "Frames that the clip has from previous_frames: remove so many first frames after decoding.",
        ),
    ]


def strength(name: str, of: str) -> Any:
    return io.Float.Input(
        name,
        **ADVANCED,
        default=1.0,
        min=0.0,
        max=10.0,
        step=0.01,
        optional=True,
        tooltip=f"How strongly the {of} counts.",
    )


def clip_of(family: DrivenFamily, frames: int, previous: Tensor | None, overlap: int) -> Clip:
    """Raises OptionError."""
    check_clips(family.clips, frames, overlap, family.tasks[0].name)
    carried = 0 if previous is None else min(overlap, len(previous))
    return Clip(0, 0 if previous is None else len(previous) - carried, frames, carried)


def conditioned(
    family: DrivenFamily, video: VideoInputs, clip: Clip, pictures: dict[str, Tensor | None]
) -> dict[str, Any]:
    """The keys of CONDITIONING that pictures of these fields give."""
    check_room(family, VAE_21, (*video.size, clip.frames), given=fields_of(pictures))
    own = {"reference": Clip(0, 0, 1, 0), "carried": Clip(0, 0, clip.carried, 0)}
    media = {
        field: family.images_of(images, FACE if field == "face_video" else video.size, own.get(field, clip))
        for field, images in pictures.items()
        if images is not None
    }
    return comfy_extras(video.encode, media, clip, VAE_21)


def tail(previous: Tensor | None, clip: Clip) -> Tensor | None:
    return previous[-clip.carried :] if previous is not None and clip.carried else None


class WanCoreAnimate(io.ComfyNode):
    """Inputs of Wan2.2-Animate-14B."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "WanCoreAnimate",
            "WanCore Animate",
            aliases="wan animate, pose video, character replacement, wan animate to video",
            shows_text=True,
            description="What drives Wan2.2-Animate-14B: a picture moves as drawn poses and a face do, alone or in the "
            "place of a person in a video. Made as the reference implementation makes it.",
            inputs=[
                *shared_inputs(77, "Drawn poses (skeletons)."),
                io.Image.Input("face_video", optional=True, tooltip="A face whose expression is followed, cut out."),
                io.Image.Input(
                    "background_video", optional=True, tooltip="A video in which the reference replaces a person."
                ),
                io.Mask.Input("character_mask", optional=True, tooltip="Where that person is, for each frame."),
                io.ClipVisionOutput.Input(
                    "clip_vision_output",
                    optional=True,
                    tooltip="What CLIPVisionEncode (clip_vision_h, crop none) sees in the reference image.",
                ),
                io.Image.Input("previous_frames", optional=True, tooltip=PREVIOUS),
                io.Int.Input(
                    "overlap",
                    default=1,
                    min=1,
                    max=5,
                    step=4,
                    optional=True,
                    tooltip="How many of previous_frames the clip begins with: 1 or 5.",
                ),
                io.Boolean.Input(
                    "face_guidance",
                    **ADVANCED,
                    default=True,
                    optional=True,
                    tooltip="Where guidance is above 1, it also leads away from a still face. Off: from the negative "
                    "prompt alone.",
                ),
            ],
            outputs=outputs(),
        )

    @classmethod
    def validate_inputs(
        cls,
        width: int | None = None,
        height: int | None = None,
        frames: int | None = None,
        overlap: int | None = 1,
    ) -> bool:
        if frames is not None and overlap is not None:
            clip_of(ANIMATE, frames, None, overlap)
        return check_room(ANIMATE, VAE_21, (width, height, frames), before_run=True)

    @classmethod
    def execute(
        cls,
        reference_image: Tensor,
        pose_video: Tensor,
        face_video: Tensor | None = None,
        background_video: Tensor | None = None,
        character_mask: Tensor | None = None,
        clip_vision_output: Any = None,
        previous_frames: Tensor | None = None,
        overlap: int = 1,
        face_guidance: bool = True,
        **shared: Any,
    ) -> io.NodeOutput:
        video = VideoInputs(**shared)
        if (background_video is None) != (character_mask is None):
            raise OptionError("only one of background_video and character_mask is connected: connect both, or neither")
        clip = clip_of(ANIMATE, video.frames, previous_frames, overlap)
        pictures = {"reference": reference_image, "pose_video": pose_video, "face_video": face_video}
        pictures |= {"background": background_video, "mask": character_mask, "carried": tail(previous_frames, clip)}
        extras = conditioned(ANIMATE, video, clip, pictures)
        if clip_vision_output is not None:
            extras["clip_vision_output"] = clip_vision_output
        without = extras
        if face_video is not None and face_guidance:
            without = {**extras, "face_video_pixels": torch.full_like(extras["face_video_pixels"], -1)}
        return video.outputs(extras, without, video.latent(references=1), 1, clip.carried)


class WanCoreAnimate2(io.ComfyNode):
    """Inputs of Wan-Animate-2."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "WanCoreAnimate2",
            "WanCore Animate 2",
            aliases="wan animate 2, motion transfer, driving video, wan animate2 to video",
            shows_text=True,
            description="What drives Wan-Animate-2: a picture moves as somebody in a video does. Made as the reference "
            "implementation makes it.",
            inputs=[
                *shared_inputs(81, "Any video of somebody, at 24 frames per second."),
                io.ClipVisionOutput.Input(
                    "clip_vision_output",
                    optional=True,
                    tooltip="What CLIPVisionEncode (clip_vision_h, crop none) sees in the reference image.",
                ),
                io.ClipVisionOutput.Input(
                    "clip_vision_output_pose",
                    optional=True,
                    tooltip="The same of the driving video's first frame; without it, that of the reference is used.",
                ),
                io.Conditioning.Input(
                    "positive_pose", optional=True, tooltip="A prompt for the driving video; without it, `positive`."
                ),
                io.Image.Input("previous_frames", optional=True, tooltip=PREVIOUS),
                strength("pose_strength", "driving video"),
                strength("reference_strength", "reference image"),
            ],
            outputs=outputs(),
        )

    @classmethod
    def validate_inputs(cls, width: int | None = None, height: int | None = None, frames: int | None = None) -> bool:
        if frames is not None:
            clip_of(ANIMATE2, frames, None, 1)
        return check_room(ANIMATE2, VAE_21, (width, height, frames), before_run=True)

    @classmethod
    def execute(
        cls,
        reference_image: Tensor,
        pose_video: Tensor,
        clip_vision_output: Any = None,
        clip_vision_output_pose: Any = None,
        positive_pose: CONDITIONING | None = None,
        previous_frames: Tensor | None = None,
        pose_strength: float = 1.0,
        reference_strength: float = 1.0,
        **shared: Any,
    ) -> io.NodeOutput:
        video = VideoInputs(**shared)
        clip = clip_of(ANIMATE2, video.frames, previous_frames, 1)
        pictures = {"reference": reference_image, "pose_video": pose_video, "carried": tail(previous_frames, clip)}
        extras = conditioned(ANIMATE2, video, clip, pictures)
        own = {"clip_vision_output": clip_vision_output, "clip_vision_output_pose": clip_vision_output_pose}
        own["cross_attn_pose"] = (positive_pose or video.positive)[0][0]
        strengths = {"pose_strength": pose_strength, "reference_strength": reference_strength}
        own |= {name: value for name, value in strengths.items() if value != 1}
        extras |= {key: value for key, value in own.items() if value is not None}
        return video.outputs(extras, extras, video.latent(references=1), 1, clip.carried)
