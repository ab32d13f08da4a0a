"""What a clip of the test bed shows: two or three textured objects, a pillar or none, a ground and a camera.

Legend: F frames, H rows, W columns.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

import torch
from torch import Tensor

from wan_core.pipeline.embedded import COLOURS, MOTIONS, SHAPES
from wan_lab.shapes import PALETTE

TEXTURES = ("plain", "striped", "checked", "dotted", "mosaic")
GROUNDS = TEXTURES[1:]  # a camera's motion must show
SIDEWAYS = ("left", "right")
OBJECTS = 3  # at most
THREE_OBJECTS, PILLARS, MOVING_CAMERA = 0.35, 0.65, 0.75  # shares of scenes

# Of a video's pixels: a named colour has at least as many, one that is not named at most, the ground at least.
SEEN, STRAY, GROUND_SEEN = 0.004, 0.02, 0.2


@dataclass(frozen=True)
class Thing:
    texture: str
    colour: str
    shape: str
    motion: str

    @property
    def words(self) -> str:
        return f"a {self.texture} {self.colour} {self.shape} {_moving(self.motion, 'moving')}"


@dataclass(frozen=True)
class World:
    """A scene. The first thing is the farthest. It passes behind the pillar if it moves sideways."""

    things: tuple[Thing, ...]
    pillar: str | None
    ground: tuple[str, str]  # colour, texture
    camera: str

    @property
    def hides(self) -> bool:
        """Whether the first thing passes behind the pillar."""
        return self.things[0].motion in SIDEWAYS

    @property
    def caption(self) -> str:
        pillar = [] if self.pillar is None else [f"a {self.pillar} pillar in front"]
        ground = f"on a {self.ground[0]} {self.ground[1]} ground"
        parts = [*(thing.words for thing in self.things), *pillar, ground, f"camera {_moving(self.camera, 'panning')}"]
        return ", ".join(parts)

    @property
    def colours(self) -> tuple[str, ...]:
        """The colours of the things, the pillar and last the ground: no two are the same."""
        pillar = () if self.pillar is None else (self.pillar,)
        return (*(thing.colour for thing in self.things), *pillar, self.ground[0])


def _moving(direction: str, verb: str) -> str:
    return "standing still" if direction == "still" else f"{verb} {direction}"


def sample_world(rng: random.Random) -> World:
    count = OBJECTS if rng.random() < THREE_OBJECTS else 2
    colours = rng.sample(COLOURS, count + 2)
    things = tuple(
        Thing(rng.choice(TEXTURES), colour, rng.choice(SHAPES), rng.choice(MOTIONS)) for colour in colours[:count]
    )
    place = things[0].motion in SIDEWAYS or count < OBJECTS  # else it would hide a thing all the time
    pillar = colours[count] if place and rng.random() < PILLARS else None
    camera = rng.choice(MOTIONS[:4]) if rng.random() < MOVING_CAMERA else "still"
    return World(things, pillar, (colours[-1], rng.choice(GROUNDS)), camera)


def sample_worlds(count: int, seed: int) -> list[World]:
    rng = random.Random(seed)
    return [sample_world(rng) for _ in range(count)]


_THING = re.compile(r"a (\w+) (\w+) (\w+) (?:moving (\w+)|standing (still))")
_PILLAR = re.compile(r"a (\w+) pillar in front")
_GROUND = re.compile(r"on a (\w+) (\w+) ground")
_CAMERA = re.compile(r"camera (?:panning (\w+)|standing (still))")


def parse_world(caption: str) -> World:
    """The scene of a caption. Raises ValueError for a text that is none."""
    things, pillar, ground, camera = [], None, None, None
    for part in caption.lower().rstrip(". ").split(", "):
        if match := _THING.fullmatch(part):
            things.append(Thing(*match.groups()[:3], match[4] or match[5]))
        elif match := _PILLAR.fullmatch(part):
            pillar = match[1]
        elif match := _GROUND.fullmatch(part):
            ground = match[1], match[2]
        elif match := _CAMERA.fullmatch(part):
            camera = match[1] or match[2]
    if not things or ground is None or camera is None:
        raise ValueError(f"{caption!r} is not a caption of the test bed")
    world = World(tuple(things), pillar, ground, camera)
    if world.caption != caption.lower().rstrip(". "):
        raise ValueError(f"{caption!r} is not a caption of the test bed; {world.caption!r} would be")
    return world


# -------------------------------------------------------------------------------------------------------------- judging


def shades(colour: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The two tones of a textured surface, RGB 0..1: the colour, and a darker one (for black a lighter one)."""
    base = tuple(value / 255 for value in PALETTE[colour])
    return base, (0.35, 0.35, 0.35) if colour == "black" else tuple(0.6 * value for value in base)


def colour_shares(frames: Tensor) -> dict[str, float]:
    """The share of the pixels of frames [F, H, W, 3], in 0..1 or uint8, that is nearest to each colour's tones."""
    pixels = frames.flatten(0, 2).float() / (255 if frames.dtype == torch.uint8 else 1)
    tones = [tone for colour in COLOURS for pair in [shades(colour)] for tone in (*pair, _between(*pair))]
    nearest = torch.cdist(pixels, torch.tensor(tones, device=pixels.device)).argmin(1) // 3
    counts = torch.bincount(nearest, minlength=len(COLOURS)) / len(pixels)
    return dict(zip(COLOURS, counts.tolist(), strict=True))


def _between(a: tuple[float, ...], b: tuple[float, ...]) -> tuple[float, ...]:
    return tuple((x + y) / 2 for x, y in zip(a, b, strict=True))


def shows_colours(frames: Tensor, world: World) -> bool:
    """Whether a video shows every colour that its caption names and no other, and mostly the ground's."""
    found = colour_shares(frames[::4])
    named = all(found[colour] >= SEEN for colour in world.colours)
    stray = any(share > STRAY for colour, share in found.items() if colour not in world.colours)
    return named and not stray and found[world.ground[0]] >= GROUND_SEEN
