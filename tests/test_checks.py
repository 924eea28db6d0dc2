"""Every rule that an op has about its arguments: the exact words, and nothing written before them.

A case names an op, changes some of its good arguments, and gives the message. `good()` builds small valid calls:
3 tokens in 2 rows, 4 heads over 2 key/value heads of 8 and 6 elements, 5 blocks of 4 slots, tables 3 blocks wide.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_paged_kv import OutOfBlocksError, ops
from torch_paged_kv.errors import typed

Arguments = dict[str, Any]
Change = Callable[[Arguments], Arguments]


def int32(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def int64(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def state() -> Arguments:
    return {
        "block_table": int32([0, -1, -1], [1, 2, -1]),
        "seq_lens": int32(3, 5),
        "free_ring": int32(3, 4, 0, 0, 0),
        "ref_counts": int32(1, 1, 1, 0, 0),
        "counters": int64(0, 2, 0, 0),
    }


def caches() -> Arguments:
    return {"key_cache": torch.zeros(5, 4, 2, 8), "value_cache": torch.zeros(5, 4, 2, 6)}


def good(op: str) -> Arguments:
    """Arguments that the op takes, in its schema's order."""
    table = {"block_table": int32([0, -1, -1], [1, 2, -1]), "seq_lens": int32(3, 5)}
    attention = {
        "query": torch.zeros(3, 4, 8),
        **caches(),
        **table,
        "cu_seqlens_q": int32(0, 1, 3),
        "max_seqlen_q": 2,
        "scale": 1.0,
    }
    partial = {
        "out_a": torch.zeros(3, 4, 6),
        "lse_a": torch.zeros(3, 4),
        "out_b": torch.zeros(3, 4, 6),
        "lse_b": torch.zeros(3, 4),
    }
    pairs = {"block_mapping": int64([0, 1], [2, 3])}
    return {
        "allocate": {**state(), "cu_seqlens_q": int32(0, 1, 3), "num_tokens": 3, "block_size": 4},
        "free": {**state(), "new_lens": int32(0, 5), "block_size": 4},
        "fork": {**state(), "source_rows": int64(0), "destination_rows": int64(1), "block_size": 4},
        "reshape_and_cache": {
            "key": torch.ones(3, 2, 8),
            "value": torch.ones(3, 2, 6),
            **caches(),
            "slot_mapping": int64(0, 5, -1),
        },
        "paged_attention": attention,
        "paged_attention_with_lse": attention,
        "merge_attention_states": partial,
        "copy_blocks": {"key_caches": [torch.zeros(5, 4, 2, 8)], "value_caches": [torch.zeros(5, 4, 2, 6)], **pairs},
        "swap_blocks": {"source_caches": [torch.ones(5, 4)], "destination_caches": [torch.zeros(7, 4)], **pairs},
        "gather_blocks": {**caches(), **table, "max_len": 5},
        "find_shared_prefixes": {**table, "cu_seqlens_q": int32(0, 1, 3), "block_size": 4, "min_saved": 1},
    }[op]


OPS = [
    *("allocate", "free", "fork", "reshape_and_cache", "paged_attention", "paged_attention_with_lse"),
    *("merge_attention_states", "copy_blocks", "swap_blocks", "gather_blocks", "find_shared_prefixes"),
]


def call(op: str, arguments: Arguments) -> Any:
    return getattr(ops, f"_{op}")(**arguments)  # the op without what its wrapper adds


def to(**values: Any) -> Change:
    """Replace or add arguments."""
    return lambda arguments: {**arguments, **values}


def convert(name: str, function: Callable[[Tensor], Tensor]) -> Change:
    """Replace the argument `name` by a function of the good one."""
    return lambda arguments: {**arguments, name: function(arguments[name])}


def dtype(name: str, wanted: torch.dtype) -> Change:
    return convert(name, lambda tensor: tensor.to(wanted))


def flat(name: str) -> Change:
    return convert(name, lambda tensor: tensor.flatten())


