"""Fused matmuls on a GPU where there is no peer pointer: kernels post whole parcels of rows to the proxy's ring.

    sums      multiply and post | sum what lands; all_reduce: and post it | bring others' sums         | count
    rows      copy and post     | multiply rows as they land                                           | count
    exchange  multiply and post | bring what lands                                                     | count
    arrive    copy and post     | multiply rows as they land                                           | count
    proxy's thread    | move what was posted ...

Some launches, one behind the other on the call's stream (`kernels/posted.py`), by tables of the plan
(`plan/post_tables.py`). Everything is posted, also to ranks that have a peer pointer: lane `peer` is for those.
Memory, what may wait and when, and graphs: `posting.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..errors import InvalidArgument
from ..fabric import timeline
from ..fabric.base import WORD_STRIDE
from ..fabric.cuda import CudaFabric
from ..plan import fused, post_tables
from ..plan.posts import SIGNALS, Passed, Rows, Sums
from .cuda_product import device_table, has_table
from .finish import Finish
from .fused_launch import ALIGNED, active, descriptor, factors, finishing, watch
from .fused_stage import agree, why_not
from .overlap import half_way
from .posting import Posting, half_of, refuse_capture

if TYPE_CHECKING:
    from ..fabric.base import Fabric
    from ..plan.plan import Plan
    from ..plan.post_tables import Landing, Leaving
    from ..plan.problem import Problem
    from ..plan.tiles import Integers
    from ..plan.tokens import Tokens
    from .beside import Taking

_STRIDE = WORD_STRIDE // 4
_BRINGING_CTAS = 2  # on an SM of a GPU that no other rank needs, where the plan does not say how many
_WARPS = 4
_ELEMENTS, _MOST_COLUMNS = 2048, 512  # of a piece that a CTA brings at once
_LANES = 128
_LOADED, _FOLLOWED = object(), object()  # names of what is kept with a fabric

Run = Callable[[torch.Tensor, int, int], None]  # given the state, how much there is to do, and by how many CTAs


@dataclass(frozen=True)
class _Step:
    """A launch. `variant`: what it is compiled for; `count`: tiles or parcels, none where it is only loaded."""

    name: str
    variant: dict[str, Any]
    count: int
    ctas: int
    run: Run


class _Call:
    """What the launches of one call share: memory, tables, and the words that they are given.

    `kind`: of calls, known to all ranks; with `sizes` it is what tables depend on.
    """

    def __init__(
        self, fabric: CudaFabric, plan: Plan, like: torch.Tensor, kind: str, sizes: tuple[object, ...], elements: int,
        meets: bool,
    ) -> None:  # fmt: skip
        refuse_capture(meets, plan.lane)
        self.fabric, self.plan, self.like, self.meets = fabric, plan, like, meets
        self.posting = Posting.of(fabric, plan.lane)
        self.space, self.number = self.posting.memory(fabric, elements * like.element_size())
        self.half = half_of(self.space) // like.element_size()
        self.steps: list[_Step] = []
        self._key, self._common = (kind, *sizes, plan.digest, fabric.group.rank), (kind, plan.digest, like.dtype)
        self._rested = torch.cuda.is_current_stream_capturing()
        proxy, memory = self.posting.proxy, self.space.address(fabric.group.rank)
        half = self.half * like.element_size()
        self.ring = self.words(proxy.address, proxy.head.data_ptr(), proxy.capacity, self.number, memory, half)
        self.signals = fabric.signal_word(proxy.signals, 0)

    def rest(self) -> None:
        """Before what is new is uploaded or loaded: that may wait for kernels of this rank, with a lock that the
        proxy's thread needs, for which they wait."""
        if not self._rested:
            self._rested = True
            self.fabric.rest()

    def words(self, *numbers: int) -> torch.Tensor:
        return self._uploaded(("posted words", numbers), np.array(numbers, np.int64))

    def table(self, name: str, made: Integers) -> torch.Tensor:
        """On the GPU; never an empty one, which would have no address."""
        return self._uploaded((name, *self._key), made) if made.size else self.words(0)

    def _uploaded(self, key: tuple[object, ...], made: Integers) -> torch.Tensor:
        if not has_table(self.fabric, key):
            self.rest()
        return device_table(self.fabric, key, lambda: made)

    def memory(self, first: int, rows: int, width: int) -> torch.Tensor:
        """Rows of this rank's memory, [2 halves, rows, width]."""
        whole = self.space.local.view(-1).view(self.like.dtype)
        return whole.as_strided((2, rows, width), (self.half, width, 1), whole.storage_offset() + first)

    def add(self, name: str, variant: dict[str, Any], count: int, ctas: int, run: Run) -> None:
        self.steps.append(_Step(name, variant, count, max(1, ctas), run))

    def load(self) -> None:
        """Have all kernels loaded before anything of the call waits: of a new kind of call by all ranks together, so
        that none waits while another compiles, and one that cannot stops all. How tensors lie is each rank's own."""
        loaded: set[object] = self.fabric.kept.setdefault(id(_LOADED), set())  # type: ignore[assignment]
        new = {(one.name, self.like.dtype, *sorted(one.variant.items())): one for one in self.steps}
        new = {key: one for key, one in new.items() if key not in loaded}
        if not new and self._common in loaded:
            return
        if torch.cuda.is_current_stream_capturing():
            was = "the first one of this kind, inside a CUDA graph capture"
            raise InvalidArgument(argument="call", was=was, must="made once before it is captured: it compiles")

        def attempt() -> None:
            self.rest()
            for one in new.values():
                one.run(self.posting.idle, 0, 1)
            self.fabric.settle()

        group = self.fabric.group
        if self._common in loaded:  # the others are in the call already
            with half_way(group):
                attempt()
        else:
            agree(group.exchange(why_not(attempt), "whether a fused kernel could be loaded"))
        loaded |= {self._common, *new}

    def enqueue(self) -> None:
        for one in self.steps:
            with timeline.event(one.name, engine="compute", fused=True):
                one.run(self.posting.state, one.count, one.ctas)

    def before_others(self, *what: object) -> None:
        """Before kernels that are not this call's follow it: those of the first such call would be loaded behind it."""
        followed: set[object] = self.fabric.kept.setdefault(id(_FOLLOWED), set())  # type: ignore[assignment]
        key = (*self._common, *what)
        if key not in followed and not torch.cuda.is_current_stream_capturing():
            self.fabric.rest()
            followed.add(key)

    # -- the launches --------------------------------------------------------------------------------------------------

    def multiply_and_post(self, x: torch.Tensor, w: torch.Tensor, finish: Finish, leaving: Leaving, name: str) -> None:
        """x @ w, `finish`ed, into the memory, and from there to whom it is for."""
        from ..kernels.posted import multiply_and_post_kernel

        assert self.plan.tile is not None
        block_m, block_n = self.plan.tile
        both, n = factors(x, w, self.fabric.bulk_copies), w.shape[-1]
        bias, ends = finishing(finish, self.like)
        tables = [
            self.table(f"{name}: {part}", made)
            for part, made in (("tiles", leaving.tiles), ("parcels", leaving.parcels), ("posts", leaving.posts))
        ]
        constants = {
            "BLOCK_M": block_m, "BLOCK_N": block_n, "GROUPED": both.grouped, "EVEN": n % ALIGNED == 0, **ends,
            **both.constants,
        }  # fmt: skip

        def run(state: torch.Tensor, count: int, ctas: int) -> None:
            kernel: Any = multiply_and_post_kernel
            kernel[(ctas,)](
                *both.operands((block_m, block_n)), self.like, bias, *tables, self.posting.tickets, self.ring, state,
                *both.strides, count, both.inner, n, *watch(self.fabric), **constants,
            )  # fmt: skip

        tiles = len(leaving.tiles)
        self.add(
            "multiply and post",
            {**constants, "n": (n == 1, n % 16)},
            tiles,
            min(tiles, active(self.plan, self.fabric)),
            run,
        )

    def sum(self, layout: Sums, landing: Landing, out: torch.Tensor, finish: Finish) -> None:
        """out [M_r, N] = finish(the sum of what all ranks made of it), for others, too, where it is `broadcast`."""
        from ..kernels.posted import sum_kernel

        rank, n = self.fabric.group.rank, layout.n
        bias, ends = finishing(finish, out)
        parcels, posts = self.table("sums: parcels", landing.parcels), self.table("sums: posts", landing.posts)
        pieces = _pieces(n)
        constants = {
            **pieces, "SIGNALS": SIGNALS, "STRIDE": _STRIDE, "KEEP": layout.broadcast, **ends, "num_warps": _WARPS,
        }  # fmt: skip
        landed, slot = layout.rows * n, max(layout.shards) * n
        kept = layout.summed(0) - layout.product(0)

        def run(state: torch.Tensor, count: int, ctas: int) -> None:
            kernel: Any = sum_kernel
            kernel[(ctas,)](
                out, self.like, bias, parcels, count, posts, self.posting.tickets, self.ring, self.signals, state, n,
                landed, slot, rank, len(layout.shards), kept, *watch(self.fabric), **constants,
            )  # fmt: skip

        variant = {**constants, "out": out.data_ptr() % 16}
        self.add("sum", variant, len(landing.parcels), self._bringing(landing.parcels, n, pieces), run)

    def bring(self, rows: torch.Tensor, made: Leaving | Landing, leave: bool, name: str) -> None:
        """Own `rows` [M, K] to the memory, and from there to whom they are for; or what lands there to `rows`."""
        from ..kernels.posted import bring_kernel

        width = rows.shape[1]
        parcels, posts = self.table(f"{name}: parcels", made.parcels), self.table(f"{name}: posts", made.posts)
        pieces = _pieces(width)
        constants = {
            **pieces, "STRIDE": _STRIDE, "LEAVE": leave, "num_warps": _WARPS,
            "EVEN": width % ALIGNED == 0 and rows.data_ptr() % 16 == 0,
        }  # fmt: skip

        def run(state: torch.Tensor, count: int, ctas: int) -> None:
            kernel: Any = bring_kernel
            kernel[(ctas,)](
                rows, self.like, parcels, count, posts, self.posting.tickets, self.ring, self.signals, state, width,
                *watch(self.fabric), **constants,
            )  # fmt: skip

        self.add("bring", constants, len(made.parcels), self._bringing(made.parcels, width, pieces), run)

    def multiply_landed(
        self, first: int, rows: int, w: torch.Tensor, y: torch.Tensor, finish: Finish, landing: Landing, name: str
    ) -> None:
        """y = finish(rows @ w) of the `rows` that stand from `first` on in the memory."""
        from ..kernels.posted import multiply_landed_kernel

        assert self.plan.tile is not None
        block_m, block_n = self.plan.tile
        k, n = w.shape[-2], w.shape[-1]
        halves = self.memory(first, max(1, rows), k)
        both = factors(halves[0], w, self.fabric.bulk_copies)
        a: Any = halves
        if both.bulk:
            a = descriptor(halves, [1, block_m, both.block_k])
        bias, ends = finishing(finish, y)
        tiles = self.table(f"{name}: tiles", landing.tiles)
        constants = {
            "BLOCK_M": block_m, "BLOCK_N": block_n, "GROUPED": both.grouped, "STRIDE": _STRIDE, **ends,
            "EVEN": n % ALIGNED == 0 and y.data_ptr() % 16 == 0, **both.constants,
        }  # fmt: skip

        def run(state: torch.Tensor, count: int, ctas: int) -> None:
            kernel: Any = multiply_landed_kernel
            kernel[(ctas,)](
                a, both.operands((block_m, block_n))[1], y, bias, tiles, self.signals, state, self.half, *both.strides,
                count, both.inner, n, *watch(self.fabric), **constants,
            )  # fmt: skip

        ctas = min(len(landing.tiles), active(self.plan, self.fabric))
        self.add(
            "multiply", {**constants, "n": (n == 1, n % 16), "y": y.data_ptr() % 16}, len(landing.tiles), ctas, run
        )

    def count(self, *landed: Landing) -> None:
        """The end: what was waited for is counted, and so is the call."""
        from ..kernels.posted import count_kernel

        numbers = np.concatenate([one.numbers for one in landed])
        listed = self.table("numbers", numbers)

        def run(state: torch.Tensor, count: int, ctas: int) -> None:
            kernel: Any = count_kernel
            kernel[(1,)](listed, count, state, LANES=_LANES, num_warps=_WARPS)

        self.add("count", {}, len(numbers), 1, run)

    def _bringing(self, parcels: Integers, width: int, pieces: dict[str, int]) -> int:
        """CTAs that bring or sum: no more than the largest parcel has pieces."""
        most = int(parcels[:, 0].max(initial=0))
        items = -(-most // pieces["ROWS"]) * -(-width // pieces["COLUMNS"])
        # Where ranks share a GPU, none of them takes more SMs from the others' products than it has.
        each = 1 if self.fabric.shares_device else _BRINGING_CTAS
        return min(items, self.plan.share.communication_ctas or each * active(self.plan, self.fabric))

    def made(self, work: Callable[[], None]) -> Callable[[], None]:
        """The call: loaded now; `work` enqueues all of it, in the order of calls."""
        self.load()

        def call() -> None:
            self.posting.follow(self.fabric)
            work()
            self.posting.finish(self.fabric, self.meets)

        return call


def _pieces(width: int) -> dict[str, int]:
    """Rows and columns that a CTA brings at once."""
    columns = min(_MOST_COLUMNS, max(16, 1 << (width - 1).bit_length()))
    return {"ROWS": _ELEMENTS // columns, "COLUMNS": columns}


def sums(
    x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, problem: Problem, plan: Plan, finish: Finish, fabric: Fabric
) -> Callable[[], None]:
    """matmul_reduce_scatter, matmul_all_reduce: what enqueues one, once."""
    assert isinstance(fabric, CudaFabric)
    assert plan.tile is not None
    rank, broadcast = fabric.group.rank, problem.operator == "matmul_all_reduce"
    shards = fused.owned(problem, plan)
    layout = Sums(shards, plan.tile[0], len(plan.parcels), problem.n, broadcast)
    kind, sizes = f"posted {problem.operator}", (shards, problem.n)
    call = _Call(fabric, plan, y, kind, sizes, layout.elements, layout.meets)
    products = post_tables.landing_products(layout, rank)
    call.multiply_and_post(x, w, Finish(None, "none"), post_tables.leaving_products(layout, plan, rank), "products")
    own = layout.first(rank) if broadcast else 0
    call.sum(layout, products, y[own : own + shards[rank]], finish)
    if broadcast:
        others = post_tables.landing_sums(layout, rank)
        call.bring(y, others, False, "others' sums")
        call.count(products, others)
    else:
        call.count(products)

    def work() -> None:
        call.enqueue()
        if finish.after is not None:
            call.before_others(finish.after.text, finish.after.has, finish.bias is None, finish.activation, y.shape[1])
            finish.apply(y)

    return call.made(work)


def rows(
    x: torch.Tensor,
    w: torch.Tensor,
    y: torch.Tensor,
    problem: Problem,
    plan: Plan,
    finish: Finish,
    fabric: Fabric,
    arriving: Taking | None,
) -> Callable[[], None]:
    """all_gather_matmul: what enqueues it, once."""
    assert isinstance(fabric, CudaFabric)
    assert plan.tile is not None
    rank, k = fabric.group.rank, problem.k
    if w.shape[1] == 0:  # others' rows must land before the call is over: it multiplies a few zeros
        w, y, finish = w.new_zeros(k, ALIGNED), y.new_empty(problem.m, ALIGNED), Finish(None, "none")
    n = w.shape[1]
    layout = Rows(problem.shards, plan.tile[0], len(plan.parcels), k)
    call = _Call(fabric, plan, x, "posted rows", (problem.shards, n, k), layout.elements, layout.meets)
    landing = post_tables.landing_rows(layout, n, plan, rank)
    call.bring(x.contiguous(), post_tables.leaving_rows(layout, rank), True, "own rows")
    call.multiply_landed(0, problem.m, w, y, finish, landing, "rows")
    call.count(landing)

    def work() -> None:
        call.enqueue()
        if arriving is not None:
            call.before_others(type(arriving), arriving.columns, arriving.text, problem.m, k)
            arriving.all_at_once(_last_half(call, 0, problem.m, k))
            fabric.poison_if_aborted(*arriving.made)

    return call.made(work)


def exchange(
    x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, tokens: Tokens, plan: Plan, finish: Finish, fabric: Fabric
) -> Callable[[], None]:
    """matmul_all_to_all: what enqueues it, once. The sender finishes its rows."""
    assert isinstance(fabric, CudaFabric)
    assert plan.tile is not None
    rank, n = fabric.group.rank, w.shape[-1]
    if n == 0 or tokens.most == 0:  # on all ranks
        return _nothing
    layout = Passed(tokens, plan.tile[0], len(plan.parcels), n)
    call = _Call(fabric, plan, y, "posted exchange", (tokens, n), layout.elements, layout.meets)
    landing = post_tables.landing_tokens(layout, rank)
    call.multiply_and_post(x, w, finish, post_tables.leaving_tokens(layout, plan, rank), "tokens")
    call.bring(y, landing, False, "tokens that land")
    call.count(landing)
    return call.made(call.enqueue)


def arrive(
    x: torch.Tensor,
    w: torch.Tensor,
    received: torch.Tensor,
    y: torch.Tensor,
    tokens: Tokens,
    plan: Plan,
    finish: Finish,
    fabric: Fabric,
    arriving: Taking | None,
    keep: bool,
) -> Callable[[], None]:
    """all_to_all_matmul: what enqueues it, once. `keep`: the rows that came are wanted in `received`."""
    assert isinstance(fabric, CudaFabric)
    assert plan.tile is not None
    rank, k = fabric.group.rank, x.shape[1]
    if tokens.most == 0:  # on all ranks
        return _nothing if arriving is None else lambda: arriving.begin(received)
    if w.shape[-1] == 0:  # as in `rows`
        w, y = w.new_zeros(*w.shape[:-1], ALIGNED), y.new_empty(y.shape[0], ALIGNED)
        finish = Finish(None, "none")
    n = w.shape[-1]
    layout = Passed(tokens, plan.tile[0], len(plan.parcels), k)
    call = _Call(fabric, plan, x, "posted rows of tokens", (tokens, n, k), layout.elements, layout.meets)
    landing = post_tables.landing_token_tiles(layout, n, plan, rank)
    call.bring(x.contiguous(), post_tables.leaving_token_rows(layout, rank), True, "own tokens")
    call.multiply_landed(layout.landing(0), received.shape[0], w, y, finish, landing, "tokens")
    call.count(landing)

    def work() -> None:
        call.enqueue()
        if (keep or arriving is not None) and received.numel():
            received.copy_(_last_half(call, layout.landing(0), *received.shape))
        if arriving is not None:
            call.before_others(type(arriving), arriving.columns, arriving.text, k)
            arriving.begin(received)
            arriving.add([(0, received.shape[0])])
            fabric.poison_if_aborted(*arriving.made)

    return call.made(work)


def _last_half(call: _Call, first: int, rows: int, width: int) -> torch.Tensor:
    """What landed in the call that was just counted. In which half, only the device knows, as replays count there."""
    halves = call.memory(first, rows, width)
    return halves.index_select(0, (call.posting.state[:1] - 1) & 1)[0]


def _nothing() -> None:
    """No rank has anything to send."""
