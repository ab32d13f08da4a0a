"""The VAE, held by ComfyUI's memory manager. Weights are read when first used."""

from __future__ import annotations

from comfy_api.latest import io, ui
from torch import nn

from wan_core.checkpoint import load_vae
from wan_core.config import VAE_PRECISIONS
from wan_core.execution.optimize import optimize_vae
from wan_core.models.vae.layers import AttentionBlock
from wan_core.models.vae.vae import VideoVAE
from wan_core.ops.attention.parts import heads_in_pieces
from wan_core.pipeline.model_parts import Part
from wan_core.pipeline.settings import PartToLoad, compute_dtype
from wan_core.pipeline.sources import recognise

from . import host
from .files import TINY_T2V, embedded, fingerprint, locate, name_of, words_of
from .schema import ADVANCED, schema
from .sockets import VAESocket
from .workers import RemoteVAE, WorkersSocket, workers_input


class WanCoreVAELoader(io.ComfyNode):
    """The causal video VAE, 2.1 or 2.2, on a VAE socket."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "WanCoreVAELoader",
            "WanCore VAE Loader",
            aliases=("wan vae", "load vae"),
            shows_text=True,
            description="A Wan video VAE. Its output also feeds ComfyUI's own VAE Decode and WanImageToVideo.",
            inputs=[
                io.Combo.Input(
                    "vae",
                    options=[*embedded("vae"), *host.model_names("vae")],
                    default=TINY_T2V,
                    tooltip="Wan 2.1 VAE (for A14B) or Wan 2.2 VAE (for TI2V-5B) in models/vae.",
                ),
                io.Combo.Input(
                    "precision",
                    **ADVANCED,
                    options=list(VAE_PRECISIONS),
                    default="auto",
                    tooltip="What the VAE computes in. 'auto': bf16 on a GPU, fp32 on a CPU.",
                ),
                workers_input(),
            ],
            outputs=[io.Vae.Output("vae_out", display_name="vae", tooltip="The VAE.")],
        )

    @classmethod
    def validate_inputs(cls, vae: str | None = None) -> bool:
        if vae is not None:
            cls._part(vae)
        return True

    @classmethod
    def fingerprint_inputs(
        cls, vae: str | None = None, precision: str = "", workers: None = None
    ) -> list[tuple[str, int]]:
        return fingerprint(locate("vae", vae, embedded("vae"))) if vae is not None else []

    @classmethod
    async def execute(cls, vae: str, precision: str, workers: WorkersSocket | None = None) -> io.NodeOutput:
        """`async`, as of every loader: ComfyUI runs such nodes first, and weights are read while others work."""
        part = cls._part(vae)
        dtype = compute_dtype(precision, host.device() if workers is None else workers.device)
        held, words = host.Held("VAE", PartToLoad(part, dtype), _optimized), words_of(part, name_of(dtype))
        if workers is None:
            host.read_ahead([held], [()])
            return io.NodeOutput(VAESocket(held), ui=ui.PreviewText(words))
        spec = {"path": str(part.path), "precision": precision}
        return io.NodeOutput(RemoteVAE(held, workers, spec), ui=ui.PreviewText(words))

    @staticmethod
    def _part(name: str) -> Part:
        return recognise(locate("vae", name, embedded("vae")), "vae", load_vae)


def _optimized(module: nn.Module) -> nn.Module:
    assert isinstance(module, VideoVAE)
    vae = optimize_vae(module, host.device())
    if host.device().type == "cpu":  # one frame can take minutes there
        for layer in vae.modules():
            layer.register_forward_pre_hook(_check_interruption)
            if isinstance(layer, AttentionBlock):
                layer.attend = heads_in_pieces(layer.attend, host.check_interruption)
    return vae


def _check_interruption(*_: object) -> None:
    host.check_interruption()
