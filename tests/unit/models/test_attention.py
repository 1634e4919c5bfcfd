import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from geojax.errors import UserError
from geojax.mesh import AXES, make_mesh
from geojax.models.attention import attention, blocked


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


@pytest.fixture(params=["unrolled", "scanned"])
def walk(request, monkeypatch):
    """Both ways through the tiles, with tiles so small that there are several."""
    monkeypatch.setattr(blocked, "UNROLLED_BLOCK", 16)
    monkeypatch.setattr(blocked, "SCANNED_BLOCK", 16)
    longest = 1024 if request.param == "unrolled" else 0
    monkeypatch.setattr(blocked, "LONGEST_UNROLLED", longest)
    return request.param


def inputs(length, heads=4, key_heads=2, size=8, rows=2, dtype=np.float64):
    generator = np.random.default_rng(length)
    shapes = [(rows, length, n, size) for n in (heads, key_heads, key_heads, heads)]
    return [jnp.asarray(generator.standard_normal(shape), dtype) for shape in shapes]


def packed(length, rows=2):
    """Documents of random lengths, the last positions padding (0)."""
    generator = np.random.default_rng(length)
    numbers = np.sort(generator.integers(1, 5, (rows, length)), axis=1)
    numbers[:, length - length // 5 :] = 0
    return jnp.asarray(numbers, jnp.int32)


def outputs_and_gradients(implementation, query, key, value, cotangent, segment_ids, scale=None):
    def attend(query, key, value):
        return attention(query, key, value, segment_ids, implementation=implementation, scale=scale)

    @jax.jit
    def both(query, key, value, cotangent):
        output, backward = jax.vjp(attend, query, key, value)
        return (output, *backward(cotangent))

    return both(query, key, value, cotangent)


def assert_equal(actual, expected, tolerance):
    for one, other in zip(actual, expected, strict=True):
        assert one.dtype == other.dtype
        assert np.isfinite(one).all()
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance)


def by_hand(query, key, value, segment_ids):
    """One output at a time, in numpy."""
    query, key, value = (np.asarray(x) for x in (query, key, value))
    output = np.zeros_like(query)
    share = query.shape[2] // key.shape[2]
    for row, position, head in np.ndindex(query.shape[:3]):
        seen = [p for p in range(position + 1) if segment_ids[row, p] == segment_ids[row, position]]
        scores = key[row, seen, head // share] @ query[row, position, head]
        weights = np.exp(scores / math.sqrt(query.shape[3]))
        output[row, position, head] = weights / weights.sum() @ value[row, seen, head // share]
    return output


@pytest.mark.usefixtures("float64")
def test_the_reference_is_the_definition():
    query, key, value, _ = inputs(11)
    segment_ids = packed(11)
    actual = attention(query, key, value, segment_ids, implementation="reference")
    np.testing.assert_allclose(actual, by_hand(query, key, value, segment_ids), atol=1e-13)


@pytest.mark.usefixtures("float64", "walk")
@pytest.mark.parametrize("length", [1, 7, 16, 50, 64])
@pytest.mark.parametrize("documents", [False, True])
def test_blocked_equals_the_reference_with_gradients(length, documents):
    segment_ids = packed(length) if documents else None
    expected = outputs_and_gradients("reference", *inputs(length), segment_ids)
    actual = outputs_and_gradients("blocked", *inputs(length), segment_ids)
    assert_equal(actual, expected, 1e-12)


@pytest.mark.usefixtures("float64", "walk")
@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (6, 2), (3, 1)])
def test_heads_share_keys(heads, key_heads):
    arrays = inputs(40, heads, key_heads)
    expected = outputs_and_gradients("reference", *arrays, packed(40), scale=0.3)
    actual = outputs_and_gradients("blocked", *arrays, packed(40), scale=0.3)
    assert_equal(actual, expected, 1e-12)


@pytest.mark.usefixtures("float64", "walk")
def test_documents_do_not_see_each_other():
    query, key, value, _ = inputs(48)
    segment_ids = jnp.asarray(np.repeat([[1, 2, 0]] * 2, [20, 20, 8], axis=1))
    alone = attention(*(x[:, 20:40] for x in (query, key, value)), None, implementation="blocked")
    together = attention(query, key, value, segment_ids, implementation="blocked")
    np.testing.assert_allclose(together[:, 20:40], alone, atol=1e-13)


@pytest.mark.usefixtures("walk")
def test_large_scores_do_not_overflow():
    query, key, value, cotangent = inputs(40, dtype=np.float32)
    results = outputs_and_gradients("blocked", 300 * query, 300 * key, value, cotangent, packed(40))
    assert all(np.isfinite(x).all() for x in results)


