"""Measurements: forwards, trajectories and whole generations, ours and peers' on the same weights in the same run.

    python -m benchmarks single --out benchmarks/results
    python -m benchmarks single --size 1280x720x81 --setup diffusers-compiled --setup fp8 --layers 4

`python -m benchmarks --help` lists the suites, and those whose code is at commit 2cb3e794: they
answered their question, and their results are committed. A suite is the module of its name (`templates`: `official`).
The docstring of a module says what its columns mean. Results are JSON, written anew after every row, in the form that
tools/readme_tables.py reads: {"suite", "command", "commit", "device", "versions", "rows"}, and what else a suite knows
of its run. In a row, `seconds` is the median of the runs, `spread` their range, `peak_gib` device memory with weights,
`ratio` the seconds of the row `ratio_to` over ours, `error` the relative difference from a reference's output. A row
that could not be measured has `why_not` (what is missing here) or `failed` (what went wrong) in place of numbers; with
the latter, the command's status is 1.

Everything runs on a CPU as well, on the embedded model at a small size: to test the measuring, not to measure.
"""
