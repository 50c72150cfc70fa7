"""Schedules in Megatron-core's training loop.

- `function`: in the place of Megatron's own `get_forward_backward_func`; `chunk`: Megatron's model chunk as a stage;
- `supported`: what a schedule cannot run with; `gradients`: how Megatron ends a step; `groups`: its process groups.
"""

from optpipe_runtime.megatron.function import ForwardBackward, forward_backward_func

__all__ = ["ForwardBackward", "forward_backward_func"]
