"""PEFT: adapters on a replaced model give what they give on the original, and their life goes on: switch, merge,
unload.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from packaging.version import Version
from peft import HRAConfig, IA3Config, LoraConfig, PeftModel, PrefixTuningConfig, get_peft_model
from torch import Tensor, nn
from transformers.integrations.peft import MIN_PEFT_VERSION

import infuse
from infuse.layers.block import Block
from infuse.layers.linear import Linear, QuantizedLinear
from tests.models.families import BY_NAME
from tests.support.tolerance import assert_near

IDS = torch.tensor([[5, 17, 40, 9, 88, 23, 61, 7, 30], [12, 70, 33, 4, 91, 15, 8, 52, 66]])
ATTENTION, MLP, ALL = ["q_proj", "v_proj"], ["gate_proj", "down_proj"], "all-linear"


def adapted(config: Any = None, name: str = "llama", **changes: Any) -> PeftModel:
    """A model with an adapter that changes what it computes."""
    config = config or LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": ATTENTION, **changes})
    return trained(get_peft_model(BY_NAME[name].make(), config))


def trained(peft: PeftModel) -> PeftModel:
    """The adapters with values as training leaves them: PEFT's initial ones change nothing."""
    generator = torch.Generator().manual_seed(1)
    for parameter in peft.parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
    return peft.eval()


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return model(input_ids=IDS).logits


@torch.no_grad()
def disabled(peft: PeftModel) -> Tensor:
    with peft.disable_adapter():
        return logits(peft)


def tokens(model: Any) -> Tensor:
    return model.generate(input_ids=IDS, max_new_tokens=5, do_sample=False)


def roots(peft: PeftModel) -> list[Any]:
    """All that a user may give to init_inference."""
    return [peft, peft.base_model.model]


@pytest.mark.parametrize(("where", "root"), [(ATTENTION, 0), (MLP, 1), (ALL, 0)], ids=str)
def test_adapters_stay_plain_and_their_base_layers_get_kernels(where: Any, root: int) -> None:
    original, peft = adapted(target_modules=where), adapted(target_modules=where)
    engine = infuse.init_inference(roots(peft)[root], dtype="fp32")
    assert any(type(module) is Linear for module in peft.modules())
    assert all(
        type(part) is nn.Linear
        for name, part in peft.named_modules()
        if name.endswith((".lora_A.default", ".lora_B.default"))
    )
    assert "not as a whole block: has adapters (peft) at " in str(engine.plan)
    # of three layers: three times what one part may differ
    assert_near(logits(peft), logits(original), torch.float32, times=3)
    assert_near(disabled(peft), disabled(original), torch.float32, times=3)
    assert torch.equal(tokens(engine), tokens(original))


def test_layers_without_adapters_are_whole_blocks() -> None:
    original, peft = (adapted(layers_to_transform=[0]) for _ in range(2))
    infuse.init_inference(peft, dtype="fp32")
    assert sum(isinstance(module, Block) for module in peft.modules()) == 2
    assert_near(logits(peft), logits(original), torch.float32)
    assert torch.equal(tokens(peft), tokens(original))


@pytest.mark.parametrize("where", [ATTENTION, MLP, ALL], ids=str)
def test_quantized_base_layers(where: Any) -> None:
    """The adapter is exact: its quantized base differs from the original's by as much as without it."""
    original, peft = adapted(target_modules=where), adapted(target_modules=where)
    engine = infuse.init_inference(peft, dtype="fp32", quant="int8:16")
    bases = [module for name, module in peft.named_modules() if name.endswith(".base_layer")]
    assert bases and all(isinstance(module, QuantizedLinear) for module in bases)
    assert not [left for left in engine.plan.left if left.why.startswith("refused")]
    assert float((logits(peft) - logits(original)).norm() / logits(original).norm()) < 0.04
    assert engine.generate(input_ids=IDS, max_new_tokens=3).shape == (2, 12)


def test_in_16_bits() -> None:
    original, peft = adapted().to(torch.bfloat16), adapted()
    infuse.init_inference(peft, dtype="bf16")
    assert {parameter.dtype for parameter in peft.parameters()} == {torch.bfloat16}
    assert float((logits(peft) - logits(original)).norm() / logits(original).norm()) < 0.03


