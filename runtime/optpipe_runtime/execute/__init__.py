"""Runs one rank's plan, op by op.

- `rank`: what one rank has: stages, connections, host memory; and the `Handler` of a kind of op;
- `executor`: one step; `report`: what comes of it;
- `batch`: cuts a batch into micro-batches, and has their shapes;
- `messages`: activations and gradients between ranks;
- `gradients`: their sums become means over micro-batches and over the replicas;
- `learner`: learns before the first step what passes between stages.
"""
