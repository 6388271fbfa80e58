"""Layers over the overlapped operators, and `parallelize` for models that exist."""

from .checkpoint import full_state_dict
from .experts import ExpertParallelMLP
from .linear import ColumnParallelLinear, RowParallelLinear
from .mlp import TensorParallelMLP
from .parallelize import TRANSFORMER, Column, Row, Shared, parallelize
from .sharded import Sharded

__all__ = [
    "TRANSFORMER",
    "Column",
    "ColumnParallelLinear",
    "ExpertParallelMLP",
    "Row",
    "RowParallelLinear",
    "Sharded",
    "Shared",
    "TensorParallelMLP",
    "full_state_dict",
    "parallelize",
]
