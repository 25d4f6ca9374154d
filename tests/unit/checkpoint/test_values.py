"""Tracked objects come back with the same types, values, bits and order, or are refused by path."""

from __future__ import annotations

import json

import torch
from hypothesis import given, settings

from hpctrain.checkpoint.tensors.value_reading import decode, placeholders
from hpctrain.checkpoint.tensors.values import encode
from tests.support.value_trees import TREES, facts


def through(value):
    """The value as a checkpoint holds it: JSON, and tensors in new memory."""
    form, tensors = encode(value, "tracked.thing")
    form = json.loads(json.dumps(form))
    loaded = placeholders(form)
    assert loaded.keys() == tensors.keys()
    for name, tensor in loaded.items():
        assert (tensor.dtype, tensor.shape) == (tensors[name].dtype, tensors[name].shape)
        source = tensors[name].detach().contiguous().reshape(-1)
        if source.numel():
            whole = torch.empty_like(source.view(torch.uint8)).copy_(source.view(torch.uint8))
            tensor.copy_(whole.view(tensor.dtype).reshape(tensor.shape))
    return decode(form, loaded)


@settings(max_examples=400, deadline=None)
@given(TREES)
def test_any_tree_of_the_closed_set_comes_back_as_it_was(tree):
    assert facts(through(tree)) == facts(tree)
