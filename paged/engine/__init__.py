"""Running a model on pages: the pool, one step's inputs, the runtime and a simple generation loop."""

from paged.engine.generate import Completion as Completion
from paged.engine.generate import Generator as Generator
from paged.engine.parity import Parity as Parity
from paged.engine.parity import replay as replay
from paged.engine.pool import KvPool as KvPool
from paged.engine.runner import DeviceRunner as DeviceRunner
from paged.engine.runner import Token as Token
from paged.engine.runtime import PreparedStep as PreparedStep
from paged.engine.runtime import Runtime as Runtime
