"""What the folder that a user names as the model holds: a release, or ComfyUI's models folder.

Of a models folder, the files that make one model are chosen: transformers by `--task` where several models are there,
then the text encoder and the VAE that fit them. Files are recognised by their headers.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from wan_core.checkpoint import detect, find_parts, open_checkpoint
from wan_core.checkpoint.detect import Kind
from wan_core.config import LoadOptions, OptionError, UserError
from wan_core.config.checks import meant_hint, near_file
from wan_core.config.model_files import TEXT_ENCODERS, TRANSFORMERS, models_root, task_hint
from wan_core.models.audio.wav2vec2 import SpeechConfig
from wan_core.models.text.umt5 import TextConfig
from wan_core.models.vae.config import VAEConfig
from wan_core.models.wan.config import DiTConfig
from wan_core.models.wan.families import Task, choose_task, family_of, find_task
from wan_core.models.wan.families.task import Clues
from wan_core.pipeline.model_parts import ExpertFile

log = logging.getLogger(__name__)

ENDINGS = (".safetensors", ".sft", ".gguf")
RELEASES = (  # repositories of whole releases on Hugging Face
    "Wan-AI/Wan2.2-T2V-A14B",
    "Wan-AI/Wan2.2-I2V-A14B",
    "Wan-AI/Wan2.2-TI2V-5B",
    "Wan-AI/Wan2.2-Animate-14B",
    "Wan-AI/Wan2.2-S2V-14B",
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers",
    "Wan-AI/Wan2.2-I2V-A14B-Diffusers",
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers",
    "Wan-AI/Wan2.1-T2V-14B",
    "Wan-AI/Wan2.1-T2V-1.3B",
    "Wan-AI/Wan2.1-I2V-14B-480P",
    "Wan-AI/Wan2.1-I2V-14B-720P",
)


def parts_in(options: LoadOptions, *, transformers_only: bool) -> dict[str, Path]:
    """Part -> file or folder in `options.model`; absent parts have no key. Raises OptionError, CheckpointError."""
    assert options.model is not None
    folder = Path(options.model)
    if not folder.is_dir():
        raise no_folder(options.model)
    root = models_root(folder)
    if root is None:
        return find_parts(folder)
    return in_models_folder(root, options, transformers_only)


def no_folder(model: str) -> OptionError:
    """The error for a model that is not there: the command that downloads it, where it is a repository's name."""
    path = Path(model)
    if path.exists():
        return OptionError(f"{model} is not a folder: name single files by --high, --low, --text-encoder and --vae")
    release = next((name for name in RELEASES if model.lower() in (name.lower(), name.partition("/")[2].lower())), None)
    repository = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", model) is not None and path.name != "models"
    if release is None and (not repository or path.parent.is_dir()):
        nearby = near_file(path) or meant_hint(model, ["tiny", *(name.partition("/")[2] for name in RELEASES)])
        what = (
            "give tiny, the folder of a release, ComfyUI's models folder or a repository such as Wan-AI/Wan2.2-T2V-A14B"
        )
        return OptionError(f"there is no folder {model}{nearby or f': {what}'}")
    name = release or model
    folder = name.partition("/")[2]
    if Path(folder).is_dir() and folder != model:
        return OptionError(f"{model} is not a folder here, but {folder} is: give --model {folder}")
    several = "" if release else " (with --include PATTERN where it holds files of several models)"
    return OptionError(
        f"{model} is not a folder here, and nothing is downloaded by itself. `hf download {name} --local-dir {folder}` "
        f"downloads it from Hugging Face{several}; then give --model {folder}"
        + (meant_hint(model, RELEASES) if release is None and model.lower().startswith("wan") else "")
    )


@dataclass(frozen=True)
class Model:
    task: Task
    config: DiTConfig
    high: Path
    low: Path | None = None

    def words(self, root: Path) -> str:
        files = [str(path.relative_to(root)) for path in (self.high, self.low) if path is not None]
        return f"{self.task.name} ({' and '.join(files)})"


def in_models_folder(root: Path, options: LoadOptions, transformers_only: bool) -> dict[str, Path]:
    """The files of the one model that `options` mean. Raises OptionError where several could be meant."""
    if options.high or options.low:
        config = cast(DiTConfig, detect(options.high or str(options.low), "dit").config)
        chosen: dict[str, Path] = {}
    else:
        model = one_model(root, options.task)
        config, chosen = model.config, {"high": model.high}
        if model.low is not None:
            chosen["low"] = model.low
    if transformers_only:
        return chosen
    searched: dict[str, list[Path]] = {}
    if options.text_encoder is None:
        searched["text_encoder"] = [
            path
            for path, one in recognised(root, TEXT_ENCODERS, "text_encoder")
            if cast(TextConfig, one).dim == config.text_dim
        ]
    if options.vae is None:
        searched["vae"] = vaes(root, config.out_channels)
    if options.clip_vision is None and config.image_dim is not None:
        searched["clip_vision"] = [path for path, _ in recognised(root, ("clip_vision",), "clip_vision")]
    if options.audio_encoder is None and (states := family_of(config).speech_states(config)) is not None:
        searched["audio_encoder"] = [
            path
            for path, one in recognised(root, ("audio_encoders",), "audio_encoder")
            if cast(SpeechConfig, one).states == states
        ]
    return chosen | {part: largest(part, paths) for part, paths in searched.items() if paths}


