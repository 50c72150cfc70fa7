"""Steps with exactly one fault: it is named, nothing else is, and a job without it takes the predicted time. Public
traces, which are no part of the repository: the folder that OPTPIPE_TRACES names has them."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from axe_playwright_python.sync_playwright import Axe
from hypothesis import given, settings
from hypothesis import strategies as st
from support.browser import Opened, browser
from support.commands import Run, run
from support.examples import examples
from support.problems import pipeline, stage
from support.problems.units import units
from support.traces.faults import FORWARD, Job, jobs, recorded
from support.traces.recordings import csv_table, primus_dump, torch_events, torch_traces

from optpipe import InputError
from optpipe.diagnose import Change, Diagnosis, UserFacts, batch_of, collect_runs, diagnose, explain
from optpipe.diagnose.lines import file_of, lines_of
from optpipe.diagnose.losses import Losses
from optpipe.diagnose.page import picture
from optpipe.formats.stacks import STACKS
from optpipe.measured.convert import recording_from
from optpipe.measured.readers import RunFacts
from optpipe.model.ops import Kind
from optpipe_solver.systems import generate

__all__ = ["browser", "run"]  # fixtures

JOB = Job(4, 8, 3, 6, "none", factor=1.6, place=2, replica=1, since=0, seed=7)


def diagnosed(fault: str, **known: object) -> Diagnosis:
    return diagnose("csv", recorded(JOB._replace(fault=fault)), stack="megatron", time_limit_s=0.0, **known)


def of_files(path: Path, **facts: Any) -> Diagnosis:
    return diagnose(*recording_from([path], facts=RunFacts(**facts)), time_limit_s=0.0)


def step_ms(fault: str) -> float:
    return float(np.mean(diagnosed(fault).losses.replayed_ms))


def one_op_matters(losses: Losses) -> bool:
    """Whether a far op made its step 3 % longer."""
    return any(far.lost_ms > 0.03 * np.mean(losses.measured_ms) for far in losses.far_ops)


@settings(max_examples=examples(60), deadline=None)
@given(jobs())
def test_one_fault_is_named_and_nothing_else(job: Job) -> None:
    losses = explain(collect_runs(recorded(job)))
    assert losses.replay_error < 0.005
    assert sum(part.ms for part in losses.parts) == pytest.approx(losses.measured_ms, rel=1e-12)
    named = {part.name for part in losses.causes}
    assert named <= {job.fault}
    if job.fault in ("slow-device", "stages", "order"):
        assert named == {job.fault}
    assert ("far-ops" in named) == one_op_matters(losses)
    slow = [(each.replica, each.device, each.first_step, each.since) for each in losses.slow_devices]
    if job.fault == "slow-device":
        assert slow == [(job.replica, job.place, job.since, job.since > 0)]
        assert losses.slow_devices[0].factor == pytest.approx(job.factor, rel=0.02)
    else:
        assert slow == []
    assert [s for s, _ in losses.uneven_stages] == ([job.place] if job.fault == "stages" else [])
    assert len(losses.far_ops) == (job.fault == "far-ops")


@settings(max_examples=examples(40), deadline=None)
@given(jobs(), st.booleans(), st.booleans())
def test_an_op_far_from_its_like_is_named_with_its_cost_and_nothing_else(job: Job, alone: bool, slow: bool) -> None:
    """In a step of one replica alone, too, and on a device that is slower in all its ops."""
    if alone:
        job = job._replace(steps=1, replicas=1, since=0, replica=0)
    without = "slow-device" if slow else "none"
    with_it, regular = (
        explain(collect_runs(recorded(job._replace(fault=fault)))) for fault in (f"{without} far-ops", without)
    )
    (far,) = with_it.far_ops
    place = job.place, job.seed % job.microbatches, (Kind.F, Kind.BW)[job.seed % 2]
    assert (far.op.stage, far.op.microbatch, far.op.kind, far.step, far.replica) == (*place, job.since, job.replica)
    assert far.ms == pytest.approx(3 * job.factor * far.usual_ms, rel=0.02)
    longer = max(with_it.replayed_ms - regular.replayed_ms)
    assert far.lost_ms == pytest.approx(longer, abs=0.01 * regular.replayed_ms[0])  # 0 if another replica took longer
    assert 0 <= far.lost_ms <= (far.ms - far.usual_ms) * (1 + 1e-9)
    assert ("far-ops" in {part.name for part in with_it.causes}) == one_op_matters(with_it)
    assert {part.name for part in with_it.causes} - {"far-ops"} == {part.name for part in regular.causes}
    assert [each[:5] for each in with_it.slow_devices] == [each[:5] for each in regular.slow_devices]
    assert [s for s, _ in with_it.uneven_stages] == [s for s, _ in regular.uneven_stages]


@pytest.mark.parametrize("replicas", [2, 3])
def test_a_far_op_costs_nothing_where_another_replica_takes_longer(replicas: int) -> None:
    job = JOB._replace(fault="far-ops", replicas=replicas)
    runs = collect_runs(recorded(job))
    others = runs.replica[runs.run] != job.replica
    losses = explain(replace(runs, ms=np.where(others, 2, 1) * runs.ms, measured_ms=np.full(len(runs.step), np.nan)))
    (far,) = losses.far_ops
    assert (far.replica, far.lost_ms) == (job.replica, 0)
    assert far.ms == pytest.approx(3 * job.factor * far.usual_ms, rel=0.02)  # of its own replica
    assert "far-ops" not in {part.name for part in losses.causes}


@pytest.mark.parametrize("microbatches", [2, 3, 8])
def test_one_step_with_few_micro_batches_shows_what_is_usual(microbatches: int, tmp_path: Path) -> None:
    """Of two ops alike the shorter one."""
    problem = pipeline(4, microbatches, 10**9, stage((10, 20, 0)), p2p_ms=0.5)
    usual = generate("1f1b", problem)
    ms = (*[10.0] * (microbatches - 1), 60.0)
    stages = [each.model_copy(update={"forward_ms": ms}) if s == 1 else each for s, each in enumerate(problem.stages)]
    (tmp_path / "ops.csv").write_text(csv_table(usual.on(problem.replace(stages=stages)), "t"))
    losses = of_files(tmp_path / "ops.csv").losses
    (far,) = losses.far_ops
    assert (str(far.op), far.ms) == (f"1F{microbatches - 1}", pytest.approx(60))
    assert far.usual_ms == pytest.approx(10)
    assert losses.measured_ms[0] - far.lost_ms == pytest.approx(usual.makespan_ms)


def test_an_op_that_is_long_in_every_step_is_like_itself() -> None:
    """As a first forward that gathers weights: no cure is predicted without it."""
    runs = collect_runs(recorded(JOB._replace(fault="first-forward")))
    losses = explain(runs)
    assert runs.ms.max() > 3 * FORWARD
    assert (losses.far_ops, losses.usual.ms.tolist()) == ((), runs.ms.tolist())


def test_the_published_trace_has_one_op_far_from_its_like_and_one_long_stage() -> None:
    """By medians its stage is the second shortest; nobody waited for the op, so it is no cause."""
    found = of_files(Path(__file__).parents[2] / "examples" / "traces" / "primus-8x16")
    assert found.causes == [
        "stage 7 takes 1.08 times as long as the mean; with one replica, a slow device looks the same: 4.5% of a step"
    ]
    assert found.assumed == (
        "no op of a cure takes far longer than usual: 1F4 of step 15 took 300.9 ms instead of the usual 58.5",
    )
    (far,) = found.to_dict()["far_ops"]
    assert (far["op"], far["step"], far["ms"]) == ("1F4", 15, pytest.approx(300.88))
    before = found.cures.before
    assert before.problem.stages[1].forward_ms[4] == pytest.approx(301, abs=1), "pictures show what ran"


@pytest.mark.parametrize("fault", ["slow-device", "order", "stages", "replicas", "micro-batches"])
def test_no_prediction_is_below_its_bound(fault: str) -> None:
    found = diagnosed(fault, layers=[12]).cures
    assert found.cures
    for cure in found.cures:
        assert (cure.bound_ms <= cure.ms * (1 + 1e-9)).all()
        assert 0.01 < cure.gain <= cure.most + 1e-9
        assert cure.lines
    gains = {cure.name: cure.gain for cure in found.cures}
    assert gains.pop("together", 1.0) >= 0.01 + max(gains.values())  # else it is not worth to be told


@pytest.mark.parametrize(("fault", "name"), [("slow-device", "device"), ("order", "published")])
def test_without_its_fault_a_job_takes_the_predicted_time(fault: str, name: str) -> None:
    cures = {cure.name: cure for cure in diagnosed(fault).cures.cures}
    assert float(cures[name].ms.mean()) == pytest.approx(step_ms("none"), rel=0.01)


def test_layers_are_divided_as_evenly_as_they_can_be() -> None:
    """Stage 2 takes 1.6 times as long with as many layers: of 48 layers it keeps fewer."""
    (cure,) = (cure for cure in diagnosed("stages", layers=[12]).cures.cures if cure.name == "layers")
    (line,) = cure.lines
    counts = [text.count("t") for text in line.split(" ")[1].split("|")]
    assert sum(counts) == 48
    assert cure.title == f"divide the layers anew: {' '.join(map(str, counts))}"  # no embedding, no head
    assert min(counts) == counts[2]
    assert cure.gain > 0.6 * (1 - step_ms("none") * 1.15 / step_ms("stages"))


@pytest.mark.parametrize(("method", "name"), [("1f1b", None), ("zb-h1", "ours.csv")])
def test_a_schedule_that_the_stack_does_not_have_is_a_file_that_the_lines_name(method: str, name: str | None) -> None:
    job, schedule = diagnosed("none"), generate(method, units(4, 8))
    file = file_of(schedule, "torch", "ours")
    assert (file and file[0]) == name
    _, lines = lines_of(Change(schedule=schedule), job.runs, job.losses, "torch", False, name or "")
    assert ("--parallelism.pipeline_parallel_schedule_csv ours.csv" in lines) == (name is not None)


@pytest.mark.parametrize("stack", STACKS)
def test_stages_whose_layers_are_not_known_get_no_lines_for_layers(stack: str) -> None:
    """Such as those of DualPipe, also where the layers of today's stages are known."""
    job, schedule = diagnosed("none"), generate("dualpipe-v", units(4, 8), "all")
    assert schedule.placement.layers is None
    title, lines = lines_of(Change(schedule=schedule), job.runs, job.losses, stack, True, "ours.json")
    assert title.endswith(" with 2 chunks a device, V-shaped")
    assert not [line for line in lines if "layout" in line or "fqns" in line or "layers" in line]


