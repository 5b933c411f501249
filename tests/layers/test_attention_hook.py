"""Our attention in layers that stay: each model inside by a name of its own, and never where a model reads the name."""

from __future__ import annotations

import ast
import copy
import pickle
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t
from torch import Tensor, nn
from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl
from transformers.models.mllama import modeling_mllama

import infuse
from infuse.layers.attention import hook
from infuse.layers.attention.hook import compares_names
from tests.models.every_architecture import architectures, tiny_config
from tests.models.families import BY_NAME, GQA, enlarge, inputs

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
        text_config=text,
        vision_config=t.SiglipVisionConfig(**VISION),
        image_token_index=95,
        projection_dim=48,
        hidden_size=48,
        vocab_size=96,
    )
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


def test_names_are_put_back_by_restore() -> None:
    model = kept(BY_NAME["llama"].make())
    before = names(model)
    engine = injected(model)
    assert names(model) != before and "_infuse_attention" in vars(model)
    infuse.restore(engine)
    assert names(model) == before and "_infuse_attention" not in vars(model)
    engine = injected(model)
    model.set_attn_implementation("eager")  # the user's choice stays
    infuse.restore(engine)
    assert set(names(model).values()) == {"eager"}


def test_names_are_restored_when_a_strict_proof_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no attention today")

    monkeypatch.setattr(hook, "attend", attend)
    model = kept(paligemma(GEMMA))
    model.set_attn_implementation({"text_config": "sdpa", "vision_config": "eager"})
    before = names(model)
    with pytest.raises(infuse.ProofError, match="no attention today"):
        injected(model, verify="strict")
    assert names(model) == before and not any("_infuse_attention" in vars(module) for module in model.modules())


@torch.no_grad()
def test_models_with_our_name_are_saved_copied_and_renamed_as_before(tmp_path: Path) -> None:
    model = kept(paligemma(GEMMA))
    model.set_attn_implementation({"text_config": "sdpa", "vision_config": "eager"})
    before, given = names(model), with_pictures()
    wanted = model(**given).logits
    engine = injected(copy.deepcopy(model))
    ours = names(engine.module)
    assert "infuse_cpu" in ours.values()

    engine.module.save_pretrained(tmp_path)
    assert "infuse" not in (tmp_path / "config.json").read_text()
    loaded = t.PaliGemmaForConditionalGeneration.from_pretrained(tmp_path)
    assert set(names(loaded).values()) == {"sdpa"}
    assert error(loaded(**given).logits, wanted) < 5e-5

    for made in (copy.deepcopy(engine.module), pickle.loads(pickle.dumps(engine.module))):
        assert names(made) == ours and error(made(**given).logits, wanted) < 5e-5
        made.set_attn_implementation("eager")
        assert set(names(made).values()) == {"eager"} and error(made(**given).logits, wanted) < 5e-5
        made.set_attn_implementation({"text_config": "sdpa"})
        assert names(made) | {"": "sdpa"} == before | {"": "sdpa"}
        assert names(engine.module) == ours  # a copy has configs of its own


def test_models_that_compare_the_name_keep_it() -> None:
    found = compares_names({modeling_minimax_m3_vl.MiniMaxM3VLAttention})
    assert found is not None and "modeling_minimax_m3_vl compares" in found
    assert compares_names({modeling_mllama.MllamaTextSelfAttention, t.LlamaForCausalLM, t.BertModel}) is None


@pytest.mark.slow
def test_the_index_mask_of_minimax_m3_is_applied_beyond_its_budget() -> None:
    """transformers applies it under the names "eager" and "sdpa" only."""
    torch.manual_seed(0)
    kind, cls = architectures()["minimax_m3_vl"]
    config = tiny_config(kind)
    text = config.text_config
    text.index_block_size, text.index_topk_blocks, text.index_local_blocks = (
        4,
        4,
        1,
    )  # 16 tokens: more than a proof's 12
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


