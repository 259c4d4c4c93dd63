"""Random checkpoints of any widths, written tensor by tensor as `convert.checkpoint` would write them."""

import json
import math
from pathlib import Path
from typing import Any, Optional

import numpy as np

from convert.checkpoint import is_quantized
from mlx_gemma3n.config import Config
from mlx_gemma3n.files import NewTensor, SafetensorsWriter
from mlx_gemma3n.names import expected_shapes, to_hf

# Of E2B's config.json, what is not transformers' default.
E2B = dict(hidden_size=2048, intermediate_size=8192, vocab_size=262_400, vocab_size_per_layer_input=262_144)
GROUP = 64
ROWS = 1 << 22  # bytes of random numbers made at once
DTYPES = {"float32": ("F32", np.float32), "bfloat16": ("BF16", np.uint16)}


def e2b_text(layers: int) -> dict[str, Any]:
    """The `text_config` of E2B's first `layers` layers: the same share of them shares keys and values, where there is a
    full-attention layer to share those of; sparsity as in E2B's first ten."""
    return dict(
        **E2B,
        num_hidden_layers=layers,
        num_kv_shared_layers=layers // 3 if layers >= 8 else 0,
        activation_sparsity_pattern=[0.95 if i < 10 else 0.0 for i in range(layers)],
    )


def random_checkpoint(
    folder: Path, text: dict[str, Any], bits: Optional[int] = 4, dtype: str = "float32", **top: Any
) -> Path:
    """Writes `folder`: a checkpoint in MLX's layout under transformers' names, which mlx-lm reads too.

    Args:
        text: of `text_config`; what it leaves out is transformers' default.
        bits: of the matrices that conversion quantizes; None for none.
        dtype: of everything else.
        top: of config.json beside `text_config`, such as `audio_config`.
    """
    config = Config.from_dict({"model_type": "gemma3n", "text_config": text, **top})
    # In full, as mlx-lm wants it.
    full = {k: list(v) if isinstance(v, tuple) else v for k, v in vars(config.text_config).items()}
    values = {"model_type": "gemma3n", **top, "text_config": {"model_type": "gemma3n_text", **full}}
    if bits is not None:
        values["quantization"] = {"group_size": GROUP, "bits": bits, "mode": "affine"}
    kind, numbers = DTYPES[dtype]
    tensors, makers = [], {}
    rng = np.random.default_rng(0)

    def real(shape: tuple[int, ...], mean: float, spread: float) -> Any:
        data = rng.normal(mean, spread, shape).astype(np.float32)
        return data if dtype == "float32" else (data.view(np.uint32) >> 16).astype(np.uint16)

    def put(name: str, kind: str, shape: tuple[int, ...], make: Any) -> None:
        tensors.append(NewTensor(name, kind, shape))
        makers[name] = make

    for path, shape in expected_shapes(config).items():
        name = to_hf(path)
        spread = 0.3 if "embed" in path and "projection" not in path else math.prod(shape[1:]) ** -0.5
        if bits is not None and is_quantized(path) and shape[-1] % GROUP == 0:
            module, groups = name.removesuffix(".weight"), (shape[0], shape[1] // GROUP)
            put(name, "U32", (shape[0], shape[1] * bits // 32), lambda s: rng.integers(0, 2**32, s, np.uint32))
            # The packed numbers are uniform, 0 to 2^bits - 1: of mean zero and the wanted spread after this.
            step = spread * math.sqrt(12) / 2**bits
            put(f"{module}.scales", kind, groups, lambda s, step=step: real(s, step, 0.01 * step))
            middle = -step * (2**bits - 1) / 2
            put(f"{module}.biases", kind, groups, lambda s, m=middle: real(s, m, 0.0))
        elif len(shape) == 1:
            put(name, kind, shape, lambda s: real(s, 1.0, 0.1))
        else:
            put(name, kind, shape, lambda s, spread=spread: real(s, 0.0, spread))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    with SafetensorsWriter(folder, tensors, {"format": "mlx"}) as writer:
        for tensor in tensors:
            rows = max(1, ROWS // max(1, 4 * math.prod(tensor.shape[1:])))
            for first in range(0, tensor.shape[0], rows):
                shape = (min(rows, tensor.shape[0] - first), *tensor.shape[1:])
                writer.write(tensor.name, np.ascontiguousarray(makers[tensor.name](shape)).data)
    return folder
