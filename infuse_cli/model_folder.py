"""A model folder or a GGUF file on the command line: read its config, tokenizer and model, or exit with a message."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infuse_cli.gguf_file import dense_model, dtype_of, gguf_files, has_tokenizer, read_gguf_config, read_gguf_tokenizer
from infuse_cli.messages import FAILED, WRONG_USE, bar, described, fail, remarks
from infuse_cli.model_class import found_class
from infuse_cli.other_folders import adapter_alone, component_of_diffusers, other_weights, what_it_is

if TYPE_CHECKING:
    import torch

WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")
SHARDS = "infuse.json"  # the index that `infuse shard` writes


def read_config(model_dir: Path, weights: bool = False) -> Any:
    """The folder's configuration, or that of a GGUF file. Exits with a message if a file is missing."""
    if not model_dir.exists():
        fail(f"{model_dir} does not exist; give a folder with a saved model", WRONG_USE)
    files = _gguf(model_dir)
    if files and not (model_dir / "config.json").is_file():
        return read_gguf_config(files)
    if not model_dir.is_dir():
        fail(f"{model_dir} is a file; give the folder that holds config.json, or a .gguf file", WRONG_USE)
    _refuse_other_folders(model_dir)
    if weights and not files and not _has_weights(model_dir):
        found = f"; {told}" if (told := other_weights(model_dir)) else ""
        fail(f"{model_dir} has a config.json but no weights; needed: {' or '.join(WEIGHT_FILES)}{found}", WRONG_USE)
    import transformers

    try:
        config: Any = transformers.AutoConfig.from_pretrained(model_dir, local_files_only=True)
    except Exception as error:  # transformers raises many kinds of error for a broken file
        fail(f"{model_dir / 'config.json'} cannot be read: {described(error)}", WRONG_USE)
    if files and config.dtype is None:
        config.dtype = dtype_of(files)
    if not config.architectures:
        _name_class(model_dir, config, has_weights=bool(files) or _has_weights(model_dir))
    return config


def _refuse_other_folders(model_dir: Path) -> None:
    """Exit with a message if a folder does not hold a model of transformers."""
    path = model_dir / "config.json"
    if not path.is_file():
        what = what_it_is(model_dir) or "has no config.json; give a folder as model.save_pretrained writes it"
        fail(f"{model_dir} {what}", WRONG_USE)
    if told := adapter_alone(model_dir) or component_of_diffusers(path):
        fail(f"{model_dir} {told}", WRONG_USE)


def _name_class(model_dir: Path, config: Any, *, has_weights: bool) -> None:
    """Set the class that the config does not name."""
    kind = found_class(model_dir, config, has_weights=has_weights)
    if kind is not None:
        config.architectures = [kind.__name__]
        told = f"{model_dir / 'config.json'} names no architectures; the model is taken as {kind.__name__}"
        remarks().print(told, markup=False, highlight=False, soft_wrap=True)


def _has_weights(model_dir: Path) -> bool:
    return any(any(model_dir.glob(pattern)) for pattern in WEIGHT_FILES)


def _gguf(model_dir: Path) -> tuple[Path, ...]:
    """The GGUF files that hold the model's weights; () if other files do."""
    return () if model_dir.is_dir() and _has_weights(model_dir) else gguf_files(model_dir)


def model_class(config: Any) -> Any:
    """The class of the saved model, or AutoModel if config.json does not name one."""
    import transformers

    if not config.architectures:
        return transformers.AutoModel
    name = str(config.architectures[0])
    architecture = getattr(transformers, name, None)
    if not (isinstance(architecture, type) and issubclass(architecture, transformers.PreTrainedModel)):
        fail(f"config.json names {name}, which is no model of transformers {transformers.__version__}", WRONG_USE)
    return architecture


def empty_model(model_dir: Path, config: Any) -> Any:
    """The folder's model on meta, in evaluation mode."""
    import torch
    import transformers

    kind = model_class(config)
    try:
        with torch.device("meta"):
            model = kind.from_config(config) if kind is transformers.AutoModel else kind(config)
        model = model.to(config.dtype or torch.float32).eval()
    except Exception as error:  # the config has values that no model supports
        fail(f"{model_dir / 'config.json'} describes no {kind.__name__}: {described(error)}", WRONG_USE)
    if model.can_generate() and (path := model_dir / "generation_config.json").is_file():
        try:
            model.generation_config = transformers.GenerationConfig.from_pretrained(model_dir, local_files_only=True)
        except Exception as error:
            fail(f"{path} cannot be read: {described(error)}", WRONG_USE)
    return model


