"""Messages and clips into token ids, labels and log-mel features, as transformers' `Gemma3nProcessor` makes them.

Tokenizer, chat template and mel extractor are the checkpoint's own, read through transformers. Its `Gemma3nProcessor`
needs torchvision and is not used. Three things differ from it:

- A clip longer than its placeholders hold (30 s) is an error, where transformers cuts it silently. `long_audio` splits
  or truncates it on request.
- What the chat template drops, or what would break the count of placeholders, is an error.
- Assistant turns come with labels. They are found by rendering the template twice, once with a mark in the place of
  every text, so that no text of a user can pass for a turn.

Neither mlx nor torch is needed: the CUDA trainer and the data check read the same examples.
"""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterable, Optional, Sequence

import numpy as np

# Else transformers prints, where there is no torch, that models will not be available.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

from transformers import AutoTokenizer, PreTrainedTokenizerBase  # noqa: E402
from transformers.models.gemma3n.feature_extraction_gemma3n import Gemma3nAudioFeatureExtractor  # noqa: E402

from mlx_gemma3n.config import Config, UserError  # noqa: E402

IGNORED = -100
SAMPLE_RATE = 16_000
# Where transformers' extractor cuts: 30 s.
MAX_SAMPLES = 480_000
START_OF_TURN, END_OF_TURN = "<start_of_turn>", "<end_of_turn>"
ROLES = ("system", "user", "assistant")
LONG_AUDIO = ("refuse", "split", "truncate")
# Private-use characters around the number of a text, in its place; no template trims or escapes them.
MARK = "\ue000{}\ue001"
MARKS = re.compile("\ue000(\\d+)\ue001")


