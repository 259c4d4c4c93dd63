"""Decoding with a cache, and the command that streams it: `python -m mlx_gemma3n.generate`.

The samplers are mlx-lm's. Its loop is not: a clip's soft tokens must enter with the prompt.
"""

from typing import Iterable, Iterator, Optional

import click
import mlx.core as mx
import numpy as np
from mlx_lm.sample_utils import make_sampler

from mlx_gemma3n.config import UserError
from mlx_gemma3n.model import Gemma3n
from mlx_gemma3n.processor import LONG_AUDIO, Processor

# Tokens of the prompt that go through the model at once; bounds the memory of long prompts.
PREFILL = 512


def prefill(
    model: Gemma3n, input_ids: np.ndarray, audio_embeds: Optional[mx.array], cache: list, size: int = PREFILL
) -> mx.array:
    """Fills `cache` with a prompt, piece by piece.

    Args:
        input_ids: `[tokens]`.
        audio_embeds: soft tokens `[clips, soft_tokens, hidden]` for all placeholders, or None without clips.
        size: tokens of a piece.

    Returns:
        The hidden state of the last token, `[1, 1, hidden]`.
    """
    soft = None if audio_embeds is None else audio_embeds.reshape(1, -1, audio_embeds.shape[-1])
    placeholders = np.cumsum(input_ids == model.config.audio_token_id)
    if soft is not None and placeholders[-1] != soft.shape[1]:
        raise ValueError(f"{placeholders[-1]} audio placeholders in the prompt for {soft.shape[1]} soft tokens")
    used = 0
    for start in range(0, len(input_ids), size):
        piece = input_ids[start : start + size]
        until = int(placeholders[start + len(piece) - 1])
        embeds = soft[:, used:until] if soft is not None and until > used else None
        hidden = model.hidden_states(mx.array(piece)[None], cache=cache, audio_embeds=embeds)
        mx.eval(hidden, [entry.state for entry in cache])
        used = until
    return hidden[:, -1:]


def generate(
    model: Gemma3n,
    input_ids: np.ndarray,
    input_features: Optional[np.ndarray] = None,
    input_features_mask: Optional[np.ndarray] = None,
    *,
    max_tokens: int = 256,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    eos_token_ids: Iterable[int] = (),
    seed: Optional[int] = None,
    prefill_size: int = PREFILL,
) -> Iterator[int]:
    """Continues a prompt, token by token.

    Args:
        input_ids: `[tokens]`, as a `Processor` makes them with `add_generation_prompt`.
        input_features: log-mel `[clips, frames, mel_bins]` of the prompt's clips.
        input_features_mask: `[clips, frames]`, True on valid frames.
        max_tokens: the most tokens to yield.
        temperature: 0 takes the likeliest token (transformers' greedy `generate`); above, tokens are sampled.
        top_p: sample from the likeliest tokens that make up this much probability.
        top_k: sample from this many likeliest tokens; 0 for all.
        eos_token_ids: what ends the answer. The one that ended it is yielded, last.
        seed: of sampling; None goes on from MLX's present state.
        prefill_size: tokens of the prompt that are computed at once.

    Yields:
        Token ids.

    Raises:
        ValueError: the prompt is empty, or its placeholders do not agree with the clips.
    """
    input_ids = np.asarray(input_ids)
    if input_ids.ndim != 1 or not len(input_ids):
        raise ValueError(f"input_ids of shape {list(input_ids.shape)}; want [tokens] with at least one")
    if seed is not None:
        mx.random.seed(seed)
    stops = set(eos_token_ids)
    inside = 0 < top_k < model.config.text_config.vocab_size
    sampler = make_sampler(temp=temperature, top_p=top_p, top_k=top_k if inside else 0)

    def choose(hidden: mx.array) -> mx.array:
        logits = model.logits(hidden)[:, -1]
        # Greedy takes the logits as they are: subtracting rounds, and may make ties of them.
        return sampler(logits if temperature == 0 else logits - mx.logsumexp(logits, axis=-1, keepdims=True))

    audio_embeds = None
    if input_features is not None:
        mask = np.ones(input_features.shape[:2], bool) if input_features_mask is None else input_features_mask
        audio_embeds = model.encode_audio(mx.array(input_features), mx.array(mask))
    cache = model.make_cache()
    token = choose(prefill(model, input_ids, audio_embeds, cache, prefill_size))
    for count in range(1, max_tokens + 1):
        # The per-layer table is read by the token's value, so the next step cannot be built before it is there.
        chosen = token.item()
        last = count == max_tokens or chosen in stops
        if not last:
            # Under way while the caller has this token.
            token = choose(model.hidden_states(mx.array([[chosen]]), cache=cache))
            mx.async_eval(token)
        yield chosen
        if last:
            return


def stream_text(processor: Processor, ids: Iterable[int]) -> Iterator[str]:
    """The text of token ids as they come, without special tokens; a character of several tokens comes whole.

    All tokens so far are decoded each time. mlx-lm's and transformers' streamers decode the last ones only, and repeat
    characters where several in a row are spelled in bytes: a new one's first byte makes the whole row unreadable.
    """
    tokens: list[int] = []
    text = shown = ""
    for token in ids:
        tokens.append(token)
        text = processor.decode(tokens)
        # A run of bytes is text or not as a whole.
        spelled = processor.tokenizer.convert_ids_to_tokens(token) or ""
        if len(text) > len(shown) and not spelled.startswith("<0x") and not text.endswith("\ufffd"):
            yield text[len(shown) :]
            shown = text
    if len(text) > len(shown):
        yield text[len(shown) :]


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.option("--model", "path", required=True, help="Checkpoint: a Hugging Face or MLX folder, or a Hub id.")
@click.option("--adapter", help="Adapter or run folder to attach.")
@click.option("--audio", "clips", multiple=True, help="Clip (WAV, FLAC, MP3, Ogg); again for more, in the order heard.")
@click.option("--prompt", required=True, help="What to say to the model, after the clips.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=256, help="The most tokens to generate.")
@click.option("--temperature", type=click.FloatRange(min=0), default=0.0, help="0 takes the likeliest token each time.")
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), default=1.0, help="Probability to sample from.")
@click.option("--top-k", type=click.IntRange(min=0), default=0, help="Tokens to sample from; 0 for all.")
@click.option("--seed", type=int, default=0, help="Of sampling.")
@click.option("--long-audio", type=click.Choice(LONG_AUDIO), default="refuse", help="For clips over 30 s.")
def main(
    path: str,
    adapter: Optional[str],
    clips: tuple[str, ...],
    prompt: str,
    max_tokens: int,
    temperature: float,
    top_p: float,
    top_k: int,
    seed: int,
    long_audio: str,
) -> None:
    """Answer a prompt, with clips or without, and print the answer as it comes."""
    from mlx_gemma3n.loading import load

    model, processor = load(path, adapter)
    if clips and model.config.audio_config is None:
        raise UserError(f"{path}: this checkpoint has no audio tower; leave out --audio")
    content = [{"type": "audio", "audio": clip} for clip in clips] + [{"type": "text", "text": prompt}]
    example = processor([{"role": "user", "content": content}], add_generation_prompt=True, long_audio=long_audio)
    ids = generate(
        model,
        example.input_ids,
        example.input_features,
        example.input_features_mask,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        eos_token_ids=processor.eos_token_ids,
        seed=seed,
    )
    for text in stream_text(processor, ids):
        click.echo(text, nl=False)
    click.echo()


if __name__ == "__main__":
    from mlx_gemma3n.cli import run

    run(main)
