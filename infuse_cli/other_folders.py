"""Folders without a model of transformers at their top: what they are, and what to give instead."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

_ADAPTER = "adapter_config.json"
_FOREIGN_WEIGHTS = ("tf_model.h5", "flax_model.msgpack", "*.onnx", "*.mlmodel", "*.ot")
_MOST = 5  # names in a message


def what_it_is(folder: Path) -> str | None:
    """Say what a folder without a config.json is, and what to do, as the rest of a sentence; else None."""
    told = (kind(folder) for kind in _KINDS)
    return next((one for one in told if one), None)


def adapter_alone(folder: Path) -> str | None:
    """Say it of a folder of a PEFT adapter without its base model's weights, with a config or without; else None."""
    weights = [path for pattern in ("*.safetensors", "*.bin", "*.gguf") for path in folder.glob(pattern)]
    if not (folder / _ADAPTER).is_file() or any(not path.name.startswith("adapter_") for path in weights):
        return None
    return _adapter(folder)


def component_of_diffusers(config: Path) -> str | None:
    """Say it of a folder with this config.json that holds a part of a diffusers pipeline; else None."""
    told = _object(config)
    if "model_type" in told or "_class_name" not in told:
        return None
    return (
        f"is a part of a pipeline of diffusers ({told['_class_name']}); in Python, init_inference takes the pipeline "
        "or the part, see docs/diffusion.md"
    )


def other_weights(folder: Path) -> str | None:
    """Name the weights of a folder in forms that are not read, and what to do; None if there are none."""
    found = [path.name for pattern in _FOREIGN_WEIGHTS for path in sorted(folder.glob(pattern))]
    if found:
        told = "load it with the library that wrote it, and save it as model.safetensors with save_pretrained"
        return f"found {_listed(found)}; {told}"
    if (folder / "zero_to_fp32.py").is_file():
        return "found a training checkpoint of DeepSpeed's ZeRO; run `python zero_to_fp32.py . .` in it first"
    if any(folder.glob("pytorch_model_fsdp_*")):
        return "found a training checkpoint of FSDP; run `accelerate merge-weights` on it first"
    return None


def _adapter(folder: Path) -> str | None:
    if not (folder / _ADAPTER).is_file():
        return None
    told = _object(folder / _ADAPTER)
    base = told.get("base_model_name_or_path")
    kind = f" ({told['peft_type']})" if isinstance(told.get("peft_type"), str) else ""
    of = f"of {base}" if isinstance(base, str) and base else "and does not say of which model"
    merge = f"PeftModel.from_pretrained(base, {str(folder)!r}).merge_and_unload().save_pretrained(FOLDER)"
    return (
        f"is a PEFT adapter{kind} {of}, not a model: load the base model, merge the adapter into it by {merge}, and "
        "give FOLDER; or give the folder of the base model. docs/adapters.md says how to keep an adapter as it is"
    )


def _sentence_transformer(folder: Path) -> str | None:
    if not (folder / "modules.json").is_file():
        return None
    parts = _parsed(folder / "modules.json")
    paths = [one.get("path") for one in parts if isinstance(one, dict)] if isinstance(parts, list) else []
    inner = [folder / path for path in paths if isinstance(path, str) and path]
    models = [path for path in inner if (path / "config.json").is_file()]
    where = f"; its model is in {models[0]}: give that folder" if models else ""
    return f"is a folder of sentence-transformers{where}; in Python, init_inference takes the SentenceTransformer"


def _pipeline(folder: Path) -> str | None:
    if not (folder / "model_index.json").is_file():
        return None
    name = _object(folder / "model_index.json").get("_class_name")
    inner = [path.parent.name for path in sorted(folder.glob("*/config.json")) if _object(path).get("model_type")]
    where = f"; of its parts, {_listed(inner)} are models of transformers: give such a folder" if inner else ""
    return (
        f"is a pipeline of diffusers ({name or 'of no class'}); in Python, init_inference takes it: "
        f"DiffusionPipeline.from_pretrained({str(folder)!r}), see docs/diffusion.md{where}"
    )


def _hub_cache(folder: Path) -> str | None:
    snapshots = sorted(folder.glob("snapshots/*/config.json"), key=lambda path: path.parent.stat().st_mtime)
    if not snapshots:
        return None
    return f"is a folder of the Hugging Face Hub's cache; give a snapshot in it: {snapshots[-1].parent}"


def _training(folder: Path) -> str | None:
    numbers = {path: re.fullmatch(r"checkpoint-(\d+)", path.name) for path in folder.iterdir() if path.is_dir()}
    steps = sorted((int(matched[1]), path) for path, matched in numbers.items() if matched)
    if not steps:
        return None
    names = [path.name for _, path in steps]
    return f"holds checkpoints of a training ({_listed(names)}); give one of them, the last is {steps[-1][1]}"


def _pictures(folder: Path) -> str | None:
    files = [path.name for path in sorted(folder.glob("*.gguf"))]
    if not files:
        return None
    return f"holds only GGUF files of vision towers ({_listed(files)}); the text model's file is needed"


def _original(folder: Path) -> str | None:
    if not (folder / "params.json").is_file():
        return None
    return (
        "holds a model as its authors published it (params.json); give the folder that transformers has of it, or "
        "convert it with the convert_*_weights_to_hf.py in transformers/models"
    )


def _models_inside(folder: Path) -> str | None:
    inner = [path.parent.name for path in sorted(folder.glob("*/config.json"))]
    return f"holds folders of models ({_listed(inner)}); give one of them" if inner else None


def _weights_alone(folder: Path) -> str | None:
    if not any(any(folder.glob(pattern)) for pattern in ("*.safetensors", "*.bin", "*.pt", "*.pth")):
        return None
    return "has weights and no config.json; put the config.json of the model beside them"


def _tokenizer(folder: Path) -> str | None:
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json")):
        return None
    return "holds a tokenizer alone, and no config.json; give the folder with the model"


_KINDS: tuple[Callable[[Path], str | None], ...] = (
    _adapter, _sentence_transformer, _pipeline, _hub_cache, _training, _pictures, _original, _models_inside,
    _weights_alone, _tokenizer,
)  # fmt: skip


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_MOST]) + (f" and {len(names) - _MOST} more" if len(names) > _MOST else "")


def _object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; an empty one if there is none."""
    content = _parsed(path)
    return content if isinstance(content, dict) else {}


def _parsed(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
