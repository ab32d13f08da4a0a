"""Attention backends behind one signature: q, k, v [B, L, H, D] -> [B, L, H, D]."""

from wan_core.attention.registry import BACKENDS, AttentionError, Backend, resolve_attention

__all__ = ["BACKENDS", "AttentionError", "Backend", "resolve_attention"]
