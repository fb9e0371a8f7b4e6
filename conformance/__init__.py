"""Certifies that a backend computes append and attention over pages as `docs/semantics.md` says.

The judge (case, formats, vectors, oracle, bounds, judge, certificate, waivers) imports numpy only, so that it cannot
share a fault with the reference or with jax.
"""
