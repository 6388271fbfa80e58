"""Compiles Triton kernels without a GPU and checks the memory ordering of the PTX that comes out.

`compile_kernel` gives the PTX, registers, spills and shared memory of a kernel for one GPU generation.
`check_release_order` and `check_acquire_order` look for what a race detector cannot find on one machine: a signal that
does not cover the stores of the other warps, a bulk (TMA) store that a signal can overtake, a load that other warps can
issue before the acquire.

Both checks follow every path of the control-flow graph and keep the set of things that *may* still be unordered. They
err on the side of reporting: a barrier counts only if it is unpredicated and spans the whole CTA, and a call counts as
a store and as a load. They assume what Triton guarantees, that branches around a barrier are uniform in the CTA.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

TARGETS = ("sm_80", "sm_90", "sm_100")


@dataclass(frozen=True)
class CompiledKernel:
    """What the compiler made of one kernel for one target."""

    ptx: str
    architecture: int
    shared: int  # bytes of shared memory for each CTA

    @cached_property
    def _ptxas_log(self) -> str:
        target = re.search(r"^\.target\s+(\w+)", self.ptx, re.MULTILINE)
        assert target, "the PTX names no target"
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "kernel.ptx"
            source.write_text(self.ptx)
            command = [get_ptxas(self.architecture).path, "-v", f"--gpu-name={target.group(1)}", str(source)]
            done = subprocess.run([*command, "-o", f"{folder}/kernel.cubin"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stderr

    @property
    def registers(self) -> int:
        """Registers for each thread."""
        return max(int(count) for count in re.findall(r"Used (\d+) registers", self._ptxas_log))

    @property
    def spills(self) -> int:
        """Bytes of spill stores and spill loads for each thread."""
        return sum(int(count) for count in re.findall(r"(\d+) bytes spill (?:stores|loads)", self._ptxas_log))

    @cached_property
    def sass(self) -> list[tuple[int, str]]:
        """The machine's own instructions, each with its address: only they tell in which order loads are issued."""
        target = re.search(r"^\.target\s+(\w+)", self.ptx, re.MULTILINE)
        assert target, "the PTX names no target"
        assembler = Path(get_ptxas(self.architecture).path)
        with tempfile.TemporaryDirectory() as folder:
            source, cubin = Path(folder) / "kernel.ptx", f"{folder}/kernel.cubin"
            source.write_text(self.ptx)
            subprocess.run([assembler, f"--gpu-name={target.group(1)}", source, "-o", cubin], check=True)
            command = [assembler.with_name("cuobjdump"), "-sass", cubin]
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return [
            (int(at, 16), code) for at, code in re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", text, re.MULTILINE)
        ]

    def innermost_loops(self, opcode: str) -> list[list[str]]:
        """The shortest loop of machine instructions around each that is of this kind."""
        backwards = [
            (int(to, 16), at) for at, code in self.sass for to in re.findall(r"BRA.*?(0x[0-9a-f]+)", code)
            if int(to, 16) < at
        ]  # fmt: skip
        around = [
            [one for one in backwards if one[0] <= at <= one[1]] for at, code in self.sass if opcode in code
        ]  # fmt: skip
        found = sorted({min(loops, key=lambda one: one[1] - one[0]) for loops in around if loops})
        return [[code for at, code in self.sass if first <= at <= last] for first, last in found]

    def innermost_loop(self, opcode: str) -> list[str]:
        """The shortest of them."""
        return min(self.innermost_loops(opcode), key=len)

    @property
    def serialised(self) -> bool:
        """Whether each wgmma waits for the one before, as ptxas has it do where it cannot tell accumulators apart."""
        return "serialized" in self._ptxas_log


_compiled: dict[Any, CompiledKernel] = {}


