"""What mixtures have to give, by turns: each family in some columns, each column for every kind of router and layout.

Outputs, caches and ways to generate of whole blocks in float32 and bf16: test_families.py. Here: formats, static
caches, continuous batches and ranks of blocks; and all columns of mixtures whose experts are replaced alone.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import transformers as t
from torch import Tensor, nn
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.models.diffusion_gemma.configuration_diffusion_gemma import DiffusionGemmaTextConfig
from transformers.models.diffusion_gemma.modeling_diffusion_gemma import DiffusionGemmaEncoderTextModel
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextModel
from transformers.models.unlimited_ocr.configuration_unlimited_ocr import UnlimitedOcrTextConfig
from transformers.models.unlimited_ocr.modeling_unlimited_ocr import UnlimitedOcrTextModel

import infuse
from infuse.architectures.parts.experts import experts_in
from infuse.layers.mixture.experts import Experts
from tests.models.every_architecture import architectures
from tests.models.experts import classes
from tests.models.families import BY_NAME, GQA, LATENT_MIXTURES, MIXTURES, Family, inputs
from tests.models.mixtures import CONVERTED, NOT_ROUTED, SEEING
from tests.support.ranks import Ranks, same

TOLERANCE = 5e-5  # of logits, over the root mean square of the original's
_MOE: dict[str, Any] = dict(GQA, num_hidden_layers=2, num_experts_per_tok=2, moe_intermediate_size=24, num_experts=4)
_LATENT = dict(
    _MOE, n_routed_experts=4, num_key_value_heads=4, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8,
    v_head_dim=8, head_dim=8, n_group=1, topk_group=1,
)  # fmt: skip
_MAMBA = dict(mamba_n_heads=4, mamba_d_head=24, mamba_d_state=8, mamba_expand=2, mamba_n_groups=1)
_HALF_LINEAR = dict(linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8)
# Mixtures that every_architecture.py does not make tiny by the names of numbers alone, and some that it does.
ALONE = {
    one.name: one
    for one in (
        Family(
            "jamba", t.JambaConfig, t.JambaForCausalLM,
            values=dict(
                _MOE, mamba_d_state=4, mamba_dt_rank=4, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=1,
                expert_layer_offset=0,
            ),
        ),
        Family(
            "lfm2_moe", t.Lfm2MoeConfig, t.Lfm2MoeForCausalLM,
            values=dict(_MOE, num_dense_layers=0, layer_types=["conv", "full_attention"]),
        ),
        Family(
            "nemotron_h", t.NemotronHConfig, t.NemotronHForCausalLM,
            values=dict(
                {name: value for name, value in _MOE.items() if name != "num_hidden_layers"}, n_routed_experts=4,
                n_group=1, topk_group=1, moe_shared_expert_intermediate_size=24, head_dim=12, mamba_num_heads=4,
                mamba_head_dim=12, ssm_state_size=8, n_groups=2, chunk_size=8,
                layers_block_type=["moe", "attention", "moe"],
            ),
        ),
        Family(
            "granitemoehybrid", t.GraniteMoeHybridConfig, t.GraniteMoeHybridForCausalLM,
            values=dict(
                _MOE, **_MAMBA, num_local_experts=4, intermediate_size=24, shared_intermediate_size=24,
                layer_types=["attention", "mamba"],
            ),
        ),
        Family(
            "gemma4", t.Gemma4TextConfig, t.Gemma4ForCausalLM,
            values=dict(
                _MOE, top_k_experts=2, head_dim=12, global_head_dim=12, enable_moe_block=True, sliding_window=5,
                hidden_size_per_layer_input=0, layer_types=["sliding_attention", "full_attention"],
            ),
        ),
        Family(
            "bailing_hybrid", t.BailingHybridConfig, t.BailingHybridForCausalLM,
            values=dict(_LATENT, q_lora_rank=16, layer_group_size=2, mlp_layer_types=["sparse", "sparse"]),
        ),
        Family(
            "kimi_linear", t.KimiLinearConfig, t.KimiLinearForCausalLM,
            values=dict(
                _LATENT, linear_head_dim=8, linear_num_heads=2, layer_types=["linear_attention", "full_attention"],
                first_k_dense_replace=0,
            ),
        ),
        Family(
            "dots3_note", t.Dots3NoteTextConfig, t.Dots3NoteForCausalLM,
            values=dict(
                _LATENT, q_lora_rank=16, index_topk=4, index_head_dim=16, index_n_heads=2, first_k_dense_replace=0,
                sliding_window=5, layer_types=["indexed_attention", "sliding_attention"],
                shared_experts_intermediate_size=24, swa_num_attention_heads=4, swa_num_key_value_heads=4,
                swa_q_lora_rank=16, swa_kv_lora_rank=16, swa_qk_nope_head_dim=8, swa_qk_rope_head_dim=8,
                swa_v_head_dim=8, swa_head_dim=16,
            ) | dict(head_dim=16),
        ),
        Family(
            "qwen4_exp", t.Qwen4ExpTextConfig, t.Qwen4ExpForCausalLM,
            values=dict(
                _MOE, **_HALF_LINEAR, head_dim=12, shared_expert_intermediate_size=24, indexer_n_heads=2,
                indexer_kv_heads=1, indexer_head_dim=12, indexer_budget=4, indexer_compress_ratio=2,
                layer_types=["linear_attention", "indexed_attention"],
            ),
        ),
        Family(
            "zaya", t.ZayaConfig, t.ZayaForCausalLM, values=dict(_MOE, num_experts_per_tok=1, head_dim=12),
        ),
        Family(
            "deepseek_v3", t.DeepseekV3Config, t.DeepseekV3ForCausalLM,
            values=dict(_LATENT, q_lora_rank=16, first_k_dense_replace=0),
        ),
        Family(
            "mistral4", t.Mistral4Config, t.Mistral4ForCausalLM,
            values=dict(_LATENT, q_lora_rank=16, n_shared_experts=1, first_k_dense_replace=0) | dict(head_dim=16),
        ),
        Family(
            "gpt_oss", t.GptOssConfig, t.GptOssForCausalLM,
            values=dict(_MOE, num_local_experts=4, head_dim=12, intermediate_size=24),
        ),
    )
}  # fmt: skip
# Mixtures whose classes that generate also see, or generate by diffusion: their text layers alone.
TEXT = {
    one.name: one
    for one in (
        Family(
            "diffusion_gemma", DiffusionGemmaTextConfig, DiffusionGemmaEncoderTextModel, "text",
            dict(
                _MOE, top_k_experts=2, head_dim=12, global_head_dim=12, sliding_window=5,
                layer_types=["sliding_attention", "full_attention"],
            ),
        ),
        Family(
            "glm5_next", Glm5NextTextConfig, Glm5NextTextModel, "text",
            dict(
                _LATENT, q_lora_rank=16, index_topk=4, index_kpool=2, index_head_dim=16, index_n_heads=2, hc_mult=2,
                linear_head_dim=8, linear_num_heads=2, layer_types=["linear_attention", "indexed_attention"],
                mlp_layer_types=["sparse", "sparse"],
            ) | dict(qk_rope_head_dim=0, head_dim=0),
        ),
        Family(
            "unlimited_ocr", UnlimitedOcrTextConfig, UnlimitedOcrTextModel, "text",
            dict(
                _MOE, n_routed_experts=4, n_shared_experts=1, sliding_window=5, mlp_layer_types=["sparse", "sparse"],
            ) | dict(num_key_value_heads=4),
        ),
    )
}  # fmt: skip
# Its experts are left (docs/experts.md), so that no replacement is to be tested.
LEFT = ("muse_spark",)
MODES: dict[str, dict[str, Any]] = {
    "greedy": dict(do_sample=False),
    "beams": dict(do_sample=False, num_beams=3),
    "sampling": dict(do_sample=True, temperature=0.9, top_k=20),
}
FORMATS = ("int8:8", "int4:8")
BY_TURNS = [(name, tuple(MODES)[i % 3], FORMATS[i % 2]) for i, name in enumerate(ALONE)]


@cache
def original(name: str) -> nn.Module:
    return (ALONE.get(name) or BY_NAME[name]).make()


@torch.no_grad()
def first(model: Any, given: dict[str, Tensor]) -> Tensor:
    return model(**given)[0][given["attention_mask"].bool()].float()


def assert_close(found: Tensor, exact: Tensor, times: int = 1) -> None:
    assert bool(torch.isfinite(exact).all())
    assert float((found - exact).abs().max() / exact.square().mean().sqrt()) < times * TOLERANCE


def tokens(model: Any, given: dict[str, Tensor], **how: Any) -> Tensor:
    torch.manual_seed(5)
    return model.generate(**given, max_new_tokens=5, **how)


def rounded(engine: infuse.InferenceEngine, model: nn.Module) -> nn.Module:
    """The model with the weights of the engine, as rounded by its formats."""
    with infuse.dequantized(engine.module):
        model.load_state_dict(engine.module.state_dict())
    return model


@pytest.mark.slow  # imports every model of transformers
def test_every_mixture_is_made_tiny() -> None:
    """In this file, in those of other families, or by test_experts.py from the names of its config's numbers."""
    here = (*ALONE.values(), *TEXT.values(), *MIXTURES, *NOT_ROUTED.values(), *CONVERTED.values(), *SEEING.values())
    made = {family.model.__module__.split(".")[2] for family in here}
    made |= {model.__module__.split(".")[2] for _, model in architectures().values()}
    assert {module.split(".")[2] for module in classes().values()} - made == set(LEFT)


