"""Errors for what nodes ask objects on CLIP, VAE and CLIP_VISION sockets for, which ComfyUI's own objects have and
WanCore's do not."""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

from wan_core.config import MissingPart, OptionError


class ComfyObject:
    """An object on a socket of ComfyUI. `described`: what it is and what to load in its place, for errors."""

    described: ClassVar[tuple[str, str]]

    def __getattr__(self, name: str) -> NoReturn:
        """Called for what it does not have."""
        if name.startswith("__"):
            raise AttributeError(name)
        what, instead = self.described
        raise MissingPart(
            f"this node asks {what} for {name!r}, which it does not have: leave the node out, or use {instead} in "
            "place of WanCore's loader"
        )


class Tokens(dict[str, Any]):
    """What a WanCore text encoder makes of a text, for itself alone. Nodes for other models look for tokens by the
    names of their encoders."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

    def __missing__(self, name: str) -> NoReturn:
        raise OptionError(
            f"this node asks for the tokens {name!r}, and the text encoder is UMT5, that of Wan: use CLIP Text Encode "
            "or WanCore Text Encode"
        )
