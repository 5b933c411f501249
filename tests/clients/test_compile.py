"""torch.compile and torch.export of a replaced model: the original's numbers by as few graphs."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchRuntimeError
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.export import Dim, ExportedProgram
from transformers import CompileConfig, DynamicCache, GlmConfig, GlmForCausalLM, StaticCache
from transformers.exporters.exporter_dynamo import DynamoConfig, DynamoExporter
from transformers.integrations.executorch import TorchExportableModuleWithStaticCache, convert_and_export_with_cache

import infuse
from infuse.cache.kv_cache import KVCache
from infuse.ground.errors import UnsupportedCall
from infuse.layers.linear import Linear
from infuse.ops import registered
from tests.models.families import BY_NAME, GQA, enlarge, inputs
from tests.support.graphed import graphed
from tests.support.relatives import less
from tests.support.side_by_side import arguments, first
from tests.support.tolerance import assert_near

# Both passes of a model are a few hundred sums away from each other.
TIMES = 8
# The residual shapes (gemma2 with soft caps and windows), then transposed weights, ALiBi, windows of an encoder.
FORMS = (
    "llama",
    "bert",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt-neox", "gemma2", "gpt2", "bloom", "modernbert")),
)
# Enough to see each kind of layer: one, where all are alike; the others' number goes with other settings.
LAYERS = {"qwen2-window": 2, "gemma2": 2, "gemma3": 2, "modernbert": 2}
SEVERAL_KINDS = ("smollm3", "gpt-neo", "albert", "clip", "clip-text", "clip-vision")
MOST_GRAPHS = 3  # as the original: for the prompt, the first step, and steps at any length


pytestmark = pytest.mark.usefixtures("nothing_compiled")


def pair(name: str, **keys: Any) -> tuple[nn.Module, nn.Module]:
    """The original and a replaced copy of it."""
    family = BY_NAME[name]
    (number,) = {"num_hidden_layers", "n_layer", "n_layers", "num_layers"} & family.values.keys() or {""}
    original = family.make(**({} if name in SEVERAL_KINDS else {number: LAYERS.get(name, 1)}))
    return original, infuse.init_inference(copy.deepcopy(original), **{"dtype": "fp32", "verify": "off", **keys}).module


def graphs() -> int:
    """How many were compiled since the test began."""
    return counters["stats"]["unique_graphs"]


def operations(recorded: CompileCounterWithBackend | ExportedProgram) -> set[str]:
    graphs = [recorded.graph] if isinstance(recorded, ExportedProgram) else [each.graph for each in recorded.graphs]
    return {str(node.target) for graph in graphs for node in graph.nodes}


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
def test_one_graph_serves_batches_of_any_length(name: str) -> None:
    original, model = pair(name)
    recorded = CompileCounterWithBackend("aot_eager" if name == "bert" else "eager")
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=recorded)
    for batch, tokens, padding in ((2, 11, "left"), (3, 17, "right")):
        given = arguments(name, batch=batch, tokens=tokens, padding=padding)
        assert_near(first(compiled, given), first(original, given), torch.float32, name, TIMES)
    assert graphs() == 1
    assert "infuse.attention.default" in operations(recorded)


# One of each kind of block that FORMS lack. Other rotary frequencies are computed by transformers, where that of
# "llama-dynamic" breaks the graph.
KINDS = (
    "qwen2-window", "qwen3", "phi3", "gemma", "gemma3", "granite", "olmo2", "stablelm-parallel", "smollm3",
    "starcoder2", "cohere-qk", "nemotron", "bigcode", "gpt-neo", "gptj", "opt", "opt-350m", "falcon-7b", "falcon-40b",
    "mpt", "bert-decoder", "distilbert", "albert", "clip", "vit",
)  # fmt: skip

# Whose blocks, once they are filled, have the operations of others: those of llama and gemma2, gpt2, gpt-neox, bert.
RELATIVES = ("phi3", "gemma", "bigcode", "opt", "falcon-7b", "gptj", "bert-decoder", "distilbert")


@pytest.mark.slow
@pytest.mark.parametrize("name", less(RELATIVES, KINDS))
def test_each_family_in_one_graph(name: str) -> None:
    original, model = pair(name)
    given = arguments(name, padding="left")
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert_near(first(compiled, given), first(original, given), torch.float32, name, TIMES)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "keys"), [("llama", {}), ("llama", {"quant": "int8:16"}), ("bert", {"dtype": "bf16"})], ids=str
)
def test_inductor(name: str, keys: dict[str, Any]) -> None:
    _, model = pair(name, **keys)
    given = arguments(name, padding="left")
    compiled = torch.compile(model, fullgraph=True)
    assert_near(
        first(compiled, given), first(model, given), torch.bfloat16 if "dtype" in keys else torch.float32, name, TIMES
    )


def caches(config: Any) -> dict[str, Callable[[], Any]]:
    return {
        "dynamic": lambda: DynamicCache(config=config),
        "static": lambda: StaticCache(config=config, max_cache_len=32),
        "ours": KVCache,
    }


def in_steps(model: Callable, cache: Any, ids: Tensor) -> Tensor:
    """Logits of a prompt of 5 tokens, then token by token."""
    with torch.no_grad():
        parts = [ids[:, :5], *ids[:, 5:].split(1, dim=1)]
        return torch.cat([model(input_ids=part, past_key_values=cache, use_cache=True).logits for part in parts], dim=1)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("llama", "ours"),
        ("bloom", "static"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("llama", "dynamic"),
                ("llama", "static"),
                ("gemma2", "dynamic"),
                ("gemma2", "ours"),
                ("bloom", "ours"),
            )
        ),
    ],
)
def test_steps_over_a_cache(name: str, kind: str) -> None:
    original, model = pair(name)
    ids = inputs(BY_NAME[name], tokens=12)["input_ids"]
    ahead = (name, kind) == ("llama", "ours")  # tensors that a graph changes are the inputs of one that is traced ahead
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager" if ahead else "eager")
    wanted = first(original, {"input_ids": ids})
    for _ in range(2):  # of the second sequence nothing is new
        assert_near(in_steps(compiled, caches(model.config)[kind](), ids), wanted, torch.float32, kind, TIMES)
    assert graphs() <= MOST_GRAPHS


@pytest.mark.parametrize("quant", ["int8:16", "int4:16:asymmetric"])
def test_quantized_weights_stay_quantized_in_the_graph(quant: str) -> None:
    """Those of a tied table and head among them, which int4 leaves as they are."""
    _, model = pair("llama-bias", quant=quant)
    recorded = CompileCounterWithBackend("aot_eager")
    given = arguments("llama-bias", padding="left")
    found = first(torch.compile(model, fullgraph=True, backend=recorded), given)
    assert_near(found, first(model, given), torch.float32)
    kept = {"infuse.quantized_linear.default"} | (
        {"infuse.quantized_embedding.default"} if quant == "int8:16" else set()
    )
    assert kept <= operations(recorded)


@pytest.mark.slow
def test_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without a compiler."""
    for op in registered().values():
        monkeypatch.delitem(op.bodies, "cpu", raising=False)
    original, model = pair("llama")
    ids = inputs(BY_NAME["llama"], tokens=7)["input_ids"]
    found = in_steps(torch.compile(model, fullgraph=True, backend="aot_eager"), KVCache(), ids)
    assert_near(found, first(original, {"input_ids": ids}), torch.float32, times=TIMES)


