"""What the benchmark `gpu` cannot measure without CUDA."""

from __future__ import annotations

ON_CUDA = {
    "memory_allocated above it, of its peak",
    "num_alloc_retries in steady state",
    "num_device_alloc in steady state",
}
