"""A left-padded batch through a paged cache, on a model that nobody changed."""

from transformers import AutoModelForCausalLM, AutoTokenizer

from torch_paged_kv import PagedKVCache

name = "HuggingFaceTB/SmolLM2-135M-Instruct"
tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
model = AutoModelForCausalLM.from_pretrained(name, dtype="float32")
batch = tokenizer(["The capital of France is", "One, two, three, four,"], return_tensors="pt", padding=True)

cache = PagedKVCache(model.config)
tokens = model.generate(**batch, past_key_values=cache, max_new_tokens=16, do_sample=False)
for text in tokenizer.batch_decode(tokens, skip_special_tokens=True):
    print(text)

stats = cache.stats()
print(f"{stats['tokens']} tokens in {stats['held_blocks']} blocks, {stats['utilisation']:.0%} of their slots in use")
cache.reset()
print(f"{cache.pool.num_free} of {cache.pool.num_blocks} blocks are free")
