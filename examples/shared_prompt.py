"""One long prompt is read once; forks of its cache go on with questions of their own and share its blocks."""

import copy

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from torch_paged_kv import PagedKVCache

name = "HuggingFaceTB/SmolLM2-135M-Instruct"
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name, dtype="float32")

prompt = "Rome was founded in 753 BC, Paris in the third century BC, Berlin in 1237. " * 6
cache = PagedKVCache(model.config)
with torch.no_grad():
    model(**tokenizer(prompt, return_tensors="pt"), past_key_values=cache)
print(f"prompt: {cache.stats()['tokens']} tokens in {cache.stats()['held_blocks']} blocks")

forks = []
for question in ["The oldest of the three is", "The youngest of the three is", "Rome was founded in"]:
    forks.append(copy.deepcopy(cache))
    ids = tokenizer(prompt + question, return_tensors="pt").input_ids  # [1, length]
    tokens = model.generate(ids, past_key_values=forks[-1], max_new_tokens=8, do_sample=False)
    print(question + tokenizer.decode(tokens[0, ids.shape[1] :], skip_special_tokens=True))
print(f"with three answers: {cache.stats()['held_blocks']} blocks")

forks.clear()
print(f"without them: {cache.stats()['held_blocks']} blocks")