def compile_kernel(
    kernel: Any,
    signature: Mapping[str, str],
    constexprs: Mapping[str, Any],
    target: str,
    num_warps: int = 4,
    attrs: Mapping[str, int] | None = None,
    num_stages: int | None = None,
    maxnreg: int | None = None,
) -> CompiledKernel:
    """Compile a `@triton.jit` kernel for `target` ("sm_80", "sm_90", "sm_100"), once per process and variant.

    `signature` gives the Triton type of each run-time argument ("*i32", "i64"; without one, its default), `attrs` the
    number of bytes (or the factor) by which an argument is known to be divisible: 16 is what a launch finds for an
    aligned tensor.
    """
    attrs = attrs or {}
    usual = {one.name: one.default for one in kernel.params if one.has_default and one.name not in signature}
    constexprs = {**usual, **constexprs}
    key = (
        kernel,
        *(tuple(sorted(part.items())) for part in (signature, constexprs, attrs)),
        target,
        num_warps,
        num_stages,
        maxnreg,
    )
    if key not in _compiled:
        architecture = int(target.removeprefix("sm_"))
        types = {name: "constexpr" if name in constexprs else signature[name] for name in kernel.arg_names}
        divisible = {(kernel.arg_names.index(name),): [["tt.divisibility", by]] for name, by in attrs.items()}
        source = ASTSource(kernel, types, dict(constexprs), divisible)
        options = {"num_warps": num_warps} | ({} if num_stages is None else {"num_stages": num_stages})
        options |= {} if maxnreg is None else {"maxnreg": maxnreg}
        made = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
        _compiled[key] = CompiledKernel(made.asm["ptx"], architecture, made.metadata.shared)
    return _compiled[key]


@dataclass(frozen=True)
class Instruction:
    """One PTX instruction, and the indices of those that can run next."""

    line: int
    guard: str
    opcode: str
    operands: str
    next: tuple[int, ...]

    def __str__(self) -> str:
        return f"line {self.line}: {' '.join(f'{self.guard} {self.opcode} {self.operands}'.split())}"


_BODY = re.compile(r"\.(?:entry|func)\b[^;{]*?\)[^;{()]*?\{", re.DOTALL)
_LABEL = re.compile(r"\s*([A-Za-z_$%][\w$]*)\s*:(?!:)")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_LINE_DIRECTIVE = re.compile(r"^[ \t]*\.(?:loc|file)\b[^\n]*", re.MULTILINE)


def functions(ptx: str) -> Iterator[list[Instruction]]:
    """The instructions of each function of a PTX module, in textual order."""
    text = _COMMENT.sub(lambda comment: re.sub(r"[^\n]", "", comment.group()), ptx)
    text = _LINE_DIRECTIVE.sub("", text)
    for header in _BODY.finditer(text):
        yield _function(text, header.end())


def _function(text: str, start: int) -> list[Instruction]:
    statements: list[tuple[int, str, tuple[int, ...]]] = []
    labels: dict[tuple[tuple[int, ...], str], int] = {}
    scope: tuple[int, ...] = (0,)  # labels of an inline-assembly block are local to its braces
    scopes = 0
    position = start
    while scope:
        position = re.compile(r"\s*").match(text, position).end()  # type: ignore[union-attr]
        if text[position] == "{":
            scopes += 1
            scope = (*scope, scopes)
            position += 1
        elif text[position] == "}":
            scope = scope[:-1]
            position += 1
        elif label := _LABEL.match(text, position):
            labels[scope, label.group(1)] = len(statements)
            position = label.end()
        else:
            end = text.index(";", position)
            statement = text[position:end].strip()
            if statement and not statement.startswith("."):
                statements.append((text.count("\n", 0, position) + 1, statement, scope))
            position = end + 1
    return [_instruction(index, statements, labels) for index in range(len(statements))]


