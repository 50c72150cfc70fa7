"""`torch_schedule`: a schedule with offloads in PyTorch's own pipelining.

PyTorch's runtime goes through its own rows of actions, with O, D and R among them. What a stage's forward saves for the
backward is kept by an `Activation`, as in `Pipeline`, and leaves the device by the same links and the same host pool.
Nothing in torch is changed: O, D and R are actions with functions of their own, as `register_custom_function` makes
them for torch's kinds, and while a step runs the stages' `forward_one_chunk` and `backward_one_chunk` are called
through this schedule.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel

from optpipe.errors import InputError, ScheduleError
from optpipe.formats import torch_csv
from optpipe.formats.order import forwards_of
from optpipe.formats.torch_memory import as_torch_holds
from optpipe.model.ops import OP, Kind, Op
from optpipe.model.program import of_kinds
from optpipe.schedule import Schedule, check
from optpipe_runtime.lowering.plan import StageMicrobatch
from optpipe_runtime.lowering.prepare import digest
from optpipe_runtime.memory.activation import Activation, bytes_by_storage, storage_key
from optpipe_runtime.memory.host_memory import HostPool, OnHost
from optpipe_runtime.memory.link import Link
from optpipe_runtime.torch_private.pipelining import (
    WAITS_FOR_SENDS,
    Action,
    ScheduleRuntime,
    gradients_in,
    left_for_weight,
    replaced,
    stages_of_schedule,
    weights_behind,
    weights_split,
)
from optpipe_runtime.torch_private.tensors import is_compiled, tree_leaves

MOVE = re.compile(r"\d+[ODR]")
PLACING = ("defer_pp_recv", "defer_reduce_grad_wait", "max_active_stages", "max_outstanding_sends", "unshard_lookahead")


class Move(NamedTuple):
    """O, D or R as an action of torch's runtime, with the attributes that it looks at."""

    computation_type: Kind
    stage_index: int
    microbatch_index: int
    part: int
    sub_actions: None = None

    def __str__(self) -> str:
        return str(Op(self.computation_type, self.stage_index, self.microbatch_index, self.part))


def torch_schedule(
    schedule: Schedule,
    stages: Sequence[PipelineStage],
    loss_fn: Callable[..., Tensor] | None = None,
    host_memory_bytes: int | None = None,
    **options: Any,
) -> TorchSchedule:
    """A schedule of torch.distributed.pipelining that runs this one, with its offloads, drops and reloads.

    Raises `InputError` if the stages are not those of this rank, have parts in FSDP, share weights whose gradients
    torch would divide twice, or, where the schedule splits backwards, are in DDP or compiled, or the schedule has other
    ops; in the first step, if torch's split backwards would leave a weight without its gradient. Raises `ScheduleError`
    if it cannot run or does not fit the memory, with what torch holds (`as_torch_holds`).

    Parameters
    ----------
    schedule
        Of one route over all stages in order, with F, B, W, BW, O, D and R. It must fit the memory of its problem.
    stages
        Those that the schedule places on this rank.
    loss_fn
        The mean loss of a micro-batch, from the last stage's output and the target.
    host_memory_bytes
        The most host memory that offloaded activations may take; no limit by default.
    options
        Of torch's `PipelineScheduleMulti`, such as `scale_grads`. Those that move messages and waits are refused.
    """
    return TorchSchedule(schedule, stages, loss_fn, host_memory_bytes, **options)


