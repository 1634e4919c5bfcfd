"""Parameter groups: leaves with a learning rate, a weight decay or an optimizer of their own.

Every leaf has a dotted name, as in checkpoints (`layers.attention.query.kernel`). The first group
whose pattern is found in it gives its settings; what a group leaves out is the optimizer's.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import optax
import pydantic

from geojax.errors import UserError
from geojax.models import is_matrix_or_table
from geojax.named_arrays import leaf_name
from geojax.optim.registry import FALLBACK, OptimizerName, optimizer_entry
from geojax.optim.skipped_steps import SkipAwareTransformation, keep_on_skipped_steps
from geojax.settings import Settings


class ParameterGroup(Settings):
    """The leaves whose names a pattern is found in, and what is their own."""

    pattern: str = pydantic.Field(min_length=1, max_length=1000)
    """Regular expression that is searched in a parameter's name, such as
    `layers.attention.query.kernel` or `embedding.tokens.embedding`."""

    learning_rate_factor: float = pydantic.Field(default=1.0, ge=0, le=1e6)
    """Factor of the learning rate; 0 freezes the parameters."""

    weight_decay: float | None = pydantic.Field(default=None, ge=0, le=100)
    """Weight decay. null: the optimizer's; norms and biases have none."""

    optimizer: OptimizerName | None = None
    """Optimizer of these parameters. null: the run's optimizer. AdamW takes parameters that the
    optimizer cannot, such as biases in a group with Muon."""

    @pydantic.field_validator("pattern")
    @classmethod
    def _is_an_expression(cls, value: str) -> str:
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"'{value}' is no regular expression ({error})") from None
        return value

    def has(self, name: str) -> bool:
        """Return True if the parameter `name` is in the group."""
        return re.search(self.pattern, name) is not None


class LeafSettings(NamedTuple):
    """The settings of one parameter."""

    optimizer: str
    weight_decay: float
    learning_rate_factor: float


def leaf_settings(
    name: str, groups: Iterable[ParameterGroup], *, optimizer: str, weight_decay: float
) -> LeafSettings:
    """Return the settings of the parameter `name`.

    Args:
        name: dotted name.
        groups: the groups, the first of which that has the parameter counts.
        optimizer: the optimizer of a parameter in no group.
        weight_decay: its weight decay, if it is a matrix or a table.
    """
    own = next((group for group in groups if group.has(name)), None)
    decay = weight_decay if is_matrix_or_table(name) else 0.0
    chosen = optimizer if own is None or own.optimizer is None else own.optimizer
    takes = optimizer_entry(chosen).takes
    if takes is not None and not takes(name):
        chosen = FALLBACK
    if own is None:
        return LeafSettings(chosen, decay, 1.0)
    return LeafSettings(
        chosen,
        decay if own.weight_decay is None else own.weight_decay,
        own.learning_rate_factor,
    )


def check_groups(groups: Iterable[ParameterGroup], parameters: Any) -> None:
    """Check that each group has a parameter of a tree.

    Raises:
        UserError: one has none.
    """
    names = [leaf_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(parameters)]
    for group in groups:
        if not any(map(group.has, names)):
            raise UserError(
                f"optimizer.groups: the pattern '{group.pattern}' is in no parameter's name; "
                f"names are as {names[0]} and {names[-1]}"
            )


def decay_weights(rate_of: Callable[[str], float]) -> optax.GradientTransformation:
    """Add to each update its parameter times the rate of its name."""

    def update(updates: Any, state: Any, parameters: Any = None) -> tuple[Any, Any]:
        def decay(path: Any, update: jax.Array, parameter: jax.Array) -> jax.Array:
            rate = rate_of(leaf_name(path))
            return update + rate * parameter if rate else update

        return jax.tree_util.tree_map_with_path(decay, updates, parameters), state

    return optax.GradientTransformation(lambda parameters: optax.EmptyState(), update)


def scale_leaves(factor_of: Callable[[str], float]) -> optax.GradientTransformation:
    """Multiply each update with the factor of its parameter's name."""

    def update(updates: Any, state: Any, parameters: Any = None) -> tuple[Any, Any]:
        def scale(path: Any, update: jax.Array) -> jax.Array:
            factor = factor_of(leaf_name(path))
            return update if factor == 1 else factor * update

        return jax.tree_util.tree_map_with_path(scale, updates), state

    return optax.GradientTransformation(lambda parameters: optax.EmptyState(), update)


def divide_leaves(
    transformations: Mapping[str, optax.GradientTransformation], label_of: Callable[[str], str]
) -> SkipAwareTransformation:
    """Let each transformation update the leaves whose names have its label.

    Its state is a dict by label. In the trees that a transformation gets, the parameters and the
    `layouts` among them, the leaves of the others are None, as frozen ones are anyway. Unlike
    `optax.partition` it leaves each transformation to keep its own state on a skipped step.
    """
    aware = {label: keep_on_skipped_steps(each) for label, each in transformations.items()}

    def only(label: str, tree: Any) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: leaf if label_of(leaf_name(path)) == label else None, tree
        )

    def init(parameters: Any) -> dict[str, Any]:
        return {label: each.init(only(label, parameters)) for label, each in aware.items()}

    def update(
        gradients: Any,
        state: dict[str, Any],
        parameters: Any = None,
        *,
        layouts: Any = None,
        **extra: Any,
    ) -> tuple[Any, dict[str, Any]]:
        made, states = [], {}
        for label, each in aware.items():
            own = {"layouts": None if layouts is None else only(label, layouts)}
            updates, states[label] = each.update(
                only(label, gradients), state[label], only(label, parameters), **own, **extra
            )
            made.append(updates)
        joined = jax.tree.map(
            lambda *found: next((leaf for leaf in found if leaf is not None), None),
            *made,
            is_leaf=lambda leaf: leaf is None,
        )
        return joined, states

    return SkipAwareTransformation(init, update)
