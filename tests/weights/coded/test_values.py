"""Matrices of quantized files: the values that their layouts stand for bit by bit, their formats, and parts of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from infuse.parallel.slices import Span
from infuse.quant.parse import quant_format
from infuse.weights.checkpoint import Checkpoint
from infuse.weights.coded import buffers
from infuse.weights.lazy import CodedTensor, Joined, LazyTensor
from infuse.weights.sources import find_files
from tests.support.quantized_files import BY_CASE, CASES, E2M1, Case, gptq, write

WEIGHT = torch.randn(96, 256, generator=torch.Generator().manual_seed(2)) * 0.05


def opened(folder: str) -> Checkpoint:
    return Checkpoint(find_files(folder))


def matrix(folder: Path, case: Case, weight: torch.Tensor) -> tuple[LazyTensor, torch.Tensor, Checkpoint]:
    leaves, values = case.pack(weight)
    checkpoint = opened(write(folder, {f"a.b.{leaf}": one for leaf, one in leaves.items()}, case.config))
    assert list(checkpoint.pieces) == ["a.b.weight"]
    read = checkpoint.joined("a.b.weight", tuple(values.shape))
    assert read is not None
    return read, values, checkpoint


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_values_are_those_of_the_layout(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "WINDOW", 4)
    read, values, _ = matrix(tmp_path, case, WEIGHT)
    assert read.shape == values.shape and read.dtype == torch.float32
    assert (read.coded.format if read.coded else "") == (case.format and str(quant_format(case.format)))
    assert torch.equal(read.read(), values)
    rows = ((slice(3, 50),), (slice(50, 96),), (slice(0, 0),))
    for part in (*rows, (slice(33, 34), slice(64, 128)), (slice(95, 96), slice(128, 256))):
        assert torch.equal(read.read(part), values[part]), part


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_buffers_are_read_by_parts(case: Case, tmp_path: Path) -> None:
    read, _, _ = matrix(tmp_path, case, WEIGHT)
    for name, buffer in (read.coded.buffers if read.coded else {}).items():
        whole = buffer.read()
        assert whole.shape == buffer.shape and whole.dtype == buffer.dtype, name
        for part in ((slice(5, 41),), (slice(7, 8), slice(0, buffer.shape[1] // 2))):
            assert torch.equal(buffer.read(part), whole[part]), (name, part)


@pytest.mark.parametrize("case", [case for case in CASES if case.format], ids=lambda case: case.name)
def test_codes_are_cut_along_inputs(case: Case, tmp_path: Path) -> None:
    """As ranks cut them; merged rows keep their codes too."""
    read, values, _ = matrix(tmp_path, case, WEIGHT)
    half = Joined.of({0: read}, [Span(0, 128, 256)], axis=1)
    both = Joined.of({0: read, 1: read}, [Span(0, 8, 40), Span(1, 0, 96)])
    uneven = Joined.of({0: read}, [Span(0, 0, 144)], axis=1)
    pairs = ((half, values[:, 128:]), (both, torch.cat((values[8:40], values))), (uneven, values[:, :144]))
    for joined, wanted in pairs:
        in_groups = read.coded is not None and quant_format(read.coded.format).unit(256) > 16
        if (joined is half and "order" in case.name) or (joined is uneven and in_groups):  # it has parts of groups
            assert joined.coded is None and torch.equal(joined.read((slice(3, 60),)), wanted[3:60])
            continue
        assert joined.coded is not None
        cut = CodedTensor(joined.shape, torch.float32, joined.coded)
        assert torch.equal(cut.read((slice(3, 60),)), wanted[3:60])


def test_matrices_in_two_orders_are_not_joined_in_codes(tmp_path: Path) -> None:
    case = BY_CASE["gptq-4-asym-v1-order"]
    packed = [gptq(WEIGHT, sym=False, order=True, seed=seed) for seed in (3, 4, 3)]
    tensors = {f"a.{place}.{leaf}": one for place, (leaves, _) in enumerate(packed) for leaf, one in leaves.items()}
    pieces = opened(write(tmp_path, tensors, case.config)).pieces
    reads = [pieces[f"a.{place}.weight"].first for place in range(3)]
    for other in (1, 2):
        joined = Joined.of({0: reads[0], 1: reads[other]})
        assert (joined.coded is None) == (other == 1)
        assert torch.equal(joined.read(), torch.cat((packed[0][1], packed[other][1])))


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("inputs", [256, 70])  # of 70, blocks cross rows and rows begin within a number
def test_dtypes_that_only_hold_the_bytes(dtype: torch.dtype, inputs: int, tmp_path: Path) -> None:
    """bitsandbytes stores bytes of codes as numbers of another dtype, so that FSDP can shard them."""
    leaves, values = BY_CASE["nf4"].pack(WEIGHT[:, :inputs].contiguous())
    leaves["weight"] = leaves["weight"].view(-1).view(dtype).unsqueeze(1)
    folder = write(tmp_path, {f"a.b.{leaf}": one for leaf, one in leaves.items()}, BY_CASE["nf4"].config)
    read = opened(folder).pieces["a.b.weight"].first
    assert (read.coded is None) == (inputs == 70)
    for part in ((), (slice(3, 50),), (slice(7, 8), slice(0, 64)), (slice(5, 5),)):
        assert torch.equal(read.read(part), values[part]), part


@pytest.mark.parametrize("name", ["fp8-blocks", "compressed-fp8-block", "compressed-w4a16", "awq", "fbgemm"])
def test_rows_are_read_without_the_rest(name: str, tmp_path: Path) -> None:
    read, _, checkpoint = matrix(tmp_path, BY_CASE[name], torch.randn(256, 256) * 0.05)
    assert read.coded is not None
    before = checkpoint.bytes_read
    read.coded.buffers["data"].read((slice(8, 16),))
    rows = 8 if name != "awq" else 256  # a window of columns
    assert checkpoint.bytes_read - before == rows * (256 if "fp8" in name or name == "fbgemm" else 128)


@pytest.mark.parametrize(
    ("name", "shape", "told"),
    [
        ("fp8-blocks", (200, 200), "groups of 128 do not divide 200 inputs"),
        ("gptq-4-asym-v1", (64, 72), "groups of 32 do not divide 72 inputs"),
        ("compressed-w3", (64, 80), "groups of 32 do not divide 80 inputs"),
        ("nf4", (30, 72), "blocks of 64 cross rows of 72"),
        ("compressed-nvfp4", (32, 80), "blocks of 64 do not divide 80 inputs"),
        ("modelopt-nvfp4", (32, 48), "blocks of 64 do not divide 48 inputs"),
        ("compressed-w8a16", (24, 33), ""),
        ("quanto-qint8", (24, 33), ""),
        ("fp8-blocks", (200, 256), ""),
        ("gptq-4-asym-v1-order", (64, 96), ""),
        ("gptq-4-asym-v1-order", (64, 112), "differ in their numbers of inputs (desc_act)"),
        ("compressed-w4a16-order", (64, 112), "differ in their numbers of inputs (actorder)"),
    ],
)
def test_widths_that_no_format_has_become_values(name: str, shape: tuple[int, int], told: str, tmp_path: Path) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(4)) * 0.05
    read, values, checkpoint = matrix(tmp_path, BY_CASE[name], weight)
    assert (read.coded is None) == bool(told)
    assert torch.equal(read.read(), values) and torch.equal(read.read((slice(5, 9),)), values[5:9])
    assert torch.equal(read.read((slice(5, 9), slice(7, 30))), values[5:9, 7:30])
    assert told in "".join(checkpoint.notes)
    if told:
        stored = sum(leaf.nbytes for leaf in BY_CASE[name].pack(weight)[0].values())
        note, _, sizes = checkpoint.notes[0].rpartition(": ")
        plain, codes = (float(size.split()[0]) * 1e3 for size in sizes.split(", "))
        assert "1 tensor, e.g. a.b.weight: codes become plain values" in note
        assert plain == pytest.approx(values.numel() * 2, abs=50) and codes == pytest.approx(stored, rel=0.1)


@pytest.mark.parametrize(
    ("name", "shape", "format"),
    [
        ("fp8-blocks", (200, 192), "fp8:64:f32"),
        ("fp8-blocks-bf16", (576, 320), "fp8:64"),
        ("fp8-blocks-e8m0", (130, 272), "fp8:16"),
        ("compressed-fp8-block", (200, 160), "fp8:32"),
        ("gptq-4-asym-v1", (64, 80), "int4:16:asymmetric:f16"),
        ("gptq-8-sym-v1", (64, 48), "int8:16:f16"),
        ("nf4", (30, 80), "nf4:16"),
        ("nf4-doubly", (31, 96), "nf4:32"),
        ("fp4", (5, 192), "fp4:64"),
    ],
)
def test_a_partial_group_at_the_end_of_rows_keeps_its_codes(
    name: str, shape: tuple[int, int], format: str, tmp_path: Path
) -> None:
    """In shorter groups, which divide the row: in no more memory than is stored, but for the scales' copies."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(4)) * 0.05
    read, values, checkpoint = matrix(tmp_path, BY_CASE[name], weight)
    assert read.coded is not None and read.coded.format == str(quant_format(format)) and not checkpoint.notes
    assert torch.equal(read.read(), values)
    half = shape[1] // 2 // 16 * 16
    for part in ((slice(5, 5),), (slice(2, 5),), (slice(2, 5), slice(half, half + 16)), (slice(0, 3), slice(7, 30))):
        assert torch.equal(read.read(part), values[part]), part
    for buffer in read.coded.buffers.values():
        whole = buffer.read()
        assert whole.shape == buffer.shape and torch.equal(buffer.read((slice(1, 4), slice(1, 3))), whole[1:4, 1:3])
    stored = sum(leaf.nbytes for leaf in BY_CASE[name].pack(weight)[0].values())
    assert quant_format(format).nbytes(*shape) < min(1.75 * stored, values.numel() * 2)


