"""A model's own experts over ranks that all hold the same tokens: every expert is cut, and the results are summed once.

    reference:  for each token t and each of its experts e, with weight p:
                    y_t += p * (down_e @ (act(gate_e @ x_t) * (up_e @ x_t)))

| tensor | whole | on rank r |
|---|---|---|
| gate_up_proj | [E, 2 I, H]: gates, then ups | [E, 2 I_r, H]: its gates, then its ups |
| down_proj | [E, H, I] | [E, H, I_r] |
| hidden_states, top_k_index, top_k_weights | [T, H], [T, k], [T, k] | the same |
| result | [T, H] | the same |

Gate and up act number by number, so rank r computes numbers I_r of every expert and with them its part of y_t. Whole
experts on each rank (E / R of them) would make longer rows, but the rank of a busy expert would be waited for, and E
would have to divide. Cut so, ranks have the same work whatever the router says, and any R up to I / unit will do.

What is computed with the shards is the model's own forward, and so the implementation it was told to use (grouped
matmuls, or another one); `rows_all_reduce` sums it, beneath the experts of the next tokens where it is told to.
Its gradients of x and of the routing weights are sums over ranks, so the router, which every rank holds whole, gets
complete and equal gradients everywhere. Layers before and after are as they would be on one rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from ..errors import InvalidArgument
from ..ops.rows_all_reduce import GRAINS, Tensors, rows_all_reduce
from .sharded import Cut, Sharded, check_strategy

if TYPE_CHECKING:
    from .sharded import AnyGroup

NAMES = ("gate_up_proj", "down_proj")


class TensorParallelExperts(Sharded):
    """The shards of `experts`, a module that is called as those of Mixtral and Qwen3 in transformers 5.

    It keeps `experts` for its forward; its parameters are these shards from now on. `unit`: inner numbers that stay
    together.
    """

    gate_up_proj: torch.nn.Parameter
    down_proj: torch.nn.Parameter

    def __init__(
        self, experts: torch.nn.Module, *, group: AnyGroup = None, unit: int = 1, strategy: str = "auto"
    ) -> None:
        check_strategy(strategy)
        grain, colon, lane = strategy.partition(":")
        super().__init__(group, strategy if grain in ("auto", *GRAINS) else f"chunked{colon}{lane}")
        up_cut, down_cut = cuts_of(experts, unit, self.ranks)
        gate_up, down = (experts.get_parameter(name) for name in NAMES)
        self.experts = down.shape[0]
        self.add_sharded(NAMES[0], gate_up, up_cut, gate_up.requires_grad)
        self.add_sharded(NAMES[1], down, down_cut, down.requires_grad)
        for name in NAMES:
            setattr(experts, name, torch.nn.Parameter(torch.empty(0, device="meta")))
        self._model = (experts,)  # in a tuple: no module of this one, whose parameters would count

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden_states [T, H], and of each token k experts and their weights [T, k] -> [T, H]."""
        if hidden_states.dim() != 2 or top_k_index.dim() != 2:
            was = f"of shape {list(hidden_states.shape)} with top_k_index {list(top_k_index.shape)}"
            raise InvalidArgument(argument="hidden_states", was=was, must="[T, H] with [T, k]")
        return rows_all_reduce(
            self._compute, (hidden_states, top_k_weights, top_k_index), (self.gate_up_proj, self.down_proj),
            hidden_states.shape[1], group=self.group_name, strategy=self.strategy,
        )  # fmt: skip

    def _compute(self, rows: Tensors, weights: Tensors) -> torch.Tensor:
        """The model's own forward with these weights."""
        x, likely, chosen = rows
        self._model[0].train(self.training)
        made: torch.Tensor = torch.func.functional_call(
            self._model[0], dict(zip(NAMES, weights, strict=True)), (x, chosen, likely)
        )
        return made

    def extra_repr(self) -> str:
        _, hidden, inner = self.down_proj.shape
        whole = self.cuts[NAMES[1]].parts[0]
        return f"{self.experts} x {hidden} x {whole} of which {inner}, rank {self.rank}/{self.ranks}"


def cuts_of(experts: torch.nn.Module, unit: int, ranks: int) -> tuple[Cut, Cut]:
    """Of both tensors; what cannot be cut is refused."""
    for reason in _unlike(experts):
        must = (
            f"one with {NAMES[0]} [E, 2 I, H] and {NAMES[1]} [E, H, I], gates before ups, and nothing else;"
            " leave others out of the plan, and every rank keeps them whole"
        )
        raise InvalidArgument(argument="the module", was=reason, must=must)
    inner = experts.get_parameter(NAMES[1]).shape[2]
    up_cut = Cut.of("the inner size", 1, (inner, inner), (unit, unit), ranks)
    return up_cut, Cut.of("the inner size", 2, (inner,), (unit,), ranks)


def _unlike(experts: torch.nn.Module) -> Iterator[str]:
    """What is otherwise than this layer can cut."""
    held = {name: list(one.shape) for name, one in (*experts.named_parameters(), *experts.named_buffers())}
    gate_up, down = (held.get(name, []) for name in NAMES)
    fits = len(gate_up) == len(down) == 3 and gate_up == [down[0], 2 * down[2], down[1]]
    if set(held) != set(NAMES) or not fits:
        yield f"{type(experts).__name__} with " + (
            ", ".join(f"{name} {shape}" for name, shape in held.items()) or "no tensors"
        )
    if not getattr(experts, "is_concatenated", True):
        yield f"{type(experts).__name__} with gates and ups in turn"
    if getattr(experts, "has_post_expert_norm", False):
        yield f"{type(experts).__name__} with a norm of each expert's result"
