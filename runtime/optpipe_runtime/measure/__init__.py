"""Measures the user's own stages: op times, bytes and messages.

- `profiler`: a `Problem` from measurements before the training; `trial`: one stage, tried alone;
- `drift`: op times while the training goes on, and how far they are from the profile.
"""