def spread(name: str) -> Change:
    """The same values with a gap after each element of the last dimension."""
    return convert(name, lambda tensor: tensor.repeat_interleave(2, -1)[..., ::2])


def both(*changes: Change) -> Change:
    def apply(arguments: Arguments) -> Arguments:
        for change in changes:
            arguments = change(arguments)
        return arguments

    return apply


NAN, INF = float("nan"), float("inf")
FLOATS = "float32, float16 or bfloat16"
CACHE_DTYPES = "float32, float16, bfloat16, float8_e4m3fn, float8_e5m2 or int8"
SCALE_SHAPES = "[], [1], [num_kv_heads=2] or [num_blocks=5, block_size=4, num_kv_heads=2]"

STATE_CASES = [
    (
        flat("block_table"),
        "block_table must have shape [num_seqs, max_blocks] or [num_groups, num_seqs, max_blocks], got [6]",
    ),
    (dtype("block_table", torch.int64), "block_table must have dtype int32, got int64"),
    (spread("block_table"), "block_table must be contiguous, got strides [6, 2]"),
    (dtype("seq_lens", torch.int64), "seq_lens must have dtype int32, got int64"),
    (to(seq_lens=int32(3)), "seq_lens must have shape [num_seqs=2], got [1]"),
    (spread("seq_lens"), "seq_lens must be contiguous, got strides [2]"),
    (to(seq_lens=int32(3, -1)), "seq_lens must hold values in 0 .. 12, got -1 at row 1"),
    (to(seq_lens=int32(13, 5)), "seq_lens must hold values in 0 .. 12, got 13 at row 0"),
    (dtype("free_ring", torch.int64), "free_ring must have dtype int32, got int64"),
    (to(free_ring=int32([0, 1])), "free_ring must have shape [num_blocks], got [1, 2]"),
    (dtype("ref_counts", torch.float32), "ref_counts must have dtype int32, got float32"),
    (to(ref_counts=int32(1, 1)), "ref_counts must have shape [num_blocks=5], got [2]"),
    (dtype("counters", torch.int32), "counters must have dtype int64, got int32"),
    (to(counters=int64(0, 2)), "counters must have shape [4], got [2]"),
    (to(block_size=0), "block_size must be in 1 .. 2147483647, got 0"),
    (to(block_size=2**31), "block_size must be in 1 .. 2147483647, got 2147483648"),
]

CACHE_CASES = [
    (flat("key_cache"), "key_cache must have shape [num_blocks, block_size, num_kv_heads, head_size], got [320]"),
    (dtype("key_cache", torch.float64), f"key_cache must have dtype {CACHE_DTYPES}, got float64"),
    (dtype("value_cache", torch.float16), "value_cache must have dtype float32, got float16"),
    (
        to(value_cache=torch.zeros(5, 4, 3, 6)),
        "value_cache must have shape [num_blocks=5, block_size=4, num_kv_heads=2, head_size_v], got [5, 4, 3, 6]",
    ),
    (spread("key_cache"), "key_cache must have a contiguous last dimension, got strides [128, 32, 16, 2]"),
    (spread("value_cache"), "value_cache must have a contiguous last dimension, got strides [96, 24, 12, 2]"),
    (
        to(key_cache=torch.zeros(5, 0, 2, 8), value_cache=torch.zeros(5, 0, 2, 6)),
        "key_cache must have block_size in 1 .. 2147483647, got 0",
    ),
    (
        to(key_cache=torch.zeros(5, 4, 0, 8), value_cache=torch.zeros(5, 4, 0, 6)),
        "key_cache must have num_kv_heads in 1 .. 2147483647, got 0",
    ),
    (to(key_cache=torch.zeros(5, 4, 2, 0)), "key_cache must have head_size in 1 .. 576, got 0"),
    (to(key_cache=torch.zeros(5, 4, 2, 577)), "key_cache must have head_size in 1 .. 576, got 577"),
    (to(value_cache=torch.zeros(5, 4, 2, 577)), "value_cache must have head_size_v in 1 .. 576, got 577"),
    (to(key_scale=torch.ones(1, dtype=torch.float64)), "key_scale must have dtype float32, got float64"),
    (to(key_scale=torch.ones(3)), f"key_scale must have shape {SCALE_SHAPES}, got [3]"),
    (to(value_scale=torch.ones(5, 4, 3)), f"value_scale must have shape {SCALE_SHAPES}, got [5, 4, 3]"),
    (to(key_scale=torch.ones(1, 1, 1)), f"key_scale must have shape {SCALE_SHAPES}, got [1, 1, 1]"),
    (to(value_scale=torch.ones(4)[::2]), "value_scale must be contiguous, got strides [2]"),
]