class TorchSchedule(ScheduleRuntime):
    """Made by `torch_schedule`. Use it as torch's own schedules: `step(inputs, target=..., losses=...)`, `load(other)`.

    Attributes
    ----------
    peak_bytes
        The most bytes of activations, and of gradients from I until W, that this rank held in the last step, counted
        by live storages after every op that takes memory. Inputs of stages are not counted: they are torch's buffers of
        messages (docs/stacks.md).
    certified_bytes
        What the schedule allows.
    activation_bytes, saved_for_weight_bytes
        By stage, what the last forward saved, and what was held after the last I: fields of a problem for these stages
        whose `stack` is "torch". Without an I the latter has no entry.
    host_peak_bytes
        The most host memory that was in use in the last step, in whole pages.
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: Sequence[PipelineStage],
        loss_fn: Callable[..., Tensor] | None,
        host_memory_bytes: int | None,
        **options: Any,
    ) -> None:
        for name in set(PLACING).intersection(options):
            raise InputError(f"{name} = {options[name]!r}: leave it out: the schedule's rows place messages and waits")
        problem = schedule.problem
        _require_placed(schedule, stages)
        super().__init__(  # type: ignore[no-untyped-call]
            [*stages], n_microbatches=problem.microbatches, loss_fn=loss_fn, **options
        )
        if self.scale_grads:
            _require_own_weights(stages)
        self._device = stages[0].device
        self._link = Link(self._device, problem.transfer_mode == "full_duplex")
        self._pool = HostPool(self._device, host_memory_bytes)
        self._kept: dict[StageMicrobatch, Activation] = {}
        self._shared: dict[int, frozenset[int]] = {stage.stage_index: frozenset() for stage in stages}
        self._splittable: set[int] = set()  # stages of which W has had all weights
        self._targets: frozenset[int] = frozenset()  # of this step; one storage for all micro-batches
        self.peak_bytes = self.host_peak_bytes = 0
        self.activation_bytes: dict[int, int] = {}
        self.saved_for_weight_bytes: dict[int, int] = {}
        self.load(schedule)

    def load(self, schedule: Schedule) -> None:
        """Runs this schedule from the next step on, such as one for that step's own micro-batches. All ranks call it.

        Its micro-batch j is the j-th of the batch, whichever comes first. Raises as `torch_schedule` does, also for
        another number of micro-batches or where ranks have different schedules, and keeps the schedule that it had.
        """
        _require_placed(schedule, stages := stages_of_schedule(self))
        if schedule.problem.microbatches != self._n_microbatches:
            raise InputError(
                f"the schedule is for {schedule.problem.microbatches} micro-batches: {self._n_microbatches} are "
                "expected, as in the one that torch_schedule had"
            )
        if any(of_kinds(program.table, Kind.B).any() for program in schedule.programs):
            _require_splittable(stages)
        order = forwards_of(schedule, len(schedule.problem.stages) - 1)
        schedule = schedule.renumbered(schedule.problem.entering(order.tolist()), np.argsort(order))
        rows = torch_csv.rows(schedule, messages=True, waits=WAITS_FOR_SENDS, offloads=True)
        problem = as_torch_holds(schedule.problem)
        if complaints := check(problem, schedule):
            raise ScheduleError(f"in PyTorch's pipelining: {complaints[0]}")

        def action(text: str) -> Move | Action:
            return Move(*Op.parse(text)) if OP.fullmatch(text) and MOVE.match(text) else Action.from_str(text)

        moves: dict[Any, Any] = {Kind.O: self._offload, Kind.D: self._drop, Kind.R: self._reload}
        self.set_rows([list(map(action, row)) for row in rows], moves, order.tolist())
        self._parts = {s: stage.offload_parts for s, stage in enumerate(problem.stages)}
        self.certified_bytes = schedule.on(problem).compiled.certificate.device[self.rank].bytes

    def close(self) -> None:
        """Ends the thread that copies, on a CPU."""
        self._link.close()

    # One step

    def before_step(self, microbatches: Mapping[str, Sequence[Any] | None]) -> None:
        """Raises `InputError` if micro-batches differ in shape: torch has one buffer for all."""
        for what, each in microbatches.items():
            shapes = [[list(x.shape) for x in tree_leaves(one) if isinstance(x, Tensor)] for one in each or ()]
            for j, shape in enumerate(shapes):
                if shape != shapes[0]:
                    raise InputError(
                        f"the {what} of micro-batch {j} have shapes {shape}, those of the first {shapes[0]}: torch's "
                        "pipelining needs equal ones; optpipe_runtime.Pipeline takes others, as Microbatches"
                    )

    @contextmanager
    def around_step(self, targets: Any) -> Iterator[None]:
        """While a step runs, forwards and backwards of the stages come through here."""
        self.peak_bytes = 0
        self._targets = frozenset(storage_key(leaf) for leaf in tree_leaves(targets) if isinstance(leaf, Tensor))
        self._pool.start_step()
        try:
            with ExitStack() as methods:
                for stage in stages_of_schedule(self):
                    forward = partial(self._forward, stage, stage.forward_one_chunk)
                    backward = partial(self._backward, stage, stage.backward_one_chunk)
                    calls = {"forward_one_chunk": forward, "backward_one_chunk": backward}
                    methods.enter_context(replaced(stage, calls))
                yield
        finally:
            for activation in self._kept.values():
                activation.restore()
            self._kept.clear()
        self.host_peak_bytes = self._pool.peak_bytes

    def _forward(
        self, stage: PipelineStage, forward: Callable[..., Any], microbatch: int, args: Any, kwargs: Any, **more: Any
    ) -> Any:
        # What the stage gets, torch keeps anyway: the batch, or buffers of messages.
        received = () if stage.is_first else (info.buffer for info in stage.args_recv_info[microbatch])
        inputs = [leaf for leaf in (*tree_leaves((args, kwargs)), *received) if isinstance(leaf, Tensor)]
        staying = [*stage.submod.parameters(), *stage.submod.buffers(), *inputs]
        excluded = self._targets.union(map(storage_key, staying))
        activation = Activation(self._device, excluded, self._shared[stage.stage_index])
        self._kept[stage.stage_index, microbatch] = activation
        with activation.capture():
            return forward(microbatch, args, kwargs, **more)

    @contextmanager
    def around_loss(self, stage: PipelineStage, microbatch: int) -> Iterator[None]:
        activation = self._kept.get((stage.stage_index, microbatch))
        if activation is None:  # in an evaluation
            yield
            return
        with activation.capture():
            yield
        self.activation_bytes[stage.stage_index] = activation.nbytes
        self._count()

    def _backward(self, stage: PipelineStage, backward: Callable[..., Any], microbatch: int, **more: Any) -> Any:
        activation = self._kept[stage.stage_index, microbatch]
        activation.restore()
        activation.release()
        splits = not more.get("full_backward", True)
        unproven = splits and not stage.is_first and stage.stage_index not in self._splittable
        behind = weights_behind(stage, microbatch, more.get("loss")) if unproven else set()
        result = backward(microbatch, **more)
        if unproven:
            _require_gradients(stage, behind - weights_split(stage, microbatch))
            self._splittable.add(stage.stage_index)
        if splits:
            held = activation.held() | self._gradients(stage, microbatch)
            self.saved_for_weight_bytes[stage.stage_index] = sum(held.values())
            self._count()
        return result

    def _gradients(self, stage: PipelineStage, microbatch: int) -> dict[int, int]:
        """Bytes by storage of what I has left for W; without buffers of messages, which torch has anyway."""
        received = [info.buffer for info in stage.grad_recv_info[microbatch] if info.buffer is not None]
        kept = bytes_by_storage(gradients_in(left_for_weight(stage)[microbatch]))
        return {key: nbytes for key, nbytes in kept.items() if key not in bytes_by_storage(received)}

    def _offload(self, action: Move, _: object) -> None:
        on_host = OnHost(self._link, self._pool)
        self._kept[action[1:3]].offload(action.part, self._parts[action.stage_index], on_host)

    def _drop(self, action: Move, _: object) -> None:
        activation = self._kept[action[1:3]]
        activation.drop(action.part)
        self._shared[action.stage_index] |= activation.shared_blocks()

    def _reload(self, action: Move, _: object) -> None:
        self._kept[action[1:3]].reload(action.part)
        self._count()

    def _count(self) -> None:
        held: dict[int, int] = {}
        for activation in self._kept.values():
            held |= activation.held()
        for stage in stages_of_schedule(self):
            for microbatch in left_for_weight(stage):
                held |= self._gradients(stage, microbatch)
        self.peak_bytes = max(self.peak_bytes, sum(held.values()))


def _require_placed(schedule: Schedule, stages: Sequence[PipelineStage]) -> None:
    if not stages:
        raise InputError("stages is empty: every rank of a pipeline has a stage")
    _require_equal(schedule, stages[0].group)
    problem, rank = schedule.problem, stages[0].group_rank
    if stages[0].group_size != len(problem.devices):
        raise InputError(
            f"the schedule is for {len(problem.devices)} ranks, the stages' group has {stages[0].group_size}"
        )
    own, placed = sorted(stage.stage_index for stage in stages), problem.stages_on(rank)
    if own != placed or stages[0].num_stages != len(problem.stages):
        raise InputError(
            f"stages: rank {rank} has {own} of {stages[0].num_stages}; the schedule places {placed} of "
            f"{len(problem.stages)} there"
        )
    for stage in stages:
        if any(isinstance(part, FSDPModule) for part in stage.submod.modules()):
            raise InputError(
                f"stage {stage.stage_index} is sharded by FSDP: gathered parameters would be taken for activations; "
                "export the schedule without offload"
            )


def _require_equal(schedule: Schedule, group: dist.ProcessGroup | None) -> None:
    """Raises `InputError` on all ranks of the group unless they have the same schedule of the same problem."""
    digests = [""] * dist.get_world_size(group)
    dist.all_gather_object(digests, digest(schedule, schedule.problem), group=group)
    if others := [rank for rank, each in enumerate(digests) if each != digests[0]]:
        raise InputError(f"rank {others[0]} has another schedule or problem than rank 0: expected the same on all")


def _require_splittable(stages: Sequence[PipelineStage]) -> None:
    """Raises `InputError` where torch's I and W leave gradients out, or cannot run."""
    for stage in stages:
        for part in stage.submod.modules():
            if isinstance(part, DistributedDataParallel) or is_compiled(part):
                what = "is compiled" if is_compiled(part) else "is in DistributedDataParallel"
                raise InputError(
                    f"stage {stage.stage_index} {what}, with which torch's split backwards do not work: give "
                    "torch_schedule optpipe.whole_backwards(schedule)"
                )


def _require_own_weights(stages: Sequence[PipelineStage]) -> None:
    """Raises `InputError` where stages share a weight: torch would divide its gradient once for each."""
    for a, b in combinations(stages, 2):
        others = set(map(id, b.submod.parameters()))
        for name, weight in a.submod.named_parameters():
            if id(weight) in others:
                raise InputError(
                    f"stages {a.stage_index} and {b.stage_index} share {name}, whose gradient torch divides once for "
                    "each: give scale_grads=False, and divide all gradients by the number of micro-batches"
                )


def _require_gradients(stage: PipelineStage, lost: set[int]) -> None:
    """Raises `InputError` if any of the weights, by `id`, is the stage's: torch's I and W would leave it as it is."""
    if names := [name for name, weight in stage.submod.named_parameters() if id(weight) in lost]:
        raise InputError(
            f"stage {stage.stage_index}: torch's split backwards give {names[0]} no gradient, since it meets no input "
            "that needs one, as behind frozen stages: give torch_schedule optpipe.whole_backwards(schedule)"
        )
