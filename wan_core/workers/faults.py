"""What goes wrong in a rank: its kind, how the launcher is told, and the sentences that users read."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from wan_core.config import UserError

EXIT_FAILED, EXIT_ORPHANED = 1, 3  # exit codes of a rank; orphaned: the program or the rendezvous store is gone
_OUT_OF_MEMORY = ("can't allocate memory", "cannot allocate memory", "bad_alloc", "can't start new thread")
_PEER = ("gloo", "NCCL", "Connection closed", "Connection reset", "Broken pipe", "timed out", "Timed out")
REASONS = {
    "memory": "ran out of memory",
    "disk": "could not write, because the disk is full or a file size limit was reached",
    "peer": "lost the connection to the other ranks, or waited too long for them",
    "fault": "failed",
    "user": "refused the request",
}
ADVICE = {
    "memory": ". A smaller size, fewer frames, residency swap or more GPUs need less on each",
    "peer": ". Look at the other ranks: has one ended, is one slow, or is the network down?",
}
SIGNALS = {
    "SIGKILL": ": another process ended it, often the system because memory ran out",
    "SIGBUS": ": usually a file that it was reading became shorter, or its disk failed",
}


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
    """A fault as `describe_failure` expects it. identity: rank, host, pid and, if known, device of the rank."""
    name = type(fault).__name__
    return {**identity, "where": where, "reason": kind_of(fault), "type": name, "text": str(fault) or name}


def write_error_file(failure: Mapping[str, Any]) -> None:
    """Write a failure to the file that torch's launcher reads when this process ends; see `supervisor._failure`."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        extra = {"timestamp": str(int(time.time())), "py_callstack": traceback.format_exc()}
        with contextlib.suppress(OSError), open(path, "w") as file:
            json.dump({"message": {"message": failure["text"], "extraInfo": extra, "wancore": failure}}, file)


# ----------------------------------------------------------------------------------------------------------- for users


def rank_name(status: Mapping[str, Any]) -> str:
    device = f", {status['device']}" if "device" in status else ""
    return f"rank {status['rank']} on {status['host']} (process {status['pid']}{device})"


def place(status: Mapping[str, Any]) -> str:
    """`denoise, step 3 of 20`."""
    return f"{status['phase']}, step {status['step']} of {status['of']}" if status["of"] else status["phase"]


def places(statuses: Sequence[Mapping[str, Any]]) -> str:
    """`rank 0: denoise, step 3 of 20; rank 1: ...`."""
    return "; ".join(f"rank {status['rank']}: {place(status)}" for status in statuses)


def describe_failure(failure: Mapping[str, Any]) -> str:
    """One sentence about a failure that a rank reported (`describe_fault`)."""
    text = " ".join(str(failure["text"]).split())[:600]
    kind = f"{failure['type']}: " if failure["reason"] == "fault" else ""
    sentence = f"{rank_name(failure)} {REASONS[failure['reason']]} in {failure['where']}: {kind}{text}"
    return sentence + ADVICE.get(failure["reason"], "")


def explain(report: dict[str, Any] | None, statuses: Sequence[Mapping[str, Any]], exit_code: int | None) -> str:
    """Why the ranks ended. report: of the supervisor; None if it ended without one."""
    if report is None:
        how = f"ended with code {exit_code}" if exit_code is not None else "does not answer"
        return f"the supervisor of the ranks {how} and reported nothing; {places(statuses)}"
    if "error" in report:
        return report["error"]
    failures = report.get("failures", [])
    if not failures:
        return "rank 0 ended without an error"
    known = {status["rank"]: status for status in statuses}
    found: dict[int, Mapping[str, Any]] = {}  # by rank: a rank may report the failure of another one
    for failure in failures:
        rank = failure["rank"] if failure["said"] is None else failure["said"]["rank"]
        if rank not in found or failure["said"] is not None:
            found[rank] = failure
    # Other ranks fail because one did, or are ended by the launcher: they are named only if there is no other cause.
    causes = [failure for failure in found.values() if not _follows(failure)] or list(found.values())
    return "; ".join(_describe_end(failure, known.get(failure["rank"])) for failure in causes)


def _follows(failure: Mapping[str, Any]) -> bool:
    said = failure["said"]
    return failure["signal"] == "SIGTERM" if said is None else said["reason"] == "peer"


def _describe_end(failure: Mapping[str, Any], status: Mapping[str, Any] | None) -> str:
    """One sentence about how a rank ended. status: its last one."""
    if failure["said"] is not None:
        return describe_failure(failure["said"])
    name = rank_name(status) if status else f"rank {failure['rank']} (process {failure['pid']})"
    where = f" in {place(status)}" if status else ""
    if failure["signal"]:
        name = f"{name} was ended by signal {-failure['exit']} ({failure['signal']}){where}"
        return name + SIGNALS.get(failure["signal"], "") + last_lines(failure["tail"])
    return f"{name} ended with code {failure['exit']}{where}{last_lines(failure['tail'])}"


def last_lines(log: str) -> str:
    lines = [line for line in log.splitlines() if line.strip()]
    return f"; the end of its log: {' | '.join(lines[-3:])[:500]}" if lines else ""


def end_of_logs(folder: str) -> str:
    """The end of the first log with text, for a failure without a report."""
    logs = [*sorted(Path(folder).glob("**/stderr.log")), Path(folder) / "supervisor.log"]
    texts = [log.read_text(errors="replace").strip() for log in logs if log.is_file()]
    return last_lines(next((text for text in texts if text), ""))
