"""Checkpoints whose matrices are stored in number formats: the codes are taken as they are, merged or kept apart."""

from __future__ import annotations

import re
import zlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import infuse
from infuse.architectures.packing import Fill
from infuse.ground.errors import ProofError
from infuse.layers.joined_linear import JoinedLinear
from infuse.layers.linear import Quantized
from infuse.plan.codes import lost_codes
from infuse.plan.kinds import BLOCK, EMBEDDING
from infuse.plan.stored import StoredFormats
from infuse.quant.format import QuantFormat, QuantizedWeight
from infuse.quant.parse import quant_format
from tests.models.families import BY_NAME
from tests.support.checkpoints import on_meta, outputs
from tests.support.coded import publish, registered
from tests.support.ranks import Ranks

SIZES: dict[str, Any] = dict(hidden_size=64, intermediate_size=128)  # whole groups of 32
WIDE: dict[str, Any] = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=2)  # whole blocks of 256
IDS = torch.arange(5, 15)[None]


def everywhere(format: str) -> Any:
    return lambda name: format if "_proj.weight" in name else None


def mixed(name: str) -> str | None:
    """q and v in other formats than k in layer 0; q plain in layer 1; gate and up differ in layer 2."""
    if "_proj.weight" not in name:
        return "int8:32:f16" if "lm_head" in name else None
    if "0.self_attn.k_proj" in name or "2.mlp.gate_proj" in name:
        return "int8:32:f16"
    return None if "1.self_attn.q_proj" in name else "int4:32:f16"


def like_gguf(name: str) -> str | None:
    """Q4_K_M: v and down in q6_k in one of two layers, a tied table in q6_k."""
    if name == "model.embed_tokens.weight":
        return "q6_k"
    if "_proj.weight" not in name:
        return None
    return "q6_k" if ".0." in name and ("v_proj" in name or "down_proj" in name) else "q4_k"


def loaded(folder: Path | str, family: str = "llama", sizes: Any = SIZES, **keys: Any) -> infuse.InferenceEngine:
    settings = {"dtype": "fp32", "progress": False, "verify": "strict", **keys}
    with registered():
        return infuse.init_inference(on_meta(family, **sizes), checkpoint=str(folder), **settings)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(IDS).logits


def distance(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted).norm() / wanted.norm())


def held(engine: infuse.InferenceEngine) -> dict[str, tuple[dict[str, Tensor], Any]]:
    """The buffers of each coded matrix that the model holds, by the names of its sources, and the rank's cut."""
    made = {}
    for step in engine.plan.steps:
        for fill in step.fills:
            if fill.format is not None:
                place: Any = engine.module.get_submodule(f"{step.path}.{fill.target}".rpartition(".")[0])
                made[" ".join(f"{step.path}.{source}" for source in fill.sources)] = place.held().tensors, fill.cut
    return made


