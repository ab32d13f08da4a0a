"""Self-attention that reads a part of the keys: blocks of neighbouring tokens, chosen by head and block of queries.

`attention.tiles` orders tokens so that a block is a neighbourhood, `routing` chooses blocks, `kernels` computes
attention over what was chosen, `forward` puts all of it in the place of a model's attention for the steps that a plan
says.
"""
