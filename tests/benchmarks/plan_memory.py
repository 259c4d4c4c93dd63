"""Planned against measured peak memory of a training step, over shapes that differ in everything that counts.

    python tests/benchmarks/plan_memory.py [--only NAME]

For each shape a random checkpoint is written and planned for from its config.json alone; then, in a process of its own,
it is loaded and two optimizer steps are taken, the second one measured. Prints a table, and as its last line one JSON
object with every row and the extremes of planned / measured. GB are 10^9 bytes. Nothing in the plan was fitted to these
shapes or to others: it has no fitted constants.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from mlx_gemma3n import lora  # noqa: E402
from mlx_gemma3n.config import Config  # noqa: E402
from mlx_gemma3n.loading import load_model, release  # noqa: E402
from tests.benchmarks.checkpoints import random_checkpoint  # noqa: E402
from train.batching import Batch  # noqa: E402
from train.memory import Case, Planner, skeleton  # noqa: E402
from train.step import Pieces, accumulate, apply  # noqa: E402
from train.trained_audio import TrainedAudio  # noqa: E402

FULL, SLIDING = "full_attention", "sliding_attention"
# hidden, MLP, heads, key-value heads, head size, per-layer inputs, vocabulary, layers, of which share keys and values
WIDTHS = {
    "narrow": (512, 2048, 8, 2, 64, 128, 32_768, 6, 0),
    "deep": (384, 1024, 4, 1, 96, 64, 16_384, 15, 5),
    "wide": (1024, 4096, 8, 2, 128, 256, 65_536, 4, 0),
    "shared": (768, 3072, 8, 2, 96, 128, 32_768, 10, 4),
}
AUDIO = dict(hidden_size=256, conf_num_attention_heads=8, conf_num_hidden_layers=3, sscp_conv_channel_size=[32, 16])
# name: widths, batch, tokens, supervised share, checkpointing, rank, target modules, bits, clips a row, dtype
SHAPES: dict[str, tuple] = {
    "narrow 1 x 256": ("narrow", 1, 256, 0.5, True, 8, "language", 4, 0, "float32"),
    "narrow 4 x 256": ("narrow", 4, 256, 0.25, True, 16, "language", 4, 0, "float32"),
    "narrow 1 x 1024": ("narrow", 1, 1024, 0.5, True, 8, "language", 8, 0, "float32"),
    "narrow 2 x 160, all kept": ("narrow", 2, 160, 0.5, False, 8, "language", 4, 0, "float32"),
    "narrow 1 x 512, rank 64": ("narrow", 1, 512, 0.1, True, 64, "language", 4, 0, "float32"),
    "narrow 1 x 288, bfloat16": ("narrow", 1, 288, 0.25, True, 16, "language", 4, 0, "bfloat16"),
    "deep 2 x 384": ("deep", 2, 384, 0.5, True, 4, "language", 4, 0, "float32"),
    "deep 1 x 192, all kept": ("deep", 1, 192, 0.5, False, 16, "language", 4, 0, "float32"),
    "deep 3 x 96, q and v": ("deep", 3, 96, 1.0, True, 32, ("q_proj", "v_proj"), None, 0, "float32"),
    "wide 1 x 128": ("wide", 1, 128, 0.5, True, 8, "language", 4, 0, "float32"),
    "wide 2 x 160": ("wide", 2, 160, 0.25, True, 16, "language", 4, 0, "float32"),
    "shared 1 x 448": ("shared", 1, 448, 0.5, True, 16, "language", 4, 0, "float32"),
    "shared 2 x 224, all kept": ("shared", 2, 224, 0.25, False, 8, "language", 4, 0, "float32"),
    "audio cached, 2 x 256": ("narrow", 2, 256, 0.1, True, 16, "language", 4, 1, "float32"),
    "audio trained, 1 x 256": ("narrow", 1, 256, 0.1, True, 16, "language+audio", 4, 1, "float32"),
}
SOFT = 188


def checkpoint(folder: Path, name: str) -> Path:
    widths, *_, bits, clips, dtype = SHAPES[name]
    hidden, mlp, heads, kv_heads, head, per_layer, vocabulary, layers, shared = WIDTHS[widths]
    text = dict(
        hidden_size=hidden,
        intermediate_size=mlp,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head,
        hidden_size_per_layer_input=per_layer,
        vocab_size=vocabulary,
        vocab_size_per_layer_input=vocabulary - 256,
        num_hidden_layers=layers,
        num_kv_shared_layers=shared,
        layer_types=[FULL if i % 3 == 2 else SLIDING for i in range(layers)],
        activation_sparsity_pattern=[0.95 if i < layers // 3 else 0.0 for i in range(layers)],
        sliding_window=128,
    )
    top: dict[str, Any] = {}
    if clips:
        top = dict(
            audio_config=dict(AUDIO, vocab_offset=vocabulary - 128, vocab_size=128),
            audio_token_id=vocabulary - 127,
            audio_soft_tokens_per_image=SOFT,
        )
    return random_checkpoint(folder, text, bits, dtype, **top)


def case(name: str) -> Case:
    _, batch, tokens, share, *_, clips, _ = SHAPES[name]
    return Case(batch, tokens, int(batch * tokens * share), batch * clips)


def plan(folder: Path, name: str) -> tuple[dict[str, Any], Pieces]:
    *_, checkpointing, rank, targets, _, _, dtype = SHAPES[name]
    model = skeleton(Config.load(folder), getattr(mx, dtype))
    lora.attach(model, lora.AdapterConfig(lora.resolve_targets(model, targets), r=rank, lora_alpha=2.0 * rank))
    planner = Planner(model, moments=2, cached=targets != "language+audio")
    pieces = planner.pieces(case(name))
    pieces = Pieces(checkpointing, pieces.tokens, pieces.logits)
    return vars(planner.estimate(case(name), pieces)), pieces


def measure(folder: Path, name: str, pieces: Pieces) -> int:
    """The peak of a step, in this process."""
    shape = case(name)
    *_, rank, targets, _, _, dtype = SHAPES[name]
    model = load_model(folder, getattr(mx, dtype))
    lora.attach(model, lora.AdapterConfig(lora.resolve_targets(model, targets), r=rank, lora_alpha=2.0 * rank))
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 10_000, (shape.batch, shape.tokens)).astype(np.int32)
    audio: Any = lambda model, batch: None
    if shape.clips:
        ids[:, 4 : 4 + SOFT] = model.config.audio_token_id
        features = rng.normal(0, 1, (shape.clips, 3000, model.config.audio_config.input_feat_size)).astype(np.float32)
        mask = np.ones(features.shape[:2], bool)
        audio = TrainedAudio(lambda batch: [(features, mask)])
        if targets == "language":
            soft = mx.random.normal((shape.clips, SOFT, model.config.text_config.hidden_size))
            mx.eval(soft)
            stored = np.array(soft)
            audio = lambda model, batch: mx.array(stored)
            release(model, folder)
    held = model.parameters()
    if targets == "language" and shape.clips:
        held = {name: part for name, part in held.items() if name != "audio_tower"}
    mx.eval(held)
    del held
    model.train()
    labels = np.full(ids.shape, -100, np.int32)
    flat = labels.reshape(-1)
    # The first column has no position before it.
    columns = np.flatnonzero(np.arange(ids.size) % shape.tokens != 0)
    chosen = np.sort(rng.permutation(columns)[: shape.supervised])
    flat[chosen] = ids.reshape(-1)[chosen] % 10_000
    batch = Batch(ids, np.ones_like(ids), labels)
    optimizer = optim.AdamW(1e-4, bias_correction=True)
    optimizer.init(model.trainable_parameters())
    mx.eval(optimizer.state)
    for _ in range(2):
        mx.synchronize()
        mx.clear_cache()
        mx.reset_peak_memory()
        _, _, gradients = accumulate(model, [batch], audio, pieces)
        apply(model, optimizer, gradients, 1e-4, 1.0)
        del gradients
    return mx.get_peak_memory()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="shapes whose name begins so")
    parser.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        folder, name, *numbers = options.measure
        print(measure(Path(folder), name, Pieces(SHAPES[name][4], *map(int, numbers))))
        return
    rows = []
    print(f"{'':<28}{'planned GB':>12}{'measured GB':>12}{'ratio':>8}   worst moment")
    for name in SHAPES:
        if options.only and not name.startswith(options.only):
            continue
        with tempfile.TemporaryDirectory() as temporary:
            folder = checkpoint(Path(temporary) / "checkpoint", name)
            estimate, pieces = plan(folder, name)
            command = [sys.executable, __file__, "--measure", str(folder), name, str(pieces.tokens), str(pieces.logits)]
            result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
        measured = int(result.stdout.splitlines()[-1])
        row = dict(shape=name, planned_gb=round(estimate["peak"] / 1e9, 4), measured_gb=round(measured / 1e9, 4))
        row["weights_gb"] = round(estimate["weights"] / 1e9, 4)
        row["ratio"] = round(estimate["peak"] / measured, 3)
        row["moment"] = estimate["moment"]
        rows.append(row)
        numbers = f"{row['planned_gb']:>12.4f}{row['measured_gb']:>12.4f}{row['ratio']:>8.3f}"
        print(f"{name:<28}{numbers}   {row['moment']}", flush=True)
    ratios = [row["ratio"] for row in rows]
    print(json.dumps({"rows": rows, "lowest": min(ratios), "highest": max(ratios)}))


if __name__ == "__main__":
    main()
