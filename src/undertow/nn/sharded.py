"""Parameters that are shards: how one was cut from the whole, and how the whole is put together again.

A dimension is cut in *units* that must stay together (the numbers of an attention head), by torch.tensor_split's rule.
A parameter may hold several parts of one dimension (queries, keys and values), each cut for itself:

    whole    | q0 q1 q2 q3 | k0 k1 | v0 v1 |
    rank 0   | q0 q1 | k0 | v0 |
    rank 1   | q2 q3 | k1 | v1 |

A checkpoint is that of the ordinary module: `load_state_dict` takes whole tensors, and cuts them, or shards as they
are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.distributed.tensor import DTensor

from ..errors import InvalidArgument
from ..fabric.registry import as_group
from ..ops.operands import check_dtype
from ..plan.plan import as_written, split

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from ..fabric.group import Group

    AnyGroup = Group | dist.ProcessGroup | DeviceMesh | str | None


class Narrowed(Protocol):
    """A whole tensor of which parts are taken."""

    def narrow(self, dim: int, start: int, length: int, /) -> torch.Tensor: ...


@dataclass(frozen=True)
class Cut:
    """Dimension `dim` of a whole tensor: `parts` and `units` are the sizes of its parts and of what stays together."""

    dim: int
    parts: tuple[int, ...]
    units: tuple[int, ...]
    ranks: int

    @staticmethod
    def of(argument: str, dim: int, parts: Sequence[int], units: Sequence[int], ranks: int) -> Cut:
        """Refused where a rank would get nothing, or a unit would be torn apart."""
        for size, unit in zip(parts, units, strict=True):
            if unit < 1 or size % unit:
                raise InvalidArgument(argument=argument, was=str(size), must=f"a multiple of {unit}, its unit")
            if size // unit < ranks:
                must = f"at least {ranks * unit}, so that each of {ranks} ranks has a unit of {unit}; use fewer ranks"
                raise InvalidArgument(argument=argument, was=str(size), must=must)
        return Cut(dim, tuple(parts), tuple(units), ranks)

    def bounds(self, part: int, rank: int) -> tuple[int, int]:
        """Of one part: where the shard of `rank` begins and ends."""
        unit = self.units[part]
        start, stop = split(self.parts[part] // unit, self.ranks)[rank]
        return start * unit, stop * unit

    def sizes(self, rank: int) -> list[int]:
        """Of each part: how much `rank` holds."""
        return [stop - start for start, stop in (self.bounds(part, rank) for part in range(len(self.parts)))]

    def take(self, whole: Narrowed, rank: int) -> torch.Tensor:
        """The shard of `rank`."""
        found, first = [], 0
        for part, size in enumerate(self.parts):
            start, stop = self.bounds(part, rank)
            found.append(whole.narrow(self.dim, first + start, stop - start))
            first += size
        return torch.cat(found, self.dim)

    def join(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole, of the shards of all ranks."""
        cut = [torch.split(shard, self.sizes(rank), self.dim) for rank, shard in enumerate(shards)]
        return torch.cat([one[part] for part in range(len(self.parts)) for one in cut], self.dim)


def check_strategy(strategy: str) -> None:
    """Whether there is one of this name, wherever it can run."""
    if strategy != "auto":
        as_written(strategy)


class Sharded(torch.nn.Module):
    """A module whose parameters in `cuts` are shards. Holds the group's name, so it can be copied and pickled."""

    def __init__(self, group: AnyGroup, strategy: str) -> None:
        super().__init__()
        on = as_group(group)
        check_strategy(strategy)
        self.group_name, self.rank, self.ranks = on.name, on.rank, on.size
        self.strategy = strategy
        self.cuts: dict[str, Cut] = {}
        self._tied: dict[str, list[tuple[Sharded, str]]] = {}  # who holds a parameter, this one too; not as submodules

    def add_sharded(self, name: str, whole: torch.Tensor | None, cut: Cut, requires_grad: bool = True) -> None:
        """A parameter of this name with this rank's shard of `whole`; None for a parameter that is not there."""
        if whole is None:
            self.register_parameter(name, None)
            return
        check_dtype(name, whole.dtype)
        shard = cut.take(whole.detach(), self.rank).clone()
        self.register_parameter(name, torch.nn.Parameter(shard, requires_grad=requires_grad))
        self.cuts[name] = cut

    def tie(self, name: str, holders: list[tuple[Sharded, str]]) -> None:
        """Hold the same parameter under `name` as the others do, who are listed, and be listed."""
        if holders:
            self.register_parameter(name, holders[0][0].get_parameter(holders[0][1]))
        holders.append((self, name))
        self._tied[name] = holders

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *arguments: Any) -> None:
        """Whole tensors are cut before torch compares shapes; shards of this size are taken as they are."""
        state = dict(state_dict)
        take_shards(state, prefix, self, self.cuts, self.rank)
        before = dict(self._parameters)
        super()._load_from_state_dict(state, prefix, *arguments)
        for name, holders in self._tied.items():  # of which loading with assign=True made another parameter
            for module, own in holders:
                if module._parameters[own] is before[name]:
                    module._parameters[own] = self._parameters[name]


def take_shards(
    state: dict[str, Any], prefix: str, module: torch.nn.Module, cuts: Mapping[str, Cut], rank: int
) -> None:
    """In the place of whole tensors of `state`, for the parameters of `module` that are shards."""
    for name, cut in cuts.items():
        given, mine = state.get(prefix + name), getattr(module, name)
        if isinstance(given, DTensor) and not isinstance(mine, DTensor):
            given = state[prefix + name] = given.full_tensor()
        if isinstance(given, torch.Tensor) and given.shape != mine.shape:
            whole = list(mine.shape)
            whole[cut.dim] = sum(cut.parts)
            if list(given.shape) == whole:
                state[prefix + name] = cut.take(given, rank)
