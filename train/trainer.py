"""The loop: batches in, steps, evaluations, checkpoints out.

A run folder holds `config.yaml` (every setting, resolved), `data.json` (what was trained on), `metrics.jsonl`,
`checkpoints/step-000120/` and `adapter/`. Both kinds of adapter folder are written aside and moved into place, so that
each is loadable at any moment, after a crash too.
"""

import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator, Optional, Sequence

import mlx.core as mx
import mlx.optimizers as optim
from tqdm import tqdm

from mlx_gemma3n import lora
from mlx_gemma3n.config import UserError, read_config
from mlx_gemma3n.files import refuse_existing, write_text
from mlx_gemma3n.loading import default_dtype, find_checkpoint, load_model
from mlx_gemma3n.model import Gemma3n
from mlx_gemma3n.processor import Processor
from train.audio_cache import AudioCache
from train.batching import Batch, batches, collate
from train.config import TrainConfig
from train.data import TrainExample, find_files, load_examples
from train.evaluate import Evaluation, evaluate
from train.metrics import Metrics
from train.step import AudioEmbeds, Pieces, accumulate, apply
from train.trained_audio import TrainedAudio, clips_of

SETTINGS, COUNTS, METRICS, AUDIO_CACHE = "config.yaml", "data.json", "metrics.jsonl", "audio_cache"


@dataclass(frozen=True)
class Run:
    """What a finished run leaves in memory: the trained model and what it was evaluated with."""

    model: Gemma3n
    processor: Processor
    valid: Sequence[TrainExample]
    before: Optional[Evaluation]
    after: Optional[Evaluation]
    steps: int
    adapter: Path


def new_run_folder(name: str) -> str:
    """`runs/NAME-1`, or the first number that is not taken."""
    number = 1
    while (folder := Path("runs") / f"{name}-{number}").exists():
        number += 1
    return str(folder)


def attach_adapter(model: Gemma3n, config: TrainConfig, base: str) -> lora.AdapterConfig:
    """A fresh adapter, or the one that `config.adapter` names, ours or PEFT's; the latter keeps its own shape.

    Args:
        base: what a fresh adapter calls the model it is for.
    """
    if config.adapter is None:
        adapter = lora.AdapterConfig(
            lora.resolve_targets(model, config.target_modules),
            r=config.rank,
            lora_alpha=config.lora_alpha,
            lora_dropout=config.lora_dropout,
            use_rslora=config.use_rslora,
            base_model_name_or_path=base,
        )
        lora.attach(model, adapter)
        return adapter
    folder = lora.find_adapter(config.adapter)
    if (folder / "adapter_model.safetensors").exists():
        from convert.adapter import read_peft

        adapter, weights = read_peft(folder, lora.linear_modules(model))
    else:
        adapter, weights = lora.read_adapter(folder)
    lora.attach(model, adapter)
    lora.load_weights(model, adapter, weights, folder)
    return adapter


def make_optimizer(config: TrainConfig) -> optim.Optimizer:
    """Adam's moments start at zero; without the correction the first steps would be too long."""
    if config.optimizer == "sgd":
        return optim.SGD(config.learning_rate, weight_decay=config.weight_decay)
    return optim.AdamW(config.learning_rate, weight_decay=config.weight_decay, bias_correction=True)


def steps(
    examples: Sequence[TrainExample], config: TrainConfig, pad_token_id: int
) -> Iterator[tuple[float, bool, list[Batch]]]:
    """Endless optimizer steps: the epoch after each, as a fraction, whether it ends one, and its micro-batches."""
    lengths = [len(e.input_ids) for e in examples]
    size, epoch = config.gradient_accumulation_steps, 0
    while True:
        groups = batches(lengths, config.batch_size, config.seed, epoch)
        for first in range(0, len(groups), size):
            done = min(first + size, len(groups))
            micro = [collate([examples[i] for i in group], pad_token_id) for group in groups[first:done]]
            yield epoch + done / len(groups), done == len(groups), micro
        epoch += 1


def train(config: TrainConfig) -> Run:
    """Trains as `config` says and writes the run folder.

    Raises:
        UserError: the model, the data or a setting cannot be used, the run folder exists, or the loss stops being a
            number; the message says what to do.
    """
    output = Path(config.output)
    # What a start that failed has left: its encoded clips, which this one can use.
    if not output.is_dir() or [path.name for path in output.iterdir()] != [AUDIO_CACHE]:
        refuse_existing(output)
    train_file, valid_file = find_files(config.data)
    folder = find_checkpoint(config.model)
    processor = Processor.from_pretrained(folder)
    examples = load_examples(train_file, processor, config.long_audio)
    valid = load_examples(valid_file, processor, config.long_audio) if valid_file else []

    dtype = {"float32": mx.float32, "bfloat16": mx.bfloat16, None: default_dtype()}[config.dtype]
    model = load_model(folder, dtype)
    mx.random.seed(config.seed)
    # The Hub's name of the base, where the conversion recorded one.
    adapter = attach_adapter(model, config, read_config(folder).get("_name_or_path") or config.model)

    output.mkdir(parents=True, exist_ok=True)
    write_text(output / SETTINGS, config.to_yaml())
    counts = {"train_examples": len(examples), "valid_examples": len(valid)}
    counts["clips"] = len({clip for e in [*examples, *valid] for clip in e.clips})
    write_text(output / COUNTS, json.dumps(counts, indent=2) + "\n")
    metrics = Metrics(output / METRICS)
    try:
        return _loop(config, model, processor, adapter, examples, valid, output, metrics)
    finally:
        metrics.close()
        if not (output / METRICS).stat().st_size:
            # Not begun: the same command must be able to begin once its input is put right.
            for name in (SETTINGS, COUNTS, METRICS):
                (output / name).unlink()


