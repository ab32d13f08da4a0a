"""Golden recordings: what a restructuring of the engine must keep, recorded and compared.

    python tools/golden.py record --out BEFORE --checkout ../golden_base     # the engine of another checkout
    python tools/golden.py record --out AFTER                                # the engine of this checkout
    python tools/golden.py compare BEFORE AFTER                              # exit code 1 on a difference

`--only PATTERN` records (or compares) the cases whose name matches, for example `--only "latents/*--sparse*"`.

| kind | what is recorded | compared |
|---|---|---|
| latents | `generate` in this process: latents, decoded uint8 frames | bit for bit |
| apart | `generate` in its own process: two ranks on the CPU in every mesh, compiled blocks | bit for bit |
| api | `Pipeline`, `make_plan`, `load_dit`, `load_vae`, `load_text_encoder` called from Python | bit for bit |
| files | files that commands write: quality, calibrate (JSON), quantize, decode | equal, measured times removed |
| plans | what `plan` prints | text, exactly |
| options | the options that `COMMAND --help` lists | none may disappear |
| messages | exit code and text of refused input, and of `inspect` and `check` | exit code; changed text is listed |

Changed text of messages fails the comparison only with `--strict-messages`. A traceback always fails it. Settings that
`generate` writes beside the latents count as messages too.

The script must survive the restructuring: it uses the public names of `wan_core`, `wan_core.cli.main` (the entry point
of the script `wancore`) and `python -m wan_core`, never an inner module. Input files are made here from the embedded
model's files, with seeded random numbers.

Sums depend on the number of threads, so everything runs on one thread. Times, devices and paths of temporary folders do
not enter a recording. Recordings of different torch versions or CPUs differ, so compare those of one machine.

Of the node schemas only the sha256 of the frozen file, node_schemas.json of the tests, is recorded. Whether the nodes
still agree with it is the work of test_nodes_schemas.py.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import io
import json
import logging
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import typing
import warnings
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

Case = dict[str, Any]  # "strict": must be equal; "messages": text that may change; "array": file of numbers
ROOT = Path(__file__).resolve().parents[1]
CAPTION = "a red circle moving right on a blue background"
VOLATILE = ("seconds", "ratio", "spread", "command", "commit", "device", "versions", "date")
TRACEBACK = "Traceback (most recent call last)"
ENVIRONMENT = {
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"), "1"),
    "GOMP_SPINCOUNT": "0",
    "COLUMNS": "120",  # argparse wraps its help to this width
    # The compiled code is compared, not timed: the C++ compiler need not optimise (see tests/conftest.py).
    "TORCHINDUCTOR_VEC_ISA_OK": "0",
    "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
    "AOT_INDUCTOR_DEBUG_COMPILE": "1",
}

# --------------------------------------------------------------------------------------------------- tables of settings
# Files that the settings name are made by `make_files`. A later option replaces an earlier one.

TINY = "--model tiny --size 64x48 --frames 9"
LATENTS: dict[str, list[str]] = {
    f"{TINY} --steps 4": [
        "", "--solver dpm++", "--solver euler", "--steps 1", "--steps 2 --solver dpm++", "--steps 11",
        "--steps 9 --solver dpm++", "--steps 9 --solver euler", "--shift 1", "--shift 12 --steps 6", "--boundary 0",
        "--boundary 0.5 --shift 1", "--boundary 1", "--guidance 1", "--guidance 6.5",
        "--guidance-high 4 --guidance-low 1", "--guidance-high 1 --guidance-low 5",
        "--guidance-mode sequential", "--guidance-mode batched",
        "--negative-prompt 'a green square'", "--negative-prompt ''", "--prompt ''",
        "--prompt 'a yellow triangle moving up on a white background'", "--seed 1", "--seed 18446744073709551615",
        "--frames 1", "--frames 17 --fps 12", "--size 32x80", "--size 96x96 --frames 17 --steps 3",
        "--attention math", "--attention sdpa", "--attention math-fp8", "--vae-precision bf16", "--vae-precision fp32",
        "--precision bf16", "--precision fp32", "--precision fp8", "--precision fp8-tensor", "--precision fp8-block",
        "--precision fp8-weights", "--precision fp8 --keep-blocks 1", "--precision fp8 --attention math-fp8",
        "--residency resident", "--residency swap", "--residency stream", "--residency stream --resident-blocks 0",
        "--residency stream --resident-blocks 2", "--resident-blocks 1 --guidance-mode sequential",
        "--residency stream --precision fp8", "--residency stream --precision bf16 --resident-blocks 1",
    ],
    f"{TINY} --steps 20": [
        "--magcache quality", "--magcache balanced", "--magcache fast", "--magcache 0.12/2/0.2",
        "--magcache E024K2R10", "--magcache 0.24/3/0.1 --magcache-rule published",
        "--magcache fast --magcache-order 0", "--magcache fast --magcache-order 1", "--magcache fast --solver euler",
        "--magcache fast --guidance-mode sequential", "--magcache fast --residency stream",
        "--magcache fast --precision fp8", "--taylorseer 2", "--taylorseer 2/2/0.2", "--taylorseer 3/0/0.1",
        "--taylorseer 3/2 --guidance-mode sequential", "--adaptive 0.1", "--adaptive 0.4/2/0.1",
        "--adaptive 0.3 --guidance-mode sequential", "--guidance-interval 0.3-0.9", "--guidance-every 2",
        "--guidance-every 3 --guidance-interval 0.2-1", "--magcache fast --guidance-every 2",
        "--taylorseer 2 --guidance-interval 0.5-1", "--adaptive 0.3 --guidance-every 2",
    ],
    "--model tiny --size 96x96 --frames 17 --steps 5": [
        "--sparse quality", "--sparse balanced", "--sparse fast", "--sparse 0.5/0/1:ramp0", "--sparse 0.75/0.4/0",
        "--sparse 0.75/0/0:mass0.9", "--sparse 0.75/0/0:mass0.9:floor0.2", "--sparse 0.8/0/0:reuse2",
        "--sparse balanced:mean", "--sparse balanced:alone", "--sparse balanced:even", "--sparse balanced:math",
        "--sparse balanced --magcache fast --steps 8", "--sparse balanced --guidance-every 2",
        "--sparse balanced --residency stream", "--sparse balanced --precision fp8",
    ],
    f"{TINY} --preset": [
        "4-step", "4-step-guided", "6-step", "8-step-guided", "4-step --steps 3 --shift 3", "4-step --solver unipc",
        "4-step --lora-mode attach", "4-step --residency stream", "4-step --precision fp8",
        "auto --lora 4step_high_noise.safetensors --lora 4step_low_noise.safetensors",
        "none --steps 4 --lora 4step_high_noise.safetensors:0.5 --lora 4step_low_noise.safetensors:-0.5",
    ],
    f"{TINY} --steps 3": [
        "--lora lora.safetensors", "--lora lora.safetensors:0.5", "--lora lora.safetensors:0",
        "--lora lora.safetensors:-2 --lora-mode attach", "--lora lora.safetensors --lora-mode merge",
        "--lora-high lora.safetensors", "--lora-low lora.safetensors:0.7 --lora-mode attach",
        "--lora kohya.safetensors", "--lora kohya.safetensors --lora-mode attach", "--lora loha.safetensors",
        "--lora lokr.safetensors", "--lora diff.safetensors", "--lora dora.safetensors",
        "--lora lora.safetensors:0.5 --lora kohya.safetensors:0.8",
        "--lora lora.safetensors:0.5 --lora-high kohya.safetensors --lora-mode attach",
        "--lora lora.safetensors --precision fp8", "--lora lora.safetensors --precision fp8 --lora-mode attach",
        "--lora lora.safetensors --residency stream", "--lora loha.safetensors --residency stream --lora-mode attach",
        "--lora lora.safetensors --precision bf16",
    ],
    f"{TINY} --steps 4 --image start.png": [
        "", "--last-image end.png", "--guidance-mode sequential", "--solver euler --guidance 1", "--seed 5",
        "--magcache fast --steps 10", "--sparse balanced", "--precision fp8", "--residency stream",
        "--size 96x64 --frames 5", "--image wide.png", "--boundary 0.5 --shift 3", "--taylorseer 2 --steps 8",
    ],
    "--model tiny --frames 5 --steps 2": [
        "--image wide.png", "--last-image end.png --size 64x48", "--task i2v-tiny --image start.png", "--task t2v-tiny",
    ],
    f"{TINY} --steps 3 --high": [
        "prefixed.safetensors", "sharded", "sharded/model.safetensors.index.json", "diffusers.safetensors",
        "high.pth --low low.pth",
        "bf16.safetensors", "scaled.safetensors", "scaled.safetensors --precision bf16", "quantized.safetensors",
        "quantized.safetensors --lora lora.safetensors", "q8_0.gguf", "q5_1.gguf", "q4_0.gguf --precision bf16",
        "q8_0.gguf --lora lora.safetensors", "q8_0.gguf --residency stream", "q8_0.gguf --lora-mode merge",
        "nvfp4.safetensors", "mxfp8.safetensors", "mxfp8.safetensors --lora lora.safetensors --residency stream",
    ],
    "--size 64x48 --frames 9 --steps 3": [
        "--model release --task t2v-tiny", "--model release --task t2v-tiny --magcache fast --steps 8",
        "--model release --task t2v-tiny --sparse balanced --size 96x96",
    ],
    "--high ti2v.safetensors --vae ti2v_vae.safetensors --text-encoder release/text_encoder.safetensors --frames 9": [
        "--size 64x64 --steps 3", "--size 64x96 --steps 3 --image start.png", "--size 64x64 --steps 3 --guidance 1",
        "--size 64x64 --steps 8 --magcache fast", "--size 128x96 --steps 4 --image start.png --sparse balanced",
        "--size 64x64 --steps 3 --image start.png --residency stream", "--size 64x64 --steps 3 --precision fp8",
    ],
}  # fmt: skip

TWO = f"{TINY} --steps 4 --gpus cpu,cpu"
APART: dict[str, list[str]] = {
    TWO: [
        "", "--mesh 2x1x1 --precision fp8 --magcache fast --steps 8", "--mesh 1x2x1", "--mesh 1x2bx1", "--mesh 1x1x2",
        "--mesh 1x2x1 --image start.png", "--mesh 1x1x2 --magcache fast --steps 8", "--mesh 1x2x1 --sparse balanced",
        "--mesh 1x1x2 --lora lora.safetensors --residency stream", "--mesh 1x1x2 --residency shard",
    ],
    f"{TINY} --steps 3": ["--compile blocks"],
}  # fmt: skip

# What a command writes. Name of the file or folder -> command.
FILES = {
    "quality.json": "quality --model tiny --size 64x48 --frames 5 --steps 8 --count 2 --setting magcache:fast "
    "--setting taylorseer:2/1/0.1 --setting every:2 --setting adaptive:0.3 --setting magcache:0.12/2/0.2:published "
    "--setting guidance:0.3-1+sparse:balanced --out quality.json",
    "quality_batch.json": "quality --model tiny --size 64x48 --frames 5 --steps 6 --count 3 --batch 2 --seed 4 "
    "--setting magcache:fast --setting sparse:fast --out quality_batch.json",
    "curve.json": "calibrate --model tiny --size 64x48 --frames 5 --steps 6 --count 2 --out curve.json",
    "curve_image.json": "calibrate --model tiny --size 64x48 --frames 5 --steps 5 --count 2 --batch 2 "
    "--image start.png --out curve_image.json",
    "coverage": "calibrate --model tiny --size 96x96 --frames 9 --steps 4 --count 1 --sparsity --out coverage",
    "fp8.safetensors": "quantize bf16.safetensors fp8.safetensors --device cpu",
    "fp8_block.safetensors": "quantize sharded fp8_block.safetensors --precision fp8-block --keep-blocks 1 --device "
    "cpu",
    "decoded.mp4": "decode saved.safetensors --model tiny --device cpu --out decoded.mp4",
    "report.png": f"generate {TINY} --steps 2 --prompt '{CAPTION}' --sheet report.png --out sheet.mp4 --device cpu",
}

PLANS = """
|--json|--task i2v-A14B|--task ti2v-5B|--task ti2v-5B --image|--task t2v-tiny|--task I2V-TINY --json|--steps 1
--steps 20 --shift 5|--steps 30 --solver dpm++|--steps 12 --solver euler|--task ti2v-5B --steps 10 --solver dpm++
--boundary 0.5|--boundary 0|--boundary 1 --steps 8|--guidance 1|--guidance-high 6 --guidance-low 1|--guidance-low 1
--preset 4-step|--preset 4-step-guided|--preset 6-step --task i2v-A14B|--preset 8-step --shift 3|--preset 4-step --json
--preset 6-step-guided --steps 5|--preset none --steps 4|--task ti2v-5B --preset 4-step|--preset 4-step --boundary 0.9
--magcache quality|--magcache balanced|--magcache fast|--magcache 0.12/2/0.2|--magcache E024K2R10 --task i2v-A14B
--magcache 0.12/2/0.2 --magcache-rule published|--magcache fast --magcache-order 0 --json|--magcache fast --steps 20
--task ti2v-5B --magcache balanced --image|--magcache fast --preset 4-step|--task i2v-tiny --magcache balanced
--taylorseer 2|--taylorseer 3/2/0.1 --steps 20|--taylorseer 4/0 --json|--adaptive 0.1|--adaptive 0.2/2/0.3 --steps 10
--guidance-interval 0.3-0.9|--guidance-every 2|--guidance-every 3 --guidance-interval 0.2-1|--sparse quality
--sparse balanced|--sparse fast --json|--sparse 0.8125/0.1/2:ramp0.2:reuse2|--sparse 0.5/0/0:mass0.9:alone:even
--magcache balanced --sparse balanced|--magcache fast --guidance-every 2|--taylorseer 2 --guidance-interval 0.5-1
--high prefixed.safetensors --magcache fast|--lora 4step_high_noise.safetensors|--lora 4step_high_noise.safetensors:0
--high release/high_noise_model.safetensors --low release/low_noise_model.safetensors --task t2v-tiny --magcache fast
--memory --memory-limit 24|--memory --memory-limit 80 --precision fp8|--memory --memory-limit 12 --task ti2v-5B --json
--memory --memory-limit 48 --residency stream --resident-blocks 3 --size 832x480 --frames 49
--memory --memory-limit 24 --task i2v-A14B --precision fp8 --magcache fast|--memory --memory-limit 2 --task t2v-tiny
"""

# These end in a traceback at 74ad3c8. They are listed until they do not, and otherwise not compared.
KNOWN_FAULTS = ("messages/calibrate --model tiny --size 5 --out c.json",)
COMMANDS = ("generate", "warmup", "decode", "quantize", "plan", "calibrate", "quality", "check", "inspect", "doctor")

# Refused input, and commands that print what they found. `$G` is a complete `generate` command on the CPU, `$R` one of
# several ranks that lacks `--gpus`.
RANKS = f"generate {TINY} --steps 2 --prompt '{CAPTION}' --out out.mp4"
GENERATE = f"{RANKS} --device cpu"
MESSAGES = [
    # the command line itself
    "", "nothing", "generate", "generate --model tiny", "$G --unknown 1", "$G --steps two", "$G --steps", "plan extra",
    "$G --size 64", "$G --size 64x", "$G --size axb", "$G --size -64x48", "$G --precision int3", "$G --compile always",
    "$G --residency floating", "$G --solver heun", "$G --preset 5-step", "$G --guidance-mode both",
    "$G --lora-mode none", "$G --vae-precision fp16", "$G --magcache-rule mine", "$G --magcache-order 7",
    # numbers
    "$G --steps 0", "$G --steps -1", "$G --steps 1001", "$G --shift 0", "$G --shift nan", "$G --shift 2000",
    "$G --boundary 1.5", "$G --boundary -0.1", "$G --guidance -1", "$G --guidance inf", "$G --seed -1",
    "$G --seed 18446744073709551616", "$G --frames 0", "$G --frames 8", "$G --frames -3", "$G --fps 0", "$G --fps 999",
    "$G --size 0x0", "$G --size 50x48", "$G --size 64x40", "$G --size 8x8", "$G --keep-blocks -1", "$G --keep-blocks 4",
    "$G --keep-blocks 99 --precision fp8", "$G --resident-blocks -1", "$G --resident-blocks 99", "$G --memory-limit 0",
    "$G --memory-limit -2",
    # options that do not go together
    "$G --guidance 3 --guidance-low 2", "$G --resident-blocks 2 --residency swap", "$G --magcache-rule joint",
    "$G --magcache fast --taylorseer 2", "$G --adaptive 0.1 --magcache fast", "$G --last-image end.png --task t2v-tiny",
    "$G --task t2v-tiny --image start.png", "$G --task i2v-tiny", "$G --task t2v-A14B", "$G --task unknown",
    "$G --task ti2v-5B", "$G --residency shard", "$G --precision te-delayed", "$G --attention nothing",
    "$G --attention flash4", "$G --attention te-fp8", "$G --device nowhere", "$G --device cuda:99", "$G --device meta",
    # policies
    "$G --magcache best", "$G --magcache ''", "$G --magcache 0.1/2", "$G --magcache 99/2/0.2", "$G --magcache 0.1/2/7",
    "$G --magcache 0.1/99/0.2", "$G --taylorseer x", "$G --taylorseer 0", "$G --taylorseer 2/9", "$G --adaptive fast",
    "$G --adaptive -1", "$G --guidance-interval 0.9-0.2", "$G --guidance-interval all", "$G --guidance-every 0",
    "$G --sparse dense", "$G --sparse 1.5/0/0", "$G --sparse 0.5/0/0:word", "$G --sparse ''", "$G --sparse fast:cudnn",
    "$G --sparse 0.5/2/0", "$G --sparse 0.5/0/-1", "$G --sparse 0.5:mass7", "$G --sparse 0.5:reuse0",
    # several ranks
    "$G --mesh 2x1x1", "$G --gpus cpu,cpu", "$R --nnodes 2", "$R --rdzv a:1", "$R --gpus 0", "$R --gpus 64",
    "$R --gpus auto", "$R --gpus cpu,cuda:0", "$R --gpus gpu,gpu", "$R --gpus cpu,cpu --mesh 3x1x1",
    "$R --gpus cpu,cpu --mesh 2x2x1", "$R --gpus cpu,cpu --mesh axb", "$R --gpus cpu,cpu --mesh 0x1x2",
    "$R --gpus cpu,cpu --nnodes 2", "$R --gpus cpu,cpu --nnodes 2 --rdzv nowhere", "$R --gpus ''",
    "$R --gpus cpu,cpu --step-timeout 0", "$R --gpus cpu --rdzv a:1", "$R --gpus cpu,cpu --nnodes 0",
    "$R --gpus cpu,cpu --steps 0", "$R --gpus cpu,cpu --model nowhere", "$R --gpus cpu,cpu --attention flash4",
    # files: models
    "$G --model nowhere", "$G --model empty", "$G --model text.txt", "$G --model random:nothing",
    "$G --model random:t2v-tiny", "$G --model random:t2v-A14B:99", "$G --high nowhere.safetensors", "$G --high empty",
    "$G --high truncated.safetensors", "$G --high noise.safetensors", "$G --high no_header.safetensors",
    "$G --high huge_header.safetensors", "$G --high overlap.safetensors", "$G --high empty.safetensors",
    "$G --high missing.safetensors", "$G --high shape.safetensors", "$G --high integers.safetensors",
    "$G --high extra.safetensors", "$G --high nan.safetensors", "$G --high truncated.gguf", "$G --high noise.gguf",
    "$G --high broken_index", "$G --high lost_shard", "$G --high list.json", "$G --high noise.pth",
    "$G --high code.pth", "$G --high text.txt", "$G --high lora.safetensors", "$G --high release/vae.safetensors",
    "$G --high i2v_high.safetensors", "$G --low i2v_low.safetensors", "$G --vae release/text_encoder.safetensors",
    "$G --vae ti2v_vae.safetensors", "$G --text-encoder release/vae.safetensors", "$G --tokenizer text.txt",
    "$G --vae truncated.safetensors", "$G --text-encoder noise.safetensors", "$G --high bad_scale.safetensors",
    "$G --high bad_nvfp4.safetensors",
    f"generate --high release/high_noise_model.safetensors --prompt '{CAPTION}'", f"generate --prompt '{CAPTION}'",
    # files: LoRAs
    "$G --lora nowhere.safetensors", "$G --lora lora_other.safetensors", "$G --lora truncated.safetensors",
    "$G --lora noise.safetensors", "$G --lora empty", "$G --lora lora.safetensors:500", "$G --lora lora.safetensors:x",
    "$G --lora prefixed.safetensors", "$G --lora half.safetensors", "$G --lora text_lora.safetensors", "$G --lora ''",
    "$G --lora tucker.safetensors", "$G --image start.png --lora lora.safetensors",
    # files: pictures, latents, what is written
    "$G --image nowhere.png", "$G --image broken.png", "$G --image empty", "$G --image text.txt", "$G --last-image x.y",
    "$G --out nowhere/x.mp4", "$G --out empty", "$G --out x.txt", "$G --save-latents nowhere/x.safetensors",
    "$G --sheet nowhere/x.png", "$G --sheet x.unknown", "$G --report empty", "decode nowhere.safetensors --model tiny",
    "decode lora.safetensors --model tiny", "decode truncated.safetensors --model tiny", "decode empty --model tiny",
    "decode saved.safetensors", "decode saved.safetensors --vae ti2v_vae.safetensors --device cpu",
    "decode saved.safetensors --model nowhere", "decode flat.safetensors --model tiny",
    "decode no_rate.safetensors --model tiny", "decode saved.safetensors --model tiny --out nowhere/x.mp4",
    # other commands
    "quantize nowhere.safetensors x.safetensors", "quantize bf16.safetensors nowhere/x.safetensors",
    "quantize bf16.safetensors x.safetensors --precision bf16", "quantize release/vae.safetensors x.safetensors",
    "quantize bf16.safetensors x.safetensors --precision te-block --device cpu", "quantize bf16.safetensors empty",
    "quantize quantized.safetensors x.safetensors --device cpu",
    "quantize bf16.safetensors x.safetensors --keep-blocks -2", "quantize text.txt x.safetensors",
    "plan --task nothing", "plan --steps 0", "plan --high nowhere.safetensors", "plan --lora nowhere.safetensors",
    "plan --memory --memory-limit 24 --task nothing", "plan --memory --memory-limit 0", "plan --sparse all",
    "plan --memory --memory-limit 24 --frames 3", "plan --task ti2v-5B --guidance-low 3", "plan --magcache ''",
    "plan --memory --memory-limit 24 --size 100x100", "plan --high text.txt", "plan --high empty --magcache fast",
    "plan --high bad_curve/high_noise_model.safetensors --magcache fast", "plan --memory --memory-limit 1",
    "calibrate --model tiny", "calibrate --model tiny --magcache fast", "calibrate --model tiny --out nowhere/c.json",
    "calibrate --model tiny --count 0 --out c.json", "calibrate --model tiny --size 5 --out c.json",
    "calibrate --model tiny --batch 0 --out c.json", "quality --model tiny --setting unknown",
    "quality --model tiny --setting magcache:balanced+magcache:fast", "quality --model tiny --setting every:x",
    "quality --model tiny --sparse fast", "quality --model tiny --out nowhere/x.json", "quality --model nowhere",
    "quality --model tiny --count 0", "quality --model tiny --size 64x48 --frames 2",
    "quality --model tiny --video x.y", "quality --model tiny --batch 0",
    "check nowhere.mp4", "check text.txt", "check empty", "check start.png --prompt 'not of this world'",
    "check decoded.mp4", "check decoded.mp4 --prompt nonsense", "check decoded.mp4 --prompt 'a green square moving up "
    "on a white background'", "doctor --device cuda:99",
    "warmup --model nowhere", "warmup --model tiny --steps 0", "warmup --model tiny --frames 2",
    # inspect reports problems, and describes what is fine
    "inspect nowhere", "inspect empty", "inspect text.txt", "inspect truncated.safetensors",
    "inspect noise.safetensors", "inspect truncated.gguf", "inspect broken_index", "inspect missing.safetensors",
    "inspect shape.safetensors", "inspect overlap.safetensors", "inspect noise.pth", "inspect bad_scale.safetensors",
    "inspect half.safetensors", "inspect lora.safetensors --json", "inspect kohya.safetensors",
    "inspect loha.safetensors", "inspect diff.safetensors", "inspect lora_other.safetensors",
    "inspect 4step_high_noise.safetensors --json", "inspect bf16.safetensors --json", "inspect diffusers.safetensors",
    "inspect sharded", "inspect q5_1.gguf --json", "inspect scaled.safetensors", "inspect nvfp4.safetensors",
    "inspect mxfp8.safetensors", "inspect release/vae.safetensors --json", "inspect release",
    "inspect release/text_encoder.safetensors", "inspect ti2v.safetensors", "inspect ti2v_vae.safetensors",
]  # fmt: skip

# ------------------------------------------------------------------------------------------- files that the tables name


def make_files(engine_folder: Path, folder: Path) -> None:
    """Write every file that the tables name to `folder`: copies of the embedded model in other forms, LoRAs, pictures,
    and files that are damaged."""
    tiny = next(engine_folder.rglob("t2v_high.safetensors")).parent
    release = folder / "release"
    release.mkdir()
    names = {"t2v_high": "high_noise_model", "t2v_low": "low_noise_model", "vae": "vae", "text_encoder": "text_encoder"}
    for ours, theirs in names.items():
        shutil.copyfile(tiny / f"{ours}.safetensors", release / f"{theirs}.safetensors")
    for expert in ("high", "low"):
        shutil.copyfile(tiny / f"i2v_{expert}.safetensors", folder / f"i2v_{expert}.safetensors")
        lora = next(tiny.rglob(f"*4step*{expert}*.safetensors"))
        shutil.copyfile(lora, folder / f"4step_{expert}_noise.safetensors")
    state, notes = read_safetensors(release / "high_noise_model.safetensors")
    rng = np.random.default_rng(0)
    make_pictures(folder)
    make_checkpoints(folder, state, notes)
    make_packed(folder, state, notes, rng)
    make_ti2v(folder, rng)
    make_loras(folder, state, rng)
    make_damaged_safetensors(folder, state, notes)
    make_damaged_others(folder, release)


def read_safetensors(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """(tensors, metadata)"""
    from safetensors import safe_open

    with safe_open(path, "pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in sorted(opened.keys())}
        return tensors, dict(sorted((opened.metadata() or {}).items()))


def write_safetensors(path: Path, state: dict[str, Any], notes: dict[str, str] | None = None) -> None:
    """Written here because the library's order of metadata differs from run to run."""
    import torch

    kinds = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3",
             torch.int64: "I64", torch.uint8: "U8"}  # fmt: skip
    header: dict[str, Any] = {"__metadata__": notes} if notes else {}
    data = b""
    for name, value in sorted(state.items(), key=lambda item: -item[1].element_size()):  # large numbers first: aligned
        raw = value.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": kinds[value.dtype], "shape": list(value.shape), "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def make_pictures(folder: Path) -> None:
    from PIL import Image

    for name, width, height, left in (("start", 96, 96, 20), ("end", 96, 96, 50), ("wide", 160, 80, 60)):
        pixels = np.zeros((height, width, 3), np.uint8)
        pixels[..., 2] = 200
        pixels[..., 1] = np.linspace(0, 60, width, dtype=np.uint8)
        y, x = np.mgrid[:height, :width]
        pixels[(y - height / 2) ** 2 + (x - left) ** 2 < 18**2] = (220, 20, 30)
        Image.fromarray(pixels).save(folder / f"{name}.png")
    (folder / "broken.png").write_bytes((folder / "start.png").read_bytes()[:90])


