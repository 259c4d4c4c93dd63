"""An embedding whose table stays in its file: the rows of a batch are copied out of it, and nothing else is ever read.

The per-layer table is 2.0 of E2B's 5.4 billion parameters and is only ever gathered by row. `nn.Embedding` would hold
all of it (4 GB in bfloat16) to read 15 kB for each token. The price is that ids must be known when the graph is built,
so a decoder cannot build its next step before it has the last one's token.
"""

import mmap
from typing import Optional

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_gemma3n.config import UserError
from mlx_gemma3n.files import StoredTensor

# Of safetensors' types, those of tables: numpy's of the same width (it has no bfloat16) and MLX's.
TYPES = {
    "BF16": (np.uint16, mx.bfloat16),
    "F16": (np.uint16, mx.float16),
    "F32": (np.uint32, mx.float32),
    "U32": (np.uint32, mx.uint32),
    "U8": (np.uint8, mx.uint8),
}


class MappedTensor:
    """A matrix in a safetensors file, mapped into memory and read where it is asked for.

    The file is held open, as `mx.load` holds it for what it has not read: removing it, or moving another one into its
    place, changes nothing.

    Raises:
        UserError: the file is gone or ends within the tensor, or the tensor's type is none of `TYPES`.
    """

    def __init__(self, stored: StoredTensor):
        self.stored = stored
        if stored.dtype not in TYPES:
            raise UserError(f"{stored.file}: {stored.name} is of type {stored.dtype}; a table is {', '.join(TYPES)}")
        try:
            with open(stored.file, "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as e:  # a ValueError where the file is empty
            raise UserError(f"{stored.file}: cannot be opened ({getattr(e, 'strerror', None) or e})") from None
        self._check()
        # Rows lie anywhere. Reading ahead, the system would fetch all of a file for a thousandth of its rows.
        self._map.madvise(mmap.MADV_RANDOM)
        data = np.frombuffer(self._map, np.uint8, stored.nbytes, stored.offset)
        self._rows = data.reshape(stored.shape[0], stored.row_bytes)

    def _check(self) -> None:
        # Reading a mapping past the end of its file would kill the process.
        if self._map.size() < self.stored.offset + self.stored.nbytes:
            raise UserError(f"{self.stored.file}: ends within {self.stored.name}; fetch it again")

    def rows(self, indices: np.ndarray) -> mx.array:
        """Copies rows out: `[count]` indices in range -> `[count, columns]`, in the file's type.

        Raises:
            UserError: the file has become shorter.
        """
        self._check()
        size = self.stored.row_bytes
        # All are asked for before the first is waited for.
        for index in indices.tolist():
            begin = self.stored.offset + size * index
            page = begin - begin % mmap.PAGESIZE
            self._map.madvise(mmap.MADV_WILLNEED, page, begin + size - page)
        numpy_type, mlx_type = TYPES[self.stored.dtype]
        return mx.array(self._rows[indices].view(numpy_type)).view(mlx_type)


class MappedEmbedding(nn.Module):
    """An `nn.Embedding`, or with `scales` an `nn.QuantizedEmbedding`, without the memory, and equal to it to the bit.

    It has no parameters: nothing of it is trained, saved, counted or cast.

    Args:
        weight: `[rows, width]`, or packed `[rows, width * bits / 32]`.
        dtype: that the floating-point tensors are cast to before use, as loading casts a model's.
        scales, biases: of a quantized table, `[rows, width / group_size]`; some modes have no biases.
        group_size, bits, mode: as in `mx.dequantize`.

    Raises:
        UserError: as `MappedTensor`.
    """

    def __init__(
        self,
        weight: StoredTensor,
        dtype: mx.Dtype,
        scales: Optional[StoredTensor] = None,
        biases: Optional[StoredTensor] = None,
        group_size: Optional[int] = None,
        bits: Optional[int] = None,
        mode: str = "affine",
    ):
        super().__init__()
        self.dtype, self.group_size, self.bits, self.mode = dtype, group_size, bits, mode
        self.num_embeddings, columns = weight.shape
        self.dims = columns if scales is None else columns * 32 // bits
        self._weight = MappedTensor(weight)
        self._scales = None if scales is None else MappedTensor(scales)
        self._biases = None if biases is None else MappedTensor(biases)

    def _extra_repr(self) -> str:
        quantized = f", group_size={self.group_size}, bits={self.bits}, mode={self.mode}" if self._scales else ""
        return f"{self.num_embeddings}, {self.dims}{quantized}, {self.dtype}, {self._weight.stored.file.name}"

    def _read(self, tensor: Optional[MappedTensor], indices: np.ndarray) -> Optional[mx.array]:
        if tensor is None:
            return None
        rows = tensor.rows(indices)
        return rows.astype(self.dtype) if mx.issubdtype(rows.dtype, mx.floating) else rows

    def __call__(self, ids: mx.array) -> mx.array:
        """Evaluates `ids` and reads the row of each distinct one: `[...]` -> `[..., width]`, a constant to gradients.

        Raises:
            UserError: the file has become shorter since it was opened.
            ValueError: an id that the table has no row for.
        """
        if not ids.size:
            # mx.dequantize does not take empty arrays.
            return mx.zeros((*ids.shape, self.dims), self.dtype)
        indices, places = np.unique(np.array(ids), return_inverse=True)
        if not 0 <= indices[0] <= indices[-1] < self.num_embeddings:
            wrong = indices[0] if indices[0] < 0 else indices[-1]
            raise ValueError(f"id {wrong} in a table of {self.num_embeddings} rows")
        rows = self._read(self._weight, indices)
        if self._scales is not None:
            scales, biases = self._read(self._scales, indices), self._read(self._biases, indices)
            rows = mx.dequantize(rows, scales, biases, group_size=self.group_size, bits=self.bits, mode=self.mode)
        return rows[mx.array(places.reshape(ids.shape).astype(np.uint32))]
