"""A list of videos over a cluster: each maker is an actor on one node, and files are written here.

Ray places the makers. One whose node is gone is replaced where Ray finds room, also on a node that joins later; what it
was making goes to another one, as everything else that a list promises (`wan_core.workers.video_list`).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from wan_core.cluster.actors import VideoMaker
from wan_core.cluster.connect import Wanted, ask, check_token, import_ray, inventory, nodes
from wan_core.cluster.files import media_of, models_there
from wan_core.cluster.places import Reserved
from wan_core.config import LoadOptions, OptionError, Request
from wan_core.config.keys import model_paths
from wan_core.config.outputs import write_bytes
from wan_core.workers.launcher import WorkerError
from wan_core.workers.video_list import MOST_MAKERS, WAIT_SECONDS, ListedVideo, ListMakers, Maker

TELL_SECONDS = 60.0  # between two messages that no node has room
FAILED_STARTS = 10  # one after another, while no other maker works: the list ends


class ClusterMaker(Maker):
    """One maker, from the wish for a place to the end of its node. `useless`: its node cannot make the videos; it keeps
    its place, so that Ray gives no other maker the same."""

    def __init__(self, makers: ClusterMakers) -> None:
        super().__init__("", self._make, self._end)
        self.makers, self.place = makers, Reserved(makers.wanted, (makers.size,))
        self.node = "a maker"
        self.number = 0  # from when its place is there
        self.useless = False
        self.actor: Any = None

    def begin(self) -> None:
        """Start the actor. Raises OptionError where its node cannot be used, WorkerError where it ends."""
        [self.actor] = self.place.start(VideoMaker, *self.makers.arguments)
        found = self.ask(self.actor.describe.remote())
        self.node = found["name"]
        check_token(found["token"])
        if lacking := self.ask(self.actor.missing.remote(model_paths(self.makers.loaded))):
            raise OptionError(f"{self.node} lacks {', '.join(lacking)}: models must be there under the same names")

    def start(self) -> bool:
        try:
            if self.actor is None:
                self.begin()
        except WorkerError as fault:
            if not self.place.released:  # else the list ended before it had begun
                self.makers.failed_start(self, fault)
            return False
        except OptionError as fault:
            self.makers.tell(f"{fault}. It makes no videos")
            self.useless = True
            return False
        self.makers.failed_starts = 0
        self.name = f"maker {self.number} on {self.node}"
        self.makers.tell(f"{self.name} makes videos")
        return True

    def _end(self) -> None:
        if not self.place.released:
            if self.gone and self.name:
                self.makers.tell(f"{self.name} is gone")
            self.place.release()

    def ask(self, answer: Any) -> Any:
        """Raises WorkerError where the actor's process or node is gone."""
        try:
            while not import_ray().wait([answer], timeout=WAIT_SECONDS)[0]:
                if self.place.released:  # Ray answers nothing for an actor that was started after that
                    raise WorkerError(f"{self.node} was ended")
            return ask(answer, self.node)
        except WorkerError:
            self.gone = True
            raise

    def answer(self, method: Any, request: Request, *more: Any) -> dict[str, Any]:
        """What a method of the actor answers for a request, whose files are sent with it. Raises WorkerError where its
        ranks or its disk failed, OptionError where it is refused."""
        asked = asdict(request)
        found = self.ask(method.remote(self.makers.loaded, asked, media_of(asked), *more))
        if "lost" in found:
            raise WorkerError(f"{self.node}: {found['lost']}")
        if "refused" in found:
            raise OptionError(found["refused"])
        return found

    def _make(self, video: ListedVideo) -> None:
        found = self.answer(self.actor.make, video.request, video.key)
        video.check_free()
        for path, name in ((video.out, "video"), (video.report, "report")):
            write_bytes(path, found[name], tidy=False)  # `VideoList` did it once for all


class ClusterMakers(ListMakers):
    """The makers of one list: as many as were asked for, or as the nodes have room for, at every moment. size: GPUs of
    each; wanted: of all together. arguments: of `VideoMaker`, after its devices. tell: prints a line for the user."""

    more = True

    def __init__(
        self, wanted: Wanted, size: int, arguments: tuple[Any, ...], loaded: LoadOptions, tell: Callable[[str], None]
    ) -> None:
        self.wanted, self.size, self.arguments, self.tell = wanted, size, arguments, tell
        self.loaded = models_there(asdict(loaded))
        self.all: list[ClusterMaker] = []  # that have a place or wait for one
        self.numbers = itertools.count(1)
        self.told = 0.0
        self.failed_starts = 0  # since a maker was started

    @property
    def target(self) -> int:
        count = self.wanted.count
        return sum(node.has // self.size for node in nodes(self.wanted.kind)) if count is None else count // self.size

    def check(self, videos: Sequence[ListedVideo], source: Path) -> Iterable[str]:
        """Have the first maker that is placed check all lines. Raises OptionError."""
        if self.target == 0:
            raise OptionError(
                f"no node of the cluster has {self.size} {self.wanted.kind}s: {self._inventory()}; without GPUs, name "
                "cpu,cpu"
            )
        while True:
            for maker in self._placed(len(videos)):
                try:
                    maker.begin()
                    self.checks = maker
                    return super().check(videos, source)
                except WorkerError as fault:
                    self.failed_start(maker, fault)
                    break
            time.sleep(WAIT_SECONDS)

    def notes(self, request: Request) -> list[str]:
        return self.checks.answer(self.checks.actor.check, request)["notes"]

    def ready(self, videos: int) -> list[ClusterMaker]:
        ready = self._placed(videos)
        for maker in ready:
            maker.number = next(self.numbers)
        return ready

    def failed_start(self, maker: ClusterMaker, fault: WorkerError) -> None:
        self.failed_starts += 1
        self.tell(str(fault))
        maker.end()

    def _placed(self, videos: int) -> list[ClusterMaker]:
        """Those that have a place and do not work yet. Has Ray look for as many places as makers should be: no more
        than there are videos. Raises OptionError where none can make them."""
        self.all = [maker for maker in self.all if not maker.place.released]
        useless = [maker for maker in self.all if maker.useless]
        working = [maker for maker in self.all if maker.number and not maker.useless]
        if useless and not working and len(useless) >= self.target:
            raise OptionError("no node can make the videos of this list")
        if self.failed_starts >= FAILED_STARTS and not working:
            raise OptionError(f"no maker could be started, {self.failed_starts} times one after another")
        target = min(self.target, videos, MOST_MAKERS)
        self.all += [ClusterMaker(self) for _ in range(target - len(self.all))]
        placed = [maker for maker in self.all if not maker.number and maker.place.is_ready()]
        if not working and not placed and time.monotonic() - self.told >= TELL_SECONDS:
            self.told = time.monotonic()
            self.tell(f"waiting for a node with {self.size} free {self.wanted.kind}s; there are {self._inventory()}")
        return placed

    def _inventory(self) -> str:
        return inventory(nodes(self.wanted.kind), self.wanted.kind)
