"""`python -m train.plan`: what it prints, how it exits, and that it needs neither weights nor a network."""

import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from mlx_gemma3n.cli import run
from train.data import load_examples
from train.demo import CHECKPOINT, DATA
from train.plan import KNOWN, known_config, main

ROOT = Path(__file__).parents[2]
E2B, E4B = "google/gemma-3n-E2B-it", "google/gemma-3n-E4B-it"
GB = 10**9


def command(*options: Any) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the command, run in this process as the shell runs it."""
    out, error = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(error), pytest.raises(SystemExit) as end:
        run(main, [str(option) for option in options])
    return end.value.code, out.getvalue(), error.getvalue()


def planned(*options: Any) -> dict[str, Any]:
    """The JSON object that it prints, with its exit code as `code`."""
    code, out, error = command(*options, "--json")
    assert not error and out.count("\n") == 1
    return {**json.loads(out), "code": code}


def config_only(folder: Path, **changes: Any) -> Path:
    """A folder with nothing but the demo's config.json, changed."""
    values = {**json.loads((CHECKPOINT / "config.json").read_text()), **changes}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    return folder


@pytest.fixture
def folder(tmp_path) -> Path:
    return config_only(tmp_path / "model")


# What it prints.


def test_a_run_that_fits(folder):
    code, out, error = command("--model", folder, "--max-length", 300, "--memory-limit", "2GB")
    assert code == 0 and not error
    lines = out.splitlines()
    assert lines[0].startswith(f"{folder}: ") and "batches of 4" in lines[0] and lines[0].endswith("limit 2.00 GB")
    assert re.fullmatch(r"fits: \d+\.\d+ [MG]B of 2\.00 GB", lines[-1])
    # A line for each length, the last one the worst.
    table = [line for line in lines if re.match(r" +\d+ +4 +4 ", line)]
    assert [int(line.split()[0]) for line in table] == [128, 256, 320]
    assert [line.endswith("<- worst") for line in table] == [False, False, True]
    assert not any("does not fit" in line for line in lines)
    assert not any(line.startswith("longest example") for line in lines)


def test_a_run_that_does_not_fit(folder):
    worst = planned("--model", folder, "--max-length", 2048, "--memory-limit", "1MB")
    assert worst["code"] == 3 and worst["fits"] is False and worst["way"]["rows"] == 1
    # Half-way between the first length and the last.
    first, last = (worst["buckets"][i]["estimate"]["peak"] for i in (0, -1))
    limit = f"{(first + last) // 2 // 1000}KB"
    code, out, error = command("--model", folder, "--max-length", 2048, "--memory-limit", limit)
    assert code == 3 and not error
    table = [line for line in out.splitlines() if re.match(r" +\d+ +4 +1 ", line)]
    assert "does not fit" not in table[0] and table[-1].endswith("does not fit  <- worst")
    assert out.splitlines()[-1].startswith("does not fit: ") and "with batches in parts of 1: any example" in out


def test_what_it_does_to_fit(folder):
    options = "--model", folder, "--max-length", 512
    free = planned(*options, "--memory-limit", "100GB")
    assert free["way"]["does"] == [] and not free["way"]["pieces"]["checkpointing"]
    assert "keeps all activations" in command(*options, "--memory-limit", "100GB")[1]
    tight = planned(*options, "--memory-limit", f"{free['peak'] // 1000 - 1}KB")
    assert tight["code"] == 0 and tight["way"]["pieces"]["checkpointing"] and tight["peak"] < free["peak"]
    _, out, _ = command(*options, "--memory-limit", f"{tight['peak'] // 1000 - 1}KB")
    assert "- computes each layer again" in out


def test_json(folder):
    values = planned("--model", folder, "--max-length", 200, "--memory-limit", "1GB", "--rank", 4)
    assert values["code"] == 0 and values["fits"] is True and values["limit"] == GB
    assert values["model"] == str(folder) and values["trained_weights"] > 0
    worst = max(values["buckets"], key=lambda bucket: bucket["estimate"]["peak"])
    assert values["peak"] == worst["estimate"]["peak"] and values["worst"] == worst["tokens"] == 224
    double = planned("--model", folder, "--max-length", 200, "--memory-limit", "1GB", "--rank", 8)
    assert double["trained_weights"] == 2 * values["trained_weights"]


