"""What reads as the weight of a quantized head, table or linear is the original's weight, rounded to the format: its
shape, its dtype and its values. Nothing can be written to it in silence, and nothing keeps its values.
"""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import infuse
from infuse.apply.adopt import adopt
from infuse.layers.joined_linear import JoinedLinear
from infuse.layers.linear import Quantized, TransposedLinear, make_linear
from infuse.quant.parse import quant_format
from tests.models.families import BY_NAME, FAMILIES
from tests.support.checkpoints import on_meta
from tests.support.coded import publish as publish_coded
from tests.support.coded import registered
from tests.support.quantized_files import BY_CASE, llama, publish
from tests.support.quantized_models import loaded

STORED = (
    "gptq-4-asym-v1-order", "gptq-3-sym-v1", "awq", "fp8-blocks", "compressed-w8a8-asym", "compressed-mxfp4",
    "nf4-doubly", "bitsandbytes-int8", "quanto-qint4", "modelopt-nvfp4",
)  # fmt: skip
WIDE: dict[str, Any] = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=2)  # whole blocks of 256
HIDDEN = torch.randn(2, 5, 48, generator=torch.Generator().manual_seed(3))


def replaced(name: str, **keys: Any) -> Any:
    keys = {"dtype": torch.float32, "verify": "off", "progress": False, "quant": "int8:16", **keys}
    return infuse.init_inference(BY_NAME[name].make(), **keys).module


def attribute(model: nn.Module, name: str) -> Any:
    """What a caller finds by the original's name; None where there is no such attribute."""
    found: Any = model
    for each in name.split("."):
        found = getattr(found, each, None)
    return found


def rounded(weight: Tensor, module: Quantized, *, transposed: bool) -> Tensor:
    """The original's weight, in the format in which the module has it."""
    rows = weight.t() if transposed else weight
    values = module.format.dequantize(module.format.quantize(rows.contiguous()), module.dtype)
    return values.t() if transposed else values


@pytest.mark.parametrize(
    ("name", "format", "inject", "least"),
    [
        ("llama", "int8:16", True, 1), ("llama", "fp6:16", False, 21), ("bert", "int8:16", True, 3),
        ("llama-bias", "int4:16:asymmetric", False, 21), ("gpt2", "fp8:16", True, 2), ("gpt2", "int4:16", False, 12),
        ("t5", "int8:16", False, 12),
    ],
)  # fmt: skip
def test_what_reads_as_a_weight_is_the_originals(name: str, format: str, inject: bool, least: int) -> None:
    original = BY_NAME[name].make()
    model = replaced(name, quant=format, dtype=torch.bfloat16, replace_with_kernel_inject=inject)
    read = 0
    for path, parameter in original.named_parameters(remove_duplicate=False):
        found = attribute(model, path)
        if found is None:
            continue
        wanted = parameter.detach().bfloat16()
        owner = model.get_submodule(path.rpartition(".")[0])
        if isinstance(owner, Quantized) and path.endswith(".weight"):
            turned = isinstance(original.get_submodule(path.rpartition(".")[0]), Conv1D)
            wanted, read = rounded(parameter.detach(), owner, transposed=turned), read + 1
        assert (found.shape, found.device) == (parameter.shape, parameter.device), path
        if wanted.dtype == found.dtype:  # some stay in float32
            assert torch.equal(found, wanted), path
    assert read >= least
    assert (model.device, model.dtype) == (original.device, torch.bfloat16)


@pytest.mark.variants
@pytest.mark.parametrize("inject", [True, False])
@pytest.mark.parametrize("name", [family.name for family in FAMILIES])
def test_no_name_of_the_original_reads_as_another_tensor(name: str, inject: bool) -> None:
    original, model = BY_NAME[name].make(), replaced(name, replace_with_kernel_inject=inject)
    for path, parameter in original.named_parameters(remove_duplicate=False):
        found = attribute(model, path)
        if found is not None:
            assert (found.shape, found.dtype) == (parameter.shape, parameter.dtype), path
            assert (found - parameter).norm() <= 0.02 * parameter.norm(), path


