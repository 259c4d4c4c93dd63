"""The Gemma 3n text decoder: attention, MLP, LAuReL, AltUp and per-layer inputs, in the order data meets them.

Follows transformers' `Gemma3nTextModel`. Three things differ from the other MLX ports:

- The last `num_kv_shared_layers` layers have no keys and values of their own. They attend to those of the last unshared
  layer of their type, with a cache and without one, in training too; the pair travels as an explicit argument and
  result of each layer.
- Attention is computed in blocks of queries. A block of a sliding-window layer meets its own keys and those of the
  window before it, so the scores of `T` tokens take `T * (window + block)` numbers instead of `T * T`.
- A layer is made of the part before attention, attention, and the part after it. Only attention mixes tokens, so a
  training step can put the two others through a layer a few tokens at a time (`train/passes.py`).
"""

import math
from statistics import NormalDist
from typing import Optional

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache

from mlx_gemma3n.config import FULL, SLIDING, TextConfig

KeysValues = tuple[mx.array, mx.array]


class SlidingKVCache:
    """Keys and values of the last `window - 1` tokens, in order of time.

    A query sees itself and the `window - 1` tokens before it, so nothing older is ever needed again.
    """

    def __init__(self, window: int):
        self.window = window
        self.keys: Optional[mx.array] = None
        self.values: Optional[mx.array] = None
        self.offset = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> KeysValues:
        """Appends `[batch, heads, tokens, head_dim]` and returns what the new tokens may attend to."""
        if self.keys is not None:
            keys = mx.concatenate([self.keys, keys], axis=2)
            values = mx.concatenate([self.values, values], axis=2)
        self.offset += keys.shape[2] - (0 if self.keys is None else self.keys.shape[2])
        keep = min(self.window - 1, keys.shape[2])
        # A slice of length 0 would be the whole array with a negative index.
        self.keys = keys[:, :, keys.shape[2] - keep :]
        self.values = values[:, :, values.shape[2] - keep :]
        return keys, values

    @property
    def state(self) -> tuple[Optional[mx.array], Optional[mx.array]]:
        return self.keys, self.values


# Queries that meet their keys at once. In float32, eight heads and 2 048 keys, one block's scores are 17 MB.
QUERY_BLOCK = 256


def query_blocks(tokens: int, keys: int, window: Optional[int]) -> list[tuple[slice, slice]]:
    """Which keys each block of queries can see.

    Args:
        tokens: number of queries, the last of all tokens so far.
        keys: number of keys, also the last ones.
        window: a query sees itself and the `window - 1` tokens before it; None for all before it.

    Returns:
        For each block, its queries and its keys, as slices of the token axes.
    """
    before = keys - tokens
    blocks = []
    for start in range(0, tokens, QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, tokens)
        first = 0 if window is None else max(0, before + start - (window - 1))
        blocks.append((slice(start, end), slice(first, before + end)))
    return blocks


def attend_block(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    gap: int,
    window: Optional[int] = None,
    real: Optional[mx.array] = None,
) -> mx.array:
    """Attention of one block of queries.

    Args:
        queries: `[batch, heads, queries, head_dim]`.
        keys, values: `[batch, kv_heads, keys, head_dim]`.
        gap: how far the first query stands after the first key.
        window: as in `query_blocks`.
        real: `[batch, keys]`, 0 on padding; None where every key is real.

    Returns:
        `[batch, heads, queries, head_dim]`.
    """
    mask = None
    if queries.shape[2] > 1 or real is not None:
        query, key = mx.arange(gap, gap + queries.shape[2])[:, None], mx.arange(keys.shape[2])[None]
        mask = key <= query
        if window is not None:
            mask = mask & (key > query - window)
        mask = mask[None, None]
        if real is not None:
            # A padded query keeps itself: a row without any key would be NaN on Metal and poison the gradients.
            mask = mask & (real[:, None, None].astype(mx.bool_) | (key == query)[None, None])
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=1.0, mask=mask)


