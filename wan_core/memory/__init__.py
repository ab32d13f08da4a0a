"""Where weights live while a video is made."""

from wan_core.memory.residency import Residency

__all__ = ["Residency"]
