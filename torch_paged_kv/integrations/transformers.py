"""PagedKVCache for Transformers (4.57 and newer): goes wherever a ``DynamicCache`` goes, on an untouched model.

How attention finds the cache: ``update`` stores the new keys and values and returns them with a handle on the key
tensor. What a model looks up to attend and to make masks is given out behind the functions of :mod:`.seams`, which take
the paged path if the key carries a handle, or the key length came from a paged cache, and otherwise call what was
looked up with the same arguments. So ordinary forwards, other caches and training see the functions they always saw.

``generate`` tells a paged cache how long it will become (:mod:`.generation`), and nothing else of it changes.

Models that touch keys and values between ``update`` and attention, or attend without looking up a function, get
gathered keys and values instead (:mod:`.families`, or ``mode="gather"``). A model of that kind that is not known
here is refused at its second layer rather than answered wrongly.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from torch_paged_kv import cache as core
from torch_paged_kv.integrations import families, generation, seams
from torch_paged_kv.integrations import prefix as prefix_hooks
from torch_paged_kv.integrations.layers import Handle, PagedLayer
from torch_paged_kv.layout import LayerShape
from torch_paged_kv.prefix import Batch, PrefixCache
from torch_paged_kv.scales import Scales
from torch_paged_kv.step import Step
from torch_paged_kv.storage import KVPool

VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])

GATHERED_MODELS = families.gathered(VERSION)

_counts = {"direct": 0, "gathered": 0}


def path_counts() -> dict[str, int]:
    """How often eager attention went through the block table (``direct``) and keys were copied out (``gathered``)."""
    return dict(_counts)


def _count(path: str) -> None:
    if not torch.compiler.is_compiling():
        _counts[path] += 1


class PagedKVCache(core.PagedKVCache, DynamicCache):
    """A paged KV cache that ``generate(past_key_values=...)`` takes wherever it takes a ``DynamicCache``.

    Args:
        config: the model's config; tells which layers slide and which are not attention. None: taken from the model
            when it builds its first mask; models that build none count as full attention throughout.
        block_size: tokens in a block, >= 1.
        num_blocks: size of the pool in blocks. At most one size may be given; none: the pool grows on demand. A given
            size never grows, and running out raises :class:`OutOfBlocksError`.
        num_tokens: size of the pool in tokens of one sequence.
        bytes: size of the pool in bytes (needs ``config``).
        fraction: size of the pool as a share of the memory that is free at the first update (needs ``config``).
        dtype: of the stored keys and values (float32, float16, bfloat16, float8_e4m3fn, float8_e5m2, int8). None: that
            of the first key, or of ``pool``.
        scales: of an 8-bit cache. "per_slot": made for every slot and head as it is stored; :class:`StaticScales`:
            fixed ones, see :func:`torch_paged_kv.calibrate`; None: stored as it is, saturated (float8 alone). "auto" is
            "per_slot" for 8-bit dtypes.
        pool: the pool of another cache of the same model, to share its blocks.
        mode: "auto" takes the direct path where the model can; "direct" and "gather" choose.
        prefix_cache: known blocks of prompts, for ``generate`` to take and to add to (needs ``config``). Its pool is
            that of the first cache it is given to, and a size is that of this pool.
        share_prefix_reads: read blocks that rows next to each other begin with once for all of them, in steps of a few
            positions: beams, samples of one prompt and prompts of a prefix cache. Results differ by rounding.

    Padding takes no slot: a left-padded row holds its real tokens only. ``copy.deepcopy`` is a fork that shares blocks.
    """

    def __init__(
        self,
        config: Any = None,
        *,
        block_size: int = 16,
        num_blocks: int | None = None,
        num_tokens: int | None = None,
        bytes: int | None = None,
        fraction: float | None = None,
        dtype: torch.dtype | None = None,
        scales: Scales = "auto",
        pool: KVPool | None = None,
        mode: str = "auto",
        prefix_cache: PrefixCache | None = None,
        share_prefix_reads: bool = False,
    ) -> None:
        if mode not in ("auto", "direct", "gather"):
            raise ValueError(f'mode must be "auto", "direct" or "gather", got {mode!r}')
        layers = [] if config is None else self._layers_of(config)
        windows = [layer.window for layer in layers if isinstance(layer, PagedLayer)]
        core.PagedKVCache.__init__(
            self,
            None if config is None else windows,
            block_size=block_size,
            num_blocks=num_blocks,
            num_tokens=num_tokens,
            bytes=bytes,
            fraction=fraction,
            dtype=dtype,
            scales=scales,
            pool=pool,
            share_prefix_reads=share_prefix_reads,
        )
        self.prefix_cache = prefix_cache
        self._expected: Batch | None = None  # prompts to remember once they are written
        if prefix_cache is not None:
            prefix_hooks.check_config(config, all(isinstance(layer, PagedLayer) for layer in layers))
            prefix_hooks.install()
            if prefix_cache.pool is not None:
                self.share(prefix_cache.pool)
            if self._pool is not None:
                prefix_cache.bind(self, self._pool)
        transformers.Cache.__init__(self, layers=layers)
        self._mode = mode
        self._direct = mode != "gather"
        self._config: Any = None
        self._text_config: Any = None
        if config is not None:
            self._take_config(config)

    # ---- what models call -----------------------------------------------------------------------------------------

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store new keys and values of a layer.

        Args:
            key_states: ``[num_seqs, num_kv_heads, length, head_size]``.
            value_states: ``[num_seqs, num_kv_heads, length, head_size_v]``.
            layer_idx: index of the layer in the model.
            *args: what some releases add; not needed.
            **kwargs: likewise.

        Returns:
            What the layer's attention function takes: the new ones with a handle on the key, or gathered ones.
        """
        layers = self.layers
        while self._windows is None and len(layers) <= layer_idx:
            layers.append(PagedLayer(self, len(layers), None))
        layer = layers[layer_idx]
        if not isinstance(layer, PagedLayer):
            states: tuple[Tensor, Tensor]
            states = DynamicCache.update(self, key_states, value_states, layer_idx, *args, **kwargs)
            return states
        progress = self._progress
        if progress.pending is not None:
            self._check_pending(layer)
        key = key_states.detach()
        step = self.write(layer.index, key, value_states.detach() if value_states.requires_grad else value_states)
        if not self._direct:
            _count("gathered")
            key, value = self.gather(layer.index)
            return seams.without_backward(key, key_states), seams.without_backward(value, value_states)
        if key_states.requires_grad:
            key = key_states.view_as(key_states)
        # `key` is an object of its own, so that nothing else carries the handle.
        key._paged_kv = progress.pending = Handle(self, layer, step)  # type: ignore[attr-defined]
        return key, value_states

    def attention(
        self,
        handle: Handle,
        module: torch.nn.Module,
        query: Tensor,
        attention_mask: Tensor | None,
        *,
        scaling: float | None = None,
        dropout: float = 0.0,
        is_causal: bool | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        sinks: Tensor | None = None,
        position_bias: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Attention of a layer over its blocks, with the arguments Transformers gives an attention function.

        Returns:
            ``[num_seqs, length, num_heads, head_size_v]``, and None for the weights.
        """
        if dropout:
            raise ValueError(f"dropout must be 0 with a PagedKVCache, got {dropout}: call model.eval()")
        if position_bias is not None:
            raise ValueError('position_bias must be None on the direct path: use PagedKVCache(config, mode="gather")')
        self._progress.pending = None
        layer, step = handle.layer, handle.step
        if step.eager:
            _counts["direct"] += 1
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if attention_mask is not None and attention_mask.shape[0] == 0:
            attention_mask, causal = None, True  # what make_mask says of a causal mask
        window = sliding_window if self._config is None else layer.window
        if attention_mask is None and causal and step.num_new is not None and self._padding_attends(step):
            attention_mask = self._visible(query.shape[2], window).to(query.device)
        sinks = sinks if s_aux is None else s_aux
        requires_grad = query.requires_grad
        out = self.attend(
            step,
            layer.index,
            query.detach() if requires_grad else query,
            scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
            causal=causal,
            window=window,
            softcap=softcap or 0.0,
            sinks=None if sinks is None else sinks.detach(),
            mask=attention_mask,
        )
        return (seams.without_backward(out, query) if requires_grad else out), None

    def forgo(self, handle: Handle) -> None:
        """The layer attends to the new keys and values themselves, which must be all that it holds."""
        if not torch.compiler.is_compiling() and self.seen != handle.step.length:
            raise ValueError(
                f"query must have the {handle.step.length} positions that layer {handle.layer.index} wrote"
            )
        self._progress.pending = None

    def dense(
        self, handle: Handle, query: Tensor, mask: Tensor | None, window: int | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What the layer's own attention function needs instead: all keys, all values, a full mask.

        Returns:
            ``[num_seqs, num_kv_heads, seen, head_size]``, ``[..., head_size_v]``, ``[num_seqs, 1, length, seen]``.
        """
        self._progress.pending = None
        _count("gathered")
        key, value = self.gather(handle.layer.index)
        if mask is None or mask.shape[0] == 0:
            window = window if self._config is None else handle.layer.window
            mask = self._visible(query.shape[2], window).to(query.device)
        if mask.dtype == torch.bool:
            lowest = torch.finfo(query.dtype).min
            mask = torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill_(~mask, lowest)
        return seams.without_backward(key, query), seams.without_backward(value, query), mask

    def _padding_attends(self, step: Step) -> bool:
        """Whether padding follows tokens of its row, and attends to them.

        So it is everywhere in Transformers: generate takes the token after a right-padded prompt from such a position.
        """
        return step.eager and (step.order is not None or self.seen > step.length)

    def _visible(self, length: int, window: int | None) -> Tensor:
        """Which positions the last ``length`` ones see: bool ``[num_seqs, 1, length, seen]`` on the CPU."""
        stored = self._mirror().stored()
        position, tokens = torch.arange(stored.shape[1]), stored.cumsum(1)  # [seen], [num_seqs, seen]
        visible = stored[:, None] & (position <= position[-length:, None])
        if window is not None:  # in tokens: padding between them does not count
            visible &= tokens[:, None] > tokens[:, -length:, None] - window
        return visible[:, None]

    def mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """Number of key positions with the coming ones, and the first of them; tells the mask function who asks."""
        length = query_length.shape[0] if isinstance(query_length, Tensor) else query_length
        if torch.compiler.is_compiling():
            # No number of positions would stay true, and the direct path needs none. The tracer knows no subclasses of
            # int; the mask function follows within the same trace.
            seams.traced_owner[0] = self
            return length, 0
        self._choose_path()  # the model's attention implementation may have been set since
        if self._expected is not None and self._lengths.seen >= self._expected.length:
            self.register_prompts()
        self.announce(length)
        return seams.KeyLength(self._mirror(exact=length > 1).seen + length, self), 0

    @property
    def is_compileable(self) -> bool:
        """Whether generate may compile the decode steps: asked several times a step, so not of every paged layer."""
        sized = len(self.layers) > 0 and self.is_sized and not self._spread and VERSION >= (5,)
        return sized and all(layer.is_compileable for layer in self._other_layers())

    def get_mask_sizes(self, query_length: int | Tensor, layer_idx: int) -> tuple[int, int]:
        """Number of key positions with the coming ones, and the first of them."""
        if layer_idx >= len(self.layers) or isinstance(self.layers[layer_idx], PagedLayer):
            return self.mask_sizes(query_length)
        sizes: tuple[int, int] = DynamicCache.get_mask_sizes(self, query_length, layer_idx)  # type: ignore[arg-type]
        return sizes

    def get_seq_length(self, layer_idx: int = 0, *args: Any) -> int:
        """Positions a layer has seen, padding included; inside a compiled graph a 0-dim tensor."""
        layer = self.layers[layer_idx] if layer_idx < len(self.layers) else None
        if isinstance(layer, PagedLayer):
            return self.seen_by(layer.index)
        length: int = DynamicCache.get_seq_length(self, layer_idx)
        return length

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Position of the next query; asked before each step, so it takes compiled steps as announced."""
        if torch.compiler.is_compiling():
            return self.get_seq_length(layer_idx)
        return self._mirror(exact=False).seen

    def make_mask(self, original: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """The mask of the coming forward: none or empty where causality, window and padding say it all, else dense.

        Args:
            original: the mask function of the model's attention implementation.
            arguments: what it was called with.
        """
        self._take_config(arguments.get("config"))
        if not self._direct:
            return original(**arguments)
        length = arguments["q_length"] if "q_length" in arguments else arguments["cache_position"].shape[0]
        self.pad(arguments.get("attention_mask"), length)
        if seams.is_plain(arguments, length):
            # Where generate makes the masks ahead, a model makes its own from None, and would forget the padding; a
            # mask of four dimensions it takes as it is.
            return None if self._progress.padding is None else torch.empty(0, 1, 1, 1, device=arguments.get("device"))
        return seams.sdpa_mask(**(arguments | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}))

    def seen_by(self, index: int) -> int:
        """Positions a paged layer has seen: those of the running step only once it has written them."""
        compiling = torch.compiler.is_compiling()
        seen: Any = self._rows.seen if compiling and self._rows is not None else self.seen
        step = self._progress.step if index > 0 else None
        if step is not None and index > step.written:
            seen = seen - step.length
        return seen  # type: ignore[no-any-return]

    # ---- what generate calls --------------------------------------------------------------------------------------

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes row ``beam_idx[i]`` (beam search)."""
        self.reorder(beam_idx)
        for layer in self._other_layers():
            layer.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row becomes ``repeats`` rows that share its blocks."""
        self.reorder(torch.arange(self.num_seqs).repeat_interleave(repeats))
        for layer in self._other_layers():
            layer.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows ``indices``: integers or a bool mask over the rows."""
        indices = torch.as_tensor(indices)
        self.reorder(torch.arange(self.num_seqs, device=indices.device)[indices])
        for layer in self._other_layers():
            layer.batch_select_indices(indices)

    def crop(self, tokens: int | Tensor) -> None:
        """Shorten every row: a negative number removes that many positions, a positive one is the new length.

        0 removes nothing, or everything before Transformers 5, as there.
        """
        tokens = int(tokens)
        relative = tokens < 0 or (tokens == 0 and VERSION >= (5,))
        self.truncate(max(0, self.seen + tokens) if relative else tokens)
        for layer in self._other_layers():
            layer.crop(tokens)

    def activate_past_recording(self) -> None:
        """Keep what leaves a sliding window until the next crop."""
        self.keep_past()
        for layer in self._other_layers():
            if hasattr(layer, "activate_past_recording"):
                layer.activate_past_recording()

    def expect_prompts(self, batch: Batch) -> None:
        """Remember the prompts of a batch as soon as they are written."""
        self._expected = batch

    def register_prompts(self) -> bool:
        """Remember the expected prompts, which are written now; whether there were any."""
        batch, self._expected = self._expected, None
        if batch is None or self.prefix_cache is None:
            return False
        self.prefix_cache.register_batch(self, batch)
        return True

    def check(self) -> None:
        """Raise if the accounts of the pool do not close; nobody but the cache and its prefix cache may hold blocks."""
        if self.prefix_cache is None:
            core.PagedKVCache.check(self)
        else:
            self.prefix_cache.check(self)

    def reset(self) -> None:
        """Give every block back; the pool keeps its memory."""
        self._expected = None
        core.PagedKVCache.reset(self)
        for layer in self._other_layers():
            layer.reset()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(block_size={self.block_size}, num_layers={len(self.layers)})"

    # ---- within ---------------------------------------------------------------------------------------------------

    def _add_layer(self, layer: int, key: Tensor, value: Tensor) -> None:
        core.PagedKVCache._add_layer(self, layer, key, value)
        shared: int | None = getattr(self._text_config, "num_kv_shared_layers", None)
        if self._spread and self._direct and shared:
            # A later layer would be given a copy of the keys on its own device, and the copy has no handle.
            raise ValueError(
                f"key must be on {self.pool.device} like those of the other layers, as layers share keys and values, "
                f'got {key.device}: use PagedKVCache(config, mode="gather")'
            )

    def _blank(self) -> PagedKVCache:
        size = self._size if self._pool is None else {}
        blank = PagedKVCache(
            self._config,
            block_size=self.block_size,
            dtype=self.dtype,
            scales=self.scales,
            pool=self._pool,
            mode=self._mode,
            prefix_cache=self.prefix_cache,
            share_prefix_reads=self.share_prefix_reads,
            **size,
        )
        for index, layer in enumerate(self.layers):
            if not isinstance(layer, PagedLayer):
                blank.layers[index] = copy.deepcopy(layer)
            elif index >= len(blank.layers):
                blank.layers.append(PagedLayer(blank, layer.index, layer.window))
        return blank

    def _new_pool(self, key: Tensor, shape: LayerShape) -> KVPool:
        pool = core.PagedKVCache._new_pool(self, key, shape)
        if self.prefix_cache is not None:
            self.prefix_cache.bind(self, pool)
        return pool

    def _layers_of(self, config: Any) -> list[Any]:
        """The layers Transformers would make for a ``DynamicCache``, with the attention ones replaced by paged ones."""
        layers: list[Any] = []
        paged = 0
        for layer in DynamicCache(config=config).layers:
            if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
                layer = PagedLayer(self, paged, getattr(layer, "sliding_window", None))
                paged += 1
            layers.append(layer)
        return layers

    def _take_config(self, config: Any) -> None:
        """Learn from the config what can be known: kinds of layers, unless some exist, and the path to take."""
        if config is None or self._config is not None:
            return
        if not self.layers:
            layers = self._layers_of(config)
            self.layers.extend(layers)
            if layers:
                self._set_windows([layer.window for layer in layers if isinstance(layer, PagedLayer)])
        self._config, self._text_config = config, config.get_text_config(decoder=True)
        self._is_gathered = bool(GATHERED_MODELS & {config.model_type, self._text_config.model_type})
        self._choose_path()

    def _choose_path(self) -> None:
        if self._mode == "auto" and self._config is not None and not torch.compiler.is_compiling():
            direct = not (self._is_gathered or seams.needs_gather(self._text_config._attn_implementation))
            if direct != self._direct:  # a module's attributes are slow to set
                self._direct = direct

    def _other_layers(self) -> Iterable[Any]:
        return (layer for layer in self.layers if not isinstance(layer, PagedLayer))

    def _check_pending(self, layer: PagedLayer) -> None:
        """Whether the last layer that wrote has attended. One left over from a forward that failed is forgotten."""
        progress = self._progress
        pending: Handle = progress.pending
        progress.pending = None
        if layer.index == 0 and pending.layer.index != len(self._places) - 1:
            return
        if self._mode == "auto" and self._config is None and self.seen == pending.step.length:
            # A model that never asked for a mask, in its first step: the new keys and values were all there are, so its
            # own attention was right until here, and from here on it is given gathered ones.
            self._direct = False
            return
        raise RuntimeError(
            f"layer {pending.layer.index} must attend to what it wrote through Transformers' attention interface, and "
            'did not: this model needs PagedKVCache(config, mode="gather")'
        )


seams.install()
generation.tell_lengths()
