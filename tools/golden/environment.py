"""What the processes of a recording have in their environment."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),  # sums depend on threads
    **dict.fromkeys(("TORCHINDUCTOR_COMPILE_THREADS",), "1"),
    "COLUMNS": "120",  # argparse wraps its help to this width
    "WANCORE_ALLOW_CPU_WORKERS": "1",
    # The compiled code is compared, not timed: the C++ compiler need not optimise.
    "TORCHINDUCTOR_VEC_ISA_OK": "0", "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
    "AOT_INDUCTOR_DEBUG_COMPILE": "1",
}  # fmt: skip


def prepare() -> None:
    os.environ.update(ENVIRONMENT | {"PYTHONPATH": str(ROOT)})
