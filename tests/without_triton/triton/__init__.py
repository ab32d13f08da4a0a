"""In the place of Triton for `pytest --without-triton`."""

raise ModuleNotFoundError("No module named 'triton' (hidden by --without-triton)", name="triton")
