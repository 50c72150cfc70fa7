"""Metrics for Prometheus. They are of this process, except that the API counts the jobs of all."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

REGISTRY = CollectorRegistry()

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.15, 0.3, 1.0, 3.0, 10.0, 60.0)
_SOLVE_SECONDS = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0)

JOBS = Gauge("optpipe_jobs", "Jobs", ["state"], registry=REGISTRY)
REQUESTS = Histogram(
    "optpipe_request_seconds", "HTTP requests", ["method", "route", "status"], buckets=_SECONDS, registry=REGISTRY
)
FIRST = Histogram(
    "optpipe_first_schedule_seconds", "From a submission to its first schedule", buckets=_SECONDS, registry=REGISTRY
)
SUBMITTED = Counter("optpipe_jobs_submitted", "Jobs accepted", registry=REGISTRY)
# result: exact, near, miss, failed
CACHE = Counter("optpipe_cache_lookups", "Lookups in the cache", ["result"], registry=REGISTRY)
STREAMS = Gauge("optpipe_event_streams", "Open event streams", registry=REGISTRY)
ADOPTIONS = Counter("optpipe_adoptions", "Schedules adopted by trainings", registry=REGISTRY)
SOLVES = Histogram(
    "optpipe_solve_seconds",
    "Search time of jobs that ended here",
    ["state"],
    buckets=_SOLVE_SECONDS,
    registry=REGISTRY,
)
INCUMBENTS = Counter("optpipe_incumbents", "Verified schedules stored", registry=REGISTRY)
REJECTED = Counter("optpipe_rejected_schedules", "Invalid schedules and frames of solvers", registry=REGISTRY)
CRASHES = Counter("optpipe_solver_crashes", "Solver processes that crashed", registry=REGISTRY)
LOST = Counter("optpipe_lost_workers", "Jobs taken from lost workers", registry=REGISTRY)
GAP = Histogram(
    "optpipe_gap",
    "Gap of jobs that ended here",
    buckets=(0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    registry=REGISTRY,
)
