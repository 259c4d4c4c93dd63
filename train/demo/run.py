"""The demo: the shipped checkpoint to 4 bit, LoRA on the shipped recordings, and what a sceptic asks for.

The adapter learns to answer a question the base answers otherwise, on recordings of 26 words; a quarter of them, one
voice of each word, is held out from the base's training and from the adapter's. Silence of the same length in place
of the clips is the control: an adapter that only learned the form would do as well there.
"""

import time
from typing import Any

import click

from convert.checkpoint import convert
from mlx_gemma3n.files import refuse_existing
from train.config import TrainConfig
from train.demo import CHECKPOINT, DATA
from train.demo.clips import PROMPT
from train.evaluate import Evaluation, evaluate, silence
from train.trainer import new_run_folder, train

# A model of 2.5 million parameters wants larger steps than one of billions, and has memory to spare.
SETTINGS = dict(
    learning_rate=5e-3,
    epochs=8,
    batch_size=4,
    gradient_accumulation_steps=1,
    rank=16,
    lora_alpha=32.0,
    gradient_checkpointing="off",
)


def demo(options: dict[str, Any]) -> None:
    """Runs the demo into a new folder under `runs/`, or the one of `options`, which come before the demo's settings.
    In it are `base`, the converted checkpoint, and `run`.

    Raises:
        UserError: an option has a value it cannot have, or the folder exists.
    """
    began = time.perf_counter()
    output = refuse_existing(options.pop("output", None) or new_run_folder("demo"))
    base = output / "base"
    settings = {**SETTINGS, "steps_per_eval": 10**9, **options}
    config = TrainConfig(model=str(base), data=str(DATA), output=str(output / "run"), **settings)
    click.echo(convert(CHECKPOINT, base))
    run = train(config)
    pad = run.processor.tokenizer.pad_token_id
    silent = evaluate(run.model, run.valid, config.batch_size, pad, silence(run.processor))

    click.echo(f"\n{run.after.examples} held-out recordings      loss   exact match")
    rows = {"before": run.before, "after": run.after, "after, clips silenced": silent}
    for name, result in rows.items():
        click.echo(_row(name, result))
    click.echo(
        f"\nadapter in {run.adapter}; {time.perf_counter() - began:.0f} s in all. Ask about a clip it never heard:"
    )
    clip = DATA / "clips" / "b-es.flac"
    click.echo(
        f'python -m mlx_gemma3n.generate --model {base} --adapter {run.adapter} --audio {clip} --prompt "{PROMPT}"'
    )


def _row(name: str, result: Evaluation) -> str:
    return f"{name:<24} {result.loss:>8.3f} {result.exact_match:>12.1%}"
