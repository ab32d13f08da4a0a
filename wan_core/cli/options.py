"""Options that several commands share. Does not import torch, so that `--help` is fast."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

from wan_core.cli.control import FILES as CONTROL_FILES
from wan_core.cli.control import add_control_options, add_strength_options
from wan_core.cli.parsing import Once
from wan_core.cli.sound import FILES as SOUND_FILES
from wan_core.cli.sound import add_audio_option, add_encoder_option
from wan_core.cli.windows import add_windows_option
from wan_core.config import (
    COMPILES,
    GUIDANCE_MODES,
    LORA_MODES,
    PRECISIONS,
    RESIDENCIES,
    LoraOptions,
    NagOptions,
    OptionError,
)
from wan_core.config.checks import near_file, parse_size
from wan_core.config.outputs import Outputs
from wan_core.models.wan.families.family import NEGATIVE_SOURCE
from wan_core.models.wan.tasks import TASKS
from wan_core.sampling.cache.arguments import add_skip_options
from wan_core.sampling.plan import SCHEDULES
from wan_core.sampling.presets import CHOICES as PRESETS
from wan_core.sampling.window import Window

NEGATIVE_HELP = f"what the video should not show; an empty text is allowed (default: {NEGATIVE_SOURCE})"
RANDOM_SEED = "random"
MODEL_HELP = (
    "tiny (the embedded model), random:TASK, the folder of a release, or ComfyUI's models folder (with --task where it "
    "holds several models); the name of a repository prints the command that downloads it"
)
DEVICE_HELP = "auto, cpu, cuda, cuda:N (default %(default)s)"
VAE_PRECISION_HELP = "of the VAE; auto: bf16 on a GPU, fp32 on a CPU"


def add_model_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("models")
    group.add_argument("--model", help=MODEL_HELP)
    group.add_argument("--task", help="override the recognised task: " + ", ".join(TASKS))
    group.add_argument("--high", help="high-noise expert, or the only transformer: file, shard index or folder")
    group.add_argument("--low", help="low-noise expert")
    group.add_argument("--text-encoder", help="UMT5: file or folder")
    group.add_argument("--tokenizer", help="spiece.model, if the text encoder's file does not contain it")
    group.add_argument("--vae", help="VAE: file or folder")
    group.add_argument("--clip-vision", help="CLIP vision encoder: file or folder (Animate, Wan 2.1 image-to-video)")
    add_encoder_option(group)
    group.add_argument("--device", default="auto", help=DEVICE_HELP)
    group.add_argument(
        "--precision",
        default="checkpoint",
        choices=PRECISIONS,
        help="of transformer and text encoder; checkpoint: bf16 on a GPU, fp32 on a CPU. fp8-* and te-* store the "
        "transformer's matrices in FP8 (te: Transformer Engine), see docs/performance.md",
    )
    group.add_argument(
        "--keep-blocks", type=int, default=0, metavar="N", help="do not quantise the first and last N blocks"
    )
    group.add_argument(
        "--vae-precision",
        default="auto",
        choices=("auto", "bf16", "fp32"),
        help=VAE_PRECISION_HELP,
    )
    group.add_argument(
        "--attention",
        default="auto",
        help="backend, see `doctor`; fast: one that rounds to FP8 or INT8, where the card has one that is faster "
        "(default %(default)s)",
    )
    group.add_argument(
        "--compile", default="off", choices=COMPILES, help="compile one transformer block for all (default off)"
    )
    add_memory_options(group)
    add_lora_options(parser)
    group.add_argument(
        "--lora-mode",
        default="auto",
        choices=LORA_MODES,
        help="merge LoRAs into the weights, or attach them as extra matmuls; auto: attach to weights that stay packed "
        "(GGUF), else merge",
    )


def add_memory_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--residency",
        default="auto",
        choices=RESIDENCIES,
        help="resident: all models on the device; swap: one at a time; stream: blocks streamed from host memory; "
        "shard: split over GPUs; auto: chosen by free memory (default)",
    )
    group.add_argument(
        "--resident-blocks",
        type=int,
        metavar="N",
        help="blocks that stay on the device while the others stream (default: as many as fit)",
    )
    group.add_argument(
        "--memory-limit",
        type=float,
        metavar="GIB",
        help="use at most this much device memory, to plan and run as on a smaller GPU",
    )
    group.add_argument(
        "--host-memory-limit",
        type=float,
        metavar="GIB",
        help="use at most this much host memory for weights that wait there, and for what Animate-2 prepares; other "
        "weights stay in their mapped files "
        "(default: what is available)",
    )


def add_lora_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("LoRAs (FILE, or FILE:STRENGTH; each option may be repeated)")
    helps = {
        "auto": "for the expert that the file's metadata or name contains, else for both",
        "high": "for the high-noise expert",
        "low": "for the low-noise expert",
    }
    for expert, help in helps.items():
        group.add_argument(
            "--lora" if expert == "auto" else f"--lora-{expert}",
            dest="loras",
            action="append",
            default=[],
            type=partial(_lora, expert),
            metavar="FILE",
            help=help,
        )


def _lora(expert: str, text: str) -> LoraOptions:
    try:
        return LoraOptions.parse(text, expert)
    except OptionError as fault:
        raise argparse.ArgumentTypeError(str(fault)) from fault


def add_memory_plan_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("memory (with --memory)")
    group.add_argument(
        "--memory", action="store_true", help="print the GPU memory of each phase and the place of each model instead"
    )
    group.add_argument("--size", type=size, help="WIDTHxHEIGHT in pixels (default: the task's)")
    group.add_argument("--frames", type=int, help="4n + 1")
    group.add_argument("--precision", default="bf16", choices=PRECISIONS, help="of transformer and text encoder")
    group.add_argument("--compile", default="off", choices=COMPILES, help="as `generate` would compile")
    add_memory_options(group)


def add_driving_options(group: argparse._ArgumentGroup) -> None:
    """What Animate and Animate-2 take beside their videos."""
    group.add_argument("--pose-prompt", help="what the driving video shows (Animate-2; default: the prompt)")
    group.add_argument("--pose-strength", type=float, help="how strongly the driving video counts (Animate-2; 1)")
    group.add_argument("--reference-strength", type=float, help="how strongly the reference counts (Animate-2; 1)")
    group.add_argument(
        "--face-guidance",
        action=argparse.BooleanOptionalAction,
        help="guidance above 1 also leads away from a still face; without it, from the negative prompt alone (Animate; "
        "default: it does)",
    )


def add_request_options(parser: argparse.ArgumentParser, *, prompt: bool = True) -> None:
    group = parser.add_argument_group("video")
    which = group.add_mutually_exclusive_group(required=prompt)
    which.add_argument("--prompt")
    if prompt:
        which.add_argument(
            "--prompts",
            type=Path,
            metavar="FILE.jsonl",
            help="make many videos: a JSON object a line with options of one by name (prompt, seed, size, out, ...); "
            "names without `out` are those of --out with the number of the line. With --gpus each GPU makes one at a "
            "time, or each group of GPUs that --mesh needs. Videos that are there are not made again "
            "(docs/parallel.md)",
        )
    group.add_argument("--negative-prompt", help=NEGATIVE_HELP)
    group.add_argument("--image", action=Once, help="first frame (image-to-video, Fun, VACE)")
    group.add_argument("--last-image", action=Once, help="last frame (image-to-video, Fun inpaint, VACE)")
    group.add_argument("--from-video", action=Once, help="video to start from (video-to-video)")
    group.add_argument(
        "--denoise", type=float, help="strength of video-to-video, 0 to 1: how much of the noise it gets (default 0.7)"
    )
    add_audio_option(group)
    add_control_options(group)
    add_strength_options(group)
    group.add_argument(
        "--reference",
        action=Once,
        help="picture of who moves as in the driving videos (Animate) or speaks (S2V), or of what is to be seen (VACE, "
        "Fun control); several are possible in ComfyUI only (WanCore VACE)",
    )
    group.add_argument("--pose-video", help="video that is followed: drawn poses (Animate, S2V), any video (Animate-2)")
    group.add_argument("--face-video", help="video of a face whose expression is followed (Animate)")
    group.add_argument("--background", help="video in which the reference replaces somebody (Animate)")
    group.add_argument(
        "--mask",
        help="video that is white where that somebody is (Animate), or picture or video that is white where "
        "--control-video is made anew (VACE)",
    )
    add_driving_options(group)
    add_clip_options(group, "make a longer video in clips of N frames (default: the family's)")
    add_nag_option(group)
    group.add_argument("--size", type=size, help="WIDTHxHEIGHT in pixels (default: the task's, or the image's aspect)")
    group.add_argument("--frames", type=int, help="4n + 1")
    group.add_argument("--fps", type=int)
    group.add_argument(
        "--seed",
        type=seed_of,
        default=0,
        help="0 to 2^64 - 1, or random: a new one, which is printed and in the report (default %(default)s)",
    )
    group.add_argument(
        "--guidance-mode",
        default="auto",
        choices=GUIDANCE_MODES,
        help="run the two guidance branches one after the other (sequential) or as one batch",
    )
    add_plan_options(parser)


def add_clip_options(parser: argparse.ArgumentParser | argparse._ArgumentGroup, help: str) -> None:
    """For videos that are longer than those of the training."""
    parser.add_argument("--clip-frames", type=int, metavar="N", help=help)
    parser.add_argument("--overlap", type=int, metavar="N", help="N of them are the last frames of the clip before")
    add_windows_option(parser)


def seed_of(text: str) -> int | str:
    """A number, or `RANDOM_SEED`, which is drawn for each run."""
    if text == RANDOM_SEED:
        return text
    try:
        return int(text)
    except ValueError as fault:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a whole number nor {RANDOM_SEED}") from fault


def add_nag_option(group: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--nag",
        type=_nag,
        metavar="SCALE/TAU/ALPHA",
        help="let the negative prompt count in steps with guidance 1 (normalized attention guidance); 11/2.5/0.25 is "
        "usual",
    )


def _nag(text: str) -> NagOptions:
    try:
        return NagOptions.parse(text)
    except OptionError as fault:
        raise argparse.ArgumentTypeError(str(fault)) from fault


def add_window_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("a part of the schedule, as the sampler node runs it")
    group.add_argument("--denoise", type=float, default=1.0, help="strength of video-to-video (default %(default)s)")
    group.add_argument("--start-step", type=int, default=0, metavar="N", help="the first step, from 0")
    group.add_argument("--end-step", type=int, metavar="N", help="the step before which the run ends")
    group.add_argument("--leftover-noise", action="store_true", help="where it ends early, leave the rest of the noise")


def window_of(options: argparse.Namespace) -> Window | None:
    """Raises OptionError."""
    given = {"start": options.start_step, "end": options.end_step, "leftover": options.leftover_noise}
    window = Window(denoise=options.denoise, **given)
    return None if window == Window() else window


def add_plan_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling (default: the task's own)")
    group.add_argument("--steps", type=int)
    group.add_argument("--shift", type=float, help="larger spends more steps on high noise")
    group.add_argument("--boundary", type=float, help="the high-noise expert runs where timestep >= boundary * 1000")
    group.add_argument("--guidance", type=float, help="for both experts")
    group.add_argument("--guidance-high", type=float)
    group.add_argument("--guidance-low", type=float)
    group.add_argument("--solver", choices=tuple(SCHEDULES), help="default: the preset's, else unipc")
    group.add_argument(
        "--preset",
        default="auto",
        choices=PRESETS,
        help="settings for step-distilled weights, for options that are not given; auto: if a file's name or metadata "
        "says that it is distilled; -guided: with guidance for the high-noise expert (default %(default)s)",
    )
    add_skip_options(parser)


# Options and arguments that name a file or folder that is read.
INPUTS = (
    "model",
    "high",
    "low",
    "text_encoder",
    "tokenizer",
    "vae",
    "clip_vision",
    "image",
    "last_image",
    "from_video",
    "reference",
    "pose_video",
    "face_video",
    "background",
    "mask",
    "latents",
    "samples",
    "source",
    *SOUND_FILES,
    *CONTROL_FILES,
)


def add_overwrite_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--overwrite", action="store_true", help="replace files that exist (default: write to a new name, x-1.mp4)"
    )


def inputs_of(options: argparse.Namespace) -> dict[str, str | Path]:
    """What messages call it -> each file or folder that is named to be read."""
    inputs: dict[str, str | Path] = {}
    for name in INPUTS:
        given = getattr(options, name, None)
        if isinstance(given, (str, Path)) and given != "tiny":
            inputs[f"the {name}" if name in ("latents", "source") else f"--{name.replace('_', '-')}"] = given
    for number, lora in enumerate(getattr(options, "loras", ())):
        option = "--lora" if lora.expert == "auto" else f"--lora-{lora.expert}"
        inputs[option if number == 0 else f"{option} (number {number + 1})"] = lora.path
    return inputs


def check_inputs(options: argparse.Namespace) -> None:
    """Raise OptionError for the first file or folder that is named and does not exist: before anything else is
    refused, as what is missing may be a consequence. `--model` may name what is no folder."""
    for name, given in inputs_of(options).items():
        path = Path(given)
        if name != "--model" and not path.exists():
            hint = near_file(path) or ": give an existing file or folder"
            raise OptionError(f"{f'{name} ' if name.startswith('--') else ''}{given} does not exist{hint}")


def outputs_of(options: argparse.Namespace) -> Outputs:
    """The outputs of a command, which are none of its inputs."""
    inputs: dict[str, str | Path | None] = {**inputs_of(options)}
    return Outputs(inputs, overwrite=options.overwrite, tell=lambda words: print(words, file=sys.stderr))


def task_table() -> str:
    """What every task takes for what is left out: for the end of a help text."""
    lines = [
        "defaults of the tasks:",
        f"  {'task':<22}{'size':>10}{'frames':>8}{'fps':>5}{'steps':>7}{'shift':>7}  guidance",
    ]
    for task in TASKS.values():
        guidance = f"{task.guidance_high:g}" + (f" high, {task.guidance_low:g} low" if task.two_experts else "")
        size = f"{task.width}x{task.height}"
        numbers = f"{size:>10}{task.frames:>8}{task.fps:>5}{task.steps:>7}{task.shift:>7g}"
        lines.append(f"  {task.name:<22}{numbers}  {guidance}")
    return "\n".join(lines)


def size(text: str) -> tuple[int, int]:
    try:
        return parse_size(text)
    except OptionError as fault:
        raise argparse.ArgumentTypeError(str(fault)) from fault


def plan_numbers(options: argparse.Namespace) -> dict[str, Any]:
    if options.guidance is not None and (options.guidance_high is not None or options.guidance_low is not None):
        raise OptionError("--guidance sets both experts; omit it, or omit --guidance-high and --guidance-low")
    return {
        "steps": options.steps,
        "shift": options.shift,
        "boundary": options.boundary,
        "guidance_high": options.guidance if options.guidance is not None else options.guidance_high,
        "guidance_low": options.guidance if options.guidance is not None else options.guidance_low,
        "solver": options.solver,
        "preset": options.preset,
    }
