"""Layers without a spec over several ranks: by a policy of the caller, by the model's own plan, by structure; and what
is refused.

The original is the user's own model, whole, in this process.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as t
from torch import Tensor, nn
from transformers.models.mpnet.modeling_mpnet import MPNetLayer
from transformers.models.roberta.modeling_roberta import RobertaLayer
from transformers.models.t5.modeling_t5 import T5Block

import infuse
from infuse.deepspeed import module_inject
from infuse.plan.kinds import SPLIT
from tests.models.families import BY_NAME, enlarge, inputs
from tests.models.unknown import NEW_TOKENS, T5, Apart, Unknown, continued, make, t5
from tests.support.ranks import Ranks, same

TOLERANCE = 5e-5  # of logits, over the root mean square of the original's
SIZES = (2, 3, 4)
T5_POLICY = {T5Block: ("SelfAttention.o", "EncDecAttention.o", "DenseReluDense.wo")}


def text() -> dict[str, Tensor]:
    ids = torch.randint(3, 96, (3, 7), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def answers(model: Any) -> tuple[Tensor, Tensor]:
    """Logits and greedy tokens of T5."""
    given = text()
    with torch.no_grad():
        logits = model(**given, decoder_input_ids=given["input_ids"]).logits
        return logits, model.generate(**given, max_new_tokens=NEW_TOKENS, do_sample=False)


def size() -> dict[str, int]:
    return {"tp_size": torch.distributed.get_world_size(), "timeout_s": 30}


def error(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).abs().max() / exact.square().mean().sqrt())


# ---- by a policy


def t5_on_rank(policy: Any, changes: dict[str, Any], settings: dict[str, Any]) -> tuple[Tensor, Tensor, list[str], int]:
    model = t5(**changes)
    engine = infuse.init_inference(model, dtype="fp32", tensor_parallel=size(), injection_policy=policy, **settings)
    split = [step.path for step in engine.plan.steps if step.depth == SPLIT]
    return *answers(engine), split, sum(p.nbytes for p in model.parameters())


@pytest.mark.parametrize(
    ("policy", "ranks_used"),
    [*[(T5_POLICY, ranks_used) for ranks_used in SIZES], ({"T5Block": T5_POLICY[T5Block]}, 2), (None, 3)],
)
def test_t5(policy: Any, ranks_used: int, ranks: Ranks) -> None:
    results = ranks.run(ranks_used, t5_on_rank, policy, {}, {})
    model = t5()
    logits, tokens = answers(model)
    assert same([result[0] for result in results]) and error(results[0][0], logits) < TOLERANCE
    assert all(torch.equal(result[1], tokens) for result in results)
    assert all(len(result[2]) == (4 if policy else 0) for result in results)  # blocks without one
    whole = sum(p.nbytes for p in model.parameters())
    # Each rank has its part; the norms and biases of heads are small.
    assert sum(result[3] for result in results) < 1.1 * whole


def attentions(model: Any) -> list[Tensor]:
    """The weights of all attentions of T5, of all heads."""
    given = text()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        found = model(**given, decoder_input_ids=given["input_ids"], output_attentions=True)
    return [*found.encoder_attentions, *found.decoder_attentions, *found.cross_attentions]


def attentions_on_rank() -> list[Tensor]:
    return attentions(infuse.init_inference(t5(), dtype="fp32", tensor_parallel=size(), injection_policy=T5_POLICY))


def test_attention_weights_are_those_of_all_heads(ranks: Ranks) -> None:
    exact = attentions(t5())
    for found in ranks.run(3, attentions_on_rank):
        assert [x.shape for x in found] == [x.shape for x in exact] and len(exact) == 6
        assert all((a - b).abs().max() < TOLERANCE for a, b in zip(found, exact, strict=True))


def test_t5_gated_with_uneven_widths_and_heads(ranks: Ranks) -> None:
    changes = dict(feed_forward_proj="gated-gelu", d_ff=37, num_heads=3, d_kv=10, tie_word_embeddings=False)
    results = ranks.run(2, t5_on_rank, T5_POLICY, changes, {})
    logits, tokens = answers(t5(**changes))
    assert same([result[0] for result in results]) and error(results[0][0], logits) < TOLERANCE
    assert all(torch.equal(result[1], tokens) for result in results)


def test_t5_int8(ranks: Ranks) -> None:
    results = ranks.run(2, t5_on_rank, T5_POLICY, {}, {"quant": "int8:row"})
    logits, _ = answers(t5())
    assert same([result[0] for result in results]) and same([result[1] for result in results])
    difference = (results[0][0] - logits).square().mean().sqrt() / logits.square().mean().sqrt()
    assert 1e-5 < difference < 0.05 and all(len(result[2]) == 4 for result in results)


def bfloat16_on_rank(name: str) -> tuple[Tensor, Tensor, str]:
    """Logits of the bfloat16 original and over ranks, and the plan."""
    model = t5() if name == "t5" else BY_NAME[name].make()
    model.to(torch.bfloat16)
    given = text()
    more = {"decoder_input_ids": given["input_ids"]} if name == "t5" else {}
    with torch.no_grad():
        own = model(**given, **more).logits.float()
        policy = T5_POLICY if name == "t5" else None
        engine = infuse.init_inference(model, dtype="bf16", tensor_parallel=size(), injection_policy=policy)
        return own, engine(**given, **more).logits.float(), str(engine.plan)


@pytest.mark.parametrize("name", ["t5", "llama"])
def test_a_proof_in_another_dtype_sums_over_ranks_too(name: str, ranks: Ranks) -> None:
    model: Any = t5() if name == "t5" else BY_NAME[name].make()
    given = text()
    with torch.no_grad():
        exact = model(**given, **({"decoder_input_ids": given["input_ids"]} if name == "t5" else {})).logits
    real = given["attention_mask"].bool()
    for own, found, plan in ranks.run(2, bfloat16_on_rank, name):
        assert "refused" not in plan and ("block" if name == "llama" else "split") in plan
        rounding, distance = ((x[real] - exact[real]).square().mean().sqrt() for x in (own, found))
        assert distance < 2 * rounding


def roberta_on_rank(policy: Any) -> tuple[Tensor, list[tuple[str, str]]]:
    model = BY_NAME["roberta"].make()
    engine = infuse.init_inference(model, dtype="fp32", tensor_parallel=size(), injection_policy=policy)
    with torch.no_grad():
        logits = engine(**inputs(BY_NAME["roberta"], padding="right")).logits
    return logits, [(step.depth, step.path) for step in engine.plan.steps if "layer" in step.path]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "ranks_used"), [({RobertaLayer: ("output.dense",)}, 3), ({"RobertaLayer": "output.dense"}, 2)]
)
def test_roberta(policy: Any, ranks_used: int, ranks: Ranks) -> None:
    results = ranks.run(ranks_used, roberta_on_rank, policy)
    given = inputs(BY_NAME["roberta"], padding="right")
    with torch.no_grad():
        exact = BY_NAME["roberta"].make()(**given).logits
    real = given["attention_mask"].bool()
    assert same([result[0] for result in results]) and error(results[0][0][real], exact[real]) < TOLERANCE
    assert results[0][1] == [(SPLIT, f"roberta.encoder.layer.{i}") for i in range(3)], (
        "the policy takes the place of whole blocks"
    )


def test_a_policy_with_wrong_names_is_an_error() -> None:
    policy = {"RobertaLayer": ("output.dense", "attn.out"), "GPT9Block": "mlp.out"}
    with pytest.raises(ValueError) as caught:
        infuse.plan(BY_NAME["roberta"].make(), tensor_parallel={"tp_size": 2}, injection_policy=policy)
    told = str(caught.value)
    assert isinstance(caught.value, infuse.ConfigError)
    assert "RobertaLayer has no linear 'attn.out'" in told
    assert "attention.self.query" in told
    assert "attention.output.dense" in told
    assert "there is no GPT9Block in the model; its layers are RobertaLayer" in told


def test_a_policy_that_leaves_out_a_row_linear_says_which() -> None:
    plan = infuse.plan(
        t5(), dtype="fp32", tensor_parallel={"tp_size": 2}, injection_policy={"T5Block": "DenseReluDense.wo"}
    )
    assert not [step for step in plan.steps if step.depth == SPLIT]
    assert "layer.0.SelfAttention.o would read a part of what a column linear makes; name what closes it as row" in str(
        plan
    )


def test_with_one_rank_a_policy_has_no_effect_but_a_note() -> None:
    model = BY_NAME["roberta"].make()
    plan = infuse.plan(model, injection_policy={RobertaLayer: "output.dense"})
    assert "note  injection_policy: no effect here: one rank has whole layers" in str(plan)
    assert plan.steps == infuse.plan(model).steps


# ---- without anything told


def unknown_on_rank(name: str, settings: dict[str, Any]) -> tuple[Tensor, Tensor, str, list[str], int]:
    model = make(name)
    engine = infuse.init_inference(model, dtype="fp32", tensor_parallel=size(), **settings)
    split = [step.path for step in engine.plan.steps if step.depth == SPLIT]
    return *continued(engine), str(engine.plan), split, sum(p.nbytes for p in model.layers.parameters())


@pytest.mark.parametrize(("name", "ranks_used"), [
    ("blocks", 2), ("blocks", 3), ("per head", 3), ("per head", 4), ("per group", 2), ("per group", 4), ("grouped", 2),
    ("grouped", 3), ("grouped", 4), ("one key head", 3),
])  # fmt: skip
def test_unknown_layers(name: str, ranks_used: int, ranks: Ranks) -> None:
    results = ranks.run(ranks_used, unknown_on_rank, name, {})
    model = make(name)
    logits, tokens = continued(model)
    assert same([result[0] for result in results]) and error(results[0][0], logits) < TOLERANCE
    assert all(torch.equal(result[1], tokens) for result in results)
    assert all(result[3] == ["layers.0", "layers.1"] for result in results), results[0][2]
    assert results[0][4] < 0.75 * sum(p.nbytes for p in model.layers.parameters())


@pytest.mark.parametrize(("name", "settings"), [("fixed", {}), ("fixed", {"verify": "off"}), ("normed", {})], ids=str)
def test_what_cannot_be_split_stays_whole_and_right(name: str, settings: dict[str, Any], ranks: Ranks) -> None:
    results = ranks.run(2, unknown_on_rank, name, settings)
    logits, tokens = continued(make(name))
    assert error(results[0][0], logits) < TOLERANCE and all(torch.equal(result[1], tokens) for result in results)
    assert results[0][3] == [] and "left  layers.{0-1}: refused: rank 0: " in results[0][2]


def strict_on_rank(name: str) -> tuple[str, bool]:
    model = make(name)
    before = {name: (id(value), value.clone()) for name, value in model.named_parameters()}
    attributes = {path: dict(vars(module)) for path, module in model.named_modules()}
    hooks = sum(len(module._forward_pre_hooks) for module in model.modules())
    with pytest.raises(infuse.ProofError) as caught:
        infuse.init_inference(model, dtype="fp32", tensor_parallel=size(), verify="strict")
    unharmed = all(id(p) == before[name][0] and torch.equal(p, before[name][1]) for name, p in model.named_parameters())
    unharmed &= all(vars(module).keys() == attributes[path].keys() for path, module in model.named_modules())
    counts = [(module.num_heads, module.num_kv_heads, module.embed_dim) for module in model.layers]
    return str(caught.value), unharmed and counts == [(4, 2, 48)] * 2 and hooks == sum(
        len(m._forward_pre_hooks) for m in model.modules()
    )


def test_an_error_leaves_the_model_unharmed(ranks: Ranks) -> None:
    for told, unharmed in ranks.run(2, strict_on_rank, "fixed"):
        assert told.startswith("layers.0: rank 0: ") and "other interpretations of it" in told and unharmed


class OwnMPNetLayer(MPNetLayer):
    """A user's, which has no spec and is not read."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class OwnMPNet(t.MPNetModel):
    def __init__(self, config: t.MPNetConfig):
        super().__init__(config)
        self.encoder.layer = nn.ModuleList(OwnMPNetLayer(config) for _ in self.encoder.layer)


