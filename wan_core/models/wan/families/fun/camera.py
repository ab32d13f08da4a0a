"""Paths of a camera: from simple motions or the lines of a pose file to the rays that Fun camera takes.

A pose is a matrix [4, 4] from a camera's coordinates to the world's: x points right, y down, z forward. A pose file has
a line for each frame, as RealEstate10K and CameraCtrl have them: a time, fx, fy, cx, cy as shares of width and height,
two numbers that are not read, and 12 numbers, the rows of the matrix [3, 4] from the world to the camera.

Legend: F video frames, H height, W width. Source: CameraCtrl's `inference.py` and VideoX-Fun for rays, motions and the
aspect that poses are of; Pluecker coordinates after Sitzmann et al., arXiv:2106.02634.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite, pi

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wan_core.config.checks import OptionError

Matrix = NDArray[np.float64]
ANGLE, WAY = pi / 3, 1.5  # that a motion at speed 1 takes in a whole video
# Name -> (angles around x, y and z, way along them), in those units. Zooming goes twice as far.
MOTIONS: dict[str, tuple[tuple[float, float, float], tuple[float, float, float]]] = {
    "static": ((0, 0, 0), (0, 0, 0)),
    "pan-left": ((0, 0, 0), (-1, 0, 0)),
    "pan-right": ((0, 0, 0), (1, 0, 0)),
    "pan-up": ((0, 0, 0), (0, -1, 0)),
    "pan-down": ((0, 0, 0), (0, 1, 0)),
    "zoom-in": ((0, 0, 0), (0, 0, 2)),
    "zoom-out": ((0, 0, 0), (0, 0, -2)),
    "tilt-up": ((1, 0, 0), (0, 0, 0)),
    "tilt-down": ((-1, 0, 0), (0, 0, 0)),
    "turn-left": ((0, -1, 0), (0, 0, 0)),
    "turn-right": ((0, 1, 0), (0, 0, 0)),
    "roll-left": ((0, 0, -1), (0, 0, 0)),
    "roll-right": ((0, 0, 1), (0, 0, 0)),
}
MOST_SPEED, MOST_POSES = 10.0, 10_000
ASPECT = 1280 / 720  # of the pictures that poses are of
NUMBERS = 19  # of a line


@dataclass(frozen=True)
class CameraPath:
    """matrices: [F, 4, 4] from the camera to the world. lenses: [F, 4], fx, fy, cx, cy as shares of the size."""

    matrices: Matrix
    lenses: Matrix

    def __len__(self) -> int:
        return len(self.matrices)

    def part(self, first: int, last: int) -> CameraPath:
        """The path over frames `first` to `last` (exclusive); after its end the last pose repeats."""
        places = np.arange(first, last).clip(0, len(self) - 1)
        return CameraPath(self.matrices[places], self.lenses[places])


def read_camera(text: str, frames: int) -> CameraPath:
    """The path of a camera in so many frames: from motions such as `zoom-in`, `pan-left:0.5+tilt-up`, or from the lines
    of a pose file. Raises OptionError."""
    lines = pose_lines(text)
    if not lines:
        return moved(parse_motions(text), frames)
    if len(lines) < frames:
        raise OptionError(f"the camera has {len(lines)} poses, and {frames} frames are asked for: use fewer")
    return parse_poses(lines[:frames])


def pose_count(text: str) -> int | None:
    """How many poses `text` has; None for motions, which last as long as the video. Raises OptionError."""
    lines = pose_lines(text)
    if not lines:
        parse_motions(text)
        return None
    parse_poses(lines)
    return len(lines)


def pose_lines(text: str) -> list[tuple[int, str]]:
    """The lines of a pose file with their numbers, without the address that may be in front; none for motions."""
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
    if len(lines) > 1 and len(lines[0][1].split()) == 1:
        lines = lines[1:]
    if len(lines) > MOST_POSES:
        raise OptionError(f"the camera has {len(lines)} poses; allowed are {MOST_POSES}")
    return lines if lines and len(lines[0][1].split()) > 1 else []


def parse_poses(lines: list[tuple[int, str]]) -> CameraPath:
    rows = []
    for number, line in lines:
        try:
            row = [float(word) for word in line.split()]
        except ValueError:
            row = []
        if len(row) != NUMBERS or not all(map(isfinite, row)):
            raise OptionError(
                f"line {number} of the camera's poses is not {NUMBERS} numbers: time, fx, fy, cx, cy, 0, 0 and the "
                "rows of a 3x4 matrix from the world to the camera, as in RealEstate10K"
            )
        rows.append(row)
    numbers = np.array(rows)
    if bool((numbers[:, 1:3] <= 0).any()):
        raise OptionError("fx and fy of the camera's poses must be above 0: they are shares of the width and height")
    to_camera = np.tile(np.eye(4), (len(rows), 1, 1))
    to_camera[:, :3] = numbers[:, 7:].reshape(-1, 3, 4)
    if bool((np.abs(np.linalg.det(to_camera[:, :3, :3])) < 1e-6).any()):
        raise OptionError("a matrix of the camera's poses has no inverse: its first 3x3 numbers are no rotation")
    return CameraPath(np.linalg.inv(to_camera).astype(np.float64), numbers[:, 1:5])


def parse_motions(text: str) -> list[tuple[str, float]]:
    """`pan-left:0.5+zoom-in` -> names and speeds. Raises OptionError."""
    motions = []
    for part in text.strip().lower().split("+"):
        name, colon, number = part.strip().partition(":")
        try:
            speed = float(number) if colon else 1.0
        except ValueError:
            speed = -1.0
        if name not in MOTIONS or not 0 <= speed <= MOST_SPEED:
            raise OptionError(
                f"camera {part.strip()[:40]!r} given; write motions such as zoom-in, pan-left:0.5 or "
                f"pan-left:0.5+tilt-up, with speeds of 0 to {MOST_SPEED:g}, or give a file of poses. Motions: "
                f"{', '.join(MOTIONS)}"
            )
        motions.append((name, speed))
    return motions


def moved(motions: list[tuple[str, float]], frames: int) -> CameraPath:
    """Motions at their speeds at once, evenly over the frames."""
    angles, way = (
        sum((speed * np.array(MOTIONS[name][part], np.float64) for name, speed in motions), np.zeros(3))
        for part in (0, 1)
    )
    matrices = np.tile(np.eye(4), (frames, 1, 1))
    for frame in range(frames):
        share = frame / frames
        matrices[frame, :3, :3] = turned(share * ANGLE * angles)
        matrices[frame, :3, 3] = share * WAY * way
    return CameraPath(matrices, np.full((frames, 4), 0.5))


def turned(angles: Matrix) -> Matrix:
    """The rotation [3, 3] around x, then y, then z."""
    product = np.eye(3)
    for axis, angle in enumerate(angles):
        one, other = [n for n in range(3) if n != axis]
        rotation = np.eye(3)
        rotation[one, one] = rotation[other, other] = np.cos(angle)
        sign = -1 if axis == 1 else 1
        rotation[other, one] = sign * np.sin(angle)
        rotation[one, other] = -sign * np.sin(angle)
        product = rotation @ product
    return product


def camera_rays(path: CameraPath, width: int, height: int) -> Tensor:
    """What the transformer takes of a path of F = 4 (T - 1) + 1 frames: [1, 24, T, H, W], float32. Of every pixel the
    moment and the direction of its ray, relative to the first camera; channel 4 c + k of a latent frame is number c of
    its k-th video frame, and the first video frame stands four times."""
    if len(path) % 4 != 1:
        raise ValueError(f"a camera of {len(path)} frames; needed are 4n + 1")
    relative = torch.from_numpy((np.linalg.inv(path.matrices[0]) @ path.matrices).astype(np.float32))
    relative[0] = torch.eye(4)
    by_frame = torch.empty(1, 6, 4, (len(path) + 3) // 4, height, width)
    x, y = torch.arange(width, dtype=torch.float32) + 0.5, torch.arange(height, dtype=torch.float32)[:, None] + 0.5
    for frame, (fx, fy, cx, cy) in enumerate(lenses_for(path.lenses, width, height)):
        direction = torch.stack(torch.broadcast_tensors((x - cx) / fx, (y - cy) / fy, torch.ones(1, 1)), -1)
        direction = direction / direction.norm(dim=-1, keepdim=True)
        direction = direction @ relative[frame, :3, :3].T  # [H, W, 3]
        origin = relative[frame, :3, 3].expand_as(direction)
        rays = torch.cat([torch.linalg.cross(origin, direction), direction], -1).permute(2, 0, 1)
        for place in range(4) if frame == 0 else [frame + 3]:
            by_frame[0, :, place % 4, place // 4] = rays
    return by_frame.flatten(1, 2)


def lenses_for(lenses: Matrix, width: int, height: int) -> list[list[float]]:
    """fx, fy, cx, cy of each frame in pixels. A video of another aspect sees the part that covers it."""
    in_pixels = lenses.copy()
    if width / height < ASPECT:
        in_pixels[:, 0] *= height * ASPECT / width
    else:
        in_pixels[:, 1] *= width / ASPECT / height
    return (in_pixels * [width, height, width, height]).astype(np.float32).tolist()
