"""The run's settings: what they refuse, their file and options, and the schedule beside transformers' own."""

import ast
import dataclasses

import click
import pytest
import torch
from click.testing import CliRunner
from transformers import get_scheduler

from mlx_gemma3n.config import UserError
from train.config import TrainConfig, parse_size
from train.lora import given_settings, main, settings_options

NEEDED = dict(model="m", data="d", output="o")


def test_defaults_are_valid_and_frozen():
    config = TrainConfig(**NEEDED)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.rank = 3


@pytest.mark.parametrize(
    "field, value, allowed",
    [
        ("model", "", "a path or a name"),
        ("adapter", 3, "a path or a name"),
        ("optimizer", "adam", "one of adamw, sgd"),
        ("learning_rate", 0, "more than 0"),
        ("learning_rate", "fast", "more than 0"),
        ("learning_rate", float("nan"), "more than 0"),
        ("learning_rate", True, "more than 0"),
        ("weight_decay", -0.1, "at least 0"),
        ("warmup_steps", -1, "at least 0"),
        ("warmup_steps", 2.5, "whole number"),
        ("min_lr_rate", 1.5, "at most 1"),
        ("epochs", 0, "whole number from 1 up"),
        ("epochs", None, "whole number from 1 up"),
        ("batch_size", 1.5, "whole number from 1 up"),
        ("batch_size", True, "whole number from 1 up"),
        ("batch_size", float("inf"), "whole number from 1 up"),
        ("max_steps", 0, "whole number from 1 up"),
        ("gradient_accumulation_steps", "two", "whole number from 1 up"),
        ("max_grad_norm", 0, "more than 0"),
        ("rank", -1, "whole number from 1 up"),
        ("lora_alpha", 0, "more than 0"),
        ("lora_dropout", 1.0, "at least 0 and less than 1"),
        ("use_rslora", 1, "true or false"),
        ("gradient_checkpointing", "yes", "one of auto, on, off"),
        ("gradient_checkpointing", 1, "one of auto, on, off"),
        ("gradient_checkpointing", None, "one of auto, on, off"),
        ("memory_limit", "lots", "a size such as 36GB or 900MB"),
        ("memory_limit", 36, "a size such as 36GB or 900MB"),
        ("memory_limit", True, "a size such as 36GB or 900MB"),
        ("preflight", "auto", "one of on, off"),
        ("preflight", 0, "one of on, off"),
        ("target_modules", (), "language, language+audio, or module names"),
        ("target_modules", ("q_proj", 3), "language, language+audio, or module names"),
        ("seed", -1, "whole number from 0 up"),
        ("dtype", "float16", "one of float32, bfloat16"),
        ("steps_per_eval", 0, "whole number from 1 up"),
        ("long_audio", "cut", "one of refuse, split, truncate"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(field, value, allowed):
    with pytest.raises(UserError) as e:
        TrainConfig(**{**NEEDED, field: value})
    assert str(e.value).startswith(f"{field} is {value!r}; ") and allowed in str(e.value)


@pytest.mark.parametrize(
    "text, size",
    [
        ("36GB", 36 * 10**9),
        ("36 GiB", 36 * 2**30),
        ("5.3gb", 5_300_000_000),
        (" 900MB ", 900 * 10**6),
        ("0.5 TiB", 2**39),
        ("1tb", 10**12),
        ("1.5KiB", 1536),
        ("64kb", 64_000),
    ],
)
def test_a_size_in_bytes(text, size):
    assert parse_size(text) == size
    assert TrainConfig(**NEEDED, memory_limit=text).memory_limit_bytes == size


@pytest.mark.parametrize(
    "text",
    [
        *("", "0GB", "0.0004KB", "-1GB", "+1GB", "nan", "nanGB", "infGB", "1e3GB", "lots", "36", "36G", "GB", "3 6GB"),
        *("36GBs", "36,5GB", "36G\u0130B", "9" * 400 + "GB", b"36GB", 36, 36e9, float("nan"), True, None),
    ],
)
def test_what_is_no_size(text):
    with pytest.raises(UserError) as e:
        parse_size(text)
    assert str(e.value) == f"{text!r} is no size; it is a size such as 36GB or 900MB"


def test_the_memory_settings_by_default():
    config = TrainConfig(**NEEDED)
    assert (config.gradient_checkpointing, config.preflight) == ("auto", "on")
    assert config.memory_limit is None and config.memory_limit_bytes is None


@pytest.mark.parametrize("given, value", [(True, "on"), (False, "off"), ("on", "on"), ("off", "off")])
def test_a_switch_is_on_or_off(tmp_path, given, value):
    config = TrainConfig(**NEEDED, gradient_checkpointing=given, preflight=given)
    assert (config.gradient_checkpointing, config.preflight) == (value, value)
    path = tmp_path / "c.yaml"
    path.write_text(config.to_yaml())
    assert TrainConfig.from_yaml(path) == config


def test_a_switch_without_quotes_in_yaml(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("model: m\ndata: d\noutput: o\ngradient_checkpointing: on\npreflight: off\nmemory_limit: 36 GiB\n")
    config = TrainConfig.from_yaml(path)
    assert (config.gradient_checkpointing, config.preflight, config.memory_limit) == ("on", "off", "36 GiB")


def test_yaml_and_back(tmp_path):
    config = TrainConfig(
        **NEEDED,
        target_modules=("q_proj", "audio_tower.post"),
        learning_rate=1e-5,
        max_grad_norm=None,
        dtype="bfloat16",
        memory_limit="5.3gb",
    )
    path = tmp_path / "config.yaml"
    path.write_text(config.to_yaml(), encoding="utf-8")
    assert TrainConfig.from_yaml(path) == config
    assert config.to_yaml().splitlines()[0] == "model: m"


def test_options_come_before_the_file(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("\ufeffmodel: m\r\ndata: d\r\nlearning_rate: 1e-4\r\nrank: 4\r\n", encoding="utf-8")
    config = TrainConfig.from_yaml(path, output="o", rank=8)
    assert (config.learning_rate, config.rank, config.output) == (1e-4, 8, "o")
    with pytest.raises(UserError, match=r"^rank is 0"):
        TrainConfig.from_yaml(path, output="o", rank=0)


@pytest.mark.parametrize(
    "text, message",
    [
        ("model: m\nlearning_rat: 1\n", ":2: no setting is called learning_rat; did you mean learning_rate?"),
        ("model: m\n\nzzz: 1\n", ":3: no setting is called zzz; there are model, data"),
        ("model: m\ndata: d\noutput: o\nrank: many\n", ":4: rank is 'many'; it is a whole number from 1 up"),
        ("model: m\ndata: d\noutput: o\nmemory_limit: 36\n", ":4: memory_limit is 36; it is a size such as 36GB"),
        ("model: m\nmodel: n\n", ":2: model is given twice, first in line 1"),
        ("- model\n", ":1: not a list of settings; each line is `name: value`"),
        ("model: [m\n", ":2: not YAML ("),
        ("model: m\n", ": data is missing; add a line `data: ...` or give --data"),
        ("", ": model is missing"),
    ],
)
def test_a_wrong_file_is_named_with_its_line(tmp_path, text, message):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as e:
        TrainConfig.from_yaml(path)
    assert str(e.value).startswith(f"{path}{message}")
    assert "\n" not in str(e.value)


def test_no_file(tmp_path):
    with pytest.raises(UserError, match="c.yaml: no such file"):
        TrainConfig.from_yaml(tmp_path / "c.yaml")


@pytest.mark.parametrize("warmup, steps", [(0, 40), (7, 40), (0.1, 95), (0, 1), (50, 40)])
def test_the_schedule_is_transformers_after_a_warm_up_that_is_never_zero(warmup, steps):
    config = TrainConfig(**NEEDED, learning_rate=3e-4, warmup_steps=warmup, min_lr_rate=0.2)
    warm = warmup if warmup >= 1 else -int(-warmup * steps // 1)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-4)
    schedule = get_scheduler(
        "cosine_with_min_lr", optimizer, warm, steps, scheduler_specific_kwargs={"min_lr_rate": 0.2}
    )
    ours = [config.learning_rate_at(step, steps) for step in range(steps)]
    for step, rate in enumerate(ours):
        if step >= warm:
            assert rate == pytest.approx(schedule.get_last_lr()[0], rel=1e-9)
        optimizer.step()
        schedule.step()
    rising = ours[: warm + 1]
    assert rising == sorted(rising) and rising[0] > 0 and max(ours) <= 3e-4
    if warm < steps:
        assert ours[warm] == 3e-4


def test_total_steps():
    config = TrainConfig(**NEEDED, epochs=3, gradient_accumulation_steps=4)
    assert config.total_steps(9) == 9  # 4 + 4 + 1 batches, three times
    assert dataclasses.replace(config, max_steps=2).total_steps(9) == 2


def options_of(*names: str) -> click.Command:
    @click.command()
    @settings_options(*names)
    def command(**options):
        click.echo(repr(given_settings(options)))

    return command


def test_an_option_for_every_setting_or_for_the_named():
    every = [option.name for option in options_of().params]
    assert sorted(every) == sorted(TrainConfig.__dataclass_fields__)
    few = options_of("model", "memory_limit", "use_rslora")
    assert [option.name for option in few.params] == ["model", "memory_limit", "use_rslora"]
    text = " ".join(CliRunner().invoke(options_of(), ["--help"], terminal_width=200).output.split())
    assert "--gradient-checkpointing [auto|on|off]" in text and "[default: auto]" in text
    assert "--preflight [on|off]" in text and "--memory-limit TEXT" in text
    assert "--use-rslora / --no-use-rslora" in text and "[default: no]" in text


@pytest.mark.parametrize(
    "args, given",
    [
        ([], {}),
        (
            ["--gradient-checkpointing", "off", "--preflight", "off"],
            dict(gradient_checkpointing="off", preflight="off"),
        ),
        (["--memory-limit", "36 GiB"], dict(memory_limit="36 GiB")),
        (["--no-use-rslora", "--rank", "4"], dict(use_rslora=False, rank=4)),
        (["--use-rslora"], dict(use_rslora=True)),
        (["--max-grad-norm", "0"], dict(max_grad_norm=None)),
        (["--target-modules", "q_proj, v_proj"], dict(target_modules=("q_proj", "v_proj"))),
    ],
)
def test_only_what_is_given_comes_before_a_file(args, given):
    result = CliRunner().invoke(options_of(), args)
    assert result.exit_code == 0, result.output
    options = ast.literal_eval(result.output)
    assert options == given
    TrainConfig(**NEEDED, **options)


@pytest.mark.parametrize("option, value", [("--gradient-checkpointing", "yes"), ("--preflight", "auto")])
def test_an_option_takes_only_its_choices(option, value):
    result = CliRunner().invoke(main, [option, value])
    assert result.exit_code == 2 and value in result.output


def test_an_option_is_held_to_what_its_setting_takes():
    result = CliRunner().invoke(main, ["--model", "m", "--data", "d", "--output", "o", "--memory-limit", "36"])
    assert isinstance(result.exception, UserError)
    assert str(result.exception) == "memory_limit is '36'; it is a size such as 36GB or 900MB"
