"""The engine as people call it: through `engine.module`, in transformers' pipelines, with models of their own; and its
end.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithCrossAttentions

import infuse
import infuse.deepspeed as deepspeed
from infuse.cache.kv_cache import KVCache
from infuse.ground.device import Device
from tests.models.families import BY_NAME, GPT, enlarge, inputs
from tests.support.side_by_side import assert_close, ids, injected, logits

TEXTS = ["the cat sat on the mat", "a dog ran after the cat", "she reads a book on the mat"]


# ---- engine.module alone ----


def test_a_deepspeed_script_that_keeps_the_module_only() -> None:
    original = BY_NAME["gpt2"].make()
    with pytest.warns(UserWarning, match="replace_method: accepted without effect"):
        engine = deepspeed.init_inference(
            BY_NAME["gpt2"].make(),
            mp_size=1,
            dtype=torch.float32,
            replace_method="auto",
            replace_with_kernel_inject=True,
        )
    model = engine.module.eval()
    del engine
    gc.collect()
    given = inputs(BY_NAME["gpt2"], padding="left")
    assert isinstance(model, t.GPT2LMHeadModel)
    assert torch.equal(model.generate(**given, max_new_tokens=6), original.generate(**given, max_new_tokens=6))
    assert_close(logits(model, ids(2, 7)), logits(original, ids(2, 7)))


def test_the_engine_answers_what_the_model_answers() -> None:
    original, engine = BY_NAME["llama"].make(), injected(BY_NAME["llama"].make())
    for name in (
        "config",
        "generation_config",
        "device",
        "dtype",
        "main_input_name",
        "name_or_path",
        "base_model_prefix",
        "training",
    ):
        assert str(getattr(engine, name)) == str(getattr(original, name)), name
    assert engine.can_generate() and engine.get_input_embeddings() is engine.module.get_input_embeddings()
    assert engine.num_parameters() == original.num_parameters()
    prepared = engine.prepare_inputs_for_generation(ids(1, 3), past_key_values=None, attention_mask=torch.ones(1, 3))
    assert torch.equal(prepared["input_ids"], ids(1, 3))
    with pytest.raises(AttributeError, match="no attribute 'nothing_of_the_kind'"):
        _ = engine.nothing_of_the_kind


def test_attributes_that_are_set_on_the_engine_are_the_models() -> None:
    """They used to be set on the engine alone, where nothing read them."""
    engine = injected(BY_NAME["llama"].make())
    engine.generation_config = t.GenerationConfig(max_new_tokens=3, pad_token_id=0)
    assert engine.generate(ids(1, 4)).shape == (1, 7)
    engine.lm_head = nn.Linear(48, 96)
    assert logits(engine, ids(1, 4)).equal(logits(engine.module, ids(1, 4))) and len(list(engine.children())) == 1
    engine.config = other = t.LlamaConfig()
    assert engine.module.config is other
    engine.note = "of the engine"
    assert not hasattr(engine.module, "note")


def test_a_module_without_config_or_generate() -> None:
    with pytest.warns(UserWarning, match="NOTHING IS ACCELERATED"):
        engine = infuse.init_inference(nn.Sequential(nn.LayerNorm(4)), dtype="fp32")
    assert engine.config is None
    with pytest.raises(infuse.InfuseError, match=r"Sequential has no generate\(\)"):
        engine.generate(torch.ones(1, 4))


class Counter(nn.Module):
    """A model whose own `generate` knows nothing of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.step(x)

    def generate(self, start: Tensor, times: Tensor) -> Tensor:
        for _ in range(int(times.max())):
            start = self(start)
        return start


def test_a_generate_of_the_users_own() -> None:
    model, start, times = Counter(), torch.ones(2, 1), torch.tensor([3, 2])
    exact = model.generate(start, times)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # without kernels nothing is accelerated here
        engine = infuse.init_inference(model, dtype="fp32")
    assert_close(engine.generate(start, times), exact)
    assert torch.equal(engine.generate(start, times), engine.module.generate(start, times=times))


