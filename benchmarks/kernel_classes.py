"""Which class of work a device kernel belongs to, by its name.

Names are those of this project's Triton kernels, cuDNN, cuBLAS (nvjet, xmma), CUTLASS, flash-attn-4, Transformer
Engine, Inductor and torch itself; on a CPU, of torch's operators. The first pattern found in a name decides, so what is
special stands before what is general.

A fused kernel counts once, under the class that names it: `norm` has the residual before it and the quantisation after
it in it, `rope` the norm of queries and keys. `gelu, quantise` is one kernel that does either or both.
"""

from __future__ import annotations

import re

PATTERNS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (kind, re.compile(pattern, re.IGNORECASE))
    for kind, pattern in (
        ("norm", r"^_residual_norm_kernel"),
        ("rope", r"^_head_norm_kernel"),
        ("gelu, quantise", r"^_activate_kernel"),
        ("quantise", r"^_scale_kernel"),
        ("copy", r"^mem(cpy|set)|CatArrayBatchedCopy|transpose_kernel"),
        ("attention", r"sdpa|fmha|flash_?(fwd|fprop|attention|attn)|scaled_dot_product|qk_int8"),  # before products
        # FP8 products name their type; in cuBLAS's nvjet the letters stand for types, q for E4M3, s for float32
        ("gemm fp8", r"nvjet_(sm\d+_)?q|(gemm|device_kernel).*e4m3|_scaled_mm"),
        ("quantise", r"transformer_engine|quantiz|amax|absmax|float8|e4m3"),
        ("gemm fp32", r"sgemm|gemm_f32f32|nvjet_(sm\d+_)?s(?!m\d)|gemv\w*<.*\bfloat\b"),
        ("gemm bf16", r"nvjet|gemm|cutlass|splitk"),
        ("gemm", r"^aten::(linear|addmm|mm|bmm|baddbmm|matmul)$"),
        ("norm", r"layer_?norm|rms_?norm"),
        ("gelu", r"gelu"),
        ("rope", r"complex|view_as_real"),
        ("copy", r"copy|^aten::(clone|contiguous|cat|to|type_as)$"),
        ("residual", r"addcmul|add|mul"),
    )
)
CLASSES = (*dict.fromkeys(kind for kind, _ in PATTERNS), "other")


def kernel_class(name: str) -> str:
    """One of `CLASSES`."""
    return next((kind for kind, pattern in PATTERNS if pattern.search(name)), "other")
