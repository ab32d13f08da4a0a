"""On an NVIDIA GPU: our own attention kernel in bf16 with every tile that fits, against the formula, dense and sparse.

`test_gpu_attention.py` and `test_gpu_sparse.py` test it as one of the backends.
"""

from __future__ import annotations

import pytest
import torch

from tests.sparse_attention import int8_reference
from tests.tensors import relative
from wan_core.ops.attention.fp8 import key_mean
from wan_core.ops.attention.registry import BACKENDS
from wan_core.ops.attention.sdpa import math_lse
from wan_core.ops.cards import capability
from wan_core.ops.kernels.attention_tiles import candidates, tile_for

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def runs():
    if (reason := BACKENDS["triton"].why_not(CUDA, torch.bfloat16, 128)) is not None:
        pytest.skip(reason)


def qkv(queries: int, keys: int, dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Views of one tensor, as they come out of a fused projection."""
    one = torch.randn(2, max(queries, keys), 3, 3, dim, device=CUDA, generator=torch.Generator(CUDA).manual_seed(0))
    one[:, :, 1] += 1
    return [one.to(dtype)[:, :length, i] for i, length in enumerate((queries, keys, keys))]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("queries", "keys", "dim"), [(333, 201, 128), (1000, 1024, 64), (1, 77, 32), (128, 1, 128)])
def test_dense(queries, keys, dim, dtype):
    from wan_core.ops.kernels.triton_attention import attention

    q, k, v = qkv(queries, keys, dim, dtype)
    out, lse = math_lse(q.float(), k.float(), v.float())
    output = attention(q, k, v)
    assert relative(output[0], out) < 0.005 and (output[1] - lse).abs().max() < 0.005
    expected = int8_reference(q, k, v)
    output = attention(q, k, v, centre=key_mean(k))
    assert relative(output[0], expected[0]) < 0.006 and (output[1] - expected[1]).abs().max() < 0.006


@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_every_tile_that_fits_gives_the_same(kind):
    """What `benchmarks attention --setting tune` may choose. One that takes more registers than there are is named."""
    from triton.errors import TritonError

    from wan_core.ops.kernels.triton_attention import attention

    q, k, v = qkv(700, 650, 128, torch.bfloat16)
    centre = key_mean(k) if kind == "int8" else None
    expected = attention(q, k, v, centre=centre)
    refused = []
    for tile in candidates(capability(CUDA), 128, kind):
        try:
            output = attention(q, k, v, centre=centre, tile=tile)
        except TritonError:
            refused.append(tile)
            continue
        assert relative(output[0], expected[0]) < 0.005 and (output[1] - expected[1]).abs().max() < 1e-3, tile
    assert tile_for(capability(CUDA), kind) not in refused


def test_long_sequences_are_addressed_beyond_two_to_the_31():
    """Views of a fused projection of 150,000 tokens: the last ones are 2.3e9 numbers from the first."""
    from wan_core.ops.kernels.triton_attention import attention

    tokens, wide = 150_000, 15_360
    if torch.cuda.mem_get_info(CUDA)[0] < 12 << 30:
        pytest.skip("takes 12 GiB")
    one = torch.zeros(1, tokens, wide, dtype=torch.bfloat16, device=CUDA)
    one[:, -300:] = torch.randn(1, 300, wide, device=CUDA).bfloat16()
    q, k, v = (x.unflatten(-1, (40, 128))[:, :, :1] for x in one.chunk(3, -1))
    out = attention(q[:, -100:], k, v)[0]
    expected = math_lse(q[:, -100:].float(), k.float(), v.float())[0]
    assert relative(out, expected) < 0.01
