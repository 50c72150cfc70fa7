"""The planner: how to divide a transformer over GPUs, and by which schedule to run it (docs/plan.md)."""
