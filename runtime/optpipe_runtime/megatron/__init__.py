"""Schedules in Megatron-core's training loop: `function` stands in the place of Megatron's own
`get_forward_backward_func`, `chunk` makes a stage of Megatron's model chunk, `options` says which of Megatron's options
it can have."""

from optpipe_runtime.megatron.function import ForwardBackward, forward_backward_func, use_in_megatron

__all__ = ["ForwardBackward", "forward_backward_func", "use_in_megatron"]
