"""The page table of Levanter's inference engine, as a view over the pure core.

Plain JAX arrays under the same names; of a named array its `.array` is read.
"""

from swa_jax.compat.levanter.batch_info import PageBatchInfo
from swa_jax.compat.levanter.ids import INVALID, is_invalid, is_valid
from swa_jax.compat.levanter.page_table import PageTable

__all__ = ["INVALID", "PageBatchInfo", "PageTable", "is_invalid", "is_valid"]
