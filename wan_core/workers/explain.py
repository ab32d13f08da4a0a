"""Where ranks are and why they ended, in words for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def name_of(status: Mapping[str, Any]) -> str:
    device = f", {status['device']}" if "device" in status else ""
    return f"rank {status['rank']} on {status['host']} (process {status['pid']}{device})"


def place(status: Mapping[str, Any]) -> str:
    return f"{status['phase']}, step {status['step']} of {status['of']}" if status["of"] else status["phase"]


def places(statuses: Sequence[Mapping[str, Any]]) -> str:
    """`rank 0: denoise, step 3 of 20; rank 1: ...`."""
    return "; ".join(f"rank {status['rank']}: {place(status)}" for status in statuses)


REASONS = {
    "memory": "ran out of memory",
    "disk": "could not write, because the disk is full or a file may not grow",
    "peer": "lost the other ranks, or waited too long for them",
    "fault": "failed",
    "user": "was refused",
}


def words_of(said: Mapping[str, Any]) -> str:
    """One sentence of what a rank said last."""
    advice = {
        "memory": ". A smaller size, fewer frames, residency swap or more GPUs need less on each",
        "peer": ". Look at the other ranks: is one gone, slow or cut off?",
    }
    text = " ".join(str(said["text"]).split())[:600]
    name = said["type"] if said["reason"] == "fault" else "it said"
    words = f"{name_of(said)} {REASONS[said['reason']]} in {said['where']}; {name}: {text}"
    return words + advice.get(said["reason"], "")


def explain(report: dict[str, Any] | None, statuses: Sequence[Mapping[str, Any]], exit_code: int | None) -> str:
    """Why the ranks ended, from what the supervisor reported (None: it did not get to it)."""
    if report is None:
        how = f"ended with {exit_code}" if exit_code is not None else "does not answer"
        return f"the supervisor of the ranks {how} and said nothing; {places(statuses)}"
    if "error" in report:
        return report["error"]
    failures = report.get("failures", [])
    if not failures:
        return "rank 0 left without a reason"
    known = {status["rank"]: status for status in statuses}

    def words(failure: Mapping[str, Any]) -> str:
        if failure["said"] is not None:
            return words_of(failure["said"])
        status = known.get(failure["rank"])
        name = name_of(status) if status else f"rank {failure['rank']} (process {failure['pid']})"
        where = f" in {place(status)}" if status else ""
        if failure["signal"]:
            why = ": something outside ended it, often the system because memory ran out"
            killed = f"{name} was ended by signal {-failure['exit']} ({failure['signal']}){where}"
            return killed + why * (failure["signal"] == "SIGKILL") + last_lines(failure["tail"])
        return f"{name} ended with code {failure['exit']}{where}{last_lines(failure['tail'])}"

    # The others fail because one did, or the launcher ends them then: what they say about it comes last.
    causes = [failure for failure in failures if not _follows(failure)] or failures
    return "; ".join(words(failure) for failure in causes)


def _follows(failure: Mapping[str, Any]) -> bool:
    """Whether a rank failed because another did."""
    said = failure["said"]
    return failure["signal"] == "SIGTERM" if said is None else said["reason"] == "peer"


def last_lines(tail: str) -> str:
    lines = [line for line in tail.splitlines() if line.strip()]
    return f"; its last words: {' | '.join(lines[-3:])[:500]}" if lines else ""


def tail_of(folder: str) -> str:
    """The end of what was logged, for a failure that nobody explained."""
    logs = [*sorted(Path(folder).glob("**/stderr.log")), Path(folder) / "supervisor.log"]
    texts = [log.read_text(errors="replace").strip() for log in logs if log.is_file()]
    return last_lines(next((text for text in texts if text), ""))
