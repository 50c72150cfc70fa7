"""Stages that several ranks compute together, by torch's own parallel layers, against the same model in one process.

Sums over the ranks of a group come in another order than in one process, so losses and gradients are compared with a
tolerance. Between two schedules of the same pipeline the arithmetic is the same, and gradients are equal to the bit.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.close import require_close
from support.ranks import cases, inner, microbatches
from support.ranks.cases import LENGTH, Gradients, batch, problem
from support.ranks.inner import make_stages, mesh, parallel, two_stages
from support.ranks.microbatches import Sizes, Turn, given
from support.ranks.programs import OFFLOADED, ONE_F_ONE_B, RECOMPUTED, SPLIT
from support.ranks.replicas import gradients
from support.ranks.worker import Ranks
from torch import Tensor

from optpipe.schedule import Schedule
from optpipe_runtime import PlannedSteps
from optpipe_runtime.lowering.prepare import one_at_a_time


def train_packed(taken: Sequence[Turn], planned: bool) -> list[tuple[list[float], Gradients]]:
    """Losses and gradients, with a schedule for every step, or one that is loaded."""
    stage = dist.get_rank() // 2
    modules = {stage: parallel(make_stages()[stage], mesh()["tensor"])}
    optimizer, seen = cases.sgd(*modules.values()), []
    with (
        two_stages(modules, len(taken[0].sizes)) as pipe,
        PlannedSteps(pipe, activation_budget_bytes=10**9) if planned else nullcontext(pipe) as train,
    ):
        if not planned:
            pipe.load(one_at_a_time(pipe.layout.unmeasured()))
        for seed, turn in enumerate(taken):
            optimizer.zero_grad()
            losses = train.step(**given(turn, seed, [stage], stage, 2)).losses
            seen.append((losses or [], gradients(modules)))
            optimizer.step()
    return seen


def close(found: Gradients, expected: Gradients) -> None:
    """To float32's precision, in proportion to the largest gradient of all: a key's bias has none but rounding."""
    require_close(found, expected, atol=1e-6 * max(float(abs(grad).max()) for grad in expected.values()))


def test_tensor_parallel_stages_train_as_one_process(four_ranks: Ranks) -> None:
    """By every kind of schedule, through a swap; one for all peers, although each loads and offers its own."""
    programs = [ONE_F_ONE_B, SPLIT, OFFLOADED, RECOMPUTED]
    ranks = four_ranks(inner.trained, microbatches=4, programs=programs, better=2)
    trained = len(ranks[0].versions)
    expected = inner.plain(4, 1 + trained)
    assert len({seen.problem for seen in ranks}) == 1
    assert all(seen.versions == ranks[0].versions and seen.schedule == "schedule 2" for seen in ranks)
    for k in range(4):
        for first, other in ((ranks[0], ranks[1]), (ranks[2], ranks[3])):
            for name, grad in first.steps[k].gradients.items():
                np.testing.assert_array_equal(grad, ranks[0 if first is ranks[0] else 2].steps[0].gradients[name])
                np.testing.assert_array_equal(grad, other.steps[k].gradients[name])
    for plain, k in zip(expected, (0, *range(4, 4 + trained)), strict=True):
        close(ranks[0].steps[k].gradients | ranks[2].steps[k].gradients, plain.gradients)
        for seen in ranks:
            assert seen.steps[k].norm == pytest.approx(plain.norm, rel=1e-5)
        assert ranks[2].steps[k].losses == pytest.approx(plain.losses, rel=1e-5)
    for seen in ranks:
        assert all(step.excess is None for step in seen.steps)
        assert [bool(step.host_peak_bytes) for step in seen.steps[:4]] == [False, False, True, False]
        assert seen.at_b <= {
            f"{layer}.{name}"
            for layer in ("0.norm1", "0.norm2", "1", "1.norm1", "1.norm2")
            for name in ("weight", "bias")
        }


@pytest.mark.parametrize("planned", [True, False])
def test_micro_batches_of_different_shapes_train_as_in_one_process(four_ranks: Ranks, planned: bool) -> None:
    """The sequence is divided by the peers, so lengths are even; planned steps have different numbers of them."""
    first = Turn((Sizes(2, 10), Sizes(1, 16), Sizes(3, 4), Sizes(2, 12)))
    longer = Turn((Sizes(1, 34), Sizes(2, 6), Sizes(1, 8), Sizes(2, 20)), weighted=True)
    turns = [first, longer, *([Turn((Sizes(1, 22), Sizes(2, 8)))] if planned else []), first]
    ranks = four_ranks(train_packed, taken=turns, planned=planned)
    for step, (losses, expected, _) in enumerate(microbatches.plain(make_stages(), turns)):
        for begins, ends in ((ranks[0], ranks[2]), (ranks[1], ranks[3])):
            assert ends[step][0] == pytest.approx(losses, rel=1e-4)
            close(begins[step][1] | ends[step][1], expected)


def test_a_stage_that_communicates_with_ranks_not_named_is_refused(four_ranks: Ranks) -> None:
    """As is what names the wrong ranks. If one peer refuses a schedule, all refuse it."""
    inside = "communicates inside an op with ranks"
    for rank, told in enumerate(four_ranks(inner.refused)):
        peers = [rank // 2 * 2, rank // 2 * 2 + 1]
        assert len(told) == 7
        assert f"{inside} {peers}, which all must run one schedule: give the Pipeline, as inner, " in told[0]
        assert told[1].startswith(f"stage {rank // 2}: Marked {inside} {peers}, which all")
        assert told[2].startswith(
            f"stage {rank // 2}: SyncBatchNorm {inside} [0, 1, 2, 3], of which inner has {peers}:"
        )
        assert told[3].startswith("inner: rank 0 gave a str: must be a DeviceMesh or a torch.distributed.ProcessGroup")
        assert told[4].startswith("inner: rank 0 has peers [0, 2], in pipelines [[0, 2]]: give `group` one rank of ")
        assert told[5].startswith("inner: rank 0 has peers [0, 1], in pipelines [[0, 1, 2, 3]]: give `group` one rank ")
        assert told[6].startswith("rank 1 (inner peer 1): host_memory_bytes = 1 kB: 0 B are allocated and ")


def test_copies_are_tied_part_by_part(four_ranks: Ranks) -> None:
    for found, norm, in_one_process, expected in four_ranks(inner.tied, programs=SPLIT):
        close(found, in_one_process)
        assert norm == pytest.approx(expected, rel=1e-5)


def test_a_mesh_of_two_dimensions(four_ranks: Ranks) -> None:
    (expected,) = inner.plain(4, 1)
    programs = [
        [f"{s}{kind}{j}" for j in range(4) for s, kind in ((0, "F"), (1, "F"), (1, "B"), (0, "B"), (1, "W"), (0, "W"))]
    ]
    for seen in four_ranks(inner.of_two_dimensions, programs=programs):
        close(seen.gradients, expected.gradients)
        assert seen.losses == pytest.approx(expected.losses, rel=1e-5)
        assert seen.norm == pytest.approx(expected.norm, rel=1e-5)


def test_a_profile_counts_local_parts_of_the_fullest_peer(four_ranks: Ranks) -> None:
    """Saved are the input, gathered to (2, 16, 32), and before and after GELU 65 of 129 columns, or 64."""
    inputs, most, least = (2 * 16 * columns * 4 for columns in (32, 65, 64))
    for found, at_b, _ in four_ranks(inner.measured):
        assert found == [inputs + 2 * most, inputs + 2 * least, 10**8]
        assert at_b == frozenset()


# Some begin a step before others have ended the one before

PATIENCE = timedelta(seconds=100)


class Begins(NamedTuple):
    """One step. `ahead`: the last stage's ranks begin it only when the first stage's have begun their first forward.
    `length`: of sequences. `evaluating`: only the second peer of the first stage has changed its mode."""

    ahead: bool = True
    length: int = LENGTH
    evaluating: bool = False


def data(step: int, how: Begins) -> tuple[Tensor, Tensor]:
    inputs, targets = (part[:, : how.length].contiguous() for part in batch(step, 4))
    return inputs, targets


def train_ahead(
    programs: Sequence[Sequence[str]], steps: Sequence[Begins]
) -> list[tuple[list[float] | None, Gradients]]:
    stage, peer = dist.get_rank() // 2, dist.get_rank() % 2
    module = parallel(make_stages()[stage], mesh()["tensor"])
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    store, now, found = dist.distributed_c10d._get_default_store(), [0], []

    def begun(*_: Any) -> None:
        if stage == 0:
            store.set(f"inner_ahead/{now[0]}/{peer}", "begun")

    hook = module.register_forward_pre_hook(begun)
    with two_stages({stage: module}, 4) as pipe:
        pipe.load(Schedule.parse(problem((0, 1), 4), programs))
        for step, how in enumerate(steps):
            now[0] = step
            optimizer.zero_grad()
            module.train(not (how.evaluating and (stage, peer) == (0, 1)))
            if how.ahead and stage == 1:
                store.wait([f"inner_ahead/{step}/{peer}"], PATIENCE)
            losses = pipe.step(*data(step, how)).losses
            found.append((losses, gradients({stage: module})))
            optimizer.step()
    hook.remove()
    for step in range(len(steps)) if stage == 0 else ():
        store.delete_key(f"inner_ahead/{step}/{peer}")
    return found


def test_no_rank_waits_for_others_than_its_peers_between_two_steps(four_ranks: Ranks) -> None:
    """The last stage begins a step when the first stage computes in it: did all meet before each step, this never
    ended. Where the batch of all ranks has another shape, or the module of one peer another mode, the step that has
    begun is undone, on all peers, and runs again."""
    steps = [
        Begins(ahead=False),
        Begins(),
        Begins(),
        Begins(ahead=False, length=LENGTH // 2),
        Begins(length=LENGTH // 2),
        Begins(ahead=False, length=LENGTH // 2, evaluating=True),
        Begins(ahead=False, length=LENGTH // 2),
        Begins(length=LENGTH // 2),
    ]
    ranks = four_ranks(train_ahead, programs=SPLIT, steps=steps)
    for step, plain in enumerate(cases.plain_training(make_stages(), map(data, range(len(steps)), steps), 4)):
        largest = max(float(abs(gradient).max()) for gradient in plain.gradients.values())
        for first, last in ((ranks[0], ranks[2]), (ranks[1], ranks[3])):
            assert last[step][0] == pytest.approx(plain.losses, rel=1e-4)
            require_close(first[step][1] | last[step][1], plain.gradients, rtol=1e-3, atol=1e-5 * largest)
