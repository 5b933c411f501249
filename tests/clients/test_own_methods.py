"""A model keeps its own methods: what a subclass overrides or a library wraps runs, as often as it runs without us."""

from __future__ import annotations

import copy
import functools
import pickle
import subprocess
import sys
import types
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t
from torch import Tensor, nn
from transformers.generation import GenerationMixin, StoppingCriteria

import infuse
from infuse.generate.install import _REPLAYED, _names_of_arguments
from infuse.ground.authors import LibraryCalls
from tests.models.families import BY_NAME
from tests.support.graphed import graphed
from tests.support.side_by_side import ids

ROOT = Path(__file__).parents[2]
PROMPT = torch.tensor([[5, 6, 7, 8, 9, 10, 11]])
# Large enough for a head that streams, so that steps without the model's forward would be made.
DIRECT = dict(vocab_size=8192, tie_word_embeddings=False)


def injected(model: nn.Module, **keys: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return infuse.init_inference(model, **{"dtype": "fp32", "verify": "off", "progress": False, **keys})


def answer(model: Any, **mode: Any) -> Tensor:
    torch.manual_seed(0)
    return model.generate(PROMPT, **{"max_new_tokens": 12, "do_sample": False, **mode})


def llama() -> Any:
    return BY_NAME["llama"].make(**DIRECT)


# ---- methods of transformers' loops ----

LOOP = ["_sample", "_prefill", "_has_unfinished_sequences", "_update_model_kwargs_for_generation"]
MODES = [{}, {"do_sample": True}, {"prompt_lookup_num_tokens": 2}]


def counting(name: str, seen: Counter[str], of: type = GenerationMixin) -> Callable[..., Any]:
    own = getattr(of, name)

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen[name] += 1
        return own(self, *args, **kwargs)

    return run


def overridden(model: Any, name: str, seen: Counter[str], patch: pytest.MonkeyPatch) -> None:
    model.__class__ = type("Mine", (type(model),), {name: counting(name, seen), "__module__": "mine"})


def patched(model: Any, name: str, seen: Counter[str], patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GenerationMixin, name, counting(name, seen))


def patched_on_the_class(model: Any, name: str, seen: Counter[str], patch: pytest.MonkeyPatch) -> None:
    patch.setattr(type(model), name, counting(name, seen))


def set_on_the_instance(model: Any, name: str, seen: Counter[str], patch: pytest.MonkeyPatch) -> None:
    setattr(model, name, types.MethodType(counting(name, seen), model))


CHANGES = [overridden, patched, patched_on_the_class, set_on_the_instance]


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("name", [*LOOP, "_assisted_decoding", "_get_candidate_generator"])
@pytest.mark.parametrize("later", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_method_of_the_loop_runs_as_often(
    change: Callable[..., None], later: bool, name: str, mode: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts, answers, model = [], [], llama()
    for replaced in (False, True):
        seen: Counter[str] = Counter()
        each = copy.deepcopy(model)
        with monkeypatch.context() as patch:
            if not later:
                change(each, name, seen, patch)
            if replaced:
                injected(each)
            if later:
                change(each, name, seen, patch)
            seen.clear()
            answers.append(answer(each, **mode))
        counts.append(seen[name])
    assert torch.equal(*answers)
    assert counts[0] == counts[1]


@pytest.mark.slow
def test_a_models_own_loop_makes_what_it_makes() -> None:
    """CSM's loop returns codes of a codec, depth by depth; GenerationMixin's would return ids."""
    config = t.CsmConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64,
        vocab_size=64, text_vocab_size=96, num_codebooks=3, codebook_pad_token_id=62, codebook_eos_token_id=63,
        depth_decoder_config=dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                                  intermediate_size=64, vocab_size=64, num_codebooks=3, backbone_hidden_size=32),
        codec_config=dict(model_type="mimi", hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_filters=4,
                          codebook_size=64, codebook_dim=16, upsample_groups=32),  # the codec does not run here
        pad_token_id=0, bos_token_id=1, audio_token_id=2, audio_eos_token_id=3, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model = t.CsmForConditionalGeneration(config).eval()
    mode = dict(max_new_tokens=5, do_sample=False, depth_decoder_do_sample=False)
    wanted = model.generate(PROMPT, **mode)
    engine = injected(copy.deepcopy(model))
    assert wanted.dim() == 3 and torch.equal(engine.generate(PROMPT, **mode), wanted)


def vibe_voice() -> Any:
    sizes = dict(downsampling_ratios=[2, 2], depths=[1, 1, 1], ffn_expansion=2)
    audio: Any = dict(channels=1, kernel_size=3, num_filters=4, **sizes)
    config = t.VibeVoiceConfig(
        text_config=dict(
            model_type="qwen2", hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            intermediate_size=64, vocab_size=128, max_position_embeddings=128,
        ),
        diffusion_head_config=dict(num_hidden_layers=1, intermediate_size=32, frequency_embedding_size=16),
        semantic_model_config=dict(model_type="vibevoice_acoustic_tokenizer_encoder", hidden_size=16, **audio),
        audio_config=dict(model_type="vibevoice_acoustic_tokenizer", hidden_size=8, **audio),
        pad_token_id=120, eos_token_id=121, audio_bos_token_id=122, audio_eos_token_id=123, audio_token_id=124,
    )  # fmt: skip
    torch.manual_seed(SOUND)
    return t.VibeVoiceForConditionalGeneration(config).eval()


SOUND = 2  # a seed with which the model says something


@pytest.mark.skipif(not hasattr(t, "VibeVoiceConfig"), reason="transformers without VibeVoice")
def test_vibe_voice_returns_sound() -> None:
    diffusers = pytest.importorskip("diffusers")
    prompt = torch.tensor([[5, 6, 7, 8, 122]])

    def sound(model: Any) -> Any:
        torch.manual_seed(0)
        scheduler = diffusers.DPMSolverMultistepScheduler(
            beta_schedule="squaredcos_cap_v2", prediction_type="v_prediction"
        )
        given = dict(noise_scheduler=scheduler, num_diffusion_steps=2, guidance_scale=1.3, monitor_progress=False)
        return model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=6, **given)

    model = vibe_voice()
    (wanted,) = sound(model)
    found = sound(injected(copy.deepcopy(model)))
    assert wanted is not None and isinstance(found, list)
    torch.testing.assert_close(found[0], wanted, rtol=1e-4, atol=1e-5)


def prepared(model: Any, seen: Counter[str], wraps: bool) -> Callable[..., Any]:
    own = type(model).prepare_inputs_for_generation

    def prepare(self: Any, input_ids: Tensor, **named: Any) -> Any:
        seen["prepare"] += 1
        return own(self, input_ids, **named)

    return functools.wraps(own)(prepare) if wraps else prepare


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("wraps", [False, True])
@pytest.mark.parametrize("place", ["subclass", "mixin", "instance"])
def test_a_preparation_of_inputs_runs_as_often(
    place: str, wraps: bool, mode: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one under transformers' name for it, and one through which transformers passes no cache."""
    counts, answers, model = [], [], llama()
    for replaced in (False, True):
        seen: Counter[str] = Counter()
        each = copy.deepcopy(model)
        name, prepare = "prepare_inputs_for_generation", prepared(each, seen, wraps)
        with monkeypatch.context() as patch:
            if replaced:
                injected(each)
            if place == "mixin":
                patch.setattr(GenerationMixin, name, prepare)
            elif place == "instance":
                each.prepare_inputs_for_generation = types.MethodType(prepare, each)
            else:
                each.__class__ = type("Mine", (type(each),), {name: prepare, "__module__": "mine"})
            answers.append(answer(each, **mode))
        counts.append(seen["prepare"])
    assert torch.equal(*answers)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("name", ["generate", *LOOP, "_valid_auto_compile_criteria"])
def test_a_method_of_an_assistant_runs_as_often(name: str) -> None:
    counts, answers = [], []
    for replaced in (False, True):
        model, assistant = llama(), BY_NAME["llama"].make(seed=1, num_hidden_layers=1, **DIRECT)
        seen: Counter[str] = Counter()
        overridden(assistant, name, seen, None)  # type: ignore[arg-type]
        if replaced:
            injected(model), injected(assistant)
        seen.clear()
        answers.append(answer(model, assistant_model=assistant))
        counts.append(seen[name])
    assert torch.equal(*answers)
    assert counts[0] == counts[1] > 0


# ---- classes and forwards of the model ----


def counted_forward(cls: type, seen: Counter[str], factor: float) -> Callable[..., Any]:
    own = cls.forward  # type: ignore[attr-defined]

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen["forward"] += 1
        out = own(self, *args, **kwargs)
        if not isinstance(out, (Tensor, tuple)) and "logits" in out:
            out.logits = out.logits * factor if seen["forward"] % 3 else out.logits.flip(-1)
        return out

    return forward


PLACES: dict[str, Callable[[Any], nn.Module]] = {
    "the model": lambda model: model,
    "the inner model": lambda model: model.model,
    "the norm": lambda model: model.model.norm,
    "the rotary module": lambda model: model.model.rotary_emb,
}


@pytest.mark.parametrize("way", ["subclass", "class", "class, wrapped", "called"])
@pytest.mark.parametrize("later", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("place", PLACES)
def test_a_users_forward_runs_once_for_each_token(
    place: str, later: bool, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if place == "the norm" and later and way.startswith("class"):
        pytest.skip("norms in blocks no longer are of this class")
    counts, answers, model = [], [], llama()
    for replaced in (False, True):
        seen: Counter[str] = Counter()
        each = copy.deepcopy(model)
        module = PLACES[place](each)
        cls: Any = type(module)
        forward = counted_forward(cls, seen, 1.5)
        with monkeypatch.context() as patch:
            if replaced and later:
                injected(each)
                answer(each)  # with what is to be seen patched afterwards
            if way == "subclass":
                module.__class__ = type("Mine", (cls,), {"forward": forward, "__module__": "mine"})
            elif way == "called":
                call = cls.__call__

                def called(self: Any, *args: Any, call: Any = call, seen: Any = seen, **kwargs: Any) -> Any:
                    seen["forward"] += 1
                    return call(self, *args, **kwargs)

                module.__class__ = type("Mine", (cls,), {"__call__": called, "__module__": "mine"})
            else:
                wrapped = functools.wraps(cls.forward)(forward) if "wrapped" in way else forward
                patch.setattr(cls, "forward", wrapped)
            if replaced and not later:
                injected(each)
            seen.clear()
            answers.append(answer(each))
        counts.append(seen["forward"])
    assert torch.equal(*answers)
    assert counts[0] == counts[1] == (84 if place == "the norm" and "class" in way and way != "subclass" else 12)


def test_a_helper_of_a_forward_set_on_the_instance_runs_for_each_token() -> None:
    class Norm(nn.RMSNorm):
        def forward(self, x: Tensor) -> Tensor:
            return self._norm(x)

        def _norm(self, x: Tensor) -> Tensor:
            return super().forward(x)

    calls = LibraryCalls({"torch", "transformers", __name__.partition(".")[0]})
    norm = Norm(4)
    assert calls([norm])
    norm._norm = eval("lambda x: x", {"__name__": "mine"})  # type: ignore[method-assign]
    assert not calls([norm])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("way", ["subclass", "class", "instance"])
def test_graphs_are_not_replayed_over_a_users_forward(way: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    engine, backend = graphed(copy.deepcopy(model))
    wanted, own = answer(model), answer(engine)
    assert torch.equal(own, wanted) and backend.replays
    replays, seen = backend.replays, Counter[str]()
    module: Any = PLACES[place](engine.module)

    def plain(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen["forward"] += 1
        return kept(*args, **kwargs) if way == "instance" else type_own(self, *args, **kwargs)

    kept, type_own = module.forward, type(module).forward
    if way == "subclass":
        module.__class__ = type("Mine", (type(module),), {"forward": plain, "__module__": "mine"})
    elif way == "class":
        monkeypatch.setattr(type(module), "forward", plain)
    else:
        module.forward = types.MethodType(plain, module)
    assert torch.equal(answer(engine), wanted)
    assert (seen["forward"], backend.replays) == (12, replays)


def test_switched_adapters_are_not_replayed() -> None:
    peft = pytest.importorskip("peft")
    shape = dict(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    torch.manual_seed(0)
    model = peft.get_peft_model(llama(), peft.LoraConfig(**shape))
    model.add_adapter("other", peft.LoraConfig(**shape))
    original = copy.deepcopy(model)
    engine, _ = graphed(model.base_model.model)
    for name in ("default", "other", "default"):
        model.set_adapter(name), original.set_adapter(name)
        assert torch.equal(answer(engine), answer(original))
    with model.disable_adapter(), original.disable_adapter():
        assert torch.equal(answer(engine), answer(original))


def test_modules_of_quantizers_are_replayed() -> None:
    model = llama()
    cls = type("Linear8", (nn.Linear,), {"__module__": "bitsandbytes.nn"})
    calls = LibraryCalls(_REPLAYED)
    cls.forward = eval("lambda self, x: x", {"__name__": "bitsandbytes.nn.modules"})  # type: ignore[attr-defined]
    model.lm_head.__class__ = cls
    assert calls(model.modules()) and not LibraryCalls()(model.modules())


def test_a_forward_with_graphs_is_that_of_the_class_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """An encoder, whose whole forward is captured: a patched class is called, and captured anew once it is not."""
    model = BY_NAME["bert"].make()
    engine, backend = graphed(copy.deepcopy(model), forward=True)
    seen: Counter[str] = Counter()
    own = type(model).forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen["forward"] += 1
        return own(self, *args, **kwargs)

    with torch.no_grad():
        for _ in range(4):
            engine(PROMPT)
        replays = backend.replays
        assert replays
        with monkeypatch.context() as patch:
            patch.setattr(type(model), "forward", forward)
            for _ in range(4):
                engine(PROMPT)
        assert (seen["forward"], backend.replays) == (4, replays)
        for _ in range(4):
            engine(PROMPT)
    assert seen["forward"] == 4 and backend.replays > replays


def test_a_subclass_that_adds_a_method_keeps_direct_steps() -> None:
    model = llama()
    model.__class__ = type("Mine", (type(model),), {"told": lambda self: "mine", "__module__": "mine"})
    engine = injected(model)
    answer(engine)
    assert engine.module._infuse.direct.proven


# ---- arguments as they were given ----

WRAP = """
import functools
import pickle
from transformers.generation import GenerationMixin
own, calls = GenerationMixin.generate, []
def traced({self}*args, **kwargs):
    calls.append((len(args), sorted(kwargs)))
    return own({self}*args, **kwargs)
GenerationMixin.generate = {wrap}(traced)
import torch, infuse
from tests.models.families import BY_NAME
model = BY_NAME["llama"].make()
ids = torch.tensor([[5, 6, 7]])
config = model.generation_config
wanted = [model.generate(ids, max_new_tokens=5), model.generate(ids, config, max_new_tokens=4)]
before = list(calls)
calls.clear()
engine = infuse.init_inference(model, dtype="fp32", progress=False)
found = [engine.generate(ids, max_new_tokens=5), engine.generate(ids, config, max_new_tokens=4)]
assert all(map(torch.equal, found, wanted)), (found, wanted)
assert [count for count, _ in calls] == [count for count, _ in before], (calls, before)
assert any("custom_generate" in names for _, names in calls), calls
"""


# Each program in a fork of a process that has imported all but infuse.
FORKS = """
import os, sys
sys.path.insert(0, sys.argv[1])
import torch, torch._dynamo, torch.distributed, transformers.generation
from tests.models.families import BY_NAME
BY_NAME["llama"].make()
for code in sys.argv[2:]:
    assert "infuse" not in sys.modules
    if not os.fork():
        exec(code)
        sys.stderr.flush()
        os._exit(0)
    assert os.wait()[1] == 0, code
"""


@pytest.mark.slow
def test_generate_wrapped_before_infuse_is_imported() -> None:
    wraps = ((wrap, self) for wrap in ("", "functools.wraps(own)") for self in ("", "self, "))
    codes = [WRAP.format(wrap=wrap, self=self) for wrap, self in wraps]
    command = [sys.executable, "-W", "ignore", "-c", FORKS, str(ROOT), *codes]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("later", [False, True], ids=["before", "after"])
def test_generate_wrapped_after_infuse_is_imported(later: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = llama(), []
    wanted, own = answer(model), GenerationMixin.generate
    if later:
        injected(model)

    def traced(*args: Any, **kwargs: Any) -> Any:
        seen.append(len(args))
        return own(*args, **kwargs)

    monkeypatch.setattr(GenerationMixin, "generate", traced)
    engine = injected(model)
    assert torch.equal(answer(engine), wanted) and seen == [2]


def test_a_wrapper_of_which_nothing_is_known_gets_what_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """A builtin or a callable object hides the names of the arguments."""

    class Traced:
        def __init__(self, own: Callable[..., Any]):
            self.own = own

        def __get__(self, model: Any, kind: Any) -> Any:
            return self if model is None else functools.partial(self, model)

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self.own(*args, **kwargs)

    model = llama()
    engine = injected(copy.deepcopy(model))
    wanted = model.generate(PROMPT, model.generation_config, max_new_tokens=5)
    monkeypatch.setattr(GenerationMixin, "generate", Traced(GenerationMixin.generate))
    assert torch.equal(engine.generate(PROMPT, model.generation_config, max_new_tokens=5), wanted)


def test_every_argument_by_position() -> None:
    model = llama()
    count = len(_names_of_arguments(GenerationMixin.generate)) - 1
    wanted = model.generate(PROMPT, *[None] * count, max_new_tokens=6)
    assert torch.equal(injected(model).generate(PROMPT, *[None] * count, max_new_tokens=6), wanted)


def test_a_generate_that_the_class_gets_later_takes_its_own_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = injected(llama())
    monkeypatch.setattr(type(engine.module), "generate", lambda self, inputs, n=3: inputs[:, :n], raising=False)
    assert engine.generate(PROMPT, n=2).tolist() == [[5, 6]]


def test_an_assistant_that_is_an_engine_by_position() -> None:
    model, draft = llama(), BY_NAME["llama"].make(seed=1, num_hidden_layers=1, **DIRECT)
    wanted = model.generate(PROMPT, None, None, None, None, None, draft, max_new_tokens=6)
    engine, other = injected(copy.deepcopy(model)), injected(draft)
    assert torch.equal(engine.generate(PROMPT, None, None, None, None, None, other, max_new_tokens=6), wanted)


# ---- who writes into what it is handed ----


class Writing(StoppingCriteria):
    """Puts another token in place of each third one."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        if input_ids.shape[1] % 3 == 0:
            input_ids[:, -1] = 40
        return torch.zeros(len(input_ids), dtype=torch.bool)


class WritingProcessor(t.LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        input_ids[:, 0] = 3
        scores[:, :4] = -1e9
        return scores


class WritingStreamer:
    def __init__(self) -> None:
        self.seen: list[int] = []

    def put(self, value: Tensor) -> None:
        self.seen += value.view(-1).tolist()
        value.fill_(1)

    def end(self) -> None: ...


@pytest.mark.parametrize("mode", [{}, {"do_sample": True}], ids=str)
def test_a_criterion_that_writes_into_the_ids(mode: dict[str, Any]) -> None:
    model = llama()
    engine = injected(copy.deepcopy(model))
    given = dict(mode, stopping_criteria=[Writing()])
    wanted = answer(model, **given)
    assert (wanted == 40).sum() >= 3
    assert torch.equal(answer(engine, **given), wanted)


def test_a_processor_and_a_streamer_that_write() -> None:
    model = llama()
    engine = injected(copy.deepcopy(model))
    streamed = []
    answers = []
    for each in (model, engine):
        streamer = WritingStreamer()
        mode = dict(max_new_tokens=8, do_sample=False, logits_processor=[WritingProcessor()])
        answers.append(each.generate(PROMPT.clone(), streamer=streamer, **mode))
        streamed.append(streamer.seen)
    assert torch.equal(*answers) and streamed[0] == streamed[1]


@pytest.mark.parametrize("mode", [{"prompt_lookup_num_tokens": 2}, {}, {"do_sample": True}], ids=str)
def test_a_criterion_that_writes_where_candidates_are_verified(mode: dict[str, Any]) -> None:
    """Candidates after the written token were verified for other ids. All candidates of the model itself are right."""
    model = llama()
    engine, assistant = injected(copy.deepcopy(model)), injected(copy.deepcopy(model)).module
    drafted = {} if "prompt_lookup_num_tokens" in mode else {"assistant_model": assistant}
    repeated, more = torch.tensor([[5, 6, 7, 8] * 4]), dict(max_new_tokens=14, stopping_criteria=[Writing()])
    samples = mode.get("do_sample", False)
    top = dict(top_k=1) if samples else {}  # so that the one token that may be drawn is the likeliest
    wanted = model.generate(repeated.clone(), do_sample=False, **more)
    found = engine.generate(repeated.clone(), **{"do_sample": False, **mode, **drafted, **top, **more})
    assert (wanted[:, 16:] == 40).sum() >= 4
    assert torch.equal(found, wanted)


def test_a_shallow_copy_answers_for_itself() -> None:
    """With another generation config, over the same weights, also when the model is restored meanwhile."""
    original, model = BY_NAME["llama"].make(), BY_NAME["llama"].make()
    engine = infuse.init_inference(model, dtype="fp32", progress=False)
    deep, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for copied in (copy.copy(model), copy.copy(copy.copy(model)), deep, pickled):
        assert type(copied) is type(model)
        assert copied.generate.__self__ is copied and copied.get_submodule.__self__ is copied
        copied.generation_config = t.GenerationConfig(max_new_tokens=3, do_sample=False)
        wanted = original.generate(ids(1, 4), max_new_tokens=3, do_sample=False)
        assert torch.equal(copied.generate(ids(1, 4)), wanted)
    assert model.generation_config.max_new_tokens is None and model.generate.__self__ is model
    copied = copy.copy(model)
    infuse.restore(engine)
    assert "__reduce_ex__" not in vars(model)
    assert torch.equal(copied.generate(ids(1, 4), max_new_tokens=3, do_sample=False), wanted)
