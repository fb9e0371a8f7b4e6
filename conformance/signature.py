"""An Ed25519 signature over a certificate's body, kept in the envelope.

What is signed is a line that names the purpose and the body's digest, so that a signature cannot be taken for one over
anything else. Keys are PEM files, as `openssl genpkey -algorithm ed25519` and `openssl pkey -pubout` write them. Who
owns a key is not said here: a reader verifies with a public key that came another way. Needs `cryptography`, which the
extra `certify` installs.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conformance.canonical import digest
from paged.common.errors import InvalidInputError

ALGORITHM = "ed25519"
PURPOSE = "paged conformance certificate, body "


def private_key(key_file: Path) -> Any:
    """The Ed25519 private key of a PEM file; `InvalidInputError` if it holds none that is not encrypted."""
    crypto = _cryptography()
    try:
        key = crypto.load_pem_private_key(key_file.read_bytes(), password=None)
    except (ValueError, TypeError) as error:
        raise InvalidInputError(f"{key_file}: not an unencrypted private key in PEM form ({error}).") from None
    if not isinstance(key, crypto.Ed25519PrivateKey):
        raise InvalidInputError(f"{key_file}: expected an Ed25519 private key, got {type(key).__name__}.")
    return key


def sign(data: Mapping[str, Any], key_file: Path) -> dict[str, Any]:
    """The certificate with a signature by the private key of a PEM file in its envelope; one that was there goes.

    Raises `InvalidInputError` for a file that holds no unencrypted Ed25519 private key, and for a body whose digest is
    not the one written beside it.
    """
    key = private_key(key_file)
    if digest(data["body"]) != data["digest"]:
        raise InvalidInputError("the body's digest is not the one written beside it: nothing is signed. Run --check.")
    public = key.public_key().public_bytes_raw()
    signature = {"algorithm": ALGORITHM, "public_key": _text(public), "value": _text(key.sign(_statement(data)))}
    return {**data, "envelope": {**data["envelope"], "signature": signature}}


def problems(data: Mapping[str, Any], key_file: Path) -> list[str]:
    """What is wrong with a certificate's signature, put to the public key of a PEM file; empty if it is good."""
    crypto = _cryptography()
    try:
        key = crypto.load_pem_public_key(key_file.read_bytes())
    except (ValueError, TypeError) as error:
        raise InvalidInputError(f"{key_file}: not a public key in PEM form ({error}).") from None
    if not isinstance(key, crypto.Ed25519PublicKey):
        raise InvalidInputError(f"{key_file}: expected an Ed25519 public key, got {type(key).__name__}.")
    found = data["envelope"].get("signature") if isinstance(data["envelope"], Mapping) else None
    if found is None:
        return ["it is not signed"]
    if not isinstance(found, Mapping) or found.get("algorithm") != ALGORITHM:
        return [f"its signature is not of the algorithm {ALGORITHM}"]
    if found.get("public_key") != _text(key.public_bytes_raw()):
        return ["it was signed with another key than the one given"]
    try:
        key.verify(base64.b64decode(str(found.get("value")), validate=True), _statement(data))
    except (crypto.InvalidSignature, binascii.Error, ValueError):
        return ["its signature does not fit its body: the body was edited after signing, or the signature was"]
    return []


def described(envelope: Mapping[str, Any]) -> str | None:
    """The key of a signature in a few words, None if there is none. Nothing is verified."""
    found = envelope.get("signature")
    if not isinstance(found, Mapping):
        return None
    return f"{found.get('algorithm')} key {str(found.get('public_key'))[:60]}"


def _statement(data: Mapping[str, Any]) -> bytes:
    return (PURPOSE + digest(data["body"]) + "\n").encode()


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def _cryptography() -> Any:
    """The few names of `cryptography` that are used here."""
    import types

    try:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_pem_public_key
    except ImportError:
        raise InvalidInputError("signatures need cryptography: install paged[certify].") from None
    return types.SimpleNamespace(
        InvalidSignature=InvalidSignature,
        Ed25519PrivateKey=Ed25519PrivateKey,
        Ed25519PublicKey=Ed25519PublicKey,
        load_pem_private_key=load_pem_private_key,
        load_pem_public_key=load_pem_public_key,
    )
