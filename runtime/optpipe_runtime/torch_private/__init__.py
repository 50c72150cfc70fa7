"""The private names of torch that this runtime uses, each with the reason why. No other room uses one.

- `tensors`: tensors, storages, autograd, nested values, nn.Module and compiled regions;
- `checkpoints`: torch.utils.checkpoint; `groups`: process groups; `fsdp`: `fully_shard`;
- `pipelining`: torch's own pipelining.

`tests/runtime/test_torch_private.py` has a test for each name, which fails when torch changes it.
"""
