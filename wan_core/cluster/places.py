"""Places on a cluster: Ray's placement groups, and an actor in each of their bundles.

`python -m wan_core.cluster.places ADDRESS GPUS` prints as JSON how many ranks of one video there is room for.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from wan_core.cluster.connect import Wanted, connect, import_ray, inventory, nodes
from wan_core.config import OptionError

POLL_SECONDS = 0.2


@dataclass
class Reserved:
    """A placement group: `counts` GPUs (or CPUs) on as many nodes, each on a node of its own."""

    wanted: Wanted
    counts: tuple[int, ...]
    actors: list[Any] = field(default_factory=list)
    released: bool = False

    def __post_init__(self) -> None:
        from ray.util.placement_group import placement_group  # pyright: ignore[reportMissingImports]

        bundles = [{self.wanted.kind: float(count)} for count in self.counts]
        self.group = placement_group(bundles, strategy="STRICT_SPREAD" if len(bundles) > 1 else "STRICT_PACK")

    def is_ready(self) -> bool:
        from ray.util.placement_group import placement_group_table  # pyright: ignore[reportMissingImports]

        return placement_group_table(self.group).get("state") == "CREATED"

    def start(self, kind: type, *arguments: Any) -> list[Any]:
        from ray.util.scheduling_strategies import (  # pyright: ignore[reportMissingImports]
            PlacementGroupSchedulingStrategy,
        )

        ray = import_ray()
        for number, count in enumerate(self.counts):
            options = {"num_cpus": count} if self.wanted.kind == "CPU" else {"num_cpus": 0, "num_gpus": count}
            actor = ray.remote(kind).options(
                **options,
                max_concurrency=4,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self.group, number),
            )
            self.actors.append(actor.remote(self.wanted.devices(count), *arguments))
        return self.actors

    def release(self) -> None:
        """End the actors, and what they started with them."""
        from ray.util.placement_group import remove_placement_group  # pyright: ignore[reportMissingImports]

        ray = import_ray()
        self.released = True
        if not ray.is_initialized():
            return
        for actor in self.actors:
            ray.kill(actor)
        remove_placement_group(self.group)

    def wait(self, timeout: float) -> None:
        """Until Ray has placed it. Raises OptionError after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while not self.is_ready():
            if time.monotonic() > deadline:
                raise OptionError(
                    f"the cluster had no room for {sum(self.counts)} {self.wanted.kind}s within {timeout:g} s, "
                    f"{' + '.join(map(str, self.counts))} on {len(self.counts)} nodes. It has: "
                    f"{inventory(nodes(self.wanted.kind), self.wanted.kind)}"
                )
            time.sleep(POLL_SECONDS)


def spread(wanted: Wanted) -> tuple[int, ...]:
    """How many ranks of one video each node gets: equally many, on as few nodes as possible. Raises OptionError."""
    found = nodes(wanted.kind)
    count = wanted.count or sum(node.has for node in found)
    for number in range(1, len(found) + 1):
        if count % number == 0 and found[number - 1].has >= count // number:
            return (count // number,) * number
    raise OptionError(
        f"{count} {wanted.kind}s asked for, the same number on each node, and the cluster has: "
        f"{inventory(found, wanted.kind)}"
    )


def main(address: str, gpus: str) -> None:
    try:
        connect(address)
        found = {"ranks": sum(spread(Wanted.parse(gpus)))}
    except OptionError as fault:
        found = {"refused": str(fault)}
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
