"""How a mixture's router gets from hidden states to experts and their weights: the words of a rule and its numbers.

Rounding order and the ties of `torch.topk` decide which experts run, so a rule says every cast.
"""

from __future__ import annotations

from typing import NamedTuple

# Logits: computed and rounded in the weight's dtype; rounded and then cast to float32; or computed in float32.
ROUNDED, WIDENED, FLOAT32 = "rounded", "widened", "float32"
# Scores of all experts. SPARSE_MIXER chooses and weighs two experts itself (Phi-3.5-MoE).
SOFTMAX, SIGMOID, SQRT_SOFTPLUS, SPARSE_MIXER = "softmax", "sigmoid", "sqrt_softplus", "sparse_mixer"
# Weights of the chosen experts: their scores without the correction, a function of those, or the values that they were
# chosen by.
SCORE, PICKED = "score", "picked"
SOFTMAX_OF_SCORES, SIGMOID_OF_SCORES = "softmax of scores", "sigmoid of scores"
TOP2_SUM, MAX = "sum of the two best", "best"
ACTIVATIONS, LOGITS = "activations", "logits"  # the dtype that weights are cast to at the end


class Routing(NamedTuple):
    """The arguments of the op `router` after its tensors, in order.

    `score` None leaves the logits as they are. `rounded_score`: scores have the dtype of the logits, not float32.
    `normalise`: divide the weights by their sum + `eps`, which is at least `least`, then multiply by `scale`. `cast`
    None leaves the dtype of the scores. `in_order`: as `sorted` of torch.topk; it decides the order in which weights
    are added up. With `groups` > `kept`, only experts of the `kept` groups that rank best by `ranked_by` may be chosen;
    the others' values become `fill`. `cap` bounds the logits by tanh, 0 does not; `jitter` is SPARSE_MIXER's.
    """

    top_k: int
    logits: str = ROUNDED
    score: str | None = SOFTMAX
    rounded_score: bool = False
    weights: str = SCORE
    normalise: bool = False
    eps: float = 0.0
    least: float = 0.0
    scale: float = 1.0
    cast: str | None = None
    in_order: bool = True
    groups: int = 1
    kept: int = 1
    ranked_by: str = TOP2_SUM
    fill: float = float("-inf")
    cap: float = 0.0
    jitter: float = 0.0
