"""What a stage keeps of a micro-batch, how it leaves the device, and how it comes back.

- `storage`: storages and whether they still take memory;
- `activation`: the tensors that autograd saved for one micro-batch, offloaded and reloaded in parts;
- `engines`: what runs transfers beside compute: a thread on CPU, a side stream on CUDA;
- `host_pool`, `link`, `shared_link`: offloads to host memory; `peers`: evictions to another rank;
"""
