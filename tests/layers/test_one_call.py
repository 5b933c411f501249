"""A block over few new tokens in one call of C++ (layers/native/one_call.py) against the same block part by part.
Every family against the original: test_families.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import pytest
import torch
from torch import Tensor, nn

import infuse
from infuse.architectures.parts.attention import AttentionShape
from infuse.architectures.parts.mlp import MLPShape
from infuse.architectures.parts.norm import NormShape
from infuse.architectures.parts.short_conv import ShortConvShape
from infuse.architectures.parts.state_attention import LinearAttentionShape
from infuse.cache.kv_cache import KVCache
from infuse.layers.attention.self_attention import Attention
from infuse.layers.block import Block
from infuse.layers.calls.inputs import Inputs
from infuse.layers.joined_linear import JoinedLinear
from infuse.layers.mlp import MLP
from infuse.layers.native.one_call import StepCall
from infuse.layers.native.part import NativeInputs
from infuse.native import kernels, limits
from tests.models.families import DECODERS, Family, inputs
from tests.support.one_calls import blocks, calls_noted, decoded, listening, part_by_part
from tests.support.tolerance import assert_near

pytestmark = pytest.mark.skipif(isinstance(kernels(), str), reason=str(kernels()))
BY_NAME = {family.name: family for family in DECODERS}


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each block that was asked to make a step, whether it did it in one call."""
    return calls_noted(StepCall, monkeypatch)


def compare(engine: infuse.InferenceEngine, family: Family, dtype: torch.dtype, **how: object) -> None:
    found = decoded(engine, family, **how)  # type: ignore[arg-type]
    with part_by_part(engine.module):
        wanted = decoded(engine, family, **how)  # type: ignore[arg-type]
    for a, b in zip(found, wanted, strict=True):
        assert_near(a, b, dtype, family.name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("quant", [None, "int8", "int4", "int4:32:asymmetric", "fp8", "fp6"])
def test_every_format(quant: str | None, dtype: torch.dtype, taken: list[bool]) -> None:
    family = BY_NAME["llama"]
    wide = dict(hidden_size=128, intermediate_size=192)
    engine = infuse.init_inference(family.make(**wide), dtype=dtype, **({"quant": quant} if quant else {}))
    taken.clear()
    compare(engine, family, dtype, padding="left")
    assert any(taken)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3_5"])
def test_products_in_several_formats(name: str, batch: int, taken: list[bool]) -> None:
    """q and k in one format and v in another, gate and up, and what leads into a state: as many matrices as formats."""
    family = BY_NAME[name]
    formats = {"v_proj": "int8:32", "gate_proj": "int4:32", "up_proj": "q5_0", "in_proj_z": "int8:32"}
    present = [path for path, module in family.make(hidden_size=128).named_modules() if isinstance(module, nn.Linear)]
    formats = {part: format for part, format in formats.items() if any(part in path for path in present)}
    settings = {"quant": {"weight": {"post_init_quant": formats}}}
    engine = infuse.init_inference(family.make(hidden_size=128), dtype=torch.float32, **settings)
    assert any(isinstance(module, JoinedLinear) for module in engine.module.modules()), str(engine.plan)
    taken.clear()
    if name == "qwen3_5":  # states, which `compare` does not read
        given = dict(inputs(family, batch=batch), max_new_tokens=6, do_sample=False)
        found = engine.generate(**given)
        with part_by_part(engine.module):
            assert torch.equal(found, engine.generate(**given))
    else:
        compare(engine, family, torch.float32, batch=batch)
    assert any(taken) or name == "qwen3_5"


def test_rounded_activations(taken: list[bool]) -> None:
    """More than 8 rows of x are rounded to 8 bits, which is done part by part."""
    wide = dict(hidden_size=128, intermediate_size=192)
    engine = infuse.init_inference(BY_NAME["llama"].make(**wide), dtype=torch.bfloat16, quant="int8:a8")
    for batch, together in ((8, True), (9, False)):
        taken.clear()
        compare(engine, BY_NAME["llama"], torch.bfloat16, batch=batch)
        assert any(taken) == together


@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (1, 8), (2, 3), (8, 1), (3, 3), (16, 1), (17, 1), (1, 9)])
def test_few_tokens_of_few_rows_go_together(batch: int, tokens: int, taken: list[bool]) -> None:
    together = tokens <= 8 and batch * tokens <= limits().plain_rows
    assert limits().plain_rows in (8, 16)  # with AMX and without
    engine = infuse.init_inference(BY_NAME["qwen3"].make(), dtype=torch.float32)
    taken.clear()
    compare(engine, BY_NAME["qwen3"], torch.float32, batch=batch, tokens=tokens)
    assert taken.count(True) == (9 if together else 0)