def _loop(
    config: TrainConfig,
    model: Gemma3n,
    processor: Processor,
    adapter: lora.AdapterConfig,
    examples: Sequence[TrainExample],
    valid: Sequence[TrainExample],
    output: Path,
    metrics: Metrics,
) -> Run:
    pad = processor.tokenizer.pad_token_id
    audio_embeds: AudioEmbeds
    if adapter.adapts_audio:
        audio_embeds = TrainedAudio(clips_of(processor))
        hear = lambda example: example.features(processor)
    else:
        audio_embeds = AudioCache(output / AUDIO_CACHE, model, processor)
        hear = audio_embeds.soft_tokens
    # Every clip is decoded before the first step: a broken one must not stop a run hours later.
    for example in tqdm([e for e in [*examples, *valid] if e.clips], desc="clips", unit="example", dynamic_ncols=True):
        hear(example)
    pieces = Pieces(checkpointing=config.gradient_checkpointing != "off")
    total = config.total_steps(math.ceil(len(examples) / config.batch_size))
    optimizer = make_optimizer(config)
    optimizer.init(model.trainable_parameters())
    bar = tqdm(total=total, unit="step", dynamic_ncols=True)

    def measure(step: int, epoch: float) -> Optional[Evaluation]:
        if not valid:
            return None
        bar.set_description("evaluating")
        result = evaluate(model, valid, config.batch_size, pad, audio_embeds, pieces)
        bar.set_description("training")
        metrics.write(step=step, epoch=epoch, valid_loss=result.loss, valid_exact_match=result.exact_match)
        bar.write(f"step {step}: validation loss {result.loss:.3f}, exact match {result.exact_match:.1%}")
        return result

    def save(step: int) -> None:
        weights = lora.adapter_weights(model)
        lora.save_adapter(output / "checkpoints" / f"step-{step:06d}", adapter, weights)
        lora.save_adapter(output / "adapter", adapter, weights)

    before = after = measure(0, 0.0)
    model.train()
    mx.reset_peak_memory()
    step, supervised, tokens, loss_sum, since = 0, 0, 0, 0.0, time.perf_counter()
    try:
        for epoch, ends_epoch, micro_batches in steps(examples, config, pad):
            loss, count, gradients = accumulate(model, micro_batches, audio_embeds, pieces)
            rate = config.learning_rate_at(step, total)
            norm = apply(model, optimizer, gradients, rate, config.max_grad_norm)
            if not (math.isfinite(norm) and math.isfinite(loss)):
                raise UserError(_not_finite(step, micro_batches, output))
            step += 1
            loss_sum, supervised = loss_sum + loss, supervised + count
            tokens += sum(int(b.attention_mask.sum()) for b in micro_batches)
            last = step == total
            if step % config.steps_per_report == 0 or last:
                speed = tokens / (time.perf_counter() - since)
                memory = mx.get_peak_memory() / 1e9
                metrics.write(
                    step=step,
                    epoch=round(epoch, 4),
                    loss=loss_sum / supervised,
                    learning_rate=rate,
                    grad_norm=norm,
                    tokens=tokens,
                    supervised_tokens=supervised,
                    tokens_per_second=round(speed, 1),
                    peak_memory_gb=round(memory, 3),
                )
                bar.set_postfix_str(f"loss {loss_sum / supervised:.3f}, {speed:.0f} tok/s, {memory:.1f} GB")
                supervised, tokens, loss_sum, since = 0, 0, 0.0, time.perf_counter()
            bar.update()
            if last or (step % config.steps_per_save == 0 if config.steps_per_save else ends_epoch):
                save(step)
            if last or (step % config.steps_per_eval == 0 if config.steps_per_eval else ends_epoch):
                after = measure(step, round(epoch, 4))
                since = time.perf_counter()
            if last:
                break
    except KeyboardInterrupt:
        if step:
            save(step)
            bar.write(f"interrupted after step {step}; the adapter so far is in {output / 'adapter'}")
        raise
    finally:
        bar.close()
    model.eval()
    return Run(model, processor, valid, before, after, step, output / "adapter")


def _not_finite(step: int, micro_batches: Sequence[Batch], output: Path) -> str:
    lines = [example.where for batch in micro_batches for example in batch.examples]
    kept = f"; {output / 'adapter'} is as it was last saved" if (output / "adapter").exists() else ""
    return (
        f"step {step + 1}: the loss or its gradient is not a number, on {', '.join(lines[:4])}"
        f"{' and others' if len(lines) > 4 else ''}; lower --learning-rate or lengthen --warmup-steps{kept}"
    )
