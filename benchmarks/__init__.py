"""Measurements. Each module has `add_arguments(parser)`, `run(args) -> figures`, `lines(figures)` and, where a picture
says more than a table, `plot(figures, axes)`; `paged bench NAME` and `python -m benchmarks.NAME` are the same."""
