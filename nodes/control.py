"""What controls VACE, and the path of a camera for Fun camera."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from comfy_api.latest import io
from torch import Tensor

from wan_core.config import ControlOptions
from wan_core.models.vae.config import VAE_21
from wan_core.models.wan.families import FAMILIES
from wan_core.models.wan.families.clips import Clip
from wan_core.models.wan.families.fun.camera import MOTIONS, camera_rays, pose_count, read_camera
from wan_core.models.wan.families.media import images_covering, references_of
from wan_core.models.wan.families.vace import STRENGTH
from wan_core.models.wan.families.vace.inputs import comfy_extras
from wan_core.sampling.texts import TextRange, shared_range

from . import host
from .schema import output, schema
from .sockets import CONDITIONING
from .video_inputs import VideoInputs, check_room, conditioned_outputs, fields_of, size_inputs, size_words, text_and_vae

VACE, CAMERA = FAMILIES["vace"], FAMILIES["camera"]
GAP = 1e-5  # between two ranges, as ComfyUI's own nodes leave it: where ranges meet on a step, texts are averaged


class WanCoreVACE(io.ComfyNode):
    """Inputs of VACE."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "WanCoreVACE",
            "WanCore VACE",
            aliases="wan vace, control video, inpainting, outpainting, reference to video",
            shows_text=True,
            description="What controls VACE: a video that is followed, masks of what is made anew, reference pictures "
            "and known frames, for all of the run or a part of it. Several of these nodes, one after the other, "
            "control together.",
            inputs=[
                *text_and_vae("The encoded prompt, or that of another WanCore VACE."),
                *size_inputs(),
                io.Float.Input("strength", default=1.0, min=0.0, max=100.0, step=0.01,
                               tooltip="How much this control counts: 1 as trained, 0 not at all."),
                io.Image.Input("control_video", optional=True, tooltip="What is followed (depth, edges, poses), or the "
                               "video of which a part is made anew. Scaled to cover the size, what sticks out is cut "
                               "off. What it lacks in frames is made."),
                io.Mask.Input("control_masks", optional=True, tooltip="What of the control video is made anew, for "
                              "each frame or one for all; without it, all of it is, and follows the control video."),
                io.Image.Input("reference_images", optional=True, tooltip="Who or what is to be seen, one picture or "
                               "several. Each is fitted into the size with white bars and is a latent frame in "
                               "front."),
                io.Image.Input("first_image", optional=True, tooltip="The first frame, or several."),
                io.Image.Input("last_image", optional=True, tooltip="The last frame, or several."),
                io.Float.Input("start", default=0.0, min=0.0, max=1.0, step=0.01, optional=True,
                               tooltip="The control counts from this share of the run on."),
                io.Float.Input("end", default=1.0, min=0.0, max=1.0, step=0.01, optional=True,
                               tooltip="The control counts up to this share of the run. Steps after it are faster."),
            ],
            outputs=[
                *conditioned_outputs("For the sampler. References are its first frames."),
                output(io.Int, "trim_latent", "Latent frames of the references "
                              "before the video: for TrimVideoLatent, before decoding."),
            ],
        )  # fmt: skip

    @classmethod
    def validate_inputs(
        cls,
        width: int | None = None,
        height: int | None = None,
        frames: int | None = None,
        start: float | None = None,
        end: float | None = None,
    ) -> bool:
        if start is not None and end is not None:
            ControlOptions(start=start, end=end)
        return check_room(VACE, VAE_21, (width, height, frames), before_run=True)

    @classmethod
    def execute(
        cls,
        strength: float,
        control_video: Tensor | None = None,
        control_masks: Tensor | None = None,
        reference_images: Tensor | None = None,
        first_image: Tensor | None = None,
        last_image: Tensor | None = None,
        start: float = 0.0,
        end: float = 1.0,
        **shared: Any,
    ) -> io.NodeOutput:
        video, options = VideoInputs(**shared), ControlOptions(scale=strength, start=start, end=end)
        size, frames = video.size, video.frames
        check_room(VACE, VAE_21, (*size, frames), given=fields_of({"control_video": control_video}))
        media = {"mask": torch.ones(1, 3, frames, video.height, video.width)}
        if control_masks is not None:
            alike = frames if len(control_masks) == 1 else -1
            media["mask"] = images_covering(control_masks.expand(alike, -1, -1), size, frames, missing=1)
        if control_video is not None:
            media["control_video"] = images_covering(control_video, size, frames, missing=0)
        for field, images in (("image", first_image), ("last_image", last_image)):
            if images is not None:
                media[field] = images_covering(images, size, min(frames, len(images)), missing=0)
        if reference_images is not None:
            media["reference"] = references_of(reference_images, size)
        extras = comfy_extras(video.encode, media, Clip(0, 0, frames, 0), VAE_21)
        both = (in_ranges(one, extras, options) for one in (video.positive, video.negative))
        count = len(media.get("reference", ()))
        return io.NodeOutput(*both, video.latent(references=count), count, ui=size_words(VAE_21, *size))


