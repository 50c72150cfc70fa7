"""`Pipeline`: a model in stages over the ranks of torch.distributed, trained by an OptPipe schedule that can change
between two steps.

    with Pipeline(stages, placement, F.cross_entropy, microbatches=8) as pipe:
        problem = pipe.profile(inputs, targets, activation_budget_bytes=2 * 10**9)  # an optpipe.Problem, on every rank
        pipe.load(schedule)  # an optpipe.Schedule for that problem; rank 0's counts
        report = pipe.step(inputs, targets)  # losses, gradients in .grad, times, peak bytes

While it trains, `pipe.offer(better)` on rank 0, from any thread, returns at once. Every rank prepares the schedule
beside the training, and all swap to it before one of the next steps, when all are ready. If a rank refuses it, all
keep what they have and log why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from optpipe.errors import InputError
from optpipe.model.problem import Problem
from optpipe.schedule import Schedule
from optpipe_runtime.execute.batch import ChunkSpecs
from optpipe_runtime.execute.report import StepReport
from optpipe_runtime.features.evictions import Evictions
from optpipe_runtime.features.host_optimizer import Factory, HostOptimizer
from optpipe_runtime.features.host_updates import HostUpdates
from optpipe_runtime.lowering.plan import Plan
from optpipe_runtime.measure.measured import Measured
from optpipe_runtime.measure.profiler import Asked
from optpipe_runtime.models.model import shared_parameters
from optpipe_runtime.pipeline.build import Options, make_rank
from optpipe_runtime.pipeline.post_validation import PostValidation
from optpipe_runtime.pipeline.step_runner import StepRunner
from optpipe_runtime.ranks.gradients import Counted, Tie, clip
from optpipe_runtime.ranks.layout import Layout
from optpipe_runtime.stage.io import LossFn
from optpipe_runtime.stage.levels import Policy

P = ParamSpec("P")
R = TypeVar("R")


def collective(method: Callable[Concatenate[Pipeline, P], R]) -> Callable[Concatenate[Pipeline, P], R]:
    """Marks methods that all ranks call."""

    @wraps(method)
    def together(self: Pipeline, /, *arguments: P.args, **options: P.kwargs) -> R:
        with self.runner.call(method.__name__):
            return method(self, *arguments, **options)

    return together


class Pipeline(AbstractContextManager["Pipeline"]):
    """This rank's part of the pipeline. Making one is collective: every rank does it, with the same placement. Raises
    `InputError` on every rank for arguments that are wrong or do not fit together.

    The modules stay the user's: parameters, buffers, state dict and optimizer are untouched. They may be in
    `DistributedDataParallel` or `fully_shard`ed over the replicas; gradients are then the mean over the replicas, too.

    Parameters
    ----------
    stages
        The stages placed on this rank, by number: each a module that takes tensors and returns a tensor or a tuple of
        tensors, of the same shapes for every micro-batch.
    placement
        The rank of each stage. With a `group` the ranks are numbered as in the group.
    loss_fn
        `loss_fn(output, *targets)` is the loss of a micro-batch, on the last stage's rank.
    microbatches
        Into how many micro-batches a batch is cut.
    host_memory_bytes
        What this rank may keep on the host. None: no limit.
    full_duplex
        Whether offloads and reloads run at the same time. None: on CUDA, whose links carry both directions at once,
        but not on CPU.
    routes, microbatch_routes
        The stages of each route, and the route of each micro-batch. By default each passes all stages in order. Copies
        of a stage that serve several routes are tied by `tie`.
    peers
        For each rank, the rank to which it may evict activations, or None.
    links
        For each rank, the name of the host link that it shares with others, or None. Ranks use a shared link in the
        schedule's order. "auto": by PCIe switches, as the system reports them.
    host_optimizers
        For stages of any rank, a function that makes an optimizer on the host, which updates them inside the step
        (docs/training.md).
    clip_host_updates
        Whether these wait for `clip_grad_norm_`, which the script then calls after every step. The norm of all
        gradients is computed only then.
    whole_gradients
        Of how many of its stages a rank may hold whole gradients, where stages are `fully_shard`ed over replicas. With
        fewer than it has, gradients are reduced several times a step (ZeRO-2), if all replicas run one schedule for one
        problem (docs/training.md). None: of all, reduced once a step.
    group
        The process group of this pipeline, if there are several: with data parallelism one for each replica, with
        `inner` one for each inner peer. All must be alike.
    inner
        The ranks that compute this rank's stages together with this one, by tensor, context or expert parallelism: a
        DeviceMesh of any dimensions, or a process group (docs/training.md).
    recompute
        The levels by which a schedule may recompute activations: "cheap" keeps what products and attention compute,
        "selective" only the former, "full" the inputs alone. Or functions of an op, such as
        `torch.ops.aten.mm.default`, that return whether its result is kept (docs/stages.md).
    args_chunk_spec, kwargs_chunk_spec
        How inputs and named arguments are cut into micro-batches, as in torch.distributed.pipelining: a
        `TensorChunkSpec` for each input, or by name; None for a value that all micro-batches get whole. By default
        along the first dimension.
    scale_grads
        Whether gradients are those of the mean of the micro-batches' losses, or of their sum. As torch's schedules do,
        it divides the gradients at the end of a step, and not the losses.

    Attributes
    ----------
    measured
        What `profile` found, with the spread of each measurement; None before.
    runner
        Runs the steps; for what is built on a pipeline, as `PlannedSteps`.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        placement: Sequence[int],
        loss_fn: LossFn,
        microbatches: int,
        host_memory_bytes: int | None = None,
        full_duplex: bool | None = None,
        routes: Sequence[Sequence[int]] | None = None,
        microbatch_routes: Sequence[int] | None = None,
        peers: Sequence[int | None] | None = None,
        links: Sequence[str | None] | Literal["auto"] | None = None,
        host_optimizers: Mapping[int, Factory] | None = None,
        clip_host_updates: bool = False,
        whole_gradients: int | None = None,
        group: dist.ProcessGroup | None = None,
        inner: dist.ProcessGroup | DeviceMesh | None = None,
        args_chunk_spec: tuple[Any, ...] | None = None,
        kwargs_chunk_spec: Mapping[str, Any] | None = None,
        scale_grads: bool = True,
        recompute: Sequence[str | Policy] = ("full",),
    ) -> None:
        options = Options(
            stages=stages,
            placement=placement,
            loss_fn=loss_fn,
            microbatches=microbatches,
            host_memory_bytes=host_memory_bytes,
            full_duplex=full_duplex,
            routes=routes,
            microbatch_routes=microbatch_routes,
            peers=peers,
            links=links,
            whole_gradients=whole_gradients,
            group=group,
            inner=inner,
            scale_grads=scale_grads,
            recompute=recompute,
        )
        rank = self._rank = make_rank(options)
        evictions, host_updates = Evictions(rank), HostUpdates(rank, host_optimizers or {}, clip_host_updates)
        rank.features = [evictions, host_updates]
        self.runner = StepRunner(rank, host_updates, ChunkSpecs(args_chunk_spec, kwargs_chunk_spec or {}))
        self.measured: Measured | None = None
        shared = shared_parameters(stages)
        for key in sorted({key for keys in rank.cpu_group.gather(list(shared)) for key in keys}):
            self._add_tie(shared.get(key))

    @collective
    def step(
        self,
        inputs: Any = None,
        targets: Any = None,
        kwargs: Mapping[Any, Any] | None = None,
        outputs: bool = False,
        weights: Sequence[float] | None = None,
        trace: bool = False,
    ) -> StepReport:
        """Runs one training step, forward and backward. The optimizer is the caller's. Collective.

        Returns losses, times and peak bytes of this rank. No rank waits here until the others have ended the step, too.
        If the modules' modes or what is trained have changed since the last step, the stages are learned again; of
        micro-batches of another shape only this shape, unless it follows from those that were learned.

        Parameters
        ----------
        inputs
            Where a route begins: the whole batch on this rank's device, a tensor or a tuple of tensors and other
            values. Tensors are cut into micro-batches along the first dimension. Or `Microbatches`, which are cut
            already and may differ in shape. Other ranks may leave it out.
        targets
            The same, where a route ends.
        kwargs
            Named arguments, such as masks: for all stages of this rank, or for each by its number. They are cut as
            inputs are.
        outputs
            Whether the report has what the modules return where a route ends.
        weights
            Where a route ends: how much the loss of each micro-batch counts, such as its number of tokens. Gradients
            are then those of the weighted mean of the losses, over all micro-batches of all replicas; with
            `scale_grads=False` those of their weighted sum. By default all count the same, and each replica, too. Give
            weights on all replicas or on none.
        trace
            Whether to report the time of every op.
        """
        batch = self.runner.batch(inputs, targets, kwargs, outputs=outputs, weights=weights, trace=trace)
        return self.runner.step(batch)

    @collective
    def evaluate(
        self,
        inputs: Any = None,
        targets: Any = None,
        kwargs: Mapping[Any, Any] | None = None,
        outputs: bool = False,
        weights: Sequence[float] | None = None,
        trace: bool = False,
    ) -> StepReport:
        """Computes the losses of a batch by the forwards of the loaded schedule; with another number of micro-batches,
        of all in order. Collective.

        Arguments are those of `step`. The modules' modes are the caller's.
        """
        batch = self.runner.batch(inputs, targets, kwargs, outputs=outputs, weights=weights, trace=trace)
        return self.runner.evaluate(batch)

    @collective
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> float:
        """Scales the gradients of all stages, so that their norm is at most `max_norm`. Call it after `step`.
        Collective.

        It does what `torch.nn.utils.clip_grad_norm_` does for the whole model, with tied copies counted once, and what
        inner peers have in common, too. That function on each rank's own stages would use another norm on each rank.

        Returns the norm before. Raises `InputError` if there are `host_optimizers` without `clip_host_updates`, or if
        the gradients of a plain parameter differ between inner peers.
        """
        norm = clip(*self._counted(), self._rank.cpu_group, max_norm, norm_type)
        for optimizer in self.host_optimizers.values():
            optimizer.apply()
        return norm

    def _counted(self) -> Counted:
        """The parameters here, by name, or what has their gradients, and those that another rank counts in a norm."""
        elsewhere = self.runner.host_updates.gradient_holders()
        parameters = {
            f"stage {s}: {name}": elsewhere.get(parameter, parameter)
            for s, stage in self._rank.stages.items()
            for name, parameter in stage.named_parameters().items()
        }
        return parameters, (parameter for tie in self.runner.ties for parameter in tie.uncounted)

    @collective
    def post_validate(self, optimizer: torch.optim.Optimizer, max_norm: float | None = None) -> None:
        """From now on, `optimizer.step()` clips by the norm over all stages, and skips updates that are not finite,
        without waiting for the other ranks. Collective.

        An update is made at once, as if nothing had to be clipped. If the norm of all gradients, which arrives during
        the next step, asks for another update, all ranks undo this step, take the update back, to the bit, make the
        right one, and run the step again. After that, updates wait for their norm until ten in a row needed no
        clipping. Results are bit by bit those of `clip_grad_norm_` before `optimizer.step()`.

        Every rank calls `optimizer.step()` as often as the others. `zero_grad`, `state_dict` and schedulers of learning
        rates are used as always. Call `synchronize` before parameters are read, saved or changed.

        Until the norm is there, each rank holds copies of the optimizer's parameters, their gradients and its state.
        Raises `InputError` if there are `host_optimizers`, or an argument is wrong.

        Parameters
        ----------
        optimizer
            This rank's optimizer. A rank whose stages have no parameters gives one of an empty tensor.
        max_norm
            The norm above which gradients are scaled down to it. None: updates are only skipped if they are not finite.
        """
        if self.runner.host_updates.any:
            raise InputError(
                "post_validate: a step that updates stages on the host cannot be undone, so the ranks meet before each "
                "step and gain nothing by updates ahead of the norm: use clip_grad_norm_"
            )
        self.runner.validations.append(PostValidation(optimizer, max_norm, self._rank, self._counted))

    def synchronize(self) -> None:
        """Makes this rank's parameters those after the last update: waits for the norm of all gradients if
        `post_validate` was called, and copies to the device what `host_optimizers` have updated. Call it before
        parameters are read, saved or changed, on any rank, when all have called `optimizer.step`. All that ranks do
        together, other than `step`, does so, too.
        """
        self.runner.synchronize()

    @property
    def host_optimizers(self) -> Mapping[int, HostOptimizer]:
        """The optimizers on the host of this rank's stages. Each has `optimizer`, for a scheduler of learning rates,
        `state_dict` and `load_state_dict`."""
        return self.runner.host_updates.optimizers

    @collective
    def tie(self, copy: nn.Parameter | nn.Module | None) -> None:
        """Ties the copies of one parameter, or of one module, that several ranks hold. Collective.

        The copies' parameters take the values of the lowest rank's, and after every step the sum of their gradients.
        Buffers stay each copy's own. Two stages on one rank need no tie: they share the parameter itself. For the two
        directions of DualPipe on p ranks: `for k in range(p): pipe.tie(stages.get(k, stages.get(p + k)))`.

        `copy` is this rank's: a parameter (tied embeddings) or a module (a stage that serves two routes); None on a
        rank without one.
        """
        tied = list(copy.parameters()) if isinstance(copy, nn.Module) else [] if copy is None else [copy]
        self.runner.host_updates.require_tie(tied)
        self._add_tie(copy)

    def _add_tie(self, copy: nn.Parameter | nn.Module | None) -> None:
        self.runner.ties.append(Tie(copy, self._rank.cpu_group, self._rank.team))

    @collective
    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank; those of the next inner peers' pipelines follow. Collective."""
        return self._rank.cpu_group.gather(value)

    @property
    def at_b(self) -> dict[int, frozenset[str]]:
        """For each stage of this rank that has run a B, the names of the parameters whose gradient B computes and does
        not leave to W."""
        return {s: stage.split.at_b for s, stage in self._rank.stages.items() if stage.split.at_b is not None}

    @property
    def layout(self) -> Layout:
        return self._rank.layout

    @property
    def number(self) -> int:
        """The number of this rank among those of this pipeline. Inner peers have the same."""
        return self._rank.number

    @property
    def leads(self) -> bool:
        """Whether this is the rank whose schedules and offers count: rank 0, of the first inner peer's pipeline."""
        return self._rank.cpu_group.rank == 0

    @property
    def problem(self) -> Problem | None:
        """What `profile` measured; None before. From then on every schedule must be valid and fit for it. Set the same
        problem on every rank to change it."""
        return self.runner.schedules.problem

    @problem.setter
    def problem(self, problem: Problem | None) -> None:
        self.runner.schedules.problem = problem

    @property
    def plan(self) -> Plan | None:
        """What this rank runs now."""
        return self.runner.schedules.loaded

    @property
    def schedule(self) -> Schedule | None:
        """The schedule that runs now."""
        return None if self.plan is None else self.plan.schedule

    @property
    def version(self) -> int:
        """How many schedules have been swapped in."""
        return self.runner.schedules.version

    @property
    def preparing(self) -> bool:
        """Whether an offer is being prepared: between two steps the same on every rank."""
        return self.runner.schedules.preparing

    @collective
    def load(self, schedule: Schedule | None) -> None:
        """Prepares rank 0's schedule and swaps it in on every rank, or on none. Collective.

        What other ranks give does not count; of inner peers the first one's counts. It may be for another number of
        micro-batches. Then the costs of its own problem count, which becomes `problem`. Raises `ScheduleError` if it
        cannot run here.
        """
        self.runner.schedules.load(schedule)

    def offer(self, schedule: Schedule) -> None:
        """Proposes a schedule for one of the next steps, without waiting. On rank 0, from any thread. Of inner peers
        the first one's counts."""
        self.runner.schedules.offer(schedule)

    @collective
    def profile(
        self,
        inputs: Any = None,
        targets: Any = None,
        activation_budget_bytes: int | None = None,
        offload_parts: int = 1,
        repeats: int = 7,
        kwargs: Mapping[Any, Any] | None = None,
        stack: str | None = None,
    ) -> Problem:
        """Measures every stage and link. Collective.

        From now on schedules must fit the problem that it returns, the same on every rank. Parameters, gradients,
        buffers and random numbers stay as they are.

        Parameters
        ----------
        inputs, targets, kwargs
            As for `step`.
        activation_budget_bytes
            What this rank may hold of saved tensors, beside weights, gradients, optimizer state, workspace, and two
            messages each way for each neighbour. On CUDA by default what is free, so take one optimizer step before.
        offload_parts
            In how many parts an activation is offloaded.
        repeats
            How often each op is measured at least.
        stack
            "torch": sizes are what PyTorch's own pipelining holds of these stages (`as_torch_holds`).
        """
        batch = self.runner.batch(inputs, targets, kwargs)
        self.measured = self.runner.profile(batch, Asked(activation_budget_bytes, offload_parts, repeats, stack))
        return self.measured.problem

    def close(self) -> None:
        """Ends the threads of this pipeline, which cannot be used any more."""
        self.runner.close()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:  # this rank does not come back, so the others must not wait
            self._rank.team.fail(self._rank.team.describe(error))
        self.close()
