"""`python -m train.plan`: what a run would take, before anything is downloaded, loaded or trained."""

import json
from pathlib import Path
from typing import Any, Optional

import click
from mlx.utils import tree_flatten

from mlx_gemma3n.cli import DOES_NOT_FIT
from mlx_gemma3n.config import Config, UserError
from mlx_gemma3n.loading import HUB_ID
from mlx_gemma3n.processor import Processor
from train.budget import ANY, Bucket, Plan, Row, in_words, rows_of, rows_up_to
from train.config import TrainConfig
from train.data import find_files, load_examples
from train.lora import given_settings, settings_options
from train.preflight import shortfall
from train.trainer import make_planner, plan_for

_TEXT = dict(hidden_size=2048, vocab_size=262_400, vocab_size_per_layer_input=262_144)
# Google's, so that they can be planned for before they are here. What is left out is transformers' default.
KNOWN = {
    "E2B": dict(_TEXT, intermediate_size=8192, num_hidden_layers=30, num_kv_shared_layers=10),
    "E4B": dict(_TEXT, intermediate_size=16_384, num_hidden_layers=35, num_kv_shared_layers=15),
}
DEFAULT_LENGTH, MOST_LENGTH, MOST_ROWS = 2048, 262_144, 65_536
# Stands for data and an output folder that a plan does without.
NO_DATA = "-"


def known_config(name: str) -> Optional[dict[str, Any]]:
    """The config.json of `google/gemma-3n-E2B-it` and its like, as far as memory depends on it; None for others."""
    size = name.lower().removeprefix("google/").removeprefix("gemma-3n-").removesuffix("-it").upper()
    if size not in KNOWN or not name.lower().startswith("google/gemma-3n-"):
        return None
    return {
        "model_type": "gemma3n",
        "text_config": KNOWN[size],
        "audio_config": {"hidden_size": 1536},
        "vision_config": {"hidden_size": 2048},
    }


def read_model(model: str, q_bits: Optional[str]) -> tuple[Config, Optional[Path]]:
    """The config that is planned for, and the folder it is from, if it is here.

    Args:
        q_bits: plan for a conversion to so many bits, or to none; None takes a folder as it is, and 4 bits of a model
            that is known by name.

    Raises:
        UserError: no such folder and not known by name, or the folder's config cannot be used.
    """
    folder = Path(model)
    if folder.is_dir():
        config = Config.load(folder)
        if q_bits is None:
            return config, folder
        if config.quantization:
            raise UserError(f"{folder}: quantized already, so --q-bits {q_bits} means nothing; leave it out")
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    else:
        values = known_config(model)
        if values is None:
            kind = "a Hub id that is not here yet" if HUB_ID.fullmatch(model) else "no such folder"
            raise UserError(
                f"{model}: {kind}; known by name are google/gemma-3n-E2B-it and google/gemma-3n-E4B-it, "
                "and of any other a folder with its config.json will do"
            )
        folder = None
    if q_bits != "none":
        values["quantization"] = {"group_size": 64, "bits": int(q_bits or 4)}
    return Config.from_dict(values), folder


def read_rows(
    config: TrainConfig, model: Config, folder: Optional[Path], max_length: Optional[int], clips: int
) -> tuple[list[Row], list[Row]]:
    """The lengths of the data, for training and for evaluation, or a batch of each length up to `max_length`, with
    `clips` in each row, where no data is given."""
    if config.data == NO_DATA:
        if config.batch_size > MOST_ROWS:
            raise UserError(f"batch_size is {config.batch_size}; without --data it is {MOST_ROWS} at most")
        return rows_up_to(max_length or DEFAULT_LENGTH, config.batch_size, clips), []
    if max_length is not None:
        raise UserError("--max-length and --data: give one of them; the lengths are those of the data")
    file, valid_file = find_files(config.data)
    if folder is None:
        raise UserError(
            f"{config.data}: its lengths need the tokenizer of {config.model}, which is not here; "
            "give --model a folder, or --max-length instead of --data"
        )
    processor = Processor.from_pretrained(folder)
    files = [file, *([valid_file] if valid_file else [])]
    train, *valid = [rows_of(load_examples(f, processor, config.long_audio), model) for f in files]
    return train, valid[0] if valid else []


