"""For all tests: plans and machine files go to a folder of their own, and none of the user's are found.

Of tests that take seconds and have others of their kind, which run every time, some are nightly: they are named here.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

NIGHTLY = {
    "tests/cli/test_cli.py::test_run_ends_cleanly_when_told_to[2-130]",
    "tests/fabric/test_virtual_node.py::test_a_daemon_that_does_not_start[serverless-started no server within 5 s]",
    "tests/fabric/test_launch.py::test_a_main_script_without_a_guard_is_told",
    "tests/fabric/test_lost_rank.py::test_a_stuck_rank_is_lost_at_the_deadline[sleep-serial:dma]",
    "tests/fabric/test_lost_rank.py::test_a_stuck_rank_is_lost_at_the_deadline[sleep-serial:net]",
    "tests/fabric/test_lost_rank.py::test_a_stuck_rank_is_lost_at_the_deadline[stop-serial:peer]",
    "tests/fabric/test_lost_rank.py::test_a_rank_that_leaves_early_is_lost_at_the_deadline[serial:net]",
    "tests/fabric/test_lost_rank.py::test_a_rank_that_leaves_early_is_lost_at_the_deadline[serial:dma]",
    "tests/fabric/test_lost_rank.py::test_ranks_that_end_in_order_are_not_lost",
    "tests/ops/test_gradients.py::test_a_part_of_all_gradients_is_exact[4]",
    "tests/ops/test_review.py::test_modes_few_tokens_and_long_pieces[3]",
    "tests/ops/test_grouped.py::test_gradients_of_grouped_weights_are_exact[3]",
    "tests/ops/test_embedding.py::test_gradients_are_exact[4]",
    "tests/collective/test_operators.py::test_all_reduce_around_the_sizes_where_the_program_changes[4]",
    "tests/kernels/test_fused_tokens.py::test_few_rows_are_sent_at_once_as_they_are_launched[tile2-shape2-1-2]",
    "tests/kernels/test_gather.py::test_a_gather_as_it_is_launched",
    "tests/kernels/test_gather.py::test_brought_rows_as_they_are_launched",
    "tests/kernels/test_embedding_kernels.py::test_arithmetic"
    "[interpreted_embedding_posts.py::test_calls_follow_each_other[3-3-True]]",
    "tests/ops/test_matmul_operators.py::test_a_part_of_all_cases_is_exact[8]",
    "tests/ops/test_matmul_operators.py::test_a_part_of_all_cases_is_exact[2]",
    "tests/ops/test_net_rounds.py::test_a_rank_that_is_missing_from_a_round[sleep]",
    "tests/ops/test_posted_matmuls.py::test_calls_of_all_kinds_in_a_row_behind_late_proxies[2]",
    "tests/ops/test_gradients.py::test_a_part_of_all_gradients_is_exact[2]",
    "tests/ops/test_further.py::test_their_gradients[2]",
    "tests/ops/test_matmul_norms.py::test_a_part_of_all_that_may_follow_is_right[2]",
    "tests/ops/test_matmul_programs.py::test_a_part_of_all_programs_is_exact[3]",
    "tests/nn/test_layers.py::test_attention[2-False]",
    "tests/nn/test_layers.py::test_attention[2-True]",
    "tests/nn/test_parallel_experts.py::test_as_whole[3-serial:net]",
    "tests/nn/test_parallel_experts.py::test_checkpoints[2]",
    "tests/fabric/test_two_hosts.py::test_a_loss_on_the_other_host[a killed rank]",
    "tests/sim/test_cluster.py::test_shipped_machines_say_where_numbers_come_from[a100x16]",
    "tests/cli/test_cli.py::test_run_ends_cleanly_when_told_to[15-143]",
    "tests/cli/test_cli.py::test_profile_writes_to_the_cache",
    "tests/fabric/test_closing.py::test_a_proxy_leaves_nothing_behind_where_the_process_lives_on[dma]",
    "tests/nn/test_checkpoint_files.py::test_no_rank_holds_the_model",
    "tests/nn/test_vocabulary.py::test_an_embedding_in_sequence_parallel[2-dtype0]",
    "tests/nn/test_models.py::test_a_model_answers_as_on_one_rank[qwen3_moe-dtype3-1e-05-3]",
    "tests/nn/test_models.py::test_gradients_are_those_of_one_rank[qwen3_moe-dtype1-grouped_mm-0.0001-2]",
}


def pytest_configure() -> None:
    """A shell ignores Ctrl-C on behalf of what it starts in the background, and so would all that tests start."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid in NIGHTLY:
            item.add_marker("nightly")


@pytest.fixture(autouse=True, scope="session")
def _cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    before = os.environ.get("UNDERTOW_CACHE_DIR")
    os.environ["UNDERTOW_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["UNDERTOW_CACHE_DIR"]
    else:
        os.environ["UNDERTOW_CACHE_DIR"] = before
