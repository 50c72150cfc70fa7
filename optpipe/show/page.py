"""A schedule as one self-contained HTML page: its figures, and the Gantt chart with a tooltip on every op."""

from __future__ import annotations

from html import escape

from optpipe.schedule import Schedule
from optpipe.show.svg import bytes_text, gantt

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; margin: 2rem; }
table { border-collapse: collapse; margin: 1rem 0; }
td, th { padding: .25rem .9rem .25rem 0; text-align: left; border-bottom: 1px solid #e5e8eb; }
.chart { overflow-x: auto; }
"""


def page(schedule: Schedule, lower_bound_ms: float | None = None) -> str:
    """The page as HTML text."""
    timeline, problem = schedule.timeline, schedule.problem
    certificate = schedule.compiled.certificate
    name = escape(problem.name or "schedule")
    rows = {
        "method": escape(schedule.method or "not named"),
        "makespan": f"{timeline.makespan_ms:.6g} ms",
        "span": f"{timeline.span_ms:.6g} ms",
        "lower bound": "not known" if lower_bound_ms is None else f"{lower_bound_ms:.6g} ms",
        "bubble": f"{timeline.bubble:.1%}",
    }
    facts = "".join(f"<tr><th>{key}</th><td>{value}</td></tr>" for key, value in rows.items())
    peaks = "".join(
        f"<tr><td>{d}</td><td>{bytes_text(device.bytes)}</td><td>{bytes_text(device.limit or 0)}</td>"
        f"<td>{bytes_text(host.bytes)}</td></tr>"
        for d, (device, host) in enumerate(zip(certificate.device, certificate.host, strict=True))
    )
    width = min(20_000, max(1200, int(timeline.makespan_ms and 1200 * problem.microbatches / 16)))
    return (
        '<!doctype html>\n<html lang="en"><head><meta '
        f'charset="utf-8"><title>{name}</title><style>{STYLE}</style></head><body>'
        f'<h1>{name}</h1><table>{facts}</table><div class="chart">{gantt(schedule, width=width)}</div>'
        f"<table><tr><th>device</th><th>peak</th><th>limit</th><th>host peak</th></tr>{peaks}</table></body></html>\n"
    )
