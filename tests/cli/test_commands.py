"""The command line over a tiny random Llama: what each command prints, and what it says when it cannot work."""

from __future__ import annotations

import io
import json
import os
import platform
import re
import shutil
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, BertConfig, BertModel, GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

import infuse
from infuse.ground.device import Device
from infuse.native import BINARY
from infuse_cli import model_folder
from infuse_cli.bench import Speed, table
from tests.support.commands import PROMPT, run
from tests.support.forked import Program
from tests.support.published import publish
from tests.support.quantized_files import BY_CASE
from tests.support.quantized_files import publish as publish_in_codes

ROOT = Path(__file__).parents[2]


@pytest.fixture
def copy(folder, tmp_path):
    """The folder once more, for tests that break it."""
    return shutil.copytree(folder, tmp_path / "copy")


def changed(folder, **values):
    """The folder, with other values in its configuration."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))
    return folder


def greedy(folder, tokens):
    """What transformers alone continues the prompt with, in float32."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)
    ids = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).generate(
        **inputs, max_new_tokens=tokens, do_sample=False
    )
    return tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def test_help_names_the_commands():
    out, _ = run("--help")
    assert all(command in out for command in ("plan", "generate", "bench", "shard", "build", "env"))
    assert run("-h")[0] == run()[0] == out
    assert run("plan", "-h") == run("plan", "--help")


def test_version():
    assert run("--version")[0] == f"infuse {infuse.__version__}\n"


def test_completion_can_be_shown():
    environment = {**os.environ, "_INFUSE_COMPLETE": "complete_bash", "COMP_WORDS": "infuse pl", "COMP_CWORD": "1"}
    program = "import sys; sys.argv = ['infuse']; from infuse_cli.app import app; app(prog_name='infuse')"
    out, err = Program("-c", program, folder=ROOT, environment=environment).communicate()
    assert out.split() == ["plan"], err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:1", "xpu"])
def test_a_device_that_is_not_there_is_one_line(folder, device):
    for command in (("plan",), ("generate", "--prompt", "x"), ("bench",)):
        name, *options = command
        _, err = run(name, folder, *options, "--device", device, code=2)
        told = [line for line in err.splitlines() if "%|" not in line]
        assert len(told) == 1 and told[0].startswith(f"error: device: {device} is not available")


def test_build_says_where_the_kernels_are():
    if BINARY.exists():
        assert str(BINARY) in run("build")[0]


def test_build_fails_with_the_reason(monkeypatch, tmp_path):
    monkeypatch.setattr("infuse.native.BINARY", tmp_path / "absent.so")
    monkeypatch.setenv("INFUSE_BUILD", "0")
    monkeypatch.setenv("INFUSE_CACHE_DIR", str(tmp_path))
    assert "INFUSE_BUILD=0" in run("build", code=1)[1]


def test_figures_of_small_models_can_be_read():
    speeds = {"infuse": Speed(3.6e-3, 4e-4), "eager": Speed(2.25, -1e-5), "bound": Speed(4.21e-7, 1e-9)}
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(table("title", speeds, 1))
    text = console.export_text()
    assert all(figure in text for figure in ("3.60 ms", "2.25 s", "0.42 us", "2,500.0", "below 0.001", "625"))
    assert "too short to time" in text and "--new-tokens" in text
    assert "e-" not in text.replace("end", "")


def test_plan_needs_no_weights(copy):
    (copy / "model.safetensors").unlink()
    out, _ = run("plan", copy, "--dtype", "float32")
    assert "model.layers" in out and "block" in out


def test_plan_names_the_format(folder):
    out, _ = run("plan", folder, "--dtype", "float32", "--quant", "int8")
    assert "int8" in out


def test_plan_tells_which_codes_are_kept(tmp_path):
    publish(tmp_path)
    assert "mxfp4 for mlp.experts.up and mlp.experts.down, taken as it is, " in run("plan", tmp_path)[0]
    assert "are stored in mxfp4 and become int8" in run("plan", tmp_path, "--quant", "int8:16")[0]
    (tmp_path / "model.safetensors").write_bytes(b"broken")
    out, error = run("plan", tmp_path)
    assert "the plan is made without the weights" in error and "quantized by mxfp4" in out and "block" in out


