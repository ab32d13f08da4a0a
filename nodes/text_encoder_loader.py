"""The text encoder of a prompt: UMT5, held by ComfyUI's memory manager. Weights are read when first used."""

from __future__ import annotations

from comfy_api.latest import io, ui

from wan_core.checkpoint import load_text_encoder
from wan_core.config import PRECISIONS, QUANTIZED
from wan_core.execution.memory.residency import Residency
from wan_core.pipeline.model_parts import Part
from wan_core.pipeline.settings import PartToLoad, compute_dtype, holding
from wan_core.pipeline.sources import recognise

from . import host
from .files import TINY_T2V, embedded, fingerprint, locate, name_of, words_of
from .schema import ADVANCED, schema
from .sockets import TextSocket
from .workers import RemoteText, WorkersSocket, workers_input

PLAIN = tuple(name for name in PRECISIONS if name not in QUANTIZED)


class WanCoreTextEncoderLoader(io.ComfyNode):
    """UMT5 with its tokenizer, on a CLIP socket."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "WanCoreTextEncoderLoader",
            "WanCore Text Encoder Loader",
            aliases=("wan text encoder", "umt5", "clip loader", "t5"),
            shows_text=True,
            description="A UMT5 text encoder. Its output also feeds ComfyUI's own CLIP Text Encode.",
            inputs=[
                io.Combo.Input(
                    "text_encoder",
                    options=[*embedded("text_encoder"), *host.model_names("text_encoders")],
                    default=TINY_T2V,
                    tooltip="UMT5 in models/text_encoders, in the official, Diffusers or ComfyUI layout, or GGUF. "
                    "Files without a tokenizer inside need spiece.model beside them.",
                ),
                io.Combo.Input(
                    "precision",
                    **ADVANCED,
                    options=list(PLAIN),
                    default="checkpoint",
                    tooltip="What the encoder computes in. 'checkpoint': bf16 on a GPU, fp32 on a CPU, and packed "
                    "weights (GGUF, FP8 with scales) stay packed in memory.",
                ),
                workers_input(),
            ],
            outputs=[io.Clip.Output("clip", display_name="clip", tooltip="The text encoder.")],
        )

    @classmethod
    def validate_inputs(cls, text_encoder: str | None = None) -> bool:
        if text_encoder is not None:
            cls._part(text_encoder)
        return True

    @classmethod
    def fingerprint_inputs(
        cls, text_encoder: str | None = None, precision: str = "", workers: None = None
    ) -> list[tuple[str, int]]:
        return (
            fingerprint(locate("text_encoders", text_encoder, embedded("text_encoder")))
            if text_encoder is not None
            else []
        )

    @classmethod
    async def execute(cls, text_encoder: str, precision: str, workers: WorkersSocket | None = None) -> io.NodeOutput:
        """`async`, as of every loader: ComfyUI runs such nodes first, and weights are read while others work."""
        part = cls._part(text_encoder)
        device = host.device() if workers is None else workers.device
        dtype = compute_dtype(precision, device)
        quantization = holding(part, None, precision == "checkpoint", device)
        streaming = Residency(host.device(), "stream")
        held = host.Held("text encoder", PartToLoad(part, dtype, quantization), residency=streaming)
        words = words_of(part, name_of(dtype))
        if workers is None:
            host.read_ahead([held], [()])
            return io.NodeOutput(TextSocket(held), ui=ui.PreviewText(words))
        spec = {"path": str(part.path), "precision": precision}
        return io.NodeOutput(RemoteText(held, workers, spec), ui=ui.PreviewText(words))

    @staticmethod
    def _part(name: str) -> Part:
        path = locate("text_encoders", name, embedded("text_encoder"))
        return recognise(path, "text_encoder", load_text_encoder)
