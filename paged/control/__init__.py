"""Who holds which page and who runs next. Standard library and numpy only."""

from paged.control.allocator import PageAllocator as PageAllocator
from paged.control.batch import Slice as Slice
from paged.control.counters import Counters as Counters
from paged.control.driver import Driver as Driver
from paged.control.ladders import ShapeLadders as ShapeLadders
from paged.control.outcome import StepOutcome as StepOutcome
from paged.control.page_map import Handle as Handle
from paged.control.page_map import PageMap as PageMap
from paged.control.plane import ControlPlane as ControlPlane
from paged.control.prefix_index import PrefixIndex as PrefixIndex
from paged.control.requests import Result as Result
from paged.control.reserve import Reservation as Reservation
from paged.control.runner_protocol import RequestId as RequestId
from paged.control.runner_protocol import Step as Step
from paged.control.runner_protocol import StepRunner as StepRunner
from paged.control.shapes import FixedShape as FixedShape
from paged.control.shapes import PinnedShapes as PinnedShapes
from paged.control.shapes import Shapes as Shapes
