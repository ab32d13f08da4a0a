"""Answers of actors, with Ray's faults as ours."""

from __future__ import annotations

from typing import Any

from wan_core.cluster.connect import import_ray
from wan_core.config import OptionError
from wan_core.workers.launcher import WorkerError


def ask(answers: Any, who: str) -> Any:
    """What actors of `who` answer. Raises WorkerError where a process or node is gone, OptionError where no actor can
    run, and what an actor raised that is a fault of ours."""
    ray = import_ray()
    faults = ray.exceptions
    try:
        return ray.get(answers)
    except faults.RayTaskError:
        raise
    except faults.RayError as fault:
        never_ran = (faults.RuntimeEnvSetupError, faults.ActorUnschedulableError)
        if isinstance(fault, never_ran) or getattr(fault, "actor_init_failed", False):
            raise OptionError(f"{who} cannot run WanCore: {cause_of(fault)}") from fault
        raise WorkerError(f"{who} is gone: {cause_of(fault)}") from fault


def cause_of(fault: BaseException) -> str:
    """The line of Ray's message that says why: the last of a traceback, else the one that begins so."""
    lines = [line.strip() for line in str(fault).splitlines() if line.strip()] or [type(fault).__name__]
    if any(line.startswith(("Traceback", "File ")) for line in lines):
        return lines[-1]
    return next((line for line in lines if line.startswith("The actor died because")), lines[0])
