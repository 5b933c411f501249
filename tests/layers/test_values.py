"""What a replaced layer keeps of values follows them: weights that are written or moved, mapped files, caches."""

from __future__ import annotations

import copy
import os
import pickle
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t
from diffusers.models.attention_processor import Attention
from diffusers.models.upsampling import Upsample2D
from transformers import DynamicCache, StaticCache

import infuse
from infuse.cache.kv_cache import KVCache
from infuse.graphs.pool import BucketPool
from infuse.ground.errors import CheckpointError, UnsupportedCall
from tests.diffusion.side_by_side import distance, original, replaced
from tests.diffusion.tiny_pipelines import images, made
from tests.models.families import BY_NAME
from tests.support.fake_graph import FakeBackend
from tests.support.mapped_experts import MMAP, loaded, logits, model, with_kernels


def one_value_less(weight: torch.Tensor) -> None:
    """Change a single value in a way that counts no version."""
    weight.data.view(-1)[weight.numel() // 3] += 5


@pytest.mark.parametrize("after", ["a value", "float32"])
def test_keys_of_a_text_follow_their_weights(after: str) -> None:
    torch.manual_seed(0)
    module = Attention(query_dim=64, cross_attention_dim=80, heads=4, dim_head=16).eval()
    x, text = torch.randn(2, 9, 64), torch.randn(2, 7, 80)
    dtype = torch.float32 if after == "a value" else torch.bfloat16
    new: Any = replaced(module.to(dtype), dtype)
    with torch.no_grad():
        new(x.to(dtype), text.to(dtype))
        if after == "float32":
            wanted = module.to(torch.float32)(x, text)
            new.to(torch.float32)
        else:
            one_value_less(module.to_k.weight)
            new.kv.weight.data[: len(module.to_k.weight)] = module.to_k.weight
            wanted = module(x, text)
        torch.testing.assert_close(new(x, text), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("after", ["a value", "float32", "bfloat16"])
def test_weights_of_an_upsampling_follow_the_convolution(after: str) -> None:
    torch.manual_seed(0)
    module = Upsample2D(64, use_conv=True).eval()
    new: Any = replaced(module)
    x = torch.randn(1, 64, 6, 5)
    if after == "float32":
        new.to(torch.bfloat16)
        module.to(torch.bfloat16)
    with torch.no_grad():
        new(x.to(new.conv.weight.dtype))
        if after == "a value":
            one_value_less(new.conv.weight)
            module.conv.weight.data.copy_(new.conv.weight)
            wanted = module(x)
        else:
            dtype = getattr(torch, after)
            x = x.to(dtype)
            wanted = module.to(dtype)(x)
            new.to(dtype)
        close = dict(rtol=2e-2, atol=2e-2) if after == "bfloat16" else dict(rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(new(x), wanted, **close)


def test_a_preview_in_bfloat16_before_a_picture_in_float32() -> None:
    pipe = made("sdxl", torch.bfloat16)
    engine = infuse.init_inference(pipe, verify="off", progress=False)
    wanted = original("sdxl", num_inference_steps=1)
    images(engine, "sdxl", num_inference_steps=1)
    for part in engine.pipeline.components.values():
        if isinstance(part, torch.nn.Module):
            part.to(torch.float32)
    assert distance(images(engine, "sdxl", num_inference_steps=1), wanted) < 0.05


@with_kernels
def test_a_mapped_file_that_got_its_old_mtime_back(tmp_path: Path) -> None:
    """Renaming it changes its ctime alone, and nothing that is read."""
    engine = infuse.init_inference(model(), save_mp_checkpoint_path=str(tmp_path), **MMAP, dtype="fp32", quant="int8")
    (file,) = tmp_path.glob("*.safetensors")
    mapped, before = loaded(tmp_path), file.stat()
    wanted = logits(mapped)
    file.chmod(0o600)
    assert torch.equal(logits(mapped), wanted)
    held, data = file.read_bytes(), engine.module.model.layers[1].mlp.experts.down.data
    at = held.index(bytes(data.flatten()[:64].view(torch.uint8).tolist()))
    with file.open("r+b") as opened:
        opened.seek(at)
        opened.write(bytes([held[at] ^ 64]))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(CheckpointError, match="down.data is not what was saved"):
        logits(mapped)


def test_a_copied_pool_of_graphs_keeps_the_format_of_its_caches() -> None:
    pool = BucketPool(FakeBackend(), 1 << 20, format="int8")
    assert copy.deepcopy(pool).take(1, 5).cache.format == "int8"
    pool.backend = None  # type: ignore[assignment]
    assert pickle.loads(pickle.dumps(pool)).format == "int8"


# ---- caches and masks ----


def decoder(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    made: Any = BY_NAME["llama"].make()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    infuse.init_inference(made, dtype="fp32", verify="off", progress=False)
    return made


@torch.no_grad()
def filled(model: Any, cache: Any, tokens: int = 6) -> torch.Tensor:
    return model(torch.arange(3, 3 + tokens)[None], past_key_values=cache, use_cache=True).logits


@pytest.mark.parametrize("how", ["a prompt", "a step", "rows of own lengths", "generate"])
@pytest.mark.parametrize("copied", [False, True], ids=("itself", "a copy"))
def test_a_cache_that_another_model_of_equal_shapes_filled(how: str, copied: bool) -> None:
    first, second, cache = decoder(), decoder(1), KVCache()
    filled(first, cache)
    if how == "rows of own lengths":
        cache.crop_rows(torch.tensor([4]))
    given = copy.deepcopy(cache) if copied else cache
    with pytest.raises(UnsupportedCall, match="filled by another model"):
        if how == "generate":
            second.generate(torch.arange(3, 10)[None], past_key_values=given, max_new_tokens=2)
        else:
            filled(second, given, 1 if how == "a step" else 3)
    assert filled(first, given, 2).shape[1] == 2  # the refused call has left it as it was
    given.reset()
    assert torch.equal(filled(second, given), filled(second, KVCache()))


@pytest.mark.parametrize("as_copied", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_a_cache_goes_on_in_copies_of_its_model(as_copied: Any) -> None:
    model, cache = decoder(), KVCache()
    filled(model, cache)
    prefix, other = as_copied(cache), as_copied(model)
    assert torch.equal(filled(other, prefix, 2), filled(model, cache, 2))
    ids = torch.arange(3, 12)[None]
    cache.batch_repeat_interleave(2)
    wanted = model.generate(ids, past_key_values=copy.deepcopy(cache), max_new_tokens=4, num_beams=2)
    assert torch.equal(other.generate(ids, past_key_values=as_copied(cache), max_new_tokens=4, num_beams=2), wanted)


def test_models_that_assist_each_other_have_own_caches() -> None:
    model, assistant = decoder(), decoder(1)
    ids = torch.arange(3, 9)[None]
    wanted = model.generate(ids, max_new_tokens=8, do_sample=False)
    assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False, assistant_model=assistant), wanted)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "bloom"])
@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
@pytest.mark.parametrize("cached", ["no cache", "KVCache", "KVCache, a step", "DynamicCache", "StaticCache"])
def test_a_mask_over_other_keys(name: str, kind: torch.dtype, cached: str) -> None:
    """Original and replaced model refuse the same widths; ours leaves its cache as it was."""
    family = BY_NAME[name]
    if cached != "no cache" and name == "bert":
        pytest.skip("has no cache")
    original: Any = family.make()
    model = copy.deepcopy(original)
    infuse.init_inference(model, dtype="fp32", verify="off", progress=False)
    tokens = 1 if cached == "KVCache, a step" else 5
    ids = torch.arange(3, 3 + tokens)[None]
    for width in (3, 5, 6, 9, 12):
        accepted = []
        for each in (original, model):
            cache: Any = {"no cache": lambda: None, "DynamicCache": DynamicCache}.get(cached, KVCache)()
            if cached == "StaticCache":
                cache = StaticCache(original.config, max_cache_len=9)
            if cached == "KVCache, a step":
                filled(each, cache, 5)
            held = 0 if cache is None else int(cache.get_seq_length())
            mask = (
                torch.ones(1, 1, tokens, width, dtype=torch.bool)
                if kind is torch.bool
                else torch.zeros(1, 1, tokens, width)
            )
            more = {} if cache is None else dict(past_key_values=cache, use_cache=True)
            try:
                with torch.no_grad():
                    each(ids, attention_mask=mask, **more)
                accepted.append(True)
            except (RuntimeError, ValueError, UnsupportedCall):
                accepted.append(False)
                if each is model and isinstance(cache, KVCache):
                    assert all(slot.length == held for slot in cache.layers)
        assert accepted[0] == accepted[1], f"{width} keys: {accepted}"


# ---- inputs in other dtypes and shapes ----

WIDTHS = dict(
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=300,
)
MADE: dict[str, Any] = {
    "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**WIDTHS)),
    "mixtral": lambda: t.MixtralForCausalLM(t.MixtralConfig(num_local_experts=4, **WIDTHS)),
    "bert": lambda: t.BertModel(t.BertConfig(**{**WIDTHS, "num_key_value_heads": None})),
    "electra": lambda: t.ElectraModel(t.ElectraConfig(embedding_size=128, **{**WIDTHS, "num_key_value_heads": None})),
}
WAYS: dict[str, dict[str, Any]] = {
    "blocks": {},
    "linears": dict(replace_with_kernel_inject=False),
    "int8": dict(quant="int8"),
    "int8 linears": dict(quant="int8", replace_with_kernel_inject=False),
}


def both(name: str, dtype: torch.dtype, **settings: Any) -> tuple[Any, Any]:
    """The original and the replaced model."""
    torch.manual_seed(0)
    original = MADE[name]().to(dtype).eval()
    model = copy.deepcopy(original)
    infuse.init_inference(model, dtype=dtype, verify="off", progress=False, **settings)
    return original, model


def ids_of(tokens: int) -> torch.Tensor:
    return torch.arange(3, 3 + tokens)[None]


@torch.no_grad()
def first(model: Any, *args: Any, autocast: torch.dtype | None = None, **kwargs: Any) -> torch.Tensor:
    with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
        found = model(*args, **kwargs)
    return found.logits if hasattr(found, "logits") else found[0]


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
def test_autocast_around_a_float32_model(name: str, way: str, autocast: torch.dtype) -> None:
    original, model = both(name, torch.float32, **WAYS[way])
    assert next(iter(model.parameters())).dtype is torch.float32
    for tokens in (1, 5, 140):  # these run by other kernels
        wanted, found = (first(each, ids_of(tokens), autocast=autocast) for each in (original, model))
        assert found.dtype is wanted.dtype
        errors = (found.float() - wanted.float()).abs().amax(dim=-1).flatten()  # of tokens; a few get other experts
        assert errors.quantile(0.9) < 0.05 * wanted.abs().max()
        blocks = [each for path, each in model.named_modules() if path.endswith(".1") and "layer" in path]
        heard: list[torch.dtype] = []
        handle = blocks[0].register_forward_hook(
            lambda m, args, out: heard.append((out[0] if isinstance(out, tuple) else out).dtype)  # noqa: B023
        )
        hidden = first(model, ids_of(tokens), autocast=autocast, output_hidden_states=True)
        handle.remove()
        assert hidden.dtype is wanted.dtype
        other: list[torch.dtype] = []
        theirs = [each for path, each in original.named_modules() if path.endswith(".1") and "layer" in path][0]
        handle = theirs.register_forward_hook(
            lambda m, args, out: other.append((out[0] if isinstance(out, tuple) else out).dtype)  # noqa: B023
        )
        first(original, ids_of(tokens), autocast=autocast)
        handle.remove()
        assert heard == other


@pytest.mark.parametrize("way", WAYS)
def test_answers_inside_of_autocast(way: str) -> None:
    """A long prompt and single steps append to one cache."""
    original, model = both("llama", torch.float32, **WAYS[way])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = model.generate(ids_of(140), max_new_tokens=4, do_sample=False)
        assert found.shape == original.generate(ids_of(140), max_new_tokens=4, do_sample=False).shape
    assert torch.equal(model.generate(ids_of(5), max_new_tokens=4), model.generate(ids_of(5), max_new_tokens=4))


@pytest.mark.parametrize("name", ["llama", "mixtral", "bert"])
@pytest.mark.parametrize("pair", [(torch.bfloat16, torch.float16), (torch.float16, torch.bfloat16)])
def test_autocast_of_another_short_dtype(name: str, pair: tuple[torch.dtype, torch.dtype]) -> None:
    dtype, autocast = pair
    _, model = both(name, dtype)
    with pytest.raises(UnsupportedCall, match=f"autocast in {autocast} .* replaced in {dtype}: leave autocast out"):
        first(model, ids_of(5), autocast=autocast)
    assert first(model, ids_of(5), autocast=dtype).dtype is dtype
    with torch.autocast("cuda", dtype=autocast, enabled=True) if torch.cuda.is_available() else nullcontext():
        assert first(model, ids_of(5)).dtype is dtype  # of another device


@pytest.mark.parametrize("name", ["llama", "mixtral"])
@pytest.mark.parametrize("short", [torch.bfloat16, torch.float16])
def test_short_embeddings_in_a_float32_model(name: str, short: torch.dtype) -> None:
    original, model = both(name, torch.float32)
    given = original.get_input_embeddings()(ids_of(5)).detach().to(short)
    cache = KVCache()
    for more in ({}, dict(past_key_values=cache, use_cache=True)):
        with pytest.raises(UnsupportedCall, match="give inputs_embeds and other inputs in the dtype of the model"):
            first(model, inputs_embeds=given, **more)
    assert all(slot.length == 0 for slot in cache.layers)
    with pytest.raises(UnsupportedCall, match="dtype of the model"):
        model.generate(inputs_embeds=given, max_new_tokens=2)
    _, quantized = both(name, torch.float32, quant="int8")  # which compute in any dtype, as the original
    wanted = first(original, inputs_embeds=given)
    assert first(quantized, inputs_embeds=given).dtype is wanted.dtype


@pytest.mark.parametrize("name", ["llama", "gpt-neox", "phi", "cohere", "falcon-7b", "codegen", "gptj"])
def test_positions_and_ids_of_other_axes(name: str) -> None:
    family = BY_NAME[name]
    original: Any = family.make()
    model = copy.deepcopy(original)
    infuse.init_inference(model, dtype="fp32", verify="off", progress=False)
    ids, order = torch.arange(3, 13).view(2, 5), torch.arange(5)
    calls = [(ids, dict(position_ids=order)), (ids, dict(position_ids=order.expand(3, 2, 5))), (ids.view(1, 2, 5), {})]
    for given, more in calls:
        try:
            wanted = first(original, given, **more)
        except (RuntimeError, IndexError, ValueError):
            wanted = None
        try:
            found = first(model, given, **more)
        except (UnsupportedCall, RuntimeError, IndexError, ValueError):
            continue
        assert wanted is not None
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        first(model, ids, position_ids=order[None]),
        first(original, ids, position_ids=order[None]),
        rtol=1e-4,
        atol=1e-4,
    )
