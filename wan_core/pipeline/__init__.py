"""From a request to a video: sources, the builder, load -> encode -> denoise -> decode; evaluation of settings."""
