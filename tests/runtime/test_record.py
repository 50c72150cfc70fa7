"""`record_trace`: steps by PyTorch's own schedules become a trace that `optpipe.measured` reads."""

import gzip
import json
from itertools import groupby, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.ranks import record
from support.ranks.record import Case, Times
from support.ranks.worker import Ranks

from optpipe.diagnose import Runs, collect_runs
from optpipe.formats.torch_csv import ACTION, BY_LETTER
from optpipe.measured.convert import recording_from
from optpipe.measured.messages import clocks_ahead
from optpipe.measured.readers import RunFacts
from optpipe.measured.recording import MeasuredOp, Recording
from optpipe.model.ops import BACKWARD, Kind, Op

AHEAD_MS = 54321.0
APART = "clocks_differ_by_at_most_ms"
TIMES = Times(10.0, 10.0, 10.0, loss=5.0)
ONE, LOOPED, IN_A_V = ((0,), (1,)), ((0, 2), (1, 3)), ((0, 3), (1, 2))
# torch's schedules in a V have no evaluations: they raise
PLANS = {
    "1F1B": (Case("1F1B", TIMES, ONE), "etett"),
    "Interleaved1F1B": (Case("Interleaved1F1B", TIMES, LOOPED), "tetet"),
    "ZBVZeroBubble": (Case("ZBVZeroBubble", TIMES, IN_A_V), "tttt"),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_recording_is_read_as_what_ran(name: str, ranks: Ranks, tmp_path: Path) -> None:
    """All ops of two steps, in torch's order, by one clock, though that of rank 1 is ahead: no op begins before what it
    waits for has ended. The steps replayed with their own times take as long as they did."""
    case, plan = PLANS[name]
    rows = ranks(record.run_recorded, case=case, folder=tmp_path, plan=plan, ahead_ms=AHEAD_MS)
    folder = tmp_path / "pipeline-0"
    form, recording = recording_from([folder], None, RunFacts())
    assert (form, recording.unused) == ("torch-trace", ())
    assert len(recording.ops) == 2 * sum(map(len, rows))
    at = {(each.step, each.op): each for each in recording.ops}
    in_time = sorted(recording.ops, key=lambda each: each.start_ms)
    for (rank, row), step in product(enumerate(rows), range(2)):
        ran = [each.op for each in in_time if (each.step, each.rank) == (step, rank)]
        assert ran == [op_of(action) for action in row]
    apart_ms = max(json.loads(gzip.decompress(path.read_bytes()))[APART] for path in folder.iterdir())
    last = sum(map(len, case.stages)) - 1
    for (step, op), each in at.items():
        if op.kind is Kind.F:
            assert each.ms >= TIMES.forward + TIMES.loss * (op.stage == last)
        if op.kind is Kind.F and op.stage:
            assert each.start_ms > at[step, op._replace(stage=op.stage - 1)].end_ms - 2 * apart_ms
        if op.kind in BACKWARD:
            whole = op.kind is Kind.BW
            assert each.ms >= TIMES.backward_input * (whole or op.stage > 0) + TIMES.backward_weight * whole
        if op.kind in BACKWARD and op.stage < last:
            (behind,) = (at[key] for kind in BACKWARD if (key := (step, Op(kind, op.stage + 1, op.microbatch))) in at)
            assert each.start_ms > behind.end_ms - 2 * apart_ms
    runs = collect_runs(recording)
    print(f"{name}: clocks within {apart_ms:.3f} ms")
    require_replayed(recording, runs)


@pytest.mark.parametrize(("name", "stages"), [("Interleaved1F1B", LOOPED), ("DualPipeV", IN_A_V)])
def test_replicas_are_told_apart(name: str, stages: Any, four_ranks: Ranks, tmp_path: Path) -> None:
    """By torch's profiler and by `record_trace`: each pipeline is a replica, whose steps replay as they ran. The pairs
    of DualPipeV are divided into a forward and a backward."""
    case = Case(name, TIMES, stages, microbatches=6)
    four_ranks(record.run_replicas, case=case, folder=tmp_path, ahead_ms=AHEAD_MS)
    content = json.loads(gzip.decompress((tmp_path / "recorded/pipeline-2/rank-3.json.gz").read_bytes()))
    assert {"pg_desc": "mesh_dp", "ranks": [1, 3]} in content["distributedInfo"]["pg_config"]
    for folder in ("profiled", "recorded"):
        form, recording = recording_from([tmp_path / folder], None, RunFacts())
        assert form == "torch-trace"
        assert {(each.replica, each.device, each.rank) for each in recording.ops} == {
            (0, 0, 0),
            (0, 1, 1),
            (1, 0, 2),
            (1, 1, 3),
        }
        runs = collect_runs(recording)
        quickest = [runs.ms[(runs.replica[runs.run] == r) & (runs.kind == Kind.F)].min() for r in (0, 1)]
        print(f"{name}, {folder}: forwards take at least {quickest} ms")
        require_replayed(recording, runs)
        assert runs.replica.tolist() == [0, 1, 0, 1]
        assert TIMES.forward <= quickest[0] < 2 * TIMES.forward <= quickest[1]


def require_replayed(recording: Recording, runs: Runs) -> None:
    """Replayed with their own times, steps take as long as they did, to the bit: the time of an op is here from the end
    of all that it waited for, so that what a busy machine adds to a step is in it, too."""
    ms = np.empty_like(runs.ms)
    for k, (replica, step) in enumerate(zip(runs.replica, runs.step, strict=True)):
        steps = [list(each) for _, each in groupby(_of_replica(recording, replica), key=lambda each: each.step)]
        ahead = clocks_ahead(steps, runs.where)
        (ran,) = (each for each in steps if each[0].step == step)
        ended = {each.op: each.end_ms - ahead[each.device] for each in ran}
        began = min(each.start_ms - ahead[each.device] for each in ran)
        numbers = range(*runs.ops_of(k).indices(len(ms)))
        ops = [Op(Kind(runs.kind[i]), int(runs.stage[i]), int(runs.microbatch[i])) for i in numbers]
        for i, op, previous in zip(numbers, ops, [None, *ops], strict=False):
            waited = [previous] if i > numbers[0] and runs.device[i] == runs.device[i - 1] else []
            if op.kind is Kind.F:
                waited.append(op._replace(stage=op.stage - 1))
            elif op.kind in BACKWARD:
                waited += [op._replace(stage=op.stage + 1, kind=kind) for kind in BACKWARD]
            ms[i] = ended[op] - max((ended[each] for each in waited if each in ended), default=began)
    np.testing.assert_allclose(runs.replay(ms, with_messages=False)[0], runs.measured_ms, rtol=1e-9)
    replayed = [replayed_by_hand(runs, k) for k in range(len(runs.step))]
    np.testing.assert_allclose(runs.replay()[0], replayed, rtol=1e-9)


def replayed_by_hand(runs: Runs, k: int) -> float:
    """One run, op by op: a device hands over after each op, and a message takes its time from the op's end on."""
    numbers = range(*runs.ops_of(k).indices(len(runs.ms)))
    waiting: dict[int, list[int]] = {}
    for i in numbers:
        waiting.setdefault(int(runs.device[i]), []).append(i)
    free, ended = dict.fromkeys(waiting, 0.0), dict[tuple[Kind, int, int], tuple[float, int]]()
    while any(waiting.values()):
        for d, ops in waiting.items():
            while ops:
                kind, s, j = Kind(runs.kind[ops[0]]), int(runs.stage[ops[0]]), int(runs.microbatch[ops[0]])
                needed = [(Kind.F, s - 1, j)] * (kind is Kind.F and s > 0)
                if kind in BACKWARD and s < max(runs.stage):
                    needed = [(other, s + 1, j) for other in BACKWARD if has(runs, k, other, s + 1, j)]
                if not all(op in ended for op in needed):
                    break
                arrivals = [
                    end + max(runs.handover_ms[sender], runs.message_ms[k] * (sender != d))
                    for end, sender in map(ended.__getitem__, needed)
                ]
                end = max([free[d], *arrivals]) + runs.ms[ops.pop(0)]
                ended[kind, s, j], free[d] = (end, d), end + runs.handover_ms[d]
    return max(end for end, _ in ended.values())


def has(runs: Runs, k: int, *op: int) -> bool:
    ops = runs.ops_of(k)
    return bool(((runs.kind[ops] == op[0]) & (runs.stage[ops] == op[1]) & (runs.microbatch[ops] == op[2])).any())


def _of_replica(recording: Recording, replica: int) -> list[MeasuredOp]:
    return sorted((each for each in recording.ops if each.replica == replica), key=lambda each: each.step)


def op_of(action: str) -> Op:
    stage, letter, microbatch = ACTION.fullmatch(action).groups()
    return Op(BY_LETTER[letter], int(stage), int(microbatch))


def test_clocks_that_differ(ranks: Ranks) -> None:
    first, second = ranks(record.compare_clocks, ahead_ms=AHEAD_MS)
    assert abs(first.ms) <= first.within_ms
    assert abs(second.ms - AHEAD_MS) <= second.within_ms


def test_what_cannot_be_recorded_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    case, _ = PLANS["1F1B"]
    for said in ranks(record.refusals, case=case, folder=tmp_path, a_file=tmp_path / "file"):
        assert said == [
            "after = 5, steps = 0: after at least 0 steps, at least 1 to record are expected",
            f"folder = {tmp_path / 'file'}: cannot be made: Not a directory",
            "schedule: its step is replaced already, as by another record_trace: one at a time",
        ]
