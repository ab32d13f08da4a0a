"""Between latents and pictures: decoding and encoding whole videos, streamed, in tiles where memory is short.

Legend: B batch, C latent channels, T/Y/X latent frames, rows, columns, F/H/W video frames, height, width. Pictures are
[F, H, W, 3] on the CPU: float32 in 0..1, as on ComfyUI's IMAGE socket, or uint8.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from wan_core.config import OptionError
from wan_core.execution.report import Report
from wan_core.media.video import fit_image, read_video
from wan_core.models.vae.tiling import TileSpec
from wan_core.models.vae.vae import VideoVAE


def pixels_to_video(pixels: Tensor) -> Tensor:
    """Pictures [F, H, W, 3] in 0..1, as on ComfyUI's IMAGE socket -> a video [1, 3, F, H, W] in -1..1."""
    return (pixels.float() * 2 - 1).permute(3, 0, 1, 2)[None]


def video_to_pixels(video: Tensor) -> Tensor:
    """The inverse of `pixels_to_video`."""
    return (video[0].permute(1, 2, 3, 0) + 1) / 2


def load_video(path: str, size: tuple[int, int], frames: int) -> Tensor:
    """The first frames of a video file, scaled to cover `size` (width, height) and cropped: [F, H, W, 3] in 0..1.
    Raises OptionError where it has fewer."""
    pixels = read_video(path, max_frames=frames)
    if len(pixels) < frames:
        raise OptionError(f"{path} has {len(pixels)} frames, and {frames} are asked for: use a longer video or fewer")
    return torch.stack([torch.from_numpy(fit_image(one.astype(np.float32) / 255, size)) for one in pixels])


def decode_latents(vae: VideoVAE, latents: Tensor, report: Report) -> np.ndarray:
    """Un-normalised latents [1, C, T, Y, X] -> uint8 frames [F, H, W, 3]. Out of memory: once more, in tiles."""
    return decode_images(vae, latents, report, dtype=torch.uint8).numpy()


@torch.no_grad()
def decode_images(
    vae: VideoVAE,
    latents: Tensor,
    report: Report,
    *,
    dtype: torch.dtype = torch.float32,
    tile: TileSpec | None = None,
    on_frames: Callable[[int, int], None] = lambda done, total: None,
) -> Tensor:
    """Un-normalised latents [B, C, T, Y, X] -> pictures [B * F, H, W, 3] on the CPU, the videos one after another.

    dtype: float32 in 0..1, as on ComfyUI's IMAGE socket, or uint8. tile: decode in these tiles; None takes the whole
    picture, and tiles if that does not fit into memory. on_frames(done, total) follows every piece, and may raise.
    """
    if latents.ndim != 5:
        raise OptionError(f"latents of {list(latents.shape)} given; needed are those of a video, with 5 dimensions")
    stride, (B, _, T, Y, X) = vae.config.spatial_stride, latents.shape
    frames = vae.config.temporal_stride * (T - 1) + 1
    images = torch.empty(B * frames, Y * stride, X * stride, 3, dtype=dtype)

    def decode(tile: TileSpec | None) -> None:
        done = 0
        for video in latents.split(1):
            for piece in vae.decode_stream(video, tile=tile, chunk=1 if vae.strips is None else vae.strips.chunk):
                images[done : done + piece.shape[2]] = _as_images(piece, dtype)
                done += piece.shape[2]
                on_frames(done, len(images))

    with report.phase("decode"):
        try:
            decode(tile)
            return images
        except torch.cuda.OutOfMemoryError:
            if tile is not None or vae.strips is not None:  # ranks that share a picture cannot begin again alone
                raise
        # Out of the handler, whose traceback would hold the tensors of the failed try.
        torch.cuda.empty_cache()
        report.notes.append("decode: the whole picture did not fit into memory, decoded in tiles")
        decode(TileSpec())
        return images


def _as_images(video: Tensor, dtype: torch.dtype) -> Tensor:
    """[1, 3, F, H, W] in -1..1 -> [F, H, W, 3] in 0..1, or 0..255 for uint8."""
    unit = (video[0].float() + 1) / 2
    return ((unit * 255).round_() if dtype == torch.uint8 else unit).to(dtype).permute(1, 2, 3, 0)


@torch.no_grad()
def encode_images(vae: VideoVAE, images: Tensor) -> Tensor:
    """Pictures [F, H, W, 3] in 0..1 -> un-normalised latents float32 [1, C, T, Y, X] on the CPU, F = 4 (T - 1) + 1.

    Out of memory: once more, in tiles. Raises OptionError for a size that does not fit.
    """
    video = pixels_to_video(images)
    try:
        return vae.encode(video, chunk=1).float().cpu()
    except torch.cuda.OutOfMemoryError:
        if vae.strips is not None:  # as in `decode_images`
            raise
        # The second try is outside of the handler, whose traceback holds the tensors of the first.
    torch.cuda.empty_cache()
    return vae.encode(video, chunk=1, tile=TileSpec()).float().cpu()