# ---- experts alone


@pytest.mark.parametrize(("name", "mode", "format"), BY_TURNS)
def test_experts_alone(name: str, mode: str, format: str) -> None:
    family = ALONE[name]
    given = inputs(family, padding="left")
    engine = infuse.init_inference(family.make(), dtype="fp32", replace_with_kernel_inject=False)
    paths = list(experts_in(original(name)))
    held = [module for module in engine.module.modules() if isinstance(module, Experts)]
    assert len(held) == len(paths) > 0
    assert_close(first(engine, given), first(original(name), given))
    assert torch.equal(tokens(engine, given, **MODES[mode]), tokens(original(name), given, **MODES[mode]))
    engine = infuse.init_inference(family.make(), dtype="fp32", replace_with_kernel_inject=False, quant=format)
    held = [module for module in engine.module.modules() if isinstance(module, Experts)]
    assert [str(module.up.format) for module in held] == [format] * len(paths)
    assert_close(first(engine, given), first(rounded(engine, family.make()), given), times=2)


@pytest.mark.parametrize("name", ALONE)
def test_experts_alone_in_16_bits(name: str) -> None:
    """By the rule of the proof, which raises where it does not hold."""
    engine = infuse.init_inference(ALONE[name].make(), dtype="bf16", verify="strict", replace_with_kernel_inject=False)
    assert any(isinstance(module, Experts) for module in engine.module.modules())
    assert bool(torch.isfinite(first(engine, inputs(ALONE[name]))).all())


