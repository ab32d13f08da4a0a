"""The tables of the ladder: every result that `python -m benchmarks ladder` wrote, and which jobs have none yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.ladder_jobs import JOBS, Job

Result = Mapping[str, Any]


def ladder_tables(newest: Callable[[str], Result | None], table: Callable[[Result], str]) -> str:
    """newest: the result of a job, None where there is none. One heading for the jobs that fill one table."""
    results = {job.name: newest(job.name) for job in JOBS}
    lines: list[str] = []
    for heading in dict.fromkeys(job.table for job in JOBS):
        measured = [result for job in JOBS if job.table == heading and (result := results[job.name])]
        if measured:
            lines += [f"**{heading[0].upper()}{heading[1:]}**", ""]
        for result in measured:
            lines += [table(result), ""] if result["rows"] else [f"{result['job']}: {result['job_seconds']} s", ""]
    missing = [job for job in JOBS if results[job.name] is None]
    return "\n".join([*lines, *left_lines(missing)])


def left_lines(jobs: Sequence[Job]) -> list[str]:
    """What is still to be measured, a row for each table and number of GPUs."""
    if not jobs:
        return []
    lines = ["Not measured yet:", "", "| table | GPUs | jobs | estimated s |", "|---|---:|---|---:|"]
    for heading, gpus in dict.fromkeys((job.table, job.gpus) for job in jobs):
        group = [job for job in jobs if (job.table, job.gpus) == (heading, gpus)]
        names = ", ".join(f"`{job.name}`" for job in group)
        lines.append(f"| {heading} | {gpus} | {names} | {sum(job.seconds for job in group)} |")
    return [*lines, ""]