SMALL = dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=80, vocab_size=96)
KNOWN: dict[str, tuple[Any, Any]] = {
    "bart": (t.BartModel, t.BartConfig(
        d_model=48, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=40, decoder_ffn_dim=40, vocab_size=96,
    )),
    # biases of all heads come from outside of the layers
    "mpnet": (OwnMPNet, t.MPNetConfig(**SMALL)),
    "swin": (t.SwinModel, t.SwinConfig(
        embed_dim=16, depths=[1, 2], num_heads=[2, 4], image_size=32, patch_size=4, window_size=4,
    )),
    # experts stay whole
    "jamba": (t.JambaModel, t.JambaConfig(
        **SMALL, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, attn_layer_period=1, attn_layer_offset=0,
        expert_layer_period=1, expert_layer_offset=0, use_mamba_kernels=False,
    )),
    # reads head counts from its config
    "phi3": (BY_NAME["phi3"].model, BY_NAME["phi3"].config(**BY_NAME["phi3"].values)),
    # ALiBi for all heads, per head
    "bloom": (BY_NAME["bloom"].model, BY_NAME["bloom"].config(**BY_NAME["bloom"].values)),
}  # fmt: skip
POLICIES = {
    "bart": {"BartDecoderLayer": ("out_proj", "fc2")},
    "jamba": {"JambaAttentionDecoderLayer": ("o_proj",)},
    "phi3": {"Phi3DecoderLayer": ("o_proj", "down_proj")},
    "bloom": {"BloomBlock": ("dense", "dense_4h_to_h")},
}


