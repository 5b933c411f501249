"""Apply: what it takes in memory, what moves, what survives of the old layers, and that models stay models."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import pytest
import torch
import transformers as t
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer

import infuse
from infuse import native
from infuse.apply.apply import apply
from infuse.config.inference import InferenceConfig
from infuse.ground.device import Device
from infuse.ground.modes import Transparent
from infuse.layers.block import Block
from infuse.ops import Body, registered
from infuse.plan.decide import make_plan
from infuse.plan.plan import Plan
from infuse.quant.format import CPU_BLOCK_VALUES
from tests.models.every_architecture import tiny_config
from tests.models.families import BY_NAME, inputs
from tests.support.tolerance import assert_near

CPU = Device("cpu", None, "a CPU", (), 2**33, (torch.float32, torch.bfloat16, torch.float16))
# Layers that are large beside the activations of the proof, which run over 2 x 12 tokens.
LARGE = dict(hidden_size=512, intermediate_size=1408, num_attention_heads=4, vocab_size=300)
# What the reference of quantizing takes besides: a block of float32 and its temporaries, however small the model is.
BLOCK_BYTES = 4 * CPU_BLOCK_VALUES * 4


def applied(model: nn.Module, **keys: Any) -> Plan:
    config = InferenceConfig(**{"dtype": "fp32", **keys})
    return apply(make_plan(model, config, CPU), model, config)


def made(name: str = "llama", seed: int = 0, **changes: Any) -> Any:
    return BY_NAME[name].make(seed, **changes)


def outputs(model: nn.Module, name: str = "llama") -> Tensor:
    with torch.no_grad():
        return model(**inputs(BY_NAME[name]))[0]


# ---- memory ----


class LiveBytes(Transparent, TorchDispatchMode):
    """Counts the bytes of all storages alive after each operation: those of `model`, and those that operations return.

    What an operation takes inside itself and gives back before it returns is not seen.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak_bytes = self.most_bytes = 0  # `most_bytes`: with those seen since the last count, freed or not
        for tensor in (*model.parameters(), *model.buffers()):
            self.see(tensor)
        self.start_bytes = self.count()

    def see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.nbytes() and not tensor.is_meta:
            known = self.alive.get(storage.data_ptr())
            if known is None or known[0].expired() or known[1] != storage.nbytes():
                self.most_bytes += storage.nbytes()
                self.alive[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())

    def count(self) -> int:
        self.alive = {place: kept for place, kept in self.alive.items() if not kept[0].expired()}
        total = sum(size for _, size in self.alive.values())
        self.peak_bytes, self.most_bytes = max(self.peak_bytes, total), total
        return total

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.see(leaf)
        if self.most_bytes > self.peak_bytes:  # to count takes longer than the operation
            self.count()
        return out


def nbytes(module: nn.Module) -> int:
    return sum(p.nbytes for p in module.parameters())


PLAIN = [
    (torch.float32, dict(dtype="fp32", verify="all")),
    (torch.bfloat16, dict(dtype="bf16", verify="sample")),
    (torch.float32, dict(dtype="bf16", verify="sample")),
    (torch.float32, dict(dtype="bf16", verify="off")),
]
QUANTIZED = [
    (torch.bfloat16, dict(dtype="bf16", quant="int8", verify="sample")),
    (torch.bfloat16, dict(dtype="bf16", quant="int4:32:asymmetric", verify="off")),
    (torch.float32, dict(dtype="fp32", quant="int4:32", verify="sample")),
]


def peak_ratio(held: torch.dtype, layers: int, spare_bytes: int = 0, **keys: Any) -> float:
    """How much of the largest layer `apply` took beyond the model, less `spare_bytes`.

    The largest layer is that of the transformer layers and the embeddings, in the dtype that the model is held in.
    """
    model = made(**LARGE, num_hidden_layers=layers).to(held)
    largest = max(nbytes(model.model.layers[0]), nbytes(model.model.embed_tokens))
    gc.collect()
    live = LiveBytes(model)
    assert live.start_bytes >= nbytes(model)
    with live:
        done = applied(model, **keys)
    assert sum(step.depth == "block" for step in done.steps) == layers, str(done)
    gc.collect()
    assert live.count() <= done.after_bytes + 10_000, "something stays behind"
    return (live.peak_bytes - live.start_bytes - spare_bytes) / largest


