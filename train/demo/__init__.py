"""The embedded default: a tiny Gemma 3n that hears words, and real recordings to fine-tune it on.

`python -m train.demo.build` made both, from Debian's `asterisk-core-sounds` packages; who speaks, and under which licence,
stands in `data/LICENSE-clips.md`.
"""

from pathlib import Path

CHECKPOINT = Path(__file__).parent / "checkpoint"
DATA = Path(__file__).parent / "data"