def known(name: str) -> Any:
    torch.manual_seed(0)
    model = KNOWN[name][0](KNOWN[name][1]).eval()
    enlarge(model)
    return model


def first_output(model: Any, name: str) -> Tensor:
    ids = torch.randint(3, 96, (2, 9), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        if name == "swin":
            return model(torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(5)))[0]
        return model(ids, decoder_input_ids=ids)[0] if name == "bart" else model(ids)[0]


def known_on_rank(name: str) -> tuple[Tensor, str, bool]:
    model = known(name)
    engine = infuse.init_inference(model, dtype="fp32", tensor_parallel=size(), injection_policy=POLICIES.get(name))
    return first_output(engine, name), str(engine.plan), any(step.depth == SPLIT for step in engine.plan.steps)


@pytest.mark.parametrize("name", KNOWN)
def test_models_of_transformers(name: str, ranks: Ranks) -> None:
    results = ranks.run(2, known_on_rank, name)
    assert results[0][2] and "refused" not in results[0][1], results[0][1]
    assert same([result[0] for result in results]) and error(results[0][0], first_output(known(name), name)) < TOLERANCE


class NeedsValues(Unknown):
    """A model that cannot be traced: it looks at its input."""

    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids[: len(input_ids.tolist())])


class InFloat32(Apart):
    """A layer that computes in float32 whatever its weights are in: in 16 bits its first linear raises."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return super().forward(x.float(), mask)


def test_a_layer_that_runs_in_float32_alone_is_traced_in_it() -> None:
    found = module_inject.AutoTP.tp_parser(Unknown(lambda: InFloat32()))
    assert [(cls, names) for cls, names in found] == [(InFloat32, ["o", "down"])]


def test_a_model_that_cannot_be_traced_needs_a_policy() -> None:
    model = NeedsValues(lambda: Apart())
    plan = infuse.plan(model, dtype="fp32", tensor_parallel={"tp_size": 2})
    assert not [step for step in plan.steps if step.depth == SPLIT]
    assert "a run of the model on meta does not reach it" in str(plan)
    plan = infuse.plan(model, dtype="fp32", tensor_parallel={"tp_size": 2}, injection_policy={"Apart": ("o", "down")})
    shapes = [step.shape for step in plan.steps if step.depth == SPLIT]
    assert [[matrix.target for matrix in shape.matrices] for shape in shapes] == [
        ["q", "k", "v", "o", "gate_up", "down"]
    ] * 2
    assert "layers.{0-1}: token_gate" in str(plan) and "not tensor-parallel" in str(plan)


# ---- from a checkpoint


def from_checkpoint(folder: str, live: bool) -> tuple[Tensor, Tensor, list[str], int]:
    with torch.device("cpu" if live else "meta"):
        model = t.T5ForConditionalGeneration(t.T5Config(**T5)).eval()
    model.generation_config.eos_token_id = None
    engine = infuse.init_inference(
        model, checkpoint=folder, dtype="fp32", tensor_parallel=size(), injection_policy=T5_POLICY
    )
    return (
        *answers(engine),
        [step.path for step in engine.plan.steps if step.depth == SPLIT],
        sum(p.nbytes for p in model.parameters()),
    )


@pytest.mark.parametrize("live", [False, True], ids=["meta", "live"])
def test_a_checkpoint_fills_the_parts(live: bool, ranks: Ranks, tmp_path: Any) -> None:
    original = t5()
    original.save_pretrained(tmp_path)
    results = ranks.run(2, from_checkpoint, str(tmp_path), live)
    logits, tokens = answers(original)
    assert error(results[0][0], logits) < TOLERANCE and all(torch.equal(result[1], tokens) for result in results)
    assert all(len(result[2]) == 4 for result in results)
    assert sum(result[3] for result in results) < 1.1 * sum(p.nbytes for p in original.parameters())


# ---- tp_parser

ROWS = [
    ("llama", {"LlamaDecoderLayer": ["self_attn.o_proj", "mlp.down_proj"]}),
    ("gpt2", {"GPT2Block": ["attn.c_proj", "mlp.c_proj"]}),
    ("bloom", {"BloomBlock": ["self_attention.dense", "mlp.dense_4h_to_h"]}),
    ("opt", {"OPTDecoderLayer": ["self_attn.out_proj", "fc2"]}),
    ("gptj", {"GPTJBlock": ["attn.out_proj", "mlp.fc_out"]}),
    ("gpt-neox", {"GPTNeoXLayer": ["attention.dense", "mlp.dense_4h_to_h"]}),
    ("bert", {"BertLayer": ["attention.output.dense", "output.dense"]}),
    ("distilbert", {"TransformerBlock": ["attention.out_lin", "ffn.lin2"]}),
    ("vit", {"ViTLayer": ["attention.o_proj", "mlp.fc2"]}),
]


@pytest.mark.parametrize(("name", "rows"), ROWS, ids=[name for name, _ in ROWS])
def test_tp_parser_finds_the_row_linears(name: str, rows: dict[str, list[str]]) -> None:
    with torch.device("cpu" if name in ("llama", "vit") else "meta"):
        model = BY_NAME[name].model(BY_NAME[name].config(**BY_NAME[name].values))
    assert {cls.__name__: found for cls, found in module_inject.AutoTP.tp_parser(model)} == rows


def test_tp_parser_finds_them_in_encoders_and_decoders_and_in_models_of_the_user() -> None:
    ((cls, names),) = module_inject.AutoTP.tp_parser(t5())
    assert cls is T5Block and set(names) == set(T5_POLICY[T5Block])
    assert [names for _, names in module_inject.AutoTP.tp_parser(make("grouped"))] == [["o", "down"]]
    assert module_inject.AutoTP.tp_parser(nn.Linear(3, 3)) == []


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_the_roles_of_structure_are_those_of_the_models_own_plan(name: str) -> None:
    model = known(name) if name in KNOWN else BY_NAME[name].make()
    told = module_inject.AutoTP.tp_parser(model)
    model.config.base_model_tp_plan = None
    assert module_inject.AutoTP.tp_parser(model) == told


# ---- slicing


def sliced(source: Tensor, vector: Tensor) -> list[Tensor]:
    """This rank's parts of a matrix and a vector, copied along both axes, plain, transposed, and of q, k and v."""
    world = torch.distributed.get_world_size()
    rows, columns = source.shape
    slicing = module_inject.ReplaceWithTensorSlicing(torch.distributed.group.WORLD, mp_size=world)
    by_rows = module_inject.ReplaceWithTensorSlicing(torch.distributed.group.WORLD, mp_size=world, out_dim=0, in_dim=1)
    return [
        slicing.copy(torch.zeros(rows, columns // world), source).data,
        slicing.copy(torch.zeros(rows // world, columns), source).data,
        slicing.copy(torch.zeros(columns // world, rows), source, int8=True).data,
        slicing.copy(torch.zeros(columns // world), vector).data,
        slicing.qkv_copy(torch.zeros(rows, columns // world), source).data,
        by_rows.qkv_copy(torch.zeros(rows // world, columns), source).data,
        slicing.qkv_copy(torch.zeros(columns // world), vector).data,
    ]


@pytest.mark.parametrize("ranks_used", [2, 3])
def test_slicing_gives_each_rank_its_part(ranks_used: int, ranks: Ranks) -> None:
    rows, columns = 6 * ranks_used, 9 * ranks_used
    source, vector = torch.randn(rows, columns), torch.randn(columns)
    for rank, found in enumerate(ranks.run(ranks_used, sliced, source, vector)):

        def thirds(x: Tensor, axis: int, rank: int = rank) -> Tensor:
            return torch.cat([part.chunk(ranks_used, axis)[rank] for part in x.split(x.shape[axis] // 3, axis)], axis)

        columns_of_rank = source.chunk(ranks_used, 1)[rank]
        wanted = [columns_of_rank, source.chunk(ranks_used, 0)[rank], columns_of_rank, vector.chunk(ranks_used)[rank]]
        wanted += [thirds(source, 1), thirds(source, 0), thirds(vector, 0)]
        for number, (a, b) in enumerate(zip(found, wanted, strict=True)):
            assert torch.equal(a, b), number
