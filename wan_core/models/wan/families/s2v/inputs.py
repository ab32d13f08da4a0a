"""What a sound, ComfyUI's CONDITIONING, or the media of a clip, are to the transformer of S2V.

Legend: B batch, T/Y/X latent frames, rows, columns, W/n/C layers, states and width of a speech encoder.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from wan_core.config.checks import OptionError
from wan_core.models.audio.wav2vec2 import FRAMES_PER_SECOND, SAMPLE_RATE, XLSR_LARGE
from wan_core.models.vae.config import VAEConfig
from wan_core.models.vae.vae import VideoVAE
from wan_core.models.wan.families.clips import Clip
from wan_core.models.wan.families.family import Inputs
from wan_core.models.wan.families.s2v import AUDIO_FRAMES, COMFYUI_POSITIONS, LEAST_SIDE, MOTION_PIXELS
from wan_core.models.wan.families.task import Task


def read_conditioning(task: Task, vae: VAEConfig, extras: Mapping[str, Any], latent: Mapping[str, Any]) -> Inputs:
    """The fields of `Conditioning` of ComfyUI's WanSoundImageToVideo and its Extend. Raises OptionError."""
    samples, inputs = latent["samples"], {}
    T, Y, X = samples.shape[2:]
    if latent.get("noise_mask") is not None:
        raise OptionError(
            f"`latent` has a noise mask, which {task.name} does not take: leave out the node that sets it"
        )
    audio = extras.get("audio_embed")
    if audio is not None:
        if audio.ndim != 4 or audio.shape[3] < AUDIO_FRAMES * T:
            raise OptionError(
                f"audio features of {list(audio.shape)} given; a video of {T} latent frames needs "
                f"{AUDIO_FRAMES * T} frames of them: connect the latent and the conditioning of one node"
            )
        inputs["audio"] = audio[..., : AUDIO_FRAMES * T]
    latents = {
        "reference": (extras.get("reference_latents") or [None])[-1],
        "motion": extras.get("reference_motion"),
        "pose": extras.get("control_video"),
    }
    for name, given in latents.items():
        if given is None:
            continue
        frames = {"reference": 1, "pose": T}.get(name, given.shape[2] if given.ndim == 5 else 0)
        if given.ndim != 5 or given.shape[2:] != (frames, Y, X):
            raise OptionError(
                f"the latents of the {name} are {list(given.shape)}, those of the video {list(samples.shape)}: they do "
                "not belong together"
            )
        inputs[name] = vae.normalise(given)
    if "motion" in inputs and vae.spatial_stride * min(Y, X) < LEAST_SIDE:
        raise OptionError(f"motion frames need a video of at least {LEAST_SIDE} pixels in width and height")
    if extras.get(COMFYUI_POSITIONS):
        inputs["comfyui_positions"] = True
    return {"inputs": inputs}


def clip_inputs(
    task: Task, vae: VideoVAE, seen: Mapping[str, Tensor], media: Mapping[str, Tensor], clip: Clip
) -> Inputs:
    """The fields of `Conditioning` that the media of a clip give. The negative prompt hears nothing but zeros. Source:
    `generate` of Wan2.2/wan/speech2video.py."""
    lead = vae.normalise(media["lead"])
    inputs = {"audio": media["audio"], "reference": lead}
    if clip.number:
        inputs |= {"reference": vae.normalise(vae.encode(media["reference"])), "motion": lead}
    if "pose_video" in media:
        inputs["pose"] = vae.normalise(pose_latents(vae.encode, media["pose_video"]))
    return {"inputs": inputs, "uncond_inputs": {"audio": torch.zeros_like(media["audio"])}}


def pose_latents(encode: Callable[[Tensor], Tensor], video: Tensor) -> Tensor:
    """A pose video [1, 3, 4 T, H, W] in -1..1 -> un-normalised latents [1, 16, T, Y, X]: its first frame stands twice,
    and the latent frame of the first of them is left out."""
    return encode(torch.cat([video[:, :, :1], video], 2))[:, :, 1:]