def test_work_is_spread_over_replicas() -> None:
    cures = {cure.name: cure for cure in diagnosed("replicas").cures.cures}
    mean = 1 + 0.6 / JOB.replicas  # of the work of a replica, where one of them has 1.6 times as much
    assert float(cures["spread"].ms.mean()) <= 1.06 * mean * step_ms("none")
    assert cures["spread"].lines == ("in the data loader: optpipe.steps.assign(batch, replicas=3).microbatches",)


UNEVEN = generate("1f1b", pipeline(2, 4, 10**9, [stage((10, 20, 0)), stage((16, 32, 0))], p2p_ms=0.5))


def written(folder: Path) -> dict[str, Path]:
    """The same three steps in the forms of other programs."""
    (folder / "ops.csv").write_text(csv_table(UNEVEN, "ttt", ahead=7.0))
    timers = {"forward-backward": [UNEVEN.makespan_ms] * 2, "forward-compute": (40, 64), "backward-compute": (80, 128)}
    texts = [f"{name}:\n  rank 0: {first:.1f}\n  rank 1: {last:.1f}\n" for name, (first, last) in timers.items()]
    (folder / "megatron.log").write_text("".join(texts * 3))
    for name in ("torch", "primus"):
        (folder / name).mkdir()
    torch_traces(torch_events(UNEVEN, "ttet", "gpu_user_annotation", ahead=3.0), folder / "torch")
    primus_dump(UNEVEN, "ttt", folder / "primus")
    names = {"csv": "ops.csv", "megatron-timers": "megatron.log", "torch-trace": "torch", "primus": "primus"}
    return {form: folder / name for form, name in names.items()}


