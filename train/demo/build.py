"""Makes the demo's checkpoint and data again: `python -m train.demo.build --sounds DIR`.

DIR is where the Debian packages asterisk-core-sounds-{en,es,fr,ru}-wav were unpacked (`apt-get download`, `dpkg -x`).
Needs the `torch` extra; about 10 minutes on 2 cores. It trains a tiny Gemma 3n, all its parts in place, through
transformers' own classes, and saves a normal Hugging Face checkpoint.

From transformers' own initialisation a model of this size never learns to listen: the loss stops at what text alone can
tell. So every matrix starts by Xavier, and the audio tower is first trained under a classifier of its mean-pooled soft
tokens, then with the decoder on the next-token loss. What it trades: it knows 26 words, six questions, and nothing
else.
"""

import argparse
import shutil
from pathlib import Path

import numpy as np
import soxr
import torch
from torch import nn
from transformers import Gemma3nConfig, Gemma3nForConditionalGeneration, GenerationConfig
from transformers.models.gemma3n.configuration_gemma3n import (
    Gemma3nAudioConfig,
    Gemma3nTextConfig,
    Gemma3nVisionConfig,
)

from mlx_gemma3n.processor import Processor
from train.demo import CHECKPOINT, DATA, tokenizer
from train.demo.clips import PROMPT, SAMPLE_RATE, WORDS, Clip, read_clips, write_data

SOFT_TOKENS = 24
# What the base can answer. The demo's adapter learns another answer to the first.
ANSWERS = {
    PROMPT: "{word}",
    "Say it again.": "You said {word}.",
    "What was it?": "It was {word}.",
    "First letter?": "It starts with {first}.",
    "Letter and word?": "{first} as in {word}.",
    "Spell it.": "{spelled}",
}
HEARING_STEPS, HEARING_BATCH = 450, 32
SPEAKING_STEPS, SPEAKING_BATCH = 600, 16
LETTERS = list(WORDS)


def make_config() -> Gemma3nConfig:
    text = Gemma3nTextConfig(
        vocab_size=tokenizer.TEXT_IDS + tokenizer.VISION_IDS + tokenizer.AUDIO_IDS,
        vocab_size_per_layer_input=tokenizer.TEXT_IDS,
        hidden_size=128,
        hidden_size_per_layer_input=32,
        intermediate_size=256,
        num_hidden_layers=5,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0, 0.0],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        laurel_rank=64,
        sliding_window=64,
        max_position_embeddings=2048,
    )
    audio = Gemma3nAudioConfig(
        vocab_size=tokenizer.AUDIO_IDS,
        vocab_offset=tokenizer.TEXT_IDS + tokenizer.VISION_IDS,
        hidden_size=96,
        conf_num_attention_heads=4,
        conf_num_hidden_layers=4,
        sscp_conv_channel_size=(32, 16),
    )
    vision = Gemma3nVisionConfig(
        architecture="test_resnet", hidden_size=384, vocab_size=tokenizer.VISION_IDS, vocab_offset=tokenizer.TEXT_IDS
    )
    return Gemma3nConfig(
        text_config=text.to_dict(),
        audio_config=audio.to_dict(),
        vision_config=vision.to_dict(),
        audio_soft_tokens_per_image=SOFT_TOKENS,
        vision_soft_tokens_per_image=16,
        audio_token_id=tokenizer.AUDIO_TOKEN,
        boa_token_id=tokenizer.START_OF_AUDIO,
        eoa_token_id=tokenizer.END_OF_AUDIO,
        image_token_id=tokenizer.IMAGE_TOKEN,
        boi_token_id=tokenizer.START_OF_IMAGE,
        eoi_token_id=tokenizer.END_OF_IMAGE,
        eos_token_id=[tokenizer.EOS, tokenizer.END_OF_TURN],
    )


def make_model(seed: int) -> Gemma3nForConditionalGeneration:
    torch.manual_seed(seed)
    model = Gemma3nForConditionalGeneration._from_config(make_config(), attn_implementation="eager").float()
    for name, parameter in model.named_parameters():
        if "vision_tower" not in name and parameter.dim() > 1 and "embed" not in name:
            nn.init.xavier_uniform_(parameter)
        if name.endswith("correct_output_scale"):
            nn.init.ones_(parameter)
    return model


