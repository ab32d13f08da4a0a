"""How a model runs: speed and memory applied from outside, streaming, the report of a run."""
