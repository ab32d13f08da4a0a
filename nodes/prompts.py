"""Prompts: positive and negative, those of a video whose prompt changes from frame to frame, and NAG."""

from __future__ import annotations

import re
from typing import Any

from comfy_api.latest import io, ui

from wan_core.config import NagOptions, OptionError, PromptAt, check_prompts
from wan_core.execution.report import WARNING
from wan_core.models.wan.families import NAG, PROMPTS, TASKS
from wan_core.models.wan.families.task import NEGATIVE_SOURCE
from wan_core.sampling.texts import check_cut, text_of_frames

from .schema import output, schema, widgets
from .sockets import CONDITIONING, TextSocket
from .video_inputs import with_values

NEGATIVE = TASKS["t2v-A14B"].negative_prompt
CLIP = io.Clip.Input("clip", tooltip="A UMT5 text encoder: WanCore's, or ComfyUI's CLIPLoader of type wan.")
EXAMPLE = """0: a red circle moving right on a blue background
8: a green circle moving right on a blue background"""
BEGIN = re.compile(r"\s*(\d{1,9})\s*[:=]\s*(.*)")


class WanCoreTextEncode(io.ComfyNode):
    """Positive and negative prompt at once."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "WanCoreTextEncode",
            "WanCore Text Encode",
            aliases="wan prompt, clip text encode, negative prompt",
            shows_text=True,
            description="Encodes both prompts in one pass. The same two never run the encoder twice.",
            inputs=[
                CLIP,
                io.String.Input(
                    "positive",
                    multiline=True,
                    dynamic_prompts=True,
                    default="a red circle moving right on a blue background",
                    tooltip="What the video shows. The embedded model knows sentences such as 'a green square moving "
                    "up on a white background'.",
                ),
                io.String.Input(
                    "negative",
                    multiline=True,
                    dynamic_prompts=True,
                    default=NEGATIVE,
                    tooltip="What the video should not show; used where guidance is not 1. Leave it empty for the "
                    f"embedded model. The default is {NEGATIVE_SOURCE}.",
                ),
            ],
            outputs=[
                output(io.Conditioning, "positive_out", "The encoded prompt."),
                output(io.Conditioning, "negative_out", "The encoded negative prompt."),
            ],
        )

    @classmethod
    def execute(cls, clip: Any, positive: str, negative: str) -> io.NodeOutput:
        if isinstance(clip, TextSocket):
            encoded = clip.encode_prompts([positive, negative], ["prompt", "negative prompt"])
            warnings = [WARNING + note for one in encoded for note in one[0][1]["wancore_notes"]]
            return io.NodeOutput(*encoded, ui=ui.PreviewText("\n".join(warnings)) if warnings else None)
        return io.NodeOutput(*(clip.encode_from_tokens_scheduled(clip.tokenize(t)) for t in (positive, negative)))


class WanCorePromptsOverTime(io.ComfyNode):
    """A prompt for each part of a video."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "WanCorePromptsOverTime",
            "WanCore Prompts over Time",
            aliases="prompt relay, prompt travel, prompt schedule, prompt timeline, shots",
            shows_text=True,
            description="A prompt for each part of a video, by frames: Prompt Relay's penalty on cross-attention. For "
            "the WanCore Sampler and text to video, image to video, 5B and Fun.",
            inputs=[
                CLIP,
                io.String.Input(
                    "prompts",
                    multiline=True,
                    dynamic_prompts=True,
                    default=EXAMPLE,
                    tooltip="A line for each prompt: the frame from which on it holds, counted from 0, a colon, the "
                    "prompt. The first is at frame 0; from one to the next are at least 4 frames. A line without a "
                    "number goes on with the prompt before.",
                ),
                io.String.Input(
                    "whole_video",
                    multiline=True,
                    dynamic_prompts=True,
                    default="",
                    optional=True,
                    tooltip="What holds for all frames: who is seen, where, in which style. May be empty.",
                ),
            ],
            outputs=[
                output(
                    io.Conditioning,
                    "positive",
                    "For `positive` of the WanCore Sampler, WanCore Image to Video and WanCore Plan Preview.",
                )
            ],
        )

    @classmethod
    def validate_inputs(cls, prompts: str | None = None) -> bool:
        if prompts is not None:
            read_prompts(prompts)
        return True

    @classmethod
    def execute(cls, clip: Any, prompts: str, whole_video: str = "") -> io.NodeOutput:
        scenes = read_prompts(prompts)
        timed = text_of_frames(whole_video, scenes, 0, scenes[-1].frame + 1)
        rows, ends, notes = encoded(clip, timed.text, timed.prefixes)
        values = {PROMPTS: {"starts": [one.frame for one in scenes], "tokens": ends}, "wancore_prompt": None}
        rows = with_values(rows, values)
        return io.NodeOutput(rows, ui=ui.PreviewText("\n".join(WARNING + note for note in notes)) if notes else None)