def test_generate_equals_transformers(folder):
    out, err = run(
        "generate", folder, "--prompt", PROMPT, "--max-new-tokens", 12, "--dtype", "float32", "--device", "cpu"
    )
    assert out.rstrip("\n") == greedy(folder, 12).rstrip("\n")
    assert "tokens/s" in err


def test_generate_with_candidates(folder):
    """The same text in fewer steps: the model itself is always right, in 8 bits often."""
    arguments = ("generate", folder, "--prompt", PROMPT, "--max-new-tokens", 12, "--dtype", "float32")
    for more in (("--lookup", 4), ("--draft", folder), ("--draft", folder, "--draft-quant", "int8")):
        out, err = run(*arguments, *more)
        assert out.rstrip("\n") == greedy(folder, 12).rstrip("\n")
        assert "tokens a step" in err or more[0] == "--lookup"
    for wrong in (("--draft", folder, "--lookup", 4), ("--draft-quant", "int8"), ("--draft", folder, "--tp", 2)):
        assert "--draft" in run(*arguments, *wrong, code=2)[1]


def test_generate_samples_the_same_with_the_same_seed(folder):
    arguments = ("generate", folder, "--prompt", PROMPT, "--max-new-tokens", 12, "--dtype", "float32")
    sampling = ("--sample", "--temperature", 1.5, "--top-p", 0.95, "--seed")
    first, again, other = (run(*arguments, *sampling, seed)[0] for seed in (1, 1, 2))
    assert first == again != other


def test_generate_with_quantized_weights(folder):
    run("generate", folder, "--prompt", PROMPT, "--max-new-tokens", 4, "--quant", "int8", "--verify", "all")


def test_bench_against_eager(folder):
    options = "--against eager --prompt-tokens 8 --new-tokens 4 --repeats 1 --batch 2 --dtype float32"
    out, _ = run("bench", folder, *options.split())
    assert all(word in out for word in ("infuse", "transformers", "bound", "prefill", "decode", "batch 2"))


@pytest.mark.slow
def test_bench_alone_names_no_peer(folder):
    options = "--prompt-tokens 8 --new-tokens 4 --repeats 1 --dtype float32"
    out, _ = run("bench", folder, *options.split())
    assert "infuse" in out and "eager" not in out


def test_env_tells_versions_and_devices():
    out, _ = run("env")
    assert torch.__version__ in out
    assert all(
        word in out for word in ("cpu", "GiB", "instruction sets", "compilers", "transformers", "triton", "Python")
    )


def env_with(**variables):
    """What `infuse env` prints in a process of its own: the kernels are chosen once in each."""
    command = ("-c", "from infuse_cli.app import app; app()", "env")
    program = Program(*command, folder=ROOT, environment={**os.environ, "COLUMNS": "200", **variables})
    out, err = program.communicate()
    assert program.returncode == 0, err
    return out


@pytest.mark.skipif(not BINARY.exists(), reason="the C++ kernels are not built")
def test_env_tells_which_kernels_run_and_why_no_higher():
    out = env_with(INFUSE_CPU_ISA="generic")
    assert re.search(r"C\+\+ kernels +generic runs, of (\w+, )*generic", out)
    assert re.search(r"built by +(g\+\+|clang) \d+\.\d.* against torch 2\.\d+\.\d+", out)
    if "avx2" in Device.of("cpu").features:
        assert re.search(r"not avx2 +INFUSE_CPU_ISA=generic", out)
        assert re.search(r"kernels +avx2 runs", env_with(INFUSE_CPU_ISA="avx2"))
    if "avx512f" not in Device.of("cpu").features and platform.machine() == "x86_64":
        assert re.search(r"not avx512 +this CPU does not have it", out)


def test_env_tells_why_there_are_no_kernels():
    assert "none: INFUSE_CPU_ISA=off" in env_with(INFUSE_CPU_ISA="off")


