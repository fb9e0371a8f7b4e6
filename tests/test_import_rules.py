"""Who may import whom (requirement K6): an allow-list over the sources, and the same in a process with jax blocked.

`docs/design/0001-rooms-and-imports.md` says why. A module that nothing here speaks of fails the first test.
"""

from pathlib import Path

import pytest
from import_scan import Row, broken_rules, forbidden_uses, import_alone, row_of, sources

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("paged", "conformance")

ARRAYS = ("jax", "numpy", "jaxtyping", "equinox")
SEAM = tuple(f"paged.backends.{name}" for name in ("protocol", "registry", "step", "metadata", "moves", "sharding"))
KERNELS = (*ARRAYS, "paged.backends.protocol", "paged.backends.moves")
CHECKPOINTS = ("safetensors", "gguf", "tokenizers")
ENGINE = (*ARRAYS, *CHECKPOINTS, "paged.reference", "paged.backends", "paged.models", "paged.control")
RUNNERS = (
    *("runner", "relations", "mutants", "execute", "structure", "worker", "environment", "watch"),
    *("faults", "faults_devices", "faults_gated", "faults_geometry", "faults_steps", "broken_kernel", "serving"),
    *("executors", "kits.run", "kits.aiter", "programs"),
)
COMMANDS = ("command", "assemble", "supervisor", "freeze", "killmatrix")

TABLE = {
    "paged": Row(("paged",), common=False),
    "common": Row(("paged.common",), may=("numpy",)),
    "control": Row(("paged.control",), may=("numpy",)),
    "reference": Row(("paged.reference",), may=(*ARRAYS, "paged.backends.protocol")),
    "seam": Row(("paged.backends", *SEAM), may=ARRAYS),
    "native": Row(("paged.backends.native", "paged.backends.compilers"), lazily=("jax",)),
    "xla": Row(("paged.backends.xla",), may=KERNELS),
    "cpu": Row(("paged.backends.cpu",), may=(*KERNELS, "paged.backends.native")),
    "flashinfer": Row(
        ("paged.backends.flashinfer",),
        may=(*KERNELS, "paged.backends.compilers"),
        lazily=("flashinfer", "jax_tvm_ffi", "tvm_ffi", "jinja2"),
    ),
    "aiter": Row(("paged.backends.aiter",), may=KERNELS, lazily=("jax_aiter", "jaxlib")),
    "models": Row(
        ("paged.models",),
        may=(*ARRAYS, *CHECKPOINTS, "paged.backends.protocol", "paged.backends.step", "paged.backends.sharding"),
    ),
    "engine": Row(("paged.engine",), may=ENGINE),
    "integrations": Row(("paged.integrations",), may=(*ENGINE, "paged.engine")),
    "cli": Row(("paged.cli",), may=(*ENGINE, "paged.engine", "paged", "paged.integrations")),
    "certify": Row(("paged.cli.certify",), may=("paged.cli",), lazily=("conformance", *ENGINE)),
    "build": Row(("paged.cli.build",), may=("paged.cli",), lazily=("conformance", *ENGINE)),
    "bench": Row(("paged.cli.bench",), may=("paged.cli",), lazily=("benchmarks",)),
    "judge": Row(("conformance",), may=("numpy",)),
    "page": Row(("conformance.page",), may=("conformance",), lazily=("jinja2",)),
    "signature": Row(("conformance.signature",), may=("conformance",), lazily=("cryptography",)),
    "run": Row(
        tuple(f"conformance.{name}" for name in (*RUNNERS, *COMMANDS)),
        may=("conformance", *ARRAYS, "paged"),
        lazily=("jinja2",),
    ),
    "plugin": Row(
        ("conformance.plugin", "conformance.test_backend"),
        lazily=("conformance", "paged.backends", "paged.common", "pytest"),
        common=False,
    ),
}

DYNAMIC = {
    "paged": "public names load on first use",
    "paged.cli": "a subcommand is a module of its package",
    "paged.backends.registry": "a backend is an entry point",
    "conformance.executors": "an executor is a module of a closed list",
    "conformance.executors.triton_interpreter": "the vendor's side lies in a folder outside the packages",
    "conformance.kits.run": "a kit is a list of modules",
}
"""Modules that may import a name they compute, and why."""

HOST_TESTS = ("tests/common", "tests/control")


def judges(root: Path) -> list[str]:
    return [module for module in sources(root, ("conformance",)) if row_of(module, TABLE) == "judge"]


def test_every_import_of_the_sources_is_in_the_table():
    assert list(broken_rules(ROOT, PACKAGES, TABLE, DYNAMIC)) == []


