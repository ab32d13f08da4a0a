"""Sparse attention as part of a plan: the sparsity of every step (`schedule`) and its execution in a model (`run`)."""