def in_ranges(conditioning: CONDITIONING, extras: dict[str, Tensor], options: ControlOptions) -> CONDITIONING:
    """Each text with the control added to its lists; once for each part of the run that has another strength. A step on
    the border of two parts is in the later one."""
    borders = (0.0, options.start, options.end, 1.0)
    parts = [
        (TextRange(start, end - (GAP if end < 1 else 0.0)), strength)
        for (start, end), strength in zip(pairwise(borders), (0.0, options.scale, 0.0), strict=True)
    ]
    entries = []
    for rows, extras_before in conditioning:
        for part, strength in parts:
            both = shared_range(TextRange.of(extras_before), part)
            if both is None:
                continue
            own = {**extras, STRENGTH: strength}
            lists = {key: [*(extras_before.get(key) or []), value] for key, value in own.items()}
            whole = both == TextRange() and "start_percent" not in extras_before
            entries.append([rows, {**extras_before, **lists, **({} if whole else both.percents())}])
    return entries


class WanCoreCamera(io.ComfyNode):
    """The path of a camera."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "WanCoreCamera",
            "WanCore Camera",
            aliases="wan camera, fun camera, camera poses, cameractrl, camera trajectory",
            description="The path of a camera for Fun camera, from motions or from the lines of a file of poses. For "
            "WanCameraImageToVideo.",
            inputs=[
                io.String.Input(
                    "camera",
                    multiline=True,
                    default="zoom-in",
                    tooltip="Motions with their speeds, such as zoom-in or pan-left:0.5+tilt-up, of "
                    f"{', '.join(MOTIONS)}. Or a line for each frame as in RealEstate10K and CameraCtrl: time, fx, fy, "
                    "cx, cy, 0, 0 and the rows of the 3x4 matrix from the world to the camera.",
                ),
                *size_inputs(),
            ],
            outputs=[
                output(io.WanCameraEmbedding, "camera_embedding", "For WanCameraImageToVideo."),
                output(io.Int, "width_out", "As given."),
                output(io.Int, "height_out", "As given."),
                output(io.Int, "length", "The frames, as given."),
            ],
        )

    @classmethod
    def validate_inputs(
        cls, camera: str | None = None, width: int | None = None, height: int | None = None, frames: int | None = None
    ) -> bool:
        if camera is not None:
            pose_count(camera)
        return check_room(CAMERA, VAE_21, (width, height, frames), given=("camera",), before_run=True)

    @classmethod
    def execute(cls, camera: str, width: int, height: int, frames: int) -> io.NodeOutput:
        check_room(CAMERA, VAE_21, (width, height, frames), given=("camera",))
        rays = camera_rays(read_camera(camera, frames), width, height)
        return io.NodeOutput(host.to_intermediate(rays), width, height, frames)
