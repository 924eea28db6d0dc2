"""What the cache promises beside equal tokens: what it holds, shares, gives back, refuses, and leaves alone."""

from __future__ import annotations

import copy
import math
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import models
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, DynamicCache, EncoderDecoderCache, LogitsProcessor, LogitsProcessorList
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from torch_paged_kv import OutOfBlocksError, PagedKVCache

pytestmark = [
    pytest.mark.usefixtures("no_grad"),
    pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated"),  # its name in every release but one
]

BLOCK = 4


@pytest.fixture(scope="module")
def llama() -> Any:
    return models.tiny("llama")


def prefill(model: Any, batch: dict[str, Tensor], cache: Any) -> Tensor:
    """Logits of a batch, its positions counted from each row's first token: [rows, length, vocab]."""
    position_ids = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)[:, -batch["input_ids"].shape[1] :]
    logits: Tensor = model(**batch, position_ids=position_ids, past_key_values=cache).logits
    return logits


def held(cache: Any) -> int:
    return int(cache.stats()["held_blocks"])


class EachStep(LogitsProcessor):
    """Calls a function after every step of generate."""

    def __init__(self, look: Any) -> None:
        self.look = look

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.look()
        return scores


def each_step(look: Any) -> LogitsProcessorList:
    return LogitsProcessorList([EachStep(look)])


