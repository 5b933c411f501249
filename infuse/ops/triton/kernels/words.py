"""Decode quantized weights from 32-bit words; a matrix product that is also correct under the interpreter.

A row is split into segments of inputs within one group (ops/triton/words.py). In a segment of S inputs, with C codes in
a word, code j of word w is input j * S / C + w: codes at the same position of consecutive words belong to consecutive
values of x. Integers are stored unsigned, with an offset added (`offset`).

    int8                   4 codes
    int4, q4_1, q4_k       8 codes
    q5_0, q5_1, q5_k       8 low parts of 4 bits; behind all words of a row, for each of them 8 high parts of one bit
    q6_k                   the same, with 8 high parts of 2 bits
    int2, q2_k             16 codes
    int3, q3_k             16 low parts of 2 bits, and 16 high parts of one bit
    mxfp4                  8 codes, unchanged
    fp8                    4 codes, unchanged
    fp6                    8 low parts (exponent's low two bits, mantissa); after all words of a segment, half as many
                           words of high parts (sign, exponent's high bit)
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
def low_bits(FORMAT):
    """Bits of a code, or of its low part, in a word."""
    return {"int8": 8, "fp8": 8, "int3": 2, "int2": 2, "q2_k": 2, "q3_k": 2}.get(FORMAT, 4)


@triton.constexpr_function
def high_bits(FORMAT):
    """Bits of an integer code's high part."""
    return {"int3": 1, "q3_k": 1, "q5_0": 1, "q5_1": 1, "q5_k": 1, "q6_k": 2}.get(FORMAT, 0)


@triton.constexpr_function
def is_integer(FORMAT):
    return FORMAT not in ("plain", "fp8", "fp6", "mxfp4")


@triton.constexpr_function
def codes_in_word(FORMAT):
    return 1 if FORMAT == "plain" else 32 // low_bits(FORMAT)


