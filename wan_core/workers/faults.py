"""What went wrong in a rank: its kind, and how the launcher is told."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
import traceback
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from wan_core.config import UserError

EXIT_FAILED, EXIT_ORPHANED = 1, 3  # exit codes of a rank; orphaned: the program or the rendezvous store is gone
_OUT_OF_MEMORY = ("can't allocate memory", "cannot allocate memory", "bad_alloc", "can't start new thread")
_PEER = ("gloo", "NCCL", "Connection closed", "Connection reset", "Broken pipe", "timed out", "Timed out")


class Interrupted(Exception):
    """The user stopped the request. Raised on all ranks in the same step."""


def kind_of(fault: BaseException) -> str:
    """user (a refused option or file), memory, disk, peer (another rank is gone or late), or fault (anything else)."""
    text = str(fault)
    if isinstance(fault, UserError):
        return "user"
    if isinstance(fault, (MemoryError, torch.OutOfMemoryError)) or "out of memory" in text.lower():
        return "memory"
    if any(words in text.lower() for words in _OUT_OF_MEMORY):
        return "memory"
    if isinstance(fault, OSError) and fault.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
        return "disk"
    if isinstance(fault, dist.DistError) or (isinstance(fault, RuntimeError) and any(words in text for words in _PEER)):
        return "peer"
    return "fault"


def describe_fault(fault: BaseException, identity: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A fault as `explain.describe_failure` expects it. identity: rank, host, pid and, if known, device of the rank."""
    text = str(fault) or type(fault).__name__
    return {
        **identity,
        "where": where,
        "reason": kind_of(fault),
        "type": type(fault).__name__,
        "text": f"{_device_memory()}{text}" if isinstance(fault, torch.OutOfMemoryError) else text,
    }


def _device_memory() -> str:
    """Who holds this rank's device: on a GPU it may be another program."""
    if not torch.cuda.is_initialized():
        return ""
    try:
        free, total = torch.cuda.mem_get_info()
    except RuntimeError:  # the device is lost: the fault itself says why
        return ""
    mine, gib = torch.cuda.memory_reserved(), 2**30
    others = max(0, total - free - mine)
    return f"of {total / gib:.1f} GiB it held {mine / gib:.1f}, CUDA and other programs {others / gib:.1f}: "


def write_error_file(failure: Mapping[str, Any]) -> None:
    """Write a failure to the file that torch's elastic launcher reads when this process ends; see
    `supervisor._failure`."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        extra = {"timestamp": str(int(time.time())), "py_callstack": traceback.format_exc()}
        with contextlib.suppress(OSError), open(path, "w") as file:
            json.dump({"message": {"message": failure["text"], "extraInfo": extra, "wancore": failure}}, file)
