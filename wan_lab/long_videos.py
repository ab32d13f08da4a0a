"""What becomes of a shape over ten clips of the embedded model: how far it moves, whether it stays itself, and how
colours drift.

    python -m wan_lab.long_videos --out benchmarks/results --ways plain,svi --match none,latents,lab

Every way makes the same scenes: `plain` goes on from the last frame of the clip before, `svi` from an anchor and the
last latent (with `--loras FOLDER`, LoRAs for that). Colours are matched to the first clip not at all, on latents or on
pictures.

Frames are [F, H, W, 3] in 0..1. Shapes: F frames, H rows, W columns.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from wan_core.config import LoadOptions, LoraOptions, Request
from wan_core.models.wan.families.clips import Clip, latents_of
from wan_core.pipeline.clips import LEAD
from wan_core.pipeline.colours import lab, rgb_of
from wan_core.pipeline.denoise import sample
from wan_core.pipeline.embedded import Scene
from wan_core.pipeline.encode import clip_media, condition, encode_text
from wan_core.pipeline.pipeline import Pipeline
from wan_core.pipeline.run import Run
from wan_lab.metrics import describe, motion_amplitude, unit_range
from wan_lab.results import envelope, result_path, write_result
from wan_lab.shapes import draw

SCENES = (
    Scene("red", "circle", "right", "blue"),
    Scene("green", "square", "up", "white"),
    Scene("yellow", "triangle", "left", "purple"),
    Scene("purple", "circle", "still", "yellow"),
    Scene("orange", "cross", "still", "black"),
    Scene("green", "square", "still", "white"),
)
CLIP, STEPS = 17, 8
MATCHES = ("none", "latents", "lab")


@dataclass(frozen=True)
class ClipFacts:
    """amplitude: pixels of a 96-pixel frame that the shape moves from frame to frame, on average; None: no shape is
    seen. same: background, colour and shape are the scene's. off: CIELAB distance of the frame's mean colour from the
    first frame's. means, deviations: of the channels red, green, blue."""

    amplitude: float | None
    same: bool
    off: float
    means: tuple[float, ...]
    deviations: tuple[float, ...]


def clip_facts(frames: Tensor, scene: Scene, first: Tensor) -> ClipFacts:
    """What is seen in the frames of a clip. first: the first frame of the video [H, W, 3]."""
    seen, colours = describe(frames), unit_range(frames).flatten(0, 2)
    same = (seen.background, seen.colour, seen.shape) == (scene.background, scene.colour, scene.shape)
    off = float((lab(unit_range(frames)).mean((0, 1, 2)) - lab(first).mean((0, 1))).norm())
    means, deviations = (tuple(round(float(one), 5) for one in many) for many in (colours.mean(0), colours.std(0)))
    return ClipFacts(motion_amplitude(frames), same, off, means, deviations)


