"""ShardedEmbeddingBag in real ranks: results, gradients, checkpoints, steps; placement by cost."""

from __future__ import annotations

import embedding_layer_targets as targets
import pytest

import undertow as ut
from undertow.plan.bags import Layout
from undertow.plan.placement import Table, place


@pytest.mark.parametrize(("ranks", "weighted"), [(2, False), (4, True)])
def test_forward_and_back(ranks: int, weighted: bool) -> None:
    assert all(ut.launch(targets.forward_and_back, ranks, device="cpu", args=(weighted,)))


def test_a_keyed_jagged_tensor() -> None:
    for said in ut.launch(targets.keyed, 2, device="cpu"):
        assert "as the tables" in said


def test_checkpoints() -> None:
    assert all(ut.launch(targets.checkpoints, 2, device="cpu"))


def test_steps_in_the_backward_pass() -> None:
    assert all(ut.launch(targets.stepped, 3, device="cpu"))


def test_refusals() -> None:
    said = ut.launch(targets.refused, 2, device="cpu", deadline=20)[0]
    words = {
        "both": "offsets is given beside lengths", "features": "for each of 4 tables", "sum": "as values are",
        "names": "two called a", "rows": "rows of table a is 0", "placement": "as tables says",
        "shape": "embedding_bags.ads.weight is of shape [2, 2]",
    }  # fmt: skip
    for name, word in words.items():
        assert word in said[name], f"{name}: {said[name]}"


def test_ranks_that_give_different_things() -> None:
    found = ut.launch(targets.uneven_inputs, 2, device="cpu", deadline=10)
    for said in found:
        assert "weights of rank 1 is of torch.float64, but must be missing, as on rank 0" in said["weights of one"]
        assert "weights of rank 1 is of torch.float32" in said["their types"]
        assert "is with gradients asked for" in said["their gradients"]
        assert "is of torch.float32, but must be of torch.int32 or torch.int64" in said["values of one"]


def test_first_numbers_whatever_the_placement() -> None:
    assert all(ut.launch(targets.first_numbers, 2, device="cpu"))


DCN = [40000, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 40000, 3067, 405, 10, 2209, 11938, 155, 4, 976, 14, 40000]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_placement_is_whole_and_balanced(ranks: int) -> None:
    tables = [Table(str(number), rows, 128, 1 + number % 7) for number, rows in enumerate(DCN)]
    held = place(tables, ranks)
    layout = Layout(held)  # refuses gaps and overlaps
    assert layout.rows == tuple(DCN)
    assert layout.dims == (128,) * len(DCN)
    nbytes = [sum(one.rows * one.dim for one in pieces) for pieces in held]
    lookups = [sum((tables[one.table].length + 1) * one.dim for one in pieces) for pieces in held]
    assert max(nbytes) <= 1.5 * sum(nbytes) / ranks
    assert max(lookups) <= 1.5 * sum(lookups) / ranks


def test_one_huge_table_is_cut_by_rows_and_a_hot_one_by_columns() -> None:
    huge = place([Table("huge", 1 << 20, 64, 1), *(Table(f"t{k}", 64, 64, 1) for k in range(7))], 4)
    assert [sum(one.table == 0 for one in pieces) for pieces in huge] == [1, 1, 1, 1]
    assert len({one.first_row for pieces in huge for one in pieces if one.table == 0}) == 4
    hot = place([Table("hot", 64, 64, 100), *(Table(f"t{k}", 64, 64, 1) for k in range(7))], 4)
    assert len({one.first_column for pieces in hot for one in pieces if one.table == 0}) == 4
