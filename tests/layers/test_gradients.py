"""Gradients: a backward pass that reaches a replaced layer raises; one that needs nothing of it gives the original's
gradients.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from itertools import cycle

import pytest
import torch
from torch import Tensor, nn

import infuse
from infuse.ground.errors import UnsupportedCall
from infuse.layers.block import Block
from infuse.layers.linear import Linear
from tests.models.families import BY_NAME, inputs

NAMES = ["llama", "gemma2", "gpt2", "bert", "vit", "modernbert", "mpt"]
REFUSED = "computes no gradients"


def given(name: str) -> dict[str, Tensor]:
    return inputs(BY_NAME[name], batch=2)


def loss_of(model: nn.Module, name: str, **more: Tensor) -> Tensor:
    output = model(**given(name), **more)
    return output[0].float().square().mean()


def infused(name: str, **keys: object) -> nn.Module:
    return infuse.init_inference(BY_NAME[name].make(), **{"dtype": "fp32", **keys}).module


@pytest.mark.parametrize(
    ("name", "dtype", "quant"),
    [*zip(NAMES, cycle(["fp32", "bf16"]), cycle([None, "int8:16", None])), ("llama", "bf16", "int8:16")],
)
def test_a_backward_pass_through_replaced_layers_raises(name: str, dtype: str, quant: str | None) -> None:
    model = infused(name, dtype=dtype, **({"quant": quant} if quant else {}))
    with pytest.raises(UnsupportedCall, match=REFUSED):
        loss_of(model, name).backward()
    inside = [module for module in model.modules() if isinstance(module, Block)]
    assert inside and all(p.grad is None for module in inside for p in module.parameters())


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_quantized_linears_alone_raise_too(name: str) -> None:
    model = infused(name, replace_with_kernel_inject=False, quant="int8:16")
    with pytest.raises(UnsupportedCall, match=REFUSED):
        loss_of(model, name).backward()


@pytest.mark.parametrize("quant", [None, "int8:16"])
def test_what_torch_func_differentiates_raises_too(quant: str | None) -> None:
    """Backward and forward, and where no parameter requires a gradient."""
    model = infused("llama", quant=quant).requires_grad_(False)
    x = torch.randn(1, 5, 48)

    def logits(x: Tensor) -> Tensor:
        return model(inputs_embeds=x).logits

    with pytest.raises(UnsupportedCall, match=REFUSED):
        torch.func.grad(lambda x: logits(x).sum())(x)
    with pytest.raises(UnsupportedCall, match=REFUSED):
        torch.func.jvp(logits, (x,), (x,))
    assert torch.allclose(torch.func.vjp(logits, x)[0], logits(x), atol=1e-4)  # computed by PyTorch's operations


def test_frozen_embeddings_do_not_make_it_silent() -> None:
    for before in (True, False):
        model = BY_NAME["llama"].make()
        if before:
            model.get_input_embeddings().requires_grad_(False)
        model = infuse.init_inference(model, dtype="fp32").module
        model.get_input_embeddings().requires_grad_(False)
        with pytest.raises(UnsupportedCall, match=REFUSED):
            loss_of(model, "llama").backward()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_head_on_a_frozen_model_trains_as_the_original(when: str) -> None:
    def frozen(model: nn.Module) -> nn.Module:
        return model.bert.requires_grad_(False)  # type: ignore[union-attr,operator]

    original, model = BY_NAME["bert"].make(), BY_NAME["bert"].make()
    frozen(original)
    if when == "before":
        frozen(model)
    model = infuse.init_inference(model, dtype="fp32").module
    if when == "after":
        frozen(model)
    loss_of(original, "bert").backward()
    loss_of(model, "bert").backward()
    wanted = {name: p.grad for name, p in original.named_parameters() if p.grad is not None}
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert wanted and found.keys() == wanted.keys()
    for name, grad in wanted.items():
        assert torch.allclose(found[name], grad, atol=1e-5 * float(grad.abs().max())), name


def test_gradients_of_embeddings_and_hidden_states_that_are_given_raise() -> None:
    model = infused("llama").requires_grad_(False)
    embeddings = model.get_input_embeddings()(given("llama")["input_ids"]).requires_grad_()
    with pytest.raises(UnsupportedCall, match=REFUSED):
        model(inputs_embeds=embeddings).logits.sum().backward()
    assert embeddings.grad is None


@pytest.mark.parametrize("name", ["llama", "bert", "gemma2"])
def test_plain_linears_in_layers_that_stay_have_the_gradients_of_the_original(name: str) -> None:
    original, model = BY_NAME[name].make(), infused(name, replace_with_kernel_inject=False)
    assert any(isinstance(module, Linear) for module in model.modules())
    loss_of(original, name).backward()
    loss_of(model, name).backward()
    for (path, a), (_, b) in zip(model.named_parameters(), original.named_parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), path
        if a.grad is not None and b.grad is not None:
            assert torch.allclose(a.grad, b.grad, rtol=0, atol=1e-4 * float(b.grad.abs().max()) + 1e-8), path


def test_a_plain_linear_alone_has_the_gradients_of_the_original() -> None:
    original = nn.Sequential(nn.Linear(48, 64), nn.Linear(64, 48))
    model = infuse.init_inference(copy.deepcopy(original), dtype="fp32").module
    x = torch.randn(3, 48, requires_grad=True)
    wanted = torch.autograd.grad(original(x).square().sum(), (x, *original.parameters()))
    found = torch.autograd.grad(model(x).square().sum(), (x, *model.parameters()))
    found_forward, wanted_forward = (
        torch.func.jvp(each, (x.detach(),), (x.detach(),))[1] for each in (model, original)
    )
    for a, b in zip((*found, found_forward), (*wanted, wanted_forward), strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)


def test_a_call_with_gradients_on_gives_the_values_of_one_without() -> None:
    for name in NAMES:
        model = infused(name)
        with torch.no_grad():
            wanted = model(**given(name))[0]
        found = model(**given(name))[0]
        assert found.requires_grad and not wanted.requires_grad, "as the original's"
        assert torch.equal(found, wanted)
        with torch.inference_mode():
            assert torch.equal(model(**given(name))[0], wanted)


def test_results_can_be_changed_in_place() -> None:
    for name in NAMES:
        model = infused(name)
        block = next(module for module in model.modules() if isinstance(module, Block))
        block.register_forward_hook(
            lambda module, args, out: (out[0] if isinstance(out, tuple) else out).zero_().sum().item() or None
        )
        assert not torch.equal(model(**given(name))[0], infused(name)(**given(name))[0])


def test_attention_of_layers_that_stay_keeps_its_gradients() -> None:
    from infuse.layers.attention.hook import attend

    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 6, 8, requires_grad=True) for _ in range(3))
    found = torch.autograd.grad(attend("cpu", nn.Identity(), q, k, v, None, is_causal=True)[0].sum(), (q, k, v))
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    for a, b in zip(found, torch.autograd.grad(exact.sum(), (q, k, v)), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def training_warnings(call: object) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()  # type: ignore[operator]
    return [str(one.message) for one in caught if "train()" in str(one.message)]


@pytest.mark.parametrize("name", ["llama", "bert"])
@pytest.mark.parametrize("inject", [True, False])
def test_train_warns_once_and_eval_never(name: str, inject: bool) -> None:
    engine = infuse.init_inference(
        BY_NAME[name].make(), dtype="fp32", quant="int8:16", replace_with_kernel_inject=inject
    )
    for model in (
        engine,
        engine.module,
        copy.deepcopy(engine.module),
        pickle.loads(pickle.dumps(engine.module.config)) and engine.module,
    ):
        model.eval()
        assert not training_warnings(model.eval) and not training_warnings(lambda model=model: model.train(False))
        (text,) = training_warnings(model.train)
        assert "dropout" in text and "gradients" in text
        assert model.training and not training_warnings(model.train)
        assert model.eval() is model and not model.training
    has_no_hooks = infuse.init_inference(nn.Sequential(nn.LayerNorm(4)), dtype="fp32", verify="off")
    assert not training_warnings(has_no_hooks.train)


def test_compiled_calls_with_gradients_on_compute_the_same_and_raise_in_backward() -> None:
    replaced = Linear(8, 8, True, {}, combine=lambda part: part).to_empty(
        device="cpu"
    )  # of ranks, which refuses gradients
    nn.init.normal_(replaced.weight), nn.init.zeros_(replaced.bias)
    model = nn.Sequential(nn.Embedding(5, 8), replaced)
    index = torch.tensor([[0, 3, 4]])
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    found = compiled(index)
    assert found.requires_grad and torch.equal(found, model(index))
    with pytest.raises(UnsupportedCall, match=REFUSED):
        found.sum().backward()
    assert torch.equal(torch.export.export(model, (index,)).module()(index), model(index))
