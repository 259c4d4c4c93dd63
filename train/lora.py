"""`python -m train.lora`: options in, one training run, a printed result out. Without a model and data: the demo."""

from pathlib import Path
from typing import Any, Callable, Optional

import click

from mlx_gemma3n.config import UserError
from train.config import DTYPES, GRADIENT_CHECKPOINTING, LONG_AUDIO, OPTIMIZERS, PREFLIGHT, TrainConfig

# Of each field of TrainConfig: what an option takes (bool: a flag and its `--no-`), and its line of the help.
SETTINGS = {
    "model": (str, "Checkpoint: an MLX or Hugging Face folder, or a Hub id."),
    "data": (str, "Folder with train.jsonl (and valid.jsonl), or one .jsonl file."),
    "output": (str, "Run folder; must not exist yet.  [default: runs/<data>-<n>]"),
    "adapter": (str, "Adapter to start from, ours or PEFT's; it keeps its rank, alpha and modules."),
    "optimizer": (click.Choice(OPTIMIZERS), "How the adapter moves."),
    "learning_rate": (float, "The peak, reached after the warm-up."),
    "weight_decay": (float, "Pull of the adapter's weights to zero."),
    "warmup_steps": (float, "Steps of warm-up; below 1, their share of all steps."),
    "min_lr_rate": (float, "Where the cosine ends, as a share of the peak."),
    "epochs": (int, "Passes over the training examples."),
    "max_steps": (int, "Optimizer steps, instead of --epochs."),
    "batch_size": (int, "Examples in memory at once."),
    "gradient_accumulation_steps": (int, "Batches to an optimizer step."),
    "max_grad_norm": (float, "Gradients are scaled down to this norm; 0 never scales them."),
    "rank": (int, "Rank of the adapters."),
    "lora_alpha": (float, "An adapter's output is multiplied by lora_alpha / rank."),
    "lora_dropout": (float, "Share of an adapter's inputs set to zero while training."),
    "use_rslora": (bool, "Multiply by lora_alpha / sqrt(rank) instead."),
    "target_modules": (str, "language, language+audio, or names with commas between."),
    "gradient_checkpointing": (
        click.Choice(GRADIENT_CHECKPOINTING),
        "Compute each layer again in the backward pass instead of keeping its activations; auto does so only where "
        "the memory limit asks for it.",
    ),
    "memory_limit": (
        str,
        "What all MLX arrays together may take, such as 36GB.  [default: the device's recommended working set]",
    ),
    "preflight": (click.Choice(PREFLIGHT), "Run the step that takes the most memory once, on copies, before training."),
    "seed": (int, "Of adapter initialisation, order and dropout."),
    "dtype": (click.Choice(DTYPES), "Of the computation.  [default: float32 on the CPU, bfloat16 on Metal]"),
    "steps_per_report": (int, "Steps between lines of metrics.jsonl."),
    "steps_per_eval": (int, "Steps between evaluations.  [default: once an epoch]"),
    "steps_per_save": (int, "Steps between checkpoints.  [default: once an epoch]"),
    "long_audio": (click.Choice(LONG_AUDIO), "What to do with clips over 30 s."),
}


def _option(name: str) -> Callable[[Callable], Callable]:
    kind, text = SETTINGS[name]
    option, default = f"--{name.replace('_', '-')}", TrainConfig.__dataclass_fields__[name].default
    if kind is bool:
        option, default = f"{option}/--no-{option[2:]}", "yes" if default else "no"
    if isinstance(default, (int, float, str)) and "[default" not in text:
        text = f"{text}  [default: {default}]"
    return click.option(option, name, type=kind, default=None, help=text)


def settings_options(*names: str) -> Callable[[Callable], Callable]:
    """A decorator that gives a command an option for each named field of `TrainConfig`; for all, where none is named.

    The default stands in the help but not in the values: what is not given is None, and must not override a --config
    file (see `given_settings`).
    """

    def decorate(command: Callable) -> Callable:
        for name in reversed(names or SETTINGS):
            command = _option(name)(command)
        return command

    return decorate


def given_settings(options: dict[str, Any]) -> dict[str, Any]:
    """Of the values of `settings_options` those that were given, as `TrainConfig` takes them."""
    given = {name: value for name, value in options.items() if value is not None}
    if given.get("max_grad_norm") == 0:
        given["max_grad_norm"] = None
    if (targets := given.get("target_modules")) and "," in targets:
        given["target_modules"] = tuple(name.strip() for name in targets.split(",") if name.strip())
    return given


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--config", "config_file", help="YAML file of settings; options given here come before its own.")
@settings_options()
def main(config_file: Optional[str], **options: Any) -> None:
    """Fine-tune Gemma 3n on chats with recordings, by low-rank adapters.

    Without --model, --data and --config it runs the demo: a tiny Gemma 3n that comes with this package, on recordings
    that come with it.
    """
    from train.trainer import new_run_folder, train

    given = given_settings(options)
    if config_file is None and not ("model" in given or "data" in given):
        from train.demo.run import demo

        demo(given)
        return
    if config_file is not None:
        config = TrainConfig.from_yaml(config_file, **given)
    else:
        for name in ("model", "data"):
            if name not in given:
                raise UserError(f"--{name} is missing; give --model and --data, or neither for the demo")
        given.setdefault("output", new_run_folder(Path(given["data"]).resolve().stem))
        config = TrainConfig(**given)

    run = train(config)
    if run.before and run.after:
        click.echo(
            f"validation loss {run.before.loss:.3f} -> {run.after.loss:.3f}, exact match "
            f"{run.before.exact_match:.1%} -> {run.after.exact_match:.1%} on {run.after.examples} examples"
        )
    click.echo(f"{run.steps} steps; adapter in {run.adapter}")


if __name__ == "__main__":
    from mlx_gemma3n.cli import run

    run(main)
