"""A DLRM trained over several ranks: tables model-parallel, MLPs data-parallel, on synthetic click data.

    undertow run -n 2 --device cpu examples/dlrm.py
    undertow run -n 4 --device cuda examples/dlrm.py --steps 200 --batch 8192 --scale 100 --dim 64
    undertow run -n 1 --device cpu examples/dlrm.py          # the same batches on one rank: the same loss curve

The data has the shape of Criteo's: 13 numbers and 26 features of MLPerf's DCNv2 cardinalities (divided by --scale) and
multi-hot sizes, drawn by Zipf's law. Every row of every feature has a hidden score, and a click's chance depends on the
scores and the numbers, so there is something to learn, and AUC says how much was.

Rows travel beneath the lookup (`ShardedEmbeddingBag`), and on a GPU the bottom MLP runs beside both.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

import undertow as ut

ROWS = (
    40000000, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 40000000, 3067956, 405282, 10, 2209, 11938, 155, 4, 976, 14,
    40000000, 40000000, 40000000, 590152, 12973, 108, 36,
)  # fmt: skip
HOTS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
DENSE, ZIPF = 13, 1.05


@dataclass
class Options:
    steps: int = 60
    batch: int = 512  # of all ranks together
    scale: int = 10000
    dim: int = 16
    lr: float = 0.02
    strategy: str = "auto"
    tests: int = 4096


class Clicks:
    """Batches that any rank can make, its own samples of them: everything comes from the number of the step.

    They are drawn on the device, so CPUs and GPUs have different ones; all ranks on devices of one kind the same.
    """

    def __init__(self, options: Options, device: torch.device) -> None:
        self.rows = [max(3, rows // options.scale) for rows in ROWS]
        self.hots = [min(hot, 20) for hot in HOTS]
        chance = torch.Generator(device).manual_seed(11)
        self.scores = [torch.randn(rows, generator=chance, device=device) for rows in self.rows]
        self.slopes = torch.randn(DENSE, generator=chance, device=device) / DENSE**0.5
        self.device = device

    def batch(self, step: int, count: int, rank: int, ranks: int) -> tuple[torch.Tensor, ...]:
        """Of `count` samples those of `rank`: numbers [n, 13], labels [n], values and lengths of all features."""
        chance, device = torch.Generator(self.device).manual_seed(1000 + step), self.device
        dense = torch.randn(count, DENSE, generator=chance, device=device)
        logits = dense @ self.slopes
        mine = slice(*[(count * one) // ranks for one in (rank, rank + 1)])
        values = []
        for rows, hot, scores in zip(self.rows, self.hots, self.scores, strict=True):
            power = 1 - ZIPF
            draw = torch.rand(count, hot, generator=chance, dtype=torch.float64, device=device)
            order = (((rows**power - 1) * draw + 1) ** (1 / power)).long().clamp(1, rows)
            index = (order * 2654435761) % rows  # popular rows lie anywhere
            logits += scores[index].mean(1) / len(self.rows) ** 0.5 * 2
            values.append(index[mine].reshape(-1))
        labels = (torch.rand(count, generator=chance, device=device) < torch.sigmoid(1.5 * logits - 0.5)).float()
        here = mine.stop - mine.start
        lengths = torch.tensor(self.hots, device=device).repeat_interleave(here)
        return dense[mine], labels[mine], torch.cat(values), lengths


class DLRM(torch.nn.Module):
    """Bottom MLP, lookups, products of all pairs, top MLP -> a logit for each sample."""

    def __init__(self, tables: list[ut.nn.Table], dim: int, lr: float, strategy: str, device: torch.device) -> None:
        super().__init__()
        optimizer = ut.nn.RowOptimizer("adagrad", lr=lr)
        self.bags = ut.nn.ShardedEmbeddingBag(tables, optimizer=optimizer, strategy=strategy)
        self.bottom = _mlp(DENSE, 64, dim).to(device)
        vectors = len(tables) + 1
        self.top = _mlp(dim + vectors * (vectors - 1) // 2, 64, 1).to(device)
        pairs = torch.tril_indices(vectors, vectors, -1)
        self.register_buffer("pairs", (pairs[0] * vectors + pairs[1]).to(device), persistent=False)
        self.dim, self.beside = dim, torch.cuda.Stream(device) if device.type == "cuda" else None

    def forward(
        self, dense: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor, batches: list[int]
    ) -> torch.Tensor:
        if self.beside is None:
            below = self.bottom(dense)
            rows = self.bags(values, lengths=lengths, batches=batches)
        else:  # the bottom MLP on a stream of its own, beside lookup and exchange
            self.beside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.beside):
                below = self.bottom(dense)
            rows = self.bags(values, lengths=lengths, batches=batches)
            torch.cuda.current_stream().wait_stream(self.beside)
        vectors = torch.cat([below[:, None], rows.view(len(rows), -1, self.dim)], 1)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).view(len(rows), -1)[:, self.pairs]
        return self.top(torch.cat([below, products], 1)).view(-1)


def _mlp(inner: int, hidden: int, outer: int) -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(inner, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, outer))


def average_gradients(parameters: list[torch.nn.Parameter], group: ut.Group) -> None:
    """Data parallel: each rank saw its own samples. One message for all of them."""
    flat = torch.cat([one.grad.view(-1) for one in parameters if one.grad is not None])
    dist.all_reduce(flat, group=group.process_group)
    flat /= group.size
    for one, part in zip(parameters, torch.split(flat, [one.numel() for one in parameters]), strict=True):
        one.grad = part.view(one.shape)


def auc(logits: torch.Tensor, labels: torch.Tensor) -> float:
    """The chance that a clicked sample has a higher logit than one that was not; ties count half."""
    _, place, counts = torch.unique(logits, return_inverse=True, return_counts=True)
    ends = counts.cumsum(0).double()
    ranks = (ends - (counts - 1) / 2)[place]
    positive, negative = float(labels.sum()), float((1 - labels).sum())
    return (float(ranks[labels > 0].sum()) - positive * (positive + 1) / 2) / max(1.0, positive * negative)


def train(options: Options) -> dict[str, object]:
    """Losses of all steps (means over all ranks' samples), AUC before and after on samples never trained on, times."""
    group = ut.init()
    device = group.device
    torch.manual_seed(3)  # the same MLPs on all ranks
    clicks = Clicks(options, device)
    tables = [
        ut.nn.Table(f"t{number}", rows, options.dim, hot)
        for number, (rows, hot) in enumerate(zip(clicks.rows, clicks.hots, strict=True))
    ]
    model = DLRM(tables, options.dim, options.lr, options.strategy, device)
    shared = [*model.bottom.parameters(), *model.top.parameters()]
    optimizer = torch.optim.Adagrad(shared, lr=options.lr)
    batches = [options.batch * (one + 1) // group.size - options.batch * one // group.size for one in range(group.size)]
    losses, seconds = [], []
    before = evaluate(model, clicks, options, group)
    for step in range(options.steps):
        dense, labels, values, lengths = clicks.batch(step, options.batch, group.rank, group.size)
        group.barrier()
        began = time.perf_counter()
        optimizer.zero_grad()
        logits = model(dense, values, lengths, batches)
        # A rank's mean weighs as much as any other's: with uneven batches the sum, over the mean size, is right.
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
        loss = loss * group.size / options.batch
        loss.backward()
        average_gradients(shared, group)
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(group.reduce_max([time.perf_counter() - began])[0])
        everyones = loss.detach().clone()
        dist.all_reduce(everyones, group=group.process_group)
        losses.append(float(everyones) / group.size)
        if group.rank == 0 and step % max(1, options.steps // 8) == 0:
            print(f"step {step:4}  loss {losses[-1]:.4f}  {seconds[-1] * 1e3:.2f} ms", flush=True)
    after = evaluate(model, clicks, options, group)
    ordered = sorted(seconds[options.steps // 2 :])
    return {
        "losses": losses, "auc_before": before, "auc": after, "step_seconds": ordered[len(ordered) // 2],
        "explained": str(ut.explain(group=group)),
    }  # fmt: skip


@torch.no_grad()
def evaluate(model: DLRM, clicks: Clicks, options: Options, group: ut.Group) -> float:
    """AUC over samples that no step trains on, of all ranks."""
    count = options.tests - options.tests % group.size
    dense, labels, values, lengths = clicks.batch(-1, count, group.rank, group.size)
    logits = model(dense, values, lengths, [count // group.size] * group.size)
    whole = torch.zeros(2, group.size, count // group.size, device=logits.device)
    whole[0, group.rank], whole[1, group.rank] = logits, labels
    dist.all_reduce(whole, group=group.process_group)
    return auc(*whole.view(2, -1).cpu())


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, value in vars(Options()).items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    parser.add_argument("--compare", action="store_true", help="also train with strategy serial, and compare times")
    given = vars(parser.parse_args())
    compare = given.pop("compare")
    options = Options(**given)
    found = train(options)
    first = ut.init().rank == 0
    if first:
        print(f"loss {found['losses'][-1]:.4f} after {options.steps} steps")
        print(f"AUC {found['auc_before']:.3f} before, {found['auc']:.3f} after")
        print(f"a step takes {found['step_seconds'] * 1e3:.2f} ms with strategy {options.strategy}", flush=True)
    if compare:
        serial = train(Options(**{**given, "strategy": "serial"}))
        less = 1 - found["step_seconds"] / serial["step_seconds"]
        if first:
            print(f"and {serial['step_seconds'] * 1e3:.2f} ms with serial: {less:+.1%} less")
    if first:
        print(found["explained"])
    ut.shutdown()


if __name__ == "__main__":
    main()
