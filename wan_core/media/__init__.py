"""Pixels: video and image files, previews, drawings, metrics. Knows no model and no run."""
