"""Options that several commands share, and what they mean. Knows no torch."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from wan_core.config import COMPILES, GUIDANCE_MODES, LORA_MODES, PRECISIONS, RESIDENCIES, LoraOptions, OptionError
from wan_core.models.wan.tasks import TASKS
from wan_core.sampling.cache.arguments import add_skip_options
from wan_core.sampling.plan import SCHEDULES
from wan_core.sampling.presets import CHOICES as PRESETS


def add_model_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("models")
    group.add_argument("--model", help="tiny (the embedded model), random:TASK, or the folder of a release")
    group.add_argument("--task", help="override the recognised task: " + ", ".join(TASKS))
    group.add_argument("--high", help="high-noise expert: file, shard index or folder (alone: the only transformer)")
    group.add_argument("--low", help="low-noise expert")
    group.add_argument("--text-encoder", help="UMT5: file or folder")
    group.add_argument("--tokenizer", help="spiece.model, where the text encoder does not bring it")
    group.add_argument("--vae", help="VAE: file or folder")
    group.add_argument("--clip-vision", help="CLIP vision encoder: file or folder (Wan 2.1 image-to-video)")
    group.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N (default %(default)s)")
    group.add_argument(
        "--precision",
        default="checkpoint",
        choices=PRECISIONS,
        help="of transformer and text encoder; checkpoint: bf16 on a GPU, fp32 on a CPU. fp8 and te ones hold the "
        "transformer's matrices in FP8 (te: Transformer Engine), see docs/performance.md",
    )
    group.add_argument(
        "--keep-blocks", type=int, default=0, metavar="N", help="leave the first and last N blocks out of FP8"
    )
    group.add_argument("--vae-precision", default="auto", choices=("auto", "bf16", "fp32"))
    group.add_argument("--attention", default="auto", help="backend, see `doctor` (default %(default)s)")
    group.add_argument(
        "--compile", default="off", choices=COMPILES, help="compile the transformer's block, once for all (default off)"
    )
    add_memory_options(group)
    add_lora_options(parser)
    group.add_argument(
        "--lora-mode",
        default="auto",
        choices=LORA_MODES,
        help="merge LoRAs into the weights, or attach them beside; auto: merge, but where weights are used as they are "
        "stored (scaled FP8, GGUF)",
    )


def add_memory_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--residency",
        default="auto",
        choices=RESIDENCIES,
        help="all models on the device, one at a time, or a transformer's blocks streamed from host memory; auto plans "
        "by what is free (default)",
    )
    group.add_argument(
        "--resident-blocks", type=int, metavar="N", help="blocks that stay where others stream (default: what fits)"
    )
    group.add_argument(
        "--memory-limit",
        type=float,
        metavar="GIB",
        help="take no more of the GPU than a card of so many GiB has, to plan and run as on a smaller one",
    )


def add_lora_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("LoRAs (FILE, or FILE:STRENGTH; each option may be repeated)")
    words = {
        "auto": "for the expert that the file's metadata or name speaks of, or for both",
        "high": "for the high-noise expert",
        "low": "for the low-noise expert",
    }
    for expert, help in words.items():
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
        "--memory", action="store_true", help="print instead what each phase takes on a GPU, and what is where"
    )
    group.add_argument("--size", type=size, help="WIDTHxHEIGHT in pixels (default: the task's)")
    group.add_argument("--frames", type=int, help="4n + 1")
    group.add_argument("--precision", default="bf16", choices=PRECISIONS)
    group.add_argument("--compile", default="off", choices=COMPILES)
    add_memory_options(group)


def add_request_options(parser: argparse.ArgumentParser, *, prompt: bool = True) -> None:
    group = parser.add_argument_group("video")
    group.add_argument("--prompt", required=prompt)
    group.add_argument("--negative-prompt", help="default: the task's own; an empty text is allowed")
    group.add_argument("--image", help="first frame (image-to-video)")
    group.add_argument("--last-image", help="last frame (image-to-video)")
    group.add_argument("--size", type=size, help="WIDTHxHEIGHT in pixels (default: the task's, or the image's aspect)")
    group.add_argument("--frames", type=int, help="4n + 1")
    group.add_argument("--fps", type=int)
    group.add_argument("--seed", type=int, default=0)
    group.add_argument(
        "--guidance-mode", default="auto", choices=GUIDANCE_MODES, help="run the two branches apart or as one"
    )
    add_plan_options(parser)


def add_plan_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling (default: the task's own)")
    group.add_argument("--steps", type=int)
    group.add_argument("--shift", type=float, help="larger spends more steps on high noise")
    group.add_argument("--boundary", type=float, help="the high-noise expert runs where timestep >= boundary * 1000")
    group.add_argument("--guidance", type=float, help="for both experts")
    group.add_argument("--guidance-high", type=float)
    group.add_argument("--guidance-low", type=float)
    group.add_argument("--solver", choices=tuple(SCHEDULES), help="default: unipc, or what the preset is for")
    group.add_argument(
        "--preset",
        default="auto",
        choices=PRESETS,
        help="settings of step-distilled weights for what is left out here; auto: where a file's name or metadata says "
        "that they are distilled; -guided: with guidance for the high-noise expert (default %(default)s)",
    )
    add_skip_options(parser)


def size(text: str) -> tuple[int, int]:
    width, x, height = text.lower().partition("x")
    if not (x and width.isdecimal() and height.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write WIDTHxHEIGHT, for example 1280x720")
    return int(width), int(height)


def plan_numbers(options: argparse.Namespace) -> dict[str, Any]:
    if options.guidance is not None and (options.guidance_high is not None or options.guidance_low is not None):
        raise OptionError("--guidance sets both experts; leave out either it or --guidance-high and --guidance-low")
    return {
        "steps": options.steps,
        "shift": options.shift,
        "boundary": options.boundary,
        "guidance_high": options.guidance if options.guidance is not None else options.guidance_high,
        "guidance_low": options.guidance if options.guidance is not None else options.guidance_low,
        "solver": options.solver,
        "preset": options.preset,
    }