def read_prompts(text: str) -> tuple[PromptAt, ...]:
    """The prompts of lines `40: the dog runs away`. Raises OptionError."""
    scenes_at = list[tuple[int, str]]()
    for line in filter(str.strip, text.splitlines()):
        begin = BEGIN.fullmatch(line)
        if begin is not None:
            scenes_at.append((int(begin[1]), begin[2].strip()))
        elif scenes_at:
            scenes_at[-1] = scenes_at[-1][0], f"{scenes_at[-1][1]} {line.strip()}".strip()
        else:
            raise OptionError(f"prompts begin with {line.strip()[:40]!r}; write FRAME: TEXT, the first at frame 0")
    if not scenes_at:
        raise OptionError("no prompts given; write a line for each: FRAME: TEXT, the first at frame 0")
    scenes = tuple(PromptAt(frame=frame, text=scene) for frame, scene in scenes_at)
    check_prompts([one.frame for one in scenes])
    return scenes


def encoded(clip: Any, text: str, prefixes: list[str]) -> tuple[list[list[Any]], list[int], list[str]]:
    """`text` as CONDITIONING, how many tokens each of its `prefixes` has, and what a user should know."""
    if isinstance(clip, TextSocket):
        encoded_prompts = clip.encode_prompts([text, *prefixes])
        counts = [clip.cache.count(prefix).given - 1 for prefix in prefixes]
        check_cut(counts[-1], clip.cache.count(text).read - 1)
        return encoded_prompts[0], counts, encoded_prompts[0][0][1]["wancore_notes"]
    rows = clip.encode_from_tokens_scheduled(clip.tokenize(text))
    if len(rows) != 1:
        raise OptionError("the text encoder gives several texts for one prompt: use one of UMT5 (CLIPLoader, type wan)")
    counts = [tokens_of(clip.tokenize(prefix)) for prefix in prefixes]
    check_cut(counts[-1], rows[0][0].shape[1])
    return rows, counts, []


def tokens_of(tokens: Any) -> int:
    """How many tokens ComfyUI's tokenizer gives a text, padding (0) and the end token (1) not counted."""
    (sections,) = tokens.values()
    return sum(one[0] not in (0, 1) for section in sections for one in section)


class WanCoreNAG(io.ComfyNode):
    """A negative prompt that counts without a second forward."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "WanCoreNAG",
            "WanCore NAG",
            aliases="nag, normalized attention guidance, negative prompt, cfg 1",
            shows_text=True,
            description="Lets a negative prompt count in steps whose guidance is 1, as with four-step LoRAs: inside "
            "cross-attention (normalized attention guidance), which then runs once more.",
            inputs=[
                io.Conditioning.Input("negative", tooltip="The encoded negative prompt."),
                *widgets(NagOptions),
            ],
            outputs=[output(io.Conditioning, "negative_out", "For `negative` of the WanCore Sampler.")],
        )

    @classmethod
    def execute(cls, negative: CONDITIONING, **numbers: float) -> io.NodeOutput:
        return io.NodeOutput(with_values(negative, {NAG: NagOptions(**numbers)}))
