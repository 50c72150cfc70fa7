"""What a stage keeps of a micro-batch, how it leaves the device, and how it comes back.

- `activation`: what autograd has saved for one micro-batch, offloaded and reloaded in parts;
- `engines`: what runs transfers beside compute: a thread on CPU, a side stream on CUDA;
- `host_memory`, `link`: offloads to host memory; `pci`: where a GPU is.
"""
