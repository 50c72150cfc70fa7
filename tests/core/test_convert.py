"""The script that converts files of version 1."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from optpipe import Problem, ScheduleFile

ROOT = Path(__file__).parents[2]
STAGE = {
    "forward_ms": 1.0,
    "backward_input_ms": 1.0,
    "backward_weight_ms": 1.0,
    "activation_bytes": 10,
    "weight_grad_bytes": 4,
    "offload_ms": 1.0,
    "reload_ms": 1.0,
    "offload_bytes": 10,
}


def old_problem(link: str | None = None) -> dict[str, object]:
    return {
        "format": "optpipe.problem/1",
        "microbatches": 1,
        "devices": [{"memory_bytes": 10, "host_memory_bytes": 20, "link": link}] * 2,
        "stages": [{**STAGE, "device": d} for d in range(2)],
        "layers": [{**STAGE}],
    }


def convert(path: Path, document: dict[str, object]) -> None:
    path.write_text(json.dumps(document))
    subprocess.run([sys.executable, ROOT / "scripts" / "convert_v1.py", path], check=True)


def test_a_problem_of_version_1_becomes_one_of_version_2(tmp_path: Path):
    for _ in range(2):  # a file of version 2 stays as it is
        convert(tmp_path / "p.json", old_problem())
        problem = Problem.load(tmp_path / "p.json")
        assert problem.devices[0].activation_budget_bytes == 10
        assert problem.devices[0].host_memory_bytes == 20
        assert problem.stages[1].saved_for_weight_bytes == 4


@pytest.mark.parametrize("link", ["node 0", "memory_bytes", "problem_sha256", "format"])
def test_a_schedule_of_version_1_keeps_the_names_of_its_links(tmp_path: Path, link: str):
    schedule = {
        "format": "optpipe.schedule/1",
        "problem": old_problem(link),
        "problem_sha256": "of another format",
        "devices": [{"program": ["0F0", "0O0", "0D0", "0R0", "0BW0"]}, {"program": ["1F0", "1BW0"]}],
        "links": {link: ["0O0", "0R0"]},
    }
    convert(tmp_path / "s.json", schedule)
    file = ScheduleFile.load(tmp_path / "s.json")
    assert file.links == {link: ("0O0", "0R0")}
    assert file.schedule().makespan_ms > 0