class CountOps(TorchDispatchMode):
    """Which ops of this library ran, and how many pairs each call of copy_blocks copied."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: dict[str, int] = {}
        self.pairs: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "paged_kv":
            name = func._schema.name.split("::")[1]
            self.calls[name] = self.calls.get(name, 0) + 1
            if name == "copy_blocks":
                self.pairs.append(int((args[2] >= 0).all(1).sum()))
        return func(*args, **(kwargs or {}))


# -------------------------------------------------------------------------------------------------- padding and lengths


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_padded_left_right_or_alone_gives_the_same(family: str) -> None:
    """Padding takes no slot, sees nothing, gives no NaN, and moves no position (demand 5)."""
    model = models.tiny(family)
    left = models.prompts([5, 1])
    right = {name: torch.stack([row[0], row[1].roll(1)]) for name, row in zip(left, left.values(), strict=True)}
    alone = [prefill(model, models.prompts([5]), None)[0, -1]]
    only = {name: tensor[1:, -1:] for name, tensor in left.items()}
    alone += [prefill(model, only, None)[0, -1]]
    for batch, last in ((left, [4, 4]), (right, [4, 0])):
        cache = PagedKVCache(model.config, block_size=BLOCK)
        logits = prefill(model, batch, cache)
        assert not logits.isnan().any()
        for row in range(2):
            torch.testing.assert_close(logits[row, last[row]], alone[row], rtol=1e-4, atol=1e-4)
        groups = held(cache) / (math.ceil(5 / BLOCK) + 1)
        assert groups == int(groups)  # padding took no slot: ceil(5 / 4) + ceil(1 / 4) blocks in each group
        assert cache.stats()["tokens"] == 6


def test_padded_rows_go_on_as_the_whole_run_does(llama: Any) -> None:
    """A batch of 3 and 12 tokens, continued with one token each, equals one forward of everything, for both rows."""
    batch, cache = models.prompts([12, 3]), PagedKVCache(llama.config, block_size=BLOCK)
    prefill(llama, batch, cache)
    longer = models.extend(batch["input_ids"], batch["attention_mask"], torch.tensor([[9], [17]]))
    expected = prefill(llama, longer, None)[:, -1]
    step = {"input_ids": longer["input_ids"][:, -1:], "attention_mask": longer["attention_mask"]}
    torch.testing.assert_close(prefill(llama, step, cache)[:, -1], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral", "gpt2"])
def test_padding_in_the_middle(family: str) -> None:
    """Chat turns of unequal length leave padding between them; a row still gives what it gives alone."""
    model, first = models.tiny(family), models.prompts([models.PROMPT, 5])
    second = models.prompts([6, 3], seed=4)
    third = models.prompts([1, 1], seed=5)

    def run(rows: slice, widths: tuple[int, int]) -> Tensor:
        cache, mask, logits = PagedKVCache(model.config, block_size=BLOCK), torch.empty(1, 0), []
        for turn, width in ((first, widths[0]), (second, widths[1]), (third, 1)):
            part = turn["attention_mask"][rows, -width:]
            mask = torch.cat([mask.to(part).expand(len(part), -1), part], dim=1)
            logits.append(
                prefill(model, {"input_ids": turn["input_ids"][rows, -width:], "attention_mask": mask}, cache)
            )
        assert cache.stats()["tokens"] == mask.sum()
        return torch.stack([turn[:, -1] for turn in logits], dim=1)  # [rows, turns, vocab]

    batch, alone = run(slice(0, 2), (models.PROMPT, 6)), run(slice(1, 2), (5, 3))
    torch.testing.assert_close(batch[1:], alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss", "gpt2"])
def test_a_mask_of_the_users_own(family: str) -> None:
    """A dense mask, here a tree of candidates: two tokens at one position that do not see each other."""
    model, logits = models.tiny(family), []
    visible = torch.ones(3, 10, dtype=torch.bool)
    visible[:, 7:] = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]])
    mask = torch.zeros(1, 1, 3, 10).masked_fill(~visible, torch.finfo(torch.float32).min)
    for cache in (PagedKVCache(model.config, block_size=BLOCK), DynamicCache(config=model.config)):
        prefill(model, models.prompts([7]), cache)
        step = {"input_ids": torch.tensor([[5, 6, 7]]), "position_ids": torch.tensor([[7, 8, 8]])}
        logits.append(model(**step, attention_mask=mask, past_key_values=cache).logits)
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-4)


def test_a_mask_that_contradicts_the_cache_raises(llama: Any) -> None:
    batch, cache = models.prompts([6, 3]), PagedKVCache(llama.config)
    prefill(llama, batch, cache)
    longer = models.extend(batch["input_ids"], batch["attention_mask"], torch.tensor([[9, 8], [17, 16]]))
    step = longer["input_ids"][:, -2:]
    moved = longer["attention_mask"].clone()
    moved[1] = 1  # the second row's padding is called text now
    with pytest.raises(ValueError, match="mask"):
        llama(input_ids=step, attention_mask=moved, past_key_values=cache)
    with pytest.raises(ValueError, match="mask"):
        llama(input_ids=step, attention_mask=longer["attention_mask"][:, 1:], past_key_values=cache)


def test_a_batch_of_another_size_raises(llama: Any) -> None:
    cache = PagedKVCache(llama.config)
    prefill(llama, models.prompts([6, 6]), cache)
    with pytest.raises(ValueError, match="got 3"):
        llama(input_ids=torch.ones(3, 1, dtype=torch.int64), past_key_values=cache)


def test_a_forward_in_grad_mode_can_be_used_but_not_trained_through(llama: Any) -> None:
    """As with a DynamicCache, forgetting no_grad is no error; a gradient would be wrong, and is refused."""
    batch = models.prompts([6])
    with torch.enable_grad():
        logits = llama(**batch, past_key_values=PagedKVCache(llama.config)).logits
        assert torch.equal(logits, llama(**batch, past_key_values=PagedKVCache(llama.config)).logits)
        with pytest.raises(RuntimeError, match="no backward: train with use_cache=False"):
            logits.sum().backward()
    torch.testing.assert_close(logits, llama(**batch, past_key_values=DynamicCache()).logits)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_padding_after_tokens_attends_as_in_transformers(family: str) -> None:
    """After a right-padded prompt generate takes the next token from a padding position; a later step has such too."""
    model, batch, results = models.tiny(family), models.prompts([5, 5, 5]), []  # within the window
    mask = torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 1, 0], [0, 1, 0, 1, 0]])
    later = torch.cat([torch.ones_like(mask), torch.tensor([[0, 1], [1, 0], [1, 1]])], dim=1)
    for cache in (DynamicCache, PagedKVCache):
        prompt = prefill(model, {"input_ids": batch["input_ids"], "attention_mask": mask}, cache(config=model.config))
        chat = cache(config=model.config)
        prefill(model, batch, chat)
        step = prefill(model, {"input_ids": batch["input_ids"][:, :2], "attention_mask": later}, chat)
        results.append((prompt[:, -1], step[:, -1]))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)


def test_a_paged_cross_cache() -> None:
    """Keys of the encoder are written once; the decoder's queries are of another length."""
    model, batch = models.tiny("bart"), models.prompts([7, 5])
    encoder_decoder = EncoderDecoderCache(PagedKVCache(model.config), PagedKVCache(model.config))
    settings = {"max_new_tokens": 8, "do_sample": False, "num_beams": 2}
    expected = model.generate(**batch, **settings)
    assert torch.equal(model.generate(**batch, **settings, past_key_values=encoder_decoder), expected)


def test_dropout_of_a_model_in_train_mode() -> None:
    """The layer's own function is given gathered keys and values, and does with dropout what it does."""
    model, batch = models.tiny("bart"), models.prompts([7])
    outputs = []
    for cache in (DynamicCache(), PagedKVCache(model.config)):
        torch.manual_seed(1)
        model.train()
        decoder = {
            "decoder_input_ids": batch["input_ids"],
            "past_key_values": EncoderDecoderCache(cache, DynamicCache()),
        }
        outputs.append(model(**batch, **decoder).logits)
        model.eval()
    torch.testing.assert_close(outputs[1], outputs[0])


