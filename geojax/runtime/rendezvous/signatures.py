"""Signatures of the lines of a rendezvous, by the run's key and for one connection.

Process 0 greets every connection with a nonce that it has never used before. A hello is signed
together with this nonce, and the verdict together with the nonce and the hello's token. A line
recorded at an earlier start, at another connection or in the other direction is therefore worth
nothing. The signature is that of the empty key where a run has none.
"""

import hashlib
import hmac
import secrets

_NONCE_BYTES = 16
_SIGNATURE_LETTERS = 64

TO_SERVER, TO_CLIENT = b"hello", b"verdict"
"""Directions of a line, which its signature includes."""


def new_nonce() -> str:
    """Return a random text that nobody can foresee."""
    return secrets.token_hex(_NONCE_BYTES)


def signed(key: bytes, direction: bytes, fresh: str, line: bytes) -> bytes:
    """Return `line` behind its signature.

    Args:
        key: the run's key.
        direction: `TO_SERVER` or `TO_CLIENT`.
        fresh: printable text that both ends know and that no other connection has.
        line: the message with its line break.
    """
    return _signature(key, direction, fresh, line).encode() + b" " + line


def is_signed(line: bytes) -> bool:
    """Return True if `line` has the form of a signed line, whoever has signed it."""
    signature, space, _ = line.partition(b" ")
    digits = set(signature) <= set(b"0123456789abcdef")
    return bool(space) and digits and len(signature) == _SIGNATURE_LETTERS


def verified(key: bytes, direction: bytes, fresh: str, line: bytes) -> bytes | None:
    """Return the message in a line that `signed` made with the same arguments, else None."""
    signature, _, message = line.partition(b" ")
    wanted = _signature(key, direction, fresh, message).encode()
    return message if hmac.compare_digest(signature, wanted) else None


def derived_key(key: bytes, nonce: str) -> bytes:
    """Return the key of one start: only who knows the run's key can compute it from the nonce."""
    return hmac.digest(key, b"start\n" + nonce.encode(), "sha256")


def _signature(key: bytes, direction: bytes, fresh: str, line: bytes) -> str:
    digest = hashlib.sha256(line).hexdigest().encode()
    return hmac.digest(key, b"\n".join((direction, fresh.encode(), digest)), "sha256").hex()
