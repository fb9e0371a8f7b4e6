"""Running a model on pages: the pool, one step's inputs, the runtime and a simple generation loop."""

from paged.engine.pool import KvPool as KvPool
