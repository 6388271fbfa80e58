"""What the fused kernels of a group share: symmetric memory for calls of one kind, and the order of those calls.

A *stage* (slots for tiles, gathered rows, packets, and the words that say what has arrived) is made once, collectively,
for calls up to a size, used by all of them in turn, and remade half as large again, or larger, when one does not fit.
The old one is released, unless a captured call uses it.

Calls come one after the other, on all ranks in the same order, whatever stages and streams they use (`WAITING`): each
may fill a rank's SMs until the others have begun it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ..errors import InvalidArgument, StrategyUnavailable
from ..fabric import stream_memory
from ..fabric.base import WAITING
from ..fabric.cuda import CudaFabric, CudaStream
from ..plan import fused
from .overlap import half_way

if TYPE_CHECKING:
    from ..fabric.joined import Joined
    from ..fabric.symmetric import SymmetricBuffer

_STAGES, _LOADED = object(), object()  # names of what is kept with a fabric
_ROUND = 1 << 20  # elements: a small stage is made twice as large as asked, up to this


@dataclass
class Stage:
    """Memory of one kind of call: `data` holds two halves of `half` elements, for calls in turn; `words` what arrived.

    `epochs`: the number of calls, counted by every CTA, and how many CTAs left (`kernels/poison.py`, `leave_grid`), or
    LINE times the same number (`kernels/fused_decode.py`);
    `taken`: tiles or jobs that were, of either turn, and in the word behind it tiles of CTAs in step. `captured`:
    whether a graph uses it. `joined`: all ranks' `data` side by side, where a kernel wanted it so.

    Rows that stay for a gradient lie in both halves as one memory: calls do not use it in turn, but all ranks meet
    before each (`Fabric.meeting`).
    """

    data: SymmetricBuffer
    half: int
    words: SymmetricBuffer
    lines: int
    epochs: torch.Tensor
    idle_epochs: torch.Tensor
    taken: torch.Tensor
    bases: torch.Tensor
    word_bases: torch.Tensor
    captured: bool = False
    joined: Joined | None = None
    described: dict[tuple[object, ...], Any] = field(default_factory=dict)

    def follow(self, fabric: CudaFabric) -> None:
        """The current stream's next call comes after the last one of the group, wherever that was."""
        fabric.follow(WAITING)
        self.captured = self.captured or stream_memory.is_capturing()

    def enqueued(self, fabric: CudaFabric) -> None:
        """A call was enqueued, with all that reads what it shares with others."""
        fabric.enqueued(WAITING)

    def side_by_side(self, fabric: CudaFabric) -> torch.Tensor:
        """[ranks, 2 * half]: `data` of all ranks. The first time not in a capture; all ranks or none get it."""
        if self.joined is None:
            made: list[Joined] = []
            reason = why_not(lambda: made.append(fabric.joined(self.data)))
            said = fabric.group.exchange(reason, "whether memory could be mapped side by side")
            try:
                agree(said, "could not map the others' memory")
            except BaseException:
                for one in made:
                    fabric.part(one)
                raise
            self.joined = made[0]
        return self.joined.view(2 * self.half, self.data.dtype)

    def joined_bases(self, fabric: CudaFabric) -> torch.Tensor:
        """As `bases`, where they lie side by side: for kernels that read there what they have written (`Joined`)."""
        return self.describe(  # type: ignore[no-any-return]
            ("bases",),
            lambda: torch.tensor([one.data_ptr() for one in self.side_by_side(fabric)], device=fabric.device),
        )

    def release(self, fabric: CudaFabric) -> None:
        """Let go of the memory: nothing uses it any more."""
        if self.joined is not None:
            fabric.part(self.joined)
        self.data.release()
        self.words.release()

    def describe(self, key: tuple[object, ...], make: Callable[[], Any]) -> Any:
        """What is made of a stage once for each kind of call: descriptors, views."""
        found = self.described.get(key)
        if found is None:
            found = self.described[key] = make()
        return found


