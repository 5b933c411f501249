"""A layer is its classes, not its numbers alone: what is the user's own in it keeps running, and nothing is lost."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune, spectral_norm, weight_norm
from torch.nn.utils.parametrizations import weight_norm as parametrized_weight_norm

import infuse
from infuse.apply import build
from infuse.apply.build import Builder
from infuse.plan.bytes import parameter_bytes
from tests.models.families import BY_NAME, inputs
from tests.support.formerly_written import specs_for

FAMILIES = [
    "llama", "mistral", "qwen3", "phi3", "gemma2", "granite", "olmo2", "stablelm", "cohere", "nemotron", "gpt2",
    "gpt-neox", "gptj", "bloom", "opt-350m", "falcon-7b", "mpt", "bert", "mixtral", "qwen3-moe", "gpt-oss",
]  # fmt: skip
# Made of the same kinds of modules as llama and qwen3, gpt-neox, bloom and mixtral.
RELATIVES = ("mistral", "phi3", "granite", "gptj", "falcon-7b", "qwen3-moe")
LATER = 24  # tokens, beyond those of the proofs
TOLERANCE, OF_INT8 = 5e-5, 5e-2


def distance(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def injected(model: nn.Module, **keys: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return infuse.init_inference(model, **{"dtype": "fp32", "progress": False, **keys})


@torch.no_grad()
def result(model: Any, family: str, tokens: int = LATER) -> Tensor:
    return model(**inputs(BY_NAME[family], tokens=tokens))[0]


def layers_of(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if specs_for(module)]


def scaled(module: nn.Module, factor: float = 1.5, beyond: int = 0) -> None:
    """Make the module one of a user's subclass, which differs from its class for more than `beyond` tokens."""
    cls = type(module)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = cls.forward(self, *args, **kwargs)
        x = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        if max(x.shape[:2]) <= beyond:
            return out
        return (out[0] * factor, *out[1:]) if isinstance(out, tuple) else out * factor

    module.__class__ = type(f"My{cls.__name__}", (cls,), {"forward": forward, "__module__": "mine"})


def parts_of(layer: nn.Module) -> dict[str, nn.Module]:
    """The layer and its inner modules that are no linears, one of each class."""
    found: dict[type, tuple[str, nn.Module]] = {}
    for path, module in layer.named_modules():
        kind = type(module)
        container = isinstance(module, (nn.ModuleList, nn.Dropout, nn.Identity))
        if kind not in found and not container and not isinstance(module, nn.Linear) and kind.__name__ != "Conv1D":
            found[kind] = path, module
    return dict(found.values())


def cases() -> list[Any]:
    parts = {family: parts_of(layers_of(BY_NAME[family].make())[1]) for family in FAMILIES}
    return [
        pytest.param(
            family, path, id=f"{family}-{path or 'layer'}", marks=[pytest.mark.variants] if family in RELATIVES else []
        )
        for family in FAMILIES
        for path in parts[family]
    ]


@pytest.mark.parametrize(("family", "path"), cases())
def test_a_users_subclass_in_one_layer(family: str, path: str) -> None:
    """Also where it differs only beyond the lengths of the proof."""
    for beyond in (0, LATER - 1):
        model = BY_NAME[family].make()
        scaled(layers_of(model)[1].get_submodule(path), beyond=beyond)
        wanted = result(model, family)
        engine = injected(copy.deepcopy(model))
        assert distance(result(engine, family), wanted) < TOLERANCE, (path, beyond, str(engine.plan))
        assert any("your own" in left.why for left in engine.plan.left), str(engine.plan)


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "mixtral", "bloom", "opt-350m"])
@pytest.mark.parametrize("verify", ["sample", "strict"])
def test_another_activation_in_a_later_layer(family: str, verify: str) -> None:
    model = BY_NAME[family].make()
    later = layers_of(model)[1]
    kinds = ("act", "gelu", "activation")
    found = [
        path
        for path, module in later.named_modules()
        if not [*module.parameters()] and any(word in path.rpartition(".")[2] for word in kinds)
    ]
    for path in found:
        where, _, name = path.rpartition(".")
        setattr(later.get_submodule(where), name, nn.Tanh())
    if not found:
        pytest.skip("its activation is no module")
    wanted = result(model, family)
    try:
        engine = injected(copy.deepcopy(model), verify=verify)
    except infuse.ProofError:
        assert verify == "strict"
        return
    assert distance(result(engine, family), wanted) < TOLERANCE


def test_a_subclass_that_overrides_nothing_is_replaced() -> None:
    model: Any = BY_NAME["llama"].make()
    for layer in layers_of(model):
        layer.__class__ = type("Named", (type(layer),), {"__module__": "mine", "told": lambda self: "mine"})
    engine = injected(model)
    assert sum(step.depth == "block" for step in engine.plan.steps) == 3