def statistics(channels: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each channel [C, 1, 1, 1] of [C, F, H, W]."""
    flat = channels.flatten(1)
    return flat.mean(1)[:, None, None, None], flat.std(1, unbiased=False)[:, None, None, None]


def matched(channels: Tensor, own: tuple[Tensor, Tensor], first: tuple[Tensor, Tensor], strength: float) -> Tensor:
    """`channels`, whose statistics are `own`, with those of `first`."""
    moved = (channels - own[0]) * (first[1] / own[1].clamp(min=1e-6)) + first[0]
    return torch.lerp(channels, moved, strength)


def clips_of(run: Run, match: str, strength: float) -> Iterator[Tensor]:
    """The new frames of each clip [F, H, W, 3], as `ClipRun` makes them, with colours matched to the first."""
    text, carried, vae = encode_text(run), None, run.vae()
    anchored, first = run.job.rules.anchored, None
    for clip in run.job.clips:
        latents = sample(run, condition(run, clip, clip_media(run, clip, None, carried), text), clip=clip.number)
        new = latents[:, :, latents_of(clip.carried) + 1 if anchored and clip.carried else 0 :]
        if match == "latents":
            part = new[0, :, 0 if anchored and clip.carried else 1 :]
            first = statistics(part) if first is None else first
            new = matched(new[0], statistics(part), first, strength)[None] if clip.number else new
        frames = decoded(vae, new, carried if anchored else None, clip)
        if match == "lab":
            colours = lab(frames).permute(3, 0, 1, 2)
            first = statistics(colours) if first is None else first
            moved = matched(colours, statistics(colours), first, strength)
            frames = rgb_of(moved.permute(1, 2, 3, 0)) if clip.number else frames
        if anchored:
            carried = (new if carried is None else torch.cat([carried, new], 2))[:, :, -LEAD:]
            yield frames
        else:
            carried = (frames[-run.job.clips[-1].carried :] * 2 - 1).permute(3, 0, 1, 2)[None]
            yield frames[clip.carried :]


def decoded(vae: Any, new: Tensor, before: Tensor | None, clip: Clip) -> Tensor:
    whole = new if before is None else torch.cat([before, new], 2)
    frames = (vae.decode(whole)[0].float().permute(1, 2, 3, 0) + 1) / 2
    return frames if before is None else frames[-(clip.frames - clip.carried) :]


@torch.no_grad()
def measure(
    pipe: Pipeline, scene: Scene, way: str, match: str, strength: float, clips: int, folder: Path, seed: int
) -> tuple[list[ClipFacts], Tensor]:
    picture = folder / f"{scene.caption.replace(' ', '-')}.png"
    drawn = draw([scene], seed=seed, frames=1)[0, :, 0].permute(1, 2, 0)
    Image.fromarray(((drawn + 1) * 127.5).round().byte().numpy()).save(picture)
    overlap = 5 if way == "svi" else 1
    length = {"frames": CLIP + (clips - 1) * (CLIP - overlap), "clip_frames": CLIP, "overlap": overlap}
    more: dict[str, Any] = {"svi": True} if way == "svi" else {}
    run = pipe.prepare(Request(prompt=scene.caption, image=str(picture), steps=STEPS, seed=seed, **length, **more))
    facts, frames_of_clips = list[ClipFacts](), list[Tensor]()
    for frames in clips_of(run, match, strength):
        frames_of_clips.append(frames.clamp(0, 1))
        facts.append(clip_facts(frames_of_clips[-1], scene, frames_of_clips[0][0]))
    return facts, torch.cat(frames_of_clips)


def row_of(name: str, scenes: Sequence[Scene], videos: Sequence[Sequence[ClipFacts]]) -> dict[str, Any]:
    """Means over the scenes. moving: of those whose caption moves. drift: the largest change of a channel's mean from
    the first clip to the last, of 1."""

    def mean(values: Sequence[float]) -> float | None:
        return round(sum(values) / len(values), 4) if values else None

    moving = [facts for facts, scene in zip(videos, scenes, strict=True) if scene.motion != "still"]
    clips = range(len(videos[0]))
    return {
        "name": name,
        "same": [mean([float(facts[n].same) for facts in videos]) for n in clips],
        "amplitude": [mean([one for facts in moving if (one := facts[n].amplitude) is not None]) for n in clips],
        "off": [mean([facts[n].off for facts in videos]) for n in clips],
        "drift": mean([max(abs(a - b) for a, b in zip(f[-1].means, f[0].means, strict=True)) for f in videos]),
        "means": [[facts[n].means for n in clips] for facts in videos],
    }


def main(arguments: list[str] | None = None) -> None:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("--out", type=Path, required=True, help="folder or .json file for the result")
    top.add_argument("--ways", default="plain,svi")
    top.add_argument("--match", default="none,latents,lab")
    top.add_argument("--strength", type=float, default=1.0)
    top.add_argument("--clips", type=int, default=10)
    top.add_argument("--scenes", choices=("all", "moving", "still"), default="all")
    top.add_argument("--loras", type=Path, help="folder of LoRAs for `svi`")
    top.add_argument("--sheets", type=Path, help="folder for pictures: a row a clip")
    top.add_argument("--seed", type=int, default=0)
    options = top.parse_args(arguments)
    rows = list[dict[str, Any]]()
    kinds = {"moving": (False,), "still": (True,), "all": (False, True)}[options.scenes]
    scenes = [scene for scene in SCENES if (scene.motion == "still") in kinds]
    with tempfile.TemporaryDirectory() as folder:
        for way in options.ways.split(","):
            paths = sorted(options.loras.glob("*.safetensors")) if options.loras and way == "svi" else []
            loras = tuple(LoraOptions(path=str(path)) for path in paths)
            pipe = Pipeline.load(LoadOptions(model="tiny", task="i2v-tiny", device="cpu", loras=loras))
            for match in options.match.split(","):
                videos = list[list[ClipFacts]]()
                for scene in scenes:
                    facts, frames = measure(
                        pipe, scene, way, match, options.strength, options.clips, Path(folder), options.seed
                    )
                    videos.append(facts)
                    if options.sheets is not None:
                        options.sheets.mkdir(parents=True, exist_ok=True)
                        strip = frames[:: max(1, len(frames) // 20)].unbind(0)
                        pixels = (torch.cat(strip, 1) * 255).round().byte().numpy()
                        Image.fromarray(pixels).save(options.sheets / f"{way}-{match}-{scene.shape}-{scene.motion}.png")
                name = f"{way}{' with LoRAs' if loras else ''}, colours {match}"
                rows.append(row_of(name, scenes, videos))
                print({key: value for key, value in rows[-1].items() if key != "means"}, flush=True)
    result = envelope("long-videos", torch.device("cpu"), rows, program="wan_lab.long_videos")
    print(write_result(result, result_path(options.out, "long-videos", torch.device("cpu"))))


if __name__ == "__main__":
    main()