@pytest.mark.parametrize("form", ["csv", "megatron-timers", "torch-trace", "primus"])
def test_each_form_is_recognized_and_its_steps_are_the_same(form: str, tmp_path: Path) -> None:
    found = of_files(written(tmp_path)[form], microbatches=4 if form == "megatron-timers" else None)
    assert found.form == form
    assert found.losses.measured_ms == pytest.approx([UNEVEN.makespan_ms] * 3)
    assert found.losses.replay_error < (0.01 if form == "megatron-timers" else 1e-6)  # whose messages are not known
    assert [s for s, _ in found.losses.uneven_stages] == [1]
    assert any("as in an evaluation" in each for each in found.runs.unused) == (form == "torch-trace")
    assert bool(found.runs.assumed) == (form == "megatron-timers")


def test_the_command_reports_writes_and_says_the_same_as_json(run: Run, tmp_path: Path) -> None:
    options = "--layers 10,10 --weight-share 0.5 --stack torch"
    words = ("diagnose", written(tmp_path)["csv"], *options.split())
    code, out, err = run(*words, "--time-limit", "2", "-o", tmp_path / "cures", "--html", tmp_path / "page.html")
    assert (code, err) == (0, "")
    assert "cause: stage 1 takes 1.23 times as long as the mean; with one replica, a slow device looks the same" in out
    assert "--parallelism.module_fqns_per_model_part tok_embeddings,layers.0" in out
    assert "Where the time of a step goes" in (tmp_path / "page.html").read_text()
    content = json.loads(run(*words, "--time-limit", "2", "--json")[1])
    assert sum(part["mean_ms"] for part in content["losses"]) == pytest.approx(np.mean(content["measured_ms"]))
    assert content["causes"][0] in out
    for path in (tmp_path / "cures").iterdir():
        assert "0F0" in path.read_text()
    out = run(*words, "--time-limit", "0")[1]  # two searches may find different schedules
    cures = json.loads(run(*words, "--time-limit", "0", "--json")[1])["cures"]
    assert len(cures) > 1
    for cure in cures:
        assert "\n".join((f"to {cure['what']}:", *(f"  {line}" for line in cure["lines"]))) in out


