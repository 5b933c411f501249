"""A new part and its family are one spec and one layer: plan, formats, ranks, shards, state dict and proof follow."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import infuse
from infuse import architectures, ops
from infuse.architectures.bind import Binder
from infuse.architectures.families.llama import LLAMA
from infuse.architectures.layer import LayerSpec, Part
from infuse.architectures.part import COLUMN, INNER, ROW, Extent, Matrix, PartShape, Share
from infuse.architectures.parts.mlp import MLP
from infuse.config.inference import InferenceConfig
from infuse.ground.activations import Act
from infuse.ground.device import Device
from infuse.layers import parts
from infuse.layers.block import Block
from infuse.layers.build_context import BuildContext
from infuse.parallel.mesh import Mesh
from infuse.parallel.slices import Cut
from infuse.plan.bytes import parameter_bytes
from infuse.plan.decide import make_plan
from infuse.plan.plan import Plan
from infuse.quant.parse import quant_format
from tests.models.families import BY_NAME, inputs
from tests.support.ranks import Ranks

HIDDEN, MIDDLE, INNER_WIDTH, LAYERS = 128, 64, 192, 3
CPU = Device("cpu", None, "a CPU", (), 2**33, (torch.float32, torch.bfloat16, torch.float16))


# ---- the made-up family: Llama with an MLP of three matrices


class ThreeMatrices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.squeeze = nn.Linear(HIDDEN, MIDDLE, bias=False)
        self.widen = nn.Linear(MIDDLE, INNER_WIDTH)
        self.back = nn.Linear(INNER_WIDTH, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.back(nn.functional.silu(self.widen(self.squeeze(x))))


class TwoMatrices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.widen = nn.Linear(HIDDEN, INNER_WIDTH)
        self.back = nn.Linear(INNER_WIDTH, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.back(nn.functional.silu(self.widen(x)))


class NewLayer(LlamaDecoderLayer):
    def __init__(self, config: Any, layer_idx: int):
        super().__init__(config, layer_idx)
        self.mlp = TwoMatrices() if layer_idx < config.first_dense else ThreeMatrices()


def new_model(first_dense: int = 0) -> nn.Module:
    torch.manual_seed(0)
    llama = BY_NAME["llama"]
    sizes = dict(hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2)
    config = llama.config(**{**llama.values, **sizes}, first_dense=first_dense)
    model = LlamaForCausalLM(config)
    model.model.layers = nn.ModuleList(NewLayer(config, index) for index in range(LAYERS))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[1] ** 0.5)
    return model.eval()


# ---- what infuse is told of it: one spec ...


@dataclass(frozen=True)
class ThreeMLP:
    """down(act(up(mid(x))))."""

    mid: str
    up: str
    down: str
    activation: Act

    def bind(self, binder: Binder, name: str) -> ThreeShape:
        mid, up, down = (binder.linear(path) for path in (self.mid, self.up, self.down))
        for target, path, linear in (("mid", self.mid, mid), ("up", self.up, up), ("down", self.down, down)):
            binder.fill_linear(f"{name}.{target}", (path,), linear.bias)
        biases = (mid.bias, up.bias, down.bias)
        return ThreeShape(mid.columns, mid.rows, up.rows, biases, binder.activation(self.activation))


@dataclass(frozen=True)
class ThreeShape(PartShape):
    hidden: int
    middle: int
    inner: int
    biases: tuple[bool, bool, bool]
    activation: str

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        (mid, up, down), inner = self.biases, (Extent(INNER, self.inner),)
        return (
            Matrix("mid", self.middle, self.hidden, mid),
            Matrix("up", self.inner, self.middle, up, COLUMN, inner),
            Matrix("down", self.hidden, self.inner, down, ROW, inner),
        )

    @property
    def ops(self) -> tuple[str, ...]:
        return ("activation",)

    def of_rank(self, share: Share) -> ThreeShape:
        mid, up, down = self.biases
        return replace(self, inner=share.count(INNER), biases=(mid, up, down and share.is_first))


THREE = ThreeMLP("mlp.squeeze", "mlp.widen", "mlp.back", Act("silu"))
NEW = replace(LLAMA, layer=f"{NewLayer.__module__}.{NewLayer.__qualname__}", mlp=THREE)


# ... and one layer


class Three(nn.Module):
    def __init__(self, shape: ThreeShape, context: BuildContext):
        super().__init__()
        self.mid, self.up, self.down = (context.linear(matrix) for matrix in shape.matrices)
        self._activate = ops.activation.bound(context.bodies.get("activation", ops.REFERENCE))
        self._activation = shape.activation

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self._activate(self.up(self.mid(x)), self._activation))


def add(monkeypatch: pytest.MonkeyPatch, spec: LayerSpec = NEW) -> None:
    """Both are in the tables for as long as the patch holds."""
    monkeypatch.setattr(architectures, "BY_CLASS", {**architectures.BY_CLASS, spec.layer: (spec,)})
    monkeypatch.setattr(parts, "LAYERS", {**parts.LAYERS, ThreeShape: Three})


@pytest.fixture
def new_part(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    add(monkeypatch)
    yield


def plan_of(model: nn.Module, mesh: Mesh | None = None, **keys: Any) -> Plan:
    return make_plan(model, InferenceConfig(**{"dtype": "fp32", **keys}), CPU, mesh or Mesh())


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(**inputs(BY_NAME["llama"])).logits


def infer(model: nn.Module, **keys: Any) -> infuse.InferenceEngine:
    return infuse.init_inference(model, dtype=torch.float32, verify="strict", **keys)


# ---- what follows


def test_it_is_proven_and_computes_what_the_original_computes(new_part: None) -> None:
    model = new_model()
    wanted = logits(model)
    engine = infer(model)
    assert sum(isinstance(module, Block) for module in engine.module.modules()) == LAYERS
    torch.testing.assert_close(logits(engine), wanted, atol=1e-4, rtol=1e-4)


def test_a_spec_that_says_it_wrong_is_refused_by_the_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    add(monkeypatch, replace(NEW, mlp=replace(THREE, activation=Act("relu"))))
    with pytest.raises(infuse.ground.errors.ProofError, match=r"model\.layers\.0"):
        infer(new_model())


def test_parameters_that_the_spec_does_not_claim_are_told(new_part: None) -> None:
    model = new_model()
    model.model.layers[1].mlp.squeeze.bias = nn.Parameter(torch.zeros(MIDDLE))
    model.model.layers[2].mlp.register_parameter("gain", nn.Parameter(torch.ones(2)))
    plan = plan_of(model)
    assert [step.path for step in plan.steps if step.path.startswith("model.layers.")][:2] == [
        "model.layers.0",
        "model.layers.1",
    ]
    assert "parameter mlp.gain (2,) is not claimed" in str(plan)


def test_the_plan_names_its_matrices_formats_and_bytes(new_part: None) -> None:
    model = new_model()
    plan = plan_of(copy.deepcopy(model).to("meta"), quant={"format": "int8"})
    blocks = [step for step in plan.steps if step.path.startswith("model.layers")]
    sizes = {"mid": (MIDDLE, HIDDEN), "up": (INNER_WIDTH, MIDDLE), "down": (HIDDEN, INNER_WIDTH)}
    wanted = [(f"mlp.{name}.weight", "int8", quant_format("int8").nbytes(*size)) for name, size in sizes.items()]
    assert [list(step.matrices[-3:]) for step in blocks] == [wanted] * LAYERS
    by_name = {"quant": {"format": "int8", "weight": {"post_init_quant": {"mlp.squeeze": "int4:32"}}}}
    text = str(plan_of(model, **by_name))
    assert "block" in text and "model.layers.{0-2}" in text and "for mlp.mid" in text
    engine = infer(model, quant={"format": "int8"})
    assert parameter_bytes(engine.module) == plan.after_bytes


def test_ranks_have_whole_and_cut_matrices(new_part: None) -> None:
    model, mesh = new_model(), Mesh(tp=2)
    plans = [plan_of(model, rank) for rank in mesh.ranks()]
    layers: list[Any] = [next(step for step in plan.steps if step.path == "model.layers.0") for plan in plans]
    for number, own in enumerate(((0, 128), (128, 192))):  # in steps of 64
        wanted = {
            "mlp.mid.weight": None,
            "mlp.up.weight": Cut(0, (own,), (INNER_WIDTH,)),
            "mlp.up.bias": Cut(0, (own,), (INNER_WIDTH,)),
            "mlp.down.weight": Cut(1, (own,), (INNER_WIDTH,)),
        }
        wanted |= {"mlp.down.bias": None} if number == 0 else {}  # added to the sum once
        found = {fill.target: fill.cut for fill in layers[number].fills if fill.target.startswith("mlp.")}
        assert found == wanted
    assert [layer.shape.parts["mlp"].inner for layer in layers] == [128, 64]
    assert [layer.shape.parts["mlp"].biases for layer in layers] == [(False, True, True), (False, True, False)]
    whole = plan_of(model).steps[0].shape
    assert [layer.whole for layer in layers] == [whole, whole] and plans[0].digest() == plans[1].digest()


def logits_on_rank(keys: dict[str, Any]) -> tuple[Tensor, str]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        add(monkeypatch)
        engine = infer(new_model(), tensor_parallel={"tp_size": 2}, **keys)
        return logits(engine), str(engine.plan)


def test_two_ranks_compute_what_one_computes_and_save_what_one_reads(
    new_part: None, ranks: Ranks, tmp_path: Path
) -> None:
    wanted = logits(new_model())
    for found, text in ranks.run(2, logits_on_rank, {"save_mp_checkpoint_path": str(tmp_path)}):
        assert "block" in text and "refused" not in text
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    read = infer(new_model().to("meta"), checkpoint=str(tmp_path))
    torch.testing.assert_close(logits(read), wanted, atol=1e-4, rtol=1e-4)


def test_shards_are_read_back_bit_for_bit(new_part: None, tmp_path: Path) -> None:
    saved = infer(new_model(), quant={"format": "int8"}, save_mp_checkpoint_path=str(tmp_path))
    read = infer(new_model().to("meta"), checkpoint=str(tmp_path))
    assert [step.matrices for step in read.plan.steps] == [step.matrices for step in saved.plan.steps]
    torch.testing.assert_close(logits(read), logits(saved), atol=0, rtol=0)


def test_the_state_dict_is_the_originals(new_part: None) -> None:
    model = new_model()
    wanted = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    engine = infer(model)
    found = engine.module.state_dict()
    assert list(found) == list(wanted)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    changed = {name: tensor * 1.5 for name, tensor in wanted.items()}
    engine.module.load_state_dict(changed)
    other = new_model()
    other.load_state_dict(changed)
    torch.testing.assert_close(logits(engine), logits(other), atol=1e-4, rtol=1e-4)


@dataclass(frozen=True)
class FirstDense:
    """The parts of the first layers and of the rest."""

    dense: Part
    rest: Part

    def bind(self, binder: Binder, name: str) -> PartShape | None:
        is_dense = binder.index is not None and binder.index < binder.count("first_dense")
        return (self.dense if is_dense else self.rest).bind(binder, name)


def test_a_part_is_chosen_per_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    dense = MLP(up="mlp.widen", down="mlp.back", activation=Act("silu"))
    add(monkeypatch, replace(NEW, mlp=FirstDense(dense, THREE)))
    model = new_model(first_dense=1)
    wanted = logits(model)
    engine = infer(model)
    kinds = [len(list(module.mlp.children())) for module in engine.module.modules() if isinstance(module, Block)]
    assert kinds == [2, 3, 3]
    torch.testing.assert_close(logits(engine), wanted, atol=1e-4, rtol=1e-4)
