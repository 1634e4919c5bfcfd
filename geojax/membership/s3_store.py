"""The record of who takes part, in an object of S3 or of a store with S3's conditional writes."""

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from geojax.errors import UserError
from geojax.membership.record import MembershipRecord, UnreachableStoreError
from geojax.membership.record_file import MOST_BYTES, decode_record, encode_record

_URL = re.compile(r"s3://(?P<bucket>[a-z0-9][a-z0-9.-]{1,61}[a-z0-9])/(?P<key>[^\x00-\x1f?#]+)")
_LOST_RACE = ("PreconditionFailed", "ConditionalRequestConflict", "412", "409")
_MOST_REASON = 200

_Result = TypeVar("_Result")


class S3RecordStore:
    """A record in the object at `url`, for the run named `run`, through fsspec's client `s3fs`.

    A write has the condition that the object is the one that was read (`If-Match`), or that there
    is none (`If-None-Match`). Credentials are the client's.

    Args:
        url: `s3://bucket/key`.
        run: name of the run.
        timeout_seconds: longest time of a request.
        endpoint_url: URL of a store other than Amazon's; None: the client's own configuration, as
            `AWS_ENDPOINT_URL`.

    Raises:
        UserError: `url` is no such URL, or the client is not installed.
    """

    def __init__(
        self, url: str, run: str, timeout_seconds: float = 10.0, endpoint_url: str | None = None
    ) -> None:
        if (parts := _URL.fullmatch(url)) is None:
            raise UserError(f"{url}: no object of S3; s3://bucket/key would be one")
        try:
            import s3fs
        except ImportError:
            raise UserError(
                f"{url}: the client s3fs is not installed; pip install 'geojax-trainer[s3]'"
            ) from None
        self._url, self._run, self._seconds = url, run, timeout_seconds
        self._object = {"Bucket": parts["bucket"], "Key": parts["key"]}
        self._client: Any = s3fs.S3FileSystem(endpoint_url=endpoint_url)

    def read(self) -> MembershipRecord | None:
        """Return the record; None: there is none yet.

        Raises:
            UserError: the object is something else than a record of this run.
            UnreachableStoreError: the store does not answer, or refuses.
        """
        record, _ = self._read()
        return record

    def create(self, record: MembershipRecord) -> MembershipRecord:
        """Write the first record unless there is one, and return the one that is there then.

        Raises:
            UserError: the object is something else than a record of this run.
            UnreachableStoreError: the store does not answer, or refuses.
        """
        current, _ = self._read()
        if current is None:
            self._put(record, IfNoneMatch="*")
            return self._there()
        return current

    def swap(self, expected: MembershipRecord, new: MembershipRecord) -> MembershipRecord:
        """Replace `expected` by `new`, and return the record that is there then.

        Raises:
            UserError: the record is gone, or is not of this run.
            UnreachableStoreError: the store does not answer, or refuses; `new` may be there.
        """
        current, tag = self._read()
        if current == expected and self._put(new, IfMatch=tag):
            return new
        # A client that tries again by itself is refused if its first try went through.
        return self._there()

    def _there(self) -> MembershipRecord:
        record, _ = self._read()
        if record is None:
            raise UserError(
                f"{self._url}: the record of who takes part is gone; end the run at all sites and "
                "start it again"
            )
        return record

    def _read(self) -> tuple[MembershipRecord | None, str]:
        """Return the record and the tag of its object."""

        async def get() -> tuple[bytes, str] | None:
            try:
                reply = await self._client._call_s3("get_object", **self._object)
            except FileNotFoundError as error:
                if _code(error) == "NoSuchBucket":
                    raise
                return None
            async with reply["Body"] as body:
                return await body.read(MOST_BYTES + 1), reply["ETag"]

        answer = self._done("read", get)
        if answer is None:
            return None, ""
        content, tag = answer
        return decode_record(content, self._run, self._url), tag

    def _put(self, record: MembershipRecord, **condition: str) -> bool:
        """Write the object; return False if the condition does not hold."""

        async def put() -> bool:
            content = encode_record(record, self._run)
            try:
                await self._client._call_s3("put_object", **self._object, Body=content, **condition)
            except OSError as error:
                if _code(error) in _LOST_RACE:
                    return False
                raise
            return True

        return self._done("written", put)

    def _done(self, what: str, request: Callable[[], Awaitable[_Result]]) -> _Result:
        """Do a request in the client's loop, within the time-out."""
        from fsspec.asyn import sync

        async def in_time() -> _Result:
            return await asyncio.wait_for(request(), self._seconds)

        try:
            result: _Result = sync(self._client.loop, in_time)
        except TimeoutError:
            reason = f"no answer within {self._seconds:g} s"
        except Exception as error:  # the client has many of its own, of the network and of keys
            reason = " ".join(str(error).split())[:_MOST_REASON] or type(error).__name__
        else:
            return result
        raise UnreachableStoreError(f"{self._url}: could not be {what} ({reason})")


def _code(error: OSError) -> str | None:
    """Return the code of S3's answer that the client has translated into `error`."""
    response = getattr(error.__cause__, "response", None)
    return None if response is None else response.get("Error", {}).get("Code")