@pytest.mark.parametrize("way", ["register_forward_hook", "register_forward_pre_hook", "forward"])
def test_whoever_listens_to_a_part_hears_it(way: str, taken: list[bool]) -> None:
    family = BY_NAME["llama"]
    engine = infuse.init_inference(family.make(), dtype=torch.float32)
    block = blocks(engine.module)[1]
    heard: list[str] = []
    for name, part in block.named_modules():
        if name in ("norm1", "norm2", "self_attn", "self_attn.qkv", "self_attn.out", "mlp", "mlp.up", "mlp.down"):
            taken.clear(), heard.clear()
            with listening(part, way, lambda name=name: heard.append(name)):
                compare(engine, family, torch.float32)
            assert heard == [name] * 8, "the prompt and three steps, twice"
            assert taken.count(True) == 6, "the other two layers, three steps"
    taken.clear()
    hook = lambda module, args, output: heard.append("all") if module is block.self_attn else None  # noqa: E731
    handle = nn.modules.module.register_module_forward_hook(hook)
    compare(engine, family, torch.float32)
    handle.remove()
    assert heard.count("all") == 8 and not any(taken)


class Doubled(nn.Module):
    """What a user may put in the place of a part; with the names that the part's own linears have."""

    def __init__(self, own: nn.Module):
        super().__init__()
        self.own = own
        self.up = self.down = self.qkv = self.out = nn.Identity()

    def forward(self, *args: object, **kwargs: object) -> object:
        out = self.own(*args, **kwargs)
        return (2 * out[0], *out[1:]) if isinstance(out, tuple) else 2 * out


