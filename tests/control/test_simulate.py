"""The driver on a clock: small runs worked out by hand, and what a report says."""

import dataclasses
import json

import numpy as np
import pytest
from plane_helpers import make_layout, make_plane

from paged.common import InvalidInputError
from paged.control import PrefixIndex
from paged.control import replay as replay_module
from paged.control.cost import CostModel
from paged.control.driver import StepOutcome
from paged.control.replay import beside
from paged.control.simulate import simulate
from paged.control.timeline import Timeline
from paged.control.trace import Arrival, generate_trace, own_ids

ONE_SECOND = CostModel(step_s=1.0, prefill_token_s=0.0, decode_row_s=0.0, kv_token_s=0.0)


def run(trace, cost=ONE_SECOND, num_pages=100, max_requests=4, **options):
    plane = make_plane(num_pages, max_requests=max_requests)
    return simulate(trace, plane, cost, **{"max_step_tokens": 16, **options})


def test_one_request_by_hand():
    report = run([Arrival(2.0, 8, 3)])
    assert report.seconds == 5.0  # two of waiting, a prefill, two decodes
    assert report.busy_s == 3.0
    assert report.time_to_first_token_s == {50: 1.0, 90: 1.0, 99: 1.0, 100: 1.0}
    assert report.between_tokens_s == {50: 1.0, 90: 1.0, 99: 1.0, 100: 1.0}
    assert (report.prompt_tokens, report.generated_tokens, report.finished) == (8, 3, 1)
    assert (report.peak_running, report.mean_running) == (1, 3 / 5)
    assert (report.peak_pages, report.mean_pages) == (3, (2 + 3 + 3) / 5)
    assert report.leaked_pages == report.refused == 0


def test_an_arrival_during_a_step_waits_for_its_end():
    report = run([Arrival(0.0, 4, 3), Arrival(0.25, 4, 1)])
    assert report.counters.steps == 3
    assert report.time_to_first_token_s[100] == 1.75
    assert report.time_to_first_token_s[50] == (1 + 1.75) / 2


def test_every_term_of_the_cost_counts():
    cost = CostModel(step_s=1.0, prefill_token_s=10.0, decode_row_s=100.0, kv_token_s=1000.0)
    report = run([Arrival(0.0, 4, 2)], cost)
    assert report.seconds == (1 + 4 * 10 + 4 * 1000) + (1 + 100 + 5 * 1000)


@pytest.mark.parametrize(("depth", "seconds"), [(1, 5 * 1.5), (2, 0.5 + 5 * 1.0)])
def test_at_depth_2_the_host_works_while_the_device_does(depth, seconds):
    report = run([Arrival(0.0, 4, 5)], dataclasses.replace(ONE_SECOND, host_s=0.5), depth=depth)
    assert report.seconds == seconds


def test_an_overcommitted_pool_finishes_all_and_reports_no_throughput():
    trace = list(generate_trace(60, rate=50.0, mean_prompt=12.0, mean_output=10.0, max_prompt=20, max_output=20))
    tight, roomy = run(trace, num_pages=13), run(trace, num_pages=200)
    assert tight.finished == roomy.finished == 60
    assert tight.generated_tokens == roomy.generated_tokens == sum(a.output_tokens for a in trace)
    assert (tight.counters.preemptions, roomy.counters.preemptions) == (17, 0)
    assert "throughput    not reported: with preemptions" in tight.lines()[-1]
    assert roomy.lines()[-1].endswith("generated tokens a second")
    (told,) = (line.split()[2:] for line in beside({"tight": tight, "roomy": roomy}) if "tokens/s" in line)
    assert told == ["–", f"{roomy.generated_tokens / roomy.seconds:.1f}"]
    assert tight.peak_pages == 12
    assert tight.leaked_pages == roomy.leaked_pages == 0
    # Every token of a prompt is fed once, and what a preemption threw away once more.
    for report in (tight, roomy):
        c = report.counters
        assert c.prefill_tokens + c.decode_tokens == (
            report.prompt_tokens + report.generated_tokens - report.finished + c.recomputed_tokens
        )


