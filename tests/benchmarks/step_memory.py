"""Memory and time of one optimizer step at E2B's real widths, ours or mlx-lm's, in a process of its own.

    python tests/benchmarks/step_memory.py --layers 5 --tokens 256
    python tests/benchmarks/step_memory.py --layers 5 --tokens 256 --peer mlx-lm

Both read the same random 4-bit text-only checkpoint with E2B's widths and `--layers` layers, in float32: LoRA of rank 8
on q, k, v, o, gate, up and down, batch 1, the second half of the tokens supervised, AdamW. The peer is mlx-lm with its
own loss, its own compiled step and its own gradient checkpointing, as `mlx_lm.lora --grad-checkpoint` runs them.

The last line is a JSON object: `weights_gb` is what is allocated once the model is there, before its adapters;
`peak_gb` the peak of the first step, optimizer state included; `over_weights_gb` their difference; `planned_gb` the
peak that `train/memory.py` computes from config.json; `seconds` the time of the step. GB are 10^9 bytes.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, Callable

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from mlx_gemma3n.config import read_config  # noqa: E402
from tests.benchmarks.checkpoints import e2b_text, random_checkpoint  # noqa: E402

TARGETS = [f"self_attn.{x}_proj" for x in "qkvo"] + [f"mlp.{x}_proj" for x in ("gate", "up", "down")]
RANK = 8


def random_ids(folder: Path, count: int) -> np.ndarray:
    """Token ids that both tables of the checkpoint have, `[1, count]`."""
    rows = read_config(folder)["text_config"]["vocab_size_per_layer_input"]
    return np.random.default_rng(0).integers(0, rows, (1, count)).astype(np.int32)


def ours(folder: Path, tokens: int) -> tuple[int, float, Callable[[], Any]]:
    """Bytes of the weights, planned peak in bytes, and the step to be taken."""
    from mlx_gemma3n import lora
    from mlx_gemma3n.config import Config
    from mlx_gemma3n.loading import load_model
    from train.batching import Batch
    from train.memory import Case, Planner, skeleton
    from train.step import accumulate, apply

    shape = skeleton(Config.load(folder), mx.float32)
    targets = lora.resolve_targets(shape, "language")
    lora.attach(shape, lora.AdapterConfig(targets, r=RANK))
    planner, case = Planner(shape, moments=2), Case(1, tokens, tokens // 2)
    pieces = planner.pieces(case)
    model = load_model(folder, mx.float32)
    mx.eval(model.parameters())
    mx.clear_cache()
    weights = mx.get_active_memory()
    lora.attach(model, lora.AdapterConfig(targets, r=RANK))
    model.train()
    optimizer = optim.AdamW(1e-4)
    optimizer.init(model.trainable_parameters())
    mx.eval(optimizer.state)
    ids = random_ids(folder, tokens)
    labels = np.where(np.arange(tokens) >= tokens // 2, ids, -100).astype(np.int32)
    batch = Batch(ids, np.ones_like(ids), labels)

    def step() -> float:
        loss, count, gradients = accumulate(model, [batch], lambda model, batch: None, pieces)
        apply(model, optimizer, gradients, 1e-4, 1.0)
        return loss / count

    return weights, planner.estimate(case, pieces).peak, step


def peer(folder: Path, tokens: int) -> tuple[int, float, Callable[[], Any]]:
    """The same of mlx-lm; it plans nothing."""
    from mlx_lm.tuner.trainer import default_loss, grad_checkpoint
    from mlx_lm.tuner.utils import linear_to_lora_layers
    from mlx_lm.utils import load_model

    model, _ = load_model(folder)
    mx.eval(model.parameters())
    mx.clear_cache()
    weights = mx.get_active_memory()
    model.freeze()
    linear_to_lora_layers(model, len(model.layers), {"rank": RANK, "scale": 2.0, "dropout": 0.0, "keys": set(TARGETS)})
    grad_checkpoint(model.layers[0])
    optimizer = optim.AdamW(1e-4)
    value_and_grad = nn.value_and_grad(model, default_loss)
    state = [model.state, optimizer.state, mx.random.state]

    @partial(mx.compile, inputs=state, outputs=state)
    def update(batch: mx.array, lengths: mx.array) -> mx.array:
        (loss, _), gradients = value_and_grad(model, batch, lengths)
        optimizer.update(model, gradients)
        return loss

    model.train()
    ids = random_ids(folder, tokens + 1)

    def step() -> float:
        loss = update(mx.array(ids), mx.array([[tokens // 2 + 1, tokens]]))
        mx.eval(state, loss)
        return loss.item()

    return weights, float("nan"), step


def measure(folder: Path, tokens: int, who: str) -> dict[str, Any]:
    """One step in this process."""
    weights, planned, step = {"ours": ours, "mlx-lm": peer}[who](folder, tokens)
    mx.reset_peak_memory()
    began = time.perf_counter()
    loss = step()
    seconds, peak = time.perf_counter() - began, mx.get_peak_memory()
    return dict(
        who=who,
        tokens=tokens,
        loss=round(loss, 4),
        weights_gb=round(weights / 1e9, 4),
        peak_gb=round(peak / 1e9, 4),
        over_weights_gb=round((peak - weights) / 1e9, 4),
        planned_gb=None if planned != planned else round(planned / 1e9, 4),
        seconds=round(seconds, 1),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--peer", choices=["mlx-lm"], help="measure it instead of us")
    parser.add_argument("--folder", type=Path, help="where the checkpoint is kept for the next call")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.folder, options.tokens, options.measure)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)) / f"e2b-{options.layers}"
        if not (folder / "model.safetensors.index.json").exists():
            random_checkpoint(folder, e2b_text(options.layers))
        command = [sys.executable, __file__, "--folder", str(folder), "--tokens", str(options.tokens)]
        result = subprocess.run(
            [*command, "--measure", options.peer or "ours"], stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT
        )
    print(json.dumps({"layers": options.layers, **json.loads(result.stdout.splitlines()[-1])}))


if __name__ == "__main__":
    main()