def test_attention_weights_of_eager_attention() -> None:
    """An implementation that gives weights gives them with a paged cache too, padded rows included."""
    model, batch = models.tiny("llama", seed=5), models.prompts([9, 5])
    model.set_attn_implementation("eager")
    expected = model(**batch, past_key_values=DynamicCache(), output_attentions=True)
    result = model(**batch, past_key_values=PagedKVCache(model.config), output_attentions=True)
    assert len(result.attentions) == model.config.num_hidden_layers
    for weights, right in zip(result.attentions, expected.attentions):
        torch.testing.assert_close(weights[0], right[0])
    torch.testing.assert_close(result.logits[:, -1], expected.logits[:, -1])


# -------------------------------------------------------------------------------------------------------------- sharing


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_forks_share_until_they_diverge(family: str) -> None:
    """One prompt of 100 tokens, four forks with suffixes of their own: equal to cold runs, almost no memory."""
    model, prompt = models.tiny(family), models.prompts([100])
    cache = PagedKVCache(model.config, block_size=16)
    prefill(model, prompt, cache)
    alone = held(cache)
    forks = [copy.deepcopy(cache) for _ in range(4)]
    assert held(cache) == alone
    for seed, fork in enumerate(forks):
        suffix = models.prompts([2], seed=40 + seed)["input_ids"]
        batch = models.extend(prompt["input_ids"], prompt["attention_mask"], suffix)
        cold = prefill(model, batch, None)[:, -1]
        warm = prefill(model, batch | {"input_ids": suffix}, fork)[:, -1]
        torch.testing.assert_close(warm, cold, rtol=1e-4, atol=1e-4)
    groups = alone / math.ceil(100 / 16)  # block tables of the model's layer groups
    assert held(cache) <= alone + 4 * groups
    del fork, forks
    assert held(cache) == alone  # what a fork held comes back when the fork is dropped


