"""Runs schedules for real, on torch: executor, offload, profiler, client."""
