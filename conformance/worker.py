"""The process in which a backend runs: it may hang or die, and the supervisor goes on.

Reads one JSON request from stdin and, once it has said who the backend is, a second line with the jobs. Writes JSON
lines to the file descriptor that the request names, and leaves stdout and stderr to whatever the backend prints.
Messages: `preparing` if the backend is to compile what it runs, `hello` (claims, backend, environment), then for each
job `start` and `result`, then `done`; `refused` instead of `hello` if the backend cannot be made.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import os
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from paged.common.errors import BackendUnavailableError, BuildFailedError, InvalidInputError

VIRTUAL_CPU_DEVICES = 8


class NoDeviceError(BackendUnavailableError):
    """There is no such device: an error of the run, never a property of the backend."""


def prepare_jax(device: str | None = None) -> None:
    """Set jax up before its first device is touched: virtual CPU devices for meshes, and a default device if asked.

    `device` is `PLATFORM` or `PLATFORM:INDEX`. Raises `NoDeviceError` if there is none such.
    """
    import jax

    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", VIRTUAL_CPU_DEVICES)
    if device is None:
        return
    platform, _, index = device.partition(":")
    if index and not index.isdigit():
        raise InvalidInputError(f"device must be PLATFORM or PLATFORM:INDEX, got {device!r}.")
    try:
        found = jax.devices(platform)
    except RuntimeError as error:
        raise NoDeviceError(f"no device {device!r}: {error}") from None
    if int(index or 0) >= len(found):
        raise NoDeviceError(f"no device {device!r}: the platform has {len(found)}.")
    jax.config.update("jax_default_device", found[int(index or 0)])


def main() -> int:
    """Serve one request."""
    faulthandler.enable()
    jobs = os.fdopen(os.dup(sys.stdin.fileno()))
    request = json.loads(jobs.readline())
    _empty_stdin()
    with os.fdopen(request["reply"], "w", buffering=1) as reply:
        serve(request, jobs, lambda **message: print(json.dumps(message), file=reply, flush=True))
    return 0


def _empty_stdin() -> None:
    """A backend that reads from stdin finds its end there, instead of the jobs or of waiting for ever."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, sys.stdin.fileno())
    os.close(nothing)


def serve(request: Mapping[str, Any], more: TextIO, send: Callable[..., None]) -> None:
    """Make the backend, say hello, read the jobs and run them: each a case on the backend, or on a mutant of it."""
    from conformance import runner
    from conformance.case import DEVICE
    from conformance.catalogue import case_to_json, parse_case
    from conformance.environment import current_device, introduce, prepare
    from conformance.shrink import shrink
    from conformance.watch import Watch
    from paged.backends.registry import get_backend, list_backends

    name = request["backend"]
    watch = Watch()  # before anything of the backend is imported
    try:
        prepare_jax(request.get("device"))
        known = list_backends()
        if name not in known:
            raise InvalidInputError(f"no backend is registered as {name!r}; known: {', '.join(known)}.")
        executor, given = _executor(name, request.get("executor"))
        backend = get_backend(name, **{**request.get("options", {}), **given})
        if hasattr(backend, "prepare"):
            send(kind="preparing")
            prepare(backend)
    except (InvalidInputError, NoDeviceError, BuildFailedError) as error:
        send(kind="refused", message=str(error), verdict="error")
        return
    except BackendUnavailableError as error:
        send(kind="refused", message=str(error), verdict="not certifiable")
        return
    except Exception as error:
        send(kind="refused", message=runner.describe_error(error), verdict="error")
        return
    try:
        session = runner.Session(backend, watch)
        send(kind="hello", introduction=introduce(backend, name, known[name], executor))
    except Exception as error:
        send(kind="refused", message=runner.describe_error(error), verdict="error")
        return
    device = current_device().device_kind
    jobs = json.loads(more.readline() or "[]")
    threading.Thread(target=_end_with, args=(more,), daemon=True).start()
    for job in jobs:
        send(kind="start", key=job["key"])
        if job.get("kit"):
            from conformance.kits import run as kits

            result = kits.run(name, kits.Context(job["key"], session, executor))
            send(kind="result", key=job["key"], result=dataclasses.asdict(result))
            continue
        case = parse_case(job["case"], "request")
        if job.get("mutant"):
            from conformance import faults

            result = runner.Session(faults.broken(job["mutant"], backend), watch).run(case)
        elif job.get("shrink"):
            smallest = shrink(case, job["shrink"], session.run)
            result = dataclasses.replace(session.run(smallest), details={"case": case_to_json(smallest)})
        else:
            result = session.run(case)
        result = dataclasses.replace(result, details={**result.details, DEVICE: device})
        send(kind="result", key=job["key"], result=dataclasses.asdict(result))
    send(kind="done")


def _executor(name: str, request: Mapping[str, Any] | None) -> tuple[Any, Mapping[str, Any]]:
    """The executor of a request, started, and the options that it has for the backend's factory."""
    if request is None:
        return None, {}
    from conformance.executors import make_executor

    executor = make_executor(request["name"], name, request.get("options", {}))
    return executor, executor.start()


def _end_with(more: TextIO) -> None:
    """End this process when the supervisor does, whatever a kernel is doing: nobody would read the result."""
    more.read()
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