def make_checkpoints(folder: Path, state: dict[str, Any], notes: dict[str, str]) -> None:
    """The high-noise expert as other programs store it."""
    import torch

    write_safetensors(
        folder / "prefixed.safetensors", {f"model.diffusion_model.{k}": v for k, v in state.items()}, notes
    )
    write_safetensors(folder / "bf16.safetensors", {k: v.bfloat16() for k, v in state.items()}, notes)
    for expert in ("high", "low"):  # without metadata both have one head
        state_of, _ = read_safetensors(folder / "release" / f"{expert}_noise_model.safetensors")
        torch.save(state_of, folder / f"{expert}.pth")
    write_safetensors(folder / "diffusers.safetensors", {diffusers_name(k): v for k, v in state.items()}, notes)
    shards = folder / "sharded"
    shards.mkdir()
    where = {name: f"model-{1 + (n % 3 == 0):05}-of-00002.safetensors" for n, name in enumerate(state)}
    for shard in set(where.values()):
        write_safetensors(shards / shard, {k: v for k, v in state.items() if where[k] == shard}, notes)
    (shards / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    scaled: dict[str, Any] = {"scaled_fp8": torch.empty(0, dtype=torch.float8_e4m3fn)}
    for name, value in state.items():
        scaled[name] = value
        if is_matrix(name, value):
            scale = value.float().abs().max() / 448
            scaled[name] = (value.float() / scale).to(torch.float8_e4m3fn)
            scaled[name.replace(".weight", ".scale_weight")] = scale.reshape(())
    write_safetensors(folder / "scaled.safetensors", scaled, notes)


def is_matrix(name: str, value: Any) -> bool:
    """Whether it is a matrix of a block, which other formats quantise."""
    return name.startswith("blocks.") and name.endswith(".weight") and value.ndim == 2


def diffusers_name(name: str) -> str:
    """Of a transformer's tensor, in Diffusers' layout."""
    pairs = {
        "text_embedding.0": "condition_embedder.text_embedder.linear_1",
        "text_embedding.2": "condition_embedder.text_embedder.linear_2",
        "time_embedding.0": "condition_embedder.time_embedder.linear_1",
        "time_embedding.2": "condition_embedder.time_embedder.linear_2",
        "time_projection.1": "condition_embedder.time_proj", "head.head": "proj_out", "norm3": "norm2",
        "self_attn": "attn1", "cross_attn": "attn2", "ffn.0": "ffn.net.0.proj", "ffn.2": "ffn.net.2",
    }  # fmt: skip
    for ours, theirs in pairs.items():
        name = name.replace(ours, theirs)
    name = re.sub(r"(attn\d)\.([qkv])\.", r"\1.to_\2.", name)
    name = re.sub(r"(attn\d)\.o\.", r"\1.to_out.0.", name)
    return name.replace("head.modulation", "scale_shift_table").replace("modulation", "scale_shift_table")


def make_packed(folder: Path, state: dict[str, Any], notes: dict[str, str], rng: np.random.Generator) -> None:
    """The high-noise expert in GGUF, and in NVFP4 and MXFP8 with random numbers: only the bits matter."""
    import gguf
    import torch

    for kind in (gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q5_1, gguf.GGMLQuantizationType.Q4_0):
        writer = gguf.GGUFWriter(folder / f"{kind.name.lower()}.gguf", "wan")
        for name, value in notes.items():
            writer.add_string(name, value)
        for name, value in state.items():
            chosen = kind if is_matrix(name, value) else gguf.GGMLQuantizationType.F32
            writer.add_tensor(name, gguf.quants.quantize(value.float().numpy(), chosen), raw_dtype=chosen)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    for fmt, group in (("nvfp4", 16), ("mxfp8", 32)):
        packed: dict[str, Any] = {}
        for name, value in state.items():
            if not is_matrix(name, value):
                packed[name] = value
                continue
            (rows, columns), module = value.shape, name.removesuffix(".weight")
            stored = (-(-rows // 128) * 128, -(-columns // group // 4) * 4)
            if fmt == "nvfp4":
                packed[name] = torch.from_numpy(rng.integers(0, 256, (rows, columns // 2), dtype=np.uint8))
                scales = torch.from_numpy(rng.integers(40, 56, stored, dtype=np.uint8))
                packed[f"{module}.weight_scale"] = scales.view(torch.float8_e4m3fn)
                packed[f"{module}.weight_scale_2"] = torch.tensor(0.02)
            else:
                numbers = torch.from_numpy(rng.standard_normal((rows, columns), np.float32))
                packed[name] = numbers.to(torch.float8_e4m3fn)
                packed[f"{module}.weight_scale"] = torch.from_numpy(rng.integers(121, 124, stored, dtype=np.uint8))
            words = json.dumps({"format": fmt}).encode()
            packed[f"{module}.comfy_quant"] = torch.tensor(list(words), dtype=torch.uint8)
        write_safetensors(folder / f"{fmt}.safetensors", packed, notes)


def make_ti2v(folder: Path, rng: np.random.Generator) -> None:
    """TI2V-5B in miniature, with random weights: a transformer of 48 channels and a VAE 2.2."""
    import torch

    def draw(shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
        state = {}
        for name, shape in shapes.items():
            spread = 0.0 if name.endswith("bias") else 0.1 if "modulation" in name else math.prod(shape[1:]) ** -0.5
            values = rng.standard_normal(shape, np.float32) * np.float32(spread)
            plain = "gamma" in name or (len(shape) == 1 and name.endswith("weight"))
            state[name] = torch.ones(shape) if plain else torch.from_numpy(values)
        return state

    def linear(name: str, rows: int, *columns: int) -> dict[str, tuple[int, ...]]:
        return {f"{name}.weight": (rows, *columns), f"{name}.bias": (rows,)}

    dim, ffn = 64, 96
    dit = {"head.modulation": (1, 2, dim)} | linear("patch_embedding", dim, 48, 1, 2, 2) | linear("head.head", 192, dim)
    dit |= linear("text_embedding.0", dim, 64) | linear("text_embedding.2", dim, dim)
    dit |= linear("time_embedding.0", dim, 256) | linear("time_embedding.2", dim, dim)
    dit |= linear("time_projection.1", 6 * dim, dim)
    for block in (f"blocks.{n}" for n in range(2)):
        dit |= {f"{block}.modulation": (1, 6, dim)} | linear(f"{block}.norm3", dim)
        dit |= linear(f"{block}.ffn.0", ffn, dim) | linear(f"{block}.ffn.2", dim, ffn)
        for attention in (f"{block}.self_attn", f"{block}.cross_attn"):
            dit |= {f"{attention}.norm_{x}.weight": (dim,) for x in "qk"}
            for x in "qkvo":
                dit |= linear(f"{attention}.{x}", dim, dim)
    write_safetensors(folder / "ti2v.safetensors", draw(dit), {"num_heads": "2", "text_len": "32", "eps": "1e-06"})
    write_safetensors(folder / "ti2v_vae.safetensors", draw(vae_22_shapes(16)))


def vae_22_shapes(c: int) -> dict[str, tuple[int, ...]]:
    """Tensors of a VAE 2.2 of `c` channels in every stage and one residual block in a stage."""
    shapes: dict[str, tuple[int, ...]] = {}

    def conv(name: str, rows: int, columns: int, *kernel: int) -> None:
        shapes.update({f"{name}.weight": (rows, columns, *kernel), f"{name}.bias": (rows,)})

    def residual(name: str) -> None:
        shapes.update({f"{name}.residual.{n}.gamma": (c, 1, 1, 1) for n in (0, 3)})
        for n in (2, 6):
            conv(f"{name}.residual.{n}", c, c, 3, 3, 3)

    def middle(name: str) -> None:
        residual(f"{name}.0")
        residual(f"{name}.2")
        shapes[f"{name}.1.norm.gamma"] = (c, 1, 1)
        conv(f"{name}.1.to_qkv", 3 * c, c, 1, 1)
        conv(f"{name}.1.proj", c, c, 1, 1)

    for side, channels, out, way, blocks in (("encoder", 12, 96, "down", 1), ("decoder", 48, 12, "up", 2)):
        conv(f"{side}.conv1", c, channels, 3, 3, 3)
        middle(f"{side}.middle")
        shapes[f"{side}.head.0.gamma"] = (c, 1, 1, 1)
        conv(f"{side}.head.2", out, c, 3, 3, 3)
        for stage in range(4):
            inner = f"{side}.{way}samples.{stage}.{way}samples"
            for n in range(blocks):
                residual(f"{inner}.{n}")
            if stage < 3:
                conv(f"{inner}.{blocks}.resample.1", c, c, 3, 3)
            if stage in ((1, 2) if way == "down" else (0, 1)):
                conv(f"{inner}.{blocks}.time_conv", c if way == "down" else 2 * c, c, 3, 1, 1)
    conv("conv1", 96, 96, 1, 1, 1)
    conv("conv2", 48, 48, 1, 1, 1)
    return shapes


def make_loras(folder: Path, state: dict[str, Any], rng: np.random.Generator) -> None:
    """LoRAs of every kind, for the first two blocks of either expert."""
    import torch

    def draw(*shape: int) -> Any:
        return torch.from_numpy(rng.standard_normal(shape, np.float32) * np.float32(0.15))

    matrices = {name: value.shape for name, value in state.items() if is_matrix(name, value)}
    modules = [(n.removesuffix(".weight"), *shape) for n, shape in matrices.items() if re.match(r"blocks\.[01]\.", n)]
    kinds: dict[str, dict[str, Any]] = {
        name: {} for name in ("lora", "kohya", "loha", "lokr", "diff", "dora", "tucker")
    }
    for module, rows, columns in modules:
        comfy, kohya = f"diffusion_model.{module}", "lora_unet_" + module.replace(".", "_")
        pair = {f"{comfy}.lora_A.weight": draw(4, columns), f"{comfy}.lora_B.weight": draw(rows, 4)}
        kinds["lora"] |= pair
        if ".self_attn." in module:
            kinds["dora"] |= {**pair, f"{comfy}.dora_scale": draw(rows, 1).abs() + 1}
            kinds["tucker"] |= {**pair, f"{comfy}.lora_mid.weight": draw(4, 4, 1, 1)}
        kinds["kohya"] |= {f"{kohya}.lora_down.weight": draw(8, columns), f"{kohya}.lora_up.weight": draw(rows, 8)}
        kinds["kohya"][f"{kohya}.alpha"] = torch.tensor(4.0)
        for n in (1, 2):
            kinds["loha"] |= {f"{kohya}.hada_w{n}_a": draw(rows, 2), f"{kohya}.hada_w{n}_b": draw(2, columns)}
        kinds["lokr"] |= {f"{kohya}.lokr_w1": draw(4, 4), f"{kohya}.lokr_w2": draw(rows // 4, columns // 4) * 0.1}
        kinds["diff"] |= {f"{comfy}.diff": draw(rows, columns) * 0.1, f"{comfy}.diff_b": draw(rows) * 0.1}
    kinds["half"] = {name: value for name, value in kinds["lora"].items() if "lora_A" in name}
    kinds["text_lora"] = {
        f"lora_te1_layer_{n}_q.lora_{way}.weight": draw(4, 4) for n in (0, 1) for way in ("up", "down")
    }
    module = "diffusion_model.blocks.0.self_attn.q"
    kinds["lora_other"] = {f"{module}.lora_A.weight": draw(4, 5120), f"{module}.lora_B.weight": draw(5120, 4)}
    for name, tensors in kinds.items():
        write_safetensors(folder / f"{name}.safetensors", tensors)


def make_damaged_safetensors(folder: Path, state: dict[str, Any], notes: dict[str, str]) -> None:
    import torch

    def variant(name: str, changed: dict[str, Any], left_out: str = "-") -> None:
        kept = {key: value for key, value in state.items() if not key.startswith(left_out)}
        write_safetensors(folder / f"{name}.safetensors", kept | changed, notes)

    query = "blocks.0.self_attn.q.weight"
    variant("missing", {}, left_out="blocks.1.ffn")
    variant("shape", {query: torch.zeros(64, 128)})
    variant("integers", {query: torch.zeros(128, 128, dtype=torch.int64)})
    variant("extra", {"blocks.0.surprise.weight": torch.zeros(4)})
    variant("nan", {query: torch.full((128, 128), math.nan)})
    fp8 = torch.zeros(128, 128, dtype=torch.float8_e4m3fn)
    variant("bad_scale", {query: fp8, "blocks.0.self_attn.q.scale_weight": torch.ones(7)})
    words = torch.tensor(list(b'{"format": "nvfp4"}'), dtype=torch.uint8)
    half = torch.zeros(128, 64, dtype=torch.uint8)
    variant("bad_nvfp4", {query: half, query.replace("weight", "comfy_quant"): words})
    whole = (folder / "prefixed.safetensors").read_bytes()
    (folder / "truncated.safetensors").write_bytes(whole[: len(whole) // 2])
    (folder / "noise.safetensors").write_bytes(bytes(range(256)) * 8)
    (folder / "empty.safetensors").write_bytes(b"")
    (folder / "no_header.safetensors").write_bytes((12).to_bytes(8, "little") + b"not a header")
    (folder / "huge_header.safetensors").write_bytes((1 << 60).to_bytes(8, "little") + b"{}")
    one = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
    header = json.dumps({"a": one, "b": {**one, "data_offsets": [8, 24]}}).encode()
    (folder / "overlap.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(24))
    latents = torch.linspace(-1, 1, 16 * 3 * 6 * 8).reshape(1, 16, 3, 6, 8)
    saved = {"fps": "8", "settings": json.dumps({"prompt": CAPTION, "seed": 0})}
    write_safetensors(folder / "saved.safetensors", {"latents": latents}, saved)
    write_safetensors(folder / "flat.safetensors", {"latents": latents.flatten()}, saved)
    write_safetensors(folder / "no_rate.safetensors", {"latents": latents})


def make_damaged_others(folder: Path, release: Path) -> None:
    (folder / "empty").mkdir()
    (folder / "text.txt").write_text("This is no model.\n")
    (folder / "list.json").write_text("[1, 2, 3]")
    for name, shard in (("broken_index", None), ("lost_shard", "gone.safetensors")):
        (folder / name).mkdir()
        text = "{" if shard is None else json.dumps({"weight_map": {"patch_embedding.weight": shard}})
        (folder / name / "model.safetensors.index.json").write_text(text)
    packed = (folder / "q8_0.gguf").read_bytes()
    (folder / "truncated.gguf").write_bytes(packed[: len(packed) // 3])
    (folder / "noise.gguf").write_bytes(b"GGUF" + bytes(range(256)))
    (folder / "noise.pth").write_bytes(bytes(range(256)))
    (folder / "code.pth").write_bytes(b"cos\nsystem\n(S'true'\ntR.")  # a pickle that would run a program
    bad = folder / "bad_curve"
    bad.mkdir()
    shutil.copyfile(release / "high_noise_model.safetensors", bad / "high_noise_model.safetensors")
    (bad / "high_noise_model.magcache.json").write_text('{"format": "another"}')


# ------------------------------------------------------------------------------------------------------- running a case


class Engine:
    """The engine of one checkout, running in the folder with the files, and where its results are kept.

    `results` collects what `Pipeline.generate` returns while a command runs in this process: the only way to the
    decoded frames before they are compressed.
    """

    def __init__(self, checkout: Path, folder: Path, out: Path) -> None:
        sys.path[0] = str(checkout)  # in place of this script's folder
        import torch

        import wan_core
        from wan_core.cli import main

        assert Path(wan_core.__file__).is_relative_to(checkout), f"{wan_core.__file__} is not in {checkout}"
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")  # each is shown once in a process, in whichever case is first
        self.checkout, self.folder, self.out = checkout, folder, out
        self.main, self.api = main, wan_core
        self.results: list[Any] = []
        self._collect(wan_core.Pipeline)

    def _collect(self, pipeline: Any) -> None:
        generate = pipeline.generate

        @functools.wraps(generate)
        def collected(*arguments: Any, **options: Any) -> Any:
            result = generate(*arguments, **options)
            self.results.append(result)
            return result

        pipeline.generate = collected

    def command(self, line: str) -> tuple[int | str, str, str]:
        """Run a command line in this process: (exit code or the error that escaped, stdout, stderr)."""
        self.results.clear()
        logging.getLogger().handlers.clear()  # the engine configures logging for the stderr that it finds
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code: int | str = self.main(shlex.split(line))
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 1
            except Exception as fault:  # noqa: BLE001 - it is a result here
                traceback.print_exc()
                code = f"raised {type(fault).__name__}"
        return code, self.normal(out.getvalue()), self.normal(err.getvalue())

    def apart(self, line: str) -> tuple[int, str, str]:
        """Run a command line in a process of its own. Ranks that get no CPU for a minute are ended by the engine, so
        on an overloaded machine a run is tried three times."""
        command = [sys.executable, "-m", "wan_core", *shlex.split(line)]
        for _ in range(3):
            done = subprocess.run(command, capture_output=True, text=True)
            if "--gpus" not in line or done.returncode == 0:
                break
            print(f"\ntried again, because the ranks failed: {done.stderr[-200:]}", file=sys.stderr)
        return done.returncode, self.normal(done.stdout), self.normal(done.stderr)

    def normal(self, text: str) -> str:
        """`text` without what differs from run to run: folders, times, sizes of memory, addresses."""
        for path, name in ((self.folder, "FOLDER"), (self.checkout, "CHECKOUT")):
            text = text.replace(str(path), name)
        text = re.sub(r"0x[0-9a-f]{6,}", "0xADDRESS", text)
        text = re.sub(r"\.\d+\.partial", ".PROCESS.partial", text)
        text = re.sub(r"\d+(\.\d+)? (s|ms|GiB)\b", r"N \2", text)
        return re.sub(r"\d+(\.\d+)? s/step.*", "N s/step", text)

    def keep(self, name: str, array: np.ndarray) -> Case:
        """Store numbers; what must be equal of them."""
        file = f"{re.sub('[^a-z0-9.]+', '_', name.lower())[:80]}_{digest(name.encode())[:8]}.npy"
        np.save(self.out / "arrays" / file, array)
        return {"strict": fingerprint(array), "array": file}


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def fingerprint(array: np.ndarray) -> dict[str, Any]:
    array = np.ascontiguousarray(array)
    return {"sha256": digest(array.tobytes()), "shape": list(array.shape), "dtype": str(array.dtype)}


def latents_case(engine: Engine, name: str, *, apart: bool = False) -> Case:
    """One `generate`. In a process of its own, the frames are those of the sheet, which shows the first six at most."""
    for left in ("out.safetensors", "sheet.png"):
        (engine.folder / left).unlink(missing_ok=True)
    own = "" if "--prompt" in name else f"--prompt '{CAPTION}'"
    device = "" if "--gpus" in name else "--device cpu"
    line = f"generate {name} {own} {device} --out out.mp4 --save-latents out.safetensors --sheet sheet.png"
    code, _, err = engine.apart(line) if apart else engine.command(line)
    if code != 0:
        return {"strict": {"exit": code}, "messages": err}
    tensors, notes = read_safetensors(engine.folder / "out.safetensors")
    case = engine.keep(name, tensors["latents"].numpy())
    case["strict"] |= {"exit": 0, "fps": notes["fps"], "tensors": list(tensors)}
    case["messages"] = engine.normal(json.dumps(json.loads(notes["settings"]), indent=1, sort_keys=True))
    if apart:
        from PIL import Image

        case["strict"]["frames"] = fingerprint(np.asarray(Image.open(engine.folder / "sheet.png")))
        return case
    assert len(engine.results) == 1, "generate no longer calls wan_core.Pipeline.generate once"
    case["strict"]["frames"] = fingerprint(engine.results[0].frames)
    case["strict"]["returned"] = fingerprint(engine.results[0].latents.numpy())
    return case


def file_case(engine: Engine, name: str, line: str) -> Case:
    """A command that writes the file or folder `name`."""
    code, _, err = engine.command(line)
    path = engine.folder / name
    if code != 0 or not path.exists():
        return {"strict": {"exit": code}, "messages": err}
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    return {"strict": {"exit": code} | {str(p.relative_to(engine.folder)): file_content(p) for p in files}}


def file_content(path: Path) -> Any:
    if path.suffix == ".json":
        return without_volatile(json.loads(path.read_text()))
    if path.suffix == ".mp4":
        import av

        with av.open(str(path)) as video:
            return fingerprint(np.stack([frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)]))
    if path.suffix == ".png":
        from PIL import Image

        return fingerprint(np.asarray(Image.open(path)))
    return digest(path.read_bytes())


def without_volatile(value: Any) -> Any:
    """JSON without measured times and what describes the machine."""
    if isinstance(value, dict):
        return {key: without_volatile(inner) for key, inner in value.items() if key not in VOLATILE}
    return [without_volatile(inner) for inner in value] if isinstance(value, list) else value


def plan_case(engine: Engine, line: str) -> Case:
    code, out, err = engine.command(f"plan {line}")
    return {"strict": {"exit": code, "text": out}, "messages": err}


def message_case(engine: Engine, line: str) -> Case:
    code, out, err = engine.command(line.replace("$G", GENERATE).replace("$R", RANKS))
    return {"strict": {"exit": code}, "messages": f"{out}{err}"}


def options_case(engine: Engine, command: str) -> Case:
    """Options and arguments that the help lists; its wording may change."""
    code, out, _ = engine.command(f"{command} --help")
    listed = sorted({found for line in out.splitlines() if re.match(r"  -", line)
                     for found in re.findall(r"(?<![\w-])--[a-z][a-z-]*", line[:60])})  # fmt: skip
    return {"strict": {"exit": code}, "options": listed}


def module_case(engine: Engine, line: str) -> Case:
    """`python -m wan_core` does the same as `main`."""
    code, out, err = engine.apart(line)
    return {"strict": {"exit": code, "text": out}, "messages": err}


# ---------------------------------------------------------------------------------------------------------- Python API


def two_videos(engine: Engine) -> np.ndarray:
    """Three requests to one pipeline: what one leaves behind must not change the next."""
    api = engine.api
    pipe = api.Pipeline.load(api.LoadOptions(model="tiny", device="cpu"))
    size = {"prompt": CAPTION, "width": 64, "height": 48, "frames": 5, "steps": 3}
    requests = [api.Request(**size, seed=seed, guidance_low=low) for seed, low in ((1, 3.0), (2, 1.0), (1, 3.0))]
    return np.concatenate([pipe.generate(request).latents.numpy() for request in requests])


def loras_and_steps(engine: Engine) -> np.ndarray:
    """LoRAs as plain dicts, a request given to `load`, and what `on_step` and `on_phase` are told."""
    api, seen, phases = engine.api, [], []
    lora = {"path": "lora.safetensors", "strength": 0.5}
    request = api.Request(prompt=CAPTION, width=64, height=48, frames=5, steps=4, preset="none", image="start.png")
    tiny = api.LoadOptions(model="tiny", device="cpu", precision="fp32", residency="stream", resident_blocks=1)
    pipe = api.Pipeline.load(tiny, request=request)
    pictured = pipe.generate(request, on_step=lambda progress, _: seen.append(progress.step.index))
    request = api.Request(prompt=CAPTION, width=64, height=48, frames=5, steps=4)
    pipe = api.Pipeline.load(api.LoadOptions(model="tiny", device="cpu", loras=(lora,), lora_mode="attach"))
    drawn = pipe.generate(request, on_phase=phases.append, keep_latents=engine.folder / "kept.safetensors")
    assert seen == [0, 1, 2, 3], seen
    assert "denoise" in phases, phases
    assert "latents" in read_safetensors(engine.folder / "kept.safetensors")[0]
    return np.concatenate([pictured.latents.numpy(), drawn.latents.numpy()])


def forward_of_two(engine: Engine) -> np.ndarray:
    """A batch of two through the transformer, with a timestep for each, and with one for each latent frame."""
    import torch

    generator = torch.Generator().manual_seed(7)
    x, rows = torch.randn(2, 16, 3, 6, 8, generator=generator), torch.randn(2, 9, 64, generator=generator)
    dit = engine.api.load_dit("release/high_noise_model.safetensors", device="cpu", dtype=torch.float32)
    with torch.no_grad():
        by_sample = dit(x, torch.tensor([900.0, 950.5]), rows)
        by_frame = dit(x, torch.tensor([[0.0, 900.0, 900.0], [0.0, 500.0, 510.0]]), rows)
    return torch.cat([by_sample, by_frame]).numpy()


def vae_tiles(engine: Engine, path: str = "release/vae.safetensors", channels: int = 16) -> np.ndarray:
    """Encoding and decoding, whole, in chunks and in tiles. The class of tiles is found by `decode`'s annotation."""
    import torch

    vae = engine.api.load_vae(path, device="cpu", dtype=torch.float32)
    generator = torch.Generator().manual_seed(3)
    latents = torch.randn(1, channels, 3, 12, 16, generator=generator)
    spec = next(kind for kind in typing.get_args(typing.get_type_hints(vae.decode)["tile"]) if kind is not type(None))
    with torch.no_grad():
        videos = [vae.decode(latents), vae.decode(latents, tile=spec(height=8, width=8, overlap=4))]
        videos.append(vae.decode(latents, chunk=2))
        codes = [vae.encode(videos[0]), vae.encode(videos[0], tile=spec(height=8, width=6, overlap=2))]
    return torch.cat([value.flatten() for value in (*videos, *codes)]).numpy()


def text_rows(engine: Engine) -> np.ndarray:
    encoder = engine.api.load_text_encoder("release/text_encoder.safetensors")
    return np.concatenate([rows.numpy().ravel() for rows in encoder.encode([CAPTION, "", "überlang " * 80])])


def plan_numbers(engine: Engine) -> np.ndarray:
    plans = [engine.api.make_plan(), engine.api.make_plan(task="ti2v-5B", steps=7, shift=3, solver="dpm++")]
    plans.append(engine.api.make_plan(task="i2v-A14B", steps=9, boundary=0.8, guidance_low=1, solver="euler"))
    steps = [step for plan in plans for step in plan.steps]
    return np.array([(s.timestep, s.sigma, s.sigma_next, s.guidance, s.expert == "high", s.forwards) for s in steps])


API: dict[str, Callable[[Engine], np.ndarray]] = {
    "three videos of one pipeline": two_videos,
    "LoRAs as dicts, callbacks, kept latents": loras_and_steps,
    "a batch of two": forward_of_two,
    "VAE 2.1 whole and in tiles": vae_tiles,
    "VAE 2.2 whole and in tiles": functools.partial(vae_tiles, path="ti2v_vae.safetensors", channels=48),
    "rows of text": text_rows,
    "numbers of plans": plan_numbers,
}


def api_case(engine: Engine, name: str) -> Case:
    try:
        return engine.keep(name, API[name](engine))
    except Exception as fault:  # noqa: BLE001 - it is a result here
        return {"strict": {"exit": f"raised {type(fault).__name__}"}, "messages": engine.normal(traceback.format_exc())}


# ------------------------------------------------------------------------------------------------------ record, compare


def all_cases() -> Iterator[tuple[str, Callable[[Engine], Case]]]:
    """(kind/name, how it is recorded), in order: later cases read files that earlier ones write."""
    for kind, table in (("latents", LATENTS), ("apart", APART)):
        for common, options in table.items():
            for option in options:
                name = f"{common} {option}".strip()
                yield f"{kind}/{name}", functools.partial(latents_case, name=name, apart=kind == "apart")
    for name in API:
        yield f"api/{name}", functools.partial(api_case, name=name)
    for name, line in FILES.items():
        yield f"files/{name}", functools.partial(file_case, name=name, line=line)
    for line in PLANS.strip("\n").replace("\n", "|").split("|"):
        yield f"plans/plan {line}".strip(), functools.partial(plan_case, line=line)
    for line in ("plan --task t2v-tiny", "plan --steps 0", "inspect lora.safetensors"):
        yield f"apart/{line}", functools.partial(module_case, line=line)
    for command in COMMANDS:
        yield f"options/{command}", functools.partial(options_case, command=command)
    for line in MESSAGES:
        yield f"messages/{line}", functools.partial(message_case, line=line)


def record(out: Path, checkout: Path, only: str) -> int:
    """Run every case that matches and write OUT/record.json and OUT/arrays."""
    began = time.monotonic()
    shutil.rmtree(out / "arrays", ignore_errors=True)
    (out / "arrays").mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="golden") as name:
        folder = Path(name).resolve() / "golden" / "files"  # messages show the last names of a file's folders
        folder.mkdir(parents=True)
        os.environ.update(ENVIRONMENT | {"WANCORE_CACHE": str(folder / "cache"), "PYTHONPATH": str(checkout)})
        os.chdir(folder)
        engine = Engine(checkout, folder, out)
        make_files(checkout / "wan_core", folder)
        cases, seconds = {}, {}
        code, *_ = engine.command("quantize bf16.safetensors quantized.safetensors --device cpu")
        assert code == 0, "quantize must work: its file is an input of other cases"
        for name, run in all_cases():
            if fnmatchcase(name, only):
                start = time.monotonic()
                cases[name] = run(engine)
                seconds[name] = time.monotonic() - start
                print(f"\r{len(cases):>4} cases  {name[:90]:<90}", end="", file=sys.stderr, flush=True)
        os.chdir(ROOT)
    about = {"checkout": str(checkout), "commit": commit_of(checkout), "only": only, "packages": packages()}
    schemas = next((checkout / "tests").rglob("node_schemas.json"), None)  # its folder may change
    about["node_schemas"] = None if schemas is None else digest(schemas.read_bytes())
    text = json.dumps({"about": about, "cases": cases}, indent=1, ensure_ascii=False)
    (out / "record.json").write_text(text + "\n")
    print(f"\n{len(cases)} cases in {time.monotonic() - began:.0f} s -> {out / 'record.json'}")
    print("slowest:", ", ".join(f"{seconds[n]:.1f} s {n[:60]}" for n in sorted(seconds, key=seconds.get)[:-4:-1]))
    return 0


def commit_of(checkout: Path) -> str:
    done = subprocess.run(
        ["git", "-C", str(checkout), "describe", "--always", "--dirty"], capture_output=True, text=True
    )
    return done.stdout.strip()


def packages() -> dict[str, str]:
    from importlib.metadata import version

    return {"python": sys.version.split()[0]} | {name: version(name) for name in ("torch", "numpy", "pillow", "av")}


def compare(before: Path, after: Path, only: str, strict_messages: bool) -> int:
    """Print a table of both recordings; 0 where nothing differs that must not."""
    a, b = (json.loads((folder / "record.json").read_text()) for folder in (before, after))
    for name, value in a["about"].items():
        if value != b["about"][name] and name in ("packages", "node_schemas"):
            print(f"note: {name} differ: {value} and {b['about'][name]}")
    patterns = {only, a["about"]["only"], b["about"]["only"]}
    names = [name for name in dict.fromkeys([*a["cases"], *b["cases"]]) if all(fnmatchcase(name, p) for p in patterns)]
    table: dict[str, dict[str, int]] = {}
    faults, changed = [], []
    for name in names:
        old, new = a["cases"].get(name), b["cases"].get(name)
        row = table.setdefault(name.partition("/")[0], {"cases": 0, "equal": 0, "differ": 0, "text": 0})
        row["cases"] += 1
        if name in KNOWN_FAULTS:
            fixed = TRACEBACK not in (new or {}).get("messages", "")
            print(f"note: {'fixed' if fixed else 'known traceback'}: {name}")
            row["equal"] += 1
            continue
        found = differences(old, new, before, after)
        if found:
            row["differ"] += 1
            faults.append(f"{name}\n{indent(found)}")
        else:
            row["equal"] += 1
        if old is not None and new is not None and old.get("messages", "") != new.get("messages", ""):
            row["text"] += 1
            changed.append(f"{name}\n{indent(text_changes(old, new))}")
    for title, listed in (("changed text", changed), ("DIFFERENT", faults)):
        if listed:
            print(f"--- {title} ---", *listed, sep="\n")
    print(f"{'kind':<10}{'cases':>8}{'equal':>8}{'differ':>8}{'text changed':>14}")
    for kind, row in table.items():
        print(f"{kind:<10}{row['cases']:>8}{row['equal']:>8}{row['differ']:>8}{row['text']:>14}")
    failed = bool(faults) or not names or (strict_messages and bool(changed))
    print("DIFFERENT" if failed else "all equal" if not changed else "equal but for changed text")
    return int(failed)


def differences(old: Case | None, new: Case | None, before: Path, after: Path) -> list[str]:
    """What must not differ, in words."""
    if old is None or new is None:
        return ["only in the second recording" if old is None else "missing in the second recording"]
    found = []
    for key in sorted({*old["strict"], *new["strict"]}):
        one, other = (case["strict"].get(key) for case in (old, new))
        if one != other:
            found.append(f"{key}: {short(one, other)}")
    if found and "array" in old and "array" in new:
        found.append(distance(np.load(before / "arrays" / old["array"]), np.load(after / "arrays" / new["array"])))
    gone = set(old.get("options", ())) - set(new.get("options", ()))
    if gone:
        found.append(f"options that are gone: {', '.join(sorted(gone))}")
    if TRACEBACK in new.get("messages", ""):
        found.append("a traceback:")
        found += new["messages"].splitlines()[-6:]
    elif found and new["strict"].get("exit") != old["strict"].get("exit"):
        found += new.get("messages", "").splitlines()[-3:]
    return found


def short(one: Any, other: Any) -> str:
    """Two values that differ; of long texts, the first lines that do."""
    if isinstance(one, str) and isinstance(other, str) and "\n" in one:
        pairs = zip(one.splitlines(), other.splitlines(), strict=False)
        lines = next((pair for pair in pairs if pair[0] != pair[1]), ("(another number of lines)", ""))
        return f"{lines[0]!r} -> {lines[1]!r}"
    return f"{str(one)[:300]} -> {str(other)[:300]}"


def distance(a: np.ndarray, b: np.ndarray) -> str:
    if a.shape != b.shape:
        return f"shapes {a.shape} and {b.shape}"
    error = float(np.abs(a.astype(np.float64) - b.astype(np.float64)).max())
    largest = float(np.abs(a).max()) or 1.0
    return f"largest difference {error:.3g}, {error / largest:.3g} of the largest number"


def text_changes(old: Case, new: Case) -> list[str]:
    a, b = (case.get("messages", "").splitlines() for case in (old, new))
    return [*(f"- {line}" for line in a if line not in b), *(f"+ {line}" for line in b if line not in a)][:12]


def indent(lines: list[str]) -> str:
    return "\n".join(f"    {line}" for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="run all cases and write what they give")
    recording.add_argument("--out", type=Path, required=True, help="folder to write")
    recording.add_argument("--checkout", type=Path, default=ROOT, help="whose engine (default: this repository's)")
    comparing = commands.add_parser("compare", help="compare two recordings; 1 if they differ")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    comparing.add_argument("--strict-messages", action="store_true", help="changed text of messages counts, too")
    for command in (recording, comparing):
        command.add_argument("--only", default="*", metavar="PATTERN", help="KIND/NAME, with * and ? (default: all)")
    options = parser.parse_args()
    if options.command == "record":
        return record(options.out.resolve(), options.checkout.resolve(), options.only)
    return compare(options.before, options.after, options.only, options.strict_messages)


if __name__ == "__main__":
    sys.exit(main())