@dataclass(frozen=True)
class Example:
    """One conversation, ready for the model.

    Args:
        input_ids: int32 `[tokens]`.
        labels: int32 `[tokens]`, aligned with `input_ids`: the id where an assistant wrote it (its `<end_of_turn>`
            too), -100 elsewhere.
        input_features: float32 log-mel `[clips, frames, mel_bins]`, or None without clips.
        input_features_mask: bool `[clips, frames]`, True on valid frames, or None without clips.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    input_features: Optional[np.ndarray] = None
    input_features_mask: Optional[np.ndarray] = None


def load_audio(path: str | Path) -> np.ndarray:
    """A sound file (WAV, FLAC, MP3, Ogg and whatever else libsndfile reads) as float32 mono `[samples]` at 16 kHz.

    Channels are averaged, then resampled by soxr at its high quality: bit for bit `librosa.load(path, sr=16_000)` and
    transformers' `load_audio`, without the seconds that importing librosa takes.

    Raises:
        UserError: the file is missing, empty, not audio, or holds NaN or infinity; the message names it.
    """
    import soundfile
    import soxr

    path = Path(path)
    if not path.exists():
        raise UserError(f"{path}: no such file")
    if path.is_dir():
        raise UserError(f"{path}: is a folder, not a clip")
    if path.stat().st_size == 0:
        raise UserError(f"{path}: the file is empty; record or copy it again")
    try:
        with soundfile.SoundFile(str(path)) as file:
            rate, wave = file.samplerate, file.read(dtype="float32", always_2d=True).T
    except (soundfile.SoundFileError, OSError, RuntimeError, TypeError, ValueError) as e:
        reason = (getattr(e, "error_string", None) or str(e)).strip().rstrip(".")
        raise UserError(f"{path}: cannot be read as audio ({reason}); convert it to WAV or FLAC") from None
    wave = wave.mean(axis=0) if len(wave) > 1 else wave[0]
    if rate != SAMPLE_RATE and len(wave):
        samples = -(-len(wave) * SAMPLE_RATE // rate)
        wave = soxr.resample(wave, rate, SAMPLE_RATE, quality="soxr_hq")
        wave = np.pad(wave, (0, max(0, samples - len(wave))))[:samples]
    return check_wave(np.ascontiguousarray(wave, dtype=np.float32), str(path))


def check_wave(wave: np.ndarray, name: str) -> np.ndarray:
    """`wave` as float32, if it can be a clip: one channel, something in it, finite.

    Raises:
        UserError: it cannot; the message calls it `name`.
    """
    if not isinstance(wave, np.ndarray) or wave.ndim != 1 or not np.issubdtype(wave.dtype, np.floating):
        what = f"{wave.dtype} of shape {list(wave.shape)}" if isinstance(wave, np.ndarray) else type(wave).__name__
        raise UserError(f"{name}: is {what}; a clip is a path, or mono floating-point samples at 16 kHz")
    if not len(wave):
        raise UserError(f"{name}: has no samples; record it again or leave the example out")
    if not np.isfinite(wave).all():
        raise UserError(f"{name}: has samples that are NaN or infinite; write it again or leave the example out")
    return wave.astype(np.float32, copy=False)


def capacity(config: Config, audio_seq_length: int, extractor: Gemma3nAudioFeatureExtractor) -> int:
    """The most samples a clip may have: 480 000, or what `audio_seq_length` soft tokens hold if that is less.

    A frame takes `frame_length + 1` samples and the next comes `hop_length` later; the encoder's strides and its
    reduction then make one soft token of so many frames, rounding up.
    """
    if config.audio_config is None:
        return MAX_SAMPLES
    frames = audio_seq_length * config.audio_config.conf_reduction_factor
    for stride, _ in config.audio_config.sscp_conv_stride_size:
        frames *= stride
    samples = extractor.frame_length + frames * extractor.hop_length
    # The extractor pads to a multiple of 128, and the padding makes frames too.
    return min(MAX_SAMPLES, samples // 128 * 128)


def read_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Checks chat messages, and keeps of them what a chat template reads.

    Raises:
        UserError: something in them is no text and no clip, or is where the model cannot have it.
    """
    if not isinstance(messages, (list, tuple)) or not messages:
        raise UserError("messages: want a list of at least one message, each with 'role' and 'content'")
    checked = []
    for number, message in enumerate(messages, 1):
        where = f"message {number}"
        if not isinstance(message, dict):
            raise UserError(f"{where}: is {type(message).__name__}, not an object with 'role' and 'content'")
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise UserError(f"{where}: role is {role!r}; want one of {', '.join(ROLES)}")
        if isinstance(content, str):
            checked.append({"role": role, "content": content})
            continue
        if not isinstance(content, (list, tuple)) or not content:
            raise UserError(f"{where}: content is {content!r}; want a text or a list of texts and clips")
        parts = [_read_part(part, role, f"{where}, part {i}") for i, part in enumerate(content, 1)]
        checked.append({"role": role, "content": parts})
    return checked