def vaes(root: Path, channels: int) -> list[Path]:
    """VAE files of a models folder whose latents have so many channels."""
    return [path for path, one in recognised(root, ("vae",), "vae") if cast(VAEConfig, one).z_dim == channels]


def vae_in(model: str, channels: int) -> Path | None:
    """The VAE of a release, or the one of a models folder for latents of so many channels. Raises OptionError."""
    folder = Path(model)
    if not folder.is_dir():
        raise no_folder(model)
    root = models_root(folder)
    if root is None:
        return find_parts(folder).get("vae")
    fitting = vaes(root, channels)
    return largest("vae", fitting) if fitting else None


def largest(part: str, paths: Sequence[Path]) -> Path:
    """The largest of several files of one model, which is the most exact."""
    file = max(paths, key=lambda path: (path.stat().st_size, path.name))
    if len(paths) > 1:
        log.info("%s: %s, the largest of %d files; the option names another", part, file, len(paths))
    return file


def one_model(root: Path, task: str | None) -> Model:
    """The only model in a models folder, or the only one for `task`. Raises OptionError naming all."""
    models, halves = models_in(root)
    fitting = models
    if task is not None:
        wanted = find_task(task)
        fitting = [model for model in models if model.task == wanted] or [one for one in models if fits(one, wanted)]
    if len(fitting) == 1:
        return fitting[0]
    names = "; ".join(model.words(root) for model in fitting or models)
    if fitting:
        choose = (
            "by --high and --low"
            if len({one.task.name for one in fitting}) == 1
            else "by --task, or by --high and --low"
        )
        raise OptionError(f"{len(fitting)} models are in {root}: {names}. Choose {choose}")
    for_task = "" if task is None else f" for {task}"
    others = f". There are {names}" if names else ""
    lacking = "".join(f". {half.relative_to(root)} lacks the other expert's file" for half in halves)
    raise OptionError(f"no whole transformer{for_task} is in {root}{others}{lacking}{task_hint(task)}")


def fits(model: Model, task: Task) -> bool:
    """Whether the transformers can be of `task`, whatever their names say."""
    same = (model.config.family, model.config.in_channels) == (task.family, task.in_channels)
    return same and task.two_experts == (model.low is not None)


def models_in(root: Path) -> tuple[list[Model], list[Path]]:
    """The models whose transformers are in a models folder: pairs of experts, and files that name no expert; and the
    files of experts without the other."""
    models: list[Model] = []
    halves: list[Path] = []
    experts: dict[tuple[DiTConfig, str], dict[str, Path]] = {}
    for path, config in recognised(root, TRANSFORMERS, "dit"):
        config = cast(DiTConfig, config)
        metadata = open_checkpoint(path).metadata
        expert = ExpertFile.of(path, metadata).expert
        if expert is not None:
            pair = re.sub("high|low", "*", str(path.relative_to(root)).lower())
            experts.setdefault((config, pair), {})[expert] = path
        elif (task := task_of(config, Clues(path, metadata, True))) is not None:
            models.append(Model(task, config, path))
    for (config, _), pair_files in experts.items():
        if len(pair_files) < 2:
            halves += pair_files.values()
            continue
        high = pair_files["high"]
        task = task_of(config, Clues(high, open_checkpoint(high).metadata, False))
        if task is not None:
            models.append(Model(task, config, high, pair_files["low"]))
    return models, halves


def task_of(config: DiTConfig, clues: Clues) -> Task | None:
    try:
        return choose_task(config, clues).task
    except OptionError:  # an architecture of no known task
        return None


def recognised(root: Path, folders: Sequence[str], kind: Kind) -> Iterator[tuple[Path, object]]:
    """Each file in these folders that is of `kind`, and its configuration. Files of other models are left out."""
    for path in files(root, folders):
        try:
            yield path, detect(path, kind).config
        except UserError as fault:
            log.info("%s is left out: %s", path, fault)


def files(root: Path, folders: Sequence[str]) -> list[Path]:
    paths = (path for folder in folders for path in (root / folder).rglob("*"))
    return sorted(path for path in paths if path.suffix.lower() in ENDINGS and path.is_file())
