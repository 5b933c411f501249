"""Decode steps without the model's own forward (generate/direct.py): the same tokens, and only where that is known."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama import modeling_llama

import infuse
from infuse.generate import direct, install
from infuse.generate.choose import likeliest
from infuse.generate.direct import DirectSteps
from infuse.ground.authors import LibraryCalls
from infuse.layers.native.part import Columns
from infuse.layers.native.stack import BlockArguments, DecodeSession, StackCall
from infuse.native import kernels
from infuse.ops.cpu.program import CosSin, NativeProgram
from tests.models import vision_language
from tests.models.families import BY_NAME, inputs
from tests.support.one_calls import blocks, part_by_part

pytestmark = pytest.mark.skipif(isinstance(kernels(), str), reason=str(kernels()))
NEW = 9
# The first decode step is traced and made again; the prompt's step and the traced one are the model's.
DIRECT = NEW - 1
DIRECTLY = ["llama", "qwen3", "phi3", "gpt-neox", "qwen2-moe", "qwen3-moe", "llama-dynamic", "granite", "gemma"]
# Rows of a table by the token's index, added to the embedding; OPT's begin at 2.
PLACED = ["gpt2", "gpt-neo", "opt", "bigcode"]
# Blocks without rotary positions among others with them; two kinds of them; windows on some blocks, and on all.
UNLIKE = ["smollm3", "exaone-moe", "gemma3", "qwen2-window", "mistral"]
# Masks of numbers, as eager attention takes them; gemma2's logits are capped, which may make some of the largest equal.
EAGER = ["gpt-oss", "gemma2"]
LATENTS = ["deepseek-v2", "deepseek-v3-yarn", "glm4-moe-lite", "youtu", "minicpm3"]
WITH_STATES = ["qwen3_5", "lfm2", "granitemoehybrid-dense", "nemotron_h", "kimi_linear", "bailing_hybrid", "lfm3"]
# Models that compute something between their parts.
ELSEWHERE = {"bloom": "passes slopes to its blocks", "gemma4-dense": "makes a further input for each block"}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each step that was asked of all blocks, whether it was made in one call."""
    found: list[bool] = []
    step, tokens = DecodeSession.step, DecodeSession.tokens

    def noted(self: DecodeSession, x: Tensor, cos_sin: CosSin) -> Tensor | None:
        out = step(self, x, cos_sin)
        found.append(out is not None)
        return out

    def all_noted(self: DecodeSession, *args: Any) -> Tensor | None:
        out = tokens(self, *args)
        found.extend([True] * (0 if out is None else out.shape[1]))
        return out

    monkeypatch.setattr(DecodeSession, "step", noted)
    monkeypatch.setattr(DecodeSession, "tokens", all_noted)
    return found


def answer(model: Any, batch: int = 1, **asked: Any) -> Tensor:
    torch.manual_seed(3)
    given = inputs(BY_NAME["llama"], batch=batch, tokens=7)
    return model.generate(**given, **{"max_new_tokens": NEW, "do_sample": False, **asked})


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", [*DIRECTLY, *PLACED, *UNLIKE, *LATENTS, *EAGER])
def test_the_same_tokens(name: str, batch: int, made: list[bool]) -> None:
    engine = infuse.init_inference(BY_NAME[name].make(), dtype="fp32")
    exact = answer(BY_NAME[name].make(), batch)
    assert torch.equal(answer(engine, batch), exact) and made == [True] * DIRECT
    assert torch.equal(answer(engine, batch), exact)
    assert made == [True] * (2 * DIRECT - 1), "the second answer's first step is traced, but not made again"


@pytest.mark.parametrize("name", vision_language.MODELS)
def test_models_of_pictures(name: str, made: list[bool]) -> None:
    """After text and after pictures, whose kinds of tokens and rows of positions go on, in padded rows, too."""
    original = vision_language.made(name)
    engine = infuse.init_inference(vision_language.made(name), dtype="fp32")
    several = vision_language.given(original)
    grid = several["image_grid_thw"][:2]
    one = {key: value[:1] for key, value in several.items()}
    one |= {"image_grid_thw": grid, "pixel_values": several["pixel_values"][: int(grid.prod(-1).sum())]}
    text = inputs(BY_NAME["llama"], batch=1, tokens=7)
    for given, steps in ((text, NEW - 1), (one, NEW - 2), (several, NEW - 2)):
        made.clear()
        asked: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
        assert torch.equal(engine.generate(**given, **asked), original.generate(**given, **asked))
        assert made == [True] * steps


