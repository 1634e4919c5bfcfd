import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geojax.collectives.buckets import (
    BlockLayout,
    block_layouts,
    bucket_limit,
)
from geojax.collectives.like_trees import leaf_names
from geojax.errors import UserError


@settings(max_examples=30)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.integers(0, 2), st.integers(1, 4))
def test_rows_hold_the_blocks_that_the_ranks_hold(shape, dim, ranks):
    layout = BlockLayout(tuple(shape), dim % len(shape), ranks)
    leaf = jnp.asarray(np.random.default_rng(0).normal(size=shape))
    rows = layout.to_rows(leaf)
    padded = layout.pad(leaf)
    assert rows.shape == (ranks, layout.columns)
    for rank in range(ranks):
        start = rank * layout.block
        block = jax.lax.slice_in_dim(padded, start, start + layout.block, axis=layout.dim)
        np.testing.assert_array_equal(layout.from_row(rows[rank]), block)
        np.testing.assert_array_equal(layout.to_row(block), rows[rank])
    np.testing.assert_array_equal(layout.from_rows(rows), leaf)
    np.testing.assert_array_equal(layout.trim(padded), leaf)


def test_a_leaf_is_named_in_the_message():
    names = leaf_names({"layers": {"scale": jnp.zeros(())}})
    with pytest.raises(UserError, match=r"leaf \['layers'\]\['scale'\] is a scalar"):
        block_layouts(names, [()], [0], 4)
    with pytest.raises(UserError, match=r"has shape \(2, 3\) and no dimension 2 to scatter"):
        block_layouts(names, [(2, 3)], [2], 4)


def test_a_bucket_holds_at_least_one_element_of_each_rank():
    assert bucket_limit(None, 16) is None
    assert bucket_limit(47, 16) == 2
    with pytest.raises(UserError, match=r"bucket_bytes=15 cannot hold .* 16 bytes"):
        bucket_limit(15, 16)
