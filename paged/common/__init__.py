"""What every part of `paged` shares. Standard library and numpy only."""

from paged.common.build_table import build_page_table as build_page_table
from paged.common.capabilities import Capabilities as Capabilities
from paged.common.capabilities import NumericModel as NumericModel
from paged.common.capabilities import Range as Range
from paged.common.errors import BackendUnavailableError as BackendUnavailableError
from paged.common.errors import BuildFailedError as BuildFailedError
from paged.common.errors import DirtyPageError as DirtyPageError
from paged.common.errors import DonatedPoolError as DonatedPoolError
from paged.common.errors import InternalError as InternalError
from paged.common.errors import InvalidInputError as InvalidInputError
from paged.common.errors import LateCompileError as LateCompileError
from paged.common.errors import PagedError as PagedError
from paged.common.errors import PoolExhaustedError as PoolExhaustedError
from paged.common.errors import StaleHandleError as StaleHandleError
from paged.common.errors import UnsupportedError as UnsupportedError
from paged.common.errors import UseAfterFreeError as UseAfterFreeError
from paged.common.layout import SENTINEL_PAGE as SENTINEL_PAGE
from paged.common.layout import StorageLayout as StorageLayout
from paged.common.namespace import CacheNamespace as CacheNamespace
from paged.common.page_table import PageTable as PageTable
from paged.common.page_table import pages_for as pages_for
from paged.common.spec import AttentionSpec as AttentionSpec
