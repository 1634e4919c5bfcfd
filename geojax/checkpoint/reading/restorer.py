"""Restoring: all processes choose a checkpoint, check its files, and read what they need."""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from geojax.checkpoint import manifest
from geojax.checkpoint.agreement import first_text, text_of
from geojax.checkpoint.folder import interrupted_steps
from geojax.checkpoint.reading import choice
from geojax.checkpoint.reading.choice import SaveChoice, SavedPart, SaveKey
from geojax.checkpoint.reading.common_save import (
    HeldSave,
    SavesOfSites,
    advice,
    lacking_sites,
    newest_common,
)
from geojax.checkpoint.reading.compatibility import (
    refuse_other_arrays,
    refuse_other_model,
)
from geojax.checkpoint.reading.saved_state import Crossing, SavedState
from geojax.checkpoint.site_group import SiteGroup
from geojax.errors import UserError
from geojax.job.exit_messages import first_line
from geojax.named_arrays import is_expendable, leaves_by_name, leaves_of_parts
from geojax.quantities import quantity

_LONGEST_PROBLEM = 200
"""Letters of a part's problem, which goes to all processes beside the part's path."""


class Restored(NamedTuple):
    """A state that has been read from a checkpoint."""

    state: Any
    metadata: dict[str, Any]
    """Metadata given to the save, with "step"."""
    unusable: tuple[int, ...]
    """Newer steps that are damaged, or that not all sites have saved."""
    damaged: tuple[str, ...]
    """Parts that are damaged themselves, relative to the folder of the checkpoints."""


class _SeenPart(NamedTuple):
    """A part as a site sees it: two sites may have other files at the same path."""

    site: int
    path: str


class _DamagedPart(Exception):
    """A part whose files differ from what was written."""

    def __init__(self, part: _SeenPart, problem: str):
        super().__init__(problem)
        self.part = part


@dataclasses.dataclass
class _Damage:
    """Damage that has been found, the same on all processes."""

    parts: dict[_SeenPart, str] = dataclasses.field(default_factory=dict)
    saves: dict[SaveKey, str] = dataclasses.field(default_factory=dict)
    """Saves that could not be read although their files are as they were written."""
    verified: set[_SeenPart] = dataclasses.field(default_factory=set)
    """Parts of which this process has found its share undamaged."""


