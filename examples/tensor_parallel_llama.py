"""A Hugging Face model over several ranks: one call, and it generates. Needs `pip install undertow[hf]`.

undertow run -n 2 --device cpu examples/tensor_parallel_llama.py
undertow run -n 2 --device cpu examples/tensor_parallel_llama.py qwen3       # or mixtral, qwen3_moe, gpt_oss
"""

import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import undertow as ut

SIZES = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 2, "vocab_size": 512}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}
EXPERTS = {"num_local_experts": 8, "moe_intermediate_size": 96}  # those without experts do not ask

group = ut.init()
torch.manual_seed(0)  # the same weights on all ranks; a real model has them from its checkpoint
config = AutoConfig.for_model(sys.argv[1] if len(sys.argv) > 1 else "llama", **SIZES, **HEADS, **EXPERTS)
model = AutoModelForCausalLM.from_config(config).eval().to(group.device)
ut.nn.parallelize(model, ut.nn.TRANSFORMER)
tokens = model.generate(torch.tensor([[1, 2, 3, 4]], device=group.device), max_new_tokens=12, do_sample=False)
if group.rank == 0:
    print(tokens[0].tolist())
    print(ut.explain())
ut.shutdown()