def test_requests_that_can_never_fit_are_counted_and_do_not_block():
    report = run([Arrival(0.0, 4, 1), Arrival(0.0, 50, 1), Arrival(0.0, [5, 6, 7], 2)], num_pages=5)
    assert (report.finished, report.refused, report.prompt_tokens, report.generated_tokens) == (2, 1, 7, 3)
    assert "2 finished, 1 refused" in report.lines()[0]


def test_no_ids_are_made_of_a_prompt_that_can_never_fit(monkeypatch):
    made = []
    monkeypatch.setattr(replay_module, "own_ids", lambda number, count: made.append(count) or own_ids(number, count))
    report = run([Arrival(0.0, 17, 1), Arrival(0.0, 16, 1), Arrival(0.0, 3, 15)], num_pages=5)
    assert (report.finished, report.refused, made) == (1, 2, [16])


def test_a_report_is_plain_data_and_an_empty_trace_has_one():
    report = run([])
    assert report.seconds == report.finished == 0
    assert json.loads(json.dumps(report.as_dict()))["counters"]["steps"] == 0
    assert "first token   none" in report.lines()


def test_lengths_of_a_priority_go_through():
    first = run([Arrival(0.0, 4, 9), Arrival(0.0, 4, 9), Arrival(0.0, 4, 1, -1)], max_requests=1)
    assert first.time_to_first_token_s[50] == 2.0  # the third goes first, then the first


def test_prefix_hits_by_hand_and_none_without_an_index():
    shared, apart = list(range(20, 28)), [1] * 6  # two pages of four
    trace = [
        Arrival(0.0, [*shared, 1, 2], 1),
        Arrival(5.0, [*shared, 3], 2),
        Arrival(9.0, apart, 1),
        Arrival(9.5, 6, 1),
    ]
    plane = make_plane(40, prefixes=PrefixIndex(make_layout(40)))
    report = simulate(trace, plane, ONE_SECOND, max_step_tokens=16)
    assert (report.prompt_tokens, report.prefix_tokens) == (10 + 9 + 6 + 6, 8)
    assert report.counters.prefill_tokens == report.prompt_tokens - 8
    assert report.lines()[-2] == "prefix hits   25.8 % of the prompts' tokens"
    assert report.leaked_pages == 0
    cold = run(trace)
    assert (cold.prefix_tokens, cold.counters.prefill_tokens) == (None, 31)
    assert not any("prefix" in line for line in cold.lines())


def outcome(batch, tokens):
    zeros = np.zeros(len(batch), np.int32)
    return StepOutcome(tuple(batch), zeros, zeros, np.array(tokens, np.int32), ())


def test_a_timeline_keeps_times_by_request():
    timeline = Timeline()
    for key in range(100):  # more than its first table holds
        timeline.arrive(key, key / 100)
    both = outcome([7, "b"], [3, -1])
    timeline.arrive("b", 1.0)
    timeline.observe(both, 2.0)
    timeline.observe(both._replace(tokens=np.array([3, 4], np.int32)), 2.5)
    assert dataclasses.astuple(timeline.timing(7)) == (0.07, 2.0, 2.5)
    assert dataclasses.astuple(timeline.timing("b")) == (1.0, 2.5, 2.5)
    assert timeline.time_to_first_token_s.tolist() == np.array([1.93, 1.5], np.float32).tolist()
    assert timeline.between_tokens_s.tolist() == [0.5]
    timeline.forget(7)
    timeline.arrive("c", 8.0)  # in the place that came free: nothing of the former is left
    timeline.arrive(7, 9.0)
    timeline.observe(both, 10.0)
    assert dataclasses.astuple(timeline.timing(7)) == (9.0, 10.0, 10.0)
    assert np.isnan([timeline.timing(8).first_token, timeline.timing("c").first_token]).all()


def test_a_timeline_refuses_what_it_does_not_know():
    timeline = Timeline()
    timeline.arrive("a", 0.0)
    with pytest.raises(InvalidInputError, match="request 'a' has arrived already"):
        timeline.arrive("a", 1.0)
    with pytest.raises(InvalidInputError, match="request 'b' sampled and never arrived"):
        timeline.observe(outcome(["a", "b"], [1, 1]), 1.0)
    with pytest.raises(InvalidInputError, match="request 'c' is not in the table"):
        timeline.forget("c")
