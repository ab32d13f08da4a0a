"""Sparse attention as part of a plan: the sparsity of every step (`schedule`) and its execution in a model (`run`).
A bound on its error: the rule (`bounds`), what a run measures (`measured`), and what the last run took (`last_run`)."""