def test_nothing_reads_pickles_or_runs_text_or_imports_torch():
    assert list(forbidden_uses(ROOT, PACKAGES)) == []


def test_host_side_and_judge_import_without_jax():
    modules = ["paged", *sources(ROOT, ("paged/common", "paged/control")), *judges(ROOT)]
    assert {"paged.common.page_table", "paged.control.plane", "conformance.judge", "conformance.oracle"} <= set(modules)
    run = import_alone(ROOT, modules, ("paged", "conformance", "numpy"))
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["conformance", "numpy", "paged"]


@pytest.mark.parametrize("module", ["paged", "conformance", "conformance.plugin"])
def test_these_load_nothing_but_the_standard_library(module):
    run = import_alone(ROOT, [module], [module.split(".")[0]])
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == [module.split(".")[0]]


def test_with_jax_blocked_public_names_of_the_host_side_still_load():
    names = ("StorageLayout", "CacheNamespace", "build_page_table", "ControlPlane")
    run = import_alone(ROOT, [f"paged:{name}" for name in names], ("paged", "numpy"))
    assert run.returncode == 0, run.stderr
    run = import_alone(ROOT, ["paged:attention_step"], ("paged", "numpy"))
    assert "jax is blocked here" in run.stderr or "equinox is blocked here" in run.stderr


def test_host_side_tests_import_no_jax():
    siblings = tuple(path.stem for folder in HOST_TESTS for path in (ROOT / folder).glob("*.py"))
    may = ("numpy", "pytest", "hypothesis", "paged.common", "paged.control", *siblings)
    rows = {"host tests": Row(("tests",), may=may, lazily=("ml_dtypes",))}
    assert list(broken_rules(ROOT, HOST_TESTS, rows)) == []


# Planted violations: each check must see them.


