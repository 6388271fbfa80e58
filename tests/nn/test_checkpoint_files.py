"""Checkpoints in files, in real ranks: nobody holds the model, and all have its weights."""

from __future__ import annotations

import json
import random
import threading
from pathlib import Path

import checkpoint_targets as targets
import pytest
import torch
from safetensors.torch import save

import undertow as ut
from undertow.errors import InvalidArgument
from undertow.nn import weights_file


@pytest.mark.parametrize(
    ("ranks", "file_bytes", "dtype"),
    [(1, 5 << 30, torch.float32), (2, 1, torch.bfloat16), (3, 5 << 30, torch.float64)],
)
def test_there_and_back(ranks: int, file_bytes: int, dtype: torch.dtype, tmp_path: Path) -> None:
    assert all(ut.launch(targets.there_and_back, ranks, device="cpu", args=(str(tmp_path), file_bytes, dtype)))


@pytest.mark.parametrize(
    "target", [targets.into_what_has_weights, targets.tables, targets.of_a_copy, targets.experts_one_by_one]
)
def test_other_ways(target: object, tmp_path: Path) -> None:
    assert all(ut.launch(target, 2, device="cpu", args=(str(tmp_path),)))  # type: ignore[arg-type]


def test_no_rank_holds_the_model(tmp_path: Path) -> None:
    """128 MB, of which each of two ranks has half."""
    for filling, writing in ut.launch(targets.memory, 2, device="cpu", args=(str(tmp_path),)):
        assert 50 < filling < 90
        assert writing < 80


def test_experts_that_are_not_all_there(tmp_path: Path) -> None:
    together = (
        "path is a checkpoint without layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj, but must be one of"
        " this model; strict=False takes what there is."
    )
    for found in ut.launch(targets.experts_that_are_not_all_there, 2, device="cpu", args=(str(tmp_path),)):
        assert found == {
            **dict.fromkeys(("in turn", "in turn, cut", "turned"), together),
            "less": (
                "path is a checkpoint without layer.mlp.experts.1.up_proj.weight, but must be one with all 3 experts of"
                " a layer."
            ),
            "shape": "layer.mlp.experts.1.up_proj.weight is of shape [4, 4] in the checkpoint, but must be [5, 4].",
            "more": (
                "path is a checkpoint with layer.mlp.experts.3.down_proj.weight, layer.mlp.experts.3.gate_proj.weight,"
                " layer.mlp.experts.3.up_proj.weight, which the model has not, but must be one of this model;"
                " strict=False takes what there is."
            ),
        }


def test_refusals(tmp_path: Path) -> None:
    norm = "block.norm.weight, block.norm.bias"
    must = "one of this model; strict=False takes what there is."
    for rank, found in enumerate(ut.launch(targets.refusals, 2, device="cpu", args=(str(tmp_path),))):
        assert found == {
            "nothing": "path is '/missing', but must be a .safetensors file or a folder with some.",
            "less": f"path is a checkpoint without {norm}, but must be {must}",
            "more": f"path is a checkpoint with more, which the model has not, but must be {must}",
            "shape": "block.first.weight is of shape [12, 5] in the checkpoint, but must be [12, 4].",
            "damaged": (
                "file /damaged.safetensors is one of 30 bytes with a header of 18446744073709551615, but must be a"
                " whole .safetensors file."
            ),
            "memory": f"path is a checkpoint without {norm}, but must be one with all that has no memory yet.",
            "buffers": (
                "model is one without memory for scale, but must be made under ut.nn.without_weights(), which leaves"
                " buffers as they are."
            ),
            "one rank": (
                "path is '/missing', but must be a .safetensors file or a folder with some."
                if rank == 1
                else "Rank 1 could not read the checkpoint: path is '/missing', but must be a .safetensors file or a"
                " folder with some."
            ),
            "over another": _of_the_writer(rank, "path is '', which has weights, but must be a folder without any."),
            "a file": _of_the_writer(
                rank, "path is '/no folder', which has weights, but must be a folder without any."
            ),
            "size": "file_bytes is 0, but must be at least 1.",
            "type": (
                "a is of torch.complex64, but must be one of bool, uint8, int8, int16, int32, int64, float16, bfloat16,"
                " float32, float64, float8_e4m3fn, float8_e5m2."
            ),
        }


def _of_the_writer(rank: int, said: str) -> str:
    return said if rank == 0 else f"Rank 0 could not write the checkpoint: {said}"


def test_a_full_disk(tmp_path: Path) -> None:
    said = ut.launch(targets.a_full_disk, 2, device="cpu", args=(str(tmp_path),))
    full = "[Errno 28] No space left on device"
    assert said == [full, f"Rank 0 could not write the checkpoint: {full}"]


