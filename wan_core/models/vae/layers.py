"""Layers of the causal video VAE. Each can process a clip in chunks of frames.

A layer that depends on earlier frames takes a `Chunk`: the position in the clip, and the last input frames of earlier
chunks for each layer. The caller owns this history. Modules hold only parameters, so one model can process several
clips at the same time.

Frame 0 is encoded as a separate picture: temporal down- and upsampling skip it, and the upsampler's `time_conv` does
not read it (the frames after it start from a history of zeros).

Shapes: B batch, C channels, T/Y/X frames, rows, columns at the layer's own resolution. Parameter names are those of the
official checkpoints, hence dictionaries with number keys. Source: Wan2.2/wan/modules/vae2_1.py and vae2_2.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wan_core.ops.cards import HOPPER, capability
from wan_core.ops.kernels import fused

BESIDE = 96
"""Channels. So many of a picture cuDNN's kernels for Hopper take; for those of a video it has an older one, which takes
1.6 times as long. With 192, and where pictures are small, the video is faster; 160 (the encoder of 2.2) was not tried.
"""


@dataclass(frozen=True)
class Still:
    """Frames `start` to `stop` of a chunk at a layer's resolution, and the first frame `since` from which all frames
    up to `stop` are equal.

    A layer looks back a known number of frames, so its output stands still a known number of frames later.
    """

    start: int
    stop: int
    since: int

    @property
    def repeats(self) -> bool:
        """Whether every frame of the chunk equals the last one before it."""
        return self.start > self.since

    def after(self, frames: int) -> Still:
        """Where the output of a layer that looks back `frames` frames stands still."""
        return Still(self.start, self.stop, self.since + frames)

    def halved(self) -> Still:
        """Where the output of temporal downsampling stands still: frame 0, then one of three, every second one."""
        return Still((self.start + 1) // 2, (self.stop + 1) // 2, (self.since + 3) // 2)


@dataclass(kw_only=True)
class Chunk:
    """Consecutive frames of a clip that the layers process together.

    `history` maps a layer to its last input frames, `[B, C, lead, Y, X]`; pass the same dictionary for every chunk of a
    clip. The last chunk stores nothing, so a clip processed as one chunk (`Chunk(first=True, last=True)`) needs no
    history.
    """

    first: bool
    last: bool
    still: Still = Still(0, 0, 0)  # of an encoder's input; so: nothing is known to stand still
    history: dict[nn.Module, Tensor] = field(default_factory=dict)
    strip: PictureStrip | None = None  # the part of the picture that this rank computes; None: the whole picture


class PictureStrip(Protocol):
    """A strip of a picture that several ranks compute together: see `wan_core.parallel.vae.Strip`."""

    axis: int  # the axis of [B, C, T, Y, X] that is divided: 3 or 4

    def widen(self, x: Tensor, more: int, outside: Tensor | None = None) -> Tensor: ...
    def padding(self, padding: tuple[int, ...]) -> tuple[int, ...]: ...
    def keys(self, x: Tensor) -> Tensor: ...


class CausalConv3d(nn.Conv3d):
    """Convolution whose output frame depends only on its own and earlier input frames. Zero padding in space.

    kernel: (time, rows, columns), the last two odd. time_stride: number of input frames per output frame. The layer
    needs `lead = kernel[0] - time_stride` earlier frames.
    """

    def __init__(self, in_channels: int, out_channels: int, kernel: tuple[int, int, int], time_stride: int = 1) -> None:
        padding = (0, kernel[1] // 2, kernel[2] // 2)
        super().__init__(in_channels, out_channels, kernel, stride=(time_stride, 1, 1), padding=padding)
        self.lead = kernel[0] - time_stride

    def extend(self, x: Tensor, chunk: Chunk) -> Tensor:
        """`x` [B, C, T, Y, X] with `lead` earlier frames in front, zeros before frame 0; updates `chunk.history`.

        A single frame without history is returned unchanged: `convolve` then uses only the last tap of the kernel,
        because the others would multiply zeros. In a strip of the picture, the neighbours' pixels are added as well.
        """
        if chunk.strip is not None and self.kernel_size[1] > 1:
            x = chunk.strip.widen(x, self.kernel_size[1] // 2)
        if self.lead == 0:
            return x
        history = chunk.history.pop(self, None)
        alone = history is None and x.shape[2] == 1
        if history is not None:
            x = _join(history, x)
        elif not alone:
            x = _lead_with_zeros(x, self.lead)
        if not chunk.last:
            # A copy: a view would keep the whole extended input alive until the next chunk.
            chunk.history[self] = _lead_with_zeros(x, self.lead - 1) if alone else x[:, :, -self.lead :].clone()
        return x

    def settle(self, still: Still) -> Still:
        """Where the output of this layer stands still, given where its input does."""
        return still.after(self.lead)

    def convolve(self, extended: Tensor, chunk: Chunk, biased: bool = True) -> Tensor:
        """Apply the kernel to the result of `extend`. Apart, so that a caller can free `x` before that. biased: whether
        the bias is added here."""
        padding = cast("tuple[int, ...]", self.padding)
        if chunk.strip is not None:
            padding = chunk.strip.padding(padding)
        if extended.shape[1] > self.in_channels:  # each frame has the earlier ones beside it
            taps = self.weight.permute(0, 3, 4, 2, 1).flatten(3).permute(0, 3, 1, 2)  # [C', lead + 1 times C, 3, 3]
            bias = self.bias if biased else None
            return as_video(F.conv2d(as_pictures(extended), taps, bias, padding=padding[1:]), len(extended))
        weight = self.weight[:, :, -extended.shape[2] :]
        if _small_on_cpu(extended):
            extended, weight = extended.contiguous(memory_format=_layout(extended)), weight.contiguous()
            return torch.mkldnn_convolution(extended, weight, self.bias, padding, self.stride, self.dilation, 1)
        return F.conv3d(extended, weight, self.bias if biased else None, self.stride, padding)

    def beside(self, x: Tensor) -> bool:
        """Whether frames are convolved as pictures with the earlier ones' channels beside theirs."""
        return self.in_channels == BESIDE and capability(x.device) == HOPPER

    def forward(self, x: Tensor, chunk: Chunk) -> Tensor:
        return self.convolve(self.extend(x, chunk), chunk)