def augment(wave: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Another take of a clip: speed, a spectral tilt, gain, a shift, noise. One in five stays as it is: trained on
    altered clips alone, a model reads clean ones worse."""
    if rng.random() < 0.2:
        return wave
    speed = rng.uniform(0.82, 1.2)
    wave = soxr.resample(wave, SAMPLE_RATE, SAMPLE_RATE / speed).astype(np.float32)
    tilt = rng.uniform(-0.5, 0.5)
    wave = np.concatenate([wave[:1], wave[1:] + tilt * wave[:-1]]) * 10 ** rng.uniform(-0.6, 0.4)
    wave = np.concatenate([np.zeros(rng.integers(0, 3200)), wave, np.zeros(rng.integers(0, 1600))])
    wave = wave + rng.normal(0, 10 ** rng.uniform(-4.5, -2.2), len(wave))
    return np.clip(wave, -1, 1).astype(np.float32)


def features(processor: Processor, waves: list[np.ndarray]) -> dict[str, torch.Tensor]:
    extracted = processor.feature_extractor(waves, return_tensors="np")
    return {name: torch.from_numpy(np.array(extracted[name])) for name in ("input_features", "input_features_mask")}


def mask_bands(mel: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
    """Blanks a band of mel bins and a stretch of time in each clip (SpecAugment, arXiv:1904.08779)."""
    mel = mel.clone()
    for clip in mel:
        if rng.random() < 0.7:
            first, width = rng.integers(0, 110), rng.integers(2, 18)
            clip[:, first : first + width] = clip.mean()
            first, width = rng.integers(0, max(1, len(clip) - 12)), rng.integers(2, 12)
            clip[first : first + width] = clip.mean()
    return mel


def pooled(model: Gemma3nForConditionalGeneration, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The mean of each clip's soft tokens, `[clips, hidden]`."""
    out = model.model.audio_tower(batch["input_features"], ~batch["input_features_mask"])
    soft = model.model.embed_audio(inputs_embeds=out.last_hidden_state)
    valid = (~out.audio_mel_mask)[..., None].float()
    return (soft * valid).sum(1) / valid.sum(1)


def schedule(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    warm = steps // 15
    rate = lambda s: min((s + 1) / warm, 0.05 + 0.95 * 0.5 * (1 + np.cos(np.pi * s / steps)))  # noqa: E731
    return torch.optim.lr_scheduler.LambdaLR(optimizer, rate)


def learn_to_hear(model: Gemma3nForConditionalGeneration, processor: Processor, clips: list[Clip], seed: int) -> None:
    """Trains the audio tower and `embed_audio` under a classifier that is thrown away."""
    rng = np.random.default_rng(seed)
    train, held_out = [c for c in clips if not c.held_out], [c for c in clips if c.held_out]
    head = nn.Linear(model.config.text_config.hidden_size, len(LETTERS))
    learned = [*model.model.audio_tower.parameters(), *model.model.embed_audio.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(learned, lr=1e-3, weight_decay=0.05)
    rates = schedule(optimizer, HEARING_STEPS)
    for step in range(HEARING_STEPS):
        chosen = [train[i] for i in rng.integers(0, len(train), HEARING_BATCH)]
        batch = features(processor, [augment(c.wave, rng) for c in chosen])
        batch["input_features"] = mask_bands(batch["input_features"], rng)
        target = torch.tensor([LETTERS.index(c.letter) for c in chosen])
        loss = nn.functional.cross_entropy(head(pooled(model, batch)), target, label_smoothing=0.05)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()
        rates.step()
        if (step + 1) % 50 == 0:
            with torch.no_grad():
                right = head(pooled(model, features(processor, [c.wave for c in held_out]))).argmax(-1)
            known = sum(LETTERS[i] == c.letter for i, c in zip(right.tolist(), held_out))
            print(f"hearing {step + 1}: loss {loss.item():.3f}, held out {known}/{len(held_out)}", flush=True)


def answer(prompt: str, word: str) -> str:
    return ANSWERS[prompt].format(word=word, first=word[0].upper(), spelled="-".join(word))


def conversation(processor: Processor, wave: np.ndarray, prompt: str, text: str):
    content = [{"type": "audio", "audio": wave}, {"type": "text", "text": prompt}]
    return processor([{"role": "user", "content": content}, {"role": "assistant", "content": text}])


def speaking_batch(processor: Processor, waves: list[np.ndarray], prompts: list[str], answers: list[str]):
    """`(inputs, labels)` of one conversation for each clip."""
    examples = [conversation(processor, w, p, a) for w, p, a in zip(waves, prompts, answers)]
    length = max(len(e.input_ids) for e in examples)
    ids, labels = torch.zeros(len(examples), length, dtype=torch.long), torch.full((len(examples), length), -100)
    for row, example in enumerate(examples):
        count = len(example.input_ids)
        ids[row, :count] = torch.from_numpy(example.input_ids)
        labels[row, :count] = torch.from_numpy(example.labels)
    length = torch.tensor([len(e.input_ids) for e in examples])
    mask = (torch.arange(ids.shape[1])[None] < length[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask, **features(processor, waves)}, labels


def next_token_loss(model, inputs, labels) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean loss, and whether each row is right throughout, which is what greedy decoding would write."""
    logits = model(**inputs).logits[:, :-1]
    target = labels[:, 1:]
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=-100)
    return loss, ((logits.argmax(-1) == target) | (target == -100)).all(-1)


def learn_to_speak(model: Gemma3nForConditionalGeneration, processor: Processor, clips: list[Clip], seed: int) -> None:
    """Trains everything but the vision tower to give the answers of `ANSWERS`."""
    rng = np.random.default_rng(seed + 1)
    train, held_out = [c for c in clips if not c.held_out], [c for c in clips if c.held_out]
    tower = {*model.model.audio_tower.parameters(), *model.model.embed_audio.parameters()}
    rest = [p for n, p in model.named_parameters() if "vision_tower" not in n and p not in tower]
    groups = [{"params": rest, "lr": 1e-3}, {"params": list(tower), "lr": 3e-4}]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.05)
    rates = schedule(optimizer, SPEAKING_STEPS)
    for step in range(SPEAKING_STEPS):
        chosen = [train[i] for i in rng.integers(0, len(train), SPEAKING_BATCH)]
        prompts = [list(ANSWERS)[i] for i in rng.integers(0, len(ANSWERS), len(chosen))]
        waves = [augment(c.wave, rng) for c in chosen]
        answers = [answer(p, c.word) for p, c in zip(prompts, chosen)]
        inputs, labels = speaking_batch(processor, waves, prompts, answers)
        inputs["input_features"] = mask_bands(inputs["input_features"], rng)
        model.train()
        loss, _ = next_token_loss(model, inputs, labels)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_([*rest, *tower], 1.0)
        optimizer.step()
        rates.step()
        if (step + 1) % 50 == 0:
            model.eval()
            with torch.no_grad():
                waves, words = [c.wave for c in held_out], [c.word for c in held_out]
                _, right = next_token_loss(model, *speaking_batch(processor, waves, [PROMPT] * len(waves), words))
            print(f"speaking {step + 1}: loss {loss.item():.3f}, held out {right.sum()}/{len(held_out)}", flush=True)


def build(sounds: Path, checkpoint: Path, data: Path, seed: int = 0) -> None:
    for folder in (checkpoint, data):
        shutil.rmtree(folder, ignore_errors=True)
    clips = read_clips(sounds)
    write_data(clips, data)
    model = make_model(seed)
    model.config.save_pretrained(checkpoint)
    tokenizer.write_processor(checkpoint, SOFT_TOKENS)
    processor = Processor.from_pretrained(checkpoint)
    learn_to_hear(model, processor, clips, seed)
    learn_to_speak(model, processor, clips, seed)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.BOS, pad_token_id=tokenizer.PAD, eos_token_id=[tokenizer.EOS, tokenizer.END_OF_TURN]
    )
    model.eval().to(torch.bfloat16).save_pretrained(checkpoint)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sounds", type=Path, required=True, help="where the Debian packages were unpacked")
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    parser.add_argument("--data", type=Path, default=DATA)
    options = parser.parse_args()
    build(options.sounds, options.checkpoint, options.data)
