"""What a run will do to fit into memory: which batches there will be, what each takes, and what is done about it.

Batches are bucketed by length, so the memory of a run is that of its worst bucket. Where that is over the limit, the
step is changed, never the data and never the result: layers are computed again instead of kept, pieces become smaller,
and a batch goes through in parts, whose gradients are added up to those of the batch.
"""

import math
import os
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Iterator, Optional, Sequence

import mlx.core as mx

from mlx_gemma3n.config import Config
from mlx_gemma3n.names import expected_shapes
from train.batching import IGNORED, padded
from train.data import TrainExample
from train.memory import LOGITS, TOKENS, Case, Estimate, Planner
from train.step import Pieces

# Of a machine's memory, what Apple recommends for the GPU: 36 GB of 48, 5.3 of 8.
RECOMMENDED = 2 / 3
# Where a row is that stands for examples that may come.
ANY = "any example"


@dataclass(frozen=True)
class Row:
    """What of an example counts for memory.

    Attributes:
        tokens: its length, before padding.
        supervised: labels in it.
        clips: of audio in it.
        where: file and line.
    """

    tokens: int
    supervised: int
    clips: int
    where: str


@dataclass(frozen=True)
class Bucket:
    """The examples that are padded to one length.

    Attributes:
        tokens: that length.
        examples: how many there are.
        longest: the longest of them.
        case: the micro-batch that takes the most memory, all of whose rows are of this length.
        estimate: of a step of it.
        fits: whether it is within the limit.
    """

    tokens: int
    examples: int
    longest: Row
    case: Case
    estimate: Estimate
    fits: bool


@dataclass(frozen=True)
class Way:
    """A way to take the steps of a run.

    Attributes:
        pieces: how a micro-batch is cut.
        rows: examples to a micro-batch, at most.
        does: what it does to take less memory, and what that costs in time.
    """

    pieces: Pieces
    rows: int
    does: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """
    Attributes:
        limit: bytes that may be allocated at once.
        batch_size: examples to a batch, as the run asks for.
        way: the first one that fits, or the leanest.
        buckets: in order of length.
        full: bytes that training all weights would take, before any activation: weights, gradients and Adam's moments,
            in bfloat16.
        longest_valid: the longest example to evaluate, if there is one.
        evaluation: bytes that evaluating it takes.
        measured: the worst batch's peak, once it was taken; 0 before.
    """

    limit: int
    batch_size: int
    way: Way
    buckets: tuple[Bucket, ...]
    full: int
    longest_valid: Optional[Row] = None
    evaluation: int = 0
    measured: int = 0

    @property
    def worst(self) -> Bucket:
        return max(self.buckets, key=lambda bucket: bucket.estimate.peak)

    @property
    def longest(self) -> Row:
        return self.buckets[-1].longest

    @property
    def peak(self) -> int:
        return self.worst.estimate.peak

    @property
    def fits(self) -> bool:
        return max(self.peak, self.evaluation) <= self.limit

    def to_dict(self) -> dict[str, Any]:
        """As `plan.json` and `--json` have it; sizes in bytes."""
        values = asdict(self)
        return {"fits": self.fits, "peak": self.peak, "worst": self.worst.tokens, **values}


