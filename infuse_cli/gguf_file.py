"""A model in GGUF files on the command line: its config, its tokenizer, and what a folder of shards needs of both."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from infuse_cli.messages import WRONG_USE, described, fail

if TYPE_CHECKING:
    import torch

    from infuse.weights.gguf.file import GGUFFile

SUFFIX = ".gguf"


def gguf_files(model: Path) -> tuple[Path, ...]:
    """The files of the model that `model`, a file or a folder, is or holds; () if there are none. Exits if several."""
    if not (model.is_file() and model.suffix == SUFFIX) and not (model.is_dir() and any(model.glob(f"*{SUFFIX}"))):
        return ()
    from infuse.ground.errors import InfuseError
    from infuse.weights.gguf.parts import all_parts, in_folder

    try:
        paths = in_folder(model) if model.is_dir() else all_parts(model)
    except InfuseError as error:
        fail(str(error), WRONG_USE)
    if absent := [str(path) for path in paths if not path.is_file()]:
        fail(f"{model}: {len(absent)} files are missing: {', '.join(absent)}", WRONG_USE)
    return paths


def read_gguf_config(paths: tuple[Path, ...]) -> Any:
    """The config that the files describe, in the dtype of their plain matrices. Exits if it is none of transformers."""
    import transformers

    from infuse.ground.errors import InfuseError
    from infuse.weights.gguf.config import config_values
    from infuse.weights.gguf.parts import open_parts

    try:
        files = open_parts(paths)
        values = config_values(files)
        config: Any = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    except InfuseError as error:
        fail(str(error), WRONG_USE)
    except Exception as error:  # transformers raises many kinds of error for values that it does not expect
        fail(f"{paths[0]} describes no model of transformers {transformers.__version__}: {described(error)}", WRONG_USE)
    config.dtype = _dtype(files)
    return config


def dtype_of(paths: tuple[Path, ...]) -> torch.dtype:
    """The dtype of a model whose config does not say it."""
    from infuse.ground.errors import InfuseError
    from infuse.weights.gguf.parts import open_parts

    try:
        return _dtype(open_parts(paths))
    except InfuseError as error:
        fail(str(error), WRONG_USE)


def _dtype(files: tuple[GGUFFile, ...]) -> torch.dtype:
    """The dtype of the embedding's table; of a quantized one, bfloat16."""
    import torch

    from infuse.weights.gguf.file import PLAIN

    table = next((one.entries.get("token_embd.weight") for one in files), None)
    return torch.bfloat16 if table is None else PLAIN.get(table.type, torch.bfloat16)


def read_gguf_tokenizer(paths: tuple[Path, ...]) -> Any:
    """The tokenizer and the chat template in the first file, as transformers reads them."""
    import transformers

    from infuse.ground.errors import InfuseError
    from infuse.weights.gguf.file import GGUFFile
    from infuse.weights.gguf.vocabulary import check_vocabulary

    first = paths[0]
    try:
        check_vocabulary(GGUFFile(first).values, first)
        return transformers.PreTrainedTokenizerFast.from_pretrained(
            first.parent, gguf_file=first.name, local_files_only=True
        )
    except InfuseError as error:
        fail(str(error), WRONG_USE)
    except ImportError as error:
        fail(f"{first}: to read its tokenizer, transformers needs a package: {error}", WRONG_USE)
    except Exception as error:
        fail(f"{first} has no tokenizer that transformers can read: {described(error)}", WRONG_USE)


def has_tokenizer(folder: Path) -> bool:
    """Whether a tokenizer as transformers saves it lies in a folder."""
    return folder.is_dir() and any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))


def dense_model(paths: tuple[Path, ...], model: Any, dtype: Any) -> Any:
    """Fill a model on meta with the files' values, dequantized to `dtype`; no layer is replaced."""
    import torch

    from infuse.apply.load import load_values
    from infuse.config.inference import InferenceConfig

    load_values(model, InferenceConfig(checkpoint=[str(path) for path in paths]), dtype, torch.device("cpu"))
    return model
