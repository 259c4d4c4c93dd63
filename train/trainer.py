"""The loop: batches in, steps, evaluations, checkpoints out.

A run folder holds `config.yaml` (every setting, resolved), `plan.json` (its memory), `data.json` (what was trained on),
`metrics.jsonl`, `tensorboard/`, `checkpoints/step-000120/` and `adapter/`. Both kinds of adapter folder are written
aside and moved into place, so that each is loadable at any moment, after a crash too.

A run that starts finishes: its memory is planned before the weights are read (`train/budget.py`), its worst batch is
taken once for real before the first step (`train/preflight.py`), and no later batch takes more.
"""

import json
import math
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Iterator, Optional, Sequence

import mlx.core as mx
import mlx.optimizers as optim
from mlx.utils import tree_flatten
from tqdm import tqdm

from mlx_gemma3n import lora
from mlx_gemma3n.config import Config, DoesNotFit, UserError, read_config
from mlx_gemma3n.files import refuse_existing, write_text
from mlx_gemma3n.loading import default_dtype, find_checkpoint, load_model, release
from mlx_gemma3n.model import Gemma3n
from mlx_gemma3n.processor import Processor
from train.audio_cache import AudioCache
from train.batching import Batch, batches, collate
from train.budget import Plan, Row, held_to, in_words, make_plan, recommended_limit, rows_of
from train.config import TrainConfig
from train.data import TrainExample, find_files, load_examples
from train.evaluate import Evaluation, evaluate
from train.memory import Planner, skeleton
from train.metrics import Metrics
from train.preflight import measure, shortfall, worst_batch
from train.step import AudioEmbeds, accumulate, apply
from train.trained_audio import TrainedAudio, clips_of

SETTINGS, COUNTS, METRICS, AUDIO_CACHE = "config.yaml", "data.json", "metrics.jsonl", "audio_cache"
PLAN, TENSORBOARD = "plan.json", "tensorboard"
# Of the limit: when so much is taken, what is only kept for reuse is given back.
NEAR = 0.9
# Arrays that an optimizer of MLX keeps for each weight: Adam's two moments, and SGD's momentum, used or not.
STATE_ARRAYS = {"adamw": 2, "sgd": 1}


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
    examples: Sequence[TrainExample], config: TrainConfig, pad_token_id: int, rows: Optional[int] = None
) -> Iterator[tuple[float, bool, list[Batch]]]:
    """Endless optimizer steps: the epoch after each, as a fraction, whether it ends one, and its micro-batches.

    Args:
        rows: a batch goes in parts of so many examples; None for whole batches.
    """
    lengths = [len(e.input_ids) for e in examples]
    size, epoch = config.gradient_accumulation_steps, 0
    while True:
        groups = batches(lengths, config.batch_size, config.seed, epoch)
        for first in range(0, len(groups), size):
            done = min(first + size, len(groups))
            most = rows or config.batch_size
            parts = [group[i : i + most] for group in groups[first:done] for i in range(0, len(group), most)]
            micro = [collate([examples[i] for i in part], pad_token_id) for part in parts]
            yield epoch + done / len(groups), done == len(groups), micro
        epoch += 1


def train(config: TrainConfig) -> Run:
    """Trains as `config` says and writes the run folder.

    Raises:
        UserError: the model, the data or a setting cannot be used, the run folder exists, or the loss stops being a
            number; the message says what to do.
        DoesNotFit: a step takes more memory than the limit, by the plan or measured.
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

    # The Hub's name of the base, where the conversion recorded one.
    base = read_config(folder).get("_name_or_path") or config.model
    planner = make_planner(config, Config.load(folder), base)
    plan = plan_run(config, planner, examples, valid)
    tqdm.write("; ".join([f"memory: {in_words(plan.peak)} planned of {in_words(plan.limit)}", *plan.way.does]))
    model = load_model(folder, dtype_of(config))
    mx.random.seed(config.seed)
    adapter = attach_adapter(model, config, base)

    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(f"{output}: cannot be made ({e.strerror}); name another --output") from None
    write_text(output / SETTINGS, config.to_yaml())
    counts = {"train_examples": len(examples), "valid_examples": len(valid)}
    counts["clips"] = len({clip for e in [*examples, *valid] for clip in e.clips})
    write_text(output / COUNTS, json.dumps(counts, indent=2) + "\n")
    metrics = Metrics(output / METRICS, output / TENSORBOARD)
    try:
        with held_to(plan):
            pad = processor.tokenizer.pad_token_id
            audio_embeds = hear(model, folder, adapter, processor, [*examples, *valid], output / AUDIO_CACHE)
            if config.preflight == "on":
                plan = preflight(config, planner, plan, model, examples, pad, audio_embeds)
            write_text(output / PLAN, json.dumps(plan.to_dict(), indent=2) + "\n")
            return _loop(config, plan, model, processor, adapter, examples, valid, audio_embeds, output, metrics)
    finally:
        metrics.close()
        if not (output / METRICS).stat().st_size:
            # Not begun: the same command must be able to begin once its input is put right.
            for name in (SETTINGS, COUNTS, METRICS, PLAN):
                (output / name).unlink(missing_ok=True)
            shutil.rmtree(output / TENSORBOARD, ignore_errors=True)


def dtype_of(config: TrainConfig) -> mx.Dtype:
    """Of the run's computation."""
    return default_dtype() if config.dtype is None else getattr(mx, config.dtype)