def test_a_fork_outlives_the_original(llama: Any) -> None:
    prompt = models.prompts([models.PROMPT])
    cache = PagedKVCache(llama.config, block_size=BLOCK)
    prefill(llama, prompt, cache)
    fork = copy.deepcopy(cache)
    cache.reset()
    prefill(llama, models.prompts([50, 50], seed=9), cache)  # takes what was given back, and makes the pool grow
    suffix = models.prompts([3], seed=50)["input_ids"]
    batch = models.extend(prompt["input_ids"], prompt["attention_mask"], suffix)
    expected = prefill(llama, batch, None)[:, -1]
    torch.testing.assert_close(
        prefill(llama, batch | {"input_ids": suffix}, fork)[:, -1], expected, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral"])
def test_beams_copy_at_most_a_block_each(family: str) -> None:
    """Reorder moves table rows; a step then copies at most one block of every layer for each beam."""
    model, num_beams = models.tiny(family), 4
    cache = PagedKVCache(model.config, block_size=BLOCK)
    with CountOps() as count:
        models.generate(model, models.prompts([models.PROMPT, 6]), cache, num_beams=num_beams)
    assert count.calls["fork"] >= models.NEW_TOKENS - 1
    assert 0 < max(count.pairs) <= 2 * num_beams  # two prompts
    assert count.calls["paged_attention"] == models.NEW_TOKENS * model.config.num_hidden_layers
    assert "gather_blocks" not in count.calls


def test_beams_of_a_prompt_share_what_they_agree_on(llama: Any) -> None:
    """8 beams: from the first reorder on at most a quarter of what a DynamicCache holds, in every step."""
    num_beams, length, steps = 8, 600, 24
    paged_bytes, dynamic_bytes = [], []

    def look_at_paged() -> None:
        paged_bytes.append(paged.stats()["bytes_held"])

    def look_at_dynamic() -> None:
        dynamic_bytes.append(sum(layer.keys.nbytes + layer.values.nbytes for layer in dynamic.layers))

    paged: Any = PagedKVCache(llama.config)
    dynamic: Any = DynamicCache(config=llama.config)
    settings: dict[str, Any] = {"num_beams": num_beams, "max_new_tokens": steps, "eos_token_id": None}
    prompt = models.prompts([length])
    models.generate(llama, prompt, paged, logits_processor=each_step(look_at_paged), **settings)
    models.generate(llama, prompt, dynamic, logits_processor=each_step(look_at_dynamic), **settings)
    assert len(paged_bytes) == len(dynamic_bytes) == steps
    for mine, theirs in zip(paged_bytes[1:], dynamic_bytes[1:], strict=True):  # [0]: before the first reorder
        assert mine <= theirs / 4


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_batch_operations_equal_dynamic_cache(family: str) -> None:
    """A prompt read once for three rows; then two of the rows are kept."""
    model, prompt, outcomes = models.tiny(family), models.prompts([models.PROMPT]), []
    for cache in (PagedKVCache(model.config, block_size=BLOCK), DynamicCache(config=model.config)):
        prefill(model, prompt, cache)
        cache.batch_repeat_interleave(3)
        suffix = models.prompts([4, 4, 4], seed=60)["input_ids"]
        logits = [model(input_ids=suffix, past_key_values=cache).logits]
        cache.batch_select_indices(torch.tensor([2, 0]))
        logits += [model(input_ids=suffix[:2], past_key_values=cache).logits]
        outcomes.append(logits)
    for mine, theirs in zip(*outcomes, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


# ----------------------------------------------------------------------------------------- crop, reset, failing in time


@pytest.mark.parametrize("removed", [1, 3, 9, 12])
def test_crop_then_go_on(llama: Any, removed: int) -> None:
    prompt, cache = models.prompts([models.PROMPT]), PagedKVCache(llama.config, block_size=BLOCK)
    prefill(llama, prompt, cache)
    cache.crop(-removed)
    kept = models.PROMPT - removed
    assert cache.get_seq_length() == kept
    assert held(cache) == math.ceil(kept / BLOCK)
    suffix = models.prompts([4], seed=70)["input_ids"]
    whole = torch.cat([prompt["input_ids"][:, :kept], suffix], dim=1)
    expected = llama(input_ids=whole).logits[:, -1]
    torch.testing.assert_close(
        llama(input_ids=suffix, past_key_values=cache).logits[:, -1], expected, rtol=1e-4, atol=1e-4
    )


def test_crop_of_a_padded_batch(llama: Any) -> None:
    batch, cache = models.prompts([9, 4]), PagedKVCache(llama.config, block_size=BLOCK)
    prefill(llama, batch, cache)
    cache.crop(-torch.tensor(2))  # assisted decoding of some releases crops by a tensor
    assert cache.get_seq_length() == 7
    assert cache.stats()["tokens"] == 7 + 2
    shorter = {name: tensor[:, :-2] for name, tensor in batch.items()}
    longer = models.extend(shorter["input_ids"], shorter["attention_mask"], torch.tensor([[9], [17]]))
    expected = prefill(llama, longer, None)[:, -1]
    step = longer | {"input_ids": longer["input_ids"][:, -1:]}
    torch.testing.assert_close(prefill(llama, step, cache)[:, -1], expected, rtol=1e-4, atol=1e-4)


def test_crop_behind_a_window_raises() -> None:
    """What a sliding window has released cannot be had back: an error, not a wrong answer."""
    model = models.tiny("mistral")
    cache = PagedKVCache(model.config, block_size=BLOCK)
    prefill(model, models.prompts([models.PROMPT]), cache)
    for token in range(10):
        model(input_ids=torch.tensor([[token + 5]]), past_key_values=cache)
    with pytest.raises(ValueError, match="window"):
        cache.crop(-9)
    assert cache.get_seq_length() == models.PROMPT + 10


def test_crop_of_everything_and_more(llama: Any) -> None:
    cache = PagedKVCache(llama.config, block_size=BLOCK)
    prefill(llama, models.prompts([6]), cache)
    cache.crop(-100)
    assert cache.get_seq_length() == 0
    assert held(cache) == 0


@pytest.mark.parametrize("family", models.DIRECT)
def test_reset_and_use_again(family: str) -> None:
    model, cache = models.tiny(family), None
    batches = [models.prompts([models.PROMPT, 5]), models.prompts([4, 7, 2], seed=8), models.prompts([30], seed=9)]
    cache = PagedKVCache(model.config, block_size=BLOCK)
    for batch in batches:  # of other sizes each time, on recycled blocks
        result = models.generate(model, batch, cache)
        models.assert_same(result, models.generate(model, batch, DynamicCache(config=model.config)))
        cache.reset()
        assert cache.get_seq_length() == 0
        assert held(cache) == 0
        assert cache.stats()["bytes_held"] == 0


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize(
    "settings", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}], ids=["greedy", "beams", "lookup"]
)
def test_a_failed_generate_leaves_no_block_after_reset(family: str, settings: dict[str, Any]) -> None:
    model, cache, steps = models.tiny(family), None, 0

    def fail_late() -> None:
        nonlocal steps
        steps += 1
        if steps == 4:
            raise KeyboardInterrupt

    cache = PagedKVCache(model.config, block_size=BLOCK)
    batch = models.prompts([models.PROMPT])
    with pytest.raises(KeyboardInterrupt):
        models.generate(model, batch, cache, logits_processor=each_step(fail_late), **settings)
    assert held(cache) > 0
    cache.reset()
    cache.pool.check()
    assert cache.pool.num_free == cache.pool.num_blocks
    models.assert_same(
        models.generate(model, batch, cache), models.generate(model, batch, DynamicCache(config=model.config))
    )


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_forward_that_fails_between_layers(family: str) -> None:
    """An error in the middle of a forward leaves layers of unequal progress; reset() makes the cache usable again."""
    model, batch = models.tiny(family), models.prompts([models.PROMPT])
    cache = PagedKVCache(model.config, block_size=BLOCK)

    def fail(*_: Any) -> None:
        raise RuntimeError("the second layer fails")

    handle = model.model.layers[1].mlp.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="second layer"):
        prefill(model, batch, cache)
    handle.remove()
    cache.reset()
    assert cache.pool.num_free == cache.pool.num_blocks
    models.assert_same(
        models.generate(model, batch, cache), models.generate(model, batch, DynamicCache(config=model.config))
    )


