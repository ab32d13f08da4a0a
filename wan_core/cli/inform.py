"""The commands quantize, plan, check, inspect and doctor."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from wan_core.cli.options import outputs_of, values_of, window_of
from wan_core.config import QUANTIZED, Keyframe, LoadOptions, OptionError, PromptAt, Request
from wan_core.config.checks import near_file
from wan_core.config.file_names import NAMING
from wan_core.config.table import from_values
from wan_core.models.wan.families import family_of, find_task
from wan_core.models.wan.families.family import BEGINS, given_fields
from wan_core.sampling.build import ModelFacts, build_plan, plan_request
from wan_core.sampling.plan import WARNING, Plan

SMALLER = "try --precision fp8, a smaller --size or fewer --frames, or a task with a smaller model"
PLANNED_TASK = "t2v-A14B"  # where neither a task nor a model is named
# Pixels of a frame, and of all frames, of the largest video that `check` compares: it takes 300 bytes for each.
CHECK_FRAME, CHECK_VIDEO = 2**18, 2**22


def run_quantize(options: argparse.Namespace) -> int:
    import torch

    from wan_core.checkpoint import load_dit, open_checkpoint, save
    from wan_core.pipeline.settings import choose_device, find_quantization

    device = choose_device(options.device)
    # ComfyUI reads FP8 with one scale for a matrix, and precision fp8 takes that as it is.
    precision = "fp8-tensor" if options.precision == "fp8" else options.precision
    quantization = find_quantization(precision, device, options.keep_blocks)
    if quantization is None:
        raise OptionError(f"precision {options.precision!r} quantises nothing; use one of: {', '.join(QUANTIZED)}")
    if options.out.suffix.lower() != ".safetensors":
        raise OptionError(f"cannot write {options.out}: give the file a name that ends in .safetensors")
    with outputs_of(options) as outputs:
        out = outputs.add("the output", options.out)
        source = open_checkpoint(options.source)
        model = load_dit(source, device="cpu", dtype=torch.bfloat16, quantization=quantization)
        outputs.say_renamed()
        # What the source says of itself and its tensors do not.
        said = {key: source.metadata[key] for key in ("expert", "distilled", *NAMING) if key in source.metadata}
        save(model, out, metadata=said)
    print(out)
    return 0


def run_plan(options: argparse.Namespace) -> int:
    if "host_memory_limit" in (options.memory_limit or {}):
        raise OptionError("a limit of host memory changes nothing in a plan, which says what is needed: leave it out")
    if options.memory:
        if any(one is not None for one in (options.clip_frames, options.svi, options.seconds_per_forward)):
            raise OptionError("--memory is of one clip: leave out --clip-frames, --svi and --seconds-per-forward")
        plan = asked_plan(options)
        assert plan.long is not None
        if options.frames is not None:
            options.frames = plan.long.clips[0].frames
        return run_memory_plan(options, plan.name)
    for name in ("size", "memory_limit", "resident_blocks"):
        if getattr(options, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise OptionError(f"{flag} changes no step: add --memory, whose plan it changes, or leave {flag} out")
    plan = asked_plan(options, lambda line: print(line, file=sys.stderr))
    long = plan.long
    assert plan.task is not None and long is not None
    seconds = whole_seconds(plan, options.seconds_per_forward)
    cut = any(one is not None for one in (options.frames, options.clip_frames, options.svi))
    if options.json:
        more: dict[str, Any] = {"clips": [clip._asdict() for clip in long.clips]} if cut else {}
        more |= {} if seconds is None else {"seconds": round(seconds, 3)}
        print(json.dumps(plan.as_dict() | more, indent=1))
        return 0
    print(plan.table())
    if cut:
        alone = len(long.clips) == 1 and not long.leading
        print(f"{options.frames or plan.task.frames} frames: {'one piece' if alone else long.words(plan.count)}")
    if seconds is not None:
        from wan_core.media.pictures import clock  # imports PIL

        print(f"about {clock(seconds)} in all, with {options.seconds_per_forward:g} s a forward")
    return 0


def asked_plan(options: argparse.Namespace, say: Callable[[str], None] = lambda line: None) -> Plan:
    """The plan of what the arguments describe, at the task's own size, as `generate` makes it. say: is called with what
    is to be known of the files. Raises OptionError."""
    request = planned_request(options)
    facts = facts_of(options, request, say)
    task = facts.task
    if task.image == "channels" and not family_of(task).driven and not request.pictures:
        request = replace(request, image="a picture")  # without which it makes no video
    family_of(task).check_fields(request, task)
    family_of(task).check_begins(task, given_fields(request, BEGINS))
    frames = task.frames if request.frames is None else request.frames
    asked = plan_request(request, task, None, None, frames, window_of(options))
    return build_plan(asked, facts)


def planned_request(options: argparse.Namespace) -> Request:
    """The request that the arguments describe, in which words stand for pictures and prompts, which a plan does not
    read. Raises OptionError."""
    keyframes = tuple(Keyframe(frame=frame, path="a picture") for frame in options.keyframes or ())
    prompts = tuple(PromptAt(frame=frame, text="a prompt") for frame in options.prompts_at or ())
    read = {
        "image": "a picture" if options.image else None,
        "keyframes": keyframes or None,
        "prompts_at": prompts or None,
    }
    others = {"denoise": None, "width": None, "height": None}
    return from_values(Request, values_of(options), prompt="", **read, **others)


def facts_of(
    options: argparse.Namespace, request: Request, say: Callable[[str], None] = lambda line: None
) -> ModelFacts:
    """The files that `generate` would take, and what they are; without a model, a file and LoRAs, those of the task.
    Raises CheckpointError or OptionError."""
    embedded = options.task is not None and options.task.lower().endswith("-tiny")
    loras = tuple(Path(lora.path) for lora in options.loras if lora.strength)
    if loras:  # else without torch
        from wan_core.checkpoint import open_checkpoint
        from wan_core.checkpoint.lora.read import check_lora

        for path in loras:
            check_lora(open_checkpoint(path))
    if options.model is None and options.high is None and options.low is None and not embedded:
        task = find_task(options.task or PLANNED_TASK)  # without torch
        return ModelFacts(task=task, dit=task.full_size, vae=task.vae, loras=loras, all_files=bool(loras))
    from wan_core.pipeline.loras import lora_files
    from wan_core.pipeline.sources import find_models, for_request

    model = "tiny" if embedded and options.model is None else options.model
    named = for_request(from_values(LoadOptions, values_of(options), model=model), request)
    found = find_models(named, image=bool(request.pictures), transformers_only=True)
    if found.why:
        say(f"task: {found.task.name} ({found.why})")
    for note in found.notes:
        say(WARNING + note)
    return found.facts(lora_files(named.loras))


def whole_seconds(plan: Plan, each: float | None) -> float | None:
    """Seconds of all steps of all clips, at `each` seconds for a forward of one clip that reads everything; None where
    that is not known."""
    if each is None:
        return None
    if not each > 0:
        raise OptionError(f"--seconds-per-forward {each:g} given; it must be above 0")
    seconds = plan.estimate(dict.fromkeys(plan.experts, each))
    assert seconds is not None and plan.long is not None
    return seconds * plan.long.cost


def run_memory_plan(options: argparse.Namespace, task_name: str) -> int:
    """Print the memory plan of a task at full size, for this machine's GPU or one with --memory-limit GiB.

    Returns 1 if the models do not fit."""
    import torch

    from wan_core.execution.memory.planning import device_room, limited, plan_memory
    from wan_core.ops.kernels import fused
    from wan_core.pipeline.card_choice import choice_lines, choices_on, task_memory
    from wan_core.pipeline.memory_planning import host_room

    cuda = torch.device("cuda", 0)
    limit = None if options.memory_limit is None else options.memory_limit["memory_limit"]
    if limit is None and not torch.cuda.is_available():
        raise OptionError("this machine has no GPU: give the memory of one in GiB, for example --memory-limit 24")
    model = options.model or ("tiny" if task_name.endswith("-tiny") else f"random:{task_name}")
    task = None if model.startswith("random:") else task_name
    values = values_of(options)
    load_options = from_values(LoadOptions, values, model=model, task=task, high=None, low=None, loras=())
    others = dict.fromkeys(("image", "keyframes", "prompts_at", "denoise"))
    request = from_values(Request, values, prompt="", **others)
    image = bool(options.image) or task_name.startswith("i2v")
    kernels = not torch.cuda.is_available() or fused.why_not(cuda) is None  # another machine is taken to have them
    sizes, beside = task_memory(load_options, request, image=image, fused=kernels)
    here = device_room(cuda) if limit is None else limited(limit)
    host = host_room() if limit is None else None  # another machine's is not known
    plan = plan_memory(sizes, beside, here, options.residency, options.resident_blocks, host=host)
    print(json.dumps(plan.as_dict(), indent=1) if options.json else plan.table())
    if not options.json and torch.cuda.is_available() and (choices := choices_on(cuda, limit)):
        print("\n".join(choice_lines(choices)))
    if not plan.fits:
        print(f"it does not fit: {SMALLER}", file=sys.stderr)
    return 0 if plan.fits else 1


def run_check(options: argparse.Namespace) -> int:
    import torch

    from wan_core.media.video import read_metadata, read_video
    from wan_core.pipeline.embedded import parse_caption
    from wan_lab.metrics import judge

    caption = options.prompt or read_metadata(options.video).get("prompt")
    if not caption:
        raise OptionError(f"{options.video} has no prompt in its metadata: give --prompt")
    try:
        parse_caption(caption)
    except ValueError as fault:
        raise OptionError(str(fault)) from fault
    frames = read_video(options.video, max_frame=CHECK_FRAME, max_pixels=CHECK_VIDEO)
    verdict = judge(torch.from_numpy(frames), caption)
    aspects = ("background", "colour", "shape", "motion")
    print(f"{caption!r}: " + ", ".join(f"{name} {'true' if getattr(verdict, name) else 'FALSE'}" for name in aspects))
    return 0 if verdict.all_true else 1


def run_inspect(options: argparse.Namespace) -> int:
    """Print the description of the file. Returns 1 if it has problems, else 0."""
    if not options.file.exists():
        if str(options.file) == "tiny":
            from wan_core.pipeline.sources import TINY

            example = TINY / "t2v_high.safetensors"
            raise OptionError(f"tiny is the embedded model: give one of its files, for example {example}")
        raise OptionError(f"{options.file} does not exist{near_file(options.file)}")
    from wan_core.cli.inspect import inspect, text_lines

    description = inspect(options.file)
    print(json.dumps(description, indent=1) if options.json else "\n".join(text_lines(description)))
    return int(bool(description["problems"]))


def run_doctor(options: argparse.Namespace) -> int:
    from wan_core.cli import libraries

    if libraries.missing():
        without = libraries.without_torch()
        print(json.dumps(without, indent=1) if options.json else libraries.text(without))
        return 1
    from wan_core.cli.doctor import examine, text

    findings = examine(options.device)
    print(json.dumps(findings, indent=1) if options.json else text(findings))
    return 0
