"""Converts problem and schedule files of version 1 to version 2: `python scripts/convert_v1.py FILE...`, in place."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

RENAMED = {"memory_bytes": "activation_budget_bytes", "weight_grad_bytes": "saved_for_weight_bytes"}
FORMATS = {f"optpipe.{kind}/1": f"optpipe.{kind}/2" for kind in ("problem", "schedule")}


def converted(value: Any) -> Any:
    """The same document in version 2; one that is in version 2 already stays as it is."""
    if isinstance(value, list):
        return [converted(item) for item in value]
    if not isinstance(value, dict):
        return value
    # The keys of `links` are names that a user gave, and their values are ops.
    renamed = {
        RENAMED.get(key, key): item if key == "links" else converted(item)
        for key, item in value.items()
        if key != "problem_sha256"
    }
    if isinstance(renamed.get("format"), str):
        renamed["format"] = FORMATS.get(renamed["format"], renamed["format"])
    return renamed


def main(paths: list[str]) -> None:
    for path in map(Path, paths):
        document = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps(converted(document), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