# ----------------------------------------------------------------------------------------------- sizes, growth, the end


def test_a_pool_without_a_size_grows_by_need(llama: Any) -> None:
    """Keys survive the growth, and the pool stays near what is needed (a forward tells nothing of what is to come)."""
    cache, sizes = PagedKVCache(llama.config, block_size=BLOCK), set()
    batch = models.prompts([models.PROMPT, 5])
    for _ in range(60):
        new = batch["input_ids"][:, cache.get_seq_length() :]
        logits = prefill(llama, batch | {"input_ids": new}, cache)
        batch = models.extend(batch["input_ids"], batch["attention_mask"], logits[:, -1:].argmax(-1))
        stats = cache.stats()
        sizes.add(stats["num_blocks"])
        assert stats["num_blocks"] <= 2 * stats["held_blocks"] + 4
    assert len(sizes) > 1
    settings = {"max_new_tokens": 60, "eos_token_id": None}
    expected = models.generate(llama, models.prompts([models.PROMPT, 5]), DynamicCache(config=llama.config), **settings)
    assert torch.equal(batch["input_ids"], expected.tokens[0])


def test_a_step_takes_at_most_a_block_a_sequence(llama: Any) -> None:
    """And waste is at most block_size - 1 tokens a sequence (contract, section 4)."""
    cache, before = PagedKVCache(llama.config, block_size=BLOCK), [0]

    def look() -> None:
        if before[0]:
            assert held(cache) - before[0] <= 2
        before[0] = held(cache)
        stats = cache.stats()
        assert stats["held_blocks"] * BLOCK - stats["tokens"] <= 2 * (BLOCK - 1)

    models.generate(llama, models.prompts([models.PROMPT, 5]), cache, logits_processor=each_step(look))


@pytest.mark.parametrize("family", models.SLIDING)
@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
def test_sliding_layers_hold_no_more_than_their_window(family: str, block_size: int) -> None:
    """ceil(window / block_size) + 1 blocks a sequence and layer, however long the text grows."""
    if not models.goes_direct(family):
        pytest.skip("gathered layers keep all they have seen: this release's code of the family reads it")
    model = models.tiny(family)
    config, lengths = model.config, [models.PROMPT, 5]
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    cache, width, step = PagedKVCache(config, block_size=block_size), max(lengths), 0

    def look() -> None:
        nonlocal step
        step += 1
        if step == 1:
            return  # the prompt's own forward reads all of the prompt; what is behind the window goes in the next step
        in_window = math.ceil(models.WINDOW / block_size) + 1
        bound = 0  # blocks over all layers
        for length in lengths:
            whole = math.ceil((length + step - 1) / block_size)
            bound += sum(min(whole, in_window) if kind == "sliding_attention" else whole for kind in kinds)
        layers_of_a_block = 3 if len(set(kinds)) == 1 else 1
        assert held(cache) * layers_of_a_block <= bound

    result = models.generate(
        model, models.prompts(lengths), cache, max_new_tokens=40, logits_processor=each_step(look), eos_token_id=None
    )
    assert step == 40
    assert cache.get_seq_length() == width + 39
    expected = models.generate(
        model, models.prompts(lengths), DynamicCache(config=config), max_new_tokens=40, eos_token_id=None
    )
    models.assert_same(result, expected)


