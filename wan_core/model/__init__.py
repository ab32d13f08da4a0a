"""The diffusion transformer."""

from wan_core.model.dit import PreparedText, WanModel

__all__ = ["PreparedText", "WanModel"]
