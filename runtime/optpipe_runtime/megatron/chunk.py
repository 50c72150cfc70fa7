"""`Chunk`: a model chunk of Megatron's as a stage. Its forward is Megatron's own `forward_step`: that sets the input
tensor, calls the user's `forward_step_func`, and scales the loss. Nothing in Megatron is changed, but for the chunk's
linear layers, whose weight gradients may wait for W."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor, nn

from optpipe.errors import InputError
from optpipe.model.problem import Problem
from optpipe_runtime.megatron.options import require_supported
from optpipe_runtime.ranks.grid import CheckedStage
from optpipe_runtime.stage.split import weight_grads
from optpipe_runtime.torch_private.tensors import tree_leaves


@dataclass
class Step:
    """What a step's chunks get, and their results by micro-batch."""

    forward_step_func: Callable[..., Any]
    config: Any
    microbatches: int
    cp_size: int
    collect_non_loss_data: bool
    is_first: Callable[[bool], bool]  # from "it is the chunk's first forward" to what Megatron passes to the chunk
    results: dict[int, Any] = field(default_factory=dict)
    tokens: dict[int, Tensor] = field(default_factory=dict)


class Chunk(CheckedStage):
    """A chunk of Megatron's as a stage. It also takes `place`, which has the number of the micro-batch."""

    def __init__(self, model: nn.Module, stage: int, first: bool, last: bool) -> None:
        super().__init__()
        for name, expected in {"pre_process": first, "post_process": last}.items():
            if get_attr_wrapped_model(model, name) != expected:
                raise InputError(
                    f"the chunk of stage {stage} has {name}={not expected}: in this schedule it must be {expected}"
                )
        self.model, self.stage, self._first, self._last = model, stage, first, last
        self._step: Step | None = None
        self._feed = Feed(None)
        self._ran = False  # in this step
        self._tokens: dict[tuple[Any, int], Tensor] = {}  # of each expert, by router and micro-batch
        self._set_input: Callable[[list[Tensor | None]], None] = get_attr_wrapped_model(model, "set_input_tensor")
        parts: Iterator[Any] = model.modules()
        for part in parts:
            if isinstance(part, ColumnParallelLinear | RowParallelLinear) and _splits(part):
                part._forward_impl = _linear
            if getattr(part, "enable_expert_bias", False):
                part._apply_expert_bias = partial(self._count, part, part._apply_expert_bias)

    def start_step(self, step: Step, iterator: Any) -> None:
        self._step, self._ran, self._tokens = step, False, {}
        if self._feed.source is not iterator:
            self._feed = Feed(iterator)

    def sizes(self, microbatch: int) -> tuple[int, ...]:
        """All sizes of a micro-batch's data; none where Megatron has no data."""
        item = self._feed.look(microbatch)
        return tuple(max(1, size) for leaf in tree_leaves(item) if isinstance(leaf, Tensor) for size in leaf.shape)

    def _count(self, router: Any, own: Callable[..., None], routes: Tensor, padding_mask: Tensor | None = None) -> None:
        """Notes for how many tokens a router takes each expert. It would count by itself where there is a graph, so not
        in a forward that the schedule recomputes, and twice where Megatron recomputes that again."""
        if self._step is None:
            own(routes, padding_mask)
        else:
            counted = routes if padding_mask is None else routes & ~padding_mask
            self._tokens[router, self._feed.microbatch] = counted.sum(dim=0)

    def end_step(self, microbatches: int, trained: bool) -> None:
        for (router, _), tokens in self._tokens.items() if trained else ():
            router.local_tokens_per_expert += tokens  # for Megatron's update of their bias
        self._step = None
        self._feed.forget(microbatches)

    def forward(self, *received: Tensor, place: Tensor) -> Tensor:
        step, j = self._step, int(place.flatten()[0])
        assert step is not None
        if len(place) != 1:
            raise InputError(f"a schedule for fewer than {step.microbatches} micro-batches was swapped in")
        store: list[Any] = []
        is_first, self._ran = step.is_first(not self._ran), True
        output: Tensor
        output, tokens = schedules.forward_step(
            step.forward_step_func,
            self._feed.give(j),
            self.model,
            step.microbatches,
            None if self._first else received[0],
            store,
            step.config,
            step.cp_size,
            step.collect_non_loss_data,
            is_first_microbatch=is_first,
            current_microbatch=j,
            vp_stage=getattr(self.model, "vp_stage", None),
            is_last_stage=self._last,
        )
        self._set_input([None])  # the chunk would keep its input until its next forward
        if not self._last:
            return output
        step.results[j], step.tokens[j] = store[0], tokens
        if step.collect_non_loss_data:
            return output.new_zeros(())
        return output if step.config.grad_scale_func is None else step.config.grad_scale_func(output)


