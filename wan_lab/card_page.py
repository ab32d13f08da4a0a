"""What a report card says: of each video its numbers, of all of them a table in Markdown and a picture.

Both can be posted as they are. What goes into them is named here (`SAID`); paths, names of files and prompts are not.

Legend: F frames, H rows, W columns.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from wan_core import __version__
from wan_core.config import SkipOptions
from wan_core.config.outputs import written_beside
from wan_core.execution.report import GIB, Report, device_name, host_peak_bytes
from wan_core.media.pictures import FAINT, Canvas, clock
from wan_core.sampling.cache.skipping import skip_words
from wan_core.sampling.plan import Plan
from wan_lab.commits import commit
from wan_lab.compare import Comparison, summary
from wan_lab.pictures import side_by_side
from wan_lab.results import versions

FULL = "full"
SHOWN = 3  # frames of each video in the picture
THUMB = 320  # pixels across, at most
SAID = (  # settings of a run that a card says
    "task", "size", "frames", "steps", "shift", "guidance", "guidance_mode", "solver", "precision", "attention",
    "compile", "residency",
)  # fmt: skip
MEASURED = {  # column -> what runs measured
    "peak GiB": ("peak", "{:.1f}"),
}


@dataclass(frozen=True)
class Video:
    """A finished video: frames uint8 [F, H, W, 3], and what is measured of its run as plain numbers and words."""

    frames: Tensor
    facts: dict[str, Any]

    @classmethod
    def measured(cls, frames: Tensor, report: Report, seconds: float) -> Video:
        """seconds: of the whole run, its text included."""
        text = sum(phase.seconds for name, phase in report.phases.items() if name == "text")
        peak = max((p.peak for name, p in report.phases.items() if not name.startswith(("load", "warm"))), default=0)
        facts = {"seconds": seconds - text, "peak": peak / GIB, "host": host_peak_bytes() / GIB}
        said: dict[str, Any] = {name: report.settings[name] for name in SAID if name in report.settings}
        if isinstance(said.get("precision"), Mapping):
            said["precision"] = said["precision"]["high"]
        return cls(frames, facts | {"said": said, "loras": "loras" in report.settings})

    @classmethod
    def read(cls, path: Path) -> Video | None:
        """One that was kept; None where there is none, or its file is damaged."""
        with suppress(OSError, ValueError, KeyError, BadZipFile), path.open("rb") as stored, np.load(stored) as file:
            return cls(torch.from_numpy(file["frames"]), json.loads(str(file["facts"])))
        return None

    def write(self, path: Path) -> None:
        with written_beside(path) as temporary, temporary.open("wb") as file:
            np.savez(file, frames=self.frames.numpy(), facts=np.array(json.dumps(self.facts)))


@dataclass
class Card:
    """What is measured so far. left_out: settings, and why."""

    settings: Mapping[str, SkipOptions | None]
    plans: dict[str, Plan]
    perceptual: str
    device: torch.device
    left_out: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    comparisons: dict[str, list[Comparison]] = field(default_factory=dict)
    facts: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    sheets: list[dict[str, tuple[str, Tensor]]] = field(default_factory=list)  # by prompt and setting: caption, frames

    @property
    def names(self) -> list[str]:
        return [name for name in self.comparisons if name not in self.left_out]

    def mean(self, name: str, fact: str) -> float | None:
        values = [facts[fact] for facts in self.facts[name] if fact in facts]
        return fmean(values) if values else None

    def add(self, name: str, video: Video, compared: Comparison) -> None:
        self.comparisons.setdefault(name, []).append(compared)
        self.facts.setdefault(name, []).append(video.facts)
        decibels = "" if name == FULL else f"  {compared.psnr:.1f} dB"
        shown = video.frames[np.linspace(0, len(video.frames) - 1, SHOWN).round().astype(int)]
        height, width = shown.shape[1:3]
        if width > THUMB:
            small = [Image.fromarray(one).resize((THUMB, round(THUMB * height / width))) for one in shown.numpy()]
            shown = torch.from_numpy(np.stack([np.asarray(one) for one in small]))
        self.sheets[-1][name] = f"{name}  {clock(video.facts['seconds'])}{decibels}", shown

    def title(self) -> str:
        said = self.facts[FULL][0]["said"]
        return f"{said['task']}, {'x'.join(map(str, said['size']))}, {said['frames']} frames, {said['steps']} steps"

    def markdown(self, picture: str, prompts: Sequence[str] = ()) -> str:
        """picture: the name of its file. prompts: that are told."""
        rows = [self.row(name) for name in self.names]
        columns = list(dict.fromkeys(column for row in reversed(rows) for column in row))
        table = [columns, ["---", *["---:"] * (len(columns) - 1)], *([row.get(c, "") for c in columns] for row in rows)]
        lines = [
            f"# WanCore report card: {device_name(self.device)}",
            "",
            self.title(),
            "",
            f"![frames]({picture})",
            "",
        ]
        lines += [f"| {' | '.join(cells)} |" for cells in table]
        lines += [
            "",
            f"Prompts: {len(self.sheets)}. Each video is compared with the full run of the same seed; numbers are "
            "means. Seconds are those of a whole video, its text left out.",
            "",
            *(f"- {name}: {skip_words(self.settings[name] or SkipOptions())}" for name in self.names if name != FULL),
            *(f"- {name}: left out, it {why}" for name, why in self.left_out.items()),
            *(f"- {note}" for note in self.notes),
            *(f"- {line}" for line in self.machine()),
            *(f"- prompt {number}: {prompt}" for number, prompt in enumerate(prompts, 1)),
        ]
        return "\n".join(lines) + "\n"

    def as_dict(self) -> dict[str, Any]:
        """The card for `reports/`: what its text says, less the prompts."""
        rows = [self.row(name) for name in self.names]
        return {"card": device_name(self.device), "video": self.title(), "machine": self.machine(), "rows": rows}

    def row(self, name: str) -> dict[str, str]:
        """The cells of a setting by column; what was not measured has none."""
        videos, seconds = summary(self.comparisons[name]), self.mean(name, "seconds") or 0.0
        cells = {"setting": name, "s a video": f"{seconds:.1f}", "forwards": str(self.plans[name].forwards)}
        if name != FULL:
            cells |= {
                "faster": f"{(self.mean(FULL, 'seconds') or 0.0) / seconds:.2f}",
                "PSNR dB": f"{videos['psnr']:.1f}",
                "worst": f"{videos['psnr_worst']:.1f}",
                "SSIM": f"{videos['ssim']:.3f}",
                self.perceptual.upper(): f"{videos['perceptual']:.3f}",
            }
        if "truth" in videos:
            cells["captions true"] = f"{videos['truth']:.0%}"
        for column, (fact, form) in MEASURED.items():
            if value := self.mean(name, fact):
                cells[column] = form.format(value)
        return cells

    def machine(self) -> list[str]:
        """The machine, the libraries and the settings of the runs."""
        memory, full = "", self.facts[FULL]
        host = max(facts["host"] for facts in full)
        if self.device.type == "cuda":
            memory = f", {torch.cuda.get_device_properties(self.device).total_memory / GIB:.0f} GiB"
        libraries = {"WanCore": f"{__version__} (commit {commit() or 'not known'})", **versions(self.device)}
        return [
            f"{device_name(self.device)}{memory}, {platform.system()}; host memory {host:.1f} GiB",
            ", ".join(f"{name} {version}" for name, version in libraries.items()),
            "; ".join(Report(self.device, full[0]["said"]).setting_lines()) + "; with LoRAs" * full[0]["loras"],
        ]

    def picture(self) -> Image.Image:
        """A row of settings for each frame that is shown of each prompt, under what was measured of its video."""
        sheets = [dict(sheet[name] for name in self.names) for sheet in self.sheets]
        frames = [frame for sheet in sheets for frame in side_by_side(sheet)]
        width = frames[0].shape[1]
        head = Canvas(width, 56)
        head.text(8, 8, f"WanCore {__version__}   {device_name(self.device)}", size=17)
        head.text(8, 34, self.title(), FAINT, 12)
        return Image.fromarray(np.concatenate([np.asarray(head.finish()), *(frame.numpy() for frame in frames)]))