def _instruction(
    index: int,
    statements: list[tuple[int, str, tuple[int, ...]]],
    labels: dict[tuple[tuple[int, ...], str], int],
) -> Instruction:
    line, statement, scope = statements[index]
    parts = re.match(r"(@!?\S+)?\s*(\S+)\s*(.*)", statement, re.DOTALL)
    assert parts, statement
    guard, opcode, operands = parts.group(1) or "", parts.group(2), parts.group(3)
    following = {index + 1} if index + 1 < len(statements) else set()
    if opcode.startswith("brx"):
        following = set(labels.values())  # an indirect branch may go anywhere
    elif opcode.split(".")[0] == "bra":
        levels = (scope[:depth] for depth in range(len(scope), 0, -1))
        target = next(labels[level, operands] for level in levels if (level, operands) in labels)
        following = following | {target} if guard else {target}
    elif opcode.split(".")[0] in ("ret", "exit", "trap") and not guard:
        following = set()
    within = (target for target in sorted(following) if target < len(statements))
    return Instruction(line, guard, opcode, operands, tuple(within))


# A fact is something that may still be unordered: its kind, and the index of the instruction that brought it about.
Fact = tuple[str, int]
Step = Callable[[int, Instruction, frozenset[Fact]], frozenset[Fact]]


def _states(code: list[Instruction], step: Step) -> list[frozenset[Fact]]:
    """The facts that may hold before each instruction: the least fixed point over all paths."""
    before: list[frozenset[Fact]] = [frozenset() for _ in code]
    work = list(range(len(code)))[::-1]
    while work:
        index = work.pop()
        after = step(index, code[index], before[index])
        for following in code[index].next:
            if not after <= before[following]:
                before[following] |= after
                work.append(following)
    return before


def _renamed(facts: frozenset[Fact], names: Mapping[str, str]) -> frozenset[Fact]:
    return frozenset((names.get(kind, kind), origin) for kind, origin in facts)


def _without(facts: frozenset[Fact], *kinds: str) -> frozenset[Fact]:
    return frozenset(fact for fact in facts if fact[0] not in kinds)


def _elsewhere(opcode: str) -> bool:
    """Whether the instruction names a state space that no other CTA shares."""
    return bool(re.search(r"\.(?:shared|local|param|const)\b", opcode))


def _is_barrier(at: Instruction) -> bool:
    """A barrier of the whole CTA (or of the cluster): no predicate, no thread count."""
    whole = "," not in at.operands if ".sync" in at.opcode else at.operands.count(",") == 2
    cta = bool(re.match(r"(?:bar|barrier)(?:\.cta)?\.(?:sync|red)\b", at.opcode)) and whole
    return not at.guard and (cta or at.opcode.startswith("barrier.cluster.wait"))


def _is_fence(at: Instruction) -> bool:
    """A fence that orders memory beyond the CTA."""
    fence = r"fence(?:\.(?:acq_rel|sc|release|acquire))?\.(?:cluster|gpu|sys)\b|membar\.(?:gl|sys)\b"
    return not at.guard and bool(re.match(fence, at.opcode))


def _is_proxy_fence(at: Instruction) -> bool:
    """A fence between ordinary accesses and the bulk copies (async proxy) that covers global memory."""
    return not at.guard and bool(re.fullmatch(r"fence\.proxy\.async(?:\.global)?", at.opcode))


def _writes(at: Instruction) -> bool:
    return bool(re.match(r"(?:multimem\.)?(?:st|red|atom)\b", at.opcode)) and not _elsewhere(at.opcode)


def _is_release(at: Instruction) -> bool:
    return _writes(at) and bool(re.search(r"\.(?:release|acq_rel)\b", at.opcode)) and ".cta" not in at.opcode


def _is_relaxed_write(at: Instruction) -> bool:
    return _writes(at) and bool(re.search(r"\.(?:relaxed|volatile)\b", at.opcode)) and ".cta" not in at.opcode


def _is_bulk_store(at: Instruction) -> bool:
    return bool(re.match(r"cp\.(?:reduce\.)?async\.bulk\b.*\.global\.shared", at.opcode))


