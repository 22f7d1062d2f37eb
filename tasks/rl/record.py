"""What the parts of this room pass to each other: records, and functions over them.

A transform never changes the record that it is given; where it has nothing to do it returns that very object, and such
a row is written as the bytes it was read as.
"""

from collections.abc import Callable
from typing import Any

from tokenmill.tasks.chat.conversation import Rejected

Record = dict[str, Any]

Transform = Callable[[Record], Record | Rejected]

Check = Callable[[Record], Rejected | None]
"""Why a record cannot be used, or None."""
