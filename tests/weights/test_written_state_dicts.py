"""What is written into the tensors of a state dict reaches the model, as in the original, or is refused; libraries that
read, save and copy them see ordinary contiguous tensors.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import infuse
from infuse.weights.written_back import WrittenBack
from tests.models.families import BY_NAME, inputs
from tests.support.side_by_side import replaced

# Merged views, transposed, interleaved by heads, groups and parts, stacked experts, keys that are values, rows of rows.
NAMES = [
    *("llama", "gpt2", "phi3", "bert", "t5", "gpt-neox", "bloom", "bigcode", "codegen", "falcon-7b", "mixtral"),
    *("qwen2-moe", "gpt-oss", "llama4", "gemma4-experts", "qwen3_5", "qwen3_next", "mamba"),
]
NAMES = [name for name in NAMES if BY_NAME[name].is_there]
COPIED = {
    "gpt2": "transformer.h.1.attn.c_attn.weight",
    "gpt-neox": "gpt_neox.layers.1.attention.query_key_value.weight",
    "gpt-oss": "model.layers.1.mlp.experts.gate_up_proj",
}


def assert_alike(model: Any, wanted: Any, name: str) -> None:
    """Equal state dicts, and close outputs."""
    found = model.state_dict()
    assert all(torch.equal(found[key], value) for key, value in wanted.state_dict().items())
    with torch.no_grad():
        one, other = (each(**inputs(BY_NAME[name])) for each in (model, wanted))
    for key, value in other.items():
        if isinstance(value, Tensor):
            torch.testing.assert_close(one[key], value, rtol=2e-4, atol=2e-4)


@torch.no_grad()
def average(model: Any) -> None:
    """As averages of weights do: each value of the state dict moves towards another."""
    generator = torch.Generator().manual_seed(3)
    for value in model.state_dict().values():
        if value.is_floating_point():
            value.copy_(0.9 * value + 0.01 * torch.rand(value.shape, generator=generator))


@pytest.mark.parametrize("name", NAMES)
def test_averages_of_weights_reach_the_model(name: str) -> None:
    model, original = replaced(name), BY_NAME[name].make()
    for each in (model, original):
        average(each)
    assert_alike(model, original, name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", COPIED)
def test_averages_in_16_bits(name: str, dtype: torch.dtype) -> None:
    model, original = replaced(name, dtype=dtype), BY_NAME[name].make().to(dtype)
    for each in (model, original):
        average(each)
    found = model.state_dict()
    assert all(torch.equal(found[key], value) for key, value in original.state_dict().items())


def _rows(tensor: Tensor) -> None:
    for row in tensor:
        row.mul_(0.5)


def _assigned(tensor: Tensor) -> None:
    tensor[1] = 0.25


def _times(tensor: Tensor) -> None:
    tensor *= 0.5


def _of_inference(tensor: Tensor) -> None:
    with torch.inference_mode():
        tensor.mul_(0.5)


def _filled(tensor: Tensor) -> None:
    nn.init.constant_(tensor, 0.125)


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "zero_": Tensor.zero_,
    "copy_": lambda tensor: tensor.copy_(torch.ones(()) / 8),
    "lerp_": lambda tensor: tensor.lerp_(torch.ones_like(tensor), 0.1),
    "an item": _assigned,
    "times": _times,
    "data": lambda tensor: tensor.data.mul_(0.5),
    "detached": lambda tensor: tensor.detach().mul_(0.5),
    "a copy of the object": lambda tensor: copy.copy(tensor).mul_(0.5),
    "a view": lambda tensor: tensor.view(-1)[5:90].mul_(0.5),
    "transposed": lambda tensor: tensor.transpose(0, 1)[2:].add_(1),
    "one of its halves": lambda tensor: tensor.chunk(2)[1].data.add_(1),
    "rows": _rows,
    "out": lambda tensor: torch.add(tensor, 1, out=tensor),
    "foreach": lambda tensor: torch._foreach_mul_([tensor], 0.5),
    "foreach lerp": lambda tensor: torch._foreach_lerp_([tensor.detach()], [torch.ones_like(tensor)], 0.1),
    "init": _filled,
    "inference mode": _of_inference,
    "apply_": lambda tensor: tensor.apply_(lambda value: value * 0.5),
    "where": lambda tensor: tensor.masked_fill_(tensor > 0, 0.5),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("name", COPIED)
def test_each_way_of_writing(name: str, write: str) -> None:
    model, original = replaced(name), BY_NAME[name].make()
    for each in (model, original):
        with torch.no_grad():
            WRITES[write](each.state_dict()[COPIED[name]])
    found, wanted = (each.state_dict()[COPIED[name]] for each in (model, original))
    assert torch.equal(found, wanted) and not torch.equal(wanted, BY_NAME[name].make().state_dict()[COPIED[name]])
    assert_alike(model, original, name)


@pytest.mark.parametrize("name", COPIED)
def test_state_dicts_show_what_the_model_has(name: str) -> None:
    """Also one that was made before: a write to a part of it does not bring old values back."""
    model, original, key = replaced(name), BY_NAME[name].make(), COPIED[name]
    before, twice = model.state_dict(), model.state_dict()
    new = {each: value * 1.1 for each, value in original.state_dict().items()}
    for each in (model, original):
        each.load_state_dict(new)
    assert torch.equal(before[key], new[key]) and torch.equal(torch.from_numpy(before[key].numpy()), new[key])
    before[key][0].zero_()
    original.state_dict()[key][0].zero_()
    assert torch.equal(before[key], original.state_dict()[key]) and torch.equal(twice[key], before[key])
    assert before[key].data_ptr() == twice[key].data_ptr()  # one copy, however often a state dict is asked for
    assert_alike(model, original, name)
    model.load_state_dict(model.state_dict())
    assert_alike(model, original, name)


@pytest.mark.parametrize("name", COPIED)
def test_libraries_see_ordinary_tensors(name: str, tmp_path: Path) -> None:
    key, state = COPIED[name], replaced(name).state_dict()
    tensor, wanted = state[key], BY_NAME[name].make().state_dict()[COPIED[name]]
    assert isinstance(tensor, WrittenBack) and tensor.is_contiguous()
    untied = {each: value for each, value in state.items() if each != "lm_head.weight"}
    save_file(untied, tmp_path / "state.safetensors", metadata={"format": "pt"})
    torch.save(state, tmp_path / "state.pt")
    ordinary = [
        copy.deepcopy(tensor),
        copy.deepcopy(state)[key],
        pickle.loads(pickle.dumps(tensor)),
        torch.load(tmp_path / "state.pt", weights_only=True)[key],
        load_file(tmp_path / "state.safetensors")[key],
        tensor.clone(),
        tensor + 0,
        torch.cat([tensor]),
    ]
    for each in ordinary:
        assert type(each) is Tensor and torch.equal(each, wanted)
        each.zero_()
    assert torch.equal(tensor, wanted) and repr(tensor) == repr(wanted) and tensor.tolist() == wanted.tolist()
    assert (tensor.numpy() == wanted.numpy()).all()
    with pytest.raises(ValueError, match="read-only"):
        tensor.numpy()[0] = 0
    torch.testing.assert_close(tensor, wanted, rtol=0, atol=0)
    mapped = torch.vmap(lambda row: row.sum())(tensor)
    torch.testing.assert_close(mapped, torch.vmap(lambda row: row.sum())(wanted))


@pytest.mark.parametrize("name", COPIED)
def test_another_model_takes_the_tensors_as_its_own(name: str) -> None:
    """As of the original, both then have one memory; copies of that model do not."""
    key, model, other = COPIED[name], replaced(name), BY_NAME[name].make(seed=1)
    other.load_state_dict(model.state_dict(), assign=True)
    parameter = other.get_parameter(key)
    assert type(type(parameter)(torch.ones(2), requires_grad=False)) is nn.Parameter
    twin = copy.deepcopy(other)
    pickled = pickle.loads(pickle.dumps(other))
    for each in (twin, pickled):
        assert type(each.get_parameter(key)) is nn.Parameter
        each.get_parameter(key).data.zero_()
    assert_alike(model, other, name)
    other(**inputs(BY_NAME[name])).logits.sum().backward()
    torch.optim.SGD([parameter], lr=0.1).step()
    assert parameter.grad is not None and bool(parameter.grad.any())
    assert_alike(model, other, name)


def test_nothing_is_held_for_a_state_dict_that_is_gone() -> None:
    model = replaced("gpt2")
    originals = [hook.__self__ for module in model.modules() for hook in module._state_dict_hooks.values()]
    state = model.state_dict()
    assert any(each._links for each in originals)
    del state
    assert not any(each._links for each in originals)


@pytest.mark.parametrize("keep_vars", [False, True])
def test_gradients_are_asked_for_as_before(keep_vars: bool) -> None:
    state = replaced("gpt2").state_dict(keep_vars=keep_vars)
    wanted = BY_NAME["gpt2"].make().state_dict(keep_vars=keep_vars)
    assert {name: value.requires_grad for name, value in state.items()} == {
        name: value.requires_grad for name, value in wanted.items()
    }
    with torch.no_grad():
        state[COPIED["gpt2"]].zero_()
    assert not state[COPIED["gpt2"]].any()


@pytest.mark.parametrize("quant", ["int8:16", "int4:16:asymmetric"])
@pytest.mark.parametrize("name", ["llama", "llama-bias", "mixtral", "t5", *COPIED])
def test_what_is_written_to_dequantized_weights_is_refused(name: str, quant: str, tmp_path: Path) -> None:
    model = replaced(name, quant=quant)
    with infuse.dequantized(model):
        before = copy.deepcopy(model.state_dict())
        state, refused = model.state_dict(), 0
        for key, value in state.items():
            assert torch.equal(value, before[key])
            try:
                value.data.mul_(1)
            except infuse.UnsupportedCall as error:
                refused += 1
                assert key in str(error) and "load_state_dict" in str(error) and "clone()" in str(error)
        assert refused >= 6
        torch.save(state, tmp_path / "state.pt")
        after = model.state_dict()
    assert all(torch.equal(after[key], value) for key, value in before.items())
    loaded = torch.load(tmp_path / "state.pt")
    assert all(type(value) is Tensor and torch.equal(value, before[key]) for key, value in loaded.items())
    model.load_state_dict(loaded)
