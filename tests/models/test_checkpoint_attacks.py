"""Files that lie (requirement X3): refused before anything is allocated; nothing outside the directory is opened."""

import json
import pickle
import struct
import tracemalloc

import numpy as np
import pytest
from model_steps import drawn_decoder
from tiny_checkpoints import CONFIG, gguf_tensors, hf_tensors, write_gguf, write_huggingface

from paged.common import InvalidInputError
from paged.models.checkpoint import load_model
from paged.models.checkpoint.gguf_file import GgufFile


@pytest.fixture(scope="module")
def model():
    return drawn_decoder(CONFIG, 0)


@pytest.fixture
def sharded(tmp_path, model):
    """A directory with three shards, and a victim file beside it."""
    tensors = hf_tensors(model)
    directory = write_huggingface(tmp_path / "model", tensors, shards=3)
    (tmp_path / "secret.safetensors").write_bytes((directory / "model-00001-of-00003.safetensors").read_bytes())
    return directory


def point_at(directory, name):
    index = directory / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    first = "model-00001-of-00003.safetensors"
    data["weight_map"] = {k: name if v == first else v for k, v in data["weight_map"].items()}
    index.write_text(json.dumps(data))


@pytest.mark.parametrize(
    "name",
    [
        "../secret.safetensors",
        "/etc/passwd",
        "sub/model.safetensors",
        "..\\secret.safetensors",
        "C:secret.safetensors",
        "..",
        "",
        ".",
        "model\0.safetensors",
        "pytorch_model.bin",
        7,
        ["model.safetensors"],
    ],
)
def test_a_shard_name_is_a_file_name_inside_the_directory(sharded, name):
    point_at(sharded, name)
    with pytest.raises(InvalidInputError, match=r"weight_map names .*; it must be a plain file name ending in \.safe"):
        load_model(sharded)


def test_an_absolute_path_is_refused_even_if_it_names_the_right_file(sharded):
    point_at(sharded, str(sharded / "model-00001-of-00003.safetensors"))
    with pytest.raises(InvalidInputError, match=r"it must be a plain file name"):
        load_model(sharded)


LINKED = [
    "config.json",
    "tokenizer.json",
    "model.safetensors.index.json",
    "model-00001-of-00003.safetensors",
    "generation_config.json",
    "tokenizer_config.json",
    "chat_template.jinja",
]


@pytest.mark.parametrize("target", LINKED)
def test_a_link_that_leaves_the_directory_is_refused(sharded, target):
    if not (sharded / target).exists():
        (sharded / target).write_text("{}")
    outside = sharded.parent / f"secret-{target}"
    (sharded / target).rename(outside)
    (sharded / target).symlink_to(outside)
    with pytest.raises(InvalidInputError, match=rf"'{target}', a link that leaves"):
        load_model(sharded)


def test_links_of_a_hub_cache_are_followed(tmp_path, sharded):
    """…/snapshots/REVISION/name links to …/blobs/DIGEST; so do the files of every downloaded model."""
    blobs, snapshot = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "0abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for i, file in enumerate(sorted(sharded.iterdir())):
        file.rename(blobs / str(i))
        (snapshot / file.name).symlink_to(f"../../blobs/{i}")
    assert load_model(snapshot).config.num_layers == 2


def test_a_link_inside_the_directory_is_followed(sharded):
    shard = sharded / "model-00001-of-00003.safetensors"
    shard.rename(sharded / "renamed.safetensors")
    shard.symlink_to("renamed.safetensors")
    assert load_model(sharded).config.num_layers == 2


def test_index_and_shards_must_agree(sharded):
    index = sharded / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    moved = data | {"weight_map": data["weight_map"] | {"model.norm.weight": "model-00001-of-00003.safetensors"}}
    index.write_text(json.dumps(moved))
    with pytest.raises(InvalidInputError, match=r"holds tensor '.*', which the index places in '.*00001-of-00003"):
        load_model(sharded)
    index.write_text(
        json.dumps(data | {"weight_map": data["weight_map"] | {"ghost": "model-00001-of-00003.safetensors"}})
    )
    with pytest.raises(InvalidInputError, match=r"places tensor 'ghost' in '.*', which does not hold it"):
        load_model(sharded)
    del data["weight_map"]["model.norm.weight"]
    index.write_text(json.dumps(data))
    with pytest.raises(InvalidInputError, match=r"holds tensor 'model\.norm\.weight', which the index places in None"):
        load_model(sharded)
    index.write_text('{"weight_map": {}}')
    with pytest.raises(InvalidInputError, match=r"weight_map must be an object that names a file for each tensor"):
        load_model(sharded)


def test_a_missing_shard_is_named(sharded):
    (sharded / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(InvalidInputError, match=r"names 'model-00002-of-00003\.safetensors', which is not a file"):
        load_model(sharded)


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("a pickle was executed",))


def test_a_pickle_is_never_read(tmp_path, model):
    directory = write_huggingface(tmp_path, hf_tensors(model))
    (directory / "model.safetensors").unlink()
    (directory / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(InvalidInputError, match=r"\(pytorch_model\.bin is a pickle, which is never read: convert it\)"):
        load_model(directory)
    (directory / "pytorch_model.bin").rename(directory / "model.safetensors")
    with pytest.raises(InvalidInputError, match=r"is damaged or no safetensors file"):
        load_model(directory)


def truncated(data):
    return data[:-4]


def oversized_header(data):
    return struct.pack("<Q", 2**62) + data[8:]


def header_past_the_end(data):
    return struct.pack("<Q", len(data) * 2) + data[8:]


def huge_tensor(data):
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    header["model.norm.weight"]["shape"] = [2**40, 2**20]
    raw = json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data[8 + size :]


@pytest.mark.parametrize(
    "damage", [truncated, oversized_header, header_past_the_end, huge_tensor, lambda data: data[:5]]
)
def test_a_damaged_safetensors_file_is_refused(tmp_path, model, damage):
    directory = write_huggingface(tmp_path, hf_tensors(model))
    file = directory / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(InvalidInputError, match=r"model\.safetensors is damaged or no safetensors file: "):
        load_model(directory)


@pytest.mark.parametrize("text", ["[1]", "{", "[" * 100_000, '"x"'])
def test_a_config_that_is_no_json_object_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InvalidInputError, match=r"config\.json (is not JSON|must hold a JSON object)"):
        load_model(tmp_path)