_UNCOVERED = {
    "store": "has no CTA barrier between it and the release",
    "store, then fence": "has no CTA barrier between it and the fence of the release",
    "bulk": "is not committed to a bulk group before the release",
    "bulk committed": "is not waited for (cp.async.bulk.wait_group 0, not .read) before the release",
    "bulk complete": "has no fence.proxy.async between its wait and the release",
    "bulk fenced": "has no CTA barrier between its proxy fence and the release",
}


def _release_step(index: int, at: Instruction, facts: frozenset[Fact]) -> frozenset[Fact]:
    if _is_barrier(at):
        return _without(facts, "store", "store, then fence", "bulk fenced", "fence")
    if _is_fence(at):
        return _renamed(facts, {"store": "store, then fence"}) | {("fence", index)}
    if _is_proxy_fence(at):
        return _renamed(facts, {"bulk complete": "bulk fenced"})
    if at.opcode == "cp.async.bulk.commit_group" and not at.guard:
        return _renamed(facts, {"bulk": "bulk committed"})
    if at.opcode == "cp.async.bulk.wait_group" and at.operands == "0" and not at.guard:
        return _renamed(facts, {"bulk committed": "bulk complete"})
    if _is_bulk_store(at):
        return facts | {("bulk", index)}
    if _is_release(at) or _fenced_release(at, facts):
        return facts  # the signal itself is not data
    if _writes(at) or at.opcode.startswith("call"):
        return facts | {("store", index)}
    return facts


def _fenced_release(at: Instruction, facts: frozenset[Fact]) -> bool:
    return _is_relaxed_write(at) and any(kind == "fence" for kind, _ in facts)


def check_release_order(ptx: str) -> list[str]:
    """Each release that may not cover an earlier store of its CTA; an empty list is a pass.

    A release is an atomic, reduction or store with `.release` or `.acq_rel` beyond CTA scope, or a fence followed by a
    relaxed write. One thread releases for the CTA, so each store before it needs a CTA barrier in between, on every
    path. A bulk store (TMA) is asynchronous and in another proxy: it needs commit_group, wait_group 0,
    fence.proxy.async, and then the barrier.
    """
    found = []
    for code in functions(ptx):
        for at, facts in zip(code, _states(code, _release_step), strict=True):
            if not (_is_release(at) or _fenced_release(at, facts)):
                continue
            uncovered = sorted((origin, kind) for kind, origin in facts if kind in _UNCOVERED)
            found += [f"{at}: {code[origin]} {_UNCOVERED[kind]}" for origin, kind in uncovered]
    return found


def _reads(at: Instruction) -> bool:
    return bool(re.match(r"(?:ld|ldu|atom|multimem\.ld_reduce)\b", at.opcode)) and not _elsewhere(at.opcode)


def _is_acquire(at: Instruction) -> bool:
    return _reads(at) and bool(re.search(r"\.(?:acquire|acq_rel)\b", at.opcode)) and ".cta" not in at.opcode


def _is_relaxed_read(at: Instruction) -> bool:
    return _reads(at) and bool(re.search(r"\.(?:relaxed|volatile)\b", at.opcode)) and ".cta" not in at.opcode


def _is_bulk_load(at: Instruction) -> bool:
    return bool(re.match(r"cp\.async\.bulk\b.*\.shared(?:::\w+)?\.global", at.opcode))


def _is_data_load(at: Instruction) -> bool:
    """A load of data, as against a look at a signal (acquire, relaxed, atomic)."""
    plain = re.match(r"ldu?\b(?!.*\.(?:acquire|relaxed|mmio)\b)", at.opcode) and not _elsewhere(at.opcode)
    copy = re.match(r"cp\.async\.c[ag]\.shared", at.opcode)
    return bool(plain or copy) or _is_bulk_load(at) or at.opcode.startswith("call")


