"""The wall clock of a measured run."""

import time

from paged.engine.measure import WallClock


def test_a_wait_of_any_length_is_one_that_the_operating_system_takes(monkeypatch):
    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)
    clock = WallClock([])
    clock.wait_until(1e300)
    clock.wait_until(-1.0)
    assert slept == [3600.0, 0.0]