TABLE_CASES = [
    (flat("block_table"), "block_table must have shape [num_seqs, max_blocks], got [6]"),
    (dtype("block_table", torch.int64), "block_table must have dtype int32, got int64"),
    (spread("block_table"), "block_table must have a contiguous last dimension, got strides [6, 2]"),
    (dtype("seq_lens", torch.int64), "seq_lens must have dtype int32, got int64"),
    (to(seq_lens=int32(3, 5, 1)), "seq_lens must have shape [num_seqs=2], got [3]"),
    (spread("seq_lens"), "seq_lens must be contiguous, got strides [2]"),
]

ATTENTION_CASES = [
    *CACHE_CASES,
    *TABLE_CASES,
    (flat("query"), "query must have shape [num_tokens, num_heads, head_size=8], got [96]"),
    (to(query=torch.zeros(3, 4, 6)), "query must have shape [num_tokens, num_heads, head_size=8], got [3, 4, 6]"),
    (dtype("query", torch.int64), f"query must have dtype {FLOATS}, got int64"),
    (dtype("query", torch.float8_e5m2), f"query must have dtype {FLOATS}, got float8_e5m2"),
    (spread("query"), "query must have a contiguous last dimension, got strides [64, 16, 2]"),
    (to(query=torch.zeros(3, 3, 8)), "query must have num_heads a multiple of num_kv_heads=2, got 3"),
    (to(query=torch.zeros(3, 0, 8)), "query must have num_heads a multiple of num_kv_heads=2, got 0"),
    (dtype("cu_seqlens_q", torch.int64), "cu_seqlens_q must have dtype int32, got int64"),
    (to(cu_seqlens_q=int32(0, 3)), "cu_seqlens_q must have shape [num_seqs + 1=3], got [2]"),
    (to(max_seqlen_q=-1), "max_seqlen_q must be >= 0, got -1"),
    (to(scale=NAN), "scale must be finite, got nan"),
    (to(scale=INF), "scale must be finite, got inf"),
    (to(window_left=-2), "window_left must be >= -1, got -2"),
    (to(window_right=-7), "window_right must be >= -1, got -7"),
    (to(softcap=-0.5), "softcap must be finite and >= 0, got -0.5"),
    (to(softcap=NAN), "softcap must be finite and >= 0, got nan"),
    (to(alibi_slopes=torch.ones(2)), "alibi_slopes must have shape [num_heads=4], got [2]"),
    (to(alibi_slopes=torch.ones(4).half()), "alibi_slopes must have dtype float32, got float16"),
    (to(sinks=torch.ones(4, 1)), "sinks must have shape [num_heads=4], got [4, 1]"),
    (to(sinks=torch.ones(4).bfloat16()), "sinks must have dtype float32, got bfloat16"),
    (to(mask=torch.ones(3, 1, 5)[0]), "mask must have shape [num_tokens=3, num_heads=4 or 1, width], got [1, 5]"),
    (to(mask=torch.ones(3, 2, 5)), "mask must have shape [num_tokens=3, num_heads=4 or 1, width], got [3, 2, 5]"),
    (to(mask=torch.ones(3, 1, 5).half()), "mask must have dtype bool or float32, got float16"),
    (to(mask=torch.ones(3, 4, 6)[..., ::2]), "mask must have a contiguous last dimension, got strides [24, 6, 2]"),
]

