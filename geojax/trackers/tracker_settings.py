"""The settings of trackers: names, mappings with settings, and classes of yours."""

import importlib.util
import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeAlias
from urllib.parse import urlsplit

import pydantic

from geojax.errors import UserError
from geojax.quantities import Seconds
from geojax.settings import Settings
from geojax.suggestions import did_you_mean, shortened
from geojax.trackers.tracker_process import check_class

_Word = Annotated[str, pydantic.Field(min_length=1, max_length=128, pattern=r"^[^\x00-\x1f]+$")]


def _without_password(url: str) -> str:
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ValueError("is no URL") from None
    if parts.password is not None:  # the message must not show it
        raise ValueError(
            "holds a password, and a config is no place for one; give it in the variable that the "
            "library reads"
        )
    return url


def _of_http(url: str) -> str:
    parts = urlsplit(_without_password(url))
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(
            f"'{shortened(url)}' is no URL of a server; http://127.0.0.1:4318/v1/metrics would be "
            "one"
        )
    return url


_Url = Annotated[
    str, pydantic.Field(max_length=2000, pattern=r"^\S+$"), pydantic.AfterValidator(_of_http)
]
_Uri = Annotated[
    str,
    pydantic.Field(max_length=2000, pattern=r"^\S+$"),
    pydantic.AfterValidator(_without_password),
]


class WandbSettings(Settings):
    """`{name: wandb}`: Weights & Biases. The key comes from `WANDB_API_KEY` or `wandb login`."""

    tracker: ClassVar[str] = "geojax.trackers.wandb_tracker:WandbTracker"
    packages: ClassVar[Sequence[str]] = ("wandb",)

    name: Literal["wandb"] = "wandb"
    """Name of the tracker."""
    project: _Word = "geojax"
    """Project of the run."""
    entity: _Word | None = None
    """User or team; null: that of the key."""
    group: _Word | None = None
    """Group of runs that belong together, such as the sites of islands."""
    tags: tuple[_Word, ...] = pydantic.Field(default=(), max_length=64)
    """Tags of the run."""
    mode: Literal["online", "offline"] = "online"
    """"offline": files in `trackers/wandb` of the run directory, which `wandb sync` uploads."""
    url: _Url | None = None
    """URL of a server of your own; null: `WANDB_BASE_URL`, else wandb's."""


class MlflowSettings(Settings):
    """`{name: mlflow}`: MLflow. User and password come from the variables that MLflow reads."""

    tracker: ClassVar[str] = "geojax.trackers.mlflow_tracker:MlflowTracker"

    name: Literal["mlflow"] = "mlflow"
    """Name of the tracker."""
    uri: _Uri | None = None
    """Tracking server or database, such as sqlite:////home/me/mlflow.db; null:
    `MLFLOW_TRACKING_URI`, which must be set then."""
    experiment: _Word = "geojax"
    """Experiment of the run, which is made if it is not there."""

    @property
    def packages(self) -> Sequence[str]:
        """Packages that must be installed; a database takes more of them than a server."""
        uri = self.uri or os.environ.get("MLFLOW_TRACKING_URI", "")
        served = uri.startswith(("http:", "https:"))
        return ("mlflow",) if served else ("mlflow", "sqlalchemy", "alembic")


class OtlpHeader(Settings):
    """A header of each request."""

    name: _Word
    """Name of the header."""
    variable: _Word
    """Environment variable that holds the value, so that no secret stands in a config."""


class OtlpSettings(Settings):
    """`{name: otlp}`: gauges of OpenTelemetry, by OTLP over HTTP."""

    tracker: ClassVar[str] = "geojax.trackers.otlp_tracker:OtlpTracker"
    packages: ClassVar[Sequence[str]] = (
        "opentelemetry.sdk",
        "opentelemetry.exporter.otlp.proto.http",
    )

    name: Literal["otlp"] = "otlp"
    """Name of the tracker."""
    endpoint: _Url
    """URL of the collector, such as http://127.0.0.1:4318/v1/metrics. Nothing is sent elsewhere."""
    headers: tuple[OtlpHeader, ...] = pydantic.Field(default=(), max_length=64)
    """Headers of each request."""
    timeout_seconds: Seconds = pydantic.Field(default=10.0, ge=0.01, le=600)
    """Time for a request with its retries, after which its points are lost."""


