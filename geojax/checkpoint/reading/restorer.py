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
    AgreedSave,
    HeldSave,
    SavesOfSites,
    advice,
    agreed_save,
    lacking_sites,
)
from geojax.checkpoint.reading.compatibility import refuse_other_arrays, refuse_other_model
from geojax.checkpoint.reading.saved_state import Crossing, SavedState
from geojax.checkpoint.site_group import SiteGroup
from geojax.errors import UserError
from geojax.job.exit_messages import first_line
from geojax.named_arrays import ERROR_FEEDBACK, is_expendable, leaves_by_name, leaves_of_parts
from geojax.quantities import quantity
from geojax.sharding import bytes_per_device
from geojax.sharding.leaf_layouts import LeafLayout

_LONGEST_PROBLEM = 200
"""Letters of a part's problem, which goes to all processes beside the part's path."""


class Restored(NamedTuple):
    """A state that has been read from a checkpoint."""

    state: Any
    metadata: dict[str, Any]
    """Metadata given to the save, with "step"."""
    membership_id: int
    """Record of who took part when it was saved; 0: all sites, or there was none."""
    unusable: tuple[int, ...]
    """Later steps that are damaged, or that the sites do not go on from."""
    damaged: tuple[str, ...]
    """Parts that are damaged themselves, relative to the folder of the checkpoints."""


