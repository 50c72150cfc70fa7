"""Every published schedule is valid on stages of any times, on any devices, and holds what it holds on even ones; which
stages those are."""

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.problems.units import ACTIVATION, paired, peaks, unevenly, units

from optpipe import InputError, Problem, check
from optpipe.model.placement import Placement, rechunk
from optpipe_solver.systems import SYSTEMS, System, generate
from optpipe_solver.systems.classic import one_f_one_b

COSTS: dict[str, Any] = {"recompute": (1, 0), "offload": (0.5, 0.5, ACTIVATION), "update": (1, 2, 1)}
METHODS = [*SYSTEMS, "1f1b-recompute:every=2", "algorithm-1:tolerance=9", "chronos-recomp:recomputed=2"]
METHODS += ["chronos-zero2:group=5", "gis:leaving=1", "gis-h:leaving=1", "interleaved-recompute:recomputed=1"]
METHODS += ["chronos:leaving=2", "chronos-offload:leaving=1"]
ORDERED_BY_TIMES = {"po-h", "po-f", "algorithm-1", "v-auto", "chronos-recomp", "gis:leaving=1", "gis-h:leaving=1"}


def stages_for(system: System, draw: Any, p: int, m: int) -> tuple[Problem, Problem]:
    """Even and uneven stages as the system needs them, on some of the devices in any order."""
    p = 2 * p if system.shape == "bidirectional" else p
    v, order = draw(st.integers(system.least, system.most or 4)), draw(st.permutations(range(p + 1)))
    even = units(p, m, v=v, shape="looped" if system.shape == "bidirectional" else system.shape, **COSTS)
    links = (None,) if system.name == "algorithm-1" else (None, "pcie0")  # it gives a shared link no order
    device = even.devices[0].model_copy(update={"link": draw(st.sampled_from(links))})
    even = even.replace(
        devices=[device] * (p + 1),
        stages=[stage.model_copy(update={"device": order[stage.device]}) for stage in even.stages],
        overlap_factor=draw(st.sampled_from([0.75, 1.0] if system.name == "combined-1f1b" else [None, 0.75, 1.0])),
    )
    if system.name == "bpipe":
        even = paired(even, *draw(st.tuples(*[st.sampled_from([0.0, 0.5, 9.0])] * 2)))
    uneven = unevenly(draw, even)
    if system.shape != "bidirectional":
        return even, uneven
    ways = draw(st.lists(st.integers(0, 1), min_size=m, max_size=m))
    both = (rechunk(each, 1, "bidirectional").replace(microbatch_routes=ways) for each in (even, uneven))
    return next(both), next(both)


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=examples(30), deadline=None)
@given(data=st.data(), p=st.integers(1, 6), m=st.integers(1, 16))
def test_any_stages_have_a_valid_schedule(method: str, data: Any, p: int, m: int) -> None:
    name = method.partition(":")[0]
    even, uneven = stages_for(SYSTEMS[name], data.draw, p, m)
    schedule = generate(method, uneven)
    assert check(uneven, schedule) == []
    if not {name, method} & ORDERED_BY_TIMES:
        in_memory = name if "leaving" in method else method  # what leaves, times decide
        assert max(peaks(schedule)) <= max(peaks(generate(in_memory, even)))


ROW, LOOPED = units(4, 8), units(4, 8, v=2)
PEERS = [{"activation_budget_bytes": 10**9, "peer": (d + 1) % 4} for d in range(4)]
OFFLOADING = units(4, 8, v=2, offload=(1, 1, ACTIVATION))
ON_HOST = units(4, 8, v=2, update=(1, 1, 1))


