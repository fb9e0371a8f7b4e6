"""The process and the machine: what is loaded, what is mapped, what runs where."""

from __future__ import annotations

from typing import Any

from conformance.environment import all_devices, current_device
from conformance.kits.aiter import stack
from conformance.kits.run import Context, check
from paged.backends.aiter.contract import ROUTE, TARGETS
from paged.backends.aiter.probe import ARCHITECTURES, BUILD, probe
from paged.backends.aiter.targets import provided


@check("kit/audit/modules")
def modules(context: Context) -> Any:
    """Nothing in the process brings a HIP runtime or an LLVM of its own."""
    if found := stack.forbidden():
        return context.failed(
            f"{', '.join(found)} imported in this process: each brings libraries that clash with those of the "
            f"accelerator plugin, fatally only above one device. Import tokenizers instead of transformers, and run "
            f"without torch and triton."
        )
    return context.passed(len(stack.FORBIDDEN), absent=list(stack.FORBIDDEN))


@check("kit/audit/runtime")
def runtime(context: Context) -> Any:
    """Exactly one HIP runtime on the vendor's device, none elsewhere; the same for RCCL at most one."""
    _ = current_device()  # the plugin maps its runtime with the first device
    native = context.executor.name == "native"
    return judge_runtimes(context, stack.mapped(r"libamdhip64\.so"), stack.mapped(r"librccl\.so"), 1 if native else 0)


def judge_runtimes(context: Context, hip: dict[str, str], rccl: dict[str, str], wanted: int) -> Any:
    """The result for the libraries that are mapped."""
    if len(hip) != wanted:
        return context.failed(
            f"{len(hip)} HIP runtimes are mapped, {wanted} expected: {', '.join(hip) or 'none'}. Streams of one are "
            f"foreign to another; find who loads the second (LD_DEBUG=libs).",
            runtimes=hip,
        )
    if len(rccl) > 1:
        return context.failed(f"{len(rccl)} copies of RCCL are mapped: {', '.join(rccl)}.", rccl=rccl)
    return context.passed(1, runtimes=hip, rccl=rccl)


@check("kit/audit/device")
def device(context: Context) -> Any:
    """The cases run on the platform that the executor says, and on an architecture that the kernels are written for."""
    here = current_device()
    names = {here.platform, here.client.platform}
    if context.executor.name != "native":
        return context.passed(1) if "cpu" in names else context.failed(f"the cases run on {here}, not on a CPU.")
    if "rocm" not in names:
        return context.failed(f"the cases run on {here.client.platform}; start jax with the ROCm plugin.")
    return judge_architectures(context, list(probe().architectures), len(all_devices()))


def judge_architectures(context: Context, found: list[str], devices: int) -> Any:
    """The result for the architectures that the driver lists."""
    wrong = [a for a in found if a not in ARCHITECTURES]
    if wrong or not found:
        return context.failed(f"architectures {found or 'unknown'}; the kernels are for {', '.join(ARCHITECTURES)}.")
    return context.passed(devices, architectures=found)


@check("kit/audit/targets")
def targets(context: Context) -> Any:
    """Every target of the route is registered for the platform, by one provider."""
    there = provided(context.backend.platform)
    if lacking := [name for name in ROUTE if name not in there]:
        return context.failed(f"{', '.join(lacking)} not registered for {context.backend.platform}. Build:\n{BUILD}")
    providers = sorted({there[name].provider for name in ROUTE})
    if len(providers) != 1:
        return context.failed(f"targets come from different providers: {', '.join(providers)}.")
    return context.passed(len(there), provider=providers[0])


@check("kit/abi/decoded")
def decoded(context: Context) -> Any:
    """Each compiled handler decodes calls by the contract, as XLA itself says, without being run."""
    from paged.backends.aiter.decoded import observe

    ids, faults = {}, []
    for name, symbol in symbols(context).items():
        ids[name], differences = observe(TARGETS[name], symbol)
        faults += [
            f"{name}: {d} (it has {ids[name]}, this release calls {TARGETS[name].contract_id})" for d in differences
        ]
    if lacking := [name for name in ROUTE if name not in ids]:
        return context.failed(f"no library of {', '.join(lacking)} was found. Build:\n{BUILD}")
    if faults:
        return context.failed(faults[0], differences=faults, contracts=ids)
    return context.passed(len(ids), contracts=ids)


def symbols(context: Context) -> dict[str, Any]:
    """Target -> its function in the library that serves it."""
    import ctypes

    if hasattr(context.executor, "library"):
        loaded = ctypes.CDLL(str(context.executor.library()))
        return {name: getattr(loaded, name) for name in TARGETS}
    found = {name: report.library for name, report in probe().targets.items() if report.library is not None}
    return {name: getattr(ctypes.CDLL(str(path)), name) for name, path in found.items()}
