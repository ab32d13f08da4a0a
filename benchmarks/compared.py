"""The program that suite `compare` runs in each checkout: load a model once, then time steps whenever it is asked to.

It is given to Python as text (`python -c`), with the checkout as working folder, so that `wan_core` is the checkout's.
It uses only what every layout of the engine has: `Pipeline.load`, `prepare`, `encode`, `sample`, LoadOptions, Request.

argv[1]   JSON: the arguments of LoadOptions
stdin     a JSON object a line: the arguments of Request
stdout    a JSON object a line: {"ready": device} after loading; then for each request {"seconds": of every step but the
          first, "peak": bytes of device memory, "digest": of the latents}; {"failed": reason} in place of either
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from itertools import pairwise
from typing import Any

# What third-party kernels raise on a machine that they do not support; OptionError and its like are ValueErrors.
FAULTS = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, AssertionError, ImportError, OSError)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print to stdout is no answer

    def answer(what: dict[str, Any]) -> None:
        print(json.dumps(what), file=answers, flush=True)

    try:
        pipe = load(json.loads(sys.argv[1]))
    except FAULTS as fault:
        answer({"failed": words(fault)})
        return
    answer({"ready": str(pipe.models.device)})
    for line in sys.stdin:
        try:
            found = timed(pipe, json.loads(line))
        except FAULTS as fault:
            found = {"failed": words(fault)}
        answer(found)


def load(options: dict[str, Any]) -> Any:
    from wan_core import LoadOptions, Pipeline

    return Pipeline.load(LoadOptions(**options))


def timed(pipe: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Denoise once. The first step prepares the prompt and is not counted."""
    import torch

    from wan_core import Request

    device = pipe.models.device
    cuda, marks = device.type == "cuda", list[float]()

    def on_step(*_: Any) -> None:
        if cuda:
            torch.cuda.synchronize(device)
        marks.append(time.perf_counter())

    job = pipe.prepare(Request(**request))
    conditioning = pipe.encode(job)
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    latents = pipe.sample(job, conditioning, on_step)
    return {
        "seconds": [after - before for before, after in pairwise(marks)],
        "peak": torch.cuda.max_memory_allocated(device) if cuda else 0,
        "digest": hashlib.sha256(latents.float().cpu().numpy().tobytes()).hexdigest(),
    }


def words(fault: Exception) -> str:
    return f"{type(fault).__name__}: {str(fault).strip().partition(chr(10))[0][:300]}"


if __name__ == "__main__":
    main()
