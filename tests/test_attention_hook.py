"""Our attention in layers that stay: each model inside by a name of its own, and never where a model reads the name."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import transformers as t
from every_architecture import architectures, tiny_config
from families import BY_NAME, GQA, enlarge, inputs
from torch import Tensor, nn
from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl
from transformers.models.mllama import modeling_mllama

import infuse
from infuse.layers import hook
from infuse.layers.hook import compares_names

TEXT = dict(GQA, num_hidden_layers=2, head_dim=12)
VISION = dict(hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4, image_size=16,
              patch_size=8, projection_dim=48)  # fmt: skip


def injected(model: nn.Module, **keys: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return infuse.init_inference(model, **{"dtype": "fp32", "progress": False, **keys})


def names(model: nn.Module) -> dict[str, Any]:
    """The name that each config has of its own, by the first module that has it."""
    found: dict[int, tuple[str, Any]] = {}
    for path, module in model.named_modules():
        config = vars(module).get("config")
        if config is not None and hasattr(config, "_attn_implementation"):
            found.setdefault(id(config), (path, vars(config)["_attn_implementation_internal"]))
    return dict(found.values())


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def kept(model: Any) -> Any:
    """The model, each decoder layer of which has a forward of its own, so that it stays."""
    for module in model.modules():
        if type(module).__name__.endswith("DecoderLayer"):
            module.forward = partial(type(module).forward, module)
    return model


def paligemma(text: Any) -> Any:
    torch.manual_seed(0)
    config = t.PaliGemmaConfig(
        text_config=text, vision_config=t.SiglipVisionConfig(**VISION), image_token_index=95,
        projection_dim=48, hidden_size=48, vocab_size=96,
    )  # fmt: skip
    model = t.PaliGemmaForConditionalGeneration(config).eval()
    enlarge(model)
    return model


GEMMA = t.GemmaConfig(**TEXT)
GEMMA2 = t.Gemma2Config(**TEXT, sliding_window=5, query_pre_attn_scalar=20)  # eager, as its scores are capped


def with_pictures(tokens: int = 9) -> dict[str, Tensor]:
    ids = torch.randint(3, 90, (2, tokens), generator=torch.Generator().manual_seed(1))
    ids[:, 1:5] = 95
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(2))
    kinds = torch.zeros_like(ids)
    return {"input_ids": ids, "pixel_values": pixels, "attention_mask": torch.ones_like(ids), "token_type_ids": kinds}


@torch.no_grad()
def test_each_model_inside_is_named_alone() -> None:
    """A tower that is to give its attentions stays eager, and the text model's name is another one's no more."""
    model = kept(paligemma(GEMMA))
    model.set_attn_implementation({"text_config": "sdpa", "vision_config": "eager"})
    before, wanted = names(model), model(**with_pictures())
    assert set(before.values()) == {"sdpa", "eager"}
    engine = injected(copy.deepcopy(model))
    after = names(engine.module)
    assert {path: name for path, name in after.items() if before[path] != "sdpa"} == {
        path: name for path, name in before.items() if name != "sdpa"
    }
    assert "infuse_cpu" in after.values(), str(engine.plan)
    assert error(engine(**with_pictures()).logits, wanted.logits) < 5e-5
    tower = engine.module.model.vision_tower
    seen = tower(with_pictures()["pixel_values"], output_attentions=True).attentions
    assert len(seen) == 2 and seen[0].shape == (2, 4, 4, 4)


@torch.no_grad()
@pytest.mark.parametrize("text", [GEMMA, GEMMA2], ids=lambda text: text.model_type)
def test_layers_that_stay_in_a_model_with_pictures_run(text: Any) -> None:
    model = kept(paligemma(text))
    wanted = model(**with_pictures()).logits
    engine = injected(copy.deepcopy(model))
    assert error(engine(**with_pictures()).logits, wanted) < 5e-5
    given = dict(with_pictures(), max_new_tokens=4, do_sample=False)
    assert torch.equal(engine.generate(**given), model.generate(**given))


def test_configs_inside_that_no_module_uses_keep_their_names() -> None:
    torch.manual_seed(0)
    model = kept(BY_NAME["llama"].make())
    model.config.inner = t.LlamaConfig(**GQA)  # as Moshi has its codec's
    model.config.inner._attn_implementation = "sdpa"
    engine = injected(model)
    assert any(step.depth == "attention" for step in engine.plan.steps)
    assert vars(model.config)["_attn_implementation_internal"] == "infuse_cpu"
    assert vars(model.config.inner)["_attn_implementation_internal"] == "sdpa"


@pytest.mark.parametrize("fault", ["raises", "differs"])
def test_names_are_restored_when_the_proof_fails(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = hook.attend

    def attend(*args: Any, **kwargs: Any) -> Any:
        if fault == "raises":
            raise RuntimeError("no attention today")
        out, weights = own(*args, **kwargs)
        return out * 1.5, weights

    monkeypatch.setattr(hook, "attend", attend)
    model = kept(BY_NAME["llama"].make())
    wanted, before = model(**inputs(BY_NAME["llama"])).logits, names(model)
    engine = injected(model)
    assert names(model) == before and "_infuse_attention" not in vars(model)
    assert any("refused" in left.why for left in engine.plan.left)
    assert error(engine(**inputs(BY_NAME["llama"])).logits, wanted) < 5e-5


def test_models_that_compare_the_name_keep_it() -> None:
    found = compares_names({modeling_minimax_m3_vl.MiniMaxM3VLAttention})
    assert found is not None and "modeling_minimax_m3_vl compares" in found
    assert compares_names({modeling_mllama.MllamaTextSelfAttention, t.LlamaForCausalLM, t.BertModel}) is None


def test_the_index_mask_of_minimax_m3_is_applied_beyond_its_budget() -> None:
    """transformers applies it under the names "eager" and "sdpa" only."""
    torch.manual_seed(0)
    kind, cls = architectures()["minimax_m3_vl"]
    config = tiny_config(kind)
    text = config.text_config
    text.index_block_size, text.index_topk_blocks, text.index_local_blocks = 4, 2, 1
    model = cls(config).eval()
    enlarge(model)
    ids = torch.randint(3, 90, (1, 40), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
        engine = injected(copy.deepcopy(model))
        assert error(engine(input_ids=ids).logits, wanted) < 5e-5
    assert any("compares the name" in left.why for left in engine.plan.left)


def test_the_hook_is_proven_beyond_windows_and_on_a_static_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention that differs only there is refused."""
    own = hook.attend

    def attend(body: str, module: Any, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
        out, weights = own(body, module, query, key, *args, **kwargs)
        return (out * 1.5 if key.shape[2] > 20 else out), weights

    monkeypatch.setattr(hook, "attend", attend)
    engine = injected(kept(BY_NAME["mistral"].make(sliding_window=24)))
    assert not any(step.depth == "attention" for step in engine.plan.steps)
