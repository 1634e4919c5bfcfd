"""The settings of a model of your own: the function that builds it, and what it is called with."""

import functools
import hashlib
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self, TypeAlias

import pydantic

from geojax.models.config import ModelConfig, family_settings
from geojax.models.lora import LoraSettings
from geojax.models.own.parts import BUILT_WITH, has_balance_loss, own_parts
from geojax.quantities import Length
from geojax.settings import Settings
from geojax.suggestions import did_you_mean


def _longest_of_function(given: Mapping[str, Any]) -> int:
    taken = inspect.signature(_function(given["module"])).parameters.get("max_position_embeddings")
    return 2**20 if taken is None or taken.default is taken.empty else taken.default


class OwnModel(Settings):
    """A model that a function of yours returns; all other keys are arguments of that function."""

    model_config = pydantic.ConfigDict(extra="allow")

    module: str = pydantic.Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$", max_length=400)
    """Function that returns a `geojax.models.Decoder`, as `mylab.models:build`. Its module is
    imported, from the working directory or from where Python finds it. A `module:Class` of
    `trackers` is the other key that runs code."""
    vocab_size: int = pydantic.Field(gt=0, le=2**24)
    """Number of tokens, which the function is called with. A run's config may leave it out; see
    `ModelConfig`."""
    max_position_embeddings: Length = pydantic.Field(default_factory=_longest_of_function)
    """Longest sequence, which the function is called with if it takes it. Default: the function's.
    """

    lora: LoraSettings | None = None
    """Low-rank adapters, which the function is called with: the `lora` of its `ModelConfig`. null:
    none."""

    # A `ModelConfig` has more parts, of which these say that there are none.
    num_nextn_predict_layers: ClassVar[int] = 0
    first_k_dense_replace: ClassVar[int] = 0
    is_random: ClassVar[bool] = True

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments that the function is called with, by name, but for `BUILT_WITH`."""
        arguments = {"vocab_size": self.vocab_size, **(self.model_extra or {})}
        taken = inspect.signature(self.function).parameters
        if "max_position_embeddings" in taken:
            arguments["max_position_embeddings"] = self.max_position_embeddings
        if self.lora is not None or "lora" in taken:
            arguments["lora"] = self.lora
        return arguments

    @property
    def function(self) -> Callable[..., Any]:
        """The function."""
        return _function(self.module)

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return own_parts(self).hidden_size

    @property
    def num_stacked_layers(self) -> int:
        """Periods of blocks, which stages share."""
        return own_parts(self).layers

    @property
    def is_moe(self) -> bool:
        """True if blocks return a balance loss."""
        return has_balance_loss(self)

    @property
    def use_router_bias(self) -> bool:
        """True if the routers of its experts have a bias for their choice."""
        configs = [config for part in own_parts(self).period for config in part.of_geojax]
        return any(config.use_router_bias for config in configs)

    @property
    def block_without_fp8(self) -> str | None:
        """A block without a layer that an FP8 recipe multiplies in; None: each has one."""
        parts = own_parts(self).period
        without = (part for part in parts if not any(x.fp8 for x in part.declared.values()))
        return next((part.kind for part in without), None)

    @property
    def head_reads_tokens(self) -> bool:
        """True if the head reads parameters of the embedding."""
        return bool(own_parts(self).head.tied)

    @property
    def base(self) -> Self:
        """The model without adapters."""
        return self if self.lora is None else self.model_copy(update={"lora": None})

    @property
    def for_evaluation(self) -> Self:
        """The model itself: its loss is the log-likelihood alone."""
        return self

    @property
    def digest(self) -> str:
        """SHA-256 of the file of `module`; "" where it has none, as in a notebook."""
        _function(self.module)  # which imports it
        path = getattr(sys.modules[self.module.partition(":")[0]], "__file__", None)
        return "" if path is None else hashlib.sha256(Path(path).read_bytes()).hexdigest()

    @pydantic.field_validator("module")
    @classmethod
    def _can_be_imported(cls, module: str) -> str:
        _function(module)
        return module

    @pydantic.model_validator(mode="after")
    def _function_takes_the_arguments(self) -> Self:
        parameters = inspect.signature(self.function).parameters
        if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
            return self
        for name in self.arguments:
            if name not in parameters or name in BUILT_WITH:
                near = did_you_mean(name, sorted(parameters.keys() - BUILT_WITH))
                raise ValueError(f"{self.module} takes no argument '{name}'; {near}")
        for name, each in parameters.items():
            if each.default is each.empty and name not in BUILT_WITH | self.arguments.keys():
                raise ValueError(f"{self.module} needs the argument '{name}'; give it as a key")
        return self


AnyModel: TypeAlias = ModelConfig | OwnModel
"""A model of one of geojax's families, or a model of your own."""


def settings_class(content: Any) -> type[ModelConfig] | type[OwnModel]:
    """Return the class that validates a mapping of a model's settings.

    Raises:
        ValueError: no family has settings of its own by the name of `model_type`.
    """
    is_own = isinstance(content, Mapping) and "module" in content
    return OwnModel if is_own else family_settings(content)


@functools.lru_cache(maxsize=64)
def _function(name: str) -> Callable[..., Any]:
    """Import a function by `module:name`.

    Raises:
        ValueError: there is no such module, or no such function in it.
    """
    module_name, _, function_name = name.partition(":")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # a module that it imports
        raise ValueError(
            f"there is no module {module_name} in {folder} or where Python looks; give its name "
            "as 'import' takes it"
        ) from None
    made = getattr(module, function_name, None)
    if not callable(made):
        functions = [each for each, value in vars(module).items() if inspect.isfunction(value)]
        raise ValueError(
            f"{module_name} has no function {function_name}; "
            f"{did_you_mean(function_name, functions)}"
        )
    function: Callable[..., Any] = made
    return function