CASES: dict[str, list[tuple[Change, str]]] = {
    "allocate": [
        *STATE_CASES,
        (dtype("cu_seqlens_q", torch.int64), "cu_seqlens_q must have dtype int32, got int64"),
        (to(cu_seqlens_q=int32(0, 3)), "cu_seqlens_q must have shape [num_seqs + 1=3], got [2]"),
        (to(cu_seqlens_q=int32(0, 1, 4)), "cu_seqlens_q must hold values in 0 .. 3, got 4 at index 2"),
        (to(cu_seqlens_q=int32(-1, 1, 3)), "cu_seqlens_q must hold values in 0 .. 3, got -1 at index 0"),
        (to(cu_seqlens_q=int32(0, 2, 1)), "cu_seqlens_q must ascend, got 1 after 2 at row 1"),
        (to(num_tokens=-1), "num_tokens must be in 0 .. 2147483647, got -1"),
        (to(num_new=int64(1, 2)), "num_new must have dtype int32, got int64"),
        (to(num_new=int32(1)), "num_new must have shape [num_seqs=2], got [1]"),
        (to(num_new=int32(1, -2)), "num_new must hold values in 0 .. 2, got -2 at row 1"),
        (to(num_new=int32(2, 2)), "num_new must hold values in 0 .. 1, got 2 at row 0"),
        (to(retain=int64(3)), "retain must have dtype int32, got int64"),
        (to(retain=int32(3, 3)), "retain must have shape [num_groups=1], got [2]"),
        (to(retain=int32(-2)), "retain must hold values in -1 .. 2147483647, got -2 at group 0"),
        (
            to(cu_seqlens_q=int32(0, 1, 9), num_tokens=9),
            "block_table must have max_blocks >= 4 for row 1, got 3",
        ),
    ],
    "free": [
        *STATE_CASES,
        (dtype("new_lens", torch.int64), "new_lens must have dtype int32, got int64"),
        (to(new_lens=int32(1)), "new_lens must have shape [num_seqs=2], got [1]"),
        (to(new_lens=int32(1, -1)), "new_lens must hold values in 0 .. 2147483647, got -1 at row 1"),
    ],
    "fork": [
        *STATE_CASES,
        (dtype("source_rows", torch.int32), "source_rows must have dtype int64, got int32"),
        (dtype("destination_rows", torch.int32), "destination_rows must have dtype int64, got int32"),
        (to(source_rows=int64([0])), "source_rows must have shape [num_pairs], got [1, 1]"),
        (to(destination_rows=int64(0, 1)), "destination_rows must have shape [num_pairs=1], got [2]"),
        (to(source_rows=int64(2)), "source_rows must hold values in 0 .. 1, got 2 at pair 0"),
        (to(destination_rows=int64(-1)), "destination_rows must hold values in 0 .. 1, got -1 at pair 0"),
        (
            to(source_rows=int64(0, 0), destination_rows=int64(1, 1)),
            "destination_rows must hold each row once, got 1 again at pair 1",
        ),
    ],
    "reshape_and_cache": [
        *CACHE_CASES,
        (to(key=torch.ones(3, 16)), "key must have shape [num_tokens, num_kv_heads=2, head_size=8], got [3, 16]"),
        (to(key=torch.ones(3, 4, 8)), "key must have shape [num_tokens, num_kv_heads=2, head_size=8], got [3, 4, 8]"),
        (
            to(value=torch.ones(2, 2, 6)),
            "value must have shape [num_tokens=3, num_kv_heads=2, head_size_v=6], got [2, 2, 6]",
        ),
        (dtype("key", torch.int8), f"key must have dtype {FLOATS}, got int8"),
        (dtype("value", torch.bfloat16), "value must have dtype float32, got bfloat16"),
        (spread("key"), "key must have a contiguous last dimension, got strides [32, 16, 2]"),
        (spread("value"), "value must have a contiguous last dimension, got strides [24, 12, 2]"),
        (dtype("slot_mapping", torch.int32), "slot_mapping must have dtype int64, got int32"),
        (to(slot_mapping=int64(0, 1)), "slot_mapping must have shape [num_tokens=3], got [2]"),
        (spread("slot_mapping"), "slot_mapping must be contiguous, got strides [2]"),
        (
            to(key_cache=torch.zeros(4, 2, 8).expand(5, 4, 2, 8)),
            "key_cache must not overlap itself, got strides [0, 16, 8, 1]",
        ),
        (
            to(value_cache=torch.zeros(400).as_strided((5, 4, 2, 6), (48, 12, 5, 1))),
            "value_cache must not overlap itself, got strides [48, 12, 5, 1]",
        ),
        (
            to(key_scale=torch.ones(5, 4, 2)),
            "key_scale must be None, per tensor or per head for a cache of dtype float32, got a scale per slot",
        ),
        (
            both(
                dtype("key_cache", torch.int8),
                dtype("value_cache", torch.int8),
                to(value_scale=torch.ones(2).expand(5, 4, 2)),
            ),
            "value_scale must not overlap itself, got strides [0, 0, 1]",
        ),
    ],
    "paged_attention": ATTENTION_CASES,
    "paged_attention_with_lse": ATTENTION_CASES,
    "merge_attention_states": [
        (flat("out_a"), "out_a must have shape [num_tokens, num_heads, head_size], got [72]"),
        (dtype("out_a", torch.int8), f"out_a must have dtype {FLOATS}, got int8"),
        (
            to(out_b=torch.zeros(3, 4, 8)),
            "out_b must have shape [num_tokens=3, num_heads=4, head_size=6], got [3, 4, 8]",
        ),
        (dtype("out_b", torch.float16), "out_b must have dtype float32, got float16"),
        (spread("out_a"), "out_a must be contiguous, got strides [48, 12, 2]"),
        (spread("out_b"), "out_b must be contiguous, got strides [48, 12, 2]"),
        (to(lse_a=torch.zeros(3, 2)), "lse_a must have shape [num_tokens=3, num_heads=4], got [3, 2]"),
        (dtype("lse_b", torch.float64), "lse_b must have dtype float32, got float64"),
        (spread("lse_b"), "lse_b must be contiguous, got strides [8, 2]"),
        (to(sinks=torch.zeros(3)), "sinks must have shape [num_heads=4], got [3]"),
    ],
    "copy_blocks": [
        (dtype("block_mapping", torch.int32), "block_mapping must have dtype int64, got int32"),
        (to(block_mapping=int64(0, 1)), "block_mapping must have shape [num_pairs, 2], got [2]"),
        (to(block_mapping=int64([0, 1, 2])), "block_mapping must have shape [num_pairs, 2], got [1, 3]"),
        (spread("block_mapping"), "block_mapping must be contiguous, got strides [4, 2]"),
        (to(key_caches=[torch.tensor(1.0)]), "key_caches[0] must have shape [num_blocks, ...], got []"),
        (
            to(value_caches=[torch.zeros(5, 2), torch.zeros(2).expand(5, 2)]),
            "value_caches[1] must not overlap itself, got strides [0, 1]",
        ),
        (
            lambda arguments: {**arguments, "value_caches": arguments["key_caches"]},
            "key_caches and value_caches must hold each cache once, got one that is listed twice",
        ),
    ],
    "swap_blocks": [
        (dtype("block_mapping", torch.int32), "block_mapping must have dtype int64, got int32"),
        (to(block_mapping=int64([0], [1])), "block_mapping must have shape [num_pairs, 2], got [2, 1]"),
        (
            to(destination_caches=[]),
            "destination_caches must have as many caches as source_caches (1), got 0",
        ),
        (
            to(destination_caches=[torch.zeros(7, 5)]),
            "destination_caches[0] must have blocks of shape [4], got [5]",
        ),
        (
            to(destination_caches=[torch.zeros(7, 4).half()]),
            "destination_caches[0] must have dtype float32, got float16",
        ),
        (
            to(destination_caches=[torch.zeros(7, 2, 2)]),
            "destination_caches[0] must have blocks of shape [4], got [2, 2]",
        ),
        (to(source_caches=[torch.tensor(1.0)]), "source_caches[0] must have shape [num_blocks, ...], got []"),
        (
            to(destination_caches=[torch.zeros(4).expand(7, 4)]),
            "destination_caches[0] must not overlap itself, got strides [0, 1]",
        ),
        (
            lambda arguments: {
                name: 2 * value if name != "block_mapping" else value for name, value in arguments.items()
            },
            "destination_caches must hold each cache once, got one that is listed twice",
        ),
    ],
    "gather_blocks": [
        *CACHE_CASES,
        *TABLE_CASES,
        (to(max_len=-1), "max_len must be in 0 .. 2147483647, got -1"),
        (to(dtype=torch.int8), f"dtype must be {FLOATS}, got int8"),
        (to(dtype=torch.float8_e4m3fn), f"dtype must be {FLOATS}, got float8_e4m3fn"),
    ],
    "find_shared_prefixes": [
        *TABLE_CASES,
        (dtype("cu_seqlens_q", torch.int64), "cu_seqlens_q must have dtype int32, got int64"),
        (to(cu_seqlens_q=int32(0, 3)), "cu_seqlens_q must have shape [num_seqs + 1=3], got [2]"),
        (to(block_size=0), "block_size must be in 1 .. 2147483647, got 0"),
        (to(min_saved=0), "min_saved must be >= 1, got 0"),
        (
            to(
                block_table=torch.zeros(1, 1 << 20, dtype=torch.int32).expand(4096, -1),
                seq_lens=torch.zeros(4096, dtype=torch.int32),
                cu_seqlens_q=torch.zeros(4097, dtype=torch.int32),
            ),
            "block_table must have num_seqs * max_blocks in 0 .. 2147483647, got 4294967296",
        ),
    ],
}

