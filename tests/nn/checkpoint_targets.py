"""Rank functions for checkpoints in files: read in parts, written one tensor after the other."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from layer_targets import STRATEGY, same
from safetensors.torch import load_file, save_file
from shared_targets import NORMED, Normed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import undertow as ut
from undertow.errors import UndertowError
from undertow.nn import weights_file

PLAN = {**NORMED, "words": ut.nn.Vocabulary(), "out": ut.nn.Column(gather_output=True)}


class Model(torch.nn.Module):
    """Tied words, a block that is cut, one that is not, a buffer that is kept and one that is not."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(11, 4)
        self.block, self.whole = Normed(), torch.nn.Linear(4, 4)
        self.out = torch.nn.Linear(4, 11, bias=False)
        self.out.weight = self.words.weight
        self.register_buffer("seen", torch.arange(3))
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)
        self.to(dtype)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.whole(self.block(self.words(text))) * self.scale
        return self.out(x)  # type: ignore[no-any-return]


def there_and_back(folder: str, file_bytes: int, dtype: torch.dtype) -> bool:
    """Files of the ordinary model, into shards that had no memory, and to files again: bit for bit."""
    group = same()
    plain = Model(dtype)
    first, second = Path(folder) / "plain", Path(folder) / "again"
    ut.nn.save_checkpoint(plain, first, file_bytes=file_bytes)  # as one rank would, as no layer has a group
    group.barrier()
    with ut.nn.without_weights():
        model = Model(dtype)
    assert all(one.is_meta for one in model.parameters())
    assert not model.scale.is_meta
    ut.nn.parallelize(model, PLAN, strategy=STRATEGY)
    model.whole.bias.requires_grad_(False)
    ut.nn.load_checkpoint(model, first)
    assert model.words.weight is model.out.weight
    assert not model.whole.bias.requires_grad
    text = torch.tensor([[1, 2], [10, 0]])
    near = {"rtol": 5e-2, "atol": 5e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(model(text), plain(text), **near)
    model(text).sum().backward()
    assert model.words.weight.grad is not None
    ut.nn.save_checkpoint(model, second, file_bytes=file_bytes)
    want = plain.state_dict()
    for place in (first, second):
        read = weights_file.Weights(place)
        assert read.names == want.keys() - {"out.weight"}
        assert all(torch.equal(read[name], want[name]) for name in read.names)
        if file_bytes > 1 << 20 and group.rank == 0:
            held = load_file(place / "model.safetensors")  # the format's own reader
            assert all(torch.equal(held[name], want[name]) for name in held)
    if group.rank == 0:
        assert len(list(second.glob("*.safetensors"))) == (1 if file_bytes > 1 << 20 else 10)
    return True


def into_what_has_weights(folder: str) -> bool:
    """Of another type, by either name of what is tied, in a file of the format's own writer; and some of it only."""
    group = same()
    plain, model = Model(), ut.nn.parallelize(Model(), PLAN, strategy=STRATEGY)
    file = Path(folder) / "weights.safetensors"
    state = {
        name: one.to(torch.float32) if one.is_floating_point() else one for name, one in plain.state_dict().items()
    }
    del state["words.weight"]
    if group.rank == 0:
        save_file(state, file, {"format": "pt"})
        save_file({"whole.weight": torch.ones(4, 4, dtype=torch.float64)}, Path(folder) / "part.safetensors")
    group.barrier()
    before = model.words.weight
    ut.nn.load_checkpoint(model, file)
    assert model.words.weight is before is model.out.weight
    found = ut.nn.full_state_dict(model)
    assert all(torch.equal(found[name], one.to(found[name].dtype)) for name, one in state.items())
    ut.nn.load_checkpoint(model, Path(folder) / "part.safetensors", strict=False)
    assert bool((model.whole.weight == 1).all())
    return torch.equal(ut.nn.full_state_dict(model)["block.first.weight"], found["block.first.weight"])


def tables(folder: str) -> bool:
    """Embedding tables whose pieces are on several ranks."""
    group = same()
    kinds = [ut.nn.Table("a", 9, 4), ut.nn.Table("b", 40, 4)]
    bags, other = (torch.nn.ModuleDict({"bags": ut.nn.ShardedEmbeddingBag(kinds)}) for _ in range(2))
    with torch.no_grad():
        for piece in bags.parameters():
            piece.copy_(torch.randn(piece.shape) + group.rank)
    ut.nn.save_checkpoint(bags, folder)
    ut.nn.load_checkpoint(other, folder)
    want, got = ut.nn.full_state_dict(bags), ut.nn.full_state_dict(other)
    assert set(want) == {"bags.embedding_bags.a.weight", "bags.embedding_bags.b.weight"}
    return all(torch.equal(got[name], want[name]) for name in want)


class Mixture(torch.nn.Module):
    """Experts as a model of transformers holds them, under names as there."""

    def __init__(self, experts: int = 3) -> None:
        super().__init__()
        self.mlp = torch.nn.Module()
        self.mlp.gate = torch.nn.Linear(4, experts, bias=False)
        self.mlp.experts = torch.nn.Module()
        self.mlp.experts.gate_up_proj = torch.nn.Parameter(torch.randn(experts, 10, 4))
        self.mlp.experts.down_proj = torch.nn.Parameter(torch.randn(experts, 4, 5))


SPELLINGS = {
    ".mlp.": ("gate_proj", "up_proj", "down_proj"),
    ".block_sparse_moe.": ("w1", "w3", "w2"),
}


def _published(plain: Mixture, block: str, gate: str, up: str, down: str) -> dict[str, torch.Tensor]:
    """By a plain loop: each expert's three weights, one by one."""
    state = plain.state_dict()
    both, downs = state["mlp.experts.gate_up_proj"], state["mlp.experts.down_proj"]
    found = {f"layer{block}gate.weight": state["mlp.gate.weight"]}
    for expert in range(len(both)):
        found[f"layer{block}experts.{expert}.{gate}.weight"] = both[expert, :5].clone()
        found[f"layer{block}experts.{expert}.{up}.weight"] = both[expert, 5:].clone()
        found[f"layer{block}experts.{expert}.{down}.weight"] = downs[expert].clone()
    return found


def experts_one_by_one(folder: str) -> bool:
    """Into shards, into a model that nobody cut; out again as the model has them, and as they were."""
    group, place = same(), Path(folder)
    for block, names in SPELLINGS.items():
        here = place / names[0]
        plain = Mixture()
        published = _published(plain, block, *names)
        if group.rank == 0:
            here.mkdir()
            save_file(published, here / "theirs.safetensors")
        group.barrier()
        with ut.nn.without_weights():
            whole, cut = (torch.nn.ModuleDict({"layer": Mixture()}) for _ in range(2))
        ut.nn.parallelize(cut, {"*.experts": ut.nn.Experts(unit=1)}, strategy=STRATEGY)
        want = torch.nn.ModuleDict({"layer": plain}).state_dict()
        for number, model in enumerate((whole, cut)):
            ut.nn.load_checkpoint(model, here / "theirs.safetensors")
            found = ut.nn.full_state_dict(model)
            assert found.keys() == want.keys()
            assert all(torch.equal(found[name], want[name]) for name in want)
            if number:  # the other one has no group that would have one rank write
                ut.nn.save_checkpoint(model, here / "own")
                ut.nn.save_checkpoint(model, here / "like", like=here / "theirs.safetensors", file_bytes=1)
                for written, wanted in (("own", want), ("like", published)):
                    read = weights_file.Weights(here / written)
                    assert read.names == wanted.keys()
                    assert all(torch.equal(read[name], wanted[name]) for name in wanted)
    return True


def experts_that_are_not_all_there(folder: str) -> dict[str, str]:
    group, place = same(), Path(folder)
    right = _published(Mixture(), ".mlp.", *SPELLINGS[".mlp."])
    second = "layer.mlp.experts.1.up_proj.weight"
    wrong = {
        "less": {name: one for name, one in right.items() if name != second},
        "shape": {**right, second: torch.ones(4, 4)},
        "more": _published(Mixture(4), ".mlp.", *SPELLINGS[".mlp."]) | {"layer.mlp.gate.weight": torch.ones(3, 4)},
    }
    said = {}
    if group.rank == 0:
        save_file(right, place / "right.safetensors")
    group.barrier()
    in_turn, turned = (torch.nn.ModuleDict({"layer": Mixture()}) for _ in range(2))
    in_turn.layer.mlp.experts.is_concatenated = False
    cut = ut.nn.parallelize(copy.deepcopy(in_turn), {"*.experts": ut.nn.Experts(unit=1)}, strategy=STRATEGY)
    turned.layer.mlp.experts.is_transposed = True
    for name, model in (("in turn", in_turn), ("in turn, cut", cut), ("turned", turned)):
        try:
            ut.nn.load_checkpoint(model, place / "right.safetensors")
        except UndertowError as error:
            said[name] = str(error)
    model = torch.nn.ModuleDict({"layer": Mixture()})
    ut.nn.parallelize(model, {"*.experts": ut.nn.Experts(unit=1)}, strategy=STRATEGY)
    before = ut.nn.full_state_dict(model)
    for name, state in wrong.items():
        if group.rank == 0:
            save_file(state, place / f"{name}.safetensors")
        group.barrier()
        try:
            ut.nn.load_checkpoint(model, place / f"{name}.safetensors")
        except UndertowError as error:
            said[name] = str(error)
    after = ut.nn.full_state_dict(model)
    assert all(torch.equal(after[name], before[name]) for name in before)
    return said


def refusals(folder: str) -> dict[str, str]:
    """Each leaves the model as it was, and the group goes on."""
    group, place = same(), Path(folder)
    plain, model = Model(), ut.nn.parallelize(Model(), PLAN, strategy=STRATEGY)
    with ut.nn.without_weights():
        empty = ut.nn.parallelize(Model(), PLAN)
    with torch.device("meta"):
        bare = Model()
    state = {name: one for name, one in plain.state_dict().items() if name != "out.weight"}
    if group.rank == 0:
        save_file(state, place / "right.safetensors")
        save_file({name: one for name, one in state.items() if "norm" not in name}, place / "less.safetensors")
        save_file({**state, "more": torch.ones(2)}, place / "more.safetensors")
        save_file({**state, "block.first.weight": torch.ones(12, 5)}, place / "shape.safetensors")
        (place / "damaged.safetensors").write_bytes(b"\xff" * 30)
        (place / "no folder").write_bytes(b"")
    group.barrier()
    before = ut.nn.full_state_dict(model)
    elsewhere = str(place / "right.safetensors") if group.rank == 0 else str(place / "missing")
    calls = {
        "nothing": lambda: ut.nn.load_checkpoint(model, place / "missing"),
        "less": lambda: ut.nn.load_checkpoint(model, place / "less.safetensors"),
        "more": lambda: ut.nn.load_checkpoint(model, place / "more.safetensors"),
        "shape": lambda: ut.nn.load_checkpoint(model, place / "shape.safetensors"),
        "damaged": lambda: ut.nn.load_checkpoint(model, place / "damaged.safetensors"),
        "memory": lambda: ut.nn.load_checkpoint(empty, place / "less.safetensors", strict=False),
        "buffers": lambda: ut.nn.load_checkpoint(bare, place / "right.safetensors"),
        "one rank": lambda: ut.nn.load_checkpoint(model, elsewhere),
        "over another": lambda: ut.nn.save_checkpoint(model, place),
        "a file": lambda: ut.nn.save_checkpoint(model, place / "no folder"),
        "size": lambda: ut.nn.save_checkpoint(model, place / "new", file_bytes=0),
        "type": lambda: ut.nn.save_checkpoint(
            torch.nn.ParameterDict({"a": torch.ones(1, dtype=torch.complex64)}), place / "new"
        ),
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
            found[name] = "nothing"
        except UndertowError as error:
            found[name] = str(error).replace(folder, "")
    after = ut.nn.full_state_dict(model)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert all(one.is_meta for one in empty.parameters())
    ut.nn.load_checkpoint(model, place / "right.safetensors")
    return found


def a_full_disk(folder: str) -> str:
    """The rank that writes goes on with the others' parts, and all of its group are told."""
    group = same()
    model = ut.nn.parallelize(Model(), PLAN, strategy=STRATEGY)
    written, real = [], weights_file._write_tensors

    def full(file: object, listed: object, tensor: object) -> None:
        written.append(1)
        if len(written) == 3:
            raise OSError(28, "No space left on device")
        real(file, listed, tensor)  # type: ignore[arg-type]

    weights_file._write_tensors = full  # type: ignore[assignment]
    try:
        ut.nn.save_checkpoint(model, Path(folder) / "new", file_bytes=1)
        said = "nothing"
    except (UndertowError, OSError) as error:
        said = str(error)
    assert not list(Path(folder).glob("new/*index*"))
    assert not list(Path(folder).glob("new/.*"))
    group.barrier()
    return said


def of_a_copy(folder: str) -> bool:
    """A copy of a model without memory is filled by itself."""
    same()
    plain = Model()
    ut.nn.save_checkpoint(plain, folder)
    ut.as_group(None).barrier()
    with ut.nn.without_weights():
        model = ut.nn.parallelize(Model(), PLAN)
    other = copy.deepcopy(model)
    ut.nn.load_checkpoint(other, folder)
    assert all(one.is_meta for one in model.parameters())
    return torch.equal(ut.nn.full_state_dict(other)["words.weight"], plain.words.weight)


M_MMAP_THRESHOLD = -3  # of malloc.h


class Wide(torch.nn.Module):
    """32 weights of 4 MB each."""

    def __init__(self) -> None:
        super().__init__()
        for kind in "ab":
            layers = [torch.nn.Linear(1024, 1024, bias=False, dtype=torch.float32) for _ in range(16)]
            setattr(self, kind, torch.nn.ModuleList(layers))


def memory(folder: str) -> tuple[float, float]:
    """MB of a rank's own that filling a model takes at most, and writing it, beyond what the rank has before."""
    group = same()
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)  # what is freed goes back at once, and is not counted
    if group.rank == 0:
        ut.nn.save_checkpoint(Wide(), folder)
    group.barrier()
    with ut.nn.without_weights():
        model = ut.nn.parallelize(Wide(), {"a.*": ut.nn.Column(), "b.*": ut.nn.Row()}, strategy=STRATEGY)
    with _watched() as filling:
        ut.nn.load_checkpoint(model, folder)
    with _watched() as writing:
        ut.nn.save_checkpoint(model, Path(folder) / "again")
    return filling[0], writing[0]


@contextlib.contextmanager
def _watched() -> Iterator[list[float]]:
    """The most that is held inside, looked at every two milliseconds."""

    def held() -> float:
        status = Path("/proc/self/status").read_text()
        return int(status.partition("RssAnon:")[2].split()[0]) / 1024

    gc.collect()
    before, most, ended = held(), [0.0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.002):
            most[0] = max(most[0], held() - before)

    watching = threading.Thread(target=watch)
    watching.start()
    yield most
    ended.set()
    watching.join()


def slow_files(folder: str) -> bool:
    """Writing and reading may take longer than a deadline; a rank that has nothing to do waits."""
    group = same()
    model = ut.nn.parallelize(Model(), PLAN, strategy=STRATEGY)
    write, read = weights_file._write_tensors, weights_file.WeightsFile.tensor

    def slowly(*arguments: Any) -> None:
        time.sleep(5)
        write(*arguments)

    def slowly_read(self: weights_file.WeightsFile, name: str) -> torch.Tensor:
        time.sleep(5 if name == "whole.weight" and group.rank == 1 else 0)
        return read(self, name)

    weights_file._write_tensors = slowly
    weights_file.WeightsFile.tensor = slowly_read  # type: ignore[method-assign]
    before = ut.nn.full_state_dict(model)
    ut.nn.save_checkpoint(model, folder)
    ut.nn.load_checkpoint(model, folder)
    after = ut.nn.full_state_dict(model)
    return all(torch.equal(after[name], before[name]) for name in before)


def one_rank_fails(folder: str) -> bool:
    """In whatever way, and whenever: all are told, and none waits."""
    group, place = same(), Path(folder)
    model = ut.nn.parallelize(Model(), PLAN, strategy=STRATEGY)
    ut.nn.save_checkpoint(model, place / "right")
    own = place / f"rank {group.rank}"
    save_file({"whole.bias": torch.full((4 if group.rank else 3,), 1.0)}, own.with_suffix(".safetensors"))
    said = []

    def broken(*_: object) -> torch.Tensor:
        raise RuntimeError("out of memory")

    def wordless(*_: object) -> torch.Tensor:
        raise MemoryError

    def filled() -> None:
        if group.rank == 1:
            weights_file.WeightsFile.tensor = wordless  # type: ignore[method-assign]
        ut.nn.load_checkpoint(model, place / "right")

    def written() -> None:
        weights_file.WeightsFile.tensor = read  # type: ignore[method-assign]
        if group.rank == 0:
            weights_file._write_tensors = broken  # type: ignore[assignment]
        ut.nn.save_checkpoint(model, place / "again")

    def cloned() -> None:
        model.block.register_state_dict_post_hook(_cloned)
        ut.nn.load_checkpoint(model, place / "right")

    read = weights_file.WeightsFile.tensor
    seen_otherwise = lambda: ut.nn.load_checkpoint(model, own.with_suffix(".safetensors"), strict=False)  # noqa: E731
    for call in (seen_otherwise, filled, written, cloned):
        try:
            call()
            said.append("nothing")
        except (UndertowError, RuntimeError, MemoryError) as error:
            said.append(str(error))
    shape = "whole.bias is of shape [3] in the checkpoint, but must be [4]."
    wants = [
        shape if group.rank == 0 else f"Rank 0 could not read the checkpoint: {shape}",
        "" if group.rank == 1 else "Rank 1 could not read the checkpoint: MemoryError",
        "out of memory" if group.rank == 0 else "Rank 0 could not write the checkpoint: out of memory",
        "seen is what a hook or a module's extra state tells of it, but must be a parameter or a buffer of a module, to"
        " be filled.",
    ]
    assert not list(place.glob("again/*")), list(place.glob("again/*"))
    assert said == wants, said
    return bool(group.exchange(1, "still here"))


def other_writers(folder: str) -> bool:
    """Rank 1 writes for two of three; behind FSDP a refusal is told to all; ranks that see other files are told."""
    group, place = same(), Path(folder)
    pair = dist.new_group([1, 2])
    if group.rank:
        model = ut.nn.parallelize(Model(), PLAN, group=pair, strategy=STRATEGY)
        ut.nn.save_checkpoint(model, place / "pair", writer=1)
        want = ut.nn.full_state_dict(model)
        read = weights_file.Weights(place / "pair")
        assert all(torch.equal(read[name], want[name]) for name in read.names)
    mesh = init_device_mesh("cpu", (1, group.size), mesh_dim_names=("tensor", "data"))
    model = ut.nn.parallelize(Model(), PLAN, group=mesh["tensor"], strategy=STRATEGY)
    fully_shard(model, mesh=mesh["data"])
    ut.nn.save_checkpoint(model, place / "sharded")
    try:
        ut.nn.save_checkpoint(model, place / "sharded")
        return False
    except UndertowError as error:
        assert "has weights" in str(error)
    group.barrier()
    if group.rank == 2:
        (place / "own").mkdir()
        save_file({"a": torch.ones(1)}, place / "own" / "a.safetensors")
    whole = ut.nn.parallelize(Model(), PLAN, strategy=STRATEGY)
    try:
        ut.nn.load_checkpoint(whole, place / ("own" if group.rank == 2 else "sharded"), strict=False)
        return False
    except UndertowError as error:
        return str(error) == "path is a checkpoint that other ranks see otherwise, but must be the same on all ranks."


def _cloned(module: torch.nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
    for name in state:
        state[name] = state[name].clone()
