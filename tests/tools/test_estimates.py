"""Estimates for cards that nobody measured: the order of the cards, and the published time that checks them."""

from __future__ import annotations

import json
import re

from tools.estimates import EVERYDAY, GUIDED, H100, MEASURED, OURS, RESULTS, check, of_forwards, seconds
from tools.measured import find, newest_result
from tools.readme_parts import REPORTS

KEYS = {"card", "video", "machine", "rows"}


def test_the_estimate_of_the_measured_card_is_what_was_measured() -> None:
    measured = find(newest_result(MEASURED, RESULTS)["rows"], OURS, "test")["seconds"]
    assert abs(seconds(EVERYDAY, H100) / measured - 1) < 0.01


def test_the_estimate_of_more_forwards_gives_what_words_took() -> None:
    for name, whole in GUIDED.values():
        rows = newest_result(name, RESULTS)["rows"]
        for word, forwards in (("balanced", 34), ("fast", 28)):
            measured = find(rows, f"off: ours, {word}", "test")["seconds"]
            assert abs(of_forwards(find(rows, whole, "test"), forwards) / measured - 1) < 0.03


def test_the_readmes_say_how_far_off_the_published_time_is() -> None:
    _, error = check()
    assert abs(error) < 0.6
    for name in ("README.md", "README.zh.md"):
        text = (REPORTS.parent / name).read_text(encoding="utf-8")
        assert re.search(rf"{100 * error:.0f} ?%", text)


def test_cards_that_were_sent_have_the_form_and_nothing_private() -> None:
    for file in REPORTS.glob("*.json"):
        text = file.read_text(encoding="utf-8")
        assert json.loads(text).keys() == KEYS, file
        assert not re.search(r"/home/|/Users/|[A-Z]:\\|@|\.safetensors|\.gguf", text), file
