"""Measurements: forwards of the transformer and whole generations, ours and peers' on the same weights in the same run.

    python -m wan_core bench --size 832x480 --setting forward --setting diffusers
    python -m wan_core bench --suite guidance

Results are JSON, in the form that tools/readme_tables.py reads: {"suite", "command", "commit", "device", "versions",
"rows"}. In a row, `seconds` is the median of the runs, `spread` their range, `peak_gib` device memory with weights,
`ratio` the seconds of the row `ratio_to` over ours, `error` the relative difference from that row's output.
"""
