"""Write docs/config-reference.md: every key of a run's config, its type, default and meaning.

    python docs/config_reference.py

The text comes from the settings classes, so the page and the code agree. A test fails when the
committed page differs from what this script writes.
"""

from pathlib import Path

from geojax.cli.config_keys import Section, config_sections

PAGE = Path(__file__).resolve().parent / "config-reference.md"
OPENING = """# Config reference

The tables list every key of the YAML file that `geojax train`, `plan` and `probe` read.
Write a key as `--section.key value` on their command lines.
`geojax train --help SECTION` prints the keys of a section.
`python docs/config_reference.py` writes this page from the settings classes.
"""


def of_section(section: Section) -> str:
    """The heading of a section, and the table of its keys."""
    lines = [f"## `{section.key}`", "", section.meaning, ""] if section.key else []
    if section.settings:
        lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
        for setting in section.settings:
            key = setting.key.removeprefix(f"{section.key}.")
            meaning = setting.meaning.replace("|", "\\|")
            lines.append(f"| `{key}` | {setting.type} | {setting.default} | {meaning} |")
        lines.append("")
    return "\n".join(lines)


def page() -> str:
    """The whole page."""
    return "\n".join([OPENING, *map(of_section, config_sections())])


if __name__ == "__main__":
    PAGE.write_text(page())
