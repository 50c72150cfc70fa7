"""The device that tests compute on: the CPU, or under `make test-gpu` the GPU of this process."""

import os

import torch

KIND = os.environ.get("OPTPIPE_TEST_DEVICE", "cpu")
ON_CUDA = KIND == "cuda"
EXACT = not ON_CUDA  # on CUDA several kernels add in any order
if ON_CUDA:
    torch.backends.cudnn.allow_tf32 = False  # of convolutions, which would have ten bits


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if ON_CUDA else torch.device("cpu")


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected.detach(), rtol=1e-4, atol=1e-4)
