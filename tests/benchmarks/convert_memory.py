"""Peak memory of a conversion whose per-layer table is the real one: 4 GB in bfloat16, [262144, 30 * 256].

The source is a sparse file: it takes no disk and reads as zeros, which quantize as any numbers do. The conversion
runs in a process of its own, whose largest resident set the system counts: interpreter, libraries and all.

    python -m tests.benchmarks.convert_memory [--rows 262144] [--folder DIR]

prints one JSON object, sizes in bytes.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from mlx_gemma3n.config import Config
from mlx_gemma3n.names import expected_shapes, to_hf

ROOT = Path(__file__).parents[2]
MEASURED = """
import json, resource, sys
import mlx.core as mx
from convert.checkpoint import convert
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
convert(sys.argv[1], sys.argv[2])
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
unit = 1 if sys.platform == "darwin" else 1024
print(json.dumps({"peak": after * unit, "imports": before * unit, "mlx_peak": mx.get_peak_memory()}))
"""


def sparse_checkpoint(folder: Path, rows: int, layers: int = 30, hidden_size: int = 64) -> int:
    """A text-only checkpoint, small but for its per-layer table `[rows, layers * 256]`; returns the table's bytes."""
    text: dict[str, Any] = dict(
        vocab_size=512,
        vocab_size_per_layer_input=rows,
        hidden_size=hidden_size,
        hidden_size_per_layer_input=256,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_kv_shared_layers=layers // 3,
    )
    values = {"model_type": "gemma3n_text", "tie_word_embeddings": True, **text}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for path, shape in expected_shapes(Config.from_dict(values)).items():
        begin, end = end, end + 2 * math.prod(shape)
        header[to_hf(path, text_only=True)] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(values))
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        file.truncate(8 + len(encoded) + end)
    return 2 * rows * layers * 256


def measure(source: Path, target: Path) -> dict[str, Any]:
    """Converts in a process of its own."""
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, str(source), str(target)], cwd=ROOT, stdout=subprocess.PIPE, check=True
    )
    return {**json.loads(done.stdout), "seconds": round(time.perf_counter() - begin, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=262_144, help="of the per-layer table")
    parser.add_argument("--folder", help="where to work (a temporary folder by default); needs 0.3 of the table's size")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        table = sparse_checkpoint(Path(folder) / "source", args.rows)
        print(json.dumps({"table": table, **measure(Path(folder) / "source", Path(folder) / "mlx")}))


if __name__ == "__main__":
    main()