def in_words(size: int) -> str:
    """Bytes for a person, in GB, MB or kB."""
    if size < 1e6:
        return f"{size / 1e3:.0f} kB"
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def recommended_limit() -> int:
    """The device's recommended working set; two thirds of the machine's memory where it names none."""
    if known := mx.device_info().get("max_recommended_working_set_size"):
        return int(known)
    return int(RECOMMENDED * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


@contextmanager
def held_to(plan: Plan) -> Iterator[None]:
    """MLX's limits for a run of this plan; on leaving, they are as before.

    What is freed is kept for reuse as far as the limit leaves room beside the planned peak. On Metal the weights are
    wired, so that the system does not move them out between steps.
    """
    memory = mx.set_memory_limit(plan.limit)
    cache = mx.set_cache_limit(max(0, plan.limit - plan.peak))
    wired = None
    if mx.metal.is_available():
        wired = mx.set_wired_limit(min(plan.limit, recommended_limit()))
    try:
        yield
    finally:
        mx.set_memory_limit(memory)
        mx.set_cache_limit(cache)
        if wired is not None:
            mx.set_wired_limit(wired)


def rows_of(examples: Sequence[TrainExample], config: Config) -> list[Row]:
    """What of examples counts for memory; a clip that was split counts as its pieces."""
    return [
        Row(
            tokens=len(e.input_ids),
            supervised=int((e.labels[1:] != IGNORED).sum()),
            clips=int((e.input_ids == config.audio_token_id).sum()) // config.audio_soft_tokens_per_image,
            where=e.where,
        )
        for e in examples
    ]


def rows_up_to(max_length: int, batch_size: int, clips: int = 0) -> list[Row]:
    """A batch of each length of a few, the last one `max_length`, all supervised, `clips` in each row."""
    lengths = [n for n in (128, 256, 512, 1024, 2048, 4096, 8192, 16384) if n < max_length]
    return [Row(n, n - 1, clips, ANY) for n in [*lengths, max_length] for _ in range(batch_size)]


def ways(planner: Planner, case: Case, gradient_checkpointing: str) -> Iterator[Way]:
    """Ways to take steps of batches like `case`, the fastest first, each later one leaner.

    Args:
        gradient_checkpointing: `auto`, `on` or `off`.
    """
    pieces = planner.pieces(case)
    least = Pieces(True, TOKENS[0], LOGITS[0])
    again = "computes each layer again in the backward pass: a third to two thirds more time"
    small = f"smaller pieces, {least.tokens} tokens and {least.logits} rows of logits at once: a few per cent more time"
    rows = case.batch
    while True:
        split = ()
        if rows < case.batch:
            split = (f"batches of {case.batch} in parts of {rows}, added up to the same step: little more time",)
        if gradient_checkpointing == "off" or (gradient_checkpointing == "auto" and rows == case.batch):
            yield Way(Pieces(False, pieces.tokens, pieces.logits), rows, split)
        if gradient_checkpointing != "off":
            yield Way(pieces, rows, (again, *split))
            if pieces != least:
                yield Way(least, rows, (again, small, *split))
        if rows == 1:
            return
        rows = -(-rows // 2)


def buckets(
    planner: Planner, rows: Sequence[Row], batch: int, pieces: Pieces, limit: int, another: bool
) -> tuple[Bucket, ...]:
    """The buckets that micro-batches of up to `batch` of these rows fall into; `another` as in `Case`."""
    by_length: dict[int, list[Row]] = {}
    for row in rows:
        by_length.setdefault(padded(row.tokens), []).append(row)
    found, shorter = [], 0
    supervised = clips = 0
    for tokens in sorted(by_length):
        mine = by_length[tokens]
        shorter += len(mine)
        # A batch of this length may be filled up with shorter rows.
        supervised = max(supervised, *(row.supervised for row in mine))
        clips = max(clips, *(row.clips for row in mine))
        count = min(batch, shorter)
        case = Case(count, tokens, count * supervised, count * clips, another)
        estimate = planner.estimate(case, pieces)
        longest = max(mine, key=lambda row: row.tokens)
        found.append(Bucket(tokens, len(mine), longest, case, estimate, estimate.peak <= limit))
    return tuple(found)


def make_plan(
    planner: Planner,
    rows: Sequence[Row],
    batch_size: int,
    gradient_checkpointing: str,
    limit: int,
    accumulates: bool,
    after: Optional[Way] = None,
    valid: Sequence[Row] = (),
) -> Plan:
    """The plan of a run: the first of its ways that fits, or the leanest one, which does not.

    Args:
        rows: of all training examples; at least one.
        accumulates: whether a step has several batches.
        after: only ways leaner than this one.
        valid: rows of the examples to evaluate.
    """
    longest = max(row.tokens for row in rows)
    most, clips = max(row.supervised for row in rows), max(row.clips for row in rows)
    tokens, batch = padded(longest), min(batch_size, len(rows))
    whole = Case(batch, tokens, batch * most, batch * clips)
    chosen, passed = None, after is None
    for way in ways(planner, whole, gradient_checkpointing):
        if not passed:
            passed = way == after
            continue
        chosen = way
        part = min(way.rows, batch)
        case = Case(part, tokens, part * most, part * clips, accumulates or part < batch)
        if planner.estimate(case, way.pieces).peak <= limit:
            break
    chosen = chosen or after
    part = min(chosen.rows, batch)
    found = buckets(planner, rows, part, chosen.pieces, limit, accumulates or part < batch)
    last, evaluation = max(valid, key=lambda row: row.tokens, default=None), 0
    if last is not None:
        together = min(chosen.rows, batch_size, len(valid))
        evaluation = planner.evaluation(last.tokens, together, last.supervised, chosen.pieces)
    return Plan(limit, batch_size, chosen, found, full_fine_tuning(planner.model.config), last, evaluation)


def full_fine_tuning(config: Config) -> int:
    """Bytes of training all weights in bfloat16: weights, gradients and both of Adam's moments; no activations."""
    return 4 * 2 * sum(math.prod(shape) for shape in expected_shapes(config).values())
