"""A model's experts, cut over ranks: parts of the tokens summed beneath the next part's experts, against one sum.

    PYTHONPATH=src python bench/experts.py
    PYTHONPATH=src python bench/experts.py --device cuda --ranks 4

The experts are those of Mixtral in transformers 5, by the implementation that it chooses, as `ut.nn.Experts` cuts them;
the routing is random and even. On a CPU the link is emulated (lane dma, paced); on a GPU it is peer memory. Forward
alone, and forward and backward. The last two variants are the rank's part without the sums, of all tokens at once and
in four parts: parts may be faster in themselves. All are interleaved; ratios are paired by round, 95% intervals.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch

import undertow as ut
from undertow.fabric.timer import Comparison, compare

PACE = "50MB/s,20us"


@dataclass(frozen=True)
class Size:
    hidden: int
    inner: int
    experts: int
    tokens: int
    dtype: torch.dtype
    strategies: tuple[str, ...]


SIZES = {
    "cpu": Size(512, 704, 8, 2048, torch.float32, ("serial:dma", "chunked:dma")),
    "cuda": Size(4096, 14336, 8, 4096, torch.bfloat16, ("serial:peer", "chunked:peer")),
}
TOP = 2


def measure(rounds: int, backward: bool) -> Comparison:
    from transformers import AutoConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    group = ut.init()
    size = SIZES[group.device.type]
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "mixtral", hidden_size=size.hidden, intermediate_size=size.inner, num_local_experts=size.experts
    )
    config._experts_implementation = "grouped_mm"
    whole = MixtralExperts(config).to(group.device, size.dtype)
    for weight in whole.parameters():
        torch.nn.init.normal_(weight, std=0.02)
    layers = {
        strategy: ut.nn.TensorParallelExperts(copy.deepcopy(whole), unit=8, strategy=strategy)
        for strategy in size.strategies
    }
    x = torch.randn(size.tokens, size.hidden, device=group.device, dtype=size.dtype)
    likely, chosen = torch.softmax(torch.randn(size.tokens, size.experts, device=group.device), -1).topk(TOP, -1)

    def alone(parts: int) -> Callable[..., torch.Tensor]:
        layer = layers[size.strategies[0]]

        def run(*rows: torch.Tensor) -> torch.Tensor:
            cut = zip(*(one.chunk(parts) for one in rows), strict=True)
            weights = (layer.gate_up_proj, layer.down_proj)
            return torch.cat([layer._compute((x, likely, chosen), weights) for x, chosen, likely in cut])

        return run

    def step(layer: Callable[..., torch.Tensor]) -> Callable[[], torch.Tensor]:
        def run() -> torch.Tensor:
            if not backward:
                with torch.no_grad():
                    return layer(x, chosen, likely)
            given = x.clone().requires_grad_()
            layer(given, chosen, likely.clone().requires_grad_()).square().sum().backward()
            assert given.grad is not None
            return given.grad

        return run

    variants = {name: step(layer) for name, layer in layers.items()}
    first, *others = [run().float() for run in variants.values()]
    for other in others:
        torch.testing.assert_close(other, first, rtol=2e-2, atol=2e-2 * float(first.abs().max()))
    variants |= {"alone": step(alone(1)), "alone, parts": step(alone(4))}
    calls = 4 if group.device.type == "cuda" else None  # the hosts run ahead of the GPU
    found = compare(variants, repeats=rounds, calls=calls, reduce_max=group.reduce_max, before=group.barrier)
    group.check()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--device", choices=list(SIZES), default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    size, ranks = SIZES[options.device], options.ranks
    env = {"UNDERTOW_DMA_PACE": PACE} if options.device == "cpu" else {}
    link = f"emulated link of {PACE}" if options.device == "cpu" else "peer memory"
    print(f"{size.tokens} tokens of {size.hidden}, {size.experts} experts of {size.inner}, {ranks} ranks, {link}")
    for backward in (False, True):
        arguments = (options.rounds, backward)
        found = ut.launch(measure, ranks, device=options.device, args=arguments, env=env, deadline=60)[0]
        for name in found.names:
            time, ratio = found.estimate(name), found.speedup(name, over=size.strategies[0])
            print(
                f"{'forward, backward' if backward else 'forward':>17}  {name:>13}  {time.median * 1e3:8.1f} ms"
                f"   {ratio.median:.2f}x  [{ratio.low:.2f}, {ratio.high:.2f}]"
            )


if __name__ == "__main__":
    main()
