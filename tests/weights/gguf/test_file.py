"""Headers of GGUF files: what is read, and what is refused, with the name of the file and of the tensor."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest
import torch

from infuse.ground.errors import CheckpointError
from infuse.weights.gguf.file import GGUFFile
from infuse.weights.gguf.names import named_tensors
from infuse.weights.gguf.parts import open_parts


def text(value: str | bytes) -> bytes:
    value = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(value)) + value


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def entry(name: str | bytes, sizes: list[int], type: int = 0, offset: int = 0) -> bytes:
    axes = struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
    return text(name) + axes + struct.pack("<IQ", type, offset)


ARCHITECTURE = key("general.architecture", 8, text("qwen2"))


def file_of(
    keys: list[bytes], tensors: list[bytes], data: bytes = b"", *, version: int = 3, magic: bytes = b"GGUF",
    counts: tuple[int, int] | None = None, alignment: int = 32,
) -> bytes:  # fmt: skip
    count = counts or (len(tensors), len(keys))
    header = magic + struct.pack("<IQQ", version, *count) + b"".join(keys) + b"".join(tensors)
    return header + bytes(-len(header) % alignment) + data


@pytest.fixture
def opened(tmp_path):
    def open_it(content: bytes) -> GGUFFile:
        path = tmp_path / "model.gguf"
        path.write_bytes(content)
        return GGUFFile(path)

    return open_it


@pytest.mark.parametrize("version", [2, 3])
def test_values_and_tensors_are_read(opened, version):
    kinds = [
        key("a.u8", 0, b"\xff"), key("a.i8", 1, b"\xff"), key("a.u16", 2, b"\xff\xff"), key("a.i16", 3, b"\xff\xff"),
        key("a.u32", 4, b"\xff" * 4), key("a.i32", 5, b"\xff" * 4), key("a.f32", 6, struct.pack("<f", 1.5)),
        key("a.yes", 7, b"\x01"), key("a.text", 8, text("grün")), key("a.u64", 10, b"\xff" * 8),
        key("a.i64", 11, b"\xff" * 8), key("a.f64", 12, struct.pack("<d", 0.1)),
        key("a.texts", 9, struct.pack("<IQ", 8, 2) + text("x") + text(b"\xc3")),
        key("a.numbers", 9, struct.pack("<IQ3i", 5, 3, 1, -2, 3)),
    ]  # fmt: skip
    numbers = torch.arange(24, dtype=torch.float32)
    file = opened(file_of(kinds, [entry("x", [3, 4, 2])], numbers.numpy().tobytes(), version=version))
    assert file.values == {
        "a.u8": 255, "a.i8": -1, "a.u16": 65535, "a.i16": -1, "a.u32": 2**32 - 1, "a.i32": -1, "a.f32": 1.5,
        "a.yes": True, "a.text": "grün", "a.u64": 2**64 - 1, "a.i64": -1, "a.f64": 0.1, "a.texts": ["x", "\ufffd"],
        "a.numbers": [1, -2, 3],
    }  # fmt: skip
    whole = numbers.view(2, 4, 3)
    assert torch.equal(file.read("x"), whole)
    before = file.bytes_read
    assert torch.equal(file.read("x", (slice(1, 2), slice(1, 3), slice(0, 2))), whole[1:2, 1:3, :2])
    assert file.bytes_read - before == 48
    assert torch.equal(file.read("x", (slice(2, 2),)), whole[2:2])


def test_another_alignment(opened):
    keys = [key("general.alignment", 4, struct.pack("<I", 128))]
    data = bytes(128) + struct.pack("<2f", 1, 2)
    file = opened(file_of(keys, [entry("x", [2], 0, 128)], data, alignment=128))
    assert file.read("x").tolist() == [1, 2]


WRONG = {
    "no magic": (file_of([], [], magic=b"GGML"), "no GGUF file"),
    "version 1": (file_of([], [], version=1), "version 1; possible: versions 2, 3"),
    "big-endian": (file_of([], [], version=3 << 24), "big-endian"),
    "empty": (b"", "its first bytes"),
    "more tensors than bytes": (file_of([], [], counts=(2**61, 0)), "more than its"),
    "more keys than bytes": (file_of([], [], counts=(0, 2**63)), "more than its"),
    "a string too long": (file_of([struct.pack("<Q", 2**62)], [], bytes(64)), "key 0 claims 4611686018427387904"),
    "an array too long": (
        file_of([key("a", 9, struct.pack("<IQ", 10, 2**61))], [], bytes(64)),
        "the value of a claims",
    ),
    "texts too many": (file_of([key("a", 9, struct.pack("<IQ", 8, 2**61))], [], bytes(64)), "the value of a claims"),
    "an array of arrays": (
        file_of([key("a", 9, struct.pack("<IQ", 9, 1))], [], bytes(64)),
        "unknown type 9; possible: 0 to 12, no arrays of arrays",
    ),
    "a value's type": (file_of([key("a", 13, bytes(8))], [], bytes(64)), "the value of a is of the unknown type 13"),
    "a key that is no text": (file_of([key("a", 0, b"1").replace(b"a", b"\xff")], [], bytes(64)), "not UTF-8"),
    "a key twice": (file_of([key("a", 0, b"1")] * 2, [], bytes(64)), "a appears twice"),
    "a tensor twice": (file_of([], [entry("x", [1]), entry("x", [1], 0, 32)], bytes(64)), "x appears twice"),
    "five axes": (file_of([], [entry("x", [1] * 5)], bytes(64)), "x has 5 axes; possible: up to 4"),
    "a tensor's type": (file_of([], [entry("x", [1], 99)], bytes(64)), "x is of the unknown type 99"),
    "a removed type": (file_of([], [entry("x", [32], 4)], bytes(64)), "x is of the unknown type 4"),
    "half a block": (
        file_of([], [entry("x", [48, 2], 2)], bytes(64)),
        "x has rows of 48 values, and Q4_0 blocks of 32",
    ),
    "not aligned": (file_of([], [entry("x", [1], 0, 4)], bytes(64)), "x begins at 4, which is not aligned to 32"),
    "beyond the end": (file_of([], [entry("x", [9], 0, 32)], bytes(64)), "x ends at byte"),
    "sizes that overflow": (file_of([], [entry("x", [2**40, 2**40, 2**40])], bytes(64)), "x ends at byte"),
    "overlapping": (file_of([], [entry("x", [9]), entry("y", [1], 0, 32)], bytes(64)), "y overlaps x"),
    "alignment 0": (file_of([key("general.alignment", 4, bytes(4))], []), "general.alignment is 0"),
    "alignment 24": (file_of([key("general.alignment", 4, struct.pack("<I", 24))], []), "general.alignment is 24"),
    "alignment in words": (file_of([key("general.alignment", 8, text("32"))], []), "general.alignment is '32'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_malformed_is_named(opened, name):
    content, match = WRONG[name]
    with pytest.raises(CheckpointError, match=match) as raised:
        opened(content)
    assert "model.gguf" in str(raised.value)


def test_all_wrong_tensors_are_in_one_error(opened):
    tensors = [entry("x", [1], 99), entry("y", [48], 2), entry("z", [1], 0, 3)]
    with pytest.raises(CheckpointError, match="x is of.*y has rows.*z begins"):
        opened(file_of([], tensors, bytes(64)))


def test_a_file_that_shrank(opened, tmp_path):
    file = opened(file_of([], [entry("x", [16])], bytes(64)))
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match="ended while x was read"):
        file.read("x")


def small_model() -> bytes:
    """A file with a value of each kind and tensors of several types."""
    keys = [
        ARCHITECTURE,
        key("qwen2.attention.head_count", 4, struct.pack("<I", 2)),
        key("tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, 3) + text("a") + text("b") + text("c")),
        key("tokenizer.ggml.scores", 9, struct.pack("<IQ3f", 6, 3, 1, 2, 3)),
    ]
    tensors = [
        entry("token_embd.weight", [32, 3], 8, 0),
        entry("blk.0.attn_norm.weight", [32], 0, 128),
        entry("blk.0.attn_q.weight", [32, 4], 2, 256),
        entry("blk.0.ffn_down.weight", [256, 2], 12, 352),
    ]
    return file_of(keys, tensors, bytes(352 + 288))


def loads(path: Path) -> bool:
    """True if the file can be read whole; CheckpointError is the only other outcome."""
    try:
        for tensor in named_tensors(open_parts([path])).values():
            tensor.read()
    except CheckpointError as error:
        assert path.name in str(error)
        return False
    return True


def test_truncated_anywhere(tmp_path):
    content, path = small_model(), tmp_path / "model.gguf"
    path.write_bytes(content)
    assert loads(path)
    for length in (*range(0, len(content), 64), len(content) - 1):
        path.write_bytes(content[:length])
        assert not loads(path), length


@pytest.mark.parametrize("type", (0, 2, 12))
@pytest.mark.parametrize("name", ("token_embd.weight", "blk.0.attn_q.weight", "blk.0.ffn_up_exps.weight", "a\nb", ""))
@pytest.mark.parametrize("architecture", ("llama", "gemma2", "gpt-oss"))
def test_tensors_without_values(tmp_path, type, name, architecture):
    path = tmp_path / "model.gguf"
    keys = [
        key("general.architecture", 8, text(architecture)),
        key("llama.attention.head_count", 4, struct.pack("<I", 2)),
    ]
    for sizes in ([], [0], [256, 0], [0, 4], [256, 0, 2], [256, 2, 0], [0, 0, 0, 0], [256, 2, 2, 2]):
        path.write_bytes(file_of(keys, [entry(name, sizes, type)], bytes(1 << 14)))
        loads(path)


def test_any_byte_of_the_header_may_be_wrong(tmp_path):
    """Each byte in turn, and many at once: CheckpointError or a load, never another error, never much memory."""
    content, path = small_model(), tmp_path / "model.gguf"
    draw = random.Random(0)
    header = content.index(b"blk.0.ffn_down") + 60
    outcomes = set()
    for place in range(header):
        for flipped in (content[place] ^ 0xFF, content[place] ^ 1 << draw.randrange(8)):
            path.write_bytes(content[:place] + bytes([flipped]) + content[place + 1 :])
            outcomes.add(loads(path))
    for _ in range(300):
        changed = bytearray(content)
        for _ in range(draw.randrange(2, 12)):
            changed[draw.randrange(header)] = draw.choice((0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)))
        path.write_bytes(changed)
        outcomes.add(loads(path))
    assert outcomes == {True, False}