def _table(plan: Plan) -> list[str]:
    columns = ("weights", "adapters", "optimizer", "data", "saved", "layer", "loss")
    # GB where there is one, else MB.
    unit, name = (1e9, "GB") if plan.peak >= 1e9 else (1e6, "MB")
    lines = ["  tokens  examples  rows" + "".join(f"{c:>10}" for c in columns) + f"  peak {name}"]
    for bucket in plan.buckets:
        lines.append(_row(bucket, columns, bucket is plan.worst, unit))
    return lines


def _row(bucket: Bucket, columns: tuple[str, ...], worst: bool, unit: float) -> str:
    numbers = "".join(f"{getattr(bucket.estimate, c) / unit:>10.2f}" for c in columns)
    mark = "" if bucket.fits else "  does not fit"
    mark += "  <- worst" if worst else ""
    peak = f"{bucket.estimate.peak / unit:>9.2f}"
    return f"{bucket.tokens:>8}{bucket.examples:>10}{bucket.case.batch:>6}{numbers}{peak}{mark}"


def report(plan: Plan, model: str, trained: int) -> list[str]:
    """The plan in lines for a person."""
    limit, peak = in_words(plan.limit), in_words(plan.peak)
    lines = [
        f"{model}: {trained / 1e6:.1f} million trained weights, batches of {plan.batch_size}, limit {limit}",
        "",
    ]
    lines += [*_table(plan), ""]
    lines.append(
        "adapters: with their gradients; saved: for the backward pass; layer, loss: in flight, not at one time"
    )
    for line in plan.way.does or ("keeps all activations: nothing is computed twice",):
        lines.append(f"- {line}")
    if plan.longest.where != ANY:
        lines.append(f"longest example: {plan.longest.where}, {plan.longest.tokens} tokens")
    if plan.longest_valid is not None:
        lines.append(f"evaluating {plan.longest_valid.where}, the longest one: {in_words(plan.evaluation)}")
    lines.append(f"training all weights instead: {in_words(plan.full)} before the first activation")
    lines.append(f"fits: {peak} of {limit}" if plan.fits else f"does not fit: {shortfall(plan, plan.peak)}")
    return lines


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--config", "config_file", help="YAML file of a run's settings; options given here come before its own.")
@settings_options(
    "model",
    "data",
    "adapter",
    "optimizer",
    "batch_size",
    "gradient_accumulation_steps",
    "rank",
    "target_modules",
    "gradient_checkpointing",
    "memory_limit",
    "dtype",
    "long_audio",
)
@click.option("--max-length", type=click.IntRange(2, MOST_LENGTH), help="Instead of --data: tokens.  [default: 2048]")
@click.option("--q-bits", type=click.Choice(["4", "8", "none"]), help="Plan for the model converted so.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, sizes in bytes.")
@click.pass_context
def main(
    context: click.Context,
    config_file: Optional[str],
    max_length: Optional[int],
    q_bits: Optional[str],
    as_json: bool,
    **options: Any,
) -> None:
    """Say what memory a training run takes, for each length of example, and whether it fits.

    Nothing is loaded: a folder with a config.json is enough, and google/gemma-3n-E2B-it and -E4B-it are known by name,
    as 4-bit conversions. Exits with 0 where the run fits and with 3 where it does not.
    """
    given = given_settings(options)
    if config_file is not None:
        unless = {"output": NO_DATA} if max_length is None else {"output": NO_DATA, "data": NO_DATA}
        config = TrainConfig.from_yaml(config_file, **{**unless, **given})
    else:
        if "model" not in given:
            raise UserError("--model is missing; give a checkpoint folder or google/gemma-3n-E2B-it")
        config = TrainConfig(**{"data": NO_DATA, "output": NO_DATA, **given})
    model_config, folder = read_model(config.model, q_bits)
    planner = make_planner(config, model_config, config.model)
    # With adapters on the audio tower, clips go through it in each step.
    rows, valid = read_rows(config, model_config, folder, max_length, clips=0 if planner.cached else 1)
    plan = plan_for(config, planner, rows, valid=valid)
    trained = sum(x.size for _, x in tree_flatten(planner.model.trainable_parameters()))
    if as_json:
        click.echo(json.dumps({"model": config.model, "trained_weights": trained, **plan.to_dict()}))
    else:
        click.echo("\n".join(report(plan, config.model, trained)))
    context.exit(0 if plan.fits else DOES_NOT_FIT)


if __name__ == "__main__":
    from mlx_gemma3n.cli import run

    run(main)