def test_the_longest_example_of_the_data():
    file = DATA / "train.jsonl"
    from mlx_gemma3n.processor import Processor

    examples = load_examples(file, Processor.from_pretrained(CHECKPOINT))
    longest = max(examples, key=lambda example: len(example.input_ids))
    options = "--model", CHECKPOINT, "--data", DATA
    values = planned(*options)
    assert values["code"] == 0
    assert sum(bucket["examples"] for bucket in values["buckets"]) == len(examples)
    named = values["buckets"][-1]["longest"]
    assert named["where"] == longest.where and named["tokens"] == len(longest.input_ids)
    assert values["buckets"][-1]["case"]["clips"] == 4
    assert f"longest example: {longest.where}, {named['tokens']} tokens" in command(*options)[1]
    # One file instead of a folder.
    assert planned("--model", CHECKPOINT, "--data", file)["peak"] == values["peak"]


def test_settings_of_a_file_and_of_options(folder, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(f"model: {CHECKPOINT}\ndata: {DATA}\noutput: somewhere\nrank: 4\nbatch_size: 2\n")
    values = planned("--config", file)
    options = "--model", CHECKPOINT, "--data", DATA, "--rank", 4, "--batch-size", 2
    assert values == planned(*options)
    assert planned("--config", file, "--batch-size", 8)["batch_size"] == 8
    assert not Path("somewhere").exists()


def test_the_config_alone_is_enough(folder):
    """It plans the same as for the whole checkpoint, and for one length by default."""
    options = "--max-length", 128, "--memory-limit", "1GB"
    whole, alone = planned("--model", CHECKPOINT, *options), planned("--model", folder, *options)
    assert {**whole, "model": ""} == {**alone, "model": ""}
    assert planned("--model", folder, "--memory-limit", "4GB")["buckets"][-1]["tokens"] == 2048


def test_nothing_is_written_or_fetched(tmp_path):
    """In a process of its own, with an empty home and no way out."""
    blocked = (
        "import socket, sys\n"
        "def refuse(*a, **k): raise SystemExit('reached for the network')\n"
        "socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse\n"
        "import runpy\n"
        "sys.argv = ['train.plan', *sys.argv[1:]]\n"
        "runpy.run_module('train.plan', run_name='__main__')\n"
    )
    home = tmp_path / "home"
    home.mkdir()
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    environment |= {"HOME": str(home), "HF_HOME": str(home / "hub"), "PYTHONPATH": str(ROOT)}
    options = ["--model", E2B, "--max-length", "256", "--memory-limit", "36GB", "--json"]
    done = subprocess.run(
        [sys.executable, "-c", blocked, *options], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["fits"] is True
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


def test_as_a_command(folder):
    base = [sys.executable, "-m", "train.plan", "--model", str(folder), "--max-length", "64", "--memory-limit"]
    for limit, code in (("1GB", 0), ("1MB", 3), ("lots", 2)):
        done = subprocess.run([*base, limit], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == code and "Traceback" not in done.stderr
        assert done.stderr.count("\n") == (code == 2)


# Models.


@pytest.mark.parametrize("name", [E2B, E4B, "google/gemma-3n-E2B", "google/gemma-3n-e4b-it"])
def test_known_by_name(name):
    values = planned("--model", name, *LENGTH, *MAC, "--batch-size", 1)
    assert values["code"] == 0 and values["model"] == name
    # 4 bits by default.
    assert values["buckets"][0]["estimate"]["weights"] < (2.7 if "4b" in name.lower() else 1.5) * GB


def test_names_that_are_not_known():
    assert known_config("google/gemma-3-4b-it") is None and known_config("E2B") is None
    assert known_config("somebody/gemma-3n-E2B-it") is None
    assert set(KNOWN) == {"E2B", "E4B"}


def test_bits_of_a_known_name_and_of_a_folder(tmp_path):
    def weights(model: Any, *options: Any) -> int:
        values = planned("--model", model, "--max-length", 64, "--batch-size", 1, *options)
        return values["buckets"][0]["estimate"]["weights"]

    four, eight, none = (weights(E2B, "--q-bits", bits) for bits in (4, 8, "none"))
    assert weights(E2B) == four < eight < none
    plain = config_only(tmp_path / "plain")
    assert weights(plain) == weights(plain, "--q-bits", "none") > weights(plain, "--q-bits", 8)
    quantized = config_only(tmp_path / "quantized", quantization={"group_size": 64, "bits": 4})
    assert weights(quantized) == weights(plain, "--q-bits", 4) < weights(plain, "--q-bits", 8)


# Bad input: one line, exit code 2.


def refused(*options: Any) -> str:
    code, out, error = command(*options)
    lines = error.splitlines()
    assert code == 2 and not out and len(lines) == 1 and lines[0].startswith("error: "), (code, out, error)
    return lines[0].removeprefix("error: ")


LENGTH = "--max-length", 64


def test_no_such_folder(tmp_path):
    assert refused("--model", tmp_path / "none", *LENGTH).startswith(f"{tmp_path / 'none'}: no such folder")


def test_no_config(tmp_path):
    assert refused("--model", tmp_path, *LENGTH).startswith(f"{tmp_path / 'config.json'}: no such file")


@pytest.mark.parametrize("name", ["google/gemma-3-4b-it", "somebody/their-model"])
def test_a_hub_id_that_is_not_known(name):
    message = refused("--model", name, *LENGTH)
    assert message.startswith(f"{name}: ") and E2B in message and "config.json" in message


@pytest.mark.parametrize(
    "text, reason",
    [
        ('{"model_type": "llama"}', "model_type is 'llama'"),
        ("{}", "model_type is None"),
        ('{"model_type"', "cannot be read as JSON"),
        ("[]", "holds list, not an object"),
        ("", "cannot be read as JSON"),
        ("\x80", "cannot be read as JSON"),
        (
            '{"model_type": "gemma3n", "text_config": {"layer_types": ["full_attention"], "num_hidden_layers": 2}}',
            "layer_types has 1 values for 2 layers",
        ),
    ],
)
@pytest.mark.parametrize("bits", [[], ["--q-bits", 4]])
def test_a_config_that_is_none(tmp_path, text, reason, bits):
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    message = refused("--model", tmp_path, *LENGTH, *bits)
    assert message.startswith(f"{tmp_path / 'config.json'}: ") and reason in message


def test_no_model():
    assert refused().startswith("--model is missing")
    assert refused(*LENGTH).startswith("--model is missing")


def test_data_that_is_none(tmp_path):
    options = "--model", CHECKPOINT, "--data"
    assert refused(*options, tmp_path / "none").startswith(f"{tmp_path / 'none'}: no such file or folder")
    assert refused(*options, tmp_path).startswith(f"{tmp_path / 'train.jsonl'}: no such file")
    (tmp_path / "train.jsonl").write_text("")
    shutil.copy(DATA / "valid.jsonl", tmp_path)
    assert refused(*options, tmp_path).startswith(f"{tmp_path / 'train.jsonl'}: no examples in it")
    (tmp_path / "train.jsonl").write_text('{"messages": []}\n')
    assert refused(*options, tmp_path).startswith(f"{tmp_path / 'train.jsonl'}:1: ")
    (tmp_path / "train.jsonl").write_text((DATA / "train.jsonl").read_text())
    assert refused(*options, tmp_path).startswith(f"{tmp_path / 'train.jsonl'}:1: ")


def test_data_without_a_tokenizer(folder):
    message = refused("--model", E2B, "--data", DATA)
    assert message.startswith(f"{DATA}: ") and "tokenizer" in message and "--max-length" in message
    assert refused("--model", folder, "--data", DATA).startswith(f"{folder}: ")


@pytest.mark.parametrize("length", ["0", "1", "-3", "long"])
def test_lengths_that_are_none(folder, length):
    assert "--max-length" in refused("--model", folder, "--max-length", length)


def test_a_length_and_data():
    message = refused("--model", CHECKPOINT, "--data", DATA, *LENGTH)
    assert message.startswith("--max-length and --data: give one of them")


@pytest.mark.parametrize("limit", ["0", "0GB", "lots", "-5GB", "nan", "nanGB", "infGB", "36", "1e400GB", ""])
def test_limits_that_are_none(folder, limit):
    message = refused("--model", folder, *LENGTH, "--memory-limit", limit)
    assert message == f"memory_limit is {limit!r}; it is a size such as 36GB or 900MB"


@pytest.mark.parametrize("bits", ["4", "8", "none"])
def test_bits_of_what_is_quantized(tmp_path, bits):
    quantized = config_only(tmp_path / "quantized", quantization={"group_size": 64, "bits": 4})
    message = refused("--model", quantized, *LENGTH, "--q-bits", bits)
    assert message.startswith(f"{quantized}: quantized already")


def test_other_options(folder):
    options = "--model", folder, *LENGTH
    assert "--q-bits" in refused(*options, "--q-bits", 5)
    assert "q_prj" in refused(*options, "--target-modules", "q_prj")
    assert "nope" in refused(*options, "--target-modules", "q_proj,nope")
    assert refused(*options, "--rank", 0).startswith("rank is 0;")
    assert refused(*options, "--batch-size", 0).startswith("batch_size is 0;")
    assert refused(*options, "--adapter", folder / "none").startswith(f"{folder / 'none'}")
    assert "--colour" in refused(*options, "--colour", "red")


@pytest.mark.parametrize(
    "text, reason",
    [
        ("rnk: 8\n", ":3: no setting is called rnk; did you mean rank?"),
        ("rank: -3\n", ":3: rank is -3;"),
        ("memory_limit: lots\n", ":3: memory_limit is 'lots';"),
        ("gradient_checkpointing: sometimes\n", ":3: gradient_checkpointing is 'sometimes';"),
        ("rank: [\n", "not YAML"),
    ],
)
def test_a_file_of_settings_that_is_wrong(tmp_path, text, reason):
    file = tmp_path / "run.yaml"
    file.write_text(f"model: {CHECKPOINT}\ndata: {DATA}\n{text}")
    message = refused("--config", file)
    assert message.startswith(f"{file}:") and reason in message


def test_no_file_of_settings(tmp_path):
    assert refused("--config", tmp_path / "none.yaml") == f"{tmp_path / 'none.yaml'}: no such file"


# What was tried on a Mac with 48 GB, whose GPU may take 36 GB.

MAC = "--memory-limit", "36GB", "--dtype", "bfloat16"
AGAIN = "computes each layer again"


def attempt(model: str, *options: Any) -> dict[str, Any]:
    values = planned("--model", model, *MAC, *options)
    assert values["limit"] == 36 * GB
    # What the printed plan says in words.
    code, out, _ = command("--model", model, *MAC, *options)
    assert code == values["code"]
    verdict = "fits" if values["fits"] else "does not fit"
    assert out.splitlines()[-1].startswith(f"{verdict}: {values['peak'] / GB:.2f} GB of 36.00 GB")
    assert f"training all weights instead: {values['full'] / GB:.2f} GB before the first activation" in out
    return values


def test_all_weights_of_e4b_do_not_fit_and_its_adapters_do():
    """Out of memory when the optimizer made its state."""
    values = attempt(E4B)
    assert values["full"] > 36 * GB
    assert values["fits"] and values["code"] == 0 and values["batch_size"] == values["way"]["rows"] == 4


def test_all_weights_of_e4b_do_not_fit_at_batch_size_1_either():
    """The batch size does not change what weights, gradients and moments take, only what comes on top."""
    values = attempt(E4B, "--batch-size", 1)
    assert values["full"] == attempt(E4B)["full"] > 36 * GB
    assert values["fits"] and values["way"]["rows"] == 1
    # And of E2B not.
    assert attempt(E2B, "--batch-size", 1)["full"] > 36 * GB


def test_adapters_of_e4b_fit():
    """The frozen base alone was 59 GB; here it is read once, in the dtype that it is computed in."""
    quantized, plain = attempt(E4B), attempt(E4B, "--q-bits", "none")
    for values, weights in ((quantized, 2.6), (plain, 9.0)):
        assert values["fits"] and values["batch_size"] == values["way"]["rows"] == 4
        assert values["buckets"][-1]["tokens"] == 2048
        assert values["buckets"][-1]["estimate"]["weights"] == pytest.approx(weights * GB, rel=0.01)
        assert any(line.startswith(AGAIN) for line in values["way"]["does"])
    assert 30e6 < quantized["trained_weights"] < 45e6


def test_long_examples_of_e2b_fit():
    """Hours into the run the long ones were too much; here they are the plan."""
    values = attempt(E2B, "--max-length", 4096)
    assert values["fits"] and values["batch_size"] == values["way"]["rows"] == 4
    assert values["worst"] == values["buckets"][-1]["tokens"] == 4096
    assert values["buckets"][-1]["case"]["batch"] == 4
    assert [line for line in values["way"]["does"] if line.startswith(AGAIN)] == values["way"]["does"]
    assert values["peak"] < 12 * GB


@pytest.mark.parametrize(
    "section, name, value",
    [
        ("text_config", "hidden_size", "big"),
        ("text_config", "hidden_size", 0),
        ("text_config", "hidden_size", 10**12),
        ("text_config", "num_key_value_heads", 0),
        ("text_config", "intermediate_size", [64, -1, 64]),
        ("text_config", "sliding_window", 1.5),
        ("text_config", "rms_norm_eps", 0),
        ("text_config", "altup_active_idx", 99),
        ("text_config", "activation_sparsity_pattern", 1.5),
        ("text_config", "rope_parameters", "x"),
        ("audio_config", "sscp_conv_channel_size", [32]),
        ("audio_config", "conf_num_attention_heads", 0),
        (None, "text_config", "x"),
        (None, "text_config", []),
        (None, "quantization", "yes"),
        (None, "quantization", {"bits": 4, "group_size": 48}),
        (None, "quantization", {"bits": 4.5, "group_size": 64}),
        (None, "quantization", {}),
        (None, "audio_token_id", "x"),
        (None, "audio_soft_tokens_per_image", 0),
    ],
)
def test_a_config_that_no_model_has(tmp_path, section, name, value):
    values = {"model_type": "gemma3n", "text_config": {}, "audio_config": {"hidden_size": 64}}
    (values if section is None else values[section])[name] = value
    (tmp_path / "config.json").write_text(json.dumps(values))
    message = refused("--model", tmp_path, "--max-length", 64)
    assert message.startswith(f"{tmp_path / 'config.json'}: ")


def test_sizes_beyond_reason(folder):
    assert "max-length" in refused("--model", folder, "--max-length", 10**9)
    assert "batch_size" in refused("--model", folder, "--max-length", 64, "--batch-size", 10**6)
    assert "rank" in refused("--model", folder, "--max-length", 64, "--rank", 10**16)


def test_a_trained_tower_counts_its_clips_without_data_too(tmp_path):
    """And a clip is as long as the config's placeholders let it be."""
    values = {**known_config("google/gemma-3n-E2B-it"), "quantization": {"group_size": 64, "bits": 4}}
    peaks = {}
    for soft in (188, 20):
        (tmp_path / "config.json").write_text(json.dumps({**values, "audio_soft_tokens_per_image": soft}))
        options = "--model", tmp_path, "--max-length", 256, "--dtype", "bfloat16", "--batch-size", 1
        kept = planned(*options, "--gradient-checkpointing", "on")
        trained = planned(*options, "--gradient-checkpointing", "on", "--target-modules", "language+audio")
        assert kept["buckets"][0]["case"]["clips"] == 0 and trained["buckets"][0]["case"]["clips"] == 1
        # The tower is 0.68 billion weights in bfloat16.
        assert trained["buckets"][0]["estimate"]["weights"] - kept["buckets"][0]["estimate"]["weights"] > 1.3 * GB
        peaks[soft] = trained["peak"]
    assert peaks[20] < peaks[188]
