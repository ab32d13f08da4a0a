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
from tools.techniques import RUNS, best, timed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RESULTS, IMAGES = ROOT / "benchmarks/results", ROOT / "docs/images"
DRAWN = IMAGES / "plots.json"
COLOURS = 96
Series = dict[str, list[list[Any]]]  # name in the legend -> points [x, y, label]

# ------------------------------------------------------------------------------------------------------ quality.png

KINDS = {
    "magcache": "step caching",
    "taylorseer": "step caching",
    "sparse": "sparse attention",
}
SEVERAL = "several"
KIND_COLOURS = {
    "step caching": "C0",
    "sparse attention": "C2",
    SEVERAL: "C7",
}
LINE = {"arrowstyle": "-", "linewidth": 0.7, "color": "gray", "shrinkA": 0, "shrinkB": 2}
DOT = 5  # pixels of a point that no label covers, from its centre


def quality_points() -> Series:
    """Result of `techniques` -> seconds of a video, dB and their standard error, setting; the full run first, then the
    fastest."""
    series: Series = {}
    for result in RUNS:
        full, rows = timed(result, newest_result(f"{result}-x86_64-cpu", RESULTS)["rows"])
        series[result] = [[full, None, None, "full"]]
        series[result] += [[taken, row["psnr"], row["psnr_se"], row["name"]] for taken, row in rows]
    return series


def draw_quality(series: Series) -> Figure:
    figure, panels = new_figure(len(series), (13.0, 9.6), columns=2)
    for axes, (result, ((full, *_), *points)) in zip(panels, series.items(), strict=True):
        axes.axvline(full, color="black", linestyle="--", label=f"full run: {full:.0f} s, nothing lost")
        kinds = [SEVERAL if "+" in name else KINDS[name.partition(":")[0]] for *_, name in points]
        for kind, colour in KIND_COLOURS.items():
            x, y, error, _ = zip(*(one for one, of in zip(points, kinds, strict=True) if of == kind), strict=True)
            axes.errorbar(x, y, error, fmt="none", color=colour)
            axes.scatter(x, y, s=24, color=colour, label=kind, zorder=3)
        axes.set(xlim=(0, full * 1.04), title=RUNS[result][0])
        axes.set_xlabel("seconds of a video of A14B at 1280x720x81, FP8, one H200, as the plan estimates")
        axes.set_ylabel("PSNR against the full run, dB: embedded model")
    panels[0].legend(loc="upper left", fontsize=8)
    for axes, (_, *points) in zip(panels, series.values(), strict=True):  # now that nothing moves any more
        front = best([(x, {"name": name, "psnr": y}) for x, y, _, name in points])
        label(axes, [(x, y, name if name in front else "") for x, y, _, name in points])
    return figure


def label(axes: Axes, points: list[tuple[float, float, str]]) -> None:
    """Write the label of every point that has one beside it, at the first place where nothing is written or drawn."""
    from matplotlib.transforms import Bbox

    figure = axes.figure
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    centres = [axes.transData.transform((x, y)) for x, y, _ in points]
    dots = [Bbox.from_bounds(x - DOT, y - DOT, 2 * DOT, 2 * DOT) for x, y in centres]
    legend = axes.get_legend()
    taken = [] if legend is None else [legend.get_window_extent(renderer)]
    places = [(8 * side, dy) for dy in (0, 8, -8, 15, -15, 23, -23, 31, -31, 45, -45, 60, -60) for side in (1, -1)]
    for x, y, shown_text in sorted((point for point in points if point[2]), key=lambda point: point[1], reverse=True):
        for across, up in places:
            align = "left" if across > 0 else "right"
            text = axes.annotate(
                shown_text,
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
                if up:  # a line from the name to its point: another point may be nearer to it
                    axes.annotate("", (x, y), (across, up), textcoords="offset points", arrowprops=LINE)
                break
            text.remove()
        else:
            raise ValueError(f"no place for the label {shown_text}: draw a larger picture")


# ------------------------------------------------------------------------------------------------ sparse_recall.png


def recall_points() -> Series:
    """A row is one way to choose blocks at one share, on one source."""
    series: Series = {}
    for row in newest_result("sparse-recall", RESULTS)["rows"]:
        series.setdefault(row["name"], []).append([row["read"], [row["mass"], row["error"]], row["source"]])
    return series


def draw_recall(series: Series) -> Figure:
    from matplotlib.ticker import MultipleLocator

    sources = list(dict.fromkeys(source for points in series.values() for *_, source in points))
    figure, axes = new_figure(2 * len(sources), (9.6, 3.6 * len(sources)), columns=2)
    dashes = {name: "--" if name == "tiles, mean" else "-" for name in series}  # it is close to another one
    for row, source in enumerate(sources):
        for column, title in enumerate(("attention kept", "relative error of the output")):
            one = axes[2 * row + column]
            for name, points in series.items():
                shown = [(100 * read, values[column]) for read, values, of in points if of == source]
                one.plot(*zip(*shown, strict=True), dashes[name], marker="o", markersize=4, label=name)
            one.yaxis.set_major_locator(MultipleLocator(0.2))
            one.set(xlim=(0, 100), ylim=(0, None), title=f"{source}:\n{title}", xlabel="blocks read, %")
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
