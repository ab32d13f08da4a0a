"""Random requests give one plan, one length and one key, or one refusal in the same words, through every door: `plan`,
`generate`, a line of a list, and what workers are sent; `tests/nodes/test_doors.py` asks the nodes."""

from __future__ import annotations

import contextlib
import io
import json
import random
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from tests.cli.test_plan_and_generate import sent_to_workers, without_costs
from wan_core.cli import build_parser
from wan_core.cli.generate import load_options_of, request_of
from wan_core.cli.inform import asked_plan
from wan_core.cli.prompt_file import read_list
from wan_core.config import LoadOptions, Request, UserError
from wan_core.config.keys import key_of
from wan_core.config.table import table
from wan_core.models.wan.families.clips import Clip
from wan_core.pipeline.check import Job, check_request
from wan_core.pipeline.model_parts import Parts
from wan_core.pipeline.sources import find_models
from wan_core.workers.wire import unpack

REQUESTS = 100
CACHES = ("magcache", "taylorseer")  # of which a run has one
CPU = torch.device("cpu")
PARSER = build_parser()
MODELS = ("tiny", "tiny", "random:t2v-A14B", "random:i2v-A14B", "random:ti2v-5B")
LORAS = ("wan_lightx2v_4steps_lora_high_noise", "wan_lightx2v_4steps_lora_low_noise", "style", "wan_nolightning")
# Each request has some of these fields of a list; a request may have one value of each.
FIELDS: dict[str, tuple[Any, ...]] = {
    "preset": ("none", "4-step", "8-step", "8-step-guided", "motion", "8-step-motion", "template"),
    "steps": (1, 4, 8, 12, 15, 20),
    "shift": (3.0, 100.0),
    "boundary": (0.8,),
    "guidance": (1.0, 3.5, 50.0, "/1", "/4", "3.5/1"),
    "solver": ("euler", "heun", "lcm"),
    "motion": ("0.93", "985/2"),
    "lora_strengths": (["all=0.5"], ["all=0.5", "style=1"], ["high=0;1", "low=1"], ["lightx2v=1;1;1"], ["none=1"]),
    "frames": (5, 7, 16, 17, 33, 97),
    "clip_frames": (9, 13, 33, "9/1", "13/5", "33/5", "/1"),
    "keyframes": ([4], [0, 8], [8, 4], [90]),
    "image": (True,),
    "svi": (True, False),
    "magcache": ("0.24/1/0.1", "0.12/2/0.2"),
    "taylorseer": ("2/0.2",),
    "sparse": ("0.8125", "0.5"),
    "nag": ("11",),
    "prompts_at": ([0, 8],),
    "seed": (7,),
}


@dataclass(frozen=True)
class Asked:
    """A random request: fields of a list, and the options of its models."""

    fields: dict[str, Any]
    model: list[str]

    def generate(self) -> list[str]:
        return ["generate", "--prompt", "x", *self.model, *words(self.fields)]

    def plan(self) -> list[str]:
        """Pictures and prompts are not read by a plan: it takes their frames."""
        fields = {name: value for name, value in self.fields.items() if name != "seed"}
        for name in {"keyframes", "prompts_at"} & set(fields):
            fields[name] = [int(one.partition("=")[0]) for one in fields[name]]
        fields |= {"image": True} if "image" in fields else {}
        return ["plan", *self.model, *words(fields)]


def words(fields: dict[str, Any]) -> list[str]:
    """Options of the command line."""
    options, arguments = table(Request), list[str]()
    for name, value in fields.items():
        flag = f"--{(options[name].flag if name in options else name).replace('_', '-')}"
        for one in value if isinstance(value, list) else [value]:
            arguments.append(
                (flag if one else flag.replace("--", "--no-")) if isinstance(one, bool) else f"{flag}={one}"
            )
    return arguments


