"""Which linears of a transformer are quantised: the attention and feed-forward matrices of the blocks."""

from __future__ import annotations

from wan_core.config import OptionError
from wan_core.models.wan.config import DiTConfig


def quantized_names(config: DiTConfig, keep_blocks: int = 0) -> frozenset[str]:
    """Names of the linears that are quantised in a transformer of `config`: those of all blocks but the first and last
    `keep_blocks`. Raises OptionError where nothing would be left."""
    if not 0 <= keep_blocks * 2 < config.num_layers:
        raise OptionError(
            f"{keep_blocks} first and last blocks to keep were given; the model has {config.num_layers}, so 0 to "
            f"{(config.num_layers - 1) // 2} are possible"
        )
    inner = range(keep_blocks, config.num_layers - keep_blocks)
    attention = [f"{kind}.{part}" for kind in ("self_attn", "cross_attn") for part in "qkvo"]
    attention += [] if config.image_dim is None else ["cross_attn.k_img", "cross_attn.v_img"]
    blocks = [block for i in inner for block in config.modules_of(i)]
    return frozenset(f"{block}.{name}" for block in blocks for name in (*attention, "ffn.0", "ffn.2"))
