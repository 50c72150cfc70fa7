"""What `optpipe plan` prints and writes."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, expm1
from pathlib import Path
from typing import Any

from optpipe.evaluate.objective import NO_SCHEDULE_MS
from optpipe.files import write_file
from optpipe.formats import export_schedule
from optpipe.formats.megatron import offload_arguments
from optpipe.model.placement import counts_text, devices_in_order
from optpipe.schedule import Schedule, ScheduleFile
from optpipe.show.pareto import Point, chart
from optpipe.transformer.calibrate import UNEXPLAINED
from optpipe.transformer.estimate import MEASURED_PEAKS
from optpipe_cli.model import assumed, left_out, table
from optpipe_solver.planner.candidate import WHOLE, Candidate, difference
from optpipe_solver.planner.candidates import Question
from optpipe_solver.planner.plan import Plan
from optpipe_solver.planner.search import PlanSearch
from optpipe_solver.planner.settings import bridge, megatron, nemo, torchtitan, torchtitans
from optpipe_solver.planner.today import Running

GB, S = 1e9, 1000.0
OTHERS = 5  # divisions beside the best one
DRAWN = 1.5  # times as long as the best: what takes longer is not shown
HELD = {"weights": 9, "gradients": 11, "optimizer": 11, "workspace": 11, "reserved": 10, "activations": 13, "in all": 8}
CSV = "schedule.csv"
TIME_UP = "none that fits was found in time, a longer --time-limit may find one"
SENT = {
    "none": "gradients are reduced behind the schedule",
    "replicas": "gradients are reduced beside the last backward",
    "all": "gradients are reduced beside the last backward, half of tensor parallelism's messages sent beside matmuls",
}
TO_MEASURE = {  # where a parameter of the cost model leaves most open
    UNEXPLAINED: "a step of each",
    "link_fraction": "iterations with tensor parallelism, for optpipe calibrate --from",
    "link_us": "iterations with tensor parallelism, for optpipe calibrate --from",
    "network_fraction": "iterations on several nodes, for optpipe calibrate --from",
}


def progress(search: PlanSearch) -> str:
    """One line for the terminal."""
    best = f"; best {search.best.iteration_ms / S:.4g} s: {search.best}" if search.best else ""
    scheduled = sum(candidate.method is not None for candidate in search.candidates)
    return f"{search.phase}: {len(search.candidates)} candidates, {scheduled} scheduled, {search.solved} searched{best}"


def lines(plan: Plan, explain: bool) -> Iterator[str]:
    """The plan in words and tables."""
    yield from _question(plan)
    yield ""
    if plan.today:
        yield from _today(plan, plan.today)
        yield ""
    yield from _best(plan)
    yield ""
    yield from _memory(plan.question, plan.best)
    yield ""
    yield "with less memory: of all schedules seen those that none beats in both"
    for nbytes, ms, candidate, method in (each for each in plan.frontier if each[1] <= DRAWN * plan.best.iteration_ms):
        yield f"{nbytes / GB:9.2f} GB {ms / S:9.4g} s  {candidate}, {method}"
    yield ""
    yield from _other_divisions(plan)
    if explain and plan.other_divisions:
        yield ""
        yield from _explained(plan.best, plan.other_divisions[0])
    for title, settings in stack_settings(plan).items():
        yield from ("", title, *(f"  {line}" for line in settings))


def _question(plan: Plan) -> Iterator[str]:
    """What was asked, how it was searched, and what is assumed."""
    question, estimate = plan.question, plan.best.estimate
    yield (
        f"{question.model.name or 'model'} on {question.gpus} × {question.gpu.name or 'GPU'}, {question.batch} "
        f"sequences of {estimate.sequence} tokens a step"
    )
    yield from left_out(question.model, question.run.mtp)
    if question.limit:
        yield f"  {question.limit}"
    counts = plan.counts
    yield (
        f"{len(plan.ranked)} candidates: {counts.too_large} too large, {counts.ruled_out} ruled out by bounds, "
        f"{counts.left_open} left open, {counts.scheduled} with schedules that fit; {plan.searched} were searched, in "
        f"{plan.time_s:.0f} s" + "; a longer --time-limit would compare those left open" * (counts.left_open > 0)
    )
    yield (
        f"{assumed(estimate)}; {SENT.get(estimate.run.overlap, SENT['all'])}; ZeRO 1 unless another is named"
        + ("; nothing is measured on your GPUs" if question.gpu.covariance is None else "")
    )


def _today(plan: Plan, today: Running) -> Iterator[str]:
    """What runs today, and what a better schedule on the same division and what the plan gain."""
    more = _more_than(today.has_bytes, today.candidate, today.schedule)
    crowded = today.used_bytes > plan.question.usable.memory_bytes
    verdict = f"fits{more}{'; less stays free than --margin wants' * crowded}" if today.fits else "runs out of memory"
    yield f"today {today.candidate}, {_layers(today.candidate)}"
    yield f"      not named, so what the stack does by default: {', '.join(today.assumed) or 'nothing'}"
    if today.schedule.method.endswith(WHOLE):
        yield "      split backwards would give wrong gradients with replicas, or recompute for each weight, in torch"
    yield (
        f"      {today.schedule.method}: {today.iteration_ms / S:.4g} s, {today.used_bytes / GB:.2f} GB of "
        f"{today.has_bytes / GB:.2f} GB: {verdict}"
    )
    if not today.fits:
        run = today.candidate.estimate.run
        yield f"      counted: gradients of {run.gradient_bytes}, an optimizer of {run.state_bytes} bytes a parameter"
        yield f"      would fit: {', or '.join(today.fitting) or 'nothing of 16-bit optimizers and recomputation'}"
    same = next(candidate for candidate in plan.ranked if candidate.division == today.candidate.division)
    for name, best in (("so divided", same), ("by the plan", plan.best)):
        if best.method:
            ms, held = best.lengths[best.method]
            less = 1 - ms / today.iteration_ms
            change = f"{abs(less):.1%} {'less' if less >= 0 else 'more'}"
            yield f"      {name}: {ms / S:.4g} s ({change}), {held / GB:.2f} GB, by {best.method}: {best}"
        else:
            found = "nothing fits, whatever is recomputed" if best.bound_ms >= NO_SCHEDULE_MS else TIME_UP
            yield f"      {name}: {found}"


def _best(plan: Plan) -> Iterator[str]:
    """The answer, and how much shorter others could be."""
    best, schedule = plan.best, _schedule(plan.best)
    left, others = 1 - plan.lower_bound_ms / best.iteration_ms, plan.may_be_shorter
    more = sum(share > plan.gap for share in others)
    yield f"run   {best}"
    yield f"      {schedule.method}, {_layers(best)}"
    if (other := plan.shortest) is not best:
        longer = best.iteration_ms / other.iteration_ms - 1
        yield f"      {longer:.1%} longer than {other}, which no prediction is sure of: less cp wins"
    if (order := devices_in_order(schedule.problem)) != sorted(order):
        yield f"      on devices {' '.join(map(str, order))} in this order: each stage shares a node with its peer"
    yield (
        f"step  {best.iteration_ms / S:.4g} s, {_tokens_per_s(best):,.0f} tokens/s, predicted MFU "
        f"{best.estimate.utilization_in(best.iteration_ms):.1%}, bubble {schedule.timeline.bubble:.1%}"
    )
    if plan.optpipe_ms is not None:
        less, seconds = 1 - plan.optpipe_ms / best.iteration_ms, plan.optpipe_ms / S
        yield (
            f"      OptPipe's own schedule of whole stages, so divided and in this memory: {seconds:.4g} s, "
            f"{abs(less):.1%} {'less' if less >= 0 else 'more'}"
        )
    yield (
        f"      without evictions no candidate can take less than {plan.lower_bound_ms / S:.4g} s ({left:.1%} less); "
        f"others that may be shorter: {len(others)}, by more than --gap {plan.gap:.1%}: {more}"
    )
    if doubtful := best.estimate.not_measured:
        yield f"      not measured where this GPU's parameters come from: {'; '.join(doubtful)}"


def _memory(question: Question, best: Candidate) -> Iterator[str]:
    """What each device holds, what stays free, and whether that fits."""
    estimate, schedule = best.estimate, _schedule(best)
    peaks = best.peaks(schedule)
    held = [
        (memory.weights, memory.gradients, memory.optimizer, memory.workspace, memory.reserved, peak.bytes, used)
        for memory, peak, used in zip(estimate.devices, peaks, best.used_bytes(schedule), strict=True)
    ]
    yield from table("GB", HELD, "device", ((nbytes / GB for nbytes in row) for row in held))
    has, reserved, (less, more) = question.gpu.memory_bytes, question.gpu.reserved_bytes, MEASURED_PEAKS
    fullest = max(best.used_bytes(schedule))
    least, most = (max(each) for each in zip(*best.peak_ranges(schedule), strict=True))
    yield f"of each GPU of a device (tp {estimate.parallelism.tp}), which has {has / GB:.2f} GB"
    yield (
        f"held  {fullest / GB:.2f} GB on the fullest; {(has - fullest) / GB:.2f} GB stay free, of which --margin "
        f"{question.margin:g} wants {question.margin * has / GB:.2f}"
    )
    yield (
        f"      with fragments and buffers {least / GB:.2f} to {most / GB:.2f} GB: measured peaks of others were "
        f"{1 - less:.0%} below to {more - 1:.0%} above such sums"
    )
    safe = 1 - (reserved + (has - reserved) / more) / has
    doubt = _more_than(has, best, schedule)
    yield f"fits  yes{doubt}{f': --margin {ceil(100 * safe) / 100:g} plans for that' if doubt else ''}"


def _more_than(has: int, candidate: Candidate, schedule: Schedule) -> str:
    """What does not fit where the fullest GPU holds as much more as was ever measured; nothing if that fits, too."""
    most = max(most for _, most in candidate.peak_ranges(schedule))
    return f", but not with {MEASURED_PEAKS[1] - 1:.0%} more" if most > has else ""


def _other_divisions(plan: Plan) -> Iterator[str]:
    """The best candidate of each, whether it is really slower, and what to measure where that is open."""
    yield "other divisions, each by its best candidate; ≥ is a bound, ≈ cannot be distinguished from the best one"
    differences = [difference(plan.best, other) for other in plan.other_divisions[:OTHERS]]
    for other, each in zip(plan.other_divisions, differences, strict=False):
        text = f"{'' if other.method else '≥ '}{other.least_ms / S:.4g}"
        by = f", {other.method}" if other.method else ""
        yield f"{f'≈ {text}' if each.is_open and other.method else text:>9} s  {other}{by}"
    if differences and plan.other_divisions[0].method and differences[0].is_open:
        runner_up, longer = differences[0], expm1(differences[0].longer)
        yield (
            f"the runner-up is {abs(longer):.1%} {'longer' if longer >= 0 else 'shorter'}, ± {runner_up.spread:.1%} "
            f"(a standard deviation), most of which is {runner_up.largest}: to decide measure "
            f"{TO_MEASURE.get(runner_up.largest, 'this GPU, by optpipe calibrate')}"
        )


def figures(plan: Plan) -> dict[str, Any]:
    """The same as `lines`, for programs."""
    best, today = plan.best, plan.today
    differences = [difference(best, other) for other in plan.other_divisions]
    return {
        "question": plan.question.model_dump(mode="json"),
        "candidates": len(plan.ranked),
        **plan.counts._asdict(),
        "searched": plan.searched,
        "time_s": round(plan.time_s, 3),
        "notes": list(plan.notes),
        "lower_bound_ms": plan.lower_bound_ms,
        "optpipe_ms": plan.optpipe_ms,
        "today": today
        and {
            **_division(today.candidate),
            "method": today.schedule.method,
            "iteration_ms": today.iteration_ms,
            "used_bytes": today.used_bytes,
            "fits": today.fits,
            "fitting": today.fitting,
        },
        "best": _figures(best) | {"problem": _schedule(best).problem.to_dict()},
        "other_divisions": [
            _figures(other)
            | {"longer": {"logarithm": each.longer, "standard_deviation": each.spread, "variance": each.variance}}
            for other, each in zip(plan.other_divisions, differences, strict=True)
        ],
        "frontier": [
            {"bytes": held, "iteration_ms": ms, "candidate": str(candidate), "method": method}
            for held, ms, candidate, method in plan.frontier
        ],
    }


def _division(candidate: Candidate) -> dict[str, Any]:
    return {name: getattr(candidate.estimate, name).model_dump(mode="json") for name in ("parallelism", "run")}


def _figures(candidate: Candidate) -> dict[str, Any]:
    estimate, schedule = candidate.estimate, candidate.schedule
    content = _division(candidate) | {"bound_ms": candidate.bound_ms, "parts_ms": candidate.parts_ms}
    content["not_measured"] = estimate.not_measured
    if candidate.method:
        content |= {
            "method": candidate.method,
            "iteration_ms": candidate.iteration_ms,
            "tokens_per_s": _tokens_per_s(candidate),
            "mfu": estimate.utilization_in(candidate.iteration_ms),
        }
    if schedule:
        content |= {
            "bubble": schedule.timeline.bubble,
            "used_bytes": candidate.used_bytes(schedule),
            "peak_ranges": candidate.peak_ranges(schedule),
        }
    return content


def write(plan: Plan, folder: Path) -> None:
    """Write the problem, the schedule, a picture of memory against time, and the settings of other stacks."""
    best, schedule = plan.best, _schedule(plan.best)
    schedule.problem.save(folder / "problem.json")
    ScheduleFile.from_schedule(schedule).save(folder / "schedule.json")
    seen = [
        Point("tp {}, pp {}, dp {}, ep {}, cp {}".format(*candidate.division), held, ms)
        for candidate in plan.ranked
        for ms, held in candidate.lengths.values()
        if ms <= DRAWN * best.iteration_ms
    ]
    frontier = [Point(str(c), held, ms) for held, ms, c, _ in plan.frontier if ms <= DRAWN * best.iteration_ms]
    title = f"{plan.question.model.name} on {plan.question.gpus} × {plan.question.gpu.name}: iterations"
    budget = {"a GPU has": plan.question.gpu.memory_bytes}
    chart(seen, {"none beats these": frontier}, budget, title, grey="schedules seen").save(folder / "memory.html")
    for stack, settings in stack_settings(plan).items():
        write_file(folder / f"{stack.split()[0].lower()}.txt", "\n".join(settings) + "\n")
    if plan.question.stack == "torch":
        write_file(folder / CSV, export_schedule(schedule, "torch-csv"))


def stack_settings(plan: Plan) -> dict[str, list[str]]:
    """The settings of each stack."""
    if plan.question.stack == "torch":
        titans = {name: torchtitan(plan.best, CSV, tokens) for name, tokens in torchtitans().items()}
        return titans | {"NeMo AutoModel": nemo(plan.best, CSV)}
    if plan.question.stack == "megatron":
        offloads = plan.best.schedule is not None and bool(offload_arguments(plan.best.schedule))
        needs = ["# offload needs megatron-core 0.19.2, and NVTE_CPU_OFFLOAD_V1=1 in the environment"] * offloads
        return {"Megatron-LM": needs + megatron(plan.best), "Megatron-Bridge": needs + bridge(plan.best)}
    return {}


def _explained(best: Candidate, other: Candidate) -> Iterator[str]:
    """Where the runner-up's time goes, beside the best one's, and which term makes most of the difference."""
    by = other.method or "its bound"
    longer = other.least_ms / best.least_ms - 1
    if other.method or longer > 0:
        yield f"the runner-up takes {'' if other.method else 'at least '}{longer:+.1%}: {other}, by {by}"
    else:
        yield f"the runner-up has no schedule yet; its bound allows up to {-longer:.1%} less: {other}"
    yield f"{'s':>27}{'best':>10}{'runner-up':>11}{'more':>9}"
    ours, theirs = best.parts_ms, other.parts_ms
    for name, ms in ours.items():
        yield f"{name:>27}{ms / S:z10.3f}{theirs[name] / S:z11.3f}{(theirs[name] - ms) / S:+z9.3f}"
    more = {name: theirs[name] - ms for name, ms in ours.items()}
    most = max(more, key=lambda name: more[name])
    yield f"most of what it takes longer: {most}, {more[most] / S:+.3f} s"


def _layers(candidate: Candidate) -> str:
    estimate = candidate.estimate
    counts = [sum(estimate.pieces[i].is_layer for i in pieces) for pieces in estimate.stages]
    return f"layers of its stages {counts_text(counts)}"


def _tokens_per_s(candidate: Candidate) -> float:
    estimate = candidate.estimate
    step = estimate.run.microbatches * estimate.run.microbatch_size * estimate.parallelism.dp * estimate.sequence
    return step / (candidate.iteration_ms / S)


def _schedule(candidate: Candidate) -> Schedule:
    assert candidate.schedule is not None, "the best candidate has a schedule"
    return candidate.schedule