def _acquire_step(index: int, at: Instruction, facts: frozenset[Fact]) -> frozenset[Fact]:
    if _is_barrier(at):
        return _without(facts, "acquire")
    if _is_proxy_fence(at):
        return _without(facts, "acquire, other proxy")
    if _is_acquire(at):
        return facts | {("acquire", index), ("acquire, other proxy", index)}
    if _is_relaxed_read(at):
        return facts | {("look", index)}
    if _is_fence(at):
        looks = {origin for kind, origin in facts if kind == "look"}
        made = {(kind, origin) for origin in looks for kind in ("acquire", "acquire, other proxy")}
        return _without(facts, "look") | made
    return facts


def check_acquire_order(ptx: str) -> list[str]:
    """Each load of data that may run before an acquire covers it; an empty list is a pass.

    An acquire is a load or atomic with `.acquire` or `.acq_rel` beyond CTA scope, or a relaxed load followed by a
    fence. It covers the thread that did it, so a CTA barrier must stand between it and the next load of data, on every
    path. A bulk load (TMA) also needs fence.proxy.async: the bytes were written by ordinary stores.
    """
    found = []
    for code in functions(ptx):
        for at, facts in zip(code, _states(code, _acquire_step), strict=True):
            if not _is_data_load(at):
                continue
            for kind, origin in sorted(facts, key=lambda fact: (fact[1], fact[0])):
                if kind == "acquire":
                    found.append(f"{at}: no CTA barrier since the acquire, {code[origin]}")
                if kind == "acquire, other proxy" and _is_bulk_load(at):
                    found.append(f"{at}: no fence.proxy.async since the acquire, {code[origin]}")
    return found


def check_after_bulk_stores(ptx: str, release: str, dimensions: str) -> int:
    """How many releases of a tile that left by TMA there are; fails where one does not cover all its bulk stores.

    Leaders of the first warps complete their own stores, the warps meet, one releases. Which warps' leaders issue
    stores is read from the stores' guards: an elected thread below a bound, which must be among those that meet.
    """
    found = re.findall(
        r"setp\.ge\.u32 other, thread, (\d+);\s*@other bra END;\s*elect\.sync _\|leader, 0xffffffff;\s*"
        r"@!leader bra MEET;\s*cp\.async\.bulk\.wait_group 0;\s*fence\.proxy\.async;\s*MEET:\s*"
        r"barrier\.sync 15, (\d+);\s*setp\.ge\.u32 other, thread, 32;\s*@other bra END;\s*@!leader bra END;\s*"
        rf"{release}",
        ptx,
    )
    assert found, "no release completes the bulk stores first"
    stores = re.findall(rf"@(%p\d+) cp\.async\.bulk\.tensor\.{dimensions}\.global", ptx)
    assert stores
    for guard in stores:
        parts = re.search(rf"and\.pred\s+{guard}, (%p\d+), (%p\d+);", ptx)
        assert parts is not None, f"{guard} is not a conjunction"
        elected = [one for one in parts.groups() if re.search(rf"elect\.sync\s+%r\d+\|{one}, -1;", ptx)]
        assert elected, guard
        (other,) = set(parts.groups()) - set(elected)
        bound = _threads_below(ptx, other)
        for covered, met in found:
            assert bound <= int(covered) == int(met), f"threads below {bound} store, those below {covered} complete"
    return len(found)


def _threads_below(ptx: str, predicate: str) -> int:
    """The bound of the threads for which a predicate holds, which the compiler writes in one of two ways."""
    below = re.search(rf"setp\.lt\.u32\s+{predicate}, %r\d+, (\d+);", ptx)
    if below is not None:
        return int(below[1])
    masked = re.search(rf"setp\.eq\.b32\s+{predicate}, (%r\d+), 0;", ptx)
    assert masked is not None, f"{predicate} is no bound of threads"
    mask = re.search(rf"and\.b32\s+{masked[1]}, %r\d+, (\d+);", ptx)
    assert mask is not None, f"{masked[1]} is no mask of threads"
    bits = int(mask[1])
    assert bits | ((bits & -bits) - 1) == 255, "all bits of a thread's number from one on"
    return bits & -bits
