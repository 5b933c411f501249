"""Methods of a model that need the modules and tensors that it had before its layers were replaced.

They become attributes of the model, so that copies and pickles have them, too.
"""

from __future__ import annotations

from functools import partial
from operator import attrgetter
from typing import Any

from torch import nn

from infuse.ground.errors import WAY_BACK, UnsupportedCall
from infuse.ground.instance_method import InstanceMethod
from infuse.ground.questions import returned
from infuse.layers.embedding import QuantizedEmbedding, RankEmbedding
from infuse.layers.linear import Linear, Quantized
from infuse.layers.replaced import WasReplaced

_TIED_KEYS = "get_expanded_tied_weights_keys"
_METHODS = ("get_submodule", "resize_token_embeddings", _TIED_KEYS, "num_parameters")


def answer_for_replaced(module: nn.Module) -> None:
    """Install on `module` and the models inside of it what their classes' methods cannot do any more.

    get_submodule tells where the modules of replaced layers went. Models refuse to resize a quantized or split head or
    table before they change anything. tie_weights ties what is still there by its name: the rest was tied when it was
    replaced. num_parameters counts quantized weights.
    """
    module.get_submodule = InstanceMethod(_get_submodule, module, "get_submodule")  # type: ignore[method-assign]
    model: Any
    for model in module.modules():
        if hasattr(model, "resize_token_embeddings"):
            _fix_vocabulary(model)
        if hasattr(type(model), "get_expanded_tied_weights_keys") and "all_tied_weights_keys" in vars(model):
            _keep_ties(model)
        if hasattr(type(model), "num_parameters") and any(isinstance(each, Quantized) for each in model.modules()):
            model.num_parameters = InstanceMethod(_num_parameters, model, "num_parameters")


def forget_replaced(module: nn.Module) -> None:
    """Take off what `answer_for_replaced` has installed."""
    model: Any
    for model in module.modules():
        for name in _METHODS:
            method = vars(model).get(name)
            if type(method) is InstanceMethod:
                delattr(model, name)
                if name == _TIED_KEYS:
                    model.all_tied_weights_keys = method.function.args[0]


def _get_submodule(module: nn.Module, target: str) -> nn.Module:
    try:
        return type(module).get_submodule(module, target)
    except AttributeError:
        try:
            attrgetter(target)(module)
        except WasReplaced:  # says more
            raise
        except AttributeError:
            pass
        raise


def _fix_vocabulary(model: Any) -> None:
    ends = (returned(model, "get_input_embeddings"), returned(model, "get_output_embeddings"))
    why = [f"quantized ({end.format})" for end in ends if isinstance(end, Quantized)]
    if any(isinstance(end, (RankEmbedding, Linear)) and end._combine is not None for end in ends):
        why.append("split over ranks")
    if why:
        refuse = partial(_refuse_resizing, why[0])
        model.resize_token_embeddings = InstanceMethod(refuse, model, "resize_token_embeddings")


def _refuse_resizing(why: str, model: Any, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> nn.Module:
    """Replace resize_token_embeddings of a model with a fixed vocabulary: accept only the current size."""
    table = model.get_input_embeddings()
    if new_num_tokens in (None, table.num_embeddings) and not args and kwargs.get("pad_to_multiple_of") is None:
        return table
    raise UnsupportedCall(
        f"resize_token_embeddings({new_num_tokens}): the head of this model, for {table.num_embeddings} tokens, "
        f"is {why} and keeps its size; {WAY_BACK}: resize these, then call init_inference"
    )


def _keep_ties(model: Any) -> None:
    """Make tie_weights go by the names that `model` had when it was made, without those that are gone.

    Its class would match patterns with the names of our tensors instead.
    """
    there = _ties(model)
    if there != model.all_tied_weights_keys:
        tied_keys = partial(_tied_keys, model.all_tied_weights_keys)
        model.all_tied_weights_keys = there
        setattr(model, _TIED_KEYS, InstanceMethod(tied_keys, model, _TIED_KEYS))


def _tied_keys(before: dict[str, str], model: Any, all_submodels: bool = False) -> dict[str, str]:
    """Replace get_expanded_tied_weights_keys. `before`: what the model had."""
    if all_submodels:
        return type(model).get_expanded_tied_weights_keys(model, all_submodels=True)
    return _ties(model) if getattr(model.config, "tie_word_embeddings", False) else {}


def _ties(model: Any) -> dict[str, str]:
    """Name of each tied tensor → that of the one that it is tied to, where the model has tensors of both names."""
    pairs = model.all_tied_weights_keys.items()
    return {target: source for target, source in pairs if _is_there(model, target) and _is_there(model, source)}


def _is_there(model: nn.Module, name: str) -> bool:
    owner, _, leaf = name.rpartition(".")
    try:
        place = model.get_submodule(owner)
    except AttributeError:
        return False
    return leaf in place._parameters or leaf in place._buffers


def _num_parameters(model: Any, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
    """Replace num_parameters, which counts no codes: count the values of each quantized weight once."""
    counted = type(model).num_parameters(model, only_trainable, exclude_embeddings)
    if only_trainable:
        return counted
    held = [each for each in model.modules() if isinstance(each, Quantized)]
    tables = {id(each._reading) for each in held if exclude_embeddings and isinstance(each, QuantizedEmbedding)}
    weights = {id(each._reading): each.weight.numel() for each in held if id(each._reading) not in tables}
    return counted + sum(weights.values())
