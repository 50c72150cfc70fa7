"""The search of `optpipe_solver.relax` as plain as can be: every state is tried, none stands for another, and no bound
but the time that has passed tells which comes first. For a handful of micro-batches."""

from collections.abc import Callable, Hashable, Iterator
from heapq import heappop, heappush
from itertools import count, product
from typing import NamedTuple, TypeVar

from optpipe_solver.relax.one_stage import OneStage
from optpipe_solver.relax.several_stages import SeveralStages

NO_SCHEDULE_MS = float("inf")
ROUNDING_MS = 1e-6


class TooManyStatesError(Exception):
    """More than the caller wants to wait for."""


class Activation(NamedTuple):
    ready: float
    parts: int  # that are there
    has_checkpoint_only: bool = False
    is_computed: bool = False  # it is whole only when the op on it has ended


class Transfer(NamedTuple):
    ends: float
    is_out: bool
    microbatch: int


class State(NamedTuple):
    now: float = 0.0
    end: float = 0.0  # of the last input gradient and the way back after it
    op: str = ""
    op_ends: float = 0.0
    held: int = 0  # bytes until the op ends
    started: int = 0
    waiting: int = 0
    lines: tuple[Transfer | None, Transfer | None] = (None, None)
    activations: tuple[tuple[int, Activation], ...] = ()  # by micro-batch
    # When each forward and each input gradient began, in their order; only where meetings count.
    forwards: tuple[float, ...] = ()
    gradients: tuple[float, ...] = ()


S, T = TypeVar("S", bound=Hashable), TypeVar("T")


def least_end(first: S, follow: Callable[[S], Iterator[S]], value: Callable[[S], float],
              is_complete: Callable[[S], bool], most: int) -> float:  # fmt: skip
    """The value of the first complete state by uniform-cost search; infinite if there is none."""
    number, tried, heap = count(), {first}, [(value(first), 0, first)]
    while heap:
        least, _, state = heappop(heap)
        if is_complete(state):
            return least
        for following in follow(state):
            if following not in tried:
                tried.add(following)
                heappush(heap, (value(following), next(number), following))
        if len(tried) > most:
            raise TooManyStatesError
    return NO_SCHEDULE_MS


# One stage


def one_stage_end(device: OneStage, most: int) -> float:
    return least_end(
        State(),
        lambda state: _successors(state, device),
        lambda state: max(state.now, state.end),
        lambda state: state.started == device.microbatches and not (state.op or state.activations or state.waiting),
        most,
    )


def _successors(state: State, device: OneStage) -> Iterator[State]:
    for computing in (state, *_ops(state, device)):
        for transfers in product(*([None, *_transfers(computing, line, device)] for line in range(device.lines))):
            following = computing
            for line, transfer in enumerate(transfers):
                if following is not None and transfer is not None:
                    following = _with_transfer(following, line, transfer, device)
            if following is not None and (later := _at_next_event(following, device)) is not None:
                yield later


def _held(state: State, device: OneStage) -> int:
    """The bytes now. What is given back while an op runs is free when that op has ended."""
    if state.op:
        return state.held
    coming = {transfer.microbatch for transfer in state.lines if transfer and not transfer.is_out}
    return state.waiting * device.memory.waiting + sum(
        device.memory.checkpoint
        if activation.has_checkpoint_only
        else int(device.memory.present[activation.parts + (j in coming)])
        for j, activation in state.activations
    )


def _ops(state: State, device: OneStage) -> Iterator[State]:
    """The state with each op started that may start."""
    for following, change in _all_ops(state, device) if not state.op else ():
        held = _held(state, device) + change
        if held <= device.memory.budget:
            yield following._replace(held=held)


def _all_ops(state: State, device: OneStage) -> Iterator[tuple[State, int]]:
    now, ms, memory = state.now, device.ms, device.memory
    if state.waiting:
        run = state._replace(op="W", op_ends=now + ms.weight, waiting=state.waiting - 1)
        yield run, memory.weight - memory.waiting
    if state.started < device.microbatches:
        ends = now + ms.forward
        forwards = (*state.forwards, now) if len(device.meetings) else ()
        run = state._replace(op="F", op_ends=ends, started=state.started + 1, forwards=forwards)
        for again in (False, True) if device.can_recompute else (False,):
            new = Activation(ends + ms.between, 0 if again else device.parts, again, is_computed=True)
            yield run._replace(activations=(*state.activations, (state.started, new))), memory.forward
    for j, activation in state.activations:
        others = tuple(each for each in state.activations if each[0] != j)
        if activation.has_checkpoint_only:
            new = Activation(activation.ready, device.parts, is_computed=True)
            run = state._replace(op="C", op_ends=now + ms.recompute, activations=tuple(sorted([*others, (j, new)])))
            yield run, memory.recompute - memory.checkpoint
        moves = any(transfer and transfer.microbatch == j for transfer in state.lines)
        is_whole = activation.parts == device.parts and not (activation.has_checkpoint_only or moves)
        if is_whole and activation.ready <= now and _has_met_all(state, device):
            ends = now + ms.backward
            gradients = (*state.gradients, now) if len(device.meetings) else ()
            run = state._replace(op="B", op_ends=ends, end=ends + ms.tail, activations=others, gradients=gradients)
            yield run, memory.backward - int(memory.present[device.parts])


