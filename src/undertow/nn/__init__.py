"""Layers over the overlapped operators, and `parallelize` for models that exist."""

from ..ops.embedding_gradients import RowOptimizer
from ..plan.placement import Table
from .attention import AttentionProjections
from .checkpoint import full_state_dict
from .embedding import ShardedEmbeddingBag
from .experts import ExpertParallelMLP
from .linear import ColumnParallelLinear, RowParallelLinear
from .mlp import TensorParallelMLP
from .parallel_experts import TensorParallelExperts
from .parallelize import TRANSFORMER, Column, Experts, Row, Shared, parallelize
from .sharded import Sharded

__all__ = [
    "TRANSFORMER",
    "AttentionProjections",
    "Column",
    "ColumnParallelLinear",
    "ExpertParallelMLP",
    "Experts",
    "Row",
    "RowOptimizer",
    "RowParallelLinear",
    "Sharded",
    "ShardedEmbeddingBag",
    "Shared",
    "Table",
    "TensorParallelExperts",
    "TensorParallelMLP",
    "full_state_dict",
    "parallelize",
]
