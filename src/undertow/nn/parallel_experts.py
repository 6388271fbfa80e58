"""A model's own experts over ranks that all hold the same tokens: every expert is cut, and the results are summed once.

    reference:  for each token t and each of its experts e, with weight p:
                    y_t += p * (down_e @ (act(gate_e @ x_t) * (up_e @ x_t)))

| tensor | whole | on rank r |
|---|---|---|
| gate_up_proj | [E, 2 I, H]: gates, then ups | [E, 2 I_r, H]: its gates, then its ups |
| down_proj | [E, H, I] | [E, H, I_r] |
| the same turned round (`is_transposed`) | [E, H, 2 I], [E, I, H] | [E, H, 2 I_r], [E, I_r, H] |
| gates and ups in turn (`is_concatenated` is False) | g0 u0 g1 u1 ... | its pairs |
| no gates (`has_gate` is False) | `up_proj` [E, I, H] | [E, I_r, H] |
| biases (`has_bias`) | [E, 2 I], [E, H] | [E, 2 I_r], [E, H], which rank 0 adds |
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
from ..ops.rows_all_reduce import GRAINS, Tensors, held_by_all, rows_all_reduce
from .sharded import Cut, Sharded, check_strategy

if TYPE_CHECKING:
    from .sharded import AnyGroup

DOWN, DOWN_BIAS = "down_proj", "down_proj_bias"


class TensorParallelExperts(Sharded):
    """The shards of `experts`, a module that is called as those of Mixtral and Qwen3 in transformers 5.

    It keeps `experts` for its forward; its parameters are these shards from now on. `unit`: inner numbers that stay
    together.
    """

    gate_up_proj: torch.nn.Parameter
    down_proj: torch.nn.Parameter
    down_proj_bias: torch.nn.Parameter | None

    def __init__(
        self, experts: torch.nn.Module, *, group: AnyGroup = None, unit: int = 1, strategy: str = "auto"
    ) -> None:
        check_strategy(strategy)
        grain, colon, lane = strategy.partition(":")
        super().__init__(group, strategy if grain in ("auto", *GRAINS) else f"chunked{colon}{lane}")
        cuts = cuts_of(experts, unit, self.ranks)
        self.experts, self.hidden = experts.get_parameter(DOWN).shape[0], _hidden(experts)
        for name, whole in list(experts.named_parameters()):
            if name in cuts:
                self.add_sharded(name, whole, cuts[name], whole.requires_grad)
            else:
                self.register_parameter(name, whole)
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
            self._compute, (hidden_states, top_k_weights, top_k_index), list(self._weights().values()),
            hidden_states.shape[1], group=self.group_name, strategy=self.strategy,
        )  # fmt: skip

    def _weights(self) -> dict[str, torch.Tensor]:
        """What this rank computes with. What is added behind the sum over inner numbers is the first rank's to add; all
        hold it, and get its gradient from there."""
        found: dict[str, torch.Tensor] = dict(self._parameters)  # type: ignore[arg-type]
        if DOWN_BIAS in found:
            found[DOWN_BIAS] = held_by_all(found[DOWN_BIAS], self.group_name) * float(self.rank == 0)
        return found

    def _compute(self, rows: Tensors, weights: Tensors) -> torch.Tensor:
        """The model's own forward with these weights."""
        x, likely, chosen = rows
        self._model[0].train(self.training)
        made: torch.Tensor = torch.func.functional_call(
            self._model[0], dict(zip(self._parameters, weights, strict=True)), (x, chosen, likely)
        )
        return made

    def extra_repr(self) -> str:
        cut = self.cuts[DOWN]
        inner = f"{cut.parts[0]} of which {cut.sizes(self.rank)[0]}"
        return f"{self.experts} x {self.hidden} x {inner}, rank {self.rank}/{self.ranks}"


def _hidden(experts: torch.nn.Module) -> int:
    return experts.get_parameter(DOWN).shape[2 if _is(experts, "is_transposed") else 1]


def _is(experts: torch.nn.Module, what: str, otherwise: bool = False) -> bool:
    """What experts of transformers 5 say of their form."""
    return bool(getattr(experts, what, otherwise))


def cuts_of(experts: torch.nn.Module, unit: int, ranks: int) -> dict[str, Cut]:
    """Of all tensors but a bias behind the sum; what cannot be cut is refused."""
    for reason in _unlike(experts):
        must = (
            "one with gate_up_proj [E, 2 I, H] and down_proj [E, H, I], or in another form that it tells of as those of"
            " transformers 5 do, and nothing else; leave others out of the plan, and every rank keeps them whole"
        )
        raise InvalidArgument(argument="the module", was=reason, must=must)
    up, shapes = _form(experts)
    turned, in_turn = _is(experts, "is_transposed"), not _is(experts, "is_concatenated", True)
    inner = shapes[DOWN][1 if turned else 2]
    parts, units = [inner], [unit]
    if up != "up_proj":
        parts, units = ([2 * inner], [2 * unit]) if in_turn else ([inner, inner], [unit, unit])
    Cut.of("the inner size", 0, (inner,), (unit,), ranks)  # which tells of it as it is
    found = {
        up: Cut.of("the inner size", 2 if turned else 1, parts, units, ranks),
        f"{up}_bias": Cut.of("the inner size", 1, parts, units, ranks),
        DOWN: Cut.of("the inner size", 1 if turned else 2, (inner,), (unit,), ranks),
    }
    return {name: cut for name, cut in found.items() if name in shapes}


def _form(experts: torch.nn.Module) -> tuple[str, dict[str, list[int]]]:
    """The name of what stands before the activation, and the shapes of all there is."""
    held = {name: list(one.shape) for name, one in (*experts.named_parameters(), *experts.named_buffers())}
    return "gate_up_proj" if _is(experts, "has_gate", True) else "up_proj", held


def _unlike(experts: torch.nn.Module) -> Iterator[str]:
    """What is otherwise than this layer can cut."""
    up, held = _form(experts)
    down = held.get(DOWN, [])
    expected: dict[str, list[int]] = {}
    if len(down) == 3:
        count, hidden, inner = down if not _is(experts, "is_transposed") else (down[0], down[2], down[1])
        wide = inner if up == "up_proj" else 2 * inner
        expected = {up: [count, hidden, wide] if _is(experts, "is_transposed") else [count, wide, hidden], DOWN: down}
        if _is(experts, "has_bias"):
            expected |= {f"{up}_bias": [count, wide], DOWN_BIAS: [count, hidden]}
    if not expected or held != expected:
        yield f"{type(experts).__name__} with " + (
            ", ".join(f"{name} {shape}" for name, shape in held.items()) or "no tensors"
        )
    if _is(experts, "has_post_expert_norm"):
        yield f"{type(experts).__name__} with a norm of each expert's result"
