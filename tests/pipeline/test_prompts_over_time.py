"""Prompts over time through the doors of the engine, and what the embedded model makes of them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from wan_core.cli import build_parser, main
from wan_core.cli.generate import request_of
from wan_core.cli.prompt_file import read_list
from wan_core.config import LoadOptions, OptionError, PromptAt, Request
from wan_core.pipeline.encode import encode_text, text_of_clip
from wan_core.pipeline.pipeline import Pipeline
from wan_core.workers.wire import unpack
from wan_lab.metrics import describe

RED, GREEN = "a red circle moving right on a blue background", "a green circle moving right on a blue background"
SCENES = (PromptAt(frame=0, text=RED), PromptAt(frame=8, text=GREEN))
SMALL = {"width": 32, "height": 32, "frames": 17, "steps": 2}


def test_a_shape_changes_its_colour_when_the_prompt_says_so(pipe: Pipeline) -> None:
    """The embedded model, which knows sentences of one colour alone: red up to frame 4, green from frame 12 on, on one
    background and one way. Without prompts over time it is red to the end."""
    seen = {}
    for name, fields in {"timed": {"prompt": "", "prompts_at": SCENES}, "plain": {"prompt": RED}}.items():
        frames = torch.from_numpy(pipe.generate(Request(seed=1, **fields)).frames)  # type: ignore[arg-type]
        seen[name] = [describe(part) for part in (frames[:5], frames[12:])]
    assert [one.colour for one in seen["timed"]] == ["red", "green"]
    assert [one.colour for one in seen["plain"]] == ["red", "red"]
    assert {(one.background, one.shape) for part in seen.values() for one in part} == {("blue", "circle")}


def test_tokens_of_a_prompt_are_penalised_where_it_does_not_hold(pipe: Pipeline) -> None:
    run = pipe.prepare(Request(prompt="a video.", prompts_at=SCENES, **SMALL))  # type: ignore[arg-type]
    text = encode_text(run)
    joined = f"a video. {RED} {GREEN}"
    encoder = run.memory.fetch("text encoder", pipe.models.text_encoder)
    rows, (count,) = encoder.read([joined])
    assert torch.equal(text.cond, rows) and text.later_cond == ()
    assert run.report.settings["prompt"] == "a video." and run.report.settings["prompts"] == {0: RED, 8: GREEN}
    assert text.penalty is not None and text.penalty.shape == (1, 5, rows.shape[1])
    tokens = [encoder.tokenizer.count(one).given - 1 for one in ("a video.", RED, GREEN)]
    whole, red, green, end = text.penalty[0].split([*tokens, rows.shape[1] - sum(tokens)], 1)
    assert not whole.any() and not end.any() and count.given == sum(tokens) + 1
    assert (red == 0).all(1).tolist() == [True, True, False, False, False]
    assert (green == 0).all(1).tolist() == [False, False, True, True, True]


def test_what_would_be_cut_is_refused(pipe: Pipeline) -> None:
    run = pipe.prepare(Request(prompt=RED, prompts_at=(*SCENES, PromptAt(frame=12, text=f"{RED} {RED}")), **SMALL))  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"the prompts together have \d+ tokens, and 32 are read"):
        encode_text(run)


@pytest.mark.parametrize(("precision", "far"), [("fp8", 0.4), ("int8", 0.2)])
def test_quantised_weights(pipe: Pipeline, precision: str, far: float) -> None:
    """Nearer to the run in float32 than to one without prompts over time."""
    quantised = Pipeline.load(LoadOptions(model="tiny", device="cpu", precision=precision))

    def latents(of: Pipeline, **fields: object) -> torch.Tensor:
        run = of.prepare(Request(**{**SMALL, "steps": 3, "seed": 1, **fields}))  # type: ignore[arg-type]
        return of.sample(run, of.encode(run))

    exact, output = (latents(of, prompt="", prompts_at=SCENES) for of in (pipe, quantised))
    plain = latents(quantised, prompt=RED)
    assert float((output - exact).norm() / exact.norm()) < far < float((output - plain).norm() / plain.norm())


def test_each_clip_has_the_prompts_of_its_frames(tmp_path: Path) -> None:
    """A clip in which one prompt holds is that of a video of this prompt alone."""
    picture = tmp_path / "first.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (32, 32, 3), np.uint8)).save(picture)
    pipe = Pipeline.load(LoadOptions(model="tiny", task="i2v-tiny", device="cpu"))
    fields = {**SMALL, "image": str(picture), "clip_frames": 9, "overlap": 1}
    run = pipe.prepare(Request(prompt="", prompts_at=SCENES, **fields))  # type: ignore[arg-type]
    assert [one.starts for one in run.job.texts] == [(0, 2), (0,)]
    text = encode_text(run)
    first, second = (text_of_clip(run, text, clip) for clip in run.job.clips)
    assert first.penalty is not None and first.penalty.shape[1] == 3 and second.penalty is None
    assert torch.equal(second.cond[:, : text.cond.shape[1]].sum(), text.later_cond[0].sum())
    video = pipe.generate(Request(prompt="", prompts_at=SCENES, **fields))  # type: ignore[arg-type]
    alone = pipe.generate(Request(prompt=RED, **fields))  # type: ignore[arg-type]
    later = PromptAt(frame=16, text=GREEN)
    same = pipe.generate(Request(prompt="", prompts_at=(SCENES[0], later), **fields))  # type: ignore[arg-type]
    torch.testing.assert_close(same.latents[:, :, :3], alone.latents[:, :, :3], atol=1e-3, rtol=0)
    assert not torch.allclose(video.latents[:, :, :3], alone.latents[:, :, :3], atol=1e-2)


def test_lists_of_videos_and_workers_take_prompts(tmp_path: Path) -> None:
    listed = tmp_path / "list.jsonl"
    lines = [{"prompt": "a"}, {"prompts_at": [f"0={RED}", f"8={GREEN}"]}, {"prompt": "a", "prompts_at": f"0={RED}"}]
    listed.write_text("\n".join(map(json.dumps, lines)))
    arguments = ["generate", "--model=tiny", f"--prompts={listed}", "--out=x.mp4"]
    videos = read_list(listed, build_parser().parse_args(arguments), LoadOptions(model="tiny"))
    assert videos[1].request.prompts_at == SCENES and videos[1].request.prompt == ""
    assert len({video.key for video in videos}) == 3
    sent = json.loads(json.dumps(asdict(videos[1].request)))
    assert unpack(Request, sent) == videos[1].request


def test_the_command_needs_no_other_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    parsed = build_parser().parse_args(["generate", "--prompt-at", f"0={RED}", f"--prompt-at=8={GREEN}"])
    assert request_of(parsed).prompts_at == SCENES and request_of(parsed).prompt == ""
    with pytest.raises(SystemExit):
        build_parser().parse_args(["generate", "--model", "tiny"])
    assert "nothing to do: give --prompt or --prompts" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--prompt-at", "8", "--prompt-at", "0"], "the first begins at frame 0"),
        (["--prompt-at", "0", "--prompt-at", "81"], "for a video of 81 frames"),
        (["--task", "animate-14B", "--prompt-at", "0"], "takes one prompt for the whole video"),
    ],
)
def test_what_cannot_be_is_refused_before_work(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments]) == 2
    assert expected in capsys.readouterr().err
    generate_arguments = [
        f"{word}=a" if word.isdecimal() else word for word in arguments if word != "animate-14B" and word != "--task"
    ]
    assert "--task" in arguments or main(["generate", "--model", "tiny", *generate_arguments, "--frames", "81"]) == 2
    assert "--task" in arguments or expected in capsys.readouterr().err
