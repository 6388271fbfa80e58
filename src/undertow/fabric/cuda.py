"""The CUDA fabric: symmetric memory from torch, stream memory operations as signals, torch streams as streams.

Everything here is *enqueued*. The host never waits for the GPU, except where a docstring says so.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from .. import errors, settings
from ..kernels.poison import poison_if_aborted
from . import atomics, green, sharers, stream_memory, torch_symmetric
from .base import WORD_STRIDE, Fabric, Lane, Stream
from .gate import Gate
from .in_order import Turns
from .joined import Joined
from .pinned import PinnedSegment
from .share import bounded_grids, on_multiprocessors
from .signals import Signals, Step
from .stream_guard import StreamGuard
from .symmetric import SymmetricBuffer

if TYPE_CHECKING:
    from .group import Group

_WORDS = WORD_STRIDE // 4
OVERLAPPING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


class CudaFabric(Fabric):
    """Peer pointers between the ranks of a node that have them; the other ranks by `dma` through the host, or `net`."""

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        torch.cuda.set_device(group.device)
        self.device = group.device
        self.guard = StreamGuard(group)
        self._streams: dict[tuple[str, int], CudaStream] = {}
        self._flags: list[CudaSignals] = []
        self._joined: list[Joined] = []
        self._gates: dict[str, Gate] = {}
        self._turns: dict[str, Turns] = {}
        properties = torch.cuda.get_device_properties(self.device)
        mine = sharers.seat(str(properties.uuid), int(properties.multi_processor_count), dist.get_world_size())
        seats = [sharers.Seat(*one) for one in group.exchange(list(mine), "which GPUs ranks have")]
        devices = [one.gpu for one in seats]
        #: whether two ranks share a GPU: copies between them run on SMs there, so `dma` goes through the host
        self.shares_device = len(set(devices)) < group.size
        self.together = len(set(devices)) == 1
        #: ranks of the job that have this GPU, as far as the group knows
        self.sharing_device = sharers.sharing(seats)[devices[group.rank]]
        #: SMs of this rank: of a GPU that is shared, by whatever ranks of the job, its part, which kernels keep to by
        #: the size of their grids. The same on all ranks of the group
        self.multiprocessors = sharers.part(seats)
        self.bulk_copies = torch.cuda.get_device_capability(self.device)[0] >= 9
        local = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
        could_share = os.environ.get(OVERLAPPING) == "1" or local > torch.cuda.device_count()
        said = group.exchange(sharers.unknown(seats, could_share), "who shares the GPUs")
        self.unknown_sharers = next((one for one in said if one), "")
        self._no_peers = self._why_no_peers(devices)
        wanted = all(group.exchange(settings.GATE.is_on(), "whether ranks meet before they wait in kernels"))
        self._gated = wanted and self.shares_device and not self._no_peers

    def _why_no_peers(self, devices: list[str]) -> str:
        """Why ranks cannot address each other's GPU memory, or "". The same on all ranks."""
        group = self.group
        if len(group.local_ranks) < group.size:
            return "the group spans several nodes"
        if self.shares_device and os.environ.get(OVERLAPPING) != "1":
            reason = f"ranks share a GPU and {OVERLAPPING} is not 1"
        else:
            reason = self._why_no_access(set(devices))
        said = group.exchange([reason, self.device.index, torch_symmetric.folder()], "peer access")
        found = next((one for one, _, _ in said if one), "")
        if found:
            return found
        if len({index for _, index, _ in said}) < group.size and os.environ.get(OVERLAPPING) != "1":
            return "ranks number their GPUs differently, and torch takes GPUs of one number for one"
        if len({folder for _, _, folder in said}) > 1:
            return "ranks have different temporary folders (TMPDIR), through which torch shares memory"
        return ""

    def _why_no_access(self, devices: set[str]) -> str:
        """GPUs are told apart by their uuid: an index means something else in a process that sees other GPUs."""
        visible = {
            str(torch.cuda.get_device_properties(index).uuid): index for index in range(torch.cuda.device_count())
        }
        if not devices <= set(visible):
            return "this process does not see the GPUs of all ranks"
        mine = self.device.index
        others = [visible[one] for one in sorted(devices) if visible[one] != mine]
        if not all(torch.cuda.can_device_access_peer(mine, one) for one in others):
            return "the GPUs have no peer access"
        if not all(stream_memory.has_atomics(mine, one) for one in others):
            return "the GPUs have peer access without atomics, by which kernels signal"
        return ""

    # -- memory --------------------------------------------------------------------------------------------------

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[list[torch.Tensor | None], object]:
        group = self.group
        count = prod(shape)
        failure = ""
        flat: torch.Tensor | None = None
        self.rest()
        try:
            flat = self._mapped(max(1, count), dtype)
            flat.zero_()
        except RuntimeError as error:
            failure = str(error).splitlines()[0]  # told to all ranks below: none may be left waiting for this one
        self._agree_on_allocation(failure)
        assert flat is not None
        if self._no_peers:
            views: list[torch.Tensor | None] = [None] * group.size
            views[group.rank] = flat[:count].view(shape)
            return views, flat
        shared, handle = torch_symmetric.share(flat, group.process_group, group.exchange)
        torch.cuda.current_stream(self.device).synchronize()  # the zeros are there before anybody writes
        group.barrier()
        return [view[:count].view(shape) for view in shared], (flat, handle)

    def _mapped(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Also where nobody else maps it: copies of it need no lock of torch's context (`copy_context.py`)."""
        try:
            return torch_symmetric.allocate(count, dtype, self.device)
        except RuntimeError:  # torch's own pool may hold what the driver lacks
            torch.cuda.empty_cache()
            return torch_symmetric.allocate(count, dtype, self.device)

    def joined(self, buffer: SymmetricBuffer) -> Joined:
        """All ranks' parts of a buffer side by side (`joined.py`). Callers may release them before the fabric does."""
        made = Joined([buffer.address(rank) for rank in range(self.group.size)], self.device)
        self._joined.append(made)
        return made

    def part(self, joined: Joined) -> None:
        """Unmap what `joined` made; nothing uses it any more."""
        joined.release()
        self._joined.remove(joined)

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def settle(self) -> None:
        torch.cuda.current_stream(self.device).synchronize()

    def rest(self) -> None:
        """Wait for all kernels of this rank, before memory is made or pinned.

        That may wait for them anyway, but with the driver's lock in its hands, or the interpreter's; and a kernel may
        be waiting for a thread of this process that needs them, such as the proxy's. This wait holds neither.
        """
        torch.cuda.synchronize(self.device)

    def _quiesce(self) -> None:
        self.rest()
        self.group.barrier()

    # -- signals, lanes, streams -----------------------------------------------------------------------------------

    def signals(self, count: int) -> Signals:
        words = self.buffer(count * _WORDS, torch.int32)
        bases = [
            words.address(rank) if not self._no_peers or rank == self.group.rank else 0
            for rank in range(self.group.size)
        ]
        made = CudaSignals(self, bases, count, owner=words)
        self._signals.add(made)
        return made

    def signal_word(self, signals: Signals, index: int) -> torch.Tensor:
        """My word of device-side `signals`, for a kernel."""
        assert isinstance(signals, CudaSignals)
        return signals.word(self.group.rank, index)

    def flags(self, count: int) -> Signals:
        """In pinned host memory: the watchdog can set them by a plain store, whatever state the driver is in."""
        self.rest()
        words = PinnedSegment(self.group, self.group.size * count * WORD_STRIDE, "flags between streams")
        bases = [words.address + rank * count * WORD_STRIDE for rank in range(self.group.size)]
        made = CudaSignals(self, bases, count, owner=words)
        self._signals.add(made)
        self._flags.append(made)  # whoever drops them says nothing about streams: they stay pinned until released
        return made

    def lanes(self) -> dict[str, str]:
        apart = "" if len(self.group.local_ranks) == self.group.size else "the group spans several nodes"
        return {"net": "", "peer": self._no_peers, "dma": apart}

    def _open_lane(self, name: str) -> Lane:
        from .cuda_lanes import CopyLane, PeerLane, StagedLane
        from .net import NetLane

        self.rest()
        if name == "net":
            return NetLane(self.group, self.guard.watch, apart=not self.shares_device)
        if name == "peer":
            return PeerLane(self)
        return StagedLane(self) if self._no_peers or self.shares_device else CopyLane(self)

    def gate(self) -> Callable[[], None]:
        return self.meeting("gate") if self._gated else super().gate()

    def meeting(self, name: str) -> Callable[[], None]:
        with self._lock:
            if name not in self._gates:
                self._gates[name] = Gate(self, name)
        self._gates[name].follow()  # what is refused must not be refused half-way
        return self._gates[name]

    def poison_if_aborted(self, *made: torch.Tensor) -> None:
        for one in made:
            poison_if_aborted(one if one.is_contiguous() else one.mT, self.guard.abort)

    def follow(self, what: str) -> None:
        with self._lock:
            if what not in self._turns:
                self._turns[what] = Turns(stream_memory.new_event(self.device))
        self._turns[what].follow(self.device)

    def enqueued(self, what: str) -> None:
        self._turns[what].enqueued(self.device)

    def stream(self, name: str, priority: int = 0) -> Stream:
        with self._lock:
            key = (name, priority)
            if key not in self._streams:
                self._streams[key] = CudaStream(self.device, priority)
            return self._streams[key]

    def computing(self, multiprocessors: int | None) -> contextlib.AbstractContextManager[None]:
        return on_multiprocessors(multiprocessors, self.device, self.shares_device)

    def sharing(self, multiprocessors: int | None) -> contextlib.AbstractContextManager[None]:
        """Whole cards are divided once, by `divide`: the caller is then on a stream of its part."""
        return bounded_grids(multiprocessors, self.device)

    def divide(self, multiprocessors: int) -> tuple[green.Part, green.Part]:
        """Two green contexts that share no SM, and their streams: the first with about so many SMs, the second with the
        others.

        The second is split off and rounded up by the driver, in steps of 8 SMs on Hopper.
        """
        if self.shares_device:
            reason = "ranks share this GPU, and MPS and green contexts exclude each other"
            raise errors.StrategyUnavailable(
                strategy="a partition", reason=reason, possible="kernels with a bounded grid"
            )
        with self._lock:
            return green.divided(self.device, multiprocessors)

    @contextlib.contextmanager
    def guarded_call(self, outputs: tuple[torch.Tensor, ...], itself: bool = False) -> Iterator[None]:
        with torch.cuda.device(self.device):  # a thread that never chose a device starts on the first
            if itself:
                with super().guarded_call(outputs):
                    yield
                return
            self.guard.enter()
            try:
                with super().guarded_call(outputs):
                    yield
            finally:
                self.guard.leave(outputs)

    def poisons_itself(self) -> None:
        self.guard.poisons_itself()

    def close(self) -> None:
        if self.group.failed:
            return  # streams may still hang in what is being released: the memory stays until the process ends
        with torch.cuda.device(self.device):  # a thread that never chose a device starts on the first
            torch.cuda.synchronize(self.device)
            self.guard.close()
            self._streams.clear()
            for one in self._joined:
                one.release()
            self._joined.clear()
            super().close()
        self._flags.clear()


class CudaSignals(Signals):
    """Words in symmetric device memory or in pinned host memory, moved by stream memory operations.

    Device words can be added to and are what kernels poll. Host words are for streams only: GPUs have no atomics on
    memory across PCIe, but the watchdog can release who waits for them without asking the driver.
    """

    def __init__(
        self, fabric: CudaFabric, bases: list[int], count: int, owner: SymmetricBuffer | PinnedSegment
    ) -> None:
        self.count = count
        self._fabric = fabric
        self._rank = fabric.group.rank
        self._bases = bases
        self._owner = owner
        self._on_host = isinstance(owner, PinnedSegment)

    def add(self, rank: int, index: int, amount: int = 1) -> None:
        """A one-thread kernel: stream memory operations cannot add. It needs a free SM, unlike `set`."""
        from ..kernels.signals import add_kernel

        add_kernel[(1,)](self.word(rank, index), amount, num_warps=1)

    def word(self, rank: int, index: int) -> torch.Tensor:
        """A word in device memory as a tensor, for a kernel."""
        if isinstance(self._owner, PinnedSegment):
            raise errors.InvalidArgument(argument="signals", was="flags in host memory", must="signals for kernels")
        self.address(rank, index)  # refuses what is out of range
        return self._owner.peer(rank)[index * _WORDS :]

    def set(self, rank: int, index: int, value: int) -> None:
        stream_memory.write(stream_memory.current_stream(self._fabric.device), self.address(rank, index), value)

    def wait(self, index: int, target: int, sender: int | None = None) -> None:
        self._fabric.guard.wait(self.address(self._rank, index), target, self._on_host)

    def perform(self, steps: Sequence[Step]) -> None:
        self._fabric.guard.perform(stream_memory.current_stream(self._fabric.device), self.packed(steps))

    def packed(self, steps: Sequence[Step]) -> bytes:
        """The steps as one stop of a stream (`StreamGuard.perform`), as often as one likes. Their waits are watched."""
        operations = [(waits, self.address(rank, word), value) for waits, rank, word, value, _ in steps]
        for waits, address, target in operations:
            if waits:
                self._fabric.guard.expect(address, target, self._on_host)
        return stream_memory.packed(operations)

    def read(self, index: int) -> int:
        """Waits for the current stream."""
        torch.cuda.current_stream(self._fabric.device).synchronize()
        if isinstance(self._owner, PinnedSegment):
            return int(atomics.load(self.address(self._rank, index)))
        return int(self._owner.local[index * _WORDS].item())

    def address(self, rank: int, index: int) -> int:
        if not 0 <= index < self.count:
            raise errors.InvalidArgument(argument="index", was=index, must=f"between 0 and {self.count - 1}")
        if not self._bases:
            raise errors.BufferReleased(shape=f"{self.count} signals")
        if self._bases[rank] == 0:
            raise errors.NoPeerPointer(peer=rank, rank=self._rank, reason=self._fabric.lanes()["peer"])
        return self._bases[rank] + index * WORD_STRIDE

    def release(self) -> None:
        if not self._bases:
            return
        first = self._bases[self._rank]
        self._bases = []
        self._fabric.guard.forget(first, first + self.count * WORD_STRIDE)
        if isinstance(self._owner, PinnedSegment):
            self._owner.close()
        else:
            self._owner.release()


class CudaStream(Stream):
    """A torch stream beside the current one."""

    def __init__(self, device: torch.device, priority: int) -> None:
        self._device = device
        self.stream = stream_memory.new_stream(device, priority=priority)
        self._event = stream_memory.new_event(device)

    def fork(self) -> None:
        here = stream_memory.current_stream(self._device)
        stream_memory.after(self.stream.cuda_stream, here, self._event)

    def after(self, other: Stream) -> None:
        assert isinstance(other, CudaStream)
        stream_memory.after(self.stream.cuda_stream, other.stream.cuda_stream, self._event)

    def run(self, work: Callable[[], None]) -> None:
        with stream_memory.current(self.stream):
            work()

    def join(self) -> None:
        here = stream_memory.current_stream(self._device)
        stream_memory.after(here, self.stream.cuda_stream, self._event)
