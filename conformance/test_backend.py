"""The one test of `pytest --pyargs conformance --backend NAME`, parametrised over the catalogue by the plugin."""

import dataclasses
import json


def test_case(conformance_case, request):
    """One case of the catalogue on the backend under test."""
    import pytest

    from conformance.plugin import PROPERTY, Run

    (run,) = (p for p in request.config.pluginmanager.get_plugins() if isinstance(p, Run))
    result = run.run(conformance_case)
    request.node.user_properties.append((PROPERTY, json.dumps(dataclasses.asdict(result))))
    if result.status == "not-claimed":
        pytest.skip(f"not claimed: {result.diagnosis}")
    if result.status != "pass":
        pytest.fail(f"{result.status}: {result.diagnosis}", pytrace=False)
