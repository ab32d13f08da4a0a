"""What a diffusion transformer is, as plain numbers, and those of the released checkpoints. Imports no torch.

Read from the shapes of a file (`wan_core.checkpoint.detect`), never typed by a user.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from wan_core.config.checks import OptionError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class DiTConfig:
    """The Wan diffusion transformer. Everything but `num_heads` can be read from the shapes of a checkpoint.

    Source: Wan2.2/wan/modules/model.py and wan/configs/*.py.
    """

    in_channels: int  # 16 T2V, 36 I2V (16 noise | 4 mask | 16 image), 48 TI2V-5B
    out_channels: int
    dim: int
    ffn_dim: int
    num_heads: int  # dim // 128 unless the file's metadata says otherwise
    num_layers: int
    text_dim: int = 4096
    text_len: int = 512
    freq_dim: int = 256
    patch_size: tuple[int, int, int] = (1, 2, 2)
    eps: float = 1e-6
    family: str = "wan"  # of `wan_core.models.wan.families`
    image_dim: int | None = None  # of the CLIP features that its cross-attention takes beside text; None: takes none
    merges_attention: ClassVar[bool] = False  # self-attention to parts of the keys, merged by their log-sum-exps

    def __post_init__(self) -> None:
        if self.dim % self.num_heads or (self.dim // self.num_heads) % 2:
            raise OptionError(f"dim {self.dim} does not split into {self.num_heads} heads of an even size")

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads

    def tokens(self, frames: int, rows: int, columns: int) -> int:
        """Tokens of one video with so many latent frames, rows and columns."""
        pt, py, px = self.patch_size
        return (frames // pt) * (rows // py) * (columns // px)

    def most_tokens(self, frames: int, rows: int, columns: int) -> int:
        """Tokens that the blocks see of such a video where all is given that a family takes beside it."""
        return self.tokens(frames, rows, columns)

    def modules_of(self, layer: int) -> tuple[str, ...]:
        """Names of the blocks that run with block `layer`, itself first. Their weights travel as one."""
        return (f"blocks.{layer}",)

    def quantized_names(self, keep_blocks: int = 0) -> frozenset[str]:
        """Names of the linears that are quantised: the attention and feed-forward matrices of all blocks but the first
        and last `keep_blocks`. Raises OptionError where nothing would be left."""
        if not 0 <= keep_blocks * 2 < self.num_layers:
            raise OptionError(
                f"{keep_blocks} first and last blocks to keep were given; the model has {self.num_layers}, so 0 to "
                f"{(self.num_layers - 1) // 2} are possible"
            )
        inner = range(keep_blocks, self.num_layers - keep_blocks)
        attention = [f"{kind}.{part}" for kind in ("self_attn", "cross_attn") for part in "qkvo"]
        attention += [] if self.image_dim is None else ["cross_attn.k_img", "cross_attn.v_img"]
        blocks = [block for i in inner for block in self.modules_of(i)]
        return frozenset(f"{block}.{name}" for block in blocks for name in (*attention, "ffn.0", "ffn.2"))

    def text_rows(self, rows: int) -> int:
        """Rows of text that cross-attention reads of so many."""
        return max(rows, self.text_len)

    @property
    def context_len(self) -> int:
        """Tokens that cross-attention attends to."""
        return self.text_len + (0 if self.image_dim is None else IMAGE_TOKENS)

    def blank_features(self, like: Tensor, videos: int) -> Tensor | None:
        """Zeros in the place of CLIP features, [videos, N, image_dim]; None where cross-attention takes none."""
        return None if self.image_dim is None else like.new_zeros(videos, IMAGE_TOKENS, self.image_dim)

    @property
    def rope_axes(self) -> tuple[int, int, int]:
        """How many of a head's channels encode time, rows and columns: (44, 42, 42) at head dim 128."""
        d = self.head_dim
        return d - 4 * (d // 6), 2 * (d // 6), 2 * (d // 6)


TORCH_PER_TOKEN = 10.05  # bytes of activations over 2 L C (L tokens, C channels) in plain torch; measured
IMAGE_TOKENS = 257  # of CLIP ViT-H/14: a class token and 16 x 16 patches

T2V_A14B = DiTConfig(in_channels=16, out_channels=16, dim=5120, ffn_dim=13824, num_heads=40, num_layers=40)
I2V_A14B = replace(T2V_A14B, in_channels=36)
I2V_14B = replace(I2V_A14B, image_dim=1280)  # Wan 2.1, whose T2V-14B is one expert of T2V-A14B in shape
T2V_1_3B = DiTConfig(in_channels=16, out_channels=16, dim=1536, ffn_dim=8960, num_heads=12, num_layers=30)
TI2V_5B = DiTConfig(in_channels=48, out_channels=48, dim=3072, ffn_dim=14336, num_heads=24, num_layers=30)


class PreparedForm(NamedTuple):
    """One of the ways in which a family may keep what it prepares beside text, as plain numbers.

    form: how the family calls it. words: what is kept where. device, host: bytes there while the steps run; those in
    host memory are pinned. copied: bytes that a forward copies to the device. exact: it changes no number.
    activations: bytes of a forward, as a memory plan counts them.
    """

    form: Any
    words: str
    device: int
    host: int
    copied: int
    exact: bool
    activations: int = 0

    def uses_again(self, kept: PreparedForm | None) -> bool:
        """Whether it takes the host memory that an earlier run has left, which kept `kept`."""
        return kept is not None and (kept.form, kept.host) == (self.form, self.host)
