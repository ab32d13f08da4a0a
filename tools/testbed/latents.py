"""The clips of the test bed as its transformers see them.

Shapes: B batch, z latent channels, T/Y/X latent frames, rows, columns, L text rows.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from tools.testbed.drawing import Drawing
from tools.testbed.words import token_rows
from tools.tiny.clips import Ring, encode, fill, image_rows
from tools.tiny.vae import Kernels, set_memory_format
from wan_core.models.text.tokenizer import Tokenizer
from wan_core.models.vae.vae import VideoVAE

IMAGE_SHARE, LAST_FRAME_SHARE = 0.375, 0.15
FIRST_FILL = 12.0  # seconds


class WorldRing(Ring):
    """Clips as the transformers see them: latent [B, z, T, Y, X], image [B, 4 + z, T, Y, X] (zero where none is given),
    ids and mask [B, L] of the caption."""

    def __init__(self, drawing: Drawing, vae: VideoVAE, tokenizer: Tokenizer, capacity: int, chunk: int) -> None:
        super().__init__(capacity)
        self.drawing, self.vae, self.tokenizer, self.chunk = drawing, vae, tokenizer, chunk
        self.seconds, self.kernels = 0.0, Kernels(False, False)

    def prepare(self) -> None:
        """The first clips."""
        self.kernels = fastest_encoding(self.vae, self.drawing.draw(self.chunk)[0])
        self.seconds = fill(self, self.capacity // 2, self.chunk, FIRST_FILL)

    @torch.no_grad()
    def grow(self, count: int) -> None:
        clips, worlds = self.drawing.draw(count)
        ids, mask = (t.to(clips.device) for t in token_rows(self.tokenizer, [world.caption for world in worlds]))
        images = round(IMAGE_SHARE * count)
        last = torch.rand(images, device=clips.device) < LAST_FRAME_SHARE
        set_memory_format(self.vae, self.kernels.channels_last)
        with torch.autocast(clips.device.type, torch.bfloat16, enabled=self.kernels.bf16):
            latent = encode(self.vae, clips)
            image = latent.new_zeros(count, 4 + latent.shape[1], *latent.shape[2:])
            image[:images] = image_rows(self.vae, clips[:images], last)
        self.add(latent=latent.bfloat16(), image=image.bfloat16(), ids=ids, mask=mask)


@torch.no_grad()
def fastest_encoding(vae: VideoVAE, clips: Tensor) -> Kernels:
    """The fastest way to encode `clips` on a GPU, by trial."""
    if not clips.is_cuda:
        return Kernels(False, False)
    seconds: dict[Kernels, float] = {}
    for kernels in (Kernels(last, bf16) for last in (False, True) for bf16 in (False, True)):
        set_memory_format(vae, kernels.channels_last)
        for _ in range(2):
            torch.cuda.synchronize()
            start = time.monotonic()
            with torch.autocast("cuda", torch.bfloat16, enabled=kernels.bf16):
                encode(vae, clips)
            torch.cuda.synchronize()
            seconds[kernels] = time.monotonic() - start
    best = min(seconds, key=lambda kernels: seconds[kernels])
    print(f"encoding in {best}: {1e3 * seconds[best] / len(clips):.1f} ms a clip", flush=True)
    return best
