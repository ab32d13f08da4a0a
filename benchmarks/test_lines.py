"""A plugin of pytest for the suite `tests`: a line of JSON for each test, as it ends, into the pipe WANCORE_TEST_LINES.

Setup and teardown have lines of their own where they fail or skip. Under xdist the controller alone writes.
"""

from __future__ import annotations

import json
import os
from typing import Any


def pytest_runtest_logreport(report: Any) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    if report.when != "call" and report.passed:
        return
    message = ""
    if report.failed:
        message = getattr(getattr(report.longrepr, "reprcrash", None), "message", "") or str(report.longrepr)[-300:]
    file, _, name = report.nodeid.partition("::")
    line = {"file": file, "name": name, "when": report.when, "outcome": report.outcome}
    line |= {"seconds": round(report.duration, 3), "message": message.strip()[:300]}
    os.write(int(os.environ["WANCORE_TEST_LINES"]), (json.dumps(line) + "\n").encode())
