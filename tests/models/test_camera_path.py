"""Paths of a camera: motions, lines of poses, and the rays that Fun camera takes of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wan_core.config import OptionError
from wan_core.models.wan.families.fun.camera import (
    MOTIONS,
    CameraPath,
    camera_rays,
    moved,
    parse_motions,
    pose_count,
    read_camera,
    turned,
)


def lines_of(path: CameraPath) -> str:
    """The path in the text format of RealEstate10K."""
    rows = []
    for frame, (matrix, lens) in enumerate(zip(path.matrices, path.lenses, strict=True)):
        numbers = [frame, *lens, 0, 0, *np.linalg.inv(matrix)[:3].flatten()]
        rows.append(" ".join(f"{number:.12f}" for number in numbers))
    return "https://example.org/video\n" + "\n".join(rows) + "\n"


@settings(max_examples=15, deadline=None)
@given(
    motions=st.lists(st.tuples(st.sampled_from(list(MOTIONS)), st.floats(0, 2)), min_size=1, max_size=3),
    frames=st.sampled_from([1, 5, 9]),
    size=st.tuples(st.sampled_from([16, 48]), st.sampled_from([16, 32])),
)
def test_lines_of_poses_are_the_path_that_wrote_them(motions, frames, size) -> None:
    text = "+".join(f"{name}:{speed:.6f}" for name, speed in motions)
    path = read_camera(text, frames)
    again = read_camera(lines_of(path), frames)
    assert pose_count(lines_of(path)) == frames or frames == 1
    rays, rays_again = camera_rays(path, *size), camera_rays(again, *size)
    assert rays.shape == (1, 24, (frames + 3) // 4, size[1], size[0])
    assert torch.allclose(rays, rays_again, atol=1e-5)


AHEAD, RIGHT = np.array([0.0, 0, 1]), np.array([1.0, 0, 0])
SEEN = {  # motion -> where the camera, its view or its right side goes, in x right, y down, z forward
    "pan-left": ("place", (-1, 0, 0)),
    "pan-right": ("place", (1, 0, 0)),
    "pan-up": ("place", (0, -1, 0)),
    "pan-down": ("place", (0, 1, 0)),
    "zoom-in": ("place", (0, 0, 2)),
    "zoom-out": ("place", (0, 0, -2)),
    "tilt-up": ("view", (0, -1, 0)),
    "tilt-down": ("view", (0, 1, 0)),
    "turn-left": ("view", (-1, 0, 0)),
    "turn-right": ("view", (1, 0, 0)),
    "roll-left": ("right", (0, -1, 0)),
    "roll-right": ("right", (0, 1, 0)),
}


@pytest.mark.parametrize("name", SEEN)
def test_a_motion_goes_where_its_name_says(name: str) -> None:
    """A whole video moves by 1.5 and turns by 60 degrees at speed 1, each frame by as much."""
    assert {*SEEN, "static"} == set(MOTIONS)
    what, way = SEEN[name]
    path = moved([(name, 0.5)], 8)
    for frame, matrix in enumerate(path.matrices):
        assert np.allclose(matrix[3], [0, 0, 0, 1]) and np.allclose(path.lenses[frame], 0.5)
        share = 0.5 * frame / 8
        turned_by = share * np.pi / 3 * (what != "place")
        assert np.allclose(matrix[:3, 3], share * 1.5 * np.array(way) * (what == "place"))
        before = {"place": AHEAD, "view": AHEAD, "right": RIGHT}[what]
        wanted = np.cos(turned_by) * before + np.sin(turned_by) * np.array(way)
        assert np.allclose(matrix[:3, :3] @ before, wanted)


@given(angles=st.tuples(*[st.floats(-3, 3)] * 3))
def test_angles_turn_around_x_then_y_then_z(angles: tuple[float, float, float]) -> None:
    """Against matrix exponentials of the axes: right-handed rotations of the camera's own coordinates."""
    axes = -torch.linalg.cross(torch.eye(3)[:, None], torch.eye(3)[None], dim=-1).double()
    around_x, around_y, around_z = (torch.matrix_exp(angle * axis) for angle, axis in zip(angles, axes, strict=True))
    wanted = around_z @ around_y @ around_x
    assert np.allclose(turned(np.array(angles)), wanted.numpy(), atol=1e-9)


def plain_ray(path: CameraPath, frame: int, x: int, y: int, width: int, height: int) -> list[float]:
    """Moment and direction of one pixel's ray, in float64."""
    fx, fy, cx, cy = path.lenses[frame]
    if width * 720 < height * 1280:  # narrower than the pictures that poses are of: they have the height in common
        fx *= height * 1280 / 720 / width
    else:
        fy *= width * 720 / 1280 / height
    direction = np.array([(x + 0.5 - cx * width) / (fx * width), (y + 0.5 - cy * height) / (fy * height), 1.0])
    matrix = np.linalg.inv(path.matrices[0]) @ path.matrices[frame]
    direction = matrix[:3, :3] @ direction / np.linalg.norm(direction)
    return [*np.cross(matrix[:3, 3], direction), *direction]


@settings(max_examples=15, deadline=None)
@given(
    motions=st.lists(st.tuples(st.sampled_from(list(MOTIONS)), st.floats(0, 2)), min_size=1, max_size=3),
    lens=st.tuples(*[st.floats(0.3, 0.9)] * 4),
    size=st.sampled_from([(8, 3), (3, 5), (4, 4)]),
    data=st.data(),
)
def test_a_ray_equals_that_of_its_pixel_alone(motions, lens, size, data) -> None:
    path, (width, height) = moved(motions, 9), size
    lenses = np.tile(lens, (9, 1))
    path = CameraPath(np.linalg.inv(path.matrices[2]) @ path.matrices, lenses)  # the first camera is anywhere
    rays = camera_rays(path, width, height)
    frame, x, y = (data.draw(st.integers(0, most - 1)) for most in (9, width, height))
    latent = (frame + 3) // 4  # the first frame stands four times
    part = data.draw(st.integers(0, 3)) if frame == 0 else (frame - 1) % 4
    wanted = torch.tensor(plain_ray(path, frame, x, y, width, height), dtype=torch.float32)
    torch.testing.assert_close(rays[0, part::4, latent, y, x], wanted, atol=1e-5, rtol=1e-4)


def test_a_path_goes_on_at_its_end_and_is_cut() -> None:
    path = moved(parse_motions("zoom-in"), 6)
    part = path.part(4, 9)
    assert len(part) == 5 and (part.matrices[2:] == path.matrices[5]).all()


GOOD = lines_of(moved(parse_motions("static"), 2)).splitlines()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Motions: static, pan-left"),
        ("zoom", "Motions: static"),
        ("zoom-in:fast", "speeds of 0 to 10"),
        ("zoom-in:11", "speeds of 0 to 10"),
        ("zoom-in:nan", "speeds of 0 to 10"),
        ("1 2 3", "line 1 of the camera's poses is not 19 numbers"),
        ("\n".join([*GOOD, "1 2 x"]), "line 4 of the camera's poses"),
        (GOOD[1].replace("0.5", "inf", 1) + "\n" + GOOD[1], "line 1 of"),
        (" ".join(["0", "0.5", "0", *GOOD[1].split()[3:]]), "fx and fy"),
        (" ".join([*GOOD[1].split()[:7], *["0"] * 12]), "no rotation"),
    ],
)
def test_what_is_no_path_is_refused(text: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        pose_count(text)
