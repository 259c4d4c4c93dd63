"""The demo's recordings: which of Debian's asterisk-core-sounds, who speaks, what they say, and which are held out.

The clips say the words of the phonetic alphabet; a file's name is the letter. The Italian voice uses words of its own
and is left out. Of each word's four recordings one is held out: neither the base nor the adapter ever hears it.
"""

import json
import string
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile
import soxr

SAMPLE_RATE = 16_000
WORDS = dict(
    zip(
        string.ascii_lowercase,
        "alfa bravo charlie delta echo foxtrot golf hotel india juliett kilo lima mike november oscar papa quebec "
        "romeo sierra tango uniform victor whiskey xray yankee zulu".split(),
    )
)
# Folder of the voice in the Debian packages -> name here.
VOICES = {"en_US_f_Allison": "en", "es_MX_f_Allison": "es", "fr_CA_f_June": "fr", "ru_RU_f_IvrvoiceRU": "ru"}
PROMPT = "Which word did I say?"

LICENSE = """\
The clips in this folder are recordings from the Asterisk core sounds, as packaged by Debian
(asterisk-core-sounds-en-wav, -es-wav, -fr-wav, -ru-wav). Changes: resampled from 8 kHz, re-encoded as FLAC and
renamed to LETTER-VOICE.flac; nothing was cut, mixed or denoised.

*-en.flac, *-es.flac   Copyright Allison Smith (http://www.theivrvoice.com)    CC BY-SA 3.0
*-fr.flac              Copyright June Wallack (http://www.junewallack.com)     CC BY-SA 3.0
*-ru.flac              Copyright Maxim Topal (http://www.ivrvoice.ru)          CC BY 3.0

Financial contributions to the recordings: Digium, Inc., Unlimitel, BGM Informatique.
CC BY-SA 3.0: https://creativecommons.org/licenses/by-sa/3.0/
CC BY 3.0: https://creativecommons.org/licenses/by/3.0/
The changed clips are under the licence of their original.
"""


@dataclass(frozen=True)
class Clip:
    letter: str
    voice: str
    wave: np.ndarray

    @property
    def name(self) -> str:
        return f"{self.letter}-{self.voice}.flac"

    @property
    def word(self) -> str:
        return WORDS[self.letter]

    @property
    def held_out(self) -> bool:
        """One voice a word, each voice in turn."""
        voices = list(VOICES.values())
        return voices[string.ascii_lowercase.index(self.letter) % len(voices)] == self.voice


def coach(word: str) -> str:
    """The answer the adapter learns: a format the base has never seen."""
    return f"You said {word}. It starts with {word[0].upper()}."


def read_clips(sounds: Path) -> list[Clip]:
    """The 104 clips under `sounds`, where the Debian packages were unpacked."""
    clips = []
    for folder, voice in VOICES.items():
        for letter in WORDS:
            (path,) = sounds.glob(f"**/{folder}/phonetic/{letter}_p.wav")
            wave, rate = soundfile.read(path, dtype="float32")
            clips.append(Clip(letter, voice, soxr.resample(wave, rate, SAMPLE_RATE)))
    return clips


def write_data(clips: list[Clip], folder: Path) -> None:
    """train.jsonl, valid.jsonl, the clips as FLAC and their licence."""
    (folder / "clips").mkdir(parents=True, exist_ok=True)
    for clip in clips:
        soundfile.write(folder / "clips" / clip.name, clip.wave, SAMPLE_RATE, subtype="PCM_16")
    for name, held_out in (("train.jsonl", False), ("valid.jsonl", True)):
        lines = [json.dumps({"messages": messages(clip)}) for clip in clips if clip.held_out == held_out]
        (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "LICENSE.txt").write_text(LICENSE, encoding="utf-8")


def messages(clip: Clip) -> list[dict]:
    content = [{"type": "audio", "audio": f"clips/{clip.name}"}, {"type": "text", "text": PROMPT}]
    return [{"role": "user", "content": content}, {"role": "assistant", "content": coach(clip.word)}]
