"""Inputs on which proofs, traces and searches run models: of a model, of a component of a pipeline, of a pipeline."""
