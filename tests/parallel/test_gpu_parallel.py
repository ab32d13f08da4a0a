"""On several NVIDIA GPUs over NCCL: what gloo shows on a CPU, with the kernels and precisions that only GPUs have."""

from __future__ import annotations

import parallel_checks
import parallel_loading
import pytest
import torch
from parallel_ranks import Ranks

from wan_core.ops.attention.registry import BACKENDS
from wan_core.ops.attention.sparse.kernels import KERNELS
from wan_core.parallel.mesh import Mesh
from wan_core.parallel.weights import SMALL

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS < 2, reason=f"needs 2 GPUs or more, {GPUS} are there"),
]
ALL = ("1x1x2", "1x2x1", "2x1x1", "1x1x3", "1x2x2", "2x1x2", "1x4x1")
MESHES = [mesh for mesh in ALL if Mesh.parse(mesh).size <= GPUS]
SEQUENCES = [mesh for mesh in MESHES if mesh.startswith("1x")]
BACKENDS_HERE = ("sdpa", "cudnn", "flash4", "cudnn-fp8")


@pytest.fixture(scope="module")
def ranks():
    started = Ranks(min(GPUS, 4))
    yield started
    started.close()


def why_not(backend: str) -> str | None:
    return BACKENDS[backend].why_not(torch.device("cuda", 0), torch.bfloat16, 128)


@pytest.mark.parametrize("mesh", [*MESHES, "layers2"])
def test_a_trajectory_in_fp32_equals_that_of_one_gpu(ranks, mesh):
    options = {"precision": "fp32", "vae_precision": "fp32", "attention": "sdpa", "device": "cuda"}
    alone = parallel_checks.trajectory(None, request={"steps": 4}, **options)
    answers = ranks.ask("trajectory", mesh=mesh, request={"steps": 4}, **options)
    assert all(torch.equal(latents, answers[0][0]) for latents, _, _ in answers)
    assert parallel_checks.relative(answers[0][0], alone[0]) < 1e-3
    assert int((answers[0][1].int() - alone[1].int()).abs().max()) <= 2


def test_parallel_steps_in_fp32_are_near_those_of_one_gpu(ranks):
    options = {"precision": "fp32", "vae_precision": "fp32", "attention": "sdpa", "device": "cuda"}
    request = {"steps": 10, "solver": "euler", "width": 48, "height": 48, "frames": 5}
    alone = parallel_checks.trajectory(None, request=request, **options)
    answers = ranks.ask("trajectory", mesh="time2", request=request, **options)
    assert all(torch.equal(latents, answers[0][0]) for latents, _, _ in answers)
    assert 1e-4 < parallel_checks.relative(answers[0][0], alone[0]) < 1


@pytest.mark.parametrize("mesh", SEQUENCES)
@pytest.mark.parametrize("backend", BACKENDS_HERE)
@pytest.mark.parametrize(("heads", "tokens"), [(4, 4096), (5, 3001)])
def test_attention_is_as_exact_as_the_backend_inside(ranks, mesh, backend, heads, tokens):
    if reason := why_not(backend):
        pytest.skip(reason)
    shape = {"backend": backend, "heads": heads, "tokens": tokens}
    for whole, sharded in ranks.ask("gpu_attention", mesh=mesh, **shape):
        assert sharded < 1.3 * whole + 1e-3, f"{shape}: relative errors, {whole=:.3g} {sharded=:.3g}"


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """400 MB of tensors of odd sizes; the bytes of those that are cut, and of those that are not."""
    path = tmp_path_factory.mktemp("odd") / "odd.safetensors"
    values = parallel_loading.write_odd(path, times=20, copies=10).values()
    sizes = [value.numel() * value.element_size() for value in values]
    yield str(path), sum(n for n in sizes if n > SMALL), sum(n for n in sizes if n <= SMALL)
    path.unlink()


@pytest.mark.parametrize("mesh", [f"1x1x{n}" for n in (4, 2, 3, 2) if n <= GPUS])  # worlds that grow and shrink
@pytest.mark.parametrize("limits", [{}, {"ahead": 1}, {"ahead": 50_000_000, "piece": 1_000_003}], ids=repr)
def test_ranks_read_a_part_each_by_threads_and_have_what_one_reads(ranks, odd, mesh, limits):
    path, cut, uncut = odd
    answers = ranks.ask("staged_weights", mesh=mesh, path=path, device="cuda", **limits)
    assert [(changed, unread) for changed, _, unread in answers] == [([], 0)] * len(answers)
    read = [count for _, count, _ in answers]
    assert sum(read) == cut + len(read) * uncut
    assert max(read) - min(read) <= 40 * 16 * len(read)


def test_a_model_that_ranks_read_by_threads_is_that_of_one(ranks):
    assert ranks.ask("staged_model", mesh="1x1x2", device="cuda") == [[], []]


@pytest.mark.parametrize("mesh", SEQUENCES)
@pytest.mark.parametrize(
    ("precision", "attention", "compile"),
    [
        ("bf16", "flash4", "off"),
        ("fp8", "cudnn-fp8", "off"),
        ("fp8", "flash4", "blocks"),
        ("fp8", "cudnn-fp8", "blocks"),
    ],
)
def test_a_forward_is_as_exact_as_on_one_gpu(ranks, mesh, precision, attention, compile):
    if reason := why_not(attention):
        pytest.skip(reason)
    options = {"mesh": mesh, "precision": precision, "attention": attention, "compile": compile}
    for whole, sharded, _ in ranks.ask("gpu_forward", **options):
        assert sharded < 1.3 * whole + 2e-3


@pytest.mark.parametrize("mesh", [mesh for mesh in SEQUENCES if mesh in ("1x1x2", "1x2x2")])
def test_experts_in_parts(ranks, mesh):
    options = {"precision": "bf16", "attention": "sdpa", "device": "cuda", "residency": "shard"}
    answers = ranks.ask("trajectory", mesh=mesh, request={"steps": 2}, **options)
    plain = ranks.ask("trajectory", mesh=mesh, request={"steps": 2}, **{**options, "residency": "resident"})
    assert parallel_checks.relative(answers[0][0], plain[0][0]) < 1e-2


@pytest.mark.parametrize("mesh", [mesh for mesh in ("1x1x2", "1x1x4") if Mesh.parse(mesh).size <= GPUS])
@pytest.mark.parametrize(
    ("precision", "attention", "kernel", "compile"),
    [
        ("bf16", "flash4", "cudnn", "off"),
        ("bf16", "sdpa", "flex", "off"),
        ("fp8", "cudnn-fp8", "auto", "off"),
        ("fp8", "cudnn-fp8", "auto", "blocks"),
    ],
)
def test_a_sparse_forward_is_as_exact_as_on_one_gpu(ranks, mesh, precision, attention, kernel, compile):
    """4,500 tokens: 36 blocks of 128, the last of 20."""
    device = torch.device("cuda", 0)
    if reason := why_not(attention) or (kernel != "auto" and KERNELS[kernel].why_not(device, torch.bfloat16, 128)):
        pytest.skip(reason)
    options = {"precision": precision, "attention": attention, "kernel": kernel, "compile": compile}
    answers = ranks.ask("sparse_forward", mesh=mesh, device="cuda", grid=(5, 30, 30), **options)
    for whole, sharded in answers:
        assert sharded < 1.4 * whole + 1e-2
