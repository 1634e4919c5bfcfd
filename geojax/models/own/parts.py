"""The parts of a model of your own: modules without arrays, and what they declare.

A part is split once. A layer's pure function merges it with weights, and with random streams whose
keys come from the context: seed, step, layer and sequence. Every layout draws the same masks.
"""

import dataclasses
import functools
import inspect
import zlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from geojax.errors import UserError
from geojax.models.block import Block
from geojax.models.config import ModelConfig
from geojax.models.context import ON_ONE_DEVICE, ComputeSettings, LayerContext
from geojax.models.declaration import Declaration, Parameters, stacked
from geojax.models.layers import Amax
from geojax.models.own.decoder import Decoder
from geojax.models.own.loops import with_varying_loops
from geojax.models.parallel.parallelism import Parallelism

KINDS = ("matrix", "table", "vector")
"""Kinds that a parameter may declare."""

_OF_SEQUENCES = ("sequence_indices", "positions", "segment_ids")
"""Fields of the context that have a dim of sequences."""

Path = tuple[Any, ...]
"""Attributes and places in lists that lead to a variable."""


class ModelSource(Hashable, Protocol):
    """The function that returns a model."""

    @property
    def module(self) -> str:
        """Its name for messages."""

    @property
    def function(self) -> Callable[..., Any]:
        """The function."""

    @property
    def arguments(self) -> Mapping[str, Any]:
        """Its arguments, but for `BUILT_WITH`."""


BUILT_WITH = frozenset({"rngs", "compute"})
"""Arguments that the function is given where it has them: an `nnx.Rngs`, and `ComputeSettings`."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A module of the model, without arrays."""

    name: str
    """Its place in the `Decoder`, such as blocks.0."""
    module: type[nnx.Module]
    """Its class."""
    training: nnx.GraphDef[Any]
    """Its graph where the context has a key."""
    evaluation: nnx.GraphDef[Any]
    """Its graph where there is no key: nothing is random."""
    declared: Mapping[Path, Declaration]
    """Its parameters."""
    streams: Mapping[Path, bool]
    """The variables of its random streams: True for keys, False for counts."""
    tied: Mapping[Path, Path]
    """Parameters of the embedding, by those that stand for them here."""
    takes_context: bool
    """True if it is called with the context."""
    supports: frozenset[str]
    """Kinds of parallelism inside a layer that its code is written for."""
    of_geojax: tuple[ModelConfig, ...]
    """Settings of the layers of geojax in it."""
    histories: tuple[Path, ...]
    """Magnitudes of the steps before that its linear layers read, by an FP8 recipe that needs them.
    """

    @property
    def kind(self) -> str:
        """The class of the module, and its place."""
        return f"{self.name} ({self.module.__name__})"

    @property
    def parameters(self) -> Parameters:
        """The `Declaration` of each parameter that is the part's own."""
        return _tree({path: each for path, each in self.declared.items() if path not in self.tied})

    def __call__(
        self,
        weights: Parameters,
        x: jax.Array,
        context: LayerContext,
        tables: Parameters | None = None,
    ) -> Any:
        """Call the module with values of its parameters, and of the embedding's it is tied to."""
        if context.dropout_key is None or not self.streams:
            return self._called(weights, x, context, tables)

        def of_sequence(x: jax.Array, own: LayerContext) -> Any:
            assert own.dropout_key is not None
            assert own.sequence_indices is not None
            key = jax.random.fold_in(own.dropout_key, own.sequence_indices)
            own = own._replace(dropout_key=key)
            own = own._replace(**{name: getattr(own, name)[None] for name in _OF_SEQUENCES})
            return jax.tree.map(lambda leaf: leaf[0], self._called(weights, x[None], own, tables))

        axes: Any = [0 if name in _OF_SEQUENCES else None for name in context._fields]
        return jax.vmap(of_sequence, in_axes=(0, LayerContext(*axes)))(x, context)

    def _called(
        self, weights: Parameters, x: jax.Array, context: LayerContext, tables: Parameters | None
    ) -> Any:
        # What supports an axis calls collectives, and knows of the mesh.
        call: Any = self._of_arrays if self.supports else with_varying_loops(self._of_arrays)
        return call(weights, x, context, tables)

    def _of_arrays(
        self, weights: Parameters, x: jax.Array, context: LayerContext, tables: Parameters | None
    ) -> Any:
        key = jax.random.key(0) if context.key is None else context.key
        values = {path: _leaf(weights, path) for path in self.declared if path not in self.tied}
        values |= {path: _leaf(weights, path) for path in self.histories}
        values |= {path: _leaf(tables or {}, of_table) for path, of_table in self.tied.items()}
        for number, (path, is_key) in enumerate(self.streams.items()):
            values[path] = jax.random.fold_in(key, number) if is_key else jnp.uint32(0)
        graph = self.evaluation if context.key is None else self.training
        module: Any = nnx.merge(graph, nnx.from_flat_state(values), copy=True)
        return module(x, context=context) if self.takes_context else module(x)


