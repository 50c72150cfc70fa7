"""Draws PipeOffload's Figure 3 again, memory against the stages that each device offloads: `python
docs/better_than_linear.py`."""

from pathlib import Path

from optpipe import Device, Problem, Stage, certify
from optpipe.show.curves import chart
from optpipe_solver.systems.pipeoffload import pipe_offload

HERE = Path(__file__).parent
DEVICES, CHUNKS, MICROBATCHES = 8, 16, 8  # the paper's 8 devices with 16 stages each
KS = (0.2, 1.0)


def peaks_by_stages_offloaded(problem: Problem) -> list[int]:
    """Bytes of the fullest device if none, one, up to all stages of each device leave."""
    schedules = [pipe_offload(problem, leaving) for leaving in range(len(problem.stages) // len(problem.devices) + 1)]
    return [max(peak.bytes for peak in certify(problem, schedule).device) for schedule in schedules]


def shares(k: float) -> list[float]:
    """What the fullest device holds with 0, 1, ... stages of each device offloaded, of what it holds with none; F = B =
    W."""
    times = {
        "forward_ms": 1.0,
        "backward_input_ms": 1.0,
        "backward_weight_ms": 1.0,
        "offload_ms": 1.5 * k,
        "reload_ms": 1.5 * k,
    }
    sizes = {"activation_bytes": 1, "saved_for_weight_bytes": 1, "offload_bytes": 1}
    stages = [Stage(device=s % DEVICES, **times, **sizes) for s in range(DEVICES * CHUNKS)]
    problem = Problem(
        microbatches=MICROBATCHES, devices=(Device(activation_budget_bytes=10**9),) * DEVICES, stages=tuple(stages)
    )
    peaks = peaks_by_stages_offloaded(problem)
    return [peak / peaks[0] for peak in peaks]


def picture() -> str:
    """As SVG."""
    curves = {"linear": [100 * (1 - n / CHUNKS) for n in range(CHUNKS + 1)]}
    curves |= {f"uniform repeating, k = {k:g}": [100 * share for share in shares(k)] for k in KS}
    title = f"Memory by stages offloaded: {DEVICES} devices, {CHUNKS} each"
    points = {name: list(enumerate(values)) for name, values in curves.items()}
    return chart(points, title, "stages of each device that are offloaded", "%", logarithmic=False)


def main() -> None:
    (HERE / "pictures" / "systems" / "better-than-linear.svg").write_text(picture())
    for k in KS:
        print(f"k = {k:g}:", " ".join(f"{share:.0%}" for share in shares(k)))


if __name__ == "__main__":
    main()
