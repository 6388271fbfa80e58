"""Fused matmuls in a virtual node, side by side: one kernel whose tiles move themselves against matmul + collective.

For every layer and number of rows, in one run, interleaved, device time of a call inside a CUDA graph, the slowest rank
counts. Every variant is compared with exact integers first; one that is wrong is left out and named.

- cublas: the matmul alone; gemm: our own kernel, the fused one's main loop, with communication off;
- serial: cuBLAS and then our collective on symmetric buffers, for several numbers of CTAs: the best counts;
- fused: one launch, for several plans (of few rows also those of --decode: the best counts);
- torch: PyTorch's async-TP operators (eager where they cannot be captured).

Layers of tensor parallelism are in `fused_layers.py`, their backward passes in `fused_backward.py`, layers of expert
parallelism (leave: matmul_all_to_all, arrive: all_to_all_matmul, one weight for each expert) in `fused_tokens.py`,
scores in `fused_report.py`.

    PYTHONPATH=src python bench/gpu_fused.py [--ranks 4,8] [--only scatter,gather,...] [--m ...] [--out FILE.json]
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import fused_backward
import fused_layers
import fused_tokens
import torch
from fused_common import BF16, Bench, Maker, integers
from fused_report import line, summary

import undertow as ut
from undertow.fabric.environment import environment

HIDDEN = {"llama3-70b": 8192, "gpt3-175b": 12288}
# Of each model: inner sizes of row-parallel layers (attention out, down), columns of column-parallel ones (QKV, up).
ROW_PARALLEL = {"llama3-70b": (8192, 28672), "gpt3-175b": (12288, 49152)}
COLUMN_PARALLEL = {"llama3-70b": (10240, 57344), "gpt3-175b": (36864, 49152)}
DECODE_M, DECODE_K, DECODE_N = (1, 4, 16, 64), (1024, 3584), 8192


MAKERS: dict[str, Maker] = {
    "scatter": fused_layers.scatter, "gather": fused_layers.gather, "decode": fused_layers.decode,
    "reduce": fused_layers.reduce, "leave": fused_tokens.leave, "arrive": fused_tokens.arrive,
    "column": fused_backward.column, "row": fused_backward.row,
}  # fmt: skip


def cases(options: dict[str, Any], ranks: int) -> list[tuple[str, str, int, int, int]]:
    """What matters most first: few rows, then the middle sizes before the ends."""
    found: list[tuple[str, str, int, int, int]] = []
    if "decode" in options["only"]:
        found += [("decode", "decode", m, k, DECODE_N) for k in DECODE_K for m in DECODE_M]
    for m in options["m"]:
        for model in options["models"]:
            hidden = HIDDEN[model]
            if "scatter" in options["only"]:
                found += [("scatter", model, m, k // ranks, hidden) for k in ROW_PARALLEL[model]]
            if "gather" in options["only"]:
                found += [("gather", model, m, hidden, n // ranks) for n in COLUMN_PARALLEL[model]]
            if "backward" in options["only"]:
                found += [("column", model, m, hidden, n // ranks) for n in COLUMN_PARALLEL[model]]
                found += [("row", model, m, k // ranks, hidden) for k in ROW_PARALLEL[model]]
    for kind in ("leave", "arrive"):
        if kind in options["only"]:
            found += fused_tokens.cases(kind, options["m"])
    if "reduce" in options["only"]:
        found += [("reduce", "llama3-70b", m, k // ranks, 8192) for m in options["m"] for k in (8192, 28672)]
    return found


def odd(bench: Bench) -> list[str]:
    """Operators as users call them, fused, on shapes with tails, bias and gradients: what is wrong."""
    group, device, size, rank = bench.group, bench.device, bench.size, bench.rank
    wrong: list[str] = []

    def same(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
        if got.shape != want.shape or not torch.equal(got, want.to(got.dtype)):
            wrong.append(name)

    for m, n, k in ((300, 272, 72), (size * 70 + 3, 528, 200)):
        xs = [integers(m, k, 500 + one, device, 3) for one in range(size)]
        ws = [integers(n, k, 600 + one, device, 4).t() for one in range(size)]
        whole = sum(x.float() @ w.float() for x, w in zip(xs, ws, strict=True))
        parts = torch.tensor_split(whole, size)
        x, w = xs[rank].clone().requires_grad_(), ws[rank].detach().clone().requires_grad_()
        y = ut.matmul_reduce_scatter(x, w, group=group, strategy="fused")
        same(f"scatter {m} {n} {k}", y.detach(), parts[rank])
        y.backward(torch.ones_like(y))
        same(f"gradient of x {m} {n} {k}", x.grad, torch.ones(m, n, device=device) @ ws[rank].float().t())
        same(f"gradient of w {m} {n} {k}", w.grad, xs[rank].float().t() @ torch.ones(m, n, device=device))
        with torch.no_grad():
            same(f"reduce {m} {n} {k}", ut.matmul_all_reduce(x, w, group=group, strategy="fused"), whole)
            rows = [m // 4 + 5 * one for one in range(size)]
            x_own = xs[rank][: rows[rank]]
            gathered = torch.cat([xs[one][: rows[one]] for one in range(size)]).float()
            bias = (torch.arange(n, device=device) % 5 - 2).to(BF16)
            want = torch.relu(gathered @ ws[rank].float() + bias.float())
            found = ut.all_gather_matmul(
                x_own, w, rows=rows, bias=bias, activation="relu", group=group, strategy="fused"
            )  # fmt: skip
            same(f"gather {rows} {n} {k}", found, want)
            for few in (3, 33):
                want = sum(x[:few].float() @ w.float() for x, w in zip(xs, ws, strict=True))
                same(f"decode {few} {n} {k}", ut.matmul_all_reduce(x[:few], w, group=group, strategy="fused"), want)
    torch.cuda.synchronize()
    group.check()
    return sorted({one for found in group.exchange(wrong, "what is wrong") for one in found})


def rank_main(options: dict[str, Any]) -> list[dict[str, Any]]:
    started = time.perf_counter()
    bench = Bench(options)
    began = time.perf_counter()  # a cold start takes as long as dozens of shapes
    if bench.group.rank == 0:
        print(f"{bench.size} ranks are up after {began - started:.1f} s", flush=True)
    found: list[dict[str, Any]] = []

    def late() -> bool:
        mine = time.perf_counter() - began > options["seconds"]
        return any(bench.group.exchange(mine, "whether time is left"))

    for case in cases(options, bench.size):
        if late():
            if bench.group.rank == 0:
                print(f"out of time before {case}", flush=True)
            break
        found.append(bench.measure(MAKERS[case[0]], *case))
        torch.cuda.empty_cache()
        if bench.group.rank == 0:
            print(line(found[-1]), flush=True)
            if options["part"]:
                Path(options["part"]).write_text(json.dumps(found, indent=1, default=str) + "\n")
    if bench.group.rank == 0:
        print(f"{bench.size} ranks\n{summary(found)}", flush=True)
    if options["odd"]:
        wrong = odd(bench)
        if bench.group.rank == 0:
            print(f"{bench.size} ranks, operators on odd shapes, fused: {', '.join(wrong) or 'all exact'}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", default="4,8")
    parser.add_argument("--only", default="decode,scatter,gather,backward,reduce,leave,arrive")
    parser.add_argument("--models", default="llama3-70b,gpt3-175b")
    parser.add_argument("--m", default="2048,8192,512,4096,1024")
    parser.add_argument("--loaders", default="4,8,16,32", help="CTAs that push rows in further gather plans")
    parser.add_argument(
        "--decode", default="",
        help="further decode plans: one/block_n[/split] or two/block_n/ahead, as one/64,one/64/2,two/128/512; or all",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--seconds", default="32,8", help="for each number of ranks, from when they are up: no shape is begun later"
    )
    parser.add_argument("--groups", default="", help="also in groups of so many bands: 4,16")
    parser.add_argument("--chains", action="store_true", help="sums from rank to rank for short shards, too")
    parser.add_argument("--guarded", action="store_true", help="also as the operators call it, watched")
    parser.add_argument("--trace", action="store_true", help="say which variant is begun, and when")
    parser.add_argument("--no-odd", action="store_true", help="leave out the operators on odd shapes")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    report: dict[str, Any] = {"ranks": {}, "environment": {}}
    limits = [float(one) for one in options.seconds.split(",")]
    for number, ranks in enumerate(int(one) for one in options.ranks.split(",")):
        part = options.out.with_suffix(f".{ranks}.part.json") if options.out else None
        given = {
            "only": options.only.split(","), "models": options.models.split(","), "rounds": options.rounds,
            "m": [int(one) for one in options.m.split(",")], "seconds": limits[min(number, len(limits) - 1)],
            "loaders": [int(one) for one in options.loaders.split(",") if one], "guarded": options.guarded,
            "chains": options.chains, "groups": [int(one) for one in options.groups.split(",") if one],
            "decode": [one for one in options.decode.split(",") if one],
            "part": str(part) if part else "", "trace": options.trace, "odd": not options.no_odd and number == 0,
        }  # fmt: skip
        try:
            found = ut.launch(rank_main, ranks, device="cuda", args=(given,), deadline=20)[0]
        except Exception as error:
            print(f"{ranks} ranks: {error}", flush=True)
            report.setdefault("failed", {})[ranks] = str(error)
            found = json.loads(part.read_text()) if part and part.exists() else []
        report["ranks"][ranks] = found
        if options.out:
            report["environment"] = environment({"link": "virtual node, peer"})
            options.out.write_text(json.dumps(report, indent=1, default=str) + "\n")
        if part:
            part.unlink(missing_ok=True)
    if "failed" in report:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
