"""Shared-prefix (cascade) attention: rows whose tables begin with the same blocks read these once, not once each.

A row's attention is computed in two parts and merged by their log-sum-exps: over the blocks that it shares with its
neighbours, where all queries of the run are one sequence, and over the rest of its own. Who shares what is found on the
device once a step (:meth:`SharedPrefixes.find`) and used by every layer that reads the same block table.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from . import ops

# Reads of a key that a run of rows must save. On a CPU the second call and the merge cost as much as a thousand of them
# (docs/shared_prefixes.md). On an H200 so many keys are a microsecond: a batch that saves no more has nothing to gain.
MIN_SAVED = 1024

# Positions of a step up to which sharing reads pays. With more, attention is bound by arithmetic, which stays the same.
MAX_QUERIES = 16


@dataclass(frozen=True)
class SharedPrefixes:
    """Which rows of a batch share which blocks, as the two calls of attention take it. Results of one `find`."""

    block_table: Tensor  # int32 [num_seqs, max_blocks]
    cu_seqlens_q: Tensor  # int32 [num_seqs + 1]
    prefix_lens: Tensor  # int32 [num_seqs]
    prefix_cu_seqlens_q: Tensor  # int32 [num_seqs + 1]
    suffix_table: Tensor  # int32 [num_seqs, max_blocks]
    suffix_lens: Tensor  # int32 [num_seqs]

    @classmethod
    def find(
        cls, block_table: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor, block_size: int, min_saved: int = MIN_SAVED
    ) -> SharedPrefixes:
        """Look for runs of neighbouring rows that begin with the same blocks. No synchronisation on CUDA.

        Args:
            block_table: int32 [num_seqs, max_blocks].
            seq_lens: int32 [num_seqs], keys each row holds, this step's included.
            cu_seqlens_q: int32 [num_seqs + 1], prefix sum of this step's query lengths.
            block_size: tokens a block holds.
            min_saved: fewest reads of a key that a run must save, at least 1.

        Raises:
            ValueError: a shape, dtype, device or number does not fit.
        """
        found = ops.find_shared_prefixes(block_table, seq_lens, cu_seqlens_q, block_size, min_saved)
        return cls(block_table, cu_seqlens_q, *found)

    def any(self) -> bool:
        """Whether any rows share blocks. Synchronises on CUDA."""
        return bool(self.prefix_lens.any())


def shared_prefix_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    shared: SharedPrefixes,
    max_seqlen_q: int,
    *,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> Tensor:
    """What causal `ops.paged_attention` gives, up to rounding, with shared blocks read once.

    There are no windows, masks, ALiBi or bidirectional attention here: a part of the keys does not know the positions
    that they speak of. Nor is there a deterministic mode: a row's bits depend on which neighbours it shares blocks
    with.

    Args:
        query: [num_tokens, num_heads, head_size], as for `ops.paged_attention`.
        key_cache: [num_blocks, block_size, num_kv_heads, head_size].
        value_cache: [num_blocks, block_size, num_kv_heads, head_size_v].
        shared: of the step's block table and lengths.
        max_seqlen_q: an upper bound of the query lengths.
        scale: factor of q.k, usually head_size ** -0.5.
        softcap: score = softcap * tanh(score / softcap); 0 is off.
        sinks: [num_heads], one logit more in each head's softmax, without a value.
        key_scale: of 8-bit caches, as for `ops.reshape_and_cache`.
        value_scale: likewise.

    Returns:
        [num_tokens, num_heads, head_size_v], contiguous, of the query's dtype. Each part is rounded to it before they
        are merged.

    Raises:
        ValueError: as `ops.paged_attention`.
    """
    prefix = ops.paged_attention_with_lse(
        query,
        key_cache,
        value_cache,
        shared.block_table,
        shared.prefix_lens,
        shared.prefix_cu_seqlens_q,
        query.shape[0],  # a run may hold every query
        scale=scale,
        causal=False,
        softcap=softcap,
        key_scale=key_scale,
        value_scale=value_scale,
    )
    suffix = ops.paged_attention_with_lse(
        query,
        key_cache,
        value_cache,
        shared.suffix_table,
        shared.suffix_lens,
        shared.cu_seqlens_q,
        max_seqlen_q,
        scale=scale,
        softcap=softcap,
        key_scale=key_scale,
        value_scale=value_scale,
    )
    return ops.merge_attention_states(*prefix, *suffix, sinks=sinks)[0]
