"""Targets are put together part by part: the same tensors as the whole source makes at once."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from infuse import ops
from infuse.architectures.packing import PER_HEAD, Fill, Heads
from infuse.ground.device import Device
from infuse.ground.errors import CheckpointError, ConfigError
from infuse.layers.linear import QuantizedLinear
from infuse.parallel.slices import Cut
from infuse.quant.parse import quant_format
from infuse.weights import fill as filling
from infuse.weights import safetensors_file
from infuse.weights.lazy import live
from infuse.weights.safetensors_file import SafetensorsFile
from tests.support.tolerance import assert_same_buffers

WIDTH, HEADS = 64, Heads(2, 2, 24)
PAIR = Fill("linear.weight", ("a", "b"))
FILLS = {
    "two sources": PAIR,
    "one": Fill("linear.weight", ("a",)),
    "some outputs": replace(PAIR, cut=Cut(0, ((7, 90), (130, 171)), (101, 83))),
    "some inputs": Fill("linear.weight", ("a",), cut=Cut(1, ((0, 16), (32, 48)), (WIDTH,))),
    "per head": Fill("linear.weight", ("packed",), packing=PER_HEAD, heads=HEADS),
    "transposed": Fill("linear.weight", ("columns",), transposed=True),
    "some inputs, transposed": Fill("linear.weight", ("columns",), transposed=True, cut=Cut(1, ((16, 48),), (WIDTH,))),
}


class Sources(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in dict(
            a=(101, WIDTH), b=(83, WIDTH), packed=(HEADS.rows, WIDTH), columns=(WIDTH, 150)
        ).items():
            self.register_buffer(name, torch.randn(shape, generator=generator))


def expected(label: str, sources: Sources) -> Tensor:
    """Said once more, on whole tensors."""
    a, b, packed, columns = (sources.get_buffer(name) for name in ("a", "b", "packed", "columns"))
    if label == "per head":
        return packed.view(2, 3, HEADS.width, WIDTH).transpose(0, 1).reshape(-1, WIDTH)
    both = torch.cat((a, b))
    return {
        "two sources": both,
        "one": a,
        "some outputs": torch.cat((both[7:90], both[130:171])),
        "some inputs": torch.cat((a[:, :16], a[:, 32:48]), 1),
        "transposed": columns.t(),
        "some inputs, transposed": columns.t()[:, 16:48],
    }[label]


@pytest.fixture(params=[1, 20 * WIDTH, 1 << 20])
def part_values(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(filling, "PART_VALUES", request.param)
    return request.param


@pytest.mark.parametrize("label", FILLS)
def test_a_plain_target(label: str, part_values: int) -> None:
    sources = Sources()
    found = filling.filled(FILLS[label], live(sources), torch.bfloat16)
    assert torch.equal(found, expected(label, sources).bfloat16())


@pytest.mark.parametrize("absent", [(0,), (1,), (2,), (0, 1), (1, 2)])
def test_biases_without_a_source_are_zeros(absent: tuple[int, ...]) -> None:
    heads, sources = Heads(3, 2, 4), nn.Module()
    sizes = dict(zip("qkv", heads.of_parts, strict=True))
    for name, size in sizes.items():
        sources.register_buffer(name, torch.randn(size))
    names = tuple(name for part, name in enumerate(sizes) if part not in absent)
    whole = torch.cat([sources.get_buffer(name) if name in names else torch.zeros(sizes[name]) for name in sizes])
    fill = Fill("linear.bias", names, heads=heads, absent=absent)
    assert torch.equal(filling.filled(fill, live(sources), None), whole)
    ranges = ((4, 12), (12, 16), (20, 24))
    cut = replace(fill, cut=Cut(0, ranges, heads.of_parts))
    found = filling.filled(cut, live(sources), torch.bfloat16)
    assert torch.equal(found, torch.cat([whole[begin:end] for begin, end in ranges]).bfloat16())
    undone = filling.source_tensors(fill, whole, {name: (sizes[name],) for name in names})
    assert undone.keys() == {*names} and all(torch.equal(undone[name], sources.get_buffer(name)) for name in names)


@pytest.mark.parametrize("format", ["int8:16", "int4:8:asymmetric", "fp8:32", "fp6:row"])
@pytest.mark.parametrize("label", FILLS)
def test_a_quantized_target(label: str, format: str, part_values: int) -> None:
    sources = Sources()
    wanted = quant_format(format).quantize(expected(label, sources))
    bodies = {
        name: ops.registered()[name].choose(Device.of("cpu"), torch.float32).body
        for name in ("quantize", "quantized_linear")
    }
    place = nn.Module()
    place.linear = QuantizedLinear(wanted.shape[1], wanted.shape[0], False, format, bodies)
    filling.fill_module(place, [replace(FILLS[label], format=format)], live(sources), torch.float32, bodies)
    held = place.linear.held()
    assert place.linear.prepared
    assert_same_buffers(held, wanted)


def test_what_cannot_be_quantized_is_said_of_its_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filling, "PART_VALUES", 16 * WIDTH)
    sources = Sources()
    sources.get_buffer("b")[40, 3] = float("nan")  # in row 141, the 13th from row 128 on
    bodies = {
        name: ops.registered()[name].choose(Device.of("cpu"), torch.float32).body
        for name in ("quantize", "quantized_linear")
    }
    place = nn.Module()
    place.linear = QuantizedLinear(WIDTH, 184, False, "int8", bodies)
    at = (
        r"from row 128 on: .* holds nan at \[13, 3\]"
        if place.linear.part_rows
        else r"from row 0 on: .* holds nan at \[141, 3\]"
    )
    with pytest.raises(ConfigError, match=r"a \+ b, " + at):
        filling.fill_module(place, [replace(PAIR, format="int8")], live(sources), torch.float32, bodies)


def test_threads_read_one_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_file, "BLOCK_BYTES", 64)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    state = {"a": torch.randn(101, 7), "b": torch.randn(33, 50)}
    save_file(state, tmp_path / "model.safetensors")
    file = SafetensorsFile(tmp_path / "model.safetensors")
    assert torch.equal(file.read("a"), state["a"]) and torch.equal(file.read("b", (slice(3, 30),)), state["b"][3:30])
    assert file.bytes_read == 4 * (101 * 7 + 27 * 50)
    with open(file.path, "r+b") as shortened:
        shortened.truncate(file.path.stat().st_size - 100)
    before = threading.active_count()
    with pytest.raises(CheckpointError, match="model.safetensors: ended while b was read"):
        file.read("b")
    assert threading.active_count() == before
