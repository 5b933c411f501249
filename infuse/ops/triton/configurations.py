"""The launch configuration of each kernel (block sizes, warps, splits) as plain functions of the shape.

The sizes follow from the machine code (registers, width of the loads) and from the number of programs that an H200's
132 multiprocessors need to keep the memory busy. They change results only by rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

MULTIPROCESSORS = 132  # of an H100 or H200; an A100 has 108
ACTIVATION_BLOCK = 1024  # values per program of an elementwise kernel: 8 for each of its 128 threads
COMBINED_BLOCK = 512  # outputs per program that sums partial results
DEQUANTIZED_WORDS = 512  # words per program that dequantizes: 16 bytes for each of its 128 threads
# Each program of a product normalises the rows itself: it reads them once more from its multiprocessor's cache, which
# holds 8 rows of 8192 16-bit values. For more rows a separate norm kernel is cheaper.
MOST_NORMED_ROWS = 8
NORMED_VALUES = 4096  # values of a tile of rows that are read at once for the norm
LARGEST_TILE = 64  # rows of x
FEW_TOKENS = 4  # up to here the experts of each token stream their rows
# Formats whose kernels need more registers: their codes are joined of two parts.
HIGH_PARTS = ("int3", "q3_k", "q5_0", "q5_1", "q5_k", "q6_k")
MOST_QUANTIZED_ROWS = 256  # with more rows, dequantize the weight once and use PyTorch's product


@dataclass(frozen=True)
class Tiles:
    """One launch of a product.

    A program computes `outputs` for `rows` rows of x. It processes every `splits`-th step of `depth` inputs (plain) or
    segments (quantized). In a gated product, half of the outputs are gates and half are up values.
    """

    outputs: int
    depth: int
    warps: int
    rows: int = 1
    splits: int = 1
    stages: int = 1


def power_above(size: int) -> int:
    """The smallest power of two that is at least `size`."""
    return 1 << max(size - 1, 0).bit_length()


def row_warps(width: int) -> int:
    """Warps for a program that holds one row of `width` values: eight values per thread, at most 16 warps."""
    return min(max(power_above(width) // 256, 1), 16)


def rows_at_once(width: int) -> int:
    """Short rows, or heads, that one program normalises or rotates: 1024 values or one row."""
    return max(1024 // power_above(width), 1)


def splits_for(programs: int, steps: int, most: int = 16) -> int:
    """Programs per output, so that each multiprocessor has at least one program and each program at least two steps."""
    wanted = -(-MULTIPROCESSORS // max(programs, 1))
    return power_above(max(min(wanted, steps // 2, most), 1)) if wanted > 1 else 1


def norm_block(rows: int, inputs: int) -> int:
    """Columns of a tile of `rows` rows that are read at once for the norm."""
    return min(power_above(inputs), NORMED_VALUES // rows)


def plain_row(outputs: int, inputs: int, element_bytes: int, gated: bool = False) -> Tiles:
    """One row and a plain weight: 16 bytes per thread and output, four outputs at once, eight if gated."""
    warps = 4
    while warps > 1 and warps * 32 * 16 // element_bytes > power_above(inputs):
        warps //= 2
    depth = warps * 32 * 16 // element_bytes
    wide = 8 if gated else 4
    return Tiles(wide, depth, warps, splits=splits_for(-(-outputs // wide), -(-inputs // depth)))


def plain_tiles(rows: int, outputs: int, inputs: int, gated: bool = False) -> Tiles:
    """Up to 16 rows: narrow tiles for many programs, each with four pipeline stages; two tiles if gated."""
    tile, wide = max(power_above(rows), 16), 64 if gated else 32
    return Tiles(wide, 128, 4, tile, splits_for(-(-outputs // wide), -(-inputs // 128)), stages=4)


def quantized_row(outputs: int, segments: int, format: str, words: int) -> Tiles:
    """One row and a weight in `segments` of `words` words: 16 bytes per thread and output.

    Measured on an H200 over the matrices of Llama-3-8B: outputs, warps and stages of the pipeline, for int8, fp8, fp6
    and int4. Others were chosen so that registers suffice: each segment needs those of a scale, too.
    """
    narrow = words < 4 or format in HIGH_PARTS
    wide, warps, stages = {"int8": (4, 1, 3), "fp8": (8, 2, 2), "fp6": (4, 2, 1)}.get(
        format, (4 if narrow else 8, 2, 1)
    )
    depth = max(warps * 32 * min(2 * words, 4) // words, 1)
    depth = min(depth, power_above(segments))
    splits = splits_for(-(-outputs // wide), -(-segments // depth))
    return Tiles(wide, depth, warps, splits=splits, stages=stages)


def quantized_tiles(rows: int, outputs: int, segments: int, format: str, words: int) -> Tiles:
    """Two or more rows: the depth of one tensor-core product is at least 16 words, and no more of short segments."""
    tile = min(max(power_above(rows), 16), LARGEST_TILE)
    packed = format not in ("int8", "fp8")
    wide = 32 if packed and (words < 4 or format in HIGH_PARTS) else 64
    depth = max((min(16 * words, 32) if packed else 64) // words, 1)
    programs = -(-rows // tile) * -(-outputs // wide)
    return Tiles(wide, depth, 4, tile, splits_for(programs, -(-segments // depth)), stages=2 if packed else 3)


def expert_tiles(rows: int, element_bytes: int) -> Tiles:
    """Plain experts with `rows` tokens on average: narrow tiles for few tokens, square ones for many.

    float32 cannot use tensor cores, so there larger tiles gain nothing.
    """
    tile = min(max(power_above(rows), 16), 32 if element_bytes == 4 else 128)
    if tile <= 32:
        return Tiles(32, 256 // element_bytes, 4, tile, stages=4)
    return Tiles(128, 64, 8, tile, stages=3)


@dataclass(frozen=True)
class AttentionTiles:
    """One launch of attention: a program has `rows` (query, head) pairs and reads its keys in steps of `keys`."""

    rows: int
    keys: int
    warps: int
    splits: int
    stages: int


@cache
def attention_tiles(rows: int, places: int, keys: int, row_bytes: int, masked: bool) -> AttentionTiles:
    """`rows` (query, head) pairs for each of `places` (sequence, key head) pairs; each key has `row_bytes` bytes.

    Large tiles with wide keys, masks or biases do not fit the registers of four warps.
    """
    tile = min(max(power_above(rows), 16), 64 if row_bytes <= 512 else 16)
    step = 64 if row_bytes <= 256 else 32
    programs = -(-rows // tile) * places
    wanted = min(2 * MULTIPROCESSORS // programs, -(-keys // step), 64)
    splits = 1 << max(wanted, 1).bit_length() - 1
    warps = 8 if tile == 64 and (row_bytes > 256 or masked) else 4
    return AttentionTiles(tile, step, warps, splits, 2 if row_bytes > 256 else 3)


CONV_TOKENS, CONV_CHANNELS = 32, 64  # of a program at most: 16 values for each of its 128 threads
# Of the state, in registers of each thread. Its products with a key or a query need as many, and a thread has 255.
SCANNED_VALUES = 32
SCANNED_CHANNELS = 32  # of a selective scan: one for each thread of a warp, with all of its states
FEW_SCANNED = 8  # tokens for which reading and writing the state takes longer than computing with it
LARGEST_STATE_WIDTH = 1024  # of keys


@dataclass(frozen=True)
class ScanTiles:
    """One launch of linear attention: a program has `columns` columns of a head's state."""

    columns: int
    warps: int


def scan_warps(values: int) -> int:
    """Of a selective scan whose program has so many values of states; at most 8 warps."""
    return min(max(values // (32 * SCANNED_VALUES), 1), 8)


def scan_tiles(width: int, columns: int, tokens: int) -> ScanTiles:
    """Few tokens: wide rows of the state for the memory. More: one warp, which needs no barrier to sum over keys."""
    padded = power_above(width)
    warps = 4 if tokens <= FEW_SCANNED else max(padded * 4 // (32 * SCANNED_VALUES), 1)
    wide = min(max(32 * warps * SCANNED_VALUES // padded, 4), power_above(columns))
    return ScanTiles(wide, max(min(warps, padded * wide // 32), 1))
