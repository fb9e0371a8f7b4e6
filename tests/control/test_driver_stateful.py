"""Random arrivals, lengths, priorities, aborts, failures and pool sizes: every request finishes with the right tokens.

Requests with a certain token fail, and nothing of it is published.
The pool has room for the longest request and up to six pages more, so it is overcommitted most of the time.
`PAGED_EXAMPLES` sets how many runs are tried.
"""

import contextlib
import os

from driver_helpers import VOCABULARY, expected, make_driver, published, run
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from plane_helpers import make_namespace

from paged.control import PinnedShapes

LONGEST = 19  # tokens of a request in the cache
SPACES = {tenant: make_namespace(tenant=tenant) for tenant in "ab"}


class DriverMachine(RuleBasedStateMachine):
    @initialize(
        size=st.sampled_from([1, 2, 3, 4, 8]),
        spare_pages=st.integers(0, 6),
        rows=st.integers(1, 5),
        depth=st.sampled_from([1, 2, 3]),
        budget=st.integers(1, 12),
        how=st.sampled_from([("mixed", True), ("prefill_first", True), ("prefill_first", False), ("pinned", True)]),
        prefixes=st.booleans(),
        bad=st.sampled_from([None, None, VOCABULARY]),
    )
    def build(self, size, spare_pages, rows, depth, budget, how, prefixes, bad):
        self.pinned, shapes = how[0] == "pinned", None
        num_pages = 1 + -(-LONGEST // size) + spare_pages
        if self.pinned:
            budget = max(budget, 4)
            sizes = {"max_rows": rows, "max_tokens": budget, "max_kv_len": size * (num_pages - 1)}
            shapes = PinnedShapes.of(tokens_per_page=size, **sizes)
        self.driver, self.runner = make_driver(
            num_pages,
            size,
            max_requests=rows,
            depth=depth,
            max_step_tokens=budget,
            schedule=None if self.pinned else how[0],
            can_mix=how[1],
            prefixes=prefixes,
            shapes=shapes,
        )
        self.runner.bad = bad
        self.wanted = {}
        self.ended = {}
        self.prompts = []

    @rule(
        prompt=st.lists(st.integers(1, VOCABULARY), min_size=1, max_size=LONGEST),
        like=st.integers(0, 10),
        tenant=st.sampled_from([None, "a", "a", "b"]),
        max_tokens=st.integers(1, LONGEST),
        eos=st.sets(st.integers(1, VOCABULARY), max_size=6),
        priority=st.sampled_from([0, 0, 0, -1, 3]),
        samples=st.sampled_from([1, 1, 2, 4]),
    )
    def submit(self, prompt, like, tenant, max_tokens, eos, priority, samples):
        if like < len(self.prompts):  # begin as an earlier prompt does, or repeat it
            prompt = (self.prompts[like] + prompt)[: max(len(prompt), len(self.prompts[like]))]
        self.prompts.append(prompt)
        namespace = SPACES[tenant] if tenant and self.driver.plane.prefixes is not None else None
        max_tokens = min(max_tokens, LONGEST + 1 - len(prompt))
        options = {"eos": eos, "priority": priority, "namespace": namespace}
        if samples == 1:
            keys = [self.driver.submit(prompt, max_tokens, **options)]
        else:
            keys = [f"{len(self.wanted)}.{i}" for i in range(samples)]
            self.driver.submit_samples(prompt, max_tokens, keys, **options)
        self.wanted |= dict.fromkeys(keys, expected(prompt, max_tokens, eos, self.runner.bad))

    @rule()
    def step(self):
        before = set(self.driver.finished)
        idle = self.driver.idle
        outcome = self.driver.step()
        assert (outcome is None) == idle
        if outcome is not None:
            assert set(outcome.finished) == set(self.driver.finished) - before
            assert len(outcome.batch) == len(outcome.tokens) == len(outcome.query_lens) == len(outcome.cached)
            assert outcome.query_lens.sum() <= self.driver.max_step_tokens

    @precondition(lambda self: self.wanted)
    @rule(data=st.data(), how=st.sampled_from(["abort", "stop"]))
    def end(self, data, how):
        key = data.draw(st.sampled_from(sorted(self.wanted, key=str)))
        done = key in self.driver.finished
        assert getattr(self.driver, how)(key) is not done
        if not done:
            self.ended[key] = how

    @precondition(lambda self: not self.driver.idle)
    @rule(where=st.sampled_from(["fail_dispatch", "fail_collect"]))
    def fail(self, where):
        setattr(self.runner, where, True)
        failures = self.runner.failures
        with contextlib.suppress(ConnectionError):
            self.driver.step()
            assert where == "fail_dispatch"  # every step collects, not every one dispatches
            assert self.runner.failures == failures
        setattr(self.runner, where, False)

    @invariant()
    def parts_agree(self):
        if hasattr(self, "driver"):
            self.driver.verify()
            if self.pinned:
                assert self.driver.counters.preemptions == 0
            assert self.driver.plane.leaked_pages() == 0
            if self.driver.plane.prefixes is not None:
                contents = published(self.driver, self.runner)
                assert not any(self.runner.bad in tokens for tokens in contents)

    def teardown(self):
        if not hasattr(self, "driver"):
            return
        results = run(self.driver)
        assert results.keys() == self.wanted.keys()
        for key, (tokens, reason) in self.wanted.items():
            if key in self.ended:
                assert results[key].reason == self.ended[key]
                assert results[key].tokens == tokens[: len(results[key].tokens)]
            else:
                assert (results[key].tokens, results[key].reason) == (tokens, reason)


TestDriver = DriverMachine.TestCase
TestDriver.settings = settings(
    max_examples=int(os.environ.get("PAGED_EXAMPLES", "30")), stateful_step_count=40, deadline=None
)
