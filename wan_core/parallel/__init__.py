"""One generation on many GPUs: cfg x ring x ulysses over torch.distributed.

    torchrun --nproc-per-node 4 ...            # or `python -m wan_core generate --gpus 4`
    ranks = RankMesh.start(Mesh.parse("2x1x2"))
    pipe = Pipeline.load(LoadOptions(model=...), ranks=ranks)
    result = pipe.generate(request)            # on every rank alike, with the same result

Every rank runs the same program on the same plan; nothing is decided by one rank for the others. `mesh` is numbers and
process groups, `sequence` shards the tokens and their attention (Ulysses, around it `ring`), `conditioning`
sends text rows to all ranks and splits the branches of guidance, `weights` reads every byte of a file once per host or
shards the experts, `vae` splits the picture.
"""
