"""Public datasets in their publishers' own formats, and the splits and checks that training needs.

>>> from lipdp import data
>>> train, test, metadata = data.load("digits")
>>> train_part, validation = data.split(train, 0.1)

`load` looks under `root`, else under the folder named by the environment variable LIPDP_DATA, else in the user's
cache folder; what is missing there is downloaded and checked. A dataset is one small file here plus a line in
`registry.py`.
"""

from lipdp.data.checks import require_finite
from lipdp.data.info import Availability, DatasetInfo
from lipdp.data.registry import available, info, load, names
from lipdp.data.splitting import split

__all__ = ["Availability", "DatasetInfo", "available", "info", "load", "names", "require_finite", "split"]
