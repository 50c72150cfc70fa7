"""Runs one rank's plan, op by op.

- `rank`: what one rank has: stages, connections, host memory;
- `executor`: one step; `report`: what it tells; `batch`: cuts a batch into micro-batches;
- `messages`: activations and gradients between ranks;
- `gradients`: their sums become means over micro-batches and over the replicas;
- `learner`: learns before the first step what passes between stages.
"""
