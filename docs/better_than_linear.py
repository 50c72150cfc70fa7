"""Draws PipeOffload's Figure 3 again, memory against the stages that each device offloads: `python
docs/better_than_linear.py`."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from optpipe import Device, Problem, Stage, certify
from optpipe_solver.systems.pipeoffload import pipe_offload

HERE = Path(__file__).parent
DEVICES, CHUNKS, MICROBATCHES = 8, 16, 8  # the paper's 8 devices with 16 stages each
CURVES = {0.2: "#2F6DB5", 1.0: "#8E44AD"}  # k, and the colour
LEFT, TOP, WIDTH, HEIGHT = 64, 60, 420, 260


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
    title = f"Memory by stages offloaded: {DEVICES} devices, {CHUNKS} each"
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 24} {TOP + HEIGHT + 56}"'
        f' width="{LEFT + WIDTH + 24}" height="{TOP + HEIGHT + 56}" font-family="system-ui, sans-serif" '
        'font-size="11">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        f'<text x="20" y="26" font-size="15" font-weight="600" fill="#111">{title}</text>',
    ]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        body.append(f'<line x1="{LEFT}" y1="{_y(share)}" x2="{LEFT + WIDTH}" y2="{_y(share)}" stroke="#E3E8EE"/>')
        body.append(f'<text x="{LEFT - 8}" y="{_y(share) + 4}" text-anchor="end" fill="#777">{share:.0%}</text>')
    for n in range(0, CHUNKS + 1, 4):
        body.append(f'<text x="{_x(n)}" y="{TOP + HEIGHT + 18}" text-anchor="middle" fill="#777">{n}</text>')
    middle = LEFT + WIDTH / 2
    body.append(
        f'<text x="{middle}" y="{TOP + HEIGHT + 40}" text-anchor="middle" fill="#333">stages of each device that '
        "are offloaded</text>"
    )
    body += _curve([1 - n / CHUNKS for n in range(CHUNKS + 1)], "#999", "linear", 44, dashed=True)
    for place, (k, colour) in enumerate(CURVES.items(), start=1):
        body += _curve(shares(k), colour, f"uniform repeating, k = {k:g}", 44 + 18 * place)
    return "\n".join([*body, "</svg>"]) + "\n"


def _curve(values: Sequence[float], colour: str, name: str, legend: float, dashed: bool = False) -> list[str]:
    dashes = ' stroke-dasharray="5 4"' if dashed else ""
    points = [(_x(n), _y(value)) for n, value in enumerate(values)]
    lines = [
        f'<line x1="{a:.1f}" y1="{b:.1f}" x2="{c:.1f}" y2="{d:.1f}" stroke="{colour}" stroke-width="1.6"{dashes}/>'
        for (a, b), (c, d) in pairwise(points)
    ]
    marks = [] if dashed else [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{colour}"/>' for x, y in points]
    key = LEFT + WIDTH - 170
    sample = (
        f'<line x1="{key}" y1="{TOP + legend - 40}" x2="{key + 24}" y2="{TOP + legend - 40}" '
        f'stroke="{colour}" stroke-width="1.6"{dashes}/>'
    )
    return [*lines, *marks, sample, f'<text x="{key + 30}" y="{TOP + legend - 36}" fill="#333">{name}</text>']


def _x(n: float) -> float:
    return LEFT + WIDTH * n / CHUNKS


def _y(share: float) -> float:
    return TOP + HEIGHT * (1 - share)


def main() -> None:
    (HERE / "pictures" / "systems" / "better-than-linear.svg").write_text(picture())
    for k in CURVES:
        print(f"k = {k:g}:", " ".join(f"{share:.0%}" for share in shares(k)))


if __name__ == "__main__":
    main()