def plan_of_folder(model_dir: Path, config: Any, settings: dict[str, Any]) -> Any:
    """The plan for the folder's model. Weights that lie there tell by their headers which matrices keep their codes."""
    import infuse
    from infuse.ground.errors import CheckpointError

    model = empty_model(model_dir, config)
    if not _has_weights(model_dir) and not _gguf(model_dir):
        return infuse.plan(model, **settings)
    try:
        return infuse.plan(model, checkpoint=str(model_dir), **settings)
    except CheckpointError as error:
        remarks().print(f"the plan is made without the weights: {error}", markup=False, highlight=False)
        return infuse.plan(model, **settings)


def start_engine(model_dir: Path, config: Any, settings: dict[str, Any]) -> Any:
    """The engine of a generative model, from its weights or its shards. Each rank reads its own part.

    Layer by layer, so that the original is never in memory as a whole. If only transformers can read the weights, one
    rank takes the model as transformers loads it.
    """
    import infuse
    from infuse.ground.errors import CheckpointError

    # Otherwise transformers takes the dtype of the first weight; of a quantized one it tells nothing.
    known = config.dtype is not None or bool(quantization(model_dir, config))
    alone = not (model_dir / SHARDS).is_file() and settings.keys().isdisjoint(("tensor_parallel", "moe"))
    try:
        if known or not alone:
            model = _generative(empty_model(model_dir, config))
            return infuse.init_inference(model, checkpoint=str(model_dir), **settings)
    except CheckpointError as error:
        if not alone or _gguf(model_dir):  # transformers reads some of these files, but not all that they say
            raise
        remarks().print(f"transformers reads the weights, as a whole: {error}", markup=False, highlight=False)
    return infuse.init_inference(load_generative(model_dir, config), **settings)


def _generative(model: Any) -> Any:
    if not model.can_generate():
        fail(f"{type(model).__name__} does not generate text; `infuse plan` shows what would be done to it", WRONG_USE)
    return model


def copy_rest(model_dir: Path, config: Any, out: Path) -> None:
    """Copy config, tokenizer and generation settings: all files but the weights. Of GGUF files: what is in them."""
    weights = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".index.json", ".gguf")
    if files := _gguf(model_dir):
        if not (model_dir / "config.json").is_file():
            config.save_pretrained(out)
        if not has_tokenizer(model_dir):
            read_gguf_tokenizer(files).save_pretrained(out)
    for path in sorted(model_dir.iterdir()) if model_dir.is_dir() else ():
        if path.is_file() and not path.name.endswith(weights) and path.name != SHARDS:
            shutil.copyfile(path, out / path.name)
    content = json.loads((out / "config.json").read_text(encoding="utf-8"))
    if not content.get("architectures"):  # the shards' names may not tell them again
        content["architectures"] = config.architectures
        (out / "config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def load_generative(model_dir: Path, config: Any, dtype: torch.dtype | str = "auto") -> Any:
    """The folder's model, in evaluation mode. Exits with a message if it does not generate or cannot be read."""
    from transformers.utils.logging import set_tqdm_hook

    def hook(factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return bar(args[0], "loading") if args else factory(**kwargs)

    if files := _gguf(model_dir):
        plain = config.dtype if dtype == "auto" else dtype
        return _generative(dense_model(files, empty_model(model_dir, config), plain))
    kind = model_class(config)
    before = set_tqdm_hook(hook)
    try:
        model, info = kind.from_pretrained(
            model_dir, config=config, dtype=dtype, local_files_only=True, output_loading_info=True
        )
    except Exception as error:  # each format of files raises its own
        fail(f"the weights in {model_dir} cannot be loaded: {described(error)}", FAILED)
    finally:
        set_tqdm_hook(before)
    if missing := sorted(info["missing_keys"]):  # transformers gives these random values
        quantized = f"; they are {told}" if (told := quantization(model_dir, config)) else ""
        names = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        fail(f"the weights in {model_dir} lack {len(missing)} tensors of {kind.__name__}: {names}{quantized}", FAILED)
    return _generative(model.eval())


def quantization(model_dir: Path, config: Any) -> str:
    """How the weights in the folder are quantized, in words; empty if they are not."""
    told = getattr(config, "quantization_config", None)
    told = told if isinstance(told, dict) or told is None else told.to_dict()
    if told is not None:
        bits = told.get("bits") or told.get("num_bits")
        return f"quantized by {told.get('quant_method') or 'another library'}{f', {bits} bits' if bits else ''}"
    if (model_dir / "quantize_config.json").is_file():
        return "quantized by GPTQ (quantize_config.json), which transformers reads with a quantization_config only"
    return ""


def read_tokenizer(model_dir: Path) -> Any:
    import transformers

    if (files := _gguf(model_dir)) and not has_tokenizer(model_dir):
        return read_gguf_tokenizer(files)

    try:
        return transformers.AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    except Exception as error:
        fail(f"{model_dir} has no tokenizer that transformers can read: {described(error)}", WRONG_USE)
