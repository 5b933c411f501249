"""Decode quantized weights from 32-bit words; a matrix product that is also correct under the interpreter.

A row is split into segments of inputs within one group (ops/triton/words.py). In a segment of S inputs, with C codes in
a word, code j of word w is input j * S / C + w: codes at the same position of consecutive words belong to consecutive
values of x.

    int8   4 codes, code + 128
    int4   8 codes, code + 8
    mxfp4  8 codes, unchanged
    fp8    4 codes, unchanged
    fp6    8 low parts (exponent's low two bits, mantissa); after all words of a segment, half as many words of high
           parts (sign, exponent's high bit)
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def dot(a, b, total):
    """total + a @ b in float32. The interpreter multiplies bfloat16 wrongly, so there the operands are converted."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    return tl.dot(a, b, total, input_precision="ieee")


@triton.constexpr_function
def codes_in_word(FORMAT):
    return {"plain": 1, "int8": 4, "fp8": 4, "int4": 8, "mxfp4": 8, "fp6": 8}[FORMAT]


@triton.jit
def half_of(pair, UPPER: tl.constexpr):
    """One of the two float16 values in a 32-bit word, as float32."""
    if UPPER:
        pair = pair >> 16
    return pair.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def value(word, high, J: tl.constexpr, FORMAT: tl.constexpr):
    """Code J of each word minus its offset, as float32. Times `unit` it is exactly the format's value."""
    if FORMAT == "plain":
        return word.to(tl.float32)
    elif (FORMAT == "int8") | (FORMAT == "int4"):
        # Put the code into the mantissa of 2**(23 - AT), then subtract that power and the offset.
        BITS: tl.constexpr = 32 // codes_in_word(FORMAT)
        DOWN: tl.constexpr = (16 if FORMAT == "int8" else 12) if BITS * (J + 1) > 20 else 0
        AT: tl.constexpr = BITS * J - DOWN
        code = ((word >> DOWN if DOWN > 0 else word) & (((1 << BITS) - 1) << AT)) | ((150 - AT) << 23)
        return code.to(tl.float32, bitcast=True) - (2.0 ** (23 - AT) + offset(FORMAT))
    elif FORMAT == "fp8":  # move sign, exponent and mantissa to their bits in float16, whose bias is larger by 8
        pair = word << 8 if J % 2 == 0 else word
        return half_of((pair & -2147450880) | ((pair >> 1) & 0x3F803F80), J >= 2)
    elif FORMAT == "mxfp4":  # the same; the bias is larger by 14
        top = word << (12 - 4 * (J % 4))
        return half_of((top & -2147450880) | ((top >> 3) & 0x0E000E00), J >= 4)
    else:  # fp6: the same; the bias is larger by 12
        low = word << (8 - 4 * (J % 4)) if J % 4 < 2 else word >> (4 * (J % 4) - 8)
        pair = (
            (low & 0x0F000F00)
            | ((high << (14 - 2 * (J % 4))) & -2147450880)
            | ((high << (12 - 2 * (J % 4))) & 0x10001000)
        )
        return half_of(pair, J >= 4)


@triton.jit
def tiny_value(word, high, J: tl.constexpr, FORMAT: tl.constexpr):
    """Code J of each word, including its offset, as a tiny float32, in the fewest instructions.

    x is multiplied by `tiny_scale` to compensate. A float32 with only its lowest 24 bits set is an integer times
    2**-149, also beyond the subnormal range. So one mask extracts a code from a word without a shift. The exponent of
    fp8 goes into that of float32, whose bias is larger by 120.
    """
    if (FORMAT == "int8") | (FORMAT == "int4"):
        BITS: tl.constexpr = 32 // codes_in_word(FORMAT)
        AT: tl.constexpr = BITS * J if BITS * J < 24 else BITS * J - 8
        return ((word if BITS * J < 24 else word >> 8) & (((1 << BITS) - 1) << AT)).to(tl.float32, bitcast=True)
    elif FORMAT == "fp8":
        top = word << (24 - 8 * J) if J < 3 else word
        return ((top >> 4) & -2014314496).to(tl.float32, bitcast=True)
    else:
        return value(word, high, J, FORMAT)


@triton.constexpr_function
def tiny_scale(J, FORMAT):
    """The factor of x for tiny_value J: it gives all products one common factor and allows x up to 2**48."""
    if (FORMAT == "fp6") | (FORMAT == "mxfp4"):
        return 1.0
    bits = 4 if FORMAT == "int4" else 8
    return 2.0 ** (76 if FORMAT == "fp8" else 76 - (bits * J if bits * J < 24 else bits * J - 8))


@triton.constexpr_function
def offset(FORMAT):
    """The offset that is added to a stored integer code."""
    return {"int8": 128.0, "int4": 8.0}.get(FORMAT, 0.0)


@triton.constexpr_function
def unit(FORMAT, TINY):
    """The factor from `value`, or from the products if TINY, to steps of the scale."""
    if TINY:
        return {"int8": 2.0**73, "int4": 2.0**73, "fp8": 2.0**44, "fp6": 2.0**12, "mxfp4": 2.0**14}[FORMAT]
    return {"fp8": 2.0**8, "fp6": 2.0**12, "mxfp4": 2.0**14}.get(FORMAT, 1.0)


@triton.constexpr_function
def zero_unit(FORMAT):
    """The factor from a stored zero point to codes."""
    return 1.0 if FORMAT == "int8" else 0.0625


@triton.jit
def shift_and_offset(zero, group, inside, FORMAT: tl.constexpr):
    """Of groups: what is subtracted from their codes, and what is added to these times the scale, or None.

    `zero` holds zero points; or, in float32, offsets of codes that begin with 0.
    """
    third = tl.load(zero + group, mask=inside, other=0).to(tl.float32)
    if zero.dtype.element_ty == tl.float32:
        return tl.zeros_like(third) - offset(FORMAT), third
    else:
        return third * zero_unit(FORMAT), None
