"""One generation on many GPUs: cfg x ring x ulysses over torch.distributed.

Every rank runs the same program on the same plan; nothing is decided by one rank for the others. `mesh` is numbers and
process groups, `sequence` shards the tokens and their attention (Ulysses, around it `ring`), `conditioning`
sends text rows to all ranks and splits the branches of guidance, `weights` reads every byte of a file once per host or
shards the experts, `vae` splits the picture.
"""
