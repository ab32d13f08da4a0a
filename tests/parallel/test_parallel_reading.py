"""Weights that the ranks of a host read together are those of the files."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from types import SimpleNamespace

import parallel_loading
import pytest
import torch
from safetensors.torch import save_file

from tests import control_references, gguf_files, int8_files
from tests.animate_references import draw_weights
from tests.parallel.equal_ranks import ROUNDING, equal_on_all, together
from wan_core.checkpoint import load_dit
from wan_core.checkpoint.save import write_safetensors
from wan_core.config import LoadOptions, OptionError
from wan_core.execution.report import Report
from wan_core.parallel.mesh import Mesh
from wan_core.parallel.weights import SMALL
from wan_core.pipeline.load import TINY, load_models
from wan_core.pipeline.reading import load_parts
from wan_core.pipeline.sources import find_models


def test_weights_that_a_host_reads_once_are_equal_bit_for_bit(ranks):
    answers = ranks.ask("weights", mesh="1x1x3")
    assert [changed for changed, _ in answers] == [[]] * len(answers)
    total = answers[0][1]["stored"]
    assert sum(read["touched"] for _, read in answers) <= 1.05 * total


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """A file of tensors of odd sizes, the bytes of those that are cut, and of those that are not."""
    path = tmp_path_factory.mktemp("odd") / "odd.safetensors"
    sizes = [value.numel() * value.element_size() for value in parallel_loading.write_odd(path).values()]
    return str(path), sum(n for n in sizes if n > SMALL), sum(n for n in sizes if n <= SMALL)


@pytest.mark.parametrize("mesh", ["1x1x2", "1x1x3"])
@pytest.mark.parametrize("limits", [{}, {"ahead": 1}, {"ahead": 300_000, "piece": 10_007}], ids=repr)
def test_ranks_read_a_part_each_by_threads_and_have_what_one_reads(ranks, odd, mesh, limits):
    path, cut, uncut = odd
    answers = ranks.ask("staged_weights", mesh=mesh, path=path, **limits)
    assert [(changed, unread) for changed, _, unread in answers] == [([], 0)] * len(answers)
    read = [count for _, count, _ in answers]
    assert sum(read) == cut + len(read) * uncut  # nothing twice but what is small
    assert max(read) - min(read) <= 4 * 16 * len(read)  # of four tensors, up to the rounding of parts


def test_ranks_that_read_by_threads_may_stop_early(ranks, odd):
    """Whatever is on its way, none waits for another, and the next reading is sound."""
    for taken in (0, 1, 4):
        answers = ranks.ask("staged_weights", mesh="1x1x2", path=odd[0], ahead=1_000_000, piece=9_001, taken=taken)
        assert [(changed, unread) for changed, _, unread in answers] == [([], 0)] * 2
    answers = ranks.ask("staged_weights", mesh="1x1x2", path=odd[0])
    assert [changed for changed, _, _ in answers] == [[]] * 2


def test_a_model_that_ranks_read_by_threads_is_that_of_one(ranks, tmp_path):
    assert ranks.ask("staged_model", mesh="1x1x3") == [[]] * 3
    state, meant, notes = int8_files.stored("rotated 256")
    write_safetensors(state, tmp_path / "int8.safetensors", notes)
    assert ranks.ask("staged_model", mesh="1x1x3", packed=str(tmp_path / "int8.safetensors")) == [[]] * 3
    gguf_files.write(tmp_path / "m.gguf", meant, gguf_files.matrices("Q8_0"), notes=int8_files.NOTES)
    assert ranks.ask("staged_model", mesh="1x1x3", packed=str(tmp_path / "m.gguf")) == [[]] * 3


@pytest.mark.parametrize("missing", ["all parts", "the last part"])
def test_a_rank_whose_part_is_missing_says_so_and_no_other_waits_for_ever(ranks, tmp_path, missing):
    path = tmp_path / "short.safetensors"
    write_safetensors({"values": torch.zeros(300_000, dtype=torch.uint8)}, path, {})
    arguments = {"path": str(path), "keep": 1000 if missing == "all parts" else 200_000, "timeout": 2.0}
    first, last = ranks.ask("truncated", mesh="1x1x2", **arguments)
    assert last.startswith("CheckpointError") and "become shorter" in last
    assert first.startswith("CheckpointError" if missing == "all parts" else "RuntimeError")


def test_experts_in_parts(ranks, alone):
    """Each rank holds its share of the blocks, and no more while nothing runs."""
    request = {"steps": 2, "width": 80, "height": 80, "frames": 5}
    equal_on_all(together(ranks, mesh="1x1x3", request=request, residency="shard"), alone(request=request))
    answers = ranks.ask("sharded_weights", mesh="1x1x3")
    assert [changed for _, changed in answers] == [[]] * 3
    blocks = sum(value.numel() * 4 for value in load_dit(TINY / "t2v_high.safetensors").blocks.state_dict().values())
    assert sum(count for count, _ in answers) == blocks and max(count for count, _ in answers) < 0.4 * blocks


def test_weights_of_vace_blocks_are_sharded_too(ranks, tmp_path):
    path = tmp_path / "vace.safetensors"
    save_file(draw_weights(control_references.CONFIGS["vace"]), path, {"num_heads": "2"})
    for error, unsharded in ranks.ask("sharded_vace", mesh="1x1x2", path=str(path)):
        assert error < ROUNDING and unsharded == []


@pytest.mark.parametrize("mesh", ["1x1x2", "2x1x2"])
def test_experts_that_are_read_at_once_are_those_of_the_files(ranks, mesh):
    for changed in ranks.ask("staged_together", mesh=mesh):
        assert changed == []


@pytest.mark.parametrize("in_order", [True, False])
def test_threads_that_load_work_on_the_device_of_the_rank(monkeypatch, in_order):
    """A new thread's current device is the first GPU: what is launched or drawn without naming one would go there."""
    here = threading.local()

    @contextmanager
    def current(device):
        here.device = device
        yield
        del here.device

    monkeypatch.setattr(torch.cuda, "device", current)
    device, main = torch.device("cuda", 1), threading.get_ident()

    def load(name, how):  # the rank's main thread has its device already
        return threading.get_ident() == main or getattr(here, "device", None) == device

    loaded = load_parts(["high", "text_encoder", "vae"], load, device, in_order=in_order)
    assert loaded == {"high": True, "text_encoder": True, "vae": True}


@pytest.mark.parametrize("options", [{"compile": "blocks"}, {"precision": "fp8-weights"}, {}])
def test_what_cannot_be_held_in_parts_is_refused(options):
    ranks = SimpleNamespace(
        device=torch.device("cpu"),
        sequence=SimpleNamespace(size=2 if options else 1),
        agree=float,
        mesh=Mesh(1, 1, 2),
        layers=SimpleNamespace(size=1),
    )
    load_options = LoadOptions(model="tiny", device="cpu", residency="shard", **options)
    with pytest.raises(OptionError, match="residency 'shard' is not available: "):
        load_models(find_models(load_options), load_options, Report(ranks.device), None, ranks)