@pytest.mark.parametrize("verify", ["sample", "off"])
def test_a_class_patched_for_all(verify: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = BY_NAME["llama"].make()
    kind = type(model.model.layers[0].mlp)
    own = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: own(self, x) * (1.5 if x.shape[1] > 20 else 1.0))
    wanted = result(model, "llama")
    engine = injected(copy.deepcopy(model), verify=verify)
    assert distance(result(engine, "llama"), wanted) < TOLERANCE
    assert any("LlamaMLP.forward" in left.why for left in engine.plan.left)


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe", "gpt-oss"])
def test_a_users_experts_in_a_later_layer(family: str) -> None:
    model = BY_NAME[family].make()
    experts = [module for path, module in model.named_modules() if path.endswith("mlp.experts")][-1]
    scaled(experts, factor=0.5, beyond=LATER - 1)
    wanted = result(model, family)
    engine = injected(copy.deepcopy(model))
    assert distance(result(engine, family), wanted) < TOLERANCE, str(engine.plan)
    assert sum(step.depth == "block" for step in engine.plan.steps) == len(layers_of(model)) - 1


# ---- parts that are held twice ----


class Holder(nn.Module):
    """A model, and a part of it under a name of its own."""

    def __init__(self, model: Any, part: Callable[[Any], nn.Module], *, first: bool):
        super().__init__()
        if first:
            self.part = part(model)
        self.model, self.config = model, model.config
        if not first:
            self.part = part(model)

    def forward(self, **kwargs: Any) -> Any:
        return self.model(**kwargs)


PARTS: dict[str, Callable[[Any], nn.Module]] = {
    "body": lambda model: model.model,
    "layers": lambda model: model.model.layers,
    "head": lambda model: model.lm_head,
    "layer": lambda model: model.model.layers[1],
    "mlp": lambda model: model.model.layers[1].mlp,
    "linear": lambda model: model.model.layers[1].mlp.down_proj,
    "norm": lambda model: model.model.layers[1].input_layernorm,
}


def held_twice(name: str, *, first: bool) -> Holder:
    return Holder(BY_NAME["llama"].make(hidden_size=64, intermediate_size=128), PARTS[name], first=first)


@pytest.mark.parametrize("first", [False, True], ids=["after", "before"])
@pytest.mark.parametrize("quant", [None, "int8"])
@pytest.mark.parametrize("name", PARTS)
def test_a_part_that_is_held_twice(name: str, quant: str | None, first: bool) -> None:
    """It is one module before and after, in the state dict too, and its values can be loaded by either name."""
    model = held_twice(name, first=first)
    wanted, state = result(model, "llama"), {key: value.clone() for key, value in model.state_dict().items()}
    decided = infuse.plan(model, dtype="fp32", quant=quant)
    engine = injected(model, quant=quant)
    assert PARTS[name](model.model) is model.part
    assert decided.after_bytes == parameter_bytes(model)
    assert distance(result(engine, "llama"), wanted) < (TOLERANCE if quant is None else OF_INT8)
    with infuse.dequantized(model):
        found = model.state_dict()
    assert list(found) == list(state)
    if quant is None:
        assert all(torch.equal(found[key], value) for key, value in state.items())
    changed = {key: value * 1.01 for key, value in state.items()}
    model.load_state_dict(changed)
    original = held_twice(name, first=first)
    original.load_state_dict(changed)
    assert distance(result(engine, "llama"), result(original, "llama")) < (TOLERANCE if quant is None else OF_INT8)


# ---- what the class does not make ----


def with_weight_norm(linear: nn.Linear) -> None:
    weight_norm(linear)


def with_parametrized_weight_norm(linear: nn.Linear) -> None:
    parametrized_weight_norm(linear)


def with_spectral_norm(linear: nn.Linear) -> None:
    spectral_norm(linear).eval()


def with_pruning(linear: nn.Linear) -> None:
    prune.l1_unstructured(linear, "weight", amount=0.5)


def with_a_parameter(linear: nn.Linear) -> None:
    linear.gain = nn.Parameter(torch.ones(3))


def with_a_module(linear: nn.Linear) -> None:
    linear.probe = nn.Linear(2, 2)


def with_a_buffer(linear: nn.Linear) -> None:
    linear.register_buffer("seen", torch.ones(2))


