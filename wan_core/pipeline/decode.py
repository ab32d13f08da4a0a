"""Decode: latents become the pictures of whole videos, streamed, in tiles where memory is short.

Legend: B batch, C latent channels, T/Y/X latent frames, rows, columns, F/H/W video frames, height, width. Pictures are
[F, H, W, 3] on the CPU: float32 in 0..1, as on ComfyUI's IMAGE socket, or uint8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from wan_core.execution.report import Report
from wan_core.media.feed import Feed
from wan_core.models.vae.config import VAEConfig, check_latents
from wan_core.models.vae.tiling import TileSpec
from wan_core.models.vae.vae import VideoVAE

Made = TypeVar("Made")
WriteFrames = Callable[[Iterator[np.ndarray]], object]
"""Is given frames uint8 [H, W, 3], in order, each while later ones are made."""
Pieces = Iterator[tuple[int, Tensor]]
"""Finished pictures [F, H, W, 3] on the CPU, and the index of the first of them, in order. After out of memory they
begin again at 0, in tiles."""

_Arriving = tuple[int, Tensor, "torch.cuda.Event | None"]


def decode_latents(vae: VideoVAE, latents: Tensor, report: Report, write: WriteFrames | None = None) -> np.ndarray:
    """Un-normalised latents [B, C, T, Y, X] -> uint8 frames [B * F, H, W, 3]. Out of memory: once more, in tiles.

    write: called in a thread of its own with the frames [H, W, 3], each as soon as it is finished; what it takes after
    the last one is the phase "write".
    """
    images = torch.empty(images_shape(vae.config, latents), dtype=torch.uint8)

    def collect(pieces: Pieces) -> None:
        copied = ((first, images[first : first + len(piece)].copy_(piece)) for first, piece in pieces)
        use_all(each_once(copied), write)

    rest = "decode" if write is None else "write"
    decode_to(vae, latents, report, collect, dtype=torch.uint8, rest=rest)
    return images.numpy()


def use_all(frames: Iterator[np.ndarray], write: WriteFrames | None) -> None:
    """Hand `frames` to `write`, and make those that it leaves, too: all of them are needed, however it ended."""
    if write is not None:
        write(frames)
    for _ in frames:
        pass


def collect_images(pieces: Pieces, images: Tensor) -> Tensor:
    """Copy pieces into `images` [F, H, W, 3]; returns it."""
    for first, piece in pieces:
        images[first : first + len(piece)] = piece
    return images


def each_once(pieces: Pieces) -> Iterator[np.ndarray]:
    """The pictures [H, W, 3] one by one, without those that come a second time."""
    done = 0
    for first, piece in pieces:
        yield from piece[max(0, done - first) :].numpy()
        done = max(done, first + len(piece))


@torch.no_grad()
def decode_to(
    vae: VideoVAE,
    latents: Tensor,
    report: Report,
    consume: Callable[[Pieces], Made],
    *,
    dtype: torch.dtype,
    tile: TileSpec | None = None,
    on_frames: Callable[[int, int], None] = lambda done, total: None,
    rest: str = "decode",
) -> Made:
    """Decode un-normalised latents [B, C, T, Y, X] to pictures [B * F, H, W, 3], the videos one after another, and hand
    them to `consume` while later ones are decoded. `consume` runs in its own thread; its result is returned and its
    errors are raised.

    dtype: float32 in 0..1, as on ComfyUI's IMAGE socket, or uint8. tile: decode in these tiles; None takes the whole
    picture, and tiles if that does not fit into memory. on_frames(done, total) follows every piece, and may raise.
    rest: the phase of `report` for the time of `consume` after the last picture.
    """
    total = images_shape(vae.config, latents)[0]

    def decode(tile: TileSpec | None) -> None:
        done = 0
        for video in latents.split(1):
            for piece in vae.decode_stream(video, tile=tile, chunk=1 if vae.strips is None else vae.strips.chunk):
                feed.put((done, *_start_copy(_as_images(piece, dtype))))
                done += piece.shape[2]
                on_frames(done, total)

    used = in_this_mode(consume)
    with Feed[_Arriving, Made](lambda items: used(_arrived(item) for item in items)) as feed:
        with report.phase("decode"):
            if not fits_in_memory(partial(decode, tile), retry=tile is None and vae.strips is None):
                report.notes.append("decode: the whole picture did not fit into memory, decoded in tiles")
                decode(TileSpec())
        with report.phase(rest):
            return feed.finish()


def in_this_mode(consume: Callable[[Pieces], Made]) -> Callable[[Pieces], Made]:
    """`consume` for another thread, in the inference mode of this one: tensors made in it cannot be changed outside."""
    inference = torch.is_inference_mode_enabled()

    def inside(pieces: Pieces) -> Made:
        with torch.inference_mode(inference), torch.no_grad():
            return consume(pieces)

    return inside


def images_shape(config: VAEConfig, latents: Tensor) -> tuple[int, int, int, int]:
    """[B * F, H, W, 3] of what `latents` [B, C, T, Y, X] are decoded to. Raises OptionError."""
    check_latents(config.z_dim, latents.shape)
    stride, (B, _, T, Y, X) = config.spatial_stride, latents.shape
    return B * config.video_frames(T), Y * stride, X * stride, 3


def fits_in_memory(run: Callable[[], None], retry: bool) -> bool:
    """Whether `run` had enough memory. retry: False raises: ranks that share a picture cannot begin again alone."""
    try:
        run()
        return True
    except torch.cuda.OutOfMemoryError:
        if not retry:
            raise
    # Out of the handler, whose traceback would hold the tensors of the failed try.
    torch.cuda.empty_cache()
    return False


def _start_copy(images: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """`images` in host memory, and the event after which they are there. The device does not wait for the copy, nor
    the host for the device."""
    if not images.is_cuda:
        return images, None
    host = torch.empty(images.shape, dtype=images.dtype, pin_memory=True).copy_(images, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()
    return host, arrived


def _arrived(item: _Arriving) -> tuple[int, Tensor]:
    first, images, event = item
    if event is not None:
        event.synchronize()
    return first, images


def _as_images(video: Tensor, dtype: torch.dtype) -> Tensor:
    """[1, 3, F, H, W] in -1..1 -> [F, H, W, 3] in 0..1, or 0..255 for uint8."""
    unit = (video[0].float() + 1) / 2
    return ((unit * 255).round_() if dtype == torch.uint8 else unit).to(dtype).permute(1, 2, 3, 0).contiguous()
