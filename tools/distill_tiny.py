"""Distil the embedded text-to-video model to 4 steps without guidance: a LoRA for each expert, on one GPU, offline.

    python -m tools.distill_tiny --out runs/four-step --minutes 6

It asks the model itself (40 steps of UniPC with guidance 3) for videos, trains the LoRAs to reach the same ones in 4
Euler steps, and then compares how often held-out captions come out right. --minutes limits the whole command; a run
that is cut short leaves the best LoRAs so far, and goes on from its own `resume_*.pt` if there is one. On a CPU, try
`--device cpu --steps 3 --batch 2 --bank 4 --start 4 --checks 2 --samples 2 --teacher-steps 8`.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from tools.tiny.clips import Size, held_out_scenes
from tools.tiny.distill import EXPERTS, Distillation, distill, lora_path, merge_lora, student_plan, teacher_plan
from tools.tiny.evaluate import CLAIMS, SHEET_CLIPS, contact_sheet, generate, shares
from tools.tiny.files import part_path
from wan_core.checkpoint import load_dit, load_text_encoder, load_vae
from wan_core.models.wan.model import WanModel
from wan_core.sampling.plan import Plan, make_plan
from wan_lab.metrics import judge
from wan_lab.results import envelope, result_path, write_result
from wan_lab.shapes import draw

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
    evaluate(options, device, teacher, done)


@torch.no_grad()
def evaluate(options: argparse.Namespace, device: torch.device, teacher: Plan, done: dict[str, Any]) -> None:
    """Print and write how often held-out captions come out right: teacher, student, and the model in as few steps
    without its LoRAs. Contact sheets beside it."""
    init, out, samples = options.init, options.out, options.samples
    size = Size(options.frames, options.size, options.size)
    vae = load_vae(part_path(init, "vae"), device=device, dtype=torch.float32)
    text = load_text_encoder(part_path(init, "text_encoder"), device=device, dtype=torch.float32)

    def experts(lora: bool) -> dict[str, WanModel]:
        found: dict[str, WanModel] = {}
        for name in EXPERTS:
            found[name] = load_dit(part_path(init, f"t2v_{name}"), device=device, dtype=torch.float32)
            if lora:
                merge_lora(found[name], lora_path(out, name))
        return found

    student = student_plan()
    few = make_plan(task=teacher.task, steps=4, solver="unipc", guidance_high=1.0, guidance_low=1.0)
    guided = make_plan(
        task=teacher.task, steps=4, solver="unipc", guidance_high=options.guidance, guidance_low=options.guidance
    )
    plain, distilled = experts(False), experts(True)
    trials = [
        (f"{len(teacher.steps)} steps, guidance {options.guidance:g}", teacher, plain),
        ("4 steps, LoRA", student, distilled),
        (f"4 steps, guidance {options.guidance:g}", guided, plain),
        ("4 steps, no guidance", few, plain),
    ]
    scenes = held_out_scenes(samples)
    truth = draw(scenes, seed=options.seed, frames=size.frames, height=size.height, width=size.width).to(device)
    rows: list[dict[str, Any]] = []
    print(f"{samples} held-out captions" + " " * 10 + "forwards" + "".join(f"{claim:>12}" for claim in CLAIMS))
    for name, plan, models in trials:
        begin = time.monotonic()
        # far from the seed that training drew its noise from
        videos = generate(plan, models, vae, text, scenes, truth, batch=options.eval_batch, seed=options.seed + 10_000)
        seconds = time.monotonic() - begin
        verdicts = [judge(video, scene) for video, scene in zip(videos, scenes, strict=True)]
        row = {
            "name": name,
            "size": f"{size.width}x{size.height}x{size.frames}",
            "seconds": round(seconds / samples, 4),
            "samples": samples,
            "forwards": plan.forwards,
            **shares(verdicts),
        }
        rows.append(row)
        print(f"{name:<28}{plan.forwards:>10}" + "".join(f"{row[c]:>12.1%}" for c in CLAIMS), flush=True)
        if plan in (teacher, student):
            sheet = "teacher" if plan is teacher else "student"
            Image.fromarray(contact_sheet(videos[:SHEET_CLIPS]).numpy()).save(out / f"{sheet}.png")
    result = envelope("distilled", device, rows, program="tools.distill_tiny") | {
        "seed": options.seed,
        "training": done,
    }
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
