"""gpt-oss from its own files: codes of experts as they are, or the values that transformers makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t
from safetensors.torch import load_file
from torch import Tensor, nn

import infuse
from infuse.ground.errors import CheckpointError, ConfigError
from infuse.quant.microscaling import MicroscalingFormat, from_blocks
from tests.support.libraries import stand_in
from tests.support.published import empty, publish, tensors
from tests.support.ranks import Ranks, same

KEPT: dict[str, Any] = {"weight": {"post_init_quant": {"experts": "mxfp4"}}}
DENSE: dict[str, Any] = {"weight": {"post_init_quant": {"experts": None}}}
IDS = torch.arange(5, 15)[None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("published")
    publish(made)
    return made


@pytest.fixture(scope="module")
def dequantized(folder: Path) -> Any:
    """transformers' own reading: without its kernels it dequantizes to plain parameters."""
    model = t.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert model.model.layers[0].mlp.experts.down_proj.dtype == torch.float32
    return model


def loaded(folder: Path, **keys: Any) -> infuse.InferenceEngine:
    return infuse.init_inference(empty(folder), checkpoint=str(folder), progress=False, **{"dtype": "fp32", **keys})


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(IDS).logits


def stored(folder: Path, layer: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Codes and scales of a layer's two matrices in the order of ours: gates above ups, experts below one another."""
    held, found = load_file(folder / "model.safetensors"), {}
    for ours, theirs in (("up", "gate_up_proj"), ("down", "down_proj")):
        blocks, exponents = (held[f"model.layers.{layer}.mlp.experts.{theirs}_{kind}"] for kind in ("blocks", "scales"))
        if ours == "up":
            blocks, exponents = (torch.cat((one[:, 0::2], one[:, 1::2]), 1) for one in (blocks, exponents))
        weight = from_blocks(blocks.flatten(0, 1), exponents.flatten(0, 1))
        found[ours] = weight.tensors["data"], weight.tensors["scale"]
    return found


def test_codes_are_kept_bit_for_bit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("quantized or dequantized in between")

    monkeypatch.setattr(MicroscalingFormat, "_coded", refuse)
    monkeypatch.setattr(MicroscalingFormat, "_values", refuse)
    engine = loaded(folder, quant=KEPT, verify="off")
    for layer in range(2):
        experts = engine.module.model.layers[layer].mlp.experts
        for name, (data, scale) in stored(folder, layer).items():
            held = getattr(experts, name).held()
            assert torch.equal(held.tensors["data"], data) and torch.equal(held.tensors["scale"], scale), name


def test_tokens_are_those_of_the_dequantized_original(folder: Path, dequantized: Any) -> None:
    engine = loaded(folder, quant=KEPT, verify="strict")
    assert {step.depth for step in engine.plan.steps} == {"block", "linear"}
    wanted = logits(dequantized)
    torch.testing.assert_close(logits(engine), wanted, rtol=0, atol=5e-5 * float(wanted.std()))
    assert "mxfp4 for mlp.experts.up and mlp.experts.down" in str(engine.plan) and "become" not in str(engine.plan)
    given: dict[str, Any] = dict(max_new_tokens=8, do_sample=False)
    assert torch.equal(engine.generate(IDS, **given), dequantized.generate(IDS, **given))


def test_codes_are_kept_if_nothing_else_is_asked(folder: Path) -> None:
    engine, asked = loaded(folder, verify="strict"), loaded(folder, quant=KEPT, verify="strict")
    assert "mxfp4 for mlp.experts.up and mlp.experts.down, taken as it is, " in str(engine.plan)
    assert torch.equal(logits(engine), logits(asked)) and str(engine.plan) == str(asked.plan)


@pytest.mark.parametrize(
    ("quant", "becomes"),
    [
        (DENSE, "float32, e.g. model.layers.0.mlp.experts.down_proj: dequantized"),
        ("int8:16", "int8:16, e.g. model.layers.0.mlp.experts.down_proj: rounded twice"),
    ],
)
def test_other_formats_take_the_values(folder: Path, dequantized: Any, quant: Any, becomes: str) -> None:
    engine = loaded(folder, verify="strict", quant=quant)
    assert f"4 matrices of experts are stored in mxfp4 and become {becomes}" in str(engine.plan)
    wanted = infuse.init_inference(
        t.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(),
        dtype="fp32",
        progress=False,
        quant=quant,
    )
    torch.testing.assert_close(logits(engine), logits(wanted), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_in_16_bits(folder: Path, dequantized: Any, dtype: str) -> None:
    engine = loaded(folder, quant=KEPT, dtype=dtype, verify="strict")
    error, size = logits(engine).float() - logits(dequantized), logits(dequantized)
    assert float(error.norm() / size.norm()) < (0.03 if dtype == "bf16" else 0.004)


def test_a_model_that_keeps_the_original_layers(folder: Path, dequantized: Any) -> None:
    engine = loaded(folder, replace_with_kernel_inject=False)
    torch.testing.assert_close(logits(engine), logits(dequantized), rtol=0, atol=1e-5)


def test_our_shards_keep_them_too(folder: Path, tmp_path: Path) -> None:
    engine = loaded(folder, quant=KEPT, save_mp_checkpoint_path=str(tmp_path))
    again = infuse.init_inference(empty(folder), checkpoint=str(tmp_path), dtype="fp32", progress=False)
    for layer in range(2):
        for name, (data, scale) in stored(folder, layer).items():
            held = getattr(again.module.model.layers[layer].mlp.experts, name).held()
            assert torch.equal(held.tensors["data"], data) and torch.equal(held.tensors["scale"], scale)
    assert torch.equal(logits(again), logits(engine))


def on_rank(folder: Path, tp: int, ep: int) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    engine = loaded(folder, quant=KEPT, tensor_parallel={"tp_size": tp, "tp_grain_size": 8}, ep_size=ep)
    experts: Any = engine.module.model.layers[1].mlp.experts
    held = {name: getattr(experts, name).held() for name in ("up", "down")}
    return logits(engine), {name: (one.tensors["data"], one.tensors["scale"]) for name, one in held.items()}


@pytest.mark.parametrize(("size", "tp", "ep"), [(2, 1, 2), (3, 3, 1)])
def test_ranks_have_their_part_of_the_codes(
    folder: Path, dequantized: Any, ranks: Ranks, size: int, tp: int, ep: int
) -> None:
    results = ranks.run(size, on_rank, folder, tp, ep)
    wanted = logits(dequantized)
    assert same([found for found, _ in results])
    torch.testing.assert_close(results[0][0], wanted, rtol=0, atol=5e-5 * float(wanted.std()))
    whole = stored(folder, 1)
    for at in range(2):  # codes, scales
        up, down = ([held[name][at] for _, held in results] for name in ("up", "down"))
        if ep == 2:
            assert torch.equal(torch.cat(up), whole["up"][at]) and torch.equal(torch.cat(down), whole["down"][at])
        else:
            assert torch.equal(torch.cat(down, dim=1), whole["down"][at])
            by_half = [part.unflatten(0, (4, 2, -1)) for part in up]
            assert torch.equal(torch.cat(by_half, dim=2).flatten(0, 2), whole["up"][at])


def changed(what: str) -> dict[str, Tensor]:
    made, name = tensors(), "model.layers.1.mlp.experts.down_proj"
    if what == "NaN":
        made[f"{name}_scales"][2, 3, 1] = 255
    elif what == "no scales":
        del made[f"{name}_scales"]
    elif what == "narrow":
        made[f"{name}_blocks"] = made[f"{name}_blocks"][:, :, :2].contiguous()
    else:
        made[f"{name}_scales"] = made[f"{name}_scales"].to(torch.int32)
    return made


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("NaN", r"layers\.1\.mlp\.experts\.down_proj_scales: an exponent is 255"),
        ("no scales", r"missing  model\.layers\.1\.mlp\.experts\.down_proj\n  unexpected  .*down_proj_blocks"),
        (
            "narrow",
            r"down_proj: in blocks, torch.uint8 \(4, 64, 2, 16\) and torch.uint8 \(4, 64, 3\), the model has \(4, ",
        ),
        ("integers", r"down_proj: in blocks, torch.uint8 \(4, 64, 3, 16\) and torch.int32 \(4, 64, 3\), the model has"),
    ],
)
def test_faults_are_named(tmp_path: Path, what: str, told: str) -> None:
    publish(tmp_path, changed(what))
    model = empty(tmp_path)
    with pytest.raises(CheckpointError, match=told):
        infuse.init_inference(model, checkpoint=str(tmp_path), dtype="fp32", quant=KEPT, progress=False)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_transformers_own_form_is_named(folder: Path) -> None:
    model = empty(folder)
    model.model.layers[1].mlp.experts = stand_in("transformers.integrations.mxfp4.Mxfp4GptOssExperts", nn.Module)()
    with pytest.raises(ConfigError, match="already quantized by transformers in mxfp4 .infuse keeps these codes: with"):
        infuse.init_inference(model, checkpoint=str(folder))
