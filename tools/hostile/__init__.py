"""Damaged and hostile files, made from sound ones by a seeded generator. `tools/fuzz.py` runs them."""