def add_another(peft: PeftModel) -> None:
    peft.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj", "o_proj"]))
    trained(peft)
    peft.set_adapter("other")


LIFE: dict[str, Callable[[PeftModel], Any]] = {
    "merge": lambda peft: peft.merge_adapter(),
    "unmerge": lambda peft: peft.unmerge_adapter(),
    "add and switch": add_another,
    "switch back": lambda peft: peft.set_adapter("default"),
    "delete": lambda peft: peft.delete_adapter("other"),
}


@pytest.mark.parametrize("end", ["merge_and_unload", "unload"])
def test_the_life_of_an_adapter_goes_on(end: str) -> None:
    original, peft = adapted(), adapted()
    infuse.init_inference(peft, dtype="fp32")
    for what, step in LIFE.items():
        before = logits(original)
        for model in (original, peft):
            step(model)
        if "switch" in what:
            assert not torch.allclose(before, logits(original), atol=1e-2)
        assert_near(logits(peft), logits(original), torch.float32)
    wanted, found = getattr(original, end)(), getattr(peft, end)()
    assert type(found) is type(wanted)
    assert_near(logits(found), logits(wanted), torch.float32)


def test_a_quantized_base_layer_says_why_nothing_is_merged_into_it() -> None:
    peft = adapted()
    infuse.init_inference(peft, dtype="fp32", quant="int8:16")
    before = logits(peft)
    for merge in (peft.merge_adapter, peft.merge_and_unload, lambda: peft.merge_and_unload(safe_merge=True)):
        with pytest.raises(
            infuse.UnsupportedCall,
            match=r"base layer is quantized \(int8:16\).*merge the adapters before init_inference",
        ):
            merge()
    assert torch.equal(logits(peft), before)
    base = disabled(peft)
    assert torch.equal(logits(peft.unload()), base)


@pytest.mark.parametrize("quant", [None, "int8:16"])
def test_adapters_are_saved_and_read_by_an_original(quant: str | None, tmp_path: Path) -> None:
    peft = trained(adapted())
    wanted = logits(peft)
    infuse.init_inference(peft, dtype="fp32", **({"quant": quant} if quant else {}))
    if quant is None:
        peft.save_pretrained(tmp_path)
    else:
        with pytest.raises(infuse.UnsupportedCall, match="infuse.dequantized"):
            peft.save_pretrained(tmp_path)
        with infuse.dequantized(peft):
            peft.save_pretrained(tmp_path)
    assert_near(logits(PeftModel.from_pretrained(BY_NAME["llama"].make(), tmp_path)), wanted, torch.float32)


def test_adapters_that_were_merged_before_are_part_of_a_quantized_weight() -> None:
    original, peft = adapted(), adapted()
    peft.merge_adapter()
    infuse.init_inference(peft, dtype="fp32", quant="int8:16")
    assert float((logits(peft) - logits(original)).norm() / logits(original).norm()) < 0.04
    with pytest.raises(infuse.UnsupportedCall, match="unmerge: this adapter's base layer is quantized"):
        disabled(peft)


READ_THE_WEIGHT = {
    "DoRA": LoraConfig(r=4, target_modules=ATTENTION, use_dora=True),
    "HRA": HRAConfig(r=4, target_modules=ATTENTION),
}


@pytest.mark.parametrize("name", READ_THE_WEIGHT)
def test_a_base_layer_whose_weight_is_read_is_not_quantized(name: str) -> None:
    """DoRA takes the norm of the weight, HRA multiplies it: neither asks the linear alone."""
    original, peft = adapted(READ_THE_WEIGHT[name]), adapted(READ_THE_WEIGHT[name])
    engine = infuse.init_inference(peft, dtype="fp32", quant="int8:16")
    refused = {
        left.path.rpartition("self_attn.")[2]: left.why for left in engine.plan.left if left.why.startswith("refused")
    }
    assert set(refused) == {"q_proj.base_layer", "v_proj.base_layer"}
    assert all("around it fails with the new linear" in why or "reads more of it" in why for why in refused.values())
    assert float((logits(peft) - logits(original)).norm() / logits(original).norm()) < 0.04
    with pytest.raises(infuse.ProofError, match="base_layer"):
        infuse.init_inference(adapted(READ_THE_WEIGHT[name]), dtype="fp32", quant="int8:16", verify="strict")


