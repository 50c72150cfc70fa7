"""`optpipe model` and `optpipe calibrate`: what they write, learn, check and refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.commands import Run

from optpipe import Problem
from optpipe.transformer.calibrate import NAMES
from optpipe.transformer.iterations import COLUMNS, MEASURED, iteration_ms, read_iterations
from optpipe.transformer.presets import GPUS, MODELS

LLAMA = ["llama-2-70b", "--gpu", "A100", "--pp", "8", "--tp", "8"]


def test_it_writes_a_problem_and_says_what_was_assumed(run: Run, tmp_path: Path):
    path = tmp_path / "p.json"
    _, out, _ = run("model", *LLAMA, "--microbatches", "16", "-o", str(path))
    problem = Problem.load(path)
    assert (len(problem.devices), problem.microbatches, len(problem.layers or ())) == (8, 16, 82)
    assert "68.98 billion parameters" in out
    assert "matmuls reach 70% of 312 TFLOP/s" in out
    assert sum(line.lstrip().startswith("device ") for line in out.splitlines()) == 9  # and the head of the other table
    content = json.loads(run("model", *LLAMA, "--microbatches", "16", "--json")[1])
    assert content["problem"] == problem.to_dict()
    assert content["devices"][0]["budget"] == problem.devices[0].activation_budget_bytes


def test_it_takes_files_of_models_and_gpus(run: Run, tmp_path: Path):
    shape, sheet, config = (tmp_path / name for name in ("shape.json", "gpu.json", "config.json"))
    shape.write_text(MODELS["llama-2-7b"].model_dump_json())
    sheet.write_text(GPUS["H100"].model_dump_json())
    config.write_text(
        '{"model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, '
        '"num_attention_heads": 32, "vocab_size": 32000}'
    )
    options = ("--pp", "4", "--sequence", "4096", "--json")
    preset, own, hf = (
        json.loads(run("model", *words, *options)[1])["problem"]
        for words in (("llama-2-7b",), (str(shape), "--gpu", str(sheet)), (str(config),))
    )
    assert preset == own
    assert preset["stages"] == hf["stages"]
    _, _, error = run("model", str(config), "--pp", "4")
    assert error == "error: sequence is missing: how many tokens a training sequence has\n"


def test_what_does_not_fit_is_shown_by_device_before_the_error(run: Run):
    _, out, error = run("model", "gpt-3-175b", "--pp", "4", "--tp", "8")
    assert "-18.18" in out
    assert error.startswith("error: device 0 needs 104.1 GB")


def test_presets_are_listed(run: Run):
    listed = json.loads(run("model", "--presets", "--json")[1])
    assert {"llama-2-70b", "gpt-3-175b", "optpipe-7.1b"} <= listed["models"].keys()
    assert {"A100", "A100-800G", "A100-megatron", "H100", "H200", "B200", "MI300X"} == listed["gpus"].keys()


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
