"""Runs one rank's plan, op by op.

- `rank`: what one rank has: stages, connections, host memory;
- `executor`: one step; `report`: what it tells; `batch`: cuts a batch into micro-batches;
- `messages`: activations and gradients between ranks;
- `learner`: learns before the first step what passes between stages;
- `host_optimizer`: an optimizer that runs on the host; `host_updates`: what a step does with a rank's (ops G, U, P).
"""