def test_numbers_of_layers_are_no_windows(made: list[bool]) -> None:
    """Qwen's `max_window_layers`, 28 in all configs, is not a length from which a mask is needed."""
    engine = infuse.init_inference(BY_NAME["qwen3"].make(max_window_layers=2), dtype="fp32")
    assert torch.equal(answer(engine), answer(BY_NAME["qwen3"].make())) and made == [True] * DIRECT


@pytest.mark.parametrize("name", ELSEWHERE)
def test_models_that_compute_between_their_parts_are_called(name: str, made: list[bool]) -> None:
    engine = infuse.init_inference(BY_NAME[name].make(), dtype="fp32")
    assert torch.equal(answer(engine), answer(BY_NAME[name].make())) and not made


def test_steps_end_with_the_table_of_places(made: list[bool]) -> None:
    """The last place is used, and then the model's own refusal is heard."""
    gpt2 = BY_NAME["gpt2"]
    engine = infuse.init_inference(gpt2.make(n_positions=16), dtype="fp32")
    exact = answer(gpt2.make(n_positions=16), max_new_tokens=10)
    assert torch.equal(answer(engine, max_new_tokens=10), exact) and made == [True] * 9, "7 and 9 tokens are 16"
    with pytest.raises(IndexError, match="index out of range"):
        answer(engine, max_new_tokens=12)


def test_rows_at_several_places_are_the_models(made: list[bool]) -> None:
    """Of a padded batch each row has its own place."""
    original, engine = BY_NAME["gpt2"].make(), infuse.init_inference(BY_NAME["gpt2"].make(), dtype="fp32")
    given = inputs(BY_NAME["gpt2"], batch=2, tokens=7)
    given["attention_mask"] = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])
    asked: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
    assert torch.equal(engine.generate(**given, **asked), original.generate(**given, **asked)) and not made


