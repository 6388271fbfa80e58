"""MSCCL's XML, written: refused where MSCCL's runtime would have no room for the schedule."""

from __future__ import annotations

from xml.sax.saxutils import quoteattr

from ...errors import NotExpressible
from .msccl import LEAST_BYTES, MOST_BYTES, Algorithm, Step, beyond_limits
from .text import LONGEST_WORD

FORMAT = "MSCCL XML"


def text_of(algorithm: Algorithm) -> str:
    """The file, in the dialect that all executors read."""
    reason = beyond_limits(algorithm)
    if reason is not None:
        raise NotExpressible(name=algorithm.name, format=FORMAT, reason=reason)
    facts = algorithm.facts
    attributes: list[tuple[str, object]] = [
        # A runtime uses 63 letters of it and reads 255.
        ("name", algorithm.name[:LONGEST_WORD]),
        ("proto", facts.protocol),
        ("nchannels", max(1, algorithm.channels)),
        ("nchunksperloop", algorithm.chunks),
        ("ngpus", algorithm.ranks),
        ("coll", algorithm.collective),
        ("inplace", int(True in facts.forms)),
        ("outofplace", int(False in facts.forms)),
    ]
    # Azure's and AMD's executors read no file without sizes.
    attributes.append(("minBytes", LEAST_BYTES if facts.min_bytes is None else facts.min_bytes))
    attributes.append(("maxBytes", MOST_BYTES if facts.max_bytes is None else facts.max_bytes))
    if facts.threads is not None:
        attributes.append(("nthreads", facts.threads))
    attributes += facts.others
    lines = [_tag("algo", attributes, 0, ">")]
    for rank, gpu in enumerate(algorithm.gpus):
        sizes = [("i_chunks", gpu.input_chunks), ("o_chunks", gpu.output_chunks), ("s_chunks", gpu.scratch_chunks)]
        lines.append(_tag("gpu", [("id", rank), *sizes], 1, ">"))
        for number, block in enumerate(gpu.threadblocks):
            peers = [("send", block.send), ("recv", block.receive), ("chan", block.channel)]
            lines.append(_tag("tb", [("id", number), *peers], 2, ">"))
            lines += [_tag("step", _step(at, step), 3, "/>") for at, step in enumerate(block.steps)]
            lines.append("    </tb>")
        lines.append("  </gpu>")
    lines.append("</algo>")
    return "\n".join(lines) + "\n"


def _step(number: int, step: Step) -> list[tuple[str, object]]:
    block, awaited = step.depends_on or (-1, -1)
    return [
        ("s", number), ("type", step.type), ("srcbuf", step.source[0]), ("srcoff", step.source[1]),
        ("dstbuf", step.destination[0]), ("dstoff", step.destination[1]), ("cnt", step.count), ("depid", block),
        ("deps", awaited), ("hasdep", int(step.published)),
    ]  # fmt: skip


def _tag(name: str, attributes: list[tuple[str, object]], level: int, ending: str) -> str:
    said = " ".join(f"{key}={quoteattr(str(value))}" for key, value in attributes)
    return f"{'  ' * level}<{name} {said}{ending}"
