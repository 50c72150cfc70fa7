"""`forward_backward_func`: runs a schedule in the place of Megatron's own function. `use_in_megatron` puts it there.

Each model chunk of Megatron's is a stage of a `Pipeline`, which has its own messages, store and links.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import schedules
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config
from torch import Tensor, nn

from optpipe.errors import InputError
from optpipe.formats.order import require_one_route
from optpipe.model.problem import Problem
from optpipe.schedule import Schedule
from optpipe_runtime.execute.batch import Microbatches
from optpipe_runtime.execute.report import StepReport
from optpipe_runtime.megatron.chunk import Chunk, Step, as_stages
from optpipe_runtime.pipeline import Pipeline
from optpipe_runtime.ranks.cpu_group import on_each_rank
from optpipe_runtime.ranks.grid import gather_from_everyone
from optpipe_runtime.ranks.layout import Layout
from optpipe_runtime.stage.split import main_grad


def forward_backward_func(schedule: Schedule, host_memory_bytes: int | None = None) -> ForwardBackward:
    """A function that runs this schedule, with the arguments and the result of Megatron's own.

    Its first call is collective and makes the pipeline. Chunk k of a rank is the k-th stage that the schedule places
    there.

    Parameters
    ----------
    schedule
        For one route over all stages in order. Rank 0's counts.
    host_memory_bytes
        The most host memory that offloaded activations may take on this rank; no limit by default.
    """
    return ForwardBackward(schedule, host_memory_bytes)


def use_in_megatron(run: ForwardBackward) -> None:
    """Lets Megatron and your script run it: `get_forward_backward_func` returns `run`, whatever its arguments, in every
    module that has imported it and in those that will. Call it on each rank, before training starts; again for another
    function."""
    current = schedules.get_forward_backward_func

    def get_forward_backward_func(*_: Any, **__: Any) -> ForwardBackward:
        return run

    for module in list(sys.modules.values()):
        attributes = vars(module) if hasattr(module, "__dict__") else {}
        for name in [name for name, value in attributes.items() if value is current]:
            attributes[name] = get_forward_backward_func


class ForwardBackward(AbstractContextManager["ForwardBackward"]):
    """Made by `forward_backward_func`. Call it as Megatron's own `forward_backward_func`.

    `report` is that of the last step on this rank: its time, and the peaks of activations, host memory and messages, in
    the first step by a schedule. `pipeline` runs the schedule, for `load`, `offer` and what else a `Pipeline` can do.
    Both are None before the first call.
    """

    def __init__(self, schedule: Schedule, host_memory_bytes: int | None) -> None:
        require_one_route(schedule.problem, "Megatron")
        self._schedule, self._host_memory_bytes = schedule, host_memory_bytes
        self.pipeline: Pipeline | None = None
        self._chunks: list[Chunk] = []
        self.report: StepReport | None = None

    def __call__(
        self,
        *,
        forward_step_func: Callable[..., Any],
        data_iterator: Any,
        model: Any,
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        decoder_seq_length: int | None = None,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        first_val_step: bool | None = None,
        adjust_tensor_shapes_fn: Callable[..., Any] | None = None,
        p2p_communicator: Any = None,
        pg_collection: Any = None,
        force_all_reduce: bool = False,
    ) -> list[Any]:
        """One step, or with `forward_only` an evaluation. Collective.

        Arguments and result are Megatron's, of 0.16.1 and 0.19.2: what `loss_func` returns for logging, by micro-batch,
        where the last stage is; an empty list elsewhere. The lengths need not be right, because shapes are learned;
        `p2p_communicator` is not used. Raises `InputError` for what the schedule or this runtime cannot do,
        `ScheduleError` if the schedule cannot run here.
        """
        chunks, groups = _in_list(model), pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        config = get_model_config(chunks[0])
        step = Step(
            forward_step_func,
            config,
            num_microbatches,
            groups.cp.size(),
            collect_non_loss_data,
            partial(schedules.check_first_val_step, first_val_step, forward_only),
        )
        pipeline = self._start(chunks, groups, step, data_iterator, adjust_tensor_shapes_fn)
        batch = self._places(step, seq_length, micro_batch_size)
        run = pipeline.evaluate if forward_only else pipeline.step
        if config.timers is not None:  # Megatron's own, of this function
            config.timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
        with without_sync(config):
            self.report = run(batch, batch, kwargs={"place": batch})
        for chunk in self._chunks:
            chunk.end_step(num_microbatches, trained=not forward_only)
        if not forward_only and config.finalize_model_grads_func is not None:
            # Megatron's own end of a step: reductions over data-parallel ranks, tied embeddings, scales by tokens.
            devices = (parameter.device for chunk in chunks for parameter in chunk.parameters())
            tokens = sum(step.tokens.values(), torch.zeros([], dtype=torch.int, device=next(devices, "cpu")))
            counted = tokens if config.calculate_per_token_loss else None
            config.finalize_model_grads_func(chunks, counted, pg_collection=groups, force_all_reduce=force_all_reduce)
        if config.timers is not None:
            config.timers("forward-backward").stop()
        return [step.results[j] for j in sorted(step.results)]

    def profile(
        self,
        activation_budget_bytes: int | None = None,
        offload_parts: int = 1,
        repeats: int = 7,
        *,
        forward_step_func: Callable[..., Any],
        data_iterator: Any,
        model: Any,
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        pg_collection: Any = None,
        **others: Any,
    ) -> Problem:
        """Measures the chunks and links, as `Pipeline.profile` with its arguments. Collective, between two steps.

        All other arguments are those of a step, as Megatron gives them. The micro-batches that are read for the
        measurement are those of the next step. Gradients stay as they are, `main_grad`, too.
        """
        chunks, groups = _in_list(model), pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        config = get_model_config(chunks[0])
        step = Step(forward_step_func, config, num_microbatches, groups.cp.size(), False, lambda first: first)
        pipeline = self._start(chunks, groups, step, data_iterator)
        batch = self._places(step, seq_length, micro_batch_size)
        with main_grads_unchanged(chunks):
            return pipeline.profile(
                batch, batch, activation_budget_bytes, offload_parts, repeats, kwargs={"place": batch}
            )

    def close(self) -> None:
        """Ends the threads of this rank."""
        if self.pipeline is not None:
            self.pipeline.close()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self.pipeline is not None:
            self.pipeline.__exit__(kind, error, trace)

    def _start(
        self, chunks: list[nn.Module], groups: Any, step: Step, data_iterator: Any, adjust: Any = None
    ) -> Pipeline:
        """The pipeline of these chunks, which get the step. Collective in the first call. What a rank refuses
        later ends the pipeline, so that no other rank waits for it; these raise the same sentence."""
        first, pipeline = self.pipeline is None, self.pipeline or self._make_pipeline(chunks, step.config, groups)
        try:
            if first:
                pipeline.load(self._schedule)
            if adjust is not None:
                raise InputError("adjust_tensor_shapes_fn is given: shapes are learned from the stages, leave it out")
            if [chunk.model for chunk in self._chunks] != chunks:
                raise InputError("model has other chunks than in the first call: make a new forward_backward_func")
            if step.microbatches != pipeline.layout.microbatches:
                raise InputError(
                    f"num_microbatches = {step.microbatches}: the schedule is for {pipeline.layout.microbatches}"
                )
            iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
            if len(iterators) != len(self._chunks):
                raise InputError(
                    f"data_iterator has {len(iterators)} iterators: each of {len(self._chunks)} chunks needs one"
                )
            for chunk, iterator in zip(self._chunks, iterators, strict=True):
                chunk.start_step(step, iterator)
        except InputError as error:
            pipeline.__exit__(type(error), error, error.__traceback__)
            raise
        return pipeline

    def _make_pipeline(self, chunks: list[nn.Module], config: Any, groups: Any) -> Pipeline:
        # A rank that fails alone would leave the others waiting for it in `Pipeline`.
        self._chunks = on_each_rank(
            lambda: as_stages(chunks, config, groups, self._schedule.problem),
            gather_from_everyone,
            lambda error: f"rank {groups.pp.rank()}: {error}",
        )
        layout = Layout.from_problem(self._schedule.problem)
        self.pipeline = Pipeline(
            {chunk.stage: chunk for chunk in self._chunks},
            layout.placement,
            lambda output, _: output,
            layout.microbatches,
            self._host_memory_bytes,
            layout.full_duplex,
            peers=layout.peers or None,
            links=layout.links or None,
            group=groups.pp,
            inner=inner_group(groups),
            scale_grads=False,  # Megatron's `forward_step` scales losses, auxiliary ones, too
        )
        return self.pipeline

    def _places(self, step: Step, seq_length: int, micro_batch_size: int) -> Tensor | Microbatches:
        """The number of each micro-batch, in a shape that changes when the batch does; with `variable_seq_lengths`, in
        the shape of the micro-batch's own data."""
        if not step.config.variable_seq_lengths:
            return torch.arange(step.microbatches).view(-1, 1, 1).expand(-1, seq_length, micro_batch_size)
        places = Microbatches()
        for j in range(step.microbatches):
            sizes = next((sizes for chunk in self._chunks if (sizes := chunk.sizes(j))), ())
            places.append(torch.full((1,) * (1 + len(sizes)), j).expand(1, *sizes))
        return places


