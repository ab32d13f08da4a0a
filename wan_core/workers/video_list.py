"""A list of videos shared out over makers: one GPU each, or one mesh of GPUs each, with ranks of its own.

Every maker takes the next video that nobody has, until none is left. A video whose ranks are lost is made by another
maker, while its own starts ranks again. Other programs, also on other hosts, may work on the same list: a video is
claimed while it is made and finished when its file is there, so nothing is made twice.

A claim is the small hidden file of `outputs.py`. Here its holder renews it every few seconds. Other hosts cannot see
whether that process runs; they remove a claim that was not renewed for a minute. No clocks of hosts are compared: each
program looks at what changes while it looks.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from wan_core.config import OptionError, Request, UserError
from wan_core.config.outputs import claim_of, make_claim, remove_left_over
from wan_core.workers.launcher import WorkerError

ATTEMPTS = 2  # a video that was lost so often is given up
LOSSES = 3  # a maker that lost so many videos in a row is given up
POLL_SECONDS = 1.0  # between two looks at what other programs have finished
RENEW_SECONDS = 5.0
SILENT_SECONDS = 60.0
RENEWED = "renewed while it is held\n"  # the text of such claims: one of another command is never removed for its age


@dataclass(frozen=True)
class ListedVideo:
    """One line of a list. key: what it is made of, as a short text that the file contains when it is finished."""

    line: int
    request: Request
    out: Path
    key: str


@dataclass(frozen=True)
class Maker:
    """What makes one video at a time. make: writes the video and its report; raises WorkerError where the ranks are
    lost, UserError where the video is refused, OSError where it cannot be written."""

    name: str
    make: Callable[[ListedVideo], None]


class SharedClaims:
    """The claims of one program. Any thread may use it; outside of `with`, nothing is claimed."""

    def __init__(self) -> None:
        self.held: dict[Path, Path] = {}  # name -> its claim
        self.seen: dict[Path, tuple[int, float]] = {}  # claim of another program -> its time stamp, when first seen
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._renew, daemon=True)

    def __enter__(self) -> SharedClaims:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        for path in list(self.held):
            self.release(path)

    def take(self, path: Path) -> bool:
        """Claim `path`; False while another program has it. Raises OSError."""
        remove_left_over(path.absolute().parent)
        claim = make_claim(path, RENEWED)
        if claim is None:
            self._remove_silent(claim_of(path))
            return False
        self.held[path] = claim
        return True

    def release(self, path: Path) -> None:
        with suppress(OSError):  # the folder may be gone or read-only by now
            self.held.pop(path).unlink()

    def _renew(self) -> None:
        while not self._end.wait(RENEW_SECONDS):
            for claim in list(self.held.values()):
                with suppress(OSError):  # released meanwhile
                    os.utime(claim)

    def _remove_silent(self, claim: Path) -> None:
        """Remove a claim that was not renewed for `SILENT_SECONDS` of this program's time."""
        with suppress(OSError):  # released meanwhile
            stamp = claim.stat().st_mtime_ns
            if not claim.read_text(errors="replace").endswith(RENEWED):
                return
            first, since = self.seen.get(claim, (None, 0.0))
            if first != stamp:
                self.seen[claim] = stamp, time.monotonic()
            elif time.monotonic() - since > SILENT_SECONDS and claim.stat().st_mtime_ns == stamp:
                claim.unlink()


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
        makers: Sequence[str],
        claims: SharedClaims,
        is_finished: Callable[[ListedVideo], bool],
        tell: Callable[[str], None] = lambda words: None,
    ) -> None:
        """is_finished: raises OptionError where another video has the name."""
        self.waiting, self.makers = list(videos), set(makers)
        self.claims, self.is_finished, self.tell = claims, is_finished, tell
        self.count, self.making = len(videos), 0
        self.lost_by: dict[int, list[str]] = {}
        self.outcome = Outcome()
        self.stopped = False
        self.changed = threading.Condition()

    def take(self, maker: str) -> ListedVideo | None:
        """The next video for this maker, claimed; None when none is left. Waits for those that others are making, in
        case they are lost."""
        with self.changed:
            while not self.stopped and (self.waiting or self.making):
                for video in list(self.waiting):
                    lost = self.lost_by.get(video.line, [])  # a maker leaves a video that it lost to those that did not
                    if (maker not in lost or self.makers <= set(lost)) and self._claim(video):
                        self.making += 1
                        return video
                self.changed.wait(POLL_SECONDS)
            return None

    def _claim(self, video: ListedVideo) -> bool:
        """Whether to make it now: nobody has made it, and no other program is making it."""
        try:
            taken = self.claims.take(video.out)
            finished = self.is_finished(video)  # looked at after the claim: the other program releases it when done
        except (OptionError, OSError) as fault:
            self.waiting.remove(video)
            self._fail(video, str(fault))
            return False
        if finished:
            self.waiting.remove(video)
            self.outcome.elsewhere.append(video.line)
            self.tell(f"{video.out} was made by another program")
        elif taken:
            self.waiting.remove(video)
            return True
        if taken:
            self.claims.release(video.out)
        return False

    def finish(self, video: ListedVideo, maker: str) -> None:
        with self._ended(video):
            self.outcome.made.append(video.line)
            done = self.count - len(self.waiting) - self.making
            self.tell(f"{done} of {self.count}: {video.out} ({maker})")

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
        """This maker takes no more videos."""
        with self.changed:
            self.makers.discard(maker)
            self.changed.notify_all()

    def stop(self) -> None:
        """Nobody takes another video."""
        with self.changed:
            self.stopped = True
            self.changed.notify_all()

    def end(self) -> None:
        """No maker is left: what is waiting is made already, or not made."""
        for video in self.waiting:
            try:
                finished = self.is_finished(video)
            except OptionError as fault:
                self._fail(video, str(fault))
                continue
            if finished:
                self.outcome.elsewhere.append(video.line)
            else:
                self.outcome.failed[video.line] = "no maker is left"

    @contextmanager
    def _ended(self, video: ListedVideo) -> Iterator[None]:
        """`video` is no longer being made; what became of it is written down before anyone looks."""
        with self.changed:
            self.making -= 1
            self.claims.release(video.out)
            yield
            self.changed.notify_all()

    def _fail(self, video: ListedVideo, why: str) -> None:
        self.outcome.failed[video.line] = why
        self.tell(f"line {video.line}, {video.out}: not made. {why}")


def work(videos: VideoList, maker: Maker) -> None:
    """Make videos until none is left, or until this maker loses one after another."""
    losses = 0
    while losses < LOSSES and (video := videos.take(maker.name)) is not None:
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
    videos.leave(maker.name)


def make_all(videos: VideoList, makers: Sequence[Maker], kill: Callable[[], object]) -> Outcome:
    """Have the makers make all videos at the same time; one alone runs in this thread. kill: makes each `make` that
    runs in another thread fail now. Raises what a maker raises that is no fault of a video, when all have stopped."""
    if len(makers) == 1:
        work(videos, makers[0])
    else:
        with ThreadPoolExecutor(len(makers)) as pool:
            running = [pool.submit(work, videos, maker) for maker in makers]
            try:
                wait(running, return_when=FIRST_EXCEPTION)
            finally:  # also when the user interrupts
                if not all(future.done() for future in running):
                    videos.stop()
                    kill()
        for future in running:
            future.result()
    videos.end()
    return videos.outcome
