"""Suite `small`: whole four-step videos on smaller cards with less host memory, against the same files without limits.

    python -m benchmarks small --scratch /tmp/wc --setting "fp8 12/32" --setting "gguf 8/16"

A setting is the files (fp8: scaled FP8 as in ComfyUI's template; gguf: Q4_K experts), GiB of the card and GiB of host
memory, or `whole`: without limits. Image to video with a LoRA for each expert. Everything is read from --scratch, which
must be on a disk and not in memory; cached files are dropped before each row. The card is limited by what the process
may allocate of it (`--memory-limit`), the host by `limited_host`.

NAME: first    seconds from the start of the process to the first file
NAME: kept     seconds from one file to the next, the median of `--runs` (3); prompt and picture are those of the first
slowdown       seconds over those of the same files without limits, where these were measured before
disk_gb        read from the disk for that video; disk_gb_s: the disk's rate, measured before
host_peak_gib  the most memory that the control group had, cached files counted; host_kinds: the most of each kind
phases         seconds of all phases of that video
notes          what the report says of memory
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.comfy_files import EXPERTS, expert_file, lora_file, plain_config
from benchmarks.gguf_experts import gguf_file, write_gguf
from benchmarks.limited_host import disk_bytes, disk_rate, drop_caches, host_limit
from benchmarks.rows import Row, guarded
from benchmarks.videos import FILES, Making, model_words
from wan_core.config import OptionError

TASK = "i2v"
SETTING = re.compile(r"(fp8|gguf) (?:whole|(\d+)/(\d+))")
DEFAULT = ("fp8 whole", "fp8 12/32", "fp8 12/16", "fp8 8/32", "fp8 24/16")
NOTES = re.compile(r"residency|stay in the file|pinned|blocks stay|LoRA")


def small_rows(
    name: str, sizes: list[str], device: torch.device, options: argparse.Namespace, details: dict[str, Any]
) -> Iterator[Row]:
    """Raises OptionError for a setting of another form, before any work."""
    settings = [(entry, SETTING.fullmatch(entry)) for entry in options.setting or DEFAULT]
    if wrong := [entry for entry, found in settings if found is None]:
        raise OptionError(
            f"setting {wrong[0]!r} given; write the files, and GiB of card and of host or 'whole': 'fp8 12/32'"
        )
    runs = 3 if options.runs is None else options.runs
    with TemporaryDirectory(prefix="wancore-small-", dir=options.scratch) as folder:
        scratch = Path(options.scratch or folder)
        for kind in dict.fromkeys(found[1] for _, found in settings if found):
            words, checked = files(kind, scratch, device)
            details["disk_gb_s"] = details.get("disk_gb_s") or disk_rate(checked)
            for size in sizes:
                making = Making(Path(folder), words, device, 1, [], size, runs, counter=partial(disk_bytes, scratch))
                whole: dict[str, float] = {}
                for _, found in settings:
                    if found and found[1] == kind:
                        yield from cell_rows(kind, found[2], found[3], making, whole)


def files(kind: str, scratch: Path, device: torch.device) -> tuple[list[str], Path]:
    """Words of `generate` for the model's files, written if they are not there, and the file whose rate is measured."""
    models = scratch / ("tiny" if device.type == "cpu" else "models")
    words = model_words(f"{FILES}{TASK}", scratch, models, device)
    loras = [f"--lora={one}={models / 'loras' / lora_file(TASK, one)}" for one in EXPERTS]
    words += ["--preset", "4-step", *loras, "--precision", "checkpoint"]
    if device.type == "cpu":
        return words, models / "loras" / lora_file(TASK, EXPERTS[0])
    scaled = [models / "diffusion_models" / expert_file(TASK, one, None) for one in EXPERTS]
    packed = [models / "diffusion_models" / gguf_file(TASK, one) for one in EXPERTS]
    if kind == "gguf":
        for path in scaled:
            path.unlink(missing_ok=True)  # both do not fit on a disk of 64 GB
        for seed, path in enumerate(packed):
            if not path.exists():
                write_gguf(plain_config(TASK, device), path, device, seed)
    return [*words, "--attention", "fast"], (packed if kind == "gguf" else scaled)[0]


def cell_rows(kind: str, card: str | None, host: str | None, making: Making, whole: dict[str, float]) -> Iterator[Row]:
    """Rows of a card and a host with so many GiB, None: all. whole: seconds without limits, by the name of the row."""
    label = f"{kind}, whole card" if card is None else f"{kind}, card {card} GiB, host {host} GiB"
    found = guarded(label, making.size, None, lambda: {"rows": limited_rows(card, host, making)})
    for row in found.get("rows", [found]):
        name = row["name"]
        if card is None:
            whole[name] = row.get("seconds", 0.0)
        elif whole.get(name) and "seconds" in row:
            row["slowdown"] = round(row["seconds"] / whole[name], 3)
        yield row | {"name": f"{label}: {name}" if name and "rows" in found else label}


def limited_rows(card: str | None, host: str | None, making: Making) -> list[Row]:
    words = [] if card is None or making.device.type == "cpu" else ["--memory-limit", card]
    drop_caches()
    with host_limit(None if host is None else float(host)) as limit:
        count = lambda: (limit.look(), making.counter())[1]  # noqa: E731
        try:
            first, *kept = replace(making, words=words, prefix=limit.prefix, counter=count).rows()
            rows: list[Row] = [first | {"name": "first"}, *kept]
        except RuntimeError as error:  # what the memory held is of interest here above all
            rows = [{"name": "", "size": making.size, "failed": str(error)}]
        for row in rows:
            row["host_limit"] = limit.how
            row |= {} if limit.peak_gib is None else {"host_peak_gib": limit.peak_gib}
            row |= {"host_kinds": limit.kinds} if limit.kinds else {}
            row["notes"] = [note for note in row.get("notes", ()) if NOTES.search(note)]
        return rows