def _in_list(model: Any) -> list[nn.Module]:
    """Megatron gives one chunk alone, several in a list."""
    return list(model) if isinstance(model, Sequence) else [model]


MARK = "grad_added_to_main_grad"  # set on a parameter by layers that add to its buffer themselves


@contextmanager
def without_sync(config: Any) -> Iterator[None]:
    """In the context that keeps Megatron's DistributedDataParallel from reducing gradients, of every chunk."""
    functions = config.no_sync_func
    with ExitStack() as stack:
        for context in [] if functions is None else functions if isinstance(functions, list) else [functions]:
            stack.enter_context(context())
        yield


@contextmanager
def main_grads_unchanged(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """After this context Megatron's gradient buffers and their marks are what they were. Meanwhile the host has a copy:
    a device may have no room for a second one."""
    buffers = {p: buffer for chunk in chunks for p in chunk.parameters() if (buffer := main_grad(p)) is not None}
    before = [(p, buffer.to("cpu", copy=True), getattr(p, MARK, None)) for p, buffer in buffers.items()]
    try:
        yield
    finally:
        for parameter, gradient, mark in before:
            buffers[parameter].copy_(gradient)
            if mark is not None:
                setattr(parameter, MARK, mark)


def inner_group(groups: Any) -> dist.ProcessGroup | None:
    """The ranks that compute the same stages together: they share tensors, sequences or experts."""
    found = [group for name in ("tp", "cp", "tp_cp", "tp_ep") if (group := getattr(groups, name, None)) is not None]
    members = [set(dist.get_process_group_ranks(group)) for group in found]
    ranks = max(members, key=len)
    if not all(map(ranks.issuperset, members)):
        raise InputError(
            f"ranks {sorted(set.union(*members))} share tensors, sequences and experts, and no group has more of them "
            f"than {sorted(ranks)}: expert_tensor_parallel_size * expert_model_parallel_size must be a multiple or a "
            "divisor of tensor_model_parallel_size * context_parallel_size"
        )
    return None if len(ranks) == 1 else found[members.index(ranks)]
