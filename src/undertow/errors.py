"""Every error a user can meet: one class and one sentence each.

A class holds its sentence as a template; raising code supplies the facts. The facts stay on the exception, so
that programs can read them, and survive the trip from a rank to its launcher.
"""

from __future__ import annotations

from typing import Any


class UndertowError(RuntimeError):
    """Base of all errors raised on purpose by Undertow."""

    template = "{reason}"

    def __init__(self, **facts: Any) -> None:
        super().__init__(self.template.format(**facts))
        self.facts = facts

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.facts)


def _rebuild(kind: type[UndertowError], facts: dict[str, Any]) -> UndertowError:
    return kind(**facts)


class InvalidArgument(UndertowError, ValueError):
    """A wrong shape, dtype, device, count or option."""

    template = "{argument} is {was}, but must be {must}."


class MismatchedCall(UndertowError):
    """Ranks of one group called different things."""

    template = (
        "Ranks of group {group} disagree on call {call}: rank {rank} called {mine},"
        " but rank {other_rank} called {theirs}."
    )


class RankLost(UndertowError):
    """A rank died, left, or did not arrive before the deadline."""

    template = "Rank {rank} of group {group} is lost: {reason}."


class GroupClosed(UndertowError):
    """Use of a group after its close."""

    template = "Group {group} was closed; make a new one with undertow.as_group or undertow.init."


class ForkedProcess(UndertowError):
    """Use of a group in a child that was forked after the group was made."""

    template = (
        "This process is a fork of rank {rank} of group {group}, and only that rank may use its memory;"
        " make calls there, or start processes by spawn."
    )


class DeviceLost(UndertowError):
    """The driver took this rank's GPU context away."""

    template = "The GPU context of rank {rank} was lost: {reason}."


class StrategyUnavailable(UndertowError, ValueError):
    """A strategy that cannot run here."""

    template = "Strategy {strategy!r} is not available: {reason}; possible here: {possible}."


class NoPeerPointer(UndertowError):
    """A view of memory on a rank that has no shared memory with this one."""

    template = "Rank {peer} has no memory that rank {rank} can address ({reason}); use lane 'net' to reach it."


class BufferReleased(UndertowError):
    """Use of a symmetric buffer after its release."""

    template = "The symmetric buffer of shape {shape} was released; allocate a new one."


class OutOfSharedMemory(UndertowError, MemoryError):
    """A segment larger than the node can hold."""

    template = "Shared memory for {purpose} needs {wanted}, but {available} is available on this node."


class AllocationFailed(UndertowError, MemoryError):
    """A collective allocation that one rank could not make; raised on all of them."""

    template = "Rank {rank} could not allocate: {reason}"


class WorkspaceTooSmall(UndertowError):
    """A workspace that would have to grow where it cannot."""

    template = (
        "The call needs {wanted} of workspace, {held} is held, and it cannot grow inside a CUDA graph capture;"
        " call ut.reserve({wanted_bytes}) before capturing."
    )


class CheckpointFailed(UndertowError):
    """A checkpoint that one rank could not read or write; raised on all others."""

    template = "Rank {rank} could not {what} the checkpoint: {reason}"


class LaunchFailed(UndertowError):
    """A rank of a launch failed; carries the first cause."""

    template = "Rank {rank} of {ranks} failed first: {cause}{traceback}{flight}"


class LaunchRefused(UndertowError, ValueError):
    """A launch that cannot start."""

    template = "Cannot launch: {reason}."


class VirtualNodeUnavailable(UndertowError):
    """Several ranks on one GPU were asked for, and MPS cannot be had."""

    template = "A virtual node of {ranks} ranks on one GPU needs CUDA MPS, but {reason}; {remedy}."


class StillRunning(UndertowError, TimeoutError):
    """A wait with a limit of its own that ended before what it waited for."""

    template = "{what} is still running after the {seconds:g} s that its wait was given."


class NotInitialised(UndertowError):
    """Use of a group before ut.init()."""

    template = "{what} needs a group; call undertow.init() first."


class ProgramRefused(UndertowError, ValueError):
    """A collective program or schedule that is wrong; says where and how."""

    template = "Program {program} is refused at {where}: {reason}.{trace}"


class UnusableTarget(UndertowError, ValueError):
    """A target of `undertow collective` that names no program, or whose file fails by itself."""

    template = "{target} cannot be used: {reason}."


class UnreadableFile(UndertowError, ValueError):
    """A schedule file that is damaged, too large, or in a form that nobody here reads."""

    template = "{path} cannot be read: {reason}."


class NotExpressible(UndertowError, ValueError):
    """A schedule that another system's format or runtime has no room for."""

    template = "{name} cannot be written as {format}: {reason}."


class SimulationRefused(UndertowError):
    """A simulation that cannot go on: a schedule that waits for ever, a graph in a circle, a trace that is damaged."""

    template = "The simulation cannot run: {reason}."
