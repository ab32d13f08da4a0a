"""Linears in FP8: what they store, how they multiply, and which of a transformer's linears become one."""
