"""The nodes make the plans that `generate` makes of the same options, and refuse the same ones in the same words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.test_plan_and_generate import FULL, PARSER, begins_with, drawn_options, media, without_costs
from tests.comfyui import find_comfyui, printed_by
from wan_core.cli.generate import load_options_of, request_of
from wan_core.config import PlanNumbers, Request, UserError
from wan_core.config.table import table
from wan_core.models.wan.families import TASKS, family_of
from wan_core.pipeline.check import check_request
from wan_core.workers.wire import pack

pytestmark = pytest.mark.comfy
__all__ = ["media"]  # a fixture
SETS = 200


def of_nodes(task: str, request: Request) -> tuple[str, dict[str, Any], Any, Any, dict[str, Any]]:
    """What `doors.py` takes: the widgets' values, 0 where nothing is asked for."""
    values = {name: getattr(request, name) or 0 for name in table(PlanNumbers)}
    values |= {"solver": request.solver or "unipc", "preset": request.preset}
    values |= {} if request.from_video is None else {"denoise": request.denoise}
    length = {"frames": request.frames, "clip_frames": request.clip_frames, "overlap": request.overlap, "cut": True}
    length |= {"image": request.image is not None}
    return task, values, pack(request.skip, {}, ""), pack(request.windows, {}, ""), length


def test_nodes_and_generate_agree(media: dict[str, str], tmp_path: Path) -> None:
    checkout = find_comfyui()
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
        if request.nag is not None or request.control is not None or 0 in (request.steps, request.shift):
            continue  # these come to the sampler with the conditioning, and 0 of a widget is the model's own
        try:
            planned: Any = json.loads(
                json.dumps(check_request(loaded, request, torch.device("cpu")).job.plan.as_dict())
            )
        except UserError as fault:
            planned = str(fault)
        if "leaves nothing of the video" in str(planned):
            continue  # the sampler sees in its latents whether there is a video
        sets.append(of_nodes(task.name, request))
        expected.append(planned)
    (tmp_path / "sets.json").write_text(json.dumps(sets))
    answers = printed_by("doors.py", checkout, str(tmp_path / "sets.json"))
    assert len(answers) > SETS // 2
    for one, planned, answer in zip(sets, expected, answers, strict=True):
        if isinstance(planned, dict) and isinstance(answer, dict):
            planned, answer = without_costs(planned), without_costs(answer)
        assert answer == planned, one
    assert 10 < sum(isinstance(plan_or_refusal, str) for plan_or_refusal in expected) < len(expected) - 10
