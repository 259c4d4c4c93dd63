"""How much memory an evaluation takes, from the graph and its shapes alone.

MLX hands out the graph of a function with every array's shape (`mx.export_function` with a callback), without computing
anything or reading a weight. Walking it in order of evaluation and doing what MLX's allocator would do gives the peak:
an operation's output is allocated when the operation is dispatched, unless it is a view of its input or takes over the
memory of an input that nothing else needs; an array is freed when the last operation that reads it has run. Dispatch
runs ahead of the computation by a bounded number of operations, so what is freed comes back that much later.

So the memory of a piece is not a formula that somebody fitted: it follows from the code that will run, whatever its
widths, adapters and types. To run the piece instead, one needs the memory first; `tests/benchmarks/plan_memory.py`
does, and compares. The graph is the CPU's, wherever it is traced: there every operation is spelled out that Metal has
one kernel for, so that a plan is the same on every machine, and on Metal rather too large.
"""

import heapq
import math
from dataclasses import dataclass
from typing import Any, Callable, Sequence

import mlx.core as mx

# Operations that are dispatched before the first of them has run. MLX waits at ten tasks of ten dispatches, and an
# operation is two dispatches: itself, and the release of its inputs.
AHEAD = 50
# A buffer may be taken over by an output that is smaller by this much.
SLACK = 16384

VIEWS = {
    "AsStrided",
    "Broadcast",
    "Copy",
    "Depends",
    "ExpandDims",
    "Slice",
    "Split",
    "Squeeze",
    "StopGradient",
    "Transpose",
    "Unflatten",
}
RESHAPES = {"Flatten", "Reshape"}
# Operations whose output never takes over an input.
OWN = {
    "Arange",
    "ArgReduce",
    "BlockMaskedMM",
    "Concatenate",
    "Convolution",
    "Full",
    "Gather",
    "GatherAxis",
    "LogSumExp",
    "Matmul",
    "Pad",
    "QuantizedMatmul",
    "RandomBits",
    "Reduce",
    "Scan",
    "Sort",
}


@dataclass
class _Buffer:
    """Memory that arrays share.

    Attributes:
        arrays: how many live arrays are in it.
        read: when an operation that reads it was last dispatched.
        given: it is not the evaluation's own: an input, a constant or a weight.
    """

    size: int
    given: bool = False
    arrays: int = 0
    read: int = -(10**9)


@dataclass
class _Array:
    shape: tuple[int, ...]
    itemsize: int
    strides: tuple[int, ...]
    buffer: _Buffer

    @property
    def extent(self) -> int:
        """Bytes of its distinct elements: a broadcast one has fewer than its shape says."""
        return self.itemsize * math.prod(n for n, stride in zip(self.shape, self.strides) if stride)

    @property
    def row_contiguous(self) -> bool:
        return all(n == 1 or s == r for n, s, r in zip(self.shape, self.strides, _row_strides(self.shape)))


def _row_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


def _view_strides(name: str, arguments: Sequence[Any], source: _Array, shape: tuple[int, ...]) -> tuple[int, ...]:
    if name == "Transpose":
        return tuple(source.strides[axis] for axis in arguments[0])
    if name == "Broadcast":
        new = len(shape) - len(source.shape)
        kept = zip(source.shape, source.strides, shape[new:])
        return (0,) * new + tuple(0 if n == 1 and wanted != 1 else stride for n, stride, wanted in kept)
    if name == "Unflatten":
        axis, inner = arguments[0] % len(source.shape), shape[arguments[0] % len(source.shape) :][: len(arguments[1])]
        new = tuple(source.strides[axis] * step for step in _row_strides(inner))
        return source.strides[:axis] + new + source.strides[axis + 1 :]
    if name == "Slice":
        return tuple(stride * step for stride, step in zip(source.strides, arguments[2]))
    if name in ("ExpandDims", "Squeeze"):
        kept = iter([stride for n, stride in zip(source.shape, source.strides) if n != 1])
        return tuple(1 if n == 1 else next(kept) for n in shape)
    return source.strides if len(source.strides) == len(shape) else _row_strides(shape)


def _copied(name: str, inputs: list[_Array], shape: tuple[int, ...]) -> int:
    """Bytes of the copies that an operation makes of inputs whose layout it cannot read; `shape` is its output's."""
    if name == "Convolution":
        # Padded, and then each place's surroundings side by side, for one matrix product.
        x, weight = inputs
        return x.itemsize * (math.prod(x.shape) + math.prod(shape[:-1]) * math.prod(weight.shape[1:]))
    if name == "QuantizedMatmul":
        return 0 if inputs[0].row_contiguous else inputs[0].itemsize * math.prod(inputs[0].shape)
    if name != "Matmul":
        return 0
    size = 0
    for x in inputs[:2]:
        (rows, columns), (by_row, by_column) = x.shape[-2:], x.strides[-2:]
        plain = (by_row == columns or rows == 1) and by_column == 1
        turned = (by_column == rows or columns == 1) and by_row == 1
        size += 0 if plain or turned else x.itemsize * math.prod(x.shape)
    return size


