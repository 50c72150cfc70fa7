"""`optpipe calibrate`: it learns from tables, checks predictions, measures kernels, and its file is a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.commands import Run

from optpipe.transformer.calibrate import NAMES
from optpipe.transformer.iterations import COLUMNS, MEASURED, iteration_ms, read_iterations
from optpipe.transformer.presets import GPUS

HEAD = ",".join([*COLUMNS.values(), MEASURED])
PLANS = [
    f"{tp * dp * pp},{batch},{size},1024,16,8,1024,{tp},{dp},{pp}"
    for tp, dp, pp in ((1, 1, 2), (2, 1, 1), (1, 2, 4), (4, 2, 1), (8, 2, 2))
    for size in (1, 4)
    for batch in (8, 32)
]
TRUTH = GPUS["A100-800G"].model_copy(update={"matmul_fraction": 0.5, "host_us": 60.0})


def test_it_learns_from_rows_and_checks_them(run: Run):
    rows = read_iterations("\n".join([HEAD, *(f"{plan},1" for plan in PLANS)]))
    times = [iteration_ms(row.on(TRUTH)) for row in rows]
    Path("rows.csv").write_text("\n".join([HEAD, *(f"{plan},{ms}" for plan, ms in zip(PLANS, times, strict=True))]))
    _, out, _ = run("calibrate", "--gpu", "A100-800G", "--from", "rows.csv", "-o", "gpu.json")
    assert all(name in out for name in NAMES)
    before, after = (
        json.loads(run("calibrate", "--gpu", gpu, "--check", "rows.csv", "--json")[1])
        for gpu in ("A100-800G", "gpu.json")
    )
    assert before["checks"]["rows.csv"]["mean"] > 0.1
    assert after["checks"]["rows.csv"]["mean"] < 0.02
    assert after["gpu"]["host_us"] == pytest.approx(60, rel=0.05)
    _, text, _ = run("calibrate", "--gpu", "gpu.json", "--check", "rows.csv")
    assert sum(line.endswith("%") for line in text.splitlines()) == len(PLANS) + 1  # and the sentence about them
    assert f"{len(PLANS)} rows, mean error" in text


def test_kernels_are_measured_on_this_device(run: Run, monkeypatch: pytest.MonkeyPatch):
    """The same code as on CUDA; its figures depend on the machine."""
    from optpipe_runtime.measure import kernels

    monkeypatch.setattr(kernels, "CPU", kernels.Sizes((32, 64), (16, 64), (2**16,), (64,), launches=10, repeats=2))
    content = json.loads(run("calibrate", "--gpu", "A100", "--device", "cpu", "--json")[1])
    assert content["gpu"]["matmul_fraction"] < 0.5
    assert content["gpu"]["network_fraction"] == GPUS["A100"].network_fraction
