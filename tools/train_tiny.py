"""Train the embedded model: a miniature Wan 2.2 on drawn clips, on one GPU, offline.

    python -m tools.train_tiny vae    --out runs/tiny --minutes 8
    python -m tools.train_tiny t2v    --out runs/tiny --minutes 9
    python -m tools.train_tiny i2v    --out runs/tiny --minutes 6

A phase reads what the phases before it left in --init (the same folder as --out unless given), and goes on from its
own `resume_*.pt` if there is one, else from its own finished part. A text encoder that is in --init without its
`resume_text.pt` stays as it is. --minutes limits the whole command; the learning rate reaches zero when they are
over. Transformers are trained on several sizes in turn. The miniature of Animate-2 was trained by
`driven` of commit 35959e36. How often held-out captions come true, `wancore quality --model tiny` says of the parts in
`wan_core/assets/tiny`. On a CPU, try `--device cpu --steps 3 --batch 2 --size 32 --frames 5`.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch

from tools.tiny.clips import Size
from tools.tiny.experts import ROUND, Training, train_i2v, train_t2v
from tools.tiny.vae import train_vae

DEFAULTS = {  # phase: batch, learning rate, clips kept
    "vae": (8, 7e-4, 4096),
    "t2v": (256, 2e-3, 65536),
    "i2v": (256, 2e-3, 65536),
}


def main(arguments: list[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    init = options.init or options.out
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    sizes = [replace(size, frames=options.frames) for size in options.size or ()]
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")  # TF32: training does not need more
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = True  # every shape recurs thousands of times
        torch.backends.cudnn.benchmark_limit = 5
        torch.backends.cuda.enable_cudnn_sdp(False)  # the flash kernel suits heads of 32 and 64 as well
    batch, lr, bank = DEFAULTS[options.phase]
    common = {
        "device": device,
        "minutes": options.minutes,
        "steps": options.steps,
        "batch": options.batch or batch,
        "lr": options.lr or lr,
        "bank": options.bank or bank,
        "seed": options.seed,
    }
    if options.phase == "vae":
        train_vae(
            options.out, init, size=sizes[0] if sizes else Size(), bf16=options.bf16, checks=options.checks, **common
        )
        return
    bf16 = options.bf16 if options.bf16 is not None else device.type == "cuda"
    turns = sizes or [replace(size, frames=options.frames) for size in ROUND]
    train = {"t2v": train_t2v, "i2v": train_i2v}[options.phase]
    train(Training(out=options.out, init=init, sizes=turns, bf16=bf16, compile=options.compile, **common))


def read_size(text: str) -> Size:
    """`96`, or `128x96`, width first."""
    width, _, height = text.partition("x")
    return Size(width=int(width), height=int(height or width))


def parser() -> argparse.ArgumentParser:
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--out", type=Path, required=True, help="folder for the results")
    shared.add_argument("--init", type=Path, help="folder with what earlier phases and runs left (default: --out)")
    shared.add_argument("--device", help="default: cuda if there is one")
    shared.add_argument(
        "--size",
        type=read_size,
        nargs="+",
        help="pixels a side, or WIDTHxHEIGHT; several take turns, one a step (default: 96, and for transformers "
        f"{' '.join(f'{size.width}x{size.height}' for size in ROUND)})",
    )
    shared.add_argument("--frames", type=int, default=17, help="4n + 1 (default 17)")
    shared.add_argument("--batch", type=int)
    shared.add_argument("--seed", type=int, default=0)
    shared.add_argument("--steps", type=int, help="stop after so many, not by time")
    shared.add_argument("--minutes", type=float, default=9.0, help="wall time of the whole command (default 9)")
    shared.add_argument("--lr", type=float, help="peak learning rate (default 7e-4 for the VAE, else 2e-3)")
    shared.add_argument("--bank", type=int, help="clips kept on the device")
    shared.add_argument(
        "--bf16",
        action=argparse.BooleanOptionalAction,
        help="bf16 in blocks and convolutions (default on a GPU: transformers yes, VAE if much faster)",
    )
    top = argparse.ArgumentParser(
        prog="train_tiny", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    phases = top.add_subparsers(dest="phase", required=True)
    vae = phases.add_parser("vae", parents=[shared], help="the video VAE")
    vae.add_argument("--checks", type=int, default=112, help="held-out clips measured at the end")
    for name, what in {"t2v": "text encoder and text-to-video experts", "i2v": "image-to-video experts"}.items():
        phase = phases.add_parser(name, parents=[shared], help=what)
        phase.add_argument(
            "--compile", action="store_true", help="compile the blocks: a minute at the start, faster steps"
        )
    return top


if __name__ == "__main__":
    main()