@dataclasses.dataclass(frozen=True)
class OwnParts:
    """The parts of a model; its blocks repeat after a period, which is one layer of geojax."""

    embedding: Part
    blocks: tuple[Part, ...]
    layers: int
    """Number of periods."""
    head: Part
    hidden_size: int
    """Width of the stream."""

    @property
    def period(self) -> tuple[Part, ...]:
        """The blocks of one layer of geojax."""
        return self.blocks[: len(self.blocks) // self.layers]

    def of_period(self, trees: Sequence[Parameters]) -> Parameters:
        """Return the tree of a period's parameters by those of its blocks."""
        if len(trees) == 1:
            return trees[0]
        return {str(number): tree for number, tree in enumerate(trees)}

    def in_period(self, tree: Parameters) -> Sequence[Parameters]:
        """Return the tree of each block of a period; inverts `of_period`."""
        if len(self.period) == 1:
            return [tree]
        return [tree[str(number)] for number in range(len(self.period))]

    def check(self, parallelism: Parallelism) -> None:
        """Refuse to shard blocks over ranks that they were not written for.

        Ranks of `expert` share sequences too, so that only some blocks need to know of them.

        Raises:
            UserError: a block does not say that it supports an axis.
        """
        axes = {axis: getattr(parallelism, axis) > 1 for axis in ("tensor", "context", "expert")}
        axes["sequence"] = parallelism.sequence and parallelism.tensor > 1
        for axis in sorted(axis for axis, is_used in axes.items() if is_used):
            lacking = [part for part in self.period if axis not in part.supports]
            if lacking and (axis != "expert" or len(lacking) == len(self.period)):
                unset = "false" if axis == "sequence" else "1"
                raise UserError(
                    f"{axis} parallelism: {lacking[0].kind} does not say that it supports it; set "
                    f"it to {unset}, or write the block's collectives and set supports = "
                    f"{{'{axis}'}}"
                )

    @property
    def declarations(self) -> Parameters:
        """The `Declaration` of each parameter."""
        of_period = self.of_period([part.parameters for part in self.period])
        return {
            "embedding": self.embedding.parameters,
            "layers": stacked(of_period, self.layers),
            "head": self.head.parameters,
        }


@functools.lru_cache(maxsize=32)
def own_parts(model: ModelSource, compute: ComputeSettings = ON_ONE_DEVICE) -> OwnParts:
    """Build the parts of a model; no device is touched.

    Raises:
        UserError: the function returns no `Decoder`, or a part has what cannot be trained.
    """
    decoder = nnx.eval_shape(lambda: built(model, compute, jax.random.key(0)))
    _refuse_shared_blocks(decoder, model)
    embedding = _part("embedding", decoder.embedding, model)
    tables = {id(variable): path for path, variable in _variables(decoder.embedding)}
    blocks = [_part(f"blocks.{number}", each, model) for number, each in enumerate(decoder.blocks)]
    if not blocks:
        raise UserError(f"model.module {model.module}: the Decoder has no blocks; it needs one")
    head = _part("head", decoder.head, model, tables)
    period = next(size for size in range(1, len(blocks) + 1) if _repeats(blocks, size))
    layers, hidden = len(blocks) // period, _hidden_size(embedding, model)
    return OwnParts(embedding, tuple(blocks), layers, head, hidden)


@functools.lru_cache(maxsize=32)
def has_balance_loss(model: ModelSource) -> bool:
    """Return True if a block returns a balance loss beside the stream; touches no device."""
    parts = own_parts(model)
    x = jax.ShapeDtypeStruct((1, 8, parts.hidden_size), jnp.float32)
    return any(
        isinstance(made := _shapes_of(part, x), tuple) and len(made) > 1 and made[1] is not None
        for part in parts.period
    )


def built(model: ModelSource, compute: ComputeSettings, key: jax.Array) -> Decoder:
    """Call the model's function, with random streams of `key`.

    Raises:
        UserError: it returns something else.
    """
    with_these = {"rngs": nnx.Rngs(key), "compute": compute}
    taken = with_these.keys() & inspect.signature(model.function).parameters.keys()
    with nnx.use_eager_sharding(False):
        made = model.function(**model.arguments, **{name: with_these[name] for name in taken})
    if not isinstance(made, Decoder):
        raise UserError(
            f"model.module {model.module}: returns {type(made).__name__}; a geojax.models.Decoder "
            "would do"
        )
    return made


def own_initial_values(model: ModelSource, key: jax.Array) -> Parameters:
    """Draw the initial parameters of a model, in the tree of its declarations."""
    parts, decoder = own_parts(model), built(model, ON_ONE_DEVICE, key)
    blocks = [
        _drawn(part, block, key) for part, block in zip(parts.blocks, decoder.blocks, strict=True)
    ]
    size = len(parts.period)
    by_place = [
        jax.tree.map(lambda *layers: jnp.stack(layers), *blocks[place::size])
        for place in range(size)
    ]
    return {
        "embedding": _drawn(parts.embedding, decoder.embedding, key),
        "layers": parts.of_period(by_place),
        "head": _drawn(parts.head, decoder.head, key),
    }


def _drawn(part: Part, module: nnx.Module, key: jax.Array) -> Parameters:
    """Return the values of a part's own parameters; those of geojax's modules are drawn here."""
    values = {}
    for path, variable in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        if path in part.tied:
            continue
        value = variable.get_value()
        if isinstance(value, jax.ShapeDtypeStruct):
            name = f"{part.name}.{'.'.join(map(str, path))}"
            leaf_key = jax.random.fold_in(key, np.uint32(zlib.crc32(name.encode())))
            value = part.declared[path].initial(leaf_key, value.shape)
        values[path] = value
    return _tree(values)


def _part(
    name: str, module: nnx.Module, model: ModelSource, tables: Mapping[int, Path] | None = None
) -> Part:
    """Split a module; `tables` are parameters that it may be tied to, by the object's number."""
    where = f"model.module {model.module}: {name} ({type(module).__name__})"
    if not isinstance(module, nnx.Module):
        raise UserError(f"{where} is no nnx.Module; wrap Linen ones in nnx.bridge.ToNNX")
    states: tuple[Any, ...] = nnx.split(module, nnx.Param, nnx.RngState, Amax, ...)
    graph, parameters, random, histories, others = states
    for path, variable in nnx.to_flat_state(others):
        raise UserError(
            f"{where} has {'.'.join(map(str, path))}, a {type(variable).__name__}; only nnx.Param "
            "is trained and saved, so batch statistics, caches and other state cannot be"
        )
    declared = {path: Declaration.of(each) for path, each in nnx.to_flat_state(parameters)}
    for path, variable in nnx.to_flat_state(parameters):
        if not jnp.issubdtype(dtype := variable.get_value().dtype, jnp.floating):
            raise UserError(
                f"{where} has {'.'.join(map(str, path))} of {dtype}; a parameter is of "
                "floating-point numbers"
            )
        kind, shape = declared[path].kind, declared[path].shape
        if kind not in (None, *KINDS, "adapter") or (kind in KINDS[:2] and len(shape) < 2):
            raise UserError(
                f"{where} has {'.'.join(map(str, path))} of shape {shape} with kind={kind!r}; "
                "matrix and table are of two dims or more, and others vector"
            )
    shared = tables or {}
    found = ((path, shared.get(id(variable))) for path, variable in _variables(module))
    tied = {path: of_table for path, of_table in found if of_table is not None}
    evaluated = nnx.merge(graph, parameters, random, histories, copy=True)
    evaluated.eval()
    return Part(
        name,
        type(module),
        graph,
        nnx.graphdef(evaluated),
        declared,
        {path: isinstance(each, nnx.RngKey) for path, each in nnx.to_flat_state(random)},
        tied,
        "context" in inspect.signature(type(module).__call__).parameters,
        frozenset(getattr(type(module), "supports", ())),
        tuple(each.config for _, each in nnx.iter_graph(module) if isinstance(each, Block)),
        tuple(path for path, _ in nnx.to_flat_state(histories)),
    )


def _variables(module: nnx.Module) -> Iterator[tuple[Path, nnx.Param]]:
    """Yield the parameters of a module, with their paths."""
    for path, node in nnx.iter_graph(module):
        if isinstance(node, nnx.Param):
            yield path, node


def _refuse_shared_blocks(decoder: Decoder, model: ModelSource) -> None:
    seen: dict[int, str] = {}
    for number, block in enumerate(decoder.blocks):
        for path, variable in _variables(block):
            name = f"blocks.{number}.{'.'.join(map(str, path))}"
            if (other := seen.setdefault(id(variable), name)) != name:
                raise UserError(
                    f"model.module {model.module}: {other} and {name} are one parameter; blocks "
                    "have parameters of their own"
                )


def _repeats(blocks: list[Part], size: int) -> bool:
    """Return True if the blocks are equal after `size` of them."""
    unnamed = [dataclasses.replace(block, name="") for block in blocks]
    return len(blocks) % size == 0 and unnamed[size:] == unnamed[:-size]


def _hidden_size(embedding: Part, model: ModelSource) -> int:
    made = _shapes_of(embedding, tokens := jax.ShapeDtypeStruct((1, 8), jnp.int32))
    if getattr(made, "ndim", 0) != 3 or made.shape[:2] != tokens.shape:
        raise UserError(
            f"model.module {model.module}: {embedding.kind} maps tokens {tokens.shape} to "
            f"{getattr(made, 'shape', type(made).__name__)}; [batch, sequence, hidden] would do"
        )
    return int(made.shape[2])


def _shapes_of(part: Part, x: jax.ShapeDtypeStruct) -> Any:
    """Return the shapes that a part makes of `x` [1, S, ...], on one device."""
    weights = jax.tree.map(
        lambda each: jax.ShapeDtypeStruct(each.shape, jnp.float32), part.parameters
    )
    tokens = jax.ShapeDtypeStruct(x.shape[:2], jnp.int32)

    def call(weights: Parameters, x: jax.Array, tokens: jax.Array) -> Any:
        context = LayerContext(
            tokens, None, None, None, tokens[0], positions=tokens, layer=jnp.int32(0)
        )
        return part(weights, x, context)

    return jax.eval_shape(call, weights, x, tokens)


def _tree(flat: Mapping[Path, Any]) -> Parameters:
    """Nest values by their paths, whose entries become texts."""
    tree: Parameters = {}
    for path, value in flat.items():
        below = tree
        for entry in path[:-1]:
            below = below.setdefault(str(entry), {})
        below[str(path[-1])] = value
    return tree


def _leaf(tree: Parameters, path: Path) -> Any:
    for entry in path:
        tree = tree[str(entry)]
    return tree