@dataclasses.dataclass(frozen=True)
class Restorer:
    """Reader of a run's checkpoints, on every process."""

    folder: Path
    """Folder of the run's checkpoints."""
    groups: Sequence[SiteGroup]
    """Sites of this run."""
    elsewhere: Sequence[str]
    """Names of further sites, with runtimes of their own, each of which reads its own part."""
    saves_of_sites: SavesOfSites | None
    """Exchange with them; None where there are none."""
    link_bytes_per_second: float | None
    """Bandwidth between sites, if it is known."""
    report: Callable[[str], None]
    """Function that is called with a line for the user."""

    def newest(self) -> dict[str, Any] | None:
        """Return the metadata of the newest checkpoint that all sites have, with "step".

        Raises:
            UserError: there are checkpoints, and none is whole.
        """
        chosen, _, _ = self._choose(_Damage())
        return None if chosen is None else _metadata(self._content_of(chosen))

    def restore(
        self,
        layouts: Any,
        *,
        model: Mapping[str, Any] | None,
        adapt: Callable[[Any, Mapping[str, str]], Any] | None,
        parts: Sequence[Any],
    ) -> Restored:
        """Read the newest checkpoint that is undamaged; see `Checkpointer.restore`."""
        damage = _Damage()
        state, read = None, None
        while True:
            chosen, problems, unusable_parts = self._choose(damage)
            if chosen is None:
                raise UserError(f"{self.folder}: holds no checkpoint")
            content = self._content_of(chosen)
            if read != chosen.key:
                state, read = None, None  # of a save that another site has found damaged
                try:
                    state = self._read(chosen, content, layouts, model, adapt, parts, damage)
                    read = chosen.key
                except _DamagedPart as found:
                    damage.parts[found.part] = str(found)
                except manifest.DamagedCheckpoint as found:
                    damage.saves[chosen.key] = str(found)
            if self._all_have_read(chosen, read):
                self._tell(problems, damage, chosen.key.step)
                return Restored(state, _metadata(content), tuple(problems), unusable_parts)

    def _all_have_read(self, chosen: SaveChoice, read: SaveKey | None) -> bool:
        """Return True if all sites have read the save that they have chosen together."""
        is_read = read == chosen.key
        if self.saves_of_sites is None:
            return is_read
        held = self.saves_of_sites([HeldSave.of(chosen)] if is_read else [])
        return all(held.values())

    def _choose(self, damage: _Damage) -> tuple[SaveChoice | None, dict[int, str], tuple[str, ...]]:
        """Choose a save with the other sites, and say why newer steps cannot be used.

        Returns:
            The save, the problems of newer steps, and the parts that are damaged themselves.

        Raises:
            UserError: there are saves, and none is whole at all sites.
        """
        seen: list[tuple[SavedPart, ...]] = []
        for group in self.groups:
            own = ""
            if group.is_primary_here:
                own = choice.to_text(choice.list_parts(self.folder, group.folder(self.folder)))
            parts = choice.from_text(text_of(group.primary, own))
            problem_of = {
                part.path: text for part, text in damage.parts.items() if part.site == len(seen)
            }
            seen.append(
                tuple(
                    part._replace(problem=problem_of.get(part.path, part.problem)) for part in parts
                )
            )
        sites = [group.name for group in self.groups]
        found = choice.restorable(seen, sites, damage.saves, self.elsewhere)
        problems = found.problems | {key.step: problem for key, problem in damage.saves.items()}
        unusable_parts = tuple(
            part.path
            for parts in seen
            for part in parts
            if part.problem or part.key in damage.saves
        )
        chosen = next(iter(found.choices), None)
        if self.saves_of_sites is not None:
            held = self.saves_of_sites(list(map(HeldSave.of, found.choices)))
            chosen = newest_common(found.choices, held)
            if chosen is None and any(held.values()):
                here = f"; {_list_of(problems)} here" if problems else ""
                raise UserError(f"{self.folder}: {advice(held)}{here}")
            problems = lacking_sites(held) | problems
        if chosen is None and problems:
            raise UserError(f"{self.folder}: holds no undamaged checkpoint: {_list_of(problems)}")
        newest = -1 if chosen is None else chosen.key.step
        unread = {key.step for key in damage.saves}
        later = {
            step: problem for step, problem in problems.items() if step > newest or step in unread
        }
        return chosen, later, unusable_parts

    def _content_of(self, chosen: SaveChoice) -> dict[str, Any]:
        """Return the manifest of a save, without its files, on every process."""
        site = next(site for site, parts in enumerate(chosen.parts_of_site) if parts)
        group = self.groups[site]
        content: dict[str, Any] = {}
        if group.is_primary_here:
            content = manifest.read(self.folder / chosen.parts_of_site[site][0].path)
            del content["files"]
        content = json.loads(text_of(group.primary, json.dumps(content)))
        return content

    def _read(
        self,
        chosen: SaveChoice,
        content: Mapping[str, Any],
        layouts: Any,
        model: Mapping[str, Any] | None,
        adapt: Callable[[Any, Mapping[str, str]], Any] | None,
        parts: Sequence[Any],
        damage: _Damage,
    ) -> Any:
        """Read the state of the save `chosen`.

        Raises:
            _DamagedPart: on every process, if any of them finds a part damaged.
            DamagedCheckpoint: likewise, if any of them cannot read it.
        """
        path = self.folder / str(chosen.key.step)
        if model is not None:
            refuse_other_model(path, content["metadata"].get("model"), model)
        if adapt is not None:
            layouts, *parts = (adapt(each, content["arrays"]) for each in (layouts, *parts))
        named = leaves_by_name(layouts)
        refuse_other_arrays(path, content["arrays"], leaves_of_parts(parts) | named)
        self._verify(chosen, damage)
        saved = SavedState(self.folder, content, chosen.parts_of_site, self.groups)
        expendable = {name: each for name, each in named.items() if is_expendable(name)}
        needed = {name: each for name, each in named.items() if name not in expendable}
        if self.elsewhere and (lacking := first_text(saved.first_lacking(needed))):
            raise UserError(
                f"{path}: site {self.groups[0].name} now has other layers and does not see all of "
                f"{lacking}. Copy the folders of the other sites beside its own, or restore the "
                "earlier pipeline.layers"
            )
        if saved.unseen_sites and (anew := saved.first_lacking(expendable)):
            self.report(
                f"{path}: the part of site {' and '.join(saved.unseen_sites)} is not here; its "
                f"{anew.partition('.')[0]} begins anew"
            )
        self._announce(saved.crossing(named))
        problem, leaves = None, []
        try:
            leaves = [saved.read(name, layout) for name, layout in named.items()]
        except (OSError, ValueError) as error:
            problem = first_line(error)
        if problem := first_text(problem):
            raise manifest.DamagedCheckpoint(problem)
        return jax.tree.unflatten(jax.tree.structure(layouts), leaves)

    def _verify(self, chosen: SaveChoice, damage: _Damage) -> None:
        """Compare the files of a save with their checksums, each process its share.

        Raises:
            _DamagedPart: on every process, if any of them finds one damaged.
        """
        finding = None
        for site, (group, parts) in enumerate(zip(self.groups, chosen.parts_of_site, strict=True)):
            if not group.is_here:
                continue
            process = group.processes.index(jax.process_index())
            for part in (_SeenPart(site, each.path) for each in parts):
                if part in damage.verified:
                    continue
                path = self.folder / part.path
                try:
                    files = manifest.read(path)["files"]
                    manifest.verify(path, files, process=process, processes=len(group.processes))
                    damage.verified.add(part)
                except (manifest.DamagedCheckpoint, OSError) as error:
                    problem = first_line(error)[:_LONGEST_PROBLEM]
                    finding = json.dumps([*part, problem], ensure_ascii=False)
        if finding := first_text(finding):
            site, path, problem = json.loads(finding)
            raise _DamagedPart(_SeenPart(site, path), problem)

    def _announce(self, crossing: Crossing) -> None:
        """Say what a restore brings from other sites, and how long that takes."""
        if crossing.link == crossing.files == 0:
            return
        amount = " and ".join(
            f"{quantity(count, 'B')} {way}"
            for count, way in ((crossing.link, "over the link"), (crossing.files, "from its files"))
            if count
        )
        duration = "no topology tells how fast the link is"
        if self.link_bytes_per_second:
            seconds = sum(crossing) / self.link_bytes_per_second
            rate = quantity(self.link_bytes_per_second, "B/s")
            duration = f"at {rate} between sites that takes {quantity(seconds, 's')}"
        self.report(
            f"restoring onto another layout: a site gets {amount} of another site's checkpoint; "
            f"{duration}"
        )

    def _tell(self, problems: dict[int, str], damage: _Damage, restored: int) -> None:
        for path, problem in {part.path: text for part, text in damage.parts.items()}.items():
            if Path(path).name == str(restored):
                self.report(
                    f"{self.folder / path}: is damaged ({problem}); its site reads the part "
                    "of another, which holds the same"
                )
        problems = dict(problems)
        here = (group for group in self.groups if group.is_here)
        for group in here:
            for step in interrupted_steps(group.folder(self.folder)):
                if step > restored:
                    problems.setdefault(step, "its save was interrupted")
        if problems:
            self.report(f"{self.folder}: {_list_of(problems)}; restoring step {restored} instead")


def _metadata(content: Mapping[str, Any]) -> dict[str, Any]:
    return {**content["metadata"], "step": content["step"]}


def _list_of(problems: dict[int, str]) -> str:
    newest_first = sorted(problems.items(), reverse=True)
    return ", ".join(f"step {step} is not whole ({problem})" for step, problem in newest_first)
