"""What ranks run in `test_megatron`: a small GPT of Megatron-core, by its own functions and by ours."""

import gc
import os
import sys
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from optpipe.errors import InputError, OptPipeError
from optpipe.model.problem import Problem
from optpipe.schedule import Schedule
from optpipe_solver import systems
from support.ranks import cases
from support.ranks.megatron_model import (
    DIFFERENT,
    EQUAL,
    MICROBATCHES,
    ONE,
    SCALE,
    Division,
    arguments_of,
    forget_graphs,
    in_whole,
    make_chunks,
    on_cpu,
    parallel,
    wrap_in_ddp,
)


class Outcome(NamedTuple):
    """Two steps on one rank: losses of the second by micro-batch where the last stage is, the sum of both steps'
    gradients by name in the whole model, and peaks of the first."""

    losses: list[float]
    gradients: dict[str, np.ndarray]
    tokens: int | None = None
    peak_bytes: int = 0
    certified_bytes: int = 0
    host_peak_bytes: int = 0


def systems_of(*names: str) -> list[Schedule]:
    return [systems.generate(name, cases.problem((0, 1), MICROBATCHES)) for name in names]


def together(outcomes: list[Outcome]) -> Outcome:
    """What all ranks have found."""
    losses = next((outcome.losses for outcome in outcomes if outcome.losses), [])
    return Outcome(losses, {name: grad for outcome in outcomes for name, grad in outcome.gradients.items()})


def require_same(what: str, outcomes: list[Outcome], expected: Outcome, tolerance: float = 0.0) -> float:
    """Fails unless losses are those expected, and gradients are, too; the largest difference of a loss."""
    found = together(outcomes)
    assert found.gradients.keys() == expected.gradients.keys(), what
    for name, gradient in found.gradients.items():
        np.testing.assert_allclose(gradient, expected.gradients[name], tolerance, tolerance, err_msg=f"{what}, {name}")
    assert found.losses == expected.losses, what
    return max((abs(a - b) for a, b in zip(found.losses, expected.losses, strict=True)), default=0.0)


def plain(stages: int, **how: bool) -> Outcome:
    """By Megatron's `forward_backward_no_pipelining`."""
    with parallel([0] * stages, chunks=1), on_cpu():
        from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining

        chunks = make_chunks([0] * stages, whole=True)
        return outcome_of(forward_backward_no_pipelining, chunks, **how)


def theirs(placement: Sequence[int], division: Division = ONE, options: Mapping[str, Any] = {}, **how: bool) -> Outcome:
    """By the function that Megatron itself takes. `options` are those of the model's config."""
    with parallel(placement, division), on_cpu():
        from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

        return outcome_of(get_forward_backward_func(), make_chunks(placement, options=options), **how)


def function(schedule: Schedule) -> Any:
    from optpipe_runtime.megatron import forward_backward_func

    return forward_backward_func(schedule)


@contextmanager
def running(
    schedule: Schedule, division: Division = ONE, options: Mapping[str, Any] = {}
) -> Iterator[tuple[int, Any, dict[int, Any]]]:
    """This rank's number, our function that runs the schedule, and the rank's chunks by stage."""
    placement = [stage.device for stage in schedule.problem.stages]
    with parallel(placement, division) as rank, on_cpu(), function(schedule) as run:
        yield rank, run, make_chunks(placement, options=options)


def ours(
    schedules: Sequence[Schedule], division: Division = ONE, options: Mapping[str, Any] = {}, **how: bool
) -> list[Outcome]:
    """By these schedules. Megatron's GPT needs what `on_cpu` changes, our function none of it."""
    return [_ours(schedule, division, options, how) for schedule in schedules]


def _ours(schedule: Schedule, division: Division, options: Mapping[str, Any], how: dict[str, bool]) -> Outcome:
    with running(schedule, division, options) as (rank, run, chunks):
        reports = []

        def step(**arguments: Any) -> list[Any]:
            found = run(**arguments)
            reports.append(run.report)
            return found

        outcome = outcome_of(step, chunks, **how)
        peak, host = reports[0].peak_activation_bytes, reports[0].host_peak_bytes
        certified = schedule.compiled.certificate.device[rank].bytes
        return outcome._replace(peak_bytes=peak, certified_bytes=certified, host_peak_bytes=host)


GETS = "from megatron.core.pipeline_parallel import get_forward_backward_func as get\n"