@pytest.mark.parametrize("quant", [None, "int8:16"])
def test_transposed_base_layers(quant: str | None) -> None:
    """PEFT merges a transposed product into GPT-2's Conv1D; a square weight would accept it untransposed."""
    changes: dict[str, Any] = dict(name="gpt2", target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)
    original, peft = adapted(**changes), adapted(**changes)
    infuse.init_inference(peft, dtype="fp32", **({"quant": quant} if quant else {}))
    if quant:
        assert float((logits(peft) - logits(original)).norm() / logits(original).norm()) < 0.04
        return
    assert_near(logits(peft), logits(original), torch.float32)
    assert_near(logits(peft.merge_and_unload()), logits(original), torch.float32)


@pytest.mark.parametrize("quant", [None, "int8:16"])
def test_ia3_is_served_and_unloaded(quant: str | None) -> None:
    config = IA3Config(target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"])
    original, peft = adapted(config), adapted(config)
    infuse.init_inference(peft, dtype="fp32", **({"quant": quant} if quant else {}))
    allowed = 0.04 if quant else 1e-4
    assert float((logits(peft) - logits(original)).norm() / logits(original).norm()) < allowed
    wanted, found = logits(original.unload()), logits(peft.unload())
    assert float((found - wanted).norm() / wanted.norm()) < allowed


def test_prefix_tuning_runs_over_whole_blocks() -> None:
    config = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    original, peft = adapted(config), adapted(config)
    infuse.init_inference(peft, dtype="fp32")
    assert sum(isinstance(module, Block) for module in peft.modules()) == 3
    assert_near(logits(peft), logits(original), torch.float32)
    assert torch.equal(tokens(peft), tokens(original))


@pytest.mark.parametrize("keys", [dict(), dict(replace_with_kernel_inject=False)], ids=str)
def test_adapters_put_on_afterwards(keys: dict[str, Any]) -> None:
    """On all linears, those of whole blocks included: the same tokens with and without a cache, and merged."""
    engine = infuse.init_inference(BY_NAME["llama"].make(), dtype="fp32", **keys)
    before = logits(engine.module)
    peft = trained(get_peft_model(engine.module, LoraConfig(r=4, target_modules=ALL)))
    assert torch.equal(disabled(peft), before) and not torch.allclose(logits(peft), before, atol=1e-2)
    alone = IDS
    for _ in range(5):
        with torch.no_grad():
            alone = torch.cat((alone, peft(input_ids=alone).logits[:, -1:].argmax(-1)), dim=1)
    assert torch.equal(tokens(peft), alone)
    wanted = logits(peft)
    assert_near(logits(peft.merge_and_unload()), wanted, torch.float32, times=5)  # the product is added to the weight


def test_what_cannot_be_put_on_afterwards() -> None:
    """A whole block has no q_proj, and PEFT knows no quantized linear of ours: PEFT says so."""
    with pytest.raises(ValueError, match="not found in the base model"):
        get_peft_model(
            infuse.init_inference(BY_NAME["llama"].make(), dtype="fp32").module, LoraConfig(target_modules=ATTENTION)
        )
    engine = infuse.init_inference(
        BY_NAME["llama"].make(), dtype="fp32", quant="int8:16", replace_with_kernel_inject=False
    )
    with pytest.raises(ValueError, match="QuantizedLinear.* is not supported"):
        get_peft_model(engine.module, LoraConfig(target_modules=ATTENTION))


@pytest.mark.skipif(Version(peft.__version__) < Version(MIN_PEFT_VERSION), reason="transformers wants a newer PEFT")
def test_transformers_own_adapters() -> None:
    """`model.add_adapter` of transformers puts PEFT's layers into the model itself."""
    models = [BY_NAME["llama"].make() for _ in range(2)]
    for model in models:
        model.add_adapter(LoraConfig(r=4, target_modules=ATTENTION, init_lora_weights=False), adapter_name="own")
        trained(model)
    engine = infuse.init_inference(models[1], dtype="fp32", quant=None)
    assert_near(logits(engine.module), logits(models[0]), torch.float32)
    for model in models:
        model.disable_adapters()
    assert_near(logits(engine.module), logits(models[0]), torch.float32)
