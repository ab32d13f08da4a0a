"""Sparse attention as part of a plan: the sparsity of every step (`schedule`), calibrated shares per layer (`budgets`),
and its execution in a model (`run`)."""
