"""How the embedded model is made: `python -m tools.train_tiny`."""