def _has_met_all(state: State, device: OneStage) -> bool:
    """Whether the micro-batch whose input gradient would begin now could meet each that was under way with it, later
    than it, at some stage."""
    began = state.forwards[len(state.gradients)] if state.forwards else 0.0
    return all(
        any(
            gradient + device.ms.backward - began >= after_later - ROUNDING_MS
            and state.now + device.ms.backward - forward >= after_earlier - ROUNDING_MS
            for after_later, after_earlier in device.meetings
        )
        for forward, gradient in zip(state.forwards, state.gradients, strict=False)
        if gradient > began
    )


def _meeting_moments(state: State, device: OneStage) -> Iterator[float]:
    """When an input gradient may begin as far as others under way are concerned."""
    for forward, (after_later, after_earlier) in product(state.forwards, device.meetings):
        yield forward + after_later - device.ms.backward
        yield forward + after_earlier - device.ms.backward


def _transfers(state: State, line: int, device: OneStage) -> Iterator[Transfer]:
    if state.lines[line] is not None:
        return
    for j, activation in state.activations:
        if activation.has_checkpoint_only or activation.is_computed:
            continue
        if activation.parts and (device.lines == 1 or line == 0):
            yield Transfer(state.now + device.ms.offload, True, j)
        if activation.parts < device.parts and (device.lines == 1 or line == 1):
            yield Transfer(state.now + device.ms.reload, False, j)


def _with_transfer(state: State, line: int, transfer: Transfer, device: OneStage) -> State | None:
    parts = dict(state.activations)[transfer.microbatch].parts
    held = _held(state, device)
    if not transfer.is_out:
        held += int(device.memory.present[parts + 1] - device.memory.present[parts])
    if held > device.memory.budget:
        return None
    lines = (transfer, state.lines[1]) if line == 0 else (state.lines[0], transfer)
    return state._replace(lines=lines, held=held if state.op else 0)


def _at_next_event(state: State, device: OneStage) -> State | None:
    ends = [transfer.ends for transfer in state.lines if transfer] + ([state.op_ends] if state.op else [])
    starts = [activation.ready for _, activation in state.activations]
    starts += _meeting_moments(state, device) if state.activations and not state.op else []
    now = min([*ends, *(at for at in starts if at > state.now)], default=NO_SCHEDULE_MS)
    if now == NO_SCHEDULE_MS:
        return None
    op, waiting, activations = state.op, state.waiting, dict(state.activations)
    if op and state.op_ends <= now:
        waiting += op == "B" and device.ms.weight > 0.0
        activations = {j: activation._replace(is_computed=False) for j, activation in activations.items()}
        op = ""
    for transfer in state.lines:
        if transfer and transfer.ends <= now:
            activation = activations[transfer.microbatch]
            parts = activation.parts + (-1 if transfer.is_out else 1)
            activations[transfer.microbatch] = activation._replace(parts=parts)
    return state._replace(
        now=now,
        op=op,
        op_ends=state.op_ends if op else 0.0,
        held=state.held if op else 0,
        waiting=waiting,
        lines=tuple(transfer if transfer and transfer.ends > now else None for transfer in state.lines),
        activations=tuple(sorted(activations.items())),
    )


# Several stages


class Passing(NamedTuple):
    now: float
    ready: tuple[float, ...]  # by micro-batch: when its next step may start
    step: tuple[int, ...]  # by micro-batch: the next one
    waiting: tuple[int, ...]  # by group
    end: float = 0.0


def several_stages_end(device: SeveralStages, most: int) -> float:
    m, steps = device.microbatches, len(device.step_ms)
    first = Passing(0.0, (0.0,) * m, (0,) * m, (0,) * len(device.weights.ms))
    return least_end(
        first,
        lambda state: _passings(state, device),
        lambda state: max(state.now, state.end),
        lambda state: min(state.step) == steps and not any(state.waiting),
        most,
    )


def _passings(state: Passing, device: SeveralStages) -> Iterator[Passing]:
    memory, weights = device.memory, device.weights
    held = sum(int(memory.held[step]) for step in state.step)
    held += sum(n * int(size) for n, size in zip(state.waiting, weights.waiting_bytes, strict=True))
    later = [at for at in state.ready if at > state.now]
    if later:
        yield state._replace(now=min(later))
    for g, n in enumerate(state.waiting):
        if n:
            yield state._replace(now=state.now + float(weights.ms[g]), waiting=_with(state.waiting, g, n - 1))
    for j, step in enumerate(state.step):
        if step == len(device.step_ms) or state.ready[j] > state.now:
            continue
        if held - memory.held[step] + memory.held[step + 1] + memory.beside[step] > memory.budget:
            continue
        now = state.now + float(device.step_ms[step])
        is_last = step + 1 == len(device.step_ms)
        ready = now + float(device.gap_ms[step])
        following = Passing(
            now,
            _with(state.ready, j, 0.0 if is_last else ready),
            _with(state.step, j, step + 1),
            state.waiting,
            max(state.end, ready) if is_last else state.end,
        )
        g = int(weights.group[step])
        yield following if g < 0 else following._replace(waiting=_with(state.waiting, g, state.waiting[g] + 1))


def _with(values: tuple[T, ...], at: int, value: T) -> tuple[T, ...]:
    return (*values[:at], value, *values[at + 1 :])