def comfy_extras(
    encode: Callable[[Tensor], Tensor], media: Mapping[str, Tensor], clip: Clip, vae: VAEConfig
) -> tuple[dict[str, Any], Tensor]:
    """The media of a clip as ComfyUI's CONDITIONING carries them, and the latents that are decoded before the clip.
    encode: [1, 3, F, H, W] in -1..1 -> un-normalised latents. No pose is latents of zeros, as in training: without them
    ComfyUI's model leaves out what the encoder of poses adds."""
    lead = encode(media["carried"] if clip.number else media["reference"])
    extras: dict[str, Any] = {"audio_embed": media["audio"], "reference_latents": [lead]}
    if clip.number:
        extras |= {"reference_latents": [encode(media["reference"])], "reference_motion": lead}
    if "pose_video" in media:
        extras["control_video"] = pose_latents(encode, media["pose_video"])
    else:
        shape = 1, vae.z_dim, media["audio"].shape[3] // AUDIO_FRAMES, *lead.shape[3:]
        extras["control_video"] = vae.denormalise(lead.new_zeros(shape))
    return extras, lead


def motion_frames(pictures: Tensor) -> Tensor:
    """The last `MOTION_PIXELS` of pictures [F, H, W, 3] in 0..1, with grey ones before them where they are fewer."""
    last = pictures[-MOTION_PIXELS:]
    grey = last.new_full((MOTION_PIXELS - len(last), *last.shape[1:]), 0.5)
    return torch.cat([grey, last])


FEATURE_RATE = 30  # frames of features a second
VIDEO_RATE = 16
FIELD = XLSR_LARGE.least_samples  # samples of one state


def audio_features(states: Tensor, clip_frames: int) -> Tensor:
    """What `SpeechEncoder` gives for one sound, [W, n, C] -> [1, W, C, clip_frames * clips], a frame for every frame of
    video at 16 a second; zeros after the sound."""
    features = resampled(states)
    A = features.shape[1]
    indices = frame_indices(A, clip_frames)
    padded = F.pad(features, (0, 0, 0, 1))  # one frame of zeros, for what comes after the sound
    return padded[:, torch.from_numpy(np.minimum(indices, A)).to(states.device)].transpose(1, 2)[None]


def features_until(states: Tensor, clip: Clip) -> Tensor:
    """The result of `audio_features` for all frames up to the end of a `clip`."""
    features = audio_features(states, clip.frames)
    return F.pad(features, (0, max(0, clip.end - features.shape[3])))[..., : clip.end]


def frames_of(states: int) -> int:
    """Frames of the video that has all of a sound that became so many states."""
    samples = (states - 1) * (SAMPLE_RATE // FRAMES_PER_SECOND) + FIELD
    return -(-samples * VIDEO_RATE // SAMPLE_RATE)


def resampled(states: Tensor) -> Tensor:
    """[W, n, C] -> [W, A, C]: interpolated linearly, first on first and last on last."""
    count = int(states.shape[1] / float(FRAMES_PER_SECOND) * FEATURE_RATE)
    features = F.interpolate(states.transpose(1, 2), size=count, mode="linear", align_corners=True)
    return features.transpose(1, 2)


def clip_count(features: int, clip_frames: int) -> int:
    """Clips that a sound of so many frames of features needs."""
    return int(features / (clip_frames * (FEATURE_RATE / VIDEO_RATE))) + 1


def frame_indices(features: int, clip_frames: int) -> np.ndarray:
    """For every video frame of all clips, the frame of features that it hears; `features` and more: none is left."""
    count = clip_count(features, clip_frames) * clip_frames
    last = math.ceil(count / VIDEO_RATE * FEATURE_RATE) - 1
    times = np.linspace(0, count / VIDEO_RATE, count, endpoint=False)
    return np.clip(np.round(times * FEATURE_RATE).astype(int), 0, last)