def test_a_damaged_tokenizer_is_refused(tmp_path, model):
    directory = write_huggingface(tmp_path, hf_tensors(model))
    (directory / "tokenizer.json").write_text('{"model": {}}')
    with pytest.raises(InvalidInputError, match=r"tokenizer\.json is not a tokenizer definition"):
        load_model(directory)


@pytest.fixture
def gguf_path(tmp_path, model):
    return write_gguf(tmp_path / "tiny.gguf", gguf_tensors(model))


def test_a_tensor_past_the_end_of_a_gguf_file_is_refused(gguf_path):
    gguf_path.write_bytes(gguf_path.read_bytes()[:-64])
    with pytest.raises(InvalidInputError, match=r"tensor '.*' \(.*\) of type F32 ends at byte \d+; the file has \d+"):
        GgufFile(gguf_path)


STRING, ARRAY, UINT8 = 8, 9, 0


def gguf_bytes(*, tensors=0, keys=1, body=b""):
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, keys) + body


def key(kind, rest):
    return struct.pack("<Q", 1) + b"k" + struct.pack("<I", kind) + rest


def tensor(name=b"t", dims=(4,), kind=0, offset=0):
    head = struct.pack("<Q", len(name)) + name + struct.pack("<I", len(dims))
    return head + struct.pack(f"<{len(dims)}Q", *dims) + struct.pack("<IQ", kind, offset)


LIES = {
    "empty": (b"", r"has 0 bytes; a GGUF header alone has 24"),
    "magic": (b"PK\x03\x04" + bytes(40), r"is not a GGUF file"),
    "version": (b"GGUF" + struct.pack("<I", 1) + bytes(40), r"GGUF version 1 is not read"),
    "big-endian": (b"GGUF" + struct.pack(">I", 3) + bytes(40), r"GGUF version 50331648 is not read"),
    "keys": (gguf_bytes(keys=2**60), r"header of 1152921504606846976 keys and 0 tensors .* the file has 0 left"),
    "tensors": (gguf_bytes(keys=0, tensors=2**50), r"header of 0 keys and 1125899906842624 tensors"),
    "string": (
        gguf_bytes(body=key(STRING, struct.pack("<Q", 2**61))),
        r"key 'k' at byte 45 declares 2305843009213693952",
    ),
    "array": (gguf_bytes(body=key(ARRAY, struct.pack("<IQ", UINT8, 2**62))), r"key 'k' at byte 49 declares 46116860"),
    "strings": (gguf_bytes(body=key(ARRAY, struct.pack("<IQ", STRING, 2**40))), r"key 'k' .* declares 8796093022208"),
    "nested": (gguf_bytes(body=key(ARRAY, struct.pack("<IQ", ARRAY, 1))), r"arrays of arrays are not read"),
    "type": (gguf_bytes(body=key(99, b"")), r"key 'k' has the unknown type 99"),
    "utf-8": (gguf_bytes(body=key(STRING, struct.pack("<Q", 2) + b"\xff\xfe")), r"key 'k' is not UTF-8"),
    "twice": (gguf_bytes(keys=2, body=2 * key(UINT8, b"\1")), r"key 'k' occurs twice"),
    "dims": (gguf_bytes(keys=0, tensors=1, body=tensor(dims=(1,) * 5)), r"tensor 't' has 5 dimensions"),
    "shape": (
        gguf_bytes(keys=0, tensors=1, body=tensor(dims=(2**40, 2**40))),
        r"tensor 't' .* ends at byte 4835703278",
    ),
    "offset": (gguf_bytes(keys=0, tensors=1, body=tensor(offset=2**63)), r"tensor 't' \(4,\) of type F32 ends at byte"),
    "quant": (gguf_bytes(keys=0, tensors=1, body=tensor(kind=200)), r"tensor 't' has the unknown type 200"),
    "block": (gguf_bytes(keys=0, tensors=1, body=tensor(kind=8)), r"of type Q8_0 has rows of 4, not a multiple of 32"),
    "same name": (gguf_bytes(keys=0, tensors=2, body=2 * tensor() + bytes(64)), r"tensor 't' occurs twice"),
    "alignment": (
        gguf_bytes(body=struct.pack("<Q", 17) + b"general.alignment" + struct.pack("<II", 4, 3)),
        r"general\.alignment must be a power of two, got 3",
    ),
}


@pytest.mark.parametrize("name", LIES)
def test_a_gguf_header_is_checked_before_it_is_believed(tmp_path, name):
    data, message = LIES[name]
    path = tmp_path / "lie.gguf"
    path.write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidInputError, match=message):
            GgufFile(path)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_every_truncation_of_a_gguf_file_is_refused(tmp_path, gguf_path):
    data, path = gguf_path.read_bytes(), tmp_path / "cut.gguf"
    for length in np.linspace(0, len(data) - 1, 60, dtype=int):
        path.write_bytes(data[:length])
        with pytest.raises(InvalidInputError):
            GgufFile(path)