@triton.jit
def load_words(start, segment, word, inputs, inside, FORMAT: tl.constexpr, SEGMENT: tl.constexpr):
    """Words of segments of rows that begin at `start`, and their high parts in the lowest bits, if there are any."""
    CODES: tl.constexpr = codes_in_word(FORMAT)
    WORDS: tl.constexpr = SEGMENT // CODES
    if FORMAT == "fp6":
        at = start + segment * (WORDS + WORDS // 2)
        words = tl.load(at + word, mask=inside, other=0)
        high = tl.load(at + WORDS + word % (WORDS // 2), mask=inside, other=0) >> (8 * (word // (WORDS // 2)))
    else:
        at = segment * WORDS + word
        words = tl.load(start + at, mask=inside, other=0)
        high = words
        if high_bits(FORMAT) > 0:
            BITS: tl.constexpr = CODES * high_bits(FORMAT)  # of the high parts of one word
            EACH: tl.constexpr = 32 // BITS
            high = tl.load(start + inputs // CODES + at // EACH, mask=inside, other=0) >> (BITS * (at % EACH))
    return words, high


@triton.jit
def half_of(pair, UPPER: tl.constexpr):
    """One of the two float16 values in a 32-bit word, as float32."""
    if UPPER:
        pair = pair >> 16
    return pair.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def code_at(word, high, J: tl.constexpr, FORMAT: tl.constexpr, DOWN: tl.constexpr):
    """The integer code J of each word where its low part is after moving the word down."""
    LOW: tl.constexpr = low_bits(FORMAT)
    HIGH: tl.constexpr = high_bits(FORMAT)
    AT: tl.constexpr = LOW * J - DOWN
    code = (word >> DOWN if DOWN > 0 else word) & (((1 << LOW) - 1) << AT)
    if HIGH > 0:
        UP: tl.constexpr = AT + LOW - HIGH * J
        code = code | ((high << UP if UP >= 0 else high >> -UP) & (((1 << HIGH) - 1) << (AT + LOW)))
    return code


@triton.jit
def value(word, high, J: tl.constexpr, FORMAT: tl.constexpr):
    """Code J of each word minus its offset, as float32. Times `unit` it is exactly the format's value."""
    if FORMAT == "plain":
        return word.to(tl.float32)
    elif is_integer(FORMAT):
        # Put the code into the mantissa of 2**(23 - AT), then subtract that power and the offset.
        BITS: tl.constexpr = low_bits(FORMAT)
        DOWN: tl.constexpr = (16 if BITS == 8 else 12) if BITS * (J + 1) > 20 else 0
        AT: tl.constexpr = BITS * J - DOWN
        code = code_at(word, high, J, FORMAT, DOWN) | ((150 - AT) << 23)
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
    if is_integer(FORMAT):
        return code_at(word, high, J, FORMAT, tiny_down(J, FORMAT)).to(tl.float32, bitcast=True)
    elif FORMAT == "fp8":
        top = word << (24 - 8 * J) if J < 3 else word
        return ((top >> 4) & -2014314496).to(tl.float32, bitcast=True)
    else:
        return value(word, high, J, FORMAT)


@triton.constexpr_function
def tiny_down(J, FORMAT):
    """By how much a word is moved down for tiny_value J of integers, which then ends within the lowest 24 bits."""
    high = high_bits(FORMAT)
    return (12 if high else 8) if low_bits(FORMAT) * (J + 1) + high > 24 else 0


@triton.constexpr_function
def tiny_scale(J, FORMAT):
    """The factor of x for tiny_value J: it gives all products one common factor and allows x up to 2**48."""
    if (FORMAT == "fp6") | (FORMAT == "mxfp4"):
        return 1.0
    return 2.0 ** (76 if FORMAT == "fp8" else 76 - (low_bits(FORMAT) * J - tiny_down(J, FORMAT)))


@triton.constexpr_function
def offset(FORMAT):
    """The offset that is added to a stored integer code."""
    offsets = {"int8": 128.0, "int4": 8.0, "int3": 4.0, "int2": 2.0, "q5_0": 16.0, "q3_k": 4.0, "q6_k": 32.0}
    return offsets.get(FORMAT, 0.0)


@triton.constexpr_function
def unit(FORMAT, TINY):
    """The factor from `value`, or from the products if TINY, to steps of the scale."""
    if TINY:
        return {"fp8": 2.0**44, "fp6": 2.0**12, "mxfp4": 2.0**14}.get(FORMAT, 2.0**73)
    return {"fp8": 2.0**8, "fp6": 2.0**12, "mxfp4": 2.0**14}.get(FORMAT, 1.0)


@triton.constexpr_function
def zero_unit(FORMAT):
    """The factor from a stored zero point to codes."""
    return {"int8": 1.0, "int4": 1 / 16, "int3": 1 / 32, "int2": 1 / 64}[FORMAT]


@triton.constexpr_function
def in_blocks(FORMAT):
    """Whether the scales are those of infuse/quant/blocks.py."""
    return FORMAT.startswith("q")


@triton.constexpr_function
def of_block(FORMAT, WHAT):
    """Of a block: its groups, its bytes, and the byte where sc begins, and mn or m; 0: it has none."""
    numbers = {
        "q4_1": (1, 4, 0, 2), "q5_0": (1, 2, 0, 0), "q5_1": (1, 4, 0, 2), "q2_k": (16, 20, 4, 4),
        "q3_k": (16, 18, 2, 0), "q4_k": (8, 20, 4, 12), "q5_k": (8, 20, 4, 12), "q6_k": (16, 18, 2, 0),
    }  # fmt: skip
    return numbers[FORMAT][{"groups": 0, "bytes": 1, "sc": 2, "mn": 3}[WHAT]]


# A weight is (code - shift) * step + addend, with one of each for a group of a row. `zero` holds zero points; or, in
# float32, offsets of codes that begin with 0; or it is `scale`, whose bytes have the fields of blocks, as float16.
# Three functions, since shift and addend may be None: Triton 3.6 cannot return a tuple that holds None.


@triton.jit
def step_of(scale, zero, row, group, groups, inside, missing, FORMAT: tl.constexpr):
    """The steps of groups of rows in float32; `missing` for those that are not `inside`."""
    if in_blocks(FORMAT):
        GROUPS: tl.constexpr = of_block(FORMAT, "groups")
        BYTES: tl.constexpr = of_block(FORMAT, "bytes")
        block = row.to(tl.int64) * (groups // GROUPS) + group // GROUPS
        place = scale + block * BYTES + group % GROUPS
        step = tl.load(zero + block * (BYTES // 2), mask=inside, other=missing).to(tl.float32)
        if GROUPS > 1:
            sc = tl.load(place + of_block(FORMAT, "sc"), mask=inside, other=0)
            if FORMAT == "q2_k":
                sc = sc & 15
            elif of_block(FORMAT, "mn") == 0:
                sc = sc.to(tl.int8, bitcast=True)
            step *= sc.to(tl.float32)
    else:
        at = row.to(tl.int64) * groups + group
        step = tl.load(scale + at, mask=inside, other=missing).to(tl.float32)
    return step


@triton.jit
def shift_of(zero, row, group, groups, inside, FORMAT: tl.constexpr):
    """The shifts of groups of rows in float32, or None."""
    if in_blocks(FORMAT) or zero is None:
        return
    else:
        at = row.to(tl.int64) * groups + group
        third = tl.load(zero + at, mask=inside, other=0).to(tl.float32)
        if zero.dtype.element_ty == tl.float32:
            return tl.zeros_like(third) - offset(FORMAT)
        else:
            return third * zero_unit(FORMAT)


@triton.jit
def addend_of(scale, zero, row, group, groups, inside, FORMAT: tl.constexpr):
    """The addends of groups of rows in float32, or None."""
    if in_blocks(FORMAT):
        GROUPS: tl.constexpr = of_block(FORMAT, "groups")
        BYTES: tl.constexpr = of_block(FORMAT, "bytes")
        MN: tl.constexpr = of_block(FORMAT, "mn")
        if MN == 0:
            return
        else:
            block = row.to(tl.int64) * (groups // GROUPS) + group // GROUPS
            added = tl.load(zero + block * (BYTES // 2) + 1, mask=inside, other=0.0).to(tl.float32)
            if GROUPS > 1:
                mn = tl.load(scale + block * BYTES + group % GROUPS + MN, mask=inside, other=0)
                if FORMAT == "q2_k":
                    mn = mn >> 4
                added *= -mn.to(tl.float32)
            return added
    elif zero is None:
        return
    elif zero.dtype.element_ty == tl.float32:
        at = row.to(tl.int64) * groups + group
        return tl.load(zero + at, mask=inside, other=0).to(tl.float32)
    else:
        return


@triton.jit
def decoded(words, high, step, shift, added, J: tl.constexpr, FORMAT: tl.constexpr):
    """Code J of each word, dequantized. words, step, shift, added broadcast against each other."""
    y = value(words, high, J, FORMAT) * unit(FORMAT, False)
    if shift is not None:
        y -= shift
    y *= step
    if added is not None:
        y += added
    return y
