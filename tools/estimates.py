"""Estimates of how long a video takes on cards that nobody measured, for the README and the templates' notes.

Counted are the operations of all forwards and of the decoder over the vendors' rates, and the bytes between them over
the bandwidth of the card's memory. The share of these rates that a card reaches is the H100's: what the newest
`everyday-on` result measured for WanCore's nodes. `check` compares the same arithmetic with a published time.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.measured import find, newest_result
from wan_core.config import EXACT, SPEEDS, LoadOptions, Request, SkipOptions
from wan_core.config.host_memory import HOST_RESERVE
from wan_core.execution.memory.planning import limited, plan_memory
from wan_core.models.wan.families import find_task
from wan_core.pipeline.card_choice import task_memory
from wan_core.pipeline.sources import find_models
from wan_core.sampling.build import ModelFacts, PlanRequest, build_plan

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
MEASURED, OURS = "everyday-on-h100", "on, new seed: ours, auto"
NATIVE = "on, new seed: native"
REST = 9e-3 * 4.26e12 / 75_600  # bytes of a block for each token, outside its products: 9 ms of an H200 at 720p
DECODE = 280e12 / (640 * 640 * 81)  # operations of Wan 2.1's decoder for a pixel of a frame, counted
PUBLISHED, PUBLISHED_BY = 71.0, "ComfyUI's image-to-video template, RTX 4090D, warm"


@dataclass(frozen=True)
class Card:
    """Dense rates with fp32 accumulation in operations a second, bytes a second, by the vendor's data sheets."""

    name: str
    gib: int
    bf16: float
    fp8: float
    bandwidth: float


CARDS = (
    Card("RTX 4060", 8, 30.2e12, 60.5e12, 272e9),
    Card("RTX 3060", 12, 25.5e12, 25.5e12, 360e9),  # no FP8: FP8 files are computed in bf16
    Card("RTX 4070 Ti SUPER", 16, 88.2e12, 176e12, 672e9),
    Card("RTX 4090", 24, 165e12, 330e12, 1008e9),
    Card("RTX 5090", 32, 209e12, 419e12, 1792e9),
    Card("H100", 80, 989e12, 1979e12, 3350e9),
)
H100, NOTED = CARDS[-1], ("RTX 3060", "RTX 4090", "RTX 5090")
RTX_4090D = Card("RTX 4090D", 24, 147e12, 294e12, 1008e9)


