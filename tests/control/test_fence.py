"""RetirementFence alone; with a plane in test_plane_fence.py."""

import numpy as np
import pytest
from plane_helpers import snapshot

from paged.common import InternalError, InvalidInputError
from paged.control.fence import RetirementFence


def test_a_page_waits_for_the_last_step_that_names_it():
    fence = RetirementFence(6)
    assert fence.dispatch(np.array([1, 2])) == 1
    assert fence.dispatch(np.array([2, 3])) == 2
    assert fence.in_flight(np.array([1, 2, 3, 4])).tolist() == [True, True, True, False]
    fence.hold(np.array([1, 2]))
    assert (fence.num_pending, np.flatnonzero(fence.pending).tolist()) == (2, [1, 2])
    assert fence.retire(1).tolist() == [1]
    assert fence.in_flight(np.array([1, 2, 3])).tolist() == [False, True, True]
    assert fence.retire(2).tolist() == [2]
    assert fence.num_pending == 0
    assert fence.in_flight(np.array([1, 2, 3])).tolist() == [False, False, False]


def test_retiring_a_step_retires_those_before_it():
    fence = RetirementFence(4)
    for page in (1, 2, 3):
        fence.dispatch(np.array([page]))
    fence.hold(np.array([1, 2, 3]))
    assert fence.retire(2).tolist() == [1, 2]
    assert (fence.retired, fence.dispatched) == (2, 3)


def test_retiring_what_is_not_in_flight_is_refused():
    fence = RetirementFence(4)
    with pytest.raises(InvalidInputError, match=r"no step is in flight \(the latest is 0\), got step 1"):
        fence.retire(1)
    fence.dispatch(np.array([1]))
    fence.dispatch(np.array([1]))
    fence.retire(1)
    before = snapshot(fence)
    for step in (1, 3, 0):
        with pytest.raises(InvalidInputError, match=rf"retire.step must be in 2\.\.2, got {step}"):
            fence.retire(step)
    assert snapshot(fence) == before


def test_verify_finds_a_page_that_waits_for_nothing():
    fence = RetirementFence(4)
    fence.dispatch(np.array([2]))
    fence.hold(np.array([2]))
    fence.verify()
    fence._retired = 1
    with pytest.raises(InternalError, match="page 2 waits for a step that has retired"):
        fence.verify()
