"""Computation beside communication on one GPU: what each strategy gains, and why the two disturb each other.

- A virtual node of 4 ranks with real collectives over peer memory and over the host link (`undertow c3 run` does this
  part too), each strategy, results checked exactly.
- The whole card with one rank: computations beside host copies and beside a local copy on SMs. Both are stand-ins.
- Thieves of SMs, L2 and memory bandwidth of a known size beside the same computations.
- Records of %smid: two halves of a divided card share no SM, and a bounded grid stays within its number.
- What the GPU tests check (graphs, failures, lifetimes), and the worked example of gradients beside a backward pass.

    PYTHONPATH=src python bench/gpu_c3.py [--ranks 4] [--parts node,tables,card,...] [--out undertow-c3.json]
    PYTHONPATH=src python bench/gpu_c3.py --show bench/results/gpu_c3_2026-11-16.json     # judged again, without a GPU
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import undertow as ut
from undertow.c3.characterise import PUBLISHED, Result, Tables, mean_shares
from undertow.c3.grids import Order, keep, line, measure_rank, scenarios_of_card, tables_rank
from undertow.c3.knowledge import narrowness
from undertow.fabric.environment import environment
from undertow.fabric.launch import run_script
from undertow.report.c3 import judge

MIB = 1 << 20
PARTS = ("node", "tables", "card", "thieves", "places", "variants", "shown", "gradients")
CARD = (("local copy", "peer", (512 * MIB, 2048 * MIB)), ("host copies", "dma", (64 * MIB, 256 * MIB)))


def card_main(file: str, parts: list[str]) -> dict[str, Any]:
    """One rank on the whole card."""
    found: dict[str, Any] = {}
    for name, measure in (("places", places), ("thieves", thieves), ("card", stand_ins)):
        if name in parts:
            began = time.monotonic()
            found[name] = measure(file)
            print(f"-- {name}: {time.monotonic() - began:.0f} s", flush=True)
    return found


def stand_ins(file: str) -> list[dict[str, Any]]:
    """Stand-ins instead of collectives."""
    from undertow.c3.characterise import Bench
    from undertow.c3.stand_ins import HostCopies, LocalCopy

    group = ut.init()
    bench = Bench(group, rounds=5, seconds=0.8)
    kinds = {"local copy": LocalCopy, "host copies": HostCopies}
    order = [one for stand_in, lane, sizes in CARD for one in scenarios_of_card(sizes, lane, stand_in)]
    results = []
    for scenario in sorted(order, key=lambda one: one.compute):
        exchange = kinds[scenario.collective](scenario.nbytes, group)
        names = ("base", "priority", "partition", "both") if scenario.lane == "peer" else ("base", "dma", "dma+fewer")
        result = bench.measure(scenario, names, exchange=exchange)
        results.append(result.to_json())
        keep(file, {"card": results[-1]})
        print(line(result), flush=True)
    return results


def thieves(file: str) -> list[dict[str, Any]]:
    from undertow.c3.attribute import attribute

    group = ut.init()
    found = []
    for ctas in (8, 32):
        for loss in attribute(group, ctas):
            found.append(loss.to_json())
            keep(file, {"thieves": found[-1]})
    return found


def places(file: str) -> dict[str, Any]:
    """Which SMs a divided card's halves use, while both are busy; and how many a bounded grid uses."""
    import torch

    from undertow.c3.stand_ins import Thieves
    from undertow.fabric import green

    group = ut.init()
    takers, found = Thieves(group.device), {}
    for count in (112, 120, 64):
        first, second = green.halves(group.device.index, count)
        torch.cuda.synchronize()
        records = []
        for part in (first, second):
            part.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(part.stream):
                records.append(takers.places(2 * part.multiprocessors, 200_000))
        torch.cuda.synchronize()
        mine, others = (set(one.tolist()) for one in records)
        found[f"divided at {count}"] = {
            "multiprocessors": [first.multiprocessors, second.multiprocessors],
            "used": [len(mine), len(others)], "in both": len(mine & others),
        }  # fmt: skip
    for ctas in (4, 16, 32):
        record = takers.places(ctas, 200_000)
        torch.cuda.synchronize()
        found[f"grid of {ctas}"] = {"used": len(set(record.tolist()))}
    keep(file, {"places": found})
    return found