def _small_on_cpu(x: Tensor) -> bool:
    """Whether torch would use its slow convolution, which materialises every window. oneDNN's is five times as fast and
    needs a tenth of the memory, but torch uses it only above a size of all axes but the last (`use_mkldnn` in
    aten/src/ATen/native/Convolution.cpp, torch 2.13)."""
    on_cpu = x.device.type == "cpu" and x.dtype == torch.float32 and torch.backends.mkldnn.is_available()
    return on_cpu and x.shape[0] == 1 and x.shape[:4].numel() <= 20480


def _layout(x: Tensor) -> torch.memory_format:
    last = x.is_contiguous(memory_format=torch.channels_last_3d) and not x.is_contiguous()
    return torch.channels_last_3d if last else torch.contiguous_format


def _join(earlier: Tensor, later: Tensor) -> Tensor:
    """Frames of both, [B, C, T, Y, X], in the memory layout of `later`."""
    if later.is_contiguous(memory_format=torch.channels_last_3d):
        # `torch.cat` along an outer axis of contiguous tensors copies whole blocks, and keeps the layout of a single
        # frame, whose strides are ambiguous.
        return torch.cat([earlier.movedim(1, -1), later.movedim(1, -1)], dim=1).movedim(-1, 1)
    return torch.cat([earlier, later], dim=2)


def repeat_frame(frame: Tensor, count: int) -> Tensor:
    """[B, C, 1, Y, X] -> [B, C, count, Y, X], in the same memory layout."""
    return _join(frame.expand(-1, -1, count - 1, -1, -1), frame)


def _lead_with_zeros(x: Tensor, frames: int) -> Tensor:
    return _join(torch.zeros_like(x[:, :, :1]).expand(-1, -1, frames, -1, -1), x)


class RMSNorm(nn.Module):
    """Division by the root mean square over channels (dim 1). `spatial_dims`: 3 for video, 2 for pictures."""

    def __init__(self, channels: int, spatial_dims: int = 3) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(channels, *[1] * spatial_dims))

    def forward(self, x: Tensor) -> Tensor:
        # fp32 statistics: a sum of hundreds of squares in bf16 has errors of several percent. The reduction accumulates
        # in fp32 without casting x, which would double the model's largest temporary.
        norm = torch.linalg.vector_norm(x, dim=1, keepdim=True, dtype=torch.float32)
        scale = x.shape[1] ** 0.5 / norm.clamp_min(1e-12)
        return (x * scale.to(x.dtype)).mul_(self.gamma)


