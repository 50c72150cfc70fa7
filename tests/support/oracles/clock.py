"""An independent simulator: an event clock with any durations and delays that shares no code with the core.

It knows when each byte is held, so tests can see that a device never holds more bytes than its certificate says.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from optpipe import Kind, Op, Pair, Problem, Schedule
from optpipe.model.records import of_microbatch

BACKWARD = (Kind.B, Kind.BW)


@dataclass
class Clock:
    """The start and the end of every op, and when bytes are taken and freed.

    The events of a device, and of its host memory, are (moment, position of the op in its program, bytes taken or, if
    negative, freed). At the same moment they count in program order, and an op takes before it frees.
    """

    start: dict[Op, float] = field(default_factory=dict)
    end: dict[Op, float] = field(default_factory=dict)
    device_events: list[list[tuple[float, int, int]]] = field(default_factory=list)
    host_events: list[list[tuple[float, int, int]]] = field(default_factory=list)
    updates: frozenset[Op] = frozenset()  # every P

    @property
    def makespan(self) -> float:
        return max(self.end.values()) - min(self.start.values())

    def peak(self, events: list[tuple[float, int, int]]) -> int:
        held = most = 0
        for *_, amount in sorted(events, key=lambda event: (event[0], event[1], event[2] < 0)):
            held += amount
            most = max(most, held)
        return most


Ms = Callable[[Op], float]


def run(problem: Problem, schedule: Schedule, duration: Ms | None = None, delay: Ms | None = None) -> Clock:
    """Runs the programs.

    `duration` is of each op, `delay` of the message that an F or a backward waits for, in ms; by default the problem's.
    """
    duration, delay = duration or nominal_ms(problem, schedule), delay or partial(nominal_message_ms, problem)
    clock = Clock(device_events=[[] for _ in problem.devices], host_events=[[] for _ in problem.devices])
    clock.updates = frozenset(op for program in schedule.programs for op in program.ops() if op.kind is Kind.P)
    programs = [list(program) for program in schedule.programs]
    shared = {link: list(order) for link, order in schedule.links.items()}
    compute_free = [0.0] * len(programs)
    transfer_free: dict[tuple[str, bool | None], float] = {}
    # What each device has issued and has not run yet: transfers on its host link, evictions and loads, and optimizer
    # updates on the host.
    waiting: list[list[Op]] = [[] for _ in programs]
    evicting: list[list[Op]] = [[] for _ in programs]
    updating: list[list[Op]] = [[] for _ in programs]
    lines = dict.fromkeys((Kind.E, Kind.L), evicting) | {Kind.U: updating}
    lines |= dict.fromkeys((Kind.O, Kind.R, Kind.G, Kind.P), waiting)
    peer_free, host_free = [0.0] * len(programs), [0.0] * len(programs)
    issued: dict[Op, float] = {}
    moved = True
    while moved:
        moved = False
        for d, program in enumerate(programs):
            while program:
                item = program[0]
                ops = list(item) if isinstance(item, Pair) else [item]
                if ops[0].kind in lines:
                    issued[ops[0]] = compute_free[d]
                    lines[ops[0].kind][d].append(ops[0])
                else:
                    needs = [need for op in ops for need in _needs(problem, clock, op, delay)]
                    if None in needs:
                        break
                    begin = max([compute_free[d], *(need for need in needs if need is not None)])
                    length = 0.0 if ops[0].kind in (Kind.D, Kind.A, Kind.V) else sum(map(duration, ops))
                    if len(ops) == 2:
                        forward, backward = sorted(ops, key=lambda op: op.kind != Kind.F)
                        factor = problem.overlap_factor or 1.0
                        of_forward = factor[forward.stage] if isinstance(factor, tuple) else factor
                        length *= of_forward[backward.stage] if isinstance(of_forward, tuple) else of_forward
                    for op in ops:
                        clock.start[op], clock.end[op] = begin, begin + length
                    compute_free[d] = begin + length
                program.pop(0)
                moved = True
        for d, queue in enumerate(waiting):
            link = problem.devices[d].link
            for op in list(queue):
                full = problem.transfer_mode == "full_duplex"
                ahead = shared.get(link or "", queue)
                if next(o for o in ahead if not full or _inward(o) == _inward(op)) != op:
                    continue
                key = link if link in shared else f"own {d}", _inward(op) if full else None
                clock.start[op] = max(transfer_free.get(key, 0.0), issued[op])
                clock.end[op] = transfer_free[key] = clock.start[op] + duration(op)
                queue.remove(op)
                if link in shared:
                    shared[link].remove(op)
                moved = True
        for d, line in enumerate(evicting):
            while line:
                room = 0.0 if line[0].kind is Kind.L else clock.end.get(Op(Kind.A, line[0].stage, line[0].microbatch))
                if room is None:
                    break
                op = line.pop(0)
                clock.start[op] = max(peer_free[d], issued[op], room)
                clock.end[op] = peer_free[d] = clock.start[op] + duration(op)
                moved = True
        for d, line in enumerate(updating):
            while line and Op(Kind.G, line[0].stage, 0) in clock.end:
                op = line.pop(0)
                clock.start[op] = max(host_free[d], issued[op], clock.end[Op(Kind.G, op.stage, 0)])
                clock.end[op] = host_free[d] = clock.start[op] + duration(op)
                moved = True
    assert not any(programs), "the programs got stuck"
    assert not any(evicting), "evictions got stuck"
    assert not any(updating), "updates got stuck"
    assert not any(waiting), "transfers got stuck"
    _record_memory(problem, schedule, clock, issued)
    return clock


def _inward(op: Op) -> bool:
    return op.kind in (Kind.R, Kind.P)


def op_ms(stage: Any, kind: Kind, again: Op | None) -> float:
    """How long an op takes; a transfer of a part, its share. `again` is the C of the activation."""
    level = stage.all_levels[again.part] if again else None
    moved = level or stage
    times = {
        Kind.F: stage.forward_ms,
        Kind.B: stage.backward_input_ms,
        Kind.W: stage.backward_weight_ms,
        Kind.BW: stage.backward_input_ms + stage.backward_weight_ms,
        Kind.C: level.recompute_ms if level else 0.0,
        Kind.O: (moved.offload_ms or 0.0) / stage.offload_parts,
        Kind.R: (moved.reload_ms or 0.0) / stage.offload_parts,
        Kind.E: stage.evict_ms,
        Kind.L: stage.load_ms,
        Kind.G: stage.gradient_out_ms,
        Kind.U: stage.update_ms,
        Kind.P: stage.parameters_in_ms,
    }
    return times.get(kind) or 0.0  # marks take no time


def nominal_ms(problem: Problem, schedule: Schedule) -> Ms:
    """How long each op of a schedule takes."""
    ops = [op for program in schedule.programs for op in program.ops()]
    again = {(op.stage, op.microbatch): op for op in ops if op.kind is Kind.C}

    def ms(op: Op) -> float:
        stage = problem.stages[op.stage].of_microbatch(op.microbatch)
        return op_ms(stage, op.kind, again.get((op.stage, op.microbatch)))

    return ms


def _needs(problem: Problem, clock: Clock, op: Op, delay: Ms) -> list[float | None]:
    """The ends that a compute op waits for; None where one is not known yet."""
    stage, j = op.stage, op.microbatch
    route = problem.route(j)
    k = route.index(stage)
    if op.kind is Kind.A:
        return []
    if op.kind is Kind.V:
        return [clock.end.get(Op(Kind.L, stage, j))]
    if op.kind is Kind.D:
        return [clock.end.get(Op(Kind.O, stage, j, op.part), clock.end.get(Op(Kind.E, stage, j)))]
    needs: list[float | None] = []
    if op.kind is Kind.F and Op(Kind.P, stage, 0) in clock.updates:
        needs.append(clock.end.get(Op(Kind.P, stage, 0)))
    if op.kind is Kind.F and k > 0:
        needs.append(_message(problem, clock, route[k - 1], op, (Kind.F,), delay))
    if op.kind in (*BACKWARD, Kind.C):
        if op.kind is not Kind.C and k + 1 < len(route):
            needs.append(_message(problem, clock, route[k + 1], op, BACKWARD, delay))
        for part in range(problem.stages[stage].offload_parts):
            if Op(Kind.O, stage, j, part) in clock.end or Op(Kind.D, stage, j, part) in clock.end:
                back = Kind.L if Op(Kind.E, stage, j) in clock.end else Kind.R
                needs.append(clock.end.get(Op(back, stage, j, part)))
    return needs


def message_ms(problem: Problem, sender: int, receiver: int, microbatch: int) -> float:
    """How long a message from one stage to another takes."""
    devices = problem.stages[sender].device, problem.stages[receiver].device
    if devices[0] == devices[1]:
        return 0.0
    others = {(message.sender, message.receiver): message.ms for message in problem.messages or ()}
    return of_microbatch(others.get(devices, problem.p2p_ms), microbatch)


def nominal_message_ms(problem: Problem, op: Op) -> float:
    """How long the message takes that an F or a backward waits for; 0 where none comes."""
    route = problem.route(op.microbatch)
    at = route.index(op.stage) + (-1 if op.kind == Kind.F else 1)
    return message_ms(problem, route[at], op.stage, op.microbatch) if 0 <= at < len(route) else 0.0


def _message(problem: Problem, clock: Clock, sender: int, op: Op, kinds: tuple[Kind, ...], delay: Ms) -> float | None:
    ends = [clock.end.get(Op(kind, sender, op.microbatch)) for kind in kinds]
    sent = [end for end in ends if end is not None]
    if not sent:
        return None
    local = problem.stages[sender].device == problem.stages[op.stage].device
    return sent[0] + (0.0 if local else delay(op))


def _record_memory(problem: Problem, schedule: Schedule, clock: Clock, issued: dict[Op, float]) -> None:
    """Records when bytes are taken and freed. Transfers take theirs at the moment of their issue."""
    position = {
        op: place
        for program in schedule.programs
        for place, item in enumerate(program)
        for op in (item if isinstance(item, Pair) else [item])
    }
    for op in clock.end:
        place = position[op]
        stage: Any = problem.stages[op.stage].of_microbatch(op.microbatch)
        device, host = clock.device_events[stage.device], clock.host_events[stage.device]
        begin, end = issued.get(op, clock.start[op]), clock.end[op]
        again = (Op(Kind.C, op.stage, op.microbatch, k) in clock.end for k in range(len(stage.all_levels)))
        level = next((x for x, is_taken in zip(stage.all_levels, again, strict=True) if is_taken), None)
        size, n = 0, stage.offload_parts
        leaving = (level or stage).offload_bytes
        if leaving is not None:
            size = leaving * (op.part + 1) // n - leaving * op.part // n
        if Op(Kind.E, op.stage, op.microbatch) in clock.end:
            size = stage.evict_bytes or 0
        if op.kind is Kind.F:
            device.append((begin, place, stage.activation_bytes))
            if level:
                device.append((end, place, level.checkpoint_bytes - stage.activation_bytes))
        elif op.kind is Kind.C:
            assert level
            device.append((begin, place, stage.activation_bytes - level.checkpoint_bytes))
        elif op.kind is Kind.B:
            change = stage.saved_for_weight_bytes - stage.activation_bytes
            device.append((begin if change > 0 else end, place, change))
        elif op.kind is Kind.W:
            device.append((end, place, -stage.saved_for_weight_bytes))
        elif op.kind is Kind.BW:
            device.append((end, place, -stage.activation_bytes))
        elif op.kind is Kind.D:
            device.append((end, place, -size))
        elif op.kind in (Kind.R, Kind.L):
            device.append((begin, place, size))
        elif op.kind in (Kind.A, Kind.V):
            peer = problem.devices[stage.device].peer
            assert peer is not None
            clock.device_events[peer].append(
                (begin, place, stage.evict_bytes or 0) if op.kind is Kind.A else (end, place, -(stage.evict_bytes or 0))
            )
        elif op.kind is Kind.O:
            host.append((begin, place, size))
            last = [Op(kind, op.stage, op.microbatch) for kind in BACKWARD]
            backward = next(b for b in last if b in clock.end)
            host.append((clock.end[backward], position[backward], -size))