@pytest.mark.parametrize("name", TEXT)
def test_experts_of_text_layers(name: str) -> None:
    family = TEXT[name]
    model, given = family.make(), inputs(family, padding="left")
    for dtype in ("fp32", "bf16"):  # in bf16 by the rule of the proof
        engine = infuse.init_inference(family.make(), dtype=dtype, verify="strict", replace_with_kernel_inject=False)
        assert sum(isinstance(one, Experts) for one in engine.module.modules()) == len(list(experts_in(model)))
        if dtype == "fp32":
            assert_close(first(engine, given), first(model, given))


# ---- blocks

BLOCKS = [family.name for family in MIXTURES if family.kind == "decoder"]


@pytest.mark.parametrize(("name", "format"), [(name, FORMATS[i % 2]) for i, name in enumerate(BLOCKS)])
def test_formats_in_blocks(name: str, format: str) -> None:
    family = BY_NAME[name]
    engine = infuse.init_inference(family.make(), dtype="fp32", quant=format)
    steps = [step for step in engine.plan.steps if step.depth == "block" and "mlp.experts.up.weight" in step.formats]
    assert steps and all(step.formats["mlp.experts.down.weight"] == format for step in steps)
    given = inputs(family, padding="left")
    assert_close(first(engine, given), first(rounded(engine, family.make()), given), times=2)