@pytest.mark.parametrize(
    "command", [("plan",), ("generate", "--prompt", "x"), ("bench",)], ids=lambda command: command[0]
)
@pytest.mark.parametrize(
    ("break_it", "told"),
    [
        (lambda path: path / "nowhere", "does not exist"),
        (lambda path: path / "config.json", "is a file"),
        (lambda path: [(path / "config.json").unlink(), path][1], "no config.json"),
        (lambda path: [(path / "config.json").write_text("{"), path][1], "cannot be read"),
        (lambda path: [(path / "config.json").write_text('{"model_type": "nonesuch"}'), path][1], "nonesuch"),
        (lambda path: [(path / "config.json").write_text("null"), path][1], "cannot be read: TypeError"),
        (lambda path: [(path / "generation_config.json").write_text("[]"), path][1], "cannot be read: TypeError"),
        (lambda path: changed(path, hidden_size="wide"), "cannot be read"),
        (lambda path: changed(path, hidden_act="none"), "describes no LlamaForCausalLM: KeyError"),
        (lambda path: changed(path, architectures=["logging"]), "names logging, which is no model"),
    ],
    ids=[
        "missing",
        "file",
        "no config",
        "broken config",
        "unknown type",
        "no object",
        "no settings",
        "wrong type",
        "unknown activation",
        "no model",
    ],
)
def test_wrong_folders(copy, command, break_it, told):
    name, *options = command
    out, err = run(name, break_it(copy), *options, code=2)
    assert told in err and not out


@pytest.mark.parametrize("command", [("generate", "--prompt", "x"), ("bench",)], ids=lambda command: command[0])
def test_no_weights(copy, command):
    (copy / "model.safetensors").unlink()
    name, *options = command
    assert "no weights" in run(name, copy, *options, code=2)[1]


def test_the_original_is_never_loaded_as_a_whole(folder, monkeypatch):
    monkeypatch.setattr(model_folder, "load_generative", None)
    assert run("generate", folder, "--prompt", "x", "--max-new-tokens", 2, "--quant", "int8")


def test_weights_that_only_transformers_reads(copy):
    tensors = load_file(copy / "model.safetensors")
    save_file({name.removeprefix("model."): one for name, one in tensors.items()}, copy / "model.safetensors")
    remarks = run("generate", copy, "--prompt", PROMPT, "--max-new-tokens", 4)[1]
    assert "4 tokens in" in remarks


def test_broken_weights_are_a_failure(copy):
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    assert "cannot be loaded" in run("bench", copy, code=1)[1]


def test_no_tokenizer(copy):
    for path in copy.glob("tokenizer*"):
        path.unlink()
    assert "no tokenizer" in run("generate", copy, "--prompt", "x", code=2)[1]


def test_a_tokenizer_that_is_none(copy):
    (copy / "tokenizer.json").write_text("{}")
    assert "no tokenizer that transformers can read" in run("generate", copy, "--prompt", "x", code=2)[1]


def test_more_tokens_than_positions(copy, tmp_path):
    config = GPT2Config(vocab_size=300, n_embd=32, n_layer=1, n_head=2, n_positions=16, eos_token_id=None)
    GPT2LMHeadModel(config).save_pretrained(copy)
    for command in (("generate", "--prompt", PROMPT, "--max-new-tokens", 40), ("bench", "--repeats", 1)):
        name, *options = command
        assert "the model has 16 positions" in run(name, copy, *options, code=2)[1]


def test_an_architecture_that_transformers_does_not_have(copy):
    assert "NonesuchForCausalLM" in run("plan", changed(copy, architectures=["NonesuchForCausalLM"]), code=2)[1]


def test_a_model_that_does_not_generate(tmp_path, copy):
    config = BertConfig(
        vocab_size=300, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
    )
    BertModel(config).save_pretrained(tmp_path / "bert")
    assert "does not generate" in run("bench", tmp_path / "bert", code=2)[1]
    out, _ = run("plan", tmp_path / "bert", "--dtype", "float32")
    assert "encoder.layer" in out


