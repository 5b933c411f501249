"""A block of an encoder in one call of C++ (layers/native/one_call.py) against the same block part by part."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import infuse
from infuse.architectures.parts.attention import AttentionShape
from infuse.architectures.program import PARALLEL, SANDWICH, program_of
from infuse.layers.block import Block
from infuse.layers.native import one_call
from infuse.layers.native.one_call import EncoderCall
from infuse.native import isa, kernels
from infuse.ops.cpu.linear import takes_tiles
from tests.models.families import BY_NAME
from tests.support.one_calls import blocks, calls_noted, part_by_part
from tests.support.threads import thread_counts
from tests.support.tolerance import assert_near

pytestmark = pytest.mark.skipif(isinstance(kernels(), str), reason=str(kernels()))
# Where there are tiles, and PyTorch has no AMX to multiply with.
IN_BF16 = takes_tiles(torch.bfloat16)
WITH_TILES = IN_BF16 and (isa() == "avx512_amx" or (isa() == "avx512_bf16" and not kernels().has_amx()))
if not IN_BF16:
    pytestmark = pytest.mark.skip(reason="PyTorch multiplies better here; INFUSE_CPU_ISA=avx512_amx! takes our tiles")
POST, PRE = "bert", "vit"  # families whose blocks have these residual shapes


def attn_of(block: Block) -> AttentionShape:
    (shape,) = block.shape.mixers.values()
    assert isinstance(shape, AttentionShape)
    return shape


def model_of(name: str, quant: str | None = None, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    wide = dict(hidden_size=128, intermediate_size=192) if quant else {}
    engine = infuse.init_inference(BY_NAME[name].make(**wide), dtype=dtype, **({"quant": quant} if quant else {}))
    return engine.module


def block_of(name: str, quant: str | None = None, dtype: torch.dtype = torch.bfloat16) -> Block:
    return blocks(model_of(name, quant, dtype))[0]


def given(block: Block, batch: int, tokens: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(tokens)
    return torch.randn(batch, tokens, attn_of(block).hidden, generator=generator).to(dtype)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each block that was asked for its layer, whether it did it in one call."""
    return calls_noted(EncoderCall, monkeypatch)


def only(out: Tensor | tuple[Tensor, ...]) -> Tensor:
    return out[0] if isinstance(out, tuple) else out


@torch.no_grad()
def compare(block: Block, x: Tensor, mask: Tensor | None = None, **more: Tensor) -> None:
    for threads in thread_counts(1, 2, 3):
        torch.full((1 << 20,), torch.nan, dtype=x.dtype)  # what the call finds in memory that it does not fill
        found = only(block(x, attention_mask=mask, **more))
        with part_by_part(block):
            wanted = only(block(x, attention_mask=mask, **more))
        assert_near(found, wanted, x.dtype, f"{threads} threads")


# Alone on few and on many tokens, sequences that threads share, that each takes alone, and that divide among them
# unevenly.
SIZES = [(1, 9), (1, 128), (1, 77), (2, 128), (3, 50), (9, 33), (16, 128), (7, 300)]


@pytest.mark.parametrize(("batch", "tokens"), SIZES)
@pytest.mark.parametrize("name", [POST, PRE])
def test_a_layer_in_one_call_is_the_parts_one_by_one(name: str, batch: int, tokens: int, taken: list[bool]) -> None:
    block = block_of(name)
    taken.clear()
    compare(block, given(block, batch, tokens))
    assert taken == [WITH_TILES] * 3


@pytest.mark.skipif(not takes_tiles(torch.float32), reason="PyTorch multiplies float32 better here")
@pytest.mark.parametrize("quant", [None, "int4:32:asymmetric", "int8:a8"])
@pytest.mark.parametrize("name", [POST, PRE])
def test_float32(name: str, quant: str | None, taken: list[bool]) -> None:
    block = block_of(name, quant, torch.float32)
    for batch, tokens in SIZES[1:]:
        taken.clear()
        compare(block, given(block, batch, tokens, torch.float32))
        assert taken == [True] * 3


@pytest.mark.parametrize("quant", ["int8", "int4", "int4:32:asymmetric", "fp8", "fp6", "int8:a8", "int4:32:a8"])
def test_every_format(quant: str, taken: list[bool]) -> None:
    block = block_of(POST, quant)
    for batch, tokens in ((1, 29), (1, 128), (8, 100)):
        taken.clear()
        compare(block, given(block, batch, tokens))
        assert taken == [WITH_TILES] * 3
    taken.clear()
    compare(block, given(block, 2, 14))
    assert taken == [False] * 3, "so few rows stream the codes"


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("kind", ["bool", "added", "of each head"])
def test_masks_hide_of_each_sequence_what_they_say(kind: str, batch: int, taken: list[bool]) -> None:
    block, tokens = block_of(POST), 130
    allowed = torch.rand(batch, 1, tokens, tokens, generator=torch.Generator().manual_seed(batch)) > 0.3
    mask = allowed
    if kind == "added":
        mask = torch.zeros(batch, 1, tokens, tokens).masked_fill(~allowed, torch.finfo(torch.bfloat16).min).bfloat16()
    elif kind == "of each head":
        mask = (
            torch.rand(batch, attn_of(block).heads, tokens, tokens, generator=torch.Generator().manual_seed(batch))
            > 0.3
        )
    x = given(block, batch, tokens)
    taken.clear()
    compare(block, x, mask)
    assert taken == [WITH_TILES] * 3
    with torch.no_grad():
        assert not torch.allclose(only(block(x, attention_mask=mask)), only(block(x)), atol=1e-2)