class _Allocator:
    """What is allocated as operations are dispatched."""

    def __init__(self) -> None:
        self.now = self.time = self.peak = 0
        self.returning: list[tuple[int, int]] = []

    def advance(self) -> None:
        self.time += 1
        while self.returning and self.returning[0][0] <= self.time:
            self.now -= heapq.heappop(self.returning)[1]

    def allocate(self, size: int) -> _Buffer:
        self.now += size
        self.peak = max(self.peak, self.now)
        return _Buffer(size)

    def drop(self, array: _Array) -> None:
        buffer = array.buffer
        buffer.arrays -= 1
        if not buffer.arrays and not buffer.given:
            heapq.heappush(self.returning, (max(self.time + 1, buffer.read + AHEAD), buffer.size))

    def scratch(self, size: int) -> None:
        if size:
            self.allocate(size)
            heapq.heappush(self.returning, (self.time + AHEAD, size))


@dataclass(frozen=True)
class Memory:
    """Bytes that an evaluation allocates, its outputs included and its inputs not.

    Attributes:
        peak: the most at once.
        kept: what is left once the first outputs are there, for the others to be computed from.
    """

    peak: int
    kept: int


def trace(function: Callable[..., Any], *inputs: mx.array, first: int = 0) -> Memory:
    """The memory of evaluating `function` of arrays of these shapes.

    Args:
        function: of arrays, gives arrays. What it reads otherwise is a constant, which must be evaluated or else counts
            as part of the graph.
        inputs: their shapes and types count; they are not evaluated.
        first: how many outputs are the first ones that `Memory.kept` speaks of.
    """
    events: list[dict[str, Any]] = []
    with mx.stream(mx.cpu):
        mx.export_function(events.append, function, *inputs)
    operations = [e for e in events if e["type"] == "primitive"]
    waiting: dict[str, int] = {}
    for event in operations:
        for name, *_ in event["inputs"]:
            waiting[name] = waiting.get(name, 0) + 1
    arrays: dict[str, _Array] = {}
    memory = _Allocator()

    def add(name: str, shape: Sequence[int], itemsize: int, strides: tuple[int, ...], buffer: _Buffer) -> None:
        buffer.arrays += 1
        arrays[name] = _Array(tuple(shape), itemsize, strides, buffer)

    missing: set[str] = set()
    for event in events:
        if event["type"] == "outputs":
            missing = {name for name, *_ in event["outputs"][:first]}
            for name, *_ in event["outputs"]:
                waiting[name] = waiting.get(name, 0) + 1
        given = {"inputs": event.get("inputs", []), "constants": event.get("constants", [])}.get(event["type"], [])
        for name, value, *kind in given:
            shape, dtype = (value, kind[0]) if kind else (value.shape, value.dtype)
            add(name, shape, dtype.size, _row_strides(shape), _Buffer(0, given=True))

    kept = 0
    for event in operations:
        memory.advance()
        kind, names = event["name"], [name for name, *_ in event["inputs"]]
        read = [arrays[name] for name in names]
        memory.scratch(_copied(kind, read, tuple(event["outputs"][0][1])))
        for name, shape, dtype in event["outputs"]:
            shape = tuple(shape)
            if kind in VIEWS:
                strides = _view_strides(kind, event["arguments"], read[0], shape)
                add(name, shape, dtype.size, strides, read[0].buffer)
            elif kind in RESHAPES and read[0].row_contiguous:
                add(name, shape, dtype.size, _row_strides(shape), read[0].buffer)
            else:
                _compute(memory, add, kind, name, shape, dtype.size, names, read, waiting)
        made = {id(arrays[name].buffer) for name, *_ in event["outputs"]}
        for name in dict.fromkeys(names):
            if id(arrays[name].buffer) not in made:
                arrays[name].buffer.read = memory.time
            waiting[name] -= names.count(name)
            if not waiting[name]:
                memory.drop(arrays[name])
        for name, *_ in event["outputs"]:
            if not waiting.get(name):
                memory.drop(arrays[name])
        if missing:
            missing -= {name for name, *_ in event["outputs"]}
            if not missing:
                kept = memory.now - sum(size for _, size in memory.returning)
    return Memory(memory.peak, kept)


def _compute(
    memory: _Allocator,
    add: Callable[..., None],
    kind: str,
    name: str,
    shape: tuple[int, ...],
    itemsize: int,
    names: list[str],
    read: list[_Array],
    waiting: dict[str, int],
) -> None:
    """Adds an output that is no view: in an input's memory where it may be, else in new memory."""
    size, strides = itemsize * math.prod(shape), _row_strides(shape)
    takes_over = kind not in OWN and kind not in RESHAPES
    if (
        takes_over
        and len(read) == 1
        and read[0].shape == shape
        and read[0].extent < read[0].itemsize * math.prod(shape)
    ):
        # Of a broadcast array only the distinct elements are computed.
        size, strides = itemsize * read[0].extent // read[0].itemsize, read[0].strides
    for other, x in zip(names, read if takes_over else []):
        free = not x.buffer.given and x.buffer.arrays == 1 and waiting[other] == names.count(other)
        idle = x.buffer.read + AHEAD <= memory.time
        fits = x.itemsize == itemsize and size <= x.buffer.size <= size + SLACK and x.row_contiguous
        if free and idle and fits:
            add(name, shape, itemsize, strides, x.buffer)
            return
    add(name, shape, itemsize, strides, memory.allocate(size))