class Feed:
    """A data iterator that gives each forward what belongs to its micro-batch, whatever the order of forwards, and as
    often as the forward runs. `source` is Megatron's."""

    def __init__(self, source: Iterator[Any] | None) -> None:
        self.source = source
        self._items: list[Any] = []
        self.microbatch, self._taken = 0, False

    def give(self, microbatch: int) -> Feed | None:
        """None where Megatron has no data."""
        self.microbatch, self._taken = microbatch, False
        return None if self.source is None else self

    def forget(self, microbatches: int) -> None:
        """After a step: drops what it has used."""
        del self._items[:microbatches]

    def __iter__(self) -> Feed:
        return self

    def __next__(self) -> Any:
        if self._taken:
            raise InputError("forward_step_func takes two items of data_iterator: one is expected for a micro-batch")
        self._taken = True
        return self.look(self.microbatch)

    def look(self, microbatch: int) -> Any:
        """What belongs to a micro-batch; None where there is no source."""
        if self.source is None:
            return None
        while len(self._items) <= microbatch:
            self._items.append(next(self.source))
        return self._items[microbatch]


class _Linear(torch.autograd.Function):
    """Megatron's linear layer with the same products in the same order. Its weight gradient may wait for W."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, reduced: Any) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.reduced = weight, bias, reduced
        y = torch.matmul(x, weight.t())
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        dx = dy.matmul(ctx.weight)
        reducing = None if ctx.reduced is None else dist.all_reduce(dx, group=ctx.reduced, async_op=True)
        flat_x, flat_dy = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
        parameters = [parameter for parameter in (ctx.weight, ctx.bias) if parameter is not None]

        def gradients() -> list[Tensor]:
            return [flat_dy.t().matmul(flat_x), flat_dy.sum(dim=0)][: len(parameters)]

        grads = weight_grads(parameters, gradients, flat_x, flat_dy)
        if reducing is not None:
            reducing.wait()
        return dx, *grads, *[None] * (3 - len(grads))


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None, **how: Any) -> Tensor:
    """In the place of `_forward_impl` of Megatron's linear layers that `_splits` allows."""
    reduced = how["tp_group"] if how["allreduce_dgrad"] else None
    result: Tensor = _Linear.apply(input, weight, bias, reduced)  # type: ignore[no-untyped-call]
    return result


def _splits(layer: Any) -> bool:
    """Whether a linear layer does no more than `_Linear`. Any other computes its weight gradient at B."""
    return not (
        layer.gradient_accumulation_fusion
        or layer.sequence_parallel
        or (layer.weight is not None and not layer.weight.requires_grad)
    )


def as_stages(chunks: Sequence[nn.Module], config: Any, groups: Any, problem: Problem) -> list[Chunk]:
    """These chunks as stages. Raises `InputError` if schedules of the problem cannot run on them."""
    require_supported(config, "config")
    for chunk in chunks:
        if hasattr(chunk, "ddp_config"):
            require_supported(chunk.ddp_config, "ddp_config")
    rank = groups.pp.rank()
    numbers = problem.stages_on(rank) if rank < len(problem.devices) else []
    if len(problem.devices) != groups.pp.size() or len(numbers) != len(chunks):
        raise InputError(
            f"model has {len(chunks)} chunks on rank {rank} of {groups.pp.size()}: the schedule places "
            f"{len(numbers)} there, on {len(problem.devices)} ranks"
        )
    ends, last = len(problem.stages) - 1, groups.pp.size() - 1
    shared, first_rank, last_rank = "share_embeddings_and_output_weights", *(problem.stages[s].device for s in (0, -1))
    ties = any(getattr(part, shared, False) for chunk in chunks for part in chunk.modules())
    if (first_rank, last_rank) != (0, last) and (ties or getattr(config, "mtp_num_layers", None)):
        raise InputError(
            f"{shared} or mtp_num_layers: Megatron ties rank 0 with rank {last}; the schedule has its first stage on "
            f"rank {first_rank}, its last one on rank {last_rank}"
        )
    return [Chunk(chunk, s, s == 0, s == ends) for s, chunk in zip(numbers, chunks, strict=True)]
