"""Write locales/en/nodeDefs.json from a running ComfyUI that has this pack: what the nodes themselves say.

    python tools/make_locales.py http://127.0.0.1:8188

The other languages are written by hand; `tests/test_locales.py` says what is missing in them or no longer there.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path
from typing import Any

ENGLISH = Path(__file__).resolve().parents[1] / "locales" / "en" / "nodeDefs.json"


def texts_of(info: dict[str, Any]) -> dict[str, Any]:
    """A node of `/object_info` -> its entry in a nodeDefs.json: outputs by position, all else by name."""
    groups = [info["input"].get(group, {}) for group in ("required", "optional")]
    inputs = {name: {"name": name, "tooltip": entry[1]["tooltip"]} for group in groups for name, entry in group.items()}
    outputs = {
        str(slot): {"name": name, "tooltip": tooltip}
        for slot, (name, tooltip) in enumerate(zip(info["output_name"], info["output_tooltips"], strict=True))
    }
    return {
        "display_name": info["display_name"],
        "description": info["description"],
        "inputs": inputs,
        "outputs": outputs,
    }


def main(address: str) -> None:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(f"{address.rstrip('/')}/object_info", timeout=60) as answer:
        nodes: dict[str, Any] = json.load(answer)
    texts = {name: texts_of(info) for name, info in nodes.items() if name.startswith("WanCore")}
    ENGLISH.write_text(json.dumps(texts, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