def make_planner(config: TrainConfig, model: Config, base: str) -> Planner:
    """Estimates for the run's model with the run's adapter and optimizer; no weight is read."""
    shapes = skeleton(model, dtype_of(config))
    adapter = attach_adapter(shapes, config, base)
    return Planner(shapes, STATE_ARRAYS[config.optimizer], cached=not adapter.adapts_audio)


def plan_for(config: TrainConfig, planner: Planner, rows: Sequence[Row], **more: Any) -> Plan:
    """`make_plan` with the run's settings; `more` is its other arguments, and `limit` where it is not the run's."""
    limit = more.pop("limit", None) or config.memory_limit_bytes or recommended_limit()
    accumulates = config.gradient_accumulation_steps > 1
    return make_plan(planner, rows, config.batch_size, config.gradient_checkpointing, limit, accumulates, **more)


def plan_run(
    config: TrainConfig, planner: Planner, examples: Sequence[TrainExample], valid: Sequence[TrainExample]
) -> Plan:
    """The plan of a run that fits.

    Raises:
        DoesNotFit: there is none.
    """
    rows, valid_rows = (rows_of(some, planner.model.config) for some in (examples, valid))
    plan = plan_for(config, planner, rows, valid=valid_rows)
    if not plan.fits:
        raise DoesNotFit(shortfall(plan, plan.peak))
    return plan


def hear(
    model: Gemma3n,
    folder: Path,
    adapter: lora.AdapterConfig,
    processor: Processor,
    examples: Sequence[TrainExample],
    cache: Path,
) -> AudioEmbeds:
    """Where the clips' soft tokens come from; decodes every clip, and encodes it where the tower is frozen. Then the
    model's weights are read, the audio tower's only if they are still needed.

    Every clip is decoded before the first step: a broken one must not stop a run hours later.
    """
    source: AudioEmbeds
    if adapter.adapts_audio:
        source, listen = TrainedAudio(clips_of(processor)), lambda example: example.features(processor)
    else:
        kept = AudioCache(cache, model, processor)
        source, listen = frozen_audio(kept, folder), kept.soft_tokens
    for example in tqdm([e for e in examples if e.clips], desc="clips", unit="example", dynamic_ncols=True):
        listen(example)
    frozen = "audio_tower" in model and not adapter.adapts_audio
    if frozen:
        release(model, folder)
    for name, weight in tree_flatten(model.parameters()):
        if not (frozen and name.startswith("audio_tower.")):
            # One by one: a weight that is cast is there twice for a moment.
            mx.eval(weight)
    mx.clear_cache()
    return source


def frozen_audio(kept: AudioCache, folder: Path) -> AudioEmbeds:
    """The cache's soft tokens. A clip whose file was lost or damaged meanwhile is encoded again, and the tower's
    weights are given back before the step goes on."""

    def embeds(model: Gemma3n, batch: Batch) -> Optional[mx.array]:
        misses = kept.misses
        soft = kept(model, batch)
        if kept.misses > misses:
            release(model, folder)
        return soft

    return embeds


