"""Model architectures: the transformer and its families, the VAE, the text and vision encoders."""