@pytest.mark.parametrize(
    ("method", "problem", "sentence"),
    [
        (
            "1f1b",
            LOOPED,
            "1f1b needs one stage a device, all in one row: the problem has other stages (with all placements it is "
            "given them)",
        ),
        ("interleaved", ROW, "interleaved needs 2 or more looped stages a device: the problem has other stages"),
        ("1f1b-recompute", ROW, "stages[0].recompute_ms is missing: 1f1b-recompute recomputes stages 0 to 3"),
        ("1f1b-recompute:every=0", ROW, "every = 0: 1f1b-recompute computes every micro-batch again (1)"),
        ("gis:group=2", units(5, 8, v=2), "group = 2: gis on 5 devices takes 3 to 5"),
        ("gis:group=6", units(5, 8, v=2), "group = 6: gis on 5 devices takes 3 to 5"),
        ("gis-h:leaving=3", OFFLOADING, "leaving = 3: expected 0 to 2, the stages of a device with offload_ms"),
        ("gis:leaving=1", LOOPED, "leaving = 1: expected 0 to 0, the stages of a device with offload_ms"),
        ("interleaved-recompute:recomputed=0", LOOPED, "recomputed = 0: expected 1 to 2, the chunks of a device"),
        ("interleaved-recompute", LOOPED, "stages[0].recompute_ms is missing: interleaved-recompute recomputes stages"),
        ("chronos-zero2:group=0", LOOPED, "group = 0: a chunk is launched for at least 1 micro-batch in a row"),
        ("chronos-recomp:recomputed=3", LOOPED, "recomputed = 3: expected 1 to 2, the chunks of a device"),
        ("chronos-recomp", LOOPED, "stages[0].recompute_ms is missing: chronos-recomp recomputes stages 0 to 3"),
        (
            "chronos-offload",
            LOOPED,
            "stages[4].update_ms is missing: its optimizer cannot run on the host",
        ),
        (
            "chronos-offload:chunks=2",
            ON_HOST,
            "chunks = 2: expected 1 to 1, the shallowest chunk of a device is updated",
        ),
        ("dualpipe", rechunk(units(3, 12), 1, "bidirectional"), "stages: 3 devices in a row, dualpipe needs an even"),
        ("dualpipe", ROW, "dualpipe needs one stage a device each way, on two routes (bidirectional)"),
        ("combined-1f1b", LOOPED, "overlap_factor is missing: combined-1f1b runs forwards beside backwards"),
        ("bpipe", ROW, "devices[0].peer is missing: bpipe evicts from stage 0 to stage 3, which is on device 3"),
        ("bpipe", ROW.replace(devices=PEERS), "devices[0].peer = 1: bpipe evicts from stage 0 to stage 3, which is on"),
        (
            "bpipe",
            ROW.replace(devices=[PEERS[0] | {"peer": 3}, *PEERS[1:]]),
            "stages[0].evict_ms is missing: bpipe evicts activations of this stage to device 3",
        ),
    ],
)
def test_what_a_paper_excludes_is_one_sentence(method: str, problem: Problem, sentence: str) -> None:
    with pytest.raises(InputError, match=f"^{re.escape(sentence)}"):
        generate(method, problem)


@pytest.mark.parametrize(("factor", "said"), [(None, "missing"), ([[1.0] * 4] * 4, "by pair, as of an estimate")])
def test_on_stages_that_are_not_both_ways_dualpipe_asks_for_budgets_of_all_parameters_twice(factor, said) -> None:
    """Of which one factor for all pairs assures: the budgets of an estimate, whose factors are lists, are one way's."""
    problem = ROW.replace(overlap_factor=factor)
    with pytest.raises(
        InputError, match=rf"^overlap_factor is {said}.*: on stages not given both ways, dualpipe holds"
    ):
        generate("dualpipe", problem, placements="all")
    assert len(generate("dualpipe", ROW.replace(overlap_factor=1.0), placements="all").problem.all_routes) == 2


IN_LOOPS = System("looped", "", one_f_one_b, least=2, most=None, chunks=2)
TWO_WAYS = System("two-ways", "", one_f_one_b, shape="bidirectional")
BOTH_WAYS = rechunk(units(4, 6), 1, "bidirectional")


def test_two_ways_may_be_taken_in_any_order_and_cost_something_else():
    problem = BOTH_WAYS.replace(microbatch_routes=[1, 1, 0, 1, 1, 1])
    uneven = [stage.model_dump(exclude_none=True) | {"forward_ms": 1.0 + s} for s, stage in enumerate(problem.stages)]
    assert TWO_WAYS.placement(problem.replace(stages=uneven), "keep") is None
    turned = [stage.model_dump(exclude_none=True) | {"device": stage.device ^ 1} for stage in problem.stages[4:]]
    with pytest.raises(InputError, match=r"^two-ways needs one stage a device each way, on two routes"):
        TWO_WAYS.placement(problem.replace(stages=[*problem.stages[:4], *turned]), "keep")


def test_where_it_may_choose_it_takes_as_many_chunks_as_it_would_if_the_layers_allow():
    system = System("any", "", one_f_one_b, most=None, chunks=2)
    row = units(4, 6)
    assert system.placement(row, "keep") is None
    assert system.placement(row, "all") == Placement(chunks=2)
    assert system.placement(units(4, 6, v=3), "all") is None
    layers = [stage.model_dump(exclude={"device"}, exclude_none=True) for stage in row.stages]
    assert system.placement(row.replace(layers=layers), "all") is None


def test_of_two_ways_no_other_stages_are_made():
    with pytest.raises(InputError, match=r"^routes: there are 2, a placement is for one route only"):
        IN_LOOPS.placement(BOTH_WAYS, "all").apply(BOTH_WAYS)
