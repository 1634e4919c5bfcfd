"""Records of ArrayRecord files: texts, or `tf.train.Example` messages."""

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from geojax.data.files.opening import INSTALL, Advance, Span, open_bytes, reading, silent
from geojax.data.files.records import ColumnType, NumberedPlace, Record, type_of_value
from geojax.errors import UserError

TEXT = "text"
"""The only column of records that are texts."""

_RECORDS_AT_ONCE = 256


class ArrayRecords:
    """ArrayRecord files; a span is some of their records."""

    def columns(self, path: Path) -> dict[str, ColumnType] | None:
        """Return the columns of the first record; None: there is none."""
        with reading(path), _ArrayRecordReader(path) as reader:
            if not reader.count:
                return None
            (content,) = reader.read(0, 1)
            values = _values(path, 0, content, is_example=_is_example(content))
            return {name: type_of_value(value) for name, value in values.items()}

    def spans(self, path: Path, size: int) -> Iterator[Span | None]:
        """Take records together that are about `size` bytes in the file."""
        with reading(path), _ArrayRecordReader(path) as reader:
            length = max(1, reader.count * size // max(path.stat().st_size, 1))
            for start in range(0, reader.count, length):
                yield Span(start, min(start + length, reader.count))

    def records(
        self,
        path: Path,
        names: Sequence[str],
        span: Span | None = None,
        advance: Advance = silent,
    ) -> Iterator[Record]:
        """Read the records of a file, or of a span of it; arguments are those of `RecordFile`."""
        with reading(path), _ArrayRecordReader(path) as reader:
            if not reader.count:
                return
            # One kind of records is in a file; a text may look like a message.
            is_example = _is_example(*reader.read(0, 1))
            begin, end = span or Span(0, reader.count)
            for start in range(begin, end, _RECORDS_AT_ONCE):
                stop = min(start + _RECORDS_AT_ONCE, end)
                for number, content in enumerate(reader.read(start, stop), start=start):
                    values = _values(path, number, content, is_example=is_example)
                    yield Record(_place(path, number), values)
                advance(path.stat().st_size * (stop - start) // reader.count)


class _ArrayRecordReader:
    """The library's reader of a file."""

    def __init__(self, path: Path) -> None:
        # Grain brings it along where it is available.
        try:
            from array_record.python import array_record_module
        except ImportError:
            raise UserError(
                f"{path}: ArrayRecord requires array_record; pip install array_record"
            ) from None
        with open_bytes(path):  # the library crashes on what it cannot open
            pass
        try:
            self._reader = array_record_module.ArrayRecordReader(str(path))
            if not self._reader.ok():
                self._reader.close()  # raises what is wrong
            self.count: int = self._reader.num_records()
        except (RuntimeError, ValueError) as error:
            raise OSError(str(error)) from None

    def __enter__(self) -> "_ArrayRecordReader":
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.close()

    def read(self, start: int, stop: int) -> list[bytes]:
        """Return the records from `start` to before `stop`."""
        try:
            return list(self._reader.read(start, stop))
        except (RuntimeError, ValueError, IndexError) as error:
            raise OSError(str(error)) from None


def _place(path: Path, number: int) -> NumberedPlace:
    return NumberedPlace(path, "record", number + 1)


def _values(path: Path, number: int, content: bytes, *, is_example: bool) -> dict[str, Any]:
    place = _place(path, number)
    try:
        if not is_example:
            return {TEXT: content.decode()}
        message = _example_type().FromString(content)
        return {name: _value(feature) for name, feature in message.features.feature.items()}
    except UnicodeDecodeError as error:
        raise UserError(
            f"{place}: not UTF-8 text (byte {error.object[error.start]:#04x})"
        ) from None
    except UserError:
        raise
    except Exception:  # the libraries of protobuf raise errors of their own
        raise UserError(f"{place}: no tf.train.Example, as the first record is") from None


def _value(feature: Any) -> Any:
    """Return the value of a feature: a text, a number, or a list of them."""
    kind = feature.WhichOneof("kind")
    values = list(getattr(feature, kind).value) if kind else []
    if kind == "bytes_list":
        values = [value.decode() for value in values]
    return values[0] if len(values) == 1 else values


def _is_example(content: bytes) -> bool:
    """Return whether a record is a `tf.train.Example` with features and nothing else."""
    try:
        content.decode()
        looks_like_text = not content.startswith(b"\n")  # the tag of `features`
    except UnicodeDecodeError:
        looks_like_text = False
    if looks_like_text:
        return False
    try:
        message = _example_type().FromString(content)
    except Exception:  # the libraries of protobuf raise errors of their own
        return False
    size = message.ByteSize()
    message.DiscardUnknownFields()
    return bool(message.features.feature) and message.ByteSize() == size


@functools.cache
def _example_type() -> Any:
    """Return the message type `tf.train.Example`, whose fields TensorFlow's example.proto lists.

    Raises:
        UserError: protobuf is missing.
    """
    try:
        # Its types are a package of their own.
        from google.protobuf import (  # type: ignore[import-untyped]
            descriptor_pb2,
            descriptor_pool,
            message_factory,
        )
    except ImportError:
        raise UserError(f"tf.train.Example: requires protobuf; {INSTALL}") from None
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="geojax/example.proto", syntax="proto3")
    file.package = "geojax.tensorflow"
    scope = f".{file.package}."

    def add(owner: Any, name: str, number: int, type: Any, **options: Any) -> None:
        owner.field.add(name=name, number=number, type=type, **options)

    repeated, single = field.LABEL_REPEATED, field.LABEL_OPTIONAL
    lists = (
        ("BytesList", field.TYPE_BYTES),
        ("FloatList", field.TYPE_FLOAT),
        ("Int64List", field.TYPE_INT64),
    )
    for name, type in lists:
        add(file.message_type.add(name=name), "value", 1, type, label=repeated)
    feature = file.message_type.add(name="Feature")
    feature.oneof_decl.add(name="kind")
    for number, name in enumerate(("bytes_list", "float_list", "int64_list"), start=1):
        type_name = scope + lists[number - 1][0]
        options = {"label": single, "type_name": type_name, "oneof_index": 0}
        add(feature, name, number, field.TYPE_MESSAGE, **options)
    features = file.message_type.add(name="Features")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    add(entry, "key", 1, field.TYPE_STRING, label=single)
    add(entry, "value", 2, field.TYPE_MESSAGE, label=single, type_name=scope + "Feature")
    entries = scope + "Features.FeatureEntry"
    add(features, "feature", 1, field.TYPE_MESSAGE, label=repeated, type_name=entries)
    example = file.message_type.add(name="Example")
    type_name = scope + "Features"
    add(example, "features", 1, field.TYPE_MESSAGE, label=single, type_name=type_name)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = pool.FindMessageTypeByName(f"{file.package}.Example")
    return message_factory.GetMessageClass(found)
