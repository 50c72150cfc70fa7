"""`optpipe model`, `optpipe calibrate` and `optpipe plan`: what they write, learn, check and refuse, and Ctrl-C."""

import json
import re
import signal
import threading
from pathlib import Path

import pytest
from support.commands import Run

from optpipe import Problem, Result, Schedule, check
from optpipe.options import SearchOptions
from optpipe.transformer.calibrate import NAMES
from optpipe.transformer.iterations import COLUMNS, MEASURED, iteration_ms, read_iterations
from optpipe.transformer.presets import GPUS, MODELS
from optpipe_cache import Cache
from optpipe_cli import plan
from optpipe_cli.plan import Here
from optpipe_solver.planner.search import PlanSearch
from optpipe_solver.systems import generate

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


SHAPE = {"layers": 6, "hidden": 2048, "ffn": 8192, "heads": 2, "vocabulary": 64_000, "sequence": 2048}
EXAMPLE = Path(__file__).parents[2] / "examples" / "problems" / "ample-8x24.json"
SIZE = ("--gpus", "4", "--batch", "8")


@pytest.fixture
def model(tmp_path: Path) -> tuple[str, ...]:
    """A small model, and GPUs with so little memory that not all divisions fit."""
    (tmp_path / "shape.json").write_text(json.dumps(SHAPE))
    memory = {"memory_bytes": GPUS["A100"].reserved_bytes + 3_500_000_000, "gpus_per_node": 2}
    (tmp_path / "gpu.json").write_text(GPUS["A100"].model_copy(update=memory).model_dump_json())
    return str(tmp_path / "shape.json"), "--gpu", str(tmp_path / "gpu.json"), *SIZE


def test_it_says_what_to_run_and_writes_it(run: Run, tmp_path: Path, model):
    """With a gap of 1 the first schedule is enough, so nothing is searched."""
    folder = tmp_path / "plan"
    _, out, _ = run("plan", *model, "--gap", "1", "--stack", "torch", "--explain", "-o", str(folder))
    assert "assumed: matmuls reach 70% of 312 TFLOP/s" in out
    assert "predicted MFU" in out
    assert "nothing is measured" in out
    assert "the runner-up takes at least" in out  # it has a bound only, so nothing is said of how equal both are
    assert "to decide measure" not in out
    assert "--parallelism.pipeline_parallel_degree" in out
    problem, schedule = Problem.load(folder / "problem.json"), Schedule.load(folder / "schedule.json")
    assert check(problem, schedule) == []
    assert {path.name for path in folder.iterdir()} == {
        *("problem.json", "schedule.json", "memory.html", "torchtitan.txt", "nemo.txt", "schedule.csv")
    }


def test_it_says_what_is_gained_over_what_runs_today(run: Run, model):
    words = (*model, "--gap", "1", "--today", "pp 2, 1F1B", "--margin", "0", "--json")
    answer = json.loads(run("plan", *words)[1])
    today = answer["today"]
    assert (today["parallelism"]["pp"], today["parallelism"]["chunks"], today["method"]) == (2, 1, "1f1b")
    assert today["fits"]
    assert answer["best"]["iteration_ms"] <= today["iteration_ms"]
    _, out, _ = run("plan", *words[:-1])
    assert f"      1f1b: {today['iteration_ms'] / 1000:.4g} s, needs {today['used_bytes'] / 1e9:.2f} GB of " in out
    assert "      by the plan: " in out
    _, _, error = run("plan", *model, "--today", "tp 1, pp 4")
    assert re.match(r"error: today = 'tp 1, pp 4': with tp 1, pp 4, .* a GPU holds [\d.]+ GB without any", error)


def test_a_margin_of_memory_stays_free(run: Run, model):
    whole, less = (
        json.loads(run("plan", *model, "--gap", "1", "--margin", share, "--json")[1]) for share in ("0", "0.05")
    )
    memory = [each["question"]["gpu"]["memory_bytes"] for each in (whole, less)]
    reserved = [each["question"]["gpu"]["reserved_bytes"] for each in (whole, less)]
    assert memory[0] == memory[1]
    assert reserved[1] - reserved[0] == round(0.05 * memory[0])
    assert max(less["best"]["used_bytes"]) <= memory[0]  # with what is reserved


def test_searches_have_the_cache_a_start_and_one_thread(monkeypatch, tmp_path):
    problem = Problem.load(EXAMPLE)
    start, better = generate("gis", problem), generate("po-f", problem)
    asked, cache = [], Cache(tmp_path / "cache.sqlite")

    def searched(problem, options, start, cache):
        asked.append((options.time_limit_s, options.threads, start, cache))
        return iter([Result.from_schedule(better, SearchOptions())])

    monkeypatch.setattr(plan, "search", searched)
    assert Here(cache, SearchOptions())(problem, start, 7.0).schedule is better
    assert asked == [(7.0, 1, start, cache)]


@pytest.mark.parametrize("name", ["gpus.json", "gpus"])
def test_a_file_keeps_its_name(run: Run, name):
    Path(name).write_text('{"layers": 6}')
    assert run("plan", name, *SIZE)[2].startswith(f"error: {name}: hidden is missing")


def test_ctrl_c_prints_the_best_so_far(run: Run, monkeypatch: pytest.MonkeyPatch, model):
    """It comes in the middle of a search, which ends; without a schedule the command ends."""

    class Searched:
        """A search that goes on until it is cancelled."""

        def __init__(self, *_):
            self.cancelled = threading.Event()
            if unpressed.acquire(blocking=False):  # two searches begin at once; Ctrl-C is pressed once
                signal.raise_signal(signal.SIGINT)

        def __iter__(self):
            assert self.cancelled.wait(60)
            yield Result("unknown")

        def cancel(self):
            self.cancelled.set()

    unpressed = threading.Lock()
    monkeypatch.setattr(plan, "search", Searched)
    monkeypatch.setattr(PlanSearch, "_is_open", lambda self, candidate: candidate.schedule is not None)
    before = signal.getsignal(signal.SIGINT)
    _, out, error = run("plan", *model, "--time-limit", "1000")
    assert "predicted MFU" in out
    assert error == ""
    assert signal.getsignal(signal.SIGINT) is before
    monkeypatch.setattr(PlanSearch, "_publish", lambda self: signal.raise_signal(signal.SIGINT))
    assert run("plan", *model)[1:] == ("", "interrupted\n")
