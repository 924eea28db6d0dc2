"""A compiled decode step: one graph for every length, since lengths and block tables are tensors."""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from torch_paged_kv import PagedKVCache

name = "HuggingFaceTB/SmolLM2-135M-Instruct"
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name, dtype="float32")
step = torch.compile(model.forward, fullgraph=True)

cache = PagedKVCache(model.config, num_tokens=256)  # a compiled step cannot make the pool grow
ids = tokenizer("One, two, three, four,", return_tensors="pt").input_ids  # [1, length]
with torch.no_grad():
    token = model(ids, past_key_values=cache).logits[:, -1:].argmax(-1)  # the prompt, eager
    tokens = [token]
    for position in range(ids.shape[1], ids.shape[1] + 20):
        position_ids = torch.tensor([[position]])
        token = step(input_ids=token, position_ids=position_ids, past_key_values=cache).logits[:, -1:].argmax(-1)
        tokens.append(token)
print(tokenizer.decode(torch.cat(tokens, dim=1)[0]))
print(f"{torch._dynamo.utils.counters['stats']['unique_graphs']} graph")
