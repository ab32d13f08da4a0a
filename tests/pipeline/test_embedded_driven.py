"""The embedded model's driven variant through the whole pipeline: the look follows the picture, the motion the video.

The full comparison, 200 held-out pairs, is in benchmarks/results/driven-*.json (written by `quality`); here a sample of
it that a CPU makes in seconds.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
import torch

from wan_core.checkpoint import load_dit
from wan_core.cli import main
from wan_core.config import LoadOptions, Request, SparseOptions
from wan_core.config.skipping import parse_setting
from wan_core.execution.memory import planning
from wan_core.execution.memory.streaming import stage_bytes
from wan_core.execution.report import GIB
from wan_core.media.mp4 import Encoder, write_mp4
from wan_core.media.video import read_video
from wan_core.models.wan.families.animate2 import Form
from wan_core.models.wan.prepared_text import PreparedText
from wan_core.models.wan.runners import BlockInputs, ForwardInfo
from wan_core.pipeline import memory_planning
from wan_core.pipeline.embedded import parse_caption
from wan_core.pipeline.memory_planning import beside_plan
from wan_core.pipeline.pipeline import Pipeline
from wan_core.sampling.sparsity.run import SparseTiles
from wan_lab.driving import follows
from wan_lab.metrics import judge
from wan_lab.run import measure_quality
from wan_lab.samples import Sample, as_pixels, choose_samples, drawn_trio, save_frame

CAPTION = "a green square moving up on a white background"
SETTINGS = ("full", "magcache:0.24/1/0.1+sparse:0.8125")


def test_look_and_motion_are_right_in_full_and_with_caches_and_sparse_attention() -> None:
    pipe = Pipeline.load(LoadOptions(model="tiny", task="animate2-tiny", device="cpu"))
    samples = choose_samples(None, 110, 0, tiny=True)[10:11]
    settings = {name: parse_setting(name) for name in SETTINGS}
    measured = measure_quality(pipe, Request(prompt="", steps=12), samples, settings, len(samples))
    for name, videos in measured.comparisons.items():
        for claim in ("look", "motion"):
            assert all(getattr(video, claim) for video in videos), (name, claim)
    # 24 dB where a step reads the reference in whole, and little else
    assert fmean(video.psnr for video in measured.comparisons[SETTINGS[1]]) > 27
    assert measured.forwards[SETTINGS[1]] < measured.forwards[SETTINGS[0]]


@pytest.mark.parametrize("part", ["driven", "i2v_high"])
def test_a_first_frame_that_is_given_is_not_read_in_whole(tiny_assets: Path, part: str) -> None:
    model = load_dit(tiny_assets / f"{part}.safetensors")
    tiles = SparseTiles(model, SparseOptions.parse("0.75"), (6, 6, 6))
    like = (torch.zeros(1, 216, 2), torch.zeros(1, 1, 6, 2), torch.zeros(216, 1, 1, 2))
    arranged, _ = tiles.arranged(BlockInputs(*like, PreparedText(()), ForwardInfo(), (6, 6, 6)))
    first = (arranged.inverse[:36] // arranged.block).unique()
    assert not arranged.forced[:, first].all(0).any()


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pictures and videos of two pairs."""
    folder = tmp_path_factory.mktemp("drawn")
    files = {}
    for name, caption in (("first", CAPTION), ("second", "a red circle moving left on a black background")):
        trio = drawn_trio(Sample(caption, 7))
        driving = as_pixels(trio.driving[0].transpose(0, 1))
        files[f"{name} video"] = write_mp4(folder / f"{name}.mp4", driving, fps=8, encoder=Encoder(crf=10))
        files[f"{name} picture"] = Path(save_frame(trio.reference[0], folder / f"{name}.png"))
    return files


def test_the_command_line_drives_a_picture(drawn: dict[str, Path], tmp_path: Path) -> None:
    """With another one's video it moves as that does, and looks the same."""
    out = tmp_path / "driven.mp4"
    options = {"--reference": drawn["first picture"], "--pose-video": drawn["second video"], "--out": out, "--seed": 5}
    command = ["generate", "--model", "tiny", "--device", "cpu", "--prompt", ""]
    assert main([*command, *(str(word) for pair in options.items() for word in pair)]) == 0
    frames, driving = (torch.from_numpy(read_video(path)) for path in (out, drawn["second video"]))
    assert follows(frames, driving)
    assert judge(frames, parse_caption(CAPTION.replace("moving up", "moving left"))).all_true


DRIVEN = LoadOptions(model="tiny", task="animate2-tiny", device="cpu")
TWO_STEPS = Request(prompt="", steps=2, seed=4, guidance_high=1.5, guidance_low=1.5)


def with_media(drawn: dict[str, Path]) -> Request:
    return replace(TWO_STEPS, reference=str(drawn["first picture"]), pose_video=str(drawn["first video"]))


@pytest.fixture(scope="module")
def unlimited(drawn: dict[str, Path]) -> torch.Tensor:
    """The latents of a card with memory for everything."""
    return Pipeline.load(DRIVEN).generate(with_media(drawn)).latents


@pytest.mark.parametrize(("host", "form"), [(64, Form(on_host=True)), (4.012, Form(fp8=True))])
def test_a_small_card_makes_the_same_latents(
    drawn: dict[str, Path],
    unlimited: torch.Tensor,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    host: float,
    form: Form,
) -> None:
    """The memory limit is emulated: the plan is that of a card with so much room, and the run follows it on a CPU."""
    pipe, request = Pipeline.load(DRIVEN), with_media(drawn)
    activations = beside_plan(pipe.models.settings.recognised, pipe.prepare(request).job.plan, 20.1, 4)
    on_device, on_host = (activations.kept_as(one).denoise for one in activations.forms[:2])
    assert on_host < on_device
    room = (on_host + on_device) // 2 + stage_bytes(pipe.models.settings.parts["high"].units, 0)
    monkeypatch.setattr(memory_planning, "device_room", lambda *_: room - pipe.models.residency.weights_on_device())
    monkeypatch.setattr(planning, "RESERVE", (0, 0))  # of a card; the model has 6 MB
    monkeypatch.setattr(memory_planning, "host_room", lambda *_: int(host * GIB))
    limited = Pipeline(replace(pipe.models, plans=True), pipe.report)
    with caplog.at_level("INFO"):
        limited_run = limited.generate(request)
    assert form.words() in caplog.text and limited_run.report.settings["memory"]["policy"] == "stream"
    assert torch.equal(limited_run.latents, unlimited) == (not form.fp8)
    again = limited.generate(request)
    assert torch.equal(again.latents, limited_run.latents)
