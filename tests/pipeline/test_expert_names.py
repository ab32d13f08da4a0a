"""Swapped experts, one file for both, LoRAs of the other expert and half of a pair: said, by metadata or name."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
import torch

from wan_core.config import LoadOptions, LoraOptions
from wan_core.execution.report import Report
from wan_core.pipeline.load import load_models
from wan_core.pipeline.loras import notes_of, read_loras
from wan_core.pipeline.model_parts import ExpertFile
from wan_core.pipeline.sources import TINY, TINY_LORAS, find_experts, find_models

HIGH, LOW = TINY / "t2v_high.safetensors", TINY / "t2v_low.safetensors"


@pytest.mark.parametrize(
    ("path", "expert"),
    [
        ("wan2.2_t2v_high_noise_14B_fp8_scaled.safetensors", "high"),
        ("release/high_noise_model/diffusion_pytorch_model.safetensors.index.json", "high"),
        ("release/low_noise_model", "low"),
        ("diffusers/transformer_2/diffusion_pytorch_model.safetensors.index.json", "low"),
        ("diffusers/transformer", None),
        ("wan2.2_ti2v_5B_fp16.safetensors", None),
        ("high_noise_and_low_noise.safetensors", None),
        ("my_style-HIGH.safetensors", "high"),
        ("style_low_fp16.safetensors", "low"),
        ("high_and_low.safetensors", "low"),
    ],
)
def test_what_the_files_of_releases_say(path: str, expert: str | None) -> None:
    assert ExpertFile.of(Path(path), {}).expert == expert
    assert ExpertFile.of(Path(path), {"expert": "low"})[1:] == ("low", "metadata")
    assert ExpertFile.of(None, {}).expert is None


def test_experts_that_are_not_what_they_are_used_for(tmp_path: Path) -> None:
    assert find_experts(HIGH, LOW).notes == []
    (swapped,) = find_experts(LOW, HIGH).notes
    assert swapped.startswith(
        "the experts are swapped: tiny/t2v_low.safetensors is for the low-noise expert by its name"
    )
    (same,) = find_experts(HIGH, HIGH).notes
    assert same.startswith("both experts are one file, tiny/t2v_high.safetensors")
    (tmp_path / "other.safetensors").symlink_to(HIGH)
    assert "one file" in find_experts(tmp_path / "other.safetensors", HIGH).notes[0]
    shutil.copy(LOW, tmp_path / "style.safetensors")
    (half,) = find_experts(tmp_path / "style.safetensors", HIGH).notes
    assert half.startswith("the experts may be swapped: tiny/t2v_high") and half.endswith(
        "used as the low-noise expert"
    )
    (alone,) = find_experts(LOW).notes
    assert "runs every step here" in alone


def loras_of(*loras: tuple[str, str, float]) -> list[str]:
    """The notes of the embedded LoRAs: (which file, for which expert, strength)."""
    options = [LoraOptions(path=str(TINY_LORAS[file]), expert=expert, strength=s) for file, expert, s in loras]
    return notes_of(read_loras(options, find_experts(HIGH, LOW).dit, True))


def test_loras_of_the_other_expert_and_half_of_a_pair() -> None:
    assert loras_of() == loras_of(("high", "auto", 1), ("low", "auto", 1)) == loras_of(("low", "high", 0)) == []
    swapped = loras_of(("low", "high", 1), ("high", "low", 1))
    assert len(swapped) == 2 and swapped[0].endswith("by its metadata, and is used for the high-noise expert")
    (half,) = loras_of(("high", "high", 1))
    assert "none is for the low-noise expert" in half
    both = loras_of(("high", "high", 1), ("high", "low", 1))
    assert len(both) == 2 and "is used for the low-noise expert" in both[1] and "none is for" in both[0]


def test_the_report_and_the_log_say_it(caplog: pytest.LogCaptureFixture) -> None:
    loras = (LoraOptions(path=str(TINY_LORAS["high"]), expert="high"),)
    options = LoadOptions(model="tiny", high=str(LOW), low=str(HIGH), loras=loras)
    report = Report(torch.device("cpu"))
    with caplog.at_level(logging.WARNING):
        load_models(find_models(options), options, report)
    for message in ("the experts are swapped", "none is for the low-noise expert"):
        assert any(message in note for note in report.notes) and message in caplog.text