def test_layers_that_stay() -> None:
    """Their attention goes through our hook, their linears through ours."""
    torch.manual_seed(0)
    original = GlmForCausalLM(GlmConfig(**{**GQA, "num_hidden_layers": 1, "head_dim": 12})).eval()
    enlarge(original)
    model = infuse.init_inference(copy.deepcopy(original), dtype="fp32").module
    recorded = CompileCounterWithBackend("eager")
    given = {"input_ids": torch.randint(3, 90, (2, 11)), "use_cache": False}
    found = first(torch.compile(model, fullgraph=True, backend=recorded), given)
    assert_near(found, first(original, given), torch.float32, times=TIMES)
    assert "infuse.attention.default" in operations(recorded)


def test_generate_compiles_a_static_cache_by_itself() -> None:
    original, model = pair("llama")
    ids = inputs(BY_NAME["llama"], padding="left")
    compiled = CompileConfig(fullgraph=True, backend="eager", mode=None)
    compiled._compile_all_devices = True  # transformers' own switch for its tests; without it only GPUs compile
    keys: dict[str, Any] = dict(max_new_tokens=8, do_sample=False, cache_implementation="static")
    found = model.generate(**ids, **keys, compile_config=compiled)
    assert torch.equal(found, original.generate(**ids, **keys, disable_compile=True))
    assert graphs() == 1


@pytest.mark.parametrize(
    ("what", "with_graphs"), [("module", False), pytest.param("forward", True, marks=pytest.mark.slow)]
)
def test_generate_over_a_compiled_forward(what: str, with_graphs: bool) -> None:
    """`model.compile()`, and `model.forward = torch.compile(model.forward)` as transformers' documentation has it."""
    original, model = pair("llama")
    if with_graphs:
        model = graphed(copy.deepcopy(original))[0].module
    if what == "module":
        model.compile(fullgraph=True, backend="eager")
    else:
        model.forward = torch.compile(model.forward, fullgraph=True, backend="eager")
    ids = inputs(BY_NAME["llama"])["input_ids"]
    found = model.generate(ids, max_new_tokens=12, do_sample=False)
    assert torch.equal(found, original.generate(ids, max_new_tokens=12, do_sample=False))
    assert 1 <= graphs() <= MOST_GRAPHS