# Rules about the contents of index tensors, checked with PAGED_KV_DEBUG=1 alone.
TABLE_DEBUG_CASES = [
    (to(seq_lens=int32(3, 13)), "seq_lens must hold values in 0 .. 12, got 13 at row 1"),
    (to(seq_lens=int32(-1, 3)), "seq_lens must hold values in 0 .. 12, got -1 at row 0"),
    (
        to(block_table=int32([0, 9, 9], [1, 5, 9])),
        "block_table must hold blocks in -1 .. 4, got 5 at row 1, column 1",
    ),
    (
        to(block_table=int32([-2, 9, 9], [1, 2, 9])),
        "block_table must hold blocks in -1 .. 4, got -2 at row 0, column 0",
    ),
]
PAIR_DEBUG_CASES = [
    (to(block_mapping=int64([0, 1], [5, 2])), "block_mapping must hold blocks in -1 .. 4, got 5 at row 1, column 0"),
    (to(block_mapping=int64([0, 2], [1, 2])), "block_mapping must hold each destination once, got 2 again at row 1"),
]
SPAN_DEBUG_CASES = [
    (to(cu_seqlens_q=int32(0, 2, 1)), "cu_seqlens_q must ascend, got 1 after 2 at row 1"),
    (to(cu_seqlens_q=int32(0, 1, 4)), "cu_seqlens_q must hold values in 0 .. 3, got 4 at index 2"),
    (to(max_seqlen_q=1), "max_seqlen_q must be at least the query length 2 of row 1, got 1"),
]
ONE_TOKEN_DEBUG_CASE = (  # [num_seqs, num_heads, 1, head_size]: as many tokens as rows
    to(query=torch.zeros(2, 4, 1, 8), cu_seqlens_q=int32(0, 1, 3)),
    "cu_seqlens_q must hold values in 0 .. 2, got 3 at index 2",
)
NAN_SLOT = torch.ones(5, 4, 2)
NAN_SLOT[2, 0, 1] = NAN  # position 4 of row 1
NAN_SLOT[1, 3, 0] = -0.0
SCALE_DEBUG_CASES = [
    (to(key_scale=torch.tensor([1.0, NAN])), "key_scale must be finite and above 0, got nan at 1"),
    (to(value_scale=torch.tensor([0.0])), "value_scale must be finite and above 0, got 0 at 0"),
    (to(value_scale=torch.tensor(INF)), "value_scale must be finite and above 0, got inf at 0"),
]
SLOT_SCALE_DEBUG_CASES = [
    *SCALE_DEBUG_CASES,
    (
        to(value_scale=NAN_SLOT),
        "value_scale must be finite and above 0 where a token is, got -0 at row 1, position 3, head 0",
    ),
    (
        to(key_scale=NAN_SLOT.abs().clamp(min=0.5)),
        "key_scale must be finite and above 0 where a token is, got nan at row 1, position 4, head 1",
    ),
]
STATE_DEBUG_CASES = [
    (to(counters=int64(-1, 1, 0, 0)), "counters must hold 0 <= head <= tail <= head + 5, got -1 and 1"),
    (to(counters=int64(0, 6, 0, 0)), "counters must hold 0 <= head <= tail <= head + 5, got 0 and 6"),
    (to(free_ring=int32(3, 5, 0, 0, 0)), "free_ring must hold values in 0 .. 4, got 5 at index 1"),
    (to(free_ring=int32(4, 4, 0, 0, 0)), "free_ring must hold each free block once, got 4 again at index 1"),
    (
        to(free_ring=int32(3, 2, 0, 0, 0)),
        "ref_counts must be 0 for the free blocks of free_ring, got 1 for block 2 at index 1",
    ),
    (
        to(block_table=int32([0, -1, -1], [1, 5, -1])),
        "block_table must hold blocks in -1 .. 4, got 5 at row 1, column 1",
    ),
    (
        to(ref_counts=int32(1, 0, 1, 0, 0)),
        "ref_counts must count every block that block_table holds, got 0 for block 1 at row 1, column 0",
    ),
]
DEBUG_CASES: dict[str, list[tuple[Change, str]]] = {
    "allocate": STATE_DEBUG_CASES,
    "free": STATE_DEBUG_CASES,
    "fork": STATE_DEBUG_CASES,
    "reshape_and_cache": [
        (to(slot_mapping=int64(0, 20, 1)), "slot_mapping must hold values in -1 .. 19, got 20 at token 1"),
        (to(slot_mapping=int64(0, -2, 1)), "slot_mapping must hold values in -1 .. 19, got -2 at token 1"),
        (
            to(key=torch.ones(2, 2, 1, 8), value=torch.ones(2, 2, 1, 6), slot_mapping=int64(0, 20)),
            "slot_mapping must hold values in -1 .. 19, got 20 at token 1",
        ),
        (to(slot_mapping=int64(7, -1, 7)), "slot_mapping must hold each slot once, got 7 again at token 2"),
        *SCALE_DEBUG_CASES,
    ],
    "paged_attention": [*TABLE_DEBUG_CASES, *SPAN_DEBUG_CASES, ONE_TOKEN_DEBUG_CASE, *SLOT_SCALE_DEBUG_CASES],
    "paged_attention_with_lse": [*TABLE_DEBUG_CASES, *SPAN_DEBUG_CASES, ONE_TOKEN_DEBUG_CASE, *SLOT_SCALE_DEBUG_CASES],
    "copy_blocks": PAIR_DEBUG_CASES,
    "swap_blocks": [
        *PAIR_DEBUG_CASES,
        (
            to(block_mapping=int64([0, 7])),
            "block_mapping must hold blocks in -1 .. 6, got 7 at row 0, column 1",
        ),
    ],
    "gather_blocks": [*TABLE_DEBUG_CASES, *SLOT_SCALE_DEBUG_CASES],
    "find_shared_prefixes": [
        *TABLE_DEBUG_CASES[:2],
        SPAN_DEBUG_CASES[0],
        (
            to(block_table=int32([0, 9, 9], [-2, 2, 9])),
            "block_table must hold blocks in -1 .. 2147483646, got -2 at row 1, column 0",
        ),
    ],
}