def node_main(order: dict[str, Any], parts: list[str], until: float) -> dict[str, Any]:
    """Real collectives in a virtual node; after the scenarios what there is still time for."""
    found: dict[str, Any] = {}
    group = ut.init()
    example = str(Path(__file__).parent.parent / "examples" / "gradient_overlap.py")
    works: dict[str, Any] = {
        "node": lambda: measure_rank(order),
        "shown": shown,
        "gradients": lambda: [run_script(example, [lane]) for lane in ("dma", "peer")] and None,
        "variants": variants,
        "tables": lambda: tables_rank((4, 8, 16), 128 * MIB, "peer", order["file"]),
        "node places": node_places,
    }
    for name, work in works.items():
        if name.split()[-1] in parts and group.reduce_max([time.time()])[0] < until:
            began = time.monotonic()
            try:
                found[name] = work()
            except Exception:  # what was measured before is still worth having; the ranks may no longer agree
                found[f"{name} failed"] = traceback.format_exc()
                print(f"{name} FAILED on rank {group.rank}: {traceback.format_exc()[-1500:]}", flush=True)
                break
            if group.rank == 0:
                if name not in ("node", "tables"):  # those write as they go
                    keep(order["file"], {name: found[name]})
                print(f"-- {name}: {time.monotonic() - began:.0f} s", flush=True)
    return found


def variants() -> dict[str, dict[str, float]]:
    """Seconds of copy-engine collectives, one copy for each peer and several at once, by the bytes of a piece."""
    import math

    import torch

    from undertow.c3.characterise import Bench
    from undertow.collective.copies import Copies, Variant

    group = ut.init()
    bench, found = Bench(group), {}
    for name in ("all_gather", "all_to_all", "all_reduce"):
        for piece in (4 << 10, 256 << 10, 4 << 20, 16 << 20):
            kinds = {
                "one copy per peer": Variant(math.inf, math.inf, False), "batched": Variant(math.inf, math.inf),
                "batched, parcels of 2 MiB": Variant(math.inf, 2 << 20),
            }  # fmt: skip
            if name == "all_reduce":
                del kinds["one copy per peer"]  # what is summed is sent batched, what is shared is copied out once
            count = piece // 2
            source = torch.ones(count if name == "all_gather" else count * group.size, device=group.device).bfloat16()
            out = torch.empty(count * group.size, device=group.device, dtype=torch.bfloat16)
            spans = {"all_gather": [count] * group.size, "all_reduce": [count * group.size]}.get(
                name, [count] * group.size**2
            )
            works = {
                number: partial(Copies(group.fabric, "dma", name, variant=variant).run, source, out, spans)
                for number, variant in enumerate(kinds.values())
            }
            times = bench._times(works)
            found[f"{name} {piece >> 10} KiB"] = dict(zip(kinds, times.values(), strict=True))
    return found


def node_places() -> list[list[int]]:
    """The SMs of a bounded grid of 8 CTAs on every rank, all of them at the same time."""
    import torch

    from undertow.c3.stand_ins import Thieves

    group = ut.init()
    takers = Thieves(group.device)
    word = torch.zeros(1, device=group.device)
    for _ in range(2):
        group.barrier()
        torch.cuda._sleep(12_000_000)
        ut.collective.all_reduce(word, group=group)  # ranks begin together
        record = takers.places(8, 3_000_000)
        torch.cuda.synchronize()
    return group.exchange(sorted(set(record.tolist())), "places")


def shown() -> list[str]:
    """What the GPU tests check: callables of all kinds, graphs, failures, lifetimes."""
    import sys

    sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "gpu"))
    import c3_checks

    return list(c3_checks.everything(compiled=False))


