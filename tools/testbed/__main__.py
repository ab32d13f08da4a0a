"""The test bed: a miniature Wan 2.2 with long-range structure, trained on one GPU, offline.

    python -m tools.testbed folders --to /tmp/testbed                     # t2v and i2v of the kept weights, for --model
    python -m tools.testbed eval    --model /tmp/testbed/t2v --out FOLDER --quick --setting sparse:fast
    python -m tools.testbed train   --out /tmp/mine --minutes 8           # VAE, then both experts
    python -m tools.testbed folders --out /tmp/mine --to /tmp/mine

`train` goes on from what --out already holds. --minutes counts from the start of the command; the learning rate
reaches zero when they are over. On a CPU, try `--device cpu --steps 3 --size 64x48 --frames 9`.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch

from tools.testbed.drawing import Size
from tools.testbed.evaluate import add_options, evaluate
from tools.testbed.experts import CONFIG, Training, train_experts
from tools.testbed.folders import KEPT, write_folders
from tools.testbed.vae import train_vae
from wan_core.config.checks import parse_size


def main(arguments: list[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    if options.command == "eval":
        evaluate(options)
        return
    width, height = parse_size(options.size)
    size = Size(options.frames, height, width)
    if options.command == "folders":
        write_folders(options.out, options.to, size=size, samples=options.samples)
        return
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    options.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")  # TF32: training does not need more
    torch.backends.cudnn.benchmark = True  # every shape recurs thousands of times
    torch.backends.cudnn.benchmark_limit = 5
    shared = {"out": options.out, "size": size, "device": device, "steps": options.steps, "seed": options.seed}
    exists = (options.out / "vae.safetensors").is_file()
    minutes = options.vae_minutes if options.vae_minutes is not None else 0.0 if exists else 3.0
    if minutes:
        train_vae(minutes=minutes, **shared)
    if options.minutes > minutes:
        config = CONFIG if options.layers is None else replace(CONFIG, num_layers=options.layers)
        train_experts(Training(minutes=options.minutes, compile=options.compile, config=config, **shared))


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="python -m tools.testbed", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = top.add_subparsers(dest="command", required=True)
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--size", default="384x256", help="WIDTHxHEIGHT (default %(default)s)")
    shared.add_argument("--frames", type=int, default=41, help="4n + 1 (default %(default)s)")
    train = commands.add_parser("train", parents=[shared], help="train the VAE, then both experts")
    train.add_argument("--out", type=Path, required=True, help="folder of what training leaves")
    train.add_argument("--device", help="default: cuda if there is one")
    train.add_argument("--minutes", type=float, default=8.0, help="wall time of the command (default %(default)s)")
    train.add_argument("--vae-minutes", type=float, help="of them for the VAE (default: 3, 0 if --out has one)")
    train.add_argument("--steps", type=int, help="stop each part after so many steps, not by time")
    train.add_argument("--layers", type=int, help="blocks of new experts (default: 5)")
    train.add_argument("--seed", type=int, default=0, help="a run that goes on takes another, for other clips")
    train.add_argument("--compile", action="store_true", help="compile the blocks: slower to start, faster steps")
    folders = commands.add_parser("folders", parents=[shared], help="write the folders for --model")
    folders.add_argument("--out", type=Path, default=KEPT, help="what training left (default: the kept weights)")
    folders.add_argument("--to", type=Path, required=True, help="folder of t2v and i2v")
    folders.add_argument("--samples", type=int, default=48, help="captions and first frames (default %(default)s)")
    add_options(commands.add_parser("eval", help="what the model makes, and what settings lose"))
    return top


if __name__ == "__main__":
    main()
