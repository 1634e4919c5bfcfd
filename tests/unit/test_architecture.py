"""The map in docs/architecture.md: each owner is there, and its listed users import it."""

import re

import pytest
from support.house import REPOSITORY, imports_of, modules_of

PAGE = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
MODULES = modules_of(REPOSITORY / "geojax")


def module_of(path):
    return "geojax." + path.removesuffix(".py").replace("/", ".")


def facts():
    rows = []
    _, _, table = PAGE.partition("## Facts and their owners")
    for line in table.partition("\n## ")[0].splitlines():
        if line.startswith("| ") and "`" in line:
            fact, owner, users = (cell.strip() for cell in line.strip("|").split("|"))
            rows.append((fact, owner.strip("`"), re.findall("`([^`]+)`", users)))
    return rows


FACTS = facts()


@pytest.mark.parametrize(("fact", "owner", "users"), FACTS, ids=[fact for fact, *_ in FACTS])
def test_the_users_of_a_fact_import_its_owner(fact, owner, users):
    assert module_of(owner) in MODULES
    assert users
    package = module_of(owner).rpartition(".")[0]
    for user in users:
        imported = imports_of(MODULES[module_of(user)], MODULES)
        assert {module_of(owner), package} & imported, f"{user} does not import {owner}"


def test_the_files_to_be_read_first_are_there():
    linked = re.findall(r"\(\.\./(geojax/[^)]+)\)", PAGE)
    assert len(linked) == 9
    assert all((REPOSITORY / path).is_file() for path in linked)