@pytest.mark.usefixtures("walk")
def test_bfloat16_is_summed_in_float32():
    arrays = inputs(64, dtype=np.float32)
    narrow = [x.astype(jnp.bfloat16) for x in arrays]
    expected = outputs_and_gradients(
        "reference", *(x.astype(jnp.float32) for x in narrow), packed(64)
    )
    actual = outputs_and_gradients("blocked", *narrow, packed(64))
    for one, other in zip(actual, expected, strict=True):
        assert one.dtype == jnp.bfloat16
        # Two roundings to 8 bits, of the probabilities and of the result, of numbers up to ~3.
        np.testing.assert_allclose(one.astype(np.float32), other, rtol=2**-7, atol=2**-6)
    products = [
        e
        for e in equations(jax.make_jaxpr(attention)(*narrow[:3]))
        if e.primitive.name == "dot_general"
    ]
    assert products
    assert {e.outvars[0].aval.dtype for e in products} == {jnp.dtype(jnp.float32)}


@pytest.mark.usefixtures("float64", "walk")
def test_in_a_scan_in_a_manual_shard_map():
    mesh = make_mesh(dc=2, data=2, tensor=2)
    arrays = inputs(24, heads=4, key_heads=2, rows=8)
    segment_ids = packed(24, rows=8)
    rows, heads = PartitionSpec(("dc", "data")), PartitionSpec(("dc", "data"), None, "tensor")

    def three_layers(implementation):
        def apply(query, key, value, segment_ids):
            def layer(x, _):
                mixed = attention(x, key, value, segment_ids, implementation=implementation)
                return x + mixed, None

            return jax.lax.scan(layer, query, None, length=3)[0]

        return apply

    manual = jax.shard_map(
        three_layers("blocked"),
        mesh=mesh,
        axis_names=set(AXES),
        in_specs=(heads, heads, heads, rows),
        out_specs=heads,
        check_vma=True,
    )

    def results(function):
        output, backward = jax.vjp(lambda *x: function(*x, segment_ids), *arrays[:3])
        return (output, *backward(arrays[3]))

    assert_equal(
        jax.jit(results, static_argnums=0)(manual), results(three_layers("reference")), 1e-12
    )


@pytest.mark.usefixtures("float64")
def test_unequal_axes_of_the_inputs_agree():
    mesh = make_mesh(dc=2, data=4)
    query, key, value, cotangent = inputs(20, rows=8)
    rows, everywhere = PartitionSpec(("dc", "data")), PartitionSpec()
    one_key, one_value = key[:1], value[:1]

    def local(query, key, value, cotangent):
        def attend(query, key, value):
            keys, values = (jnp.broadcast_to(x, (1, *x.shape[1:])) for x in (key, value))
            return attention(query, keys, values, implementation="blocked")

        output, backward = jax.vjp(attend, query, key, value)
        return (output, *backward(cotangent))

    manual = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(rows, everywhere, everywhere, rows),
        out_specs=(rows, rows, everywhere, everywhere),
        check_vma=True,
    )

    def whole(query, key, value):
        keys, values = (jnp.broadcast_to(x, (8, *x.shape[1:])) for x in (key, value))
        return attention(query, keys, values, implementation="reference")

    output, backward = jax.vjp(whole, query, one_key, one_value)
    expected = (output, *backward(cotangent))
    actual = jax.jit(manual)(query, one_key, one_value, cotangent)
    assert_equal(actual, expected, 1e-12)


@pytest.mark.parametrize("length", [512, 1024, 4096])
@pytest.mark.parametrize("documents", [False, True])
def test_no_array_is_as_large_as_the_score_matrix(length, documents):
    arrays = [jax.ShapeDtypeStruct((1, length, 2, 8), jnp.float32)] * 4
    segment_ids = jax.ShapeDtypeStruct((1, length), jnp.int32) if documents else None
    program = jax.make_jaxpr(
        lambda *x: outputs_and_gradients("blocked", *x[:4], x[4] if documents else None)
    )(*arrays, segment_ids)
    shapes = [v.aval.shape for e in equations(program) for v in e.outvars]
    assert max(shape.count(length) for shape in shapes) == 1
    # The program does not grow with the square of the sequence either.
    assert len(shapes) < 4000


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"key": (2, 8, 3, 4), "value": (2, 8, 3, 4)}, "4 query heads are no multiple of 3"),
        ({"value": (2, 8, 1, 4)}, "must be"),
        ({"key": (2, 9, 2, 4), "value": (2, 9, 2, 4)}, "agree in all but the heads"),
        ({"segment_ids": (2, 9)}, "must be [B, S] = (2, 8)"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(changes, message):
    shapes = {"query": (2, 8, 4, 4), "key": (2, 8, 2, 4), "value": (2, 8, 2, 4)} | changes
    with pytest.raises(UserError) as error:
        attention(**{name: jnp.zeros(shape) for name, shape in shapes.items()})
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_mixed_dtypes_are_refused():
    query, key, value, _ = inputs(4, dtype=np.float32)
    with pytest.raises(UserError, match="one dtype"):
        attention(query, key.astype(jnp.bfloat16), value)


def equations(jaxpr):
    """Every equation of a program, those of its loops and calls included."""
    for equation in jaxpr.eqns:
        yield equation
        for parameter in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(parameter):
                yield from equations(parameter)


def _is_jaxpr(value):
    return hasattr(value, "eqns")
