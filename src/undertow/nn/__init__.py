"""Layers over the overlapped operators, and `parallelize` for models that exist."""

from ..ops.embedding_gradients import RowOptimizer
from ..plan.placement import Table
from .attention import AttentionProjections
from .checkpoint import full_state_dict
from .checkpoint_files import load_checkpoint, save_checkpoint
from .clipping import clip_grad_norm_
from .compiled import overlap_pass
from .cross_entropy import cross_entropy
from .embedding import ShardedEmbeddingBag
from .empty import without_weights
from .experts import ExpertParallelMLP
from .linear import ColumnParallelLinear, RowParallelLinear
from .mlp import TensorParallelMLP
from .parallel_experts import TensorParallelExperts
from .parallelize import parallelize
from .sharded import Sharded
from .styles import TRANSFORMER, VOCABULARY, Column, Experts, Row, Shared, Slice, Vocabulary, Whole
from .vocabulary import VocabularyParallelEmbedding

__all__ = [
    "TRANSFORMER",
    "VOCABULARY",
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
    "Slice",
    "Table",
    "TensorParallelExperts",
    "TensorParallelMLP",
    "Vocabulary",
    "VocabularyParallelEmbedding",
    "Whole",
    "clip_grad_norm_",
    "cross_entropy",
    "full_state_dict",
    "load_checkpoint",
    "overlap_pass",
    "parallelize",
    "save_checkpoint",
    "without_weights",
]
