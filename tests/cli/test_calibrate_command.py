"""`optpipe calibrate`: it learns from tables, checks predictions, measures kernels, and its file is a GPU."""

from __future__ import annotations

import json
import re
import sys

import pytest

from optpipe.transformer.calibrate import NAMES
from optpipe.transformer.iterations import COLUMNS, MEASURED, iteration_ms, read_iterations
from optpipe.transformer.presets import GPUS
from optpipe_cli.main import main

HEAD = ",".join([*COLUMNS.values(), MEASURED])
PLANS = [
    f"{tp * dp * pp},{batch},{size},1024,16,8,1024,{tp},{dp},{pp}"
    for tp, dp, pp in ((1, 1, 2), (2, 1, 1), (1, 2, 4), (4, 2, 1), (8, 2, 2))
    for size in (1, 4)
    for batch in (8, 32)
]
TRUTH = GPUS["A100-800G"].model_copy(update={"matmul_fraction": 0.5, "host_us": 60.0})


def run(monkeypatch, capsys, *words: str) -> tuple[str, str]:
    monkeypatch.setattr(sys, "argv", ["optpipe", "calibrate", *words])
    with pytest.raises(SystemExit):
        main()
    printed = capsys.readouterr()
    return printed.out, printed.err


@pytest.fixture
def table(tmp_path):
    rows = read_iterations("\n".join([HEAD, *(f"{plan},1" for plan in PLANS)]))
    path = tmp_path / "rows.csv"
    times = [iteration_ms(row.on(TRUTH)) for row in rows]
    path.write_text("\n".join([HEAD, *(f"{plan},{ms}" for plan, ms in zip(PLANS, times, strict=True))]))
    return str(path)


def test_it_learns_from_rows_and_checks_them(monkeypatch, capsys, tmp_path, table):
    learned = str(tmp_path / "gpu.json")
    out, _ = run(monkeypatch, capsys, "--gpu", "A100-800G", "--from", table, "-o", learned)
    assert all(name in out for name in NAMES)
    before, after = (
        json.loads(run(monkeypatch, capsys, "--gpu", gpu, "--check", table, "--json")[0])
        for gpu in ("A100-800G", learned)
    )
    assert before["checks"][table]["mean"] > 0.1
    assert after["checks"][table]["mean"] < 0.02
    assert after["gpu"]["host_us"] == pytest.approx(60, rel=0.05)
    text, _ = run(monkeypatch, capsys, "--gpu", learned, "--check", table)
    assert sum(line.endswith("%") for line in text.splitlines()) == len(PLANS) + 1  # and the sentence about them
    assert f"{len(PLANS)} rows, mean error" in text


def test_kernels_are_measured_on_this_device(monkeypatch, capsys, tmp_path):
    """The same code as on CUDA; its figures depend on the machine."""
    from optpipe_runtime.measure import kernels

    monkeypatch.setattr(kernels, "CPU", kernels.Sizes((32, 64), (16, 64), (2**16,), (64,), launches=10, repeats=2))
    content = json.loads(run(monkeypatch, capsys, "--gpu", "A100", "--device", "cpu", "--json")[0])
    assert content["gpu"]["matmul_fraction"] < 0.5
    assert content["gpu"]["network_fraction"] == GPUS["A100"].network_fraction


def test_a_wrong_table_is_one_sentence(monkeypatch, capsys, tmp_path):
    path = tmp_path / "rows.csv"
    path.write_bytes(b"\xff")
    _, error = run(monkeypatch, capsys, "--gpu", "A100", "--from", str(path))
    assert error.startswith(f"error: {path}: no text in UTF-8")
    assert error.count("\n") == 1
    _, error = run(monkeypatch, capsys, "--gpu", "A1000")
    assert error.startswith("error: --gpu = A1000: neither a file nor a preset")


@pytest.mark.parametrize(
    ("device", "said"), [("tpu", "expected cuda, cuda:N or cpu"), ("cuda:99", "torch .* sees .* CUDA devices here")]
)
def test_a_device_that_is_not_there_is_refused(monkeypatch, capsys, device, said):
    _, error = run(monkeypatch, capsys, "--gpu", "A100", "--device", device)
    assert re.match(f"error: --device = {device}: {said}", error)