@pytest.mark.parametrize("inverse", [True, False], ids=["compressed-tensors", "modelopt"])
def test_the_number_of_nvfp4_is_not_rounded(inverse: bool, tmp_path: Path) -> None:
    """No power of two: products of e2m1, e4m3 and a float32 number, in float64."""
    case = BY_CASE["compressed-nvfp4" if inverse else "modelopt-nvfp4"]
    leaves, _ = case.pack(WEIGHT)
    number = 1337.77 if inverse else 1 / 1337.77
    data, of_all = ("weight_packed", "weight_global_scale") if inverse else ("weight", "weight_scale_2")
    leaves[of_all] = torch.full_like(leaves[of_all], number)
    read = opened(write(tmp_path, {f"a.b.{leaf}": one for leaf, one in leaves.items()}, case.config))
    codes = torch.stack((leaves[data] & 15, leaves[data] >> 4), dim=-1).flatten(1).long()
    scales = leaves["weight_scale"].double().repeat_interleave(16, 1)
    factor = leaves[of_all].double()
    values = E2M1.double()[codes] * (scales / factor if inverse else scales * factor)
    torch.testing.assert_close(read.pieces["a.b.weight"].first.read().double(), values, rtol=2.5e-7, atol=0)


@pytest.mark.parametrize("bits", [2, 3])
@pytest.mark.parametrize("name", ["gptq-{}-asym-v1", "gptq-{}-sym-v1", "compressed-w{}"])
def test_short_codes_take_about_as_much_memory_as_in_the_file(name: str, bits: int, tmp_path: Path) -> None:
    case = BY_CASE[name.format(bits)]
    stored = sum(leaf.nbytes for leaf in case.pack(WEIGHT)[0].values())
    read, _, _ = matrix(tmp_path, case, WEIGHT)
    assert read.coded is not None and quant_format(read.coded.format).nbytes(*WEIGHT.shape) <= 1.15 * stored