def stage_of(
    fabric: CudaFabric, kind: tuple[object, ...], elements: int, lines: int, dtype: torch.dtype, unit: int = 8
) -> Stage:
    """The stage for calls of `kind`, of at least `elements` in each half and `lines` of words. Collective at first.

    A half is a multiple of `unit` elements. What cannot be allocated on one rank is refused on all, and ends nothing.
    """
    stages: dict[tuple[object, ...], Stage] = fabric.kept.setdefault(id(_STAGES), {})  # type: ignore[assignment]
    outgrown: list[Stage] = fabric.kept.setdefault(id(Stage), [])  # type: ignore[assignment]
    old = stages.get(kind)
    if old is not None and old.half >= elements and old.lines >= lines:
        return old
    if stream_memory.is_capturing():
        was = "the first one of this size, inside a CUDA graph capture"
        raise InvalidArgument(argument="call", was=was, must="made once before it is captured: it allocates memory")
    half, held = grown(elements, lines, old, unit)
    group, device = fabric.group, fabric.device
    if old is not None:
        torch.cuda.synchronize(device)
        group.barrier()  # nobody uses the old one any more, but for graphs
        del stages[kind]
        if old.captured:
            outgrown.append(old)
        else:
            old.release(fabric)
    data = fabric.buffer(2 * half, dtype)
    try:
        words = fabric.buffer((held + fabric.multiprocessors) * fused.LINE, torch.int32)
    except BaseException:
        data.release()
        raise
    bases, word_bases = (
        torch.tensor([one.address(rank) for rank in range(group.size)], device=device) for one in (data, words)
    )

    def counters(count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int32, device=device)

    numbers = max(fabric.multiprocessors, fused.LINE) + 3
    stage = Stage(
        data, half, words, held, counters(numbers), counters(numbers), counters(2 * fused.LINE), bases, word_bases
    )  # fmt: skip
    torch.cuda.synchronize(device)
    group.barrier()
    stages[kind] = stage
    return stage


def grown(elements: int, lines: int, old: Stage | None, unit: int) -> tuple[int, int]:
    """Elements of a half and lines of a stage that must hold so many: half as many again as the old one at least."""
    if old is None:
        least, held = max(elements, min(_ROUND, 2 * elements)), max(64, lines)
    else:
        least, held = max(elements, old.half * 3 // 2), max(lines, old.lines * 3 // 2)
    return -(-max(1, least) // (8 * unit)) * 8 * unit, held + held % 2


def load(
    fabric: CudaFabric,
    stage: Stage,
    common: tuple[object, ...],
    variant: tuple[object, ...],
    launch: Callable[[torch.Tensor, int], None],
) -> None:
    """Have the kernel compiled and loaded before its first call: loading behind a wait might wait for it.

    `common` is what all ranks know of the kind: they wait for each other then, so that none spins while another
    compiles, and one that cannot stops all. `variant` is this rank's own: how its tensors lie, its bias. A launch
    without active CTAs waits for nobody.
    """
    loaded: set[tuple[object, ...]] = fabric.kept.setdefault(id(_LOADED), set())  # type: ignore[assignment]
    kind = (*common, variant)
    if kind in loaded and common in loaded:
        return
    if stream_memory.is_capturing():
        was = "the first one of this kind, inside a CUDA graph capture"
        raise InvalidArgument(argument="call", was=was, must="made once before it is captured: it compiles")
    uploads = fabric.stream("upload")
    assert isinstance(uploads, CudaStream)

    def attempt() -> None:
        with torch.cuda.stream(uploads.stream):
            launch(stage.idle_epochs, 0)
        uploads.stream.synchronize()

    if common in loaded:  # the others are in the call already
        with half_way(fabric.group):
            attempt()
    else:
        agree(fabric.group.exchange(why_not(attempt), "whether a fused kernel could be loaded"))
    loaded |= {common, kind}


def why_not(attempt: Callable[[], None]) -> str:
    """What kept the attempt from succeeding, or ""."""
    try:
        attempt()
    except Exception as error:  # whatever a compiler raises: the others must hear of it
        return f"{type(error).__name__}: {(str(error).splitlines() or ['no reason given'])[0]}"
    return ""


def agree(said: list[str], what: str = "could not load the kernel") -> None:
    """Refuse the call on all ranks if one of them could not do what it must."""
    for rank, reason in enumerate(said):
        if reason:
            raise StrategyUnavailable(
                strategy="fused",
                reason=f"rank {rank} {what} ({reason})",
                possible="signaled, serial",
            )
