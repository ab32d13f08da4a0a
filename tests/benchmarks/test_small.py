"""Smaller cards with less host memory: experts as GGUF files, what limits the host, and the rows."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.gguf_experts import FORMAT, write_gguf
from benchmarks.limited_host import GIB, host_limit
from benchmarks.small import small_rows
from wan_core.checkpoint import load_dit, open_checkpoint
from wan_core.config import OptionError
from wan_core.pipeline.sources import RANDOM

CPU = torch.device("cpu")


def test_gguf_experts_are_packed_and_their_numbers_are_those_of_a_matrix(tmp_path: Path) -> None:
    config = replace(RANDOM["i2v-A14B"][0], dim=256, ffn_dim=512, num_heads=2, num_layers=2)
    path = tmp_path / "expert.gguf"
    write_gguf(config, path, CPU, 0)
    packed = {info.packing for info in open_checkpoint(path).tensors.values()}
    assert packed == {FORMAT, None}
    model = load_dit(path, device="cpu", dtype=torch.float32)
    for k, weight in ((256, model.blocks[1].ffn[0].weight), (512, model.blocks[0].ffn[2].weight)):
        assert abs(weight.mean() * k**0.5) < 0.1 and 0.3 < weight.std() * k**0.5 < 3
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_a_process_gets_no_more_host_memory_than_the_limit() -> None:
    """And it knows how much that is."""
    if os.environ.get("CI") or not os.access("/sys/fs/cgroup", os.W_OK):
        pytest.skip("no control group can be made here")
    with host_limit(0.25) as limit:
        assert limit.folder is not None
        code = (
            "from wan_core.config.host_memory import available_bytes as a; print(a(), flush=True); bytearray(400 << 20)"
        )
        done = subprocess.run(
            [*limit.prefix, sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2]
        )
        assert 0.1 * GIB < int(done.stdout) < 0.25 * GIB and done.returncode != 0
        assert limit.peak_gib is not None and 0.2 < limit.peak_gib <= 0.26
    assert not limit.folder.exists()


def test_a_setting_of_another_form_is_refused(tmp_path: Path) -> None:
    options = argparse.Namespace(setting=["fp8 12"], runs=None, scratch=tmp_path)
    with pytest.raises(OptionError, match="'fp8 12' given"):
        list(small_rows("", ["64x64x5"], CPU, options, {}))
