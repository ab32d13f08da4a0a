"""Fused kernels, each with a torch reference beside it: one pass over memory where eager torch makes several."""
