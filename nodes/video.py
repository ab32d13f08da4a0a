"""Nodes that decode latents to frames or to a video file."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from comfy_api.latest import io
from torch import Tensor

from wan_core.execution.report import Report, device_name
from wan_core.media.mp4 import Encoder, check_frame_sides, checked_rate, encode
from wan_core.media.sound import Sound
from wan_core.models.vae.config import check_latents
from wan_core.models.vae.tiling import TileSpec
from wan_core.pipeline.decode import each_once, images_shape

from . import host
from .schema import ADVANCED, output, schema
from .sockets import REPORT, VAESocket

LATENT = (
    io.Vae.Input("vae", tooltip="The VAE that belongs to the model: WanCore's or ComfyUI's own."),
    io.Latent.Input("latent", tooltip="From the sampler. It can be decoded again if decoding fails."),
)
TILING = io.Combo.Input(
    "tiling",
    **ADVANCED,
    options=["auto", "always"],
    default="auto",
    tooltip="'auto': the whole picture, or tiles if it does not fit into memory. 'always': tiles.",
)
REPORT_SO_FAR = REPORT.Input("report", optional=True, tooltip="The sampler's report, to which the decoding is added.")


class WanCoreVAEDecode(io.ComfyNode):
    """Decode latents to frames, a few at a time."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "WanCoreVAEDecode",
            "WanCore VAE Decode",
            aliases="wan decode, vae decode tiled",
            description="Decodes a few frames at a time, in tiles if the whole picture does not fit into memory.",
            inputs=[
                *LATENT,
                TILING,
                REPORT_SO_FAR,
            ],
            outputs=[
                output(io.Image, "image", "The frames, for Create Video."),
                output(REPORT, "report_out", "The report with the decoding added."),
            ],
        )

    @classmethod
    def execute(cls, vae: Any, latent: dict[str, Any], tiling: str, report: Report | None = None) -> io.NodeOutput:
        report = _report_with(vae, report)
        samples, tile = latent["samples"], TileSpec() if tiling == "always" else None
        if isinstance(vae, VAESocket):
            bar = host.Progress(1)
            images = vae.decode_images(
                samples, report, tile, lambda done, total: bar.update(done, total, f"frame {done} of {total}")
            )
        else:
            images = _decode_native(vae, samples, tile, report)
        return io.NodeOutput(host.to_intermediate(images), report)


ENCODERS: dict[str, Encoder] = {
    "as Save Video": Encoder(crf=23, threads="SLICE", lookahead=None),
    "all cores": Encoder(crf=23),
    "fast": Encoder(crf=23, preset="veryfast", lookahead=None),
}
"""What people choose -> settings. Save Video has those of libx264 itself, and PyAV's threads."""


class WanCoreDecodeToVideo(io.ComfyNode):
    """Decode latents and encode H.264 at the same time."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "WanCoreDecodeToVideo",
            "WanCore Decode to Video",
            aliases="wan decode, vae decode, create video, h264, save video",
            description="Decodes a few frames at a time and encodes them as H.264 while the next ones are decoded. "
            "Save Video stores the result without encoding it again.",
            inputs=[
                *LATENT,
                io.Float.Input(
                    "fps", default=16.0, min=0.01, max=1000.0, step=0.01, tooltip="Wan A14B: 16, TI2V-5B: 24."
                ),
                io.Combo.Input(
                    "encoder",
                    **ADVANCED,
                    options=list(ENCODERS),
                    default="all cores",
                    tooltip="'as Save Video': the same settings (crf 23, medium). 'all cores': the same quality, "
                    "sooner. 'fast': preset veryfast, larger files of the same quality.",
                ),
                TILING,
                io.Audio.Input("audio", optional=True, tooltip="Sound of the video; it is cut where the frames end."),
                REPORT_SO_FAR,
            ],
            outputs=[
                output(io.Video, "video", "For Save Video."),
                output(REPORT, "report_out", "The report with the decoding added."),
            ],
        )

    @classmethod
    def execute(
        cls,
        vae: Any,
        latent: dict[str, Any],
        fps: float,
        encoder: str,
        tiling: str,
        audio: dict[str, Any] | None = None,
        report: Report | None = None,
    ) -> io.NodeOutput:
        report = _report_with(vae, report)
        rate = checked_rate(fps)
        with host.temporary_video() as path:
            # Without `write_mp4`, which makes sure that a file survives a power cut: this one is read, and deleted.
            write = partial(encode, path, rate=rate, encoder=ENCODERS[encoder], sound=_sound(audio))
            _decode_and_write(vae, latent["samples"], TileSpec() if tiling == "always" else None, report, write)
            return io.NodeOutput(host.video_of(path), report)


def _report_with(vae: Any, before: Report | None) -> Report:
    """A report for decoding by `vae`; what was reported before is in it, and where the VAE is, if that is elsewhere."""
    device = getattr(vae, "device", host.device())
    if before is None:
        return Report(device)
    report = before.branch()
    if device != report.device:
        report.notes.append(f"decode: the VAE ran on {device}, {device_name(device)}")
    return report


def _decode_and_write(
    vae: Any, samples: Tensor, tile: TileSpec | None, report: Report, write: Callable[[Iterable[Any]], object]
) -> None:
    """Hand the frames to `write`, uint8 [H, W, 3]: with a VAE of Wan while the next ones are decoded."""
    native = None if isinstance(vae, VAESocket) else host.native_vae_config(vae)
    config = vae.config if isinstance(vae, VAESocket) else native
    if config is None:
        images = _decode_native(vae, samples, tile, report)
        with report.phase("write"):
            write((image * 255).round().clamp(0, 255).byte().numpy() for image in images.cpu())
        return
    _, height, width, _ = images_shape(config, samples)
    check_frame_sides(width, height)
    bar = host.Progress(1)
    decode_to = vae.decode_to if native is None else partial(host.decode_native_to, vae, native)
    decode_to(
        samples,
        report,
        lambda pieces: write(each_once(pieces)),
        dtype=torch.uint8,
        tile=tile,
        on_frames=lambda done, total: bar.update(done, total, f"frame {done} of {total}"),
        rest="write",
    )


def _sound(audio: dict[str, Any] | None) -> Sound | None:
    """The sound of the first entry of ComfyUI's AUDIO. Raises OptionError."""
    if audio is None:
        return None
    return Sound(audio["waveform"][0].cpu().float().numpy(), int(audio["sample_rate"]))


def _decode_native(vae: Any, samples: Tensor, tile: TileSpec | None, report: Report) -> Tensor:
    """Pictures [F, H, W, 3] in 0..1 by a VAE of ComfyUI's own. Raises OptionError for latents of another VAE."""
    if isinstance(channels := getattr(vae, "latent_channels", None), int) and samples.ndim == 5:
        check_latents(channels, samples.shape)
    with report.phase("decode"):
        sides = {} if tile is None else {"tile_x": tile.width, "tile_y": tile.height, "overlap": tile.overlap}
        return (vae.decode_tiled(samples, **sides) if tile else vae.decode(samples)).flatten(0, -4)
