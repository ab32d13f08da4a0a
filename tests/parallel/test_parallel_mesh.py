"""Meshes as numbers: who works with whom, which mesh `auto` takes, how tokens are cut, how parts are merged."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wan_core.config import LoadOptions, OptionError, SparseOptions, UserError
from wan_core.models.wan.config import T2V_A14B
from wan_core.ops.attention.registry import BACKENDS
from wan_core.ops.attention.sdpa import math_lse, math_reference
from wan_core.parallel.mesh import Mesh, auto_mesh
from wan_core.parallel.ring import merge
from wan_core.parallel.sequence import check_lse, check_mesh, shard_lengths
from wan_core.sampling.plan import make_plan
from wan_core.workers.jobs import Jobs

MESHES = st.builds(Mesh, st.integers(1, 2), st.integers(1, 4), st.integers(1, 4))


@given(MESHES)
def test_every_rank_is_in_one_row_of_each_dimension(mesh):
    sizes = {"cfg": mesh.cfg, "ring": mesh.ring, "ulysses": mesh.ulysses, "sequence": mesh.shards}
    sizes |= {"layers": 1, "time": 1}
    for name, rows in mesh.rows().items():
        assert sorted(rank for row in rows for rank in row) == list(range(mesh.size))
        assert {len(row) for row in rows} == {sizes[name]}
    assert Mesh.parse(str(mesh)) == mesh


@pytest.mark.parametrize("text", ["layers2", "time4", "time2+1x1x2", "time2+2x1x1", "time2+layers2", "time8+2x2x1"])
def test_layers_and_time(text):
    mesh = Mesh.parse(text)
    assert str(mesh) == text
    for rows in mesh.rows().values():
        assert sorted(rank for row in rows for rank in row) == list(range(mesh.size))
    assert {len(row) for row in mesh.rows()["time"]} == {mesh.time}


NO_MESHES = ["2", "2x2", "3x1x1", "0x1x1", "1x0x1", "1x1x-1", "axbxc", "1x1x1x1", "99999x1x1", "1x2bx4", "1bx2x1"]
NO_MESHES += ["layers0", "time0", "time2+time2", "layers2+1x1x2", "time2+", "1x1x2+time2", "time"]


@pytest.mark.parametrize("text", ["", *NO_MESHES])
def test_what_is_no_mesh_is_refused(text):
    with pytest.raises(OptionError, match="mesh"):
        Mesh.parse(text)


@given(MESHES)
def test_neighbours_in_ulysses_are_neighbours_on_the_host(mesh):
    for row in mesh.rows()["ulysses"] + mesh.rows()["sequence"]:
        assert row == list(range(row[0], row[0] + len(row)))


@given(st.integers(1, 5000), st.integers(1, 16))
def test_shards_cover_the_tokens_and_differ_by_one(tokens, shards):
    if tokens < shards:
        with pytest.raises(OptionError, match="cannot be shared"):
            shard_lengths(tokens, 1, shards)
        return
    lengths, _ = shard_lengths(tokens, 1, shards)
    assert sum(lengths) == tokens and max(lengths) - min(lengths) <= 1


@given(st.integers(2, 31), st.integers(1, 900), st.integers(1, 8))
def test_units_of_a_shard_lie_in_one_frame(frames, inside, shards):
    tokens = frames * inside
    if tokens < shards:
        return
    lengths, unit = shard_lengths(tokens, frames, shards)
    assert inside % unit == 0 and sum(lengths) == tokens and all(length % unit == 0 for length in lengths)
    assert max(lengths) - min(lengths) <= max(1, tokens // shards // 32)  # no rank has much more to do


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.floats(1, 40), st.integers(0, 99))
def test_merged_parts_are_the_whole(lengths, spread, seed):
    """Also where one part's scores are far above another's, which numerators over one maximum survive."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, n, 2, 8, generator=generator) for n in (5, sum(lengths), sum(lengths)))
    k[:, : lengths[0]] *= spread
    parts = [math_lse(q, *keys_values) for keys_values in zip(k.split(lengths, 1), v.split(lengths, 1), strict=True)]
    torch.testing.assert_close(merge(parts), math_reference(q, k, v), rtol=1e-5, atol=1e-5)


def test_parts_are_merged_in_float32():
    """Many equal parts: a sum in bf16 would stop growing."""
    part = torch.full((1, 2, 1, 8), 1.0, dtype=torch.bfloat16), torch.zeros(1, 1, 2)
    assert torch.equal(merge([part] * 300), part[0])


# ------------------------------------------------------------------------------------------------------------- choosing


