"""`optpipe model`, `calibrate` and `plan`: what they write, learn, check and refuse, and Ctrl-C; `optpipe profile` as a
user types it: it starts ranks under torchrun, with a model in a file."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from support.commands import Run

from optpipe import InputError, Problem, Result, Schedule, check
from optpipe.options import SearchOptions
from optpipe.transformer.calibrate import NAMES
from optpipe.transformer.iterations import COLUMNS, MEASURED, iteration_ms, read_iterations
from optpipe.transformer.presets import GPUS, MODELS
from optpipe_cache import Cache
from optpipe_cli import plan, profile
from optpipe_cli.main import main
from optpipe_cli.model import left_out
from optpipe_cli.plan import Here
from optpipe_runtime import Setup
from optpipe_runtime.profiles import BatchSizes, find_factory
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
    assert error == "error: sequence is missing: the model has none; give its tokens, such as --sequence 4096\n"


def test_it_says_what_is_counted_beside_a_usual_model(run: Run):
    _, out, _ = run("model", "nemotron-3-nano", "--pp", "4", "--ep", "8", "--dp", "8", "--mtp", "1", "--fused-experts")
    assert "counted: layers 23 M, 23 E, 6 * (M a state space, * attention, - an MLP, E experts); 1 multi-token" in out
    assert "each with a layer and the head again; one kernel for all experts" in out
    _, out, _ = run("model", "llama-3-8b", "--tp", "8", "--lora", "16", "--head-parts", "2")
    assert "counted: adapters of rank 16, which alone are trained; the head in 2 parts, which only OptPipe" in out
    assert "counted" not in run("model", *LLAMA)[1]
    _, _, error = run("model", "llama-3-8b", "--head-parts", "4096")
    assert error.startswith("error: --head-parts = '4096': input should be less than or equal to 64")


def test_what_does_not_fit_is_shown_by_device_before_the_error(run: Run):
    _, out, error = run("model", "gpt-3-175b", "--pp", "4", "--tp", "8")
    assert "-19.14" in out
    assert error.startswith("error: device 0 needs 104.1 GB")


@pytest.mark.parametrize(("words", "all_of_it"), [("llama-2-7b --pp 8", False), ("llama-2-70b --pp 8 --tp 8", True)])
def test_the_last_line_says_what_there_is_time_to_offload(run: Run, words: str, all_of_it: bool):
    code, out, _ = run("model", *words.split())
    assert code == 0
    k = max(float(line.split()[-1]) for line in out.splitlines() if line.lstrip().startswith("stage "))
    said = f"{1 / k:.0%} of the activations of the stage with this k" if k > 1 else "everything"
    assert out.splitlines()[-1] == f"k is up to {k:.2f}: there is time to offload {said}"
    assert (k <= 1) == all_of_it


def test_presets_are_listed(run: Run):
    listed = json.loads(run("model", "--presets", "--json")[1])
    assert {"llama-2-70b", "gpt-3-175b", "optpipe-7.1b"} <= listed["models"].keys()
    blackwell = {"B200", "B300", "GB200", "GB300"}
    assert {"A100", "A100-800G", "A100-megatron", "H100", "H200", "MI300X"} | blackwell == listed["gpus"].keys()


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


def test_prediction_modules_that_are_counted_are_not_left_out():
    """Whatever the sentences of what is left out end with."""
    others = ("vision_config (--mtp counts it)",)
    shape = MODELS["deepseek-v3"].model_copy(update={"left_out": others, "mtp_modules": 2})
    of = "multi-token prediction modules (--mtp 2 counts all)"
    assert list(left_out(shape, 0)) == [f"  not modelled: {others[0]}; 2 of 2 {of}"]
    assert list(left_out(shape, 1)) == [f"  not modelled: {others[0]}; 1 of 2 {of}"]
    assert list(left_out(shape, 2)) == [f"  not modelled: {others[0]}"]


def test_it_says_what_to_run_and_writes_it(run: Run, tmp_path: Path, model):
    """With a gap of 1 the first schedule is enough, so nothing is searched."""
    folder = tmp_path / "plan"
    _, out, _ = run("plan", *model, "--gap", "1", "--stack", "torch", "--explain", "-o", str(folder))
    assert "assumed: matmuls reach 70% of 312 TFLOP/s" in out
    assert "predicted MFU" in out
    assert "nothing is measured on your GPUs" in out
    # Nothing is said of how equal both are, as it has a bound only.
    assert "the runner-up has no schedule yet; its bound allows up to" in out
    assert "to decide measure" not in out
    assert "--parallelism.pipeline_parallel_degree" in out
    problem, schedule = Problem.load(folder / "problem.json"), Schedule.load(folder / "schedule.json")
    assert check(problem, schedule) == []
    assert {path.name for path in folder.iterdir()} == {
        *("problem.json", "schedule.json", "memory.html", "schedule.csv"),
        *("torchtitan.txt", "torchtitan-main.txt", "nemo.txt"),
    }


def test_it_says_what_is_gained_over_what_runs_today(run: Run, model):
    words = (*model, "--gap", "1", "--today", "tp 2, pp 2, 1F1B", "--margin", "0", "--json")
    answer = json.loads(run("plan", *words)[1])
    today = answer["today"]
    assert (today["parallelism"]["pp"], today["parallelism"]["chunks"], today["method"]) == (2, 1, "1f1b")
    assert today["fits"]
    assert answer["best"]["iteration_ms"] <= today["iteration_ms"]
    _, out, _ = run("plan", *words[:-1])
    needs = f"      1f1b: {today['iteration_ms'] / 1000:.4g} s, {today['used_bytes'] / 1e9:.2f} GB of "
    assert re.search(rf"^{re.escape(needs)}[\d.]+ GB: fits, but not with 13% more$", out, re.MULTILINE)
    assert "      by the plan: " in out
    free = 1 - today["used_bytes"] / answer["question"]["gpu"]["memory_bytes"]
    for margin, wants in (free - 0.01, False), (free + 0.01, True):
        out = run("plan", *words[:-3], "--margin", str(margin))[1]
        assert ("; less stays free than --margin wants\n" in out) == wants
    sheet = Path(model[2])
    sheet.write_text(json.dumps(json.loads(sheet.read_text()) | {"memory_bytes": 2 * today["used_bytes"]}))
    assert " GB: fits\n" in run("plan", *words[:-1])[1]


def test_it_names_what_was_never_measured(run: Run, model):
    sheet = Path(model[2])
    measured = {"tokens": 1, "experts": 0, "recompute": ["none", "cheap", "full"]}
    sheet.write_text(json.dumps(json.loads(sheet.read_text()) | {"measured": measured}))
    words = ("plan", *model, "--gap", "1")
    best = json.loads(run(*words, "--json")[1])["best"]
    (named,) = best["not_measured"]
    tokens = best["run"]["microbatch_size"] * SHAPE["sequence"] // best["parallelism"]["cp"]
    assert named == f"{tokens:,} tokens of a micro-batch on a GPU, 1 at most"
    assert f"      not measured where this GPU's parameters come from: {named}\n" in run(*words)[1]


def test_a_run_that_is_out_of_memory_is_planned_anew(run: Run, model):
    code, out, error = run("plan", *model, "--gap", "1", "--today", "tp 1, pp 4")
    assert (code, error) == (0, "")
    needed, had = re.search(
        r"^      1f1b: [\d.]+ s, ([\d.]+) GB of ([\d.]+) GB: runs out of memory$", out, re.M
    ).groups()
    assert float(needed) > float(had)
    assumed = "cp 1, zero 0, chunks 1, sequences 1, recompute none, 1f1b"
    assert f"      not named, so what the stack does by default: {assumed}\n" in out, "dp follows from the GPUs"
    assert re.search(r"^fits  yes", out, re.M)


def test_lists_of_modules_are_checked(run: Run, tmp_path: Path, model):
    folder = tmp_path / "plan"
    run("plan", *model, "--gap", "1", "--stack", "torch", "--today", "pp 4, recompute full", "-o", str(folder))
    files = str(folder / "problem.json"), str(folder / "schedule.json")
    for name in ("torchtitan.txt", "torchtitan-main.txt", "nemo.txt"):
        text = (folder / name).read_text()
        assert run("check", *files, "--modules", str(folder / name))[0] == 0
        (folder / name).write_text(text.replace("layers.3", "layer.3"))
        code, out, _ = run("check", *files, "--modules", str(folder / name))
        assert code == 1
        assert "layers.3 is in no part: it would be left out of the model" in out
    _, _, error = run("check", *files, "--model", "config.json")
    assert error.startswith("error: --model config.json: --modules names the file")


def test_a_margin_of_memory_stays_free(run: Run, model):
    whole, less = (
        json.loads(run("plan", *model, "--gap", "1", "--margin", share, "--json")[1]) for share in ("0", "0.05")
    )
    memory = [each["question"]["gpu"]["memory_bytes"] for each in (whole, less)]
    reserved = [each["question"]["gpu"]["reserved_bytes"] for each in (whole, less)]
    assert memory[0] == memory[1]
    assert reserved[0] == reserved[1] == GPUS["A100"].reserved_bytes
    assert max(less["best"]["used_bytes"]) <= 0.95 * memory[0]
    assert max(whole["best"]["used_bytes"]) <= memory[0]
    _, out, _ = run("plan", *model, "--gap", "1", "--margin", "0.05")
    held, free, margin = map(
        float, re.search(r"^held  ([\d.]+) GB.*; ([\d.]+) GB stay.* ([\d.]+)$", out, re.M).groups()
    )
    assert held + free == pytest.approx(memory[0] / 1e9, abs=0.011)
    assert margin == pytest.approx(0.05 * memory[0] / 1e9, abs=0.006)
    assert free >= margin
    low, high = map(float, re.search(r"buffers ([\d.]+) to ([\d.]+) GB", out).groups())
    assert low < held < high
    assert ("fits  yes, but not with 13% more: --margin" in out) == (high > memory[0] / 1e9)
    counts = map(
        int, re.search(r"^(\d+) cand\S+ (\d+) too.* (\d+) ruled.* (\d+) left.* (\d+) with", out, re.M).groups()
    )
    every, *parts = counts
    assert every == sum(parts)


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


def test_a_model_is_measured_under_torchrun(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "profile.md").read_text(encoding="utf-8")
    (tmp_path / "model.py").write_text(page.split("```python\n")[1].split("```")[0])
    words = (
        "--ranks 2 --model model:factory --microbatches 4 --activation-budget-bytes 4000000 --offload-parts "
        "2 --repeats 3 -o problem.json --json"
    )
    done = subprocess.run(
        [sys.executable, "-m", "optpipe_cli", "profile", *words.split()],
        cwd=tmp_path,
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    problem = Problem.load(tmp_path / "problem.json")
    assert problem == Problem.from_dict(told["problem"])
    assert (problem.microbatches, problem.transfer_mode) == (4, "full_duplex")
    assert [device.activation_budget_bytes for device in problem.devices] == [4 * 10**6] * 2
    assert [stage.device for stage in problem.stages] == [0, 1]
    for stage, times in zip(problem.stages, told["stages"], strict=True):
        assert {
            name for name in type(stage).model_fields if name.endswith("_ms") and getattr(stage, name) is not None
        } == set(times)
        for name, spread in times.items():
            assert getattr(stage, name) == spread["ms"] > 0
            assert spread["iqr_ms"] >= 0
            assert spread["count"] >= 3
    assert [(link["from"], link["to"], link["ms"]) for link in told["links"]] == [(0, 1, problem.p2p_ms)]


def test_an_error_of_one_rank_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also of two that torchrun has started; here they load no torch."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=os.pathsep)
    monkeypatch.setattr(profile, "MODULE", "support.fakes.one_rank_fails")
    monkeypatch.setattr(sys, "argv", ["optpipe", "profile", "--ranks", "2", "--model", "model:factory"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capfd.readouterr().err.splitlines()[-1].startswith("error: no-problem.json: ")


@pytest.mark.parametrize(
    ("model", "sizes", "sentence"),
    [
        ("model", {}, "model = 'model': must be MODULE:FUNCTION"),
        ("no.such.module:factory", {}, "no.such.module cannot be imported: No module named 'no'"),
        ("broken:factory", {}, "broken cannot be imported: invalid syntax (broken.py, line 1)"),
        ("os.path:isfile", {}, "it is called with rank and ranks: too many positional arguments"),
        (
            "support.problems.chain:nothing",
            {},
            "support.problems.chain has no function nothing; it has Problem, Schedule, chain",
        ),
        ("mistaken:factory", {}, "it returned a str, optpipe_runtime.Setup was expected"),
        ("c.json", {}, ": transformers is not installed: pip install transformers"),
        ("m:f", {"sequence": 8}, "sequence = 8: model = 'm:f' makes its own batch, so leave it out"),
        ("m:f", {"microbatch_size": 8}, "microbatch_size = 8: model = 'm:f' makes its own batch, so leave it out"),
    ],
)
def test_a_model_that_cannot_be_made_is_one_sentence(
    model: str, sizes: dict[str, int], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken.py").write_text("def factory(:")
    (tmp_path / "mistaken.py").write_text("def factory(rank, ranks):\n    return 'a model'")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # it adds the folder where we are
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError, match=re.escape(sentence)):
        find_factory(model, BatchSizes(2, **sizes))(0, 2)


def test_an_unknown_option() -> None:
    options = "host_memory_bytes, full_duplex, routes, microbatch_routes, peers, links, host_optimizers, "
    options += "clip_host_updates, whole_gradients, group"
    with pytest.raises(InputError, match=f"options has 'ful_duplex': must be one of {options}"):
        Setup({}, [0], len, None, None, {"ful_duplex": True}).pipeline(1)  # type: ignore[arg-type]
