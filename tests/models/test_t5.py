"""T5: its bias by distance, what its layers hand on, its decoder, float16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t
from torch import Tensor

import infuse
from infuse.architectures.parts.attention import RelativeBias
from infuse.layers.attention.position import LearnedBias
from infuse.layers.block import Block
from tests.models.families import BY_NAME, enlarge, inputs
from tests.support.side_by_side import pair

SEQ2SEQ = dict(d_model=48, d_kv=4, d_ff=80, num_layers=2, num_heads=4, vocab_size=96, decoder_start_token_id=0)


def seq2seq(**changes: Any) -> Any:
    torch.manual_seed(0)
    model = t.T5ForConditionalGeneration(t.T5Config(**{**SEQ2SEQ, **changes})).eval()
    enlarge(model)
    model.generation_config.eos_token_id = None
    return model


@pytest.mark.parametrize(("buckets", "farthest"), [(32, 128), (8, 11), (6, 40)])
@pytest.mark.parametrize("tokens", [1, 2, 33, 200])
def test_the_bias_is_the_originals_bit_for_bit(tokens: int, buckets: int, farthest: int) -> None:
    config = t.T5Config(relative_attention_num_buckets=buckets, relative_attention_max_distance=farthest, num_heads=3)
    original = t.models.t5.modeling_t5.T5Attention(config, has_relative_attention_bias=True)
    ours = LearnedBias(RelativeBias("table", buckets=buckets, farthest=farthest), 3)
    ours.table = original.relative_attention_bias.weight
    assert torch.equal(ours(torch.zeros(2, tokens, 5)), original.compute_bias(tokens, tokens))


@pytest.mark.parametrize(("buckets", "farthest"), [(32, 128), (8, 11), (6, 40)])
@pytest.mark.parametrize(("start", "tokens", "length"), [(0, 1, 1), (0, 7, 7), (5, 1, 6), (200, 1, 300), (3, 4, 20)])
def test_the_bias_of_decoders(start: int, tokens: int, length: int, buckets: int, farthest: int) -> None:
    """Rows of tokens in the middle of a text, over keys of which a static cache has room for more."""
    config = t.T5Config(relative_attention_num_buckets=buckets, relative_attention_max_distance=farthest, num_heads=3,
                        is_decoder=True)  # fmt: skip
    original = t.models.t5.modeling_t5.T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    ours = LearnedBias(RelativeBias("table", buckets=buckets, farthest=farthest, causal=True), 3)
    ours.table = original.relative_attention_bias.weight
    wanted = original.compute_bias(tokens, length, past_seen_tokens=start)
    assert torch.equal(ours(torch.zeros(2, tokens, 5), start, length), wanted)
    assert torch.equal(ours(torch.zeros(2, tokens, 5), torch.tensor(start), length), wanted)


def test_the_first_layer_makes_the_bias_and_the_others_get_it() -> None:
    _, engine = pair("t5")
    seen: list[tuple[Any, Any]] = []
    blocks = [module for module in engine.module.modules() if isinstance(module, Block)]
    handles = [
        block.register_forward_hook(lambda module, args, output: seen.append((args[2], output[1]))) for block in blocks
    ]
    engine(**inputs(BY_NAME["t5"]))
    for handle in handles:
        handle.remove()
    made = seen[0][1]
    assert seen[0][0] is None and made.shape == (1, 4, 11, 11) and len(seen) == 3
    assert all(given is made and returned is made for given, returned in seen[1:])


def test_a_layer_without_bias_called_alone_adds_none() -> None:
    original, engine = pair("t5")
    x = torch.randn(2, 7, 48, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        wanted, found = (model.encoder.block[1](x) for model in (original, engine.module))
    assert torch.equal(found[1], wanted[1]) and found[2] is None is wanted[2]
    assert (found[0] - wanted[0]).abs().max() < 2e-5 * wanted[0].abs().max()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_encoder_of_a_whole_t5_generates_the_same(dtype: str, tmp_path: Path) -> None:
    model, torch_dtype = seq2seq(), torch.float32 if dtype == "fp32" else torch.bfloat16
    ids = torch.randint(3, 96, (2, 9), generator=torch.Generator().manual_seed(3))
    engine = infuse.init_inference(seq2seq().to(torch_dtype), dtype=dtype)
    depths = {step.path: step.depth for step in engine.plan.steps}
    layers = [f"{half}.block.{index}" for half in ("encoder", "decoder") for index in range(2)]
    assert [depths[layer] for layer in layers] == ["block"] * 4
    if dtype == "fp32":
        settings = dict(max_new_tokens=6, do_sample=False)
        assert torch.equal(engine.generate(ids, **settings), model.generate(ids, **settings))
    engine.module.save_pretrained(tmp_path)
    again = t.T5ForConditionalGeneration.from_pretrained(tmp_path)
    for name, saved in again.state_dict().items():
        assert torch.equal(saved, model.state_dict()[name].to(torch_dtype)), name


def test_float16_keeps_the_matrices_that_transformers_keeps_in_float32() -> None:
    """The sums of real T5s exceed float16. In the original they are in float32, because `wo` is."""
    model, exact = BY_NAME["t5"].make(), BY_NAME["t5"].make()
    with torch.no_grad():
        for one in (model, exact):
            for block in one.encoder.block:
                block.layer[1].DenseReluDense.wo.weight.mul_(1e6)
    engine = infuse.init_inference(model, dtype="fp16")
    blocks = [module for module in engine.module.modules() if isinstance(module, Block)]
    assert [block.mlp.down.weight.dtype for block in blocks] == [torch.float32] * 3
    assert blocks[0](torch.zeros(1, 2, 48, dtype=torch.float16))[0].dtype == torch.float32
    given = inputs(BY_NAME["t5"])
    with torch.no_grad():
        found, wanted = engine(**given).last_hidden_state, exact(**given).last_hidden_state
    assert float((found - wanted).norm() / wanted.norm()) < 0.02


@pytest.mark.parametrize("quant", [None, "int8"])
@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("gated", [True, False])
def test_float16_in_both_halves(gated: bool, keeps: bool, quant: str | None) -> None:
    """`wo` in float32 as transformers loads it, and in a model that was cast as a whole."""
    changes = dict(feed_forward_proj="gated-gelu") if gated else {}
    exact, half = seq2seq(**changes), seq2seq(**changes).half()
    if keeps:
        for name, parameter in half.named_parameters():
            parameter.data = parameter.data.float() if name.endswith("wo.weight") else parameter.data
    given = dict(input_ids=torch.randint(3, 96, (3, 9)), decoder_input_ids=torch.randint(3, 96, (3, 4)))
    with torch.no_grad():
        wanted, own = exact(**given).logits, half(**given).logits
        engine = infuse.init_inference(half, dtype="fp16", quant=quant)
        found = engine(**given).logits
    blocks = [module for module in engine.module.modules() if isinstance(module, Block)]
    assert len(blocks) == 4 and all(type(block.mlp.down).__name__ == "Linear" for block in blocks if keeps)
    assert found.dtype == own.dtype == torch.float16
    allowed = 0.1 if quant else 3 * float((own - wanted).norm() / wanted.norm())
    assert float((found - wanted).norm() / wanted.norm()) <= allowed
    assert engine.generate(given["input_ids"], num_beams=2, max_new_tokens=6).shape == (3, 7)


def test_float16_with_formats_keeps_wo() -> None:
    """Also where a format fits it: a matrix that stays in float32 is not quantized, and its layer is a block."""
    given = dict(input_ids=torch.randint(3, 96, (3, 9)), decoder_input_ids=torch.randint(3, 96, (3, 4)))
    exact, half = seq2seq(d_model=64, d_kv=16, d_ff=128), seq2seq(d_model=64, d_kv=16, d_ff=128).half()
    for name, parameter in half.named_parameters():
        parameter.data = parameter.data.float() if name.endswith("wo.weight") else parameter.data
    engine = infuse.init_inference(half, dtype="fp16", quant="int8")
    blocks = [module for module in engine.module.modules() if isinstance(module, Block)]
    assert [block.mlp.down.weight.dtype for block in blocks] == 4 * [torch.float32]
    assert all(type(block.mlp.up).__name__ == "QuantizedLinear" for block in blocks)
    assert "mlp.down.weight: in torch.float16: stays in float32" in str(engine.plan)
    with torch.no_grad():
        found, wanted = engine(**given).logits, exact(**given).logits
    assert float((found - wanted).norm() / wanted.norm()) <= 0.1


def test_sums_that_do_not_fit_into_float16_are_clamped() -> None:
    """Each sum of a stream, in a model that was cast as a whole: the others of its values are the original's, too."""
    model, original = seq2seq().half(), seq2seq().half()
    engine = infuse.init_inference(model, dtype="fp16", verify="off")
    ours, theirs = engine.module.decoder.block[0], original.decoder.block[0]
    states = torch.randn(2, 5, 48).half()
    for part in (ours.layer.out, theirs.layer[0].SelfAttention.o):
        with torch.no_grad():
            part.weight[:2] = 3e2  # of either sign: one of the first two sums does not fit
    for largest in (65504.0, 1.0):
        x = torch.randn(2, 3, 48).half()
        x[..., :2] = torch.tensor([largest, -largest])
        with torch.no_grad():
            found, wanted = (block(x, encoder_hidden_states=states)[0] for block in (ours, theirs))
        assert torch.isfinite(wanted).all() and bool((wanted.abs() > 6e4).any()) is (largest > 1)
        torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)


def test_arguments_of_a_decoder_are_refused_by_name() -> None:
    _, engine = pair("t5")
    x: Tensor = torch.zeros(1, 3, 48)
    with pytest.raises(infuse.UnsupportedCall, match="encoder_hidden_states"):
        engine.module.encoder.block[0](x, None, None, x)
