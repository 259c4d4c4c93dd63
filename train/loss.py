"""The next-token loss, on the supervised positions only.

One float32 row of logits is 1 MB at Gemma 3n's vocabulary, and a prompt of 188 audio tokens has no label at all. So the
hidden states at the labelled positions are gathered first and only those meet the vocabulary: the logits take
`[supervised, vocabulary]` instead of `[batch * tokens, vocabulary]`.
"""

from typing import Optional

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_gemma3n.model import Gemma3n
from train.batching import IGNORED


def supervised_positions(labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where the next token is supervised.

    Args:
        labels: int `[batch, tokens]` aligned with `input_ids`, -100 where there is nothing to learn.

    Returns:
        Flat positions into `[batch * tokens]` whose hidden state predicts a label, and those labels; both
        `[supervised]`.
    """
    batch, tokens = labels.shape
    following = np.concatenate([labels[:, 1:], np.full((batch, 1), IGNORED, labels.dtype)], axis=1).reshape(-1)
    positions = np.flatnonzero(following != IGNORED)
    return positions.astype(np.int32), following[positions].astype(np.int32)


def supervised_logits(
    model: Gemma3n,
    input_ids: mx.array,
    attention_mask: mx.array,
    positions: mx.array,
    audio_embeds: Optional[mx.array] = None,
) -> mx.array:
    """Logits `[supervised, vocabulary]` at `positions` of a batch; arguments as in `Gemma3n.hidden_states`."""
    hidden = model.hidden_states(input_ids, attention_mask=attention_mask, audio_embeds=audio_embeds)
    return model.logits(hidden.reshape(-1, hidden.shape[-1])[positions])


def summed_cross_entropy(logits: mx.array, targets: mx.array) -> mx.array:
    """Sum over tokens, not the mean: micro-batches add up to the batch whatever their share of supervised tokens."""
    return nn.losses.cross_entropy(logits, targets, reduction="sum")