class ResidualBlock(nn.Module):
    """norm, SiLU, conv, twice; a 1x1x1 shortcut if the number of channels changes."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.residual = nn.ModuleDict(
            {
                "0": RMSNorm(in_channels),
                "2": CausalConv3d(in_channels, out_channels, (3, 3, 3)),
                "3": RMSNorm(out_channels),
                "6": CausalConv3d(out_channels, out_channels, (3, 3, 3)),
            }
        )
        self.shortcut = CausalConv3d(in_channels, out_channels, (1, 1, 1)) if in_channels != out_channels else None

    def forward(self, x: Tensor, chunk: Chunk) -> Tensor:
        if in_one_pass(x):
            return self._in_one_pass(x, chunk)
        # What the second convolution does not read has no name while that needs the memory.
        norm, first, later_norm, second = (self.residual[name] for name in "0236")
        h = norm_silu_conv(later_norm, second, norm_silu_conv(norm, first, x, chunk), chunk)
        # The shortcut is computed last, so that its result is not in memory during the two convolutions.
        return h.add_(x if self.shortcut is None else self.shortcut.convolve(x, chunk))

    def _in_one_pass(self, x: Tensor, chunk: Chunk) -> Tensor:
        """The biases join the passes that follow: torch adds each in a pass of its own."""
        from wan_core.ops.kernels import triton_vae

        norm, first, later_norm, second = (cast(Any, self.residual[name]) for name in "0236")
        h = norm_silu_conv(
            later_norm, second, norm_silu_conv(norm, first, x, chunk, biased=False), chunk, first.bias, biased=False
        )
        rest = x if self.shortcut is None else self.shortcut.convolve(x, chunk, biased=False)
        return triton_vae.add_with_bias(h, rest, second.bias, None if self.shortcut is None else self.shortcut.bias)

    def settle(self, still: Still) -> Still:
        """Where the output stands still, given where the input does."""
        return still.after(4)


def norm_silu_conv(
    norm: nn.Module, conv: nn.Module, x: Tensor, chunk: Chunk, bias: Tensor | None = None, biased: bool = True
) -> Tensor:
    """bias [C]: is added to x first, where its kernel can run. biased: whether that of `conv` is added here."""
    norm, conv = cast(RMSNorm, norm), cast(CausalConv3d, conv)
    extended = norm_silu_extend(norm, conv, x, chunk, bias)
    del x  # the convolution needs the memory
    return conv.convolve(extended, chunk, biased)


def in_one_pass(x: Tensor) -> bool:
    """Whether the kernels of `triton_vae` can run."""
    return len(x) == 1 and not torch.is_grad_enabled() and fused.runs_kernel(x.movedim(1, -1))


def norm_silu_extend(norm: RMSNorm, conv: CausalConv3d, x: Tensor, chunk: Chunk, bias: Tensor | None = None) -> Tensor:
    """`conv.extend` of SiLU of the norm of x: in one pass where the kernel can run; bias [C] is added first there."""
    if not in_one_pass(x):
        return conv.extend(F.silu(norm(x), inplace=True), chunk)
    from wan_core.ops.kernels import triton_vae

    if chunk.strip is not None and conv.kernel_size[1] > 1:
        # The neighbours' numbers before their norm, which needs one position only. Outside of the picture is what the
        # bias makes zero, and the norm of that is zero too.
        outside = None if bias is None else -bias.view(-1, 1, 1, 1)
        x = chunk.strip.widen(x, conv.kernel_size[1] // 2, outside)
    earlier = chunk.history.pop(conv, None)
    alone = earlier is None and x.shape[2] == 1
    keep = not chunk.last and not alone
    lead, beside = (0, False) if alone else (conv.lead, conv.beside(x))
    extended, kept = triton_vae.norm_silu_extend(x, bias, norm.gamma, earlier, lead, keep, beside)
    if not chunk.last:
        chunk.history[conv] = _lead_with_zeros(extended, conv.lead - 1) if kept is None else kept
    return extended


class AttentionBlock(nn.Module):
    """Single-head self-attention in each frame's Y*X positions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = RMSNorm(channels, spatial_dims=2)
        self.to_qkv = nn.Conv2d(channels, 3 * channels, 1)
        self.proj = nn.Conv2d(channels, channels, 1)
        nn.init.zeros_(self.proj.weight)

    def forward(self, x: Tensor, chunk: Chunk) -> Tensor:
        pictures = as_pictures(x)  # [B*T, C, Y, X]
        qkv = self.to_qkv(self.norm(pictures)).flatten(2).transpose(1, 2).unsqueeze(1)  # [B*T, 1, Y*X, 3C]
        # Fused attention kernels need channels as the innermost axis; otherwise all Y*X x Y*X scores are materialised.
        q, k, v = qkv.contiguous().chunk(3, dim=-1)
        if chunk.strip is not None:
            k, v = chunk.strip.keys(torch.cat([k, v], -1).squeeze(1)).unsqueeze(1).chunk(2, dim=-1)
        attended = F.scaled_dot_product_attention(q, k, v)
        attended = attended.squeeze(1).unflatten(1, pictures.shape[2:]).permute(0, 3, 1, 2)  # [B*T, C, Y, X], a view
        return as_video(self.proj(attended), x.shape[0]) + x

    def settle(self, still: Still) -> Still:
        """Where the output stands still, given where the input does."""
        return still