def listed(cases: dict[str, list[tuple[Change, str]]]) -> list[Any]:
    return [
        pytest.param(op, change, message, id=f"{op}-{index}")
        for op, changes in cases.items()
        for index, (change, message) in enumerate(changes)
    ]


def message_of(op: str, change: Change) -> str:
    """What the op says about changed arguments; an AssertionError if it wrote any of them first."""
    arguments = change(good(op))
    before = copy.deepcopy(arguments)
    try:
        call(op, arguments)
    except ValueError as error:
        assert str(before) == str(arguments), "written before the check"
        return str(error)
    return "no error"


@pytest.mark.parametrize("op", OPS)
def test_good_arguments_pass(op: str) -> None:
    call(op, good(op))


@pytest.mark.parametrize(("op", "change", "message"), listed(CASES))
def test_bad_argument_is_named(op: str, change: Change, message: str) -> None:
    assert message_of(op, change) == message


def test_out_of_blocks_changes_nothing() -> None:
    arguments = {**good("allocate"), "cu_seqlens_q": int32(0, 12, 20), "num_tokens": 20}
    arguments["block_table"] = int32([0, -1, -1, -1], [1, 2, -1, -1])
    before = copy.deepcopy(arguments)
    with pytest.raises(OutOfBlocksError, match=r"^out of blocks: wanted 5, free 2, evictable 0$"):
        call("allocate", arguments)
    assert all(torch.equal(before[name], arguments[name]) for name in state())


