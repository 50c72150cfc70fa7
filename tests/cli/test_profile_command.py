"""`optpipe profile` as a user types it: it starts ranks under torchrun, with a model in a file."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from optpipe import InputError, Problem
from optpipe_cli import profile
from optpipe_cli.main import main
from optpipe_runtime import Setup
from optpipe_runtime.profiles import BatchSizes, find_factory

PAGE = (Path(__file__).parents[2] / "docs" / "profile.md").read_text(encoding="utf-8")
MODEL = PAGE.split("```python\n")[1].split("```")[0]  # the page's own
FAILING = "support.fakes.one_rank_fails"


@pytest.mark.timeout(120)
def test_a_model_is_measured_under_torchrun(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
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
        timeout=110,
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


@pytest.mark.timeout(120)
def test_an_error_of_one_rank_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also of two that torchrun has started; here they load no torch."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=os.pathsep)
    monkeypatch.setattr(profile, "MODULE", FAILING)
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
