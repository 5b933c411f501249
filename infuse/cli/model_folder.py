"""A model folder on the command line: read its config, class, tokenizer and model, or exit with a message."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import track

from infuse.errors import ConfigError, InfuseError

if TYPE_CHECKING:
    import torch

FAILED, WRONG_USE = 1, 2
WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")
SHARDS = "infuse.json"  # the index that `infuse shard` writes


def read_config(model_dir: Path, weights: bool = False) -> Any:
    """The folder's configuration. Exits with a message if a file is missing."""
    if not model_dir.exists():
        fail(f"{model_dir} does not exist; give a folder with a saved model", WRONG_USE)
    if not model_dir.is_dir():
        fail(f"{model_dir} is a file; give the folder that holds config.json", WRONG_USE)
    if not (model_dir / "config.json").is_file():
        fail(f"{model_dir} has no config.json; give a folder as model.save_pretrained writes it", WRONG_USE)
    if weights and not any(any(model_dir.glob(pattern)) for pattern in WEIGHT_FILES):
        fail(f"{model_dir} has a config.json but no weights; needed: {' or '.join(WEIGHT_FILES)}", WRONG_USE)
    import transformers

    try:
        return transformers.AutoConfig.from_pretrained(model_dir, local_files_only=True)
    except (OSError, ValueError) as error:
        fail(f"{model_dir / 'config.json'} cannot be read: {error}", WRONG_USE)


def model_class(config: Any) -> Any:
    """The class of the saved model, or AutoModel if config.json does not name one."""
    import transformers

    if not config.architectures:
        return transformers.AutoModel
    found = getattr(transformers, config.architectures[0], None)
    if found is None:
        fail(
            f"config.json names {config.architectures[0]}, which transformers {transformers.__version__} does not have",
            WRONG_USE,
        )
    return found


def empty_model(model_dir: Path, config: Any) -> Any:
    """The folder's model on meta, in evaluation mode."""
    import torch
    import transformers

    kind = model_class(config)
    with torch.device("meta"):
        model = kind.from_config(config) if kind is transformers.AutoModel else kind(config)
    if model.can_generate() and (model_dir / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(model_dir, local_files_only=True)
    return model.to(config.dtype or torch.float32).eval()


def start_engine(model_dir: Path, config: Any, settings: dict[str, Any]) -> Any:
    """The engine of a generative model, from its weights or its shards. Each rank reads its own part."""
    import infuse

    if not (model_dir / SHARDS).is_file() and "tensor_parallel" not in settings:
        return infuse.init_inference(load_generative(model_dir, config), **settings)
    model = empty_model(model_dir, config)
    if not model.can_generate():
        fail(f"{type(model).__name__} does not generate text; `infuse plan` shows what would be done to it", WRONG_USE)
    return infuse.init_inference(model, checkpoint=str(model_dir), **settings)


def copy_rest(model_dir: Path, out: Path) -> None:
    """Copy config, tokenizer and generation settings: all files but the weights."""
    weights = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".index.json")
    for path in sorted(model_dir.iterdir()):
        if path.is_file() and not path.name.endswith(weights) and path.name != SHARDS:
            shutil.copyfile(path, out / path.name)


def load_generative(model_dir: Path, config: Any, dtype: torch.dtype | str = "auto") -> Any:
    """The folder's model, in evaluation mode. Exits with a message if it does not generate or cannot be read."""
    from safetensors import SafetensorError
    from transformers.utils.logging import set_tqdm_hook

    def hook(factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return bar(args[0], "loading") if args else factory(**kwargs)

    kind = model_class(config)
    before = set_tqdm_hook(hook)
    try:
        model = kind.from_pretrained(model_dir, config=config, dtype=dtype, local_files_only=True).eval()
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        fail(f"the weights in {model_dir} cannot be loaded: {error}", FAILED)
    finally:
        set_tqdm_hook(before)
    if not model.can_generate():
        fail(f"{kind.__name__} does not generate text; `infuse plan` shows what would be done to it", WRONG_USE)
    return model


def read_tokenizer(model_dir: Path) -> Any:
    import transformers

    try:
        return transformers.AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    except (OSError, ValueError, ImportError) as error:
        fail(f"{model_dir} has no tokenizer that transformers can read: {error}", WRONG_USE)


@contextmanager
def told_errors() -> Iterator[None]:
    """Print errors that a user can act on without a traceback; others keep theirs."""
    try:
        yield
    except ConfigError as error:
        fail(str(error), WRONG_USE)
    except BrokenPipeError:  # `infuse plan ... | head`: typer ends quietly
        raise
    except (InfuseError, OSError, MemoryError) as error:
        fail(f"{type(error).__name__}: {error}", FAILED)


LAUNCHED = "INFUSE_LAUNCHED"  # set in the environment of ranks that `--tp` started


def is_rank() -> bool:
    """Whether torchrun or `--tp` started this process as one of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def fail(message: str, code: int) -> NoReturn:
    """Print an error and exit. A rank leaves the message to its launcher: `--tp` prints it once for all ranks."""
    if is_rank() and (place := os.environ.get("TORCHELASTIC_ERROR_FILE")):
        Path(place).write_text(json.dumps({"message": message, "timestamp": int(time.time())}), encoding="utf-8")
        if os.environ.get(LAUNCHED):
            raise typer.Exit(code)
    remarks().print(f"error: {message}", style="red", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(code)


def bar(items: Iterable[Any], description: str) -> Iterable[Any]:
    """A progress bar on terminals, nothing elsewhere."""
    return track(items, description=description, console=remarks(), transient=True, disable=not sys.stderr.isatty())


def remarks() -> Console:
    """Standard error of rank 0."""
    return Console(stderr=True, quiet=is_rank() and os.environ["RANK"] != "0")
