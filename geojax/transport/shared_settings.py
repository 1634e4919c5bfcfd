"""Settings that must be the same at all sites, compared by digests that fit into an endpoint."""

import base64
import hashlib
import json
from collections.abc import Mapping

from geojax.errors import UserError

_DIGEST_BYTES = 3
_DIGEST_LETTERS = 4


def digests(settings: Mapping[str, object]) -> str:
    """Return a digest of each setting, in their order, four letters each."""
    return "".join(map(_digest, settings.values()))


def require_same(own: Mapping[str, object], here: str, of_peer: str, peer: str) -> None:
    """Compare the settings of this process, at the site `here`, with the `digests` of a peer's.

    Raises:
        UserError: some are not the same; the message names the first.
    """
    starts = range(0, len(of_peer), _DIGEST_LETTERS)
    others = [of_peer[start : start + _DIGEST_LETTERS] for start in starts]
    # A peer with more or fewer settings has another version, which is one of the first.
    for (name, value), other in zip(own.items(), others, strict=False):
        if _digest(value) != other:
            raise UserError(
                f"transport: {peer} has another {name} than {here}, which has {json.dumps(value)}; "
                "give all sites the same"
            )


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True).encode()
    digest = hashlib.blake2b(text, digest_size=_DIGEST_BYTES).digest()
    return base64.b64encode(digest).decode()
