"""One system prompt, many questions: what they begin with is computed once, also within one batch."""

import time

from transformers import AutoModelForCausalLM, AutoTokenizer

from torch_paged_kv import PagedKVCache, PrefixCache

name = "HuggingFaceTB/SmolLM2-135M-Instruct"
tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
model = AutoModelForCausalLM.from_pretrained(name, dtype="float32")
system = "You answer in one short sentence. Rome was founded in 753 BC, Berlin was first named in 1237. " * 20
questions = ["Which of the two is older?", "When was Rome founded?", "Which is the younger one?", "How old is Berlin?"]

prefix_cache = PrefixCache(max_tokens=4096)
for group in (questions[:2], questions[2:], questions):
    batch = tokenizer([system + question for question in group], return_tensors="pt", padding=True)
    before, start = prefix_cache.stats()["hit_tokens"], time.perf_counter()
    cache = PagedKVCache(model.config, prefix_cache=prefix_cache)
    model.generate(**batch, past_key_values=cache, max_new_tokens=1, do_sample=False)
    seconds, found = time.perf_counter() - start, prefix_cache.stats()["hit_tokens"] - before
    print(f"{len(group)} prompts, {int(batch['attention_mask'].sum())} tokens, {found} found: {seconds:.2f} s")
