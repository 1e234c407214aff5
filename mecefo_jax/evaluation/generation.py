"""Greedy generation with a cache of keys and values, so that each new token costs one pass over one position.

A row's tokens lie in the slots of its cache by position. Prompts are padded on the right; the slots of the padding hold
rubbish that is never read: a query sees the slots up to its own position, and those are overwritten before it comes
there. Tokens are made in chunks on the device, and between chunks the host looks which rows are done.

Legend: B rows of a batch, P padded length of prompts, S slots, C tokens of a chunk, L layers, D hidden size, N query
heads, K key/value heads, H head size.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mecefo_jax.evaluation.buckets import Batch, batches, padded_rows
from mecefo_jax.layers import Rotary, causal_attention, rotary, rotate
from mecefo_jax.model import Block, Model, compute_dtype, feed_forward_branch
from mecefo_jax.trained import TrainedModel

_CHUNK = 16
"""Tokens between two looks at which rows are done: at most so many are made in vain for a row."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys, already rotated, and values of the positions so far."""

    k_LBSKH: Float[Array, "L B S K H"]
    v_LBSKH: Float[Array, "L B S K H"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Progress:
    """Where the rows of a batch are."""

    cache: Cache
    token_B: Int[Array, "B"]
    """The next token, which is not in the cache yet."""
    position_B: Int[Array, "B"]
    """Its position."""


class Generator:
    """A model's greedy continuations, computed in batches: two programs for each padded length and number of tokens."""

    def __init__(self, model: TrainedModel, *, batch_size: int, max_length: int):
        """Set up; compiles nothing.

        Args:
            model: whose continuations.
            batch_size: rows computed together.
            max_length: most tokens of a prompt and what is generated after it.
        """
        self._model, self._batch_size, self._max_length = model, batch_size, max_length
        self.compilations = 0
        """Programs compiled so far."""
        dtype = compute_dtype(model.config.model)

        def start(params: Model, tokens_BP: Array, length_B: Array, num_slots: int) -> Progress:
            self.compilations += 1  # runs when it is traced
            return prefill(params, tokens_BP, length_B, num_slots, dtype)

        def go_on(params: Model, progress: Progress) -> tuple[Progress, Array]:
            self.compilations += 1
            return decode(params, progress, _CHUNK, dtype)

        self._start = jax.jit(start, static_argnames="num_slots")
        self._go_on = jax.jit(go_on, donate_argnames="progress")

    def __call__(
        self, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, is_done: Callable[[Sequence[int]], bool]
    ) -> list[list[int]]:
        """The likeliest token after each prompt, the likeliest after that one, and so on.

        Args:
            prompts: token ids, at least one each; with ``max_new_tokens`` more no longer than ``max_length``.
            max_new_tokens: where a row ends at the latest.
            is_done: whether a row may end earlier, given what was generated after its prompt; asked now and then.

        Returns:
            What was generated after each prompt, in their order: up to where the row was seen to be done, or to EOS,
            which is left out.
        """
        generated: dict[int, list[int]] = {}
        longest = self._max_length - max_new_tokens
        for batch in batches([len(prompt) for prompt in prompts], batch_size=self._batch_size, longest=longest):
            rows = self._generate(batch, [prompts[row] for row in batch.rows], max_new_tokens, is_done)
            generated.update(zip(batch.rows, rows, strict=True))
        return [generated[row] for row in range(len(prompts))]

    def _generate(
        self,
        batch: Batch,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        is_done: Callable[[Sequence[int]], bool],
    ) -> list[list[int]]:
        params, eos = self._model.params, self._model.tokenizer.eos_id
        prompts = [*prompts, *[[0]] * (self._batch_size - len(prompts))]
        tokens_BP = padded_rows(prompts, self._batch_size, batch.length, fill=0)
        length_B = jnp.asarray([len(prompt) for prompt in prompts], jnp.int32)
        num_chunks = -(-max_new_tokens // _CHUNK)
        progress = self._start(params, tokens_BP, length_B, num_slots=batch.length + num_chunks * _CHUNK)
        rows: list[list[int]] = [[] for _ in batch.rows]
        done = [False] * len(rows)
        for _ in range(num_chunks):
            progress, tokens_BC = self._go_on(params, progress)
            for number, tokens in enumerate(jax.device_get(tokens_BC)[: len(rows)].tolist()):
                if not done[number]:
                    row = (rows[number] + tokens)[:max_new_tokens]
                    rows[number] = row[: row.index(eos)] if eos in row else row
                    done[number] = eos in row or is_done(rows[number])
            if all(done):
                break
        return rows


def prefill(
    params: Model, tokens_BP: Int[Array, "B P"], length_B: Int[Array, "B"], num_slots: int, dtype: jnp.dtype
) -> Progress:
    """The cache of prompts, and the likeliest token after each.

    Args:
        params: the model.
        tokens_BP: token ids, rows padded on the right with any id.
        length_B: tokens of each row, at least one.
        num_slots: positions that the cache has room for, at least P.
        dtype: of activations, matrix products and the cache.
    """
    num_tokens = tokens_BP.shape[1]
    positions = rotary(num_tokens, params.config.head_size, params.config.rope_base)
    room = ((0, 0), (0, num_slots - num_tokens), (0, 0), (0, 0))

    def layer(x_BPD, block):
        q_BPNH, k_BPKH, v_BPKH = _heads(block, x_BPD)
        k_BPKH = rotate(k_BPKH, positions)
        y_BPNH = causal_attention(rotate(q_BPNH, positions), k_BPKH, v_BPKH)
        return _rest_of_block(block, x_BPD, y_BPNH), Cache(jnp.pad(k_BPKH, room), jnp.pad(v_BPKH, room))

    x_BPD, cache = jax.lax.scan(layer, params.embedding[...][tokens_BP].astype(dtype), params.blocks)
    last_B1D = jnp.take_along_axis(x_BPD, (length_B - 1)[:, None, None], axis=1)
    return Progress(cache, _likeliest(params, last_B1D), length_B)


def decode(params: Model, progress: Progress, num_tokens: int, dtype: jnp.dtype) -> tuple[Progress, Int[Array, "B C"]]:
    """Go on by some tokens.

    Args:
        params: the model.
        progress: where the rows are; their caches have room for so many more.
        num_tokens: of the chunk.
        dtype: that of the cache.

    Returns:
        Where the rows are then, and the tokens passed on the way, of which ``progress.token_B`` is the first.
    """
    num_slots = progress.cache.k_LBSKH.shape[2]
    table = rotary(num_slots, params.config.head_size, params.config.rope_base)

    def step(progress, _):
        position_B = progress.position_B
        positions = Rotary(table.cos_TH[position_B], table.sin_TH[position_B])
        seen_B11S = (jnp.arange(num_slots, dtype=jnp.int32)[None] <= position_B[:, None])[:, None, None]

        def layer(x_B1D, block_and_cache):
            block, cache = block_and_cache
            q_B1NH, k_B1KH, v_B1KH = _heads(block, x_B1D)
            cache = Cache(
                _put(cache.k_LBSKH, position_B, _rotate_rows(k_B1KH, positions)),
                _put(cache.v_LBSKH, position_B, v_B1KH),
            )
            y_B1NH = jax.nn.dot_product_attention(
                _rotate_rows(q_B1NH, positions), cache.k_LBSKH, cache.v_LBSKH, mask=seen_B11S, implementation="xla"
            )
            return _rest_of_block(block, x_B1D, y_B1NH), cache

        x_B1D = params.embedding[...][progress.token_B][:, None].astype(dtype)
        x_B1D, cache = jax.lax.scan(layer, x_B1D, (params.blocks, progress.cache))
        return Progress(cache, _likeliest(params, x_B1D), position_B + 1), progress.token_B

    progress, tokens_CB = jax.lax.scan(step, progress, length=num_tokens)
    return progress, tokens_CB.T


def _heads(block: Block, x_BTD: Array) -> tuple[Array, Array, Array]:
    """Queries, keys and values, not rotated yet."""
    attention, h_BTD = block.attention, block.norm1(x_BTD)
    split = lambda y: y.reshape(*y.shape[:2], -1, attention.head_size)  # noqa: E731
    return split(attention.query(h_BTD)), split(attention.key(h_BTD)), split(attention.value(h_BTD))


def _rest_of_block(block: Block, x_BTD: Array, y_BTNH: Array) -> Array:
    m_BTD = x_BTD + block.attention.out(y_BTNH.reshape(*y_BTNH.shape[:2], -1))
    return m_BTD + feed_forward_branch(block, m_BTD)


def _rotate_rows(x_B1NH: Array, positions: Rotary) -> Array:
    """Each row by the angles of its own position: the rows take the place of time."""
    return rotate(x_B1NH.swapaxes(0, 1), positions).swapaxes(0, 1)


def _put(cache_BSKH: Array, position_B: Array, new_B1KH: Array) -> Array:
    rows_B = jnp.arange(len(position_B), dtype=jnp.int32)
    return cache_BSKH.at[rows_B, position_B].set(new_B1KH[:, 0])


def _likeliest(params: Model, x_B1D: Array) -> Array:
    return jnp.argmax(params.logits(x_B1D)[:, 0], axis=-1).astype(jnp.int32)