def in_scripts(schedule: Schedule) -> tuple[list[bool], Outcome]:
    """By the function that scripts get after `use_in_megatron`, and whether each gets ours: one with the name in its
    module before or after, Megatron's training loop where the package has it, and each with all arguments there are."""
    from megatron.core import pipeline_parallel

    from optpipe_runtime.megatron import use_in_megatron

    before, after = ModuleType("before"), ModuleType("after")
    sys.modules |= {"before": before, "after": after}
    exec(GETS, vars(before))
    loop = _training_loop()
    with running(schedule) as (_, run, chunks):
        use_in_megatron(function(schedule))
        use_in_megatron(run)
        exec(GETS, vars(after))
        takers = [before.get, after.get, pipeline_parallel.get_forward_backward_func]
        takers += [pipeline_parallel.schedules.get_forward_backward_func]
        takers += [] if loop is None else [loop.get_forward_backward_func]
        arguments = [{}, {"pp_size": 2, "vp_size": None}, {"schedule_pg_collection": None}]
        found = [take(**named) is run for take in takers for named in arguments] + [takers[0](2, None) is run]
        return found, outcome_of(after.get(schedule_pg_collection=None), chunks)


def _training_loop() -> Any:
    """`megatron.training.training`, which the package of 0.16.1 has not."""
    if find_spec("megatron.training") is None:
        return None
    with mock.patch.object(typing, "override", lambda method: method, create=True):  # Python 3.11 has none
        return import_module("megatron.training.training")


def profiled(schedule: Schedule, budget_bytes: int) -> tuple[Problem, list[float]]:
    """The problem of the stages that a schedule places, and the losses of a step after, with the same iterators."""
    with running(schedule) as (_, run, by_stage):
        chunks = list(by_stage.values())
        arguments = arguments_of(chunks, step=1)
        found = run.profile(budget_bytes, offload_parts=2, repeats=1, **arguments)
        assert all(p.grad is None for chunk in chunks for p in chunk.parameters())
        return found, [float(loss["lm loss"]) for loss in run(**arguments)]


def profiled_in_ddp(schedule: Schedule) -> list[str]:
    """In Megatron's DistributedDataParallel, between two steps: the parameters that a profile leaves changed, or with
    another gradient or mark, and those without gradients before."""
    with running(schedule) as (_, run, by_stage):
        chunks = list(wrap_in_ddp(by_stage).values())
        parameters = {name: p for chunk in chunks for name, p in chunk.named_parameters()}
        run(**arguments_of(chunks))
        for k, parameter in enumerate(parameters.values()):
            parameter.grad_added_to_main_grad = k % 2 == 0
        before = {
            name: (p.main_grad.clone(), p.detach().clone(), p.grad_added_to_main_grad) for name, p in parameters.items()
        }
        run.profile(10**8, repeats=1, **arguments_of(chunks, step=1))
        return [
            name
            for name, (main_grad, values, mark) in before.items()
            if not main_grad.any()
            or not torch.equal(main_grad, parameters[name].main_grad)
            or not torch.equal(values, parameters[name])
            or parameters[name].grad is not None
            or parameters[name].grad_added_to_main_grad != mark
        ]


def evaluated(schedule: Schedule) -> tuple[list[float], list[float], list[int]]:
    """By our function, with its forwards only: losses, what else is collected, and how many parameters have a gradient.
    Between them one step."""
    with running(schedule) as (_, run, by_stage):
        chunks, with_gradient, found = list(by_stage.values()), [], []
        for forward_only, collects in ((True, False), (False, False), (True, True)):
            for chunk in chunks:
                chunk.train(not forward_only)
            arguments = arguments_of(chunks) | {"forward_only": forward_only, "collect_non_loss_data": collects}
            found.append(run(**arguments))
            with_gradient.append(sum(p.grad is not None for chunk in chunks for p in chunk.parameters()))
        losses = [float(loss["lm loss"]) for loss in found[0]]
        return losses, [float(data) for data in found[2]], with_gradient


def refusals(schedule: Schedule, configs: Sequence[tuple[str, Any]], arguments: Sequence[tuple[str, Any]]) -> list[str]:
    """The sentences for what the function does not take: of the model's config, and of its arguments."""
    found, placement = [], [stage.device for stage in schedule.problem.stages]
    with parallel(placement), on_cpu():
        chunks = list(make_chunks(placement).values())
        for name, value in configs:
            with mock.patch.object(chunks[0].config, name, value):
                found.append(_refused(schedule, arguments_of(chunks)))
        return found + [_refused(schedule, arguments_of(chunks) | {name: value}) for name, value in arguments]


