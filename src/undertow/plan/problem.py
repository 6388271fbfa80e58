"""A problem: which operator, on what shape, by how many ranks, on what device. What a plan is made for.

| operator | m x n | shards: rows that belong to each rank |
|---|---|---|
| matmul_all_reduce | the output | one shard of all m rows: every rank holds the sum |
| matmul_reduce_scatter | the output before it is scattered | of each destination, by torch.tensor_split's rule |
| matmul_all_to_all | this rank's output before it leaves | for each destination: this rank's splits, zeros allowed |
| all_to_all_matmul | this rank's rows of x as they arrived | of each sender: rows that come from there, zeros allowed |
| all_gather_matmul | the output, of this rank's columns | of each source, as they stand in the gathered input |
| embedding_all_to_all | all samples, and the columns of the rank that makes most | samples of each rank |

Of embedding_all_to_all `k` is how many rows a bag has on average, as a power of two.

All ranks run the same plan. Where ranks have different rows (all_to_all), the one with the most rows is planned for,
and the plan's parcels are fractions for everybody: `Problem.for_splits`. So a plan fits all counts of rows, and what
was found for some is run with others.

all_to_all_matmul is planned as its mirror image, a matmul_all_to_all of n = K columns that came and k = N: played
backwards it sends what it received, as many bytes, and has made it by as many operations. Two machines that parcels
pass one after the other take as long backwards, so predictions hold, too. Weights of `experts` are predicted as one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..errors import InvalidArgument
from .plan import DEVICES, EMBEDDING, OPERATORS, SLICES, TOKENS, Plan, split
from .tiles import TileGrid

MIRRORED = "all_to_all_matmul"
ITEM_SIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Problem:
    """`k` is the inner size of the longest shard, `multiprocessors` the SMs (on a CPU: threads) this rank may use.

    `bulk`: whether the GPU has bulk copies (TMA), with which tiles may be larger. `together`: whether all ranks share
    one GPU, so that its memory is everybody's. `experts`: how many weights a rank's rows are multiplied by.
    `mirrored`: whether it is all_to_all_matmul, planned as a matmul_all_to_all. `further`: columns of what else is
    computed of gathered rows, in terms of the product; predictions leave it out, as every plan has it.
    """

    operator: str
    m: int
    n: int
    k: int
    dtype: str
    item_size: int
    ranks: int
    shards: tuple[int, ...]
    device: str
    multiprocessors: int
    bulk: bool = True
    together: bool = False
    experts: int = 1
    mirrored: bool = False
    further: int = 0

    def __post_init__(self) -> None:
        _one_of("operator", self.operator, (*OPERATORS, EMBEDDING))
        _one_of("device", self.device, DEVICES)
        counts = (("m", 0), ("n", 0), ("k", 0), ("item_size", 1), ("ranks", 1), ("multiprocessors", 1), ("experts", 1))
        for name, least in counts:
            if getattr(self, name) < least:
                raise InvalidArgument(argument=name, was=str(getattr(self, name)), must=f"at least {least}")
        if self.mirrored and self.operator != TOKENS:
            raise InvalidArgument(argument="operator", was=self.operator, must=f"{TOKENS}, which has a mirror image")
        count = 1 if self.operator == "matmul_all_reduce" else self.ranks
        if len(self.shards) != count or sum(self.shards) != self.m or min(self.shards) < 0:
            must = f"{count} counts of rows that add up to {self.m}"
            raise InvalidArgument(argument="shards", was=str(list(self.shards)), must=must)

    @staticmethod
    def of(
        operator: str,
        m: int,
        n: int,
        k: int,
        *,
        dtype: str,
        ranks: int,
        device: str,
        multiprocessors: int,
        shards: Sequence[int] | None = None,
        bulk: bool = True,
        together: bool = False,
        further: int = 0,
    ) -> Problem:
        """The problem with the usual shards, or with those given, and the item size of its dtype."""
        _one_of("dtype", dtype, tuple(ITEM_SIZES))
        if shards is None:
            parts = 1 if operator == "matmul_all_reduce" else max(1, ranks)
            shards = [stop - start for start, stop in split(m, parts)]
        size, counts = ITEM_SIZES[dtype], tuple(map(int, shards))
        found = Problem(operator, m, n, k, dtype, size, ranks, counts, device, multiprocessors, bulk, together)
        return replace(found, further=further)

    @staticmethod
    def for_splits(
        splits: Sequence[Sequence[int]],
        n: int,
        k: int,
        *,
        dtype: str,
        device: str,
        multiprocessors: int,
        bulk: bool = True,
        experts: int = 1,
        mirrored: bool = False,
    ) -> Problem:
        """The all_to_all problem that every rank plans for: that of the sender with the most rows (the first such).

        `splits[sender][destination]` are rows; those of the way back where the problem is `mirrored`, with K of the
        call as `n`, and N as `k`. All ranks that hold the same matrix get the same problem.
        """
        if not splits or any(len(row) != len(splits) for row in splits):
            was = f"rows of {[len(row) for row in splits]} counts"
            raise InvalidArgument(argument="splits", was=was, must="as many counts for each rank as there are ranks")
        busiest = max(splits, key=sum)
        found = Problem.of(
            TOKENS,
            sum(busiest),
            n,
            k,
            dtype=dtype,
            ranks=len(splits),
            device=device,
            multiprocessors=multiprocessors,
            shards=busiest,
            bulk=bulk,
        )
        return replace(found, experts=experts, mirrored=mirrored)

    @property
    def name(self) -> str:
        """The operator that is called."""
        return MIRRORED if self.mirrored else self.operator

    @property
    def sizes(self) -> tuple[int, int]:
        """N and K as the call has them."""
        return (self.k, self.n) if self.mirrored else (self.n, self.k)

    @property
    def both_sum(self) -> bool:
        """Whether both of two ranks sum all of a signaled all_reduce: as many bytes cross the link as if each summed a
        half and sent the sum back, but once, and nothing waits for a sum. Of few and large parts it gains nothing. Of
        CPUs: a GPU's copy engines are modelled with two ways (`staged.py`).
        """
        return self.operator == "matmul_all_reduce" and self.ranks == 2 and self.device == "cpu"

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k

    @property
    def result_bytes(self) -> int:
        """Bytes of the [m, n] product on this rank."""
        return self.m * self.n * self.item_size

    @property
    def order(self) -> str:
        """The order of tiles that this operator's signaled plans use."""
        return OPERATORS.get(self.operator, SLICES)

    def grid(self, plan: Plan) -> TileGrid:
        """The tiles of a signaled plan."""
        if plan.tile is None:
            raise InvalidArgument(argument="plan", was=f"{plan.name} without a tile", must="a plan with a tile")
        return TileGrid(self.m, self.n, *plan.tile, self.shards)

    @property
    def key(self) -> str:
        """Name for caches: equal for problems that may share a plan, safe as a file name, the same in all processes.

        Splits of an all_to_all change from call to call and its plans are fractions, so there the rows count by their
        power of two and the shards do not count at all.
        """
        rows, shards = str(self.m), ",".join(map(str, self.shards))
        n, k = self.sizes
        if self.operator == TOKENS:
            rows, shards = f"upto{1 << max(0, self.m - 1).bit_length()}" if self.m else "none", ""
        experts = f"-{self.experts}experts" if self.experts > 1 else ""
        experts += f"-{self.further}further" if self.further else ""
        text = (
            f"{self.name}-{rows}x{n}x{k}{experts}-{self.dtype}-{self.ranks}ranks"
            f"-{self.device}{self.multiprocessors}{'' if self.bulk else '-plain'}{'-together' if self.together else ''}"
        )
        return f"{text}-{hashlib.sha256(shards.encode()).hexdigest()[:8]}"


def _one_of(argument: str, was: str, allowed: tuple[str, ...]) -> None:
    if was not in allowed:
        raise InvalidArgument(argument=argument, was=repr(was), must=f"one of {', '.join(allowed)}")
