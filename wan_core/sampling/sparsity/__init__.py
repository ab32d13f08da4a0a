"""Sparse attention as part of a plan: which steps read how much of the keys (`schedule`), how that is shared out
between layers (`budgets`), and carrying it out in a model (`run`)."""