@pytest.mark.parametrize("name", STORED)
def test_stored_codes_read_as_their_values(name: str, tmp_path: Path) -> None:
    values = publish(tmp_path, BY_CASE[name], llama())
    model = loaded(tmp_path, verify="off", replace_with_kernel_inject=False).module
    held = [(path, module) for path, module in model.named_modules() if isinstance(module, Quantized)]
    assert len(held) == 21
    for path, module in held:
        assert module.weight.dtype == torch.float32 and module.weight.shape == values[f"{path}.weight"].shape
        torch.testing.assert_close(module.weight.clone(), values[f"{path}.weight"], rtol=1e-6, atol=1e-7)


def test_blocks_of_gguf_read_as_their_values(tmp_path: Path) -> None:
    def stored(name: str) -> str | None:
        if name == "model.embed_tokens.weight":
            return "q6_k"
        return None if "_proj.weight" not in name else "q6_k" if "v_proj" in name else "q4_k"

    original: Any
    _, original = publish_coded(tmp_path, "llama-bias", stored, **WIDE)
    with registered():
        keys = dict(dtype="fp32", progress=False, verify="off")
        model = infuse.init_inference(on_meta("llama-bias", **WIDE), checkpoint=str(tmp_path), **keys).module
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    assert torch.equal(head.weight, original.get_output_embeddings().weight) and head.weight is table.weight
    attention, merged = original.model.layers[0].self_attn, model.model.layers[0].self_attn.qkv
    assert isinstance(merged, JoinedLinear)  # formats of its parts differ
    parts = [getattr(attention, f"{one}_proj").weight for one in "qkv"]
    assert torch.equal(merged.weight.clone(), torch.cat(parts))


def readers() -> dict[str, Callable[[Tensor], Any]]:
    ids = torch.tensor([3, 90])
    return {
        "a row": lambda w: w[7],
        "rows": lambda w: w[ids],
        "a column": lambda w: w[:, 3],
        "mean": lambda w: w.mean(),
        "logit lens": lambda w: HIDDEN @ w.T,
        "linear": lambda w: F.linear(HIDDEN, w),
        "similarity": lambda w: F.cosine_similarity(w[7], w, dim=-1),
        "embedding": lambda w: F.embedding(ids, w),
        "data": lambda w: w.data.norm(dim=1),
        "cast": lambda w: w.detach().to(torch.float64),
        "clone": lambda w: w.clone(),
        "array": lambda w: torch.tensor(w.detach().cpu().numpy()),
        "list": lambda w: torch.tensor(w.tolist()),
        "iteration": lambda w: torch.stack(list(w)[5:9]),
        "joined": lambda w: torch.cat([w, w]),
        "decomposition": lambda w: torch.linalg.svdvals(w),
        "pickled": lambda w: pickle.loads(pickle.dumps(w)),
        "copied": copy.deepcopy,
        "into another": lambda w: torch.empty(w.shape).copy_(w),
        "compiled": torch.compile(lambda w: w.sum(dim=0) * 2, backend="eager"),
        "sizes": lambda w: (w.shape, w.dtype, w.device, w.numel(), w.stride(), w.is_contiguous(), w.dim(), len(w)),
    }


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_readers_get_the_values(mode: Any) -> None:
    model = replaced("llama")
    head: Any = model.get_output_embeddings()
    wanted = rounded(BY_NAME["llama"].make().get_output_embeddings().weight.detach(), head, transposed=False)
    for name, read in readers().items():
        with mode():
            found, expected = read(head.weight), read(wanted)
        if isinstance(expected, Tensor):
            torch.testing.assert_close(found.clone(), expected, rtol=1e-6, atol=1e-6, msg=name)
        else:
            assert found == expected, name
    assert repr(head.weight) == repr(wanted)


def test_a_logit_lens_may_be_trained_through() -> None:
    head: Any = replaced("llama").get_output_embeddings()
    x = HIDDEN.clone().requires_grad_()
    (x @ head.weight.T).sum().backward()
    torch.testing.assert_close(x.grad, head.weight.sum(0).expand_as(x))


