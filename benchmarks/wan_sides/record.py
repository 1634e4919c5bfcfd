"""What has been measured so far, in a JSON file that grows cell by cell."""

import json
import os
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

from geojax.errors import UserError
from wan_sides import work
from wan_sides.contestants import Contestant

LOSS_TOLERANCE = 1e-4


class Record:
    """The cells of all rows of the benchmark: a row is a link, a cell a contestant over it."""

    def __init__(self, path: Path, settings: dict[str, Any]):
        """Begin, or go on where the file at `path` ends.

        Args:
            path: of the file.
            settings: how cells are measured; those of one file are all measured alike.

        Raises:
            UserError: the file's cells were measured with other settings.
        """
        self._path = path
        self._content: dict[str, Any] = {
            "commands": [],
            "machine": {"processor": _processor(), "cores": len(os.sched_getaffinity(0))},
            "python": platform.python_version(),
            "settings": settings | _what_is_trained(),
            "rows": {},
        }
        if path.exists():
            found = json.loads(path.read_text())
            if found["settings"] != self._content["settings"]:
                raise UserError(
                    f"{path} holds cells that were measured otherwise (model, rounds or steps): "
                    "give another --output, or remove it"
                )
            self._content = found
        command = shlex.join(["python", *sys.argv])
        if command not in self._content["commands"]:
            self._content["commands"].append(command)

    @property
    def rows(self) -> dict[str, list[dict[str, Any]]]:
        """The cells of each row, by its title."""
        rows: dict[str, list[dict[str, Any]]] = self._content["rows"]
        return rows

    def ordered(
        self, rows: list[str], contestants: list[Contestant]
    ) -> dict[str, list[dict[str, Any]]]:
        """The cells in the order of `rows` and `contestants`, whenever they were measured."""
        order = {(each.name, each.variant): place for place, each in enumerate(contestants)}
        return {
            row: sorted(self.rows[row], key=lambda cell: order[cell["name"], cell["variant"]])
            for row in rows
            if row in self.rows
        }

    def missing(self, row: str, contestants: list[Contestant]) -> list[Contestant]:
        """Those without a cell in that row."""
        cells = self.rows.get(row, [])
        done = {(cell["name"], cell["variant"]) for cell in cells}
        return [each for each in contestants if (each.name, each.variant) not in done]

    def add(self, row: str, contestant: Contestant, cell: dict[str, Any]) -> None:
        """Write a cell down."""
        fields = ("name", "variant", "role", "rounded")
        named = cell | {field: getattr(contestant, field) for field in fields}
        named["model"] = contestant.settings.get("model")
        self.rows.setdefault(row, []).append(named)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        draft = self._path.with_suffix(".draft")
        draft.write_text(json.dumps(self._content, indent=1) + "\n")
        os.replace(draft, self._path)

    def disagreement(self, contestant: Contestant, losses: list[float]) -> str | None:
        """Whose losses differ from these, in words; None: nobody's.

        Of a contestant that rounds gradients only the loss before its first update is compared.
        """
        compared = 1 if contestant.rounded else len(losses)
        for cell in (cell for cells in self.rows.values() for cell in cells):
            if cell["rounded"] or cell.get("model") != contestant.settings.get("model"):
                continue
            pairs = zip(losses[:compared], cell["losses"], strict=False)
            if not all(abs(own - other) <= LOSS_TOLERANCE for own, other in pairs):
                return f"its losses {losses} are not those of {cell['name']}, {cell['losses']}"
        return None


def _what_is_trained() -> dict[str, Any]:
    return {
        "model": work.MODEL,
        "parameters": work.parameter_count(),
        "rows": work.ROWS,
        "sequence": work.SEQUENCE,
        "microbatches_of_pipelines": work.MICROBATCHES,
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()
