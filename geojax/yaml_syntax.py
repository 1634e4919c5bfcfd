"""YAML of configs: safe, without repeated keys, and with 1e-3 as a number."""

import re
from typing import Any

import yaml


class YamlError(ValueError):
    """Error for text that is not such YAML."""

    def __init__(self, problem: str, line: int | None):
        super().__init__(problem)
        self.line = line
        """Line of the error from 1; None if it is unknown."""


def parse(text: str) -> Any:
    """Parse the YAML `text`.

    Raises:
        YamlError: it is not YAML, or gives a key twice.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise YamlError(problem, mark.line + 1 if mark else None) from None


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key '{key.value}' is given twice", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


# YAML 1.1, which PyYAML follows, takes 1e-3 for a string because it has no dot.
_NUMBER = re.compile(r"^[-+]?(\d[\d_]*)(\.[\d_]*)?[eE][-+]?\d+$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+0123456789"))
