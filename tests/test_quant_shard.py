"""A shard of a quantized weight is the quantized shard: of every format, by outputs and by inputs; and what cannot be
cut says why.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_quant import KINDS, normal, round_trip

from infuse.errors import ConfigError
from infuse.quant.format import QuantizedWeight
from infuse.quant.parse import quant_format

GROUPED = [kind.format(8) for kind in KINDS]
TEXTS = [kind.format(size) for kind in KINDS for size in (8, "row", "groups=6")]
OUTPUTS, INPUTS = 7, 48


def assert_same(found: QuantizedWeight, wanted: QuantizedWeight) -> None:
    assert found.format == wanted.format and found.shape == wanted.shape
    for a, b in ((found.data, wanted.data), (found.scale, wanted.scale), (found.zero, wanted.zero)):
        assert (a is None) == (b is None)
        assert a is None or b is None or (a.dtype == b.dtype and torch.equal(a, b))


@st.composite
def parts(draw: st.DrawFn, size: int, grain: int = 1) -> range:
    limits = sorted(draw(st.integers(0, size // grain)) * grain for _ in range(2))
    return range(*limits)


@pytest.mark.parametrize("text", TEXTS)
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_shard_then_dequantize_is_dequantize_then_slice(text: str, data: st.DataObject) -> None:
    format, weight = quant_format(text), normal(OUTPUTS, INPUTS, data.draw(st.integers(0, 99)))
    outputs, inputs = data.draw(parts(OUTPUTS)), data.draw(parts(INPUTS, 4 if text.endswith("row") else 8))
    quantized = format.quantize(weight)
    part = format.shard(quantized, outputs=outputs, inputs=inputs)
    assert part.shape == (len(outputs), len(inputs)) and part.nbytes == part.format.nbytes(*part.shape)
    found = part.format.dequantize(part)
    assert torch.equal(found, format.dequantize(quantized)[outputs.start : outputs.stop, inputs.start : inputs.stop])
    assert (
        part.data.is_contiguous() and part.data.untyped_storage().nbytes() == part.data.nbytes
    )  # keeps nothing else alive


@pytest.mark.parametrize("text", TEXTS)
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_the_shard_of_outputs_is_the_quantized_shard(text: str, data: st.DataObject) -> None:
    format, weight, outputs = quant_format(text), normal(OUTPUTS, INPUTS), data.draw(parts(OUTPUTS))
    assert_same(
        format.shard(format.quantize(weight), outputs=outputs), format.quantize(weight[outputs.start : outputs.stop])
    )


@pytest.mark.parametrize("text", [*GROUPED, *(kind.format("groups=6") for kind in KINDS)])
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_the_shard_of_whole_groups_is_the_quantized_shard(text: str, data: st.DataObject) -> None:
    format, weight, inputs = quant_format(text), normal(OUTPUTS, INPUTS), data.draw(parts(INPUTS, 8).filter(len))
    part = format.shard(format.quantize(weight), inputs=inputs)
    assert_same(part, part.format.quantize(weight[:, inputs.start : inputs.stop]))
    assert str(part.format) == str(format).replace("groups=6", f"groups={len(inputs) // 8}")


@pytest.mark.parametrize("text", TEXTS)
def test_shards_put_together_are_the_whole(text: str) -> None:
    """Uneven shards over three ranks, as parallel layers cut them: outputs for column-parallel, inputs for
    row-parallel.
    """
    format, weight = quant_format(text), normal(OUTPUTS, INPUTS)
    quantized, values = format.quantize(weight), round_trip(weight, format)
    rows = [format.shard(quantized, outputs=part) for part in (range(0, 3), range(3, 5), range(5, 7))]
    columns = [format.shard(quantized, inputs=part) for part in (range(0, 24), range(24, 40), range(40, 48))]
    assert torch.equal(torch.cat([part.format.dequantize(part) for part in rows]), values)
    assert torch.equal(torch.cat([part.format.dequantize(part) for part in columns], dim=1), values)
    again = format.shard(quantized)
    assert_same(again, quantized)
    assert again.data.data_ptr() != quantized.data.data_ptr()


@pytest.mark.parametrize("text", TEXTS)
def test_a_shard_on_meta_has_the_shapes(text: str) -> None:
    format = quant_format(text)
    real, planned = (
        format.quantize(weight) for weight in (normal(OUTPUTS, INPUTS), torch.empty(OUTPUTS, INPUTS, device="meta"))
    )
    part, meta = (format.shard(held, outputs=range(2, 4), inputs=range(8, 24)) for held in (real, planned))
    assert meta.data.is_meta and (meta.data.shape, meta.scale.shape, meta.nbytes) == (
        part.data.shape,
        part.scale.shape,
        part.nbytes,
    )


@pytest.mark.parametrize(
    ("text", "width", "inputs", "reason"),
    [
        ("int8", 128, range(0, 96), r"int8: inputs 0 to 96 of 128 cut groups at \[96\]; possible: multiples of 64"),
        (
            "int8",
            64,
            range(0, 32),
            r"cut groups at \[32\]; possible: multiples of 64",
        ),  # one group, but its size is said
        ("int4:32", 128, range(16, 48), r"cut groups at \[16, 48\]; possible: multiples of 32"),
        ("fp8:groups=2", 128, range(32, 128), r"cut groups at \[32\]; possible: multiples of 64"),
        (
            "int4:row",
            128,
            range(3, 64),
            r"int4:row: inputs 3 to 64 of 128 cut bytes at \[3\]; possible: multiples of 2",
        ),
        ("fp6:row", 128, range(2, 66), r"cut bytes at \[2, 66\]; possible: multiples of 4"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_the_numbers(text: str, width: int, inputs: range, reason: str) -> None:
    format = quant_format(text)
    with pytest.raises(ConfigError, match=reason):
        format.shard(format.quantize(normal(2, width)), inputs=inputs)


@pytest.mark.parametrize(
    "wrong",
    [
        dict(outputs=range(0, 8)),
        dict(outputs=range(-1, 2)),
        dict(inputs=range(0, 48, 2)),
        dict(inputs=range(8, 0)),
    ],
)
def test_ranges_outside_of_the_weight_are_refused(wrong: dict[str, range]) -> None:
    format = quant_format("int8:8")
    with pytest.raises(
        ConfigError, match=r"int8:8: (outputs|inputs) range.* of a weight \[7, 48\]; possible: ranges within"
    ):
        format.shard(format.quantize(normal(OUTPUTS, INPUTS)), **wrong)
