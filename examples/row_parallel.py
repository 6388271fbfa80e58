"""A row-parallel linear layer in ten lines.

undertow run -n 4 examples/row_parallel.py          (ranks on this machine's GPU, or on its CPU)
torchrun --nproc-per-node 4 examples/row_parallel.py
"""

import torch

import undertow as ut

group = ut.init()
x = torch.randn(512, 256, device=group.device)  # every rank holds its slice of K
w = torch.randn(256, 128, device=group.device)
y = ut.matmul_all_reduce(x, w, strategy="chunked:peer")  # y = sum over ranks of x @ w, chunk by chunk
if group.rank == 0:
    print(y.shape, ut.explain())
ut.shutdown()