def forbid_rounding(patch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("quantized again")

    patch.setattr(QuantFormat, "quantize", refuse)


@pytest.mark.parametrize("format", ["int4:32:f16", "int8:32:f16", "int4:32:asymmetric", "fp8:row", "mxfp4"])
def test_codes_are_taken_as_they_are(format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, original = publish(tmp_path, "llama", everywhere(format), **SIZES)
    forbid_rounding(monkeypatch)
    engine = loaded(tmp_path)
    assert [step.depth for step in engine.plan.steps][:3] == [BLOCK] * 3
    for sources, (tensors, _) in held(engine).items():
        for name, buffer in tensors.items():
            assert torch.equal(buffer, torch.cat([weights[source].tensors[name] for source in sources.split()]))
    assert distance(logits(engine), logits(original)) < 5e-5
    assert f"{quant_format(format)}, taken as it is, " in str(engine.plan) and "stored in" not in str(engine.plan)


def test_formats_that_differ_are_kept_apart_in_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, original = publish(tmp_path, "llama-bias", mixed, **SIZES, tie_word_embeddings=False)
    forbid_rounding(monkeypatch)
    engine = loaded(tmp_path, "llama-bias", {**SIZES, "tie_word_embeddings": False})
    blocks = [step for step in engine.plan.steps if step.depth == BLOCK]
    assert [step.path for step in blocks] == [f"model.layers.{n}" for n in range(3)]
    layers: Any = engine.module.model.layers
    qkv = layers[0].self_attn.qkv
    assert isinstance(qkv, JoinedLinear) and [part.out_features for part in qkv.children()] == [64, 32, 32]
    assert [str(part.format) for part in qkv.children()] == ["int4:32:f16", "int8:32:f16", "int4:32:f16"]
    assert isinstance(layers[1].self_attn.qkv, JoinedLinear) and not isinstance(layers[2].self_attn.qkv, JoinedLinear)
    found = held(engine)
    assert sum(len(sources.split()) for sources in found) == len(weights)
    for sources, (tensors, _) in found.items():
        for name, buffer in tensors.items():
            assert torch.equal(buffer, torch.cat([weights[source].tensors[name] for source in sources.split()]))
    assert distance(logits(engine), logits(original)) < 5e-5
    given: dict[str, Any] = dict(max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert torch.equal(engine.generate(IDS, **given), original.generate(IDS, **given))
    coded = sum(weight.nbytes for weight in weights.values())
    buffers = [module for module in engine.module.modules() if isinstance(module, Quantized)]
    assert sum(tensor.nbytes for module in buffers for tensor in module.held().tensors.values()) == coded
    with infuse.dequantized(engine.module):
        state = engine.module.state_dict()
    for name, value in original.state_dict().items():
        assert torch.equal(state[name], value), name


def test_text_of_the_plan(tmp_path: Path) -> None:
    """The dry run reads headers alone and tells the same as what was done."""
    publish(tmp_path, "llama", mixed, **SIZES)
    with registered():
        dry = infuse.plan(on_meta("llama", **SIZES), checkpoint=str(tmp_path), dtype="fp32")
    engine = loaded(tmp_path)
    for plan in (dry, engine.plan):
        text = str(plan)
        told = (
            "int4:32:f16 for self_attn.qkv (q_proj) and self_attn.qkv (v_proj) and self_attn.out and mlp.up and "
            "mlp.down, taken as it is, 19.6 kB, int8:32:f16 for self_attn.qkv (k_proj), taken as it is, 2.2 kB, "
            "spec of LlamaDecoderLayer"
        )
        assert told in text
        assert "int8:32:f16, taken as it is, 6.5 kB, a linear outside of blocks" in text
    assert dry.steps == engine.plan.steps and dry.after_bytes == engine.plan.after_bytes


def test_another_quant_tells_what_is_lost(tmp_path: Path) -> None:
    publish(tmp_path, "llama", mixed, **SIZES)
    text = str(loaded(tmp_path, quant="int8", verify="sample").plan)
    down, up = (f"model.layers.0.mlp.{name}_proj.weight" for name in ("down", "up"))
    assert f"18 matrices are stored in int4:32:f16 and become int8, e.g. {down}: rounded twice; leave quant" in text
    assert "3 matrices are stored in int8:32:f16 and become int8, e.g. lm_head.weight: rounded twice" in text
    text = str(loaded(tmp_path, quant={"weight": {"post_init_quant": {"down_proj": None, "up_proj": "fp8"}}}).plan)
    assert f"3 matrices are stored in int4:32:f16 and become float32, e.g. {down}: dequantized" in text
    assert f"3 matrices are stored in int4:32:f16 and become fp8, e.g. {up}: rounded twice" in text
    assert "int4:32:f16 for self_attn.qkv" in text


def test_codes_beside_a_matrix_that_is_rounded_are_kept(tmp_path: Path) -> None:
    """k is rounded to the format that q and v are stored in: their codes are still taken, though all formats agree."""
    weights, _ = publish(
        tmp_path, "llama", lambda name: "int8:32:f16" if "k_proj" in name else everywhere("int4:32:f16")(name), **SIZES
    )
    engine = loaded(tmp_path, quant={"weight": {"post_init_quant": {"k_proj": "int4:32:f16"}}})
    found = {source: tensors for sources, (tensors, _) in held(engine).items() for source in sources.split()}
    for name in "qkv":
        source = f"model.layers.1.self_attn.{name}_proj.weight"
        assert torch.equal(found[source]["data"], weights[source].tensors["data"]) == (name != "k"), name
    text = str(engine.plan)
    assert "3 matrices are stored in int8:32:f16 and become int4:32:f16" in text
    assert "self_attn.qkv (q_proj) and self_attn.qkv (v_proj) and self_attn.out and mlp.up and mlp.down, taken" in text


def test_codes_that_are_rounded_with_others_are_told() -> None:
    """Of a matrix whose sources cannot be kept apart, all are rounded, also those stored in its format."""
    stored = StoredFormats({"a.q.weight": "int4:32", "a.k.weight": "int8:32"})
    fill = Fill("qk.weight", ("q.weight", "k.weight"), format="int4:32")
    steps: list[Any] = [SimpleNamespace(path="a", fills=(fill,))]
    told = [note.partition(", e.g.")[0] for note in lost_codes(stored, steps, torch.float32)]
    assert told == [f"1 matrix is stored in {text} and becomes int4:32" for text in ("int8:32", "int4:32")]
    steps = [SimpleNamespace(path="a", fills=(replace(fill, sources=("q.weight",), as_stored=True),))]
    (of_k,) = lost_codes(stored, steps, torch.float32)
    assert "a.k.weight: dequantized" in of_k


def test_the_ordinary_rule_proves_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tolerance of a format is added for codes that are copied: an error of 0.2 % of a scale is found."""
    publish(tmp_path, "llama", everywhere("int4:32:f16"), **SIZES)

    class Wrong(QuantizedWeight):
        @classmethod
        def of(cls, tensors: Any, shape: tuple[int, int], format: QuantFormat) -> QuantizedWeight:
            return QuantizedWeight.of({**tensors, "scale": tensors["scale"] * 1.002}, shape, format)

    monkeypatch.setattr("infuse.weights.fill.QuantizedWeight", Wrong)
    with pytest.raises(ProofError, match="differs from the original by .* 5.0e-05 is allowed"):
        loaded(tmp_path)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_in_16_bits(dtype: str, tmp_path: Path) -> None:
    _, original = publish(tmp_path, "llama", mixed, **SIZES)
    engine = loaded(tmp_path, dtype=dtype)
    assert sum(step.depth == BLOCK for step in engine.plan.steps) == 3
    assert distance(logits(engine), logits(original)) < (0.02 if dtype == "bf16" else 0.003)


def test_blocks_of_256_and_a_tied_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {**WIDE, "tie_word_embeddings": True}
    weights, original = publish(tmp_path, "llama", like_gguf, **sizes)
    forbid_rounding(monkeypatch)
    engine = loaded(tmp_path, sizes=sizes)
    module: Any = engine.module
    assert isinstance(module.model.layers[0].self_attn.qkv, JoinedLinear)
    assert str(module.lm_head.format) == str(module.model.embed_tokens.format) == "q6_k"
    shared = zip(module.lm_head.listed(), module.model.embed_tokens.listed(), strict=True)
    assert all(one is other for one, other in shared)
    for name, tensor in weights["model.embed_tokens.weight"].tensors.items():
        assert torch.equal(module.lm_head.held().tensors[name], tensor)
    assert distance(logits(engine), logits(original)) < 5e-5


def test_a_table_of_its_own_keeps_its_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def format_of(name: str) -> str | None:
        return "int8:32:f16" if "embed_tokens" in name else "int4:32:f16" if "lm_head" in name else mixed(name)

    weights, original = publish(tmp_path, "llama", format_of, **SIZES)
    forbid_rounding(monkeypatch)
    engine = loaded(tmp_path)
    (table,) = (step for step in engine.plan.steps if step.depth == EMBEDDING)
    assert table.path == "model.embed_tokens" and "looks its rows up in the stored codes" in str(engine.plan)
    module: Any = engine.module
    assert str(module.lm_head.format) == "int4:32:f16" and str(module.model.embed_tokens.format) == "int8:32:f16"
    assert distance(logits(engine), logits(original)) < 5e-5
    named = loaded(tmp_path, quant={"weight": {"post_init_quant": {"embed_tokens": None}}}, verify="sample")
    assert isinstance(named.module.model.embed_tokens, torch.nn.Embedding)
    assert str(named.module.lm_head.format) == "int4:32:f16" and distance(logits(named), logits(original)) < 5e-5
    dense = loaded(tmp_path, quant="int8", verify="sample")
    assert isinstance(dense.module.model.embed_tokens, torch.nn.Embedding)


@pytest.mark.parametrize("sizes", [SIZES, {**WIDE, "tie_word_embeddings": True}], ids=["mixed", "like gguf"])
def test_our_shards_keep_them_too(sizes: Any, tmp_path: Path) -> None:
    publish(tmp_path / "original", "llama", mixed if sizes is SIZES else like_gguf, **sizes)
    engine = loaded(tmp_path / "original", sizes=sizes, save_mp_checkpoint_path=str(tmp_path / "shards"))
    again = loaded(tmp_path / "shards", sizes=sizes)
    ours, theirs = held(again), held(engine)
    assert ours.keys() == theirs.keys()
    for sources, (tensors, _) in theirs.items():
        assert all(torch.equal(ours[sources][0][name], buffer) for name, buffer in tensors.items()), sources
    assert torch.equal(logits(again), logits(engine))


def on_rank(folder: str, tp: int, sizes: Any, save: str = "") -> tuple[Tensor, str, dict[str, Any]]:
    more = {"save_mp_checkpoint_path": save} if save else {}
    engine = loaded(folder, sizes=sizes, tensor_parallel={"tp_size": tp, "tp_grain_size": 8}, **more)
    return logits(engine), str(engine.plan), held(engine)


def test_two_ranks_share_codes(tmp_path: Path, ranks: Ranks) -> None:
    weights, original = publish(tmp_path / "original", "llama", mixed, **SIZES)
    results = ranks.run(2, on_rank, str(tmp_path / "original"), 2, SIZES, str(tmp_path / "shards"))
    for found, text, matrices in results:
        assert distance(found, logits(original)) < 5e-5 and "self_attn.qkv (q_proj)" in text
        assert sum(len(sources.split()) for sources in matrices) == len(weights)
        for sources, (tensors, cut) in matrices.items():
            whole = torch.cat([weights[source].tensors["data"] for source in sources.split()])
            if cut is not None and cut.axis == 0:
                expected = torch.cat([whole[start:stop] for start, stop in cut.ranges])
                assert torch.equal(tensors["data"], expected), sources
    one = loaded(tmp_path / "shards")
    assert distance(logits(one), logits(original)) < 5e-5
    again = ranks.run(2, on_rank, str(tmp_path / "shards"), 2, SIZES)
    assert all(torch.equal(found, results[0][0]) for found, _, _ in again)


def test_ranks_that_would_cut_groups_are_told(tmp_path: Path, ranks: Ranks) -> None:
    """32 inputs of a head's rank are no whole block of 256: the matrix is dequantized there, and the plan says so."""
    sizes = {**WIDE, "intermediate_size": 768}
    _, original = publish(tmp_path, "llama", like_gguf, **sizes)
    for found, text, _ in ranks.run(2, on_rank, str(tmp_path), 2, sizes):
        assert distance(found, logits(original)) < 5e-5
        assert "self_attn.out.weight: in torch.float32: though stored in q4_k: " in text
        assert "2 matrices are stored in q4_k and become float32, e.g. model.layers.0.self_attn.o_proj.weight" in text
        assert "mlp.down, taken as it is" in text or "mlp.down and" in text or "for mlp.down" in text


@pytest.mark.parametrize("family", ["gemma", "gemma3"])
def test_a_scaled_table_that_is_the_head_keeps_its_codes(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def format_of(name: str) -> str | None:
        return "int8:16:f16" if "embed_tokens" in name or "_proj.weight" in name else None

    weights, original = publish(tmp_path, family, format_of)
    forbid_rounding(monkeypatch)
    engine = loaded(tmp_path, family, {})
    module: Any = engine.module
    table = module.get_input_embeddings()
    assert table.shape.scale > 1 and str(table.format) == str(module.lm_head.format) == "int8:16:f16"
    assert distance(logits(engine), logits(original)) < 5e-5
    given: dict[str, Any] = dict(max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert torch.equal(engine.generate(IDS, **given), original.generate(IDS, **given))
    assert any("embed_tokens.weight" in name for name in weights)


def test_experts_in_two_formats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As llama.cpp writes them: down in more bits than gate and up in some layers."""

    def format_of(name: str) -> str | None:
        if "experts.gate_up_proj" in name:
            return "int4:16:f16"
        if "experts.down_proj" in name:
            return "int8:16:f16" if ".0." in name else "int4:16:f16"
        return "int8:16:f16" if "_proj.weight" in name else None

    weights, original = publish(tmp_path, "mixtral", format_of)
    forbid_rounding(monkeypatch)
    for inject in (True, False):
        engine = loaded(tmp_path, "mixtral", {}, replace_with_kernel_inject=inject)
        found = held(engine)
        assert sum(len(sources.split()) for sources in found) == len(weights)
        assert "stored in" not in str(engine.plan)
        assert distance(logits(engine), logits(original)) < 5e-5


@pytest.mark.parametrize("inject", [True, False])
def test_experts_of_which_one_matrix_is_plain(inject: bool, tmp_path: Path) -> None:
    _, original = publish(tmp_path, "mixtral", lambda name: "int8:16:f16" if "experts.gate_up_proj" in name else None)
    engine = loaded(tmp_path, "mixtral", {}, replace_with_kernel_inject=inject)
    text = str(engine.plan)
    assert "of experts are stored in int8:16:f16 and become float32" in text and "refused" not in text
    assert ("experts take formats in both matrices or in none" if inject else "both need a format") in text
    assert distance(logits(engine), logits(original)) < 5e-5


@pytest.mark.parametrize("family", ["qwen3_5", "falcon_h1", "t5-gated", "deepseek-v3"])
def test_any_mixture_of_formats_in_a_block(family: str, tmp_path: Path) -> None:
    """Gated queries, mixers with states, an encoder and a decoder, latent attention with experts."""

    def format_of(name: str) -> str | None:
        matrix = shapes[name]
        if len(matrix) != 2 or matrix[1] % 16 or not re.search(r"(layers|block)\..*proj.*\.weight$|\.[qkvo]\.w", name):
            return None
        return ("int4:16:f16", "int8:16:f16", None)[zlib.crc32(name.encode()) % 3]

    shapes = {name: tuple(tensor.shape) for name, tensor in BY_NAME[family].make().state_dict().items()}
    weights, original = publish(tmp_path, family, format_of)
    engine = loaded(tmp_path, family, {})
    assert sum(step.depth == BLOCK for step in engine.plan.steps) == 3
    assert any(step.apart for step in engine.plan.steps)
    assert sum(len(sources.split()) for sources in held(engine)) == len(weights)
    found, wanted = outputs(engine.module, family), outputs(original, family)
    assert distance(found, wanted) < 5e-5


@pytest.mark.parametrize("inject", [True, False])
def test_tables_whose_weight_a_model_reads_are_dequantized(inject: bool, tmp_path: Path) -> None:
    """DeBERTa multiplies with its table of relative positions."""

    def tables(name: str) -> str | None:
        return "int8:16:f16" if name.endswith("rel_embeddings.weight") else None

    _, original = publish(tmp_path, "deberta-v2", tables)
    engine = loaded(tmp_path, "deberta-v2", {}, verify="sample", replace_with_kernel_inject=inject)
    assert distance(outputs(engine.module, "deberta-v2"), outputs(original, "deberta-v2")) < 1e-5
    assert not [step for step in engine.plan.steps if step.kind is EMBEDDING]
