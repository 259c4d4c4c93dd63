"""The embedded default: a tiny Gemma 3n that hears 26 words, and recordings to fine-tune it on. See `build.py`."""

from pathlib import Path

CHECKPOINT = Path(__file__).parent / "checkpoint"
DATA = Path(__file__).parent / "data"
