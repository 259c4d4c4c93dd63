"""The frozen audio tower's output, computed once for each distinct clip and kept on disk.

While the tower is frozen, a clip's soft tokens are the same in every epoch and every run. For E2B a clip of 30 s keeps
188 x 2048 bfloat16 numbers, 770 kB, in exchange for 0.68 billion parameters' forward pass; a thousand clips are 0.8 GB.
A clip shorter than 30 s ends in equal rows (the filler), of which one is kept.

A clip is known by what the tower sees of it: its features, which hold how far it is padded (the extractor pads the
clips of a message to the longest, and that reaches the last frames), and by the tower's own weights. So another
recording under the same name, another checkpoint or another dtype is another entry, and entries never have to be thrown
away.
"""

import hashlib
import io
import json
import logging
import os
import tempfile
from dataclasses import astuple
from pathlib import Path
from typing import Optional

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from mlx_gemma3n.config import UserError
from mlx_gemma3n.model import Gemma3n
from mlx_gemma3n.processor import Processor
from train.batching import Batch
from train.data import TrainExample
from train.piece import own_randomness
from train.trained_audio import encode

# Part of every key: counted up when the same weights come to mean another output.
VERSION = 1

log = logging.getLogger(__name__)


def fingerprint(model: Gemma3n) -> bytes:
    """A digest of what makes soft tokens of features: configuration and weights of the tower and of `embed_audio`."""
    config = model.config
    digest = hashlib.sha256(repr((VERSION, astuple(config.audio_config), config.audio_soft_tokens_per_image)).encode())
    parts = {"audio_tower": model.audio_tower.parameters(), "embed_audio": model.embed_audio.parameters()}
    for name, weight in sorted(tree_flatten(parts)):
        digest.update(repr((name, str(weight.dtype), weight.shape)).encode())
        digest.update(np.array(weight.reshape(-1).view(mx.uint8)).data)
    # The same packed weights mean others at another group size or width.
    digest.update(json.dumps(config.quantization, sort_keys=True).encode())
    return digest.digest()


class AudioCache:
    """Soft tokens of clips by their content, in a folder of one file for each.

    Several runs may use one folder at once: a file appears whole, under a name that its content determines.

    Args:
        folder: made when it is not there.
        model: with a frozen audio tower. Adapters on it or on `embed_audio` would make every entry wrong.
        processor: of the same checkpoint.

    Attributes:
        hits: clips whose soft tokens were there.
        misses: clips that were encoded.

    Raises:
        UserError: the folder cannot be written to.
        ValueError: the tower has trainable parameters.
    """

    def __init__(self, folder: str | Path, model: Gemma3n, processor: Processor):
        if "audio_tower" in model:
            for part in (model.audio_tower, model.embed_audio):
                if any("lora_" in name for name, _ in tree_flatten(part.parameters())):
                    raise ValueError("the audio tower has adapters, so its output changes with every step")
        self.folder, self.model, self.processor = Path(folder), model, processor
        self.hits = self.misses = 0
        self._fingerprint: Optional[bytes] = None
        # The keys of each example's clips, so that only the first epoch decodes them.
        self._keys: dict[str, list[str]] = {}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder):
                pass
        except OSError as e:
            raise UserError(f"{self.folder}: no place for the audio cache ({e.strerror}); name another") from None

    def __call__(self, model: Gemma3n, batch: Batch) -> Optional[mx.array]:
        """The soft tokens of a batch's clips, in order, or None without clips; `model` is the cache's own."""
        soft = [self.soft_tokens(example) for example in batch.examples if example.clips]
        return mx.concatenate(soft) if soft else None

    def soft_tokens(self, example: TrainExample) -> mx.array:
        """The soft tokens of an example's clips, `[clips, audio_soft_tokens_per_image, text_hidden]`.

        Raises:
            UserError: a clip cannot be read, the checkpoint has no audio tower, or the disk is full.
        """
        keys = self._keys.get(example.where)
        found = [self._read(key) for key in keys] if keys else [None]
        if all(rows is not None for rows in found):
            self.hits += len(found)
            return mx.stack(found)

        if "audio_tower" not in self.model:
            raise UserError(f"{example.where}: a clip for a checkpoint without an audio tower; it takes text only")
        features, mask = example.features(self.processor)
        keys = self._keys[example.where] = [self._key(f, m) for f, m in zip(features, mask)]
        rows = {key: self._read(key) for key in dict.fromkeys(keys)}
        new = [key for key in rows if rows[key] is None]
        for key in new:
            clip = keys.index(key)
            # Encoding seeds MLX's generator, and a run must be the same whether its clips are here already or not.
            with own_randomness():
                (rows[key],) = encode(self.model, features[clip : clip + 1], mask[clip : clip + 1])
            self._write(key, rows[key])
        self.misses += len(new)
        self.hits += len(keys) - len(new)
        return mx.stack([rows[key] for key in keys])

    def _key(self, features: np.ndarray, mask: np.ndarray) -> str:
        if self._fingerprint is None:
            self._fingerprint = fingerprint(self.model)
        digest = hashlib.sha256(self._fingerprint + repr(features.shape).encode())
        digest.update(np.ascontiguousarray(features, np.float32).data)
        digest.update(np.ascontiguousarray(mask, np.uint8).data)
        return digest.hexdigest()

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.safetensors"

    def _read(self, key: str) -> Optional[mx.array]:
        """A clip's rows, or None where there are none or the file is damaged."""
        path = self._path(key)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as e:
            log.warning("%s: cannot be read (%s); the clip is encoded again", path, e.strerror)
            return None
        try:
            tensors, metadata = mx.load(io.BytesIO(data), format="safetensors", return_metadata=True)
            rows = tensors["soft_tokens"]
            if metadata.get("sha256") != _checksum(rows):
                raise ValueError("its checksum is another")
            missing = self.model.config.audio_soft_tokens_per_image - rows.shape[0]
            return mx.concatenate([rows, mx.repeat(rows[-1:], missing, axis=0)]) if missing else rows
        except (KeyError, IndexError, ValueError, RuntimeError) as e:
            reason = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
            log.warning("%s: damaged (%s); the clip is encoded again", path, reason)
            return None

    def _write(self, key: str, soft: mx.array) -> None:
        """Writes the rows up to the first of the equal ones at the end."""
        differ = np.flatnonzero(np.array((soft != soft[-1:]).any(axis=-1)))
        rows = soft[: int(differ[-1]) + 2] if len(differ) else soft[:1]
        data = io.BytesIO()
        mx.save_safetensors(data, {"soft_tokens": rows}, metadata={"sha256": _checksum(rows)})
        aside = None
        try:
            descriptor, aside = tempfile.mkstemp(prefix=f".{key[:16]}.", dir=self.folder)
            with os.fdopen(descriptor, "wb") as file:
                file.write(data.getbuffer())
            # Not fsynced: the checksum tells a file that a power cut left half, and a clip can be encoded again.
            os.replace(aside, self._path(key))
        except OSError as e:
            if aside is not None:
                Path(aside).unlink(missing_ok=True)
            raise UserError(
                f"{self._path(key)}: cannot be written ({e.strerror}); make room, or name another audio cache"
            ) from None


def _checksum(rows: mx.array) -> str:
    return hashlib.sha256(np.array(rows.reshape(-1).view(mx.uint8)).data).hexdigest()
