"""Ends with one sentence if torch cannot compute on a device: `python scripts/require_device.py cuda`."""

import sys

import torch

if sys.argv[1:] == ["cuda"] and not torch.cuda.is_available():
    sys.exit(
        f"there is no GPU here: torch {torch.__version__} sees no CUDA device; take a machine with an NVIDIA GPU and a "
        "torch built for CUDA, or DEVICE=cpu, which runs the same on the CPU"
    )