def table(found: dict[str, Any]) -> list[str]:
    lines = []
    for part, title in (("node", "virtual node"), ("card", "whole card, stand-ins")):
        results = [Result.from_json(one) for one in found.get(part, ())]
        if not results:
            continue
        wrong = sum(one.wrong for result in results for one in result.together.values())
        lines.append(f"{title}: {len(results)} scenarios, {wrong} wrong elements; mean share of ideal (speed-up)")
        for lane, shares in mean_shares(results).items():
            for name, share in shares.items():
                speeds = [one.speedup(name) for one in results if one.scenario.lane == lane and name in one.together]
                said = f"{PUBLISHED[name]:.0%}" if name in PUBLISHED else "-"
                lines.append(
                    f"  {lane:5} {name:10} {share:6.0%}  {statistics.mean(speeds):.2f}x mean, "
                    f"{min(speeds):.2f}x to {max(speeds):.2f}x   published {said}"
                )
        narrow = narrowness(Tables(**found["tables"])) if part == "node" and "tables" in found else ()
        for lane in ("peer", "dma"):
            known = [one for one in results if one.scenario.lane == lane]
            if len(known) < 4:
                continue
            judged = judge(known, narrow)
            lines.append(f"  model and advice over {lane}, held out: " + ", ".join(
                f"{name} {value:.3f}" for name, value in judged.items()))  # fmt: skip
        labels = [one.label for one in results]
        lines.append("  " + ", ".join(f"{name} {labels.count(name)}" for name in ("G-long", "C-long", "GC-equal")))
    for one in found.get("thieves", ()):
        lines.append(
            f"  {one['compute']:10} beside a thief of {one['thief']:9} on {one['ctas']:2} CTAs: x{one['slowdown']:.3f}"
            f"  ({one['thief_bytes_per_second'] / 1e9:.0f} GB/s)"
        )
    for side, by_name in found.get("tables", {}).items():
        for name, times in by_name.items():
            alone = next(iter(times.values()))
            said = ", ".join(f"{count}: x{seconds / alone:.2f}" for count, seconds in times.items())
            lines.append(f"  {side} {name} by SMs reserved, of {alone * 1e3:.2f} ms: {said}")
    for name, times in found.get("variants", {}).items():
        lines.append(f"  {name}: " + ", ".join(f"{kind} {seconds * 1e6:.0f} µs" for kind, seconds in times.items()))
    for name in ("places", "node places", "shown"):
        if name in found:
            lines.append(f"{name}: {found[name]}")
    return lines


def written(file: Path) -> list[tuple[str, Any]]:
    """What a part that failed had written before."""
    if not file.exists():
        return []
    return [pair for line in file.read_text().splitlines() for pair in json.loads(line).items()]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--out", type=Path, default=Path("undertow-c3.json"))
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="for all of it; parts that find no time are left out"
    )
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--show", type=Path, help="only print the tables of these results")
    options = parser.parse_args()
    if options.show:
        print("\n".join(table(json.loads(options.show.read_text()))))
        return
    lines_file = options.out.with_suffix(".lines")
    lines_file.unlink(missing_ok=True)
    file = str(lines_file.absolute())
    started = time.time()
    order = Order(until=started + 0.8 * options.seconds, rounds=options.rounds, file=file).to_args()
    parts = options.parts.split(",")
    runs: list[tuple[str, set[str], Any, int, tuple[Any, ...]]] = [
        ("virtual node", {"node", "tables", "variants", "shown", "gradients"}, node_main, options.ranks,
         (order, parts, started + 0.85 * options.seconds)),
        ("whole card", {"places", "thieves", "card"}, card_main, 1, (file, parts)),
    ]  # fmt: skip
    found: dict[str, Any] = {}
    for name, belongs, target, ranks, args in runs:
        if not belongs & set(parts) or time.time() > started + 0.85 * options.seconds:
            continue
        began = time.monotonic()
        try:
            found.update(ut.launch(target, ranks, device="cuda", args=args, deadline=40)[0])
        except Exception:  # the other parts are still worth having
            found[f"{name} failed"] = traceback.format_exc()
            print(f"{name} FAILED: {traceback.format_exc()[-2500:]}", flush=True)
            for kind, one in written(lines_file):
                if kind in ("node", "card", "thieves"):
                    found.setdefault(kind, []).append(one)
                else:
                    found[kind] = one
        print(f"-- {name}: {time.monotonic() - began:.0f} s", flush=True)
        options.out.write_text(json.dumps(found, indent=1, default=str) + "\n")
        print("\n".join(table(found)), flush=True)
    facts = environment({"link": f"virtual node of {options.ranks} and whole card"})
    options.out.write_text(json.dumps({**found, "environment": facts}, indent=1, default=str) + "\n")
    print(f"The results are in {options.out}.")


if __name__ == "__main__":
    main()
