"""What the rooms of the package may reach, and that no fact has two classes."""

import ast
import collections

from support.house import REPOSITORY, lines_of, modules_of, nodes_of, reachable, shared_fields

MODULES = modules_of(REPOSITORY / "geojax")
REACHED_BY_TRAINING = 37_606
"""Most lines of code that `geojax.train` reaches."""
HANDED_TO_TRAINING = ("geojax.planner", "geojax.pipeline.simulation", "geojax.hlo")
"""Rooms that a run reaches by the functions that it is handed alone (`geojax.train.services`)."""
PAIRS_THAT_SHARE_FIELDS = 0
CLASSES_OF_ONE_NAME = 0


def test_training_reaches_no_more_than_it_did():
    reached = reachable(MODULES, "geojax.train")
    assert lines_of(MODULES, reached) <= REACHED_BY_TRAINING
    assert [name for name in reached if name.startswith(HANDED_TO_TRAINING)] == []


def test_few_classes_share_five_fields():
    pairs = shared_fields(MODULES)
    assert len(pairs) <= PAIRS_THAT_SHARE_FIELDS, "\n".join(map(str, pairs))


def test_a_class_name_stands_once():
    places = collections.defaultdict(list)
    for module, path in MODULES.items():
        for node in nodes_of(path):
            derived = {ast.unparse(base).rpartition(".")[2] for base in getattr(node, "bases", [])}
            if isinstance(node, ast.ClassDef) and node.name not in derived:
                places[node.name].append(module)
    several = {name: modules for name, modules in places.items() if len(modules) > 1}
    assert len(several) <= CLASSES_OF_ONE_NAME, several