def test_the_raw_op_has_the_same_words() -> None:
    """torch makes a RuntimeError of a C++ std::invalid_argument from 2.15 on."""
    change, message = CASES["free"][0]
    expected = RuntimeError if torch.__version__ >= (2, 15) else ValueError  # type: ignore[operator]
    with pytest.raises(expected) as caught:
        torch.ops.paged_kv.free(**change(good("free")))
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("device index must be below 64, got 64"),
        torch.OutOfMemoryError("memory must be there, got none"),
        OutOfBlocksError(5, 2, 1),
    ],
    ids=lambda error: str(error),
)
def test_other_errors_stay_as_they_are(error: RuntimeError) -> None:
    assert typed(error) is error


@pytest.fixture(scope="module")
def debug_messages() -> dict[str, list[str]]:
    """The messages of DEBUG_CASES from a process that had PAGED_KV_DEBUG=1 from its start."""
    script = (
        "import json, test_checks as t\n"
        "for op in t.OPS: t.call(op, t.good(op))\n"
        "messages = {op: [t.message_of(op, c) for c, _ in cases] for op, cases in t.DEBUG_CASES.items()}\n"
        "print(json.dumps(messages))"
    )
    environment = {**os.environ, "PAGED_KV_DEBUG": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=Path(__file__).parent, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    messages: dict[str, list[str]] = json.loads(result.stdout)
    return messages


@pytest.mark.parametrize(("op", "index"), [(op, i) for op, cases in DEBUG_CASES.items() for i in range(len(cases))])
def test_debug_mode_checks_contents(op: str, index: int, debug_messages: dict[str, list[str]]) -> None:
    assert debug_messages[op][index] == DEBUG_CASES[op][index][1]


@pytest.mark.parametrize(("op", "change", "message"), listed(DEBUG_CASES))
def test_contents_are_skipped_without_debug_mode(op: str, change: Change, message: str) -> None:
    """Contents out of range lead to no error and no crash: they name no memory and no visible key."""
    assert message_of(op, change) == "no error", message


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs two devices")
@pytest.mark.parametrize("op", OPS)
def test_tensors_must_share_a_device(op: str) -> None:
    arguments = good(op)
    names = [name for name, value in arguments.items() if isinstance(value, Tensor)]
    if op in ("copy_blocks", "swap_blocks"):
        arguments["block_mapping"] = arguments["block_mapping"].cuda()
    else:
        arguments[names[-1]] = arguments[names[-1]].cuda()
    with pytest.raises(ValueError, match=r" must be on (cpu|cuda:0), got (cpu|cuda:0)$"):
        call(op, arguments)
