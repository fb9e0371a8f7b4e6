"""The example backend, installed as a third party's is, certifies: on one mesh, every kind of sharded case."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "acme_paged"


def install(folder: Path) -> None:
    """What an installer leaves behind of a project that is on the path already: its name and entry points."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    info = folder / f"acme_paged-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = project["entry-points"].items()
    lines = [f"[{group}]\n" + "\n".join(f"{k} = {v}" for k, v in points.items()) for group, points in groups]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


def test_the_example_backend_passes_every_kind_of_sharded_case(tmp_path):
    install(tmp_path)
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path), str(EXAMPLE)]),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "JAX_PLATFORMS": "cpu",
    }
    out = tmp_path / "acme.json"
    command = [sys.executable, "-m", "paged.cli", "certify", "acme", "--only", "sharded/*/tensor2", "-o", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    results = {case["id"].split("/")[1]: case["status"] for case in json.loads(out.read_text())["body"]["cases"]}
    kinds = ("address", "append", "census", "collectives", "donation", "generic", "ladder")
    assert results == dict.fromkeys(kinds, "pass")
