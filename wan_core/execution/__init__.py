"""How a model runs: speed and memory applied from outside, CUDA graphs, streaming, the report of a run."""
