"""pyarrow as the processes of tokenmill use it: without pandas.

With its first array, pyarrow imports pandas where that is installed, to recognize its objects: 0.15 s, and tokenmill has none.
It makes one attempt, and a second one only for calls that need pandas, such as `to_pandas`.
"""

import sys
from importlib.abc import MetaPathFinder


class _NoPandas(MetaPathFinder):
    def find_spec(self, fullname: str, path: object, target: object = None) -> None:  # noqa: ARG002 - of Python
        """Raises ImportError for pandas."""
        if fullname == "pandas":
            raise ImportError(fullname)


def set_up_arrow() -> None:
    """Set up pyarrow in a process that runs only this program's code."""
    import pyarrow as pa  # takes 0.1 s, which not every command needs

    finder = _NoPandas()
    sys.meta_path.insert(0, finder)
    try:
        pa.scalar(0)
    finally:
        sys.meta_path.remove(finder)
