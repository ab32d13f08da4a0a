"""The nodes make the plans that `generate` makes of the same options, and refuse the same ones in the same words."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_plan_and_generate import FULL, PARSER, begins_with, drawn_options, media, without_costs
from tests.cli.test_random_requests import drawing_files, drawn, found, job_of
from tests.comfyui import find_comfyui, printed_by
from wan_core.cli.generate import load_options_of, request_of
from wan_core.config import PlanNumbers, Request, UserError
from wan_core.config.table import table
from wan_core.models.wan.families import TASKS, family_of
from wan_core.pipeline.check import Job
from wan_core.pipeline.loras import lora_files
from wan_core.pipeline.sources import for_request
from wan_core.workers.wire import pack

pytestmark = pytest.mark.comfy
__all__ = ["drawing_files", "media"]  # fixtures
SETS = 200


Files = dict[str, Any]


def of_nodes(task: str, request: Request, files: Files) -> tuple[str, dict[str, Any], Any, Any, dict[str, Any], Files]:
    """What `doors.py` takes: the widgets' values, 0 where nothing is asked for."""
    values = {name: getattr(request, name) or 0 for name in table(PlanNumbers)}
    values |= {"solver": request.solver or "unipc", "preset": request.preset}
    values |= {} if request.from_video is None else {"denoise": request.denoise}
    values["motion"] = f"{request.motion.above}/{request.motion.guidance}" if request.motion else ""
    shares = (f"{one.of}={';'.join(map(str, one.shares))}" for one in request.lora_strengths or ())
    values["lora_strengths"] = ", ".join(shares)
    frames = TASKS[task].frames if request.frames is None else request.frames
    length = {"frames": request.frames, "clip_frames": request.clip_frames, "overlap": request.overlap, "cut": True}
    length |= {"image": request.image is not None, "known": request.known_frames(frames)}
    length["prompt_starts"] = request.prompt_starts
    return task, values, pack(request.skip, {}, ""), length, files


def refused_or_planned(job: Callable[[], Job]) -> Any:
    try:
        return json.loads(json.dumps(job().plan.as_dict()))
    except UserError as fault:
        return any_python(str(fault))


def any_python(said: object) -> object:
    """A refusal without the path of the Python that its command names."""
    return re.sub(r"`\S*/python\S*", "`python", said) if isinstance(said, str) else said


def test_nodes_and_generate_agree_on_random_requests(drawing_files: Path, tmp_path: Path) -> None:
    sets, expected = [], []
    for number in range(SETS):
        options = PARSER.parse_args(drawn(number, drawing_files).generate())
        loaded, request = load_options_of(options), request_of(options)
        if request.nag is not None or request.svi:
            continue  # these come to the sampler with the conditioning
        loaded = for_request(loaded, request)
        parts = found(loaded, image=bool(request.pictures))
        paths = {"high": parts.high.path, "low": parts.low_path}
        files: Files = {name: str(path) for name, path in paths.items() if path is not None}
        files["loras"] = list(map(str, lora_files(loaded.loras)))
        planned = refused_or_planned(lambda loaded=loaded, request=request: job_of(loaded, request))
        if "takes no image" in str(planned) or "takes a first frame only" in str(planned):
            continue  # nodes of pictures refuse
        sets.append(of_nodes(parts.task.name, request, files))
        expected.append(planned)
    compare(sets, expected, tmp_path)


def compare(sets: list[Any], expected: list[Any], folder: Path) -> None:
    """The answers of the nodes, which are those of `generate`."""
    checkout = find_comfyui()
    (folder / "sets.json").write_text(json.dumps(sets))
    answers = [any_python(one) for one in printed_by("doors.py", checkout, str(folder / "sets.json"))]
    assert len(answers) > SETS // 3
    for one, planned, answer in zip(sets, expected, answers, strict=True):
        if isinstance(planned, dict) and isinstance(answer, dict):
            planned, answer = without_costs(planned), without_costs(answer)
        assert answer == planned, one
    assert 10 < sum(isinstance(plan_or_refusal, str) for plan_or_refusal in expected) < len(expected) - 10


def test_nodes_and_generate_agree(media: dict[str, str], tmp_path: Path) -> None:
    sets, expected = [], []
    for number in range(SETS):
        arguments, task = drawn_options(number), FULL[number % len(FULL)]
        if "--denoise" in arguments and family_of(task).driven:
            task = TASKS["t2v-A14B"]
        line = ["--prompt", "x", "--model", f"random:{task.name}", *begins_with(task, arguments, media), *arguments]
        try:
            options = PARSER.parse_args(["generate", *line])
            loaded, request = load_options_of(options), request_of(options)
        except UserError:  # one value alone, which widgets and options refuse where they are made
            continue
        if request.clip_frames is not None or request.overlap is not None:
            continue  # the sampler makes one clip
        if request.nag is not None or request.control is not None or 0 in (request.steps, request.shift):
            continue  # these come to the sampler with the conditioning, and 0 of a widget is the model's own
        planned = refused_or_planned(lambda loaded=loaded, request=request: job_of(loaded, request))
        if "leaves nothing of the video" in str(planned):
            continue  # the sampler sees in its latents whether there is a video
        sets.append(of_nodes(task.name, request, {"loras": []}))
        expected.append(planned)
    compare(sets, expected, tmp_path)
