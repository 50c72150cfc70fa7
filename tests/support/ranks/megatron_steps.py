"""What ranks run in `test_megatron_steps`: Megatron's own combined 1F1B, and its optimizer after steps by either
function."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from optpipe.schedule import Schedule
from support.ranks.megatron import Outcome, function, outcome_of
from support.ranks.megatron_model import (
    Division,
    arguments_of,
    forward_step,
    in_whole,
    make_chunks,
    on_cpu,
    parallel,
    wrap_in_ddp,
)

STEPS = 3


class Combined(NamedTuple):
    """`ops`: by step, what Megatron has run on this rank, in its order: stage and micro-batch of a forward, of a
    backward, or of both where they are side by side. `delayed`: weight gradients that came at `backward_dw`."""

    ops: list[list[tuple[tuple[int, int] | None, tuple[int, int] | None]]]
    delayed: int
    outcome: Outcome


def combined(placement: Sequence[int], division: Division, options: Mapping[str, Any]) -> Combined:
    """By Megatron's own combined 1F1B. Its streams and events are replaced: all runs as it is issued."""
    with parallel(placement, division) as rank, on_cpu(), _without_streams():
        from megatron.core.models.common.model_chunk_schedule_plan import TransformerModelChunkSchedulePlan as Plan
        from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

        chunks = make_chunks(placement, options=options)
        own = [s for s, device in enumerate(placement) if device == rank]
        delaying = [_Delaying(part) for chunk in chunks.values() for part in _linears(chunk)]
        steps: list[Any] = []
        run = Plan.run

        def noting(forward: Any, backward: Any, **how: Any) -> Any:
            steps[-1].append(tuple(None if plan is None else plan.noted for plan in (forward, backward)))
            return run(forward, backward, **how)

        def plan_of(iterator: Any, model: Any, return_schedule_plan: bool) -> Any:
            plan, loss = forward_step(iterator, model, model.build_schedule_plan)
            plan.noted = own[model.vp_stage], model.decoder.layers[0].current_microbatch
            return plan, loss

        def step(**arguments: Any) -> list[Any]:
            steps.append([])
            return get_forward_backward_func()(**arguments | {"forward_step_func": plan_of})

        with mock.patch.object(Plan, "run", staticmethod(noting)):
            outcome = outcome_of(step, chunks, in_ddp=True)
        return Combined(steps, sum(layer.done for layer in delaying), outcome)


def _linears(chunk: nn.Module) -> list[Any]:
    """The layers whose `backward_dw` Megatron calls."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    kinds = ColumnParallelLinear, RowParallelLinear
    return [part for part in chunk.decoder.modules() if chunk.config.delay_wgrad_compute and isinstance(part, kinds)]


class _Delaying:
    """Makes one of Megatron's linear layers delay its weight gradients, as TransformerEngine's do: its own for CPUs
    have a `backward_dw` that does nothing."""

    def __init__(self, layer: Any) -> None:
        self.done = 0
        self._waiting: list[tuple[Tensor, Tensor]] = []
        self._parameters = [parameter for parameter in (layer.weight, layer.bias) if parameter is not None]
        layer._forward_impl = lambda input, weight, bias, **_: _Later.apply(input, weight, bias, self._waiting)
        layer.backward_dw = self._backward_dw

    @torch.no_grad()
    def _backward_dw(self) -> None:
        for x, dy in self._waiting:
            for parameter, gradient in zip(self._parameters, (dy.t().matmul(x), dy.sum(dim=0)), strict=False):
                parameter.main_grad.add_(gradient)
            self.done += 1
        self._waiting.clear()


class _Later(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, waiting: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.waiting = waiting
        y = x.matmul(weight.t())
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        ctx.waiting.append((x.flatten(0, -2), dy.flatten(0, -2)))
        return dy.matmul(weight), None, None, None


class Trained(NamedTuple):
    """Of one rank: losses by step and micro-batch where the last stage is, norms of gradients by step, and the
    parameters at the end."""

    losses: list[list[float]]
    norms: list[float]
    parameters: dict[str, np.ndarray]


def trained(schedules: Sequence[Schedule | None], placement: Sequence[int], sharded: bool, dtype: Any) -> list[Trained]:
    """Three steps with Megatron's own optimizer, by each schedule; None: by Megatron's own function. `sharded`: the
    replicas divide its states."""
    return [_trained(schedule, placement, sharded, dtype) for schedule in schedules]


def _trained(schedule: Schedule | None, placement: Sequence[int], sharded: bool, dtype: Any) -> Trained:
    with parallel(placement), on_cpu(), ExitStack() as closing:
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

        run = get_forward_backward_func() if schedule is None else closing.enter_context(function(schedule))
        chunks = {s: chunk.to(dtype) for s, chunk in make_chunks(placement).items()}
        config = next(iter(chunks.values())).config
        config.params_dtype = config.pipeline_dtype = dtype
        config.finalize_model_grads_func = finalize_model_grads
        wrapped = wrap_in_ddp(chunks, sum_in_float32=True, sharded=sharded)
        options = OptimizerConfig(
            lr=0.01,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=sharded,
            clip_grad=1.0,
            weight_decay=0.1,
        )
        optimizer = get_megatron_optimizer(options, list(wrapped.values()), use_gloo_process_groups=False)
        config.grad_scale_func = optimizer.scale_loss
        config.no_sync_func = [chunk.no_sync for chunk in wrapped.values()]
        if len(wrapped) == 1:
            (config.no_sync_func,) = config.no_sync_func
        losses, norms = [], []
        for step in range(STEPS):
            for chunk in wrapped.values():
                chunk.zero_grad_buffer()
            optimizer.zero_grad()
            losses.append([float(loss["lm loss"]) for loss in run(**arguments_of(list(wrapped.values()), step))])
            updated, norm, _ = optimizer.step()
            assert updated
            norms.append(float(norm))
        parameters = {
            in_whole(name, s): p.detach().double().numpy()
            for s, chunk in chunks.items()
            for name, p in chunk.named_parameters()
        }
        return Trained(losses, norms, parameters)


@contextmanager
def _without_streams() -> Iterator[None]:
    """Of CUDA what combined 1F1B asks for beside what `on_cpu` replaces."""
    with (
        mock.patch.object(torch.cuda, "Event"),
        mock.patch.object(torch.cuda, "nvtx"),
        mock.patch.object(Tensor, "record_stream"),
    ):
        yield
