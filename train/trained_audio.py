"""The audio tower inside a training step: forward and backward, one clip and one conformer block at a time.

Of a clip's forward pass nothing is kept: the backward pass runs it again, keeps each block's input, and takes the
blocks from the last to the first. So however many clips a batch has, one block's activations of one clip are alive.
"""

from typing import Callable, Iterator, Optional, Sequence

import mlx.core as mx
import numpy as np

from mlx_gemma3n.model import Gemma3n
from mlx_gemma3n.processor import Processor
from train.batching import Batch
from train.piece import Gradients, add, trainable, vjp

# Log-mel features `[clips, frames, mel_bins]` and their mask `[clips, frames]`, True on valid frames.
Clips = tuple[np.ndarray, np.ndarray]


def conformer_inputs(model: Gemma3n, features: np.ndarray, mask: np.ndarray, seed: int) -> Iterator[mx.array]:
    """The input of each conformer block and the output of the last, `[1, frames / 4, hidden]`, each evaluated.

    Args:
        features: `[1, frames, mel_bins]`, one clip's.
        mask: `[1, frames]`, True on valid frames.
        seed: of the dropout: block `i` draws from `seed + i`.
    """
    mx.random.seed(seed)
    x, padding = model.audio_tower.subsample(mx.array(features), _padding(mask))
    mx.eval(x)
    yield x
    for i, block in enumerate(model.audio_tower.conformer):
        mx.random.seed(seed + 1 + i)
        x = block(x, padding)
        mx.eval(x)
        yield x


def encode(model: Gemma3n, features: np.ndarray, mask: np.ndarray, seed: int = 0) -> mx.array:
    """The soft tokens of one clip, `[1, audio_soft_tokens_per_image, text_hidden]`, as `Gemma3n.encode_audio` gives
    them, evaluated block by block; arguments as in `conformer_inputs`."""
    if "audio_tower" not in model:
        raise ValueError("this checkpoint has no audio tower (converted with --text-only?)")
    for x in conformer_inputs(model, features, mask, seed):
        last = x
    mx.random.seed(_end_seed(model, seed))
    soft = model.soft_tokens(*model.audio_tower.reduce(last, _frames(model, mask)))
    mx.eval(soft)
    return soft


def _padding(mask: np.ndarray) -> mx.array:
    return ~mx.array(mask).astype(mx.bool_)


def _frames(model: Gemma3n, mask: np.ndarray) -> mx.array:
    """The padding of the conformer's frames."""
    return model.audio_tower.frame_padding(_padding(mask))


def clips_of(processor: Processor) -> Callable[[Batch], list[Clips]]:
    """The clips of a batch, decoded afresh, each example's padded together as the processor pads them: an example gives
    the same soft tokens in any batch."""
    return lambda batch: [example.features(processor) for example in batch.examples if example.clips]


class TrainedAudio:
    """Soft tokens from an audio tower with adapters, and the gradients of those.

    Args:
        clips: the clips of a batch, in groups that are padded to one length.
    """

    def __init__(self, clips: Callable[[Batch], Sequence[Clips]]):
        self.clips = clips

    def decoded(self, batch: Batch) -> list[Clips]:
        """The clips of a batch one by one, in order."""
        groups = self.clips(batch)
        return [(features[i : i + 1], mask[i : i + 1]) for features, mask in groups for i in range(len(features))]

    def __call__(self, model: Gemma3n, batch: Batch) -> Optional[mx.array]:
        """`[clips, audio_soft_tokens_per_image, text_hidden]` in order, or None without clips; not evaluated, so that
        MLX can differentiate it."""
        soft = [model.encode_audio(mx.array(f), mx.array(m)) for f, m in self.decoded(batch)]
        return mx.concatenate(soft) if soft else None

    def forward(self, model: Gemma3n, clips: Sequence[Clips], seed: int) -> Optional[mx.array]:
        """The same of clips that are `decoded`, evaluated; the dropout of clip `i` is drawn from `seed` and `i`."""
        soft = [encode(model, *clip, _seed(seed, i)) for i, clip in enumerate(clips)]
        return mx.concatenate(soft) if soft else None

    def backward(
        self, model: Gemma3n, clips: Sequence[Clips], seed: int, cotangent: mx.array, gradients: Gradients
    ) -> None:
        """Adds the gradients of the adapters of the tower and of `embed_audio` to `gradients`.

        Args:
            clips, seed: those of `forward`.
            cotangent: of its soft tokens.
        """
        for i, (features, mask) in enumerate(clips):
            _clip_backward(model, features, mask, _seed(seed, i), cotangent[i : i + 1], gradients)


def _seed(seed: int, clip: int) -> int:
    # A clip draws from less than 10 000 seeds: one for the subsampling, each block and the projection.
    return seed + 10_000 * clip


def _end_seed(model: Gemma3n, seed: int) -> int:
    """Of the projection to the text's width, after those of the subsampling and the blocks."""
    return seed + 1 + len(model.audio_tower.conformer)


def _clip_backward(
    model: Gemma3n, features: np.ndarray, mask: np.ndarray, seed: int, cotangent: mx.array, gradients: Gradients
) -> None:
    tower, inputs = model.audio_tower, list(conformer_inputs(model, features, mask, seed))
    padding = _frames(model, mask)

    def step(module, path: str, run: Callable[..., mx.array], arguments: list[mx.array], slope: mx.array, seed: int):
        def seeded(*arrays: mx.array) -> list[mx.array]:
            mx.random.seed(seed)
            return [run(*arrays)]

        found, products = vjp(module, trainable(module), seeded, arguments, [slope])
        mx.eval(products, add(gradients, path, found))
        return products[0] if products else None

    end = lambda x: model.soft_tokens(*tower.reduce(x, padding))
    slope = step(model.embed_audio, "embed_audio", end, [inputs.pop()], cotangent, _end_seed(model, seed))
    for i in reversed(range(len(tower.conformer))):
        block = tower.conformer[i]
        run = lambda x: block(x, padding)
        slope = step(block, f"audio_tower.conformer.{i}", run, [inputs.pop()], slope, seed + 1 + i)
    stem = tower.subsample_conv_projection
    step(stem, "audio_tower.subsample_conv_projection", lambda: stem(mx.array(features)), [], slope, seed)
