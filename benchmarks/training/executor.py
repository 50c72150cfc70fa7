"""What the executor and a swap cost the host, and how long steps in a row take."""

from __future__ import annotations

import torch

from benchmarks.training.on_ranks import METHOD, in_a_row, own_steps, swap_cost
from benchmarks.training.overhead import beside, lowering, overhead
from examples.ranks import on_ranks

IN_A_ROW_RANKS, SWAP_RANKS, OWN_STEPS_RANKS = 4, 2, 5


def executor() -> None:
    """Measure steps in a row, with an optimizer step after each, and the host's time for ops, traces and swaps."""
    row = on_ranks(IN_A_ROW_RANKS, in_a_row)
    print(
        f"{row.steps} steps in a row by {METHOD} on {IN_A_ROW_RANKS} ranks, with a norm over all gradients: "
        f"{row.post_validated_ms:.0f} ms, {row.deviation:+.1%} against {row.steps} spans of {row.span_ms:.1f} ms, "
        f"one fill and one drain; {row.clipped_ms:.0f} ms if updates wait for the norm ({row.steps} makespans of "
        f"{row.makespan_ms:.1f} ms)"
    )
    torch.set_num_threads(1)  # as ranks have
    op = overhead()
    print(
        f"an op: {op.op_us:.0f} µs of host time beyond a plain run ({op.step_ms:.1f} against "
        f"{op.plain_ms:.1f} ms, {op.ops} ops)"
    )
    step = beside()
    ratios = ", ".join(f"{name} {ratio:.2f}" for name, ratio in step.ratios.items())
    print(f"a step of eight GPT blocks with tiny tensors, relative to a plain run: {ratios} ({step.plain_ms:.1f} ms)")
    print(
        f"a traced step: {op.traced_ratio:.3f} times the host's time, {op.followed_ratio:.3f} on average where a "
        "Follower traces"
    )
    schedule = lowering()
    print(
        f"a schedule of {schedule.ops} ops: {schedule.prepare_ms:.0f} ms in a thread beside the training "
        "until a rank can run it"
    )
    swap = on_ranks(SWAP_RANKS, swap_cost)
    print(
        f"a swap: a step takes {swap.ratio:.3f} times its time, {swap.prepared_ratio:.3f} while the offer is prepared "
        f"({swap.step_ms:.1f} ms without, {swap.swaps} swaps)"
    )
    own = on_ranks(OWN_STEPS_RANKS, own_steps)
    print(
        f"a schedule for every step, on {OWN_STEPS_RANKS} ranks: {own.overhead:+.1%} of a step of "
        f"{own.loaded_ms:.0f} ms by schedules that are loaded, {own.gain:.1%} less than by the best ones for equal "
        f"micro-batches; predicted times were off by {own.error:.1%} ({own.steps} steps)"
    )
