"""Run by ComfyUI's Python: the host memory that nodes take while they make inputs, measured and as `peak_bytes` says.
Prints one JSON object: case -> (measured, said), in bytes.

    python host_peaks.py COMFYUI_PATH
"""

from __future__ import annotations

import gc
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import native_models as world

WIDTH, HEIGHT, FRAMES = 320, 320, 81


class VAE:
    """It copies pictures as the socket's does on a CPU, and encodes nothing."""

    latent_channels = 16

    def encode(self, pixels: Any) -> Any:
        import torch

        media = importlib.import_module("wan_core.models.wan.families.media")
        video = media.pixels_to_video(pixels[..., :3])
        frames, height, width = video.shape[2:]
        return torch.zeros(1, 16, (frames - 1) // 4 + 1, height // 8, width // 8)


def status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def measured(run: Callable[[], Any]) -> int:
    """The most resident bytes while it runs beyond those before."""
    run()  # what it imports stays
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before, made = status("VmRSS"), run()
    peak = status("VmHWM") - before
    del made
    return peak


def cases(nodes: Any) -> dict[str, tuple[Callable[[], Any], str, tuple[str, ...]]]:
    """Case -> what runs, the family, the fields that have pictures."""
    import torch

    control, animate, known, sound = (
        importlib.import_module(f"pack.nodes.{n}") for n in ("control", "animate", "conditioning", "sound")
    )
    size, vae, text = (WIDTH, HEIGHT, FRAMES), VAE(), [[torch.zeros(1, 8, 64), {}]]
    video, masks, one = (
        torch.rand(FRAMES, HEIGHT, WIDTH, 3),
        torch.rand(FRAMES, HEIGHT, WIDTH),
        torch.rand(1, 64, 64, 3),
    )
    small = torch.rand(FRAMES, 160, 160, 3)
    spoken = {"encoded_audio_all_layers": [torch.zeros(1, 400, 64)] * 3, "audio_samples": 400 * 320}
    both = (text, text, vae, *size)
    vace, image = control.WanCoreVACE.execute, known.WanCoreImageToVideo.execute
    one_face, two = animate.WanCoreAnimate.execute, animate.WanCoreAnimate2.execute
    speech = sound.WanCoreSoundToVideo.execute
    placed = {"background_video": video, "character_mask": masks}
    return {
        "image": (lambda: image(*both, one), "wan", ("image",)),
        "images": (lambda: image(*both, video[:40], one), "wan", ("image", "last_image")),
        "vace": (lambda: vace(*both, 1.0), "vace", ()),
        "vace masks": (lambda: vace(*both, 1.0, control_masks=masks), "vace", ()),
        "vace control": (lambda: vace(*both, 1.0, video, masks, one, one, one), "vace", ("control_video",)),
        "vace fitted": (lambda: vace(*both, 1.0, small), "vace", ("control_video",)),
        "camera": (lambda: control.WanCoreCamera.execute("zoom-in", *size), "camera", ("camera",)),
        "animate": (lambda: one_face(*both, one, video), "animate", ()),
        "animate face": (lambda: one_face(*both, one, small, face_video=small), "animate", ("face_video",)),
        "animate all": (
            lambda: one_face(*both, one, video, video, **placed),
            "animate",
            ("face_video", "background"),
        ),
        "animate 2": (lambda: two(*both, one, video, previous_frames=video), "animate2", ()),
        "sound": (lambda: speech(*both, spoken, one), "s2v", ()),
        "sound poses": (lambda: speech(*both, spoken, one, video), "s2v", ("pose_video",)),
        "sound goes on": (lambda: speech(*both, spoken, one, None, video[:80]), "s2v", ("carried",)),
        "sound all": (lambda: speech(*both, spoken, one, video, video[:80]), "s2v", ("pose_video", "carried")),
    }


def main(checkout: str) -> dict[str, tuple[int, int]]:
    nodes = world.set_up(checkout)
    sizes, families = (importlib.import_module(f"wan_core.{n}") for n in ("pipeline.host_sizes", "models.wan.families"))
    vae = importlib.import_module("wan_core.models.vae.config").VAE_21
    found = {}
    for name, (run, family, given) in cases(nodes).items():
        said = sizes.peak_bytes(families.FAMILIES[family], vae, WIDTH, HEIGHT, FRAMES, given=given)
        found[name] = measured(run), said
    return found


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
