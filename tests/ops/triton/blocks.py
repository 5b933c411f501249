"""Blocks over the Triton bodies, under Triton's interpreter (test_interpreter.py runs this file so): for few tokens
norms and sums are in the products beside them, and the result is that of separate kernels and that of the original
layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import ContinuousBatchingConfig, GenerationConfig, Lfm2Config, Lfm2ForCausalLM
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

import infuse
import tests.ops.triton.quick_interpreter  # noqa: F401
from infuse import ops
from infuse.layers.block import Block
from infuse.ops import Choice, Op, registered
from infuse.ops.triton import linear, quantized_linear
from infuse.ops.triton.configurations import Tiles
from tests.models.families import BY_NAME, GQA, Family
from tests.support.tolerance import assert_near

BESIDE = (
    "rms_norm",
    "layer_norm",
    "add_rms_norm",
    "add_layer_norm",
    "activation",
    "gated_activation",
    "linear alone",
    "quantized_linear alone",
)
CASES = [
    ("llama", None), ("llama-bias", None), ("llama", "int8:16"), ("gpt2", None), ("gpt2", "fp8:16"), ("granite", None),
    ("gemma2", None), ("gpt-neox", None), ("falcon-7b", None), ("phi", None), ("bert", "int4:16"), ("bert", None),
]  # fmt: skip


def wider(tiles: Callable[..., Tiles]) -> Callable[..., Tiles]:
    return lambda *shape: replace(tiles(*shape), outputs=64)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter:
    """Use every Triton body, as on a GPU; count their calls by op, and products also by whether they are fused."""
    made: Counter = Counter()

    def counted(name: str, function: Callable) -> Callable:
        def call(*args: Any, **more: Any) -> Any:
            alone = {"linear": 3, "quantized_linear": 6}.get(name) == len(args)
            made[f"{name} alone" if alone else name] += 1
            return function(*args, **more)

        return call

    for name, op in registered().items():
        if body := op.bodies.get("triton"):
            monkeypatch.setitem(op.bodies, "triton", replace(body, function=counted(name, body.function)))
    for module, name in ((linear, "plain_row"), (quantized_linear, "quantized_row")):  # fewer programs to interpret
        monkeypatch.setattr(module, name, wider(getattr(module, name)))
    choose = Op.choose
    monkeypatch.setattr(
        Op, "choose", lambda op, *of: Choice(op.name, "triton") if "triton" in op.bodies else choose(op, *of)
    )
    return made


class Reached(Exception):
    """The layer was called."""


class Given:
    """The first layer of a model, original or ours, and what the model passes to it for `tokens` tokens."""

    def __init__(self, name: str, format: str | None, dtype: torch.dtype, tokens: int):
        self.family = BY_NAME[name]
        original = self.family.make()
        engine = infuse.init_inference(self.family.make(), dtype=dtype, quant=format, verify="off")
        self.block = next(module for module in engine.module.modules() if isinstance(module, Block))
        path = next(path for path, module in engine.module.named_modules() if module is self.block)
        self.original = original.get_submodule(path)
        handle = self.block.register_forward_pre_hook(self.reached, with_kwargs=True)
        ids = torch.randint(3, 90, (1, tokens))
        with torch.inference_mode(), pytest.raises(Reached):
            engine.module(input_ids=ids, **({} if self.family.kind == "encoder" else {"use_cache": False}))
        handle.remove()

    def reached(self, block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs
        raise Reached  # what comes after the layer would only take the interpreter's time

    def of_original(self) -> Tensor:
        def wide(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(wide(one) for one in value)
            return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value

        return self.called(
            self.original, *(wide(arg) for arg in self.args), **{key: wide(value) for key, value in self.kwargs.items()}
        )

    def of_ours(self) -> Tensor:
        return self.called(self.block, *self.args, **self.kwargs)

    def called(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        with torch.inference_mode():
            out = layer(*args, **kwargs)
        return out[0] if isinstance(out, tuple) else out


@pytest.mark.parametrize(
    ("name", "format", "tokens", "dtype"),
    [(*case, 1, torch.float32) for case in CASES] + [(*case, 5, torch.float16) for case in CASES[::2]],
    ids=str,
)
def test_few_tokens(
    name: str, format: str | None, tokens: int, dtype: torch.dtype, calls: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = Given(name, format, dtype, tokens)
    calls.clear()
    found = given.of_ours()
    fused = "quantized_linear" if format else "linear"
    alone = f"{fused} alone"
    expected = {fused: 4}
    if name in ("granite", "gemma2"):  # nothing fuses with the last products of attention and MLP
        expected = {fused: 2, alone: 2} | ({"rms_norm": 2} if name == "gemma2" else {})
    elif name == "bert":
        expected = {fused: 1, alone: 3, "add_layer_norm": 2}
    assert {op: calls[op] for op in (fused, *BESIDE) if calls[op]} == expected
    monkeypatch.setattr(ops, "FEW_ROWS", 0)
    calls.clear()
    separate = given.of_ours()
    assert calls[fused] == 1, "the first of the MLP, with its activation"
    assert_near(found, separate, dtype, "with separate kernels")
    if format is None and dtype is torch.float32:
        assert_near(found, given.of_original(), dtype, "the original")


@pytest.mark.parametrize("part", ["norm1", "norm2", "qkv", "out", "up", "down", "attention", "mlp"])
@pytest.mark.parametrize("name", ["llama", "falcon-7b"])
def test_who_listens_in_between_hears(name: str, part: str, calls: Counter, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook is called once, with what the module is given and gives where nothing is fused, and may change it."""
    given = Given(name, None, torch.float32, 1)
    block, attention = given.block, given.block._modules[given.block._mixers[0]]
    where = {"qkv": attention, "out": attention, "up": block.mlp, "down": block.mlp}.get(part, block)
    module = attention if part == "attention" else where._modules.get(part)
    if module is None:
        pytest.skip(f"{name} has no {part}")
    heard: list[tuple[Tensor, Tensor]] = []

    def hook(_: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        value = output[0] if isinstance(output, tuple) else output
        taken = args[0] if args else kwargs["hidden_states"]
        heard.append((taken.clone(), value.clone()))
        return (value * 2, *output[1:]) if isinstance(output, tuple) else value * 2

    before = given.of_ours()
    handle = module.register_forward_hook(hook, with_kwargs=True)
    found = given.of_ours()
    monkeypatch.setattr(ops, "FEW_ROWS", 0)
    separate = given.of_ours()
    handle.remove()
    assert len(heard) == 2
    for here, there in zip(*heard, strict=True):
        assert_near(here, there, torch.float32, part)
    assert_near(found, separate, torch.float32, part)
    assert float((found - before).abs().max()) > 1e-3


def test_a_module_of_another_class_takes_part_as_it_is(calls: Counter) -> None:
    """A linear or norm that somebody has replaced, as adapters do."""
    given = Given("llama", None, torch.float32, 1)
    before = given.of_ours()
    for holder, part in ((given.block, "norm2"), (given.block.mlp, "up"), (given.block._modules["self_attn"], "out")):
        own = holder._modules[part]
        holder._modules[part] = nn.Sequential(own)
        calls.clear()
        assert_near(given.of_ours(), before, torch.float32, part)
        assert calls["linear"] == (4 if part == "norm2" else 3)
        holder._modules[part] = own


FULL = "full_attention"  # transformers' caches ask a layer with keys for their length
RECURRENT = {
    "causal_conv": Family(
        "lfm2", Lfm2Config, Lfm2ForCausalLM, values=dict(GQA, num_hidden_layers=2, layer_types=["conv", FULL])
    ),
    "linear_attention": Family(
        "qwen3_5", Qwen3_5TextConfig, Qwen3_5ForCausalLM,
        values=dict(
            GQA, num_hidden_layers=2, layer_types=["linear_attention", FULL], linear_num_key_heads=2,
            linear_num_value_heads=4, linear_key_head_dim=12, linear_value_head_dim=20,
        ),
    ),
    "selective_scan": replace(
        BY_NAME["jamba-dense"],
        values=BY_NAME["jamba-dense"].values | dict(num_hidden_layers=2, attn_layer_period=2, attn_layer_offset=1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RECURRENT)
def test_a_prompt_and_steps_on_states(name: str, calls: Counter) -> None:
    """The states go from the kernels of a prompt to those of steps."""
    family = RECURRENT[name]
    engine = infuse.init_inference(family.make(), dtype=torch.float32, verify="off")
    ids, settings = torch.randint(3, 90, (2, 11)), dict(max_new_tokens=3, do_sample=False)
    calls.clear()
    found = engine.module.generate(ids, **settings)
    assert calls[name] == calls["causal_conv"] == 3
    assert torch.equal(found, family.make().generate(ids, **settings))
    assert_near(engine.module(ids).logits, family.make()(ids).logits, torch.float32, name)


@pytest.mark.parametrize(("name", "format"), [("mistral", None), ("llama", "int8:16")])
def test_a_continuous_batch(name: str, format: str | None, calls: Counter) -> None:
    """The attention is transformers' over its paged cache; products, norms and rotary positions are the kernels."""
    requests = [[5, 6, 7, 8], [20], [5, 6, 7, 8, 9]]
    engine = infuse.init_inference(
        BY_NAME[name].make(num_hidden_layers=1), dtype=torch.float32, quant=format, verify="off"
    )
    settings = GenerationConfig(max_new_tokens=2, eos_token_id=-1, pad_token_id=0, do_sample=False)
    room = ContinuousBatchingConfig(page_size=4, num_blocks=16, max_batch_tokens=16)
    calls.clear()
    found = engine.generate_batch(requests, generation_config=settings, continuous_batching_config=room)
    assert calls["rotary"] and calls["quantized_linear" if format else "linear"] and not calls["attention"]
    for ids, one in zip(requests, found.values(), strict=True):
        wanted = engine.module.generate(torch.tensor([ids]), max_new_tokens=2, do_sample=False)
        assert one.error is None and one.generated_tokens == wanted[0, len(ids) :].tolist()
