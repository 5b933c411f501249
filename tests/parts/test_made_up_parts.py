"""Parts that live in tests/parts alone go everywhere: plan, proof, formats, ranks, shards, caches, ways of decoding.

A latent attention, a third branch over an encoder's states, a recurrence in place of attention in some layers, and a
number format with scales of scales.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import ContinuousBatchingConfig, DynamicCache, GenerationConfig

import infuse
from infuse import architectures
from infuse.cache.kv_cache import KVCache
from infuse.cache.recurrence_slot import StateSlot
from infuse.cache.slot import KVSlot
from infuse.generate import install
from infuse.ground.cache_names import cache_in
from infuse.layers import parts
from infuse.layers.block import Block
from infuse.layers.linear import QuantizedLinear
from infuse.plan.bytes import parameter_bytes
from infuse.quant import parse
from infuse.quant.parse import quant_format
from infuse.weights import foreign
from tests.models.families import BY_NAME
from tests.parts import cross, latent, nested, recurrent
from tests.parts.made_up import HIDDEN, LAYERS, made_up
from tests.support.ranks import Ranks


@dataclass(frozen=True)
class MadeUp:
    """A family: the file of its part, how a model is made, and what its calls get besides ids."""

    file: ModuleType
    make: Callable[[], Any]
    token_bytes: int  # of the cache, in float32
    state_bytes: int = 0
    reads_states: bool = False

    def more(self, rows: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
        if not self.reads_states:
            return {}
        states = torch.randn(1, 6, HIDDEN, generator=torch.Generator().manual_seed(3)).to(dtype)
        return {cross.STATES: states.expand(rows, -1, -1).contiguous()}


_ROW = 2 * HIDDEN * 4  # keys and values of a token in one layer, in bytes of float32
FAMILIES = {
    "latent": MadeUp(
        latent,
        lambda: made_up(latent.LatentLayer, head_dim=latent.ROTATED),
        LAYERS * (latent.LATENT + latent.ROTATED) * 4,
    ),
    "cross": MadeUp(cross, lambda: made_up(cross.CrossLayer, cross.Reader), LAYERS * _ROW, reads_states=True),
    "recurrent": MadeUp(
        recurrent,
        lambda: made_up(recurrent.RecurrentLayer, layer_types=recurrent.TYPES),
        _ROW,
        2 * 4 * (HIDDEN * recurrent.WIDTH + 3 * HIDDEN * recurrent.TAPS),
    ),
}


@contextmanager
def registered(name: str) -> Iterator[MadeUp]:
    family = FAMILIES[name]
    with ExitStack() as undo:
        undo.callback(architectures.register(family.file.SPEC))
        for shape, layer in family.file.LAYERS.items():
            undo.callback(parts.register(shape, layer))
        yield family


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Iterator[MadeUp]:
    with registered(request.param) as found:
        yield found


def ids(rows: int = 2, tokens: int = 9) -> Tensor:
    return torch.randint(3, 90, (rows, tokens), generator=torch.Generator().manual_seed(1))


def padded(rows: int = 2, tokens: int = 9) -> dict[str, Tensor]:
    mask = torch.ones(rows, tokens, dtype=torch.long)
    mask[0, :4] = 0
    return {"input_ids": ids(rows, tokens), "attention_mask": mask}


@torch.no_grad()
def logits(model: Any, family: MadeUp, **given: Any) -> Tensor:
    given = given or {"input_ids": ids()}
    dtype = next(model.parameters()).dtype
    return model(**given, **family.more(len(given["input_ids"]), dtype)).logits


def infer(model: Any, **keys: Any) -> infuse.InferenceEngine:
    return infuse.init_inference(model, **{"dtype": "fp32", "verify": "strict", "progress": False, **keys})


def close(found: Tensor, wanted: Tensor, allowed: float = 5e-5) -> None:
    assert found.shape == wanted.shape
    assert float((found.float() - wanted.float()).norm() / wanted.float().norm()) < allowed


def test_blocks_are_proven_and_the_plan_tells_them(family: MadeUp) -> None:
    original = family.make()
    engine = infer(copy.deepcopy(original))
    assert sum(isinstance(module, Block) for module in engine.module.modules()) == LAYERS
    assert engine.plan.token_bytes[0] == family.token_bytes
    assert engine.plan.state_bytes == family.state_bytes
    assert engine.plan.after_bytes == parameter_bytes(engine.module)
    assert ("kB for each text" in str(engine.plan)) == bool(family.state_bytes)
    close(logits(engine, family), logits(original, family))
    mask = padded()["attention_mask"].bool()
    close(logits(engine, family, **padded())[mask], logits(original, family, **padded())[mask])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits(family: MadeUp, dtype: torch.dtype) -> None:
    original = family.make()
    engine = infer(copy.deepcopy(original), dtype=dtype)
    close(logits(engine, family), logits(original, family), 0.05)


def test_matrices_in_int8(family: MadeUp) -> None:
    original = family.make()
    engine = infer(copy.deepcopy(original), quant="int8")
    names = {name for name, part in engine.module.named_modules() if isinstance(part, QuantizedLinear)}
    own = {"latent": "self_attn.compress", "cross": "cross.kv", "recurrent": "self_attn.qkv"}
    name = next(name for name, one in FAMILIES.items() if one is family)
    assert f"model.layers.0.{own[name]}" in names
    close(logits(engine, family), logits(original, family), 0.05)
    assert engine.generate(ids(), max_new_tokens=4, **family.more(2)).shape == (2, 13)


def test_a_layer_that_computes_something_else_is_refused(family: MadeUp) -> None:
    ((shape, layer),) = family.file.LAYERS.items()

    class Wrong(layer):  # type: ignore[misc, valid-type]
        def mix(self, *args: Any) -> tuple[Tensor, None]:
            return super().mix(*args)[0] * 1.5, None

    parts.register(shape, Wrong)  # in place of the other one
    with pytest.raises(infuse.ProofError, match=r"model\.layers\.0"):
        infer(family.make())


@pytest.mark.parametrize("how", [
    dict(do_sample=False), dict(do_sample=False, num_beams=3), dict(do_sample=True, top_k=5),
    dict(do_sample=False, num_beams=2, num_return_sequences=2), dict(do_sample=False, use_cache=False),
    dict(do_sample=False, cache_implementation="static", disable_compile=True),
    dict(do_sample=False, penalty_alpha=None, repetition_penalty=1.2),
], ids=str)  # fmt: skip
def test_answers_are_the_originals(family: MadeUp, how: dict[str, Any]) -> None:
    original = family.make()
    engine = infer(copy.deepcopy(original))
    for given in (dict(input_ids=ids()), padded()):
        tokens = []
        for model in (original, engine):
            torch.manual_seed(5)
            try:
                tokens.append(model.generate(**given, **family.more(2), max_new_tokens=8, **how))
            except AttributeError:  # transformers' masks for a static cache of such layers are not for Llama
                assert family.state_bytes and "cache_implementation" in how
                tokens.append(ids())
        assert torch.equal(*tokens)


def test_answers_come_from_our_loop_and_cache(family: MadeUp, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    own = install.decode

    def decode(*args: Any, **kwargs: Any) -> Any:
        seen.append(cache_in(kwargs))
        return own(*args, **kwargs)

    monkeypatch.setattr(install, "decode", decode)
    engine = infer(family.make())
    engine.generate(ids(), max_new_tokens=4, do_sample=False, **family.more(2))
    (cache,) = seen
    assert type(cache) is KVCache
    wanted = StateSlot if family.state_bytes else KVSlot
    assert type(cache.layers[0]) is wanted and cache.get_seq_length() == 12
    assert cache.nbytes() >= 12 * family.token_bytes + family.state_bytes


def test_keys_and_values_of_an_encoder_are_computed_once_for_an_answer() -> None:
    with registered("cross") as family:
        engine = infer(family.make())
        layers = [part for part in engine.module.modules() if isinstance(part, cross.CrossLayerOfOurs)]
        for one in layers:
            one.computed = 0
        for how in (dict(), dict(num_beams=3)):
            engine.generate(ids(), max_new_tokens=8, do_sample=False, **family.more(2), **how)
        assert [one.computed for one in layers] == [2] * LAYERS


@pytest.mark.parametrize("how", [dict(prompt_lookup_num_tokens=3), dict(assistant=True)], ids=str)
def test_speculation(family: MadeUp, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rejected tokens are dropped from keys and values, and a state goes back to its last snapshot."""
    original, draft = family.make(), family.make()
    with torch.no_grad():
        draft.model.layers[0].mlp.down_proj.weight.mul_(1.05)  # it guesses right sometimes
    engine, drafts = infer(copy.deepcopy(original)), infer(draft)
    rewound: list[int] = []
    own = KVCache.rewind
    monkeypatch.setattr(KVCache, "rewind", lambda self, tokens: rewound.append(tokens) or own(self, tokens))
    prompt = ids(1, 5).repeat(1, 4)
    settings = dict(max_new_tokens=24, do_sample=False, **family.more(1))
    more = dict(assistant_model=drafts.module) if "assistant" in how else how
    found = engine.generate(prompt, **settings, **more)
    assert torch.equal(found, original.generate(prompt, **settings)) and rewound