def _read_part(part: Any, role: str, where: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text":
        if not isinstance(part.get("text"), str):
            raise UserError(f"{where}: 'text' is {part.get('text')!r}; want a string")
        return {"type": "text", "text": part["text"]}
    if kind == "audio":
        if role != "user":
            raise UserError(f"{where}: a clip in a turn of the {role}; the model hears only what the user says")
        return {"type": "audio", "audio": part.get("audio")}
    if kind in ("image", "image_url", "video"):
        raise UserError(f"{where}: type {kind!r} is not supported; only text and audio are, so leave it out")
    what = f"type {kind!r} is unknown" if isinstance(part, dict) else f"is {type(part).__name__}, not an object"
    raise UserError(f"{where}: {what}; want {{'type': 'text', 'text': ...}} or {{'type': 'audio', 'audio': path}}")


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, empty if there is no such file."""
    if not path.exists():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise UserError(f"{path}: cannot be read as JSON ({e})") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: holds {type(values).__name__}, not an object")
    return values


@dataclass(frozen=True)
class Processor:
    """Chat messages and clips of a checkpoint into `Example`s.

    Args:
        tokenizer: the checkpoint's, with its chat template.
        feature_extractor: of log-mel features, or None where the checkpoint has none.
        audio_seq_length: placeholders of a clip.
        max_samples: the most samples at 16 kHz that a clip may have.
        eos_token_ids: what ends a generated turn.
    """

    tokenizer: PreTrainedTokenizerBase
    feature_extractor: Optional[Gemma3nAudioFeatureExtractor]
    audio_seq_length: int
    max_samples: int
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> "Processor":
        """Reads the tokenizer and processor files of a checkpoint folder, Hugging Face's or ours.

        Raises:
            UserError: one is missing, unreadable, or contradicts another; the message names it.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise UserError(f"{folder}: no such checkpoint folder")
        config = Config.load(folder) if (folder / "config.json").exists() else Config()
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(folder))
        except Exception as e:  # by the kind of damage: OSError, ValueError, KeyError, tokenizers' own bare Exception
            reason = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
            raise UserError(f"{folder}: no readable tokenizer ({reason}); copy the tokenizer files again") from None
        if not tokenizer.is_fast:
            raise UserError(f"{folder}: no tokenizer.json; only fast tokenizers say which token is whose text")
        if tokenizer.chat_template is None:
            tokenizer.chat_template = _read_json(folder / "chat_template.json").get("chat_template")
        if tokenizer.chat_template is None:
            raise UserError(f"{folder}: no chat template; copy chat_template.jinja of the instruction-tuned checkpoint")

        own = _read_json(folder / "processor_config.json")
        extractor = None
        if "feature_extractor" in own or (folder / "preprocessor_config.json").exists():
            extractor = Gemma3nAudioFeatureExtractor.from_pretrained(str(folder))
        length = own.get("audio_seq_length", config.audio_soft_tokens_per_image)
        if config.audio_config is not None and length != config.audio_soft_tokens_per_image:
            raise UserError(
                f"{folder / 'processor_config.json'}: audio_seq_length is {length}, and audio_soft_tokens_per_image in "
                f"config.json {config.audio_soft_tokens_per_image}; a clip has one number of placeholders"
            )
        soft = getattr(tokenizer, "audio_token_id", None)
        if config.audio_config is not None and extractor is not None and soft != config.audio_token_id:
            raise UserError(
                f"{folder / 'config.json'}: audio_token_id is {config.audio_token_id}, and the tokenizer's {soft}; the "
                f"tokenizer files are another checkpoint's"
            )
        eos = _read_json(folder / "generation_config.json").get("eos_token_id", config.eos_token_id)
        ends = list(eos) if isinstance(eos, (list, tuple)) else [eos]
        ends += [tokenizer.eos_token_id, tokenizer.get_vocab().get(END_OF_TURN)]
        return cls(
            tokenizer=tokenizer,
            feature_extractor=extractor,
            audio_seq_length=length,
            max_samples=capacity(config, length, extractor) if extractor else MAX_SAMPLES,
            eos_token_ids=tuple(sorted({i for i in ends if i is not None})),
        )

    def __call__(
        self,
        messages: Sequence[dict[str, Any]],
        audio: Optional[Sequence[str | Path | np.ndarray]] = None,
        *,
        add_generation_prompt: bool = False,
        long_audio: str = "refuse",
        root: str | Path = ".",
    ) -> Example:
        """
        Args:
            messages: `{"role": ..., "content": ...}`, where the content is a text or a list of
                `{"type": "text", "text": ...}` and `{"type": "audio", "audio": path or samples}`.
            audio: clips instead of those that the messages name: paths, or float mono samples at 16 kHz.
            add_generation_prompt: whether to end with the header of the model's turn.
            long_audio: what to do with a clip that is too long: "refuse" it, "split" it into consecutive clips, each
                with its own placeholders, or "truncate" it.
            root: folder that relative paths start from.

        Raises:
            UserError: messages or a clip cannot be used as they are; the message names which.
        """
        if long_audio not in LONG_AUDIO:
            raise ValueError(f"long_audio {long_audio!r}; want one of {', '.join(LONG_AUDIO)}")
        messages, waves = self._clips(read_messages(messages), audio, Path(root), long_audio)
        text, spans = self._render(messages, add_generation_prompt)
        text, spans = self._expand(text, spans, len(waves))
        input_ids, labels = self._tokenize(text, spans)
        if not waves:
            return Example(input_ids, labels)
        # Nothing else may be passed: max_length, for one, would count samples and cut every clip.
        features = self.feature_extractor(waves, return_tensors="np")
        return Example(input_ids, labels, features["input_features"], features["input_features_mask"].astype(bool))

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        return self.tokenizer.decode(
            list(map(int, ids)), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def _clips(
        self, messages: list[dict[str, Any]], audio: Optional[Sequence], root: Path, long_audio: str
    ) -> tuple[list[dict[str, Any]], list[np.ndarray]]:
        """The messages with a part for every piece of a clip, and the pieces in their order."""
        parts = [part for m in messages if not isinstance(m["content"], str) for part in m["content"]]
        wanted = sum(part["type"] == "audio" for part in parts)
        if audio is not None and len(audio) != wanted:
            raise UserError(f"the messages have room for {wanted} clips and {len(audio)} are given; make them agree")
        if wanted and self.feature_extractor is None:
            raise UserError("a clip for a checkpoint without preprocessor_config.json; it takes text only")
        waves: list[np.ndarray] = []
        expanded, clip = [], 0
        for number, message in enumerate(messages, 1):
            if isinstance(message["content"], str):
                expanded.append(message)
                continue
            content: list[dict[str, Any]] = []
            for part in message["content"]:
                if part["type"] == "text":
                    content.append(part)
                    continue
                source = part["audio"] if audio is None else audio[clip]
                clip += 1
                pieces = self._pieces(source, f"message {number}, clip {clip}", root, long_audio)
                waves += pieces
                content += [{"type": "audio"}] * len(pieces)
            expanded.append({"role": message["role"], "content": content})
        return expanded, waves

    def _pieces(self, source: Any, where: str, root: Path, long_audio: str) -> list[np.ndarray]:
        """A clip as float32 pieces that fit their placeholders."""
        if source is None:
            raise UserError(f"{where}: no clip in 'audio'; want a path")
        if isinstance(source, (str, Path)):
            name, wave = str(root / source), load_audio(root / source)
        else:
            name, wave = where, check_wave(source, where)
        most = self.max_samples
        if len(wave) > most and long_audio == "refuse":
            raise UserError(
                f"{name}: {len(wave) / SAMPLE_RATE:.2f} s long, and a clip holds {most / SAMPLE_RATE:.2f}; cut it, or "
                f"set long audio to 'split' or 'truncate'"
            )
        if long_audio == "truncate":
            wave = wave[:most]
        # The extractor pads to a multiple of 128 and needs one sample more than a frame has.
        if len(wave) <= (shortest := self.feature_extractor.frame_length // 128 * 128):
            raise UserError(
                f"{name}: {len(wave)} samples at 16 kHz; a clip takes more than {shortest}; leave the example out"
            )
        return [wave[i : i + most] for i in range(0, len(wave), most)]

    def _template(self, messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
        from jinja2.exceptions import TemplateError

        try:
            return self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except TemplateError as e:
            raise UserError(f"the chat template refuses the messages: {e}") from None

    def _render(self, messages: list[dict[str, Any]], add_generation_prompt: bool) -> tuple[str, list[tuple[int, int]]]:
        """The conversation as text, and where in it an assistant speaks.

        The template is rendered a second time with a mark for every text. What stands between the marks is the
        template's own, so walking along both tells whose each character is.
        """
        texts: list[str] = []
        owners: list[int] = []

        def mark(text: str, owner: int) -> str:
            forbidden = [getattr(self.tokenizer, name, None) for name in ("audio_token", "image_token")]
            if messages[owner]["role"] == "assistant":
                forbidden += [START_OF_TURN, END_OF_TURN]
            for token in forbidden:
                if token and token in text:
                    raise UserError(f"message {owner + 1}: {token} in a text; leave it out, it is put where it belongs")
            texts.append(text)
            owners.append(owner)
            return MARK.format(len(texts) - 1)

        marked = [
            {
                "role": message["role"],
                "content": mark(message["content"], owner)
                if isinstance(message["content"], str)
                else [p if p["type"] == "audio" else {**p, "text": mark(p["text"], owner)} for p in message["content"]],
            }
            for owner, message in enumerate(messages)
        ]
        text = self._template(messages, add_generation_prompt)
        between = MARKS.split(self._template(marked, add_generation_prompt))
        order = list(map(int, between[1::2]))
        if lost := sorted(set(range(len(texts))) - set(order)):
            where, what = f"message {owners[lost[0]] + 1}", repr(texts[lost[0]][:40])
            raise UserError(f"{where}: the chat template drops {what}; join the message's parts, or leave it out")
        if order != list(range(len(texts))):
            raise UserError("the chat template repeats or reorders texts; is it Gemma 3n's?")

        literals = between[0::2]
        spans: dict[int, tuple[int, int]] = {}
        end = len(literals[0]) if text.startswith(literals[0]) else -1
        for owner, content, literal in zip(owners, texts, literals[1:]):
            start = end
            # Gemma's template strips the text of a turn but not that of the system.
            for content in (content, content.strip()):
                end = start + len(content)
                if start >= 0 and text.startswith(content, start) and text.startswith(literal, end):
                    break
            else:
                raise UserError(f"message {owner + 1}: the chat template rewrites {content[:30]!r}; is it Gemma 3n's?")
            if messages[owner]["role"] == "assistant":
                spans[owner] = (spans[owner][0] if owner in spans else start, end)
            end += len(literal)
        if end != len(text) or not all(text.startswith(END_OF_TURN, last) for _, last in spans.values()):
            raise UserError(f"the chat template does not end each answer with {END_OF_TURN}; is it Gemma 3n's?")
        return text, [(first, last + len(END_OF_TURN)) for first, last in spans.values()]

    def _expand(self, text: str, spans: list[tuple[int, int]], clips: int) -> tuple[str, list[tuple[int, int]]]:
        """Puts all placeholders of a clip where the template puts one, and moves `spans` along."""
        soft = getattr(self.tokenizer, "audio_token", None)
        places = text.count(soft) if soft else 0
        if places != clips:
            raise UserError(f"the chat template makes {places} places for {clips} clips; is it Gemma 3n's?")
        if not clips:
            return text, spans
        full = f"\n\n{self.tokenizer.boa_token}{soft * self.audio_seq_length}{self.tokenizer.eoa_token}\n\n"
        more = len(full) - len(soft)
        moved = [tuple(i + more * text.count(soft, 0, i) for i in span) for span in spans]
        return text.replace(soft, full), moved

    def _tokenize(self, text: str, spans: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
        """`input_ids` of a text, and `labels` that keep those within `spans`."""
        bos = self.tokenizer.bos_token
        encoding = self.tokenizer(
            text,
            # As in transformers: the template has begun the text itself.
            add_special_tokens=not (bos and text.startswith(bos)),
            return_offsets_mapping=True,
        )
        input_ids = np.array(encoding["input_ids"], np.int32)
        starts, ends = np.array(encoding["offset_mapping"]).reshape(-1, 2).T
        labels = np.full_like(input_ids, IGNORED)
        for start, end in spans:
            within = (starts >= start) & (ends <= end) & (starts < ends)
            labels[within] = input_ids[within]
        return input_ids, labels
