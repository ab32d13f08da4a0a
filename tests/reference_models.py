"""The modules of diffusers and transformers that this engine's are compared with, of the same configuration."""

from __future__ import annotations

from diffusers import AutoencoderKLWan, WanTransformer3DModel
from transformers import UMT5Config, UMT5EncoderModel

from wan_core.models.text.umt5 import TextConfig
from wan_core.models.vae.config import VAEConfig
from wan_core.models.wan.config import DiTConfig


def diffusers_transformer(config: DiTConfig) -> WanTransformer3DModel:
    return WanTransformer3DModel(
        patch_size=config.patch_size,
        num_attention_heads=config.num_heads,
        attention_head_dim=config.head_dim,
        in_channels=config.in_channels,
        out_channels=config.out_channels,
        text_dim=config.text_dim,
        freq_dim=config.freq_dim,
        ffn_dim=config.ffn_dim,
        num_layers=config.num_layers,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        eps=config.eps,
        image_dim=config.image_dim,
        added_kv_proj_dim=None if config.image_dim is None else config.dim,
    ).eval()


def diffusers_vae(config: VAEConfig) -> AutoencoderKLWan:
    return AutoencoderKLWan(
        base_dim=config.encoder_dim,
        decoder_base_dim=config.decoder_dim,
        z_dim=config.z_dim,
        dim_mult=list(config.dim_mult),
        num_res_blocks=config.num_res_blocks,
        temperal_downsample=list(config.temporal_downsample),
        is_residual=config.residual,
        in_channels=3 * config.patch**2,
        out_channels=3 * config.patch**2,
        patch_size=None if config.patch == 1 else config.patch,
        latents_mean=list(config.latents_mean),
        latents_std=list(config.latents_std),
        scale_factor_spatial=config.spatial_stride,
    )


def transformers_encoder(config: TextConfig) -> UMT5EncoderModel:
    return UMT5EncoderModel(
        UMT5Config(
            vocab_size=config.vocab_size,
            d_model=config.dim,
            d_kv=config.dim_attn // config.num_heads,
            d_ff=config.dim_ffn,
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            relative_attention_num_buckets=config.num_buckets,
            relative_attention_max_distance=config.max_distance,
            layer_norm_epsilon=config.eps,
            feed_forward_proj="gated-gelu",
        )
    ).eval()
