"""Golden recordings: what the product does today, recorded, so that a rebuilt one can be compared with it.

    .venv/bin/python -m tools.golden record OUT              # about ten minutes; OUT/golden.json.gz
    .venv/bin/python -m tools.golden compare OLD [NEW]       # without NEW it records this checkout first
    .venv/bin/python -m tools.golden doors OUT               # where the doors of a recording disagree

`--only PATTERN` takes the cases whose name matches (`videos/*`, `doors/*/sampler`), in each of the three. ComfyUI is
named by COMFYUI_PATH and COMFYUI_PYTHON; cases that need it are left out with a note where COMFYUI_PATH is not set.

| group | what is recorded |
|---|---|
| videos | `generate` and its like on miniatures of every family: latents, decoded frames, report, all that is written |
| ranks | the same on two ranks on the CPU |
| nodes | the same through ComfyUI's API: parts of schedules, batches, prompt schedules, native models |
| workflows | every workflow in API form: ComfyUI's validation, and its pictures on miniatures |
| schemas | what ComfyUI's `/object_info` says of each node |
| doors | plans and refusals of option sets through `plan`, `generate`, the nodes |
| help | `--help` of every command |
| messages | exit code and text of bad inputs, `inspect` and `doctor` |

The tool knows the command line, node ids and files alone, and no module of the product, so it runs before and after a
rebuild. Numbers depend on torch and the CPU: compare recordings of one machine. A recording keeps sums and a few
numbers of each array, no array.
"""
