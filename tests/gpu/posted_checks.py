"""Fused matmuls that post to the proxy's ring, run inside the ranks of a virtual node: all posted, none stored."""

from __future__ import annotations

import threading
from collections.abc import Callable

import matmul_suite
import torch
from matmul_suite import Case

import undertow as ut
from undertow.errors import StrategyUnavailable

LANES = ("dma", "net")
SHAPES = ((512, 512, 128), (1160, 264, 72), (515, 130, 33), (3, 16, 8))
AHEAD = 64  # replays: some hundred launches, which the driver's queue holds
FAR_AHEAD = 3000  # launches, which it does not
CALLS = 3  # of each: both halves of the memory, and one that comes behind a call of its own half
REFUSED = ("not a multiple of 8", "a rank has no rows", "there is nothing to multiply")


def posted_matmuls_are_exact(group: ut.Group) -> None:
    """Each call a few times in a row with other numbers, ranks late in turn; lanes share nothing and take turns."""
    for operator in matmul_suite.OPERATORS:
        ran = 0
        for number, shape in enumerate(SHAPES):
            for turn in range(CALLS * len(LANES)):
                case = Case(operator, f"fused:{LANES[turn % len(LANES)]}", torch.bfloat16, shape, 30 + 47 * turn)
                if (turn + number) % group.size == group.rank:
                    torch.cuda._sleep(2_000_000)
                try:
                    matmul_suite.verify(group, case)
                    ran += 1
                except StrategyUnavailable as error:
                    if not any(one in str(error) for one in REFUSED):
                        raise AssertionError(f"{case}: {error}") from error
                torch.cuda.synchronize()
                group.check()
        assert ran >= 2 * CALLS * len(LANES), f"{operator}: {ran} calls ran"


def _own(group: ut.Group, lane: str) -> bool:
    """Whether the copies of every rank's proxy have a context of their own."""
    from undertow.ops.posting import Posting

    return all(group.exchange(Posting.of(group.fabric, lane).proxy.copies().is_own, "contexts"))


def a_host_far_ahead_stops_nobody(group: ut.Group) -> None:
    """Behind a call that waits for a late rank the others' hosts fill the driver's queue; where they have contexts of
    their own, the proxies' copies go on."""
    from undertow.fabric.virtual_node import SHARING

    rows, inner, columns = 128 * group.size, 64, 256
    x = torch.ones(rows, inner, dtype=torch.bfloat16, device=group.device)
    w = torch.ones(inner, columns, dtype=torch.bfloat16, device=group.device)
    count = torch.zeros((), dtype=torch.int32, device=group.device)
    for lane in LANES:
        ut.matmul_all_reduce(x, w, group=group, strategy=f"fused:{lane}")
        count += 1
        torch.cuda.synchronize()
        ahead = FAR_AHEAD if _own(group, lane) else AHEAD
        assert ahead == FAR_AHEAD or group.size > SHARING, "there should be room for contexts"
        for late in range(group.size):
            if group.rank == late:
                torch.cuda._sleep(1_000_000_000)  # half a second
            count.zero_()
            y = ut.matmul_all_reduce(x, w, group=group, strategy=f"fused:{lane}")
            for _ in range(ahead):
                count += 1
            torch.cuda.synchronize()
            group.check()
            assert int(count) == ahead
            assert bool((y == inner * group.size).all()), (lane, late)


def a_stream_is_made_meanwhile(group: ut.Group) -> None:
    """While a call waits for a late rank: torch makes a stream with the interpreter's lock, which the proxy needs."""
    x = torch.ones(128 * group.size, 64, dtype=torch.bfloat16, device=group.device)
    for lane in LANES:
        if group.rank == group.size - 1:
            torch.cuda._sleep(200_000_000)
        y = ut.matmul_all_reduce(x, x[:64].t().contiguous(), group=group, strategy=f"fused:{lane}")
        torch.cuda.Stream()
        torch.cuda.synchronize()
        group.check()
        assert bool((y == 64 * group.size).all()), lane


