"""Nodes that decode latents to frames and encode frames to latents."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io
from torch import Tensor

from wan_core.execution.report import Report
from wan_core.models.vae.tiling import TileSpec

from . import host
from .schema import ADVANCED, aliases
from .sockets import REPORT, VAESocket


class WanCoreVAEDecode(io.ComfyNode):
    """Decode latents to frames, a few at a time."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanCoreVAEDecode",
            display_name="WanCore VAE Decode",
            category="WanCore",
            **aliases("WanCoreVAEDecode"),
            description="Decodes a few frames at a time, in tiles if the whole picture does not fit into memory.",
            inputs=[
                io.Vae.Input("vae", tooltip="The VAE that belongs to the model: WanCore's or ComfyUI's own."),
                io.Latent.Input("latent", tooltip="From the sampler. It can be decoded again if decoding fails."),
                io.Combo.Input(
                    "tiling",
                    **ADVANCED,
                    options=["auto", "always"],
                    default="auto",
                    tooltip="'auto': the whole picture, or tiles if it does not fit into memory. 'always': tiles.",
                ),
                REPORT.Input("report", optional=True, tooltip="The sampler's report, to which the decoding is added."),
            ],
            outputs=[
                io.Image.Output("image", display_name="image", tooltip="The frames, for Create Video."),
                REPORT.Output("report_out", display_name="report", tooltip="The report with the decoding added."),
            ],
        )

    @classmethod
    def execute(cls, vae: Any, latent: dict[str, Any], tiling: str, report: Report | None = None) -> io.NodeOutput:
        report = Report(host.device()) if report is None else report.branch()
        samples, tile = latent["samples"], TileSpec() if tiling == "always" else None
        if isinstance(vae, VAESocket):
            bar = host.Progress(1)
            images = vae.decode_images(
                samples, report, tile, lambda done, total: bar.update(done, total, f"frame {done} of {total}")
            )
        else:
            with report.phase("decode"):
                sides = {} if tile is None else {"tile_x": tile.width, "tile_y": tile.height, "overlap": tile.overlap}
                images = (vae.decode_tiled(samples, **sides) if tile else vae.decode(samples)).flatten(0, -4)
        return io.NodeOutput(host.to_intermediate(images), report)


class WanCoreVAEEncode(io.ComfyNode):
    """Encode frames to latents, a few at a time."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanCoreVAEEncode",
            display_name="WanCore VAE Encode",
            category="WanCore",
            **aliases("WanCoreVAEEncode"),
            description="Encodes a video's frames a few at a time.",
            inputs=[
                io.Vae.Input("vae", tooltip="A Wan VAE: WanCore's or ComfyUI's own."),
                io.Image.Input(
                    "image",
                    tooltip="The frames: 4n + 1 of them, width and height multiples of 8 (Wan 2.1 VAE) or 16 (2.2).",
                ),
            ],
            outputs=[
                io.Latent.Output(
                    "latent", display_name="latent", tooltip="Un-normalised latents, as everywhere in ComfyUI."
                )
            ],
        )

    @classmethod
    def execute(cls, vae: Any, image: Tensor) -> io.NodeOutput:
        return io.NodeOutput({"samples": vae.encode(image)})
