"""The diffusion transformer, and the families of checkpoints that it runs."""
