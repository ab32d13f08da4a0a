"""One generation on many GPUs: cfg x ring x ulysses over torch.distributed.

    torchrun --nproc-per-node 4 ...            # or `python -m wan_core generate --gpus 4`
    ranks = RankMesh.start(Mesh.parse("2x1x2"))
    pipe = Pipeline.load(LoadOptions(model=...), ranks=ranks)
    result = pipe.generate(request)            # on every rank alike, with the same result

Every rank runs the same program on the same plan; nothing is decided by one rank for the others. `mesh` is numbers and
process groups, `sequence` shards the tokens, `ulysses` and `ring` are the attention of sharded tokens, `guidance` the
two branches of guidance apart, `weights` reads every byte of a file once per host, `vae` splits the picture.
"""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from wan_core.attention.registry import Attend, AttendLse
from wan_core.model.dit import WanModel
from wan_core.parallel.costs import choose_mesh
from wan_core.parallel.mesh import Mesh, RankMesh
from wan_core.parallel.sequence import shard_tokens
from wan_core.parallel.vae import split_pictures
from wan_core.vae import VideoVAE

__all__ = ["Mesh", "RankMesh", "choose_mesh", "parallelize"]

Module = TypeVar("Module", bound=nn.Module)


def parallelize(
    module: Module, ranks: RankMesh, *, attend: Attend | None = None, attend_lse: AttendLse | None = None
) -> Module:
    """Make `module` work with the other ranks, in place: a transformer shards its tokens, a VAE its pictures.

    attend: the backend that a transformer's ranks run inside; attend_lse: the same with the log-sum-exp, which a ring
    needs. Every rank must call the module alike, with equal inputs, and gets equal results.
    """
    if isinstance(module, WanModel):
        assert attend is not None, "a transformer needs the backend its ranks run"
        shard_tokens(module, ranks, attend, attend_lse)
    elif isinstance(module, VideoVAE):
        split_pictures(module, ranks)
    return module