WRITES: dict[str, Callable[[Any], Any]] = {
    "rows": lambda head: head.weight.__setitem__(7, 0.0),
    "rows of data": lambda head: head.weight.data.__setitem__(7, 0.0),
    "data": lambda head: setattr(head.weight, "data", torch.zeros(96, 48)),
    "a view": lambda head: head.weight[7].zero_(),
    "a view of a view": lambda head: head.weight.T[3].fill_(1.0),
    "in place": lambda head: head.weight.mul_(2.0),
    "copy_": lambda head: head.weight.copy_(torch.zeros(96, 48)),
    "normal_": lambda head: nn.init.normal_(head.weight),
    "out": lambda head: torch.add(torch.zeros(96, 48), 1.0, out=head.weight),
    "many at once": lambda head: torch._foreach_add_([head.weight], 1.0),
    "of a parameter": lambda head: setattr(head, "weight", nn.Parameter(torch.zeros(96, 48))),
    "of a tensor": lambda head: setattr(head, "weight", torch.zeros(96, 48)),
    "training": lambda head: head.weight.requires_grad_(),
    "a pointer": lambda head: head.weight.data_ptr(),
}


@pytest.mark.parametrize("name", WRITES)
def test_writes_are_refused(name: str) -> None:
    model = replaced("llama")
    head = model.get_output_embeddings()
    with pytest.raises(infuse.UnsupportedCall, match=r"a weight quantized in int8:16 .*load_state_dict"):
        WRITES[name](head)
    with pytest.raises(ValueError, match="read-only"):
        head.weight.numpy()[0] = 1.0
    model.load_state_dict({"lm_head.weight": torch.ones(96, 48)}, strict=False)
    torch.testing.assert_close(head.weight.clone(), torch.ones(96, 48), rtol=1e-3, atol=0)


@pytest.mark.parametrize(("name", "tied"), [("llama", False), ("bert", True), ("llama-bias", True)])
def test_tied_weights_are_the_same(name: str, tied: bool) -> None:
    model = replaced(name)
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        head, table = each.get_output_embeddings(), each.get_input_embeddings()
        assert (head.weight is table.weight) == tied and head.weight is head.weight
    assert model.get_output_embeddings().weight is not each.get_output_embeddings().weight
    head.weight = head.weight  # as PEFT does


def test_nothing_keeps_the_values() -> None:
    made: Any = make_linear(48, 96, False, "int8:16", {})
    made.hold([quant_format("int8:16").quantize(torch.randn(96, 48))])
    gc.disable()
    try:
        weight = made.weight
        gone = ref(weight)
        del weight
        assert gone() is None, "the module must not keep it"
        weight, module = made.weight, ref(made)
        del made, weight
        assert module() is None, "nor be part of a cycle"
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["llama", "llama-bias", "gpt2", "bert", "qwen2-moe"])
@pytest.mark.parametrize("quant", [None, "int8:16"])
def test_parameters_are_counted_as_the_originals(name: str, quant: str | None) -> None:
    original, model = BY_NAME[name].make(), replaced(name, quant=quant)
    for keys in ({}, {"exclude_embeddings": True}):
        for each in (model, pickle.loads(pickle.dumps(model))):
            assert each.num_parameters(**keys) == original.num_parameters(**keys)


@pytest.mark.parametrize("format", [None, "int8:16"])
def test_a_conv1d_reads_as_one(format: str | None) -> None:
    """transformers' Conv1D, of GPT-2, has its weight as [in, out]; ours is held as [out, in]."""
    conv = Conv1D(48, 48)
    made: Any = make_linear(48, 48, True, format, {}, transposed=True)
    adopt(made, conv)
    if format is None:
        made._parameters.update(weight=nn.Parameter(conv.weight.detach().t().contiguous(), False), bias=conv.bias)
        wanted = conv.weight.detach()
    else:
        made.hold([quant_format(format).quantize(conv.weight.detach().t().contiguous())])
        made._parameters["bias"] = conv.bias
        wanted = rounded(conv.weight.detach(), made, transposed=True)
    assert torch.equal(made.weight, wanted)
    torch.testing.assert_close(made(HIDDEN), HIDDEN @ wanted + conv.bias)
    if format is None:
        assert isinstance(made, TransposedLinear) and isinstance(made, Conv1D)
        made.weight.data[3] = 0.0
        given = nn.Parameter(made.weight.detach() * 2)
        made.weight = given
        given.data[5] = 0.0  # whoever gave it may go on writing to it
        twice = wanted * 2
        twice[3], twice[5] = 0.0, 0.0
        assert torch.equal(made.weight, twice)
        torch.testing.assert_close(made(HIDDEN), HIDDEN @ twice + conv.bias)
