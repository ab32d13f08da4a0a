"""The causal video VAE of Wan 2.1 and 2.2, streaming in time.

One model for two configurations (`wan_core.models.vae.config.VAE_21`, `VAE_22`) and smaller ones. A clip of 1 + 4n
frames becomes 1 + n latent frames. It is processed in chunks of latent frames, and each layer stores its last input
frames, so that memory depends on the chunk and not on the clip. Every chunk size gives the same result. Parameter names
are those of `Wan2.1_VAE.pth` and `Wan2.2_VAE.pth`.

Shapes: B batch, C channels, z latent channels, F/H/W frames and pixels of the video, T/Y/X of the latents.
Source: Wan2.2/wan/modules/vae2_1.py and vae2_2.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn

from wan_core.config import OptionError
from wan_core.models.vae.config import VAEConfig, check_latents
from wan_core.models.vae.folds import fold_average, fold_patches, unfold_patches, unfold_repeat
from wan_core.models.vae.layers import (
    AttentionBlock,
    CausalConv3d,
    Chunk,
    Downsample,
    ResidualBlock,
    RMSNorm,
    Still,
    Upsample,
    norm_silu_conv,
    repeat_frame,
)
from wan_core.models.vae.tiling import Tile, TileSpec, plan_tiles


class DownStage(nn.Module):
    """A stage of the 2.2 encoder: residual blocks, downsampling, and an averaging shortcut around both."""

    def __init__(self, in_channels: int, out_channels: int, blocks: int, time: int, space: int) -> None:
        super().__init__()
        _check_foldable(in_channels * time * space * space, out_channels)
        self.out_channels, self.time, self.space = out_channels, time, space
        self.downsamples = _residual_blocks(in_channels, out_channels, blocks)
        if space > 1:
            self.downsamples.append(Downsample(out_channels, temporal=time > 1))

    def forward(self, x: Tensor, chunk: Chunk) -> Tensor:
        h = x
        for layer in self.downsamples:
            h = layer(h, chunk)
        return h + fold_average(x, self.out_channels, self.time, self.space)

    def settle(self, still: Still) -> Still:
        """Where the output stands still, given where the input does."""
        for layer in self.downsamples:
            still = cast(ResidualBlock, layer).settle(still)
        return still


class UpStage(nn.Module):
    """A stage of the 2.2 decoder: residual blocks, then (not in the last) upsampling and a repeating shortcut."""

    def __init__(self, in_channels: int, out_channels: int, blocks: int, time: int, space: int) -> None:
        super().__init__()
        self.out_channels, self.time, self.space = out_channels, time, space
        self.upsamples = _residual_blocks(in_channels, out_channels, blocks)
        if space > 1:
            _check_foldable(out_channels * time * space * space, in_channels)
            self.upsamples.append(Upsample(out_channels, out_channels, temporal=time > 1))

    def forward(self, x: Tensor, chunk: Chunk) -> Tensor:
        h = x
        for layer in self.upsamples:
            h = layer(h, chunk)
        if self.space == 1:
            return h
        return h.add_(unfold_repeat(x, self.out_channels, self.time, self.space, chunk.first))


def _residual_blocks(in_channels: int, out_channels: int, blocks: int) -> nn.ModuleList:
    return nn.ModuleList(ResidualBlock(in_channels if i == 0 else out_channels, out_channels) for i in range(blocks))


def _check_foldable(channels: int, groups: int) -> None:
    if channels % groups:
        raise OptionError(
            f"the shortcuts of a residual VAE cannot divide {channels} folded channels into {groups} groups: "
            f"choose dims and dim_mult so that one divides the other"
        )


def _middle(channels: int) -> nn.ModuleList:
    blocks = ResidualBlock(channels, channels), AttentionBlock(channels), ResidualBlock(channels, channels)
    return nn.ModuleList(blocks)


def _head(in_channels: int, out_channels: int) -> nn.ModuleDict:
    return nn.ModuleDict({"0": RMSNorm(in_channels), "2": CausalConv3d(in_channels, out_channels, (3, 3, 3))})


class Encoder(nn.Module):
    """Patches of pixels [B, 3 * patch**2, F, H / patch, W / patch] -> [B, 2z, T, Y, X].

    `VideoVAE.conv1` turns the result into mean and log variance. Where frames stand still (the unknown frames of
    image-to-video are all grey), layers whose output stands still too are not computed again: the result is the same.
    """

    def __init__(self, config: VAEConfig) -> None:
        super().__init__()
        dims = [config.encoder_dim * m for m in (1, *config.dim_mult)]
        self.conv1 = CausalConv3d(3 * config.patch**2, dims[0], (3, 3, 3))
        self.downsamples = nn.ModuleList()
        for i, (in_dim, out_dim) in enumerate(pairwise(dims)):
            down = i < len(config.temporal_downsample)
            temporal = down and config.temporal_downsample[i]
            if config.residual:
                stage = DownStage(in_dim, out_dim, config.num_res_blocks, 1 + temporal, 1 + down)
                self.downsamples.append(stage)
                continue
            self.downsamples.extend(_residual_blocks(in_dim, out_dim, config.num_res_blocks))
            if down:
                self.downsamples.append(Downsample(out_dim, temporal))
        self.middle = _middle(dims[-1])
        self.head = _head(dims[-1], 2 * config.z_dim)

    def forward(self, x: Tensor, chunk: Chunk) -> Tensor:
        layers: tuple[Any, ...] = (self.conv1, *self.downsamples, *self.middle)
        stills: list[Still] = [*accumulate(layers, lambda still, layer: layer.settle(still), initial=chunk.still)][1:]
        known = sum(still.repeats for still in stills)  # these layers come first: a later one stands still later
        if known:
            still = stills[known - 1]
            x = repeat_frame(chunk.history[self], still.stop - still.start)
        for layer, still in zip(layers[known:], stills[known:], strict=True):
            x = layer(x, chunk)
            if still.stop > still.since and not chunk.last:  # the next chunk may repeat it
                chunk.history[self] = x[:, :, -1:].clone()
        return norm_silu_conv(self.head["0"], self.head["2"], x, chunk)


class Decoder(nn.Module):
    """Latents [B, z, T, Y, X] -> patches of pixels [B, 3 * patch**2, F, H / patch, W / patch].

    The input is the output of `VideoVAE.conv2`.
    """

    def __init__(self, config: VAEConfig) -> None:
        super().__init__()
        dims = [config.decoder_dim * m for m in (config.dim_mult[-1], *reversed(config.dim_mult))]
        temporal_upsample = config.temporal_downsample[::-1]
        self.conv1 = CausalConv3d(config.z_dim, dims[0], (3, 3, 3))
        self.middle = _middle(dims[0])
        self.upsamples = nn.ModuleList()
        for i, (in_dim, out_dim) in enumerate(pairwise(dims)):
            up = i < len(temporal_upsample)
            temporal = up and temporal_upsample[i]
            if config.residual:
                stage = UpStage(in_dim, out_dim, config.num_res_blocks + 1, 1 + temporal, 1 + up)
                self.upsamples.append(stage)
                continue
            # In 2.1 the upsampling before a stage halves the channels.
            self.upsamples.extend(_residual_blocks(in_dim // 2 if i else in_dim, out_dim, config.num_res_blocks + 1))
            if up:
                self.upsamples.append(Upsample(out_dim, out_dim // 2, temporal))
        self.head = _head(dims[-1], 3 * config.patch**2)

    def forward(self, x: Tensor, chunk: Chunk) -> Tensor:
        x = self.conv1(x, chunk)
        for layer in (*self.middle, *self.upsamples):
            x = layer(x, chunk)
        return norm_silu_conv(self.head["0"], self.head["2"], x, chunk)


class VideoVAE(nn.Module):
    """Encodes video in -1..1 to latents and decodes latents. Latents are un-normalised, except for `normalise`.

    Results have the dtype and device of the parameters (`normalise` and `denormalise`: fp32). Inputs are moved there
    chunk by chunk, so a long video can stay on the CPU. Gradients are computed if the caller enables them; wrap
    inference in `torch.inference_mode()`.

    `chunk` is the number of latent frames computed together: 1 needs the least memory, None computes the whole clip at
    once (small clips, training). All give the same result. `tile` divides the picture, see `TileSpec`; results then
    differ slightly near the seams, because a tile has no pixels from beyond its border.
    """

    def __init__(self, config: VAEConfig) -> None:
        super().__init__()
        _check_config(config)
        self.config = config
        self.strips: Any = None  # set by `wan_core.parallel.vae.Strips`, for ranks that share the work
        self.encoder = Encoder(config)
        self.conv1 = CausalConv3d(2 * config.z_dim, 2 * config.z_dim, (1, 1, 1))
        self.conv2 = CausalConv3d(config.z_dim, config.z_dim, (1, 1, 1))
        self.decoder = Decoder(config)

    @property
    def own(self) -> Tensor:
        """A weight, which says where and in which dtype it computes."""
        return self.conv2.weight

    def channels_last(self) -> VideoVAE:
        """Store the weights of convolutions with channels innermost in memory, in place; returns self.

        Activations then have that layout too. CUDA's convolutions need it; otherwise they transpose inputs and outputs.
        Results are equal up to rounding.
        """
        for module in self.modules():
            if isinstance(module, (nn.Conv2d, nn.Conv3d)):
                layout = torch.channels_last if module.weight.ndim == 4 else torch.channels_last_3d
                module.weight.data = module.weight.data.contiguous(memory_format=layout)
        return self

    # ---------------------------------------------------------------------------------------------------- encode

    def encode(self, video: Tensor, *, chunk: int | None = 1, tile: TileSpec | None = None) -> Tensor:
        """The mean of the posterior, un-normalised: video [B, 3, F, H, W] in -1..1, F = 4n + 1, H and W multiples of
        `config.spatial_stride` -> [B, z, T, Y, X], T = n + 1. Raises OptionError for an impossible size or `chunk`."""
        return self.encode_moments(video, chunk=chunk, tile=tile)[0]

    def encode_moments(
        self, video: Tensor, *, chunk: int | None = None, tile: TileSpec | None = None
    ) -> tuple[Tensor, Tensor]:
        """Mean and log variance of the posterior, both [B, z, T, Y, X]. Arguments and errors as in `encode`."""
        frames, rows, columns = self._latent_size(video)
        spans = _chunk_spans(frames, chunk)

        def moments() -> Tensor:
            if tile is None:
                return torch.cat(list(self._encode_chunks(video, spans)), dim=2)
            tiles = plan_tiles(rows, columns, tile, scale=1)
            return self._encode_tiles(video, spans, tiles, (frames, rows, columns))

        if self.strips is None:
            mean, logvar = moments().chunk(2, dim=1)
        else:
            size = (video.shape[0], 2 * self.config.z_dim, frames, rows, columns)
            mean, logvar = self.strips.of_first(moments, size, self.own).chunk(2, dim=1)
        return mean, logvar

    def _encode_chunks(self, video: Tensor, spans: list[tuple[int, int]]) -> Iterator[Tensor]:
        history: dict[nn.Module, Tensor] = {}
        since = self._stands_still_since(video)
        for start, stop in spans:
            begin, end = self._frame(start), self._frame(stop)
            still = Still(begin, end, since[end - 1])
            chunk = Chunk(first=start == 0, last=stop == spans[-1][1], history=history, still=still)
            pixels = self._to_own(video[:, :, begin:end])
            yield self.conv1(self.encoder(fold_patches(pixels, self.config.patch), chunk), chunk)

    def _encode_tiles(
        self, video: Tensor, spans: list[tuple[int, int]], tiles: list[Tile], size: tuple[int, int, int]
    ) -> Tensor:
        weight = self.own
        canvas = torch.zeros(video.shape[0], 2 * self.config.z_dim, *size, device=weight.device)
        for tile in tiles:
            crop = tile.crop(video, self.config.spatial_stride)
            for (start, stop), moments in zip(spans, self._encode_chunks(crop, spans), strict=True):
                tile.add_to(canvas[:, :, start:stop], moments, cell=1)
        return canvas.to(weight.dtype)

    # ---------------------------------------------------------------------------------------------------- decode

    def decode(
        self, latents: Tensor, *, chunk: int | None = 1, tile: TileSpec | None = None, clamp: bool = True
    ) -> Tensor:
        """The video [B, 3, F, H, W] in -1..1 of un-normalised latents [B, z, T, Y, X], F = 4 (T - 1) + 1.

        clamp: limit to -1..1. Training turns it off: a clamped pixel has no gradient. Raises OptionError for an
        impossible size or `chunk`.
        """
        return torch.cat(list(self.decode_stream(latents, chunk=chunk, tile=tile, clamp=clamp)), dim=2)

    def decode_stream(
        self, latents: Tensor, *, chunk: int | None = 1, tile: TileSpec | None = None, clamp: bool = True
    ) -> Iterator[Tensor]:
        """Decode like `decode`, but yield finished frames in order, in pieces [B, 3, f, H, W] that the caller can move
        away.

        With `tile`, all tiles advance together: layers store the history of every tile, but only one chunk of frames is
        in memory. Arguments are checked at the call, before the first frame is requested.
        """
        check_latents(self.config.z_dim, latents.shape)
        spans = _chunk_spans(latents.shape[2], chunk)
        if tile is None:
            return (self._finish(frames, clamp) for frames in self._decode_chunks(latents, spans))
        tiles = plan_tiles(latents.shape[3], latents.shape[4], tile, scale=self.config.spatial_stride)
        return self._decode_tiles(latents, spans, tiles, clamp)

    def _decode_tiles(
        self, latents: Tensor, spans: list[tuple[int, int]], tiles: list[Tile], clamp: bool
    ) -> Iterator[Tensor]:
        streams = [self._decode_chunks(tile.crop(latents, 1), spans) for tile in tiles]
        size, device = [n * self.config.spatial_stride for n in latents.shape[3:]], self.own.device
        for span in spans:
            # fp32: blending in bf16 would cause visible steps in smooth areas
            canvas = torch.zeros(latents.shape[0], 3, self._frame(span[1]) - self._frame(span[0]), *size, device=device)
            for tile, stream in zip(tiles, streams, strict=True):
                tile.add_to(canvas, next(stream), self.config.spatial_stride)
            yield self._finish(canvas, clamp)

    def _decode_chunks(self, latents: Tensor, spans: list[tuple[int, int]]) -> Iterator[Tensor]:
        history: dict[nn.Module, Tensor] = {}
        strip = None if self.strips is None else self.strips.cut(*latents.shape[3:])
        latents = latents if strip is None else strip.take(latents)
        for start, stop in spans:
            chunk = Chunk(first=start == 0, last=stop == spans[-1][1], history=history, strip=strip)
            patches = self.decoder(self.conv2(self._to_own(latents[:, :, start:stop]), chunk), chunk)
            frames = unfold_patches(patches, self.config.patch)
            yield frames if strip is None else strip.join(frames, self.config.spatial_stride)

    def _finish(self, frames: Tensor, clamp: bool) -> Tensor:
        frames = frames.to(self.own.dtype)
        return frames.clamp(-1, 1) if clamp else frames

    # ---------------------------------------------------------------------------------------------------- normalise

    def normalise(self, latents: Tensor) -> Tensor:
        """The transformer's latents: (latents - mean) / std per channel, fp32. [B, z, ...] -> [B, z, ...]."""
        return self.config.normalise(latents)

    def denormalise(self, latents: Tensor) -> Tensor:
        return self.config.denormalise(latents)

    # ---------------------------------------------------------------------------------------------------- sizes

    def _frame(self, latent_frame: int) -> int:
        """The first video frame of a latent frame, which is also the end of the previous latent frame's frames."""
        return max(0, self.config.video_frames(latent_frame))

    def _stands_still_since(self, video: Tensor) -> list[int]:
        """For each frame, the first of the equal frames that end with it (see `still_since`); the frame itself where
        computing equal frames once would change bits."""
        if self.conv1.weight.is_cuda and torch.cuda.is_current_stream_capturing():
            return list(range(video.shape[2]))  # a captured step of training: the host must not wait for a comparison
        if self.conv1.weight.device.type == "cpu" and video.stride(1) == 1:
            # Channels last: oneDNN's rounding depends on the number of frames.
            return list(range(video.shape[2]))
        return still_since(video)

    def _to_own(self, x: Tensor) -> Tensor:
        weight = self.own
        # A copy to the CPU must be complete before the CPU reads it.
        return x.to(weight.device, weight.dtype, non_blocking=weight.device.type != "cpu")

    def _latent_size(self, video: Tensor) -> tuple[int, int, int]:
        time, space = self.config.temporal_stride, self.config.spatial_stride
        if video.ndim != 5 or video.shape[1] != 3 or 0 in video.shape:
            raise OptionError(
                f"the video has the shape {list(video.shape)}; the shape must be [batch, 3, frames, height, width]"
            )
        frames, height, width = video.shape[2:]
        if frames % time != 1 % time:
            raise OptionError(
                f"{frames} frames given; the number must be a multiple of {time} plus 1: "
                f"drop the last {(frames - 1) % time} or add {-(frames - 1) % time}"
            )
        if height % space or width % space:
            raise OptionError(
                f"frames of {width}x{height} pixels given; both must be multiples of {space}: "
                f"crop or resize to {max(1, width // space) * space}x{max(1, height // space) * space}"
            )
        return (frames - 1) // time + 1, height // space, width // space


def still_since(video: Tensor) -> list[int]:
    """For each frame of [B, C, F, H, W], the first of the equal frames that end with it."""
    since = [0]
    for frame in range(1, video.shape[2]):
        equal = torch.equal(video[:, :, frame], video[:, :, frame - 1])
        since.append(since[-1] if equal else frame)
    return since


def _chunk_spans(frames: int, chunk: int | None) -> list[tuple[int, int]]:
    """Latent frames [start, stop) of each chunk."""
    if chunk is not None and chunk < 1:
        raise OptionError(f"chunk is {chunk}; it must be at least 1 latent frame, or None for all at once")
    size = frames if chunk is None else chunk
    return [(start, min(start + size, frames)) for start in range(0, frames, size)]


def _check_config(config: VAEConfig) -> None:
    if len(config.temporal_downsample) != len(config.dim_mult) - 1:
        raise OptionError(
            f"temporal_downsample {config.temporal_downsample} needs one entry less than dim_mult {config.dim_mult}"
        )
    if not len(config.latents_mean) == len(config.latents_std) == config.z_dim:
        raise OptionError(
            f"{config.z_dim} latent channels need as many means and standard deviations; "
            f"{len(config.latents_mean)} and {len(config.latents_std)} were given"
        )