def test_an_int8_cache(family: MadeUp) -> None:
    original = family.make()
    engine = infer(copy.deepcopy(original), kv_cache="int8")
    found = engine.generate(ids(), max_new_tokens=6, do_sample=False, **family.more(2))
    assert found.shape == original.generate(ids(), max_new_tokens=6, do_sample=False, **family.more(2)).shape


def test_a_cache_that_is_passed_from_call_to_call(family: MadeUp) -> None:
    original = family.make()
    engine = infer(copy.deepcopy(original))
    wanted = logits(original, family)
    for cache in (KVCache(), DynamicCache(config=original.config)):
        for start, end in ((0, 5), (5, 6), (6, 9)):
            with torch.no_grad():
                out = engine(ids()[:, start:end], past_key_values=cache, use_cache=True, **family.more(2))
            close(out.logits, wanted[:, start:end])


def test_caches_that_cannot_be_cut_say_so() -> None:
    with registered("recurrent") as family:
        engine, cache = infer(family.make()), KVCache()
        with torch.no_grad():
            engine(ids(), past_key_values=cache, use_cache=True)
        with pytest.raises(infuse.UnsupportedCall, match="state of 9 tokens cannot go back to 7"):
            cache.crop(-2)
        with pytest.raises(infuse.UnsupportedCall, match="crop_rows: .* cannot drop tokens"):
            cache.crop_rows(torch.tensor([9, 8]))
        with pytest.raises(infuse.UnsupportedCall, match="layer 0 of this DynamicCache is a .* holds no state"):
            engine(ids(), past_key_values=DynamicCache(), use_cache=True)
        cache.crop(9)
        assert cache.get_seq_length() == 9


