"""The CLIP vision encoder, held by ComfyUI's memory manager. Weights are read when first used."""

from __future__ import annotations

from comfy_api.latest import io, ui

from wan_core.pipeline.model_parts import Part
from wan_core.pipeline.settings import PartToLoad, compute_dtype
from wan_core.pipeline.sources import recognise_vision, vision_dtype

from . import host
from .files import TINY_T2V, embedded, fingerprint, locate, name_of, words_of
from .schema import schema
from .sockets import VisionSocket


class WanCoreVisionLoader(io.ComfyNode):
    """CLIP ViT-H as Wan uses it, or the embedded model's, on a CLIP_VISION socket."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "WanCoreVisionLoader",
            "WanCore CLIP Vision Loader",
            aliases=("clip vision loader", "clip_vision_h", "wan animate", "wan i2v"),
            shows_text=True,
            description="The CLIP vision encoder of models that look at a picture: Wan-Animate-2, Wan2.2-Animate-14B, "
            "Wan 2.1 image-to-video. Its output feeds ComfyUI's CLIPVisionEncode, with crop none.",
            inputs=[
                io.Combo.Input(
                    "clip_vision",
                    options=[*embedded("clip_vision"), *host.model_names("clip_vision")],
                    default=TINY_T2V,
                    tooltip="clip_vision_h.safetensors in models/clip_vision, or the official "
                    "models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth.",
                ),
            ],
            outputs=[
                io.ClipVision.Output("clip_vision_out", display_name="clip_vision", tooltip="For CLIPVisionEncode.")
            ],
        )

    @classmethod
    def validate_inputs(cls, clip_vision: str | None = None) -> bool:
        if clip_vision is not None:
            cls._part(clip_vision)
        return True

    @classmethod
    def fingerprint_inputs(cls, clip_vision: str | None = None) -> list[tuple[str, int]]:
        found = None if clip_vision is None else locate("clip_vision", clip_vision, embedded("clip_vision"))
        return [] if found is None else fingerprint(found)

    @classmethod
    async def execute(cls, clip_vision: str) -> io.NodeOutput:
        """`async`, as of every loader: ComfyUI runs such nodes first, and weights are read while others work."""
        part = cls._part(clip_vision)
        dtype = vision_dtype(compute_dtype("checkpoint", host.device()))
        held = host.Held("CLIP vision encoder", PartToLoad(part, dtype))
        host.read_ahead([held], [()])
        return io.NodeOutput(VisionSocket(held), ui=ui.PreviewText(words_of(part, name_of(dtype))))

    @staticmethod
    def _part(name: str) -> Part:
        return recognise_vision(locate("clip_vision", name, embedded("clip_vision")))
