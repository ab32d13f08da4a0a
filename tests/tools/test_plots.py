"""tools/plots.py: the plots of docs/images show the committed results, and no label covers another."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import pytest

from tools import plots

MOST_BYTES = 100_000


def test_the_committed_plots_show_the_committed_results(capsys: pytest.CaptureFixture[str]) -> None:
    assert plots.main(["--check"]) == 0, capsys.readouterr().err
    for name in plots.PLOTS:
        assert (plots.IMAGES / name).stat().st_size < MOST_BYTES


def test_a_plot_of_older_results_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = json.loads(plots.DRAWN.read_text(encoding="utf-8"))
    drawn["quality.png"]["techniques-t2v-40"][1][1] += 1
    monkeypatch.setattr(plots, "DRAWN", tmp_path / "plots.json")
    plots.DRAWN.write_text(json.dumps(drawn), encoding="utf-8")
    assert plots.main(["--check"]) == 1


@pytest.mark.parametrize("name", plots.PLOTS)
def test_no_words_cover_others(name: str) -> None:
    read, draw = plots.PLOTS[name]
    figure = draw(read())
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    for axes in figure.axes:
        texts = [*axes.texts, axes.title, axes.xaxis.label, axes.yaxis.label]
        boxes = [text.get_window_extent(renderer) for text in texts if text.get_text()]
        legend = axes.get_legend()
        boxes += [] if legend is None else [legend.get_window_extent(renderer)]
        assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))
        points = [place for dots in axes.collections for place in axes.transData.transform(dots.get_offsets())]
        assert not any(box.contains(*place) for box in boxes for place in points)
        assert all(figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 for box in boxes)


def test_labels_without_a_free_place_are_refused() -> None:
    figure, (axes,) = plots.new_figure(1, (1.5, 1.5))
    axes.set(xlim=(0, 1), ylim=(0, 1))
    with pytest.raises(ValueError, match="no place for the label"):
        plots.label(axes, [(0.5, 0.5, "a label wider than this small picture")])
    assert figure.axes == [axes]


def test_running_never_needs_matplotlib() -> None:
    runtime = [*plots.ROOT.glob("wan_core/**/*.py"), *plots.ROOT.glob("nodes/**/*.py"), plots.ROOT / "requirements.txt"]
    assert len(runtime) > 100
    assert not [path for path in runtime if "matplotlib" in path.read_text(encoding="utf-8")]