class _Chosen(NamedTuple):
    """A save that all sites restore."""

    choice: SaveChoice | None
    """The save as this site sees it; None: it takes the state from another site."""
    agreed: AgreedSave | None
    """The save on which the sites have agreed; None: there are no others."""

    @property
    def step(self) -> int:
        """Steps in the state."""
        if self.agreed is not None:
            return self.agreed.step
        assert self.choice is not None, "a site alone reads its own"
        return self.choice.key.step

    @property
    def membership_id(self) -> int:
        """Record of who took part when it was saved; 0: all sites, or there was none."""
        if self.agreed is not None:
            return self.agreed.membership_id
        assert self.choice is not None, "a site alone reads its own"
        return self.choice.membership_id

    @property
    def is_shared(self) -> bool:
        """True if some site takes the state from another one."""
        return self.agreed is not None and bool(self.agreed.takers)


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
        """Return the metadata of the checkpoint that all sites restore, with "step".

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
        leaves: list[jax.Array] | None = None
        read: SaveKey | None = None
        while True:
            chosen, problems, unusable_parts = self._choose(damage)
            if chosen is None:
                raise UserError(f"{self.folder}: holds no checkpoint")
            content, choice = self._content_of(chosen), chosen.choice
            saved = self._saved_layouts(content, layouts, model, adapt, parts)
            if choice is not None and read != choice.key:
                leaves, read = None, None  # of a save that another site has found damaged
                try:
                    leaves = self._read(choice, content, leaves_by_name(saved), damage)
                    read = choice.key
                except _DamagedPart as found:
                    damage.parts[found.part] = str(found)
                except manifest.DamagedCheckpoint as found:
                    damage.saves[choice.key] = str(found)
            if self._all_have_read(choice, read):
                break
        self._tell(problems, damage, chosen.step)
        if chosen.is_shared:
            leaves = self._shared(chosen, content, leaves_by_name(saved), leaves)
        assert leaves is not None, "the save was read or taken from another site"
        state = jax.tree.unflatten(jax.tree.structure(saved), leaves)
        unusable = tuple(problems), unusable_parts
        return Restored(state, _metadata(content), chosen.membership_id, *unusable)

    def _all_have_read(self, choice: SaveChoice | None, read: SaveKey | None) -> bool:
        """Return True if all sites that have the save that all have chosen have read it."""
        is_read = choice is None or read == choice.key
        if self.saves_of_sites is None:
            return is_read
        done = HeldSave(0, 0, has_all=False, membership_id=0)
        return all(self.saves_of_sites.held([done] if is_read else []).values())

    def _choose(self, damage: _Damage) -> tuple[_Chosen | None, dict[int, str], tuple[str, ...]]:
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
        chosen = None
        if self.saves_of_sites is not None:
            held = self.saves_of_sites.held(list(map(HeldSave.of, found.choices)))
            agreed = agreed_save(held, takes_over=self.saves_of_sites.takes_over)
            if agreed is None and any(held.values()):
                too = f"; {_list_of(problems)} here" if problems else ""
                raise UserError(f"{self.folder}: {advice(held)}{too}")
            if agreed is not None:
                here = (each for each in found.choices if HeldSave.of(each).key == agreed.key)
                chosen = _Chosen(next(here, None), agreed)
            problems = lacking_sites(held) | problems
        elif found.choices:
            chosen = _Chosen(found.choices[0], None)
        if chosen is None and problems:
            raise UserError(f"{self.folder}: holds no undamaged checkpoint: {_list_of(problems)}")
        newest = -1 if chosen is None else chosen.step
        for each in found.choices:
            if each.key.step > newest:
                problems.setdefault(each.key.step, "the sites went on from an earlier step since")
        unread = {key.step for key in damage.saves}
        later = {
            step: problem for step, problem in problems.items() if step > newest or step in unread
        }
        return chosen, later, unusable_parts

    def _content_of(self, chosen: _Chosen) -> dict[str, Any]:
        """Return the manifest of a save, without its files, on every process."""
        text = "{}"
        if (choice := chosen.choice) is not None:
            site = next(site for site, parts in enumerate(choice.parts_of_site) if parts)
            group = self.groups[site]
            if group.is_primary_here:
                content = manifest.read(self.folder / choice.parts_of_site[site][0].path)
                del content["files"]
                text = json.dumps(content)
            text = text_of(group.primary, text)
        if chosen.is_shared:
            assert self.saves_of_sites is not None, "it is shared with other sites"
            assert chosen.agreed is not None, "the sites have agreed on it"
            text = self.saves_of_sites.text_of(chosen.agreed.source, text)
        content = json.loads(text)
        return content

    def _saved_layouts(
        self,
        content: Mapping[str, Any],
        layouts: Any,
        model: Mapping[str, Any] | None,
        adapt: Callable[[Any, Mapping[str, str]], Any] | None,
        parts: Sequence[Any],
    ) -> Any:
        """Return the layouts in which a save is read.

        Raises:
            UserError: it is of another model, or holds other arrays.
        """
        path = self.folder / str(content["step"])
        if model is not None:
            refuse_other_model(path, content["metadata"].get("model"), model)
        if adapt is not None:
            layouts, *parts = (adapt(each, content["arrays"]) for each in (layouts, *parts))
        named = leaves_by_name(layouts)
        refuse_other_arrays(path, content["arrays"], leaves_of_parts(parts) | named)
        return layouts

    def _shared(
        self,
        chosen: _Chosen,
        content: Mapping[str, Any],
        named: Mapping[str, LeafLayout],
        leaves: Sequence[jax.Array] | None,
    ) -> list[jax.Array]:
        """Give the leaves of the state to the sites that lack them, or take them.

        Rounding errors are each site's own, and begin anew.
        """
        others, agreed = self.saves_of_sites, chosen.agreed
        assert others is not None, "it is shared with other sites"
        assert agreed is not None, "the sites have agreed on it"
        self.report(
            f"site {' and '.join(agreed.takers)} takes step {agreed.step}, the newest of all "
            f"sites, from site {agreed.source}: {quantity(bytes_per_device(named), 'B')} a device"
        )
        nothing = SavedState(self.folder, content, [()], self.groups)
        shared = []
        for number, (name, layout) in enumerate(named.items()):
            own = None if leaves is None else leaves[number]
            if name.startswith(f"{ERROR_FEEDBACK}."):
                own = nothing.read(name, layout) if own is None else own
            elif own is None:
                own = others.leaf_of(agreed, number, layout)
            else:
                others.give_leaf(agreed, number, own)
            shared.append(own)
        return shared

    def _read(
        self,
        chosen: SaveChoice,
        content: Mapping[str, Any],
        named: Mapping[str, LeafLayout],
        damage: _Damage,
    ) -> list[jax.Array]:
        """Read the leaves of the save `chosen`.

        Raises:
            _DamagedPart: on every process, if any of them finds a part damaged.
            DamagedCheckpoint: likewise, if any of them cannot read it.
        """
        path = self.folder / str(chosen.key.step)
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
        return leaves

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