@pytest.mark.parametrize(
    "target",
    [
        pytest.param(targets.slow_files, marks=pytest.mark.nightly),
        targets.one_rank_fails,
        targets.other_writers,
    ],
)
def test_ranks_go_together(target: object, tmp_path: Path) -> None:
    assert all(ut.launch(target, 3, device="cpu", args=(str(tmp_path),), deadline=3))  # type: ignore[arg-type]


def test_what_is_made_without_weights() -> None:
    weight = torch.nn.Parameter(torch.ones(3, 3))
    weight.mark = "kept"  # type: ignore[attr-defined]
    entered, left, made = threading.Event(), threading.Event(), []

    def other() -> None:
        made.append(torch.nn.Linear(2, 2))
        with ut.nn.without_weights():
            entered.set()
            left.wait(10)
            made.append(torch.nn.Linear(2, 2))

    with ut.nn.without_weights():
        thread = threading.Thread(target=other)
        thread.start()
        assert entered.wait(10)
        first, second = torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False)
        first.weight = second.weight = weight
        lazy = torch.nn.LazyLinear(2)
        with ut.nn.without_weights():
            inner = torch.nn.Linear(2, 2)
    assert not torch.nn.Linear(2, 2).weight.is_meta
    left.set()
    thread.join()
    assert first.weight is second.weight
    assert first.weight.is_meta
    assert first.weight.mark == "kept"
    assert inner.weight.is_meta
    assert isinstance(lazy.weight, torch.nn.UninitializedParameter)
    assert [one.weight.is_meta for one in made] == [False, True]
    assert not torch.nn.Linear(2, 2).weight.is_meta
    with pytest.raises(KeyError), ut.nn.without_weights():
        raise KeyError
    assert not torch.nn.Linear(2, 2).weight.is_meta


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    """One sentence, whatever is damaged; the same numbers, where nothing that counts is."""
    file, chance = tmp_path / "some.safetensors", random.Random(5)
    held = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(0, 4), "c": torch.tensor(3, dtype=torch.int8)}
    right = save(held)
    said: list[str] = []
    for turn in range(600):
        wrong = bytearray(right)
        for _ in range(turn % 4):
            wrong[chance.randrange(len(wrong))] = chance.randrange(256)
        file.write_bytes(bytes(wrong[: chance.randrange(len(wrong))] if turn % 5 == 4 else wrong))
        try:
            found = weights_file.WeightsFile(file)
        except InvalidArgument as error:
            said.append(str(error))
        else:
            for name, one in found.entries.items():
                assert tuple(found.tensor(name).shape) == one.shape
    assert len(said) > 200
    assert all(one.startswith(f"file {file} is ") and "\n" not in one for one in said)
    file.write_bytes(right)
    assert all(torch.equal(weights_file.WeightsFile(file).tensor(name), one) for name, one in held.items())


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, "tensor 'a' has bytes [0, 4)"),
        ({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, "shape [-1]"),
        ({"a": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}}, "shape [True]"),
        ({"a": {"dtype": "I4", "shape": [1], "data_offsets": [0, 4]}}, "its header is wrong: 'I4'"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, "tensor 'a' has bytes [4, 8)"),
        ({"a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}}, "8 bytes of tensors, of which 3 are told of"),
        ({"a": {"dtype": "F32", "shape": [1 << 61], "data_offsets": [0, 4]}}, "shape [2305843009213693952]"),
        ({"a": {"dtype": "F32", "shape": [0, 1 << 40, 1 << 40], "data_offsets": [0, 0]}}, "shape [0, 1099511627776"),
        ([], "its header is wrong"),
    ],
)
def test_wrong_headers(header: object, said: str, tmp_path: Path) -> None:
    text = json.dumps(header).encode()
    file = tmp_path / "wrong.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(InvalidArgument) as refused:
        weights_file.WeightsFile(file)
    assert said in str(refused.value).replace("whose header is wrong", "its header is wrong")


def test_bytes_that_do_not_lie_evenly(tmp_path: Path) -> None:
    text = json.dumps({"a": {"dtype": "F64", "shape": [2], "data_offsets": [0, 16]}}).encode()
    text += b" " * (3 - len(text) % 8)
    file = tmp_path / "odd.safetensors"
    file.write_bytes(
        len(text).to_bytes(8, "little") + text + torch.tensor([1.0, 2.0], dtype=torch.float64).numpy().tobytes()
    )
    assert weights_file.WeightsFile(file).tensor("a").tolist() == [1.0, 2.0]


def test_an_index_that_leads_elsewhere(tmp_path: Path) -> None:
    (tmp_path / weights_file.INDEX).write_text(json.dumps({"weight_map": {"a": "../other.safetensors"}}))
    with pytest.raises(InvalidArgument, match="it names files elsewhere"):
        weights_file.Weights(tmp_path)