def test_graphs_of_our_own_and_caps_do_not_break_the_graph() -> None:
    original = BY_NAME["llama"].make(num_hidden_layers=1)
    engine, backend = graphed(copy.deepcopy(original), forward=True, limit_tokens=64)
    compiled = torch.compile(engine.module, fullgraph=True, backend="eager")
    given = arguments("llama")
    for _ in range(4):
        assert_near(first(compiled, given), first(original, given), torch.float32, times=TIMES)
    assert not backend.captures


# ---- torch.export ----


def exported(model: nn.Module, name: str, strict: bool) -> ExportedProgram:
    """For any batch and length."""
    given = arguments(name, padding="left")
    sizes = {0: Dim("batch", min=2, max=64), 1: Dim("tokens", min=3, max=100)}
    shapes = {key: sizes if isinstance(value, Tensor) else None for key, value in given.items()}
    with torch.no_grad():
        return torch.export.export(model, (), given, dynamic_shapes=shapes, strict=strict)


@pytest.mark.parametrize(("name", "strict"), [("llama", True), ("bert", False)])
def test_exported_for_any_batch_and_length(name: str, strict: bool) -> None:
    original, model = pair(name)
    program = exported(model, name, strict)
    assert "infuse.attention.default" in operations(program)
    given = arguments(name, batch=3, tokens=17, padding="right", seed=5)
    assert_near(first(program.module(), given), first(original, given), torch.float32, name, TIMES)


def test_an_exported_model_is_saved_with_its_quantized_weights() -> None:
    _, model = pair("llama", quant="int8:16")
    file = io.BytesIO()
    torch.export.save(exported(model, "llama", strict=False), file)
    file.seek(0)
    program = torch.export.load(file)
    assert "infuse.quantized_linear.default" in operations(program)
    given = arguments("llama", batch=3, tokens=17, seed=5)
    assert_near(first(program.module(), given), first(model, given), torch.float32, times=TIMES)


def test_a_model_with_graphs_is_exported() -> None:
    original = BY_NAME["bert"].make(num_hidden_layers=1)
    model = graphed(copy.deepcopy(original), forward=True)[0].module
    given = arguments("bert", batch=3, tokens=17)
    assert_near(
        first(exported(model, "bert", strict=False).module(), given), first(original, given), torch.float32, times=TIMES
    )


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_step_over_a_static_cache(name: str) -> None:
    """As ExecuTorch has it; the original's own module runs beside it, not exported."""
    original, model = pair(name)
    for one in (original, model):
        one.generation_config.cache_implementation, one.generation_config.use_cache = "static", True
        one.generation_config.cache_config = {"batch_size": 1, "max_cache_len": 32}
    stepped, ours = (
        TorchExportableModuleWithStaticCache(original),
        convert_and_export_with_cache(model, strict=False).module(),
    )
    for place, token in enumerate((5, 60, 7, 80, 9, 11, 42)):
        given = dict(input_ids=torch.tensor([[token]]), cache_position=torch.tensor([place]))
        with torch.no_grad():
            assert_near(ours(**given), stepped(**given), torch.float32, f"token {place}", TIMES)


def test_transformers_exporter() -> None:
    original, model = pair("bert")
    program = DynamoExporter().export(model, arguments("bert", padding="left"), config=DynamoConfig(dynamic=True))
    given = arguments("bert", tokens=17, padding="right", seed=4)
    assert_near(first(program, given), first(original, given), torch.float32, times=TIMES)


@pytest.mark.parametrize("kernels", [True, False])
def test_jit_trace_says_that_it_is_not_served(kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not kernels:
        for op in registered().values():
            monkeypatch.delitem(op.bodies, "cpu", raising=False)
    _, model = pair("bert")
    with torch.no_grad(), pytest.raises(UnsupportedCall, match=r"torch\.export\.export"):
        torch.jit.trace(model, example_kwarg_inputs=arguments("bert"), strict=False, check_trace=False)
    assert first(model, arguments("bert")).isfinite().all()


@pytest.mark.parametrize("strict", [False, True])
def test_an_export_to_onnx_says_what_to_do(strict: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exporter traces as torch.export does. It is not needed here to see what it gets."""
    _, model = pair("bert")
    with torch.no_grad(), monkeypatch.context() as exporting:
        exporting.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
        with pytest.raises((UnsupportedCall, TorchRuntimeError), match="before init_inference"):
            torch.export.export(model, (), arguments("bert"), strict=strict)
    with torch.no_grad():
        assert torch.export.export(model, (), arguments("bert"), strict=strict) is not None


def test_a_trace_that_ends_in_an_error_of_its_own_says_what_to_do() -> None:
    """As those of fvcore and of the older exporter to ONNX, to which weights are constants that need gradients."""
    linear = next(each for each in pair("llama")[1].modules() if isinstance(each, Linear)).requires_grad_(True)
    with torch.no_grad(), pytest.raises(UnsupportedCall, match="before init_inference"):
        torch.jit.trace(lambda x: linear(x), torch.ones(1, linear.in_features))
