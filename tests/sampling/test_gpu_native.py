"""On an NVIDIA GPU: attention of ComfyUI's own Wan models by the kernels that run here, dense, sparse and by frames."""

from __future__ import annotations

import pytest
import torch

from tests.sampling.test_native import original
from wan_core.config import SparseOptions
from wan_core.ops.attention.registry import BACKENDS
from wan_core.ops.attention.sdpa import math_reference
from wan_core.ops.attention.sparse.kernels import KERNELS
from wan_core.ops.cards import capability, card_of
from wan_core.sampling.native.attention import NativeAttention
from wan_core.sampling.native.run import FORWARD, NativeForward, NativeRun
from wan_core.sampling.schedules import SchedulePart

pytestmark = pytest.mark.gpu
CUDA, GRID, HEADS, DIM = torch.device("cuda", 0), (3, 33, 48), 2, 128
TOKENS, FRAME = 3 * 33 * 48, 33 * 48


def qkv(length: int, keys: int) -> list[torch.Tensor]:
    """[B, L, H * D]."""
    torch.manual_seed(0)
    return [torch.randn(2, n, HEADS * DIM, device=CUDA, dtype=torch.bfloat16) for n in (length, keys, keys)]


def attended(
    attend: NativeAttention,
    tensors: list[torch.Tensor],
    sparsity: float,
    sparse: SparseOptions | None = None,
    grid: tuple[int, int, int] = GRID,
    **place: int | bool,
) -> torch.Tensor:
    run = NativeRun(SchedulePart(0, 1, 1), (sparsity,) if sparsity else (), sparse=sparse)
    forward = NativeForward(run, grid, **place)  # type: ignore[arg-type]
    out = attend(original, *tensors, heads=HEADS, transformer_options={FORWARD: forward, "block_index": 0})
    assert sum(run.taken.values()) == 1 and not run.left
    return out.float()


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


EXACT = NativeAttention("sdpa")


@pytest.mark.parametrize("name", [name for name in BACKENDS if not name.startswith("math")])
def test_dense(name: str) -> None:
    if (reason := BACKENDS[name].why_not(CUDA, torch.bfloat16, DIM)) is not None:
        pytest.skip(reason)
    grid, tokens = (4, 33, 48), 4 * FRAME  # enough for kernels that round
    tensors = qkv(tokens, tokens)
    lost = relative(attended(NativeAttention(name), tensors, 0, grid=grid), attended(EXACT, tensors, 0, grid=grid))
    assert lost < 0.1 and (lost > 0.005) == (not BACKENDS[name].exact)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_text(dtype: torch.dtype) -> None:
    """By torch's choice, which is cuDNN where the card prefers it."""
    run, tensors = NativeRun(SchedulePart(0, 1, 1)), [x.to(dtype) for x in qkv(TOKENS, 512)]
    forward = NativeForward(run, GRID, text=512)
    out = NativeAttention("auto")(original, *tensors, heads=HEADS, transformer_options={FORWARD: forward})
    if "cudnn" not in card_of(capability(CUDA)).attention:
        assert (out == 7).all() and run.left
        return
    assert run.words() == "self-attention calls: none; cross-attention calls: 1 by sdpa"
    q, k, v = (x.unflatten(-1, (HEADS, DIM)) for x in tensors)
    assert relative(out.float(), math_reference(q, k, v).flatten(2).float()) < 0.01


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("front", "behind"), [(0, 0), (77, 0), (100, 300)])
def test_sparse_with_other_tokens(kernel: str, front: int, behind: int) -> None:
    dense = "cudnn-fp8" if KERNELS[kernel].fp8 else "sdpa"
    for table, name in ((KERNELS, kernel), (BACKENDS, dense)):
        if (reason := table[name].why_not(CUDA, torch.bfloat16, DIM)) is not None:
            pytest.skip(reason)
    tensors = qkv(TOKENS + front + behind, TOKENS + front + behind)
    options = SparseOptions(sparsity=1e-6, ramp=0, kernel=kernel)
    output = attended(NativeAttention(dense), tensors, 1e-6, options, front=front)
    assert relative(output, attended(EXACT, tensors, 0)) < (0.1 if KERNELS[kernel].fp8 else 0.01)


def lost_by_frames(sparsity: float, slope: bool = False) -> list[float]:
    """Attention of Animate-2: the first frame to the video, the second to a pose frame as well; each one's error."""
    options = SparseOptions(sparsity=sparsity, ramp=0, slope=slope)
    run = NativeRun(SchedulePart(0, 1, 1), (sparsity,), sparse=options)
    forward = NativeForward(run, GRID, by_frames=True)
    attend = NativeAttention("auto")
    q, k, v = qkv(TOKENS, TOKENS + FRAME)
    lost = []
    for index, keys in ((0, TOKENS), (1, TOKENS + FRAME)):
        tensors = q[:, index * FRAME : (index + 1) * FRAME], k[:, :keys], v[:, :keys]
        output = attend(original, *tensors, heads=HEADS, transformer_options={FORWARD: forward, "block_index": 0})
        lost.append(float(relative(output.float(), attended(EXACT, list(tensors), 0))))
    assert list(run.taken.values()) == [2]
    return lost


def test_sparse_by_frames() -> None:
    assert max(lost_by_frames(1e-6)) < 0.01
    plain, sloped = lost_by_frames(0.5), lost_by_frames(0.5, slope=True)
    assert max(plain) < 0.9 and all(less < 0.95 * lost for less, lost in zip(sloped, plain, strict=True))
