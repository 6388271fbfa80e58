"""A Llama of real layer sizes over several ranks: right, then the time of a prefill and of a decode step, by strategy.

    PYTHONPATH=src python bench/llama.py --device cuda --ranks 4 [--size llama3-8b] [--out FILE.json]
    PYTHONPATH=src python bench/llama.py --device cpu --ranks 2 --size tiny

Logits are compared with the same model whole on every rank: the largest difference over the largest logit, and how many
greedy tokens are the same. Then every form of the model is timed, interleaved, the slowest rank counts. On a GPU a call
is a CUDA graph of one forward pass, where it can be captured: `auto` has measured its plans before. A decode step has a
cache of `--cached` positions and one new token of each of `--batch` sequences. Weights are random: nothing is said here
about what such a model answers.

Forms that communicate after each row-parallel matmul: `collective`, a plain matmul and our all_reduce; `torch`, a plain
matmul into symmetric memory and PyTorch's one-shot or two-shot all_reduce; `serial:LANE`, the operator's own. What
is not one of these is held against the best of them.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import undertow as ut
from undertow.fabric.environment import environment

SIZES: dict[str, dict[str, int]] = {
    "llama3-8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "vocab_size": 4096,
    },
    "llama3-70b": {
        "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 128, "vocab_size": 4096,
    },
    "tiny": {
        "hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 32, "vocab_size": 512,
    },
}  # fmt: skip
SERIAL = ("collective", "torch", "serial")
MOST_ONE_SHOT = 128 << 10  # bytes: above, PyTorch's two-shot is the faster one (`gpu_collectives.py`)
Call = Callable[[], torch.Tensor]


class Afterwards(torch.nn.Module):
    """y = sum over ranks of x_r @ weight_r^T, as it is commonly written: the matmul, then an all_reduce."""

    def __init__(self, layer: ut.nn.RowParallelLinear, form: str, group: ut.Group) -> None:
        super().__init__()
        self.weight, self.form, self.group = layer.weight, form, group
        self.buffers_of: dict[int, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.form == "collective":
            return ut.collective.all_reduce(torch.nn.functional.linear(x, self.weight), group=self.group)
        flat = x.reshape(-1, x.shape[-1])
        if len(flat) not in self.buffers_of:
            elements = len(flat) * self.weight.shape[0]
            self.buffers_of[len(flat)] = self.group.fabric.buffer(elements, x.dtype).local
        held = self.buffers_of[len(flat)]
        torch.mm(flat, self.weight.t(), out=held.view(len(flat), -1))
        name, operators = self.group.process_group.group_name, torch.ops.symm_mem
        if held.nbytes <= MOST_ONE_SHOT:
            return operators.one_shot_all_reduce(held, "sum", name).view(*x.shape[:-1], -1)
        return operators.two_shot_all_reduce_(held, "sum", name).view(*x.shape[:-1], -1)


def sharded(whole: Any, form: str, group: ut.Group) -> Any:
    """A copy of the model in that form: a strategy of the operators, or a plain matmul and an all_reduce."""
    plain = form in ("collective", "torch")
    model = ut.nn.parallelize(
        copy.deepcopy(whole), ut.nn.TRANSFORMER, group=group, strategy="serial:peer" if plain else form
    )
    if plain:
        for name, layer in list(model.named_modules()):
            if isinstance(layer, ut.nn.RowParallelLinear):
                parent, _, child = name.rpartition(".")
                setattr(model.get_submodule(parent), child, Afterwards(layer, form, group))
    return model


def whole_model(size: str, layers: int, device: torch.device, dtype: torch.dtype) -> Any:
    """The same random weights on all ranks; norms differ from one, which would hide a mistake."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(**SIZES[size], num_hidden_layers=layers, max_position_embeddings=8192)
    with torch.device(device):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter += 0.1 * torch.randn_like(parameter)
    return model.to(dtype).eval()


def prefill(model: Any, tokens: torch.Tensor) -> Call:
    return lambda: model(tokens, use_cache=False).logits


def decode(model: Any, batch: int, cached: int, vocabulary: int) -> Call:
    """One new token of each sequence, at the end of a cache whose content does not matter to the time."""
    from transformers import StaticCache

    device = next(model.parameters()).device
    cache = StaticCache(config=model.config, max_cache_len=cached)
    tokens = torch.arange(batch, device=device)[:, None] % vocabulary
    place = torch.tensor([cached - 1], device=device)
    positions = place[None, :].expand(batch, 1)
    mask = torch.zeros(batch, 1, 1, cached, device=device, dtype=next(model.parameters()).dtype)  # all are seen

    def call() -> torch.Tensor:
        found: torch.Tensor = model(
            tokens, attention_mask=mask, past_key_values=cache, position_ids=positions, cache_position=place
        ).logits
        return found

    return call