def test_continuous_batching_is_refused_by_name(family: MadeUp) -> None:
    engine = infer(family.make())
    with pytest.raises(infuse.UnsupportedCall, match=r"continuous batching.* paged cache"):
        engine.module.generate_batch([[5, 6, 7]], max_new_tokens=2)


def test_hidden_states_are_recorded(family: MadeUp) -> None:
    original = family.make()
    engine = infer(copy.deepcopy(original))
    with torch.no_grad():
        outs = [model(ids(), output_hidden_states=True, **family.more(2)) for model in (original, engine)]
    for wanted, found in zip(*(out.hidden_states for out in outs), strict=True):
        close(found, wanted)


def test_the_state_dict_is_the_originals(family: MadeUp) -> None:
    original = family.make()
    wanted = {name: tensor.clone() for name, tensor in original.state_dict().items()}
    engine = infer(copy.deepcopy(original))
    found = engine.module.state_dict()
    assert list(found) == list(wanted) and all(torch.equal(found[name], wanted[name]) for name in wanted)
    changed = {name: tensor * 1.25 for name, tensor in wanted.items()}
    engine.module.load_state_dict(changed)
    original.load_state_dict(changed)
    close(logits(engine, family), logits(original, family))


def test_copies_and_pickles(family: MadeUp) -> None:
    engine = infer(family.make())
    wanted = engine.generate(ids(), max_new_tokens=5, do_sample=False, **family.more(2))
    for made in (copy.deepcopy(engine), pickle.loads(pickle.dumps(engine))):
        assert torch.equal(made.generate(ids(), max_new_tokens=5, do_sample=False, **family.more(2)), wanted)


def on_rank(name: str, keys: dict[str, Any]) -> tuple[Tensor, Tensor, str]:
    with registered(name) as family:
        engine = infer(family.make(), tensor_parallel={"tp_size": 2}, **keys)
        tokens = engine.generate(ids(), max_new_tokens=5, do_sample=False, **family.more(2))
        return logits(engine, family), tokens, str(engine.plan)


