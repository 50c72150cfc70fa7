"""Schedules in Megatron-core's training loop: `function` takes the place of Megatron's own `get_forward_backward_func`,
`chunk` makes a model chunk of Megatron's a stage."""

from optpipe_runtime.megatron.function import ForwardBackward, forward_backward_func

__all__ = ["ForwardBackward", "forward_backward_func"]
