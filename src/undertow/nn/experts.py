"""A mixture of experts over ranks: tokens travel to the ranks of their experts and back, beneath the experts' matmuls.

    reference:  for each token t and each of its top experts e, with weight p:
                    y_t += p * (down_e @ (silu(gate_e @ x_t) * (up_e @ x_t)))

Rank r holds experts r E/R ... (r + 1) E/R - 1 and tokens of its own. Pairs of token and expert stand by expert, and so
by rank; weights are grouped, one for each expert of a rank, and there is one call of each kind:

    all_to_all_matmul    tokens of all ranks for this rank's experts arrive, and are multiplied as they do
    matmul_all_to_all    what the experts made of them leaves for the ranks they came from as it is made

`strategy` is that of the second; the first, which has fewer grains, is `chunked` where that is signaled; with `auto`
each is measured. How many tokens go where is told once for each call. That number is data, so this layer is no one
graph of a compiler.
Gradients of experts are complete, since all their tokens came to them; the router is held by every rank and sees only
its own tokens, as any layer under data parallelism, and wants the same treatment (DDP, or a sum over the group).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..errors import InvalidArgument
from ..fabric.registry import named
from ..ops.all_to_all_matmul import all_to_all_matmul, mirrored_strategy
from ..ops.matmul_all_to_all import matmul_all_to_all
from .sharded import Cut, Sharded

if TYPE_CHECKING:
    from .sharded import AnyGroup


class ExpertParallelMLP(Sharded):
    """`experts` gated feed-forward blocks, of which each token takes the best `top_k`.

    Parameters: `router` [experts, hidden] on all ranks; `gate_up` [experts, 2 intermediate, hidden] and `down`
    [experts, hidden, intermediate], cut over ranks.
    """

    gate_up: torch.nn.Parameter
    down: torch.nn.Parameter

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        experts: int,
        top_k: int = 2,
        *,
        group: AnyGroup = None,
        strategy: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(group, strategy)
        if experts < 1 or experts % self.ranks:
            must = f"a multiple of {self.ranks}, so that all ranks hold as many; use another number of ranks"
            raise InvalidArgument(argument="experts", was=str(experts), must=must)
        if not 1 <= top_k <= experts:
            raise InvalidArgument(argument="top_k", was=str(top_k), must=f"between 1 and {experts}, the experts")
        self.experts, self.top_k = experts, top_k
        cut = Cut.of("experts", 0, (experts,), (1,), self.ranks)
        self.router = torch.nn.Parameter(_uniform((experts, hidden_size), device, dtype))
        self.add_sharded("gate_up", _uniform((experts, 2 * intermediate_size, hidden_size), device, dtype), cut)
        self.add_sharded("down", _uniform((experts, hidden_size, intermediate_size), device, dtype), cut)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., hidden], this rank's tokens -> the same shape."""
        tokens = x.reshape(-1, x.shape[-1])
        likely = torch.softmax(tokens @ self.router.t(), -1, dtype=torch.float32)
        weights, chosen = likely.topk(self.top_k, -1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(tokens.dtype)
        order = chosen.view(-1).argsort(stable=True)  # pairs of token and expert, by expert
        counts = torch.bincount(chosen.view(-1), minlength=self.experts).tolist()
        everyones = named(self.group_name).exchange(counts, "tokens for each expert")
        here = self.experts // self.ranks
        sizes = [[row[rank * here : (rank + 1) * here] for rank in range(self.ranks)] for row in everyones]
        token = order // self.top_k
        back = self._experts(tokens[token], sizes)
        y = torch.zeros_like(tokens).index_add(0, token, back * weights.view(-1)[order].unsqueeze(-1))
        return y.view(x.shape)

    def _experts(self, rows: torch.Tensor, sizes: Sequence[Sequence[Sequence[int]]]) -> torch.Tensor:
        """What the experts of all ranks make of the rows that this rank has for them: sizes[sender][rank][expert]."""
        group, there = self.group_name, mirrored_strategy(self.strategy)
        both = all_to_all_matmul(rows, self.gate_up.mT, group_sizes=sizes, group=group, strategy=there)
        gate, up = both.chunk(2, -1)
        hidden = torch.nn.functional.silu(gate) * up
        home = [list(column) for column in zip(*sizes, strict=True)]
        return matmul_all_to_all(hidden, self.down.mT, group_sizes=home, group=group, strategy=self.strategy)


def _uniform(shape: tuple[int, ...], device: torch.device | str | None, dtype: torch.dtype | None) -> torch.Tensor:
    """As torch.nn.Linear begins: uniform, by the inner size."""
    bound = shape[-1] ** -0.5
    return torch.empty(shape, device=device, dtype=dtype).uniform_(-bound, bound)
