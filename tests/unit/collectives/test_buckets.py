import itertools

from hypothesis import given
from hypothesis import strategies as st

from geojax.collectives.buckets import Bucket, LeafPiece, plan_buckets

leaves = st.lists(
    st.tuples(st.integers(0, 200), st.sampled_from(["float32", "bfloat16"])), max_size=12
)


def plan_of(drawn, limit):
    lengths = [length for length, _ in drawn]
    return plan_buckets(lengths, [kind for _, kind in drawn], [limit] * len(drawn))


@given(leaves, st.integers(1, 64) | st.none())
def test_every_unit_of_every_leaf_is_in_exactly_one_bucket(drawn, limit):
    plan = plan_of(drawn, limit)
    seen = {leaf: [] for leaf in range(len(drawn))}
    for bucket in plan.buckets:
        for piece in bucket.pieces:
            seen[piece.leaf] += range(piece.start, piece.stop)
    assert seen == {leaf: list(range(length)) for leaf, (length, _) in enumerate(drawn)}


@given(leaves, st.integers(1, 64))
def test_no_bucket_exceeds_the_limit_or_mixes_kinds(drawn, limit):
    for bucket in plan_of(drawn, limit).buckets:
        assert bucket.length <= limit
        assert len({drawn[piece.leaf][1] for piece in bucket.pieces}) == 1


@given(leaves, st.integers(1, 64))
def test_a_long_leaf_takes_the_fewest_pieces_and_shares_with_nobody(drawn, limit):
    plan = plan_of(drawn, limit)
    for leaf, (length, _) in enumerate(drawn):
        if length > limit:
            own = [c for c in plan.buckets if any(piece.leaf == leaf for piece in c.pieces)]
            assert len(own) == -(-length // limit)
            assert all(len(bucket.pieces) == 1 for bucket in own)
            sizes = [bucket.length for bucket in own]
            assert max(sizes) - min(sizes) <= 1


@given(leaves, st.integers(1, 64))
def test_neighboring_merged_buckets_of_a_kind_could_not_be_one(drawn, limit):
    merged = {}
    for bucket in plan_of(drawn, limit).buckets:
        first = bucket.pieces[0]
        length, kind = drawn[first.leaf]
        if 0 < length <= limit:
            merged.setdefault(kind, []).append(bucket)
    for buckets in merged.values():
        for before, after in itertools.pairwise(buckets):
            assert before.length + after.pieces[0].length > limit


def test_the_documented_example():
    plan = plan_buckets([5, 2, 3, 1], ["f"] * 4, [4] * 4)
    assert plan.buckets == (
        Bucket((LeafPiece(0, 0, 3),)),
        Bucket((LeafPiece(0, 3, 5),)),
        Bucket((LeafPiece(1, 0, 2),)),
        Bucket((LeafPiece(2, 0, 3), LeafPiece(3, 0, 1))),
    )
    assert plan.unmerged == {1}


def test_without_a_limit_every_leaf_is_alone():
    plan = plan_buckets([5, 0, 3], ["f"] * 3, [None] * 3)
    assert plan.unmerged == {0, 1, 2}


def test_an_empty_leaf_is_never_merged():
    assert plan_buckets([2, 0, 2], ["f"] * 3, [8] * 3).buckets == (
        Bucket((LeafPiece(0, 0, 2), LeafPiece(2, 0, 2))),
        Bucket((LeafPiece(1, 0, 0),)),
    )