def plant(root: Path, **files: str) -> Path:
    """A tree of empty packages with `files`, whose names are dotted modules with `__` for dots."""
    for name, text in files.items():
        path = root.joinpath(*name.split("__")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        for parent in [path.parent, *path.parent.parents]:
            if parent == root:
                break
            (parent / "__init__.py").touch()
        path.write_text(text)
    return root


PLANTED = [
    ("paged__common__bad", "import jax", "paged.common.bad:1 imports jax, which the row 'common'"),
    ("paged__common__bad", "def f():\n    import jax.numpy as jnp", "paged.common.bad:2 imports jax.numpy, which"),
    ("paged__common__bad", "class A:\n    async def f(self):\n        from jax import lax", "bad:3 imports jax, which"),
    ("paged__common__bad", "try:\n    import torch\nexcept ImportError:\n    pass", "bad:2 imports torch, which"),
    ("paged__common__bad", "import importlib\nimportlib.import_module('jax')", "bad:2 imports jax, which"),
    ("paged__common__bad", "name = 'j' + 'ax'\n__import__(name)", "paged.common.bad:2 imports a computed name."),
    ("paged__common__bad", "from paged.control import plane", "bad:1 imports paged.control, which the row 'common'"),
    ("paged__common__bad", "from ..backends import protocol", "bad:1 imports paged.backends, which the row 'common'"),
    ("paged__control__bad", "from paged import engine", "bad:1 imports paged, which the row 'control'"),
    ("paged__control__bad", "import equinox", "paged.control.bad:1 imports equinox, which the row 'control'"),
    ("paged__reference__bad", "import paged.backends.moves", "imports paged.backends.moves, which the row 'reference'"),
    ("paged__reference__bad", "import ml_dtypes", "imports ml_dtypes, which the row 'reference'"),
    ("paged__backends__step", "from paged.reference import attend", "imports paged.reference, which the row 'seam'"),
    ("paged__backends__step", "import paged.backends.xla", "imports paged.backends.xla, which the row 'seam'"),
    ("paged__backends__new__ops", "import flashinfer", "imports flashinfer, which the row 'seam'"),
    ("paged__backends__xla__bad", "import paged.reference.attend", "which the row 'xla' does not allow"),
    ("paged__backends__xla__bad", "from paged.backends import step", "imports paged.backends, which the row 'xla'"),
    ("paged__backends__flashinfer__bad", "import jinja2", "imports jinja2 at module level, which the row 'flashinfer'"),
    ("paged__backends__flashinfer__bad", "import paged.backends.aiter", "paged.backends.aiter, which the row 'flashi"),
    ("paged__backends__aiter__bad", "import jaxlib", "imports jaxlib at module level, which the row 'aiter'"),
    (
        "paged__models__bad",
        "from paged.backends.moves import scrub",
        "imports paged.backends.moves, which the row 'mode",
    ),
    ("paged__models__bad", "import paged.control.plane", "imports paged.control.plane, which the row 'models'"),
    ("paged__engine__bad", "import conformance.judge", "imports conformance.judge, which the row 'engine'"),
    ("paged__engine__bad", "def f():\n    import paged.cli", "imports paged.cli, which the row 'engine'"),
    ("paged__cli__serve", "def f():\n    import conformance", "imports conformance, which the row 'cli'"),
    ("paged__cli__certify", "import conformance", "imports conformance at module level, which the row 'certify'"),
    ("conformance__judge", "import jax", "conformance.judge:1 imports jax, which the row 'judge'"),
    ("conformance__oracle", "def f():\n    import paged.reference", "imports paged.reference, which the row 'judge'"),
    ("conformance__judge", "import conformance.runner", "imports conformance.runner, which the row 'judge'"),
    ("conformance__something_new", "import equinox", "conformance.something_new:1 imports equinox, which the row 'jud"),
    ("conformance__plugin", "import numpy", "conformance.plugin:1 imports numpy, which the row 'plugin'"),
    ("conformance__plugin", "import conformance.judge", "conformance.judge at module level, which the row 'plugin'"),
    ("conformance__page", "import jinja2", "imports jinja2 at module level, which the row 'page'"),
    ("stray__thing", "", "stray.thing has no row in the import table; give it one."),
]


@pytest.mark.parametrize(("name", "text", "words"), PLANTED)
def test_a_planted_import_is_found(tmp_path, name, text, words):
    root = plant(tmp_path, **{name: text}, paged__fine="", conformance__fine="import numpy, json")
    broken = list(broken_rules(root, (*PACKAGES, "stray"), TABLE, DYNAMIC))
    broken = [line for line in broken if not line.startswith("stray has no row")]
    assert len(broken) == 1
    assert words in broken[0]


def test_what_is_allowed_is_not_found(tmp_path):
    root = plant(
        tmp_path,
        paged__common__a="import numpy as np, json\nfrom paged.common import b\nfrom . import b\nfrom .b import c",
        paged__common__b="from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import jax",
        paged__backends__flashinfer__ops="import jax\nfrom paged.backends import moves\ndef f():\n    import tvm_ffi",
        paged__backends__moves="import jax.numpy\nfrom paged.common.a import x",
        paged__cli__certify="def f():\n    from conformance import runner",
        conformance__runner="import jax, paged.backends.step, conformance.judge",
        conformance__judge="from conformance import oracle\nfrom paged.common import PageTable",
    )
    assert list(broken_rules(root, PACKAGES, TABLE, DYNAMIC)) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import torch", "imports torch."),
        ("def f():\n    from transformers import AutoTokenizer", "a:2 imports transformers."),
        ("import pickle", "imports pickle."),
        ("import importlib\nimportlib.import_module('pickle')", "a:2 imports pickle."),
        ("import numpy as np\nnp.load('x', allow_pickle=True)", "a:2 allows pickle."),
        ("import numpy as np\nflag = True\nnp.load('x', allow_pickle=flag)", "a:3 allows pickle."),
        ("f = eval", "a:1 names eval."),
        ("exec('x = 1')", "a:1 names exec."),
        ("import builtins\nbuiltins.eval('1')", "a:2 names eval."),
    ],
)
def test_a_planted_pickle_or_eval_is_found(tmp_path, text, words):
    root = plant(tmp_path, paged__a=text, paged__b="import jax\njax.eval_shape\ndict(allow_pickle=False)")
    found = list(forbidden_uses(root, ("paged",)))
    assert len(found) == 1
    assert words in found[0]


@pytest.mark.parametrize("package", ["jax", "jaxlib", "equinox", "jaxtyping"])
def test_a_planted_import_is_blocked_when_it_runs(tmp_path, package):
    root = plant(tmp_path, paged__common__a=f"import {package}", paged__common__b="import numpy")
    assert import_alone(root, ["paged.common.b"], ("paged", "numpy")).returncode == 0
    run = import_alone(root, sources(root, ("paged",)), ("paged", "numpy"))
    assert run.returncode != 0
    assert f"{package} is blocked here" in run.stderr


def test_a_planted_eager_import_of_the_package_is_reported(tmp_path):
    root = plant(tmp_path, paged__common="import numpy")
    (root / "paged" / "__init__.py").write_text("import paged.common")
    run = import_alone(root, ["paged"], ("paged", "numpy"))
    assert run.stdout.split() == ["numpy", "paged"]