# ---- transformers' pipelines ----


@pytest.fixture(scope="module")
def tokenizer() -> t.PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE(unk_token="<unk>"))
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    bpe.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=96, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    )
    return t.PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", pad_token="<unk>", padding_side="left"
    )


ASKED = dict(max_new_tokens=6, do_sample=False, batch_size=2)


def test_engine_put_into_a_pipeline(tokenizer: t.PreTrainedTokenizerFast) -> None:
    pipe = t.pipeline("text-generation", model=BY_NAME["gpt2"].make(), tokenizer=tokenizer)
    exact = pipe(TEXTS, **ASKED)
    pipe.model = injected(pipe.model)
    assert pipe(TEXTS, **ASKED) == exact
    masked = t.pipeline("feature-extraction", model=BY_NAME["bert"].make().bert, tokenizer=tokenizer)
    wanted = masked(TEXTS[0], return_tensors=True)
    masked.model = injected(masked.model)
    assert_close(masked(TEXTS[0], return_tensors=True), wanted)


# ---- a model of the user's own, as in speech ----


class Spoken(t.GPT2PreTrainedModel, t.GenerationMixin):
    """GPT-2 behind other embeddings: a prefix of conditioning vectors, cached for the whole answer, then tokens with a
    table of places.
    """

    def __init__(self, config: t.GPT2Config):
        super().__init__(config)
        self.transformer = t.GPT2Model(config)
        self.transformer.wte, self.transformer.wpe = nn.Identity(), Nowhere()
        self.words, self.places = nn.Embedding(config.vocab_size, config.n_embd), nn.Embedding(64, config.n_embd)
        self.head = nn.Sequential(nn.LayerNorm(config.n_embd), nn.Linear(config.n_embd, config.vocab_size))
        self.prefix: Tensor | None = None

    def store_prefix(self, vectors: Tensor) -> None:
        self.prefix = vectors

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, past_key_values: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        started = past_key_values is not None and past_key_values.get_seq_length() > 0
        return {
            "input_ids": input_ids[:, -1:] if started else input_ids,
            "past_key_values": past_key_values,
            "use_cache": True,
        }

    def forward(
        self, input_ids: Tensor, past_key_values: Any = None, use_cache: bool | None = None, **kwargs: Any
    ) -> Any:
        assert self.prefix is not None
        held = past_key_values.get_seq_length() if past_key_values is not None else 0
        start = max(held - self.prefix.shape[1], 0)
        embedded = self.words(input_ids) + self.places(torch.arange(start, start + input_ids.shape[1]))
        if not held:
            embedded = torch.cat((self.prefix.expand(len(input_ids), -1, -1), embedded), dim=1)
        out = self.transformer(inputs_embeds=embedded, past_key_values=past_key_values, use_cache=use_cache)
        return CausalLMOutputWithCrossAttentions(
            logits=self.head(out.last_hidden_state), past_key_values=out.past_key_values
        )


class Nowhere(nn.Module):
    """Stands for GPT-2's positions, which this model has elsewhere."""

    def forward(self, position_ids: Tensor) -> Tensor:
        return torch.zeros(*position_ids.shape, GPT["n_embd"])


def spoken() -> Spoken:
    torch.manual_seed(0)
    model = Spoken(t.GPT2Config(**GPT)).eval()
    enlarge(model)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    model.store_prefix(torch.randn(1, 5, GPT["n_embd"]))
    return model


@pytest.mark.parametrize("mode", [dict(do_sample=False), dict(num_beams=3), dict(do_sample=True, top_p=0.8)], ids=str)
def test_a_subclass_of_gpt2_with_its_own_embeddings(mode: dict[str, Any]) -> None:
    answers = []
    for model in (spoken(), injected(spoken()), injected(spoken()).module):
        torch.manual_seed(3)
        answers.append(model.generate(ids(2, 4), max_new_tokens=8, **mode))
    assert answers[0].shape == (2, 12) and len(answers[0].unique()) > 4
    assert torch.equal(answers[1], answers[0]) and torch.equal(answers[2], answers[0])


