"""Draw the plots of docs/images/ from the committed results, with matplotlib (`pip install ".[plots]"`).

python -m tools.plots             # draw all of them, and write docs/images/plots.json: the points that they show
python -m tools.plots --check     # draw nothing; exit 1 if the results say something else than plots.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.readme_tables import ROOT, newest_result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RESULTS, IMAGES = ROOT / "benchmarks/results", ROOT / "docs/images"
DRAWN = IMAGES / "plots.json"
COLOURS = 96
Series = dict[str, list[list[Any]]]  # name in the legend -> points [x, y, label]

# ------------------------------------------------------------------------------------------------------ quality.png

CACHES = "quality-h200"  # all rows of it are drawn; they skip steps and read all of attention
SPARSE = (  # series, result, row: these read a part of attention
    ("sparse attention", "sparse-quality-x86_64-cpu", "sparse:balanced"),
    ("both", "sparse-quality-x86_64-cpu", "magcache:balanced+sparse:balanced"),
    ("both", "speed-presets-quality-x86_64-cpu", "magcache:fast+sparse:fast"),
    ("speed preset", "speed-presets-quality-x86_64-cpu", "speed:balanced"),
    ("speed preset", "speed-presets-quality-x86_64-cpu", "speed:fast"),
)
FULL_FORWARDS = 80  # of 40 guided steps
DOT = 5  # pixels of a point that no label covers, from its centre


def quality_points() -> Series:
    """Seconds of a video of A14B at 1280x720x81 (FP8, one H200), as the plan estimates them, and dB as measured on the
    embedded model against its full run."""
    from wan_core.pipeline.evaluate.search_run import H200_BESIDE, H200_FORWARD

    rows = newest_result(CACHES, RESULTS)["rows"]
    found: Series = {"full run": [[_rounded(FULL_FORWARDS * H200_FORWARD + H200_BESIDE), None, "full run"]]}
    for row in rows:
        kind = "guidance" if row["name"].startswith(("guidance", "every")) else "step caching"
        seconds = row["forwards"] * H200_FORWARD + H200_BESIDE
        found.setdefault(kind, []).append([_rounded(seconds), row["psnr"], row["name"]])
    for series, result, name in SPARSE:
        row = next(row for row in newest_result(result, RESULTS)["rows"] if row["name"] == name)
        forwards, share = planned(name)
        if forwards != row["forwards"]:
            raise ValueError(f"{name} has {forwards} forwards now and {row['forwards']} in {result}: measure it again")
        seconds = share * H200_FORWARD + H200_BESIDE
        found.setdefault(series, []).append([_rounded(seconds), row["psnr"], name])
    return found


def planned(setting: str) -> tuple[int, float]:
    """Forwards of 40 steps of A14B with `setting`, and what they cost in dense forwards at 1280x720x81."""
    from wan_core.models.wan.tasks import find_task
    from wan_core.sampling.cache.arguments import parse_setting
    from wan_core.sampling.cache.skipping import skip_forwards
    from wan_core.sampling.plan import make_plan
    from wan_core.sampling.sparsity.schedule import with_costs

    task = find_task("t2v-A14B")
    assert task.full_size is not None
    plan = skip_forwards(make_plan(task=task.name, steps=40), parse_setting(setting), None, None)
    plan = with_costs(plan, task.full_size, (21, 90, 160))
    cost = plan.estimate({"high": 1.0, "low": 1.0})
    assert cost is not None
    return plan.forwards, cost


def draw_quality(series: Series) -> Figure:
    figure, (axes,) = new_figure(1, (9.6, 5.6))
    ((full, _, words),) = series["full run"]
    axes.axvline(full, color="black", linestyle="--", label=f"{words}: {full:.0f} s, nothing lost")
    for colour, (name, points) in enumerate((n, p) for n, p in series.items() if n != "full run"):
        x, y, _ = zip(*points, strict=True)
        axes.scatter(x, y, color=f"C{colour}", label=name, zorder=3)
    axes.set(xlim=(0, full + 25), ylim=(20, 54))
    axes.set_xlabel(
        "seconds of a video at 1280x720, 81 frames, 40 steps: A14B in FP8 on one H200, as the plan estimates"
    )
    axes.set_ylabel("PSNR against the full run, dB: embedded model")
    axes.set_title("What a faster setting costs")
    axes.legend(loc="upper left")
    label(axes, [tuple(point) for name, points in series.items() if name != "full run" for point in points])
    return figure


def label(axes: Axes, points: list[tuple[float, float, str]]) -> None:
    """Write the label of every point beside it, at the first place around it where nothing is written or drawn."""
    from matplotlib.transforms import Bbox

    figure = axes.figure
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    centres = [axes.transData.transform((x, y)) for x, y, _ in points]
    dots = [Bbox.from_bounds(x - DOT, y - DOT, 2 * DOT, 2 * DOT) for x, y in centres]
    legend = axes.get_legend()
    taken = [] if legend is None else [legend.get_window_extent(renderer)]
    places = [(8 * side, dy) for dy in (0, 8, -8, 15, -15, 23, -23, 31, -31) for side in (1, -1)]
    for x, y, words in sorted(points, key=lambda point: point[1], reverse=True):
        for across, up in places:
            align = "left" if across > 0 else "right"
            text = axes.annotate(
                words,
                (x, y),
                (across, up),
                textcoords="offset points",
                ha=align,
                va="center",
                fontsize=8,
            )
            box = text.get_window_extent(renderer)
            inside = axes.bbox.x0 < box.x0 and box.x1 < axes.bbox.x1
            if inside and not any(box.overlaps(other) for other in [*taken, *dots]):
                taken.append(box)
                break
            text.remove()
        else:
            raise ValueError(f"no place for the label {words}: draw a larger picture")


# ------------------------------------------------------------------------------------------------ sparse_recall.png


def recall_points() -> Series:
    """Of `tools/sparse_recall.py`: a row is one way to choose blocks at one share, on one source."""
    found: Series = {}
    for row in newest_result("sparse-recall", RESULTS)["rows"]:
        found.setdefault(row["name"], []).append([row["read"], [row["mass"], row["error"]], row["source"]])
    return found


def draw_recall(series: Series) -> Figure:
    from matplotlib.ticker import MultipleLocator

    sources = list(dict.fromkeys(source for points in series.values() for *_, source in points))
    figure, axes = new_figure(2 * len(sources), (9.6, 3.6 * len(sources)), columns=2)
    dashes = {name: "--" if name == "tiles, mean" else "-" for name in series}  # it is close to another one
    for row, source in enumerate(sources):
        for column, words in enumerate(("attention kept", "relative error of the output")):
            one = axes[2 * row + column]
            for name, points in series.items():
                shown = [(100 * read, values[column]) for read, values, of in points if of == source]
                one.plot(*zip(*shown, strict=True), dashes[name], marker="o", markersize=4, label=name)
            one.yaxis.set_major_locator(MultipleLocator(0.2))
            one.set(xlim=(0, 100), ylim=(0, None), title=f"{source}:\n{words}", xlabel="blocks read, %")
    axes[1].legend(fontsize=8)
    return figure


# --------------------------------------------------------------------------------------------------------- all plots

PLOTS: dict[str, tuple[Callable[[], Series], Callable[[Series], Figure]]] = {
    "quality.png": (quality_points, draw_quality),
    "sparse_recall.png": (recall_points, draw_recall),
}


def new_figure(count: int, size: tuple[float, float], columns: int = 1) -> tuple[Figure, list[Axes]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    axes = [figure.add_subplot(-(-count // columns), columns, n + 1) for n in range(count)]
    for one in axes:
        one.grid(alpha=0.3)
        one.spines[["top", "right"]].set_visible(False)
    return figure, axes


def save(figure: Figure, path: Path) -> None:
    """Write a PNG of few colours, which is a third of the size."""
    import numpy as np
    from PIL import Image

    figure.canvas.draw()
    pixels = np.asarray(figure.canvas.buffer_rgba())  # type: ignore[attr-defined]
    Image.fromarray(pixels).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)


def _rounded(seconds: float) -> float:
    return round(seconds, 1)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="draw nothing; exit 1 if a plot shows older results")
    options = parser.parse_args(argv)
    points = {name: read() for name, (read, _) in PLOTS.items()}
    if options.check:
        drawn = json.loads(DRAWN.read_text(encoding="utf-8"))
        stale = [name for name in PLOTS if drawn.get(name) != points[name]]
        if stale:
            print(
                f"{', '.join(stale)} in docs/images: older than the results; run python -m tools.plots", file=sys.stderr
            )
        return 1 if stale else 0
    for name, (_, draw) in PLOTS.items():
        save(draw(points[name]), IMAGES / name)
        print(IMAGES / name, (IMAGES / name).stat().st_size, "bytes")
    DRAWN.write_text(json.dumps(points, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