@pytest.mark.parametrize("where", ["model.layers.1.mlp.down_proj", "lm_head"])
@pytest.mark.parametrize("quant", [None, "int8"])
@pytest.mark.parametrize("change", [
    with_weight_norm, with_parametrized_weight_norm, with_spectral_norm, with_pruning, with_a_parameter, with_a_module,
    with_a_buffer,
])  # fmt: skip
def test_a_linear_that_was_changed_stays(change: Callable[[nn.Linear], None], quant: str | None, where: str) -> None:
    model: Any = BY_NAME["llama"].make(hidden_size=64, intermediate_size=128)
    change(model.get_submodule(where))
    linear, wanted = model.get_submodule(where), result(model, "llama")
    state = {key: value.clone() for key, value in model.state_dict().items()}
    assert where in str(infuse.plan(model, dtype="fp32", quant=quant)).replace("{1}", "1")
    engine = injected(model, quant=quant)
    assert model.get_submodule(where) is linear
    assert any(left.path == where for left in engine.plan.left), str(engine.plan)
    assert distance(result(engine, "llama"), wanted) < (TOLERANCE if quant is None else OF_INT8)
    with infuse.dequantized(model):
        assert list(model.state_dict()) == list(state)
        copied = model.state_dict()
    assert all(torch.equal(copied[key], value) for key, value in state.items() if key.startswith(where))
    model.load_state_dict(state)


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "mixtral"])
@pytest.mark.parametrize("persistent", [True, False])
def test_a_buffer_of_a_layer_with_a_hook_that_reads_it(family: str, persistent: bool) -> None:
    """A steering vector: the hook finds it, and the state dict has it."""
    model = BY_NAME[family].make()

    def steer(layer: Any, args: Any, output: Any) -> Any:
        return (output[0] + layer.steering, *output[1:]) if isinstance(output, tuple) else output + layer.steering

    for index, layer in enumerate(layers_of(model)):
        layer.register_buffer("steering", torch.full((1,), 0.1 * index), persistent=persistent)
        layer.register_forward_hook(steer)
    wanted, keys = result(model, family), list(model.state_dict())
    engine = injected(copy.deepcopy(model))
    assert distance(result(engine, family), wanted) < TOLERANCE
    assert list(engine.module.state_dict()) == keys
    assert any("steering" in left.why for left in engine.plan.left)


@pytest.mark.parametrize("name", ["steering", "_steering"])
def test_a_tensor_that_is_an_attribute_of_a_layer(name: str) -> None:
    model = BY_NAME["llama"].make()
    for layer in layers_of(model):
        setattr(layer, name, torch.full((1,), 0.1))
        layer.register_forward_hook(lambda layer, args, output: output + getattr(layer, name))
    wanted = result(model, "llama")
    engine = injected(copy.deepcopy(model))
    assert sum(step.depth == "block" for step in engine.plan.steps) == 3
    assert distance(result(engine, "llama"), wanted) < TOLERANCE


def test_a_module_that_a_layer_was_given() -> None:
    model: Any = BY_NAME["llama"].make()
    model.model.layers[1].mlp.probe = nn.Identity()
    engine = injected(model)
    assert isinstance(model.model.layers[1].mlp.probe, nn.Identity)
    assert any("probe" in left.why for left in engine.plan.left)


# ---- an error leaves the model as it was ----


def fingerprint(model: nn.Module) -> list[Any]:
    hooks = [(len(module._forward_hooks), len(module._state_dict_hooks)) for module in model.modules()]
    return [
        *(type(module) for module in model.modules()),
        *hooks,
        *(id(value) for value in model.parameters()),
        *(sorted(vars(module)) for module in model.modules()),
    ]


@pytest.mark.parametrize("quant", [None, "int8"])
@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt2"])
def test_an_error_while_a_layer_is_built_leaves_the_model_as_it_was(
    family: str, quant: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever raises for the last layer raises before the first one is replaced."""
    model = BY_NAME[family].make()
    wanted, before = result(model, family), fingerprint(model)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    last = [path for path, module in model.named_modules() if specs_for(module)][-1]
    own = Builder.built

    def built(self: Builder, step: Any, *args: Any, **kwargs: Any) -> nn.Module:
        if step.path == last:
            raise TypeError("a layer that nobody has foreseen")
        return own(self, step, *args, **kwargs)

    monkeypatch.setattr(Builder, "built", built)
    with pytest.raises(TypeError, match="foreseen"):
        injected(model, quant=quant)
    assert fingerprint(model) == before
    assert torch.equal(result(model, family), wanted)
    assert all(torch.equal(model.state_dict()[key], value) for key, value in state.items())


def test_an_error_after_old_weights_are_gone_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a rehearsal without values cannot show: there is no memory for the next layer's."""
    model = BY_NAME["llama"].make()
    own, calls = build.fill_module, []

    def fill(module: nn.Module, *args: Any) -> None:
        calls.append(module)
        if len(calls) == 3:
            raise MemoryError("no room")
        own(module, *args)

    monkeypatch.setattr(build, "fill_module", fill)
    with pytest.raises(infuse.InfuseError, match="2 of 4 replacements are in place.*load the model again"):
        injected(model, verify="off")


@pytest.mark.parametrize("error", [BrokenPipeError("gone"), ValueError("I/O operation on closed file")])
def test_a_progress_bar_that_cannot_be_drawn_stops_nothing(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    class Bar:
        n = 0

        def __init__(self, **kwargs: Any): ...

        def update(self, count: int) -> None:
            raise error

        close = update

    monkeypatch.setattr("tqdm.auto.tqdm", Bar)
    engine = injected(BY_NAME["llama"].make(), progress=True)
    assert sum(step.depth == "block" for step in engine.plan.steps) == 3
