"""Loss and exact match on held-out examples, from one forward pass.

Greedy decoding writes a reference answer exactly where the likeliest token at each of its positions, given the answer
so far, is the answer's next one. So the pass that gives the loss gives exact match too, end of turn included, without
decoding: an example counts where all its supervised tokens are the likeliest.
"""

import math
from dataclasses import dataclass
from typing import Callable, Optional, Sequence

import mlx.core as mx
import numpy as np

from mlx_gemma3n.model import Gemma3n
from mlx_gemma3n.processor import Processor, load_audio
from train.batching import Batch, collate
from train.data import TrainExample
from train.loss import loss_and_choice, supervised_positions
from train.step import AudioEmbeds, Pieces, hidden_states


@dataclass(frozen=True)
class Evaluation:
    """
    Args:
        loss: mean over supervised tokens, in nats.
        exact_match: share of examples that greedy decoding answers exactly.
        examples: how many there were.
    """

    loss: float
    exact_match: float
    examples: int


def evaluate(
    model: Gemma3n,
    examples: Sequence[TrainExample],
    batch_size: int,
    pad_token_id: int,
    audio_embeds: AudioEmbeds,
    pieces: Pieces = Pieces(),
    on_batch: Callable[[int], None] = lambda count: None,
) -> Evaluation:
    """Evaluates in inference mode and leaves the model in the mode it was in.

    Args:
        on_batch: called with the number of examples done, for a progress bar.
    """
    training = model.training
    model.eval()
    total, tokens, right = 0.0, 0, 0
    # By length, so that a long example pads few others.
    order = sorted(range(len(examples)), key=lambda i: len(examples[i].input_ids))
    for first in range(0, len(order), batch_size):
        batch = collate([examples[i] for i in order[first : first + batch_size]], pad_token_id)
        positions, targets = supervised_positions(batch.labels)
        hidden = hidden_states(model, batch, audio_embeds, pieces)
        loss, choice = loss_and_choice(model, hidden, mx.array(targets), pieces.logits)
        wrong = positions[choice != targets] // batch.input_ids.shape[1]
        right += len(batch.examples) - len(set(wrong.tolist()))
        total, tokens = total + loss, tokens + len(targets)
        on_batch(len(batch.examples))
    model.train(training)
    count = len(examples)
    return Evaluation(total / tokens if tokens else math.nan, right / count if count else math.nan, count)


def silence(processor: Processor) -> AudioEmbeds:
    """Soft tokens of silence as long as each clip: what is left is what the text alone can tell."""

    def embeds(model: Gemma3n, batch: Batch) -> Optional[mx.array]:
        soft = []
        for example in batch.examples:
            if not example.clips:
                continue
            waves = [np.zeros_like(load_audio(clip)) for clip in example.clips]
            silent = processor(example.messages, waves, long_audio=example.long_audio)
            soft.append(model.encode_audio(mx.array(silent.input_features), mx.array(silent.input_features_mask)))
        return mx.concatenate(soft) if soft else None

    return embeds
