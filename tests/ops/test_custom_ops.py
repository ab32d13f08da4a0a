"""Custom operators: one call to a compiler, none that imports one, and no gradient that is lost silently."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from wan_core.ops.custom_ops import operator


@operator("test_scale_in_place", mutates_args=("x",))
def scale_in_place(x: Tensor, factor: float, name: str) -> None:
    x.mul_(factor if name == "times" else 1 / factor)


def split_shapes(x: Tensor, dtype: torch.dtype, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    return torch.empty_strided(x.shape, (1, x.shape[0]), dtype=dtype), x.new_empty(1)


@operator("test_split", split_shapes)
def split(x: Tensor, dtype: torch.dtype, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    assert not isinstance(x, torch._subclasses.FakeTensor), "a compiler looked inside"
    y = x if bias is None else x + bias
    return y.to(dtype).t().contiguous().t(), y.sum().reshape(1)


def chain(x: Tensor, bias: Tensor) -> Tensor:
    y = x * 2
    scale_in_place(y, 3.0, "times")
    whole, total = split(y, torch.float64, bias)
    part, _ = split(y, torch.float64, None)
    return torch.relu(whole + part).float() / total.abs()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_as_they_run(backend: str) -> None:
    torch._dynamo.reset()
    x, bias = torch.randn(5, 7), torch.randn(7)
    with torch.no_grad():
        output = torch.compile(chain, fullgraph=True, dynamic=True, backend=backend)(x, bias)
        assert torch.equal(output, chain(x, bias))


@pytest.mark.parametrize("operation", [scale_in_place, split])
def test_what_they_say_of_their_results_is_so(operation: object) -> None:
    """Schema, aliases, shapes and strides, by torch's own check."""
    arguments = (
        (torch.randn(5, 7), 3.0, "times") if operation is scale_in_place else (torch.randn(5, 7), torch.half, None)
    )
    torch.library.opcheck(operation, arguments)  # pyright: ignore[reportArgumentType]


def test_neither_the_table_of_attention_nor_the_first_call_imports_a_library_or_a_compiler() -> None:
    code = """
import sys, torch
from wan_core.ops.attention import registry
libraries = {"flash_attn", "flash_attn_interface", "sageattention", "cudnn", "transformer_engine", "triton",
    "comfy_kitchen"}
assert not libraries & {name.partition(".")[0] for name in sys.modules}
from wan_core.ops.kernels import gguf_blocks
from wan_core.ops.attention.sparse import forward
gguf_blocks.unpack(torch.zeros(2, 34, dtype=torch.uint8), "Q8_0", torch.float32)
print([name for name in ("torch._dynamo", "torch._inductor", "sympy") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr[-2000:]


@pytest.mark.parametrize("which", ["x", "bias"])
def test_gradients_are_refused(which: str) -> None:
    arguments = {"x": torch.randn(5, 7), "bias": torch.randn(7)}
    arguments[which].requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"test_split has no backward pass.*sdpa"):
        split(arguments["x"], torch.float64, arguments["bias"])
    with pytest.raises(RuntimeError, match="test_split has no backward pass"):
        split(arguments["x"], torch.float64, bias=arguments["bias"])
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            split(arguments["x"], torch.float64, arguments["bias"])
    split(arguments["x"].detach(), torch.float64, arguments["bias"].detach())


def test_gradients_are_refused_where_a_tensor_is_changed_in_place() -> None:
    x = torch.randn(5, 7, requires_grad=True) * 1
    with pytest.raises(RuntimeError, match="test_scale_in_place has no backward pass"):
        scale_in_place(x, 3.0, "times")
