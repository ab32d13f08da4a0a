"""Tools of this repository, run as modules: `python -m tools.train_tiny`."""
