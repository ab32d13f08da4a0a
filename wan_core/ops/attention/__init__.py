"""Attention backends behind one protocol, and sparse attention over any of them."""
