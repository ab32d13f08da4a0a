"""The commands generate, warmup and decode, which write a video in the format that its name says."""

from __future__ import annotations

import argparse
import secrets
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wan_core.cli.options import engine_of, outputs_of, values_of
from wan_core.cli.parsing import program
from wan_core.cli.progress import ProgressLine
from wan_core.config import RANDOM_SEED, LoadOptions, OptionError, Request
from wan_core.config.outputs import Outputs, is_special
from wan_core.config.printing import command
from wan_core.config.table import from_values

if TYPE_CHECKING:
    from wan_core.pipeline.run import Watch


def request_of(options: argparse.Namespace) -> Request:
    seed = secrets.randbelow(2**32) if options.seed == RANDOM_SEED else options.seed
    return from_values(Request, values_of(options), prompt=options.prompt or "", seed=seed)


def load_options_of(options: argparse.Namespace) -> LoadOptions:
    """The load options that the parsed arguments describe. Raises OptionError."""
    return from_values(LoadOptions, values_of(options))


def run_warmup(options: argparse.Namespace) -> int:
    from wan_core.pipeline.pipeline import LocalEngine

    request = request_of(options)
    progress = ProgressLine()
    pipe = LocalEngine().load(load_options_of(options), request, watching(progress))
    pipe.warm_up(request, progress.phase)
    print(pipe.report.text())
    return 0


def run_generate(options: argparse.Namespace) -> int:
    """Returns 1 if the video is complete and another file that was asked for could not be written."""
    request, load_options = request_of(options), load_options_of(options)
    with outputs_of(options) as outputs:
        out = video_output(outputs, options.out, request.audio is not None)
        if options.save_latents is None:  # latents kept after an earlier failed run are never overwritten
            kept = out.with_suffix(".latents.safetensors")
            latents = outputs.add("latents kept for --out", kept, overwrite=False, quiet=True, sealed=True)
        else:
            latents = outputs.add("--save-latents", options.save_latents, sealed=True)
        report = None if options.report is None else outputs.add("--report", options.report)
        # By the name that was asked for: a claim that a lost machine or container left changes that of the video.
        files = GeneratedFiles(out, latents, report, options.out.with_suffix(".clips"))
        progress = ProgressLine(request.seed, outputs.say_renamed)
        return generate_files(options, load_options, request, files, progress, outputs.still_free)


@dataclass(frozen=True)
class GeneratedFiles:
    video: Path
    latents: Path
    report: Path | None
    clips: Path  # folder for what is finished of a video; files of several have names of their own


def generate_files(
    options: argparse.Namespace,
    load_options: LoadOptions,
    request: Request,
    files: GeneratedFiles,
    progress: ProgressLine,
    still_free: Callable[[Path], Path],
) -> int:
    """Make the video and write the files. Latents that were kept stay if a later phase fails. still_free: see
    `Outputs`."""
    from wan_core.pipeline.clips import remove_kept

    kept: list[Path] = []
    writing = VideoWriting(files.video, progress, request.audio, still_free)
    try:
        with closing(engine_of(options)) as engine:
            watch = replace(
                watching(progress, kept.append),
                keep_latents=files.latents,
                must_keep=options.save_latents is not None,
                keep_clips=files.clips,
                write=writing.write,
            )
            result = engine.generate(load_options, request, watch)
        video = writing.path if writing.fault is None else writing.elsewhere(result)
    except BaseException:
        progress.end()
        if any(files.clips.glob("*-*")):
            same = f"the same command with --seed {request.seed}" if options.seed == RANDOM_SEED else "the same command"
            print(f"what was finished is in {files.clips}: {same} goes on from it", file=sys.stderr)
        for path in kept:
            print(f"the finished latents are in {path}", file=sys.stderr)
            if not (options.model or "").startswith("random:") or options.vae is not None:
                decode = decode_command(options, path, files.video)
                print(f"this makes a video of them:\n{decode}", file=sys.stderr)
        raise
    progress.end()
    missing = [] if kept or options.save_latents is None else [f"no latents in {files.latents}"]
    if video == writing.path:
        remove_kept(result.kept_clips)
        if options.save_latents is None:
            files.latents.unlink(missing_ok=True)
    try:
        if files.report is not None:
            result.report.save(still_free(files.report))
    except OSError as fault:  # the video is complete whatever happens here
        missing.append(f"no report in {files.report}: {fault.strerror or fault}")
    print(result.report.text())
    print(f"  seed {request.seed}")
    print(video)
    if video != writing.path:
        missing.append(f"the video is in {video} and not in {writing.path}")
    if missing:
        print(f"{program()} generate: {'; '.join(missing)}", file=sys.stderr)
    return int(bool(missing))


