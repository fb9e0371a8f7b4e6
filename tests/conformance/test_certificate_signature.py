"""Signatures in the envelope: who signed, what an edit does to it, and keys that are none."""

import copy
import json
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from conformance import certificate, signature
from conformance.catalogue import load
from paged.cli import main
from paged.common.errors import InvalidInputError

SIGNED = json.loads((Path(__file__).parents[2] / "certificates" / "reference-cpu.json").read_text("utf-8"))


def write(folder, name, key):
    private, public = folder / f"{name}.pem", folder / f"{name}.pub.pem"
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return private, public


@pytest.fixture
def keys(tmp_path):
    return write(tmp_path, "mine", ed25519.Ed25519PrivateKey.generate())


def test_a_signature_is_verified_by_its_key_and_leaves_the_body_alone(keys):
    signed = signature.sign(SIGNED, keys[0])
    assert signature.problems(signed, keys[1]) == []
    assert signed["body"] == SIGNED["body"]
    assert signed["digest"] == SIGNED["digest"]
    assert certificate.check(signed, load()) == certificate.check(SIGNED, load())
    assert signature.problems(json.loads(json.dumps(signed)), keys[1]) == []


def test_whatever_is_edited_shows(keys, tmp_path):
    signed = signature.sign(SIGNED, keys[0])
    other = write(tmp_path, "other", ed25519.Ed25519PrivateKey.generate())
    assert signature.problems(SIGNED, keys[1]) == ["it is not signed"]
    assert signature.problems(signed, other[1]) == ["it was signed with another key than the one given"]

    def edited(change):
        data = copy.deepcopy(signed)
        change(data)
        return signature.problems(data, keys[1])[0]

    assert "does not fit its body" in edited(lambda d: d["body"].update(verdict="failed"))
    assert "does not fit its body" in edited(lambda d: d["envelope"]["signature"].update(value="AAAA"))
    assert "does not fit its body" in edited(lambda d: d["envelope"]["signature"].update(value="é"))
    assert "not of the algorithm" in edited(lambda d: d["envelope"]["signature"].update(algorithm="none"))
    assert "another key" in edited(lambda d: d["envelope"]["signature"].pop("public_key"))
    assert "not of the algorithm" in edited(lambda d: d["envelope"].update(signature="yes"))

    # Who edits the body, mends every digest and puts the old signature back is still found out.
    data = copy.deepcopy(signed)
    entry = next(e for e in data["body"]["cases"] if e["tier"] == 3)  # of a movement --check would see it
    entry["elements"] += 1
    entry["digest"] = certificate.digest({k: v for k, v in entry.items() if k != "digest"})
    data["body"]["digests"]["cases"] = certificate.digest(data["body"]["cases"])
    data["digest"] = certificate.digest(data["body"])
    assert certificate.check(data, load()) == certificate.check(SIGNED, load())
    assert "does not fit its body" in signature.problems(data, keys[1])[0]


def test_keys_that_are_none_and_bodies_that_do_not_fit_are_refused(keys, tmp_path):
    curve = write(tmp_path, "curve", ec.generate_private_key(ec.SECP256R1()))
    (tmp_path / "text.pem").write_text("no key")
    for key, said in [(tmp_path / "text.pem", "not an unencrypted private key"), (curve[0], "expected an Ed25519"),
                      (keys[1], "not an unencrypted private key")]:  # fmt: skip
        with pytest.raises(InvalidInputError, match=said):
            signature.sign(SIGNED, key)
    for key, said in [(tmp_path / "text.pem", "not a public key"), (curve[1], "expected an Ed25519 public key")]:
        with pytest.raises(InvalidInputError, match=said):
            signature.problems(SIGNED, key)
    with pytest.raises(InvalidInputError, match="nothing is signed"):
        signature.sign({**SIGNED, "digest": "sha256:" + "0" * 64}, keys[0])


def test_the_command_signs_and_verifies(keys, tmp_path, capsys):
    plain, out = tmp_path / "plain.json", tmp_path / "signed.json"
    plain.write_text(json.dumps(SIGNED))
    assert main(["certify", "--check", str(plain), "--public-key", str(keys[1])]) == 1
    assert "it is not signed" in capsys.readouterr().out
    assert main(["certify", "--check", str(plain), "--sign", str(keys[0]), "-o", str(out)]) == 0
    assert main(["certify", "--check", str(out), "--public-key", str(keys[1])]) == 0
    assert "verified" in capsys.readouterr().out
    assert main(["certify", "--check", str(out)]) == 0
    assert "not verified: give --public-key" in capsys.readouterr().out
    assert main(["certify", "--check", str(plain), "--sign", str(keys[0])]) == 2
    assert main(["certify", "reference", "--sign", str(keys[1]), "--only", "append/*"]) == 2
