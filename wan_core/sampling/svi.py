"""Long videos of SVI 2.0 Pro (Stable Video Infinity): what a plan says of them, and which LoRAs are SVI's.

A clip begins with an anchor picture, the same in each, and with the last latents of the clip before. So latents never
go through pixels between clips, and what drifts is drawn back to the anchor. Image-to-video of Wan 2.2 A14B is trained
for it by a LoRA on each expert, which is known by its name or metadata. Imports no torch.

Source: Stable-Video-Infinity, branch svi_wan22; names of files as KJNodes' and Wan2GP's users have them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from wan_core.config import OptionError, WindowOptions
from wan_core.models.wan.families.clips import LongVideo
from wan_core.sampling.plan import KnownFrames, Plan
from wan_core.sampling.presets import safetensors_metadata
from wan_core.sampling.schedules import Window

USUAL = "SVI_v2_PRO_Wan2.2-I2V-A14B_HIGH_lora_rank_128_fp16.safetensors and its LOW file"
_SVI = re.compile(r"(?<![a-z])svi(?![a-z])|stable[ _.-]?video[ _.-]?infinity", re.IGNORECASE)
_PRO = re.compile(r"(?<![a-z])pro(?![a-z])", re.IGNORECASE)
_SECOND = re.compile(r"(?<![0-9.])v?2(?:[._-]?0)?(?![0-9])", re.IGNORECASE)
_WAN = re.compile(r"wan[ _.-]?2[._-]?[12]", re.IGNORECASE)  # another 2 than that of SVI


def svi_release(file: Path) -> str | None:
    """Which SVI a LoRA is of by its metadata or its name: `2.0 Pro`, or `another` one; None: of none."""
    metadata = safetensors_metadata(file)
    for text in (" ".join(f"{key} {value}" for key, value in metadata.items() if len(value) < 200), file.name):
        if _SVI.search(text):
            said = _WAN.sub("", text)
            return "2.0 Pro" if _PRO.search(said) and _SECOND.search(said) else "another"
    return None


def with_svi(
    plan: Plan,
    long: LongVideo,
    files: Sequence[Path],
    *,
    known: bool,
    windows: WindowOptions | None,
    part: Window | None,
) -> Plan:
    """`plan` of a clip with what each is given, and notes of the LoRAs. files: all of them, if these are known. Raises
    OptionError for what an anchored clip cannot have."""
    releases = {file.name: svi_release(file) for file in files}
    pro = [name for name, release in releases.items() if release == "2.0 Pro"]
    if not long.anchored:
        told = len(long.clips) > 1 and pro
        note = f"LoRA {pro[0]} is of SVI 2.0 Pro, whose clips --svi makes; these are not" if told else ""
        return replace(plan, notes=(*plan.notes, note)) if note else plan
    for given, what in ((windows, "context windows"), (part, "a part of the schedule"), (plan.known, "keyframes")):
        if given is not None:
            raise OptionError(f"--svi and {what} given: its clips begin with an anchor picture alone. Leave one out")
    carried, frames = long.clips[-1].carried, long.clips[0].frames
    plan = replace(plan, known=KnownFrames((0,), frames, handed=tuple(range(1, carried))))
    others = [name for name, release in releases.items() if release == "another"]
    notes = [f"LoRA {name} is of another SVI than 2.0 Pro" for name in others]
    if known and not pro:
        notes.append(f"no LoRA is SVI 2.0 Pro's by its name or metadata, and without it clips drift: give {USUAL}")
    return replace(plan, notes=(*plan.notes, *notes))
