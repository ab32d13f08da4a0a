"""What the name and the metadata of a file of weights tell: that they are step-distilled and for how many steps, for
which expert they are, and of which release, family or kind of LoRA. `read_name` is the one place that reads names.

Metadata count before the name of the file, and that before the name of its folder. Where a name decides, plans say so
and how to say otherwise.

Whether weights are step-distilled can be told from tensors in two cases, attention of TurboDiffusion and of FastVideo,
whose files are refused (`wan_core.checkpoint.unsupported`). Any other distilled transformer has the names and shapes of
the one that it was made from, a distilled LoRA those of any LoRA. Differences of norms and biases (`diff`, `diff_b`)
only say that a LoRA was extracted from a whole model, distilled or not. What metadata say of a training set is
reliable: LoRAs that were trained on pictures or videos are not distilled, whatever their name. Names of tensors tell
the experts of a LoRA that holds both (`wan_core.checkpoint.lora.names`).

Sources of the words: model pages of lightx2v, Kijai, Comfy-Org, TurboDiffusion, FastVideo, rCM, FusionX, Rapid AIO and
others on Hugging Face and Civitai; `tests/config/test_file_names.py` has the names.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from wan_core.config.changes import until_changed
from wan_core.config.limits import MAX_HEADER

EXPERTS = ("high", "low")
# Metadata of a file in which programs put the name of its model.
NAMING = ("modelspec.title", "modelspec.architecture", "general.name", "general.basename")
# Metadata that only programs write that train a LoRA on pictures or videos (musubi-tuner, ai-toolkit).
TRAINED = ("ss_datasets", "ss_dataset_dirs", "ss_num_train_images", "ss_num_train_items", "training_info")

USUAL_STEPS = 4  # of distilled weights whose name has no number
# Patterns are of names with a dash for each underscore and space. A number of steps stands alone: "4steps" and "4-step"
# match, the "3-step-1200" (epoch and step) of a training run does not.
_STEPS = re.compile(r"(?<![0-9.])([1-8])(?:-?steps(?![a-z0-9])|step(?![a-z0-9])|-step(?![a-z0-9]|-?\d))", re.IGNORECASE)
_DISTILLED = re.compile(
    r"distill|lightning|lightx2v|lightspeed|caus-?vid|acc-?vid|fusioni?x|fast-?wan|turbo-?wan|turbo(?![a-z])|"
    r"(?:self|causal)-?forcing|rapid-(?:mega-)?aio|rapid-?all-?in-?one|krea-realtime|(?<![a-z])(?:rcm|dmd2?)(?![a-z])|"
    r"(?:14b|[it]2v)-(?:high|low)-lighting",
    re.IGNORECASE,
)
_NOT = re.compile(r"(?<![a-z])(?:no|non|not|un|without)-?$", re.IGNORECASE)  # before such a word
_MORE_STEPS = {"accvid": 8, "fusionx": 8, "fusionix": 8}

# In capitals anywhere; otherwise before such a word, or at the end but for versions, sizes and precisions: not
# "high_detail". Civitai writes words together, "synthseductionHighV9", and H and L stand for the words.
_TAIL = (
    r"(?:[ ._-]*(?:(?i:v|b?fp?|rank|epoch|e|step|s|int|q|k)?\d+(?!\d)(?i:p)?|(?i:e\dm\d(?:fn)?|[it]2v)"
    r"|(?i:quant|scaled|comfyui|gguf))|[ ._-](?i:kj|k|[sml])(?![A-Za-z]))*$"
)
_EXPERT = re.compile(
    rf"(?<![A-Za-z])(HIGH|LOW)(?![A-Za-z])"
    rf"|(?:(?<![A-Za-z])((?i:high|low))|(?<=[a-z])(High|Low))(?:[ ._-]*(?i:noise|expert|model|lora|lighting)|{_TAIL})"
    rf"|(?<=[ ._-])([HL]){_TAIL}"
)
_ENDINGS = (".safetensors", ".gguf", ".pth", ".pt", ".ckpt", ".bin", ".sft")

_RELEASE = re.compile(r"wan-?(?:video)?-?2[.-]?([12])(?!\d)", re.IGNORECASE)
_TWO_EXPERTS = re.compile(r"(high|low)-?noise|a14b", re.IGNORECASE)
_ANIMATE2 = re.compile(r"animate-?\.?2(?!\.?\d)", re.IGNORECASE)
_SVI = re.compile(r"(?<![a-z])svi(?![a-z])|stable[.-]?video[.-]?infinity", re.IGNORECASE)
_PRO = re.compile(r"(?<![a-z])pro(?![a-z])", re.IGNORECASE)
_SECOND = re.compile(r"(?<![0-9.])v?2(?:[.-]?0)?(?![0-9])", re.IGNORECASE)


class NameSays(NamedTuple):
    """What a name says. distilled: the word for it, "" without one. undistilled: the word that it says no to. steps:
    that the weights are distilled for. release: of Wan, "2.1" or "2.2". svi: of Stable Video Infinity, "2.0 Pro" or
    "another"."""

    distilled: str = ""
    undistilled: str = ""
    steps: int | None = None
    expert: str | None = None
    release: str | None = None
    family: str | None = None
    svi: str | None = None


@functools.lru_cache(maxsize=1024)
def read_name(name: str) -> NameSays:
    """What the name of a file or folder says, or another text that names a model."""
    plain = re.sub(r"[_\s]", "-", name)
    distilled, undistilled, steps = _distilled(plain)
    release = next((f"2.{match[1]}" for match in _RELEASE.finditer(plain)), None)
    svi = None
    if _SVI.search(plain):
        rest = _RELEASE.sub("", plain)  # another 2 than that of SVI
        svi = "2.0 Pro" if _PRO.search(rest) and _SECOND.search(rest) else "another"
    return NameSays(
        distilled,
        undistilled,
        steps,
        _expert(name),
        release or ("2.2" if _TWO_EXPERTS.search(plain) else None),
        "animate2" if _ANIMATE2.search(plain) else None,
        svi,
    )


def _distilled(plain: str) -> tuple[str, str, int | None]:
    """The word for distilled weights, or the one that is said no to, and the steps."""
    word, number = "", _STEPS.search(plain)
    for match in _DISTILLED.finditer(plain):
        if _NOT.search(plain[: match.start()]):
            return "", match[0], None
        word = word or match[0]
    steps = _MORE_STEPS.get(word.lower().replace("-", ""), USUAL_STEPS) if number is None else int(number[1])
    word = word or ("" if number is None else number[0])
    return word, "", steps if word else None


def _expert(name: str) -> str | None:
    """The expert that a name speaks of; None if it speaks of none or of both."""
    name = name.removesuffix(".index.json")
    for ending in _ENDINGS:
        name = name.removesuffix(ending)
    words = ("".join(word or "" for word in match.groups()) for match in _EXPERT.finditer(name))
    experts = {{"h": "high", "l": "low"}.get(word.lower(), word.lower()) for word in words}
    return experts.pop() if len(experts) == 1 else None


@dataclass(frozen=True)
class FileSays:
    """What a file says of itself. steps: that its weights are distilled for, None where it does not say that they are.
    why: what says so, or what says that they are not; "" where nothing does. expert_by: "metadata" or "name"."""

    name: str
    steps: int | None = None
    why: str = ""
    expert: str | None = None
    expert_by: str = "name"
    svi: str | None = None


def file_says(path: Path, metadata: Mapping[str, str] | None = None) -> FileSays:
    """What the metadata and the name of a file or folder of weights say, and the name of its folder. metadata: None
    reads those of a safetensors file."""
    metadata = safetensors_metadata(path) if metadata is None else metadata
    steps, why = _steps_of(path, metadata)
    own, folder = read_name(path.name), read_name(path.parent.name)
    by = "metadata" if metadata.get("expert") in EXPERTS else "name"
    diffusers = "low" if "transformer_2" in (path.name, path.parent.name) else None
    expert = metadata["expert"] if by == "metadata" else own.expert or folder.expert or diffusers
    about = " ".join(f"{key} {value}" for key, value in metadata.items() if len(value) < 200)
    return FileSays(path.name, steps, why, expert, by, read_name(about).svi or own.svi)


def _steps_of(path: Path, metadata: Mapping[str, str]) -> tuple[int | None, str]:
    """The number of steps that weights are distilled for, and what decided."""
    if "distilled" in metadata:
        text = metadata["distilled"].strip().lower()
        if text in ("", "0", "no", "none", "false"):
            return None, f"the metadata of {path.name} say that it is not distilled"
        return read_name(text).steps or USUAL_STEPS, f"the metadata of {path.name} say that it is step-distilled"
    names = [(metadata[key], "metadata") for key in NAMING if key in metadata]
    names += [(path.name, "name"), (path.parent.name, "folder")]
    trained = next((key for key in TRAINED if key in metadata), None)
    for text, where in names:
        said = read_name(text)
        if said.undistilled:
            return None, f"the {where} of {path.name} says no {said.undistilled}"
        if said.distilled and trained is not None:
            return None, f"the metadata of {path.name} say that it was trained ({trained}), and not distilled"
        if said.distilled:
            return said.steps, f"the {where} of {path.name} says {said.distilled!r}, which is step-distilled"
    return None, ""


def safetensors_metadata(file: Path) -> Mapping[str, str]:
    """The metadata of a safetensors file; empty if `file` is not one. Does not import torch: plans need none."""
    try:
        return _read_metadata(file) if file.is_file() else {}
    except OSError:
        return {}


@until_changed(64)  # a plan asks dozens of times, and to read the header of an expert takes 3 ms
def _read_metadata(file: Path) -> Mapping[str, str]:
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > MAX_HEADER or opened.read(1) != b"{":
            return {}
        header = b"{" + opened.read(length - 1)
    try:
        metadata = json.loads(header).get("__metadata__", {})
    except (ValueError, RecursionError):
        return {}
    valid = isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    return metadata if valid else {}
