"""Levels of recomputation: what each keeps of a stage, what it must not keep, and schedules on two ranks. That stages
of all kinds train as in a plain run is in `test_odd_stages` and `test_split`."""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support import problems
from support.ranks import microbatches
from support.ranks.cases import Gradients, loss_fn, numbers, own_stages, refusals
from support.ranks.microbatches import Turn, batch
from support.ranks.odd_modules import BATCH, WIDTH, Block, Of, batches, linear, require_as_plain, run, runner
from support.ranks.worker import Ranks
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from optpipe.errors import InputError
from optpipe.model.problem import Problem
from optpipe.schedule import Schedule
from optpipe_runtime import Microbatches, Pipeline, PlannedSteps, StepReport
from optpipe_runtime.memory.link import Link
from optpipe_runtime.stage.levels import LEVELS, Level, as_levels
from optpipe_runtime.stage.runner import StageRunner

PLACEMENT = [0, 1]
KEEPS = ["cheap", "selective", "full"]


class Way(NamedTuple):
    """Of one activation: the number of its level, None if it is kept; and whether what is kept leaves."""

    level: int | None = None
    leaves: bool = False


class Trained(NamedTuple):
    report: StepReport
    gradients: Gradients
    certified_bytes: int
    certified_host_bytes: int


def program(problem: Problem, stage: int, ways: Sequence[Way]) -> list[str]:
    first, then = [], []
    for j, way in enumerate(ways):
        level = None if way.level is None else problem.stages[stage].all_levels[way.level]
        leaves = way.leaves and (level is None or level.can_offload)
        first += [f"{stage}F{j}", *([f"{stage}O{j}", f"{stage}D{j}"] if leaves else [])]
        again = [] if level is None else [f"{stage}C{j}" + (f".{way.level}" if way.level else "")]
        then += [*([f"{stage}R{j}"] if leaves else []), *again, f"{stage}B{j}", f"{stage}W{j}"]
    return first + then


def trained(turn: Turn, all_ways: Sequence[Sequence[Way]]) -> tuple[Problem, list[Trained]]:
    rank, modules = dist.get_rank(), own_stages(PLACEMENT, dropout=0.1)
    inputs, targets = map(Microbatches, batch(turn, 1))
    steps = []
    with Pipeline(modules, PLACEMENT, loss_fn, len(turn.sizes), recompute=KEEPS) as pipe:
        problem = pipe.profile(inputs, targets, activation_budget_bytes=10**9, repeats=1)
        for ways in all_ways:
            pipe.load(Schedule.parse(problem, [program(problem, s, ways) for s in range(2)]))
            for module in modules.values():
                module.zero_grad()
            torch.manual_seed(rank)
            report = pipe.step(inputs, targets)
            certificate = pipe.plan.certificate
            steps.append(
                Trained(report, numbers(modules), certificate.device[rank].bytes, certificate.host[rank].bytes)
            )
    return problem, steps


def refused(schedule: Schedule) -> list[str]:
    def make(level: str) -> Pipeline:
        return Pipeline(own_stages(PLACEMENT), PLACEMENT, loss_fn, schedule.problem.microbatches, recompute=[level])

    with make("full") as pipe, make("cheap") as other:
        return refusals(lambda: pipe.load(schedule), lambda: PlannedSteps(other))


aten = torch.ops.aten
ROW = BATCH * 8 * 4  # bytes of one column
SUMS = BATCH * 8 * 4 * 4  # of attention: for each of 4 heads and each token one number


def held(stage: StageRunner, x: Tensor, level: Level | None) -> int:
    stage.forward(0, (x.clone(),), recompute=level)
    nbytes = stage.held_bytes(0)
    stage.forget(0)
    return nbytes


