"""A list of videos over a cluster: each maker is an actor on one node, and files are written here.

Ray places the makers. One whose node is gone is replaced where Ray finds room, also on a node that joins later; what it
was making goes to another one, as everything else that a list promises (`wan_core.workers.video_list`).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from wan_core.cluster.actors import VideoMaker
from wan_core.cluster.answers import ask
from wan_core.cluster.connect import Wanted, check_token, import_ray, inventory, nodes
from wan_core.cluster.files import media_of, models_there
from wan_core.cluster.places import Reserved
from wan_core.config import LoadOptions, OptionError
from wan_core.config.keys import model_paths
from wan_core.config.outputs import write_bytes
from wan_core.workers.launcher import WorkerError
from wan_core.workers.video_list import ListedVideo, Maker, Outcome, VideoList, work

CHECKED_TOGETHER = 200  # lines in one call,
CHECKED_BYTES = 2**28  # and bytes of the files that they name
WAIT_SECONDS = 1.0  # between two looks at what Ray has placed
TELL_SECONDS = 60.0  # between two messages that no node has room
MOST_MAKERS = 1000
FAILED_STARTS = 10  # one after another, while no other maker works: the list ends


@dataclass(frozen=True)
class Makers:
    """How many makers of what size: `size` GPUs each; wanted: of all together."""

    wanted: Wanted
    size: int
    mesh: str
    step_timeout: float

    def __post_init__(self) -> None:
        if self.wanted.count is not None and self.wanted.count % self.size:
            raise OptionError(
                f"mesh {self.mesh} needs {self.size} GPUs for each video, and {self.wanted.count} are given: give a "
                f"multiple of {self.size}"
            )

    @property
    def target(self) -> int:
        """How many makers there should be now: as many as asked for, or as the nodes have room for."""
        if self.wanted.count is not None:
            return self.wanted.count // self.size
        return sum(node.has // self.size for node in nodes(self.wanted.kind))


class ClusterMaker:
    """One maker, from the wish for a place to the end of its node."""

    def __init__(self, makers: Makers, loaded: dict[str, Any]) -> None:
        self.loaded = loaded
        self.place = Reserved(makers.wanted, (makers.size,))
        self.arguments = makers.mesh, makers.step_timeout
        self.name = "a maker"
        self.actor: Any = None
        self.gone = False

    def start(self) -> None:
        """Start the actor. Raises OptionError where its node cannot be used, WorkerError where it ends."""
        [self.actor] = self.place.start(VideoMaker, *self.arguments)
        found = self.ask(self.actor.describe.remote())
        self.name = found["name"]
        check_token(found["token"])
        if lacking := self.ask(self.actor.missing.remote(model_paths(self.loaded))):
            raise OptionError(f"{self.name} lacks {', '.join(lacking)}: models must be there under the same names")

    def ask(self, answer: Any) -> Any:
        """Raises WorkerError where the actor's process or node is gone."""
        try:
            while not import_ray().wait([answer], timeout=WAIT_SECONDS)[0]:
                if self.place.released:  # Ray answers nothing for an actor that was started after that
                    raise WorkerError(f"{self.name} was ended")
            return ask(answer, self.name)
        except WorkerError:
            self.gone = True
            raise

    def check(self, videos: Sequence[ListedVideo], source: Path) -> list[str]:
        """The notes of all requests. Raises OptionError for the first that cannot run."""
        notes: dict[str, None] = {}
        for some, media in _checked_together(videos, source):
            found = self.ask(self.actor.check.remote(self.loaded, [asdict(video.request) for video in some], media))
            if "lost" in found:
                raise OptionError(f"{self.name}: {found['lost']}")
            if "refused" in found:
                raise OptionError(f"line {some[found['number']].line} of {source}: {found['refused']}")
            notes |= dict.fromkeys(found["notes"])
        return list(notes)

    def make(self, video: ListedVideo) -> None:
        """Have it made there, and write it here."""
        request = asdict(video.request)
        found = self.ask(self.actor.make.remote(self.loaded, request, video.key, media_of(request)))
        if "lost" in found:
            raise WorkerError(f"{self.name}: {found['lost']}")
        if "refused" in found:
            raise OptionError(found["refused"])
        video.check_free()
        for path, name in ((video.out, "video"), (video.report, "report")):
            write_bytes(path, found[name], tidy=False)  # `VideoList` did it once for all


def _checked_together(
    videos: Sequence[ListedVideo], source: Path
) -> Iterator[tuple[list[ListedVideo], dict[str, bytes]]]:
    """The videos in groups, each with the contents of the files that it names. Raises OptionError."""
    some: list[ListedVideo] = []
    media: dict[str, bytes] = {}
    for video in videos:
        some.append(video)
        try:
            media |= media_of(asdict(video.request), media)
        except OptionError as fault:
            raise OptionError(f"line {video.line} of {source}: {fault}") from fault
        if len(some) == CHECKED_TOGETHER or sum(map(len, media.values())) > CHECKED_BYTES:
            yield some, media
            some, media = [], {}
    if some:
        yield some, media


