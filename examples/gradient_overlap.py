"""Data-parallel training: gradients are summed over the ranks while the backward pass goes on.

Every layer's gradient is handed to `beside.post` as soon as autograd has it, and its all-reduce runs beside the
backward pass of the layers before. Three ways, the same numbers in the end:

    serial     the backward pass, then all the sums
    base       two streams (threads), nothing else said
    advised    share="auto": the first steps are timed, then the model chooses lane and share

    undertow run -n 2 --device cpu examples/gradient_overlap.py
    undertow run -n 4 --device cuda examples/gradient_overlap.py [dma | peer | auto]

All three use the same lane, `dma` unless another is named. On a CPU set UNDERTOW_DMA_PACE=500MB/s, so that its copies
have a link to cross.
"""

from __future__ import annotations

import statistics
import sys
import time

import torch

import undertow as ut
from undertow import collective

LAYERS, STEPS = 8, 7


def main() -> None:
    group = ut.init()
    on_gpu = group.device.type == "cuda"
    width, batch = (4096, 8192) if on_gpu else (768, 1024)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    lane = sys.argv[1] if len(sys.argv) > 1 else "dma"
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(LAYERS)))
    model.to(group.device, dtype)
    x = torch.full((batch, width), 1.0 + group.rank, device=group.device, dtype=dtype)

    def step(share: str) -> tuple[float, list[torch.Tensor]]:
        """Seconds of one backward pass with its sums, and the gradients, which are those of the sum of all ranks."""
        model.zero_grad(set_to_none=True)
        loss = model(x).float().mean()
        finish(group)
        began = time.perf_counter()
        with ut.concurrent(share=share, lane=lane, name="gradients") as beside:
            hooks = [
                one.register_post_accumulate_grad_hook(
                    lambda parameter: beside.post(lambda: collective.all_reduce(parameter.grad)) and None
                )
                for one in model.parameters()
            ]
            loss.backward()
        finish(group)
        took = group.reduce_max([time.perf_counter() - began])[0]
        for one in hooks:
            one.remove()
        return took, [one.grad.clone() for one in model.parameters() if one.grad is not None]

    for _ in range(6):  # "auto" times its first steps, all of them load kernels
        for share in ("serial", "base", "auto"):
            step(share)
    seconds: dict[str, list[float]] = {"serial": [], "base": [], "auto": []}
    for _ in range(STEPS):
        found = {}
        for share in seconds:
            took, found[share] = step(share)
            seconds[share].append(took)
        for share in ("base", "auto"):
            for expected, gradient in zip(found["serial"], found[share], strict=True):
                assert torch.equal(expected, gradient), f"{share} gave another gradient"
    if group.rank == 0:
        serial = statistics.median(seconds["serial"])
        for share, times in seconds.items():
            median = statistics.median(times)
            print(f"{share:8} {median * 1e3:8.2f} ms   {serial / median:.2f}x")
        print(ut.explain())


def finish(group: ut.Group) -> None:
    """All that was enqueued is done, on every rank."""
    if group.device.type == "cuda":
        torch.cuda.synchronize()
    group.barrier()


if __name__ == "__main__":
    main()