def drawn(number: int, folder: Path) -> Asked:
    draw = random.Random(number)
    names = draw.sample(sorted(FIELDS), draw.choice((1, 2, 3, 3, 4, 4)))
    caches = [name for name in names if name in CACHES]
    fields: dict[str, Any] = {name: draw.choice(FIELDS[name]) for name in names if name not in caches[1:]}
    model = draw.choice(MODELS)
    if model.startswith("random:i2v") and "keyframes" not in fields:
        fields["image"] = True
    if "image" in fields:
        fields["image"] = str(folder / "picture.png")
    if "keyframes" in fields:
        fields["keyframes"] = [f"{frame}={folder / 'picture.png'}" for frame in fields["keyframes"]]
    if "prompts_at" in fields:
        fields["prompts_at"] = [f"{frame}=text {frame}" for frame in fields["prompts_at"]]
    loras = draw.sample(LORAS, draw.choice((0, 0, 1, 2)))
    return Asked(fields, ["--model", model, *(f"--lora={folder / one}.safetensors" for one in loras)])


@pytest.fixture(scope="session")
def drawing_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    Image.new("RGB", (64, 64)).save(folder / "picture.png")
    for name in LORAS:
        module = "diffusion_model.blocks.0.ffn.0"
        save_file(
            {f"{module}.lora_down.weight": torch.zeros(2, 128), f"{module}.lora_up.weight": torch.zeros(384, 2)},
            folder / f"{name}.safetensors",
        )
    return folder


FOUND: dict[str, Parts] = {}


def found(options: LoadOptions, *, image: bool) -> Parts:
    """Headers are read once."""
    key = f"{options} {image}"
    if key not in FOUND:
        FOUND[key] = find_models(options, image=image)
    return FOUND[key]


def job_of(loaded: LoadOptions, request: Request) -> Job:
    return check_request(loaded, request, CPU, found)


Answer = tuple[dict, tuple[Clip, ...], int] | str
"""The plan without costs, the clips and the frames, or what is refused."""


def of_job(loaded: LoadOptions, request: Request) -> Answer:
    try:
        job = job_of(loaded, request)
    except UserError as fault:
        return str(fault)
    assert sent_to_workers(job.plan) == job.plan
    return without_costs(json.loads(json.dumps(job.plan.as_dict()))), job.clips, job.frames


def of_plan(asked: Asked) -> Answer:
    options = PARSER.parse_args(asked.plan())
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            planned = asked_plan(options)
    except UserError as fault:
        return str(fault)
    plan = without_costs(json.loads(json.dumps(planned.as_dict())))
    return plan, planned.long.clips, options.frames or planned.task.frames


@pytest.mark.parametrize("first", range(0, REQUESTS, 50))
def test_every_door_makes_one_plan(first: int, drawing_files: Path, tmp_path: Path) -> None:
    refused = 0
    for number in range(first, first + 50):
        asked = drawn(number, drawing_files)
        options = PARSER.parse_args(asked.generate())
        loaded, request = load_options_of(options), request_of(options)
        of_generate = of_job(loaded, request)
        assert of_plan(asked) == of_generate, asked

        line = tmp_path / f"{number}.jsonl"
        line.write_text(json.dumps({"prompt": "x", **asked.fields}))
        listed = PARSER.parse_args(["generate", f"--prompts={line}", f"--out={tmp_path / 'x.mp4'}", *asked.model])
        (video,) = read_list(line, listed, load_options_of(listed))
        assert (video.request, load_options_of(listed)) == (request, loaded), asked
        assert video.key == key_of(request, loaded), asked

        loaded_there = unpack(LoadOptions, json.loads(json.dumps(asdict(loaded))))
        sent = replace(loaded_there, device="cpu"), sent_to_workers(request)
        assert key_of(sent[1], loaded) == video.key and of_job(*sent) == of_generate, asked  # type: ignore[arg-type]
        refused += isinstance(of_generate, str)
    assert 5 < refused < 45, "some are refused, and some are not"


def test_frame_0_is_known_where_an_image_is_given(drawing_files: Path) -> None:
    picture = drawing_files / "picture.png"
    asked = Asked({"image": str(picture), "keyframes": [f"8={picture}"]}, ["--model=tiny"])
    plan, _, _ = of_plan(asked)
    assert plan["known"] == [0, 8] and plan["task"] == "i2v-tiny"  # type: ignore[index]


def test_presets_of_the_embedded_model_bring_its_loras(drawing_files: Path) -> None:
    """Whose distilled weights leave step caches off, whatever the number of steps."""
    asked = Asked({"preset": "8-step", "steps": 15, "magcache": "0.24/1/0.1"}, ["--task=t2v-tiny"])
    plan, _, _ = of_plan(asked)
    assert plan["forwards"] == 15 and plan["saved"] == 0  # type: ignore[index]