@pytest.mark.parametrize(
    ("gpus", "paired", "rings", "per_host", "mesh"),
    [
        *((gpus, 1.0, True, 8, f"2x1x{gpus // 2}") for gpus in (2, 4, 6, 8)),  # guidance comes first
        (4, 0.0, True, 4, "1x1x4"),  # there is none
        (4, 0.5, True, 4, "1x1x4"),  # in half of the forwards alone
        (3, 1.0, True, 3, "1x1x3"),  # it does not divide
        (16, 1.0, True, 8, "2x1x8"),  # a branch on each host
        (16, 0.0, True, 8, "1x2x8"),  # a ring between hosts
        (16, 0.0, False, 8, "1x1x16"),
        (1, 1.0, True, 1, "1x1x1"),
    ],
)
def test_the_mesh_that_is_chosen(gpus, paired, rings, per_host, mesh):
    assert str(auto_mesh(gpus, 40, paired=paired, rings=rings, gpus_per_host=per_host)) == mesh


@given(st.integers(1, 64), st.integers(1, 48), st.floats(0, 1), st.integers(1, 8))
def test_the_choice_uses_all_gpus(gpus, heads, paired, per_host):
    mesh = auto_mesh(gpus, heads, paired=paired, rings=True, gpus_per_host=per_host)
    assert mesh.size == gpus and mesh.ulysses <= min(heads, per_host)


def test_more_gpus_than_heads_need_a_ring():
    with pytest.raises(OptionError, match="8 GPUs cannot divide a model with 4 heads"):
        auto_mesh(8, 4, paired=0.0, rings=False, gpus_per_host=8)


def test_a_ring_needs_a_backend_with_a_log_sum_exp():
    for name, backend in BACKENDS.items():
        if backend.gives_lse:
            check_lse(True, name, Mesh(1, 2, 1))
        else:
            with pytest.raises(OptionError, match=f"'{name}' gives no log-sum-exp"):
                check_lse(False, name, Mesh(1, 2, 1))
        check_lse(backend.gives_lse, name, Mesh(2, 1, 4))


@pytest.mark.parametrize(
    ("mesh", "tokens", "sparse", "attention", "message"),
    [
        ("1x2x1", 1000, {}, "sdpa", "mesh 1x2x1 has a ring, around which attention reads all keys"),
        ("1x1x2", 100, {"kernel": "flex"}, "sdpa", "sparse kernel 'flex' cannot run"),
        ("1x1x2", 1000, {"kernel": "cudnn"}, "sdpa", "sparse kernel 'cudnn' cannot run"),
        ("1x1x2", 1, None, "sdpa", "1 tokens cannot be shared by 2 ranks"),
        ("1x2x1", 1000, None, "math", None),
        ("1x1x2", 1000, {}, "sdpa", None),
    ],
)
def test_a_mesh_that_cannot_run_a_request_is_refused_before_anything_is_loaded(
    mesh, tokens, sparse, attention, message
):
    """A mesh that was named, as workers take it from a request, too."""
    jobs = Jobs(SimpleNamespace(size=2, device=torch.device("cpu"), on_host=2))
    jobs.wanted = mesh
    part = SimpleNamespace(precision=None)
    models = SimpleNamespace(dit=T2V_A14B, high=part, low=part)
    options = LoadOptions(model="tiny", precision="fp32", attention=attention)
    chosen = None if sparse is None else SparseOptions(sparsity=0.5, **sparse)
    plan = replace(make_plan(steps=2), sparse=chosen, latent_shape=(1, 16, tokens, 2, 2))
    if message is None:
        assert str(jobs.choose(options, models, plan)) == mesh
        return
    with pytest.raises(UserError, match=message):
        jobs.choose(options, models, plan)


def test_auto_is_the_fastest_that_was_measured():
    """The mesh of four GPUs is within one percent of the fastest on four H200s."""
    path = Path(__file__).parents[2] / "benchmarks" / "results" / "parallel-h200-20261120.json"
    measured: dict[str, dict[str, float]] = {}
    for row in json.loads(path.read_text())["rows"]:
        both_ways = "both ways" in row["name"]  # a mesh of another time
        mesh = None if both_ways else Mesh.parse(row.get("mesh", "1x1x1"))
        if row["name"].startswith("fp8 + cudnn-fp8") and mesh is not None and mesh.size == 4:
            measured.setdefault(row["size"], {})[row["mesh"]] = row["seconds"]
    chosen = str(auto_mesh(4, 40, paired=1.0, rings=True, gpus_per_host=4))
    assert len(measured) == 2
    for seconds in measured.values():
        assert seconds[chosen] <= 1.01 * min(seconds.values())


# --------------------------------------------------------------------------------------------------- sparse attention


def test_sparse_attention_is_refused_on_a_ring():
    options = SparseOptions(sparsity=0.5)
    with pytest.raises(OptionError, match=r"mesh 2x2x2 has a ring, .* use 2x1x4 with --sparse"):
        check_mesh(Mesh(2, 2, 2), "sdpa", 75_600, options)
    check_mesh(Mesh(2, 1, 4), "sdpa", 75_600, options)
    check_mesh(Mesh(2, 2, 2), "sdpa", 75_600, None)