@pytest.mark.parametrize("after_an_answer", [False, True])
def test_a_stream_that_is_changed_in_place_is_noticed(
    after_an_answer: bool, made: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tensors are the same ones, but their values are not: the step made again tells."""
    llama = BY_NAME["llama"]
    original, engine = llama.make(), infuse.init_inference(llama.make(), dtype="fp32")
    if after_an_answer:
        answer(engine)
        made.clear()
    inner = type(original.model).forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        out = inner(self, *args, **kwargs)
        out.last_hidden_state.mul_(-1)
        return out

    monkeypatch.setattr(type(original.model), "forward", forward)
    monkeypatch.setattr(LibraryCalls, "__call__", lambda self, modules: True)  # else a patch is called in each step
    assert torch.equal(answer(engine), answer(original)) and made == [True], "it was made again, once"


PADDED = ["llama", "llama-dynamic", "qwen3-moe", "granite", "deepseek-v2", "minicpm3", *UNLIKE, *EAGER, *WITH_STATES]


@pytest.mark.parametrize("name", PADDED)
def test_padded_batches(name: str, made: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask grows with the tokens, over the end of the cache's room, too."""
    original = BY_NAME[name].make(max_position_embeddings=256)
    engine = infuse.init_inference(copy.deepcopy(original), dtype="fp32")
    given = inputs(BY_NAME[name], batch=3, tokens=7, padding="left")
    for count in (NEW, 80):
        made.clear()
        asked: dict[str, Any] = {"max_new_tokens": count, "do_sample": False}
        exact, found = original.generate(**given, **asked), engine.generate(**given, **asked)
        assert torch.equal(found, exact) and made == [True] * (count - (1 if count == NEW else 2))
    alone = original.generate(given["input_ids"], **asked)
    assert not torch.equal(alone, exact), "the mask hides nothing"


def test_a_mask_that_the_model_makes_itself_is_its_own(made: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    original, engine = BY_NAME["llama"].make(), infuse.init_inference(BY_NAME["llama"].make(), dtype="fp32")
    given = inputs(BY_NAME["llama"], batch=2, tokens=7, padding="left")
    asked: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
    for model in (original, engine.module):
        model.set_attn_implementation("eager")  # adds a mask of numbers: 0, and the lowest one
    assert torch.equal(engine.generate(**given, **asked), original.generate(**given, **asked)) and made == [True] * 3
    made.clear()
    own = modeling_llama.create_causal_mask
    monkeypatch.setattr(modeling_llama, "create_causal_mask", lambda *args, **kwargs: own(*args, **kwargs) * 1e-38)
    assert torch.equal(engine.generate(**given, **asked), original.generate(**given, **asked)) and not made


def test_other_modes_are_the_models(made: list[bool]) -> None:
    engine = infuse.init_inference(BY_NAME["llama"].make(), dtype="fp32")
    answer(engine, num_beams=2)
    answer(engine, use_cache=False)
    answer(engine, cache_implementation="static")
    assert not made


def test_router_hooks_are_called(made: list[bool]) -> None:
    engine = infuse.init_inference(BY_NAME["qwen2-moe"].make(), dtype="fp32")
    heard: list[int] = []
    routers = [block.mlp.router for block in blocks(engine.module) if hasattr(block.mlp, "router")]
    handle = routers[-1].register_forward_hook(lambda *_: heard.append(1))
    exact = answer(engine)
    assert len(heard) == NEW and not any(made)
    handle.remove()
    assert torch.equal(answer(engine), exact) and made.count(True) == DIRECT


def test_copies_trace_their_own_steps(made: list[bool]) -> None:
    engine = infuse.init_inference(BY_NAME["llama"].make(), dtype="fp32")
    exact = answer(engine)
    for module in (copy.deepcopy(engine.module), pickle.loads(pickle.dumps(engine.module))):
        made.clear()
        with torch.no_grad():
            blocks(module)[0].mlp.down.weight.mul_(-1)
        assert not torch.equal(answer(module), exact) and made == [True] * DIRECT
    assert torch.equal(answer(engine), exact)


@pytest.mark.parametrize(
    ("dtype", "quant", "tied"),
    [("fp32", None, False), ("bf16", None, False), ("bf16", "int8", True), ("fp32", "int4", False)],
)
def test_the_whole_step_is_one_call(
    dtype: str, quant: str | None, tied: bool, made: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where our kernels compute the head in any batch: a quantized one, or a large one."""
    model = BY_NAME["llama"].make(vocab_size=8192, tie_word_embeddings=tied)
    engine = infuse.init_inference(model, dtype=dtype, **({"quant": quant} if quant else {}))
    embedding, head = engine.module.get_input_embeddings(), engine.module.get_output_embeddings()
    called: list[nn.Module] = []
    monkeypatch.setattr(LibraryCalls, "__call__", lambda self, modules: True)  # though forwards are patched to count
    for part in (embedding, head):
        forward = type(part).forward
        monkeypatch.setattr(type(part), "forward", lambda self, x, f=forward: (called.append(self), f(self, x))[1])
    for batch in (1, 3):
        exact = answer(engine, batch)
        made.clear(), called.clear()
        assert torch.equal(answer(engine, batch), exact) and made == [True] * (DIRECT - 1)
        ends = [part for part in called if part is embedding or part is head]
        assert ends == [embedding, head] * 2, "for the prompt and the first step"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each call of several steps gave, however slow the machine is."""
    monkeypatch.setattr(direct, "_CALL_SECONDS", math.inf)
    found: list[int] = []
    tokens = NativeProgram.tokens

    def noted(self: NativeProgram, *args: Any) -> Tensor | None:
        out = tokens(self, *args)
        found.append(0 if out is None else out.shape[1])
        return out

    monkeypatch.setattr(NativeProgram, "tokens", noted)
    return found


SEVERAL = ["llama", "gpt-oss", "qwen3-moe", "llama-dynamic", "granite", "deepseek-v2", "minicpm3"]
SEVERAL += [*UNLIKE, *WITH_STATES]


@pytest.mark.parametrize("name", SEVERAL)
@pytest.mark.parametrize("batch", [1, 3])
def test_several_steps_in_one_call(name: str, batch: int, calls: list[int]) -> None:
    """Over the end of the table of positions; rotary positions of their own step by step."""
    original = BY_NAME[name].make(vocab_size=8192, max_position_embeddings=256, tie_word_embeddings=False)
    engine = infuse.init_inference(copy.deepcopy(original), dtype="fp32")
    exact = answer(original, batch, max_new_tokens=150)
    assert torch.equal(answer(engine, batch, max_new_tokens=150), exact)
    assert sum(calls) == 150 - 2 and (name == "llama-dynamic") == (set(calls) == {1}), (
        "prompt and first step are traced"
    )
    calls.clear()
    streamer = Noting()
    assert torch.equal(
        answer(engine, batch, max_new_tokens=9, **({"streamer": streamer} if batch == 1 else {})), exact[:, : 7 + 9]
    )
    if batch == 1:
        assert streamer.given == [7, *[1] * 9] and set(calls) == {1}, "who streams gets each token when it is there"


@pytest.mark.parametrize("name", ["granite", "granitemoehybrid-dense"])
def test_a_token_whose_embedding_is_zero_tells_no_factor(name: str, made: list[bool]) -> None:
    """The step that is traced: every number of the config times zero is zero."""
    original = BY_NAME[name].make(tie_word_embeddings=False, embedding_multiplier=12.0)
    first = answer(original)[0, -NEW]
    with torch.no_grad():
        original.get_input_embeddings().weight[first] = 0.0
    assert answer(original)[0, -NEW] == first
    engine = infuse.init_inference(copy.deepcopy(original), dtype="fp32")
    assert torch.equal(answer(engine), answer(original)) and not any(made)
    prompt = torch.tensor([[7, 8, 9]])
    wanted = original.generate(prompt, max_new_tokens=NEW, do_sample=False)
    assert torch.equal(engine.generate(prompt, max_new_tokens=NEW, do_sample=False), wanted)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("padding", [None, "left"])
@pytest.mark.parametrize("window", [5, 8, 9, 40])
@pytest.mark.parametrize("name", ["mistral", "qwen2-window", "lfm3", "gpt-oss"])
def test_the_models_masks_tell_which_blocks_have_a_window(
    name: str, window: int, padding: str | None, batch: int, made: list[bool]
) -> None:
    """Where it begins to hide tokens that padding does not hide, the model is called: once or twice, to look again."""
    original = BY_NAME[name].make(sliding_window=window, tie_word_embeddings=False)
    engine = infuse.init_inference(copy.deepcopy(original), dtype="fp32")
    given = inputs(BY_NAME[name], batch=batch, tokens=7, padding=padding)
    asked: dict[str, Any] = {"max_new_tokens": 60, "do_sample": False}
    wanted = original.generate(**given, **asked)
    for _ in range(2):
        made.clear()
        assert torch.equal(engine.generate(**given, **asked), wanted)
        assert made.count(True) >= 60 - 3 and all(made)
    wide = BY_NAME[name].make(sliding_window=4096, tie_word_embeddings=False)
    assert not torch.equal(wide.generate(**given, **asked), wanted), "the window hides nothing that matters"


@pytest.mark.parametrize(("name", "times"), [("llama", 1), ("gpt2", 1), ("mistral", 2), ("llama4", 1)])
def test_steps_are_traced_once_and_again_behind_a_window(
    name: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that is not understood goes on as it is."""
    traced, found = DirectSteps.traced, []
    monkeypatch.setattr(DirectSteps, "traced", lambda *args: (found.append(1), traced(*args))[1])
    changes = {"mistral": {"sliding_window": 20}, "llama4": {"attention_chunk_size": 16}}.get(name, {})
    original = BY_NAME[name].make(**changes)
    engine = infuse.init_inference(copy.deepcopy(original), dtype="fp32")
    assert torch.equal(answer(engine, max_new_tokens=40), answer(original, max_new_tokens=40))
    assert len(found) == times


def test_a_window_is_known_where_no_other_one_hides_the_same() -> None:
    """Nor padding, which says nothing of later steps: those of the answer end where it would."""
    ones = torch.ones(1, 1, 1, 9, dtype=torch.bool)
    padding, of_three, of_six = (ones & (torch.arange(9) >= first) for first in (2, 6, 3))
    plain = direct.Hiding(None, 9, {3, 6, 20})
    assert [plain.window_of(mask) for mask in (None, of_three, of_six, padding)] == [0, 3, 6, None]
    assert plain.window_of(ones) == 0 and plain.window_of(of_three.float()) is None and plain.window_end == 20
    numbers = [torch.zeros(1).masked_fill(~mask, torch.finfo(torch.float32).min) for mask in (ones, of_three, padding)]
    assert [plain.window_of(mask) for mask in numbers] == [0, 3, None]
    assert plain.window_of(numbers[1] / 2) is None, "what it hides is not hidden"
    assert plain.window_of(numbers[1].flip(-1)) is None, "a step sees its own token"
    padded = direct.Hiding(padding, 9, {3, 7, 20})
    assert [padded.window_of(mask) for mask in (padding.clone(), of_three, None)] == [0, 3, None]
    assert padded.window_end == 7 + 2, "a window of 7 hides the padding"
    rows = torch.cat((padding, ones))
    assert direct.Hiding(rows, 9, {7}).window_of(torch.cat((padding, padding))) == 7
    assert direct.Hiding(rows, 9, {7}).window_end == math.inf


def test_capped_logits_may_be_equal_where_the_heads_are_not(made: list[bool]) -> None:
    """The first of the largest is taken, as in the original: here several are the cap itself."""
    changes = {"final_logit_softcapping": 0.03, "vocab_size": 8192}
    original = BY_NAME["gemma2"].make(**changes)
    engine = infuse.init_inference(copy.deepcopy(original), dtype="fp32")
    exact = answer(original)
    assert torch.equal(answer(engine), exact) and made == [True] * DIRECT
    with torch.no_grad():
        logits = original(exact).logits[0, 6:-1]
    assert int((logits == logits.amax(-1, keepdim=True)).sum(-1).max()) > 1


def test_steps_in_one_call_end_before_a_window(calls: list[int]) -> None:
    """From there on the model passes a mask, and is called: for one token, and for the next one, which is traced."""
    original = BY_NAME["mistral"].make(vocab_size=8192, tie_word_embeddings=False, sliding_window=40)
    engine = infuse.init_inference(copy.deepcopy(original), dtype="fp32")
    assert torch.equal(answer(engine, max_new_tokens=60), answer(original, max_new_tokens=60))
    assert calls[0] == 40 - 1 - (7 + 1) and sum(calls) == 60 - 2 - 2


@pytest.mark.parametrize("name", ["minicpm3", "granite"])
@pytest.mark.parametrize("base", [48, 12, 256])
def test_numbers_by_which_the_heads_input_is_divided(name: str, base: int, calls: list[int]) -> None:
    """By none, by a power of two and by another one."""
    changes = {"dim_model_base": base} if name == "minicpm3" else {"logits_scaling": 48 / base}
    original = BY_NAME[name].make(vocab_size=8192, tie_word_embeddings=False, **changes)
    for dtype in ("fp32", "bf16"):
        engine = infuse.init_inference(copy.deepcopy(original), dtype=dtype)
        calls.clear()
        found = answer(engine, max_new_tokens=40)
        assert sum(calls) == 40 - 2
        with part_by_part(engine.module):
            assert torch.equal(answer(engine, max_new_tokens=40), found)
        assert dtype == "bf16" or torch.equal(found, answer(original, max_new_tokens=40))


@pytest.mark.parametrize(("dtype", "quant"), [("fp32", "int8"), ("bf16", None), ("bf16", "int8"), ("bf16", "int4")])
@pytest.mark.parametrize("name", ["gemma", "gemma3", "lfm3", "minicpm3"])
def test_several_steps_of_quantized_models(
    name: str, dtype: str, quant: str | None, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their tables may be the heads', quantized; numbers of 16 bits are rounded as the model rounds them."""
    model = BY_NAME[name].make(vocab_size=8192, tie_word_embeddings=quant is not None)
    engine = infuse.init_inference(model, dtype=dtype, **({"quant": quant} if quant else {}))
    found = answer(engine, 2, max_new_tokens=40)
    assert sum(calls) == 40 - 2
    monkeypatch.setattr(DirectSteps, "step_of", lambda *_: None)
    assert torch.equal(answer(engine, 2, max_new_tokens=40), found)


@pytest.mark.parametrize("kv_cache", [None, "int8"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_steps_under_a_window_are_those_of_each_block(
    dtype: str, kv_cache: str | None, made: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a long prompt, of which the masks hide most."""
    model = BY_NAME["lfm3"].make(sliding_window=100, max_position_embeddings=1024)
    engine = infuse.init_inference(model, dtype=dtype, **({"kv_cache": kv_cache} if kv_cache else {}))
    ids = torch.randint(3, 90, (2, 700), generator=torch.Generator().manual_seed(0))
    found = engine.generate(ids, max_new_tokens=NEW, do_sample=False)
    assert made == [True] * DIRECT
    monkeypatch.setattr(DirectSteps, "step_of", lambda *_: None)
    assert torch.equal(engine.generate(ids, max_new_tokens=NEW, do_sample=False), found)


@pytest.mark.parametrize("name", ["gemma3", "minicpm3"])
def test_another_number_of_a_table_is_noticed(name: str, made: list[bool]) -> None:
    """By which it multiplies its rows; it is part of the program."""
    original = BY_NAME[name].make(vocab_size=8192, tie_word_embeddings=False)
    engine = infuse.init_inference(copy.deepcopy(original), dtype="fp32")
    before = answer(engine)
    for model in (engine.module, original):
        model.get_input_embeddings().embed_scale = torch.tensor(0.25)
    assert torch.equal(answer(engine), answer(original)) and not torch.equal(answer(original), before)


@pytest.mark.parametrize(("name", "kinds"), [("lfm3", (None, 0, 1)), ("smollm3", (0, None, 0))])
def test_blocks_are_turned_by_positions_of_their_own_kind(
    name: str, kinds: tuple[int | None, ...], made: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the step that is made again tells, and the model is called."""
    engine = infuse.init_inference(BY_NAME[name].make(), dtype="fp32")
    exact, stack = answer(engine), engine.module._infuse.direct.stack
    assert stack.arguments.kinds == kinds and made == [True] * DIRECT
    monkeypatch.setattr(BlockArguments, "columns", lambda self, block: Columns(0, self.widths[0]))
    other = infuse.init_inference(BY_NAME[name].make(), dtype="fp32")
    made.clear()
    assert torch.equal(answer(other), exact) and made == [True]


@pytest.mark.parametrize("name", ["llama", *WITH_STATES])
def test_steps_in_one_call_end_where_the_cache_is_full(
    name: str, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step more would find no room in the first attention, after the states before it have been overwritten."""
    monkeypatch.setattr(install, "PREPARED_TOKENS", 0)  # so that the cache has to grow
    original = BY_NAME[name].make(vocab_size=8192, tie_word_embeddings=False)
    engine = infuse.init_inference(copy.deepcopy(original), dtype="fp32")
    assert torch.equal(answer(engine, max_new_tokens=100), answer(original, max_new_tokens=100))
    assert calls[0] == 64 - (7 + 1) and sum(calls) == 100 - 2


@pytest.mark.parametrize("name", WITH_STATES)
def test_a_step_that_fails_after_a_state_has_been_overwritten_raises(
    name: str, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot be made again: here it finds no room, of which it was told."""
    monkeypatch.setattr(install, "PREPARED_TOKENS", 0)
    with_room = StackCall.with_room
    monkeypatch.setattr(StackCall, "with_room", lambda *args: (with_room(*args)[0], math.inf))
    engine = infuse.init_inference(BY_NAME[name].make(vocab_size=8192, tie_word_embeddings=False), dtype="fp32")
    with pytest.raises(RuntimeError, match="after it had overwritten a state"):
        answer(engine, max_new_tokens=100)


def test_a_call_of_several_steps_takes_no_longer_than_it_may(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Signals are heard between calls."""
    original = BY_NAME["llama"].make(vocab_size=8192, tie_word_embeddings=False)
    engine = infuse.init_inference(copy.deepcopy(original), dtype="fp32")
    many = answer(engine, max_new_tokens=40)
    assert max(calls) > 1
    calls.clear()
    monkeypatch.setattr(direct, "_CALL_SECONDS", 0.0)
    assert torch.equal(answer(engine, max_new_tokens=40), many) and set(calls) == {1}


class Noting:
    def __init__(self) -> None:
        self.given: list[int] = []

    def put(self, tokens: Tensor) -> None:
        self.given.append(tokens.numel())

    def end(self) -> None:
        pass


@pytest.mark.parametrize("batch", [1, 3])
def test_an_end_within_several_steps(batch: int, calls: list[int]) -> None:
    """Rows end at steps of their own, and are padded; the last step of a call is the one that ends a row."""
    original = BY_NAME["llama"].make(vocab_size=8192, tie_word_embeddings=False)
    engine = infuse.init_inference(copy.deepcopy(original), dtype="fp32")
    exact = answer(original, batch, max_new_tokens=40)
    for place in (-1, -9, -20, -37):
        asked = {"max_new_tokens": 40, "eos_token_id": [int(exact[-1, place]), 8000], "pad_token_id": 8001}
        calls.clear()
        assert torch.equal(answer(engine, batch, **asked), answer(original, batch, **asked))
        assert place == -37 or batch > 1 or max(calls) > 1


def test_a_norm_of_another_kind_is_called(made: list[bool]) -> None:
    """Gemma's norms add 1 to their weights; a class may get another forward between two answers."""
    engine = infuse.init_inference(BY_NAME["llama"].make(vocab_size=8192), dtype="fp32")
    exact, kind = answer(engine), type(engine.module.model.norm)
    forward = kind.forward
    try:
        kind.forward = lambda self, x: -forward(self, x)  # type: ignore[method-assign]
        changed = answer(engine)
    finally:
        kind.forward = forward  # type: ignore[method-assign]
    assert not torch.equal(changed, exact) and torch.equal(answer(engine), exact)


def halved(model: Any) -> None:
    torch.nn.utils.parametrize.register_parametrization(model.lm_head, "weight", Halved())


def limited(model: Any) -> None:
    model.get_input_embeddings().max_norm = 0.05


class Halved(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return torch.cat((weight[::2] / 2, weight[1::2] * 2))


@pytest.mark.parametrize("change", [halved, limited])
def test_a_head_or_table_that_becomes_another_is_noticed(change: Callable[[Any], None], made: list[bool]) -> None:
    """In place, after an answer whose steps were one call. A table with a largest norm changes what it looks up."""
    original = BY_NAME["llama"].make(vocab_size=8192, tie_word_embeddings=False)
    engine = infuse.init_inference(copy.deepcopy(original), dtype="fp32")
    before = answer(engine)
    change(engine.module), change(original)
    exact = answer(original)
    assert torch.equal(answer(engine), exact) and (change is limited or not torch.equal(before, exact))
    tables = [model.get_input_embeddings().weight for model in (engine.module, original)]
    torch.testing.assert_close(*tables)


def test_ids_outside_the_table_are_the_models(made: list[bool]) -> None:
    engine = infuse.init_inference(BY_NAME["llama"].make(), dtype="fp32")
    embedding = engine.module.get_input_embeddings()
    with torch.no_grad():  # a head for more tokens than the table has
        embedding.weight.data = embedding.weight.data[:64].clone()
    with pytest.raises(IndexError):
        answer(engine, max_new_tokens=60)


def test_held_layers_see_what_is_stored_in_weights_and_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = infuse.init_inference(BY_NAME["llama"].make(), dtype="fp32")
    exact, held = answer(engine), []
    make = NativeProgram.__init__

    class Streamer:
        tokens = 0

        def put(self, tokens: Tensor) -> None:
            self.tokens += 1
            if self.tokens == 5:
                with torch.no_grad():
                    blocks(engine.module)[0].mlp.down.weight.mul_(-1)

        def end(self) -> None:
            pass

    def noted(self: NativeProgram, text: str, *args: Any) -> None:
        make(self, text, *args)
        if "whole=true" in text:
            held.append(weakref.ref(self))

    monkeypatch.setattr(NativeProgram, "__init__", noted)
    assert not torch.equal(answer(engine, streamer=Streamer()), exact)
    gc.collect()
    assert len(held) == 1 and held[0]() is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_likeliest_is_as_torch_says(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for columns in (1, 7, 2048, 2049, 5000):
        for rows in (1, 2, 9):
            logits = torch.randint(-40, 40, (rows, 1, columns)).to(dtype)  # with equals
            assert torch.equal(likeliest(logits), logits[:, -1].float().argmax(-1))
    logits[0, 0, 3000:] = -math.inf
    logits[1] = -math.inf
    logits[2, 0, 7], logits[2, 0, 4000] = -0.0, math.nan
    logits[3] = -1
    logits[3, 0, 9], logits[3, 0, 11] = -0.0, 0.0
    logits[4, 0, 4999] = math.inf
    assert torch.equal(likeliest(logits), logits[:, -1].float().argmax(-1))
    two = torch.cat((logits, logits.flip(-1)), dim=1)
    assert torch.equal(likeliest(two), two[:, -1].float().argmax(-1))


@pytest.mark.parametrize("name", ["kimi_linear", "deepseek-v3"])
def test_latents_in_int8_are_the_models(name: str, made: list[bool]) -> None:
    """C++ does not write them, and must not begin a step: the states of layers before them would be overwritten."""
    engine = infuse.init_inference(BY_NAME[name].make(vocab_size=8192), dtype="fp32", kv_cache="int8")
    found = answer(engine, batch=2)
    assert not made
    with part_by_part(engine.module):
        assert torch.equal(answer(engine, batch=2), found)