@pytest.mark.parametrize("name", FAMILIES)
def test_two_ranks_and_their_shards(name: str, ranks: Ranks, tmp_path: Path) -> None:
    with registered(name) as family:
        original = family.make()
        wanted = logits(original, family)
        answer = original.generate(ids(), max_new_tokens=5, do_sample=False, **family.more(2))
        for found, tokens, text in ranks.run(2, on_rank, name, {"save_mp_checkpoint_path": str(tmp_path)}):
            assert "block" in text and "refused" not in text
            close(found, wanted)
            assert torch.equal(tokens, answer)
        with torch.device("meta"):
            empty = family.make()
        read = infer(empty, checkpoint=str(tmp_path))
        close(logits(read, family), wanted)


def test_quantized_shards_are_read_back_bit_for_bit(family: MadeUp, tmp_path: Path) -> None:
    saved = infer(family.make(), quant="int8", save_mp_checkpoint_path=str(tmp_path))
    read = infer(family.make().to("meta"), checkpoint=str(tmp_path))
    assert torch.equal(logits(read, family), logits(saved, family))


# ---- a number format


@pytest.fixture
def format() -> Iterator[nested.NestedFormat]:
    take_back = parse.register(nested.NAME, nested.parse)
    yield nested.parse(())
    take_back()


def plain_llama(**more: Any) -> Any:
    sizes = dict(hidden_size=512, intermediate_size=512, num_hidden_layers=2)
    return BY_NAME["llama"].make(**{**sizes, **more})


def in_nested(**keys: Any) -> infuse.InferenceEngine:
    return infer(plain_llama(), quant=nested.NAME, **keys)


def rounded(engine: infuse.InferenceEngine) -> Any:
    """The original with every weight that the plan quantizes rounded to its format."""
    model = plain_llama()
    for step in engine.plan.steps:
        for fill in (fill for fill in step.fills if fill.format):
            for source in fill.sources:
                weight = model.get_submodule(step.path).get_parameter(source)
                with torch.no_grad():
                    weight.copy_(quant_format(fill.format).dequantize(quant_format(fill.format).quantize(weight)))
    return model


@torch.no_grad()
def plain_logits(model: Any) -> Tensor:
    return model(input_ids=ids()).logits


def buffers_of(engine: infuse.InferenceEngine) -> dict[str, Tensor]:
    """All tensors of quantized linears, as their formats define them."""
    linears = {name: part for name, part in engine.module.named_modules() if isinstance(part, QuantizedLinear)}
    return {f"{name}.{leaf}": one for name, part in linears.items() for leaf, one in part.held().tensors.items()}


def test_a_format_stores_what_it_says(format: nested.NestedFormat) -> None:
    weight = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0))
    stored = format.quantize(weight)
    error = float((format.dequantize(stored) - weight).norm() / weight.norm())
    assert abs(error / format.expected_error - 1) < 0.02
    assert stored.nbytes == format.nbytes(1024, 1024) == 1024 * 1024 * 4.25 / 8 and format.unit(1024) == nested.BLOCK
    read = nested.from_file(nested.to_file(stored))
    assert all(torch.equal(read.tensors[name], stored.tensors[name]) for name in format.names)
    assert not bool(format.dequantize(format.quantize(torch.zeros(2, 256))).any())


def test_a_format_is_registered_and_taken_back() -> None:
    with pytest.raises(infuse.ConfigError, match="unknown quantization format 'nested'"):
        infuse.plan(plain_llama(), quant=nested.NAME)
    for name in ("int4", "Nested", "nested:2"):
        with pytest.raises(ValueError, match="cannot be called"):
            parse.register(name, nested.parse)
    take_back = parse.register(nested.NAME, nested.parse)
    with pytest.raises(infuse.ConfigError, match=", nested$"):
        quant_format("int5")
    with pytest.raises(infuse.ConfigError, match="nested has no options; found 64"):
        infuse.plan(plain_llama(), quant="nested:64")
    assert "nested" in str(infuse.plan(plain_llama(), quant={"weight": {"post_init_quant": {"mlp": "nested"}}}))
    take_back()
    with pytest.raises(infuse.ConfigError, match="unknown quantization format"):
        quant_format(nested.NAME)


