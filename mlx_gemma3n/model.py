"""Gemma 3n, text and audio: token ids and clips in, logits out (transformers' `Gemma3nForConditionalGeneration`).

The vision tower is not here. Its token ids are: they have embeddings of their own, which text logits depend on.
"""

from typing import Optional

import mlx.core as mx
import mlx.nn as nn

from mlx_gemma3n.audio import AudioEncoder
from mlx_gemma3n.config import AudioConfig, Config, VisionConfig
from mlx_gemma3n.text import TextModel


class MultimodalEmbedder(nn.Module):
    """Soft tokens, or ids of a modality's own vocabulary, to the language model's width
    (`Gemma3nMultimodalEmbedder`)."""

    def __init__(self, config: AudioConfig | VisionConfig, text_hidden_size: int):
        super().__init__()
        self.vocab_offset, self.vocab_size, self.eps = config.vocab_offset, config.vocab_size, config.rms_norm_eps
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.hard_embedding_norm = nn.RMSNorm(config.hidden_size, eps=self.eps)
        self.soft_embedding_norm = nn.RMSNorm(config.hidden_size, eps=self.eps)
        self.embedding_projection = nn.Linear(config.hidden_size, text_hidden_size, bias=False)

    def _project(self, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(self.embedding_projection(x), None, self.eps)

    def ids(self, input_ids: mx.array) -> mx.array:
        """Ids in `[vocab_offset, vocab_offset + vocab_size)`, any shape -> `[..., text_hidden]`."""
        return self._project(self.hard_embedding_norm(self.embedding(input_ids - self.vocab_offset)))

    def soft(self, encodings: mx.array) -> mx.array:
        """Encoder outputs `[..., hidden]` -> `[..., text_hidden]`."""
        return self._project(self.soft_embedding_norm(encodings))

    def replace(self, inputs_embeds: mx.array, input_ids: mx.array, end: Optional[int]) -> mx.array:
        """`inputs_embeds` with this modality's rows where an id lies in `[vocab_offset, end)`."""
        mine = input_ids >= self.vocab_offset
        if end is not None:
            mine = mine & (input_ids < end)
        rows = self.ids(mx.where(mine, input_ids, self.vocab_offset))
        return mx.where(mine[..., None], rows.astype(inputs_embeds.dtype), inputs_embeds)


class Gemma3n(nn.Module):
    """A Gemma 3n model of text and audio."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        text_size = config.text_config.hidden_size
        self.language_model = TextModel(config.text_config)
        if config.vision_config is not None:
            self.embed_vision = MultimodalEmbedder(config.vision_config, text_size)
        if config.audio_config is not None:
            self.audio_tower = AudioEncoder(config.audio_config)
            self.embed_audio = MultimodalEmbedder(config.audio_config, text_size)

    @property
    def layers(self) -> list:
        """The decoder layers, where mlx-lm's tools look for them."""
        return self.language_model.layers

    def make_cache(self) -> list:
        return self.language_model.make_cache()

    def encode_audio(self, input_features: mx.array, input_features_mask: mx.array) -> mx.array:
        """Clips to soft tokens, filled up with the embedding of the last id of the audio vocabulary.

        Args:
            input_features: log-mel `[clips, frames, mel_bins]`.
            input_features_mask: `[clips, frames]`, True on valid frames.

        Returns:
            `[clips, audio_soft_tokens_per_image, text_hidden]`.

        Raises:
            ValueError: the model has no audio tower, or the clips are longer than the placeholders can hold.
        """
        if "audio_tower" not in self:
            raise ValueError("this checkpoint has no audio tower (converted with --text-only?)")
        encodings, padding = self.audio_tower(input_features, ~input_features_mask.astype(mx.bool_))
        if encodings.shape[1] > self.config.audio_soft_tokens_per_image:
            raise ValueError(
                f"{input_features.shape[1]} frames make {encodings.shape[1]} soft tokens; "
                f"a clip has {self.config.audio_soft_tokens_per_image}"
            )
        return self.soft_tokens(encodings, padding)

    def soft_tokens(self, encodings: mx.array, padding: mx.array) -> mx.array:
        """The audio tower's output as soft tokens: projected, and filled up.

        Args:
            encodings: `[clips, frames, audio_hidden]`.
            padding: bool `[clips, frames]`, True on padding.

        Returns:
            `[clips, audio_soft_tokens_per_image, text_hidden]`.
        """
        soft = self.embed_audio.soft(encodings)
        last = mx.array([[self.embed_audio.vocab_offset + self.embed_audio.vocab_size - 1]])
        filler = self.embed_audio.ids(last).astype(soft.dtype)
        soft = mx.where(padding[..., None], filler, soft)
        clips, length, size = soft.shape
        missing = self.config.audio_soft_tokens_per_image - length
        return mx.concatenate([soft, mx.broadcast_to(filler, (clips, missing, size))], axis=1)

    def embed(self, input_ids: mx.array, audio_embeds: Optional[mx.array] = None) -> mx.array:
        """Token embeddings with the clips' soft tokens in place of their placeholders, in order.

        Args:
            input_ids: `[batch, tokens]`.
            audio_embeds: of `encode_audio`, `[clips, audio_soft_tokens_per_image, hidden]`.

        Returns:
            `[batch, tokens, hidden]`.

        Raises:
            ValueError: the placeholders and the soft tokens differ in number.
        """
        embeds = self.language_model.embed(input_ids)
        audio = self.embed_audio if "embed_audio" in self else None
        if "embed_vision" in self:
            embeds = self.embed_vision.replace(embeds, input_ids, audio.vocab_offset if audio else None)
        if audio is not None:
            embeds = audio.replace(embeds, input_ids, None)
        if audio_embeds is None:
            return embeds
        placeholder = input_ids == self.config.audio_token_id
        soft = audio_embeds.reshape(-1, audio_embeds.shape[-1]).astype(embeds.dtype)
        if (found := placeholder.sum().item()) != soft.shape[0]:
            raise ValueError(f"{found} audio placeholders in the text for {soft.shape[0]} soft tokens")
        order = mx.cumsum(placeholder.reshape(-1).astype(mx.int32)).reshape(placeholder.shape) - 1
        return mx.where(placeholder[..., None], soft[mx.maximum(order, 0)], embeds)

    def hidden_states(
        self,
        input_ids: mx.array,
        input_features: Optional[mx.array] = None,
        input_features_mask: Optional[mx.array] = None,
        attention_mask: Optional[mx.array] = None,
        cache: Optional[list] = None,
        audio_embeds: Optional[mx.array] = None,
    ) -> mx.array:
        """
        Args:
            input_ids: `[batch, tokens]`.
            input_features: log-mel `[clips, frames, mel_bins]` of all clips, in the order of their placeholders.
            input_features_mask: `[clips, frames]`, True on valid frames.
            attention_mask: `[batch, cached + tokens]`, 1 on real tokens, padding on the right.
            cache: of `make_cache()`; filled in place.
            audio_embeds: clips already encoded by `encode_audio`, instead of `input_features`.

        Returns:
            `[batch, tokens, hidden]`, after the final norm.
        """
        if input_features is not None:
            if input_features_mask is None:
                input_features_mask = mx.ones(input_features.shape[:2], dtype=mx.bool_)
            audio_embeds = self.encode_audio(input_features, input_features_mask)
        embeds = self.embed(input_ids, audio_embeds)
        return self.language_model(input_ids, embeds, attention_mask, cache)

    def logits(self, hidden: mx.array) -> mx.array:
        """`[..., hidden]` -> soft-capped float32 logits `[..., vocabulary]`, by the tied embedding."""
        logits = self.language_model.embed_tokens.as_linear(hidden).astype(mx.float32)
        cap = self.config.text_config.final_logit_softcapping
        return logits if cap is None else mx.tanh(logits / cap) * cap

    def __call__(
        self,
        input_ids: mx.array,
        input_features: Optional[mx.array] = None,
        input_features_mask: Optional[mx.array] = None,
        attention_mask: Optional[mx.array] = None,
        cache: Optional[list] = None,
        audio_embeds: Optional[mx.array] = None,
    ) -> mx.array:
        """Logits `[batch, tokens, vocabulary]` in float32; arguments as in `hidden_states`."""
        return self.logits(
            self.hidden_states(input_ids, input_features, input_features_mask, attention_mask, cache, audio_embeds)
        )
