"""Where weights live while a video is made."""

from wan_core.memory.residency import Residency, choose_residency

__all__ = ["Residency", "choose_residency"]
