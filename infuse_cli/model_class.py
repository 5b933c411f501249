"""The class of a saved model whose config.json has no `architectures`: what transformers' auto classes take."""

from __future__ import annotations

from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any

# Auto classes in the order in which a folder is tried: models that answer first, then other heads, which only files
# that hold one tell.
_ANSWERING = ("CausalLM", "ImageTextToText", "MultimodalLM", "Seq2SeqLM", "SpeechSeq2Seq")
_ANSWERING_PAIRS = ("Seq2SeqLM", "SpeechSeq2Seq", "ImageTextToText", "CausalLM")
_OTHER = (
    "MaskedLM", "SequenceClassification", "TokenClassification", "QuestionAnswering", "MultipleChoice",
    "ImageClassification", "AudioClassification", "CTC", "ObjectDetection", "SemanticSegmentation", "DepthEstimation",
    "TextToSpectrogram", "TextToWaveform", "VideoClassification",
)  # fmt: skip


def found_class(folder: Path, config: Any, *, has_weights: bool) -> Any:
    """The first class for this config, in order, whose head is in the folder's files; without a head, the base model.

    Without files, the first class that answers. None if transformers has no class for this config.
    """
    import transformers

    stored = _stored_modules(folder) if has_weights else None
    for kind in _classes(config, _order(config) if stored is None else (*_order(config), *_OTHER)):
        if stored is None or all(_is_stored(name, stored) for name in _own_parameters(kind, config)):
            return kind
    return next(_of_mapping(transformers.AutoModel, config), None)


def _order(config: Any) -> tuple[str, ...]:
    if getattr(config, "is_encoder_decoder", False):
        return _ANSWERING_PAIRS
    # BERT's relatives are in the mapping of decoders, too.
    is_encoder = getattr(config, "is_decoder", None) is False and any(_classes(config, ("MaskedLM",)))
    return ("MaskedLM", *_ANSWERING) if is_encoder else _ANSWERING


def _classes(config: Any, tasks: tuple[str, ...]) -> Iterator[Any]:
    """Yield the class that each task's auto class takes for a config, if it takes one."""
    import transformers

    for task in tasks:
        yield from _of_mapping(getattr(transformers, f"AutoModelFor{task}"), config)


def _of_mapping(auto: Any, config: Any) -> Iterator[Any]:
    found = auto._model_mapping.get(type(config), None)
    if found is not None:
        yield found[0] if isinstance(found, (tuple, list)) else found


def _own_parameters(kind: Any, config: Any) -> list[str]:
    """The parameters of a class that its base model does not have, tied ones aside."""
    import torch

    try:
        with torch.device("meta"):
            model = kind(config)
    except Exception:  # values that no model supports: whoever builds the model says so
        return []
    base = getattr(model, model.base_model_prefix, model)
    held = {id(parameter) for parameter in base.parameters()}
    return [name for name, parameter in model.named_parameters() if id(parameter) not in held]


def _stored_modules(folder: Path) -> Set[str] | None:
    """The names of all tensors in the folder's files, and of the modules above them; None if they cannot be read."""
    from infuse.ground.errors import CheckpointError
    from infuse.weights.checkpoint import stored_names

    try:
        names = stored_names(str(folder))
    except CheckpointError:  # whoever reads the values says so
        return None
    parts = (name.split(".") for name in names)
    return {".".join(part[:count]) for part in parts for count in range(1, len(part) + 1)}


def _is_stored(name: str, stored: Set[str]) -> bool:
    """Whether files have a parameter, or the codes of its module, maybe below a prefix."""
    path = name.rpartition(".")[0] or name
    return path in stored or any(one.endswith(f".{path}") for one in stored)
