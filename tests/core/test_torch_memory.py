"""What schedules hold in PyTorch's own pipelining, and schedules with whole backwards for its replicas."""

import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import problems
from support.examples import examples
from support.problems import parsed, strategies
from support.problems.units import ACTIVATION, units

from optpipe import Schedule, as_torch_holds, certify, check, export_schedule, leave_out_offload, whole_backwards
from optpipe.errors import InputError
from optpipe.formats import export
from optpipe.model.ops import Kind
from optpipe.model.placement import Placement, Shape
from optpipe.transformer.estimate import estimate
from optpipe.transformer.presets import GPUS, MODELS
from optpipe.transformer.records import Parallelism, Run
from optpipe_solver.systems import generate

MIB = 2**20
WAITS = "torch-comms-waits"


def peaks_in_torch(schedule: Schedule) -> list[int]:
    """Counted by hand, with gradients as large as activations, or as what OptPipe's runtime keeps where that is more:
    I frees nothing and adds them, on the first stage it does nothing; W and a whole backward free all."""
    peaks = []
    for program in schedule.programs:
        peak = 0
        held: dict[tuple[int, int], int] = {}
        for op in program.ops():
            stage, activation = schedule.problem.stages[op.stage], (op.stage, op.microbatch)
            size = int(stage.activation_bytes)  # type: ignore[arg-type]
            if op.kind is Kind.F:
                held[activation] = size
            elif op.kind is Kind.B and op.stage > 0:
                held[activation] += max(size, int(stage.saved_for_weight_bytes))  # type: ignore[arg-type]
            peak = max(peak, sum(held.values()))
            if op.kind in (Kind.W, Kind.BW):
                del held[activation]
        peaks.append(peak)
    return peaks


@settings(deadline=None, max_examples=examples(60))
@given(st.data())
def test_certificates_are_what_torch_holds(data: st.DataObject) -> None:
    problem = data.draw(strategies.looped())
    schedule = leave_out_offload(data.draw(strategies.schedules(problem)))
    torch = as_torch_holds(problem)
    assert (torch.stack, as_torch_holds(torch)) == ("torch", torch)
    assert [peak.bytes for peak in certify(torch, schedule).device] == peaks_in_torch(schedule)
    assert schedule.on(torch).makespan_ms == schedule.makespan_ms


@settings(deadline=None, max_examples=examples(60))
@given(st.data())
def test_whole_backwards_run_and_hold_no_more(data: st.DataObject) -> None:
    problem = data.draw(strategies.looped()).replace(overlap_factor=data.draw(st.sampled_from([None, 0.75])))
    schedule = data.draw(strategies.schedules(problem))
    whole = whole_backwards(schedule)
    assert check(problem, whole) == []
    for before, after in zip(schedule.programs, whole.programs, strict=True):
        kinds = {op.kind for op in after.ops()}
        assert not kinds & {Kind.B, Kind.W}
        renamed = [op._replace(kind=Kind.BW) if op.kind is Kind.B else op for op in before.ops()]
        assert [op for op in renamed if op.kind is not Kind.W] == after.ops()
    peaks = [[peak.bytes for peak in certify(problem, each).device] for each in (schedule, whole)]
    assert all(after <= before for before, after in zip(*peaks, strict=True))


def test_a_first_stage_that_splits_keeps_all() -> None:
    one = problems.pipeline(1, 2, 1, problems.stage((1, 1, 1), (1, 0)))
    split = parsed(one, "0F0 0B0 0F1 0B1 0W0 0W1")
    assert check(one, split) == []
    for to in ("torch-csv", "torch-comms", "torch-comms-waits"):
        assert export(split, to).misfits == ("device 0 needs 2 B during 0F1 and has 1 B",)
        assert export(split, to, whole=True).misfits == export(split, "json").misfits == ()