def test_a_subclass_that_took_the_embeddings_out() -> None:
    """Whatever could be proven of it, the results are the model's."""
    original, model = spoken(), spoken()
    for each in (original, model):
        del each.transformer.wte
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that what cannot be run cannot be proven
        engine = infuse.init_inference(model, dtype="fp32")
    assert torch.equal(engine.generate(ids(2, 4), max_new_tokens=8), original.generate(ids(2, 4), max_new_tokens=8))


def test_half_on_the_model_and_float32_in_the_call_casts() -> None:
    model = BY_NAME["gpt2"].make()
    rounded = [parameter.detach().half().float() for parameter in model.parameters()]
    engine = injected(model.half(), dtype=torch.float32)
    assert {parameter.dtype for parameter in engine.parameters()} == {torch.float32}
    original = BY_NAME["gpt2"].make()
    for parameter, value in zip(original.parameters(), rounded, strict=True):
        parameter.data = value
    assert_close(logits(engine, ids(2, 7)), logits(original, ids(2, 7)))


# ---- the end of an engine ----


def test_destroy_gives_memory_back_and_leaves_the_other_engine_alone() -> None:
    original = BY_NAME["llama"].make(seed=1)
    first, second = injected(BY_NAME["llama"].make(), max_out_tokens=20), injected(BY_NAME["llama"].make(seed=1))
    model = first.module
    storages = [weakref.ref(parameter.untyped_storage()) for parameter in model.parameters()]
    first.profile_model_time()
    first.destroy()
    first.destroy()  # once more does no harm
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"meta"}
    gc.collect()
    assert not [storage for storage in storages if storage() is not None]
    assert not model._forward_pre_hooks and not model._forward_hooks and "_infuse" not in vars(model)
    assert torch.equal(second.generate(ids(2, 30), max_new_tokens=4), original.generate(ids(2, 30), max_new_tokens=4))


def test_an_engine_that_is_dropped_is_freed() -> None:
    engine = injected(BY_NAME["llama"].make(), max_out_tokens=20)
    engine.generate(ids(1, 4), max_new_tokens=2)
    gone = weakref.ref(engine.module.model.layers[0].self_attn.qkv.weight)
    del engine
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_an_engine_after_destroy_says_so(name: str) -> None:
    engine = infuse.init_inference(BY_NAME[name].make(), dtype="fp32")
    given = inputs(BY_NAME[name])
    engine.destroy()
    for call in (engine, engine.forward, engine.module):
        with pytest.raises(infuse.InfuseError, match=r"destroy\(\) freed the weights"):
            call(**given)
    if name == "llama":
        for generate in (engine.generate, engine.module.generate):
            with pytest.raises(infuse.InfuseError, match=r"destroy\(\) freed the weights"):
                generate(given["input_ids"], max_new_tokens=2)
    with pytest.raises(infuse.InfuseError, match=r"destroy\(\) freed the weights"), engine.profile():
        engine(**given)
    assert "replaced" in engine.report()


# ---- what is asked for ----


def test_the_dtype_nobody_asked_for() -> None:
    """On a CPU: bfloat16 where it has it in hardware, else float32; the plan says so."""
    engine = infuse.init_inference(BY_NAME["llama"].make(), device="cpu")
    device = Device.of("cpu")
    assert engine.plan.dtype == (torch.bfloat16 if device.bfloat16_in_hardware else torch.float32)
    assert next(engine.parameters()).dtype == engine.plan.dtype == logits(engine, ids(1, 3)).dtype
    assert "the default on cpu" in str(engine.plan)


def test_each_warning_comes_once() -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        keys = dict(dtype="fp32", replace_method="auto", zero={"stage": 0}, enable_cuda_graph=True, device="cpu")
        engine = infuse.init_inference(BY_NAME["llama"].make(), **keys)
        for _ in range(3):
            engine.generate(ids(1, 4), max_new_tokens=2)
    ours = [str(one.message) for one in told if "infuse" in str(one.message)]
    assert len(ours) == len(set(ours)) == 3
    assert all(one.filename == __file__ for one in told if "infuse" in str(one.message))


