"""Greedy decoding against transformers' `generate`, token for token; sampling; the command in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import soundfile
import torch
from click.testing import CliRunner

from mlx_gemma3n.config import UserError
from mlx_gemma3n.generate import generate, main, stream_text
from mlx_gemma3n.processor import SAMPLE_RATE, Processor
from tests.reference import AUDIO_TOKEN, AWKWARD, TEXT_IDS, VOCABULARY, awkward_model, port, save_reference
from train.demo.tokenizer import write_processor

ROOT = Path(__file__).parents[2]
TOKENS = 64
# (model, clips) -> seed of the prompt. With these neither the reference repeats itself nor does rounding decide: the
# test asserts that its likeliest token always leads by ten times the tolerance of the logits.
SEEDS = {
    ("unshared", 0): 0,
    ("unshared", 1): 1,
    ("unshared", 3): 2,
    ("five", 0): 1,
    ("five", 1): 0,
    ("five", 3): 2,
    ("ten", 0): 0,
    ("ten", 1): 2,
    ("ten", 3): 2,
    ("wide_window", 0): 0,
    ("wide_window", 1): 1,
    ("wide_window", 3): 2,
}


def talkative(name: str, **top):
    """A reference model that does not repeat itself.

    With tied embeddings and a positive final norm, the likeliest next token of a random model is the last one again.
    """
    model = awkward_model(name, **top)
    with torch.no_grad():
        weight = model.model.language_model.norm.weight
        weight.copy_(0.3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
    return model


def make_prompt(config, clips: int, seed: int) -> dict[str, np.ndarray]:
    """Text, and clips of different lengths between it."""
    rng = np.random.default_rng(seed)
    words = lambda n: rng.integers(10, TEXT_IDS, n).tolist()  # noqa: E731
    ids = words(9)
    for _ in range(clips):
        soft = [config.audio_token_id] * config.audio_soft_tokens_per_image
        ids += [config.boa_token_id, *soft, config.eoa_token_id, *words(5)]
    if not clips:
        return {"input_ids": np.array(ids)}
    most = config.audio_soft_tokens_per_image * 4 * config.audio_config.conf_reduction_factor
    frames = [int(most * share) for share in (0.9, 0.4, 0.7)[:clips]]
    features = rng.normal(0, 2, (clips, max(frames), config.audio_config.input_feat_size)).astype(np.float32)
    mask = np.arange(max(frames))[None] < np.array(frames)[:, None]
    return {"input_ids": np.array(ids), "input_features": features, "input_features_mask": mask}


def reference_tokens(model, prompt: dict[str, np.ndarray], count: int = TOKENS) -> tuple[list[int], float]:
    """transformers' greedy continuation, and the least lead of a chosen token over the next likeliest."""
    inputs = {k: torch.from_numpy(v[None] if k == "input_ids" else v) for k, v in prompt.items()}
    out = model.generate(
        **inputs,
        do_sample=False,
        max_new_tokens=count,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    first, second = torch.stack(out.logits)[:, 0].topk(2).values.unbind(-1)
    return out.sequences[0, len(prompt["input_ids"]) :].tolist(), (first - second).min().item()


@pytest.fixture(scope="module", params=AWKWARD)
def pair(request):
    model = talkative(request.param)
    return request.param, model, port(model)


@pytest.fixture(scope="module")
def small():
    model = port(talkative("unshared"))
    return model, make_prompt(talkative("unshared").config, 1, 1)


@pytest.mark.parametrize("clips", [0, 1, 3])
def test_greedy_tokens_equal_transformers(pair, clips):
    name, theirs, ours = pair
    prompt = make_prompt(theirs.config, clips, SEEDS[name, clips])
    want, lead = reference_tokens(theirs, prompt)
    assert len(set(want)) >= 9 and lead > 1e-3, (len(set(want)), lead)
    assert list(generate(ours, **prompt, max_tokens=TOKENS)) == want
    # The prompt in pieces, cut inside clips and between them.
    assert list(generate(ours, **prompt, max_tokens=TOKENS, prefill_size=7)) == want


def test_an_answer_ends_with_its_end(small):
    model, prompt = small
    whole = list(generate(model, **prompt, max_tokens=40))
    stop = whole[20]
    until = whole[: whole.index(stop) + 1]
    assert list(generate(model, **prompt, max_tokens=40, eos_token_ids=[stop, VOCABULARY + 5])) == until
    assert list(generate(model, **prompt, max_tokens=3)) == whole[:3]
    assert list(generate(model, **prompt, max_tokens=1, eos_token_ids=(stop,))) == whole[:1]


def test_sampling(small):
    model, prompt = small
    greedy = list(generate(model, **prompt, max_tokens=20))

    def sample(**options):
        return list(generate(model, **prompt, max_tokens=20, **options))

    assert sample(temperature=1.0, seed=3) == sample(temperature=1.0, seed=3)
    assert sample(temperature=1.0, seed=3) != sample(temperature=1.0, seed=4)
    assert sample(temperature=1.0, top_k=1, seed=3) == greedy
    assert sample(temperature=1.0, top_p=1e-6, seed=3) == greedy
    assert sample(temperature=0.0, top_k=5, top_p=0.5, seed=3) == greedy
    # More than there are is all.
    assert sample(temperature=1.0, top_k=VOCABULARY, seed=3) == sample(temperature=1.0, seed=3)


def test_nothing_is_drawn_after_the_end(small):
    """Sampling goes on from where the last token left it, whatever ended the answer before."""
    model, prompt = small

    def draw(**options) -> tuple[list[int], float]:
        mx.random.seed(1)
        return list(generate(model, **prompt, temperature=1.0, **options)), mx.random.uniform().item()

    whole, after = draw(max_tokens=6)
    assert whole[-1] not in whole[:-1]
    assert draw(max_tokens=20, eos_token_ids=whole[-1:]) == (whole, after)


def test_samples_follow_the_probabilities_of_the_model(small):
    model, prompt = small
    ids = prompt["input_ids"][:9]
    logits = np.array(model(mx.array(ids)[None])[0, -1], np.float64)
    probabilities = np.exp(logits - logits.max())
    probabilities /= probabilities.sum()
    likely = np.argsort(-probabilities)[:8]
    mx.random.seed(0)
    draws = [next(generate(model, ids, max_tokens=1, temperature=1.0, top_k=8)) for _ in range(400)]
    assert set(draws) <= set(likely.tolist())
    expected = probabilities[likely] / probabilities[likely].sum()
    found = np.array([draws.count(i) for i in likely]) / len(draws)
    # Four standard deviations of the widest.
    assert np.abs(found - expected).max() < 4 * np.sqrt(0.25 / len(draws))


def test_prompts_that_do_not_fit_their_clips_are_refused(small):
    model, prompt = small
    ids = prompt["input_ids"]
    with pytest.raises(ValueError, match="placeholders"):
        list(generate(model, ids[ids != AUDIO_TOKEN], prompt["input_features"], prompt["input_features_mask"]))
    with pytest.raises(ValueError, match="at least one"):
        list(generate(model, np.zeros(0, np.int32)))


# --- text as it comes ---


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    write_processor(path)
    return path


@pytest.mark.parametrize("text", ["plain words,  two  spaces", "日本語 🌍 ça\n\nvà 👩‍👩‍👧", " leading\n and \n", ""])
def test_streamed_text_is_the_text_in_whole_characters(folder, text):
    processor = Processor.from_pretrained(folder)
    ids = processor.tokenizer(text, add_special_tokens=False)["input_ids"]
    end = processor.tokenizer.convert_tokens_to_ids("<end_of_turn>")
    pieces = list(stream_text(processor, [*ids, end]))
    assert "".join(pieces) == processor.decode(ids) == text
    assert not any("\ufffd" in piece for piece in pieces) and len(pieces) >= min(len(text), 2)


# --- the command ---


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A whole Hugging Face folder; its model speaks the tokenizer's ids."""
    path = tmp_path_factory.mktemp("checkpoint")
    save_reference(talkative("five"), path)
    write_processor(path)
    own = json.loads((path / "processor_config.json").read_text())
    (path / "processor_config.json").write_text(json.dumps({**own, "audio_seq_length": 20}))
    soundfile.write(path / "clip.wav", 0.1 * np.sin(np.arange(12_000) ** 1.2), 8_000)
    soundfile.write(path / "long.wav", np.zeros(3 * SAMPLE_RATE), SAMPLE_RATE)
    (path / "text.wav").write_text("not a sound")
    return path


def command(*arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "mlx_gemma3n.generate", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_command_prints_what_transformers_generates(checkpoint):
    clip = checkpoint / "clip.wav"
    done = command("--model", checkpoint, "--audio", clip, "--audio", clip, "--prompt", "Say it.", "--max-tokens", 24)
    assert done.returncode == 0, done.stderr
    processor = Processor.from_pretrained(checkpoint)
    content = [{"type": "audio", "audio": str(clip)}] * 2 + [{"type": "text", "text": "Say it."}]
    example = processor([{"role": "user", "content": content}], add_generation_prompt=True)
    prompt = {k: v for k, v in vars(example).items() if k != "labels"}
    prompt["input_ids"] = prompt["input_ids"].astype(np.int64)
    want, _ = reference_tokens(talkative("five"), prompt, 24)
    ends = [i for i, token in enumerate(want) if token in processor.eos_token_ids]
    assert done.stdout == processor.decode(want[: ends[0]] if ends else want) + "\n"
    assert done.stderr == ""


def test_the_command_streams(checkpoint):
    """Text is there before the last token is."""
    arguments = ["--model", checkpoint, "--prompt", "Say it.", "--max-tokens", 20_000, "--temperature", 2]
    process = subprocess.Popen(
        [sys.executable, "-m", "mlx_gemma3n.generate", *map(str, arguments)], cwd=ROOT, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout.read(1)
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_bad_input_is_one_line_and_exit_2(checkpoint):
    missing = checkpoint / "missing.wav"
    done = command("--model", checkpoint, "--audio", missing, "--prompt", "Say it.")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: {missing}: no such file\n"


def test_bad_input_is_refused_by_name(checkpoint, tmp_path):
    prompt = ("--prompt", "Say it.")
    for message, arguments in {
        "none: no such checkpoint folder": ("--model", tmp_path / "none", *prompt),
        "text.wav: cannot be read as audio": ("--model", checkpoint, "--audio", checkpoint / "text.wav", *prompt),
        "long.wav: 3.00 s long": ("--model", checkpoint, "--audio", checkpoint / "long.wav", *prompt),
        "<audio_soft_token>": ("--model", checkpoint, "--prompt", "<audio_soft_token>"),
        f"{tmp_path}.*adapter": ("--model", checkpoint, "--adapter", tmp_path, *prompt),
    }.items():
        with pytest.raises(UserError, match=message):
            main.main([str(a) for a in arguments], standalone_mode=False)
    for arguments in (prompt, ("--model", checkpoint), ("--model", checkpoint, *prompt, "--temperature", "-1")):
        assert CliRunner().invoke(main, [str(a) for a in arguments]).exit_code == 2


@pytest.mark.parametrize("choice", ["split", "truncate"])
def test_long_clips_are_split_or_truncated_on_request(checkpoint, choice):
    options = ("--audio", checkpoint / "long.wav", "--long-audio", choice, "--prompt", "What?", "--max-tokens", 2)
    done = CliRunner().invoke(main, [str(a) for a in ("--model", checkpoint, *options)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