class Downsample(nn.Module):
    """Halves rows and columns, and with `temporal` the frames after frame 0."""

    def __init__(self, channels: int, temporal: bool) -> None:
        super().__init__()
        # The official padding is one row below and one column to the right. Padding all sides by two and dropping the
        # output's first row and column is equal, and needs no padded copy of the model's largest activation.
        self.resample = nn.ModuleDict({"1": nn.Conv2d(channels, channels, 3, stride=2, padding=2)})
        self.time_conv = CausalConv3d(channels, channels, (3, 1, 1), time_stride=2) if temporal else None

    def forward(self, x: Tensor, chunk: Chunk) -> Tensor:
        halve = cast(nn.Conv2d, self.resample["1"])
        x = as_video(halve(as_pictures(x))[..., 1:, 1:], x.shape[0])
        if self.time_conv is None:
            return x
        if not chunk.first:
            return self.time_conv(x, chunk)
        picture, rest = x[:, :, :1], x[:, :, 1:]
        chunk.history[self.time_conv] = picture
        return picture if rest.shape[2] == 0 else torch.cat([picture, self.time_conv(rest, chunk)], dim=2)

    def settle(self, still: Still) -> Still:
        """Where the output stands still, given where the input does."""
        return still if self.time_conv is None else still.halved()


class Upsample(nn.Module):
    """Doubles rows and columns, and with `temporal` the frames after frame 0."""

    def __init__(self, in_channels: int, out_channels: int, temporal: bool) -> None:
        super().__init__()
        self.resample = nn.ModuleDict({"1": nn.Conv2d(in_channels, out_channels, 3, padding=1)})
        self.time_conv = CausalConv3d(in_channels, 2 * in_channels, (3, 1, 1)) if temporal else None

    def forward(self, x: Tensor, chunk: Chunk) -> Tensor:
        if self.time_conv is not None:
            x = self._double_frames(x, chunk, self.time_conv)
        conv, strip, pictures = cast(nn.Conv2d, self.resample["1"]), chunk.strip, as_pictures(x)
        if strip is None:
            return as_video(conv(double_sides(pictures)), x.shape[0])
        # A neighbour's position becomes two, of which the convolution needs one.
        pictures = double_sides(strip.widen(pictures, 1))
        axis = strip.axis - 5
        pictures = pictures.narrow(axis, 1, pictures.shape[axis] - 2)
        doubled = F.conv2d(pictures, conv.weight, conv.bias, conv.stride, strip.padding((1, 1)))
        return as_video(doubled, x.shape[0])

    @staticmethod
    def _double_frames(x: Tensor, chunk: Chunk, time_conv: CausalConv3d) -> Tensor:
        picture, rest = (x[:, :, :1], x[:, :, 1:]) if chunk.first else (None, x)
        if picture is not None and rest.shape[2] == 0:
            return picture
        pairs = time_conv(rest, chunk).unflatten(1, (2, -1))  # [B, 2, C, T, Y, X]
        # This needs one copy. It is made with channels last, so that the next layer needs no further one.
        frames = pairs.permute(0, 3, 1, 4, 5, 2).flatten(1, 2).permute(0, 4, 1, 2, 3)  # [B, C, 2T, Y, X]
        return frames if picture is None else torch.cat([picture, frames], dim=2)


def double_sides(pictures: Tensor) -> Tensor:
    """[N, C, Y, X] -> [N, C, 2Y, 2X], every position four times."""
    rows = pictures.permute(0, 2, 3, 1)
    if torch.is_grad_enabled() or not (rows.is_cuda and rows.is_contiguous() and rows.shape[-1] % 8 == 0):
        return F.interpolate(pictures, scale_factor=2.0, mode="nearest-exact")
    # One copy of eight bytes at a time, without a gradient: torch's kernel for channels last takes longer.
    doubled = rows.view(torch.int64)[:, :, None, :, None].expand(-1, -1, 2, -1, 2, -1).flatten(3, 4).flatten(1, 2)
    return doubled.view(pictures.dtype).permute(0, 3, 1, 2)


def as_pictures(x: Tensor) -> Tensor:
    """[B, C, T, Y, X] -> [B*T, C, Y, X]; a view when T is 1 or the channels come last in memory."""
    return x.transpose(1, 2).flatten(0, 1)


def as_video(pictures: Tensor, batch: int) -> Tensor:
    """[B*T, C, Y, X] -> [B, C, T, Y, X], a view."""
    return pictures.unflatten(0, (batch, -1)).transpose(1, 2)
