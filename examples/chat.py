"""A chat whose cache is kept: each turn reads its own new tokens only."""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from torch_paged_kv import PagedKVCache

name = "HuggingFaceTB/SmolLM2-135M-Instruct"
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name, dtype="float32")

cache = PagedKVCache(model.config)
messages = []
tokens = torch.empty(1, 0, dtype=torch.int64)  # what the cache has seen, and the last token of the last answer
for question in ["Name a river in Europe.", "And one in Asia?"]:
    messages.append({"role": "user", "content": question})
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids  # the whole chat, [1, length]
    # Where the template writes an answer in other tokens than the model did, the cache forgets from there on.
    seen = cache.get_seq_length()
    known = int((ids[0, :seen] == tokens[0, :seen]).long().cumprod(0).sum())
    if known < seen:
        cache.crop(known - seen)
    tokens = model.generate(ids, past_key_values=cache, max_new_tokens=24, do_sample=False)
    answer = tokenizer.decode(tokens[0, ids.shape[1] :], skip_special_tokens=True)
    messages.append({"role": "assistant", "content": answer})
    print(f"> {question}\n{answer}\n  (a prompt of {ids.shape[1]} tokens, {known} of them known)")
