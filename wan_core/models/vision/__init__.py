"""Encoders of images: what a transformer attends to beside text."""