def memory_is_taken_meanwhile(group: ut.Group) -> None:
    """While a call waits for a late rank another thread takes pinned memory and the device's, and gives it back. It may
    wait for the call; the copies that the call needs may not wait for it. With the driver's queue empty and full."""

    def take() -> None:
        torch.cuda.set_device(group.device)
        for turn in range(3):
            pinned = torch.empty((9 + turn) << 20, dtype=torch.uint8, pin_memory=True)
            large = torch.empty(1 << 30, dtype=torch.uint8, device=group.device)
            del pinned, large
            torch.cuda.empty_cache()

    x = torch.ones(128 * group.size, 64, dtype=torch.bfloat16, device=group.device)
    count = torch.zeros((), dtype=torch.int32, device=group.device)
    for lane in LANES:
        for ahead in (0, FAR_AHEAD if _own(group, lane) else 0):
            if group.rank == group.size - 1:
                torch.cuda._sleep(1_000_000_000)
            y = ut.matmul_all_reduce(x, x[:64].t().contiguous(), group=group, strategy=f"fused:{lane}")
            taking = threading.Thread(target=take)
            taking.start()
            for _ in range(ahead):
                count += 1
            taking.join()
            torch.cuda.synchronize()
            group.check()
            assert bool((y == 64 * group.size).all()), (lane, ahead)


def posted_matmuls_replay(group: ut.Group) -> None:
    """Captured calls in which every rank has something for every other one, replayed with new inputs."""
    from gpu_checks import REPLAYS, _replay

    device, rows = group.device, 128 * group.size
    xs = [matmul_suite._drawn(rows, 64, 7 + one, 8).to(device, torch.bfloat16) for one in range(group.size)]
    ws = [matmul_suite._drawn(64, 256, 70 + one, 8).to(device, torch.bfloat16) for one in range(group.size)]
    whole = torch.stack([x.float() @ w.float() for x, w in zip(xs, ws, strict=True)]).sum(0)
    gathered = torch.cat([x[:128] for x in xs]).float() @ ws[group.rank].float()
    x, w = xs[group.rank].clone(), ws[group.rank]
    shard = x[:128].clone()
    wants = {
        "matmul_all_reduce": (x, whole), "matmul_reduce_scatter": (x, whole.chunk(group.size)[group.rank]),
        "all_gather_matmul": (shard, gathered),
    }  # fmt: skip
    for operator, (given, want) in wants.items():
        for lane in LANES:
            y = torch.empty(want.shape, dtype=torch.bfloat16, device=device)
            mine = given.clone()

            def call(
                operator: str = operator, lane: str = lane, mine: torch.Tensor = mine, y: torch.Tensor = y
            ) -> None:
                getattr(ut, operator)(mine, w, group=group, strategy=f"fused:{lane}", out=y)

            call()
            torch.cuda.synchronize()
            ahead = REPLAYS if _own(group, lane) else AHEAD
            _replay(group, f"{operator} {lane}", mine, y, call, want.to(torch.bfloat16), ahead)


def posted_gradients_and_norms(group: ut.Group) -> None:
    """What follows a posted call, first on another stream: gradients, several weights, a norm; as serial has them."""
    device, rows = group.device, 64 * group.size
    side, norm = torch.cuda.Stream(), torch.nn.RMSNorm(256, device=device, dtype=torch.bfloat16)

    def drawn(height: int, width: int, seed: int) -> torch.Tensor:
        return matmul_suite._drawn(height, width, seed, 4).to(device, torch.bfloat16)

    for turn in range(CALLS):
        x, w = drawn(rows, 64, 300 + group.rank + 10 * turn), drawn(64, 256, 400 + group.rank)
        found = []
        side.wait_stream(torch.cuda.current_stream())
        for strategy in ("serial:peer", *(f"fused:{lane}" for lane in LANES)):
            here: list[torch.Tensor] = []
            with torch.cuda.stream(side if turn % 2 else torch.cuda.current_stream()):
                for call in (
                    ut.matmul_reduce_scatter,
                    ut.all_gather_matmul,
                    ut.matmul_all_to_all,
                    ut.all_to_all_matmul,
                ):
                    leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
                    y = call(*leaves, group=group, strategy=strategy)  # type: ignore[operator]
                    y.backward(torch.ones_like(y))
                    here += [y.detach(), leaves[0].grad, leaves[1].grad]  # type: ignore[list-item]
                several, gathered = ut.all_gather_matmul(
                    x[:64], [w, w[:, :128]], activation=["relu", "none"], gathered=True, group=group, strategy=strategy
                )  # fmt: skip
                with torch.no_grad():
                    here += [*several, gathered, ut.matmul_all_reduce(x, w, norm=norm, group=group, strategy=strategy)]
            torch.cuda.synchronize()
            group.check()
            found.append(here)
        for other in found[1:]:
            for number, (got, want) in enumerate(zip(other, found[0], strict=True)):
                torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2, msg=f"turn {turn}, result {number}")


CHECKS: tuple[Callable[[ut.Group], None], ...] = (
    posted_matmuls_are_exact, a_stream_is_made_meanwhile, a_host_far_ahead_stops_nobody, memory_is_taken_meanwhile,
    posted_matmuls_replay,
    posted_gradients_and_norms,
)  # fmt: skip
