"""Split backward: the input gradient now (B), the weight gradient later (W).

`backward` has the split backward of one stage. Each way leaves jobs to the `queue` of a micro-batch, which W runs:

- `ops`: linear layers, layer norms and products with a weight by hooks of their nodes, any other op with parameters by
  its own graph. While `Splitting` is active, it sees every call of torch. Where all ops with parameters are calls of
  modules (`Calls`), these have a forward of their own instead (`Hooked`);
- `weight_grads`: for a user's own autograd function;
- `Delayed`: for modules with a queue of their own, as TransformerEngine's.

Every other parameter gets its gradient at B: those of other norms, parameters that are computed from others, an LSTM's,
those of ops that stay in a compiled region, and all of a stage whose forward takes gradients itself.
"""

from optpipe_runtime.stage.split.backward import SplitBackward
from optpipe_runtime.stage.split.queue import WeightQueue, main_grad, weight_grads

__all__ = ["SplitBackward", "WeightQueue", "main_grad", "weight_grads"]
