"""Measures the user's own stages: op times, bytes and messages.

- `profiler`: a `Problem` from measurements before the training, on all ranks `together`; `measured`: what comes of it;
- `kernels`: parameters of the cost model, from kernels of this GPU;
- `drift`: op times while the training goes on, and how far they are from the profile.
"""
