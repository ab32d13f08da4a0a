"""Prompts over time: one CONDITIONING for a video whose prompt changes from frame to frame."""

from __future__ import annotations

import re
from typing import Any

from comfy_api.latest import io, ui

from wan_core.config import OptionError, PromptAt, check_prompts
from wan_core.execution.report import WARNING
from wan_core.models.wan.families import PROMPTS
from wan_core.sampling.texts import check_cut, text_of_frames

from .conditioning import with_values
from .schema import output, schema
from .sockets import TextSocket

EXAMPLE = """0: a red circle moving right on a blue background
8: a green circle moving right on a blue background"""
BEGIN = re.compile(r"\s*(\d{1,9})\s*[:=]\s*(.*)")


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
                io.Clip.Input("clip", tooltip="A UMT5 text encoder: WanCore's, or ComfyUI's CLIPLoader of type wan."),
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
