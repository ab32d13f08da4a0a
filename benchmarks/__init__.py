"""Measurements: forwards, trajectories and whole generations, ours and peers' on the same weights in the same run.

    python -m benchmarks single --out benchmarks/results
    python -m benchmarks single --size 1280x720x81 --setup diffusers-compiled --setup fp8 --layers 4
    python -m benchmarks compare --checkout ../other --setup fp8/cudnn-fp8 --layers 8
    python -m benchmarks --size 832x480 --setting forward --setting diffusers-compiled

| suite | module | |
|---|---|---|
| single | `single` | the ladder: one forward of each peer and each setup (`setups`) |
| trajectory | `trajectory` | what a setup does to finished latents, and to captions |
| switch | `switch` | steps on both sides of the change of experts |
| caches | `caches` | steps that a cache skips, and whether a plan's estimate comes true |
| sparse | `sparse` | sparse attention by its parts, and whole videos with it |
| startup | `startup` | loading both experts; a cold process up to its first step; prompts after it |
| attention | `attention` | every dense attention kernel on one layer; `--setting tune`: tiles of our own |
| streaming | `streaming` | blocks that stream on emulated smaller cards |
| profile | `profiling` | one forward by class of kernel |
| parallel | `parallel` | several GPUs |
| forward, guidance | `forwards` | one forward, or both branches of guidance, in named settings (`settings`) |
| four-step | `four_step` | videos of four steps with a LoRA, and what a LoRA costs |
| gguf | `gguf` | a transformer from GGUF files: loading, forwards, memory |
| compare | `compare` | steps of this checkout and of another one, in turns |
| generate | `generation` | one whole video by phase |

The docstring of a module says what its columns mean. Results are JSON, written anew after every row, in the form that
tools/readme_tables.py reads: {"suite", "command", "commit", "device", "versions", "rows"}, and what else a suite knows
of its run. In a row, `seconds` is the median of the runs, `spread` their range, `peak_gib` device memory with weights,
`ratio` the seconds of the row `ratio_to` over ours, `error` the relative difference from a reference's output. A row
that could not be measured has `why_not` (what is missing here) or `failed` (what went wrong) in place of numbers; with
the latter, the command's status is 1.

Everything runs on a CPU as well, on the embedded model at a small size: to test the measuring, not to measure.
"""