class ClusterList:
    """The makers of one list. tell: prints a line for the user."""

    def __init__(self, makers: Makers, loaded: LoadOptions, tell: Callable[[str], None]) -> None:
        self.makers, self.tell = makers, tell
        self.loaded = models_there(asdict(loaded))
        self.waiting: list[ClusterMaker] = []  # for a place
        self.working: dict[Future[None], ClusterMaker] = {}
        self.useless: list[ClusterMaker] = []  # they keep their places, so that Ray gives no other maker the same
        self.told = 0.0
        self.failed_starts = 0  # since a maker was started

    def close(self) -> None:
        """Give back all that Ray was asked for."""
        for maker in (*self.waiting, *self.working.values(), *self.useless):
            maker.place.release()

    def check(self, videos: Sequence[ListedVideo], source: Path) -> list[str]:
        """Have the first maker that is placed check all lines. Raises OptionError."""
        if self.makers.target == 0:
            raise OptionError(
                f"no node of the cluster has {self.makers.size} {self.makers.wanted.kind}s: "
                f"{inventory(nodes(self.makers.wanted.kind), self.makers.wanted.kind)}; without GPUs, name cpu,cpu"
            )
        while True:
            self._ask_for_places(len(videos))
            for maker in self.waiting:
                if maker.place.is_ready():
                    try:
                        maker.start()
                        return maker.check(videos, source)
                    except WorkerError as fault:
                        self.waiting.remove(maker)
                        maker.place.release()
                        self._failed_start(fault)
                        break
            self._end_if_nothing_starts()
            self._tell_if_nothing_runs()
            time.sleep(WAIT_SECONDS)

    def make(self, videos: VideoList) -> Outcome:
        """Make all videos. Raises what a maker raises that is no fault of a video, when all have stopped."""
        names = itertools.count(1)
        with ThreadPoolExecutor(MOST_MAKERS) as pool:
            try:
                while videos.left:
                    self._end_those_without_nodes(videos)
                    self._ask_for_places(videos.left)
                    for maker in [maker for maker in self.waiting if maker.place.is_ready()]:
                        self.waiting.remove(maker)
                        self.working[pool.submit(self._work, videos, maker, next(names))] = maker
                    self._tell_if_nothing_runs()
                    with videos.changed:
                        videos.changed.wait(WAIT_SECONDS)
            finally:  # also when the user interrupts
                videos.stop()
                for maker in self.working.values():
                    maker.place.release()
        for future in self.working:
            future.result()
        videos.end()
        return videos.outcome

    def _work(self, videos: VideoList, maker: ClusterMaker, number: int) -> None:
        """A thread: start the maker, and have it make videos until none is left or its node is gone."""
        try:
            if maker.actor is None:
                maker.start()
        except WorkerError as fault:
            if videos.left:  # else it was ended before it had begun
                self._failed_start(fault)
            return
        except OptionError as fault:
            self.tell(f"{fault}. It makes no videos")
            self.useless.append(maker)
            return
        self.failed_starts = 0
        name = f"maker {number} on {maker.name}"
        videos.join(name)
        self.tell(f"{name} makes videos")
        work(videos, Maker(name, maker.make, lambda: maker.gone))
        if maker.gone:
            self.tell(f"{name} is gone")

    def _end_those_without_nodes(self, videos: VideoList) -> None:
        for future in [future for future in self.working if future.done()]:
            maker = self.working.pop(future)
            future.result()
            if maker not in self.useless:
                maker.place.release()
        if self.useless and not self.working and len(self.useless) >= self.makers.target:
            raise OptionError("no node can make the videos of this list")
        self._end_if_nothing_starts()

    def _failed_start(self, fault: WorkerError) -> None:
        self.failed_starts += 1
        self.tell(str(fault))

    def _end_if_nothing_starts(self) -> None:
        if self.failed_starts >= FAILED_STARTS and not self.working:
            raise OptionError(f"no maker could be started, {self.failed_starts} times one after another")

    def _ask_for_places(self, videos: int) -> None:
        """Have Ray look for as many places as makers should be: no more than there are videos."""
        target = min(self.makers.target, videos, MOST_MAKERS)
        while len(self.waiting) + len(self.working) + len(self.useless) < target:
            self.waiting.append(ClusterMaker(self.makers, self.loaded))

    def _tell_if_nothing_runs(self) -> None:
        if self.working or time.monotonic() - self.told < TELL_SECONDS:
            return
        self.told = time.monotonic()
        wanted = self.makers.wanted
        self.tell(
            f"waiting for a node with {self.makers.size} free {wanted.kind}s; there are "
            f"{inventory(nodes(wanted.kind), wanted.kind)}"
        )