def _refused(schedule: Schedule, arguments: dict[str, Any]) -> str:
    with pytest.raises(InputError) as refused, function(schedule) as run:
        run(**arguments)
    return str(refused.value)


def refusals_of_one(schedule: Schedule, rank: int) -> list[str]:
    """The sentences where only this rank has what cannot run: a chunk too many, or one for another place."""
    found, placement = [], [stage.device for stage in schedule.problem.stages]
    with parallel(placement) as own, on_cpu():
        for wrong in ("number", "place"):
            chunks = list(make_chunks(placement).values())
            if own == rank and wrong == "number":
                chunks *= 2
            elif own == rank:
                chunks[0].pre_process = not chunks[0].pre_process
            found.append(_refused(schedule, arguments_of(chunks)))
    return found


def refused_later(schedule: Schedule, rank: int) -> str:
    """What a rank says in the second step, if this one is given too many iterators for it."""
    placement = [stage.device for stage in schedule.problem.stages]
    with parallel(placement, rank_ends=True) as own, on_cpu():
        chunks = list(make_chunks(placement).values())
        run = function(schedule)
        run(**arguments_of(chunks))
        arguments = arguments_of(chunks, step=1)
        if own == rank:
            arguments["data_iterator"] = [arguments["data_iterator"]] * 2
        with pytest.raises(OptPipeError) as refused:
            run(**arguments)
        run.close()
        return str(refused.value)


def threads_left(schedule: Schedule) -> int:
    """How many more threads this process has after steps by both functions, in Megatron's DistributedDataParallel, than
    after the first ones."""
    threads = []
    for _ in range(2):
        theirs([stage.device for stage in schedule.problem.stages], in_ddp=True)
        ours([schedule], in_ddp=True)
        gc.collect()
        threads.append(len(os.listdir("/proc/self/task")))
    return threads[1] - threads[0]


def outcome_of(
    run: Callable[..., list[Any]],
    chunks: dict[int, Any],
    in_ddp: bool = False,
    per_token: bool = False,
    in_bfloat16: bool = False,
    different: bool = False,
    sharded: bool = False,
) -> Outcome:
    """`in_ddp`: with the chunks in Megatron's own DistributedDataParallel, which has buffers for gradients. `sharded`:
    of each buffer a replica has the sum of its part only, as the distributed optimizer needs it.
    `per_token`: with the losses of all tokens summed, and gradients divided by their number. `in_bfloat16`: parameters
    are, and buffers in float32. `different`: micro-batches have different lengths, others in each step."""
    from megatron.core.distributed import finalize_model_grads

    tokens: list[int | None] = []

    def finalize(model: list[Any], num_tokens: Tensor | None, **groups: Any) -> None:
        tokens.append(None if num_tokens is None else int(num_tokens))
        if in_ddp:
            finalize_model_grads(model, num_tokens, **groups)

    torch.manual_seed(0)
    config = next(iter(chunks.values())).config
    config.grad_scale_func = lambda loss: loss * SCALE
    config.finalize_model_grads_func = finalize
    config.calculate_per_token_loss = per_token
    config.variable_seq_lengths = different
    if in_bfloat16:
        config.params_dtype = config.pipeline_dtype = torch.bfloat16
        chunks = {s: chunk.bfloat16() for s, chunk in chunks.items()}
    if in_ddp:
        chunks = wrap_in_ddp(chunks, in_bfloat16, sharded)
        config.no_sync_func = [chunk.no_sync for chunk in chunks.values()]
        if len(chunks) == 1:
            (config.no_sync_func,) = config.no_sync_func
    for step in range(2):
        lengths = [*DIFFERENT[step:], *DIFFERENT[:step]] if different else EQUAL
        found = run(**arguments_of(list(chunks.values()), step, lengths))
    gradients = {
        in_whole(name, s): (p.main_grad if in_ddp else p.grad).numpy().copy()
        for s, chunk in chunks.items()
        for name, p in chunk.named_parameters()
    }
    gradients |= {
        in_whole(name, s): bias.numpy().copy()  # Megatron's update of it after a step is by the counts of all tokens
        for s, chunk in chunks.items()
        for name, bias in chunk.named_buffers()
        if name.endswith("expert_bias")
    }
    for chunk in chunks.values():
        forget_graphs(chunk)
    return Outcome([float(loss["lm loss"]) for loss in found], gradients, tokens[-1])
