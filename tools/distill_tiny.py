"""Distil the embedded text-to-video model to 4 steps without guidance: a LoRA for each expert, on one GPU, offline.

    python -m tools.distill_tiny --out runs/four-step --minutes 6

It asks the model itself (40 steps of UniPC with guidance 3) for videos, trains the LoRAs to reach the same ones in 4
Euler steps, and then compares how often held-out captions come out right. --minutes limits the whole command; a run
that is cut short leaves the best LoRAs so far, and goes on from its own `resume_*.pt` if there is one. On a CPU, try
`--device cpu --steps 3 --batch 2 --bank 4 --start 4 --checks 2 --samples 2 --teacher-steps 8`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from tools.tiny.clips import Size
from tools.tiny.distill import EXPERTS, TASK, Distillation, distill, lora_path, teacher_plan
from tools.tiny.evaluate import CLAIMS, SHEET_CLIPS, contact_sheet, load, make_all, request_of
from wan_core.config import LoraOptions
from wan_lab.results import envelope, result_path, write_result

TINY = Path(__file__).parents[1] / "wan_core/assets/tiny"


def main(arguments: list[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    torch.manual_seed(options.seed)
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = True
        torch.backends.cuda.enable_cudnn_sdp(False)  # the flash kernel suits heads of 64 as well
    teacher = teacher_plan(options.teacher_steps, options.guidance)
    done: dict[str, Any] = {}
    if not options.eval_only:
        torch.set_float32_matmul_precision("high")  # TF32: training does not need more
        done = distill(
            Distillation(
                out=options.out,
                init=options.init,
                size=Size(options.frames, options.size, options.size),
                device=device,
                minutes=options.minutes,
                reserve=options.reserve,
                steps=options.steps,
                batch=options.batch,
                lr=options.lr,
                rank=options.rank,
                bank=options.bank,
                start=options.start,
                share=options.share,
                checks=options.checks,
                teacher=teacher,
                seed=options.seed,
                bf16=options.bf16 if options.bf16 is not None else device.type == "cuda",
            )
        )
    torch.set_float32_matmul_precision("highest")
    evaluate(options, device, done)


def evaluate(options: argparse.Namespace, device: torch.device, done: dict[str, Any]) -> None:
    """Print and write how often held-out captions come out right: teacher, student, and the model in as few steps
    without its LoRAs. Contact sheets beside it."""
    out, samples, guidance = options.out, options.samples, options.guidance
    size = Size(options.frames, options.size, options.size)
    loras = tuple(LoraOptions(path=str(lora_path(out, name)), expert=name) for name in EXPERTS)
    plain, distilled = load(options.init, TASK, device), load(options.init, TASK, device, loras)
    student = {"steps": 4, "solver": "euler", "shift": 5.0}
    few = {"steps": 4, "solver": "unipc"}
    trials = [
        (
            f"{options.teacher_steps} steps, guidance {guidance:g}",
            few | {"steps": options.teacher_steps},
            guidance,
            plain,
        ),
        ("4 steps, LoRA", student, 1.0, distilled),
        (f"4 steps, guidance {guidance:g}", few, guidance, plain),
        ("4 steps, no guidance", few, 1.0, plain),
    ]
    rows: list[dict[str, Any]] = []
    print(f"{samples} held-out captions" + " " * 10 + "forwards" + "".join(f"{claim:>12}" for claim in CLAIMS))
    for n, (name, settings, guidance, pipe) in enumerate(trials):
        request = request_of(size, guidance_high=guidance, guidance_low=guidance, **settings)
        # far from the seed that training drew its noise from
        made = make_all(pipe, request, samples, options.eval_batch, options.seed + 10_000)
        rows.append({"name": name, "size": str(size), "forwards": made.forwards, **made.row()})
        print(f"{name:<28}{made.forwards:>10}" + "".join(f"{rows[-1][c]:>12.1%}" for c in CLAIMS), flush=True)
        if n < 2:
            sheet = contact_sheet(made.videos[:SHEET_CLIPS]).numpy()
            Image.fromarray(sheet).save(out / f"{('teacher', 'student')[n]}.png")
    more = {"seed": options.seed, "training": done}
    result = envelope("distilled", device, rows, program="tools.distill_tiny") | more
    print(write_result(result, result_path(out, result["suite"], device)))
    for name in EXPERTS:
        path = lora_path(out, name)
        print(f"{path.name}: {path.stat().st_size:,} bytes")


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="distill_tiny", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    top.add_argument("--out", type=Path, required=True, help="folder for the results")
    top.add_argument("--init", type=Path, default=TINY, help="folder of the model (default: the embedded one)")
    top.add_argument("--device", help="default: cuda if there is one")
    top.add_argument("--minutes", type=float, default=6.0, help="wall time of the whole command (default 6)")
    top.add_argument("--reserve", type=float, default=30.0, help="seconds of it kept for the comparison (default 30)")
    top.add_argument("--steps", type=int, help="stop training after so many, not by time")
    top.add_argument("--batch", type=int, default=256)
    top.add_argument("--lr", type=float, default=2e-3, help="peak learning rate")
    top.add_argument("--rank", type=int, default=16)
    top.add_argument("--bank", type=int, default=49152, help="pairs kept on the device")
    top.add_argument("--start", type=int, default=12288, help="pairs made before training starts")
    top.add_argument("--share", type=float, default=0.2, help="of the training time spent on new pairs")
    top.add_argument("--checks", type=int, default=512, help="pairs kept for choosing the best weights")
    top.add_argument("--samples", type=int, default=240, help="held-out captions of the comparison")
    top.add_argument("--eval-batch", type=int, default=120)
    top.add_argument("--eval-only", action="store_true", help="compare what is in --out already")
    top.add_argument("--teacher-steps", type=int, default=40)
    top.add_argument("--guidance", type=float, default=3.0, help="of the teacher")
    top.add_argument("--size", type=int, default=96, help="pixels a side (default 96)")
    top.add_argument("--frames", type=int, default=17, help="4n + 1 (default 17)")
    top.add_argument("--seed", type=int, default=0)
    top.add_argument("--bf16", action=argparse.BooleanOptionalAction, help="blocks in bf16 (default: on a GPU)")
    return top


if __name__ == "__main__":
    main()
