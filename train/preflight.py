"""The plan's check against the real step: the worst batch is taken once, for real, before training begins.

What it changes is put back, so that the model afterwards is bit for bit what it was, and the run the same with it and
without it. The step needs an optimizer of its own; it is gone before the run's is made.
"""

from typing import Callable, Sequence

import mlx.core as mx
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_unflatten

from mlx_gemma3n.model import Gemma3n
from train.batching import IGNORED, collate
from train.budget import Plan, Way, in_words
from train.data import TrainExample
from train.piece import own_randomness
from train.step import AudioEmbeds, accumulate, apply


def worst_batch(examples: Sequence[TrainExample], tokens: int, batch: int) -> list[TrainExample]:
    """`batch` examples, the longest ones up to `tokens`, of one length those with the most labels."""
    order = sorted(examples, key=lambda e: (len(e.input_ids), int((e.labels != IGNORED).sum())), reverse=True)
    return [e for e in order if len(e.input_ids) <= tokens][:batch]


def measure(
    model: Gemma3n,
    micro_batches: Sequence[Sequence[TrainExample]],
    pad_token_id: int,
    audio_embeds: AudioEmbeds,
    way: Way,
    make_optimizer: Callable[[], optim.Optimizer],
) -> int:
    """The peak in bytes of one optimizer step of `micro_batches`, all of which `model` is as before after it."""
    before = tree_flatten(model.trainable_parameters())
    training = model.training
    batches = [collate(examples, pad_token_id) for examples in micro_batches]
    model.train()
    optimizer = make_optimizer()
    with own_randomness():
        optimizer.init(model.trainable_parameters())
        mx.eval(optimizer.state)
        mx.synchronize()
        mx.clear_cache()
        mx.reset_peak_memory()
        _, _, gradients = accumulate(model, batches, audio_embeds, way.pieces)
        # At any rate: what it moves is put back.
        apply(model, optimizer, gradients, 1e-6, 1.0)
        mx.synchronize()
        peak = mx.get_peak_memory()
    del gradients, optimizer
    model.update(tree_unflatten(before))
    model.train(training)
    mx.clear_cache()
    return peak


def shortfall(plan: Plan, peak: int) -> str:
    """What a run that does not fit is told: by how much, which examples, and what would fit."""
    if peak <= plan.limit:
        return (
            f"{plan.longest_valid.where}: evaluating it ({plan.longest_valid.tokens} tokens) takes "
            f"{in_words(plan.evaluation)}, over the limit of {in_words(plan.limit)}; leave it out, or give more by "
            "--memory-limit"
        )
    worst = plan.worst
    too_long = [bucket for bucket in plan.buckets if not bucket.fits] or [worst]
    examples = ", ".join(f"{b.longest.where} ({b.longest.tokens} tokens)" for b in reversed(too_long[-3:]))
    count = sum(bucket.examples for bucket in too_long)
    more = f" and {count - min(3, len(too_long))} more" if count > min(3, len(too_long)) else ""
    fitting = [bucket for bucket in plan.buckets if bucket.tokens < too_long[0].tokens]
    most = max(peak, plan.evaluation)
    enough = f"{-(-most // 10**8) / 10:.1f}GB" if most >= 10**9 else f"{-(-most // 10**6)}MB"
    remedy = f"--memory-limit {enough} would do"
    if fitting:
        remedy += f", or examples of up to {fitting[-1].tokens} tokens"
    if not plan.way.pieces.checkpointing:
        remedy += ", or --gradient-checkpointing auto"
    if worst.estimate.weights > plan.limit:
        remedy += f"; the weights alone take {in_words(worst.estimate.weights)}"
    else:
        remedy += ", or a smaller --rank, or a base of fewer bits (python -m convert.checkpoint)"
    return (
        f"a step takes {in_words(peak)}, {in_words(peak - plan.limit)} over the limit of {in_words(plan.limit)}, "
        f"with batches in parts of {plan.way.rows}: {examples}{more}; {remedy}"
    )
