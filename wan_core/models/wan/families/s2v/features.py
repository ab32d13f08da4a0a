"""From the layers of a speech encoder to the audio features of video frames.

Legend: W layers, n frames of the encoder (50 a second), A frames of features (30 a second), C channels.
Source: Wan2.2/wan/modules/s2v/audio_encoder.py.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from wan_core.models.audio.config import FRAMES_PER_SECOND, SAMPLE_RATE, XLSR_LARGE
from wan_core.models.wan.families.clips import Clip

FEATURE_RATE = 30  # frames of features a second
VIDEO_RATE = 16
FIELD = XLSR_LARGE.least_samples  # samples of one state
CLIP_FRAMES = 80  # of features that a clip of 20 latent frames hears


def audio_features(states: Tensor, clip_frames: int = CLIP_FRAMES) -> Tensor:
    """What `SpeechEncoder` gives for one sound, [W, n, C] -> [1, W, C, clip_frames * clips], a frame for every frame of
    video at 16 a second; zeros after the sound."""
    features = resampled(states)
    A = features.shape[1]
    indices = frame_indices(A, clip_frames)
    padded = F.pad(features, (0, 0, 0, 1))  # one frame of zeros, for what comes after the sound
    return padded[:, torch.from_numpy(np.minimum(indices, A)).to(states.device)].transpose(1, 2)[None]


def features_until(states: Tensor, clip: Clip) -> Tensor:
    """As `audio_features`, of all frames up to the end of a `clip`."""
    found = audio_features(states, clip.frames)
    return F.pad(found, (0, max(0, clip.last - found.shape[3])))[..., : clip.last]


def frames_of(states: int) -> int:
    """Frames of the video that has all of a sound that became so many states."""
    samples = (states - 1) * (SAMPLE_RATE // FRAMES_PER_SECOND) + FIELD
    return -(-samples * VIDEO_RATE // SAMPLE_RATE)


def resampled(states: Tensor) -> Tensor:
    """[W, n, C] -> [W, A, C]: interpolated linearly, first on first and last on last."""
    count = int(states.shape[1] / float(FRAMES_PER_SECOND) * FEATURE_RATE)
    found = F.interpolate(states.transpose(1, 2), size=count, mode="linear", align_corners=True)
    return found.transpose(1, 2)


def clip_count(features: int, clip_frames: int = CLIP_FRAMES) -> int:
    """Clips that a sound of so many frames of features needs."""
    return int(features / (clip_frames * (FEATURE_RATE / VIDEO_RATE))) + 1


def frame_indices(features: int, clip_frames: int = CLIP_FRAMES) -> np.ndarray:
    """For every video frame of all clips, the frame of features that it hears; `features` and more: none is left."""
    count = clip_count(features, clip_frames) * clip_frames
    last = math.ceil(count / VIDEO_RATE * FEATURE_RATE) - 1
    times = np.linspace(0, count / VIDEO_RATE, count, endpoint=False)
    return np.clip(np.round(times * FEATURE_RATE).astype(int), 0, last)