def test_a_quantized_model_is_proven_and_the_plan_tells_the_format(format: nested.NestedFormat) -> None:
    engine = in_nested()
    exact = plain_llama()
    blocks = [step for step in engine.plan.steps if step.path.startswith("model.layers.")]
    assert [set(step.formats.values()) for step in blocks] == [{nested.NAME}] * 2
    assert "nested 835.6 kB" in str(engine.plan) and "int8 50.7 kB" in str(engine.plan)
    assert "nested: there is no kernel for it yet" in str(engine.plan)
    assert engine.plan.after_bytes == parameter_bytes(engine.module) < engine.plan.before_bytes / 4
    close(plain_logits(engine), plain_logits(rounded(engine)))
    formats = [quant_format(one) for step in engine.plan.steps for one in step.formats.values()]
    close(plain_logits(engine), plain_logits(exact), sum(one.proof_tolerance**2 for one in formats) ** 0.5)


def test_widths_that_a_format_does_not_fit_are_left(format: nested.NestedFormat) -> None:
    plan = infuse.plan(plain_llama(intermediate_size=384), quant=nested.NAME, dtype="fp32")
    assert "mlp.down.weight: in torch.float32: nested: blocks of 256 do not divide 384 inputs" in str(plan)


@pytest.mark.parametrize(
    "how",
    [
        dict(do_sample=False),
        dict(do_sample=False, num_beams=3),
        dict(do_sample=True, top_k=5),
        dict(do_sample=False, cache_implementation="static", disable_compile=True),
        dict(do_sample=False, prompt_lookup_num_tokens=3),
    ],
    ids=str,
)
def test_answers_are_those_of_the_rounded_model(format: nested.NestedFormat, how: dict[str, Any]) -> None:
    engine, tokens = in_nested(), []
    prompt = ids(1, 5).repeat(1, 4) if "prompt_lookup_num_tokens" in how else ids()
    for model in (rounded(engine), engine):
        torch.manual_seed(5)
        tokens.append(model.generate(prompt, max_new_tokens=8, **how))
    assert torch.equal(*tokens)


def test_continuous_batches_of_the_quantized_model(format: nested.NestedFormat) -> None:
    engine, requests = in_nested(), [[5, 6, 7, 8], [20], [5, 6, 7, 8, 9]]
    settings = GenerationConfig(max_new_tokens=3, eos_token_id=-1, pad_token_id=0, do_sample=False)
    room = ContinuousBatchingConfig(page_size=4, num_blocks=16, max_batch_tokens=16)
    found = engine.generate_batch(requests, generation_config=settings, continuous_batching_config=room)
    exact = rounded(engine)
    for prompt, one in zip(requests, found.values(), strict=True):
        wanted = exact.generate(torch.tensor([prompt]), max_new_tokens=3, do_sample=False)
        assert one.error is None and one.generated_tokens == wanted[0, len(prompt) :].tolist()


def test_hidden_states_of_the_quantized_model(format: nested.NestedFormat) -> None:
    engine = in_nested()
    with torch.no_grad():
        outs = [model(ids(), output_hidden_states=True) for model in (rounded(engine), engine)]
    for wanted, found in zip(*(out.hidden_states for out in outs), strict=True):
        close(found, wanted)


def test_the_state_dict_is_dequantized_and_quantized_again(format: nested.NestedFormat) -> None:
    engine = in_nested()
    wanted = rounded(engine).state_dict()
    with pytest.raises(infuse.UnsupportedCall, match=r"the weights are quantized \(nested\)"):
        engine.module.state_dict()
    with infuse.dequantized(engine.module):
        found = engine.module.state_dict()
    assert list(found) == list(wanted) and all(torch.equal(found[name], wanted[name]) for name in wanted)
    engine.module.load_state_dict({name: tensor * 2 for name, tensor in plain_llama().state_dict().items()})
    with infuse.dequantized(engine.module):
        doubled = engine.module.state_dict()
    assert all(torch.equal(doubled[name], wanted[name] * 2) for name in wanted if name.endswith("proj.weight"))


def test_copies_and_pickles_of_the_quantized_model(format: nested.NestedFormat) -> None:
    engine = in_nested()
    for made in (copy.deepcopy(engine), pickle.loads(pickle.dumps(engine))):
        assert torch.equal(plain_logits(made), plain_logits(engine))


