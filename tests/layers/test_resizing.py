"""resize_token_embeddings of a replaced model: it works on plain weights; quantized ones, and those that ranks
share, refuse it before anything is changed. tie_weights and init_weights find nothing to do.
"""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
import transformers as t

import infuse
from tests.models.families import BY_NAME
from tests.support.ranks import Ranks
from tests.support.side_by_side import replaced

PROMPT = torch.tensor([[5, 7, 9, 11]])


@pytest.mark.parametrize("name", ["llama", "llama-bias", "gpt2", "bert"])
def test_a_quantized_vocabulary_keeps_its_size(name: str) -> None:
    model = replaced(name, quant="int8:16")
    again = pickle.loads(pickle.dumps(model))
    for each in (model, again):
        wanted = each(PROMPT).logits
        with pytest.raises(
            infuse.UnsupportedCall, match=r"resize_token_embeddings\(100\): .* 96 tokens, is quantized \(int8:16\)"
        ):
            each.resize_token_embeddings(100)
        for same in (None, 96):
            assert each.resize_token_embeddings(same) is each.get_input_embeddings()
        assert torch.equal(each(PROMPT).logits, wanted)
    assert again.get_input_embeddings() is not model.get_input_embeddings()


@pytest.mark.parametrize("name", ["llama", "llama-bias", "gpt2", "bert"])
def test_a_plain_vocabulary_is_resized(name: str) -> None:
    model, original = replaced(name), BY_NAME[name].make()
    for each in (model, original):
        torch.manual_seed(0)
        each.resize_token_embeddings(100)
    found, wanted = model(PROMPT).logits, original(PROMPT).logits
    assert found.shape[-1] == 100
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("quant", [None, "int8:16"])
@pytest.mark.parametrize("name", ["llama-bias", "gpt2", "bert", "qwen2-moe"])
def test_complete_weights_are_neither_tied_nor_made_anew(name: str, quant: str | None) -> None:
    """lm-eval ties those of the model that it is given; models that are composed of others initialise their parts."""
    model = replaced(name, quant=quant)
    for each in (model, pickle.loads(pickle.dumps(model))):
        wanted = {key: tensor.clone() for key, tensor in (*each.named_parameters(), *each.named_buffers())}
        each.tie_weights()
        each.init_weights()
        found = dict((*each.named_parameters(), *each.named_buffers()))
        assert found.keys() == wanted.keys() and all(torch.equal(found[key], wanted[key]) for key in wanted)


def resized_on_rank(name: str) -> tuple[str, bool]:
    model = replaced(name, tensor_parallel={"tp_size": 2, "tp_grain_size": 4})
    wanted = model(PROMPT).logits
    with pytest.raises(infuse.UnsupportedCall) as refused:
        model.resize_token_embeddings(100)
    return str(refused.value), torch.equal(model(PROMPT).logits, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma3"])  # gemma3: only the head is split
def test_a_vocabulary_that_ranks_share_keeps_its_size(name: str, ranks: Ranks) -> None:
    """A head of which a rank holds some rows used to get random ones for the others."""
    for told, unchanged in ranks.run(2, resized_on_rank, name):
        assert "for 96 tokens, is split over ranks and keeps its size" in told and unchanged


def tied_layers() -> Any:
    """DiffusionGemma: the encoder's text layers are the decoder's, tied by patterns of names."""
    if not hasattr(t, "DiffusionGemmaConfig"):
        pytest.skip("this version of transformers has no DiffusionGemma")
    experts = dict(num_experts=4, moe_intermediate_size=16, top_k_experts=2, sliding_window=5)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=12, global_head_dim=12)
    text: dict[str, Any] = dict(
        hidden_size=48, intermediate_size=32, num_hidden_layers=2, vocab_size=96, pad_token_id=0
    )
    text |= dict(layer_types=["sliding_attention", "full_attention"]) | experts | heads
    vision = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, head_dim=8)
    vision |= dict(num_key_value_heads=2, position_embedding_size=16, patch_size=4)
    torch.manual_seed(0)
    return t.DiffusionGemmaForBlockDiffusion(t.DiffusionGemmaConfig(text_config=text, vision_config=vision)).eval()


@torch.no_grad()
def canvas_logits(model: Any) -> torch.Tensor:
    return model(input_ids=PROMPT, decoder_input_ids=PROMPT + 1).logits


def tensors_of(model: Any) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in (*model.parameters(), *model.buffers())]


@pytest.mark.parametrize("quant", [None, "int8:16", "int4:16"])
def test_layers_that_are_tied_to_each_other_stay_so(quant: str | None) -> None:
    """Their experts are gone by the names by which transformers ties them."""
    settings = dict(dtype=torch.float32, verify="off", progress=False, quant=quant)
    model = infuse.init_inference(tied_layers(), **settings).module
    for each in (model, pickle.loads(pickle.dumps(model))):
        wanted, before = canvas_logits(each), tensors_of(each)
        each.tie_weights()
        each.model.tie_weights()
        each.init_weights()
        assert all(torch.equal(one, other) for one, other in zip(tensors_of(each), before, strict=True))
        assert torch.equal(canvas_logits(each), wanted)
    if quant is None:
        original = tied_layers()
        for each in (model, original):
            torch.manual_seed(0)
            each.resize_token_embeddings(100)
        torch.testing.assert_close(canvas_logits(model), canvas_logits(original), rtol=1e-4, atol=1e-4)
        assert canvas_logits(model).shape[-1] == 100
        decoder, encoder = model.model.decoder, model.model.encoder.language_model
        assert decoder.norm.weight is encoder.norm.weight, "what has its name is tied again"


@pytest.mark.parametrize("quant", [None, "int8:16"])
@pytest.mark.filterwarnings("ignore:infuse. restore")
def test_layers_that_are_tied_to_each_other_are_tied_when_they_are_restored(quant: str | None) -> None:
    original, model = tied_layers(), tied_layers()
    infuse.restore(infuse.init_inference(model, dtype=torch.float32, verify="off", progress=False, quant=quant))
    assert model.all_tied_weights_keys == original.all_tied_weights_keys
    for each in (model, original):
        for tied, source in each.all_tied_weights_keys.items():
            assert each.get_parameter(tied) is each.get_parameter(source), tied
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in original.named_parameters()]
    model.tie_weights()
    if quant is None:
        assert torch.equal(canvas_logits(model), canvas_logits(original))