def test_what_cannot_be_injected(tokenizer: t.PreTrainedTokenizerFast) -> None:
    pipe = t.pipeline("text-generation", model=BY_NAME["gpt2"].make(), tokenizer=tokenizer)
    with pytest.raises(
        infuse.ConfigError, match=r"TextGenerationPipeline was given.*pipe\.model = infuse\.init_inference\(pipe\.model"
    ):
        infuse.init_inference(pipe)
    for path in ("gpt2", Path("gpt2")):
        with pytest.raises(
            infuse.ConfigError, match=r"the path 'gpt2' was given; load it first.*from_pretrained\('gpt2"
        ):
            infuse.init_inference(path)
    for thing in (None, {"model": 1}, t.GPT2Config()):
        with pytest.raises(infuse.ConfigError, match=f"torch.nn.Module is needed, {type(thing).__name__} was given"):
            infuse.init_inference(thing)
    with torch.device("meta"):
        model = t.GPT2LMHeadModel(t.GPT2Config(**GPT))
    with pytest.raises(infuse.ConfigError, match="parameters are on the meta device.*load the weights first"):
        infuse.init_inference(model)
    assert [step.depth for step in infuse.plan(model, dtype="fp32").steps if step.path != "lm_head"] == ["block"] * 3


def test_a_buffer_on_meta_is_named() -> None:
    model = BY_NAME["llama"].make()
    model.model.rotary_emb.to("meta")
    with pytest.raises(infuse.ConfigError, match=r"buffers are on the meta device \(model.rotary_emb.inv_freq"):
        infuse.init_inference(model)


def test_a_second_call_takes_the_place_of_the_first(tmp_path: Path) -> None:
    """As a cell of a notebook that is run again: the first cap counted on, and `generate` lost our cache."""
    model = BY_NAME["llama"].make()
    model.save_pretrained(tmp_path)
    infuse.init_inference(model, dtype="fp32", verify="off", max_out_tokens=8)
    with pytest.warns(UserWarning) as told:
        engine = infuse.init_inference(model, dtype="fp32", verify="off", max_out_tokens=20)
    assert [str(one.message) for one in told] == [
        "infuse: the layers of LlamaForCausalLM are already replaced: they keep their weights"
    ]
    answer = engine.generate(ids(1, 9), max_new_tokens=3, return_dict_in_generate=True)
    assert isinstance(answer.past_key_values, KVCache)
    with pytest.raises(infuse.ContextLimitError, match="max_out_tokens=20"):
        model.generate(ids(1, 9), max_new_tokens=12)
    with pytest.warns(UserWarning, match="keep the format of the cache"):
        engine = infuse.init_inference(engine, dtype="fp32", verify="off", kv_cache="int8")
    assert engine.module is model
    answer = model.generate(ids(1, 9), max_new_tokens=30, return_dict_in_generate=True)
    assert isinstance(answer.past_key_values, KVCache) and answer.past_key_values.format is None
    for replaced in (model, engine):
        with pytest.raises(infuse.ConfigError, match=r"replaced already.*load_state_dict\(\)"):
            infuse.init_inference(replaced, dtype="fp32", checkpoint=str(tmp_path))


def test_a_second_call_with_another_dtype_is_refused() -> None:
    """The layers of the first call stay; their products used to fail in the next call of the model."""
    model = BY_NAME["mixtral"].make()
    infuse.init_inference(model, dtype="fp32", verify="off")
    with pytest.raises(infuse.ConfigError, match="bfloat16 is asked for, .* replaced in float32"):
        infuse.init_inference(model, dtype="bf16", verify="off")
    with torch.no_grad():
        assert model(torch.arange(5, 15)[None]).logits.dtype == torch.float32
    infuse.init_inference(model, dtype="fp32", verify="off")
    infuse.init_inference(model.bfloat16(), dtype="bf16", verify="off")