@pytest.mark.parametrize("name", ["mpnet", "t5-gated"])
@pytest.mark.parametrize("kind", ["none", "boolean", "added"])
def test_a_bias_of_the_scores_goes_with_the_mask(name: str, kind: str, taken: list[bool]) -> None:
    block, batch, tokens = block_of(name), 3, 33
    generator = torch.Generator().manual_seed(tokens)
    allowed = torch.arange(tokens) < torch.tensor([[33], [20], [7]])
    masks = {
        "none": None,
        "boolean": allowed[:, None, None],
        "added": torch.zeros(batch, 1, 1, tokens).masked_fill(~allowed[:, None, None], -3e38).bfloat16(),
    }
    x, shape = given(block, batch, tokens), attn_of(block)
    bias = torch.randn(1, shape.heads, tokens, tokens, generator=generator).bfloat16()
    assert shape.bias_argument is not None
    taken.clear()
    compare(block, x, masks[kind], **{shape.bias_argument: bias})
    assert taken == [WITH_TILES] * 3
    with torch.no_grad():
        other = only(block(x, attention_mask=masks[kind], **{shape.bias_argument: 2 * bias}))
        assert not torch.allclose(other, only(block(x, attention_mask=masks[kind], **{shape.bias_argument: bias})))


def test_what_is_empty_or_of_other_dtypes_goes_part_by_part(taken: list[bool]) -> None:
    block = block_of(POST)
    taken.clear()
    compare(block, given(block, 0, 16))
    assert taken == [False] * 3
    taken.clear()
    compare(block, given(block, 2, 4))
    assert taken == [False] * 3, "so few rows stream the weights"
    taken.clear()
    block.half()
    compare(block, given(block, 1, 16, torch.float16))
    assert not any(taken)


def test_whoever_listens_to_a_part_hears_it(taken: list[bool]) -> None:
    block = block_of(POST)
    x, heard, attention = given(block, 1, 64), [], attn_of(block).name
    for name in ("norm1", "norm2", attention, f"{attention}.qkv", f"{attention}.out", "mlp", "mlp.up", "mlp.down"):
        taken.clear(), heard.clear()
        part = dict(block.named_modules())[name]  # not what is shown as the module around an attention
        handle = part.register_forward_hook(lambda module, args, output: heard.append(module))
        with torch.no_grad():
            block(x)
        handle.remove()
        assert len(heard) == 1 and taken == [False]


def test_what_a_user_changes_in_a_block_counts(taken: list[bool]) -> None:
    block = block_of(POST)
    x = given(block, 1, 64)
    with torch.no_grad():
        before = only(block(x))
        block.mlp.down.weight.mul_(2)
        assert not torch.allclose(only(block(x)), before, atol=1e-2)
        weight = block.mlp.up.weight
        weight.data = torch.stack((weight.data, weight.data), dim=-1)[..., 0]
        taken.clear()
        compare(block, x)
    assert not any(taken), "a weight that no kernel takes"


@pytest.mark.parametrize("residual", [PARALLEL, SANDWICH])
def test_every_residual_shape_goes_in_one_call(residual: str, taken: list[bool]) -> None:
    """No family of encoders has these yet."""
    shape = block_of(PRE).shape
    (name,), norm = shape.mixers, shape.parts["norm1"]
    shape = replace(shape, held=(*shape.held, ("post1", norm), ("post2", norm)), program=program_of(residual, name))
    bodies = dict.fromkeys((*shape.ops, "linear"), "cpu")
    block = Block(shape, None, {}, bodies).to(torch.bfloat16).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    for parameter in block.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    taken.clear()
    compare(block, given(block, 3, 50))
    compare(block, given(block, 8, 100))
    assert taken == [WITH_TILES] * 6


def test_decoders_and_positions_of_their_own_are_not_asked() -> None:
    for name in ("llama", "modernbert"):
        found = blocks(model_of(name))
        assert found and not any(isinstance(block._one_call, EncoderCall) for block in found)


def test_where_pytorch_multiplies_better_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert block_of(POST)._one_call is not None or isa() == "avx512_amx"
    monkeypatch.setattr(one_call, "takes_tiles", lambda dtype: False)
    assert block_of(POST)._one_call is None