def in_nested_on_rank(keys: dict[str, Any]) -> tuple[Tensor, Tensor, str]:
    take_back = parse.register(nested.NAME, nested.parse)
    try:
        engine = in_nested(tensor_parallel={"tp_size": 2}, **keys)
        tokens = engine.generate(ids(), max_new_tokens=5, do_sample=False)
        return plain_logits(engine), tokens, str(engine.plan)
    finally:
        take_back()


def test_two_ranks_of_the_quantized_model_and_their_shards(
    format: nested.NestedFormat, ranks: Ranks, tmp_path: Path
) -> None:
    alone = in_nested()
    answer = alone.generate(ids(), max_new_tokens=5, do_sample=False)
    for found, tokens, text in ranks.run(2, in_nested_on_rank, {"save_mp_checkpoint_path": str(tmp_path)}):
        assert "nested 417.8 kB" in text and "refused" not in text
        close(found, plain_logits(alone))
        assert torch.equal(tokens, answer)
    read, wanted = buffers_of(infer(plain_llama().to("meta"), checkpoint=str(tmp_path))), buffers_of(alone)
    assert [*read] == [*wanted] and all(torch.equal(read[name], wanted[name]) for name in wanted)


def test_shards_of_the_quantized_model_are_read_back_bit_for_bit(format: nested.NestedFormat, tmp_path: Path) -> None:
    saved = in_nested(save_mp_checkpoint_path=str(tmp_path))
    read, wanted = buffers_of(infer(plain_llama().to("meta"), checkpoint=str(tmp_path))), buffers_of(saved)
    assert [*read] == [*wanted] and all(torch.equal(read[name], wanted[name]) for name in wanted)


def publish(folder: Path) -> dict[str, Tensor]:
    """Write a checkpoint of other people: blocks under their names. Return the codes and scales by ours."""
    coder, generator, state, buffers = nested.parse(()), torch.Generator().manual_seed(5), {}, {}
    for name, tensor in plain_llama().state_dict().items():
        if "_proj." not in name:
            state[name] = tensor
            continue
        stored = coder.quantize(torch.randn(tensor.shape, generator=generator) / tensor.shape[1] ** 0.5)
        stored.tensors["codes"].clamp_(0x22, 0xDD)  # without the ends of the grid, which quantizing again would find
        state[name.replace("weight", "blocks")] = nested.to_file(stored)
        buffers |= {name.replace("weight", leaf): buffer for leaf, buffer in stored.tensors.items()}
    save_file(state, folder / "model.safetensors")
    return buffers


def of_foreign_file(folder: str, **keys: Any) -> tuple[dict[str, Tensor], Tensor]:
    """The buffers of the output projections, which are made of one matrix each, and the logits."""
    with ExitStack() as undo:
        undo.callback(parse.register(nested.NAME, nested.parse))
        undo.callback(foreign.register(nested.recognised))
        engine = infer(plain_llama().to("meta"), checkpoint=folder, verify="sample", **keys)
        buffers = {name: tensor for name, tensor in buffers_of(engine).items() if ".out." in name}
        return buffers, plain_logits(engine)


def test_a_foreign_file_is_taken_as_it_is(tmp_path: Path, ranks: Ranks) -> None:
    stored = publish(tmp_path)
    found, wanted = of_foreign_file(str(tmp_path), quant=nested.NAME)
    assert len(found) == 2 * 3
    for name, tensor in found.items():
        theirs = stored[name.replace("self_attn.out.", "self_attn.o_proj.")]
        assert torch.equal(tensor, theirs), name
    _, dequantized = of_foreign_file(str(tmp_path))
    assert (wanted - dequantized).norm() < 0.02 * dequantized.norm()  # the head is in int8 besides
    for rank, (buffers, logits_of_rank) in enumerate(ranks.run(2, of_foreign_file_on_rank, str(tmp_path))):
        close(logits_of_rank, wanted)
        for name, part in buffers.items():
            assert torch.equal(part, found[name].chunk(2, dim=1)[rank]), name


def of_foreign_file_on_rank(folder: str) -> tuple[dict[str, Tensor], Tensor]:
    return of_foreign_file(folder, quant=nested.NAME, tensor_parallel={"tp_size": 2})
