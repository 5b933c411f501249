"""Residual shapes as programs, and what the peepholes make of them (architectures/program.py)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from families import BY_NAME

import infuse
from infuse.architectures.layer import PARALLEL, POST, PRE, SANDWICH, LayerShape
from infuse.architectures.program import (
    ADD,
    ATTENTION,
    IMAGE,
    MLP,
    NORM,
    TEXT,
    Program,
    Step,
    carried,
    folded,
    merged,
    program_of,
)
from infuse.layers.block import Block


@pytest.fixture(scope="module")
def shape() -> LayerShape:
    """A layer's, with all four norms."""
    engine = infuse.init_inference(BY_NAME["llama"].make(), dtype=torch.float32, verify="off")
    found = next(module for module in engine.module.modules() if isinstance(module, Block)).shape
    return replace(found, post1=found.norm1, post2=found.norm1)


def words(program: Program) -> str:
    return " ".join(
        f"{step.does}({step.norm or step.part})" if step.norm or step.part else step.does for step in program
    )


MERGED = {
    PRE: "norm(norm1) attention add_norm(norm2) mlp(mlp) add",
    POST: "attention add_norm_stream(norm1) mlp(mlp) add_norm_stream(norm2)",
    PARALLEL: "norm(norm1) attention norm(norm2) mlp(mlp) add",
    SANDWICH: "norm(norm1) attention norm_branch(post1) add_norm(norm2) mlp(mlp) norm_branch(post2) add",
}
FOLDED = {
    PRE: "carry folded_attention(norm1) take carry folded_mlp(norm2) take",
    POST: "folded_attention add_norm_stream(norm1) folded_mlp(mlp) add_norm_stream(norm2)",
    PARALLEL: "carry folded_attention(norm1) folded_mlp(norm2) take",
    SANDWICH: "folded_attention(norm1) norm_branch(post1) add folded_mlp(norm2) norm_branch(post2) add",
}


@pytest.mark.parametrize("residual", MERGED)
def test_sums_go_with_the_norms_after_them_or_with_the_products_before(shape: LayerShape, residual: str) -> None:
    program = program_of(replace(shape, residual=residual))
    assert words(merged(program)) == MERGED[residual]
    assert words(merged(folded(program))) == FOLDED[residual]


def test_norms_that_a_layer_lacks_are_left_out(shape: LayerShape) -> None:
    shared = program_of(replace(shape, residual=PARALLEL, norm2=None))
    assert words(shared) == "norm(norm1) attention mlp(mlp) add"
    assert words(folded(shared)) == "carry folded_attention(norm1) folded_mlp(norm1) take"
    assert words(merged(program_of(replace(shape, norm2=None)))) == "norm(norm1) attention add mlp(mlp) add"


def test_ranks_add_up_parallel_branches_once_before_the_stream(shape: LayerShape) -> None:
    program = program_of(replace(shape, residual=PARALLEL), ranks=2)
    assert words(merged(program)) == "norm(norm1) attention norm(norm2) mlp(mlp) reduce add"
    assert words(folded(program)) == "folded_attention(norm1) folded_mlp(norm2) reduce add"
    assert "reduce" not in words(program_of(shape, ranks=2))


def test_scaled_branches_are_added_by_themselves(shape: LayerShape) -> None:
    program = program_of(replace(shape, residual_scale=0.5))
    assert words(folded(program)) == "folded_attention(norm1) add folded_mlp(norm2) add"
    assert [step.scale for step in merged(program) if step.does.startswith("add")] == [0.5, 0.5]


def test_sums_of_streams_go_with_norms_that_are_modulated_as_they_are_or_with_products() -> None:
    """A gated sum goes with a modulated norm of its stream, a plain one with a plain norm or the product before it."""
    gated, modulated, plain = Step(ADD, on=IMAGE, by=(2,)), Step(NORM, "norm", on=IMAGE, by=(1, 0)), Step(ADD, on=IMAGE)
    mlp, norm = Step(MLP, "mlp", on=IMAGE), Step(NORM, "norm", on=IMAGE)
    assert merged((gated, modulated)) == (Step("add_norm", "norm", on=IMAGE, by=(2, 1, 0)),)
    assert merged((plain, norm)) == (Step("add_norm", "norm", on=IMAGE),)
    for apart in ((gated, norm), (plain, modulated), (plain, Step(NORM, on=IMAGE)), (plain, norm._replace(on=TEXT))):
        assert merged(apart) == apart
    across = Step(ATTENTION, "cross", on=IMAGE, over=TEXT)
    assert words(carried((across, plain, modulated, mlp, gated))) == (
        "carry attention(cross) take norm(norm) mlp(mlp) add"
    )
