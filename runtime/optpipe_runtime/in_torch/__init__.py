"""PyTorch's own pipelining: `schedule` runs schedules with offloads in it, `traces` makes traces of it."""

from optpipe_runtime.in_torch.schedule import TorchSchedule, torch_schedule
from optpipe_runtime.in_torch.traces import name_ranges, record_trace

__all__ = ["TorchSchedule", "name_ranges", "record_trace", "torch_schedule"]
