"""What ranks come to need, imported and compiled once, in the process that they are forked from: no thread begins."""

import torch._dynamo  # by torch's optimizers
import torch.distributed.fsdp
import torch.distributed.tensor.parallel
import torch.profiler

import optpipe_runtime.pipeline
from optpipe import Schedule, anytime
from optpipe.evaluate.jit import compile_at_once
from support import problems
from support.problems import units
from support.ranks import cases, worker

__all__ = ["anytime", "cases", "optpipe_runtime", "problems", "torch", "worker"]

compile_at_once()  # as ranks do
_ = Schedule.parse(units.units(1, 1), [["0F0", "0BW0"]]).compiled.places
