"""Market data: bars from a file, features from bars, and training, validation and test splits.

`features` is the name of a module and of its function, so import it from the module:
`from lowgpu.data.features import features`. That module needs TA-Lib, and the bars do not.
"""

from lowgpu.data.bars import Bars, BarsError
from lowgpu.data.csv_reader import read_csv, sample

__all__ = ["Bars", "BarsError", "read_csv", "sample"]