def compares(text: str) -> bool:
    """Whether code compares something named after an attention implementation with "sdpa" or "eager"."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Compare):
            words = set(_words(node))
            if words & {"sdpa", "eager"} and any("attn_impl" in word for word in words):
                return True
    return False


def _words(node: ast.AST) -> Iterator[str]:
    for one in ast.walk(node):
        word = getattr(one, "attr", None) or getattr(one, "id", None) or getattr(one, "value", None)
        if isinstance(word, str):
            yield word


def test_every_modeling_file_that_compares_the_name_is_found() -> None:
    """Found by its text; here the code is parsed. Comparisons with other names are the same for sdpa's and ours."""
    texts = {path.stem: path.read_text("utf-8") for path in Path(t.__file__).parent.glob("models/*/modeling_*.py")}
    quoted = ('"sdpa"', "'sdpa'", '"eager"', "'eager'")
    wanted = {name for name, text in texts.items() if any(map(text.__contains__, quoted)) and compares(text)}
    found = {name for name, text in texts.items() if hook.reads_name(text)}
    assert found > wanted and len(found - wanted) < 8  # a few keep the name, or give it to a function, for no harm
    assert {"modeling_minimax_m3_vl", "modeling_glm_moe_dsa", "modeling_gemma4_unified"} <= wanted
    assert len(wanted) < len(texts) // 10  # the others may use ours


@pytest.mark.parametrize("code", [
    'getattr(config, "_attn_implementation", None) == "sdpa"', 'config._attn_implementation not in ["paged", "sdpa"]',
    'name = config._attn_implementation\nif name == "sdpa": pass', 'config._attn_implementation == SDPA',
    '{"sdpa": a, "eager": b}[self.config._attn_implementation](x)', 'match config._attn_implementation:\n case NAME: a',
    'config._attn_implementation.startswith("sdpa")', 'if (config._attn_implementation\n    == "sdpa"): pass',
])  # fmt: skip
def test_however_code_reads_the_name_it_keeps_it(code: str) -> None:
    assert hook.reads_name(code)
    assert not hook.reads_name("f = ALL_ATTENTION_FUNCTIONS.get_interface(config._attn_implementation, eager)")
    assert not hook.reads_name('if config._attn_implementation == "flash_attention_2": pass')


@torch.no_grad()
def test_queries_that_gemma4_unified_drops_on_a_static_cache() -> None:
    """Under the name "sdpa" alone it keeps them where there is no mask."""
    config = tiny_config(t.Gemma4UnifiedConfig)
    text = config.text_config.to_dict()
    text |= dict(num_hidden_layers=4, num_kv_shared_layers=2, layer_types=["sliding_attention", "full_attention"] * 2)
    text |= dict(per_layer_config={1: {"head_dim": 8}, 3: {"head_dim": 8}}, use_bidirectional_attention=None)
    config.text_config = t.Gemma4UnifiedTextConfig(**text)
    torch.manual_seed(0)
    model = t.Gemma4UnifiedForConditionalGeneration(config).eval()
    enlarge(model)
    ids = torch.randint(3, 90, (2, 14), generator=torch.Generator().manual_seed(3))

    def last(model: Any) -> Tensor:
        cache = t.StaticCache(config=config.text_config, max_cache_len=250)
        return model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits

    engine = injected(copy.deepcopy(model))
    assert error(last(engine), last(model)) < 5e-5
    given: dict[str, Any] = dict(max_new_tokens=8, do_sample=False, cache_implementation="static")
    assert torch.equal(engine.generate(ids, **given), model.generate(ids, **given))


@torch.no_grad()
@pytest.mark.parametrize("stay", [False, True])
def test_a_tower_that_hears_keeps_its_attention(stay: bool) -> None:
    """Gemma 4's has its own, which takes no masks of another implementation: each call raised."""
    text = t.Gemma4TextConfig(
        **TEXT,
        global_head_dim=12,
        vocab_size_per_layer_input=96,
        hidden_size_per_layer_input=0,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention"],
    )
    audio = t.Gemma4AudioConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        output_proj_dims=48,
        subsampling_conv_channels=[16, 8],
    )
    config = t.Gemma4Config(
        text_config=text, audio_config=audio, audio_token_id=95, image_token_id=94, video_token_id=93
    )
    torch.manual_seed(0)
    model = t.Gemma4ForConditionalGeneration(config).eval()
    enlarge(model)
    model = kept(model) if stay else model
    ids = torch.randint(3, 90, (2, 14), generator=torch.Generator().manual_seed(1))
    ids[:, 1:9] = 95
    sound = torch.randn(2, 32, 16, generator=torch.Generator().manual_seed(2))
    given = dict(input_ids=ids, input_features=sound, input_features_mask=torch.ones(2, 32, dtype=torch.bool))
    before, wanted = names(model), model(**given).logits
    engine = injected(copy.deepcopy(model))
    assert names(engine.module)["model.audio_tower"] == before["model.audio_tower"] == "eager"
    assert error(engine(**given).logits, wanted) < 5e-5
