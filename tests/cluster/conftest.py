"""A Ray cluster of several nodes on this machine, each of one CPU, for the tests marked `ray`."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
STORE = 100 * 2**20  # bytes of a node's object store


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import importlib.util

    if importlib.util.find_spec("ray") is None:
        skip = pytest.mark.skip(reason="Ray is not installed: pip install 'ray>=2.60'")
        for item in items:
            if item.get_closest_marker("ray"):
                item.add_marker(skip)


class Nodes:
    """`add` and `kill` nodes; the head has no CPU. temporary: the folder of all nodes for temporary files."""

    def __init__(self, temporary: Path) -> None:
        self.temporary = temporary
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": STORE}
        self.cluster: Any = Cluster(initialize_head=True, head_node_args=head)
        self.address: str = self.cluster.address
        self.cpus: dict[Any, int] = {}  # of each node

    def add(self, cpus: int = 1) -> None:
        self.cpus[self.cluster.add_node(num_cpus=cpus, object_store_memory=STORE)] = cpus

    def kill(self, node: str | None = None) -> None:
        """The node with this id, or any, without a word to anyone."""
        removed = next(one for one in self.cpus if node in (None, one.node_id))
        del self.cpus[removed]
        self.cluster.remove_node(removed, allow_graceful=False)

    def kill_head(self) -> None:
        """The process that knows all nodes; those go on alone."""
        self.cluster.head_node.all_processes["gcs_server"][0].process.kill()

    def left_over(self) -> list[str]:
        """Temporary files of WanCore on the nodes."""
        return [path.name for path in self.temporary.iterdir() if path.name.lstrip(".").startswith("wancore")]

    def busy(self) -> list[str]:
        """The ids of nodes whose CPU is taken; connects this process to the cluster."""
        import ray
        from ray._private.state import available_resources_per_node

        ray.init(address=self.address, ignore_reinit_error=True, log_to_driver=False)
        free = available_resources_per_node()
        ids = [node.node_id for node in self.cpus]
        return [one for one in ids if one in free and free[one].get("CPU", 0) < 1]

    def have(self, count: int, cpus: int = 1) -> None:
        """So many nodes of so many CPUs, and no others."""
        right = [node for node, number in self.cpus.items() if number == cpus][:count]
        for node in [node for node in self.cpus if node not in right]:
            del self.cpus[node]
            self.cluster.remove_node(node)
        for _ in range(count - len(right)):
            self.add(cpus)


@pytest.fixture(scope="session")
def nodes() -> Iterator[Nodes]:
    """Started once. Ray gives the processes of its workers the lowest priority, which says nothing here."""
    os.environ |= {
        "RAY_worker_niceness": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
        "WANCORE_RAY_WITHOUT_TOKEN": "1",
    }
    temporary = Path(tempfile.mkdtemp(prefix="ray-"))  # short: Ray makes sockets below it
    before, tempfile.tempdir = os.environ.get("TMPDIR"), str(temporary)
    os.environ["TMPDIR"] = str(temporary)
    cluster_nodes = Nodes(temporary)
    yield cluster_nodes
    import ray

    ray.shutdown()
    cluster_nodes.cluster.shutdown()
    tempfile.tempdir = None
    os.environ.pop("TMPDIR") if before is None else os.environ.update(TMPDIR=before)
    shutil.rmtree(temporary, ignore_errors=True)
