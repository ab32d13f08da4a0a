"""A list of videos shared out over makers: one GPU each, or one mesh of GPUs each, with ranks of its own.

Every maker takes the next video that nobody has, until none is left. A video whose ranks are lost is made by another
maker, while its own starts ranks again. Makers may join and leave at any time (`wan_core.cluster`). While a video is
made, the small hidden file of `outputs.py` claims its name, so no other run writes it.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from wan_core.config import LoadOptions, OptionError, Request, UserError
from wan_core.config.durable import SEAL, UNSEALED
from wan_core.config.outputs import claim_of, make_claim, remove_left_over
from wan_core.config.owners import is_written_here
from wan_core.media.mp4 import write_mp4
from wan_core.media.sound import read_sound
from wan_core.pipeline.check import check_request
from wan_core.pipeline.pipeline import Engine, LocalEngine, metadata
from wan_core.pipeline.run import Watch
from wan_core.pipeline.settings import choose_device
from wan_core.pipeline.sources import find_models
from wan_core.workers.client import WorkerEngine
from wan_core.workers.launcher import WorkerError, Workers
from wan_core.workers.options import WorkerOptions

ATTEMPTS = 2  # a video that was lost so often is given up
LOSSES = 3  # a maker that lost so many videos in a row is given up
WAIT_SECONDS = 1.0  # between two looks at which makers are ready
MOST_MAKERS = 1000
KEY = "list_entry"  # in the metadata of a finished video


@dataclass(frozen=True)
class ListedVideo:
    """One line of a list. key: what it is made of, as a short text that the file contains when it is finished."""

    line: int
    request: Request
    out: Path
    key: str

    @property
    def report(self) -> Path:
        return self.out.with_suffix(".report.json")

    def check_free(self) -> None:
        """Raise OptionError where a file of its name came while it was made."""
        if os.path.lexists(self.out):
            raise OptionError(f"{self.out} came while this video was made, and is not replaced")


def make_video(
    engine: Engine, loaded: LoadOptions, video: ListedVideo, rename: Callable[[Any], Any] = lambda settings: settings
) -> None:
    """Have the engine make the video, and write its report beside it. rename: the settings that the files say, from
    those of the run. Raises OptionError where a file of that name came meanwhile."""

    def write(frames: Iterator[Any], /, *, fps: int, settings: Mapping[str, Any]) -> None:
        video.check_free()
        sound = None if video.request.audio is None else read_sound(video.request.audio)
        said = {**metadata(rename(settings)), KEY: video.key, SEAL: UNSEALED}
        write_mp4(video.out, frames, fps=fps, sound=sound, metadata=said)

    report = engine.generate(loaded, video.request, Watch(write=write)).report
    report.settings = rename(report.settings)
    report.save(video.report)


class Maker:
    """What makes one video at a time. `gone`: it can make no more, because its node is gone.

    make: writes the video and its report; raises WorkerError where the ranks are lost, UserError where the video is
    refused, OSError where it cannot be written. end: has a `make` that runs in another thread fail now.
    """

    gone = False

    def __init__(
        self, name: str, make: Callable[[ListedVideo], None], end: Callable[[], object] = lambda: None
    ) -> None:
        """name: empty until it can begin."""
        self.name, self.make, self.end = name, make, end

    def start(self) -> bool:
        """Whether it makes videos."""
        return True


class ListMakers:
    """The makers of one list. `more`: others may come while the first are at work."""

    more = False

    def __init__(self, makers: Sequence[Maker]) -> None:
        self.all = self.waiting = makers

    def check(self, videos: Sequence[ListedVideo], source: Path) -> Iterable[str]:
        """The notes of all videos, each once. Those that differ by prompt and seed are checked once. Raises OptionError
        for a line of the file `source` that cannot run."""
        checked: dict[str, Sequence[str]] = {}
        for video in videos:
            key = repr([value for name, value in vars(video.request).items() if name not in ("prompt", "seed")])
            try:
                checked[key] = checked[key] if key in checked else self.notes(video.request)
            except OptionError as fault:
                raise OptionError(f"line {video.line} of {source}: {fault}") from fault
        return dict.fromkeys(note for notes in checked.values() for note in notes)  # in their order

    def notes(self, request: Request) -> Sequence[str]:
        """What the plan of a request says of itself. Raises OptionError where it cannot run."""
        return ()

    def ready(self, videos: int) -> Sequence[Maker]:
        """Those that can begin and were not returned before, where so many videos are left. Raises OptionError where no
        maker will ever begin."""
        ready, self.waiting = self.waiting, ()
        return ready

    def close(self) -> None:
        for maker in self.all:
            maker.end()


@dataclass
class Outcome:
    """What became of a list: lines, and for those that failed why."""

    made: list[int] = field(default_factory=list)
    elsewhere: list[int] = field(default_factory=list)  # by other programs
    failed: dict[int, str] = field(default_factory=dict)


class VideoList:
    """Which videos wait, and who may take which. Any thread may use it."""

    def __init__(
        self,
        videos: Sequence[ListedVideo],
        is_finished: Callable[[ListedVideo], bool],
        tell: Callable[[str], None] = lambda words: None,
    ) -> None:
        """is_finished: raises OptionError where another video has the name."""
        self.waiting, self.makers = list(videos), set[str]()
        self.is_finished, self.tell = is_finished, tell
        self.count, self.making = len(videos), 0
        self.claims: dict[int, Path] = {}  # line -> the claim of its name
        self.others = list[ListedVideo]()  # whose names other runs have claimed
        self.lost_by: dict[int, list[str]] = {}
        self.outcome = Outcome()
        self.stopped = False
        self.changed = threading.Condition()
        self.first = 0.0  # when the first video was finished: what came before it, every maker does once
        for folder in {video.out.absolute().parent for video in videos}:
            remove_left_over(folder)

    @property
    def left(self) -> int:
        return 0 if self.stopped else len(self.waiting) + self.making

    def join(self, maker: Maker) -> None:
        """This maker takes videos from now on, if it can begin."""
        with self.changed:
            self.makers |= {maker.name} - {""}

    def take(self, maker: str) -> ListedVideo | None:
        """The next video for this maker, claimed; None when none is left. Waits for those that others are making, in
        case they are lost."""
        with self.changed:
            while not self.stopped and (self.waiting or self.making):
                for video in list(self.waiting) if self.lost_by else self.waiting[:1]:
                    lost = self.lost_by.get(video.line, [])  # a maker leaves a video that it lost to those that did not
                    if maker not in lost or self.makers <= set(lost):
                        self.waiting.remove(video)
                        if self._claim(video):
                            self.making += 1
                            return video
                        break
                else:
                    self.changed.wait()
            return None

    def _claim(self, video: ListedVideo) -> bool:
        """Whether to make it now: nobody has made it, and no other run is writing it."""
        try:
            claim = make_claim(video.out)
            if claim is None:  # looked at again at the end
                self.others.append(video)
                self.changed.notify_all()
                return False
            self.claims[video.line] = claim
            if not self.is_finished(video):
                return True
            self.outcome.elsewhere.append(video.line)
            self.tell(f"{video.out} was made by another program")
        except (OptionError, OSError) as fault:
            self._fail(video, str(fault))
        self._release(video)
        self.changed.notify_all()
        return False

    def _release(self, video: ListedVideo) -> None:
        with suppress(OSError, KeyError):  # the folder may be gone or read-only by now
            self.claims.pop(video.line).unlink()

    def finish(self, video: ListedVideo, maker: str) -> None:
        with self._ended(video):
            self.outcome.made.append(video.line)
            done = self.count - len(self.waiting) - self.making
            self.tell(f"{done} of {self.count}: {video.out} ({maker}){self._left_words()}")

    def _left_words(self) -> str:
        """How many are being made, and about how long the list still takes at its pace so far."""
        left, made = len(self.waiting) + self.making, len(self.outcome.made)
        words = f"; {self.making} being made" if self.making else ""
        if made == 1:
            self.first = time.monotonic()
        elif left:
            seconds = (time.monotonic() - self.first) / (made - 1) * left
            words += f"; about {seconds / 3600:.1f} h left" if seconds >= 7200 else f"; about {seconds:.0f} s left"
        return words

    def fail(self, video: ListedVideo, why: str) -> None:
        with self._ended(video):
            self._fail(video, why)

    def lose(self, video: ListedVideo, maker: str, why: str) -> None:
        """Its ranks are gone: another maker takes it, unless that has happened before."""
        with self._ended(video):
            lost = self.lost_by.setdefault(video.line, [])
            lost.append(maker)
            if self.stopped or len(lost) >= ATTEMPTS:
                self._fail(video, why)
            else:
                self.waiting.insert(0, video)
                self.tell(f"line {video.line}, {video.out}: {maker} lost it and it will be made again. {why}")

    def leave(self, maker: str) -> None:
        with self.changed:
            self.makers.discard(maker)
            self.changed.notify_all()

    def stop(self) -> None:
        with self.changed:
            self.stopped = True
            self.changed.notify_all()

    def end(self) -> None:
        """No maker is left: what is waiting is made already, or not made. Where nothing failed, waits for what other
        runs of this host are writing."""
        for video in self.others:
            if is_written_here(claim_of(video.out)) and not self.outcome.failed:
                self.tell(f"waiting for another run, which is writing {video.out}")
                while is_written_here(claim_of(video.out)):
                    time.sleep(WAIT_SECONDS)
        for video in (*self.others, *self.waiting):
            try:
                finished = self.is_finished(video)
            except OptionError as fault:
                self._fail(video, str(fault))
                continue
            if finished:
                self.outcome.elsewhere.append(video.line)
            elif video in self.waiting:
                self.outcome.failed[video.line] = "no maker is left"
            else:
                claim = claim_of(video.out)
                self._fail(video, f"another run is writing it, or was broken off: then delete {claim} if it is there")

    @contextmanager
    def _ended(self, video: ListedVideo) -> Iterator[None]:
        """`video` is no longer being made; what became of it is written down before anyone looks."""
        with self.changed:
            self.making -= 1
            self._release(video)
            yield
            self.changed.notify_all()

    def _fail(self, video: ListedVideo, why: str) -> None:
        self.outcome.failed[video.line] = why
        self.tell(f"line {video.line}, {video.out}: not made. {why}")


def work(videos: VideoList, maker: Maker) -> None:
    """Make videos until none is left, or until this maker loses one after another."""
    if not maker.start():
        return
    videos.join(maker)
    losses = 0
    try:
        while losses < LOSSES and not maker.gone and (video := videos.take(maker.name)) is not None:
            try:
                maker.make(video)
            except WorkerError as fault:
                losses += 1
                videos.lose(video, maker.name, str(fault))
            except UserError as fault:
                videos.fail(video, str(fault))
            except OSError as fault:  # the disk is full: what is made from now on would be lost, too
                videos.fail(video, str(fault))
                videos.stop()
            except BaseException as fault:
                videos.fail(video, f"{type(fault).__name__}: {fault}")
                raise
            else:
                losses = 0
                videos.finish(video, maker.name)
        if losses >= LOSSES:
            videos.tell(f"{maker.name} lost {losses} videos in a row and makes no more")
    finally:
        videos.leave(maker.name)
        maker.end()


def make_all(videos: VideoList, makers: ListMakers) -> Outcome:
    """Have all makers make the videos at the same time; one to which no other comes runs in this thread. Raises what a
    maker raises that is no fault of a video, when all have stopped."""
    working: dict[Future[None], Maker] = {}
    with ThreadPoolExecutor(MOST_MAKERS) as pool:
        try:
            while videos.left:
                for future in [future for future in working if future.done()]:
                    working.pop(future)
                    future.result()
                ready = makers.ready(videos.left)
                for maker in ready:
                    videos.join(maker)
                if len(ready) == 1 and not makers.more:
                    work(videos, *ready)
                else:
                    working |= {pool.submit(work, videos, maker): maker for maker in ready}
                if not working and not makers.more:
                    break
                with videos.changed:
                    if videos.left:
                        videos.changed.wait(WAIT_SECONDS)
        finally:  # also when the user interrupts
            videos.stop()
            for maker in working.values():
                maker.end()
    for future in working:
        future.result()
    videos.end()
    return videos.outcome


class LocalMakers(ListMakers):
    """This process, or groups of GPUs of this host with ranks of their own."""

    def __init__(self, groups: Sequence[WorkerOptions] | None, device: str, loaded: LoadOptions) -> None:
        """groups: None for this process."""
        self.loaded, self.find = loaded, functools.cache(find_models)  # headers are read once
        self.device = choose_device(device) if groups is None else torch.device(groups[0].devices[0])
        names = [f"group {number} ({', '.join(group.devices)})" for number, group in enumerate(groups or (), 1)]
        ranks = [Workers(group) for group in groups or ()]
        makers = [
            Maker(name, partial(make_video, WorkerEngine(workers), loaded), workers.kill)
            for name, workers in zip(names, ranks, strict=True)
        ]
        super().__init__(makers or [Maker("this process", partial(make_video, LocalEngine(), loaded))])

    def notes(self, request: Request) -> Sequence[str]:
        return check_request(self.loaded, request, self.device, self.find).plan.lines