def test_wrong_options(folder):
    assert "--sample" in run("generate", folder, "--prompt", "x", "--temperature", 0.5, code=2)[1]
    assert "no token" in run("generate", folder, "--prompt", "", code=2)[1]
    assert "float33" in run("plan", folder, "--dtype", "float33", code=2)[1]
    assert "int5" in run("plan", folder, "--quant", "int5", code=2)[1]
    run("plan", folder, "--verify", "perhaps", code=2)
    assert "UTF-8" in run("generate", folder, "--prompt", "\udcff", code=2)[1]
    run("generate", folder, "--prompt", "x", "--sample", "--seed", 2**70, code=2)
    run("generate", folder, code=2)
    run("nonsense", code=2)


def test_generate_refuses_a_folder_that_lacks_a_tensor(folder, tmp_path):
    """transformers would give it random values."""
    copied = tmp_path / "model"
    shutil.copytree(folder, copied)
    tensors = load_file(copied / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, copied / "model.safetensors", metadata={"format": "pt"})
    _, error = run("generate", copied, "--prompt", PROMPT, "--max-new-tokens", 4, code=1)
    assert "lack 1 tensors of LlamaForCausalLM: model.layers.1.mlp.up_proj.weight" in error


def quantized_folder(folder, tmp_path, *, old: bool) -> Path:
    """The folder as GPTQ writes it: codes instead of weights, described in config.json or in a file of its own."""
    copied = tmp_path / "model"
    shutil.copytree(folder, copied)
    tensors = load_file(copied / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        weight = tensors.pop(name)
        tensors[name.replace("weight", "qweight")] = torch.zeros(
            weight.shape[1] // 8, weight.shape[0], dtype=torch.int32
        )
    save_file(tensors, copied / "model.safetensors", metadata={"format": "pt"})
    told = {"bits": 4, "group_size": 128, "quant_method": "gptq", "desc_act": False}
    if old:
        (copied / "quantize_config.json").write_text(json.dumps(told))
    else:
        config = json.loads((copied / "config.json").read_text())
        (copied / "config.json").write_text(json.dumps(config | {"quantization_config": told}))
    return copied


def test_generate_refuses_an_old_folder_of_gptq(folder, tmp_path):
    made = quantized_folder(folder, tmp_path, old=True)
    _, error = run("generate", made, "--prompt", PROMPT, "--max-new-tokens", 4, code=1)
    assert "quantized by GPTQ (quantize_config.json)" in error and "tensors of LlamaForCausalLM" in error


@pytest.mark.parametrize("old", [False, True])
def test_plan_tells_that_a_folder_is_quantized(folder, tmp_path, old):
    out, _ = run("plan", quantized_folder(folder, tmp_path, old=old))
    assert "files  quantized by" in out and "gptq" in out.lower()
    assert "quantized by" not in run("plan", folder)[0]


def test_a_folder_of_gptq(folder, tmp_path):
    """It is read as it is, also without a dtype in its config, and so are the shards of it."""
    case, model = BY_CASE["gptq-4-asym-v1-order"], LlamaForCausalLM.from_pretrained(folder)
    for name in ("exact", "coded"):
        shutil.copytree(folder, tmp_path / name)
    model.load_state_dict(publish_in_codes(tmp_path / "codes", case, model))
    model.save_pretrained(tmp_path / "exact")
    (tmp_path / "codes" / "model.safetensors").replace(tmp_path / "coded" / "model.safetensors")
    settings, generate = ("--dtype", "float32", "--device", "cpu"), ("--prompt", PROMPT, "--max-new-tokens", 12)
    wanted, _ = run("generate", tmp_path / "exact", *generate, *settings)
    for dtype in (None, "float16"):
        coded = changed(tmp_path / "coded", quantization_config=dict(case.config), dtype=dtype)
        assert run("generate", coded, *generate, *settings)[0] == wanted
    for out in (run("plan", coded, *settings)[0], run("shard", coded, tmp_path / "out", *settings)[0]):
        assert "int4:32:asymmetric:f16 in act-order for mlp.down, taken as it is, " in out
    assert run("generate", tmp_path / "out", *generate, "--device", "cpu")[0] == wanted