class Louder(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def louder(block: Block) -> None:
    block.mlp.__class__ = Louder


def biased(block: Block) -> None:
    block.mlp.down.bias = nn.Parameter(torch.ones(block.mlp.down.out_features))


def without_norm(block: Block) -> None:
    block.norm1.weight = None


def replaced(path: str) -> Callable[[Block], None]:
    def replace(block: Block) -> None:
        owner, _, name = path.rpartition(".")
        setattr(block.get_submodule(owner), name, Doubled(block.get_submodule(path)))

    return replace


CHANGES = {
    path: replaced(path)
    for path in ("mlp.up", "mlp.down", "self_attn.qkv", "self_attn.out", "norm1", "mlp", "self_attn")
}
CHANGES |= {"another class": louder, "a bias": biased, "no weight": without_norm}


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_user_changes_in_a_block_counts(name: str, taken: list[bool]) -> None:
    family = BY_NAME["llama"]
    engine = infuse.init_inference(family.make(), dtype=torch.float32)
    before = decoded(engine, family)
    CHANGES[name](blocks(engine.module)[0])
    taken.clear()
    compare(engine, family, torch.float32)
    assert taken.count(True) == 6, "the other two layers, three steps"
    assert not torch.allclose(decoded(engine, family)[0], before[0], atol=1e-3)


def test_what_a_shape_can_say_is_known_to_the_call() -> None:
    """A field that is added to a shape is told to C++, or a reason to go part by part, or is known to be neither."""
    told = {
        "heads", "kv_heads", "head_width", "activation", "gated", "scale", "softcap", "eps", "offset", "kind",
        "q_norm", "k_norm", "qkv_bias", "out_bias", "in_bias", "bias", "weight", "sinks",
        "v_norm", "out_norm", "norm", "lends", "borrows", "gate",
    }  # fmt: skip
    refused = {
        "clip", "whole", "head_counts", "causal", "norm_after", "factors", "wide",
    }  # fmt: skip  # by Attention.native, MLP.native and Norm.native
    sizes_and_names = {"name", "hidden", "inner", "width", "copies", "inverted_mask", "replaces"}
    sizes_and_names |= {"first_head", "first_kv_head"}
    # Asked, an argument; what other attention functions are given; calls for weights go part by part.
    by_call = {"position", "window", "passes", "sinks_in_weights", "by_name", "growth"}
    for shape in (AttentionShape, MLPShape, NormShape):
        unknown = {field.name for field in fields(shape)} - told - refused - sizes_and_names - by_call
        assert not unknown, shape
    told |= {"key_heads", "key_width", "value_width", "sections", "conv", "delta", "beta_factor", "limits", "skip"}
    # Multipliers, and layers of attention and a state space, go part by part.
    others = {"hidden", "channels", "replaces", "factors", "beside", "mask_argument"}
    for recurrent in (LinearAttentionShape, ShortConvShape):
        assert not {field.name for field in fields(recurrent)} - told - others, recurrent


@pytest.mark.parametrize("name", ["self_attn.qkv", "self_attn.out", "mlp.up", "mlp.down", "norm1", "norm2"])
def test_a_weight_that_no_kernel_takes_goes_part_by_part(name: str, taken: list[bool]) -> None:
    """Users change the weights that they hold."""
    family = BY_NAME["llama"]
    engine = infuse.init_inference(family.make(), dtype=torch.float32)
    weight = blocks(engine.module)[0].get_submodule(name).weight
    weight.data = torch.stack((weight.data, weight.data), dim=-1)[..., 0]
    assert not weight.is_contiguous()
    taken.clear()
    compare(engine, family, torch.float32)
    assert taken.count(True) == 6, "the other two layers, three steps"


def test_the_proof_takes_steps_in_one_call(taken: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """With a mask and without, of one token and of several."""
    masked: list[tuple[int, bool]] = []
    given = Attention.native_inputs

    def noted(self: Attention, x: Tensor, inputs: Inputs) -> NativeInputs | None:
        found = given(self, x, inputs)
        assert found is not None
        masked.append((x.shape[1], found.mask is not None))
        return found

    monkeypatch.setattr(Attention, "native_inputs", noted)
    engine = infuse.init_inference(BY_NAME["llama"].make(), dtype=torch.float32, verify="all")
    layers = len(blocks(engine.module))
    assert {call: masked.count(call) for call in masked} == {
        (1, False): layers,
        (2, True): 2 * layers,
        (1, True): layers,
    }
    assert taken.count(True) == 4 * layers


def test_rows_of_their_own_lengths_go_part_by_part(taken: list[bool]) -> None:
    family = BY_NAME["llama"]
    engine = infuse.init_inference(family.make(), dtype=torch.float32)
    cache, given = KVCache(), inputs(family, batch=2)
    with torch.no_grad():
        engine(**given, past_key_values=cache, use_cache=True)
        one = dict(input_ids=given["input_ids"][:, :1], past_key_values=cache, use_cache=True)
        cache.crop_rows(torch.tensor([5, 9]))
        taken.clear()
        engine(**one, position_ids=torch.tensor([[5], [9]]))
    assert taken and not any(taken)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_steps_go_in_one_call_again_after_a_call_that_recorded(name: str, taken: list[bool]) -> None:
    """transformers leaves its recorders on layers and attentions for good; they hear only calls that collect."""
    family = BY_NAME[name]
    engine = infuse.init_inference(family.make(), dtype="fp32")
    before = decoded(engine, family)
    assert all(taken[-9:])
    with torch.no_grad():
        recorded = engine(**inputs(family), output_hidden_states=True).hidden_states
    assert len(recorded) == 4 and all(block._modules[block._mixers[0]]._forward_hooks for block in blocks(engine))
    taken.clear()
    found = decoded(engine, family)
    assert len(taken) >= 9 and all(taken[-9:]) and all(map(torch.equal, found, before))
    taken.clear()
    with torch.no_grad():  # a step that records: its recorders hear each part
        cache = KVCache()
        engine(**inputs(family), past_key_values=cache)
        taken.clear()
        again = engine(input_ids=torch.tensor([[5], [6]]), past_key_values=cache, output_hidden_states=True)
    assert not any(taken) and len(again.hidden_states) == 4
    with blocks(engine)[0]._modules[blocks(engine)[0]._mixers[0]].register_forward_hook(lambda *_: None):
        taken.clear()
        decoded(engine, family)
    assert taken[-9:].count(False) == 3
