"""Option sets, as arguments of the command line and as inputs and nodes of ComfyUI.

A set is a task and a few rows of the table, drawn from a seed: most of them valid alone, some not, and some that do not
go together. A door that cannot express a row is left out of the comparison for that set.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

Inputs = dict[str, Any]
COUNT = 150  # sets that are drawn


@dataclass(frozen=True)
class Row:
    """One value of one option. group: a set has one row of a group. kind: what of a graph `inputs` belong to: "plan"
    (the sampler's inputs), "size", "model", or the id of a node; None: nodes cannot express it."""

    group: str
    line: str | None  # None: the command line cannot express it
    kind: str | None = None
    inputs: Inputs = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.line if self.line is not None else f"{self.kind} {self.inputs}"


@dataclass(frozen=True)
class Model:
    """files: its transformers, one or two. media: what its graph needs. native: ComfyUI's own loader takes them too."""

    files: tuple[str, ...]
    line: str = ""
    media: str = "none"
    native: bool = True


def plan(group: str, line: str, **inputs: Any) -> Row:
    return Row(group, line, "plan", inputs)


MAGCACHE = {"preset": "custom", "threshold": 0.12, "max_skips": 2, "retention": 0.2, "rule": "joint", "order": 0}
SPARSE = {"preset": "custom", "sparsity": 0.5, "dense_steps": 0.0, "ramp": 0.0, "dense_layers": 0, "mass": 0.0,
          "pooled": True, "reuse": 1, "kernel": "auto", "unselected": "means"}  # fmt: skip
WINDOWS = {"length": 17, "overlap": 8, "schedule": "standard_uniform", "fuse": "pyramid", "freenoise": True,
           "retain_first_frame": False, "closed_loop": False}  # fmt: skip
STAGES = {"scale": 0.5, "low": 0.9, "high": 0.98, "positions": "video", "every": 0}


def cache(line: str, kind: str, **inputs: Any) -> Row:
    return Row("cache", line, kind, inputs)


def sparse(line: str, **changed: Any) -> Row:
    return Row("sparse", f"--sparse {line}", "WanCoreSparseAttention", {**SPARSE, **changed})


def windows(line: str, **changed: Any) -> Row:
    return Row("windows", f"--windows {line}", "WanCoreContextWindows", {**WINDOWS, **changed})


ROWS = [
    *(plan("steps", f"--steps {n}", steps=n) for n in (1, 2, 3, 5, 10, 12, 12, 16, 0, -1, 1001)),
    *(plan("shift", f"--shift {n}", shift=n) for n in (1.0, 3.0, 12.5, 0.0, -2.0, 101.0)),
    *(plan("boundary", f"--boundary {n}", boundary=n) for n in (0.5, 0.95, 1.0, 0.0, 1.5)),
    *(plan("guidance", f"--guidance {n}", guidance_high=n, guidance_low=n) for n in (1.0, 2.5, 101.0, -1.0, 0.0)),
    plan("guidance", "--guidance-high 4 --guidance-low 1", guidance_high=4.0, guidance_low=1.0),
    plan("guidance", "--guidance-high 1", guidance_high=1.0),
    *(plan("solver", f"--solver {name}", solver=name)
      for name in ("unipc", "dpm++", "euler", "heun", "res_multistep", "lcm", "ddim")),
    *(plan("preset", f"--preset {name}", preset=name)
      for name in ("none", "4-step", "4-step-guided", "6-step", "8-step-guided", "lightning", "template", "5-step")),
    *(plan("part", f"--denoise {n}", denoise=n) for n in (0.5, 0.9, 0.0)),
    plan("part", "--start-step 2 --end-step 3", start_step=2, end_step=3),
    plan("part", "--end-step 2 --leftover-noise", end_step=2, return_with_leftover_noise="enable"),
    plan("part", "--start-step 20 --end-step 4", start_step=20, end_step=4),
    *(cache(f"--magcache {name}", "WanCoreMagCache", **{**MAGCACHE, "preset": name}) for name in ("balanced", "fast")),
    cache("--magcache 0.12/2/0.2", "WanCoreMagCache", **MAGCACHE),
    cache("--magcache 0.3/3/0.1 --magcache-rule published", "WanCoreMagCache",
          **{**MAGCACHE, "threshold": 0.3, "max_skips": 3, "retention": 0.1, "rule": "published"}),
    cache("--magcache best", "WanCoreMagCache", **{**MAGCACHE, "preset": "best"}),
    cache("--magcache 99/2/0.2", "WanCoreMagCache", **{**MAGCACHE, "threshold": 99.0}),
    cache("--magcache 0.12/2/0.2 --magcache-order 7", "WanCoreMagCache", **{**MAGCACHE, "order": 7}),
    cache("--taylorseer 2/1/0.2", "WanCoreTaylorSeer", interval=2, order=1, retention=0.2),
    cache("--taylorseer 3/2/0.1", "WanCoreTaylorSeer", interval=3, order=2, retention=0.1),
    cache("--taylorseer 0/1/0.2", "WanCoreTaylorSeer", interval=0, order=1, retention=0.2),
    cache("--taylorseer 2/9/0.2", "WanCoreTaylorSeer", interval=2, order=9, retention=0.2),
    cache("--adaptive 0.2/3/0.2", "WanCoreAdaptiveCache", threshold=0.2, max_skips=3, retention=0.2),
    cache("--adaptive -1/3/0.2", "WanCoreAdaptiveCache", threshold=-1.0, max_skips=3, retention=0.2),
    Row("second cache", "--taylorseer 4/1/0.2", "WanCoreTaylorSeer", {"interval": 4, "order": 1, "retention": 0.2}),
    Row("cache", "--pattern 1101010/1101/1.5"), Row("cache", "--pattern 012/1/1"),
    *(Row("speed", f"--speed {name}", "WanCoreSpeedPreset", {"preset": name})
      for name in ("balanced", "fast-i2v", "mine", "nothing")),
    Row("guide", "--guidance-every 2", "WanCoreGuidanceSchedule", {"low": 0.0, "high": 1.0, "every": 2}),
    Row("guide", "--guidance-interval 0.3-0.9", "WanCoreGuidanceSchedule", {"low": 0.3, "high": 0.9, "every": 1}),
    Row("guide", "--guidance-interval 0.9-0.2", "WanCoreGuidanceSchedule", {"low": 0.9, "high": 0.2, "every": 1}),
    Row("guide", "--guidance-every 0", "WanCoreGuidanceSchedule", {"low": 0.0, "high": 1.0, "every": 0}),
    *(sparse(name, preset=name) for name in ("quality", "balanced", "fast", "dense")),
    sparse("0.5/0/0:ramp0"), sparse("0.5/0/1:ramp0.2:reuse2", dense_layers=1, ramp=0.2, reuse=2),
    sparse("0.75/0/0:ramp0:slope:error", sparsity=0.75, unselected="slope, error"),
    sparse("0.5/0/0:ramp0:alone", pooled=False), sparse("0.5/0/0:ramp0:mass0.9", mass=0.9),
    sparse("0.5/0/0:ramp0:cudnn", kernel="cudnn"), sparse("1.5/0/0:ramp0", sparsity=1.5),
    sparse("0.5/0/0:ramp0:alone:slope", pooled=False, unselected="slope"), sparse("0.5/0/99:ramp0", dense_layers=99),
    Row("stages", "--stages 0.5/0.9-0.98", "WanCoreResolutionSchedule", STAGES),
    Row("stages", "--stages 0.75/0.5-1", "WanCoreResolutionSchedule",
        {**STAGES, "scale": 0.75, "low": 0.5, "high": 1.0}),
    Row("stages", "--stages 0.1/0.9-0.98", "WanCoreResolutionSchedule", {**STAGES, "scale": 0.1}),
    Row("stages", "--stages 0.5/0.98-0.9", "WanCoreResolutionSchedule", {**STAGES, "low": 0.98, "high": 0.9}),
    windows("17/8"), windows("17/4:standard_static:flat:plain", overlap=4, schedule="standard_static", fuse="flat",
                             freenoise=False),
    windows("17/8:looped_uniform:closed", schedule="looped_uniform", closed_loop=True),
    windows("17/17", overlap=17), windows("18/4", length=18, overlap=4), windows("17/8:batched", schedule="batched"),
    Row("nag", "--nag 11/2.5/0.25", "WanCoreNAG", {"scale": 11.0, "tau": 2.5, "alpha": 0.25}),
    Row("nag", "--nag 11/0/2", "WanCoreNAG", {"scale": 11.0, "tau": 0.0, "alpha": 2.0}),
    *(Row("frames", f"--frames {n}", "size", {"frames": n}) for n in (5, 17, 33, 1, 8, 0)),
    *(Row("size", f"--size {x}x{y}", "size", {"width": x, "height": y}) for x, y in ((96, 64), (50, 48), (8, 8))),
    Row("frames", "--frames 21 --clip-frames 9 --overlap 5", "clips", {"frames": 21, "clip_frames": 9, "overlap": 5}),
    Row("frames", "--frames 21 --clip-frames 8 --overlap 1", "clips", {"frames": 21, "clip_frames": 8, "overlap": 1}),
    Row("lora", "--lora t2v_4step_lora_high_noise.safetensors --lora t2v_4step_lora_low_noise.safetensors",
        "WanCoreLoRA", {"high": "tiny 4-step high (embedded)", "strength_high": 1.0,
                        "low": "tiny 4-step low (embedded)", "strength_low": 1.0}),
    Row("control", "--control-scale 0.5 --control-start 0.2 --control-end 0.7", "WanCoreVACE",
        {"strength": 0.5, "start": 0.2, "end": 0.7}),
    Row("control", "--control-start 0.7 --control-end 0.2", "WanCoreVACE", {"start": 0.7, "end": 0.2}),
]  # fmt: skip

PARTS = "--text-encoder release/text_encoder.safetensors --vae vae21.safetensors"
CLIP = "--clip-vision vision.safetensors"
DRIVEN = "--reference start.png --pose-video video.avi"
PAIRS = {name: tuple(f"{name}_{expert}_noise.safetensors" for expert in ("high", "low"))
         for name in ("t2v", "i2v", "vace", "fun", "camera")}  # fmt: skip
TINY, TINY_I2V, TINY_DRIVEN = "tiny (embedded)", "tiny i2v (embedded)", "tiny animate 2 (embedded)"
MODELS: dict[str, Model] = {
    "t2v-tiny": Model((TINY, TINY), "--model tiny"),
    "i2v-tiny": Model((TINY_I2V, TINY_I2V), "--model tiny --image start.png", "image"),
    "animate2-tiny": Model((TINY_DRIVEN,), f"--model tiny --task animate2-tiny {DRIVEN}", "animate2"),
    "t2v-A14B": Model(PAIRS["t2v"], PARTS),
    "i2v-A14B": Model(PAIRS["i2v"], f"{PARTS} --image start.png", "image"),
    "ti2v-5B": Model(("ti2v.safetensors",), PARTS.replace("vae21", "vae22"), "5B"),
    "t2v-14B": Model(("wan2.1_t2v.safetensors",), PARTS),
    "i2v-14B-480P": Model(("wan2.1_i2v_480p.safetensors",), f"{PARTS} {CLIP} --image start.png", "image"),
    "animate-14B": Model(("animate.safetensors",), f"{PARTS} {CLIP} {DRIVEN}", "animate", native=False),
    "animate2-14B": Model(("animate2.safetensors",), f"{PARTS} {CLIP} {DRIVEN}", "animate2"),
    "animate2-14B-distilled": Model(("animate2_distilled.safetensors",), f"{PARTS} {CLIP} {DRIVEN}", "animate2"),
    "s2v-14B": Model(("s2v.safetensors",), f"{PARTS} --audio-encoder speech.safetensors --reference start.png "
                     "--audio sound.wav --out v.mp4", "sound", native=False),
    "vace-14B": Model(("vace.safetensors",), f"{PARTS} --control-video video.avi", "vace"),
    "vace-A14B": Model(PAIRS["vace"], f"{PARTS} --control-video video.avi", "vace"),
    "fun-control-A14B": Model(PAIRS["fun"], f"{PARTS} --control-video video.avi", "fun"),
    "camera-A14B": Model(PAIRS["camera"], f"{PARTS} --camera zoom-in --image start.png", "camera"),
}  # fmt: skip
FREQUENT = ("t2v-tiny", "i2v-tiny", "t2v-A14B", "ti2v-5B")


@dataclass(frozen=True)
class OptionSet:
    task: str
    rows: tuple[Row, ...]

    @property
    def name(self) -> str:
        return " ".join([self.task, *(row.name for row in self.rows)])


def option_sets() -> list[OptionSet]:
    """Each row alone, with the embedded model; each task alone; and sets that are drawn. A run of many steps would take
    long, so all but a few sets name a number of steps; windows need many frames."""
    draw, few = random.Random(1), next(row for row in ROWS if row.line == "--steps 12")
    long = next(row for row in ROWS if row.line == "--frames 33")
    sets = [OptionSet("t2v-tiny", (row,) if row.group in ("steps", "preset") else (few, row)) for row in ROWS]
    sets += [OptionSet("t2v-tiny", (few, long, row)) for row in ROWS if row.group == "windows"]
    sets += [OptionSet(task, ()) for task in MODELS] + [OptionSet(task, (few,)) for task in MODELS]
    while len(sets) < COUNT + len(ROWS):
        task = draw.choice([*MODELS, *FREQUENT])
        rows: dict[str, Row] = {few.group: few}
        for row in draw.sample(ROWS, draw.choice((1, 2, 2, 3))):
            rows.setdefault(row.group, row) if row.group != "steps" else rows.update(steps=row)
        if "windows" in rows:
            rows.setdefault(long.group, long)
        sets.append(OptionSet(task, tuple(rows.values())))
    return list({one.name: one for one in sets}.values())


def command_line(one: OptionSet, offered: set[str]) -> str | None:
    """The words of a set that a command offers; None where it offers not all of them. Media are left out where it
    offers none."""
    words = []
    for row in one.rows:
        names = [word for word in (row.line or "").split() if word.startswith("--")]
        if row.line is None or not offered.issuperset(names):
            return None
        words.append(row.line.replace("--speed mine", "--speed mine.preset.json"))
    return " ".join(words)


def model_line(task: str) -> str:
    model = MODELS[task]
    files = [
        f"--{expert} {name}" for expert, name in zip(("high", "low"), model.files, strict=False) if "(" not in name
    ]
    return " ".join([model.line, *files, "" if "--task" in model.line or not files else f"--task {task}"])
