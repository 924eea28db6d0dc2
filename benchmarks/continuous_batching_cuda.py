"""Transformers' continuous batching on a model of Llama-3-8B's shape: 64 ragged requests, with each attention.

`python benchmarks/continuous_batching_cuda.py [--layers 32] [--attention NAME ...]` prints a row per attention:
new tokens a second over all, prefill included, after one run of the same requests to warm up.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM

from torch_paged_kv.integrations.continuous_batching import CACHE_IS_AN_ARGUMENT, register_continuous_batching

REQUESTS = 64


def llama(layers: int, device: torch.device) -> Any:
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    if device.type == "cpu":  # a trial of the script
        sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=128256, num_hidden_layers=layers, max_position_embeddings=65536, **sizes)
    config.dtype = torch.bfloat16
    with device:
        return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def requests(scale: float) -> list[tuple[list[int], int]]:
    """Prompts and how many tokens each wants: some short, some long, about 58,000 and 9,600 in all."""
    random = torch.Generator().manual_seed(0)
    prompts = (torch.randint(64, 1745, (REQUESTS,), generator=random) * scale).int().tolist()
    wanted = (torch.randint(64, 236, (REQUESTS,), generator=random) * scale).int().tolist()
    ids = [torch.randint(5, 128000, (max(1, length),), generator=random).tolist() for length in prompts]
    return list(zip(ids, (max(1, count) for count in wanted)))


def run(manager: Any, work: list[tuple[list[int], int]]) -> tuple[float, int]:
    """Seconds until every request is answered, and the tokens of the answers."""
    start = time.perf_counter()
    for ids, wanted in work:
        manager.add_request(ids, max_new_tokens=wanted, eos_token_id=-1)
    tokens = left = 0
    for left in range(len(work), 0, -1):
        result = manager.get_result(timeout=300)
        if result is None or result.error is not None:
            raise RuntimeError(f"{left} requests are left: {getattr(result, 'error', 'no answer')}")
        tokens += len(result.generated_tokens)
    return time.perf_counter() - start, tokens


def measure(model: Any, attention: str, work: list[tuple[list[int], int]], blocks: int | None) -> dict[str, Any]:
    model.set_attn_implementation(attention)
    settings = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=1)
    longest = max(len(ids) + wanted for ids, wanted in work)
    config = ContinuousBatchingConfig(
        num_blocks=blocks, max_batch_tokens=None if blocks is None else 512, max_blocks_per_request=longest // 256 + 2
    )
    with model.continuous_batching_context_manager(
        generation_config=settings, continuous_batching_config=config
    ) as manager:
        run(manager, work)
        seconds, tokens = run(manager, work)
    prompt_tokens = sum(len(ids) for ids, _ in work)
    return {"attention": attention, "prompt": prompt_tokens, "new": tokens, "tokens_per_second": tokens / seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--attention", nargs="*", help="default: ours, then the sdpa that Transformers has")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    print(f"{name}, torch {torch.__version__}, transformers {transformers.__version__}, {options.layers} layers")
    model = llama(options.layers, device)
    ours = register_continuous_batching()
    work, blocks = (requests(1.0), None) if device.type == "cuda" else (requests(0.05), 256)
    rows = []
    for attention in options.attention or [ours, "paged|sdpa" if CACHE_IS_AN_ARGUMENT else "sdpa"]:
        row = measure(model, attention, work, blocks)
        rows.append(row)
        print(f"{row['attention']}: {row['tokens_per_second']:,.0f} new tok/s ({row['prompt']:,} + {row['new']:,})")
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
