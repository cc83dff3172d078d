"""Garbage is not collected while a CUDA graph is captured."""

import gc

import pytest

from repulsive.repulsion.cuda_graphs import without_garbage_collection


def test_collection_is_disabled_inside_the_block_only():
    assert gc.isenabled()
    with without_garbage_collection():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_collection_is_enabled_again_after_an_error():
    with pytest.raises(RuntimeError), without_garbage_collection():
        raise RuntimeError
    assert gc.isenabled()


def test_a_user_who_disabled_collection_keeps_it_so():
    gc.disable()
    try:
        with without_garbage_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