def compared(got: torch.Tensor, want: torch.Tensor) -> dict[str, float]:
    apart = float((got.float() - want.float()).abs().max() / want.float().abs().max())
    return {"error": apart, "same tokens": float((got.argmax(-1) == want.argmax(-1)).float().mean())}


def sampler(group: ut.Group, call: Call) -> tuple[Callable[[], float], str]:
    """Seconds of a call: on a GPU of a captured one where that works."""
    for _ in range(3):
        call()
    if group.device.type == "cpu":

        def timed() -> float:
            began = time.perf_counter()
            call()
            return time.perf_counter() - began

        return timed, "eager"
    torch.cuda.synchronize()
    group.barrier()
    graph: Any = torch.cuda.CUDAGraph()
    reason = ""
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            call()
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
    reasons = [one for one in group.exchange(reason, "whether a pass can be captured") if one]
    run = call if reasons else graph.replay
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]

    def sample() -> float:
        start.record()
        run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e-3

    return sample, reasons[0] if reasons else "graph"


@torch.no_grad()
def run_rank(options: dict[str, Any]) -> dict[str, Any]:
    group = ut.init()
    dtype = torch.bfloat16 if group.device.type == "cuda" else torch.float32
    whole = whole_model(options["size"], options["layers"], group.device, dtype)
    vocabulary = SIZES[options["size"]]["vocab_size"]
    chance = torch.Generator().manual_seed(1)
    prompts = {
        rows: torch.randint(0, vocabulary, (1, rows), generator=chance).to(group.device) for rows in options["prefill"]
    }
    models = {name: sharded(whole, name, group) for name in options["forms"]}
    right = {}
    for rows, tokens in prompts.items():
        want = prefill(whole, tokens)()
        right |= {f"{name}, {rows} tokens": compared(prefill(one, tokens)(), want) for name, one in models.items()}
    group.check()
    cases: dict[str, dict[str, Call]] = {
        f"prefill of {rows}": {name: prefill(one, tokens) for name, one in models.items()}
        for rows, tokens in prompts.items()
    }
    for batch in options["batch"]:
        cases[f"decode of {batch}"] = {
            name: decode(one, batch, options["cached"], vocabulary) for name, one in models.items()
        }
    times: dict[str, dict[str, Any]] = {}
    for case, calls in cases.items():
        ready = {name: sampler(group, call) for name, call in calls.items()}
        seconds: dict[str, list[float]] = {name: [] for name in ready}
        for _ in range(options["rounds"]):
            for name, (sample, _) in ready.items():
                group.barrier()
                seconds[name].append(group.reduce_max([sample()])[0])
        group.check()
        times[case] = {
            name: {"seconds": statistics.median(found), "all": found, "how": ready[name][1]}
            for name, found in seconds.items()
        }
        if group.rank == 0:
            print(line(case, times[case]), flush=True)
    return {"right": right, "times": times}


def line(case: str, found: dict[str, Any]) -> str:
    serial = min(one["seconds"] for name, one in found.items() if name.startswith(SERIAL))
    text = f"{case:16}"
    for name, one in found.items():
        text += f"  {name} {one['seconds'] * 1e3:.3f} ms{'' if one['how'] == 'graph' else ' eager'}"
        if not name.startswith(SERIAL):
            text += f" ({serial / one['seconds']:.2f} x)"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--size", choices=list(SIZES), default="tiny")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--prefill", default="128,512", help="tokens of each prefill")
    parser.add_argument("--batch", default="1,4,16", help="sequences of each decode step")
    parser.add_argument("--cached", type=int, default=256)
    parser.add_argument("--forms", default="collective,serial:peer,fused:peer,auto")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    options = {
        "size": chosen.size, "layers": chosen.layers, "cached": chosen.cached, "rounds": chosen.rounds,
        "prefill": [int(one) for one in chosen.prefill.split(",") if one],
        "batch": [int(one) for one in chosen.batch.split(",") if one], "forms": chosen.forms.split(","),
    }  # fmt: skip
    found = ut.launch(run_rank, chosen.ranks, chosen.device, args=(options,), deadline=60)[0]
    for name, one in found["right"].items():
        print(f"{name}: logits within {one['error']:.1e}, {one['same tokens']:.1%} of the greedy tokens the same")
    if chosen.out is not None:
        facts = environment({"device": chosen.device, "ranks": chosen.ranks, **options})
        chosen.out.write_text(json.dumps({"environment": facts, **found}, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
