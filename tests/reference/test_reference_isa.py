"""The same bits from processors with and without wide vectors and fused multiply-add."""

import hashlib
import os
import platform
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from reference_problem import Batch, attend, bits, lay

from paged.backends.protocol import AttentionExtras
from paged.common import AttentionSpec

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
PROGRAM = """
import test_reference_isa
print(test_reference_isa.digest())
"""


def digest() -> str:
    # Float32 shows the most bits of the float64 sums; rounding to any dtype is integer arithmetic.
    batch = Batch.random([70, 1, 9], [70, 300, 40], heads=(6, 2), dims=(40, 24), dtype="float32", seed=21)
    spec = AttentionSpec(scale=0.3, soft_cap=3.0)
    extras = AttentionExtras(sinks=jnp.asarray(np.linspace(-1, 1, 6, dtype=np.float32)))
    found = hashlib.sha256()
    for x in attend(lay(batch, size=16), spec, extras):
        found.update(bits(x).tobytes())
    return found.hexdigest()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the compiler flag names x86 instruction sets")
def test_instruction_sets_move_no_bit():
    running = []
    for instructions in ("SSE4_2", "AVX2"):
        environment = os.environ | {
            "XLA_FLAGS": f"--xla_cpu_max_isa={instructions}",
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE)]),
        }
        # A cached program would be one compiled for this processor.
        environment.pop("JAX_COMPILATION_CACHE_DIR", None)
        command = [sys.executable, "-c", PROGRAM]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        running.append(subprocess.Popen(command, env=environment, text=True, **pipes))
    expected = digest()
    for process in running:
        stdout, stderr = process.communicate()
        assert process.returncode == 0, stderr[-2000:]
        assert stdout.strip() == expected
