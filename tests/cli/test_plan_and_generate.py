"""`plan`, `plan --memory`, `generate` and workers refuse the same options in the same words, and plan the same steps;
`tests/nodes/test_doors.py` asks the nodes."""

from __future__ import annotations

import contextlib
import io
import json
import random
import wave

import numpy as np
import pytest
import torch
from PIL import Image

from wan_core.cli import build_parser
from wan_core.cli.generate import load_options_of, request_of
from wan_core.config import Request, UserError
from wan_core.media.mp4 import write_video
from wan_core.models.wan.families import TASKS, Task, family_of
from wan_core.pipeline.check import check_request
from wan_core.sampling.plan import Plan
from wan_core.workers.wire import pack, unpack

# Every family, and every way in which an image is taken.
NAMES = (
    "t2v-A14B", "i2v-A14B", "ti2v-5B", "animate-14B", "animate2-14B", "animate2-14B-distilled", "s2v-14B", "vace-1.3B",
    "fun-control-1.3B", "camera-1.3B",
)  # fmt: skip
FULL = [TASKS[name] for name in NAMES]
# Each draw takes at most one of a row.
CHOICES = (
    ("", "--steps 12", "--steps 4", "--steps 0", "--shift 0", "--boundary 2", "--preset 4-step", "--preset template"),
    ("", "--frames 97", "--frames 33", "--frames 16", "--frames 0", "--clip-frames 33/1", "--clip-frames 32"),
    ("", "--clip-frames /3", "--clip-frames 33"),
    ("", "--sparse 0.8125", "--sparse 0.5:ramp0", "--sparse 0"),
    ("", "--magcache 0.24/1/0.1", "--taylorseer 2/0.2", "--speed balanced"),
    ("", "--guidance 1", "--guidance 200", "--guidance /2"),
    ("", "--solver heun", "--solver lcm", "--solver euler"),
    (
        "",
        "--nag 11",
        "--guidance 1 --nag 11",
        "--control-strength 0.5",
        "--control-strength 1/0.999/1",
        "--control-strength 1/0/0.4",
    ),
    ("", "--denoise 0.5", "--denoise 0.97"),
)
SINGLE = [option for row in CHOICES for option in row if option]
PARSER = build_parser()
IN_CLIPS = ("--clip-frames", "--denoise")  # of one clip, and of steps, which memory does not depend on


def drawn_options(number: int) -> list[str]:
    """The single options first, then draws of several."""
    if number < len(SINGLE):
        return SINGLE[number].split()
    draw = random.Random(number)
    rows = draw.sample(CHOICES, 3)
    return [word for row in rows for word in draw.choice(row[1:]).split()]


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("media")
    picture, video, sound = (folder / name for name in ("picture.png", "video.mp4", "sound.wav"))
    Image.new("RGB", (64, 48)).save(picture)
    write_video(video, iter(np.zeros((100, 48, 64, 3), np.uint8)), fps=16)
    with wave.open(str(sound), "wb") as written:
        written.setnchannels(1)
        written.setsampwidth(2)
        written.setframerate(16000)
        written.writeframes(bytes(2 * 16000 * 8))
    files = dict.fromkeys(("pose_video", "face_video", "control_video", "from_video"), str(video))
    return files | {"image": str(picture), "reference": str(picture), "audio": str(sound), "camera": "zoom-in"}


def begins_with(task: Task, options: list[str], media: dict[str, str]) -> list[str]:
    """What `generate` needs beside `options`: the videos and pictures of the task."""
    fields = list(family_of(task).needs) or ["image"] * (task.image == "channels")
    fields += ["from_video"] * ("--denoise" in options)
    return [word for field in fields for word in (f"--{field.replace('_', '-')}", media[field])]


def refusal_of_plan(arguments: list[str]) -> tuple[str, dict]:
    """(what `plan` refuses, what it prints)."""
    options, printed = PARSER.parse_args(["plan", "--json", *arguments]), io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
            options.run(options)
    except UserError as fault:
        return str(fault), {}
    return "", json.loads(printed.getvalue())


def refusal_of_generate(arguments: list[str], task: Task) -> tuple[str, dict]:
    """(what `generate` refuses before it reads weights, the plan that it would run)."""
    options = PARSER.parse_args(["generate", "--prompt", "x", "--model", f"random:{task.name}", *arguments])
    try:
        request = request_of(options)
        assert sent_to_workers(request) == request
        job = check_request(load_options_of(options), request, torch.device("cpu"))
    except UserError as fault:
        return str(fault), {}
    assert sent_to_workers(job.plan) == job.plan
    return "", json.loads(json.dumps(job.plan.as_dict()))


def sent_to_workers(value: Request | Plan) -> Request | Plan:
    return unpack(type(value), json.loads(json.dumps(pack(value, {}, ""))))


def without_costs(plan: dict) -> dict:
    """Costs are of a size, which `plan` has no part in. Clips are no part of a plan."""
    return {**plan, "clips": None, "steps": [{**step, "cost": None} for step in plan["steps"]]}


@pytest.mark.parametrize("first", range(0, 100, 20))
def test_plan_and_generate_agree(first: int, media: dict[str, str]) -> None:
    refused = 0
    for number in range(first, first + 20):
        options, task = drawn_options(number), FULL[number % len(FULL)]
        if "--denoise" in options and family_of(task).driven:
            task = TASKS["t2v-A14B"]  # nothing driven begins with a video
        message, planned = refusal_of_plan(["--task", task.name, *options])
        others, result = refusal_of_generate([*begins_with(task, options, media), *options], task)
        assert message == others, (task.name, options)
        assert bool(message) or without_costs(planned) == without_costs(result), (task.name, options)
        if not set(IN_CLIPS) & set(options) and "--frames 0" not in " ".join(options):
            memory, _ = refusal_of_plan(["--task", task.name, *options, "--memory", "--memory-limit", "80"])
            assert memory == message, (task.name, options)
        refused += bool(message)
    assert 2 < refused < 18, "some are refused, and some are not"


def test_sparse_attention_of_distilled_weights_is_refused_by_the_plan() -> None:
    message, _ = refusal_of_plan(["--task", "animate2-14B-distilled", "--sparse", "0.8125"])
    assert message.startswith("sparse attention: distilled weights of Animate-2")


@pytest.mark.parametrize("task", FULL, ids=NAMES)
def test_an_image_that_a_task_does_not_take(task: Task, media: dict[str, str]) -> None:
    """For the `--image` of a plan, which names no file."""
    message, _ = refusal_of_plan(["--task", task.name, "--image"])
    begins = begins_with(task, [], media)
    others, _ = refusal_of_generate([*begins, *(() if "--image" in begins else ("--image", media["image"]))], task)
    assert message == others
