"""The causal video VAE: one model for Wan 2.1 and 2.2, streaming in time, tiling in space."""
