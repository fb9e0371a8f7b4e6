"""Running a model on pages: the pool, one step's inputs, the runtime, sampling, and the offline engine."""

from paged.engine.generate import Generator as Generator
from paged.engine.namespace import weights_fingerprint as weights_fingerprint
from paged.engine.offline import OfflineEngine as OfflineEngine
from paged.engine.outputs import BatchProgress as BatchProgress
from paged.engine.outputs import Completion as Completion
from paged.engine.outputs import CompletionOutput as CompletionOutput
from paged.engine.outputs import Delta as Delta
from paged.engine.outputs import Interruption as Interruption
from paged.engine.params import SamplingParams as SamplingParams
from paged.engine.parity import Flips as Flips
from paged.engine.parity import Parity as Parity
from paged.engine.parity import count_flips as count_flips
from paged.engine.parity import replay as replay
from paged.engine.pool import KvPool as KvPool
from paged.engine.prepared import PreparedStep as PreparedStep
from paged.engine.runner import DeviceRunner as DeviceRunner
from paged.engine.runner import Token as Token
from paged.engine.runtime import Runtime as Runtime
from paged.engine.trace import Overlap as Overlap
from paged.engine.trace import StepTrace as StepTrace