@pytest.mark.parametrize(("held", "keys"), PLAIN, ids=str)
def test_peak_memory_is_the_model_and_its_largest_layer(held: torch.dtype, keys: dict[str, Any]) -> None:
    ratio = peak_ratio(held, 3, **keys)
    assert 0 < ratio <= 1, f"{ratio:.2f} of the largest layer beyond the model"


@pytest.mark.parametrize(("held", "keys"), QUANTIZED, ids=str)
def test_peak_memory_while_quantizing(held: torch.dtype, keys: dict[str, Any]) -> None:
    ratio = peak_ratio(held, 2, BLOCK_BYTES if isinstance(native.kernels(), str) else 0, **keys)
    assert ratio <= 1, f"{ratio:.2f} of the largest layer beyond the model"


@pytest.mark.parametrize("keys", [dict(dtype="bf16"), dict(dtype="bf16", quant="int8")], ids=str)
def test_peak_memory_with_experts(keys: dict[str, Any]) -> None:
    """The proof widens a few experts at a time, and one layer's new matrices are there besides the old ones."""
    config = t.GptOssConfig(**LARGE, num_hidden_layers=2, head_dim=64, num_local_experts=16, num_experts_per_tok=2)
    model = t.GptOssForCausalLM(config).to(torch.bfloat16).eval()
    layer = nbytes(model.model.layers[0])
    gc.collect()
    live = LiveBytes(model)
    with live:
        done = applied(model, **keys)
    assert "quant" not in keys or sum(step.depth == "experts" for step in done.steps) == 2
    assert live.peak_bytes - live.start_bytes <= 1.1 * layer  # one expert at a time is turned: 1/16


def test_peak_memory_while_quantizing_by_the_references(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "kernels", lambda: "not built here")
    ratio = peak_ratio(torch.float32, 1, BLOCK_BYTES, dtype="fp32", quant="int8")
    # Held dequantized, the new layer is as large as the old one, and these matrices are so small that each is quantized
    # in one part.
    assert 1 < ratio <= 1.5, f"{ratio:.2f} of the largest layer beyond the model and a block"


def test_the_counter_counts() -> None:
    """Two copies of a model at once are seen as two."""
    model = made(**LARGE)
    live = LiveBytes(model)
    with live:
        twice = copy.deepcopy(model)
        assert live.count() == 2 * live.start_bytes
        del twice
        gc.collect()
    assert live.count() == live.start_bytes and live.peak_bytes == 2 * live.start_bytes


@pytest.mark.parametrize("name", ["llama", "gpt2", "phi3", "gpt-neox"])
def test_weights_that_are_not_merged_move(name: str) -> None:
    model = made(name)
    held = {path: p.data for path, p in model.named_parameters()}  # kept, so that no address is used again
    before = {path: data.data_ptr() for path, data in held.items()}
    assert sum(step.depth == "block" for step in applied(model).steps) == 3
    after = {p.data_ptr() for p in model.parameters()}
    merged = {
        "llama": ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"),
        "gpt-neox": ("query_key_value",),
        "gpt2": ("c_attn.weight", "c_proj.weight", "c_fc.weight"),  # stored transposed, which kernels do not take
    }.get(name, ())
    assert {path for path, place in before.items() if place not in after} == {
        path for path in before if any(m in path for m in merged)
    }


# ---- what survives ----


def test_hooks_of_the_user_fire_and_can_be_removed() -> None:
    model, called = made(), []
    layer = model.model.layers[1]
    handles = [
        layer.register_forward_pre_hook(lambda m, args, kwargs: called.append(("before", type(m))), with_kwargs=True),
        layer.register_forward_hook(lambda m, args, out: called.append(("after", tuple(out.shape)))),
        layer.self_attn.register_forward_hook(lambda m, args, out: called.append(("attention", len(out)))),
        layer.register_forward_hook(lambda m, args, out: out * 2),
    ]
    wanted = outputs(model)
    applied(model)
    called.clear()
    assert_near(outputs(model), wanted, torch.float32)
    assert [what for what, _ in called] == ["before", "attention", "after"]
    assert called[0][1] is type(model.model.layers[1]) and called[1:] == [("attention", 2), ("after", (2, 11, 48))]
    for handle in handles:
        handle.remove()
    called.clear()
    assert float((outputs(model) - wanted).abs().max()) > 1e-2 and not called, "the doubling is gone as well"


