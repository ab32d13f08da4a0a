"""Encoders of sound: what a transformer hears."""