def watching(progress: ProgressLine, on_kept: Callable[[Path], None] = lambda _: None) -> Watch:
    from wan_core.pipeline.run import Watch

    return Watch(
        found=progress.found,
        read=progress.read,
        loaded=progress.end,
        planned=progress.planned,
        phase=progress.phase,
        step=progress.step,
        kept=on_kept,
    )


def decode_command(options: argparse.Namespace, latents: Path, out: Path) -> str:
    """The command that makes the video `out` of kept latents, with the VAE that this run would have used."""
    words = ["decode", str(latents)]
    for name in ("model", "vae"):
        if getattr(options, name) is not None:
            words += [f"--{name}", getattr(options, name)]
    for name, default in (("vae_precision", "auto"), ("device", "auto")):
        if getattr(options, name) != default:
            words += [f"--{name.replace('_', '-')}", getattr(options, name)]
    return command(*words, "--out", str(out), *["--overwrite"] * options.overwrite)


def run_decode(options: argparse.Namespace) -> int:
    from wan_core.checkpoint.save import load_latents
    from wan_core.execution.report import Report
    from wan_core.media.mp4 import check_frame_sides, write_video
    from wan_core.pipeline.decode import decode_latents, images_shape
    from wan_core.pipeline.load import load_vae_only
    from wan_core.pipeline.pipeline import metadata

    with outputs_of(options) as outputs:
        out = video_output(outputs, options.out)
        latents, fps, settings = load_latents(options.latents)
        vae, device = load_vae_only(options.model, options.vae, options.device, options.vae_precision, latents.shape[1])
        report = Report(device, settings=settings)
        count, height, width, _ = images_shape(vae.config, latents)
        check_frame_sides(width, height)
        outputs.say_renamed()
        progress = ProgressLine()
        progress.phase("decode")

        def write(frames: Iterator[Any]) -> None:
            write_video(out, progress.frames(frames, count), fps=fps, metadata=metadata(settings))

        decode_latents(vae, latents.to(device), report, write)
        progress.end()
    print(report.text())
    print(out)
    return 0


def video_output(outputs: Outputs, path: Path, sounds: bool = False) -> Path:
    """Where the video that --out names is written. sounds: it has sound. Raises OptionError."""
    from wan_core.media.mp4 import is_folder

    if path.name in ("", "..") or is_special(path):
        raise OptionError(f"--out {path} is no name for a video: give one that ends in .mp4, or has no ending")
    return outputs.add("--out", path, pictures=is_folder(path, sounds))


class VideoWriting:
    """Writes the video to `path` while it is decoded, or else into the folder for temporary files: it took too long to
    be lost. audio: path of its sound, which is read before anything is made. fault: why `path` could not be written.
    still_free: see `Outputs`. Raises OptionError for sound that cannot be read."""

    def __init__(
        self, path: Path, progress: ProgressLine, audio: str | None, still_free: Callable[[Path], Path]
    ) -> None:
        self.path, self.progress, self.sound, self.still_free = path, progress, None, still_free
        if audio is not None:
            from wan_core.media.sound import read_sound

            self.sound = read_sound(audio)
        self.fault: str | None = None

    def write(self, frames: Iterator[Any], /, *, fps: int, settings: Mapping[str, Any]) -> None:
        from wan_core.media.mp4 import write_video
        from wan_core.pipeline.pipeline import metadata

        counted = self.progress.frames(frames, settings["frames"])
        try:
            self.path = self.still_free(self.path)
            write_video(self.path, counted, fps=fps, sound=self.sound, metadata=metadata(settings))
        except (OSError, OptionError) as fault:  # the disk is full, or the folder is gone
            self.fault = f"the video could not be written to {self.path}: {getattr(fault, 'strerror', None) or fault}"
            print(self.fault, file=sys.stderr)

    def elsewhere(self, result: Any) -> Path:
        """Where it is instead. Raises OSError where it fits nowhere."""
        from wan_core.media.mp4 import write_video
        from wan_core.pipeline.pipeline import metadata

        settings = metadata(result.report.settings)
        try:
            with result.report.phase("write"), Outputs({}) as outputs:
                elsewhere = video_output(outputs, Path(tempfile.gettempdir(), self.path.name))
                return write_video(elsewhere, result.frames, fps=result.fps, sound=self.sound, metadata=settings)
        except (OSError, OptionError) as fault:
            second = getattr(fault, "strerror", None) or fault
            raise OSError(f"{self.fault}; nor to {tempfile.gettempdir()}: {second}") from fault
