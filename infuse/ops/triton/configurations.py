"""How each kernel is launched for a shape: block sizes, warps, splits. Read-only; `bench/gpu.py --tune` searches for better rows."""

from __future__ import annotations


def power_above(size: int) -> int:
    """The smallest power of two that is at least `size`."""
    return 1 << max(size - 1, 0).bit_length()


def row_warps(width: int) -> int:
    """Warps for a program that holds one row of `width` values: eight values for each thread, up to 16 warps."""
    return min(max(power_above(width) // 256, 1), 16)


ACTIVATION_BLOCK = 1024  # values for each program of an elementwise kernel: 8 for each of its 128 threads


def rotary_heads(width: int) -> int:
    """Heads that one program turns: 1024 values or one head."""
    return max(1024 // power_above(width), 1)