def attend(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    window: Optional[int] = None,
    attention_mask: Optional[mx.array] = None,
) -> mx.array:
    """Causal attention, block by block; the queries are the last of all tokens.

    Args:
        queries, keys, values, window: as in `attend_block`, of all tokens.
        attention_mask: `[batch, at least keys]`, 1 on real tokens; its last columns are the keys'.
    """
    count = keys.shape[2]
    real = None if attention_mask is None else attention_mask[:, attention_mask.shape[1] - count :]
    blocks = []
    for q, k in query_blocks(queries.shape[2], count, window):
        gap = count - queries.shape[2] + q.start - k.start
        mine = None if real is None else real[:, k]
        blocks.append(attend_block(queries[:, :, q], keys[:, :, k], values[:, :, k], gap, window, mine))
    return blocks[0] if len(blocks) == 1 else mx.concatenate(blocks, axis=2)


class Attention(nn.Module):
    """The projections of grouped-query attention (transformers' `Gemma3nTextAttention`).

    The scale is 1: `q_norm` and `k_norm` do the scaling. `v_norm` has no weight.
    """

    def __init__(self, config: TextConfig, layer_idx: int):
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        self.eps = config.rms_norm_eps
        full = config.layer_types[layer_idx] == FULL
        self.rope_base = config.rope_theta if full else config.rope_local_base_freq
        self.is_kv_shared = config.is_kv_shared(layer_idx)

        self.q_proj = nn.Linear(config.hidden_size, self.num_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, config.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=self.eps)
        if not self.is_kv_shared:
            self.k_proj = nn.Linear(config.hidden_size, self.num_kv_heads * self.head_dim, bias=False)
            self.v_proj = nn.Linear(config.hidden_size, self.num_kv_heads * self.head_dim, bias=False)
            self.k_norm = nn.RMSNorm(self.head_dim, eps=self.eps)

    def _heads(self, x: mx.array, count: int) -> mx.array:
        return x.reshape(*x.shape[:2], count, self.head_dim)

    def _rope(self, x: mx.array, offset: int) -> mx.array:
        return mx.fast.rope(x, self.head_dim, traditional=False, base=self.rope_base, scale=1.0, offset=offset)

    def __call__(self, x: mx.array, offset: int) -> tuple[mx.array, ...]:
        """
        Args:
            x: `[batch, tokens, hidden]`.
            offset: position of the first token of `x`.

        Returns:
            Queries `[batch, heads, tokens, head_dim]`, and unless the layer shares another one's, keys and values
            `[batch, kv_heads, tokens, head_dim]`.
        """
        queries = self.q_norm(self._heads(self.q_proj(x), self.num_heads)).transpose(0, 2, 1, 3)
        queries = self._rope(queries, offset)
        if self.is_kv_shared:
            return (queries,)
        keys = self.k_norm(self._heads(self.k_proj(x), self.num_kv_heads)).transpose(0, 2, 1, 3)
        values = mx.fast.rms_norm(self._heads(self.v_proj(x), self.num_kv_heads), None, self.eps)
        return queries, self._rope(keys, offset), values.transpose(0, 2, 1, 3)


def gaussian_topk(x: mx.array, sparsity: float) -> mx.array:
    """Keeps what exceeds the `sparsity` quantile of a normal distribution with the mean and standard deviation of the
    last axis, and subtracts that cutoff (Spark Transformer; transformers' `_gaussian_topk`)."""
    cutoff = mx.mean(x, axis=-1, keepdims=True) + NormalDist().inv_cdf(sparsity) * mx.std(x, axis=-1, keepdims=True)
    return nn.relu(x - cutoff)


def geglu(gate: mx.array, up: mx.array) -> mx.array:
    """`gelu(gate) * up`, GELU in its tanh form."""
    return nn.gelu_approx(gate) * up