def preflight(
    config: TrainConfig,
    planner: Planner,
    plan: Plan,
    model: Gemma3n,
    examples: Sequence[TrainExample],
    pad_token_id: int,
    audio_embeds: AudioEmbeds,
) -> Plan:
    """`plan`, or a leaner one, whose worst batch was measured to fit.

    Raises:
        DoesNotFit: the leanest does not.
    """
    while True:
        batch = worst_batch(examples, plan.worst.tokens, plan.worst.case.batch)
        # In a step's second micro-batch, the gradients of its first one are there from the start.
        peak = measure(
            model,
            [batch] * (1 + plan.worst.case.another),
            pad_token_id,
            audio_embeds,
            plan.way,
            lambda: make_optimizer(config),
        )
        tqdm.write(
            f"worst batch, {plan.worst.case.batch} x {plan.worst.tokens} tokens: {in_words(peak)} measured, "
            f"{in_words(plan.peak)} planned, limit {in_words(plan.limit)}"
        )
        if peak <= plan.limit:
            mx.set_cache_limit(max(0, plan.limit - max(peak, plan.peak)))
            return replace(plan, measured=peak)
        rows = rows_of(examples, planner.model.config)
        leaner = plan_for(config, planner, rows, limit=plan.limit, after=plan.way)
        if leaner.way == plan.way or not leaner.fits:
            raise DoesNotFit(shortfall(plan, peak))
        tqdm.write("over the limit; now it " + "; ".join(leaner.way.does))
        plan = leaner


def _loop(
    config: TrainConfig,
    plan: Plan,
    model: Gemma3n,
    processor: Processor,
    adapter: lora.AdapterConfig,
    examples: Sequence[TrainExample],
    valid: Sequence[TrainExample],
    audio_embeds: AudioEmbeds,
    output: Path,
    metrics: Metrics,
) -> Run:
    pad, pieces, rows = processor.tokenizer.pad_token_id, plan.way.pieces, min(plan.way.rows, config.batch_size)
    total = config.total_steps(math.ceil(len(examples) / config.batch_size))
    optimizer = make_optimizer(config)
    optimizer.init(model.trainable_parameters())
    mx.eval(optimizer.state)
    bar = tqdm(total=total, unit="step", dynamic_ncols=True)

    def validate(step: int, epoch: float) -> Optional[Evaluation]:
        if not valid:
            return None
        bar.set_description("evaluating")
        result = evaluate(model, valid, rows, pad, audio_embeds, pieces)
        bar.set_description("training")
        metrics.write(step=step, epoch=epoch, valid_loss=result.loss, valid_exact_match=result.exact_match)
        bar.write(f"step {step}: validation loss {result.loss:.3f}, exact match {result.exact_match:.1%}")
        return result

    def save(step: int) -> None:
        weights = lora.adapter_weights(model)
        lora.save_adapter(output / "checkpoints" / f"step-{step:06d}", adapter, weights)
        lora.save_adapter(output / "adapter", adapter, weights)

    before = after = validate(0, 0.0)
    model.train()
    mx.reset_peak_memory()
    step, supervised, tokens, loss_sum, since = 0, 0, 0, 0.0, time.perf_counter()
    try:
        for epoch, ends_epoch, micro_batches in steps(examples, config, pad, rows):
            loss, count, gradients = accumulate(model, micro_batches, audio_embeds, pieces)
            rate = config.learning_rate_at(step, total)
            norm = apply(model, optimizer, gradients, rate, config.max_grad_norm)
            if not (math.isfinite(norm) and math.isfinite(loss)):
                raise UserError(_not_finite(step, micro_batches, output))
            step += 1
            del gradients
            if (taken := mx.get_active_memory() + (spare := mx.get_cache_memory())) > NEAR * plan.limit and spare:
                mx.clear_cache()
                text = f"memory {in_words(taken)} of {in_words(plan.limit)}: {in_words(spare)} given back"
                metrics.event(step, text)
            loss_sum, supervised = loss_sum + loss, supervised + count
            tokens += sum(int(b.attention_mask.sum()) for b in micro_batches)
            last = step == total
            if step % config.steps_per_report == 0 or last:
                speed = tokens / (time.perf_counter() - since)
                memory = mx.get_peak_memory()
                metrics.write(
                    step=step,
                    epoch=round(epoch, 4),
                    loss=loss_sum / supervised,
                    learning_rate=rate,
                    grad_norm=norm,
                    tokens=tokens,
                    supervised_tokens=supervised,
                    tokens_per_second=round(speed, 1),
                    peak_memory_gb=round(memory / 1e9, 4),
                )
                mx.reset_peak_memory()
                bar.set_postfix_str(f"loss {loss_sum / supervised:.3f}, {speed:.0f} tok/s, {in_words(memory)}")
                supervised, tokens, loss_sum, since = 0, 0, 0.0, time.perf_counter()
            bar.update()
            if last or (step % config.steps_per_save == 0 if config.steps_per_save else ends_epoch):
                save(step)
            if last or (step % config.steps_per_eval == 0 if config.steps_per_eval else ends_epoch):
                after = validate(step, round(epoch, 4))
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