@dataclass(frozen=True)
class Video:
    """A video of one template. more: operations of a forward over those of the plain model."""

    task: str
    width: int
    height: int
    frames: int
    forwards: int
    more: float = 1.0

    def work(self) -> tuple[float, float, float]:
        """Operations of one forward in linears and in attention, and its other bytes."""
        models = find_models(LoadOptions(model=f"random:{self.task}"), image=False)
        dit, vae = models.dit, models.vae
        side = vae.spatial_stride * dit.patch_size[1]
        L = vae.latent_frames(self.frames) * (self.width // side) * (self.height // side)  # tokens
        C, blocks = dit.dim, dit.num_layers
        linears = 2 * blocks * L * (6 * C * C + 2 * C * dit.ffn_dim)  # q, k, v, o; q, o of the text; up, down
        return linears, 4 * blocks * L * (L + dit.text_len) * C, REST * blocks * L


EVERYDAY = Video("i2v-A14B", 640, 640, 81, 4)
SMALL_VIDEO = Video("i2v-A14B", 832, 480, 81, 4)


def sampling(video: Video, card: Card, fp8: bool = True) -> float:
    """Seconds of all forwards if nothing were in the way."""
    linears, attention, rest = video.work()
    one = linears / (card.fp8 if fp8 else card.bf16) + attention / card.bf16 + rest / card.bandwidth
    return video.forwards * video.more * one


def seconds(video: Video, card: Card, *, row: str = OURS, fp8: bool = True) -> float:
    """From the click to the file, with the share that the H100 reached in that row of its result."""
    phases = find(newest_result(MEASURED, RESULTS)["rows"], row, "estimates")["nodes"]
    share = sampling(EVERYDAY, H100, fp8) / phases["samplers"]
    size = video.width * video.height * video.frames
    everyday = EVERYDAY.width * EVERYDAY.height * EVERYDAY.frames
    products = DECODE * size / card.bf16 / share
    moved = (phases["decode"] - DECODE * everyday / H100.bf16 / share) * H100.bandwidth / card.bandwidth
    return sampling(video, card, fp8) / share + products + (moved + phases["save"]) * size / everyday + phases["start"]


def check() -> tuple[float, float]:
    """Seconds of ComfyUI's own nodes on the card whose time was published, from their time on the H100, both computed
    in bf16; and the error."""
    estimate = seconds(EVERYDAY, RTX_4090D, row=NATIVE, fp8=False)
    return estimate, estimate / PUBLISHED - 1


def said(value: float) -> str:
    """A duration as coarse as the estimate is."""
    if value < 90:
        return f"{max(5, round(value / 5) * 5)} s"
    return f"{value / 60:.0f} min" if value < 5400 else f"{value / 3600:.1f} h"


def note(video: Video) -> str:
    """The line of a template's note."""
    times = ", ".join(f"{card.name} {said(seconds(video, card))}" for card in CARDS if card.name in NOTED)
    return f"**Time**, estimated and not measured: {times}."


# ---------------------------------------------------------------------------------------------------------- your card

MEMORY = (16, 32, 48, 64)  # GB, as computers have it
FULL, SMALL = "Wan 2.2 I2V 4 steps", "Wan 2.2 I2V small card"
HEADS = {
    "en": "| card | 14B, 720p | 5B, 720p | host memory | template | its video, seconds |",
    "zh": "| 显卡 | 14B，720p | 5B，720p | 内存 | 模板 | 它的视频，秒 |",
}
ANSWERS = {"en": ("yes", "yes, decoded in tiles", "no"), "zh": ("可以", "可以，分块解码", "不行")}
LESS = {"en": "with {} GB: *{}*", "zh": "内存 {} GB：*{}*"}


def your_card(language: str) -> list[str]:
    """What fits which card by the memory plan, in which host memory, and an estimate of one video of its template."""
    needs = []
    for task, precision, size in (("i2v-A14B", "fp8", (1280, 720)), ("ti2v-5B", "bf16", (1280, 704))):
        options = LoadOptions(model=f"random:{task}", precision=precision)
        needs.append(task_memory(options, Request(prompt="", width=size[0], height=size[1])))
    lines = [HEADS[language], "|---|---|---|---:|---|---:|"]
    for card in CARDS:
        plans = [plan_memory(sizes, beside, limited(card.gib)) for sizes, beside in needs]
        yes, tiles, no = ANSWERS[language]
        fits = [yes if plan.fits else tiles if plan.denoise <= plan.room else no for plan in plans]
        host = host_memory(needs[0][0].all if plans[0].policy != "resident" else 0)
        small = card.gib < 12
        less = "; " + LESS[language].format(32, SMALL) if 12 <= card.gib < 24 else ""
        template, host = (f"*{SMALL}*", 32) if small else (f"*{FULL}*{less}", host)
        value = plain(seconds(SMALL_VIDEO if small else EVERYDAY, card))
        row = (f"{card.name}, {card.gib} GB", *fits, f"{host} GB", template, value)
        lines.append(f"| {' | '.join(row)} |")
    return lines


def host_memory(waiting: int) -> int:
    """The smallest memory in GB that holds weights that wait, and other programs."""
    return next(size for size in MEMORY if size * 2**30 >= waiting + HOST_RESERVE)


def plain(value: float) -> str:
    """Seconds, in two digits."""
    return f"{float(f'{value:.2g}'):g}"


# ------------------------------------------------------------------------------------------------------------ 40 steps

GUIDED = {  # size -> the result of 20 guided steps, and its row that leaves nothing out
    "832x480": ("everyday-off480-h200", "off: ours, careful"),
    "640x640": ("everyday-off-h200", "off: ours, cudnn-fp8"),
    "1280x720": ("everyday-off720-h200", "off: ours, careful"),
}
INT8 = "off: native, comfy kitchen attention"


def of_forwards(row: dict[str, Any], forwards: int) -> float:
    """Seconds of a video that computes so many, from those of `row`, which computes 40."""
    return row["seconds"] + (forwards / 40 - 1) * row["nodes"]["samplers"]


def forty_steps(_: str) -> list[str]:
    """Videos of 40 guided steps by the forwards that each word computes: seconds, and times as fast as INT8."""
    task = find_task("i2v-A14B")
    facts = ModelFacts(task=task, dit=None, vae=task.vae)
    requests = {word: PlanRequest(steps=40, skip=SkipOptions(speed=word)) for word in SPEEDS if word != EXACT}
    forwards = {word: build_plan(request, facts).forwards for word, request in requests.items()}
    heads = (f"`{word}`: {count} of 80 forwards" for word, count in forwards.items())
    lines = ["| | INT8 | " + " | ".join(heads) + " |", "|---|---:|" + "---:|" * len(forwards)]
    for size, (name, whole) in GUIDED.items():
        rows = newest_result(name, RESULTS)["rows"]
        base = of_forwards(find(rows, INT8, name), 80)
        times = [of_forwards(find(rows, whole, name), count) for count in forwards.values()]
        lines.append(f"| {size} | {base:.0f} | " + " | ".join(f"{one:.0f} ({base / one:.2f})" for one in times) + " |")
    return lines


if __name__ == "__main__":
    print("\n".join(your_card("en")))
    print(f"check: {check()[0]:.0f} s where {PUBLISHED:.0f} were published ({PUBLISHED_BY}), {check()[1]:+.0%}")