class MLP(nn.Module):
    """Gated MLP; sparse in the layers that `activation_sparsity_pattern` names (transformers' `Gemma3nTextMLP`)."""

    def __init__(self, config: TextConfig, layer_idx: int):
        super().__init__()
        width = config.intermediate_size[layer_idx]
        self.sparsity = config.activation_sparsity_pattern[layer_idx]
        self.gate_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.down_proj = nn.Linear(width, config.hidden_size, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        gate = self.gate_proj(x)
        if self.sparsity > 0:
            gate = gaussian_topk(gate, self.sparsity)
        return self.down_proj(geglu(gate, self.up_proj(x)))


class Laurel(nn.Module):
    """Learned augmented residual, low-rank form (LAuReL; transformers' `Gemma3nTextLaurelBlock`)."""

    def __init__(self, config: TextConfig):
        super().__init__()
        self.linear_left = nn.Linear(config.hidden_size, config.laurel_rank, bias=False)
        self.linear_right = nn.Linear(config.laurel_rank, config.hidden_size, bias=False)
        self.post_laurel_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def __call__(self, x: mx.array) -> mx.array:
        return x + self.post_laurel_norm(self.linear_right(self.linear_left(x)))


class AltUp(nn.Module):
    """Alternating Updates: predict all streams, compute one, correct all (arXiv:2301.13310; `Gemma3nTextAltUp`)."""

    def __init__(self, config: TextConfig):
        super().__init__()
        inputs = config.altup_num_inputs
        self.active, self.num_inputs, self.clip = config.altup_active_idx, inputs, config.altup_coef_clip
        self.router_scale = 1.0 / config.hidden_size
        self.correct_output_scale = mx.zeros((config.hidden_size,))
        self.correction_coefs = nn.Linear(inputs, inputs, bias=False)
        self.prediction_coefs = nn.Linear(inputs, inputs**2, bias=False)
        self.modality_router = nn.Linear(config.hidden_size, inputs, bias=False)
        self.router_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def _coefs(self, linear: nn.Module, modalities: mx.array) -> mx.array:
        # While training transformers clips these weights. The clipped copy is used here and never written back.
        if self.training and self.clip is not None and type(linear) is nn.Linear:
            return modalities @ mx.clip(linear.weight, -self.clip, self.clip).T
        return linear(modalities)

    def _modalities(self, x: mx.array) -> mx.array:
        routed = self.modality_router(self.router_norm(x) * self.router_scale)
        return mx.tanh(routed.astype(mx.float32)).astype(x.dtype)

    def predict(self, streams: mx.array) -> mx.array:
        """`[inputs, batch, tokens, hidden]` -> the same shape: each stream plus a mix of all."""
        coefs = self._coefs(self.prediction_coefs, self._modalities(streams[self.active]))
        coefs = coefs.reshape(*coefs.shape[:-1], self.num_inputs, self.num_inputs)
        mixed = coefs @ streams.transpose(1, 2, 0, 3)
        return streams + mixed.transpose(2, 0, 1, 3)

    def correct(self, predictions: mx.array, activated: mx.array) -> mx.array:
        """Moves all predictions `[inputs, batch, tokens, hidden]` by what the computed stream `activated`
        `[batch, tokens, hidden]` differs from its own prediction."""
        coefs = self._coefs(self.correction_coefs, self._modalities(activated)) + 1.0
        innovation = activated - predictions[self.active]
        return predictions + innovation * coefs.transpose(2, 0, 1)[..., None]


class DecoderLayer(nn.Module):
    """One layer, a function of its inputs (transformers' `Gemma3nTextDecoderLayer`)."""

    def __init__(self, config: TextConfig, layer_idx: int):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.active, self.correct_scale = config.altup_active_idx, config.altup_correct_scale
        self.window = config.sliding_window if config.layer_types[layer_idx] == SLIDING else None
        self.self_attn = Attention(config, layer_idx)
        self.mlp = MLP(config, layer_idx)
        self.laurel = Laurel(config)
        self.altup = AltUp(config)
        self.input_layernorm = nn.RMSNorm(size, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(size, eps=eps)
        self.pre_feedforward_layernorm = nn.RMSNorm(size, eps=eps)
        self.post_feedforward_layernorm = nn.RMSNorm(size, eps=eps)
        self.per_layer_input_gate = nn.Linear(size, config.hidden_size_per_layer_input, bias=False)
        self.per_layer_projection = nn.Linear(config.hidden_size_per_layer_input, size, bias=False)
        self.post_per_layer_input_norm = nn.RMSNorm(size, eps=eps)

    def before_attention(self, predictions: mx.array, offset: int = 0) -> tuple[mx.array, ...]:
        """AltUp's predictions `[altup_inputs, batch, tokens, hidden]` to queries, and keys and values of its own; see
        `Attention`."""
        return self.self_attn(self.input_layernorm(predictions[self.active]), offset)

    def after_attention(self, predictions: mx.array, attended: mx.array, per_layer_input: mx.array) -> mx.array:
        """Everything else. Each token goes its own way here, so any tokens may go through together.

        Args:
            predictions: of AltUp, `[altup_inputs, batch, tokens, hidden]`.
            attended: `[batch, tokens, heads * head_dim]`.
            per_layer_input: `[batch, tokens, hidden_size_per_layer_input]`.

        Returns:
            The streams after this layer, `[altup_inputs, batch, tokens, hidden]`.
        """
        x = predictions[self.active]
        laurel = self.laurel(self.input_layernorm(x))
        x = x + self.post_attention_layernorm(self.self_attn.o_proj(attended))
        x = (x + laurel) / math.sqrt(2)
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        corrected = self.altup.correct(predictions, x)

        x = corrected[self.active]
        if self.correct_scale:
            x = x * self.altup.correct_output_scale
        x = geglu(self.per_layer_input_gate(x), per_layer_input)
        x = self.post_per_layer_input_norm(self.per_layer_projection(x))
        # The first stream is left alone, whichever is active.
        return mx.concatenate([corrected[:1], corrected[1:] + x])

    def __call__(
        self,
        streams: mx.array,
        per_layer_input: mx.array,
        attention_mask: Optional[mx.array] = None,
        offset: int = 0,
        shared_kv: Optional[KeysValues] = None,
        cache=None,
    ) -> tuple[mx.array, KeysValues]:
        """
        Args:
            streams: `[altup_inputs, batch, tokens, hidden]`.
            per_layer_input: `[batch, tokens, hidden_size_per_layer_input]`.
            attention_mask: `[batch, offset + tokens]`, 1 on real tokens.
            offset: position of the first token.
            shared_kv: the donor's keys and values `[batch, kv_heads, keys, head_dim]`; only for a shared layer.

        Returns:
            The streams after this layer, and the keys and values it attended to.
        """
        predictions = self.altup.predict(streams)
        queries, *kv = self.before_attention(predictions, offset)
        kv = shared_kv or (cache.update_and_fetch(*kv) if cache is not None else tuple(kv))
        attended = merge_heads(attend(queries, *kv, self.window, attention_mask))
        return self.after_attention(predictions, attended, per_layer_input), kv


def merge_heads(x: mx.array) -> mx.array:
    """`[batch, heads, tokens, head_dim]` -> `[batch, tokens, heads * head_dim]`."""
    return x.transpose(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], -1)


def match_magnitude(x: mx.array, target: mx.array) -> mx.array:
    """Scales each vector of `x` to the root mean square `target` (`[..., 1]`)."""
    magnitude = mx.sqrt(mx.maximum(mx.mean(x * x, axis=-1, keepdims=True), 1e-5))
    return x * target / magnitude


def root_mean_square(x: mx.array) -> mx.array:
    return mx.sqrt(mx.mean(x * x, axis=-1, keepdims=True))


class TextModel(nn.Module):
    """Embeddings in, final hidden states out (transformers' `Gemma3nTextModel`)."""

    def __init__(self, config: TextConfig):
        super().__init__()
        self.config = config
        size, per_layer, layers = config.hidden_size, config.hidden_size_per_layer_input, config.num_hidden_layers
        self.embed_tokens = nn.Embedding(config.vocab_size, size)
        self.embed_tokens_per_layer = nn.Embedding(config.vocab_size_per_layer_input, layers * per_layer)
        self.per_layer_model_projection = nn.Linear(size, layers * per_layer, bias=False)
        self.per_layer_projection_norm = nn.RMSNorm(per_layer, eps=config.rms_norm_eps)
        others = range(1, config.altup_num_inputs)
        self.altup_projections = [nn.Linear(size, size, bias=False) for _ in others]
        self.altup_unembed_projections = [nn.Linear(size, size, bias=False) for _ in others]
        self.layers = [DecoderLayer(config, i) for i in range(layers)]
        self.norm = nn.RMSNorm(size, eps=config.rms_norm_eps)

    def embed(self, input_ids: mx.array) -> mx.array:
        """`[batch, tokens]` -> `[batch, tokens, hidden]`, scaled by sqrt(hidden)."""
        return self.embed_tokens(input_ids) * self.config.hidden_size**0.5

    def per_layer_inputs(self, input_ids: mx.array, inputs_embeds: mx.array) -> mx.array:
        """Each layer's own embedding of the tokens plus a projection of the merged embedding.

        Ids outside the table count as id 0.

        Returns:
            `[batch, tokens, layers, hidden_size_per_layer_input]`.
        """
        config = self.config
        shape = (*input_ids.shape, config.num_hidden_layers, config.hidden_size_per_layer_input)
        inside = (input_ids >= 0) & (input_ids < config.vocab_size_per_layer_input)
        rows = self.embed_tokens_per_layer(mx.where(inside, input_ids, 0)) * config.hidden_size_per_layer_input**0.5
        projected = self.per_layer_model_projection(inputs_embeds) * config.hidden_size**-0.5
        projected = self.per_layer_projection_norm(projected.reshape(shape))
        return (projected + rows.reshape(shape)) * 2.0**-0.5

    def make_cache(self) -> list:
        """One entry for each layer that has keys and values of its own."""
        config = self.config
        return [
            SlidingKVCache(config.sliding_window) if config.layer_types[i] == SLIDING else KVCache()
            for i in range(config.first_kv_shared_layer)
        ]

    def streams(self, inputs_embeds: mx.array) -> mx.array:
        """`[batch, tokens, hidden]` -> AltUp's streams before the first layer, `[altup_inputs, batch, tokens, hidden]`:
        the embedding, and its projections at the same magnitude."""
        target = root_mean_square(inputs_embeds)
        others = [match_magnitude(project(inputs_embeds), target) for project in self.altup_projections]
        return mx.stack([inputs_embeds, *others])

    def merge(self, streams: mx.array) -> mx.array:
        """The streams after the last layer -> `[batch, tokens, hidden]`: their mean at the first one's magnitude, after
        the final norm."""
        target, hidden = root_mean_square(streams[0]), streams[0]
        for project, stream in zip(self.altup_unembed_projections, streams[1:]):
            hidden = hidden + match_magnitude(project(stream), target)
        return self.norm(hidden / self.config.altup_num_inputs)

    def __call__(
        self,
        input_ids: mx.array,
        inputs_embeds: mx.array,
        attention_mask: Optional[mx.array] = None,
        cache: Optional[list] = None,
    ) -> mx.array:
        """
        Args:
            input_ids: `[batch, tokens]`, for the per-layer embeddings.
            inputs_embeds: `[batch, tokens, hidden]`, text scaled, soft tokens merged in.
            attention_mask: `[batch, cached + tokens]`, 1 on real tokens.
            cache: of `make_cache()`, filled in place.

        Returns:
            `[batch, tokens, hidden]`, after the final norm.
        """
        config = self.config
        per_layer_inputs = self.per_layer_inputs(input_ids, inputs_embeds)
        offset, tokens = cache[0].offset if cache else 0, input_ids.shape[1]
        if attention_mask is not None and attention_mask.shape[1] != offset + tokens:
            raise ValueError(f"attention_mask covers {attention_mask.shape[1]} tokens; {offset} cached + {tokens} new")
        streams = self.streams(inputs_embeds)
        kv: dict[int, KeysValues] = {}
        for i, layer in enumerate(self.layers):
            shared_kv = kv[config.kv_donor(i)] if config.is_kv_shared(i) else None
            entry = cache[i] if cache and not config.is_kv_shared(i) else None
            streams, kv[i] = layer(streams, per_layer_inputs[:, :, i], attention_mask, offset, shared_kv, entry)
        return self.merge(streams)
