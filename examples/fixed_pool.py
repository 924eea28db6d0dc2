"""A pool of a given size: running out of blocks is an error that names the numbers and changes nothing."""

from transformers import AutoModelForCausalLM, AutoTokenizer

from torch_paged_kv import OutOfBlocksError, PagedKVCache

name = "HuggingFaceTB/SmolLM2-135M-Instruct"
tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
model = AutoModelForCausalLM.from_pretrained(name, dtype="float32")
prompts = ["The capital of France is", "One, two, three, four,", "Water boils at", "The opposite of hot is"]

cache = PagedKVCache(model.config, bytes=4 << 20)  # or num_blocks=, num_tokens=, fraction= of the free memory
waiting = list(prompts)
while waiting:
    group = waiting
    while True:
        batch = tokenizer(group, return_tensors="pt", padding=True)
        try:
            tokens = model.generate(**batch, past_key_values=cache, max_new_tokens=24, min_new_tokens=24)
            break
        except OutOfBlocksError as error:
            print(f"{len(group)} prompts at once do not fit: {error}")
            cache.reset()
            group = group[: len(group) // 2]
    print(f"{len(group)} prompts done, {cache.stats()['held_blocks']} of {cache.pool.num_blocks} blocks held")
    cache.reset()
    waiting = waiting[len(group) :]