class OwnTracker(Settings):
    """`{module: mylab.tracking:Tracker}`: a class of yours. Other keys are its arguments."""

    model_config = pydantic.ConfigDict(extra="allow")

    packages: ClassVar[Sequence[str]] = ()

    module: str = pydantic.Field(
        pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$",
        max_length=200,
    )
    """Class with the methods of `geojax.trackers.Tracker`. A process of its own imports the module,
    from the working directory or from where Python finds it."""

    @property
    def name(self) -> str:
        """The class, as warnings name it."""
        return self.module

    @property
    def tracker(self) -> str:
        """The class."""
        return self.module


LibraryTracker: TypeAlias = WandbSettings | MlflowSettings | OtlpSettings | OwnTracker
"""A tracker with a process of its own."""

FileTracker: TypeAlias = Literal["jsonl", "tensorboard"]
"""Files that geojax writes itself."""

_FILES = ("jsonl", "tensorboard")
_LIBRARIES: Mapping[str, type[Settings]] = {
    "wandb": WandbSettings,
    "mlflow": MlflowSettings,
    "otlp": OtlpSettings,
}


def _validated(given: Any) -> Any:
    """Validate a tracker by the class of its settings."""
    if isinstance(given, LibraryTracker):
        return given
    if isinstance(given, str):
        given = {"module": given} if ":" in given else {"name": given}
    if not isinstance(given, Mapping):
        raise ValueError("must be a name, module:Class, or a mapping with `name` or `module`")
    if "module" in given:
        return OwnTracker.model_validate(given)
    name = given.get("name")
    if name in _FILES and len(given) == 1:
        return name
    if name in _FILES:
        raise ValueError(f"{name} has no settings; its name alone would do")
    if not isinstance(name, str) or name not in _LIBRARIES:
        shown = shortened(str(name))
        raise ValueError(
            f"there is no tracker '{shown}'; "
            f"{did_you_mean(shown, [*_FILES, *_LIBRARIES])}, or module:Class of yours"
        )
    return _LIBRARIES[name].model_validate(given)


AnyTracker: TypeAlias = Annotated[
    pydantic.SerializeAsAny[FileTracker | LibraryTracker], pydantic.PlainValidator(_validated)
]
"""A tracker as `trackers` lists it."""


def name_of(tracker: FileTracker | LibraryTracker) -> str:
    """Return the name of a tracker; a class of yours is its own name."""
    return tracker if isinstance(tracker, str) else tracker.name


def arguments_of(tracker: LibraryTracker) -> dict[str, Any]:
    """Return what the class of a tracker is called with, as plain values."""
    chosen_by = "module" if isinstance(tracker, OwnTracker) else "name"
    return tracker.model_dump(mode="json", exclude={chosen_by})


def refuse_unusable(trackers: Sequence[FileTracker | LibraryTracker]) -> None:
    """Check that what trackers need is installed and set; a class of yours is imported apart.

    Raises:
        UserError: a package is missing, with the command that installs it; or a variable; or
            there is no such class.
    """
    for tracker in trackers:
        if isinstance(tracker, str):
            continue
        if not all(map(_is_installed, tracker.packages)):
            raise UserError(
                f"trackers: {tracker.name} requires packages that are not installed; pip install "
                f"'geojax-trainer[{tracker.name}]'"
            )
        if isinstance(tracker, MlflowSettings) and not (
            tracker.uri or os.environ.get("MLFLOW_TRACKING_URI")
        ):
            raise UserError(
                "trackers: mlflow has no place to write to; set uri, or the variable "
                "MLFLOW_TRACKING_URI"
            )
        if isinstance(tracker, OtlpSettings):
            for header in tracker.headers:
                if header.variable not in os.environ:
                    raise UserError(
                        f"trackers: the header {header.name} of otlp is in the variable "
                        f"{header.variable}, which is not set; set it, or remove the header"
                    )
        if isinstance(tracker, OwnTracker) and (reason := check_class(tracker.module)) is not None:
            raise UserError(
                f"trackers: {tracker.module} cannot be used ({reason}); a class with start, log "
                "and finish would do"
            )


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # a package that it lies in
        return False
