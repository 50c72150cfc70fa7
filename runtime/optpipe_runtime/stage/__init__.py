"""One pipeline stage: the ops F, B, W, BW, C, O, D, R, E and L on the user's module. B is the input gradient alone
(PyTorch's I), BW the full backward (PyTorch's B).

- `io`: the tensors that pass between stages;
- `runner`: the ops; `learn`: finds the tensors by running the forward once;
- `replay`: runs a forward again with the random numbers and buffers of the first time, and undoes a step;
- `split`: the split backward.
"""
