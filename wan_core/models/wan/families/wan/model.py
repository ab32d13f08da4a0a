"""The transformer of Wan 2.1 image-to-video: it also attends to the features that CLIP has of the image.

Legend: B batch, N image tokens (257), S text tokens, L video tokens, H heads, D head dim, C = H * D.

Source: Wan2.1/wan/modules/model.py, MLPProj and WanI2VCrossAttention.
"""

from __future__ import annotations

from torch import Tensor, nn

from wan_core.models.wan.config import DiTConfig
from wan_core.models.wan.layers import CrossAttention
from wan_core.models.wan.model import WanModel
from wan_core.models.wan.prepared_text import TokenBias
from wan_core.ops.kernels import fused
from wan_core.ops.kernels.formats import Quantized
from wan_core.ops.quant.linear import Linear


class ImageEmbedding(nn.Module):
    """CLIP features [B, N, image_dim] -> tokens [B, N, C]."""

    def __init__(self, image_dim: int, dim: int) -> None:
        super().__init__()
        self.proj = nn.Sequential(
            nn.LayerNorm(image_dim), Linear(image_dim, image_dim), nn.GELU(), Linear(image_dim, dim), nn.LayerNorm(dim)
        )

    def forward(self, features: Tensor) -> Tensor:
        return self.proj(features)


class ImageCrossAttention(CrossAttention):
    """Attention of video tokens to text and to image tokens: each has a softmax of its own, the results are added."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__(config)
        self.k_img = Linear(config.dim, config.dim)
        self.v_img = Linear(config.dim, config.dim)
        self.norm_k_img = nn.RMSNorm(config.dim, config.eps)

    def kv(self, text: Tensor, image: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        """Keys and values [B, S, H, D] of the text [B, S, C] and [B, N, H, D] of the image [B, N, C], both embedded."""
        k_img = fused.head_norm(self.k_img(image), self.norm_k_img.weight, self.heads, self.eps)
        return *super().kv(text), k_img, self.v_img(image).unflatten(-1, (self.heads, -1))

    def forward(self, x: Tensor | Quantized, kv: tuple[Tensor, ...], bias: TokenBias | None = None) -> Tensor:
        """x [B, L, C], kv as `kv` made them -> [B, L, C]."""
        q = fused.head_norm(self.q(x), self.norm_q.weight, self.heads, self.eps)
        k, v, k_img, v_img, *negative = kv
        out = self.text_attention(q, k, v, negative, bias) + self.attend(q, k_img, v_img).flatten(-2)
        del q
        return self.o(out)


class ImageWanModel(WanModel):
    """A `WanModel` whose prompts have the tokens of an image beside them."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__(config)
        assert config.image_dim is not None
        for block in self.blocks:
            block.cross_attn = ImageCrossAttention(config)
        self.img_emb = ImageEmbedding(config.image_dim, config.dim)

    def embed_text(self, context: Tensor, image: Tensor | None) -> tuple[Tensor, ...]:
        """The text's tokens [B, S, C], and the image's [B, N, C] of CLIP features [B, N, image_dim]."""
        assert image is not None, "this model needs CLIP features of an image"
        (text,) = super().embed_text(context, None)
        return text, self.img_emb(image.to(text.device, text.dtype))