def test_attributes_survive() -> None:
    model = made("gemma3")
    model.model.layers[2].note, model.model.layers[2].self_attn.note = "the user's", 7

    def attributes() -> list:
        names = ("attention_type", "layer_idx", "hidden_size", "note")
        parts = [part for layer in model.model.layers for part in (layer, layer.self_attn)]
        return [[getattr(part, name, None) for name in names] for part in parts]

    before = attributes()
    applied(model)
    assert all(isinstance(layer, Block) for layer in model.model.layers) and attributes() == before
    assert model.model.layers[2].self_attn.config is model.config


def test_attributes_of_a_module_inside_attention_survive() -> None:
    """GIT reads one there when it makes its mask: `layer.attention.self.image_patch_tokens`."""
    config = tiny_config(t.BertConfig)
    model = t.BertModel(config).eval()
    model.encoder.layer[1].attention.self.note = "the user's"
    module = infuse.init_inference(model, dtype=torch.float32, replace_with_kernel_inject=True).module
    for copied in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        layer = copied.encoder.layer[1]
        assert isinstance(layer, Block) and layer.attention.self.note == "the user's"
        assert layer.attention.self.attention_head_size == config.hidden_size // config.num_attention_heads
        assert vars(layer.attention.self) is vars(layer.attention)
        assert not any("self" in name for name, _ in layer.named_modules())


def test_layers_are_of_their_old_class() -> None:
    model = made()
    applied(model)
    for layer in model.model.layers:
        assert isinstance(layer, LlamaDecoderLayer)
        assert isinstance(layer, Block)
        assert type(layer).__name__ == "LlamaDecoderLayer"
        assert isinstance(layer.self_attn, LlamaAttention) and not layer.training
    assert not isinstance(made().model.layers[0], Block), "another model has its own classes"


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_tied_head_that_is_replaced_stays_tied(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a kernel for linears the head is a step as well."""
    linear = registered()["linear"]
    monkeypatch.setitem(linear.bodies, "cpu", Body("cpu", linear.reference, lambda device, dtype: None))
    model = made("llama-bias")
    done = applied(model, dtype=dtype)
    assert done.steps[-1].path == "lm_head"
    assert type(model.lm_head).__name__ == "Linear"
    assert type(model.lm_head) is not nn.Linear
    assert model.lm_head.weight is model.model.embed_tokens.weight
    config = InferenceConfig(dtype=dtype)
    assert done.after_bytes == make_plan(made("llama-bias"), config, CPU).after_bytes


# ---- again, and side by side ----


def test_a_second_time_says_so_and_works() -> None:
    model = made()
    wanted = outputs(model)
    infuse.init_inference(model, dtype="fp32", progress=False)
    layers = list(model.model.layers)
    with pytest.warns(UserWarning, match="already replaced"):
        engine = infuse.init_inference(model, dtype="fp32", progress=False)
    assert [left.path for left in engine.plan.left if left.why == "already replaced"] == [
        f"model.layers.{i}" for i in range(3)
    ]
    assert "left  model.layers.{0-2}: already replaced" in str(engine.plan)
    assert all(a is b for a, b in zip(layers, model.model.layers, strict=True))
    assert_near(outputs(model), wanted, torch.float32)


def test_two_engines_live_side_by_side_and_one_goes() -> None:
    """Of one class, of other sizes and weights."""
    models = [made(), made("llama-bias", hidden_size=64, num_attention_heads=8)]
    wanted = [outputs(model) for model in models]
    first, second = (infuse.init_inference(model, dtype="fp32", progress=False) for model in models)
    for engine, expected in ((first, wanted[0]), (second, wanted[1]), (first, wanted[0])):
        assert_near(outputs(engine), expected, torch.float32)
    prompt = dict(input_ids=torch.tensor([[5, 7, 9]]), max_new_tokens=6, do_sample=False)
    alone = first.generate(**prompt)
    second.generate(**prompt)
    assert torch.equal(first.generate(**prompt), alone)
    first.destroy()
    assert_near(outputs(second), wanted[1], torch.float32)