def test_what_each_level_keeps_of_a_block(link: Link) -> None:
    """Beside the input: the results of its four linear layers, and those of its attention."""
    stage, (x,) = runner(Block(), link), batches(1)
    products = (3 + 1 + 4 + 1) * WIDTH * ROW
    assert held(stage, x, LEVELS["full"]) == x.nbytes
    assert held(stage, x, LEVELS["selective"]) == x.nbytes + products
    assert held(stage, x, LEVELS["cheap"]) == x.nbytes + products + WIDTH * ROW + SUMS
    assert held(stage, x, LEVELS["cheap"]) < held(stage, x, None)


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "in place": lambda y: y.mul_(2),
    "by a view": lambda y: y[..., :3].mul_(2),
    "by its data": lambda y: y.data.mul_(2),
    "as a result": lambda y: torch.mul(y.detach(), 2, out=y.data),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_result_that_is_changed_is_not_kept(change: Callable[[Tensor], Any], link: Link) -> None:
    """The recompute would change it again."""

    def forward(first: nn.Module, second: nn.Module, x: Tensor) -> Tensor:
        change(y := first(x))
        result: Tensor = second(torch.tanh(y))
        return result

    module = Of(forward, linear(), linear())
    plain, stage, (x,) = copy.deepcopy(module), runner(module, link), batches(1)
    assert held(stage, x, LEVELS["cheap"]) == 2 * x.nbytes, "its input and the second layer's result"
    require_as_plain(module, plain, [x], run(stage, "K0 B0 W0", [x]))


def test_random_numbers_go_on_after_a_result_that_was_drawn(link: Link) -> None:
    """The dropout draws what it drew before, though the numbers before it are not drawn again."""
    module = Of(lambda f, drop, x: drop(f(x * torch.rand_like(x))), linear(), nn.Dropout(0.5))
    stage, (x,), results = runner(module, link), batches(1), []
    drawn = Level.by_policy("drawn", lambda op: op.overloadpacket is aten.rand_like)
    for level in (None, drawn):
        torch.manual_seed(1)
        (y,) = stage.forward(0, (x.clone(),), recompute=level)
        torch.rand(5)
        if level is not None:
            assert stage.held_bytes(0) == 2 * x.nbytes
            stage.recompute(0)
        results.append((y, *run(stage, "BW0", [x]).values()))
    assert all(map(torch.equal, *results))


def test_a_recompute_that_calls_other_ops_is_refused(link: Link) -> None:
    calls: list[nn.Module] = []

    def forward(f: nn.Module, x: Tensor) -> Tensor:
        calls.append(f)
        result: Tensor = f(x) if len(calls) < 10 else torch.sin(x)
        return result

    stage, (x,) = runner(Of(forward, linear()), link), batches(1)
    stage.forward(0, (x,), recompute=LEVELS["cheap"])
    calls.extend(calls * 10)
    with pytest.raises(InputError, match=r"^stage 0 calls other ops when it is recomputed than in its forward"):
        stage.recompute(0)


def test_levels_by_name_and_by_policy() -> None:
    def products(op: Any) -> bool:
        return op.overloadpacket is aten.mm

    by_name = as_levels(["cheap", products])
    assert list(by_name) == ["cheap", "products"]
    own = by_name["products"]
    assert own.keeps is not None
    assert own.keeps(aten.mm.default)
    assert not own.keeps(aten.mm.out)


def test_a_policy_may_answer_as_those_of_torchs_checkpoints_do() -> None:
    """Of its enumeration every member is true."""

    def keeps(answer: CheckpointPolicy) -> bool:
        level = Level.by_policy("mine", lambda op: answer)
        assert level.keeps is not None
        return level.keeps(aten.mm.default)

    saves = {CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE}
    kept = {answer for answer in CheckpointPolicy if "OFFLOAD" not in answer.name and keeps(answer)}
    assert kept == saves
    for answer in set(CheckpointPolicy) - {answer for answer in CheckpointPolicy if "OFFLOAD" not in answer.name}:
        with pytest.raises(InputError, match=r"^recompute has 'mine': CheckpointPolicy.* for aten.mm.default: a sched"):
            keeps(answer)