@pytest.mark.parametrize("name", BLOCKS[::2])
def test_static_caches(name: str) -> None:
    given, how = inputs(BY_NAME[name], padding="left"), dict(do_sample=False, cache_implementation="static")
    engine = infuse.init_inference(BY_NAME[name].make(), dtype="fp32", verify="off")
    assert torch.equal(tokens(engine, given, **how), tokens(BY_NAME[name].make(), given, **how))


# The originals fail, too, if they keep latents (the cache of continuous batching has heads of one width) or attend to
# chunks, which it does not know.
@pytest.mark.parametrize(
    "name", [name for name in BLOCKS[1::4] if BY_NAME[name] not in LATENT_MIXTURES and not name.startswith("llama4")]
)
def test_continuous_batches(name: str) -> None:
    requests = [[5, 6, 7, 8], [20], [5, 6, 7, 8, 9]]
    engine = infuse.init_inference(BY_NAME[name].make(), dtype="fp32", verify="off")
    settings = GenerationConfig(max_new_tokens=3, eos_token_id=-1, pad_token_id=0, do_sample=False)
    room = ContinuousBatchingConfig(page_size=4, num_blocks=16, max_batch_tokens=16)
    found = engine.generate_batch(requests, generation_config=settings, continuous_batching_config=room)
    exact: Any = BY_NAME[name].make()
    for ids, one in zip(requests, found.values(), strict=True):
        wanted = exact.generate(torch.tensor([ids]), max_new_tokens=3, do_sample=False)
        assert one.error is None and one.generated_tokens == wanted[0, len(ids) :].tolist()


# ---- ranks

WAYS = {"width": (2, 2, 1), "experts": (2, 1, 2), "width of 3": (3, 3, 1), "experts of 3": (3, 1, 3), "both": (4, 2, 2)}
# Routers with groups, of sparse mixers, of logits, with corrections; shared experts, gates of those and of heads.
OVER_RANKS = (
    ("glm4-moe", "experts of 3"), ("granite-moe-shared", "both"), ("afmoe", "experts"), ("ernie4_5-moe", "width of 3"),
    ("phimoe", "both"), ("laguna", "both"), ("qwen4_exp", "both"), ("deepseek_v3", "width"), ("nemotron_h", "experts"),
    ("deepseek-v2", "both"), ("mistral4", "width of 3"), ("minicpm3", "width"),
    ("kimi_linear", "experts"), ("kimi_linear-low-rank", "both"), ("bailing_hybrid", "width of 3"),
    ("llama4", "both"), ("llama4-plain", "experts"), ("llama4-experts", "width"),
)  # fmt: skip


def on_rank(name: str, tp: int, ep: int) -> tuple[Tensor, Tensor, list[str]]:
    family = ALONE.get(name) or BY_NAME[name]
    engine = infuse.init_inference(
        family.make(), dtype="fp32", progress=False, tensor_parallel={"tp_size": tp, "tp_grain_size": 4}, ep_size=ep
    )
    given = inputs(family, padding="left")
    kept = [
        left.why for left in engine.plan.left if left.why.startswith(("refused", "whole on each rank: its experts"))
    ]
    return first(engine, given), tokens(engine, given, do_sample=False), kept


@pytest.mark.slow
@pytest.mark.parametrize(("name", "way"), OVER_RANKS)
def test_ranks(name: str, way: str, ranks: Ranks) -> None:
    size, tp, ep = WAYS[way]
    results = ranks.run(size, on_rank, name, tp, ep)
    given = inputs(ALONE.get(name) or BY_NAME[name], padding="left")
    assert same([found for found, *_ in results]) and results[0][2] == []
    assert_close(results[0][0], first(original(name), given))
    wanted = tokens(original(name), given, do_sample=False)
    assert all(torch.equal(found, wanted) for _, found, _ in results)