def test_sized_pools(llama: Any) -> None:
    """Every way to give a size; what is taken is within one block of what was asked for."""
    config = llama.config
    block_bytes = BLOCK * config.num_key_value_heads * 2 * config.head_dim * config.num_hidden_layers * 4
    sizes: list[tuple[dict[str, Any], int]] = [
        ({"num_blocks": 40}, 40),
        ({"num_tokens": 150}, math.ceil(150 / BLOCK)),
        ({"bytes": 1 << 20}, (1 << 20) // block_bytes),
    ]
    for arguments, num_blocks in sizes:
        cache = PagedKVCache(config, block_size=BLOCK, **arguments)
        prefill(llama, models.prompts([6]), cache)
        assert cache.pool.num_blocks == num_blocks
        assert cache.stats()["bytes_total"] == num_blocks * block_bytes
        assert cache.stats()["bytes_held"] == 2 * block_bytes
    cache = PagedKVCache(config, block_size=BLOCK, fraction=1e-4)
    prefill(llama, models.prompts([6]), cache)
    assert cache.pool.num_blocks >= 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_blocks": 0}, "num_blocks must"),
        ({"num_tokens": -1}, "num_tokens must"),
        ({"bytes": 0}, "bytes must"),
        ({"fraction": 1.5}, "fraction must"),
        ({"num_blocks": 4, "bytes": 4096}, "at most one of"),
        ({"block_size": 0}, "block_size must"),
    ],
)
def test_sizes_that_make_no_sense_raise(llama: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prefill(llama, models.prompts([6]), PagedKVCache(llama.config, **arguments))


def test_running_out_of_blocks_changes_nothing(llama: Any) -> None:
    """A typed error with the numbers, a pool as it was, and the next smaller request succeeds (demand 16)."""
    cache = PagedKVCache(llama.config, block_size=BLOCK, num_blocks=10)
    prompt = models.prompts([30])  # 8 blocks
    prefill(llama, prompt, cache)
    before = copy.deepcopy(cache.stats())
    too_long = models.prompts([12], seed=80)["input_ids"]  # 42 tokens: 11 blocks
    with pytest.raises(OutOfBlocksError) as error:
        llama(input_ids=too_long, past_key_values=cache)
    assert (error.value.wanted, error.value.free) == (3, 2)
    assert cache.stats() == before
    assert cache.get_seq_length() == 30
    cache.check()
    fitting = too_long[:, :10]
    whole = torch.cat([prompt["input_ids"], fitting], dim=1)
    torch.testing.assert_close(
        llama(input_ids=fitting, past_key_values=cache).logits[:, -1],
        llama(input_ids=whole).logits[:, -1],
        rtol=1e-4,
        atol=1e-4,
    )


def test_generate_that_runs_out_can_be_tried_again(llama: Any) -> None:
    cache = PagedKVCache(llama.config, block_size=BLOCK, num_blocks=6)
    batch = models.prompts([models.PROMPT])
    with pytest.raises(OutOfBlocksError):
        models.generate(llama, batch, cache, eos_token_id=None)  # 13 + 15 tokens, room for 24
    cache.reset()
    assert cache.pool.num_free == cache.pool.num_blocks == 6
    result = models.generate(llama, batch, cache, max_new_tokens=12)
    models.assert_same(result, models.generate(llama, batch, DynamicCache(config=llama.config), max_new_tokens=12))


def test_two_caches_do_not_meet(llama: Any) -> None:
    """Steps of two generations that alternate on one model."""
    batches = [models.prompts([models.PROMPT, 5]), models.prompts([7], seed=90)]
    whole = [models.prompts([6, 6], seed=91), models.prompts([6], seed=92)]
    caches = [PagedKVCache(llama.config, block_size=BLOCK), PagedKVCache(llama.config, block_size=1)]
    for batch, cache in zip(batches, caches, strict=True):
        prefill(llama, batch, cache)
    for column in range(6):
        for batch, new, cache in zip(batches, whole, caches, strict=True):
            longer = models.extend(batch["input_ids"], batch["attention_mask"], new["input_ids"][:, : column + 1])
            step = longer | {"input_ids": longer["input_ids"][:, -1:]}
            logits = prefill(llama, step, cache)[:, -1]
            torch.testing.assert_close(logits, prefill(llama, longer, None)[:, -1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_what_lies_in_free_slots_is_never_read(family: str) -> None:
    """A pool full of NaN gives the same bits as one full of zeros."""
    model, outcomes = models.tiny(family), []
    for filling in (0.0, math.nan):
        cache = PagedKVCache(model.config, block_size=BLOCK, num_blocks=120)
        prefill(model, models.prompts([2]), cache)
        cache.reset()
        for lane in cache.pool.lanes():
            lane.fill_(filling)
        outcomes.append(models.generate(model, models.prompts([models.PROMPT, 5, 1]), cache, num_beams=2))
    for zeros, nans in zip(outcomes[0].logits, outcomes[1].logits, strict=True):
        assert torch.equal(zeros, nans)


# ----------------------------------------------------------------------------------------- the faces of Cache and dtype


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_keys_and_values_can_be_read(family: str) -> None:
    """Code that looks into a DynamicCache finds the same tensors here."""
    model, batch = models.tiny(family), models.prompts([models.PROMPT, models.PROMPT])
    mine: Any = PagedKVCache(model.config, block_size=BLOCK)
    theirs: Any = DynamicCache(config=model.config)
    prefill(model, batch, mine)
    prefill(model, batch, theirs)
    assert issubclass(type(mine), DynamicCache)
    assert len(mine) == len(theirs)
    assert mine.get_seq_length() == theirs.get_seq_length()
    assert mine.get_seq_length(1) == theirs.get_seq_length(1)
    for layer in range(len(theirs)):
        torch.testing.assert_close(mine.layers[layer].keys, theirs.layers[layer].keys, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(mine.layers[layer].values, theirs.layers[layer].values, rtol=1e-4, atol=1e-5)
    for entry, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(entry[0], other[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(entry[1], other[1], rtol=1e-4, atol=1e-5)


def test_keys_are_cast_on_store(llama: Any) -> None:
    batch = models.prompts([models.PROMPT])
    mine: Any = PagedKVCache(llama.config, dtype=torch.bfloat16)
    theirs: Any = DynamicCache(config=llama.config)
    prefill(llama, batch, mine)
    prefill(llama, batch, theirs)
    keys = mine.layers[0].keys
    assert keys.dtype == torch.bfloat16
    assert torch.equal(keys, theirs.layers[0].keys.to(torch.bfloat16))


def test_the_newest_name_of_the_argument(llama: Any) -> None:
    batch = models.prompts([models.PROMPT])
    try:
        result = llama.generate(**batch, cache=PagedKVCache(llama.config), do_sample=False, max_new_tokens=8)
    except (TypeError, ValueError):
        pytest.skip("this release of Transformers knows past_key_values only")
    assert torch.equal(result, llama.generate(**batch, do_sample=False, max_new_tokens=8))


def test_inputs_embeds(llama: Any) -> None:
    batch = models.prompts([models.PROMPT])
    embeds = llama.get_input_embeddings()(batch["input_ids"])
    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": 8}
    expected = llama.generate(inputs_embeds=embeds, **settings)
    result = llama.generate(
        inputs_embeds=embeds, past_key_values=PagedKVCache(llama.config, block_size=BLOCK), **settings
    )
    assert torch.equal(result, expected)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_attention_implementations(implementation: str) -> None:
    model, batch = models.tiny("llama"), models.prompts([models.PROMPT, 5])
    model.set_attn_implementation(implementation)
    with models.count_paths() as paths:
        result = models.generate(model, batch, PagedKVCache(model.config, block_size=BLOCK))
    models.assert_same(result, models.generate(model, batch, DynamicCache(config=model.config)))
    direct = implementation == "sdpa" or models.RELEASE.major >= 5  # older releases do not look eager attention up
    assert (paths.direct > 0, paths.gathered > 0) == (direct, not direct)


def test_an_attention_function_of_the_users_own() -> None:
    """It knows nothing of pools, so it is given gathered keys and values."""

    def own(*args: Any, **kwargs: Any) -> Any:
        return sdpa_attention_forward(*args, **kwargs)

    AttentionInterface.register("own_attention", own)
    model, batch = models.tiny("llama"), models.prompts([models.PROMPT])
    model.set_attn_implementation("own_attention")
    with models.count_paths() as paths:
        result = models.generate(model, batch, PagedKVCache(model.config, block_size=BLOCK))
    models.assert_same(result, models.generate(model, batch, DynamicCache(config=model.config)))
    assert paths.gathered > 0
    assert paths.direct == 0


def test_the_direct_path_counter_tells_the_truth(llama: Any) -> None:
    """The counter the other tests rely on, against the ops that really ran."""
    with CountOps() as count, models.count_paths() as paths:
        models.greedy(llama, models.paged())
    assert count.calls["paged_attention"] == paths.direct == models.NEW_TOKENS * llama.config.num_hidden_layers
    assert "gather_blocks" not in count.calls
    assert paths.gathered == 0


# --------------------------------------------------------------------------------------------- what must stay untouched


def test_a_question_about_masks_changes_no_other_forward(llama: Any) -> None:
    """The next ordinary forward is the model's own, even if a paged one ended between mask sizes and mask."""
    batch = models.prompts([models.PROMPT, 5])
    before = llama(**batch).logits
    cache = PagedKVCache(llama.config)
    prefill(llama, models.prompts([4]), cache)
    cache.get_mask_sizes(1, 0)
    assert torch.equal(llama(**batch).logits, before)


def test_threads_do_not_meet(llama: Any) -> None:
    """Two generations at once on one model, each over a cache of its own, and one over a DynamicCache."""
    batches = [models.prompts([models.PROMPT, 5], seed=seed) for seed in range(3)]
    kinds = [models.paged(), models.dynamic(), models.paged()]
    expected = [models.generate(llama, batch, models.dynamic().new(llama)) for batch in batches]

    def run(index: int) -> models.Outcome:
        with torch.no_grad():
            return models.generate(llama, batches[index], kinds[index].new(llama))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(3) as threads:
            results = list(threads.map(run, range(3)))
    finally:
        sys.setswitchinterval(interval)
    for result, reference in zip(results, expected, strict=True):
        models.assert_same(result, reference)


@pytest.mark.parametrize("first", [True, False])
def test_inference_mode_and_out_of_it(llama: Any, first: bool) -> None:
    """A cache that came to be in inference mode serves outside of it, and the other way round."""
    cache, prompt = PagedKVCache(llama.config, block_size=BLOCK), models.prompts([models.PROMPT])
    with torch.inference_mode() if first else nullcontext():
        prefill(llama, prompt, cache)
    token = torch.tensor([[5]])
    expected = llama(input_ids=torch.cat([prompt["input_ids"], token], dim=1)).logits[:, -1]
    with nullcontext() if first else torch.inference_mode():
        logits = llama(input_ids=token, past_key_values=cache).logits[:, -1]
    torch.testing.assert_close(logits.clone(), expected, rtol=1e-4, atol=1e-4)
    cache.reset()
    assert held(cache) == 0


def snapshot(model: Any) -> list[Tensor]:
    """Bits of ordinary forwards: without a cache, padded, with DynamicCache, and gradients of a training step."""
    batch = models.prompts([models.PROMPT, 5])
    bits = [model(**batch, use_cache=False).logits, model(**batch).logits]
    bits += [model(**batch, past_key_values=DynamicCache(config=model.config)).logits]
    bits += models.generate(model, batch, DynamicCache(config=model.config), max_new_tokens=4).logits
    with torch.enable_grad():
        loss = model(**batch, labels=batch["input_ids"], use_cache=False).loss
        bits += list(torch.autograd.grad(loss, [p for p in model.parameters() if p.dim() > 1][:4], allow_unused=True))
    return [tensor for tensor in bits if tensor is not None]


@pytest.mark.parametrize("family", models.DIRECT)
def test_ordinary_forwards_stay_bit_equal(family: str) -> None:
    """After a paged generate, and after one that failed, the model gives the bits it gave before (demand 21)."""
    model = models.tiny(family)
    before, config = snapshot(model), copy.deepcopy(model.config.to_dict())
    generation_config = copy.deepcopy(model.generation_config.to_dict())
    models.generate(model, models.prompts([models.PROMPT, 5]), PagedKVCache(model.config))

    def fail() -> None:
        raise RuntimeError("in the middle")

    for cache in (PagedKVCache(model.config), PagedKVCache(model.config, num_blocks=1, block_size=2)):
        with pytest.raises((RuntimeError, OutOfBlocksError)):
            models.generate(model, models.prompts([models.PROMPT]), cache, logits_processor=each_step(fail))
    for old, new in zip(before, snapshot(model), strict=True):
        assert torch.equal(old, new)
    assert model.config.to_dict() == config
    assert model.generation_config.to_dict() == generation_config


def test_the_import_alone_changes_no_bit() -> None:
    """Logits of ordinary forwards before the library is imported and after it has been used, in one fresh process."""
    code = """
        import torch
        from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache
        torch.manual_seed(0)
        sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4)
        models = {name: LlamaForCausalLM._from_config(LlamaConfig(**sizes), attn_implementation=name).eval()
                  for name in ("eager", "sdpa")}
        ids, mask = torch.randint(1, 64, (2, 9)), torch.ones(2, 9, dtype=torch.int64)
        mask[1, :5] = 0
        def bits():
            out = []
            for model in models.values():
                for cache in (None, DynamicCache(), StaticCache(config=model.config, max_cache_len=16)):
                    with torch.no_grad():
                        out.append(model(input_ids=ids, attention_mask=mask, past_key_values=cache).logits)
                out.append(model(input_ids=ids, attention_mask=mask).logits)
            return out
        before = bits()
        import torch_paged_kv
        from torch_paged_kv import PagedKVCache
        after_import = bits()
        for model in models.values():
            model.generate(ids, attention_mask=mask, past_key_values=PagedKVCache(model.config), max_new_tokens=4)
        for first, second, third in zip(before, after_import, bits()):
            assert torch.equal(first, second) and torch.equal(first, third)
    """
    subprocess.run([sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)], check=True)