@pytest.mark.parametrize(
    ("ops", "columns"), [((), 0), ((aten.addmm,), 5), ((aten.addmm, aten.gelu), 9)], ids=["none", "products", "all"]
)
def test_what_selective_checkpoints_keep_is_counted(ops: Sequence[Any], columns: int, link: Link) -> None:
    """By shapes: no hook for saved tensors sees it. Gradients are those of a plain run, and nothing is left."""

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op.overloadpacket in ops else CheckpointPolicy.PREFER_RECOMPUTE

    def forward(body: nn.Module, x: Tensor) -> Tensor:
        contexts = partial(create_selective_checkpoint_contexts, policy)
        result: Tensor = checkpoint(body, x, use_reentrant=False, context_fn=contexts)
        return result

    body = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
    module = Of(forward, body)
    plain, stage, inputs = copy.deepcopy(module), runner(module, link), batches(2)
    assert held(stage, inputs[0], None) == inputs[0].nbytes + columns * WIDTH * ROW
    require_as_plain(module, plain, inputs, run(stage, "F0 F1 B0 W0 B1 W1", inputs))
    assert stage.held_bytes(0) == stage.held_bytes(1) == 0


def test_attention_that_is_written_out_is_kept_at_cheap_only(link: Link) -> None:
    def forward(f: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = f(x)
        return functional.softmax(y @ y.transpose(1, 2), -1) @ y

    stage, (x,) = runner(Of(forward, linear()), link), batches(1)
    assert held(stage, x, LEVELS["selective"]) == 2 * x.nbytes
    assert held(stage, x, LEVELS["cheap"]) == 3 * x.nbytes + BATCH * 8 * 8 * 4


# On two ranks

LENGTHS = microbatches.Turn(tuple(microbatches.Sizes(*size) for size in ((2, 9), (1, 16), (3, 4), (2, 12), (1, 5))))
EQUAL = microbatches.Turn((microbatches.Sizes(2, 12),) * 5)
KEPT = [Way()] * 5
WAYS = {
    **{name: [Way(k)] * 5 for k, name in enumerate(KEEPS)},
    **{f"{name}, offloaded": [Way(k, leaves=True)] * 5 for k, name in enumerate(KEEPS)},
    "mixed": [Way(0), Way(), Way(2, leaves=True), Way(1), Way(None, leaves=True)],
}


@pytest.mark.parametrize("turn", [EQUAL, LENGTHS], ids=["equal", "of different lengths"])
def test_with_any_level_a_step_is_the_same_to_the_bit_and_within_its_certificate(
    ranks: Ranks, turn: microbatches.Turn
) -> None:
    for rank, (problem, (kept, *others)) in enumerate(ranks(trained, turn=turn, all_ways=[KEPT, *WAYS.values()])):
        assert [level.name for level in problem.stages[rank].all_levels] == KEEPS
        for name, step in zip(WAYS, others, strict=True):
            assert step.report.losses == kept.report.losses, name
            np.testing.assert_equal(step.gradients, kept.gradients, err_msg=name)
            assert 0.9 * step.certified_bytes < (step.report.peak_activation_bytes or 0) <= step.certified_bytes, name
            assert step.report.host_peak_bytes >= step.certified_host_bytes, name
            nothing_leaves = name in KEEPS or (rank == 0 and name == "full, offloaded")  # the batch stays
            assert (step.certified_host_bytes == 0) == nothing_leaves, name
            assert step.certified_bytes < kept.certified_bytes, name


def test_wrong_levels_are_refused_on_every_rank(ranks: Ranks) -> None:
    costs = problems.stage((1, 1, 1), (100, 100))
    level = {"name": "mine", "recompute_ms": 1, "checkpoint_bytes": 10}
    problem = problems.pipeline(2, 1, 10**9, costs | {"levels": [level]})
    schedule = Schedule.parse(problem, [["0F0", "0C0", "0BW0"], ["1F0", "1BW0"]])
    for told in ranks(refused, schedule=schedule):
        sentences = (
            "rank 0: device 0 recomputes stage 0 by level 'mine': this pipeline was made with recompute = ('full',)",
            "recompute = ('cheap',): with a schedule for every step a pipeline recomputes by level",
        )
        assert all(map(str.startswith, told, sentences))
        assert len(told) == len(sentences)