@pytest.mark.parametrize(("factor", "held"), [(None, 200), (1.6, 160), (1.0, 100)])
def test_what_is_held_until_w_by_factor_of_the_model(factor: float | None, held: int) -> None:
    layers = [problems.stage((1, 1, 1), (50, 10)), problems.stage((1, 1, 1), (100, [10, 150]))]
    problem = problems.pipeline(2, 2, 1000, problems.stage((1, 1, 1), (100, 4)), layers=layers)
    torch = as_torch_holds(problem, factor)
    assert [stage.saved_for_weight_bytes for stage in torch.stages] == [held, held]
    assert torch.costs.saved_for_weight[:, 0].tolist() == [100, held]
    assert torch.layers is not None
    of_layer = (held, held if factor else 250)  # what is computed again is not among what F saves
    assert [layer.saved_for_weight_bytes for layer in torch.layers] == [held // 2, of_layer]
    measured = problem.replace(stack="torch", layers=None)
    assert as_torch_holds(measured) == measured
    assert measured.costs.saved_for_weight[:, 0].tolist() == [100, 4]


@settings(deadline=None, max_examples=examples(60))
@given(st.data())
def test_certificates_on_other_stages_are_what_torch_holds_there(data: st.DataObject) -> None:
    """Another stage may be the first one. By layers it is a little more where what is computed again counts."""
    whole = st.integers(1, 40)
    costs = [(size, data.draw(st.integers(0, size))) for size in data.draw(st.lists(whole, min_size=4, max_size=8))]
    layers = [problems.stage((1, 1, 1), each) for each in costs] if data.draw(st.booleans()) else None
    stages = [problems.stage((1, 1, 1), (24 * size, 24)) for size in data.draw(st.tuples(whole, whole))]
    problem = problems.pipeline(2, 4, 10**6, stages)
    if layers:
        problem = Placement.balanced(problem.replace(layers=layers), 1).apply(problem.replace(layers=layers))
    shape: Shape = data.draw(st.sampled_from(["looped", "v"]))
    placement = Placement.balanced(problem, 2, shape)
    schedule = data.draw(strategies.schedules(placement.apply(problem)))
    held = peaks_in_torch(leave_out_offload(schedule))
    measured = problem.replace(
        stack="torch",
        stages=[
            s.model_copy(update={"saved_for_weight_bytes": s.activation_bytes * (1 + (i > 0))})
            for i, s in enumerate(problem.stages)
        ],
        layers=None,
    )
    for torch in (as_torch_holds(problem), *([] if layers else [measured])):
        certified = certify(placement.apply(torch), schedule).device
        assert [peak.bytes for peak in certified] == held


@pytest.mark.parametrize(("recompute", "kept"), [("none", 32), ("full", 2)])
def test_the_factor_of_a_transformer(recompute: str, kept: int) -> None:
    """Of a GPT with flash attention in 16 bits: 22 bytes of gradients for each of its bsh, beside those that F keeps.
    On small ones 1.68 was measured."""
    run = Run.from_dict({"microbatches": 2, "recompute": recompute})
    estimated = estimate(MODELS["gpt-3-13b"], Parallelism.from_dict({"pp": 2}), GPUS["H100"], run)
    assert estimated.torch_factor == pytest.approx(1 + 22 / kept, rel=0.03)


@pytest.mark.parametrize("p", [2, 4, 8])
def test_zero_bubble_holds_p_activations_on_every_rank(p: int) -> None:
    """Even without the gradients: of W's that wait nothing is freed."""
    problem = units(p, 3 * p)
    schedule = generate("zb-h1", problem)
    certified = certify(as_torch_holds(problem, 1.0), schedule).device
    assert [peak.bytes for peak in certified] == [p * ACTIVATION] * p


def test_buffers_of_messages_count_by_version() -> None:
    """8 micro-batches of 1 MiB, beside two activations. Up to torch 2.13 16 MiB on a middle rank, 8 on the outer ones.
    In 2.15 a middle rank has 4: the inputs of two forwards, that of the next, and a gradient; the last keeps all."""
    problem = problems.pipeline(3, 8, 18 * MIB, problems.stage((1, 1, 1), (MIB, MIB)))
    schedule = generate("1f1b", problem)
    for to, most, d, buffers in (
        ("torch-csv", 18, 1, "all 16"),
        ("torch-comms", 18, 1, "all 16"),
        (WAITS, 9, 2, "up to 8"),
    ):
        tight = schedule.on(problems.with_budgets(problem, most * MIB - 1))
        fits = schedule.on(problems.with_budgets(problem, most * MIB))
        assert export(fits, to, message_bytes=MIB).misfits == ()
        assert [each.split(" needs")[0] for each in export(tight, to, message_bytes=MIB).misfits] == [f"device {d}"]
        note, *_ = export(tight, to).notes
        assert f"device {d} has buffers for {buffers} messages" in note
    by_rank = export(schedule, WAITS, message_bytes=1).schedule.problem.devices
    assert [18 * MIB - device.activation_budget_bytes for device in by_rank] == [1, 4, 8]


@settings(deadline=None, max_examples=examples(60))
@given(st.data())
def test_buffers_in_torch_2_15_by_the_rows(data: st.DataObject) -> None:
    """From its receive a message has one until the last backward of its micro-batch there, or to the end."""
    problem = data.draw(strategies.looped())
    schedule = leave_out_offload(data.draw(strategies.schedules(problem)))
    most, last = [], str(len(problem.stages) - 1)
    for line in export_schedule(schedule, WAITS).splitlines():
        cells = line.split(",")
        spans = []
        for k, cell in enumerate(cells):
            for stage, way, j in re.findall(r"(\d+)RECV_([FB])(\d+)", cell):
                ends = [n for n, other in enumerate(cells) if other in (f"{stage}B{j}", f"{stage}W{j}")]
                spans.append(range(k, len(cells) if (stage, way) == (last, "F") else max(ends)))
        most.append(max((sum(k in span for span in spans) for k in range(len(cells))), default=0))
    ample = schedule.on(problems.with_budgets(problem, 10**9))
    found = export(ample, WAITS, message_bytes=1).schedule.problem.devices
    assert [10**9 - device.activation_budget_bytes for device in found] == most


def stages_in(cell: str) -> set[int]:
    return {int(stage) for stage, _ in re.findall(r"(\d+)[FIBW](\d+)", cell)}


def sharded_cells(row: list[str]) -> list[str]:
    """Of a row only its computing, gathers and releases."""
    return [cell for cell in row if stages_in(cell) or re.fullmatch(r"\d+(UNSHARD|RESHARD)", cell)]


@settings(deadline=None, max_examples=examples(60))
@given(st.data(), st.sampled_from([0.0, 0.5, 3.0, 20.0, None]))
def test_stages_are_gathered_by_the_times(data: st.DataObject, ms: float | None) -> None:
    """No op runs without its stage. One after the other, each gather that does not stand at the row's beginning ends
    before its stage runs. The most stages that are there at one time count."""
    problem = data.draw(strategies.looped())
    schedule = leave_out_offload(data.draw(strategies.schedules(problem)))
    found = export(schedule.on(problems.with_budgets(problem, 10**9)), WAITS, gather_ms=ms, gathered_bytes=1)
    rows = schedule.timeline.rows
    for d, line in enumerate(found.text.splitlines()):
        starts = schedule.timeline.start[(rows.device == d) & ~rows.second].tolist()
        there, most, free, ran = dict[int, float](), 0, -math.inf, 0
        for cell in sharded_cells(line.split(",")):
            if cell.endswith("UNSHARD"):
                free = max(free, starts[ran] if ran else -math.inf) + (ms or 0)
                assert there.setdefault(int(cell.removesuffix("UNSHARD")), free) == free
            elif cell.endswith("RESHARD"):
                del there[int(cell.removesuffix("RESHARD"))]
            else:
                assert all(there[s] <= starts[ran] + 1e-9 for s in stages_in(cell))
                ran += 1
            most = max(most, len(there))
        assert (there, ran) == ({}, len(starts))
        assert 10**9 - found.schedule.problem.devices[d].activation_budget_bytes == most
        assert ms is not None or most == len(problem.stages_on(d))


def test_a_stage_in_fsdp_makes_room_while_another_runs() -> None:
    """All forwards, then all backwards of two stages a rank: both are there only while the next one is gathered."""
    stages = [problems.stage((1, 1, 1)) | {"device": s % 2} for s in range(4)]
    directions = ("F", range(4)), ("BW", range(3, -1, -1))
    each = [f"{s}{kind}{j}" for kind, order in directions for s in order for j in range(4)]
    programs = [[op for op in each if int(op[0]) % 2 == d] for d in range(2)]
    schedule = Schedule.parse(problems.pipeline(2, 4, 10**9, stages), programs)
    row = export_schedule(schedule, WAITS, gather_ms=1.0).splitlines()[0]
    assert " ".join(sharded_cells(row.split(","))) == (
        "0UNSHARD 0F0 0F1 0F2 2UNSHARD 0F3 0RESHARD 2F0 2F1 2F2 2F3 2B0 2B1 2B2 0UNSHARD 2B3 2RESHARD 0B0 0B1 0B2 0B3 "
        "0RESHARD"
    )
    for ms, budgets in ((None, [8, 8]), (1.0, [8, 8]), (0.0, [9, 9])):
        tight = schedule.on(problems.with_budgets(schedule.problem, 10))
        exported = export(tight, WAITS, gather_ms=ms, gathered_bytes=1)
        assert [device.activation_budget_bytes for device in exported.schedule.problem.devices] == budgets


def test_times_to_gather_are_refused_where_torch_places_gathers() -> None:
    schedule = generate("1f1b", units(2, 4))
    for to, ms in (("torch-csv", 1.0), ("megatron", 1.0), (WAITS, -1.0)):
        with pytest.raises(InputError, match=rf"^gather_ms = {ms:g}: only torch-comms and torch-comms-waits gat"):
            export(schedule, to, gather_ms=ms)


@pytest.mark.parametrize("name", ["message_bytes", "gathered_bytes"])
def test_bytes_that_would_not_count_are_refused(name: str) -> None:
    with pytest.raises(InputError, match=f"^{name} = 5: only what is for PyTorch counts them"):
        export(generate("1f1b", units(2, 4)), "json", **{name: 5})


def test_an_export_says_which_options_of_torch_it_needs() -> None:
    """Where torch places gathers, those of more than three stages a rank; where rows do, defaults in 2.15."""
    schedule = generate("interleaved", units(2, 4, v=4))
    notes = {to: " ".join(export(schedule, to).notes) for to in ("torch-csv", "torch-comms", WAITS)}
    assert "max_active_stages=4 keeps all" in notes["torch-csv"]
    assert "max_outstanding_sends and unshard_lookahead must be" in notes[WAITS]
    assert not {"must", "keeps"} & set(notes["torch-comms"].split())
    budgets = export(schedule, "torch-csv", gathered_bytes=5).schedule.problem.devices
    assert [10**9 - device.activation_budget_bytes for device in budgets] == [20, 20]


def test_an_export_of_split_backwards_says_where_they_are_wrong() -> None:
    schedule = generate("zb-h1", units(2, 4))
    (note,) = export(schedule, "torch-csv", message_bytes=1).notes
    assert note.startswith("backwards are split, which gives wrong gradients in DDP and where FSDP has parts of a")
    whole = export(schedule, "torch-csv", whole=True, message_bytes=1)
    assert (whole.notes, set(whole.text) & set("IW")) == ((), set())