def test_a_folder_without_files_is_said(run: Run, tmp_path: Path) -> None:
    """Megatron makes interleaved 1F1B itself, so its cures are flags."""
    words = ("diagnose", written(tmp_path)["csv"], "--layers", "10,10", "--time-limit", "0", "--stack", "megatron")
    code, out, _ = run(*words, "-o", tmp_path / "cures")
    assert code == 0
    assert out.endswith(f"written: nothing to {tmp_path / 'cures'}, as no cure needs a file\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--layers 1,2,3", "layers = 1, 2, 3: a number of at least 1 for each of 2 stages is expected"),
        ("--memory 0.5", "memory = 0.5: 1 to 1000000 activations are expected"),
        ("--weight-share 2", "weight_share = 2: a share from 0 to 1 is expected"),
        ("--stack pytorch", "stack = 'pytorch': one of torch, megatron, primus, optpipe is expected"),
        ("--form xml", "form = 'xml': one of torch-trace"),
    ],
)
def test_a_mistake_is_one_sentence(words: str, message: str, run: Run, tmp_path: Path) -> None:
    code, out, err = run("diagnose", written(tmp_path)["csv"], *words.split())
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1


@pytest.mark.parametrize("text", ['{"traceEvents": [{"ph": "X", "name": "x"}]}', "# A page", ""])
def test_what_is_no_trace_is_one_sentence(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(InputError, match=r"a\.json: like no form that is known"):
        of_files(tmp_path / "a.json")


def test_what_was_not_measured_or_explained_is_said(tmp_path: Path) -> None:
    path = tmp_path / "ops.csv"
    path.write_text("stage,op,microbatch,duration_ms\n0,F,0,1\n0,BW,0,2\n")
    assert any("that was not measured" in each for each in of_files(path).runs.assumed)
    path.write_text("stage,op,microbatch,duration_ms\n0,F,0,0\n0,BW,0,0\n")
    with pytest.raises(InputError, match="a step takes 0 ms"):
        of_files(path)
    path.write_text("stage,op,microbatch,start_ms,end_ms\n0,F,0,0,1\n0,F,1,1,2\n0,BW,0,2,3\n0,BW,1,9,10\n")
    (doubt,) = of_files(path).causes
    assert doubt == "what a replay does not explain: 60.0% of a step, so the other figures are in doubt"


MARKED = """() => {
  const plot = document.querySelector('.plot');
  const device = (name) => plot.data.filter((trace) => trace.name && trace.name.startsWith(name)).flatMap(({y}) =>
    Array.from({length: y.length / 6}, (_, i) => Math.floor(-y[6 * i])));
  return [device('marked'), device('ops')];
}"""


def test_each_loss_and_each_cell_shows_what_it_is_about(browser: Any, tmp_path: Path) -> None:
    picture(diagnosed("stages")).save(tmp_path / "page.html")
    opened = Opened(browser, tmp_path / "page.html")
    page = opened.page
    text = page.locator("body").inner_text()
    assert not [word for word in ("kB", "Memory", "emory of", "certified") if word in text]
    assert page.evaluate("() => document.querySelector('.plot').layout.annotations.length") == 2  # as it ran, cured
    shown = []
    for name in ("stages that are uneven", "work"):
        before = page.locator("#picture").get_attribute("data-drawn")
        page.locator(f".loss:has-text('{name}')").last.focus()
        page.keyboard.press("Enter")
        page.wait_for_selector(f"#picture:not([data-drawn='{before}'])")
        page.wait_for_function("() => document.querySelector('.plot').textContent.includes('as it ran')")
        shown.append(page.evaluate(MARKED))
    (marked, ops), (none, _) = shown
    assert marked == [2] * (2 * JOB.microbatches)
    assert (len(ops), none) == (4 * 2 * JOB.microbatches, [])
    page.locator(".cell").first.focus()
    for key in ("ArrowDown", "ArrowRight", "Enter"):
        page.keyboard.press(key)
    page.wait_for_selector(".cell[aria-pressed='true'][aria-label^='replica 0, device 1']")
    page.wait_for_function("() => document.querySelector('.plot').data.some(({name}) => name === 'marked')")
    assert set(page.evaluate(MARKED)[0]) == {1}
    violations = Axe().run(page).response["violations"]
    assert [each["id"] for each in violations if each["impact"] in ("serious", "critical")] == []
    page.set_viewport_size({"width": 390, "height": 800})
    page.emulate_media(color_scheme="dark")
    assert page.evaluate("() => document.documentElement.scrollWidth") == 390
    opened.close()


TRACES = Path(os.environ.get("OPTPIPE_TRACES", "/nowhere"))
# What the analysis published with each timeline found, the largest first.
PUBLISHED = {"AR": ["slow-device"], "SE": ["replicas", "stages", "micro-batches"], "ST": ["stages"]}


def found(name: str) -> Diagnosis:
    if not (TRACES / name).exists():
        pytest.skip(f"OPTPIPE_TRACES names no folder with {name}")
    return of_files(TRACES / name)


@pytest.mark.parametrize("job", PUBLISHED)
def test_causes_are_those_that_were_published(job: str) -> None:
    losses = found(f"timeline-{job}.json.gz").losses
    assert [part.name for part in losses.causes] == PUBLISHED[job]
    assert losses.replay_error < 0.01
    assert sum(part.ms for part in losses.parts) == pytest.approx(losses.measured_ms, rel=1e-12)
    slow = [(each.replica, each.device) for each in losses.slow_devices]
    assert slow == ([(0, 0)] if job == "AR" else [])


def test_two_chunks_are_predicted_from_one() -> None:
    one, two = found("pp8"), found("pp8_vpp2")
    assert max(one.losses.replay_error, two.losses.replay_error) < 0.01
    (chunks,) = (cure.schedule for cure in one.cures.cures if cure.name == "chunks")
    change = Change(placement=chunks.placement, schedule=chunks)
    steps = one.runs.steps.tolist()
    ms = [batch_of(one.losses.usual, one.losses.healthy_ms, step, UserFacts()).predict(change).ms for step in steps]
    far_ops = next(part.ms for part in two.losses.parts if part.name == "far-ops")  # cures are predicted without
    assert np.mean(ms) == pytest.approx((two.losses.measured_ms - far_ops).mean(), rel=0.02)
    assert np.median(ms) == pytest.approx(np.median(two.losses.measured_ms - far_ops), rel=0.02)
