"""Node for speed presets: step cache, sparse attention and guidance as a search found them together."""

from __future__ import annotations

from comfy_api.latest import io, ui

from wan_core.config import OptionError, SkipOptions
from wan_core.sampling.cache.arguments import speed_options
from wan_core.sampling.cache.skipping import skip_words
from wan_core.sampling.speed_presets import SUFFIX, speed_names

from . import host
from .schema import schema
from .skipping import measured_files, skipping_output


class WanCoreSpeedPreset(io.ComfyNode):
    """A whole setting that a search found."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "WanCoreSpeedPreset",
            "WanCore Speed Preset",
            aliases=("speed", "preset", "wan fast", "teacache", "step caching", "sparse attention"),
            shows_text=True,
            description="Step caching, sparse attention and guidance together, as a search found them: the most "
            "quality in a given time. For the sampler, the plan preview and, without a guidance schedule, WanCore "
            "Accelerate.",
            inputs=[
                io.Combo.Input(
                    "preset",
                    options=[*speed_names(), *host.named_files("diffusion_models", SUFFIX)],
                    default="balanced",
                    tooltip="Presets of this pack were searched on the embedded model. Presets of your own, from "
                    f"`wancore search` (README, Command line), are found in models/diffusion_models as NAME{SUFFIX}.",
                )
            ],
            outputs=[skipping_output()],
        )

    @classmethod
    def fingerprint_inputs(cls, preset: str = "") -> list[tuple[str, int]]:
        return measured_files(SUFFIX)

    @classmethod
    def validate_inputs(cls, preset: str | None = None) -> bool:
        """Also where ComfyUI's list is older than a file."""
        if preset is not None:
            _options(preset)
        return True

    @classmethod
    def execute(cls, preset: str) -> io.NodeOutput:
        options = _options(preset)
        return io.NodeOutput(options, ui=ui.PreviewText(skip_words(options)))


def _options(preset: str) -> SkipOptions:
    """Raises OptionError."""
    files = host.named_files("diffusion_models", SUFFIX)
    if preset not in speed_names() and preset not in files:  # a workflow may come from a stranger
        raise OptionError(
            f"speed preset {preset[:100]!r} is not there: put its file into models/diffusion_models and refresh, "
            f"or choose one of {', '.join([*speed_names(), *files])}"
        )
    return speed_options(preset if preset in speed_names() else str(files[preset])) or SkipOptions()
